from __future__ import annotations

import dataclasses
import sys
import timeit

import numpy as np
import pytest

from gpuarena import Arena, Checkpoint
from gpuarena.backends.host import HostBackend
from gpuarena.errors import (
    AlignmentError,
    ArgumentError,
    ArgumentTypeError,
    CheckpointError,
    DTypeError,
    OutOfMemoryError,
    ShapeError,
)
from gpuarena.testing import FakeDevice


@pytest.fixture
def arena():
    return Arena(1024, alignment=64, name="scratch")


# -- construction -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capacity", "nbytes"),
    [
        (1000, 1000),
        ("1000", 1000),
        ("1kB", 1000),
        ("1 KiB", 1024),
        ("0.5MiB", 2**19),
        (np.int64(64), 64),
        ("7B", 7),
    ],
)
def test_a_capacity_is_bytes_or_a_text(capacity, nbytes):
    assert Arena(capacity).capacity == nbytes


@pytest.mark.parametrize("capacity", [0, -1, "0", "-5", "", "GiB", "1.5B", "1 PiB", "one", "0x10", "1e3"])
def test_a_capacity_that_can_never_be_right_is_a_value_error(capacity):  # F6
    device = FakeDevice()
    with pytest.raises(ArgumentError, match="capacity"):
        Arena(capacity, backend=device)
    assert device.n_allocated == 0


@pytest.mark.parametrize("capacity", [None, 1.0, True, b"1", [1], 2 + 0j])
def test_a_capacity_of_the_wrong_type_is_a_type_error(capacity):  # F6
    device = FakeDevice()
    with pytest.raises(ArgumentTypeError, match="capacity"):
        Arena(capacity, backend=device)
    assert device.n_allocated == 0


@pytest.mark.parametrize("alignment", [0, -1, 3, 48, True, 16.0, "16", None])
def test_a_default_alignment_is_a_power_of_two(alignment):  # F6, P7
    device = FakeDevice()
    with pytest.raises((AlignmentError, ArgumentTypeError), match="alignment"):
        Arena(64, backend=device, alignment=alignment)
    with pytest.raises((AlignmentError, ArgumentTypeError)):
        Arena.from_buffer(bytearray(64), alignment=alignment)
    assert device.n_allocated == 0


@pytest.mark.parametrize("name", [5, b"x", object()])
def test_names_and_labels_are_texts(arena, name):
    device = FakeDevice()
    with pytest.raises(ArgumentTypeError, match="name"):
        Arena(64, backend=device, name=name)
    assert device.n_allocated == 0
    with pytest.raises(ArgumentTypeError, match="label"):
        arena.alloc(1, "uint8", label=name)
    with pytest.raises(ArgumentTypeError, match="label"):
        arena.scope(name)
    assert arena.stats == Arena(1024).stats


def test_a_backend_is_a_name_or_a_factory():
    assert Arena(64, backend=HostBackend.allocate).backend == "host"
    for backend in (None, 5, ["host"]):
        with pytest.raises(ArgumentTypeError, match="backend"):
            Arena(64, backend=backend)


def test_a_backend_that_is_short_of_memory_raises_and_keeps_nothing():  # F6
    device = FakeDevice(limit=10_000)
    first = Arena(4096, backend=device)
    with pytest.raises(OutOfMemoryError) as caught:
        Arena(4096, backend=device)
    assert caught.value.requested == 4096
    assert (device.n_allocated, device.n_freed) == (1, 0)
    first.close()
    assert (device.n_released, device.n_freed, device.nbytes) == (1, 1, 0)
    assert Arena(4096, backend=device).capacity == 4096


def test_an_arena_describes_itself(arena):
    assert repr(arena) == "<Arena 'scratch' on host/cpu: 0 of 1024 bytes, 0 regions>"
    arena.alloc(10, "uint8")
    assert "10 of 1024 bytes, 1 regions" in repr(arena)
    assert (arena.backend, arena.device, arena.alignment, arena.name) == ("host", "cpu", 64, "scratch")


# -- allocation -------------------------------------------------------------------------------------------------


def test_the_figures_of_an_allocation_that_does_not_fit_are_in_the_message_and_on_the_error(arena):  # F2
    arena.alloc(100, "uint8")
    with pytest.raises(OutOfMemoryError) as caught:
        arena.alloc((250,), "float32", align=128, label="logits")
    error = caught.value
    assert isinstance(error, MemoryError)
    figures = (
        error.requested,
        error.aligned_offset,
        error.available,
        error.capacity,
        error.missing,
        error.label,
    )
    offset = 100 + -(arena.address + 100) % 128
    assert figures == (1000, offset, 924, 1024, offset + 1000 - 1024, "logits")
    for part in (
        "1 000 bytes",
        "924 bytes",
        "1 024 bytes (1.00 KiB)",
        f"{error.missing} bytes",
        f"({offset - 100} bytes)",
    ):
        assert part in str(error)
    assert "'logits'" in str(error)
    assert arena.stats.n_failed == 1


class Fill:
    """Contents that run code when they are read."""

    def __init__(self, action):
        self.action = action

    def __array__(self, dtype=None, copy=None):
        return self.action()


def test_initial_contents_that_raise_take_their_allocation_back(arena):  # F4
    arena.alloc(3, "uint8")
    before = arena.stats

    def fail():
        raise ZeroDivisionError("mine")

    for call in (
        lambda: arena.alloc(4, "float32", fill=Fill(fail)),
        lambda: arena.full(4, Fill(fail), "float32"),
        lambda: arena.alloc(4, "float32", fill=np.zeros(5)),
        lambda: arena.from_array(Fill(fail)),
    ):
        with pytest.raises((ZeroDivisionError, ShapeError)):
            call()
        assert arena.stats == before
    assert arena.alloc(4, "float32").offset == 64


@pytest.mark.parametrize(
    ("action", "n_regions", "top"),
    [
        (lambda arena: arena.alloc(4, "uint8"), 2, 68),
        (lambda arena: arena.alloc(0, "uint8"), 2, 3),
        (lambda arena: arena.reset(), 0, 0),
        (lambda arena: arena.close(), 0, 0),
    ],
    ids=["alloc", "alloc nothing", "reset", "close"],
)
@pytest.mark.parametrize("fails", [False, True], ids=["succeeds", "fails"])
def test_contents_that_move_the_arena_while_they_are_read_are_refused(
    arena, action, n_regions, top, fails
):  # F4, P1
    arena.alloc(3, "uint8")

    def act():
        action(arena)
        if fails:
            raise ZeroDivisionError
        return np.zeros(4)

    with pytest.raises((ArgumentError, ZeroDivisionError)):
        arena.alloc(4, "float32", fill=Fill(act))
    assert (arena.stats.n_regions, arena.stats.top) == (n_regions, top)


def test_contents_may_use_the_arena_for_scratch_while_they_are_read(arena):
    def read():
        with arena.scope():
            return arena.alloc(4, "float32", fill=7).array + 1

    region = arena.alloc(4, "float32", fill=Fill(read))
    assert region.array.tolist() == [8] * 4
    assert (region.offset, arena.stats.n_regions) == (0, 1)


def test_native_arrays_are_placed_like_regions_and_go_with_them(arena):
    checkpoint = arena.checkpoint()
    array = arena.empty((2, 3), "float32", label="x")
    assert array.ctypes.data == arena.address
    zeros = arena.zeros(4, "uint8", align=1)
    assert zeros.ctypes.data == arena.address + 24
    assert arena.by_label() == {"x": 24, None: 4}
    assert arena.stats.n_regions == 2
    arena.rollback(checkpoint)
    assert arena.stats.used == 0
    assert arena.alloc(4, "uint8").offset == 0


def test_an_array_that_the_library_cannot_make_takes_nothing():
    class Failing(HostBackend):
        def root(self, offset, shape, dtype):
            raise ZeroDivisionError

    arena = Arena(64, backend=Failing.allocate)
    for call in (
        lambda: arena.empty(4, "uint8"),
        lambda: arena.alloc(4, "uint8", fill=1),
        lambda: arena.from_array([1]),
    ):
        with pytest.raises(ZeroDivisionError):
            call()
    assert arena.stats == Arena(64).stats


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        # each line is wrong in what the lines above it are, and in one thing less
        ({"shape": (-1, 2.0), "dtype": "float31", "align": 3, "label": 5}, ArgumentTypeError),
        ({"shape": (0, -1, 2**63), "dtype": "float31", "align": 3, "label": 5}, ShapeError),
        ({"shape": (2**63, 2), "dtype": "float31", "align": 3, "label": 5}, DTypeError),
        ({"shape": (2**63, 2), "dtype": "float32", "align": 3, "label": 5}, AlignmentError),
        ({"shape": (2**63, 2), "dtype": "float32", "align": 2, "label": 5}, AlignmentError),
        ({"shape": (2**63, 2), "dtype": "float32", "align": 4, "label": 5}, ArgumentTypeError),
        ({"shape": (2**63, 2), "dtype": "float32", "align": 4, "label": "x"}, ShapeError),
        ({"shape": (2**60, 2), "dtype": "float32", "align": 4, "label": "x", "fill": "bad"}, ShapeError),
        (
            {"shape": (2**40, 2), "dtype": "float32", "align": 4, "label": "x", "fill": "bad"},
            OutOfMemoryError,
        ),
        ({"shape": (2, 2), "dtype": "float32", "align": 4, "label": "x", "fill": "bad"}, ValueError),
    ],
)
def test_the_first_check_that_fails_decides_the_error(arena, arguments, error):  # F5
    with pytest.raises(error) as caught:
        arena.alloc(**arguments)
    assert caught.type is error
    assert arena.stats.used == 0


def test_an_alignment_below_the_types_own_is_refused(arena):  # P7
    for align in (1, 2):
        with pytest.raises(AlignmentError, match="needs 4"):
            arena.alloc(1, "float32", align=align)
    assert arena.alloc(1, "float32", align=4).offset == 0
    assert Arena(1024, alignment=1).alloc(1, "complex128").address % 16 == 0


def test_a_rollback_costs_nothing_for_the_regions_that_stay():
    pytest.importorskip("torch")

    def seconds_a_rollback(arena):
        def once():
            with arena.scope():
                arena.alloc(1, "uint8")

        return min(timeit.repeat(once, number=20, repeat=15))

    few, many = Arena(1 << 16, alignment=1), Arena(1 << 16, alignment=1)
    for _ in range(5000):
        many.alloc(1, "uint8").as_torch()
    assert seconds_a_rollback(many) < 5 * seconds_a_rollback(
        few
    )  # a look at each would take 100 times as long


# -- checkpoints and scopes -------------------------------------------------------------------------------------


def test_a_checkpoint_describes_itself_and_needs_no_arena(arena):
    arena.alloc(10, "uint8")
    checkpoint = arena.checkpoint()
    assert isinstance(checkpoint, Checkpoint)
    assert checkpoint.top == 10
    assert repr(checkpoint) == "Checkpoint(top=10, n_regions=1)"


def messages_of(arena, checkpoint):
    found = []
    for call in (arena.rollback, arena.keep):
        with pytest.raises(CheckpointError) as caught:
            call(checkpoint)
        found.append(str(caught.value))
    return found[0]


def test_each_misuse_of_a_checkpoint_has_a_message_of_its_own(arena):  # R8, R9
    outer = arena.checkpoint()
    arena.alloc(1, "uint8")
    inner = arena.checkpoint()
    arena.rollback(outer)
    messages = [messages_of(arena, inner)]
    kept = arena.checkpoint()
    arena.keep(kept)
    messages.append(messages_of(arena, kept))
    messages.append(messages_of(arena, Arena(64).checkpoint()))
    arena.reset()
    messages.append(messages_of(arena, outer))
    for message, words in zip(
        messages, ("out of order", "keep()", "another arena", "before reset()"), strict=True
    ):
        assert words in message
    assert __file__ in messages[0]
    assert __file__ in messages[1]
    arena.close()
    with pytest.raises(RuntimeError, match="closed"):
        arena.rollback(outer)


def test_a_checkpoint_of_a_dead_arena_is_foreign_to_the_next(arena):
    checkpoint = Arena(1024, alignment=64).checkpoint()
    for _ in range(5):  # whose objects may lie where those of the first did
        with pytest.raises(CheckpointError, match="another arena"):
            Arena(1024, alignment=64).rollback(checkpoint)


@pytest.mark.parametrize("thing", [None, 0, "checkpoint", object()])
def test_only_checkpoints_are_rolled_back(arena, thing):
    with pytest.raises(ArgumentTypeError):
        arena.rollback(thing)
    with pytest.raises(ArgumentTypeError):
        arena.keep(thing)


def test_a_million_checkpoints_cost_no_memory_that_stays(arena):  # R7, R12
    arena.alloc(1, "uint8")
    before = arena.stats
    sizes = None
    for count in range(20_000):  # any growth would show at a fiftieth of a million
        arena.rollback(arena.checkpoint())
        if count == 100:
            sizes = {name: sys.getsizeof(value) for name, value in vars(arena).items()}
    assert {name: sys.getsizeof(value) for name, value in vars(arena).items()} == sizes
    assert arena.stats == before


def test_scopes_out_of_order_name_what_is_open(arena):  # C3
    outer, inner = arena.scope("outer").__enter__(), arena.scope("inner").__enter__()
    with pytest.raises(CheckpointError, match=r"'outer'.*'inner'.*still open"):
        outer.__exit__(None, None, None)
    with pytest.raises(CheckpointError, match=r"'inner'.*a scope around it"):
        inner.__exit__(None, None, None)
    arena.assert_balanced()
    with pytest.raises(CheckpointError, match="entered before"):
        inner.__enter__()


def test_open_scopes_are_listed(arena):  # C6
    arena.assert_balanced()
    with arena.scope("prefill"), arena.scope():
        with pytest.raises(CheckpointError, match=r"2 open: scope 'prefill', an unnamed scope") as caught:
            arena.assert_balanced()
        assert [scope.label for scope in caught.value.scopes] == ["prefill", None]
    arena.assert_balanced()


def test_a_scope_of_a_closed_arena_cannot_be_entered(arena):
    scope = arena.scope()
    arena.close()
    with pytest.raises(RuntimeError, match="closed"):
        scope.__enter__()
    arena.assert_balanced()


def test_stats_are_frozen_and_of_their_moment(arena):  # T3
    before = arena.stats
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.used = 5
    arena.alloc(10, "uint8")
    assert before.used == 0
    assert arena.stats == arena.stats != before
    assert not hasattr(before, "__dict__")


def test_labels_add_up_and_come_back(arena):  # T2
    arena.alloc(10, "uint8", label="weights")
    arena.alloc(20, "uint8")
    with arena.scope():
        arena.alloc(3, "uint8", label="weights")
        arena.alloc(0, "uint8", label="none")
        assert arena.by_label() == {"weights": 13, None: 20, "none": 0}
        assert sum(arena.by_label().values()) == arena.stats.used
    assert arena.by_label() == {"weights": 10, None: 20}


def test_an_arena_is_a_context_manager_that_closes_it():
    device = FakeDevice()
    with Arena(64, backend=device) as arena:
        arena.alloc(4, "uint8", fill=0)
    assert arena.closed
    assert device.n_released == 1
    error = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError) as caught, Arena(64, backend=device):
        raise error
    assert caught.value is error


def test_a_scope_whose_start_was_rolled_back_and_built_over_is_refused(arena):
    start = arena.checkpoint()
    arena.alloc(4, "uint8")
    scope = arena.scope("late").__enter__()
    arena.rollback(start)
    region = arena.alloc(4, "uint8", fill=3)  # in the slot that the scope's start remembers
    with pytest.raises(CheckpointError, match="out of order"):
        scope.__exit__(None, None, None)
    assert region.is_live
    arena.assert_balanced()


def test_each_reset_kills_the_checkpoints_of_its_own_time(arena):
    arena.reset()
    between = arena.checkpoint()
    arena.reset()
    with pytest.raises(CheckpointError, match="before reset"):
        arena.rollback(between)


def test_a_rollback_leaves_the_tensors_of_the_regions_below_it_alone():
    torch = pytest.importorskip("torch")
    arena = Arena(1024)
    region = arena.alloc(4, "float32", fill=2)
    tensor = region.as_torch()
    weight = torch.ones(4, requires_grad=True)
    loss = (tensor * weight).sum()
    with arena.scope():
        arena.alloc(4, "float32").as_torch()
    loss.backward()
    assert weight.grad.tolist() == [2.0] * 4
    assert region.as_torch() is tensor
