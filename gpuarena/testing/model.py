"""What an arena should do, in plain Python, sharing no code with the library.

The memory is a bytearray, an end is a list of allocations, and a checkpoint is a copy of that list. All sizes and
positions are bytes; those of an arena count from its own first byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

__all__ = ["GUARD", "POISON", "Allocation", "ArenaModel", "End", "Ledger", "Saved"]

#: The bytes that `gpuarena.Debug` documents: memory without contents, and what lies between regions.
POISON, GUARD = 0xFF, 0xFD


class Allocation:
    """A region and the gaps around it; two of them are never equal."""

    def __init__(
        self, side: str, offset: int, nbytes: int, align: int, label: str | None, old_top: int, top: int
    ) -> None:
        self.side, self.offset, self.nbytes, self.align, self.label = side, offset, nbytes, align, label
        self.old_top, self.top = old_top, top  # the end's pointer, before and after
        self.marked = False  # whether a checkpoint was taken behind it
        self.child: ArenaModel | None = None
        self.in_frame = False

    @property
    def stop(self) -> int:
        """The first byte behind it."""
        return self.offset + self.nbytes

    @property
    def taken(self) -> int:
        """Bytes that it cost, its gaps included."""
        return abs(self.top - self.old_top)

    @property
    def gaps(self) -> list[range]:
        """Bytes that it cost beside its own."""
        if self.side == "low":
            return [range(self.old_top, self.offset), range(self.stop, self.top)]
        return [range(self.stop, self.old_top)]

    def __repr__(self) -> str:
        return f"{self.nbytes} bytes at {self.offset}"


@dataclass(frozen=True)
class Saved:
    """What a checkpoint should bring back."""

    era: object  # one for each arena, and another after each reset
    side: str
    live: tuple[Allocation, ...]
    top: int

    def __repr__(self) -> str:
        return f"{self.side}: {len(self.live)} regions, top {self.top}"


class End:
    """One end: its live allocations in order, and its pointer."""

    def __init__(self, side: str, start: int) -> None:
        self.side, self.start, self.top = side, start, start
        self.live: list[Allocation] = []


@dataclass
class Counter:
    """What a profile counts of one quantity."""

    current: int = 0
    peak: int = 0
    allocated: int = 0
    freed: int = 0

    def add(self, amount: int) -> None:
        """Count what was allocated, or freed if negative."""
        self.current += amount
        self.peak = max(self.peak, self.current)
        if amount > 0:
            self.allocated += amount
        else:
            self.freed -= amount


class Ledger:
    """What a profile should show, over all labels and for each."""

    def __init__(self) -> None:
        self.counts: dict[object, tuple[Counter, Counter, Counter]] = {}  # bytes, padded bytes, regions
        self.n_failed: dict[object, int] = {}

    def add(self, label: str | None, *amounts: int) -> None:
        """Count bytes, padded bytes and regions."""
        for key in (Ledger, label):  # the class stands for all labels together, which is no label
            for counter, amount in zip(self._counters(key), amounts, strict=True):
                counter.add(amount)

    def fail(self, label: str | None) -> None:
        """Count a request that did not fit."""
        for key in (Ledger, label):
            self._counters(key)
            self.n_failed[key] = self.n_failed.get(key, 0) + 1

    def _counters(self, key: object) -> tuple[Counter, Counter, Counter]:
        return self.counts.setdefault(key, (Counter(), Counter(), Counter()))


@dataclass
class PinModel:
    """Where the pointers were at most while the pin was open, and its entries on the ends when it is kept.

    An end on which nothing was handed out has neither.
    """

    furthest: dict[str, int] = field(default_factory=dict)
    entries: dict[str, Allocation] = field(default_factory=dict)


class ArenaModel:
    """An arena of `capacity` bytes from `start` on in `memory`, which its parents and children share."""

    def __init__(
        self, memory: bytearray, start: int, capacity: int, address: int, alignment: int,
        *, guard: int = 0, poison: bool = False, draws_gaps: bool = False, strict: bool = False,
    ) -> None:  # fmt: skip
        self.memory, self.start, self.capacity = memory, start, capacity
        self.address, self.alignment = address, alignment
        self.guard, self.poison, self.draws_gaps, self.strict = guard, poison, draws_gaps, strict
        self.low, self.high = End("low", 0), End("high", capacity)
        self.era = object()
        self.given_back = bytearray(capacity)  # 1 where memory was given back and is free
        self.n_allocs = self.n_failed = self.n_bytes = 0
        self.peak = self.peak_used = self.peak_regions = 0
        self.open_pin: PinModel | None = None
        self.pins: list[PinModel] = []  # kept, and not released
        self.ledger: Ledger | None = None

    @property
    def settings(self) -> dict[str, int]:
        """What a child has in common with its parent."""
        return {
            "guard": self.guard,
            "poison": self.poison,
            "draws_gaps": self.draws_gaps,
            "strict": self.strict,
        }

    # -- what there is ------------------------------------------------------------------------------------------

    def end(self, side: str) -> End:
        """Return one of the ends."""
        return self.low if side == "low" else self.high

    @property
    def live(self) -> list[Allocation]:
        """All live allocations."""
        return self.low.live + self.high.live

    @property
    def used(self) -> int:
        """Bytes of the live allocations."""
        return sum(allocation.nbytes for allocation in self.live)

    @property
    def taken(self) -> int:
        """Bytes that are not between the ends."""
        return self.low.top + self.capacity - self.high.top

    def figures(self) -> dict[str, int]:
        """Return what the statistics should be, by name."""
        used, n_regions = self.used, len(self.live)
        return {
            "capacity": self.capacity,
            "top": self.low.top,
            "high": self.high.top,
            "used": used,
            "padding": self.taken - used,
            "available": self.capacity - self.taken,
            "n_regions": n_regions,
            "committed": self.capacity,
            "peak": self.peak,
            "peak_used": self.peak_used,
            "peak_regions": self.peak_regions,
            "n_allocs_total": self.n_allocs,
            "n_freed_total": self.n_allocs - n_regions,
            "n_failed": self.n_failed,
            "bytes_requested_total": self.n_bytes,
            "bytes_freed_total": self.n_bytes - used,
        }

    def by_label(self) -> dict[str | None, int]:
        """Return the bytes of the live allocations by label."""
        sums: dict[str | None, int] = {}
        for allocation in self.live:
            sums[allocation.label] = sums.get(allocation.label, 0) + allocation.nbytes
        return sums

    def bytes_of(self, allocation: Allocation) -> bytes:
        """Return the contents of an allocation."""
        return bytes(self.memory[self.start + allocation.offset : self.start + allocation.stop])

    def write(self, start: int, contents: bytes) -> None:
        """Set bytes from `start` on."""
        self.memory[self.start + start : self.start + start + len(contents)] = contents

    def fill(self, span: range, byte: int) -> None:
        """Set all bytes of a range."""
        self.write(span.start, bytes([byte]) * len(span))

    # -- allocation ---------------------------------------------------------------------------------------------

    def place(self, side: str, nbytes: int, align: int) -> int | None:
        """Return the offset of a request, or None if it does not fit."""
        if not nbytes:
            return self.end(side).top
        if side == "low":
            offset = self.low.top
            offset += -(self.address + offset) % align
            return offset if offset + nbytes <= self.high.top else None
        offset = self.high.top - self.guard - nbytes
        offset -= (self.address + offset) % align
        return offset if offset >= self.low.top else None

    def top_behind(self, side: str, offset: int, nbytes: int) -> int:
        """Return where a pointer stands after a region at `offset`."""
        if side == "low" and nbytes:  # a guard zone is cut where the other end begins
            return min(offset + nbytes + self.guard, self.high.top)
        return offset

    def take(
        self, side: str, nbytes: int, align: int, label: str | None, contents: bytes | None = None
    ) -> Allocation:
        """Allocate what fits, with contents or without."""
        offset, end = self.place(side, nbytes, align), self.end(side)
        assert offset is not None, "the model has room"
        top = self.top_behind(side, offset, nbytes)
        allocation = Allocation(side, offset, nbytes, align, label, end.top, top)
        if contents is not None:
            self.write(offset, contents)
        elif self.poison:
            self.fill(range(offset, offset + nbytes), POISON)
        self._enter(end, allocation)
        return allocation

    def _enter(self, end: End, allocation: Allocation) -> None:
        if self.draws_gaps:
            for gap in allocation.gaps:
                self.fill(gap, GUARD)
        self._moved(end, allocation.top)
        end.live.append(allocation)
        self.n_allocs += 1
        self._count(allocation.label, allocation.nbytes, allocation.taken, 1)

    def _count(self, label: str | None, nbytes: int, padded: int, n_regions: int) -> None:
        self.n_bytes += nbytes
        if self.ledger is not None:
            self.ledger.add(label, nbytes, padded, n_regions)

    def _moved(self, end: End, top: int) -> None:
        """Let a pointer go into free memory."""
        a, b = sorted((end.top, top))
        self.given_back[a:b] = bytes(b - a)
        end.top = top
        if self.open_pin is not None:
            further, furthest = max if end.side == "low" else min, self.open_pin.furthest
            furthest[end.side] = further(furthest.get(end.side, top), top)

    def note_peaks(self) -> None:
        """Take the high-water marks; to be called before each figure and each drop."""
        self.peak = max(self.peak, self.taken)
        self.peak_used = max(self.peak_used, self.used)
        self.peak_regions = max(self.peak_regions, len(self.live))

    def fail(self, label: str | None) -> None:
        """Count a request that did not fit."""
        self.n_failed += 1
        if self.ledger is not None:
            self.ledger.fail(label)

    def can_extend(self, allocation: Allocation) -> bool:
        """Return whether a region may grow at all: the last of the low end, no checkpoint behind it."""
        return bool(self.low.live) and self.low.live[-1] is allocation and not allocation.marked

    def extend(self, allocation: Allocation, nbytes: int) -> None:
        """Grow the last region to `nbytes`, which fit."""
        old_stop, old_taken, more = allocation.stop, allocation.taken, nbytes - allocation.nbytes
        allocation.nbytes = nbytes
        allocation.top = min(allocation.stop + self.guard, self.high.top)
        if self.poison:
            self.fill(range(old_stop, allocation.stop), POISON)
        if self.draws_gaps:
            self.fill(range(allocation.stop, allocation.top), GUARD)
        self._moved(self.low, allocation.top)
        self._count(allocation.label, more, allocation.taken - old_taken, 0)

    # -- positions ----------------------------------------------------------------------------------------------

    def saved(self, side: str) -> Saved:
        """Return the position of an end, as a checkpoint takes it."""
        end = self.end(side)
        for allocation in end.live:
            allocation.marked = True
        return Saved(self.era, side, tuple(end.live), end.top)

    def is_valid(self, saved: Saved) -> bool:
        """Return whether a checkpoint can be used: everything below it is still there."""
        return saved.era is self.era and tuple(self.end(saved.side).live[: len(saved.live)]) == saved.live

    def above(self, saved: Saved) -> list[Allocation]:
        """Return what a rollback would drop."""
        return self.end(saved.side).live[len(saved.live) :]

    def is_pinned(self, dropped: Iterable[Allocation]) -> bool:
        """Return whether memory of a pin, of a child's too, is among what would be dropped."""
        dropped = list(dropped)
        mine = any(entry in dropped for pin in self.pins for entry in pin.entries.values())
        return mine or any(
            allocation.child is not None
            and (allocation.child.pins or allocation.child.is_pinned(allocation.child.live))
            for allocation in dropped
        )

    def drop(self, saved: Saved) -> None:
        """Return to a position."""
        self.note_peaks()
        end = self.end(saved.side)
        for allocation in self.above(saved):
            if self.ledger is not None:
                self.ledger.add(allocation.label, -allocation.nbytes, -allocation.taken, -1)
        a, b = sorted((saved.top, end.top))
        if self.poison:
            self.fill(range(a, b), POISON)
            self.given_back[a:b] = b"\1" * (b - a)
        end.live, end.top = list(saved.live), saved.top

    def restore(self, saved: Saved, allocations: Sequence[Allocation], top: int, contents: bytes) -> None:
        """Bring back what lay above a position, as if it had never gone."""
        end = self.end(saved.side)
        self.write(min(saved.top, top), contents)
        self._moved(end, top)
        end.live += allocations
        for allocation in allocations:
            if self.ledger is not None:
                self.ledger.add(allocation.label, allocation.nbytes, allocation.taken, 1)

    # -- pins ---------------------------------------------------------------------------------------------------

    def begin_pin(self) -> None:
        """Note from now on how far the pointers go."""
        self.open_pin = PinModel()

    def end_pin(self, label: str | None, *, failed: bool) -> PinModel:
        """Take what lies between the pointers and where they were at most; nothing after a failure."""
        pin, self.open_pin = self.open_pin, None
        assert pin is not None, "a pin is open"
        if not failed:
            for end in (self.low, self.high):
                if end.side not in pin.furthest:
                    continue
                furthest = pin.furthest[end.side]  # what both ends had in turn is the low end's
                furthest = min(furthest, self.high.top) if end is self.low else max(furthest, self.low.top)
                offset, nbytes = min(furthest, end.top), abs(furthest - end.top)
                entry = Allocation(
                    end.side, offset, nbytes, 1, f"pin {label}" if label else "pin", end.top, furthest
                )
                self._enter(end, entry)
                pin.entries[end.side] = entry
            self.pins.append(pin)
        return pin

    # -- damage, in debug mode ----------------------------------------------------------------------------------

    def damaged_gaps(self, allocations: Iterable[Allocation]) -> list[list[int]]:
        """Return the bytes that are wrong, for each gap that has any."""
        if not self.draws_gaps:
            return []
        gaps = [gap for allocation in allocations for gap in allocation.gaps]
        found = [[at for at in gap if self.memory[self.start + at] != GUARD] for gap in gaps]
        return [wrong for wrong in found if wrong]

    def damaged_free(self, span: range | None = None) -> list[int]:
        """Return the bytes of free memory that were written after they were given back."""
        span = range(self.capacity) if span is None else span
        return [at for at in span if self.given_back[at] and self.memory[self.start + at] != POISON]

    def damaged_place(self, side: str, nbytes: int, align: int) -> list[int]:
        """Return the bytes of free memory that are wrong where a request goes, its gaps included."""
        offset = self.place(side, nbytes, align)
        if offset is None:
            return []
        return self.damaged_free(range(*sorted((self.end(side).top, self.top_behind(side, offset, nbytes)))))

    def mend(self, allocations: Iterable[Allocation], free: Iterable[int]) -> None:
        """Let the damage of these be as if it had never been."""
        for wrong in self.damaged_gaps(allocations):
            for at in wrong:
                self.fill(range(at, at + 1), GUARD)
        for at in free:
            self.fill(range(at, at + 1), POISON)
