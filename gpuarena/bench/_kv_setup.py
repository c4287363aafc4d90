"""What the groups of the KV-cache benchmark share: the geometry, and where and how long to measure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gpuarena.arena import Arena
from gpuarena.bench import harness
from gpuarena.bench.device import Device, device_of
from gpuarena.bench.harness import Group, Variant
from gpuarena.kv import KVCache, KVSpec

__all__ = ["Setup", "halves", "transformers_or_none"]

#: Fewest inputs that take turns.
_N_ROTATED = 4
#: More than the last caches of servers hold: 64 MiB a core complex, 50 MiB of an H100 or H200. What is stored in
#: 4 bits takes a quarter.
_COLD_NBYTES = 64 << 20
_COLD_NBYTES_GPU = 256 << 20


@dataclass(frozen=True)
class Setup:
    """The geometry of Qwen2.5-1.5B, and where and how long to measure."""

    where: str | Device
    dtype: str
    layers: int
    rounds: int
    quick: bool = False
    kv_heads: int = 2
    q_heads: int = 12
    head_dim: int = 128

    @property
    def device(self) -> Device:
        """Where to run."""
        return device_of(self.where)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of keys and values."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def torch_device(self) -> torch.device:
        """Where tensors are."""
        return self.device.torch_device

    def spec(self, *, layers: int | None = None, **options: Any) -> KVSpec:
        """Return the spec of a cache; `options` are those of `KVSpec.uniform`."""
        return KVSpec.uniform(
            layers=layers or self.layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            **options,
        )

    def cache(self, spec: KVSpec, max_tokens: int, *, batch: int = 1, copies: int = 1) -> KVCache:
        """Return a cache on an arena of its own, which has room for `copies` of it."""
        # Each copy may need the padding of one more region.
        nbytes = copies * (spec.arena_nbytes(batch, max_tokens) + 256)
        arena = Arena(nbytes, backend="torch", device=self.device.name)
        return KVCache(arena, spec, batch=batch, max_tokens=max_tokens)

    def pairs(self, n_tokens: int, *, seed: int, rows: int = 1, layers: int | None = None) -> list[Any]:
        """Return random keys and values for each layer, ``[2, rows, kv_heads, n_tokens, head_dim]``."""
        generator = torch.Generator(self.torch_device).manual_seed(seed)
        shape = (2, rows, self.kv_heads, n_tokens, self.head_dim)
        return [
            torch.randn(shape, generator=generator, device=self.torch_device).to(self.torch_dtype)
            for _ in range(layers or self.layers)
        ]

    def n_to_rotate(self, nbytes: int) -> int:
        """Return how many inputs of `nbytes` are more than caches hold, so that reading them in turn finds none there.

        A model reads the keys and values of a layer once a step, with all other layers and its weights in between.
        """
        if self.quick:
            return _N_ROTATED
        wanted = _COLD_NBYTES_GPU if self.device.is_gpu else _COLD_NBYTES
        return max(_N_ROTATED, -(-wanted // nbytes))

    def group(self, title: str, variants: Mapping[str, Variant], reference: str, *, warmup: int = 1) -> Group:
        """Check all variants, time them here, and return the figures."""
        return harness.group(
            title, variants, reference, rounds=self.rounds, warmup=warmup, synchronize=self.device.synchronize
        )


def halves(pairs: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return keys and values of each layer, views of its pair."""
    return [(pair[0], pair[1]) for pair in pairs]


def transformers_or_none() -> Any:
    """Return `transformers.cache_utils`, or None where transformers is not installed."""
    try:
        import transformers.cache_utils as found
    except ImportError:
        return None
    return found
