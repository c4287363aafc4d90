"""What an arena says of itself, and when it refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuarena import _bump
from gpuarena._units import format_nbytes
from gpuarena.errors import (
    ArenaClosedError,
    ArenaError,
    ArgumentTypeError,
    CheckpointError,
    ForkedError,
    OutOfMemoryError,
    StaleRegionError,
)

if TYPE_CHECKING:
    from gpuarena._stack import Stack
    from gpuarena.arena import Arena
    from gpuarena.checkpoint import Checkpoint
    from gpuarena.region import Region

#: Labels listed in a message about missing memory.
_N_LABELS = 5


def describe(arena: Arena) -> str:
    """Return the repr of an arena."""
    name = f" {arena.name!r}" if arena.name else ""
    stats = arena.stats
    state = f"{stats.top + stats.capacity - stats.high} of {arena.capacity} bytes, {stats.n_regions} regions"
    return f"<Arena{name} on {arena.backend}/{arena.device}: {'closed' if arena.closed else state}>"


def closed(arena: Arena, action: str) -> ArenaError:
    """Return the error for a call on an arena that is closed, whatever closed it."""
    name = f" {arena.name!r}" if arena.name else ""
    if arena._forked:
        return ForkedError(
            f"{action}: arena{name} holds memory on {arena.device}, which a forked child cannot reach; make the "
            f"arena in the child, or start it with the 'spawn' method"
        )
    if arena._cause_of_death is not None:
        return ArenaClosedError(
            f"{action}: arena{name} lay in a region that was given back by {arena._cause_of_death}"
        )
    return ArenaClosedError(f"{action}: arena{name} is closed")


def _cause(arena: Arena, side: str, slot: int, serial: int) -> str:
    """Say which rollback dropped the region that had `serial` at `slot`."""
    for cause in arena._causes:
        if cause.side == side and cause.n_live <= slot and serial < cause.serial_limit:
            return f"{cause}, or by an earlier one" if serial < arena._forgotten_limit else str(cause)
    return "a rollback too long ago to be remembered"


def dead_checkpoint(arena: Arena, checkpoint: Checkpoint, action: str) -> ArenaError:
    """Return the error for a checkpoint that cannot be used: closed, foreign, reset, kept or passed by."""
    if arena._closed:
        return closed(arena, action)
    if checkpoint._token is not arena._token:
        return CheckpointError(f"{action}: the checkpoint belongs to another arena than {arena!r}")
    if checkpoint._epoch != arena._epoch:
        return CheckpointError(f"{action}: the checkpoint was taken before reset(), which killed it")
    if checkpoint._kept is not None:
        return CheckpointError(f"{action}: the checkpoint was given up by keep() at {checkpoint._kept}")
    return CheckpointError(
        f"{action} out of order: the arena was rolled back below this checkpoint, to before its "
        f"{checkpoint._n_live} regions, by "
        f"{_cause(arena, checkpoint.side, checkpoint._n_live - 1, checkpoint._serial)}"
    )


def no_checkpoint(value: object, action: str) -> ArgumentTypeError:
    """Return the error for something that is no checkpoint."""
    return ArgumentTypeError(f"{action} takes a Checkpoint, not {type(value).__name__}")


def stale(region: Region) -> ArenaError:
    """Return the error for a region that is stale."""
    arena = region._arena
    what = region._describe()
    if arena._forked:
        return closed(arena, what)
    if arena._closed:
        how = f"by {arena._cause_of_death}" if arena._cause_of_death is not None else ""
        return StaleRegionError(f"{what} is stale: its arena was closed{how and ' ' + how}", region=region)
    with arena._lock:
        cause = _cause(arena, region._stack.side, region._slot, region._serial)
    return StaleRegionError(
        f"{what} is stale: its memory was given back by {cause} and may hold other data; "
        f"allocate it outside that scope, or copy what you need before",
        region=region,
    )


def out_of_memory(
    arena: Arena, stack: Stack, nbytes: int, offset: int, label: str | None, align: int
) -> OutOfMemoryError:
    """Return the error for a request that does not fit, with what holds the memory and what can be done."""
    low, high = arena._low.top, arena._high.top
    available = high - low
    if stack.side == "low":
        missing, padding = offset + nbytes - high, offset - low
    else:
        missing, padding = low - offset, high - offset - nbytes
    larger = missing
    if stack.side == "high" or high < arena.capacity:
        # The high end moves with the capacity, and keeps its alignment only by whole steps.
        larger = _bump.align_up(missing, max(align, arena.alignment))
    labels = arena.by_label()
    holders = sorted(((size, name) for name, size in labels.items() if size), key=lambda pair: -pair[0])
    lines = [
        f"{format_nbytes(nbytes)} requested{f' for {label!r}' if label else ''}, {format_nbytes(available)} "
        f"available of {format_nbytes(arena.capacity)}; {format_nbytes(missing)} missing, alignment included "
        f"({padding} bytes)."
    ]
    if holders:
        shown = ", ".join(f"{name or 'no label'} {format_nbytes(size)}" for size, name in holders[:_N_LABELS])
        rest = sum(size for size, _ in holders[_N_LABELS:])
        lines.append(f"Held by: {shown}{f', others {format_nbytes(rest)}' if rest else ''}.")
    taken = arena.capacity - available
    used = sum(labels.values())
    if taken > used:
        lines.append(f"Between regions: {format_nbytes(taken - used)}.")
    lines.append(_advice(arena, stack, nbytes, larger))
    return OutOfMemoryError(
        " ".join(lines),
        requested=nbytes,
        aligned_offset=offset,
        available=available,
        capacity=arena.capacity,
        missing=missing,
        label=label,
    )


def _advice(arena: Arena, stack: Stack, nbytes: int, by: int) -> str:
    larger = f"Make the arena larger by at least {format_nbytes(by)}"
    if nbytes > arena.capacity:
        return f"{larger}: no rollback makes room for this."
    scopes = [scope for scope in arena._scopes if scope.side == stack.side]
    if not scopes:
        return f"{larger}, or roll back what is no longer needed: no scope is open."
    start = scopes[-1]._checkpoint
    assert start is not None, "an open scope has a checkpoint"
    frees = abs(stack.top - start.top)
    return f"{larger}, or roll back what is no longer needed: the end of {scopes[-1]!r} frees {format_nbytes(frees)}."
