"""Token slots in contiguous pieces, one a request, as pure integers: what `FreeList` and `Buddy` share.

Serving systems gave every request one contiguous piece before paging. An allocator hands out pieces of
``range(capacity)`` and keeps no memory of its own. What it cannot prevent is that the free slots lie
scattered; `gpuarena.kv.contiguous._diagnosis` explains a refusal.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

from gpuarena.errors import ArgumentError, CapacityError
from gpuarena.kv.spec import positive

__all__ = ["Occupancy", "Slots"]


@dataclass(frozen=True, slots=True)
class Occupancy:
    """How the slots are taken at one moment; all counts are slots, and a slot holds one token.

    >>> Occupancy(capacity=100, reserved=60, used=45, free=40, largest_hole=10, n_holes=4).external_fragmentation
    0.75
    """

    capacity: int
    """All slots; ``reserved + free``."""
    reserved: int
    """Slots of live allocations, with what a buddy block is longer than its request."""
    used: int
    """Slots of live allocations that hold a token."""
    free: int
    """Slots of no allocation."""
    largest_hole: int
    """The longest request that fits now."""
    n_holes: int
    """Pieces that the free slots lie in."""

    @property
    def unused(self) -> int:
        """Slots that are reserved and hold no token."""
        return self.reserved - self.used

    @property
    def internal_fragmentation(self) -> float:
        """The share of the reserved slots that holds no token, from 0 to 1."""
        return self.unused / self.reserved if self.reserved else 0.0

    @property
    def external_fragmentation(self) -> float:
        """The share of the free slots that lies outside of the largest hole, from 0 to 1."""
        return 1 - self.largest_hole / self.free if self.free else 0.0


@dataclass(slots=True)
class _Allocation:
    length: int
    asked: int
    used: int | None = None  # None until `use` is called: everything asked for counts as used


class Slots(ABC):
    """What both allocators share; an allocation is known by its first slot. Not safe for use from several threads."""

    def __init__(self, capacity: int) -> None:
        self.capacity = positive(capacity, "capacity")
        self._live: dict[int, _Allocation] = {}
        self._freed: set[int] = set()  # only to word the message about a second free
        self._n_reserved = 0
        self._n_used = 0

    @abstractmethod
    def allocate(self, n: int) -> int:
        """Take `n` slots in one piece and return the first."""

    @abstractmethod
    def holes(self) -> list[tuple[int, int]]:
        """Return ``(start, length)`` of each piece of free slots, by start."""

    @abstractmethod
    def length_for(self, n: int) -> int:
        """Return how many slots a request of `n` takes."""

    @property
    @abstractmethod
    def largest_hole(self) -> int:
        """The longest request that fits now; 0 if none does."""

    @property
    @abstractmethod
    def largest_possible(self) -> int:
        """The longest request that fits when nothing is allocated."""

    @abstractmethod
    def max_length(self, start: int) -> int:
        """Return the most slots that the allocation at `start` can have where it lies, those that it has included."""

    @abstractmethod
    def _refit(self, start: int, length: int, wanted: int) -> None:
        """Take the free slots behind an allocation of `length`, or release its last ones, until it has `wanted`."""

    @abstractmethod
    def _release(self, start: int, length: int) -> None:
        """Make slots free that were reserved."""

    @abstractmethod
    def _take_at(self, start: int, length: int) -> bool:
        """Take exactly these slots where all are free, and return whether they were."""

    @property
    def reserved_slots(self) -> int:
        """Slots of live allocations."""
        return self._n_reserved

    @property
    def free_slots(self) -> int:
        """Slots of no allocation."""
        return self.capacity - self._n_reserved

    def allocations(self) -> list[tuple[int, int]]:
        """Return ``(start, length)`` of the live allocations, by start."""
        return [(start, self._live[start].length) for start in sorted(self._live)]

    def reserved(self, start: int) -> int:
        """Return the slots that the allocation at `start` has taken.

        >>> from gpuarena.kv.contiguous._buddy import Buddy
        >>> buddy = Buddy(16)
        >>> buddy.reserved(buddy.allocate(5))
        8

        Raises
        ------
        ArgumentError, ArgumentTypeError
            No live allocation starts there, or `start` is no integer.
        """
        return self._allocation(start).length

    def used(self, start: int) -> int:
        """Return how many tokens the allocation at `start` holds; what it asked for, unless `use` said otherwise."""
        allocation = self._allocation(start)
        return allocation.asked if allocation.used is None else allocation.used

    def use(self, start: int, n_tokens: int) -> None:
        """Say how many tokens the allocation at `start` holds, for the figures; its slots stay reserved.

        >>> from gpuarena.kv.contiguous._free_list import FreeList
        >>> slots = FreeList(16)
        >>> slots.use(slots.allocate(8), 2)
        >>> slots.occupancy().internal_fragmentation
        0.75

        Raises
        ------
        ArgumentError, ArgumentTypeError
            No live allocation starts there, or it has less than `n_tokens` slots, or that is negative.
        """
        allocation, before = self._allocation(start), self.used(start)
        n_tokens = positive(n_tokens, "n_tokens", least=0)
        if n_tokens > allocation.length:
            raise ArgumentError(
                f"the allocation at slot {start} has {allocation.length} slots, which cannot hold {n_tokens} tokens",
                start=start,
            )
        # One statement, so that an interrupt does not divide it.
        self._n_used, allocation.used = self._n_used + n_tokens - before, n_tokens

    def free(self, start: int) -> None:
        """Give back the allocation at `start`; its slots join the free ones beside them.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            No live allocation starts there: it was freed already, or never made, or `start` lies inside of one;
            unchanged on error.
        """
        allocation = self._allocation(start)
        self._n_reserved -= allocation.length
        self._n_used -= self.used(start)
        del self._live[start]
        self._freed.add(start)
        self._release(start, allocation.length)

    def resize(self, start: int, n: int) -> None:
        """Let the allocation at `start` have the slots of a request of `n` where it lies, more or fewer.

        >>> from gpuarena.kv.contiguous._free_list import FreeList
        >>> slots = FreeList(16)
        >>> slots.resize(slots.allocate(4), 10)
        >>> slots.holes()
        [(10, 6)]

        Raises
        ------
        CapacityError
            The slots behind it are not free, or no such block starts there; `requested` counts the slots that it would
            take more, and `available` those that it could. Unchanged on error; allocate anew, copy and free instead.
        ArgumentError, ArgumentTypeError
            No live allocation starts there, or `n` is no positive integer, or less than what `use` says it holds.
        """
        allocation = self._allocation(start)
        n = positive(n, "n")
        length, wanted = allocation.length, self.length_for(n)
        if allocation.used is not None and allocation.used > n:
            raise ArgumentError(
                f"the allocation at slot {start} holds {allocation.used} tokens, which do not fit in {n} slots",
                start=start,
            )
        room = self.max_length(start)
        if wanted > room:
            what = (
                f"the allocation at slot {start} cannot grow in place from {length} to {wanted} slots, since "
                f"{room - length} of the {wanted - length} behind it are free"
            )
            raise self._no_room(wanted - length, what, room - length)
        if wanted != length:
            self._refit(start, length, wanted)
        self._n_reserved += wanted - length
        self._n_used += n - allocation.asked if allocation.used is None else 0
        allocation.length, allocation.asked = wanted, n

    def refusal(self, n: int) -> CapacityError:
        """Return the error for a request of `n` that does not fit, as `allocate` raises it."""
        length = self.length_for(n)
        rounded = f" for a request of {n}" if length != n else ""
        return self._no_room(n, f"no hole of {length} slots{rounded}", self.largest_hole)

    def move(self, start: int, to: int) -> None:
        """Let the allocation at `start` have the slots from `to` on instead. The caller copies the tokens.

        The two ranges may overlap, as they do where an allocation slides into the hole below it, so the copy
        must be one that allows that (``memmove``).

        >>> from gpuarena.kv.contiguous._free_list import FreeList
        >>> slots = FreeList(16)
        >>> first, second = slots.allocate(4), slots.allocate(6)
        >>> slots.free(first)
        >>> slots.move(second, 0)
        >>> slots.holes()
        [(6, 10)]

        Raises
        ------
        ArgumentError, ArgumentTypeError
            No live allocation starts at `start`, or the slots at `to` are not all free, or end above the
            capacity, or are no aligned block of a `Buddy`; unchanged on error.
        """
        allocation = self._allocation(start)
        to = positive(to, "to", least=0)
        self._release(start, allocation.length)
        if not self._take_at(to, allocation.length):
            self._take_at(start, allocation.length)
            raise ArgumentError(
                f"the allocation at slot {start} cannot move to slot {to}: its {allocation.length} slots from there "
                f"on are not all free, or no block of a buddy allocator",
                start=start,
            )
        del self._live[start]
        self._freed.add(start)
        self._live[to] = allocation

    def reserve(self, start: int, n: int) -> None:
        """Take the slots of a request of `n` from `start` on, which are free: `allocate` gave them before.

        >>> from gpuarena.kv.contiguous._free_list import FreeList
        >>> slots = FreeList(16)
        >>> slots.reserve(4, 6)
        >>> slots.holes()
        [(0, 4), (10, 6)]
        """
        length = self.length_for(n)
        taken = self._take_at(start, length)
        assert taken, "no two allocations overlap"
        self._add(start, length, n)

    def occupancy(self) -> Occupancy:
        """Return the figures of this moment.

        >>> from gpuarena.kv.contiguous._free_list import FreeList
        >>> slots = FreeList(10)
        >>> starts = [slots.allocate(n) for n in (2, 3, 2)]
        >>> slots.free(starts[1])
        >>> slots.occupancy()
        Occupancy(capacity=10, reserved=4, used=4, free=6, largest_hole=3, n_holes=2)
        """
        return Occupancy(
            self.capacity,
            self._n_reserved,
            self._n_used,
            self.free_slots,
            self.largest_hole,
            len(self.holes()),
        )

    def _add(self, start: int, length: int, asked: int) -> int:
        self._live[start] = _Allocation(length, asked)
        self._n_reserved += length
        self._n_used += asked
        return start

    def _allocation(self, start: int) -> _Allocation:
        start = positive(start, "start", least=0)
        allocation = self._live.get(start)
        if allocation is not None:
            return allocation
        message = f"no live allocation starts at slot {start}"
        inside = [first for first, length in self.allocations() if first < start < first + length]
        if start >= self.capacity:
            message += f": there are {self.capacity} slots"
        elif inside:
            message += (
                f": it lies inside of the one at slot {inside[0]}; name an allocation by its first slot"
            )
        elif start in self._freed:
            message += ": the one that did was freed or moved already"
        else:
            message += ": none ever did"
        raise ArgumentError(message, start=start)

    def _no_room(self, n: int, what: str, room: int) -> CapacityError:
        """Return the error for `n` slots of which only `room` are free in one piece where they are needed."""
        free = self.free_slots
        cause: Literal["memory", "fragmentation"] = "memory" if free < n else "fragmentation"
        holes = self.holes()
        if n > self.largest_possible:
            why = f"an empty one of {self.capacity} slots takes a request of at most {self.largest_possible}"
        elif cause == "memory":
            why = f"{free} of {self.capacity} are free, {n - free} too few; wait until an allocation ends"
        else:
            why = (
                f"{free} of {self.capacity} are free, in {len(holes)} pieces of at most {self.largest_hole}; "
                f"wait for an allocation that lies between pieces, compact, or use pages"
            )
        return CapacityError(
            f"{what}: {why}. Nothing was changed",
            used=self._n_reserved,
            requested=n,
            capacity=self.capacity,
            free=free,
            largest_hole=self.largest_hole,
            cause=cause,
            available=room,
            missing=n - room,
            aligned_offset=max(holes, key=lambda hole: hole[1])[0] if holes else self.capacity,
            label=None,
        )
