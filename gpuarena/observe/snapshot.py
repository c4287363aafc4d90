"""Snapshots of arenas in the format of PyTorch's memory viewer, https://pytorch.org/memory_viz.

The format is that of ``torch.cuda.memory._snapshot``; the viewers are ``torch/utils/viz/MemoryViz.js`` and
``torch/cuda/_memory_viz.py`` of PyTorch. Their rules are kept here: the blocks of a segment tile it, a free is two
events, and the pickle has nothing but plain values in protocol 4.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import pickle
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from gpuarena._files import replacing
from gpuarena.dtypes import as_dtype
from gpuarena.errors import ArgumentError, ArgumentTypeError, DTypeError
from gpuarena.observe._snapshot_events import (
    Shot,
    add_categories,
    block_frames,
    device_events,
    region_metadata,
)
from gpuarena.observe._snapshot_reader import load_snapshot
from gpuarena.observe.timeline import RegionSpan, Timeline, timeline
from gpuarena.observe.trace import Event, Trace, load_trace

if TYPE_CHECKING:
    from gpuarena.arena import Arena

__all__ = ["dump_snapshot", "from_log", "load_snapshot", "snapshot"]

#: The viewer's unpickler knows the operations of protocols 2 to 4.
_PROTOCOL = 4
#: More than a machine has; the viewer wants a list for each.
_N_DEVICES = 1024
#: First address of an arena whose log does not say it. Offsets can be read off it: the viewer shows hexadecimal digits.
_ADDRESS = 1 << 44


def snapshot(arena: Arena, trace: Trace | None = None) -> dict[str, Any]:
    """Return an arena as it is now, as ``torch.cuda.memory._snapshot`` would describe it.

    >>> from gpuarena import Arena
    >>> arena = Arena(1024)
    >>> _ = arena.alloc((2, 3), "float32", label="mask")
    >>> segment = snapshot(arena)["segments"][0]
    >>> [(block["size"], block["state"]) for block in segment["blocks"]]
    [(24, 'active_allocated'), (1000, 'inactive')]

    The arena is one segment. Its regions are allocated blocks with label, dtype, shape and call site; alignment, guard
    zones and what is free are inactive ones. Regions without bytes are left out, as they have no place of their
    own. Of an arena that grows, the segment is the memory that it has committed.

    Parameters
    ----------
    arena : Arena
        Of a child, the segment is the region that it lies in. Of an arena with children, a child's region is one block.
    trace : Trace, optional
        What ``arena.record()`` returned, still running or not: its events are the history that the viewer shows.
        What has changed since it ended is told by events without a call site.

    Returns
    -------
    dict
        Nothing but dicts, lists, tuples, texts, numbers, bools and None.

    Raises
    ------
    ArenaClosedError
        The arena is closed.
    ArgumentError, ArgumentTypeError
        `trace` is none, or is of another arena.
    """
    return _snapshot_of([arena], [] if trace is None else [trace])


def dump_snapshot(
    arenas: Arena | Iterable[Arena], path: Any, traces: Trace | Iterable[Trace] | None = None
) -> None:
    """Write one arena or several into a file that PyTorch's memory viewer opens.

    >>> import pathlib, tempfile
    >>> from gpuarena import Arena
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "arena.pickle"
    >>> dump_snapshot(Arena(1024, name="scratch"), path)
    >>> [(line.name, line.capacity) for line in load_snapshot(path)]
    [('scratch', 1024)]

    Drop the file on https://pytorch.org/memory_viz, which sends it nowhere, or read it with
    ``python -m torch.cuda._memory_viz stats arena.pickle``. Arenas on ``cuda:1`` are shown as device 1, those on the
    host as device 0.

    Parameters
    ----------
    arenas : Arena or iterable of Arena
        Their memory must not overlap.
    path : str or path
        Usually ends in ``.pickle``. The file is written whole or not at all.
    traces : Trace or iterable of Trace, optional
        Recordings of these arenas, at most one of each.

    Raises
    ------
    ArenaClosedError, ArgumentError, ArgumentTypeError
        As `snapshot`; or two arenas overlap, as a child and its parent do.
    OSError
        The file cannot be written.
    """
    found = _snapshot_of(_listed(arenas), _listed(traces))
    write_snapshot(found, path)


def from_log(events: Iterable[Event]) -> dict[str, Any]:
    """Return a snapshot whose history is a log, and whose state is that at the log's end.

    >>> from gpuarena import Arena
    >>> arena = Arena(1024)
    >>> with arena.record() as trace, arena.scope():
    ...     _ = arena.alloc(100, "uint8")
    >>> [event["action"] for event in from_log(trace.events)["device_traces"][0]]
    ['segment_alloc', 'alloc', 'free_requested', 'free_completed', 'snapshot']

    Raises
    ------
    ArgumentError
        The events are no log; see `timeline`.
    """
    log = list(events)
    return _assembled([_shot_of_log(log, timeline(log))])


def write_snapshot(found: dict[str, Any], path: Any) -> None:
    """Write a snapshot to a file, whole or not at all."""
    with replacing(path, "wb") as file:
        pickle.dump(found, file, protocol=_PROTOCOL)


# -- what is to be shown ----------------------------------------------------------------------------------------


def _listed(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, Iterable) else [given]


def _snapshot_of(arenas: list[Any], traces: list[Any]) -> dict[str, Any]:
    from gpuarena.arena import Arena

    for arena in arenas:
        if not isinstance(arena, Arena):
            raise ArgumentTypeError(f"a snapshot is of arenas, not {type(arena).__name__}")
    if not arenas:
        raise ArgumentError("a snapshot is of one arena at least")
    by_arena: dict[int, Trace] = {}
    for trace in traces:
        if not isinstance(trace, Trace):
            raise ArgumentTypeError(f"a trace is what arena.record() returns, not {type(trace).__name__}")
        recorded = trace._ref()
        if not any(recorded is arena for arena in arenas):
            told = "an arena that is gone" if recorded is None else repr(recorded)
            raise ArgumentError(f"the trace is of {told}, which is not in the snapshot")
        if by_arena.setdefault(id(recorded), trace) is not trace:
            raise ArgumentError(f"there are two traces of {recorded!r}")
    return _assembled([_shot_of_arena(arena, by_arena.get(id(arena))) for arena in arenas])


def _shot_of_arena(arena: Arena, trace: Trace | None) -> Shot:
    with arena._lock:
        if arena._closed:
            raise arena._closed_error("dump_snapshot")
        with arena.record() as present:  # which begins with what there is
            pass
        now = _shot_of_log(present.events, timeline(present.events))
        committed = arena._backend.committed if arena.grows else None
        log = None if trace is None else _events_of(trace)
        now.regions = _with_shapes(arena, now.regions)
    now.log = ()
    if committed is not None:
        reach = max([now.low_top, *(region.offset + region.nbytes for region in now.regions)])
        now.total = max(committed, reach) if now.high_top == now.capacity else now.capacity
        now.grows = True
    if log is None:
        return now
    now.log, now.history = log, timeline(log)
    # The recording knows the call sites and shapes of the regions that it has seen being made, the arena some others.
    recorded = {_place(r): r for r in now.history.regions if r.stop is None and r.start >= 0}
    now.regions = [recorded.get(_place(r), r) for r in now.regions]
    here = {_place(r): r for r in now.regions if r.start < 0}
    told = tuple(here.get(_place(r), r) if r.start < 0 and r.stop is None else r for r in now.history.regions)
    now.history = dataclasses.replace(now.history, regions=told)
    return now


def _place(region: RegionSpan) -> tuple[str, int, int, str | None]:
    return region.side, region.offset, region.nbytes, region.label


def _events_of(trace: Trace) -> tuple[Event, ...]:
    if trace._state == "new":
        raise ArgumentError(
            "the trace has recorded nothing yet: with arena.record() as trace, enter it first"
        )
    if trace.path is None:
        return tuple(trace.events)
    trace._flush()
    return tuple(load_trace(trace.path))


def _with_shapes(arena: Arena, regions: list[RegionSpan]) -> list[RegionSpan]:
    """Return regions with dtype and shape where the arena knows them, by its last requests or by an array."""
    found: dict[tuple[str, int, int], tuple[tuple[int, ...], str]] = {}
    for stack in (arena._low, arena._high):
        for slot, record in enumerate(stack.records):
            request = arena._requests.get(slot) if stack is arena._low else None
            array = stack.arrays[slot]
            if request is not None and request[5] is record:
                found[stack.side, record.offset, record.nbytes] = request[1], request[6].name
            elif array is not None:
                with contextlib.suppress(DTypeError):  # of a structure, whose name does not say what it is
                    dtype = as_dtype(array.dtype)
                    found[stack.side, record.offset, record.nbytes] = tuple(map(int, array.shape)), dtype.name
    return [
        dataclasses.replace(region, shape=shape, dtype=dtype)
        for region in regions
        for shape, dtype in [found.get((region.side, region.offset, region.nbytes), ((), ""))]
    ]


def _shot_of_log(log: list[Event], history: Timeline) -> Shot:
    tops = {
        event.side: event.top
        for event in log
        if event.kind not in ("scope_open", "scope_close", "scope_held")
    }
    closed = log[-1].kind == "close"
    told = {event.side for event in log if event.kind == "held"}
    return Shot(
        name=history.name,
        device=history.device,
        address=history.address or _ADDRESS,
        capacity=history.capacity,
        total=history.capacity,
        grows=False,
        closed=closed,
        regions=[region for region in history.regions if region.stop is None],
        low_top=0 if closed else tops["low"],
        high_top=history.capacity if closed else tops["high"],
        unknown={event.side for event in log[:2] if event.n_regions and event.side not in told},
        log=tuple(log),
        history=history,
    )


# -- how it is told ---------------------------------------------------------------------------------------------


def _assembled(shots: list[Shot]) -> dict[str, Any]:
    shots = sorted(shots, key=lambda shot: (shot.device, shot.address))
    for one, other in itertools.pairwise(shots):
        if one.device == other.device and one.address + one.total > other.address:
            raise ArgumentError(
                f"{one.title} and {other.title} share memory, which the viewer cannot show; a child and its parent go "
                f"into files of their own"
            )
    devices = [_device_index(shot.device) for shot in shots]
    traces: list[list[dict[str, Any]]] = [[] for _ in range(max(devices) + 1)]
    for device in sorted(set(devices)):
        of_device = [shot for shot, index in zip(shots, devices, strict=True) if index == device]
        traces[device] = device_events(of_device)
    add_categories(traces)
    return {
        "segments": [
            _segment(shot, device) for shot, device in zip(shots, devices, strict=True) if not shot.closed
        ],
        "device_traces": traces,
        "external_annotations": [],
        "allocator_settings": {},
    }


def _device_index(device: str) -> int:
    """Return the number of ``"cuda:1"``; 0 where there is none."""
    kind, _, number = device.partition(":")
    index = int(number) if kind != "cpu" and number.isascii() and number.isdigit() else 0
    return index if index < _N_DEVICES else 0


def _segment(shot: Shot, device: int) -> dict[str, Any]:
    used = sum(region.nbytes for region in shot.regions)
    return {
        "device": device,
        "address": shot.address,
        "total_size": shot.total,
        "allocated_size": used,
        "active_size": used,
        "requested_size": used,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": shot.grows,
        "frames": shot.frames,
        "user_metadata": shot.metadata,
        "blocks": _blocks(shot),
    }


def _blocks(shot: Shot) -> list[dict[str, Any]]:
    """Return blocks from the segment's first byte to its last, each where the one before ends."""
    blocks: list[dict[str, Any]] = []
    at = 0
    for region in sorted((r for r in shot.regions if r.nbytes), key=lambda region: region.offset):
        _add_gap(blocks, shot, at, region.offset)
        at = region.offset + region.nbytes
        blocks.append(
            _block(shot, region.offset, region.nbytes, "active_allocated", block_frames(shot, region))
            | {"user_metadata": region_metadata(region)}
        )
    _add_gap(blocks, shot, at, shot.total)
    return blocks


def _add_gap(blocks: list[dict[str, Any]], shot: Shot, start: int, stop: int) -> None:
    """Add what lies between two regions: what an end has taken without using it, and what is free."""
    low, high = min(shot.low_top, stop), max(shot.high_top, start)
    parts = (
        (start, low, "unknown" if "low" in shot.unknown else "padding"),
        (max(start, low), min(stop, high), "free"),
        (max(high, low, start), stop, "unknown" if "high" in shot.unknown else "padding"),
    )
    for first, last, what in parts:
        if last > first:
            frames = [{"filename": shot.title, "line": 0, "name": what}]
            blocks.append(
                _block(shot, first, last - first, "inactive", frames) | {"user_metadata": {"kind": what}}
            )


def _block(shot: Shot, offset: int, nbytes: int, state: str, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "address": shot.address + offset,
        "size": nbytes,
        "requested_size": nbytes,
        "state": state,
        "frames": frames,
    }
