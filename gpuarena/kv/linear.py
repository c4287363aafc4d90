"""The linear cache: all memory is taken at once, and filled from the front."""

from __future__ import annotations

from typing import Any

from gpuarena.arena import Arena
from gpuarena.errors import LayerOrderError
from gpuarena.kv._layer import KVLayer
from gpuarena.kv.group import LayerGroup
from gpuarena.kv.spec import KVSpec, SharedLayer

__all__ = ["KVCache", "SharedView"]


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
            self._make_layers()
        except BaseException:
            arena.rollback(start)
            raise
        owners = {number: layer for (number, _), layer in zip(spec.owned, self._owned, strict=True)}
        self._layers: list[KVLayer | SharedView] = [
            SharedView(owners[layer.source], number) if isinstance(layer, SharedLayer) else owners[number]
            for number, layer in enumerate(spec.layers)
        ]

    def _make_layers(self) -> None:
        scratch = [layer.scratch_nbytes(self.batch, self.max_tokens) for _, layer in self.spec.owned]
        for number, layer in self.spec.owned:
            self.add(self.arena, layer, index=number)
        super().reserve_scratch(self.arena, max(scratch))

    def reserve_scratch(self, arena: Arena, nbytes: int) -> None:
        """Do nothing: there is one region for all layers, behind the last one, where arena_nbytes counts it."""

    @property
    def layers(self) -> list[Any]:
        """The layers, in the order of the spec; one that owns nothing is a `SharedView`."""
        return self._layers

    def append(self, layer: int, keys: Any, values: Any) -> tuple[Any, Any]:
        """Write new tokens of one layer and return views of what a query may see; see `KVLayer.append`."""
        try:
            held = self._layers[layer]
        except (IndexError, TypeError):
            held = None
        if held is None or layer < 0:
            self.spec.owner(layer)  # says what is wrong
        assert held is not None, "a layer of the spec is a layer of the cache"
        return held.append(keys, values)

    def read(self, layer: int, n_tokens: int = 1) -> tuple[Any, Any]:
        """Return views of what the queries of the last `n_tokens` may see; see `KVLayer.read`.

        Raises
        ------
        ArgumentTypeError, ArgumentError
            There is no such layer, or so many tokens are not held.
        """
        self.spec.owner(layer)
        view: tuple[Any, Any] = self._layers[layer].read(n_tokens)
        return view

    def mask(self, layer: int, n_tokens: int = 1) -> Any:
        """Return which of the tokens of `read` those queries may see, ``[n_tokens, tokens]``; see `KVLayer.mask`."""
        return self._owned_layer(layer).mask(n_tokens)

    def _owned_layer(self, layer: int) -> KVLayer:
        found = self._layers[self.spec.owner(layer)]
        assert isinstance(found, KVLayer), "an owner owns"
        return found


class SharedView:
    """A layer that owns nothing and shows what another one holds."""

    __slots__ = ("index", "source")

    def __init__(self, source: KVLayer, index: int) -> None:
        self.source = source
        self.index = index

    def append(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """Refuse.

        Raises
        ------
        LayerOrderError
            Always: its keys and values are appended to the layer that owns them.
        """
        raise LayerOrderError(
            f"layer {self.index} shares what layer {self.source.index} holds: append there, and read({self.index}) "
            f"here",
            layer=self.index,
        )

    @property
    def length(self) -> int:
        """Tokens of the owner."""
        return self.source.length

    @property
    def keys(self) -> Any:
        """Those of the owner."""
        return self.source.keys

    @property
    def values(self) -> Any:
        """Those of the owner."""
        return self.source.values

    def read(self, n_tokens: int = 1) -> tuple[Any, Any]:
        """Return what the queries of the last `n_tokens` tokens may see; see `KVLayer.read`."""
        return self.source.read(n_tokens)
