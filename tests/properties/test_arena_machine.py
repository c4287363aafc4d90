"""The whole arena against a model, on each backend, and arenas against each other."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given, settings

from gpuarena import Arena, Debug
from gpuarena.testing import Driver, FakeDevice, programs, run_arena_machine, run_lockstep

#: The machine on the host is the thorough one; on other backends it looks at what a backend does.
fewer = settings(max_examples=settings.default.max_examples * 2 // 5, deadline=None, parent=settings.default)


# The machine draws two ends, growth, children, frames, spilled regions, pins, debug mode and profiles together:
# P1-P10, F1, F3, S1-S4, R1-R15, C1-C4, C6-C8, D1-D5, D8, T1-T3, T5, T8


def test_the_arena_behaves_as_the_model():
    run_arena_machine("host")


def test_the_arena_behaves_as_the_model_in_debug_mode():  # R13, R14, C7
    run_arena_machine("host", debug=Debug(guard=7, on_live_arrays="raise", call_sites=False), settings=fewer)


def test_the_arena_behaves_as_the_model_without_checks():
    run_arena_machine("host", debug=False, settings=fewer)


def test_the_arena_behaves_as_the_model_on_torch():
    pytest.importorskip("torch")
    run_arena_machine("torch", settings=fewer)


def test_the_machine_runs_on_the_backend_of_a_third_party():  # T5
    device = FakeDevice(skew=272)  # whose buffers are aligned to what was asked and to no more
    run_arena_machine(device, settings=fewer)
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


#: With the alignment that the arenas below ask for, which is all that their buffers have in common.
everything = programs(parts=True, largest_alignment=16)


@given(everything)
def test_every_backend_on_the_cpu_does_the_same_with_all_that_an_arena_has(program):  # T9
    run_lockstep(
        program,
        [
            Driver(Arena(1500, alignment=16)),
            Driver(Arena(1500, alignment=16, backend="torch")),
            Driver(Arena(1500, alignment=16, backend=FakeDevice())),
        ],
    )


@given(everything)
def test_a_debug_mode_without_guard_zones_changes_nothing_that_shows(program):
    settings = Debug(guard=0, on_live_arrays="ignore", call_sites=False)
    run_lockstep(
        program, [Driver(Arena(1500, alignment=16)), Driver(Arena(1500, alignment=16, debug=settings))]
    )


@given(programs())
def test_a_buffer_for_every_region_changes_nothing_that_shows(program):
    separate = Arena(1024, alignment=1024, debug=Debug(separate=True, on_live_arrays="ignore"))
    run_lockstep(program, [Driver(Arena(1024, alignment=1024)), Driver(separate, apart=["address"])])


@given(everything)
def test_recording_and_counting_change_nothing_that_shows(program):  # T8
    plain, watched = Arena(1500, alignment=16), Arena(1500, alignment=16)
    with watched.record(), watched.profile():
        run_lockstep(program, [Driver(plain), Driver(watched)])


@pytest.mark.skipif(sys.platform != "linux", reason="memory that grows is made for Linux")
@given(programs())
def test_memory_that_grows_does_the_same(program):  # T9
    names = ("host", "virtual", "virtual:torch")
    drivers = [Driver(Arena(1 << 14, alignment=1024, backend=name), apart=["committed"]) for name in names]
    run_lockstep(program, drivers)
    for driver in drivers:
        driver.arena.close()
