"""The page tables that attention kernels read, as lists of Python ints.

Numbers of pages fit int32, which the kernels want; slots may need int64. A table shows the pages as they are: make it
after the `append` whose tokens the kernel is to read or write, and anew after any call that changes a sequence.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gpuarena.errors import ArgumentTypeError, SequenceError
from gpuarena.kv.paged._page_lists import PageList

__all__ = ["CsrTables", "block_table", "csr_tables", "slot_mapping"]


@dataclass(frozen=True, slots=True)
class CsrTables:
    """The tables of FlashInfer: its ``kv_indptr``, ``kv_indices`` and ``kv_last_page_len``."""

    indptr: list[int]
    """``[batch + 1]``: the pages of row i are ``indices[indptr[i]:indptr[i + 1]]``."""
    indices: list[int]
    """``[pages of all rows]``."""
    last_page_len: list[int]
    """``[batch]``: tokens in the last page of a row, 1 to page_size."""


def csr_tables(sequences: Iterable[PageList]) -> CsrTables:
    """Return the tables of FlashInfer, a row for each sequence.

    >>> from gpuarena.kv.paged._pages import PagePool
    >>> pool = PagePool(n_pages=8, page_size=4)
    >>> a, b = pool.sequence(), pool.sequence()
    >>> _ = a.append(6), b.append(4)
    >>> csr_tables([a, b])
    CsrTables(indptr=[0, 2, 3], indices=[0, 1, 2], last_page_len=[2, 4])

    Raises
    ------
    SequenceError
        A sequence is empty, which these tables cannot express, or freed, or not of the pool of the first.
    """
    indptr, indices, last_page_len = [0], list[int](), list[int]()
    for row, sequence in enumerate(_rows(sequences)):
        if sequence.length == 0:
            raise SequenceError(f"row {row} is an empty sequence, which has no last page; leave it out")
        indices.extend(sequence._pages)
        indptr.append(len(indices))
        last_page_len.append((sequence.length - 1) % sequence.pool.page_size + 1)
    return CsrTables(indptr, indices, last_page_len)


def block_table(sequences: Iterable[PageList]) -> list[list[int]]:
    """Return the dense table of flash-attn, ``[batch, most pages of a row]``, padded with page 0.

    It goes with ``cache_seqlens = [sequence.length for sequence in sequences]``; what lies behind is not read, and
    page 0 can be read without harm.

    >>> from gpuarena.kv.paged._pages import PagePool
    >>> pool = PagePool(n_pages=8, page_size=4)
    >>> a, b = pool.sequence(), pool.sequence()
    >>> _ = a.append(6), b.append(4)
    >>> block_table([b, a])
    [[2, 0], [0, 1]]

    Raises
    ------
    SequenceError
        A sequence is freed, or not of the pool of the first.
    """
    rows = [sequence._pages for sequence in _rows(sequences)]
    width = max(map(len, rows), default=0)
    return [pages + [0] * (width - len(pages)) for pages in rows]


def slot_mapping(ranges: Iterable[tuple[PageList, int, int]]) -> list[int]:
    """Return the slots of the tokens ``start`` up to ``stop`` of each ``(sequence, start, stop)``, one after another.

    >>> from gpuarena.kv.paged._pages import PagePool
    >>> pool = PagePool(n_pages=8, page_size=4)
    >>> a, b = pool.sequence(), pool.sequence()
    >>> _ = a.append(6), b.append(4)
    >>> slot_mapping([(a, 3, 6), (b, 0, 1)])
    [3, 4, 5, 8]

    Raises
    ------
    SequenceError, ArgumentError, ArgumentTypeError
        As `PageList.slots`; or a sequence is not of the pool of the first.
    """
    ranges = list(ranges)
    sequences = _rows(sequence for sequence, _, _ in ranges)
    slots: list[int] = []
    for sequence, (_, start, stop) in zip(sequences, ranges, strict=True):
        slots.extend(sequence.slots(start, stop))
    return slots


def _rows(sequences: Iterable[PageList]) -> list[PageList]:
    """Return the sequences, which live and are of one pool."""
    rows = list(sequences)
    for sequence in rows:
        if not isinstance(sequence, PageList):
            raise ArgumentTypeError(f"a Sequence is wanted, not {type(sequence).__name__}")
        rows[0].pool.check_mine(sequence)
    return rows
