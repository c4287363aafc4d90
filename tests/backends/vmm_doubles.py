"""Drivers for tests: one that checks the rules and fails on demand, and a stand-in for ``cuda.bindings.driver``."""

from __future__ import annotations

import ctypes
import enum
import os
import threading

from gpuarena.backends._vmm import DriverError
from gpuarena.backends._vmm_host import HostVmm

CALLS = ("granularity", "reserve", "create", "map", "set_access", "unmap", "release", "free", "is_capturing")
_libc = ctypes.CDLL(None, use_errno=True)


def peek(address: int, nbytes: int = 1) -> bytes | None:
    """The bytes at an address, or None where they cannot be read: the kernel looks, so nothing crashes."""
    read_end, write_end = os.pipe()
    try:
        n_written = _libc.write(write_end, ctypes.c_void_p(address), ctypes.c_size_t(nbytes))
        return os.read(read_end, nbytes) if n_written == nbytes else None
    finally:
        os.close(read_end)
        os.close(write_end)


def poke(address: int, values: bytes) -> None:
    assert peek(address) is not None, "not mapped"
    ctypes.memmove(address, values, len(values))


class CheckedVmm:
    """A driver over host memory that insists on CUDA's rules and counts what is out.

    `limit` is its memory in bytes. Every call is noted in `log`; `fail` makes later calls fail.
    """

    def __init__(
        self, granule: int | None = None, limit: int | None = None, host: HostVmm | None = None
    ) -> None:
        self._host = host or HostVmm()
        self._host_handles: dict[int, int] = {}  # the system gives the same number again
        self.granule = granule or self._host.granularity()
        self.limit = limit
        self.capturing = False
        self.log: list[str] = []
        self.reserved: dict[int, int] = {}
        self._whole: dict[int, tuple[int, int]] = {}  # what lies around a reserved range, too
        self.mapped: dict[int, int] = {}
        self.accessible: set[int] = set()
        self.handles: dict[int, int] = {}
        self.backing: dict[int, int] = {}  # address of a mapping to its handle
        self._faults: list[tuple[str | None, int, bool]] = []
        self._n_created = 0

    def fail(self, *, at: int = 1, call: str | None = None, out_of_memory: bool = False) -> None:
        """Let the `at`-th call from now on fail, counting those named `call`, or all if None."""
        self._faults.append((call, at, out_of_memory))

    def forgive(self) -> None:
        self._faults = []

    @property
    def used(self) -> int:
        """Bytes of memory that somebody still holds, by a handle or by a mapping."""
        sizes = {handle: self.mapped[address] for address, handle in self.backing.items()}
        return sum({**sizes, **self.handles}.values())

    def is_empty(self) -> bool:
        return not (self.reserved or self.mapped or self.handles)

    def _enter(self, call: str) -> None:
        self.log.append(call)
        due = []
        counted = []
        for name, at, out_of_memory in self._faults:
            at -= name in (None, call)
            (counted if at else due).append((name, at, out_of_memory))
        self._faults = counted
        if due:
            raise DriverError(call, "failed on demand", out_of_memory=due[0][2])

    def granularity(self) -> int:
        self._enter("granularity")
        return self.granule

    def reserve(self, nbytes: int) -> int:
        self._enter("reserve")
        assert nbytes > 0
        assert nbytes % self.granule == 0
        # The host aligns to its own granule, and behind the range lies a granule that nobody can read.
        start = self._host.reserve(nbytes + 2 * self.granule)
        address = -(-start // self.granule) * self.granule
        self._whole[address] = (start, nbytes + 2 * self.granule)
        self.reserved[address] = nbytes
        return address

    def create(self, nbytes: int) -> int:
        self._enter("create")
        assert nbytes > 0
        assert nbytes % self.granule == 0
        if self.limit is not None and self.used + nbytes > self.limit:
            raise DriverError("create", "the limit", out_of_memory=True)
        handle = self._n_created = self._n_created + 1
        self._host_handles[handle] = self._host.create(nbytes)
        self.handles[handle] = nbytes
        return handle

    def map(self, address: int, nbytes: int, handle: int) -> None:
        self._enter("map")
        assert self.handles[handle] == nbytes, "a handle is mapped whole"
        assert any(
            start <= address and address + nbytes <= start + size for start, size in self.reserved.items()
        )
        assert all(
            address + nbytes <= start or start + size <= address for start, size in self.mapped.items()
        )
        self._host.map(address, nbytes, self._host_handles[handle])
        self.mapped[address] = nbytes
        self.backing[address] = handle

    def set_access(self, address: int, nbytes: int) -> None:
        self._enter("set_access")
        assert self.mapped[address] == nbytes
        self._host.set_access(address, nbytes)
        self.accessible.add(address)

    def unmap(self, address: int, nbytes: int) -> None:
        self._enter("unmap")
        assert self.mapped[address] == nbytes, "not one whole mapping"
        self._host.unmap(address, nbytes)
        del self.mapped[address], self.backing[address]
        self.accessible.discard(address)

    def release(self, handle: int) -> None:
        self._enter("release")
        self._host.release(self._host_handles.pop(handle))
        del self.handles[handle]

    def free(self, address: int, nbytes: int) -> None:
        self._enter("free")
        assert self.reserved[address] == nbytes, "not what was reserved"
        assert not any(address <= start < address + nbytes for start in self.mapped), "still mapped"
        self._host.free(*self._whole.pop(address))
        del self.reserved[address]

    def is_capturing(self) -> bool:
        self._enter("is_capturing")
        return self.capturing


class _Struct:
    """Refuses fields that the real one has not."""

    def __init__(self, **fields):
        self.__dict__.update(fields)

    def __setattr__(self, name, value):
        assert name in self.__dict__, name
        self.__dict__[name] = value


def _enum(name: str, **members: int):
    return enum.IntEnum(name, members)


class FakeCuda:
    """The functions of ``cuda.bindings.driver`` that the package calls, over a `CheckedVmm`.

    `fail` maps a function's name to the result that it returns. The numbers are those of cuda.h.
    """

    CUresult = _enum(
        "CUresult",
        CUDA_SUCCESS=0,
        CUDA_ERROR_INVALID_VALUE=1,
        CUDA_ERROR_OUT_OF_MEMORY=2,
        CUDA_ERROR_INVALID_DEVICE=101,
        CUDA_ERROR_ILLEGAL_ADDRESS=700,
        CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED=900,
        CUDA_ERROR_STREAM_CAPTURE_IMPLICIT=906,
    )
    CUdevice_attribute = _enum(
        "CUdevice_attribute", CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED=102
    )
    CUmemLocationType = _enum("CUmemLocationType", CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAllocationType = _enum("CUmemAllocationType", CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemAccess_flags = _enum("CUmemAccess_flags", CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUmemAllocationGranularity_flags = _enum(
        "CUmemAllocationGranularity_flags", CU_MEM_ALLOC_GRANULARITY_RECOMMENDED=1
    )
    CUstreamCaptureStatus = _enum(
        "CUstreamCaptureStatus", CU_STREAM_CAPTURE_STATUS_NONE=0, CU_STREAM_CAPTURE_STATUS_ACTIVE=1
    )
    CUstream = int

    def __init__(
        self,
        *,
        n_devices: int = 2,
        supported: bool = True,
        limit: int | None = None,
        host: HostVmm | None = None,
    ) -> None:
        self.memory = CheckedVmm(2 << 20, limit, host)
        self.n_devices = n_devices
        self.supported = supported
        self.legacy_status = self.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
        self.fail: dict[str, int] = {}
        self.log: list[str] = []
        self.handle_structs: list[object] = []
        self._threads = threading.local()
        self.n_retained: dict[int, int] = {}
        self.streams_asked: list[int] = []

    @property
    def stack(self) -> list[str]:
        """The contexts of the calling thread."""
        return self._threads.__dict__.setdefault("stack", [])

    def _enter(self, name: str, device: int | None = None):
        """Note the call; return the failure that is due. Only setup and the stack itself work without a context."""
        self.log.append(name)
        if name not in _WITHOUT_CONTEXT:
            assert self.stack, f"{name} without a context on this thread"
            assert device is None or self.stack[-1] == f"context {device}"
        return self.CUresult(self.fail.get(name, 0))

    def _do(self, name, device, action):
        result = self._enter(name, device)
        if result:
            return (result,) if name in _RETURN_NOTHING else (result, None)
        try:
            value = action()
        except DriverError:
            return self.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
        return (result,) if name in _RETURN_NOTHING else (result, value)

    def _check_location(self, location) -> int:
        assert location.type == 1
        return location.id

    def CUmemAllocationProp(self):  # noqa: N802
        flags = _Struct(compressionType=0, gpuDirectRDMACapable=0, usage=0)
        return _Struct(type=0, requestedHandleTypes=0, location=_Struct(type=0, id=-1), allocFlags=flags)

    def CUmemAccessDesc(self):  # noqa: N802
        return _Struct(location=_Struct(type=0, id=-1), flags=0)

    def cuInit(self, flags):  # noqa: N802
        assert flags == 0
        return self._do("cuInit", None, lambda: None)

    def cuDeviceGet(self, ordinal):  # noqa: N802
        if not 0 <= ordinal < self.n_devices:
            return self.CUresult.CUDA_ERROR_INVALID_DEVICE, None
        return self._do("cuDeviceGet", None, lambda: ordinal)

    def cuDeviceGetAttribute(self, attribute, device):  # noqa: N802
        assert attribute == 102
        return self._do("cuDeviceGetAttribute", None, lambda: int(self.supported))

    def cuDevicePrimaryCtxRetain(self, device):  # noqa: N802
        self.n_retained[device] = self.n_retained.get(device, 0) + 1
        return self._do("cuDevicePrimaryCtxRetain", None, lambda: f"context {device}")

    def cuCtxPushCurrent(self, context):  # noqa: N802
        return self._do("cuCtxPushCurrent", None, lambda: self.stack.append(context))

    def cuCtxPopCurrent(self):  # noqa: N802
        return self._do("cuCtxPopCurrent", None, lambda: self.stack.pop())

    def cuCtxSynchronize(self):  # noqa: N802
        return self._do("cuCtxSynchronize", None, lambda: None)

    def cuStreamIsCapturing(self, stream):  # noqa: N802
        self.streams_asked.append(stream)
        return self._do("cuStreamIsCapturing", None, lambda: self.legacy_status)

    def cuMemGetAllocationGranularity(self, properties, option):  # noqa: N802
        assert option == 1
        device = self._check_location(properties.location)
        return self._do("cuMemGetAllocationGranularity", device, self.memory.granularity)

    def cuMemAddressReserve(self, nbytes, alignment, address, flags):  # noqa: N802
        assert (alignment & (alignment - 1), address, flags) == (0, 0, 0)
        return self._do("cuMemAddressReserve", None, lambda: self.memory.reserve(nbytes))

    def cuMemCreate(self, nbytes, properties, flags):  # noqa: N802
        assert (properties.type, properties.requestedHandleTypes, flags) == (1, 0, 0)
        device = self._check_location(properties.location)
        return self._do("cuMemCreate", device, lambda: self.memory.create(nbytes))

    def cuMemMap(self, address, nbytes, offset, handle, flags):  # noqa: N802
        assert (offset, flags) == (0, 0)
        return self._do("cuMemMap", None, lambda: self.memory.map(address, nbytes, handle))

    def cuMemSetAccess(self, address, nbytes, descriptors, count):  # noqa: N802
        (descriptor,) = descriptors
        assert (count, descriptor.flags) == (1, 3)
        device = self._check_location(descriptor.location)
        return self._do("cuMemSetAccess", device, lambda: self.memory.set_access(address, nbytes))

    def cuMemUnmap(self, address, nbytes):  # noqa: N802
        return self._do("cuMemUnmap", None, lambda: self.memory.unmap(address, nbytes))

    def cuMemRelease(self, handle):  # noqa: N802
        return self._do("cuMemRelease", None, lambda: self.memory.release(handle))

    def cuMemAddressFree(self, address, nbytes):  # noqa: N802
        return self._do("cuMemAddressFree", None, lambda: self.memory.free(address, nbytes))


_WITHOUT_CONTEXT = {
    "cuInit",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuCtxPushCurrent",
    "cuCtxPopCurrent",
}
_RETURN_NOTHING = {
    "cuInit",
    "cuCtxPushCurrent",
    "cuCtxSynchronize",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuMemRelease",
    "cuMemAddressFree",
}
