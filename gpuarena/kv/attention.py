"""Attention that reads each key and value byte once, for torch.

With grouped heads several query heads share one key/value head. `attend` makes them queries of that head instead of
heads of their own, a view of the query and nothing else::

    [batch, kv_heads * group, n, dim]  ->  [batch, kv_heads, group * n, dim]
"""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Real
from typing import Any

import torch
import torch.nn.functional as F

from gpuarena.errors import ArgumentError, ArgumentTypeError, DeviceMismatchError, DTypeError, ShapeError
from gpuarena.kv.spec import positive

__all__ = ["attend", "causal_mask"]

#: Up to so many queries a key/value head the group is folded although a mask has to be repeated for it. With more
#: the fold is at most a third faster than torch's own grouping, and its mask takes more memory than 2 heads of keys
#: and values of dim 128 in bfloat16 do. ``gpuarena bench attention`` measures both.
FOLD_MAX_QUERIES = 192

#: What torch has attention for on every device.
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

#: A window so wide, in tokens, is none: no position is as large, and int64 can subtract it from any.
_NO_WINDOW = 2**62


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    sinks: int = 0,
    lengths: Iterable[int] | torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from the last `n` tokens to all of them, causally.

    >>> q, k = torch.ones(2, 6, 1, 8), torch.ones(2, 2, 5, 8)  # 6 query heads, 2 key/value heads
    >>> attend(q, k, k).shape
    torch.Size([2, 6, 1, 8])

    Parameters
    ----------
    q : ``[batch, q_heads, n, key_dim]``
        `q_heads` is a multiple of `kv_heads`; query head h attends to key/value head ``h // (q_heads // kv_heads)``.
    keys : ``[batch, kv_heads, tokens, key_dim]``
    values : ``[batch, kv_heads, tokens, value_dim]``
        The keys and values of the queries' own tokens included.
    scale : float, optional
        None is ``key_dim ** -0.5``.
    window : int, optional
        A query sees itself and the ``window - 1`` tokens before it; None for all of them.
    sinks : int
        The first tokens, which every query sees in spite of a window. Both count the tokens of `keys`: of a layer with
        `slack` and sinks, which forgets tokens in between, take `KVCache.attend`, or its ``mask``.
    lengths : ``[batch]`` integers, optional
        How many tokens a row has; its queries are the last `n` of those. What lies behind has no weight, but must be
        finite. None for all.
    mask : ``[batch or 1, q_heads or 1, n, tokens]`` bool, optional
        True where a query may attend, besides all of the above.

    Returns
    -------
    ``[batch, q_heads, n, value_dim]``
        Of a query that may attend to nothing it is 0 or NaN, by version of torch and by device.

    Raises
    ------
    ArgumentTypeError
        An argument of another type; or a tensor that is not strided, such as a sparse one.
    ArgumentError
        A number that cannot be, such as a window of 0, or `sinks` without a window.
    ShapeError
        Shapes that do not match, or a length that is less than the queries or more than the tokens.
    DTypeError
        `q`, `keys` and `values` are not of one dtype, or it is none of float16, bfloat16, float32 and float64.
    DeviceMismatchError
        Tensors on different devices; `lengths` may be on any that has memory.
    """
    batch, n, n_tokens = _check(q, keys, values)
    scale = check_scale(scale)
    window = None if window is None else positive(window, "window")
    sinks = positive(sinks, "sinks", least=0)
    if sinks and window is None:
        raise ArgumentError("sinks belong to a window; give window=")
    if window is not None and window >= n_tokens:
        window, sinks = None, 0
    if mask is not None:
        _check_mask(mask, q.device, (batch, q.shape[1], n, n_tokens))
    if lengths is None:
        if n == n_tokens and window is None and mask is None and n > 1:
            return scaled_dot_product(q, keys, values, None, scale=scale, is_causal=True)
        if n == 1 and window is None:
            return scaled_dot_product(q, keys, values, mask, scale=scale)
        positions = torch.arange(n_tokens - n, n_tokens, device=q.device)[None]
    else:
        positions = _last(lengths, batch, n, n_tokens, q.device)
    seen = causal_mask(positions, torch.arange(n_tokens, device=q.device)[None], window, sinks)
    return scaled_dot_product(q, keys, values, seen if mask is None else seen & mask, scale=scale)


def causal_mask(
    queries: torch.Tensor, keys: torch.Tensor, window: int | None = None, sinks: int = 0
) -> torch.Tensor:
    """Return which keys a query may see, ``[batch or 1, 1, n, n_keys]`` bool.

    >>> causal_mask(torch.tensor([[3]]), torch.arange(5)[None], window=2, sinks=1)[0, 0].int().tolist()
    [[1, 0, 1, 1, 0]]

    Parameters
    ----------
    queries : ``[batch or 1, n]`` int
    keys : ``[batch or 1, n_keys]`` int
        The positions of their tokens in the sequence.
    window, sinks
        As for `attend`.
    """
    at, of = keys.to(torch.int64)[:, None, None, :], queries.to(torch.int64)[:, None, :, None]
    seen = at <= of
    if window is None or window >= _NO_WINDOW:
        return seen
    near = at > of - window
    return seen & (near | (at < min(sinks, _NO_WINDOW)) if sinks else near)


def scaled_dot_product(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
) -> torch.Tensor:
    """Return scaled dot product attention, ``[batch, q_heads, n, value_dim]``, of which no key or value is copied.

    The group is folded into the queries where that is faster, and left to torch's `enable_gqa` otherwise.

    Parameters
    ----------
    q, keys, values, scale
        As for `attend`; `q` may be of a batch of 1, for all rows.
    mask : ``[batch or 1, q_heads or 1, n or 1, tokens]``, optional
        Bool, True where a query may attend, or numbers to add to the scores.
    is_causal : bool
        For as many keys as queries.

    Notes
    -----
    Nothing is checked. Keys and values of different dims are copied by `enable_gqa`.
    """
    q_heads, n, dim = q.shape[1:]
    kv_heads = keys.shape[1]
    group = q_heads // kv_heads
    if group == 1 or is_causal or (n > 1 and group * n > FOLD_MAX_QUERIES):
        return F.scaled_dot_product_attention(
            q, keys, values, mask, scale=scale, is_causal=is_causal, enable_gqa=group > 1
        )
    # Query head h belongs to key/value head h // group, so consecutive heads form a group.
    folded = q.reshape(q.shape[0], kv_heads, group * n, dim)
    if mask is not None:
        mask = _fold_mask(mask, kv_heads, group, n)
    out = F.scaled_dot_product_attention(folded, keys, values, mask, scale=scale)
    return out.reshape(out.shape[0], q_heads, n, values.shape[3])


def _fold_mask(mask: torch.Tensor, kv_heads: int, group: int, n: int) -> torch.Tensor:
    """Return ``[batch or 1, kv_heads or 1, group * n or 1, tokens]``; a copy only of a mask that differs by query."""
    rows, heads, queries, n_tokens = mask.shape
    if heads > 1:
        return mask.expand(-1, -1, n, -1).reshape(rows, kv_heads, group * n, n_tokens)
    if queries == 1:
        return mask
    return mask[:, :, None].expand(-1, -1, group, -1, -1).reshape(rows, 1, group * n, n_tokens)


def check_scale(scale: Any) -> Any:
    """Return a scale as torch takes it, or raise `ArgumentTypeError` or `ArgumentError`."""
    if scale is None or type(scale) is float or isinstance(scale, torch.SymFloat):
        return scale
    if isinstance(scale, bool) or not isinstance(scale, Real):
        raise ArgumentTypeError(f"scale must be a number or None, not {type(scale).__name__}")
    try:
        return float(scale)
    except OverflowError:
        raise ArgumentError(f"scale is beyond the largest float: {scale}") from None


def check_dtype(dtype: torch.dtype) -> None:
    """Raise `DTypeError` unless torch has attention for a dtype."""
    if dtype not in _DTYPES:
        raise DTypeError(
            f"attention takes float16, bfloat16, float32 or float64, not {dtype}; convert to one of them",
            dtype=dtype,
        )


def _check_tensor(name: str, tensor: Any) -> None:
    """Raise unless this is a tensor that has a shape and plain memory."""
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentTypeError(f"{name} must be a torch.Tensor, not {type(tensor).__name__}")
    if tensor.layout is not torch.strided or tensor.is_nested:
        layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise ArgumentTypeError(f"{name} must be a strided tensor, not a {layout} one; to_dense() makes one")


def _check(q: Any, keys: Any, values: Any) -> tuple[int, int, int]:
    for name, tensor in (("q", q), ("keys", keys), ("values", values)):
        _check_tensor(name, tensor)
        if tensor.ndim != 4:
            raise ShapeError(
                f"{name}: four dimensions are wanted, not {list(tensor.shape)}", shape=tensor.shape
            )
    if not q.device == keys.device == values.device:
        raise DeviceMismatchError(
            f"q is on {q.device}, keys are on {keys.device} and values on {values.device}; move them to one device"
        )
    if not q.dtype == keys.dtype == values.dtype:
        raise DTypeError(
            f"q is {q.dtype}, keys are {keys.dtype} and values {values.dtype}; convert them to one dtype",
            dtype=q.dtype,
        )
    check_dtype(q.dtype)
    batch, q_heads, n, dim = q.shape
    kv_heads, n_tokens = keys.shape[1:3]
    if (keys.shape[0], keys.shape[3]) != (batch, dim) or values.shape[:3] != keys.shape[:3]:
        raise ShapeError(
            f"q is {list(q.shape)}, keys are {list(keys.shape)} and values {list(values.shape)}: batch, dim, kv_heads "
            f"or tokens disagree",
            shape=tuple(keys.shape),
        )
    if kv_heads == 0 or q_heads % kv_heads:
        raise ShapeError(
            f"{q_heads} query heads are no multiple of {kv_heads} key/value heads", shape=tuple(q.shape)
        )
    if not 1 <= n <= n_tokens:
        raise ShapeError(
            f"{n} queries for {n_tokens} tokens; the queries are the last tokens", shape=tuple(q.shape)
        )
    return batch, n, n_tokens


def _check_mask(mask: Any, device: torch.device, wanted: tuple[int, int, int, int]) -> None:
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
        found = mask.dtype if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ArgumentTypeError(
            f"mask must be a tensor of torch.bool, True where a query may attend, not {found}"
        )
    _check_tensor("mask", mask)
    if mask.device != device:
        raise DeviceMismatchError(f"mask is on {mask.device}, q on {device}; move one of them")
    batch, heads, n, n_tokens = wanted
    shape = tuple(mask.shape)
    if (
        len(shape) != 4
        or shape[0] not in (1, batch)
        or shape[1] not in (1, heads)
        or shape[2:] != (n, n_tokens)
    ):
        raise ShapeError(
            f"mask is {list(shape)}; it has to be [{batch} or 1, {heads} or 1, {n}, {n_tokens}]", shape=shape
        )


def _last(lengths: Any, batch: int, n: int, n_tokens: int, device: torch.device) -> torch.Tensor:
    """Return the positions of the last `n` tokens of each row."""
    if isinstance(lengths, torch.Tensor):
        _check_tensor("lengths", lengths)
        if lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool:
            raise ArgumentTypeError(f"lengths must be integers, not {lengths.dtype}")
        if lengths.device.type == "meta" and device.type != "meta":
            raise DeviceMismatchError(
                f"lengths are on {lengths.device}, where there are no numbers; q is on {device}"
            )
        shape = tuple(lengths.shape)
        # Looking at numbers on a GPU would wait for it.
        numbers = lengths.tolist() if device.type == lengths.device.type == "cpu" and len(shape) == 1 else []
    else:
        try:
            numbers = [positive(length, "a length", least=0) for length in lengths]
        except TypeError as error:
            if isinstance(error, ArgumentTypeError):
                raise
            raise ArgumentTypeError(
                f"lengths must be a list of integers, not {type(lengths).__name__}"
            ) from None
        shape = (len(numbers),)
    if shape != (batch,):
        raise ShapeError(f"lengths are {list(shape)} for {batch} rows", shape=shape)
    if numbers and not n <= min(numbers) <= max(numbers) <= n_tokens:
        raise ShapeError(
            f"lengths {numbers}: each row has at least its {n} queries and at most {n_tokens} tokens",
            shape=shape,
        )
    if isinstance(lengths, torch.Tensor):
        given = lengths.to(device, torch.int64)
    else:
        given = torch.tensor(numbers, dtype=torch.int64, device=device)
    return given[:, None] - n + torch.arange(n, device=device)
