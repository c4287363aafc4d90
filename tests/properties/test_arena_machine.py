"""The whole arena against a model, on each backend, and backends against each other."""

from __future__ import annotations

import pytest

from gpuarena.testing import FakeDevice, run_arena_machine


@pytest.mark.parametrize("backend", ["host", "torch"])
def test_the_arena_behaves_as_the_model(backend):
    run_arena_machine(backend)


def test_the_machine_runs_on_the_backend_of_a_third_party():
    device = FakeDevice(skew=272)
    run_arena_machine(device)
    assert device.n_released == device.n_allocated > 0
