"""Streams of ``torch.cuda``, which is CUDA or ROCm."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager
from typing import Any

import torch

from gpuarena.backends import _handles
from gpuarena.backends.base import Streams
from gpuarena.errors import DeviceMismatchError

_cuda: Any = torch.cuda  # for the constructors, which torch does not annotate


class TorchStreams(Streams):
    """The streams of one device, as ``torch.cuda.Stream`` objects.

    torch keeps a current stream for each thread and device; its default stream is one for all threads. A
    per-thread default stream comes only from outside, by its handle.

    Parameters
    ----------
    device : torch.device
        A CUDA device; without an index it is the current one.
    """

    def __init__(self, device: torch.device) -> None:
        self._index = torch.cuda.current_device() if device.index is None else device.index

    def current(self) -> Any:
        """Return the current stream of this thread on the device, a new object each time."""
        return torch.cuda.current_stream(self._index)

    def parse(self, stream: Any) -> Any:
        """Return a ``torch.cuda.Stream`` for a stream of torch, CuPy or cuda.core, or for a handle.

        A stream made elsewhere is kept alive by the object returned; a bare integer keeps nothing alive.

        Raises
        ------
        ArgumentTypeError
            It is no stream.
        DeviceMismatchError
            It is a stream of another device.
        """
        if isinstance(stream, torch.Stream) and stream.device.type != "cuda":
            # A stream of another kind of device has a number too, which would be taken for ours.
            raise DeviceMismatchError(
                f"{stream!r} is a stream of {stream.device}, and the memory lies on cuda:{self._index}",
                device=str(stream.device),
            )
        _handles.refuse_other_device(stream, self._index)
        if isinstance(stream, torch.cuda.Stream):
            return stream
        if isinstance(stream, torch.Stream):  # from torch.accelerator, which has no class for each device
            made: Any = _cuda.Stream(
                stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
            )
            return made
        handle = _handles.handle_of(stream)
        if handle in (_handles.DEFAULT, _handles.LEGACY):
            # ExternalStream takes 0 for "make a new stream", and 1 for an id of its own streams.
            return torch.cuda.default_stream(self._index)
        external: Any = _cuda.ExternalStream(handle, device=self._index)
        external.gpuarena_owner = stream
        return external

    def key(self, stream: Any) -> Hashable:
        """Return the device and the handle, which two objects of one stream share."""
        return _handles.key_of(self._index, stream.cuda_stream)

    def is_thread_bound(self, stream: Any) -> bool:
        """Return whether it is the per-thread default stream."""
        return bool(stream.cuda_stream == _handles.PER_THREAD)

    def record(self, stream: Any) -> Any:
        """Return a ``torch.cuda.Event`` behind all work queued on `stream` so far."""
        with torch.cuda.device(self._index):
            event = _cuda.Event()
            event.record(stream)
            return event

    def wait(self, stream: Any, event: Any) -> None:
        """Let work queued on `stream` from now on wait for `event`; the host goes on."""
        with torch.cuda.device(self._index):
            stream.wait_event(event)

    def is_capturing(self, stream: Any) -> bool:
        """Return whether work on `stream` belongs to a capture, or would break one.

        The second is so for the default stream while a stream that it waits for is captured by another library;
        torch's own streams are none of those.
        """
        try:
            with torch.cuda.device(self._index):
                if stream == torch.cuda.current_stream(self._index):
                    return torch.cuda.is_current_stream_capturing()
                with torch.cuda.stream(stream):
                    return torch.cuda.is_current_stream_capturing()
        except torch.AcceleratorError as error:
            if getattr(error, "error_code", None) == _handles.CAPTURE_IMPLICIT:
                return True
            raise

    def current_is_capturing(self) -> bool:
        """Return whether the current stream is being captured, without making an object for it."""
        return torch.cuda.is_current_stream_capturing()

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context manager inside which `stream` is the current one."""
        entered: AbstractContextManager[Any] = torch.cuda.stream(stream)
        return entered

    def synchronize(self, stream: Any) -> None:
        """Let the host wait for all work queued on `stream`."""
        with torch.cuda.device(self._index):
            stream.synchronize()

    def synchronize_device(self) -> None:
        """Let the host wait for all work queued on the device."""
        torch.cuda.synchronize(self._index)
