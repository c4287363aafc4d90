from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuarena import Arena, Debug
from gpuarena.errors import ArenaError, ArgumentError, OutOfMemoryError
from gpuarena.observe import Event


def offsets(regions):
    return sorted((region.offset, region.nbytes, region.label) for region in regions)


def layout(events):
    return [
        (event.kind, event.side, event.n_regions, event.top, event.offset, event.nbytes) for event in events
    ]


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


def test_a_trace_that_goes_back_further_than_its_start_is_refused():
    arena, again = Arena(4096), Arena(4096)
    checkpoint = arena.checkpoint()
    arena.alloc(1, "uint8")
    with arena.record() as trace:
        arena.rollback(checkpoint)
    with pytest.raises(ArgumentError, match="before it began"):
        trace.replay(again)


def test_a_trace_that_extends_a_region_from_before_its_start_is_refused():
    arena, again = Arena(4096), Arena(4096)
    region = arena.alloc(1, "uint8")
    with arena.record() as trace:
        region.extend(2)
    with pytest.raises(ArgumentError):
        trace.replay(again)


def test_an_unknown_event_is_refused():
    arena = Arena(4096)
    with arena.record() as trace:
        pass
    trace.events.append(Event("explode", "low", 0, 0))
    with pytest.raises(ArgumentError, match="explode"):
        trace.replay(Arena(4096))


programs = st.lists(
    st.tuples(
        st.sampled_from(
            ["alloc", "alloc", "alloc", "extend", "checkpoint", "rollback", "reset", "frame", "pin"]
        ),
        st.sampled_from(["low", "high"]),
        st.integers(0, 60),
        st.sampled_from(["uint8", "float32", "int64"]),
        st.sampled_from([None, 8, 64]),
        st.none() | st.text(max_size=3),
    ),
    max_size=30,
)


def run(arena, program):
    checkpoints = {"low": [], "high": []}
    last = None
    for kind, side, n, dtype, align, label in program:
        try:
            if kind == "alloc":
                last = arena.alloc(n, dtype, align=align, side=side, label=label)
            elif kind == "extend" and last is not None:
                last.extend(n + 1)
            elif kind == "checkpoint":
                checkpoints[side].append(arena.checkpoint(side))
            elif kind == "rollback" and checkpoints[side]:
                arena.rollback(checkpoints[side].pop())
            elif kind == "reset":
                arena.reset()
            elif kind == "frame":
                arena.frame({"x": (n, dtype), "y": (n * 10, dtype)}, side=side)
            elif kind == "pin":
                with arena.pin() as pin, arena.scope(side=side):
                    arena.alloc(n, dtype, side=side)
                pin.release()
        except ArenaError:
            pass  # refused, which changes nothing


@given(programs, st.booleans())
def test_any_program_is_replayed_at_the_same_offsets(program, debug):
    debug = Debug(guard=8, on_live_arrays="ignore") if debug else False
    if debug:  # see the next test
        program = [step for step in program if step[0] != "pin"]
    arena, again = (Arena(2048, alignment=64, debug=debug) for _ in range(2))
    with arena.record() as trace:
        run(arena, program)
    with again.record() as second:
        trace.replay(again)
    assert layout(second.events) == layout(trace.events)
    for name in ("top", "high", "used", "n_regions"):
        assert getattr(again.stats, name) == getattr(arena.stats, name)
    assert again.by_label() == arena.by_label()


def test_pins_are_replayed_at_the_same_offsets_in_debug_mode():
    arena, again = (Arena(2048, debug=Debug(on_live_arrays="ignore")) for _ in range(2))
    with arena.record() as trace:
        run(arena, [("pin", "low", 100, "uint8", None, None)])
    trace.replay(again)
    assert again.stats.top == arena.stats.top


def test_a_refused_frame_is_not_recorded():
    arena, again = Arena(1000), Arena(1000)
    with arena.record() as trace, pytest.raises(OutOfMemoryError):
        arena.frame(x=(500, "uint8"), y=(1000, "uint8"))
    trace.replay(again)
    assert again.stats == arena.stats
