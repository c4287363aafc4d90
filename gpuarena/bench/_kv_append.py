"""Appending: one token at a given length, and a whole loop from none on."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from gpuarena.bench._collect import Maker
from gpuarena.bench._kv_meter import TrafficMeter
from gpuarena.bench._kv_setup import Setup, halves, transformers_or_none
from gpuarena.bench._kv_stores import (
    Arenas,
    Cat,
    Growing,
    HandWritten,
    Layers,
    Static,
    Stepping,
    Store,
    Token,
    Window,
    growing_cache,
    tokens_of,
)
from gpuarena.bench._labels import reason
from gpuarena.bench.harness import Group, Variant, WrongDataError

__all__ = ["OURS", "append_groups", "launches", "lengths", "loop_groups", "oracle", "steps"]

OURS = "KVCache.append"
CAT = "torch.cat"

#: Steps in a sample, where a step takes some 100 us.
N_STEPS = 32
#: Steps in a sample of what takes up to 100 ms a step.
N_SLOW_STEPS = 4
#: Tokens that the loops append again and again, so that a loop of thousands does not begin with making them.
N_TOKENS = 64
#: int8 is off by half a step of 1/127 of the largest number in each token and head; bfloat16 by 2**-8.
_INT8_TOLERANCE = 0.01

StoreOf = Callable[[], Stepping]


# -- one token ----------------------------------------------------------------------------------------------------


def append_groups(setup: Setup) -> Iterator[Maker]:
    """Time appending one token to all layers with the views that attention reads, at several lengths."""
    for n_held in lengths(setup):
        yield f"append a token, {n_held} held, {setup.layers} layers", partial(_append_group, setup, n_held)


def lengths(setup: Setup) -> tuple[int, ...]:
    """Return the numbers of tokens that are held before an append."""
    return (16, 32, 64) if setup.quick else (512, 2048, 8192)


def _append_group(setup: Setup, n_held: int, title: str) -> Group:
    prompt = setup.pairs(n_held, seed=n_held)
    tokens = tokens_of(setup, N_TOKENS)
    room = n_held + N_STEPS
    window = n_held // 2
    slack = max(1, window // 8)

    missing: dict[str, str] = {}

    def wanted(n_new: int, low: int = 0) -> list[Any]:
        return [(keys[:, :, low:], values[:, :, low:]) for keys, values in oracle(prompt, tokens, n_new)]

    def variant(store: Store, n: int = N_STEPS, *, n_counted: int = 1, **options: Any) -> Variant:
        store.hold(prompt)
        return Variant(
            partial(steps, store, itertools.cycle(tokens), n),
            n,
            ready=store.back,
            figures=launches(setup, store, tokens, n_counted, missing),
            **{"wanted": partial(wanted, n), **options},
        )

    quantised = setup.cache(setup.spec(storage="int8"), room)
    no_view = HandWritten(setup, room, "index_copy, no view")
    variants = {
        # Each step copies the prompt and one token.
        CAT: variant(
            Cat(setup, keeps=False),
            N_SLOW_STEPS,
            wanted=lambda: oracle(prompt, tokens[N_SLOW_STEPS - 1 :], 1),
        ),
        "index_copy_, position ready, no view": variant(no_view, given=lambda _: no_view.held()),
        "index_copy_, position ready": variant(HandWritten(setup, room, "index_copy")),
        "narrow + copy_ + narrow": variant(HandWritten(setup, room, "narrow")),
        OURS: variant(Arenas(setup.cache(setup.spec(), room))),
        "KVCache, append_pair of the layers": variant(Layers(setup.cache(setup.spec(), room))),
        f"KVCache, window {window}, slack {slack}": variant(
            Window(setup.cache(setup.spec(window=window, slack=slack), n_held + slack)),
            slack,  # so that each sample moves the window once
            n_counted=slack,
            wanted=partial(wanted, slack, n_held + slack - window),
        ),
        "KVCache, int8": variant(
            Arenas(quantised),
            N_SLOW_STEPS,
            tolerance=_INT8_TOLERANCE,
            # What append returned of a layer was valid until the next one.
            given=lambda _: [[one.clone() for one in quantised.read(i)] for i in range(setup.layers)],
        ),
    }
    if transformers_or_none() is not None:
        variants["StaticLayer.update (all slots)"] = variant(
            Static(setup, room),
            given=lambda views: [(k[:, :, :room], v[:, :, :room]) for k, v in views],
        )
    growing = growing_cache(setup, room)
    if growing is not None:
        variants["KVCache, token-major, growing"] = variant(Arenas(growing))
    group = setup.group(title, variants, OURS)
    return {**group, "not_measured": missing} if missing else group


def oracle(prompt: list[Any], tokens: list[Token], n_new: int) -> list[tuple[Any, Any]]:
    """Return keys and values of each layer: the prompt, and the first of `tokens` again and again."""
    import torch

    kept = []
    for number, pair in enumerate(prompt):
        new = torch.cat([token.pairs[number] for token in tokens], dim=3)
        n_times = -(-n_new // len(tokens))
        kept.append(torch.cat([pair, new.repeat(1, 1, 1, n_times, 1)[:, :, :, :n_new]], dim=3))
    return halves(kept)


def steps(store: Stepping, turn: Iterator[Token], n: int) -> Any:
    """Append the next `n` tokens; return what the last step did."""
    step = store.step
    for token in itertools.islice(turn, n - 1):
        step(token)
    return step(next(turn))


def launches(
    setup: Setup, store: Store, tokens: list[Token], n: int, missing: dict[str, str]
) -> dict[str, float]:
    """Count what appending a token makes the device do in one layer, as the mean of `n` steps.

    Kernels and copies on a GPU, whose launches cost more than the few bytes that an append writes; operations of torch
    on a CPU. Where they cannot be counted, `missing` is told why.
    """
    store.back()
    try:
        n_all = setup.device.launches(partial(steps, store, itertools.cycle(tokens), n))
        if n_all == 0:
            raise WrongDataError("the profiler saw none")
    except Exception as error:  # a profiler needs more of a driver than anything else here
        if not setup.device.is_gpu:
            raise
        missing["launches"] = reason(error)
        return {}
    return {"launches": n_all / n / setup.layers}


# -- a loop -------------------------------------------------------------------------------------------------------


def loop_groups(setup: Setup, cat_limit: int) -> Iterator[Maker]:
    """Time and count loops from no token to n, taking the memory included; `torch.cat` up to `cat_limit` tokens."""
    for n in (8, 32) if setup.quick else (512, 2048, 8192):
        title = f"all appends of {n} tokens, {setup.layers} layers"
        yield title, partial(_loop_group, setup, n, n <= cat_limit)


def _loop_group(setup: Setup, n: int, with_cat: bool, title: str) -> Group:
    prompt, tokens = setup.pairs(0, seed=0), tokens_of(setup, min(n, N_TOKENS))
    stores: dict[str, StoreOf] = {
        "cat, by 256 slots": lambda: Growing(setup, lambda held: held + 256),
        "doubling": lambda: Growing(setup, lambda held: max(1, 2 * held)),
        OURS: lambda: Arenas(setup.cache(setup.spec(), n)),
    }
    if with_cat:
        stores = {CAT: lambda: Cat(setup), **stores}
    if transformers_or_none() is not None:
        stores["StaticLayer.update"] = lambda: Static(setup, n)
    if growing_cache(setup, n) is not None:
        stores["KVCache, growing"] = lambda: Arenas(_present(growing_cache(setup, n)))
    variants = {
        name: Variant(
            partial(_loop, store, tokens, n),
            wanted=lambda: oracle(prompt, tokens, n),
            figures=count_traffic(setup, store, tokens, n),
        )
        for name, store in stores.items()
    }
    few = dataclasses.replace(setup, rounds=min(setup.rounds, 3)) if n > 2048 else setup
    return few.group(title, variants, OURS)


def _present(cache: Any) -> Any:
    assert cache is not None, "there was such memory a moment ago"
    return cache


def _loop(make: StoreOf, tokens: list[Token], n: int) -> Any:
    return steps(make(), itertools.cycle(tokens), n)


def count_traffic(setup: Setup, make: StoreOf, tokens: list[Token], n: int) -> dict[str, float]:
    """Run a loop and return its write amplification and the most memory that it held at a time.

    Write amplification is the tokens written, each copy of an older one included, by those held in the end. Zeros
    that a buffer is filled with are no tokens.
    """
    with TrafficMeter(setup.torch_dtype) as meter:
        store = make()
        steps(store, itertools.cycle(tokens), n)
        stored = n * sum(pair.numel() for pair in tokens[0].pairs)
        peak_nbytes = meter.peak_nbytes
        if isinstance(store, Arenas) and store.cache.arena.grows:
            # Its memory does not come from torch, whose storages over it show all that is reserved, and several times.
            peak_nbytes = store.cache.arena.stats.committed
    return {"write_amplification": meter.written / stored, "peak_nbytes": peak_nbytes}
