"""Contiguous slots against a list that names the owner of each slot, searched afresh for every question."""

from __future__ import annotations

import copy
import itertools

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from gpuarena.errors import ArgumentError, CapacityError
from gpuarena.kv.contiguous._buddy import Buddy
from gpuarena.kv.contiguous._diagnosis import diagnose
from gpuarena.kv.contiguous._free_list import FreeList

#: Subsets of so many allocations are tried one by one.
MOST_TRIED = 7

#: What is asked for at the beginning, and the tokens that it then holds; None for one that is freed again.
pieces = st.lists(st.tuples(st.integers(1, 4), st.none() | st.integers(0, 4)), max_size=12)


def runs(free):
    """``(start, length)`` of the longest runs of true values."""
    found = []
    for is_free, group in itertools.groupby(enumerate(free), key=lambda pair: pair[1]):
        if is_free:
            slots = [slot for slot, _ in group]
            found.append((slots[0], len(slots)))
    return found


def aligned_blocks(free):
    """``(start, length)`` of the aligned runs of a power of two that no longer such run contains."""
    found, covered = [], set()
    for length in (2**order for order in reversed(range(len(free).bit_length()))):
        for start in range(0, len(free) - length + 1, length):
            if all(free[start : start + length]) and start not in covered:
                found.append((start, length))
                covered.update(range(start, start + length))
    return sorted(found)


class SlotsMachine(RuleBasedStateMachine):
    """What both allocators have in common."""

    def begin(self, slots, pieces):
        self.slots = slots
        self.capacity = slots.capacity
        self.owner = [None] * slots.capacity  # the first slot of the allocation that has it
        self.asked = {}
        self.told = {}  # tokens held, where it was said
        for n, _ in pieces:  # so that there are holes to begin with
            self.request(n)
        for start, (_, n_tokens) in zip(sorted(self.asked), pieces, strict=False):
            if n_tokens is None:
                self.forget(start)
            else:
                self.hold(start, min(n_tokens, self.length(start)))

    # -- the model ------------------------------------------------------------------------------------------------

    def length(self, start):
        return self.owner.count(start)

    def held(self, start):
        return self.told.get(start, self.asked[start])

    def free_now(self, but=()):
        """Which slots are free, and those of `but` as well."""
        return [owner is None or owner in but for owner in self.owner]

    def holes(self, free):
        raise NotImplementedError

    def rounded(self, n):
        raise NotImplementedError

    def choose(self, holes, length):
        """The start that a request of `length` slots gets, or None."""
        raise NotImplementedError

    def fits(self, n, but=()):
        return self.choose(self.holes(self.free_now(but)), self.rounded(n)) is not None

    def paint(self, start, length, owner):
        self.owner[start : start + length] = [owner] * length

    def refusal(self, error, n):
        n_free = self.owner.count(None)
        assert error.free == n_free
        assert error.used == self.capacity - n_free
        assert (error.requested, error.capacity) == (n, self.capacity)
        assert error.cause == ("memory" if n > n_free else "fragmentation")
        assert error.largest_hole == max((length for _, length in self.holes(self.free_now())), default=0)

    # -- calls ----------------------------------------------------------------------------------------------------

    @rule(data=st.data())
    def allocate(self, data):
        self.request(data.draw(st.integers(1, 4) | st.integers(1, self.capacity + 2), "n"))

    def request(self, n):
        expected = self.choose(self.holes(self.free_now()), self.rounded(n))
        if expected is None:
            with pytest.raises(CapacityError) as caught:
                self.slots.allocate(n)
            self.refusal(caught.value, n)
        else:
            assert self.slots.allocate(n) == expected
            self.paint(expected, self.rounded(n), expected)
            self.asked[expected] = n

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def free(self, data):
        self.forget(data.draw(st.sampled_from(sorted(self.asked)), "start"))

    def forget(self, start):
        self.slots.free(start)
        self.paint(start, self.length(start), None)
        del self.asked[start]
        self.told.pop(start, None)

    @rule(data=st.data())
    def name_what_is_none(self, data):
        start = data.draw(st.integers(-1, self.capacity + 1), "start")
        if start not in self.asked:
            for call in (self.slots.free, self.slots.reserved, self.slots.used):
                with pytest.raises(ArgumentError):
                    call(start)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def use(self, data):
        start = data.draw(st.sampled_from(sorted(self.asked)), "start")
        n_tokens = data.draw(st.integers(0, self.length(start) + 1), "n_tokens")
        if n_tokens > self.length(start):
            with pytest.raises(ArgumentError):
                self.slots.use(start, n_tokens)
        else:
            self.hold(start, n_tokens)

    def hold(self, start, n_tokens):
        self.slots.use(start, n_tokens)
        self.told[start] = n_tokens

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def move(self, data):
        start = data.draw(st.sampled_from(sorted(self.asked)), "start")
        to = data.draw(st.integers(0, self.capacity), "to")
        length = self.length(start)
        room = self.free_now([start])[to : to + length]
        if room == [True] * length and self.may_start(to, length):
            self.slots.move(start, to)
            self.paint(start, length, None)
            self.paint(to, length, to)
            self.asked[to] = self.asked.pop(start)
            if start in self.told:
                self.told[to] = self.told.pop(start)
        else:
            with pytest.raises(ArgumentError):
                self.slots.move(start, to)

    def may_start(self, to, length):
        return True

    # -- what always holds ----------------------------------------------------------------------------------------

    @invariant()
    def is_as_the_model(self):
        if not hasattr(self, "slots"):
            return
        holes = self.holes(self.free_now())
        assert self.slots.holes() == holes
        assert self.slots.allocations() == [(start, self.length(start)) for start in sorted(self.asked)]
        assert [self.slots.used(start) for start in self.asked] == [self.held(start) for start in self.asked]
        figures = self.slots.occupancy()
        assert figures.free == self.slots.free_slots == self.owner.count(None)
        assert figures.reserved == self.slots.reserved_slots == self.capacity - figures.free
        assert figures.used == sum(map(self.held, self.asked))
        assert (figures.capacity, figures.n_holes) == (self.capacity, len(holes))
        largest = max((length for _, length in holes), default=0)
        assert figures.largest_hole == self.slots.largest_hole == largest
        assert figures.unused == figures.reserved - figures.used
        outside = figures.free - largest
        assert figures.external_fragmentation == pytest.approx(outside / max(figures.free, 1))
        assert figures.internal_fragmentation == pytest.approx(figures.unused / max(figures.reserved, 1))

    def teardown(self):
        if not hasattr(self, "slots"):
            return
        for start in list(self.asked):
            self.forget(start)
        assert self.slots.holes() == type(self.slots)(self.capacity).holes()
        assert (self.slots.occupancy().used, self.slots.reserved_slots) == (0, 0)

    # -- advice ---------------------------------------------------------------------------------------------------

    @rule(data=st.data())
    def the_advice_is_true(self, data):
        n_free = self.owner.count(None)
        edges = st.sampled_from([n_free, n_free + 1, self.slots.largest_hole + 1]).map(lambda n: max(n, 1))
        n = data.draw(edges | st.integers(1, self.capacity + 2), "n")
        page_size = data.draw(st.integers(1, 5), "page_size")
        found = diagnose(self.slots, n, page_size=page_size)
        assert found.fits == self.fits(n)
        if not found.fits:
            assert found.cause == ("memory" if n > n_free else "fragmentation")
        assert (found.requested, found.length, found.occupancy) == (
            n,
            self.rounded(n),
            self.slots.occupancy(),
        )
        assert found.largest_request == max(
            (m for m in range(1, self.capacity + 1) if self.fits(m)), default=0
        )
        everything = list(self.asked)
        possible = [m for m in range(1, self.capacity + 1) if self.fits(m, but=everything)]
        assert found.largest_possible == max(possible)
        assert found.free_without_waste == self.capacity - sum(map(self.held, self.asked))
        requests = [n, *map(self.held, self.asked)]
        pages = [token // page_size for request in requests for token in range(0, request, page_size)]
        assert found.fits_in_pages == (len(pages) <= self.capacity // page_size)
        assert found.text.startswith(f"A request of {n} token")
        self.check_waiting(found, n)
        self.check_moves(found, n)

    def check_waiting(self, found, n):
        if found.fits:
            assert (found.wait_for, found.any_of) == ((), ())
            return
        alone = tuple(start for start in sorted(self.asked) if self.fits(n, but=[start]))
        assert found.any_of == alone
        if not self.fits(n, but=list(self.asked)):
            assert found.wait_for == ()
            return
        assert found.wait_for
        assert set(found.wait_for) <= set(self.asked)
        after = copy.deepcopy(self.slots)
        for start in found.wait_for:
            after.free(start)
        after.allocate(n)
        if len(self.asked) <= MOST_TRIED:
            for fewer in itertools.combinations(self.asked, len(found.wait_for) - 1):
                assert not self.fits(n, but=fewer)
            equal = itertools.combinations(self.asked, len(found.wait_for))
            slots = [sum(map(self.length, starts)) for starts in equal if self.fits(n, but=starts)]
            assert sum(map(self.length, found.wait_for)) == min(slots)

    def check_moves(self, found, n):
        plans = [plan for plan in (found.least_copy, found.fewest_moves) if plan is not None]
        if found.cause != "fragmentation":
            assert not plans
            return
        for plan in plans:
            after = copy.deepcopy(self.slots)
            for move in plan.moves:
                assert (move.length, move.n_tokens) == (self.length(move.start), self.held(move.start))
                after.move(move.start, move.to)
            after.allocate(n)
            assert set(plan.holes) <= set(self.slots.holes())
            # The holes become one without the moved ones, and are none of them idle.
            space = self.free_now([move.start for move in plan.moves])
            assert any(
                all(start <= hole < start + length for hole, _ in plan.holes)
                for start, length in self.holes(space)
            )
        if len(self.asked) > MOST_TRIED:
            return
        costs = [
            (sum(map(self.held, starts)), len(starts))
            for k in range(len(self.asked) + 1)
            for starts in itertools.combinations(sorted(self.asked), k)
            if self.can_make_room(starts, n)
        ]
        if not costs:
            assert not plans
            return
        least, fewest = found.least_copy, found.fewest_moves
        assert (least.n_tokens, len(least.moves)) == min(costs)
        assert (len(fewest.moves), fewest.n_tokens) == min((moves, tokens) for tokens, moves in costs)

    def can_make_room(self, starts, n):
        """Whether a plan of the documented kind that moves exactly these allocations makes room for `n`."""
        raise NotImplementedError


class FreeListMachine(SlotsMachine):
    @initialize(capacity=st.integers(1, 26), fit=st.sampled_from(["first", "best"]), pieces=pieces)
    def start(self, capacity, fit, pieces):
        self.fit = fit
        self.begin(FreeList(capacity, fit=fit), pieces)

    def holes(self, free):
        return runs(free)

    def rounded(self, n):
        return n

    def choose(self, holes, length):
        candidates = [hole for hole in holes if hole[1] >= length]
        if self.fit == "best":
            candidates.sort(key=lambda hole: (hole[1], hole[0]))
        return candidates[0][0] if candidates else None

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def resize(self, data):
        start = data.draw(st.sampled_from(sorted(self.asked)), "start")
        length = self.length(start)
        n = data.draw(st.integers(1, length + 4), "n")
        if n < self.told.get(start, 0):
            with pytest.raises(ArgumentError):
                self.slots.resize(start, n)
            return
        if n > length and self.free_now()[start + length : start + n] != [True] * (n - length):
            with pytest.raises(CapacityError) as caught:
                self.slots.resize(start, n)
            self.refusal(caught.value, n - length)
            behind = itertools.takewhile(lambda owner: owner is None, self.owner[start + length :])
            assert caught.value.available == len(list(behind))
            return
        self.slots.resize(start, n)
        self.paint(start, length, None)
        self.paint(start, n, start)
        self.asked[start] = n

    def can_make_room(self, starts, n):
        # With the order kept, the moved ones between two that stay leave all the free slots there in one piece.
        stay = [None if owner in starts else owner for owner in self.owner]
        for start, length in runs([owner is None for owner in stay]):
            if self.owner[start : start + length].count(None) >= n:
                return True
        return False


class BuddyMachine(SlotsMachine):
    @initialize(capacity=st.integers(1, 40) | st.sampled_from([16, 32]), pieces=pieces)
    def start(self, capacity, pieces):
        self.begin(Buddy(capacity), pieces)

    def holes(self, free):
        return aligned_blocks(free)

    def rounded(self, n):
        return next(2**order for order in range(70) if 2**order >= n)

    def choose(self, holes, length):
        candidates = [(hole[1], hole[0]) for hole in holes if hole[1] >= length]
        return min(candidates)[1] if candidates else None

    def may_start(self, to, length):
        return to % length == 0

    @invariant()
    def blocks_are_aligned(self):
        for start in getattr(self, "asked", ()):
            assert start % self.length(start) == 0
            assert self.length(start) == self.rounded(self.asked[start])
            assert self.slots.reserved(start) == self.length(start)

    def can_make_room(self, starts, n):
        length = self.rounded(n)
        for first in range(0, self.capacity - length + 1, length):
            block = range(first, first + length)
            inside = {self.owner[slot] for slot in block} - {None}
            outside = [free and slot not in block for slot, free in enumerate(self.free_now())]
            if inside == set(starts) and self.packs([self.length(start) for start in starts], outside):
                return True
        return False

    def packs(self, lengths, free):
        """Whether blocks of these lengths have a place in free slots, by trying all places."""
        if not lengths:
            return True
        if sum(lengths) > sum(free):
            return False
        first, *rest = sorted(lengths, reverse=True)
        for start in range(0, len(free) - first + 1, first):
            if all(free[start : start + first]):
                left = free[:start] + [False] * first + free[start + first :]
                if self.packs(rest, left):
                    return True
        return False


def test_a_free_list_is_the_model():
    run_state_machine_as_test(FreeListMachine)


def test_a_buddy_allocator_is_the_model():
    run_state_machine_as_test(BuddyMachine)
