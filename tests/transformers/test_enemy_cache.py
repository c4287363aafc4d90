"""Wrong arguments, interrupted steps and hostile files: a typed error in time, and never a wrong answer."""

from __future__ import annotations

import copy
import json

import families
import pytest
import torch
from gpuarena_transformers import ArenaCache, cache_argument
from gpuarena_transformers.from_config import size_of_config
from gpuarena_transformers.model_files import read_config
from gpuarena_transformers.tokens import as_tokens

from gpuarena import Arena
from gpuarena.errors import (
    ArgumentError,
    ArgumentTypeError,
    CheckpointError,
    DTypeError,
    OutOfMemoryError,
    ShapeError,
)

IDS = torch.randint(3, 128, (1, 12), generator=torch.Generator().manual_seed(5))


def forward(model, ids, cache=None):
    options = {} if cache is None else {cache_argument(model): cache}
    with torch.no_grad():
        return model(input_ids=ids, use_cache=cache is not None, **options).logits


def is_right(model, ids, logits):
    return (logits - forward(model, ids)[:, -logits.shape[1] :]).abs().max() < families.TOLERANCE


# -- arguments ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "torch.float32", torch.float32], ids=str)
def test_a_dtype_is_taken_in_every_spelling(dtype):
    model = families.model("llama")
    cache = ArenaCache(model.config, 1, 16, dtype=dtype)
    assert is_right(model, IDS, forward(model, IDS, cache))
    wrong = ArenaCache(model.config, 1, 16, dtype="torch.bfloat16")
    with pytest.raises(DTypeError, match=r"the cache was made for torch\.bfloat16"):
        forward(model, IDS, wrong)


def test_an_unknown_dtype_is_refused():
    with pytest.raises(DTypeError):
        ArenaCache(families.config("llama"), 1, 16, dtype="torch.nn")


def test_a_model_in_place_of_its_config_is_refused():
    with pytest.raises(ArgumentTypeError, match=r"model\.config"):
        ArenaCache(families.model("llama"), 1, 16)


def test_what_is_no_arena_is_refused():
    with pytest.raises(ArgumentTypeError, match="not int"):
        ArenaCache(families.config("llama"), 1, 16, arena=4096)


@pytest.mark.parametrize("fraction", ["0.5", None, True], ids=repr)
def test_a_share_of_the_memory_is_a_number(fraction):
    with pytest.raises(ArgumentTypeError, match="memory_fraction"):
        ArenaCache.for_model(families.model("llama"), "auto", fraction)


def test_more_rows_than_memory_are_refused_before_a_prompt_is_measured(monkeypatch):
    model = families.model("llama")
    monkeypatch.setattr(model, "generate", None)
    seen = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    try:
        with pytest.raises(ArgumentError, match="no memory free for even one token"):
            ArenaCache.for_model(model, "auto", max_batch_size=10**10)
        with pytest.raises(OutOfMemoryError, match="0 tokens fit"):
            ArenaCache.for_model(model, 8, max_batch_size=10**10, measure_prefill=True)
    finally:
        hook.remove()
    assert set(seen) <= {(1, 1)}  # what tells the layout


def test_a_mask_of_another_shape_is_refused():
    for mask in ([[1]], [1], [[1, 1], [1, 1]], [[1, 1, 1]]):
        with pytest.raises(ShapeError, match="attention_mask is"):
            as_tokens({"input_ids": [[5, 6]], "attention_mask": mask}, None, is_first=True)
    with pytest.raises(ArgumentTypeError, match="attention_mask"):
        as_tokens({"input_ids": [[5, 6]], "attention_mask": "11"}, None, is_first=True)


# -- steps that end between two layers ----------------------------------------------------------------------------------


def interrupt(model, layer, ids, cache):
    """Run a forward that ends before `layer`."""

    def stop(*_):
        raise KeyboardInterrupt

    hook = model.model.layers[layer].register_forward_pre_hook(stop)
    try:
        with pytest.raises(KeyboardInterrupt):
            forward(model, ids, cache)
    finally:
        hook.remove()


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "deepseek-v3.2", "falcon-h1"])
@pytest.mark.parametrize("back", ["rollback", "truncate", "reset"])
def test_the_way_back_from_an_interrupted_step(name, back):
    model = families.model(name)
    cache = ArenaCache(model.config, 1, 20)
    forward(model, IDS[:, :5], cache)
    checkpoint = cache.checkpoint()
    interrupt(model, 1, IDS[:, 5:6], cache)
    with pytest.raises(CheckpointError):  # no mark of half a step
        cache.checkpoint()
    done = 5
    if back == "rollback":
        cache.rollback(checkpoint)
    elif back == "reset":
        cache.reset()
        done = 0
    elif cache.has_states:
        with pytest.raises(ArgumentError, match="half-way"):
            cache.truncate(5)
        cache.rollback(checkpoint)
    else:
        cache.truncate(5)
    if done == 0:
        assert is_right(model, IDS[:, :5], forward(model, IDS[:, :5], cache))
    for position in range(5, 8):
        assert is_right(model, IDS[:, : position + 1], forward(model, IDS[:, position : position + 1], cache))


@pytest.mark.parametrize("name", ["deepseek-v3.2", "glm-moe-dsa"])
def test_an_arena_too_small_for_indexers_leaves_nothing_behind(name):
    model = families.model(name)
    whole = ArenaCache(model.config, 1, 20)
    forward(model, IDS, whole)
    needed = sum(arena.stats.top for arena in whole.arenas)
    for nbytes in range(256, needed, 256):
        cache = ArenaCache(model.config, 1, 20, arena=Arena(nbytes, backend="torch", device="cpu"))
        with pytest.raises(OutOfMemoryError):
            forward(model, IDS, cache)
        assert cache.get_seq_length() == 0
        assert cache.group.is_empty
        assert cache.group.rows is None


# -- models that keep states to themselves ------------------------------------------------------------------------------


def test_no_way_back_where_a_model_keeps_states_in_its_modules():
    model = families.model("recurrent-gemma")
    cache = ArenaCache(model.config, 1, 20)
    empty = cache.checkpoint()
    forward(model, IDS[:, :5], cache)
    with pytest.raises(CheckpointError, match="its own modules"):
        cache.checkpoint()
    with pytest.raises(CheckpointError, match="its own modules"), cache.scope():
        pass
    with pytest.raises(ArgumentError, match="its own modules"):
        cache.crop(-1)
    assert cache.get_seq_length() == 5
    cache.rollback(empty)
    assert cache.get_seq_length() == 0


# -- copies -------------------------------------------------------------------------------------------------------------


def test_a_copy_knows_the_tokens_that_it_holds():
    model = families.model("llama")
    cache = ArenaCache(model.config, 1, 20)
    cache.prefix(model, IDS[:, :5])
    other = copy.deepcopy(cache)
    cache.reset()
    assert torch.equal(other.transcript.ids, IDS[:, :5])
    assert other.transcript.model is model
    longer = other.prefix(model, IDS[:, 5:8])
    assert torch.equal(longer.ids, IDS[:, :8])
    assert is_right(model, IDS[:, :9], forward(model, IDS[:, 8:9], other))


# -- configs of others --------------------------------------------------------------------------------------------------


def test_a_deeply_nested_config_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ArgumentError, match="cannot read"):
        read_config(str(tmp_path))


def test_a_config_of_a_million_layers_is_refused_at_once(tmp_path):
    found = families.config("llama").to_dict() | {"num_hidden_layers": 10**6}
    (tmp_path / "config.json").write_text(json.dumps(found))
    config, _, _ = read_config(str(tmp_path))
    with pytest.raises(ArgumentError, match="num_hidden_layers is 1000000"):
        size_of_config(config, torch.bfloat16)


@pytest.mark.parametrize("name", ["attn_implementation", "_attn_implementation", "_experts_implementation"])
def test_a_config_chooses_no_code(tmp_path, name):
    found = families.config("llama").to_dict() | {name: "somebody/some-kernel"}
    (tmp_path / "config.json").write_text(json.dumps(found | {"some_config": {name: "somebody/some-kernel"}}))
    config, _, _ = read_config(str(tmp_path))
    assert "some-kernel" not in repr(config.to_dict())
    assert config._attn_implementation != "somebody/some-kernel"
    assert size_of_config(config, torch.bfloat16).layout.bytes_per_token > 0
    given = families.config("llama", attn_implementation="flash_attention_2")  # which is not installed
    assert size_of_config(given, torch.bfloat16).layout.bytes_per_token > 0


def test_a_name_that_is_too_long_for_a_file_is_refused():
    with pytest.raises(ArgumentError, match="cannot read"):
        read_config("x" * 5000)
