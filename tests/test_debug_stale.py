# What is raised at the end of a block is tested with the block.
# ruff: noqa: PT012, PT031
from __future__ import annotations

import warnings

import numpy as np
import pytest
from debug_kit import QUIET, here, poke

from gpuarena import Arena, Debug
from gpuarena.errors import CorruptionError, CorruptionWarning, LiveArraysError, LiveArraysWarning

# What is written through arrays that outlived their regions, and which exceptions tell of it.


@pytest.fixture(params=["host", "torch"])
def backend(request):
    return request.param


@pytest.fixture
def arena(backend):
    return Arena(4096, backend=backend, debug=QUIET, name="scratch")


# -- writes after a rollback ------------------------------------------------------------------------------------


def stale_array(arena, n_bytes=8, side="low"):
    with arena.scope(side=side):
        array = arena.empty(n_bytes, "uint8", side=side)
    return array


@pytest.mark.parametrize("side", ["low", "high"])
def test_a_write_through_a_stale_array_is_found_by_check_and_once(arena, side):
    stale_array(arena, side=side)[3] = 1
    offset = 3 if side == "low" else arena.capacity - 128 + 3
    with pytest.raises(CorruptionError, match=r"after it was given back.*stale") as caught:
        arena.check()
    assert len(caught.value.offsets) == 1
    if side == "low":
        assert caught.value.offsets == [offset]
    arena.check()


@pytest.mark.parametrize("side", ["low", "high"])
@pytest.mark.parametrize("fill", [None, 0])
def test_a_write_through_a_stale_array_is_found_by_the_next_allocation_there(arena, side, fill):
    stale_array(arena, side=side)[3] = 1
    before = arena.stats
    with pytest.raises(CorruptionError, match="stale"):
        arena.alloc(8, "uint8", side=side, fill=fill)
    assert arena.stats == before
    arena.alloc(8, "uint8", side=side, fill=fill)
    arena.check()


def test_a_write_through_a_stale_array_elsewhere_does_not_disturb_an_allocation(arena):
    stale_array(arena, 512)[500] = 1
    arena.alloc(8, "uint8")
    with pytest.raises(CorruptionError) as caught:
        arena.check()
    assert caught.value.offsets == [500]


def test_a_write_through_a_stale_array_is_found_where_the_next_guard_zone_goes(arena):
    stale_array(arena, 200)[100] = 1
    with pytest.raises(CorruptionError, match="stale"):
        arena.alloc(80, "uint8")
        arena.check()


def test_a_write_of_the_poison_itself_is_no_corruption(arena):
    stale_array(arena)[3] = 255
    arena.check()


@pytest.mark.parametrize("how", ["close", "with"])
def test_a_write_through_a_stale_array_is_a_warning_at_close(arena, how):
    stale_array(arena)[3] = 1
    with pytest.warns(CorruptionWarning, match="byte 3 .*stale") as caught:
        if how == "close":
            arena.close()
        else:
            with arena:
                pass
    assert len(caught) == 1
    arena.close()


def test_an_overrun_is_a_warning_at_close_with_label_and_caller(arena):
    region, place = arena.alloc(5, "uint8", fill=0, label="logits"), here()
    poke(arena, region.offset + 5)
    with pytest.warns(CorruptionWarning, match="'logits'") as caught:
        arena.close()
    assert place in str(caught[0].message)
    assert caught[0].filename == __file__
    assert arena.closed


def test_an_arena_closes_though_warnings_are_errors(arena):
    region = arena.alloc(5, "uint8", fill=0)
    poke(arena, region.offset + 5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(CorruptionWarning):
            arena.close()
    assert arena.closed
    assert not region.is_live


def test_what_is_put_above_a_rollback_by_a_child_is_found(arena):
    child = arena.child(512)
    stale_array(child)[3] = 1
    with pytest.raises(CorruptionError, match="byte 3"):
        child.alloc(8, "uint8")


# -- exceptions on their way ------------------------------------------------------------------------------------


def test_an_exception_passes_a_scope_unchanged_and_tells_of_damage_in_a_note(arena):
    error = KeyError("mine")
    with pytest.raises(KeyError) as caught, arena.scope("step"):
        region = arena.alloc(5, "uint8", fill=0, label="logits")
        poke(arena, region.offset + 5)
        raise error
    assert caught.value is error
    assert error.args == ("mine",)
    assert error.__context__ is None
    assert len(error.__notes__) == 1
    assert "'logits'" in error.__notes__[0]
    assert arena.stats.used == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt(), GeneratorExit(), SystemExit(3)])
def test_exceptions_that_are_no_errors_pass_a_scope_too(arena, error):
    with pytest.raises(type(error)) as caught, arena.scope():
        region = arena.alloc(5, "uint8", fill=0)
        poke(arena, region.offset + 5)
        raise error
    assert caught.value is error
    assert "overwritten" in error.__notes__[0]


def test_an_exception_without_damage_gets_no_note(arena):
    error = KeyError()
    with pytest.raises(KeyError), arena.scope(), arena.scope("inner"):
        arena.alloc(5, "uint8", fill=0)
        raise error
    assert not hasattr(error, "__notes__")


def test_damage_at_the_end_of_a_scope_is_raised_where_nothing_else_is(arena):
    with pytest.raises(CorruptionError, match="'logits'"), arena.scope():
        region = arena.alloc(5, "uint8", fill=0, label="logits")
        poke(arena, region.offset + 5)
    arena.assert_balanced()
    assert arena.stats.used == 0


def test_a_scratch_block_tells_of_damage_as_a_scope_does(arena):
    error = KeyError()
    with pytest.raises(KeyError), arena.scratch() as tmp:
        region = tmp.alloc(5, "uint8", fill=0)
        poke(arena, region.offset + 5)
        raise error
    assert "overwritten" in error.__notes__[0]


# -- several findings at a time ---------------------------------------------------------------------------------


def texts_of(error):
    found = []
    while error is not None:
        found += [str(error), *getattr(error, "__notes__", [])]
        error = error.__cause__ or error.__context__
    return " | ".join(found)


def test_a_scope_that_leaves_arrays_and_damage_tells_of_both(backend):
    arena = Arena(4096, backend=backend, debug=Debug(on_live_arrays="raise"))
    kept = []
    with pytest.raises((LiveArraysError, CorruptionError)) as caught, arena.scope():
        region = arena.alloc(5, "uint8", fill=0, label="logits")
        kept.append(region.array)
        poke(arena, region.offset + 5)
    assert "referenced" in texts_of(caught.value)
    assert "overwritten" in texts_of(caught.value)


def test_a_rollback_that_is_refused_for_arrays_leaves_damage_to_be_found(backend):
    arena = Arena(4096, backend=backend, debug=Debug(on_live_arrays="raise"))
    damaged = arena.alloc(5, "uint8", fill=0, label="logits")
    kept = arena.alloc(5, "uint8", fill=0, side="high").array
    poke(arena, damaged.offset + 5)
    with pytest.raises(LiveArraysError):
        arena.reset()
    assert damaged.is_live
    assert kept.tolist() == [0] * 5
    with pytest.raises(CorruptionError, match="'logits'"):
        arena.check()


def test_damage_is_told_though_warnings_of_arrays_are_errors(backend):
    arena = Arena(4096, backend=backend, debug=True)
    checkpoint = arena.checkpoint()
    region = arena.alloc(5, "uint8", fill=0, label="logits")
    kept = region.array
    poke(arena, region.offset + 5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises((LiveArraysWarning, CorruptionError)) as caught:
            arena.rollback(checkpoint)
    assert "overwritten" in texts_of(caught.value)
    del kept


# -- spilling ---------------------------------------------------------------------------------------------------


def test_a_spill_moves_guards_out_and_back(arena):
    checkpoint = arena.checkpoint()
    regions = [arena.alloc(5, "uint8", fill=i) for i in range(3)]
    spilled = arena.spill(checkpoint)
    with arena.scope():
        arena.alloc(700, "uint8", fill=9)
    spilled.restore()
    arena.check()
    assert [region.array.tolist() for region in regions] == [[i] * 5 for i in range(3)]
    poke(arena, regions[1].offset + 5)
    with pytest.raises(CorruptionError):
        arena.rollback(checkpoint)


def test_a_spill_that_finds_damage_loses_no_contents(arena):
    checkpoint = arena.checkpoint()
    region = arena.alloc(5, "uint8", fill=3)
    poke(arena, region.offset + 5)
    try:
        spilled = arena.spill(checkpoint)
    except CorruptionError:
        assert region.is_live
    else:
        spilled.restore()
    assert region.array.tolist() == [3] * 5


def test_a_stale_write_while_spilled_is_found(arena):
    checkpoint = arena.checkpoint()
    array = arena.alloc(8, "uint8", fill=1).array
    arena.spill(checkpoint)
    array[2] = 5
    with pytest.raises(CorruptionError, match=r"byte 2 .*stale"):
        arena.check()


def test_poison_says_nothing_about_numbers_that_were_never_given_back(arena):
    a = arena.alloc(4, "float32", fill=np.nan)
    arena.check()
    with arena.scope():
        arena.alloc(4, "float32", fill=np.nan)
    arena.check()
    assert np.isnan(np.array(a.array.tolist())).all()
