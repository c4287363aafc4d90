"""CUDA memory seen as CuPy arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import cupy
import numpy as np

from gpuarena import backends
from gpuarena._bump import align_up
from gpuarena._index import Layout, check_broadcast
from gpuarena.backends.base import Backend
from gpuarena.backends.cupy_streams import CupyStreams
from gpuarena.backends.host import HostBackend, as_host_array, out_of_memory
from gpuarena.dtypes import DType, as_dtype
from gpuarena.errors import ArgumentError, DeviceMismatchError


class CupyBackend(Backend):
    """A run of device memory. CuPy checks neither bounds nor alignment of its views; the core has."""

    name = "cupy"
    negative_strides = True

    def __init__(self, pointer: Any, nbytes: int, device_id: int) -> None:
        self._pointer: Any = pointer  # cupy.cuda.MemoryPointer at `address`
        self._device_id = device_id
        self.device = f"cuda:{device_id}"
        self.address: int = pointer.ptr
        self.nbytes = nbytes
        self._viewers: dict[str, Any] = {}
        self.survives_fork = False
        if cupy.is_available():  # without a driver there is nothing to order, but arrays can be made
            self.streams = CupyStreams(device_id)

    @classmethod
    def allocate(cls, nbytes: int, *, device: Any = None, alignment: int = 256) -> Backend:
        """Allocate uninitialised memory on `device`: None for the current one, a number, ``"cuda:1"``, ``"pinned"``.

        Pinned memory lies on the host, and its arrays are NumPy's.
        """
        if device == "pinned":
            return _allocate_pinned(nbytes, alignment)
        device_id = _device_id(device)
        try:
            with cupy.cuda.Device(device_id):
                raw = cupy.cuda.alloc(nbytes + alignment - 1)
        except cupy.cuda.memory.OutOfMemoryError as error:
            raise out_of_memory(nbytes, f"cuda:{device_id}", error) from error
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise DeviceMismatchError(f"CuPy cannot use device {device!r}: {error}", device=device) from error
        return cls(raw + (align_up(raw.ptr, alignment) - raw.ptr), nbytes, device_id)

    @classmethod
    def adopt(cls, buffer: Any) -> CupyBackend:
        """Take a contiguous CuPy array, whose memory it keeps alive."""
        backends.refuse_unless_usable(
            contiguous=bool(buffer.flags.c_contiguous), writeable=True, nbytes=int(buffer.nbytes)
        )
        return cls(buffer.data, int(buffer.nbytes), int(buffer.data.device_id))

    @classmethod
    def adopt_pointer(cls, address: int, nbytes: int, owner: Any, device_id: int) -> CupyBackend:
        """Take foreign device memory and keep `owner` alive with every array.

        The device is given, because CuPy would otherwise ask the driver about every pointer.
        """
        memory = cupy.cuda.UnownedMemory(address, nbytes, owner, device_id)
        return cls(cupy.cuda.MemoryPointer(memory, 0), nbytes, device_id)

    def check_dtype(self, dtype: DType) -> None:
        """Raise `DTypeError` when neither NumPy nor ml_dtypes has `dtype`."""
        dtype.require_numpy()

    def root(self, offset: int, shape: tuple[int, ...], dtype: DType) -> Any:
        """Return a contiguous array on the bytes from `offset` on."""
        return cupy.ndarray(shape, dtype.numpy, self._pointer + offset)

    def tracked_root(self, offset: int, shape: tuple[int, ...], dtype: DType) -> tuple[Any, Any]:
        """Return an array over a memory object of its own, to which every view of it refers."""
        owner = _Owner(self._pointer.mem)
        memory = cupy.cuda.UnownedMemory(
            self._pointer.ptr + offset, math.prod(shape) * dtype.itemsize, owner, self._device_id
        )
        return cupy.ndarray(shape, dtype.numpy, cupy.cuda.MemoryPointer(memory, 0)), owner

    def again(self, prototype: Any) -> Any:
        """Return another array on the bytes of a prototype."""
        return prototype.view()

    def view(self, root: Any, layout: Layout, dtype: DType) -> Any:
        """Return an array with the given layout."""
        offset, shape, strides = layout
        return cupy.ndarray(shape, dtype.require_numpy(), self._pointer + offset, strides)

    def write(self, array: Any, value: Any) -> None:
        """Assign with CuPy's rules for casts and broadcasting; host values are cast and then copied to the device."""
        with cupy.cuda.Device(self._device_id):
            if isinstance(value, (bool, int, float, complex)) and array.dtype.isbuiltin == 1:
                array.fill(
                    np.asarray(value, array.dtype).item()
                )  # a kernel alone, which a capture can contain
                return
            if not isinstance(value, cupy.ndarray):
                value = as_host_array(value, array.dtype)
                check_broadcast(value.shape, array.shape)
                value = value.astype(array.dtype, copy=False)
            check_broadcast(value.shape, array.shape)
            if value.dtype == array.dtype:  # bytes are copied; CuPy has no kernels for float8 and its like
                array, value = _as_integers(array), _as_integers(value)
            source = cupy.asarray(value)
            if cupy.may_share_memory(source, array):  # CuPy copies runs by memcpy, where they may not overlap
                source = source.copy()
            array[...] = source

    def invalidate(self, arrays: Sequence[Any]) -> None:
        """Do nothing: CuPy keeps no version of an array."""

    def viewer(self, library: str) -> Any:
        """Return a backend of ``"torch"`` over the same bytes."""
        if library == "cupy":
            return self
        if library != "torch":
            raise DeviceMismatchError(
                f"NumPy cannot reach memory on {self.device}; use region.array.get() for a copy"
            )
        if library not in self._viewers:
            import torch

            # CuPy's DLPack capsule is made in C, the one producer whose deleter is safe at interpreter exit.
            with cupy.cuda.Device(self._device_id):
                tensor = torch.utils.dlpack.from_dlpack(self.root(0, (self.nbytes,), as_dtype("uint8")))
            self._viewers[library] = backends.load("torch").adopt(tensor, owned=True)
        return self._viewers[library]

    def fill_bytes(self, start: int, stop: int, byte: int) -> None:
        """Set the bytes from `start` to `stop`, in the order of the current stream."""
        with cupy.cuda.Device(self._device_id):
            (self._pointer + start).memset_async(byte, stop - start)

    def find_other(self, start: int, stop: int, byte: int) -> int | None:
        """Return the offset of the first byte that is not `byte`."""
        if stop <= start:
            return None
        with cupy.cuda.Device(self._device_id):
            differs = cupy.ndarray((stop - start,), "uint8", self._pointer + start) != byte
            at = int(differs.argmax())
            return start + at if bool(differs[at]) else None

    def read_bytes(self, start: int, stop: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return a copy of the bytes in pinned host memory."""
        import cupyx

        with cupy.cuda.Device(self._device_id):
            copy: np.ndarray[Any, np.dtype[np.uint8]] = cupyx.empty_pinned((stop - start,), "uint8")
            cupy.ndarray((stop - start,), "uint8", self._pointer + start).get(out=copy)
            return copy

    def write_bytes(self, start: int, values: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        """Copy host bytes in from `start` on; the host waits."""
        with cupy.cuda.Device(self._device_id):
            cupy.ndarray((values.nbytes,), "uint8", self._pointer + start).set(values)
            cupy.cuda.get_current_stream().synchronize()

    def release(self) -> None:
        """Drop the memory; arrays made of it keep it alive."""
        self._viewers.clear()
        self._pointer = None


def _allocate_pinned(nbytes: int, alignment: int) -> HostBackend:
    import cupyx

    try:
        raw = cupyx.empty_pinned((nbytes + alignment - 1,), "uint8")
    except (cupy.cuda.memory.OutOfMemoryError, MemoryError) as error:
        raise out_of_memory(nbytes, "pinned", error) from error
    except cupy.cuda.runtime.CUDARuntimeError as error:
        if "MemoryAllocation" in str(error):
            raise out_of_memory(nbytes, "pinned", error) from error
        raise DeviceMismatchError(f"CuPy cannot pin host memory: {error}", device="pinned") from error
    start = align_up(raw.ctypes.data, alignment) - raw.ctypes.data
    backend = HostBackend(raw[start : start + nbytes])
    backend.survives_fork = False
    return backend


class _Owner:
    """Keeps memory alive; unlike CuPy's own memory objects it can be referred to weakly."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory


def _as_integers(array: Any) -> Any:
    """Return the same elements as integers of the same size."""
    integers = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}.get(array.dtype.itemsize)
    return array if integers is None else array.view(integers)


def _device_id(device: Any) -> int:
    if device is None:
        try:
            return int(cupy.cuda.runtime.getDevice())
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise DeviceMismatchError(f"CuPy finds no CUDA device: {error}", device=None) from error
    text = str(device).removeprefix("cuda:")
    if text == "cuda":
        return _device_id(None)
    if not text.isdigit():
        raise ArgumentError(f"device {device!r} is no CUDA device; write a number or 'cuda:0'", device=device)
    return int(text)
