"""What a model's cache will hold: measured on the model, or what its config tells."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import DynamicCache

from gpuarena.errors import ArgumentError
from gpuarena.kv import LayerSpec

__all__ = ["cache_argument", "decoder_config", "free_nbytes", "measure_layers", "model_max_length"]


def decoder_config(config: Any) -> Any:
    """Return the part of a model's config that describes its decoder."""
    return config.get_text_config(decoder=True)


def model_max_length(config: Any) -> int | None:
    """Return the longest context that the config declares, in tokens, or None."""
    text = decoder_config(config)
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        length = getattr(text, name, None)
        if isinstance(length, int) and length > 0:
            return length
    return None


def measure_layers(model: Any) -> dict[int, tuple[LayerSpec, torch.device]]:
    """Return the exact shapes, dtypes and devices of the attention layers, by one forward of a single token.

    The key of the result is the layer's number in the cache. Layers that cache nothing a token, such as
    recurrent ones and those that read another layer's cache, are left out.
    """
    cache = DynamicCache(config=model.config)
    in_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
            model(input_ids=token, use_cache=True, **{cache_argument(): cache})
    finally:
        for module in in_training:  # not model.train(), since a part of a model may be in another mode
            module.training = True
    found = {}
    for index, layer in enumerate(cache.layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or keys.ndim != 4:
            continue
        spec = LayerSpec(
            keys.shape[1],
            keys.shape[3],
            values.shape[3],
            keys.dtype,
            getattr(layer, "sliding_window", None),
            values.dtype,
        )
        found[index] = (spec, keys.device)
    if not found:
        raise ArgumentError(
            f"{type(model).__name__} caches no keys and values; there is nothing for an arena to hold"
        )
    return found


def cache_argument() -> str:
    """Return the name of the cache argument of `forward` and `generate`: ``"cache"`` from transformers 5.24 on."""
    import transformers

    major, minor = (int(part) for part in transformers.__version__.split(".")[:2])
    return "cache" if (major, minor) >= (5, 24) else "past_key_values"


def free_nbytes(device: torch.device) -> int:
    """Return the bytes that are free on a device.

    Raises
    ------
    ArgumentError
        This kind of device does not tell.
    """
    if device.type == "cpu":
        try:
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (AttributeError, ValueError, OSError):
            pass  # not a POSIX system
    else:
        module: Any = getattr(torch, device.type, None)
        if hasattr(module, "mem_get_info"):
            return int(module.mem_get_info(device)[0])
    raise ArgumentError(f"free memory on {device} is unknown; give max_context_length as a number of tokens")
