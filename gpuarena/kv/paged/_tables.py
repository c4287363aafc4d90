"""The page tables of kernels as arrays on the device of the cache; `PagedKVCache` documents them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from gpuarena.errors import ArgumentTypeError, SequenceError, ShapeError
from gpuarena.kv.paged import _page_tables
from gpuarena.kv.paged._core import Core
from gpuarena.kv.paged._step import Step
from gpuarena.kv.spec import positive

__all__ = ["BlockTable", "FlashInferTables", "block_table", "flashinfer_tables", "slot_mapping"]


class FlashInferTables(NamedTuple):
    """What FlashInfer's paged kernels read, int32 on the device of the cache."""

    kv_indptr: Any
    """``[batch + 1]``: the pages of row i are ``kv_indices[kv_indptr[i]:kv_indptr[i + 1]]``."""
    kv_indices: Any
    """``[pages of all rows]``."""
    kv_last_page_len: Any
    """``[batch]``: tokens in the last page of a row, 1 to page_size."""


class BlockTable(NamedTuple):
    """What ``flash_attn_with_kvcache`` reads, int32 on the device of the cache."""

    block_table: Any
    """``[batch, width]``: the pages of a row, then 0."""
    cache_seqlens: Any
    """``[batch]``: tokens of a row."""


def flashinfer_tables(core: Core, sequences: Any, out: FlashInferTables | None) -> FlashInferTables:
    """Return the CSR tables of `sequences`."""
    found = core.check_sequences(sequences)
    tables = _page_tables.csr_tables([sequence._pages for sequence in found])
    numbers = (tables.indptr, tables.indices, tables.last_page_len)
    outs = _check_outs("flashinfer_tables", out, FlashInferTables)
    return FlashInferTables(*_arrays(core, "flashinfer_tables", numbers, outs, np.int32))


def block_table(core: Core, sequences: Any, width: int | None, out: BlockTable | None) -> BlockTable:
    """Return the dense table of `sequences` and their lengths."""
    found = core.check_sequences(sequences)
    rows = _page_tables.block_table([sequence._pages for sequence in found])
    needed = len(rows[0]) if rows else 0
    columns = needed if width is None else positive(width, "width", least=0)
    if needed > columns:
        longest = max(found, key=lambda sequence: sequence.length)
        raise ShapeError(
            f"block_table: a sequence of {longest.length} tokens has {needed} pages, width is {columns}",
            needed=needed,
            width=columns,
        )
    try:
        table = np.zeros((len(rows), columns), np.int32)
    except (MemoryError, ValueError):
        raise ShapeError(
            f"block_table: {len(rows)} rows of {columns} pages do not fit in memory; the cache has {core.pool.n_pages} "
            f"pages, a row needs no more",
            needed=needed,
            width=columns,
        ) from None
    table[:, :needed] = np.array(rows, np.int32).reshape(len(rows), needed)
    lengths = [sequence.length for sequence in found]
    outs = _check_outs("block_table", out, BlockTable)
    return BlockTable(*_arrays(core, "block_table", (table, lengths), outs, np.int32))


def slot_mapping(core: Core, of: Any, out: Any) -> Any:
    """Return the slots of the new tokens of a step, or of ranges of tokens."""
    ranges: list[tuple[Any, Any, Any]] = []
    if isinstance(of, Step):
        if of._core is not core:
            raise SequenceError("this step is of another cache")
        of._check_open()
        ranges = of.ranges()
    else:
        try:
            entries = [(sequence, start, stop) for sequence, start, stop in of]
        except (TypeError, ValueError):
            raise ArgumentTypeError(
                "slot_mapping takes a step, or a list of (sequence, start, stop)"
            ) from None
        for sequence, start, stop in entries:
            core.check_sequence(sequence)
            ranges.append((sequence._pages, start, stop))
    (slots,) = _arrays(core, "slot_mapping", (_page_tables.slot_mapping(ranges),), (out,), np.int64)
    return slots


def _check_outs(what: str, out: Any, kind: Any) -> tuple[Any, ...]:
    """Return the tables of `out`, of which each may be None."""
    n_tables = len(kind._fields)
    if out is None:
        return (None,) * n_tables
    if not isinstance(out, tuple | list) or len(out) != n_tables:
        raise ArgumentTypeError(f"{what}: out must be a {kind.__name__}, not {type(out).__name__}")
    return tuple(out)


def _arrays(core: Core, what: str, numbers: Iterable[Any], outs: Iterable[Any], dtype: Any) -> list[Any]:
    pairs = [(np.array(entry, dtype), out) for entry, out in zip(numbers, outs, strict=True)]
    for array, out in pairs:  # all of them, before the first is written
        core.ops.check_out(array, out, what)
    return [core.ops.table(array, out) for array, out in pairs]
