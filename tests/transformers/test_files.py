"""A prefilled prompt in a file: what is loaded goes on as what was saved."""

from __future__ import annotations

import json
import os
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors")

import families  # noqa: E402 - after the skips
from families import assert_same, generate  # noqa: E402
from gpuarena_transformers import ArenaCache, cache_argument  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from gpuarena import Arena, CapacityError, CheckpointError, DeviceMismatchError, DTypeError, ShapeError  # noqa: E402
from gpuarena.errors import ArgumentError, ArgumentTypeError, OutOfMemoryError, StateError  # noqa: E402
from gpuarena.kv import KVCache  # noqa: E402
from gpuarena.kv.state import read_state  # noqa: E402

PREFIX = families.prompt("repeating")["input_ids"]  # 12 tokens, longer than the windows
PROMPT = {"input_ids": torch.cat([PREFIX, families.prompt()["input_ids"][:1, :4]], dim=1)}
PROMPT["attention_mask"] = torch.ones_like(PROMPT["input_ids"])


@pytest.fixture
def path(tmp_path):
    return tmp_path / "prompt.safetensors"


def prefilled(name, cache=None, ids=PREFIX):
    """Return a cache that holds a prompt, whose ids it knows."""
    model = families.model(name)
    cache = ArenaCache(model.config, len(ids), 32) if cache is None else cache
    cache.prefix(model, ids)
    return cache


def states(*shape):
    return torch.randn(*shape)


# --------------------------------------------------------------------------------------------------------------- there and back


@pytest.mark.parametrize(
    "name", ["llama", "mistral", "gemma3", "deepseek-v3", "gemma4-shared", "lfm2", "bamba"]
)
def test_logits_after_loading_are_those_before(name, path):
    model = families.model(name)
    saved = prefilled(name)
    saved.save(path)
    expected = generate(model, PROMPT, saved, n_new=5)
    loaded = ArenaCache(model.config, 1, 32)
    loaded.load(path)
    assert loaded.get_seq_length() == len(loaded.transcript) == 12
    assert torch.equal(loaded.transcript.ids, PREFIX)
    found = generate(model, PROMPT, loaded, n_new=5)
    assert_same(found, expected)
    assert all(torch.equal(one, other) for one, other in zip(found.logits, expected.logits, strict=True))
    assert_same(found, generate(model, PROMPT, n_new=5))
    loaded.load(path)  # again, into a cache in use
    assert_same(generate(model, PROMPT, loaded, n_new=5), expected)


def test_rows_and_padding(path):
    model = families.model("gemma3")
    prompt = families.prompt("padded")
    saved = ArenaCache(model.config, 6, 32)
    prefix = saved.prefix(model, prompt)
    saved.save(path)
    loaded = ArenaCache.for_model(model, 64, max_batch_size=3)
    arena = loaded.arena
    loaded.load(path)
    assert loaded.arenas == [arena]
    assert loaded.batch_size == 2
    assert torch.equal(loaded.transcript.mask, prompt["attention_mask"] == 1)
    more = prefix.inputs([[5, 6, 7]])
    assert_same(generate(model, more, loaded, n_new=4), generate(model, more, n_new=4))


def test_states_alone(path):
    torch.manual_seed(0)
    config = transformers.MambaConfig(
        vocab_size=128, hidden_size=32, num_hidden_layers=2, state_size=4, initializer_range=0.5
    )
    model = transformers.MambaForCausalLM(config).eval()
    cache = ArenaCache(config, 2)
    cache.prefix(model, families.prompt())
    cache.save(path)
    loaded = ArenaCache(config, 2)
    loaded.load(path)
    assert torch.equal(loaded.transcript.ids, cache.transcript.ids)
    for _ in range(3):
        with torch.no_grad():
            found, wanted = (
                model(input_ids=torch.tensor([[5], [6]]), **{cache_argument(model): c}).logits
                for c in (loaded, cache)
            )
        assert torch.equal(found, wanted)
    with pytest.raises(StateError, match="another model"):
        ArenaCache(families.config("llama"), 2, 8).load(path)


def test_only_what_is_filled_is_in_the_file(path):
    model = families.model("llama")
    cache = prefilled("llama", ArenaCache(model.config, 4, 128))
    cache.save(path)
    tensors = load_file(path)
    assert sorted(tensors) == [f"layers.{n}.{what}" for n in (0, 1) for what in ("keys", "values")]
    for n, layer in enumerate(cache.layers):
        assert torch.equal(tensors[f"layers.{n}.keys"], layer.keys)
        assert torch.equal(tensors[f"layers.{n}.values"], layer.values)
    assert os.path.getsize(path) < 2 * 2 * 12 * 2 * 16 * 4 + 3000
    assert os.listdir(path.parent) == [path.name]


def test_what_the_file_says_of_itself(path):
    cache = prefilled("gemma3")
    seen = []
    cache.save(path, metadata={"revision": "a1"}, progress=lambda done, total: seen.append((done, total)))
    state = read_state(path)
    assert (state.length, state.rows, dict(state.metadata)) == (12, 1, {"revision": "a1"})
    assert state.nbytes == seen[-1][0] == seen[-1][1]
    with safetensors.safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    assert json.loads(metadata["model"])["model_type"] == cache.config.model_type
    assert json.loads(metadata["transcript"]) == {"ids": PREFIX.tolist(), "mask": None}
    assert metadata["transformers"] == transformers.__version__
    plain = KVCache.load(path, Arena("1MiB", backend="torch"))  # the same format
    assert torch.equal(plain.layers[2].keys, cache.layers[2].keys)
    other = ArenaCache(cache.config, 1, 32)
    done = []
    other.load(path, progress=lambda *figures: done.append(figures))
    assert done[-1] == seen[-1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_are_kept_bit_by_bit(dtype, path):
    cache = ArenaCache(families.config("llama"), 2, 8)
    pair = [states(2, 2, 5, 16).to(dtype) for _ in range(2)]
    for index in range(2):
        cache.update(*pair, index)
    cache.save(path)
    loaded = ArenaCache(families.config("llama"), 2, 8, dtype=dtype)
    loaded.load(path)
    assert torch.equal(loaded.layers[1].keys, pair[0])
    assert torch.equal(loaded.layers[1].values, pair[1])
    assert len(loaded.transcript) == 0  # nobody told


@settings(max_examples=20)
@given(
    rows=st.integers(1, 3), n_tokens=st.integers(1, 12), n_before=st.integers(0, 6), has_config=st.booleans()
)
def test_any_rows_and_lengths(tmp_path_factory, rows, n_tokens, n_before, has_config):
    config = families.config("gemma3") if has_config else None
    path = tmp_path_factory.mktemp("files") / "cache"
    cache, other = ArenaCache(config, 3, 8, on_full="fallback"), ArenaCache(config, 3, 12)
    given_ = [(states(rows, 2, n_tokens, 4), states(rows, 2, n_tokens, 3)) for _ in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for index, pair in enumerate(given_):
            cache.update(*pair, index)
    for index in range(3 if n_before else 0):
        other.update(states(2, 2, n_before, 4), states(2, 2, n_before, 3), index)
    cache.save(path)
    other.load(path)
    assert (other.batch_size, other.get_seq_length()) == (rows, n_tokens)
    for layer, (keys, values) in zip(other.layers, given_, strict=True):
        assert torch.equal(layer.keys, keys)
        assert torch.equal(layer.values, values)


def test_more_than_the_arena_has_room_for(path):
    prefilled("llama").save(path)
    model = families.model("llama")
    with pytest.raises(
        CapacityError, match="12 tokens are in the file, the cache has room for 10, 2 too few"
    ) as caught:
        ArenaCache(model.config, 1, 10).load(path)
    error = caught.value
    assert (error.requested, error.capacity, error.missing) == (12, 10, 2)
    cache = ArenaCache(model.config, 1, 10, on_full="fallback")
    with pytest.warns(UserWarning, match="the cache is full: 12 tokens"):
        cache.load(path)
    assert cache.stats.overflow_nbytes > 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(generate(model, PROMPT, cache, n_new=4), generate(model, PROMPT, n_new=4))


def test_a_file_outlives_the_cache_that_it_is_loaded_over(path):
    """Checkpoints and prefixes of what was held are gone."""
    model = families.model("llama")
    cache = ArenaCache(model.config, 1, 32)
    prefix = cache.prefix(model, PREFIX)
    start = cache.checkpoint()
    cache.save(path)
    cache.load(path)
    with pytest.raises(CheckpointError):
        cache.rollback(start)
    assert not prefix.is_live
    with cache.scope():
        generate(model, PROMPT, cache, n_new=3)
    assert cache.get_seq_length() == 12


def test_a_prefix_may_be_made_of_what_was_loaded(path):
    prefilled("llama").save(path)
    model = families.model("llama")
    cache = ArenaCache(model.config, 1, 32)
    cache.load(path)
    prefix = cache.prefix(model, [5, 6])
    assert len(prefix) == 14
    with prefix:
        prompt = prefix.inputs([7, 8])
        assert_same(generate(model, prompt, cache, n_new=3), generate(model, prompt, n_new=3))


# ------------------------------------------------------------------------------------------------------------- what is refused


def assert_untouched(cache, load, error, match):
    """A call that raises has changed nothing: neither a cache in use nor an empty one."""
    held = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    ids, mark = cache.transcript.ids.clone(), cache.checkpoint()
    with pytest.raises(error, match=match) as caught:
        load(cache)
    for layer, (keys, values) in zip(cache.layers, held, strict=True):
        assert torch.equal(layer.keys, keys)
        assert torch.equal(layer.values, values)
    assert torch.equal(cache.transcript.ids, ids)
    cache.rollback(mark)
    return caught.value


@pytest.mark.parametrize(
    ("name", "other", "match"),
    [
        ("llama", "qwen2", "another model: model_type is llama there, qwen2"),
        ("llama", "mistral", "another model"),
        ("gemma3", "llama", "another model"),
    ],
)
def test_a_file_of_another_model(name, other, match, path):
    prefilled(name).save(path)
    error = assert_untouched(prefilled(other), lambda cache: cache.load(path), StateError, match)
    assert error.field == "model_type"
    empty = ArenaCache(families.config(other), 1, 32)
    with pytest.raises(StateError, match=match):
        empty.load(path)
    assert empty.arenas == []


def test_a_model_of_other_sizes(path):
    prefilled("llama").save(path)
    for changes in ({"hidden_size": 128}, {"num_hidden_layers": 3}, {"num_key_value_heads": 4}):
        config = families.config("llama", **changes)
        with pytest.raises(StateError, match=f"another model: {next(iter(changes))} is"):
            ArenaCache(config, 1, 32).load(path)
    ArenaCache(families.config("llama", rms_norm_eps=0.1), 1, 32).load(path)  # which no file tells


def test_layers_of_other_kinds(path):
    prefilled("gemma3").save(path)
    config = families.config("gemma3", sliding_window=4)
    with pytest.raises(StateError, match="layer 0: window is 8 in the file, 4 in the cache"):
        ArenaCache(config, 1, 32).load(path)
    config = families.config("gemma3", layer_types=["full_attention"] * 3)
    with pytest.raises(StateError, match="layer 0: window is 8 in the file, None in the cache"):
        ArenaCache(config, 1, 32).load(path)
    unknown = ArenaCache(None, 1, 32)
    for index in range(3):
        unknown.update(states(1, 2, 3, 8), states(1, 2, 3, 8), index)
    assert_untouched(
        unknown, lambda cache: cache.load(path), StateError, "layer 0: key_dim is 16 in the file, 8"
    )
    more = ArenaCache(None, 1, 32)
    for index in range(5):
        more.update(states(1, 2, 3, 16), states(1, 2, 3, 16), index)
    assert_untouched(
        more, lambda cache: cache.load(path), StateError, "layers 0, 1, 2, the cache of 0, 1, 2, 3, 4"
    )


def test_too_many_rows_and_other_dtypes_and_devices(path):
    ids = families.prompt()["input_ids"]
    prefilled("llama", ids=ids).save(path)
    config = families.config("llama")
    assert_untouched(
        prefilled("llama"),
        lambda cache: cache.load(path),
        ShapeError,
        "2 rows are in the file, .* made for 1",
    )
    with pytest.raises(
        DTypeError, match=r"values are torch\.float32, the cache was made for torch\.bfloat16"
    ):
        ArenaCache(config, 2, 32, dtype="bfloat16").load(path)
    used = ArenaCache(config, 2, 32)
    for index in range(2):
        used.update(states(1, 2, 3, 16).half(), states(1, 2, 3, 16).half(), index)
    assert_untouched(
        used, lambda cache: cache.load(path), StateError, "dtype is float32 in the file, float16"
    )
    with pytest.raises(OutOfMemoryError):
        ArenaCache(config, 2, 32, arena=Arena(1000, backend="torch")).load(path)
    arena = Arena("1MiB", backend="torch")
    arena.device = "cuda:0"  # as if there were one
    with pytest.raises((DeviceMismatchError, AssertionError, RuntimeError)):
        ArenaCache(config, 2, 32, device="cpu", arena=arena).load(path)
    with pytest.raises(ArgumentTypeError):
        used.load(3.5)
    with pytest.raises(OSError, match="nowhere"):
        used.load(path.parent / "nowhere")


def test_damaged_files(path):
    cache = prefilled("llama")
    cache.save(path)
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:100], b"", b"no such thing", whole + b"x", os.urandom(2000)):
        path.write_bytes(damaged)
        assert_untouched(cache, lambda one: one.load(path), StateError, "safetensors file, or damaged")
    save_file({"layers.0.keys": torch.zeros(2)}, path)
    assert_untouched(cache, lambda one: one.load(path), StateError, "its metadata lack")


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("cache_layers", [[0, "kv"]], "2 layers"),
        ("cache_layers", [[1, "kv"], [0, "kv"]], "ascend"),
        ("cache_layers", [[0, "kv"], [2, "kv"]], "layers 0, 2, the cache of 0, 1"),
        ("cache_layers", [[0, "kv"], [1, "indexer"]], r"layers 0, 1 \(indexer\), the cache of 0, 1"),
        ("cache_layers", [[0, "kv"], [1, "other"]], "each of which is"),
        ("cache_layers", 5, "cache_layers is '5'"),
        ("transcript", {"ids": [[1] * 13], "mask": None}, "at most 12 tokens"),
        ("transcript", {"ids": [[1], [2]], "mask": None}, "1 rows are held"),
        ("transcript", {"ids": [[1], [2, 3]], "mask": None}, "rows of one length"),
        ("transcript", {"ids": [[-1]], "mask": None}, "at least 0"),
        ("transcript", {"ids": [["a"]], "mask": None}, "token ids are integers"),
        ("transcript", {"ids": [[1, 2]], "mask": ["1"]}, "a text of 2"),
        ("transcript", {"ids": [[1, 2]], "mask": ["12"]}, "a text of 2"),
        ("transcript", {"mask": None}, "transcript is"),
        ("transcript", None, "transcript"),
        ("model", 3, "model is '3'"),
        ("beside", {"tensors": [["states.0.conv.0", "float32", [1, 2, 3]]], "begun": {}}, "lacks 1 tensors"),
        ("beside", {"tensors": [["x", "float33", [1]]], "begun": {}}, "float33"),
        ("beside", {"tensors": [["x", "float32", [-1]]], "begun": {}}, "none of them negative"),
        ("beside", None, "beside is 'null'"),
        ("spec", [], "KVSpec"),
        ("held", [[[0, 12]], [[0, 11]]], "tensor"),
        ("rows", 2, "tensor"),
    ],
)
def test_metadata_that_cannot_be(field, value, match, path):
    cache = prefilled("llama")
    cache.save(path)
    with safetensors.safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    save_file(load_file(path), path, metadata=metadata | {field: json.dumps(value)})
    assert_untouched(cache, lambda one: one.load(path), StateError, match)


def test_states_that_have_no_place(path):
    cache = prefilled("llama")
    cache.save(path)
    with safetensors.safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    for name in ("states.0.conv.0", "states.9.conv.0", "states.x.conv.0", "positions.0", "other"):
        beside = {"tensors": [[name, "float32", [1, 2]]], "begun": {}}
        tensors = load_file(path) | {name: torch.zeros(1, 2)}
        other = path.parent / "other"
        save_file(tensors, other, metadata=metadata | {"beside": json.dumps(beside)})
        assert_untouched(
            cache, lambda one, other=other: one.load(other), StateError, "has no place in this cache"
        )


def test_what_cannot_be_saved(path):
    cache = ArenaCache(families.config("llama"), 1, 8)
    with pytest.raises(ArgumentError, match="holds no tokens"):
        cache.save(path)
    cache = prefilled("llama")
    cache.update(states(1, 2, 1, 16), states(1, 2, 1, 16), 0)
    with pytest.raises(CheckpointError, match=r"truncate\(12\)"):
        cache.save(path)
    cache.truncate(12)
    for wrong in ({"a": 1}, ["a"]):
        with pytest.raises(ArgumentTypeError):
            cache.save(path, metadata=wrong)
    with pytest.raises(ArgumentTypeError):
        cache.save(path, progress=3)
    with pytest.raises(OSError, match="nowhere"):
        cache.save(path.parent / "nowhere" / "file")
    assert os.listdir(path.parent) == []


def test_a_save_that_stops_leaves_the_old_file(path):
    cache = prefilled("llama")
    cache.save(path)
    before = path.read_bytes()

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.save(path, progress=stop)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]
    with pytest.raises(KeyboardInterrupt):
        cache.load(path, progress=stop)
    assert cache.get_seq_length() == len(cache.transcript) == 0  # what was half read is not shown
    cache.load(path)
    assert cache.get_seq_length() == 12


@pytest.mark.parametrize("name", ["lfm2", "bamba"])
def test_states_are_checked_before_anything_is_written(name, path, monkeypatch):
    prefilled(name).save(path)
    with safetensors.safe_open(path, framework="pt") as file:
        metadata, names = file.metadata(), list(file.keys())
    (state, *_) = [one for one in names if one.startswith("states.")]
    cache = prefilled(name)
    tensors = load_file(path)
    beside = json.loads(metadata["beside"])
    for entry in beside["tensors"]:
        if entry[0] == state:
            entry[2] = [1, 3]
    tensors[state] = torch.zeros(1, 3)
    save_file(tensors, path, metadata=metadata | {"beside": json.dumps(beside)})
    expected = generate(families.model(name), PROMPT, n_new=4)
    with pytest.raises(StateError, match=f"{state}.*has no place"):
        cache.load(path)
    assert_same(generate(families.model(name), PROMPT, cache, n_new=4), expected)
