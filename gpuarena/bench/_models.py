"""The models that are measured: one set of weights, and a model around it for each attention."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from gpuarena.bench.device import Device
from gpuarena.errors import ArgumentError

__all__ = ["ATTENTIONS", "GEOMETRY", "MODELS", "TINY", "TRUE_VOCAB_SIZE", "Models", "load", "random_models"]

ATTENTIONS = ("sdpa", "gpuarena")

#: Of Qwen2.5-1.5B, with a small vocabulary, so that the output projection does not hide the cache.
GEOMETRY = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 131072,
}
#: What its vocabulary would be; results say so.
TRUE_VOCAB_SIZE = 151936
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 32768,
}

#: Names that `load` takes, besides folders and .gguf files.
MODELS = ("qwen2.5-1.5b", "smollm2")


@dataclass(frozen=True)
class Models:
    """One set of weights; a model a name of an attention."""

    name: str
    by_attention: dict[str, Any]
    where: Device
    dtype: torch.dtype
    true_vocab_size: int | None = None
    """Of the model whose geometry this is, where the vocabulary is smaller than that."""

    @property
    def device(self) -> torch.device:
        """For tensors."""
        return self.where.torch_device

    @property
    def config(self) -> Any:
        """Of the decoder."""
        return self.by_attention["sdpa"].config.get_text_config(decoder=True)

    @property
    def kv_heads(self) -> int:
        """Key/value heads of a layer."""
        return int(self.config.num_key_value_heads)

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        found = getattr(self.config, "head_dim", None)
        return int(found or self.config.hidden_size // self.config.num_attention_heads)

    @property
    def geometry(self) -> dict[str, Any]:
        """What a reader of the figures has to know of the model."""
        names = (
            "num_hidden_layers",
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "vocab_size",
        )
        found = {name: getattr(self.config, name, None) for name in names}
        if self.true_vocab_size is not None:
            found["true_vocab_size"] = self.true_vocab_size
        return {"model": self.name, **found, "dtype": str(self.dtype).removeprefix("torch.")}


def random_models(where: Device, dtype: torch.dtype, layers: int, geometry: dict[str, int]) -> Models:
    """Return models of a geometry with random weights, always the same ones."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    torch.manual_seed(0)
    config = Qwen2Config(**geometry, num_hidden_layers=layers, tie_word_embeddings=True)
    with where.torch_device:  # a CPU takes long for the random numbers of a model of this size
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
    is_true = geometry is GEOMETRY
    name = f"geometry of Qwen2.5-1.5B, {layers} layers" if is_true else "tiny Qwen2"
    models = _twins(name, model.to(where.torch_device).eval(), where, dtype)
    return dataclasses.replace(models, true_vocab_size=TRUE_VOCAB_SIZE if is_true else None)


def load(name: str, where: Device, dtype: torch.dtype, *, layers: int = 4) -> Models:
    """Return the models of a name of `MODELS`, of a folder or of a ``.gguf`` file.

    Raises
    ------
    ArgumentError
        The model's heads do not all have one width, such as MLA's.
    """
    if name == "qwen2.5-1.5b":
        return random_models(where, dtype, layers, GEOMETRY)
    from gpuarena.demo.weights import load_model

    loaded = load_model(None if name == "smollm2" else name, device=where.torch_device, dtype=dtype)
    config = loaded.model.config.get_text_config(decoder=True)
    if not hasattr(config, "num_key_value_heads") or hasattr(config, "kv_lora_rank"):
        raise ArgumentError(f"{name}: only models with key/value heads of one width can be measured")
    loaded.model.set_attn_implementation("sdpa")
    return _twins(loaded.name, loaded.model, where, dtype)


def _twins(name: str, model: Any, where: Device, dtype: torch.dtype) -> Models:
    """Return a second model around the weights of `model`, which then reads the same bytes."""
    import gpuarena_transformers  # registers the attention  # noqa: F401

    # A config each: a model writes the name of its attention into the one it is given.
    with torch.device("meta"):
        twin = type(model)._from_config(copy.deepcopy(model.config), attn_implementation="gpuarena")
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for module_name, module in twin.named_modules():
        prefix = f"{module_name}." if module_name else ""
        for kind, found in ((module._parameters, parameters), (module._buffers, buffers)):
            for own in [own for own, tensor in kind.items() if tensor is not None]:
                kind[own] = found[prefix + own]
    return Models(name, {"sdpa": model, "gpuarena": twin.eval()}, where, dtype)
