"""`generate` with an `ArenaCache`, by logits, against the same with transformers' own `DynamicCache`."""

from __future__ import annotations

import copy
import functools

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import families  # noqa: E402 - after the skips
from families import CACHE, FAMILIES, MODES, N_NEW, N_TOKENS, assert_same, generate  # noqa: E402
from gpuarena_transformers import ArenaCache  # noqa: E402
from transformers import DynamicCache  # noqa: E402

from gpuarena import CapacityError, CheckpointError, ShapeError  # noqa: E402

#: One of each kind: full attention, windows on all layers, windows on some, keys and values of different widths.
KINDS = ["llama", "mistral", "gemma3", "deepseek-v3"]


@pytest.mark.parametrize("attention", [None, "gpuarena"], ids=["default", "gpuarena"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_a_dynamic_cache(name, mode, attention):
    model = families.model(name, attention)
    cache = ArenaCache(model.config, MODES[mode].rows, N_TOKENS)
    outputs = generate(model, MODES[mode].arguments(name), cache)
    assert_same(outputs, families.reference(name, mode))
    assert getattr(outputs, CACHE) is cache
    assert len(cache.arenas) == 1


@pytest.mark.parametrize("mode", ["greedy", "beam", "left padding"])
@pytest.mark.parametrize("name", ["gemma4-shared", "lfm2", "bamba"])
def test_layers_that_hold_something_else(name, mode):
    model = families.model(name)
    cache = ArenaCache(model.config, MODES[mode].rows, N_TOKENS)
    assert_same(generate(model, MODES[mode].arguments(name), cache), families.reference(name, mode))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_cache_that_knows_no_config(name):
    """Without one it knows no windows either, and leaves them to the mask."""
    cache = ArenaCache(None, MODES["beam"].rows, N_TOKENS)
    outputs = generate(families.model(name), MODES["beam"].arguments(name), cache)
    assert_same(outputs, families.reference(name, "beam"))
    assert len(cache.layers) == families.model(name).config.num_hidden_layers


@pytest.mark.parametrize("mode", ["draft model", "prompt lookup"])
def test_assisted_decoding_does_go_back(mode):
    """Otherwise the comparison above would say nothing of `crop`."""
    removed = []

    class Watched(ArenaCache):
        def crop(self, tokens_to_remove):
            removed.append(-int(tokens_to_remove))
            super().crop(tokens_to_remove)

    model = families.model("mistral")
    cache = Watched(model.config, 1, N_TOKENS)
    generate(model, MODES[mode].arguments("mistral"), cache)
    proposed = 4 if mode == "draft model" else 3
    assert any(0 < count < proposed for count in removed) or {0, proposed} <= set(removed)
    assert cache.get_seq_length() < cache.stats.high_water_tokens + proposed


def test_beams_do_move():
    """Otherwise the comparisons above would say nothing of `reorder_cache`."""
    orders = []

    class Watched(ArenaCache):
        def reorder_cache(self, beam_idx):
            orders.append(beam_idx.tolist())
            super().reorder_cache(beam_idx)

    model = families.model("llama")
    generate(model, MODES["beam"].arguments("llama"), Watched(model.config, 6, N_TOKENS))
    assert any(order != sorted(order) for order in orders)


# ------------------------------------------------------------------------------------------------------ several turns


@pytest.mark.parametrize("form", ["all ids", "new ids and the whole mask"])
@pytest.mark.parametrize("name", KINDS)
def test_a_conversation_of_three_turns(name, form):
    model = families.model(name)
    first = families.prompt("padded")
    new_ids = [families.prompt()["input_ids"][:, 2 * turn : 2 * turn + 3] for turn in range(2)]

    def talk(cache):
        outputs = [generate(model, first, cache, n_new=5)]
        mask = first["attention_mask"]
        for new in new_ids:
            ids = torch.cat([outputs[-1].sequences, new], dim=1)
            mask = torch.cat([mask, torch.ones(2, ids.shape[1] - mask.shape[1], dtype=mask.dtype)], dim=1)
            if form != "all ids":  # from the last token that was generated, which no forward has seen
                ids = ids[:, cache.get_seq_length() :]
            outputs.append(generate(model, {"input_ids": ids, "attention_mask": mask}, cache, n_new=5))
            if form != "all ids":
                before = torch.cat([outputs[-2].sequences, new], dim=1)
                outputs[-1].sequences = torch.cat([before, outputs[-1].sequences[:, ids.shape[1] :]], dim=1)
        return outputs

    found, expected = talk(ArenaCache(model.config, 2, 64)), talk(DynamicCache(config=model.config))
    for outputs, wanted in zip(found, expected, strict=True):
        assert_same(outputs, wanted)


# ------------------------------------------------------------------------------------------- one prompt, several answers


def prefill(model, ids, cache):
    with torch.no_grad():
        model(input_ids=ids, **{CACHE: cache})
    return cache


def questions():
    """Return a prefix longer than the windows, and two prompts that start with it."""
    prefix = families.prompt("repeating")["input_ids"]
    ends = families.prompt()["input_ids"]
    prompts = [torch.cat([prefix, ends[:1, :4]], dim=1), torch.cat([prefix, ends[1:, :6]], dim=1)]
    return prefix, [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in prompts]


@functools.cache
def fresh_answer(name, number, num_beams=1):
    """Return what is generated without any cache to start from."""
    return generate(families.model(name), questions()[1][number] | {"num_beams": num_beams})


def ask_in_scopes(model, cache, prefix, prompts):
    for prompt in prompts:
        with cache.scope():
            yield generate(model, prompt, cache)


def ask_and_roll_back(model, cache, prefix, prompts):
    checkpoint = cache.checkpoint()
    for prompt in prompts:
        yield generate(model, prompt, cache)
        cache.rollback(checkpoint)


def ask_and_crop(model, cache, prefix, prompts):
    for prompt in prompts:
        yield generate(model, prompt, cache)
        cache.crop(prefix.shape[1] - cache.get_seq_length())


def ask_and_truncate(model, cache, prefix, prompts):
    for prompt in prompts:
        yield generate(model, prompt, cache)
        cache.truncate(prefix.shape[1])


def ask_copies(model, cache, prefix, prompts):
    for prompt in prompts:
        yield generate(model, prompt, copy.deepcopy(cache))


def ask_and_reset(model, cache, prefix, prompts):
    for prompt in prompts:
        cache.reset()
        yield generate(model, prompt, cache)


WAYS = [ask_in_scopes, ask_and_roll_back, ask_and_crop, ask_and_truncate, ask_copies, ask_and_reset]


@pytest.mark.parametrize("ask", WAYS)
@pytest.mark.parametrize("name", KINDS)
def test_a_prompt_is_read_once_and_answered_twice(name, ask):
    model = families.model(name)
    prefix, prompts = questions()
    cache = prefill(model, prefix, ArenaCache(model.config, 1, 64))
    arena = cache.arena
    answers = ask(
        model, cache, prefix, prompts * 2
    )  # each twice, so that the one before could leave something
    for prompt, outputs in zip(prompts * 2, answers, strict=True):
        assert_same(outputs, generate(model, prompt))
    assert cache.arenas == [arena]


@pytest.mark.parametrize("inside", [True, False], ids=["repeated inside", "repeated before"])
@pytest.mark.parametrize("name", KINDS)
def test_a_prompt_is_read_once_and_answered_twice_with_beams(name, inside):
    model = families.model(name)
    prefix, prompts = questions()
    cache = prefill(model, prefix, ArenaCache(model.config, 3, 64))
    if not inside:
        cache.batch_repeat_interleave(3)
    for number in (0, 1, 0):
        with cache.scope():
            if inside:
                cache.batch_repeat_interleave(3)
            outputs = generate(model, prompts[number] | {"num_beams": 3}, cache)
        assert_same(outputs, fresh_answer(name, number, 3))
        assert cache.get_seq_length() == prefix.shape[1]
        assert cache.batch_size == (1 if inside else 3)


def test_a_scope_around_beams_of_different_prompts_says_that_the_prefix_is_gone():
    model = families.model("llama")
    ids = families.prompt()["input_ids"]
    cache = prefill(model, ids, ArenaCache(model.config, 6, 64))
    with pytest.raises(CheckpointError, match="rows changed places"), cache.scope():
        cache.batch_repeat_interleave(3)


# -------------------------------------------------------------------------------------------------------- what is refused


def test_a_cache_that_is_too_small_stops_before_it_writes_and_is_used_again():
    model = families.model("gemma3")
    prompt = families.prompt("one")
    n_prompt = prompt["input_ids"].shape[1]
    cache = ArenaCache(model.config, 1, n_prompt + 4)
    start = cache.checkpoint()
    with pytest.raises(
        CapacityError, match=r"13 of 13 tokens used, 1 more asked.*roll back or truncate"
    ) as caught:
        generate(model, prompt, cache)
    assert "max_context_length" in str(caught.value)
    error = caught.value
    assert (error.used, error.requested, error.capacity, error.missing) == (13, 1, 13, 1)
    assert [layer.get_seq_length() for layer in cache.layers] == [13] * 3  # none has more than the others
    expected = generate(model, prompt, n_new=5)
    cache.rollback(start)
    assert_same(generate(model, prompt, cache, n_new=5), expected)
    with pytest.raises(CapacityError):
        generate(model, {"input_ids": expected.sequences}, cache)
    cache.truncate(n_prompt)
    assert_same(
        generate(model, {"input_ids": expected.sequences[:, : n_prompt + 1]}, cache, n_new=4),
        generate(model, {"input_ids": expected.sequences[:, : n_prompt + 1]}, n_new=4),
    )


def test_a_prompt_that_does_not_fit_at_all():
    model = families.model("llama")
    prompt = families.prompt("one")
    cache = ArenaCache(model.config, 1, 8)
    with pytest.raises(CapacityError, match="0 of 8 tokens used, 9 more asked, 1 too many"):
        generate(model, prompt, cache)
    assert cache.get_seq_length() == 0
    short = {key: value[:, :4] for key, value in prompt.items()}
    assert_same(generate(model, short, cache, n_new=5), generate(model, short, n_new=5))


def test_more_rows_than_were_asked_for_are_explained():
    model = families.model("llama")
    cache = ArenaCache(model.config, 2, N_TOKENS)
    with pytest.raises(
        ShapeError,
        match=r"6 rows given, the cache was made for at most 2 .*beams.*max_batch_size of at least 6",
    ):
        generate(model, MODES["beam"].arguments("llama"), cache)
    assert_same(generate(model, families.prompt(), cache), families.reference("llama", "greedy"))


def test_another_number_of_rows_is_explained_and_taken_after_a_reset():
    model = families.model("llama")
    cache = ArenaCache(model.config, 4, 64)
    generate(model, families.prompt(), cache)
    with pytest.raises(ShapeError, match=r"1 rows given, the cache holds 2; reset\(\)"), torch.no_grad():
        model(input_ids=families.prompt("one")["input_ids"], **{CACHE: cache})
    cache.reset()
    prompt = families.prompt("one")
    assert_same(generate(model, prompt, cache), generate(model, prompt))


def test_a_forward_that_trains_is_refused_with_the_remedy():
    model = families.model("llama")
    cache = ArenaCache(model.config, 1, 16)
    ids = families.prompt("one")["input_ids"]
    with pytest.raises(RuntimeError, match=r"torch\.no_grad"):
        model(input_ids=ids, **{CACHE: cache})
    for mode in (torch.no_grad, torch.inference_mode, torch.no_grad):
        with mode():
            model(input_ids=ids[:, :3], **{CACHE: cache})
    assert cache.get_seq_length() == 9


# ------------------------------------------------------------------------------------------------------- forward by hand


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_mask_of_four_dimensions(name):
    """A tree of candidates: two continuations of one prefix in a single forward."""
    model = families.model(name)
    ids = families.prompt("one")["input_ids"]
    n_prefix = 5
    tree = ids[:, n_prefix:]  # [1, 4]: two branches of two tokens
    visible = torch.zeros(4, n_prefix + 4, dtype=torch.bool)
    visible[:, :n_prefix] = True
    for query, keys in enumerate(([0], [0, 1], [2], [2, 3])):
        visible[query, [n_prefix + key for key in keys]] = True
    mask = torch.zeros(1, 1, 4, n_prefix + 4).masked_fill(~visible, torch.finfo(torch.float32).min)
    positions = torch.tensor([[n_prefix, n_prefix + 1] * 2])

    def branches(cache):
        prefill(model, ids[:, :n_prefix], cache)
        with torch.no_grad():
            return model(input_ids=tree, attention_mask=mask, position_ids=positions, **{CACHE: cache}).logits

    found = branches(ArenaCache(model.config, 1, 16))
    torch.testing.assert_close(
        found, branches(DynamicCache(config=model.config)), atol=families.TOLERANCE, rtol=0
    )
    with torch.no_grad():
        for branch in (0, 2):
            whole = model(
                input_ids=torch.cat([ids[:, :n_prefix], tree[:, branch : branch + 2]], dim=1)
            ).logits
            torch.testing.assert_close(
                found[:, branch : branch + 2], whole[:, n_prefix:], atol=families.TOLERANCE, rtol=0
            )


def test_another_object_for_each_call_is_not_needed():
    """One cache serves greedy search, beams and other prompts one after the other, in the same memory."""
    model = families.model("gemma3")
    cache = ArenaCache(model.config, 6, N_TOKENS)
    for mode in ("greedy", "beam", "draft model", "left padding, beam", "sample"):
        assert_same(
            generate(model, MODES[mode].arguments("gemma3"), cache), families.reference("gemma3", mode)
        )
        arenas = list(cache.arenas)
        cache.reset()
    assert cache.arenas == arenas
    assert cache.stats.high_water_tokens == 9 + N_NEW - 1
