"""Which layer of an `ArenaCache` stands for which type of layer of transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    DynamicIndexedLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from gpuarena.errors import ArgumentError
from gpuarena_transformers.indexed import ArenaIndexedLayer
from gpuarena_transformers.layers import ArenaLayer
from gpuarena_transformers.states import ArenaHybridLayer, ArenaStateLayer

if TYPE_CHECKING:
    from gpuarena_transformers.cache import ArenaCache

__all__ = ["has_states", "holds_tokens", "is_foreign", "make_layer"]

#: Layers without any attention: transformers gives them a layer that stays empty, up to 5.22 one for states.
WITHOUT_ATTENTION = ("moe", "mlp")
_WITH_STATES = (
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)


def make_layer(cache: ArenaCache, index: int, layer_type: str, options: dict[str, Any]) -> Any:
    """Return the layer of `cache` for one of transformers' types, or transformers' own where there is none.

    Raises
    ------
    ArgumentError
        This transformers does not know the type.
    """
    if layer_type == "full_attention":
        return ArenaLayer(cache, index)
    if layer_type in ("sliding_attention", "chunked_attention"):
        return ArenaLayer(cache, index, options["sliding_window"])
    kind = DYNAMIC_LAYER_TYPE_MAPPING.get(layer_type)
    if kind is None:
        raise ArgumentError(
            f"layer {index} is of type {layer_type!r}, which this transformers does not cache"
        )
    if layer_type not in WITHOUT_ATTENTION:
        # By class, since transformers renames types.
        n_states = options.get("number_of_states", 1)
        if kind is LinearAttentionLayer:
            return ArenaStateLayer(cache, index, n_states)
        if kind is LinearAttentionAndFullAttentionLayer:
            return ArenaHybridLayer(cache, index, n_states)
        if kind is LinearAttentionAndSlidingWindowAttentionLayer:
            return ArenaHybridLayer(cache, index, n_states, options["sliding_window"])
        if kind is DynamicIndexedLayer:
            return ArenaIndexedLayer(cache, index)
    return kind(**options)


def has_states(layer_types: list[str]) -> bool:
    """Return whether layers of such types hold states."""
    return any(
        DYNAMIC_LAYER_TYPE_MAPPING.get(layer_type) in _WITH_STATES
        for layer_type in layer_types
        if layer_type not in WITHOUT_ATTENTION
    )


def holds_tokens(layer_types: list[str]) -> bool:
    """Return whether any layer of such types holds something for each token."""
    return any(
        layer_type not in WITHOUT_ATTENTION
        and DYNAMIC_LAYER_TYPE_MAPPING.get(layer_type) is not LinearAttentionLayer
        for layer_type in layer_types
    )


def is_foreign(layer: Any) -> bool:
    """Return whether a layer keeps something outside the arena; those that read another layer's keep nothing."""
    if isinstance(layer, (ArenaLayer, ArenaStateLayer)) or type(layer).__name__ == "DummyLayer":
        return False
    # The empty one for layers without attention, up to transformers 5.22.
    return not (type(layer) is LinearAttentionLayer and not any(layer.is_conv_states_initialized.values()))
