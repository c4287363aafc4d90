"""Positions of an arena, and the scope that returns to one."""

from __future__ import annotations

import sys
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from gpuarena.errors import ArenaError, CheckpointError, CorruptionError, LiveArraysError, refuse_copy

if TYPE_CHECKING:
    from gpuarena.arena import Arena

__all__ = ["Checkpoint", "Scope"]


class Checkpoint:
    """A position of one end of an arena, made by `Arena.checkpoint`: a value, of which the arena keeps no list.

    It is dead once the arena was rolled back below it. `top` is the end's pointer in bytes, `side` the end.
    """

    __slots__ = ("_epoch", "_kept", "_n_live", "_serial", "_token", "_used", "side", "top")

    def __init__(
        self, token: object, epoch: int, side: str, n_live: int, serial: int, top: int, used: int
    ) -> None:
        self._token = token  # identifies the arena without keeping it alive
        self._epoch = epoch
        self._n_live = n_live
        self._serial = serial  # of the last region below, so that a reused slot is told apart
        self._used = used
        self._kept: str | None = None
        self.side = side
        self.top = top

    def __repr__(self) -> str:
        side = "" if self.side == "low" else f", side={self.side!r}"
        return f"Checkpoint(top={self.top}, n_regions={self._n_live}{side})"

    def __reduce__(self) -> Any:
        raise refuse_copy(self)


class Scope:
    """What ``arena.scope()`` returns: a checkpoint on entry, a rollback to it on exit."""

    __slots__ = ("_arena", "_checkpoint", "_state", "label", "side")

    def __init__(self, arena: Arena, label: str | None, side: str) -> None:
        self._arena = arena
        self._checkpoint: Checkpoint | None = None
        self._state = "new"
        self.label = label
        self.side = side

    def __repr__(self) -> str:
        return f"scope {self.label!r}" if self.label else "an unnamed scope"

    def __enter__(self) -> Scope:
        """Take the checkpoint; a scope can be entered once."""
        if self._state != "new":
            raise CheckpointError(f"{self!r} was entered before; make another with arena.scope()")
        arena = self._arena
        with arena._lock:
            self._checkpoint = arena.checkpoint(self.side)
            arena._scopes.append(self)
            self._state = "open"
            if arena._hooks:
                for hook in arena._hooks:
                    hook.scope_opened(self)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        """Roll back, also when an exception passes, which goes on unchanged."""
        self._leave(exc, sys._getframe(1))

    def _leave(self, exc: BaseException | None, frame: FrameType) -> None:
        self._state = "closed"
        try:
            self._arena._exit(self, frame)
        except ArenaError as error:
            if exc is None:
                raise
            if isinstance(error, (CorruptionError, LiveArraysError)):  # both may explain the other
                exc.add_note(str(error))
            # An exception that is on its way says more than ours would.
        except ReferenceError:
            # A generator that is collected in one cycle with its arena ends its scopes when there is nothing left.
            pass

    def __reduce__(self) -> Any:
        raise refuse_copy(self)
