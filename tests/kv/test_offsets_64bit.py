"""Caches of more than 2**31 elements and bytes, on memory that is only there where something is written."""

from __future__ import annotations

import numpy as np
import pytest

from gpuarena import Arena, ShapeError
from gpuarena.kv import KVCache, KVSpec, LayerSpec

torch = pytest.importorskip("torch")

TOKENS = 40_000
# keys and values of 2 * 4 * 40 000 * 16 384 elements a layer: 5.2e9, and twice as many bytes
WIDE = LayerSpec(kv_heads=4, key_dim=16_384, value_dim=16_384, dtype="float16")
APART = LayerSpec(kv_heads=4, key_dim=16_384, value_dim=8, dtype="float16", value_dtype="float32")
SPEC = KVSpec([WIDE, APART])


def resident_nbytes():
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def address_of(array):
    return array.data_ptr() if isinstance(array, torch.Tensor) else array.__array_interface__["data"][0]


def strides_of(array):
    """In bytes."""
    if isinstance(array, torch.Tensor):
        return [stride * array.element_size() for stride in array.stride()]
    return list(array.strides)


def numbers(cache, n_rows, n_tokens, spec, first):
    """A number for each row, head and token, in all places; values are negative."""
    row, head, token = np.ogrid[:n_rows, : spec.kv_heads, :n_tokens]
    number = (first + 100 * row + 10 * head + token)[..., None]
    arrays = [
        (sign * np.broadcast_to(number, (n_rows, spec.kv_heads, n_tokens, dim))).astype(dtype.numpy)
        for sign, dim, dtype in ((1, spec.key_dim, spec.dtype), (-1, spec.value_dim, spec.value_dtype))
    ]
    return [torch.from_numpy(array) for array in arrays] if cache.arena.backend == "torch" else arrays


def jump(cache, n_tokens):
    """Count tokens that nobody writes, which would take memory."""
    for layer in cache.layers:
        layer._cut(n_tokens)


@pytest.fixture(params=["virtual", "virtual:torch"])
def arena(request):
    return Arena(1 << 38, backend=request.param)


@pytest.fixture
def cache(arena):
    return KVCache(arena, SPEC, batch=2, max_tokens=TOKENS, layout="head-major")


def test_the_last_tokens_of_the_last_layer_and_head(cache):
    before = resident_nbytes()
    for layer in (0, 1):
        cache.append(layer, *numbers(cache, 2, 1, SPEC.layers[layer], 0))
    jump(cache, TOKENS - 3)
    for layer, spec in enumerate(SPEC.layers):
        keys, values = cache.append(layer, *numbers(cache, 2, 1, spec, 1000))
        keys, values = cache.append(layer, *numbers(cache, 2, 2, spec, 1001))
        assert keys.shape == (2, 4, TOKENS, 16_384)
        for row, head in ((0, 0), (0, 3), (1, 0), (1, 3)):
            wanted = [1000 + 100 * row + 10 * head + token for token in range(3)]
            assert keys[row, head, -3:, 0].tolist() == keys[row, head, -3:, -1].tolist() == wanted
            assert (
                values[row, head, -3:, 0].tolist()
                == values[row, head, -3:, -1].tolist()
                == [-n for n in wanted]
            )
            assert keys[row, head, 0, 5].item() == 100 * row + 10 * head, "the first token is where it was"
        held = cache.layers[layer]
        region = held.regions[0]
        plane_nbytes = 2 * 4 * TOKENS * 16_384 * 2
        assert plane_nbytes > 2**31 < 2 * 4 * TOKENS * 16_384
        last = keys[1, 3, TOKENS - 1, 16_383:]
        assert address_of(last) == region.address + plane_nbytes - 2
        assert strides_of(keys) == [4 * TOKENS * 32_768, TOKENS * 32_768, 32_768, 2]
        values_at = held.regions[-1].address + (plane_nbytes if layer == 0 else 0)
        last = values[1, 3, TOKENS - 1, -1:]
        assert (
            address_of(last)
            == values_at
            + 2 * 4 * TOKENS * spec.value_dim * spec.value_dtype.itemsize
            - spec.value_dtype.itemsize
        )
    assert resident_nbytes() - before < 64 << 20


def test_the_bytes_that_were_written_lie_where_integers_of_any_size_say(arena):
    """Read through another array on the same memory, at an offset that Python counted."""
    cache = KVCache(arena, SPEC, batch=2, max_tokens=TOKENS, layout="head-major")
    jump(cache, TOKENS - 1)
    cache.append(0, *numbers(cache, 2, 1, WIDE, 7))
    region = cache.layers[0].regions[0]
    flat = region.reshape((-1,))
    n_elements = 2 * 2 * 4 * TOKENS * 16_384
    assert flat.shape == (n_elements,)
    for plane, sign in ((0, 1), (1, -1)):
        for row in (0, 1):
            for head in (0, 3):
                offset = (((plane * 2 + row) * 4 + head) * TOKENS + TOKENS - 1) * 16_384
                run = flat[offset : offset + 16_384].array
                assert run[0].item() == run[-1].item() == sign * (7 + 100 * row + 10 * head)


def test_reads_masks_and_positions_at_the_end(cache):
    jump(cache, TOKENS - 2)
    for layer in (0, 1):
        cache.append(layer, *numbers(cache, 2, 1, SPEC.layers[layer], 3))
    keys, values = cache.read(1)
    assert keys[1, 3, -1, 0].item() == 133
    assert values[1, 3, -1, 7].item() == -133
    assert cache.mask(1).shape == (1, TOKENS - 1)
    for layer in cache.layers:
        layer._n_clean = TOKENS  # the rest of the slots is fresh memory, and clearing it would take it
    start = cache.advance(1)
    assert start == TOKENS - 1
    at = np.array([start])
    positions = torch.from_numpy(at) if cache.arena.backend == "torch" else at
    for layer in (0, 1):
        cache.buffers(layer)
        keys, values = cache.write_at(layer, positions, *numbers(cache, 2, 1, SPEC.layers[layer], 4))
        assert keys[1, 3, -2:, 16_383].tolist() == [133, 134]
        assert values[1, 3, -2:, 0].tolist() == [-133, -134]
        assert cache.read_bucket(layer, TOKENS)[0].shape[2] == TOKENS


def test_rows_are_exchanged_at_the_end(cache):
    """What all rows share is skipped, so that only the last tokens are touched."""
    jump(cache, TOKENS - 2)
    cache._common.rows, cache._common.n_shared = 2, TOKENS - 2  # as after repeat(2) of a single row
    for layer in (0, 1):
        cache.append(layer, *numbers(cache, 2, 2, SPEC.layers[layer], 0))
    cache.reorder([1, 0])
    for layer in cache.layers:
        for sign, view in ((1, layer.keys), (-1, layer.values)):
            assert view[0, 3, -2:, -1].tolist() == [sign * 130, sign * 131]
            assert view[1, 3, -2:, 0].tolist() == [sign * 30, sign * 31]


def test_a_pair_at_the_end(cache):
    jump(cache, TOKENS - 1)
    keys, values = numbers(cache, 2, 1, WIDE, 5)
    both = torch.stack([keys, values]) if cache.arena.backend == "torch" else np.stack([keys, values])
    keys, values = cache.layers[0].append_pair(both)
    assert keys[1, 3, -1, -1].item() == 135
    assert values[1, 3, -1, -1].item() == -135


def test_a_bounded_window_of_many_elements_is_moved(arena):
    """The distance and the place of the move are beyond 2**31 elements."""
    spec = KVSpec([LayerSpec(2, 32_768, 32_768, "uint8", window=3, slack=40_000)])
    cache = KVCache(arena, spec, batch=1, max_tokens=1 << 40)
    layer = cache.layers[0]
    assert layer.regions[0].nbytes == 2 * 2 * 40_003 * 32_768 > 2**32
    ones = np.ones((1, 2, 1, 32_768), np.uint8)
    layer._cut(40_000)
    for n in (1, 2, 3, 4, 5):
        new = ones * n
        new = torch.from_numpy(new) if cache.arena.backend == "torch" else new
        keys, values = cache.append(0, new, new)
        assert keys[0, 1, -min(n, 3) :, -1].tolist() == list(range(max(1, n - 2), n + 1))
        assert values[0, 0, -min(n, 3) :, 0].tolist() == list(range(max(1, n - 2), n + 1))
    assert layer.held_from == 40_001
    assert layer.length == 40_005


def test_records_of_a_cache_that_grows_reach_beyond_2_31(arena):
    """The memory of the whole is committed, and lazily: only what is written takes pages."""
    spec = KVSpec([LayerSpec(4, 4096, 4096, "float16"), LayerSpec(4, 4096, 4096, "float16")])
    cache = KVCache(arena, spec, batch=2, max_tokens=TOKENS, layout="token-major")
    record_nbytes = 2 * 2 * 2 * 4 * 4096 * 2
    assert spec.arena_nbytes(2, TOKENS, layout="token-major") >= record_nbytes * TOKENS > 2**33
    jump(cache, TOKENS - 1)
    for layer in (0, 1):
        keys, values = cache.append(layer, *numbers(cache, 2, 1, spec.layers[layer], 9))
        assert keys[1, 3, -1, -1].item() == 139
        assert values[1, 3, -1, 0].item() == -139
    region = cache.layers[1].regions[0]
    last = values[1, 3, TOKENS - 1, 4095:]
    assert address_of(last) == region.address + record_nbytes * TOKENS - 2


# ----------------------------------------------------------------------------------------------------- bytes of huge specs


@pytest.mark.parametrize("tokens", [1, 2**20, 2**31 - 1, 2**31, 2**33 + 1, 10**12])
@pytest.mark.parametrize("batch", [1, 7, 2**16])
def test_the_bytes_of_huge_specs_are_exact(batch, tokens):
    spec = KVSpec(
        [
            *[LayerSpec(8, 128, 128, "bfloat16")] * 80,
            LayerSpec(1, 512, 64, "bfloat16"),
            LayerSpec(3, 5, 0, "float64", window=2**33, slack=2**20),
        ]
    )
    per_token = 80 * 8 * 2 * 128 * 2 + 576 * 2
    bounded = 3 * 5 * 8 * min(tokens, 2**33 + 2**20)
    assert spec.nbytes(batch, tokens) == batch * (per_token * tokens + bounded)
    scratch = 0 if batch == 1 else batch * max(8 * 128 * 2 * tokens, bounded, 1024 * tokens)
    exact = batch * (per_token * tokens + bounded) + scratch
    regions = 80 + 2 + 2
    assert exact <= spec.arena_nbytes(batch, tokens) < exact + 256 * (regions + 1)
    assert type(spec.nbytes(batch, tokens)) is int
    table = spec.table(batch, tokens)
    assert len(table.splitlines()) == 5


@pytest.mark.parametrize("tokens", [2**31 - 1, 2**31, 2**33 + 7, 10**12 + 3])
def test_max_tokens_of_huge_budgets_is_exact(tokens):
    spec = KVSpec.uniform(layers=28, kv_heads=2, head_dim=128, dtype="bfloat16")
    budget = spec.arena_nbytes(3, tokens)
    assert spec.max_tokens(budget, 3) == tokens
    assert spec.max_tokens(budget - 1, 3) == tokens - 1


def test_views_of_meta_tensors_have_strides_of_64_bits():
    """The operations of a torch cache, on tensors of no memory at all."""
    from gpuarena.kv._ops import ops_for

    ops = ops_for(Arena(1024, backend="torch"), 1)
    buffer = torch.empty((2, 4, 8, 2**24, 128), dtype=torch.int8, device="meta")
    for number, plane in enumerate(ops.planes(buffer, 2)):
        view = ops.tokens(ops.rows(plane, 3), 2**24 - 2, 2**24)
        assert view.shape == (3, 8, 2, 128)
        assert view.storage_offset() == number * 4 * 8 * 2**31 + (2**24 - 2) * 128
        assert view.stride() == (8 * 2**31, 2**31, 128, 1)


def test_more_elements_than_there_are_addresses_is_a_typed_error():
    spec = KVSpec([LayerSpec(2**20, 2**20, 2**20, "float64")])
    with pytest.raises((MemoryError, ShapeError)):
        KVCache(Arena("1MiB"), spec, batch=2**10, max_tokens=2**40)
    assert spec.nbytes(2**10, 2**40) == 2 ** (20 + 20 + 10 + 40 + 3 + 1)
