"""Who still refers to the native arrays of an arena."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from gpuarena._index import Layout
from gpuarena._stack import Drop, Hook, Report, Stack, Take
from gpuarena.dtypes import DType, as_dtype
from gpuarena.errors import LiveArraysError, LiveArraysWarning

if TYPE_CHECKING:
    from gpuarena.arena import Arena
    from gpuarena.backends import Backend
    from gpuarena.region import Region

_Key = tuple[str, int]  # end, slot


class _Entry:
    """An array that was made, and whether its region is gone; positions in bytes of the outermost arena."""

    __slots__ = ("dropped", "label", "owner", "start", "stop")

    def __init__(self, owner: Any, start: int, stop: int, label: str | None) -> None:
        self.owner = weakref.ref(owner)  # lives as long as the array or any view of it
        self.start, self.stop, self.label = start, stop, label
        self.dropped = False


class Ledger:
    """The arrays of an arena and of all its children, of which some may be gone as objects."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._n_kept = 0  # after the last time that dead entries were left out

    def add(self, entry: _Entry) -> None:
        """Note an array."""
        if len(self._entries) > 2 * self._n_kept + 64:
            self.alive()
        self._entries.append(entry)

    def alive(self) -> list[_Entry]:
        """Return the arrays that somebody refers to."""
        self._entries = [entry for entry in self._entries if entry.owner() is not None]
        self._n_kept = len(self._entries)
        return self._entries


class Tracker(Hook):
    """Keeps the arena's native arrays by weak reference, so that those alive are those that others hold.

    A region then makes its array anew when nobody has it any more. In an arena that is not tracked the arena and
    its regions hold the arrays themselves, which is faster.
    """

    def __init__(self, arena: Arena, ledger: Ledger, on_live_arrays: str = "ignore") -> None:
        self._arena = weakref.proxy(arena)
        self.ledger = ledger
        self._on_live_arrays = on_live_arrays
        # slot: root arrays that were made, with their library and bytes; a region that grew has several
        self._roots: dict[_Key, list[tuple[str, int, weakref.ref[Any]]]] = {}

    # -- arrays -------------------------------------------------------------------------------------------------

    def new_root(
        self, stack: Stack, slot: int, offset: int, shape: tuple[int, ...], dtype: DType, label: str | None
    ) -> Any:
        """Return a fresh root array of the backend's library."""
        return self._new(self._arena._backend, (stack.side, slot), offset, shape, dtype, label)

    def array(self, region: Region, backend: Backend) -> Any:
        """Return the array of a live region: the one somebody holds, a view of it, or a fresh one."""
        key = region._stack.side, region._slot
        record = region._stack.records[region._slot]
        origin = region._origin
        if origin.nbytes == record.nbytes:
            offset, shape, dtype = origin.offset, origin.shape, origin.dtype
        else:  # it has grown since
            offset, shape, dtype = record.offset, (record.nbytes,), as_dtype("uint8")
        root = next(
            (
                array
                for library, nbytes, ref in self._roots.get(key, ())
                if library == backend.name and nbytes == record.nbytes and (array := ref()) is not None
            ),
            None,
        )
        if root is None:
            root = self._new(backend, key, offset, shape, dtype, region.label)
        if region is origin and origin.nbytes == record.nbytes:
            return root
        return backend.view(root, Layout(region.offset, region.shape, region.strides), region.dtype)

    def _new(
        self,
        backend: Backend,
        key: _Key,
        offset: int,
        shape: tuple[int, ...],
        dtype: DType,
        label: str | None,
    ) -> Any:
        array, owner = backend.tracked_root(offset, shape, dtype)
        nbytes = int(array.nbytes)
        self._roots.setdefault(key, []).append((backend.name, nbytes, weakref.ref(array)))
        start = self._arena._shift + offset
        self.ledger.add(_Entry(owner, start, start + nbytes, label))
        return array

    def roots_of(self, stack: Stack, slot: int) -> list[tuple[str, Any]]:
        """Return the root arrays of a slot that are alive, with their libraries."""
        found = [(library, ref()) for library, _, ref in self._roots.get((stack.side, slot), ())]
        return [(library, array) for library, array in found if array is not None]

    # -- what happens -------------------------------------------------------------------------------------------

    def before_take(self, take: Take) -> None:
        """Forget what a slot held before."""
        if not take.growing:
            self._roots.pop((take.stack.side, take.slot), None)

    def _leaving(self, drop: Drop) -> list[_Entry]:
        shift = self._arena._shift
        start, stop = sorted((shift + drop.old_top, shift + drop.new_top))
        return [
            entry
            for entry in self.ledger.alive()
            if not entry.dropped and start <= entry.start < entry.stop <= stop
        ]

    def refuse_drop(self, drop: Drop) -> None:
        """Refuse if arrays are still referenced, and that was asked for."""
        if self._on_live_arrays == "raise" and not drop.leaving and (alive := self._leaving(drop)):
            raise _error(alive, drop)

    def before_drop(self, drop: Drop) -> Report:
        """Report the arrays that are still referenced, and tell autograd."""
        alive = self._leaving(drop)
        for slot in range(drop.n_live, len(drop.stack.serials)):
            for library, array in self.roots_of(drop.stack, slot):
                self._arena._backend.viewer(library).invalidate([array])
            self._roots.pop((drop.stack.side, slot), None)
        for entry in alive:
            entry.dropped = True
        if not alive or self._on_live_arrays == "ignore":
            return None
        if self._on_live_arrays == "raise":
            return _error(alive, drop)
        return LiveArraysWarning(
            f"{_describe(alive)} still referenced where {drop.cause} gives the memory back; "
            f"{'it' if len(alive) == 1 else 'they'} will show what is put there next"
        )

    def spilling(self, stack: Stack, n_live: int) -> Any:
        """Return the arrays of the regions that go to the host."""
        roots = {key: refs for key, refs in self._roots.items() if key[0] == stack.side and key[1] >= n_live}
        shift = self._arena._shift
        start, low = stack.records[n_live].offset + shift, stack.side == "low"
        entries = [
            entry
            for entry in self.ledger.alive()
            if not entry.dropped and (entry.start >= start if low else entry.start <= start)
        ]
        return roots, entries

    def restored(self, stack: Stack, n_live: int, known: Any) -> None:
        """Know them again."""
        roots, entries = known
        self._roots.update(roots)
        for entry in entries:
            entry.dropped = False

    def check_above(self, top: int) -> None:
        """Raise `LiveArraysError` if an array reaches above `top`: its region is gone."""
        alive = [entry for entry in self.ledger.alive() if entry.stop > top and entry.stop > entry.start]
        if alive:
            raise LiveArraysError(
                f"{_describe(alive)} still referenced above {top}; reading memory that is gone would end the "
                f"process, so delete {'it' if len(alive) == 1 else 'them'} before trim()",
                labels=[entry.label for entry in alive],
            )


def _error(alive: list[_Entry], drop: Drop) -> LiveArraysError:
    return LiveArraysError(
        f"{_describe(alive)} still referenced where {drop.cause} gives the memory back; delete "
        f"{'it' if len(alive) == 1 else 'them'}, or copy what you need",
        labels=[entry.label for entry in alive],
    )


def _describe(alive: list[_Entry]) -> str:
    names = sorted({repr(entry.label) if entry.label else f"offset {entry.start}" for entry in alive})
    shown = ", ".join([*names[:5], "..."] if len(names) > 5 else names)
    return f"{len(alive)} native array{'s' if len(alive) > 1 else ''} ({shown}) {'are' if len(alive) > 1 else 'is'}"
