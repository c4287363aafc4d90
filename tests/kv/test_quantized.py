"""Layers that are stored quantised: what they show is close to what was appended, and depends on nothing else."""

from __future__ import annotations

import contextlib
import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpuarena import Arena, CapacityError, DTypeError, OutOfMemoryError, ShapeError, StaleRegionError
from gpuarena.errors import ArgumentError, ArgumentTypeError, AutogradError, BackendError
from gpuarena.kv import KVCache, KVSpec, LayerGroup, LayerSpec
from gpuarena.kv.quantized import QuantizedLayer

torch = pytest.importorskip("torch")

STORAGES = ("int8", "float8_e4m3fn", "int4")
#: How far an element may be off at most, as a part of the largest in its token and head.
WORST = {"int8": 1 / 254, "float8_e4m3fn": 1 / 16, "int4": 2 * 0.625 / 15}
DTYPES = {"float32": 2.0**-22, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def spec_of(storage, *, layers=2, kv_heads=2, key_dim=40, value_dim=33, dtype="float32", **options):
    return KVSpec([LayerSpec(kv_heads, key_dim, value_dim, dtype, storage=storage, **options)] * layers)


def cache_of(spec, *, batch=1, max_tokens=64, backend="torch"):
    arena = Arena(spec.arena_nbytes(batch, max_tokens), backend=backend)
    arena.empty(arena.capacity, "uint8")[...] = 0xFF  # NaN in all formats, where nothing was written
    arena.reset()
    return KVCache(arena, spec, batch=batch, max_tokens=max_tokens)


def random_tokens(spec, n_tokens, *, rows=1, seed=0, layer=0):
    """Keys and values of `n_tokens` tokens of a layer of `spec`."""
    generator = torch.Generator().manual_seed(seed)
    found = spec.layers[layer]
    return tuple(
        torch.randn(rows, found.kv_heads, n_tokens, dim, generator=generator).to(dtype.torch)
        for dim, dtype in ((found.key_dim, found.dtype), (found.value_dim, found.value_dtype))
    )


def stored(cache):
    """All bytes that the layers hold, those without a token too."""
    return [
        region.array.clone().contiguous().view(torch.uint8)
        for layer in cache.layers
        for region in layer.regions
    ]


def assert_same_bits(ours, theirs):
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def copies(pair):
    return [array.clone() for array in pair]


def assert_close(back, exact, storage):
    assert back.dtype == exact.dtype
    assert back.shape == exact.shape
    name = str(exact.dtype).removeprefix("torch.")
    exact, back = exact.double(), back.double()
    allowed = exact.abs().amax(-1, keepdim=True) * (WORST[storage] * (1 + 2**-8) + DTYPES[name])
    assert ((back - exact).abs() <= allowed).all()


# ----------------------------------------------------------------------------------- what is shown, however it was appended


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_append_shows_what_was_appended(storage, dtype):
    spec = spec_of(storage, dtype=dtype)
    cache = cache_of(spec, batch=2)
    keys, values = random_tokens(spec, 20, rows=2)
    for start, stop in ((0, 7), (7, 8), (8, 8), (8, 20)):
        for layer in (0, 1):
            shown = cache.append(layer, keys[:, :, start:stop], values[:, :, start:stop])
            assert_close(shown[0], keys[:, :, :stop], storage)
            assert_close(shown[1], values[:, :, :stop], storage)
    assert_close(cache.layers[0].keys, keys, storage)
    assert_close(cache.layers[0].values, values, storage)
    shown = cache.read(1, 3)
    assert_close(shown[0], keys, storage)
    assert_close(shown[1], values, storage)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("n_tokens", [1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 256, 257])
def test_pieces_of_any_length_are_stored_as_the_whole(storage, n_tokens):
    """No last tokens are kept apart until a block of them is full."""
    spec = spec_of(storage, layers=1, dtype="bfloat16")
    keys, values = random_tokens(spec, n_tokens)
    whole = cache_of(spec, max_tokens=n_tokens)
    expected = copies(whole.append(0, keys, values))
    assert_close(expected[0], keys, storage)
    assert_close(expected[1], values, storage)
    for piece in (1, 32, 37):
        cache = cache_of(spec, max_tokens=n_tokens)
        for start in range(0, n_tokens, piece):
            stop = min(start + piece, n_tokens)
            shown = cache.append(0, keys[:, :, start:stop], values[:, :, start:stop])
            assert_same_bits(shown, [array[:, :, :stop] for array in expected])
        assert_same_bits(stored(cache), stored(whole))


@pytest.mark.parametrize("storage", STORAGES)
def test_tokens_that_were_taken_back_leave_no_trace(storage):
    spec = spec_of(storage)
    plain, cache = cache_of(spec, batch=2), cache_of(spec, batch=2)
    first, second = random_tokens(spec, 9, rows=2), random_tokens(spec, 5, rows=2, seed=1)
    draft = random_tokens(spec, 5, rows=2, seed=2)
    for layer in (0, 1):
        plain.append(layer, *first)
        cache.append(layer, *first)
    checkpoint = cache.checkpoint()
    with cache.scope():
        for layer in (0, 1):
            cache.append(layer, *draft)
    for layer in (0, 1):
        cache.append(layer, *draft)
    cache.rollback(checkpoint)
    assert_same_bits([cache.layers[0].keys], [plain.layers[0].keys])
    for layer in (0, 1):
        assert_same_bits(copies(cache.append(layer, *second)), copies(plain.append(layer, *second)))
    assert_same_bits(stored(cache), stored(plain))
    cache.truncate(3)
    assert_close(cache.layers[1].keys, first[0][:, :, :3], storage)


@pytest.mark.parametrize("storage", STORAGES)
def test_rows_change_places_with_their_scales(storage):
    spec = spec_of(storage)
    cache = cache_of(spec, batch=4)
    scale = torch.tensor([1.0, 10, 100, 1000])[:, None, None, None]
    keys, values = (array * scale for array in random_tokens(spec, 50, rows=4))
    for layer in (0, 1):
        cache.append(layer, keys, values)
    before = copies(cache.read(1))
    order = [2, 2, 0, 1]
    cache.reorder(order)
    assert_same_bits(cache.read(1), [array[order] for array in before])
    assert_close(cache.layers[0].keys, keys[order], storage)
    cache.select([3, 0])
    assert_same_bits(cache.read(1), [array[[1, 2]] for array in before])
    cache.repeat(2)
    assert_same_bits(cache.read(1), [array[[1, 1, 2, 2]] for array in before])
    new = random_tokens(spec, 3, rows=4, seed=5)
    shown = cache.append(1, *new)
    assert_same_bits([shown[1][:, :, :50]], [before[1][[1, 1, 2, 2]]])
    assert_close(shown[1][:, :, 50:], new[1], storage)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("sinks", [0, 2])
def test_a_window_is_shown_alone(storage, sinks):
    window = 6
    spec = spec_of(storage, layers=1, window=window, sinks=sinks)
    everything, cache = cache_of(spec_of(storage, layers=1)), cache_of(spec)
    start = 0
    for n_new in (1, 4, 1, 1, 5, 7, 1, 20, 1):
        new = random_tokens(spec, n_new, seed=start)
        expected = copies(everything.append(0, *new))
        shown = cache.append(0, *new)
        low = 0 if sinks else max(0, start - window + 1)
        start += n_new
        assert shown[0].shape[2] == start - low
        assert_same_bits(shown, [array[:, :, low:] for array in expected])
        assert_same_bits(cache.read(0, n_new), [array[:, :, low:] for array in expected])
        assert cache.mask(0, n_new).shape == (n_new, start - low)
    assert_same_bits([cache.layers[0].keys], [everything.layers[0].keys])
    assert (cache.layers[0].floor, cache.layers[0].held_from) == (0, 0)  # it can be cut anywhere
    cache.truncate(7)
    assert_same_bits([cache.layers[0].values], [expected[1][:, :, :7]])


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("value_dim", [0, 1, 3])
def test_few_dims_or_no_values(storage, value_dim):
    spec = spec_of(storage, key_dim=1, value_dim=value_dim)
    cache = cache_of(spec, batch=2, max_tokens=8)
    keys, values = random_tokens(spec, 8, rows=2)
    for layer in (0, 1):
        shown = cache.append(layer, keys, values)
    cache.reorder([1, 0])
    shown = cache.read(0)
    assert_close(shown[0], keys[[1, 0]], storage)
    assert shown[1].shape == (2, 2, 8, value_dim)
    if value_dim:
        assert_close(shown[1], values[[1, 0]], storage)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_host_arena_holds_the_same_bytes(storage, dtype):
    spec = spec_of(storage, dtype=dtype)
    ours, theirs = cache_of(spec, batch=2), cache_of(spec, batch=2, backend="host")
    for n_new in (1, 12, 3):
        keys, values = random_tokens(spec, n_new, rows=2, seed=n_new)
        given = [array.float().numpy().astype(theirs.layers[0]._wanted[0]) for array in (keys, values)]
        for layer in (0, 1):
            for one, other in zip(
                ours.append(layer, keys, values), theirs.append(layer, *given), strict=True
            ):
                assert type(other) is np.ndarray
                np.testing.assert_array_equal(one.float().numpy(), other.astype(np.float32))
    ours.reorder([1, 0])
    theirs.reorder([1, 0])
    for ours_region, theirs_region in zip(ours.layers[1].regions, theirs.layers[1].regions, strict=True):
        one, other = ours_region.array.view(torch.uint8).numpy(), theirs_region.array.view(np.uint8)
        np.testing.assert_array_equal(one[:, :, :16], other[:, :, :16])


def test_layers_of_different_storage_in_one_cache():
    spec = KVSpec(
        [
            LayerSpec(2, 8, 8, "bfloat16", storage="int4"),
            LayerSpec(1, 16, 4, "float32"),
            LayerSpec(1, 64, 8, "float32", value_dtype="float16", storage="float8_e4m3fn"),
            LayerSpec(2, 4, 4, "float32", window=2, slack=2),
        ]
    )
    cache = cache_of(spec, batch=2, max_tokens=16)
    for number in range(4):
        keys, values = random_tokens(spec, 4, rows=2, layer=number)
        shown = cache.append(number, keys, values)
        if spec.layers[number].storage:
            assert_close(shown[0], keys, spec.layers[number].storage)
            assert_close(shown[1], values, spec.layers[number].storage)
    cache.reorder([1, 0])
    for number in range(3):
        keys, values = random_tokens(spec, 4, rows=2, layer=number)
        storage = spec.layers[number].storage
        if storage:
            assert_close(cache.layers[number].keys, keys[[1, 0]], storage)
            assert_close(cache.layers[number].values, values[[1, 0]], storage)
        else:
            assert torch.equal(cache.layers[number].keys, keys[[1, 0]])


@pytest.mark.parametrize("storage", STORAGES)
def test_a_nan_stays_in_its_token_and_head_and_goes_with_it(storage):
    spec = spec_of(storage, layers=1)
    cache, clean = cache_of(spec), cache_of(spec)
    keys, values = random_tokens(spec, 6)
    expected = copies(clean.append(0, keys, values))
    values = values.clone()
    values[0, 1, 4, 2] = math.nan
    shown = cache.append(0, keys, values)
    assert_same_bits([shown[0]], [expected[0]])
    spoiled = shown[1].isnan()
    assert spoiled[0, 1, 4, 2]
    assert spoiled.sum() == spoiled[0, 1, 4].sum()
    assert torch.equal(shown[1][~spoiled], expected[1][~spoiled])
    cache.truncate(4)
    assert_same_bits([cache.layers[0].values], [expected[1][:, :, :4]])


# ---------------------------------------------------------------------------------------------------------- an attention


@pytest.mark.parametrize(("storage", "typical"), [("int8", 0.01), ("float8_e4m3fn", 0.03), ("int4", 0.09)])
def test_an_attention_is_off_by_no_more_than_keys_and_values_explain(storage, typical):
    """Logits that are off by d at most move each weight by a factor of exp(2 d) at most."""
    options = {"layers": 1, "key_dim": 64, "value_dim": 64}
    exact, quantised = (
        cache_of(spec_of(None, **options), max_tokens=300),
        cache_of(spec_of(storage, **options), max_tokens=300),
    )
    for step, n_new in enumerate((200, 1, 1, 64, 1)):
        new = random_tokens(quantised.spec, n_new, seed=step)
        keys, values = exact.append(0, *new)
        query = torch.randn(1, 2, 1, 64, generator=torch.Generator().manual_seed(step))

        def attend(keys, values, query=query):
            weights = torch.softmax((query @ keys.transpose(2, 3)).double() / 8, dim=-1)
            return weights @ values.double()

        keys_q, values_q = quantised.append(0, *new)
        largest_key = keys.abs().amax(-1)  # [rows, heads, tokens]
        # The error of a key by the bound of the format, times the sum of |query|, is what a logit is off by.
        logit_error = (query.abs().sum(-1) * largest_key * WORST[storage] * 1.01 / 8).max().item()
        measured = ((query @ (keys_q - keys).transpose(2, 3)) / 8).abs().max().item()
        assert measured <= logit_error
        value_error = (values.abs().amax() * WORST[storage] * 1.01).item()
        error = (attend(keys_q, values_q) - attend(keys, values)).abs()
        assert error.max() <= math.expm1(2 * measured) * values.abs().max() + value_error
        assert error.square().mean().sqrt() < typical


# ----------------------------------------------------------------------------------------------------- bytes and memory


@pytest.mark.parametrize(
    ("storage", "nbytes"),
    [
        ("int8", 28 * 2 * 2 * 132),
        ("float8_e4m3fn", 28 * 2 * 2 * 132),
        ("int4", 28 * 2 * 2 * 76),
        (None, 28 * 2 * 2 * 256),
    ],
)
def test_bytes_per_token(storage, nbytes):
    spec = KVSpec.uniform(layers=28, kv_heads=2, head_dim=128, dtype="bfloat16", storage=storage)
    assert spec.bytes_per_token == nbytes
    assert spec.nbytes(3, 100) == 300 * nbytes


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(40, 33), (1, 1), (1, 0), (8, 8)])
def test_a_cache_takes_the_bytes_that_its_spec_says(storage, batch, key_dim, value_dim):
    spec = spec_of(storage, key_dim=key_dim, value_dim=value_dim, dtype="float16")
    nbytes = spec.arena_nbytes(batch, 7)
    cache = KVCache(Arena(nbytes, backend="torch"), spec, batch=batch, max_tokens=7)
    assert cache.stats.reserved_nbytes == spec.nbytes(batch, 7)
    assert cache.stats.scratch_nbytes >= batch * 2 * 7 * 2 * (key_dim + value_dim)
    assert cache.arena.stats.top > nbytes - 256  # the padding behind the last region
    keys, values = random_tokens(spec, 7, rows=batch)
    for layer in (0, 1):
        cache.append(layer, keys, values)
    assert cache.stats.used_nbytes == spec.nbytes(batch, 7)
    assert cache.arena.stats.top > nbytes - 256
    with pytest.raises(OutOfMemoryError):
        KVCache(Arena(nbytes - 256, backend="torch"), spec, batch=batch, max_tokens=7)


def test_what_is_shown_lies_in_the_scratch_at_one_address():
    spec = spec_of("int8")
    cache = cache_of(spec, batch=2)
    scratch = cache._common.scratch[cache.arena.device]
    low = scratch.array.data_ptr()
    addresses = set()
    for n_new in (5, 1, 1):
        for layer in (0, 1):
            keys, values = cache.append(layer, *random_tokens(spec, n_new, rows=2))
            addresses.add((keys.data_ptr(), values.data_ptr()))
            for shown in (keys, values):
                assert low <= shown.data_ptr()
                assert shown.data_ptr() + shown.nbytes <= low + scratch.nbytes
                assert shown.is_contiguous()
    assert len(addresses) == 1


def test_what_is_shown_is_valid_until_the_next_call():
    spec = spec_of("int8")
    cache = cache_of(spec)
    first, second = random_tokens(spec, 4), random_tokens(spec, 4, seed=1)
    keys, _ = cache.append(0, *first)
    assert_close(keys, first[0], "int8")
    cache.append(1, *second)
    assert_close(keys, second[0], "int8")  # as documented
    keys, values = cache.layers[0].keys, cache.layers[0].values
    assert_close(keys, first[0], "int8")  # those of one layer do not disturb each other
    assert_close(values, first[1], "int8")


def test_what_is_shown_may_be_appended():
    spec = spec_of("int8", key_dim=8, value_dim=8)
    cache = cache_of(spec, batch=2)
    keys, values = random_tokens(spec, 4, rows=2)
    shown = copies(cache.append(0, keys, values))
    assert_same_bits(cache.append(1, *cache.read(0)), shown)  # int8 reproduces what it made
    cache.reset()
    cache.append(0, keys, values)
    cache.append(1, *cache.read(0)[::-1])  # keys and values exchanged
    assert_same_bits(cache.read(1), shown[::-1])
    cache.append(1, *cache.read(0)[::-1])  # behind others
    assert_same_bits(cache.read(1), [torch.cat([array, array], dim=2) for array in shown[::-1]])


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_reading_allocates_no_more_for_more_tokens(storage, dtype):
    spec = spec_of(storage, layers=1, kv_heads=1, key_dim=64, value_dim=64, dtype=dtype)
    peaks = []
    for n_tokens in (3000, 12000):
        cache = cache_of(spec, max_tokens=n_tokens + 1)
        cache.append(0, *random_tokens(spec, n_tokens))
        new = random_tokens(spec, 1)

        def step(cache=cache, new=new):
            cache.append(0, *new)
            cache.read(0)

        peaks.append(peak_nbytes(step))
    assert peaks[1] == peaks[0]
    if dtype == "float32" and storage != "int4":
        assert peaks[0] < 10_000


def peak_nbytes(function):
    """Most bytes that `function` has allocated on the CPU at once, inside of kernels too."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        function()
    peak = held = 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


# ------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("storage", STORAGES)
def test_an_append_that_raises_changes_nothing(storage):
    spec = spec_of(storage, dtype="float16")
    cache = cache_of(spec, batch=2, max_tokens=8)
    cache.append(0, *random_tokens(spec, 6, rows=2))
    before, shown = stored(cache), copies(cache.read(0))
    keys, values = random_tokens(spec, 2, rows=2, seed=1)
    more = random_tokens(spec, 3, rows=2)
    for error, given in (
        (CapacityError, more),
        (DTypeError, (keys.float(), values)),
        (DTypeError, (keys, values.float())),
        (ShapeError, (keys[:1], values[:1])),
        (ShapeError, (keys, values[:, :, :1])),
        (ShapeError, (keys[..., :-1], values)),
        (ArgumentTypeError, (keys.numpy(), values)),
        (AutogradError, (keys, values.clone().requires_grad_())),
    ):
        with pytest.raises(error):
            cache.append(0, *given)
        assert [layer.length for layer in cache.layers] == [6, 0]
        assert_same_bits(stored(cache), before)
        assert_same_bits(cache.read(0), shown)
    for n_tokens in (7, -1):
        with pytest.raises(ArgumentError):
            cache.read(0, n_tokens)
    with pytest.raises(ArgumentError, match="storage"):
        cache.buffers(0)


@pytest.mark.parametrize("what", ["layers", "scratch"])
def test_memory_that_was_rolled_back_is_not_touched(what):
    spec = spec_of("int8", layers=1)
    arena = Arena(2 * spec.arena_nbytes(1, 8), backend="torch")
    start = arena.checkpoint()
    cache = KVCache(arena, spec, batch=1, max_tokens=8)
    new = random_tokens(spec, 3)
    cache.append(0, *new)
    layer = cache.layers[0]
    if what == "layers":
        arena.rollback(start)
    else:
        with arena.scope():
            cache._common.scratch[arena.device] = arena.alloc(layer.spec.scratch_nbytes(1, 8), "uint8")
    before = arena.alloc(arena.stats.available, "uint8").array.clone() if what == "layers" else stored(cache)
    for call in (
        lambda: cache.append(0, *new),
        lambda: cache.read(0),
        lambda: layer.keys,
        lambda: layer.values,
    ):
        with pytest.raises(StaleRegionError):
            call()
        assert cache.length == 3
    if what == "layers":
        arena.rollback(start)
        assert_same_bits([arena.alloc(len(before), "uint8").array], [before])
    else:
        assert_same_bits(stored(cache), before)


def test_a_layer_above_the_scratch_may_go_alone():
    spec = spec_of("int8").layers[0]
    arena = Arena(1 << 20, backend="torch")
    group = LayerGroup(batch=1, max_tokens=8)
    first = group.add(arena, spec)
    new = random_tokens(KVSpec([spec]), 3)
    with arena.scope():
        second = group.add(arena, spec)  # which needs no scratch of its own
        second.append(*new)
    reused = arena.alloc(second.reserved_nbytes, "uint8", fill=1).array
    for call in (lambda: second.append(*new), lambda: second.read(0), lambda: second.keys):
        with pytest.raises(StaleRegionError):
            call()
    assert (reused == 1).all()
    assert_close(first.append(*new)[0], new[0], "int8")


def test_what_cannot_be_quantised_is_refused():
    with pytest.raises(ArgumentError, match=r"'int3'.*'int8'"):
        LayerSpec(1, 8, 8, "float32", storage="int3")
    with pytest.raises(ArgumentError, match="slack"):
        LayerSpec(1, 8, 8, "float32", window=4, slack=4, storage="int8")
    for options in ({"dtype": "int8"}, {"dtype": "float32", "value_dtype": "complex64"}):
        with pytest.raises(DTypeError, match="bfloat16"):
            LayerSpec(1, 8, 8, storage="int8", **options)
    spec = LayerSpec(1, 8, 8, "float32", storage="int8")
    with pytest.raises(BackendError, match="cupy"):
        QuantizedLayer(None, 0, SimpleNamespace(backend="cupy"), spec, None)


# -------------------------------------------------------------------------------------------------------- torch's modes

MODES = {"grad": contextlib.nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("made_in", MODES)
def test_a_cache_is_used_in_all_modes_in_turn(storage, made_in):
    spec = spec_of(storage, layers=1)
    with MODES[made_in]():
        cache = cache_of(spec, batch=2)
    for first in MODES:
        for second in MODES:
            with MODES[first]():
                cache.reset()
                new = random_tokens(spec, 3, rows=1 if second == "grad" else 2)
                cache.append(0, *new)
            with MODES[second]():
                cache.append(0, *new)
                cache.reorder([0] if second == "grad" else [0, 1])
                assert_close(cache.layers[0].keys, torch.cat([new[0], new[0]], dim=2), storage)
    with torch.no_grad():
        keys, values = (array.requires_grad_() for array in random_tokens(spec, 2, rows=2))
        shown, _ = cache.append(0, keys, values)
        assert not shown.requires_grad


# ------------------------------------------------------------------------------------------------- a machine and its model

MACHINE_SPEC = KVSpec(
    [
        LayerSpec(2, 33, 5, "float32", storage="int4"),
        LayerSpec(1, 7, 7, "bfloat16", window=3, storage="int8"),
        LayerSpec(1, 4, 6, "float16", storage="float8_e4m3fn"),
    ]
)
MAX_TOKENS, BATCH = 12, 4


def content(number, layer):
    """Keys and values ``[kv_heads, dim]`` of the token `number`, of any size."""
    found = MACHINE_SPEC.layers[layer]
    generator = torch.Generator().manual_seed(number * 10 + layer)
    size = 10.0 ** ((number * 7) % 5 - 2)
    return [
        (size * torch.randn(found.kv_heads, dim, generator=generator)).to(dtype.torch)
        for dim, dtype in ((found.key_dim, found.dtype), (found.value_dim, found.value_dtype))
    ]


class Machine(RuleBasedStateMachine):
    """The model keeps a list of token numbers a row, and what each token looked like when it was first shown."""

    def __init__(self):
        super().__init__()
        self.cache = cache_of(MACHINE_SPEC, batch=BATCH, max_tokens=MAX_TOKENS)
        self.model = []  # a list of token numbers a row
        self.first_shown = {}  # (layer, number) -> keys, values
        self.checkpoints = []  # (checkpoint, lists)
        self.next_number = 0
        self.most = 0

    @initialize(rows=st.integers(1, BATCH))
    def begin(self, rows):
        self.model = [[] for _ in range(rows)]

    @property
    def length(self):
        return len(self.model[0])

    def gathered(self, which, layer, numbers):
        """Exact keys or values ``[rows, kv_heads, n, dim]``."""
        return torch.stack(
            [torch.stack([content(number, layer)[which] for number in row], dim=1) for row in numbers]
        )

    @precondition(lambda self: self.length < MAX_TOKENS)
    @rule(data=st.data())
    def append(self, data):
        n_new = data.draw(st.integers(1, min(5, MAX_TOKENS - self.length)))
        new = []
        for _ in self.model:
            new.append(list(range(self.next_number, self.next_number + n_new)))
            self.next_number += n_new
        start = self.length
        for row, numbers in zip(self.model, new, strict=True):
            row += numbers
        for layer, spec in enumerate(MACHINE_SPEC.layers):
            shown = self.cache.append(layer, *(self.gathered(which, layer, new) for which in (0, 1)))
            low = 0 if spec.window is None else max(0, start - spec.window + 1)
            self.compare(layer, shown, low)

    def compare(self, layer, shown, low):
        """Every token is close to what was appended, and has not changed since it was first shown."""
        storage = MACHINE_SPEC.layers[layer].storage
        for which, array in enumerate(shown):
            numbers = [row[low:] for row in self.model]
            if not numbers[0]:
                assert array.shape[2] == 0
                continue
            assert_close(array, self.gathered(which, layer, numbers), storage)
            for row, listed in enumerate(numbers):
                for position, number in enumerate(listed):
                    now = array[row, :, position]
                    first = self.first_shown.setdefault((layer, which, number), now.clone())
                    assert torch.equal(first, now)

    @precondition(lambda self: self.length == MAX_TOKENS)
    @rule()
    def append_too_many(self):
        new = [self.gathered(which, 0, [[0]] * len(self.model)) for which in (0, 1)]
        with pytest.raises(CapacityError):
            self.cache.append(0, *new)

    @rule()
    def checkpoint(self):
        lists = [list(row) for row in self.model]
        self.checkpoints.append((self.cache.checkpoint(), lists))

    @precondition(lambda self: self.checkpoints)
    @rule(data=st.data())
    def rollback(self, data):
        index = data.draw(st.integers(0, len(self.checkpoints) - 1))
        checkpoint, lists = self.checkpoints[index]
        self.cache.rollback(checkpoint)
        self.model = [list(row) for row in lists]
        del self.checkpoints[index + 1 :]

    @rule(data=st.data())
    def truncate(self, data):
        n_tokens = data.draw(st.integers(0, self.length))
        self.cache.truncate(n_tokens)
        self.model = [row[:n_tokens] for row in self.model]
        self.checkpoints = [(c, lists) for c, lists in self.checkpoints if len(lists[0]) <= n_tokens]

    @precondition(lambda self: self.length)
    @rule(data=st.data())
    def change_rows(self, data):
        rows = st.integers(0, len(self.model) - 1)
        which = data.draw(st.sampled_from(["reorder", "select", "repeat"]))
        if which == "reorder":
            order = data.draw(st.lists(rows, min_size=len(self.model), max_size=len(self.model)))
            self.cache.reorder(order)
        elif which == "select":
            order = data.draw(st.lists(rows, min_size=1, max_size=BATCH))
            self.cache.select(order)
        else:
            n = data.draw(st.integers(1, BATCH // len(self.model)))
            order = [row for row in range(len(self.model)) for _ in range(n)]
            self.cache.repeat(n)
        self.model = [list(self.model[row]) for row in order]
        self.checkpoints = []

    @rule(rows=st.integers(1, BATCH))
    def reset(self, rows):
        self.cache.reset()
        self.model = [[] for _ in range(rows)]
        self.checkpoints = []

    @precondition(lambda self: self.length)
    @rule(data=st.data())
    def read(self, data):
        layer = data.draw(st.integers(0, 2))
        n_tokens = data.draw(st.integers(0, self.length))
        window = MACHINE_SPEC.layers[layer].window
        low = 0 if window is None else max(0, self.length - n_tokens - window + 1)
        self.compare(layer, self.cache.read(layer, n_tokens), low)

    @invariant()
    def what_is_held_is_shown(self):
        if self.length:
            for number, layer in enumerate(self.cache.layers):
                self.compare(number, (layer.keys, layer.values), 0)
        assert self.cache.length == self.length
        self.most = max(self.most, self.length)
        assert self.cache.high_water == self.most
        assert self.cache.rows in (len(self.model), None if not self.length else 0)


Machine.TestCase.settings = settings(max_examples=25, stateful_step_count=20)
test_a_machine_agrees_with_its_model = Machine.TestCase
