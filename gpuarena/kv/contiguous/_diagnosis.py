"""Why a request does not fit in contiguous slots although some are free, and what would make it fit."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from gpuarena.errors import ArgumentTypeError
from gpuarena.kv.contiguous._buddy import Buddy, take_block
from gpuarena.kv.contiguous._free_list import FreeList
from gpuarena.kv.contiguous._slots import Occupancy, Slots
from gpuarena.kv.spec import positive

__all__ = ["Compaction", "Diagnosis", "Move", "compaction_for_longest", "diagnose"]


@dataclass(frozen=True, slots=True)
class Move:
    """One allocation that `Slots.move` moves."""

    start: int
    """Its first slot."""
    to: int
    """The first slot that it gets."""
    length: int
    """Its slots."""
    n_tokens: int
    """The tokens to copy, those that it holds."""


@dataclass(frozen=True, slots=True)
class Compaction:
    """Moves which, made one after the other in this order, make room for the request."""

    moves: tuple[Move, ...]
    holes: tuple[tuple[int, int], ...]
    """``(start, length)`` of the holes that become one; none where a block of a `Buddy` is emptied that has no hole."""

    @property
    def n_tokens(self) -> int:
        """The tokens to copy."""
        return sum(move.n_tokens for move in self.moves)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why a request fits or not, and what would help; all figures are slots or tokens, `text` says it in words."""

    requested: int
    length: int
    """Slots that the request takes: `requested`, or the next power of two in a `Buddy`."""
    occupancy: Occupancy
    cause: Literal["memory", "fragmentation"] | None
    """None where the request fits; "memory" where less than `requested` slots are free; else "fragmentation"."""
    largest_possible: int
    """The longest request that fits when nothing is allocated."""
    least_copy: Compaction | None
    """The moves that copy the fewest tokens; None unless the cause is fragmentation that moves can undo."""
    fewest_moves: Compaction | None
    """The moves of the fewest allocations."""
    wait_for: tuple[int, ...]
    """The fewest allocations whose end makes the request fit, the fewest slots of equals; empty if none would."""
    any_of: tuple[int, ...]
    """Every allocation whose end alone makes it fit."""
    page_size: int
    pages_needed: int
    """Pages that the tokens of the live allocations and of the request take in a paged cache."""
    n_pages: int
    """Pages in the capacity."""

    @property
    def fits(self) -> bool:
        """Whether the request fits now."""
        return self.cause is None

    @property
    def fits_in_pages(self) -> bool:
        """Whether a paged cache of the same capacity would hold the same tokens and the request."""
        return self.pages_needed <= self.n_pages

    @property
    def largest_request(self) -> int:
        """The longest request that fits now."""
        return self.occupancy.largest_hole

    @property
    def free_without_waste(self) -> int:
        """Slots that would be free if every allocation had reserved only what it uses."""
        return self.occupancy.free + self.occupancy.unused

    @property
    def text(self) -> str:
        """One paragraph for people."""
        return " ".join(_sentences(self))

    def __str__(self) -> str:
        return self.text


def diagnose(slots: Slots, n: int, *, page_size: int = 16) -> Diagnosis:
    """Say whether a request of `n` tokens fits in `slots`, and if not, why and what would help.

    >>> slots = FreeList(1000)
    >>> starts = [slots.allocate(200) for _ in range(5)]
    >>> slots.free(starts[1]), slots.free(starts[3])  # 40 % are free
    (None, None)
    >>> found = diagnose(slots, 300)
    >>> found.cause, found.largest_request, found.any_of
    ('fragmentation', 200, (0, 400, 800))
    >>> found.least_copy.moves
    (Move(start=400, to=200, length=200, n_tokens=200),)
    >>> print(found.text)  # doctest: +NORMALIZE_WHITESPACE
    A request of 300 tokens does not fit although 400 of 1000 slots (40 %) are free, in 2 holes of at most 200. The
    holes at 200 and 600 would be one that is long enough without the allocation at 400. The request fits after a
    compaction that moves 1 allocation and copies 200 tokens, or once any one of the allocations at 0, 400 and 800 ends.
    A request of at most 200 tokens fits now. In pages of 16 tokens it would fit: the tokens held and the request take
    58 of 62 pages.

    Of a `FreeList`, `least_copy` and `fewest_moves` are the least of all compactions that keep the order of the
    allocations; of a `Buddy`, the least of those that empty one block and move nothing else. Other moves may copy less,
    and to find the least of all is as hard as packing bins. Nothing is changed, and all of it holds until the next call.

    Parameters
    ----------
    slots : FreeList or Buddy
    n : int
        Tokens of the request, at least 1.
    page_size : int
        Tokens of a page of the paged cache to compare with.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        `n` or `page_size` is no positive integer, or `slots` neither of the two.
    """
    if not isinstance(slots, FreeList | Buddy):
        raise ArgumentTypeError(f"slots must be a FreeList or a Buddy, not {type(slots).__name__}")
    n, page_size = positive(n, "n"), positive(page_size, "page_size")
    occupancy = slots.occupancy()
    cause: Literal["memory", "fragmentation"] | None = None
    plans: list[Compaction] = []
    ends: list[tuple[int, ...]] = []
    if n > occupancy.largest_hole:
        cause = "memory" if n > occupancy.free else "fragmentation"
        slides = _slides(slots, n) if isinstance(slots, FreeList) else _evacuations(slots, n)
        plans = list(slides) if cause == "fragmentation" else []
        ends = list(_spans(slots, n) if isinstance(slots, FreeList) else _blocks(slots, n))
    fewest = min(map(len, ends), default=0)
    shortest = [starts for starts in ends if len(starts) == fewest]
    held = [slots.used(start) for start, _ in slots.allocations()]
    return Diagnosis(
        requested=n,
        length=slots.length_for(n),
        occupancy=occupancy,
        cause=cause,
        largest_possible=slots.largest_possible,
        least_copy=min(plans, key=lambda plan: (plan.n_tokens, len(plan.moves)), default=None),
        fewest_moves=min(plans, key=lambda plan: (len(plan.moves), plan.n_tokens), default=None),
        wait_for=min(shortest, key=lambda starts: sum(map(slots.reserved, starts)), default=()),
        any_of=tuple(sorted(starts[0] for starts in ends if len(starts) == 1)),
        page_size=page_size,
        pages_needed=sum(-(-n_tokens // page_size) for n_tokens in (*held, n)),
        n_pages=slots.capacity // page_size,
    )


def compaction_for_longest(slots: Slots) -> Compaction | None:
    """Return the least copy that makes room for the longest request; None if moves make no longer one fit.

    >>> slots = FreeList(1000)
    >>> starts = [slots.allocate(200) for _ in range(5)]
    >>> slots.free(starts[1]), slots.free(starts[3])
    (None, None)
    >>> compaction_for_longest(slots).moves
    (Move(start=400, to=200, length=200, n_tokens=200),)
    """
    n = min(slots.free_slots, slots.largest_possible)
    while n > slots.largest_hole:
        plan = diagnose(slots, n).least_copy
        if plan is not None:
            return plan
        n = slots.length_for(n) // 2  # only of a Buddy: a FreeList can always make all that is free one hole
    return None


def _slides(slots: FreeList, n: int) -> Iterator[Compaction]:
    """Yield the compactions that slide allocations down until `n` slots are free, of the fewest tokens and moves.

    Where a hole is to arise, everything between the nearest allocations that stay has moved, and what was free between
    them is the hole. So the least is among the runs of holes, and a longer run than needed only copies more.
    """
    holes, live = slots.holes(), slots.allocations()
    starts = [start for start, _ in live]
    free_below = list(accumulate((length for _, length in holes), initial=0))
    held_below = list(accumulate((slots.used(start) for start in starts), initial=0))
    slides = []
    for first in range(len(holes)):
        last = bisect_left(free_below, free_below[first] + n)  # holes[first:last] have n slots
        if last > len(holes):
            break
        low, high = bisect_left(starts, holes[first][0]), bisect_left(starts, holes[last - 1][0])
        slides.append((held_below[high] - held_below[low], high - low, low, high, first, last))
    for pick in {min(slides), min(slides, key=lambda slide: (slide[1], slide[0]))}:
        _, _, low, high, first, last = pick
        to, moves = holes[first][0], []
        for start, length in live[low:high]:
            moves.append(Move(start, to, length, slots.used(start)))
            to += length
        yield Compaction(tuple(moves), tuple(holes[first:last]))


def _spans(slots: FreeList, n: int) -> Iterator[tuple[int, ...]]:
    """Yield, for each first allocation, the fewest neighbours whose end leaves `n` slots free in one piece."""
    live = slots.allocations()
    bounds = [(0, 0), *live, (slots.capacity, 0)]
    last = 1
    for first in range(1, len(live) + 1):
        below = sum(bounds[first - 1])  # the end of the one below, which stays
        last = max(last, first)
        while last <= len(live) and bounds[last + 1][0] - below < n:
            last += 1
        if last > len(live):
            return
        yield tuple(start for start, _ in bounds[first : last + 1])


def _windows(slots: Buddy, length: int) -> Iterator[tuple[int, list[int]]]:
    """Yield the start of each possible block of `length` that is not free as a whole, and the allocations in it.

    An allocation that is longer than such a block stands for all those that it covers.
    """
    inside: dict[int, list[int]] = {}
    for start, _ in slots.holes():
        inside.setdefault(start // length * length, [])
    for start, _ in slots.allocations():
        inside.setdefault(start // length * length, []).append(start)
    for start, starts in sorted(inside.items()):
        if (
            start + length <= slots.capacity
        ):  # the blocks in the row are at multiples of their length, the longest first
            yield start, starts


def _evacuations(slots: Buddy, n: int) -> Iterator[Compaction]:
    """Yield, for each possible block for `n` slots, how its allocations move to free blocks elsewhere, if they can."""
    length = slots.length_for(n)
    holes = slots.holes()
    for block, starts in _windows(slots, length):
        free: list[list[int]] = [[] for _ in range(slots.capacity.bit_length())]
        for start, hole_length in holes:
            if start // length * length != block:
                free[hole_length.bit_length() - 1].append(start)
        moves = []
        # The longest first: what it leaves of a free block is a multiple of all that follow, so nothing is lost.
        for start in sorted(starts, key=lambda start: (-slots.reserved(start), start)):
            to = take_block(free, slots.reserved(start))
            if to is None:
                break
            moves.append(Move(start, to, slots.reserved(start), slots.used(start)))
        else:
            yield Compaction(
                tuple(moves), tuple(hole for hole in holes if hole[0] // length * length == block)
            )


def _blocks(slots: Buddy, n: int) -> Iterator[tuple[int, ...]]:
    """Yield, for each possible block for `n` slots, the allocations that lie in it."""
    for _, starts in _windows(slots, slots.length_for(n)):
        yield tuple(starts)


def _sentences(found: Diagnosis) -> Iterator[str]:
    at, n = found.occupancy, found.requested
    what = f"A request of {_count(n, 'token')}"
    if found.length != n:
        what += f", which takes a block of {found.length},"
    if found.fits:
        yield f"{what} fits: the longest hole has {_count(at.largest_hole, 'slot')}."
        return
    share = f"{at.free} of {_count(at.capacity, 'slot')} ({round(at.free * 100 / at.capacity)} %) are free"
    if n > found.largest_possible:
        yield f"{what} can never fit: an empty allocator of {_count(at.capacity, 'slot')} takes at most {found.largest_possible}."
    elif found.cause == "memory":
        yield f"{what} does not fit for lack of memory: {share}, {n - at.free} too few, in {_count(at.n_holes, 'hole')}."
    else:
        yield (
            f"{what} does not fit although {share}, in {_count(at.n_holes, 'hole')} of at most {at.largest_hole}."
        )
    if at.unused:
        yield (
            f"Of the {_count(at.reserved, 'reserved slot')}, {at.unused} hold no token; without them "
            f"{found.free_without_waste} would be free."
        )
    yield from _remedies(found)
    if at.largest_hole:
        yield f"A request of at most {_count(at.largest_hole, 'token')} fits now."
    pages = f"the tokens held and the request take {found.pages_needed} of {_count(found.n_pages, 'page')}"
    either = "would fit" if found.fits_in_pages else "would not fit either"
    yield f"In pages of {_count(found.page_size, 'token')} it {either}: {pages}."


def _remedies(found: Diagnosis) -> Iterator[str]:
    ways = []
    plan = found.least_copy
    if plan is not None:
        holes, moved = [start for start, _ in plan.holes], sorted(move.start for move in plan.moves)
        if holes:
            yield (
                f"The {'holes' if len(holes) > 1 else 'hole'} at {_list(holes)} would be one that is long enough "
                f"without the {'allocations' if len(moved) > 1 else 'allocation'} at {_list(moved)}."
            )
        ways.append(
            f"after a compaction that moves {_count(len(plan.moves), 'allocation')} and copies "
            f"{_count(plan.n_tokens, 'token')}"
        )
        fewest = found.fewest_moves
        if fewest is not None and len(fewest.moves) < len(plan.moves):
            ways.append(
                f"after one that moves {_count(len(fewest.moves), 'allocation')} and copies "
                f"{_count(fewest.n_tokens, 'token')}"
            )
    if len(found.any_of) > 1:
        ways.append(f"once any one of the allocations at {_list(list(found.any_of))} ends")
    elif len(found.wait_for) == 1:
        ways.append(f"once the allocation at {found.wait_for[0]} ends")
    elif found.wait_for:
        ways.append(f"once the {len(found.wait_for)} allocations at {_list(list(found.wait_for))} have ended")
    if ways:
        yield f"The request fits {', or '.join(ways)}."


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _list(starts: list[int]) -> str:
    """Return starts as words, no more than a line of them."""
    shown = [str(start) for start in starts[:8]]
    if len(starts) > 8:
        shown.append(f"{len(starts) - 8} more")
    return " and ".join(filter(None, (", ".join(shown[:-1]), shown[-1])))
