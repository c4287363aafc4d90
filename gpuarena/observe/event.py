"""An event of a log, and the line of a file that says it."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import pathlib
import reprlib
import stat
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, BinaryIO

from gpuarena.errors import ArgumentError, ArgumentTypeError

__all__ = ["Event", "load_trace"]

_SUFFIXES = (".jsonl", ".csv")


@dataclass(frozen=True, slots=True)
class Event:
    """Something an arena did. Sizes are bytes."""

    kind: str
    """``"start"`` (one for each end, which begin a log), ``"held"`` and ``"scope_held"`` (a region that was live,
    a scope that was open then), ``"alloc"``, ``"extend"``, ``"rollback"`` (of any kind, the end of a scope
    included), ``"scope_open"``, ``"scope_close"`` (it ended, or died of a rollback), ``"pin"`` (memory kept for a
    graph), ``"restore"`` (a region back from the host), ``"fail"`` (out of memory) or ``"close"``."""
    side: str
    """The end: ``"low"`` or ``"high"``."""
    n_regions: int
    """Live regions of the end afterwards."""
    top: int
    """The end's pointer afterwards."""
    offset: int = 0
    """Of the region; of a start, where the end begins; of a scope, where the pointer stood when it was opened."""
    nbytes: int = 0
    """Of the region, or of a request that failed; of a start, the capacity."""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    """Of what was held or restored the arena knows no more than the bytes: ``(nbytes,)`` of uint8."""
    align: int = 1
    """Of the address, as asked for; of a start, the arena's default."""
    label: str | None = None
    """Of the region or the scope; of a start, the arena's name."""
    cause: str = ""
    """Of a rollback: the call, and where it stands."""
    time_ns: int = 0
    """Nanoseconds since the log began."""
    site: str = ""
    """``file:line`` of the innermost caller outside of this package; empty if it is not known."""
    device: str = ""
    """Of a start."""
    address: int = 0
    """Of a start: of the arena's first byte."""


FIELDS = tuple(field.name for field in dataclasses.fields(Event))
_values_of = attrgetter(*FIELDS)
_INTEGERS = ("n_regions", "top", "offset", "nbytes", "align", "time_ns", "address")
_TEXTS = ("kind", "side", "dtype", "cause", "site", "device")
_NEEDED = ("kind", "side", "n_regions", "top")
#: More bits than any size or time has; a number of thousands of digits has no text in Python.
_N_BITS = 128
_quoted = (
    json.encoder.encode_basestring_ascii
)  # what json.dumps makes of a text, without what it takes to get there


class _Returns:
    """A file of which nothing is left: what csv writes is what its `writerow` returns."""

    @staticmethod
    def write(text: str) -> str:
        return text


_CSV_END = "\r\n"
_csv_line = csv.writer(_Returns(), lineterminator=_CSV_END).writerow


def check_path(path: Any) -> pathlib.Path:
    """Return where a log is to be, if its name says what it is."""
    try:
        path = pathlib.Path(path)
    except TypeError as error:
        raise ArgumentTypeError(f"a path is a text or a Path: {error}") from None
    if path.suffix not in _SUFFIXES:
        raise ArgumentError(f"an event log ends in {' or '.join(_SUFFIXES)}, not {path.name!r}")
    checked: pathlib.Path = path
    return checked


def checked_events(events: Any) -> list[Event]:
    """Return the events of a log as a list.

    Raises
    ------
    ArgumentTypeError
        They are none, as a trace is none, which has them.
    """
    found = list(events) if isinstance(events, Iterable) else [events]
    for event in found:
        if not isinstance(event, Event):
            raise ArgumentTypeError(
                f"a log is events, as Trace.events has them or load_trace reads them, not {type(event).__name__}"
            )
    return found


def header(suffix: str) -> str:
    """Return what a file begins with."""
    line: str = "" if suffix == ".jsonl" else _csv_line(FIELDS)
    return line


def line_of(event: Event, suffix: str) -> str:
    """Return the line of an event."""
    *values, time_ns, site, device, address = _values_of(event)
    return f"{head_of(suffix, *values)}{time_ns}{tail_of(suffix, site, device, address)}"


def head_of(
    suffix: str,
    kind: str,
    side: str,
    n_regions: int,
    top: int,
    offset: int,
    nbytes: int,
    shape: tuple[int, ...],
    dtype: str,
    align: int,
    label: str | None,
    cause: str,
) -> str:
    """Return a line up to its time: what a step that repeats itself has again."""
    said = "null" if label is None else _quoted(label)
    if suffix == ".jsonl":
        # Written out: json.dumps takes three times as long.
        return (
            f'{{"kind":{_quoted(kind)},"side":{_quoted(side)},"n_regions":{n_regions},"top":{top},'
            f'"offset":{offset},"nbytes":{nbytes},"shape":{list(shape)},"dtype":{_quoted(dtype)},'
            f'"align":{align},"label":{said},"cause":{_quoted(cause)},"time_ns":'
        )
    cells: str = _csv_line(
        (
            kind, side, n_regions, top, offset, nbytes, " ".join(map(str, shape)), _plain(dtype), align,
            said,  # tells None from a text, whatever that is
            _plain(cause),
        )
    )  # fmt: skip
    return cells.removesuffix(_CSV_END) + ","


def tail_of(suffix: str, site: str, device: str = "", address: int = 0) -> str:
    """Return what follows the time in a line."""
    if suffix == ".jsonl":
        start = f',"device":{_quoted(device)},"address":{address}' if device or address else ""
        return f',"site":{_quoted(site)}{start}}}\n'
    cells: str = _csv_line((_plain(site), _plain(device), address))
    return "," + cells


def _plain(text: str) -> str:
    """Return a text that UTF-8 can encode, on one line: names of files can hold anything."""
    return text if text.isprintable() else text.encode("unicode_escape").decode()


# -- reading ----------------------------------------------------------------------------------------------------


def load_trace(path: Any, *, partial: bool = False) -> list[Event]:
    """Return the events of a file that `Arena.record` or `Trace.save` wrote.

    Fields that this version does not know are left out, and those that an older one did not write have their
    defaults.

    Parameters
    ----------
    path : str or path
        Its suffix, ``.jsonl`` or ``.csv``, decides about the format.
    partial : bool
        Leave out the last line if it is not whole, as in the file of a process that was killed, or still writes.

    Raises
    ------
    ArgumentError
        The file's suffix is unknown, it is a device, or a line is no event; the message names it.
    OSError
        It cannot be read.
    """
    path = check_path(path)
    events: list[Event] = []
    is_csv = path.suffix == ".csv"
    if stat.S_ISCHR(os.stat(path).st_mode):
        raise ArgumentError(f"{path} is a device, which may never end, and no file")
    limit = csv.field_size_limit(sys.maxsize)  # a label can be of any length
    lines = _Lines(is_csv, partial)
    try:
        with open(path, "rb") as file:
            found = lines.of(file)
            for row in csv.DictReader(found) if is_csv else map(json.loads, found):
                events.append(_parse_cells(row) if is_csv else _parse_values(row))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, csv.Error) as error:
        line = len(events) + (2 if is_csv else 1)
        hint = ""
        if lines.cut and not partial:
            hint = (
                "; the file ends within a line, as when its process was killed: "
                "load_trace(path, partial=True) leaves that line out"
            )
        raise ArgumentError(f"{path}, line {line}, is no event: {error}{hint}") from error
    finally:
        csv.field_size_limit(limit)
    return events


def event_of(line: str, suffix: str) -> Event:
    """Return the event of a line that `line_of` made."""
    if suffix == ".jsonl":
        return _parse_values(json.loads(line))
    return _parse_cells(dict(zip(FIELDS, next(csv.reader([line])), strict=True)))


class _Lines:
    """The lines of a file as texts."""

    def __init__(self, is_csv: bool, partial: bool) -> None:
        self._is_csv, self._partial = is_csv, partial
        self.cut = False  # whether the last one has no end

    def of(self, file: BinaryIO) -> Iterator[str]:
        """Yield them; of a partial file, without one that has no end: it may end within a character."""
        for line in file:
            if not line.endswith(b"\n"):  # the last
                self.cut = True
                if self._partial:
                    return
                if self._is_csv:  # a figure that is cut off is a figure, too
                    raise ValueError("it has no end")
            yield line.decode()


def _parse_cells(row: dict[str, Any]) -> Event:
    if None in row or None in row.values():
        raise ValueError("it has more or fewer cells than the first line")
    values: dict[str, Any] = {name: row[name] for name in FIELDS if name in row}
    for name in _INTEGERS:
        if name in values:
            values[name] = int(values[name])
    if "shape" in values:
        values["shape"] = [int(text) for text in values["shape"].split()]
    if "label" in values:
        values["label"] = json.loads(values["label"])
    return _parse_values(values)


def _parse_values(row: Any) -> Event:
    if type(row) is not dict:
        raise TypeError(f"it is {type(row).__name__}, not an object")
    values: dict[str, Any] = {name: row[name] for name in FIELDS if name in row}
    lacking = [name for name in _NEEDED if name not in values]
    if lacking:
        raise ValueError(f"it does not say {', '.join(lacking)}")
    for names, kind in ((_INTEGERS, int), (_TEXTS, str)):
        for name in names:
            if name in values and type(values[name]) is not kind:
                raise TypeError(f"{name} is {reprlib.repr(values[name])}")
    label = values.get("label")
    if label is not None and type(label) is not str:
        raise TypeError(f"label is {reprlib.repr(label)}")
    shape = values.get("shape", ())
    if type(shape) not in (list, tuple) or any(type(dim) is not int for dim in shape):
        raise TypeError(f"shape is {reprlib.repr(shape)}")
    for number in (*(values[name] for name in _INTEGERS if name in values), *shape):
        if number.bit_length() > _N_BITS:
            raise ValueError(f"it has a number of {number.bit_length()} bits")
    values["shape"] = tuple(shape)
    return Event(**values)
