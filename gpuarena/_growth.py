"""Memory that is committed as the pointer advances."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from gpuarena._stack import Drop, Hook, Record, Stack, Take
from gpuarena.errors import CheckpointError

if TYPE_CHECKING:
    from gpuarena.arena import Arena
    from gpuarena.backends import Backend
    from gpuarena.backends.separate import SeparateBackend


class Growth(Hook):
    """Commits memory before a region is taken."""

    def __init__(self, arena: Arena) -> None:
        self._arena = weakref.proxy(arena)

    def before_take(self, take: Take) -> None:
        """Back the region with memory; `OutOfMemoryError` and `CaptureError` come from the backend."""
        backend = self._arena._backend
        if not take.lazy and take.new_top > backend.committed:
            backend.commit(take.new_top)


class Separation(Hook):
    """Makes a buffer for every region, and lets it go with the region."""

    def __init__(self, arena: Arena, backend: SeparateBackend) -> None:
        self._arena = weakref.proxy(arena)
        self._backend = backend
        self._pinned: list[Backend] = []  # of regions that are gone, but used by a graph

    def before_take(self, take: Take) -> None:
        """Make the buffer; `OutOfMemoryError` comes from its library."""
        if take.growing:
            raise CheckpointError(
                "a region cannot be extended in debug mode with separate=True: its buffer is as long as it is"
            )
        self._backend.provide(take.offset, take.nbytes, max(take.align, self._arena.alignment))

    def after_drop(self, drop: Drop) -> None:
        """Let the buffers of the dropped regions go."""
        pins = self._arena._pins
        keep = pins is not None and pins.keeps_memory
        start, stop = sorted((drop.old_top, drop.new_top))
        dropped = self._backend.drop(start, stop, keep=keep)
        self._pinned = self._pinned + dropped if keep else []

    def spilling(self, stack: Stack, n_live: int) -> Any:
        """Return the alignments of the buffers that go."""
        return [self._backend.alignment_of(record.offset) for record in stack.records[n_live:]]

    def restoring(self, records: list[Record], known: Any) -> None:
        """Make buffers for the regions that come back."""
        for record, alignment in zip(records, known, strict=True):
            self._backend.provide(record.offset, record.nbytes, alignment)
