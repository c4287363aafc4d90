# What is raised at the end of a block is tested with the block.
# ruff: noqa: PT012
from __future__ import annotations

import dataclasses
import time

import log_kit
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuarena import Arena, Debug
from gpuarena.errors import ArenaError, ArgumentError, CheckpointError, OutOfMemoryError
from gpuarena.observe import Event, load_trace
from gpuarena.observe.timeline import Failure, Rollback, ScopeSpan, timeline


def spans(made):
    return [
        (region.label, region.offset, region.nbytes, region.start, region.stop) for region in made.regions
    ]


def kinds(trace):
    return [event.kind for event in trace.events]


# -- one thing at a time ----------------------------------------------------------------------------------------


def test_a_region_lives_from_its_event_to_the_rollback():
    arena = Arena(4096, alignment=64, name="scratch")
    with arena.record() as trace:
        arena.alloc((2, 3), "float32", label="x")
        start = arena.checkpoint()
        arena.alloc(10, "uint8", label="y")
        arena.alloc(5, "uint8", side="high", align=16, label="z")
        arena.rollback(start)
    made = timeline(trace.events)
    assert (made.name, made.device, made.capacity, made.alignment) == ("scratch", "cpu", 4096, 64)
    assert made.address == arena.address
    assert spans(made) == [("x", 0, 24, 2, None), ("y", 64, 10, 3, 5), ("z", 4080, 5, 4, None)]
    x, y, z = made.regions
    assert (x.side, x.shape, x.dtype, x.padding) == ("low", (2, 3), "float32", 0)
    assert (y.side, y.padding) == ("low", 40)
    assert (z.side, z.padding) == ("high", 11)
    assert x.site.startswith(__file__)
    assert int(y.site.rsplit(":")[-1]) == int(x.site.rsplit(":")[-1]) + 2
    assert made.rollbacks == (Rollback(5, "low", 74, 24, 1, trace.events[5].cause),)
    assert made.peaks == ((2, 24), (3, 74), (4, 74 + 16))
    assert made.n_events == 6
    assert list(made.times_ns) == sorted(made.times_ns)


def test_a_region_that_grew_has_a_span_for_each_size():
    arena = Arena(4096, alignment=64)
    with arena.record() as trace:
        arena.alloc(3, "uint8")
        arena.alloc((2, 5), "int32", label="x").extend(3).extend(7)
    made = timeline(trace.events)
    assert spans(made)[1:] == [("x", 64, 40, 3, 4), ("x", 64, 60, 4, 5), ("x", 64, 140, 5, None)]
    assert [region.shape for region in made.regions[1:]] == [(2, 5), (3, 5), (7, 5)]
    assert {region.padding for region in made.regions[1:]} == {61}
    assert {region.dtype for region in made.regions[1:]} == {"int32"}
    # An older log does not tell the shape of what grew.
    older = [dataclasses.replace(e, shape=(), dtype="") if e.kind == "extend" else e for e in trace.events]
    assert timeline(older) == made


def test_what_there_was_at_the_start_has_spans_too():
    arena = Arena(4096, alignment=64)
    arena.alloc(10, "uint8", label="held")
    arena.scope("outer").__enter__()
    arena.alloc((2, 2), "float32")
    arena.alloc(7, "uint8", side="high")
    with arena.record() as trace:
        arena.alloc(1, "uint8", label="x")
        with pytest.raises(OutOfMemoryError):
            arena.alloc(5000, "uint8", label="big")
        arena.reset()
    made = timeline(trace.events)
    assert kinds(trace) == [
        "start", "start", "held", "held", "held", "scope_held",
        "alloc", "fail", "rollback", "scope_close", "rollback",
    ]  # fmt: skip
    assert spans(made) == [
        ("held", 0, 10, -1, 8), (None, 64, 16, -1, 8), (None, 4032, 7, -1, 10), ("x", 128, 1, 6, 8),
    ]  # fmt: skip
    assert [(region.shape, region.dtype) for region in made.regions[1:3]] == [
        ((16,), "uint8"),
        ((7,), "uint8"),
    ]
    assert made.scopes == (ScopeSpan("low", "outer", "", 10, -1, 9),)
    assert made.failures == (Failure(7, "low", 5000, "big", trace.events[7].site),)
    assert made.peaks == ((-1, 80 + 64), (6, 129 + 64))


def test_scopes_end_in_every_way():
    arena = Arena(4096)
    with arena.record() as trace:
        with arena.scope("plain"):
            arena.alloc(1, "uint8")
        with pytest.raises(KeyError), arena.scope("raising", side="high"):
            arena.alloc(1, "uint8", side="high")
            raise KeyError
        outer, inner = arena.scope("outer").__enter__(), arena.scope("inner").__enter__()
        with pytest.raises(CheckpointError, match="out of order"):
            outer.__exit__(None, None, None)
        with pytest.raises(CheckpointError, match="out of order"):
            inner.__exit__(None, None, None)
        with pytest.raises(CheckpointError), arena.scope("reset"):
            arena.reset()
        start = arena.checkpoint()
        arena.alloc(1, "uint8")
        with pytest.raises(CheckpointError), arena.scope("rolled back"):
            arena.rollback(start)
        open_ = arena.scope("closed").__enter__()
        arena.close()
        with pytest.raises(ArenaError):
            open_.__exit__(None, None, None)
    made = timeline(trace.events)
    ended = {scope.label: (scope.start, scope.stop) for scope in made.scopes}
    assert list(ended) == ["plain", "raising", "outer", "inner", "reset", "rolled back", "closed"]
    assert kinds(trace)[2:] == [
        "scope_open", "alloc", "rollback", "scope_close",
        "scope_open", "alloc", "rollback", "scope_close",
        "scope_open", "scope_open", "scope_close", "scope_close",
        "scope_open", "scope_close",
        "alloc", "scope_open", "rollback", "scope_close",
        "scope_open", "scope_close", "close",
    ]  # fmt: skip
    assert list(ended.values()) == [(2, 5), (6, 9), (10, 13), (11, 12), (14, 15), (17, 19), (20, 21)]
    assert all(scope.site.startswith(__file__) for scope in made.scopes)
    assert [scope.top for scope in made.scopes] == [0, 4096, 0, 0, 0, 1, 0]


def test_a_rollback_to_the_start_of_a_scope_leaves_it_open():
    arena = Arena(4096)
    arena.alloc(1, "uint8")
    with arena.record() as trace, arena.scope("s"):
        start = arena.checkpoint()
        arena.alloc(1, "uint8")
        arena.rollback(start)
        arena.alloc(2, "uint8", label="x")
    assert kinds(trace)[2:] == [
        "held", "scope_open", "alloc", "rollback", "alloc", "rollback", "scope_close",
    ]  # fmt: skip
    assert [(scope.start, scope.stop) for scope in timeline(trace.events).scopes] == [(3, 8)]


def test_a_scope_that_goes_to_the_host_and_comes_back_has_two_spans():
    arena = Arena(4096)
    start = arena.checkpoint()
    with arena.record() as trace:
        arena.alloc(1, "uint8")
        with arena.scope("spilled"):
            arena.alloc(2, "uint8")
            arena.spill(start).restore()
    made = timeline(trace.events)
    assert [(scope.label, scope.top) for scope in made.scopes] == [("spilled", 1)] * 2
    assert [scope.stop is None for scope in made.scopes] == [False, False]
    assert made.scopes[0].stop < made.scopes[1].start


def test_closing_ends_everything():
    arena = Arena(4096)
    with arena.record() as trace:
        arena.alloc(1, "uint8")
        arena.scope("s").__enter__()
        arena.close()
    made = timeline(trace.events)
    assert spans(made) == [(None, 0, 1, 2, 5)]
    assert made.scopes[0].stop == 4


def test_an_empty_log_has_no_spans():
    with Arena(100).record() as trace:
        pass
    made = timeline(iter(trace.events))
    assert (made.regions, made.scopes, made.rollbacks, made.peaks, made.n_events) == ((), (), (), (), 2)


# -- logs of older versions, and no logs ------------------------------------------------------------------------

OLD = (
    Event("start", "low", 1, 7),
    Event("start", "high", 1, 4000),
    Event("alloc", "low", 2, 88, 64, 24, (2, 3), "float32", 64, "x"),
)


def test_a_log_of_an_older_version_is_read():
    made = timeline([*OLD, Event("rollback", "low", 0, 0), Event("rollback", "high", 0, 4096)])
    assert made.capacity == 4096
    assert spans(made) == [("x", 64, 24, 2, 3)]
    assert made.regions[0].padding == 57
    assert [rollback.n_regions for rollback in made.rollbacks] == [2, 1]
    assert made.peaks == ((-1, 7 + 96), (2, 88 + 96))


def test_a_region_of_which_an_old_log_knows_nothing_can_grow():
    grown = Event("extend", "low", 1, 20, 4, 16)
    made = timeline([*OLD[:2], grown, Event("rollback", "low", 0, 0)])
    assert spans(made) == [(None, 4, 16, 2, 3)]


START = (Event("start", "low", 0, 0, 0, 100), Event("start", "high", 0, 100, 100, 100))
A = Event("alloc", "low", 1, 10, 0, 10)


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([], "begins with the start"),
        ([A], "begins with the start"),
        ([START[1], START[0]], "begins with the start"),
        ([START[0], START[0], START[1]], "begins with the start"),
        ([*START, *START], "event 2 .*'start'.* does not belong there"),
        ([*START, A, dataclasses.replace(A, kind="held")], "event 3 .*does not belong there"),
        ([*START, dataclasses.replace(A, kind="explode")], "event 2 .*'explode'.* unknown kind"),
        ([*START, dataclasses.replace(A, side="middle")], "'middle'"),
        ([*START, A, A], "event 3 .*makes 1 regions of 1"),
        ([*START, dataclasses.replace(A, n_regions=2)], "makes 2 regions of 0"),
        ([*START, dataclasses.replace(A, nbytes=11)], "bytes 0 to 10"),
        ([*START, dataclasses.replace(A, nbytes=-1)], "bytes 0 to 10"),
        ([*START, dataclasses.replace(A, offset=-1)], "bytes 0 to 10"),
        ([*START, dataclasses.replace(A, top=101, nbytes=101)], "other end"),
        ([*START, A, Event("rollback", "low", 1, 9)], "event 3 .*pointer at byte 9"),
        ([*START, A, Event("rollback", "low", 2, 9)], "leaves 2 regions of 1"),
        ([*START, A, Event("rollback", "low", -1, 0)], "leaves -1 regions of 1"),
        ([*START, A, Event("extend", "low", 1, 20, 1, 19)], "event 3 .*not the last region, at byte 0"),
        ([*START, A, Event("extend", "low", 1, 20, 0, 21)], "bytes 0 to 20"),
        ([*START, Event("extend", "low", 1, 20, 0, 20)], "there is none"),
        ([*START, Event("scope_close", "low", 0, 0, label="x")], "'x', which is not open"),
        ([*START, Event("close", "low", 0, 0), A], "event 3 .*after the end"),
        ([dataclasses.replace(START[0], n_regions=2, top=10), START[1], dataclasses.replace(A, kind="held")],
         "2 regions on the low end, and tells 1"),
        ([dataclasses.replace(START[0], n_regions=1, top=11), START[1], dataclasses.replace(A, kind="held")],
         "byte 11 .*makes? it 10"),
    ],
)  # fmt: skip
def test_events_that_contradict_each_other_are_no_log(events, message):
    with pytest.raises(ArgumentError, match=message):
        timeline(events)


def test_forty_thousand_events_take_less_than_a_second():
    events = list(START)
    for number in range(8_000):
        events += [
            Event("scope_open", "low", 0, 0),
            dataclasses.replace(A, time_ns=number),
            Event("alloc", "low", 2, 20, 10, 10),
            Event("rollback", "low", 0, 0),
            Event("scope_close", "low", 0, 0),
        ]
    began = time.process_time()
    made = timeline(events)
    assert time.process_time() - began < 4  # on a machine that is busy
    assert len(made.regions) == 16_000


# -- against bytes ----------------------------------------------------------------------------------------------


class Bytes:
    """An arena as an array, which holds a number for each byte: of the event that took it last, 0 if it is free."""

    def __init__(self, capacity):
        self.owner = np.zeros(capacity, int)
        self.tops = {"low": 0, "high": capacity}
        self.known = {}  # event -> its region, at (offset, nbytes)

    def see(self, index, event):
        """Take the bytes of an event; its number is its index, and more by 2 so that none is 0 or less."""
        low, high = self.tops["low"], self.tops["high"]
        if event.kind in ("held", "alloc", "pin", "restore", "extend"):
            self.owner[event.offset : event.offset + event.nbytes] = index + 2
        elif event.kind == "rollback" and event.side == "low":
            self.owner[event.top : high] = 0
        elif event.kind == "rollback":
            self.owner[low : event.top] = 0
        elif event.kind == "close":
            self.owner[:] = 0
            self.tops = {"low": 0, "high": len(self.owner)}
            return
        self.tops[event.side] = event.top

    @property
    def taken(self):
        return self.tops["low"] + len(self.owner) - self.tops["high"]


def bytes_of_spans(made, index, first):
    """Return who has which byte after an event, as the spans say it, and the bytes of the spans and their padding."""
    owner = np.zeros(made.capacity, int)
    nbytes = padding = 0
    held = first
    for region in made.regions:
        if region.start == -1:
            held += 1
        if region.start <= index and (region.stop is None or region.stop > index):
            piece = owner[region.offset : region.offset + region.nbytes]
            assert not piece.any(), "two live regions share bytes"
            # Held regions are told one after the other, behind the two starts.
            piece[:] = (held - 1 if region.start == -1 else region.start) + 2
            nbytes, padding = nbytes + region.nbytes, padding + region.padding
    return owner, nbytes, padding


@given(log_kit.programs(max_size=12), log_kit.programs(), st.booleans(), st.booleans())
def test_any_log_says_who_has_which_byte_at_any_time(before, program, debug, closing):
    debug = Debug(guard=8, on_live_arrays="ignore") if debug else False
    arena = Arena(log_kit.CAPACITY, alignment=64, debug=debug)
    runner = log_kit.Runner(arena)
    runner.run(before)
    seen = {}  # number of events -> what the arena says of itself then
    with arena.record() as trace:
        peak = taken = arena.stats.top + arena.capacity - arena.stats.high

        def look():
            stats = arena.stats
            seen[len(trace.events) - 1] = stats

        runner.run(program, look)
        if closing:
            arena.close()
            look()
    made = timeline(trace.events)
    assert made.n_events == len(trace.events)
    n_before = sum(event.kind in ("start", "held", "scope_held") for event in trace.events)
    model = Bytes(log_kit.CAPACITY)
    peaks = [(-1, peak)] if peak else []
    for index, event in enumerate(trace.events):
        model.see(index, event)
        if index < n_before - 1:
            continue
        if index >= n_before and model.taken > peak:
            peak = model.taken
            peaks.append((index, peak))
        owner, nbytes, padding = bytes_of_spans(made, index, 2)
        assert (owner == model.owner).all()
        assert nbytes + padding == model.taken
        if index in seen:
            assert (nbytes, padding) == (seen[index].used, seen[index].padding)
    assert made.peaks == tuple(peaks)
    assert taken <= peak <= arena.stats.peak
    assert [failure.index for failure in made.failures] == [
        index for index, event in enumerate(trace.events) if event.kind == "fail"
    ]
    for rollback in made.rollbacks:
        event = trace.events[rollback.index]
        assert (rollback.side, rollback.new_top, rollback.cause) == (event.side, event.top, event.cause)
        ended = [r for r in made.regions if r.stop == rollback.index and r.side == rollback.side]
        assert len(ended) == rollback.n_regions
        end = min if rollback.side == "low" else max
        assert end(rollback.old_top, rollback.new_top) == rollback.new_top != rollback.old_top or not sum(
            r.nbytes + r.padding for r in ended
        )


@given(log_kit.programs(max_size=8), log_kit.programs(["alloc", "open", "rewind", "leave", "leave outer", "raise", "reset",
       "checkpoint", "rollback", "spill", "restore"]))  # fmt: skip
def test_the_scopes_of_a_log_are_those_that_are_alive(before, program):
    arena = Arena(log_kit.CAPACITY, alignment=8)
    runner = log_kit.Runner(arena)
    runner.run(before)
    with arena.record() as trace:

        def alive():
            """Ask the arena: the scopes whose start can be rolled back to, without doing it."""
            found = []
            for scope in arena._scopes:
                try:
                    arena._validate(scope._checkpoint, "look at")
                except CheckpointError:
                    continue
                found.append((scope.side, scope.label, scope._checkpoint.top))
            return sorted(found, key=repr)

        seen = {len(trace.events) - 1: alive()}

        def look():
            seen[len(trace.events) - 1] = alive()

        runner.run(program, look)
    made = timeline(trace.events)
    for index, expected in seen.items():
        open_ = [s for s in made.scopes if s.start <= index and (s.stop is None or s.stop > index)]
        assert sorted(((s.side, s.label, s.top) for s in open_), key=repr) == expected


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_a_file_has_the_same_timeline(tmp_path, suffix):
    arena = Arena(4096)
    arena.alloc(3, "int16", label="held")
    path = tmp_path / f"log{suffix}"
    with arena.record(path), arena.scope("a\nb"):
        arena.alloc((2, 3), "float32", label="x").extend(4)
    events = load_trace(path)
    made = timeline(events)
    assert spans(made) == [("held", 0, 6, -1, None), ("x", 256, 24, 4, 5), ("x", 256, 48, 5, 6)]
    assert [(scope.label, scope.start, scope.stop) for scope in made.scopes] == [("a\nb", 3, 7)]
