"""Streams of ``cupy.cuda``."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from typing import Any

import cupy

from gpuarena.backends import _handles
from gpuarena.backends.base import Streams


class CupyStreams(Streams):
    """The streams of one device, as ``cupy.cuda.Stream`` objects.

    CuPy keeps a current stream for each thread and device. Its default is ``Stream.null``, one for all threads,
    or ``Stream.ptds`` where CUPY_CUDA_PER_THREAD_DEFAULT_STREAM is set: one object, another stream in each thread.

    Parameters
    ----------
    device_id : int
        The device's number.
    """

    def __init__(self, device_id: int) -> None:
        self._device_id = device_id

    def current(self) -> Any:
        """Return the current stream of this thread on the device."""
        return cupy.cuda.get_current_stream(self._device_id)

    def parse(self, stream: Any) -> Any:
        """Return a ``cupy.cuda.Stream`` for a stream of CuPy, torch or cuda.core, or for a handle.

        A stream made elsewhere is kept alive by the object returned; a bare integer keeps nothing alive.

        Raises
        ------
        ArgumentTypeError
            It is no stream.
        DeviceMismatchError
            It is a stream of another device.
        """
        _handles.refuse_other_device(stream, self._device_id)
        if isinstance(stream, cupy.cuda.Stream):
            return stream
        # ExternalStream does the same and is deprecated.
        return cupy.cuda.Stream.from_external(_Borrowed(_handles.handle_of(stream), stream))

    def key(self, stream: Any) -> Hashable:
        """Return the device and the handle, and the thread too for the per-thread default stream."""
        return _handles.key_of(self._device_id, stream.ptr)

    def is_thread_bound(self, stream: Any) -> bool:
        """Return whether it is the per-thread default stream."""
        return bool(stream.ptr == _handles.PER_THREAD)

    def record(self, stream: Any) -> Any:
        """Return a ``cupy.cuda.Event`` behind all work queued on `stream` so far."""
        with cupy.cuda.Device(self._device_id):
            return stream.record(cupy.cuda.Event(disable_timing=True))

    def wait(self, stream: Any, event: Any) -> None:
        """Let work queued on `stream` from now on wait for `event`; the host goes on."""
        with cupy.cuda.Device(self._device_id):
            stream.wait_event(event)

    def is_capturing(self, stream: Any) -> bool:
        """Return whether work on `stream` belongs to a capture, be it invalidated, or would break one.

        The last is so for the default stream while a stream that it waits for is captured; CuPy's streams are
        such unless they were made with ``non_blocking=True``.
        """
        with cupy.cuda.Device(self._device_id):
            try:
                return bool(stream.is_capturing())
            except cupy.cuda.runtime.CUDARuntimeError as error:
                if error.status == _handles.CAPTURE_IMPLICIT:
                    return True
                raise
            except RuntimeError:  # CuPy's own: an error has invalidated the capture, which is not ended yet
                return True

    @contextlib.contextmanager
    def using(self, stream: Any) -> Iterator[None]:
        """Make `stream` the current one inside the block."""
        with cupy.cuda.Device(self._device_id), stream:
            yield

    def synchronize(self, stream: Any) -> None:
        """Let the host wait for all work queued on `stream`."""
        with cupy.cuda.Device(self._device_id):
            stream.synchronize()

    def synchronize_device(self) -> None:
        """Let the host wait for all work queued on the device."""
        cupy.cuda.Device(self._device_id).synchronize()


class _Borrowed:
    """A handle in the form that CuPy takes, and the owner of the stream, which CuPy keeps alive with it."""

    def __init__(self, handle: int, owner: Any) -> None:
        self._handle = handle
        self._owner = owner

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle
