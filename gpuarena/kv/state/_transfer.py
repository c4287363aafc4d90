"""Saving, loading and restoring, as it is the same for all kinds of caches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from gpuarena import _messages
from gpuarena.arena import Arena
from gpuarena.errors import ArgumentTypeError, CaptureError
from gpuarena.kv.spec import positive
from gpuarena.kv.state._pieces import Mover, Parts
from gpuarena.kv.state._reader import StateReader
from gpuarena.kv.state._saved import SavedState, read_saved
from gpuarena.kv.state._writer import Progress, as_path, write_file

#: Called with an empty cache, what it is to hold, and a mover: takes over the tokens, and returns where their bytes go.
TakeOver = Callable[[Any, SavedState, Mover], Parts]


def check_arena(arena: Any, action: str) -> None:
    """Raise unless `arena` is one, whose bytes can be looked at now."""
    if not isinstance(arena, Arena):
        raise ArgumentTypeError(f"{action} takes an Arena, not {type(arena).__name__}")
    if arena._captures():
        raise CaptureError(f"{action} waits for the device, which a graph that is being captured cannot")


def new_sizes(arena: Arena, saved: SavedState, error: Any, sizes: dict[str, Any]) -> dict[str, int]:
    """Return the sizes of a cache that is to hold `saved`, or raise unless it can and the arena has room for it.

    `sizes` are rows or lanes, under the name that the cache has for them, and ``max_tokens``; None takes what was saved.
    """
    by_default = (saved.batch, saved.max_tokens)
    found = {
        name: size if given is None else positive(given, name)
        for size, (name, given) in zip(by_default, sizes.items(), strict=True)
    }
    saved.check_fits(error, *found.values())
    # A file may tell of any size: that is found here, before tables of that length are made for it.
    needed = saved.spec.nbytes(*found.values())
    if needed > arena.stats.available:
        low = arena._low
        raise _messages.out_of_memory(arena, low, needed, low.top, "keys and values", arena.alignment)
    return found


def save(path: Any, arena: Arena, state: SavedState, parts: Parts, mover: Mover, progress: Any) -> None:
    """Write a file of what a cache on `arena` holds."""
    check_arena(arena, "save")
    tensors = [tensor for tensor, _ in state.places()]
    write_file(as_path(path), tensors, state.texts(), parts, mover, Progress(progress))


def load(
    make: Callable[..., Any],
    take_over: TakeOver,
    kind: str,
    path: Any,
    arena: Arena,
    spec: Any,
    progress: Any,
    **sizes: Any,
) -> Any:
    """Return a new cache on `arena` that holds what a file does."""
    report = Progress(progress)
    check_arena(arena, "load")
    with StateReader(path, arena.backend) as reader, ExitStack() as undo:
        saved = read_saved(reader, kind, spec=spec)
        found = new_sizes(arena, saved, reader.error, sizes)
        undo.callback(arena.rollback, arena.checkpoint())
        cache, mover = make(arena, saved.spec, **found), Mover(arena)
        reader.fill(take_over(cache, saved, mover), mover, report)
        undo.pop_all()
    return cache


def restore(cache: Any, take_over: TakeOver, kind: str, path: Any, progress: Any, *sizes: int) -> None:
    """Let a cache of these sizes hold what a file does, or nothing if that cannot be read to its end."""
    report, mover = Progress(progress), Mover(cache.arena)
    check_arena(cache.arena, "restore")
    with StateReader(path, cache.arena.backend) as reader, ExitStack() as undo:
        saved = read_saved(reader, kind, spec=cache.spec)
        saved.check_fits(reader.error, *sizes)
        parts = take_over(cache, saved, mover)
        undo.callback(cache.reset)
        reader.fill(parts, mover, report)
        undo.pop_all()
