"""A log of what an arena was asked to do."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import threading
import time
import weakref
from types import CodeType, TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO

from gpuarena._files import replacing
from gpuarena._stack import Drop, Record, Stack, Take, Watcher, line_number
from gpuarena._state import PACKAGE
from gpuarena.errors import CheckpointError, refuse_copy
from gpuarena.observe.event import (
    Event,
    check_path,
    event_of,
    head_of,
    header,
    line_of,
    load_trace,
    tail_of,
)
from gpuarena.observe.replay import replay

if TYPE_CHECKING:
    from gpuarena.arena import Arena
    from gpuarena.checkpoint import Scope
    from gpuarena.dtypes import DType
    from gpuarena.region import Region

__all__ = ["Event", "Trace", "load_trace", "replay"]

#: How long a line may wait to be written.
_FLUSH_NS = 100_000_000
#: Bytes that may wait.
_BUFFER = 1 << 16
#: Events whose line up to the time is remembered, because a step that repeats itself has it again.
_N_HEADS = 1024


class Trace(Watcher):
    """What ``arena.record()`` returns: the events of its block, in memory or in a file.

    Recording changes no offset. What it costs is measured by ``gpuarena bench alloc``.

    A file is written as events happen, a failure at once and others within a tenth of a second as long as events
    follow. When the process is killed it holds what was written until then; see `load_trace` for its last line.
    A forked child writes nothing to it: there the recording has ended.

    The arena is kept alive until the recording ends, and its arrays never.

    Attributes
    ----------
    path : Path or None
        The file, if the events go to one.
    """

    def __init__(self, arena: Arena, path: Any, sites: bool) -> None:
        self._held: Arena | None = arena  # until the end
        self._ref = weakref.ref(arena)
        self._lock = threading.Lock()  # when the arena is gone
        self._state = "new"
        self._file: BinaryIO | None = None
        self._error: OSError | None = None  # of a file that could not be written
        self._sites = sites
        self.path = None if path is None else check_path(path)
        self._suffix = "" if self.path is None else self.path.suffix
        self._events: list[Event] = []
        self._raw: list[tuple[Any, ...]] = []  # events that nobody has looked at: made when somebody does
        self._began = self._flushed = 0
        self._alignment = arena.alignment
        self._places: dict[tuple[int, int], tuple[str, str, CodeType]] = {}
        self._no_site = tail_of(self._suffix, "")
        self._head_of = functools.lru_cache(_N_HEADS)(functools.partial(head_of, self._suffix))
        self._open: dict[str, list[Scope]] = {"low": [], "high": []}
        self._growing: Take | None = None
        # Regions that the log has told of, as `Stack.records`; an interrupt can come between the two.
        self._known: dict[str, list[Record]] = {"low": [], "high": []}

    @property
    def _arena(self) -> Arena:
        arena = self._ref()
        assert arena is not None, "an arena is there as long as it is recorded"
        return arena

    @property
    def events(self) -> list[Event]:
        """The events so far; empty if they go to a file."""
        arena = self._ref()
        with self._lock if arena is None else arena._lock:
            raw, self._raw = self._raw, []
            self._events += [Event(*self._finish(*values)) for values in raw]
            return self._events

    def __enter__(self) -> Trace:
        """Begin to record; a trace can be entered once. The file is created, or overwritten."""
        arena = self._held
        if arena is None or self._state != "new":
            raise CheckpointError("a trace records once; make another with arena.record()")
        with arena._lock:
            if arena._closed:
                raise arena._closed_error("record")
            if self.path is not None:
                self._file = open(self.path, "wb", buffering=_BUFFER)
                self._write(header(self._suffix))
            self._state = "running"
            self._began = time.perf_counter_ns()
            self._note_beginning()
            self._flush()
            arena._attach(self)
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
        arena = self._held
        if arena is None:
            return
        with arena._lock:
            self._state = "ended"
            arena._detach(self)
            self._held = self._growing = None
            self._open = {"low": [], "high": []}
            self._known = {"low": [], "high": []}
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
            for event in self._all_events():
                file.write(line_of(event, path.suffix))

    def replay(self, arena: Arena) -> list[Region]:
        """Make the same calls on another arena; see `gpuarena.observe.replay.replay`."""
        return replay(self._all_events(), arena)

    def _all_events(self) -> list[Event]:
        """Return the events so far, wherever they went."""
        if self.path is None:
            return self.events
        arena = self._ref()
        with self._lock if arena is None else arena._lock:
            if self._file is not None:
                self._flush()
        return load_trace(self.path)

    # -- where it goes ------------------------------------------------------------------------------------------

    def _note(self, *values: Any) -> None:
        """Log an event, of which the fields up to the cause are given."""
        self._log(values, 4)

    def _log(self, values: tuple[Any, ...], n_ours: int) -> None:
        """Log an event; that many frames, this one included, are always of this package."""
        now = time.perf_counter_ns() - self._began
        code, instruction = None, 0
        if self._sites:
            try:
                frame = sys._getframe(n_ours)  # frames are slow to make: those before are not
            except ValueError:  # the package was called by something that is no Python code
                frame = sys._getframe(n_ours - 1)
            code = frame.f_code
            while code.co_filename.startswith(PACKAGE) and frame.f_back is not None:
                frame = frame.f_back
                code = frame.f_code
            instruction = frame.f_lasti
        if self.path is None:
            self._raw.append((values, now, code, instruction))
        elif self._file is not None:
            if values[10]:
                values = self._with_cause(values)
            tail = self._no_site if code is None else self._place_of(code, instruction)[1]
            try:
                head = self._head_of(*values)
            except TypeError:  # the label is of a class of its own, and not hashable
                head = head_of(self._suffix, *values)
            self._write(f"{head}{now}{tail}")
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
        site = "" if code is None else self._place_of(code, instruction)[0]
        return (*(self._with_cause(values) if values[10] else values), now, site)

    def _with_cause(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        cause = values[10]
        return (*values[:10], f"{cause.text} at {self._place_of(cause.code, cause.instruction)[0]}")

    def _place_of(self, code: CodeType, instruction: int) -> tuple[str, str, CodeType]:
        """Return file and line of an instruction, and the end of a line that says it."""
        key = id(code), instruction
        known = self._places.get(key)
        if known is None:  # kept with the code, so that no other gets its id
            site = f"{code.co_filename}:{line_number(code, instruction)}"
            known = self._places[key] = site, tail_of(self._suffix, site), code
        return known

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

    def forked(self) -> None:
        """Leave the file to the parent: what waits here to be written, waits there too."""
        file, self._file = self._file, None
        if file is not None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, file.fileno())
            os.close(nowhere)
            file.close()

    # -- what happens -------------------------------------------------------------------------------------------

    def _catch_up(self, stack: Stack, n_regions: int) -> None:
        """Log what an interrupt has kept from the log, so that what comes now follows from it.

        `n_regions` is how many there were before.
        """
        known, records, same = self._known[stack.side], stack.records, 0
        while same < min(len(known), n_regions) and known[same] == records[same]:
            same += 1
        # A rollback also where nothing is too much: the interrupt may have come right after an event was logged.
        top = records[same - 1].top if same else stack.start
        self._note("rollback", stack.side, same, top, 0, 0, (), "", 1, None, "")
        del known[same:]
        for slot in range(same, n_regions):
            self._note_record("restore", stack, slot)

    def _note_record(self, kind: str, stack: Stack, slot: int) -> None:
        """Log a region of which no more than its bytes are known."""
        record = stack.records[slot]
        offset, nbytes, label, top = record
        self._note(kind, stack.side, slot + 1, top, offset, nbytes, (nbytes,), "uint8", 1, label, "")
        self._known[stack.side].append(record)

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
            self._known[stack.side] = stack.records.copy()
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
        stack, slot = take.stack, take.slot
        known, records = self._known[stack.side], stack.records
        if len(known) != slot or (slot and known[-1] != records[slot - 1]):
            self._catch_up(stack, slot)
        self._note(
            take.kind, stack.side, slot + 1, take.new_top, take.offset, take.nbytes, take.shape, take.dtype.name,
            take.align, take.label, "",
        )  # fmt: skip
        known.append(records[slot])

    def took(self, stack: Stack, slot: int, record: Record, shape: tuple[int, ...], dtype: DType) -> None:
        """Log a region."""
        known = self._known["low"]
        if len(known) != slot or (slot and known[-1] is not stack.records[slot - 1]):
            self._catch_up(stack, slot)
        offset, nbytes, label, top = record
        align, least = self._alignment, dtype.alignment
        if align < least:
            align = least
        # Five of this package: `_log`, this, `_take_watched`, `_allocate`, and `alloc` or `empty`.
        self._log(("alloc", "low", slot + 1, top, offset, nbytes, shape, dtype.name, align, label, ""), 5)
        known.append(record)

    def before_take(self, take: Take) -> None:
        """Note what a region grows to, which `extended` is not told."""
        if take.growing:
            self._growing = take

    def extended(self, stack: Stack, slot: int, old: Record) -> None:
        """Log a region that grew."""
        new, take, self._growing = stack.records[slot], self._growing, None
        known = self._known[stack.side]
        if len(known) != slot + 1 or known[slot] != old:
            self._catch_up(stack, slot + 1)
            return
        shape, dtype = ((), "") if take is None else (take.shape, take.dtype.name)
        self._note(
            "extend", stack.side, slot + 1, stack.top, new.offset, new.nbytes, shape, dtype, 1, new.label, ""
        )
        known[slot] = new

    def after_drop(self, drop: Drop) -> None:
        """Log a rollback, and the scopes that die of it."""
        side, n_live = drop.stack.side, drop.n_live
        known, records = self._known[side], drop.stack.records
        if len(known) < n_live or (n_live and known[n_live - 1] != records[n_live - 1]):
            self._catch_up(drop.stack, n_live)
        self._log(("rollback", side, n_live, drop.new_top, 0, 0, (), "", 1, None, drop.cause), 4)
        del known[n_live:]
        scopes = self._open[side]
        while scopes and (checkpoint := scopes[-1]._checkpoint) is not None and checkpoint._n_live > n_live:
            self._note_scope("scope_close", scopes.pop())

    def restored(self, stack: Stack, n_live: int, known: Any) -> None:
        """Log regions that are back, as one event each, and the scopes that live again with them."""
        if self._known[stack.side] != stack.records[:n_live]:
            self._catch_up(stack, n_live)
        for slot in range(n_live, len(stack.records)):
            self._note_record("restore", stack, slot)
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
            self._note_scope("scope_close", scope, 6)  # in between are `_exit`, `_leave` and `__exit__`

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

    def _note_scope(self, kind: str, scope: Scope, n_ours: int = 4) -> None:
        stack = self._stack_of(scope)
        at = 0 if scope._checkpoint is None else scope._checkpoint.top
        n_regions = len(stack.serials)
        self._log((kind, scope.side, n_regions, stack.top, at, 0, (), "", 1, scope.label, ""), n_ours)

    def _stack_of(self, scope: Scope) -> Stack:
        return scope._arena._low if scope.side == "low" else scope._arena._high

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
