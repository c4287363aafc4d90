from __future__ import annotations

import contextlib

import log_kit
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuarena import Arena, Debug
from gpuarena.errors import ArgumentError, OutOfMemoryError
from gpuarena.observe import Event, load_trace
from gpuarena.observe.replay import replay


def offsets(regions):
    return in_order((region.offset, region.nbytes, region.label) for region in regions)


def in_order(places):
    return sorted(places, key=lambda place: (*place[:2], repr(place[2])))


def figures(event):
    return event.side, event.n_regions, event.top, event.offset, event.nbytes


def layout(events):
    """What happened, but for scopes, which are not replayed, and for how it began."""
    kinds = ("start", "held", "scope_held", "scope_open", "scope_close")
    return [(event.kind, *figures(event)) for event in events if event.kind not in kinds]


def held(events):
    return [figures(event) for event in events if event.kind == "held"]


def test_a_replay_makes_the_same_regions():
    arena, again = Arena(4096, alignment=64), Arena(4096, alignment=64)
    with arena.record() as trace:
        regions = [
            arena.alloc((2, 3), "float32", label="x"),
            arena.alloc(5, "uint8", side="high", align=16),
        ]
        with arena.scope():
            arena.alloc(10, "uint8").extend(20)
            with pytest.raises(OutOfMemoryError):
                arena.alloc(5000, "uint8")
        regions.append(arena.alloc(7, "bool"))
    made = trace.replay(again)
    assert offsets(made) == offsets(regions)
    assert [(region.shape, region.dtype) for region in made[:1]] == [((2, 3), regions[0].dtype)]
    assert again.stats == arena.stats


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_a_recording_in_a_file_is_replayed_and_saved_as_well(tmp_path, suffix, ended):
    arena = Arena(4096)
    with arena.record(tmp_path / f"run{suffix}") as trace:
        first = arena.alloc(100, "uint8", label="x")
        if not ended:
            assert offsets(trace.replay(Arena(4096))) == offsets([first])
    assert offsets(trace.replay(Arena(4096))) == offsets([first])
    trace.save(tmp_path / "copy.jsonl")
    assert load_trace(tmp_path / "copy.jsonl") == load_trace(trace.path)


def test_a_replay_starts_where_the_recording_did():
    arenas = [Arena(4096, alignment=64) for _ in range(2)]
    for arena in arenas:
        arena.alloc(100, "uint8")
        arena.alloc(100, "uint8", side="high")
    with arenas[0].record() as trace, arenas[0].scope():
        arenas[0].alloc(10, "uint8")
        kept = arenas[0].alloc(10, "uint8", side="high")
    made = trace.replay(arenas[1])
    assert offsets(made) == offsets([kept])
    assert arenas[1].stats == arenas[0].stats


def test_a_replay_of_the_end_closes_the_arena():
    arena, again = Arena(4096), Arena(4096)
    with arena.record() as trace:
        arena.alloc(1, "uint8")
        arena.close()
    trace.replay(again)
    assert again.closed


def test_structured_types_are_replayed_as_bytes():
    arena, again = Arena(4096), Arena(4096)
    with arena.record() as trace:
        arena.alloc(3, np.dtype([("a", "f4"), ("b", "i8")]))
    assert [region.nbytes for region in trace.replay(again)] == [36]


def test_regions_that_were_spilled_come_back_at_their_offsets():
    arena, again = Arena(4096), Arena(4096)
    checkpoint = arena.checkpoint()
    with arena.record() as trace:
        regions = [arena.alloc(10, "uint8") for _ in range(3)]
        arena.spill(checkpoint).restore()
    made = trace.replay(again)
    assert offsets(made) == offsets(regions)


def test_a_request_that_fits_no_more_raises_and_leaves_what_came_before():
    arena, again = Arena(4096), Arena(600)
    with arena.record() as trace:
        arena.alloc(500, "uint8", label="first")
        arena.alloc(500, "uint8", label="second")
    with pytest.raises(OutOfMemoryError, match="'second'"):
        trace.replay(again)
    assert again.by_label() == {"first": 500}


def test_a_request_that_failed_and_fits_now_is_told():
    arena, again = Arena(100), Arena(4096)
    with arena.record() as trace, contextlib.suppress(OutOfMemoryError):
        arena.alloc(500, "uint8")
    with pytest.raises(ArgumentError, match="succeeds here"):
        trace.replay(again)


def test_an_old_trace_that_goes_back_further_than_its_start_is_refused():
    arena, again = Arena(4096), Arena(4096)
    checkpoint = arena.checkpoint()
    arena.alloc(1, "uint8")
    with arena.record() as trace:
        arena.rollback(checkpoint)
    events = [event for event in trace.events if event.kind != "held"]
    with pytest.raises(ArgumentError, match="before it began"):
        replay(events, again)


def test_an_old_trace_that_extends_a_region_from_before_its_start_is_refused():
    arena, again = Arena(4096), Arena(4096)
    region = arena.alloc(1, "uint8")
    with arena.record() as trace:
        region.extend(2)
    events = [event for event in trace.events if event.kind != "held"]
    with pytest.raises(ArgumentError, match="before it began"):
        replay(events, again)


def test_an_old_trace_is_replayed_behind_what_there_is():
    events = [Event("start", "low", 1, 7), Event("start", "high", 0, 4096)]
    events += [Event("alloc", "low", 2, 74, 64, 10, (10,), "uint8", 64, "x"), Event("rollback", "low", 1, 7)]
    arena = Arena(4096, alignment=64)
    arena.alloc(7, "uint8")
    assert offsets(replay(events[:3], arena)) == [(64, 10, "x")]
    arena.rollback(arena._position("low", 1))
    assert replay(events, arena) == []
    assert arena.stats.n_regions == 1


def test_an_unknown_event_is_refused():
    arena = Arena(4096)
    with arena.record() as trace:
        pass
    trace.events.append(Event("explode", "low", 0, 0))
    with pytest.raises(ArgumentError, match="explode"):
        trace.replay(Arena(4096))


@given(log_kit.programs(), st.booleans())
def test_any_program_is_replayed_at_the_same_offsets(program, debug):
    debug = Debug(guard=8, on_live_arrays="ignore") if debug else False
    if debug:  # see the next test
        program = [step for step in program if step[0] != "pin"]
    arena, again = (Arena(log_kit.CAPACITY, alignment=64, debug=debug) for _ in range(2))
    with arena.record() as trace:
        log_kit.Runner(arena).run(program)
    with again.record() as second:
        trace.replay(again)
    assert layout(second.events) == layout(trace.events)
    for name in ("top", "high", "used", "n_regions"):
        assert getattr(again.stats, name) == getattr(arena.stats, name)
    assert again.by_label() == arena.by_label()


@given(
    log_kit.programs(max_size=10),
    log_kit.programs(),
    st.sampled_from([None, ".jsonl", ".csv"]),
    st.booleans(),
)
def test_any_log_that_began_in_the_middle_is_replayed_from_nothing_and_from_there(
    tmp_path_factory, before, program, suffix, sites
):
    arena, there, empty = (Arena(log_kit.CAPACITY, alignment=64) for _ in range(3))
    runners = [log_kit.Runner(arena), log_kit.Runner(there)]
    for runner in runners:
        runner.run(before)
    path = None if suffix is None else tmp_path_factory.mktemp("replay") / f"log{suffix}"
    with arena.record(path, sites=sites) as trace:
        runners[0].run(program)
    events = trace.events if path is None else load_trace(path)
    assert all(bool(event.site) is sites for event in events if event.kind == "alloc")
    for again in (there, empty):
        with again.record() as second:
            made = replay(events, again)
        n_held = sum(event.kind == "held" for event in events) if again is empty else 0
        steps = layout(second.events)
        assert steps[:n_held] == [("restore", *step) for step in held(events)][:n_held]
        assert steps[n_held:] == layout(events)
        for name in ("top", "high", "used", "n_regions"):
            assert getattr(again.stats, name) == getattr(arena.stats, name)
        assert again.by_label() == arena.by_label()
        records = again._low.records + again._high.records
        live = [(record.offset, record.nbytes, record.label) for record in records]
        assert set(offsets(made)) <= set(live)
        if again is empty:
            assert offsets(made) == in_order(live)


def test_what_was_there_at_the_start_is_placed_or_found():
    def arena_with(*sizes):
        arena = Arena(4096, alignment=64)
        for size in sizes:
            arena.alloc(size, "uint8")
        return arena

    arena = arena_with(10, 20)
    with arena.record() as trace:
        x = arena.alloc(5, "uint8", label="x")
    placed, found = arena_with(), arena_with(10, 20)
    assert offsets(replay(trace.events, placed)) == [(0, 10, None), (64, 20, None), (128, 5, "x")]
    assert offsets(replay(trace.events, found)) == offsets([x])
    for sizes in ((10,), (10, 21), (10, 20, 30), (7,)):
        other = arena_with(*sizes)
        before = other.stats
        with pytest.raises(ArgumentError, match=r"began with 2 regions on the low end.*not the same ones"):
            replay(trace.events, other)
        assert other.stats == before


def test_a_region_that_was_there_can_grow_and_go():
    arenas = [Arena(4096) for _ in range(3)]
    regions = [arena.alloc((2, 3), "float32", label="x") for arena in arenas[:2]]
    with arenas[0].record() as trace:
        regions[0].extend(4)
        arenas[0].reset()
        arenas[0].alloc(1, "uint8")
    for arena in arenas[1:]:
        assert offsets(replay(trace.events, arena)) == [(0, 1, None)]


def test_pins_are_replayed_at_the_same_offsets_in_debug_mode():
    arena, again = (Arena(2048, debug=Debug(on_live_arrays="ignore")) for _ in range(2))
    with arena.record() as trace:
        log_kit.Runner(arena).run([("pin", "low", 100, "uint8", None, None)])
    trace.replay(again)
    assert again.stats.top == arena.stats.top


def test_a_refused_frame_is_not_recorded():
    arena, again = Arena(1000), Arena(1000)
    with arena.record() as trace, pytest.raises(OutOfMemoryError):
        arena.frame(x=(500, "uint8"), y=(1000, "uint8"))
    trace.replay(again)
    assert again.stats == arena.stats
