"""What each layer of a model caches: keys and values, a state of fixed size, both, or nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import get_layer_types_and_kwargs

from gpuarena.kv import LayerSpec
from gpuarena_transformers.sizing import cache_of_one_token, decoder_config, input_device

__all__ = ["LayerLayout", "ModelLayout", "measure_layout"]


@dataclass(frozen=True)
class LayerLayout:
    """What one layer caches, per sequence."""

    index: int
    """Its number in the cache."""
    kind: str
    """``"full"``, ``"window"``, ``"chunked"``, ``"indexed"`` (keys and values, and the keys of an indexer),
    ``"recurrent"`` (a state of fixed size), ``"hybrid"`` (keys, values and such a state), ``"shared"`` (reads
    another layer's), ``"empty"`` (no attention), ``"cross"`` (holds nothing of text) or ``"unknown"`` (the model
    keeps it in a way of its own)."""
    spec: LayerSpec | None
    """Keys and values of a token; None if it holds none."""
    device: torch.device
    indexer: LayerSpec | None = None
    """The keys of an indexer, one head without values."""
    states: tuple[int, ...] = ()
    """Bytes of each state of a sequence, however long it is."""

    @property
    def per_token(self) -> tuple[LayerSpec, ...]:
        """What it holds a token."""
        return tuple(spec for spec in (self.spec, self.indexer) if spec is not None)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one more token takes."""
        return sum(spec.bytes_per_token for spec in self.per_token)

    @property
    def state_nbytes(self) -> int:
        """Bytes a sequence that do not grow with it."""
        return sum(self.states)

    @property
    def is_empty(self) -> bool:
        """Whether it caches nothing."""
        return not self.per_token and not self.states


@dataclass(frozen=True)
class ModelLayout:
    """What all layers of a model cache, and how that was found out.

    >>> spec = LayerSpec(2, 64, 64, "bfloat16")
    >>> layers = [LayerLayout(index, "full", spec, torch.device("cpu")) for index in range(24)]
    >>> ModelLayout("Qwen2.5-0.5B", tuple(layers), "written down").nbytes(batch=1, tokens=32768)
    402653184
    """

    name: str
    layers: tuple[LayerLayout, ...]
    source: str
    """How it was found out, for people."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one more token of one sequence, over all layers."""
        return sum(layer.bytes_per_token for layer in self.layers)

    @property
    def state_nbytes(self) -> int:
        """Bytes a sequence that do not grow with it."""
        return sum(layer.state_nbytes for layer in self.layers)

    def nbytes(self, batch: int, tokens: int) -> int:
        """Return the bytes of `batch` sequences of `tokens` tokens, without scratch or alignment."""
        return batch * (self.bytes_per_token * tokens + self.state_nbytes)

    def of_kind(self) -> dict[str, list[LayerLayout]]:
        """Return the layers by kind, in order of appearance."""
        found: dict[str, list[LayerLayout]] = {}
        for layer in self.layers:
            found.setdefault(layer.kind, []).append(layer)
        return found


def measure_layout(model: Any) -> ModelLayout:
    """Return what the layers of a model cache, exactly, by one forward of a single token.

    The model may be on the meta device. Its training mode is as it was afterwards.
    """
    config = decoder_config(model.config)
    cache, device = cache_of_one_token(model), input_device(model)
    kinds = _kinds(config)
    layers = [
        _layer_layout(index, layer, kinds[index] if index < len(kinds) else None, device)
        for index, layer in enumerate(cache.layers)
    ]
    for index in range(len(cache.layers), getattr(config, "num_hidden_layers", 0)):
        # Up to transformers 5.22 the layers that read others' have no entry in a cache.
        if getattr(config, "num_kv_shared_layers", 0):
            layers.append(LayerLayout(index, "shared", None, device))
    return ModelLayout(type(model).__name__, tuple(layers), "a forward of one token")


def _kinds(config: Any) -> list[str]:
    """Return the type of each layer as the config names it, and not what the cache makes of that."""
    kinds = list(get_layer_types_and_kwargs(config)[0])
    own = getattr(config, "layer_types", None) or []
    return [
        given if kind == "dummy" and given in ("moe", "mlp") else kind
        for kind, given in zip(kinds, [*own, *kinds[len(own) :]], strict=False)
    ]


_KINDS = {
    "full_attention": "full",
    "sliding_attention": "window",
    "chunked_attention": "chunked",
    "indexed_attention": "indexed",
    "linear_attention": "recurrent",
    "conv": "recurrent",
    "hybrid": "hybrid",
    "hybrid_sliding": "hybrid",
    "dummy": "shared",
    "moe": "empty",
    "mlp": "empty",
}


def _layer_layout(index: int, layer: Any, layer_type: str | None, device: torch.device) -> LayerLayout:
    kind = _KINDS.get(layer_type or "full_attention", "unknown")
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    spec = None
    if keys is not None and values is not None and keys.ndim == 4:
        device = keys.device
        spec = LayerSpec(
            keys.shape[1],
            keys.shape[3],
            values.shape[3],
            keys.dtype,
            getattr(layer, "sliding_window", None),
            values.dtype,
        )
    elif kind in ("full", "window", "chunked"):
        kind = "cross"
    indexer = getattr(layer, "indexer_keys", None)  # [batch, tokens, dim]
    states = [
        *_tensors(getattr(layer, "conv_states", None)),
        *_tensors(getattr(layer, "recurrent_states", None)),
    ]
    if spec is None and states:
        device = states[0].device
    if kind in ("recurrent", "hybrid") and not states:
        kind = "unknown"  # RecurrentGemma keeps its states in its modules
    return LayerLayout(
        index,
        kind,
        spec,
        device,
        None if indexer is None else LayerSpec(1, indexer.shape[2], 0, indexer.dtype),
        tuple(state.nbytes // state.shape[0] for state in states),
    )


def _tensors(states: Any) -> Iterable[torch.Tensor]:
    """Return the tensors among states: one, a dictionary of them (a layer may have several), or None."""
    found = states.values() if isinstance(states, dict) else [states]
    return [state for state in found if isinstance(state, torch.Tensor)]
