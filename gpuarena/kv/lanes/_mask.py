"""Who may look at what, and attention by it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuarena.errors import BackendError, DTypeError, ShapeError
from gpuarena.kv.spec import LayerSpec

Indices = np.ndarray[Any, np.dtype[np.int64]]


def query_indices(lengths: Sequence[int], counts: Sequence[int] | None, width: int) -> Indices:
    """Return which token of its lane each query is, ``[rows, width]``; negative where it is none.

    The queries are the last tokens of their lane: `width` of them, or the first ``counts[i]`` of row i, behind
    which there is padding.
    """
    ends = np.array(lengths, np.int64).reshape(-1, 1)
    numbers = np.arange(width, dtype=np.int64)[None]
    if counts is None:
        return ends - width + numbers
    held = np.array(counts, np.int64).reshape(-1, 1)
    return np.where(numbers < held, ends - held + numbers, -1)


def mask_of(arena: Any, queries: Indices, longest: int, spec: LayerSpec | None) -> Any:
    """Return a native bool array ``[rows, 1, width, longest]``, True where a query may look."""
    seen: Any = queries[:, None, :, None]  # [rows, 1, width, 1]
    window, sinks = (None, 0) if spec is None else (spec.window, spec.sinks)
    if arena.backend == "torch":
        import torch

        seen = torch.from_numpy(seen).to(arena.device, non_blocking=True)
        tokens: Any = torch.arange(longest, device=arena.device)
    elif arena.backend == "host":
        tokens = np.arange(longest)
    else:
        import cupy

        seen, tokens = cupy.asarray(seen), cupy.arange(longest)
    mask = tokens <= seen
    if window is not None:
        near = tokens > seen - window
        mask &= (near | (tokens < sinks)) if sinks else near
    return mask


def check_queries(arena: Any, ops: Any, layer: int, spec: LayerSpec, q: Any) -> None:
    """Raise unless `attend` can take these queries."""
    if arena.backend != "torch":
        raise BackendError(
            f"attend needs a torch arena, this one is {arena.backend}: read(layer) and mask(layer=layer) give what "
            f"an attention of your own takes"
        )
    ops.check(q, "queries")
    shape = tuple(q.shape)
    if len(shape) != 4 or shape[3] != spec.key_dim or shape[1] % spec.kv_heads or not shape[1]:
        raise ShapeError(
            f"layer {layer}: queries are {list(shape)}, for these keys they must be "
            f"[rows, a multiple of {spec.kv_heads}, tokens, {spec.key_dim}]",
            shape=shape,
        )
    if q.dtype != spec.dtype.torch or spec.dtype != spec.value_dtype:
        raise DTypeError(
            f"layer {layer}: queries are {q.dtype}, keys {spec.dtype} and values {spec.value_dtype}; attention takes "
            f"three of one dtype",
            dtype=q.dtype,
        )
    from gpuarena.kv.attention import check_dtype

    check_dtype(q.dtype)


def checked_scale(scale: Any) -> Any:
    """Return a scale that torch takes, or raise; torch arenas only."""
    from gpuarena.kv.attention import check_scale

    return check_scale(scale)


def attend(
    arena: Any, spec: LayerSpec, q: Any, pair: tuple[Any, Any], queries: Indices, scale: float | None
) -> Any:
    """Return ``[rows, heads, width, value_dim]``, zeros for queries that see nothing."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    keys, values = pair
    longest = keys.shape[2]
    if not q.shape[0] or not q.shape[2] or not longest or not spec.value_dim:
        return q.new_zeros((*q.shape[:3], spec.value_dim))
    unbounded = spec.window is None or spec.window >= longest
    sees_all = unbounded and bool((queries == longest - 1).all())
    # Without a mask torch has faster kernels, which on a GPU take the lower triangle as well.
    is_prompt = unbounded and queries.shape[1] == longest and bool((queries == np.arange(longest)).all())
    out = scaled_dot_product_attention(
        q,
        keys,
        values,
        attn_mask=None if sees_all or is_prompt else mask_of(arena, queries, longest, spec),
        is_causal=is_prompt,
        scale=scale,
        enable_gqa=q.shape[1] != spec.kv_heads,
    )
    blind = queries < 0
    if blind.any():  # the mean of nothing, which some of torch's kernels give as NaN
        out = out.masked_fill(torch.from_numpy(blind).to(out.device)[:, None, :, None], 0)
    return out
