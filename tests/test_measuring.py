# What is raised at the end of a block is tested with the block.
# ruff: noqa: PT012
from __future__ import annotations

import contextlib
import copy
import pickle

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import gpuarena
from gpuarena import Arena, Measure
from gpuarena.errors import (
    AlignmentError,
    ArenaClosedError,
    ArgumentError,
    CheckpointError,
    NotCopyableError,
    OutOfMemoryError,
    StaleRegionError,
)
from gpuarena.testing import FakeDevice


def step(arena):
    with arena.scope():
        x = arena.zeros((100, 100), "float32")
        return float((x + 1).sum())


def test_a_measured_capacity_is_enough_and_one_byte_less_is_not():
    with gpuarena.measure() as m:
        assert isinstance(m, Measure)
        assert step(m.arena) == 10_000
    assert m.capacity == 40_000
    assert step(Arena(m.capacity)) == 10_000
    with pytest.raises(OutOfMemoryError):
        step(Arena(m.capacity - 1))


def test_code_runs_for_real_on_the_dry_arena():
    with gpuarena.measure() as m:
        x = m.arena.alloc(1000, "float32", fill=2)
        assert x.array.sum() == 2000
    assert m.arena.closed
    with pytest.raises(StaleRegionError):
        x.array
    with pytest.raises(ArenaClosedError, match="'dry'"):
        m.arena.alloc(1, "uint8")


def test_figures_are_there_during_the_block_and_after_it():
    measuring = gpuarena.measure()
    for read in (lambda: measuring.arena, lambda: measuring.capacity, lambda: measuring.stats):
        with pytest.raises(CheckpointError, match="with"):
            read()
    with measuring as m:
        assert m.capacity == 1
        m.arena.alloc(10, "uint8")
        assert (m.capacity, m.stats.n_regions) == (10, 1)
        m.arena.alloc(10, "uint8")
    assert (m.capacity, m.stats.peak, m.stats.n_regions) == (266, 266, 2)
    with pytest.raises(CheckpointError, match="once"), measuring:
        pass


def test_an_exception_passes_and_the_figures_stay():
    error = KeyError()
    with pytest.raises(KeyError) as caught, gpuarena.measure() as m:
        m.arena.alloc(10, "uint8")
        raise error
    assert caught.value is error
    assert m.capacity == 10
    assert m.arena.closed


def test_code_that_closes_the_arena_itself_is_measured():
    with gpuarena.measure() as m, m.arena as arena:
        arena.alloc(10, "uint8")
    assert m.capacity == 10


def test_code_that_needs_nothing_needs_the_smallest_arena():
    with gpuarena.measure() as m:
        m.arena.alloc((0, 5), "float32")
    Arena(m.capacity).alloc((0, 5), "float32")
    assert m.capacity == 1


@pytest.mark.parametrize("wrong", ["virtual", "numpy", "", None, 5])
def test_an_unknown_backend_is_refused_at_once(wrong):
    with pytest.raises(ArgumentError, match="host, torch, cupy"):
        gpuarena.measure(backend=wrong)


def test_options_that_are_wrong_for_an_arena_are_wrong_here():
    for options, error in (({"alignment": 3}, AlignmentError), ({"limit": 0}, ArgumentError)):
        with pytest.raises(error):
            gpuarena.measure(**options).__enter__()
    with gpuarena.measure(limit="1MiB") as m, pytest.raises(OutOfMemoryError):
        m.arena.alloc(1 << 21, "uint8")
    for call in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(NotCopyableError):
            call(m)


def test_torch_code_is_measured_on_torch():
    torch = pytest.importorskip("torch")
    with gpuarena.measure(backend="torch") as m:
        out = m.arena.empty((8, 8), "float32")
        torch.matmul(torch.ones(8, 8), torch.ones(8, 8), out=out)
        assert out.sum() == 512
    assert m.capacity == 256
    Arena(256, backend="torch").empty((8, 8), "float32")


def test_children_frames_and_rows_that_grow_are_measured():
    def run(arena):
        frame = arena.frame(x=(100, "uint8"), y=(100, "uint8"))
        child = arena.child(1000, alignment=64)
        child.alloc(1000, "uint8")
        with arena.scratch() as tmp:
            tmp.alloc(10, "uint8").extend(5000)
        frame.x[...] = 0

    with gpuarena.measure() as m:
        run(m.arena)
    run(Arena(m.capacity))
    with pytest.raises(OutOfMemoryError):
        run(Arena(m.capacity - 1))


def test_a_refused_request_is_not_needed():
    with gpuarena.measure(limit="1MiB") as m:
        m.arena.alloc(10, "uint8")
        with contextlib.suppress(OutOfMemoryError):
            m.arena.alloc(1 << 30, "uint8")
    assert m.capacity == 10


def test_code_that_uses_the_high_end_is_measured():
    def run(arena):
        with arena.scratch(conflicts=[arena]) as tmp:
            tmp.alloc(100, "uint8")
            arena.alloc(100, "uint8")

    with gpuarena.measure() as m:
        run(m.arena)
    run(Arena(m.capacity))


# -- any program ------------------------------------------------------------------------------------------------

requests = st.tuples(
    st.sampled_from(["alloc", "alloc", "alloc", "extend", "checkpoint", "rollback"]),
    st.integers(0, 700),
    st.sampled_from(["uint8", "float32", "complex128"]),
    st.sampled_from([None, None, 16, 64, 1024, 1 << 14]),
    st.sampled_from(["low", "low", "high"]),
)
programs = st.lists(requests, min_size=1, max_size=25)


def run(arena, program):
    """Run a program; what it does depends on nothing but itself."""
    checkpoints, last = {side: [arena.checkpoint(side)] for side in ("low", "high")}, None
    for kind, n, dtype, align, side in program:
        mine = checkpoints[side]
        if kind == "alloc":
            region = arena.alloc(n, dtype, align=align, side=side)
            last = region if side == "low" else last
        elif kind == "extend" and last is not None and last.nbytes:
            last = last.extend(last.shape[0] + n)
        elif kind == "checkpoint":
            mine.append(arena.checkpoint(side))
            last = None if side == "low" else last
        elif kind == "rollback":
            arena.rollback(mine[-1] if len(mine) == 1 else mine.pop())
            last = None if side == "low" else last


@settings(max_examples=60)
@given(programs, st.sampled_from([1, 16, 256]), st.integers(0, 4095))
def test_the_measured_capacity_is_enough_wherever_the_buffer_lies(program, alignment, skew):
    with gpuarena.measure(alignment=alignment, limit="64MiB") as m:
        run(m.arena, program)
    run(Arena(m.capacity, alignment=alignment, backend=FakeDevice(skew=skew)), program)
    run(Arena(m.capacity, alignment=alignment), program)


@settings(max_examples=60)
@given(programs, st.sampled_from([16, 256]), st.integers(0, 4095))
def test_one_byte_less_is_never_enough_without_stricter_alignments(program, alignment, skew):
    program = [
        (kind, n, dtype, None if align is None else min(align, alignment), "low")
        for kind, n, dtype, align, _ in program
    ]
    with gpuarena.measure(alignment=alignment, limit="64MiB") as m:
        run(m.arena, program)
    assume(m.capacity > 1)
    assert m.capacity == m.stats.peak
    with pytest.raises(OutOfMemoryError):
        run(Arena(m.capacity - 1, alignment=alignment, backend=FakeDevice(skew=skew)), program)
