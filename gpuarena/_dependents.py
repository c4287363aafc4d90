"""What lives inside a region and dies with it: child arenas and frames."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, Protocol

from gpuarena._stack import Cause, Drop, Hook
from gpuarena.backends.part import PartBackend
from gpuarena.errors import ArenaError, PinnedError

if TYPE_CHECKING:
    from gpuarena.arena import Arena
    from gpuarena.region import Region


class Dependent(Protocol):
    """Something that dies with a region."""

    def _close(self, cause: Cause | None) -> None:
        """End it; must not raise."""


class Dependents(Hook):
    """The children and frames of an arena, by the region that holds them.

    They are referred to weakly: a child that nobody has any more needs no end.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = weakref.proxy(arena)
        self._by_slot: dict[tuple[str, int], list[weakref.ref[Any]]] = {}

    def add(self, region: Region, dependent: Dependent) -> None:
        """Let `dependent` die with `region`."""
        kept = self._by_slot.setdefault((region._stack.side, region._slot), [])
        kept.append(weakref.ref(dependent))

    def above(self, side: str, n_live: int) -> list[Any]:
        """Return those in slots from `n_live` on that are alive."""
        return [
            dependent
            for (end, slot), refs in self._by_slot.items()
            if end == side and slot >= n_live
            for ref in refs
            if (dependent := ref()) is not None
        ]

    def uses(self, drop: Drop) -> dict[Hashable, Any]:
        """Return the streams that used regions of children that go."""
        found: dict[Hashable, Any] = {}
        for child in self.children(drop):
            if child._order is not None:
                for side in ("low", "high"):
                    found.update(child._order.uses_of(side, 0))
        return found

    def children(self, drop: Drop) -> list[Arena]:
        """Return the arenas in regions that go, and those in them."""
        from gpuarena.arena import Arena

        found, todo = [], self.above(drop.stack.side, drop.n_live)
        while todo:
            dependent = todo.pop()
            if isinstance(dependent, Arena) and not dependent._closed:
                found.append(dependent)
                if dependent._dependents is not None:
                    for side in ("low", "high"):
                        todo += dependent._dependents.above(side, 0)
        return found

    def before_drop(self, drop: Drop) -> ArenaError | Warning | None:
        """Refuse to end a child that a graph uses; let frames go of their arrays, which they can make again."""
        from gpuarena.frames import Frame

        if self._arena._tracker is not None:
            for dependent in self.above(drop.stack.side, drop.n_live):
                if isinstance(dependent, Frame):
                    dependent._close(None)
        for child in self.children(drop):
            if child.pins:
                raise PinnedError(
                    f"{drop.cause} would end {child!r}, in which {child.pins[0]!r} keeps memory for a graph",
                    pin=child.pins[0],
                )
        return None

    def after_drop(self, drop: Drop) -> None:
        """End what lived in the dropped regions."""
        for dependent in self.above(drop.stack.side, drop.n_live):
            dependent._close(drop.cause)
        for key in [key for key in self._by_slot if key[0] == drop.stack.side and key[1] >= drop.n_live]:
            del self._by_slot[key]

    def closing(self) -> Warning | None:
        """End everything with the arena."""
        for side in ("low", "high"):
            for dependent in self.above(side, 0):
                dependent._close(self._arena._cause_of_death)
        return None


def dependents_of(arena: Arena) -> Dependents:
    """Return the dependents of an arena, which is asked to look after them from now on."""
    if arena._dependents is None:
        arena._dependents = Dependents(arena)
        arena._drop_hooks.append(arena._dependents)
        if arena._order is not None:
            arena._order.attend()  # a child may be used on other streams
    return arena._dependents


def make_child(arena: Arena, nbytes: int, alignment: int, name: str | None, side: str) -> Arena:
    """Return an arena over a region of `arena`; see `Arena.child`."""
    with arena._lock:
        region = arena.alloc((nbytes,), "uint8", align=alignment, label=name, side=side)
        child = type(arena).__new__(type(arena))
        backend = PartBackend(arena._backend, region.offset, nbytes)
        child._setup(backend, alignment, name, arena._debug_settings, arena.stream, region)
        dependents_of(arena).add(region, child)
        return child
