"""Memory that grows without moving: addresses are reserved at once, and backed with memory as it is needed."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gpuarena import backends
from gpuarena._index import Layout
from gpuarena.backends._vmm import Reservation, VmmDriver
from gpuarena.backends._vmm_cuda import CudaVmm
from gpuarena.backends._vmm_host import HostVmm
from gpuarena.backends.base import Backend
from gpuarena.dtypes import DType
from gpuarena.errors import ArgumentError, DeviceMismatchError


class VirtualBackend(Backend):
    """Reserved addresses, seen through another backend over the whole range.

    `name`, `device` and the arrays are that backend's. Bytes above `committed` must not be touched. The memory is
    given back when this object has been released and no array over it is left; on a CUDA device the host then waits
    for the device.

    Parameters
    ----------
    driver : VmmDriver
        What backs the addresses.
    nbytes, alignment : int
        Bytes to reserve, any number; the address is a multiple of the alignment.
    wrap : callable
        Returns a backend over the whole range; all its arrays keep the given owner alive.
    n_kept : int
        This many bytes from the start are committed at once and survive `trim`.
    survives_fork : bool
        Whether a forked child may use the memory.
    """

    growable = True

    def __init__(
        self,
        driver: VmmDriver,
        nbytes: int,
        alignment: int,
        wrap: Callable[[_Range], Backend],
        *,
        n_kept: int = 0,
        survives_fork: bool = True,
    ) -> None:
        self._reservation = Reservation(driver, nbytes, alignment=alignment)
        self._n_kept = n_kept
        try:
            self._reservation.commit(n_kept)
            self._inner = wrap(_Range(self._reservation))
        except BaseException:
            self._reservation.close()
            raise
        self.name = self._inner.name
        self.device = self._inner.device
        self.address = self._reservation.address
        self.nbytes = nbytes
        self.negative_strides = self._inner.negative_strides
        self.survives_fork = survives_fork
        self.streams = self._inner.streams
        assert (self._inner.address, self._inner.nbytes) == (self.address, nbytes), "the range was copied"

    # -- growable memory ----------------------------------------------------------------------------------------

    @property
    def committed(self) -> int:
        """Bytes from the start that are backed by memory now, and may be used.

        The memory itself is whole granules, so at the end of the range up to one granule more is held.
        """
        return min(self._reservation.committed, self.nbytes)

    def commit(self, stop: int) -> None:
        """Back the bytes up to `stop` with memory; see `Reservation.commit` for what it raises."""
        self._reservation.commit(stop)

    def trim(self, stop: int) -> int:
        """Give back memory above `stop`, as far as whole chunks allow; see `Reservation.trim`.

        On a CUDA device the first chunk stays: libraries ask the driver about the address of the first byte.
        """
        return self._reservation.trim(max(stop, self._n_kept))

    # -- all else is the other backend's ------------------------------------------------------------------------

    def check_dtype(self, dtype: DType) -> None:
        """Raise `DTypeError` when the library has no arrays of `dtype`."""
        self._inner.check_dtype(dtype)

    def root(self, offset: int, shape: tuple[int, ...], dtype: DType) -> Any:
        """Return a fresh contiguous array on the bytes from `offset` on, committed or not."""
        return self._inner.root(offset, shape, dtype)

    def tracked_root(self, offset: int, shape: tuple[int, ...], dtype: DType) -> tuple[Any, Any]:
        """Return an array, and an object that lives while it or any view of it does."""
        return self._inner.tracked_root(offset, shape, dtype)

    def prototype(self, offset: int, shape: tuple[int, ...], dtype: DType) -> Any:
        """Return an array that is only ever given to `again`."""
        return self._inner.prototype(offset, shape, dtype)

    def again(self, prototype: Any) -> Any:
        """Return another fresh root array on the bytes of a prototype."""
        return self._inner.again(prototype)

    def view(self, root: Any, layout: Layout, dtype: DType) -> Any:
        """Return a view of a region's `root` array."""
        return self._inner.view(root, layout, dtype)

    def write(self, array: Any, value: Any) -> None:
        """Assign `value` to all of `array`, broadcasting."""
        self._inner.write(array, value)

    def invalidate(self, arrays: Sequence[Any]) -> None:
        """Note that the memory of these root arrays goes to somebody else."""
        self._inner.invalidate(arrays)

    def viewer(self, library: str) -> Backend:
        """Return another library's backend over the whole range."""
        return self if library == self.name else self._inner.viewer(library)

    def fill_bytes(self, start: int, stop: int, byte: int) -> None:
        """Set the bytes from `start` to `stop`."""
        self._inner.fill_bytes(start, stop, byte)

    def find_other(self, start: int, stop: int, byte: int) -> int | None:
        """Return the offset of the first byte from `start` to `stop` that is not `byte`."""
        return self._inner.find_other(start, stop, byte)

    def read_bytes(self, start: int, stop: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return a copy of the bytes on the host."""
        return self._inner.read_bytes(start, stop)

    def write_bytes(self, start: int, values: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        """Copy host bytes in from `start` on."""
        self._inner.write_bytes(start, values)

    def release(self) -> None:
        """Drop the range; arrays made of it keep it, and the memory committed by now, alive."""
        self._inner.release()


class VirtualHostBackend(VirtualBackend):
    """NumPy arrays on host memory that grows in place."""

    @classmethod
    def allocate(cls, nbytes: int, *, device: Any = None, alignment: int = 256) -> VirtualHostBackend:
        """Reserve `nbytes` of host addresses, without memory."""
        if device is not None and str(device) != "cpu":
            raise DeviceMismatchError(
                f"the virtual backend of NumPy has no device {device!r}; use backend='virtual:torch' or 'virtual:cupy'"
            )
        host = backends.load("host")
        return cls(HostVmm(), nbytes, alignment, lambda owner: host(_numpy_bytes(owner)))


class VirtualTorchBackend(VirtualBackend):
    """Torch tensors on memory of the host or of a CUDA device that grows in place."""

    @classmethod
    def allocate(cls, nbytes: int, *, device: Any = None, alignment: int = 256) -> VirtualTorchBackend:
        """Reserve `nbytes` of addresses on `device`, torch's default device if None."""
        library = backends.load("torch")
        import torch

        try:
            where = torch.get_default_device() if device is None else torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ArgumentError(f"device {device!r}: {error}", device=device) from error
        if where.type == "cpu":
            return cls(HostVmm(), nbytes, alignment, lambda owner: library.adopt_numpy(_numpy_bytes(owner)))
        if where.type != "cuda" or not torch.cuda.is_available():
            raise DeviceMismatchError(
                f"torch memory grows in place on the CPU and on CUDA devices that torch finds, not on {where}",
                device=str(where),
            )
        device_id = torch.cuda.current_device() if where.index is None else where.index

        def wrap(owner: _Range) -> Backend:
            # The device is given, for without it torch copies to the CPU (pytorch#54139). It asks the driver
            # whose the address is, hence `n_kept`.
            tensor = torch.as_tensor(_CudaArray(owner), device=f"cuda:{device_id}")
            adopted: Backend = library.adopt(tensor, owned=True)
            return adopted

        return cls(_cuda_driver(device_id), nbytes, alignment, wrap, n_kept=1, survives_fork=False)


class VirtualCupyBackend(VirtualBackend):
    """CuPy arrays on memory of a CUDA device that grows in place."""

    @classmethod
    def allocate(cls, nbytes: int, *, device: Any = None, alignment: int = 256) -> VirtualCupyBackend:
        """Reserve `nbytes` of addresses on `device`: None for the current one, a number, or ``"cuda:1"``."""
        library = backends.load("cupy")
        from gpuarena.backends.cupy import _device_id

        device_id = _device_id(device)

        def wrap(owner: _Range) -> Backend:
            adopted: Backend = library.adopt_pointer(owner.address, owner.nbytes, owner, device_id)
            return adopted

        # CuPy's export by DLPack asks the driver whose the address is, hence `n_kept`
        return cls(_cuda_driver(device_id), nbytes, alignment, wrap, n_kept=1, survives_fork=False)


class _Range:
    """What the arrays over reserved addresses refer to, and with whose end the memory goes."""

    def __init__(self, reservation: Reservation) -> None:
        self.address = reservation.address
        self.nbytes = reservation.nbytes
        # Not at exit: arrays may still be used then, and the system takes the memory anyway.
        weakref.finalize(self, reservation.close).atexit = False

    def interface(self) -> dict[str, Any]:
        """Return what version 3 of NumPy's and of Numba's protocol have in common; False: it may be written."""
        return {"version": 3, "shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False)}


class _HostArray:
    """Shows a range to NumPy."""

    def __init__(self, owner: _Range) -> None:
        self._owner = owner

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self._owner.interface()


class _CudaArray:
    """Shows a range to libraries of CUDA arrays, and has nothing that NumPy would take for host memory."""

    def __init__(self, owner: _Range) -> None:
        self._owner = owner

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self._owner.interface()


def _numpy_bytes(owner: _Range) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.asarray(_HostArray(owner))


@functools.cache
def _cuda_driver(device_id: int) -> VmmDriver:
    """Return the one driver of a device, which holds its context for good."""
    return CudaVmm(device_id)
