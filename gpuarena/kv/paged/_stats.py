"""The figures of a paged cache."""

from __future__ import annotations

from dataclasses import dataclass

from gpuarena.kv.paged._core import Core

__all__ = ["PagedStats", "snapshot"]


@dataclass(frozen=True, slots=True)
class PagedStats:
    """A snapshot; ``pages_free + pages_cached + pages_used == n_pages`` at every moment."""

    n_pages: int
    page_size: int
    pages_free: int
    pages_cached: int
    """Published pages that no sequence holds; they are free for whoever needs one, the longest unused first."""
    pages_used: int
    """Pages that sequences hold, a shared one counted once; 0 when all sequences are freed."""
    pages_hit: int
    """Pages that `match` found, since the cache was made."""
    pages_evicted: int
    """Cached pages that were given to others."""
    pages_copied: int
    """Pages that were copied because a sequence wrote into one that it shared."""
    n_sequences: int
    """Sequences that were made and not freed."""
    n_swapped_out: int
    """Those of them whose keys and values are on the host."""
    tokens_stored: int
    """Slots of used pages that hold a token of a sequence, a shared one counted once."""
    tokens_wasted: int
    """The other slots of used pages."""
    bytes_per_token: int
    page_nbytes: int
    """Bytes of a page, over all layers."""
    reserved_nbytes: int
    """Bytes of all pages."""
    used_nbytes: int
    """Bytes of used pages."""
    scratch_nbytes: int
    """Bytes reserved for gathering pages in `attend`."""


def snapshot(core: Core) -> PagedStats:
    """Return the figures of this moment."""
    pages = core.pool.stats
    return PagedStats(
        n_pages=pages.n_pages,
        page_size=pages.page_size,
        pages_free=pages.pages_free,
        pages_cached=pages.pages_cached,
        pages_used=pages.pages_used,
        pages_hit=pages.pages_hit,
        pages_evicted=pages.pages_evicted,
        pages_copied=pages.pages_copied,
        n_sequences=pages.n_sequences,
        n_swapped_out=sum(held.is_aside for held in core.pool.live()),
        tokens_stored=pages.tokens_stored,
        tokens_wasted=pages.tokens_wasted,
        bytes_per_token=core.spec.bytes_per_token,
        page_nbytes=core.page_nbytes,
        reserved_nbytes=core.page_nbytes * pages.n_pages,
        used_nbytes=core.page_nbytes * pages.pages_used,
        scratch_nbytes=core.scratch_nbytes,
    )
