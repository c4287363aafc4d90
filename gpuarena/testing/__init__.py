"""What the library's own tests are made of, for authors of backends and of code on top of an arena.

`run_arena_machine` drives an arena on any backend through random calls and compares it, after each one, with a
model in plain Python; `run_lockstep` gives several arenas the same calls and compares them with each other;
`FakeDevice` is a backend that counts its buffers, and `StreamedFakeDevice` one with streams, which runs kernels late and
finds races. The devices need nothing else, the rest needs ``hypothesis``.

    def test_my_backend_keeps_the_rules():
        run_arena_machine(MyBackend.allocate)
"""

from typing import TYPE_CHECKING, Any

from gpuarena.testing._capture import FakeCaptureError
from gpuarena.testing.fake import FakeBackend, FakeDevice
from gpuarena.testing.streams import FakeStreams, SimulatedDevice, StreamedFakeDevice, byte_ranges

if TYPE_CHECKING:
    from gpuarena.testing.machine import ArenaMachine, Driver, run_arena_machine, run_lockstep, to_numpy
    from gpuarena.testing.strategies import (
        alignments,
        indices,
        negative_shapes,
        overflowing_shapes,
        programs,
        shapes,
        wrong_alignments,
        wrong_dtypes,
        wrong_shapes,
    )

__all__ = [
    "ArenaMachine",
    "Driver",
    "FakeBackend",
    "FakeCaptureError",
    "FakeDevice",
    "FakeStreams",
    "SimulatedDevice",
    "StreamedFakeDevice",
    "alignments",
    "byte_ranges",
    "indices",
    "negative_shapes",
    "overflowing_shapes",
    "programs",
    "run_arena_machine",
    "run_lockstep",
    "shapes",
    "to_numpy",
    "wrong_alignments",
    "wrong_dtypes",
    "wrong_shapes",
]

_OF_THE_MACHINE = ("ArenaMachine", "Driver", "run_arena_machine", "run_lockstep", "to_numpy")


def __getattr__(name: str) -> Any:
    # Later, so that the devices can be had without hypothesis.
    import importlib

    if name not in __all__:
        raise AttributeError(f"module 'gpuarena.testing' has no attribute {name!r}")
    module = "machine" if name in _OF_THE_MACHINE else "strategies"
    value = getattr(importlib.import_module(f"gpuarena.testing.{module}"), name)
    globals()[name] = value
    return value
