"""What the groups of the KV-cache benchmark share: the geometry, the variants, their comparison and their timing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from gpuarena.arena import Arena
from gpuarena.bench.harness import Timing, ratio
from gpuarena.errors import ArenaError
from gpuarena.kv import KVCache, KVSpec

__all__ = ["Setup", "Variant", "WrongDataError", "check", "group", "measure", "transformers_or_none"]

Group = dict[str, Any]


class WrongDataError(ArenaError, RuntimeError):
    """A variant gave other keys, values or outputs than it should, so its time means nothing."""


@dataclass(frozen=True)
class Setup:
    """The geometry of Qwen2.5-1.5B, and where and how long to measure."""

    device: str
    dtype: str
    layers: int
    rounds: int
    quick: bool = False
    kv_heads: int = 2
    q_heads: int = 12
    head_dim: int = 128

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of keys and values."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found

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
        arena = Arena(nbytes, backend="torch", device=self.device)
        return KVCache(arena, spec, batch=batch, max_tokens=max_tokens)

    def pairs(self, n_tokens: int, *, seed: int, rows: int = 1, layers: int | None = None) -> list[Any]:
        """Return random keys and values for each layer, ``[2, rows, kv_heads, n_tokens, head_dim]``."""
        generator = torch.Generator(self.device).manual_seed(seed)
        shape = (2, rows, self.kv_heads, n_tokens, self.head_dim)
        return [
            torch.randn(shape, generator=generator, device=self.device).to(self.torch_dtype)
            for _ in range(layers or self.layers)
        ]

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device != "cpu":
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True)
class Variant:
    """One way to do what a group measures."""

    body: Callable[[], Any]
    """What is timed."""
    n: int = 1
    """Its time is divided by this: how many tokens or calls it is made of."""
    ready: Callable[[], object] = lambda: None
    """Called before each sample, and not timed: all that goes back to where `body` begins."""
    wanted: Callable[[], Any] | None = None
    """Returns the tensors that `body` has to give; None where there is nothing to compare."""
    given: Callable[[Any], Any] = lambda value: value
    """Takes the tensors to compare from what `body` returned."""
    tolerance: float = 0.0
    """Largest difference, as a part of the largest number wanted; 0 wants equal bits."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """What else is known of it, for the table."""


def check(name: str, variant: Variant) -> None:
    """Run a variant once and compare what it gives.

    Raises
    ------
    WrongDataError
    """
    variant.ready()
    value = variant.body()
    if variant.wanted is None:
        return
    given, wanted = tree_leaves(variant.given(value)), tree_leaves(variant.wanted())
    if len(given) != len(wanted):
        raise WrongDataError(f"{name!r} gave {len(given)} tensors, {len(wanted)} are wanted")
    for number, (one, other) in enumerate(zip(given, wanted, strict=True)):
        if one.shape != other.shape:
            raise WrongDataError(
                f"{name!r} gave {list(one.shape)} as tensor {number}, {list(other.shape)} is wanted"
            )
        if variant.tolerance == 0:
            is_right = torch.equal(one, other)
        else:
            difference = (one.float() - other.float()).abs().max()
            is_right = bool(difference <= variant.tolerance * other.float().abs().max())
        if not is_right:
            raise WrongDataError(f"{name!r} gave wrong numbers in tensor {number}; it is not timed")


def measure(variants: Mapping[str, Variant], setup: Setup, *, warmup: int = 1) -> dict[str, Timing]:
    """Time every variant once a round as `interleave` does; seconds of one of its `n`."""
    names = list(variants)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for number in range(warmup + setup.rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            variant = variants[name]
            variant.ready()
            setup.synchronize()
            start = perf_counter()
            variant.body()  # what it returns dies here, so freeing it is timed as well
            setup.synchronize()
            if number >= warmup:
                samples[name].append((perf_counter() - start) / variant.n)
    return {name: Timing(tuple(values)) for name, values in samples.items()}


def group(
    title: str, variants: Mapping[str, Variant], reference: str, setup: Setup, *, warmup: int = 1
) -> Group:
    """Check all variants, time them, and return the figures for JSON and the table."""
    for name, variant in variants.items():
        check(name, variant)
    timings = measure(variants, setup, warmup=warmup)
    rows = {}
    for name, timing in timings.items():
        rows[name] = {
            "median_s": timing.median,
            "quartiles_s": list(timing.spread),
            "ratio": ratio(timing, timings[reference]),
            **variants[name].figures,
        }
    return {"title": title, "reference": reference, "rows": rows}


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
