"""How much memory a piece of code needs."""

from __future__ import annotations

import mmap
import sys
from types import TracebackType
from typing import Any

import numpy as np

from gpuarena import _bump, backends
from gpuarena._stack import Hook, Take
from gpuarena.arena import Arena
from gpuarena.backends import Backend, BackendFactory
from gpuarena.backends.host import HostBackend, out_of_memory
from gpuarena.errors import ArgumentError, BackendError, CheckpointError, refuse_copy
from gpuarena.stats import Stats

__all__ = ["Measure", "measure"]

_BACKENDS = ("host", "torch", "cupy")

#: Of Linux, where Python before 3.12 does not name it; elsewhere the system does not count reservations.
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0


class Measure:
    """What `measure` returns: a dry arena while its block runs, and the capacity that would have been enough.

    Attributes
    ----------
    arena : Arena
        The arena to run the code on; closed when the block ends.
    """

    def __init__(self, backend: str, device: Any, alignment: int, limit: int | str) -> None:
        if backend not in _BACKENDS:
            raise ArgumentError(f"measure: backend must be one of {', '.join(_BACKENDS)}, not {backend!r}")
        on_host = backend != "cupy" and (device is None or str(device) == "cpu")
        made: Any = _lazy(backend) if on_host else f"virtual:{backend}"
        self._options = {"backend": made, "device": device, "alignment": alignment}
        self._limit = limit
        self._arena: Arena | None = None
        self._strictest = _Strictest(alignment)
        self._stats: Stats | None = None

    def __enter__(self) -> Measure:
        """Make the dry arena; errors as for `Arena`."""
        if self._arena is not None:
            raise CheckpointError("a measurement runs once; make another with gpuarena.measure()")
        self._arena = Arena(self._limit, name="dry", **self._options)
        self._arena._attach(self._strictest)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        """Close the dry arena."""
        self._stats = self.stats
        self.arena.close()

    @property
    def arena(self) -> Arena:
        """The dry arena."""
        if self._arena is None:
            raise CheckpointError("measure: the dry arena is there inside the `with` block only")
        return self._arena

    @property
    def stats(self) -> Stats:
        """The figures of the dry arena, also after the block."""
        return self.arena.stats if self._stats is None else self._stats

    @property
    def capacity(self) -> int:
        """Bytes that an arena of the same default alignment needs for the same calls, wherever its buffer lies."""
        # A buffer starts at a multiple of the default alignment only, so a stricter request may need a gap before it;
        # and the high end is aligned downwards from a capacity that may be no multiple of anything.
        strictest = self._strictest
        peak = _bump.align_up(self.stats.peak, strictest.align) if strictest.high else self.stats.peak
        return max(peak + strictest.align - strictest.default, 1)

    def __reduce__(self) -> Any:
        raise refuse_copy(self)


class _Strictest(Hook):
    """Notes the largest alignment that is asked for."""

    def __init__(self, default: int) -> None:
        self.default = self.align = default
        self.high = False  # whether the high end was used

    def after_take(self, take: Take) -> None:
        """Compare."""
        self.align = max(self.align, take.align)
        self.high = self.high or (take.stack.side == "high" and take.nbytes > 0)


def _lazy(backend: str) -> BackendFactory:
    """Return a factory of host memory that is committed by the system as it is first touched."""

    def allocate(nbytes: int, *, device: Any, alignment: int) -> Backend:
        if not hasattr(mmap, "MAP_ANONYMOUS"):
            raise BackendError("measure: this system cannot reserve more addresses than it has memory")
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", _MAP_NORESERVE)
        try:
            memory = mmap.mmap(-1, nbytes + alignment - 1, flags=flags)
        except (OSError, OverflowError, ValueError) as error:
            raise out_of_memory(nbytes, "host", error) from error
        whole = np.frombuffer(memory, np.uint8)
        start = -whole.ctypes.data % alignment
        part = whole[start : start + nbytes]
        made: Backend = backends.load("torch").adopt_numpy(part) if backend == "torch" else HostBackend(part)
        return made

    return allocate


def measure(
    *, backend: str = "host", device: Any = None, alignment: int = 256, limit: int | str = "1TiB"
) -> Measure:
    """Return a context manager that runs code on a dry arena and says what capacity it needs.

    >>> import gpuarena
    >>> def step(arena):
    ...     with arena.scope():
    ...         x = arena.zeros((100, 100), "float32")
    ...         return float((x + 1).sum())
    >>> with gpuarena.measure() as m:
    ...     result = step(m.arena)
    >>> m.capacity
    40000
    >>> with gpuarena.Arena(m.capacity) as arena:
    ...     step(arena) == result
    True

    The dry arena reserves addresses, and memory is committed as it is used, so the code really runs, and takes
    the memory that it takes. On a CUDA device it is a growable arena, which has no high end.

    Parameters
    ----------
    backend : {"host", "torch", "cupy"}
    device : optional
        In the library's own words.
    alignment : int
        Default alignment in bytes, which the arena that is made afterwards should have too.
    limit : int or str
        Bytes of addresses to reserve.

    Raises
    ------
    ArgumentError
        An unknown backend.
    BackendError
        On entry: the system or the driver cannot reserve addresses.
    """
    return Measure(backend, device, alignment, limit)
