"""Who still refers to the native arrays of an arena."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from gpuarena._stack import Drop, Hook, Record, Stack, Take
from gpuarena.errors import ArenaError, LiveArraysError, LiveArraysWarning

if TYPE_CHECKING:
    from gpuarena.arena import Arena
    from gpuarena.backends import Backend
    from gpuarena.dtypes import DType
    from gpuarena.region import Region

_Key = tuple[str, int]  # end, slot


class _Left(NamedTuple):
    """An array that outlived its region."""

    owner: weakref.ref[Any]
    start: int
    stop: int
    label: str | None


class Tracker(Hook):
    """Keeps the arena's native arrays by weak reference, so that those alive are those that others hold.

    A region then makes its array anew when nobody has it any more. In an arena that is not tracked the arena and
    its regions hold the arrays themselves, which is faster.
    """

    def __init__(self, arena: Arena, on_live_arrays: str = "ignore") -> None:
        self._arena = weakref.proxy(arena)
        self.on_live_arrays = on_live_arrays
        self._roots: dict[_Key, dict[str, weakref.ref[Any]]] = {}  # by library
        self._owners: dict[_Key, list[weakref.ref[Any]]] = {}
        self._left: list[_Left] = []
        self._leaving: dict[str, list[_Left]] = {}  # of the drop that is under way, by end

    # -- arrays -------------------------------------------------------------------------------------------------

    def new_root(self, stack: Stack, slot: int, offset: int, shape: tuple[int, ...], dtype: DType) -> Any:
        """Return a fresh root array of the backend's library."""
        return self._new(self._arena._backend, (stack.side, slot), offset, shape, dtype)

    def root(self, region: Region, backend: Backend) -> Any:
        """Return the root array of a live root region: the one somebody holds, or a fresh one."""
        key = region._stack.side, region._slot
        kept = self._roots.get(key, {}).get(backend.name)
        array = None if kept is None else kept()
        if array is None:
            array = self._new(backend, key, region.offset, region.shape, region.dtype)
        return array

    def _new(self, backend: Backend, key: _Key, offset: int, shape: tuple[int, ...], dtype: DType) -> Any:
        array, owner = backend.tracked_root(offset, shape, dtype)
        self._roots.setdefault(key, {})[backend.name] = weakref.ref(array)
        owners = self._owners.setdefault(key, [])
        owners[:] = [ref for ref in owners if ref() is not None]
        owners.append(weakref.ref(owner))
        return array

    def alive(self, stack: Stack, n_live: int) -> list[_Left]:
        """Return the arrays of the slots from `n_live` on that somebody still refers to."""
        found = []
        for slot in range(n_live, len(stack.serials)):
            record = stack.records[slot]
            found += [
                _Left(ref, record.offset, record.offset + record.nbytes, record.label)
                for ref in self._owners.get((stack.side, slot), ())
                if ref() is not None
            ]
        return found

    def everything(self) -> list[_Left]:
        """Return all arrays of a child that somebody refers to, placed in the outermost arena."""
        arena = self._arena
        found = [left for left in self._left if left.owner() is not None]
        found += self.alive(arena._low, 0) + self.alive(arena._high, 0)
        shift = arena.address - _outermost(arena).address
        return [left._replace(start=left.start + shift, stop=left.stop + shift) for left in found]

    def roots_of(self, stack: Stack, slot: int) -> list[tuple[str, Any]]:
        """Return the root arrays of a slot that are alive, with their libraries."""
        found = [(library, ref()) for library, ref in self._roots.get((stack.side, slot), {}).items()]
        return [(library, array) for library, array in found if array is not None]

    # -- what happens -------------------------------------------------------------------------------------------

    def before_take(self, take: Take) -> None:
        """Forget what a slot held before."""
        self._forget(take.stack.side, take.slot)

    def extended(self, stack: Stack, slot: int, old: Record) -> None:
        """The arrays stay; views of the longer region are made of them."""

    def before_drop(self, drop: Drop) -> ArenaError | Warning | None:
        """Refuse or report the arrays that are still referenced."""
        alive = self.alive(drop.stack, drop.n_live)
        if self._arena._dependents is not None:
            for child in self._arena._dependents.children(drop):
                alive += child._tracker.everything()
        self._leaving[drop.stack.side] = alive
        if not alive or self.on_live_arrays == "ignore":
            return None
        message = f"{_describe(alive)} still referenced where {drop.cause} gives the memory back"
        if self.on_live_arrays == "warn":
            return LiveArraysWarning(f"{message}; they will show what is put there next")
        error = LiveArraysError(
            f"{message}; delete them, or copy what you need", labels=[left.label for left in alive]
        )
        if drop.leaving:
            return error
        raise error

    def after_drop(self, drop: Drop) -> None:
        """Tell autograd, and remember the arrays that outlive their regions."""
        backend = self._arena._backend
        n_dropped = 1 + max((slot for side, slot in self._owners if side == drop.stack.side), default=-1)
        for slot in range(drop.n_live, n_dropped):
            for library, array in self.roots_of(drop.stack, slot):
                backend.viewer(library).invalidate([array])
        self._left = [left for left in self._left if left.owner() is not None]
        self._left += self._leaving.pop(drop.stack.side, [])
        for slot in range(drop.n_live, n_dropped):
            self._forget(drop.stack.side, slot)

    def _forget(self, side: str, slot: int) -> None:
        self._owners.pop((side, slot), None)
        self._roots.pop((side, slot), None)

    def check_above(self, top: int) -> None:
        """Raise `LiveArraysError` if an array that outlived its region reaches above `top`."""
        self._left = [left for left in self._left if left.owner() is not None]
        alive = [left for left in self._left if left.stop > top]
        if alive:
            raise LiveArraysError(
                f"{_describe(alive)} still referenced above {top}; reading memory that is gone would end the "
                f"process, so delete them before trim()",
                labels=[left.label for left in alive],
            )


def _outermost(arena: Arena) -> Arena:
    while arena._parent is not None:
        arena = arena._parent._arena
    return arena


def _describe(alive: list[_Left]) -> str:
    names = sorted({repr(left.label) if left.label else f"offset {left.start}" for left in alive})
    return f"{len(alive)} native array{'s are' if len(alive) > 1 else ' is'} ({', '.join(names[:5])})"
