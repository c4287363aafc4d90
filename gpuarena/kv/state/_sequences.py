"""The lanes of a `LaneCache`, and sequences of a `PagedKVCache`, in files that both of them read."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuarena.arena import Arena
from gpuarena.kv.state import _pieces, _transfer
from gpuarena.kv.state._pieces import Mover, Part, Parts
from gpuarena.kv.state._reader import StateReader
from gpuarena.kv.state._saved import SEQUENCES, Runs, SavedState, read_saved, user_metadata
from gpuarena.kv.state._writer import Progress

if TYPE_CHECKING:
    from gpuarena.kv.lanes import LaneCache
    from gpuarena.kv.paged import PagedKVCache
    from gpuarena.kv.paged._sequence import Sequence

# -- lanes ------------------------------------------------------------------------------------------------------------


def save_lanes(cache: LaneCache, path: Any, metadata: Any, progress: Any) -> None:
    """Write all lanes of a cache to a file; see `LaneCache.save`."""
    cache._store.check()
    cache._table.need_idle("save")
    state = SavedState(
        kind=SEQUENCES,
        spec=cache.spec,
        batch=cache.n_lanes,
        max_tokens=cache.max_tokens,
        held=tuple(_runs_of(cache.positions(lane)) for lane in range(cache.n_lanes)),
        metadata=user_metadata(metadata),
    )
    mover = Mover(cache.arena)
    _transfer.save(path, cache.arena, state, _lane_parts(cache, state, mover), mover, progress)


def load_lanes(
    kind: type[LaneCache], path: Any, arena: Arena, spec: Any, lanes: Any, max_tokens: Any, progress: Any
) -> LaneCache:
    """Return a cache on `arena` whose first lanes hold the sequences of a file; see `LaneCache.load`."""
    sizes = {"lanes": lanes, "max_tokens": max_tokens}
    cache: LaneCache = _transfer.load(kind, _take_over, SEQUENCES, path, arena, spec, progress, **sizes)
    return cache


def restore_lanes(cache: LaneCache, path: Any, progress: Any) -> None:
    """Let the lanes of a cache hold the sequences of a file; see `LaneCache.restore`."""
    cache._store.check()
    _transfer.restore(cache, _take_over, SEQUENCES, path, progress, cache.n_lanes, cache.max_tokens)


def _runs_of(positions: np.ndarray[Any, Any]) -> Runs:
    """Return the runs of ascending positions."""
    ends = np.flatnonzero(np.diff(positions) != 1) + 1
    return tuple(range(int(run[0]), int(run[-1]) + 1) for run in np.split(positions, ends) if len(run))


def _lane_parts(cache: LaneCache, state: SavedState, mover: Mover) -> Parts:
    layers = cache._store.layers
    return mover.parts(
        {
            tensor.name: layers[layer].buffers()[plane][lane, :, : tensor.shape[1]]
            for tensor, (lane, layer, plane) in state.places()
        }
    )


def _take_over(cache: LaneCache, state: SavedState, mover: Mover) -> Parts:
    """Let the lanes hold other tokens, whose keys and values are written next."""
    cache.reset()
    table, store = cache._table, cache._store
    for lane, (runs, length) in enumerate(zip(state.held, state.lengths, strict=True)):
        for layer in store.layers.values():
            layer.used[lane] = max(layer.used[lane], length)
        table._positions[lane, :length] = [position for run in runs for position in run]
        table.lengths[lane] = length
    table.high_water = max(table.high_water, *table.lengths)
    store.publish(table.lengths)
    return _lane_parts(cache, state, mover)


# -- pages ------------------------------------------------------------------------------------------------------------


def save_sequences(
    cache: PagedKVCache, path: Any, sequences: Iterable[Sequence], metadata: Any, progress: Any
) -> None:
    """Write sequences of a paged cache to a file; see `PagedKVCache.save`."""
    found = cache._core.check_sequences(sequences)
    for sequence in found:
        sequence._check_idle("save")
    cache._core.check_live()
    state = SavedState(
        kind=SEQUENCES,
        spec=cache.spec,
        batch=max(1, len(found)),
        max_tokens=max([1, *(sequence.length for sequence in found)]),
        held=tuple((range(sequence.length),) for sequence in found),
        metadata=user_metadata(metadata),
    )
    mover = Mover(cache.arena)
    _transfer.save(path, cache.arena, state, _page_parts(cache, found, state, mover), mover, progress)


def load_sequences(cache: PagedKVCache, path: Any, salt: Hashable, progress: Any) -> list[Sequence]:
    """Return new sequences that hold those of a file, all or none; see `PagedKVCache.load`."""
    report, core, mover = Progress(progress), cache._core, Mover(cache.arena)
    core.check_live()
    _transfer.check_arena(cache.arena, "load")
    made: list[Sequence] = []
    with StateReader(path, cache.arena.backend) as reader, ExitStack() as undo:
        saved = read_saved(reader, SEQUENCES, spec=cache.spec)
        for number, (runs, length) in enumerate(zip(saved.held, saved.lengths, strict=True)):
            if runs and runs[-1].stop != length:
                raise reader.error(
                    f"the positions of sequence {number} are no range from 0 on, as those of a paged cache are; load "
                    f"it into a LaneCache",
                    field="held",
                )
        needed = sum(-(-length // cache.page_size) for length in saved.lengths)
        if needed > cache.available:
            raise core.pool.capacity_error(f"load of {sum(saved.lengths)} tokens", needed)
        for length in saved.lengths:
            made.append(cache.sequence(salt=salt))
            undo.callback(made[-1].free)
            made[-1]._pages.append(length)
        reader.fill(_page_parts(cache, made, saved, mover), mover, report)
        undo.pop_all()
    return made


def _page_parts(cache: PagedKVCache, sequences: list[Sequence], state: SavedState, mover: Mover) -> Parts:
    core, page_size = cache._core, cache.page_size
    places = {tensor.name: place for tensor, place in state.places()}

    def parts(name: str) -> Iterator[Part]:
        number, layer, plane = places[name]
        length, pages = sequences[number].length, np.array(sequences[number].pages, np.int64)
        pool = core.layers[layer].pools[-plane]  # 0 is the first, of keys; -1 the last, of values
        if pool.dim == 0:
            return
        array = mover.bytes_of(pool.by_head[-plane])  # [kv_heads, pages, page_size, dim * itemsize]
        at_once = max(
            1, _pieces.PIECE_NBYTES // (array.shape[-1] + 16)
        )  # two numbers are the index of a token
        for head in range(array.shape[0]):
            for start in range(0, length, at_once):
                tokens = np.arange(start, min(start + at_once, length))
                slots = [core.ops.index(n) for n in (pages[tokens // page_size], tokens % page_size)]
                yield (head, slice(start, start + len(tokens))), array, (head, *slots)

    return parts
