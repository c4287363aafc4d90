"""A device with streams, for tests of code that must not race: kernels run late, and unordered ones are found.

`StreamedFakeDevice` is a backend whose memory is written late and in stream order, as on a GPU; `SimulatedDevice`
is its streams, kernels, events and captures alone, and `FakeStreams` is what the arena sees of them.

>>> from gpuarena import Arena
>>> device = StreamedFakeDevice()
>>> region = Arena(1024, backend=device).alloc(4, "uint8", fill=7)
>>> device.launch(device.stream("side"), reads=byte_ranges(region.array), name="use")
>>> device.races  # `side` did not wait for the stream that fills the region  # doctest: +ELLIPSIS
[<Race of 'write' on 'default' and 'use' on 'side' over bytes 0x... to 0x...>]
>>> device.synchronize()
>>> region.array.tolist()
[7, 7, 7, 7]
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from gpuarena._index import check_broadcast
from gpuarena.backends import _handles
from gpuarena.backends.base import Streams
from gpuarena.backends.host import as_host_array
from gpuarena.errors import ArgumentTypeError, DeviceMismatchError
from gpuarena.testing._capture import FakeCaptureError, FakeGraph
from gpuarena.testing._queues import FakeEvent, FakeKernel, Race
from gpuarena.testing._simulator import FakeStream, SimulatedDevice
from gpuarena.testing.fake import FakeBackend, FakeDevice

__all__ = [
    "FakeCaptureError",
    "FakeEvent",
    "FakeGraph",
    "FakeKernel",
    "FakeStream",
    "FakeStreams",
    "Race",
    "SimulatedDevice",
    "StreamedFakeBackend",
    "StreamedFakeDevice",
    "byte_ranges",
]


class FakeStreams(Streams):
    """The streams of a `SimulatedDevice`, as the core asks for them; see `Streams` for what each method does."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device

    def current(self) -> FakeStream:
        """Return a new object for the current stream of this thread."""
        return self._device.current_stream()

    def parse(self, stream: Any) -> FakeStream:
        """Return a `FakeStream` for one, for a handle, or for an object with ``__cuda_stream__``.

        Raises
        ------
        ArgumentTypeError
            It is no stream, or the device has none with this handle.
        DeviceMismatchError
            It is a `FakeStream` of another device.
        """
        if isinstance(stream, FakeStream):
            if stream.device is not self._device:
                raise DeviceMismatchError(
                    f"{stream!r} is a stream of another device", device=stream.device.index
                )
            return stream
        found = self._device.stream_of(_handles.handle_of(stream))
        if found is None:
            raise ArgumentTypeError(f"the simulated device has no stream with the handle of {stream!r}")
        return found

    def key(self, stream: FakeStream) -> Hashable:
        """Return the device and the handle, and the thread too for the per-thread stream."""
        return _handles.key_of(self._device.index, stream.handle)

    def is_thread_bound(self, stream: FakeStream) -> bool:
        """Return whether it is the per-thread stream."""
        return stream.handle == _handles.PER_THREAD

    def record(self, stream: FakeStream) -> FakeEvent:
        """Return an event behind all work queued on `stream` so far."""
        return self._device.record(stream)

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        """Let work queued on `stream` from now on wait for `event`."""
        self._device.wait(stream, event)

    def is_capturing(self, stream: FakeStream) -> bool:
        """Return whether work on `stream` goes into a graph."""
        return self._device.is_capturing(stream)

    def using(self, stream: FakeStream) -> AbstractContextManager[Any]:
        """Return a context manager inside which `stream` is the current one."""
        return self._device.use(stream)

    def synchronize(self, stream: FakeStream) -> None:
        """Let the host wait for all work queued on `stream`."""
        self._device.synchronize(stream)

    def synchronize_device(self) -> None:
        """Let the host wait for all work queued on the device."""
        self._device.synchronize()


class StreamedFakeDevice(SimulatedDevice, FakeDevice):
    """A `BackendFactory` over host memory that is written as a GPU's is: later, in the order of a stream.

    The arrays are NumPy's and show what has run so far, so call `synchronize` before looking at them.

    Parameters
    ----------
    limit, skew
        As for `FakeDevice`.
    index : int
        The device's number: arenas on it have the device ``"fake:0"``.
    """

    def __init__(self, limit: int | None = None, *, skew: int = 0, index: int = 0) -> None:
        SimulatedDevice.__init__(self, index)
        FakeDevice.__init__(self, limit, skew=skew)
        self._buffers: list[tuple[int, int]] = []  # addresses, which no other buffer gets later

    def __call__(self, nbytes: int, *, device: Any = None, alignment: int = 256) -> StreamedFakeBackend:
        """Allocate `nbytes`, the address a multiple of `alignment`; `device` is ignored."""
        memory = super().__call__(nbytes, device=device, alignment=alignment)
        self._buffers.append((memory.address, memory.address + memory.nbytes))
        return StreamedFakeBackend(memory._bytes, self)

    def holds(self, array: np.ndarray[Any, Any]) -> bool:
        """Return whether an array lies in memory of this device."""
        low, high = np.lib.array_utils.byte_bounds(array)
        return any(start <= low and high <= stop for start, stop in self._buffers)


class StreamedFakeBackend(FakeBackend):
    """One buffer of a `StreamedFakeDevice`.

    Everything that writes is a kernel on the current stream; host values are copied when it is launched. What
    returns contents is a kernel that the host waits for.
    """

    survives_fork = False

    def __init__(self, buffer: np.ndarray[Any, np.dtype[np.uint8]], device: StreamedFakeDevice) -> None:
        super().__init__(buffer, device)
        self._device = device
        self.device = f"fake:{device.index}"
        self.streams = FakeStreams(device)

    def write(self, array: Any, value: Any) -> None:
        """Queue the assignment of `value`; what cannot be assigned raises here."""
        values = as_host_array(value, array.dtype)
        check_broadcast(values.shape, array.shape)
        reads: list[tuple[int, int]] = []
        if self._device.holds(values):
            reads = byte_ranges(values)  # read when the kernel runs, by what is there then
        else:
            values = values.astype(array.dtype)
        self._launch("write", lambda: array.__setitem__(..., values), byte_ranges(array), reads)

    def fill_bytes(self, start: int, stop: int, byte: int) -> None:
        """Queue the fill."""
        target = self._bytes[start:stop]
        self._launch("fill_bytes", lambda: target.fill(byte), byte_ranges(target))

    def write_bytes(self, start: int, values: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        """Queue the copy of the values as they are now."""
        target, copy = self._bytes[start : start + values.nbytes], values.copy()
        self._launch("write_bytes", lambda: np.copyto(target, copy), byte_ranges(target))

    def find_other(self, start: int, stop: int, byte: int) -> int | None:
        """Return the offset of the first byte that is not `byte`; the host waits."""
        find = super().find_other
        found: int | None = self._device.host_read(
            lambda: find(start, stop, byte), reads=byte_ranges(self._bytes[start:stop])
        )
        return found

    def read_bytes(self, start: int, stop: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return a copy of the bytes; the host waits."""
        source = self._bytes[start:stop]
        values: np.ndarray[Any, np.dtype[np.uint8]] = self._device.host_read(
            source.copy, reads=byte_ranges(source)
        )
        return values

    def _launch(
        self, name: str, run: Any, writes: list[tuple[int, int]], reads: list[tuple[int, int]] | None = None
    ) -> None:
        stream = self._device.current_stream()
        self._device.launch(stream, reads=reads or (), writes=writes, run=run, name=name)


def byte_ranges(array: np.ndarray[Any, Any]) -> list[tuple[int, int]]:
    """Return the addresses of an array's elements, for `SimulatedDevice.launch`.

    >>> x = np.zeros((2, 4), "uint8")
    >>> [(start - x.ctypes.data, stop - x.ctypes.data) for start, stop in byte_ranges(x[:, 1:3])]
    [(1, 3), (5, 7)]
    """
    if array.size == 0:
        return []
    run = array.itemsize
    outer: list[tuple[int, int]] = []  # (dimension, stride in bytes) of what is not one run of bytes
    for dim, stride in sorted(zip(array.shape, array.strides, strict=True), key=lambda pair: abs(pair[1])):
        if stride == run and not outer:
            run *= dim
        elif dim > 1 and stride:
            outer.append((dim, stride))
    starts = np.array([array.ctypes.data], np.int64)
    for dim, stride in outer:
        starts = (starts[:, None] + np.arange(dim) * stride).reshape(-1)
    return [(start, start + run) for start in np.unique(starts).tolist()]
