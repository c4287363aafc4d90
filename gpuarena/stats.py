"""The figures of an arena."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot of an arena; taking one changes nothing. All sizes are bytes.

    `rollback` brings the first group back exactly as it was at the checkpoint. The second group only ever
    grows: ``used + padding == top`` and ``top <= peak <= capacity``.
    """

    capacity: int
    """Bytes of the buffer; constant."""
    top: int
    """The bump pointer: the first byte that was not handed out."""
    used: int
    """Bytes of the live regions, as requested."""
    padding: int
    """Bytes below `top` that alignment skipped."""
    available: int
    """Bytes above `top`; a request also needs its alignment's padding."""
    n_regions: int
    """Live regions, empty ones included."""

    peak: int
    """The high-water mark: the largest `top` there has been."""
    n_allocs_total: int
    """Successful allocations ever."""
    n_failed: int
    """Allocations refused for lack of memory."""
    bytes_requested_total: int
    """Bytes of all successful allocations ever, without padding."""
