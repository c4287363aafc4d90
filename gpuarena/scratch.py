"""Temporaries that cannot collide with a caller's result."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from gpuarena._stack import SIDES
from gpuarena.checkpoint import Scope
from gpuarena.errors import ArgumentError, ArgumentTypeError, CheckpointError, refuse_copy

if TYPE_CHECKING:
    from gpuarena.arena import Arena
    from gpuarena.region import Region

__all__ = ["Scratch"]


class Scratch:
    """One end of an arena for the length of a block, made by `Arena.scratch`; it allocates as the arena does.

    What it allocates goes at the end of the block. It can be given on as somebody's place for a result, and as a
    conflict to the next `scratch`.
    """

    def __init__(self, arena: Arena, side: str, label: str | None) -> None:
        self.arena = arena
        self.side = side
        self._scope = Scope(arena, label, side)

    def __enter__(self) -> Scratch:
        self._scope.__enter__()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        """Roll the end back; errors as at the end of a scope."""
        self._scope._leave(exc, sys._getframe(1))

    def _check_open(self) -> None:
        if self._scope._state != "open":
            raise CheckpointError(f"{self!r} is not open: use it inside its `with` block")

    def alloc(self, shape: Any, dtype: Any, **options: Any) -> Region:
        """Return a region on this end; see `Arena.alloc`."""
        self._check_open()
        return self.arena.alloc(shape, dtype, side=self.side, **options)

    def empty(self, shape: Any, dtype: Any, **options: Any) -> Any:
        """Return a native array on this end; see `Arena.empty`."""
        self._check_open()
        return self.arena.empty(shape, dtype, side=self.side, **options)

    def zeros(self, shape: Any, dtype: Any, **options: Any) -> Any:
        """Return a native array of zeros on this end; see `Arena.zeros`."""
        self._check_open()
        return self.arena.zeros(shape, dtype, side=self.side, **options)

    def full(self, shape: Any, value: Any, dtype: Any, **options: Any) -> Any:
        """Return a filled native array on this end; see `Arena.full`."""
        self._check_open()
        return self.arena.full(shape, value, dtype, side=self.side, **options)

    def from_array(self, values: Any, **options: Any) -> Region:
        """Return a region on this end with a copy of `values`; see `Arena.from_array`."""
        self._check_open()
        return self.arena.from_array(values, side=self.side, **options)

    def scratch(self, *, conflicts: Iterable[Any] = (), label: str | None = None) -> Scratch:
        """Return a context manager as `Arena.scratch` does."""
        return self.arena.scratch(conflicts=conflicts, label=label)

    def __repr__(self) -> str:
        return f"<scratch on the {self.side} end of {self.arena!r}>"

    def __reduce__(self) -> Any:
        raise refuse_copy(self)


def make_scratch(arena: Arena, conflicts: Iterable[Any], label: str | None) -> Scratch:
    """Choose an end that no conflict uses; see `Arena.scratch`."""
    from gpuarena._state import check_text
    from gpuarena.arena import Arena

    check_text(label, "label")
    if arena.closed:
        raise arena._closed_error("scratch")
    taken = set()
    for conflict in conflicts:
        if isinstance(conflict, Scratch):
            if conflict.arena is arena:
                taken.add(conflict.side)
        elif not isinstance(conflict, Arena):
            raise ArgumentTypeError(
                f"scratch: a conflict is an Arena or a Scratch, not {type(conflict).__name__}"
            )
        elif conflict is arena:
            taken.add("low")
    free = [side for side in SIDES if side not in taken]
    if not free:
        raise ArgumentError(
            "scratch: both ends of the arena are in conflict; make a child of one, or another arena"
        )
    if free[0] == "high":
        arena._check_side("high")  # a growable arena has none
    return Scratch(arena, free[0], label)
