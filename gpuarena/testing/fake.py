"""A device made of host memory, which knows when its buffers are given back."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from gpuarena.backends.host import HostBackend
from gpuarena.errors import OutOfMemoryError

#: What a freed buffer is filled with.
POISON = 0xDD


class FakeDevice:
    """A `BackendFactory` over host memory.

    A buffer that nothing refers to any more is filled with `POISON`, and kept, so that a pointer left dangling
    shows wrong bytes instead of crashing.

    >>> from gpuarena import Arena
    >>> device = FakeDevice()
    >>> x = Arena(1024, backend=device).alloc(4, "uint8", fill=7).array
    >>> device.n_freed, int(x[0])
    (0, 7)
    >>> del x
    >>> device.n_freed
    1

    Attributes
    ----------
    limit : int or None
        Bytes that may be allocated at a time, a page more for each buffer included; more is out of memory.
    skew : int
        Every buffer starts this many bytes after a multiple of 4096, rounded down to the alignment asked for.
    n_allocated, n_released, n_freed : int
        Buffers handed out, calls of `Backend.release`, and buffers that nothing refers to any more.
    nbytes : int
        Bytes of the buffers that are not freed.
    """

    def __init__(self, limit: int | None = None, *, skew: int = 0) -> None:
        self.limit = limit
        self.skew = skew
        self.n_allocated = 0
        self.n_released = 0
        self.n_freed = 0
        self.nbytes = 0
        self._graveyard: list[bytearray] = []

    def __call__(self, nbytes: int, *, device: Any = None, alignment: int = 256) -> FakeBackend:
        """Allocate `nbytes`, the address a multiple of `alignment`; `device` is ignored."""
        period = max(4096, alignment)
        total = nbytes + period - 1
        if self.limit is not None and self.nbytes + total > self.limit:
            missing = self.nbytes + total - self.limit
            raise OutOfMemoryError(
                f"the fake device is short of {missing} bytes",
                requested=nbytes,
                aligned_offset=0,
                available=self.limit - self.nbytes,
                capacity=self.limit,
                missing=missing,
                label=None,
            )
        memory = bytearray(total)
        # Views of an array refer to it, not to the bytearray below it, so its end is the end of all of them.
        owner = np.frombuffer(memory, np.uint8)
        weakref.finalize(owner, self._free, memory).atexit = False
        self.n_allocated += 1
        self.nbytes += total
        skew = self.skew - self.skew % alignment
        start = (skew - owner.ctypes.data) % period
        return FakeBackend(owner[start : start + nbytes], self)

    def _free(self, memory: bytearray) -> None:
        memory[:] = bytes([POISON]) * len(memory)
        self._graveyard.append(memory)
        self.n_freed += 1
        self.nbytes -= len(memory)


class FakeBackend(HostBackend):
    """One buffer of a `FakeDevice`."""

    def __init__(self, buffer: np.ndarray[Any, np.dtype[np.uint8]], device: FakeDevice) -> None:
        super().__init__(buffer)
        self._counts = device

    def release(self) -> None:
        """Count the call, and drop the buffer."""
        self._counts.n_released += 1
        super().release()
