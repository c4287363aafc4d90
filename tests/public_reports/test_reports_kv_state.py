"""What KV caches were reported for around dtypes, quantised storage, MLA, and files of another configuration.

The oracle is what was appended; for quantised storage the bounds that its documentation gives, computed here.
"""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from gpuarena import Arena, DTypeError  # noqa: E402
from gpuarena.errors import ArenaError, ShapeError  # noqa: E402
from gpuarena.kv import KVCache, KVSpec, LayerSpec, SharedLayer  # noqa: E402
from gpuarena.kv.contiguous import ContiguousKVCache  # noqa: E402
from gpuarena.kv.lanes import LaneCache  # noqa: E402
from gpuarena.kv.paged import PagedKVCache  # noqa: E402

HEADS, MAX_TOKENS = 2, 300


def dirty(nbytes):
    """An arena whose memory is NaN wherever nothing was written."""
    return Arena.from_buffer(torch.full((nbytes + 512,), 0xFF, dtype=torch.uint8))


def linear(spec, batch=1, max_tokens=MAX_TOKENS):
    return KVCache(dirty(spec.arena_nbytes(batch, max_tokens)), spec, batch=batch, max_tokens=max_tokens)


def noise(n, dim, heads=HEADS, dtype=torch.float32):
    """[1, heads, n, dim], with a channel that is 20 times as large."""
    x = torch.randn(1, heads, n, dim, generator=torch.Generator().manual_seed(n + dim))
    x[..., :1] *= 20
    return x.to(dtype)


# ------------------------------------------------------------------------------------------------------ quantised


def allowed(x, storage):
    """How far each element may be off, as documented."""
    x = x.double()
    largest = x.abs().amax(-1, keepdim=True)
    if storage == "int8":
        return largest / 127 / 2
    if storage == "float8_e4m3fn":
        return x.abs() / 16 + largest / 448 / 1024
    limit = torch.empty_like(x)
    for start in range(0, x.shape[-1], 32):
        group = x[..., start : start + 32]
        scale = (group.clamp(min=0).amax(-1) - group.clamp(max=0).amin(-1)) / 15
        limit[..., start : start + 32] = scale[..., None] * 5 / 8
    return limit


# huggingface/transformers#34189, #39106, ggml-org/llama.cpp#5648, InternLM/lmdeploy#4849: a part that is not quantised
# yet is lost or doubled at certain lengths, and nothing beyond its length was tested
@pytest.mark.parametrize("storage", ["int8", "float8_e4m3fn", "int4"])
@pytest.mark.parametrize("dim", [32, 40])
@pytest.mark.parametrize(
    "chunks", [[1] * 70, [31, 1, 1, 31], [32, 32, 64, 1], [128, 1, 1], [129, 127], [256, 1, 1]]
)
def test_huggingface_transformers_34189_any_length_in_any_pieces_is_stored_alike(storage, dim, chunks):
    layer = LayerSpec(HEADS, dim, dim, "float32", storage=storage)
    cache, whole = linear(KVSpec([layer])), linear(KVSpec([layer]))
    keys, values = noise(sum(chunks), dim), noise(sum(chunks) + 1000, dim)[:, :, : sum(chunks)]
    start = 0
    for n in chunks:
        stop = start + n
        found_keys, found_values = cache.append(0, keys[:, :, start:stop], values[:, :, start:stop])
        for found, wanted in ((found_keys, keys[:, :, :stop]), (found_values, values[:, :, :stop])):
            assert found.shape == wanted.shape
            assert ((found.double() - wanted).abs() <= allowed(wanted, storage) * 1.00001).all()
        start = stop
    in_pieces = [array.clone() for array in cache.read(0)]
    at_once = whole.append(0, keys, values)
    assert all(torch.equal(*pair) for pair in zip(in_pieces, at_once, strict=True))
    cache.truncate(sum(chunks) - 1)  # and a cut in the middle of a group of anything
    cache.append(0, keys[:, :, -1:], values[:, :, -1:])
    assert torch.equal(cache.layers[0].keys, in_pieces[0])


# --------------------------------------------------------------------------------------------------------- dtypes


def makers(spec):
    """A cache of each kind: what appends one row to a layer, what it holds of it, and its tokens."""

    def of_linear():
        cache = linear(spec)
        return cache.append, lambda: cache.read(0), lambda: cache.length

    def of_lanes():
        cache = LaneCache(dirty(1 << 20), spec, lanes=1, max_tokens=64)
        return cache.append, lambda: cache.read(0), lambda: cache.lengths[0]

    def of_pages():
        nbytes = PagedKVCache.arena_nbytes(spec, num_pages=8)
        sequence = PagedKVCache(dirty(nbytes), spec, num_pages=8).sequence()
        return (
            sequence.append,
            lambda: tuple(array[None] for array in sequence.read(0)),
            lambda: sequence.length,
        )

    def of_pieces():
        nbytes = ContiguousKVCache.arena_nbytes(spec, capacity_tokens=64)
        request = ContiguousKVCache(dirty(nbytes), spec, capacity_tokens=64).request(64)
        return request.append, lambda: request.read(0), lambda: request.length

    return {"linear": of_linear, "lanes": of_lanes, "paged": of_pages, "contiguous": of_pieces}


CACHES = ["linear", "lanes", "paged", "contiguous"]


# vllm-project/vllm#54338: the bits of bfloat16 are read as float16, which gives fluent nonsense and no error
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("names", [("bfloat16", "float16"), ("float16", "bfloat16")])
def test_vllm_project_vllm_54338_bits_are_never_read_as_another_dtype(kind, names):
    own, other = (getattr(torch, name) for name in names)
    spec = KVSpec.uniform(layers=1, kv_heads=HEADS, head_dim=8, dtype=names[0])
    append, read, length = makers(spec)[kind]()
    new = noise(5, 8, dtype=own)
    append(0, new, new * 2)
    for wrong in (new.to(other), new.view(other)):
        with pytest.raises(DTypeError, match=f"{names[1]}.*{names[0]}"):
            append(0, wrong, wrong)
    assert length() == 5
    for array, wanted in zip(read(), (new, new * 2), strict=True):
        assert array.dtype == own
        assert torch.equal(array.contiguous().view(torch.int16), wanted.view(torch.int16))


# the same by way of a file
def test_vllm_project_vllm_54338_a_file_of_another_dtype_is_refused(tmp_path):
    path, arena = tmp_path / "state", Arena("1MiB", backend="torch")
    spec, other = (
        KVSpec.uniform(layers=1, kv_heads=HEADS, head_dim=8, dtype=name) for name in ("bfloat16", "float16")
    )
    cache, new = linear(spec), noise(5, 8, dtype=torch.bfloat16)
    cache.append(0, new, new * 2)
    cache.save(path)
    with pytest.raises(ArenaError, match="dtype is bfloat16 in the file, float16 in the cache") as caught:
        KVCache.load(path, arena, spec=other)
    assert "dtype" in caught.value.field
    with pytest.raises(ArenaError, match="dtype is bfloat16 in the file, float16 in the cache"):
        linear(other).restore(path)
    loaded = KVCache.load(path, arena, spec=spec)
    assert loaded.layers[0].keys.dtype == torch.bfloat16
    assert torch.equal(loaded.layers[0].keys.view(torch.int16), new.view(torch.int16))
    on_host = KVCache.load(path, Arena("1MiB"))  # whose numbers are NumPy's
    assert on_host.layers[0].values.view("int16").tolist() == (new * 2).view(torch.int16).tolist()


# huggingface/transformers#34799, ovg-project/kvcached#214, meta-pytorch/torchtune#1371, pytorch/torchchat#596: a
# dtype other than the cache's fails deep inside, or is cast without a word
@pytest.mark.parametrize("kind", CACHES)
def test_huggingface_transformers_34799_no_dtype_is_cast_in_silence(kind):
    spec = KVSpec(
        [LayerSpec(HEADS, 8, 8, "bfloat16"), LayerSpec(HEADS, 8, 8, "float32", value_dtype="float16")]
    )
    append, _, length = makers(spec)[kind]()
    right = [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float16)]
    dtypes = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.uint8]
    x = torch.ones(1, HEADS, 3, 8)
    for layer in range(2):
        for pair in itertools.product(dtypes, repeat=2):
            if pair != right[layer]:
                with pytest.raises(DTypeError, match="the cache holds"):
                    append(layer, x.to(pair[0]), x.to(pair[1]))
        append(layer, *(x.to(dtype) for dtype in right[layer]))
    assert length() == 3


# ------------------------------------------------------------------------------------------------------------ MLA


# LMCache/LMCache#2881, sgl-project/sglang#29889, vllm-project/vllm#48652 (and 48658), huggingface/transformers#47761:
# values that are narrower than keys, or not there at all, are taken to be as wide as the keys
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize(("key_dim", "value_dim"), [(576, 0), (512, 64), (24, 16), (16, 24)])
def test_lmcache_lmcache_2881_keys_and_values_have_dims_of_their_own(kind, key_dim, value_dim, tmp_path):
    spec = KVSpec([LayerSpec(1, key_dim, value_dim, "float32")])
    assert spec.bytes_per_token == 4 * (key_dim + value_dim)
    append, read, length = makers(spec)[kind]()
    keys = noise(9, key_dim, heads=1)
    values = torch.arange(9.0)[None, None, :, None].expand(1, 1, 9, value_dim) + torch.arange(value_dim) / 64
    for start, stop in ((0, 6), (6, 7), (7, 9)):
        append(0, keys[:, :, start:stop], values[:, :, start:stop])
    with pytest.raises(ShapeError):
        append(0, keys[:, :, :1], keys[:, :, :1])
    assert length() == 9
    found = read()
    assert torch.equal(found[0], keys)
    assert torch.equal(found[1], values)
    if kind == "linear":
        cache = linear(spec)
        cache.append(0, keys, values)
        cache.save(tmp_path / "state")
        loaded = KVCache.load(tmp_path / "state", Arena("2MiB", backend="torch"), spec=spec)
        assert torch.equal(loaded.layers[0].keys, keys)
        assert torch.equal(loaded.layers[0].values, values)


# ---------------------------------------------------------------------------------------------------------- files

LAYER = {
    "kv_heads": 2,
    "key_dim": 8,
    "value_dim": 8,
    "dtype": "float32",
    "window": 6,
    "sinks": 1,
    "slack": 4,
}
STATE = KVSpec([LayerSpec(**LAYER), LayerSpec(2, 8, 8, "float32"), SharedLayer(1)])
OTHERS = {
    "kv_heads": KVSpec([LayerSpec(**{**LAYER, "kv_heads": 1}), *STATE.layers[1:]]),
    "key_dim": KVSpec([LayerSpec(**{**LAYER, "key_dim": 16}), *STATE.layers[1:]]),
    "value_dim": KVSpec([LayerSpec(**{**LAYER, "value_dim": 4}), *STATE.layers[1:]]),
    "dtype": KVSpec([LayerSpec(**{**LAYER, "dtype": "float16"}), *STATE.layers[1:]]),
    "value_dtype": KVSpec([LayerSpec(**LAYER, value_dtype="float16"), *STATE.layers[1:]]),
    "window": KVSpec([LayerSpec(**{**LAYER, "window": 5}), *STATE.layers[1:]]),
    "sinks": KVSpec([LayerSpec(**{**LAYER, "sinks": 0}), *STATE.layers[1:]]),
    "slack": KVSpec([LayerSpec(**{**LAYER, "slack": 5}), *STATE.layers[1:]]),
    "storage": KVSpec([STATE.layers[0], LayerSpec(2, 8, 8, "float32", storage="int8"), SharedLayer(1)]),
    "layers": KVSpec([*STATE.layers, LayerSpec(2, 8, 8, "float32")]),
    "source": KVSpec([*STATE.layers[:2], SharedLayer(0)]),
}


def filled(spec=STATE, n=20, sign=1.0):
    cache = linear(spec, batch=2, max_tokens=32)
    for start, stop in ((0, 15), (15, 18), (18, n)):
        for number, layer in spec.owned:
            shape = (2, layer.kv_heads, stop - start)
            column = sign * torch.arange(start, stop).expand(shape)[..., None]
            keys, values = (
                column.expand(*shape, dim).to(dtype)
                for dim, dtype in (
                    (layer.key_dim, layer.dtype.torch),
                    (layer.value_dim, layer.value_dtype.torch),
                )
            )
            cache.append(number, keys, values)
    return cache


def contents(cache):
    return [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]


def same(one, other):
    return all(
        torch.equal(a, b) for pairs in zip(one, other, strict=True) for a, b in zip(*pairs, strict=True)
    )


# ggml-org/llama.cpp#25297 (and 26676, 28498, 730): a state is restored under another configuration, and is wrong
@pytest.mark.parametrize("field", OTHERS)
def test_ggml_org_llama_cpp_25297_a_state_of_another_configuration_is_refused(field, tmp_path):
    path = tmp_path / "state"
    filled().save(path)
    arena = Arena("1MiB", backend="torch")
    before = arena.stats
    with pytest.raises(ArenaError) as caught:
        KVCache.load(path, arena, spec=OTHERS[field])
    assert caught.value.field == field
    assert caught.value.found != caught.value.wanted
    assert (arena.stats.used, arena.stats.top) == (before.used, before.top)
    other = filled(OTHERS[field], sign=-1.0)
    held = contents(other)
    with pytest.raises(ArenaError):
        other.restore(path)
    assert same(contents(other), held)
    assert other.length == 20
    right = filled(sign=-1.0)
    right.restore(path)
    assert same(contents(right), contents(filled()))


# the same for the size of the cache, and for a file of another version, or whose end is missing
def test_ggml_org_llama_cpp_25297_a_state_that_is_too_large_or_cut_short_is_refused(tmp_path):
    path = tmp_path / "state"
    filled().save(path)
    arena = Arena("1MiB", backend="torch")
    for size, figures in (({"max_tokens": 19}, "20 tokens are held"), ({"batch": 1}, "2 rows are held")):
        with pytest.raises(ArenaError, match=figures):
            KVCache.load(path, arena, **size)
        assert arena.stats.top == 0
    assert same(contents(KVCache.load(path, arena, max_tokens=20)), contents(filled()))
    arena.reset()
    data = path.read_bytes()
    target, held = filled(sign=-1.0), contents(filled(sign=-1.0))
    longer_header = bytes([data[0] ^ 4]) + data[1:]
    for wrong in (
        data[:-100],
        data[:200],
        b"",
        longer_header,
        data.replace(b"gpuarena.kv", b"gpuarena.xy"),
        data.replace(b'"format_version":"1"', b'"format_version":"9"'),
    ):
        assert wrong != data
        path.write_bytes(wrong)
        with pytest.raises(ArenaError):
            KVCache.load(path, arena)
        assert arena.stats.top == 0
        with pytest.raises(ArenaError):
            target.restore(path)
        assert same(contents(target), held)


# vllm-project/vllm#46283: what was taken for a load that is aborted is never given back
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_vllm_project_vllm_46283_a_load_that_is_aborted_leaves_nothing(error, tmp_path):
    path = tmp_path / "state"
    filled().save(path)
    arena = Arena("1MiB", backend="torch")
    mine = arena.full(100, 7, "uint8")
    before = arena.stats

    def abort(done, total):
        raise error

    for _ in range(3):
        with pytest.raises(error):
            KVCache.load(path, arena, progress=abort)
        assert (arena.stats.used, arena.stats.top) == (before.used, before.top)
    assert set(mine.tolist()) == {7}
    assert same(contents(KVCache.load(path, arena)), contents(filled()))
