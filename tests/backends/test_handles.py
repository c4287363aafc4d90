from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from gpuarena.backends import _handles
from gpuarena.errors import ArgumentTypeError, DeviceMismatchError


def speaks(answer):
    """An object whose ``__cuda_stream__`` returns `answer`."""
    return type("Foreign", (), {"__cuda_stream__": lambda self: answer})()


def test_a_handle_is_an_integer_or_comes_by_the_protocol():
    assert _handles.handle_of(0) == 0
    assert _handles.handle_of(2**63) == 2**63
    assert _handles.handle_of(speaks((0, 4096))) == 4096


@pytest.mark.parametrize(
    "wrong",
    [None, True, -1, 1.0, "16", object(), speaks((1, 16)), speaks((0, 16, 0)), speaks(16), speaks((0, None))],
)
def test_what_is_no_stream_is_refused(wrong):
    with pytest.raises(ArgumentTypeError, match="stream"):
        _handles.handle_of(wrong)


@pytest.mark.parametrize(
    "stream",
    [
        SimpleNamespace(device_id=1),
        SimpleNamespace(device_index=1, device=SimpleNamespace(index=1)),
        SimpleNamespace(device=SimpleNamespace(device_id=1)),
    ],
    ids=["cupy", "torch", "cuda.core"],
)
def test_a_stream_that_names_its_device_belongs_there(stream):
    _handles.refuse_other_device(stream, 1)
    with pytest.raises(DeviceMismatchError, match="device 1, and the memory lies on device 0") as caught:
        _handles.refuse_other_device(stream, 0)
    assert caught.value.device == 1


def test_what_names_no_device_is_taken_anywhere():
    for stream in (16, object(), SimpleNamespace(device_id=-1), SimpleNamespace(device_id=None)):
        _handles.refuse_other_device(stream, 3)


def test_the_default_stream_has_two_handles_and_one_key():
    assert _handles.key_of(0, 0) == _handles.key_of(0, 1) != _handles.key_of(1, 0)
    assert len({_handles.key_of(0, handle) for handle in (0, 2, 3, 16)}) == 4


def test_the_key_of_the_per_thread_stream_is_never_used_again():
    keys = [_handles.key_of(0, _handles.PER_THREAD)]
    for _ in range(10):  # the system gives the number of a thread that has ended to the next one
        thread = threading.Thread(target=lambda: keys.append(_handles.key_of(0, _handles.PER_THREAD)))
        thread.start()
        thread.join()
    assert len(set(keys)) == len(keys)
    assert _handles.key_of(0, _handles.PER_THREAD) == keys[0]
