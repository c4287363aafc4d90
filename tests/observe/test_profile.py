# What is raised at the end of a block is tested with the block.
# ruff: noqa: PT012
from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuarena import Arena, Debug
from gpuarena.errors import (
    ArenaClosedError,
    ArgumentTypeError,
    CheckpointError,
    NotCopyableError,
    OutOfMemoryError,
)
from gpuarena.observe import Counter, Counters, Profile


@pytest.fixture(params=["host", "torch"])
def arena(request):
    return Arena(4096, backend=request.param, alignment=64)


def figures(counter):
    return counter.current, counter.peak, counter.allocated, counter.freed


def test_a_counter_keeps_its_highest_value():
    counter = Counter()
    for amount in (5, 3):
        counter.add(amount)
    counter.remove(8)
    counter.add(2)
    assert figures(counter) == (2, 8, 10, 8)


def test_bytes_padding_and_regions_are_counted_by_label_too(arena):
    with arena.profile("step") as profile:
        kept = arena.alloc(100, "uint8", label="weights")
        with arena.scope():
            arena.alloc(10, "uint8", label="mask")
            arena.empty(20, "uint8", label="mask", side="high")
            arena.alloc(30, "uint8")
    assert isinstance(profile, Profile)
    assert profile.name == "step"
    assert figures(profile.nbytes) == (120, 160, 160, 40)
    assert figures(profile.regions) == (2, 4, 4, 2)
    assert figures(profile.padded) == (100 + 64, 222 + 64, 222 + 64, 122)
    assert set(profile.by_label) == {"weights", "mask", None}
    assert figures(profile.by_label["mask"].nbytes) == (20, 30, 30, 10)
    assert figures(profile.by_label["weights"].regions) == (1, 1, 1, 0)
    assert kept.is_live
    arena.alloc(1, "uint8")
    assert profile.regions.allocated == 4


def test_only_what_happens_inside_counts_and_frees_may_exceed(arena):
    checkpoint = arena.checkpoint()
    arena.alloc(100, "uint8", label="before")
    with arena.profile() as profile:
        arena.rollback(checkpoint)
    assert figures(profile.nbytes) == (-100, 0, 0, 100)
    assert figures(profile.by_label["before"].regions) == (-1, 0, 0, 1)


def test_profiles_nest_and_an_inner_one_counts_for_the_outer(arena):
    with arena.profile("outer") as outer:
        arena.alloc(1, "uint8")
        with arena.profile("inner") as inner, arena.profile("same") as same:
            arena.alloc(2, "uint8")
        arena.alloc(4, "uint8")
    assert (outer.nbytes.allocated, inner.nbytes.allocated, same.nbytes.allocated) == (7, 2, 2)


def test_profiles_may_end_in_any_order(arena):
    first, second = arena.profile(), arena.profile()
    first.__enter__()
    second.__enter__()
    arena.alloc(1, "uint8")
    first.__exit__(None, None, None)
    arena.alloc(2, "uint8")
    second.__exit__(None, None, None)
    arena.alloc(4, "uint8")
    assert (first.nbytes.allocated, second.nbytes.allocated) == (1, 3)


def test_repeated_allocations_are_counted_each_time(arena):
    def step():
        with arena.scope():
            for _ in range(3):
                arena.alloc((2, 2), "float32", label="x")
                arena.empty((2, 2), "float32", label="x")

    step()  # the requests are remembered from now on
    for _ in range(2):
        step()
    with arena.profile() as profile:
        step()
    step()
    assert figures(profile.by_label["x"].regions) == (0, 6, 6, 6)


def test_refusals_are_counted_by_label(arena):
    with arena.profile() as profile:
        for label in ("kv", "kv", None):
            with pytest.raises(OutOfMemoryError):
                arena.alloc(5000, "uint8", label=label)
        with pytest.raises(OutOfMemoryError):
            arena.alloc(5000, "uint8", side="high", label="high")
    assert profile.n_failed == arena.stats.n_failed == 4
    assert {label: counters.n_failed for label, counters in profile.by_label.items()} == {
        "kv": 2, None: 1, "high": 1,
    }  # fmt: skip
    assert figures(profile.regions) == (0, 0, 0, 0)


def test_a_region_that_grows_counts_what_it_grew_by(arena):
    with arena.profile() as profile:
        arena.alloc(10, "uint8", label="x").extend(50).extend(50)
    assert figures(profile.nbytes) == (50, 50, 50, 0)
    assert figures(profile.regions) == (1, 1, 1, 0)
    assert profile.padded.current == arena.stats.top == 50


def test_guard_zones_count_as_padding():
    arena = Arena(4096, alignment=1, debug=Debug(guard=16, on_live_arrays="ignore"))
    with arena.profile() as profile, arena.scope():
        arena.alloc(10, "uint8")
    assert figures(profile.nbytes) == (0, 10, 10, 10)
    assert figures(profile.padded) == (0, 26, 26, 26)


def test_spilled_regions_are_freed_and_come_back(arena):
    checkpoint = arena.checkpoint()
    arena.alloc(100, "uint8", label="x")
    with arena.profile() as profile:
        spilled = arena.spill(checkpoint)
        assert profile.nbytes.current == -100
        spilled.restore()
    assert (profile.nbytes.current, profile.regions.current, profile.padded.current) == (0, 0, 0)


@pytest.mark.parametrize(
    "end", [lambda arena: arena.close(), lambda arena: arena.reset()], ids=["close", "reset"]
)
def test_the_end_of_everything_frees_everything(arena, end):
    with arena.profile() as profile:
        arena.alloc(100, "uint8", label="x")
        arena.alloc(100, "uint8", side="high")
        end(arena)
    for counters in (profile.total, *profile.by_label.values()):
        assert isinstance(counters, Counters)
        assert (counters.nbytes.current, counters.padded.current, counters.regions.current) == (0, 0, 0)
        assert counters.nbytes.allocated == counters.nbytes.freed


def test_a_reset_that_is_refused_counts_nothing():
    arena = Arena(4096, debug=Debug(on_live_arrays="raise"))
    arena.alloc(4, "uint8")
    kept = arena.alloc(4, "uint8", side="high").array
    with arena.profile() as profile, pytest.raises(RuntimeError):
        arena.reset()
    assert figures(profile.nbytes) == (0, 0, 0, 0)
    del kept


def test_a_rollback_that_is_refused_counts_nothing():
    arena = Arena(4096, debug=Debug(on_live_arrays="raise"))
    checkpoint = arena.checkpoint()
    kept = arena.alloc(4, "uint8").array
    with arena.profile() as profile, pytest.raises(RuntimeError):
        arena.rollback(checkpoint)
    assert figures(profile.nbytes) == (0, 0, 0, 0)
    del kept


def test_an_exception_ends_a_profile_and_passes(arena):
    error = KeyError()
    with pytest.raises(KeyError) as caught, arena.profile() as profile:
        arena.alloc(1, "uint8")
        raise error
    assert caught.value is error
    arena.alloc(1, "uint8")
    assert profile.nbytes.allocated == 1


def test_a_profile_counts_once(arena):
    profile = arena.profile()
    with profile:
        with pytest.raises(CheckpointError, match="once"):
            profile.__enter__()
        arena.alloc(1, "uint8")
    with pytest.raises(CheckpointError, match="once"):
        profile.__enter__()
    assert profile.nbytes.allocated == 1
    with pytest.raises(ArgumentTypeError, match="name"):
        arena.profile(5)
    for call in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(NotCopyableError):
            call(profile)
    late = arena.profile()
    arena.close()
    with pytest.raises(ArenaClosedError, match="profile"):
        late.__enter__()


def test_a_profile_that_has_ended_waits_for_no_garbage_collector(arena):
    gc.collect()
    gc.disable()
    try:
        arena = Arena(1024)
        with arena.profile() as profile:
            arena.alloc(1, "uint8")
        refs = [weakref.ref(arena), weakref.ref(profile)]
        del arena, profile
        assert [ref() for ref in refs] == [None, None]
    finally:
        gc.enable()


programs = st.lists(
    st.tuples(
        st.sampled_from(["alloc", "alloc", "extend", "checkpoint", "rollback", "reset", "spill"]),
        st.sampled_from(["low", "high"]),
        st.integers(0, 60),
        st.sampled_from([None, "a", "b"]),
    ),
    max_size=30,
)


@given(programs, st.booleans())
def test_counters_agree_with_the_figures_of_the_arena(program, debug):
    arena = Arena(1024, alignment=8, debug=Debug(guard=8) if debug else False)
    arena.alloc(10, "uint8", label="a")
    before, labels = arena.stats, arena.by_label()
    checkpoints = {"low": [arena.checkpoint()], "high": [arena.checkpoint("high")]}
    with arena.profile() as profile:
        for kind, side, n, label in program:
            try:
                if kind == "alloc":
                    last = arena.alloc(n, "uint8", side=side, label=label)
                elif kind == "extend":
                    last.extend(n)
                elif kind == "checkpoint":
                    checkpoints[side].append(arena.checkpoint(side))
                elif kind == "rollback":
                    arena.rollback(checkpoints[side].pop())
                elif kind == "spill":
                    arena.spill(checkpoints[side][-1]).restore()
                else:
                    arena.reset()
            except (
                OutOfMemoryError,
                CheckpointError,
                IndexError,
                ValueError,
                RuntimeError,
                UnboundLocalError,
            ):
                pass  # refused, which changes nothing
            after = arena.stats
            assert profile.nbytes.current == after.used - before.used
            assert profile.regions.current == after.n_regions - before.n_regions
            assert profile.padded.current == after.used + after.padding - before.used - before.padding
            assert profile.n_failed == after.n_failed
            for each in profile.by_label:
                assert profile.by_label[each].nbytes.current == arena.by_label().get(each, 0) - labels.get(
                    each, 0
                )


def test_a_profile_is_printed_as_a_table(arena):
    with arena.profile("step") as profile, arena.scope():
        arena.alloc(2000, "uint8", label="mask")
        arena.alloc(10, "uint8")
        with pytest.raises(OutOfMemoryError):
            arena.alloc(10**9, "uint8", label="mask")
    assert repr(profile) == "Profile('step', 2 regions, peak 2 010 bytes (1.96 KiB))"
    assert str(profile).splitlines() == [
        "label  regions   peak  allocated  freed  refused",
        "mask         1  2 000      2 000  2 000        1",
        "-            1     10         10     10        0",
        "all          2  2 010      2 010  2 010        1",
    ]
