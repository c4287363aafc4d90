"""An arena against a model in plain Python, and several arenas against each other.

The model shares no code with the library: it keeps the live regions as a list, the memory as a bytearray, and a
checkpoint as a copy of the list. Every region is filled with bytes of its own, so that an overlap, a wrong offset and
a byte too many all show in the memory.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import hypothesis
import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from gpuarena import Arena, Checkpoint, Region, Scope, as_dtype, backends, errors
from gpuarena.testing import strategies
from gpuarena.testing.fake import FakeDevice

__all__ = ["ArenaMachine", "Driver", "run_arena_machine", "run_lockstep", "to_numpy"]


#: Of the requests that the machine makes, in bytes.
_LARGEST_ALIGNMENT = 1024


def to_numpy(array: Any) -> np.ndarray[Any, Any]:
    """Return the contents of a native array (NumPy, torch on any device, CuPy) on the host."""
    if hasattr(array, "get"):  # cupy.ndarray
        array = array.get()
    elif hasattr(array, "cpu"):  # torch.Tensor
        array = array.cpu()
    return np.asarray(array)


def run_arena_machine(
    factory: str | backends.BackendFactory,
    *,
    to_numpy: Callable[[Any], np.ndarray[Any, Any]] = to_numpy,
    settings: hypothesis.settings | None = None,
) -> None:
    """Run `ArenaMachine` on a backend: its name, or what makes it. `settings` default to Hypothesis' profile.

    `to_numpy` returns the contents of one of its arrays of ``uint8`` as a NumPy array.
    """
    settings = settings or hypothesis.settings(hypothesis.settings.default, deadline=None)
    run_state_machine_as_test(
        lambda: ArenaMachine(factory, to_numpy),  # type: ignore[arg-type] # annotated as a class, takes any factory
        settings=settings,
    )


def pattern(shape: tuple[int, ...], dtype: Any, byte: int) -> np.ndarray[Any, Any]:
    """Return an array all of whose bytes are `byte`."""
    itemsize = as_dtype(dtype).itemsize
    return np.full((*shape, itemsize), byte, np.uint8).view(as_dtype(dtype).require_numpy()).reshape(shape)


class _Allocation:
    """What the model knows of a region; two of them are never equal."""

    def __init__(self, offset: int, nbytes: int, align: int, label: str | None) -> None:
        self.offset, self.nbytes, self.align, self.label = offset, nbytes, align, label


@dataclass(frozen=True)
class _Handle:
    """A region or a slice of one, and the numbers of the elements that it should show."""

    region: Region
    allocation: _Allocation
    elements: np.ndarray[
        Any, np.dtype[np.int64]
    ]  # of the region's shape, counted from the allocation's start
    is_slice: bool

    def __repr__(self) -> str:
        return repr(self.region)

    def byte_positions(self) -> Iterator[tuple[int, int]]:
        """Yield start and stop, in bytes of the arena, of each element."""
        itemsize = self.region.dtype.itemsize
        for element in self.elements.flat:
            start = self.allocation.offset + int(element) * itemsize
            yield start, start + itemsize


@dataclass(frozen=True)
class _Saved:
    """What a checkpoint should bring back."""

    era: object  # one for each arena, and another after each reset
    live: tuple[_Allocation, ...]
    top: int

    def __repr__(self) -> str:
        return f"{len(self.live)} regions, top {self.top}"


class ArenaMachine(RuleBasedStateMachine):
    """Random calls on an arena, each followed by a comparison with the model."""

    def __init__(
        self,
        factory: str | backends.BackendFactory = "host",
        to_numpy: Callable[[Any], np.ndarray[Any, Any]] = to_numpy,
    ) -> None:
        super().__init__()
        self._factory = factory
        self._to_numpy = to_numpy
        self._next_byte = 0
        self.handles: list[_Handle] = []  # every one ever made, of earlier arenas too
        self.checkpoints: list[tuple[Checkpoint, _Saved]] = []
        self.kept: list[Checkpoint] = []
        self.scopes: list[tuple[Scope, _Saved]] = []  # open, outermost first
        self.lost: list[Scope] = []  # still to be closed, but one around them was closed first

    @initialize(
        capacity=st.integers(1, 700) | st.sampled_from([1, 256, 4096]),
        alignment=strategies.alignments(_LARGEST_ALIGNMENT),
    )
    def start(self, capacity: int, alignment: int) -> None:
        """Make the first arena."""
        self._open(capacity, alignment)

    def _open(self, capacity: int, alignment: int) -> None:
        def factory(nbytes: int, *, device: Any, alignment: int) -> backends.Backend:
            # Hypothesis repeats a run and wants the same outcome, so no address may be aligned better by chance.
            if not isinstance(self._factory, FakeDevice):
                alignment = max(alignment, _LARGEST_ALIGNMENT)
            self._backend = backends.create(self._factory, nbytes, device, alignment)
            return self._backend

        self.arena = Arena(capacity, backend=factory, alignment=alignment, name="tested")
        self.address = self.arena.address
        # An array over the whole of the memory, made without the arena's knowledge.
        self._whole = self._backend.root(0, (capacity,), as_dtype("uint8"))
        self.memory = bytearray(self._read_memory())
        self.era = object()
        self.live: list[_Allocation] = []
        self.top = self.peak = self.peak_used = self.peak_regions = 0
        self.n_allocs = self.n_failed = self.n_bytes = 0

    def _read_memory(self) -> bytes:
        return self._to_numpy(self._whole).tobytes()

    # -- the model ----------------------------------------------------------------------------------------------

    def _saved(self) -> _Saved:
        return _Saved(self.era, tuple(self.live), self.top)

    def _is_valid(self, saved: _Saved) -> bool:
        n_live = len(saved.live)
        return saved.era is self.era and tuple(self.live[:n_live]) == saved.live

    def _restore(self, saved: _Saved) -> None:
        self.live = list(saved.live)
        self.top = saved.top

    def _expected_offset(self, nbytes: int, align: int) -> int:
        return self.top + (-(self.address + self.top) % align if nbytes else 0)

    def _new_byte(self) -> int:
        self._next_byte = self._next_byte % 255 + 1
        return self._next_byte

    # -- comparisons --------------------------------------------------------------------------------------------

    def _observe(self) -> tuple[Any, ...]:
        """Return everything that a refused call must leave as it was."""
        arena = self.arena
        with contextlib.suppress(errors.CheckpointError):
            arena.assert_balanced()
            return (
                arena.stats,
                arena.by_label(),
                repr(arena),
                self._liveness(),
                self._read_memory(),
                "balanced",
            )
        return arena.stats, arena.by_label(), repr(arena), self._liveness(), self._read_memory(), "open"

    def _liveness(self) -> list[bool]:
        return [handle.region.is_live for handle in self.handles]

    @contextlib.contextmanager
    def _refused(self, *expected: type[Exception]) -> Iterator[None]:
        """Check that the call inside raises one of `expected` and changes nothing (but counts, out of memory)."""
        before = self._observe()
        try:
            yield
        except expected as error:
            if isinstance(error, MemoryError):
                self.n_failed += 1
        else:
            raise AssertionError(f"{' or '.join(e.__name__ for e in expected)} was not raised")
        stats, *rest = self._observe()
        assert rest == list(before[1:]), "a call that raised changed something"
        unchanged = {name: value for name, value in _figures(before[0]).items() if name != "n_failed"}
        assert unchanged.items() <= _figures(stats).items(), "a call that raised changed the statistics"

    @invariant()
    def memory_is_as_the_model_says(self) -> None:
        """Every byte is the one that was written there last, in regions and outside."""
        if self._read_memory() != bytes(self.memory):
            wrong = [
                i for i, (a, b) in enumerate(zip(self._read_memory(), self.memory, strict=True)) if a != b
            ]
            raise AssertionError(
                f"{len(wrong)} bytes differ from what was written, from {wrong[0]} to {wrong[-1]}"
            )

    @invariant()
    def regions_are_apart_inside_and_aligned(self) -> None:
        """Live regions overlap nowhere, lie inside the arena, and start at aligned addresses."""
        assert self.arena.address == self.address, "the buffer moved"
        spans = []
        for handle in self.handles:
            region, allocation = handle.region, handle.allocation
            if allocation in self.live and region.nbytes and not handle.is_slice:
                assert region.offset >= 0
                assert region.offset + region.nbytes <= self.arena.capacity
                assert region.address % allocation.align == 0
                spans.append((region.offset, region.offset + region.nbytes))
        spans.sort()
        for (_, stop), (start, _) in itertools.pairwise(spans):
            assert stop <= start, "two live regions share bytes"

    @invariant()
    def every_handle_ever_made_is_live_or_stale_as_it_should(self) -> None:
        """A handle is live exactly while its allocation is."""
        assert self._liveness() == [handle.allocation in self.live for handle in self.handles]

    @invariant()
    def figures_are_as_the_model_says(self) -> None:
        """The statistics, by label too, and their relations."""
        stats = self.arena.stats
        used = sum(allocation.nbytes for allocation in self.live)
        self.peak = max(self.peak, self.top)
        self.peak_used = max(self.peak_used, used)
        self.peak_regions = max(self.peak_regions, len(self.live))
        assert _figures(stats) == {
            "capacity": self.arena.capacity,
            "top": self.top,
            "high": self.arena.capacity,
            "used": used,
            "padding": self.top - used,
            "available": self.arena.capacity - self.top,
            "n_regions": len(self.live),
            "committed": self.arena.capacity,
            "peak": self.peak,
            "peak_used": self.peak_used,
            "peak_regions": self.peak_regions,
            "n_allocs_total": self.n_allocs,
            "n_freed_total": self.n_allocs - len(self.live),
            "n_failed": self.n_failed,
            "bytes_requested_total": self.n_bytes,
            "bytes_freed_total": self.n_bytes - used,
        }
        assert 0 <= stats.used <= stats.top <= stats.peak <= stats.capacity
        by_label: dict[str | None, int] = {}
        for allocation in self.live:
            by_label[allocation.label] = by_label.get(allocation.label, 0) + allocation.nbytes
        assert self.arena.by_label() == by_label

    @invariant()
    def open_scopes_are_known(self) -> None:
        """`assert_balanced` raises exactly when a scope is open."""
        try:
            self.arena.assert_balanced()
        except errors.CheckpointError:
            assert self.scopes, "no scope is open"
        else:
            assert not self.scopes, "a scope is open"

    # -- allocation ---------------------------------------------------------------------------------------------

    def _alloc(
        self, shape: tuple[int, ...], dtype: str, align: int | None, label: str | None, how: str = "write"
    ) -> None:
        itemsize = as_dtype(dtype).itemsize
        n_elements = 1
        for dim in shape:
            n_elements *= dim
        nbytes = n_elements * itemsize
        effective = max(self.arena.alignment, itemsize) if align is None else align
        values = pattern(shape, dtype, self._new_byte())

        def call() -> Region:
            if how == "from_array":
                return self.arena.from_array(values, align=align, label=label)
            fill = values if how == "fill" else None
            return self.arena.alloc(shape, dtype, align=align, label=label, fill=fill)

        if align is not None and align < itemsize:
            with self._refused(errors.AlignmentError):
                call()
            return
        offset = self._expected_offset(nbytes, effective)
        if nbytes and offset + nbytes > self.arena.capacity:
            with self._refused(errors.OutOfMemoryError):
                call()
            return
        region = call()
        assert (region.offset, region.nbytes, region.shape) == (offset, nbytes, shape)
        assert region.dtype == dtype
        assert region.label == label
        if how == "write":
            region[...] = values
        self.memory[offset : offset + nbytes] = values.tobytes()
        allocation = _Allocation(offset, nbytes, effective, label)
        self.live.append(allocation)
        self.handles.append(_Handle(region, allocation, np.arange(n_elements).reshape(shape), is_slice=False))
        if nbytes:
            self.top = offset + nbytes
        self.n_allocs += 1
        self.n_bytes += nbytes

    @rule(
        shape=strategies.shapes(),
        dtype=st.sampled_from(strategies.DTYPES),
        align=st.none() | strategies.alignments(_LARGEST_ALIGNMENT),
        label=st.none() | st.sampled_from(["weights", "scratch"]),
        how=st.sampled_from(["write", "fill", "from_array"]),
    )
    def alloc(
        self, shape: tuple[int, ...], dtype: str, align: int | None, label: str | None, how: str
    ) -> None:
        """Allocate, which succeeds exactly when the model has room."""
        self._alloc(shape, dtype, align, label, how)

    @rule(slack=st.integers(-1, 1), align=strategies.alignments(_LARGEST_ALIGNMENT))
    def fill_exactly(self, slack: int, align: int) -> None:
        """Ask for all that is left, for a byte less and for a byte more."""
        nbytes = self.arena.capacity - self._expected_offset(1, align) + slack
        if nbytes >= 1:
            self._alloc((nbytes,), "uint8", align, None)

    @rule(
        shape=strategies.shapes(max_side=2).filter(lambda shape: 0 in shape),
        dtype=st.sampled_from(strategies.DTYPES),
    )
    def alloc_nothing(self, shape: tuple[int, ...], dtype: str) -> None:
        """An empty region is always possible, in a full arena too."""
        self._alloc(shape, dtype, None, None)

    @rule(shape=strategies.negative_shapes(), dtype=st.sampled_from(strategies.DTYPES))
    def alloc_negative(self, shape: tuple[int, ...], dtype: str) -> None:
        """A negative dimension is refused wherever it stands."""
        with self._refused(errors.ShapeError):
            self.arena.alloc(shape, dtype)

    @rule(data=st.data(), dtype=st.sampled_from(strategies.DTYPES))
    def alloc_too_large_for_an_integer(self, data: st.DataObject, dtype: str) -> None:
        """Sizes do not wrap."""
        shape = data.draw(strategies.overflowing_shapes(as_dtype(dtype).itemsize))
        with self._refused(errors.ShapeError):
            self.arena.alloc(shape, dtype)

    @rule(shape=strategies.wrong_shapes())
    def alloc_no_shape(self, shape: Any) -> None:
        """What is no shape is refused."""
        with self._refused(errors.ArgumentTypeError):
            self.arena.alloc(shape, "float32")

    @rule(dtype=strategies.wrong_dtypes())
    def alloc_no_dtype(self, dtype: Any) -> None:
        """What is no element type is refused."""
        with self._refused(errors.DTypeError):
            self.arena.alloc(1, dtype)

    @rule(align=strategies.wrong_alignments())
    def alloc_no_alignment(self, align: Any) -> None:
        """What is no alignment is refused."""
        with self._refused(errors.AlignmentError, errors.ArgumentTypeError):
            self.arena.alloc(1, "uint8", align=align)

    @rule(array=st.booleans())
    def alloc_with_contents_that_do_not_fit(self, array: bool) -> None:
        """An initialiser that fails takes its allocation back."""
        if self._expected_offset(6, self.arena.alignment) + 6 > self.arena.capacity:
            return
        contents = np.zeros((4, 5), np.uint8) if array else _Unreadable()
        with self._refused(errors.ShapeError, ZeroDivisionError):
            self.arena.alloc((2, 3), "uint8", fill=contents)

    # -- contents -----------------------------------------------------------------------------------------------

    def _live_handles(self) -> list[_Handle]:
        return [handle for handle in self.handles if handle.allocation in self.live]

    @precondition(lambda self: self._live_handles())
    @rule(data=st.data())
    def slice(self, data: st.DataObject) -> None:
        """A slice, of a slice too, shows the elements that NumPy says."""
        parent = data.draw(st.sampled_from(self._live_handles()))
        key = data.draw(strategies.indices(parent.region.shape))
        elements = parent.elements[key] if isinstance(key, tuple) else parent.elements[(key,)]
        if strategies.steps_backwards(key) and not self._backend.negative_strides:
            with self._refused(errors.StrideError):
                parent.region[key]
            return
        region = parent.region[key]
        assert region.shape == elements.shape
        assert region.dtype == parent.region.dtype
        if elements.size:
            itemsize = region.dtype.itemsize
            assert region.offset == parent.allocation.offset + int(elements.flat[0]) * itemsize
            for dim, ours, theirs in zip(elements.shape, region.strides, elements.strides, strict=True):
                assert dim == 1 or ours == theirs // elements.itemsize * itemsize
        assert region.nbytes == elements.size * region.dtype.itemsize
        self.handles.append(_Handle(region, parent.allocation, np.asarray(elements), is_slice=True))

    @precondition(lambda self: self._live_handles())
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        """Writing through a region or a slice changes its elements and nothing else."""
        handle = data.draw(st.sampled_from(self._live_handles()))
        byte = self._new_byte()
        handle.region[...] = pattern(handle.region.shape, handle.region.dtype, byte)
        for start, stop in handle.byte_positions():
            self.memory[start:stop] = bytes([byte]) * (stop - start)

    @precondition(lambda self: self._live_handles())
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        """The native array of a region or a slice shows its elements."""
        handle = data.draw(st.sampled_from(self._live_handles()))
        expected = b"".join(bytes(self.memory[start:stop]) for start, stop in handle.byte_positions())
        with Arena(max(handle.region.nbytes, 1), backend=self._factory) as scratch:
            copy = scratch.from_array(handle.region)
            assert self._to_numpy(copy.reshape(-1).view("uint8").array).tobytes() == expected

    @precondition(lambda self: self._live_handles())
    @rule(data=st.data())
    def write_what_does_not_fit(self, data: st.DataObject) -> None:
        """Values that do not broadcast are refused before anything is written."""
        handle = data.draw(st.sampled_from(self._live_handles()))
        with self._refused(errors.ShapeError):
            handle.region[...] = np.ones((2, *handle.region.shape), np.uint8)

    @precondition(lambda self: len(self._live_handles()) < len(self.handles))
    @rule(data=st.data())
    def touch_what_is_stale(self, data: st.DataObject) -> None:
        """Every way to the contents of a stale region raises; what describes it does not."""
        stale = [handle for handle in self.handles if handle.allocation not in self.live]
        region = data.draw(st.sampled_from(stale)).region
        ways: list[Callable[[], Any]] = [
            lambda: region.array,
            region.as_numpy,
            region.as_torch,
            region.as_cupy,
            lambda: region[...],
            lambda: region[()],
            lambda: region.reshape(region.shape),
            lambda: region.view(region.dtype),
            region.__dlpack__,
            region.__dlpack_device__,
            lambda: np.asarray(region),
            lambda: region.__setitem__(..., 0),
        ]
        for way in ways:
            with self._refused(errors.StaleRegionError):
                way()
        assert f"offset {region.offset}" in repr(region)
        assert "stale" in repr(region)
        assert region.nbytes == region.dtype.itemsize * int(np.prod(region.shape))
        assert region.address - region.offset == region.arena.address

    # -- checkpoints --------------------------------------------------------------------------------------------

    @rule()
    def checkpoint(self) -> None:
        """A checkpoint changes nothing."""
        before = self._observe()
        self.checkpoints.append((self.arena.checkpoint(), self._saved()))
        assert self._observe() == before

    @precondition(lambda self: self.checkpoints)
    @rule(data=st.data())
    def rollback(self, data: st.DataObject) -> None:
        """Any checkpoint ever made brings its state back, or is refused because it is dead."""
        checkpoint, saved = data.draw(st.sampled_from(self.checkpoints))
        if checkpoint in self.kept or not self._is_valid(saved):
            with self._refused(errors.CheckpointError):
                self.arena.rollback(checkpoint)
        else:
            self.arena.rollback(checkpoint)
            self._restore(saved)

    @precondition(lambda self: self.checkpoints)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        """A checkpoint that was given up is refused for ever, and nothing else changes."""
        checkpoint, saved = data.draw(st.sampled_from(self.checkpoints))
        if checkpoint in self.kept or not self._is_valid(saved):
            with self._refused(errors.CheckpointError):
                self.arena.keep(checkpoint)
        else:
            before = self._observe()
            self.arena.keep(checkpoint)
            assert self._observe() == before
            self.kept.append(checkpoint)

    @rule(fill=st.booleans())
    def foreign_checkpoint(self, fill: bool) -> None:
        """A checkpoint of another arena is refused, even where the positions agree."""
        other = Arena(1024, alignment=1)
        if fill and self.top:
            other.alloc(min(self.top, 1024), "uint8")
        for call in (self.arena.rollback, self.arena.keep):
            with self._refused(errors.CheckpointError):
                call(other.checkpoint())
            with self._refused(errors.ArgumentTypeError):
                call(self.top)  # type: ignore[arg-type]

    @rule()
    def reset(self) -> None:
        """Everything goes, and every checkpoint dies."""
        self.arena.reset()
        self.live = []
        self.top = 0
        self.era = object()

    # -- scopes -------------------------------------------------------------------------------------------------

    @rule(label=st.none() | st.just("step"))
    def open_scope(self, label: str | None) -> None:
        """Enter a scope inside those that are open; it can be entered once."""
        scope = self.arena.scope(label)
        assert scope.__enter__() is scope
        self.scopes.append((scope, self._saved()))
        with self._refused(errors.CheckpointError):
            scope.__enter__()

    @staticmethod
    def _leave(scope: Scope, *, raising: bool) -> None:
        """Leave a scope, with an exception on the way if `raising`, which must not be swallowed."""
        if raising:
            error = ZeroDivisionError("on its way")
            swallowed: object = scope.__exit__(ZeroDivisionError, error, None)  # type: ignore[func-returns-value]
            assert not swallowed
        else:
            scope.__exit__(None, None, None)

    @precondition(lambda self: self.scopes)
    @rule(raising=st.booleans())
    def close_scope(self, raising: bool) -> None:
        """Leaving the innermost scope brings back the state on entry."""
        self._close_scope(len(self.scopes) - 1, raising)

    @precondition(lambda self: len(self.scopes) > 1)
    @rule(data=st.data(), raising=st.booleans())
    def close_outer_scope_first(self, data: st.DataObject, raising: bool) -> None:
        """Leaving an outer scope first raises, and brings back its state all the same."""
        self._close_scope(data.draw(st.integers(0, len(self.scopes) - 2)), raising)

    def _close_scope(self, at: int, raising: bool) -> None:
        scope, saved = self.scopes[at]
        inner = [scope for scope, _ in self.scopes[at + 1 :]]
        is_valid = self._is_valid(saved)
        try:
            self._leave(scope, raising=raising)
        except errors.CheckpointError:
            assert not raising, "an exception on its way was replaced"
            assert inner or not is_valid, "a scope in good order could not be closed"
        else:
            assert raising or (is_valid and not inner), "a scope out of order was closed without an error"
        del self.scopes[at:]
        self.lost += inner
        if is_valid:
            self._restore(saved)

    @precondition(lambda self: self.lost)
    @rule(raising=st.booleans())
    def close_scope_late(self, raising: bool) -> None:
        """Leaving a scope whose outer one is closed changes nothing."""
        scope = self.lost.pop()
        before = self._observe()
        try:
            self._leave(scope, raising=raising)
        except errors.CheckpointError:
            assert not raising, "an exception on its way was replaced"
        else:
            assert raising, "a scope out of order was closed without an error"
        assert self._observe() == before

    # -- the end ------------------------------------------------------------------------------------------------

    def _close(self) -> None:
        arena = self.arena
        checkpoint = arena.checkpoint()
        arena.close()
        arena.close()
        assert arena.closed
        assert not any(handle.region.is_live for handle in self.handles)
        assert (arena.stats.used, arena.stats.n_regions) == (0, 0)
        calls: list[Callable[[], Any]] = [
            lambda: arena.alloc(1, "uint8"),
            lambda: arena.alloc((0,), "uint8"),
            lambda: arena.empty(1, "uint8"),
            lambda: arena.zeros(1, "uint8"),
            lambda: arena.from_array(np.zeros(1)),
            arena.checkpoint,
            lambda: arena.rollback(checkpoint),
            lambda: arena.keep(checkpoint),
            arena.scope,
            arena.reset,
            arena.__enter__,
            *(lambda scope=scope: self._leave(scope, raising=False) for scope, _ in reversed(self.scopes)),
            *(lambda scope=scope: self._leave(scope, raising=False) for scope in self.lost),
        ]
        for call in calls:
            try:
                call()
            except errors.ArenaClosedError:
                continue
            raise AssertionError("a closed arena answered")
        assert self._read_memory() == bytes(self.memory), "closing touched memory that an array still shows"

    @rule(capacity=st.integers(1, 700), alignment=strategies.alignments(_LARGEST_ALIGNMENT))
    def close_and_start_again(self, capacity: int, alignment: int) -> None:
        """A closed arena answers nothing, and the next one owes nothing to it."""
        self._close()
        self.live, self.scopes, self.lost = [], [], []
        self._open(capacity, alignment)

    def teardown(self) -> None:
        """Close the last arena."""
        if hasattr(self, "arena"):
            self._close()


class _Unreadable:
    """Contents that cannot be read."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        raise ZeroDivisionError


def _figures(stats: Any) -> dict[str, int]:
    return {name: getattr(stats, name) for name in stats.__dataclass_fields__}


class Driver:
    """Makes the calls of `strategies.programs` on one arena."""

    def __init__(
        self, arena: Arena, to_numpy: Callable[[Any], np.ndarray[Any, Any]] | None = to_numpy
    ) -> None:
        self.arena = arena
        self.regions: list[Region] = []
        self.checkpoints: list[Checkpoint] = []
        self.scopes: list[Scope] = []
        self._to_numpy = to_numpy  # None where the memory cannot be read or written

    def step(self, call: tuple[Any, ...]) -> Any:
        """Make one call; return what it showed: figures, or the name of the exception."""
        name, *arguments = call
        try:
            return getattr(self, f"_{name}")(*arguments)
        except errors.ArenaError as error:
            return type(error).__name__
        except IndexError:
            return "IndexError"

    def observe(self) -> tuple[Any, ...]:
        """Return everything that can be compared between arenas."""
        regions = [(r.is_live, r.offset, r.shape, r.strides, r.nbytes, str(r.dtype)) for r in self.regions]
        return self.arena.stats, self.arena.by_label(), regions, self._contents()

    def _contents(self) -> list[bytes]:
        if self._to_numpy is None:
            return []
        return [
            self._to_numpy(region.reshape(-1).view("uint8").array).tobytes()
            for region in self.regions
            if region.is_live and region.is_contiguous
        ]

    def _made(self, region: Region) -> Any:
        self.regions.append(region)
        return region.offset, region.shape, region.strides, region.nbytes, region.address % 16

    def _set(self, region: Region, values: Any) -> None:
        if self._to_numpy is None:
            region.array  # noqa: B018 - the memory cannot be written here, but the view can be made
        else:
            region[...] = values

    def _alloc(self, shape: Any, dtype: Any, align: Any, byte: int) -> Any:
        region = self.arena.alloc(shape, dtype, align=align, label=str(dtype))
        self._set(region, pattern(region.shape, region.dtype, byte))
        return self._made(region)

    def _fill(self, slack: int, align: int | None, byte: int) -> Any:
        top = self.arena.stats.top
        gap = -(self.arena.address + top) % (align or self.arena.alignment)
        return self._alloc((max(self.arena.capacity - top - gap + slack, 0),), "uint8", align, byte)

    def _region(self, number: int) -> Region:
        return self.regions[number % len(self.regions)]

    def _slice(self, number: int, key: tuple[Any, ...]) -> Any:
        return self._made(self._region(number)[key]) if self.regions else None

    def _view(self, number: int, dtype: str) -> Any:
        return self._made(self._region(number).view(dtype)) if self.regions else None

    def _reshape(self, number: int, shape: Sequence[int]) -> Any:
        return self._made(self._region(number).reshape(tuple(shape))) if self.regions else None

    def _write(self, number: int, byte: int) -> Any:
        if self.regions:
            region = self._region(number)
            self._set(region, pattern(region.shape, region.dtype, byte))

    def _copy(self, target: int, source: int) -> Any:
        """Copy between regions of one type, which may share memory."""
        if self.regions and self._region(target).dtype == self._region(source).dtype:
            self._set(self._region(target), self._region(source))

    def _checkpoint(self) -> Any:
        self.checkpoints.append(self.arena.checkpoint())
        return self.checkpoints[-1].top

    def _rollback(self, number: int) -> Any:
        if self.checkpoints:
            self.arena.rollback(self.checkpoints[number % len(self.checkpoints)])

    def _keep(self, number: int) -> Any:
        if self.checkpoints:
            self.arena.keep(self.checkpoints[number % len(self.checkpoints)])

    def _reset(self) -> Any:
        self.arena.reset()

    def _open(self) -> Any:
        self.scopes.append(self.arena.scope().__enter__())

    def _close(self, innermost: bool) -> Any:
        if self.scopes:
            self.scopes.pop(-1 if innermost else 0).__exit__(None, None, None)


def run_lockstep(program: Sequence[tuple[Any, ...]], drivers: Sequence[Driver]) -> None:
    """Make each call on every arena; raise `AssertionError` where they differ in anything that can be seen."""
    first, *others = drivers
    for number, call in enumerate(program):
        result = first.step(call)
        seen = first.observe()
        for other in others:
            where = f"step {number}, {call!r}, on {other.arena.backend}"
            found = other.step(call)
            assert found == result, f"{where}: {found}, but on {first.arena.backend} {result}"
            assert other.observe() == seen, f"{where}: another state than on {first.arena.backend}"
