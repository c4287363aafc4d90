"""A buffer for every region, so that memory checkers see overruns."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuarena import backends
from gpuarena._bump import nbytes_of
from gpuarena._index import Layout
from gpuarena.backends.base import Backend, BackendFactory
from gpuarena.dtypes import DType


class SeparateBackend(Backend):
    """Looks like one buffer of `nbytes`, and is made of buffers that are exactly as long as the regions.

    Offsets are counted as in one buffer. `provide` makes the buffer of a region and `drop` lets buffers go.
    """

    def __init__(
        self,
        factory: str | BackendFactory,
        nbytes: int,
        device: Any,
        alignment: int,
        library: str | None = None,
    ) -> None:
        self._factory = factory
        self._given_device = device
        self._library = library  # of a viewer; None for the buffers' own
        probe = backends.create(factory, 1, device, alignment)
        self.name = probe.name
        self.device = probe.device
        self.negative_strides = probe.negative_strides
        self.survives_fork = probe.survives_fork
        self.streams = probe.streams
        self._probe: Any = probe
        self.address = 0  # of no buffer: only differences of it have a meaning
        self.nbytes = nbytes
        self._offsets: list[int] = []  # of the buffers, sorted
        self._alignments: dict[int, int] = {}  # by offset
        self._buffers: list[Backend] = []

    def provide(self, offset: int, nbytes: int, alignment: int) -> None:
        """Make the buffer of a region that is about to be taken; raise `OutOfMemoryError` when there is none."""
        if nbytes:
            self._alignments[offset] = alignment
            made = backends.create(self._factory, nbytes, self._given_device, alignment)
            at = bisect.bisect_left(self._offsets, offset)
            if at < len(self._offsets) and self._offsets[at] == offset:  # left by an allocation that failed
                self._buffers[at] = made
            else:
                self._offsets.insert(at, offset)
                self._buffers.insert(at, made)

    def alignment_of(self, offset: int) -> int:
        """Return the alignment that the buffer at an offset was made with."""
        return self._alignments.get(offset, 1)

    def drop(self, start: int, stop: int, keep: bool = False) -> list[Backend]:
        """Let the buffers that begin from `start` to `stop` go, and return them; with `keep` they stay as they are."""
        a, b = bisect.bisect_left(self._offsets, start), bisect.bisect_left(self._offsets, stop)
        dropped = self._buffers[a:b]
        for buffer in () if keep else dropped:
            buffer.release()
        for offset in self._offsets[a:b]:
            del self._alignments[offset]
        del self._offsets[a:b], self._buffers[a:b]
        return dropped

    def _find(self, offset: int) -> tuple[Backend, int]:
        """Return the buffer that holds a byte, and where in it; for no bytes any buffer will do."""
        at = bisect.bisect_right(self._offsets, offset) - 1
        if at < 0 or offset - self._offsets[at] > self._buffers[at].nbytes:
            return self._probe, 0
        return self._buffers[at], offset - self._offsets[at]

    def address_of(self, offset: int) -> int:
        """Return the address of a byte of a live region; of another one it has no meaning."""
        buffer, within = self._find(offset)
        return buffer.address + within

    def check_dtype(self, dtype: DType) -> None:
        """Raise `DTypeError` when the library has no arrays of `dtype`."""
        self._probe.check_dtype(dtype)

    def root(self, offset: int, shape: tuple[int, ...], dtype: DType) -> Any:
        """Return a fresh contiguous array on a region's buffer."""
        buffer, within = self._find(offset) if nbytes_of(shape, dtype.itemsize) else (self._probe, 0)
        return buffer.root(within, shape, dtype)

    def tracked_root(self, offset: int, shape: tuple[int, ...], dtype: DType) -> tuple[Any, Any]:
        """Return a root and an object that lives while it or any view of it does."""
        buffer, within = self._find(offset) if nbytes_of(shape, dtype.itemsize) else (self._probe, 0)
        return buffer.tracked_root(within, shape, dtype)

    def again(self, prototype: Any) -> Any:
        """Return another fresh root array on the bytes of a prototype."""
        return self._probe.again(prototype)

    def view(self, root: Any, layout: Layout, dtype: DType) -> Any:
        """Return a view of a root with the given layout."""
        buffer, within = self._find(layout.offset) if 0 not in layout.shape else (self._probe, 0)
        return buffer.view(root, layout._replace(offset=within), dtype)

    def write(self, array: Any, value: Any) -> None:
        """Assign as the library does."""
        self._probe.write(array, value)

    def invalidate(self, arrays: Sequence[Any]) -> None:
        """Note that the memory of these arrays goes."""
        self._probe.invalidate(arrays)

    def viewer(self, library: str) -> Backend:
        """Return another library's backend over the same buffers."""
        return self if library == self.name else _Viewer(self, library)

    def release(self) -> None:
        """Let all buffers go."""
        self.drop(0, self.nbytes + 1)
        self._probe.release()

    def read_bytes(self, start: int, stop: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return a copy of the bytes on the host; zero between the regions."""
        copy = np.zeros(stop - start, np.uint8)
        for offset, buffer in zip(self._offsets, self._buffers, strict=True):
            if start <= offset < stop:
                copy[offset - start : offset - start + buffer.nbytes] = buffer.read_bytes(0, buffer.nbytes)
        return copy

    def write_bytes(self, start: int, values: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        """Copy host bytes in; those between the regions have no place and are dropped."""
        for offset, buffer in zip(self._offsets, self._buffers, strict=True):
            if start <= offset < start + values.nbytes:
                buffer.write_bytes(0, values[offset - start : offset - start + buffer.nbytes])


class _Viewer(SeparateBackend):
    """Another library's arrays over the buffers of a `SeparateBackend`."""

    def __init__(self, whole: SeparateBackend, library: str) -> None:
        self._whole = whole
        self._library = library
        self._probe = whole._probe.viewer(library)
        self.name, self.device = self._probe.name, self._probe.device
        self.negative_strides = self._probe.negative_strides
        self.address, self.nbytes = whole.address, whole.nbytes

    def _find(self, offset: int) -> tuple[Backend, int]:
        buffer, within = self._whole._find(offset)
        return buffer.viewer(str(self._library)), within
