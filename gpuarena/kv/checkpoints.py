"""Lengths of a cache to which it can go back."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

from gpuarena.errors import CheckpointError, LayerOrderError, refuse_copy

if TYPE_CHECKING:
    from gpuarena.kv.group import LayerGroup

__all__ = ["KVCheckpoint", "KVScope", "KVStep"]


class KVCheckpoint:
    """A length of a cache, made by `checkpoint`; `n_tokens` tokens of `n_rows` rows."""

    __slots__ = ("_group", "_serial", "_slot", "n_rows", "n_tokens")

    def __init__(self, group: LayerGroup, slot: int, serial: int, n_tokens: int, n_rows: int | None) -> None:
        self._group = group
        self._slot = slot
        self._serial = serial
        self.n_tokens = n_tokens
        self.n_rows = n_rows

    def __repr__(self) -> str:
        return f"KVCheckpoint(n_tokens={self.n_tokens})"

    def __reduce__(self) -> Any:
        raise refuse_copy(self)


class KVScope:
    """What ``cache.scope()`` returns: a checkpoint on entry, a rollback to it on exit."""

    __slots__ = ("_checkpoint", "_group")

    def __init__(self, group: LayerGroup) -> None:
        self._group = group
        self._checkpoint: KVCheckpoint | None = None

    def __reduce__(self) -> Any:
        raise refuse_copy(self)

    def __enter__(self) -> KVCheckpoint:
        if self._checkpoint is not None:
            raise CheckpointError("this scope was entered before; make another with cache.scope()")
        self._checkpoint = self._group.checkpoint()
        return self._checkpoint

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._checkpoint is None:
            raise CheckpointError("this scope was not entered; use `with cache.scope():`")
        try:
            self._group.rollback(self._checkpoint)
        except CheckpointError:
            if exc is None:  # an exception that is on its way says more than ours would
                raise


class KVStep:
    """What ``cache.step()`` returns: all layers get the same tokens, or none keeps them."""

    __slots__ = ("_group", "_is_over", "_start")

    def __init__(self, group: LayerGroup) -> None:
        self._group = group
        self._start: tuple[list[int], int | None] | None = None
        self._is_over = False

    def __reduce__(self) -> Any:
        raise refuse_copy(self)

    def __enter__(self) -> KVStep:
        if self._start is not None:
            raise CheckpointError("this step was entered before; make another with cache.step()")
        common = self._group._common
        self._start = (list(common.lengths), common.rows)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._start is None:
            raise CheckpointError("this step was not entered; use `with cache.step():`")
        if self._is_over:  # what came later is not this step's to take back
            return
        self._is_over = True
        lengths = self._group._common.lengths
        if exc is None and len(set(lengths)) <= 1:
            return
        got = list(lengths)
        reason = self._undo()
        if exc is None:
            least, most = min(got), max(got)
            layer = self._group._owned[got.index(least)].index
            raise LayerOrderError(
                f"the step left layer {layer} at {least} tokens and another at {most}: append to each layer once. "
                + (
                    f"It could not be taken back: {reason}"
                    if reason
                    else "All layers are back where the step began"
                ),
                layer=layer,
            )
        if reason:
            exc.add_note(f"the step could not be taken back: {reason}")

    def _undo(self) -> str:
        """Take back what the layers got; return what could not be taken back, and why."""
        assert self._start is not None, "a step that is left was entered"
        group, (lengths, rows) = self._group, self._start
        common = group._common
        # What was cut inside is gone from all. A layer that was added inside held nothing.
        known = common.lengths[: len(lengths)]
        target = min([*lengths, *known], default=0) if len(set(lengths)) == 1 else None
        wanted = [min(n, held) if target is None else target for n, held in zip(lengths, known, strict=True)]
        wanted += [0] * (len(common.lengths) - len(wanted))
        # Several appends in one step may have moved a bounded window past where the step began.
        reasons = (layer.reason_against(n) for layer, n in zip(group._owned, wanted, strict=True))
        reason = next(filter(None, reasons), "")
        if reason:
            return reason
        for layer, n_tokens in zip(group._owned, wanted, strict=True):
            if layer.length > n_tokens:
                layer._cut(n_tokens)
                common.forget_above(n_tokens)
        if target is not None and lengths and target < lengths[0]:
            return f"the step itself cut the cache to {target} tokens, of {lengths[0]} that it began with"
        if not any(lengths) or rows == 1:  # the first of several copies is what it was
            common.rows = rows
        elif rows != common.rows:
            return f"the step itself changed the rows, of which there were {rows}"
        return ""
