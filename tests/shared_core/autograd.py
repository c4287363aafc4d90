"""What autograd does with memory of an arena: `tensor_of` is the tensor of a region, of whatever backend."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shared_core.case import raw_bytes


def tensor_of(region):
    return region.as_torch()


def leaf_on(tensor):
    """A leaf whose product with `tensor` saves `tensor` for the backward."""
    return torch.full(tuple(tensor.shape), 3.0, device=tensor.device, requires_grad=True)


def refused_backward():
    return pytest.raises(RuntimeError, match="modified by an inplace operation")


def test_writing_one_region_does_not_break_the_backward_of_another(case):
    arena = case.arena(4096)
    x = arena.alloc(4, "float32", fill=2)
    y = arena.alloc(4, "float32", fill=0)
    weight = leaf_on(tensor_of(x))
    loss = (weight * tensor_of(x)).sum()
    tensor_of(y).add_(1)
    y[...] = 5
    y[1:3] = 6
    loss.backward()
    assert weight.grad.tolist() == [2.0] * 4


def test_writing_a_region_breaks_the_backward_that_saved_it(case):
    arena = case.arena(4096)
    x = arena.alloc(4, "float32", fill=2)
    loss = (leaf_on(tensor_of(x)) * tensor_of(x)).sum()
    tensor_of(x).add_(1)
    with refused_backward():
        loss.backward()


@pytest.mark.parametrize(
    "part", [lambda region: region, lambda region: region[1:], lambda region: region.view("int32")]
)
def test_assigning_to_a_region_breaks_the_backward_that_saved_it(case, part):
    # also where another library than torch does the writing
    region = case.arena(4096).alloc(4, "float32", fill=2)
    other = region.arena.alloc(4, "float32", fill=1)
    losses = [(leaf_on(tensor_of(each)) * tensor_of(each)).sum() for each in (region, region[2:], other)]
    part(region)[...] = 7
    for loss in losses[:2]:
        with refused_backward():
            loss.backward()
    losses[2].backward()


@pytest.mark.parametrize("forget", [False, True], ids=["kept", "deleted"])
@pytest.mark.parametrize(
    "part",
    [
        lambda region: tensor_of(region),
        lambda region: tensor_of(region[1:3]),
        lambda region: tensor_of(region[::2]),
        lambda region: tensor_of(region.reshape(2, 4)[1]),
        lambda region: tensor_of(region.view("int32")[2:].view("float32")),
        lambda region: tensor_of(region)[2:],
        lambda region: tensor_of(region).view(2, 4),
    ],
    ids=["region", "slice", "strided", "reshaped", "viewed", "torch slice", "torch view"],
)
def test_a_backward_through_memory_that_was_rolled_back_raises(case, part, forget):
    arena = case.arena(4096)
    checkpoint = arena.checkpoint()
    region = arena.alloc(8, "float32", fill=2)
    saved = part(region)
    loss = (leaf_on(saved) * saved).sum()
    if forget:  # autograd alone still knows the tensor
        del saved, region
    arena.rollback(checkpoint)
    arena.alloc(8, "float32", fill=7)
    with refused_backward():
        loss.backward()


@pytest.mark.parametrize("how", ["scope", "reset", "rollback"])
def test_every_way_to_give_memory_back_is_noticed(case, how):
    arena = case.arena(4096)
    checkpoint = arena.checkpoint()
    scope = arena.scope().__enter__()
    saved = tensor_of(arena.alloc(4, "float32", fill=2))
    loss = (leaf_on(saved) * saved).sum()
    {"scope": lambda: scope.__exit__(None, None, None), "reset": arena.reset}.get(
        how, lambda: arena.rollback(checkpoint)
    )()
    with refused_backward():
        loss.backward()


def test_a_backward_through_what_a_rollback_kept_is_right(case):
    arena = case.arena(4096)
    x = arena.alloc(4, "float32", fill=2)
    weight = leaf_on(tensor_of(x))
    loss = (weight * tensor_of(x)).sum()
    with arena.scope():
        arena.alloc(4, "float32", fill=9).array
        assert tensor_of(x[1:]).sum() == 6
    loss.backward()
    assert weight.grad.tolist() == [2.0] * 4


def test_closing_the_arena_does_not_break_a_backward_since_the_memory_stays(case):
    arena = case.arena(4096)
    x = arena.alloc(4, "float32", fill=2)
    weight = leaf_on(tensor_of(x))
    loss = (weight * tensor_of(x)).sum()
    del x
    arena.close()
    del arena
    loss.backward()
    assert weight.grad.tolist() == [2.0] * 4


def test_an_array_that_requires_grad_collects_one_and_the_next_owner_does_not_inherit_it(case):
    arena = case.arena(4096)
    with arena.scope():
        x = tensor_of(arena.alloc(4, "float32", fill=2)).requires_grad_()
        (x * x).sum().backward()
        assert x.grad.tolist() == [4.0] * 4
    y = tensor_of(arena.alloc(4, "float32", fill=1))
    assert y.data_ptr() == x.data_ptr()
    assert not y.requires_grad
    assert y.grad is None


def test_writes_take_no_part_in_a_graph(case):
    arena = case.arena(4096)
    x = arena.alloc(4, "float32", fill=0)
    x[...] = torch.ones(4, requires_grad=True) * 2
    assert not tensor_of(x).requires_grad
    assert tensor_of(x).grad_fn is None
    assert raw_bytes(x.array) == np.full(4, 2, np.float32).tobytes()


def test_results_land_in_the_arena_by_out(case):
    arena = case.arena(4096)
    x = arena.alloc((2, 2), "float32", fill=2)
    out = arena.alloc((2, 2), "float32", fill=0)
    torch.matmul(tensor_of(x), tensor_of(x), out=tensor_of(out))
    assert raw_bytes(out.array) == np.full((2, 2), 8, np.float32).tobytes()


@pytest.mark.parametrize("made_inside", [True, False], ids=["arena made inside", "arena made outside"])
@pytest.mark.parametrize("seen_inside", [True, False], ids=["array made inside", "array made outside"])
def test_memory_made_in_inference_mode_is_ordinary_outside(case, made_inside, seen_inside):
    with torch.inference_mode(made_inside):
        arena = case.arena(4096)
        x = arena.alloc(4, "float32", fill=2)
        checkpoint = arena.checkpoint()
    with torch.inference_mode(seen_inside):
        tensor, part = tensor_of(x), tensor_of(x[1:])
        other = tensor_of(arena.alloc(4, "float32", fill=1).view("int32"))
        x[...] = 2
        tensor.add_(1)
    for each in (tensor, part, other):
        assert not each.is_inference()
    tensor.sub_(1)
    part.add_(1).sub_(1)
    other.add_(1)
    weight = leaf_on(tensor)
    loss = (weight * tensor).sum()
    with torch.inference_mode():
        arena.rollback(checkpoint)
    loss.backward()
    assert weight.grad.tolist() == [2.0] * 4
    loss = (leaf_on(tensor) * tensor).sum()
    with torch.inference_mode():
        arena.reset()
    with refused_backward():
        loss.backward()


def test_a_tensor_that_autograd_writes_into_is_noticed_through_its_views(case):
    arena = case.arena(4096)
    x = arena.alloc((2, 4), "float32", fill=2)
    saved = tensor_of(x[0])
    loss = (leaf_on(saved) * saved).sum()
    tensor_of(x[0, 1:]).mul_(2)  # another view of the same elements
    with refused_backward():
        loss.backward()


__all__ = [name for name in globals() if name.startswith("test_")]
