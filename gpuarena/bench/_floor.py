"""What no decoding step can be faster than: the time to read the weights and the live keys and values once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpuarena.bench._models import Models

__all__ = ["Floor", "floor", "kv_nbytes", "weights_nbytes"]


@dataclass(frozen=True)
class Floor:
    """Bytes that a step has to read, and how fast they can be.

    Not counted: activations, what the step writes, and rotary tables, which are small beside the rest. A device may
    read a little faster than it copies, so a step can come out below the floor by as much.
    """

    weights_nbytes: int
    kv_nbytes: int
    bandwidth: float
    """Bytes in a second, of a copy: both those read and those written."""

    @property
    def seconds(self) -> float:
        """The least that a step takes."""
        return (self.weights_nbytes + self.kv_nbytes) / self.bandwidth


def floor(models: Models, batch: int, n_tokens: float, bandwidth: float | None) -> Floor | None:
    """Return the floor of a step of `batch` rows that attends to `n_tokens` each; None where it is not known.

    It is not known without a bandwidth, and for a mixture of experts, of which a step reads a part.
    """
    weights = weights_nbytes(models.by_attention["sdpa"], batch)
    if bandwidth is None or weights is None:
        return None
    return Floor(weights, kv_nbytes(models, batch, n_tokens), bandwidth)


def weights_nbytes(model: Any, batch: int = 1) -> int | None:
    """Return the bytes of parameters that a step of one token a row reads; None for a mixture of experts.

    All are read once. The table of embeddings is an exception: a step reads a row of it for each token. Where the
    output projection is tied to it, the projection reads all of it, and it counts in full, once.
    """
    if any("experts" in name for name, _ in model.named_modules()):
        return None
    table = model.get_input_embeddings().weight
    output = model.get_output_embeddings()
    is_tied = output is not None and output.weight is table
    nbytes = 0
    for parameter in model.parameters():  # a shared one comes once
        if parameter is table and not is_tied:
            nbytes += min(batch, table.shape[0]) * table.shape[1] * table.element_size()
        else:
            nbytes += parameter.numel() * parameter.element_size()
    return nbytes


def kv_nbytes(models: Models, batch: int, n_tokens: float) -> int:
    """Return the bytes of keys and values that a step attends to; layers with a window read no more than that."""
    config = models.config
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    window = getattr(config, "sliding_window", None)
    a_token = 2 * batch * models.kv_heads * models.head_dim * models.dtype.itemsize
    held = (min(n_tokens, window) if window and kind == "sliding_attention" else n_tokens for kind in kinds)
    return round(sum(held) * a_token)
