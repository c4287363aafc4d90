"""What `generate` costs with each cache: steps, whole answers, memory, and a prompt that is used again.

Groups, in this order, each for a batch and a number of tokens held:

* one decoding step, in milliseconds, with what each cache allocates in it and the most that it holds;
* a whole call of `generate`, prompt included;
* the first token of another answer to a prompt that is held.

Logits are compared before anything is timed, and variants are timed interleaved.
"""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from gpuarena.bench import _caches, _models, decode
from gpuarena.bench._caches import OURS, VARIANTS
from gpuarena.bench._models import Models
from gpuarena.bench.environment import environment
from gpuarena.bench.harness import Group, WrongDataError, interleave, rows
from gpuarena.bench.memory import meter_updates
from gpuarena.errors import ArgumentError

__all__ = ["WrongDataError", "run"]

#: Steps in which the bytes of a cache are counted: enough for a static cache's first, which allocates, to be over.
_METERED_STEPS = 3


def run(
    *,
    model: str = "qwen2.5-1.5b",
    device: str = "cpu",
    dtype: str = "bfloat16",
    lengths: Sequence[int] = decode.LENGTHS,
    batches: Sequence[int] = (1, 4),
    layers: int = 4,
    new_tokens: int = 32,
    whole_limit: int = 512,
    rounds: int = 7,
    quick: bool = False,
    on_group: Callable[[Group], object] = lambda group: None,
) -> dict[str, Any]:
    """Time all groups; return the figures with the machine and the versions, for JSON.

    Parameters
    ----------
    model : str
        ``"qwen2.5-1.5b"``, its geometry with `layers` layers and random weights; ``"smollm2"``; or a folder or
        ``.gguf`` file.
    device, dtype : str
    lengths : sequence of int
        Tokens held; those beyond the model's maximum are left out.
    batches : sequence of int
        Rows.
    layers : int
        Of the random model.
    new_tokens : int
        That `generate` makes.
    whole_limit : int
        Longest prompt of whole calls, in tokens: reading it takes most of the time, for all caches alike.
    rounds : int
        Samples of each variant; at most 3 of whole calls.
    quick : bool
        A tiny model, short prompts and few samples, to see that it runs.
    on_group : callable, optional
        Called with each group when it is done.

    Raises
    ------
    WrongDataError
        The logits of two variants differ by more than rounding.
    ArgumentError
        Another dtype, a number below 1, or no length that the model can hold.
    """
    if dtype not in decode.TOLERANCE:
        raise ArgumentError(f"dtype must be one of {', '.join(decode.TOLERANCE)}, not {dtype!r}")
    if min([rounds, layers, new_tokens, *lengths, *batches]) < 1 or not lengths or not batches:
        raise ArgumentError("rounds, layers, new_tokens, lengths and batches must be positive")
    where = torch.device(device)
    if quick:
        lengths, batches, new_tokens, rounds = [32, 64], [1, 2], 4, min(rounds, 2)
        models = _models.random_models(where, getattr(torch, dtype), 2, _models.TINY)
    else:
        models = _models.load(model, where, getattr(torch, dtype), layers=layers)
    longest = models.config.max_position_embeddings - new_tokens - rounds - 8
    held = [length for length in lengths if length <= longest]
    if not held:
        raise ArgumentError(f"{models.name} holds at most {longest} tokens and an answer")
    groups = []
    for group in _groups(models, held, batches, new_tokens, min(whole_limit, longest), rounds):
        groups.append(group)
        on_group(group)
        gc.collect()  # of cycles, so that the memory of one group is not there beside that of the next
    return {
        "benchmark": "generate",
        "geometry": models.geometry,
        "environment": environment(str(where)),
        "rounds": rounds,
        "groups": groups,
    }


def _groups(
    models: Models,
    lengths: Sequence[int],
    batches: Sequence[int],
    new_tokens: int,
    whole_limit: int,
    rounds: int,
) -> Iterator[Group]:
    for batch in batches:
        for length in lengths:
            yield _steps(models, length, max(lengths), batch, rounds)
    for batch in batches:
        for length in (length for length in lengths if length <= whole_limit):
            yield _whole(models, length, batch, new_tokens, min(rounds, 3))
    for length in lengths:
        yield _again(models, length, rounds)


# -- steps --------------------------------------------------------------------------------------------------------


def _steps(models: Models, length: int, largest: int, batch: int, rounds: int) -> Group:
    found = decode.measure_step(models, length, largest=largest, rounds=rounds, batch=batch)
    figures = _memory(models, length, found["capacity"], batch)
    found["rows"] = {name: {**row, **figures[name]} for name, row in found["rows"].items()}
    return found


def _memory(models: Models, length: int, capacity: dict[str, int], batch: int) -> dict[str, dict[str, float]]:
    """Return what each cache allocates in a step, in bytes, and the most that it holds at once."""
    from gpuarena_transformers import cache_argument

    token = torch.full((batch, 1), 7, device=models.device)
    found: dict[str, dict[str, float]] = {}
    for name, (kind, attention, _) in VARIANTS.items():
        if kind == "ideal":
            found[name] = {}
            continue
        cache = _caches.filled(models, length, capacity, batch=batch, variants={name: VARIANTS[name]})[name]
        with torch.inference_mode(), meter_updates(cache) as meter:
            for _ in range(_METERED_STEPS):
                models.by_attention[attention](input_ids=token, use_cache=True, **{cache_argument(): cache})
        found[name] = {
            "allocated_nbytes": meter.allocated_nbytes // _METERED_STEPS,
            "peak_nbytes": meter.peak_nbytes,
        }
        del cache
    return found


# -- whole calls ----------------------------------------------------------------------------------------------------


def _whole(models: Models, length: int, batch: int, new_tokens: int, rounds: int) -> Group:
    from gpuarena_transformers import cache_argument

    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, models.config.vocab_size, (batch, length), generator=generator).to(models.device)
    capacity = {"exact": length + new_tokens, "largest": 2 * (length + new_tokens)}
    names = [name for name, (kind, _, _) in VARIANTS.items() if kind != "ideal"]

    def call(name: str) -> Any:
        kind, attention, rule = VARIANTS[name]
        with torch.inference_mode():
            return models.by_attention[attention].generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
                **{cache_argument(): _caches.make(kind, models, batch, capacity[rule])},
            )

    # Later tokens depend on the first that differ by rounding, so the first alone are compared.
    first = {name: call(name).logits[0].float() for name in names}
    difference = decode.differences(first, length, str(models.dtype).removeprefix("torch."))
    times = interleave(
        {name: functools.partial(call, name) for name in names},
        rounds=rounds,
        warmup=0,
        synchronize=models.synchronize,
    )
    return {
        "title": f"generate {new_tokens} tokens from {length}, batch {batch}",
        "kind": "generate",
        "n_tokens": length,
        "batch": batch,
        "new_tokens": new_tokens,
        "reference": OURS,
        "rows": rows(times, OURS, {name: {"logits_difference": value} for name, value in difference.items()}),
    }


# -- another answer -------------------------------------------------------------------------------------------------


def _again(models: Models, length: int, rounds: int) -> Group:
    """Time what it takes to have the prompt of `length` tokens again, after an answer of one token."""
    room = 2 * rounds + 8
    names = {
        "ArenaCache: checkpoint, rollback": "ArenaCache + gpuarena",
        "copy.deepcopy(DynamicCache)": "DynamicCache + gpuarena",
        "DynamicCache.crop": "DynamicCache + gpuarena",
    }
    caches = {
        name: _caches.filled(models, length, {"exact": length + room}, variants={kind: VARIANTS[kind]})[kind]
        for name, kind in names.items()
    }
    token = torch.zeros(1, models.kv_heads, 1, models.head_dim, dtype=models.dtype, device=models.device)

    def append(cache: Any) -> None:
        for layer in range(models.config.num_hidden_layers):
            cache.update(token, token, layer)

    def roll_back() -> None:
        cache = caches["ArenaCache: checkpoint, rollback"]
        cache.rollback(cache.checkpoint())

    bodies: dict[str, Callable[[], object]] = {
        "ArenaCache: checkpoint, rollback": roll_back,
        "copy.deepcopy(DynamicCache)": lambda: copy.deepcopy(caches["copy.deepcopy(DynamicCache)"]),
        "DynamicCache.crop": lambda: caches["DynamicCache.crop"].crop(-1),
    }
    with torch.inference_mode():
        arena = caches["ArenaCache: checkpoint, rollback"]
        before = [(layer.keys.clone(), layer.values.clone()) for layer in arena.layers]
        checkpoint = arena.checkpoint()
        append(arena)
        arena.rollback(checkpoint)
        for layer, (keys, values) in zip(arena.layers, before, strict=True):
            if not (torch.equal(layer.keys, keys) and torch.equal(layer.values, values)):
                raise WrongDataError(f"at {length} tokens a rollback did not bring the prompt back")
        del before
        times = interleave(bodies, rounds=rounds, synchronize=models.synchronize)
    return {
        "title": f"the prompt of {length} tokens again, batch 1",
        "kind": "reuse",
        "n_tokens": length,
        "batch": 1,
        "reference": "ArenaCache: checkpoint, rollback",
        "rows": rows(times, "ArenaCache: checkpoint, rollback"),
    }
