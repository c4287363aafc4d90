"""The machine's calls on what lies in an arena: children, frames, spilled regions, pins, profiles."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from gpuarena import Checkpoint, Spill, as_dtype, errors
from gpuarena.testing import strategies
from gpuarena.testing.model import Allocation, ArenaModel, Ledger, Saved
from gpuarena.testing.position_rules import PositionRules
from gpuarena.testing.region_rules import Request
from gpuarena.testing.subject import Handle, Subject, pattern

__all__ = ["PartRules"]

_N_CHILDREN = 2  # open at a time; more of them leave no steps for what happens to them

_buffers = st.lists(
    st.tuples(strategies.shapes(max_dims=2, max_side=4), st.sampled_from(strategies.DTYPES)),
    min_size=1,
    max_size=3,
)


class _Spilled:
    """What should come back, and where."""

    def __init__(
        self,
        spill: Spill,
        subject: Subject,
        checkpoint: Checkpoint,
        saved: Saved,
        allocations: list[Allocation],
        top: int,
        contents: bytes,
    ) -> None:
        self.spill, self.subject, self.checkpoint, self.saved = spill, subject, checkpoint, saved
        self.allocations, self.top, self.contents = allocations, top, contents
        self.is_back = False

    def __repr__(self) -> str:
        return repr(self.spill)


class PartRules(PositionRules):
    """Children, frames, spilled regions, pins and profiles."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.spills: list[_Spilled] = []

    # -- children -----------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.subjects) <= _N_CHILDREN)
    @rule(
        data=st.data(), capacity=st.integers(1, 200), alignment=strategies.alignments(32), ends=st.booleans()
    )
    def make_child(self, data: st.DataObject, capacity: int, alignment: int, ends: bool) -> None:
        """A child lies in a region; from then on it is tested as its parent is, until the region goes."""
        subject, side = self._draw_subject(data), self._draw_side(data)
        _, checkpoint, saved = self._checkpoint(subject, side)
        child = self._make_child(subject, side, capacity, alignment)
        if child is not None and ends:
            for shape in data.draw(st.lists(strategies.shapes(max_dims=1), max_size=2)):
                self._alloc(child, Request(shape, "int16", None, "inside", self._draw_side(data), "write"))
            self._roll(subject, [saved], lambda: subject.arena.rollback(checkpoint))
            self._check_closed(child)

    def _make_child(self, subject: Subject, side: str, capacity: int, alignment: int) -> Subject | None:
        model = subject.model
        name = f"child {len(self.subjects) + len(self.buried)}"

        def call() -> Any:
            return subject.arena.child(capacity, alignment=alignment, name=name, side=side)

        child = self._attempt(subject, side, capacity, alignment, name, call)
        if child is None:
            return None
        allocation = model.take(side, capacity, alignment, name)
        start = allocation.offset
        assert (child.capacity, child.address) == (capacity, model.address + start)
        inner = ArenaModel(
            self.memory, model.start + start, capacity, child.address, alignment,
            guard=model.guard, poison=model.poison, draws_gaps=model.draws_gaps, strict=model.strict,
        )  # fmt: skip
        allocation.child = inner
        self.subjects.append(Subject(child, inner))
        return self.subjects[-1]

    @precondition(lambda self: len(self.subjects) > 1)
    @rule(data=st.data())
    def close_child(self, data: st.DataObject) -> None:
        """Closing a child leaves its region with the parent."""
        self._close(data.draw(st.sampled_from(self.subjects[1:])))

    @precondition(lambda self: self.buried)
    @rule(data=st.data())
    def call_what_has_ended(self, data: st.DataObject) -> None:
        """A child whose region is gone answers nothing."""
        self._check_closed(data.draw(st.sampled_from(self.buried)))

    def _close(self, subject: Subject) -> None:
        arena, model = subject.arena, subject.model
        inside = self._inside(model.live)
        self._settle(model.live)
        damaged = bool(model.damaged_gaps(model.live) or model.damaged_free())
        subject.check_profile()
        profile, ledger = subject.profile, model.ledger
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            arena.close()
            arena.close()
        assert [warning.category for warning in caught] == [errors.CorruptionWarning] * damaged
        model.mend(model.live, model.damaged_free())
        if ledger is not None:
            for allocation in model.live:
                ledger.add(allocation.label, -allocation.nbytes, -allocation.taken, -1)
            ended = Subject(arena, model)
            ended.profile = profile
            ended.check_profile()
        scopes = [scope for scope, _ in reversed(subject.scopes)] + subject.lost
        for child in [*inside, subject]:
            self._bury(child)
        for scope in scopes:
            with self._refused(errors.ArenaClosedError):
                self._leave(scope, raising=False)

    def _check_closed(self, subject: Subject) -> None:
        arena = subject.arena
        spills = [
            spilled.spill for spilled in self.spills if spilled.subject is subject and not spilled.is_back
        ]
        calls: list[Callable[[], Any]] = [
            lambda: arena.alloc(1, "uint8"),
            lambda: arena.alloc((0,), "uint8"),
            lambda: arena.alloc(1, "uint8", side=self.sides[-1]),
            lambda: arena.empty(1, "uint8"),
            lambda: arena.zeros(1, "uint8"),
            lambda: arena.full(1, 1, "uint8"),
            lambda: arena.from_array(np.zeros(1)),
            arena.checkpoint,
            *(
                lambda checkpoint=checkpoint, call=call: call(checkpoint)
                for owner, checkpoint, _ in self.checkpoints[-3:]
                if owner is subject
                for call in (arena.rollback, arena.keep, arena.spill)
            ),
            *(spill.restore for spill in spills[-3:]),
            arena.scope,
            arena.reset,
            arena.check,
            arena.trim,
            arena.pin,
            arena.scratch,
            arena.profile().__enter__,
            arena.record().__enter__,
            lambda: arena.child(1),
            lambda: arena.frame(x=(1, "uint8")),
            arena.__enter__,
        ]
        for call in calls:
            with self._refused(errors.ArenaClosedError):
                call()
        assert arena.closed
        assert (arena.stats.used, arena.stats.n_regions) == (0, 0)

    # -- frames -------------------------------------------------------------------------------------------------

    @rule(data=st.data(), buffers=_buffers)
    def make_frame(self, data: st.DataObject, buffers: list[tuple[tuple[int, ...], str]]) -> None:
        """The buffers of a frame are placed one after the other, all of them or none."""
        subject, side = self._draw_subject(data), self._draw_side(data)
        arena, model = subject.arena, subject.model
        named = dict(zip("xyz", buffers, strict=False))
        placed, fate, wrong = self._place_frame(subject, side, named)
        if fate is None:
            frame = arena.frame(named, side=side)
            allocations = [model.take(side, nbytes, align, name) for name, nbytes, align in placed]
            for (name, (shape, dtype)), allocation in zip(named.items(), allocations, strict=True):
                region = frame[name]
                assert (region.offset, region.shape, region.label) == (allocation.offset, shape, name)
                assert region.dtype == dtype
                elements = np.arange(math.prod(shape)).reshape(shape)
                self.handles.append(Handle(region, subject, allocation, elements, is_slice=False))
            allocations[-1].in_frame = True
            self.frames.append((frame, subject, allocations))
            return
        if fate is not errors.CorruptionError:
            with self._refused(fate):
                arena.frame(named, side=side)
            if fate is errors.OutOfMemoryError:
                model.fail(f"frame of {', '.join(named)}")
            return
        if model.open_pin is not None:
            return  # whether a pin keeps what was taken back is not settled
        subject.stop_profile()  # nor whether a profile counts it, or a trace shows it
        self.replays_totals = False
        with self._reported([], wrong):
            arena.frame(named, side=side)
        # Nothing stays of it but poison.
        start = Saved(model.era, side, tuple(model.end(side).live), model.end(side).top)
        peaks = model.peak, model.peak_used, model.peak_regions
        counted = model.n_allocs, model.n_bytes
        for name, nbytes, align in placed:
            model.take(side, nbytes, align, name)
        model.mend([], wrong)
        model.drop(start)
        model.n_allocs, model.n_bytes = counted
        model.peak, model.peak_used, model.peak_regions = peaks

    def _place_frame(
        self, subject: Subject, side: str, named: dict[str, tuple[tuple[int, ...], str]]
    ) -> tuple[list[tuple[str, int, int]], type[Exception] | None, list[int]]:
        """Return the buffers that can be placed, what must be raised, and the damage that must be found."""
        model, end = subject.model, subject.model.end(side)
        placed: list[tuple[str, int, int]] = []
        found: tuple[list[tuple[str, int, int]], list[int]] | None = None  # where damage is met first
        top = end.top
        try:
            for name, (shape, dtype) in named.items():
                itemsize = as_dtype(dtype).itemsize
                nbytes, align = math.prod(shape) * itemsize, max(subject.arena.alignment, itemsize)
                offset = model.place(side, nbytes, align)
                if offset is None:
                    return placed, errors.OutOfMemoryError, []
                wrong = model.damaged_free(range(offset, offset + nbytes))
                if wrong and found is None:
                    found = list(placed), wrong
                end.top = model.top_behind(side, offset, nbytes)
                placed.append((name, nbytes, align))
        finally:
            end.top = top
        if model.strict and not subject.scopes:
            return placed, errors.CheckpointError, []
        return (found[0], errors.CorruptionError, found[1]) if found else (placed, None, [])

    @precondition(lambda self: self.frames)
    @rule(data=st.data())
    def use_frame(self, data: st.DataObject) -> None:
        """A frame's arrays stay where they are, and are out of reach as soon as the memory is not the frame's."""
        frame, subject, allocations = data.draw(st.sampled_from(self.frames))
        if allocations[-1] not in subject.model.live:
            for name in frame:
                with self._refused(errors.StaleRegionError):
                    getattr(frame, name)
            return
        for name, allocation in zip(frame, allocations, strict=True):
            region = frame[name]
            array = getattr(frame, name)
            assert tuple(array.shape) == region.shape
            byte = self._new_byte()
            self._backend.write(array, pattern(region.shape, region.dtype, byte))
            subject.model.write(allocation.offset, bytes([byte]) * allocation.nbytes)

    # -- spilled regions ----------------------------------------------------------------------------------------

    @rule(data=st.data(), fresh=st.booleans(), shapes=st.lists(strategies.shapes(max_dims=2), max_size=3))
    def spill(self, data: st.DataObject, fresh: bool, shapes: list[tuple[int, ...]]) -> None:
        """What lies above a checkpoint goes to the host, unless it could not come back exactly."""
        if fresh or not self._open_checkpoints():
            entry = self._checkpoint(self._draw_subject(data), self._draw_side(data))
            for shape in shapes:  # with checkpoints between them, which come back with the regions
                self._alloc(entry[0], Request(shape, "int16", None, "spilled", entry[2].side, "write"))
                self._checkpoint(entry[0], entry[2].side)
        else:
            entry = data.draw(st.sampled_from(self._open_checkpoints()))
        subject, checkpoint, saved = entry
        model = subject.model
        valid = checkpoint not in self.kept and model.is_valid(saved)
        above = model.above(saved) if valid else []
        if model.is_pinned(above):
            self._check(subject)  # of two reasons to refuse either may be given
        if (
            not above
            or model.is_pinned(above)
            or any(allocation.child is not None or allocation.in_frame for allocation in above)
        ):
            with self._refused(errors.CheckpointError):
                subject.arena.spill(checkpoint)
            return
        if gaps := model.damaged_gaps(above):  # is reported before anything moves
            with self._reported(gaps, []):
                subject.arena.spill(checkpoint)
            model.mend(above, [])
            return
        top = model.end(saved.side).top
        a, b = sorted((saved.top, top))
        contents = bytes(self.memory[model.start + a : model.start + b])
        spill = subject.arena.spill(checkpoint)
        assert (spill.nbytes, spill.n_regions) == (len(contents), len(above))
        self._dropped(subject, [saved])
        self.spills.append(_Spilled(spill, subject, checkpoint, saved, above, top, contents))

    @precondition(lambda self: self.spills)
    @rule(data=st.data(), last=st.booleans(), before=st.sampled_from(["nothing", "roll back", "crowd"]))
    def restore(self, data: st.DataObject, last: bool, before: str) -> None:
        """It comes back to its place once, with its handles and checkpoints, if the place is free."""
        spilled = self.spills[-1] if last else data.draw(st.sampled_from(self.spills))
        subject, saved = spilled.subject, spilled.saved
        model, restore = subject.model, spilled.spill.restore
        usable = subject in self.subjects and model.is_valid(saved) and spilled.checkpoint not in self.kept
        if before != "nothing" and usable:
            self._roll(subject, [saved], lambda: subject.arena.rollback(spilled.checkpoint))
            if before == "crowd":  # by the other end
                self._fill_exactly(subject, self.sides[-1] if saved.side == "low" else "low", 0, 1)
        if subject not in self.subjects and not spilled.is_back:
            with self._refused(errors.ArenaClosedError):
                restore()
            return
        if spilled.is_back or not usable or model.above(saved):
            with self._refused(errors.CheckpointError):
                restore()
            return
        low, high = (spilled.top, model.high.top) if saved.side == "low" else (model.low.top, spilled.top)
        if low > high:
            with self._refused(errors.OutOfMemoryError):
                restore()
            model.fail("spilled regions")
            return
        restore()
        assert spilled.spill.restored
        model.restore(saved, spilled.allocations, spilled.top, spilled.contents)
        spilled.is_back = True
        self.replays_totals = False  # a replay has to allocate what came back

    # -- pins ---------------------------------------------------------------------------------------------------

    @rule(data=st.data(), label=st.none() | st.just("graph"), block=st.booleans(), failed=st.booleans())
    def open_pin(self, data: st.DataObject, label: str | None, block: bool, failed: bool) -> None:
        """From now on what is handed out is noted; a pin is open once, and none inside another."""
        subject = self._draw_subject(data)
        self._open_pin(subject, label)
        if block:  # what is given back inside the block stays reserved
            side = self._draw_side(data)
            _, checkpoint, saved = self._checkpoint(subject, side)
            for shape in data.draw(st.lists(strategies.shapes(max_dims=2), max_size=2)):
                self._alloc(subject, Request(shape, "int16", None, "captured", side, "write"))
            self._roll(subject, [saved], lambda: subject.arena.rollback(checkpoint))
            self._close_pin(subject, failed)

    def _open_pin(self, subject: Subject, label: str | None) -> None:
        pin = subject.arena.pin(label)
        if subject.pin is not None:
            with self._refused(errors.CheckpointError):
                pin.__enter__()
            return
        assert pin.__enter__() is pin
        subject.pin = pin
        subject.model.begin_pin()
        for call in (pin.__enter__, pin.release):
            with self._refused(errors.CheckpointError):
                call()

    @precondition(lambda self: any(subject.pin is not None for subject in self.subjects))
    @rule(data=st.data(), failed=st.sampled_from([False, False, True]))
    def close_pin(self, data: st.DataObject, failed: bool) -> None:
        """What was handed out inside is kept, wherever the pointers stand now; nothing is after an exception."""
        self._close_pin(data.draw(st.sampled_from([s for s in self.subjects if s.pin is not None])), failed)

    def _close_pin(self, subject: Subject, failed: bool) -> None:
        pin, subject.pin = subject.pin, None
        assert subject.model.open_pin is not None, "the model has the pin that is open"
        furthest = subject.model.open_pin.furthest
        if furthest.get("low", 0) > furthest.get("high", subject.model.capacity):
            failed = True  # where the two ends of a pin meet that used the same bytes in turn is not settled
        error = ZeroDivisionError("on its way") if failed else None
        assert not pin.__exit__(type(error) if error else None, error, None)
        model = subject.model.end_pin(pin.label, failed=failed)
        assert pin.nbytes == sum(entry.nbytes for entry in model.entries.values())
        assert pin.state == ("released" if failed else "kept")
        if not failed:
            subject.pins.append((pin, model))
            if subject.model.guard or len(self.sides) == 1:
                self.replays = (
                    False  # a pin has no guard zone, and lies on both ends, of which there may be one
                )

    @precondition(lambda self: any(subject.pins for subject in self.subjects))
    @rule(data=st.data())
    def release_pin(self, data: st.DataObject) -> None:
        """A released pin keeps nothing any more; its bytes go at the next rollback below it."""
        subject = data.draw(st.sampled_from([s for s in self.subjects if s.pins]))
        pin, model = subject.pins.pop(data.draw(st.integers(0, len(subject.pins) - 1)))
        pin.release()
        pin.release()
        subject.model.pins.remove(model)

    # -- profiles -----------------------------------------------------------------------------------------------

    @rule(data=st.data())
    def profile(self, data: st.DataObject) -> None:
        """Begin to count what is allocated and freed, or end it; the figures are compared after every step."""
        subject = self._draw_subject(data)
        if subject.profile is not None:
            subject.stop_profile()
        else:
            subject.profile = subject.arena.profile("step").__enter__()
            subject.model.ledger = Ledger()
