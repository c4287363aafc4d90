"""The same model with a paged cache: one prompt, several answers sampled in parallel.

The answers share the pages of the prompt. A page is copied when an answer is about to write into one that it shares.
"""

from __future__ import annotations

from collections.abc import Sequence as Several

import torch
from gpt import GPT, Config
from torch import Tensor

from gpuarena import Arena
from gpuarena.kv import PagedKVCache, Sequence


def read(model: GPT, cache: PagedKVCache, sequences: Several[Sequence], tokens: Tensor) -> Tensor:
    """Return the logits of ``[batch, n]`` tokens, a row behind each of the sequences, which have one length."""
    start = sequences[0].length
    with cache.step(sequences, tokens.shape[1]) as step:  # all sequences and layers get the tokens, or none

        def memory(layer: int, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            step.write(layer, keys, values)
            return step.attend(layer, q)

        return model(tokens, start, memory)


@torch.inference_mode()
def sample(
    model: GPT, cache: PagedKVCache, prompt: Tensor, *, n_answers: int, n_tokens: int, seed: int = 0
) -> Tensor:
    """Return ``[n_answers, n_tokens]`` sampled continuations of a ``[n]`` prompt, which is read once."""
    generator = torch.Generator().manual_seed(seed)
    first = cache.sequence()
    logits = read(model, cache, [first], prompt[None])[:, -1].expand(n_answers, -1)
    sequences = [first, *(first.fork() for _ in range(n_answers - 1))]
    answers = []
    for _ in range(n_tokens):
        answers.append(torch.multinomial(logits.softmax(-1), 1, generator=generator))
        logits = read(model, cache, sequences, answers[-1])[:, -1]
    for sequence in sequences:
        sequence.free()
    return torch.cat(answers, dim=1)


def main() -> None:
    """Sample three answers."""
    model = GPT(Config()).eval()
    arena = Arena("4MiB", backend="torch")
    cache = PagedKVCache(arena, model.config.kv_spec(), num_pages=32, page_size=16)
    answers = sample(model, cache, torch.arange(40), n_answers=3, n_tokens=12)
    for answer in answers.tolist():
        print(answer)
    print(cache.stats)


if __name__ == "__main__":
    main()
