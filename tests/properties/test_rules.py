"""One property a rule of the arena; the rule's number stands beside it.

P placement, F failure, S sizes, R checkpoints, C scopes, D the two ends, T statistics and lifetime. The oracles are brute force: sets
of byte numbers, a search for the next aligned address, plain lists.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpuarena import Arena, as_dtype
from gpuarena.errors import (
    AlignmentError,
    ArenaClosedError,
    ArenaError,
    ArgumentTypeError,
    CheckpointError,
    OutOfMemoryError,
    ShapeError,
    StaleRegionError,
)
from gpuarena.testing import (
    Driver,
    FakeDevice,
    alignments,
    negative_shapes,
    overflowing_shapes,
    programs,
    run_lockstep,
    shapes,
    wrong_alignments,
    wrong_dtypes,
    wrong_shapes,
)
from gpuarena.testing.fake import POISON
from gpuarena.testing.strategies import DTYPES

CAPACITY = 600
#: Requests as (bytes, alignment), and arenas whose base is aligned to what was asked and to no more.
requests = st.lists(st.tuples(st.integers(0, 120), alignments(512)), max_size=12)
bases = st.builds(
    lambda skew, align: Arena(CAPACITY, backend=FakeDevice(skew=skew), alignment=align),
    st.sampled_from([0, 1, 16, 48, 272]),
    alignments(64),
)


def alloc_all(arena, wanted):
    """Allocate what fits; return the regions."""
    regions = []
    for nbytes, align in wanted:
        with contextlib.suppress(OutOfMemoryError):
            regions.append(arena.alloc(nbytes, "uint8", align=align))
    return regions


def first_aligned(arena, top, align):
    return next(offset for offset in itertools.count(top) if (arena.address + offset) % align == 0)


def bytes_of(region):
    return set(range(region.offset, region.offset + region.nbytes))


def restored(arena):
    """The figures that a rollback brings back."""
    stats = arena.stats
    return stats.top, stats.used, stats.padding, stats.available, stats.n_regions, arena.by_label()


def monotone(arena):
    """The figures that only ever grow."""
    stats = arena.stats
    return stats.peak, stats.n_allocs_total, stats.n_failed, stats.bytes_requested_total


# -- placement --------------------------------------------------------------------------------------------------


@given(bases, requests, requests, st.integers(0, 12))
def test_live_regions_share_no_byte(arena, before, after, n_kept):  # P1
    regions = alloc_all(arena, before[:n_kept])
    checkpoint = arena.checkpoint()
    alloc_all(arena, before[n_kept:])
    arena.rollback(checkpoint)
    regions += alloc_all(arena, after)
    assert len(set().union(*map(bytes_of, regions))) == sum(region.nbytes for region in regions)


@given(bases, requests)
def test_live_regions_lie_inside_the_arena(arena, wanted):  # P2
    assert all(bytes_of(region) <= set(range(CAPACITY)) for region in alloc_all(arena, wanted))


@given(bases, st.integers(1, 40), alignments(512))
def test_the_address_is_aligned_and_not_only_the_offset(arena, nbytes, align):  # P3
    arena.alloc(1, "uint8", align=1)
    with contextlib.suppress(OutOfMemoryError):
        assert arena.alloc(nbytes, "uint8", align=align).address % align == 0


@pytest.mark.parametrize("backend", ["host", "torch"])
@given(align=alignments(1 << 16))
def test_the_base_is_aligned_to_what_was_asked(backend, align):  # P3
    arena = Arena(64, backend=backend, alignment=align)
    assert arena.address % align == 0
    assert arena.alloc(1, "uint8").array.shape == (1,)
    assert arena.alloc(1, "uint8", align=1).offset == 1


@given(bases, requests)
def test_a_region_starts_at_the_first_aligned_address_above_the_last(arena, wanted):  # P4
    top = 0
    for nbytes, align in wanted:
        for region in alloc_all(arena, [(nbytes, align)]):
            assert region.offset == (first_aligned(arena, top, align) if nbytes else top)
            top = region.offset + nbytes
            assert arena.stats.top == top


@given(shapes(), st.sampled_from(DTYPES))
def test_a_region_has_the_bytes_of_its_elements_and_no_more(shape, dtype):  # P5
    region = Arena(1 << 16).alloc(shape, dtype)
    assert region.nbytes == np.zeros(shape, as_dtype(dtype).numpy).nbytes
    assert region.arena.stats.used == region.nbytes


@given(bases, requests, st.integers(-1, 1), alignments(512))
def test_an_allocation_succeeds_exactly_when_it_ends_inside(arena, wanted, slack, align):  # P6
    alloc_all(arena, wanted)
    offset = first_aligned(arena, arena.stats.top, align)
    nbytes = CAPACITY - offset + slack
    if nbytes <= 0:
        return
    if slack > 0:
        with pytest.raises(OutOfMemoryError) as caught:
            arena.alloc(nbytes, "uint8", align=align)
        assert caught.value.missing == slack
    else:
        assert arena.alloc(nbytes, "uint8", align=align).offset == offset


@given(bases, wrong_alignments())
def test_what_is_no_power_of_two_is_no_alignment(arena, align):  # P7
    with pytest.raises((AlignmentError, ArgumentTypeError)) as caught:
        arena.alloc(1, "uint8", align=align)
    assert caught.type is (AlignmentError if type(align) is int else ArgumentTypeError)
    assert restored(arena) == (0, 0, 0, CAPACITY, 0, {})


def test_alignments_above_and_below_the_default_are_honoured_as_given():  # P7
    arena = Arena(4096, alignment=64)
    offsets = [arena.alloc(1, "uint8", align=align).offset for align in (1, 1, 2, None, 8)]
    assert offsets == [0, 1, 2, 64, 72]
    assert arena.alloc(1, "uint8", align=1024).address % 1024 == 0


@given(programs())
def test_the_same_calls_give_the_same_offsets_figures_and_texts(program):  # P8
    drivers = [Driver(Arena(1024, alignment=1024, name="same")) for _ in range(2)]
    run_lockstep(program, drivers)
    first, second = ([repr(driver.arena), *map(repr, driver.regions)] for driver in drivers)
    assert first == second


@given(programs())
def test_the_base_never_moves(program):  # P9
    driver = Driver(Arena(1024))
    address = driver.arena.address
    for call in program:
        driver.step(call)
        assert driver.arena.address == address
        for region in driver.regions:
            assert region.address == address + region.offset
            if region.is_live and region.nbytes:
                assert region.array.ctypes.data == region.address
    driver.arena.close()
    assert driver.arena.address == address


@given(bases, st.integers(0, 20), st.sampled_from([64, 1024, 4096]))
def test_padding_beyond_the_end_is_out_of_memory_and_nothing_turns_negative(arena, left, align):  # P10
    arena.alloc(CAPACITY - left, "uint8", align=1)
    before = arena.stats
    if first_aligned(arena, before.top, align) < CAPACITY:
        return
    with pytest.raises(OutOfMemoryError) as caught:
        arena.alloc(1, "uint8", align=align)
    assert caught.value.available == left
    assert caught.value.missing > 0
    assert arena.stats.available == left
    assert arena.stats.top == before.top


# -- failure ----------------------------------------------------------------------------------------------------

FAILING = st.one_of(
    st.tuples(
        negative_shapes() | wrong_shapes() | overflowing_shapes() | st.just((10_000,)),
        st.just("uint8"),
        st.just({}),
    ),
    st.tuples(st.just(1), wrong_dtypes(), st.just({})),
    st.tuples(
        st.just(1), st.just("float32"), st.fixed_dictionaries({"align": wrong_alignments() | st.just(2)})
    ),
    st.tuples(st.just(3), st.just("float32"), st.just({"fill": np.zeros(4)})),
    st.tuples(st.just(3), st.just("float32"), st.just({"fill": "text"})),
    st.tuples(st.just(3), st.just("float32"), st.just({"label": 5})),
)


@pytest.mark.parametrize("backend", ["host", "torch"])
@given(data=st.data())
def test_a_call_that_raises_changes_nothing(backend, data):  # F1
    arena = Arena(CAPACITY, backend=backend)
    checkpoint = arena.checkpoint()
    region = arena.alloc(5, "uint8", fill=7, label="x")
    shape, dtype, options = data.draw(FAILING)
    before, grown, open_scope = restored(arena), monotone(arena), arena.scope().__enter__()
    with pytest.raises((ArenaError, ValueError)) as caught:
        arena.alloc(shape, dtype, **options)
    assert restored(arena) == before
    n_failed = int(isinstance(caught.value, OutOfMemoryError))
    assert monotone(arena) == (grown[0], grown[1], grown[2] + n_failed, grown[3])
    assert region.as_numpy().tolist() == [7] * 5
    open_scope.__exit__(None, None, None)
    arena.rollback(checkpoint)


@given(bases, requests, alignments(512))
def test_what_fits_is_given_after_something_that_did_not(arena, wanted, align):  # F3
    alloc_all(arena, wanted)
    top = arena.stats.top
    with pytest.raises(OutOfMemoryError):
        arena.alloc(CAPACITY + 1, "uint8", align=align)
    offset = first_aligned(arena, top, align)
    if offset < CAPACITY:
        assert arena.alloc(CAPACITY - offset, "uint8", align=align).offset == offset


# -- sizes ------------------------------------------------------------------------------------------------------


@given(negative_shapes(), st.sampled_from(DTYPES))
@example((0, -1), "uint8")
@example((-1, 0), "uint8")
@example((-2, -3), "uint8")
def test_negative_dimensions_are_refused_in_every_position(shape, dtype):  # S1
    with pytest.raises(ShapeError, match="negative"):
        Arena(64).alloc(shape, dtype)


@given(st.data(), st.sampled_from(DTYPES))
def test_sizes_beyond_63_bits_are_refused(data, dtype):  # S2, S4
    with pytest.raises(ShapeError, match="2\\*\\*63"):
        Arena(64).alloc(data.draw(overflowing_shapes(as_dtype(dtype).itemsize)), dtype)


@pytest.mark.parametrize("shape", [(2**32, 2**32), (2**31, 2**33), (2**16,) * 4])
def test_sizes_that_64_bits_wrap_to_zero_are_refused(shape):  # S2
    assert np.prod(np.array(shape, np.int64)) == 0
    for dtype in ("uint8", "float32"):
        with pytest.raises(ShapeError):
            Arena(64).alloc(shape, dtype)


@given(st.lists(st.sampled_from([0, 1, 3, 2**20, 2**31, 2**40, 2**62]), max_size=3), st.sampled_from(DTYPES))
@example([2**63 - 1, 2], "uint8")
def test_an_empty_shape_is_refused_exactly_when_numpy_refuses_it(dims, dtype):  # S4
    shape = (0, *dims)
    try:
        np.empty(shape, as_dtype(dtype).numpy)
    except ValueError:
        with pytest.raises(ShapeError):
            Arena(64).alloc(shape, dtype)
    else:
        assert Arena(64).alloc(shape, dtype).array.shape == shape


@given(bases, requests, shapes().filter(lambda shape: 0 in shape), st.sampled_from(DTYPES), alignments(512))
def test_an_empty_region_takes_nothing_and_always_succeeds(arena, wanted, shape, dtype, align):  # S3
    alloc_all(arena, wanted)
    left = arena.stats.available
    if left:
        arena.alloc(left, "uint8", align=1)  # to the last byte
    before = arena.stats
    checkpoint = arena.checkpoint()
    region = arena.alloc(shape, dtype, align=max(align, as_dtype(dtype).alignment))
    assert (region.offset, region.nbytes, region.shape, region.dtype) == (before.top, 0, shape, dtype)
    assert region.array.shape == shape
    assert arena.stats.top == before.top
    assert arena.stats.n_regions == before.n_regions + 1
    arena.rollback(checkpoint)
    with pytest.raises(StaleRegionError):
        region.array


@pytest.mark.parametrize(
    "shape",
    [(2, 3), [2, 3], (np.int8(2), np.uint64(3)), np.zeros((2, 3)).shape],
    ids=["tuple", "list", "numpy", "shape"],
)
def test_a_shape_may_be_any_sequence_of_integers(shape):  # S6
    region = Arena(64).alloc(shape, "int16")
    assert region.shape == (2, 3)
    assert all(type(dim) is int for dim in region.shape)
    assert Arena(64).alloc(6, "int16").shape == Arena(64).alloc(np.int64(6), "int16").shape == (6,)


@given(wrong_shapes())
def test_what_is_no_integer_is_no_dimension(shape):  # S6
    with pytest.raises(ArgumentTypeError):
        Arena(64).alloc(shape, "uint8")


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 5)), min_size=1, max_size=8))
def test_torch_sees_every_type_at_the_default_alignment_whatever_went_before(wanted):  # S7
    arena = Arena(8192, backend="torch", alignment=16)
    for dtype, n_elements in wanted:
        array = arena.alloc(n_elements, dtype, fill=1).array
        assert array.numel() == n_elements
        assert array.numel() == 0 or array.data_ptr() % array.element_size() == 0


# -- checkpoints ------------------------------------------------------------------------------------------------


@given(bases, requests, requests)
def test_a_rollback_restores_exactly_what_was(arena, before, after):  # R1
    first = alloc_all(arena, before)
    with arena.scope("open"):
        state, checkpoint = restored(arena), arena.checkpoint()
        second = alloc_all(arena, after)
        inner = arena.scope().__enter__()
        arena.rollback(checkpoint)
        assert restored(arena) == state
        assert [region.is_live for region in first + second] == [True] * len(first) + [False] * len(second)
        with pytest.raises(CheckpointError, match="2 open"):
            arena.assert_balanced()
        with contextlib.suppress(CheckpointError):  # the rollback may have gone below it
            inner.__exit__(None, None, None)
        assert restored(arena) == state


@given(bases, requests)
def test_a_rollback_does_not_turn_back_what_only_grows(arena, wanted):  # R2
    checkpoint = arena.checkpoint()
    peak = n_allocs = n_failed = n_bytes = 0
    for nbytes, align in wanted:
        made = alloc_all(arena, [(nbytes, align)])
        n_allocs, n_failed, n_bytes = (
            n_allocs + len(made),
            n_failed + 1 - len(made),
            n_bytes + nbytes * len(made),
        )
        peak = max(peak, arena.stats.top)
        if nbytes % 2:
            arena.rollback(checkpoint)
        assert monotone(arena) == (peak, n_allocs, n_failed, n_bytes)
    arena.reset()
    assert monotone(arena) == (peak, n_allocs, n_failed, n_bytes)


@given(bases, requests, requests)
def test_a_rollback_leaves_older_regions_as_they_were(arena, before, after):  # R3
    regions = alloc_all(arena, before)
    for number, region in enumerate(regions):
        region[...] = number
    addresses = [region.address for region in regions]
    arrays = [region.array for region in regions]
    checkpoint = arena.checkpoint()
    for region in alloc_all(arena, after):
        region[...] = 255
    arena.rollback(checkpoint)
    for region in alloc_all(arena, after):
        region[...] = 254
    for number, (region, address, array) in enumerate(zip(regions, addresses, arrays, strict=True)):
        assert region.is_live
        assert region.address == address
        assert region.array is array
        assert region.array.tolist() == [number] * region.nbytes


@given(requests, st.integers(1, 4))
def test_a_stale_handle_never_comes_back_to_life(wanted, n_rounds):  # R5
    arena = Arena(CAPACITY)
    checkpoint = arena.checkpoint()
    stale = []
    for _ in range(n_rounds):
        fresh = alloc_all(arena, wanted)  # at the slots, offsets and shapes of the stale ones
        assert all(region.is_live for region in fresh)
        assert not any(region.is_live for region in stale)
        for region in stale:
            with pytest.raises(StaleRegionError):
                region.array
        arena.rollback(checkpoint)
        stale += fresh
    assert not any(region.is_live for region in stale)


@given(bases, requests, requests)
def test_the_same_calls_after_a_rollback_give_the_same_offsets(arena, before, after):  # R6
    alloc_all(arena, before)
    checkpoint = arena.checkpoint()
    offsets = [region.offset for region in alloc_all(arena, after)]
    state = restored(arena)
    arena.rollback(checkpoint)
    assert [region.offset for region in alloc_all(arena, after)] == offsets
    assert restored(arena) == state


@given(bases, requests, requests)
def test_rolling_back_twice_is_rolling_back_once(arena, before, after):  # R7
    alloc_all(arena, before)
    state, checkpoint = restored(arena), arena.checkpoint()
    for _ in range(3):
        alloc_all(arena, after)
        arena.rollback(checkpoint)
        assert restored(arena) == state
        arena.rollback(checkpoint)
        assert restored(arena) == state


@given(st.lists(st.integers(1, 20), min_size=2, max_size=6), st.data())
def test_an_outer_rollback_kills_the_inner_checkpoints_for_ever(sizes, data):  # R8
    arena = Arena(CAPACITY, alignment=1)
    checkpoints = []
    for nbytes in sizes:
        checkpoints.append(arena.checkpoint())
        arena.alloc(nbytes, "uint8")
    at = data.draw(st.integers(0, len(sizes) - 2))
    arena.rollback(checkpoints[at])
    for nbytes in sizes[at:]:  # to the very same positions
        arena.alloc(nbytes, "uint8")
    state = restored(arena)
    for dead in checkpoints[at + 1 :]:
        with pytest.raises(CheckpointError, match="out of order"):
            arena.rollback(dead)
        with pytest.raises(CheckpointError, match="out of order"):
            arena.keep(dead)
        assert restored(arena) == state
    for alive in reversed(checkpoints[: at + 1]):
        arena.rollback(alive)
        assert arena.stats.top == alive.top


@given(bases, requests, requests)
def test_a_reset_is_a_rollback_to_the_start_that_kills_every_checkpoint(arena, before, after):  # R10, R9
    checkpoints = [arena.checkpoint()]
    regions = alloc_all(arena, before)
    checkpoints.append(arena.checkpoint())
    for _ in range(2):
        arena.reset()
        assert restored(arena) == (0, 0, 0, CAPACITY, 0, {})
        assert not any(region.is_live for region in regions)
    alloc_all(arena, before)
    for checkpoint in checkpoints:
        with pytest.raises(CheckpointError, match="before reset"):
            arena.rollback(checkpoint)
    state = restored(arena)
    fresh = arena.checkpoint()
    alloc_all(arena, after)
    arena.rollback(fresh)
    assert restored(arena) == state


@given(bases, requests, requests)
def test_keeping_a_checkpoint_frees_nothing_and_leaves_the_outer_ones(arena, before, after):  # R11
    outer = arena.checkpoint()
    regions = alloc_all(arena, before)
    inner, twin = arena.checkpoint(), arena.checkpoint()
    regions += alloc_all(arena, after)
    state = restored(arena)
    arena.keep(inner)
    assert restored(arena) == state
    assert all(region.is_live for region in regions)
    for call in (arena.rollback, arena.keep):
        with pytest.raises(CheckpointError, match=r"given up by keep\(\)"):
            call(inner)
    assert restored(arena) == state
    arena.rollback(twin)  # of the same position, but not given up
    arena.rollback(outer)
    assert restored(arena) == (0, 0, 0, CAPACITY, 0, {})


@given(bases, requests, st.integers(1, 20))
def test_a_checkpoint_costs_nothing(arena, wanted, n_checkpoints):  # R12
    alloc_all(arena, wanted)
    state, grown = restored(arena), monotone(arena)
    checkpoints = [arena.checkpoint() for _ in range(n_checkpoints)]
    assert (restored(arena), monotone(arena)) == (state, grown)
    for checkpoint in checkpoints:
        arena.rollback(checkpoint)
        assert (restored(arena), monotone(arena)) == (state, grown)


@pytest.mark.parametrize("as_torch", [False, True], ids=["host", "torch"])
@given(before=requests, after=requests)
def test_a_rollback_touches_no_byte(as_torch, before, after):  # R13: below the checkpoint, nor above it
    memory = np.random.default_rng(0).integers(0, 256, CAPACITY, np.uint8)
    buffer = memory
    if as_torch:
        torch = pytest.importorskip("torch")
        buffer = torch.from_numpy(memory)
    arena = Arena.from_buffer(buffer, alignment=1)
    expected = memory.copy()
    for region in alloc_all(arena, before):
        region[...] = 1
        expected[region.offset : region.offset + region.nbytes] = 1
    checkpoint = arena.checkpoint()
    for region in alloc_all(arena, after):
        region[...] = 2
        expected[region.offset : region.offset + region.nbytes] = 2
    arena.rollback(checkpoint)
    assert memory.tobytes() == expected.tobytes()
    arena.reset()
    arena.close()
    assert memory.tobytes() == expected.tobytes()


# -- scopes -----------------------------------------------------------------------------------------------------


def leave_by(how, arena):
    """Open a scope, allocate in it, and leave it in one of the ways Python has."""
    if how == "end":
        with arena.scope():
            arena.alloc(5, "uint8")
    elif how == "return":
        with arena.scope():
            arena.alloc(5, "uint8")
            return
    elif how in ("break", "continue"):
        for _ in range(2):
            with arena.scope():
                arena.alloc(5, "uint8")
                if how == "break":
                    break
                continue
    elif how in ("generator closed", "generator dropped"):

        def steps():
            with arena.scope():
                arena.alloc(5, "uint8")
                yield

        generator = steps()
        next(generator)
        assert arena.stats.n_regions > 0
        if how == "generator closed":
            generator.close()
        else:
            del generator


@pytest.mark.parametrize(
    "how", ["end", "return", "break", "continue", "generator closed", "generator dropped"]
)
def test_every_way_out_of_a_scope_restores_the_state_on_entry(how):  # C1
    arena = Arena(CAPACITY)
    arena.alloc(3, "uint8")
    state = restored(arena)
    leave_by(how, arena)
    assert restored(arena) == state
    arena.assert_balanced()


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("mine"), KeyboardInterrupt(), GeneratorExit(), StaleRegionError("inner")]
)
@pytest.mark.parametrize("trouble", ["none", "rolled back below", "reset", "closed", "inner scope open"])
def test_an_exception_passes_a_scope_unchanged(error, trouble):  # C1
    arena = Arena(CAPACITY)
    start = arena.checkpoint()
    arena.alloc(3, "uint8")
    state = restored(arena)
    with pytest.raises(type(error)) as caught, arena.scope():  # noqa: PT012 - what happens inside is what is tested
        arena.alloc(5, "uint8")
        if trouble == "rolled back below":
            arena.rollback(start)
        elif trouble == "reset":
            arena.reset()
        elif trouble == "closed":
            arena.close()
        elif trouble == "inner scope open":
            arena.scope().__enter__()
        raise error
    assert caught.value is error
    assert caught.value.__cause__ is None
    assert restored(arena) == (
        state if trouble in ("none", "inner scope open") else (0, 0, 0, CAPACITY, 0, {})
    )


@given(bases, st.lists(requests, min_size=1, max_size=6))
def test_leaving_a_depth_restores_its_entry(arena, levels):  # C2
    states, scopes = [], []
    for wanted in levels:
        states.append(restored(arena))
        scopes.append(arena.scope().__enter__())
        alloc_all(arena, wanted)
    while scopes:
        scopes.pop().__exit__(None, None, None)
        assert restored(arena) == states.pop()
    arena.assert_balanced()


@given(st.lists(st.integers(1, 20), min_size=2, max_size=5), st.data())
def test_scopes_closed_out_of_order_raise_and_end_at_the_outermost_that_was_closed(sizes, data):  # C3
    arena = Arena(CAPACITY, alignment=1)
    opened = []
    for nbytes in sizes:
        opened.append((arena.scope(), arena.stats.top))
        opened[-1][0].__enter__()
        arena.alloc(nbytes, "uint8")
    order = data.draw(st.permutations(range(len(sizes))))
    lowest = len(sizes)
    for number in order:
        scope, top = opened[number]
        in_order = number == lowest - 1
        if in_order:
            scope.__exit__(None, None, None)
        else:
            with pytest.raises(CheckpointError, match="out of order"):
                scope.__exit__(None, None, None)
        if number < lowest:
            lowest = number
            assert arena.stats.top == top
        else:
            assert arena.stats.top == opened[lowest][1]  # memory is never brought back to life
    arena.assert_balanced()
    assert arena.stats.top == 0


def test_two_exit_stacks_may_be_unwound_in_any_order():  # C3
    arena = Arena(CAPACITY, alignment=1)
    first, second = contextlib.ExitStack(), contextlib.ExitStack()
    first.enter_context(arena.scope("first"))
    kept = arena.alloc(3, "uint8")
    second.enter_context(arena.scope("second"))
    arena.alloc(4, "uint8")
    with pytest.raises(CheckpointError, match=r"'first'.*out of order"):
        first.close()
    assert not kept.is_live
    arena.alloc(9, "uint8")
    with pytest.raises(CheckpointError, match="'second'"):
        second.close()
    assert arena.stats.top == 9


def test_a_scope_is_entered_once():  # C4
    arena = Arena(CAPACITY)
    scope = arena.scope()
    with scope, pytest.raises(CheckpointError, match="entered before"):
        scope.__enter__()
    with pytest.raises(CheckpointError, match="entered before"):
        scope.__enter__()
    assert restored(arena) == (0, 0, 0, CAPACITY, 0, {})


def test_a_region_that_leaves_its_scope_is_stale():  # C5
    arena = Arena(CAPACITY)

    def leak():
        with arena.scope("step"):
            return arena.alloc(4, "uint8", label="result")

    with pytest.raises(StaleRegionError, match=rf"'result'.*'step'.*{__file__}:\d+"):
        leak().array


# -- two ends ---------------------------------------------------------------------------------------------------

sides = st.sampled_from(["low", "high"])


@given(bases, st.lists(st.tuples(sides, st.integers(0, 90), alignments(64)), max_size=12), sides)
def test_the_ends_share_no_byte_and_a_rollback_of_one_leaves_the_other(arena, wanted, rolled_back):  # D1
    checkpoint = arena.checkpoint(rolled_back)
    regions = {"low": [], "high": []}
    for side, nbytes, align in wanted:
        with contextlib.suppress(OutOfMemoryError):
            regions[side].append(arena.alloc(nbytes, "uint8", align=align, side=side))
            regions[side][-1][...] = len(regions[side])
        assert arena.stats.top <= arena.stats.high
    everything = regions["low"] + regions["high"]
    assert len(set().union(*map(bytes_of, everything))) == sum(region.nbytes for region in everything)
    other = "high" if rolled_back == "low" else "low"
    before = arena.stats
    arena.rollback(checkpoint)
    after = arena.stats
    assert (after.top, after.high) == ((0, before.high) if rolled_back == "low" else (before.top, CAPACITY))
    assert not any(region.is_live for region in regions[rolled_back])
    for number, region in enumerate(regions[other], start=1):
        assert region.array.tolist() == [number] * region.nbytes


@given(st.lists(sides, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_scopes_of_the_two_ends_are_closed_in_any_order_that_each_end_keeps(opened, random):  # D1, C2, C6
    arena = Arena(CAPACITY, alignment=1)
    scopes = {"low": [], "high": []}
    for side in opened:
        scopes[side].append((arena.scope(side=side).__enter__(), arena.stats))
        arena.alloc(7, "uint8", side=side)
    order = list(opened)
    random.shuffle(order)
    for n_left, side in zip(range(len(order) - 1, -1, -1), order, strict=True):
        scope, before = scopes[side].pop()
        scope.__exit__(None, None, None)
        pointer = "top" if side == "low" else "high"
        assert getattr(arena.stats, pointer) == getattr(before, pointer)
        if n_left:
            with pytest.raises(CheckpointError, match=f"^{n_left} open"):
                arena.assert_balanced()
    arena.assert_balanced()
    assert restored(arena) == (0, 0, 0, CAPACITY, 0, {})


# -- statistics and lifetime ------------------------------------------------------------------------------------


@given(programs())
def test_the_figures_add_up_at_all_times(program):  # T1
    driver = Driver(Arena(1024))
    roots = []
    peak = 0
    for call in program:
        n_made = driver.arena.stats.n_allocs_total
        driver.step(call)
        if driver.arena.stats.n_allocs_total > n_made:
            roots.append(driver.regions[-1])
        stats = driver.arena.stats
        peak = max(peak, stats.top)
        live = [region for region in roots if region.is_live]
        assert stats.used == sum(region.nbytes for region in live) == sum(driver.arena.by_label().values())
        assert stats.used + stats.padding == stats.top
        assert stats.available == stats.capacity - stats.top
        assert (stats.n_regions, stats.peak) == (len(live), peak)
        assert 0 <= stats.used <= stats.top <= stats.peak <= stats.capacity


@given(bases, requests)
def test_taking_a_snapshot_changes_nothing(arena, wanted):  # T3
    alloc_all(arena, wanted)
    first = arena.stats
    assert arena.stats == first
    assert repr(arena) == repr(arena)


def test_the_buffer_is_given_back_once_however_often_the_arena_is_closed():  # T5
    device = FakeDevice()
    arena = Arena(CAPACITY, backend=device)
    region = arena.alloc(4, "uint8", fill=1)
    assert (device.n_allocated, device.n_released, device.n_freed) == (1, 0, 0)
    for _ in range(3):
        arena.close()
        assert (device.n_released, device.n_freed) == (1, 1)
    with pytest.raises(ArenaClosedError):
        arena.alloc(1, "uint8")
    with pytest.raises(StaleRegionError):
        region.array


HOLDERS = {
    "region": lambda region: region,
    "slice": lambda region: region[1:],
    "array": lambda region: region.array,
    "array of a slice": lambda region: region[1:].array,
    "torch": lambda region: region.as_torch(),
    "torch of a slice": lambda region: region[1:].as_torch(),
    "numpy": np.asarray,
    "dlpack": np.from_dlpack,
    "capsule": lambda region: region.__dlpack__(),
    "empty()": lambda region: region.arena.empty(4, "uint8"),
}


@pytest.mark.parametrize("closed", [False, True], ids=["dropped", "closed"])
@pytest.mark.parametrize("holder", HOLDERS)
def test_whatever_shows_the_memory_keeps_it(holder, closed):  # T6
    device = FakeDevice()
    arena = Arena(CAPACITY, backend=device)
    region = arena.alloc(4, "uint8", fill=7)[...]  # fill= makes the array of the root
    held = HOLDERS[holder](region)
    address = region.address
    if closed:
        arena.close()
    del arena, region
    shows_nothing = closed and holder in ("region", "slice")  # they are stale, and never made an array
    assert device.n_freed == (1 if shows_nothing else 0)
    if not shows_nothing:
        assert ctypes.string_at(address, 4) == b"\x07" * 4
    del held
    assert (device.n_allocated, device.n_freed) == (1, 1)


def test_the_fake_device_poisons_what_is_freed():
    device = FakeDevice()
    arena = Arena(16, backend=device, alignment=16)
    arena.alloc(16, "uint8", fill=7)
    del arena
    assert device.n_freed == 1
    assert set(device._graveyard[0]) == {POISON}
