"""Device memory that grows in place. With GPUARENA_FAKE_GPU=1 the same on the host, where all but captures can be."""

from __future__ import annotations

import gc
import sys
import threading

import pytest

torch = pytest.importorskip("torch")

from shared_core.case import FAKE_GPU, why_no_gpu  # noqa: E402

from gpuarena import as_dtype, backends, errors  # noqa: E402
from gpuarena.backends._vmm import settle_postponed  # noqa: E402

pytestmark = pytest.mark.gpu

_REASONS = why_no_gpu()
if all(_REASONS.values()):
    pytest.skip("; ".join(filter(None, _REASONS.values())), allow_module_level=True)
if not FAKE_GPU:
    pytest.importorskip("cuda.bindings")

UINT8, FLOAT32 = as_dtype("uint8"), as_dtype("float32")
MIB, TIB = 1 << 20, 1 << 40
PLACES = {"torch-cuda": ("virtual:torch", "cpu" if FAKE_GPU else "cuda"), "cupy": ("virtual:cupy", None)}


@pytest.fixture(params=[case for case, reason in _REASONS.items() if reason is None])
def backend(request):
    name, device = PLACES[request.param]
    made = backends.create(name, TIB, device, 256)
    yield made
    made.release()
    del made
    gc.collect()
    assert settle_postponed() == 0


def used() -> int:
    """Bytes in use: of the device by the driver's count, or of this process."""
    if FAKE_GPU:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_arrays_stay_where_they_are_while_memory_grows(backend):
    address = backend.address
    backend.commit(4096)
    first = backend.root(0, (1024,), FLOAT32)
    backend.write(first, 1.5)
    stop = 4096
    while stop < 512 * MIB:
        stop = stop * 3 + 1
        backend.commit(stop)
        backend.fill_bytes(stop - 100, stop, 7)
        assert backend.find_other(stop - 100, stop, 7) is None
    assert backend.address == address
    assert float(first.sum()) == 1536


def test_work_runs_across_the_borders_of_chunks(backend):
    backend.commit(256 * MIB)
    n_elements = 64 * MIB
    x = backend.root(0, (n_elements,), FLOAT32)
    backend.write(x, 1)
    x += x
    assert float(x.min()) == float(x.max()) == 2  # a sum of so many float32 is rounded
    assert backend.find_other(0, 256 * MIB, 0) == 3  # the bytes of 2.0 are 0, 0, 0, 64


def test_memory_is_given_back(backend):
    backend.commit(MIB)
    before = used()
    backend.commit(1024 * MIB)
    backend.fill_bytes(0, 1024 * MIB, 1)
    full = used()
    assert full - before > 900 * MIB
    given_back = backend.trim(MIB)
    assert given_back > 900 * MIB
    assert abs(full - used() - given_back) < 64 * MIB
    assert backend.find_other(0, MIB, 1) is None
    backend.commit(1024 * MIB)
    backend.fill_bytes(0, 1024 * MIB, 2)
    array = backend.root(0, (MIB,), UINT8)
    backend.release()
    del array
    # the fixture holds the backend, but not the memory
    assert abs(used() - before) < 64 * MIB


@pytest.mark.skipif(FAKE_GPU, reason="the host's memory is not the device's")
def test_out_of_memory_leaves_what_was_there(backend):
    backend.commit(MIB)
    backend.fill_bytes(0, MIB, 3)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    ballast = torch.empty(max(free - 1024 * MIB, 1), dtype=torch.uint8, device="cuda")
    before, committed = used(), backend.committed
    with pytest.raises(errors.OutOfMemoryError, match="cuMemCreate") as e:
        backend.commit(4096 * MIB)
    assert e.value.limit == "memory"
    assert abs(used() - before) < 64 * MIB
    assert backend.committed == committed
    assert backend.find_other(0, MIB, 3) is None
    del ballast
    torch.cuda.empty_cache()
    backend.commit(2048 * MIB)
    assert backend.find_other(0, MIB, 3) is None


def test_other_threads_commit_and_free(backend):
    found = []

    def work():
        backend.commit(backend.committed + 1)
        found.append(backend.committed)
        backend.trim(0)

    for _ in range(3):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert len(found) == 3


def test_libraries_share_the_bytes(backend):
    other = "host" if FAKE_GPU else {"torch": "cupy", "cupy": "torch"}[backend.name]
    if other == "cupy" and _REASONS.get("cupy", "absent"):
        pytest.skip(f"CuPy: {_REASONS.get('cupy', 'absent')}")
    backend.commit(8 * MIB)
    backend.trim(0)  # all that can go: the export must still find the first byte
    viewer = backend.viewer(other)
    assert viewer.address == backend.address
    backend.commit(8 * MIB)
    backend.write(backend.root(4 * MIB, (4,), FLOAT32), 2.5)
    if not FAKE_GPU:
        torch.cuda.synchronize()
    assert float(viewer.root(4 * MIB, (4,), FLOAT32).sum()) == 10


@pytest.mark.skipif(FAKE_GPU, reason="the host has no graphs")
def test_growing_is_refused_during_a_capture_which_stays_whole(backend):
    if backend.name != "torch":
        pytest.skip("captures of torch")
    backend.commit(4 * MIB)
    x = backend.root(0, (1024,), FLOAT32)
    backend.write(x, 1)
    other = backends.create("virtual:torch", TIB, "cuda", 256)
    other.commit(4 * MIB)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x += 1
        for refused in (lambda: backend.commit(backend.committed + 1), lambda: backend.trim(0)):
            with pytest.raises(errors.CaptureError):
                refused()
        del other  # put off
    graph.replay()
    backend.commit(backend.committed + 1)
    assert settle_postponed() == 0
    assert float(x.sum()) == 2048


def test_the_default_stream_is_not_taken_for_a_capture(backend):
    backend.commit(1)
    assert backend.trim(MIB) >= 0
    assert "torch" in sys.modules
