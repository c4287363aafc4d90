"""`ArenaStaticCache` with models that keep more than keys and values: recurrent states, convolutions, index keys."""

from __future__ import annotations

import functools

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import families  # noqa: E402 - after the skips
from families import CACHE, MODES, N_TOKENS, assert_same, generate, reference  # noqa: E402
from gpuarena_transformers import ArenaStaticCache, generate_from  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from transformers import AutoModelForCausalLM, DynamicCache  # noqa: E402

from gpuarena.errors import ArgumentError, CheckpointError, ShapeError  # noqa: E402

STATES = ["qwen3-next", "lfm2", "falcon-h1", "granite-hybrid"]
INDEXED = ["deepseek-v3.2", "glm-moe-dsa"]


def addresses(cache):
    """Return where states and index keys lie, with keys, values and lengths."""
    found = []
    for layer in cache.layers:
        for name in ("keys", "values", "indexer_keys", "conv_states", "recurrent_states"):
            held = getattr(layer, name, None)
            for tensor in held.values() if isinstance(held, dict) else [held]:
                found.append(None if tensor is None else tensor.data_ptr())
    return found


@functools.cache
def indexed(name):
    """Return a model of sparse attention whose index scores are never equal.

    With the 2 heads of the other tests some tokens score exactly 0 in all of them, and which of those `topk` takes
    depends on how many slots there are: transformers' own caches then differ among themselves.
    """
    torch.manual_seed(4)
    return AutoModelForCausalLM.from_config(families.config(name, index_n_heads=16)).eval()


@pytest.mark.parametrize("name", STATES)
def test_one_cache_for_other_rows_and_ways_of_generating(name):
    model = families.model(name)
    cache = ArenaStaticCache(model.config, 6, N_TOKENS)
    held = {}
    for mode in ["greedy", "left padding, beam", "greedy", "prefill in chunks", "beam"]:
        outputs = generate(model, MODES[mode].arguments(name), cache)
        assert_same(outputs, reference(name, mode))
        rows = MODES[mode].rows
        assert held.setdefault(rows, addresses(cache)) == addresses(cache)
        cache.reset()
    assert held[2] == held[6]  # fewer rows are the first of the same memory


@pytest.mark.parametrize("name", INDEXED)
def test_index_keys(name):
    model = indexed(name)
    cache = ArenaStaticCache(model.config, 6, N_TOKENS)
    for mode in ["greedy", "left padding, beam", "greedy", "prompt lookup"]:
        arguments = MODES[mode].arguments(name)
        assert_same(generate(model, arguments, cache), generate(model, arguments))
        cache.reset()


@pytest.mark.parametrize("name", INDEXED)
def test_index_keys_go_back_with_the_tokens(name):
    model, ids = indexed(name), torch.randint(3, 128, (1, 24), generator=torch.Generator().manual_seed(8))
    cache = ArenaStaticCache(model.config, 1, 32)
    own = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids[:, :18], **{CACHE: cache})
        mark = cache.checkpoint()
        model(input_ids=ids[:, :5], **{CACHE: cache})
        cache.rollback(mark)
        found = model(input_ids=ids[:, 18:], **{CACHE: cache}).logits
        wanted = model(input_ids=ids, **{CACHE: own}).logits[:, 18:]
    assert (found - wanted).abs().max() < families.TOLERANCE


def test_states_cannot_be_cut():
    model = families.model("qwen3-next")
    cache = ArenaStaticCache(model.config, 2, 24)
    with torch.no_grad():
        model(**families.prompt(), **{CACHE: cache})
    for refused in (lambda: cache.truncate(4), lambda: cache.crop(-1)):
        with pytest.raises(ArgumentError, match="cannot go back"):
            refused()
    with pytest.raises(CheckpointError, match="cannot be rolled back"):
        cache.checkpoint()
    cache.crop(0)
    assert cache.stats.n_tokens == 9


@pytest.mark.parametrize("name", ["qwen3-next", "falcon-h1"])
def test_more_rows_than_there_is_memory_for(name):
    model = families.model(name)
    cache = ArenaStaticCache(model.config, 1, 24)
    with torch.no_grad(), pytest.raises(ShapeError, match="max_batch_size"):
        model(**families.prompt(), **{CACHE: cache})


@pytest.mark.parametrize("name", ["qwen3-next", "lfm2"])
def test_states_in_one_graph_of_the_step(name):
    """The steps after a `reset` run the graphs that are there."""
    torch._dynamo.reset()
    model, ids = families.model(name), families.prompt()["input_ids"]
    cache = ArenaStaticCache(model.config, 2, 24)
    counter = CompileCounterWithBackend("eager")
    step = torch.compile(model.forward, backend=counter, fullgraph=True)
    with torch.no_grad():
        wanted = model(input_ids=ids, use_cache=False).logits[:, 5:]
        for _ in range(2):
            model(input_ids=ids[:, :5], **{CACHE: cache})
            cache.check_room(4)
            found = [step(input_ids=ids[:, at : at + 1], **{CACHE: cache}).logits for at in range(5, 9)]
            assert (torch.cat(found, 1) - wanted).abs().max() < families.TOLERANCE
            cache.reset()
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_a_static_cache_of_states_in_generate_from():
    """Nothing of a state is cut: a chat that grows goes on, another starts over."""
    model = families.model("qwen3-next")
    cache = ArenaStaticCache(model.config, 2, 48)
    ids = families.prompt()["input_ids"]
    ids = generate_from(model, cache, ids, max_new_tokens=4, do_sample=False)
    longer = torch.cat([ids, ids[:, :3]], dim=1)
    for prompt in (longer, longer[:1], longer[:, :6]):
        expected = model.generate(
            prompt, max_new_tokens=4, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        outputs = generate_from(
            model,
            cache,
            prompt,
            max_new_tokens=4,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        assert_same(outputs, expected)
