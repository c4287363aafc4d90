"""What lives inside a region and dies with it: child arenas and frames."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from gpuarena._stack import SIDES, Drop, Hook
from gpuarena.backends.part import PartBackend
from gpuarena.errors import PinnedError

if TYPE_CHECKING:
    from gpuarena.arena import Arena
    from gpuarena.frames import Frame
    from gpuarena.region import Region


class Dependents(Hook):
    """The children and frames of an arena, by the region that holds them.

    A child is kept while its region lives, because a stream or a graph may use its memory when nobody has it any
    more. A frame is referred to weakly: it holds the arena.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = weakref.proxy(arena)
        self._children: dict[tuple[str, int], Arena] = {}
        self._frames: dict[tuple[str, int], list[weakref.ref[Frame]]] = {}

    def add_child(self, region: Region, child: Arena) -> None:
        """Let a child die with its region."""
        self._children[region._stack.side, region._slot] = child

    def add_frame(self, region: Region, frame: Frame) -> None:
        """Let a frame die with a region."""
        self._frames.setdefault((region._stack.side, region._slot), []).append(weakref.ref(frame))

    def any_above(self, side: str, n_live: int) -> bool:
        """Return whether there are children or frames in the slots from `n_live` on."""
        return bool(self._children_above(side, n_live) or self._frames_above(side, n_live))

    def _children_above(self, side: str, n_live: int) -> list[Arena]:
        return [child for (end, slot), child in self._children.items() if end == side and slot >= n_live]

    def _frames_above(self, side: str, n_live: int) -> list[Frame]:
        return [
            frame
            for (end, slot), refs in self._frames.items()
            if end == side and slot >= n_live
            for ref in refs
            if (frame := ref()) is not None
        ]

    def _subtree(self, drop: Drop) -> list[Arena]:
        """Return the arenas in regions that go, and those in them."""
        found, todo = [], self._children_above(drop.stack.side, drop.n_live)
        while todo:
            child = todo.pop()
            if not child._closed:
                found.append(child)
                if child._dependents is not None:
                    todo += child._dependents._children.values()
        return found

    def uses(self, drop: Drop) -> dict[Hashable, Any]:
        """Return the streams that used regions of children that go."""
        found: dict[Hashable, Any] = {}
        for child in self._subtree(drop):
            if child._order is not None:
                for side in SIDES:
                    found.update(child._order.uses_of(side, 0))
        return found

    def refuse_drop(self, drop: Drop) -> None:
        """Refuse to end a child that a graph uses; let frames go of their arrays, which they can make again."""
        subtree = self._subtree(drop)
        for child in subtree:
            if child.pins:
                raise PinnedError(
                    f"{drop.cause} would end {child!r}, in which {child.pins[0]!r} keeps memory for a graph",
                    pin=child.pins[0],
                )
        if self._arena._tracker is not None:  # which would see them as somebody's
            frames = self._frames_above(drop.stack.side, drop.n_live)
            for child in subtree:
                if child._dependents is not None:
                    frames += child._dependents._frames_above("low", 0)
                    frames += child._dependents._frames_above("high", 0)
            for frame in frames:
                frame._let_go()

    def after_drop(self, drop: Drop) -> list[Warning]:
        """End what lived in the dropped regions."""
        side, n_live = drop.stack.side, drop.n_live
        for frame in self._frames_above(side, n_live):
            frame._let_go()
        warned = [
            warning for child in self._children_above(side, n_live) for warning in child._close(drop.cause)
        ]
        for kept in (self._children, self._frames):
            for key in [key for key in kept if key[0] == side and key[1] >= n_live]:
                del kept[key]
        return warned

    def let_go(self) -> None:
        """Let all frames go of their arrays."""
        for side in SIDES:
            for frame in self._frames_above(side, 0):
                frame._let_go()

    def closing(self) -> list[Warning]:
        """End everything with the arena."""
        self.let_go()
        children = list(self._children.values())
        self._children, self._frames = {}, {}
        cause = self._arena._cause_of_death
        return [warning for child in children for warning in child._close(cause)]


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
        dependents_of(arena).add_child(region, child)
        return child
