from __future__ import annotations

import numpy as np
import pytest

from gpuarena import Arena, Region
from gpuarena.errors import StaleRegionError

# What a region does on every backend is tested in shared_core; here is what does not depend on one.


@pytest.fixture
def arena():
    return Arena(4096, alignment=64, name="scratch")


def test_a_region_describes_itself(arena):
    arena.alloc(1, "uint8")
    region = arena.alloc((2, 3), "float32", label="weights")
    assert (region.offset, region.nbytes, region.shape, region.strides) == (64, 24, (2, 3), (12, 4))
    assert (region.dtype, region.label, region.ndim) == ("float32", "weights", 2)
    assert region.address == arena.address + 64
    assert region.arena is arena
    assert region.is_live
    assert region.is_contiguous
    assert repr(region) == "<region 'weights' float32[2, 3] at offset 64, live>"
    assert repr(region[1]) == "<region 'weights' float32[3] at offset 76, live>"


def test_slices_carry_the_label_and_count_their_own_bytes(arena):
    region = arena.alloc((4, 6), "int16", label="x")
    part = region[::2, 1::3]
    assert (part.nbytes, part.strides, part.label) == (8, (24, 6), "x")
    assert not part.is_contiguous


def test_metadata_of_a_stale_region_stays_readable(arena):  # R4
    with arena.scope():
        region = arena.alloc((2, 3), "float32", label="gone")
        part = region[1:, ::2]
    for stale, shape, nbytes in ((region, (2, 3), 24), (part, (1, 2), 8)):
        assert not stale.is_live
        assert (stale.shape, stale.nbytes, stale.label, stale.dtype) == (shape, nbytes, "gone", "float32")
        assert stale.address == arena.address + stale.offset
        assert len(stale) == shape[0]
        assert "stale" in repr(stale)
    assert hash(region) != hash(part)


STALE_WAYS = {
    "array": lambda r: r.array,
    "as_numpy": lambda r: r.as_numpy(),
    "as_torch": lambda r: r.as_torch(),
    "as_cupy": lambda r: r.as_cupy(),
    "slice": lambda r: r[1:],
    "element": lambda r: r[0],
    "ellipsis": lambda r: r[...],
    "write": lambda r: r.__setitem__(..., 0),
    "reshape": lambda r: r.reshape(-1),
    "view": lambda r: r.view("uint8"),
    "iteration": lambda r: list(r),
    "asarray": np.asarray,
    "array copy": np.array,
    "__array__": lambda r: r.__array__(),
    "__array_interface__": lambda r: r.__array_interface__,
    "__dlpack__": lambda r: r.__dlpack__(),
    "__dlpack_device__": lambda r: r.__dlpack_device__(),
    "from_dlpack": np.from_dlpack,
    "fill of another": lambda r: r.arena.alloc(r.shape, r.dtype, fill=r),
    "from_array": lambda r: r.arena.from_array(r),
    "adopt": Arena.from_buffer,
}


@pytest.mark.parametrize("seen_before", [False, True], ids=["never seen", "seen before"])
@pytest.mark.parametrize("way", STALE_WAYS)
def test_every_way_to_stale_contents_raises(arena, way, seen_before):  # R4
    if way == "as_torch":
        pytest.importorskip("torch")
    outer = arena.alloc(4, "float32", fill=1)
    with arena.scope("step"):
        region = arena.alloc(4, "float32", fill=2)
        part = region[1:]
        if seen_before:
            region.array, part.array, region.as_numpy(), part.as_numpy()
    before = arena.stats
    for stale in (region, part):
        with pytest.raises(StaleRegionError) as caught:
            STALE_WAYS[way](stale)
        assert caught.value.region is stale
    assert arena.stats == before
    if way != "as_cupy":
        STALE_WAYS[way](outer)


def test_the_message_says_which_scope_took_the_memory_and_where(arena):  # C5
    with arena.scope("prefill"):
        region = arena.alloc((2, 3), "float32", label="logits")
    closed_at = f"{__file__}:"
    with pytest.raises(StaleRegionError) as caught:
        region.array
    message = str(caught.value)
    for part in ("'logits'", "float32[2, 3]", "offset 0", "'prefill'", closed_at):
        assert part in message


def test_the_message_names_the_rollback_that_dropped_it_not_a_later_one(arena):
    checkpoint = arena.checkpoint()
    region = arena.alloc(4, "uint8")
    arena.rollback(checkpoint)
    with arena.scope("later"):
        arena.alloc(4, "uint8")
    arena.alloc(4, "uint8")
    arena.reset()
    with pytest.raises(StaleRegionError, match=r"rollback\(\)") as caught:
        region.array
    assert "later" not in str(caught.value)
    for _ in range(300):
        with arena.scope("later"):
            arena.alloc(1, "uint8")
    with pytest.raises(StaleRegionError, match=r"'later'.* or by an earlier one"):
        region.array
    with arena.scope("known"):
        region = arena.alloc(4, "uint8")
    with pytest.raises(StaleRegionError, match="'known'") as caught:
        region.array
    assert "earlier" not in str(caught.value)


def test_the_message_says_so_when_the_rollback_is_not_remembered(arena):
    checkpoint = arena.checkpoint()
    region = arena.alloc(4, "uint8")
    arena.rollback(checkpoint)
    arena.alloc(4, "uint8")  # at the slot of `region`, and stays
    for _ in range(300):
        with arena.scope():
            arena.alloc(1, "uint8")
    with pytest.raises(StaleRegionError, match="too long ago"):
        region.array


def test_a_region_is_made_by_an_arena_and_compares_by_identity(arena):
    region = arena.alloc(3, "uint8")
    same_bytes = region[...]
    assert isinstance(same_bytes, Region)
    assert region == region
    assert region != same_bytes
    assert len({region, same_bytes, region}) == 2


def test_the_native_array_is_made_once_and_on_first_use(arena):
    region = arena.alloc(3, "uint8", fill=1)
    part = region[1:]
    assert region.array is region.array
    assert part.array is part.array
    assert region[1:].array is not part.array
    part.array[0] = 9
    assert region.array.tolist() == [1, 9, 1]
