"""Changing which rows and tokens a cache holds: beam search, a prompt that is kept, and going back."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from gpuarena.arena import Arena
from gpuarena.bench._collect import Maker
from gpuarena.bench._kv_setup import Setup, halves, transformers_or_none
from gpuarena.bench._kv_stores import Token, tokens_of
from gpuarena.bench.harness import Group, Variant
from gpuarena.bench.memory import AllocationMeter
from gpuarena.kv import KVCache

__all__ = ["move_groups"]

#: Orders that take turns. Each row goes elsewhere, and none is lost, so that every call moves as much as the first.
_ROWS = ((2, 0, 3, 1), (1, 2, 3, 0), (3, 2, 0, 1))
#: Tokens that take turns behind a prompt.
_N_ANSWERS = 16
#: Cuts in a sample; one alone is short for the clock.
_N_CUTS = 32


def move_groups(setup: Setup) -> Iterator[Maker]:
    """Time reordering, keeping a prompt, and truncating."""
    layers = f"{setup.layers} layers"
    n_held = 32 if setup.quick else 2048
    yield f"reorder {len(_ROWS[0])} rows of {n_held} tokens, {layers}", partial(_reorder_group, setup, n_held)
    n_held = 72 if setup.quick else 8200  # half a page more, so that a fork has a page to copy
    yield f"answer again from {n_held} tokens, {layers}", partial(_keep_group, setup, n_held)
    lengths = (16, 64) if setup.quick else (512, 8192)
    yield f"go back by a token, {layers}", partial(_truncate_group, setup, lengths)


def _filled(cache: KVCache, prompt: list[Any]) -> KVCache:
    for number, pair in enumerate(prompt):
        cache.append(number, pair[0], pair[1])
    return cache


# -- rows ---------------------------------------------------------------------------------------------------------


def _reorder_group(setup: Setup, n_held: int, title: str) -> Group:
    """Time an exchange of four rows in all layers, and count what it allocates."""
    n_rows = len(_ROWS[0])
    prompt = setup.pairs(n_held, seed=3, rows=n_rows)
    orders = [torch.tensor(rows, device=setup.torch_device) for rows in _ROWS]
    turns = {name: itertools.cycle(orders) for name in ("index_select", "reorder")}
    spec = setup.spec()
    held = halves(prompt)
    cache = _filled(setup.cache(spec, n_held, batch=n_rows), prompt)

    def select() -> Any:
        rows = next(turns["index_select"])
        for number, (keys, values) in enumerate(held):
            held[number] = (keys.index_select(0, rows), values.index_select(0, rows))
        return held

    def start_over() -> None:
        turns.update({name: itertools.cycle(orders) for name in turns})
        held[:] = halves(prompt)
        cache.reset()
        _filled(cache, prompt)

    def reorder() -> None:
        cache.reorder(next(turns["reorder"]))

    # Both begin with the prompt once, and go on from wherever they are: what is moved is as much each time.
    allocated = {}
    for name, body in (("index_select", select), ("reorder", reorder)):
        with AllocationMeter() as meter:
            body()
        allocated[name] = {"allocated_nbytes": meter.allocated_nbytes}
    start_over()
    wanted = partial(_rows_of, prompt, orders[0])
    variants = {
        "index_select, new tensors": Variant(
            select, ready=_Once(start_over), wanted=wanted, figures=allocated["index_select"]
        ),
        "KVCache.reorder": Variant(
            reorder,
            ready=_Once(start_over),
            wanted=wanted,
            given=lambda _: [cache.read(number) for number in range(setup.layers)],
            figures=allocated["reorder"],
        ),
    }
    return setup.group(title, variants, "KVCache.reorder")


def _rows_of(prompt: list[Any], rows: torch.Tensor) -> Any:
    return halves([pair[:, rows] for pair in prompt])


class _Once:
    """Calls a function the first time that it is called itself."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function: Callable[[], object] | None = function

    def __call__(self) -> None:
        if self._function is not None:
            self._function()
        self._function = None


# -- a prompt that is kept ----------------------------------------------------------------------------------------


def _keep_group(setup: Setup, n_held: int, title: str, page_size: int = 16) -> Group:
    """Time what it takes to answer again from a prompt that was read: a copy of all, or a length that is remembered.

    The prompt is the same each time, as it is for those who keep one; the answers are others.
    """
    prompt = setup.pairs(n_held, seed=5)
    tokens = tokens_of(setup, _N_ANSWERS)
    turn = itertools.cycle(tokens)
    cache = _filled(setup.cache(setup.spec(), n_held + 1, copies=2), prompt)
    name, deepcopied = _deepcopied(prompt)
    with_token = [torch.cat(both, dim=3) for both in zip(prompt, tokens[0].pairs, strict=True)]

    def rolled_back() -> Any:
        checkpoint = cache.checkpoint()
        new = enumerate(next(turn).halves)
        views = [cache.append(number, keys, values) for number, (keys, values) in new]
        cache.rollback(checkpoint)
        return views  # of memory that no one has written to since

    def there_and_back() -> None:
        cache.rollback(cache.checkpoint())

    def forked() -> None:
        start = cache.arena.checkpoint()
        cache.fork()
        cache.arena.rollback(start)  # as the other copies die when they are dropped

    def fork_to_read() -> Any:
        start = cache.arena.checkpoint()
        fork = cache.fork()
        kept = [tuple(one.clone() for one in fork.read(number)) for number in range(setup.layers)]
        cache.arena.rollback(start)
        return kept

    variants = {
        name: Variant(deepcopied, wanted=lambda: halves(prompt), given=_held_by),
        "checkpoint, append a token, rollback": Variant(rolled_back, wanted=lambda: halves(with_token)),
        "checkpoint, rollback": Variant(
            there_and_back,
            wanted=lambda: halves(prompt),
            given=lambda _: [cache.read(number) for number in range(setup.layers)],
        ),
        "fork, rollback of the arena": Variant(
            forked, wanted=lambda: halves(prompt), given=lambda _: fork_to_read()
        ),
        **_paged_variants(setup, prompt, tokens, page_size, with_token),
    }
    return setup.group(title, variants, "checkpoint, append a token, rollback")


def _deepcopied(prompt: list[Any]) -> tuple[str, Callable[[], Any]]:
    """Return a way to copy the prompt, and its name."""
    found = transformers_or_none()
    if found is None:
        held: Any = [(keys.clone(), values.clone()) for keys, values in halves(prompt)]
        return "copy.deepcopy of a list of tensors", lambda: copy.deepcopy(held)
    held = found.DynamicCache()
    for number, (keys, values) in enumerate(halves(prompt)):
        held.update(keys, values, number)
    return "copy.deepcopy(DynamicCache)", lambda: copy.deepcopy(held)


def _held_by(cache: Any) -> Any:
    if isinstance(cache, list):
        return cache
    return [(layer.keys, layer.values) for layer in cache.layers]


def _paged_variants(
    setup: Setup, prompt: list[Any], tokens: list[Token], page_size: int, with_token: list[Any]
) -> dict[str, Variant]:
    from gpuarena.kv.paged import PagedKVCache

    spec = setup.spec()
    num_pages = -(-prompt[0].shape[3] // page_size) + 1  # the last for the copy on write
    sizes: dict[str, Any] = {"num_pages": num_pages, "page_size": page_size, "gather_tokens": 0}
    arena = Arena(PagedKVCache.arena_nbytes(spec, **sizes), backend="torch", device=setup.device.name)
    cache = PagedKVCache(arena, spec, **sizes)
    sequence = cache.sequence()
    for number, pair in enumerate(prompt):
        sequence.append(number, pair[0], pair[1])

    def append(fork: Any, token: Token) -> None:
        for number, (keys, values) in enumerate(token.halves):
            fork.append(number, keys, values)

    turn = itertools.cycle(tokens)

    def forked() -> None:
        fork = sequence.fork()
        append(fork, next(turn))
        fork.free()

    def fork_to_read() -> Any:
        fork = sequence.fork()
        append(fork, tokens[0])
        kept = [tuple(one[None] for one in fork.read(number)) for number in range(setup.layers)]
        fork.free()
        return kept

    return {
        "paged: fork, append a token, free": Variant(
            forked, wanted=lambda: halves(with_token), given=lambda _: fork_to_read()
        )
    }


# -- going back ---------------------------------------------------------------------------------------------------


def _truncate_group(setup: Setup, lengths: tuple[int, ...], title: str) -> Group:
    """Time a cut by one token of all layers."""
    variants: dict[str, Variant] = {}
    for n_held in lengths:
        variants.update(_cuts(setup, n_held))
    return setup.group(title, variants, f"KVCache.truncate, {lengths[0]} held")


def _cuts(setup: Setup, n_held: int) -> Iterator[tuple[str, Variant]]:
    prompt, new = setup.pairs(n_held, seed=9), tokens_of(setup, _N_CUTS)
    cache = _filled(setup.cache(setup.spec(), n_held + _N_CUTS), prompt)
    checkpoints: list[Any] = []

    def fill() -> None:
        checkpoints.clear()
        for token in new:
            checkpoints.append(cache.checkpoint())
            for number, (keys, values) in enumerate(token.halves):
                cache.append(number, keys, values)

    def truncate() -> None:
        for number in range(_N_CUTS):
            cache.truncate(n_held + _N_CUTS - 1 - number)

    def rollback() -> None:
        for checkpoint in reversed(checkpoints):
            cache.rollback(checkpoint)

    def options() -> dict[str, Any]:
        return {
            "n": _N_CUTS,
            "wanted": lambda: halves(prompt),
            "given": lambda _: [cache.read(number) for number in range(setup.layers)],
        }

    yield f"KVCache.truncate, {n_held} held", Variant(truncate, ready=fill, **options())
    yield f"KVCache.rollback, {n_held} held", Variant(rollback, ready=fill, **options())
    found = transformers_or_none()
    if found is not None:
        yield f"DynamicCache.crop, {n_held} held", _crop(setup, found, prompt, new)


def _crop(setup: Setup, found: Any, prompt: list[Any], new: list[Token]) -> Variant:
    whole = [
        torch.cat([pair, *(token.pairs[number] for token in new)], dim=3)
        for number, pair in enumerate(prompt)
    ]
    cache = found.DynamicCache()
    for number, (keys, values) in enumerate(halves(whole)):
        cache.update(keys, values, number)

    def fill() -> None:
        for layer, (keys, values) in zip(cache.layers, halves(whole), strict=True):
            layer.keys, layer.values = keys, values

    def crop() -> None:
        for _ in range(_N_CUTS):
            cache.crop(-1)

    return Variant(crop, _N_CUTS, ready=fill, wanted=lambda: halves(prompt), given=lambda _: _held_by(cache))
