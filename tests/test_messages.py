from __future__ import annotations

import re

import pytest
from debug_kit import here
from hypothesis import assume, given
from hypothesis import strategies as st

from gpuarena import Arena, Debug
from gpuarena.errors import ArenaClosedError, CheckpointError, OutOfMemoryError, StaleRegionError

# -- out of memory ----------------------------------------------------------------------------------------------


@pytest.fixture(params=["host", "torch"])
def arena(request):
    if request.param == "torch":
        pytest.importorskip("torch")
    return Arena(1024, backend=request.param, alignment=64, name="scratch")


def refusal(arena, nbytes, **options):
    with pytest.raises(OutOfMemoryError) as caught:
        arena.alloc(nbytes, "uint8", **options)
    return caught.value


def test_what_is_asked_what_there_is_and_what_is_missing(arena):
    arena.alloc(100, "uint8", label="weights")
    error = refusal(arena, 1000, label="logits")
    text = str(error)
    assert "1 000 bytes requested for 'logits', 924 bytes available of 1 024 bytes" in text
    assert "104 bytes missing, alignment included (28 bytes)" in text
    assert (error.requested, error.available, error.capacity, error.missing) == (1000, 924, 1024, 104)
    assert (error.aligned_offset, error.label) == (128, "logits")
    assert "requested," in str(refusal(arena, 1000))


def test_the_largest_labels_are_listed_with_the_rest_and_the_padding(arena):
    sizes = {"a": 1, "b": 70, "c": 30, "d": 40, "e": 50, "f": 60, "g": 20}
    for label, nbytes in sizes.items():
        arena.alloc(nbytes, "uint8", label=label, align=1)
    arena.alloc(5, "uint8", label="b", align=1)
    arena.alloc(10, "uint8")
    text = str(refusal(arena, 1000))
    listed = re.search(r"Held by: (.*?)\. ", text)[1]
    assert listed == "b 75 bytes, f 60 bytes, e 50 bytes, d 40 bytes, c 30 bytes, others 31 bytes"
    between = int(re.search(r"Between regions: (\d+) bytes", text)[1])
    assert between == arena.stats.padding
    assert 286 + between == 1024 - arena.stats.available


def test_both_ends_are_listed_and_regions_without_a_label_are_named_so(arena):
    arena.alloc(100, "uint8")
    arena.alloc(200, "uint8", side="high", label="kv")
    for side in ("low", "high"):
        text = str(refusal(arena, 1000, side=side))
        assert "Held by: kv 200 bytes, no label 100 bytes." in text


def test_an_empty_arena_is_held_by_nobody(arena):
    text = str(refusal(arena, 1025))
    assert "Held by" not in text
    assert "Between" not in text
    assert "Make the arena larger by at least 1 bytes: no rollback makes room for this." in text


def test_guard_zones_are_between_regions():
    arena = Arena(1024, alignment=1, debug=Debug(guard=16))
    arena.alloc(100, "uint8", label="x")
    text = str(refusal(arena, 1000))
    assert "Held by: x 100 bytes. Between regions: 16 bytes." in text


def test_the_end_of_the_open_scope_is_offered_with_what_it_frees(arena):
    arena.alloc(100, "uint8")
    text = str(refusal(arena, 1000))
    assert "no scope is open" in text
    with arena.scope("outer"):
        arena.alloc(64, "uint8")
        with arena.scope("inner"), arena.scope("elsewhere", side="high"):
            arena.alloc(128, "uint8")
            assert "the end of scope 'inner' frees 128 bytes." in str(refusal(arena, 1000))
        assert "the end of scope 'outer' frees 92 bytes." in str(refusal(arena, 1000))  # 28 of alignment
        assert "no scope is open" in str(refusal(arena, 1000, side="high"))


def test_sizes_have_units():
    arena = Arena("2GiB", backend="virtual")
    text = str(refusal(arena, 3 << 30))
    assert "3 221 225 472 bytes (3.00 GiB) requested" in text
    assert "of 2 147 483 648 bytes (2.00 GiB)" in text


def test_a_child_says_what_its_own_regions_hold(arena):
    child = arena.child(256, name="child")
    child.alloc(100, "uint8", label="x")
    text = str(refusal(child, 200))
    assert "Held by: x 100 bytes." in text
    assert "of 256 bytes" in text


def build(capacity, requests, side):
    """Allocate on an arena of any capacity, from the same end each time."""
    arena = Arena(capacity, alignment=64)
    for nbytes, align in requests:
        arena.alloc(nbytes, "uint8", align=align, side=side)
    return arena


requests = st.lists(st.tuples(st.integers(1, 200), st.sampled_from([1, 16, 64])), max_size=4)


@given(requests, st.integers(1, 1500), st.sampled_from([1, 16, 64]))
def test_an_arena_as_much_larger_as_the_message_says_has_room(held, nbytes, align):
    arena = build(1024, held, "low")
    try:
        arena.alloc(nbytes, "uint8", align=align)
    except OutOfMemoryError as error:
        missing = error.missing
    else:
        assume(False)
    build(1024 + missing, held, "low").alloc(nbytes, "uint8", align=align)
    with pytest.raises(OutOfMemoryError):
        build(1024 + missing - 1, held, "low").alloc(nbytes, "uint8", align=align)


def test_an_arena_as_much_larger_as_the_message_says_has_room_at_the_high_end():
    def run(capacity):
        arena = Arena(capacity, alignment=256)
        arena.alloc(600, "uint8")
        arena.alloc(512, "uint8", side="high")

    with pytest.raises(OutOfMemoryError) as caught:
        run(1024)
    run(1024 + int(re.search(r"at least (\d+) bytes", str(caught.value))[1]))


def test_an_arena_as_much_larger_as_the_message_says_has_room_below_a_high_end():
    def run(capacity):
        arena = Arena(capacity, alignment=256)
        arena.alloc(100, "uint8", side="high")
        arena.alloc(800, "uint8")

    with pytest.raises(OutOfMemoryError) as caught:
        run(1024)
    run(1024 + int(re.search(r"at least (\d+) bytes", str(caught.value))[1]))


def test_a_rollback_frees_what_the_message_says(arena):
    arena.alloc(100, "uint8")
    with arena.scope("step"):
        arena.alloc(300, "uint8")
        arena.alloc(400, "uint8")
        text = str(refusal(arena, 800))
        frees = int(re.search(r"'step' frees (\d+) bytes", text)[1])
        available = arena.stats.available
    assert arena.stats.available == available + frees
    arena.alloc(800, "uint8")


# -- who gave the memory back -----------------------------------------------------------------------------------


def by_rollback(arena, checkpoint):
    arena.rollback(checkpoint)
    return here(above=1)


def by_reset(arena, checkpoint):
    arena.reset()
    return here(above=1)


def by_spill(arena, checkpoint):
    arena.spill(checkpoint)
    return here(above=1)


WAYS = {"rollback()": by_rollback, "reset()": by_reset, "spill()": by_spill}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("side", ["low", "high"])
def test_a_stale_region_names_the_line_that_gave_it_back(arena, way, side):
    checkpoint = arena.checkpoint(side)
    region = arena.alloc((2, 3), "float32", label="logits", side=side)
    place = WAYS[way](arena, checkpoint)
    arena.alloc(4, "uint8")
    arena.rollback(arena.checkpoint())
    for touch in (lambda: region.array, lambda: region[0], lambda: region.__setitem__(0, 1)):
        with pytest.raises(StaleRegionError) as caught:
            touch()
        text = str(caught.value)
        assert f"region 'logits' float32[2, 3] at offset {region.offset} is stale" in text
        assert f"given back by {way} at {place} and may" in text
        assert caught.value.region.label == "logits"


def test_a_stale_region_names_the_scope_and_the_line_of_its_with(arena):
    with arena.scope("prefill"):
        place = here()
        region = arena.alloc(4, "uint8")
    with pytest.raises(StaleRegionError) as caught:
        region.array
    file, line = place.rsplit(":", 1)
    assert f"the end of scope 'prefill' at {file}:{int(line) - 1} and may" in str(caught.value)


def test_a_scratch_block_and_a_scope_in_another_function_name_their_own_lines(arena):
    def inner():
        with arena.scratch(label="tmp") as tmp:
            place = here()
            return tmp.alloc(4, "uint8"), place

    region, place = inner()
    with pytest.raises(StaleRegionError) as caught:
        region.array
    found = re.search(r"at (\S+):(\d+) and may", str(caught.value))
    assert found[1] == place.rsplit(":", 1)[0]
    assert abs(int(found[2]) - int(place.rsplit(":", 1)[1])) <= 1


def test_a_stale_region_of_a_closed_arena_says_so(arena):
    region = arena.alloc(4, "uint8")
    arena.close()
    with pytest.raises(StaleRegionError, match=r"its arena was closed$"):
        region.array


def test_the_first_rollback_that_dropped_a_region_is_named_not_a_later_one(arena):
    outer = arena.checkpoint()
    arena.alloc(4, "uint8")
    inner = arena.checkpoint()
    region = arena.alloc(4, "uint8")
    place = by_rollback(arena, inner)
    for _ in range(3):
        arena.alloc(4, "uint8")
        by_reset(arena, outer)
    with pytest.raises(StaleRegionError) as caught:
        region.array
    assert place in str(caught.value)


def test_a_rollback_too_long_ago_is_said_to_be_one():
    arena = Arena(1024)
    with arena.scope("first"):
        region = arena.alloc(4, "uint8")
    for _ in range(300):
        with arena.scope("later"):
            arena.alloc(4, "uint8")
    with pytest.raises(StaleRegionError) as caught:
        region.array
    text = str(caught.value)
    assert "too long ago" in text or "or by an earlier one" in text
    assert "'first'" not in text


def test_a_dead_checkpoint_names_the_line_that_killed_it(arena):
    outer = arena.checkpoint()
    arena.alloc(4, "uint8")
    inner = arena.checkpoint()
    place = by_rollback(arena, outer)
    for call in (arena.rollback, arena.keep, arena.spill):
        with pytest.raises(CheckpointError, match="out of order") as caught:
            call(inner)
        assert place in str(caught.value)
    kept = arena.checkpoint()
    arena.keep(kept)
    place = here(above=1)
    with pytest.raises(CheckpointError) as caught:
        arena.rollback(kept)
    assert f"given up by keep() at {place}" in str(caught.value)


def test_a_dead_child_names_the_line_that_ended_it(arena):
    checkpoint = arena.checkpoint()
    child = arena.child(256, name="kv")
    region = child.alloc(4, "uint8")
    place = by_rollback(arena, checkpoint)
    with pytest.raises(
        ArenaClosedError, match="alloc: arena 'kv' lay in a region that was given back by"
    ) as caught:
        child.alloc(1, "uint8")
    assert place in str(caught.value)
    with pytest.raises(StaleRegionError) as caught:
        region.array
    assert place in str(caught.value)


def test_a_call_on_a_closed_arena_names_the_call_and_the_arena(arena):
    arena.close()
    for name in ("checkpoint", "scope", "reset", "check", "trim", "pin", "scratch"):
        with pytest.raises(ArenaClosedError, match=f"^{name}: arena 'scratch' is closed$"):
            getattr(arena, name)()


def test_a_frame_of_the_stack_is_not_kept_alive_by_a_message():
    import gc
    import weakref

    class Thing:
        pass

    def step(arena):
        thing = Thing()
        with arena.scope():
            arena.alloc(4, "uint8")
        return weakref.ref(thing)

    gc.collect()
    gc.disable()
    try:
        assert step(Arena(64))() is None
    finally:
        gc.enable()
