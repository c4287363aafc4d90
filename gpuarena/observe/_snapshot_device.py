"""The memory of a device, as a snapshot's segments and events tell it, turned into timelines.

Nothing in a snapshot is trusted: each value is looked at before it is used, and none is copied into a message whole.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from gpuarena.observe.timeline import Failure, RegionSpan, Timeline

__all__ = ["Device", "WrongError", "checked_dict", "checked_int", "checked_list"]

#: Sizes and addresses are less.
_LARGEST = 1 << 63
_N_DIMENSIONS = 64
_LIVE_STATES = ("active_allocated", "active_pending_free", "active_awaiting_free")


class WrongError(Exception):
    """What is wrong with the contents."""


# -- checked access ---------------------------------------------------------------------------------------------


def checked_list(value: Any, where: str) -> list[Any]:
    """Return a list or a tuple; raise `WrongError` if it is none."""
    if type(value) not in (list, tuple):
        raise WrongError(f"{where} is no list but {type(value).__name__}")
    checked: list[Any] = value
    return checked


def checked_dict(value: Any, where: str) -> dict[Any, Any]:
    """Return a dict; raise `WrongError` if it is none."""
    if type(value) is not dict:
        raise WrongError(f"{where} is no dict but {type(value).__name__}")
    return value


def checked_int(
    of: dict[Any, Any], key: str, where: str, *, default: int | None = None, limit: int = _LARGEST
) -> int:
    """Return a number that is not negative and less than `limit`; raise `WrongError` if there is none."""
    value = of.get(key, default)
    if type(value) is not int:  # whose text could be as long as it likes
        raise WrongError(f"{where}: {key} is no number but {type(value).__name__}")
    if not 0 <= value < limit:
        told = str(value) if value.bit_length() <= 64 else f"a number of {value.bit_length()} bits"
        raise WrongError(f"{where}: {key} is {told}")
    return value


def _text(of: dict[Any, Any], key: str) -> str | None:
    value = of.get(key)
    return value if type(value) is str else None


# -- contents ---------------------------------------------------------------------------------------------------


@dataclass
class _Range:
    """Addresses that were memory: a segment, or one that the events tell of."""

    address: int
    nbytes: int
    about: dict[Any, Any] | None
    """What an arena says of itself."""
    place: int = 0
    """Offset of its first byte in the timeline."""
    line: _Line | None = None


@dataclass
class _Line:
    """A timeline in the making."""

    name: str | None
    device: str
    address: int
    capacity: int = 0
    regions: list[RegionSpan] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)


@dataclass
class _Found:
    """A region at an address."""

    address: int
    nbytes: int
    about: dict[Any, Any]
    label: str | None
    site: str
    start: int
    stop: int | None = None


class Device:
    """The memory of one device."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.ranges: list[_Range] = []
        self.blocks: list[_Found] = []  # live at the end
        self.found: list[_Found] = []  # that the events tell of
        self.failures: list[tuple[int, int, Failure]] = []  # index, address, what failed
        self.times_us: list[int] = []
        self._lists: set[int] = set()  # ids of lists of blocks: one that is in many segments is read once
        self._sites: dict[int, tuple[Any, str]] = {}  # by id of a list of frames, which events share

    # -- segments -----------------------------------------------------------------------------------------------

    def add_segment(self, segment: dict[Any, Any], number: int) -> None:
        """Take a segment in, and its live blocks."""
        where = f"segment {number}"
        address = checked_int(segment, "address", where)
        total = checked_int(segment, "total_size", where)
        about = segment.get("user_metadata")
        self.ranges.append(_Range(address, total, about if _is_arena(about) else None))
        at = 0
        blocks = checked_list(segment.get("blocks", []), f"{where}, blocks")
        if blocks and id(blocks) in self._lists:
            raise WrongError(f"{where} has the blocks of another segment")
        self._lists.add(id(blocks))
        for i, block in enumerate(blocks):
            here = f"{where}, block {i}"
            block = checked_dict(block, here)
            nbytes = checked_int(block, "size", here)
            if checked_int(block, "address", here, default=address + at) != address + at:
                raise WrongError(
                    f"{here} is at {block['address']:#x}, and the one before ends at {address + at:#x}"
                )
            requested = checked_int(block, "requested_size", here, default=nbytes)
            if block.get("state") in _LIVE_STATES:
                if not requested <= nbytes:
                    raise WrongError(f"{here} was asked for {requested} bytes and has {nbytes}")
                self.blocks.append(self._region(block, address + at, requested, -1))
            at += nbytes
        if at != total:
            raise WrongError(f"{where} has {total} bytes, and its blocks {at}")

    def check_segments(self) -> None:
        """Raise if two segments have addresses in common."""
        ordered = sorted((one for one in self.ranges if one.nbytes), key=attrgetter("address"))
        for one, other in itertools.pairwise(ordered):
            if one.address + one.nbytes > other.address:
                raise WrongError(
                    f"the segments at {one.address:#x} and {other.address:#x} of device {self.index} overlap"
                )

    def _region(self, of: dict[Any, Any], address: int, nbytes: int, start: int) -> _Found:
        about = of.get("user_metadata")
        told: dict[Any, Any] = about if type(about) is dict else {}
        label = about if type(about) is str and about else _text(told, "label") or _text(of, "category")
        if _is_region(told):
            label = _text(told, "label")
        return _Found(
            address, nbytes, told, label, _text(told, "site") or self._site(of.get("frames")), start
        )

    def _site(self, frames: Any) -> str:
        """Return where Python code allocated: the innermost frame of a ``.py`` file."""
        if type(frames) is not list or not frames:
            return ""
        known = self._sites.get(id(frames))
        if known is None:
            known = self._sites[id(frames)] = frames, _site_in(frames)
        return known[1]

    # -- events -------------------------------------------------------------------------------------------------

    def add_events(self, events: list[Any]) -> None:
        """Take the events in, from the oldest to the newest."""
        live: dict[int, _Found] = {}
        for index, entry in enumerate(events):
            where = f"event {index} of device {self.index}"
            entry = checked_dict(entry, where)
            time_us = checked_int(entry, "time_us", where, default=0)
            self.times_us.append(max(time_us, self.times_us[-1]) if self.times_us else time_us)
            action = entry.get("action")
            if action == "oom":
                self._add_failure(entry, index, checked_int(entry, "size", where))
            elif action in ("segment_alloc", "segment_map"):
                about = entry.get("user_metadata")
                self.ranges.append(
                    _Range(
                        checked_int(entry, "addr", where),
                        checked_int(entry, "size", where),
                        about if _is_arena(about) else None,
                    )
                )
            elif action in ("alloc", "free_completed", "free"):
                address, nbytes = checked_int(entry, "addr", where), checked_int(entry, "size", where)
                before = live.pop(address, None)
                if action != "alloc" and before is None:  # made before the recording began
                    before = self._region(entry, address, nbytes, -1)
                    self.found.append(before)
                if before is not None:  # of an allocation too, if the event of the free is lost
                    before.stop = index
                if action == "alloc":
                    live[address] = self._region(entry, address, nbytes, index)
                    self.found.append(live[address])
        self.blocks = [block for block in self.blocks if block.address not in live]

    def _add_failure(self, entry: dict[Any, Any], index: int, nbytes: int) -> None:
        about = entry.get("user_metadata")
        told: dict[Any, Any] = about if type(about) is dict else {}
        side = "high" if told.get("side") == "high" else "low"
        site = _text(told, "site") or self._site(entry.get("frames"))
        failure = Failure(index, side, nbytes, _text(told, "label"), site)
        self.failures.append((index, entry.get("addr", -1), failure))

    # -- timelines ----------------------------------------------------------------------------------------------

    def timelines(self) -> list[Timeline]:
        """Return an arena's each, and one for all other memory."""
        found = sorted([*self.blocks, *self.found], key=attrgetter("start"))
        ranges = _joined(
            [*self.ranges, *(_Range(one.address, one.nbytes, None) for one in found if one.nbytes)]
        )
        lines: list[_Line] = []
        shared: _Line | None = None
        for one in ranges:
            if one.about is not None:
                one.line = _Line(one.about["arena"] or None, one.about.get("device", ""), one.address)
                one.line.capacity = max(one.nbytes, one.about["capacity"])
                lines.append(one.line)
                continue
            if shared is None:
                shared = _Line(None, f"cuda:{self.index}", one.address)
                lines.append(shared)
            one.line, one.place = shared, shared.capacity
            shared.capacity += one.nbytes
        starts = [one.address for one in ranges]
        for region in found:
            if not region.nbytes:
                continue
            one = ranges[bisect_right(starts, region.address) - 1]
            assert one.line is not None, "every range is in a timeline"
            one.line.regions.append(_span(region, one.place + region.address - one.address, one.nbytes))
        for _, address, failure in self.failures:
            number = bisect_right(starts, address) - 1 if type(address) is int else -1
            owner = ranges[number].line if number >= 0 else (shared or (lines[0] if lines else None))
            if owner is not None:
                owner.failures.append(failure)
        return [self._timeline(line) for line in lines]

    def _timeline(self, line: _Line) -> Timeline:
        first = self.times_us[0] if self.times_us else 0
        return Timeline(
            name=line.name,
            device=line.device,
            capacity=line.capacity,
            times_ns=tuple((time_us - first) * 1000 for time_us in self.times_us),
            regions=tuple(line.regions),
            scopes=(),
            rollbacks=(),
            failures=tuple(line.failures),
            peaks=_peaks(line.regions),
            address=line.address,
        )


def _is_arena(about: Any) -> bool:
    return (
        type(about) is dict
        and type(about.get("arena")) is str
        and type(about.get("device", "")) is str
        and type(about.get("capacity")) is int
        and 0 <= about["capacity"] < _LARGEST
    )


def _is_region(about: dict[Any, Any]) -> bool:
    return about.get("side") in ("low", "high") and type(about.get("offset")) is int


def _site_in(frames: list[Any]) -> str:
    for frame in frames:
        if type(frame) is dict and type(frame.get("filename")) is str and frame["filename"].endswith(".py"):
            line = frame.get("line")
            return f"{frame['filename']}:{line if type(line) is int and 0 <= line < _LARGEST else 0}"
    return ""


def _joined(ranges: list[_Range]) -> list[_Range]:
    """Return ranges of addresses that do not overlap, in order; an arena's own is one whatever else says so."""
    merged: list[_Range] = []
    for one in sorted(ranges, key=lambda one: (one.address, one.about is None, -one.nbytes)):
        last = merged[-1] if merged else None
        if last is not None and one.address < last.address + max(last.nbytes, 1):
            last.nbytes = max(last.nbytes, one.address + one.nbytes - last.address)
            last.about = last.about or one.about
        else:
            merged.append(_Range(one.address, one.nbytes, one.about))
    return merged


def _span(region: _Found, offset: int, capacity: int) -> RegionSpan:
    about = region.about if _is_region(region.about) else {}
    shape, dtype = about.get("shape"), about.get("dtype")
    padding = about.get("padding")
    plain = (
        type(shape) is list
        and len(shape) <= _N_DIMENSIONS  # one list can be that of many regions
        and all(type(dim) is int and 0 <= dim < _LARGEST for dim in shape)
    )
    known = plain and type(dtype) is str
    return RegionSpan(
        side=about.get("side", "low"),
        offset=offset,
        nbytes=region.nbytes,
        padding=padding if type(padding) is int and 0 <= padding <= capacity else 0,
        shape=tuple(shape or ()) if known else (region.nbytes,),
        dtype=dtype if known and type(dtype) is str else "uint8",
        label=region.label,
        site=region.site,
        start=region.start,
        stop=region.stop,
    )


def _peaks(regions: list[RegionSpan]) -> tuple[tuple[int, int], ...]:
    """Return each time that the regions, with what they pad, took more than ever before."""
    changes: dict[int, int] = {}
    for region in regions:
        nbytes = region.nbytes + region.padding
        changes[region.start] = changes.get(region.start, 0) + nbytes
        if region.stop is not None:
            changes[region.stop] = changes.get(region.stop, 0) - nbytes
    taken = peak = 0
    peaks = []
    for index in sorted(changes):
        taken += changes[index]
        if taken > peak:
            peak = taken
            peaks.append((index, taken))
    return tuple(peaks)
