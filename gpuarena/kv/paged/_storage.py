"""The pages of one layer in an arena: one region of keys and values, or one of each.

A layout is the order of the first three dimensions of a region::

    "per-head"  [kv_heads, pages, page_size, dim]   the pages of a head lie side by side
    "HND"       [pages, kv_heads, page_size, dim]
    "NHD"       [pages, page_size, kv_heads, dim]   what flash-attn reads, and FlashInfer by default

Where keys and values agree in dim and dtype they are the two halves of one region, ``[2, ...]``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gpuarena.errors import ArgumentError
from gpuarena.kv.spec import LayerSpec

if TYPE_CHECKING:
    from gpuarena.arena import Arena
    from gpuarena.kv.paged._ops import PageOps

__all__ = ["LAYOUTS", "Geometry", "LayerPages", "Pool", "check_layout"]

#: The dimensions of a region in the order in which they lie: 0 is kv_heads, 1 is pages, 2 is page_size.
LAYOUTS: dict[str, tuple[int, int, int]] = {"per-head": (0, 1, 2), "HND": (1, 0, 2), "NHD": (1, 2, 0)}


def check_layout(layout: Any) -> str:
    """Return `layout` or raise `ArgumentError`."""
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ArgumentError(f"layout {layout!r}: it is one of {', '.join(map(repr, LAYOUTS))}")
    return layout


class Geometry:
    """Where the token of a head lies, in rows of `dim` elements.

    >>> Geometry("HND", kv_heads=2, n_pages=8, page_size=4).rows(np.array([3]), np.array([1])).tolist()
    [[25, 29]]
    """

    def __init__(self, layout: str, kv_heads: int, n_pages: int, page_size: int) -> None:
        extents = (kv_heads, n_pages, page_size)
        self.kv_heads = kv_heads
        self.axes = LAYOUTS[layout]
        self.shape = tuple(extents[axis] for axis in self.axes)
        self.n_rows = kv_heads * n_pages * page_size
        strides, stride = [0, 0, 0], 1
        for axis in reversed(self.axes):
            strides[axis] = stride
            stride *= extents[axis]
        self.head_stride, self.page_stride, self.slot_stride = strides

    def rows(self, pages: np.ndarray[Any, Any], offsets: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the rows of tokens in `pages` at `offsets`, ``[n, kv_heads]`` int64."""
        first = pages * self.page_stride + offsets * self.slot_stride
        rows: np.ndarray[Any, Any] = first[:, None] + np.arange(self.kv_heads) * self.head_stride
        return rows


class Pool:
    """One region, and the views of it that are used again and again."""

    def __init__(
        self, arena: Arena, ops: PageOps, geometry: Geometry, planes: int, dim: int, dtype: Any, label: str
    ) -> None:
        self.region = arena.alloc((planes, *geometry.shape, dim), dtype, label=label)
        self.array = self.region.array
        movable = ops.movable(self.array)
        self.n_planes, self.dim = planes, dim
        self.movable = movable  # [planes, <layout>, dim]
        order = tuple(1 + geometry.axes.index(axis) for axis in range(3))
        self.by_head = ops.permute(movable, (0, *order, 4))  # [planes, kv_heads, pages, page_size, dim]
        #: each [kv_heads * pages * page_size, dim] in the order of the layout
        self.rows = [movable[plane].reshape(geometry.n_rows, dim) for plane in range(planes)]


class LayerPages:
    """Keys and values of one layer."""

    def __init__(
        self,
        arena: Arena,
        ops: PageOps,
        number: int,
        spec: LayerSpec,
        layout: str,
        n_pages: int,
        page_size: int,
    ) -> None:
        self.number = number
        self.spec = spec
        self.geometry = geometry = Geometry(layout, spec.kv_heads, n_pages, page_size)
        self._ops = ops
        if spec.is_joint:
            parts = [(2, spec.key_dim, spec.dtype, "pairs")]
        else:
            parts = [(1, spec.key_dim, spec.dtype, "keys"), (1, spec.value_dim, spec.value_dtype, "values")]
        self.pools = [
            Pool(arena, ops, geometry, planes, dim, dtype, f"layer{number}.{name}")
            for planes, dim, dtype, name in parts
        ]
        self._rows = [rows for pool in self.pools for rows in pool.rows]  # keys, values

    @property
    def keys(self) -> Any:
        """All pages of keys in the layout."""
        return self.pools[0].array[0]

    @property
    def values(self) -> Any:
        """All pages of values in the layout."""
        return self.pools[-1].array[-1]

    def write(self, parts: tuple[tuple[Any, Any], tuple[Any, Any]]) -> None:
        """Write the keys and the values, each an index and ``[n, dim]``."""
        for rows, (index, source) in zip(self._rows, parts, strict=True):
            if source.shape[1]:
                self._ops.scatter(rows, index, source)

    def copy_page(self, source: int, target: int, n_tokens: int) -> None:
        """Copy the first tokens of a page to another."""
        for pool in self.pools:
            pages = pool.by_head
            self._ops.copy(pages[:, :, target, :n_tokens], pages[:, :, source, :n_tokens])

    def read(self, pages: Any, length: int) -> tuple[Any, Any]:
        """Return copies of the keys and values in `pages`, ``[kv_heads, length, dim]``."""
        found: list[Any] = []
        for pool in self.pools:
            order = (0, *(1 + self.geometry.axes.index(axis) for axis in range(3)), 4)
            by_head = self._ops.permute(pool.array, order)  # in the dtype of the layer, unlike pool.by_head
            taken = self._ops.take(by_head, pages)  # [planes, kv_heads, n, page_size, dim]
            n_slots = taken.shape[2] * taken.shape[3]
            flat = taken.reshape(pool.n_planes, self.spec.kv_heads, n_slots, pool.dim)
            found.extend(flat[plane][:, :length] for plane in range(pool.n_planes))
        return found[0], found[1]
