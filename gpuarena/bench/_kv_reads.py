"""Reading: attention of one new token over a view, over pages, and over what is stored quantised.

Each call reads another layer, with another query. A layer that is read again and again stays in the caches of a
processor or a GPU, and its reads look cheaper than any model sees them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from gpuarena.arena import Arena
from gpuarena.bench._collect import Maker
from gpuarena.bench._kv_setup import Setup
from gpuarena.bench.harness import Group, Variant
from gpuarena.kv import KVCache
from gpuarena.kv.attention import attend

__all__ = ["quantized_groups", "read_groups"]

VIEW = "view, attend"
#: Calls in a sample.
_N_CALLS = 8
#: Layers whose keys and values differ; further ones hold the same numbers elsewhere in memory.
_N_DIFFERENT = 8
#: Of outputs, as a part of the largest: rounding alone.
_TOLERANCE = {"bfloat16": 0.03, "float32": 1e-4}
#: How far an output may be off because of what is stored; the errors of many tokens cancel in part.
_STORAGE_TOLERANCE = {"int8": 0.05, "float8_e4m3fn": 0.15, "int4": 0.4}


def read_groups(setup: Setup) -> Iterator[Maker]:
    """Time attention of one step in one layer, with pages that lie in no order."""
    for n_held in _lengths(setup):
        title = f"attention of one token, {n_held} held, 1 layer, {setup.q_heads} query heads"
        yield title, partial(_read_group, setup, n_held)


def _lengths(setup: Setup) -> tuple[int, ...]:
    return (16, 64) if setup.quick else (512, 2048, 8192)


#: Attends with a query in a layer.
_Read = Callable[[torch.Tensor, int], Any]


def _read_group(setup: Setup, n_held: int, title: str) -> Group:
    pairs = _pairs(setup, n_held)
    queries = _queries(setup, len(pairs))
    cache = _linear(setup, pairs)

    def stock(q: torch.Tensor, layer: int) -> Any:
        keys, values = cache.read(layer)
        return F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)

    reads: dict[str, _Read] = {
        VIEW: lambda q, layer: attend(q, *cache.read(layer)),
        "view, scaled_dot_product_attention": stock,
    }
    for page_size in (16, 256):
        reads[f"pages of {page_size}, gather, attend"] = _paged(setup, pairs, page_size)
    wanted = functools.cache(partial(_wanted, queries, pairs))
    variants = {
        name: _variant(read, queries, wanted, _TOLERANCE[setup.dtype]) for name, read in reads.items()
    }
    return setup.group(title, variants, VIEW)


def _variant(
    read: _Read, queries: list[torch.Tensor], wanted: Callable[[], Any], tolerance: float, **figures: float
) -> Variant:
    """Return a variant whose calls take the layers in turn, going on where the last sample stopped."""
    turn = itertools.cycle(enumerate(queries))

    def body() -> Any:
        return [read(q, layer) for layer, q in itertools.islice(turn, _N_CALLS)]

    return Variant(body, _N_CALLS, wanted=wanted, tolerance=tolerance, figures=figures)


def _wanted(queries: list[torch.Tensor], pairs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return what the first sample gives."""
    first = itertools.islice(itertools.cycle(zip(queries, pairs, strict=True)), _N_CALLS)
    return [_oracle(q, pair) for q, pair in first]


def quantized_groups(setup: Setup) -> Iterator[Maker]:
    """Time the same over keys and values that are stored quantised."""
    for n_held in _lengths(setup)[:1] if setup.quick else _lengths(setup):
        title = f"attention over quantised tokens, {n_held} held, 1 layer, {setup.q_heads} query heads"
        yield title, partial(_quantized_group, setup, n_held)


def _quantized_group(setup: Setup, n_held: int, title: str) -> Group:
    pairs = _pairs(setup, n_held)
    queries = _queries(setup, len(pairs))
    wanted = functools.cache(partial(_wanted, queries, pairs))

    def variant(storage: str | None, tolerance: float) -> Variant:
        cache = _linear(setup, pairs, storage=storage)
        per_token = cache.spec.bytes_per_token / len(pairs)
        return _variant(
            lambda q, layer: attend(q, *cache.read(layer)),
            queries,
            wanted,
            tolerance,
            bytes_per_token=per_token,
        )

    variants = {VIEW: variant(None, _TOLERANCE[setup.dtype])}
    for storage, tolerance in _STORAGE_TOLERANCE.items():
        variants[f"{storage}, read, attend"] = variant(storage, tolerance)
    return setup.group(title, variants, VIEW)


def _pairs(setup: Setup, n_held: int) -> list[torch.Tensor]:
    """Return keys and values of as many layers as caches do not hold."""
    n_layers = setup.n_to_rotate(setup.spec(layers=1).bytes_per_token * n_held)
    made = setup.pairs(n_held, seed=n_held, layers=min(n_layers, _N_DIFFERENT))
    return list(itertools.islice(itertools.cycle(made), n_layers))


def _queries(setup: Setup, n: int) -> list[torch.Tensor]:
    generator = torch.Generator(setup.torch_device).manual_seed(1)
    shape = (n, 1, setup.q_heads, 1, setup.head_dim)
    made = torch.randn(shape, generator=generator, device=setup.torch_device).to(setup.torch_dtype)
    return list(made.unbind())


def _oracle(q: torch.Tensor, pair: torch.Tensor) -> torch.Tensor:
    """Return the attention, written out in float32."""
    keys, values = (
        half.float().repeat_interleave(q.shape[1] // half.shape[1], dim=1) for half in (pair[0], pair[1])
    )
    weights = torch.softmax(q.float() @ keys.transpose(2, 3) / q.shape[3] ** 0.5, dim=3)
    return (weights @ values).to(q.dtype)


def _linear(setup: Setup, pairs: list[torch.Tensor], **options: Any) -> KVCache:
    cache = setup.cache(setup.spec(layers=len(pairs), **options), pairs[0].shape[3])
    for layer, pair in enumerate(pairs):
        cache.append(layer, pair[0], pair[1])
    return cache


def _paged(setup: Setup, pairs: list[torch.Tensor], page_size: int) -> _Read:
    from gpuarena.kv.paged import PagedKVCache

    spec, n_held = setup.spec(layers=len(pairs)), pairs[0].shape[3]
    n_pages = -(-n_held // page_size)
    sizes: dict[str, Any] = {
        "num_pages": 2 * n_pages,
        "page_size": page_size,
        "gather_tokens": n_pages * page_size,
    }
    arena = Arena(PagedKVCache.arena_nbytes(spec, **sizes), backend="torch", device=setup.device.name)
    cache = PagedKVCache(arena, spec, **sizes)
    # Sequences that grow side by side get every other page, as it is with more than one user.
    sequence, other = cache.sequence(), cache.sequence()
    for first in range(0, n_held, page_size):
        for one in (other, sequence):
            for layer, pair in enumerate(pairs):
                piece = pair[:, :, :, first : first + page_size]
                one.append(layer, piece[0], piece[1])
    return lambda q, layer: cache.attend(layer, q, [sequence])
