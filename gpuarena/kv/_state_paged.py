"""Sequences of a `PagedKVCache` in files."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuarena.errors import ArgumentError
from gpuarena.kv import _state_bytes
from gpuarena.kv._state_bytes import Carrier, carrier_for, nbytes_of, pieces
from gpuarena.kv._state_checks import refuse_capture
from gpuarena.kv._state_file import Progress, Reader, as_path
from gpuarena.kv._state_header import Header, check_spec, user_metadata
from gpuarena.kv._state_sequences import KIND, Plane, read_sequences, saved_sequences, write_sequences

if TYPE_CHECKING:
    from gpuarena.kv.paged import PagedKVCache
    from gpuarena.kv.paged._sequence import Sequence

__all__ = ["load_sequences", "save_sequences"]

Callback = Callable[[int, int], object]


def save_sequences(
    cache: PagedKVCache,
    path: Any,
    sequences: Iterable[Sequence],
    *,
    metadata: Any = None,
    progress: Callback | None = None,
) -> None:
    """Write sequences of a paged cache to a file, token by token and without page numbers.

    What is published is not saved, nor is the salt. Parameters and errors are those of `KVCache.save`; also

    Raises
    ------
    SequenceError, LayerOrderError
        A sequence is freed, swapped out, of another cache, or part of a step or an append under way.
    """
    name, report, texts = as_path(path), Progress(progress), user_metadata(metadata)
    core = cache._core
    found = core.check_sequences(sequences)
    for sequence in found:
        sequence._check_idle("save")
    core.check_live()
    refuse_capture(cache.arena, "save")
    positions = [[(0, sequence.length)] if sequence.length else [] for sequence in found]
    carrier = carrier_for(cache.arena)
    longest = max((sequence.length for sequence in found), default=0)
    plane = _page_plane(cache, carrier, found, is_written=False)
    write_sequences(name, cache.spec, positions, max(1, longest), plane, carrier, texts, report)


def load_sequences(
    cache: PagedKVCache, path: Any, *, salt: Hashable = None, progress: Callback | None = None
) -> list[Sequence]:
    """Return new sequences of a paged cache that hold those of a file, all or none.

    The file is read twice, at first to see whether it is whole. Parameters and errors are those of
    `KVCache.restore`; also

    Raises
    ------
    CapacityError
        Too few pages are free or cached; figures in pages. Unchanged on error.
    ArgumentError
        Also for tokens whose positions have gaps, as lanes can have them.
    """
    report, core = Progress(progress), cache._core
    core.check_live()
    refuse_capture(cache.arena, "load")
    made: list[Sequence] = []
    with Reader(as_path(path), report) as reader:
        saved = saved_sequences(reader, Header(reader, KIND))
        check_spec(reader.path, saved.spec, cache.spec)
        for number, (runs, length) in enumerate(zip(saved.positions, saved.lengths, strict=True)):
            if runs and runs[-1].stop != length:
                raise ArgumentError(
                    f"{reader.path}: the positions of sequence {number} are no range from 0 on, as those of a paged "
                    f"cache are; load it into a LaneCache",
                    path=reader.path,
                    field="positions",
                )
        needed = sum(-(-length // cache.page_size) for length in saved.lengths)
        if needed > cache.available:
            raise core.pool.capacity_error(f"load of {sum(saved.lengths)} tokens", needed)
        report.total_nbytes = 2 * reader.nbytes
        reader.verify()
        try:
            for length in saved.lengths:
                made.append(cache.sequence(salt=salt))
                made[-1]._pages.append(length)
            carrier = carrier_for(cache.arena)
            read_sequences(reader, saved, _page_plane(cache, carrier, made, is_written=True), carrier)
            report.finish()
        except BaseException:
            for sequence in made:
                sequence.free()
            raise
    return made


def _page_plane(
    cache: PagedKVCache, carrier: Carrier, sequences: list[Sequence], *, is_written: bool
) -> Plane:
    core, page_size = cache._core, cache.page_size

    def plane(sequence: int, layer: int, which: int) -> Iterator[Any]:
        pages, length = sequences[sequence].pages, sequences[sequence].length
        pool = core.layers[layer].pools[0 if which == 0 else -1]
        # [kv_heads, pages, page_size, dim * itemsize]
        by_head = carrier.bytes_of(pool.by_head[0 if which == 0 else -1])
        page_nbytes = nbytes_of(by_head[0, 0])
        at_once = max(1, _state_bytes.STAGING_NBYTES // page_nbytes)
        n_full = length // page_size
        for head in range(by_head.shape[0]):
            view = by_head[head]
            for start in range(0, n_full, at_once):
                index = core.ops.index(np.array(pages[start : min(start + at_once, n_full)], np.int64))
                gathered = view[index]
                yield from pieces(gathered)
                if is_written:
                    view[index] = gathered
            if length % page_size:
                yield from pieces(view[pages[-1], : length % page_size])

    return plane
