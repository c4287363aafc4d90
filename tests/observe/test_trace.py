# What is raised at the end of a block is tested with the block.
# ruff: noqa: PT012
from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
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
    return Arena(4096, backend=request.param, alignment=64, name="room")


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


def untimed(events):
    """Events as two logs of the same calls have them."""
    return [dataclasses.replace(event, time_ns=0) for event in events]


def test_every_event_is_recorded_with_its_figures(arena):
    arena.alloc(7, "uint8")
    with arena.record() as trace:
        exercise(arena)
        arena.close()
    assert isinstance(trace, Trace)
    kinds = [event.kind for event in trace.events]
    assert kinds == [
        "start", "start", "held", "alloc", "alloc", "scope_open", "alloc", "extend", "fail", "rollback",
        "scope_close", "alloc", "rollback", "restore", "close",
    ]  # fmt: skip
    starts, held, alloc, high = trace.events[:2], trace.events[2], trace.events[3], trace.events[4]
    assert [(event.side, event.n_regions, event.top, event.offset) for event in starts] == [
        ("low", 1, 7, 0),
        ("high", 0, 4096, 4096),
    ]
    for start in starts:
        figures = start.nbytes, start.align, start.label, start.device, start.address
        assert figures == (4096, 64, "room", "cpu", start.address)
    assert held == Event("held", "low", 1, 7, 0, 7, (7,), "uint8")
    shown = dataclasses.replace(alloc, time_ns=0, site="")
    assert shown == Event("alloc", "low", 2, 88, 64, 24, (2, 3), "float32", 64, "x")
    assert (high.side, high.offset, high.top, high.align, high.label) == ("high", 4080, 4080, 16, None)
    opened, extend = trace.events[5], trace.events[7]
    assert (opened.side, opened.label, opened.n_regions, opened.top, opened.offset) == (
        "low",
        "step",
        2,
        88,
        88,
    )
    assert (extend.offset, extend.nbytes, extend.top, extend.shape) == (128, 20, 148, (20,))
    fail, rollback, closed = trace.events[8:11]
    assert (fail.nbytes, fail.label, fail.top) == (40_000, "too much", 148)
    assert (rollback.n_regions, rollback.top) == (2, 88)
    assert "the end of scope 'step'" in rollback.cause
    assert __file__ in rollback.cause
    assert (closed.side, closed.label, closed.n_regions, closed.top, closed.offset) == (
        "low",
        "step",
        2,
        88,
        88,
    )


def test_the_log_begins_with_the_address(arena):
    address = arena.address
    with arena.record() as trace:
        pass
    assert [event.address for event in trace.events] == [address, address]


def test_every_event_says_when_and_from_where(arena):
    with arena.record() as trace:
        before = time.perf_counter_ns()
        exercise(arena)
        taken = time.perf_counter_ns() - before
    times = [event.time_ns for event in trace.events]
    assert times[:2] == [0, 0]
    assert times == sorted(times)
    assert 0 < times[-1] - times[2] < taken
    code = exercise.__code__
    lines = {line for _, _, line in code.co_lines()}
    for event in trace.events[2:]:
        file, line = event.site.rsplit(":", 1)
        assert file == __file__
        assert int(line) in lines
    first = code.co_firstlineno
    assert [int(event.site.rsplit(":", 1)[1]) - first for event in trace.events[2:6]] == [2, 3, 4, 5]


def test_a_cache_inside_the_package_is_not_where_an_allocation_comes_from():
    from gpuarena.kv import KVCache, KVSpec

    arena = Arena("1MiB")
    spec = KVSpec.uniform(layers=1, kv_heads=1, head_dim=8, dtype="float32")
    with arena.record() as trace:
        KVCache(arena, spec, batch=1, max_tokens=8)
    sites = {event.site for event in trace.events if event.kind == "alloc"}
    assert [site.rsplit(":", 1)[0] for site in sites] == [__file__]


def test_sites_can_be_left_out(arena, tmp_path):
    with arena.record(sites=False) as trace, arena.record(tmp_path / "log.csv", sites=False):
        exercise(arena)
    for events in (trace.events, load_trace(tmp_path / "log.csv")):
        assert {event.site for event in events} == {""}
        assert any(__file__ in event.cause for event in events)


def test_debug_mode_knows_the_site_of_what_was_there():
    arena = Arena(4096, debug=True)
    arena.alloc(1, "uint8")
    with arena.record() as trace:
        pass
    assert trace.events[2].kind == "held"
    assert trace.events[2].site.startswith(f"{__file__}:")


def test_events_can_be_looked_at_and_changed_while_they_come(arena):
    with arena.record() as trace:
        events = trace.events
        arena.alloc(1, "uint8")
        assert trace.events is events
        assert events[-1].kind == "alloc"
        events.clear()
        arena.alloc(2, "uint8")
        assert [event.nbytes for event in trace.events] == [2]


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
    kinds = [event.kind for event in trace.events[2:]]
    assert kinds == ["scope_open", "alloc", "alloc", "rollback", "scope_close"]


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
    expected = untimed(trace.events)
    assert untimed(load_trace(path)) == expected
    assert untimed(load_trace(str(path))) == expected
    if saved:
        assert load_trace(path) == trace.events
    assert [event.time_ns for event in load_trace(path)] == sorted(e.time_ns for e in load_trace(path))


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
    assert untimed(load_trace(path)) == untimed(trace.events)


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


@pytest.mark.parametrize(
    "values",
    [
        {"top": "7"}, {"top": 7.0}, {"top": True}, {"top": None}, {"kind": 5}, {"label": 5}, {"label": ["x"]},
        {"shape": [1.5]}, {"shape": ["1"]}, {"shape": 5}, {"site": None}, {"time_ns": "now"},
    ],
    ids=repr,
)  # fmt: skip
def test_a_value_of_a_wrong_type_is_no_event(tmp_path, values):
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps({"kind": "alloc", "side": "low", "n_regions": 1, "top": 1, **values}) + "\n")
    with pytest.raises(ArgumentError, match="line 1, is no event"):
        load_trace(path)


OLD_VALUES = ("alloc", "low", 2, 88, 64, 24, (2, 3), "float32", 64, "x", "")


def test_files_of_an_older_version_are_read(tmp_path):
    names = [
        "kind",
        "side",
        "n_regions",
        "top",
        "offset",
        "nbytes",
        "shape",
        "dtype",
        "align",
        "label",
        "cause",
    ]
    (tmp_path / "old.jsonl").write_text(json.dumps(dict(zip(names, OLD_VALUES, strict=True))) + "\n")
    cells = 'alloc,low,2,88,64,24,2 3,float32,64,"""x""",'
    (tmp_path / "old.csv").write_text(",".join(names) + "\r\n" + cells + "\r\n")
    for suffix in SUFFIXES:
        assert load_trace(tmp_path / f"old{suffix}") == [Event(*OLD_VALUES)]


def test_fields_of_a_newer_version_are_left_out(tmp_path):
    with Arena(64).record() as trace:
        pass
    for suffix in SUFFIXES:
        path = tmp_path / f"new{suffix}"
        trace.save(path)
        lines = path.read_text().splitlines()
        if suffix == ".jsonl":
            lines = [line[:-1] + ',"thread":{"id":5}}' for line in lines]
        else:
            lines = [lines[0] + ",thread", *(line + ",5" for line in lines[1:])]
        path.write_text("\n".join(lines) + "\n")
        assert load_trace(path) == trace.events


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_that_ends_anywhere_is_read_up_to_its_last_whole_line(tmp_path, suffix):
    arena = Arena(4096)
    path = tmp_path / f"log{suffix}"
    with arena.record(path), arena.scope("ü"):
        arena.alloc(1234, "uint8", label="naïve")
    whole, events = path.read_bytes(), load_trace(path)
    first_line = whole.index(b"\n") + 1
    ends = {at + shift for at, byte in enumerate(whole) if byte == ord("\n") for shift in (-1, 0, 1, 2)}
    start = first_line if suffix == ".csv" else 0
    for size in sorted(size for size in {*range(start, len(whole), 13), *ends} if start <= size < len(whole)):
        path.write_bytes(whole[:size])
        n_whole = whole[:size].count(b"\n") - (suffix == ".csv")
        assert load_trace(path, partial=True) == events[:n_whole]
        if whole[size - 1 : size] in (b"\n", b""):
            assert load_trace(path) == events[:n_whole]
        elif suffix == ".jsonl" and whole[size : size + 1] == b"\n":  # nothing is missing
            assert load_trace(path) == events[: n_whole + 1]
        else:
            line = n_whole + (2 if suffix == ".csv" else 1)
            with pytest.raises(ArgumentError, match=rf"line {line}, is no event.*partial=True") as caught:
                load_trace(path)
            assert str(path) in str(caught.value)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_partial_excuses_the_last_line_only(tmp_path, suffix):
    path = tmp_path / f"log{suffix}"
    with Arena(64).record(path):
        pass
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:-1], lines[-1][:20] + "\n", lines[-1]]))
    with pytest.raises(ArgumentError, match=f"line {len(lines)}, is no event") as caught:
        load_trace(path, partial=True)
    assert "partial" not in str(caught.value).split("is no event")[1]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_file_of_a_process_that_was_killed_has_the_failure_and_what_came_before(tmp_path, suffix):
    path = tmp_path / f"log{suffix}"
    program = """
        import os, signal, sys
        from gpuarena import Arena, OutOfMemoryError
        arena = Arena(4096)
        arena.record(sys.argv[1]).__enter__()
        arena.alloc(1, "uint8", label="first")
        try:
            arena.alloc(5000, "uint8", label="too much")
        except OutOfMemoryError:
            pass
        arena.alloc(1, "uint8", label="last")
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program), path], check=False)
    assert done.returncode == -signal.SIGKILL
    labels = [event.label for event in load_trace(path, partial=True)[2:]]
    assert labels[:2] == ["first", "too much"]


def test_a_file_is_written_while_events_come(arena, tmp_path):
    path = tmp_path / "log.jsonl"
    with arena.record(path):
        assert [event.kind for event in load_trace(path)] == ["start", "start"]
        arena.alloc(1, "uint8", label="first")
        time.sleep(0.11)
        arena.alloc(1, "uint8", label="second")
        assert [event.label for event in load_trace(path)[2:]] == ["first", "second"]


def test_a_trace_is_saved_whole_or_not_at_all(arena, tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text("old\n")
    with arena.record() as trace:
        exercise(arena)
    trace.events.append("no event")
    with pytest.raises(AttributeError):
        trace.save(path)
    assert path.read_text() == "old\n"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("suffix", [None, *SUFFIXES])
def test_what_failed_half_way_leaves_its_failure_only(tmp_path, suffix):
    arena = Arena(4096, alignment=1)
    path = None if suffix is None else tmp_path / f"log{suffix}"
    with arena.record(path) as trace:
        arena.alloc(7, "uint8", label="before")
        mark = arena._mark("low")
        arena.alloc(10, "uint8", label="gone")
        with pytest.raises(OutOfMemoryError):
            arena.alloc(5000, "uint8", label="big\n")
        arena._undo(mark)
        arena.alloc(3, "uint8", label="after")
    events = trace.events if path is None else load_trace(path)
    assert [(event.kind, event.label, event.n_regions, event.top) for event in events[2:]] == [
        ("alloc", "before", 1, 7), ("fail", "big\n", 1, 7), ("alloc", "after", 2, 10),
    ]  # fmt: skip


def test_names_of_files_can_hold_anything(tmp_path):
    hostile = 'odd, "name"\n\udcff.py'
    code = compile("arena.alloc(1, 'uint8')\narena.reset()", "plain", "exec").replace(co_filename=hostile)
    for suffix, shown in zip(SUFFIXES, [hostile, 'odd, "name"\\n\\udcff.py'], strict=True):
        arena = Arena(64)
        path = tmp_path / f"log{suffix}"
        with arena.record(path):
            exec(code, {"arena": arena})
        events = load_trace(path)
        assert [event.site for event in events[2:4]] == [f"{shown}:1", f"{shown}:2"]


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
    assert untimed(load_trace(path)) == untimed(trace.events)
    assert sys.getsizeof(trace.events[0]) < 200
