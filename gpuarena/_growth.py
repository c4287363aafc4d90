"""Memory that is committed as the pointer advances."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from gpuarena._stack import Drop, Hook, Take

if TYPE_CHECKING:
    from gpuarena.arena import Arena
    from gpuarena.backends.separate import SeparateBackend


class Growth(Hook):
    """Commits memory before a region is taken."""

    def __init__(self, arena: Arena) -> None:
        self._arena = weakref.proxy(arena)

    def before_take(self, take: Take) -> None:
        """Back the region with memory; `OutOfMemoryError` and `CaptureError` come from the backend."""
        backend = self._arena._backend
        if take.new_top > backend.committed:
            backend.commit(take.new_top)


class Separation(Hook):
    """Makes a buffer for every region, and lets it go with the region."""

    def __init__(self, arena: Arena, backend: SeparateBackend) -> None:
        self._arena = weakref.proxy(arena)
        self._backend = backend

    def before_take(self, take: Take) -> None:
        """Make the buffer; `OutOfMemoryError` comes from its library."""
        self._backend.provide(take.offset, take.nbytes, max(take.align, self._arena.alignment))

    def after_drop(self, drop: Drop) -> None:
        """Let the buffers of the dropped regions go."""
        self._backend.drop(*sorted((drop.old_top, drop.new_top)))
