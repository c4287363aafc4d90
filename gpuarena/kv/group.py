"""Layers that are filled, rolled back and reordered together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gpuarena._bump import place
from gpuarena.arena import Arena
from gpuarena.errors import ArgumentError, ArgumentTypeError, CheckpointError, ShapeError, refuse_copy
from gpuarena.kv._layer import Common, KVLayer
from gpuarena.kv._ops import Ops, ops_for
from gpuarena.kv.checkpoints import KVCheckpoint, KVScope, KVStep
from gpuarena.kv.full import FullLayer
from gpuarena.kv.quantized import QuantizedLayer
from gpuarena.kv.spec import SCRATCH_ALIGNMENT, LayerSpec, positive
from gpuarena.kv.window import WindowLayer

__all__ = ["KVStats", "LayerGroup"]


@dataclass(frozen=True, slots=True)
class KVStats:
    """A snapshot of a cache."""

    n_tokens: int
    """Tokens that every layer holds, a row."""
    n_rows: int
    """Rows in use."""
    high_water_tokens: int
    """Most tokens a row ever held; `reset` keeps it."""
    bytes_per_token: int
    """Bytes of one token of one row, over the layers that exist so far."""
    reserved_nbytes: int
    """Bytes of all key and value regions."""
    used_nbytes: int
    """Bytes of the tokens that are held."""
    scratch_nbytes: int
    """Bytes reserved for reordering rows, and for reading what is quantised; 0 for a single row as it is."""


class LayerGroup:
    """Layers that are filled, rolled back and reordered together.

    `KVCache` makes all of its layers at once; an adapter adds each when it first sees the layer's tensors.
    """

    def __init__(
        self, *, batch: int, max_tokens: int, capacity_hint: str = "", batch_name: str = "batch"
    ) -> None:
        self.batch = positive(batch, "batch")
        self.max_tokens = positive(max_tokens, "max_tokens")
        self._owned: list[KVLayer] = []
        # The hint ends "the cache is full".
        self._common = Common(self.batch, self.max_tokens, capacity_hint, batch_name)
        self._serial = 0
        self._ops: dict[str, Ops] = {}

    def __reduce__(self) -> Any:
        raise refuse_copy(self)

    @property
    def layers(self) -> list[Any]:
        """The layers, in their order."""
        return self._owned

    def add(
        self, arena: Arena, spec: LayerSpec, *, index: int | None = None, kind: type[KVLayer] | None = None
    ) -> KVLayer:
        """Allocate one more layer and the scratch that it needs.

        `index` is the layer's number for messages, the next one by default; `kind` that of `layer_kind`.
        """
        start = arena.checkpoint()
        kind = kind or layer_kind(spec)
        number = len(self._owned) if index is None else index
        layer = kind(self._common, number, arena, spec, self.ops(arena))
        try:
            layer._ops.reach(spec.n_slots(self.max_tokens))  # for which there is memory
            self.reserve_scratch(arena, spec.scratch_nbytes(self.batch, self.max_tokens))
        except BaseException:
            arena.rollback(start)
            raise
        self._take(layer)
        return layer

    def ops(self, arena: Arena) -> Ops:
        """Return the array operations for an arena."""
        ops = self._ops.get(arena.device)
        if ops is None:
            ops = self._ops[arena.device] = ops_for(arena, self.batch)
        return ops

    def _take(self, layer: KVLayer) -> None:
        self._owned.append(layer)
        self._common.lengths.append(0)

    def top_after(self, arena: Arena, specs: Iterable[LayerSpec]) -> int:
        """Return where the bump pointer of `arena` would stand, in bytes, after an `add` of each of `specs`.

        They fit if that is at most the capacity of the arena.
        """
        top = arena.stats.top
        held = self._common.scratch.get(arena.device)
        scratch_nbytes = 0 if held is None else held.nbytes
        for spec in specs:
            sizes = spec.region_nbytes(self.batch, self.max_tokens)
            for nbytes, buffer in zip(sizes, spec.buffers, strict=True):
                top = place(top, nbytes, max(arena.alignment, buffer.dtype.alignment), arena.address) + nbytes
            needed = spec.scratch_nbytes(self.batch, self.max_tokens)
            if scratch_nbytes < needed:
                align = max(arena.alignment, SCRATCH_ALIGNMENT)
                top = place(top, needed, align, arena.address) + needed
                scratch_nbytes = needed
        return top

    def reserve_scratch(self, arena: Arena, nbytes: int) -> None:
        """Allocate `nbytes` that the layers on `arena` share, unless so many are there."""
        held = self._common.scratch.get(arena.device)
        if nbytes and (held is None or held.nbytes < nbytes):
            align = max(arena.alignment, SCRATCH_ALIGNMENT)
            self._common.scratch[arena.device] = arena.alloc(nbytes, "uint8", align=align, label="scratch")

    # -- lengths ------------------------------------------------------------------------------------------------

    @property
    def rows(self) -> int | None:
        """Rows that are in use, None until the first append after a reset."""
        return self._common.rows

    @property
    def high_water(self) -> int:
        """Most tokens any layer ever held."""
        return self._common.high_water

    @property
    def length(self) -> int:
        """Tokens that every layer holds."""
        return min(self._common.lengths, default=0)

    @property
    def n_shared(self) -> int:
        """First tokens that all rows have in common since `repeat` copied a single row."""
        return self._common.n_shared

    @property
    def is_empty(self) -> bool:
        """Whether no layer holds a token."""
        return not any(self._common.lengths)

    def checkpoint(self) -> KVCheckpoint:
        """Return the present length, to which `rollback` brings all layers back.

        Raises
        ------
        CheckpointError
            The layers hold different numbers of tokens: a step is under way, or failed half-way.
        """
        n_tokens = self.length
        uneven = next((layer for layer in self._owned if layer.length != n_tokens), None)
        if uneven is not None:
            raise CheckpointError(
                f"layer {uneven.index} holds {uneven.length} tokens, another {n_tokens}: finish the step, or "
                f"truncate({n_tokens}) what it left"
            )
        marks = self._common.marks
        if not marks or marks[-1][0] != n_tokens:
            self._serial += 1
            marks.append((n_tokens, self._serial))
        return KVCheckpoint(self, len(marks) - 1, marks[-1][1], n_tokens, self.rows)

    def rollback(self, checkpoint: KVCheckpoint) -> None:
        """Forget every token appended since `checkpoint`, in all layers; the checkpoint stays usable.

        Constant in tokens: nothing is copied.

        Raises
        ------
        CheckpointError
            It belongs to another cache; or the cache was truncated below it, or rows changed places, so that
            the tokens it stood for are gone. Unchanged on error.
        """
        if not isinstance(checkpoint, KVCheckpoint):
            number = isinstance(checkpoint, int) and not isinstance(checkpoint, bool)
            raise ArgumentTypeError(
                f"rollback takes a KVCheckpoint, not {type(checkpoint).__name__}"
                + (f"; truncate({checkpoint}) cuts to that many tokens" if number else "")
            )
        if checkpoint._group is not self:
            raise CheckpointError("the checkpoint belongs to another cache")
        if not self.is_live(checkpoint):
            raise CheckpointError(
                f"the checkpoint at {checkpoint.n_tokens} tokens is dead: the cache was truncated below it, "
                f"or its rows changed places, and those tokens are gone"
            )
        short = next((layer for layer in self._owned if layer.length < checkpoint.n_tokens), None)
        if short is not None:  # added since: an adapter adds a layer in the first step that reaches it
            raise CheckpointError(
                f"layer {short.index} holds {short.length} tokens, the checkpoint is at {checkpoint.n_tokens}, "
                f"from before that layer was added; truncate({self.length}) or reset() instead"
            )
        reason = self._reason_against(checkpoint.n_tokens)
        if reason:
            raise CheckpointError(f"rollback to {checkpoint.n_tokens} tokens: {reason}")
        self._cut(checkpoint.n_tokens)
        self._common.rows = checkpoint.n_rows

    def is_live(self, checkpoint: KVCheckpoint) -> bool:
        """Return whether `checkpoint` is one of this cache whose tokens are still held, so that it can be gone back to."""
        slot, marks = checkpoint._slot, self._common.marks
        return (
            checkpoint._group is self
            and slot < len(marks)
            and marks[slot] == (checkpoint.n_tokens, checkpoint._serial)
        )

    def truncate(self, n_tokens: int) -> None:
        """Keep the first `n_tokens` tokens of every layer; constant in tokens.

        Raises
        ------
        ArgumentError
            Negative, more than every layer holds, or less than a layer of a bounded window can be cut to.
            Unchanged on error.
        """
        keep = positive(n_tokens, "n_tokens", least=0)
        if keep > self.length:
            raise ArgumentError(f"truncate({keep}): the cache holds only {self.length} tokens")
        reason = self._reason_against(keep)
        if reason:
            raise ArgumentError(f"truncate({keep}): {reason}")
        self._cut(keep)

    def _reason_against(self, n_tokens: int) -> str:
        """Return why some layer cannot be cut to `n_tokens`; an empty text if all can."""
        return next(filter(None, (layer.reason_against(n_tokens) for layer in self._owned)), "")

    def _cut(self, n_tokens: int) -> None:
        for layer in self._owned:
            layer._cut(n_tokens)
        self._common.forget_above(n_tokens)

    def scope(self) -> KVScope:
        """Return a context manager that rolls the cache back on exit, also when an exception passes."""
        return KVScope(self)

    def step(self) -> KVStep:
        """Return a context manager for one step of the model: all layers get the same tokens, or none keeps them.

        An exception inside takes back what the layers got. A step that leaves layers of different lengths is taken
        back too, and raises `LayerOrderError`. One append to each layer can always be taken back; several may move a
        bounded window too far, and then nothing is taken back, which a note of the exception says.
        """
        return KVStep(self)

    def reset(self) -> None:
        """Forget everything; the memory stays, and the next append may have another number of rows."""
        self._cut(0)
        self._common.marks.clear()
        self._common.rows = None

    @property
    def stats(self) -> KVStats:
        """An immutable snapshot of the figures."""
        per_token = sum(layer.spec.bytes_per_token for layer in self._owned)
        rows = self.rows or 0
        return KVStats(
            n_tokens=self.length,
            n_rows=rows,
            high_water_tokens=self.high_water,
            bytes_per_token=per_token,
            reserved_nbytes=sum(layer.reserved_nbytes for layer in self._owned),
            used_nbytes=sum(layer.spec.bytes_per_token * layer.n_held for layer in self._owned) * rows,
            scratch_nbytes=sum(region.nbytes for region in self._common.scratch.values()),
        )

    # -- rows ---------------------------------------------------------------------------------------------------

    def reorder(self, rows: Any) -> None:
        """Put row ``rows[i]`` in place of row i, as beam search does after each step; allocates nothing.

        Parameters
        ----------
        rows : ``[rows]`` integers
            A row may be taken more than once. On a GPU the numbers are not looked at before use.

        Raises
        ------
        ArgumentTypeError, ShapeError
            Not that many integers, or out of range. Unchanged on error.
        """
        self._gather(rows, n_new=self.rows)

    def select(self, rows: Any) -> None:
        """Keep only the given rows, in the given order; otherwise as `reorder`."""
        self._gather(rows, n_new=None)

    def repeat(self, n: int) -> None:
        """Put `n` copies of each row side by side, as ``repeat_interleave`` does.

        After repeating a single row all rows share its tokens: reordering skips them, and checkpoints
        taken before stay usable.

        Raises
        ------
        ShapeError
            More rows than the cache was made for. Unchanged on error.
        """
        n = positive(n, "n")
        if self.rows is None:
            return
        single = self.rows == 1
        if self.rows * n > self.batch:
            raise ShapeError(f"{self.rows * n} rows asked, the cache was made for 1 to {self.batch}")
        self._gather([row for row in range(self.rows) for _ in range(n)], n_new=None, keep_marks=single)
        if single:
            self._common.n_shared = self.length

    def _gather(self, rows: Any, *, n_new: int | None, keep_marks: bool = False) -> None:
        held = self.rows
        if held is None:  # nothing is held, so nothing has to move
            return
        index: dict[int, Any] = {}
        count = 0
        for ops in self._ops.values():
            index[id(ops)], count = ops.row_index(rows, held)
        if n_new is not None and count != n_new:
            raise ShapeError(f"{count} rows given to put in the place of {held}")
        if not 1 <= count <= self.batch:
            raise ShapeError(f"{count} rows asked, the cache was made for 1 to {self.batch}")
        for region in self._common.scratch.values():
            region._check()
        shared = self._common.n_shared
        low = 0 if count > held else shared  # more rows than share the prefix: it has to be copied too
        if self.batch > 1:
            for layer in self._owned:
                layer.check_live()
            for layer in self._owned:
                layer.gather(index[id(layer._ops)], low, count)
        if not keep_marks:
            # A prefix that all rows share is untouched by an exchange of rows.
            self._common.marks[:] = [mark for mark in self._common.marks if mark[0] <= shared]
        self._common.rows = count


def layer_kind(spec: LayerSpec) -> type[KVLayer]:
    """Return the class of the layer that a spec asks for."""
    if spec.storage is not None:
        return QuantizedLayer
    return FullLayer if spec.slack is None else WindowLayer
