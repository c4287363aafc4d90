"""The whole arena against a model, on each backend, and backends against each other."""

from __future__ import annotations

import pytest
from hypothesis import given

from gpuarena import Arena
from gpuarena.testing import Driver, FakeDevice, programs, run_arena_machine, run_lockstep


@pytest.mark.parametrize("backend", ["host", "torch"])
def test_the_arena_behaves_as_the_model(backend):
    run_arena_machine(backend)


def test_the_machine_runs_on_the_backend_of_a_third_party():
    device = FakeDevice(skew=272)  # whose buffers are aligned to what was asked and to no more
    run_arena_machine(device)
    assert device.n_released == device.n_allocated > 0


@given(programs())
def test_every_backend_on_the_cpu_does_the_same(program):  # T9
    run_lockstep(
        program,
        [
            Driver(Arena(1024, alignment=1024)),
            Driver(Arena(1024, alignment=1024, backend="torch")),
            Driver(Arena(1024, alignment=1024, backend=FakeDevice())),
        ],
    )
