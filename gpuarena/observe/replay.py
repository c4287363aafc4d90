"""The calls of a log, made again on another arena."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from gpuarena._stack import SIDES
from gpuarena.dtypes import as_dtype
from gpuarena.errors import ArgumentError, ArgumentTypeError, DTypeError, OutOfMemoryError
from gpuarena.observe.event import Event, checked_events
from gpuarena.region import Region

if TYPE_CHECKING:
    from gpuarena.arena import Arena

__all__ = ["replay"]

#: Events that begin a log, and those that do nothing to the regions.
_BEGINNING = ("start", "held", "scope_held")
_NOTHING = ("scope_open", "scope_close")


def replay(events: Iterable[Event], arena: Arena) -> list[Region]:
    """Make the calls of a trace on an arena, and return the regions it made that are live at its end.

    The offsets are the same if the arena has the same capacity, default alignment and debug settings, an address
    with the same remainder by the largest alignment used, and stands where the recorded one stood at the start, or
    is empty: then the regions that were live at the start are placed first, as bytes. Scopes are not opened, since
    the rollbacks say what they did.

    Raises
    ------
    OutOfMemoryError
        A request fits no more; what was replayed before it stays.
    ArgumentError
        An end of the arena holds other regions than that of the trace at its start: unchanged. Or the trace goes
        back further than what it knows, contradicts itself, or holds an event of an unknown kind: what was replayed
        before stays.
    ArgumentTypeError
        They are no events, or `arena` is none: unchanged.
    """
    from gpuarena.arena import Arena

    events = checked_events(events)
    if not isinstance(arena, Arena):
        raise ArgumentTypeError(f"a log is replayed on an arena, not {type(arena).__name__}")
    begins = True
    for index, event in enumerate(events):
        begins = begins and event.kind in _BEGINNING
        if event.side not in SIDES:
            raise ArgumentError(f"event {index} of the log, {event.kind!r}, is of a side {event.side!r}")
        if event.kind in _BEGINNING and not begins:
            raise ArgumentError(f"event {index} of the log, {event.kind!r}, begins another log")
    ends = {side: _End(side, events, arena) for side in SIDES}
    for end in ends.values():
        end.check()
    for end in ends.values():
        end.begin()
    for event in events:
        if event.kind in _BEGINNING or event.kind in _NOTHING:
            continue
        if event.kind == "close":
            arena.close()
        elif event.kind == "fail":
            with contextlib.suppress(OutOfMemoryError):
                arena.alloc(event.nbytes, "uint8", align=event.align, label=event.label, side=event.side)
                raise ArgumentError("a request that failed when the trace was made succeeds here")
        else:
            ends[event.side].repeat(event)
    return [region for end in ends.values() for region in end.made()]


class _End:
    """One end of the arena, and where it stood when the trace began."""

    def __init__(self, side: str, events: list[Event], arena: Arena) -> None:
        self.side, self.arena = side, arena
        self.stack = arena._low if side == "low" else arena._high
        self.held = [event for event in events if event.kind == "held" and event.side == side]
        self.live: list[Region] = []
        self.found: list[Region] = []  # those of `live` that were there
        starts = [event.n_regions for event in events if event.kind == "start" and event.side == side]
        # Regions below `live`, in the trace and here: only where the trace does not know them.
        self.n_before = 0 if self.held else sum(starts[:1])
        self.n_here = 0 if self.held else len(self.stack.serials)

    def check(self) -> None:
        """Raise if the trace knows regions from its start, and the end holds others."""
        if not self.held or not self.stack.serials:
            return
        here = [record[:2] for record in self.stack.records]
        if here != [(event.offset, event.nbytes) for event in self.held]:
            raise ArgumentError(
                f"the trace began with {len(self.held)} regions on the {self.side} end; {self.arena!r} holds "
                f"{len(here)} there, and not the same ones. Replay on an empty arena, or where they are"
            )

    def begin(self) -> None:
        """Place the regions of the start, or find them."""
        if self.held and self.stack.serials:
            dtype = as_dtype("uint8")
            for slot, (serial, record) in enumerate(zip(self.stack.serials, self.stack.records, strict=True)):
                shape = (record.nbytes,)
                region = Region._root_of(self.arena, self.stack, slot, serial, record, shape, dtype)
                self.found.append(region)
            self.live += self.found
        else:
            for event in self.held:
                self._place(event, "restore")

    def made(self) -> list[Region]:
        """Return what is live, but for what was there."""
        found = {id(region) for region in self.found}
        return [region for region in self.live if id(region) not in found]

    def repeat(self, event: Event) -> None:
        """Make the call of an event."""
        live = self.live
        if event.kind == "alloc":
            shape, dtype = _plain(event)
            live.append(self.arena.alloc(shape, dtype, align=event.align, label=event.label, side=self.side))
        elif event.kind in ("pin", "restore"):  # placed as they were, whatever lies in between
            self._place(event, event.kind)
        elif event.kind == "extend":
            if not live:
                raise ArgumentError("the trace extends a region that was made before it began")
            last = live[-1]
            if not last.nbytes or not last.shape:
                raise ArgumentError(f"the trace extends {last!r}, which cannot be")
            live[-1] = last.extend(event.nbytes * last.shape[0] // last.nbytes)
        elif event.kind == "rollback":
            n_live = event.n_regions - self.n_before
            if n_live < 0:
                raise ArgumentError("the trace rolls back regions that were made before it began")
            if n_live > len(live):
                raise ArgumentError(f"the trace rolls back to {n_live} regions where there are {len(live)}")
            self.arena.rollback(self.arena._position(self.side, self.n_here + n_live))
            del live[n_live:]
        else:
            raise ArgumentError(f"unknown event {event.kind!r}")

    def _place(self, event: Event, kind: str) -> None:
        arena = self.arena
        self.live.append(
            arena._place_again(self.side, event.offset, event.nbytes, event.top, event.label, kind)
        )


def _plain(event: Event) -> tuple[tuple[int, ...], Any]:
    """Return shape and dtype, or the bytes where the name does not say what a dtype is (a structure)."""
    try:
        return event.shape, as_dtype(event.dtype)
    except DTypeError:
        return (event.nbytes,), as_dtype("uint8")
