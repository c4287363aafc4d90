"""The machine's calls on what lies in an arena: children and frames."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from gpuarena import as_dtype, errors
from gpuarena.testing import strategies
from gpuarena.testing.model import ArenaModel, Saved
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


class PartRules(PositionRules):
    """Children and frames."""

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
        self._make_frame(self._draw_subject(data), self._draw_side(data), buffers)

    def _make_frame(self, subject: Subject, side: str, buffers: list[tuple[tuple[int, ...], str]]) -> None:
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
        self.replays_totals = False  # the peak of what was taken back is in no event
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
                wrong = model.damaged_place(side, nbytes, align)
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
            subject.model.write(allocation.offset, bytes([byte]) * region.nbytes)  # it may have grown
