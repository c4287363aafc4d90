"""The caches that are measured, filled with the same random keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from gpuarena_transformers import ArenaCache
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import Cache, CacheLayerMixin

from gpuarena.bench._models import Models

__all__ = ["OURS", "REFERENCE", "VARIANTS", "IdealCache", "filled", "make"]

#: Variant -> (cache, attention, capacity rule).
VARIANTS: dict[str, tuple[str, str, str]] = {
    "ArenaCache + gpuarena": ("arena", "gpuarena", "exact"),
    "ArenaCache + sdpa": ("arena", "sdpa", "exact"),
    "DynamicCache + sdpa": ("dynamic", "sdpa", "exact"),
    "DynamicCache + gpuarena": ("dynamic", "gpuarena", "exact"),
    "StaticCache (exact) + sdpa": ("static", "sdpa", "exact"),
    "StaticCache (largest) + sdpa": ("static", "sdpa", "largest"),
    "ideal + gpuarena": ("ideal", "gpuarena", "exact"),
}
REFERENCE = "DynamicCache + sdpa"
OURS = "ArenaCache + gpuarena"


class _IdealLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped
    """Holds the keys and values of a step before the step, and writes nothing."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return what is held."""
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the tokens that are held."""
        return self.keys.shape[2], 0

    def get_seq_length(self) -> int:
        """Return the tokens before the step."""
        return int(self.keys.shape[2]) - 1

    def get_max_length(self) -> int:
        """Return that there is none."""
        return -1


class IdealCache(Cache):  # type: ignore[misc]  # transformers is untyped
    """What no cache can be faster than: each step finds its own keys and values already written.

    `take` copies them from a cache that has just done the step.
    """

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[_IdealLayer() for _ in range(layers)])

    def take(self, other: Any) -> None:
        """Hold what another cache holds, the last token of which is that of the step."""
        for layer, one in zip(self.layers, other.layers, strict=True):
            layer.keys, layer.values = one.keys.clone(), one.values.clone()
            layer.is_initialized = True


def make(kind: str, models: Models, batch: int, capacity: int) -> Any:
    """Return an empty cache of a kind of `VARIANTS`."""
    if kind == "arena":
        return ArenaCache(models.config, batch, capacity)
    if kind == "static":
        return StaticCache(config=models.config, max_cache_len=capacity)
    if kind == "ideal":
        return IdealCache(models.config.num_hidden_layers)
    return DynamicCache(config=models.config)


def filled(
    models: Models,
    length: int,
    capacity: Mapping[str, int],
    *,
    batch: int = 1,
    variants: Mapping[str, tuple[str, str, str]] = VARIANTS,
) -> dict[str, Any]:
    """Return a cache a variant, each holding the same `length` random tokens a row; an ideal one holds none yet."""
    caches = {name: make(kind, models, batch, capacity[rule]) for name, (kind, _, rule) in variants.items()}
    generator = torch.Generator(device=models.device).manual_seed(1)
    shape = (batch, models.kv_heads, length, models.head_dim)
    with torch.inference_mode():
        for layer in range(models.config.num_hidden_layers):
            keys, values = (
                torch.randn(shape, generator=generator, device=models.device).to(models.dtype)
                for _ in range(2)
            )
            for cache in caches.values():
                if not isinstance(cache, IdealCache):
                    cache.update(keys, values, layer)
    return caches
