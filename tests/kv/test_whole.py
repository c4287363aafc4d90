"""A cache that does not fit says what the whole of it lacks, and that much is enough."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuarena import Arena
from gpuarena.errors import OutOfMemoryError
from gpuarena.kv import ContiguousKVCache, KVCache, KVSpec, LaneCache, PagedKVCache

SPEC = KVSpec.uniform(layers=3, kv_heads=2, head_dim=8, dtype="float32")
MAKE = {
    "KVCache": lambda arena, n: KVCache(arena, SPEC, batch=2, max_tokens=n),
    "LaneCache": lambda arena, n: LaneCache(arena, SPEC, lanes=2, max_tokens=n),
    "PagedKVCache": lambda arena, n: PagedKVCache(arena, SPEC, num_pages=n, page_size=2),
    "ContiguousKVCache": lambda arena, n: ContiguousKVCache(arena, SPEC, capacity_tokens=n),
}


@pytest.mark.parametrize("name", MAKE)
@settings(max_examples=15)
@given(
    n=st.integers(1, 40),
    capacity=st.integers(256, 20_000),
    held=st.integers(0, 200),
    alignment=st.sampled_from([1, 64, 4096]),
)
def test_with_what_is_missing_it_fits(name, n, capacity, held, alignment):
    def arena(capacity):
        made = Arena(capacity, alignment=alignment)
        if held:
            made.alloc(held, "uint8", label="held")
        return made

    first = arena(capacity)
    before = first.stats
    try:
        MAKE[name](first, n)
    except OutOfMemoryError as caught:
        error = caught
    else:
        return
    assert name in str(error)
    assert "held" in str(error) or not held
    assert first.stats.used == before.used
    MAKE[name](arena(capacity + error.missing), n)
