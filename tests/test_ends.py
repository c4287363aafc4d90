from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuarena import Arena
from gpuarena.errors import (
    ArgumentError,
    ArgumentTypeError,
    CheckpointError,
    OutOfMemoryError,
    StaleRegionError,
)

# The two ends of an arena. Scratch memory and children have modules of their own.


@pytest.fixture(params=["host", "torch"])
def arena(request):
    if request.param == "torch":
        pytest.importorskip("torch")
    return Arena(1024, backend=request.param, alignment=64, name="scratch")


# -- the high end -----------------------------------------------------------------------------------------------


def test_the_high_end_grows_down_from_the_capacity(arena):
    first = arena.alloc(100, "uint8", side="high", fill=1)
    second = arena.alloc((2, 3), "float32", side="high", fill=2)
    assert (first.offset, second.offset) == (896, 832)
    low = arena.alloc(4, "uint8", fill=3)
    assert low.offset == 0
    stats = arena.stats
    assert (stats.top, stats.high, stats.used, stats.available) == (4, 832, 128, 828)
    assert stats.used + stats.padding == stats.top + stats.capacity - stats.high == stats.peak
    assert first.array.tolist() == [1] * 100
    assert second.array.tolist() == [[2] * 3] * 2


def test_every_way_to_allocate_takes_a_side(arena):
    offsets = [
        arena.alloc(4, "uint8", side="high").offset,
        arena.from_array([1, 2], side="high").offset,
    ]
    for array in (
        arena.empty(4, "uint8", side="high"),
        arena.zeros(4, "uint8", side="high"),
        arena.full(4, 7, "uint8", side="high"),
        arena.frame({"x": (4, "uint8")}, side="high").x,
    ):
        address = array.data_ptr() if hasattr(array, "data_ptr") else array.ctypes.data
        offsets.append(address - arena.address)
    offsets.append(arena.child(10, side="high").address - arena.address)
    assert offsets == [960, 896, 832, 768, 704, 640, 576]
    assert arena.stats.top == 0


def test_a_request_that_fills_the_space_between_exactly_fits_on_both_ends(arena):
    arena.alloc(64, "uint8")
    arena.alloc(64, "uint8", side="high")
    for side in ("low", "high"):
        with arena.scope(side=side):
            region = arena.alloc(1024 - 128, "uint8", side=side, fill=5)
            assert region.offset == 64
            for other in ("low", "high"):
                with pytest.raises(OutOfMemoryError):
                    arena.alloc(1, "uint8", side=other, align=1)
                arena.alloc(0, "uint8", side=other)
    arena.alloc(1, "uint8")


def test_a_request_one_byte_too_long_is_refused_and_changes_nothing_but_a_count(arena):
    arena.alloc(60, "uint8")
    arena.alloc(64, "uint8", side="high")
    before = arena.stats
    with pytest.raises(OutOfMemoryError) as caught:
        arena.alloc(901, "uint8", side="high", align=1)
    assert caught.value.available == 900
    assert 1 <= caught.value.missing <= 64  # as much as moves what the high end holds
    after = arena.stats
    assert after.n_failed == 1
    assert [after.top, after.high, after.used, after.n_regions, after.peak] == [
        before.top, before.high, before.used, before.n_regions, before.peak,
    ]  # fmt: skip
    arena.alloc(900, "uint8", side="high", align=1)


@pytest.mark.parametrize("side", ["middle", "", "LOW", "High"])
def test_there_are_two_sides(arena, side):
    before = arena.stats
    for call in (
        lambda: arena.alloc(1, "uint8", side=side),
        lambda: arena.empty(1, "uint8", side=side),
        lambda: arena.checkpoint(side),
        lambda: arena.scope(side=side),
        lambda: arena.child(16, side=side),
        lambda: arena.frame({"x": (1, "uint8")}, side=side),
    ):
        with pytest.raises(ArgumentError, match="'low' or 'high'"):
            call()
    assert arena.stats == before
    arena.assert_balanced()


@pytest.mark.parametrize("side", [None, 1, b"low", True])
def test_a_side_is_a_text(arena, side):
    for call in (
        lambda: arena.alloc(1, "uint8", side=side),
        lambda: arena.checkpoint(side),
        lambda: arena.scope(side=side),
    ):
        with pytest.raises(ArgumentTypeError, match="side"):
            call()


def test_growable_arenas_have_no_high_end():
    arena = Arena("1MiB", backend="virtual")
    for call in (
        lambda: arena.alloc(1, "uint8", side="high"),
        lambda: arena.checkpoint("high"),
        lambda: arena.scope(side="high"),
        lambda: arena.scratch(conflicts=[arena]),
    ):
        with pytest.raises(ArgumentError, match="growable"):
            call()
    with arena.scratch() as tmp:
        assert tmp.side == "low"


# -- checkpoints of the ends ------------------------------------------------------------------------------------


def test_a_rollback_of_one_end_leaves_the_other(arena):
    low, high = arena.checkpoint(), arena.checkpoint("high")
    x = arena.alloc(4, "uint8", fill=1)
    y = arena.alloc(4, "uint8", side="high", fill=2)
    arena.rollback(low)
    assert (x.is_live, y.is_live) == (False, True)
    arena.rollback(high)
    assert not y.is_live
    assert arena.stats.used == 0
    for checkpoint in (low, high):
        arena.rollback(checkpoint)
    assert repr(high) == "Checkpoint(top=1024, n_regions=0, side='high')"


def test_each_end_has_checkpoints_of_its_own(arena):
    arena.alloc(4, "uint8", side="high")
    outer = arena.checkpoint("high")
    arena.alloc(4, "uint8", side="high")
    inner = arena.checkpoint("high")
    arena.alloc(4, "uint8")
    arena.rollback(arena.checkpoint())
    arena.rollback(inner)
    arena.rollback(outer)
    with pytest.raises(CheckpointError, match="out of order"):
        arena.rollback(inner)
    arena.keep(outer)
    with pytest.raises(CheckpointError, match="keep"):
        arena.rollback(outer)


def test_scopes_of_the_ends_may_overlap(arena):
    low, high = arena.scope("low"), arena.scope("high", side="high")
    low.__enter__()
    high.__enter__()
    x, y = arena.alloc(4, "uint8"), arena.alloc(4, "uint8", side="high")
    low.__exit__(None, None, None)
    assert (x.is_live, y.is_live) == (False, True)
    high.__exit__(None, None, None)
    assert not y.is_live
    arena.assert_balanced()


def test_a_scope_closed_before_one_inside_it_on_its_own_end_is_out_of_order(arena):
    outer = arena.scope("outer", side="high").__enter__()
    arena.scope("other").__enter__()
    arena.scope("inner", side="high").__enter__()
    with pytest.raises(CheckpointError, match=r"'outer'.*'inner'") as caught:
        outer.__exit__(None, None, None)
    assert "'other'" not in str(caught.value)
    with pytest.raises(CheckpointError, match="1 open: scope 'other'"):
        arena.assert_balanced()


def test_reset_drops_both_ends_or_neither(arena):
    regions = [arena.alloc(4, "uint8", side=side, fill=1) for side in ("low", "high")]
    checkpoints = [arena.checkpoint(side) for side in ("low", "high")]
    arena.reset()
    assert not any(region.is_live for region in regions)
    assert (arena.stats.top, arena.stats.high) == (0, 1024)
    for checkpoint in checkpoints:
        with pytest.raises(CheckpointError, match=r"before reset\(\)"):
            arena.rollback(checkpoint)


def test_a_stale_region_of_the_high_end_names_its_own_rollback(arena):
    region = arena.alloc(4, "uint8", side="high", label="logits")
    with arena.scope("mine", side="high"):
        inner = arena.alloc(4, "uint8", side="high")
        with arena.scope("not mine"):
            arena.alloc(4, "uint8")
    with pytest.raises(StaleRegionError, match="the end of scope 'mine'"):
        inner.array
    assert region.is_live


def test_only_the_last_region_of_the_low_end_is_extended(arena):
    region = arena.alloc(4, "uint8", side="high")
    with pytest.raises(CheckpointError, match="low end"):
        region.extend(8)


programs = st.lists(
    st.tuples(
        st.sampled_from(["alloc", "alloc", "alloc", "checkpoint", "rollback"]),
        st.sampled_from(["low", "high"]),
        st.integers(0, 70),
        st.sampled_from([1, 4, 64]),
    ),
    max_size=40,
)


@given(programs)
def test_the_ends_never_meet_and_contents_stay(program):
    arena = Arena(512, alignment=1)
    live = {"low": [], "high": []}
    saved = {"low": [], "high": []}
    for number, (kind, side, n, align) in enumerate(program):
        if kind == "alloc":
            try:
                region = arena.alloc(n, "uint8", align=align, side=side, fill=number)
            except OutOfMemoryError:
                gap = arena.stats.available
                assert n + align - 1 > gap
            else:
                live[side].append((region, number))
        elif kind == "checkpoint":
            saved[side].append((arena.checkpoint(side), len(live[side]), arena.stats))
        elif saved[side]:
            checkpoint, n_live, stats = saved[side][-1]
            arena.rollback(checkpoint)
            del live[side][n_live:]
            pointer = "top" if side == "low" else "high"
            assert getattr(arena.stats, pointer) == getattr(stats, pointer)
        ranges = sorted(
            (region.offset, region.offset + region.nbytes)
            for end in live.values()
            for region, _ in end
            if region.nbytes
        )
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(ranges))
        assert all(start >= 0 and stop <= 512 for start, stop in ranges)
        stats = arena.stats
        assert stats.top <= stats.high
        assert stats.used == sum(region.nbytes for end in live.values() for region, _ in end)
        assert stats.n_regions == len(live["low"]) + len(live["high"])
    for end in live.values():
        for region, number in end:
            assert (region.array == number).all()
