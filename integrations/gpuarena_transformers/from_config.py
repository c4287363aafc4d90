"""What a model's cache holds, from its config alone: a model without memory runs on torch's meta device."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

from gpuarena.errors import ArgumentError
from gpuarena_transformers.layout import ModelLayout, measure_layout

__all__ = ["ConfigSize", "size_of_config"]


#: Layers that are built at most: a damaged config would keep a machine busy for hours.
_MOST_LAYERS = 1024


@dataclass(frozen=True)
class ConfigSize:
    """What is known of a model before its weights are there."""

    layout: ModelLayout
    n_parameters: int
    """Weights that are stored, those that are tied counted once."""
    weights_nbytes: int
    """In the dtype that was asked for."""


def size_of_config(config: Any, dtype: Any, *, name: str | None = None) -> ConfigSize:
    """Return what the model of a config would cache and weigh, exactly, without its weights.

    >>> from transformers import Qwen2Config
    >>> config = Qwen2Config(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=3,
    ...                      num_attention_heads=4, num_key_value_heads=2)
    >>> size_of_config(config, torch.bfloat16).layout.bytes_per_token  # 3 layers x 2 x 2 heads x 16 x 2 bytes
    384

    The model is built on the meta device, where tensors have shapes and no bytes, and reads one token there. Nothing is
    taken from the names of a config's entries, which mean different things in different models.

    Parameters
    ----------
    config : PreTrainedConfig
        Of a language model, or of one that contains a language model.
    dtype : torch.dtype
    name : str, optional
        What to call it; by default the class of the model.

    Raises
    ------
    ArgumentError
        An encoder-decoder; no language model; one that does not run on the meta device; or one with layers whose size
        a single token does not tell.
    """
    kind = type(config).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise ArgumentError(
            f"{kind} is an encoder-decoder, whose cache also holds the source; ArenaEncoderDecoderCache.for_model "
            f"measures it"
        )
    n_layers = getattr(config.get_text_config(decoder=True), "num_hidden_layers", 0)
    if isinstance(n_layers, int) and n_layers > _MOST_LAYERS:
        raise ArgumentError(
            f"{kind}: num_hidden_layers is {n_layers}, more than {_MOST_LAYERS}, which no model has"
        )
    model = _build(config, dtype, kind)
    try:
        with _NoData():  # type: ignore[no-untyped-call]
            layout = measure_layout(model)
    except Exception as error:  # whatever the code of a model raises
        first_line = str(error).partition("\n")[0]
        raise ArgumentError(
            f"{kind}: the model does not run without its data ({type(error).__name__}: {first_line}); with its weights, "
            f"ArenaCache.for_model(model) measures it"
        ) from error
    for layer in layout.layers:
        if layer.kind in ("unknown", "cross"):
            raise ArgumentError(
                f"{kind}: layer {layer.index} "
                + (
                    "keeps what it caches in a way of its own, whose size one token does not tell"
                    if layer.kind == "unknown"
                    else "holds nothing of text alone, so that its size is unknown without an input of the other kind"
                )
            )
    weights = list(model.parameters())
    layout = replace(layout, name=name or layout.name, source="a dry run on the meta device")
    return ConfigSize(layout, sum(one.numel() for one in weights), sum(one.nbytes for one in weights))


def _build(config: Any, dtype: Any, kind: str) -> Any:
    config = copy.deepcopy(config)  # a model that is built writes its dtype into its config
    candidates = [config]
    text = config.get_text_config(decoder=True)
    if text is not config:
        candidates.insert(
            0, text
        )  # of a model that sees or hears; its weights are those of the language part
    reason: Exception | None = None
    for one in candidates:
        if (
            type(one) not in MODEL_FOR_CAUSAL_LM_MAPPING
        ):  # which transformers says after importing all its models
            continue
        try:
            with torch.device("meta"):
                # "eager", since other ways to run it may not be installed, or be fetched from a hub.
                model = AutoModelForCausalLM.from_config(one, dtype=dtype, attn_implementation="eager").eval()
        except Exception as error:  # whatever the constructor of a model raises
            reason = reason or error
        else:
            with contextlib.suppress(
                Exception
            ):  # a model without experts, or whose code has one way to run them
                model.set_experts_implementation(
                    "eager"
                )  # grouped matrix products are bfloat16 only on "meta"
            return model
    first_line = "it is of another sort" if reason is None else str(reason).partition("\n")[0]
    raise ArgumentError(f"{kind}: no language model can be built of it: {first_line}") from reason


class _NoData(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """Answers what depends on data that the meta device does not have; no shape of a cache depends on it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.nonzero.default:  # which tokens an expert gets: none
            return torch.empty((0, args[0].dim()), dtype=torch.long, device=args[0].device)
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return torch.ones((), dtype=args[0].dtype, device="cpu").item()
        return func(*args, **(kwargs or {}))
