"""Attention of the last tokens of sequences, checked."""

from __future__ import annotations

from typing import Any

from gpuarena.errors import ArgumentError, ArgumentTypeError, DTypeError, ShapeError
from gpuarena.kv.paged._core import Core
from gpuarena.kv.paged._sequence import Sequence
from gpuarena.kv.paged._storage import LayerPages

__all__ = ["attend", "check_query"]


def check_query(core: Core, layer: int, q: Any, sequences: list[Sequence], scale: float | None) -> LayerPages:
    """Return the pages of the layer that `layer` reads, or raise what `PagedKVCache.attend` raises."""
    core.check_live()
    _check_scale(scale)
    if core.arena.backend != "torch":
        raise ArgumentError(
            f"attention here is torch's, it needs a torch arena, not one of {core.arena.backend}"
        )
    pages = core.layers[core.spec.owner(layer)]
    spec, who = pages.spec, f"layer {layer}"
    core.check_query(q)
    shape = tuple(q.shape)
    if len(shape) != 4 or shape[0] != len(sequences) or shape[3] != spec.key_dim or shape[1] % spec.kv_heads:
        raise ShapeError(
            f"{who}: q is {list(shape)}; it has to be [{len(sequences)} sequences, a multiple of {spec.kv_heads} heads, "
            f"n, {spec.key_dim}]",
            shape=shape,
        )
    if not q.dtype == pages.keys.dtype == pages.values.dtype:
        raise DTypeError(
            f"{who}: q is {q.dtype}, the cache holds keys of {spec.dtype} and values of {spec.value_dtype}; attention "
            f"here takes one dtype",
            dtype=q.dtype,
        )
    if spec.value_dim == 0:
        raise ArgumentError(f"{who} has no values (value_dim is 0); attend in the model, from the keys alone")
    for sequence in sequences:
        if not 1 <= shape[2] <= sequence.length:
            raise ShapeError(
                f"{who}: {shape[2]} queries for a sequence of {sequence.length} tokens; the queries are its last "
                f"tokens",
                shape=shape,
            )
        core.check_readable(sequence, pages.number)
    return pages


def _check_scale(scale: Any) -> None:
    if scale is None:
        return
    try:
        if isinstance(scale, bool) or not hasattr(scale, "__float__"):
            raise TypeError
        float(scale)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise ArgumentTypeError(f"scale must be a number or None, not {type(scale).__name__}") from None


def attend(core: Core, layer: int, q: Any, sequences: list[Sequence], scale: float | None) -> Any:
    """Return attention of the last tokens of `sequences`, which are checked."""
    pages = check_query(core, layer, q, sequences, scale)
    if core.gatherer is None:
        raise ArgumentError(
            "attend gathers into scratch, of which there is none: make the cache with gather_tokens of the longest "
            "sequence"
        )
    if not sequences:
        return q.new_empty((0, q.shape[1], q.shape[2], pages.spec.value_dim))
    lists = tuple(sequence._pages for sequence in sequences)
    return core.gatherer.attend(pages, q, lists, scale, core.pool.version)
