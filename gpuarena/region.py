"""The region: a typed, shaped, sliceable handle that knows when it is stale."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from gpuarena import _index, _messages
from gpuarena._bump import contiguous_strides, is_contiguous
from gpuarena._index import Layout
from gpuarena.dtypes import DType, as_dtype
from gpuarena.errors import AlignmentError, ArgumentError, ShapeError, StrideError, refuse_copy

if TYPE_CHECKING:
    from gpuarena._stack import Record, Stack
    from gpuarena.arena import Arena

__all__ = ["Region"]


class Region:
    """A piece of an arena, made by `Arena.alloc`; every way to its contents first checks that it is live.

    >>> from gpuarena import Arena
    >>> x = Arena(4096).alloc((4, 6), "float32", fill=1)
    >>> x[1:3, ::2].shape
    (2, 3)
    >>> x[0].array.sum()
    np.float32(6.0)

    Slices, `reshape` and `view` are regions of the same memory and die with it.

    Attributes
    ----------
    offset : int
        Bytes from the arena's first byte to the first element.
    nbytes : int
        Bytes of the elements; for a strided slice the bytes between them do not count.
    shape : tuple of int
    strides : tuple of int
        Bytes.
    dtype : DType
    label : str or None

    Notes
    -----
    These stay readable when the region is stale.
    """

    __slots__ = (
        "__weakref__",
        "_arena",
        "_array",
        "_root",
        "_serial",
        "_site",
        "_slot",
        "_stack",
        "_strides",
        "dtype",
        "label",
        "nbytes",
        "offset",
        "shape",
    )

    _arena: Arena
    _stack: Stack
    _slot: int
    _serial: int
    _root: Region | None  # None in the root itself, which must not wait for the garbage collector
    _array: Any
    _site: str  # where it was allocated; only in debug mode
    _strides: tuple[int, ...] | None  # None until somebody asks for those of a contiguous region
    label: str | None
    nbytes: int
    offset: int
    shape: tuple[int, ...]

    def __init__(self, root: Region, layout: Layout, dtype: DType) -> None:
        self._array = None
        self.offset, self.shape, self._strides = layout
        self.dtype = dtype
        self.nbytes = math.prod(self.shape) * dtype.itemsize
        self._root = root
        self._arena, self._stack, self._slot = root._arena, root._stack, root._slot
        self._serial, self.label = root._serial, root.label

    @classmethod
    def _root_of(
        cls,
        arena: Any,  # an Arena; the classes that it is made of call this with themselves
        stack: Stack,
        slot: int,
        serial: int,
        record: Record,
        shape: tuple[int, ...],
        dtype: DType,
    ) -> Region:
        region: Region = cls.__new__(cls)
        region._array = region._root = region._strides = None
        region._arena, region._stack, region._slot, region._serial = arena, stack, slot, serial
        region.offset, region.nbytes, region.label, _ = record
        region.shape, region.dtype = shape, dtype
        return region

    # -- liveness -----------------------------------------------------------------------------------------------

    @property
    def is_live(self) -> bool:
        """Whether the memory still belongs to this region."""
        try:  # not by the list's length: another thread may roll back between the two looks
            return self._stack.serials[self._slot] == self._serial
        except IndexError:
            return False

    @property
    def _origin(self) -> Region:
        """The region that `Arena.alloc` returned, of which this is a view, or itself."""
        return self if self._root is None else self._root

    def _check(self) -> None:
        if not self.is_live:
            raise _messages.stale(self)

    # -- contents -----------------------------------------------------------------------------------------------

    @property
    def array(self) -> Any:
        """The contents as an array of the backend's library, made on first use.

        The array itself is not checked: it outlives a rollback, and then shows whatever is put there next.

        Raises
        ------
        StaleRegionError
            The memory was rolled back, or the arena is closed.
        """
        self._check()
        array = self._array
        if array is None:
            arena = self._arena
            array = self._make(arena._backend.name)
            if arena._tracker is None:  # a tracked array is kept alive by its users only
                self._array = array
        return array

    def as_numpy(self) -> Any:
        """Return the contents as a NumPy array of the same bytes.

        Raises
        ------
        StaleRegionError
        DeviceMismatchError
            NumPy cannot reach the memory of a GPU.
        DTypeError
            Neither NumPy nor ml_dtypes has the dtype.
        """
        return self._as("host")

    def as_torch(self) -> Any:
        """Return the contents as a torch tensor of the same bytes; errors as for `as_numpy`."""
        return self._as("torch")

    def as_cupy(self) -> Any:
        """Return the contents as a CuPy array of the same bytes; errors as for `as_numpy`."""
        return self._as("cupy")

    def _as(self, library: str) -> Any:
        if library == self._arena._backend.name:
            return self.array
        self._check()
        return self._make(library)

    def _make(self, library: str) -> Any:
        arena, root = self._arena, self._origin
        with arena._lock:
            self._check()  # again, now that no other thread can roll back
            backend = arena._backend
            if self is root and library == backend.name and arena._tracker is None:
                arrays, slot = self._stack.arrays, self._slot
                array = arrays[slot]
                if array is None:
                    array = arrays[slot] = arena._again(self._stack, slot, self.shape, self.dtype)
                return array
            viewer = backend.viewer(library)
            viewer.check_dtype(self.dtype)
            if arena._tracker is not None:
                return arena._tracker.array(self, viewer)
            array = arena._root_array(root, library)
            if self is root:
                return array
            return viewer.view(array, Layout(self.offset, self.shape, self.strides), self.dtype)

    def __setitem__(self, key: Any, values: Any) -> None:
        """Assign as the backend's library does, which may cast; a torch arena takes no part in autograd.

        Raises
        ------
        ShapeError
            The values do not broadcast. Unchanged on error.
        """
        self[key]._write(values)

    def _write(self, values: Any) -> None:
        array = self.array
        if isinstance(values, Region):
            values = values.array
        arena = self._arena
        arena._backend.write(array, values)
        if arena._foreign or arena._tracker is not None:  # another library's autograd cannot see the write
            with arena._lock:
                if self.is_live:
                    arena._invalidate_foreign(self._stack, self._slot)

    def record_stream(self, stream: Any) -> None:
        """Declare that work on another stream than the arena's home stream uses this memory.

        Call it before that work is queued: `stream` then waits until the memory's former users on the home
        stream are done. When the region is rolled back, the home stream waits for what is queued on `stream` by
        then, so that the next region there cannot overtake it. The host never waits.

        Parameters
        ----------
        stream
            The library's own stream, an integer handle, or anything with ``__cuda_stream__``.

        Raises
        ------
        StaleRegionError
        ArgumentTypeError, DeviceMismatchError
            It is no stream, or one of another device.
        ArgumentError
            The device has no streams.
        CaptureError
            One of `stream` and the current stream is being captured into a graph, and the other is not.
        """
        arena = self._arena
        with arena._lock:
            self._check()
            if arena._order is None:
                raise ArgumentError(f"record_stream: memory on {arena.device} has no streams")
            arena._watch()
            arena._order.use((self._stack.side, self._slot), stream)

    def extend(self, n_rows: int) -> Region:
        """Return the region with its first dimension grown to `n_rows`, in place; it never moves.

        Handles of the shorter region stay live and show the first rows.

        >>> from gpuarena import Arena
        >>> x = Arena(1024).alloc((2, 3), "float32", fill=1)
        >>> x.extend(4)[:2].array.sum()
        np.float32(6.0)

        Raises
        ------
        CheckpointError
            It is not the last region of the low end, or a checkpoint was taken behind it. Unchanged on error.
        ShapeError
            It is a slice, has no dimension or no bytes, or `n_rows` is less than it has. Unchanged on error.
        OutOfMemoryError
            The new rows do not fit. Unchanged on error.
        """
        return self._arena._extend(self, n_rows)

    # -- views --------------------------------------------------------------------------------------------------

    def __getitem__(self, key: Any) -> Region:
        """Return a region of some of the elements: NumPy's basic indexing, always a view.

        Raises
        ------
        IndexError
            An integer out of range, or too many indices.
        ArgumentTypeError
            A list, array, float or bool, which would need a copy.
        StrideError
            A negative step on a torch arena.
        """
        self._check()
        layout = _index.index(Layout(self.offset, self.shape, self.strides), key)
        if not self._arena._backend.negative_strides and _index.steps_backwards(key):
            raise StrideError(
                "torch has no views with negative strides: a slice's step must be positive here; "
                "torch.flip(region.array, dims) makes a copy"
            )
        return Region(self._origin, layout, self.dtype)

    def reshape(self, *shape: Any) -> Region:
        """Return the same bytes in another shape; one dimension may be -1.

        >>> from gpuarena import Arena
        >>> Arena(1024).alloc((2, 6), "int8").reshape(3, -1).shape
        (3, 4)

        Raises
        ------
        ShapeError
            The element counts differ, or the region is not contiguous and would have to be copied.
        """
        self._check()
        new = _index.reshape(self.shape, shape)
        self._need_contiguous("reshape")
        return Region(self._origin, _index.contiguous(self.offset, new, self.dtype.itemsize), self.dtype)

    def view(self, dtype: Any) -> Region:
        """Return the same bytes as another dtype; the last dimension changes with the item size.

        >>> from gpuarena import Arena
        >>> Arena(1024).alloc((2, 6), "float32").view("uint8").shape
        (2, 24)

        Raises
        ------
        ShapeError
            The last dimension is no whole number of the new items, or the region is not contiguous.
        AlignmentError
            The first byte cannot start an element of the new dtype.
        """
        self._check()
        new = as_dtype(dtype)
        self._arena._backend.check_dtype(new)
        shape = _index.recast(self.shape, self.dtype.itemsize, new.itemsize)
        self._need_contiguous("view")
        if self.nbytes and self.address % new.alignment:
            raise AlignmentError(
                f"address {self.address:#x} is no multiple of {new.alignment}, which {new} needs",
                align=new.alignment,
            )
        return Region(self._origin, _index.contiguous(self.offset, shape, new.itemsize), new)

    def _need_contiguous(self, action: str) -> None:
        if not self.is_contiguous:
            raise ShapeError(
                f"{action} of a region with shape {self.shape} and strides {self.strides} would need a copy",
                shape=self.shape,
            )

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d region")
        return self.shape[0]

    def __iter__(self) -> Iterator[Region]:
        for position in range(len(self)):
            yield self[position]

    # -- metadata -----------------------------------------------------------------------------------------------

    @property
    def arena(self) -> Arena:
        """The arena that the memory belongs to."""
        return self._arena

    @property
    def address(self) -> int:
        """Address of the first element; it stays what it was when the region is stale."""
        return self._arena._backend.address_of(self.offset)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements are one run of bytes in C order."""
        return self._strides is None or is_contiguous(self.shape, self._strides, self.dtype.itemsize)

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes from one element to the next in each dimension, as NumPy has them."""
        strides = self._strides
        if strides is None:
            strides = self._strides = contiguous_strides(self.shape, self.dtype.itemsize)
        return strides

    def _describe(self) -> str:
        label = f" {self.label!r}" if self.label else ""
        site = getattr(self._origin, "_site", "")
        where = f", allocated at {site}," if site else ""
        return f"region{label} {self.dtype}{list(self.shape)} at offset {self.offset}{where}"

    def __repr__(self) -> str:
        return f"<{self._describe().rstrip(',')}, {'live' if self.is_live else 'stale'}>"

    def __reduce__(self) -> Any:
        raise refuse_copy(self)

    # -- exchange protocols -------------------------------------------------------------------------------------

    def __dlpack__(self, **options: Any) -> Any:
        """Export the bytes without a copy, by the library that made them (DLPack 1.x where it has that)."""
        array: Any = self.array
        numpy: Any = self.dtype.numpy
        try:
            # Of ml_dtypes; CuPy goes by the kind, and would say that it is a float of 8 bits, which nobody can take.
            if self._arena._backend.name == "cupy" and (numpy.kind, numpy.isbuiltin) == ("f", 2):
                raise BufferError(f"CuPy cannot export {self.dtype}")
            return array.__dlpack__(**options)
        except BufferError:
            if self._arena._backend.name == "torch" or "torch" not in sys.modules:
                raise
            return self.as_torch().__dlpack__(**options)  # NumPy exports no bfloat16 or float8, torch does

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        array = self.as_numpy()
        if dtype is not None and dtype != array.dtype:
            if copy is False:
                raise ValueError(f"a {self.dtype} region cannot be seen as {dtype} without a copy")
            return array.astype(dtype)
        return array.copy() if copy else array

    @property
    def __array_interface__(self) -> Any:
        """The array interface (version 3); only for host memory, and for types that it can name."""
        numpy = self.dtype.numpy
        if not _has_typestr(numpy) or not self.device_is_host or self._arena._tracker is not None:
            # numpy.asarray falls back to __array__, whose array is tracked where that matters.
            raise AttributeError("__array_interface__")
        self.array  # noqa: B018 - the consumer keeps this region, which thereby keeps the memory
        return self.as_numpy().__array_interface__

    @property
    def __cuda_array_interface__(self) -> Any:
        """The CUDA array interface (version 3); only for CUDA memory, and for NumPy's own dtypes."""
        numpy: Any = self.dtype.numpy
        if not _has_typestr(numpy) or self.device_is_host:
            raise AttributeError("__cuda_array_interface__")
        self._array = self.array  # the consumer keeps this region, which thereby keeps the memory
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": numpy.str,
            "data": (self.address if self.nbytes else 0, False),
            "strides": None if self.is_contiguous else self.strides,
            # Work on the memory is queued in stream order; a consumer on another stream orders itself.
            "stream": None,
        }

    @property
    def device_is_host(self) -> bool:
        """Whether the CPU can read the bytes."""
        return self._arena.device == "cpu"


def _has_typestr(numpy: Any) -> bool:
    """Return whether the array interface can name a type; it can name no structure and none of ml_dtypes' types."""
    return numpy is not None and numpy.kind != "V" and numpy.isbuiltin != 2
