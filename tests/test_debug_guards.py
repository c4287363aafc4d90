# What is raised at the end of a block is tested with the block.
# ruff: noqa: PT012
from __future__ import annotations

import pytest
from debug_kit import QUIET, here, poke

from gpuarena import Arena, Debug
from gpuarena.errors import CorruptionError


@pytest.fixture(params=["host", "torch"])
def backend(request):
    return request.param


@pytest.fixture
def arena(backend):
    return Arena(4096, backend=backend, debug=QUIET, name="scratch")


# -- guard zones ------------------------------------------------------------------------------------------------


def find_by_check(arena, checkpoint):
    arena.check()


def find_by_rollback(arena, checkpoint):
    arena.rollback(checkpoint)


def find_by_reset(arena, checkpoint):
    arena.reset()


WAYS = [find_by_check, find_by_rollback, find_by_reset]


@pytest.mark.parametrize("find", WAYS)
@pytest.mark.parametrize("side", ["low", "high"])
@pytest.mark.parametrize("guard", [1, 64])
def test_an_overrun_by_one_byte_names_the_region_and_its_caller(backend, find, side, guard):
    arena = Arena(4096, backend=backend, alignment=1, debug=Debug(guard=guard, on_live_arrays="ignore"))
    checkpoint = arena.checkpoint(side)
    region, place = arena.alloc(5, "uint8", fill=0, label="logits", side=side), here()
    arena.alloc(5, "uint8", fill=0, label="innocent", side=side)
    poke(arena, region.offset + 5)
    with pytest.raises(CorruptionError, match="'logits'") as caught:
        find(arena, checkpoint)
    assert place in str(caught.value)
    assert "innocent" not in str(caught.value)
    assert caught.value.offsets == [region.offset + 5]


@pytest.mark.parametrize("find", WAYS)
@pytest.mark.parametrize("side", ["low", "high"])
def test_an_underrun_by_one_byte_is_found_in_front_of_a_region_that_is_not_the_first(backend, find, side):
    arena = Arena(4096, backend=backend, alignment=1, debug=QUIET)
    checkpoint = arena.checkpoint(side)
    first = arena.alloc(5, "uint8", fill=0, side=side)
    region = arena.alloc(5, "uint8", fill=0, side=side)
    upper = max(first.offset, region.offset)
    poke(arena, upper - 1)
    with pytest.raises(CorruptionError) as caught:
        find(arena, checkpoint)
    assert caught.value.offsets == [upper - 1]


def test_an_underrun_of_the_lowest_region_of_the_high_end_is_found_in_memory_that_was_used(arena):
    with arena.scope(side="high"):
        arena.alloc(1000, "uint8", side="high")
    region = arena.alloc(5, "uint8", fill=0, side="high")
    poke(arena, region.offset - 1)
    with pytest.raises(CorruptionError) as caught:
        arena.check()
    assert caught.value.offsets == [region.offset - 1]


def test_gaps_that_alignment_makes_are_guarded_even_without_guard_zones(backend):
    arena = Arena(4096, backend=backend, alignment=64, debug=Debug(guard=0, on_live_arrays="ignore"))
    arena.alloc(5, "uint8", fill=0, label="first")
    arena.alloc(5, "uint8", fill=0, label="second")
    for offset in (5, 63):
        poke(arena, offset)
        with pytest.raises(CorruptionError) as caught:
            arena.check()
        assert caught.value.offsets == [offset]


def test_every_byte_of_a_guard_zone_counts_and_no_byte_of_a_region_does(backend):
    arena = Arena(4096, backend=backend, alignment=1, debug=Debug(guard=16, on_live_arrays="ignore"))
    region = arena.alloc(8, "uint8", fill=0)
    for offset in range(8):
        poke(arena, region.offset + offset)
        arena.check()
    for offset in range(8, 24):
        poke(arena, region.offset + offset)
        with pytest.raises(CorruptionError):
            arena.check()


def test_damage_is_reported_once(arena):
    checkpoint = arena.checkpoint()
    region = arena.alloc(5, "uint8", fill=0)
    poke(arena, region.offset + 5)
    with pytest.raises(CorruptionError):
        arena.check()
    arena.check()
    arena.rollback(checkpoint)
    arena.check()


def test_all_damage_is_in_one_report(arena):
    regions = [arena.alloc(5, "uint8", fill=0, label=f"r{i}") for i in range(3)]
    for region in regions:
        poke(arena, region.offset + 5)
    with pytest.raises(CorruptionError, match=r"'r0'.*'r1'.*'r2'") as caught:
        arena.check()
    assert caught.value.offsets == [region.offset + 5 for region in regions]


def test_a_rollback_that_finds_damage_has_happened_all_the_same(arena):
    checkpoint = arena.checkpoint()
    region = arena.alloc(5, "uint8", fill=0)
    poke(arena, region.offset + 5)
    with pytest.raises(CorruptionError):
        arena.rollback(checkpoint)
    assert not region.is_live
    assert (arena.stats.used, arena.stats.top) == (0, 0)
    assert arena.alloc(5, "uint8").offset == 0


def test_a_rollback_looks_at_what_it_drops_only(arena):
    kept = arena.alloc(5, "uint8", fill=0)
    poke(arena, kept.offset + 5)
    with arena.scope():
        arena.alloc(5, "uint8", fill=0)
    with pytest.raises(CorruptionError):
        arena.check()


def test_what_fits_exactly_fits_in_debug_mode_too_and_guards_count_as_padding(backend):
    arena = Arena(100, backend=backend, alignment=1, debug=QUIET)
    arena.alloc(100, "uint8", fill=1)
    arena.check()
    arena.reset()
    arena.alloc(10, "uint8")
    assert (arena.stats.used, arena.stats.padding, arena.stats.top) == (10, 64, 74)


def test_empty_regions_have_no_guards(arena):
    for side in ("low", "high"):
        before = arena.stats.top, arena.stats.high
        arena.alloc((3, 0), "float32", side=side)
        assert (arena.stats.top, arena.stats.high) == before
    arena.check()


def test_an_overrun_is_found_when_the_region_is_extended_over_it(arena):
    region = arena.alloc(5, "uint8", fill=0)
    poke(arena, region.offset + 5)
    with pytest.raises(CorruptionError):
        region.extend(10)
        arena.check()


def test_the_guard_zone_moves_with_a_region_that_grows(arena):
    region = arena.alloc(5, "uint8", fill=0).extend(200)
    region[...] = 3
    arena.check()
    poke(arena, region.offset + 200)
    with pytest.raises(CorruptionError):
        arena.check()


# -- resized tensors --------------------------------------------------------------------------------------------


def test_a_tensor_cannot_be_resized_into_its_neighbour():
    arena = Arena(4096, backend="torch", debug=QUIET)
    tensor = arena.alloc(4, "float32", fill=1).array
    neighbour = arena.alloc(4, "float32", fill=2)
    tensor.resize_(2)
    arena.check()
    try:
        tensor.resize_(300)
    except (RuntimeError, TypeError):
        pass
    else:
        with pytest.raises(CorruptionError, match="resized"):
            arena.check()
    assert neighbour.array.tolist() == [2] * 4
