from __future__ import annotations

import sys
import threading
import types

import pytest
from vmm_doubles import FakeCuda, peek, poke

from gpuarena import errors
from gpuarena.backends import _vmm, _vmm_cuda
from gpuarena.backends._vmm import Reservation, settle_postponed
from gpuarena.backends._vmm_cuda import CudaVmm

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

G = 2 << 20  # the granule of CUDA devices
OUT_OF_MEMORY, ILLEGAL_ADDRESS, UNSUPPORTED, IMPLICIT = 2, 700, 900, 906


@pytest.fixture
def cuda():
    return FakeCuda()


def calls(cuda):
    """What was called since the last time, without the context being pushed and popped."""
    names = [name for name in cuda.log if name not in ("cuCtxPushCurrent", "cuCtxPopCurrent")]
    cuda.log.clear()
    return names


def test_the_calls_come_in_order(cuda):
    vmm = CudaVmm(1, cuda)
    assert calls(cuda) == [
        *("cuInit", "cuDeviceGet", "cuDeviceGetAttribute"),
        *("cuDevicePrimaryCtxRetain", "cuMemGetAllocationGranularity"),
    ]
    r = Reservation(vmm, 10 * G + 1)
    assert calls(cuda) == ["cuMemAddressReserve"]
    r.commit(1)
    assert calls(cuda) == ["cuStreamIsCapturing", "cuMemCreate", "cuMemMap", "cuMemRelease", "cuMemSetAccess"]
    r.commit(3 * G)
    calls(cuda)
    assert r.trim(G) == 2 * G
    assert calls(cuda) == ["cuStreamIsCapturing", "cuCtxSynchronize", "cuMemUnmap"]
    r.close()
    assert calls(cuda) == ["cuStreamIsCapturing", "cuCtxSynchronize", "cuMemUnmap", "cuMemAddressFree"]
    assert cuda.memory.is_empty()
    assert cuda.n_retained == {1: 1}
    assert set(cuda.streams_asked) == {1}  # CU_STREAM_LEGACY


def test_memory_of_one_device_is_asked_for_and_used_there(cuda):
    # the stand-in checks the location of every struct against the context of the thread
    many = [Reservation(CudaVmm(device, cuda), 1 << 40) for device in (0, 1) for _ in range(20)]
    for i, r in enumerate(many):
        r.commit(5 * G)
        assert r.address % G == 0
        poke(r.address + 5 * G - 1, bytes([i]))
    assert [peek(r.address + 5 * G - 1)[0] for r in many] == list(range(40))
    for r in many:
        r.close()
    assert cuda.memory.is_empty()


def test_every_thread_works_in_the_context_and_keeps_its_own(cuda):
    r = Reservation(CudaVmm(0, cuda), 1 << 40)
    found = []

    def work(mine):
        cuda.stack.extend(mine)
        r.commit(r.committed + 1)
        r.trim(G)
        found.append(list(cuda.stack))

    for mine in ([], ["context 1"], ["context 7", "context 0"]):
        thread = threading.Thread(target=work, args=(mine,))
        thread.start()
        thread.join()
    assert found == [[], ["context 1"], ["context 7", "context 0"]]
    cuda.fail["cuMemCreate"] = OUT_OF_MEMORY
    with pytest.raises(errors.OutOfMemoryError):
        r.commit(2 * G)
    assert cuda.stack == []
    r.close()


@pytest.mark.parametrize(
    "name", ["cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemRelease", "cuCtxPushCurrent"]
)
@pytest.mark.parametrize("code", [OUT_OF_MEMORY, ILLEGAL_ADDRESS, UNSUPPORTED])
def test_a_failure_of_any_call_leaves_what_was_committed(cuda, name, code):
    r = Reservation(CudaVmm(0, cuda), 100 * G)
    r.commit(G)
    poke(r.address, b"abc")
    cuda.fail[name] = code
    expected = {
        OUT_OF_MEMORY: (errors.OutOfMemoryError, f"{name}: CUDA_ERROR_OUT_OF_MEMORY"),
        ILLEGAL_ADDRESS: (errors.BackendError, f"{name}: CUDA_ERROR_ILLEGAL_ADDRESS"),
        UNSUPPORTED: (errors.CaptureError, "while a graph is being captured"),
    }
    error, message = expected[code]
    with pytest.raises(error, match=message) as caught:
        r.commit(4 * G)
    assert ("empty_cache" in str(caught.value)) == (name == "cuMemCreate" and code == OUT_OF_MEMORY)
    cuda.fail.clear()
    assert (r.committed, peek(r.address, 3), peek(r.address + G)) == (G, b"abc", None)
    r.commit(4 * G)
    assert cuda.memory.used == r.committed
    r.close()
    assert cuda.memory.is_empty()


def test_no_addresses_are_left(cuda):
    cuda.fail["cuMemAddressReserve"] = OUT_OF_MEMORY
    with pytest.raises(errors.OutOfMemoryError, match=r"address space.*cuMemAddressReserve") as e:
        Reservation(CudaVmm(0, cuda), 1 << 40)
    assert e.value.limit == "address space"
    assert "empty_cache" not in str(e.value)


@pytest.mark.parametrize("name", ["cuCtxSynchronize", "cuMemUnmap", "cuMemAddressFree"])
def test_memory_that_cannot_be_given_back_now_is_given_back_later(cuda, name):
    vmm = CudaVmm(0, cuda)
    r = Reservation(vmm, 100 * G)
    r.commit(3 * G)
    cuda.fail[name] = ILLEGAL_ADDRESS
    r.close()
    assert len(_vmm._postponed) == 1
    cuda.fail.clear()
    assert settle_postponed() == 0
    assert cuda.memory.is_empty()


@pytest.mark.parametrize("how", ["a blocking stream", "the legacy stream", "torch", "cupy"])
def test_a_capture_is_seen(cuda, monkeypatch, how):
    r = Reservation(CudaVmm(0, cuda), 100 * G)
    r.commit(3 * G)
    closed = Reservation(CudaVmm(0, cuda), 100 * G)
    closed.commit(G)
    with monkeypatch.context() as patch:
        if how == "a blocking stream":
            patch.setitem(cuda.fail, "cuStreamIsCapturing", IMPLICIT)
        elif how == "the legacy stream":
            patch.setattr(cuda, "legacy_status", 1)
        elif how == "torch":
            library = types.SimpleNamespace(
                is_initialized=lambda: True, is_current_stream_capturing=lambda: True
            )
            patch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=library))
        else:
            stream = types.SimpleNamespace(is_capturing=lambda: True)
            library = types.SimpleNamespace(get_current_stream=lambda: stream)
            patch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=library, is_available=lambda: True))
        assert CudaVmm(0, cuda).is_capturing()
        calls(cuda)
        for refused in (lambda: r.commit(4 * G), lambda: r.trim(0)):
            with pytest.raises(errors.CaptureError):
                refused()
        closed.close()
        assert set(calls(cuda)) == {"cuStreamIsCapturing"}
    assert not CudaVmm(0, cuda).is_capturing()
    r.commit(4 * G)
    assert len(cuda.memory.reserved) == 1
    r.close()
    assert cuda.memory.is_empty()


def test_an_error_of_the_query_is_not_taken_for_a_capture(cuda):
    r = Reservation(CudaVmm(0, cuda), 100 * G)
    cuda.fail["cuStreamIsCapturing"] = ILLEGAL_ADDRESS
    with pytest.raises(errors.BackendError, match="ILLEGAL_ADDRESS"):
        r.commit(1)
    cuda.fail.clear()
    r.close()


def test_a_library_without_a_device_is_not_asked_about_captures(monkeypatch):
    def fail():
        raise AssertionError("asked")

    library = types.SimpleNamespace(
        is_initialized=lambda: False, is_current_stream_capturing=fail, get_current_stream=fail
    )
    module = types.SimpleNamespace(cuda=library, is_available=lambda: False)
    for name in ("torch", "cupy"):
        monkeypatch.setitem(sys.modules, name, module)
    assert not _vmm_cuda._torch_is_capturing()
    assert not _vmm_cuda._cupy_is_capturing()


def test_a_forked_child_leaves_the_driver_alone(cuda, monkeypatch):
    vmm = CudaVmm(0, cuda)
    r, inherited = Reservation(vmm, 100 * G), Reservation(vmm, 100 * G)
    r.commit(G)
    inherited.commit(G)
    with monkeypatch.context() as patch:
        patch.setattr(_vmm_cuda.os, "getpid", lambda: -1)
        cuda.log.clear()
        with pytest.raises(errors.BackendError, match="forked child"):
            r.commit(2 * G)
        with pytest.raises(errors.BackendError, match="forked child"):
            Reservation(vmm, G)
        vmm.release(1)
        inherited.close()
        assert cuda.log == []
        assert len(_vmm._postponed) == 0
    r.close()
    assert list(cuda.memory.mapped.values()) == [G]  # what the child closed is still the parent's


def test_what_is_missing_is_said(cuda, monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(errors.BackendError, match=r"cuda-bindings.*pip install 'gpuarena\[cuda\]'"):
        CudaVmm(0)
    with pytest.raises(
        errors.BackendError, match=r"CUDA device 2 cannot be used: cuDeviceGet: .*INVALID_DEVICE"
    ):
        CudaVmm(2, cuda)
    with pytest.raises(errors.BackendError, match="device 0 or its driver has no virtual memory management"):
        CudaVmm(0, FakeCuda(supported=False))

    def no_driver(flags):
        raise RuntimeError('"cuda" is an NVIDIA driver library and can only be found via system search')

    monkeypatch.setattr(cuda, "cuInit", no_driver, raising=False)
    with pytest.raises(errors.BackendError, match=r"there is no CUDA driver.*: .*system search"):
        CudaVmm(0, cuda)


def test_the_bindings_are_imported_when_none_are_given(cuda, monkeypatch):
    package = types.ModuleType("cuda.bindings")
    package.driver = cuda
    monkeypatch.setitem(sys.modules, "cuda.bindings", package)
    assert CudaVmm(0).granularity() == G
