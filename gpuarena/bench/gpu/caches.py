"""What a cache makes a GPU do: launches of an append, memory at the end of a long context, a prompt that is kept.

Beside the arena's caches stand those of transformers, without a model but where logits are compared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch

from gpuarena.bench._kv_setup import Setup, halves
from gpuarena.bench._kv_stores import Token, tokens_of
from gpuarena.bench.device import Device
from gpuarena.bench.gpu._check import Check, NotMeasuredError, Probe
from gpuarena.bench.harness import Variant, group
from gpuarena.bench.memory import AllocationMeter

__all__ = ["checks"]

#: Kernels and copies a layer that an append of one token may take: one for keys and one for values, or one for both.
_PROMISED = {"KVCache.append": 2, "KVCache, append_pair of the layers": 1, "ArenaCache.update": 2}
#: Tokens that are appended one by one at the end of the long context.
_N_LAST = 8
#: float32 logits may differ by this part of the largest, since other kernels add in another order. A token too many
#: in the cache changes them by some hundredths.
_TOLERANCE = 1e-3
#: What may be held beside keys and values: a page, and this part of them. An allocator rounds up, and each token has a
#: position of 8 bytes.
_SPARE_NBYTES, _SPARE_PART = 4096, 100


def checks() -> list[Check]:
    """Return the checks of this module."""
    return [
        Check("launches of an append", _launches, 10),
        Check("memory at the end of a long context", _peak_memory, 10),
        Check("a prompt that is kept", _kept_prompt, 15),
    ]


def _setup(probe: Probe) -> Setup:
    """Return the geometry of Qwen2.5-1.5B, or on a quick run a small one."""
    if probe.quick:
        return Setup(probe.device, "bfloat16", layers=2, rounds=3, quick=True, head_dim=16)
    return Setup(probe.device, "bfloat16", layers=28, rounds=15)


def _transformers(probe: Probe) -> tuple[ModuleType, Any]:
    """Return `transformers` and `gpuarena_transformers`."""
    try:
        import gpuarena_transformers
        import transformers
    except ImportError as error:
        raise NotMeasuredError(f"transformers cannot be imported: {error}") from error
    return transformers, gpuarena_transformers


def _config(transformers: Any, setup: Setup) -> Any:
    """Return the config that caches of transformers are made from."""
    return transformers.Qwen2Config(
        num_hidden_layers=setup.layers,
        num_attention_heads=setup.q_heads,
        num_key_value_heads=setup.kv_heads,
        hidden_size=setup.q_heads * setup.head_dim,
        max_position_embeddings=1 << 16,
    )


def _hold(cache: Any, prompt: list[Any]) -> Any:
    """Append a prompt to a cache of transformers' kind."""
    for number, (keys, values) in enumerate(halves(prompt)):
        cache.update(keys, values, number)
    return cache


def _step(cache: Any, token: Token) -> list[Any]:
    return [cache.update(keys, values, number) for number, (keys, values) in enumerate(token.halves)]


# -- launches -----------------------------------------------------------------------------------------------------------


def _launches(probe: Probe) -> None:
    setup = _setup(probe)
    token = tokens_of(setup, 1)[0]
    room = 16
    ours = setup.cache(setup.spec(), room)
    pairs = setup.cache(setup.spec(), room)

    def by_pairs() -> None:
        for layer, pair in zip(pairs.layers, token.pairs, strict=True):
            layer.append_pair(pair)

    def by_cache() -> None:
        for number, (keys, values) in enumerate(token.halves):
            ours.append(number, keys, values)

    _count(probe, setup, "KVCache.append", by_cache)
    _count(probe, setup, "KVCache, append_pair of the layers", by_pairs)
    for cache in (ours, pairs):
        _expect_token(probe, setup, [cache.read(number) for number in range(setup.layers)], token)
    transformers, adapter = _transformers(probe)
    config = _config(transformers, setup)
    static = [transformers.cache_utils.StaticLayer(room) for _ in range(setup.layers)]

    def by_static() -> None:
        for layer, (keys, values) in zip(static, token.halves, strict=True):
            layer.update(keys, values)

    arena_cache = adapter.ArenaCache(config, 1, room)
    dynamic = transformers.DynamicCache(config=config)
    _count(probe, setup, "ArenaCache.update", partial(_step, arena_cache, token))
    _count(probe, setup, "DynamicCache.update", partial(_step, dynamic, token))
    _count(probe, setup, "StaticLayer.update", by_static)
    for held in (arena_cache, dynamic):
        _expect_token(probe, setup, [(layer.keys, layer.values) for layer in held.layers], token)


def _count(probe: Probe, setup: Setup, name: str, step: Callable[[], Any]) -> None:
    """Note what one step more makes the device do, so that whatever a profile has of its own cancels out."""

    def two() -> None:
        step()
        step()

    step()  # takes the memory, where that is done at the first token
    once, twice = probe.device.launches(step), probe.device.launches(two)
    if not once:
        raise NotMeasuredError("torch's profiler saw no work on the device")
    found = (twice - once) / setup.layers
    probe.figure(name, found, "launches a layer")
    promised = _PROMISED.get(name)
    probe.expect(
        promised is None or found <= promised,
        f"{name} takes {found:g} launches a layer, {promised} are promised",
    )


def _expect_token(probe: Probe, setup: Setup, held: list[tuple[Any, Any]], token: Token) -> None:
    """Check that each layer holds the token, again and again."""
    for number, (both, new) in enumerate(zip(held, token.halves, strict=True)):
        for found, wanted in zip(both, new, strict=True):
            probe.expect(
                found.shape[2] > 0 and torch.equal(found, wanted.expand_as(found)),
                f"layer {number} of {setup.layers} holds other numbers than were appended",
            )


# -- memory -------------------------------------------------------------------------------------------------------------


def _peak_memory(probe: Probe) -> None:
    setup = _setup(probe)
    n_tokens = 64 if probe.quick else 32768
    transformers, adapter = _transformers(probe)
    config = _config(transformers, setup)
    exact = setup.spec().nbytes(1, n_tokens)
    probe.figure("held", n_tokens, "tokens")
    probe.figure("keys and values", exact, "bytes")
    peaks = {}
    for name, make in {
        "ArenaCache": lambda: adapter.ArenaCache(config, 1, n_tokens),
        "DynamicCache": lambda: transformers.DynamicCache(config=config),
    }.items():
        peaks[name], reserved = _peak(setup, probe.device, make, n_tokens)
        probe.figure(f"peak of {name}", peaks[name], "bytes")
        if reserved is not None:
            probe.figure(f"reserved by torch, {name}", reserved, "bytes")
    ours, theirs = peaks["ArenaCache"], peaks["DynamicCache"]
    probe.figure("DynamicCache", theirs / ours, "times the peak of ArenaCache")
    spare = _SPARE_NBYTES + exact // _SPARE_PART
    for other, wanted in (("keys and values have", exact), ("DynamicCache held", theirs)):
        probe.expect(ours <= wanted + spare, f"ArenaCache held {ours} bytes at most, {other} {wanted}")


def _peak(setup: Setup, device: Device, make: Callable[[], Any], n_tokens: int) -> tuple[int, int | None]:
    """Return the most bytes that a cache held while its last tokens were appended, and what torch reserved then.

    On a dry run the bytes are counted by operations, since nobody counts those of a CPU.
    """
    device.give_back()
    before = None if device.is_fake else device.memory()
    token = tokens_of(setup, 1)[0]
    cache = make()
    for number in range(setup.layers):  # one layer's prompt at a time
        pair = setup.pairs(n_tokens - _N_LAST, seed=number, layers=1)[0]
        cache.update(pair[0], pair[1], number)
        del pair
    if before is None:
        held = [one for layer in cache.layers for one in (layer.keys, layer.values)]
        with AllocationMeter(held) as meter:
            del held
            _grow(cache, token)
        return meter.peak_nbytes, None
    device.forget_peak()
    _grow(cache, token)
    device.synchronize()
    memory = device.memory()
    assert memory is not None, "it was counted before"
    return memory.peak_nbytes - before.allocated_nbytes, memory.reserved_nbytes - before.reserved_nbytes


def _grow(cache: Any, token: Token) -> None:
    for _ in range(_N_LAST):
        _step(cache, token)


# -- a prompt that is kept ----------------------------------------------------------------------------------------------


def _kept_prompt(probe: Probe) -> None:
    setup = _setup(probe)
    transformers, adapter = _transformers(probe)
    _compare_logits(probe, transformers, adapter)
    n_held = 64 if probe.quick else 8192
    config = _config(transformers, setup)
    prompt, token = setup.pairs(n_held, seed=5), tokens_of(setup, 1)[0]
    ours = _hold(adapter.ArenaCache(config, 1, n_held + 1), prompt)
    kept, cropped = (_hold(transformers.DynamicCache(config=config), prompt) for _ in range(2))

    def rolled_back() -> Any:
        checkpoint = ours.checkpoint()
        views = _step(ours, token)
        ours.rollback(checkpoint)
        return views  # of memory that no one has written to since

    def cropped_again() -> Any:
        views = _step(cropped, token)
        cropped.crop(-1)
        return views

    def wanted() -> Any:
        return [torch.cat(both, dim=3).unbind(0) for both in zip(prompt, token.pairs, strict=True)]

    reference = "ArenaCache: checkpoint, a token, rollback"
    timed = group(
        f"answer again from {n_held} tokens, {setup.layers} layers, keys and values only",
        {
            reference: Variant(rolled_back, wanted=wanted),
            "DynamicCache: copy.deepcopy, a token": Variant(
                lambda: _step(copy.deepcopy(kept), token), wanted=wanted
            ),
            "DynamicCache: a token, crop": Variant(cropped_again, wanted=wanted),
        },
        reference,
        rounds=setup.rounds,
        warmup=2,
        synchronize=probe.device.synchronize,
    )
    probe.groups.append(timed)


def _compare_logits(probe: Probe, transformers: Any, adapter: Any) -> None:
    """Answer twice from one prompt, and compare the second answer's logits with those of one pass."""
    from gpuarena.bench import _models

    device = probe.device.torch_device
    n_prompt = 24 if probe.quick else 512
    models = _models.random_models(probe.device, torch.float32, 2, _models.TINY)
    model, argument = models.by_attention["sdpa"], adapter.cache_argument()
    ids = torch.arange(n_prompt, device=device)[None] * 7 % 251
    answers = [torch.full((1, 4), number, device=device) for number in (11, 200)]

    def forward(tokens: torch.Tensor, cache: Any) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = model(input_ids=tokens, use_cache=True, **{argument: cache}).logits[:, -1]
            return logits

    def dynamic() -> Any:
        return transformers.DynamicCache(config=models.config)

    ours = adapter.ArenaCache(models.config, 1, n_prompt + 8)
    kept, cropped = dynamic(), dynamic()
    for cache in (ours, kept, cropped):
        forward(ids, cache)
    found: dict[str, torch.Tensor] = {}
    for answer in answers:
        checkpoint = ours.checkpoint()
        found["checkpoint and rollback"] = forward(answer, ours)
        ours.rollback(checkpoint)
        found["copy.deepcopy"] = forward(answer, copy.deepcopy(kept))
        found["crop"] = forward(answer, cropped)
        cropped.crop(-4)
    wanted = forward(torch.cat((ids, answers[-1]), dim=1), dynamic())
    largest = float(wanted.abs().max())
    for name, logits in found.items():
        off = float((logits - wanted).abs().max()) / largest
        probe.figure(f"logits off one pass, {name}", off, "of the largest")
        probe.expect(
            off <= _TOLERANCE,
            f"the second answer's logits after {name} are off by {off:.3g} of the largest, {_TOLERANCE} is allowed",
        )
