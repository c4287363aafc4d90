"""What the CuPy backend does before any data is touched, on a machine without a driver.

CuPy makes views of foreign memory as long as their device is given, so host addresses do. The data is tested in
tests/gpu, by the same bodies as the other backends'.
"""

from __future__ import annotations

import sys
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

cupy = pytest.importorskip("cupy")

from gpuarena import Arena, as_dtype  # noqa: E402
from gpuarena.backends.cupy import CupyBackend  # noqa: E402
from gpuarena.errors import (  # noqa: E402
    ArgumentError,
    DeviceMismatchError,
    DTypeError,
    ShapeError,
    StaleRegionError,
)
from gpuarena.testing import Driver, FakeDevice, indices, programs, run_lockstep  # noqa: E402


def on_host_memory(nbytes, *, device=None, alignment=256):
    """A `CupyBackend` whose device memory is a NumPy array."""
    memory = np.zeros(nbytes + alignment, np.uint8)
    start = -memory.ctypes.data % alignment
    return CupyBackend.adopt_pointer(memory.ctypes.data + start, nbytes, memory, 0)


@pytest.fixture
def arena():
    return Arena(4096, backend=on_host_memory)


def test_an_array_lies_where_the_region_does(arena):
    arena.alloc(1, "uint8")
    region = arena.alloc((2, 3), "float32")
    array = region.array
    assert isinstance(array, cupy.ndarray)
    assert (array.shape, array.strides, array.dtype) == ((2, 3), (12, 4), np.float32)
    assert array.data.ptr == region.address == arena.address + 256
    assert (arena.backend, arena.device) == ("cupy", "cuda:0")
    assert array.data.device_id == 0
    assert array.flags.c_contiguous


@given(data=st.data(), shape=hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
def test_the_array_of_a_slice_has_numpys_layout(data, shape):  # D3
    region = Arena(4096, backend=on_host_memory).alloc(shape, "int32")
    expected = np.zeros(shape, np.int32)
    key = data.draw(indices(shape))
    view = expected[
        (*(key if isinstance(key, tuple) else (key,)), *(() if "Ellipsis" in str(key) else (...,)))
    ]
    part = region[key]
    assert part.array.shape == view.shape
    if view.size:
        assert part.array.data.ptr - region.address == view.ctypes.data - expected.ctypes.data
        for dim, ours, theirs in zip(view.shape, part.array.strides, view.strides, strict=True):
            assert dim == 1 or ours == theirs


def test_views_as_another_type_and_shape_stay_in_place(arena):  # D7
    region = arena.alloc((2, 6), "float32")
    assert region.view("int16").array.shape == (2, 12)
    assert region.view("complex64")[1].array.data.ptr == region.address + 24
    assert region.reshape(3, 4)[::-1].array.strides == (-16, 4)


@pytest.mark.parametrize(
    "name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "bool", "float16", "complex128", "int4"]
)
def test_types_of_ml_dtypes_are_cupys_too(arena, name):
    array = arena.alloc((2, 3), name).array
    assert array.dtype == as_dtype(name).numpy
    assert array.itemsize == as_dtype(name).itemsize


def test_float8_e5m2_is_not_exported_as_a_float_of_8_bits(arena, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)  # which exports it in CuPy's place
    with pytest.raises(BufferError, match="float8_e5m2"):
        arena.alloc(4, "float8_e5m2").__dlpack__()


def test_types_of_torch_alone_are_refused(arena):
    for name in ("bits8", "int3", "float4_e2m1fn_x2"):
        with pytest.raises(DTypeError):
            arena.alloc(1, name)
    assert arena.stats.n_regions == 0


def test_numpy_cannot_reach_the_memory(arena):
    region = arena.alloc(4, "float32")
    with pytest.raises(DeviceMismatchError, match="NumPy cannot reach"):
        region.as_numpy()
    with pytest.raises(DeviceMismatchError):
        np.asarray(region)
    assert not hasattr(region, "__array_interface__")
    assert region.as_cupy() is region.array


def test_the_cuda_array_interface_describes_the_region(arena):
    region = arena.alloc((3, 4), "float32")
    part = region[1:, ::2]
    assert part.__cuda_array_interface__ == {
        "version": 3,
        "shape": (2, 2),
        "typestr": "<f4",
        "data": (part.address, False),
        "strides": (16, 8),
        "stream": None,
    }
    assert region.__cuda_array_interface__["strides"] is None
    assert region[:0].__cuda_array_interface__["data"] == (0, False)
    for name in ("bfloat16", "float8_e5m2", "float8_e4m3fn"):  # typestr has no word for them
        assert not hasattr(arena.alloc(1, name), "__cuda_array_interface__")


def test_a_stale_region_gives_no_array_and_no_interface(arena):
    with arena.scope():
        region = arena.alloc(4, "float32")
        array = region.array
    for way in (
        lambda: region.array,
        region.as_cupy,
        lambda: region.__cuda_array_interface__,
        lambda: region[1:],
    ):
        with pytest.raises(StaleRegionError):
            way()
    assert array.shape == (4,)


def owned_arena():
    """An arena on the memory of an object that can be watched."""
    memory = np.zeros(1024, np.uint8)
    return Arena(1024, backend=lambda nbytes, **_: CupyBackend.adopt_pointer(memory.ctypes.data, nbytes, memory, 0),
                 alignment=1), weakref.ref(memory)  # fmt: skip


def test_an_array_keeps_the_memory_alive_and_nothing_else_does():  # T6
    arena, memory = owned_arena()
    region = arena.alloc(4, "uint8")
    whole, part = region.array, region[1:].array
    arena.close()
    del arena, region
    assert memory() is not None
    del whole
    assert memory() is not None
    del part
    assert memory() is None


def test_the_consumer_of_an_interface_keeps_the_memory_by_the_region():  # T6
    arena, memory = owned_arena()
    region = arena.alloc(4, "uint8")
    region.__cuda_array_interface__
    arena.close()
    del arena
    assert memory() is not None
    del region
    assert memory() is None


def test_an_array_of_the_library_is_adopted():
    memory = np.zeros(1024, np.uint8)
    unowned = cupy.cuda.UnownedMemory(memory.ctypes.data, 1024, memory, 0)
    array = cupy.ndarray((16, 4), np.float32, cupy.cuda.MemoryPointer(unowned, 64))
    arena = Arena.from_buffer(array)
    assert (arena.backend, arena.capacity, arena.address) == ("cupy", 256, memory.ctypes.data + 64)
    for refused in (array[:, ::2], array.T, array[:0]):
        with pytest.raises(ShapeError):
            Arena.from_buffer(refused)


@pytest.mark.parametrize("device", ["gpu", "cpu", "cuda:x", -1, 1.5])
def test_what_is_no_device_is_refused(device):
    with pytest.raises(ArgumentError, match="CUDA device"):
        Arena(64, backend="cupy", device=device)


@pytest.mark.skipif(cupy.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("device", [None, "cuda", 0, "cuda:0"])
def test_a_machine_without_a_device_is_a_device_error(device):
    with pytest.raises(DeviceMismatchError, match="CuPy"):
        Arena(64, backend="cupy", device=device)


@given(programs())
def test_everything_but_the_data_is_as_on_the_host(program):  # T9
    host = Driver(Arena(1024, alignment=1024), to_numpy=None)
    run_lockstep(program, [host, Driver(Arena(1024, backend=on_host_memory, alignment=1024), to_numpy=None)])


def test_the_memory_is_released_once():  # T5
    fake = FakeDevice()

    def factory(nbytes, *, device, alignment):
        owner = fake(nbytes, alignment=alignment)
        return CupyBackend.adopt_pointer(owner.address, nbytes, owner, 0)

    arena = Arena(256, backend=factory)
    arena.alloc(4, "float32").array
    arena.close()
    arena.close()
    assert (fake.n_allocated, fake.n_freed) == (1, 1)
