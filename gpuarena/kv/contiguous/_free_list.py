"""Contiguous token slots from a list of holes, as pure integers."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Literal

from gpuarena.errors import ArgumentError
from gpuarena.kv.contiguous._slots import Slots
from gpuarena.kv.spec import positive

__all__ = ["FreeList"]


class FreeList(Slots):
    """Contiguous slots from an address-ordered list of holes, which merge at once when they touch.

    >>> slots = FreeList(100)
    >>> first, second, third = slots.allocate(30), slots.allocate(30), slots.allocate(20)
    >>> slots.free(first)
    >>> slots.holes()
    [(0, 30), (80, 20)]
    >>> slots.allocate(25)
    0

    A call takes time linear in the number of holes, of which there is at most one more than allocations.

    Parameters
    ----------
    capacity : int
        Slots, at least 1.
    fit : {"first", "best"}
        Whether a request goes to the lowest hole that is long enough, or to the shortest such hole, the lowest
        of equals. It takes the low end of the hole.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        The capacity is no positive integer, or `fit` neither of the two.
    """

    def __init__(self, capacity: int, *, fit: Literal["first", "best"] = "first") -> None:
        super().__init__(capacity)
        if fit not in ("first", "best"):
            raise ArgumentError(f"fit must be 'first' or 'best', not {fit!r}")
        self.fit = fit
        self._starts = [0]  # the holes, by start; never empty ones, never two that touch
        self._lengths = [self.capacity]

    def allocate(self, n: int) -> int:
        """Take `n` slots in one piece and return the first.

        Raises
        ------
        CapacityError
            No hole is long enough; `cause` is "memory" where less than `n` slots are free at all, and
            "fragmentation" otherwise; `free` and `largest_hole` count slots. Unchanged on error.
        ArgumentError, ArgumentTypeError
            `n` is no positive integer.
        """
        n = positive(n, "n")
        index = self._find(n)
        if index is None:
            raise self.refusal(n)
        start = self._starts[index]
        self._carve(index, start, n)
        return self._add(start, n, n)

    def holes(self) -> list[tuple[int, int]]:
        """Return ``(start, length)`` of each longest run of free slots, by start."""
        return list(zip(self._starts, self._lengths, strict=True))

    def length_for(self, n: int) -> int:
        """Return how many slots a request of `n` takes, which is `n`."""
        return n

    @property
    def largest_hole(self) -> int:
        """The longest request that fits now; 0 if none does."""
        return max(self._lengths, default=0)

    @property
    def largest_possible(self) -> int:
        """The longest request that fits when nothing is allocated."""
        return self.capacity

    def max_length(self, start: int) -> int:
        """Return the most slots that the allocation at `start` can have where it lies, those that it has included."""
        length = self._allocation(start).length
        index = bisect_left(self._starts, start)
        behind = index < len(self._starts) and self._starts[index] == start + length
        return length + (self._lengths[index] if behind else 0)

    def _refit(self, start: int, length: int, wanted: int) -> None:
        if wanted > length:
            self._take_at(start + length, wanted - length)
        else:
            self._release(start + wanted, length - wanted)

    def _find(self, n: int) -> int | None:
        """Return the index of the hole that a request of `n` goes to."""
        found = None
        for index, length in enumerate(self._lengths):
            if length >= n and (found is None or length < self._lengths[found]):
                found = index
                if self.fit == "first":
                    break
        return found

    def _carve(self, index: int, start: int, n: int) -> None:
        """Take the `n` slots at `start` out of a hole that contains them."""
        first, end = self._starts[index], self._starts[index] + self._lengths[index]
        rest = [(a, b - a) for a, b in ((first, start), (start + n, end)) if b > a]
        self._starts[index : index + 1] = [a for a, _ in rest]
        self._lengths[index : index + 1] = [length for _, length in rest]

    def _take_at(self, start: int, length: int) -> bool:
        index = bisect_right(self._starts, start) - 1
        if index < 0 or start + length > self._starts[index] + self._lengths[index]:
            return False
        self._carve(index, start, length)
        return True

    def _release(self, start: int, length: int) -> None:
        index = bisect_left(self._starts, start)
        end = start + length
        if index < len(self._starts) and self._starts[index] == end:
            end += self._lengths[index]
            del self._starts[index], self._lengths[index]
        if index and self._starts[index - 1] + self._lengths[index - 1] == start:
            self._lengths[index - 1] = end - self._starts[index - 1]
        else:
            self._starts.insert(index, start)
            self._lengths.insert(index, end - start)
