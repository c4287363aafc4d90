"""Keys and values in host memory, of which a device holds those that its attention is about to read.

The layers of a cache with ``offload="cpu"`` lie in an arena in host memory, and each device has two staging buffers, of
the size of the largest layer. `OffloadedLayer.append` brings what a layer held so far into one of them, writes the new
tokens behind it and from there to the host, and returns views of the buffer. The other buffer gets what the next layer
holds meanwhile. So a step moves the whole visible prefix of every layer to the device, however few tokens are new.

On CUDA the host memory is pinned and copies run on a stream of their own, beside the attention of the layer before.
On other devices the same code copies synchronously.
"""

from __future__ import annotations

from typing import Any

import torch

from gpuarena import Arena
from gpuarena.errors import ArgumentError
from gpuarena.kv import KVSpec, LayerGroup, LayerSpec
from gpuarena.kv._layer import check_dtypes, check_shapes
from gpuarena.kv.full import FullLayer
from gpuarena_transformers._staging import Pair, Staging, staging_nbytes
from gpuarena_transformers.sizing import decoder_config

__all__ = ["HostGroup", "Offload", "OffloadedLayer", "resident_layers"]


class Offload:
    """The choice of ``offload="cpu"`` for one cache: its arenas in host memory, and a staging for each device."""

    def __init__(self, group: LayerGroup, resident: frozenset[int] = frozenset()) -> None:
        self.group = group
        self.resident = resident
        """Numbers of layers that stay on the device."""
        self.arenas: list[Arena] = []
        """In host memory."""
        self.stagings: dict[torch.device, Staging] = {}

    @staticmethod
    def check(offload: Any, *, config: Any, on_full: str, arena: Arena | None) -> None:
        """Raise unless ``offload`` is a choice that agrees with the other arguments of a cache.

        Raises
        ------
        ArgumentError
            It is neither None nor ``"cpu"``; or there is no config, an arena is given, or the cache may grow.
        """
        if offload is None:
            return
        if offload != "cpu":
            raise ArgumentError(f'offload is None or "cpu", not {offload!r}')
        if config is None:
            raise ArgumentError(
                'offload="cpu" needs the config, which tells how much host memory to take, and whether a layer reads '
                "what another one holds"
            )
        if on_full != "raise":
            raise ArgumentError(
                f'offload="cpu" and on_full={on_full!r} exclude each other: tensors that grow would lie on the '
                f"device; make the cache for more tokens, which are in host memory"
            )
        if arena is not None:
            raise ArgumentError(
                'offload="cpu" takes its memory from two arenas that it makes, one of them in host memory; give none'
            )

    @property
    def all_arenas(self) -> list[Arena]:
        """Those in host memory, then the staging buffers."""
        return [*self.arenas, *(staging.arena for staging in self.stagings.values())]

    def take_layer(
        self, index: int, spec: LayerSpec, device: torch.device, left: list[LayerSpec]
    ) -> OffloadedLayer:
        """Add layer `index`, whose attention runs on `device`; `left` are all layers without memory, this one first.

        Raises
        ------
        OutOfMemoryError
            In host memory, or on the device. No layer was added.
        """
        group = self.group
        arena = next((one for one in self.arenas if group.top_after(one, [spec]) <= one.capacity), None)
        is_new = arena is None
        arena = arena or self._host_arena(left, is_pinned=device.type == "cuda")
        staging = self._staging(device, spec)
        layer = group.add(arena, spec, index=index, kind=OffloadedLayer)
        assert isinstance(layer, OffloadedLayer), "it is of the kind that was asked for"
        staging.take(layer)
        if is_new:
            self.arenas.append(arena)
        return layer

    def reserve(self, specs: dict[torch.device, list[LayerSpec]]) -> None:
        """Take the memory for layers that are known, by the device of their attention."""
        layers = [spec for here in specs.values() for spec in here]
        if not layers:
            return
        arena = self._host_arena(layers, is_pinned=any(device.type == "cuda" for device in specs))
        size = self.group.batch, self.group.max_tokens
        for device, here in specs.items():
            self._staging(device, max(here, key=lambda spec: staging_nbytes([spec], *size)))
        self.group.reserve_scratch(arena, KVSpec(layers).scratch_nbytes(*size))  # the largest, and no other
        self.arenas.append(arena)

    def _host_arena(self, specs: list[LayerSpec], *, is_pinned: bool) -> Arena:
        nbytes = KVSpec(specs).arena_nbytes(self.group.batch, self.group.max_tokens)
        return Arena(
            nbytes, backend="torch", device="pinned" if is_pinned else "cpu", name="kv-cache in host memory"
        )

    def _staging(self, device: torch.device, spec: LayerSpec) -> Staging:
        """Return that of a device, with buffers that such a layer fits in."""
        nbytes = staging_nbytes([spec], self.group.batch, self.group.max_tokens)
        staging = self.stagings.get(device)
        if staging is None:
            staging = self.stagings[device] = Staging(device, self.group.batch, nbytes)
        elif staging.nbytes < nbytes:
            staging.make(nbytes)
        return staging


class OffloadedLayer(FullLayer):
    """A layer in host memory; what `append` returns lies on the device of its attention, `keys` and `values` do not.

    The views that `append` returns are good until the next layer is appended to.
    """

    __slots__ = ("__weakref__", "staging", "version")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.version = 0  # of what is held: it changes when tokens are cut, replaced, or change rows
        self.staging: Staging  # set by Staging.take

    def append(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """Write new tokens, and return views on the device of what a query may see; see `KVLayer.append`."""
        n_rows, n_new = self._accept(keys, values)
        start = self.length
        if start + n_new > self._n_ready:
            self._make_ready(n_new)
        self.regions[-1]._check()
        with torch.no_grad():
            views = self.staging.append(self, keys, values, self.low(start), start)
            self.staging.prefetch_after(self)
            self._advance(n_rows, start + n_new)  # at last, so that an interrupt has changed nothing
        return views

    def host_planes(self, n_rows: int) -> Pair:
        """Return keys and values of the first rows in host memory, ``[n_rows, kv_heads, max_tokens, dim]`` each."""
        if n_rows != self._bound:
            self._bind(n_rows)
        return self._k, self._v

    # What looks at host memory waits for the copies that write it.

    def _prepare(self) -> None:
        self.staging.copies.settle()
        super()._prepare()

    def planes(self) -> Any:
        """Yield name and whole of each buffer in host memory; see `KVLayer.planes`."""
        self.staging.copies.settle()
        return super().planes()

    def _check(self, keys: Any, values: Any) -> None:
        check = self.staging.ops.check
        check(keys, "keys")
        check(values, "values")
        check_shapes(self.index, self.spec, keys, values)
        self._check_rows(keys.shape[0], tuple(keys.shape))
        check_dtypes(self.index, self.spec, keys, values, self._wanted)

    # What changes tokens that are held makes a copy of them on the device worthless.

    def gather(self, rows: Any, low: int, count: int) -> None:
        """Put `count` rows in place of those that are held; see `KVLayer.gather`."""
        self.version += 1
        super().gather(rows, low, count)

    def _cut(self, n_tokens: int) -> None:
        if n_tokens < self.length:
            self.version += 1
        super()._cut(n_tokens)

    def _hold(self, runs: Any) -> None:
        self.version += 1
        super()._hold(runs)


class HostGroup(LayerGroup):
    """A group of layers in host memory, where rows are moved by numbers that the host has to know."""

    def _gather(self, rows: Any, **options: Any) -> None:
        super()._gather(rows.cpu() if isinstance(rows, torch.Tensor) else rows, **options)


def resident_layers(config: Any) -> frozenset[int]:
    """Return the layers that have to stay on the device: later layers read what their `update` returned.

    Raises
    ------
    ArgumentError
        There are such layers, and the config does not tell which, up to transformers 5.22.
    """
    text = decoder_config(config)
    modes = getattr(text, "kv_sharing_modes", None)
    if modes is None and getattr(text, "num_kv_shared_layers", None):
        raise ArgumentError(
            f'offload="cpu": layers of {type(config).__name__} read what others hold, and this transformers does not '
            f"tell which"
        )
    return frozenset(index for index, mode in enumerate(modes or ()) if mode == "store")
