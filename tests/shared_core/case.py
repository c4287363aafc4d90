from __future__ import annotations

import os
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from gpuarena import Arena

PLAIN = [
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]
ML_DTYPES = [
    name for name, scalar in vars(ml_dtypes).items() if isinstance(scalar, type) and hasattr(scalar, "dtype")
]


@dataclass(frozen=True)
class Case:
    """A backend, and what is different about it."""

    name: str
    library: str
    device: str | None
    on_cpu: bool

    @property
    def negative_strides(self) -> bool:
        return self.library != "torch"

    def arena(self, capacity: int = 1 << 16, **options) -> Arena:
        return Arena(capacity, backend=self.library, device=self.device, **options)

    def dtype_names(self) -> list[str]:
        """Names of the types that the library itself has, found without the arena."""
        if self.library == "host":
            return [*PLAIN, *ML_DTYPES]
        if self.library == "cupy":
            return PLAIN  # it holds the types of ml_dtypes, but has few kernels for them
        import torch

        found = {
            str(value).removeprefix("torch.")
            for value in vars(torch).values()
            if isinstance(value, torch.dtype)
        }
        return sorted(name for name in found if not name.startswith("q"))  # quantised types are refused


CASES = {
    case.name: case
    for case in (
        Case("host", "host", None, on_cpu=True),
        Case("torch-cpu", "torch", "cpu", on_cpu=True),
        Case("torch-cuda", "torch", "cuda", on_cpu=False),
        Case("cupy", "cupy", None, on_cpu=False),
    )
}


#: Whether torch's CPU tensors stand in for a GPU's.
FAKE_GPU = os.environ.get("GPUARENA_FAKE_GPU") == "1"


def why_no_gpu() -> dict[str, str | None]:
    """Say for each backend of GPU memory why it cannot run here; None if it can."""
    if FAKE_GPU:
        return {"torch-cuda": None}
    import torch

    reasons = {"torch-cuda": None if torch.cuda.is_available() else "torch finds no CUDA device"}
    try:
        import cupy
    except ImportError:
        return reasons | {"cupy": "CuPy is not installed"}
    return reasons | {"cupy": None if cupy.is_available() else "CuPy finds no CUDA device"}


def raw_bytes(array) -> bytes:
    """The contents of a native array in C order, of any type of any library."""
    # as integers, because the libraries copy few of the others from a device
    integers = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}.get(array.dtype.itemsize)
    if hasattr(array, "untyped_storage"):
        import torch

        tensor = array.detach()
        tensor = tensor.resolve_conj() if integers is None else tensor.view(getattr(torch, integers))
        return tensor.cpu().numpy().tobytes()
    if type(array).__module__.startswith("cupy"):
        array = (array if integers is None else array.view(integers)).get()
    return np.asarray(array).tobytes()


def native(case: Case, data: bytes, name: str, shape: tuple[int, ...]):
    """A host array of the case's library whose bytes are `data`, made without the arena."""
    if case.library == "torch":
        import torch

        return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(getattr(torch, name)).reshape(shape)
    scalar = getattr(ml_dtypes, name) if name in ML_DTYPES else name
    return np.frombuffer(data, np.uint8).view(scalar).reshape(shape)
