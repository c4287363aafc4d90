from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from gpuarena import Arena
from gpuarena.errors import DeviceMismatchError, StaleRegionError
from shared_core.case import raw_bytes

SHARED = ["uint8", "int64", "float16", "bfloat16", "float32", "complex64", "float8_e4m3fn", "float8_e5m2"]


def region_of(case, name="float32", shape=(3, 4)):
    region = case.arena(4096).alloc(shape, name)
    region.reshape(-1).view("uint8")[...] = np.arange(region.nbytes, dtype=np.uint8)
    return region


def views(region, case):
    """The ways to see a region in each library, and whether this memory allows it."""
    return {
        "numpy": (region.as_numpy, case.on_cpu),
        "torch": (region.as_torch, True),
        "cupy": (region.as_cupy, not case.on_cpu),
    }


@pytest.mark.parametrize("library", ["numpy", "torch", "cupy"])
@pytest.mark.parametrize("name", SHARED)
def test_another_library_sees_the_same_bytes_or_raises(case, library, name):
    pytest.importorskip(library)
    region = region_of(case, name)
    for part in (region, region[1:, ::2], region[2, 1], region[:, 1:1]):
        as_library, possible = views(part, case)[library]
        if not possible:
            with pytest.raises(DeviceMismatchError, match="cannot reach"):
                as_library()
            continue
        seen = as_library()
        assert tuple(seen.shape) == part.shape
        assert raw_bytes(seen) == raw_bytes(part.array)
        assert str(seen.dtype).removeprefix("torch.") == name


@pytest.mark.parametrize("library", ["numpy", "torch", "cupy"])
def test_what_another_library_writes_is_seen_and_seen_by_it(case, library):
    pytest.importorskip(library)
    region = region_of(case, "int64")
    as_library, possible = views(region[1:, ::2], case)[library]
    if not possible:
        return
    seen = as_library()
    seen[...] = 77
    expected = np.arange(96, dtype=np.uint8).view(np.int64).reshape(3, 4).copy()
    expected[1:, ::2] = 77
    assert raw_bytes(region.array) == expected.tobytes()
    region[...] = 5
    assert raw_bytes(seen) == np.full((2, 2), 5).tobytes()


def test_a_region_is_its_own_librarys_array_each_time(case):
    region = region_of(case)
    own = {"host": region.as_numpy, "torch": region.as_torch, "cupy": region.as_cupy}[case.library]
    assert own() is region.array is region.array
    assert region[...].array is not region.array


def test_other_libraries_die_with_the_region(case):
    arena = case.arena(4096)
    checkpoint = arena.checkpoint()
    region = arena.alloc(4, "float32", fill=0)
    region.array
    arena.rollback(checkpoint)
    for as_library, _ in views(region, case).values():
        with pytest.raises(StaleRegionError):
            as_library()


@pytest.mark.parametrize("name", ["uint8", "int64", "float16", "float32", "complex64"])
def test_dlpack_shares_the_bytes(case, name):
    torch = pytest.importorskip("torch")
    region = region_of(case, name)
    for part in (region, region[1:, ::2], region[0, 0]):
        tensor = torch.from_dlpack(part)
        assert tensor.shape == part.shape
        assert tensor.data_ptr() == part.address
        assert raw_bytes(tensor) == raw_bytes(part.array)
        if case.on_cpu:
            array = np.from_dlpack(part)
            assert array.ctypes.data == part.address
            assert array.tobytes() == raw_bytes(part.array)
    assert region.__dlpack_device__() == region.array.__dlpack_device__()


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_dlpack_has_the_types_that_numpy_lacks(case, name):
    torch = pytest.importorskip("torch")
    region = region_of(case, name)
    tensor = torch.from_dlpack(region)
    assert tensor.dtype == getattr(torch, name)
    assert tensor.data_ptr() == region.address
    tensor.view(torch.uint8)[...] = 3
    assert raw_bytes(region.array) == bytes([3]) * region.nbytes


def test_dlpack_capsules_are_versioned_when_asked_for(case):
    region = region_of(case)
    assert '"dltensor_versioned"' in repr(region.__dlpack__(max_version=(1, 0)))
    assert '"dltensor"' in repr(region.__dlpack__())


def test_a_dlpack_capsule_that_nobody_takes_keeps_and_frees_its_memory(case):
    capsule = region_of(case).__dlpack__(max_version=(1, 0))
    del capsule


def test_a_cpu_array_protocol_is_there_exactly_when_the_cpu_can_read(case):
    region = region_of(case)
    assert hasattr(region, "__array_interface__") == case.on_cpu
    assert hasattr(region, "__cuda_array_interface__") == (not case.on_cpu)
    if not case.on_cpu:
        with pytest.raises(DeviceMismatchError):
            np.asarray(region)
        return
    for part in (region, region[1:, ::2], region[0, 0]):
        array = np.asarray(part)
        assert array.shape == part.shape
        assert array.ctypes.data == part.address
        assert array.flags.writeable
        assert part.__array_interface__["version"] == 3


def test_the_cuda_array_interface_describes_the_region(case):
    region = region_of(case)
    if case.on_cpu:
        with pytest.raises(AttributeError):
            region.__cuda_array_interface__
        return
    strided = region[1:, ::2]
    interface = strided.__cuda_array_interface__
    assert interface["version"] == 3
    assert (interface["shape"], interface["typestr"]) == ((2, 2), "<f4")
    assert interface["data"] == (strided.address, False)
    assert interface["strides"] == (16, 8)
    assert region.__cuda_array_interface__["strides"] is None
    assert region[:0].__cuda_array_interface__["data"][0] == 0
    assert interface.get("stream", None) != 0
    assert not hasattr(region.view("bfloat16"), "__cuda_array_interface__")


@pytest.mark.parametrize("name", SHARED)
def test_asarray_shares_and_array_copies(case, name):
    if not case.on_cpu:
        pytest.skip("the CPU cannot read this memory")
    region = region_of(case, name)
    shared, copy = np.asarray(region), np.array(region)
    assert shared.ctypes.data == region.address
    assert copy.ctypes.data != region.address
    assert shared.tobytes() == copy.tobytes() == raw_bytes(region.array)
    assert np.array(region, copy=False).ctypes.data == region.address
    region.view("uint8")[...] = 0
    assert not shared.view(np.uint8).any()
    assert copy.view(np.uint8).any()


def test_asarray_converts_only_with_a_copy(case):
    if not case.on_cpu:
        pytest.skip("the CPU cannot read this memory")
    region = case.arena(4096).from_array(np.float32([1.5, 2.5]))
    assert np.asarray(region, dtype=np.float64).tolist() == [1.5, 2.5]
    with pytest.raises(ValueError, match="copy"):
        np.asarray(region, dtype=np.float64, copy=False)
    bfloat16 = region_of(case, "bfloat16", (2,))
    with pytest.raises(ValueError, match="copy"):
        bfloat16.__array__(np.float32, copy=False)
    assert bfloat16.__array__(np.float32).dtype == np.float32
    assert bfloat16.__array__(copy=True).ctypes.data != bfloat16.address


def test_a_stale_region_is_refused_by_every_protocol(case):
    arena = case.arena(4096)
    for name in ("float32", "bfloat16"):
        with arena.scope():
            region = arena.alloc(4, name, fill=0)
            region.array
        for export in (
            region.__dlpack__,
            region.__dlpack_device__,
            region.__array__,
            lambda region=region: np.asarray(region),
        ):
            with pytest.raises(StaleRegionError):
                export()
    torch = pytest.importorskip("torch")
    with pytest.raises(StaleRegionError):
        torch.from_dlpack(region)


def test_arrays_outlive_the_arena_and_the_region(case):  # T6
    torch = pytest.importorskip("torch")
    arena = case.arena(4096)
    regions = [arena.alloc((8,), "float32", fill=number) for number in range(6)]
    arrays = [
        regions[0].array,
        torch.from_dlpack(regions[1]),
        regions[2].as_torch(),
        regions[3][::2].array,
        regions[4].view("uint8").as_torch().view(torch.float32),
    ]
    if case.on_cpu:
        arrays.append(np.asarray(regions[5]))
    arena.close()
    del arena, regions
    filler = [
        case.arena(4096).alloc(4096, "uint8", fill=0xEE).array for _ in range(20)
    ]  # likely to reuse freed memory
    for number, array in enumerate(arrays):
        assert raw_bytes(array) == np.full(tuple(array.shape), number, np.float32).tobytes()
    del filler


def test_arrays_that_are_alive_when_python_exits_do_no_harm(case):
    code = f"""
        import numpy as np, torch
        from gpuarena import Arena
        arena = Arena(4096, backend={case.library!r}, device={case.device!r})
        region = arena.alloc((4, 4), "float32", fill=1)
        keep = [region.array, region[1:, ::2].array, region.as_torch(), torch.from_dlpack(region), region.__dlpack__()]
        if {case.on_cpu}:
            keep += [np.asarray(region), np.from_dlpack(region), region.as_numpy()]
            keep += [torch.from_dlpack(arena.alloc(4, "bfloat16", fill=1))]
        if {case.library == "cupy"}:
            keep += [region.as_cupy()]
        import builtins
        builtins.keep = keep  # which is torn down last
        print("alive")
    """
    done = run_python(code, strict=case.on_cpu)  # on a GPU torch and CuPy warn of what else is installed
    assert (done.returncode, done.stdout.strip()) == (0, "alive"), done.stderr


def run_python(code, *, strict=True):
    """Run code in a new interpreter, with warnings as errors, as here, if it is `strict`."""
    return subprocess.run(
        [sys.executable, *(["-W", "error"] if strict else []), "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )


def test_an_arena_over_the_array_of_another_arena_is_a_child(case):  # D2
    parent = case.arena(8192)
    block = parent.alloc(4096, "uint8", fill=0)
    after = parent.alloc(16, "uint8", fill=0xAA)
    child = Arena.from_buffer(block.array)
    assert (child.capacity, child.address) == (4096, block.address)
    regions = [child.alloc(100, "uint8", fill=number) for number in (1, 2)]
    assert raw_bytes(block[:100].array) == b"\x01" * 100
    assert raw_bytes(block[256:356].array) == b"\x02" * 100
    with pytest.raises(MemoryError):
        child.alloc(4000, "uint8")
    child.reset()
    assert not any(region.is_live for region in regions)
    assert block.is_live
    assert raw_bytes(after.array) == b"\xaa" * 16


__all__ = [name for name in globals() if name.startswith("test_")]
