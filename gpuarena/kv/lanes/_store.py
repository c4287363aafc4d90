"""The memory of the lanes: regions of each layer, and the scratch that they share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from gpuarena._bump import align_up
from gpuarena.arena import Arena
from gpuarena.kv._ops import Ops
from gpuarena.kv._whole import taken_whole
from gpuarena.kv.lanes._arrays import Lanes, arrays_for, index_sizes
from gpuarena.kv.spec import SCRATCH_ALIGNMENT, KVSpec, LayerSpec
from gpuarena.region import Region


def is_run(lanes: Lanes) -> bool:
    """Return whether these are consecutive lanes, so that a view shows them."""
    return lanes == tuple(range(lanes[0], lanes[0] + len(lanes))) if lanes else True


class _Layer:
    """The regions of one layer."""

    def __init__(self, arena: Arena, index: int, spec: LayerSpec, lanes: int, max_tokens: int) -> None:
        self.spec = spec
        shape = (lanes, spec.kv_heads, max_tokens)
        # Zeros, because what a mask hides is multiplied by 0, and 0 times a NaN that lay there is NaN.
        self._regions: list[Region] = [
            arena.alloc(
                (*([buffer.n_planes] if buffer.n_planes > 1 else []), *shape, buffer.dim),
                buffer.dtype,
                fill=0,
                label=f"layer{index}.{buffer.name}",
            )
            for buffer in spec.buffers
        ]
        self.used = [0] * lanes
        """Slots from the front of each lane behind which there are zeros."""

    def buffers(self) -> tuple[Any, Any]:
        """Return the keys and the values, ``[lanes, kv_heads, max_tokens, dim]``."""
        if self.spec.is_joint:
            keys, values = self._regions[0].array
            return keys, values
        return self._regions[0].array, self._regions[1].array

    @property
    def nbytes(self) -> int:
        return sum(region.nbytes for region in self._regions)


class LaneStore:
    """What `LaneCache` keeps in the arena; the callers have checked every argument."""

    def __init__(self, arena: Arena, spec: KVSpec, lanes: int, max_tokens: int, ops: Ops) -> None:
        self._rows = (lanes, max_tokens)
        align = max(arena.alignment, SCRATCH_ALIGNMENT)
        with taken_whole(arena, "LaneCache", lambda: arena_nbytes(spec, lanes, max_tokens, arena.alignment)):
            self.layers = {
                number: _Layer(arena, number, layer, lanes, max_tokens) for number, layer in spec.owned
            }
            self._lengths = arena.alloc(lanes, "int32", fill=0, label="lengths")
            self._offsets = arena.alloc(lanes + 1, "int32", fill=0, label="cu_seqlens")
            self._arrays = arrays_for(arena, spec, lanes, ops)
            # Last: the arena is a stack, so that as long as this lives, all of the above does.
            self._scratch = arena.alloc(
                scratch_nbytes(spec, lanes, max_tokens), "uint8", align=align, label="scratch"
            )
        self._published: Lanes | None = (0,) * lanes

    def check(self) -> None:
        """Raise `StaleRegionError` if the arena was rolled back."""
        self._scratch.array  # noqa: B018 - looks whether the region is live

    @property
    def is_live(self) -> bool:
        return self._scratch.is_live

    @property
    def scratch_nbytes(self) -> int:
        return self._scratch.nbytes

    # -- small tables -------------------------------------------------------------------------------------------

    def length_vector(self, lengths: Sequence[int]) -> Any:
        """Return the table of lengths that kernels read, written again if an interrupt kept it from being `lengths`."""
        if self._published != tuple(lengths):
            self.publish(lengths)
        return self._lengths.array

    def publish(self, lengths: Sequence[int]) -> None:
        """Write the lengths of all lanes where kernels read them."""
        self._published = None
        self._arrays.put(self._lengths.array, lengths)
        self._published = tuple(lengths)

    def offsets(self, lengths: Sequence[int]) -> Any:
        """Return the running sums of lengths, ``[rows + 1]``, in a table that the next call overwrites."""
        sums = [0, *accumulate(lengths)]
        table = self._offsets.array[: len(sums)]
        self._arrays.put(table, sums)
        return table

    # -- writing ------------------------------------------------------------------------------------------------

    def write(
        self, layer: int, lanes: Lanes, starts: Lanes, counts: Sequence[int], keys: Any, values: Any
    ) -> None:
        """Write the first ``counts[i]`` tokens of row i behind the first ``starts[i]`` of lane ``lanes[i]``."""
        if not any(counts):
            return
        found, arrays = self.layers[layer], self._arrays
        k, v = found.buffers()
        # What is written before it is read must not lie there: rows go one by one, and keys go first.
        keys, values = arrays.apart(keys, k), arrays.apart(arrays.apart(values, k), v)
        for lane, start, count in zip(lanes, starts, counts, strict=True):  # first, in case of an interrupt
            found.used[lane] = max(found.used[lane], start + count)
        n = counts[0] if len(set(counts)) == 1 else 0  # 0: they differ
        even = n and len(set(starts)) == 1 and is_run(lanes)
        for buffer, rows in zip((k, v), (keys, values), strict=True):
            if even:
                run, start = slice(lanes[0], lanes[0] + len(lanes)), starts[0]
                arrays.assign(buffer[run, :, start : start + n], rows[:, :, :n])
            elif n != 1 or not arrays.write_one(buffer, lanes, starts, rows[:, :, :1]):
                for row, (lane, start, count) in enumerate(zip(lanes, starts, counts, strict=True)):
                    arrays.assign(buffer[lane, :, start : start + count], rows[row, :, :count])

    def move_down(self, lane: int, start: int, stop: int, held: int) -> None:
        """Move the tokens from `stop` to `held` to `start`, in every layer."""
        n = held - stop
        for layer in self.layers.values():
            for buffer, staged in zip(layer.buffers(), self._staged(layer, 1, n), strict=True):
                # By way of the scratch: the two ranges overlap, and then no library's copy is defined.
                self._arrays.assign(staged[0], buffer[lane, :, stop:held])
                self._arrays.assign(buffer[lane, :, start : start + n], staged[0])

    def copy(self, source: int, target: int, start: int, stop: int) -> None:
        """Copy tokens to the front of another lane, in every layer."""
        for layer in self.layers.values():
            layer.used[target] = max(layer.used[target], stop - start)
            for buffer in layer.buffers():
                self._arrays.assign(buffer[target, :, : stop - start], buffer[source, :, start:stop])

    def rotate(
        self, rotate: Callable[[int, Any], Any], lane: int, start: int, stop: int, finish: Callable[[], None]
    ) -> None:
        """Call ``rotate(layer, keys)``, which changes keys in place, for every layer, and then `finish`.

        All keys are as before if one of them raises.
        """
        saved = []
        try:
            for number, layer in self.layers.items():
                keys = layer.buffers()[0][lane : lane + 1, :, start:stop]
                saved.append((keys, self._arrays.copy(keys)))
                self._arrays.call(partial(rotate, number, keys))
            self.check()
            finish()
        except BaseException:
            if self.is_live:  # otherwise the memory is another's by now
                for keys, before in saved:
                    self._arrays.assign(keys, before)
            raise

    # -- reading ------------------------------------------------------------------------------------------------

    def read(self, layer: int, lanes: Lanes, lengths: Sequence[int]) -> tuple[Any, Any]:
        """Return ``[rows, kv_heads, longest, dim]`` twice, zeros behind the length of each lane."""
        found = self.layers[layer]
        longest = max(lengths, default=0)
        k, v = found.buffers()
        for lane, held in zip(lanes, lengths, strict=True):
            if found.used[lane] > held and longest > held:
                # Once for what was written there: cutting a lane stays constant in tokens.
                k[lane, :, held : found.used[lane]] = 0
                v[lane, :, held : found.used[lane]] = 0
                found.used[lane] = held
        if is_run(lanes):
            first = lanes[0] if lanes else 0
            return k[first : first + len(lanes), :, :longest], v[first : first + len(lanes), :, :longest]
        staged = self._staged(found, len(lanes), longest)
        for buffer, target in zip((k, v), staged, strict=True):
            self._arrays.gather(buffer, lanes, longest, target)
        return staged

    def packed(self, layer: int, lanes: Lanes, lengths: Sequence[int]) -> tuple[Any, Any]:
        """Return ``[total, kv_heads, dim]`` twice, the tokens of one lane behind those of another."""
        found = self.layers[layer]
        spec, total = found.spec, sum(lengths)
        # The order of the dimensions is another one, the number of bytes the same.
        k, v = self._staged(found, 1, total)
        rows = (
            k.reshape(total, spec.kv_heads, spec.key_dim),
            v.reshape(total, spec.kv_heads, spec.value_dim),
        )
        for buffer, target in zip(found.buffers(), rows, strict=True):
            start = 0
            for lane, held in zip(lanes, lengths, strict=True):
                self._arrays.assign(target[start : start + held], buffer[lane, :, :held].swapaxes(0, 1))
                start += held
        return rows

    def _staged(self, layer: _Layer, n_rows: int, n_tokens: int) -> tuple[Any, Any]:
        """Return room in the scratch for keys and values, ``[n_rows, kv_heads, n_tokens, dim]``."""
        spec, scratch = layer.spec, self._scratch.array
        made = []
        start = 0
        for dtype, dim in ((spec.dtype, spec.key_dim), (spec.value_dtype, spec.value_dim)):
            shape = (n_rows, spec.kv_heads, n_tokens, dim)
            stop = start + math.prod(shape) * dtype.itemsize
            made.append(self._arrays.cast(scratch[start:stop], dtype).reshape(shape))
            start = _keys_nbytes(spec, *self._rows)
        return made[0], made[1]


def _keys_nbytes(spec: LayerSpec, lanes: int, max_tokens: int) -> int:
    """Return where the values begin in the scratch, behind the keys of all lanes."""
    return align_up(
        lanes * spec.kv_heads * max_tokens * spec.key_dim * spec.dtype.itemsize, SCRATCH_ALIGNMENT
    )


def scratch_nbytes(spec: KVSpec, lanes: int, max_tokens: int) -> int:
    """Return the bytes that the keys and values of all lanes take, of the layer where they take most."""
    rows = lanes * max_tokens
    return max(
        _keys_nbytes(layer, lanes, max_tokens)
        + rows * layer.kv_heads * layer.value_dim * layer.value_dtype.itemsize
        for _, layer in spec.owned
    )


def arena_nbytes(spec: KVSpec, lanes: int, max_tokens: int, alignment: int) -> int:
    """Return the bytes that a `LaneStore` takes of an arena at most."""
    sizes = [n for _, layer in spec.owned for n in layer.region_nbytes(lanes, max_tokens)]
    sizes += [4 * lanes, 4 * (lanes + 1), *index_sizes(spec, lanes), scratch_nbytes(spec, lanes, max_tokens)]
    alignment = max(alignment, SCRATCH_ALIGNMENT, *(layer.alignment for _, layer in spec.owned))
    return sum(align_up(nbytes, alignment) for nbytes in sizes)
