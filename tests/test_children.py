# What is raised at the end of a block is tested with the block.
# ruff: noqa: PT012
from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from debug_kit import here

from gpuarena import Arena
from gpuarena.errors import (
    AlignmentError,
    ArenaClosedError,
    ArgumentError,
    ArgumentTypeError,
    CheckpointError,
    NotCopyableError,
    OutOfMemoryError,
    StaleRegionError,
)
from gpuarena.testing import FakeDevice


@pytest.fixture(params=["host", "torch"])
def arena(request):
    return Arena(4096, backend=request.param, alignment=64, name="parent")


def test_a_child_is_an_arena_over_one_region(arena):
    arena.alloc(4, "uint8")
    child = arena.child("1KiB", name="child")
    assert isinstance(child, Arena)
    assert (child.capacity, child.address, child.alignment) == (1024, arena.address + 64, 64)
    assert (child.backend, child.device) == (arena.backend, arena.device)
    assert "'child'" in repr(child)
    region = child.alloc(4, "float32", fill=2)
    assert region.address == child.address
    assert region.offset == 0
    assert region[1:].array.tolist() == [2] * 3
    assert arena.by_label() == {None: 4, "child": 1024}
    assert arena.stats.n_regions == 2
    assert child.stats.used == 16


def test_a_childs_region_is_aligned_as_the_child_is(arena):
    arena.alloc(1, "uint8", align=1)
    child = arena.child(512, alignment=512)
    assert child.address % 512 == 0
    assert child.alloc(1, "uint8").address % 512 == 0
    assert arena.child(10, alignment=1).alloc(2, "float32", align=4).address % 4 == 0


def test_the_childs_end_is_not_the_parents(arena):
    child = arena.child(100, alignment=1)
    neighbour = arena.alloc(4, "uint8", fill=3)
    with pytest.raises(OutOfMemoryError) as caught:
        child.alloc(101, "uint8")
    assert caught.value.capacity == 100
    child.alloc(100, "uint8", fill=255)
    assert neighbour.array.tolist() == [3] * 4
    assert arena.stats.n_failed == 0


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((0,), ArgumentError),
        (("nothing",), ArgumentError),
        ((1.5,), ArgumentTypeError),
        ((16, 3), AlignmentError),
        ((16, 64, 5), ArgumentTypeError),
        ((5000,), OutOfMemoryError),
    ],
)
def test_a_child_that_cannot_be_made_changes_nothing(arena, arguments, error):
    capacity, *rest = arguments
    options = dict(zip(("alignment", "name"), rest, strict=False))
    before = arena.stats
    with pytest.raises(error):
        arena.child(capacity, **options)
    assert (arena.stats.top, arena.stats.n_regions) == (before.top, 0)
    with pytest.raises(ArenaClosedError):
        arena.close()
        arena.child(16)


def nested(arena):
    child = arena.child(1024, name="child")
    return child, child.child(256, name="grandchild")


@pytest.mark.parametrize("depth", [0, 1], ids=["child", "grandchild"])
def test_a_child_dies_with_its_region_and_says_where(arena, depth):
    checkpoint = arena.checkpoint()
    child = nested(arena)[depth]
    region = child.alloc(4, "uint8")
    inner = child.checkpoint()
    arena.rollback(checkpoint)
    place = here(above=1)
    assert child.closed
    assert not region.is_live
    for call in (
        lambda: child.alloc(1, "uint8"),
        child.checkpoint,
        child.scope,
        child.scratch,
        child.reset,
        child.check,
        child.trim,
        child.pin,
        child.__enter__,
        lambda: child.rollback(inner),
        lambda: child.spill(inner),
        lambda: child.child(16),
        lambda: child.frame(x=(1, "uint8")),
        lambda: child.profile().__enter__(),
        lambda: child.record().__enter__(),
    ):
        with pytest.raises(ArenaClosedError, match=r"rollback\(\)") as caught:
            call()
        assert place in str(caught.value)
    with pytest.raises(StaleRegionError, match=r"rollback\(\)") as caught:
        region.array
    assert place in str(caught.value)
    child.close()
    assert child.stats.used == 0


@pytest.mark.parametrize(
    "end", [lambda arena: arena.reset(), lambda arena: arena.close()], ids=["reset", "close"]
)
def test_a_child_dies_with_reset_and_close(arena, end):
    child = arena.child(1024)
    grandchild = child.child(256)
    region = grandchild.alloc(4, "uint8")
    end(arena)
    assert child.closed
    assert grandchild.closed
    assert not region.is_live


def test_a_child_that_is_closed_leaves_its_region_to_the_parent(arena):
    checkpoint = arena.checkpoint()
    child = arena.child(1024)
    region = child.alloc(4, "uint8")
    with child:
        pass
    assert child.closed
    assert not region.is_live
    assert arena.stats.used == 1024
    other = arena.alloc(4, "uint8")
    arena.rollback(checkpoint)
    assert not other.is_live
    with pytest.raises(ArenaClosedError, match="is closed"):
        child.alloc(1, "uint8")


def test_a_child_keeps_the_buffer_as_its_arrays_do():
    device = FakeDevice()
    arena = Arena(4096, backend=device)
    child = arena.child(1024)
    array = child.alloc(4, "uint8", fill=7).array
    del arena
    gc.collect()
    assert child.alloc(4, "uint8", fill=8).array.tolist() == [8] * 4
    assert device.n_freed == 0
    del child
    gc.collect()
    assert (array.tolist(), device.n_freed) == ([7] * 4, 0)
    del array
    assert device.n_freed == 1


def test_a_child_lives_as_long_as_its_region_and_waits_for_no_garbage_collector(arena):
    gc.collect()
    gc.disable()
    try:
        with arena.scope():
            child = arena.child(1024)
            grandchild = child.child(100)
            grandchild.alloc(4, "uint8").array
            refs = [weakref.ref(child), weakref.ref(grandchild)]
            del child, grandchild
        assert [ref() for ref in refs] == [None, None]
        refs = [weakref.ref(arena.child(1024)), weakref.ref(arena.child(100, side="high").child(50))]
        arena.close()
        assert [ref() for ref in refs] == [None, None]
        other = Arena(4096)
        refs = [weakref.ref(other), weakref.ref(other.child(1024).child(100))]
        del other
        assert [ref() for ref in refs] == [None, None]
    finally:
        gc.enable()


def test_a_child_of_the_high_end_lives_until_that_is_rolled_back(arena):
    child = arena.child(1024, side="high")
    assert child.address == arena.address + 3072
    with arena.scope():
        arena.alloc(4, "uint8")
    assert not child.closed
    assert child.alloc(4, "uint8", side="high").offset == 960
    arena.reset()
    assert child.closed


def test_scopes_and_checkpoints_of_a_child_are_its_own(arena):
    child = arena.child(1024)
    kept = arena.alloc(4, "uint8")
    with child.scope():
        inner = child.alloc(4, "uint8")
        arena.assert_balanced()
    assert (inner.is_live, kept.is_live) == (False, True)
    with pytest.raises(CheckpointError, match="another arena"):
        arena.rollback(child.checkpoint())
    with pytest.raises(CheckpointError, match="another arena"):
        child.rollback(arena.checkpoint())


def test_a_scope_of_a_child_that_died_inside_it_ends_with_an_error_that_says_why(arena):
    checkpoint = arena.checkpoint()
    child = arena.child(1024)
    with pytest.raises(ArenaClosedError, match=r"rollback\(\)"), child.scope("inner"):
        arena.rollback(checkpoint)
    error = KeyError()
    child = arena.child(1024)
    with pytest.raises(KeyError) as caught, child.scope("inner"):
        arena.rollback(checkpoint)
        raise error
    assert caught.value is error


def test_nothing_of_a_child_is_copied(arena):
    for call in (copy.copy, copy.deepcopy):
        with pytest.raises(NotCopyableError):
            call(arena.child(64))


# -- autograd ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["torch", "host"])
def test_a_backward_through_a_grandchild_that_was_given_back_raises(backend):
    arena = Arena(4096, backend=backend)
    checkpoint = arena.checkpoint()
    family = nested(arena)
    tensor = family[1].alloc(4, "float32", fill=2).as_torch()
    loss = (torch.full((4,), 3.0, requires_grad=True) * tensor).sum()
    arena.rollback(checkpoint)
    arena.alloc(64, "float32", fill=7)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("backend", ["torch", "host"])
@pytest.mark.parametrize(
    "leave",
    [
        pytest.param(lambda child: child, id="alive"),
        pytest.param(lambda child: child.close(), id="closed"),
        pytest.param(lambda child: None, id="forgotten"),
    ],
)
def test_a_backward_through_a_child_that_was_given_back_raises(backend, leave):
    arena = Arena(4096, backend=backend)
    checkpoint = arena.checkpoint()
    child = arena.child(1024)
    tensor = child.alloc(4, "float32", fill=2).as_torch()
    loss = (torch.full((4,), 3.0, requires_grad=True) * tensor).sum()
    child = leave(child)
    arena.rollback(checkpoint)
    arena.alloc(4, "float32", fill=7)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_backward_through_what_a_child_keeps_is_right(arena):
    child = arena.child(1024)
    tensor = child.alloc(4, "float32", fill=2).as_torch()
    weight = torch.full((4,), 3.0, requires_grad=True)
    loss = (weight * tensor).sum()
    with arena.scope(), child.scope():
        arena.alloc(4, "float32", fill=7).as_torch()
        child.alloc(4, "float32", fill=7).as_torch()
    loss.backward()
    assert weight.grad.tolist() == [2] * 4
