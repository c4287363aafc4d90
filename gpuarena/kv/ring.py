"""A layer of bounded memory in which nothing is ever moved: a ring of slots, mapped twice in a row."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from gpuarena._bump import align_up, contiguous_strides
from gpuarena._index import Layout
from gpuarena.arena import Arena
from gpuarena.errors import ArgumentError
from gpuarena.kv._layer import KVLayer
from gpuarena.kv.spec import LayerSpec
from gpuarena.region import Region

__all__ = ["RingLayer", "ring_layout"]

#: Of the keys and of the values in each slot, in bytes: what kernels that load 16 bytes at once ask of a stride.
_SLOT_ALIGNMENT = 16


def ring_layout(n_slots: int, slot_nbytes: int, granule: int) -> tuple[int, int]:
    """Return how many slots of how many bytes make a ring of whole granules: no fewer, no smaller, least memory.

    A slot is made longer where that costs less than more slots would.

    >>> ring_layout(4096 + 64, 8 * 2 * 128 * 2, granule=2 << 20)  # 8 heads of 128, keys and values, bfloat16
    (4608, 4096)
    >>> ring_layout(1000, 96, granule=64 << 10)
    (1024, 128)

    Parameters
    ----------
    n_slots, slot_nbytes : int
        What is needed at least.
    granule : int
        Bytes, a power of two: `MirroredMemory.granule`.
    """
    layouts = []
    step = _SLOT_ALIGNMENT
    while step <= granule:
        longer = align_up(slot_nbytes, step)
        unit = granule // math.gcd(granule, longer)  # slots that make whole granules
        more = -(-n_slots // unit) * unit
        layouts.append((more * longer, longer, more))
        step *= 2
    _, nbytes, slots = min(layouts)
    return slots, nbytes


class RingLayer(KVLayer):
    """Keys and values of the last ``window + slack`` tokens, token-major: ``[slots, batch, kv_heads, dim]``.

    Token t lies in slot ``t % n_slots``. The slots are mapped twice in a row, so that a run of up to `n_slots`
    tokens is one ascending view even where it wraps around, and every token is written once. It takes the place of
    a `WindowLayer` without sinks, which would not lie beside the window, and always holds as much as that can.

    The memory is not the arena's: it is mapped beside it, on the same device, in whole granules (64 KiB on the
    host, 2 MiB on a CUDA device), and given back when the layer and all views of it are gone. In a forked child
    the layer cannot be used.

    Attributes
    ----------
    n_kept : int
        Tokens of a row that are held: ``window + slack``, or all if they cannot be so many.
    n_slots : int
        Slots: `n_kept`, and more where whole granules take more. What is possible depends on `n_kept` alone, and so
        is the same on all devices.
    slot_nbytes : int
        Bytes from one token to the next: keys and values of all rows, and padding.

    Raises
    ------
    ArgumentError
        The spec has no window with slack, or has sinks or quantised storage.
    OutOfMemoryError, CaptureError, BackendError, DeviceMismatchError
        The memory cannot be had; see `MirroredMemory`. Nothing is held then.

    Notes
    -----
    The heads of a token lie side by side, so the tokens of one head are far apart. Attention of torch 2.13 on a CPU
    takes 0.8 to 1.4 times as long for that as for head-major keys in float32, and 2 to 3.5 times in bfloat16, where a
    `WindowLayer` is faster on the whole.
    """

    __slots__ = ("_base", "_highest", "_k", "_marker", "_ring", "_v", "n_kept", "n_slots", "slot_nbytes")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._highest = 0  # one more than the last token that was ever written since the ring was empty
        self._k: Any = None  # [rows, kv_heads, 2 * n_slots, key_dim]
        self._v: Any = None
        super().__init__(*args, **kwargs)

    def _allocate(self) -> tuple[Region, ...]:
        """Return keys and values of all slots, twice: each ``[batch, kv_heads, 2 * n_slots, dim]``."""
        from gpuarena.backends.mirrored import MirroredMemory

        _check_spec(self.spec, self.index)
        spec, batch, arena = self.spec, self._common.batch, self.arena
        memory = MirroredMemory(arena.backend, arena.device)
        key_nbytes = align_up(batch * spec.kv_heads * spec.key_dim * spec.dtype.itemsize, _SLOT_ALIGNMENT)
        value_nbytes = batch * spec.kv_heads * spec.value_dim * spec.value_dtype.itemsize
        self.n_kept = spec.n_slots(self._common.max_tokens)
        self.n_slots, self.slot_nbytes = ring_layout(self.n_kept, key_nbytes + value_nbytes, memory.granule)
        start = arena.checkpoint()
        # Of no bytes: it tells when the arena is rolled back or closed, which ends the layer.
        self._marker = arena.alloc(0, "uint8", label=f"layer{self.index}.ring")
        try:
            ring = Arena(
                2 * self.n_slots * self.slot_nbytes,
                backend=memory,
                name=f"layer{self.index}.ring",
                stream=arena.stream,
            )
            self._ring = ring.alloc((2 * self.n_slots, self.slot_nbytes), "uint8")
            self._base = ring.address
            self._ops.reach(min(2 * self.n_slots, self._common.max_tokens))
        except BaseException:
            arena.rollback(start)
            raise
        keys = self._plane(0, spec.key_dim, spec.dtype)
        return keys, self._plane(key_nbytes, spec.value_dim, spec.value_dtype)

    def _plane(self, offset: int, dim: int, dtype: Any) -> Region:
        """Return what lies at `offset` of every slot, heads before tokens."""
        rows, heads, last = contiguous_strides((self._common.batch, self.spec.kv_heads, dim), dtype.itemsize)
        shape = (self._common.batch, self.spec.kv_heads, 2 * self.n_slots, dim)
        return Region(self._ring, Layout(offset, shape, (rows, heads, self.slot_nbytes, last)), dtype)

    def append(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """Write new tokens, and return views of what a query may see; see `KVLayer.append`.

        The first tokens of all may be more than are held, as a prompt is: then `keys` and `values` themselves
        come back, since those are all that there is to see, and their end is held. Later ones may be at most
        ``slack + 1`` at once. What lies in the ring itself, such as earlier views, is copied first.

        Raises
        ------
        CapacityError
            Also for more tokens at once than fit beside the window; the figures count tokens.
        """
        n_rows, n_new = self._accept(keys, values)
        common, ops, n_kept = self._common, self._ops, self.n_kept
        start = self.length
        stop = start + n_new
        if stop > common.max_tokens:
            raise self._capacity_error(n_new)
        low = self.low(start)
        is_whole = start == 0 and n_new > n_kept
        if stop - low > n_kept and not is_whole:
            raise self._chunk_error(n_new, n_kept - (start - low))
        self.check_live()
        self._bind(n_rows)
        keys, values = self._outside(keys), self._outside(values)
        if is_whole:
            first = stop - n_kept
            self._write(first, ops.tokens(keys, first, stop), ops.tokens(values, first, stop))
        else:
            self._write(start, keys, values)
        self._highest = max(self._highest, stop)
        common.rows = n_rows
        common.lengths[self._slot] = stop
        common.high_water = max(common.high_water, stop)
        return (keys, values) if is_whole else self._views(low, stop)

    def _write(self, start: int, keys: Any, values: Any) -> None:
        self._ops.write(self._k, self._v, start % self.n_slots, keys, values)

    def _outside(self, array: Any) -> Any:
        """Return an array that shares no memory with the ring: no library sees that two addresses are one byte."""
        if not 0 <= _address(array) - self._base < self._ring.nbytes:
            return array
        return array.clone() if hasattr(array, "clone") else array.copy()

    def _views(self, low: int, stop: int) -> tuple[Any, Any]:
        """Return the tokens from `low` to `stop`, which are held."""
        first = low % self.n_slots
        last = first + stop - low
        return self._ops.tokens(self._k, first, last), self._ops.tokens(self._v, first, last)

    def _bind(self, n_rows: int) -> None:
        if n_rows != self._bound:
            # By regions, whose arrays are made outside of inference mode.
            self._k, self._v = (region[:n_rows].array for region in self.regions)
            self._bound = n_rows

    # -- what it holds ------------------------------------------------------------------------------------------

    @property
    def held_from(self) -> int:
        """The first token that is still held.

        Tokens that were cut off have overwritten what was held before them, so a cut brings nothing back.
        """
        return max(0, self._highest - self.n_kept)

    @property
    def n_held(self) -> int:
        """Tokens that are held."""
        return self.length - self.held_from

    @property
    def positions(self) -> list[range]:
        """The runs of tokens that `keys` and `values` show, as a `WindowLayer` has them: no sinks, and the rest."""
        run = range(self.held_from, self.length)
        return [range(0), run] if run.start else [run]

    @property
    def keys(self) -> Any:
        """View of the keys that are held, ``[rows, kv_heads, n_held, key_dim]``."""
        self._prepare()
        return self._views(self.held_from, self.length)[0]

    @property
    def values(self) -> Any:
        """View of the values that are held, ``[rows, kv_heads, n_held, value_dim]``."""
        self._prepare()
        return self._views(self.held_from, self.length)[1]

    def read(self, n_tokens: int = 1) -> tuple[Any, Any]:
        """Return what the queries of the last `n_tokens` tokens may see; see `KVLayer.read`."""
        n_tokens = self._check_read(n_tokens)
        self._prepare()
        return self._views(self.low(self.length - n_tokens), self.length)

    def _prepare(self) -> None:
        self.check_live()
        self._bind(self._common.batch if self._common.rows is None else self._common.rows)

    def _restart(self) -> None:
        self._highest = 0

    def _hold(self, runs: Sequence[range]) -> None:
        super()._hold(runs)
        self._highest = runs[-1].start + self.n_kept if len(runs) > 1 else runs[-1].stop

    # -- for the group ------------------------------------------------------------------------------------------

    @property
    def reserved_nbytes(self) -> int:
        """Bytes of memory of the ring, all of its slots and their padding once."""
        return self.n_slots * self.slot_nbytes

    def check_live(self) -> None:
        """Raise `StaleRegionError` if the arena was rolled back below the layer, or in a forked child `ForkedError`."""
        self._marker._check()
        self._ring._check()

    def planes(self) -> Iterator[tuple[str, Any]]:
        """Yield the name and the whole of keys and of values, ``[batch, kv_heads, 2 * n_slots, dim]``."""
        for name, region in zip(("keys", "values"), self.regions, strict=True):
            yield name, region.array

    def filled(self) -> Iterator[tuple[str, Any]]:
        """Yield the name and the filled part of keys and of values, ``[rows, kv_heads, n_held, dim]``."""
        yield "keys", self.keys
        yield "values", self.values

    def gather(self, rows: Any, low: int, count: int) -> None:
        """Put `count` rows in place of those that are held, from token `low` on; `rows` are checked."""
        ops, scratch = self._ops, self._common.scratch[self.arena.device].array
        for _, plane in self.planes():
            n_at_once = ops.tokens_in(scratch, plane, count)
            for start in range(max(low, self.held_from), self.length, n_at_once):
                first = start % self.n_slots
                source = ops.tokens(plane, first, first + min(n_at_once, self.length - start))
                ops.gather_rows(source, rows, scratch, ops.rows(source, count))


def _check_spec(spec: LayerSpec, index: int) -> None:
    if spec.window is None or spec.slack is None or spec.sinks or spec.storage:
        raise ArgumentError(
            f"layer {index}: a ring holds a window with slack, without sinks and as it is appended, not {spec}; "
            f"a WindowLayer has sinks"
        )


def _address(array: Any) -> int:
    """Return the address of the first element of a torch, NumPy or CuPy array."""
    if hasattr(array, "data_ptr"):
        address = array.data_ptr()
    elif hasattr(array, "__array_interface__"):
        address = array.__array_interface__["data"][0]
    else:
        address = array.data.ptr
    return int(address)
