"""Checkpoints, rollback and scopes."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from gpuarena import _messages
from gpuarena._stack import SIDES, Cause, Drop, Report, Stack
from gpuarena._state import N_REMEMBERED, State, check_text, warn
from gpuarena.checkpoint import Checkpoint, Scope
from gpuarena.errors import ArenaError, ArgumentError, ArgumentTypeError, CheckpointError, CorruptionError

_END_OF_UNNAMED = "the end of an unnamed scope"


def raise_reports(reports: list[Report]) -> None:
    """Warn of what is to be warned of, for the line outside of this package, and raise what is to be raised.

    Of several errors, and of warnings that are turned into errors, the first is raised with the others as notes.
    """
    raised: list[BaseException] = []
    for report in reports:
        if isinstance(report, Warning):
            try:
                warn(report)
            except Warning as warning:
                raised.append(warning)
    damage = [report for report in reports if isinstance(report, CorruptionError)]
    if damage:
        offsets = [offset for report in damage for offset in report.offsets]
        raised.append(CorruptionError("; ".join(map(str, damage)), offsets=offsets))
    raised += [r for r in reports if isinstance(r, ArenaError) and not isinstance(r, CorruptionError)]
    if raised:
        for other in raised[1:]:
            raised[0].add_note(str(other))
        raise raised[0]


class Positions(State):
    """The part of an arena that returns to where it was."""

    def checkpoint(self, side: str = "low") -> Checkpoint:
        """Return the present position of an end, to which `rollback` brings it back exactly.

        It costs no memory of the arena and need not be given back.
        """
        with self._lock:
            if self._closed:
                raise self._closed_error("checkpoint")
            if self._pins is not None:
                self._watch()  # what a capture that has ended keeps lies below, and does not end with the scope
            if side == "low":
                stack = self._low
            else:
                self._check_side(side)
                stack = self._high
            serials = stack.serials
            n_live = len(serials)
            serial = stack.marked = serials[-1] if n_live else -1
            return Checkpoint(self._token, self._epoch, side, n_live, serial, stack.top, stack.used)

    def rollback(self, checkpoint: Checkpoint) -> None:
        """Drop everything allocated on the checkpoint's end since it was taken; it stays usable.

        Regions made since are stale for ever; native arrays made of them keep pointing at memory that will be
        reused, and a torch backward through them raises. The cost is a constant a dropped region. Where the
        dropped regions were used on other streams, the home stream waits for them; the host does not.

        Raises
        ------
        CheckpointError
            It is dead (the arena was rolled back below it), was kept, was taken before `reset`, or belongs to
            another arena. Unchanged on error.
        PinnedError
            A captured graph uses memory that would be dropped. Unchanged on error.
        LiveArraysError
            Only if asked for by `Debug`: native arrays are still referenced. Unchanged on error.
        CorruptionError
            In debug mode: bytes were written outside of the dropped regions. The rollback has happened.
        CaptureError
            A graph is being captured, and the rollback would wait for a stream outside of it. Unchanged.
        ArenaClosedError
            The arena is closed.
        """
        with self._lock:
            self._validate(checkpoint, "rollback")
            stack = self._low if checkpoint.side == "low" else self._high
            if len(stack.serials) > checkpoint._n_live:
                raise_reports(self._drop_to(checkpoint, "rollback()", sys._getframe(1)))

    def keep(self, checkpoint: Checkpoint) -> None:
        """Give up `checkpoint` without dropping anything; it cannot be rolled back to afterwards.

        Raises as `rollback`. Unchanged on error.
        """
        with self._lock:
            self._validate(checkpoint, "keep")
            frame = sys._getframe(1)
            checkpoint._kept = f"{frame.f_code.co_filename}:{frame.f_lineno}"

    def scope(self, label: str | None = None, *, side: str = "low") -> Scope:
        """Return a context manager that rolls its end back on exit, also when an exception passes.

        >>> from gpuarena import Arena
        >>> arena = Arena(1024)
        >>> with arena.scope("step"):
        ...     _ = arena.alloc(100, "uint8")
        >>> arena.stats.used
        0

        Raises
        ------
        CheckpointError
            On exit: a scope inside is still open, or the arena was rolled back below the scope's start. The arena
            is then at the start of the outermost scope that was closed; memory is never brought back to life.
        """
        check_text(label, "label")
        if self._closed:
            raise self._closed_error("scope")
        if side != "low":
            self._check_side(side)
        return Scope(self._whole(), label, side)

    def reset(self) -> None:
        """Drop everything on both ends, and kill every checkpoint and open scope.

        Raises as `rollback`; unchanged on error.
        """
        self._reset("reset()", sys._getframe(1))

    def _reset(self, cause: str, frame: FrameType) -> None:
        with self._lock:
            if self._closed:
                raise self._closed_error("reset")
            reports = self._drop_to(self._position("low", 0), cause, frame, self._position("high", 0))
            self._epoch += 1
            for hook in self._hooks:
                hook.was_reset()
            raise_reports(reports)

    def assert_balanced(self) -> None:
        """Raise `CheckpointError` iff a scope is open, and list those that are."""
        with self._lock:
            if self._scopes:
                names = ", ".join(map(repr, self._scopes))
                raise CheckpointError(f"{len(self._scopes)} open: {names}", scopes=tuple(self._scopes))

    def _exit(self, scope: Scope, frame: FrameType) -> None:
        checkpoint = scope._checkpoint
        assert checkpoint is not None, "a scope that was entered has a checkpoint"
        with self._lock:
            scopes = self._scopes
            stack = self._low if checkpoint.side == "low" else self._high
            serials, n_live = stack.serials, checkpoint._n_live
            if (
                scopes
                and scopes[-1] is scope
                and not self._drop_hooks
                and checkpoint._epoch == self._epoch
                and (n_live == 0 or (n_live <= len(serials) and serials[n_live - 1] == checkpoint._serial))
            ):  # everything in good order; a closed arena has no scopes
                if not self._hooks:  # nobody to ask, and nobody to tell
                    scopes.pop()
                    if len(serials) > n_live:
                        cause = _END_OF_UNNAMED if scope.label is None else f"the end of {scope!r}"
                        self._drop(stack, checkpoint, self._cause(checkpoint, cause, frame))
                    return
                if self._watchers:
                    scopes.pop()
                    try:
                        if len(serials) > n_live:
                            cause = _END_OF_UNNAMED if scope.label is None else f"the end of {scope!r}"
                            self._drop_watched(stack, checkpoint, self._cause(checkpoint, cause, frame), True)
                    finally:
                        for watcher in self._watchers:
                            watcher.scope_closed(scope)
                    return
            inner: list[Scope] = []
            if known := bool(scopes) and scopes[-1] is scope:  # in good order
                scopes.pop()
            elif known := scope in scopes:
                at = scopes.index(scope)
                # The ends are apart: a scope of the other end is not inside this one.
                inner = [other for other in scopes[at + 1 :] if other.side == scope.side]
                self._scopes = scopes[:at] + [s for s in scopes[at + 1 :] if s.side != scope.side]
            try:
                self._validate(checkpoint, "closing", scope)
                if not known:
                    raise CheckpointError(
                        f"{scope!r} was closed out of order: a scope around it was closed before it"
                    )
                if len(serials) > n_live:
                    cause = _END_OF_UNNAMED if scope.label is None else f"the end of {scope!r}"
                    raise_reports(self._drop_to(checkpoint, cause, frame, leaving=True))
            finally:
                for hook in self._hooks:
                    for over in (*reversed(inner), scope):
                        hook.scope_closed(over)
            if inner:
                names = ", ".join(map(repr, inner))
                raise CheckpointError(
                    f"{scope!r} was closed out of order: {names}, opened inside it, is still open"
                )

    def _validate(self, checkpoint: Checkpoint, action: str, scope: Scope | None = None) -> None:
        """Raise unless `checkpoint` can be used; the caller holds the lock."""
        if type(checkpoint) is not Checkpoint:
            raise _messages.no_checkpoint(checkpoint, action)
        if (
            not self._closed
            and checkpoint._token is self._token
            and checkpoint._epoch == self._epoch
            and checkpoint._kept is None
        ):
            n_live = checkpoint._n_live
            serials = (self._low if checkpoint.side == "low" else self._high).serials
            if n_live == 0 or (n_live <= len(serials) and serials[n_live - 1] == checkpoint._serial):
                return
        raise _messages.dead_checkpoint(self._whole(), checkpoint, f"{action} {scope!r}" if scope else action)

    def _drop_to(
        self,
        checkpoint: Checkpoint,
        cause: str,
        frame: FrameType,
        also: Checkpoint | None = None,
        *,
        leaving: bool = False,
    ) -> list[Report]:
        """Restore the state of valid checkpoints, one of each end; the caller holds the lock.

        Return what the hooks have to report, for `raise_reports`. Raise only if a hook refuses, and then nothing
        has changed.
        """
        if not self._drop_hooks and also is None:
            stack = self._low if checkpoint.side == "low" else self._high
            if not self._hooks:
                if len(stack.serials) > checkpoint._n_live:
                    self._drop(stack, checkpoint, self._cause(checkpoint, cause, frame))
                return []
            if self._watchers:
                if len(stack.serials) > checkpoint._n_live:
                    self._drop_watched(stack, checkpoint, self._cause(checkpoint, cause, frame), leaving)
                return []
        self._watch()
        drops = []
        for target in (checkpoint,) if also is None else (checkpoint, also):
            stack = self._low if target.side == "low" else self._high
            n_live = target._n_live
            if len(stack.serials) > n_live:
                why = self._cause(target, cause, frame)
                drops.append((Drop(stack, n_live, target.top, why, leaving), target))
        hooks = (*self._drop_hooks, *self._hooks)
        for drop, _ in drops:
            for hook in hooks:
                hook.refuse_drop(drop)
        reports = [hook.before_drop(drop) for drop, _ in drops for hook in hooks]
        for drop, target in drops:
            self._drop(drop.stack, target, drop.cause)
            for hook in hooks:
                reports += hook.after_drop(drop) or ()
        return reports

    def _cause(self, target: Checkpoint, text: str, frame: FrameType) -> Cause:
        values = target.side, target._n_live, self._next_serial, text, frame.f_code, frame.f_lasti
        return tuple.__new__(Cause, values)  # a third of the time of Cause(...)

    def _drop_watched(self, stack: Stack, target: Checkpoint, cause: Cause, leaving: bool) -> None:
        """Bring one end back to a valid checkpoint, and tell the watchers, who have nothing to report."""
        drop = Drop(stack, target._n_live, target.top, cause, leaving)
        for watcher in self._watchers:
            watcher.before_drop(drop)
        self._drop(stack, target, cause)
        for watcher in self._watchers:
            watcher.after_drop(drop)

    def _drop(self, stack: Stack, target: Checkpoint, cause: Cause) -> None:
        """Bring one end back to a valid checkpoint."""
        self._note_peaks()
        n_live = target._n_live
        arrays = stack.arrays
        dropped = [array for array in arrays[n_live:] if array is not None]
        if dropped:
            self._backend.invalidate(dropped)
        if self._foreign:
            for slot in range(n_live, len(stack.serials)):
                self._invalidate_foreign(stack, slot)
                self._foreign.pop((stack.side, slot), None)
        causes = self._causes
        if len(causes) == N_REMEMBERED:
            self._forgotten_limit = causes[0].serial_limit
        causes.append(cause)
        del stack.serials[n_live:], stack.records[n_live:], arrays[n_live:]
        used = target._used
        stack.freed += stack.used - used
        stack.used = used
        stack.top = target.top

    def _position(self, side: str, n_live: int) -> Checkpoint:
        """Return the checkpoint that would have been taken when an end held its first `n_live` regions."""
        stack = self._low if side == "low" else self._high
        if not n_live:
            return Checkpoint(self._token, self._epoch, side, 0, -1, stack.start, 0)
        records, serial = stack.records[:n_live], stack.serials[n_live - 1]
        used = sum(record.nbytes for record in records)
        return Checkpoint(self._token, self._epoch, side, n_live, serial, records[-1].top, used)

    def _mark(self, side: str) -> Any:
        """Return what `_undo` needs to take back several allocations as if they had not been made."""
        stack = self._low if side == "low" else self._high
        marked = stack.marked
        self._note_peaks()
        state = (
            self.checkpoint(side),
            self._next_serial,
            self._peak,
            self._peak_used,
            self._peak_regions,
            [(hook, hook.marking()) for hook in (*self._drop_hooks, *self._hooks)],
            marked,
        )
        stack.marked = marked
        return state

    def _undo(self, state: Any) -> None:
        """Take back what was allocated since `_mark`; no handle of it may have left the caller's hands."""
        checkpoint, serial, *peaks, marks, marked = state
        stack = self._low if checkpoint.side == "low" else self._high
        freed, n_causes = stack.freed, len(self._causes)
        self._drop_to(checkpoint, "an allocation that failed half-way", sys._getframe(1))
        if len(self._causes) > n_causes:
            self._causes.pop()
        stack.freed, stack.marked, self._next_serial = freed, marked, serial
        self._peak, self._peak_used, self._peak_regions = peaks
        for hook, mark in marks:
            hook.undone(mark)

    def _check_side(self, side: Any) -> None:
        if not isinstance(side, str):
            raise ArgumentTypeError(f"side must be 'low' or 'high', not {type(side).__name__}")
        if side not in SIDES:
            raise ArgumentError(f"side must be 'low' or 'high', not {side!r}")
        if side == "high" and self._backend.growable:
            raise ArgumentError(
                "a growable arena has no high end: its memory is committed from the low end up"
            )
