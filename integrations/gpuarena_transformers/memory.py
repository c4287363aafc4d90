"""Which arenas hold a cache, and what each of them is made for."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch

from gpuarena import Arena
from gpuarena._bump import align_up, place
from gpuarena.dtypes import as_dtype
from gpuarena.errors import (
    ArgumentError,
    ArgumentTypeError,
    DeviceMismatchError,
    DTypeError,
    OutOfMemoryError,
)
from gpuarena.kv import KVLayer, KVSpec, LayerGroup, LayerSpec
from gpuarena.kv.spec import SCRATCH_ALIGNMENT
from gpuarena.region import Region
from gpuarena_transformers.layers import ArenaLayer
from gpuarena_transformers.offload import Offload
from gpuarena_transformers.overflow import Overflow

__all__ = ["CacheMemory"]

#: Layers that one arena is made for when no config says how many there are.
_LAYERS_WITHOUT_CONFIG = 8


#: Alignment of regions in bytes, for sums that have to hold wherever an arena begins.
_ALIGNMENT = 256


class CacheMemory:
    """The arenas of one cache: one, unless the model spans devices or the estimate was too low.

    What layers hold is of several kinds: keys and values (``"kv"``), keys of indexers (``"indexer"``), and states by
    what they are and their number (``"conv 0"``, ``"recurrent 0"``). No config tells their sizes. The first of a kind
    does, as a rule, for all layers, and each kind has an arena then; one that was given, or reserved for layers that
    were measured, serves all kinds.

    Parameters
    ----------
    group : LayerGroup
        Where layers are added.
    device, dtype : optional
        What the tensors must be.
    arena : Arena, optional
        The one to take everything from.
    overflow : Overflow, optional
        Makes layers that grow beyond the arena instead of raising.
    offload : Offload, optional
        Holds keys and values in host memory.
    """

    def __init__(
        self,
        group: LayerGroup,
        *,
        device: Any = None,
        dtype: Any = None,
        arena: Arena | None = None,
        overflow: Overflow | None = None,
        offload: Offload | None = None,
    ) -> None:
        if arena is not None and not isinstance(arena, Arena):
            raise ArgumentTypeError(f"arena must be a torch arena, not {type(arena).__name__}")
        if arena is not None and arena.backend != "torch":
            raise ArgumentTypeError(f"arena must be a torch arena, not one of backend {arena.backend!r}")
        self.group = group
        self.device = None if device is None else _as_device(device)
        if isinstance(dtype, str):
            dtype = dtype.removeprefix("torch.")  # as str(torch.float32) has it
        self.dtype = None if dtype is None else as_dtype(dtype).torch
        self.given = arena
        self.overflow = overflow
        self.offload = offload
        self.arenas: list[Arena] = [] if arena is None else [arena]
        """Those on the devices of the model, apart from what `offload` stages there."""
        self.layers: list[Any] | None = None
        """The layers of the cache; None where nobody knows how many there will be."""
        self.beside: CacheMemory | None = None
        """That of a cache which takes its memory from the same arenas; the other way round as well."""
        self._made_for: dict[int, str] = {}  # id of an arena -> the one kind it serves
        # Device -> bytes for moving the rows of states, taken with the next keys and values.
        self._scratch_due: dict[str, int] = {}
        self._most: dict[str, LayerSpec | int] = {}  # kind -> the largest so far, bytes where it is a state
        self._warned = False

    def take_layer(
        self, index: int, window: int | None, keys: torch.Tensor, values: torch.Tensor, *, kind: str = "kv"
    ) -> KVLayer:
        """Take the memory of layer `index` for tensors like these."""
        self._check_first(keys, values)
        spec = LayerSpec(
            keys.shape[1],
            keys.shape[3],
            values.shape[3],
            keys.dtype,  # type: ignore[arg-type]  # LayerSpec converts
            window,
            values.dtype,  # type: ignore[arg-type]
        )
        if self.offload is not None and kind == "kv":
            if index not in self.offload.resident:
                self._most[kind] = max(spec, self._most.get(kind, spec), key=_weight)
                return self.offload.take_layer(index, spec, keys.device, self._layers_left(spec))
            kind = f"kv {index}"  # a kind of its own, since the others are elsewhere
        arena = self._arena_for(index, kind, spec, keys.device)
        due = self._scratch_due.pop(arena.device, 0)
        if due > spec.scratch_nbytes(self.group.batch, self.group.max_tokens):
            self.group.reserve_scratch(arena, due)  # once, and not a small one before a larger one
        if self.overflow is not None:
            n_layers = sum(isinstance(layer, ArenaLayer) for layer in self.layers or [None])
            return self.overflow.add_layer(self.group, arena, spec, index=index, n_layers=max(n_layers, 1))
        return self.group.add(arena, spec, index=index)

    def _check_first(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Raise unless the tensors are what the constructor was told, before memory is taken for them."""
        for what, tensor in (("keys", keys), ("values", values)):
            if not isinstance(tensor, torch.Tensor) or tensor.ndim != 4:
                raise ArgumentTypeError(f"{what} must be a tensor [batch, kv_heads, tokens, dim]")
            self._check_device(f"{what} are", tensor.device)
            keeps_float32 = what == "keys" and tensor.dtype == torch.float32
            if self.dtype is not None and tensor.dtype != self.dtype and not keeps_float32:
                raise DTypeError(f"{what} are {tensor.dtype}, the cache was made for {self.dtype}")

    def take_state(
        self, index: int, kind: str, tail: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Region:
        """Take the memory of one state of layer `index`, ``[max_batch_size, *tail]``, and what moving its rows needs.

        Raises
        ------
        OutOfMemoryError, DeviceMismatchError
            Unchanged on error.
        """
        self._check_device(f"the {kind} state is", device)
        shape, rows = (self.group.batch, *tail), self.group.batch
        nbytes = math.prod(shape) * as_dtype(dtype).itemsize
        arena = self._arena_for(index, kind, nbytes, device)
        start = arena.checkpoint()
        try:
            self.group.ops(arena).reach(0)  # its index of rows
            region = arena.alloc(shape, dtype, label=f"layer{index}.{kind.replace(' ', '')}")
            if rows > 1 and self._is_last_to_take_scratch:
                self.group.reserve_scratch(arena, nbytes)
        except BaseException:
            arena.rollback(start)
            raise
        if rows > 1 and not self._is_last_to_take_scratch:
            self._scratch_due[arena.device] = max(self._scratch_due.get(arena.device, 0), nbytes)
        return region

    @property
    def _is_last_to_take_scratch(self) -> bool:
        """Whether no keys and values come that need a scratch as well, as a rule a larger one."""
        return self.offload is not None or self._n_left() == 0

    def _check_device(self, what: str, device: torch.device) -> None:
        wanted = self.device
        if wanted is not None and (device.type != wanted.type or wanted.index not in (None, device.index)):
            raise DeviceMismatchError(f"{what} on {device}, the cache was made for {wanted}")

    def _arena_for(self, index: int, kind: str, item: LayerSpec | int, device: torch.device) -> Arena:
        """Return an arena on `device` with room for the layer, made for all that is still to come."""
        if self.given is not None and kind not in self._most:
            self._check_given(self.given, kind, item, device)
        most = self._most.get(kind, item)
        self._most[kind] = item if _weight(item) > _weight(most) else most
        here = [
            arena
            for arena in self.arenas
            if torch.device(arena.device) == device and self._made_for.get(id(arena), kind) == kind
        ]
        for arena in here:
            scratch = isinstance(item, LayerSpec) or self._is_last_to_take_scratch
            if self._top_after(arena, [item], scratch=scratch) <= arena.capacity:
                return arena
        return self._arena_for_rest(index, kind, item, device, is_first=not here)

    def _top_after(self, arena: Arena, items: list[LayerSpec | int], *, scratch: bool = True) -> int:
        """Return where the bump pointer of `arena` would stand, in bytes, with layers and states like these."""
        specs = [item for item in items if isinstance(item, LayerSpec)]
        states = [item for item in items if isinstance(item, int)]
        size = self.group.batch, self.group.max_tokens
        held = self.group._common.scratch.get(arena.device)
        held_nbytes = 0 if held is None else held.nbytes
        needed = max([self._scratch_due.get(arena.device, 0), *states]) if self.group.batch > 1 else 0
        if scratch and needed > max([held_nbytes, *(spec.scratch_nbytes(*size) for spec in specs)]):
            # Taken first, so that the layers need none of their own.
            align = max(arena.alignment, SCRATCH_ALIGNMENT)
            states = [needed, *states]
            specs, regions = (
                [],
                [
                    (nbytes, max(arena.alignment, buffer.dtype.alignment))
                    for spec in specs
                    for nbytes, buffer in zip(spec.region_nbytes(*size), spec.buffers, strict=True)
                ],
            )
        else:
            align, regions = arena.alignment, []
        top = self.group.top_after(arena, specs)
        for nbytes, at in [*((nbytes, align) for nbytes in states), *regions]:
            top = place(top, nbytes, at, arena.address) + nbytes
        return top

    def _check_given(self, arena: Arena, kind: str, item: LayerSpec | int, device: torch.device) -> None:
        """Raise before anything is taken of a given arena that cannot hold all layers, if they are like the first."""
        if torch.device(arena.device) != device:
            raise DeviceMismatchError(f"the model is on {device}, the arena given on {arena.device}")
        if self.beside is not None and self.beside.group.layers:
            return  # it counted these layers too
        # Without a config nobody knows how many there are.
        left: list[LayerSpec | int] = [item] if self.layers is None else self._left_of(kind, item)
        for other, most in self._most.items():  # other kinds, of which more layers are to come
            left += [most] * self._n_left(other)
        stats = arena.stats
        needed = self._top_after(arena, left) - stats.top + self._nbytes_beside(item)
        if needed > stats.available:
            raise OutOfMemoryError(
                f"the cache needs {needed} bytes (layers: {len(left)}, rows: {self.group.batch}, tokens: "
                f"{self.group.max_tokens}), the arena given has {stats.available} left; give a larger arena or a "
                f"smaller max_context_length",
                requested=needed,
                aligned_offset=stats.top,
                available=stats.available,
                capacity=stats.capacity,
                missing=needed - stats.available,
                label="kv-cache",
            )

    def _arena_for_rest(
        self, index: int, kind: str, item: LayerSpec | int, device: torch.device, *, is_first: bool
    ) -> Arena:
        if self.given is not None and is_first:
            raise DeviceMismatchError(f"layer {index} is on {device}, the arena given on {self.given.device}")
        is_estimate = self.layers is not None or self.given is not None
        if not is_first and is_estimate and not self._warned and self._n_devices(device) == 1:
            self._warned = True
            what = (
                f"{item} bytes for a state"
                if isinstance(item, int)
                else f"{item.bytes_per_token} bytes a token"
            )
            warnings.warn(
                f"layer {index} needs {what}, more than the arena was made for; a second "
                f"one holds the rest. ArenaCache.for_model(model) measures all layers beforehand",
                stacklevel=5,
            )
        arena = self._new_arena(self._nbytes_left(kind, item, device), device)
        self._made_for[id(arena)] = kind
        return arena

    def _nbytes_left(self, kind: str, item: LayerSpec | int, device: torch.device) -> int:
        """Return the bytes of an arena for the layers without memory, also of the cache beside this one."""
        if isinstance(item, int):
            n_here = -(-self._n_left(kind) // self._n_devices(device))
            return _states_nbytes([item] * n_here, self.group.batch if self._is_last_to_take_scratch else 1)
        specs = [spec for spec in self._left_of(kind, item) if isinstance(spec, LayerSpec)]
        # Layers lie on one device after the other. How many are left on this one is unknown: an equal share of them
        # is reserved, and another arena made if it has more.
        specs = specs[: -(-len(specs) // self._n_devices(device))]
        size = self.group.batch, self.group.max_tokens
        due = align_up(self._scratch_due.get(str(device), 0), _ALIGNMENT)
        own = max(align_up(spec.scratch_nbytes(*size), _ALIGNMENT) for spec in specs)
        return KVSpec(specs).arena_nbytes(*size) + max(0, due - own) + self._nbytes_beside(item)

    def _n_devices(self, device: torch.device) -> int:
        """Return how many devices the layers without memory may lie on, of which `device` is the first."""
        if self.layers is None or (self.device is not None and self.device.index is not None):
            return 1
        before = {arena.device for arena in self.arenas if torch.device(arena.device) != device}
        return max(device_count(device) - len(before), 1)

    def _nbytes_beside(self, item: LayerSpec | int) -> int:
        if isinstance(item, int) or self.beside is None or not self.beside._n_left():
            return 0
        left, size = self.beside._layers_left(item), self.beside.group
        return KVSpec(left).arena_nbytes(size.batch, size.max_tokens)

    def _new_arena(self, nbytes: int, device: torch.device) -> Arena:
        arena = Arena(nbytes, backend="torch", device=device, name="kv-cache")
        self.arenas.append(arena)
        return arena

    @property
    def devices(self) -> set[torch.device]:
        """Where the layers that have memory are read."""
        staged = () if self.offload is None else self.offload.stagings
        return {torch.device(arena.device) for arena in self.arenas}.union(staged)

    def reserve(
        self,
        specs: dict[torch.device, KVSpec],
        states: dict[torch.device, list[int]] | None = None,
        offloaded: dict[torch.device, list[LayerSpec]] | None = None,
    ) -> None:
        """Take the memory for layers that are known, and first what moving the rows of the largest needs.

        Parameters
        ----------
        specs : dict
            Keys and values, and keys of indexers, by device.
        states : dict, optional
            The bytes of each state of one row, by device.
        offloaded : dict, optional
            Keys and values in host memory, by the device that reads them.
        """
        states = states or {}
        if self.offload is not None:
            self.offload.reserve(offloaded or {})
        batch, tokens = self.group.batch, self.group.max_tokens
        for device in {**specs, **states}:
            sizes = [nbytes * batch for nbytes in states.get(device, ())]
            spec = specs.get(device)
            nbytes, scratch = _states_nbytes(sizes, batch), max(sizes, default=0) if batch > 1 else 0
            if spec is not None:
                moved = max(layer.scratch_nbytes(batch, tokens) for _, layer in spec.owned)
                # They share one scratch, the larger of the two.
                nbytes += spec.arena_nbytes(batch, tokens) - align_up(min(moved, scratch), _ALIGNMENT)
                scratch = max(moved, scratch)
            arena = self._new_arena(nbytes, device)
            self.group.reserve_scratch(arena, scratch)

    def _layers_left(self, spec: LayerSpec) -> list[LayerSpec]:
        """Return what the layers without keys and values will hold: the first this, the others the most so far."""
        return [item for item in self._left_of("kv", spec) if isinstance(item, LayerSpec)]

    def _left_of(self, kind: str, item: LayerSpec | int) -> list[LayerSpec | int]:
        most = max(item, self._most.get(kind, item), key=_weight)
        return [item, *[most] * (self._n_left(kind) - 1)]

    def _n_left(self, kind: str = "kv") -> int:
        """Return how many layers have no memory of a kind yet."""
        if self.layers is None:
            return _LAYERS_WITHOUT_CONFIG
        return sum(hasattr(layer, "lacks") and layer.lacks(kind) for layer in self.layers)


def _weight(item: LayerSpec | int) -> int:
    """Return what tells the larger of two layers, or of two states."""
    return item if isinstance(item, int) else item.bytes_per_token


def _states_nbytes(sizes: list[int], batch: int) -> int:
    """Return the bytes of an arena for states of so many bytes each, and for moving the rows of the largest."""
    scratch = max(sizes, default=0) if batch > 1 else 0
    return sum(align_up(nbytes, _ALIGNMENT) for nbytes in [*sizes, scratch])


def device_count(device: torch.device) -> int:
    """Return how many devices there are of the type of `device`."""
    count = getattr(getattr(torch, device.type, None), "device_count", None)
    return 1 if device.type == "cpu" or count is None else int(count())


def _as_device(device: Any) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(f"device {device!r}: {error}") from error
