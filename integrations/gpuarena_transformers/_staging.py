"""Two buffers on a device, to which keys and values in host memory are brought for their attention."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from gpuarena import Arena
from gpuarena._bump import align_up
from gpuarena.kv import LayerSpec
from gpuarena.kv._ops import ops_for
from gpuarena.region import Region

if TYPE_CHECKING:
    from gpuarena_transformers.offload import OffloadedLayer

__all__ = ["Copies", "Staging", "staging_nbytes"]

#: Alignment of regions in bytes, that of an arena.
_ALIGNMENT = 256

#: Keys and values.
Pair = tuple[torch.Tensor, torch.Tensor]
#: Whose tokens they are: the slot of a layer in its group, the version of its tokens, rows, and length.
Held = tuple[int, int, int, int]


class Copies:
    """Copies between host and device, one after the other; here each is done when the call returns."""

    _non_blocking = False

    def copy(self, source: Pair, target: Pair, n_rows: int, start: int, stop: int) -> Any:
        """Copy tokens of the first rows, ``[rows, kv_heads, tokens, dim]`` each; return an event behind that, or None.

        It begins behind everything that the current stream was given so far.
        """
        for part, into in zip(source, target, strict=True):
            for row in range(n_rows):
                for head in range(part.shape[1]):
                    # One run of memory each: for anything else torch would allocate memory to pack it in.
                    into[row, head, start:stop].copy_(part[row, head, start:stop], self._non_blocking)

    def wait(self, event: Any) -> None:
        """Let the current stream wait for an event."""

    def settle(self) -> None:
        """Wait on the host until all copies are done."""

    def use(self, buffer: torch.Tensor) -> None:
        """Note that the memory of `buffer`, on the device, may not be given to others while copies use it."""


class CudaCopies(Copies):
    """Copies on a stream of their own, beside what the current stream computes; the host's memory is pinned."""

    _non_blocking = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, source: Pair, target: Pair, n_rows: int, start: int, stop: int) -> Any:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            super().copy(source, target, n_rows, start, stop)
            return self._stream.record_event()

    def wait(self, event: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)

    def settle(self) -> None:
        self._stream.synchronize()

    def use(self, buffer: torch.Tensor) -> None:
        buffer.record_stream(self._stream)


def copies_for(device: torch.device) -> Copies:
    """Return how copies between the host and a device are made."""
    return CudaCopies(device) if device.type == "cuda" else Copies()


@dataclass
class Buffer:
    """One of the two buffers, and what it holds: what the next query of a layer may see, at least."""

    region: Region
    """``[nbytes]`` uint8."""
    held: Held | None = None
    copied: Any = None
    """The event behind what was copied to or from it last."""


class Staging:
    """Two buffers on one device, which its layers share: while one is read, the other gets what the next layer holds.

    Parameters
    ----------
    device : torch.device
    batch : int
        Most rows.
    nbytes : int
        Of each buffer, see `staging_nbytes`.
    """

    def __init__(self, device: torch.device, batch: int, nbytes: int) -> None:
        self.device = device
        self.copies = copies_for(device)
        self._batch = batch
        self._layers: list[weakref.ref[OffloadedLayer]] = []  # no cycle keeps the memory of a dropped cache
        self.make(nbytes)

    def make(self, nbytes: int) -> None:
        """Take buffers of `nbytes` each, instead of those that are there."""
        nbytes = align_up(nbytes, _ALIGNMENT)
        arena = Arena(2 * nbytes, backend="torch", device=self.device, name="kv-cache staging")
        self.copies.settle()
        self.arena, self.nbytes = arena, nbytes
        self.ops: Any = ops_for(arena, self._batch)
        self.buffers = [Buffer(arena.alloc(nbytes, "uint8", label=f"staging {n}")) for n in range(2)]
        self._latest = 0  # the buffer that the views returned last show
        self._planes: dict[tuple[int, int], Pair] = {}  # by slot of the layer and number of the buffer
        self.copies.use(self.buffers[0].region.array)

    def take(self, layer: OffloadedLayer) -> None:
        """Let a layer use the buffers, as the next one that a model comes to."""
        layer.staging = self
        self._layers.append(weakref.ref(layer))

    def append(
        self, layer: OffloadedLayer, keys: torch.Tensor, values: torch.Tensor, low: int, start: int
    ) -> Pair:
        """Write new tokens from `start` on to a buffer and to the host, and return views from token `low` on."""
        n_rows, stop = keys.shape[0], start + keys.shape[2]
        if self.ops._may_overlap(keys, values):  # what an earlier call returned
            keys, values = keys.clone(), values.clone()
        number = self._number_for(layer, n_rows)
        buffer, planes, host = self.buffers[number], self.planes(layer, number), layer.host_planes(n_rows)
        self._bring(layer, number, n_rows, low)
        if buffer.copied is not None:
            self.copies.wait(buffer.copied)
        for plane, new in zip(planes, (keys, values), strict=True):
            plane[:n_rows, :, start:stop].copy_(new.detach())
        buffer.copied = self.copies.copy(planes, host, n_rows, start, stop)
        buffer.held = layer._slot, layer.version, n_rows, stop
        self._latest = number
        return planes[0][:n_rows, :, low:stop], planes[1][:n_rows, :, low:stop]

    def prefetch_after(self, layer: OffloadedLayer) -> None:
        """Begin to bring what the next layer holds to the buffer that is free; behind the last comes the first."""
        layers = [found for ref in self._layers if (found := ref()) is not None]
        following = layers[(layers.index(layer) + 1) % len(layers)]
        n_rows, stop = following.rows, following.length
        if following is not layer and n_rows and stop and following.regions[-1].is_live:
            number = self._number_for(following, n_rows)
            self._bring(following, number, n_rows, following.low(stop))

    def _number_for(self, layer: OffloadedLayer, n_rows: int) -> int:
        """Return the buffer with the tokens of a layer, or else the one that is free."""
        wanted = layer._slot, layer.version, n_rows, layer.length
        found = (number for number, buffer in enumerate(self.buffers) if buffer.held == wanted)
        return next(found, 1 - self._latest)

    def _bring(self, layer: OffloadedLayer, number: int, n_rows: int, low: int) -> None:
        """Copy the tokens of a layer from `low` on from the host to a buffer, unless they are there."""
        buffer, wanted = self.buffers[number], (layer._slot, layer.version, n_rows, layer.length)
        if buffer.held != wanted:
            host, planes = layer.host_planes(n_rows), self.planes(layer, number)
            buffer.held = None
            if low < layer.length:
                buffer.copied = self.copies.copy(host, planes, n_rows, low, layer.length)
            buffer.held = wanted

    def planes(self, layer: OffloadedLayer, number: int) -> Pair:
        """Return a buffer seen as keys and values of a layer, ``[batch, kv_heads, max_tokens, dim]`` each."""
        region = self.buffers[number].region
        region._check()
        found = self._planes.get((layer._slot, number))
        if found is None:
            spec, common = layer.spec, layer._common
            with torch.inference_mode(False):  # else they could be written in that mode only
                raw, made = region.array, []
                sizes = _plane_nbytes(spec, common.batch, common.max_tokens)
                dims = ((spec.key_dim, spec.dtype), (spec.value_dim, spec.value_dtype))
                for nbytes, (dim, dtype) in zip(sizes, dims, strict=True):
                    shape = common.batch, spec.kv_heads, common.max_tokens, dim
                    made.append(raw[:nbytes].view(dtype.torch).view(shape))
                    raw = raw[align_up(nbytes, _ALIGNMENT) :]
            found = self._planes[layer._slot, number] = made[0], made[1]
        return found


def _plane_nbytes(spec: LayerSpec, batch: int, tokens: int) -> tuple[int, int]:
    """Return the bytes of keys and of values of all slots."""
    rows = batch * spec.kv_heads * tokens
    return rows * spec.key_dim * spec.dtype.itemsize, rows * spec.value_dim * spec.value_dtype.itemsize


def staging_nbytes(specs: list[LayerSpec], batch: int, tokens: int) -> int:
    """Return the bytes of one buffer for layers like these."""
    sizes = (_plane_nbytes(spec, batch, tokens) for spec in specs)
    return max((sum(align_up(nbytes, _ALIGNMENT) for nbytes in both) for both in sizes), default=0)
