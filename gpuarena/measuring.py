"""How much memory a piece of code needs."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from gpuarena._stack import Hook, Take
from gpuarena.arena import Arena
from gpuarena.errors import ArgumentError, CheckpointError, refuse_copy
from gpuarena.stats import Stats

__all__ = ["Measure", "measure"]

_BACKENDS = {"host": "virtual", "torch": "virtual:torch", "cupy": "virtual:cupy"}


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
        self._options = {"backend": _BACKENDS[backend], "device": device, "alignment": alignment}
        self._limit = limit
        self._arena: Arena | None = None
        self._strictest = _Strictest(alignment)
        self._stats: Stats | None = None

    def __enter__(self) -> Measure:
        """Make the dry arena; errors as for `Arena`."""
        if self._arena is not None:
            raise CheckpointError("a measurement runs once; make another with gpuarena.measure()")
        self._arena = Arena(self._limit, name="dry", **self._options)
        self._arena._hooks.append(self._strictest)
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
        # A buffer starts at a multiple of the default alignment only, so a stricter request may need a gap before it.
        return max(self.stats.peak + self._strictest.align - self._strictest.default, 1)

    def __reduce__(self) -> Any:
        raise refuse_copy(self)


class _Strictest(Hook):
    """Notes the largest alignment that is asked for."""

    def __init__(self, default: int) -> None:
        self.default = self.align = default

    def after_take(self, take: Take) -> None:
        """Compare."""
        self.align = max(self.align, take.align)


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

    The dry arena reserves addresses and commits memory as it is used, so the code really runs, and takes the
    memory that it takes.

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
