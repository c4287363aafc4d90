from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuarena import Arena, Debug
from gpuarena.errors import CheckpointError, OutOfMemoryError
from gpuarena.testing import FakeDevice

# A buffer of its own for every region, for memory checkers.

SEPARATE = Debug(separate=True, on_live_arrays="ignore")
PAGE = 4095  # what a FakeDevice allocates beyond a buffer's bytes


class Sizes:
    """A factory that notes the size of every buffer."""

    def __init__(self, limit=None):
        self.device = FakeDevice(limit)
        self.sizes = []

    def __call__(self, nbytes, *, device, alignment):
        made = self.device(nbytes, device=device, alignment=alignment)
        self.sizes.append(nbytes)
        return made


@pytest.fixture
def factory():
    return Sizes()


@pytest.fixture
def arena(factory):
    return Arena(1 << 16, backend=factory, debug=SEPARATE)


def n_buffers(factory):
    gc.collect()
    return factory.device.n_allocated - factory.device.n_freed


def test_every_region_has_a_buffer_of_exactly_its_size(arena, factory):
    start = len(factory.sizes)
    arena.alloc(5, "uint8")
    arena.empty((3, 7), "float32")
    arena.alloc(1, "int64", side="high", fill=2)
    assert factory.sizes[start:] == [5, 84, 8]


def test_the_whole_capacity_is_never_allocated(factory):
    Arena("1TiB", backend=factory, debug=SEPARATE)
    assert max(factory.sizes, default=0) <= 1


def test_empty_regions_have_no_buffer(arena, factory):
    start = len(factory.sizes)
    region = arena.alloc((3, 0), "float32", fill=1)
    assert region.array.shape == (3, 0)
    assert region[:, 0:0].array.shape == (3, 0)
    assert len(factory.sizes) == start


def test_offsets_and_figures_are_those_of_one_buffer(factory):
    # more than the default alignment would depend on where the buffer happens to lie
    plain = Arena(1 << 16, alignment=1024)
    separate = Arena(1 << 16, alignment=1024, backend=factory, debug=SEPARATE)
    for arena in (plain, separate):
        arena.alloc(5, "uint8", label="a")
        arena.alloc((3, 7), "float32")
        arena.alloc(4, "uint8", side="high")
        with arena.scope():
            arena.alloc(1000, "uint8", align=1024)
        arena.alloc(9, "uint8")
    assert plain.stats == separate.stats
    assert plain.by_label() == separate.by_label()


def test_buffers_are_freed_when_their_regions_go_and_nobody_has_an_array(arena, factory):
    arena.alloc(5, "uint8", fill=1)
    before = n_buffers(factory)
    with arena.scope():
        kept = arena.alloc(5, "uint8", fill=2).array
        handle = arena.alloc(5, "uint8", fill=3)
        handle.array
        arena.alloc(5, "uint8", side="high", fill=4)
        assert n_buffers(factory) == before + 3
    assert n_buffers(factory) == before + 2  # of `kept`, and of the high end
    assert kept.tolist() == [2] * 5
    del kept
    assert n_buffers(factory) == before + 1
    arena.reset()
    assert n_buffers(factory) == before - 1
    arena.close()
    del arena
    assert not handle.is_live


def test_memory_is_not_shared_after_a_rollback(arena):
    with arena.scope():
        old = arena.alloc(5, "uint8", fill=2).array
    new = arena.alloc(5, "uint8", fill=3)
    assert new.offset == 0
    old[:] = 9
    assert new.array.tolist() == [3] * 5


@settings(max_examples=20)
@given(st.data())
def test_contents_are_as_in_one_buffer(data):
    factory = Sizes()
    arenas = [Arena(1 << 16, alignment=512), Arena(1 << 16, alignment=512, backend=factory, debug=SEPARATE)]
    seen = [[], []]
    n = data.draw(st.integers(2, 12))
    program = [
        (
            data.draw(st.sampled_from(["alloc", "alloc", "high", "roll"])),
            tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))),
            data.draw(st.sampled_from(["uint8", "float32", "int64"])),
            data.draw(st.sampled_from([None, 64, 512])),
        )
        for _ in range(n)
    ]
    for arena, found in zip(arenas, seen, strict=True):
        regions, checkpoint = [], arena.checkpoint()
        for number, (kind, shape, dtype, align) in enumerate(program):
            if kind == "roll":
                arena.rollback(checkpoint)
            else:
                side = "high" if kind == "high" else "low"
                region = arena.alloc(shape, dtype, align=align, fill=number, side=side)
                region[..., 0:1] = number + 1
                regions.append(region)
            found += [
                (r.offset, r.array.tolist(), r[0].array.tolist(), r.reshape(-1)[::2].array.tolist())
                for r in regions
                if r.is_live
            ]
    assert seen[0] == seen[1]


@pytest.mark.parametrize("backend", ["host", "torch"])
def test_slices_views_and_other_libraries_show_the_regions_bytes(backend):
    arena = Arena(1 << 16, backend=backend, debug=SEPARATE)
    arena.alloc(3, "uint8", fill=9)
    region = arena.from_array(np.arange(12, dtype=np.int32).reshape(3, 4))
    assert region[1:, ::2].array.tolist() == [[4, 6], [8, 10]]
    assert region.reshape(2, 6)[1].array.tolist() == [6, 7, 8, 9, 10, 11]
    assert region.view("int16").shape == (3, 8)
    assert region[2].view("int16").array.tolist() == [8, 0, 9, 0, 10, 0, 11, 0]
    assert region.as_numpy()[2, 3] == region.as_torch()[2, 3] == 11
    assert region[1].as_torch().tolist() == region[1].as_numpy().tolist() == [4, 5, 6, 7]
    region[0, 1:3] = 50
    region.as_torch()[2, 0] = 60
    assert region.as_numpy().tolist() == [[0, 50, 50, 3], [4, 5, 6, 7], [60, 9, 10, 11]]
    assert region[1:2, 0:0].array.shape == (1, 0)


def test_addresses_are_those_of_the_arrays(arena):
    for region in (
        arena.alloc(5, "uint8"),
        arena.alloc(5, "float32", align=1024),
        arena.alloc(1, "int8", side="high"),
    ):
        assert region.address == region.array.ctypes.data
    assert region.address % 256 == 0
    assert arena.alloc(5, "float32", align=2048).address % 2048 == 0
    part = arena.alloc((3, 4), "float32")[1:, 2]
    assert part.address == part.array.ctypes.data


@pytest.mark.parametrize("backend", ["host", "torch"])
def test_frames_and_scratch_and_children_work(backend):
    arena = Arena(1 << 16, backend=backend, debug=SEPARATE)
    frame = arena.frame(a=(3, "float32"), b=(5, "uint8"))
    frame.a[...] = 1
    frame.b[...] = 2
    with arena.scratch(conflicts=[arena]) as tmp:
        tmp.zeros(100, "uint8")
    child = arena.child(1024)
    regions = [child.alloc(4, "float32", fill=i) for i in range(3)]
    grandchild = child.child(256)
    regions.append(grandchild.alloc(4, "float32", fill=3))
    assert [region.array.tolist() for region in regions] == [[i] * 4 for i in range(4)]
    assert [region[1:].array.tolist() for region in regions] == [[i] * 3 for i in range(4)]
    assert regions[1].as_numpy().tolist() == regions[1].as_torch().tolist() == [1] * 4
    assert (frame.a.tolist(), frame.b.tolist()) == ([1] * 3, [2] * 5)


def test_addresses_in_a_child_are_those_of_the_arrays(arena):
    arena.alloc(5, "uint8")
    region = arena.child(1024).alloc(4, "float32")
    assert region.address == region.array.ctypes.data


def test_a_region_cannot_grow_because_its_buffer_is_as_long_as_it_is(arena):
    region = arena.alloc((2, 2), "uint8", fill=7)
    before = arena.stats
    with pytest.raises(CheckpointError, match="separate"):
        region.extend(4)
    assert arena.stats == before
    assert region.array.tolist() == [[7, 7], [7, 7]]


@pytest.mark.parametrize("side", ["low", "high"])
@pytest.mark.parametrize("backend", ["host", "torch"])
def test_spilled_regions_come_back(backend, side):
    arena = Arena(1 << 16, backend=backend, debug=SEPARATE)
    arena.alloc(3, "uint8", fill=9, side=side)
    checkpoint = arena.checkpoint(side)
    regions = [arena.alloc(5, "uint8", fill=i, side=side) for i in range(3)]
    spilled = arena.spill(checkpoint)
    arena.alloc(5, "uint8", side=side)
    arena.rollback(checkpoint)
    spilled.restore()
    assert [region.array.tolist() for region in regions] == [[i] * 5 for i in range(3)]


def test_a_request_that_the_library_cannot_fill_changes_nothing():
    factory = Sizes(limit=3 * (PAGE + 100))
    arena = Arena(1 << 16, backend=factory, debug=SEPARATE)
    arena.alloc(50, "uint8")
    before = arena.stats
    with pytest.raises(OutOfMemoryError):
        arena.alloc(5000, "uint8")
    assert arena.stats.top == before.top
    assert arena.alloc(50, "uint8", fill=3).array.tolist() == [3] * 50


def test_a_request_that_the_library_cannot_fill_counts_as_failed():
    factory = Sizes(limit=2 * (PAGE + 100))
    arena = Arena(1 << 16, backend=factory, debug=SEPARATE)
    with arena.profile() as profile, pytest.raises(OutOfMemoryError):
        arena.alloc(5000, "uint8")
    assert (arena.stats.n_failed, profile.n_failed) == (1, 1)


def test_contents_that_cannot_be_written_leave_no_second_buffer(arena, factory):
    before = n_buffers(factory)
    for _ in range(5):
        with pytest.raises(ValueError):
            arena.alloc(5, "uint8", fill=np.zeros(6))
    assert n_buffers(factory) <= before + 1
    assert arena.alloc(5, "uint8", fill=3).array.tolist() == [3] * 5
    assert n_buffers(factory) == before + 1


def test_a_backward_through_memory_that_was_given_back_raises():
    arena = Arena(1 << 16, backend="torch", debug=SEPARATE)
    with arena.scope():
        tensor = arena.alloc(4, "float32", fill=2).array
        loss = (torch.full((4,), 3.0, requires_grad=True) * tensor).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_arrays_outlive_the_arena(arena, factory):
    array = arena.alloc(5, "uint8", fill=4).array
    part = arena.alloc(5, "uint8", fill=5)[2:].array
    arena.close()
    del arena
    assert (array.tolist(), part.tolist()) == ([4] * 5, [5] * 3)
    assert n_buffers(factory) == 2


def test_call_sites_and_live_arrays_are_told_as_in_one_buffer():
    arena = Arena(1 << 16, debug=Debug(separate=True, on_live_arrays="raise"))
    checkpoint = arena.checkpoint()
    region = arena.alloc(4, "float32", label="q")
    array = region.array
    with pytest.raises(RuntimeError, match="'q'"):
        arena.rollback(checkpoint)
    del array
    arena.rollback(checkpoint)
    with pytest.raises(RuntimeError, match=f"allocated at {__file__}"):
        region.array
