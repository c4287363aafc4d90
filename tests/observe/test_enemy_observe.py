"""Logs, labels and moments that nobody wishes for."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import os
import pickle
import struct
import sys
import time
import weakref

import pytest

from gpuarena import Arena
from gpuarena.errors import ArgumentError, ArgumentTypeError
from gpuarena.observe import ArenaCollector, Event, load_snapshot, load_trace
from gpuarena.observe._texts import place_of
from gpuarena.observe.replay import replay
from gpuarena.observe.timeline import timeline

SUFFIXES = [".jsonl", ".csv"]
FIELDS = {
    ".jsonl": '{"kind":"alloc","side":"low","n_regions":1,"top":4,"label":LABEL,"shape":SHAPE}\n',
    ".csv": "kind,side,n_regions,top,label,shape\nalloc,low,1,4,LABEL,SHAPE\n",
}
START = [Event("start", "low", 0, 0, 0, 100), Event("start", "high", 0, 100, 100, 100)]
ALLOC = Event("alloc", "low", 1, 10, 0, 10, (10,), "uint8")


# -- files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_line_that_nests_without_end_is_no_event(tmp_path, suffix):
    path = tmp_path / f"log{suffix}"
    path.write_text(FIELDS[suffix].replace("LABEL", "[" * 100_000).replace("SHAPE", "[]"))
    with pytest.raises(ArgumentError, match="is no event") as caught:
        load_trace(path)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_number_that_has_no_text_is_no_event(tmp_path, suffix):
    path = tmp_path / f"log{suffix}"
    shape = "9" * 4000
    text = (
        FIELDS[suffix]
        .replace("LABEL", "null")
        .replace("SHAPE", f"[{shape}]" if suffix == ".jsonl" else shape)
    )
    path.write_text(text)
    with pytest.raises(ArgumentError, match="is no event: it has a number of 13288 bits"):
        load_trace(path)


@pytest.mark.parametrize("shape", ["null", "5", '"10"', '{"1":2}'])
def test_a_shape_is_a_list(tmp_path, shape):
    path = tmp_path / "log.jsonl"
    path.write_text(FIELDS[".jsonl"].replace("LABEL", "null").replace("SHAPE", shape))
    with pytest.raises(ArgumentError, match="no event: shape is "):
        load_trace(path)


def test_what_is_wrong_is_not_told_at_any_length(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text(FIELDS[".jsonl"].replace("LABEL", json.dumps(["x" * 10_000] * 9)).replace("SHAPE", "[]"))
    with pytest.raises(ArgumentError, match="no event: label is ") as caught:
        load_trace(path)
    assert len(str(caught.value)) < 500


def test_a_table_of_something_else_says_what_it_lacks(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("side,top\nlow,3\n")
    with pytest.raises(ArgumentError, match=r"line 2, is no event: it does not say kind, n_regions$"):
        load_trace(path)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_partial_file_is_text_up_to_its_last_line(tmp_path, suffix):
    path = tmp_path / f"log{suffix}"
    line = FIELDS[suffix].replace("SHAPE", "[]" if suffix == ".jsonl" else "").encode()
    path.write_bytes(line.replace(b"LABEL", b'"\xff"'))
    with pytest.raises(ArgumentError, match=r"no event: .*utf-8"):
        load_trace(path, partial=True)
    path.write_bytes(line.replace(b"LABEL", b"null") + b'{"label":"\xc3')
    assert [event.top for event in load_trace(path, partial=True)] == [4]


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="there is no such device")
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_device_without_an_end_is_no_log(tmp_path, suffix):
    path = tmp_path / f"log{suffix}"
    path.symlink_to("/dev/zero")
    with pytest.raises(ArgumentError, match="is a device"):
        load_trace(path)


# -- events -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "values"),
    [
        (0, {"top": -1}), (0, {"offset": -1}), (0, {"offset": 5}), (0, {"n_regions": -1}), (0, {"nbytes": 99}),
        (0, {"top": 101}), (1, {"nbytes": -1}), (1, {"nbytes": 2**63}), (1, {"top": 101}), (1, {"offset": 101}),
        (0, {"align": 0}), (0, {"time_ns": -1}), (0, {"time_ns": 2**63}), (0, {"address": -1}),
        (0, {"address": 10**30}),
    ],
    ids=str,
)  # fmt: skip
def test_a_beginning_that_cannot_be_is_no_log(end, values):
    log = [*START]
    log[end] = dataclasses.replace(log[end], **values)
    with pytest.raises(ArgumentError, match="end that cannot be"):
        timeline(log)


OLD_START = [Event("start", "low", 3, 50), Event("start", "high", 3, 60)]


@pytest.mark.parametrize(
    "events",
    [
        [*START, dataclasses.replace(ALLOC, time_ns=-1)],
        [*START, dataclasses.replace(ALLOC, time_ns=10**30)],
        [*START, Event("fail", "low", 0, 0, nbytes=-1)],
        [*START, Event("fail", "low", 0, 0, nbytes=10**30)],
        [*START, Event("scope_open", "low", 0, 0, -1)],
        [*START, Event("scope_open", "low", 0, 0, 10**30)],
        [*OLD_START, Event("rollback", "low", 2, -1)],
        [*OLD_START, Event("rollback", "low", 2, 51)],
        [*OLD_START, Event("rollback", "high", 2, 59), Event("alloc", "high", 3, 59, 59, 0)],
        [*OLD_START, Event("extend", "low", 3, 50, -5, 55)],
    ],
)
def test_figures_that_cannot_be_are_no_log(events):
    with pytest.raises(ArgumentError, match=r"event \d+ of the log"):
        timeline(events)


@pytest.mark.parametrize("of", [None, 5, [None], [5, 6], "log.jsonl", {"kind": "start"}], ids=repr)
def test_what_is_no_log_is_refused(of):
    arena = Arena(100)
    for take in (timeline, lambda log: replay(log, arena)):
        with pytest.raises(ArgumentTypeError, match="events"):
            take(of)


def test_a_trace_is_no_log_but_has_one():
    with Arena(100).record() as trace:
        pass
    with pytest.raises(ArgumentTypeError, match=r"Trace\.events .*not Trace"):
        timeline(trace)


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([*START, dataclasses.replace(ALLOC, side="middle")], "'middle'"),
        ([*START, ALLOC, Event("rollback", "low", 5, 10)], "back to 5 regions where there are 1"),
        ([*START, ALLOC, Event("rollback", "low", 10**30, 10)], "where there are 1"),
        ([*START, dataclasses.replace(ALLOC, nbytes=0, shape=(0,)), Event("extend", "low", 1, 5, 0, 5)], "cannot be"),
        ([*START, dataclasses.replace(ALLOC, nbytes=1, shape=()), Event("extend", "low", 1, 5, 0, 5)], "cannot be"),
        ([*START, ALLOC, *START, ALLOC], "event 3 .*begins another log"),
    ],
)  # fmt: skip
def test_a_log_that_contradicts_itself_is_not_replayed(events, words):
    with pytest.raises(ArgumentError, match=words):
        replay(events, Arena(100, alignment=1))


def test_a_log_is_replayed_on_an_arena():
    with pytest.raises(ArgumentTypeError, match="on an arena, not NoneType"):
        replay(START, None)


def test_a_line_number_of_thousands_of_digits_is_none():
    site = "train.py:" + "9" * 5000
    assert place_of(site) == (site, 0)


# -- pickles ----------------------------------------------------------------------------------------------------


def complaint(tmp_path, data):
    path = tmp_path / "found.pickle"
    path.write_bytes(data)
    with pytest.raises(ArgumentError, match=r"found\.pickle is no snapshot: ") as caught:
        load_snapshot(path)
    return str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04]r" + struct.pack("<I", 1 << 25) + b".",
        b"]p33554432\n.",
        b"]p" + b"9" * 5000 + b"\n.",
        pickle.dumps({"segments": [1.5, "x", 2**70, -5, "y", True, None]}, 2)[:-1]
        + b"r"
        + struct.pack("<I", 1 << 25)
        + b".",
    ],
    ids=["binary", "text", "no number", "behind others"],
)
def test_a_few_bytes_do_not_take_all_memory(tmp_path, data):
    start = time.process_time()
    told = complaint(tmp_path, data)
    assert "numbers a value" in told
    assert len(told) < 400
    assert time.process_time() - start < 0.2, "the places for 2**25 values take longer to make"


@pytest.mark.parametrize("protocol", range(6))
def test_values_of_every_kind_are_looked_through(tmp_path, protocol):
    path = tmp_path / "found.pickle"
    values = ["", "x" * 300, "é\n", 0, 255, 256, 70_000, -1, 2**33, 2**45, 2**63, -(2**70), 1.5, True, None, (), {},
              (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), [[]], "x" * 70_000, 2**3000]  # fmt: skip
    whole = pickle.dumps({"segments": [], "other": [values, [*values], values * 20]}, protocol)
    path.write_bytes(whole)
    assert load_snapshot(path) == ()
    for bad in (b"R", b"b", b"\x81", b"o", b"Pwho\n", b"\x82\x01", b"\x97"):
        assert "plain values only" in complaint(tmp_path, whole[:-1] + bad + b".")


def test_what_is_in_many_places_is_read_once(tmp_path):
    events = [{"action": "alloc", "addr": 0, "size": 1} for _ in range(800)]
    about = {"side": "low", "offset": 0, "dtype": "uint8", "shape": [1] * 100_000}
    blocks = [{"size": 1, "state": "active_allocated", "user_metadata": about}] * 3000
    start = time.process_time()
    assert "events of another device" in complaint(
        tmp_path, pickle.dumps({"segments": [], "device_traces": [events] * 800})
    )
    path = tmp_path / "shapes.pickle"
    path.write_bytes(pickle.dumps({"segments": [{"address": 0, "total_size": 3000, "blocks": blocks}]}))
    assert {region.shape for region in load_snapshot(path)[0].regions} == {(1,)}
    assert time.process_time() - start < 4, "seconds; a tenth where it is right"


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="there is no such device")
def test_a_device_without_an_end_is_no_snapshot():
    with pytest.raises(ArgumentError, match="is a device"):
        load_snapshot("/dev/zero")


# -- metrics ----------------------------------------------------------------------------------------------------


def test_no_label_makes_a_scrape_fail():
    exposition = pytest.importorskip("prometheus_client")
    from gpuarena.cli._scrape import parse

    arena = Arena(4096, name="\ud800")
    labels = ["\ud800", "\\ud800", "", None, "\n", "\r\x85\u2028", "\0", '"}', "x" * 10_000, "\ud83d\ude00"]
    for label in labels:
        arena.alloc(3, "uint8", label=label)
    registry = exposition.CollectorRegistry()
    registry.register(ArenaCollector(arena))
    text = exposition.generate_latest(registry).decode()
    samples = [
        line.rpartition(" ")[0] for line in text.split("\n") if line.startswith("gpuarena_label_bytes{")
    ]
    assert len(samples) == len(set(samples)) == len(labels) - 2
    (read,) = parse(text)
    assert read["arena"] == "\\ud800"
    assert read["by_label"] == {
        "\\ud800": 6, "": 6, "\n": 3, "\r\x85\u2028": 3, "\0": 3, '"}': 3, "x" * 10_000: 3, "\\ud83d\\ude00": 3
    }  # fmt: skip


def test_names_that_are_shown_alike_are_the_same_name():
    pytest.importorskip("prometheus_client")
    with pytest.raises(ArgumentError, match="same name"):
        ArenaCollector(Arena(8, name="\ud800"), Arena(8, name="\\ud800"))


# -- who lives how long -----------------------------------------------------------------------------------------


def test_a_recording_that_has_ended_does_not_keep_the_arena():
    arena = Arena(4096)
    with arena.record() as trace, arena.scope("step"):
        arena.alloc(10, "uint8").extend(20)
    known = weakref.ref(arena)
    gc.disable()
    try:
        del arena
        assert known() is None
    finally:
        gc.enable()
    assert [event.kind for event in trace.events[2:]] == [
        "scope_open", "alloc", "extend", "rollback", "scope_close"
    ]  # fmt: skip


def test_a_recording_keeps_no_array():
    arena = Arena(4096)
    with arena.record() as trace:
        with arena.scope():
            array = weakref.ref(arena.alloc(10, "uint8").array)
        assert array() is None
        assert trace.events


def test_a_recording_that_does_not_begin_leaves_the_arena_as_it_was(monkeypatch):
    arena = Arena(4096)
    trace = arena.record()
    monkeypatch.setattr(trace, "_note_beginning", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trace.__enter__()
    assert arena._hooks == []


# -- interrupts -------------------------------------------------------------------------------------------------


class Interrupt(BaseException):
    """What Ctrl-C is."""


def interrupt_recorder(call, at):
    """Interrupt `call` at the line number `at` that the recorder runs; return whether it ran as many."""
    n_seen = 0

    def trace(frame, event, arg):
        return line if frame.f_code.co_filename.endswith("trace.py") else None

    def line(frame, event, arg):
        nonlocal n_seen
        n_seen += event == "line"
        if event == "line" and n_seen == at:
            sys.settrace(None)
            raise Interrupt
        return line

    traced = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Interrupt:
        return True
    finally:
        sys.settrace(traced)
    return False


def alloc(arena, region, start):
    arena.alloc(20, "uint8", label="interrupted")


def extend(arena, region, start):
    region.extend(70)


def rollback(arena, region, start):
    arena.rollback(start)


def reset(arena, region, start):
    arena.reset()


@pytest.mark.parametrize("in_file", [False, True], ids=["memory", "file"])
@pytest.mark.parametrize("call", [alloc, extend, rollback, reset])
def test_a_log_goes_on_after_an_interrupt(tmp_path, call, in_file):
    for at in itertools.count(1):
        arena = Arena(4096, alignment=8)
        arena.alloc(3, "uint8", label="before")
        path = tmp_path / "log.jsonl" if in_file else None
        with arena.record(path) as trace:
            start = arena.checkpoint()
            region = arena.alloc(50, "uint8", label="x")
            interrupted = interrupt_recorder(lambda: call(arena, region, start), at)  # noqa: B023
            if at % 2:
                arena.alloc(6, "int64", label="after")
            with arena.scope("after"):
                arena.alloc(7, "uint8")
                arena.alloc(9, "uint8").extend(11)
        made = timeline(load_trace(path) if in_file else trace.events)
        live = [(one.offset, one.nbytes, one.label) for one in made.regions if one.stop is None]
        assert live == [record[:3] for record in arena._low.records]
        if not interrupted:
            break
    assert at > 5


# -- forks ------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")
def test_a_forked_child_writes_nothing_to_the_log(tmp_path):
    path = tmp_path / "log.jsonl"
    arena = Arena(4096)
    with arena.record(path) as trace, arena.record() as kept:
        arena.alloc(1, "uint8", label="before")
        child = os.fork()
        if not child:
            try:
                arena.alloc(2, "uint8", label="in the child")
                trace.__exit__(None, None, None)
                in_memory = [event.label for event in kept.events][2:] == ["before", "in the child"]
                os._exit(0 if in_memory else 1)
            finally:
                os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        arena.alloc(3, "uint8", label="after")
    assert [event.label for event in load_trace(path)][2:] == ["before", "after"]
