"""Quantised keys and values: the formats, and how arrays are brought into them and back.

======================  =======================  ======================================  =================
storage                 codes                    scales                                  bytes at dim 128
======================  =======================  ======================================  =================
``"int8"``              `dim` int8               one float32                             132
``"float8_e4m3fn"``     `dim` float8_e4m3fn      one float32                             132
``"int4"``              two to a uint8, then a   one bfloat16 a group of 32 elements     76
                        zero point a group
======================  =======================  ======================================  =================

All of it is per token and head, so a token is stored the same whatever it is appended with.

- int8: ``x = code * scale``, with the scale ``max|x| / 127``; off by half a scale at most.
- float8_e4m3fn: as int8, with ``max|x| / 448``; off by a 16th of x, and by ``scale / 1024`` near 0.
- int4: ``x = (code - zero) * scale``, with the scale ``(max(x, 0) - min(x, 0)) / 15`` of the group, so that 0 is
  exact and codes are not spent on a sign that the group lacks. Byte j holds element j in its low half and element
  ``j + ceil(dim / 2)`` in its high half; what an odd dim leaves over is 0. Off by 5/8 of a scale at most, which
  is rounded towards 0: half for the nearest code, an eighth for the largest number, which 15 codes may not reach.

Why int4 has a zero point: at 4.75 bits an element, its error (root mean square, by the standard deviation) is
0.081 for Gaussian numbers and 0.109 with two channels in 128 that are 15 times as large. A symmetric scale has 0.097
and 0.180 at 4.5 bits, 0.085 and 0.128 at 5 bits in groups of 16, and 0.086 and 0.164 at 4.5 bits where the largest
number decides which sign gets the code more.

A token with a NaN or an infinity reads back as NaN in all elements of that head (of that group of them, in int4),
and no other token or head is touched: to raise, a GPU would have to be waited for. The same is true of float64
numbers that float32 does not reach.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from gpuarena.errors import ArgumentError

__all__ = ["GROUP_SIZE", "STORAGES", "VALUE_DTYPES", "dequantize", "quantize", "stored_buffers"]

STORAGES = ("int8", "float8_e4m3fn", "int4")
#: Of what is quantised, and of what comes back.
VALUE_DTYPES = ("float16", "bfloat16", "float32", "float64")
#: Elements that share a scale in int4.
GROUP_SIZE = 32

_LARGEST_CODE = {"int8": 127.0, "float8_e4m3fn": 448.0}
#: The smallest normal number: a smaller scale would lose bits, and the scale 0 could not be divided by.
_LEAST_SCALE = 2.0**-126
_FLOAT32_MAX = float(np.finfo(np.float32).max)
#: 127 times this is finite, which it is not for what float32 makes of its largest number / 127.
_MOST_INT8_SCALE = float(np.nextafter(np.float32(_FLOAT32_MAX / 127), np.float32(0)))
#: Elements that are converted at once, for temporaries that stay in the cache of a core, or small on a GPU.
_HOST_CHUNK, _DEVICE_CHUNK = 1 << 17, 1 << 22


def stored_buffers(dim: int, storage: str) -> tuple[tuple[str, str, int], ...]:
    """Return what is stored per token and head, ``(suffix, dtype name, elements)`` a buffer.

    >>> stored_buffers(128, "int8")
    (('codes', 'int8', 128), ('scales', 'float32', 1))
    >>> stored_buffers(33, "int4")  # 17 bytes of codes and a zero point for each of two groups
    (('codes', 'uint8', 19), ('scales', 'bfloat16', 2))

    Raises
    ------
    ArgumentError
        There is no such storage.
    """
    if storage == "int4":
        n_groups = -(-dim // GROUP_SIZE)
        return (("codes", "uint8", -(-dim // 2) + n_groups), ("scales", "bfloat16", n_groups))
    if storage in STORAGES:
        return (("codes", storage, dim), ("scales", "float32", min(dim, 1)))
    raise ArgumentError(
        f"storage {storage!r}: there are {', '.join(map(repr, STORAGES))}; None stores as it is"
    )


def quantize(values: Any, storage: str, codes: Any, scales: Any) -> None:
    """Write `values` to `codes` and `scales`.

    Temporaries are bounded, whatever the number of tokens.

    Parameters
    ----------
    values : ``[rows, kv_heads, tokens, dim]``
        Of a dtype of `VALUE_DTYPES`; a tensor, or a NumPy array.
    storage : str
    codes, scales : ``[rows, kv_heads, tokens, elements]``
        Of the same library, with the dtypes and elements of `stored_buffers`; may be strided.
    """
    if not values.size if isinstance(values, np.ndarray) else not values.numel():
        return
    write = _write_numpy if isinstance(values, np.ndarray) else _write_torch
    for part in _chunks(values, bounded=True):
        write(values[part], storage, codes[part], scales[part])


def dequantize(codes: Any, scales: Any, storage: str, out: Any) -> None:
    """Write to `out` what `quantize` stored in `codes` and `scales`.

    Allocates nothing for float32, nor on a GPU or in NumPy; on a CPU torch makes temporaries of bounded size
    for the other dtypes, and for the scales of int4.

    Parameters
    ----------
    codes, scales : ``[rows, kv_heads, tokens, elements]``
        As `stored_buffers` says; may be strided.
    storage : str
    out : ``[rows, kv_heads, tokens, dim]``
        Of a dtype of `VALUE_DTYPES`; the last dimension contiguous.
    """
    if not out.size if isinstance(out, np.ndarray) else not out.numel():
        return
    read = _read_numpy if isinstance(out, np.ndarray) else _read_torch
    for part in _chunks(out, bounded=isinstance(out, np.ndarray) or out.device.type == "cpu"):
        read(codes[part], scales[part], storage, out[part])


def _chunks(array: Any, *, bounded: bool) -> Iterator[tuple[slice, slice, slice]]:
    """Yield what cuts `array` into runs of tokens, only one if not `bounded`."""
    rows, heads, n_tokens, dim = array.shape
    on_host = isinstance(array, np.ndarray) or array.device.type == "cpu"
    step = (
        max(1, (_HOST_CHUNK if on_host else _DEVICE_CHUNK) // (rows * heads * dim)) if bounded else n_tokens
    )
    everything = slice(None)
    for start in range(0, n_tokens, step):
        yield everything, everything, slice(start, start + step)


# ------------------------------------------------------------------------------------------------------------- torch


def _write_torch(values: Any, storage: str, codes: Any, scales: Any) -> None:
    import torch

    x = values.detach().to(torch.float32)
    if storage == "int4":
        _write_int4_torch(x, torch.finfo(values.dtype).max, codes, scales)
        return
    largest = _LARGEST_CODE[storage]
    amax = x.abs().amax(-1, keepdim=True)
    scale = (amax / largest).clamp_(min=_LEAST_SCALE)
    if storage == "int8":
        scale.clamp_(max=_MOST_INT8_SCALE)
    scale += amax * 0.0  # NaN where a number is not finite, and so is what it is multiplied with later
    y = (x / scale).nan_to_num_(nan=0.0)
    if storage == "int8":
        y.round_()
    codes.copy_(y.clamp_(-largest, largest))
    scales.copy_(scale)


def _write_int4_torch(x: Any, most: float, codes: Any, scales: Any) -> None:
    import torch

    dim, n_groups = x.shape[-1], scales.shape[-1]
    group = min(dim, GROUP_SIZE)
    if dim != n_groups * group:
        x = torch.nn.functional.pad(x, (0, n_groups * group - dim))  # 0 is in the range of every group
    x = x.unflatten(-1, (n_groups, group))
    low, high = torch.aminmax(x, dim=-1, keepdim=True)
    low, high = low.clamp_(max=0.0), high.clamp_(min=0.0)
    scale = (high * 0.5 - low * 0.5) / 7.5  # the difference itself may be more than float32 holds
    scale.view(torch.int32).bitwise_and_(-65536)  # the bits that a bfloat16 has
    scale.clamp_(min=_LEAST_SCALE)
    # Halves are rounded up: rounded to even, the ends of a range might come to lie 14 codes apart, not 15.
    zero = (low / scale).nan_to_num_(nan=0.0).add_(0.5).floor_().neg_().clamp_(0, 15)
    # The nearest code of a number close to the largest of its dtype can stand for more than that.
    reach = (min(most, _FLOAT32_MAX) / scale).floor_()
    y = (x / scale).nan_to_num_(nan=0.0).add_(0.5).floor_()
    y = torch.minimum(torch.maximum(y, -reach), reach).nan_to_num_(nan=0.0)
    nibbles = y.add_(zero).clamp_(0, 15).to(torch.uint8).flatten(-2)
    half = (dim + 1) // 2
    packed = codes[..., :half]
    packed.copy_(nibbles[..., :half])
    packed[..., : dim - half].bitwise_or_(nibbles[..., half:dim] << 4)
    codes[..., half:].copy_(zero.squeeze(-1))
    scales.copy_(scale.squeeze(-1))


def _read_torch(codes: Any, scales: Any, storage: str, out: Any) -> None:
    import torch

    if storage != "int4":
        out.copy_(codes)  # exact in all of the dtypes
        torch.mul(out, scales, out=out)  # in float32 at least, rounded once
    else:
        dim, n_groups = out.shape[-1], scales.shape[-1]
        half = (dim + 1) // 2
        low, high = out[..., :half], out[..., half:]
        both = codes[..., : dim - half]
        # In place in the dtype of `out`, which holds these integers exactly: shifts need room for their results.
        high.copy_(both).div_(16).floor_()
        low.copy_(codes[..., :half])
        low[..., : dim - half].sub_(high, alpha=16)
        zeros = codes[..., half:]
        group = min(dim, GROUP_SIZE)
        whole = dim // group  # groups
        parts = [(out[..., : whole * group].unflatten(-1, (whole, group)), slice(0, whole))]
        if whole < n_groups:
            parts.append((out[..., whole * group :].unsqueeze(-2), slice(whole, None)))
        for part, groups in parts:
            torch.sub(part, zeros[..., groups, None], out=part)
            torch.mul(part, scales[..., groups, None], out=part)


# ------------------------------------------------------------------------------------------------------------- NumPy


def _write_numpy(values: Any, storage: str, codes: Any, scales: Any) -> None:
    with np.errstate(all="ignore"):  # of numbers that are not finite
        x = values.astype(np.float32)
        if storage == "int4":
            _write_int4_numpy(x, _largest_number(values.dtype), codes, scales)
            return
        largest = np.float32(_LARGEST_CODE[storage])
        amax = np.abs(x).max(-1, keepdims=True)
        scale = np.maximum(amax / largest, np.float32(_LEAST_SCALE))
        if storage == "int8":
            scale = np.minimum(scale, np.float32(_MOST_INT8_SCALE))
        scale += amax * np.float32(0)
        y = np.nan_to_num(x / scale, nan=0.0)
        if storage == "int8":
            y = np.rint(y)
        codes[...] = np.clip(y, -largest, largest).astype(codes.dtype)
        scales[...] = scale


def _write_int4_numpy(x: Any, most: float, codes: Any, scales: Any) -> None:
    dim, n_groups = x.shape[-1], scales.shape[-1]
    group = min(dim, GROUP_SIZE)
    if dim != n_groups * group:
        x = np.pad(x, [(0, 0)] * 3 + [(0, n_groups * group - dim)])
    x = x.reshape(*x.shape[:-1], n_groups, group)
    low = np.minimum(x.min(-1, keepdims=True), np.float32(0))
    high = np.maximum(x.max(-1, keepdims=True), np.float32(0))
    scale = (high * np.float32(0.5) - low * np.float32(0.5)) / np.float32(7.5)
    scale = (scale.view(np.int32) & np.int32(-65536)).view(np.float32)
    scale = np.maximum(scale, np.float32(_LEAST_SCALE))
    zero = np.clip(-np.floor(np.nan_to_num(low / scale, nan=0.0) + np.float32(0.5)), 0, 15)
    reach = np.floor(np.float32(min(most, _FLOAT32_MAX)) / scale)
    y = np.floor(np.nan_to_num(x / scale, nan=0.0) + np.float32(0.5))
    y = np.nan_to_num(np.minimum(np.maximum(y, -reach), reach), nan=0.0)
    nibbles = np.clip(y + zero, 0, 15).astype(np.uint8).reshape(*x.shape[:-2], n_groups * group)
    half = (dim + 1) // 2
    codes[..., :half] = nibbles[..., :half]
    codes[..., : dim - half] |= nibbles[..., half:dim] << 4
    codes[..., half:] = zero[..., 0].astype(np.uint8)
    scales[...] = scale[..., 0].astype(scales.dtype)


def _read_numpy(codes: Any, scales: Any, storage: str, out: Any) -> None:
    # A ufunc with a dtype and casting converts piece by piece, in a small buffer.
    wide: dict[str, Any] = {"dtype": max(out.dtype, np.dtype(np.float32), key=_itemsize), "casting": "unsafe"}
    with np.errstate(all="ignore"):
        if storage != "int4":
            np.multiply(codes, scales, out=out, **wide)
            return
        dim, n_groups = out.shape[-1], scales.shape[-1]
        half = (dim + 1) // 2
        np.bitwise_and(codes[..., :half], np.uint8(15), out=out[..., :half], casting="unsafe")
        np.right_shift(codes[..., : dim - half], np.uint8(4), out=out[..., half:], casting="unsafe")
        zeros = codes[..., half:]
        for group in range(n_groups):
            part = out[..., group * GROUP_SIZE : (group + 1) * GROUP_SIZE]
            np.subtract(part, zeros[..., group, None], out=part, **wide)
            np.multiply(part, scales[..., group, None], out=part, **wide)


def _itemsize(dtype: Any) -> int:
    return int(dtype.itemsize)


def _largest_number(dtype: Any) -> float:
    import ml_dtypes

    finfo: Any = ml_dtypes.finfo  # has no types; NumPy's does not know bfloat16
    return float(finfo(dtype).max)
