"""One decoding step of a model at a given context length, with each cache that transformers users have.

The model has the geometry of Qwen2.5-1.5B, fewer layers, a small vocabulary (so that the output projection
does not hide the cache) and random weights. The caches are filled with random keys and values, the same in
each, and the logits of the first step are compared before anything is timed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gpuarena.bench import _caches, _models
from gpuarena.bench._caches import OURS, REFERENCE, VARIANTS, IdealCache
from gpuarena.bench._models import Models
from gpuarena.bench.environment import environment
from gpuarena.bench.harness import Group, WrongDataError, interleave, rows
from gpuarena.errors import ArgumentError

__all__ = ["LENGTHS", "OURS", "VARIANTS", "WrongDataError", "measure_step", "run"]

LENGTHS = (512, 4096, 16384)

#: Largest difference of logits, in units of their standard deviation: rounding alone, in either dtype.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.15, "float16": 0.05}

_WARMUP = 2


def run(
    *,
    device: str | None = None,
    dtype: str = "bfloat16",
    lengths: Sequence[int] = LENGTHS,
    layers: int = 4,
    rounds: int = 9,
    quick: bool = False,
    on_group: Callable[[Group], object] = lambda group: None,
) -> dict[str, Any]:
    """Time a step at each length and return the figures; `on_group` sees each as it is ready.

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
    quick : bool
        A very small model, to try the script out.

    Raises
    ------
    WrongDataError
        The logits of two variants differ by more than rounding.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if dtype not in TOLERANCE:
        raise ArgumentError(f"dtype must be one of {', '.join(TOLERANCE)}, not {dtype!r}")
    if rounds < 1 or layers < 1 or not lengths or min(lengths) < 1:
        raise ArgumentError("rounds, layers and lengths must be positive")
    geometry = _models.TINY if quick else _models.GEOMETRY
    models = _models.random_models(where, getattr(torch, dtype), layers, geometry)
    groups = []
    for length in lengths:
        group = measure_step(models, length, largest=max(lengths), rounds=rounds)
        groups.append(group)
        on_group(group)
    return {
        "benchmark": "decode",
        "geometry": {**geometry, "num_hidden_layers": layers, "dtype": dtype},
        "environment": environment(str(where)),
        "rounds": rounds,
        "groups": groups,
    }


def measure_step(models: Models, length: int, *, largest: int, rounds: int, batch: int = 1) -> dict[str, Any]:
    """Time one step of `batch` rows with `length` tokens held, with every cache; return the figures.

    `largest` is the capacity of the static cache that is made for the longest context, in tokens.

    Raises
    ------
    WrongDataError
        The logits of two variants differ by more than rounding.
    """
    from gpuarena_transformers import cache_argument

    room = rounds + _WARMUP + 1
    capacity = {"exact": length + room, "largest": largest + room}
    argument = cache_argument()
    caches = _caches.filled(models, length, capacity, batch=batch)
    token = torch.full((batch, 1), 7, device=models.device)

    def step(name: str) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = models.by_attention[VARIANTS[name][1]](
                input_ids=token, use_cache=True, **{argument: caches[name]}
            ).logits
            return logits

    logits = {}
    for name in VARIANTS:
        if isinstance(caches[name], IdealCache):  # comes last: the others have done the step
            with torch.inference_mode():
                caches[name].take(caches[REFERENCE])
        logits[name] = step(name).float()
    difference = differences(logits, length, str(models.dtype).removeprefix("torch."))
    times = interleave(
        {name: functools.partial(step, name) for name in VARIANTS},
        rounds=rounds,
        warmup=_WARMUP,
        synchronize=models.synchronize,
    )
    return {
        "title": f"one step, {length} tokens held, batch {batch}",
        "kind": "step",
        "n_tokens": length,
        "batch": batch,
        "capacity": capacity,
        "reference": OURS,
        "rows": rows(times, OURS, {name: {"logits_difference": value} for name, value in difference.items()}),
    }


def differences(logits: dict[str, torch.Tensor], length: int, dtype: str) -> dict[str, float]:
    """Return how far the logits are from those of the reference, in standard deviations."""
    difference = {
        name: float((value - logits[REFERENCE]).abs().max() / logits[REFERENCE].std())
        for name, value in logits.items()
    }
    worst = max(difference, key=lambda name: difference[name])
    if not difference[worst] < TOLERANCE[dtype]:
        raise WrongDataError(
            f"at {length} tokens the logits of {worst!r} are {difference[worst]:.3g} standard deviations away from "
            f"those of {REFERENCE!r}; {TOLERANCE[dtype]} is allowed in {dtype}"
        )
    return difference
