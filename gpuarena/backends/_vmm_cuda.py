"""Memory of a CUDA device that is mapped chunk by chunk, by the driver API's virtual memory management.

The calls and their rules: CUDA Driver API reference, "Virtual Memory Management" and "Stream Management".
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

from gpuarena.backends._vmm import DriverError
from gpuarena.errors import BackendError

#: The handle of the legacy default stream, CU_STREAM_LEGACY of cuda.h.
_LEGACY_STREAM = 1
_INSTALL = "install the extra 'cuda' (pip install 'gpuarena[cuda]', the package cuda-bindings)"


class CudaVmm:
    """The `VmmDriver` of a CUDA device, in its primary context, which torch and CuPy use too.

    Every call pushes that context on the calling thread and pops it afterwards, so it works on any thread and leaves
    the thread's current device as it was. The context is retained once and never released: memory may outlive this
    object. A forked child cannot use CUDA: there `unmap`, `release` and `free` do nothing and all else raises.

    Parameters
    ----------
    device_id : int
        Number of the device among the visible ones.
    driver : module, optional
        What to call; ``cuda.bindings.driver`` if None. Its functions return ``(CUresult, ...)``.

    Raises
    ------
    BackendError
        There is no package, driver or device, or the device cannot map memory.
    """

    def __init__(self, device_id: int, driver: Any = None) -> None:
        self.device_id = device_id
        self._cuda: Any = _bindings() if driver is None else driver
        self._pid = os.getpid()
        try:
            self._set_up()
        except DriverError as error:
            raise BackendError(
                f"CUDA device {device_id} cannot be used: {error}", backend="virtual"
            ) from error
        except RuntimeError as error:
            if isinstance(error, BackendError):
                raise
            # cuda.pathfinder's DynamicLibNotFoundError, from the first call
            raise BackendError(
                f"there is no CUDA driver, so install NVIDIA's display driver: {error}", backend="virtual"
            ) from error

    def _set_up(self) -> None:
        cuda = self._cuda
        self._call("cuInit", 0)
        device = self._call("cuDeviceGet", self.device_id)
        supported = cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        if not self._call("cuDeviceGetAttribute", supported, device):
            raise BackendError(
                f"CUDA device {self.device_id} or its driver has no virtual memory management; "
                f"use backend='torch' or 'cupy'",
                backend="virtual",
            )
        self._context = self._call("cuDevicePrimaryCtxRetain", device)
        location = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties = cuda.CUmemAllocationProp()
        self._properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location.type = location
        self._properties.location.id = self.device_id
        self._access = cuda.CUmemAccessDesc()
        self._access.location.type = location
        self._access.location.id = self.device_id
        self._access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        # The recommended one is a multiple of the minimum; smaller chunks would cost the device's TLB dearly.
        recommended = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        with self._current():
            self._granularity = int(
                self._call("cuMemGetAllocationGranularity", self._properties, recommended)
            )

    def granularity(self) -> int:
        """Return the size that the driver recommends, 2 MiB on all devices up to 2026."""
        return self._granularity

    def reserve(self, nbytes: int) -> int:
        """Reserve addresses of the device."""
        with self._current():
            return int(self._call("cuMemAddressReserve", nbytes, self._granularity, 0, 0))

    def create(self, nbytes: int) -> Any:
        """Return the handle of `nbytes` of device memory."""
        with self._current():
            return self._call("cuMemCreate", nbytes, self._properties, 0)

    def map(self, address: int, nbytes: int, handle: Any) -> None:
        """Put all of the memory of `handle` at `address`."""
        with self._current():
            self._call("cuMemMap", address, nbytes, 0, handle, 0)

    def set_access(self, address: int, nbytes: int) -> None:
        """Let this device read and write the memory; other devices cannot reach it."""
        with self._current():
            self._call("cuMemSetAccess", address, nbytes, [self._access], 1)

    def unmap(self, address: int, nbytes: int) -> None:
        """Wait for all work queued on the device, which cuMemUnmap does not do, and unmap."""
        if not self._is_forked():
            with self._current():
                self._call("cuCtxSynchronize")
                self._call("cuMemUnmap", address, nbytes)

    def release(self, handle: Any) -> None:
        """Give up a handle."""
        if not self._is_forked():
            with self._current():
                self._call("cuMemRelease", handle)

    def free(self, address: int, nbytes: int) -> None:
        """Give back reserved addresses."""
        if not self._is_forked():
            with self._current():
                self._call("cuMemAddressFree", address, nbytes)

    def is_capturing(self) -> bool:
        """Return whether a graph is being captured, as far as can be seen from here.

        Seen are captures on any blocking stream of the context, through the legacy default stream, and on the current
        stream of torch and of CuPy in this thread. Not seen is a capture on a non-blocking stream of another thread,
        or of a library that neither torch nor CuPy knows of. If that capture is in CUDA's global mode, the driver
        refuses the calls, which raises all the same, but the capture may then be invalid.
        """
        if self._is_forked():
            return False
        with self._current():
            try:
                status = self._call("cuStreamIsCapturing", self._cuda.CUstream(_LEGACY_STREAM))
            except DriverError as error:
                if error.capturing:  # a blocking stream of the context is
                    return True
                raise
        if status != self._cuda.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE:
            return True
        return _torch_is_capturing() or _cupy_is_capturing()

    def _is_forked(self) -> bool:
        return os.getpid() != self._pid

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        """Make the context current on this thread for a while."""
        if self._is_forked():
            raise DriverError(
                "fork", "a forked child cannot use the CUDA context of its parent; start processes by spawn"
            )
        self._call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            # The work is done or refused by now; a thread left in this context is no reason to say otherwise.
            self._cuda.cuCtxPopCurrent()

    def _call(self, name: str, *arguments: Any) -> Any:
        """Return what a driver function returns, and raise `DriverError` where it fails."""
        result, *values = getattr(self._cuda, name)(*arguments)
        codes = self._cuda.CUresult
        if result != codes.CUDA_SUCCESS:
            code = codes(result).name
            reason = code
            if code == "CUDA_ERROR_OUT_OF_MEMORY" and name == "cuMemCreate":
                reason += (
                    " (what torch and CuPy keep in their caches counts as used: torch.cuda.empty_cache())"
                )
            raise DriverError(
                name,
                reason,
                out_of_memory=code == "CUDA_ERROR_OUT_OF_MEMORY",
                capturing=code.startswith("CUDA_ERROR_STREAM_CAPTURE"),
            )
        return values[0] if values else None


def _bindings() -> Any:
    """Return ``cuda.bindings.driver``, which can be imported without a driver."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise BackendError(
            f"device memory that grows in place needs cuda-bindings, which cannot be imported: {error}; {_INSTALL}",
            backend="virtual",
        ) from error
    return driver


def _torch_is_capturing() -> bool:
    """Ask torch about its current stream, if it is loaded and uses CUDA."""
    torch = sys.modules.get("torch")
    return bool(
        torch is not None and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    )


def _cupy_is_capturing() -> bool:
    """Ask CuPy about its current stream, if it is loaded and finds a device."""
    cupy = sys.modules.get("cupy")
    if cupy is None or not cupy.is_available():
        return False
    return bool(cupy.cuda.get_current_stream().is_capturing())
