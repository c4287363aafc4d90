"""Host memory seen as NumPy arrays."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuarena import backends
from gpuarena._bump import align_up
from gpuarena._index import Layout, check_broadcast
from gpuarena.backends.base import Backend
from gpuarena.dtypes import DType
from gpuarena.errors import ArgumentTypeError, DeviceMismatchError, OutOfMemoryError

#: numpy.empty aligns to 16 bytes only, so the buffer is allocated longer by its alignment.


class HostBackend(Backend):
    """A NumPy byte array of `nbytes`; its address is a multiple of the alignment asked for."""

    name = "host"
    device = "cpu"
    negative_strides = True

    def __init__(self, buffer: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        self._bytes: Any = buffer  # [nbytes] uint8
        self._whole: Any = np.ndarray(
            (0,), np.uint8, buffer
        ).base  # what NumPy lets untracked arrays refer to
        self.address: int = buffer.ctypes.data
        self.nbytes: int = buffer.nbytes
        self._viewers: dict[str, Any] = {}

    @classmethod
    def allocate(cls, nbytes: int, *, device: Any = None, alignment: int = 256) -> HostBackend:
        """Allocate uninitialised host memory; the system commits its pages when they are first written."""
        if device is not None and str(device) != "cpu":
            raise DeviceMismatchError(
                f"the host backend has no device {device!r}; use backend='torch' or 'cupy'"
            )
        try:
            raw = np.empty(nbytes + alignment - 1, np.uint8)
        except (MemoryError, ValueError) as error:  # ValueError: more bytes than an address has bits for
            raise out_of_memory(nbytes, "host", error) from error
        start = align_up(raw.ctypes.data, alignment) - raw.ctypes.data
        return cls(raw[start : start + nbytes])

    @staticmethod
    def is_array(buffer: Any) -> bool:
        """Return whether `buffer` is a NumPy array."""
        return isinstance(buffer, np.ndarray)

    @classmethod
    def adopt(cls, buffer: Any) -> HostBackend:
        """Take a NumPy array, a CPU DLPack object or anything with the buffer protocol, which it keeps alive."""
        if isinstance(buffer, np.ndarray):
            array = buffer
        elif hasattr(buffer, "__dlpack__"):
            array = np.from_dlpack(buffer)
        else:
            try:
                view = memoryview(buffer)
            except TypeError:
                raise ArgumentTypeError(
                    f"{type(buffer).__name__} offers no memory: give a torch, CuPy or NumPy array, "
                    f"a DLPack object or a buffer such as bytearray, mmap or shared memory"
                ) from None
            array = np.asarray(view)
        backends.refuse_unless_usable(
            contiguous=array.flags.c_contiguous, writeable=array.flags.writeable, nbytes=array.nbytes
        )
        if array.dtype.hasobject:
            raise ArgumentTypeError("an array of Python objects cannot be adopted")
        return cls(np.ndarray(array.nbytes, np.uint8, buffer=array))

    def check_dtype(self, dtype: DType) -> None:
        """Raise `DTypeError` when neither NumPy nor ml_dtypes has `dtype`."""
        dtype.require_numpy()

    def root(self, offset: int, shape: tuple[int, ...], dtype: DType) -> np.ndarray[Any, Any]:
        """Return a contiguous array on the bytes from `offset` on."""
        return np.ndarray(shape, dtype.numpy, self._bytes, offset)

    def tracked_root(
        self, offset: int, shape: tuple[int, ...], dtype: DType
    ) -> tuple[np.ndarray[Any, Any], Any]:
        """Return an array over an array of its own bytes, to which every NumPy view of it refers.

        The memoryview in between keeps NumPy from referring to the whole buffer instead.
        """
        part = memoryview(self._bytes)[offset : offset + math.prod(shape) * dtype.itemsize]
        owner = np.frombuffer(part, np.uint8)
        return owner.view(dtype.require_numpy()).reshape(shape), owner

    def again(self, prototype: Any) -> np.ndarray[Any, Any]:
        """Return another array on the bytes of a prototype."""
        array: np.ndarray[Any, Any] = prototype.view()
        return array

    def view(self, root: Any, layout: Layout, dtype: DType) -> np.ndarray[Any, Any]:
        """Return an array with the given layout; NumPy checks that it stays inside the buffer."""
        offset, shape, strides = layout
        owner = root.base
        if owner is not self._whole:  # a tracked root: its views refer to the same owner
            within = offset - (owner.__array_interface__["data"][0] - self.address)
            if within >= 0 and (within + _span(shape, strides, dtype.itemsize)) <= owner.nbytes:
                return np.ndarray(shape, dtype.require_numpy(), owner, within, strides)
        return np.ndarray(shape, dtype.require_numpy(), self._bytes, offset, strides)

    def write(self, array: Any, value: Any) -> None:
        """Assign with NumPy's rules for casts and broadcasting."""
        values = as_host_array(value, array.dtype)
        check_broadcast(values.shape, array.shape)
        if values.dtype.kind in "OSU" and values.dtype != array.dtype:
            values = values.astype(
                array.dtype
            )  # may fail at any element, and must before the first is written
        array[...] = values

    def invalidate(self, arrays: Sequence[Any]) -> None:
        """Do nothing: NumPy keeps no version of an array."""

    def viewer(self, library: str) -> Any:
        """Return a backend of ``"torch"`` over the same bytes."""
        if library == "host":
            return self
        if library != "torch":
            raise DeviceMismatchError(f"{library} cannot reach host memory; copy the contents to a device")
        if library not in self._viewers:
            self._viewers[library] = backends.load("torch").adopt_numpy(self._bytes)
        return self._viewers[library]

    def fill_bytes(self, start: int, stop: int, byte: int) -> None:
        """Set the bytes from `start` to `stop`."""
        self._bytes[start:stop] = byte

    def find_other(self, start: int, stop: int, byte: int) -> int | None:
        """Return the offset of the first byte that is not `byte`."""
        differs = self._bytes[start:stop] != byte
        at = int(differs.argmax()) if stop > start else 0
        return start + at if stop > start and differs[at] else None

    def read_bytes(self, start: int, stop: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return a copy of the bytes."""
        copy: np.ndarray[Any, np.dtype[np.uint8]] = self._bytes[start:stop].copy()
        return copy

    def write_bytes(self, start: int, values: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        """Copy bytes in from `start` on."""
        self._bytes[start : start + values.nbytes] = values

    def release(self) -> None:
        """Drop the buffer; arrays made of it keep it alive."""
        self._viewers.clear()
        self._bytes = self._whole = None


def _span(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> int:
    """Return the bytes from the first element to the end of the furthest, for positive strides."""
    return (
        sum((dim - 1) * stride for dim, stride in zip(shape, strides, strict=True) if stride > 0) + itemsize
    )


def as_host_array(value: Any, dtype: np.dtype[Any] | None) -> np.ndarray[Any, Any]:
    """Return values on the host as an array: of their own dtype if they have one, of `dtype` if not."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        from gpuarena.backends.torch import to_host

        return to_host(value)
    return np.asarray(value, dtype=None if hasattr(value, "dtype") else dtype)


def out_of_memory(nbytes: int, device: str, error: BaseException) -> OutOfMemoryError:
    """Return the error for a buffer that the library could not allocate."""
    from gpuarena._units import format_nbytes

    return OutOfMemoryError(
        f"cannot reserve {format_nbytes(nbytes)} on {device}: {error}",
        requested=nbytes,
        aligned_offset=0,
        available=0,
        capacity=0,
        missing=nbytes,
        label=None,
    )
