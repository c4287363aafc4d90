"""Chrome trace events: checked by the rules of the format, and against the log that they came from."""

from __future__ import annotations

import contextlib
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuarena import Arena, OutOfMemoryError
from gpuarena.errors import ArgumentTypeError
from gpuarena.observe import Event, write_perfetto
from gpuarena.observe.timeline import Failure, RegionSpan, Rollback, ScopeSpan, Timeline, timeline
from gpuarena.testing import Driver, programs

#: Slices deeper than this are dropped by Perfetto.
DEEPEST = 512
HOSTILE = [
    "",
    '"',
    "\\",
    "</script>",
    "line\nbreak",
    "\x00\x1f",
    "\ud800",
    "日本語",
    "\u2028",
    "{}",
    "x" * 5000,
    "\x7f",
]


def refuse(constant):
    raise AssertionError(f"{constant} is no JSON")


def read(path):
    """Read a file as strictly as a viewer does, and check all rules of the format."""
    text = path.read_bytes().decode("utf-8")
    document = json.loads(text, parse_constant=refuse)
    assert isinstance(document["traceEvents"], list)
    names, slices = {}, {}
    for event in document["traceEvents"]:
        phase = event["ph"]
        assert phase in ("M", "C", "X", "i"), event
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
        assert isinstance(event["name"], str)
        assert event["name"].isprintable()
        for value in event["args"].values():
            assert isinstance(value, (int, float, str)), event
            if isinstance(value, str):
                value.encode()  # no halves of surrogate pairs
        if phase == "M":
            if event["name"] in ("process_name", "thread_name"):
                assert isinstance(event["args"]["name"], str)
                assert (event["name"], event["tid"]) not in names
                names[event["name"], event["tid"]] = event["args"]["name"]
            else:
                assert event["name"] == "thread_sort_index"
                assert type(event["args"]["sort_index"]) is int
            continue
        assert math.isfinite(event["ts"])
        assert event["ts"] >= 0
        if phase == "X":
            assert math.isfinite(event["dur"])
            assert event["dur"] >= 0
            start = round(event["ts"] * 1000)
            slices.setdefault(event["tid"], []).append((start, start + round(event["dur"] * 1000)))
        elif phase == "C":
            assert all(type(value) is int and value >= 0 for value in event["args"].values()), event
        else:
            assert event["s"] in ("g", "p", "t")
        if phase != "C":
            assert ("thread_name", event["tid"]) in names, "a track without a name"
    times = [event["ts"] for event in document["traceEvents"] if event["ph"] != "M"]
    assert times == sorted(times)
    for track in slices.values():  # as a viewer stacks them, in the order of the file
        stack = []
        for start, stop in track:
            while stack and stack[-1] <= start:
                stack.pop()
            assert not stack or stop <= stack[-1], "slices overlap without nesting"
            stack.append(stop)
            assert len(stack) <= DEEPEST
    return document


def of_phase(document, phase):
    return [event for event in document["traceEvents"] if event["ph"] == phase]


def replayed(events):
    """Read a log the plain way: regions with the indices of their first and last event, and the used bytes."""
    live, done, used = {"low": [], "high": []}, [], []
    for index, event in enumerate(events):
        stack = live[event.side]
        if event.kind == "held":
            stack.append((event, 0))
        elif event.kind in ("alloc", "pin", "restore"):
            stack.append((event, index))
        elif event.kind == "extend":
            done.append((*stack.pop(), index))
            stack.append((event, index))
        elif event.kind == "rollback":
            while len(stack) > event.n_regions:
                done.append((*stack.pop(), index))
        elif event.kind == "close":
            for one in live.values():
                done += [(*region, index) for region in one]
                one.clear()
        used.append(sum(region.nbytes for one in live.values() for region, _ in one))
    done += [(*region, None) for one in live.values() for region in one]
    return done, used


def spread(events):
    """Return the times in nanoseconds, later by one where two are the same."""
    times = []
    for event in events:
        times.append(max(event.time_ns, times[-1] + 1) if times else event.time_ns)
    return times


def check_against_log(document, events):
    times = spread(events)
    regions, used = replayed(events)
    expected = sorted(
        (
            event.offset,
            event.nbytes,
            times[start],
            times[-1] + 1 if stop is None else times[stop],
        )
        for event, start, stop in regions
    )
    shown = sorted(
        (
            event["args"]["offset"],
            event["args"]["nbytes"],
            round(event["ts"] * 1000),
            round((event["ts"] + event["dur"]) * 1000),
        )
        for event in of_phase(document, "X")
        if event["cat"] == "region"
    )
    assert shown == expected
    counted = {
        round(event["ts"] * 1000): event["args"]["used"]
        for event in of_phase(document, "C")
        if event["name"] == "bytes"
    }
    held = max(i for i, event in enumerate(events) if event.kind in ("start", "held", "scope_held"))
    last = 0
    for index, time_ns in enumerate(times):
        last = counted.get(time_ns, last)
        if index >= held:
            assert last == used[index], f"event {index}"


def make(tmp_path, line):
    path = tmp_path / "trace.json"
    write_perfetto(line, path)
    return read(path)


@given(programs(parts=True), programs(parts=True), st.booleans())
def test_random_programs_make_valid_traces_that_agree_with_the_log(tmp_path_factory, before, during, close):
    arena = Arena(1200, alignment=16, name="tested")
    driver = Driver(arena)
    for call in before:
        driver.step(call)
    with arena.record() as trace:
        for call in during:
            driver.step(call)
        if close:
            arena.close()
    document = make(tmp_path_factory.mktemp("trace"), timeline(trace.events))
    check_against_log(document, trace.events)
    rollbacks = [event for event in trace.events if event.kind == "rollback"]
    failures = [event for event in trace.events if event.kind == "fail"]
    assert len(of_phase(document, "i")) == len(rollbacks) + len(failures)
    opened = [event for event in trace.events if event.kind in ("scope_open", "scope_held")]
    assert len([event for event in of_phase(document, "X") if event["cat"] == "scope"]) == len(opened)


def test_what_a_viewer_shows_of_a_step(tmp_path):
    arena = Arena(4096, name="scratch")
    with arena.record() as trace:
        with arena.scope("step"):
            arena.alloc((2, 3), "float32", label="mask")
            with arena.scope("inner"):
                arena.alloc(5, "int8", side="high", label="out")
            with contextlib.suppress(OutOfMemoryError):
                arena.alloc(2**20, "uint8", label="too much")
        arena.alloc(7, "int8")
    document = make(tmp_path, timeline(trace.events))
    slices = {event["name"]: event for event in of_phase(document, "X")}
    assert set(slices) == {"step", "inner", "mask float32[2, 3]", "out int8[5]", "int8[7]"}
    assert slices["mask float32[2, 3]"]["args"]["site"].startswith(__file__)
    assert "live" not in slices["mask float32[2, 3]"]["args"]
    assert slices["int8[7]"]["args"]["live"] is True
    step, mask = slices["step"], slices["mask float32[2, 3]"]
    assert step["ts"] < mask["ts"] < slices["inner"]["ts"]
    assert step["tid"] == slices["inner"]["tid"] != mask["tid"]
    names = {
        event["tid"]: event["args"]["name"]
        for event in of_phase(document, "M")
        if event["name"] == "thread_name"
    }
    assert names[mask["tid"]] == "mask"
    assert names[slices["out int8[5]"]["tid"]] == "out, high end"
    assert names[slices["int8[7]"]["tid"]] == "other regions"
    marks = {event["name"]: event["args"] for event in of_phase(document, "i")}
    assert marks["drops 1 region"]["nbytes"] == 24
    assert marks["1048576 bytes did not fit"]["label"] == "too much"
    process = next(event for event in of_phase(document, "M") if event["name"] == "process_name")
    assert process["args"]["name"] == "arena 'scratch' on cpu"
    assert document["otherData"]["capacity_bytes"] == 4096


def test_padding_and_both_ends_are_counted(tmp_path):
    arena = Arena(4096, alignment=64)
    with arena.record() as trace:
        arena.alloc(10, "uint8")
        arena.alloc(10, "uint8")
        arena.alloc(10, "uint8", side="high")
        stats = arena.stats
    document = make(tmp_path, timeline(trace.events))
    last = {event["name"]: event["args"] for event in of_phase(document, "C")}
    assert last["bytes"] == {"used": stats.used, "padding": stats.padding}
    assert last["bytes taken by"] == {"low end": stats.top, "high end": stats.capacity - stats.high}


@pytest.mark.parametrize("label", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_labels_make_valid_json(tmp_path, label):
    arena = Arena(4096, name=label)
    with arena.record() as trace, arena.scope(label):
        arena.alloc(3, "uint8", label=label)
        with contextlib.suppress(OutOfMemoryError):
            arena.alloc(2**20, "uint8", label=label)
    make(tmp_path, timeline(trace.events))


def test_times_that_are_the_same_or_go_back_do_not_break_the_nesting(tmp_path):
    arena = Arena(4096)
    with arena.record() as trace:
        for _ in range(3):
            with arena.scope(), arena.scope():
                arena.alloc(3, "uint8")
                arena.alloc(3, "uint8")
    for times in ([0] * 99, [5] * 99, list(range(99, 0, -1))):
        events = [
            Event(*(getattr(e, n) if n != "time_ns" else time for n in e.__slots__))
            for e, time in zip(trace.events, times, strict=False)
        ]
        check_against_log(make(tmp_path, timeline(events)), events)


def test_thousands_that_lie_in_each_other_stay_within_what_perfetto_shows(tmp_path):
    arena = Arena("1MiB", alignment=1)
    with arena.record() as trace, arena.scope():
        for number in range(1500):
            arena.alloc(1, "uint8", label="same" if number % 3 else None)
    document = make(tmp_path, timeline(trace.events))
    check_against_log(document, trace.events)


def test_many_labels_share_a_track(tmp_path):
    arena = Arena("1MiB", alignment=1)
    with arena.record() as trace:
        for number in range(300):
            arena.alloc(number + 1, "uint8", label=f"label {number}")
    document = make(tmp_path, timeline(trace.events))
    tracks = {event["tid"] for event in of_phase(document, "X")}
    assert len(tracks) < 80
    largest = next(event for event in of_phase(document, "X") if event["name"].startswith("label 299 "))
    alone = [event for event in of_phase(document, "X") if event["tid"] == largest["tid"]]
    assert alone == [largest]


def test_an_empty_timeline_is_a_valid_trace(tmp_path):
    document = make(tmp_path, Timeline(None, "", 1024, (), (), (), (), (), ()))
    assert of_phase(document, "X") == []


def test_spans_of_any_origin_are_shown(tmp_path):
    made = Timeline(
        name=None,
        device="cuda:1",
        capacity=2**62,
        times_ns=(0, 10, 20, 2**60),
        regions=(RegionSpan("low", 2**61, 2**60, 0, (2**60,), "uint8", None, "", -1, 3),),
        scopes=(ScopeSpan("high", None, "", 0, 1, None),),
        rollbacks=(Rollback(2, "low", 5, 3, 0, ""),),
        failures=(Failure(3, "high", 2**62, None),),
        peaks=(),
    )
    document = make(tmp_path, made)
    assert {event["name"] for event in of_phase(document, "X")} == {f"{2**60} bytes", "scope"}


def test_what_is_no_timeline_is_refused(tmp_path):
    with pytest.raises(ArgumentTypeError, match="takes a Timeline"):
        write_perfetto([], tmp_path / "trace.json")
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "trace.json"
    path.write_text("old")
    monkeypatch.setattr(json, "dumps", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_perfetto(Timeline(None, "", 1, (0,), (), (), (), (), ()), path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
