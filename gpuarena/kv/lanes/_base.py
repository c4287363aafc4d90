"""What all parts of a lane cache use: its memory, its bookkeeping, its arguments."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuarena.arena import Arena
from gpuarena.errors import ArgumentError, ShapeError, refuse_copy
from gpuarena.kv._ops import ops_for
from gpuarena.kv.lanes._arrays import Lanes
from gpuarena.kv.lanes._handles import LaneStats
from gpuarena.kv.lanes._store import LaneStore, arena_nbytes
from gpuarena.kv.lanes._table import LaneTable, Step, items
from gpuarena.kv.spec import KVSpec, LayerSpec, SharedLayer, as_arena, as_spec, positive


class LaneBase:
    """The foundation of `LaneCache`."""

    def __init__(self, arena: Arena, spec: KVSpec, *, lanes: int, max_tokens: int) -> None:
        self.arena = as_arena(arena)
        n_lanes, max_tokens = _check_size(spec, lanes, max_tokens)
        self.spec = spec
        self.max_tokens = max_tokens
        self._table = LaneTable(n_lanes, max_tokens, (number for number, _ in spec.owned))
        self._ops = ops_for(arena, n_lanes)
        self._wanted = {
            number: (self._ops.dtype(layer.dtype), self._ops.dtype(layer.value_dtype))
            for number, layer in spec.owned
        }
        self._store = LaneStore(arena, spec, n_lanes, max_tokens, self._ops)

    @staticmethod
    def arena_nbytes(spec: KVSpec, lanes: int, max_tokens: int, *, alignment: int = 256) -> int:
        """Return the bytes that a cache takes of an arena at most: keys, values, tables, scratch, alignment.

        >>> from gpuarena.kv.lanes import LaneCache
        >>> spec = KVSpec.uniform(layers=28, kv_heads=2, head_dim=128, dtype="bfloat16")
        >>> (LaneCache.arena_nbytes(spec, lanes=4, max_tokens=8192) - spec.nbytes(batch=4, tokens=8192)) >> 20  # MiB
        32
        """
        n_lanes, max_tokens = _check_size(spec, lanes, max_tokens)
        return arena_nbytes(spec, n_lanes, max_tokens, alignment)

    def __reduce__(self) -> Any:
        raise refuse_copy(self)

    def __repr__(self) -> str:
        return f"LaneCache(lanes={self.n_lanes}, max_tokens={self.max_tokens}, lengths={list(self.lengths)})"

    @property
    def n_lanes(self) -> int:
        """Lanes there are."""
        return self._table.n_lanes

    @property
    def lengths(self) -> Lanes:
        """Tokens of each lane, those of a step under way included."""
        return tuple(self._table.lengths)

    @property
    def length_vector(self) -> Any:
        """`lengths` as an int32 array ``[lanes]`` in the arena, written in place, for kernels that read them."""
        return self._store.length_vector(self._table.lengths)

    def positions(self, lane: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the position of each token of a lane, int64 ``[length]`` on the host, a copy.

        A token's position is one more than that of the token before it when it is appended; `remove` leaves
        positions as they are, and `shift` changes them.
        """
        return self._table.positions(self._table.lane(lane))

    def next_position(self, lane: int) -> int:
        """Return the position that the next token of a lane will have: 0 if it is empty."""
        return self._table.next_position(self._table.lane(lane))

    @property
    def stats(self) -> LaneStats:
        """An immutable snapshot of the figures."""
        lengths, per_token = self._table.lengths, self.spec.bytes_per_token
        return LaneStats(
            n_lanes=self.n_lanes,
            n_active=sum(1 for length in lengths if length),
            n_tokens=sum(lengths),
            longest=max(lengths),
            high_water_tokens=self._table.high_water,
            bytes_per_token=per_token,
            reserved_nbytes=sum(layer.nbytes for layer in self._store.layers.values()),
            used_nbytes=per_token * sum(lengths),
            scratch_nbytes=self._store.scratch_nbytes,
        )

    # -- arguments ----------------------------------------------------------------------------------------------

    def _spec(self, owner: int) -> LayerSpec:
        spec = self.spec.layers[owner]
        assert isinstance(spec, LayerSpec), "a shared layer has an owner"
        return spec

    def _own_layer(self, layer: Any) -> int:
        """Return the number of a layer that can be written."""
        owner = self.spec.owner(layer)
        number = positive(layer, "layer", least=0)
        if owner != number:
            raise ArgumentError(
                f"layer {number} shares the keys and values of layer {owner}: append to that, and read({number})"
            )
        return number

    @property
    def _block(self) -> Step | None:
        """The step in whose block a call is."""
        step = self._table.step
        return step if step is not None and step.in_block else None

    def _lanes(self, lanes: Any, n_rows: int) -> Lanes:
        """Return lanes, by default those of the step, or the first `n_rows`."""
        if lanes is not None:
            return self._table.lanes(lanes)
        if self._block is not None:
            return self._block.lanes
        if n_rows > self.n_lanes:
            raise ShapeError(f"{n_rows} rows given, the cache has {self.n_lanes} lanes")
        return tuple(range(n_rows))

    def _counts(self, n_tokens: Any, lanes: Lanes, width: int) -> Lanes:
        """Return a number of tokens for each lane, by default those of the step, or `width` each."""
        if n_tokens is None:
            if self._block is None or self._block.lanes != lanes:
                return (width,) * len(lanes)
            n_tokens = self._block.counts
        return self._table.counts(n_tokens, len(lanes), width)

    def _rows_and_counts(self, n_tokens: Any, lanes: Any) -> tuple[Lanes, Lanes | None]:
        """Return lanes, and a number of tokens for each if these are given a row."""
        if n_tokens is None and self._block is not None:
            rows = self._lanes(lanes, self.n_lanes)
            return rows, self._block.counts if rows == self._block.lanes else None
        if n_tokens is None or (hasattr(n_tokens, "__index__") and getattr(n_tokens, "ndim", 0) == 0):
            return self._lanes(lanes, self.n_lanes), None
        given = items(n_tokens, "n_tokens")
        rows = self._lanes(lanes, len(given))
        return rows, self._table.counts(given, len(rows), None)


def _check_size(spec: KVSpec, lanes: Any, max_tokens: Any) -> tuple[int, int]:
    """Return the number of lanes and of tokens a lane, or raise unless such a cache can be."""
    for number, layer in enumerate(as_spec(spec).layers):
        if isinstance(layer, SharedLayer):
            continue
        for what in ("slack", "storage"):
            if getattr(layer, what) is not None:
                raise ArgumentError(
                    f"layer {number} has {what}={getattr(layer, what)!r}: lanes store whole histories as they are "
                    f"appended; make the spec without it, or use KVCache"
                )
    n_lanes, n_tokens = positive(lanes, "lanes"), positive(max_tokens, "max_tokens")
    if n_lanes * n_tokens >= 2**31:
        raise ArgumentError(
            f"{n_lanes} lanes of {n_tokens} tokens: int32 tables count less than {2**31} tokens together"
        )
    return n_lanes, n_tokens
