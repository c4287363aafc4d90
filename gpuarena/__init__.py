"""gpuarena: one buffer, a bump pointer, exact rollback, and checked handles to what lies in it.

>>> import gpuarena
>>> arena = gpuarena.Arena("1MiB")
>>> arena.alloc((2, 3), "float32").nbytes
24
"""

from typing import TYPE_CHECKING, Any

from gpuarena import errors
from gpuarena.arena import Arena
from gpuarena.checkpoint import Checkpoint, Scope
from gpuarena.dtypes import DType, as_dtype
from gpuarena.errors import (
    AlignmentError,
    ArenaClosedError,
    ArenaError,
    CapacityError,
    CaptureError,
    CheckpointError,
    DeviceMismatchError,
    DTypeError,
    OutOfMemoryError,
    PinnedError,
    ShapeError,
    StaleRegionError,
)
from gpuarena.region import Region
from gpuarena.stats import Stats

if TYPE_CHECKING:
    from gpuarena._pins import Pin
    from gpuarena.debug import Debug
    from gpuarena.frames import Frame, FrameArenas
    from gpuarena.measuring import Measure, measure
    from gpuarena.scratch import Scratch
    from gpuarena.spill import Spill

__version__ = "0.1.0"

#: What is imported when it is first asked for, so that `import gpuarena` stays short.
_LATER = {
    "Debug": "debug",
    "Frame": "frames",
    "FrameArenas": "frames",
    "Measure": "measuring",
    "Pin": "_pins",
    "Scratch": "scratch",
    "Spill": "spill",
    "measure": "measuring",
}

__all__ = [
    "AlignmentError",
    "Arena",
    "ArenaClosedError",
    "ArenaError",
    "CapacityError",
    "CaptureError",
    "Checkpoint",
    "CheckpointError",
    "DType",
    "DTypeError",
    "Debug",
    "DeviceMismatchError",
    "Frame",
    "FrameArenas",
    "Measure",
    "OutOfMemoryError",
    "Pin",
    "PinnedError",
    "Region",
    "Scope",
    "Scratch",
    "ShapeError",
    "Spill",
    "StaleRegionError",
    "Stats",
    "as_dtype",
    "errors",
    "measure",
]


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _LATER:
        raise AttributeError(f"module 'gpuarena' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"gpuarena.{_LATER[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
