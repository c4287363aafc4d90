"""What other allocators were reported for: fragmentation, limits, overlaps, messages.

The comment above each test is the symptom that was reported; docs/public-reports.md has the whole list.
"""

from __future__ import annotations

import itertools
import pickle
import random
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuarena import Arena, CheckpointError, OutOfMemoryError, StaleRegionError, measure
from gpuarena.testing import FakeDevice

MIB = 1 << 20


def sizes(max_value=5000):
    return st.lists(st.integers(1, max_value), min_size=1, max_size=20)


def refused(arena, nbytes, **options):
    with pytest.raises(OutOfMemoryError) as caught:
        arena.alloc(nbytes, "uint8", **options)
    return caught.value


# pytorch/pytorch#35901: one large segment is split by small tensors, and the next large request finds no room
def test_pytorch_pytorch_35901_small_blocks_leave_no_splits():
    arena = Arena(1 << 20)
    rng = random.Random(0)
    highest = 0
    for _ in range(50):
        with arena.scope():
            taken = 0
            for _ in range(rng.randrange(1, 30)):
                nbytes = rng.randrange(1, 20_000)
                arena.alloc(nbytes, "uint8")
                taken = -(-taken // 256) * 256 + nbytes
            highest = max(highest, taken)
            assert arena.stats.top == taken
        assert arena.stats.peak == highest
        with arena.scope():
            arena.alloc(highest, "uint8")
    assert arena.alloc(arena.capacity, "uint8").offset == 0


# pytorch/pytorch#97925: "reserved but unallocated" and an allocator setting, which users cannot interpret
def test_pytorch_pytorch_97925_out_of_memory_says_what_holds_the_memory_and_what_to_do():
    arena = Arena(10_000)
    arena.alloc(2000, "uint8", label="weights")
    with arena.scope("step"):
        arena.alloc(6000, "uint8", label="activations")
        error = refused(arena, 4000, label="logits")
        assert arena.stats.top == 2048 + 6000
    text = str(error)
    for words in (
        "4 000 bytes (3.91 KiB) requested for 'logits'",
        "1 952 bytes (1.91 KiB) available of 10 000 bytes (9.77 KiB)",
        "2 192 bytes (2.14 KiB) missing, alignment included (144 bytes)",
        "Held by: activations 6 000 bytes (5.86 KiB), weights 2 000 bytes (1.95 KiB)",
        "Between regions: 48 bytes",
        "the end of scope 'step' frees 6 048 bytes (5.91 KiB)",
    ):
        assert words in text
    for bytes_ in (error.requested, error.available, error.missing, error.capacity):
        assert f"{bytes_:,}".replace(",", " ") in text


# pytorch/pytorch#173049: the hint recommends a setting that is on already
def test_pytorch_pytorch_173049_the_advice_fits_the_state_of_the_arena():
    arena = Arena(1000, alignment=1)
    assert "no rollback makes room" in str(refused(arena, 1001))
    arena.alloc(600, "uint8")
    assert "no scope is open" in str(refused(arena, 500))
    with arena.scope("step"):
        arena.alloc(300, "uint8")
        text = str(refused(arena, 500))
        assert "the end of scope 'step' frees 300 bytes" in text
        assert "no scope is open" not in text
        assert "Between regions" not in text, "nothing is lost to alignment here"
    assert arena.stats.n_failed == 3


# pytorch/pytorch#142127: an allocator hands out a pointer that is in use, and nobody notices
@given(
    st.lists(st.tuples(st.integers(0, 300), st.sampled_from([1, 4, 64, 256]), st.integers(0, 9)), max_size=40)
)
def test_pytorch_pytorch_142127_no_two_live_regions_share_a_byte(requests):
    arena = Arena(8192)
    live, checkpoints = [], []
    for nbytes, align, action in requests:
        if action == 0:
            checkpoints.append(arena.checkpoint())
        elif action == 1 and checkpoints:
            arena.rollback(checkpoints.pop())
        side = "high" if action % 2 else "low"
        try:
            live.append(arena.alloc(nbytes, "uint8", align=align, side=side))
        except OutOfMemoryError:
            continue
        live = [region for region in live if region.is_live]
        spans = sorted((region.address, region.address + region.nbytes) for region in live if region.nbytes)
        for (_, stop), (start, _) in itertools.pairwise(spans):
            assert stop <= start
    for number, region in enumerate(live):
        region[...] = number
    assert all((region.array == number).all() for number, region in enumerate(live))


# pytorch/pytorch#133280: out of memory in a custom allocator is a plain RuntimeError, which no handler catches
def test_pytorch_pytorch_133280_out_of_memory_has_its_type_and_its_figures():
    error = refused(Arena(100), 150, label="x")
    assert isinstance(error, MemoryError)
    assert not isinstance(error, RuntimeError)
    figures = {"requested": 150, "available": 100, "missing": 50, "capacity": 100, "label": "x"}
    other = pickle.loads(pickle.dumps(error))  # as from a worker process
    for one in (error, other):
        assert {name: getattr(one, name) for name in figures} == figures
    for backend in ("host", "torch"):  # the libraries have errors of their own
        with pytest.raises(OutOfMemoryError, match="cannot reserve"):
            Arena(1 << 62, backend=backend)


# pytorch/pytorch#159674: a request fails though memory of the same pool could have been freed, and is not tried again
def test_pytorch_pytorch_159674_a_request_that_failed_succeeds_once_there_is_room():
    arena = Arena(1000, alignment=1)
    checkpoint = arena.checkpoint()
    arena.alloc(600, "uint8")
    before = arena.stats
    refused(arena, 500)
    assert (arena.stats.top, arena.stats.n_regions) == (before.top, before.n_regions)
    arena.rollback(checkpoint)
    assert arena.alloc(500, "uint8").offset == 0


# pytorch/pytorch#161193: in a pool inside of a pool, nothing comes from the inner one
def test_pytorch_pytorch_161193_nested_scopes_and_children_take_from_the_innermost():
    arena = Arena(8192)
    inner = arena.child(2048, name="inner")

    def work():
        with arena.scope("a"):
            arena.alloc(100, "uint8")
            with inner.scope("b"), inner.scope("c"):
                region = inner.alloc(100, "uint8")
                assert inner.address <= region.address < inner.address + 2048
                assert (inner.stats.used, arena.stats.used) == (100, 2148)
                raise KeyError

    with pytest.raises(KeyError):
        work()
    assert (inner.stats.used, arena.stats.used) == (0, 2048)
    arena.assert_balanced()
    inner.assert_balanced()


# rapidsai/rmm#1664: a pool of 64 MB cannot hold two blocks of 32 MB, because it needs bytes for itself
@pytest.mark.parametrize("backend", ["host", "torch", "virtual"])
def test_rapidsai_rmm_1664_two_halves_fit(backend):
    if backend == "virtual" and sys.platform != "linux":
        pytest.skip("needs Linux")
    arena = Arena("64MiB", backend=backend)
    first, second = (arena.alloc(32 * MIB, "uint8") for _ in range(2))
    assert (first.offset, second.offset, arena.stats.available) == (0, 32 * MIB, 0)
    second[-1:] = 7
    assert int(second.array[-1]) == 7


# rapidsai/rmm#2039: memory fragments as soon as two streams allocate in turn
def test_rapidsai_rmm_2039_arenas_of_two_streams_do_not_fragment_each_other():
    from gpuarena.testing.streams import StreamedFakeDevice

    device = StreamedFakeDevice()
    arenas = [Arena(10_000, backend=device, stream=device.stream(name)) for name in ("a", "b")]
    for step in range(20):
        with arenas[0].scope(), arenas[1].scope():
            for i in range(10):
                arenas[i % 2].alloc(256 * (1 + (i + step) % 3), "uint8")
            assert [arena.stats.fragmentation for arena in arenas] == [0, 0]
    for arena in arenas:
        assert arena.alloc(10_000, "uint8").offset == 0
    arenas[0].reset()
    arenas[0].alloc(64, "uint8")
    arenas[0].alloc(64, "uint8")
    assert arenas[0].stats.fragmentation == 192 / 320, "the share that alignment takes is shown"


# rapidsai/rmm#1421: 350 MB cannot be had with 9 GB free, because no single piece is as large
@given(sizes(), sizes(500), st.integers(0, 5))
def test_rapidsai_rmm_1421_what_is_free_is_one_piece(low, high, n_dropped):
    arena = Arena(200_000)
    checkpoints = [arena.checkpoint()]
    for nbytes in low:
        arena.alloc(nbytes, "uint8")
        checkpoints.append(arena.checkpoint())
    for nbytes in high:
        arena.alloc(nbytes, "uint8", side="high")
    arena.rollback(checkpoints[max(len(checkpoints) - 1 - n_dropped, 0)])
    available = arena.stats.available
    assert refused(arena, available + 1, align=1).missing == 1
    arena.alloc(available, "uint8", align=1)
    assert arena.stats.available == 0


# rapidsai/rmm#397: when free blocks are merged a flag gets lost, and the totals are no longer right
@given(sizes())
def test_rapidsai_rmm_397_totals_do_not_depend_on_how_memory_is_cut(pieces):
    one, many = Arena(100_000, alignment=1), Arena(100_000, alignment=1)
    start = one.checkpoint(), many.checkpoint()
    one.alloc(sum(pieces), "uint8")
    for nbytes in pieces:
        many.alloc(nbytes, "uint8")
    for _ in range(2):
        a, b = one.stats, many.stats
        for field in ("top", "used", "padding", "available", "peak", "peak_used", "bytes_requested_total"):
            assert getattr(a, field) == getattr(b, field)
        one.rollback(start[0])
        many.rollback(start[1])
    assert (many.stats.used, many.stats.available) == (0, 100_000)


# cupy/cupy#7678: with a limit set, everything is freed and the next request is out of memory all the same
def test_cupy_cupy_7678_all_of_the_limit_is_there_again_after_a_rollback():
    arena = Arena(1 << 20)
    for number in range(100):
        with arena.scope():
            arena.alloc(1 << number % 21, "uint8")
            arena.alloc(arena.stats.available, "uint8", align=1)
            assert arena.stats.available == 0
        assert arena.stats.available == 1 << 20
    assert arena.stats.n_failed == 0


# cupy/cupy#1392: a loop whose arrays grow runs out of memory, though each is freed before the next
def test_cupy_cupy_1392_a_loop_of_growing_sizes_needs_the_largest_only():
    arena = Arena(100_000)
    for nbytes in range(1000, 100_001, 1000):
        with arena.scope():
            assert arena.empty(nbytes, "uint8").nbytes == nbytes
        assert arena.stats.peak == nbytes


# cupy/cupy#536: free memory lies scattered between arrays, and cannot be compacted
@given(sizes(), st.data())
def test_cupy_cupy_536_below_the_pointer_there_is_nothing_but_alignment(requests, data):
    arena = Arena(200_000)
    regions = []
    for nbytes in requests:
        if data.draw(st.integers(0, 4)) == 0:
            with arena.scope():
                arena.alloc(nbytes, "uint8")
        regions.append(arena.alloc(nbytes, "uint8"))
    end = 0
    for region in regions:
        assert region.offset == -(-end // 256) * 256
        end = region.offset + region.nbytes
    assert arena.stats.top == end
    assert arena.stats.padding == end - sum(requests) < 256 * len(requests)


# NVIDIA/warp#225: objects that own device memory leak it when they are destroyed
def test_nvidia_warp_225_what_is_destroyed_leaves_nothing_behind():
    device = FakeDevice()
    arena = Arena(1 << 16, backend=device)
    for _ in range(50):
        with arena.scope("mesh"):
            child = arena.child(4096, name="mesh")
            frame = child.frame(points=((10, 3), "float32"), indices=(30, "int32"))
            part = child.alloc(4, "uint8")[1:]
        assert (arena.stats.used, arena.by_label(), child.closed) == (0, {}, True)
        assert not frame.is_live
        assert not part.is_live
    with arena.scope("forgotten") as scope, pytest.raises(CheckpointError, match="forgotten") as caught:
        arena.assert_balanced()  # what is still open is listed
    assert caught.value.scopes == (scope,)
    arena.close()
    del frame, caught  # its handles hold the arrays that it gave out
    assert (device.n_allocated, device.n_freed, device.nbytes) == (1, 1, 0)


# vllm-project/vllm#8893: a forked child uses the parent's device, and dies in the driver
@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_vllm_project_vllm_8893_a_forked_child_is_told_and_frees_nothing():
    code = """
import os
from gpuarena import Arena
from gpuarena.errors import ForkedError
from gpuarena.testing.streams import StreamedFakeDevice

device = StreamedFakeDevice()
on_device, on_host = Arena(1024, backend=device, name="weights"), Arena(1024)
region, array = on_device.alloc(4, "uint8"), on_host.full(4, 7, "uint8")
if not os.fork():
    for call in (lambda: on_device.alloc(1, "uint8"), lambda: region.array, on_device.reset):
        try:
            call()
        except ForkedError as error:
            assert "'weights'" in str(error) and "'spawn'" in str(error), error
        else:
            os._exit(1)
    on_device.close()
    del region, on_device
    assert (device.n_released, device.n_freed) == (0, 0)
    on_host.alloc(4, "uint8", fill=8)
    os._exit(0 if array.tolist() == [7] * 4 else 2)
print(os.wait()[1], region.is_live, on_device.alloc(1, "uint8").offset)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.stderr) == ("0 True 256\n", "")


# lean-dojo/TorchLean#22: a scoped arena that keeps some of its tensors, and finds the use of the others afterwards
def test_lean_dojo_torchlean_22_a_result_outlives_the_scope_and_nothing_else_does():
    arena = Arena(4096)
    with arena.scope("layer"):
        result = arena.alloc(4, "float32", fill=1, side="high")
        temporary = arena.alloc(4, "float32", fill=2)
    assert result.array.tolist() == [1] * 4
    with pytest.raises(StaleRegionError, match="the end of scope 'layer'"):
        temporary.array
    checkpoint = arena.checkpoint()
    kept = arena.alloc(4, "float32", fill=3)
    arena.keep(checkpoint)
    with pytest.raises(CheckpointError, match="keep"):
        arena.rollback(checkpoint)
    assert kept.array.tolist() == [3] * 4


# chelsea0x3b/cudarc#594: a bump pool for captures, sized by a probing run
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_chelsea0x3b_cudarc_594_a_probing_run_says_the_capacity():
    def step(arena):
        with arena.scope():
            x = arena.full((100, 7), 2, "float32")
            y = arena.zeros(33, "uint8")
            return int((x * 2).sum()) + int(y.sum())

    with measure() as probe:
        expected = step(probe.arena)
    assert probe.capacity == 2816 + 33  # 2800 bytes and their padding, and the last region
    assert step(Arena(probe.capacity)) == expected
    with pytest.raises(OutOfMemoryError):
        step(Arena(probe.capacity - 1))
