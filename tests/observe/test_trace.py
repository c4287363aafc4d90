# What is raised at the end of a block is tested with the block.
# ruff: noqa: PT012
from __future__ import annotations

import contextlib
import copy
import gc
import json
import os
import pickle
import sys
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuarena import Arena, Debug
from gpuarena.errors import (
    ArenaClosedError,
    ArgumentError,
    ArgumentTypeError,
    CheckpointError,
    NotCopyableError,
    OutOfMemoryError,
)
from gpuarena.observe import Event, Trace, load_trace

# What is recorded, and where to. The same calls on another arena are in test_replay.py.

SUFFIXES = (".jsonl", ".csv")
HOSTILE = [
    None,
    "None",
    "null",
    "",
    " ",
    '"',
    "'",
    'a "quoted" label',
    "a,b;c",
    "line\nbreak",
    "carriage\rreturn",
    "both\r\n",
    "tab\t",
    "\x00\x1f",
    "naïve 日本語 🤖",
    "\u2028\u2029\x85",
    "\ud800",
    "[1, 2]",
    "{}",
    "=1+1",
    "\\n",
]


@pytest.fixture(params=["host", "torch"])
def arena(request):
    return Arena(4096, backend=request.param, alignment=64)


def exercise(arena):
    """One event of every kind but the end."""
    arena.alloc((2, 3), "float32", label="x")
    arena.alloc(5, "uint8", side="high", align=16)
    with arena.scope("step"):
        arena.alloc(10, "uint8").extend(20)
        with pytest.raises(OutOfMemoryError):
            arena.alloc(5000, "int64", label="too much")
    checkpoint = arena.checkpoint()
    arena.alloc(3, "bool")
    arena.spill(checkpoint).restore()


def test_every_event_is_recorded_with_its_figures(arena):
    arena.alloc(7, "uint8")
    with arena.record() as trace:
        exercise(arena)
        arena.close()
    assert isinstance(trace, Trace)
    kinds = [event.kind for event in trace.events]
    assert kinds == [
        "start", "start", "alloc", "alloc", "alloc", "extend", "fail", "rollback", "alloc", "rollback", "restore", "close",
    ]  # fmt: skip
    starts, alloc, high, extend = trace.events[:2], trace.events[2], trace.events[3], trace.events[5]
    assert [(event.side, event.n_regions, event.top) for event in starts] == [
        ("low", 1, 7),
        ("high", 0, 4096),
    ]
    assert alloc == Event("alloc", "low", 2, 88, 64, 24, (2, 3), "float32", 64, "x")
    assert (high.side, high.offset, high.top, high.align, high.label) == ("high", 4080, 4080, 16, None)
    assert (extend.offset, extend.nbytes, extend.top) == (128, 20, 148)
    fail, rollback = trace.events[6:8]
    assert (fail.nbytes, fail.label, fail.top) == (40_000, "too much", 148)
    assert (rollback.n_regions, rollback.top) == (2, 88)
    assert "the end of scope 'step'" in rollback.cause
    assert __file__ in rollback.cause


def test_recording_changes_no_offset_and_no_figure():
    arenas = [Arena(4096, alignment=64) for _ in range(2)]
    with arenas[1].record():
        for arena in arenas:
            exercise(arena)
    assert arenas[0].stats == arenas[1].stats


def test_repeated_allocations_are_recorded_each_time(arena):
    def step():
        with arena.scope():
            return [arena.alloc(4, "float32").offset, arena.empty(4, "float32") is None]

    step()
    step()
    with arena.record() as trace:
        step()
    step()
    assert [event.kind for event in trace.events[2:]] == ["alloc", "alloc", "rollback"]


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("saved", [False, True], ids=["recorded", "saved"])
def test_a_file_holds_the_same_events(arena, tmp_path, suffix, saved):
    path = tmp_path / f"log{suffix}"
    with arena.record() as trace:
        if saved:
            exercise(arena)
        else:
            with arena.record(str(path)) as second:
                exercise(arena)
            assert second.events == []
            assert second.path == path
    if saved:
        trace.save(path)
    expected = trace.events
    assert load_trace(path) == expected
    assert load_trace(str(path)) == expected


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_labels_come_back_whatever_they_hold(tmp_path, suffix):
    arena = Arena(1 << 16)
    path = tmp_path / f"log{suffix}"
    with arena.record(path):
        for label in HOSTILE:
            arena.alloc(1, "uint8", label=label)
            with arena.scope(label):
                arena.alloc(1, "uint8", label=label)
    events = load_trace(path)
    assert [event.label for event in events if event.kind == "alloc"] == [
        label for label in HOSTILE for _ in "ab"
    ]
    assert path.read_text(encoding="utf-8")


@given(st.lists(st.none() | st.text(), max_size=5), st.sampled_from(SUFFIXES))
def test_any_label_comes_back(tmp_path_factory, labels, suffix):
    path = tmp_path_factory.mktemp("trace") / f"log{suffix}"
    arena = Arena(1 << 12, alignment=1)
    with arena.record() as trace, arena.record(path):
        for label in labels:
            arena.alloc(1, "uint8", label=label)
    assert load_trace(path) == trace.events


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_very_long_label_comes_back(tmp_path, suffix):
    arena = Arena(4096)
    path = tmp_path / f"log{suffix}"
    with arena.record(path):
        arena.alloc(1, "uint8", label="x" * 200_000)
    assert len(load_trace(path)[-1].label) == 200_000


def test_the_formats_are_what_other_programs_read(arena, tmp_path):
    with arena.record() as trace:
        arena.alloc((2, 3), "float32", label="a,b")
    trace.save(tmp_path / "log.jsonl")
    trace.save(tmp_path / "log.csv")
    line = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])
    assert (line["kind"], line["shape"], line["label"]) == ("alloc", [2, 3], "a,b")
    import csv

    with open(tmp_path / "log.csv", newline="", encoding="utf-8") as file:
        row = list(csv.DictReader(file))[-1]
    assert (row["kind"], row["shape"], json.loads(row["label"])) == ("alloc", "2 3", "a,b")


def test_two_traces_at_once_end_in_any_order(arena, tmp_path):
    first, second = arena.record(), arena.record(tmp_path / "log.jsonl")
    first.__enter__()
    arena.alloc(1, "uint8", label="1")
    second.__enter__()
    arena.alloc(2, "uint8", label="2")
    first.__exit__(None, None, None)
    arena.alloc(3, "uint8", label="3")
    second.__exit__(None, None, None)
    arena.alloc(4, "uint8", label="4")
    labels = [
        [event.label for event in events if event.kind == "alloc"]
        for events in (first.events, load_trace(tmp_path / "log.jsonl"))
    ]
    assert labels == [["1", "2"], ["2", "3"]]


# -- files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [5, 1.0, ["log.csv"], object()])
def test_a_path_is_a_text_or_a_path(arena, path):
    for call in (arena.record, load_trace, arena.record().save):
        with pytest.raises(ArgumentTypeError, match="path"):
            call(path)


@pytest.mark.parametrize("path", ["log", "log.txt", "log.json", ".jsonl", "log.CSV", "log.csv.gz", ""])
def test_the_suffix_decides_about_the_format(arena, tmp_path, path):
    for call in (arena.record, load_trace, arena.record().save):
        with pytest.raises(ArgumentError, match=r"\.jsonl or \.csv"):
            call(tmp_path / path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_made_records_nothing_and_changes_nothing(arena, tmp_path):
    for path in (tmp_path / "none" / "log.jsonl", tmp_path):
        path = path if path.suffix else path / "folder.jsonl"
        if path.name == "folder.jsonl":
            path.mkdir()
        trace = arena.record(path)
        with pytest.raises(OSError):
            trace.__enter__()
        assert arena._hooks == []
    arena.alloc(1, "uint8")
    with pytest.raises(FileNotFoundError):
        load_trace(tmp_path / "none.csv")


def test_a_file_is_made_on_entry_and_overwritten(arena, tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text("nonsense\n" * 100)
    trace = arena.record(path)
    assert path.read_text().startswith("nonsense")
    with trace:
        arena.alloc(1, "uint8")
    assert [event.kind for event in load_trace(path)] == ["start", "start", "alloc"]


def test_an_exception_closes_the_file(arena, tmp_path):
    path = tmp_path / "log.csv"
    error = KeyError()
    with pytest.raises(KeyError) as caught, arena.record(path):
        arena.alloc(1, "uint8")
        raise error
    assert caught.value is error
    assert load_trace(path)[-1].kind == "alloc"


@pytest.fixture
def full_disk(tmp_path):
    """A path of a log on a disk that is full."""
    if not os.path.exists("/dev/full"):
        pytest.skip("needs a device that is always full")
    path = tmp_path / "log.jsonl"
    path.symlink_to("/dev/full")
    return path


@contextlib.contextmanager
def recording(arena, path):
    trace = arena.record(path)
    trace.__enter__()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            trace.__exit__(None, None, None)


def test_an_allocation_that_raises_for_a_full_disk_has_taken_nothing(full_disk):
    arena = Arena(1 << 20, alignment=1)
    with recording(arena, full_disk):
        for number in range(400):
            before = arena.stats
            try:
                arena.alloc(1, "uint8", label=f"label {number}" * 5)
            except OSError:
                assert arena.stats == before


def test_a_rollback_that_raises_for_a_full_disk_is_whole(full_disk):
    arena = Arena(1 << 20, alignment=1, debug=Debug(on_live_arrays="ignore"))
    with recording(arena, full_disk), arena.profile() as profile, arena.record() as second:
        for _ in range(400):
            with contextlib.suppress(OSError), arena.scope("a scope with a name of some length" * 3):
                arena.alloc(1, "uint8", label="x" * 100)
            assert profile.regions.current == arena.stats.n_regions == 0
            assert second.events[-1].n_regions == 0


def test_the_error_of_a_full_disk_is_raised_at_the_end(full_disk):
    arena = Arena(1 << 20)
    with pytest.raises(OSError), arena.record(full_disk):
        arena.alloc(1, "uint8")
    assert arena.stats.n_regions == 1
    arena.alloc(1, "uint8")


@pytest.mark.parametrize(
    ("suffix", "text", "line"),
    [
        (".jsonl", "{}\n", 1),
        (".jsonl", '{"kind": "alloc"}\n', 1),
        (".jsonl", "5\n", 1),
        (".jsonl", "null\n", 1),
        (".jsonl", "GOOD\nnot json\n", 2),
        (".jsonl", "GOOD\nGOOD\n\n", 3),
        (".jsonl", 'GOOD\n{"kind"', 2),
        (".csv", "GOOD\nalloc,low\n", 2),
        (".csv", "GOOD\nalloc,low,x,0,0,0,,,1,null,\n", 2),
        (".csv", "GOOD\nalloc,low,1,0,0,0,,,1,no json,\n", 2),
        (".csv", "GOOD\nalloc,low,1,0,0,0,,,1,null,,surplus\n", 2),
        (".csv", "one,two\n1,2\n", 2),
    ],
)
def test_a_line_that_is_no_event_is_named(tmp_path, suffix, text, line):
    arena = Arena(64)
    with arena.record() as trace:
        pass
    trace.events[:] = trace.events[:1]
    trace.save(tmp_path / f"good{suffix}")
    good = (tmp_path / f"good{suffix}").read_text().splitlines()[0]
    path = tmp_path / f"log{suffix}"
    path.write_text(text.replace("GOOD", good))
    with pytest.raises(ArgumentError, match=f"line {line}, is no event"):
        load_trace(path)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_that_is_no_text_is_refused(tmp_path, suffix):
    path = tmp_path / f"log{suffix}"
    path.write_bytes(b"\x80\xff\x00" * 10)
    with pytest.raises(ArgumentError, match="no event"):
        load_trace(path)


def test_a_trace_records_once_and_only_open_arenas(arena, tmp_path):
    trace = arena.record()
    with trace, pytest.raises(CheckpointError, match="once"):
        trace.__enter__()
    with pytest.raises(CheckpointError, match="once"):
        trace.__enter__()
    for call in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(NotCopyableError):
            call(trace)
    late = arena.record(tmp_path / "log.csv")
    arena.close()
    with pytest.raises(ArenaClosedError, match="record"):
        late.__enter__()
    assert not (tmp_path / "log.csv").exists()


def test_a_trace_that_has_ended_waits_for_no_garbage_collector(tmp_path):
    gc.collect()
    gc.disable()
    try:
        arena = Arena(1024)
        with arena.record() as trace, arena.record(tmp_path / "log.csv"):
            arena.alloc(1, "uint8")
        refs = [weakref.ref(arena), weakref.ref(trace)]
        del arena, trace
        assert [ref() for ref in refs] == [None, None]
    finally:
        gc.enable()


def test_debug_mode_records_the_same_events():
    events = []
    for debug in (False, Debug(guard=0, on_live_arrays="ignore")):
        arena = Arena(4096, alignment=64, debug=debug)
        with arena.record() as trace:
            exercise(arena)
        events.append([(event.kind, event.offset, event.nbytes, event.top) for event in trace.events])
    assert events[0] == events[1]


def test_structured_types_are_recorded(tmp_path):
    arena = Arena(4096)
    path = tmp_path / "log.csv"
    with arena.record() as trace, arena.record(path):
        arena.alloc(2, np.dtype([("a", "f4"), ("b, c", "i8")]))
    assert load_trace(path) == trace.events
    assert sys.getsizeof(trace.events[0]) < 200
