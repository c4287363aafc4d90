"""The arithmetic of the arena, as pure integers.

Nothing here knows of devices, arrays or the library's exceptions, so the whole of it can be
audited and fuzzed alone. All sizes and offsets are bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

#: The largest size an array library can address: NumPy and torch count bytes in a signed 64-bit integer.
MAX_NBYTES = 2**63 - 1


def is_alignment(align: int) -> bool:
    """Return whether `align` is a power of two, 1 included."""
    return align > 0 and align & (align - 1) == 0


def align_up(position: int, align: int) -> int:
    """Return the smallest multiple of `align` (a power of two) that is not below `position`.

    >>> align_up(257, 256)
    512
    """
    return (position + align - 1) & -align


def place(top: int, nbytes: int, align: int, base: int) -> int:
    """Return the offset at which a region of `nbytes` goes when the bump pointer stands at `top`.

    The address `base + offset` is a multiple of `align`. An empty region stays at `top` as it is.

    >>> place(top=10, nbytes=4, align=8, base=0)
    16
    >>> place(top=10, nbytes=0, align=8, base=0)
    10
    """
    if nbytes == 0:
        return top
    return align_up(base + top, align) - base


def place_high(top: int, nbytes: int, align: int, base: int) -> int:
    """Return the offset of a region of `nbytes` that ends at or below `top`, for allocation downwards.

    It is negative when there is no room down to the start. An empty region stays at `top`.

    >>> place_high(top=30, nbytes=4, align=8, base=0)
    24
    """
    if nbytes == 0:
        return top
    return ((base + top - nbytes) & -align) - base


def fits(offset: int, nbytes: int, limit: int) -> bool:
    """Return whether a region placed at `offset` ends at or below `limit`; an empty region always does."""
    return nbytes == 0 or offset + nbytes <= limit


def nbytes_of(shape: Sequence[int], itemsize: int) -> int:
    """Return the bytes of an array of `shape`, in integers that cannot wrap.

    Raises
    ------
    ValueError
        A dimension is negative, wherever it stands.
    OverflowError
        The dimensions that are not zero multiply to more than `MAX_NBYTES`, as NumPy rules: an array
        with a zero among its dimensions is refused as well when the others are too large.

    >>> nbytes_of((2, 3), 4)
    24
    """
    empty = False
    nbytes = itemsize
    for dim in shape:
        if dim < 0:
            raise ValueError(f"dimension {dim} is negative")
        if dim == 0:
            empty = True
        else:
            nbytes *= dim
    if nbytes > MAX_NBYTES:
        raise OverflowError(f"{nbytes} bytes do not fit in 63 bits")
    return 0 if empty else nbytes


def contiguous_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return the strides, in bytes, of a C-contiguous array of `shape`.

    >>> contiguous_strides((2, 3), 4)
    (12, 4)
    """
    strides = []
    stride = itemsize
    for dim in reversed(shape):
        strides.append(stride)
        stride *= max(dim, 1)
    return tuple(reversed(strides))


def is_contiguous(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Return whether an array is C-contiguous; dimensions of length 1 do not matter, nor do empty arrays."""
    if math.prod(shape) == 0:
        return True
    expected = itemsize
    for dim, stride in zip(reversed(shape), reversed(strides), strict=True):
        if dim != 1 and stride != expected:
            return False
        expected *= dim
    return True
