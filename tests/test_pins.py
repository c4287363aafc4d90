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
    PinnedError,
)
from gpuarena.testing import FakeDevice

# Pins by hand, on arenas of the CPU; those that a capture makes are tested with the streams.


@pytest.fixture(params=["host", "torch"])
def arena(request):
    return Arena(4096, backend=request.param, alignment=64)


@pytest.mark.parametrize("side", ["low", "high"])
def test_memory_handed_out_inside_is_not_handed_out_again(arena, side):
    with arena.pin("graph") as pin, arena.scope(side=side):
        inner = arena.alloc(100, "uint8", fill=5, side=side)
        array = inner.array
    assert not inner.is_live
    assert pin.nbytes >= 100
    start = inner.offset
    for _ in range(5):
        with arena.scope(side=side):
            new = arena.alloc(10, "uint8", fill=9, side=side)
            assert new.offset >= start + 100 or new.offset + 10 <= start
    assert array.tolist() == [5] * 100
    assert arena.pins == (pin,)


def test_a_rollback_below_a_pin_is_refused_and_changes_nothing(arena):
    below = arena.checkpoint()
    with arena.pin("graph") as pin:
        kept = arena.alloc(100, "uint8", fill=5)
    above = arena.checkpoint()
    region = arena.alloc(4, "uint8")
    before = arena.stats
    for call in (lambda: arena.rollback(below), arena.reset):
        with pytest.raises(PinnedError, match=r"'graph'.*release\(\)") as caught:
            call()
        assert caught.value.pin is pin
        assert isinstance(caught.value, CheckpointError)
        assert arena.stats == before
        assert region.is_live
    arena.rollback(above)
    assert kept.is_live
    pin.release()
    assert (arena.pins, pin.state) == ((), "released")
    pin.release()
    arena.rollback(below)
    assert (kept.is_live, arena.stats.used, arena.stats.top) == (False, 0, 0)
    arena.reset()
    assert arena.stats.n_regions == 0


@pytest.mark.parametrize("side", ["low", "high"])
def test_a_checkpoint_that_lies_right_below_a_pin_is_below_it(arena, side):
    checkpoint = arena.checkpoint(side)
    with arena.pin() as pin, arena.scope(side=side):
        arena.alloc(100, "uint8", side=side)
    with pytest.raises(PinnedError):
        arena.rollback(checkpoint)
    pin.release()
    arena.rollback(checkpoint)
    assert arena.stats.used == 0


def test_a_scope_that_ends_below_a_pin_tells_so(arena):
    with pytest.raises(PinnedError), arena.scope(), arena.pin() as pin:
        arena.alloc(100, "uint8")
    arena.assert_balanced()
    error = KeyError()
    with pytest.raises(KeyError) as caught, arena.scope():
        arena.alloc(4, "uint8")
        with arena.pin():
            pass
        raise error
    assert caught.value is error
    pin.release()


def test_the_other_end_is_pinned_as_well(arena):
    low, high = arena.checkpoint(), arena.checkpoint("high")
    with arena.pin() as pin:
        arena.alloc(4, "uint8", side="high")
    with pytest.raises(PinnedError):
        arena.rollback(high)
    pin.release()
    arena.rollback(high)
    arena.rollback(low)


def test_after_an_exception_nothing_is_kept(arena):
    checkpoint = arena.checkpoint()
    error = KeyError()
    with pytest.raises(KeyError) as caught, arena.pin() as pin:
        arena.alloc(4, "uint8")
        raise error
    assert caught.value is error
    assert arena.pins == ()
    assert pin.state == "released"
    arena.rollback(checkpoint)
    assert arena.stats.used == 0


def test_a_pin_is_entered_once_and_not_inside_another(arena):
    pin = arena.pin("outer")
    with pin:
        with pytest.raises(CheckpointError, match=r"'outer'.*is open"), arena.pin("inner"):
            pass
        with pytest.raises(CheckpointError, match="entered before"), pin:
            pass
        with pytest.raises(CheckpointError, match="before its block has ended"):
            pin.release()
    with pytest.raises(CheckpointError, match="entered before"), pin:
        pass
    with arena.pin("second"):
        arena.alloc(4, "uint8")
    assert [each.label for each in arena.pins] == ["outer", "second"]
    for each in arena.pins:
        each.release()
    arena.reset()


def test_a_pin_that_was_released_cannot_be_entered(arena):
    pin = arena.pin()
    pin.release()
    with pytest.raises((CheckpointError, ArenaClosedError)):
        pin.__enter__()
    assert arena.pins == ()


def test_pins_are_released_in_any_order(arena):
    start = arena.checkpoint()
    pins = []
    for number in range(3):
        with arena.pin(str(number)) as pin, arena.scope():
            arena.alloc(100, "uint8", fill=number)
        pins.append(pin)
    for number in (1, 0, 2):
        with pytest.raises(PinnedError):
            arena.rollback(start)
        pins[number].release()
    arena.rollback(start)
    assert arena.stats.used == 0


def test_a_pin_counts_what_it_keeps_beyond_the_live_regions(arena):
    with arena.pin() as pin:
        arena.alloc(64, "uint8", label="live")
        with arena.scope():
            arena.alloc(100, "uint8")
        with arena.scope():
            arena.alloc(30, "uint8")
    assert pin.nbytes == 100
    assert arena.by_label()["live"] == 64
    assert sum(arena.by_label().values()) == arena.stats.used == 164
    assert arena.stats.available == 4096 - 164


def test_a_pin_that_ends_inside_a_frame_like_program_leaves_both_ends_consistent(arena):
    with arena.pin() as pin, arena.scratch() as tmp, arena.scratch(conflicts=[tmp]) as other:
        tmp.alloc(100, "uint8")
        other.alloc(100, "uint8")
    assert pin.nbytes == 100 + 128  # the high end's alignment lies behind the region
    assert arena.stats.top == 100
    assert arena.stats.high == 4096 - 128
    pin.release()
    arena.reset()
    assert arena.stats.available == 4096


def test_what_cannot_be_pinned_is_out_of_memory_as_always(arena):
    with arena.pin() as pin, arena.scope():
        arena.alloc(4000, "uint8")
    with pytest.raises(OutOfMemoryError, match="pin"):
        arena.alloc(1000, "uint8")
    pin.release()
    with pytest.raises(OutOfMemoryError):
        arena.alloc(1000, "uint8")  # released, but not rolled back
    arena.reset()
    arena.alloc(1000, "uint8")


def test_a_pin_of_a_child_keeps_its_parent_from_ending_it(arena):
    checkpoint = arena.checkpoint()
    child = arena.child(1024)
    with child.pin("graph") as pin, child.scope():
        child.alloc(100, "uint8")
    with pytest.raises(PinnedError, match=r"'graph'"):
        arena.rollback(checkpoint)
    assert not child.closed
    pin.release()
    arena.rollback(checkpoint)
    assert child.closed


def test_an_arena_that_is_closed_inside_a_pin_stays_empty(arena):
    with arena.pin() as pin:
        arena.alloc(10, "uint8")
        arena.close()
    stats = arena.stats
    assert (stats.used, stats.n_regions, stats.n_allocs_total, stats.n_freed_total) == (0, 0, 1, 1)
    assert pin not in arena.pins


def test_a_closed_arena_is_not_pinned(arena):
    pin = arena.pin()
    arena.close()
    with pytest.raises(ArenaClosedError, match="pin"):
        pin.__enter__()
    with pytest.raises(ArenaClosedError, match="pin"):
        arena.pin()
    with pytest.raises(ArgumentTypeError, match="label"):
        Arena(64).pin(5)


def test_a_pin_can_be_released_after_its_arena_is_gone():
    device = FakeDevice()
    arena = Arena(4096, backend=device)
    with arena.pin() as pin, arena.scope():
        arena.alloc(10, "uint8")
    del arena
    gc.collect()
    assert device.n_freed == 0
    pin.release()
    gc.collect()
    assert (pin.state, device.n_freed) == ("released", 1)


def test_closing_the_arena_does_not_free_what_a_graph_uses():
    device = FakeDevice()
    arena = Arena(4096, backend=device)
    with arena.pin() as pin, arena.scope():
        arena.alloc(10, "uint8")
    arena.close()
    del arena
    gc.collect()
    assert pin.state == "kept"
    assert device.n_freed == 0


def test_an_arena_whose_pins_are_released_waits_for_no_garbage_collector():
    gc.collect()
    gc.disable()
    try:
        arena = Arena(4096)
        with arena.pin() as pin:
            arena.alloc(10, "uint8")
        ref = weakref.ref(arena)
        pin.release()
        del arena
        assert ref() is None
    finally:
        gc.enable()


def test_a_pin_is_not_copied(arena):
    for call in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(NotCopyableError):
            call(arena.pin())


def test_debug_mode_finds_nothing_wrong_with_pins():
    arena = Arena(4096, debug=Debug(on_live_arrays="ignore"))
    with arena.pin() as pin, arena.scope():
        array = arena.alloc(100, "uint8").array
    array[:] = 3  # as a replay of the graph does
    arena.check()
    arena.alloc(100, "uint8", fill=1)
    array[:] = 4
    arena.check()
    pin.release()
    arena.reset()
    arena.check()


def test_a_buffer_of_its_own_is_kept_by_a_pin():
    device = FakeDevice()
    arena = Arena(4096, backend=device, debug=Debug(separate=True, on_live_arrays="ignore"))
    with arena.pin() as pin, arena.scope():
        arena.alloc(10, "uint8")
    gc.collect()
    assert device.n_freed == 0
    pin.release()
    arena.reset()
    gc.collect()
    assert device.n_freed == 1


programs = st.lists(
    st.tuples(
        st.sampled_from(["alloc", "alloc", "scope", "end", "pin", "unpin"]),
        st.sampled_from(["low", "high"]),
        st.integers(0, 100),
    ),
    max_size=40,
)


@given(programs)
def test_no_byte_handed_out_in_a_pin_is_handed_out_later(program):
    arena = Arena(2048, alignment=8)
    pin, reserved, handed = None, [], []
    checkpoints = {"low": [], "high": []}
    for kind, side, n in program:
        if kind == "alloc":
            try:
                region = arena.alloc(n, "uint8", side=side)
            except OutOfMemoryError:
                continue
            start, stop = region.offset, region.offset + region.nbytes
            assert all(stop <= a or b <= start for a, b in reserved if n and b > a)
            if pin is not None:
                handed.append((start, stop))
        elif kind == "scope":
            checkpoints[side].append(arena.checkpoint(side))
        elif kind == "end" and checkpoints[side]:
            try:
                arena.rollback(checkpoints[side].pop())
            except PinnedError:
                assert arena.pins
        elif kind == "pin" and pin is None:
            pin = arena.pin()
            pin.__enter__()
        elif kind == "unpin" and pin is not None:
            pin.__exit__(None, None, None)
            pin = None
            reserved += handed
            handed = []
    stats = arena.stats
    assert stats.top <= stats.high
    assert sum(arena.by_label().values()) == stats.used
