"""`enable` and `disable`: every `generate` of a model through one arena, with the answers of a model without."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import pickle
import threading
import weakref

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import families  # noqa: E402 - after the skips
from families import CACHE, MODES, assert_same, generate  # noqa: E402
from gpuarena_transformers import ArenaCache, ArenaSwitch, CacheOverflowWarning, disable, enable  # noqa: E402
from transformers import AutoModelForCausalLM, DynamicCache, StoppingCriteria  # noqa: E402

from gpuarena.errors import ArgumentError, CapacityError, OutOfMemoryError  # noqa: E402


def fresh(name="llama", seed=0, **options):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(families.config(name), **options).eval()


def ids_of(n_rows=1, n_tokens=9, seed=3):
    return torch.randint(3, 128, (n_rows, n_tokens), generator=torch.Generator().manual_seed(seed))


@contextlib.contextmanager
def caches_of(model):
    """Yield the caches that forwards get."""
    found = []
    handle = model.register_forward_pre_hook(
        lambda module, args, kwargs: found.append(kwargs.get(CACHE)), with_kwargs=True
    )
    try:
        yield found
    finally:
        handle.remove()


@pytest.fixture
def model():
    made = fresh()
    yield made
    disable(made)


# ------------------------------------------------------------------------------------------------------- what is computed


@pytest.mark.parametrize(("name", "attention"), [("llama", True), ("gemma3", True), ("llama", False)])
def test_all_ways_of_generating_one_after_the_other(name, attention):
    model = families.model(name)
    with enable(model, max_context_length=40, attention=attention) as switch:
        for mode, how in MODES.items():
            assert_same(generate(model, how.arguments(name)), families.reference(name, mode))
            with caches_of(model) as found:
                generate(model, how.arguments(name), n_new=1)
            assert found[0] is switch.cache
        assert switch.cache.max_batch_size == 6
    assert "generate" not in vars(model)


def test_a_chat_goes_on_where_it_stopped(model):
    plain = fresh()
    ids = ids_of()
    enable(model, max_context_length=64)
    counts = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: counts.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    for turn in range(3):
        counts.clear()
        mask = torch.ones_like(ids)
        outputs = generate(model, {"input_ids": ids, "attention_mask": mask}, n_new=4)
        assert_same(outputs, generate(plain, {"input_ids": ids, "attention_mask": mask}, n_new=4))
        assert counts[0] == (9 if turn == 0 else 4)
        ids = torch.cat([outputs.sequences, ids_of(1, 3, turn)], dim=1)


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{number}": number for number in range(128)}
    made = Tokenizer(models.WordLevel(words, unk_token="w3"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="w0", bos_token="w1", unk_token="w3", padding_side="left"
    )


@pytest.mark.filterwarnings("ignore")  # of the pipeline about itself
def test_a_pipeline(model):
    texts = ["w5 w6 w7 w8", "w5 w6 w7 w9 w10", "w5 w6"]
    pipes = [
        transformers.pipeline("text-generation", model=one, tokenizer=tokenizer(), device="cpu") for one in (model, fresh())
    ]  # fmt: skip
    enable(model, max_context_length=64, max_batch_size=3)
    with caches_of(model) as found:
        for options in ({}, {"num_beams": 2}, {"batch_size": 3}):
            mine, theirs = (pipe(texts, max_new_tokens=5, do_sample=False, **options) for pipe in pipes)
            assert mine == theirs
    assert all(isinstance(cache, ArenaCache) for cache in found)


# ----------------------------------------------------------------------------------------------------- calls that go through


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "options",
    [
        {CACHE: "own"},
        {"past_key_values": "own"},
        {"use_cache": False},
        {"cache_implementation": "static"},
        {
            "generation_config": transformers.GenerationConfig(
                use_cache=False, max_new_tokens=3, pad_token_id=0
            )
        },
    ],
    ids=["own", "own, by its older name", "none", "static", "none, by a config"],
)
def test_calls_with_a_cache_or_none_go_through(model, options):
    switch = enable(model, max_context_length=40)
    options = {name: DynamicCache() if value == "own" else value for name, value in options.items()}
    if "generation_config" not in options:
        options["max_new_tokens"] = 3
    with caches_of(model) as found:
        outputs = model.generate(ids_of(), **options)
    assert torch.equal(outputs, fresh().generate(ids_of(), max_new_tokens=3))
    assert switch.cache not in found
    assert switch.cache.get_seq_length() == 0


def test_code_that_generates_in_its_own_way_gets_the_model_itself(model, monkeypatch):
    enable(model, max_context_length=40)
    seen = []

    def load(self, *args, **kwargs):
        return lambda **arguments: seen.append(arguments["model"])

    monkeypatch.setattr(type(model), "load_custom_generate", load)
    model.generate(ids_of(), custom_generate="somebody/something")
    model.generate(ids_of(), penalty_alpha=0.6, top_k=4, trust_remote_code=True, max_new_tokens=2)
    assert len(seen) == 2
    assert all(one is model for one in seen)


def test_a_draft_model_that_is_enabled_too():
    model, draft = families.model("llama"), families.draft("llama")
    with enable(model, max_context_length=40) as switch, enable(draft, max_context_length=40) as other:
        assert_same(
            generate(model, MODES["draft model"].arguments("llama")),
            families.reference("llama", "draft model"),
        )
        assert switch.cache.get_seq_length() > 0
        assert other.cache.get_seq_length() == 0


def test_a_call_inside_a_call_and_one_beside_it(model):
    wanted = fresh().generate(ids_of(1, 6, 5), max_new_tokens=3)
    enable(model, max_context_length=40)
    found = []

    class Asks(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            def ask():
                found.append(model.generate(ids_of(1, 6, 5), max_new_tokens=3))

            ask()
            thread = threading.Thread(target=ask)
            thread.start()
            thread.join()
            return torch.zeros(1, dtype=torch.bool)

    outputs = model.generate(ids_of(), max_new_tokens=3, stopping_criteria=[Asks()])
    assert torch.equal(outputs, fresh().generate(ids_of(), max_new_tokens=3))
    assert len(found) == 6
    assert all(torch.equal(one, wanted) for one in found)


def test_threads_at_once(model):
    prompts = [ids_of(1, 6, seed) for seed in range(4)]
    plain = fresh()
    wanted = [plain.generate(prompt, max_new_tokens=6) for prompt in prompts]
    enable(model, max_context_length=40)
    found = [None] * 4

    def ask(number):
        for _ in range(3):
            found[number] = model.generate(prompts[number], max_new_tokens=6)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


# ------------------------------------------------------------------------------------------------------------ sizes, limits


def test_more_rows_get_a_larger_arena_after_the_first_is_gone(model):
    switch = enable(model, max_context_length=40, max_batch_size=2)
    first, arena = weakref.ref(switch.cache), weakref.ref(switch.cache.arena)
    model.generate(ids_of(2), max_new_tokens=2)
    assert switch.cache is first()
    alive = []
    make = ArenaCache.for_model

    def watched(*args, **kwargs):
        alive.append((first(), arena()))
        return make(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ArenaCache, "for_model", watched)
        found = model.generate(ids_of(), max_new_tokens=2, num_beams=3)
    assert alive == [(None, None)]
    assert torch.equal(found, fresh().generate(ids_of(), max_new_tokens=2, num_beams=3))
    assert (switch.cache.max_batch_size, switch.cache.max_context_length) == (3, 40)
    larger = switch.cache
    model.generate(ids_of(), max_new_tokens=2)
    assert switch.cache is larger


def test_a_larger_arena_that_cannot_be_had_leaves_one_of_the_former_size(model):
    switch = enable(model, max_context_length=40)
    make = ArenaCache.for_model

    def scarce(*args, max_batch_size, **kwargs):
        if max_batch_size > 1:
            raise OutOfMemoryError("too much")
        return make(*args, max_batch_size=max_batch_size, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ArenaCache, "for_model", scarce)
        with pytest.raises(OutOfMemoryError, match="too much"):
            model.generate(ids_of(), max_new_tokens=2, num_beams=3)
    assert switch.cache.max_batch_size == 1
    assert torch.equal(
        model.generate(ids_of(), max_new_tokens=2), fresh().generate(ids_of(), max_new_tokens=2)
    )


def test_a_call_that_is_too_long_says_so(model):
    enable(model, max_context_length=16)
    with caches_of(model) as found, pytest.raises(CapacityError, match=r"may need 28 tokens.*holds 16"):
        model.generate(ids_of(), max_new_tokens=20)
    assert found == []
    assert model.generate(ids_of(), max_new_tokens=8).shape == (1, 17)


def test_a_call_that_is_too_long_goes_on_where_that_was_asked(model):
    options = {
        "max_new_tokens": 20,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    wanted = fresh().generate(ids_of(), **options)
    with enable(model, max_context_length=16, on_full="fallback") as switch:
        with pytest.warns(CacheOverflowWarning, match="the cache is full"):
            found = [model.generate(ids_of(), **options)]
        found.append(model.generate(ids_of(), **options))  # the warning came once
        assert switch.cache.on_full == "fallback"
    for one in found:
        assert torch.equal(one.sequences, wanted.sequences)
        for ours, theirs in zip(one.logits, wanted.logits, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=0)
    with pytest.raises(ArgumentError, match="on_full"):
        enable(model, on_full="wait")
    assert "generate" not in vars(model)


def test_the_size_by_default_is_the_longest_context(model):
    assert enable(model).cache.max_context_length == 256


# --------------------------------------------------------------------------------------------------------- nothing is hidden


def test_all_is_as_it_was(model):
    config = model.config
    before, implementation, text = dict(vars(model)), config._attn_implementation, config.to_json_string()
    switch = enable(model, max_context_length=40)
    assert config._attn_implementation == "gpuarena"
    assert set(vars(model)) - set(before) == {"generate"}
    assert inspect.signature(model.generate) == inspect.signature(fresh().generate)
    assert model.generate.__doc__ == type(model).generate.__doc__
    model.generate(ids_of(), max_new_tokens=2)
    assert set(vars(model)) - set(before) == {"generate"}
    memory = weakref.ref(switch.cache.arena)
    disable(model)
    assert vars(model) == before
    assert (config._attn_implementation, config.to_json_string()) == (implementation, text)
    assert memory() is None
    assert switch.cache is None
    assert not switch.is_on
    disable(model)
    switch.disable()
    assert "off" in repr(switch)


def test_an_attention_that_somebody_chose_stays():
    model = fresh(attn_implementation="eager")
    with enable(model, max_context_length=40):
        assert model.config._attn_implementation == "eager"
    model = fresh()
    with enable(model, max_context_length=40):
        model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager"
    model = fresh()
    with enable(model, max_context_length=40, attention=False):
        assert model.config._attn_implementation == "sdpa"


def test_a_model_that_does_not_look_its_attention_up():
    config = transformers.BloomConfig(vocab_size=128, hidden_size=64, n_layer=2, n_head=4, eos_token_id=None)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    wanted = model.generate(ids_of(), max_new_tokens=3)
    with enable(model, max_context_length=40):
        assert torch.equal(model.generate(ids_of(), max_new_tokens=3), wanted)


def test_a_model_that_is_gone_leaves_no_memory_though_its_switch_is_held():
    model = fresh()
    switch = enable(model, max_context_length=40)
    model.generate(ids_of(), max_new_tokens=2)
    memory, held = weakref.ref(switch.cache.arena), weakref.ref(model)
    del model
    gc.collect()
    assert held() is None
    assert memory() is None
    assert not switch.is_on
    switch.disable()


def test_a_switch_that_nobody_holds_stays_on(model):
    enable(model, max_context_length=40)
    gc.collect()
    with caches_of(model) as found:
        model.generate(ids_of(), max_new_tokens=2)
    assert isinstance(found[0], ArenaCache)


@pytest.mark.parametrize(
    "make", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_a_copy_is_not_enabled(model, make):
    wanted = fresh().generate(ids_of(), max_new_tokens=3)
    switch = enable(model, max_context_length=40)
    other = make(model)
    with caches_of(other) as found:
        assert torch.equal(other.generate(ids_of(), max_new_tokens=3), wanted)
    assert isinstance(found[0], DynamicCache)
    assert not isinstance(found[0], ArenaCache)
    assert switch.cache.get_seq_length() == 0
    before = dict(vars(other))
    with enable(other, max_context_length=40) as second:
        assert torch.equal(other.generate(ids_of(), max_new_tokens=3), wanted)
        assert second.cache.get_seq_length() > 0
    assert vars(other) == before
    disable(model)
    del model
    assert torch.equal(other.generate(ids_of(), max_new_tokens=3), wanted)


def test_what_is_saved_knows_nothing_of_it(model, tmp_path):
    enable(model, max_context_length=40)
    model.save_pretrained(tmp_path)
    assert (
        "gpuarena"
        not in (tmp_path / "config.json").read_text() + (tmp_path / "generation_config.json").read_text()
    )
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config._attn_implementation == "sdpa"
    assert torch.equal(
        loaded.generate(ids_of(), max_new_tokens=3), model.generate(ids_of(), max_new_tokens=3)
    )


def test_what_is_returned_has_no_cache_that_the_next_call_would_overwrite(model):
    enable(model, max_context_length=40)
    for options in ({}, {"num_beams": 2}):
        outputs = model.generate(
            ids_of(), max_new_tokens=3, return_dict_in_generate=True, output_scores=True, **options
        )
        assert outputs.past_key_values is None
        assert getattr(outputs, CACHE) is None
        assert len(outputs.scores) == 3


def test_new_weights_are_noticed(model):
    """As when a model is asked the same between the steps of its training."""
    enable(model, max_context_length=40)
    other = fresh(seed=1)
    model.generate(ids_of(), max_new_tokens=3)
    model.load_state_dict(other.state_dict())
    assert_same(generate(model, {"input_ids": ids_of()}), generate(other, {"input_ids": ids_of()}))


# ------------------------------------------------------------------------------------------------------------ what is refused


def test_enabling_twice(model):
    switch = enable(model, max_context_length=40)
    with pytest.raises(ArgumentError, match="enabled already"):
        enable(model)
    assert switch.is_on
    disable(model)
    with enable(model, max_context_length=40) as other:
        assert isinstance(other, ArenaSwitch)
        switch.disable()  # which is over
        assert other.is_on


def test_two_models(model):
    other = fresh(seed=1)
    wanted = [one.generate(ids_of(), max_new_tokens=3) for one in (model, other)]
    with enable(model, max_context_length=40), enable(other, max_context_length=40):
        for _ in range(2):
            assert torch.equal(model.generate(ids_of(), max_new_tokens=3), wanted[0])
            assert torch.equal(other.generate(ids_of(), max_new_tokens=3), wanted[1])


def test_what_cannot_be_enabled(model):
    before = dict(vars(model))
    with pytest.raises(ArgumentError, match="does not generate"):
        enable(model.model)
    with pytest.raises(ArgumentError, match='number of tokens or "auto"'):
        enable(model, max_context_length="most")
    with pytest.raises(ArgumentError, match="max_batch_size"):
        enable(model, max_batch_size=0)
    assert vars(model) == before
    assert model.config._attn_implementation == "sdpa"
    model.generate = lambda *args, **kwargs: None
    with pytest.raises(ArgumentError, match="replaced on the object itself, by somebody else"):
        enable(model)
    del model.generate


def test_a_generate_that_somebody_wrapped_since_is_left_alone(model):
    switch = enable(model, max_context_length=40)
    inner = model.generate
    model.generate = lambda *args, **kwargs: inner(*args, **kwargs)
    switch.disable()
    assert "generate" in vars(model)
    assert torch.equal(
        model.generate(ids_of(), max_new_tokens=2), fresh().generate(ids_of(), max_new_tokens=2)
    )
