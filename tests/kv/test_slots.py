from __future__ import annotations

import ast
import dataclasses
import doctest
import pickle
import random
from pathlib import Path

import pytest

from gpuarena.errors import ArgumentError, ArgumentTypeError, CapacityError, OutOfMemoryError
from gpuarena.kv.contiguous import _buddy, _diagnosis, _free_list, _slots
from gpuarena.kv.contiguous._buddy import Buddy
from gpuarena.kv.contiguous._diagnosis import compaction_for_longest, diagnose
from gpuarena.kv.contiguous._free_list import FreeList
from gpuarena.kv.contiguous._slots import Occupancy, Slots

MODULES = [_slots, _free_list, _buddy, _diagnosis]
both = pytest.mark.parametrize("kind", [FreeList, Buddy])


def checkered(kind, n_pieces, length):
    """Slots that are full of pieces, every second of which is then freed."""
    slots = kind(n_pieces * length)
    starts = [slots.allocate(length) for _ in range(n_pieces)]
    for start in starts[1::2]:
        slots.free(start)
    return slots


@pytest.mark.parametrize("module", MODULES)
def test_the_examples_run(module):
    results = doctest.testmod(module)
    assert results.attempted
    assert not results.failed


@pytest.mark.parametrize("module", MODULES)
def test_the_arithmetic_needs_no_array_library(module):
    names = set()
    for node in ast.walk(ast.parse(Path(module.__file__).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            names.add(node.module.split(".")[0])
        elif isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
    assert not names & {"numpy", "torch", "cupy"}


# -- placement ----------------------------------------------------------------------------------------------------


def with_holes(fit):
    """Holes of 6, 4 and 4 slots at 0, 8 and 14."""
    slots = FreeList(18, fit=fit)
    starts = [slots.allocate(n) for n in (6, 2, 4, 2, 4)]
    for start in starts[::2]:
        slots.free(start)
    assert slots.holes() == [(0, 6), (8, 4), (14, 4)]
    return slots


def test_first_fit_takes_the_lowest_hole_and_best_fit_the_shortest():
    assert with_holes("first").allocate(3) == 0
    assert with_holes("best").allocate(3) == 8  # the lower of two that are equally short


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 2, 0), (1, 0, 2), (2, 0, 1)])
def test_holes_merge_in_whatever_order_they_arise(order):
    slots = FreeList(9)
    starts = [slots.allocate(3) for _ in range(3)]
    for index in order:
        slots.free(starts[index])
    assert slots.holes() == [(0, 9)]


def test_a_buddy_block_is_the_next_power_of_two():
    assert [Buddy(8).length_for(n) for n in (1, 2, 3, 4, 5, 8, 9)] == [1, 2, 4, 4, 8, 8, 16]


def test_a_buddy_takes_the_shortest_block_before_the_lowest():
    slots = Buddy(16)
    small = [slots.allocate(2) for _ in range(4)]
    slots.free(small[3])
    assert slots.holes() == [(6, 2), (8, 8)]
    assert slots.allocate(1) == 6
    slots.free(small[0])
    assert slots.allocate(1) == 7
    assert slots.allocate(1) == 0


def test_blocks_that_touch_merge_only_into_one_that_could_have_been_split():
    slots = Buddy(16)
    starts = [slots.allocate(4) for _ in range(4)]
    slots.free(starts[1])
    slots.free(starts[2])
    assert slots.holes() == [(4, 4), (8, 4)]
    with pytest.raises(CapacityError) as caught:
        slots.allocate(8)
    assert (caught.value.cause, caught.value.free, caught.value.largest_hole) == ("fragmentation", 8, 4)


@pytest.mark.parametrize(
    ("capacity", "blocks"),
    [
        (1, [(0, 1)]),
        (64, [(0, 64)]),
        (98_304, [(0, 65_536), (65_536, 32_768)]),
        (13, [(0, 8), (8, 4), (12, 1)]),
    ],
)
def test_a_capacity_that_is_no_power_of_two_is_a_row_of_blocks(capacity, blocks):
    slots = Buddy(capacity)
    assert slots.holes() == blocks
    starts = [slots.allocate(1) for _ in range(min(capacity, 64))]
    for start in starts:
        slots.free(start)
    assert slots.holes() == blocks


def test_a_capacity_beyond_64_bits_is_no_matter():
    for slots in (FreeList(2**80 + 1), Buddy(2**80 + 1)):
        assert slots.allocate(2**79 + 1) == 0
        assert slots.reserved_slots in (2**79 + 1, 2**80)


@both
def test_twenty_thousand_requests(kind):
    draw, slots, live = random.Random(5), kind(65_536), []
    n_refused = 0
    for _ in range(20_000):
        try:
            live.append(slots.allocate(draw.randint(1, 4000)))
        except CapacityError:
            n_refused += 1
            assert slots.largest_hole < 4000
            for _ in range(3):
                slots.free(live.pop(draw.randrange(len(live))))
    assert n_refused > 1000
    for start in live:
        slots.free(start)
    assert slots.holes() == [(0, 65_536)]


# -- resize and move ----------------------------------------------------------------------------------------------


def test_an_allocation_grows_into_the_hole_behind_it_and_shrinks():
    slots = FreeList(12)
    first, second = slots.allocate(4), slots.allocate(4)
    slots.free(first)
    slots.resize(second, 8)
    assert (slots.allocations(), slots.holes()) == ([(4, 8)], [(0, 4)])
    slots.resize(second, 1)
    assert slots.holes() == [(0, 4), (5, 7)]
    assert slots.used(second) == slots.occupancy().used == 1


def test_growth_without_room_behind_says_how_much_there_is():
    slots = FreeList(20)
    starts = [slots.allocate(4) for _ in range(4)]
    slots.free(starts[1])
    with pytest.raises(
        CapacityError, match=r"from 4 to 10 slots, since 4 of the 6 behind it are free"
    ) as caught:
        slots.resize(starts[0], 10)
    figures = caught.value
    assert (figures.requested, figures.available, figures.missing, figures.free) == (6, 4, 2, 8)
    assert figures.cause == "fragmentation"
    with pytest.raises(CapacityError, match="1 too few") as caught:
        slots.resize(starts[0], 13)
    assert caught.value.cause == "memory"
    assert slots.allocations() == [(0, 4), (8, 4), (12, 4)]


def test_a_buddy_block_grows_over_its_upper_halves_and_shrinks():
    slots = Buddy(32)
    first, second = slots.allocate(3), slots.allocate(4)
    slots.use(first, 2)
    slots.free(second)
    slots.resize(first, 13)
    assert (slots.allocations(), slots.holes()) == ([(0, 16)], [(16, 16)])
    slots.resize(first, 2)
    assert slots.holes() == [(2, 2), (4, 4), (8, 8), (16, 16)]
    assert (slots.used(first), slots.reserved_slots) == (2, 2)
    with pytest.raises(ArgumentError, match="holds 2 tokens, which do not fit in 1 slots"):
        slots.resize(first, 1)


def test_a_buddy_block_that_is_no_lower_half_cannot_grow():
    slots = Buddy(16)
    first, second = slots.allocate(4), slots.allocate(4)
    slots.free(first)
    with pytest.raises(
        CapacityError, match="from 4 to 8 slots, since 0 of the 4 behind it are free"
    ) as caught:
        slots.resize(second, 5)
    assert (caught.value.requested, caught.value.available, caught.value.missing) == (4, 0, 4)
    slots.move(second, 0)
    slots.resize(0, 5)
    with pytest.raises(CapacityError):
        slots.resize(0, 17)
    assert slots.allocations() == [(0, 8)]


@pytest.mark.parametrize("seed", range(6))
@both
def test_resizing_against_a_list_of_owners(kind, seed):
    draw, capacity = random.Random(seed), 28
    slots, asked, n_tried, n_done = kind(capacity), {}, 0, 0

    def rounded(n):
        return n if kind is FreeList else next(2**order for order in range(9) if 2**order >= n)

    for _ in range(400):
        if asked and draw.random() < 0.3:
            start = draw.choice(sorted(asked))
            slots.free(start)
            del asked[start]
        elif draw.random() < 0.4:
            try:
                n = draw.randint(1, 6)
                asked[slots.allocate(n)] = n
            except CapacityError:
                pass
        elif asked:
            start = draw.choice(sorted(asked))
            owner = [None] * capacity
            for first, n in asked.items():
                owner[first : first + rounded(n)] = [first] * rounded(n)
            possible = [
                n
                for n in range(1, capacity + 1)
                if set(owner[start : start + rounded(n)]) <= {None, start}
                and start + rounded(n) <= capacity
                and (kind is FreeList or start % rounded(n) == 0)
            ]
            assert slots.max_length(start) == rounded(max(possible))
            n = draw.randint(1, 14)
            n_tried += 1
            if n in possible:
                slots.resize(start, n)
                asked[start] = n
                n_done += 1
            else:
                with pytest.raises(CapacityError) as caught:
                    slots.resize(start, n)
                assert caught.value.available == rounded(max(possible)) - rounded(asked[start])
        assert slots.allocations() == sorted((first, rounded(n)) for first, n in asked.items())
        assert slots.occupancy().used == sum(asked.values())
        assert (
            slots.free_slots == sum(length for _, length in slots.holes()) == capacity - slots.reserved_slots
        )
    assert 20 < n_done < n_tried
    for start in asked:
        slots.free(start)
    assert slots.holes() == kind(capacity).holes()


def test_tokens_held_are_not_cut_off():
    slots = FreeList(8)
    start = slots.allocate(6)
    slots.use(start, 5)
    with pytest.raises(ArgumentError, match="holds 5 tokens, which do not fit in 4 slots"):
        slots.resize(start, 4)
    slots.resize(start, 5)
    assert slots.occupancy() == Occupancy(8, reserved=5, used=5, free=3, largest_hole=3, n_holes=1)


def test_an_allocation_slides_over_itself():
    slots = FreeList(10)
    first, second = slots.allocate(2), slots.allocate(6)
    slots.use(second, 3)
    slots.free(first)
    slots.move(second, 1)
    assert (slots.holes(), slots.allocations(), slots.used(1)) == ([(0, 1), (7, 3)], [(1, 6)], 3)
    with pytest.raises(ArgumentError, match="cannot move to slot 5"):
        slots.move(1, 5)
    assert slots.holes() == [(0, 1), (7, 3)]


def test_a_buddy_block_moves_to_multiples_of_its_length_only():
    slots = Buddy(16)
    start = slots.allocate(3)
    with pytest.raises(ArgumentError, match="no block of a buddy allocator"):
        slots.move(start, 6)
    slots.move(start, 12)
    assert (slots.holes(), slots.allocations()) == ([(0, 8), (8, 4)], [(12, 4)])


# -- figures ------------------------------------------------------------------------------------------------------


def test_what_a_block_is_longer_than_its_request_is_unused():
    slots = Buddy(16)
    slots.allocate(5)
    assert slots.occupancy() == Occupancy(16, reserved=8, used=5, free=8, largest_hole=8, n_holes=1)
    assert slots.occupancy().internal_fragmentation == 3 / 8


def test_the_shares_of_nothing_are_zero():
    slots = FreeList(4)
    assert slots.occupancy().internal_fragmentation == 0
    slots.allocate(4)
    assert slots.occupancy().external_fragmentation == 0


def test_tokens_are_counted_as_they_come():
    slots = FreeList(100)
    start = slots.allocate(40)
    for n_tokens in (0, 10, 40, 7):
        slots.use(start, n_tokens)
        assert slots.occupancy().unused == 40 - n_tokens
    with pytest.raises(ArgumentError, match="40 slots, which cannot hold 41 tokens"):
        slots.use(start, 41)
    with pytest.raises(ArgumentError, match="n_tokens must be at least 0"):
        slots.use(start, -1)
    assert slots.used(start) == 7


# -- refusals -----------------------------------------------------------------------------------------------------


@both
def test_no_memory_and_no_hole_are_told_apart(kind):
    slots = checkered(kind, 4, 16)
    with pytest.raises(CapacityError, match=r"32 of 64 are free, in 2 pieces of at most 16") as caught:
        slots.allocate(32)
    figures = vars(caught.value)
    assert figures == {
        "used": 32,
        "requested": 32,
        "capacity": 64,
        "free": 32,
        "largest_hole": 16,
        "cause": "fragmentation",
        "available": 16,
        "missing": 16,
        "aligned_offset": 16,
        "label": None,
    }
    with pytest.raises(CapacityError, match=r"32 of 64 are free, 1 too few") as caught:
        slots.allocate(33)
    assert caught.value.cause == "memory"
    assert isinstance(caught.value, OutOfMemoryError)
    assert pickle.loads(pickle.dumps(caught.value)).cause == "memory"


def test_what_an_empty_allocator_cannot_take_is_said_so():
    with pytest.raises(
        CapacityError, match=r"an empty one of 96 slots takes a request of at most 64"
    ) as caught:
        Buddy(96).allocate(65)
    assert caught.value.cause == "fragmentation"  # 96 are free, which are enough
    with pytest.raises(
        CapacityError, match=r"an empty one of 96 slots takes a request of at most 96"
    ) as caught:
        FreeList(96).allocate(97)
    assert caught.value.cause == "memory"


def test_a_full_one_has_no_place_to_name():
    slots = FreeList(4)
    slots.allocate(4)
    with pytest.raises(CapacityError) as caught:
        slots.allocate(1)
    assert (caught.value.aligned_offset, caught.value.largest_hole) == (4, 0)


@both
def test_each_misuse_of_a_start_has_a_message_of_its_own(kind):
    slots = kind(16)
    first, second = slots.allocate(4), slots.allocate(4)
    slots.free(first)
    before = (slots.holes(), slots.allocations())
    for start, message in [
        (first, "freed or moved already"),
        (second + 1, f"inside of the one at slot {second}"),
        (9, "none ever did"),
        (16, "there are 16 slots"),
        (-1, "at least 0"),
    ]:
        for call in (slots.free, slots.reserved, slots.used):
            with pytest.raises(ArgumentError, match=message):
                call(start)
    assert (slots.holes(), slots.allocations()) == before


@both
@pytest.mark.parametrize("value", [0, -3, 1.0, "4", None, True])
def test_what_is_no_count_is_refused(kind, value):
    slots = kind(16)
    error = ArgumentError if type(value) is int else ArgumentTypeError
    for call in (
        kind,
        slots.allocate,
        lambda n: diagnose(slots, n),
        lambda n: diagnose(slots, 1, page_size=n),
    ):
        with pytest.raises(error):
            call(value)
    assert slots.free_slots == 16


def test_other_fits_are_refused():
    with pytest.raises(ArgumentError, match="'first' or 'best', not 'worst'"):
        FreeList(4, fit="worst")
    with pytest.raises(ArgumentTypeError, match="FreeList or a Buddy, not list"):
        diagnose([], 1)
    with pytest.raises(TypeError, match="abstract"):
        Slots(4)


# -- diagnosis ----------------------------------------------------------------------------------------------------


def test_forty_percent_are_free_and_long_requests_are_refused():
    slots = FreeList(10_000)
    starts = [slots.allocate(1000) for _ in range(10)]
    for start in starts[1:9:2]:
        slots.free(start)
    slots.use(starts[2], 300)
    found = diagnose(slots, 1500)
    assert (found.fits, found.cause, found.occupancy.free, found.largest_request) == (
        False,
        "fragmentation",
        4000,
        1000,
    )
    assert found.wait_for == (starts[0],)
    assert found.any_of == tuple(starts[0:9:2])
    assert [(move.start, move.to, move.n_tokens) for move in found.least_copy.moves] == [(2000, 1000, 300)]
    assert found.least_copy.holes == ((1000, 1000), (3000, 1000))
    assert found.free_without_waste == 4700
    assert found.fits_in_pages
    assert found.text == (
        "A request of 1500 tokens does not fit although 4000 of 10000 slots (40 %) are free, in 4 holes of at most "
        "1000. Of the 6000 reserved slots, 700 hold no token; without them 4700 would be free. The holes at 1000 and "
        "3000 would be one that is long enough without the allocation at 2000. The request fits after a compaction "
        "that moves 1 allocation and copies 300 tokens, or once any one of the allocations at 0, 2000, 4000, 6000 "
        "and 8000 ends. A request of at most 1000 tokens fits now. In pages of 16 tokens it would fit: the tokens "
        "held and the request take 428 of 625 pages."
    )
    slots.allocate(1000)  # a short one is served
    assert "1 hole " not in diagnose(slots, 1500).text


def test_fewer_moves_may_copy_more():
    slots = FreeList(60)
    starts = [slots.allocate(n) for n in (10, 1, 1, 10, 1, 10, 15, 12)]
    for index in (0, 3, 5, 7):
        slots.free(starts[index])
    found = diagnose(slots, 21)
    assert [move.start for move in found.least_copy.moves] == [10, 11, 22]
    assert found.least_copy.n_tokens == 3
    assert [move.start for move in found.fewest_moves.moves] == [33]
    assert (
        "moves 3 allocations and copies 3 tokens, or after one that moves 1 allocation and copies 15"
        in found.text
    )


def test_all_that_is_free_can_be_had_by_compaction():
    slots = checkered(FreeList, 6, 1)
    slots.use(2, 0)
    found = diagnose(slots, 3)
    assert [(move.start, move.to) for move in found.least_copy.moves] == [(2, 1), (4, 2)]
    assert diagnose(slots, 2).least_copy.holes == ((1, 1), (3, 1))
    slots.free(2)
    assert slots.occupancy().used == 2


def test_a_lack_of_memory_is_no_matter_for_compaction():
    slots = checkered(FreeList, 4, 4)
    found = diagnose(slots, 10)
    assert (found.cause, found.least_copy, found.fewest_moves) == ("memory", None, None)
    assert found.wait_for == (4 * 2,)
    assert found.text.startswith(
        "A request of 10 tokens does not fit for lack of memory: 8 of 16 slots (50 %) are free, 2 too few, in 2 holes."
        " The request fits once the allocation at 8 ends. A request of at most 4 tokens fits now."
    )
    found = diagnose(slots, 16)
    assert (found.wait_for, found.any_of) == ((0, 8), ())
    assert "once the 2 allocations at 0 and 8 have ended" in found.text


def test_what_never_fits_needs_no_waiting():
    found = diagnose(Buddy(96), 65)
    assert (found.cause, found.wait_for, found.least_copy, found.length) == ("fragmentation", (), None, 128)
    assert found.text.startswith(
        "A request of 65 tokens, which takes a block of 128, can never fit: an empty allocator of 96 slots takes at "
        "most 64. A request of at most 64 tokens fits now."
    )


def test_what_fits_is_said_so():
    found = diagnose(FreeList(20), 20)
    assert found.fits
    assert found.text == "A request of 20 tokens fits: the longest hole has 20 slots."


def test_full_slots_have_no_request_that_fits():
    slots = FreeList(2)
    slots.allocate(2)
    text = diagnose(slots, 1, page_size=1).text
    assert "fits now" not in text
    assert (
        "In pages of 1 token it would not fit either: the tokens held and the request take 3 of 2 pages."
        in text
    )


@both
def test_a_refusal_can_be_had_without_asking(kind):
    slots = checkered(kind, 4, 16)
    with pytest.raises(CapacityError) as caught:
        slots.allocate(17)
    assert vars(slots.refusal(17)) == vars(caught.value)
    assert str(slots.refusal(17)) == str(caught.value)
    assert ("for a request of 17" in str(caught.value)) == (kind is Buddy)


@both
def test_the_longest_request_that_moves_make_room_for(kind):
    slots = checkered(kind, 8, 4)
    plan = compaction_for_longest(slots)
    assert (plan.n_tokens, len(plan.moves)) == ((12, 3) if kind is FreeList else (8, 2))
    for move in plan.moves:
        slots.move(move.start, move.to)
    assert slots.largest_hole == 16 == slots.free_slots
    assert compaction_for_longest(slots) is None
    assert compaction_for_longest(kind(7)) is None


def test_a_buddy_that_cannot_have_the_longest_block_gets_half_of_it():
    slots = Buddy(8)
    starts = [slots.allocate(n) for n in (2, 1, 1, 1, 1, 1, 1)]
    for start in (starts[1], starts[3], starts[5]):
        slots.free(start)
    assert diagnose(slots, 3).least_copy is None
    plan = compaction_for_longest(slots)
    assert plan == diagnose(slots, 2).least_copy
    assert len(plan.moves) == 1


def test_a_diagnosis_is_printed_as_its_text():
    found = diagnose(FreeList(4), 2)
    assert str(found) == found.text


def test_a_buddy_block_is_emptied_into_the_others():
    slots = Buddy(32)
    starts = [slots.allocate(4) for _ in range(8)]
    for index in (0, 2, 5):
        slots.free(starts[index])
    slots.use(4, 3)
    found = diagnose(slots, 8)
    assert [(move.start, move.to, move.n_tokens) for move in found.least_copy.moves] == [(4, 8, 3)]
    assert found.least_copy.holes == ((0, 4),)
    assert "The hole at 0 would be one that is long enough without the allocation at 4." in found.text


def test_where_no_block_can_be_emptied_no_compaction_is_advised():
    slots = Buddy(8)
    starts = [slots.allocate(n) for n in (2, 1, 1, 1, 1, 1, 1)]
    for start in (starts[1], starts[3], starts[5]):
        slots.free(start)
    assert slots.holes() == [(2, 1), (4, 1), (6, 1)]
    found = diagnose(slots, 3)  # 3 are free, but a block takes 4, and neither half holds what the other has
    assert (found.cause, found.least_copy, found.fewest_moves) == ("fragmentation", None, None)
    assert (found.wait_for, "compaction" in found.text) == ((5, 7), False)


def test_a_block_without_a_hole_may_be_the_cheapest_to_empty():
    slots = Buddy(8)
    starts = [slots.allocate(n) for n in (1, 1, 2, 1, 1, 1, 1)]
    for start in (starts[1], starts[3]):
        slots.free(start)
    slots.use(starts[5], 0)
    slots.use(starts[6], 0)
    found = diagnose(slots, 2)
    assert [(move.start, move.to, move.n_tokens) for move in found.least_copy.moves] == [(6, 1, 0), (7, 4, 0)]
    assert found.least_copy.holes == ()
    assert len(found.fewest_moves.moves) == 1
    assert "would be one that is long enough" not in found.text


def test_long_lists_are_cut_short():
    found = diagnose(checkered(FreeList, 40, 2), 3)
    assert len(found.any_of) == 20
    assert "at 0, 4, 8, 12, 16, 20, 24, 28 and 12 more ends" in found.text


def test_a_diagnosis_is_a_value():
    found = diagnose(checkered(Buddy, 8, 2), 4)
    assert found == pickle.loads(pickle.dumps(found))
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.requested = 1
