"""Contiguous token slots in blocks of a power of two, as pure integers."""

from __future__ import annotations

from bisect import insort

from gpuarena.kv.contiguous._slots import Slots
from gpuarena.kv.spec import positive

__all__ = ["Buddy", "take_block"]


class Buddy(Slots):
    """Contiguous slots in blocks of a power of two, each at a multiple of its length.

    A request takes the shortest free block that is long enough, the lowest of equals; the upper halves are
    split off until it is the next power of two. A block that is freed merges with its other half when that is free.

    >>> slots = Buddy(96)
    >>> slots.holes()
    [(0, 64), (64, 32)]
    >>> slots.allocate(20), slots.allocate(20), slots.free_slots
    (64, 0, 32)

    Unlike a `FreeList`, free blocks that touch are two holes unless they are the halves of one block: no request
    could have them together.

    Parameters
    ----------
    capacity : int
        Slots, at least 1. One that is no power of two is a row of such blocks, the longest first, so that the longest
        request is for the highest power of two in it.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        The capacity is no positive integer.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._free: list[list[int]] = [
            [] for _ in range(self.capacity.bit_length())
        ]  # starts, by log2 of the length
        start = 0
        for order in reversed(range(len(self._free))):
            if self.capacity >> order & 1:
                self._free[order].append(start)
                start += 1 << order

    def allocate(self, n: int) -> int:
        """Take the next power of two of `n` slots and return the first.

        Raises
        ------
        CapacityError
            No block is long enough; `cause` is "memory" where less than `n` slots are free at all, and
            "fragmentation" otherwise, also where only the rounded request is too long; `free` and `largest_hole`
            count slots. Unchanged on error.
        ArgumentError, ArgumentTypeError
            `n` is no positive integer.
        """
        n = positive(n, "n")
        length = self.length_for(n)
        start = take_block(self._free, length)
        if start is None:
            raise self.refusal(n)
        return self._add(start, length, n)

    def holes(self) -> list[tuple[int, int]]:
        """Return ``(start, length)`` of each free block, by start."""
        return sorted((start, 1 << order) for order, starts in enumerate(self._free) for start in starts)

    def length_for(self, n: int) -> int:
        """Return how many slots a request of `n` takes: the next power of two."""
        return 1 << (positive(n, "n") - 1).bit_length()

    @property
    def largest_hole(self) -> int:
        """The longest request that fits now; 0 if none does."""
        return max((1 << order for order, starts in enumerate(self._free) if starts), default=0)

    @property
    def largest_possible(self) -> int:
        """The longest request that fits when nothing is allocated."""
        return 1 << (len(self._free) - 1)

    def max_length(self, start: int) -> int:
        """Return the most slots that the allocation at `start` can have where it lies, those that it has included.

        >>> buddy = Buddy(16)
        >>> first, second = buddy.allocate(2), buddy.allocate(1)
        >>> buddy.max_length(first), buddy.max_length(second)
        (2, 2)
        """
        length = self._allocation(start).length
        # It is the lower half of a longer block as long as its start is a multiple of that, and the upper half free.
        while start % (2 * length) == 0 and self._is_free(start + length, length):
            length *= 2
        return length

    def _refit(self, start: int, length: int, wanted: int) -> None:
        while length < wanted:
            self._free[length.bit_length() - 1].remove(start + length)
            length *= 2
        while length > wanted:
            length //= 2
            insort(self._free[length.bit_length() - 1], start + length)

    def _is_free(self, start: int, length: int) -> bool:
        order = length.bit_length() - 1
        return order < len(self._free) and start in self._free[order]

    def _take_at(self, start: int, length: int) -> bool:
        for order in range(length.bit_length() - 1, len(self._free)):
            first = start >> order << order
            if first in self._free[order] and start % length == 0:
                self._free[order].remove(first)
                while 1 << order > length:
                    order -= 1
                    half = first + (1 << order)
                    if start >= half:
                        first, half = half, first
                    insort(self._free[order], half)
                return True
        return False

    def _release(self, start: int, length: int) -> None:
        order = length.bit_length() - 1
        # A block of the row has no other half: what lies at that place is shorter, so the search ends with it.
        while (other := start ^ 1 << order) in self._free[order]:
            self._free[order].remove(other)
            start = min(start, other)
            order += 1
        insort(self._free[order], start)


def take_block(free: list[list[int]], length: int) -> int | None:
    """Take a block out of `free`, sorted starts by log2 of the length, and return its start; None if there is none.

    >>> free = [[], [], [0]]
    >>> take_block(free, 1), free
    (0, [[1], [2], []])
    """
    wanted = length.bit_length() - 1
    order = next((order for order in range(wanted, len(free)) if free[order]), None)
    if order is None:
        return None
    start = free[order].pop(0)
    while order > wanted:
        order -= 1
        insort(free[order], start + (1 << order))
    return start
