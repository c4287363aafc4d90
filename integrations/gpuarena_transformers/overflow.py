"""What a cache does with tokens that it has no room for: refuse them, or go on with ordinary tensors that grow."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from gpuarena import Arena
from gpuarena.errors import ArgumentError, CapacityError
from gpuarena.kv import KVLayer, KVStats, LayerGroup, LayerSpec
from gpuarena.kv.full import FullLayer

__all__ = ["CacheOverflowWarning", "CacheStats", "Overflow", "OverflowLayer"]


class CacheOverflowWarning(UserWarning):
    """A cache with ``on_full="fallback"`` is full, and goes on with tensors that are copied at each step.

    Attributes
    ----------
    n_tokens : int
        Tokens of a row that are to be held.
    capacity : int
        Tokens of a row that the arena has room for.
    nbytes : int
        Bytes of ordinary tensors that they will take, over all layers and rows.
    """

    def __init__(self, message: str, *, n_tokens: int = 0, capacity: int = 0, nbytes: int = 0) -> None:
        super().__init__(message)
        self.n_tokens = n_tokens
        self.capacity = capacity
        self.nbytes = nbytes


@dataclass(frozen=True, slots=True)
class CacheStats(KVStats):
    """A snapshot of an `ArenaCache`: the figures of its group, and what lies outside of the arena."""

    overflow_nbytes: int = 0
    """Bytes of ordinary tensors in use since the arena is full; 0 as long as it is not."""
    host_nbytes: int = 0
    """With ``offload="cpu"``, bytes of the arenas in host memory, which hold keys, values and their scratch."""
    staging_nbytes: int = 0
    """With ``offload="cpu"``, bytes on the devices that keys and values are brought to."""

    @classmethod
    def of(cls, group: LayerGroup) -> CacheStats:
        """Return the figures of a group."""
        stats = group.stats
        overflow_nbytes = sum(getattr(layer, "overflow_nbytes", 0) for layer in group.layers)
        return cls(
            **{field.name: getattr(stats, field.name) for field in fields(stats)},
            overflow_nbytes=overflow_nbytes,
        )


class Overflow:
    """The choice of ``on_full="fallback"`` for one cache, and whether it was announced."""

    def __init__(self) -> None:
        self.is_announced = False

    @classmethod
    def chosen(cls, on_full: Any) -> Overflow | None:
        """Return what ``on_full`` asks for; None to raise.

        >>> Overflow.chosen("raise") is None
        True

        Raises
        ------
        ArgumentError
            It is neither ``"raise"`` nor ``"fallback"``.
        """
        if on_full not in ("raise", "fallback"):
            raise ArgumentError(f'on_full is "raise" or "fallback", not {on_full!r}')
        return cls() if on_full == "fallback" else None

    def add_layer(
        self, group: LayerGroup, arena: Arena, spec: LayerSpec, *, index: int, n_layers: int
    ) -> KVLayer:
        """Add a layer that may grow beyond the arena to `group`, which will have `n_layers` in all."""
        layer = group.add(arena, spec, index=index, kind=OverflowLayer)
        assert isinstance(layer, OverflowLayer), "it is of the kind that was asked for"
        layer.overflow = self
        layer.n_layers = n_layers
        return layer

    def announce(self, layer: KVLayer, n_tokens: int, n_rows: int) -> None:
        """Warn that `n_tokens` are to be held, unless that was done since the cache was empty."""
        if self.is_announced:
            return
        self.is_announced = True  # before the warning, which may be an error: the next call then goes on
        capacity = layer._common.max_tokens
        nbytes = n_tokens * n_rows * layer.spec.bytes_per_token * getattr(layer, "n_layers", 1)
        warnings.warn(
            CacheOverflowWarning(
                f"the cache is full: {n_tokens} tokens of {n_rows} rows are to be held, max_context_length is "
                f"{capacity}. It goes on with ordinary tensors of about {nbytes} bytes, which are copied at each "
                f"step; make the cache for at least {n_tokens} tokens, or with on_full='raise'",
                n_tokens=n_tokens,
                capacity=capacity,
                nbytes=nbytes,
            ),
            stacklevel=6,
        )


class OverflowLayer(FullLayer):
    """A layer whose tokens leave the arena when it is full, as ordinary tensors of all tokens, and come back.

    The first `_n_true` tokens in the arena are still what the tensors hold, so that going back copies only the rest.
    """

    __slots__ = ("_grown", "_n_true", "n_layers", "overflow")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.overflow = Overflow()
        self.n_layers = 1
        # Keys and values, [rows or more, kv_heads, length, dim]; more after a rollback to fewer rows.
        self._grown: tuple[torch.Tensor, torch.Tensor] | None = None
        self._n_true = 0

    @property
    def overflow_nbytes(self) -> int:
        """Bytes of the ordinary tensors."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self._grown or ())

    def append(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """Write new tokens, or make larger tensors of all; see `KVLayer.append`."""
        if self._grown is None:
            try:
                return super().append(keys, values)
            except CapacityError:
                pass
        n_rows, n_new = self._accept(keys, values)
        start = self.length
        if self._grown is None:
            self.check_live()
            self.overflow.announce(self, start + n_new, n_rows)
        held = self._tensors(n_rows)
        with torch.no_grad():
            grown = tuple(
                torch.cat([old, new.detach()], dim=2) for old, new in zip(held, (keys, values), strict=True)
            )
        if self._grown is None:
            self._n_true = start
        self._grown = grown[0], grown[1]
        self._advance(n_rows, start + n_new)
        return self._shown(start)

    def _tensors(self, n_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of all tokens of the first rows, ``[n_rows, kv_heads, length, dim]``."""
        if self._grown is None:
            ops = self._ops
            planes = [ops.tokens(ops.rows(plane, n_rows), 0, self.length) for _, plane in self.planes()]
            return planes[0], planes[1]
        return self._grown[0][:n_rows], self._grown[1][:n_rows]

    def _shown(self, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what queries from token `start` on may see, of the tensors."""
        low = self.low(start)
        keys, values = self._tensors(self._rows_held)
        return keys[:, :, low:], values[:, :, low:]

    @property
    def _rows_held(self) -> int:
        return self._common.batch if self._common.rows is None else self._common.rows

    # -- what it holds ------------------------------------------------------------------------------------------

    @property
    def keys(self) -> Any:
        """The filled keys, ``[rows, kv_heads, length, key_dim]``."""
        return super().keys if self._grown is None else self._tensors(self._rows_held)[0]

    @property
    def values(self) -> Any:
        """The filled values, ``[rows, kv_heads, length, value_dim]``."""
        return super().values if self._grown is None else self._tensors(self._rows_held)[1]

    def read(self, n_tokens: int = 1) -> tuple[Any, Any]:
        """Return what the queries of the last `n_tokens` tokens may see; see `KVLayer.read`."""
        if self._grown is None:
            return super().read(n_tokens)
        return self._shown(self.length - self._check_read(n_tokens))

    def filled(self) -> Iterator[tuple[str, Any]]:
        """Yield the name and the filled part of keys and values; see `KVLayer.filled`."""
        if self._grown is None:
            yield from super().filled()
        else:
            names = [name for name, _ in self.planes()]
            yield from zip(names, self._tensors(self._rows_held), strict=True)

    def _hold(self, runs: Sequence[range]) -> None:
        """Take over tokens that the caller writes to `filled`, also more than the arena has room for."""
        n_tokens = runs[-1].stop
        if n_tokens > self._common.max_tokens:
            planes = [plane for _, plane in self.planes()]
            with torch.inference_mode(False):  # else they could be written in that mode only
                made = [
                    torch.empty(
                        (self._rows_held, plane.shape[1], n_tokens, plane.shape[3]),
                        dtype=plane.dtype,
                        device=plane.device,
                    )
                    for plane in planes
                ]
            self._grown = made[0], made[1]
            self._n_true = 0
        super()._hold(runs)

    # -- changes ------------------------------------------------------------------------------------------------

    def _cut(self, n_tokens: int) -> None:
        super()._cut(n_tokens)
        if self._grown is None:
            return
        # A region whose arena was rolled back cannot be written, and a cut never raises.
        if n_tokens <= self._common.max_tokens and self.regions[-1].is_live:
            self._go_back(n_tokens)
        else:
            self._grown = self._grown[0][:, :, :n_tokens], self._grown[1][:, :, :n_tokens]

    def _go_back(self, n_tokens: int) -> None:
        """Write what the arena does not hold any more, and let go of the tensors."""
        assert self._grown is not None, "there are tensors to go back from"
        low, rows, ops = min(self._n_true, n_tokens), self._rows_held, self._ops
        with torch.no_grad():
            for (_, plane), tensor in zip(self.planes(), self._grown, strict=True):
                ops.tokens(ops.rows(plane, rows), low, n_tokens).copy_(tensor[:rows, :, low:n_tokens])
        self._grown = None

    def _restart(self) -> None:
        super()._restart()
        self._grown = None
        self.overflow.is_announced = False

    def gather(self, rows: Any, low: int, count: int) -> None:
        """Put `count` rows in place of those that are held; tensors are replaced by new ones."""
        if self._grown is None:
            super().gather(rows, low, count)
            return
        with torch.no_grad():
            keys, values = (tensor.index_select(0, rows) for tensor in self._tensors(self._rows_held))
        self._grown = keys, values
        self._n_true = min(self._n_true, low)
