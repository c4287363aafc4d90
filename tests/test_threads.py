# What is raised at the end of a block is tested with the block.
# ruff: noqa: PT012
from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time

import numpy as np
import pytest

from gpuarena import Arena, Debug
from gpuarena.errors import ArenaClosedError, CheckpointError, OutOfMemoryError, StaleRegionError

# Every call is serialised by the arena's lock. The threads here change places all the time, so that a call which is
# not would be interrupted in its middle.


@pytest.fixture(autouse=True)
def _restless():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def run_threads(*bodies, timeout=30):
    """Run bodies from one moment on; raise the first exception of any."""
    barrier = threading.Barrier(len(bodies))
    failures = []

    def run(body):
        barrier.wait()
        try:
            body()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(body,), daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if failures:
        raise failures[0]


@pytest.fixture(params=["host", "torch", "debug", "virtual"])
def make(request):
    options = {
        "host": {},
        "torch": {"backend": "torch"},
        "debug": {"debug": Debug(guard=8, on_live_arrays="ignore", call_sites=False)},
        "virtual": {"backend": "virtual"},
    }[request.param]
    return lambda capacity=1 << 20, **more: Arena(capacity, alignment=8, **options, **more)


def test_offsets_never_overlap_and_the_counters_are_exact(make):
    arena = make()
    sides = ("low",) if arena._backend.growable else ("low", "high")
    n = 150
    regions = []

    def allocate(number):
        for i in range(n):
            side = sides[i % len(sides)]
            region = arena.alloc(1 + i % 13, "uint8", label=str(number), side=side, fill=number)
            regions.append((region, number))
            arena.empty(3, "uint8", label=str(number), side=side)
            if not i % 10:
                with pytest.raises(OutOfMemoryError):
                    arena.alloc(1 << 30, "uint8")
                arena.frame(x=(2, "uint8"), y=(2, "uint8"))

    run_threads(*(lambda number=number: allocate(number) for number in range(3)))
    ranges = sorted((region.offset, region.offset + region.nbytes) for region, _ in regions)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(ranges))
    for region, number in regions:
        assert (region.as_numpy() == number).all()
    stats = arena.stats
    per_thread = sum(1 + i % 13 + 3 for i in range(n)) + 4 * (n // 10)
    assert stats.used == stats.bytes_requested_total == 3 * per_thread
    assert stats.n_regions == stats.n_allocs_total == 3 * (2 * n + 2 * (n // 10))
    assert stats.n_failed == 3 * (n // 10)
    labels = arena.by_label()
    assert [labels[str(number)] for number in range(3)] == [per_thread - 4 * (n // 10)] * 3
    serials = arena._low.serials + arena._high.serials
    assert len(set(serials)) == len(serials)
    arena.check()


def test_profiles_and_traces_of_several_threads_miss_nothing(make):
    arena = make()
    with arena.profile() as profile, arena.record() as trace:

        def allocate():
            for _ in range(100):
                arena.alloc(5, "uint8", label="x")
                with arena.profile(), arena.record():
                    arena.empty(5, "uint8", label="x")

        run_threads(allocate, allocate)
    assert profile.by_label["x"].regions.allocated == 400
    assert [event.n_regions for event in trace.events[2:]] == list(range(1, 401))


def test_scopes_belong_to_the_arena_and_not_to_a_thread(make):
    arena = make()
    region = arena.alloc(4, "uint8", fill=1)
    opened, closed = threading.Event(), threading.Event()
    seen = {}

    def one():
        scope = arena.scope("one's").__enter__()
        opened.set()
        assert closed.wait(30)
        seen["live"] = seen["region"].is_live
        with pytest.raises(CheckpointError):
            scope.__exit__(None, None, None)

    def other():
        assert opened.wait(30)
        with pytest.raises(CheckpointError, match="one's"):
            arena.assert_balanced()
        seen["region"] = arena.alloc(4, "uint8")
        arena.reset()  # the other thread's scope ends with it
        closed.set()

    run_threads(one, other)
    assert seen["live"] is False
    assert not region.is_live
    arena.assert_balanced()


def test_a_scope_opened_in_one_thread_is_closed_in_another(make):
    arena = make()
    scopes = []
    run_threads(lambda: scopes.append(arena.scope().__enter__()))
    region = arena.alloc(4, "uint8")
    run_threads(lambda: scopes[0].__exit__(None, None, None))
    assert not region.is_live
    arena.assert_balanced()
    assert arena.stats.used == 0


def test_a_reader_sees_live_data_or_an_error_while_another_thread_streams(make):
    arena = make()
    kept = arena.alloc(64, "uint8", fill=200)
    checkpoint = arena.checkpoint()
    shared = [arena.alloc(64, "uint8", fill=0, label="0")]
    done = threading.Event()
    messages = []

    def stream():
        try:
            for number in range(1, 120):
                arena.rollback(checkpoint)
                shared[0] = arena.alloc(64, "uint8", fill=number, label=str(number))
                with arena.scope():
                    arena.alloc(64, "uint8", fill=255)
                if not number % 20:
                    arena.spill(checkpoint).restore()
        finally:
            done.set()

    def read():
        while not done.is_set():
            region = shared[0]
            try:
                with arena._lock:  # what a reader does who needs the contents of one moment
                    values = set(np.asarray(region.as_numpy()).tolist())
                    assert region.is_live
            except StaleRegionError as error:
                messages.append(str(error))
            else:
                assert values == {int(region.label)}
            with contextlib.suppress(StaleRegionError):
                part = region[8:16].array
                assert tuple(part.shape) == (8,)
            assert (kept.as_numpy() == 200).all()

    run_threads(stream, read, read)
    assert all("given back by" in message for message in messages)
    assert kept.is_live
    assert arena.stats.n_regions == 2
    arena.check()


def test_figures_add_up_at_every_moment(make):
    arena = make(1 << 16)
    done = threading.Event()

    def churn():
        try:
            for number in range(300):
                with arena.scope():
                    arena.alloc(100, "uint8")
                    arena.empty(number % 50, "uint8")
        finally:
            done.set()

    def watch():
        while not done.is_set():
            stats = arena.stats
            assert stats.used + stats.padding == stats.top + stats.capacity - stats.high <= stats.peak
            assert stats.n_allocs_total - stats.n_freed_total == stats.n_regions
            assert stats.bytes_requested_total - stats.bytes_freed_total == stats.used
            assert sum(arena.by_label().values()) <= 150
            repr(arena)

    run_threads(churn, watch)
    assert arena.stats.n_allocs_total == arena.stats.n_freed_total == 600
    assert arena.stats.peak_regions == 2


def test_a_child_is_used_while_its_parent_ends_it(make):
    arena = make()
    checkpoint = arena.checkpoint()
    shared = [arena.child(4096)]
    done = threading.Event()

    def end():
        try:
            for _ in range(100):
                arena.rollback(checkpoint)
                shared[0] = arena.child(4096)
        finally:
            done.set()

    def use():
        while not done.is_set():
            child = shared[0]
            try:
                with child.scope():
                    region = child.alloc(16, "uint8", fill=1)
                    region.array
                child.stats
            except (ArenaClosedError, StaleRegionError):
                assert child.closed
            except CheckpointError:
                assert child.closed or child.stats.used == 0

    run_threads(end, use)
    assert not shared[0].closed


def test_a_frame_is_live_or_stale_while_another_thread_rolls_back(make):
    arena = make()
    checkpoint = arena.checkpoint()
    shared = [arena.frame(x=(8, "uint8"), y=(8, "uint8"))]
    done = threading.Event()

    def renew():
        try:
            for _ in range(100):
                arena.rollback(checkpoint)
                shared[0] = arena.frame(x=(8, "uint8"), y=(8, "uint8"))
        finally:
            done.set()

    def read():
        while not done.is_set():
            frame = shared[0]
            try:
                assert tuple(frame.x.shape) == (8,)
                assert tuple(frame.y.shape) == (8,)
            except StaleRegionError:
                assert not frame.is_live

    run_threads(renew, read)
    with pytest.raises(StaleRegionError):
        stale = shared[0]
        arena.rollback(checkpoint)
        stale.x


def test_closing_in_another_thread_stops_every_kind_of_use_cleanly(make):
    for _ in range(5):
        arena = make()
        checkpoint = arena.checkpoint()
        child = arena.child(4096)
        started = threading.Barrier(4)

        def loop(step, started=started):
            step()
            started.wait(30)
            try:
                while True:
                    step()
                    time.sleep(0)
            except (ArenaClosedError, StaleRegionError):
                pass

        def allocate(arena=arena):
            with arena.scope():
                arena.alloc(16, "uint8", fill=1).array

        def watch(arena=arena, checkpoint=checkpoint):
            arena.stats, arena.by_label(), repr(arena), arena.pins
            arena.checkpoint()

        def inner(child=child):
            with child.scope():
                child.empty(16, "uint8")

        def close(arena=arena, started=started):
            started.wait(30)
            time.sleep(1e-3)
            arena.close()

        run_threads(lambda: loop(allocate), lambda: loop(watch), lambda: loop(inner), close)
        assert arena.closed
        assert child.closed
        assert (arena.stats.n_regions, arena.stats.used) == (0, 0)


def test_two_threads_close_one_arena_once(make):
    from gpuarena.testing import FakeDevice

    for _ in range(20):
        device = FakeDevice()
        arena = Arena(4096, backend=device)
        arena.alloc(4, "uint8")
        run_threads(arena.close, arena.close, arena.close)
        assert device.n_released == 1


def test_a_capture_of_pins_is_whole_while_others_allocate(make):
    arena = make()

    def pin():
        for number in range(30):
            try:
                with arena.pin(str(number)) as pinned:
                    arena.alloc(8, "uint8")
            except CheckpointError:
                continue  # the other thread's is open
            pinned.release()

    def allocate():
        for _ in range(200):
            arena.alloc(8, "uint8")

    run_threads(pin, pin, allocate)
    assert arena.pins == ()
    stats = arena.stats
    assert sum(arena.by_label().values()) == stats.used
    offsets = sorted(
        (record.offset, record.offset + record.nbytes) for record in arena._low.records if record.nbytes
    )
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(offsets))
    arena.reset()
    assert arena.stats.used == 0
