"""What the core asks of a backend."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import numpy as np

from gpuarena._index import Layout
from gpuarena.dtypes import DType


class Streams(Protocol):
    """The streams and events of a device, for memory that is reused in stream order.

    A stream is the library's own object. Nothing here waits on the host but `synchronize` and
    `synchronize_device`.
    """

    def current(self) -> Any:
        """Return the stream that the library queues work on now, in this thread."""

    def parse(self, stream: Any) -> Any:
        """Return a stream of this library for one that the user gave, or raise `ArgumentTypeError`.

        The library's own objects, integers (a handle) and anything with ``__cuda_stream__`` are streams.
        """

    def key(self, stream: Any) -> Hashable:
        """Return the stream's identity: equal for two objects of one stream.

        A per-thread default stream is another stream in every thread, so there the thread is part of the key.
        """

    def is_thread_bound(self, stream: Any) -> bool:
        """Return whether the object means another stream in another thread (a per-thread default stream)."""

    def record(self, stream: Any) -> Any:
        """Return an event behind all work queued on `stream` so far."""

    def wait(self, stream: Any, event: Any) -> None:
        """Let work queued on `stream` from now on wait for `event`; the host goes on."""

    def is_capturing(self, stream: Any) -> bool:
        """Return whether work on `stream` is being captured into a graph."""

    def current_is_capturing(self) -> bool:
        """Return whether work on the current stream is being captured; asked at every allocation."""
        return self.is_capturing(self.current())

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context manager inside which `stream` is the current one."""

    def synchronize(self, stream: Any) -> None:
        """Let the host wait for all work queued on `stream`."""

    def synchronize_device(self) -> None:
        """Let the host wait for all work queued on the device."""


@runtime_checkable
class Backend(Protocol):
    """One buffer, and the array library that looks into it.

    Offsets are bytes from `address`; the core has checked that they lie inside, that `dtype` is supported and
    that addresses are multiples of its alignment. Nothing here knows of regions or checkpoints.

    A class that inherits from this one gets the methods that most backends share.
    """

    name: str
    """Name of the array library: ``"host"`` (NumPy), ``"torch"``, ``"cupy"``."""
    device: str
    """Where the memory lies, in the library's own words: ``"cpu"``, ``"cuda:0"``."""
    address: int
    """Address of the first byte; it never changes."""
    nbytes: int
    """Bytes that may be used from `address` on."""
    negative_strides: bool
    """Whether the library can express a view that runs backwards."""
    growable: bool = False
    """Whether memory must be committed before it is used; see `commit`."""
    survives_fork: bool = True
    """Whether a forked child may use the memory."""
    streams: Streams | None = None
    """The device's streams, or None where all work is done when a call returns."""

    def address_of(self, offset: int) -> int:
        """Return the address of a byte."""
        return self.address + offset

    def check_dtype(self, dtype: DType) -> None:
        """Raise `DTypeError` when the library has no arrays of `dtype`."""

    def root(self, offset: int, shape: tuple[int, ...], dtype: DType) -> Any:
        """Return a fresh contiguous array on the bytes from `offset` on."""

    def tracked_root(self, offset: int, shape: tuple[int, ...], dtype: DType) -> tuple[Any, Any]:
        """Return an array as `root` does, and an object that lives while it or any view of it does."""

    def prototype(self, offset: int, shape: tuple[int, ...], dtype: DType) -> Any:
        """Return an array as `root` does, that is only ever given to `again`."""
        return self.root(offset, shape, dtype)

    def again(self, prototype: Any) -> Any:
        """Return another fresh root array on the bytes of a prototype."""

    def view(self, root: Any, layout: Layout, dtype: DType) -> Any:
        """Return a view of a region's `root` array: other strides, other dtype, offset from `address`."""

    def write(self, array: Any, value: Any) -> None:
        """Assign `value` to all of `array`, broadcasting; raise before writing when it cannot be done."""

    def invalidate(self, arrays: Sequence[Any]) -> None:
        """Note that the memory of these root arrays goes to somebody else."""

    def viewer(self, library: str) -> Backend:
        """Return another library's backend over the same bytes; `DeviceMismatchError` where it cannot reach them."""

    def release(self) -> None:
        """Drop this object's hold on the buffer; arrays made of it keep it alive."""

    # -- bytes, for poison, guard zones and spilling ------------------------------------------------------------

    def fill_bytes(self, start: int, stop: int, byte: int) -> None:
        """Set the bytes from `start` to `stop`; on a device in the order of the current stream."""
        return None

    def find_other(self, start: int, stop: int, byte: int) -> int | None:
        """Return the offset of the first byte from `start` to `stop` that is not `byte`; the host waits for it."""
        return None

    def read_bytes(self, start: int, stop: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return a copy of the bytes on the host, pinned where the library can; the host waits for it."""

    def write_bytes(self, start: int, values: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        """Copy host bytes in from `start` on; `values` may be changed once this returns."""

    # -- growable memory ----------------------------------------------------------------------------------------

    @property
    def committed(self) -> int:
        """Bytes from the start that are backed by memory now."""
        return self.nbytes

    def commit(self, stop: int) -> None:
        """Back the bytes up to `stop` with memory; raise `OutOfMemoryError`, and change nothing, when there is none."""
        return None

    def trim(self, stop: int) -> int:
        """Give back memory above `stop`, as far as whole chunks allow; return the bytes given back."""
        return 0


class BackendFactory(Protocol):
    """Anything that makes a backend, such as a class's ``allocate``."""

    def __call__(self, nbytes: int, *, device: Any, alignment: int) -> Backend:
        """Allocate `nbytes` on `device`, the address a multiple of `alignment`."""
