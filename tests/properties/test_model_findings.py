"""Where the arena and the model of `gpuarena.testing` were found to differ, one test each, smallest form."""

from __future__ import annotations

import contextlib
import sys

import pytest

from gpuarena import Arena, Debug, as_dtype
from gpuarena.errors import (
    CheckpointError,
    CorruptionError,
    CorruptionWarning,
    LiveArraysError,
    OutOfMemoryError,
)
from gpuarena.observe.trace import replay


def debugged(capacity=1024, **settings):
    """An arena in debug mode, and an array over all of its memory."""
    settings = {"guard": 16, "on_live_arrays": "ignore", "call_sites": False, **settings}
    arena = Arena(capacity, debug=Debug(**settings), alignment=16)
    return arena, arena._backend.root(0, (capacity,), as_dtype("uint8"))


def test_a_checkpoint_that_comes_back_with_spilled_regions_forbids_growth():  # D8
    arena = Arena(1024)
    start = arena.checkpoint()
    region = arena.alloc(4, "uint8")
    behind = arena.checkpoint()
    spilled = arena.spill(start)
    arena.checkpoint()  # of the empty arena
    spilled.restore()
    with pytest.raises(CheckpointError, match="behind it"):
        region.extend(8)
    arena.rollback(behind)
    assert arena.stats.top == 4


def test_growing_keeps_the_arrays_of_the_shorter_region_in_sight():
    arena, _ = debugged(on_live_arrays="raise")
    start = arena.checkpoint()
    region = arena.alloc((2, 3), "float32")
    array = region.array
    region.extend(4)
    with pytest.raises(LiveArraysError):
        arena.rollback(start)
    del array
    arena.rollback(start)


def test_the_array_of_a_grown_region_is_in_sight():
    arena, _ = debugged(on_live_arrays="raise")
    start = arena.checkpoint()
    array = arena.alloc((2, 3), "float32").extend(4).array
    with pytest.raises(LiveArraysError):
        arena.rollback(start)
    del array


def test_growing_over_a_damaged_guard_zone_reports_it():  # R13
    arena, memory = debugged()
    region = arena.alloc(4, "uint8")
    memory[region.offset + 4] = 0  # one byte too far
    with pytest.raises(CorruptionError):
        region.extend(8)


def test_growing_is_refused_where_every_region_has_a_buffer():  # D8
    arena = Arena(1024, debug=Debug(separate=True))
    region = arena.alloc((2, 3), "float32", fill=1)
    with pytest.raises(CheckpointError, match="separate"):
        region.extend(4)
    assert region.array.tolist() == [[1, 1, 1]] * 2


def test_spilled_regions_come_back_where_every_region_has_a_buffer():
    arena = Arena(1024, debug=Debug(separate=True))
    start = arena.checkpoint()
    region = arena.alloc(4, "uint8", fill=7)
    spilled = arena.spill(start)
    spilled.restore()
    assert region.array.tolist() == [7] * 4


def test_a_spill_that_finds_damage_loses_nothing():  # F1
    arena, memory = debugged()
    start = arena.checkpoint()
    region = arena.alloc(4, "uint8", fill=7)
    memory[region.offset + 4] = 0
    with pytest.raises(CorruptionError):
        arena.spill(start)
    assert region.array.tolist() == [7] * 4


def test_a_reset_that_reports_damage_kills_the_checkpoints():  # R10
    arena, memory = debugged()
    start = arena.checkpoint()
    region = arena.alloc(4, "uint8")
    memory[region.offset + 4] = 0
    with pytest.raises(CorruptionError):
        arena.reset()
    assert not region.is_live
    with pytest.raises(CheckpointError, match="before reset"):
        arena.rollback(start)


def test_a_reset_that_is_refused_counts_for_no_profile():  # F1
    arena, _ = debugged(on_live_arrays="raise")
    with arena.profile() as profile:
        arena.alloc(4, "uint8")
        array = arena.alloc(4, "uint8", side="high").array
        with pytest.raises(LiveArraysError):
            arena.reset()
        assert (profile.regions.current, profile.regions.freed) == (2, 0)
    del array


def test_a_reset_that_is_refused_still_reports_damage_later():
    arena, memory = debugged(on_live_arrays="raise")
    region = arena.alloc(4, "uint8")
    array = arena.alloc(4, "uint8", side="high").array
    memory[region.offset + 4] = 0
    with pytest.raises((LiveArraysError, CorruptionError)) as first:
        arena.reset()
    assert region.is_live
    if first.type is LiveArraysError:
        with pytest.raises(CorruptionError):
            arena.check()
    del array


def test_a_reset_reports_the_damage_of_both_ends():
    arena, memory = debugged()
    low = arena.alloc(4, "uint8")
    high = arena.alloc(4, "uint8", side="high")
    for region in (low, high):
        memory[region.offset + 4] = 0
    with pytest.raises(CorruptionError) as caught:
        arena.reset()
    assert sorted(caught.value.offsets) == [low.offset + 4, high.offset + 4]


def test_frames_of_a_child_let_go_of_their_arrays_as_those_of_its_parent_do():
    arena, _ = debugged(on_live_arrays="raise")
    start = arena.checkpoint()
    child = arena.child(256)
    frame = child.frame(x=(4, "uint8"))
    arena.rollback(start)
    assert not frame.is_live


def test_damage_in_a_child_is_reported_where_the_parent_gives_its_region_back():
    arena, memory = debugged()
    start = arena.checkpoint()
    child = arena.child(256)
    region = child.alloc(4, "uint8")
    memory[region.address - arena.address + 4] = 0
    with pytest.raises((CorruptionError, CorruptionWarning)):  # warnings are errors here
        arena.rollback(start)
    assert child.closed
    assert memory[:16].tolist() == [0xFF] * 16


def test_leaving_a_pin_after_the_arena_was_closed_takes_nothing():  # T5
    arena = Arena(1024)
    with arena.pin():
        arena.alloc(100, "uint8")
        arena.close()
    assert (arena.stats.used, arena.stats.n_regions) == (0, 0)
    assert arena.pins == ()


def test_what_comes_back_inside_a_pin_is_kept_by_it():
    arena = Arena(1024)
    start = arena.checkpoint()
    region = arena.alloc(100, "uint8")
    spilled = arena.spill(start)
    with arena.pin() as pin:
        spilled.restore()
        region.array[...] = 0  # by the graph
        arena.rollback(start)
    assert pin.nbytes == 100


def test_a_pin_keeps_the_ends_apart_that_used_the_same_bytes_in_turn():  # D1
    arena = Arena(1024, alignment=1)
    with arena.pin():
        for side in ("low", "high"):
            with arena.scope(side=side):
                arena.alloc(800, "uint8", side=side)
    assert 0 <= arena.stats.top <= arena.stats.high <= 1024
    assert arena.stats.available == 0


def test_a_pin_leaves_the_other_end_what_is_live_there():  # D1
    arena = Arena(1024, alignment=1)
    with arena.pin():
        with arena.scope():
            arena.alloc(800, "uint8")
        region = arena.alloc(800, "uint8", side="high")
    assert 0 <= arena.stats.top <= region.offset
    assert arena.stats.available == 0
    assert arena.stats.used == 1024


def test_a_pin_keeps_what_a_region_grew_by():  # D8
    arena = Arena(1024)
    with arena.pin() as pin, arena.scope():
        arena.alloc(4, "uint8").extend(100)
    assert pin.nbytes == 100


def test_a_frame_that_did_not_fit_leaves_nothing_with_a_pin():  # F1
    arena = Arena(1024)
    with arena.pin() as pin, pytest.raises(OutOfMemoryError):
        arena.frame(x=(100, "uint8"), y=(2000, "uint8"))
    # The block ended without an exception: pytest caught it inside.
    assert pin.nbytes == 0


def test_a_frame_that_meets_damage_takes_nothing():  # F1
    arena, memory = debugged()
    start = arena.checkpoint()
    arena.alloc(600, "uint8")
    arena.rollback(start)
    memory[300] = 0
    with pytest.raises(CorruptionError):
        arena.frame(x=(4, "uint8"), y=(500, "uint8"))
    stats = arena.stats
    assert (stats.top, stats.used, stats.n_regions, stats.n_allocs_total) == (0, 0, 0, 1)
    arena.check()


def test_a_frame_that_meets_damage_leaves_nothing_with_a_pin_or_a_profile():  # F1
    arena, memory = debugged()
    start = arena.checkpoint()
    arena.alloc(600, "uint8")
    arena.rollback(start)
    memory[300] = 0
    with arena.profile() as profile, arena.pin() as pin, contextlib.suppress(CorruptionError):
        arena.frame(x=(4, "uint8"), y=(500, "uint8"))
    assert pin.nbytes == 0
    assert (profile.nbytes.allocated, profile.nbytes.peak) == (0, 0)


def test_a_frame_that_did_not_fit_counts_for_no_profile():  # F1
    arena = Arena(1024)
    with arena.profile() as profile, contextlib.suppress(OutOfMemoryError):
        arena.frame(x=(100, "uint8"), y=(2000, "uint8"))
    assert (profile.regions.allocated, profile.nbytes.peak, profile.n_failed) == (0, 0, 1)


def test_a_frame_that_did_not_fit_is_replayed_with_the_same_figures():  # T8
    arena = Arena(1024)
    with arena.record() as trace, contextlib.suppress(OutOfMemoryError):
        arena.frame(x=(100, "uint8"), y=(2000, "uint8"))
    again = Arena(1024)
    trace.replay(again)
    assert again.stats == arena.stats


def test_a_profile_that_has_ended_counts_no_more():
    arena = Arena(1024)
    start = arena.checkpoint()
    with arena.profile() as profile:
        arena.alloc(4, "uint8")
        spilled = arena.spill(start)
    spilled.restore()
    assert (profile.regions.current, profile.regions.allocated) == (0, 1)


def test_a_trace_that_has_ended_logs_no_more():
    arena = Arena(1024)
    start = arena.checkpoint()
    with arena.record() as trace:
        arena.alloc(4, "uint8")
        spilled = arena.spill(start)
    n_events = len(trace.events)
    spilled.restore()
    assert len(trace.events) == n_events


def test_a_trace_that_began_after_a_spill_shows_what_comes_back():  # T8
    arena = Arena(1024)
    start = arena.checkpoint()
    arena.alloc(4, "uint8")
    spilled = arena.spill(start)
    with arena.record() as trace:
        spilled.restore()
        arena.alloc(5, "uint8")
    again = Arena(1024)
    assert [region.offset for region in trace.replay(again)] == [0, 256]


def test_what_came_back_is_replayed_at_its_place():  # T8
    arena = Arena(1024)
    with arena.record() as trace:
        arena.alloc(4, "uint8")
        start = arena.checkpoint()
        region = arena.alloc(4, "uint8")
        arena.spill(start).restore()
    again = Arena(1024)
    assert [other.offset for other in trace.replay(again)] == [0, region.offset]


def test_a_pin_is_replayed_where_it_was_in_debug_mode_too():  # T8
    arena, _ = debugged()
    with arena.record() as trace:
        with arena.pin(), arena.scope():
            arena.alloc(100, "uint8")
        arena.alloc(4, "uint8")
    again, _ = debugged()
    trace.replay(again)
    assert (again.stats.top, again.stats.high) == (arena.stats.top, arena.stats.high)


def test_a_trace_that_grows_an_older_region_grows_it_again():
    arena = Arena(1024)
    region = arena.alloc(4, "uint8")
    with arena.record() as trace:
        region.extend(8)
    again = Arena(1024)
    trace.replay(again)
    assert again.stats.top == arena.stats.top == 8
    older_log = [event for event in trace.events if event.kind != "held"]  # did not say what there was
    untouched = Arena(1024)
    with pytest.raises(ValueError, match="before it began"):
        replay(older_log, untouched)
    assert untouched.stats.top == 0


@pytest.mark.skipif(sys.platform != "linux", reason="memory that grows is made for Linux")
def test_a_pin_of_memory_that_grows_is_replayed():  # T8
    arena = Arena(1024, backend="virtual")
    with arena.record() as trace, arena.pin(), arena.scope():
        arena.alloc(100, "uint8")
    again = Arena(1024, backend="virtual")
    trace.replay(again)
    assert again.stats.top == arena.stats.top == 100
