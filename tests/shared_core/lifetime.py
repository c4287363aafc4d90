from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import sys
import threading
import time
import weakref

import numpy as np
import pytest

from gpuarena import Arena
from gpuarena.errors import ArenaClosedError, ArenaError, NotCopyableError, OutOfMemoryError, StaleRegionError
from shared_core.case import raw_bytes


def test_nothing_of_an_arena_is_pickled_or_copied(case):  # T7
    arena = case.arena(4096)
    region = arena.alloc(4, "float32", fill=0)
    scope = arena.scope("x")
    for thing in (arena, region, region[1:], arena.checkpoint(), scope):
        for call in (pickle.dumps, copy.copy, copy.deepcopy, lambda thing: copy.deepcopy([thing])):
            with pytest.raises(NotCopyableError, match="copy the contents"):
                call(thing)
        with pytest.raises(TypeError):
            pickle.dumps(thing, protocol=2)


def test_closing_twice_is_closing_once_and_every_later_call_raises(case):  # T5
    arena = case.arena(4096)
    region = arena.alloc(4, "float32", fill=0)
    checkpoint = arena.checkpoint()
    with arena:
        pass
    assert arena.closed
    arena.close()
    calls = {
        "alloc": lambda: arena.alloc(1, "uint8"),
        "empty": lambda: arena.empty(1, "uint8"),
        "zeros": lambda: arena.zeros(1, "uint8"),
        "full": lambda: arena.full(1, 1, "uint8"),
        "from_array": lambda: arena.from_array([1]),
        "checkpoint": arena.checkpoint,
        "rollback": lambda: arena.rollback(checkpoint),
        "keep": lambda: arena.keep(checkpoint),
        "scope": arena.scope,
        "reset": arena.reset,
        "with": arena.__enter__,
    }
    for name, call in calls.items():
        with pytest.raises(
            ArenaClosedError,
            match=f"{'alloc' if name in ('empty', 'zeros', 'full', 'from_array') else name}.*closed",
        ):
            call()
    for touch in (lambda: region.array, lambda: region[0], region.as_numpy, region.__dlpack__):
        with pytest.raises(StaleRegionError, match="arena was closed"):
            touch()
    assert arena.by_label() == {}
    assert (arena.stats.used, arena.stats.top, arena.stats.n_regions) == (0, 0, 0)
    assert "closed" in repr(arena)
    assert region.shape == (4,)


def test_a_region_goes_at_once_and_waits_for_no_garbage_collector(case):
    gc.collect()
    gc.disable()
    try:
        arena = case.arena(4096)
        region = arena.alloc(4, "float32", fill=0)
        part, array = region[1:], region.array
        watched = [weakref.ref(region), weakref.ref(part), weakref.ref(arena)]
        del region, part, arena
        assert [ref() for ref in watched] == [None] * len(watched)
        assert raw_bytes(array) == bytes(16)
    finally:
        gc.enable()


def run_threads(*bodies):
    """Run bodies at the same time; raise the first exception of any."""
    barrier = threading.Barrier(len(bodies))
    failures = []

    def run(body):
        barrier.wait()
        try:
            body()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(body,), daemon=True) for body in bodies]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert not any(thread.is_alive() for thread in threads)
    if failures:
        raise failures[0]


def test_two_threads_allocate_without_overlap(case):  # T4
    arena = case.arena(1 << 20, alignment=8)
    regions = [[], []]

    def allocate(number):
        for _ in range(200):
            regions[number].append(arena.alloc(3, "uint8", label=str(number)))

    run_threads(lambda: allocate(0), lambda: allocate(1))
    both = sorted(region.offset for mine in regions for region in mine)
    assert both == list(range(0, 400 * 8, 8))
    assert arena.stats.n_regions == arena.stats.n_allocs_total == 400
    assert arena.stats.used == 1200
    assert arena.by_label() in ({"0": 600, "1": 600}, {"1": 600, "0": 600})


def test_a_region_made_in_one_thread_is_used_in_another(case):  # T4
    arena = case.arena(4096)
    region = arena.alloc(4, "float32", fill=1)

    def use():
        region[...] = 2
        with arena.scope():
            arena.alloc(4, "float32", fill=3)

    run_threads(use)
    assert raw_bytes(region.array) == np.full(4, 2, np.float32).tobytes()
    assert arena.stats.n_regions == 1


def test_a_region_is_live_or_stale_and_nothing_else_while_another_thread_rolls_back(case):  # T4
    arena = case.arena(1 << 16)
    seen = [arena.alloc(1, "uint8", fill=0)]
    checkpoint = arena.checkpoint()

    def churn():
        for _ in range(200):
            seen[0] = arena.alloc(4, "uint8")
            for _ in range(3):
                arena.alloc(4, "uint8")
            arena.rollback(checkpoint)

    def watch():
        for _ in range(400):
            region = seen[0]
            assert region.is_live in (True, False)
            try:
                region.array
                region[1:3].array
            except StaleRegionError:
                assert not region.is_live

    run_threads(churn, watch, watch)
    assert arena.stats.n_regions == 1


def test_closing_in_one_thread_stops_the_others_cleanly(case):  # T4, T5
    arena = case.arena(1 << 16)
    started = threading.Event()

    def allocate():
        with contextlib.suppress(ArenaClosedError, StaleRegionError):
            while True:
                with arena.scope():
                    arena.alloc(4, "uint8").array
                started.set()
                time.sleep(1e-4)  # the lock is not fair: without a pause the other thread may starve

    def close():
        started.wait(60)
        arena.close()

    run_threads(allocate, close)
    assert arena.closed


def test_memory_that_cannot_be_reserved_is_out_of_memory_with_figures(case):  # F6
    with pytest.raises(OutOfMemoryError, match="cannot reserve") as caught:
        case.arena(1 << 60)
    assert caught.value.requested == 1 << 60
    assert isinstance(caught.value, MemoryError)
    assert isinstance(caught.value, ArenaError)


def test_an_arena_is_where_it_was_asked_to_be(case):
    for alignment in (1, 16, 256, 4096, 1 << 21):
        arena = case.arena(100, alignment=alignment)
        assert arena.address % alignment == 0
        assert arena.capacity == arena.stats.capacity == 100
        assert arena.backend == case.library
        assert arena.alloc(100, "uint8", fill=1).address == arena.address
    assert arena.device == "cpu" if case.on_cpu else arena.device.startswith("cuda:")


def test_a_whole_arena_can_be_filled_to_the_last_byte(case):  # P6
    arena = Arena(1000, backend=case.library, device=case.device)
    region = arena.alloc(1000, "uint8", fill=5)
    assert raw_bytes(region.array) == b"\x05" * 1000
    with pytest.raises(OutOfMemoryError):
        arena.alloc(1, "uint8")


__all__ = [name for name in globals() if name.startswith("test_")]
