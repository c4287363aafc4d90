"""What `generate` costs with each cache: steps, whole answers, memory, and a prompt that is used again.

Groups, in this order, each for a batch and a number of tokens held:

* one decoding step, with what each cache allocates in it and the most that is held;
* a whole call of `generate`, prompt included, with another prompt each time;
* the first token of another answer to a prompt that is held.

Logits are compared before anything is timed, and variants are timed interleaved. `generate` compiles the decoding step
by itself where the model is on a GPU and the cache is a static one. That is a variant of its own here, and is switched
off in all others. Compiled variants keep one cache and reset it at the beginning of each answer, since another one would
be recorded again; the others make a new one, as `generate` does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from gpuarena.bench import _answers, _caches, _models, decode
from gpuarena.bench._caches import VARIANTS
from gpuarena.bench._models import Models
from gpuarena.bench._peaks import step_memory
from gpuarena.bench._steps import TOLERANCE
from gpuarena.bench.device import Device, device_of
from gpuarena.bench.environment import environment
from gpuarena.bench.harness import Group, WrongDataError, interleave, rows
from gpuarena.errors import ArgumentError

__all__ = ["WrongDataError", "run"]


def run(
    *,
    model: str = "qwen2.5-1.5b",
    device: str | Device = "cpu",
    dtype: str = "bfloat16",
    lengths: Sequence[int] = decode.LENGTHS,
    batches: Sequence[int] = (1, 4),
    layers: int = 4,
    new_tokens: int = 32,
    whole_limit: int = 512,
    rounds: int = 7,
    compiled: bool = False,
    compile_budget_s: float | None = None,
    quick: bool = False,
    on_group: Callable[[Group], object] = lambda group: None,
) -> dict[str, Any]:
    """Time all groups; return the figures with the machine and the versions, for JSON.

    Parameters
    ----------
    model : str
        ``"qwen2.5-1.5b"``, its geometry with `layers` layers and random weights; ``"smollm2"``; or a folder or
        ``.gguf`` file.
    device : str or Device
    dtype : str
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
    compiled : bool
        Whether whole calls are made with static caches as well whose steps `generate` compiles; it takes up to a
        minute for each.
    compile_budget_s : float, optional
        Seconds for compiling, of which each group of whole calls gets a share.
    quick : bool
        A tiny model, short prompts and few samples, to see that it runs; so is every run on a fake GPU.
    on_group : callable, optional
        Called with each group when it is done.

    Raises
    ------
    WrongDataError
        The logits of `ArenaCache` differ from those of transformers' cache by more than rounding, or a rollback does
        not bring the prompt back. Any other variant that gives wrong data is among those that were not measured.
    ArgumentError
        Another dtype, a number below 1, or no length that the model can hold.
    """
    if dtype not in TOLERANCE:
        raise ArgumentError(f"dtype must be one of {', '.join(TOLERANCE)}, not {dtype!r}")
    if min([rounds, layers, new_tokens, *lengths, *batches]) < 1 or not lengths or not batches:
        raise ArgumentError("rounds, layers, new_tokens, lengths and batches must be positive")
    where = device_of(device)
    if quick or where.is_fake:
        lengths, batches, new_tokens, rounds = [32, 64], [1, 2], 4, min(rounds, 2)
        whole_limit = min(whole_limit, lengths[0])
        models = _models.random_models(where, getattr(torch, dtype), 2, _models.TINY)
    else:
        models = _models.load(model, where, getattr(torch, dtype), layers=layers)
    longest = (
        models.config.max_position_embeddings - new_tokens - rounds - 8
    )  # for the steps that are checked
    held = [length for length in lengths if length <= longest]
    if not held:
        raise ArgumentError(f"{models.name} holds at most {longest} tokens and an answer")
    bandwidth = where.copy_bandwidth(1 << 22) if quick or where.is_fake else where.copy_bandwidth()
    groups = []

    n_whole = len(batches) * sum(length <= min(whole_limit, longest) for length in held)
    budget_s = None if compile_budget_s is None else compile_budget_s / max(n_whole, 1)

    def whole(length: int, batch: int) -> Group:
        return _answers.measure_answers(
            models,
            length,
            batch,
            new_tokens,
            rounds=min(rounds, 3),
            compiled=compiled,
            compile_budget_s=budget_s,
        )

    for group in _groups(models, held, batches, min(whole_limit, longest), rounds, bandwidth, whole):
        groups.append(group)
        on_group(group)
        if group["kind"] != "step":  # which does it itself
            where.give_back()  # so that the memory of one group is not there beside that of the next
    return {
        "benchmark": "generate",
        "geometry": models.geometry,
        "environment": environment(where.name),
        "fake": where.is_fake,
        "compiled": compiled,
        "rounds": rounds,
        "copy_nbytes_per_s": bandwidth,
        "groups": groups,
    }


def _groups(
    models: Models,
    lengths: Sequence[int],
    batches: Sequence[int],
    whole_limit: int,
    rounds: int,
    bandwidth: float,
    whole: Callable[[int, int], Group],
) -> Iterator[Group]:
    for batch in batches:
        for length in lengths:
            yield _steps(models, length, max(lengths), batch, rounds, bandwidth)
    for batch in batches:
        for length in (length for length in lengths if length <= whole_limit):
            yield whole(length, batch)
    for length in lengths:
        yield _again(models, length, rounds)


def _steps(models: Models, length: int, largest: int, batch: int, rounds: int, bandwidth: float) -> Group:
    found = decode.measure_step(
        models, length, largest=largest, rounds=rounds, batch=batch, bandwidth=bandwidth
    )
    ways = {name: way for name, way in VARIANTS.items() if way.kind != "ideal"}
    for name, figures in step_memory(
        models, length, found["capacity"], batch, ways, found["not_measured"]
    ).items():
        found["rows"].get(name, {}).update(figures)
    return found


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
        name: _caches.filled(models, VARIANTS[kind], length, {"exact": length + room})
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
    with torch.no_grad():
        arena = caches["ArenaCache: checkpoint, rollback"]
        before = [(layer.keys.clone(), layer.values.clone()) for layer in arena.layers]
        checkpoint = arena.checkpoint()
        append(arena)
        arena.rollback(checkpoint)
        for layer, (keys, values) in zip(arena.layers, before, strict=True):
            if not (torch.equal(layer.keys, keys) and torch.equal(layer.values, values)):
                raise WrongDataError(f"at {length} tokens a rollback did not bring the prompt back")
        del before
        times = interleave(bodies, rounds=rounds, synchronize=models.where.synchronize)
    return {
        "title": f"the prompt of {length} tokens again, batch 1",
        "kind": "reuse",
        "n_tokens": length,
        "batch": 1,
        "reference": "ArenaCache: checkpoint, rollback",
        "rows": rows(times, "ArenaCache: checkpoint, rollback"),
    }
