"""An arena against a model in plain Python: random calls, each followed by a comparison.

The model (`gpuarena.testing.model`) shares no code with the library: it keeps the live regions as lists, the memory
as a bytearray, and a checkpoint as a copy of a list. Regions are filled with bytes of their own, so that an overlap, a
wrong offset and a byte too many all show in the memory. `subject` compares; the rules are in `region_rules`,
`position_rules`, `part_rules` and `keeping_rules`, and here: damage and the end.
"""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Callable
from typing import Any

import hypothesis
import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

from gpuarena import Debug, backends
from gpuarena.observe import Trace
from gpuarena.testing import strategies
from gpuarena.testing.keeping_rules import KeepingRules
from gpuarena.testing.lockstep import Driver, run_lockstep
from gpuarena.testing.region_rules import Request
from gpuarena.testing.subject import alignments, capacities, figures, pattern, to_numpy

__all__ = ["ArenaMachine", "Driver", "pattern", "run_arena_machine", "run_lockstep", "to_numpy"]


def run_arena_machine(
    factory: str | backends.BackendFactory,
    *,
    to_numpy: Callable[[Any], np.ndarray[Any, Any]] = to_numpy,
    debug: bool | Debug | None = None,
    settings: hypothesis.settings | None = None,
) -> None:
    """Run `ArenaMachine` on a backend: its name, or what makes it. `settings` default to Hypothesis' profile.

    Parameters
    ----------
    factory : str or BackendFactory
    to_numpy : callable
        Returns the contents of one of the backend's arrays of ``uint8`` as a NumPy array.
    debug : bool or Debug, optional
        Debug mode; by default the machine draws it for each arena. Not ``separate``: the memory is one buffer here.
    """
    settings = settings or hypothesis.settings(hypothesis.settings.default, deadline=None)
    run_state_machine_as_test(
        lambda: ArenaMachine(factory, to_numpy, debug),  # type: ignore[arg-type] # annotated as a class, takes any factory
        settings=settings,
    )


class ArenaMachine(KeepingRules):
    """Random calls on an arena and its children, each followed by a comparison with the model."""

    # -- damage, in debug mode ----------------------------------------------------------------------------------

    @precondition(lambda self: self._debug is not None)
    @rule(
        data=st.data(),
        byte=st.integers(0, 250),
        where=st.sampled_from(["new gap", "gap", "free"]),
        then=st.sampled_from(["close", "raise", "allocate", "frame", "extend", "nothing"]),
    )
    def write_outside(self, data: st.DataObject, byte: int, where: str, then: str) -> None:
        """Write a byte that belongs to no region: beside one, or in memory that was given back.

        It is reported once: by what drops the region beside it, by what is allocated over it, or by `check`.
        """
        subject, side = self._draw_subject(data), self._draw_side(data)
        arena, model = subject.arena, subject.model
        _, checkpoint, saved = self._checkpoint(subject, side)
        if where == "free":
            self._alloc(subject, Request((90,), "uint8", 1, "given back", side, "write"))
            self._roll(subject, [saved], lambda: arena.rollback(checkpoint))
        scope = arena.scope(side=side).__enter__()
        subject.scopes.append((scope, saved))
        self._alloc(subject, Request((3,), "uint8", 1, "beside", side, "write"))
        self._alloc(subject, Request((1,), "int16", 16, "beside", side, "write"))
        if where == "free":
            places = [at for at, given_back in enumerate(model.given_back) if given_back]
        else:
            beside = model.above(saved) if where == "new gap" else model.live
            gaps = [gap for allocation in beside for gap in allocation.gaps]
            places = [at for gap in gaps for at in (*gap[:1], *gap[-1:])]
        if places:
            at = model.start + data.draw(st.sampled_from(places), label="byte")
            self._backend.write(self._whole[at : at + 1], np.uint8(byte))
            self.memory[at] = byte
        if then == "allocate":
            self._fill_exactly(subject, side, 0, 1)
        elif then == "frame":  # of which the second buffer may meet the damage
            self._make_frame(subject, side, [((2,), "uint8"), ((8, 8), "uint8")])
        elif then == "extend":
            handles = [h for h in self.handles if h.allocation in model.low.live[-1:]]
            if handles:
                self._extend(data, subject, handles[-1], data.draw(st.sampled_from([None, 0])))
        elif then != "nothing":
            self._close_scope(subject, len(subject.scopes) - 1, raising=then == "raise")

    @precondition(lambda self: self._debug is not None)
    @rule(data=st.data())
    def check(self, data: st.DataObject) -> None:
        """`check` reports damage, mends it, and does not report it again."""
        subject = self._draw_subject(data)
        self._check(subject)
        subject.arena.check()

    # -- the end ------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        tested, children = self.tested, self.subjects[1:]
        if self.trace is not None:
            self.trace.__exit__(None, None, None)
            self._replay(self.trace)
        self._close(tested)
        assert self.subjects == [], "a child outlived its parent"
        for subject in (tested, *children[:1]):
            self._check_closed(subject)
        assert self._read_memory() == bytes(self.memory), "closing touched memory that an array still shows"

    def _replay(self, trace: Trace) -> None:
        """Make the recorded calls on a fresh arena: the same offsets and figures."""
        model = self.tested.model
        debug = self._debug and dataclasses.replace(self._debug, strict=False)  # scopes are not recorded
        arena, _ = self._make(model.capacity, model.alignment, debug)
        regions = trace.replay(arena)
        assert [region.offset for region in regions] == [allocation.offset for allocation in model.live]
        assert arena.by_label() == model.by_label()
        found, expected = figures(arena.stats), model.figures()
        if not self.replays_totals:
            for name in found:
                if "total" in name or "peak" in name:
                    del expected[name]
        assert expected.items() <= found.items(), "a replay has other figures"
        arena.close()

    @rule(
        capacity=capacities,
        alignment=alignments,
        debug=strategies.debug_settings(),
    )
    def close_and_start_again(self, capacity: int, alignment: int, debug: Debug | None) -> None:
        """A closed arena answers nothing, and the next one owes nothing to it."""
        self._end()
        self.buried = []
        self._open(capacity, alignment, debug, recorded=False)

    def teardown(self) -> None:
        """Close the last arena; after a failure, without another look."""
        try:
            if self.subjects and sys.exc_info()[1] is None:
                self._end()
            elif self.subjects:
                warnings.simplefilter("ignore")
                self.tested.arena.close()
        finally:
            self._warnings.__exit__(None, None, None)
