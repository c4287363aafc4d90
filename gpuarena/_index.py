"""NumPy's basic indexing, reshape and view on (offset, shape, strides), without an array.

All functions take and return plain integers in bytes; they know neither devices nor regions.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from gpuarena._bump import contiguous_strides
from gpuarena.errors import ArgumentTypeError, ShapeError

#: NumPy's limit (NPY_MAXDIMS since NumPy 2.0); torch would take more.
MAX_DIMS = 64


class Layout(NamedTuple):
    """Where the elements of a view lie: byte offset of the first, shape, strides in bytes."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def parse_shape(shape: Any) -> tuple[int, ...]:
    """Return a shape as a tuple of int from an int, tuple, list, torch.Size or NumPy integers.

    Raises
    ------
    ArgumentTypeError
        Something is not an integer; True, 2.0 and None are not.
    ShapeError
        A dimension is negative, or there are more than `MAX_DIMS`.
    """
    if isinstance(shape, (tuple, list)):
        dims: Sequence[Any] = shape
    elif hasattr(shape, "__index__"):
        dims = (shape,)
    else:
        raise ArgumentTypeError(f"a shape is an integer or a tuple of integers, not {type(shape).__name__}")
    parsed = []
    for dim in dims:
        if type(dim) is not int:
            if isinstance(dim, bool) or not hasattr(dim, "__index__"):
                raise ArgumentTypeError(f"dimension {dim!r} of shape {shape!r} is not an integer")
            try:
                dim = operator.index(dim)
            except TypeError:
                raise ArgumentTypeError(f"dimension {dim!r} of shape {shape!r} is not an integer") from None
        parsed.append(dim)
    if parsed and min(parsed) < 0:  # after all the types, so that the order of the dimensions decides nothing
        raise ShapeError(f"dimension {min(parsed)} of shape {shape!r} is negative", shape=tuple(parsed))
    if len(parsed) > MAX_DIMS:
        raise ShapeError(f"{len(parsed)} dimensions; at most {MAX_DIMS} are possible", shape=tuple(parsed))
    return tuple(parsed)


def index(layout: Layout, key: Any) -> Layout:
    """Return the layout of ``array[key]`` for integers, slices, Ellipsis and newaxis.

    Raises
    ------
    IndexError
        An integer out of range, or more indices than dimensions.
    ArgumentTypeError
        Anything else: lists, arrays, floats and booleans would need a copy, which a view is not.

    >>> index(Layout(0, (4, 6), (6, 1)), (slice(1, 3), ..., -1))
    Layout(offset=11, shape=(2,), strides=(6,))
    """
    offset, shape, strides = layout
    keys = list(key) if isinstance(key, tuple) else [key]
    n_ellipsis = sum(k is Ellipsis for k in keys)
    if n_ellipsis > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    n_used = sum(k is not None and k is not Ellipsis for k in keys)
    if n_used > len(shape):
        raise IndexError(f"too many indices: {n_used} for shape {shape}")
    if not n_ellipsis:
        keys.append(Ellipsis)
    new_shape: list[int] = []
    new_strides: list[int] = []
    axis = 0
    for k in keys:
        if k is None:
            new_shape.append(1)
            new_strides.append(0)
        elif k is Ellipsis:
            for _ in range(len(shape) - n_used):
                new_shape.append(shape[axis])
                new_strides.append(strides[axis])
                axis += 1
        elif isinstance(k, slice):
            start, stop, step = _slice_bounds(k, shape[axis])
            length = len(range(start, stop, step))
            offset += start * strides[axis]
            new_shape.append(length)
            new_strides.append(step * strides[axis])
            axis += 1
        else:
            offset += _integer(k, axis, shape[axis]) * strides[axis]
            axis += 1
    if len(new_shape) > MAX_DIMS:
        raise IndexError(f"an index that makes {len(new_shape)} dimensions; at most {MAX_DIMS} are possible")
    if (
        0 in new_shape
    ):  # no element tells where it lies, and a sum of the offsets may lie outside of the arena
        offset = layout.offset
    return Layout(offset, tuple(new_shape), tuple(new_strides))


def steps_backwards(key: Any) -> bool:
    """Return whether a valid index has a slice with a negative step."""
    keys = key if isinstance(key, tuple) else (key,)
    return any(isinstance(k, slice) and k.step is not None and k.step < 0 for k in keys)


def _slice_bounds(key: slice, dim: int) -> tuple[int, int, int]:
    for bound in (key.start, key.stop, key.step):
        if bound is not None and (isinstance(bound, bool) or not hasattr(bound, "__index__")):
            raise ArgumentTypeError(f"slice indices must be integers or None, not {type(bound).__name__}")
    if key.step is not None and operator.index(key.step) == 0:
        raise ShapeError("slice step cannot be zero")
    return key.indices(dim)


def _integer(key: Any, axis: int, dim: int) -> int:
    # An array that holds one integer has __index__ too, but NumPy treats it as advanced indexing; and so has a
    # torch tensor that holds one bool, which is a mask.
    is_bool = isinstance(key, bool) or str(getattr(key, "dtype", "")) == "torch.bool"
    if is_bool or not hasattr(key, "__index__") or getattr(key, "ndim", 0) != 0:
        raise ArgumentTypeError(
            f"{type(key).__name__} is no index for a region: only integers, slices, ... and None make views; "
            f"for a copy, index region.array"
        )
    try:
        position = operator.index(key)
    except TypeError as error:
        raise ArgumentTypeError(f"{type(key).__name__} is no index for a region: {error}") from None
    if not -dim <= position < dim:
        raise IndexError(f"index {position} is out of bounds for axis {axis} with size {dim}")
    return position + dim if position < 0 else position


def reshape(shape: tuple[int, ...], new: Sequence[Any]) -> tuple[int, ...]:
    """Return the full shape of a reshape, with one -1 filled in.

    Raises
    ------
    ShapeError
        The element counts differ, or -1 is ambiguous.

    >>> reshape((2, 6), (3, -1))
    (3, 4)
    """
    dims: Sequence[Any] = new[0] if len(new) == 1 and isinstance(new[0], (tuple, list)) else new
    is_unknown = [_is_minus_one(dim) for dim in dims]
    n_unknown = sum(is_unknown)
    known = parse_shape([1 if unknown else dim for unknown, dim in zip(is_unknown, dims, strict=True)])
    count, partial = math.prod(shape), math.prod(known)
    if n_unknown > 1:
        raise ShapeError(f"only one dimension of {tuple(dims)} may be -1")
    if n_unknown:
        if partial == 0 or count % partial:
            raise ShapeError(f"cannot reshape {shape} ({count} elements) into {tuple(dims)}")
        at = is_unknown.index(True)
        return (*known[:at], count // partial, *known[at + 1 :])
    if partial != count:
        raise ShapeError(f"cannot reshape {shape} ({count} elements) into {known} ({partial} elements)")
    return known


def _is_minus_one(dim: Any) -> bool:
    try:
        return operator.index(dim) == -1
    except TypeError:
        return False


def recast(shape: tuple[int, ...], itemsize: int, new_itemsize: int) -> tuple[int, ...]:
    """Return the shape of a C-contiguous array whose bytes are read with another item size.

    >>> recast((2, 6), 4, 2)
    (2, 12)
    """
    if itemsize == new_itemsize:
        return shape
    if not shape:
        raise ShapeError(
            f"a 0-d region of {itemsize}-byte items cannot be viewed as {new_itemsize}-byte items"
        )
    last_nbytes = shape[-1] * itemsize
    if last_nbytes % new_itemsize:
        raise ShapeError(
            f"the last dimension holds {last_nbytes} bytes ({shape[-1]} x {itemsize}), "
            f"which is no multiple of the new item size {new_itemsize}"
        )
    return (*shape[:-1], last_nbytes // new_itemsize)


def check_broadcast(source: Sequence[int], target: tuple[int, ...]) -> None:
    """Raise `ShapeError` unless an array of shape `source` broadcasts to `target`, as assignment needs."""
    trimmed = list(source)
    while len(trimmed) > len(target) and trimmed[0] == 1:  # NumPy drops leading ones in an assignment
        trimmed.pop(0)
    pairs = zip(reversed(trimmed), reversed(target), strict=False)
    if len(trimmed) > len(target) or any(s not in (1, t) for s, t in pairs):
        raise ShapeError(
            f"values of shape {tuple(source)} do not fit a region of shape {target}",
            source=tuple(source),
            target=target,
        )


def contiguous(offset: int, shape: tuple[int, ...], itemsize: int) -> Layout:
    """Return the layout of a C-contiguous array."""
    return Layout(offset, shape, contiguous_strides(shape, itemsize))
