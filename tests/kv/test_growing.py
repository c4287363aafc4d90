"""A cache on memory that grows in place costs what its tokens take."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from gpuarena import Arena, StaleRegionError
from gpuarena.backends._vmm import LARGEST_CHUNK
from gpuarena.errors import ArgumentError, CapacityError, LiveArraysError, OutOfMemoryError
from gpuarena.kv import KVCache, KVSpec, LayerSpec

torch = pytest.importorskip("torch")

SPEC = KVSpec.uniform(layers=4, kv_heads=2, head_dim=64, dtype="float32")
BACKENDS = ["virtual", "virtual:torch"]


def make(backend="virtual:torch", spec=SPEC, batch=1, max_tokens=4096, **options):
    nbytes = spec.arena_nbytes(batch, max_tokens, layout="token-major")
    return KVCache(Arena(nbytes, backend=backend), spec, batch=batch, max_tokens=max_tokens, **options)


def step(cache, n_tokens, value=1.0, rows=1):
    for number, layer in cache.spec.owned:
        keys, values = (
            np.full((rows, layer.kv_heads, n_tokens, dim), value + number, dtype.name)
            for dim, dtype in ((layer.key_dim, layer.dtype), (layer.value_dim, layer.value_dtype))
        )
        if cache.arena.backend == "torch":
            keys, values = torch.from_numpy(keys), torch.from_numpy(values)
        cache.append(number, keys, values)


@pytest.mark.parametrize("backend", BACKENDS)
def test_committed_memory_follows_the_tokens_within_one_chunk(backend):
    cache = make(backend)
    record = SPEC.bytes_per_token
    assert cache.arena.stats.committed <= 64 << 10
    assert cache.arena.stats.top >= 4096 * record, "the addresses are taken at once"
    last = 0
    for _ in range(64):
        step(cache, 32)
        used, committed = cache.length * record, cache.arena.stats.committed
        assert used <= committed
        # A chunk is as large as all before it, up to 64 MiB.
        assert committed - used <= max(64 << 10, min(last, LARGEST_CHUNK)) + (64 << 10)
        last = committed


def test_32_768_tokens_for_four_users_cost_what_they_use():
    spec = KVSpec.uniform(layers=28, kv_heads=2, head_dim=128, dtype="bfloat16")
    nbytes = spec.arena_nbytes(4, 32_768, layout="token-major")
    assert nbytes > 3_758_096_384  # 4 * 32 768 * 28 672
    cache = KVCache(Arena(nbytes, backend="virtual:torch"), spec, batch=4, max_tokens=32_768)
    keys = torch.zeros(4, 2, 100, 128, dtype=torch.bfloat16)
    for layer in range(28):
        cache.append(layer, keys, keys)
    live, scratch = 100 * 4 * 28_672, cache.stats.scratch_nbytes
    assert scratch <= 4 << 20
    assert live <= cache.arena.stats.committed - scratch <= 2 * (live + scratch)


@pytest.mark.parametrize("backend", BACKENDS)
def test_trim_gives_memory_back_and_keeps_the_tokens(backend):
    cache = make(backend)
    step(cache, 2000)
    before = cache.arena.stats.committed
    cache.truncate(10)
    freed = cache.trim()
    assert freed > 0
    assert cache.arena.stats.committed == before - freed
    assert [float(cache.layers[i].keys.mean()) for i in range(4)] == [1.0, 2.0, 3.0, 4.0]
    assert cache.trim() == 0
    step(cache, 3000, value=5.0)  # and grows again
    keys, _ = cache.read(3)
    assert keys.shape == (1, 2, 3010, 64)
    assert float(keys[0, 1, 9, 63]) == 4.0
    assert float(keys[0, 1, 3009, 63]) == 8.0


@pytest.mark.parametrize("backend", BACKENDS)
def test_trim_refuses_while_views_are_referenced(backend):
    cache = make(backend)
    step(cache, 1000)
    view = cache.read(0)[0]
    cache.reset()
    gc.collect()
    before = cache.arena.stats
    with pytest.raises(LiveArraysError, match="still referenced"):
        cache.trim()
    assert cache.arena.stats == before
    assert float(view[0, 0, 999, 0]) == 1.0
    del view
    gc.collect()
    assert cache.trim() > 0


def test_what_is_allocated_behind_costs_memory_and_nothing_else():
    spec = SPEC
    nbytes = spec.arena_nbytes(1, 64, layout="token-major") + 4096
    arena = Arena(nbytes, backend="virtual:torch")
    cache = KVCache(arena, spec, batch=1, max_tokens=64)
    step(cache, 1)
    mark = arena.checkpoint()
    behind = arena.zeros(64, "float32")
    assert arena.stats.committed >= 64 * spec.bytes_per_token
    step(cache, 63)
    assert not behind.any()
    assert cache.trim() == 0
    arena.rollback(mark)
    assert float(cache.layers[3].values[0, 0, 63, 0]) == 4.0


def test_the_views_are_ascending_and_never_move():
    cache = make(max_tokens=4000)
    step(cache, 1)
    first, _ = cache.read(2)
    for _ in range(30):
        step(cache, 100)
        view, _ = cache.read(2)
        assert view.data_ptr() == first.data_ptr()
        assert view.stride(3) == 1
        assert view.stride(2) * view.element_size() == SPEC.bytes_per_token


def test_a_cache_that_is_full_or_stale_commits_nothing():
    cache = make(max_tokens=100)
    step(cache, 40)
    before = cache.arena.stats
    keys = torch.zeros(1, 2, 61, 64)
    with pytest.raises(CapacityError, match="40 of 100 tokens used, 61 more asked, 1 too many"):
        cache.append(0, keys, keys)
    assert cache.arena.stats == before
    cache.arena.reset()
    before = cache.arena.stats
    with pytest.raises(StaleRegionError):
        cache.append(0, keys[:, :, :60], keys[:, :, :60])
    assert cache.arena.stats == before
    with pytest.raises(StaleRegionError):
        cache.trim()


def test_memory_that_runs_out_changes_nothing(monkeypatch):
    cache = make(max_tokens=4096)
    step(cache, 10)
    monkeypatch.setattr(type(cache.arena._backend), "commit", _no_memory)
    lengths = [layer.length for layer in cache.layers]
    keys = torch.zeros(1, 2, 3000, 64)
    with pytest.raises(OutOfMemoryError), cache.step():
        cache.append(0, keys, keys)
    assert [layer.length for layer in cache.layers] == lengths
    monkeypatch.undo()
    step(cache, 3000)
    assert cache.length == 3010


def _no_memory(self, stop):
    figures = {
        "requested": stop,
        "aligned_offset": 0,
        "available": 0,
        "capacity": 0,
        "missing": stop,
        "label": None,
    }
    raise OutOfMemoryError("none left", **figures)


@pytest.mark.parametrize("backend", ["host", "torch"])
def test_token_major_on_an_arena_that_does_not_grow(backend):
    arena = Arena(SPEC.arena_nbytes(2, 8, layout="token-major"), backend=backend)
    cache = KVCache(arena, SPEC, batch=2, max_tokens=8, layout="token-major")
    step(cache, 8, rows=2)
    assert cache.layout == "token-major"
    assert cache.trim() == 0
    assert cache.layers[1].keys.shape == (2, 2, 8, 64)
    with pytest.raises(CapacityError):
        step(cache, 1, rows=2)


def test_head_major_takes_all_memory_of_an_arena_that_grows():
    nbytes = SPEC.arena_nbytes(1, 64)
    arena = Arena(nbytes, backend="virtual:torch")
    cache = KVCache(arena, SPEC, batch=1, max_tokens=64, layout="head-major")
    step(cache, 64)
    assert arena.stats.committed == nbytes


def test_layers_of_bounded_memory_lie_apart():
    spec = KVSpec([LayerSpec(1, 4, 4, "float32", window=3, slack=2), LayerSpec(1, 4, 2, "uint8")])
    cache = make(spec=spec, batch=2, max_tokens=50)
    step(cache, 5, rows=2)
    for _ in range(20):
        step(cache, 2, rows=2)
    assert cache.layers[0].n_held <= 5
    assert cache.layers[1].length == 45
    cache.reorder([1, 0])
    assert cache.stats.n_tokens == 45


def test_fixed_addresses_on_a_growing_cache():
    cache = make(max_tokens=256)
    start = cache.advance(3)
    positions = torch.arange(start, start + 3)
    keys = torch.randn(1, 2, 3, 64)
    for layer in range(4):
        cache.buffers(layer)
        all_keys, _ = cache.write_at(layer, positions, keys, keys)
        assert all_keys.shape == (1, 2, 256, 64)
        assert torch.equal(cache.layers[layer].keys, keys)
        assert not all_keys[:, :, 3:].any()


def test_a_growing_cache_can_be_spilled_and_comes_back():
    arena = Arena(SPEC.arena_nbytes(1, 4096, layout="token-major"), backend="virtual")
    mark = arena.checkpoint()
    cache = KVCache(arena, SPEC, batch=1, max_tokens=4096)
    step(cache, 7)
    spilled = arena.spill(mark)
    spilled.restore()
    assert float(cache.layers[3].keys.mean()) == 4.0


def test_debug_mode_commits_at_once():
    arena = Arena(SPEC.arena_nbytes(1, 64, layout="token-major") + 4096, backend="virtual", debug=True)
    cache = KVCache(arena, SPEC, batch=1, max_tokens=64)
    step(cache, 64)
    arena.check()


def test_an_unknown_layout():
    with pytest.raises(ArgumentError, match="layout 'paged' is none of 'auto', 'head-major', 'token-major'"):
        make(layout="paged")
    with pytest.raises(ArgumentError, match="layout"):
        SPEC.arena_nbytes(1, 1, layout="auto")


@pytest.mark.parametrize("backend", ["virtual", "virtual:torch"])
def test_a_cache_puts_its_bounded_windows_in_rings_when_asked(backend):
    spec = KVSpec(
        [
            LayerSpec(1, 4, 4, "float32"),
            LayerSpec(1, 4, 4, "float32", window=3, slack=2),
            LayerSpec(1, 4, 4, "float32", window=3, slack=2, sinks=1),
        ]
    )
    arena = Arena(spec.arena_nbytes(1, 64, layout="token-major"), backend=backend)
    cache = KVCache(arena, spec, batch=1, max_tokens=64, rings=True)
    assert [type(layer).__name__ for layer in cache.layers] == ["GrowingLayer", "RingLayer", "WindowLayer"]
    for number in range(20):
        new = np.full((1, 1, 1, 4), number, np.float32)
        new = torch.from_numpy(new) if cache.arena.backend == "torch" else new
        views = [cache.append(layer, new, new)[0] for layer in range(3)]
    assert [view[0, 0, -3:, 0].tolist() for view in views] == [[17, 18, 19]] * 3
    assert views[1].shape[2] == 3


def test_rings_need_an_arena_that_grows():
    spec = KVSpec.uniform(layers=1, kv_heads=1, head_dim=4, dtype="float32", window=3, slack=2)
    arena = Arena("1MiB", backend="torch")
    with pytest.raises(ArgumentError, match="rings are mirrored memory"):
        KVCache(arena, spec, batch=1, max_tokens=64, rings=True)
    assert arena.stats.used == 0
