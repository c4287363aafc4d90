"""What a cache holds per layer, and how many bytes that takes."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpuarena import _bump
from gpuarena.dtypes import DType, as_dtype
from gpuarena.errors import ArgumentError, ArgumentTypeError, DTypeError

if TYPE_CHECKING:
    from gpuarena.arena import Arena

__all__ = ["BufferSpec", "KVSpec", "LayerSpec", "SharedLayer"]

#: How the tokens of a cache may lie in memory.
LAYOUTS = ("head-major", "token-major")
#: A growing cache reorders its rows in pieces of at most so many bytes, so that its scratch does not cost what it saves.
_PIECE_NBYTES = 4 << 20
#: Alignment of the scratch, in bytes: of the widest element type (complex128), since rows of any type pass through.
SCRATCH_ALIGNMENT = 16
#: Largest count that is taken; sums of two stay 64-bit integers, which is what array libraries know.
MOST = 2**62


def positive(value: Any, what: str, *, least: int = 1) -> int:
    """Return `value` as an int of at least `least`, or raise `ArgumentTypeError` or `ArgumentError`."""
    try:
        if isinstance(value, bool) or "bool" in str(
            getattr(value, "dtype", "")
        ):  # which have an __index__, too
            raise TypeError
        number = operator.index(value)
    except (
        TypeError,
        ValueError,
        RuntimeError,
    ):  # arrays of several numbers, or without data, raise any of these
        raise ArgumentTypeError(f"{what} must be an integer, not {type(value).__name__}") from None
    if number < least:
        raise ArgumentError(f"{what} must be at least {least}, not {number}")
    return number


def as_arena(value: Any) -> Arena:
    """Return `value` if it is an `Arena`, or raise `ArgumentTypeError`."""
    from gpuarena.arena import Arena

    if not isinstance(value, Arena):
        raise ArgumentTypeError(f"arena must be an Arena, not {type(value).__name__}")
    return value


def as_spec(value: Any) -> KVSpec:
    """Return `value` if it is a `KVSpec`, or raise `ArgumentTypeError`."""
    if not isinstance(value, KVSpec):
        raise ArgumentTypeError(f"spec must be a KVSpec, not {type(value).__name__}")
    return value


@dataclass(frozen=True)
class BufferSpec:
    """One region of a layer, ``[batch, kv_heads, slots, dim]``, or two such in one, ``[2, batch, ...]``."""

    name: str
    """``"keys"``, ``"values"`` or ``"pairs"``, which is both; or what stores them quantised, such as ``"key_codes"``."""
    dtype: DType
    dim: int
    """Elements a token and head."""
    n_planes: int = 1
    """2 for a region of keys and values."""

    @property
    def row_nbytes(self) -> int:
        """Bytes of one token of one head."""
        return self.n_planes * self.dim * self.dtype.itemsize


@dataclass(frozen=True)
class LayerSpec:
    """One layer: keys ``[batch, kv_heads, tokens, key_dim]`` and values ``[batch, kv_heads, tokens, value_dim]``.

    >>> LayerSpec(kv_heads=1, key_dim=512, value_dim=64, dtype="bfloat16").bytes_per_token  # MLA
    1152

    Parameters
    ----------
    kv_heads, key_dim, value_dim : int
        `value_dim` may be 0, where the values are a part of the keys or computed from them.
    dtype
        Of the keys, and of the values unless `value_dtype` says otherwise.
    window : int, optional
        A query sees itself and the ``window - 1`` tokens before it; None for all of them.
    value_dtype : optional
        None for `dtype`.
    sinks : int
        The first tokens, which every query of a layer with a window sees as well (attention sinks).
    slack : int, optional
        None stores the whole history. A number bounds the memory of a layer with a window to
        ``sinks + window + slack`` tokens: the window is moved to the front once in `slack` tokens, and rollback
        reaches no further back than what is still held.
    storage : optional
        None stores what is appended. ``"int8"``, ``"float8_e4m3fn"`` or ``"int4"`` quantises it; see
        `QuantizedLayer`.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: DType
    window: int | None = None
    value_dtype: DType = None  # type: ignore[assignment]  # None stands for `dtype`; never None after __post_init__
    sinks: int = 0
    slack: int | None = None
    storage: str | None = None

    def __post_init__(self) -> None:
        for field, least in (("kv_heads", 1), ("key_dim", 1), ("value_dim", 0), ("sinks", 0)):
            object.__setattr__(self, field, positive(getattr(self, field), field, least=least))
        for field in ("window", "slack"):
            if getattr(self, field) is not None:
                object.__setattr__(self, field, positive(getattr(self, field), field))
        for field in ("window", "sinks", "slack"):
            if (getattr(self, field) or 0) > MOST:
                raise ArgumentError(f"{field} must be at most 2**62 tokens; window=None sees all of them")
        if self.window is None and (self.sinks or self.slack is not None):
            raise ArgumentError("sinks and slack belong to a layer with a window; give window=")
        object.__setattr__(self, "dtype", as_dtype(self.dtype))
        value_dtype = self.dtype if self.value_dtype is None else as_dtype(self.value_dtype)
        object.__setattr__(self, "value_dtype", value_dtype)
        if self.storage is not None:
            self._check_storage(self.storage)

    def _check_storage(self, storage: Any) -> None:
        from gpuarena.kv._quantize import VALUE_DTYPES, stored_buffers

        if not isinstance(storage, str):
            raise ArgumentTypeError(f"storage must be a text or None, not {type(storage).__name__}")
        stored_buffers(self.key_dim, storage)  # says what there is
        if self.slack is not None:
            raise ArgumentError(
                f"slack={self.slack} with storage={storage!r}: quantised layers store the whole history; give one of "
                f"them"
            )
        for what, dtype in (("keys", self.dtype), ("values", self.value_dtype)):
            if dtype.name not in VALUE_DTYPES:
                raise DTypeError(
                    f"{what} of {dtype} cannot be stored as {storage}; {', '.join(VALUE_DTYPES)} can",
                    dtype=dtype,
                )

    @property
    def is_joint(self) -> bool:
        """Whether keys and values lie in one region, since their dims and dtypes agree."""
        return self.storage is None and self.key_dim == self.value_dim and self.dtype == self.value_dtype

    @property
    def is_plain(self) -> bool:
        """Whether every token is stored as it is appended."""
        return self.slack is None and self.storage is None

    @property
    def buffers(self) -> tuple[BufferSpec, ...]:
        """What the layer stores, a region each."""
        if self.storage is not None:
            from gpuarena.kv._quantize import stored_buffers

            return tuple(
                BufferSpec(f"{what}_{suffix}", as_dtype(dtype), n_elements)
                for what, dim in (("key", self.key_dim), ("value", self.value_dim))
                for suffix, dtype, n_elements in stored_buffers(dim, self.storage)
            )
        if self.is_joint:
            return (BufferSpec("pairs", self.dtype, self.key_dim, 2),)
        return (
            BufferSpec("keys", self.dtype, self.key_dim),
            BufferSpec("values", self.value_dtype, self.value_dim),
        )

    def n_slots(self, tokens: int) -> int:
        """Return how many tokens of a row are stored when `tokens` are appended at most."""
        if self.slack is None or self.window is None:
            return tokens
        return min(tokens, self.sinks + self.window + self.slack)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token of one sequence, keys and values."""
        return self.kv_heads * sum(buffer.row_nbytes for buffer in self.buffers)

    def region_nbytes(self, batch: int, tokens: int) -> tuple[int, ...]:
        """Return the bytes of each region of `buffers`."""
        rows = batch * self.kv_heads * self.n_slots(tokens)
        return tuple(rows * buffer.row_nbytes for buffer in self.buffers)

    def scratch_nbytes(self, batch: int, tokens: int) -> int:
        """Return the bytes of scratch that the layer needs, which all layers share.

        More than one row needs room to reorder the rows of keys or values; quantised keys and values need room to be
        read.
        """
        rows = batch * self.kv_heads * self.n_slots(tokens)
        moved = (
            max(rows * buffer.row_nbytes // buffer.n_planes for buffer in self.buffers) if batch > 1 else 0
        )
        if self.storage is None:
            return moved
        keys = _bump.align_up(rows * self.key_dim * self.dtype.itemsize, SCRATCH_ALIGNMENT)
        return max(moved, keys + rows * self.value_dim * self.value_dtype.itemsize)

    @property
    def alignment(self) -> int:
        """The largest alignment that a region of it needs, in bytes."""
        return max(buffer.dtype.alignment for buffer in self.buffers)


@dataclass(frozen=True)
class SharedLayer:
    """A layer that owns nothing: its queries read what layer `source` holds.

    >>> own = LayerSpec(kv_heads=2, key_dim=8, value_dim=8, dtype="float32")
    >>> KVSpec([own, own, SharedLayer(1)]).bytes_per_token
    256
    """

    source: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "source", positive(self.source, "source", least=0))


@dataclass(frozen=True)
class KVSpec:
    """The layers of a model's cache.

    >>> spec = KVSpec.uniform(layers=28, kv_heads=2, head_dim=128, dtype="bfloat16")  # Qwen2.5-1.5B
    >>> spec.bytes_per_token, spec.nbytes(batch=4, tokens=8192)
    (28672, 939524096)
    >>> spec.max_tokens("1GiB", batch=1)
    37449

    Parameters
    ----------
    layers : iterable of LayerSpec and SharedLayer
        A shared layer names an earlier one that owns its keys and values.
    """

    layers: tuple[LayerSpec | SharedLayer, ...]

    def __init__(self, layers: Iterable[LayerSpec | SharedLayer]) -> None:
        try:
            object.__setattr__(self, "layers", tuple(layers))
        except TypeError as error:
            raise ArgumentTypeError(f"layers must be an iterable of LayerSpec: {error}") from None
        if not self.layers:
            raise ArgumentError("a KVSpec needs at least one layer")
        for number, layer in enumerate(self.layers):
            if isinstance(layer, SharedLayer):
                if layer.source >= number or isinstance(self.layers[layer.source], SharedLayer):
                    raise ArgumentError(
                        f"layer {number} shares layer {layer.source}, which is no earlier layer of its own"
                    )
            elif not isinstance(layer, LayerSpec):
                raise ArgumentTypeError(
                    f"a KVSpec is made of LayerSpec and SharedLayer, not {type(layer).__name__}"
                )

    @classmethod
    def uniform(
        cls,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: Any,
        window: int | None = None,
        **options: Any,
    ) -> KVSpec:
        """Return the spec of a model whose layers are all alike, `head_dim` wide in keys and values.

        `options` are those of `LayerSpec`: ``slack``, ``sinks``, ``storage``, ``value_dtype``.
        """
        layer = LayerSpec(kv_heads, head_dim, head_dim, as_dtype(dtype), window, **options)
        return cls((layer,) * positive(layers, "layers"))

    @property
    def owned(self) -> Iterator[tuple[int, LayerSpec]]:
        """The layers that own keys and values, each with its number."""
        return ((number, layer) for number, layer in enumerate(self.layers) if isinstance(layer, LayerSpec))

    def owner(self, layer: int) -> int:
        """Return the number of the layer that owns the keys and values of `layer`.

        Raises
        ------
        ArgumentTypeError, ArgumentError
            Not an integer, or there is no such layer.
        """
        number = positive(layer, "layer", least=0)
        if number >= len(self.layers):
            raise ArgumentError(f"layer {number}: the spec has layers 0 to {len(self.layers) - 1}")
        found = self.layers[number]
        return found.source if isinstance(found, SharedLayer) else number

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token of one sequence, over all layers, as long as no bounded window is full."""
        return sum(layer.bytes_per_token for _, layer in self.owned)

    def nbytes(self, batch: int, tokens: int) -> int:
        """Return the bytes of the keys and values of `batch` sequences of `tokens` tokens."""
        batch, tokens = positive(batch, "batch"), positive(tokens, "tokens", least=0)
        return sum(sum(layer.region_nbytes(batch, tokens)) for _, layer in self.owned)

    def scratch_nbytes(self, batch: int, tokens: int, *, layout: str = "head-major") -> int:
        """Return the bytes of the scratch that all layers of a `KVCache` share."""
        needed = max(layer.scratch_nbytes(batch, tokens) for _, layer in self.owned)
        if layout == "head-major":
            return needed
        least = max(layer.scratch_nbytes(batch, min(tokens, 1)) for _, layer in self.owned)
        return min(needed, max(least, _PIECE_NBYTES))

    def arena_nbytes(
        self, batch: int, tokens: int, *, alignment: int = 256, layout: str = "head-major"
    ) -> int:
        """Return the bytes that `KVCache` takes of an arena: `nbytes`, its scratch and the alignment of each.

        A single sequence has no rows to reorder, and needs scratch only to read what is quantised. The padding behind the last region is
        counted too, so that the order of the regions makes no difference.

        Parameters
        ----------
        batch, tokens : int
        alignment : int
            That of the arena, in bytes.
        layout : str
            As given to `KVCache`; on an arena that grows it is ``"token-major"`` by default, and the bytes are
            reserved addresses.
        """
        from gpuarena.kv.growing import PART_ALIGNMENT, record_layout

        batch, tokens = positive(batch, "batch"), positive(tokens, "tokens", least=0)
        if layout not in LAYOUTS:
            raise ArgumentError(f"layout {layout!r} is none of {', '.join(map(repr, LAYOUTS))}")
        in_records = [layer for _, layer in self.owned if layout == "token-major" and layer.is_plain]
        apart = [layer for _, layer in self.owned if layer not in in_records]
        sizes = [nbytes for layer in apart for nbytes in layer.region_nbytes(batch, tokens)]
        if in_records:
            sizes.append(record_layout(in_records, batch)[1] * tokens)
            alignment = max(alignment, PART_ALIGNMENT)
        scratch = self.scratch_nbytes(batch, tokens, layout=layout)
        if scratch:
            sizes.append(scratch)
            alignment = max(alignment, SCRATCH_ALIGNMENT)
        # A region pads up to its own alignment; with the largest for all, the sum is never too small.
        alignment = max(alignment, *(layer.alignment for _, layer in self.owned))
        return sum(_bump.align_up(nbytes, alignment) for nbytes in sizes)

    def max_tokens(self, nbytes: int | str, batch: int = 1, *, alignment: int = 256) -> int:
        """Return the most tokens a sequence can have when `batch` of them share `nbytes` of an arena; 0 if none.

        Raises
        ------
        ArgumentError
            Every layer has a bounded window, and all of them fit: then any number of tokens does.
        """
        from gpuarena._units import parse_nbytes

        budget = parse_nbytes(nbytes, what="nbytes")
        batch = positive(batch, "batch")
        unbounded = sum(layer.bytes_per_token for _, layer in self.owned if layer.slack is None)
        if unbounded:
            high = budget // (unbounded * batch)
        else:
            high = max(layer.n_slots(2**63) for _, layer in self.owned)
            if self.arena_nbytes(batch, high, alignment=alignment) <= budget:
                raise ArgumentError(
                    f"max_tokens: all layers have bounded windows, which fit in {nbytes!r}; no number of tokens is "
                    f"too large"
                )
        low = 0
        while low < high:  # arena_nbytes grows with tokens
            middle = (low + high + 1) // 2
            if self.arena_nbytes(batch, middle, alignment=alignment) <= budget:
                low = middle
            else:
                high = middle - 1
        return low

    def table(self, batch: int = 1, tokens: int = 1) -> str:
        """Return a plain table of what the layers hold and take, a line for each run of equal layers.

        >>> own = LayerSpec(2, 64, 64, "bfloat16")
        >>> local = LayerSpec(2, 64, 64, "bfloat16", window=512, slack=128)
        >>> print(KVSpec([own, local, local, SharedLayer(2)]).table(batch=1, tokens=4096))
        layers  heads  keys  values  dtype     window     slots  bytes/token  total
        0           2    64      64  bfloat16  all         4096          512  2 MiB
        1-2         2    64      64  bfloat16  512 + 128    640         1024  640 KiB
        3       layer 2
        sum                                                             1536  2.62 MiB
        """
        from gpuarena.kv._table import spec_table

        return spec_table(self, batch, tokens)
