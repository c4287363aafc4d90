from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import numpy as np
import pytest
from vmm_doubles import CheckedVmm, FakeCuda, peek

torch = pytest.importorskip("torch")

from gpuarena import Arena, as_dtype, backends, errors  # noqa: E402
from gpuarena._index import Layout  # noqa: E402
from gpuarena.backends import virtual  # noqa: E402
from gpuarena.backends._vmm import settle_postponed  # noqa: E402
from gpuarena.backends._vmm_cuda import CudaVmm  # noqa: E402
from gpuarena.backends.base import Backend  # noqa: E402
from gpuarena.testing import run_arena_machine  # noqa: E402

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

TIB = 1 << 40
UINT8, FLOAT32 = as_dtype("uint8"), as_dtype("float32")
NAMES = {"virtual": "host", "virtual:torch": "torch"}


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


@pytest.fixture
def driver(monkeypatch):
    """What the backends of host memory are given instead of the system."""
    checked = CheckedVmm()
    monkeypatch.setattr(virtual, "HostVmm", lambda: checked)
    return checked


def make(name, nbytes=TIB, **options):
    return backends.create(name, nbytes, options.get("device"), options.get("alignment", 256))


def test_a_terabyte_is_reserved_and_none_of_it_is_touched(name, driver):
    backend = make(name)
    assert isinstance(backend, Backend)
    assert (backend.name, backend.device, backend.nbytes) == (NAMES[name], "cpu", TIB)
    assert (backend.growable, backend.survives_fork, backend.committed) == (True, True, 0)
    assert backend.negative_strides == (name == "virtual")
    last = backend.root(TIB - 4, (1,), FLOAT32)  # an array may be made of what is not there yet
    assert (driver.used, peek(backend.address), tuple(last.shape)) == (0, None, (1,))


def test_arrays_stay_where_they_are_while_memory_grows(name):
    backend = make(name)
    address = backend.address
    backend.commit(4000)
    first = backend.root(0, (1000,), FLOAT32)
    backend.write(first, 1.5)
    for stop in (1 << 16, (1 << 20) + 1, 100 << 20):
        backend.commit(stop)
        backend.fill_bytes(stop - 100, stop, 7)
        assert backend.committed >= stop
        assert backend.find_other(stop - 100, stop, 7) is None
    assert backend.address == address
    assert float(first.sum()) == 1500
    assert backend.find_other(0, 4000, 7) == 0
    assert backend.trim(4000) > 90 << 20
    assert backend.committed < 1 << 20
    assert float(first.sum()) == 1500


def test_all_libraries_see_the_same_bytes(name):
    backend = make(name)
    backend.commit(1 << 20)
    tensors, arrays = backend.viewer("torch"), backend.viewer("host")
    assert backend.viewer(backend.name) is backend
    assert tensors.address == arrays.address == backend.address
    x = arrays.root(4096, (16, 16), FLOAT32)
    x[:] = np.arange(256).reshape(16, 16)
    y = tensors.root(4096, (16, 16), FLOAT32)
    assert y.data_ptr() == x.ctypes.data == backend.address + 4096
    torch.mul(y, 2, out=tensors.root(8192, (16, 16), FLOAT32))
    np.testing.assert_array_equal(arrays.root(8192, (16, 16), FLOAT32), 2 * x)
    assert torch.equal(y @ torch.eye(16), torch.from_numpy(x))
    transposed = backend.view(backend.root(4096, (16, 16), FLOAT32), Layout(4096, (16, 16), (4, 64)), FLOAT32)
    np.testing.assert_array_equal(np.asarray(transposed), x.T)


def test_bytes_are_read_and_written(name):
    backend = make(name)
    backend.commit(100)
    values = np.arange(50, dtype=np.uint8)
    backend.write_bytes(20, values)
    copy = backend.read_bytes(20, 70)
    backend.fill_bytes(0, 100, 0)
    np.testing.assert_array_equal(copy, values)
    backend.check_dtype(FLOAT32)
    if name == "virtual":
        with pytest.raises(errors.DTypeError):
            backend.check_dtype(as_dtype("bits8"))


def test_a_prototype_gives_fresh_arrays(name):
    backend = make(name)
    backend.commit(100)
    prototype = backend.prototype(4, (4,), FLOAT32)
    one, two = backend.again(prototype), backend.again(prototype)
    assert one is not two
    backend.write(one, 3)
    assert float(two.sum()) == 12


def test_a_tracked_root_tells_when_its_last_view_goes(name):
    backend = make(name)
    backend.commit(100)
    array, owner = backend.tracked_root(0, (10,), UINT8)
    gone = weakref.ref(owner)
    view = array[2:]
    del array, owner
    assert gone() is not None
    del view
    assert gone() is None


def test_a_write_is_seen_by_autograd():
    backend = make("virtual:torch")
    backend.commit(100)
    x = backend.root(0, (4,), FLOAT32)
    w = torch.ones(4, requires_grad=True)
    loss = (w * x).sum()
    backend.invalidate([x])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("nbytes", [1, 17, 65536, 65537])
@pytest.mark.parametrize("alignment", [1, 256, 1 << 22])
def test_any_capacity_and_alignment(name, driver, nbytes, alignment):
    backend = make(name, nbytes, alignment=alignment)
    assert (backend.nbytes, backend.address % alignment) == (nbytes, 0)
    backend.commit(nbytes)
    assert backend.committed == nbytes
    assert driver.used == -(-nbytes // 65536) * 65536
    backend.fill_bytes(0, nbytes, 3)
    assert backend.root(nbytes - 1, (1,), UINT8)[0] == 3
    with pytest.raises(errors.OutOfMemoryError):
        backend.commit(nbytes + 1)
    del backend
    assert driver.is_empty()


@pytest.mark.parametrize("via", ["root", "view of a root", "tracked root", "other library"])
def test_memory_goes_with_the_last_array_and_not_before(name, driver, via):
    backend = make(name)
    backend.commit(1 << 20)
    backend.fill_bytes(0, 1 << 20, 5)
    if via == "tracked root":
        array = backend.tracked_root(0, (1 << 20,), UINT8)[0]
    else:
        other = {"host": "torch", "torch": "host"}[backend.name]
        library = backend.viewer(other) if via == "other library" else backend
        array = library.root(0, (1 << 20,), UINT8)
        del library
    backend.release()
    del backend
    gc.collect()
    if via == "view of a root":
        array = array[100:200]
    assert int(array[-1]) == 5
    assert len(driver.reserved) == 1
    del array
    assert driver.is_empty()


def test_memory_that_goes_during_a_capture_is_given_back_after_it(name, driver):
    backend = make(name)
    backend.commit(1 << 20)
    driver.capturing = True
    del backend
    assert not driver.is_empty()
    driver.capturing = False
    other = make(name)
    assert len(driver.reserved) == 1
    del other
    assert settle_postponed() == 0
    assert driver.is_empty()


def test_nothing_is_left_of_a_backend_that_could_not_be_made(name, driver, monkeypatch):
    class BrokenError(Exception):
        pass

    def fail(owner):
        raise BrokenError

    monkeypatch.setattr(virtual, "_numpy_bytes", fail)
    with pytest.raises(BrokenError) as caught:
        make(name)
    assert driver.is_empty()
    assert caught.tb, "which still refers to all that was made"


def test_live_arrays_do_not_break_the_exit():
    code = """
from gpuarena import as_dtype, backends
keep = []
for name in ("virtual", "virtual:torch"):
    backend = backends.create(name, 1 << 40, None, 256)
    backend.commit(1 << 20)
    backend.fill_bytes(0, 1 << 20, 1)
    array = backend.root(0, (100,), as_dtype("uint8"))
    cycle = [array, backend.viewer("torch").root(0, (100,), as_dtype("uint8"))]
    cycle.append(cycle)
    keep += [array, backend, cycle]

class Late:
    def __del__(self):
        print(sum(int(array[0]) for array in keep[::3]))

late = Late()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")


def test_a_forked_child_has_a_copy():
    code = """
import os
from gpuarena import as_dtype, backends
backend = backends.create("virtual", 1 << 40, None, 256)
backend.commit(100)
array = backend.root(0, (100,), as_dtype("uint8"))
array[:] = 1
child = os.fork()
if not child:
    assert array.sum() == 100
    array[:] = 2
    backend.commit(1 << 20)
    backend.fill_bytes(0, 1 << 20, 3)
    del array, backend
    os._exit(0)
print(os.waitpid(child, 0)[1], array.sum(), backend.committed)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.stderr) == ("0 100 65536\n", "")


def test_devices_that_cannot_be_used_are_refused():
    for name, device, error in (
        ("virtual", "cuda", errors.DeviceMismatchError),
        ("virtual:torch", "meta", errors.DeviceMismatchError),
        ("virtual:torch", "nonsense", errors.ArgumentError),
        ("virtual:torch", 1.5, errors.ArgumentError),
    ):
        with pytest.raises(error):
            make(name, 100, device=device)
    if not torch.cuda.is_available():
        with pytest.raises(errors.DeviceMismatchError, match="CUDA devices that torch finds, not on cuda:0"):
            make("virtual:torch", 100, device="cuda:0")
    assert make("virtual", 100, device="cpu").device == "cpu"


def test_torch_follows_its_default_device():
    with torch.device("meta"), pytest.raises(errors.DeviceMismatchError, match="not on meta"):
        make("virtual:torch", 100)


def test_cupy_arrays_lie_on_device_memory_that_grows(monkeypatch):
    pytest.importorskip("cupy")
    cuda = FakeCuda()
    monkeypatch.setattr(virtual, "_cuda_driver", lambda device_id: CudaVmm(device_id, cuda))
    backend = make("virtual:cupy", device=1)
    assert (backend.name, backend.device, backend.nbytes) == ("cupy", "cuda:1", TIB)
    assert (backend.growable, backend.survives_fork, backend.committed) == (True, False, 2 << 20)
    backend.commit(5 << 20)
    array = backend.root(4 << 20, (8,), FLOAT32)
    assert (array.data.ptr, array.device.id) == (backend.address + (4 << 20), 1)
    assert backend.trim(0) == 4 << 20  # the first chunk stays
    assert backend.committed == 2 << 20
    with pytest.raises(errors.DeviceMismatchError):
        backend.viewer("host")
    backend.release()
    del backend
    assert len(cuda.memory.reserved) == 1
    del array
    assert cuda.memory.is_empty()


def test_a_device_has_one_driver(monkeypatch):
    monkeypatch.setattr(virtual, "CudaVmm", lambda device_id: [device_id])
    virtual._cuda_driver.cache_clear()
    assert virtual._cuda_driver(0) is virtual._cuda_driver(0) is not virtual._cuda_driver(1)
    virtual._cuda_driver.cache_clear()


def test_an_arena_lives_in_it(name):
    def factory(nbytes, *, device, alignment):
        backend = make(name, nbytes, alignment=alignment)
        backend.commit(nbytes)
        return backend

    run_arena_machine(factory)
    with Arena("1GiB", backend=factory) as arena:
        assert (arena.backend, arena.capacity) == (NAMES[name], 1 << 30)
        array = arena.zeros((4, 4), "float32")
    assert float(array.sum()) == 0
