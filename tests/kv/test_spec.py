"""How many bytes a cache takes, and what a layer may be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuarena import Arena, DTypeError, OutOfMemoryError
from gpuarena.errors import ArgumentError, ArgumentTypeError
from gpuarena.kv import KVCache, KVSpec, LayerSpec, SharedLayer

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


# ------------------------------------------------------------------------- sinks, slack, shared layers, values of no width

joint_or_apart = st.builds(
    LayerSpec,
    kv_heads=st.integers(1, 3),
    key_dim=st.integers(1, 3),
    value_dim=st.integers(0, 3),
    dtype=st.sampled_from(DTYPES),
    window=st.integers(1, 5),
    value_dtype=st.none() | st.sampled_from(DTYPES),
    sinks=st.integers(0, 3),
    slack=st.none() | st.integers(1, 5),
)


@st.composite
def specs_of_all_kinds(draw):
    made = draw(st.lists(joint_or_apart | layers, min_size=1, max_size=4))
    for _ in range(draw(st.integers(0, 2))):
        owners = [number for number, layer in enumerate(made) if isinstance(layer, LayerSpec)]
        made.append(SharedLayer(draw(st.sampled_from(owners))))
    return KVSpec(made)


def counted_nbytes(spec, batch, tokens):
    """The bytes of keys and values, counted token by token."""
    total = 0
    for layer in spec.layers:
        if isinstance(layer, SharedLayer):
            continue
        slots = tokens if layer.slack is None else min(tokens, layer.sinks + layer.window + layer.slack)
        of_token = layer.key_dim * layer.dtype.itemsize + layer.value_dim * layer.value_dtype.itemsize
        total += sum(layer.kv_heads * of_token for _ in range(slots)) * batch
    return total


@given(spec=specs_of_all_kinds(), batch=st.integers(1, 3), tokens=st.integers(1, 20), alignment=alignments)
def test_the_bytes_of_specs_of_all_kinds(spec, batch, tokens, alignment):
    nbytes = spec.arena_nbytes(batch, tokens, alignment=alignment)
    assert spec.nbytes(batch, tokens) == counted_nbytes(spec, batch, tokens) <= nbytes
    arena = Arena(nbytes, alignment=alignment)
    cache = KVCache(arena, spec, batch=batch, max_tokens=tokens)
    stats = cache.stats
    assert stats.reserved_nbytes == spec.nbytes(batch, tokens)
    assert arena.stats.used == stats.reserved_nbytes + stats.scratch_nbytes
    assert stats.scratch_nbytes == spec.scratch_nbytes(batch, tokens)
    assert (stats.scratch_nbytes > 0) == (batch > 1)
    for number, layer in enumerate(spec.layers):
        if isinstance(layer, LayerSpec):
            is_joint = (layer.key_dim, layer.dtype) == (layer.value_dim, layer.value_dtype)
            assert len(cache.layers[number].regions) == (1 if is_joint else 2)


@given(spec=specs_of_all_kinds(), batch=st.integers(1, 3), nbytes=st.integers(1, 20_000))
def test_max_tokens_of_specs_of_all_kinds(spec, batch, nbytes):
    is_bounded = all(layer.slack is not None for layer in spec.layers if isinstance(layer, LayerSpec))
    if is_bounded and spec.arena_nbytes(batch, 10**9) <= nbytes:
        with pytest.raises(ArgumentError, match="all layers have bounded windows"):
            spec.max_tokens(nbytes, batch)
        return
    tokens = spec.max_tokens(nbytes, batch)
    assert spec.arena_nbytes(batch, tokens) <= nbytes < spec.arena_nbytes(batch, tokens + 1)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"sinks": 1}, ArgumentError),
        ({"slack": 1}, ArgumentError),
        ({"window": 4, "slack": 0}, ArgumentError),
        ({"window": 4, "slack": -1}, ArgumentError),
        ({"window": 4, "sinks": -1}, ArgumentError),
        ({"window": 4, "sinks": None}, ArgumentTypeError),
        ({"window": 4, "sinks": True}, ArgumentTypeError),
        ({"window": 4, "slack": 1.0}, ArgumentTypeError),
        ({"window": 4, "slack": True}, ArgumentTypeError),
        ({"value_dim": None}, ArgumentTypeError),
    ],
)
def test_windows_that_can_never_be(arguments, error):
    with pytest.raises(error):
        LayerSpec(**{"kv_heads": 1, "key_dim": 4, "value_dim": 4, "dtype": "float32"} | arguments)


def test_layers_without_values():
    layer = LayerSpec(1, 576, 0, "bfloat16")
    assert (layer.bytes_per_token, layer.is_joint) == (1152, False)
    assert layer.region_nbytes(2, 10) == (2 * 10 * 1152, 0)
    assert layer.scratch_nbytes(2, 10) == 2 * 10 * 1152
    cache = KVCache(Arena(layer.region_nbytes(1, 10)[0]), KVSpec([layer]), batch=1, max_tokens=10)
    assert cache.layers[0].regions[1].nbytes == 0


def test_a_uniform_spec_takes_the_options_of_a_layer():
    options = {"window": 8, "slack": 4, "sinks": 2, "value_dtype": "float16"}
    spec = KVSpec.uniform(layers=2, kv_heads=2, head_dim=8, dtype="float32", **options)
    assert spec == KVSpec([LayerSpec(2, 8, 8, "float32", **options)] * 2)
    with pytest.raises(TypeError):
        KVSpec.uniform(layers=2, kv_heads=2, head_dim=8, dtype="float32", wndow=8)


# ----------------------------------------------------------------------------------------------------------------- table


def test_the_table_of_layers_of_all_kinds():
    spec = KVSpec(
        [
            LayerSpec(2, 64, 64, "bfloat16"),
            LayerSpec(2, 64, 64, "bfloat16"),
            LayerSpec(1, 8, 0, "float32", window=512),
            LayerSpec(16, 8, 4, "float32", window=512, slack=128, sinks=4, value_dtype="float16"),
            SharedLayer(3),
            SharedLayer(3),
            SharedLayer(0),
        ]
    )
    assert spec.table(batch=2, tokens=4096).splitlines() == [
        "layers  heads  keys  values  dtype            window         slots  bytes/token  total",
        "0-1         2    64      64  bfloat16         all             4096         1024  8 MiB",
        "2           1     8       0  float32          512             4096           32  256 KiB",
        "3          16     8       4  float32/float16  4 + 512 + 128    644          640  805 KiB",
        "4-5     layer 3",
        "6       layer 0",
        "sum                                                                        1696  9.04 MiB",
    ]


def test_the_columns_of_a_table_stand_below_each_other():
    """The names of long runs of shared layers were not counted."""
    own = LayerSpec(1, 4, 4, "float32")
    spec = KVSpec([own] * 1000 + [SharedLayer(0)] * 500 + [LayerSpec(2, 4, 4, "float32")])
    lines = spec.table().splitlines()
    assert [line.split()[0] for line in lines] == ["layers", "0-999", "1000-1499", "1500", "sum"]
    assert (
        lines[2].index("layer 0") == len("1000-1499  ") == lines[0].index("heads") == lines[1].index("    1")
    )
    assert lines[3].index("2") > lines[2].index("layer 0")


@given(spec=specs_of_all_kinds(), batch=st.integers(1, 3), tokens=st.integers(0, 20))
def test_a_table_has_a_line_for_each_run_and_the_sums(spec, batch, tokens):
    lines = spec.table(batch, tokens).splitlines()
    n_runs = 1 + sum(a != b for a, b in zip(spec.layers, spec.layers[1:], strict=False))
    assert len(lines) == n_runs + 2
    assert lines[-1].split()[:2] == ["sum", str(spec.bytes_per_token)]
    assert all(line == line.rstrip() for line in lines)


@pytest.mark.parametrize(
    ("batch", "tokens", "error"),
    [
        (0, 1, ArgumentError),
        (1, -1, ArgumentError),
        (1, 1.5, ArgumentTypeError),
        (1, "8", ArgumentTypeError),
        (None, 1, ArgumentTypeError),
    ],
)
def test_tables_of_what_can_never_be(batch, tokens, error):
    """Text and numbers with a fraction raised errors of the arithmetic, or passed."""
    spec = KVSpec([LayerSpec(1, 4, 4, "float32", window=4, slack=2)])
    with pytest.raises(error):
        spec.table(batch, tokens)
