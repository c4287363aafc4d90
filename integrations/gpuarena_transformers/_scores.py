"""Attention whose scores are capped or share their softmax with a sink, without a copy of keys for each query head.

>>> query, key = torch.ones(1, 6, 1, 8), torch.ones(1, 2, 5, 8)  # 6 query heads, 2 key/value heads
>>> attend_by_scores(query, key, key, None, scale=0.5, softcap=30.0).shape
torch.Size([1, 6, 1, 8])

Scaled dot product attention (SDPA) hides its scores, and models with a soft cap or with sinks come with an eager
function, which repeats keys and values for each query head and holds the scores of all queries at once. Here the
group is folded into the queries, as in `gpuarena.kv.attention`; keys and values are converted to float32 in parts
that stay in a CPU's cache, since many CPUs multiply bfloat16 by software; and the scores are those of a block of
queries at a time::

    scores  [batch, kv_heads, group * n, n_keys] float32  ->  cap  ->  mask  ->  softmax with sinks  ->  values
"""

from __future__ import annotations

import torch

__all__ = ["attend_by_scores"]

#: Keys, and values, that are converted at once: with a head_dim of 128 half a megabyte a head. 256 and 4096 were
#: slower, by up to a tenth and up to a half.
_KEYS_AT_ONCE = 1024

#: Scores that are held at once, 16 MiB of float32, of which a few copies live at the same time.
_SCORES_AT_ONCE = 2**22


def attend_by_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    is_causal: bool = False,
) -> torch.Tensor:
    """Return attention computed in float32, ``[batch, n_queries, q_heads, value_dim]`` of the query's dtype.

    Parameters
    ----------
    query : [batch, q_heads, n_queries, key_dim]
    key : [batch, kv_heads, n_keys, key_dim]
    value : [batch, kv_heads, n_keys, value_dim]
    mask : [batch or 1, q_heads or 1, n_queries or 1, n_keys], optional
        Boolean (True attends) or additive. A query that may attend to nothing gets the mean of all values, as
        from eager functions, or with a sink zeros.
    scale : float
    softcap : float, optional
        Scores become ``softcap * tanh(scores / softcap)``, before the mask.
    sinks : [q_heads], optional
        One more score for each query, behind which there is no value.
    is_causal : bool
        Query i sees keys 0 to i, besides the mask; it spares the work on keys that a block does not see.

    Notes
    -----
    Nothing is checked. Gradients are those of the formula; float64 stays float64.
    """
    batch, q_heads, n_queries = key.shape[0], query.shape[1], query.shape[2]
    kv_heads, n_keys = key.shape[1], key.shape[2]
    dtype = torch.promote_types(query.dtype, torch.float32)
    scaled = query.to(dtype) * scale
    scored_sinks = None if sinks is None else sinks.to(dtype).reshape(1, kv_heads, -1, 1, 1)
    # Loops over parts would make a graph of each number of keys.
    whole = torch.compiler.is_compiling()
    keys_at_once = n_keys if whole else _KEYS_AT_ONCE
    n_rows = n_queries if whole else max(1, _SCORES_AT_ONCE // max(1, batch * q_heads * n_keys))
    if n_queries <= n_rows:
        if is_causal:
            mask = _and_causal(mask, 0, n_queries, n_keys, query.device)
        out = _block(scaled, key, value, mask, softcap, scored_sinks, keys_at_once)
        return out.to(query.dtype).transpose(1, 2).contiguous()
    blocks = []
    for start in range(0, n_queries, n_rows):
        stop = min(start + n_rows, n_queries)
        seen = min(stop, n_keys) if is_causal else n_keys
        part = mask
        if part is not None:
            part = (part if part.shape[2] == 1 else part[:, :, start:stop])[..., :seen]
        if is_causal:
            part = _and_causal(part, start, stop, seen, query.device)
        out = _block(
            scaled[:, :, start:stop],
            key[:, :, :seen],
            value[:, :, :seen],
            part,
            softcap,
            scored_sinks,
            keys_at_once,
        )
        blocks.append(out.to(query.dtype))
    return torch.cat(blocks, dim=2).transpose(1, 2).contiguous()


def _block(
    query: torch.Tensor,  # [batch, q_heads, n, key_dim], scaled, of the dtype to compute in
    key: torch.Tensor,  # [batch, kv_heads, n_keys, key_dim]
    value: torch.Tensor,  # [batch, kv_heads, n_keys, value_dim]
    mask: torch.Tensor | None,  # [batch or 1, q_heads or 1, n or 1, n_keys]
    softcap: float | None,
    sinks: torch.Tensor | None,  # [1, kv_heads, group, 1, 1]
    keys_at_once: int,
) -> torch.Tensor:  # [batch, q_heads, n, value_dim]
    q_heads, n, key_dim = query.shape[1:]
    kv_heads, n_keys = key.shape[1:3]
    group, dtype = q_heads // kv_heads, query.dtype
    folded = query.reshape(query.shape[0], kv_heads, group * n, key_dim)
    parts = [folded @ part.to(dtype).transpose(2, 3) for part in torch.split(key, keys_at_once, dim=2)]
    scores = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.reshape(scores.shape[0], kv_heads, group, n, n_keys)
    if mask is not None:
        mask = mask[:, :, None] if mask.shape[1] == 1 else torch.unflatten(mask, 1, (kv_heads, group))
        if mask.dtype == torch.bool:
            # The least finite number: a query that sees nothing gives no NaN, which zero weights would spread.
            scores = scores.masked_fill(~mask, torch.finfo(dtype).min)
        else:
            scores = scores + mask.to(dtype)
    most = scores.amax(dim=-1, keepdim=True).detach()
    if sinks is not None:
        most = torch.maximum(most, sinks.detach())
    weights = (scores - most).exp()
    total = weights.sum(dim=-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks - most).exp()
    weights = weights.reshape(weights.shape[0], kv_heads, group * n, n_keys)
    # Divided at the end, where there are head_dim numbers a query instead of n_keys.
    out = torch.zeros((), dtype=dtype, device=query.device)
    for part, values in zip(
        torch.split(weights, keys_at_once, dim=-1), torch.split(value, keys_at_once, dim=2), strict=True
    ):
        out = out + part @ values.to(dtype)
    out = out.reshape(out.shape[0], kv_heads, group, n, value.shape[3]) / total
    return out.reshape(out.shape[0], q_heads, n, value.shape[3])


def _and_causal(
    mask: torch.Tensor | None, start: int, stop: int, n_keys: int, device: torch.device
) -> torch.Tensor:
    """Return a mask for queries `start` to `stop` that hides the future, too: ``[.., .., stop - start, n_keys]``."""
    causal = torch.ones(1, 1, stop - start, n_keys, dtype=torch.bool, device=device).tril(diagonal=start)
    if mask is None:
        return causal
    if mask.dtype == torch.bool:
        return mask & causal
    return mask.masked_fill(~causal, torch.finfo(mask.dtype).min)
