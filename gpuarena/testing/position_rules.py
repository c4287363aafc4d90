"""The machine's calls on positions: checkpoints, rollback, scopes."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from gpuarena import Checkpoint, errors
from gpuarena.testing.model import Saved
from gpuarena.testing.region_rules import RegionRules
from gpuarena.testing.subject import Subject

__all__ = ["PositionRules"]


class PositionRules(RegionRules):
    """Checkpoints, rollback, reset and scopes, of both ends."""

    @rule(data=st.data())
    def checkpoint(self, data: st.DataObject) -> None:
        """A checkpoint changes nothing but that the last region can grow no more."""
        self._checkpoint(self._draw_subject(data), self._draw_side(data))

    def _checkpoint(self, subject: Subject, side: str) -> tuple[Subject, Checkpoint, Saved]:
        checkpoint, saved = subject.arena.checkpoint(side), subject.model.saved(side)
        assert (checkpoint.side, checkpoint.top) == (side, saved.top)
        self.checkpoints.append((subject, checkpoint, saved))
        return self.checkpoints[-1]

    def _open_checkpoints(self) -> list[Any]:
        return [entry for entry in self.checkpoints if entry[0] in self.subjects]

    @precondition(lambda self: self._open_checkpoints())
    @rule(data=st.data())
    def rollback(self, data: st.DataObject) -> None:
        """Any checkpoint ever made brings its end's state back, or is refused because it is dead."""
        subject, checkpoint, saved = data.draw(st.sampled_from(self._open_checkpoints()))
        if checkpoint in self.kept or not subject.model.is_valid(saved):
            with self._refused(errors.CheckpointError):
                subject.arena.rollback(checkpoint)
        else:
            self._roll(subject, [saved], lambda: subject.arena.rollback(checkpoint))

    @precondition(lambda self: self._open_checkpoints())
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        """A checkpoint that was given up is refused for ever, and nothing else changes."""
        subject, checkpoint, saved = data.draw(st.sampled_from(self._open_checkpoints()))
        if checkpoint in self.kept or not subject.model.is_valid(saved):
            with self._refused(errors.CheckpointError):
                subject.arena.keep(checkpoint)
        else:
            subject.arena.keep(checkpoint)
            self.kept.append(checkpoint)

    @rule(data=st.data())
    def reset(self, data: st.DataObject) -> None:
        """Everything goes on both ends, and every checkpoint dies."""
        subject = self._draw_subject(data)
        model = subject.model
        starts = [Saved(model.era, side, (), model.end(side).start) for side in ("low", "high")]
        if self._roll(subject, starts, subject.arena.reset):
            model.era = object()

    # -- scopes -------------------------------------------------------------------------------------------------

    @rule(data=st.data(), label=st.none() | st.just("step"), scratch=st.booleans())
    def open_scope(self, data: st.DataObject, label: str | None, scratch: bool) -> None:
        """Enter a scope, or the scratch space of an end, inside those that are open; it can be entered once."""
        subject, side = self._draw_subject(data), self._draw_side(data)
        scope: Any
        if scratch:  # this arena stands for its low end
            conflicts = [subject.arena] if side == "high" else []
            scope = subject.arena.scratch(conflicts=conflicts, label=label)
        else:
            scope = subject.arena.scope(label, side=side)
        assert scope.__enter__() is scope
        subject.scopes.append((scope, subject.model.saved(side)))
        with self._refused(errors.CheckpointError):
            scope.__enter__()

    @staticmethod
    def _leave(scope: Any, *, raising: bool) -> ZeroDivisionError | None:
        """Leave a scope, with an exception on the way if `raising`, which must not be swallowed."""
        if not raising:
            scope.__exit__(None, None, None)
            return None
        error = ZeroDivisionError("on its way")
        assert not scope.__exit__(ZeroDivisionError, error, None)
        return error

    def _with_scopes(self, n: int) -> list[Subject]:
        return [subject for subject in self.subjects if len(subject.scopes) >= n]

    @precondition(lambda self: self._with_scopes(1))
    @rule(data=st.data(), raising=st.booleans())
    def close_scope(self, data: st.DataObject, raising: bool) -> None:
        """Leaving the innermost scope brings back the state on entry."""
        subject = data.draw(st.sampled_from(self._with_scopes(1)))
        self._close_scope(subject, len(subject.scopes) - 1, raising)

    @precondition(lambda self: self._with_scopes(2))
    @rule(data=st.data(), raising=st.booleans())
    def close_outer_scope_first(self, data: st.DataObject, raising: bool) -> None:
        """Leaving an outer scope first raises if there is one inside it, and brings back its state all the same."""
        subject = data.draw(st.sampled_from(self._with_scopes(2)))
        self._close_scope(subject, data.draw(st.integers(0, len(subject.scopes) - 2)), raising)

    def _close_scope(self, subject: Subject, at: int, raising: bool) -> None:
        scope, saved = subject.scopes[at]
        model = subject.model
        later = subject.scopes[at + 1 :]
        inner = [entry for entry in later if entry[1].side == saved.side]  # the ends are apart
        dropped = model.above(saved) if model.is_valid(saved) else []
        pinned, gaps = model.is_pinned(dropped), []
        if not pinned:
            self._settle(dropped)
            gaps = model.damaged_gaps(dropped)
        try:
            passing = self._leave(scope, raising=raising)
        except errors.CorruptionError as error:
            with self._reported(gaps, []):
                raise error
        except errors.PinnedError:
            assert pinned, "no pin keeps what the scope gives back"
        except errors.CheckpointError:
            assert inner or not model.is_valid(saved), "a scope in good order could not be closed"
            assert not pinned, "a scope gave back what a pin keeps"
            assert not gaps, "damage was not reported"
        else:
            assert raising or not (inner or pinned or gaps), "a scope was closed without the error it needs"
            assert raising or model.is_valid(saved), "a scope was closed that the arena had left before"
            noted = getattr(passing, "__notes__", [])
            assert bool(noted) == bool(gaps), "damage is noted on the exception that is on its way"
        subject.scopes[at:] = [entry for entry in later if entry not in inner]
        subject.lost += [scope for scope, _ in inner]
        if model.is_valid(saved) and not pinned:
            self._dropped(subject, [saved])

    @precondition(lambda self: any(subject.lost for subject in self.subjects))
    @rule(data=st.data(), raising=st.booleans())
    def close_scope_late(self, data: st.DataObject, raising: bool) -> None:
        """Leaving a scope whose outer one is closed changes nothing."""
        subject = data.draw(st.sampled_from([subject for subject in self.subjects if subject.lost]))
        scope = subject.lost.pop()
        if raising:
            self._leave(scope, raising=True)
        else:
            with self._refused(errors.CheckpointError):
                self._leave(scope, raising=False)
