"""What was reported for memory that several libraries share: lifetimes, alignment, silent copies."""

from __future__ import annotations

import csv
import gc
import io
import json
import mmap
import multiprocessing.reduction
import pickle
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("torch.multiprocessing")  # it teaches the pickler of processes to send tensors

from gpuarena import Arena, as_dtype  # noqa: E402
from gpuarena.errors import (  # noqa: E402
    AlignmentError,
    ArenaError,
    DeviceMismatchError,
    NotCopyableError,
    ReadOnlyError,
    StaleRegionError,
)
from gpuarena.testing import FakeDevice  # noqa: E402

#: The ways to the bytes of a region, for other libraries.
ROUTES = {
    "array": lambda region: region.array,
    "slice": lambda region: region[1:].array,
    "as_torch": lambda region: region.as_torch(),
    "numpy.asarray": np.asarray,
    "numpy.from_dlpack": np.from_dlpack,
    "torch.from_dlpack": torch.from_dlpack,
    "torch.as_tensor": torch.as_tensor,
    "capsule": lambda region: region.__dlpack__(max_version=(1, 0)),
    "memoryview": lambda region: memoryview(region.array),
}


# pytorch/pytorch#146431: a tensor outlives the pool that it came from, and its memory is freed by the wrong function
@pytest.mark.parametrize("route", ROUTES)
def test_pytorch_pytorch_146431_an_array_outlives_its_arena(route):
    device = FakeDevice()
    arena = Arena(4096, backend=device)
    region = arena.alloc(8, "uint8", fill=7)
    made = ROUTES[route](region)
    arena.close()
    del arena, region
    gc.collect()
    assert (device.n_released, device.n_freed) == (1, 0)
    if route != "capsule":
        assert set(np.asarray(made).tolist()) == {7}
    del made
    assert device.n_freed == 1


# NVIDIA/cuda-python#1043: a view of foreign memory keeps the object that it was made of for ever
@pytest.mark.parametrize("route", ROUTES)
def test_nvidia_cuda_python_1043_a_view_that_goes_leaves_no_reference(route):
    arena = Arena(4096)
    region = arena.alloc(8, "uint8", fill=7)
    ROUTES[route](region)
    before = sys.getrefcount(region), sys.getrefcount(arena), sys.getrefcount(region.array)
    for _ in range(10):
        ROUTES[route](region)
    assert (sys.getrefcount(region), sys.getrefcount(arena), sys.getrefcount(region.array)) == before


def stale(arena):
    with arena.scope():
        region = arena.alloc(4, "uint8")
    region.array


def unbalanced(arena):
    with arena.scope("open"):
        arena.assert_balanced()


def pinned(arena):
    with arena.pin("graph"):
        arena.alloc(4, "uint8")
    arena.reset()


# pytorch/pytorch#133280: an error loses its type on the way to who handles it; here, on that from a worker process
@pytest.mark.parametrize("call", [stale, unbalanced, pinned])
def test_pytorch_pytorch_133280_errors_that_name_a_handle_survive_pickle(call):
    with pytest.raises(ArenaError) as caught:
        call(Arena(1024))
    error = caught.value
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy)) == (type(error), str(error))


# pytorch/pytorch#9260: the deleter of a DLPack capsule is NULL, or is called twice, and the process crashes
def test_pytorch_pytorch_9260_a_dlpack_capsule_frees_its_memory_exactly_once():
    for n_consumers in (0, 1, 2):
        device = FakeDevice()
        arena = Arena(4096, backend=device)
        capsule = arena.alloc(8, "uint8", fill=7).__dlpack__()
        arena.close()
        del arena
        assert device.n_freed == 0
        if n_consumers:
            tensor = torch.utils.dlpack.from_dlpack(capsule)
            assert tensor.tolist() == [7] * 8
        if n_consumers == 2:
            with pytest.raises(RuntimeError, match="consumed only once"):
                torch.utils.dlpack.from_dlpack(capsule)
        del capsule
        assert device.n_freed == (not n_consumers)
        if n_consumers:
            assert tensor.tolist() == [7] * 8
            del tensor
        assert device.n_freed == 1


# pytorch/pytorch#190043: frombuffer takes an offset that the dtype's alignment forbids, and the process crashes
@given(
    st.integers(0, 63),
    st.sampled_from(["int16", "float32", "float64", "complex64", "complex128", "bfloat16"]),
)
def test_pytorch_pytorch_190043_a_misaligned_view_is_refused(start, name):
    dtype = as_dtype(name)
    region = Arena(1024, backend="torch").alloc(128, "uint8")
    part = region[start : start + dtype.itemsize]
    if part.address % dtype.alignment:
        with pytest.raises(AlignmentError, match="is no multiple"):
            part.view(name)
    else:
        assert part.view(name).array.data_ptr() == part.address
    memory = bytearray(1024)
    adopted = Arena.from_buffer(memoryview(memory)[start:], alignment=1)  # at any address
    region = adopted.alloc(2, name, fill=1)
    assert region.address % dtype.alignment == 0
    assert region.array.flags.aligned


# pytorch/pytorch#184714: what starts at an odd offset breaks kernels that load 16 bytes at a time
@pytest.mark.parametrize("backend", ["host", "torch"])
def test_pytorch_pytorch_184714_every_region_starts_at_a_multiple_of_256(backend):
    arena = Arena(1 << 16, backend=backend)
    for n in range(1, 40):
        for name in ("uint8", "bfloat16", "float32"):
            assert arena.alloc(n, name).address % 256 == 0
    region = arena.alloc((4, 3), "float16")
    address = region.array.ctypes.data if backend == "host" else region.array.data_ptr()
    assert region.address == address
    assert [region[i].address % 16 for i in range(4)] == [0, 6, 12, 2], "a slice tells where it starts"
    assert arena.alloc(3, "float16", align=4096).address % 4096 == 0


# pytorch/pytorch#54139: torch.as_tensor copies an object with __cuda_array_interface__ to the CPU, silently
def test_pytorch_pytorch_54139_no_way_into_torch_copies():
    region = Arena(4096).alloc((3, 4), "float32", fill=1)
    assert not hasattr(region, "__cuda_array_interface__")
    for part in (region, region[1:, ::2]):
        ways = (part.as_torch, lambda: torch.as_tensor(part), lambda: torch.from_dlpack(part))  # noqa: B023
        for way in ways:
            tensor = way()
            assert tensor.data_ptr() == part.address
            tensor.fill_(5)
            assert (part.array == 5).all()
            part[...] = 1


# pytorch/pytorch#32868: memory that may only be read is refused by one library, and written by the next
def test_pytorch_pytorch_32868_memory_that_may_only_be_read_is_refused():
    array = np.zeros(100, np.uint8)
    array.flags.writeable = False

    class Exchanged:
        def __dlpack__(self, **options):
            return array.__dlpack__(max_version=(1, 0))

        def __dlpack_device__(self):
            return 1, 0

    for memory in (
        array,
        bytes(100),
        memoryview(b"x" * 10),
        mmap.mmap(-1, 100, access=mmap.ACCESS_READ),
        Exchanged(),
    ):
        with pytest.raises(ReadOnlyError):
            Arena.from_buffer(memory)
    assert np.asarray(Arena(100).alloc(4, "uint8")).flags.writeable


# pytorch/tensorpipe#248, openucx/ucx#11724, cupy/cupy#9436, cupy/cupy#9306, numba/numba#3379, NVIDIA/cudf#2469: a
# pointer into the middle of a buffer is given to another process, which sees the buffer's start, or nothing
@pytest.mark.parametrize("backend", ["torch", "host", "virtual:torch"])
def test_pytorch_tensorpipe_248_a_part_of_an_arena_is_sent_to_no_process(backend):
    if backend.startswith("virtual") and sys.platform != "linux":
        pytest.skip("needs Linux")
    arena = Arena(1 << 20, backend=backend)
    arena.alloc(1000, "uint8")
    region = arena.alloc(8, "uint8", fill=7)
    tensor = region.as_torch()
    for send in (
        lambda: multiprocessing.reduction.ForkingPickler.dumps(tensor),
        lambda: tensor.share_memory_(),
        lambda: torch.save(tensor, io.BytesIO()),
        lambda: pickle.dumps(tensor),
        lambda: pickle.dumps(region),
    ):
        with pytest.raises(NotCopyableError, match="clone"):
            send()
    assert tensor.data_ptr() == region.address
    copy = pickle.loads(pickle.dumps(tensor.clone()))
    assert (copy.tolist(), copy.untyped_storage().nbytes()) == ([7] * 8, 8)


# pytorch/pytorch#185420, pytorch/torchtitan#3375: the viewer of memory snapshots is empty, for it cannot read the file
@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_pytorch_pytorch_185420_a_log_is_text_that_any_program_reads(tmp_path, suffix):
    arena = Arena(4096)
    path = tmp_path / f"log{suffix}"
    with arena.record(path), arena.scope("step"):
        arena.alloc((2, 3), "float32", label='mask, of "two"')
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file)) if suffix == ".csv" else [json.loads(line) for line in file]
    assert [row["kind"] for row in rows] == [
        *("start", "start", "scope_open", "alloc", "rollback", "scope_close")
    ]
    assert int(rows[3]["nbytes"]) == 24
    assert "scope 'step'" in rows[4]["cause"]


# cupy/cupy#9918: an array made at a pointer into a huge buffer has a wrong address, and access is illegal
def test_cupy_cupy_9918_offsets_beyond_32_bits_are_right():
    cupy = pytest.importorskip("cupy")
    from gpuarena.backends.cupy import CupyBackend

    start, nbytes = 1 << 44, 1 << 40  # nothing is ever read there
    arena = Arena(nbytes, backend=lambda *_, **__: CupyBackend.adopt_pointer(start, nbytes, None, 0))
    big = arena.alloc((5, 1 << 33), "float32")
    for row in range(5):
        assert big[row, -1].array.data.ptr == start + 4 * ((row + 1 << 33) - 1) == big[row, -1].address
    region = arena.alloc(4, "int64")
    assert (region.offset, region.array.data.ptr) == (5 << 35, start + (5 << 35))
    assert isinstance(region[1:].array, cupy.ndarray)
    assert big[::-1, ::2].array.strides == (-(1 << 35), 8)


# pytorch/pytorch#149802: what belongs to one device is used on another, and an internal assertion fails
def test_pytorch_pytorch_149802_memory_of_another_device_is_refused():
    cupy = pytest.importorskip("cupy")
    from gpuarena.backends.cupy import CupyBackend

    memory = np.zeros(4096, np.uint8)

    def on_device_1(nbytes, **_):
        return CupyBackend.adopt_pointer(memory.ctypes.data, nbytes, memory, 1)

    arena = Arena(4096, backend=on_device_1, alignment=16)
    region = arena.alloc(4, "float32")
    assert (arena.device, region.array.data.device_id) == ("cuda:1", 1)
    with pytest.raises(DeviceMismatchError, match="NumPy cannot reach memory on cuda:1"):
        region.as_numpy()
    with pytest.raises(DeviceMismatchError, match="cannot reach host memory"):
        Arena(100).alloc(4, "uint8").as_cupy()
    with pytest.raises(DeviceMismatchError, match="no device"):
        Arena(100, device="cuda:1")
    assert isinstance(region.array, cupy.ndarray)


# rapidsai/rmm#1628: torch on top of a pool of another library ends in a segmentation fault
@pytest.mark.parametrize("first", ["torch", "numpy"])
def test_rapidsai_rmm_1628_torch_uses_the_memory_of_another_library(first):
    owner = torch.zeros(1024) if first == "torch" else np.zeros(1024, np.float32)
    arena = Arena.from_buffer(owner)
    region = arena.alloc((4, 4), "float32", fill=2)
    region.as_torch().mul_(2)
    assert float(np.asarray(owner).sum()) == 64
    with arena.scope():
        stale = arena.alloc(4, "float32")
    del owner
    gc.collect()
    assert region.as_torch().sum() == 64
    with pytest.raises(StaleRegionError):
        stale.as_torch()
