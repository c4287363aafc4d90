"""What a paged cache, its sequences and its steps share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuarena.errors import (
    ArgumentError,
    ArgumentTypeError,
    DTypeError,
    LayerOrderError,
    SequenceError,
    ShapeError,
)
from gpuarena.kv._ops import ops_for
from gpuarena.kv.paged._ops import page_ops_for
from gpuarena.kv.paged._pages import PagePool
from gpuarena.kv.paged._storage import LayerPages
from gpuarena.kv.spec import KVSpec, LayerSpec

if TYPE_CHECKING:
    from gpuarena.arena import Arena
    from gpuarena.kv.paged._gather import Gatherer
    from gpuarena.kv.paged._page_lists import PageCopy, PageList
    from gpuarena.kv.paged._sequence import Sequence

__all__ = ["Core", "TokenSlots"]

#: Aligns the scratch for the widest element type (complex128), since layers of any type pass through.
SCRATCH_ALIGNMENT = 16


class TokenSlots:
    """The slots of the tokens that a step or an append writes, as an index for each order they may come in."""

    def __init__(self, core: Core, ranges: Iterable[tuple[PageList, int, int]]) -> None:
        # slots: [tokens] int64, those of the first sequence first
        slots = np.array([slot for pages, *span in ranges for slot in pages.slots(*span)], np.int64)
        self._core = core
        self.n_tokens = len(slots)
        self._pages, self._offsets = np.divmod(slots, core.pool.page_size)
        self._made: dict[tuple[int, bool], Any] = {}

    def index(self, layer: LayerPages, batch: int | None) -> Any:
        """Return the rows of ``[tokens, kv_heads]``, or of ``[batch, kv_heads, n]`` where `batch` is given."""
        key = (layer.spec.kv_heads, batch is not None)
        index = self._made.get(key)
        if index is None:
            rows = layer.geometry.rows(self._pages, self._offsets)
            if batch is not None:
                rows = rows.reshape(batch, -1, layer.spec.kv_heads).swapaxes(1, 2)
            index = self._made[key] = self._core.ops.index(rows.reshape(-1))
        return index


class Core:
    """Pages and their memory. Sequences refer to this and not to the cache, so that no cycle keeps memory.

    Whoever makes one rolls the arena back if that raises.
    """

    def __init__(
        self, arena: Arena, spec: KVSpec, *, num_pages: int, page_size: int, layout: str, gather_tokens: int
    ) -> None:
        self.pool = PagePool(num_pages, page_size)
        self.arena = arena
        self.spec = spec
        self.layout = layout
        self.ops = page_ops_for(arena)
        self._checks = ops_for(arena, 1)
        self.open_steps: set[Any] = set()
        self.layers: dict[int, LayerPages] = {}
        self.gatherer: Gatherer | None = None
        for number, layer in spec.owned:
            with self.ops.normal_mode():
                self.layers[number] = LayerPages(
                    arena, self.ops, number, layer, layout, self.pool.n_pages, page_size
                )
        self.last_region = self.layers[max(self.layers)].pools[-1].region
        self.scratch_nbytes = scratch_nbytes(spec, gather_tokens)
        if gather_tokens:
            from gpuarena.kv.paged._gather import Gatherer

            align = max(arena.alignment, SCRATCH_ALIGNMENT)
            scratch = arena.alloc(self.scratch_nbytes, "uint8", align=align, label="gather")
            self.gatherer = Gatherer(self.ops, scratch.array, layout, page_size, gather_tokens)
            self.last_region = scratch  # a rollback that takes any region takes the last one
        self.owned = tuple(self.layers)  # their numbers in order
        self.page_nbytes = spec.bytes_per_token * page_size

    # -- checks -------------------------------------------------------------------------------------------------

    def check_live(self) -> None:
        """Raise `StaleRegionError` unless the memory still belongs to the cache."""
        self.last_region._check()

    def check_sequence(self, sequence: Any) -> None:
        """Raise unless `sequence` is one of this cache that lives and is not swapped out."""
        self.check_mine(sequence)
        sequence._check()

    def check_mine(self, sequence: Any) -> None:
        """Raise unless `sequence` is one of this cache that lives."""
        from gpuarena.kv.paged._sequence import Sequence

        if not isinstance(sequence, Sequence):
            raise ArgumentTypeError(f"a Sequence is wanted, not {type(sequence).__name__}")
        if sequence._core is not self:
            raise SequenceError("this sequence is of another cache, where its page numbers mean other pages")
        sequence._pages._check()

    def check_sequences(self, sequences: Any) -> list[Sequence]:
        """Return them as a list, each checked."""
        try:
            found = list(sequences)
        except TypeError:
            raise ArgumentTypeError(
                f"a list of sequences is wanted, not {type(sequences).__name__}"
            ) from None
        for sequence in found:
            self.check_sequence(sequence)
        return found

    def owned_layer(self, layer: int, action: str) -> LayerPages:
        """Return the pages of a layer that is to be written."""
        owner = self.spec.owner(layer)
        if owner != layer:
            raise ArgumentError(
                f"{action}: layer {layer} shares the keys and values of layer {owner}; write that one"
            )
        return self.layers[owner]

    def check_readable(self, sequence: Sequence, owner: int) -> None:
        """Raise `LayerOrderError` if a step that is under way has not written this layer yet."""
        unwritten = sequence._unwritten()
        if owner in unwritten:
            raise LayerOrderError(
                f"layer {owner} is read before its new tokens are written; write it first", layer=owner
            )

    def check_kv(self, who: str, spec: LayerSpec, keys: Any, values: Any) -> None:
        """Raise unless these are arrays of the right library, device, dtype and heads, of agreeing shapes."""
        for name, array in (("keys", keys), ("values", values)):
            if array is None:
                raise ArgumentTypeError(f"{who}: {name} are missing; keys and values are written together")
            self._checks.check(array, name)
        k_shape, v_shape = tuple(keys.shape), tuple(values.shape)
        wanted = f"[rows, {spec.kv_heads}, n, {spec.key_dim}] or [tokens, {spec.kv_heads}, {spec.key_dim}]"
        if len(k_shape) not in (3, 4) or k_shape[1] != spec.kv_heads or k_shape[-1] != spec.key_dim:
            raise ShapeError(f"{who}: keys are {list(k_shape)}, the cache takes {wanted}", shape=k_shape)
        if v_shape != (*k_shape[:-1], spec.value_dim):
            raise ShapeError(
                f"{who}: values are {list(v_shape)}, for these keys they must be {[*k_shape[:-1], spec.value_dim]}",
                shape=v_shape,
            )
        if (keys.dtype, values.dtype) != (
            self._checks.dtype(spec.dtype),
            self._checks.dtype(spec.value_dtype),
        ):
            raise DTypeError(
                f"{who}: keys are {keys.dtype} and values {values.dtype}, the cache holds {spec.dtype} and "
                f"{spec.value_dtype}; convert them, or make the cache with their dtype",
                dtype=keys.dtype,
            )

    def check_query(self, array: Any) -> None:
        """Raise unless it is an array of the right library and device, which does not require grad."""
        self._checks.check(array, "q")

    # -- memory -------------------------------------------------------------------------------------------------

    def write(self, layer: LayerPages, slots: TokenSlots, keys: Any, values: Any) -> None:
        """Write checked keys and values of ``[rows, kv_heads, n, dim]`` or ``[tokens, kv_heads, dim]``."""
        if slots.n_tokens == 0:  # a step of no sequences
            return
        keys, values = self._apart(layer, keys), self._apart(layer, values)
        layer.write((self._flat(layer, slots, keys), self._flat(layer, slots, values)))

    def _apart(self, layer: LayerPages, array: Any) -> Any:
        """Return what is to be written, or a copy of it if it lies in the pages of the layer."""
        if self.ops.may_be_in_arena(array):
            for pool in layer.pools:
                array = self._checks.apart(array, pool.array)
        return array

    def _flat(self, layer: LayerPages, slots: TokenSlots, array: Any) -> tuple[Any, Any]:
        """Return where each row of `dim` elements goes, and the rows, without a copy where that can be."""
        n_rows = slots.n_tokens * layer.spec.kv_heads
        if array.ndim == 3:
            return slots.index(layer, None), array.reshape(n_rows, array.shape[-1])
        if self.ops.is_contiguous(array):
            return slots.index(layer, array.shape[0]), array.reshape(n_rows, array.shape[-1])
        # What a model computed as [rows, n, kv_heads, dim] and looks at as [rows, kv_heads, n, dim].
        return slots.index(layer, None), array.swapaxes(1, 2).reshape(n_rows, array.shape[-1])

    def copy_pages(self, copies: list[PageCopy]) -> None:
        """Copy pages in all layers, in the order given; each leaves the list once it is copied."""
        while copies:
            for layer in self.layers.values():
                layer.copy_page(copies[0].source, copies[0].target, copies[0].n_tokens)
            del copies[0]


def scratch_nbytes(spec: KVSpec, gather_tokens: int) -> int:
    """Return the bytes of scratch for gathering so many tokens of a layer, whichever it is."""
    most = max(layer.bytes_per_token for _, layer in spec.owned)
    # The values of a layer start aligned, behind its keys.
    return gather_tokens * most + SCRATCH_ALIGNMENT if gather_tokens else 0
