"""What allocators were reported for, as far as only a GPU shows it; docs/public-reports.md has the whole list.

With GPUARENA_FAKE_GPU=1 what needs no CUDA runs on torch's CPU tensors instead.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from shared_core.case import raw_bytes, why_no_gpu  # noqa: E402

from gpuarena import Arena, OutOfMemoryError  # noqa: E402
from gpuarena.errors import CaptureError, PinnedError  # noqa: E402

pytestmark = pytest.mark.gpu

if all(why_no_gpu().values()):
    pytest.skip("; ".join(filter(None, why_no_gpu().values())), allow_module_level=True)

MIB, GIB = 1 << 20, 1 << 30
#: Clock cycles that a kernel spins: about a quarter of a second, long enough for the host to get ahead.
SPIN = 500_000_000


@pytest.fixture
def cuda(case):
    """An arena's arguments for torch memory on a CUDA device; warmed up, because to load a kernel takes long."""
    if case.on_cpu or case.library != "torch":
        pytest.skip("only torch's CUDA shows this")
    torch.cuda._sleep(1)
    x = torch.zeros(4, device="cuda")
    torch.cuda.synchronize()
    del x
    return {"backend": "torch", "device": "cuda"}


def used() -> int:
    """Bytes of the device that are in use, by the driver's count."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


# rapidsai/rmm#1664: a pool of 64 MB of pinned memory cannot hold two blocks of 32 MB
def test_rapidsai_rmm_1664_two_halves_of_pinned_memory_fit(case):
    if not torch.cuda.is_available():
        pytest.skip("memory is pinned for a device, which torch does not find")
    arena = Arena("64MiB", backend=case.library, device="pinned")
    halves = [arena.alloc(32 * MIB, "uint8", fill=number) for number in (1, 2)]
    assert arena.stats.available == 0
    assert [int(np.asarray(half)[-1]) for half in halves] == [1, 2]
    assert torch.from_dlpack(halves[0]).is_pinned()


# pytorch/pytorch#184714: what starts at an odd offset breaks kernels that load 16 bytes at a time
def test_pytorch_pytorch_184714_kernels_run_on_regions_behind_odd_ones(case):
    arena = case.arena(1 << 20)
    for n in range(1, 20):
        with arena.scope():
            arena.empty(2 * n - 1, "uint8")
            x = arena.full((8, 64), 2, "float16")
            y = arena.empty((8, 64), "float16")
            if case.library == "torch":
                torch.mul(x, x, out=y)
                assert torch.equal(y, torch.full_like(y, 4))
                odd = arena.alloc((64, 33), "float16", fill=1)[
                    :, 1:
                ].array  # rows of 32 that start at odd bytes
                torch.matmul(x, odd, out=y[:, :32])
                assert y[:, :32].unique().tolist() == [128]
            else:
                import cupy

                cupy.multiply(x, x, out=y)
                assert cupy.unique(y).tolist() == [4]


# pytorch/pytorch#54139: torch.as_tensor copies an object with __cuda_array_interface__ to the CPU, silently
def test_pytorch_pytorch_54139_device_memory_is_shared_and_not_copied(case):
    region = case.arena(4096).alloc((3, 4), "float32", fill=1)
    device = region.as_torch().device
    assert device.type == ("cpu" if case.on_cpu else "cuda")
    for part in (region, region[1:, ::2]):
        assert part.as_torch().data_ptr() == torch.from_dlpack(part).data_ptr() == part.address
        assert torch.as_tensor(part, device=device).data_ptr() == part.address


# cupy/cupy#9918: access to an array made at a pointer into a huge buffer is illegal
def test_cupy_cupy_9918_elements_beyond_32_bits_are_reached(case):
    if case.on_cpu:
        pytest.skip("takes 9 GiB of device memory")
    arena = case.arena(9 * GIB)
    arena.empty(GIB, "uint8")
    region = arena.alloc(8 * GIB - 256, "uint8")
    for at in (0, (1 << 31) - 1, 1 << 31, (1 << 32) + 5, region.shape[0] - 3):
        region[at : at + 3] = [1, 2, 3]
        assert raw_bytes(region[at : at + 3].array) == b"\x01\x02\x03"
    assert raw_bytes(region[:3].array) == b"\x01\x02\x03"
    arena.close()


# pytorch/pytorch#188655: a side stream still reads memory that is handed out again, and gets wrong data
def test_pytorch_pytorch_188655_a_late_reader_sees_its_own_data(cuda):
    arena = Arena(64 * MIB, **cuda)
    result, side = torch.zeros(MIB, device="cuda"), torch.cuda.Stream()
    with arena.scope():
        region = arena.alloc(MIB, "float32", fill=1)
        region.record_stream(side)
        with torch.cuda.stream(side):
            torch.cuda._sleep(SPIN)
            result.copy_(region.array)
    event = torch.cuda.Event()
    event.record(side)
    arena.empty(MIB, "float32").fill_(2)
    assert not event.query(), "the host waited"
    torch.cuda.synchronize()
    assert result.unique().tolist() == [1]


# rapidsai/rmm#2489: after waiting for a second stream the event is not recorded again, and a third gets ahead
def test_rapidsai_rmm_2489_a_third_stream_does_not_overtake_on_a_gpu(cuda):
    arena = Arena(64 * MIB, **cuda)
    b, c = torch.cuda.Stream(), torch.cuda.Stream()
    result = torch.zeros(MIB, device="cuda")
    with arena.scope():
        first = arena.alloc(MIB, "float32", fill=1)
        first.record_stream(b)
        with torch.cuda.stream(b):
            torch.cuda._sleep(SPIN)
            result.copy_(first.array)
    second = arena.alloc(MIB, "float32")
    second.record_stream(c)
    with torch.cuda.stream(c):
        second.array.fill_(2)
    torch.cuda.synchronize()
    assert result.unique().tolist() == [1]
    assert second.array.unique().tolist() == [2]


# NVIDIA/cuda-python#2882: buffers of reserved addresses never give their memory back, because a handle is left
def test_nvidia_cuda_python_2882_device_memory_comes_back(cuda):
    pytest.importorskip("cuda.bindings")
    Arena(64 * MIB, **cuda | {"backend": "virtual:torch"}).close()
    gc.collect()
    before = used()
    for _ in range(3):
        arena = Arena(1 << 40, **cuda | {"backend": "virtual:torch"})
        arena.alloc(512 * MIB, "uint8", fill=1)
        assert used() - before > 500 * MIB
        arena.close()
        del arena
        assert abs(used() - before) < 64 * MIB


# pytorch/pytorch#190308: the private pool of a capture that failed is never freed
def test_pytorch_pytorch_190308_a_capture_that_failed_on_a_gpu_keeps_nothing(cuda):
    arena = Arena(64 * MIB, **cuda)
    start = arena.checkpoint()

    def capture():
        with torch.cuda.graph(torch.cuda.CUDAGraph()), arena.pin("graph"):
            arena.empty(MIB, "float32").fill_(1)
            raise KeyError

    for _ in range(5):
        with pytest.raises(KeyError):
            capture()
        assert arena.pins == ()
        arena.rollback(start)
    torch.cuda.synchronize()
    assert arena.full(MIB, 3, "float32").unique().tolist() == [3]


# NVIDIA/warp#1429: memory that graphs have used is never freed, some MiB more with each capture
def test_nvidia_warp_1429_many_captures_need_the_memory_of_one(cuda):
    arena = Arena(64 * MIB, **cuda)
    out = arena.alloc(MIB, "float32", fill=0)

    def cycle(number):
        graph = torch.cuda.CUDAGraph()
        with arena.pin("graph") as pin, torch.cuda.graph(graph), arena.scope():
            x = arena.empty(MIB, "float32").fill_(number)
            torch.add(x, 1, out=out.array)
        graph.replay()
        torch.cuda.synchronize()
        assert out.array.unique().tolist() == [number + 1]
        pin.release()

    start = arena.checkpoint()
    cycle(0)
    arena.rollback(start)
    gc.collect()
    before = torch.cuda.memory_allocated()
    for number in range(20):
        cycle(number)
        arena.rollback(start)
    gc.collect()
    assert torch.cuda.memory_allocated() == before
    assert arena.stats.peak == 8 * MIB


# tracel-ai/cubecl#1612: after a capture its temporaries are handed out, and a replay overwrites the new owner's data
def test_tracel_ai_cubecl_1612_a_replay_overwrites_nobodys_data(cuda):
    arena = Arena(64 * MIB, **cuda)
    start, graph = arena.checkpoint(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), arena.scope():
        temporary = arena.empty(MIB, "float32").fill_(1)
    mine = arena.full(MIB, 7, "float32")
    graph.replay()
    torch.cuda.synchronize()
    assert mine.unique().tolist() == [7]
    with pytest.raises(PinnedError):
        arena.rollback(start)
    (pin,) = arena.pins
    pin.release()
    arena.rollback(start)
    assert arena.empty(MIB, "float32").data_ptr() == temporary.data_ptr()


# the same with memory that would have to grow: the driver's calls for that cannot be captured
def test_tracel_ai_cubecl_1612_growth_is_refused_while_a_graph_is_captured(cuda):
    pytest.importorskip("cuda.bindings")
    arena = Arena(GIB, **cuda | {"backend": "virtual:torch"})
    graph = torch.cuda.CUDAGraph()
    x = arena.full(4, 1, "float32")
    with torch.cuda.graph(graph):
        with pytest.raises(CaptureError, match="run the step once before"):
            arena.empty(256 * MIB, "uint8")
        x.add_(1)
    graph.replay()
    assert x.tolist() == [2] * 4


# pytorch/pytorch#133280: out of memory in a custom allocator is a plain RuntimeError, which no handler catches
def test_pytorch_pytorch_133280_a_device_that_is_full_raises_the_arenas_own_error(case):
    if case.on_cpu:
        pytest.skip("the host has no such limit")
    with pytest.raises(OutOfMemoryError, match="cannot reserve") as caught:
        case.arena(1 << 45)
    assert caught.value.requested == 1 << 45
    assert case.arena(4096).full(4, 1, "uint8").sum() == 4


# vllm-project/vllm#8893: a forked child uses the parent's device, and dies in the driver
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_vllm_project_vllm_8893_a_forked_child_is_told(case):
    if case.on_cpu:
        pytest.skip("memory of the host survives a fork")
    code = f"""
import os, torch
from gpuarena import Arena
from gpuarena.errors import ForkedError
arena = Arena(4096, backend={case.library!r}, device={case.device!r})
region = arena.alloc(4, "float32", fill=1)
if not os.fork():
    try:
        arena.alloc(1, "uint8")
    except ForkedError as error:
        arena.close()
        del region, arena
        os._exit(0 if "'spawn'" in str(error) else 1)
    os._exit(2)
print(os.wait()[1], region.as_torch().sum().item())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout == "0 4.0\n", done.stderr
