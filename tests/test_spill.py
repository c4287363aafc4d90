from __future__ import annotations

import copy
import gc
import pickle
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shared_core.case import raw_bytes

from gpuarena import Arena, Spill
from gpuarena.errors import (
    ArenaClosedError,
    ArgumentTypeError,
    CheckpointError,
    NotCopyableError,
    OutOfMemoryError,
    PinnedError,
    StaleRegionError,
)


@pytest.fixture(params=["host", "torch"])
def arena(request):
    return Arena(4096, backend=request.param, alignment=64)


def contents(regions):
    return [raw_bytes(region.array) for region in regions]


@pytest.mark.parametrize("side", ["low", "high"])
def test_regions_come_back_at_their_addresses_with_their_contents(arena, side):
    kept = arena.alloc(4, "uint8", fill=9, side=side)
    checkpoint = arena.checkpoint(side)
    regions = [
        arena.from_array(np.arange(12, dtype=np.float32).reshape(3, 4), side=side, label="a"),
        arena.alloc(0, "int64", side=side),
        arena.alloc(5, "bool", fill=True, side=side, label="b"),
    ]
    part = regions[0][1:, ::2]
    before, stats, addresses = contents(regions), arena.stats, [region.address for region in regions]
    spilled = arena.spill(checkpoint)
    assert isinstance(spilled, Spill)
    assert (spilled.n_regions, spilled.restored) == (3, False)
    assert spilled.nbytes >= 48 + 5
    assert not any(region.is_live for region in (*regions, part))
    assert kept.is_live
    assert arena.stats.used == 4
    with arena.scope(side=side):
        arena.alloc(1000, "uint8", fill=77, side=side)
    spilled.restore()
    assert all(region.is_live for region in (*regions, part))
    assert contents(regions) == before
    assert part.as_numpy().tolist() == [[4, 6], [8, 10]]
    assert [region.address for region in regions] == addresses
    for name in ("top", "high", "used", "padding", "n_regions", "n_allocs_total", "bytes_requested_total"):
        expected = getattr(stats, name) + {"n_allocs_total": 1, "bytes_requested_total": 1000}.get(name, 0)
        assert getattr(arena.stats, name) == expected, name
    assert arena.by_label() == {None: 4, "a": 48, "b": 5}
    assert "restored" in repr(spilled)


def test_spilled_regions_count_as_neither_allocated_nor_freed(arena):
    checkpoint = arena.checkpoint()
    arena.alloc(100, "uint8")
    before = arena.stats
    for _ in range(3):
        arena.spill(checkpoint).restore()
    assert arena.stats == before


def test_a_stale_region_names_the_spill_and_not_once_it_is_back(arena):
    checkpoint = arena.checkpoint()
    region = arena.alloc(4, "uint8", fill=1)
    spilled = arena.spill(checkpoint)
    with pytest.raises(StaleRegionError, match=r"spill\(\)") as caught:
        region.array
    assert __file__ in str(caught.value)
    spilled.restore()
    arena.rollback(checkpoint)
    with pytest.raises(StaleRegionError, match=r"given back by rollback\(\)"):
        region.array


def test_checkpoints_and_scopes_between_spilled_regions_work_again(arena):
    outer = arena.checkpoint()
    with arena.scope("open"):
        first = arena.alloc(4, "uint8", fill=1, label="first")
        inner = arena.checkpoint()
        second = arena.alloc(4, "uint8", fill=2)
        spilled = arena.spill(outer)
        with pytest.raises(CheckpointError):
            arena.rollback(inner)
        spilled.restore()
        arena.rollback(inner)
        assert (first.is_live, second.is_live) == (True, False)
        assert arena.by_label() == {"first": 4}
        assert first.as_numpy().tolist() == [1] * 4
    assert not first.is_live
    arena.assert_balanced()


def test_what_was_allocated_in_between_stays_stale(arena):
    checkpoint = arena.checkpoint()
    old = arena.alloc(4, "uint8", fill=1)
    spilled = arena.spill(checkpoint)
    new = arena.alloc(4, "uint8", fill=2)
    arena.rollback(checkpoint)
    spilled.restore()
    assert (old.is_live, new.is_live) == (True, False)
    with pytest.raises(StaleRegionError, match=r"rollback\(\)"):
        new.array
    newest = arena.alloc(4, "uint8", fill=3)
    assert old.as_numpy().tolist() == [1] * 4
    assert newest.offset == 64


def test_native_arrays_that_were_kept_show_the_contents_again(arena):
    checkpoint = arena.checkpoint()
    array = arena.alloc(4, "uint8", fill=1).array
    spilled = arena.spill(checkpoint)
    with arena.scope():
        arena.alloc(4, "uint8", fill=2)
    assert array.tolist() == [2] * 4
    spilled.restore()
    assert array.tolist() == [1] * 4


def test_several_spills_of_one_place_take_turns(arena):
    checkpoint = arena.checkpoint()
    spills, regions = [], []
    for number in range(3):
        regions.append(arena.alloc(100 * (number + 1), "uint8", fill=number))
        spills.append(arena.spill(checkpoint))
    for number in (2, 0, 1):
        spills[number].restore()
        assert [region.is_live for region in regions] == [i == number for i in range(3)]
        assert (regions[number].as_numpy() == number).all()
        spills[number] = arena.spill(checkpoint)


def test_a_place_in_use_is_not_overwritten(arena):
    checkpoint = arena.checkpoint()
    arena.alloc(4, "uint8", fill=1)
    spilled = arena.spill(checkpoint)
    user = arena.alloc(4, "uint8", fill=2)
    before = arena.stats
    with pytest.raises(CheckpointError, match="1 regions are live above"):
        spilled.restore()
    assert arena.stats == before
    assert user.as_numpy().tolist() == [2] * 4
    arena.rollback(checkpoint)
    spilled.restore()
    with pytest.raises(CheckpointError, match="restored before"):
        spilled.restore()


def test_a_place_that_the_other_end_took_is_out_of_memory(arena):
    for side, other in (("low", "high"), ("high", "low")):
        arena.reset()
        checkpoint = arena.checkpoint(side)
        region = arena.alloc(3000, "uint8", fill=1, side=side)
        spilled = arena.spill(checkpoint)
        with arena.scope(side=other):
            taken = arena.alloc(2000, "uint8", fill=2, side=other)
            with pytest.raises(OutOfMemoryError) as caught:
                spilled.restore()
            assert 0 < caught.value.missing <= 2000
            assert (taken.as_numpy() == 2).all()
            assert not region.is_live
            assert not spilled.restored
        spilled.restore()
        assert (region.as_numpy() == 1).all()


@pytest.mark.parametrize("action", ["rollback", "reset", "close", "keep", "below"])
def test_a_spill_whose_checkpoint_is_gone_cannot_come_back(arena, action):
    outer = arena.checkpoint()
    arena.alloc(4, "uint8")
    checkpoint = arena.checkpoint()
    region = arena.alloc(4, "uint8", fill=1)
    spilled = arena.spill(checkpoint)
    if action == "rollback":
        arena.rollback(outer)
    elif action == "below":
        arena.rollback(outer)
        arena.alloc(4, "uint8")
    else:
        {"reset": arena.reset, "close": arena.close, "keep": lambda: arena.keep(checkpoint)}[action]()
    with pytest.raises((CheckpointError, ArenaClosedError), match="restore"):
        spilled.restore()
    assert not region.is_live
    assert not spilled.restored


def test_what_cannot_be_brought_back_exactly_is_refused(arena):
    checkpoint = arena.checkpoint()
    with pytest.raises(CheckpointError, match="no regions"):
        arena.spill(checkpoint)
    for make in (lambda: arena.child(64), lambda: arena.frame(x=(4, "uint8"))):
        made = make()
        before = arena.stats
        with pytest.raises(CheckpointError, match="child arena or a frame"):
            arena.spill(checkpoint)
        assert arena.stats == before
        del made
        arena.rollback(checkpoint)
    with arena.pin() as pin:
        arena.alloc(4, "uint8")
    with pytest.raises(PinnedError):
        arena.spill(checkpoint)
    pin.release()
    arena.spill(checkpoint).restore()


def test_only_checkpoints_of_this_arena_are_spilled_to(arena):
    arena.alloc(4, "uint8")
    for wrong, error in ((None, ArgumentTypeError), (Arena(64).checkpoint(), CheckpointError)):
        with pytest.raises(error):
            arena.spill(wrong)
    checkpoint = arena.checkpoint()
    arena.close()
    with pytest.raises(ArenaClosedError, match="spill"):
        arena.spill(checkpoint)


def test_a_spill_is_not_copied_and_waits_for_no_garbage_collector(arena):
    gc.collect()
    gc.disable()
    try:
        arena = Arena(1024)
        checkpoint = arena.checkpoint()
        arena.alloc(4, "uint8")
        spilled = arena.spill(checkpoint)
        for call in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(NotCopyableError):
                call(spilled)
        refs = [weakref.ref(arena), weakref.ref(spilled)]
        del arena
        spilled.restore()
        del spilled
        assert [ref() for ref in refs] == [None, None]
    finally:
        gc.enable()


def test_a_growable_arena_gets_its_memory_back():
    arena = Arena("4MiB", backend="virtual")
    checkpoint = arena.checkpoint()
    region = arena.alloc(1 << 21, "uint8", fill=7)
    spilled = arena.spill(checkpoint)
    assert arena.trim() > 0
    spilled.restore()
    assert arena.stats.committed >= 1 << 21
    assert (region.array == 7).all()


def test_a_region_can_grow_after_it_came_back(arena):
    checkpoint = arena.checkpoint()
    arena.alloc(100, "uint8", label="first")
    region = arena.alloc(4, "uint8", fill=7, label="last")
    arena.spill(checkpoint).restore()
    assert region.extend(8)[:4].as_numpy().tolist() == [7] * 4
    assert arena.by_label() == {"first": 100, "last": 8}


@given(
    before=st.lists(st.integers(0, 40), max_size=3),
    above=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    between=st.lists(st.integers(0, 100), max_size=6),
    side=st.sampled_from(["low", "high"]),
    align=st.sampled_from([1, 16, 64]),
)
def test_whatever_happens_in_between_the_contents_are_the_same(before, above, between, side, align):
    arena = Arena(2048, alignment=align)
    kept = [arena.alloc(n, "uint8", fill=i + 100, side=side) for i, n in enumerate(before)]
    checkpoint = arena.checkpoint(side)
    regions = [arena.alloc(n, "uint8", fill=i, side=side) for i, n in enumerate(above)]
    expected, stats = contents(kept + regions), arena.stats
    spilled = arena.spill(checkpoint)
    for n in between:
        arena.alloc(n, "uint8", fill=255, side=side)
    arena.rollback(checkpoint)
    spilled.restore()
    assert contents(kept + regions) == expected
    assert (arena.stats.top, arena.stats.high, arena.stats.used) == (stats.top, stats.high, stats.used)
    arena.reset()
    assert arena.stats.bytes_freed_total == arena.stats.bytes_requested_total
