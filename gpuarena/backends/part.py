"""A run of another backend's bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuarena._index import Layout
from gpuarena.backends.base import Backend
from gpuarena.dtypes import DType


class PartBackend(Backend):
    """The bytes of `whole` from `start` on, with offsets of their own; the memory of a child arena."""

    def __init__(self, whole: Backend, start: int, nbytes: int) -> None:
        self._whole: Any = whole
        self._start = start
        self.name = whole.name
        self.device = whole.device
        self.address = whole.address_of(start)
        self.nbytes = nbytes
        self.negative_strides = whole.negative_strides
        self.survives_fork = whole.survives_fork
        self.streams = whole.streams

    def check_dtype(self, dtype: DType) -> None:
        """Raise `DTypeError` when the library has no arrays of `dtype`."""
        self._whole.check_dtype(dtype)

    def root(self, offset: int, shape: tuple[int, ...], dtype: DType) -> Any:
        """Return a fresh contiguous array on the bytes from `offset` on."""
        return self._whole.root(self._start + offset, shape, dtype)

    def tracked_root(self, offset: int, shape: tuple[int, ...], dtype: DType) -> tuple[Any, Any]:
        """Return a root and an object that lives while it or any view of it does."""
        made: tuple[Any, Any] = self._whole.tracked_root(self._start + offset, shape, dtype)
        return made

    def again(self, prototype: Any) -> Any:
        """Return another fresh root array on the bytes of a prototype."""
        return self._whole.again(prototype)

    def view(self, root: Any, layout: Layout, dtype: DType) -> Any:
        """Return a view of a root with the given layout."""
        return self._whole.view(root, layout._replace(offset=self._start + layout.offset), dtype)

    def write(self, array: Any, value: Any) -> None:
        """Assign as the whole does."""
        self._whole.write(array, value)

    def invalidate(self, arrays: Sequence[Any]) -> None:
        """Note that the memory of these arrays goes to somebody else."""
        self._whole.invalidate(arrays)

    def viewer(self, library: str) -> Backend:
        """Return another library's backend over the same bytes."""
        return PartBackend(self._whole.viewer(library), self._start, self.nbytes)

    def release(self) -> None:
        """Drop the hold on the whole."""
        self._whole = None

    def fill_bytes(self, start: int, stop: int, byte: int) -> None:
        """Set the bytes from `start` to `stop`."""
        self._whole.fill_bytes(self._start + start, self._start + stop, byte)

    def find_other(self, start: int, stop: int, byte: int) -> int | None:
        """Return the offset of the first byte that is not `byte`."""
        at: int | None = self._whole.find_other(self._start + start, self._start + stop, byte)
        return None if at is None else at - self._start

    def read_bytes(self, start: int, stop: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return a copy of the bytes on the host."""
        copy: np.ndarray[Any, np.dtype[np.uint8]] = self._whole.read_bytes(
            self._start + start, self._start + stop
        )
        return copy

    def write_bytes(self, start: int, values: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        """Copy host bytes in from `start` on."""
        self._whole.write_bytes(self._start + start, values)
