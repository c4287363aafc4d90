"""Timelines for Perfetto and Chrome's trace viewer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from operator import itemgetter
from typing import Any

from gpuarena._files import replacing
from gpuarena.errors import ArgumentTypeError
from gpuarena.observe._texts import contents, printable
from gpuarena.observe.timeline import RegionSpan, Timeline

__all__ = ["write_perfetto"]

#: The arena is a process of the trace, and its tracks are threads; the one with the process's number is its main one.
_PID = 1
_LOW_SCOPES, _HIGH_SCOPES, _ROLLBACKS, _FAILURES = 2, 3, 4, 5
_FIRST_REGIONS = 10
#: Labels with a track of their own; the regions of all others share one, because nobody reads a thousand tracks.
_N_LABELS = 64
#: Perfetto drops slices that lie in more than 512 others, so a track with more goes on in another one.
_DEPTH = 256
#: Events that are encoded together.
_BATCH = 4096


def write_perfetto(timeline: Timeline, path: Any) -> None:
    """Write a timeline as Chrome trace events, which ui.perfetto.dev and chrome://tracing open.

    >>> import json, pathlib, tempfile
    >>> from gpuarena import Arena
    >>> from gpuarena.observe.timeline import timeline
    >>> arena = Arena(4096)
    >>> with arena.record() as trace, arena.scope("step"):
    ...     _ = arena.alloc(100, "uint8", label="mask")
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "step.json"
    >>> write_perfetto(timeline(trace.events), path)
    >>> events = json.loads(path.read_text())["traceEvents"]
    >>> [event["name"] for event in events if event["ph"] == "X"]
    ['step', 'mask uint8[100]']

    There are counters of the used bytes, of the padding, and of what each end takes; a track of the scopes of each end;
    tracks of the regions by label, where those that were made later lie below; and marks for rollbacks and for
    requests that did not fit. Sizes are bytes. Times are those of the log, but no two events have the same:
    one that does comes a nanosecond later.

    Parameters
    ----------
    timeline : Timeline
    path : str or path
        Usually ends in ``.json``. The file is written whole or not at all.

    Raises
    ------
    ArgumentTypeError
        `timeline` is none.
    OSError
        The file cannot be written.

    Notes
    -----
    The format is that of the document "Trace Event Format": of its phases M (names), C (counters), X (slices) and
    i (instants) are used. Slices of a track nest: a region ends no later than those below it on its end.
    """
    if not isinstance(timeline, Timeline):
        raise ArgumentTypeError(
            f"write_perfetto takes a Timeline, as observe.timeline(events) makes one, not "
            f"{type(timeline).__name__}"
        )
    events = _Events(timeline).sorted()
    name = printable(timeline.name or "arena")
    about = {"arena": name, "device": printable(timeline.device), "capacity_bytes": timeline.capacity}
    with replacing(path) as file:
        file.write(f'{{"displayTimeUnit":"ns","otherData":{json.dumps(about)},"traceEvents":[\n')
        for start in range(0, len(events), _BATCH):
            text = ",\n".join(
                json.dumps(event, separators=(",", ":"), allow_nan=False)
                for event in events[start : start + _BATCH]
            )
            file.write((",\n" if start else "") + text)
        file.write("\n]}\n")


class _Events:
    """The trace events of a timeline."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        # No two are the same, so that what is inside of what is never a matter of their order in the file.
        self._times_ns: list[int] = []
        last = -1
        for time_ns in timeline.times_ns:
            last = max(time_ns, last + 1)
            self._times_ns.append(last)
        self._end_ns = last + 1

    def sorted(self) -> list[dict[str, Any]]:
        """Return all of them: the names first, then by time, and what begins at the same time outermost first."""
        slices = [*self._scopes(), *self._regions(), *self._instants(), *self._counters()]
        slices.sort(key=lambda event: (event["ts"], -event.get("dur", 0)))
        return [*self._names(), *slices]

    # -- names --------------------------------------------------------------------------------------------------

    def _names(self) -> Iterator[dict[str, Any]]:
        line = self._timeline
        title = f"arena {printable(line.name)!r}" if line.name else "arena"
        yield _name("process_name", 0, f"{title} on {printable(line.device)}" if line.device else title)
        tracks = {
            _LOW_SCOPES: "scopes, low end",
            _HIGH_SCOPES: "scopes, high end",
            _ROLLBACKS: "rollbacks",
            _FAILURES: "out of memory",
            **self._tracks,
        }
        used = {_LOW_SCOPES, _ROLLBACKS, *self._tracks}
        used |= {_HIGH_SCOPES for scope in line.scopes if scope.side == "high"}
        used |= {_FAILURES for _ in line.failures}
        for tid in sorted(used):
            yield _name("thread_name", tid, tracks[tid])
            yield {
                "ph": "M", "name": "thread_sort_index", "pid": _PID, "tid": tid, "args": {"sort_index": tid}
            }  # fmt: skip

    # -- slices -------------------------------------------------------------------------------------------------

    def _ts(self, index: int) -> float:
        """Return the time of an event in microseconds; of what was there at the start, that of the first."""
        return self._times_ns[max(index, 0)] / 1000

    def _slice(
        self, name: str, category: str, tid: int, start: int, stop: int | None, args: dict[str, Any]
    ) -> dict[str, Any]:
        begin_ns = self._times_ns[max(start, 0)] if self._times_ns else 0
        end_ns = self._end_ns if stop is None else self._times_ns[stop]
        if stop is None:
            args["live"] = True
        return {
            "ph": "X", "name": printable(name), "cat": category, "pid": _PID, "tid": tid,
            "ts": begin_ns / 1000, "dur": (end_ns - begin_ns) / 1000, "args": args,
        }  # fmt: skip

    def _scopes(self) -> Iterator[dict[str, Any]]:
        for scope in self._timeline.scopes:
            tid = _LOW_SCOPES if scope.side == "low" else _HIGH_SCOPES
            args = {"top": scope.top, "site": printable(scope.site)}
            yield self._slice(scope.label or "scope", "scope", tid, scope.start, scope.stop, args)

    def _regions(self) -> list[dict[str, Any]]:
        """Return the regions; each label of an end has a track, and one more for each `_DEPTH` that lie in each other."""
        own = self._own_tracks()
        self._tracks: dict[int, str] = {}
        tids: dict[tuple[str, str | None, int], int] = {}
        open_regions: dict[tuple[str, str | None], list[int]] = {}
        never = len(self._times_ns)
        found = []
        for region in self._timeline.regions:
            group = region.label if region.label in own else None
            stops = open_regions.setdefault((region.side, group), [])
            while stops and stops[-1] <= max(region.start, 0):
                stops.pop()
            lane = len(stops) // _DEPTH
            stops.append(never if region.stop is None else region.stop)
            key = region.side, group, lane
            if key not in tids:
                tids[key] = tid = _FIRST_REGIONS + len(tids)
                self._tracks[tid] = self._track_name(region.side, group, lane, bool(own))
            found.append(self._region(region, tids[key]))
        return found

    def _own_tracks(self) -> set[str]:
        """Return the labels that have tracks of their own: those with the most bytes."""
        sums: dict[str, int] = {}
        for region in self._timeline.regions:
            if region.label is not None:
                sums[region.label] = sums.get(region.label, 0) + region.nbytes
        return {label for label, _ in sorted(sums.items(), key=itemgetter(1), reverse=True)[:_N_LABELS]}

    @staticmethod
    def _track_name(side: str, label: str | None, lane: int, others: bool) -> str:
        name = printable(label) if label is not None else ("other regions" if others else "regions")
        return name + (", high end" if side == "high" else "") + (f" ({lane + 1})" if lane else "")

    def _region(self, region: RegionSpan, tid: int) -> dict[str, Any]:
        args: dict[str, Any] = {"offset": region.offset, "nbytes": region.nbytes, "padding": region.padding}
        if region.site:
            args["site"] = printable(region.site)
        name = f"{region.label} {contents(region)}" if region.label else contents(region)
        return self._slice(name, "region", tid, region.start, region.stop, args)

    # -- instants and counters ----------------------------------------------------------------------------------

    def _instants(self) -> Iterator[dict[str, Any]]:
        for back in self._timeline.rollbacks:
            plural = "" if back.n_regions == 1 else "s"
            args: dict[str, Any] = {
                "cause": printable(back.cause), "end": back.side, "regions": back.n_regions,
                "nbytes": abs(back.old_top - back.new_top),
            }  # fmt: skip
            yield self._instant(f"drops {back.n_regions} region{plural}", _ROLLBACKS, back.index, args)
        for failure in self._timeline.failures:
            args = {"nbytes": failure.nbytes, "end": failure.side, "label": printable(failure.label or "")}
            yield self._instant(f"{failure.nbytes} bytes did not fit", _FAILURES, failure.index, args)

    def _instant(self, name: str, tid: int, index: int, args: dict[str, Any]) -> dict[str, Any]:
        return {
            "ph": "i", "s": "t", "name": name, "cat": "mark", "pid": _PID, "tid": tid,
            "ts": self._ts(index), "args": args,
        }  # fmt: skip

    def _counters(self) -> Iterator[dict[str, Any]]:
        """Yield the sums after each event that changes them."""
        changes: dict[int, list[tuple[int, RegionSpan]]] = {}
        for region in self._timeline.regions:
            changes.setdefault(max(region.start, 0), []).append((1, region))
            if region.stop is not None:
                changes.setdefault(region.stop, []).append((-1, region))
        used = padding = 0
        ends = {"low": 0, "high": 0}
        if self._times_ns:
            changes.setdefault(0, [])
        for index in sorted(changes):
            for sign, region in changes[index]:
                used += sign * region.nbytes
                padding += sign * region.padding
                ends[region.side] += sign * (region.nbytes + region.padding)
            yield self._counter("bytes", index, {"used": used, "padding": padding})
            taken = {f"{side} end": nbytes for side, nbytes in ends.items()}
            yield self._counter("bytes taken by", index, taken)

    def _counter(self, name: str, index: int, values: dict[str, int]) -> dict[str, Any]:
        return {"ph": "C", "name": name, "pid": _PID, "tid": 0, "ts": self._ts(index), "args": values}


def _name(kind: str, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": _PID, "tid": tid, "args": {"name": name}}
