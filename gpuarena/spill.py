"""Regions moved out to host memory for a while."""

from __future__ import annotations

from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuarena._positions import raise_reports
from gpuarena._stack import Hook, Record
from gpuarena.checkpoint import Checkpoint
from gpuarena.errors import CaptureError, CheckpointError, refuse_copy

if TYPE_CHECKING:
    from gpuarena.arena import Arena

__all__ = ["Spill"]


class Spill:
    """What `Arena.spill` moved out; `restore` brings it back to the same addresses.

    Attributes
    ----------
    nbytes : int
        Bytes held on the host, padding included.
    n_regions : int
    """

    def __init__(
        self,
        arena: Arena,
        checkpoint: Checkpoint,
        contents: np.ndarray[Any, np.dtype[np.uint8]],
        serials: list[int],
        records: list[Record],
        top: int,
        used: int,
        arrays: list[Any],
        foreign: dict[int, dict[str, Any]],
        watched: list[tuple[Hook, Any]],
    ) -> None:
        self._arena = arena
        self._checkpoint = checkpoint
        self._contents: Any = contents  # [nbytes] uint8
        self._serials, self._records = serials, records
        self._top, self._used = top, used
        self._arrays, self._foreign = arrays, foreign  # somebody may have them, and write into them again
        self._watched = watched  # what each hook knew of the regions
        self._cause = arena._causes[-1]
        self._marked = (arena._low if checkpoint.side == "low" else arena._high).marked
        self.nbytes = contents.nbytes
        self.n_regions = len(serials)

    @property
    def restored(self) -> bool:
        """Whether the contents are back."""
        return self._contents is None

    def restore(self) -> None:
        """Copy the contents back; the handles of the regions, and checkpoints between them, are live again.

        Native arrays that were kept show the old contents again as well. A torch backward through arrays saved
        before the spill raises all the same, because autograd cannot know that the bytes came back.

        Raises
        ------
        CheckpointError
            Something is live above the checkpoint, which would be overwritten; the arena was rolled back below
            it, reset, or the contents were restored before. Unchanged on error.
        OutOfMemoryError
            The high end has grown into the place. Unchanged on error.
        CaptureError
            A graph is being captured. Unchanged on error.
        ArenaClosedError
            The arena is closed.
        """
        arena = self._arena
        with arena._lock:
            if self._contents is None:
                raise CheckpointError("restore: the contents were restored before")
            arena._validate(self._checkpoint, "restore")
            _refuse_capture(arena, "restore")
            stack = arena._low if self._checkpoint.side == "low" else arena._high
            start = self._checkpoint.top
            if len(stack.serials) != self._checkpoint._n_live:
                raise CheckpointError(
                    f"restore: {len(stack.serials) - self._checkpoint._n_live} regions are live above the "
                    f"checkpoint, where the contents have their place; roll back to it first"
                )
            low, high = (self._top, arena._high.top) if stack is arena._low else (arena._low.top, self._top)
            if low > high:
                raise arena._out_of_memory(stack, self.nbytes, min(start, self._top), "spilled regions")
            arena._commit(max(start, self._top))
            known = {id(hook): state for hook, state in self._watched}
            for hook, state in self._watched:
                hook.restoring(self._records, state)
            if self.nbytes:
                arena._backend.write_bytes(min(start, self._top), self._contents)
            arena._foreign.update({(stack.side, slot): arrays for slot, arrays in self._foreign.items()})
            for serial, record, array in zip(self._serials, self._records, self._arrays, strict=True):
                stack.serials.append(serial)
                stack.records.append(record)
                stack.arrays.append(array)
            stack.marked = max(stack.marked, self._marked)
            # They count as neither allocated nor freed: they never went.
            stack.freed -= self._used - stack.used
            stack.top, stack.used = self._top, self._used
            for hook in (*arena._drop_hooks, *arena._hooks):
                hook.restored(stack, self._checkpoint._n_live, known.get(id(hook)))
            self._arrays, self._foreign, self._watched = [], {}, []
            if self._cause in arena._causes:  # it dropped nothing, after all
                arena._causes.remove(self._cause)
            self._contents = None

    def __repr__(self) -> str:
        state = "restored" if self.restored else "on the host"
        return f"<spill of {self.n_regions} regions, {self.nbytes} bytes, {state}>"

    def __reduce__(self) -> Any:
        raise refuse_copy(self)


def _refuse_capture(arena: Arena, action: str) -> None:
    if arena._captures():
        raise CaptureError(f"{action} waits for the device, which a graph that is being captured cannot")


def make_spill(arena: Arena, checkpoint: Checkpoint, frame: FrameType) -> Spill:
    """Move what lies above a valid checkpoint to the host; see `Arena.spill`. The caller holds the lock."""
    _refuse_capture(arena, "spill")
    stack = arena._low if checkpoint.side == "low" else arena._high
    n_live = checkpoint._n_live
    if len(stack.serials) == n_live:
        raise CheckpointError("spill: no regions are live above the checkpoint")
    if arena._dependents is not None and arena._dependents.any_above(stack.side, n_live):
        raise CheckpointError(
            "spill: a child arena or a frame lies above the checkpoint, which could not be brought back as it was"
        )
    if arena._order is not None:
        arena._order.synchronize(stack.side, n_live)
    if arena._checks is not None:
        arena._checks.inspect(stack, n_live)  # damage is reported now, so that it cannot lose the contents
    start, stop = sorted((checkpoint.top, stack.top))
    arena._commit(stop)  # a region that is committed in pieces is read as a whole
    contents = arena._backend.read_bytes(start, stop)
    serials, records, top, used = stack.serials[n_live:], stack.records[n_live:], stack.top, stack.used
    watched = [(hook, hook.spilling(stack, n_live)) for hook in (*arena._drop_hooks, *arena._hooks)]
    arrays = stack.arrays[n_live:]
    foreign = {
        slot: found for (side, slot), found in arena._foreign.items() if side == stack.side and slot >= n_live
    }
    reports = arena._drop_to(checkpoint, "spill()", frame)
    spill = Spill(arena, checkpoint, contents, serials, records, top, used, arrays, foreign, watched)
    try:
        raise_reports(reports)
    except BaseException:  # a warning that was turned into an error, which must not lose the contents
        spill.restore()
        raise
    return spill
