"""The arena: one buffer, one bump pointer, exact rollback."""

from __future__ import annotations

import sys
import threading
from collections import deque
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import numpy as np

from gpuarena import _bump, backends
from gpuarena._index import parse_shape
from gpuarena._units import format_nbytes, parse_nbytes
from gpuarena.dtypes import DType, as_dtype
from gpuarena.errors import (
    AlignmentError,
    ArenaClosedError,
    ArgumentError,
    ArgumentTypeError,
    CheckpointError,
    OutOfMemoryError,
    ShapeError,
    StaleRegionError,
    refuse_copy,
)
from gpuarena.region import Region
from gpuarena.stats import Stats

__all__ = ["Arena", "Checkpoint", "Scope"]

#: Rollbacks remembered for the messages about stale regions.
_N_REMEMBERED = 256


class Checkpoint:
    """A position of an arena, made by `Arena.checkpoint`: a value, of which the arena keeps no list.

    It is dead once the arena was rolled back below it. `top` is its bump pointer in bytes.
    """

    __slots__ = ("_epoch", "_kept", "_n_live", "_serial", "_token", "_used", "top")

    def __init__(self, token: object, epoch: int, n_live: int, serial: int, top: int, used: int) -> None:
        self._token = token  # identifies the arena without keeping it alive
        self._epoch = epoch
        self._n_live = n_live
        self._serial = serial  # of the last region below, so that a reused slot is told apart
        self._used = used
        self._kept: str | None = None
        self.top = top

    def __repr__(self) -> str:
        return f"Checkpoint(top={self.top}, n_regions={self._n_live})"

    def __reduce__(self) -> Any:
        raise refuse_copy(self)


class _Drop(NamedTuple):
    """One rollback: which regions it dropped, and where it was called."""

    n_live: int
    serial_limit: int
    cause: str
    filename: str
    lineno: int


class Scope:
    """What ``arena.scope()`` returns: a checkpoint on entry, a rollback to it on exit."""

    __slots__ = ("_arena", "_checkpoint", "_state", "label")

    def __init__(self, arena: Arena, label: str | None) -> None:
        self._arena = arena
        self._checkpoint: Checkpoint | None = None
        self._state = "new"
        self.label = label

    def __repr__(self) -> str:
        return f"scope {self.label!r}" if self.label else "an unnamed scope"

    def __enter__(self) -> Scope:
        """Take the checkpoint; a scope can be entered once."""
        if self._state != "new":
            raise CheckpointError(f"{self!r} was entered before; make another with arena.scope()")
        self._arena._enter(self)
        self._state = "open"
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        """Roll back, also when an exception passes, which goes on unchanged."""
        self._state = "closed"
        try:
            self._arena._exit(self, sys._getframe(1))
        except (CheckpointError, ArenaClosedError):
            if exc is None:  # an exception that is on its way says more than ours would
                raise

    def __reduce__(self) -> Any:
        raise refuse_copy(self)


class Arena:
    """One buffer with a bump pointer.

    >>> arena = Arena("1MiB")
    >>> x = arena.alloc((2, 3), "float32")
    >>> x.offset, x.nbytes, arena.stats.used
    (0, 24, 24)
    >>> with arena.scope():
    ...     y = arena.alloc(5, "int8")
    ...     y.offset
    256
    >>> arena.stats.used  # y is gone
    24

    Parameters
    ----------
    capacity : int or str
        Bytes, or a text such as ``"2GiB"``. It never changes, and the buffer never moves, so addresses are a
        function of the calls made.
    backend : {"host", "torch", "cupy"} or a `BackendFactory`
        The library whose arrays the regions are.
    device : optional
        In the library's own words; None is its default device.
    alignment : int
        Default alignment of addresses in bytes, a power of two. A region's own dtype can ask for more.
    name : str, optional
        For messages.

    Raises
    ------
    ArgumentError, ArgumentTypeError, AlignmentError
        The capacity or the alignment can never be right.
    OutOfMemoryError
        The library cannot reserve the buffer.
    BackendError, DeviceMismatchError
        The library or the device is not there.

    Notes
    -----
    Every call is serialised by a lock, and scopes belong to the arena, not to the thread that opened them. An
    arena cannot tell whether work queued on a GPU still reads memory that is rolled back: memory is reused in
    the order of the stream that the arrays are used on, so use them on one stream.
    """

    def __init__(
        self,
        capacity: int | str,
        *,
        backend: str | backends.BackendFactory = "host",
        device: Any = None,
        alignment: int = 256,
        name: str | None = None,
    ) -> None:
        nbytes = parse_nbytes(capacity)
        align = _parse_alignment(alignment)
        _check_text(name, "name")
        self._setup(backends.create(backend, nbytes, device, align), align, name)

    @classmethod
    def from_buffer(cls, buffer: Any, *, alignment: int = 256, name: str | None = None) -> Arena:
        """Return an arena over memory that somebody else owns, all of it, and keep the owner alive.

        >>> Arena.from_buffer(bytearray(1024)).capacity
        1024

        Parameters
        ----------
        buffer
            A contiguous, writeable torch tensor, CuPy or NumPy array, DLPack object, or buffer object
            (``bytearray``, ``mmap``, shared memory). Nothing is aligned for you: the first region starts at the
            first address that its alignment allows.

        Raises
        ------
        ArgumentTypeError, ShapeError, ReadOnlyError, AutogradError, DeviceMismatchError
            It is no memory, not one run of bytes, not writeable, part of an autograd graph, or out of reach.
        """
        align = _parse_alignment(alignment)
        _check_text(name, "name")
        arena = cls.__new__(cls)
        arena._setup(backends.adopt(buffer), align, name)
        return arena

    def _setup(self, backend: backends.Backend, alignment: int, name: str | None) -> None:
        self._backend = backend
        self._lock = threading.RLock()
        self._token = object()
        self._closed = False
        self.name = name
        self.capacity = backend.nbytes
        self.address = backend.address
        self.alignment = alignment
        self.device = backend.device
        self._top = 0
        self._used = 0
        # One entry a live region. A region is live iff serials[slot] == serial: serials are never reused.
        self._serials: list[int] = []
        self._records: list[tuple[int, str | None]] = []  # (nbytes, label)
        self._arrays: list[Any] = []  # root array of the backend's library, made on first use
        self._foreign: dict[int, dict[str, Any]] = {}  # slot: root arrays of other libraries, by library
        self._next_serial = 0
        self._epoch = 0
        self._scopes: list[Scope] = []
        self._drops: deque[_Drop] = deque(maxlen=_N_REMEMBERED)
        self._forgotten_limit = 0  # serial_limit of the last drop that is no longer remembered
        self._peak = 0
        self._n_allocs_total = 0
        self._n_failed = 0
        self._bytes_requested_total = 0

    # -- allocation ---------------------------------------------------------------------------------------------

    def alloc(
        self,
        shape: Any,
        dtype: Any,
        *,
        align: int | None = None,
        fill: Any = None,
        label: str | None = None,
    ) -> Region:
        """Return a region, the checked handle to the next free bytes.

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

        Raises
        ------
        ArgumentTypeError, ShapeError, DTypeError, AlignmentError
            The request can never be right: the shape is checked first, then dtype, align, label, and the size
            that they make together. Unchanged on error.
        ArgumentError
            Reading `fill` allocated from this arena, or rolled it back; that stands, the request does not.
        OutOfMemoryError
            It does not fit; nothing has changed but `Stats.n_failed`. It fits exactly if the aligned offset
            plus its bytes is at most the capacity.
        ArenaClosedError
            The arena is closed.
        """
        dims, dt, nbytes, align = self._request(shape, dtype, align, label)
        with self._lock:
            offset = self._place(nbytes, align, label)
            array = None
            if fill is not None:  # written before anything is taken, so that a bad value takes nothing
                before = len(self._serials), self._top
                array = self._backend.root(offset, dims, dt)
                self._backend.write(array, fill.array if isinstance(fill, Region) else fill)
                if self._closed or (len(self._serials), self._top) != before:
                    raise ArgumentError(
                        "reading the initial contents moved the arena they go to; read them before"
                    )
            slot, serial = self._take(offset, nbytes, label, array)
            return Region._root_of(self, slot, serial, offset, dims, dt, label)

    def empty(self, shape: Any, dtype: Any, *, align: int | None = None, label: str | None = None) -> Any:
        """Return the next free bytes as an array of the backend's library, contents undefined.

        The array is the library's own and knows nothing of the arena: after a rollback it still points at its
        old bytes, which then belong to somebody else. `alloc` returns a handle that notices.

        Parameters and errors as for `alloc`.
        """
        dims, dt, nbytes, align = self._request(shape, dtype, align, label)
        with self._lock:
            offset = self._place(nbytes, align, label)
            array = self._backend.root(offset, dims, dt)
            self._take(offset, nbytes, label, array)
            return array

    def zeros(self, shape: Any, dtype: Any, *, align: int | None = None, label: str | None = None) -> Any:
        """Return an array of zeros; otherwise as `empty`."""
        return self.alloc(shape, dtype, align=align, fill=0, label=label).array

    def full(
        self, shape: Any, value: Any, dtype: Any, *, align: int | None = None, label: str | None = None
    ) -> Any:
        """Return an array filled with `value`; otherwise as `empty`."""
        if value is None:
            raise ArgumentTypeError("full() needs a value")
        return self.alloc(shape, dtype, align=align, fill=value, label=label).array

    def from_array(self, values: Any, *, align: int | None = None, label: str | None = None) -> Region:
        """Return a region with the shape, dtype and contents of `values`, copied in.

        >>> Arena(1024).from_array([[1.0, 2.0]]).shape
        (1, 2)
        """
        if not (hasattr(values, "shape") and hasattr(values, "dtype")):
            values = np.asarray(values)
        return self.alloc(tuple(values.shape), values.dtype, align=align, fill=values, label=label)

    def _request(
        self, shape: Any, dtype: Any, align: int | None, label: str | None
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
            align = _parse_alignment(align)
            if align < dt.alignment:
                raise AlignmentError(
                    f"align={align} is too small for {dt}, which needs {dt.alignment}", align=align
                )
        if label is not None:
            _check_text(label, "label")
        try:
            nbytes = _bump.nbytes_of(dims, dt.itemsize)
        except OverflowError:
            raise ShapeError(f"shape {dims} of {dt} has more than 2**63 - 1 bytes", shape=dims) from None
        return dims, dt, nbytes, align

    def _place(self, nbytes: int, align: int, label: str | None) -> int:
        """Return the offset at which `nbytes` would go, or raise; changes nothing. The caller holds the lock."""
        if self._closed:  # closed by another thread since _request looked
            raise self._closed_error("alloc")
        offset = _bump.place(self._top, nbytes, align, self.address)
        if not _bump.fits(offset, nbytes, self.capacity):
            self._n_failed += 1
            raise self._out_of_memory(nbytes, offset, label)
        return offset

    def _take(self, offset: int, nbytes: int, label: str | None, array: Any) -> tuple[int, int]:
        """Move the bump pointer behind a region that `_place` found; return its slot and serial."""
        slot = len(self._serials)
        serial = self._next_serial
        self._next_serial = serial + 1
        self._serials.append(serial)
        self._records.append((nbytes, label))
        self._arrays.append(array)
        if nbytes:
            self._top = top = offset + nbytes
            self._used += nbytes
            self._bytes_requested_total += nbytes
            if top > self._peak:
                self._peak = top
        self._n_allocs_total += 1
        return slot, serial

    def _truncate(self, n_live: int) -> None:
        del self._serials[n_live:], self._records[n_live:], self._arrays[n_live:]

    # -- checkpoint and rollback --------------------------------------------------------------------------------

    def checkpoint(self) -> Checkpoint:
        """Return the present position, to which `rollback` brings the arena back exactly.

        It costs no memory of the arena and need not be given back.
        """
        with self._lock:
            if self._closed:
                raise self._closed_error("checkpoint")
            serials = self._serials
            n_live = len(serials)
            serial = serials[-1] if n_live else -1
            return Checkpoint(self._token, self._epoch, n_live, serial, self._top, self._used)

    def rollback(self, checkpoint: Checkpoint) -> None:
        """Drop everything allocated since `checkpoint`, which stays usable.

        Regions made since are stale for ever; native arrays made of them keep pointing at memory that will be
        reused, and a torch backward through them raises. The cost is a constant a dropped region.

        Raises
        ------
        CheckpointError
            It is dead (the arena was rolled back below it), was kept, was taken before `reset`, or belongs to
            another arena. Unchanged on error.
        ArenaClosedError
            The arena is closed.
        """
        with self._lock:
            self._validate(checkpoint, "rollback")
            self._drop_to(checkpoint, "rollback()", sys._getframe(1))

    def keep(self, checkpoint: Checkpoint) -> None:
        """Give up `checkpoint` without dropping anything; it cannot be rolled back to afterwards.

        Raises as `rollback`. Unchanged on error.
        """
        with self._lock:
            self._validate(checkpoint, "keep")
            frame = sys._getframe(1)
            checkpoint._kept = f"{frame.f_code.co_filename}:{frame.f_lineno}"

    def scope(self, label: str | None = None) -> Scope:
        """Return a context manager that rolls back on exit, also when an exception passes.

        >>> arena = Arena(1024)
        >>> with arena.scope("step"):
        ...     _ = arena.alloc(100, "uint8")
        >>> arena.stats.used
        0

        Raises
        ------
        CheckpointError
            On exit: a scope inside is still open, or the arena was rolled back below the scope's start. The arena
            is then at the start of the outermost scope that was closed; memory is never brought back to life.
        """
        _check_text(label, "label")
        if self._closed:
            raise self._closed_error("scope")
        return Scope(self, label)

    def reset(self) -> None:
        """Drop everything, and kill every checkpoint and open scope."""
        with self._lock:
            if self._closed:
                raise self._closed_error("reset")
            start = Checkpoint(self._token, self._epoch, 0, -1, 0, 0)
            self._drop_to(start, "reset()", sys._getframe(1))
            self._epoch += 1

    def assert_balanced(self) -> None:
        """Raise `CheckpointError` iff a scope is open, and list those that are."""
        with self._lock:
            if self._scopes:
                names = ", ".join(map(repr, self._scopes))
                raise CheckpointError(f"{len(self._scopes)} open: {names}", scopes=tuple(self._scopes))

    def _enter(self, scope: Scope) -> None:
        with self._lock:
            scope._checkpoint = self.checkpoint()
            self._scopes.append(scope)

    def _exit(self, scope: Scope, frame: FrameType) -> None:
        checkpoint = scope._checkpoint
        assert checkpoint is not None, "a scope that was entered has a checkpoint"
        with self._lock:
            known = scope in self._scopes
            inner: list[Scope] = []
            if known:
                at = self._scopes.index(scope)
                inner = self._scopes[at + 1 :]
                del self._scopes[at:]
            self._validate(checkpoint, f"closing {scope!r}")
            if not known:
                raise CheckpointError(
                    f"{scope!r} was closed out of order: a scope around it was closed before it"
                )
            self._drop_to(checkpoint, f"the end of {scope!r}", frame)
            if inner:
                names = ", ".join(map(repr, inner))
                raise CheckpointError(
                    f"{scope!r} was closed out of order: {names}, opened inside it, is still open"
                )

    def _validate(self, checkpoint: Checkpoint, action: str) -> None:
        """Raise unless `checkpoint` can be used; the caller holds the lock."""
        if type(checkpoint) is not Checkpoint:
            raise ArgumentTypeError(f"{action} takes a Checkpoint, not {type(checkpoint).__name__}")
        if self._closed:
            raise self._closed_error(action)
        if checkpoint._token is not self._token:
            raise CheckpointError(f"{action}: the checkpoint belongs to another arena than {self!r}")
        if checkpoint._epoch != self._epoch:
            raise CheckpointError(f"{action}: the checkpoint was taken before reset(), which killed it")
        if checkpoint._kept is not None:
            raise CheckpointError(f"{action}: the checkpoint was given up by keep() at {checkpoint._kept}")
        n_live = checkpoint._n_live
        serials = self._serials
        if n_live > len(serials) or (n_live and serials[n_live - 1] != checkpoint._serial):
            raise CheckpointError(
                f"{action} out of order: the arena was rolled back below this checkpoint, to before its "
                f"{n_live} regions, by {self._cause(n_live - 1, checkpoint._serial)}"
            )

    def _drop_to(self, checkpoint: Checkpoint, cause: str, frame: FrameType) -> None:
        """Restore a valid checkpoint's state; the caller holds the lock."""
        n_live = checkpoint._n_live
        if len(self._serials) > n_live:
            dropped = [array for array in self._arrays[n_live:] if array is not None]
            if dropped:
                self._backend.invalidate(dropped)
            if self._foreign:
                for slot in range(n_live, len(self._serials)):
                    self._invalidate_foreign(slot)
                    self._foreign.pop(slot, None)
            if len(self._drops) == _N_REMEMBERED:
                self._forgotten_limit = self._drops[0].serial_limit
            self._drops.append(
                _Drop(n_live, self._next_serial, cause, frame.f_code.co_filename, frame.f_lineno)
            )
            self._truncate(n_live)
        self._top = checkpoint.top
        self._used = checkpoint._used

    # -- what it holds ------------------------------------------------------------------------------------------

    @property
    def stats(self) -> Stats:
        """An immutable snapshot of the figures."""
        with self._lock:
            return Stats(
                capacity=self.capacity,
                top=self._top,
                used=self._used,
                padding=self._top - self._used,
                available=self.capacity - self._top,
                n_regions=len(self._serials),
                peak=self._peak,
                n_allocs_total=self._n_allocs_total,
                n_failed=self._n_failed,
                bytes_requested_total=self._bytes_requested_total,
            )

    def by_label(self) -> dict[str | None, int]:
        """Return the bytes of the live regions by label, in order of first use; they add up to `Stats.used`."""
        sums: dict[str | None, int] = {}
        with self._lock:
            for nbytes, label in self._records:
                sums[label] = sums.get(label, 0) + nbytes
        return sums

    @property
    def backend(self) -> str:
        """Name of the backend."""
        return self._backend.name

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """Make every handle stale and let go of the buffer; never raises, and may be called again.

        The memory is given back when the last native array that shares it is gone.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._scopes.clear()
            self._truncate(0)
            self._foreign.clear()
            self._top = self._used = 0
            self._backend.release()

    def __enter__(self) -> Arena:
        if self._closed:
            raise self._closed_error("with")
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        state = (
            "closed"
            if self._closed
            else f"{self._top} of {self.capacity} bytes, {len(self._serials)} regions"
        )
        return f"<Arena{name} on {self._backend.name}/{self.device}: {state}>"

    def __reduce__(self) -> Any:
        raise refuse_copy(self)

    # -- for regions and messages -------------------------------------------------------------------------------

    def _root_array(self, slot: int, library: str, offset: int, shape: tuple[int, ...], dtype: DType) -> Any:
        """Return the root array of a live slot in `library`, made on first use; the caller holds the lock."""
        if library == self._backend.name:
            array = self._arrays[slot]
            if array is None:
                array = self._arrays[slot] = self._backend.root(offset, shape, dtype)
            return array
        arrays = self._foreign.get(slot, {})
        if library not in arrays:
            viewer = self._backend.viewer(library)
            viewer.check_dtype(dtype)
            arrays[library] = viewer.root(offset, shape, dtype)
            self._foreign[slot] = arrays
        return arrays[library]

    def _invalidate_foreign(self, slot: int) -> None:
        """Tell other libraries that the contents of `slot` are no longer what they were; the caller holds the lock."""
        for library, array in self._foreign.get(slot, {}).items():
            self._backend.viewer(library).invalidate([array])

    def _cause(self, slot: int, serial: int) -> str:
        """Say which rollback dropped the region that had `serial` at `slot`."""
        for drop in self._drops:
            if drop.n_live <= slot and serial < drop.serial_limit:
                cause = f"{drop.cause} at {drop.filename}:{drop.lineno}"
                return f"{cause}, or by an earlier one" if serial < self._forgotten_limit else cause
        return "a rollback too long ago to be remembered"

    def _stale_error(self, region: Region) -> StaleRegionError:
        if self._closed:
            return StaleRegionError(f"{region._describe()} is stale: its arena was closed", region=region)
        with self._lock:
            cause = self._cause(region._slot, region._serial)
        return StaleRegionError(
            f"{region._describe()} is stale: its memory was given back by {cause} and may hold other data; "
            f"allocate it outside that scope, or copy what you need before",
            region=region,
        )

    def _closed_error(self, action: str) -> ArenaClosedError:
        return ArenaClosedError(f"{action}: arena{f' {self.name!r}' if self.name else ''} is closed")

    def _out_of_memory(self, nbytes: int, offset: int, label: str | None) -> OutOfMemoryError:
        available = self.capacity - self._top
        missing = offset + nbytes - self.capacity
        return OutOfMemoryError(
            f"{format_nbytes(nbytes)} requested{f' for {label!r}' if label else ''}, {format_nbytes(available)} "
            f"available of {format_nbytes(self.capacity)}; {format_nbytes(missing)} missing, alignment included "
            f"({offset - self._top} bytes). Make the arena larger, or roll back what is no longer needed",
            requested=nbytes,
            aligned_offset=offset,
            available=available,
            capacity=self.capacity,
            missing=missing,
            label=label,
        )


def _parse_alignment(align: Any) -> int:
    if isinstance(align, bool) or not hasattr(align, "__index__"):
        raise ArgumentTypeError(f"an alignment is an integer of bytes, not {type(align).__name__}")
    value = align.__index__()
    if not isinstance(value, int) or not _bump.is_alignment(value):
        raise AlignmentError(f"alignment {value} is no power of two", align=value)
    return value


def _check_text(value: Any, what: str) -> None:
    if value is not None and not isinstance(value, str):
        raise ArgumentTypeError(f"{what} must be a text or None, not {type(value).__name__}")
