"""Layers whose tokens lie one behind the other for all layers, so that memory grows with the tokens.

A record is what all layers hold of one token, of all rows. On an arena that grows, records are added in place as
tokens come, and the memory that is committed follows the longest row. Nothing moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from gpuarena._bump import align_up
from gpuarena.arena import Arena
from gpuarena.errors import CheckpointError
from gpuarena.kv._layer import Common
from gpuarena.kv._ops import Ops
from gpuarena.kv.full import FullLayer
from gpuarena.kv.spec import LayerSpec

__all__ = ["GrowingLayer", "Records"]

#: Alignment in bytes of each layer's part of a record: what vectorised loads of kernels want.
PART_ALIGNMENT = 16
#: A region grows by at least so many bytes at a time; the arena commits whole chunks anyway.
_STEP_NBYTES = 64 << 10


class Records:
    """The region ``[tokens, record_nbytes]`` of bytes, and where each layer's part of a record begins.

    Parameters
    ----------
    arena : Arena
        The region has to stay its last one, if the arena grows.
    layers : sequence of LayerSpec
        Those that store every token.
    batch, max_tokens : int

    Attributes
    ----------
    offsets : list of lists of int
        Of each layer: the byte of a record where each plane of its buffers begins.
    record_nbytes : int
        Bytes of a token of all layers and rows.
    n_tokens : int
        Tokens that there is room for now.
    """

    def __init__(self, arena: Arena, layers: Sequence[LayerSpec], batch: int, max_tokens: int) -> None:
        self._arena = arena
        self._max_tokens = max_tokens
        self.offsets, self.record_nbytes = record_layout(layers, batch)
        self._step = max(1, _STEP_NBYTES // self.record_nbytes)
        self.grows = arena.grows
        self._begin = arena.checkpoint()
        self._allocate()

    def _allocate(self) -> None:
        n_tokens = min(self._step, self._max_tokens) if self.grows else self._max_tokens
        align = max(PART_ALIGNMENT, self._arena.alignment)
        self.region = self._arena.alloc(
            (n_tokens, self.record_nbytes), "uint8", align=align, label="kv records"
        )
        self.n_tokens = n_tokens

    def ensure(self, n_tokens: int) -> None:
        """Make room for `n_tokens` tokens; unchanged on error.

        Raises
        ------
        CheckpointError
            Something was allocated behind the cache, or a checkpoint of the arena taken.
        OutOfMemoryError, CaptureError
            No memory could be committed.
        """
        if n_tokens <= self.n_tokens:
            return
        target = min(-(-n_tokens // self._step) * self._step, self._max_tokens)
        try:
            self.region = self.region.extend(target)
        except CheckpointError as error:
            raise CheckpointError(
                f"the cache has room for {self.n_tokens} tokens and cannot grow to {n_tokens}: {error}. Give it an "
                f"arena of its own, or layout='head-major', which takes all memory at once"
            ) from error
        self.n_tokens = target

    def restart(self) -> None:
        """Drop all records but the first few; no token may be held.

        Raises
        ------
        CheckpointError
            Something was allocated behind them. Unchanged on error.
        """
        if self.grows and self.n_tokens > self._step:
            if self._arena.stats.top != self.region.offset + self.region.nbytes:
                raise CheckpointError(
                    "the memory of the cache cannot be given back: more was allocated behind it"
                )
            self._arena.rollback(self._begin)
            self._allocate()


def record_layout(layers: Iterable[LayerSpec], batch: int) -> tuple[list[list[int]], int]:
    """Return where the planes of each layer begin in a record, and the bytes of one.

    >>> record_layout([LayerSpec(1, 4, 4, "float32"), LayerSpec(1, 2, 1, "uint8")], batch=1)
    ([[0, 16], [32, 48]], 64)
    """
    offsets, top = [], 0
    for layer in layers:
        begins = []
        for buffer in layer.buffers:
            nbytes = batch * layer.kv_heads * buffer.dim * buffer.dtype.itemsize
            for _ in range(buffer.n_planes):
                begins.append(top)
                top = align_up(top + nbytes, PART_ALIGNMENT)
        offsets.append(begins)
    return offsets, top


class GrowingLayer(FullLayer):
    """Keys and values that lie ``[tokens, batch, kv_heads, dim]`` in records, and look ``[batch, kv_heads, tokens, dim]``."""

    __slots__ = ("_place", "_records")

    def __init__(
        self,
        common: Common,
        index: int,
        arena: Arena,
        spec: LayerSpec,
        ops: Ops,
        *,
        records: Records,
        place: int,
    ) -> None:
        self._records = records
        self._place = place
        super().__init__(common, index, arena, spec, ops, (records.region,))
        self._n_ready = 0

    def planes(self) -> Iterator[tuple[str, Any]]:
        """Yield the name and the whole of each buffer, ``[batch, kv_heads, room, dim]``; pairs give two."""
        spec, batch = self.spec, self._common.batch
        array = self._records.region.array
        offsets = iter(self._records.offsets[self._place])
        for buffer in spec.buffers:
            for _ in range(buffer.n_planes):
                yield (
                    buffer.name,
                    self._ops.part(array, next(offsets), (batch, spec.kv_heads, buffer.dim), buffer.dtype),
                )

    def _bind(self, n_rows: int) -> None:
        super()._bind(n_rows)
        self._n_ready = self._records.n_tokens
        self.regions = (self._records.region,)

    def _make_ready(self, n_new: int) -> None:
        """Make room for more tokens."""
        stop = self.length + n_new
        if stop > self._common.max_tokens:
            raise self._capacity_error(n_new)
        self.check_live()
        self._records.ensure(stop)
        self._bound = 0  # what follows looks anew

    def append_pair(self, pair: Any) -> tuple[Any, Any]:
        """Write keys and values that come as one array; see `FullLayer.append_pair`. Here it takes two operations."""
        self._check_pair(pair)
        return self.append(pair[0], pair[1])

    def make_room(self, n_tokens: int) -> None:
        """Make room for `n_tokens` tokens, and look at it."""
        if n_tokens > self._n_ready:
            self._records.ensure(n_tokens)
            self._bind(self._bound or self._common.batch)

    def forget(self) -> None:
        """Hold no array of the records any more; there is no token."""
        self._k = self._v = None
        self._bound = self._n_ready = self._n_clean = 0
        self.regions = (self._records.region,)

    @property
    def reserved_nbytes(self) -> int:
        """Bytes of this layer's part of the records that there are."""
        return self.spec.bytes_per_token * self._common.batch * self._records.n_tokens
