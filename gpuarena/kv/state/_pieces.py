"""Arrays of any library on their way to and from the host, as bytes, piece by piece."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from gpuarena.arena import Arena

#: Bytes of host memory that arrays pass through: enough to make the start of a copy cheap beside it.
PIECE_NBYTES = 8 << 20

Index = tuple[int | slice, ...]
#: Where a piece lies in the tensor of the file; an array of bytes; and where it lies in that.
Part = tuple[Index, Any, Any]
#: Gives the parts of a tensor by its name, in the order of its elements.
Parts = Callable[[str], Iterator[Part]]


def pieces(shape: tuple[int, ...]) -> Iterator[Index]:
    """Yield indices that cut an array of bytes into pieces of at most `PIECE_NBYTES`, in the order of its elements.

    The last dimension is never cut, so that the indices are right for an array of numbers as well.

    >>> list(pieces((2, 3, 4 << 20)))
    [(0, slice(0, 2, None)), (0, slice(2, 3, None)), (1, slice(0, 2, None)), (1, slice(2, 3, None))]
    """
    n_first, *rest = shape
    one = math.prod(rest)  # bytes of an index of the first dimension
    if n_first == 0 or one == 0:
        return
    at_once = max(PIECE_NBYTES // one, len(rest) == 1)
    for first in range(0, n_first, at_once or 1):
        if at_once:
            yield (slice(first, min(first + at_once, n_first)),)
        else:
            yield from ((first, *others) for others in pieces(tuple(rest)))


class Mover:
    """Moves the bytes of an arena's arrays to the host and back."""

    def __init__(self, arena: Arena) -> None:
        self.library = arena.backend
        self._module: Any = np
        if arena.backend == "torch":
            import torch

            self._module = torch
        elif arena.backend == "cupy":
            import cupy

            self._module = cupy

    def bytes_of(self, array: Any) -> Any:
        """Return an array as bytes, ``[..., dim * itemsize]``; its last dimension is contiguous."""
        return array.view(self._module.uint8)

    def take(self, array: Any, key: Any) -> np.ndarray[Any, Any]:
        """Return ``array[key]`` on the host, contiguous; it may be the array itself."""
        piece = array[key]
        if self.library == "torch":
            piece = piece.cpu().numpy()
        return np.ascontiguousarray(piece.get() if self.library == "cupy" else piece)

    def put(self, array: Any, key: Any, piece: Any) -> None:
        """Write ``array[key] = piece``, which is of this library or lies on the host."""
        if self.library == "torch":
            array[key] = self._module.as_tensor(piece, device=array.device)
        else:
            array[key] = self._module.asarray(piece)

    def parts(self, planes: Mapping[str, Any]) -> Parts:
        """Return what gives the parts of `planes`, arrays that have the shape of their tensor."""

        def parts(name: str) -> Iterator[Part]:
            if 0 not in planes[name].shape:
                array = self.bytes_of(planes[name])
                for index in pieces(tuple(array.shape)):
                    yield index, array, index

        return parts
