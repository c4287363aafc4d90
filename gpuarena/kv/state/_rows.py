"""A `KVCache`, all of whose rows hold the same tokens, in files and on other arenas."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from gpuarena.arena import Arena
from gpuarena.errors import ArgumentError
from gpuarena.kv.state import _transfer
from gpuarena.kv.state._pieces import Mover, Parts
from gpuarena.kv.state._saved import ROWS, SavedState, user_metadata

if TYPE_CHECKING:
    from gpuarena.kv.linear import KVCache


def save_cache(cache: KVCache, path: Any, metadata: Any, progress: Any) -> None:
    """Write a cache to a file; see `KVCache.save`."""
    state, mover = _state(cache, metadata), Mover(cache.arena)
    _transfer.save(path, cache.arena, state, _parts(cache, state, mover), mover, progress)


def load_cache(
    kind: type[KVCache], path: Any, arena: Arena, spec: Any, batch: Any, max_tokens: Any, progress: Any
) -> KVCache:
    """Return a cache on `arena` that holds what a file does; see `KVCache.load`."""
    sizes = {"batch": batch, "max_tokens": max_tokens}
    cache: KVCache = _transfer.load(kind, _take_over, ROWS, path, arena, spec, progress, **sizes)
    return cache


def restore_cache(cache: KVCache, path: Any, progress: Any) -> None:
    """Let a cache hold what a file does; see `KVCache.restore`."""
    _check_live(cache)
    _transfer.restore(cache, _take_over, ROWS, path, progress, cache.batch, cache.max_tokens)


def copy_cache(
    cache: KVCache, arena: Arena, *, batch: Any = None, max_tokens: Any = None, layout: str = "auto"
) -> KVCache:
    """Return a cache on `arena` that holds what `cache` does; see `KVCache.copy_to`."""
    _transfer.check_arena(arena, "copy_to")
    _transfer.check_arena(cache.arena, "copy_to")
    state = _state(cache, None)
    wanted = {"batch": batch, "max_tokens": max_tokens}
    sizes = _transfer.new_sizes(arena, state, _copy_error, wanted)
    with ExitStack() as undo:
        undo.callback(arena.rollback, arena.checkpoint())
        copy = type(cache)(arena, cache.spec, layout=layout, rings=cache.rings and arena.grows, **sizes)
        source, target = Mover(cache.arena), Mover(arena)
        theirs, mine = _take_over(copy, state, target), _parts(cache, state, source)
        for tensor, _ in state.places():
            for (_, array, key), (_, other, place) in zip(
                mine(tensor.name), theirs(tensor.name), strict=True
            ):
                is_same = source.library == target.library
                target.put(other, place, array[key] if is_same else source.take(array, key))
        undo.pop_all()
    copy._common.n_shared = cache._common.n_shared
    return copy


def _copy_error(message: str, **figures: Any) -> ArgumentError:
    return ArgumentError(f"copy_to: {message}", **figures)


def _check_live(cache: KVCache) -> None:
    for layer in cache._owned:
        layer.check_live()


def _state(cache: KVCache, metadata: Any) -> SavedState:
    """Return what a cache holds."""
    _check_live(cache)
    by_index = {layer.index: layer for layer in cache._owned}
    return SavedState(
        kind=ROWS,
        spec=cache.spec,
        batch=cache.batch,
        max_tokens=cache.max_tokens,
        rows=cache.rows,
        held=tuple(tuple(by_index[number].positions) for number, _ in cache.spec.owned),
        metadata=user_metadata(metadata),
    )


def _parts(cache: KVCache, state: SavedState, mover: Mover) -> Parts:
    planes = {layer.index: [plane for _, plane in layer.filled()] for layer in cache._owned}
    return mover.parts({tensor.name: planes[layer][plane] for tensor, (_, layer, plane) in state.places()})


def _take_over(cache: KVCache, state: SavedState, mover: Mover) -> Parts:
    """Let a cache hold other tokens, whose keys and values are written next; unchanged on error."""
    held = dict(zip((number for number, _ in state.spec.owned), state.held, strict=True))
    for layer in cache._owned:
        layer.make_room(held[layer.index][-1].stop)
    cache.reset()
    common = cache._common
    common.rows = state.rows
    for layer in cache._owned:
        layer._hold(held[layer.index])
    common.high_water = max(common.high_water, *common.lengths)
    return _parts(cache, state, mover)
