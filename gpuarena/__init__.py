"""gpuarena: one buffer, a bump pointer, exact rollback, and checked handles to what lies in it.

>>> import gpuarena
>>> arena = gpuarena.Arena("1MiB")
>>> arena.alloc((2, 3), "float32").nbytes
24
"""

from gpuarena import errors
from gpuarena._pins import Pin
from gpuarena.arena import Arena
from gpuarena.checkpoint import Checkpoint, Scope
from gpuarena.debug import Debug
from gpuarena.dtypes import DType, as_dtype
from gpuarena.errors import (
    AlignmentError,
    ArenaClosedError,
    ArenaError,
    CapacityError,
    CheckpointError,
    DeviceMismatchError,
    DTypeError,
    OutOfMemoryError,
    ShapeError,
    StaleRegionError,
)
from gpuarena.frames import Frame, FrameArenas
from gpuarena.measure import Measure, measure
from gpuarena.region import Region
from gpuarena.scratch import Scratch
from gpuarena.spill import Spill
from gpuarena.stats import Stats

__version__ = "0.1.0"

__all__ = [
    "AlignmentError",
    "Arena",
    "ArenaClosedError",
    "ArenaError",
    "CapacityError",
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
