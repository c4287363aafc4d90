"""A log of what an arena was asked to do."""

from __future__ import annotations

import dataclasses
import sys
import time
from types import CodeType, TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO

from gpuarena._files import replacing
from gpuarena._stack import Drop, Hook, Record, Stack, Take, line_number
from gpuarena._state import PACKAGE
from gpuarena.errors import CheckpointError, refuse_copy
from gpuarena.observe.event import Event, check_path, event_of, header, line_of, line_of_values, load_trace
from gpuarena.observe.replay import replay

if TYPE_CHECKING:
    from gpuarena.arena import Arena
    from gpuarena.checkpoint import Scope
    from gpuarena.region import Region

__all__ = ["Event", "Trace", "load_trace", "replay"]

#: How long a line may wait to be written.
_FLUSH_NS = 100_000_000


class Trace(Hook):
    """What ``arena.record()`` returns: the events of its block, in memory or in a file.

    Recording changes no offset. What it costs is measured by ``gpuarena bench alloc``.

    A file is written as events happen, a failure at once and others within a tenth of a second as long as events
    follow. When the process is killed it holds what was written until then; see `load_trace` for its last line.

    Attributes
    ----------
    path : Path or None
        The file, if the events go to one.
    """

    def __init__(self, arena: Arena, path: Any, sites: bool) -> None:
        self._arena = arena
        self._state = "new"
        self._file: BinaryIO | None = None
        self._error: OSError | None = None  # of a file that could not be written
        self._sites = sites
        self.path = None if path is None else check_path(path)
        self._suffix = "" if self.path is None else self.path.suffix
        self._events: list[Event] = []
        self._raw: list[tuple[Any, ...]] = []  # events that nobody has looked at: made when somebody does
        self._began = self._flushed = 0
        self._places: dict[tuple[int, int], tuple[CodeType, str]] = {}  # the file and line of an instruction
        self._open: dict[str, list[Scope]] = {"low": [], "high": []}
        self._growing: Take | None = None

    @property
    def events(self) -> list[Event]:
        """The events so far; empty if they go to a file."""
        with self._arena._lock:
            raw, self._raw = self._raw, []
            self._events += [Event(*self._finish(*values)) for values in raw]
            return self._events

    def __enter__(self) -> Trace:
        """Begin to record; a trace can be entered once. The file is created, or overwritten."""
        with self._arena._lock:
            if self._state != "new":
                raise CheckpointError("a trace records once; make another with arena.record()")
            if self._arena._closed:
                raise self._arena._closed_error("record")
            if self.path is not None:
                self._file = open(self.path, "wb")
                self._write(header(self._suffix))
            self._state = "running"
            self._arena._hooks.append(self)
            self._began = time.perf_counter_ns()
            self._note_beginning()
            self._flush()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        """Stop, and close the file.

        Raises
        ------
        OSError
            The file could not be written, now or since; the arena went on without it.
        """
        with self._arena._lock:
            self._state = "ended"
            if self in self._arena._hooks:
                self._arena._hooks.remove(self)
            if self._file is not None:
                file, self._file = self._file, None
                try:
                    file.close()
                except OSError as error:
                    self._error = self._error or error
            if self._error is not None and exc is None:
                raise self._error

    def save(self, path: Any) -> None:
        """Write the events to a ``.jsonl`` or ``.csv`` file, whole or not at all."""
        path = check_path(path)
        with replacing(path) as file:
            file.write(header(path.suffix))
            for event in self.events:
                file.write(line_of(event, path.suffix))

    def replay(self, arena: Arena) -> list[Region]:
        """Make the same calls on another arena; see `gpuarena.observe.replay.replay`."""
        return replay(self.events, arena)

    # -- where it goes ------------------------------------------------------------------------------------------

    def _note(self, *values: Any) -> None:
        """Log an event, of which the fields up to the cause are given."""
        now = time.perf_counter_ns() - self._began
        code, instruction = None, 0
        if self._sites:
            frame = sys._getframe(3)  # those before are always of this package
            while frame.f_code.co_filename.startswith(PACKAGE) and frame.f_back is not None:
                frame = frame.f_back
            code, instruction = frame.f_code, frame.f_lasti
        raw = values, now, code, instruction
        if self.path is None:
            self._raw.append(raw)
        elif self._file is not None:
            self._write(line_of_values(self._suffix, *self._finish(*raw)))
            if now - self._flushed > _FLUSH_NS:
                self._flush()

    def _keep(self, event: Event) -> None:
        """Log an event as it is."""
        if self.path is None:
            self._events.append(event)
        else:
            self._write(line_of(event, self._suffix))

    def _finish(
        self, values: tuple[Any, ...], now: int, code: CodeType | None, instruction: int
    ) -> tuple[Any, ...]:
        """Return the fields with cause and site as texts, which are made where they are needed only."""
        site = "" if code is None else self._place_of(code, instruction)
        cause = values[10]
        if cause:
            cause = f"{cause.text} at {self._place_of(cause.code, cause.instruction)}"
            return (*values[:10], cause, now, site)
        return (*values, now, site)

    def _place_of(self, code: CodeType, instruction: int) -> str:
        key = id(code), instruction
        known = self._places.get(key)
        if known is None:  # kept with the code, so that no other gets its id
            known = self._places[key] = code, f"{code.co_filename}:{line_number(code, instruction)}"
        return known[1]

    def _write(self, line: str) -> None:
        if self._file is not None and self._error is None:
            try:
                self._file.write(line.encode())
            except OSError as error:  # the arena's call has happened; the block's end tells
                self._error = error

    def _flush(self) -> None:
        self._flushed = time.perf_counter_ns() - self._began
        if self._file is not None and self._error is None:
            try:
                self._file.flush()
            except OSError as error:
                self._error = error

    # -- what happens -------------------------------------------------------------------------------------------

    def _note_beginning(self) -> None:
        arena = self._arena
        stacks = arena._low, arena._high
        for stack in stacks:
            self._keep(
                Event(
                    "start", stack.side, len(stack.serials), stack.top, stack.start, arena.capacity,
                    align=arena.alignment, label=arena.name, device=arena.device, address=arena.address,
                )
            )  # fmt: skip
        for stack in stacks:
            for slot, (offset, nbytes, label, top) in enumerate(stack.records):
                site = "" if arena._checks is None else arena._checks.site_of(stack.side, slot)
                self._keep(
                    Event(
                        "held", stack.side, slot + 1, top, offset, nbytes, (nbytes,), "uint8",
                        label=label, site=site,
                    )
                )  # fmt: skip
        for scope in arena._scopes:
            if self._is_valid(scope):
                self._open[scope.side].append(scope)
                stack = self._stack_of(scope)
                at = scope._checkpoint.top if scope._checkpoint is not None else 0
                self._keep(
                    Event("scope_held", scope.side, len(stack.serials), stack.top, at, label=scope.label)
                )

    def after_take(self, take: Take) -> None:
        """Log a region."""
        self._note(
            take.kind, take.stack.side, take.slot + 1, take.new_top, take.offset, take.nbytes, take.shape,
            take.dtype.name, take.align, take.label, "",
        )  # fmt: skip

    def before_take(self, take: Take) -> None:
        """Note what a region grows to, which `extended` is not told."""
        if take.growing:
            self._growing = take

    def extended(self, stack: Stack, slot: int, old: Record) -> None:
        """Log a region that grew."""
        new, take, self._growing = stack.records[slot], self._growing, None
        shape, dtype = ((), "") if take is None else (take.shape, take.dtype.name)
        self._note(
            "extend", stack.side, slot + 1, stack.top, new.offset, new.nbytes, shape, dtype, 1, new.label, ""
        )

    def after_drop(self, drop: Drop) -> None:
        """Log a rollback, and the scopes that die of it."""
        side, n_live = drop.stack.side, drop.n_live
        self._note("rollback", side, n_live, drop.new_top, 0, 0, (), "", 1, None, drop.cause)
        scopes = self._open[side]
        while scopes and (checkpoint := scopes[-1]._checkpoint) is not None and checkpoint._n_live > n_live:
            self._note_scope("scope_close", scopes.pop())

    def restored(self, stack: Stack, n_live: int, known: Any) -> None:
        """Log regions that are back, as one event each, and the scopes that live again with them."""
        for slot in range(n_live, len(stack.records)):
            offset, nbytes, label, top = stack.records[slot]
            self._note("restore", stack.side, slot + 1, top, offset, nbytes, (nbytes,), "uint8", 1, label, "")
        scopes = self._open[stack.side]
        for scope in self._arena._scopes:
            if scope.side == stack.side and scope not in scopes and self._is_valid(scope):
                scopes.append(scope)
                self._note_scope("scope_open", scope)

    def failed(self, stack: Stack, nbytes: int, align: int, label: str | None) -> None:
        """Log a refusal."""
        n_regions = len(stack.serials)
        self._note("fail", stack.side, n_regions, stack.top, 0, nbytes, (), "", align, label, "")
        self._flush()

    def scope_opened(self, scope: Scope) -> None:
        """Log a scope."""
        self._open[scope.side].append(scope)
        self._note_scope("scope_open", scope)

    def scope_closed(self, scope: Scope) -> None:
        """Log the end of a scope, unless it has died before."""
        scopes = self._open[scope.side]
        if scope in scopes:
            scopes.remove(scope)
            self._note_scope("scope_close", scope)

    def was_reset(self) -> None:
        """Log the end of all scopes."""
        for scopes in self._open.values():
            while scopes:
                self._note_scope("scope_close", scopes.pop())

    def closing(self) -> None:
        """Log the end."""
        self.was_reset()
        self._note("close", "low", 0, 0, 0, 0, (), "", 1, None, "")
        self._flush()

    def _note_scope(self, kind: str, scope: Scope) -> None:
        stack = self._stack_of(scope)
        at = 0 if scope._checkpoint is None else scope._checkpoint.top
        n_regions = len(stack.serials)
        self._note(kind, scope.side, n_regions, stack.top, at, 0, (), "", 1, scope.label, "")

    def _stack_of(self, scope: Scope) -> Stack:
        return self._arena._low if scope.side == "low" else self._arena._high

    def _is_valid(self, scope: Scope) -> bool:
        checkpoint, serials = scope._checkpoint, self._stack_of(scope).serials
        if checkpoint is None or checkpoint._epoch != self._arena._epoch:
            return False
        n_live = checkpoint._n_live
        return n_live == 0 or (n_live <= len(serials) and serials[n_live - 1] == checkpoint._serial)

    # -- what did not happen ------------------------------------------------------------------------------------

    def marking(self) -> Any:
        """Return where the log stands."""
        if self._file is None:
            return len(self.events)
        self._flush()
        try:
            return None if self._error is not None else self._file.tell()
        except OSError:  # a pipe: what has gone into it stays, with the rollback that takes it back
            return None

    def undone(self, mark: Any) -> None:
        """Go back to there, but for requests that failed, which did fail: with the figures of before."""
        if self._file is None:
            since = self.events[mark:]
            del self._events[mark:]
            self._keep_failures(since)
            return
        if self._error is not None or mark is None:
            return
        try:
            self._file.flush()
            assert self.path is not None, "a file has a path"
            with open(self.path, "rb") as file:
                file.seek(mark)
                lines = file.read().decode().splitlines(keepends=True)
            since = [event_of(line, self._suffix) for line in lines]
            self._file.seek(mark)
            self._file.truncate()
        except OSError as error:
            self._error = error
            return
        self._keep_failures(since)
        self._flush()

    def _keep_failures(self, events: list[Event]) -> None:
        for event in events:
            if event.kind == "fail":
                stack = self._arena._low if event.side == "low" else self._arena._high
                self._keep(dataclasses.replace(event, n_regions=len(stack.serials), top=stack.top))

    def __reduce__(self) -> Any:
        raise refuse_copy(self)
