"""What transformers tests of its own caches, asked of an `ArenaCache`.

Each test names the upstream test whose idea it takes: of ``tests/utils/test_cache_utils.py`` (classes SyntheticCacheTest,
CacheTest, CacheCroppingTests, CacheIntegrationTest) or of ``tests/generation/test_utils.py`` (GenerationTesterMixin). Numbers
and models are others: what an update has to return comes from a list, and what a model has to say from the model without a
cache, or with a `DynamicCache`. Upstream's tests themselves run by ``tests/peer``.
"""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import families  # noqa: E402 - after the skips
from families import CACHE, TOLERANCE, assert_same, generate  # noqa: E402
from gpuarena_transformers import ArenaCache  # noqa: E402
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig  # noqa: E402

from gpuarena import CapacityError  # noqa: E402
from gpuarena.errors import ArgumentError  # noqa: E402

# ------------------------------------------------------------------------------------------------ plain tensors and lists


def layers_of(*kinds, window=None, n_tokens=32, rows=1):
    """Return a cache whose layers are of these kinds; those with a window see `window` tokens."""
    config = LlamaConfig(num_hidden_layers=len(kinds), num_attention_heads=1, hidden_size=1)
    config.layer_types = list(kinds)
    config.sliding_window = config.attention_chunk_size = window
    return ArenaCache(config, rows, n_tokens)


def states(numbers):
    """[1, 1, n, 1]"""
    return torch.tensor(numbers, dtype=torch.float32)[None, None, :, None]


class History:
    """What one layer was given, as a list, and what a query may see of it."""

    def __init__(self, cache, layer, window=None):
        self.cache, self.layer, self.window, self.all = cache, layer, window, []

    def feed(self, *numbers):
        """Update the layer, and compare what it returns and announces with the list."""
        announced, offset = self.cache.get_mask_sizes(len(numbers), self.layer)
        seen = len(self.all)
        self.all += numbers
        keys, values = self.cache.update(states(numbers), -states(numbers), self.layer)
        first = 0 if self.window is None else max(0, seen - self.window + 1)
        assert keys.flatten().tolist() == self.all[first:]
        assert values.flatten().tolist() == [-number for number in self.all[first:]]
        assert (announced, offset) == (keys.shape[2], first)
        assert self.cache.get_seq_length(self.layer) == len(self.all)


@pytest.mark.parametrize(
    "steps",
    [[(4, 8), (9,)], [(4, 8, 9, 3), (7,), (5,)], [(4, 8, 9, 3, 7, 5, 6), (2,)]],
    ids=["within the window", "sliding", "prompt longer than the window"],
)
def test_sliding_window_cache(steps):
    """SyntheticCacheTest.test_sliding_window_cache: its three scenarios."""
    history = History(layers_of("sliding_attention", window=4), 0, window=4)
    for numbers in steps:
        history.feed(*numbers)


@pytest.mark.parametrize("with_config", [True, False])
def test_dynamic_cache(with_config):
    """SyntheticCacheTest.test_dynamic_cache: one layer, then two that get their tokens in turn."""
    kinds = ("full_attention",) * 2
    one = History(layers_of(kinds[0]) if with_config else ArenaCache(None, 1, 8), 0)
    for numbers in [(3, 1), (4,), (1, 5)]:
        one.feed(*numbers)
    cache = layers_of(*kinds) if with_config else ArenaCache(None, 1, 8)
    both = [History(cache, 0), History(cache, 1)]
    for step, numbers in enumerate([(3, 1), (4,), (1,)]):
        for layer, history in enumerate(both):
            history.feed(*(number + 10 * layer + step for number in numbers))
    for layer, history in enumerate(both):
        assert cache.layers[layer].keys.flatten().tolist() == history.all


@pytest.mark.parametrize("rows", [(0, 2), [0, 2], torch.tensor([0, 2]), torch.tensor([True, False, True])])
def test_dynamic_cache_batch_select_indices(rows):
    """SyntheticCacheTest.test_dynamic_cache_batch_select_indices, by all that names rows; and the cache goes on."""
    cache = ArenaCache(None, 3, 8)
    held = torch.randn(3, 2, 4, 5)
    cache.update(held, held + 1, 0)
    cache.batch_select_indices(rows)
    new = torch.randn(2, 2, 1, 5)
    keys, values = cache.update(new, new + 1, 0)
    torch.testing.assert_close(keys, torch.cat([held[[0, 2]], new], dim=2), rtol=0, atol=0)
    torch.testing.assert_close(values, keys + 1, rtol=0, atol=0)
    assert cache.batch_size == 2


def test_batch_repeat_interleave():
    """The copies of a row stand side by side, as those of the ids do that `generate` expands; two rows tell."""
    cache = ArenaCache(None, 6, 8)
    held, new = torch.randn(2, 2, 4, 5), torch.randn(6, 2, 1, 5)
    cache.update(held, held + 1, 0)
    cache.batch_repeat_interleave(3)
    keys, values = cache.update(new, new + 1, 0)
    torch.testing.assert_close(keys, torch.cat([held.repeat_interleave(3, 0), new], dim=2), rtol=0, atol=0)
    torch.testing.assert_close(values, keys + 1, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["sliding_attention", "chunked_attention"])
def test_hybrid_cache(kind):
    """SyntheticCacheTest.test_hybrid_cache and test_hybrid_chunked_cache: one layer sees all, the next a window of two.

    A prompt longer than the window, then one token, then several at once on a full window.
    """
    cache = layers_of("full_attention", kind, window=2)
    histories = [History(cache, 0), History(cache, 1, window=2)]
    for numbers in [(6, 2, 8), (3,), (1, 8), (5, 3, 0)]:
        for layer, history in enumerate(histories):
            history.feed(*(number + 10 * layer for number in numbers))
    assert cache.is_sliding == [False, True]


@pytest.mark.parametrize("first", [1, 2, 3], ids="first {}".format)
@pytest.mark.parametrize("second", [1, 2, 5], ids="then {}".format)
def test_hybrid_chunked_cache_extra_cases(first, second):
    """SyntheticCacheTest.test_hybrid_chunked_cache_extra_cases: several tokens that stay inside, reach or cross the window."""
    history = History(layers_of("chunked_attention", window=3), 0, window=3)
    history.feed(*range(first))
    history.feed(*range(10, 10 + second))
    history.feed(20)


def test_any_steps_on_any_layers():
    """The scenarios above, drawn: whatever the window and the steps, what is returned is what was announced."""
    draw = random.Random(5)
    for _ in range(60):
        window = draw.randint(2, 6)
        kinds = draw.choices(["full_attention", "sliding_attention", "chunked_attention"], k=3)
        cache = layers_of(*kinds, window=window)
        histories = [History(cache, n, None if kind[0] == "f" else window) for n, kind in enumerate(kinds)]
        for _ in range(draw.randint(1, 6)):
            numbers = [draw.randint(0, 99) for _ in range(draw.randint(1, 5))]
            for history in histories:
                history.feed(*numbers)


@pytest.mark.parametrize("removed", [0, 3, 17])
def test_crop_with_past(removed):
    """CacheCroppingTests.test_crop_with_past and test_crop_with_zero_still_shrink_states.

    With and without the announcement that the past will be wanted: a window is only a view here, and a crop always exact.
    """
    for announced in (True, False):
        cache = layers_of("full_attention", "sliding_attention", window=5)
        if announced:
            cache.activate_past_recording()
        histories = [History(cache, 0), History(cache, 1, window=5)]
        for history in histories:
            history.feed(*range(20))
        cache.crop(-removed)
        for history in histories:
            del history.all[20 - removed :]
            history.feed(50, 51)
            history.feed(52)


def test_crop_outside_range():
    """CacheCroppingTests.test_crop_outside_range and test_bc_crop_with_positive_value: refused here, with nothing changed."""
    cache = layers_of("full_attention", "sliding_attention", window=5)
    histories = [History(cache, 0), History(cache, 1, window=5)]
    for history in histories:
        history.feed(*range(9))
    for amount in (-10, 6):
        with pytest.raises(ArgumentError):
            cache.crop(amount)
    for history in histories:
        history.feed(50)


def test_cache_out_of_bounds():
    """SyntheticCacheTest.test_static_cache_out_of_bounds: a full cache raises before it writes, and is as it was."""
    cache = layers_of("full_attention", n_tokens=4)
    history = History(cache, 0)
    history.feed(1, 2, 3, 4)
    with pytest.raises(CapacityError):
        cache.update(states([5]), states([5]), 0)
    assert cache.layers[0].keys.flatten().tolist() == history.all == [1, 2, 3, 4]


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2), (8, 1)], ids=["MHA", "GQA", "MQA"])
def test_cache_mha_mqa_gqa(heads, kv_heads):
    """CacheTest.test_static_cache_mha_mqa_gqa: heads as the tensors have them, and the filled part alone is returned."""
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(**families.C | {"num_attention_heads": heads, "num_key_value_heads": kv_heads})
    ).eval()
    cache = ArenaCache(model.config, 2, 10)
    prompt = families.prompt()
    with torch.no_grad():
        logits = model(**prompt, **{CACHE: cache}).logits
        torch.testing.assert_close(logits, model(**prompt, use_cache=False).logits, rtol=0, atol=TOLERANCE)
    for layer in cache.layers:
        assert tuple(layer.keys.shape) == tuple(layer.values.shape) == (2, kv_heads, 9, 64 // heads)
    assert cache.stats.bytes_per_token == 2 * 2 * kv_heads * (64 // heads) * 4


def test_early_initialization_leaves_other_layers_alone():
    """CacheTest.test_early_initialization_does_not_corrupt_linear_attention_layers, and ..max_cache_len_ignores...

    Memory is taken early, but a layer without tokens is not "initialised": some models take that for a conversation.
    """
    cache = layers_of("full_attention", "linear_attention", n_tokens=8)
    assert cache.get_max_length() == 8
    cache.early_initialization(
        batch_size=1, num_heads=2, head_dim=8, dtype=torch.float32, device=torch.device("cpu")
    )
    attention, linear = cache.layers
    assert attention.supports_early_init
    assert cache.stats.reserved_nbytes == 8 * 2 * 2 * 8 * 4
    assert not attention.is_initialized
    assert not cache.is_initialized
    arena = cache.arena
    new = torch.randn(1, 2, 3, 8)
    keys, values = cache.update(new, -new, 0)
    assert torch.equal(keys, new)
    assert torch.equal(values, -new)
    assert cache.arenas == [arena]
    assert cache.is_initialized
    state = torch.randn(1, 8, 4)
    # From 5.17 on the kernel's length may be given; without it the state is taken as it is.
    assert torch.equal(linear.update_conv_state(state), state)


# ---------------------------------------------------------------------------------------------------------------- generate


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_cache_batched(name):
    """CacheIntegrationTest.test_cache_batched: prompts of different lengths in one batch answer as each by itself."""
    model = families.model(name)
    padded = families.prompt("padded")
    together = generate(model, padded, ArenaCache(model.config, 2, 24))
    for row in range(2):
        alone = {"input_ids": padded["input_ids"][row : row + 1, padded["attention_mask"][row] == 1]}
        expected = generate(model, alone | {"use_cache": False})
        for found, wanted in zip(together.logits, expected.logits, strict=True):
            torch.testing.assert_close(found[row : row + 1], wanted, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_cache_beam_search(name):
    """CacheIntegrationTest.test_cache_beam_search: an answer came from several beams, so rows had to move."""
    model = families.model(name)
    beams = families.prompt("one") | {"num_beams": 4, "num_return_sequences": 4}
    outputs = generate(model, beams, ArenaCache(model.config, 4, 24))
    assert any(len(set(of_answer.tolist())) > 1 for of_answer in outputs.beam_indices)
    assert_same(outputs, generate(model, beams | {"use_cache": False}))


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt2"])
def test_cache_extra_left_padding(name):
    """CacheIntegrationTest.test_cache_extra_left_padding: 23 tokens of padding change nothing, in a window either."""
    model = families.model(name)
    prompt = families.prompt("two")
    padded = {key: torch.nn.functional.pad(value, (23, 0)) for key, value in prompt.items()}
    expected = generate(model, prompt | {"use_cache": False})
    outputs = generate(model, padded, ArenaCache(model.config, 2, 48))
    for found, wanted in zip(outputs.logits, expected.logits, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_cache_gptj_model(dtype):
    """CacheHardIntegrationTest.test_cache_gptj_model: keys that stay in float32 beside values in half precision."""
    config = transformers.GPTJConfig(
        vocab_size=128, n_embd=64, n_layer=2, n_head=4, rotary_dim=8, n_positions=256, eos_token_id=None
    )
    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    cache = ArenaCache(model.config, 2, 24)
    outputs = generate(model, families.prompt(), cache)
    expected = generate(model, families.prompt(), DynamicCache(config=model.config))
    assert_same(outputs, expected)
    held = DynamicCache()
    with torch.no_grad():
        model(**families.prompt("one"), **{CACHE: held})
    assert cache.layers[0].keys.dtype == held.layers[0].keys.dtype
    assert cache.layers[0].values.dtype == held.layers[0].values.dtype == dtype


@pytest.mark.parametrize("name", [*families.FAMILIES, "gemma4"])
def test_past_key_values_format(name):
    """GenerationTesterMixin.test_past_key_values_format, _check_past_key_values_for_generate and _check_caches_are_equal."""
    model = families.model(name)
    outputs = generate(model, families.prompt(), ArenaCache(None, 2, 32), n_new=4)
    expected = generate(
        model, families.prompt(), DynamicCache(), n_new=4
    )  # without windows: all that was seen
    cache, wanted = outputs.past_key_values, expected.past_key_values
    assert cache is getattr(outputs, CACHE)
    assert len(cache) == len(cache.layers) == len(wanted)
    assert cache.get_seq_length() == 9 + 4 - 1
    for layer, other in zip(cache.layers, wanted.layers, strict=True):
        torch.testing.assert_close(layer.keys, other.keys, rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(layer.values, other.values, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("prompt", ["two", "padded"])
@pytest.mark.parametrize("name", families.FAMILIES)
def test_generate_continue_from_past_key_values(name, prompt):
    """GenerationTesterMixin.test_generate_continue_from_past_key_values: 3 tokens and then 3 more are 6 in one go."""
    model = families.model(name)
    inputs = families.prompt(prompt)
    whole = generate(model, inputs, n_new=6)
    cache = ArenaCache(model.config, 2, 16)
    first = generate(model, inputs, cache, n_new=3)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 3), value=1)
    second = generate(model, {"input_ids": first.sequences, "attention_mask": mask}, cache, n_new=3)
    second.logits = first.logits + second.logits
    assert_same(second, whole)
    assert cache.get_seq_length() == 9 + 6 - 1


@pytest.mark.parametrize("name", ["llama", "gemma2", "deepseek-v3", "gpt2"])
def test_generate_continue_from_inputs_embeds(name):
    """GenerationTesterMixin.test_generate_continue_from_inputs_embeds, and that tokens are as good as their embeddings."""
    model = families.model(name)
    embed = model.get_input_embeddings()
    prompt = families.prompt()
    whole = generate(model, prompt, n_new=6)
    cache = ArenaCache(model.config, 2, 16)
    given = {"inputs_embeds": embed(prompt["input_ids"]).detach(), "attention_mask": prompt["attention_mask"]}
    first = generate(model, given, cache, n_new=3)
    assert torch.equal(first.sequences, whole.sequences[:, 9:12])
    ids = torch.cat([prompt["input_ids"], first.sequences], dim=1)
    given = {"inputs_embeds": embed(ids).detach(), "attention_mask": torch.ones_like(ids)}
    second = generate(model, given, cache, n_new=3)
    second.logits = first.logits + second.logits
    second.sequences = torch.cat([ids, second.sequences], dim=1)
    assert_same(second, whole)


@pytest.mark.parametrize("attention", ["eager", "sdpa", "gpuarena"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek-v3"])
def test_left_padding_compatibility(name, attention):
    """GenerationTesterMixin.test_left_padding_compatibility, with a cache that is filled in two forwards."""
    model = families.model(name, attention)
    ids = families.prompt()["input_ids"]
    n_pad, n_first = 12, 17
    padded = torch.nn.functional.pad(ids, (n_pad, 0))
    mask = torch.nn.functional.pad(torch.ones_like(ids), (n_pad, 0))
    positions = (mask.cumsum(1) - 1).where(mask == 1, 1)
    cache = ArenaCache(model.config, 2, 24)
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        parts = [
            model(
                input_ids=padded[:, low:high],
                attention_mask=mask[:, :high],
                position_ids=positions[:, low:high],
                **{CACHE: cache},
            ).logits
            for low, high in [(0, n_first), (n_first, 21)]
        ]
    found = torch.cat(parts, dim=1)[:, n_pad:]
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma4-shared"])
def test_methods_with_logits_to_keep(name):
    """GenerationTesterMixin.test_generate_methods_with_logits_to_keep, and test_forward_with_logits_to_keep."""
    model = families.model(name)
    prompt = families.prompt()
    outputs = [
        generate(model, prompt | {"logits_to_keep": n_kept}, ArenaCache(model.config, 2, 24))
        for n_kept in (0, 1)
    ]
    assert_same(outputs[0], outputs[1])
    with torch.no_grad():
        whole = model(**prompt, use_cache=False).logits
        last = model(**prompt, logits_to_keep=2, **{CACHE: ArenaCache(model.config, 2, 24)}).logits
    torch.testing.assert_close(last, whole[:, -2:], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("attention", ["eager", "sdpa", "gpuarena"])
def test_custom_4d_attention_mask(attention):
    """GenerationTesterMixin.test_custom_4d_attention_mask: three endings of one prefix as one row.

    The prefix is in the cache. Each ending sees it and itself, and must answer as it does behind the prefix alone.
    """
    model = families.model("llama", attention)
    prefix, endings = families.prompt()["input_ids"][:1, :6], torch.tensor([[7, 9], [7, 30], [90, 8]])
    cache = ArenaCache(model.config, 1, 16)
    with torch.no_grad():
        model(input_ids=prefix, **{CACHE: cache})
        seen = torch.zeros(6, 12, dtype=torch.bool)
        seen[:, :6] = True
        for ending in range(3):
            seen[2 * ending : 2 * ending + 2, 6 + 2 * ending : 8 + 2 * ending] = (
                torch.ones(2, 2).tril().bool()
            )
        lowest = torch.finfo(torch.float32).min
        found = model(
            input_ids=endings.view(1, 6),
            attention_mask=torch.zeros(1, 1, 6, 12).masked_fill(~seen, lowest),
            position_ids=torch.tensor([[6, 7] * 3]),
            **{CACHE: cache},
        ).logits.view(3, 2, -1)
        whole = model(input_ids=torch.cat([prefix.expand(3, -1), endings], dim=1), use_cache=False).logits
    torch.testing.assert_close(found, whole[:, 6:], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("mode", [{}, {"num_beams": 3}], ids=["greedy", "beam"])
def test_generate_dict_outputs(mode):
    """GenerationTesterMixin.test_greedy_generate_dict_outputs and test_beam_search_generate_dict_outputs.

    Attention weights and hidden states of each step have the shapes that a cache of this length makes.
    """
    model = families.model("llama", "eager")
    asked = families.prompt() | mode | {"output_attentions": True, "output_hidden_states": True}
    n_rows = 2 * mode.get("num_beams", 1)
    outputs = generate(model, asked, ArenaCache(model.config, n_rows, 24), n_new=4)
    expected = generate(model, asked, n_new=4)
    assert_same(outputs, expected)
    for step, (layers, wanted) in enumerate(zip(outputs.attentions, expected.attentions, strict=True)):
        n_queries = 9 if step == 0 else 1
        assert layers[0].shape == (n_rows, 4, n_queries, 9 + step)
        torch.testing.assert_close(layers[-1], wanted[-1], rtol=0, atol=TOLERANCE)
    for found, wanted in zip(outputs.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(found[-1], wanted[-1], rtol=0, atol=0.01)  # not yet scaled to logits


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_generate_without_input_ids(name):
    """GenerationTesterMixin.test_generate_without_input_ids: from the first token on, without a prompt."""
    model = families.model(name)
    cache = ArenaCache(model.config, 1, 16)
    assert_same(generate(model, {}, cache), generate(model, {"use_cache": False}))
    assert cache.get_seq_length() == families.N_NEW


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss"])
def test_eager_matches_sdpa_generate(name):
    """GenerationTesterMixin.test_eager_matches_sdpa_generate, with the fold of this library as a third."""
    outputs = [
        generate(
            families.model(name, attention),
            families.prompt("padded"),
            ArenaCache(families.config(name), 2, 24),
        )
        for attention in ("eager", "gpuarena", *(() if name == "gpt-oss" else ("sdpa",)))
    ]
    for other in outputs[1:]:
        assert_same(other, outputs[0])


@pytest.mark.parametrize("name", ["lfm2", "bamba"])
def test_padding_in_a_continued_forward_of_recurrent_layers(name):
    """GenerationTesterMixin.test_recurrent_layers_mask_padding_on_continued_forward, against transformers' own cache."""
    model = families.model(name)
    ids = families.prompt()["input_ids"]
    mask = torch.ones_like(ids)
    mask[1, 5:7] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)

    def continued(cache):
        with torch.no_grad():
            for low, high in [(0, 5), (5, 9)]:
                logits = model(
                    input_ids=ids[:, low:high],
                    attention_mask=mask[:, :high],
                    position_ids=positions[:, low:high],
                    **{CACHE: cache},
                ).logits
        return logits

    found = continued(ArenaCache(model.config, 2, 16))
    torch.testing.assert_close(found, continued(DynamicCache(config=model.config)), rtol=0, atol=TOLERANCE)
