"""What a lane cache hands out: checkpoints, scopes, steps, figures."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from gpuarena.errors import CheckpointError, LayerOrderError, StaleRegionError, refuse_copy
from gpuarena.kv.lanes._arrays import Lanes

if TYPE_CHECKING:
    from gpuarena.kv.lanes import LaneCache
    from gpuarena.kv.lanes._table import Mark, Step
    from gpuarena.kv.lanes._writing import LaneWriting


@dataclass(frozen=True, slots=True)
class LaneStats:
    """A snapshot of a lane cache."""

    n_lanes: int
    """Lanes there are."""
    n_active: int
    """Lanes that hold a token."""
    n_tokens: int
    """Tokens of all lanes together."""
    longest: int
    """Tokens of the longest lane."""
    high_water_tokens: int
    """Most tokens a lane ever held after a step; `LaneCache.reset` keeps it."""
    bytes_per_token: int
    """Bytes of one token, over all layers."""
    reserved_nbytes: int
    """Bytes of all key and value regions."""
    used_nbytes: int
    """Bytes of the tokens that are held."""
    scratch_nbytes: int
    """Bytes reserved for gathering and moving: about one layer's."""


class LaneCheckpoint:
    """Lengths of one lane or of all, made by `LaneCache.checkpoint`; `lengths` maps lanes to tokens."""

    __slots__ = ("_cache", "_marks", "lengths")

    def __init__(self, cache: LaneCache, marks: dict[int, tuple[int, Mark]]) -> None:
        self._cache = cache
        self._marks = marks
        self.lengths = {lane: mark[0] for lane, (_, mark) in marks.items()}

    def __repr__(self) -> str:
        return f"LaneCheckpoint(lengths={self.lengths})"

    def __reduce__(self) -> Any:
        raise refuse_copy(self)


class LaneScope:
    """What ``cache.scope()`` returns: a checkpoint on entry, a rollback to it on exit."""

    __slots__ = ("_cache", "_checkpoint", "_is_over", "_lane")

    def __init__(self, cache: LaneCache, lane: int | None) -> None:
        self._cache = cache
        self._lane = lane
        self._checkpoint: LaneCheckpoint | None = None
        self._is_over = False

    def __reduce__(self) -> Any:
        raise refuse_copy(self)

    def __enter__(self) -> LaneCheckpoint:
        if self._checkpoint is not None:
            raise CheckpointError("this scope was entered before; make another with cache.scope()")
        self._checkpoint = self._cache.checkpoint(self._lane)
        return self._checkpoint

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._checkpoint is None or self._is_over:
            how = "was left before" if self._is_over else "was never entered"
            raise CheckpointError(f"this scope {how}; use it in a with statement, once")
        self._is_over = True
        try:
            self._cache.rollback(self._checkpoint)
        except (CheckpointError, StaleRegionError):
            if exc is None:  # an exception that is on its way says more than ours would
                raise


class LaneStep:
    """What ``cache.step()`` returns: a step of all layers that is undone when an exception leaves its block."""

    __slots__ = ("_cache", "_step", "counts", "lanes")

    def __init__(self, cache: LaneWriting, lanes: Lanes, counts: Lanes) -> None:
        self._cache = cache
        self._step: Step | None = None
        self.lanes = lanes
        self.counts = counts

    def __reduce__(self) -> Any:
        raise refuse_copy(self)

    def __enter__(self) -> LaneStep:
        if self._step is not None:
            raise LayerOrderError(
                "this step was made before; make another with cache.step()",
                layer=self._cache._table.layers[0],
            )
        step = self._cache._plan(self.lanes, self.counts)
        try:
            self._step = step
            self._cache._open(step)
            return self
        except BaseException:  # nobody leaves a block that was not entered
            self._step = None
            self._cache._close(step, failed=True)
            raise

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._step is None:
            raise CheckpointError("this step was never entered; use it in a with statement, once")
        self._cache._close(self._step, failed=exc is not None)
