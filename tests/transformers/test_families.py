"""Each family of models in each way of generating that it allows, by logits, against transformers' own cache.

The families of `families.FAMILIES` are in test_generate.py. Those that cache like Llama, and differ in what they compute,
go through the ways that ask most of a cache; the others through all.
"""

from __future__ import annotations

import copy
import functools
import warnings

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import families  # noqa: E402 - after the skips
from families import CACHE, FAMILIES, MODES, N_TOKENS, TEXT, Mode, assert_same, generate  # noqa: E402
from gpuarena_transformers import ArenaCache  # noqa: E402
from transformers import DynamicCache  # noqa: E402

#: Keys and values of all tokens, in equal layers: what the cache sees of these differs in nothing but sizes.
LIKE_LLAMA = [
    "qwen3",
    "phi",
    "phi3",
    "gemma",
    "glm4",
    "stablelm",
    "cohere",
    "granite",
    "olmo2",
    "nemotron",
    "smollm3",
    "ernie4.5",
    "hunyuan",
    "seed-oss",
    "apertus",
    "arcee",
    "helium",
    "bitnet",
    "persimmon",
    "nanochat",
    "doge",
    "codegen",
    "neox",
    "opt",
    "biogpt",
    "xglm",
    "ctrl",
    "qwen2-moe",
    "qwen3-moe",
    "olmoe",
    "phimoe",
    "granite-moe",
    "jetmoe",
    "minimax-m2",
    "glm4-moe",
    "dots1",
    "gpt-bigcode",
    "falcon-alibi",
    "starcoder2",
    "vaultgemma",
    "olmo3",
    "exaone4",
    "ministral",
    "lfm2-moe",
    "falcon-mamba",
    "jamba",
    "qwen3.5",
    "granite-hybrid",
    "zamba",
    "glm-moe-dsa",
]
#: What holds nothing but states, and so counts no tokens.
STATES_ALONE = ["mamba", "falcon-mamba", "mamba2"]
#: What cannot be rolled back, in transformers' own cache at least: assisted decoding refuses it.
STATEFUL = [
    *STATES_ALONE,
    "bamba",
    "jamba",
    "granite-hybrid",
    "qwen3-next",
    "qwen3.5",
    "nemotron-h",
    "recurrent-gemma",
    "zamba",
    "zamba2",
    "falcon-h1",
    "deepseek-v4",
]
#: What holds something beside keys and values that can be cut with them.
BESIDE_TOKENS = ["lfm2", "lfm2-moe", "deepseek-v3.2", "glm-moe-dsa"]
#: Families whose `generate` takes no embeddings, or not without ids, and the error.
WITHOUT_EMBEDDINGS = {
    "ctrl": ValueError,
    "bamba": ValueError,
    "jamba": ValueError,
    "granite-hybrid": ValueError,
    "nemotron-h": ValueError,
    "zamba": ValueError,
    "zamba2": ValueError,
    "falcon-h1": ValueError,
    "gemma4": RuntimeError,
    "gemma4-shared": RuntimeError,
    "deepseek-v4": AttributeError,
}

#: Several ways in one, for those that are like Llama.
COMBINED = {
    "left padding, beam-sample": Mode("padded", {"num_beams": 2, "do_sample": True}, rows=4),
    "left padding, guidance, prefill in chunks": Mode(
        "padded", {"guidance_scale": 1.5, "prefill_chunk_size": 4}
    ),
    "draft model, sample": MODES["draft model, sample"],
    "prompt lookup": MODES["prompt lookup"],
}
WAYS = MODES | COMBINED
#: Every way, without those that are the same to a cache.
ALL = [
    "greedy",
    "sample, two sequences each",
    "beam, two sequences each",
    "beam-sample",
    "draft model",
    "draft model, sample",
    "prompt lookup",
    "prefill in chunks",
    "left padding",
    "left padding, beam",
    "left padding, prefill in chunks",
    "embeddings",
    "guidance",
]
#: A step of these takes ten times as long.
SLOW = {"deepseek-v4": ["greedy", "draft model", "left padding, beam", "embeddings"]}
#: Returns no cache, keeps states in its own modules, and says no to the other ways or not by version of transformers.
LIMITED = {
    "recurrent-gemma": ["greedy", "sample, two sequences each", "beam-sample", "draft model", "left padding"]
}


def ways(name):
    return (SLOW | LIMITED).get(name, list(COMBINED) if name in LIKE_LLAMA else ALL)


PRODUCT = [(name, way) for name in TEXT if name not in FAMILIES for way in ways(name)]


def refusal(name, way):
    """Return the error that transformers raises for a family in a way, with its own cache too; None if there is none."""
    options = WAYS[way].options
    assisted = "assistant_model" in options or "prompt_lookup_num_tokens" in options
    if assisted and name in STATEFUL:
        return ValueError
    if "prefill_chunk_size" in options and name in STATES_ALONE:
        return ValueError
    return WITHOUT_EMBEDDINGS.get(name) if way == "embeddings" else None


@functools.cache
def reference(name, way, attention=None):
    """Return what a family generates with transformers' own cache, or the text of the error."""
    model = families.model(name, attention)
    error = refusal(name, way)
    if error is None:
        return generate(model, WAYS[way].arguments(name))
    with pytest.raises(error) as caught:
        generate(model, WAYS[way].arguments(name))
    return str(caught.value)


def assert_in_arenas(cache, name):
    """Everything lies in one arena, but where the config does not tell the sizes: `for_model` measures them."""
    if name == "deepseek-v4":  # whose layers are transformers' own
        return
    if name in STATEFUL or name in BESIDE_TOKENS:
        assert 1 <= len(cache.arenas) <= 4  # one for each kind of what is held
    else:
        assert len(cache.arenas) == (
            2 if name == "gemma4" else 1
        )  # of which the first layer is not the largest
    for layer in cache.layers:
        for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None)):
            if tensor is not None:
                starts = [tensor.data_ptr() - arena.address for arena in cache.arenas]
                sizes = [arena.capacity for arena in cache.arenas]
                assert any(0 <= start < size for start, size in zip(starts, sizes, strict=True))


@pytest.mark.filterwarnings("ignore:layer . needs:UserWarning")  # gemma4, see above
@pytest.mark.parametrize(("name", "way"), PRODUCT)
def test_logits_are_those_of_a_dynamic_cache(name, way):
    model = families.model(name)
    cache = ArenaCache(model.config, WAYS[way].rows, N_TOKENS)
    expected = reference(name, way)
    if isinstance(expected, str):
        with pytest.raises(refusal(name, way)) as caught:
            generate(model, WAYS[way].arguments(name), cache)
        assert str(caught.value).split(",")[0] == expected.split(",")[0]
        return
    outputs = generate(model, WAYS[way].arguments(name), cache)
    assert_same(outputs, expected)
    assert getattr(outputs, CACHE) is cache
    assert_in_arenas(cache, name)


#: The layers of those in SLOW are transformers' own, and nothing of them lies in an arena.
MEASURED = [
    name for name in TEXT if name not in SLOW and (name not in LIKE_LLAMA or name in ("opt", "jamba"))
]


@pytest.mark.parametrize("name", MEASURED)
def test_a_cache_that_was_measured(name):
    model = families.model(name)
    cache = ArenaCache.for_model(model, N_TOKENS, max_batch_size=6)
    way = "left padding, beam"
    for _ in range(2):
        assert_same(generate(model, WAYS[way].arguments(name), cache), reference(name, way))
        assert len(cache.arenas) == 1
        cache.reset()


#: Those whose attention is looked up by name, one of each kind.
BY_NAME = [
    "gemma",
    "qwen2-sliding",
    "llama4",
    "cohere2",
    "deepseek-v2",
    "gemma4-shared",
    "gptj",
    "lfm2",
    "bamba",
]


@pytest.mark.parametrize("attention", ["eager", "sdpa", "gpuarena"])
@pytest.mark.parametrize("name", BY_NAME)
def test_attention_implementations(name, attention):
    way = "left padding, beam"
    expected = reference(name, way, attention)
    cache = ArenaCache(families.model(name).config, WAYS[way].rows, N_TOKENS)
    outputs = generate(families.model(name, attention), WAYS[way].arguments(name), cache)
    assert_same(outputs, expected)


# --------------------------------------------------------------------------------------------------------- several turns

TURNS = [name for name in TEXT if name not in LIKE_LLAMA and name not in FAMILIES and name not in SLOW]


@pytest.mark.filterwarnings("ignore:layer . needs:UserWarning")
@pytest.mark.parametrize("form", ["all ids", "new ids and the whole mask"])
@pytest.mark.parametrize("name", [*TURNS, "starcoder2", "jamba", "qwen3.5", "zamba"])
def test_a_conversation(name, form):
    model = families.model(name)
    first = families.prompt()
    new_ids = families.prompt()["input_ids"][:, 2:5]

    def talk(cache):
        outputs = [generate(model, first, cache, n_new=4)]
        ids = torch.cat([outputs[0].sequences, new_ids], dim=1)
        mask = torch.ones_like(ids)
        if form != "all ids":  # from the last token that was generated, which no forward has seen
            ids = ids[:, -4:]
        outputs.append(generate(model, {"input_ids": ids, "attention_mask": mask}, cache, n_new=4))
        return outputs

    expected = talk(DynamicCache(config=model.config))
    for outputs, wanted in zip(talk(ArenaCache(model.config, 2, 32)), expected, strict=True):
        assert_same(outputs, wanted)


# --------------------------------------------------------------------------------------------------------- a mask by hand

#: Those that take a mask of four dimensions as it is, one for each layer type.
TAKE_4D = [
    "qwen3",
    "gemma",
    "phi3",
    "deepseek-v2",
    "mixtral",
    "gptj",
    "neox",
    "diffllama",
    "falcon-gqa",
]


@pytest.mark.parametrize("name", TAKE_4D)
def test_a_mask_of_four_dimensions(name):
    """A tree of candidates: two continuations of one prefix in a single forward, against each by itself."""
    model = families.model(name)
    ids, n_prefix = families.prompt("one")["input_ids"], 5
    visible = torch.zeros(4, n_prefix + 4, dtype=torch.bool)
    visible[:, :n_prefix] = True
    for query, keys in enumerate(([0], [0, 1], [2], [2, 3])):
        visible[query, [n_prefix + key for key in keys]] = True
    mask = torch.zeros(1, 1, 4, n_prefix + 4).masked_fill(~visible, torch.finfo(torch.float32).min)
    cache = ArenaCache(model.config, 1, 16)
    with torch.no_grad():
        model(input_ids=ids[:, :n_prefix], **{CACHE: cache})
        found = model(
            input_ids=ids[:, n_prefix:],
            attention_mask=mask,
            position_ids=torch.tensor([[n_prefix, n_prefix + 1] * 2]),
            **{CACHE: cache},
        ).logits
        for branch in (0, 2):
            start = n_prefix + branch
            whole = model(
                input_ids=torch.cat([ids[:, :n_prefix], ids[:, start : start + 2]], dim=1), use_cache=False
            ).logits
            torch.testing.assert_close(
                found[:, branch : branch + 2], whole[:, n_prefix:], atol=families.TOLERANCE, rtol=0
            )


# ------------------------------------------------------------------------------------------ one prompt, several answers

#: One of each kind of layer that holds tokens alone.
CUT = ["qwen2-sliding", "llama4", "cohere2", "gemma3n", "gemma4", "gemma4-shared", "deepseek-v2", "longcat", "falcon-gqa",
       "gptj", "bloom", "mpt", "modernbert"]  # fmt: skip


@pytest.mark.parametrize("name", CUT)
def test_a_prompt_is_read_once_and_answered_twice(name):
    model = families.model(name)
    prefix = families.prompt("repeating")["input_ids"]
    ends = families.prompt()["input_ids"]
    cache = ArenaCache.for_model(model, 32, max_batch_size=2)
    with torch.no_grad():
        model(input_ids=prefix, **{CACHE: cache})
    for end in (ends[:1, :4], ends[1:, :6], ends[:1, :4]):
        ids = torch.cat([prefix, end], dim=1)
        prompt = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        with cache.scope():
            outputs = generate(model, prompt, cache, n_new=3)
        assert_same(outputs, generate(model, prompt, n_new=3))
        with cache.scope():
            cache.batch_repeat_interleave(2)
            outputs = generate(model, prompt | {"num_beams": 2}, cache, n_new=3)
        assert_same(outputs, generate(model, prompt | {"num_beams": 2}, n_new=3))
        assert cache.get_seq_length() == prefix.shape[1]
    assert len(cache.arenas) == 1


@pytest.mark.parametrize("name", ["gemma3n", "llama4", "deepseek-v2", "falcon-mqa", "bloom"])
def test_a_deep_copy_goes_on_by_itself(name):
    model = families.model(name)
    ids = families.prompt()["input_ids"]
    cache = ArenaCache.for_model(model, 16, max_batch_size=2)
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits[:, 5:]
        model(input_ids=ids[:, :5], **{CACHE: cache})
        other = copy.deepcopy(cache)
        model(input_ids=ids[:, :3], **{CACHE: cache})  # of which the copy knows nothing
        found = model(input_ids=ids[:, 5:], **{CACHE: other}).logits
    torch.testing.assert_close(found, expected, atol=families.TOLERANCE, rtol=0)


# ------------------------------------------------------------------------------------------------- that the tests do see


@pytest.mark.parametrize("name", [name for name in TEXT if name not in STATES_ALONE and name not in SLOW])
def test_one_wrong_number_in_the_cache_is_seen(name):
    """Otherwise equal logits would say nothing of the cache of this family."""
    model = families.model(name)
    ids = families.prompt("one")["input_ids"]
    cache = ArenaCache(model.config, 1, 16)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a second arena
        expected = model(input_ids=ids, use_cache=False).logits[:, -1]
        model(input_ids=ids[:, :-1], **{CACHE: cache})
        # The last, as the first of Llama 4 attends in chunks, of which this token begins the second.
        layer = next(layer for layer in reversed(cache.layers) if getattr(layer, "keys", None) is not None)
        layer.values[:, :, -1] *= -1
        found = model(input_ids=ids[:, -1:], **{CACHE: cache}).logits[:, -1]
    assert (found - expected).abs().max() > 3 * families.TOLERANCE
