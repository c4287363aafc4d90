"""Layers that hold the keys of an indexer beside their own: sparse attention looks those up first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from gpuarena.errors import ArenaError, ArgumentTypeError
from gpuarena.kv import KVLayer
from gpuarena_transformers.layers import ArenaLayer, cache_is_gone, removed

if TYPE_CHECKING:
    from gpuarena_transformers.cache import ArenaCache

__all__ = ["ArenaIndexedLayer"]


class ArenaIndexedLayer(ArenaLayer):
    """An `ArenaLayer` with the indexer keys of DeepSeek-V3.2, GLM-MoE-DSA and others, ``[rows, tokens, index_dim]``.

    They are one more layer of the cache's group, of one head and no values: cut, rolled back and moved like the others,
    and part of its figures.
    """

    def __init__(self, cache: ArenaCache, index: int) -> None:
        super().__init__(cache, index)
        self._indexer: KVLayer | None = None
        self._position_ids: torch.Tensor | None = None

    def __repr__(self) -> str:
        return super().__repr__().replace("ArenaLayer", "ArenaIndexedLayer")

    @property
    def indexer_keys(self) -> torch.Tensor | None:
        """Filled indexer keys, ``[rows, tokens, index_dim]``, a view; None before the first update."""
        if self._indexer is None:
            return None
        keys: torch.Tensor = self._indexer.keys
        return keys[:, 0]

    @property
    def is_indexer_initialized(self) -> bool:
        """Whether indexer keys are held."""
        return self._indexer is not None and self._indexer.length > 0

    @property
    def indexer_position_ids(self) -> torch.Tensor | None:
        """What a model keeps here of the positions of the tokens, ``[dims, rows, tokens]``; an ordinary tensor."""
        n_tokens = 0 if self._indexer is None else self._indexer.length
        if self._position_ids is None or not n_tokens:
            return None
        n_rows = self._indexer.rows if self._indexer is not None else None
        return self._position_ids[:, :n_rows, :n_tokens]  # so that it goes back with the tokens

    @indexer_position_ids.setter
    def indexer_position_ids(self, value: torch.Tensor | None) -> None:
        self._position_ids = value

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Append ``[rows, n, index_dim]`` and return a view of all, ``[rows, tokens, index_dim]``.

        Raises
        ------
        CapacityError, ShapeError, DTypeError, DeviceMismatchError, AutogradError, StaleRegionError
            Before anything is written.
        """
        if not isinstance(indexer_key_states, torch.Tensor) or indexer_key_states.ndim != 3:
            raise ArgumentTypeError("indexer keys must be a tensor [rows, tokens, index_dim]")
        keys = indexer_key_states[:, None]
        none = keys[..., :0]
        cache = self._cache()
        try:
            if self._indexer is None:
                if cache is None:
                    raise cache_is_gone()
                self._indexer = cache.memory.take_layer(self._index, None, keys, none, kind="indexer")
            found: torch.Tensor = self._indexer.append(keys, none)[0]
        except ArenaError:
            if cache is not None:
                if self._indexer is None and cache.group.layers == [self._kv]:
                    # The first step of all, in an arena that was given and is too small: before it there was nothing.
                    cache.group.reset()
                cache.states.step_failed(self._index)
            raise
        return found[:, 0]

    def lacks(self, kind: str) -> bool:
        """Return whether memory of a kind is still to be taken."""
        return super().lacks(kind) or (kind == "indexer" and self._indexer is None)

    def move_rows(self, rows: Any) -> None:
        """Put rows of the positions in another order, as the cache has done with the keys."""
        if self._position_ids is not None:
            self._position_ids = self._position_ids.index_select(
                1, torch.as_tensor(rows, device=self._position_ids.device)
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Remove ``-tokens_to_remove`` tokens from this layer; `ArenaCache.crop` does it for all."""
        super().crop(tokens_to_remove)
        if self._indexer is not None:
            self._indexer.truncate(self._indexer.length - removed(tokens_to_remove))

    def reset(self) -> None:
        """Forget this layer's tokens; `ArenaCache.reset` does it for all."""
        super().reset()
        if self._indexer is not None:
            self._indexer.truncate(0)
