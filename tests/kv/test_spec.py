"""How many bytes a cache takes, and what a layer may be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuarena import Arena, DTypeError, OutOfMemoryError
from gpuarena.errors import ArgumentError, ArgumentTypeError
from gpuarena.kv import KVCache, KVSpec, LayerSpec

DTYPES = ["uint8", "bfloat16", "float32", "complex128"]

layers = st.builds(
    LayerSpec,
    kv_heads=st.integers(1, 3),
    key_dim=st.integers(1, 9),
    value_dim=st.integers(1, 9),
    dtype=st.sampled_from(DTYPES),
    window=st.none() | st.integers(1, 5),
    value_dtype=st.none() | st.sampled_from(DTYPES),
)
specs = st.builds(KVSpec, st.lists(layers, min_size=1, max_size=4))
alignments = st.sampled_from([1, 2, 8, 16, 256, 4096])


def test_the_figures_of_qwen2_5_1_5b():
    spec = KVSpec.uniform(layers=28, kv_heads=2, head_dim=128, dtype="bfloat16")
    assert spec.bytes_per_token == 28_672
    assert spec.nbytes(batch=4, tokens=8192) == 939_524_096
    assert spec.max_tokens("1GiB") == 37_449  # 2**30 / 28 672 = 37 449.1


def test_the_figures_of_layers_that_differ():
    mla = LayerSpec(kv_heads=1, key_dim=512, value_dim=64, dtype="bfloat16")
    mixed = LayerSpec(kv_heads=2, key_dim=8, value_dim=4, dtype="float32", value_dtype="float16", window=16)
    assert (mla.bytes_per_token, mixed.bytes_per_token) == (1152, 80)
    assert mixed.region_nbytes(batch=3, tokens=10) == (1920, 480)
    spec = KVSpec([mla, mixed])
    assert (spec.bytes_per_token, spec.nbytes(3, 10)) == (1232, 36_960)
    assert spec.nbytes(3, 0) == spec.arena_nbytes(3, 0) == 0


def test_scratch_is_counted_for_more_than_one_row():
    spec = KVSpec.uniform(layers=2, kv_heads=1, head_dim=64, dtype="float32")
    assert spec.arena_nbytes(batch=1, tokens=4) == 2 * 2048
    assert spec.arena_nbytes(batch=2, tokens=4) == 2 * 4096 + 2048  # the larger of keys and values


@given(spec=specs, batch=st.integers(1, 3), tokens=st.integers(1, 9), alignment=alignments)
def test_an_arena_of_arena_nbytes_holds_the_cache(spec, batch, tokens, alignment):
    nbytes = spec.arena_nbytes(batch, tokens, alignment=alignment)
    arena = Arena(nbytes, alignment=alignment)
    KVCache(arena, spec, batch=batch, max_tokens=tokens)
    n_regions = arena.stats.n_regions
    assert nbytes - max(alignment, 16) * n_regions < arena.stats.top <= nbytes
    if (
        alignment >= 16
    ):  # no type asks for more, so that only the end of the last region can be padded in vain
        assert nbytes - arena.stats.top < alignment


def test_the_padding_of_types_wider_than_the_alignment_is_counted():
    spec = KVSpec([LayerSpec(1, 1, 1, "uint8"), LayerSpec(1, 1, 1, "float32")])
    KVCache(Arena(spec.arena_nbytes(1, 1, alignment=1), alignment=1), spec, batch=1, max_tokens=1)


@given(spec=specs, batch=st.integers(1, 3), nbytes=st.integers(1, 20_000), alignment=alignments)
def test_max_tokens_is_the_largest_that_fits(spec, batch, nbytes, alignment):
    tokens = spec.max_tokens(nbytes, batch, alignment=alignment)
    assert spec.arena_nbytes(batch, tokens, alignment=alignment) <= nbytes
    assert nbytes < spec.arena_nbytes(batch, tokens + 1, alignment=alignment)
    arena = Arena(nbytes, alignment=alignment)
    if tokens:
        KVCache(arena, spec, batch=batch, max_tokens=tokens)
        arena.reset()
    if alignment >= 16 and nbytes > alignment:  # without what may be padding behind the last region
        small = Arena(nbytes - alignment, alignment=alignment)
        with pytest.raises(OutOfMemoryError):
            KVCache(small, spec, batch=batch, max_tokens=tokens + 1)


def test_uniform_repeats_one_layer():
    spec = KVSpec.uniform(layers=3, kv_heads=2, head_dim=8, dtype="float16", window=4)
    assert spec == KVSpec([LayerSpec(2, 8, 8, "float16", 4)] * 3)
    assert spec.layers[0].value_dtype == "float16"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"kv_heads": 0}, ArgumentError),
        ({"key_dim": -1}, ArgumentError),
        ({"value_dim": -1}, ArgumentError),
        ({"window": 0}, ArgumentError),
        ({"kv_heads": 2.0}, ArgumentTypeError),
        ({"key_dim": True}, ArgumentTypeError),
        ({"window": "4"}, ArgumentTypeError),
        ({"dtype": "float31"}, DTypeError),
        ({"value_dtype": "float31"}, DTypeError),
        ({"dtype": None}, DTypeError),
    ],
)
def test_a_layer_that_can_never_be(arguments, error):
    with pytest.raises(error):
        LayerSpec(**{"kv_heads": 1, "key_dim": 4, "value_dim": 4, "dtype": "float32"} | arguments)


def test_specs_that_can_never_be():
    with pytest.raises(ArgumentError, match="at least one layer"):
        KVSpec([])
    with pytest.raises(ArgumentTypeError, match="made of LayerSpec"):
        KVSpec(["float32"])
    spec = KVSpec.uniform(layers=1, kv_heads=1, head_dim=4, dtype="float32")
    for batch, tokens in ((0, 1), (1, -1)):
        with pytest.raises(ArgumentError):
            spec.nbytes(batch, tokens)
        with pytest.raises(ArgumentError):
            spec.arena_nbytes(batch, tokens)
    with pytest.raises(ArgumentError):
        spec.max_tokens("1 light year")
    with pytest.raises(ArgumentError):
        spec.max_tokens(100, batch=0)
