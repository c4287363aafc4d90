from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys

import numpy as np
import pytest
from vmm_doubles import CheckedVmm, FakeCuda, peek, poke

torch = pytest.importorskip("torch")

from gpuarena import Arena, errors  # noqa: E402
from gpuarena.backends import mirrored  # noqa: E402
from gpuarena.backends._mirror import Mirror  # noqa: E402
from gpuarena.backends._vmm import settle_postponed  # noqa: E402
from gpuarena.backends._vmm_cuda import CudaVmm  # noqa: E402
from gpuarena.backends._vmm_host import SharedHostVmm  # noqa: E402
from gpuarena.backends.base import Backend  # noqa: E402
from gpuarena.backends.mirrored import MirroredMemory  # noqa: E402

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

G = 64 << 10  # the granule of the host
CUDA_G = 2 << 20
N_CALLS = 9  # of the driver, for one mirror


def checked(**options) -> CheckedVmm:
    return CheckedVmm(G, host=SharedHostVmm(), **options)


@pytest.fixture
def driver():
    return checked()


@pytest.fixture
def given(monkeypatch, driver):
    """The driver that host memory is made with, instead of the system."""
    monkeypatch.setattr(mirrored, "SharedHostVmm", lambda: driver)
    return driver


@pytest.fixture(autouse=True)
def _nothing_is_left_over():
    n_open = len(os.listdir("/proc/self/fd"))
    yield
    assert settle_postponed() == 0
    assert len(os.listdir("/proc/self/fd")) == n_open


def calls(driver):
    return [call for call in driver.log if call != "is_capturing"]


# -- the memory itself --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_granules", [1, 2, 7])
def test_what_is_written_at_one_address_is_read_at_the_other(driver, n_granules):
    mirror = Mirror(driver, n_granules * G)
    period = mirror.period
    assert (period, mirror.nbytes, mirror.address % G) == (n_granules * G, 2 * n_granules * G, 0)
    for number, at in enumerate((0, 1, period // 2, period - 1, 4095, 4096), start=1):
        poke(mirror.address + at, bytes([number]))
        assert peek(mirror.address + period + at) == bytes([number])
        poke(mirror.address + period + at, bytes([100 + number]))
        assert peek(mirror.address + at) == bytes([100 + number])
    poke(mirror.address + period - 3, b"abcdef")  # over the border: the end, and again the start
    assert peek(mirror.address, 3) == peek(mirror.address + period, 3) == b"def"
    assert peek(mirror.address + 2 * period - 3, 3) == b"abc"
    assert peek(mirror.address + 2 * period) is None
    mirror.close()
    assert driver.is_empty()
    assert peek(mirror.address) is peek(mirror.address + period) is None


def test_fresh_memory_is_zero_and_taken_once(driver):
    mirror = Mirror(driver, 3 * G)
    assert all(peek(mirror.address + at, 4096) == bytes(4096) for at in range(0, 6 * G, G))
    assert driver.used == 3 * G
    mirror.close()


@pytest.mark.parametrize(
    ("nbytes", "period"), [(1, G), (G - 1, G), (G, G), (G + 1, 2 * G), (5 * G + 9, 6 * G)]
)
def test_a_period_is_whole_granules(driver, nbytes, period):
    mirror = Mirror(driver, nbytes)
    assert (mirror.period, driver.used) == (period, period)
    mirror.close()


def test_the_calls_come_in_the_order_that_gives_memory_back(driver):
    mirror = Mirror(driver, G)
    mirror.close()
    mirror.close()
    assert calls(driver) == [
        *("granularity", "reserve", "create", "map", "map", "release", "set_access", "set_access"),
        *("unmap", "unmap", "free"),
    ]
    assert driver.is_empty()


def test_two_mirrors_are_apart(driver):
    one, two = Mirror(driver, G), Mirror(driver, G)
    poke(one.address, b"one")
    poke(two.address + G, b"two")
    assert (peek(one.address + G, 3), peek(two.address, 3)) == (b"one", b"two")
    one.close()
    assert peek(two.address, 3) == b"two"
    two.close()


# -- failures -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("out_of_memory", [False, True])
@pytest.mark.parametrize("at", range(1, N_CALLS + 1))
def test_a_call_that_fails_leaves_nothing(driver, at, out_of_memory):
    driver.fail(at=at, out_of_memory=out_of_memory)
    error = errors.OutOfMemoryError if out_of_memory else errors.BackendError
    with pytest.raises(error, match=r"cannot map 65 536 bytes .* twice: .*failed on demand") as caught:
        Mirror(driver, G)
    assert len(driver.log) >= at
    assert settle_postponed() == 0
    assert driver.is_empty()
    if out_of_memory:
        assert (caught.value.requested, caught.value.missing, caught.value.available) == (G, G, 0)
    Mirror(driver, G).close()
    assert driver.is_empty()


def test_no_call_is_left_out_of_that():
    driver = checked()
    driver.fail(at=N_CALLS + 1)
    mirror = Mirror(driver, G)
    driver.forgive()
    mirror.close()


@pytest.mark.parametrize(
    ("at", "failing"),
    [
        *(("map", failing) for failing in ("unmap", "release", "free", "is_capturing")),
        *(("release", failing) for failing in ("unmap", "release", "free", "is_capturing")),
        *(("set_access", failing) for failing in ("unmap", "free", "is_capturing")),
    ],
)
def test_what_cannot_be_undone_is_undone_later(driver, at, failing):
    driver.fail(call=at, at=2 if at != "release" else 1)
    driver.fail(call=failing, at=2 if failing in (at, "is_capturing") else 1)
    with pytest.raises(errors.BackendError, match=at):
        Mirror(driver, G)
    driver.forgive()
    assert settle_postponed() == 0
    assert driver.is_empty()


@pytest.mark.parametrize("call", ["map", "set_access"])
@pytest.mark.parametrize("nth", [1, 2])
def test_an_interrupt_leaves_nothing(driver, monkeypatch, call, nth):
    whole, seen = getattr(driver, call), []

    def interrupt(*args):
        seen.append(args)
        if len(seen) == nth:
            raise KeyboardInterrupt
        whole(*args)

    monkeypatch.setattr(driver, call, interrupt)
    with pytest.raises(KeyboardInterrupt):
        Mirror(driver, G)
    assert driver.is_empty()


def test_nothing_is_mapped_during_a_capture(driver):
    driver.capturing = True
    with pytest.raises(errors.CaptureError, match="while a graph is being captured"):
        Mirror(driver, G)
    assert driver.log == ["is_capturing"]
    driver.capturing = False


def test_closing_during_a_capture_is_put_off(driver):
    one, two = Mirror(driver, G), Mirror(driver, G)
    driver.capturing = True
    one.close()
    assert driver.used == 2 * G
    driver.capturing = False
    two.close()
    assert driver.is_empty()


@pytest.mark.parametrize("call", ["is_capturing", "unmap", "free"])
def test_a_close_that_fails_is_tried_again(driver, call):
    mirror = Mirror(driver, G)
    driver.fail(call=call)
    mirror.close()
    assert not driver.is_empty()
    Mirror(driver, G).close()
    assert driver.is_empty()


def test_too_much_memory_is_out_of_memory():
    for nbytes in (1 << 46, 1 << 62, 1 << 70):
        with pytest.raises(errors.OutOfMemoryError) as caught:
            Mirror(SharedHostVmm(), nbytes)
        assert caught.value.requested == nbytes
    driver = checked(limit=3 * G)
    kept = Mirror(driver, 2 * G)
    with pytest.raises(errors.OutOfMemoryError, match="create"):
        Mirror(driver, 2 * G)
    assert driver.used == 2 * G
    kept.close()


def test_files_that_the_system_refuses(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "memfd_create", _raises(24))
        with pytest.raises(errors.BackendError, match="memfd_create: Too many open files"):
            Mirror(SharedHostVmm(), G)
    for number, error in ((12, errors.OutOfMemoryError), (27, errors.BackendError)):
        with monkeypatch.context() as patch:
            patch.setattr(os, "ftruncate", _raises(number))
            with pytest.raises(error, match="ftruncate"):
                Mirror(SharedHostVmm(), G)


def _raises(number):
    def call(*args):
        raise OSError(number, os.strerror(number))

    return call


def test_a_full_table_of_mappings_is_told(monkeypatch):
    vmm = SharedHostVmm()
    address = vmm.reserve(G)
    handle = vmm.create(G)
    with monkeypatch.context() as patch:
        patch.setattr(vmm, "_mmap", lambda *args: (ctypes.set_errno(12), ctypes.c_void_p(-1).value)[1])
        for call in (lambda: vmm.map(address, G, handle), lambda: vmm.unmap(address, G)):
            with pytest.raises(Exception, match="mmap: Cannot allocate memory") as caught:
                call()
            assert caught.value.out_of_memory
    vmm.release(handle)
    vmm.free(address, G)


def resident(field: str) -> int:
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(field + ":"))


def test_the_system_counts_the_pages_once_as_memory_and_twice_as_mappings():
    n = 64 << 20
    before = {field: resident(field) for field in ("Rss", "Pss")}
    mirror = Mirror(SharedHostVmm(), n)
    assert resident("Rss") - before["Rss"] < n // 8, "nothing is resident before it is written"
    ctypes.memset(mirror.address, 1, 2 * n)
    assert abs(resident("Rss") - before["Rss"] - 2 * n) < n // 4
    assert abs(resident("Pss") - before["Pss"] - n) < n // 4
    mirror.close()
    assert resident("Rss") - before["Rss"] < n // 8


# -- arenas over it -----------------------------------------------------------------------------------------------


@pytest.fixture(params=["host", "torch"])
def library(request):
    return request.param


def test_an_arena_shows_the_first_half_twice(library):
    memory = MirroredMemory(library, "cpu")
    assert memory.granule == G
    arena = Arena(2 * G, backend=memory, alignment=4096)
    assert (arena.backend, arena.device, arena.capacity) == (library, "cpu", 2 * G)
    assert isinstance(arena._backend, Backend)
    x = arena.alloc((2, G // 4), "float32")
    assert x.address % G == 0
    x.array[0, 5:] = 3
    assert float(x.array[1].sum()) == 3 * (G // 4 - 5)
    x.as_numpy()[1, 0] = 8
    assert float(x.as_torch()[0, 0]) == 8
    straddling = x.as_torch().view(-1)[G // 4 - 10 : G // 4 + 10]
    straddling.copy_(torch.arange(20.0))
    assert x.as_numpy()[0, :10].tolist() == list(range(10, 20))


@pytest.mark.parametrize("via", ["array", "view", "other library"])
def test_memory_goes_with_the_last_array_and_not_before(given, library, via):
    arena = Arena(4 * G, backend=MirroredMemory(library, "cpu"))
    region = arena.alloc(4 * G, "uint8")
    region[...] = 5
    other = {"host": "torch", "torch": "host"}[library]
    array = region._as(other) if via == "other library" else region.array
    if via == "view":
        array = array[10:100]
    arena.close()
    del arena, region
    gc.collect()
    assert int(array[-1]) == 5
    assert given.used == 2 * G
    del array
    assert given.is_empty()


def test_an_arena_that_is_dropped_gives_all_back(given, library):
    arena = Arena(2 * G, backend=MirroredMemory(library, "cpu"))
    arena.alloc(4, "float32", fill=1)
    assert given.used == G
    del arena
    gc.collect()
    assert given.is_empty()


@pytest.mark.parametrize("at", range(2, N_CALLS + 2))  # the first is the granularity, for `granule`
def test_nothing_is_left_of_an_arena_that_could_not_be_made(given, library, at):
    given.fail(at=at)
    with pytest.raises(errors.BackendError, match="failed on demand"):
        Arena(2 * G, backend=MirroredMemory(library, "cpu"))
    assert given.is_empty()


def test_nothing_is_left_where_the_library_refuses(given, library, monkeypatch):
    class BrokenError(Exception):
        pass

    def fail(owner):
        raise BrokenError

    monkeypatch.setattr(mirrored, "_numpy_bytes", fail)
    with pytest.raises(BrokenError) as caught:
        Arena(2 * G, backend=MirroredMemory(library, "cpu"))
    assert given.is_empty()
    assert caught.tb, "which still refers to all that was made"


@pytest.mark.parametrize("nbytes", [1, G, 3 * G, 2 * G + 1])
def test_a_capacity_that_is_no_two_periods_is_refused(nbytes):
    with pytest.raises(errors.ArgumentError, match=f"{nbytes} aligned to 256 were asked"):
        Arena(nbytes, backend=MirroredMemory("host", "cpu"))


def test_an_alignment_that_no_period_has_is_refused():
    assert Arena(2 * G, backend=MirroredMemory("host", "cpu"), alignment=G).address % G == 0
    with pytest.raises(errors.ArgumentError, match=f"aligned to {2 * G}"):
        Arena(2 * G, backend=MirroredMemory("host", "cpu"), alignment=2 * G)


@pytest.mark.parametrize(
    ("library", "device"),
    [("cupy", "cpu"), ("host", "cuda:0"), ("torch", "mps:0"), ("torch", "meta"), ("torch", "cuda")],
)
def test_memory_that_cannot_be_mapped_twice_is_refused(library, device):
    with pytest.raises(errors.DeviceMismatchError, match="twice"):
        MirroredMemory(library, device)


def test_another_system_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(errors.BackendError, match=r"needs Linux.*darwin"):
        MirroredMemory("host", "cpu")


def test_a_forked_child_may_not_use_the_arena_and_shares_its_arrays():
    code = """
import os
import numpy as np
from gpuarena import Arena, errors
from gpuarena.backends.mirrored import MirroredMemory
for library in ("host", "torch"):
    arena = Arena(2 << 16, backend=MirroredMemory(library, "cpu"))
    region = arena.alloc((2, 1 << 16), "uint8", fill=1)
    array = region.array
    child = os.fork()
    if not child:
        for use in (lambda: region.array, lambda: arena.alloc(1, "uint8")):
            try:
                use()
            except errors.ForkedError:
                pass
            else:
                os._exit(1)
        array[0, 7] = 9
        del array, region, arena
        os._exit(0)
    print(os.waitpid(child, 0)[1], int(array[0, 7]), int(array[1, 7]), arena.stats.used)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.stderr) == ("0 9 9 131072\n" * 2, "")


# -- CUDA, by a stand-in for the driver ---------------------------------------------------------------------------


@pytest.fixture
def cuda(monkeypatch):
    cuda = FakeCuda(host=SharedHostVmm())
    monkeypatch.setattr(mirrored, "_cuda_driver", lambda device_id: CudaVmm(device_id, cuda))
    return cuda


def test_device_memory_is_created_once_and_mapped_twice(cuda):
    mirror = Mirror(CudaVmm(1, cuda), CUDA_G + 1)
    period = 2 * CUDA_G
    assert (mirror.period, cuda.memory.used, cuda.memory.reserved) == (
        period,
        period,
        {mirror.address: 2 * period},
    )
    poke(mirror.address + period - 1, b"ab")
    assert (peek(mirror.address), peek(mirror.address + 2 * period - 1)) == (b"b", b"a")
    mirror.close()
    assert cuda.memory.is_empty()
    names = [name for name in cuda.log if name.startswith("cuMem")]
    assert names[1:] == [
        *("cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemMap", "cuMemRelease"),
        *("cuMemSetAccess", "cuMemSetAccess", "cuMemUnmap", "cuMemUnmap", "cuMemAddressFree"),
    ]


@pytest.mark.parametrize("out_of_memory", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "cuStreamIsCapturing",
        "cuMemAddressReserve",
        "cuMemCreate",
        "cuMemMap",
        "cuMemRelease",
        "cuMemSetAccess",
    ],
)
def test_a_function_of_the_driver_that_fails_leaves_nothing(cuda, name, out_of_memory):
    vmm = CudaVmm(0, cuda)
    cuda.fail[name] = 2 if out_of_memory else 1
    with pytest.raises(errors.OutOfMemoryError if out_of_memory else errors.BackendError, match=name):
        Mirror(vmm, CUDA_G)
    cuda.fail.clear()
    assert settle_postponed() == 0
    assert cuda.memory.is_empty()


@pytest.mark.parametrize("code", [900, 906])
def test_a_driver_that_refuses_because_of_a_capture_is_told_so(cuda, code):
    vmm = CudaVmm(0, cuda)
    cuda.fail["cuMemCreate"] = code
    with pytest.raises(errors.CaptureError, match="while a graph is being captured"):
        Mirror(vmm, CUDA_G)
    cuda.fail.clear()
    assert cuda.memory.is_empty()


def test_cupy_arrays_lie_on_mirrored_device_memory(cuda):
    pytest.importorskip("cupy")
    memory = MirroredMemory("cupy", "cuda:1")
    assert memory.granule == CUDA_G
    arena = Arena(2 * CUDA_G, backend=memory)
    assert (arena.backend, arena.device, arena._backend.survives_fork) == ("cupy", "cuda:1", False)
    array = arena.alloc((2, CUDA_G), "uint8").array
    assert (array.data.ptr, array.device.id, array.nbytes) == (arena.address, 1, 2 * CUDA_G)
    poke(array.data.ptr, b"x")
    assert peek(array.data.ptr + CUDA_G) == b"x"
    with pytest.raises(errors.ArgumentError):
        Arena(2 * G, backend=memory)
    arena.close()
    del arena
    gc.collect()
    assert len(cuda.memory.reserved) == 1
    del array
    assert cuda.memory.is_empty()


def test_torch_is_told_the_device_and_shown_the_bytes_as_those_of_a_device(cuda, monkeypatch):
    seen = {}

    def as_tensor(shown, *, device):
        seen.update(shown.__cuda_array_interface__, device=device)
        address, nbytes = (
            shown.__cuda_array_interface__["data"][0],
            shown.__cuda_array_interface__["shape"][0],
        )
        whole = np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)
        seen["owner"] = shown
        return torch.from_numpy(whole)

    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    arena = Arena(2 * CUDA_G, backend=MirroredMemory("torch", "cuda:1"))
    assert (seen["device"], seen["shape"], seen["data"]) == ("cuda:1", (2 * CUDA_G,), (arena.address, False))
    x = arena.alloc((2, CUDA_G), "uint8").array
    x[1, 3] = 7
    assert int(x[0, 3]) == 7
    assert not arena._backend.survives_fork
    del arena, x
    seen.clear()
    gc.collect()
    assert cuda.memory.is_empty()
