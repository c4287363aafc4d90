"""What logs and profiles see of allocations and rollbacks that go the short way."""

from __future__ import annotations

import _thread
import dataclasses
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from log_kit import Runner

from gpuarena import Arena
from gpuarena._allocation import Allocation
from gpuarena._stack import Hook
from gpuarena.errors import ArenaError
from gpuarena.observe import load_trace
from gpuarena.testing import FakeDevice

KINDS = [
    *["alloc", "empty", "zeros"] * 3, *["open", "leave"] * 3, "leave outer", "raise", "checkpoint", "rollback",
    "checkpoint", "rollback", "rewind", "fail", "extend", "reset", "pin", "spill", "restore",
]  # fmt: skip


def programs():
    return st.lists(
        st.tuples(
            st.sampled_from(KINDS),
            st.sampled_from(["low", "low", "high"]),
            st.integers(0, 20),
            st.sampled_from(["uint8", "float32", "complex128"]),
            st.sampled_from([None, None, None, 64]),
            st.none() | st.text(max_size=2),
        ),
        min_size=5,
        max_size=30,
    )


class Shaped(Runner):
    """Asks with shapes as the short way wants them, and notes what is refused."""

    def __init__(self, arena):
        super().__init__(arena)
        self.refused = []

    def step(self, kind, side, n, dtype, align, label):
        try:
            if kind == "alloc":
                self.last = self.arena.alloc((n, 2), dtype, align=align, side=side, label=label)
            elif kind in ("empty", "zeros"):
                getattr(self.arena, kind)((n, 2), dtype, align=align, side=side, label=label)
            else:
                super().step(kind, side, n, dtype, align, label)
        except ArenaError as error:
            self.refused.append(type(error))


def placeless(events):
    """Events as two arenas have them."""
    return [dataclasses.replace(event, time_ns=0, address=0) for event in events]


def watched(program, path, *, alignment, n_rounds, only_watchers):
    """Run a program under logs and a profile; return all that they saw."""
    arena = Arena(
        2048, alignment=alignment, backend=FakeDevice()
    )  # whose addresses differ in whole pages only
    if not only_watchers:
        arena._attach(Hook())
    runner = Shaped(arena)
    with arena.profile() as profile, arena.record(path), arena.record() as trace:
        assert bool(arena._watchers) == only_watchers
        for _ in range(n_rounds):
            runner.run([("open", "low", 0, "", None, None), *program])
            runner.run([("leave", "low", 0, "", None, None)] * len(runner.scopes))
            arena.reset()  # so that the next round asks for the same again
    in_file = load_trace(path)
    assert placeless(in_file) == placeless(trace.events)
    times = [event.time_ns for event in in_file]
    assert times == sorted(times)
    return placeless(trace.events), profile.total, profile.by_label, runner.refused, arena.stats


@given(
    programs(),
    st.sampled_from([1, 2, 64]),
    st.sampled_from([".jsonl", ".csv"]),
)
def test_the_short_way_tells_what_the_long_one_tells(tmp_path_factory, program, alignment, suffix):
    path = tmp_path_factory.mktemp("watched") / f"log{suffix}"
    found = [
        watched(program, path, alignment=alignment, n_rounds=3, only_watchers=only_watchers)
        for only_watchers in (False, True)
    ]
    assert found[0] == found[1]


@pytest.fixture
def validated(monkeypatch):
    """The shapes that went the long way."""
    found = []
    request = Allocation._request
    monkeypatch.setattr(
        Allocation, "_request", lambda self, shape, *rest: found.append(shape) or request(self, shape, *rest)
    )
    return found


@pytest.mark.parametrize("call", ["alloc", "empty"])
def test_allocations_that_are_watched_go_the_short_way(validated, call):
    arena = Arena(4096)
    with arena.record(), arena.profile():
        for n in range(1, 4):
            for _ in range(2):
                with arena.scope():
                    getattr(arena, call)((n, 2), "float32")
    assert validated == [(1, 2)]  # the first of its dtype


def test_a_hook_that_does_more_takes_the_long_way_as_long_as_it_is_there(validated):
    arena = Arena(4096)
    arena.alloc((1,), "uint8")
    with arena.record() as trace:
        arena.alloc((2,), "uint8")
        with arena.pin() as pin:
            arena.alloc((3,), "uint8")
        arena.alloc((4,), "uint8")
    pin.release()
    assert validated == [(1,), (3,)]
    assert [event.nbytes for event in trace.events if event.kind == "alloc"] == [2, 3, 4]


def test_contents_are_written_where_somebody_watches():
    arena = Arena(4096)
    with arena.record():
        arena.empty((4,), "uint8").fill(9)
        arena.reset()
        assert arena.zeros((4,), "uint8").tolist() == [0] * 4
        assert arena.full((4,), 7, "uint8").tolist() == [7] * 4
        assert arena.alloc((4,), "uint8", fill=5).array.tolist() == [5] * 4


@pytest.mark.parametrize("only_watchers", [False, True])
def test_a_scope_whose_end_is_interrupted_is_closed_in_the_log(monkeypatch, only_watchers):
    def interrupt(arrays):
        raise KeyboardInterrupt

    arena = Arena(4096, backend=FakeDevice())
    if not only_watchers:
        arena._attach(Hook())
    with arena.record() as trace:
        monkeypatch.setattr(arena._backend, "invalidate", interrupt)
        with pytest.raises(KeyboardInterrupt), arena.scope("step"):
            arena.empty((4,), "uint8")
    assert [event.kind for event in trace.events[2:]] == ["scope_open", "alloc", "scope_close"]


def test_arrays_of_watched_allocations_that_repeat_themselves_are_made_anew():
    arena = Arena(4096, backend="torch")
    arrays = []
    with arena.record():
        for number in range(4):
            with arena.scope():
                arrays.append(arena.empty((2,), "float32").fill_(number))
                assert arrays[-1].tolist() == [number] * 2
    assert len({id(array) for array in arrays}) == 4
    assert len({array.data_ptr() for array in arrays}) == 1


def test_a_call_that_no_python_code_makes_is_recorded():
    arena = Arena(4096)
    with arena.record() as trace:
        arena.alloc((1,), "uint8")
        for shape in ((2,), 3):  # the short way and the long one
            before = arena.stats.n_regions
            _thread.start_new_thread(arena.alloc, (shape, "uint8"))
            deadline = time.monotonic() + 30
            while arena.stats.n_regions == before and time.monotonic() < deadline:
                time.sleep(0.001)
        scope = arena.scope()
        _thread.start_new_thread(scope.__enter__, ())
        while scope not in arena._scopes and time.monotonic() < deadline:
            time.sleep(0.001)
    assert [event.nbytes for event in trace.events if event.kind == "alloc"] == [1, 2, 3]
    assert trace.events[-1].kind == "scope_open"


def test_a_label_of_a_class_that_has_no_hash_is_written(tmp_path):
    class Label(str):
        __slots__ = ()
        __hash__ = None

    arena = Arena(4096)
    with arena.record(tmp_path / "log.jsonl"):
        arena.alloc((1,), "uint8", label=Label("own"))
        with arena.scope(Label("scope")):
            pass
    labels = [(event.kind, event.label) for event in load_trace(tmp_path / "log.jsonl")[2:]]
    assert labels == [("alloc", "own"), ("scope_open", "scope"), ("scope_close", "scope")]
