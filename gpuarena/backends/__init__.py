"""Backends: one buffer each, and the views of it that one array library can make.

`create` and `adopt` pick the class; a library is imported when its backend is asked for, not before.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from gpuarena.backends.base import Backend, BackendFactory, Streams
from gpuarena.errors import ArgumentTypeError, BackendError, DeviceMismatchError, ReadOnlyError, ShapeError

__all__ = ["Backend", "BackendFactory", "Streams", "adopt", "create"]

_CLASSES = {
    "host": ("gpuarena.backends.host", "HostBackend", "numpy"),
    "torch": ("gpuarena.backends.torch", "TorchBackend", "torch"),
    "cupy": ("gpuarena.backends.cupy", "CupyBackend", "cupy"),
    # addresses that are backed with memory as it is needed
    "virtual": ("gpuarena.backends.virtual", "VirtualHostBackend", "numpy"),
    "virtual:torch": ("gpuarena.backends.virtual", "VirtualTorchBackend", "torch"),
    "virtual:cupy": ("gpuarena.backends.virtual", "VirtualCupyBackend", "cupy"),
}


def load(name: str) -> Any:
    """Return the backend class called `name`.

    Raises
    ------
    BackendError
        There is no such backend, or its library cannot be imported.
    """
    if name not in _CLASSES:
        raise BackendError(f"unknown backend {name!r}; there are {', '.join(_CLASSES)}", backend=name)
    module, cls, library = _CLASSES[name]
    try:
        return getattr(importlib.import_module(module), cls)
    except ImportError as error:
        raise BackendError(
            f"backend {name!r} needs {library}, which cannot be imported: {error}", backend=name
        ) from error


def create(backend: str | BackendFactory, nbytes: int, device: Any, alignment: int) -> Backend:
    """Allocate a buffer of `nbytes` on `device`, its address a multiple of `alignment` bytes."""
    if isinstance(backend, str):
        made: Backend = load(backend).allocate(nbytes, device=device, alignment=alignment)
        return made
    if callable(backend):
        return backend(nbytes, device=device, alignment=alignment)
    raise ArgumentTypeError(f"backend must be a name or a factory, not {type(backend).__name__}")


def adopt(buffer: Any) -> Backend:
    """Return the backend over memory that somebody else owns: an array, a DLPack or a buffer object.

    Raises
    ------
    ArgumentTypeError
        The object offers no memory that any of the libraries can take.
    ShapeError
        The memory is not contiguous, or holds no bytes.
    ReadOnlyError
        The memory may not be written.
    """
    for name, array_type in (("torch", "Tensor"), ("cupy", "ndarray")):
        library = sys.modules.get(name)
        if library is not None and isinstance(buffer, getattr(library, array_type)):
            adopted: Backend = load(name).adopt(buffer)
            return adopted
    host = load("host")
    if hasattr(buffer, "__dlpack_device__") and not host.is_array(buffer):
        kind = int(buffer.__dlpack_device__()[0])
        if kind != 1:  # kDLCPU of the DLPack specification
            return _adopt_device_dlpack(buffer, kind)
    backend: Backend = host.adopt(buffer)
    return backend


def _adopt_device_dlpack(buffer: Any, kind: int) -> Backend:
    name = next((name for name in ("torch", "cupy") if name in sys.modules), None)
    if name is None:
        raise DeviceMismatchError(
            f"the buffer lies on a device of DLPack type {kind}; import torch or cupy first to adopt it",
            kind=kind,
        )
    array = sys.modules[name].from_dlpack(buffer)
    adopted: Backend = load(name).adopt(array)
    return adopted


def refuse_unless_usable(*, contiguous: bool, writeable: bool, nbytes: int) -> None:
    """Raise unless memory offered to an arena is contiguous, writeable and not empty."""
    if not contiguous:
        raise ShapeError("the buffer is not contiguous; an arena needs one run of bytes")
    if not writeable:
        raise ReadOnlyError("the buffer is read-only; an arena writes into its memory")
    if nbytes == 0:
        raise ShapeError("the buffer holds no bytes")
