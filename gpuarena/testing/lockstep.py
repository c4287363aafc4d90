"""Several arenas given the same calls, and compared with each other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from gpuarena import Arena, Checkpoint, Frame, Region, Scope, Spill, errors
from gpuarena.testing.subject import figures, pattern, to_numpy

__all__ = ["Driver", "run_lockstep"]


class Driver:
    """Makes the calls of `strategies.programs` on one arena.

    Parameters
    ----------
    arena : Arena
    to_numpy : callable, optional
        Returns the contents of a native array; None where the memory cannot be read or written.
    apart : collection of str
        Figures of `Stats` that need not agree with those of other arenas, and ``"address"`` where the arena's
        address has another remainder by 16 than theirs.
    """

    def __init__(
        self,
        arena: Arena,
        to_numpy: Callable[[Any], np.ndarray[Any, Any]] | None = to_numpy,
        *,
        apart: Collection[str] = (),
    ) -> None:
        self.arena = arena
        self.regions: list[Region] = []
        self.checkpoints: list[Checkpoint] = []
        self.scopes: list[Scope] = []
        self.frames: list[Frame] = []
        self.spills: list[Spill] = []
        self.children: list[Driver] = []
        self.apart = frozenset(apart)
        self._to_numpy = to_numpy

    def step(self, call: tuple[Any, ...]) -> Any:
        """Make one call; return what it showed: figures, or the name of the exception."""
        name, *arguments = call
        try:
            return getattr(self, f"_{name}")(*arguments)
        except errors.ArenaError as error:
            return type(error).__name__
        except IndexError:
            return "IndexError"

    def observe(self) -> tuple[Any, ...]:
        """Return everything that can be compared between arenas."""
        regions = [(r.is_live, r.offset, r.shape, r.strides, r.nbytes, str(r.dtype)) for r in self.regions]
        stats = {name: value for name, value in figures(self.arena.stats).items() if name not in self.apart}
        frames = [frame.is_live for frame in self.frames]
        spills = [(spill.nbytes, spill.n_regions, spill.restored) for spill in self.spills]
        children = [child.observe() for child in self.children]
        return (
            stats, self.arena.by_label(), self.arena.closed, regions, self._contents(), frames, spills, children,
        )  # fmt: skip

    def _contents(self) -> list[bytes]:
        if self._to_numpy is None:
            return []
        return [
            self._to_numpy(region.reshape(-1).view("uint8").array).tobytes()
            for region in self.regions
            if region.is_live and region.is_contiguous
        ]

    def _made(self, region: Region) -> Any:
        self.regions.append(region)
        remainder = 0 if "address" in self.apart else region.address % 16
        return region.offset, region.shape, region.strides, region.nbytes, remainder

    def _set(self, region: Region, values: Any) -> None:
        if self._to_numpy is None:
            region.array  # noqa: B018 - the memory cannot be written here, but the view can be made
        else:
            region[...] = values

    def _alloc(self, shape: Any, dtype: Any, align: Any, byte: int, side: str = "low") -> Any:
        region = self.arena.alloc(shape, dtype, align=align, label=str(dtype), side=side)
        self._set(region, pattern(region.shape, region.dtype, byte))
        return self._made(region)

    def _fill(self, slack: int, align: int | None, byte: int) -> Any:
        stats = self.arena.stats
        gap = -(self.arena.address + stats.top) % (align or self.arena.alignment)
        return self._alloc((max(stats.high - stats.top - gap + slack, 0),), "uint8", align, byte)

    def _region(self, number: int) -> Region:
        return self.regions[number % len(self.regions)]

    def _slice(self, number: int, key: tuple[Any, ...]) -> Any:
        return self._made(self._region(number)[key]) if self.regions else None

    def _view(self, number: int, dtype: str) -> Any:
        return self._made(self._region(number).view(dtype)) if self.regions else None

    def _reshape(self, number: int, shape: Sequence[int]) -> Any:
        return self._made(self._region(number).reshape(tuple(shape))) if self.regions else None

    def _write(self, number: int, byte: int) -> Any:
        if self.regions:
            region = self._region(number)
            self._set(region, pattern(region.shape, region.dtype, byte))

    def _copy(self, target: int, source: int) -> Any:
        """Copy between regions of one type, which may share memory."""
        if self.regions and self._region(target).dtype == self._region(source).dtype:
            self._set(self._region(target), self._region(source))

    def _extend(self, number: int, more: int, byte: int) -> Any:
        """Grow a region, the last one if `number` is negative, by rows; write all of it."""
        if not self.regions or not self._region(number).shape:
            return None
        region = self._region(number)
        grown = region.extend(region.shape[0] + more)
        self._set(grown, pattern(grown.shape, grown.dtype, byte))
        return self._made(grown)

    def _checkpoint(self, side: str = "low") -> Any:
        self.checkpoints.append(self.arena.checkpoint(side))
        return self.checkpoints[-1].top

    def _rollback(self, number: int) -> Any:
        if self.checkpoints:
            self.arena.rollback(self.checkpoints[number % len(self.checkpoints)])

    def _keep(self, number: int) -> Any:
        if self.checkpoints:
            self.arena.keep(self.checkpoints[number % len(self.checkpoints)])

    def _reset(self) -> Any:
        self.arena.reset()

    def _open(self, side: str = "low") -> Any:
        self.scopes.append(self.arena.scope(side=side).__enter__())

    def _close(self, innermost: bool) -> Any:
        if self.scopes:
            self.scopes.pop(-1 if innermost else 0).__exit__(None, None, None)

    def _frame(self, buffers: Sequence[tuple[Any, str]], byte: int, side: str = "low") -> Any:
        names = [f"x{number}" for number in range(len(buffers))]
        frame = self.arena.frame(dict(zip(names, buffers, strict=True)), side=side)
        self.frames.append(frame)
        for name in names:
            self._set(frame[name], pattern(frame[name].shape, frame[name].dtype, byte))
            self.regions.append(frame[name])
        return [(frame[name].offset, tuple(getattr(frame, name).shape)) for name in names]

    def _spill(self, number: int) -> Any:
        if self.checkpoints:
            self.spills.append(self.arena.spill(self.checkpoints[number % len(self.checkpoints)]))

    def _restore(self, number: int) -> Any:
        if self.spills:
            self.spills[number % len(self.spills)].restore()

    def _child(self, capacity: int, side: str = "low") -> Any:
        child = self.arena.child(capacity, alignment=16, name="child", side=side)
        self.children.append(Driver(child, self._to_numpy, apart=self.apart))
        return child.capacity, child.address - self.arena.address

    def _inside(self, number: int, call: tuple[Any, ...]) -> Any:
        """Make a call on a child."""
        return self.children[number % len(self.children)].step(call) if self.children else None


def run_lockstep(program: Sequence[tuple[Any, ...]], drivers: Sequence[Driver]) -> None:
    """Make each call on every arena; raise `AssertionError` where they differ in anything that can be seen."""
    first, *others = drivers
    for driver in drivers:  # what one of them has apart, all have
        driver.apart = driver.apart.union(*(other.apart for other in drivers))
    for number, call in enumerate(program):
        result = first.step(call)
        seen = first.observe()
        for other in others:
            where = f"step {number}, {call!r}, on {other.arena.backend}"
            found = other.step(call)
            assert found == result, f"{where}: {found}, but on {first.arena.backend} {result}"
            assert other.observe() == seen, f"{where}: another state than on {first.arena.backend}"
