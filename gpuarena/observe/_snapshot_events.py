"""The history of arenas as the events of a device that PyTorch's memory viewer knows."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gpuarena.observe._texts import contents, has_shape, place_of, printable
from gpuarena.observe.timeline import RegionSpan, Timeline
from gpuarena.observe.trace import Event

__all__ = ["Shot", "add_categories", "block_frames", "device_events", "region_metadata"]

#: The viewer has ten colours, and writes the names of all categories over its picture.
_N_CATEGORIES = 18
#: The category of what has none, as the viewer calls it.
_NO_CATEGORY = "unknown"
#: Both viewers leave out frames with this in their name, which a label may have too.
_OMITTED = "_start"


@dataclass
class Shot:
    """An arena at a moment, and how it came to that. Offsets and sizes are bytes."""

    name: str | None
    device: str
    address: int
    capacity: int
    total: int
    """Of the segment: all of the capacity, or what is committed of it."""
    grows: bool
    closed: bool
    regions: list[RegionSpan]
    """Those that are live."""
    low_top: int
    high_top: int
    unknown: set[str]
    """Ends of which it is not known what lies on them."""
    log: tuple[Event, ...]
    history: Timeline

    @property
    def title(self) -> str:
        """What it is called."""
        return f"arena {printable(self.name)}" if self.name else "arena"

    @property
    def metadata(self) -> dict[str, Any]:
        """What the format has no words for."""
        about: dict[str, Any] = {"arena": self.name or "", "device": self.device, "capacity": self.capacity}
        return {**about, "grows": True} if self.grows else about

    @cached_property
    def frames(self) -> list[dict[str, Any]]:
        """What stands for the call site of the segment."""
        return [
            _frame(f"{self.title} on {printable(self.device)}" if self.device else self.title, 0, "segment")
        ]


def _frame(filename: str, line: int, name: str) -> dict[str, Any]:
    return {"filename": filename, "line": line, "name": name}


def block_frames(shot: Shot, region: RegionSpan) -> list[dict[str, Any]]:
    """Return the call site of a region, and its label: outermost, so that a flame graph is one of labels."""
    file, line = place_of(region.site)
    frames = [_frame(file or shot.title, line, contents(region))]
    return frames + _label_frames(region.label)


def _label_frames(label: str | None) -> list[dict[str, Any]]:
    """Return the label as a frame, with an invisible letter in what viewers take for the interpreter's functions."""
    return [_frame("label", 0, printable(label).replace(_OMITTED, "_\u2060start"))] if label else []


def region_metadata(region: RegionSpan) -> dict[str, Any]:
    """Return what the format has no words for."""
    about: dict[str, Any] = {}
    if region.label is not None:
        about["label"] = region.label
    if has_shape(region):
        about |= {"dtype": region.dtype, "shape": list(region.shape)}
    about |= {"offset": region.offset, "side": region.side, "padding": region.padding}
    if region.site:
        about["site"] = region.site
    return about


def device_events(shots: list[Shot]) -> list[dict[str, Any]]:
    """Return what happened to the arenas of a device, each first with what there was when its recording began."""
    recorded = [shot for shot in shots if shot.log]
    if not recorded:
        return []
    told = [_Entries(shot) for shot in recorded]
    entries = [entry for one in told for entry in one.beginning()]
    entries += heapq.merge(*(one.rest() for one in told), key=lambda entry: entry["time_us"])
    last_us = max(entry["time_us"] for entry in entries)
    return [
        *entries,
        {"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "time_us": last_us, "frames": []},
    ]


class _Entries:
    """The events of one arena."""

    def __init__(self, shot: Shot) -> None:
        self._shot = shot
        history = shot.history
        self._begun: dict[int, list[RegionSpan]] = {}
        self._ended: dict[int, list[RegionSpan]] = {}
        for region in history.regions:
            if not region.nbytes:
                continue
            self._begun.setdefault(region.start, []).append(region)
            if region.stop is not None:
                self._ended.setdefault(region.stop, []).append(region)
        self._causes = {(back.index, back.side): back.cause for back in history.rollbacks}
        # Of an arena that grows, it is known how far the pointer had gone, not when memory was committed.
        self._mapped = 0
        self._known: dict[
            int, tuple[list[dict[str, Any]], dict[str, Any]]
        ] = {}  # by id; a pickle has each once

    def beginning(self) -> Iterator[dict[str, Any]]:
        """Yield the segment, and the regions that were live when the recording began."""
        start_us = self._shot.history.times_ns[0] // 1000
        yield from self._reach(self._shot.log[0].top, start_us)
        for region in self._begun.get(-1, ()):
            yield self._alloc(region, start_us)

    def rest(self) -> Iterator[dict[str, Any]]:
        """Yield what happened since, in order."""
        shot = self._shot
        tops = {event.side: event.top for event in shot.log[:2]}
        latest_us = 0
        for index, event in enumerate(shot.log):
            time_us = latest_us = max(latest_us, shot.history.times_ns[index] // 1000)
            for region in reversed(self._ended.get(index, ())):
                yield from self._free(region, time_us, self._why(event, index))
            if event.kind in ("alloc", "extend", "pin", "restore", "rollback", "fail"):
                tops[event.side] = event.top
            yield from self._reach(tops["low"], time_us)
            for region in self._begun.get(index, ()):
                yield self._alloc(region, time_us)
            if event.kind == "fail":
                yield self._failure(event, time_us, tops["high"] - tops["low"])
        yield from self._unrecorded(latest_us)
        if shot.closed:
            yield self._segment("segment_free", 0, shot.total, latest_us)
        elif shot.grows:
            yield from self._reach(shot.total, latest_us)
            if self._mapped > shot.total:
                yield self._segment("segment_unmap", shot.total, self._mapped - shot.total, latest_us)

    def _unrecorded(self, time_us: int) -> Iterator[dict[str, Any]]:
        """Yield what leads from the end of the recording to the arena as it is."""
        was = {_place(region) for region in self._shot.history.regions if region.stop is None}
        now = {_place(region) for region in self._shot.regions}
        for region in reversed(self._shot.history.regions):
            if region.nbytes and region.stop is None and _place(region) not in now:
                yield from self._free(region, time_us, "not recorded")
        for region in self._shot.regions:
            if region.nbytes and _place(region) not in was:
                yield from self._reach(region.offset + region.nbytes, time_us)
                yield self._alloc(region, time_us)

    # -- single events ------------------------------------------------------------------------------------------

    def _reach(self, top: int, time_us: int) -> Iterator[dict[str, Any]]:
        """Yield the memory that the low end's pointer has come to, or all of it where the arena does not grow."""
        if not self._shot.grows:
            if not self._mapped:
                yield self._segment("segment_alloc", 0, self._shot.total, time_us)
            self._mapped = self._shot.total
        elif top > self._mapped:
            yield self._segment("segment_map", self._mapped, top - self._mapped, time_us)
            self._mapped = top

    def _segment(self, action: str, offset: int, nbytes: int, time_us: int) -> dict[str, Any]:
        entry = self._entry(action, offset, nbytes, time_us, self._shot.frames)
        return entry | {"user_metadata": self._shot.metadata}

    def _entry(
        self, action: str, offset: int, nbytes: int, time_us: int, frames: list[dict[str, Any]]
    ) -> dict[str, Any]:
        return {
            "action": action,
            "addr": self._shot.address + offset,
            "size": nbytes,
            "stream": 0,
            "time_us": time_us,
            "pool_id": (0, 0),
            "frames": frames,
        }

    def _of(self, region: RegionSpan) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        if id(region) not in self._known:
            self._known[id(region)] = block_frames(self._shot, region), region_metadata(region)
        return self._known[id(region)]

    def _alloc(self, region: RegionSpan, time_us: int) -> dict[str, Any]:
        frames, about = self._of(region)
        entry = self._entry("alloc", region.offset, region.nbytes, time_us, frames)
        return entry | {"user_metadata": about}

    def _free(self, region: RegionSpan, time_us: int, why: str) -> Iterator[dict[str, Any]]:
        """Yield both events of a free, with what freed it before what it was: a viewer that goes back shows them."""
        cause, _, site = why.rpartition(" at ")
        file, line = place_of(site) if cause else ("", 0)
        made, about = self._of(region)
        frames = [_frame(file or self._shot.title, line, printable(cause or why)), *made]
        for action in ("free_requested", "free_completed"):
            entry = self._entry(action, region.offset, region.nbytes, time_us, frames)
            yield entry | {"user_metadata": about}

    def _why(self, event: Event, index: int) -> str:
        if event.kind == "rollback":
            return self._causes.get((index, event.side), "") or "rollback"
        return {"extend": f"extend() at {event.site}" if event.site else "extend()", "close": "close()"}[
            event.kind
        ]

    def _failure(self, event: Event, time_us: int, n_free: int) -> dict[str, Any]:
        file, line = place_of(event.site)
        frames = [_frame(file or self._shot.title, line, f"{event.nbytes} bytes did not fit")]
        frames += _label_frames(event.label)
        about: dict[str, Any] = {"side": event.side, "site": event.site}
        if event.label is not None:
            about["label"] = event.label
        entry = self._entry("oom", 0, event.nbytes, time_us, frames)
        return entry | {"device_free": n_free, "user_metadata": about}


def _place(region: RegionSpan) -> tuple[str, int, int, str | None]:
    return region.side, region.offset, region.nbytes, region.label


def add_categories(traces: list[list[dict[str, Any]]]) -> None:
    """Let the viewer colour regions by label: the labels with the most bytes are categories.

    Every list of them has the viewer's word for none. It would add that itself, and fails over it: the released
    MemoryViz.js misspells the name of the list.
    """
    sums: dict[str, int] = {}
    for entry in (entry for entries in traces for entry in entries if entry["action"] == "alloc"):
        label = entry["user_metadata"].get("label")
        if label:
            sums[label] = sums.get(label, 0) + entry["size"]
    if not sums:
        return
    shown = sorted(sums, key=lambda label: sums[label], reverse=True)[:_N_CATEGORIES]
    names = {label: printable(label) for label in shown}
    for entry in (entry for entries in traces for entry in entries):
        if entry["action"] in ("alloc", "free_requested", "free_completed"):
            entry["category"] = names.get(entry["user_metadata"].get("label"), _NO_CATEGORY)
        elif entry["action"] == "snapshot":
            entry["category"] = _NO_CATEGORY
