"""Which arenas hold a cache, and what each of them is made for."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from gpuarena import Arena
from gpuarena.dtypes import as_dtype
from gpuarena.errors import (
    ArgumentError,
    ArgumentTypeError,
    DeviceMismatchError,
    DTypeError,
    OutOfMemoryError,
)
from gpuarena.kv import KVLayer, KVSpec, LayerGroup, LayerSpec
from gpuarena_transformers.layers import ArenaLayer

__all__ = ["CacheMemory"]

#: Layers that one arena is made for when no config says how many there are.
_LAYERS_WITHOUT_CONFIG = 8


class CacheMemory:
    """The arenas of one cache: one, unless the model spans devices or the estimate was too low.

    Parameters
    ----------
    group : LayerGroup
        Where layers are added.
    device, dtype : optional
        What the tensors must be.
    arena : Arena, optional
        The one to take everything from.
    """

    def __init__(
        self,
        group: LayerGroup,
        *,
        device: Any = None,
        dtype: Any = None,
        arena: Arena | None = None,
    ) -> None:
        if arena is not None and arena.backend != "torch":
            raise ArgumentTypeError(f"arena must be a torch arena, not one of backend {arena.backend!r}")
        self.group = group
        self.device = None if device is None else _as_device(device)
        self.dtype = None if dtype is None else as_dtype(dtype).torch
        self.given = arena
        self.arenas: list[Arena] = [] if arena is None else [arena]
        self.layers: list[Any] | None = None
        """The layers of the cache; None where nobody knows how many there will be."""
        self._warned = False

    def take_layer(self, index: int, window: int | None, keys: torch.Tensor, values: torch.Tensor) -> KVLayer:
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
        arena = self._arena_for(index, spec, keys.device)
        return self.group.add(arena, spec, index=index)

    def _check_first(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Raise unless the tensors are what the constructor was told, before memory is taken for them."""
        for what, tensor in (("keys", keys), ("values", values)):
            if not isinstance(tensor, torch.Tensor) or tensor.ndim != 4:
                raise ArgumentTypeError(f"{what} must be a tensor [batch, kv_heads, tokens, dim]")
            wanted = self.device
            if wanted is not None and (
                tensor.device.type != wanted.type or wanted.index not in (None, tensor.device.index)
            ):
                raise DeviceMismatchError(f"{what} are on {tensor.device}, the cache was made for {wanted}")
            keeps_float32 = what == "keys" and tensor.dtype == torch.float32
            if self.dtype is not None and tensor.dtype != self.dtype and not keeps_float32:
                raise DTypeError(f"{what} are {tensor.dtype}, the cache was made for {self.dtype}")

    def _arena_for(self, index: int, spec: LayerSpec, device: torch.device) -> Arena:
        """Return an arena on `device` with room for the layer, made for all that is still to come."""
        if self.given is not None and not self.group.layers:
            self._check_given(self.given, spec, device)
        here = [arena for arena in self.arenas if torch.device(arena.device) == device]
        for arena in here:
            if self.group.top_after(arena, [spec]) <= arena.capacity:
                return arena
        return self._arena_for_rest(index, spec, device, is_first=not here)

    def _check_given(self, arena: Arena, spec: LayerSpec, device: torch.device) -> None:
        """Raise before anything is taken of a given arena that cannot hold all layers, if they are like the first."""
        if torch.device(arena.device) != device:
            raise DeviceMismatchError(f"the model is on {device}, the arena given on {arena.device}")
        # Without a config nobody knows how many there are.
        left = [spec] if self.layers is None else self._layers_left(spec)
        stats = arena.stats
        needed = self.group.top_after(arena, left) - stats.top
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

    def _arena_for_rest(self, index: int, spec: LayerSpec, device: torch.device, *, is_first: bool) -> Arena:
        if self.given is not None and is_first:
            raise DeviceMismatchError(f"layer {index} is on {device}, the arena given on {self.given.device}")
        is_estimate = self.layers is not None or self.given is not None
        if not is_first and is_estimate and not self._warned:
            self._warned = True
            warnings.warn(
                f"layer {index} needs {spec.bytes_per_token} bytes a token, more than the arena was made for; a second "
                f"one holds the rest. ArenaCache.for_model(model) measures all layers beforehand",
                stacklevel=5,
            )
        specs = self._layers_left(spec)
        return self._new_arena(KVSpec(specs).arena_nbytes(self.group.batch, self.group.max_tokens), device)

    def _new_arena(self, nbytes: int, device: torch.device) -> Arena:
        arena = Arena(nbytes, backend="torch", device=device, name="kv-cache")
        self.arenas.append(arena)
        return arena

    def reserve(self, specs: dict[torch.device, KVSpec]) -> None:
        """Take the memory for layers that are known, and first what moving the rows of the largest needs."""
        for device, spec in specs.items():
            arena = self._new_arena(spec.arena_nbytes(self.group.batch, self.group.max_tokens), device)
            size = self.group.batch, self.group.max_tokens
            self.group.reserve_scratch(arena, max(layer.scratch_nbytes(*size) for _, layer in spec.owned))

    def _layers_left(self, spec: LayerSpec) -> list[LayerSpec]:
        """Return what the layers without memory will hold: the first of them this, the others the most so far."""
        if self.layers is None:
            n_left = _LAYERS_WITHOUT_CONFIG
        else:
            n_left = sum(isinstance(layer, ArenaLayer) and layer._kv is None for layer in self.layers)
        seen = [spec, *(layer.spec for layer in self.group.layers)]
        return [spec, *[max(seen, key=lambda one: one.bytes_per_token)] * (n_left - 1)]


def _as_device(device: Any) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(f"device {device!r}: {error}") from error
