"""The machine's calls on what keeps regions beyond their time: spilled regions and pins; and on profiles."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from gpuarena import Checkpoint, Spill, errors
from gpuarena.testing import strategies
from gpuarena.testing.model import Allocation, Ledger, Saved
from gpuarena.testing.part_rules import PartRules
from gpuarena.testing.region_rules import Request
from gpuarena.testing.subject import Subject

__all__ = ["KeepingRules"]


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


class KeepingRules(PartRules):
    """Spilled regions, pins and profiles."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.spills: list[_Spilled] = []

    # -- spilled regions ----------------------------------------------------------------------------------------

    @rule(
        data=st.data(),
        fresh=st.booleans(),
        shapes=st.lists(strategies.shapes(max_dims=2, max_side=4), max_size=3),
        comes_back=st.booleans(),
    )
    def spill(
        self, data: st.DataObject, fresh: bool, shapes: list[tuple[int, ...]], comes_back: bool
    ) -> None:
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
        if comes_back:  # after the space was used for something else, and a checkpoint taken there
            self._alloc(subject, Request((5,), "int16", None, "between", saved.side, "write"))
            self._checkpoint(subject, saved.side)
            self._restore(self.spills[-1], "roll back")

    @precondition(lambda self: self.spills)
    @rule(data=st.data(), last=st.booleans(), before=st.sampled_from(["nothing", "roll back", "crowd"]))
    def restore(self, data: st.DataObject, last: bool, before: str) -> None:
        """It comes back to its place once, with its handles and checkpoints, if the place is free."""
        self._restore(self.spills[-1] if last else data.draw(st.sampled_from(self.spills)), before)

    def _restore(self, spilled: _Spilled, before: str) -> None:
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

    def _check_closed(self, subject: Subject) -> None:
        super()._check_closed(subject)
        out = [spilled.spill for spilled in self.spills if spilled.subject is subject and not spilled.is_back]
        for spill in out[-3:]:
            with self._refused(errors.ArenaClosedError):
                spill.restore()

    # -- pins ---------------------------------------------------------------------------------------------------

    @rule(
        data=st.data(),
        label=st.none() | st.just("graph"),
        block=st.booleans(),
        failed=st.sampled_from([False, False, True]),
    )
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
            self._alloc(subject, Request((1,), "uint8", 1, "captured", side, "write"))
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
