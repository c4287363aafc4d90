"""The caches that are measured, filled with the same random keys and values, and the ways in which they are used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from gpuarena_transformers import ArenaCache, ArenaStaticCache
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import Cache, CacheLayerMixin

from gpuarena.bench._models import Models

__all__ = [
    "COMPILED",
    "GPU_VARIANTS",
    "OURS",
    "REFERENCE",
    "VARIANTS",
    "IdealCache",
    "Way",
    "bucket_of",
    "filled",
    "make",
    "new_tokens",
]


@dataclass(frozen=True)
class Way:
    """A cache, an attention, and how the step of a model that uses both is run."""

    kind: Literal["arena", "dynamic", "static", "arena static", "ideal"]
    attention: Literal["sdpa", "gpuarena"]
    rule: Literal["exact", "largest", "bucket"] = "exact"
    """Capacity: what the group needs, or what the longest context needs; or that, read by buckets."""
    run_by: Literal["python", "graph", "compiler"] = "python"
    folds: bool = False
    """Whether query heads are folded also on devices where that is not the default."""
    without_cudnn: bool = False
    """Whether SDPA may not take cuDNN, which can need a new plan for each length."""


#: On any device. Nothing is compiled.
VARIANTS: dict[str, Way] = {
    "ArenaCache + gpuarena": Way("arena", "gpuarena"),
    "ArenaCache + sdpa": Way("arena", "sdpa"),
    "DynamicCache + sdpa": Way("dynamic", "sdpa"),
    "DynamicCache + gpuarena": Way("dynamic", "gpuarena"),
    "StaticCache (exact) + sdpa": Way("static", "sdpa"),
    "StaticCache (largest) + sdpa": Way("static", "sdpa", "largest"),
    "ideal + gpuarena": Way("ideal", "gpuarena"),
}
#: On a GPU besides. There the gpuarena attention leaves grouped heads to SDPA unless it is told to fold them.
GPU_VARIANTS: dict[str, Way] = {
    "ArenaCache + gpuarena, folded": Way("arena", "gpuarena", folds=True),
    "ArenaCache + sdpa, without cuDNN": Way("arena", "sdpa", without_cudnn=True),
    "ArenaStaticCache (exact) + sdpa, graph": Way("arena static", "sdpa", run_by="graph"),
    "ArenaStaticCache (exact) + gpuarena, folded, graph": Way(
        "arena static", "gpuarena", run_by="graph", folds=True
    ),
}
#: By torch.compile.
COMPILED: dict[str, Way] = {
    "StaticCache (exact) + sdpa, compiled": Way("static", "sdpa", run_by="compiler"),
    "ArenaStaticCache (exact) + sdpa, compiled": Way("arena static", "sdpa", run_by="compiler"),
    "ArenaStaticCache (exact) + gpuarena, folded, compiled": Way(
        "arena static", "gpuarena", run_by="compiler", folds=True
    ),
    "StaticCache (largest) + sdpa, compiled": Way("static", "sdpa", "largest", "compiler"),
    "ArenaStaticCache (bucket) + sdpa, compiled": Way("arena static", "sdpa", "bucket", "compiler"),
}
REFERENCE = "DynamicCache + sdpa"
OURS = "ArenaCache + gpuarena"


class _IdealLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped
    """Holds the keys and values of all steps before the first of them, and writes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.n_held = 0
        self.views: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Keys and values of the first n tokens, made beforehand for the steps to come."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return what is held of one token more."""
        self.n_held += 1
        return self.views[self.n_held]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the tokens that `update` will return."""
        return self.n_held + int(query_length), 0

    def get_seq_length(self) -> int:
        """Return the tokens before the step."""
        return self.n_held

    def get_max_length(self) -> int:
        """Return that there is none."""
        return -1


class IdealCache(Cache):  # type: ignore[misc]  # transformers is untyped
    """What no cache can be faster than: each step finds its own keys and values already written.

    It grows by a token a step like the others, but writes and allocates nothing.
    """

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[_IdealLayer() for _ in range(layers)])

    def take(self, other: Any, n_held: int, room: int) -> None:
        """Hold the first `n_held` tokens of another cache, with what it has behind them for the steps to come.

        What it lacks for `room` steps are random numbers, which nobody checks.
        """
        for layer, one in zip(self.layers, other.layers, strict=True):
            keys, values = (
                torch.cat([tensor, torch.randn_like(tensor[:, :, :1]).expand(-1, -1, missing, -1)], dim=2)
                for tensor in (one.keys, one.values)
                for missing in [n_held + room - tensor.shape[2]]
            )
            layer.n_held = n_held
            layer.views = {
                n: (keys[:, :, :n], values[:, :, :n]) for n in range(n_held + 1, n_held + room + 1)
            }
            layer.is_initialized = True


def make(kind: str, models: Models, batch: int, capacity: int, bucket: int | None = None) -> Any:
    """Return an empty cache of a kind of `Way`."""
    if kind == "arena":
        return ArenaCache(models.config, batch, capacity)
    if kind == "static":
        return StaticCache(config=models.config, max_cache_len=capacity)
    if kind == "arena static":
        return ArenaStaticCache(models.config, batch, capacity, bucket=bucket)
    if kind == "ideal":
        return IdealCache(models.config.num_hidden_layers)
    return DynamicCache(config=models.config)


def bucket_of(capacity: int) -> int:
    """Return a bucket in tokens for a cache: 256, or less where that is much of it."""
    return min(256, max(1, capacity // 4))


def filled(models: Models, way: Way, length: int, capacity: Mapping[str, int], *, batch: int = 1) -> Any:
    """Return a cache that holds `length` random tokens a row, the same ones each time; an ideal one holds none."""
    n_slots = capacity["exact" if way.rule == "exact" else "largest"]
    bucket = bucket_of(n_slots) if way.rule == "bucket" else None
    cache = make(way.kind, models, batch, n_slots, bucket)
    if way.kind == "ideal":
        return cache
    generator = torch.Generator(device=models.device).manual_seed(1)
    shape = (batch, models.kv_heads, length, models.head_dim)
    with torch.no_grad():
        for layer in range(models.config.num_hidden_layers):
            keys, values = (
                torch.randn(shape, generator=generator, device=models.device).to(models.dtype)
                for _ in range(2)
            )
            cache.update(keys, values, layer)
    return cache


def new_tokens(cache: Any, stop: int, n_tokens: int) -> list[torch.Tensor]:
    """Return keys and values of the last `n_tokens` before `stop`, of the first and last layer that hold all tokens."""
    whole = [layer for layer in cache.layers if not getattr(layer, "is_sliding", False)]
    return [
        tensor[:, :, stop - n_tokens : stop]
        for layer in dict.fromkeys([*whole[:1], *whole[-1:]])
        for tensor in (layer.keys, layer.values)
    ]
