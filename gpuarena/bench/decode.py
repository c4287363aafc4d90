"""One decoding step of a model at a given context length, with each cache that transformers users have.

The model has the geometry of Qwen2.5-1.5B, fewer layers, a small vocabulary (so that the output projection
does not hide the cache) and random weights. The caches are filled with random keys and values, the same in
each, and the logits of the first step are compared before anything is timed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gpuarena.bench.harness import Timing, environment, interleave, ratio
from gpuarena.errors import ArenaError, ArgumentError

__all__ = ["LENGTHS", "VARIANTS", "DisagreementError", "run"]

LENGTHS = (512, 4096, 16384)

#: Variant -> (cache, attention, capacity rule).
VARIANTS: dict[str, tuple[str, str, str]] = {
    "ArenaCache + gpuarena": ("arena", "gpuarena", "exact"),
    "ArenaCache + sdpa": ("arena", "sdpa", "exact"),
    "DynamicCache + sdpa": ("dynamic", "sdpa", "exact"),
    "DynamicCache + gpuarena": ("dynamic", "gpuarena", "exact"),
    "StaticCache (exact) + sdpa": ("static", "sdpa", "exact"),
    "StaticCache (largest) + sdpa": ("static", "sdpa", "largest"),
}
REFERENCE = "DynamicCache + sdpa"
OURS = "ArenaCache + gpuarena"

#: Largest difference of logits, in units of their standard deviation: rounding alone, in either dtype.
_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.15, "float16": 0.05}

_GEOMETRY = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 32768,
}
_TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 32768,
}


class DisagreementError(ArenaError, RuntimeError):
    """Two caches gave different logits, so their times mean nothing."""


@dataclass(frozen=True)
class _Setup:
    models: dict[str, Any]  # attention -> model, of the same weights
    layers: int
    device: torch.device
    dtype: torch.dtype
    heads: int
    head_dim: int


def run(
    *,
    device: str | None = None,
    dtype: str = "bfloat16",
    lengths: Sequence[int] = LENGTHS,
    layers: int = 4,
    rounds: int = 9,
    tiny: bool = False,
    on_length: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Time a step at each length and return the figures; `on_length` sees each as it is ready.

    Parameters
    ----------
    device, dtype : str
        The GPU if there is one, otherwise the CPU.
    lengths : sequence of int
        Tokens held before the step.
    layers : int
        Of the model.
    rounds : int
        Timed steps of every variant.
    tiny : bool
        A very small model, to try the script out.

    Raises
    ------
    DisagreementError
        The logits of two variants differ by more than rounding.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if dtype not in _TOLERANCE:
        raise ArgumentError(f"dtype must be one of {', '.join(_TOLERANCE)}, not {dtype!r}")
    if rounds < 1 or layers < 1 or not lengths or min(lengths) < 1:
        raise ArgumentError("rounds, layers and lengths must be positive")
    setup = _build(where, getattr(torch, dtype), layers, _TINY if tiny else _GEOMETRY)
    results = []
    for length in lengths:
        result = _measure(setup, length, max(lengths), rounds, dtype)
        results.append(result)
        on_length(result)
    return {
        "benchmark": "decode",
        "geometry": {**(_TINY if tiny else _GEOMETRY), "num_hidden_layers": layers, "dtype": dtype},
        "environment": environment(str(where)),
        "results": results,
    }


def _build(device: torch.device, dtype: torch.dtype, layers: int, geometry: dict[str, int]) -> _Setup:
    import gpuarena_transformers  # registers the attention  # noqa: F401
    from transformers import AutoModelForCausalLM, Qwen2Config

    models: dict[str, Any] = {}
    for attention in ("sdpa", "gpuarena"):
        torch.manual_seed(0)
        # A config each: a model writes the name of its attention into the one it is given.
        config = Qwen2Config(**geometry, num_hidden_layers=layers, tie_word_embeddings=True)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
        if models:  # one set of weights in memory, so that the variants read the same bytes
            model = model.to("meta")
            model.load_state_dict(models["sdpa"].state_dict(), assign=True)
            model.model.rotary_emb = models["sdpa"].model.rotary_emb
        models[attention] = model.to(device).eval()
    heads = geometry["num_key_value_heads"]
    return _Setup(
        models, layers, device, dtype, heads, geometry["hidden_size"] // geometry["num_attention_heads"]
    )


def _measure(setup: _Setup, length: int, largest: int, rounds: int, dtype: str) -> dict[str, Any]:
    from gpuarena_transformers import cache_argument

    warmup = 2
    capacity = {"exact": length + rounds + warmup + 1, "largest": largest + rounds + warmup + 1}
    argument = cache_argument()
    caches = _filled(setup, length, capacity)
    token = torch.tensor([[7]], device=setup.device)

    def step(name: str) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = setup.models[VARIANTS[name][1]](
                input_ids=token, use_cache=True, **{argument: caches[name]}
            ).logits
            return logits

    logits = {name: step(name).float() for name in VARIANTS}
    difference = {
        name: float((value - logits[REFERENCE]).abs().max() / logits[REFERENCE].std())
        for name, value in logits.items()
    }
    worst = max(difference, key=lambda name: difference[name])
    if not difference[worst] < _TOLERANCE[dtype]:
        raise DisagreementError(
            f"at {length} tokens the logits of {worst!r} are {difference[worst]:.3g} standard deviations away from "
            f"those of {REFERENCE!r}; {_TOLERANCE[dtype]} is allowed in {dtype}"
        )
    times = interleave(
        {name: functools.partial(step, name) for name in VARIANTS},
        rounds=rounds,
        warmup=warmup,
        synchronize=torch.cuda.synchronize if setup.device.type == "cuda" else lambda: None,
    )
    return {
        "n_tokens": length,
        "capacity": capacity,
        "logits_difference": difference,
        "variants": {name: {**time.as_dict(), **_against(time, times)} for name, time in times.items()},
    }


def _against(time: Timing, times: dict[str, Timing]) -> dict[str, float]:
    return {"ratio_to_ours": ratio(time, times[OURS])}


def _filled(setup: _Setup, length: int, capacity: dict[str, int]) -> dict[str, Any]:
    """Return a cache a variant, each holding the same random keys and values."""
    from gpuarena_transformers import ArenaCache
    from transformers import DynamicCache, StaticCache

    config = setup.models["sdpa"].config
    caches = {}
    for name, (kind, _, rule) in VARIANTS.items():
        if kind == "arena":
            caches[name] = ArenaCache(config, 1, capacity[rule])
        elif kind == "static":
            caches[name] = StaticCache(config=config, max_cache_len=capacity[rule])
        else:
            caches[name] = DynamicCache(config=config)
    generator = torch.Generator(device=setup.device).manual_seed(1)
    shape = (1, setup.heads, length, setup.head_dim)
    with torch.inference_mode():
        for layer in range(setup.layers):
            keys, values = (
                torch.randn(shape, generator=generator, device=setup.device).to(setup.dtype) for _ in range(2)
            )
            for cache in caches.values():
                cache.update(keys, values, layer)
    return caches
