"""Buffers placed once and used at every step."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gpuarena.errors import ArgumentError, ArgumentTypeError, refuse_copy

if TYPE_CHECKING:
    from gpuarena.arena import Arena
    from gpuarena.region import Region

__all__ = ["Frame", "FrameArenas"]


class Frame:
    """Native arrays as attributes, made by `Arena.frame`; reading one costs what reading an attribute costs.

    The addresses stay as they are until the arena is rolled back below the frame. From then on every attribute
    raises `StaleRegionError`; arrays that were taken out of it before are unchecked, as all native arrays are.

    >>> from gpuarena import Arena
    >>> arena = Arena(1024)
    >>> with arena.scope():
    ...     frame = arena.frame(x=(3, "float32"))
    ...     frame.x.shape
    (3,)
    >>> frame
    <frame of x, stale>

    ``frame["x"]`` is the region of a buffer.
    """

    _regions: dict[str, Region]

    def __getitem__(self, name: str) -> Region:
        """Return the region of a buffer."""
        return self._regions[name]

    def __iter__(self) -> Any:
        return iter(self._regions)

    def __len__(self) -> int:
        return len(self._regions)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"a frame's buffers stay where they are: write into them, frame.{name}[...] = values"
        )

    @property
    def is_live(self) -> bool:
        """Whether the memory still belongs to the frame."""
        return all(region.is_live for region in self._regions.values())

    def _let_go(self) -> None:
        # Its attributes are looked up from now on; in a frame that is live the lookup must not cost anything. First
        # of all, because another thread may read one at any moment.
        object.__setattr__(self, "__class__", _EmptyFrame)
        for name in self._regions:
            self.__dict__.pop(name, None)

    def __repr__(self) -> str:
        return f"<frame of {', '.join(self._regions)}, {'live' if self.is_live else 'stale'}>"

    def __reduce__(self) -> Any:
        raise refuse_copy(self)


class _EmptyFrame(Frame):
    """A frame whose arrays were taken away: it is stale, or a rollback was refused after all."""

    def __getattr__(self, name: str) -> Any:
        regions = self.__dict__.get("_regions", {})
        if name in regions:  # refused if the region is stale
            return regions[name].array
        raise AttributeError(f"the frame has no buffer {name!r}; it has {', '.join(regions)}")


def make_frame(arena: Arena, buffers: Mapping[str, Any], more: Mapping[str, Any], side: str) -> Frame:
    """Place buffers, all of them or none; see `Arena.frame`."""
    from gpuarena._dependents import dependents_of

    if twice := sorted(buffers.keys() & more.keys()):
        raise ArgumentError(f"frame: {twice[0]!r} is given twice")
    buffers = {**buffers, **more}
    if not buffers:
        raise ArgumentError("frame: there are no buffers in it")
    for name, buffer in buffers.items():
        if not isinstance(name, str):
            raise ArgumentTypeError(f"frame: a buffer's name is a text, not {type(name).__name__}")
        if not name.isidentifier() or name.startswith("_") or hasattr(Frame, name):
            raise ArgumentError(f"frame: {name!r} cannot be the name of a buffer")
        if not isinstance(buffer, tuple) or len(buffer) != 2:
            raise ArgumentTypeError(f"frame: {name} takes (shape, dtype), not {buffer!r}")
    frame = Frame.__new__(Frame)
    regions: dict[str, Region] = {}
    with arena._lock:
        arena._need_room(
            [(shape, dtype) for shape, dtype in buffers.values()], side, f"frame of {', '.join(buffers)}"
        )
        undo = arena._mark(side)
        try:
            for name, (shape, dtype) in buffers.items():
                regions[name] = arena.alloc(shape, dtype, label=name, side=side)
            arrays = {name: region.array for name, region in regions.items()}
        except BaseException:
            arena._undo(undo)
            raise
        frame.__dict__.update(arrays, _regions=regions)
        dependents_of(arena).add_frame(
            list(regions.values())[-1], frame
        )  # stale as soon as the last buffer is
    return frame


class FrameArenas:
    """Several arenas taken in turn, so that the data of the last steps stay valid.

    >>> steps = FrameArenas(2, "1MiB")
    >>> first = steps.advance().alloc(3, "float32", fill=1)
    >>> second = steps.advance().alloc(3, "float32", fill=2)
    >>> first.is_live, second.is_live  # the last step's and this one's
    (True, True)
    >>> third = steps.advance().alloc(3, "float32")
    >>> first.is_live, second.is_live
    (False, True)

    Parameters
    ----------
    n : int
        How many steps data stay valid, the current one included; at least 2.
    nbytes : int or str
        Bytes of each arena.
    arena : Arena, optional
        The arena to lie in; by default one is made, of `options`.
    **options
        As for `Arena`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        `n` is no integer of at least 2, or both an arena and options are given.
    OutOfMemoryError
        The arenas do not fit. Unchanged on error.
    """

    def __init__(self, n: int, nbytes: int | str, *, arena: Arena | None = None, **options: Any) -> None:
        from gpuarena import _bump
        from gpuarena._state import parse_debug
        from gpuarena._units import parse_nbytes
        from gpuarena.arena import Arena

        if isinstance(n, bool) or not isinstance(n, int):
            raise ArgumentTypeError(f"FrameArenas: n is a number of arenas, not {n!r}")
        if n < 2:
            raise ArgumentError(f"FrameArenas: n={n}; with less than 2 no data outlives its step")
        each = parse_nbytes(nbytes)
        self._owns = arena is None
        if arena is None:
            alignment = options.get("alignment", 256)
            settings = parse_debug(options.get("debug"))
            guard = 0 if settings is None or settings.separate else settings.guard
            # A wrong alignment is the arena's to refuse.
            step = _bump.align_up(each + guard, alignment if isinstance(alignment, int) else 1)
            total = n * max(step, each + guard)
            arena = Arena(total, **options)
        elif options:
            raise ArgumentError(f"FrameArenas: {', '.join(options)} belong to the arena that was given")
        self.arena = arena
        with arena._lock:
            arena._need_room([((each,), "uint8")] * n, "low", f"{n} arenas in turn", align=arena.alignment)
            undo = arena._mark("low")
            strict = arena._strict
            arena._strict = strict and not self._owns  # its own arenas lie there for good
            try:
                self._children = [arena.child(each, name=f"step {i}") for i in range(n)]
            except BaseException:
                arena._undo(undo)
                raise
            finally:
                arena._strict = strict
        self._at = -1

    def advance(self) -> Arena:
        """Begin a step: drop what the oldest arena holds, and return it."""
        at = (self._at + 1) % len(self._children)
        self._children[at]._reset("advance()", sys._getframe(1))
        self._at = at
        return self._children[at]

    @property
    def current(self) -> Arena:
        """The arena of this step."""
        return self.previous(0)

    def previous(self, n_steps: int = 1) -> Arena:
        """Return the arena of `n_steps` ago, whose data are still valid.

        Raises
        ------
        ArgumentError
            That is too long ago, or no step has begun.
        """
        if self._at < 0:
            raise ArgumentError("FrameArenas: no step has begun; call advance()")
        if not 0 <= n_steps < len(self._children):
            raise ArgumentError(f"FrameArenas: {n_steps} steps ago; {len(self._children)} are kept")
        return self._children[(self._at - n_steps) % len(self._children)]

    def __len__(self) -> int:
        return len(self._children)

    def close(self) -> None:
        """Close the arenas, and the one they lie in if it was made for them."""
        for child in self._children:
            child.close()
        if self._owns:
            self.arena.close()

    def __enter__(self) -> FrameArenas:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{len(self._children)} arenas in turn in {self.arena!r}>"
