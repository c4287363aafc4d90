"""What allocators on reserved addresses were reported for: leaks, failed growth, limits."""

from __future__ import annotations

import gc
import random
import sys

import numpy as np
import pytest
from backends.vmm_doubles import CheckedVmm, FakeCuda, peek

from gpuarena import Arena, OutOfMemoryError
from gpuarena.backends import virtual
from gpuarena.backends._vmm import Reservation, settle_postponed
from gpuarena.backends._vmm_cuda import CudaVmm
from gpuarena.errors import BackendError, LiveArraysError, PinnedError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

KIB, MIB, TIB = 1 << 10, 1 << 20, 1 << 40
GRANULE = 64 * KIB


@pytest.fixture
def driver(monkeypatch):
    """What the arenas of a test get their memory from; it insists on the rules of the CUDA driver."""
    checked = CheckedVmm(GRANULE)
    monkeypatch.setattr(virtual, "HostVmm", lambda: checked)
    yield checked
    checked.forgive()
    gc.collect()
    assert settle_postponed() == 0
    assert checked.is_empty()


def resident() -> int:
    """Bytes of memory that this process has."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


# pytorch/pytorch#186213: for every import 9/8 of the device's memory is reserved, until the addresses run out
def test_pytorch_pytorch_186213_an_arena_reserves_what_it_was_told(driver):
    arenas = [Arena(TIB, backend="virtual", alignment=256) for _ in range(40)]
    assert sum(driver.reserved.values()) == 40 * TIB
    assert driver.used == 0
    for arena in arenas:
        arena.close()
    assert driver.is_empty()
    Arena(100, backend="virtual")
    assert driver.log[-1] == "free"


# pytorch/pytorch#145168: empty_cache() does not give memory back to the allocator that it came from
def test_pytorch_pytorch_145168_trim_gives_memory_back_to_the_driver(driver):
    arena = Arena(TIB, backend="virtual")
    kept = arena.alloc(1000, "uint8", fill=1)
    with arena.scope():
        arena.alloc(8 * MIB, "uint8")
    before = driver.used
    assert before == arena.stats.committed > 8 * MIB
    given_back = arena.trim()
    assert given_back == before - driver.used >= 8 * MIB
    assert arena.stats.committed == driver.used
    assert (kept.array == 1).all()


# rapidsai/rmm#1957: a pool that starts with 256 MB and may have 1024 cannot give 1024
@pytest.mark.parametrize("first", [1, 100 * KIB, 256 * KIB, MIB - 1])
def test_rapidsai_rmm_1957_all_of_the_capacity_can_be_had(driver, first):
    driver.limit = MIB
    arena = Arena(MIB, backend="virtual", alignment=1)
    arena.alloc(first, "uint8")
    arena.alloc(arena.stats.available, "uint8")
    assert (arena.stats.used, arena.stats.committed, driver.used) == (MIB, MIB, MIB)
    arena.reset()
    arena.trim()
    assert arena.alloc(MIB, "uint8").nbytes == MIB


# rapidsai/rmm#496: the pool grows by more than is needed, and fails where what is needed would have fit
def test_rapidsai_rmm_496_a_smaller_step_is_tried_before_growth_fails(driver):
    driver.limit = 11 * GRANULE
    arena = Arena(TIB, backend="virtual", alignment=1)
    for n_granules in range(1, 12):  # at some of these twice the last chunk exceeds the limit
        arena.alloc(GRANULE, "uint8")
        assert arena.stats.used == n_granules * GRANULE <= driver.used <= driver.limit
    before = arena.stats
    with pytest.raises(OutOfMemoryError):
        arena.alloc(1, "uint8")
    assert (arena.stats.top, arena.stats.committed) == (before.top, before.committed)


# rapidsai/rmm#600: "maximum pool size exceeded" where the device was full, and the pool was not
def test_rapidsai_rmm_600_out_of_memory_names_the_limit_that_was_met(driver):
    driver.limit = 4 * GRANULE
    arena = Arena(10 * GRANULE, backend="virtual")
    with pytest.raises(OutOfMemoryError, match="the limit is the memory") as full:
        arena.alloc(5 * GRANULE, "uint8")
    assert (full.value.limit, full.value.reserved) == ("memory", 10 * GRANULE)
    with pytest.raises(OutOfMemoryError, match="missing, alignment included") as large:
        arena.alloc(11 * GRANULE, "uint8")
    assert (large.value.capacity, large.value.missing) == (10 * GRANULE, GRANULE)
    driver.fail(call="reserve", out_of_memory=True)
    with pytest.raises(OutOfMemoryError, match="the limit is the address space"):
        Arena(TIB, backend="virtual")


# cupy/cupy#6616: everything is deleted, and nvidia-smi still shows the memory as used
def test_cupy_cupy_6616_committed_and_used_memory_are_told_apart():
    arena = Arena(TIB, backend="virtual")
    arena.alloc(1, "uint8", fill=0)
    gc.collect()  # so that no other test's memory goes in between
    start = resident()
    with arena.scope():
        arena.full(64 * MIB, 1, "uint8")
        assert resident() - start > 60 * MIB
    stats = arena.stats
    assert stats.used == 1
    assert stats.committed > 64 * MIB, "kept for the next step"
    assert resident() - start > 60 * MIB
    arena.trim()
    assert arena.stats.committed < MIB
    assert resident() - start < 8 * MIB


# NVIDIA/cuda-python#2882: buffers of reserved addresses never give their memory back, because a handle is left
def test_nvidia_cuda_python_2882_nothing_is_left_of_a_closed_arena(driver):
    for _ in range(3):
        arena = Arena(TIB, backend="virtual")
        for nbytes in (100, GRANULE, 5 * MIB):
            arena.alloc(nbytes, "uint8")
        assert not driver.handles, "the mappings alone keep the memory"
        arena.close()
        assert driver.is_empty()


def test_nvidia_cuda_python_2882_nor_of_device_memory():
    cuda = FakeCuda()
    reservation = Reservation(CudaVmm(0, cuda), TIB)
    reservation.commit(30 * MIB)
    assert cuda.memory.used >= 30 * MIB
    assert not cuda.memory.handles
    reservation.close()
    assert cuda.memory.is_empty()


# NVIDIA/cuda-python#2908, #2907: the second growth fails, and sizes that are no multiple of the granule leak
def test_nvidia_cuda_python_2908_a_thousand_steps_of_any_size(driver):
    rng = random.Random(0)
    for end in ("close", "trim"):
        arena = Arena(TIB, backend="virtual")
        address = arena.address
        first = arena.alloc(100, "uint8", fill=7)
        for _ in range(1000):
            arena.alloc(rng.randrange(1, 40_000), "uint8")
        assert arena.address == address
        assert (first.array == 7).all()
        assert arena.stats.committed >= arena.stats.top
        if end == "trim":
            arena.reset()
            assert arena.trim() + arena.stats.committed > 10 * MIB
            assert driver.used == arena.stats.committed == 0
        del first
        arena.close()
        assert driver.is_empty()


CALLS = ["is_capturing", "create", "map", "release", "set_access"]


# NVIDIA/cuda-python#2388, #2345: growth that fails takes the access to the old memory, or frees a foreign address
@pytest.mark.parametrize("out_of_memory", [False, True])
@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("call", CALLS)
def test_nvidia_cuda_python_2388_growth_that_fails_leaves_the_old_memory(driver, call, at, out_of_memory):
    arena = Arena(TIB, backend="virtual")
    first = arena.alloc(100, "uint8", fill=7)
    array, before, used = first.array, arena.stats, driver.used
    driver.fail(call=call, at=at, out_of_memory=out_of_memory)
    if (call, at) == ("is_capturing", 2):  # asked once
        arena.alloc(40 * MIB, "uint8", label="big")
    else:
        with pytest.raises(OutOfMemoryError if out_of_memory else BackendError):
            arena.alloc(40 * MIB, "uint8", label="big")
        assert driver.used == used
        assert (arena.stats.top, arena.stats.committed) == (before.top, before.committed)
    assert peek(first.address, 100) == b"\x07" * 100
    array[:] = 8
    driver.forgive()
    assert (arena.alloc(8 * MIB, "uint8", fill=9).array[-1], first.array[0]) == (9, 8)
    del array, first
    arena.close()
    assert driver.is_empty()


# taichi-dev/taichi#7300: temporaries of the preallocated pool are given to the driver's free, and not to the pool
def test_taichi_dev_taichi_7300_a_rollback_calls_no_driver_and_frees_nothing_of_others(driver):
    owner = np.zeros(4096, np.uint8)
    arenas = [Arena(TIB, backend="virtual"), Arena.from_buffer(owner)]
    for arena in arenas:
        with arena.scope():
            arena.alloc(2000, "uint8")
    n_calls = len(driver.log)
    for _ in range(10):
        for arena in arenas:
            with arena.scope():
                arena.full(2000, 3, "uint8")
            arena.reset()
    assert len(driver.log) == n_calls
    arenas[1].close()
    assert owner[:4000].max() == 3
    assert "free" not in driver.log
    owner[:] = 5


# fzyzcjy/torch_memory_saver#88: memory is taken away and mapped anew below addresses that NCCL has registered
def test_fzyzcjy_torch_memory_saver_88_pinned_memory_is_never_mapped_anew(driver):
    arena = Arena(TIB, backend="virtual")
    start = arena.checkpoint()
    with arena.pin("nccl") as pin, arena.scope():
        address = arena.alloc(4 * MIB, "uint8", fill=7).address
    below = {at: handle for at, handle in driver.backing.items() if at < address + 4 * MIB}
    with arena.scope():
        arena.alloc(20 * MIB, "uint8")
    arena.trim()
    for call in (lambda: arena.rollback(start), arena.reset):
        with pytest.raises(PinnedError, match="'nccl'"):
            call()
    arena.alloc(10 * MIB, "uint8")
    assert {at: driver.backing.get(at) for at in below} == below
    assert peek(address, 4) == b"\x07" * 4
    pin.release()
    arena.rollback(start)
    assert arena.trim() > 0


# the same, by an array that is still there: reading it after the memory was given back would end the process
def test_fzyzcjy_torch_memory_saver_88_memory_under_an_array_is_not_given_back(driver):
    arena = Arena(TIB, backend="virtual")
    with arena.scope():
        array = arena.full(MIB, 7, "uint8")
    with pytest.raises(LiveArraysError):
        arena.trim()
    assert (array == 7).all()
    del array
    assert arena.trim() > 0
