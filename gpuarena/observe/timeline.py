"""What an event log says of each region: where it lay, and from which event to which."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from gpuarena._stack import SIDES
from gpuarena.errors import ArgumentError
from gpuarena.observe.event import Event, checked_events

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
    """Index of the event that opened it; -1 if it was open when the log began."""
    stop: int | None
    """Index of the event that ended it; None if it was open at the end of the log."""


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
    site: str = ""


@dataclass(frozen=True, slots=True)
class Timeline:
    """A log as spans. Time is the index of an event; `times_ns` says when that was."""

    name: str | None
    device: str
    capacity: int
    """Bytes. Of a log that does not say it, the most that it shows to have been there."""
    times_ns: tuple[int, ...]
    """Of each event, since the log began."""
    regions: tuple[RegionSpan, ...]
    """In the order they were made."""
    scopes: tuple[ScopeSpan, ...]
    rollbacks: tuple[Rollback, ...]
    failures: tuple[Failure, ...]
    peaks: tuple[tuple[int, int], ...]
    """``(index, bytes)`` each time that both ends together took more than ever before: the high-water line. The index
    is -1 for what was taken when the log began."""
    alignment: int = 1
    """The arena's default, in bytes."""
    address: int = 0
    """Of the arena's first byte; 0 if the log does not say it."""

    @property
    def n_events(self) -> int:
        """Events of the log."""
        return len(self.times_ns)


#: Sizes, addresses and times are less.
_LARGEST = 1 << 63
#: Kinds of events that tell what there was when the log began.
_BEGINNING = ("start", "held", "scope_held")


class _Span:
    """A region that is live, or a scope that is open, until its span is complete."""

    __slots__ = ("at", "event", "padding", "shape", "site", "start")

    def __init__(
        self, at: int, event: Event, start: int, padding: int, shape: tuple[int, ...], site: str
    ) -> None:
        self.at = at  # where it goes in the list of spans
        self.event, self.start, self.padding, self.shape, self.site = event, start, padding, shape, site


class _End:
    """One end of the arena, as far as the events have told it."""

    def __init__(self, start: Event) -> None:
        self.side = start.side
        self.sign = 1 if start.side == "low" else -1
        self.start = start
        self.n_unknown = start.n_regions  # live regions of which the log says nothing, below the others
        self.bottom = start.top  # where the pointer stands without `live`
        self.guessed = False  # whether that was taken from a region that grew
        self.live: list[_Span] = []
        self.scopes: list[_Span] = []

    @property
    def top(self) -> int:
        return self.live[-1].event.top if self.live else self.bottom


class _Reader:
    """Turns events into spans, one after the other."""

    def __init__(self, starts: tuple[Event, Event], capacity: int) -> None:
        self.ends = {start.side: _End(start) for start in starts}
        self.capacity = capacity
        self.index = -1
        self.closed = False
        self.regions: list[RegionSpan | None] = []  # None in place of what is live
        self.scopes: list[ScopeSpan | None] = []
        self.rollbacks: list[Rollback] = []
        self.failures: list[Failure] = []
        self.peak = 0
        self.peaks: list[tuple[int, int]] = []

    def read(self, event: Event) -> None:
        """Take one event in."""
        kind = event.kind
        end = self.ends.get(event.side)
        if end is None or self.closed:
            raise self._wrong(event, "comes after the end" if self.closed else f"is of a side {event.side!r}")
        if not 0 <= event.time_ns < _LARGEST:
            raise self._wrong(event, f"happened at {event.time_ns} ns")
        if kind in ("alloc", "pin", "restore"):
            self._add(end, event)
        elif kind == "rollback":
            self._roll_back(end, event)
        elif kind == "extend":
            self._extend(end, event)
        elif kind == "scope_open":
            self._open(end, event, self.index)
        elif kind == "scope_close":
            self._close_scope(end, event)
        elif kind == "fail":
            if not 0 <= event.nbytes < _LARGEST:
                raise self._wrong(event, f"asked for {event.nbytes} bytes")
            self.failures.append(Failure(self.index, event.side, event.nbytes, event.label, event.site))
        elif kind == "close":
            self.closed = True
            self.end(self.index)
        elif kind == "held" and self.index < 0:
            self._hold(end, event)
        elif kind == "scope_held" and self.index < 0:
            self._open(end, event, -1)
        else:
            raise self._wrong(
                event,
                "does not belong there; two logs in one file are no log"
                if kind in _BEGINNING
                else "is of an unknown kind",
            )

    def begin(self) -> None:
        """Note what was taken when the log began."""
        low, high = (end.start for end in self.ends.values())
        for start in (low, high):
            if not (
                start.nbytes in (0, self.capacity)  # of an old log 0
                and 0 <= low.offset <= low.top <= high.top <= (high.offset or self.capacity) <= self.capacity
                and self.capacity < _LARGEST
                and start.n_regions >= 0
                and start.align > 0
                and 0 <= start.time_ns < _LARGEST
                and 0 <= start.address < _LARGEST
            ):
                raise ArgumentError(
                    f"the log begins with a {start.side} end that cannot be: {start.n_regions} regions up to byte "
                    f"{start.top}, from byte {start.offset}, of {start.nbytes}; address {start.address}, alignment "
                    f"{start.align}, time {start.time_ns} ns"
                )
        for end in self.ends.values():
            if end.live and end.n_unknown:
                raise ArgumentError(
                    f"the log began with {end.start.n_regions} regions on the {end.side} end, and tells "
                    f"{len(end.live)} of them"
                )
            if end.top != end.start.top:
                raise ArgumentError(
                    f"the {end.side} end stood at byte {end.start.top} when the log began, and its regions make "
                    f"it {end.top}"
                )
        self._note_peak()

    def end(self, stop: int | None) -> None:
        """Complete what is live and open."""
        for end in self.ends.values():
            for span in end.live:
                self._end_region(end, span, stop)
            for span in end.scopes:
                self._end_scope(span, stop)
            end.live, end.scopes = [], []

    # -- regions ------------------------------------------------------------------------------------------------

    def _add(self, end: _End, event: Event, start: int | None = None) -> None:
        old_top, new_top = end.top, event.top
        n_regions = end.n_unknown + len(end.live) + 1
        if event.n_regions != n_regions:
            raise self._wrong(event, f"makes {event.n_regions} regions of {n_regions - 1}")
        low, high = (old_top, new_top) if end.sign > 0 else (new_top, old_top)
        if event.nbytes < 0 or not low <= event.offset <= event.offset + event.nbytes <= high:
            raise self._wrong(event, f"does not lie within what it takes, bytes {low} to {high}")
        self._push(end, event, self.index if start is None else start, high - low - event.nbytes, event.shape)

    def _push(self, end: _End, event: Event, start: int, padding: int, shape: tuple[int, ...]) -> None:
        end.live.append(_Span(len(self.regions), event, start, padding, shape, event.site))
        self.regions.append(None)
        if self.ends["low"].top > self.ends["high"].top:
            raise self._wrong(event, "reaches into the other end")
        if not 0 <= event.offset <= event.offset + event.nbytes <= self.capacity:
            raise self._wrong(event, f"lies outside of the arena, bytes 0 to {self.capacity}")
        if start >= 0:
            self._note_peak()

    def _hold(self, end: _End, event: Event) -> None:
        if not end.live:
            end.bottom = end.start.offset
        end.n_unknown = 0
        self._add(end, event, -1)
        end.n_unknown = end.start.n_regions - len(end.live)

    def _extend(self, end: _End, event: Event) -> None:
        shape, dtype = event.shape, event.dtype
        if end.live:
            span = end.live[-1]
            old = span.event
            if event.n_regions != end.n_unknown + len(end.live) or event.offset != old.offset:
                raise self._wrong(event, f"is not the last region, at byte {old.offset}")
            end.live.pop()
            self._end_region(end, span, self.index)
            if not shape and old.nbytes and span.shape:  # an old log does not say it
                shape = (event.nbytes * span.shape[0] // old.nbytes, *span.shape[1:])
            dtype = dtype or old.dtype
        elif end.n_unknown:
            end.n_unknown -= 1
            # It is known from here on, but for what lies before it.
            end.bottom, end.guessed = event.offset, True
        else:
            raise self._wrong(event, "extends a region where there is none")
        start, stop = event.offset, event.offset + event.nbytes
        bottom = end.top
        if not bottom <= start <= stop <= event.top:
            raise self._wrong(event, f"does not lie within what it takes, bytes {bottom} to {event.top}")
        known = dataclasses.replace(event, dtype=dtype, n_regions=end.n_unknown + len(end.live) + 1)
        self._push(end, known, self.index, event.top - bottom - event.nbytes, shape)

    def _roll_back(self, end: _End, event: Event) -> None:
        old_top = end.top
        n_regions = end.n_unknown + len(end.live) - event.n_regions
        if n_regions < 0 or event.n_regions < 0:
            raise self._wrong(event, f"leaves {event.n_regions} regions of {event.n_regions + n_regions}")
        n_live = event.n_regions - end.n_unknown
        for span in reversed(end.live[max(n_live, 0) :]):
            self._end_region(end, span, self.index)
        del end.live[max(n_live, 0) :]
        if n_live < 0 or (n_live == 0 and end.guessed):
            lowest, highest = (0, old_top) if end.sign > 0 else (old_top, self.capacity)
            if not lowest <= event.top <= highest:
                raise self._wrong(event, f"brings the pointer from byte {old_top} to byte {event.top}")
            end.n_unknown, end.bottom = event.n_regions, event.top
        elif end.top != event.top:
            raise self._wrong(event, f"leaves the pointer at byte {event.top}, where no region ends")
        self.rollbacks.append(Rollback(self.index, end.side, old_top, event.top, n_regions, event.cause))

    def _end_region(self, end: _End, span: _Span, stop: int | None) -> None:
        event = span.event
        self.regions[span.at] = RegionSpan(
            end.side, event.offset, event.nbytes, span.padding, span.shape, event.dtype, event.label, span.site,
            span.start, stop,
        )  # fmt: skip

    # -- scopes -------------------------------------------------------------------------------------------------

    def _open(self, end: _End, event: Event, start: int) -> None:
        if not 0 <= event.offset <= self.capacity:
            raise self._wrong(event, f"began at byte {event.offset} of {self.capacity}")
        end.scopes.append(_Span(len(self.scopes), event, start, 0, (), event.site))
        self.scopes.append(None)

    def _close_scope(self, end: _End, event: Event) -> None:
        # Mostly the last one; of two that are told apart by nothing else, it does not matter which.
        for at in reversed(range(len(end.scopes))):
            opened = end.scopes[at].event
            if (opened.label, opened.offset) == (event.label, event.offset):
                self._end_scope(end.scopes.pop(at), self.index)
                return
        raise self._wrong(event, f"ends a scope {event.label!r}, which is not open")

    def _end_scope(self, span: _Span, stop: int | None) -> None:
        event = span.event
        self.scopes[span.at] = ScopeSpan(event.side, event.label, span.site, event.offset, span.start, stop)

    def _note_peak(self) -> None:
        taken = self.ends["low"].top + self.capacity - self.ends["high"].top
        if taken > self.peak:
            self.peak = taken
            self.peaks.append((self.index, taken))

    def _wrong(self, event: Event, why: str) -> ArgumentError:
        return ArgumentError(f"event {self.index} of the log, {event.kind!r} on the {event.side} end, {why}")


def timeline(events: Iterable[Event]) -> Timeline:
    """Return the spans of a log, as `Arena.record` makes one and `load_trace` reads one.

    >>> from gpuarena import Arena
    >>> arena = Arena(4096)
    >>> with arena.record() as trace, arena.scope("step"):
    ...     _ = arena.alloc(100, "uint8", label="mask")
    >>> made = timeline(trace.events)
    >>> [(region.label, region.offset, region.start, region.stop) for region in made.regions]
    [('mask', 0, 3, 4)]
    >>> made.peaks
    ((3, 100),)

    Regions that were live when the log began have spans too, if the log tells them; one of an older version does
    not. A region that was extended has a span for each size.

    Raises
    ------
    ArgumentError
        The events are no log: none, or ends that contradict each other.
    ArgumentTypeError
        They are no events; of a `Trace`, its ``events`` are.
    """
    log = checked_events(events)
    starts = [event for event in log[:2] if event.kind == "start"]
    if tuple(start.side for start in starts) != SIDES:
        raise ArgumentError(
            "a log begins with the start of its low and of its high end, and these events do not"
        )
    low, high = starts
    capacity = high.nbytes or max(
        max(event.top, event.offset + event.nbytes) for event in log if event.kind != "fail"
    )
    reader = _Reader((low, high), capacity)
    n_before = 2  # events that tell what there was at the start
    while n_before < len(log) and log[n_before].kind in _BEGINNING[1:]:
        reader.read(log[n_before])
        n_before += 1
    reader.begin()
    for reader.index in range(n_before, len(log)):
        reader.read(log[reader.index])
    reader.end(None)
    return Timeline(
        name=low.label,
        device=low.device,
        capacity=capacity,
        times_ns=tuple(event.time_ns for event in log),
        regions=tuple(region for region in reader.regions if region is not None),
        scopes=tuple(scope for scope in reader.scopes if scope is not None),
        rollbacks=tuple(reader.rollbacks),
        failures=tuple(reader.failures),
        peaks=tuple(reader.peaks),
        alignment=low.align,
        address=low.address,
    )
