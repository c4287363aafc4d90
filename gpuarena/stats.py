"""The figures of an arena."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot of an arena; taking one changes nothing. All sizes are bytes.

    `rollback` brings the first group back exactly as it was at the checkpoint. The second group only ever
    grows. ``used + padding`` is what both ends have taken, ``top + capacity - high``, and never above `peak`.
    """

    capacity: int
    """Bytes of the buffer; constant."""
    top: int
    """The bump pointer of the low end: its first byte that was not handed out."""
    high: int
    """The first byte that the high end has taken; the capacity if there is none."""
    used: int
    """Bytes of the live regions, as requested."""
    padding: int
    """Bytes that alignment skipped, and guard zones."""
    available: int
    """Bytes between the ends; a request also needs its alignment's padding."""
    n_regions: int
    """Live regions, empty ones included."""
    committed: int
    """Bytes that are backed by memory; less than the capacity only where the backend grows."""

    peak: int
    """The high-water mark: the most that both ends have taken at a time."""
    peak_used: int
    """The largest `used` there has been."""
    peak_regions: int
    """The largest `n_regions` there has been."""
    n_allocs_total: int
    """Successful allocations ever."""
    n_freed_total: int
    """Regions dropped ever."""
    n_failed: int
    """Allocations refused for lack of memory."""
    bytes_requested_total: int
    """Bytes of all successful allocations ever, without padding."""
    bytes_freed_total: int
    """Bytes of all regions dropped ever, without padding."""

    @property
    def fragmentation(self) -> float:
        """The share of what was taken that is padding, from 0 to 1; a bump pointer leaves no other holes."""
        taken = self.used + self.padding
        return self.padding / taken if taken else 0.0
