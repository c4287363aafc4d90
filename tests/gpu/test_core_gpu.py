"""The arena on GPU memory: the bodies that every backend passes, the state machine, and what only a GPU shows."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from hypothesis import given

torch = pytest.importorskip("torch")

from shared_core.assignment import *  # noqa: E402, F403
from shared_core.autograd import *  # noqa: E402, F403
from shared_core.case import CASES, raw_bytes, why_no_gpu  # noqa: E402
from shared_core.dtypes import *  # noqa: E402, F403
from shared_core.indexing import *  # noqa: E402, F403
from shared_core.interop import *  # noqa: E402, F403
from shared_core.lifetime import *  # noqa: E402, F403

from gpuarena import Arena, backends  # noqa: E402
from gpuarena.testing import Driver, programs, run_arena_machine, run_lockstep  # noqa: E402

pytestmark = pytest.mark.gpu

if all(why_no_gpu().values()):
    pytest.skip("; ".join(filter(None, why_no_gpu().values())), allow_module_level=True)


def test_the_arena_behaves_as_the_model(case):
    def factory(nbytes, *, device, alignment):
        return backends.create(case.library, nbytes, case.device, alignment)

    run_arena_machine(factory)


@given(program=programs())
def test_every_backend_does_what_the_host_does(case, program):  # T9
    drivers = [Driver(other.arena(1024, alignment=1024)) for other in (CASES["host"], case)]
    run_lockstep(program, drivers)


def test_memory_of_the_library_is_adopted(case):
    array = case.arena(4096, alignment=16).empty(1000, "float32")
    child = Arena.from_buffer(array)
    region = child.alloc(4, "int32", fill=[1, 2, 3, 4])
    assert raw_bytes(array)[region.offset :][:16] == np.int32([1, 2, 3, 4]).tobytes()
    assert child.backend == case.library


def test_memory_of_the_library_is_adopted_through_dlpack(case):
    class Exchanged:
        def __dlpack__(self, **options):
            return region.__dlpack__(**options)

        def __dlpack_device__(self):
            return region.__dlpack_device__()

    region = case.arena(4096).alloc(1024, "uint8", fill=0)
    child = Arena.from_buffer(Exchanged())
    child.alloc(4, "uint8", align=1, fill=7)
    assert raw_bytes(region[:5].array) == b"\x07" * 4 + b"\x00"


def test_torch_and_cupy_see_the_same_memory(case):
    cupy = pytest.importorskip("cupy")
    if case.on_cpu:
        pytest.skip("CuPy reaches device memory only")
    region = case.arena(4096).alloc((3, 4), "float32", fill=1)
    as_torch, as_cupy = region.as_torch(), region.as_cupy()
    assert as_torch.data_ptr() == as_cupy.data.ptr == region.address
    assert torch.as_tensor(region[1:, ::2], device=as_torch.device).data_ptr() == region[1:, ::2].address
    assert cupy.asarray(region).data.ptr == region.address
    assert cupy.from_dlpack(region).data.ptr == region.address
    as_cupy[...] = 5
    cupy.cuda.get_current_stream().synchronize()
    assert as_torch.tolist() == [[5] * 4] * 3
    cupy.multiply(as_cupy[0], 2, out=region[0].as_cupy())
    cupy.cuda.get_current_stream().synchronize()
    assert as_torch[0].tolist() == [10] * 4


def test_offsets_beyond_32_bits_are_right(case):
    if case.on_cpu:
        pytest.skip("takes 5 GiB of device memory")
    arena = case.arena(5 << 30)
    arena.empty((1 << 32) + 3, "uint8")
    region = arena.alloc(4, "int32", fill=[1, 2, 3, 4])
    assert region.offset > 1 << 32
    assert raw_bytes(region[1:].array) == np.int32([2, 3, 4]).tobytes()
    big = case.arena(5 << 30).alloc((1 << 31) + 10, "int16")
    big[-1] = 7
    assert raw_bytes(big[-1:].array) == np.int16([7]).tobytes()


def test_a_replayed_graph_reads_and_writes_the_addresses_it_was_captured_with(case):
    if not torch.cuda.is_available() or case.library != "torch":
        pytest.skip("CUDA graphs are torch's here")
    arena = case.arena(1 << 20)
    x, out = arena.alloc(256, "float32", fill=1), arena.alloc(256, "float32", fill=0)
    x.array.add_(0)  # so that nothing is made during the capture
    torch.cuda.synchronize()
    graph, start = torch.cuda.CUDAGraph(), arena.checkpoint()
    with torch.cuda.graph(graph), arena.scope():
        scratch = arena.alloc(256, "float32")
        torch.mul(x.array, 2, out=scratch.array)
        torch.add(scratch.array, 1, out=out.array)
    x[...] = 5
    graph.replay()
    torch.cuda.synchronize()
    assert out.array.tolist() == [11] * 256
    with arena.scope():  # the graph keeps its scratch
        assert arena.alloc(256, "float32").address >= scratch.address + scratch.nbytes
    [pin] = arena.pins
    pin.release()
    arena.rollback(start)
    assert arena.alloc(256, "float32").address == scratch.address


def test_the_device_memory_comes_back_when_the_last_array_goes(case):
    if case.on_cpu:
        pytest.skip("the CPU allocator keeps no count")
    if case.library != "torch":
        pytest.skip("torch's own count is used")
    gc.collect()  # or what other tests have left goes in between
    before = torch.cuda.memory_allocated()
    arena = case.arena(1 << 24)
    array = arena.alloc(4, "float32", fill=1).array
    arena.close()
    assert torch.cuda.memory_allocated() >= before + (1 << 24)
    del arena
    assert array.tolist() == [1] * 4
    del array
    assert torch.cuda.memory_allocated() == before
