"""FlexAttention over pages where they lie: a mask says which slot holds which token of which sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from gpuarena.errors import ArgumentError
from gpuarena.kv.paged._core import Core
from gpuarena.kv.paged._read import check_query
from gpuarena.kv.paged._sequence import Sequence
from gpuarena.kv.paged._storage import LayerPages

__all__ = ["flex_attend"]

#: Queries a block of the mask, torch's default; a block of keys is a page.
QUERY_BLOCK = 128


def flex_attend(
    core: Core, layer: int, q: Any, sequences: list[Sequence], scale: float | None, kernel: Any
) -> torch.Tensor:
    """Return attention of the last tokens of `sequences`, which are checked; see `PagedKVCache.flex_attend`."""
    pages = check_query(core, layer, q, sequences, scale)
    if core.layout == "HND":
        raise ArgumentError("flex_attend needs the layout 'per-head' or 'NHD'; attend takes any")
    spec, n = pages.spec, q.shape[2]
    if not sequences:
        empty: torch.Tensor = q.new_empty((0, *q.shape[1:3], spec.value_dim))
        return empty
    if kernel is None and len(sequences) > 1:
        # One by one, since a weight of 0 does not hide a NaN that another sequence holds.
        rows = [
            flex_attend(core, layer, q[i : i + 1], [each], scale, None) for i, each in enumerate(sequences)
        ]
        return torch.cat(rows)
    _clear_tails(core, pages, sequences)
    by_head = [
        side if core.layout == "per-head" else side.permute(2, 0, 1, 3) for side in (pages.keys, pages.values)
    ]
    keys, values = (side.flatten(1, 2)[None] for side in by_head)  # [1, kv_heads, slots, dim], views
    if kernel is None:  # it reads all pages
        values = values.where(_held(core, sequences)[:, None], 0)
    mask = _mask(core, sequences, n, spec.window, spec.sinks)
    call: Any = flex_attention if kernel is None else kernel
    out: torch.Tensor = call(
        q, keys, values, block_mask=mask, scale=scale, enable_gqa=q.shape[1] > spec.kv_heads
    )
    return out


def _clear_tails(core: Core, layer: LayerPages, sequences: list[Sequence]) -> None:
    """Put 0 in those slots of the last pages that hold no token, and may hold NaN, which a weight of 0 does not hide.

    Scores of NaN do no harm, since the mask replaces them: so the values are enough.
    """
    pool, size = layer.pools[-1], core.pool.page_size
    values = pool.by_head[-1]  # [kv_heads, pages, page_size, dim]
    for sequence in sequences:
        n_filled = core.pool.n_filled(sequence._pages)
        if n_filled < size:
            values[:, sequence.pages[-1], n_filled:].zero_()


def _held(core: Core, sequences: list[Sequence]) -> torch.Tensor:
    """Return which slots lie in pages of `sequences`, ``[slots]``."""
    held = torch.zeros(core.pool.n_pages, core.pool.page_size, dtype=torch.bool)
    for sequence in sequences:
        held[list(sequence.pages)] = True
    return held.flatten().to(core.arena.device)


def _mask(core: Core, sequences: list[Sequence], n: int, window: int | None, sinks: int) -> BlockMask:
    """Return the mask of the last `n` tokens of each sequence over all slots."""
    size, n_pages, device = core.pool.page_size, core.pool.n_pages, torch.device(core.arena.device)
    batch = len(sequences)
    place = torch.full((batch, n_pages), -1, dtype=torch.int64)  # page -> its place in the sequence
    n_blocks = -(-n // QUERY_BLOCK)
    held = torch.zeros(batch, 1, n_blocks, dtype=torch.int32)
    indices = torch.zeros(batch, 1, n_blocks, n_pages, dtype=torch.int32)
    for row, sequence in enumerate(sequences):
        numbers = torch.tensor(sequence.pages)
        place[row, numbers] = torch.arange(len(numbers))
        held[row] = len(numbers)
        indices[row, :, :, : len(numbers)] = numbers.to(torch.int32)
    first = torch.tensor([sequence.length - n for sequence in sequences], device=device)
    place = place.to(device)

    def sees(b: torch.Tensor, h: torch.Tensor, q_index: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        page = place[b, slot // size]
        at, of = page * size + slot % size, first[b] + q_index
        seen = (page >= 0) & (at <= of)
        if window is not None:
            seen = seen & ((at > of - window) | (at < sinks))
        return seen

    return BlockMask.from_kv_blocks(
        held.to(device),
        indices.to(device),
        BLOCK_SIZE=(QUERY_BLOCK, size),
        mask_mod=sees,
        seq_lengths=(n, n_pages * size),
    )
