"""Arenas whose second half shows the first half again, beside an arena of the same library and device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpuarena import backends
from gpuarena.backends._mirror import Mirror
from gpuarena.backends._vmm import VmmDriver
from gpuarena.backends._vmm_host import SharedHostVmm
from gpuarena.backends.base import Backend
from gpuarena.backends.virtual import _cuda_driver, _CudaArray, _numpy_bytes, _Range
from gpuarena.errors import ArgumentError, DeviceMismatchError

__all__ = ["MirroredMemory"]


class MirroredMemory:
    """A `BackendFactory` of memory that is mapped twice in a row, for one library and device.

    >>> from gpuarena import Arena
    >>> memory = MirroredMemory("host", "cpu")
    >>> arena = Arena(2 * memory.granule, backend=memory)
    >>> x = arena.empty((2, memory.granule), "uint8")
    >>> x[0, 5] = 7
    >>> int(x[1, 5])
    7

    The capacity of such an arena counts addresses, which are twice the memory. The memory is given back when the
    arena is closed or dropped and no array over it is left.

    Parameters
    ----------
    library : {"host", "torch", "cupy"}
        Whose arrays they are.
    device : str
        ``"cpu"`` (for host and torch) or such as ``"cuda:0"`` (for torch and cupy).

    Attributes
    ----------
    granule : int
        Bytes: 64 KiB on the host, 2 MiB on a CUDA device. A period is a multiple of it.

    Raises
    ------
    DeviceMismatchError
        Memory of this library and device cannot be mapped twice.
    BackendError
        The system is not Linux, or CUDA's driver or bindings are not there.

    Notes
    -----
    Host memory is shared with a forked child, not copied: there the arena refuses to be used, as one of a device
    does, and arrays that the child still has show and change the memory of its parent. The system counts the
    pages once as shared memory of the process (Shmem, PSS), and twice where it counts mappings (RSS).

    A library cannot see that two addresses are one byte. On a CUDA device what is written at one address may be
    read at the other by later work on the same stream, or after an event, but not inside the same kernel (CUDA
    C++ Programming Guide, "Virtual Aliasing Support").
    """

    def __init__(self, library: str, device: str) -> None:
        self._driver, self._wrap = _host(library) if device == "cpu" else _cuda(library, device)
        self.granule = self._driver.granularity()

    def __call__(self, nbytes: int, *, device: Any = None, alignment: int = 256) -> Backend:
        """Return a backend over `nbytes` addresses, which are two periods.

        Raises
        ------
        ArgumentError
            `nbytes` is no multiple of twice the granule, or the alignment is larger than that.
        OutOfMemoryError, CaptureError, BackendError
            As `Mirror`.
        """
        if nbytes % (2 * self.granule) or alignment > self.granule:
            raise ArgumentError(
                f"memory that is mapped twice is 2 * {self.granule} bytes or a multiple of that, aligned to at most "
                f"{self.granule}; {nbytes} aligned to {alignment} were asked",
                nbytes=nbytes,
                granule=self.granule,
            )
        mirror = Mirror(self._driver, nbytes // 2)
        try:
            made = self._wrap(_Range(mirror))  # type: ignore[arg-type]  # address, nbytes and close are all it needs
        except BaseException:
            mirror.close()
            raise
        assert (made.address, made.nbytes) == (mirror.address, nbytes), "the range was copied"
        made.survives_fork = False
        return made


def _host(library: str) -> tuple[VmmDriver, Callable[[_Range], Backend]]:
    if library == "torch":
        torch_class = backends.load("torch")
        return SharedHostVmm(), lambda owner: torch_class.adopt_numpy(_numpy_bytes(owner))
    if library == "host":
        host_class = backends.load("host")
        return SharedHostVmm(), lambda owner: host_class(_numpy_bytes(owner))
    raise DeviceMismatchError(f"{library} has no host memory that can be mapped twice", device="cpu")


def _cuda(library: str, device: str) -> tuple[VmmDriver, Callable[[_Range], Backend]]:
    kind, _, number = device.partition(":")
    if kind != "cuda" or not number.isdecimal() or library not in ("torch", "cupy"):
        raise DeviceMismatchError(
            f"memory of {library} on {device} cannot be mapped twice, only on the CPU and on CUDA devices",
            device=device,
        )
    loaded = backends.load(library)

    def wrap_torch(owner: _Range) -> Backend:
        import torch

        # The device is given, for without it torch copies to the CPU (pytorch#54139).
        adopted: Backend = loaded.adopt(torch.as_tensor(_CudaArray(owner), device=device), owned=True)
        return adopted

    def wrap_cupy(owner: _Range) -> Backend:
        adopted: Backend = loaded.adopt_pointer(owner.address, owner.nbytes, owner, int(number))
        return adopted

    return _cuda_driver(int(number)), wrap_torch if library == "torch" else wrap_cupy
