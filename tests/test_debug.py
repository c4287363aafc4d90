from __future__ import annotations

import gc
import warnings
import weakref

import numpy as np
import pytest
import torch
from debug_kit import QUIET, here, poke
from shared_core.case import raw_bytes

from gpuarena import Arena, Debug, FrameArenas
from gpuarena.errors import (
    ArenaError,
    ArgumentError,
    ArgumentTypeError,
    CheckpointError,
    CorruptionError,
    CorruptionWarning,
)


@pytest.fixture(params=["host", "torch"])
def backend(request):
    return request.param


@pytest.fixture
def arena(backend):
    return Arena(4096, backend=backend, debug=QUIET, name="scratch")


# -- settings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"poison": 1}, ArgumentTypeError, "poison"),
        ({"call_sites": None}, ArgumentTypeError, "call_sites"),
        ({"strict": "yes"}, ArgumentTypeError, "strict"),
        ({"separate": 0}, ArgumentTypeError, "separate"),
        ({"guard": True}, ArgumentTypeError, "guard"),
        ({"guard": 64.0}, ArgumentTypeError, "guard"),
        ({"guard": -1}, ArgumentError, "guard=-1"),
        ({"on_live_arrays": "error"}, ArgumentError, "on_live_arrays.*'warn'"),
        ({"on_live_arrays": None}, ArgumentError, "on_live_arrays"),
    ],
)
def test_a_setting_that_can_never_be_right_is_refused(options, error, words):
    with pytest.raises(error, match=words):
        Debug(**options)


@pytest.mark.parametrize("value", [1, "yes", {}, Debug, [True]])
def test_debug_is_a_bool_or_settings(value):
    with pytest.raises(ArgumentTypeError, match="debug must be"):
        Arena(64, debug=value)
    with pytest.raises(ArgumentTypeError, match="debug must be"):
        Arena.from_buffer(bytearray(64), debug=value)


def test_settings_are_given_by_name_and_cannot_be_changed():
    with pytest.raises(TypeError):
        Debug(True)
    with pytest.raises(AttributeError):
        Debug().guard = 0
    assert Debug.parse(None) is Debug.parse(False) is None
    assert Debug.parse(True) == Debug()


def test_without_debug_mode_check_finds_nothing():
    arena = Arena(64, alignment=1)
    arena.alloc(4, "uint8", fill=0)
    poke(arena, 4)
    arena.check()
    arena.close()


# -- poison -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("float32", [np.nan] * 3),
        ("float16", [np.nan] * 3),
        ("float64", [np.nan] * 3),
        ("bfloat16", [np.nan] * 3),
        ("int8", [-1] * 3),
        ("int64", [-1] * 3),
        ("uint8", [255] * 3),
    ],
)
@pytest.mark.parametrize("side", ["low", "high"])
def test_memory_without_contents_is_poisoned(arena, dtype, expected, side):
    for array in (arena.alloc(3, dtype, side=side).array, arena.empty(3, dtype, side=side)):
        np.testing.assert_array_equal(np.array(array.tolist(), float), expected)


def test_contents_are_not_poisoned(arena):
    assert arena.alloc(3, "int8", fill=5).array.tolist() == [5] * 3
    assert arena.zeros(3, "int8").tolist() == [0] * 3
    assert arena.full(3, 2, "int8").tolist() == [2] * 3
    assert arena.from_array(np.arange(3)).array.tolist() == [0, 1, 2]
    assert arena.frame(x=(3, "int8")).x.tolist() == [-1] * 3


def test_memory_that_is_given_back_is_poisoned_and_what_stays_is_not(arena):
    kept = arena.alloc(3, "int8", fill=1).array
    with arena.scope():
        gone = arena.alloc(3, "int8", fill=2).array
    assert (kept.tolist(), gone.tolist()) == ([1] * 3, [-1] * 3)
    arena.reset()
    assert kept.tolist() == [-1] * 3


def test_without_poison_nothing_is_overwritten(backend):
    arena = Arena(4096, backend=backend, debug=Debug(poison=False, on_live_arrays="ignore"))
    with arena.scope():
        gone = arena.alloc(3, "int8", fill=2).array
    assert gone.tolist() == [2] * 3
    gone[0] = 9  # nobody looks
    arena.check()
    assert arena.empty(3, "int8").tolist() == [9, 2, 2]


def test_rows_that_a_region_grows_by_are_poisoned(arena):
    region = arena.alloc((2, 2), "int8", fill=1).extend(4)
    assert region.array.tolist() == [[1, 1], [1, 1], [-1, -1], [-1, -1]]
    arena.check()


# -- other arenas -----------------------------------------------------------------------------------------------


def test_memory_of_somebody_else_is_watched_and_written_only_where_it_is_used():
    memory = bytearray(b"\x07" * 1024)
    arena = Arena.from_buffer(memory, alignment=1, debug=QUIET)
    region = arena.alloc(10, "uint8", fill=1)
    assert memory[74:] == b"\x07" * (1024 - 74)
    memory[10] = 0
    with pytest.raises(CorruptionError, match="byte 10"):
        arena.check()
    arena.close()
    assert memory[:10] == b"\x01" * 10
    assert not region.is_live
    with pytest.raises(ArgumentError, match="separate"):
        Arena.from_buffer(memory, debug=Debug(separate=True))


def test_a_child_is_watched_as_its_parent_is(arena):
    child = arena.child(1024, name="child")
    region, place = child.alloc(5, "uint8", fill=0, label="inner"), here()
    poke(child, region.offset + 5)
    arena.check()  # the parent knows nothing of what its regions hold
    with pytest.raises(CorruptionError, match="'inner'") as caught:
        child.check()
    assert place in str(caught.value)


def test_damage_in_a_child_is_a_warning_when_the_parent_ends_it(arena):
    checkpoint = arena.checkpoint()
    child = arena.child(1024)
    region = child.alloc(5, "uint8", fill=0, label="inner")
    poke(child, region.offset + 5)
    with pytest.warns(CorruptionWarning, match="'inner'"):
        arena.rollback(checkpoint)
    assert child.closed
    arena.check()


def test_damage_in_a_child_leaves_the_parents_rollback_whole_though_warnings_are_errors(arena):
    checkpoint = arena.checkpoint()
    child = arena.child(1024)
    other = arena.alloc(5, "uint8", fill=3)
    kept = other.array
    poke(child, child.alloc(5, "uint8", fill=0).offset + 5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises((CorruptionWarning, CorruptionError)):
            arena.rollback(checkpoint)
    assert child.closed
    assert (arena.stats.n_regions, arena.stats.top) == (0, 0)
    assert kept.tolist() == [255] * 5  # poisoned, as after every rollback
    arena.alloc(8, "uint8")
    arena.check()


def test_strict_debugging_refuses_allocation_outside_of_scopes(backend):
    arena = Arena(4096, backend=backend, debug=Debug(strict=True))
    before = arena.stats
    for call in (
        lambda: arena.alloc(1, "uint8"),
        lambda: arena.empty(1, "uint8", side="high"),
        lambda: arena.zeros(1, "uint8"),
        lambda: arena.child(64),
        lambda: arena.frame(x=(1, "uint8")),
        lambda: arena.from_array([1]),
    ):
        with pytest.raises(CheckpointError, match="outside of a scope"):
            call()
    assert arena.stats == before
    with arena.scope():
        arena.alloc(1, "uint8")
    with arena.scratch() as tmp:
        tmp.empty(1, "uint8")


def test_strict_debugging_works_with_arenas_in_turn():
    steps = FrameArenas(2, 1024, debug=Debug(strict=True))
    with steps.advance().scope():
        steps.current.alloc(1, "uint8")


@pytest.mark.parametrize("separate", [False, True])
def test_an_arena_in_debug_mode_waits_for_no_garbage_collector(backend, separate):
    gc.collect()
    gc.disable()
    try:
        arena = Arena(4096, backend=backend, debug=Debug(separate=separate, on_live_arrays="ignore"))
        checkpoint = arena.checkpoint()
        region = arena.alloc(4, "float32", fill=0)
        part, array, child = region[1:], region.array, arena.child(512)
        frame = child.frame(x=(4, "float32"))
        arena.rollback(checkpoint)
        region = arena.alloc(4, "float32", fill=0)
        array = region.array
        with pytest.raises(ArenaError):
            frame.x
        watched = [weakref.ref(thing) for thing in (arena, region, part, child, frame)]
        del region, part, child, arena, frame
        assert [ref() for ref in watched] == [None] * len(watched)
        assert raw_bytes(array) == bytes(16)
    finally:
        gc.enable()


def test_debug_mode_changes_no_torch_result():
    plain, debug = Arena(4096, backend="torch"), Arena(8192, backend="torch", debug=True)
    results = []
    for arena in (plain, debug):
        x = arena.from_array(torch.arange(6.0).reshape(2, 3))
        y = arena.empty((2, 2), "float32")
        torch.matmul(x.array, x.array.T, out=y)
        results.append(y.tolist())
    assert results[0] == results[1]
    debug.check()


def test_the_repr_of_a_region_names_its_call_site_once():
    region = Arena(4096, debug=True).alloc(3, "float32")
    assert repr(region) == f"<region float32[3] at offset 0, allocated at {here(1)}, live>"
