"""What a cache holds per layer, and how many bytes that takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gpuarena import _bump
from gpuarena.dtypes import DType, as_dtype
from gpuarena.errors import ArgumentError, ArgumentTypeError

__all__ = ["KVSpec", "LayerSpec"]

#: Alignment of the scratch, in bytes: of the widest element type (complex128), since rows of any type pass through.
SCRATCH_ALIGNMENT = 16


def positive(value: Any, what: str, *, least: int = 1) -> int:
    """Return `value` as an int of at least `least`, or raise `ArgumentTypeError` or `ArgumentError`."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ArgumentTypeError(f"{what} must be an integer, not {type(value).__name__}")
    number: int = value.__index__()
    if number < least:
        raise ArgumentError(f"{what} must be at least {least}, not {number}")
    return number


@dataclass(frozen=True)
class LayerSpec:
    """One layer: keys ``[batch, kv_heads, tokens, key_dim]`` and values ``[batch, kv_heads, tokens, value_dim]``.

    >>> LayerSpec(kv_heads=1, key_dim=512, value_dim=64, dtype="bfloat16").bytes_per_token  # MLA
    1152

    Parameters
    ----------
    kv_heads, key_dim, value_dim : int
    dtype
        Of the keys, and of the values unless `value_dtype` says otherwise.
    window : int, optional
        A query sees itself and the ``window - 1`` tokens before it; None for all of them. The whole history
        is stored in any case.
    value_dtype : optional
        None for `dtype`.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: DType
    window: int | None = None
    value_dtype: DType = None  # type: ignore[assignment]  # None stands for `dtype`; never None after __post_init__

    def __post_init__(self) -> None:
        for field in ("kv_heads", "key_dim", "value_dim"):
            object.__setattr__(self, field, positive(getattr(self, field), field))
        if self.window is not None:
            object.__setattr__(self, "window", positive(self.window, "window"))
        object.__setattr__(self, "dtype", as_dtype(self.dtype))
        value_dtype = self.dtype if self.value_dtype is None else as_dtype(self.value_dtype)
        object.__setattr__(self, "value_dtype", value_dtype)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token of one sequence, keys and values."""
        return self.kv_heads * (
            self.key_dim * self.dtype.itemsize + self.value_dim * self.value_dtype.itemsize
        )

    def region_nbytes(self, batch: int, tokens: int) -> tuple[int, int]:
        """Return the bytes of the key region and of the value region."""
        rows = batch * self.kv_heads * tokens
        return rows * self.key_dim * self.dtype.itemsize, rows * self.value_dim * self.value_dtype.itemsize


@dataclass(frozen=True)
class KVSpec:
    """The layers of a model's cache.

    >>> spec = KVSpec.uniform(layers=28, kv_heads=2, head_dim=128, dtype="bfloat16")  # Qwen2.5-1.5B
    >>> spec.bytes_per_token, spec.nbytes(batch=4, tokens=8192)
    (28672, 939524096)
    >>> spec.max_tokens("1GiB", batch=1)
    37449
    """

    layers: tuple[LayerSpec, ...]

    def __init__(self, layers: Iterable[LayerSpec]) -> None:
        object.__setattr__(self, "layers", tuple(layers))
        if not self.layers:
            raise ArgumentError("a KVSpec needs at least one layer")
        for layer in self.layers:
            if not isinstance(layer, LayerSpec):
                raise ArgumentTypeError(f"a KVSpec is made of LayerSpec, not {type(layer).__name__}")

    @classmethod
    def uniform(
        cls, *, layers: int, kv_heads: int, head_dim: int, dtype: Any, window: int | None = None
    ) -> KVSpec:
        """Return the spec of a model whose layers are all alike, `head_dim` wide in keys and values."""
        layer = LayerSpec(kv_heads, head_dim, head_dim, as_dtype(dtype), window)
        return cls((layer,) * positive(layers, "layers"))

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token of one sequence, over all layers."""
        return sum(layer.bytes_per_token for layer in self.layers)

    def nbytes(self, batch: int, tokens: int) -> int:
        """Return the bytes of the keys and values of `batch` sequences of `tokens` tokens."""
        return self.bytes_per_token * positive(batch, "batch") * positive(tokens, "tokens", least=0)

    def arena_nbytes(self, batch: int, tokens: int, *, alignment: int = 256) -> int:
        """Return the bytes that `KVCache` takes of an arena: `nbytes`, its scratch and the alignment of each.

        A single sequence needs no scratch, since it has no rows to reorder. The padding behind the last region is
        counted too, so that the order of the regions makes no difference.

        Parameters
        ----------
        batch, tokens : int
        alignment : int
            That of the arena, in bytes.
        """
        batch, tokens = positive(batch, "batch"), positive(tokens, "tokens", least=0)
        sizes = [nbytes for layer in self.layers for nbytes in layer.region_nbytes(batch, tokens)]
        if batch > 1:
            sizes.append(max(sizes))
            alignment = max(alignment, SCRATCH_ALIGNMENT)
        # A region pads up to its own alignment; with the largest for all, the sum is never too small.
        alignment = max(alignment, *(max(s.dtype.alignment, s.value_dtype.alignment) for s in self.layers))
        return sum(_bump.align_up(nbytes, alignment) for nbytes in sizes)

    def max_tokens(self, nbytes: int | str, batch: int = 1, *, alignment: int = 256) -> int:
        """Return the most tokens a sequence can have when `batch` of them share `nbytes` of an arena; 0 if none."""
        from gpuarena._units import parse_nbytes

        budget = parse_nbytes(nbytes, what="nbytes")
        low, high = 0, budget // (self.bytes_per_token * positive(batch, "batch"))
        while low < high:  # arena_nbytes grows with tokens
            middle = (low + high + 1) // 2
            if self.arena_nbytes(batch, middle, alignment=alignment) <= budget:
                low = middle
            else:
                high = middle - 1
        return low
