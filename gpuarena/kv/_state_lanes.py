"""The lanes of a `LaneCache` in files of sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuarena.arena import Arena
from gpuarena.errors import ArgumentTypeError, CapacityError, ShapeError
from gpuarena.kv._state_bytes import Carrier, carrier_for, pieces
from gpuarena.kv._state_checks import check_memory, refuse_capture
from gpuarena.kv._state_file import Progress, Reader, as_path
from gpuarena.kv._state_header import Header, check_spec, user_metadata
from gpuarena.kv._state_sequences import (
    KIND,
    Plane,
    SavedSequences,
    read_sequences,
    saved_sequences,
    write_sequences,
)
from gpuarena.kv.spec import KVSpec, positive

if TYPE_CHECKING:
    from gpuarena.kv.lanes import LaneCache

__all__ = ["load_lanes", "restore_lanes", "save_lanes"]

Callback = Callable[[int, int], object]


def save_lanes(
    cache: LaneCache, path: Any, *, metadata: Any = None, progress: Callback | None = None
) -> None:
    """Write all lanes of a cache to a file, filled tokens alone, with their positions.

    Parameters and errors are those of `KVCache.save`; also

    Raises
    ------
    LayerOrderError
        A step is under way.
    """
    name, report, texts = as_path(path), Progress(progress), user_metadata(metadata)
    cache._store.check()
    cache._table.need_idle("save")
    refuse_capture(cache.arena, "save")
    positions = [_runs_of(cache.positions(lane)) for lane in range(cache.n_lanes)]
    carrier = carrier_for(cache.arena)
    plane = _lane_plane(cache, carrier, cache.lengths)
    write_sequences(name, cache.spec, positions, cache.max_tokens, plane, carrier, texts, report)


def load_lanes(
    kind: type[LaneCache],
    path: Any,
    arena: Arena,
    *,
    spec: KVSpec | None = None,
    lanes: int | None = None,
    max_tokens: int | None = None,
    progress: Callback | None = None,
) -> LaneCache:
    """Return a new cache on `arena` whose first lanes hold the sequences of a file.

    Parameters and errors are those of `KVCache.load`, with `lanes` for its `batch`: by default as many as there are.
    """
    report = Progress(progress)
    if not isinstance(arena, Arena):
        raise ArgumentTypeError(f"arena must be an Arena, not {type(arena).__name__}")
    refuse_capture(arena, "load")
    with Reader(as_path(path), report) as reader:
        saved = saved_sequences(reader, Header(reader, KIND))
        if spec is not None:
            check_spec(reader.path, saved.spec, spec)
        n_lanes = max(1, len(saved.lengths)) if lanes is None else positive(lanes, "lanes")
        n_tokens = saved.max_tokens if max_tokens is None else positive(max_tokens, "max_tokens")
        _check_lanes(reader, saved, n_lanes, n_tokens)
        # Before a table of positions of that size is made on the host.
        check_memory(arena, saved.spec.nbytes(n_lanes, n_tokens), f"{n_lanes} lanes of {n_tokens} tokens")
        start = arena.checkpoint()
        try:
            cache = kind(arena, saved.spec, lanes=n_lanes, max_tokens=n_tokens)
            report.total_nbytes = reader.nbytes
            _fill_lanes(cache, reader, saved)
            report.finish()
        except BaseException:
            arena.rollback(start)
            raise
    return cache


def restore_lanes(cache: LaneCache, path: Any, *, progress: Callback | None = None) -> None:
    """Let the lanes of a cache hold the sequences of a file instead of what they hold; checkpoints die.

    Lane K holds sequence K, lanes behind them are empty. Parameters and errors are those of `KVCache.restore`: all is
    checked first, and if the second reading fails, the cache is empty. A step under way is abandoned.
    """
    report = Progress(progress)
    cache._store.check()
    refuse_capture(cache.arena, "restore")
    with Reader(as_path(path), report) as reader:
        saved = saved_sequences(reader, Header(reader, KIND))
        check_spec(reader.path, saved.spec, cache.spec)
        _check_lanes(reader, saved, cache.n_lanes, cache.max_tokens)
        report.total_nbytes = 2 * reader.nbytes
        reader.verify()
        cache.reset()
        try:
            _fill_lanes(cache, reader, saved)
            report.finish()
        except BaseException:
            cache.reset()
            raise


def _runs_of(positions: np.ndarray[Any, Any]) -> list[tuple[int, int]]:
    """Return the runs of ascending positions."""
    if not len(positions):
        return []
    ends = np.flatnonzero(np.diff(positions) != 1) + 1
    parts = np.split(positions, ends)
    return [(int(part[0]), int(part[-1]) + 1) for part in parts]


def _check_lanes(reader: Reader, saved: SavedSequences, lanes: int, max_tokens: int) -> None:
    if len(saved.lengths) > lanes:
        raise ShapeError(
            f"{reader.path}: {len(saved.lengths)} sequences are in the file, the cache has {lanes} lanes",
            path=reader.path,
            field="lanes",
            found=len(saved.lengths),
            wanted=lanes,
        )
    length = max(saved.lengths, default=0)
    if length > max_tokens:
        raise CapacityError(
            f"{reader.path}: a sequence of {length} tokens is in the file, a lane has room for {max_tokens}, "
            f"{length - max_tokens} too many; make the cache for at least {length} tokens",
            used=0,
            requested=length,
            capacity=max_tokens,
            available=max_tokens,
            missing=length - max_tokens,
            aligned_offset=0,
            label=None,
        )


def _lane_plane(cache: LaneCache, carrier: Carrier, lengths: tuple[int, ...]) -> Plane:
    layers = cache._store.layers

    def plane(lane: int, layer: int, which: int) -> Iterator[Any]:
        buffer = layers[layer].buffers()[which]
        return pieces(carrier.bytes_of(buffer[lane, :, : lengths[lane]]))

    return plane


def _fill_lanes(cache: LaneCache, reader: Reader, saved: SavedSequences) -> None:
    """Fill an empty cache."""
    table, store, carrier = cache._table, cache._store, carrier_for(cache.arena)
    for layer in store.layers.values():
        for lane, length in enumerate(
            saved.lengths
        ):  # before they are written: they have to be zeroed some day
            layer.used[lane] = max(layer.used[lane], length)
    read_sequences(reader, saved, _lane_plane(cache, carrier, saved.lengths), carrier)
    for lane, runs in enumerate(saved.positions):
        if runs:
            positions = np.concatenate([np.arange(run.start, run.stop) for run in runs])
            table._positions[lane, : len(positions)] = positions
            table.lengths[lane] = len(positions)
    table.high_water = max(table.high_water, *table.lengths)
    store.publish(table.lengths)
