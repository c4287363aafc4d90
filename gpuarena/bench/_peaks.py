"""What a few decoding steps hold of memory with each cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from gpuarena_transformers import cache_argument

from gpuarena.bench import _caches
from gpuarena.bench._caches import Way
from gpuarena.bench._labels import reason
from gpuarena.bench._models import Models
from gpuarena.bench.memory import meter_updates

__all__ = ["step_memory"]

#: Steps in which bytes are counted: enough for a static cache's first, which allocates, to be over.
_STEPS = 3


def step_memory(
    models: Models,
    length: int,
    capacity: Mapping[str, int],
    batch: int,
    ways: Mapping[str, Way],
    failed: dict[str, str],
) -> dict[str, dict[str, float]]:
    """Return what each cache allocates in a step, in bytes, and the most that is held at once.

    ``allocated_nbytes`` is what the cache allocates in a step. ``peak_nbytes`` is, where the device counts its memory,
    the most that was live in these steps above what was live before the cache was made, activations included;
    elsewhere the most that the cache held. Why a variant has no figures is put into `failed`.
    """
    found: dict[str, dict[str, float]] = {}
    for name, way in ways.items():
        try:
            found[name] = _of_one(models, way, length, capacity, batch)
        except Exception as error:  # no memory: the others are worth having
            failed[f"memory of {name}"] = reason(error)
    models.where.forget_peak()
    return found


def _of_one(
    models: Models, way: Way, length: int, capacity: Mapping[str, int], batch: int
) -> dict[str, float]:
    where, argument = models.where, cache_argument()
    where.forget_peak()
    before = where.memory()
    cache = _caches.filled(models, way, length, capacity, batch=batch)
    tokens = torch.arange(2 * _STEPS, device=models.device).view(-1, 1, 1).expand(-1, batch, 1)

    def steps(tokens: Any) -> None:
        for token in tokens:
            models.by_attention[way.attention](input_ids=token, use_cache=True, **{argument: cache})

    with torch.no_grad():
        with meter_updates(cache) as meter:
            steps(tokens[:_STEPS])
        found: dict[str, float] = {
            "allocated_nbytes": meter.allocated_nbytes // _STEPS,
            "peak_nbytes": meter.peak_nbytes,
        }
        if before is not None:
            where.forget_peak()  # what filling took
            steps(tokens[_STEPS:])
            after = where.memory()
            assert after is not None, "it was counted before"
            found["peak_nbytes"] = after.peak_nbytes - before.allocated_nbytes
            found["reserved_nbytes"] = after.reserved_nbytes
    return found
