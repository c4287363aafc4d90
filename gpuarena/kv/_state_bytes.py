"""The bytes of arrays on their way to and from the host, piece by piece."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from gpuarena.arena import Arena

__all__ = ["Carrier", "carrier_for", "copy_bytes", "nbytes_of", "pieces"]

#: Bytes of host memory that arrays pass through: enough to make the start of a copy cheap beside it.
STAGING_NBYTES = 8 << 20


def nbytes_of(array: Any) -> int:
    """Return the number of elements of an array of bytes, of any library."""
    return math.prod(array.shape)


def pieces(array: Any) -> Iterator[Any]:
    """Yield views of an array of bytes, in the order of its elements, each of `STAGING_NBYTES` at most."""
    shape, nbytes = tuple(array.shape), nbytes_of(array)
    if nbytes == 0:
        return
    if nbytes <= STAGING_NBYTES:
        yield array
        return
    one = nbytes // shape[0]  # bytes of an index of the first dimension
    at_once = STAGING_NBYTES // one
    if at_once == 0:
        for index in range(shape[0]):
            yield from pieces(array[index])
    else:
        for start in range(0, shape[0], at_once):
            yield array[start : start + at_once]


class Carrier:
    """Takes pieces of NumPy arrays to host memory and back."""

    library = "host"

    def __init__(self) -> None:
        self._staging: Any = np.empty(0, np.uint8)

    def bytes_of(self, array: Any) -> Any:
        """Return an array as bytes, ``[..., dim * itemsize]``; its last dimension is contiguous."""
        return array.view(np.uint8)

    def room(self, nbytes: int) -> memoryview:
        """Return host memory for `nbytes`, which `put` takes up; the same each time."""
        if len(self._staging) < nbytes:
            self._staging = np.empty(nbytes, np.uint8)
        return memoryview(self._staging)[:nbytes]

    def take(self, piece: Any) -> memoryview:
        """Return the bytes of a piece in host memory, until the next call."""
        room = self.room(nbytes_of(piece))
        self._host_of(room, piece)[...] = self._to_host(piece)
        return room

    def put(self, piece: Any) -> None:
        """Write to a piece what the caller put into `room`."""
        piece[...] = self._host_of(self.room(nbytes_of(piece)), piece)

    def copy(self, source: Any, target: Any) -> None:
        """Copy a piece to another of the same library."""
        target[...] = source

    def _host_of(self, room: memoryview, piece: Any) -> Any:
        return np.frombuffer(room, np.uint8).reshape(piece.shape)

    def _to_host(self, piece: Any) -> Any:
        return piece


class _CupyCarrier(Carrier):
    library = "cupy"

    def put(self, piece: Any) -> None:
        import cupy

        # set() would want a piece that is contiguous.
        piece[...] = cupy.asarray(self._host_of(self.room(nbytes_of(piece)), piece))

    def _to_host(self, piece: Any) -> Any:
        return piece.get()


class _TorchCarrier(Carrier):
    library = "torch"

    def __init__(self, device: str) -> None:
        import torch

        super().__init__()
        self._torch = torch
        # A device copies to and from page-locked memory without another stop.
        self._pin = device.startswith("cuda")
        self._tensor: Any = None

    def bytes_of(self, array: Any) -> Any:
        return array.view(self._torch.uint8)

    def room(self, nbytes: int) -> memoryview:
        if len(self._staging) < nbytes:
            with self._torch.inference_mode(False):
                self._tensor = self._torch.empty(nbytes, dtype=self._torch.uint8, pin_memory=self._pin)
            self._staging = self._tensor.numpy()
        return memoryview(self._staging)[:nbytes]

    def take(self, piece: Any) -> memoryview:
        room = self.room(nbytes_of(piece))
        self._tensor[: nbytes_of(piece)].view(piece.shape).copy_(piece)
        return room

    def put(self, piece: Any) -> None:
        piece.copy_(self._tensor[: nbytes_of(piece)].view(piece.shape))

    def copy(self, source: Any, target: Any) -> None:
        target.copy_(source)


def carrier_for(arena: Arena) -> Carrier:
    """Return the carrier for the arrays of an arena."""
    if arena.backend == "torch":
        return _TorchCarrier(arena.device)
    return _CupyCarrier() if arena.backend == "cupy" else Carrier()


def copy_bytes(source: Any, carrier: Carrier, target: Any, other: Carrier) -> None:
    """Copy an array to one of the same shape and type, which may be another library's or on another device."""
    if 0 in source.shape:
        return
    source, target = carrier.bytes_of(source), other.bytes_of(target)
    for piece, place in zip(pieces(source), pieces(target), strict=True):
        if carrier.library == other.library:
            carrier.copy(piece, place)
        else:
            room = other.room(nbytes_of(piece))
            room[:] = carrier.take(piece)
            other.put(place)
