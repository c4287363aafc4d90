"""What an event log says of each region: where it lay, and from which event to which."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gpuarena.observe.trace import Event

__all__ = ["Failure", "RegionSpan", "Rollback", "ScopeSpan", "Timeline", "timeline"]


@dataclass(frozen=True, slots=True)
class RegionSpan:
    """A region, or what it was between two calls of `Region.extend`. Offsets and sizes are bytes."""

    side: str
    """The end: ``"low"`` or ``"high"``."""
    offset: int
    nbytes: int
    padding: int
    """Bytes that it took beside its own: alignment and guard zones. On the low end they lie before the region, on the
    high end behind it, but for guard zones."""
    shape: tuple[int, ...]
    dtype: str
    label: str | None
    site: str
    """``file:line`` that allocated it; empty if that was not recorded."""
    start: int
    """Index of the event that made it; -1 if it was there when the log began."""
    stop: int | None
    """Index of the event that ended it; None if it was live at the end of the log."""


@dataclass(frozen=True, slots=True)
class ScopeSpan:
    """A scope. `top` is where the pointer of its end stood when it was opened, in bytes."""

    side: str
    label: str | None
    site: str
    top: int
    start: int
    stop: int | None


@dataclass(frozen=True, slots=True)
class Rollback:
    """A rollback that moved the pointer of an end from `old_top` to `new_top`, in bytes."""

    index: int
    side: str
    old_top: int
    new_top: int
    n_regions: int
    """Regions that it dropped."""
    cause: str


@dataclass(frozen=True, slots=True)
class Failure:
    """A request of `nbytes` that did not fit."""

    index: int
    side: str
    nbytes: int
    label: str | None


@dataclass(frozen=True, slots=True)
class Timeline:
    """A log as spans. Time is the index of an event; `times_ns` says when that was."""

    name: str | None
    device: str
    capacity: int
    """Bytes."""
    times_ns: tuple[int, ...]
    """Of each event, since the log began."""
    regions: tuple[RegionSpan, ...]
    """In the order they were made."""
    scopes: tuple[ScopeSpan, ...]
    rollbacks: tuple[Rollback, ...]
    failures: tuple[Failure, ...]
    peaks: tuple[tuple[int, int], ...]
    """``(index, bytes)`` each time that both ends together took more than ever before: the high-water line."""

    @property
    def n_events(self) -> int:
        """Events of the log."""
        return len(self.times_ns)


def timeline(events: Iterable[Event]) -> Timeline:
    """Return the spans of a log, as `Arena.record` makes one and `load_trace` reads one.

    Raises
    ------
    ArgumentError
        The events are no log: none, or ends that contradict each other.
    """
    raise NotImplementedError
