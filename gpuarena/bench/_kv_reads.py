"""Reading: attention of one new token over a view, over pages, and over what is stored quantised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from gpuarena.arena import Arena
from gpuarena.bench._kv_setup import Setup
from gpuarena.bench.harness import Group, Variant
from gpuarena.kv import KVCache
from gpuarena.kv.attention import attend

__all__ = ["quantized_groups", "read_groups"]

VIEW = "view, attend"
#: Calls in a sample.
_N_CALLS = 8
#: Of outputs, as a part of the largest: rounding alone.
_TOLERANCE = {"bfloat16": 0.03, "float32": 1e-4}
#: How far an output may be off because of what is stored; the errors of many tokens cancel in part.
_STORAGE_TOLERANCE = {"int8": 0.05, "float8_e4m3fn": 0.15, "int4": 0.4}


def read_groups(setup: Setup) -> Iterator[Group]:
    """Time attention of one step in one layer, with pages that lie in no order."""
    for n_held in _lengths(setup):
        yield _read_group(setup, n_held)


def _lengths(setup: Setup) -> tuple[int, ...]:
    return (16, 64) if setup.quick else (512, 2048, 8192)


def _read_group(setup: Setup, n_held: int) -> Group:
    pair, q = _pair(setup, n_held), _query(setup)
    cache = _linear(setup, pair)

    def stock() -> Any:
        keys, values = cache.read(0)
        return F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)

    bodies: dict[str, Callable[[], Any]] = {
        VIEW: lambda: attend(q, *cache.read(0)),
        "view, scaled_dot_product_attention": stock,
    }
    for page_size in (16, 256):
        bodies[f"pages of {page_size}, gather, attend"] = _paged(setup, pair, q, page_size)
    variants = {
        name: Variant(
            _repeated(body), _N_CALLS, wanted=lambda: _oracle(q, pair), tolerance=_TOLERANCE[setup.dtype]
        )
        for name, body in bodies.items()
    }
    return setup.group(
        f"attention of one token, {n_held} held, 1 layer, {setup.q_heads} query heads", variants, VIEW
    )


def quantized_groups(setup: Setup) -> Iterator[Group]:
    """Time the same over keys and values that are stored quantised."""
    for n_held in _lengths(setup):
        yield _quantized_group(setup, n_held)


def _quantized_group(setup: Setup, n_held: int) -> Group:
    pair, q = _pair(setup, n_held), _query(setup)

    def variant(storage: str | None, tolerance: float) -> Variant:
        cache = _linear(setup, pair, storage=storage)
        per_token = cache.spec.bytes_per_token
        return Variant(
            _repeated(lambda: attend(q, *cache.read(0))),
            _N_CALLS,
            wanted=lambda: _oracle(q, pair),
            tolerance=tolerance,
            figures={"bytes_per_token": per_token},
        )

    variants = {VIEW: variant(None, _TOLERANCE[setup.dtype])}
    for storage, tolerance in _STORAGE_TOLERANCE.items():
        variants[f"{storage}, read, attend"] = variant(storage, tolerance)
    return setup.group(
        f"attention over quantised tokens, {n_held} held, 1 layer, {setup.q_heads} query heads",
        variants,
        VIEW,
    )


def _pair(setup: Setup, n_held: int) -> Any:
    return setup.pairs(n_held, seed=n_held, layers=1)[0]


def _query(setup: Setup) -> torch.Tensor:
    generator = torch.Generator(setup.device).manual_seed(1)
    shape = (1, setup.q_heads, 1, setup.head_dim)
    return torch.randn(shape, generator=generator, device=setup.device).to(setup.torch_dtype)


def _repeated(body: Callable[[], Any]) -> Callable[[], Any]:
    def repeated() -> Any:
        for _ in range(_N_CALLS - 1):
            body()
        return [body()]

    return repeated


def _oracle(q: torch.Tensor, pair: torch.Tensor) -> list[torch.Tensor]:
    """Return the attention, written out in float32."""
    keys, values = (
        half.float().repeat_interleave(q.shape[1] // half.shape[1], dim=1) for half in (pair[0], pair[1])
    )
    weights = torch.softmax(q.float() @ keys.transpose(2, 3) / q.shape[3] ** 0.5, dim=3)
    return [(weights @ values).to(q.dtype)]


def _linear(setup: Setup, pair: torch.Tensor, **options: Any) -> KVCache:
    cache = setup.cache(setup.spec(layers=1, **options), pair.shape[3])
    cache.append(0, pair[0], pair[1])
    return cache


def _paged(setup: Setup, pair: torch.Tensor, q: torch.Tensor, page_size: int) -> Callable[[], Any]:
    from gpuarena.kv.paged import PagedKVCache

    spec, n_held = setup.spec(layers=1), pair.shape[3]
    n_pages = -(-n_held // page_size)
    sizes: dict[str, Any] = {
        "num_pages": 2 * n_pages,
        "page_size": page_size,
        "gather_tokens": n_pages * page_size,
    }
    arena = Arena(PagedKVCache.arena_nbytes(spec, **sizes), backend="torch", device=setup.device)
    cache = PagedKVCache(arena, spec, **sizes)
    # Sequences that grow side by side get every other page, as it is with more than one user.
    sequence, other = cache.sequence(), cache.sequence()
    for first in range(0, n_held, page_size):
        piece = pair[:, :, :, first : first + page_size]
        for one in (other, sequence):
            one.append(0, piece[0], piece[1])
    return lambda: cache.attend(0, q, [sequence])
