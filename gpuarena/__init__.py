"""gpuarena: one buffer, a bump pointer, exact rollback, and checked handles to what lies in it.

>>> import gpuarena
>>> arena = gpuarena.Arena("1MiB")
>>> arena.alloc((2, 3), "float32").nbytes
24
"""

from gpuarena import errors
from gpuarena.arena import Arena, Checkpoint, Scope
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
from gpuarena.region import Region
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
    "DeviceMismatchError",
    "OutOfMemoryError",
    "Region",
    "Scope",
    "ShapeError",
    "StaleRegionError",
    "Stats",
    "as_dtype",
    "errors",
]
