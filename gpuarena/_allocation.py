"""Taking memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuarena import _bump
from gpuarena._index import MAX_DIMS, Layout, parse_shape
from gpuarena._positions import Positions
from gpuarena._stack import Record, Stack, Take
from gpuarena._state import check_text, parse_alignment
from gpuarena.dtypes import DType, as_dtype
from gpuarena.errors import (
    AlignmentError,
    ArgumentError,
    ArgumentTypeError,
    CheckpointError,
    OutOfMemoryError,
    ShapeError,
)
from gpuarena.region import Region

#: Slots whose last request is remembered, so that a loop that repeats its allocations skips the validation.
_N_REPEATS = 256


#: Ways of naming a dtype that are remembered.
_N_DTYPES = 64
#: In place of an array in a remembered request that came twice: most come once, so nothing is prepared for them.
_WANTED = object()
_new_record = tuple.__new__


def _can_be_remembered(given: Any, dtype: DType) -> bool:
    """Return whether a way of naming a dtype is hashable and equal to no other: two structures can be."""
    return given.__hash__ is not None and (dtype.numpy is None or dtype.numpy.names is None)


def _all_integers(shape: tuple[Any, ...]) -> bool:
    return all(type(dim) is int for dim in shape)


class Allocation(Positions):
    """The part of an arena that hands out regions."""

    def alloc(
        self,
        shape: Any,
        dtype: Any,
        *,
        align: int | None = None,
        fill: Any = None,
        label: str | None = None,
        side: str = "low",
    ) -> Region:
        """Return a region, the checked handle to the next free bytes.

        >>> from gpuarena import Arena
        >>> Arena(1024).alloc((2, 3), "bfloat16").shape
        (2, 3)

        Parameters
        ----------
        shape : int or sequence of int
            ``()`` is one element; a shape with a zero takes no space and always succeeds.
        dtype
            Anything `as_dtype` knows.
        align : int, optional
            Alignment of the address in bytes; by default the arena's, or the dtype's if that is more.
        fill : scalar or array, optional
            Initial contents, assigned with the library's broadcasting. Without it the contents are undefined.
        label : str, optional
            For messages, and for `by_label`.
        side : {"low", "high"}
            The end to take from. ``"high"`` is for what outlives the scopes of the low end: it grows down from
            the capacity, and has checkpoints of its own.

        Raises
        ------
        ArgumentTypeError, ArgumentError, ShapeError, DTypeError, AlignmentError
            The request can never be right: the shape is checked first, then dtype, align, label, side, and the
            size that they make together. Unchanged on error.
        ArgumentError
            Reading `fill` allocated from this arena, or rolled it back; that stands, the request does not.
        OutOfMemoryError
            It does not fit; nothing has changed but `Stats.n_failed`. On the low end it fits exactly if the
            aligned offset plus its bytes is at most the first byte of the high end.
        ArenaClosedError
            The arena is closed.
        """
        with self._lock:
            if fill is None and side == "low" and not self._hooks:
                granted = self._quick(shape, dtype, align, label)
                if granted is not None:
                    record, dims, dt, slot, repeated = granted
                    if repeated and self._requests[slot][-1] is None:
                        self._requests[slot] = (*self._requests[slot][:-1], _WANTED)
                    region = Region._root_of(self, self._low, slot, self._next_serial, record, dims, dt)
                    self._push(self._low, record, None)
                    return region
            stack, slot, serial, record, dims, dt, _ = self._allocate(
                shape, dtype, align, label, side, fill, needs_array=False
            )
            region = Region._root_of(self, stack, slot, serial, record, dims, dt)
            if self._checks is not None:
                region._site = self._checks.site_of(stack.side, slot)
            return region

    def _reserve(self, shape: Any, dtype: Any, align: int, label: str) -> Region:
        """Return a region whose memory, where the backend grows, the caller commits in pieces, from its start on.

        Whoever allocates behind it commits all of it. Nothing may touch what is not committed. In debug mode, which
        writes to whole regions, it is committed at once.
        """
        with self._lock:
            stack, slot, serial, record, dims, dt, _ = self._allocate(
                shape, dtype, align, label, "low", None, needs_array=False, lazy=self._checks is None
            )
            return Region._root_of(self, stack, slot, serial, record, dims, dt)

    def empty(
        self, shape: Any, dtype: Any, *, align: int | None = None, label: str | None = None, side: str = "low"
    ) -> Any:
        """Return the next free bytes as an array of the backend's library, contents undefined.

        The array is the library's own and knows nothing of the arena: after a rollback it still points at its
        old bytes, which then belong to somebody else. `alloc` returns a handle that notices.

        Parameters and errors as for `alloc`.
        """
        with self._lock:
            if side == "low" and not self._hooks:
                low = self._low
                request = self._requests.get(len(low.serials))
                if request is not None and (self._is_capturing is None or not self._is_capturing()):
                    top, dims, given_dtype, given_align, given_label, record, _, prototype = request
                    if (
                        dims is shape
                        and given_dtype is dtype
                        and given_label is label
                        and given_align is align
                        and prototype is not None
                        and prototype is not _WANTED
                        and top == low.top
                        and record[3] <= self._high.top
                    ):  # what `_quick` and `_push` do, written out: a loop that repeats itself comes here
                        array = self._backend.again(prototype)
                        self._next_serial = (serial := self._next_serial) + 1
                        low.serials.append(serial)
                        low.records.append(record)
                        low.arrays.append(array)
                        low.top = record[3]
                        low.used += record[1]
                        return array
                granted = self._quick(shape, dtype, align, label)
                if granted is not None:
                    record, dims, dt, slot, repeated = granted
                    if repeated:
                        if self._requests[slot][-1] is None:
                            self._requests[slot] = (*self._requests[slot][:-1], _WANTED)
                        array = self._again(low, slot, dims, dt, record)
                    else:
                        array = self._backend.root(record[0], dims, dt)
                    self._push(low, record, array)
                    return array
            return self._allocate(shape, dtype, align, label, side, None, needs_array=True)[-1]

    def zeros(
        self, shape: Any, dtype: Any, *, align: int | None = None, label: str | None = None, side: str = "low"
    ) -> Any:
        """Return an array of zeros; otherwise as `empty`."""
        return self._allocate(shape, dtype, align, label, side, 0, needs_array=True)[-1]

    def full(
        self,
        shape: Any,
        value: Any,
        dtype: Any,
        *,
        align: int | None = None,
        label: str | None = None,
        side: str = "low",
    ) -> Any:
        """Return an array filled with `value`; otherwise as `empty`."""
        if value is None:
            raise ArgumentTypeError("full() needs a value")
        return self._allocate(shape, dtype, align, label, side, value, needs_array=True)[-1]

    def from_array(
        self, values: Any, *, align: int | None = None, label: str | None = None, side: str = "low"
    ) -> Region:
        """Return a region with the shape, dtype and contents of `values`, copied in.

        >>> from gpuarena import Arena
        >>> Arena(1024).from_array([[1.0, 2.0]]).shape
        (1, 2)
        """
        if not (hasattr(values, "shape") and hasattr(values, "dtype")):
            values = np.asarray(values)
        return self.alloc(tuple(values.shape), values.dtype, align=align, fill=values, label=label, side=side)

    def _quick(
        self, shape: Any, dtype: Any, align: Any, label: Any
    ) -> tuple[Record, tuple[int, ...], DType, int, bool] | None:
        """Return where an ordinary request goes, and whether it is the last one of its slot again.

        None means the long way, which also says what is wrong.

        The same request as the last one in this slot, at the same position, has the same outcome. Nothing is
        compared by value that could be equal to something invalid: True equals 1.
        """
        if self._is_capturing is not None and self._is_capturing():
            return None
        low = self._low
        slot, top, limit = len(low.serials), low.top, self._high.top
        request = self._requests.get(slot)
        if request is not None:
            given_top, dims, given_dtype, given_align, given_label, record, dt, _ = request
            if (
                given_dtype is dtype
                and given_top == top
                and given_align is align
                and given_label is label
                and record[3] <= limit
                and (dims is shape or (type(shape) is tuple and dims == shape and _all_integers(shape)))
            ):
                return record, dims, dt, slot, True
        if align is not None or type(shape) is not tuple or not (label is None or type(label) is str):
            return None
        try:
            known = self._dtypes.get(dtype)
        except TypeError:  # not hashable
            return None
        if known is None:
            return None
        dt, nbytes, alignment = known
        for dim in shape:
            if type(dim) is not int or dim <= 0:
                return None
            nbytes *= dim
        if len(shape) > MAX_DIMS:
            return None
        base = self.address
        offset = ((base + top + alignment - 1) & -alignment) - base
        stop = offset + nbytes
        if stop > limit:  # of a size that wraps elsewhere, too
            return None
        record = _new_record(Record, (offset, nbytes, label, stop))
        if slot < _N_REPEATS:
            self._requests[slot] = top, shape, dtype, align, label, record, dt, None
        return record, shape, dt, slot, False

    def _again(
        self, stack: Stack, slot: int, shape: tuple[int, ...], dtype: DType, record: Record | None = None
    ) -> Any:
        """Return a root array for a slot, made of the one that a request which repeats itself keeps for that."""
        if record is None:
            record = stack.records[slot]
        request = self._requests.get(slot) if stack is self._low else None
        if request is None or request[5] is not record or request[-1] is None:
            return self._backend.root(record[0], shape, dtype)
        prototype = request[-1]
        if prototype is _WANTED:
            prototype = self._backend.prototype(record[0], shape, dtype)
            self._requests[slot] = (*request[:-1], prototype)
        return self._backend.again(prototype)

    def _push(self, stack: Stack, record: Record, array: Any) -> None:
        """Take a region; the caller holds the lock."""
        self._next_serial = (serial := self._next_serial) + 1
        stack.serials.append(serial)
        stack.records.append(record)
        stack.arrays.append(array)
        stack.top = record[3]
        stack.used += record[1]

    def _take_watched(
        self, shape: Any, dtype: Any, align: Any, label: Any, needs_array: bool
    ) -> tuple[Stack, int, int, Record, tuple[int, ...], DType, Any] | None:
        """Take a region the short way where there are watchers, and tell them; None means the long way.

        The caller holds the lock.
        """
        granted = self._quick(shape, dtype, align, label)
        if granted is None:
            return None
        record, dims, dt, slot, repeated = granted
        low, serial = self._low, self._next_serial
        if repeated and self._requests[slot][-1] is None:
            self._requests[slot] = (*self._requests[slot][:-1], _WANTED)
        array = self._again(low, slot, dims, dt, record) if needs_array else None
        self._push(low, record, array)
        for watcher in self._watchers:
            watcher.took(low, slot, record, dims, dt)
        return low, slot, serial, record, dims, dt, array

    def _allocate(
        self,
        shape: Any,
        dtype: Any,
        align: Any,
        label: Any,
        side: Any,
        fill: Any,
        *,
        needs_array: bool,
        lazy: bool = False,
    ) -> tuple[Stack, int, int, Record, tuple[int, ...], DType, Any]:
        """Take a region the long way; return what a `Region` is made of, and its array if that was made."""
        if self._watchers and fill is None and side == "low":  # whoever gives no contents has the lock
            taken = self._take_watched(shape, dtype, align, label, needs_array)
            if taken is not None:
                return taken
        dims, dt, nbytes, alignment = self._request(shape, dtype, align, label, side)
        with self._lock:
            self._watch()
            stack = self._low if side == "low" else self._high
            offset, new_top = self._place(stack, nbytes, alignment, label)
            slot = len(stack.serials)
            take = None
            if self._hooks:
                take = Take(
                    stack, slot, offset, nbytes, new_top, dims, dt, alignment, label,
                    fill is not None, lazy=lazy,
                )  # fmt: skip
                self._ask(take)
            array = None
            if fill is not None:  # written before anything is taken, so that a bad value takes nothing
                before = len(stack.serials), stack.top
                array = self._new_root(stack, slot, offset, dims, dt, label)
                if self._order is not None:
                    self._order.before_write(side, slot)
                self._backend.write(array, fill.array if isinstance(fill, Region) else fill)
                if self._order is not None:
                    self._order.wrote()
                if self._closed or (len(stack.serials), stack.top) != before:
                    raise ArgumentError(
                        "reading the initial contents moved the arena they go to; read them before"
                    )
            elif needs_array:
                array = self._new_root(stack, slot, offset, dims, dt, label)
            record = Record(offset, nbytes, label, new_top)
            if (
                (take is None or self._watchers)
                and _can_be_remembered(dtype, dt)
                and len(self._dtypes) < _N_DTYPES
            ):
                self._dtypes[dtype] = dt, dt.itemsize, max(self.alignment, dt.alignment)
            serial = self._next_serial  # reading the contents may have used some
            self._push(stack, record, None if self._tracker is not None else array)
            if take is not None:
                for hook in self._hooks:
                    hook.after_take(take)
            return stack, slot, serial, record, dims, dt, array

    def _request(
        self, shape: Any, dtype: Any, align: Any, label: Any, side: Any
    ) -> tuple[tuple[int, ...], DType, int, int]:
        """Validate everything about a request but whether it fits, in the documented order."""
        if self._closed:
            raise self._closed_error("alloc")
        dims = parse_shape(shape)
        dt = as_dtype(dtype)
        self._backend.check_dtype(dt)
        if align is None:
            align = self.alignment if self.alignment >= dt.alignment else dt.alignment
        else:
            align = parse_alignment(align)
            if align < dt.alignment:
                raise AlignmentError(
                    f"align={align} is too small for {dt}, which needs {dt.alignment}", align=align
                )
        if label is not None:
            check_text(label, "label")
        if side != "low":
            self._check_side(side)
        try:
            nbytes = _bump.nbytes_of(dims, dt.itemsize)
        except OverflowError:
            raise ShapeError(f"shape {dims} of {dt} has more than 2**63 - 1 bytes", shape=dims) from None
        return dims, dt, nbytes, align

    def _place(self, stack: Stack, nbytes: int, align: int, label: str | None) -> tuple[int, int]:
        """Return where `nbytes` would go and where the pointer would stand, or raise; changes nothing."""
        if self._closed:  # closed by another thread since _request looked
            raise self._closed_error("alloc")
        if self._strict and not self._scopes:
            raise CheckpointError(
                "allocation outside of a scope, which strict debugging forbids; use `with arena.scope():`"
            )
        top, guard = stack.top, self._guard
        if stack is self._low:
            limit = self._high.top
            offset = _bump.place(top, nbytes, align, self.address)
            if not _bump.fits(offset, nbytes, limit):
                raise self._out_of_memory(stack, nbytes, offset, label, align)
            # The guard zone may be cut at the end, so that what fits exactly fits in debug mode too.
            return offset, min(offset + nbytes + guard, limit) if nbytes else top
        offset = _bump.place_high(top - guard if nbytes else top, nbytes, align, self.address)
        if nbytes and offset < self._low.top:
            raise self._out_of_memory(stack, nbytes, offset, label, align)
        return offset, offset

    def _place_again(
        self, side: str, offset: int, nbytes: int, top: int, label: str | None, kind: str
    ) -> Region:
        """Take bytes where they were when a trace was recorded."""
        stack = self._low if side == "low" else self._high
        low, high = (top, self._high.top) if stack is self._low else (self._low.top, top)
        if low > high:
            raise self._out_of_memory(stack, nbytes, offset, label)
        self._commit(top)
        slot, serial, dtype = len(stack.serials), self._next_serial, as_dtype("uint8")
        take = Take(stack, slot, offset, nbytes, top, (nbytes,), dtype, 1, label, True, kind)
        record = Record(offset, nbytes, label, top)
        self._push(stack, record, None)
        for hook in self._hooks:
            hook.after_take(take)
        return Region._root_of(self, stack, slot, serial, record, (nbytes,), dtype)

    def _need_room(
        self, requests: list[tuple[Any, Any]], side: Any, label: str, align: int | None = None
    ) -> None:
        """Raise unless several requests, one after the other, are valid and fit; takes nothing."""
        parsed = [self._request(shape, dtype, align, None, side)[2:] for shape, dtype in requests]
        stack = self._low if side == "low" else self._high
        top, guard, low = stack.top, self._guard, stack is self._low
        for nbytes, alignment in parsed:
            if not nbytes:
                continue
            if low:
                stop = _bump.place(top, nbytes, alignment, self.address) + nbytes
                fits = stop <= self._high.top
                top = min(stop + guard, self._high.top) if fits else stop
            else:
                top = _bump.place_high(top - guard, nbytes, alignment, self.address)
                fits = top >= self._low.top
            if not fits:  # all of them together are what does not fit
                needed = abs(top - stack.top) + sum(
                    n + a for n, a in parsed[parsed.index((nbytes, alignment)) + 1 :]
                )
                offset = stack.top if low else stack.top - needed
                raise self._out_of_memory(stack, needed, offset, label)

    def _new_root(
        self,
        stack: Stack,
        slot: int,
        offset: int,
        shape: tuple[int, ...],
        dtype: DType,
        label: str | None,
    ) -> Any:
        if self._tracker is not None:
            return self._tracker.new_root(stack, slot, offset, shape, dtype, label)
        return self._backend.root(offset, shape, dtype)

    def _ask(self, take: Take) -> None:
        """Let the hooks see a region before it is taken; a library that has no memory counts as a failure."""
        try:
            for hook in self._hooks:
                hook.before_take(take)
        except OutOfMemoryError:
            self._n_failed += 1
            for hook in self._hooks:
                hook.failed(take.stack, take.nbytes, take.align, take.label)
            raise

    def _extend(self, region: Region, n_rows: Any) -> Region:
        """Grow the last region in place; see `Region.extend`."""
        with self._lock:
            self._watch()
            region._check()
            stack, slot = region._stack, region._slot
            record = stack.records[slot]
            shape = parse_shape((n_rows, *region.shape[1:])) if region.shape else None
            if shape is None or not region.is_contiguous or region.offset != record.offset:
                raise ShapeError("only a whole region with at least one dimension can be extended")
            if region.nbytes != record.nbytes:
                raise ShapeError(
                    f"{region._describe()} has grown since, to {record.nbytes} bytes; extend the handle that extend() "
                    f"returned",
                    shape=region.shape,
                )
            if shape[0] < region.shape[0]:
                raise ShapeError(
                    f"extend takes the new number of rows of the whole region, at least {region.shape[0]}, "
                    f"not {n_rows}",
                    shape=shape,
                )
            if stack is not self._low or slot != len(stack.serials) - 1:
                raise CheckpointError(
                    f"{region._describe()} cannot be extended: it is not the last region of the low end"
                )
            if stack.marked >= region._serial:
                raise CheckpointError(
                    f"{region._describe()} cannot be extended: a checkpoint was taken behind it"
                )
            if not record.nbytes:
                raise ShapeError("an empty region has no place yet; allocate one that has bytes")
            try:
                nbytes = _bump.nbytes_of(shape, region.dtype.itemsize)
            except OverflowError:
                raise ShapeError(f"shape {shape} has more than 2**63 - 1 bytes", shape=shape) from None
            stop = record.offset + nbytes
            if stop > self._high.top:
                raise self._out_of_memory(stack, nbytes - record.nbytes, stack.top, region.label)
            new_top = min(stop + self._guard, self._high.top)
            if self._hooks:
                take = Take(
                    stack, slot, record.offset, nbytes, new_top, shape,
                    region.dtype, 1, region.label, True, "extend",
                )  # fmt: skip
                self._ask(take)
            stack.records[slot] = Record(record.offset, nbytes, record.label, new_top)
            stack.top = new_top
            stack.used += nbytes - record.nbytes
            for hook in self._hooks:
                hook.extended(stack, slot, record)
            layout = Layout(record.offset, shape, _bump.contiguous_strides(shape, region.dtype.itemsize))
            return Region(region._origin, layout, region.dtype)
