"""Keys and values of the layers of a contiguous cache: the checks of what comes, and the copies of a compaction."""

from __future__ import annotations

from typing import Any

from gpuarena.arena import Arena
from gpuarena.errors import ArgumentError, ShapeError
from gpuarena.kv._layer import check_dtypes
from gpuarena.kv._ops import Ops
from gpuarena.kv.spec import SCRATCH_ALIGNMENT, KVSpec, LayerSpec
from gpuarena.region import Region

#: Most tokens of one layer that the scratch of a compaction holds. Longer pieces are copied in several steps, of
#: which a GPU starts each in some microseconds; at 256 tokens the copies themselves take longer than that.
_SCRATCH_TOKENS = 256


class SlotLayer:
    """Keys and values of one layer: ``[1, kv_heads, slots, dim]`` each, or both in ``[2, kv_heads, slots, dim]``."""

    __slots__ = ("dtypes", "index", "keys", "moved", "spec", "turn", "values")

    def __init__(self, arena: Arena, index: int, turn: int, spec: LayerSpec, capacity: int, ops: Ops) -> None:
        self.index = index
        self.turn = turn  # how many layers a step writes before this one
        self.spec = spec
        self.dtypes = (ops.dtype(spec.dtype), ops.dtype(spec.value_dtype))
        self.moved = [  # what a compaction copies
            arena.alloc(
                (buffer.n_planes, spec.kv_heads, capacity, buffer.dim),
                buffer.dtype,
                label=f"layer{index}.{buffer.name}",
            )
            for buffer in spec.buffers
        ]
        pairs = self.moved[0]
        # Regions, not views of arrays: a region makes its array outside of inference mode, and knows when it is stale.
        self.keys, self.values = (pairs[0:1], pairs[1:2]) if spec.is_joint else self.moved


def copy_tokens(ops: Ops, buffer: Any, staging: Any, start: int, to: int, n_tokens: int) -> None:
    """Copy slots of ``[planes, kv_heads, slots, dim]`` to others, which may overlap them from below."""
    distance = start - to
    assert distance > 0 or -distance >= n_tokens, "pieces slide down, or move to slots apart from theirs"
    n_staged = staging.shape[2]
    direct = not 0 < distance < min(n_tokens, n_staged)
    # So far apart, a chunk does not overlap its target, which is where the chunk before it was.
    chunk = (distance if 0 < distance < n_tokens else n_tokens) if direct else n_staged
    done = 0
    while done < n_tokens:
        n = min(chunk, n_tokens - done)
        source = ops.tokens(buffer, start + done, start + done + n)
        if not direct:
            staged = ops.tokens(staging, 0, n)
            staged[...] = source
            source = staged
        ops.tokens(buffer, to + done, to + done + n)[...] = source
        done += n


def staging_like(scratch: Region, region: Region) -> Region:
    """Return the scratch as a buffer like `region`, of fewer slots."""
    planes, heads, slots, dim = region.shape
    shape = (planes, heads, min(slots, scratch.nbytes // (planes * heads * dim * region.dtype.itemsize)), dim)
    nbytes = planes * heads * shape[2] * dim * region.dtype.itemsize
    return scratch[:nbytes].view(region.dtype).reshape(shape)


def scratch_nbytes_of(spec: KVSpec, capacity: int) -> int:
    row_nbytes = [layer.kv_heads * buffer.row_nbytes for _, layer in spec.owned for buffer in layer.buffers]
    return min(capacity, _SCRATCH_TOKENS) * max(row_nbytes)


def scratch_alignment_of(spec: KVSpec) -> int:
    return max(SCRATCH_ALIGNMENT, *(layer.alignment for _, layer in spec.owned))


def first_seen(spec: LayerSpec, start: int) -> int:
    """Return the first token that a view for queries from `start` on shows; sinks are no suffix, so it shows all."""
    return 0 if spec.window is None or spec.sinks else max(0, start - spec.window + 1)


def check_spec(spec: KVSpec) -> None:
    for index, layer in spec.owned:
        for option, given in (("slack", layer.slack), ("storage", layer.storage)):
            if given is not None:
                raise ArgumentError(
                    f"layer {index} has {option}={given!r}, which a contiguous cache does not have: it stores what is "
                    f"appended, the whole history of it; leave {option} out, or use KVCache"
                )


def check_arrays(own: SlotLayer, ops: Ops, keys: Any, values: Any) -> None:
    """Raise unless a layer may be given these."""
    ops.check(keys, "keys")
    ops.check(values, "values")
    spec, who = own.spec, f"layer {own.index}"
    k_shape, v_shape = tuple(keys.shape), tuple(values.shape)
    if len(k_shape) != 4 or k_shape[:2] != (1, spec.kv_heads) or k_shape[3] != spec.key_dim:
        raise ShapeError(
            f"{who}: keys are {list(k_shape)}, a request takes [1, {spec.kv_heads}, tokens, {spec.key_dim}]",
            shape=k_shape,
        )
    if v_shape != (*k_shape[:3], spec.value_dim):
        raise ShapeError(
            f"{who}: values are {list(v_shape)}, for these keys they must be {[*k_shape[:3], spec.value_dim]}",
            shape=v_shape,
        )
    check_dtypes(own.index, spec, keys, values, own.dtypes)
