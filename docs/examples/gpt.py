"""A GPT written from scratch, whose keys and values lie in an arena.

Run it: ``python docs/examples/gpt.py``. The weights are random, so the text means nothing, but with the cache the model
says exactly what it says without.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpuarena import Arena
from gpuarena.kv import KVCache, KVSpec, attend

#: (layer, q, keys, values) -> what the queries see: where the model meets the cache, and all that a cache has to be.
Memory = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Config:
    """The shape of a model: `heads` query heads share `kv_heads` key/value heads."""

    layers: int = 4
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 16
    hidden: int = 96
    vocab: int = 256

    def kv_spec(self) -> KVSpec:
        """What a cache has to hold."""
        return KVSpec.uniform(
            layers=self.layers, kv_heads=self.kv_heads, head_dim=self.head_dim, dtype="float32"
        )


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Turn pairs of channels by an angle that grows with the position (RoPE)."""
    half = x.shape[-1] // 2  # x: [batch, heads, n, head_dim]
    frequencies = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = positions[:, None] * frequencies  # [n, half]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


class Block(nn.Module):
    """Attention and a feed-forward network, each added to what came in."""

    def __init__(self, layer: int, config: Config) -> None:
        super().__init__()
        self.layer, self.config = layer, config
        c = config
        self.norms = nn.ModuleList(nn.RMSNorm(c.hidden) for _ in range(2))
        self.qkv = nn.Linear(c.hidden, (c.heads + 2 * c.kv_heads) * c.head_dim, bias=False)
        self.out = nn.Linear(c.heads * c.head_dim, c.hidden, bias=False)
        self.up = nn.Linear(c.hidden, 4 * c.hidden, bias=False)
        self.down = nn.Linear(4 * c.hidden, c.hidden, bias=False)

    def forward(self, x: Tensor, positions: Tensor, memory: Memory) -> Tensor:
        """``[batch, n, hidden]`` to the same."""
        c = self.config
        batch, n, _ = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, n, -1, c.head_dim).transpose(1, 2)
        q, keys, values = qkv.split([c.heads, c.kv_heads, c.kv_heads], dim=1)  # [batch, heads, n, head_dim]
        seen = memory(self.layer, rotate(q, positions), rotate(keys, positions), values)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, n, -1))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    """Tokens in, logits out."""

    def __init__(self, config: Config, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.hidden)
        self.blocks = nn.ModuleList(Block(layer, config) for layer in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)

    def forward(self, tokens: Tensor, start: int, memory: Memory) -> Tensor:
        """``[batch, n]`` tokens at positions from `start` on to logits, ``[batch, n, vocab]``."""
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, positions, memory)
        return self.head(self.norm(x))


def without_cache(model: GPT, tokens: Tensor) -> Tensor:
    """Return the logits of all positions, each computed anew."""
    return model(tokens, 0, lambda layer, q, keys, values: attend(q, keys, values))


def with_cache(model: GPT, cache: KVCache, tokens: Tensor) -> Tensor:
    """Return the logits of `tokens`, which come behind those that the cache holds."""

    def memory(layer: int, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return attend(q, *cache.append(layer, keys, values))

    with cache.step():  # all layers get the tokens, or none keeps them
        return model(tokens, cache.length, memory)


@torch.inference_mode()
def generate(model: GPT, cache: KVCache, prompt: Tensor, n_tokens: int) -> Tensor:
    """Return ``[batch, n_tokens]``, the likeliest continuation of ``[batch, n]`` prompts."""
    answer = []
    logits = with_cache(model, cache, prompt)
    for _ in range(n_tokens):
        answer.append(logits[:, -1:].argmax(-1))
        logits = with_cache(model, cache, answer[-1])
    return torch.cat(answer, dim=1)


def main() -> None:
    """Answer twice from one prompt that is read once."""
    model = GPT(Config()).eval()
    spec = model.config.kv_spec()
    arena = Arena(spec.arena_nbytes(batch=1, tokens=256), backend="torch")  # no memory is taken after this
    cache = KVCache(arena, spec, batch=1, max_tokens=256)
    prompt = torch.arange(40)[None]
    with torch.inference_mode():
        with_cache(model, cache, prompt[:, :-1])
    for _ in range(2):
        with cache.scope():  # back to the prompt at the end: constant in tokens, nothing is copied
            print(generate(model, cache, prompt[:, -1:], 12).tolist())
    print(f"{cache.length} tokens held, {arena.stats.used} of {arena.capacity} bytes used")


if __name__ == "__main__":
    main()
