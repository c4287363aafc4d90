"""What is queued on a simulated device, and in which order it happens.

Order is kept as vector clocks. A clock maps a queue to the number of its kernels that are done before whatever
comes next; kernel n of queue q comes before a kernel whose clock says n or more for q.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from gpuarena.testing._capture import Capture

Clock = dict[int, int]
ByteRanges = tuple[tuple[int, int], ...]


@dataclasses.dataclass(eq=False)
class FakeKernel:
    """Work that was launched: the addresses that it reads and writes, and what it does when it runs."""

    name: str
    stream: str
    reads: ByteRanges  # disjoint and sorted
    writes: ByteRanges
    run: Callable[[], Any] | None = dataclasses.field(repr=False)
    serial: int = dataclasses.field(default=0, repr=False)  # in the order of the launches
    queue: int = dataclasses.field(default=0, repr=False)
    index: int = dataclasses.field(default=0, repr=False)  # from 1 on, in its queue

    def conflict(self, other: FakeKernel) -> tuple[int, int] | None:
        """Return bytes that both touch and one of them writes."""
        return (
            _meet(self.writes, other.writes)
            or _meet(self.writes, other.reads)
            or _meet(self.reads, other.writes)
        )


class Race(NamedTuple):
    """Two kernels in no order that touch the same bytes, one of them writing; the first was launched before."""

    first: FakeKernel
    second: FakeKernel
    start: int
    stop: int

    def __repr__(self) -> str:
        first, second = (f"{kernel.name!r} on {kernel.stream!r}" for kernel in (self.first, self.second))
        return f"<Race of {first} and {second} over bytes {self.start:#x} to {self.stop:#x}>"


@dataclasses.dataclass(eq=False)
class FakeEvent:
    """A point in a queue: `position` operations have been queued before it."""

    queue: Queue
    position: int
    clock: Clock
    capture: Capture | None = None

    @property
    def done(self) -> bool:
        """Whether the queue has come this far."""
        return self.queue.n_done >= self.position


class Queue:
    """What a stream is, on one device and in one thread: operations in the order in which they were queued."""

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.pending: deque[FakeKernel | FakeEvent] = deque()  # an event stands for a wait for it
        self.n_done = 0
        self.clock: Clock = {}
        self.capture: Capture | None = None

    def event(self) -> FakeEvent:
        """Return an event behind all that was queued."""
        return FakeEvent(self, self.n_done + len(self.pending), dict(self.clock))

    def add_wait(self, event: FakeEvent) -> None:
        """Queue a wait."""
        join(self.clock, event.clock)
        self.pending.append(event)

    def step(self) -> None:
        """Do the first pending operation."""
        operation = self.pending.popleft()
        self.n_done += 1
        if isinstance(operation, FakeKernel) and operation.run is not None:
            operation.run()


def join(clock: Clock, other: Clock) -> None:
    """Let `clock` know what `other` knows."""
    for queue, index in other.items():
        if clock.get(queue, 0) < index:
            clock[queue] = index


def merged(ranges: Iterable[tuple[int, int]]) -> ByteRanges:
    """Return the same bytes as disjoint ranges in order.

    >>> merged([(8, 9), (0, 4), (2, 6), (7, 7)])
    ((0, 6), (8, 9))
    """
    result: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(stop, result[-1][1])
        elif start < stop:
            result.append((start, stop))
    return tuple(result)


def _meet(some: ByteRanges, others: ByteRanges) -> tuple[int, int] | None:
    """Return the first run of bytes that both contain."""
    left = right = 0
    while left < len(some) and right < len(others):
        start = max(some[left][0], others[right][0])
        stop = min(some[left][1], others[right][1])
        if start < stop:
            return start, stop
        if some[left][1] <= others[right][1]:
            left += 1
        else:
            right += 1
    return None
