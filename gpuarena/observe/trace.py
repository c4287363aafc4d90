"""A log of what an arena was asked to do, and the same again on another arena."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import json
import pathlib
import sys
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from gpuarena._stack import Drop, Hook, Record, Stack, Take
from gpuarena.dtypes import as_dtype
from gpuarena.errors import (
    ArgumentError,
    ArgumentTypeError,
    CheckpointError,
    DTypeError,
    OutOfMemoryError,
    refuse_copy,
)

if TYPE_CHECKING:
    from gpuarena.arena import Arena
    from gpuarena.region import Region

_SUFFIXES = (".jsonl", ".csv")


@dataclass(frozen=True, slots=True)
class Event:
    """Something an arena did. Sizes are bytes."""

    kind: str
    """``"start"`` (one for each end), ``"alloc"``, ``"extend"``, ``"rollback"`` (of any kind, the end of a scope
    included), ``"pin"`` (memory kept for a graph), ``"restore"`` (a region back from the host), ``"fail"`` (out of
    memory) or ``"close"``."""
    side: str
    """The end: ``"low"`` or ``"high"``."""
    n_regions: int
    """Live regions of the end afterwards."""
    top: int
    """The end's pointer afterwards."""
    offset: int = 0
    """Of the region."""
    nbytes: int = 0
    """Of the region, or of a request that failed."""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    align: int = 1
    label: str | None = None
    cause: str = ""
    """Of a rollback: the call, and where it stands."""


class Trace(Hook):
    """What ``arena.record()`` returns: the events of its block, in memory or in a file.

    Recording changes no offset. It takes an allocation about as long again.

    Attributes
    ----------
    events : list of Event
        Empty if they went to a file.
    """

    def __init__(self, arena: Arena, path: Any) -> None:
        self._arena = arena
        self._state = "new"
        self._file: TextIO | None = None
        self._error: OSError | None = None  # of a file that could not be written
        self.path = None if path is None else _check_path(path)
        self.events: list[Event] = []

    def __enter__(self) -> Trace:
        """Begin to record; a trace can be entered once. The file is created, or overwritten."""
        with self._arena._lock:
            if self._state != "new":
                raise CheckpointError("a trace records once; make another with arena.record()")
            if self._arena._closed:
                raise self._arena._closed_error("record")
            if self.path is not None:
                self._file = open(self.path, "w", encoding="utf-8", newline="")
                if self.path.suffix == ".csv":
                    csv.writer(self._file).writerow(_FIELDS)
            self._state = "running"
            self._arena._hooks.append(self)
            for stack in (self._arena._low, self._arena._high):
                self._note(Event("start", stack.side, len(stack.serials), stack.top))
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        """Stop, and close the file.

        Raises
        ------
        OSError
            The file could not be written, now or since; the arena went on without it.
        """
        with self._arena._lock:
            self._state = "ended"
            if self in self._arena._hooks:
                self._arena._hooks.remove(self)
            if self._file is not None:
                file, self._file = self._file, None
                try:
                    file.close()
                except OSError as error:
                    self._error = self._error or error
            if self._error is not None and exc is None:
                raise self._error

    def save(self, path: Any) -> None:
        """Write the events to a ``.jsonl`` or ``.csv`` file."""
        path = _check_path(path)
        with open(path, "w", encoding="utf-8", newline="") as file:
            if path.suffix == ".csv":
                csv.writer(file).writerow(_FIELDS)
            for event in self.events:
                file.write(_line(event, path.suffix))

    def replay(self, arena: Arena) -> list[Region]:
        """Make the same calls on another arena; see `replay`."""
        return replay(self.events, arena)

    # -- what happens -------------------------------------------------------------------------------------------

    def _note(self, event: Event) -> None:
        if self.path is None:
            self.events.append(event)
        elif self._file is not None and self._error is None:
            try:
                self._file.write(_line(event, self.path.suffix))
            except OSError as error:  # the arena's call has happened; the block's end tells
                self._error = error

    def after_take(self, take: Take) -> None:
        """Log a region."""
        self._note(
            Event(
                take.kind, take.stack.side, take.slot + 1, take.new_top, take.offset, take.nbytes, take.shape,
                take.dtype.name, take.align, take.label,
            )
        )  # fmt: skip

    def extended(self, stack: Stack, slot: int, old: Record) -> None:
        """Log a region that grew."""
        new = stack.records[slot]
        self._note(Event("extend", stack.side, slot + 1, stack.top, new.offset, new.nbytes, label=new.label))

    def after_drop(self, drop: Drop) -> None:
        """Log a rollback."""
        self._note(Event("rollback", drop.stack.side, drop.n_live, drop.new_top, cause=str(drop.cause)))

    def restored(self, stack: Stack, n_live: int, known: Any) -> None:
        """Log regions that are back, as one event each."""
        for slot in range(n_live, len(stack.records)):
            record = stack.records[slot]
            self._note(
                Event(
                    "restore", stack.side, slot + 1, record.top, record.offset, record.nbytes,
                    (record.nbytes,), "uint8", 1, record.label,
                )
            )  # fmt: skip

    def failed(self, stack: Stack, nbytes: int, align: int, label: str | None) -> None:
        """Log a refusal."""
        self._note(
            Event("fail", stack.side, len(stack.serials), stack.top, nbytes=nbytes, align=align, label=label)
        )

    def marking(self) -> Any:
        """Return where the log stands."""
        if self._file is None:
            return len(self.events)
        self._file.flush()
        return self._file.tell()

    def undone(self, mark: Any) -> None:
        """Go back to there."""
        if self._file is None:
            self.events[mark:] = [event for event in self.events[mark:] if event.kind == "fail"]
        elif self._error is None:
            self._file.seek(mark)
            self._file.truncate()

    def closing(self) -> None:
        """Log the end."""
        self._note(Event("close", "low", 0, 0))

    def __reduce__(self) -> Any:
        raise refuse_copy(self)


_FIELDS = [field.name for field in dataclasses.fields(Event)]


def _check_path(path: Any) -> pathlib.Path:
    try:
        path = pathlib.Path(path)
    except TypeError as error:
        raise ArgumentTypeError(f"a path is a text or a Path: {error}") from None
    if path.suffix not in _SUFFIXES:
        raise ArgumentError(f"an event log ends in {' or '.join(_SUFFIXES)}, not {path.name!r}")
    checked: pathlib.Path = path
    return checked


def _line(event: Event, suffix: str) -> str:
    values = dataclasses.asdict(event)
    if suffix == ".jsonl":
        return json.dumps(values, separators=(",", ":")) + "\n"
    text = io.StringIO()
    values["shape"] = " ".join(map(str, event.shape))
    values["label"] = json.dumps(event.label)  # tells None from a text, whatever that is
    csv.writer(text).writerow(values.values())
    return text.getvalue()


def load_trace(path: Any) -> list[Event]:
    """Return the events of a file that `Arena.record` or `Trace.save` wrote.

    Raises
    ------
    ArgumentError
        The file's suffix is unknown, or a line is no event; the message names it.
    """
    path = _check_path(path)
    events: list[Event] = []
    is_csv = path.suffix == ".csv"
    limit = csv.field_size_limit(sys.maxsize)  # a label can be of any length
    try:
        with open(path, encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file) if is_csv else file:
                events.append(_parse(row, path.suffix))
    except (ValueError, KeyError, TypeError, csv.Error) as error:
        line = len(events) + (2 if is_csv else 1)
        raise ArgumentError(f"{path}, line {line}, is no event: {error}") from error
    finally:
        csv.field_size_limit(limit)
    return events


def _parse(row: Any, suffix: str) -> Event:
    if suffix == ".jsonl":
        values = json.loads(row)
        values["shape"] = tuple(values["shape"])
        return Event(**values)
    values = dict(row)
    for name in ("n_regions", "top", "offset", "nbytes", "align"):
        values[name] = int(values[name])
    values["shape"] = tuple(map(int, values["shape"].split()))
    values["label"] = json.loads(values["label"])
    return Event(**values)


def replay(events: list[Event], arena: Arena) -> list[Region]:
    """Make the calls of a trace on an arena, and return the regions that are live at its end.

    The offsets are the same if the arena has the same capacity, default alignment and debug settings, an address
    with the same remainder by the largest alignment used, and stands where the recorded one stood at the start.

    Raises
    ------
    OutOfMemoryError
        A request fits no more; what was replayed before it stays.
    ArgumentError
        The trace goes back further than its own start, or holds an event of an unknown kind.
    """
    live: dict[str, list[Region]] = {"low": [], "high": []}
    first = {"low": 0, "high": 0}  # regions that the recorded arena held before
    here = {"low": len(arena._low.serials), "high": len(arena._high.serials)}
    for event in events:
        side, regions = event.side, live[event.side]
        if event.kind == "start":
            first[side] = event.n_regions
        elif event.kind in ("pin", "restore"):  # placed as they were, whatever lies in between
            regions.append(
                arena._place_again(side, event.offset, event.nbytes, event.top, event.label, event.kind)
            )
        elif event.kind == "alloc":
            shape, dtype = _plain(event)
            regions.append(arena.alloc(shape, dtype, align=event.align, label=event.label, side=side))
        elif event.kind == "extend" and not regions:
            raise ArgumentError("the trace extends a region that was made before it began")
        elif event.kind == "extend":
            regions[-1] = regions[-1].extend(event.nbytes * regions[-1].shape[0] // regions[-1].nbytes)
        elif event.kind == "rollback":
            n_live = event.n_regions - first[side]
            if n_live < 0:
                raise ArgumentError("the trace rolls back regions that were made before it began")
            arena.rollback(arena._position(side, here[side] + n_live))
            del regions[n_live:]
        elif event.kind == "fail":
            with contextlib.suppress(OutOfMemoryError):
                arena.alloc(event.nbytes, "uint8", align=event.align, label=event.label, side=side)
                raise ArgumentError("a request that failed when the trace was made succeeds here")
        elif event.kind == "close":
            arena.close()
        else:
            raise ArgumentError(f"unknown event {event.kind!r}")
    return live["low"] + live["high"]


def _plain(event: Event) -> tuple[tuple[int, ...], Any]:
    """Return shape and dtype, or the bytes where the name does not say what a dtype is (a structure)."""
    try:
        return event.shape, as_dtype(event.dtype)
    except DTypeError:
        return (event.nbytes,), as_dtype("uint8")
