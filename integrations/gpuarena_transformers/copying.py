"""A copy of a cache, in an arena of its own."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from gpuarena.kv import KVSpec, LayerSpec
from gpuarena_transformers.indexed import ArenaIndexedLayer
from gpuarena_transformers.layer_types import is_foreign
from gpuarena_transformers.layers import ArenaLayer
from gpuarena_transformers.offload import OffloadedLayer
from gpuarena_transformers.states import ArenaStateLayer

if TYPE_CHECKING:
    from gpuarena_transformers.cache import ArenaCache

__all__ = ["copy_contents"]


def copy_contents(cache: ArenaCache, other: ArenaCache, memo: dict[int, Any]) -> None:
    """Put what `cache` holds into `other`, an empty one of the same layers, in arenas of the same size."""
    by_device: dict[torch.device, list[LayerSpec]] = {}
    offloaded: dict[torch.device, list[LayerSpec]] = {}
    for held in cache.group.layers:
        if isinstance(held, OffloadedLayer):
            offloaded.setdefault(held.staging.device, []).append(held.spec)
            continue
        by_device.setdefault(torch.device(held.arena.device), []).append(held.spec)
    states: dict[torch.device, list[int]] = {}
    for layer in cache.states.layers:
        for region in layer.regions.values():
            device = torch.device(region.arena.device)
            states.setdefault(device, []).append(region.nbytes // cache.max_batch_size)
    other.memory.reserve({device: KVSpec(specs) for device, specs in by_device.items()}, states, offloaded)
    with torch.no_grad():
        for index, layer in enumerate(cache.layers):
            if is_foreign(layer):
                other.layers[index] = copy.deepcopy(layer, memo)
                continue
            if isinstance(layer, ArenaLayer) and layer.is_initialized:
                held = layer._kv
                if isinstance(held, OffloadedLayer):
                    device = held.staging.device
                    other.update(held.keys.to(device), held.values.to(device), index)
                else:
                    other.update(layer.keys, layer.values, index)
            if isinstance(layer, ArenaIndexedLayer) and layer.is_indexer_initialized:
                other.update_indexer(layer.indexer_keys, index)
                other.layers[index].indexer_position_ids = copy.copy(layer.indexer_position_ids)
            if isinstance(layer, ArenaStateLayer):
                other.layers[index].record_past = layer.record_past
                other.layers[index].load(dict(layer.held()), layer.has_previous_state)
    other.states.is_torn = cache.states.is_torn
    other.transcript = copy.copy(cache.transcript)  # whose tensors are replaced and never written
