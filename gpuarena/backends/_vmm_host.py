"""Host memory that is backed page by page, by the system calls of Linux."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import mmap
import os
import sys
from typing import Any

from gpuarena._bump import align_up
from gpuarena.backends._vmm import DriverError
from gpuarena.errors import BackendError

#: Larger than a page, so that a chunk is worth its system calls.
_GRANULE = max(64 << 10, mmap.PAGESIZE)
#: Linux' own number (asm-generic/mman-common.h), where the module lacks the name: Python added it late.
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_MAP_FIXED = 0x10
_PROT_NONE = 0
_MADV_DONTNEED = 4
_MAP_FAILED = ctypes.c_void_p(-1).value


class HostVmm:
    """The `VmmDriver` of anonymous private memory; fresh memory is zero, and a forked child has a copy.

    A reservation costs no memory, whatever its size. Committed pages become resident when they are first written,
    as all memory of Linux, so running out may show only then; where overcommitting is off (``vm.overcommit_memory``
    is 2) `set_access` refuses.

    Raises
    ------
    BackendError
        The system is not Linux.
    """

    def __init__(self) -> None:
        if sys.platform != "linux":
            raise BackendError(
                f"host memory that grows in place needs Linux' mmap, and this is {sys.platform}; use backend='host', "
                f"whose pages the system commits when they are first written",
                backend="virtual",
            )
        libc = ctypes.CDLL(None, use_errno=True)
        address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self._mmap = _function(libc, "mmap", address, address, size, number, number, number, ctypes.c_long)
        self._munmap = _function(libc, "munmap", number, address, size)
        self._mprotect = _function(libc, "mprotect", number, address, size, number)
        self._madvise = _function(libc, "madvise", number, address, size, number)
        self._handles = itertools.count(1)

    def granularity(self) -> int:
        """Return 64 KiB, or the page size where that is larger."""
        return _GRANULE

    def reserve(self, nbytes: int) -> int:
        """Map addresses that cannot be accessed, at a multiple of the granularity."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        spare = _GRANULE - mmap.PAGESIZE  # the system aligns to pages only
        start = self._mmap(None, nbytes + spare, _PROT_NONE, flags, -1, 0)
        if start == _MAP_FAILED:
            raise _last_error("mmap")
        address = align_up(start, _GRANULE)
        for at, stop in ((start, address), (address + nbytes, start + nbytes + spare)):
            if stop > at and self._munmap(at, stop - at):
                error = _last_error("munmap")
                self._munmap(start, nbytes + spare)
                raise error
        return int(address)

    def create(self, nbytes: int) -> int:
        """Return a number: pages of the host have no handle, and come with `set_access`."""
        return next(self._handles)

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """Do nothing: the pages are mapped since `reserve`, without access."""

    def set_access(self, address: int, nbytes: int) -> None:
        """Let the pages be read and written."""
        self._check("mprotect", self._mprotect(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE))

    def unmap(self, address: int, nbytes: int) -> None:
        """Take the access away, and give the pages back to the system."""
        self._check("mprotect", self._mprotect(address, nbytes, _PROT_NONE))
        if self._madvise(address, nbytes, _MADV_DONTNEED):
            error = _last_error("madvise")  # such as for memory locked by mlockall
            self._mprotect(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE)
            raise error

    def release(self, handle: int) -> None:
        """Do nothing."""

    def free(self, address: int, nbytes: int) -> None:
        """Unmap the addresses."""
        self._check("munmap", self._munmap(address, nbytes))

    def is_capturing(self) -> bool:
        """Return False: the host has no graphs."""
        return False

    @staticmethod
    def _check(call: str, status: int) -> None:
        if status:
            raise _last_error(call)


class SharedHostVmm(HostVmm):
    """The `VmmDriver` of shared host memory, whose handles can be mapped more than once; fresh memory is zero.

    A handle is the descriptor of a file in memory (memfd_create). A forked child shares what is mapped.
    """

    def create(self, nbytes: int) -> int:
        """Return the descriptor of a new file of `nbytes`, whose pages come when they are first written."""
        try:
            handle = os.memfd_create("gpuarena", os.MFD_CLOEXEC)
        except OSError as error:  # such as too many open files
            raise _error("memfd_create", error.errno) from error
        try:
            os.ftruncate(handle, nbytes)
        except OSError as error:
            os.close(handle)
            raise _error("ftruncate", error.errno) from error
        return handle

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """Put the file in the place of reserved addresses, without access."""
        self._replace(address, nbytes, mmap.MAP_SHARED, handle)

    def unmap(self, address: int, nbytes: int) -> None:
        """Put mere addresses in the place of the file; its pages go with its last mapping."""
        self._replace(address, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)

    def release(self, handle: int) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):  # it is closed even so, and the number may be somebody else's soon
            os.close(handle)

    def _replace(self, address: int, nbytes: int, flags: int, file: int) -> None:
        if self._mmap(address, nbytes, _PROT_NONE, flags | _MAP_FIXED, file, 0) == _MAP_FAILED:
            raise _last_error("mmap")


def _function(libc: ctypes.CDLL, name: str, returns: Any, *takes: Any) -> Any:
    function = getattr(libc, name)
    function.restype, function.argtypes = returns, takes
    return function


def _last_error(call: str) -> DriverError:
    return _error(call, ctypes.get_errno())


def _error(call: str, number: int | None) -> DriverError:
    return DriverError(call, os.strerror(number or 0), out_of_memory=number == errno.ENOMEM)
