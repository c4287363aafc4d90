"""Layers whose tokens lie one behind the other for all layers, so that memory grows with the tokens.

A record is what all layers hold of one token, of all rows. On an arena that grows, addresses are reserved for all of
them, and memory is committed as tokens come: it follows the longest row. Nothing moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from gpuarena._bump import align_up
from gpuarena.arena import Arena
from gpuarena.kv._layer import Common
from gpuarena.kv._ops import Ops
from gpuarena.kv.full import FullLayer
from gpuarena.kv.spec import LayerSpec

__all__ = ["GrowingLayer", "Records"]

#: Alignment in bytes of each layer's part of a record: what vectorised loads of kernels want.
PART_ALIGNMENT = 16
#: Memory is asked for at least so many bytes at a time; the arena commits whole chunks anyway.
_STEP_NBYTES = 64 << 10


class Records:
    """The region ``[max_tokens, record_nbytes]`` of bytes, and where each layer's part of a record begins.

    Parameters
    ----------
    arena : Arena
        If it grows, the memory is committed in pieces, as long as nothing is allocated behind the region.
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
        Tokens that there is memory for.
    """

    def __init__(self, arena: Arena, layers: Sequence[LayerSpec], batch: int, max_tokens: int) -> None:
        self._arena = arena
        self._max_tokens = max_tokens
        self.offsets, self.record_nbytes = record_layout(layers, batch)
        self._step = max(1, _STEP_NBYTES // self.record_nbytes)
        align = max(PART_ALIGNMENT, arena.alignment)
        self.region = arena._reserve((max_tokens, self.record_nbytes), "uint8", align, "kv records")
        self.n_tokens = 0 if arena.grows else max_tokens

    def ensure(self, n_tokens: int) -> None:
        """Commit memory for `n_tokens` tokens; unchanged on error.

        Raises
        ------
        OutOfMemoryError, CaptureError, BackendError
            No memory could be committed.
        """
        if n_tokens > self.n_tokens:
            target = min(-(-n_tokens // self._step) * self._step, self._max_tokens)
            with self._arena._lock:
                self.region._check()
                self._arena._commit(self._end_of(target))
            self.n_tokens = target

    def trim(self, n_tokens: int) -> int:
        """Give back the memory behind `n_tokens` tokens, as far as whole chunks allow; return the bytes given back.

        Nothing is given back if something was allocated behind the records.

        Raises
        ------
        LiveArraysError
            Arrays over the records are still referenced. Unchanged on error.
        CaptureError, BackendError
            From the backend.
        """
        arena = self._arena
        with arena._lock:
            self.region._check()
            if not arena.grows or arena.stats.top > self._end_of(self._max_tokens):
                return 0
            assert arena._tracker is not None, "a growable arena tracks its arrays"
            arena._tracker.check_above(self.region.offset)
            n_bytes = arena._backend.trim(self._end_of(n_tokens))
        self.n_tokens = min(self.n_tokens, n_tokens)
        return n_bytes

    def _end_of(self, n_tokens: int) -> int:
        return self.region.offset + n_tokens * self.record_nbytes


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

    def _make_ready(self, n_new: int) -> None:
        """Make room for more tokens."""
        stop = self.length + n_new
        if stop > self._common.max_tokens:
            raise self._capacity_error(n_new)
        self.make_room(stop)

    def append_pair(self, pair: Any) -> tuple[Any, Any]:
        """Write keys and values that come as one array; see `FullLayer.append_pair`. Here it takes two operations."""
        self._check_pair(pair)
        return self.append(pair[0], pair[1])

    def make_room(self, n_tokens: int) -> None:
        """Make sure that there is memory for `n_tokens` tokens."""
        self._records.ensure(n_tokens)
        self._n_ready = self._records.n_tokens

    def forget(self) -> None:
        """Hold no array of the records any more, and rely on no memory behind the tokens."""
        self._k = self._v = self._pair = self._k_tokens = self._v_tokens = None
        self._bound = self._n_ready = self._n_clean = self._n_used = 0

    @property
    def reserved_nbytes(self) -> int:
        """Bytes of this layer's part of the records that there is memory for."""
        return self.spec.bytes_per_token * self._common.batch * self._records.n_tokens
