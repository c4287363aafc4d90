"""The likeliest continuation of all, found by going down every branch and back again.

Going back is a rollback: constant in tokens, nothing is copied, whatever the depth of the branch that is left.
"""

from __future__ import annotations

import torch
from gpt import GPT, Config, with_cache

from gpuarena import Arena
from gpuarena.kv import KVCache


@torch.inference_mode()
def best_continuation(
    model: GPT, cache: KVCache, last: int, *, depth: int, branches: int
) -> tuple[float, list[int]]:
    """Return the highest sum of log-probabilities of `depth` tokens behind token `last`, and the tokens.

    At each token the `branches` likeliest next ones are tried. The cache holds all tokens before `last`, and holds
    the same when this returns.
    """
    here = cache.checkpoint()
    logits = with_cache(model, cache, torch.tensor([[last]]))[0, -1]
    likeliest = logits.log_softmax(-1).topk(branches)
    best = (-torch.inf, list[int]())
    for score, token in zip(likeliest.values.tolist(), likeliest.indices.tolist(), strict=True):
        rest, tail = (0.0, [])
        if depth > 1:
            rest, tail = best_continuation(model, cache, token, depth=depth - 1, branches=branches)
        best = max(best, (score + rest, [token, *tail]))
    cache.rollback(here)
    return best


def main() -> None:
    """Search 4 tokens ahead with 3 branches each."""
    model = GPT(Config()).eval()
    spec = model.config.kv_spec()
    cache = KVCache(Arena(spec.arena_nbytes(1, 128), backend="torch"), spec, batch=1, max_tokens=128)
    prompt = torch.arange(30)[None]
    with torch.inference_mode():
        with_cache(model, cache, prompt[:, :-1])
    score, tokens = best_continuation(model, cache, int(prompt[0, -1]), depth=4, branches=3)
    print(f"{tokens} with log-probability {score:.3f}; the cache holds {cache.length} tokens, as before")


if __name__ == "__main__":
    main()
