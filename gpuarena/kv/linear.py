"""The linear cache: all memory is taken at once, and filled from the front."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Mapping
from typing import Any

from gpuarena._units import format_nbytes
from gpuarena.arena import Arena
from gpuarena.errors import ArgumentError, ArgumentTypeError, LayerOrderError, refuse_copy
from gpuarena.kv._layer import KVLayer
from gpuarena.kv._whole import taken_whole
from gpuarena.kv.full import FullLayer
from gpuarena.kv.group import LayerGroup
from gpuarena.kv.growing import GrowingLayer, Records
from gpuarena.kv.ring import RingLayer
from gpuarena.kv.spec import LAYOUTS, KVSpec, SharedLayer, as_arena, as_spec, positive

__all__ = ["KVCache", "SharedView"]


class KVCache(LayerGroup):
    """A cache of fixed capacity for a model whose shapes are known: all memory is taken here, none later.

    >>> import numpy as np
    >>> from gpuarena import Arena
    >>> spec = KVSpec.uniform(layers=2, kv_heads=2, head_dim=4, dtype="float32")
    >>> cache = KVCache(Arena("1MiB"), spec, batch=1, max_tokens=16)
    >>> k = np.ones((1, 2, 3, 4), np.float32)  # [batch, kv_heads, tokens, head_dim]
    >>> keys, values = cache.append(0, k, k)
    >>> keys.shape
    (1, 2, 3, 4)

    Parameters
    ----------
    arena : Arena
        A torch arena takes and gives tensors, a host or cupy arena arrays of its own library.
    spec : KVSpec
    batch : int
        Most rows (sequences times beams) that are held at once.
    max_tokens : int
        Capacity of each row, in tokens.
    layout : str
        ``"head-major"``: a region for each layer, ``[batch, kv_heads, max_tokens, dim]``. ``"token-major"``: one
        region for all layers, ``[max_tokens, record_nbytes]``, whose memory follows the tokens on an arena that
        grows, unless something is allocated behind it. ``"auto"``: token-major on such an arena.
    rings : bool
        Let bounded windows without sinks lie in rings beside the arena, which never move a token; see `RingLayer`.
        The arena must be one that grows.

    Raises
    ------
    OutOfMemoryError
        The arena has less than ``spec.arena_nbytes(batch, max_tokens)`` left; nothing was taken of it.

    Notes
    -----
    Rolling the arena back to before this call makes the cache stale; later appends raise.
    """

    def __init__(
        self,
        arena: Arena,
        spec: KVSpec,
        *,
        batch: int,
        max_tokens: int,
        layout: str = "auto",
        rings: bool = False,
    ) -> None:
        super().__init__(batch=batch, max_tokens=max_tokens)
        if layout not in ("auto", *LAYOUTS):
            raise ArgumentError(f"layout {layout!r} is none of 'auto', {', '.join(map(repr, LAYOUTS))}")
        self.arena = as_arena(arena)
        self.spec = as_spec(spec)
        self.layout = layout if layout != "auto" else "token-major" if arena.grows else "head-major"
        self.rings = rings
        if rings and not arena.grows:
            raise ArgumentError(
                "rings are mirrored memory, which is made like that of an arena that grows: give an arena of "
                "backend='virtual', 'virtual:torch' or 'virtual:cupy'"
            )
        self._records: Records | None = None
        with taken_whole(arena, "KVCache", self._arena_nbytes):
            self._make_layers()
        owners = {layer.index: layer for layer in self._owned}
        self._layers: list[KVLayer | SharedView] = [
            SharedView(owners[layer.source], number) if isinstance(layer, SharedLayer) else owners[number]
            for number, layer in enumerate(spec.layers)
        ]

    def __repr__(self) -> str:
        return (
            f"KVCache({self.length} of {self.max_tokens} tokens, {self.rows or 0} of {self.batch} rows, "
            f"{len(self._layers)} layers, {format_nbytes(self.stats.reserved_nbytes)})"
        )

    def _arena_nbytes(self) -> int:
        size = (self.batch, self.max_tokens)
        return self.spec.arena_nbytes(*size, alignment=self.arena.alignment, layout=self.layout)

    def _make_layers(self) -> None:
        arena, batch, max_tokens = self.arena, self.batch, self.max_tokens
        in_records = {}
        for number, layer in self.spec.owned:
            if self.layout == "token-major" and layer.is_plain:
                in_records[number] = layer
            else:
                is_ring = self.rings and layer.slack is not None and not layer.sinks
                self.add(arena, layer, index=number, kind=RingLayer if is_ring else None)
        super().reserve_scratch(arena, self.spec.scratch_nbytes(batch, max_tokens, layout=self.layout))
        if in_records:  # the last region of all, so that it can grow
            self._records = Records(arena, list(in_records.values()), batch, max_tokens)
            ops = self.ops(arena)
            ops.reach(max_tokens)
            for place, (number, layer) in enumerate(in_records.items()):
                self._take(
                    GrowingLayer(self._common, number, arena, layer, ops, records=self._records, place=place)
                )

    def reserve_scratch(self, arena: Arena, nbytes: int) -> None:
        """Do nothing: there is one region for all layers."""

    def trim(self) -> int:
        """Give memory that no token needs back to the system, where the arena grows; return the bytes given back.

        Whole chunks go; nothing goes if something was allocated behind the cache.

        Raises
        ------
        LiveArraysError
            Views of the cache are still referenced: reading them would end the process. Unchanged on error.
        StaleRegionError
        """
        if self._records is None:
            return 0
        for layer in self._owned:
            if isinstance(layer, GrowingLayer):
                layer.forget()
        return self._records.trim(max(self._common.lengths))

    @property
    def layers(self) -> list[Any]:
        """The layers, in the order of the spec; one that owns nothing is a `SharedView`."""
        return self._layers

    def append(self, layer: int, keys: Any, values: Any) -> tuple[Any, Any]:
        """Write new tokens of one layer and return views of what a query may see; see `KVLayer.append`."""
        if type(layer) is int and 0 <= layer < len(self._layers):
            return self._layers[layer].append(keys, values)
        return self._any_layer(layer).append(keys, values)

    def read(self, layer: int, n_tokens: int = 1) -> tuple[Any, Any]:
        """Return views of what the queries of the last `n_tokens` may see; see `KVLayer.read`.

        Raises
        ------
        ArgumentTypeError, ArgumentError
            There is no such layer, or so many tokens are not held.
        """
        return self._owned_layer(layer).read(n_tokens)

    def mask(self, layer: int, n_tokens: int = 1) -> Any:
        """Return which of the tokens of `read` those queries may see, ``[n_tokens, tokens]``; see `KVLayer.mask`."""
        return self._owned_layer(layer).mask(n_tokens)

    def attend(
        self, layer: int, q: Any, views: tuple[Any, Any] | None = None, *, scale: float | None = None
    ) -> Any:
        """Return the attention of the last tokens, with the window and sinks of the layer; torch arenas only.

        >>> import torch
        >>> from gpuarena import Arena
        >>> spec = KVSpec.uniform(layers=1, kv_heads=2, head_dim=4, dtype="float32", window=4, slack=2)
        >>> cache = KVCache(Arena("1MiB", backend="torch", device="cpu"), spec, batch=1, max_tokens=16)
        >>> q, k = torch.ones(1, 6, 3, 4), torch.ones(1, 2, 3, 4)
        >>> cache.attend(0, q, cache.append(0, k, k)).shape
        torch.Size([1, 6, 3, 4])

        Parameters
        ----------
        layer : int
        q : ``[rows, heads, n, key_dim]``
            Of the last `n` tokens; `heads` is a multiple of ``kv_heads``.
        views : (keys, values), optional
            What `append` returned for these tokens. None reads them, which a layer of a bounded window can do for as
            many as it holds whole windows of, and not for a prompt that is longer than its slots.
        scale : float, optional
            None for ``key_dim ** -0.5``.

        Returns
        -------
        out : ``[rows, heads, n, value_dim]``

        Raises
        ------
        BackendError
            The arena is no torch arena.
        ArgumentError, ArgumentTypeError, ShapeError, DTypeError, DeviceMismatchError, AutogradError, StaleRegionError
            What `read`, `mask` and `gpuarena.kv.attend` raise.
        """
        from gpuarena.kv.lanes._mask import check_queries

        held = self._owned_layer(layer)
        spec = held.spec
        check_queries(self.arena, held._ops, layer, spec, q)
        from gpuarena.kv.attention import attend  # torch, which there is by now

        n_tokens = q.shape[2]
        keys, values = held.read(n_tokens) if views is None else views
        # Where one query sees all that is shown, or all see all before them, no mask is needed.
        needs_mask = spec.window is not None and (n_tokens > 1 or spec.sinks > 0)
        mask = held.mask(n_tokens)[None, None] if needs_mask else None
        return attend(q, keys, values, scale=scale, mask=mask)

    # -- fixed shapes, for compiled code and captured graphs ------------------------------------------------------

    def advance(self, n_tokens: int, *, rows: int | None = None) -> int:
        """Count `n_tokens` more tokens in every layer, which `write_at` then writes; return where they begin.

        Call it before the compiled step: a full cache is found here, on the host, and nothing has changed.

        Parameters
        ----------
        n_tokens : int
        rows : int, optional
            Rows of an empty cache; `batch` by default.

        Raises
        ------
        CapacityError, ShapeError, ArgumentError, ArgumentTypeError, StaleRegionError
            Too many tokens or rows; or a layer of the cache cannot be written at given positions. Unchanged on error.
        LayerOrderError
            The layers hold different numbers of tokens.
        """
        n_tokens = positive(n_tokens, "n_tokens", least=0)
        common, start = self._common, self.length
        held = common.rows if any(common.lengths) else None
        n_rows = positive(rows, "rows") if rows is not None else held or self.batch
        for layer in self._owned:
            layer.check_live()
            layer._check_rows(n_rows, (n_rows,))
            if layer.length != start:
                raise LayerOrderError(
                    f"layer {layer.index} holds {layer.length} tokens, another {start}: finish the step, or "
                    f"truncate({start}) what it left",
                    layer=layer.index,
                )
            if start + n_tokens > self.max_tokens:
                raise layer._capacity_error(n_tokens)
        for layer in self._owned:
            _full(layer).make_room(start + n_tokens)
        for layer in self._owned:
            # They count as written from here on, also if the step fails before it writes them.
            _full(layer).clear_up_to(start + n_tokens)
        common.rows = n_rows
        for layer in self._owned:
            layer._cut(start + n_tokens)
        common.high_water = max(common.high_water, start + n_tokens)
        return start

    def write_at(self, layer: int, positions: Any, keys: Any, values: Any) -> tuple[Any, Any]:
        """Write tokens at `positions` and return keys and values of all slots; see `FullLayer.write_at`.

        `advance` has counted them, and `buffers` was called for the layer, both outside of the compiled code. On a GPU
        a position that is out of range is found by the device only, if at all: take it from what `advance` returned.

        Parameters
        ----------
        layer : int
        positions : ``[n]`` int64, on the device
        keys, values : ``[rows, kv_heads, n, dim]``
        """
        held = self._any_layer(layer)
        if isinstance(held, SharedView):
            return held.append(keys, values)  # which refuses
        return _full(held).write_at(positions, keys, values)

    def buffers(self, layer: int) -> tuple[Any, Any]:
        """Return keys and values of all slots of a layer, ``[rows, kv_heads, max_tokens, dim]``, at fixed addresses.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            There is no such layer, or it has no slots of its own for all tokens.
        """
        return _full(self._owned_layer(layer)).buffers()

    def bucket(self, n_tokens: int | None = None, *, least: int = 64) -> int:
        """Return the power of two that the first `n_tokens` fit in, at least `least` and at most `max_tokens`.

        Code that is compiled for each length of a view is compiled for each of these only: log2(max_tokens) times.

        >>> from gpuarena import Arena
        >>> spec = KVSpec.uniform(layers=1, kv_heads=1, head_dim=4, dtype="float32")
        >>> cache = KVCache(Arena("1MiB"), spec, batch=1, max_tokens=1000)
        >>> cache.bucket(10), cache.bucket(65), cache.bucket(600)
        (64, 128, 1000)

        Parameters
        ----------
        n_tokens : int, optional
            The present length by default.
        least : int
        """
        n_tokens = self.length if n_tokens is None else positive(n_tokens, "n_tokens", least=0)
        if n_tokens > self.max_tokens:
            raise ArgumentError(f"bucket({n_tokens}): the cache is for {self.max_tokens} tokens")
        least = positive(least, "least")
        return min(max(least, 1 << max(n_tokens - 1, 0).bit_length()), self.max_tokens)

    def read_bucket(self, layer: int, n_slots: int) -> tuple[Any, Any]:
        """Return views of the first `n_slots` slots, ``[rows, kv_heads, n_slots, dim]``, filled or not.

        What lies behind the tokens is numbers to be masked: `mask_at` tells.
        """
        held = _full(self._owned_layer(layer))
        n_slots = positive(n_slots, "n_slots", least=0)
        if n_slots > self.max_tokens:
            raise ArgumentError(f"read_bucket({n_slots}): the cache is for {self.max_tokens} tokens")
        return held.read_bucket(n_slots)

    def mask_at(self, layer: int, positions: Any, n_slots: int) -> Any:
        """Return which of the first `n_slots` slots queries at `positions` may see, ``[n, n_slots]`` bool.

        Nothing on the host is read but the layer's window, so that it may be part of compiled code.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            There is no such layer, or it has no slots of its own for all tokens.
        """
        held = _full(self._owned_layer(layer))
        if getattr(positions, "ndim", None) != 1:
            raise ArgumentTypeError(
                "mask_at: positions must be a 1-D array of integers of the cache's library"
            )
        if not 0 <= n_slots <= self.max_tokens:
            raise ArgumentError(f"mask_at: {n_slots} slots asked, there are {self.max_tokens}")
        return held._ops.mask_at(positions, n_slots, held.spec.window, held.spec.sinks)

    # -- files and copies -----------------------------------------------------------------------------------------

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        metadata: Mapping[str, str] | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> None:
        """Write what is held to a file, which `load` and ``safetensors.safe_open`` read.

        >>> import os, tempfile
        >>> from gpuarena import Arena
        >>> spec = KVSpec.uniform(layers=2, kv_heads=2, head_dim=4, dtype="float32")
        >>> cache = KVCache(Arena("1MiB"), spec, batch=1, max_tokens=16)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "prompt.safetensors")
        ...     cache.save(path, metadata={"model": "tiny"})
        ...     KVCache.load(path, Arena("1MiB")).max_tokens
        16

        Only filled tokens and rows in use are written, as `gpuarena.kv.state` describes. They pass through some MiB
        of host memory. A file that is there already is replaced when the new one is complete. Checkpoints are not
        saved.

        Parameters
        ----------
        path : str or path
        metadata : mapping of str to str, optional
            Texts to keep in the file; `gpuarena.kv.state.read_state` gives them back.
        progress : callable, optional
            Called with ``(done_nbytes, total_nbytes)`` as they grow, at the end with both alike. What it raises ends
            the work.

        Raises
        ------
        DTypeError
            safetensors has no such dtype.
        ArgumentTypeError, ArgumentError, StaleRegionError, CaptureError, OSError
            Whatever is raised, a file that was there is as before, and no other is left behind.
        """
        from gpuarena.kv.state._rows import save_cache

        save_cache(self, path, metadata, progress)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        arena: Arena,
        *,
        spec: KVSpec | None = None,
        batch: int | None = None,
        max_tokens: int | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> KVCache:
        """Return a new cache on `arena`, on any device and of any library, that holds what `save` wrote.

        To have it with ``rings=True`` or in another layout, make that cache and `restore` it.

        Parameters
        ----------
        path : str or path
        arena : Arena
        spec : KVSpec, optional
            What the file has to be for; None takes what it is for. Give that of the model.
        batch, max_tokens : int, optional
            Of the new cache; by default those of the cache that was saved.
        progress : callable, optional
            As for `save`.

        Raises
        ------
        StateError
            It is no such file, or it is damaged; it has another spec than `spec`, more rows than `batch` or more
            tokens than `max_tokens`. The attributes `field`, `found` and `wanted` tell which. A file has no checksum:
            bytes of keys and values that were changed are not noticed.
        OutOfMemoryError, DTypeError
            The cache does not fit the arena, or the arena lacks a dtype.
        BackendError
            safetensors is not installed.
        ArgumentError, ArgumentTypeError, ArenaClosedError, CaptureError, OSError
            Whatever is raised, the arena holds what it held before.
        """
        from gpuarena.kv.state._rows import load_cache

        return load_cache(cls, path, arena, spec, batch, max_tokens, progress)

    def restore(
        self, path: str | os.PathLike[str], *, progress: Callable[[int, int], object] | None = None
    ) -> None:
        """Hold what `save` wrote instead of what is held; checkpoints die.

        All that the file says of itself is checked before the first byte is written. If reading the bytes then fails,
        by an error of the disk, an interrupt, or what `progress` raises, the cache is empty.

        Parameters
        ----------
        path : str or path
        progress : callable, optional
            As for `save`.

        Raises
        ------
        StateError
            As for `load`, of the spec and size of this cache. Unchanged on error.
        StaleRegionError, CaptureError, OutOfMemoryError, BackendError, ArgumentTypeError, OSError
            Unchanged on error, unless reading the bytes fails.
        """
        from gpuarena.kv.state._rows import restore_cache

        restore_cache(self, path, progress)

    def copy_to(self, arena: Arena, *, batch: int | None = None, max_tokens: int | None = None) -> KVCache:
        """Return a new cache on `arena`, on any device and of any library, that holds what this one does.

        Only filled tokens are copied, all or none; afterwards the two have nothing in common. Checkpoints stay
        behind. Rings become rings again where `arena` grows, and windows that move their tokens elsewhere.

        Parameters
        ----------
        arena : Arena
        batch, max_tokens : int, optional
            Of the new cache; by default those of this one.

        Raises
        ------
        ArgumentError
            More rows or tokens are held than it is to have; `field`, `found` and `wanted` tell which.
        OutOfMemoryError, DTypeError
            It does not fit the arena, or the arena lacks a dtype.
        ArgumentTypeError, StaleRegionError, ArenaClosedError, CaptureError
            Whatever is raised, the arena holds what it held before.
        """
        from gpuarena.kv.state._rows import copy_cache

        return copy_cache(self, arena, batch=batch, max_tokens=max_tokens)

    def fork(self) -> KVCache:
        """Return a copy on the same arena, of the same size; see `copy_to`.

        It lies behind this one, so an arena that grows commits all memory up to there: `copy_to` another one instead.
        """
        from gpuarena.kv.state._rows import copy_cache

        return copy_cache(self, self.arena, layout=self.layout)

    def _any_layer(self, layer: int) -> KVLayer | SharedView:
        if type(layer) is int and 0 <= layer < len(self._layers):
            return self._layers[layer]
        self.spec.owner(layer)  # says what is wrong
        return self._layers[operator.index(layer)]

    def _owned_layer(self, layer: int) -> KVLayer:
        found = self._layers[self.spec.owner(layer)]
        assert isinstance(found, KVLayer), "an owner owns"
        return found


class SharedView:
    """A layer that owns nothing and shows what another one holds."""

    __slots__ = ("index", "source")

    def __init__(self, source: KVLayer, index: int) -> None:
        self.source = source
        self.index = index

    def __reduce__(self) -> Any:
        raise refuse_copy(self)

    def append(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """Refuse.

        Raises
        ------
        LayerOrderError
            Always: its keys and values are appended to the layer that owns them.
        """
        raise LayerOrderError(
            f"layer {self.index} shares what layer {self.source.index} holds: append there, and read({self.index}) "
            f"here",
            layer=self.index,
        )

    @property
    def length(self) -> int:
        """Tokens of the owner."""
        return self.source.length

    @property
    def keys(self) -> Any:
        """Those of the owner."""
        return self.source.keys

    @property
    def values(self) -> Any:
        """Those of the owner."""
        return self.source.values

    def read(self, n_tokens: int = 1) -> tuple[Any, Any]:
        """Return what the queries of the last `n_tokens` tokens may see; see `KVLayer.read`."""
        return self.source.read(n_tokens)

    def mask(self, n_tokens: int = 1) -> Any:
        """Return which of the tokens of `read` those queries may see; see `KVLayer.mask`."""
        return self.source.mask(n_tokens)


def _full(layer: KVLayer) -> FullLayer:
    """Return a layer that has a slot for each token, or raise."""
    if not isinstance(layer, FullLayer):
        raise ArgumentError(
            f"layer {layer.index} has no slot of its own for each token, so nothing can be written at positions: "
            f"make it without slack and storage"
        )
    return layer
