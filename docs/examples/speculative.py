"""Speculative decoding: a small model drafts some tokens, the large one checks them all in one step.

What the large model would have said is kept, the rest is rolled back in both caches. The answer is that of the large
model alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from gpt import GPT, Config, with_cache

from gpuarena import Arena
from gpuarena.kv import KVCache


@dataclass
class Reader:
    """A model and its cache, which catches up with the tokens it has not seen."""

    model: GPT
    cache: KVCache

    def read(self, tokens: list[int]) -> list[int]:
        """Read what is new of `tokens`; return the likeliest token behind each of those."""
        new = torch.tensor([tokens[self.cache.length :]])
        guesses: list[int] = with_cache(self.model, self.cache, new)[0].argmax(-1).tolist()
        return guesses


@torch.inference_mode()
def generate(
    target: Reader, draft: Reader, prompt: list[int], n_tokens: int, *, n_draft: int = 4
) -> tuple[list[int], int]:
    """Return the `n_tokens` that `target` says behind the prompt, and how many steps of it that took."""
    tokens, n_steps = list(prompt), 0
    while len(tokens) < len(prompt) + n_tokens:
        known = len(tokens)
        drafted = list(tokens)
        for _ in range(n_draft):
            drafted.append(draft.read(drafted)[-1])
        checked = target.read(drafted)[
            -n_draft - 1 :
        ]  # what it says behind the last known token and each draft
        n_steps += 1
        n_right = 0
        while n_right < n_draft and checked[n_right] == drafted[known + n_right]:
            n_right += 1
        tokens = [*drafted[: known + n_right], checked[n_right]]
        for reader in (
            target,
            draft,
        ):  # the last token is new to both; what lies behind the right ones was wrong
            reader.cache.truncate(min(reader.cache.length, known + n_right))
    return tokens[len(prompt) : len(prompt) + n_tokens], n_steps


def reader(config: Config, seed: int, max_tokens: int = 128) -> Reader:
    """Return a model with random weights and an empty cache."""
    spec = config.kv_spec()
    arena = Arena(spec.arena_nbytes(1, max_tokens), backend="torch")
    return Reader(GPT(config, seed).eval(), KVCache(arena, spec, batch=1, max_tokens=max_tokens))


def main() -> None:
    """Let a model with the first layers of the large one draft for it."""
    target, draft = reader(Config(), seed=0), reader(Config(layers=2), seed=0)
    draft.model.load_state_dict(target.model.state_dict(), strict=False)
    answer, n_steps = generate(target, draft, list(range(30)), 24)
    print(f"{answer}\n{len(answer)} tokens in {n_steps} steps of the large model")


if __name__ == "__main__":
    main()
