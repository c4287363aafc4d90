"""What is looked at before an arena is read or taken of."""

from __future__ import annotations

from gpuarena._units import format_nbytes
from gpuarena.arena import Arena
from gpuarena.errors import CaptureError, OutOfMemoryError

__all__ = ["check_memory", "refuse_capture"]


def refuse_capture(arena: Arena, action: str) -> None:
    """Raise `CaptureError` while a graph is being captured."""
    if arena._captures():
        raise CaptureError(f"{action} waits for the device, which a graph that is being captured cannot")


def check_memory(arena: Arena, needed: int, what: str) -> None:
    """Raise `OutOfMemoryError` if an arena has less than `needed` bytes left for `what`.

    A file may tell of any size: that is found here, before tables of that length are made for it.
    """
    stats = arena.stats
    if needed > stats.available:
        missing = needed - stats.available
        raise OutOfMemoryError(
            f"a cache for {what} takes at least {format_nbytes(needed)}, the arena has "
            f"{format_nbytes(stats.available)} left, {format_nbytes(missing)} too few; ask for less, or make the "
            f"arena larger",
            requested=needed,
            aligned_offset=stats.top,
            available=stats.available,
            capacity=stats.capacity,
            missing=missing,
            label=None,
        )
