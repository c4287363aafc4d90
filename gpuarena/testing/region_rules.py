"""The machine's calls on regions: allocation, contents, slices, growth."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from gpuarena import Arena, as_dtype, errors
from gpuarena.testing import strategies
from gpuarena.testing.model import Allocation, Saved
from gpuarena.testing.subject import LARGEST_ALIGNMENT, Compared, Handle, Subject, pattern

__all__ = ["RegionRules", "Request"]

_CALLS = ("write", "fill", "from_array", "nothing", "empty", "zeros", "full")


class Request(NamedTuple):
    """The arguments of an allocation, to repeat it with the same objects."""

    shape: tuple[int, ...]
    dtype: str
    align: int | None
    label: str | None
    side: str
    how: str


class RegionRules(Compared):
    """Allocation, contents, slices and growth of regions."""

    # -- allocation ---------------------------------------------------------------------------------------------

    def _alloc(self, subject: Subject, request: Request) -> Allocation | None:
        shape, dtype, align, label, side, how = request
        arena, model = subject.arena, subject.model
        itemsize = as_dtype(dtype).itemsize
        nbytes = math.prod(shape) * itemsize
        effective = max(arena.alignment, itemsize) if align is None else align
        values = pattern(shape, dtype, self._new_byte())
        options: dict[str, Any] = {"align": align, "label": label, "side": side}

        def call() -> Any:
            if how == "from_array":
                return arena.from_array(values, **options)
            if how == "fill":
                return arena.alloc(shape, dtype, fill=values, **options)
            if how == "full":
                return arena.full(shape, 7, dtype, **options)
            if how in ("zeros", "empty"):
                return getattr(arena, how)(shape, dtype, **options)
            return arena.alloc(shape, dtype, **options)

        if align is not None and align < itemsize:
            with self._refused(errors.AlignmentError):
                call()
            return None
        offset = model.place(side, nbytes, effective)
        made = self._attempt(subject, side, nbytes, effective, label, call)
        if made is None:
            return None
        if how == "full":
            values = np.full(shape, 7, as_dtype(dtype).require_numpy())
        elif how == "zeros":
            values = np.zeros(shape, as_dtype(dtype).require_numpy())
        contents = None if how in ("nothing", "empty", "write") else values.tobytes()
        allocation = model.take(side, nbytes, effective, label, contents)
        if how in ("zeros", "empty", "full"):
            assert tuple(made.shape) == shape
            return allocation
        assert (made.offset, made.nbytes, made.shape) == (offset, nbytes, shape)
        assert made.dtype == dtype
        assert made.label == label
        if how == "write":
            made[...] = values
            model.write(allocation.offset, values.tobytes())
        elements = np.arange(math.prod(shape)).reshape(shape)
        self.handles.append(Handle(made, subject, allocation, elements, is_slice=False))
        return allocation

    @rule(
        data=st.data(),
        shape=strategies.shapes(max_dims=2),
        dtype=st.sampled_from(strategies.DTYPES),
        align=st.none() | strategies.alignments(32) | strategies.alignments(LARGEST_ALIGNMENT),
        label=st.none() | st.sampled_from(["weights", "scratch"]),
        how=st.sampled_from(_CALLS),
    )
    def alloc(
        self, data: st.DataObject, shape: tuple[int, ...], dtype: str, align: int | None, label: str | None, how: str
    ) -> None:  # fmt: skip
        """Allocate, which succeeds exactly when the model has room."""
        subject, side = self._draw_subject(data), self._draw_side(data)
        self._alloc(subject, Request(shape, dtype, align, label, side, how))

    @rule(data=st.data(), slack=st.integers(-1, 1), align=strategies.alignments(LARGEST_ALIGNMENT))
    def fill_exactly(self, data: st.DataObject, slack: int, align: int) -> None:
        """Ask for all that is left, for a byte less and for a byte more."""
        self._fill_exactly(self._draw_subject(data), self._draw_side(data), slack, align)

    def _fill_exactly(self, subject: Subject, side: str, slack: int, align: int) -> None:
        model = subject.model
        low, high = model.low.top, model.high.top
        low += -(model.address + low) % align
        nbytes = high - low + slack - (model.guard if side == "high" else 0)
        if nbytes >= 1:
            self._alloc(subject, Request((nbytes,), "uint8", align, None, side, "write"))

    @rule(
        data=st.data(),
        shape=strategies.shapes(max_side=2).filter(lambda shape: 0 in shape),
        dtype=st.sampled_from(strategies.DTYPES),
        how=st.sampled_from(_CALLS),
    )
    def alloc_nothing(self, data: st.DataObject, shape: tuple[int, ...], dtype: str, how: str) -> None:
        """An empty region is always possible, in a full arena too."""
        subject, side = self._draw_subject(data), self._draw_side(data)
        self._alloc(subject, Request(shape, dtype, None, None, side, how))

    @rule(
        data=st.data(),
        shapes=st.lists(strategies.shapes(max_dims=2, max_side=4), min_size=1, max_size=2),
        dtype=st.sampled_from(strategies.DTYPES),
        how=st.sampled_from(["nothing", "empty", "write"]),
        crowded=st.booleans(),
    )
    def repeat(
        self, data: st.DataObject, shapes: list[tuple[int, ...]], dtype: str, how: str, crowded: bool
    ) -> None:
        """The same calls after a rollback give the same offsets, unless the other end has taken the place."""
        subject, side = self._draw_subject(data), self._draw_side(data)
        checkpoint, saved = subject.arena.checkpoint(side), subject.model.saved(side)
        requests = [Request(shape, dtype, None, None, side, how) for shape in shapes]
        finds_damage = bool(subject.model.damaged_free())  # which it reports the first time, and mends
        seen: list[list[int]] = []
        for _ in range(2):
            self._roll(subject, [saved], lambda: subject.arena.rollback(checkpoint))
            made = [self._alloc(subject, request) for request in requests]
            seen.append([allocation.offset for allocation in made if allocation is not None])
        assert finds_damage or seen[0] == seen[1]
        self._roll(subject, [saved], lambda: subject.arena.rollback(checkpoint))
        for request in (Request((131,), "uint8", None, None, side, how), *requests[1:]):  # from elsewhere on
            self._alloc(subject, request)
        if crowded and len(self.sides) == 2:
            other = "high" if side == "low" else "low"
            behind, opposite = subject.arena.checkpoint(other), subject.model.saved(other)
            self._roll(subject, [saved], lambda: subject.arena.rollback(checkpoint))
            self._fill_exactly(subject, other, 0, 1)
            for request in requests:
                self._alloc(subject, request)
            self._roll(subject, [opposite], lambda: subject.arena.rollback(behind))

    # -- wrong arguments ----------------------------------------------------------------------------------------

    @rule(data=st.data(), what=st.sampled_from(["arguments", "contents", "write", "checkpoint"]))
    def misuse(self, data: st.DataObject, what: str) -> None:
        """What can never be right is refused, whatever the state."""
        subject, side = self._draw_subject(data), self._draw_side(data)
        getattr(self, f"_misuse_{what}")(data, subject, side)

    def _misuse_arguments(self, data: st.DataObject, subject: Subject, side: str) -> None:
        """Shapes, types, alignments and ends."""
        dtype = data.draw(st.sampled_from(strategies.DTYPES))
        wrong: list[tuple[st.SearchStrategy[Any], str, tuple[type[Exception], ...]]] = [
            (strategies.negative_shapes(), "shape", (errors.ShapeError,)),
            (strategies.overflowing_shapes(as_dtype(dtype).itemsize), "shape", (errors.ShapeError,)),
            (strategies.wrong_shapes(), "shape", (errors.ArgumentTypeError,)),
            (strategies.wrong_dtypes(), "dtype", (errors.DTypeError,)),
            (strategies.wrong_alignments(), "align", (errors.AlignmentError, errors.ArgumentTypeError)),
            (st.sampled_from([None, 3, "top"]), "side", (errors.ArgumentError, errors.ArgumentTypeError)),
        ]
        strategy, name, expected = data.draw(st.sampled_from(wrong), label="what")
        arguments = {"shape": 1, "dtype": dtype, "side": side, name: data.draw(strategy, label=name)}
        with self._refused(*expected):
            subject.arena.alloc(**arguments)

    def _misuse_contents(self, data: st.DataObject, subject: Subject, side: str) -> None:
        """An initialiser that fails takes its allocation back."""
        if self._fate(subject, side, 6, subject.arena.alignment) is not None:
            return
        contents = data.draw(st.sampled_from([np.zeros((4, 5), np.uint8), _Unreadable()]))
        with self._refused(errors.ShapeError, ZeroDivisionError):
            subject.arena.alloc((2, 3), "uint8", fill=contents, side=side)

    def _misuse_write(self, data: st.DataObject, subject: Subject, side: str) -> None:
        """Values that do not broadcast are refused before anything is written."""
        handle = self._draw_handle(data)
        if handle is not None:
            with self._refused(errors.ShapeError):
                handle.region[...] = np.ones((2, *handle.region.shape), np.uint8)

    def _misuse_checkpoint(self, data: st.DataObject, subject: Subject, side: str) -> None:
        """A checkpoint of another arena is refused, even where the positions agree."""
        other = Arena(5000, alignment=1)
        if data.draw(st.booleans()):
            other.alloc(subject.model.end(side).top, "uint8")
        for call in (subject.arena.rollback, subject.arena.keep, subject.arena.spill):
            with self._refused(errors.CheckpointError):
                call(other.checkpoint())
            with self._refused(errors.ArgumentTypeError):
                call(subject.model.low.top)  # type: ignore[arg-type]

    # -- contents -----------------------------------------------------------------------------------------------

    def _live_handles(self) -> list[Handle]:
        live = {id(a) for subject in self.subjects for a in subject.model.live}
        return [handle for handle in self.handles if id(handle.allocation) in live]

    def _draw_handle(self, data: st.DataObject) -> Handle | None:
        """Return a live region or slice, made now if there is none; None if there is no room."""
        if not self._live_handles():
            self._alloc(self.tested, Request((2, 3), "int16", None, None, "low", "write"))
        live = self._live_handles()
        return data.draw(st.sampled_from(live), label="region") if live else None

    @rule(data=st.data())
    def slice(self, data: st.DataObject) -> None:
        """A slice, of a slice too, shows the elements that NumPy says."""
        parent = self._draw_handle(data)
        if parent is None:
            return
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
        self.handles.append(
            Handle(region, parent.subject, parent.allocation, np.asarray(elements), is_slice=True)
        )

    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        """Writing through a region or a slice changes its elements and nothing else."""
        handle = self._draw_handle(data)
        if handle is None:
            return
        byte = self._new_byte()
        handle.region[...] = pattern(handle.region.shape, handle.region.dtype, byte)
        for start, stop in handle.byte_positions():
            self.memory[start:stop] = bytes([byte]) * (stop - start)

    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        """The native array of a region or a slice shows its elements."""
        handle = self._draw_handle(data)
        if handle is None:
            return
        expected = b"".join(bytes(self.memory[start:stop]) for start, stop in handle.byte_positions())
        with Arena(max(handle.region.nbytes, 1), backend=self._factory) as scratch:
            copy = scratch.from_array(handle.region)
            assert self._to_numpy(copy.reshape(-1).view("uint8").array).tobytes() == expected

    @precondition(lambda self: not all(handle.region.is_live for handle in self.handles))
    @rule(data=st.data())
    def touch_what_is_stale(self, data: st.DataObject) -> None:
        """Every way to the contents of a stale region raises; what describes it does not."""
        live = {id(handle) for handle in self._live_handles()}
        region = data.draw(st.sampled_from([h for h in self.handles if id(h) not in live])).region
        ways: list[Callable[[], Any]] = [
            lambda: region.array,
            region.as_numpy,
            region.as_torch,
            region.as_cupy,
            lambda: region[...],
            lambda: region[()],
            lambda: region.reshape(region.shape),
            lambda: region.view(region.dtype),
            lambda: region.extend(9),
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
        assert region.nbytes == region.dtype.itemsize * math.prod(region.shape)
        assert region.address - region.offset == region.arena.address

    # -- growth -------------------------------------------------------------------------------------------------

    @rule(
        data=st.data(),
        which=st.sampled_from(["new", "new", "marked", "covered", "last", "any"]),
        slack=st.none() | st.integers(-1, 1),
    )
    def extend(self, data: st.DataObject, which: str, slack: int | None) -> None:
        """The last region of the low end grows in place, unless a checkpoint lies behind it; no other does."""
        subject = self._draw_subject(data)
        if which in ("new", "marked", "covered"):
            shape = data.draw(st.sampled_from([(1,), (2, 3), (3, 1)]))
            self._alloc(subject, Request(shape, "int16", None, "grown", "low", "write"))
        if which == "marked":
            subject.arena.checkpoint()
            subject.model.saved("low")
        wanted = subject.model.live if which == "any" else subject.model.low.live[-1:]
        if which == "covered":  # by an empty region even
            shape = data.draw(st.sampled_from([(1,), (0,)]))
            self._alloc(subject, Request(shape, "uint8", None, "behind", "low", "nothing"))
        handles = [h for h in self.handles if h.allocation in wanted and not h.is_slice]
        if not handles:
            return
        handle = data.draw(st.sampled_from(handles)) if which == "any" else handles[-1]
        self._extend(data, subject, handle, slack)

    def _extend(self, data: st.DataObject, subject: Subject, handle: Handle, slack: int | None) -> None:
        region, allocation, model = handle.region, handle.allocation, subject.model
        shape = region.shape
        if shape and shape[0] and slack is not None and region.nbytes:  # to the last byte, and one row more
            room = model.high.top - allocation.offset
            n_rows = room // (region.nbytes // shape[0]) + slack
        else:
            n_rows = (shape[0] if shape else 0) + data.draw(st.integers(-1, 4), label="rows more")
        refusals: set[type[Exception]] = set()
        if not shape or n_rows < max(shape[0], 0) or region.nbytes != allocation.nbytes or not region.nbytes:
            refusals.add(errors.ShapeError)
        if not model.can_extend(allocation):
            refusals.add(errors.CheckpointError)
        if refusals:
            with self._refused(*refusals):
                region.extend(n_rows)
            return
        nbytes = region.nbytes // shape[0] * n_rows
        if allocation.offset + nbytes > model.high.top:
            with self._refused(errors.OutOfMemoryError):
                region.extend(n_rows)
            model.fail(allocation.label)
            return
        gaps = model.damaged_gaps([allocation])  # it grows over the zone behind it
        free = model.damaged_free(
            range(allocation.offset, model.top_behind("low", allocation.offset, nbytes))
        )
        if gaps or free:
            with self._reported(gaps, free):
                region.extend(n_rows)
            model.mend([allocation], free)
            return
        grown = region.extend(n_rows)
        model.extend(allocation, nbytes)
        assert (grown.shape, grown.nbytes) == ((n_rows, *shape[1:]), nbytes)
        assert (grown.offset, grown.address) == (region.offset, region.address), "a region moved"
        elements = np.arange(math.prod(grown.shape)).reshape(grown.shape)
        self.handles.append(Handle(grown, subject, allocation, elements, is_slice=False))

    # -- rollback, used by all ----------------------------------------------------------------------------------

    def _roll(self, subject: Subject, targets: list[Saved], call: Callable[[], Any]) -> bool:
        """Make a call that returns to valid positions; return whether it did, or was refused for a pin."""
        model = subject.model
        dropped = [allocation for saved in targets for allocation in model.above(saved)]
        if model.is_pinned(dropped):
            with self._refused(errors.PinnedError):
                call()
            return False
        self._settle(dropped)
        with self._reported(model.damaged_gaps(dropped), []):
            call()
        self._dropped(subject, targets)
        return True

    def _dropped(self, subject: Subject, targets: list[Saved]) -> None:
        """Let the model return to positions, mended first because a rollback mends what it reports."""
        model = subject.model
        dropped = [allocation for saved in targets for allocation in model.above(saved)]
        ended = self._inside(dropped)
        model.mend(dropped, [])
        for saved in targets:
            model.drop(saved)
        for child in ended:
            self._bury(child)


class _Unreadable:
    """Contents that cannot be read."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        raise ZeroDivisionError
