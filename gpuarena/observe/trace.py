"""A log of what an arena was asked to do, and the same again on another arena."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import json
import pathlib
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
    """``"start"`` (one for each end), ``"alloc"``, ``"extend"``, ``"rollback"`` (of any kind, the end of a scope included), ``"restore"`` (of
    spilled regions), ``"fail"`` (out of memory) or ``"close"``."""
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
        """Stop, and close the file."""
        with self._arena._lock:
            self._state = "ended"
            if self in self._arena._hooks:
                self._arena._hooks.remove(self)
            if self._file is not None:
                self._file.close()
                self._file = None

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
        if self._file is None:
            self.events.append(event)
        else:
            assert self.path is not None, "a file has a path"
            self._file.write(_line(event, self.path.suffix))

    def after_take(self, take: Take) -> None:
        """Log a region."""
        self._note(
            Event(
                "alloc", take.stack.side, take.slot + 1, take.new_top, take.offset, take.nbytes, take.shape,
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

    def closing(self) -> Warning | None:
        """Log the end."""
        self._note(Event("close", "low", 0, 0))
        return None

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
    events = []
    with open(path, encoding="utf-8", newline="") as file:
        rows: Any = csv.DictReader(file) if path.suffix == ".csv" else file
        for number, row in enumerate(rows, start=2 if path.suffix == ".csv" else 1):
            try:
                events.append(_parse(row, path.suffix))
            except (ValueError, KeyError, TypeError) as error:
                raise ArgumentError(f"{path}, line {number}, is no event: {error}") from error
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
        elif event.kind in ("alloc", "restore"):
            shape, dtype = _plain(event)
            regions.append(arena.alloc(shape, dtype, align=event.align, label=event.label, side=side))
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
