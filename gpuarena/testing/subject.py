"""An arena under test beside its model, and what is compared after every step."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant

from gpuarena import Arena, Checkpoint, Debug, Region, as_dtype, backends, errors
from gpuarena.testing import strategies
from gpuarena.testing.fake import FakeDevice
from gpuarena.testing.model import Allocation, ArenaModel, Ledger, Saved

__all__ = ["LARGEST_ALIGNMENT", "Compared", "Handle", "Subject", "figures", "pattern", "to_numpy"]

#: Of the requests that the machine makes, in bytes.
LARGEST_ALIGNMENT = 1024

#: Of the arenas: small ones fill up, larger ones have room for what the rules build.
capacities = st.integers(400, 1500) | st.integers(1, 200) | st.sampled_from([256, 1024, 4096])
alignments = strategies.alignments(64) | strategies.alignments(LARGEST_ALIGNMENT)


def to_numpy(array: Any) -> np.ndarray[Any, Any]:
    """Return the contents of a native array (NumPy, torch on any device, CuPy) on the host."""
    if hasattr(array, "get"):  # cupy.ndarray
        array = array.get()
    elif hasattr(array, "cpu"):  # torch.Tensor
        array = array.cpu()
    return np.asarray(array)


def pattern(shape: tuple[int, ...], dtype: Any, byte: int) -> np.ndarray[Any, Any]:
    """Return an array all of whose bytes are `byte`."""
    itemsize = as_dtype(dtype).itemsize
    return np.full((*shape, itemsize), byte, np.uint8).view(as_dtype(dtype).require_numpy()).reshape(shape)


def figures(stats: Any) -> dict[str, int]:
    """Return statistics by name."""
    return {name: getattr(stats, name) for name in stats.__dataclass_fields__}


class Subject:
    """An arena, its model, and what was made of it: the tested arena, or a child."""

    def __init__(self, arena: Arena, model: ArenaModel) -> None:
        self.arena, self.model = arena, model
        self.scopes: list[tuple[Any, Saved]] = []  # open, outermost first
        self.lost: list[Any] = []  # still to be closed, but one around them was closed first
        self.pin: Any = None  # that is open
        self.pins: list[tuple[Any, Any]] = []  # kept ones, with their models
        self.profile: Any = None  # that is running

    def __repr__(self) -> str:
        return str(self.arena.name)

    def stop_profile(self) -> None:
        """Check the figures of the profile for the last time, and end it."""
        if self.profile is not None:
            self.check_profile()
            self.profile.__exit__(None, None, None)
        self.profile = self.model.ledger = None

    def check_profile(self) -> None:
        """Compare the running profile with what the model has counted."""
        ledger = self.model.ledger
        if ledger is None:
            return
        assert set(self.profile.by_label) == ledger.counts.keys() - {Ledger}
        for key, expected in ledger.counts.items():
            found = self.profile.total if key is Ledger else self.profile.by_label[key]
            for ours, theirs in zip(expected, (found.nbytes, found.padded, found.regions), strict=True):
                assert figures(theirs) == figures(ours), f"the profile of {key!r}"
            assert found.n_failed == ledger.n_failed.get(key, 0)


@dataclass(frozen=True, eq=False)
class Handle:
    """A region or a slice of one, and the numbers of the elements that it should show."""

    region: Region
    subject: Subject
    allocation: Allocation
    elements: np.ndarray[
        Any, np.dtype[np.int64]
    ]  # of the region's shape, counted from the allocation's start
    is_slice: bool

    def __repr__(self) -> str:
        return repr(self.region)

    def byte_positions(self) -> Iterator[tuple[int, int]]:
        """Yield start and stop, in bytes of the memory, of each element."""
        itemsize = self.region.dtype.itemsize
        first = self.subject.model.start + self.allocation.offset
        for element in self.elements.flat:
            start = first + int(element) * itemsize
            yield start, start + itemsize


class Compared(RuleBasedStateMachine):
    """Opens an arena and compares it, and its children, with the model; the rules are in the subclasses."""

    def __init__(
        self,
        factory: str | backends.BackendFactory = "host",
        to_numpy: Callable[[Any], np.ndarray[Any, Any]] = to_numpy,
        debug: bool | Debug | None = None,
    ) -> None:
        super().__init__()
        self._factory = factory
        self._to_numpy = to_numpy
        self._given_debug = debug
        self._next_byte = self._next_number = 0
        self.handles: list[Handle] = []  # every one ever made, of earlier arenas too
        self.checkpoints: list[tuple[Subject, Checkpoint, Saved]] = []
        self.kept: list[Checkpoint] = []
        self.frames: list[tuple[Any, Subject, list[Allocation]]] = []
        self.subjects: list[Subject] = []  # the tested arena, then its children that are open
        self.buried: list[Subject] = []
        self._warnings = warnings.catch_warnings()

    # -- opening ------------------------------------------------------------------------------------------------

    @initialize(
        capacity=capacities,
        alignment=alignments,
        debug=strategies.debug_settings(),
        recorded=st.sampled_from([False, False, True]),
    )
    def start(self, capacity: int, alignment: int, debug: Debug | None, recorded: bool) -> None:
        """Make the first arena."""
        self._warnings.__enter__()
        for category in (errors.CorruptionWarning, errors.LiveArraysWarning):
            warnings.simplefilter("error", category)  # nobody misbehaves here unnoticed
        self._open(capacity, alignment, debug, recorded)

    def _make(self, capacity: int, alignment: int, debug: Debug | None) -> tuple[Arena, backends.Backend]:
        made: list[backends.Backend] = []

        def factory(nbytes: int, *, device: Any, alignment: int) -> backends.Backend:
            # Hypothesis repeats a run and wants the same outcome, so no address may be aligned better by chance.
            if not isinstance(self._factory, FakeDevice):
                alignment = max(alignment, LARGEST_ALIGNMENT)
            made.append(backends.create(self._factory, nbytes, device, alignment))
            if made[0].growable:
                made[0].commit(nbytes)  # all bytes are compared, so all must be there
            return made[0]

        arena = Arena(capacity, backend=factory, alignment=alignment, name="tested", debug=debug or False)
        return arena, made[0]

    def _open(self, capacity: int, alignment: int, debug: Debug | None, recorded: bool) -> None:
        if self._given_debug is not None:
            debug = Debug.parse(self._given_debug)
        self._debug = debug
        arena, self._backend = self._make(capacity, alignment, debug)
        self.sides = ("low",) if self._backend.growable else ("low", "high")
        # An array over the whole of the memory, made without the arena's knowledge.
        self._whole = self._backend.root(0, (capacity,), as_dtype("uint8"))
        self.memory = bytearray(self._read_memory())
        model = ArenaModel(
            self.memory, 0, capacity, arena.address, alignment,
            guard=debug.guard if debug else 0, poison=debug is not None and debug.poison,
            draws_gaps=debug is not None, strict=debug is not None and debug.strict,
        )  # fmt: skip
        self.subjects = [Subject(arena, model)]
        self.trace = arena.record().__enter__() if recorded else None
        self.replays_totals = True  # all figures, not only those that a rollback brings back

    def _read_memory(self) -> bytes:
        return self._to_numpy(self._whole).tobytes()

    def _new_byte(self) -> int:
        self._next_byte = self._next_byte % 250 + 1  # neither poison nor guard
        return self._next_byte

    @property
    def tested(self) -> Subject:
        """The arena that is no child."""
        return self.subjects[0]

    def _draw_subject(self, data: st.DataObject) -> Subject:
        return data.draw(st.sampled_from([self.tested, *self.subjects]), label="arena")

    def _draw_side(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(self.sides), label="side")

    # -- what may be raised -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _refused(self, *expected: type[Exception]) -> Iterator[None]:
        """Check that the call inside raises; that it changed nothing is seen by the comparison after the step."""
        try:
            yield
        except expected:
            return
        raise AssertionError(f"{' or '.join(e.__name__ for e in expected)} was not raised")

    @contextlib.contextmanager
    def _reported(self, gaps: list[list[int]], free: list[int]) -> Iterator[None]:
        """Check that the call inside reports damage exactly if there is some, and where it is."""
        try:
            yield
        except errors.CorruptionError as error:
            found: list[int] = error.offsets
            assert set(found) <= {*itertools.chain(*gaps), *free}, "bytes that are whole were reported"
            assert {wrong[0] for wrong in (*gaps, free) if wrong} <= set(found), "damage was passed over"
        else:
            assert not gaps, "damaged guard zones were not reported"
            assert not free, "memory written after it was given back was not reported"

    def _fate(self, subject: Subject, side: str, nbytes: int, align: int) -> type[Exception] | None:
        """Return what a request in good order must raise, if anything."""
        model = subject.model
        if model.strict and not subject.scopes:
            return errors.CheckpointError
        if model.place(side, nbytes, align) is None:
            return errors.OutOfMemoryError
        return errors.CorruptionError if model.damaged_place(side, nbytes, align) else None

    def _attempt(
        self, subject: Subject, side: str, nbytes: int, align: int, label: str | None, call: Callable[[], Any]
    ) -> Any:
        """Make an allocating call; return its result, or None if it was rightly refused."""
        fate, model = self._fate(subject, side, nbytes, align), subject.model
        if fate is errors.CorruptionError:
            wrong = model.damaged_place(side, nbytes, align)
            with self._reported([], wrong):
                call()
            model.mend([], wrong)
        elif fate is not None:
            with self._refused(fate):
                call()
            if fate is errors.OutOfMemoryError:
                model.fail(label)
        else:
            return call()
        return None

    # -- what goes together -------------------------------------------------------------------------------------

    def _settle(self, dropped: Iterable[Allocation]) -> None:
        """Let children that are about to end report what is damaged in them."""
        for subject in self._inside(dropped):
            self._check(subject)

    def _inside(self, allocations: Iterable[Allocation]) -> list[Subject]:
        """Return the open children in these regions, and theirs."""
        found, todo = [], list(allocations)
        while todo:
            child = todo.pop().child
            found += [subject for subject in self.subjects if subject.model is child]
            todo += child.live if child is not None else []
        return found

    def _check(self, subject: Subject) -> None:
        model = subject.model
        gaps, free = model.damaged_gaps(model.live), model.damaged_free()
        with self._reported(gaps, free):
            subject.arena.check()
        model.mend(model.live, free)

    def _bury(self, subject: Subject) -> None:
        """Note that an arena has ended."""
        model = subject.model
        self.subjects.remove(subject)
        self.buried.append(subject)
        model.low.live, model.high.live, model.pins = [], [], []
        model.low.top, model.high.top = model.low.start, model.high.start
        model.given_back = bytearray(model.capacity)
        model.era = object()
        subject.profile = model.ledger = model.open_pin = None
        if subject.pin is not None:  # takes nothing of an arena that is closed
            subject.pin.__exit__(None, None, None)
        subject.pin, subject.pins = None, []
        subject.scopes = subject.lost = []

    # -- comparisons --------------------------------------------------------------------------------------------

    @invariant()
    def memory_is_as_the_model_says(self) -> None:
        """Every byte is the one that was written there last, in regions and outside."""
        found = self._read_memory()
        if found != bytes(self.memory):
            wrong = [i for i, (a, b) in enumerate(zip(found, self.memory, strict=True)) if a != b]
            raise AssertionError(
                f"{len(wrong)} bytes differ from what was written, from {wrong[0]} to {wrong[-1]}: "
                f"{found[wrong[0]]:#x} instead of {self.memory[wrong[0]]:#x}"
            )

    @invariant()
    def regions_are_apart_inside_and_aligned(self) -> None:
        """Live regions overlap nowhere, lie inside the arena and on their side, and start at aligned addresses."""
        live = {id(a): a for subject in self.subjects for a in subject.model.live}
        spans: dict[int, list[tuple[int, int]]] = {}
        for handle in self.handles:
            region, allocation = handle.region, handle.allocation
            if id(allocation) in live and region.nbytes == allocation.nbytes and not handle.is_slice:
                capacity = handle.subject.arena.capacity
                assert 0 <= region.offset <= region.offset + region.nbytes <= capacity
                if region.nbytes:
                    assert region.address % allocation.align == 0
                    spans.setdefault(id(handle.subject), []).append((region.offset, id(allocation)))
        for placed in spans.values():
            starts = sorted(set(placed))
            for (start, which), (following, _) in itertools.pairwise(starts):
                assert start + live[which].nbytes <= following, "two live regions share bytes"

    @invariant()
    def every_handle_ever_made_is_live_or_stale_as_it_should(self) -> None:
        """A handle is live exactly while its allocation is; a frame while its buffers are."""
        live = {id(a) for subject in self.subjects for a in subject.model.live}
        assert [h.region.is_live for h in self.handles] == [id(h.allocation) in live for h in self.handles]
        for frame, _, allocations in self.frames:
            assert frame.is_live == (id(allocations[-1]) in live)

    @invariant()
    def figures_are_as_the_model_says(self) -> None:
        """The statistics, by label too, and their relations; those of a profile."""
        for subject in self.subjects:
            arena, model = subject.arena, subject.model
            model.note_peaks()
            stats = arena.stats
            assert figures(stats) == model.figures()
            assert 0 <= stats.top <= stats.high <= stats.capacity
            assert 0 <= stats.used <= stats.used + stats.padding <= stats.peak <= stats.capacity
            assert arena.by_label() == model.by_label()
            assert arena.address == model.address, "the buffer moved"
            assert not arena.closed
            assert list(arena.pins) == [pin for pin, _ in subject.pins]
            subject.check_profile()
        for subject in self.buried:
            assert subject.arena.closed, "a child outlived its region"
            assert subject.arena.stats.n_regions == 0

    @invariant()
    def open_scopes_are_known(self) -> None:
        """`assert_balanced` raises exactly when a scope is open."""
        for subject in self.subjects:
            try:
                subject.arena.assert_balanced()
            except errors.CheckpointError:
                assert subject.scopes, "no scope is open"
            else:
                assert not subject.scopes, "a scope is open"

    @invariant()
    def nothing_is_reported_without_damage(self) -> None:
        """`check` is silent while nobody writes where nobody may."""
        for subject in self.subjects:
            model = subject.model
            if not model.draws_gaps or not (model.damaged_gaps(model.live) or model.damaged_free()):
                subject.arena.check()
