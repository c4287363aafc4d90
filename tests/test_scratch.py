# What is raised at the end of a block is tested with the block.
# ruff: noqa: PT012
from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch

from gpuarena import Arena
from gpuarena.errors import (
    ArenaClosedError,
    ArgumentError,
    ArgumentTypeError,
    CheckpointError,
    NotCopyableError,
)


@pytest.fixture(params=["host", "torch"])
def arena(request):
    return Arena(1024, backend=request.param, alignment=64, name="scratch")


def double(out, values):
    """What a library function looks like: its result goes to `out`, its temporaries to the other end."""
    with out.scratch(conflicts=[out]) as tmp:
        copy = tmp.from_array(values)
        copy[...] = copy.as_numpy() * 2
        return out.from_array(copy)


def test_a_result_survives_the_temporaries_however_deep_the_calls_go(arena):
    with arena.scratch() as outer:
        once = double(outer, np.array([1.0, 2.0]))  # temporaries on the high end
        with outer.scratch(conflicts=[outer]) as inner:
            assert inner.side == "high"
            twice = double(inner, once.as_numpy())  # and here on the low end
            assert twice.array.tolist() == [4, 8]
            assert once.array.tolist() == [2, 4]
        assert not twice.is_live
        assert once.array.tolist() == [2, 4]
    assert arena.stats.used == 0
    assert double(arena, np.array([5.0])).array.tolist() == [10]
    arena.assert_balanced()


def test_the_end_without_a_conflict_is_taken_the_low_one_first(arena):
    other = Arena(64)
    with arena.scratch() as tmp:
        assert tmp.side == "low"
        with arena.scratch(conflicts=[tmp]) as second:
            assert second.side == "high"
            with arena.scratch(conflicts=[second, other, other.scratch()]) as third:
                assert third.side == "low"
            with pytest.raises(ArgumentError, match="both ends"):
                arena.scratch(conflicts=[tmp, second])
            with pytest.raises(ArgumentError, match="both ends"):
                arena.scratch(conflicts=[arena, second])
    assert "low end" in repr(tmp)


@pytest.mark.parametrize("conflict", [None, "low", 5, object()])
def test_a_conflict_is_an_arena_or_a_scratch(arena, conflict):
    with pytest.raises(ArgumentTypeError, match="conflict"):
        arena.scratch(conflicts=[conflict])
    with pytest.raises(ArgumentTypeError, match="label"):
        arena.scratch(label=5)


def test_what_is_allocated_outside_of_a_scratch_on_its_end_goes_with_it(arena):
    with arena.scratch() as tmp:
        mine, other = tmp.alloc(4, "uint8"), arena.alloc(4, "uint8")
        high = arena.alloc(4, "uint8", side="high")
    assert (mine.is_live, other.is_live, high.is_live) == (False, False, True)


def test_a_scratch_works_in_its_block_only(arena):
    tmp = arena.scratch(label="step")
    calls = (
        lambda: tmp.alloc(1, "uint8"),
        lambda: tmp.empty(1, "uint8"),
        lambda: tmp.zeros(1, "uint8"),
        lambda: tmp.full(1, 1, "uint8"),
        lambda: tmp.from_array([1]),
    )
    for call in calls:
        with pytest.raises(CheckpointError, match="with"):
            call()
    with tmp:
        for call in calls:
            call()
    for call in (*calls, tmp.__enter__):
        with pytest.raises(CheckpointError):
            call()
    with pytest.raises(NotCopyableError):
        tmp.__reduce__()
    assert arena.stats.used == 0


def test_a_scratch_passes_exceptions_on_and_gives_back_all_the_same(arena):
    error = KeyError()
    with pytest.raises(KeyError) as caught, arena.scratch() as tmp:
        tmp.alloc(4, "uint8")
        raise error
    assert caught.value is error
    assert arena.stats.used == 0
    arena.close()
    with pytest.raises(ArenaClosedError, match="scratch"):
        arena.scratch()


def test_an_arena_with_both_ends_in_use_waits_for_no_garbage_collector(arena):
    gc.collect()
    gc.disable()
    try:
        arena = Arena(1024)
        with arena.scratch() as tmp, arena.scratch(conflicts=[tmp]) as other:
            array = other.alloc(4, "uint8", fill=1).as_torch()
        ref = weakref.ref(arena)
        del arena, tmp, other
        assert ref() is None
        assert isinstance(array, torch.Tensor)
    finally:
        gc.enable()
