"""Stream handles: what they mean in the CUDA and HIP runtimes, and how to get them out of other libraries' objects."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Hashable
from typing import Any

from gpuarena.errors import ArgumentTypeError, DeviceMismatchError

#: The default stream goes by two handles: 0 and cudaStreamLegacy.
DEFAULT = 0
LEGACY = 1
#: cudaStreamPerThread and hipStreamPerThread: the one handle that is another stream in every thread.
PER_THREAD = 2

#: cudaErrorStreamCaptureImplicit, the same number in HIP: the answer to a question about the default stream while
#: a stream that it waits for is captured.
CAPTURE_IMPLICIT = 906

_numbers = itertools.count(1)
_thread = threading.local()


def handle_of(stream: Any) -> int:
    """Return the ``cudaStream_t`` of an integer or of an object with ``__cuda_stream__``.

    The protocol is that of cuda.core: a method that returns ``(0, handle)``.

    Raises
    ------
    ArgumentTypeError
        `stream` is neither, its handle is negative, or it speaks another version of the protocol.
    """
    handle = stream
    if callable(method := getattr(stream, "__cuda_stream__", None)):
        answer = method()
        if not isinstance(answer, tuple) or len(answer) != 2 or answer[0] != 0:
            raise ArgumentTypeError(
                f"__cuda_stream__ of {type(stream).__name__} returned {answer!r}; gpuarena knows (0, handle)"
            )
        handle = answer[1]
    if not isinstance(handle, int) or isinstance(handle, bool) or handle < 0:
        raise ArgumentTypeError(
            f"{stream!r} is no stream: give a stream of torch or CuPy, an object with __cuda_stream__, or the "
            f"integer handle of one"
        )
    return handle


def refuse_other_device(stream: Any, index: int) -> None:
    """Raise `DeviceMismatchError` when `stream` says that it belongs to another device than number `index`.

    An integer says nothing, and neither do the default streams of CuPy, which are those of the current device.
    """
    device = getattr(stream, "device", None)
    for owner, name in ((stream, "device_id"), (stream, "device_index"), (device, "device_id")):
        found = getattr(owner, name, None)  # of CuPy, torch and cuda.core, in this order
        if isinstance(found, int) and found >= 0:
            if found != index:
                raise DeviceMismatchError(
                    f"{stream!r} is a stream of device {found}, and the memory lies on device {index}",
                    device=found,
                )
            return


def key_of(index: int, handle: int) -> Hashable:
    """Return the identity of the stream that `handle` means on device number `index`, in this thread."""
    if handle == PER_THREAD:
        return index, handle, thread_number()
    return index, DEFAULT if handle == LEGACY else handle


def thread_number() -> int:
    """Return a number that no other thread has or will have.

    ``threading.get_ident`` gives the number of a thread that has ended to the next one, whose per-thread stream
    knows nothing of the first one's work.
    """
    try:
        number: int = _thread.number
    except AttributeError:
        number = _thread.number = next(_numbers)
    return number
