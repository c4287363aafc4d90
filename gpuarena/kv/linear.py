"""The linear cache: per layer one region of keys and one of values, filled from the front."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from gpuarena._bump import place
from gpuarena.arena import Arena
from gpuarena.errors import (
    ArgumentError,
    ArgumentTypeError,
    CapacityError,
    CheckpointError,
    DTypeError,
    ShapeError,
    refuse_copy,
)
from gpuarena.kv._ops import Ops, ops_for
from gpuarena.kv.spec import SCRATCH_ALIGNMENT, KVSpec, LayerSpec, positive
from gpuarena.region import Region

__all__ = ["KVCache", "KVCheckpoint", "KVLayer", "KVScope", "KVStats", "LayerGroup"]


class _Common:
    """What the layers of a group have in common.

    They refer to this and not to their group, so that no cycle keeps the memory of a cache that was dropped.
    """

    __slots__ = ("batch", "capacity_hint", "high_water", "lengths", "marks", "max_tokens", "n_shared", "rows")

    def __init__(self, batch: int, max_tokens: int, capacity_hint: str) -> None:
        self.batch = batch
        self.max_tokens = max_tokens
        self.capacity_hint = capacity_hint
        self.rows: int | None = None
        self.high_water = 0
        self.lengths: list[int] = []  # tokens of each layer
        self.n_shared = 0  # the first tokens that are the same in all rows, since repeat() copied one row
        self.marks: list[tuple[int, int]] = []  # (n_tokens, serial), ascending: the checkpoints that live

    def forget_above(self, n_tokens: int) -> None:
        self.n_shared = min(self.n_shared, n_tokens)
        while self.marks and self.marks[-1][0] > n_tokens:
            self.marks.pop()


class KVLayer:
    """Keys and values of one layer, head-major: ``[batch, kv_heads, max_tokens, dim]``.

    `length` tokens of the first `rows` rows are filled. Made by `LayerGroup.add`.
    """

    __slots__ = (
        "_bound",
        "_common",
        "_k",
        "_ops",
        "_slot",
        "_v",
        "_wanted",
        "index",
        "key_region",
        "spec",
        "value_region",
    )

    def __init__(self, common: _Common, index: int, arena: Arena, spec: LayerSpec, ops: Ops) -> None:
        shape = (common.batch, spec.kv_heads, common.max_tokens)
        self._common = common
        self._slot = len(common.lengths)
        self._ops = ops
        self.index = index
        self.spec = spec
        start = arena.checkpoint()
        try:
            self.key_region = arena.alloc((*shape, spec.key_dim), spec.dtype, label=f"layer{index}.keys")
            self.value_region = arena.alloc(
                (*shape, spec.value_dim), spec.value_dtype, label=f"layer{index}.values"
            )
        except BaseException:
            arena.rollback(start)
            raise
        self._bound = 0  # rows that the next two show
        self._k: Any = None  # [rows, kv_heads, max_tokens, key_dim], set by _bind
        self._v: Any = None
        self._wanted = (ops.dtype(spec.dtype), ops.dtype(spec.value_dtype))

    def __reduce__(self) -> Any:
        raise refuse_copy(self)

    @property
    def length(self) -> int:
        """Tokens that are filled."""
        return self._common.lengths[self._slot]

    @property
    def rows(self) -> int | None:
        """Rows that are in use, None until the first append after a reset."""
        return self._common.rows

    def _bind(self, n_rows: int) -> None:
        """Look at the first `n_rows` rows of the buffers."""
        self._k = self._ops.rows(self.key_region.array, n_rows)
        self._v = self._ops.rows(self.value_region.array, n_rows)
        self._bound = n_rows

    def append(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """Write new tokens behind the filled ones, and return views of what a query may see.

        Parameters
        ----------
        keys : ``[rows, kv_heads, n, key_dim]``
        values : ``[rows, kv_heads, n, value_dim]``

        Returns
        -------
        keys, values
            Views of all filled tokens, or of the last ``window - 1 + n`` in a layer with a window. They show
            what is in the cache, also after it changes.

        Raises
        ------
        ArgumentTypeError, DeviceMismatchError, AutogradError, ShapeError, DTypeError, CapacityError, StaleRegionError
            Checked before the first byte is written; the cache is unchanged on error.
        """
        common, ops, spec = self._common, self._ops, self.spec
        try:
            n_rows, heads, n_new, dim = keys.shape
            fine = (
                heads == spec.kv_heads
                and dim == spec.key_dim
                and n_rows == common.rows
                and values.shape == (n_rows, heads, n_new, spec.value_dim)
                and ops.agree(keys, values, self._wanted)
            )
        except (AttributeError, TypeError, ValueError):  # no array, or not four dimensions
            fine = False
        if not fine:
            self._check(keys, values)
            n_rows, n_new = keys.shape[0], keys.shape[2]
        start = common.lengths[self._slot]
        stop = start + n_new
        if stop > common.max_tokens:
            raise self._capacity_error(n_new)
        region = self.value_region
        if not region.is_live:
            region._check()
        if n_rows != self._bound:
            self._bind(n_rows)
        ops.write(self._k, self._v, start, keys, values)
        common.rows = n_rows  # differs only while nothing is held, the check saw to that
        common.lengths[self._slot] = stop
        if stop > common.high_water:
            common.high_water = stop
        window = spec.window
        low = 0 if window is None or start < window else start - window + 1
        return ops.tokens(self._k, low, stop), ops.tokens(self._v, low, stop)

    def truncate(self, n_tokens: int) -> None:
        """Keep the first `n_tokens` tokens of this layer alone, 0 to `length`; checkpoints above die."""
        keep = positive(n_tokens, "n_tokens", least=0)
        if keep > self.length:
            raise ArgumentError(f"truncate({keep}): layer {self.index} holds only {self.length} tokens")
        self._common.lengths[self._slot] = keep
        self._common.forget_above(keep)

    @property
    def keys(self) -> Any:
        """View of the filled keys, ``[rows, kv_heads, length, key_dim]``."""
        return self._filled(self.key_region)

    @property
    def values(self) -> Any:
        """View of the filled values, ``[rows, kv_heads, length, value_dim]``."""
        return self._filled(self.value_region)

    def _filled(self, region: Region) -> Any:
        rows = self._common.rows
        buffer = self._ops.rows(region.array, self._common.batch if rows is None else rows)
        return self._ops.tokens(buffer, 0, self.length)

    def _check(self, keys: Any, values: Any) -> None:
        """Raise unless `append` may write these, or may once it has decided the number of rows."""
        spec, common = self.spec, self._common
        self._ops.check(keys, "keys")
        self._ops.check(values, "values")
        rows = common.rows
        k_shape, v_shape = tuple(keys.shape), tuple(values.shape)
        who = f"layer {self.index}"
        if len(k_shape) != 4 or k_shape[1] != spec.kv_heads or k_shape[3] != spec.key_dim:
            raise ShapeError(
                f"{who}: keys are {list(k_shape)}, the cache holds [rows, {spec.kv_heads}, tokens, {spec.key_dim}]",
                shape=k_shape,
            )
        if v_shape != (*k_shape[:3], spec.value_dim):
            raise ShapeError(
                f"{who}: values are {list(v_shape)}, for these keys they must be "
                f"{[*k_shape[:3], spec.value_dim]}",
                shape=v_shape,
            )
        n_rows = k_shape[0]
        if rows is not None and any(common.lengths) and n_rows != rows:
            raise ShapeError(
                f"{who}: {n_rows} rows given, the cache holds {rows}; reset() starts anew, "
                f"repeat(n) and select(rows) change the rows that are held",
                shape=k_shape,
            )
        if not 1 <= n_rows <= common.batch:
            raise ShapeError(
                f"{who}: {n_rows} rows given, the cache was made for at most {common.batch} "
                f"(sequences times beams or returned sequences); make it with a larger batch",
                shape=k_shape,
            )
        if (keys.dtype, values.dtype) != self._wanted:
            raise DTypeError(
                f"{who}: keys are {keys.dtype} and values {values.dtype}, the cache holds {spec.dtype} "
                f"and {spec.value_dtype}; convert them, or make the cache with their dtype",
                dtype=keys.dtype,
            )

    def _capacity_error(self, n_new: int) -> CapacityError:
        capacity = self._common.max_tokens
        missing = self.length + n_new - capacity
        return CapacityError(
            f"layer {self.index}: the cache is full: {self.length} of {capacity} tokens used, {n_new} more asked, "
            f"{missing} too many. Nothing was written: roll back or truncate, or make the cache for at least "
            f"{self.length + n_new} tokens{self._common.capacity_hint}",
            used=self.length,
            requested=n_new,
            capacity=capacity,
            available=capacity - self.length,
            missing=missing,
            aligned_offset=self.length,
            label=f"layer{self.index}",
        )


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
    """Bytes reserved for reordering rows; 0 for a single row."""


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

    def __enter__(self) -> KVCheckpoint:
        if self._checkpoint is not None:
            raise CheckpointError("this scope was entered before; make another with cache.scope()")
        self._checkpoint = self._group.checkpoint()
        return self._checkpoint

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        assert self._checkpoint is not None, "a scope that is left was entered"
        try:
            self._group.rollback(self._checkpoint)
        except CheckpointError:
            if exc is None:  # an exception that is on its way says more than ours would
                raise


class LayerGroup:
    """Layers that are filled, rolled back and reordered together.

    `KVCache` makes all of its layers at once; an adapter adds each when it first sees the layer's tensors.
    """

    def __init__(self, *, batch: int, max_tokens: int, capacity_hint: str = "") -> None:
        self.batch = positive(batch, "batch")
        self.max_tokens = positive(max_tokens, "max_tokens")
        self.layers: list[KVLayer] = []
        self._common = _Common(
            self.batch, self.max_tokens, capacity_hint
        )  # the hint ends "the cache is full"
        self._serial = 0
        self._ops: dict[str, Ops] = {}
        self._scratch: dict[str, Any] = {}  # device -> region of bytes

    def __reduce__(self) -> Any:
        raise refuse_copy(self)

    def add(self, arena: Arena, spec: LayerSpec, *, index: int | None = None) -> KVLayer:
        """Allocate one more layer and, for more than one row, the scratch that reordering it needs.

        `index` is the layer's number for messages, the next one by default.
        """
        start = arena.checkpoint()
        ops = self._ops.get(arena.device)
        if ops is None:
            ops = self._ops[arena.device] = ops_for(arena, self.max_tokens, self.batch)
        layer = KVLayer(self._common, len(self.layers) if index is None else index, arena, spec, ops)
        try:
            self.reserve_scratch(arena, max(layer.key_region.nbytes, layer.value_region.nbytes))
        except BaseException:
            arena.rollback(start)
            raise
        self.layers.append(layer)
        self._common.lengths.append(0)
        return layer

    def top_after(self, arena: Arena, specs: Iterable[LayerSpec]) -> int:
        """Return where the bump pointer of `arena` would stand, in bytes, after an `add` of each of `specs`.

        They fit if that is at most the capacity of the arena.
        """
        top = arena.stats.top
        held = self._scratch.get(arena.device)
        scratch_nbytes = 0 if held is None else held.nbytes
        for spec in specs:
            sizes = spec.region_nbytes(self.batch, self.max_tokens)
            for nbytes, dtype in zip(sizes, (spec.dtype, spec.value_dtype), strict=True):
                top = place(top, nbytes, max(arena.alignment, dtype.alignment), arena.address) + nbytes
            if self.batch > 1 and scratch_nbytes < max(sizes):
                scratch_nbytes = max(sizes)
                align = max(arena.alignment, SCRATCH_ALIGNMENT)
                top = place(top, scratch_nbytes, align, arena.address) + scratch_nbytes
        return top

    def reserve_scratch(self, arena: Arena, nbytes: int) -> None:
        """Allocate what moving rows of regions of `nbytes` needs, unless that is there or there is one row."""
        held = self._scratch.get(arena.device)
        if self.batch > 1 and (held is None or held.nbytes < nbytes):
            align = max(arena.alignment, SCRATCH_ALIGNMENT)
            self._scratch[arena.device] = arena.alloc(nbytes, "uint8", align=align, label="scratch")

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
        uneven = next((layer for layer in self.layers if layer.length != n_tokens), None)
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
            raise ArgumentTypeError(f"rollback takes a KVCheckpoint, not {type(checkpoint).__name__}")
        if checkpoint._group is not self:
            raise CheckpointError("the checkpoint belongs to another cache")
        slot, marks = checkpoint._slot, self._common.marks
        if slot >= len(marks) or marks[slot] != (checkpoint.n_tokens, checkpoint._serial):
            raise CheckpointError(
                f"the checkpoint at {checkpoint.n_tokens} tokens is dead: the cache was truncated below it, "
                f"or its rows changed places, and those tokens are gone"
            )
        short = next((layer for layer in self.layers if layer.length < checkpoint.n_tokens), None)
        if short is not None:  # added since: an adapter adds a layer in the first step that reaches it
            raise CheckpointError(
                f"layer {short.index} holds {short.length} tokens, the checkpoint is at {checkpoint.n_tokens}, "
                f"from before that layer was added; truncate({self.length}) or reset() instead"
            )
        self._cut(checkpoint.n_tokens)
        self._common.rows = checkpoint.n_rows

    def truncate(self, n_tokens: int) -> None:
        """Keep the first `n_tokens` tokens of every layer; constant in tokens.

        Raises
        ------
        ArgumentError
            Negative, or more than every layer holds. Unchanged on error.
        """
        keep = positive(n_tokens, "n_tokens", least=0)
        if keep > self.length:
            raise ArgumentError(f"truncate({keep}): the cache holds only {self.length} tokens")
        self._cut(keep)

    def _cut(self, n_tokens: int) -> None:
        lengths = self._common.lengths
        lengths[:] = [n_tokens] * len(lengths)
        self._common.forget_above(n_tokens)

    def scope(self) -> KVScope:
        """Return a context manager that rolls the cache back on exit, also when an exception passes."""
        return KVScope(self)

    def reset(self) -> None:
        """Forget everything; the memory stays, and the next append may have another number of rows."""
        self._cut(0)
        self._common.marks.clear()
        self._common.rows = None

    @property
    def stats(self) -> KVStats:
        """An immutable snapshot of the figures."""
        per_token = sum(layer.spec.bytes_per_token for layer in self.layers)
        rows = self.rows or 0
        return KVStats(
            n_tokens=self.length,
            n_rows=rows,
            high_water_tokens=self.high_water,
            bytes_per_token=per_token,
            reserved_nbytes=per_token * self.batch * self.max_tokens,
            used_nbytes=sum(layer.spec.bytes_per_token * layer.length for layer in self.layers) * rows,
            scratch_nbytes=sum(region.nbytes for region in self._scratch.values()),
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
        for region in self._scratch.values():
            region._check()
        shared = self._common.n_shared
        low = 0 if count > held else shared  # more rows than share the prefix: it has to be copied too
        if self.batch > 1:
            for layer in self.layers:
                layer.value_region._check()
            for layer in self.layers:
                self._gather_layer(layer, index[id(layer._ops)], low, count)
        if not keep_marks:
            # A prefix that all rows share is untouched by an exchange of rows.
            self._common.marks[:] = [mark for mark in self._common.marks if mark[0] <= shared]
        self._common.rows = count

    def _gather_layer(self, layer: KVLayer, rows: Any, low: int, count: int) -> None:
        if layer.length <= low:
            return
        ops = layer._ops
        scratch = self._scratch[layer.value_region.arena.device].array
        for region in (layer.key_region, layer.value_region):
            buffer = ops.tokens(region.array, low, layer.length)
            ops.gather_rows(buffer, rows, scratch, ops.rows(buffer, count))


class KVCache(LayerGroup):
    """A cache of fixed capacity for a model whose shapes are known: all memory is taken here, none later.

    >>> import numpy as np
    >>> from gpuarena import Arena
    >>> spec = KVSpec.uniform(layers=2, kv_heads=2, head_dim=4, dtype="float32")
    >>> cache = KVCache(Arena("1MiB"), spec, batch=1, max_tokens=16)
    >>> k = np.ones((1, 2, 3, 4), np.float32)  # [batch, kv_heads, tokens, head_dim]
    >>> keys, values = cache.append(0, k, k)
    >>> keys.shape
    (1, 2, 3, 4)

    Parameters
    ----------
    arena : Arena
        A torch arena takes and gives tensors, a host or cupy arena arrays of its own library.
    spec : KVSpec
    batch : int
        Most rows (sequences times beams) that are held at once.
    max_tokens : int
        Capacity of each row, in tokens.

    Raises
    ------
    OutOfMemoryError
        The arena has less than ``spec.arena_nbytes(batch, max_tokens)`` left; nothing was taken of it.

    Notes
    -----
    Rolling the arena back to before this call makes the cache stale; later appends raise.
    """

    def __init__(self, arena: Arena, spec: KVSpec, *, batch: int, max_tokens: int) -> None:
        super().__init__(batch=batch, max_tokens=max_tokens)
        self.arena = arena
        self.spec = spec
        start = arena.checkpoint()
        try:
            for layer in spec.layers:
                self.add(arena, layer)
        except BaseException:
            arena.rollback(start)
            raise

    def reserve_scratch(self, arena: Arena, nbytes: int) -> None:
        """Allocate the scratch of all layers with the last one."""
        # One region for all layers, at the end, where arena_nbytes counts it.
        if len(self.layers) == len(self.spec.layers) - 1:
            layers = self.spec.layers
            super().reserve_scratch(
                arena, max(max(s.region_nbytes(self.batch, self.max_tokens)) for s in layers)
            )

    def append(self, layer: int, keys: Any, values: Any) -> tuple[Any, Any]:
        """Write new tokens of one layer and return views of what a query may see; see `KVLayer.append`."""
        return self.layers[layer].append(keys, values)
