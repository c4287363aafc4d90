"""`Arena.from_buffer`: memory that somebody else owns."""

from __future__ import annotations

import array
import ctypes
import mmap
import weakref
from multiprocessing import shared_memory

import ml_dtypes
import numpy as np
import pytest

from gpuarena import Arena
from gpuarena.errors import (
    ArgumentError,
    ArgumentTypeError,
    AutogradError,
    DeviceMismatchError,
    OutOfMemoryError,
    ReadOnlyError,
    ShapeError,
)

torch = pytest.importorskip("torch")


def uses_all_of(arena, address, nbytes):
    """Check that an arena is exactly the bytes at `address`, by writing them all."""
    assert (arena.address, arena.capacity) == (address, nbytes)
    with arena.scope():
        everything = arena.alloc(nbytes, "uint8", align=1)
        everything[...] = np.arange(nbytes, dtype=np.uint8)
        assert ctypes.string_at(address, nbytes) == np.arange(nbytes, dtype=np.uint8).tobytes()
        assert everything.as_torch().data_ptr() == everything.as_numpy().ctypes.data == address
        assert bytes(everything.as_torch().tolist()) == bytes(everything.as_numpy())
        with pytest.raises(OutOfMemoryError):
            arena.alloc(1, "uint8", align=1)
    return True


def test_a_bytearray():
    buffer = bytearray(1000)
    address = ctypes.addressof((ctypes.c_char * 1000).from_buffer(buffer))
    assert uses_all_of(Arena.from_buffer(buffer), address, 1000)
    assert Arena.from_buffer(buffer).backend == "host"
    assert buffer[7] == 7


def test_a_bytearray_cannot_be_resized_while_an_arena_holds_it():
    buffer = bytearray(64)
    arena = Arena.from_buffer(buffer)
    with pytest.raises(BufferError):
        buffer.append(0)
    arena.close()
    buffer.append(0)


@pytest.mark.parametrize(
    "buffer",
    [
        memoryview(bytearray(96)),
        memoryview(bytearray(96))[8:80],
        array.array("d", [0.0] * 12),
        (ctypes.c_int16 * 30)(),
        np.zeros((4, 6), np.float32),
        np.zeros(7, ml_dtypes.bfloat16),
        np.zeros(7, "M8[s]"),
        np.zeros(7, "i1,f8"),
        np.zeros((), np.int64),
        np.zeros(100, np.uint8)[3:90],
        np.ma.zeros(9),
    ],
    ids=[
        "memoryview",
        "slice",
        "array",
        "ctypes",
        "2-d",
        "bfloat16",
        "datetime64",
        "structure",
        "0-d",
        "part",
        "masked",
    ],
)
def test_buffers_of_any_kind(buffer):
    as_array = np.asarray(buffer)
    assert uses_all_of(Arena.from_buffer(buffer), as_array.ctypes.data, as_array.nbytes)


def test_a_memory_map(tmp_path):
    path = tmp_path / "memory"
    path.write_bytes(bytes(8192))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        arena = Arena.from_buffer(memory)
        assert arena.capacity == 8192
        arena.alloc(5, "uint8", fill=3)
        with pytest.raises(BufferError):
            memory.close()
        arena.close()
        memory.flush()
    assert path.read_bytes()[:6] == b"\x03" * 5 + b"\x00"


def test_a_numpy_memory_map(tmp_path):
    mapped = np.memmap(tmp_path / "memory", np.float32, "w+", shape=(1024,))
    arena = Arena.from_buffer(mapped)
    arena.alloc(2, "float32", fill=1.5)
    mapped.flush()
    assert np.fromfile(tmp_path / "memory", np.float32, 3).tolist() == [1.5, 1.5, 0]


def test_shared_memory_is_seen_by_another_arena_over_it():
    memory = shared_memory.SharedMemory(create=True, size=4096)
    try:
        arena, other = Arena.from_buffer(memory.buf), Arena.from_buffer(memory.buf)
        arena.alloc(4, "int32", fill=[1, 2, 3, 4])
        assert other.alloc(4, "int32").array.tolist() == [1, 2, 3, 4]
        arena.close()
        other.close()
        del arena, other
        memory.close()
    finally:
        memory.unlink()


@pytest.mark.parametrize(
    "name", ["uint8", "float32", "bfloat16", "complex128", "float8_e4m3fn", "int4", "bits16"]
)
def test_a_tensor_of_any_type(name):
    dtype = getattr(torch, name)
    tensor = torch.zeros(160, dtype=torch.uint8).view(dtype)
    arena = Arena.from_buffer(tensor)
    assert arena.backend == "torch"
    assert uses_all_of(arena, tensor.data_ptr(), 160)


@pytest.mark.parametrize("start", [0, 1, 3, 4, 16, 17])
def test_a_tensor_with_an_offset(start):
    tensor = torch.zeros(200, dtype=torch.uint8)[start:190]
    arena = Arena.from_buffer(tensor, alignment=16)
    assert uses_all_of(arena, tensor.data_ptr(), 190 - start)
    region = arena.alloc(3, "float32", fill=[1, 2, 3])
    assert region.array.data_ptr() % 16 == 0
    assert region.array.tolist() == [1, 2, 3]
    assert tensor.view(torch.uint8)[region.offset :][:12].view(torch.uint8).tolist() == list(
        np.float32([1, 2, 3]).tobytes()
    )


@pytest.mark.parametrize("skew", range(17))
@pytest.mark.parametrize("adopt", ["numpy", "torch.frombuffer", "torch.from_numpy"])
def test_memory_at_any_address(adopt, skew):
    # a torch storage that starts at an odd address allows no typed views; the arena's must work all the same
    memory = np.zeros(512, np.uint8)
    start = -memory.ctypes.data % 16 + skew
    part = memory[start : start + 300]
    buffer = {
        "numpy": lambda: part,
        "torch.frombuffer": lambda: torch.frombuffer(memory, dtype=torch.uint8, offset=start, count=300),
        "torch.from_numpy": lambda: torch.from_numpy(part),
    }[adopt]()
    arena = Arena.from_buffer(buffer, alignment=1)
    assert uses_all_of(arena, part.ctypes.data, 300)
    for name in ("uint8", "int16", "float32", "complex128", "uint8"):
        region = arena.alloc(3, name)
        region[...] = [1, 2, 3]
        assert region.as_torch().data_ptr() == region.as_numpy().ctypes.data == region.address
        assert region[1:].as_torch().data_ptr() == region.address + region.dtype.itemsize
        assert region.as_torch().tolist() == region.as_numpy().tolist() == [1, 2, 3]
        assert region[::2].as_torch().tolist() == [1, 3]
        assert region.view("uint8").as_torch().tolist() == list(
            memory[start + region.offset :][: region.nbytes]
        )
    below = arena.alloc(20, "uint8", align=16, fill=0)
    assert below.view("float32").as_torch().shape == (5,)
    assert arena.alloc((0, 3), "float64").as_torch().shape == (0, 3)
    assert below[3:3].view("float32").as_torch().shape == (0,)


def test_bytes_seen_as_another_type_below_the_first_aligned_address():
    memory = np.zeros(512, np.uint8)
    start = -memory.ctypes.data % 16 + 4
    arena = Arena.from_buffer(
        torch.frombuffer(memory, dtype=torch.uint8, offset=start, count=64), alignment=1
    )
    region = arena.alloc(24, "uint8", fill=1)
    assert region.view("int32").array.tolist() == [0x01010101] * 6
    assert region[8:].view("int32")[1:].array.data_ptr() == memory.ctypes.data + start + 12
    version = region.array._version
    region[4:8].view("int32")[...] = 0
    assert region.array._version > version
    assert memory[start : start + 10].tolist() == [1, 1, 1, 1, 0, 0, 0, 0, 1, 1]


def test_an_owner_is_kept_as_long_as_anything_uses_its_memory():  # T6
    class Owner(bytearray):
        """Can be referred to weakly."""

    owner = Owner(256)
    watched = weakref.ref(owner)
    arena = Arena.from_buffer(owner)
    region = arena.alloc(4, "float32", fill=2)
    tensor = region.as_torch()
    del owner, region
    assert watched() is not None
    arena.close()
    del arena
    assert watched() is not None
    assert tensor.tolist() == [2] * 4
    del tensor
    assert watched() is None


@pytest.mark.parametrize(
    "see",
    [
        np.asarray,
        lambda region: np.asarray(region[1:]),
        lambda region: np.asarray(region.view("bfloat16")),
        lambda region: region.as_numpy(),
        lambda region: region[1:].array,
        np.from_dlpack,
        torch.from_dlpack,
    ],
    ids=["asarray", "slice", "bfloat16", "as_numpy", "array", "from_dlpack", "torch"],
)
def test_an_array_made_of_a_torch_region_keeps_the_memory_of_a_closed_arena(see):  # T6
    memory = np.zeros(256, np.uint8)
    watched = weakref.ref(memory)
    arena = Arena.from_buffer(torch.from_numpy(memory), alignment=16)
    array = see(arena.alloc(4, "int16"))  # whose own array nobody has asked for
    del memory
    arena.close()
    del arena
    assert watched() is not None
    del array
    assert watched() is None


def test_the_memory_of_a_tensor_outlives_the_tensor():  # T6
    tensor = torch.zeros(256)
    arena = Arena.from_buffer(tensor)
    del tensor
    array = arena.alloc(4, "float32", fill=2).array
    arena.close()
    del arena
    filler = [torch.full((256,), 9.0) for _ in range(10)]
    assert array.tolist() == [2] * 4
    del filler


class Exchanged:
    """An object that offers nothing but DLPack."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@pytest.mark.parametrize("array", [np.zeros((4, 6), np.float32), torch.zeros(24)], ids=["numpy", "torch"])
def test_a_dlpack_object(array):
    address = array.ctypes.data if isinstance(array, np.ndarray) else array.data_ptr()
    assert uses_all_of(Arena.from_buffer(Exchanged(array)), address, 96)


def test_a_region_of_another_arena():  # D2
    for backend in ("host", "torch"):
        region = Arena(4096, backend=backend).alloc(1024, "uint8", fill=0)
        child = Arena.from_buffer(region)
        child.alloc(4, "uint8", fill=5)
        assert region[:5].as_numpy().tolist() == [5, 5, 5, 5, 0]


@pytest.mark.parametrize(
    ("buffer", "error"),
    [
        (lambda: b"bytes", ReadOnlyError),
        (lambda: memoryview(bytearray(8)).toreadonly(), ReadOnlyError),
        (lambda: np.broadcast_to(np.float32(0), (2, 2)), ShapeError),
        (lambda: _read_only(np.zeros(4)), ReadOnlyError),
        (lambda: Exchanged(_read_only(np.zeros(4))), ReadOnlyError),
        (lambda: bytearray(), ShapeError),
        (lambda: np.zeros((0, 3)), ShapeError),
        (lambda: torch.zeros(0), ShapeError),
        (lambda: np.zeros((4, 4))[:, ::2], ShapeError),
        (lambda: np.zeros((4, 4)).T, ShapeError),
        (lambda: np.zeros(4)[::-1], ShapeError),
        (lambda: memoryview(bytearray(16))[::2], ShapeError),
        (lambda: torch.zeros(4, 4)[:, ::2], ShapeError),
        (lambda: torch.zeros(4, 5).t(), ShapeError),
        (lambda: torch.zeros(1).expand(5), ShapeError),
        (lambda: torch.zeros(4, requires_grad=True), AutogradError),
        (lambda: torch.zeros(4, requires_grad=True) * 2, AutogradError),
        (lambda: torch.nn.Parameter(torch.zeros(4)), AutogradError),
        (lambda: torch.zeros(4, dtype=torch.complex64).conj(), ArgumentError),
        (lambda: torch.zeros(4, dtype=torch.complex64).conj().imag[:1], ArgumentError),
        (lambda: torch.zeros(4).to_sparse(), DeviceMismatchError),
        (lambda: torch.zeros(4, device="meta"), DeviceMismatchError),
        (lambda: np.array([object(), None]), ArgumentTypeError),
        (lambda: "text", ArgumentTypeError),
        (lambda: None, ArgumentTypeError),
        (lambda: 1024, ArgumentTypeError),
        (lambda: [0] * 64, ArgumentTypeError),
        (lambda: object(), ArgumentTypeError),
    ],
)
def test_what_cannot_be_an_arenas_memory_is_refused(buffer, error):
    with pytest.raises(error) as caught:
        Arena.from_buffer(buffer())
    assert caught.type is error


def _read_only(array):
    array.flags.writeable = False
    return array


def test_detached_memory_of_a_tensor_that_requires_grad_is_taken():
    parameter = torch.nn.Parameter(torch.zeros(64))
    region = Arena.from_buffer(parameter.detach()).alloc(4, "float32", align=4, fill=1)
    assert region.array.data_ptr() == parameter.data_ptr()
    assert parameter[:5].tolist() == [1, 1, 1, 1, 0]


def test_memory_of_an_inference_tensor_is_ordinary_memory():
    with torch.inference_mode():
        tensor = torch.zeros(64)
    array = Arena.from_buffer(tensor).alloc(4, "float32", fill=1).array
    assert not array.is_inference()
    array.add_(1)
    assert (array * torch.ones(4, requires_grad=True)).sum().item() == 8
