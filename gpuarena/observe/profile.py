"""Counting what a piece of a program allocates."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

from gpuarena._stack import Drop, Record, Stack, Take, Watcher
from gpuarena._units import format_nbytes, grouped
from gpuarena.errors import CheckpointError, refuse_copy

if TYPE_CHECKING:
    from gpuarena.arena import Arena
    from gpuarena.dtypes import DType


@dataclass(slots=True)
class Counter:
    """Four figures of one quantity since the profile began.

    `current` is ``allocated - freed``. It is negative when more was freed than allocated, which a profile that is
    begun inside a scope can see.
    """

    current: int = 0
    peak: int = 0
    allocated: int = 0
    freed: int = 0

    def add(self, amount: int) -> None:
        """Count something allocated."""
        self.allocated += amount
        self.current += amount
        if self.current > self.peak:
            self.peak = self.current

    def remove(self, amount: int) -> None:
        """Count something freed."""
        self.freed += amount
        self.current -= amount


@dataclass(slots=True)
class Counters:
    """What was allocated and freed: requested bytes, those with their padding, and regions."""

    nbytes: Counter = field(default_factory=Counter)
    """Bytes as requested."""
    padded: Counter = field(default_factory=Counter)
    """Bytes that the regions took, alignment and guard zones included."""
    regions: Counter = field(default_factory=Counter)
    """Number of regions."""
    n_failed: int = 0
    """Requests refused for lack of memory."""


class Profile(Watcher):
    """What ``arena.profile(name)`` returns: counters that run while its block does.

    Attributes
    ----------
    name : str or None
    nbytes, padded, regions : Counter
        Requested bytes, bytes with padding, and number of regions, over all labels.
    n_failed : int
        Requests refused for lack of memory.
    by_label : dict of label to Counters
    """

    def __init__(self, arena: Arena, name: str | None) -> None:
        self._arena = arena
        self._state = "new"
        self.name = name
        self.total = Counters()
        self.by_label: dict[str | None, Counters] = {}

    def __repr__(self) -> str:
        name = "" if self.name is None else f"{self.name!r}, "
        return f"Profile({name}{self.regions.allocated} regions, peak {format_nbytes(self.nbytes.peak)})"

    def __str__(self) -> str:
        """The figures as a table, a line for each label, those with the highest peak first."""
        heads = ("label", "regions", "peak", "allocated", "freed", "refused")
        by_peak = sorted(self.by_label.items(), key=lambda item: (-item[1].nbytes.peak, item[0] or ""))
        rows = [
            heads,
            *(_row(label or "-", counters) for label, counters in by_peak),
            _row("all", self.total),
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
        lines = (
            "  ".join(
                [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
            )
            for row in rows
        )
        return "\n".join(line.rstrip() for line in lines)

    @property
    def nbytes(self) -> Counter:
        """Bytes as requested."""
        return self.total.nbytes

    @property
    def padded(self) -> Counter:
        """Bytes that the regions took."""
        return self.total.padded

    @property
    def regions(self) -> Counter:
        """Number of regions."""
        return self.total.regions

    @property
    def n_failed(self) -> int:
        """Requests refused for lack of memory."""
        return self.total.n_failed

    def __enter__(self) -> Profile:
        """Begin to count; a profile can be entered once."""
        with self._arena._lock:
            if self._state != "new":
                raise CheckpointError("a profile counts once; make another with arena.profile()")
            if self._arena._closed:
                raise self._arena._closed_error("profile")
            self._state = "running"
            self._arena._attach(self)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        """Stop counting; the figures stay."""
        with self._arena._lock:
            self._state = "ended"
            self._arena._detach(self)

    # -- what happens -------------------------------------------------------------------------------------------

    def _both(self, label: str | None) -> tuple[Counters, Counters]:
        of_label = self.by_label.get(label)
        if of_label is None:
            of_label = self.by_label[label] = Counters()
        return self.total, of_label

    def after_take(self, take: Take) -> None:
        """Count a region."""
        self._add(take.label, take.nbytes, abs(take.new_top - take.old_top), 1)

    def took(self, stack: Stack, slot: int, record: Record, shape: tuple[int, ...], dtype: DType) -> None:
        """Count a region."""
        before = stack.records[slot - 1].top if slot else stack.start
        self._add(record.label, record.nbytes, record.top - before, 1)

    def _add(self, label: str | None, nbytes: int, padded: int, n_regions: int) -> None:
        for counters in self._both(label):
            counters.nbytes.add(nbytes)
            counters.padded.add(padded)
            counters.regions.add(n_regions)

    def extended(self, stack: Stack, slot: int, old: Record) -> None:
        """Count the bytes that a region grew by."""
        new = stack.records[slot]
        self._add(new.label, new.nbytes - old.nbytes, new.top - old.top, 0)

    def before_drop(self, drop: Drop) -> None:
        """Count the regions that go."""
        self._count_dropped(drop.stack, drop.n_live)

    def _count_dropped(self, stack: Stack, n_live: int) -> None:
        records = stack.records
        for slot in range(n_live, len(records)):
            before = records[slot - 1].top if slot else stack.start
            for counters in self._both(records[slot].label):
                counters.nbytes.remove(records[slot].nbytes)
                counters.padded.remove(abs(records[slot].top - before))
                counters.regions.remove(1)

    def restored(self, stack: Stack, n_live: int, known: Any) -> None:
        """Count the regions that are back."""
        for slot in range(n_live, len(stack.records)):
            before = stack.records[slot - 1].top if slot else stack.start
            record = stack.records[slot]
            self._add(record.label, record.nbytes, abs(record.top - before), 1)

    def marking(self) -> Any:
        """Return the counters as they are."""
        return copy.deepcopy((self.total, self.by_label))

    def undone(self, mark: Any) -> None:
        """Bring the counters back; a request that failed did fail."""
        total, by_label = mark
        for label, counters in self.by_label.items():
            before = by_label.setdefault(label, Counters())
            before.n_failed = counters.n_failed
        total.n_failed = self.total.n_failed
        self.total = total
        self.by_label = {label: c for label, c in by_label.items() if c != Counters()}

    def closing(self) -> None:
        """Count everything as freed."""
        for stack in (self._arena._low, self._arena._high):
            if stack.serials:
                self._count_dropped(stack, 0)

    def failed(self, stack: Stack, nbytes: int, align: int, label: str | None) -> None:
        """Count a refusal."""
        for counters in self._both(label):
            counters.n_failed += 1

    def __reduce__(self) -> Any:
        raise refuse_copy(self)


def _row(label: str, counters: Counters) -> tuple[str, ...]:
    nbytes, regions = counters.nbytes, counters.regions
    figures = (regions.allocated, nbytes.peak, nbytes.allocated, nbytes.freed, counters.n_failed)
    return label, *map(grouped, figures)
