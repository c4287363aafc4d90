"""Keys and values of a sequence on the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from gpuarena._bump import align_up
from gpuarena.errors import ArgumentTypeError, DeviceMismatchError
from gpuarena.kv.paged._core import SCRATCH_ALIGNMENT

if TYPE_CHECKING:
    from gpuarena.kv.paged._core import Core
    from gpuarena.kv.paged._page_lists import PageList
    from gpuarena.kv.paged._prefixes import Prefix
    from gpuarena.kv.paged._storage import Pool

__all__ = ["Swapped", "swap_in", "swap_out"]


class Swapped:
    """What `swap_out` moved: bytes of the host, and what each page was published as."""

    __slots__ = ("host", "n_pages", "nbytes", "published", "region")

    def __init__(self, host: Any, region: Any, nbytes: int, published: list[Prefix | None]) -> None:
        self.host = host
        self.region = region  # of the arena that was given, else None
        self.nbytes = nbytes
        self.published = published
        self.n_pages = len(published)


def swap_out(core: Core, pages: PageList, arena: Any) -> Swapped:
    """Copy the pages to the host. They are to be put aside then."""
    numbers = pages.pages
    nbytes = sum(align_up(_nbytes(pool, len(numbers)), SCRATCH_ALIGNMENT) for pool in _pools(core))
    region = start = None
    if arena is None:
        host = core.ops.host_bytes(nbytes)
    else:
        _check_arena(arena)
        start = arena.checkpoint()
        align = max(arena.alignment, SCRATCH_ALIGNMENT)
        region = arena.alloc(nbytes, "uint8", align=align, label="swapped sequence")
    try:
        if region is not None:
            host = core.ops.bytes_of(region)
        for pool, view in _views(core, host, len(numbers)):
            for index, page in enumerate(numbers):
                core.ops.to_host(view[:, :, index], pool.by_head[:, :, page])
        return Swapped(host, region, nbytes, pages.published)
    except BaseException:
        if start is not None:
            arena.rollback(start)
        raise


def swap_in(core: Core, pages: PageList, swapped: Swapped) -> None:
    """Take pages and fill those that do not hold their contents still; all or nothing."""
    if swapped.region is not None:
        swapped.region._check()
    version, length = core.pool.version, pages.length
    try:
        to_fill = pages.take_back(swapped.published)
        numbers = pages.pages
        for pool, view in _views(core, swapped.host, swapped.n_pages):
            for index in to_fill:
                core.ops.from_host(pool.by_head[:, :, numbers[index]], view[:, :, index])
    except BaseException:
        if core.pool.version != version:
            core.pool.restore([(pages, (), length)])
        raise


def _pools(core: Core) -> Iterator[Pool]:
    for layer in core.layers.values():
        yield from layer.pools


def _nbytes(pool: Pool, n_pages: int) -> int:
    total: int = pool.region.nbytes
    return total // int(pool.by_head.shape[2]) * n_pages


def _views(core: Core, host: Any, n_pages: int) -> Iterator[tuple[Pool, Any]]:
    """Yield each pool with its place on the host, ``[planes, kv_heads, n_pages, page_size, dim]``."""
    start = 0
    for pool in _pools(core):
        planes, heads, _, page_size, dim = pool.by_head.shape
        yield pool, core.ops.host_view(host, start, pool.by_head, (planes, heads, n_pages, page_size, dim))
        start += align_up(_nbytes(pool, n_pages), SCRATCH_ALIGNMENT)


def _check_arena(arena: Any) -> None:
    from gpuarena.arena import Arena

    if not isinstance(arena, Arena):
        raise ArgumentTypeError(f"swap_out takes an Arena, not {type(arena).__name__}")
    if arena.device != "cpu":
        raise DeviceMismatchError(f"swap_out moves to the host, the arena is on {arena.device}")
