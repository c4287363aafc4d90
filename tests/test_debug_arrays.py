# What is raised at the end of a block is tested with the block.
# ruff: noqa: PT012
from __future__ import annotations

import pathlib
import warnings

import numpy as np
import pytest
import torch
from debug_kit import here

from gpuarena import Arena, Debug
from gpuarena.errors import LiveArraysError, LiveArraysWarning
from gpuarena.testing import FakeDevice

# Who is noticed as still having an array of a region that goes.

RAISE = Debug(on_live_arrays="raise")


@pytest.fixture(params=["host", "torch"])
def arena(request):
    return Arena(4096, backend=request.param, debug=RAISE)


def count_alive(arena, make):
    """Roll a region back while what `make` makes of it is kept; return whether that was noticed."""
    checkpoint = arena.checkpoint()
    kept = make(arena.alloc(4, "float32", fill=2, label="q"))
    before = arena.stats
    try:
        arena.rollback(checkpoint)
    except LiveArraysError as error:
        labels, after = error.labels, arena.stats
    else:
        return False
    assert (labels, after) == (["q"], before)
    del kept
    arena.rollback(checkpoint)
    return True


SEEN_BY_ALL = {
    "array": lambda r: r.array,
    "slice": lambda r: r[1:].array,
    "reshape": lambda r: r.reshape(2, 2).array,
    "strided": lambda r: r[::2].array,
    "of the array": lambda r: r.array[1:],
    "of that": lambda r: r.array[1:][1:].reshape(-1),
    "transposed": lambda r: r.array.reshape(2, 2).T,
    "as_torch": lambda r: r.as_torch(),
    "slice as_torch": lambda r: r[1:].as_torch(),
    "as_numpy": lambda r: r.as_numpy(),
    "slice as_numpy": lambda r: r[1:3].as_numpy()[1:],
    "numpy.from_dlpack": lambda r: np.from_dlpack(r),
    "torch.from_dlpack": lambda r: torch.from_dlpack(r),
    "in a list": lambda r: [r.array],
}


@pytest.mark.parametrize("make", SEEN_BY_ALL.values(), ids=SEEN_BY_ALL)
def test_an_array_that_is_kept_counts(arena, make):
    assert count_alive(arena, make)


@pytest.mark.parametrize("backend", ["host", "torch"])
def test_an_array_of_another_dtype_counts(backend):
    assert count_alive(Arena(4096, backend=backend, debug=RAISE), lambda region: region.view("int32").array)


@pytest.mark.parametrize(
    "make",
    [
        lambda r: r,
        lambda r: [r, r[1:], r.view("int32")],
        lambda r: (r.array, r)[1],
        lambda r: r.array.sum(),
        lambda r: r.array + 1,
        lambda r: r.array.tolist(),
        lambda r: r.address,
        lambda r: None,
    ],
    ids=["handle", "handles", "handle whose array was used", "sum", "result", "list", "address", "nothing"],
)
def test_what_is_no_array_of_the_region_does_not_count(arena, make):
    assert not count_alive(arena, make)


OF_NUMPY = {
    "memoryview": lambda a: memoryview(a)[1:],
    "frombuffer": lambda a: np.frombuffer(a, np.uint8),
    "torch.from_numpy": torch.from_numpy,
    "as_strided": lambda a: np.lib.stride_tricks.as_strided(a, (2,), (8,)),
    "iterator": lambda a: a.flat,
    "subclass": lambda a: a.view(np.recarray),
    "other dtype": lambda a: a.view(np.int8),
    "ndarray over it": lambda a: np.ndarray(2, np.float32, a),
}


@pytest.mark.parametrize("make", OF_NUMPY.values(), ids=OF_NUMPY)
def test_whatever_shares_a_numpy_array_counts(make):
    assert count_alive(Arena(4096, debug=RAISE), lambda region: make(region.array))


OF_TORCH = {
    "chunk": lambda t: t.chunk(2)[1],
    "expand": lambda t: t.expand(2, 4),
    "slice without grad": torch.no_grad()(lambda t: t[1:]),
    "slice in inference mode": torch.inference_mode()(lambda t: t[1:]),
    "saved by autograd": lambda t: (torch.full((4,), 3.0, requires_grad=True) * t).sum(),
    "saved slice": lambda t: (torch.full((3,), 3.0, requires_grad=True) * t[1:]).sum(),
    "requires grad": lambda t: t.requires_grad_(),
    "attribute": lambda t: torch.nn.Module().register_buffer("t", t) or t,
}
OF_TORCH_STORAGE = {
    "numpy": lambda t: t.numpy(),
    "memoryview": lambda t: memoryview(t.numpy()),
    "detach": lambda t: t.detach(),
    "detached slice": lambda t: t[1:].detach(),
    "data": lambda t: t.data,
    "Parameter": torch.nn.Parameter,
    "other dtype": lambda t: t.view(torch.int32),
    "storage": lambda t: t.untyped_storage(),
}


@pytest.mark.parametrize(
    "make",
    [pytest.param(make, id=name) for name, make in OF_TORCH.items()]
    + [pytest.param(make, id=name) for name, make in OF_TORCH_STORAGE.items()],
)
def test_whatever_shares_a_torch_tensor_counts(make):
    assert count_alive(Arena(4096, backend="torch", debug=RAISE), lambda region: make(region.array))


@pytest.mark.parametrize(
    "consume", [np.asarray, lambda region: np.asarray(region[1:])], ids=["region", "slice"]
)
def test_an_array_made_by_the_array_interface_counts(arena, consume):
    assert count_alive(arena, consume)


@pytest.mark.parametrize("debug", [False, pytest.param(True, id="debug")])
@pytest.mark.parametrize(
    "consume", [np.asarray, lambda region: np.asarray(region[1:])], ids=["region", "slice"]
)
def test_an_array_made_by_the_array_interface_outlives_the_arena(debug, consume):
    device = FakeDevice()
    arena = Arena(4096, backend=device, debug=debug)
    array = consume(arena.alloc(4, "uint8", fill=7))
    arena.close()
    del arena
    assert (set(array.tolist()), device.n_freed) == ({7}, 0)
    del array
    assert device.n_freed == 1


def test_arrays_made_before_a_region_grew_count(arena):
    def make(region):
        array = region.array
        region.extend(8)
        return array

    assert count_alive(arena, make)


def test_arrays_kept_while_their_region_was_spilled_count_again():
    arena = Arena(4096, debug=True)
    checkpoint = arena.checkpoint()
    kept = arena.alloc(4, "float32", fill=2, label="q").array
    with pytest.warns(LiveArraysWarning, match=r"'q'.*spill\(\)"):
        spilled = arena.spill(checkpoint)
    spilled.restore()
    assert kept.tolist() == [2] * 4
    with pytest.warns(LiveArraysWarning, match=r"'q'.*rollback\(\)"):
        arena.rollback(checkpoint)


def test_a_frame_does_not_count_and_what_is_taken_out_of_it_does(arena):
    checkpoint = arena.checkpoint()
    frame = arena.frame(q=(4, "float32"), k=(4, "float32"))
    frame.q[...] = 1
    arena.rollback(checkpoint)
    assert not frame.is_live
    frame = arena.frame(q=(4, "float32"))
    q = frame.q
    with pytest.raises(LiveArraysError, match="'q'"):
        arena.rollback(checkpoint)
    assert frame.is_live
    assert frame.q is q
    del q
    arena.rollback(checkpoint)


def test_a_frame_in_a_child_does_not_count(arena):
    checkpoint = arena.checkpoint()
    child = arena.child(1024)
    frame = child.frame(q=(4, "float32"))
    arena.rollback(checkpoint)
    assert not frame.is_live


def test_arrays_of_a_child_count_where_the_parent_gives_the_memory_back(arena):
    checkpoint = arena.checkpoint()
    child = arena.child(2048)
    grandchild = child.child(512)
    array = grandchild.alloc(4, "float32", fill=2, label="deep").array
    with pytest.raises(LiveArraysError, match="'deep'"):
        arena.rollback(checkpoint)
    assert not grandchild.closed
    del array
    arena.rollback(checkpoint)
    assert grandchild.closed


def test_a_closed_childs_arrays_are_not_the_parents_business(arena):
    with arena.scope():
        child = arena.child(1024)
        child.alloc(4, "float32", fill=2)
        child.close()


# -- what is done about it --------------------------------------------------------------------------------------


def test_a_refused_rollback_has_changed_nothing(arena):
    checkpoint = arena.checkpoint()
    region = arena.alloc(4, "float32", fill=2, label="q")
    array = region.array
    before = arena.stats
    with pytest.raises(LiveArraysError, match=r"^1 native array \('q'\) is still.*; delete it,") as caught:
        arena.rollback(checkpoint)
    assert here().rsplit(":", 1)[0] in str(caught.value)
    assert arena.stats == before
    assert region.is_live
    assert array.tolist() == [2] * 4
    with pytest.raises(LiveArraysError):
        arena.reset()
    del array
    arena.rollback(checkpoint)


def test_the_end_of_a_scope_raises_after_it_has_rolled_back(arena):
    kept = []
    with pytest.raises(LiveArraysError, match="the end of scope 'step'"), arena.scope("step"):
        kept.append(arena.alloc(4, "float32", fill=2).array)
    arena.assert_balanced()
    assert arena.stats.used == 0
    assert arena.alloc(4, "float32").offset == 0


def test_an_exception_on_its_way_is_told_of_live_arrays_in_a_note(arena):
    error, kept = KeyError(), []
    with pytest.raises(KeyError) as caught, arena.scope():
        kept.append(arena.alloc(4, "float32", fill=2, label="q").array)
        raise error
    assert caught.value is error
    assert "('q')" in error.__notes__[0]
    assert arena.stats.used == 0


def test_a_warning_is_given_after_the_rollback():
    arena = Arena(4096, debug=True)
    checkpoint = arena.checkpoint()
    arrays = [arena.alloc(4, "float32", fill=2, label=label).array for label in ("b", "a")]
    with pytest.warns(
        LiveArraysWarning, match=r"^2 native arrays \('a', 'b'\) are still.*they will"
    ) as caught:
        arena.rollback(checkpoint)
    assert len(caught) == 1
    assert np.isnan(arrays[0]).all()
    assert arena.stats.used == 0


def end_scope(arena):
    with arena.scope():
        return arena.empty(4, "float32")


def end_scratch(arena):
    with arena.scratch() as tmp:
        return tmp.empty(4, "float32")


def roll_back(arena):
    checkpoint = arena.checkpoint()
    array = arena.empty(4, "float32")
    arena.rollback(checkpoint)
    return array


def reset(arena):
    array = arena.empty(4, "float32")
    arena.reset()
    return array


def spill(arena):
    checkpoint = arena.checkpoint()
    array = arena.empty(4, "float32")
    arena.spill(checkpoint)
    return array


@pytest.mark.parametrize(
    "way",
    [
        roll_back,
        end_scope,
        end_scratch,
        reset,
        spill,
    ],
)
def test_a_warning_is_given_for_the_line_of_the_caller(way):
    arena = Arena(4096, debug=True)
    with pytest.warns(LiveArraysWarning) as caught:
        way(arena)
    assert caught[0].filename == __file__
    lines = pathlib.Path(__file__).read_text(encoding="utf-8").splitlines()
    assert "arena." in lines[caught[0].lineno - 1]


def test_ignoring_says_nothing():
    arena = Arena(4096, debug=Debug(on_live_arrays="ignore"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for way in (end_scope, roll_back, reset, spill):
            way(arena)


# -- autograd ---------------------------------------------------------------------------------------------------


BETWEEN = {
    "nothing": lambda arena, checkpoint, region: None,
    "extend": lambda arena, checkpoint, region: region.extend(8),
    "spill": lambda arena, checkpoint, region: arena.spill(checkpoint).restore(),
}


@pytest.mark.parametrize("backend", ["torch", "host"])
@pytest.mark.parametrize(
    ("between", "debug"),
    [
        pytest.param(between, debug, id=f"{name}-{debug}")
        for name, between in BETWEEN.items()
        for debug in (False, True)
    ],
)
def test_a_backward_through_memory_that_was_given_back_raises(backend, debug, between):
    arena = Arena(4096, backend=backend, debug=Debug(on_live_arrays="ignore") if debug else False)
    checkpoint = arena.checkpoint()
    region = arena.alloc(4, "float32", fill=2)
    tensor = region.as_torch()
    between(arena, checkpoint, region)
    loss = (torch.full((4,), 3.0, requires_grad=True) * tensor).sum()
    arena.rollback(checkpoint)
    arena.alloc(4, "float32", fill=7)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_many_arrays_are_named_up_to_five():
    arena = Arena(4096, debug=True)
    start = arena.checkpoint()
    kept = [arena.empty(8, "uint8", label=f"x{number}") for number in range(7)]
    with pytest.warns(
        LiveArraysWarning, match=r"^7 native arrays \('x0', .*'x4', \.\.\.\) are still referenced"
    ):
        arena.rollback(start)
    assert len(kept) == 7
