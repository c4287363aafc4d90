"""`generate_from`: the answers of a model without a cache, from one that holds the conversation so far."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import threading

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import families  # noqa: E402 - after the skips
from families import CACHE, MODES, assert_same, generate  # noqa: E402
from gpuarena_transformers import ArenaCache, CacheInUseError, generate_from  # noqa: E402
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from transformers import AutoModelForCausalLM, DynamicCache, StoppingCriteria  # noqa: E402
from transformers.generation.streamers import BaseStreamer  # noqa: E402

from gpuarena.errors import ArgumentError, ArgumentTypeError, CapacityError, ShapeError  # noqa: E402

N_NEW = 3


class Through:
    """A model that generates on one cache, for the `generate` of `families`."""

    def __init__(self, model, cache):
        self.model, self.cache = model, cache

    def generate(self, **arguments):
        return generate_from(self.model, self.cache, **arguments)


def ids_of(n_rows=1, n_tokens=9, seed=3):
    return torch.randint(3, 128, (n_rows, n_tokens), generator=torch.Generator().manual_seed(seed))


@contextlib.contextmanager
def forwards(model):
    """Yield the number of tokens of each forward."""
    counts = []

    def note(module, args, kwargs):
        ids = next(
            found
            for found in (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args)
            if found is not None
        )
        counts.append(ids.shape[1])

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield counts
    finally:
        handle.remove()


def assert_true(cache, model):
    """The keys and values of the tokens in the transcript are those that the model computes for them."""
    n_tokens = len(cache.transcript)
    assert n_tokens <= cache.get_seq_length()
    if n_tokens == 0:
        return
    ids, mask = cache.transcript.ids, cache.transcript.mask.long()
    own = DynamicCache()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        model(input_ids=ids, attention_mask=mask, position_ids=positions, **{CACHE: own})
    for held, wanted in zip(cache.layers, own.layers, strict=True):
        for mine, theirs in ((held.keys, wanted.keys), (held.values, wanted.values)):
            assert mine.shape[0] == ids.shape[0]
            differences = (mine[:, :, :n_tokens] - theirs).abs().amax(dim=(1, 3))
            assert (differences * mask).max() < families.TOLERANCE


# ------------------------------------------------------------------------------------------------------ ways of generating


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_every_way_of_generating_goes_on_from_what_is_held(name, mode):
    model, arguments = families.model(name), MODES[mode].arguments(name)
    cache = ArenaCache(model.config, MODES[mode].rows, 64)
    n_common = 5
    if "input_ids" in arguments:
        other = torch.cat(
            [arguments["input_ids"][:, :n_common], ids_of(len(arguments["input_ids"]), 4, 5)], 1
        )
        mask = arguments["attention_mask"][:, :9]
        generate_from(model, cache, other, attention_mask=mask, max_new_tokens=N_NEW, do_sample=False)
    with forwards(model) as counts:
        outputs = generate(Through(model, cache), arguments)
    assert_same(outputs, families.reference(name, mode))
    assert getattr(outputs, CACHE) is cache
    if mode == "embeddings":
        assert len(cache.transcript) == 0
        return
    n_drafted = {"draft model": 4, "draft model, sample": 4, "prompt lookup": 3}.get(mode, 0)
    first = 4 if "chunks" in mode else arguments["input_ids"].shape[1] - n_common + n_drafted
    assert counts[0] == first
    assert_true(cache, model)
    assert vars(model).keys() == vars(AutoModelForCausalLM.from_config(families.config(name))).keys()


@functools.cache
def without_cache(seed, n_rows, n_tokens, n_padded, kind):
    return generate(
        families.model("mistral"), conversation(seed, n_rows, n_tokens, n_padded) | OPTIONS[kind], n_new=N_NEW
    )


def conversation(seed, n_rows, n_tokens, n_padded):
    """Return a prompt that has a prefix in common with those of other seeds."""
    base, other = ids_of(4, 24, 1)[:n_rows], ids_of(4, 24, seed)[:n_rows]
    ids = torch.where(torch.arange(24) < 4 * seed, base, other)[:, :n_tokens].clone()
    mask = torch.ones_like(ids)
    mask[0, : min(n_padded, n_tokens - 1)] = 0
    return {"input_ids": ids.where(mask == 1, 0), "attention_mask": mask}


OPTIONS = {
    "greedy": {},
    "sample": {"do_sample": True},
    "sample, two each": {"do_sample": True, "num_return_sequences": 2},
    "beam": {"num_beams": 2},
    "chunks": {"prefill_chunk_size": 3},
    "lookup": {"prompt_lookup_num_tokens": 2},
}
turns = st.tuples(
    st.integers(1, 4),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 20),
    st.sampled_from([0, 0, 3]),
    st.sampled_from([*OPTIONS]),
)


@given(
    st.lists(
        st.tuples(turns, st.sampled_from(["nothing", "forward", "truncate", "scope", "stop"])),
        min_size=2,
        max_size=3,
    )
)
def test_any_turns_on_one_cache_are_those_without(steps):
    model = families.model("mistral")
    cache = ArenaCache(model.config, 8, 40)
    for (seed, n_rows, n_tokens, n_padded, kind), between in steps:
        n_rows = 1 if kind == "lookup" else n_rows
        wanted = without_cache(seed, n_rows, n_tokens, n_padded, kind)
        arguments = conversation(seed, n_rows, n_tokens, n_padded) | OPTIONS[kind]
        assert_same(generate(Through(model, cache), arguments, n_new=N_NEW), wanted)
        assert_true(cache, model)
        held = cache.get_seq_length()
        if between == "forward":
            with torch.no_grad():
                model(input_ids=ids_of(cache.batch_size, 2, 77), **{CACHE: cache})
        elif between == "truncate":
            cache.truncate(held // 2)
        elif between == "scope":
            with cache.scope(), torch.no_grad():
                model(input_ids=ids_of(cache.batch_size, 2, 78), **{CACHE: cache})
        elif between == "stop":
            with pytest.raises(RuntimeError, match="stopped"):
                generate_from(model, cache, ids_of(1, 6, 2), max_new_tokens=4, stopping_criteria=[Stops(8)])
        assert_true(cache, model)


# ------------------------------------------------------------------------------------------------------------------ chats


def test_a_template_that_rewrites_the_last_turn():
    """As those do that drop the thoughts of former answers."""
    model = families.model("llama")
    cache = ArenaCache.for_model(model, 64)
    first = ids_of()
    answered = generate_from(model, cache, first, max_new_tokens=8)
    assert torch.equal(answered, model.generate(first, max_new_tokens=8))
    rewritten = torch.cat([first, answered[:, 13:], ids_of(1, 3, 8)], dim=1)
    with forwards(model) as counts:
        outputs = generate(Through(model, cache), {"input_ids": rewritten})
    assert_same(outputs, generate(model, {"input_ids": rewritten}))
    assert counts[0] == rewritten.shape[1] - 9
    with forwards(model) as counts:  # the same again: the last token is run, for its logits
        assert_same(generate(Through(model, cache), {"input_ids": rewritten}), outputs)
    assert counts[0] == 1


@pytest.mark.parametrize(
    "form", ["list", "list of lists", "flat tensor", "mapping", "tokenizer", "inputs=", "input_ids="]
)
def test_forms_of_the_input(form):
    model = families.model("llama")
    ids = ids_of()
    given, named = {
        "list": (ids[0].tolist(), {}),
        "list of lists": (ids.tolist(), {"attention_mask": [[1] * 9]}),
        "flat tensor": (ids[0], {}),
        "mapping": ({"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids)}, {}),
        "tokenizer": (
            transformers.BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)}),
            {},
        ),
        "inputs=": (None, {"inputs": ids}),
        "input_ids=": (None, {"input_ids": ids}),
    }[form]
    cache = ArenaCache(model.config, 1, 32)
    if form == "inputs=":
        found = generate_from(model, cache, inputs=ids, max_new_tokens=5)
    else:
        found = generate_from(model, cache, given, max_new_tokens=5, **named)
    assert torch.equal(found, model.generate(ids, max_new_tokens=5))


def test_no_input_at_all_begins_with_the_first_token_of_all():
    model = families.model("llama")
    found = generate_from(model, ArenaCache(model.config, 1, 32), max_new_tokens=5)
    assert torch.equal(found, model.generate(max_new_tokens=5))


def test_one_prefix_serves_many_and_the_best_of_several_goes_on():
    model = families.model("llama")
    cache = ArenaCache(model.config, 4, 40)
    prefix = ids_of(1, 8)
    generate_from(model, cache, prefix, max_new_tokens=2)
    four = torch.cat([prefix.expand(4, -1), ids_of(4, 3, 6)], dim=1)
    with forwards(model) as counts:
        outputs = generate(Through(model, cache), {"input_ids": four})
    assert counts[0] == 3
    assert_same(outputs, generate(model, {"input_ids": four}))
    third = torch.cat([outputs.sequences[2:3], ids_of(1, 2, 7)], dim=1)
    with forwards(model) as counts:
        assert_same(
            generate(Through(model, cache), {"input_ids": third}), generate(model, {"input_ids": third})
        )
    assert counts[0] == 3  # the last token that was generated, and two new ones
    assert cache.batch_size == 1


def test_the_same_ids_with_another_mask_are_others():
    model = families.model("llama")
    cache = ArenaCache(model.config, 1, 40)
    ids, mask = ids_of(), torch.ones(1, 9, dtype=torch.long)
    for n_padded in (0, 3, 0):
        prompt = {"input_ids": ids, "attention_mask": mask.where(torch.arange(9) >= n_padded, 0)}
        assert_same(generate(Through(model, cache), prompt, n_new=3), generate(model, prompt, n_new=3))


def test_rows_that_have_no_multiple_in_common_start_over():
    model = families.model("llama")
    cache = ArenaCache(model.config, 3, 40)
    generate_from(model, cache, ids_of(2), max_new_tokens=2)
    three = ids_of(3)
    assert_same(generate(Through(model, cache), {"input_ids": three}), generate(model, {"input_ids": three}))


def test_what_a_forward_appended_is_unknown_until_it_is_noted():
    model = families.model("llama")
    ids = ids_of(1, 12)
    wanted = generate(model, {"input_ids": ids})
    for is_noted in (False, True):
        cache = ArenaCache(model.config, 1, 40)
        with torch.no_grad():
            model(input_ids=ids[:, :8], **{CACHE: cache})
        if is_noted:
            cache.transcript.note(ids[:, :8])
        with forwards(model) as counts:
            assert_same(generate(Through(model, cache), {"input_ids": ids}), wanted)
        assert counts[0] == (4 if is_noted else 12)


def test_generate_with_the_cache_in_between():
    """A plain `generate` on the cache appends what nobody notes."""
    model = families.model("llama")
    cache = ArenaCache(model.config, 1, 40)
    ids = generate_from(model, cache, ids_of(), max_new_tokens=4)
    generate(model, {"input_ids": torch.cat([ids, ids_of(1, 2, 4)], 1)}, cache, n_new=3)
    longer = torch.cat([ids, ids_of(1, 5, 5)], 1)
    assert_same(
        generate(Through(model, cache), {"input_ids": longer}), generate(model, {"input_ids": longer})
    )


@pytest.mark.parametrize("name", ["bamba", "lfm2", "recurrent-gemma"])
def test_states_start_over(name):
    """Some models take a state for empty if they are given several tokens: nothing of it is trusted."""
    model = families.model(name)
    cache = ArenaCache(model.config, 2, 40)
    ids = generate_from(model, cache, ids_of(2), max_new_tokens=4)
    for longer in (torch.cat([ids, ids_of(2, 3, 4)], 1), ids[:, :7]):
        assert_same(
            generate(Through(model, cache), {"input_ids": longer}), generate(model, {"input_ids": longer})
        )


def test_an_encoder_decoder_starts_over_with_each_source():
    from gpuarena_transformers import ArenaEncoderDecoderCache

    config = transformers.T5Config(
        vocab_size=128,
        d_model=64,
        d_ff=128,
        d_kv=16,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(config).eval()
    cache = ArenaEncoderDecoderCache(config, 2, 16, 16)
    for seed, num_beams in ((1, 1), (1, 2), (2, 1)):
        arguments = {"input_ids": ids_of(1, 6, seed), "num_beams": num_beams}
        assert_same(generate(Through(model, cache), arguments, n_new=5), generate(model, arguments, n_new=5))
    with pytest.raises(CapacityError, match="17 tokens"):
        generate_from(model, cache, ids_of(), max_new_tokens=17)
    with pytest.raises(ArgumentError, match="is an encoder-decoder"):
        generate_from(model, ArenaCache(None, 2, 16), ids_of())
    with pytest.raises(ArgumentError, match="is no encoder-decoder"):
        generate_from(families.model("llama"), cache, ids_of())


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_rotary_embedding_that_changes_with_the_length(kind):
    """Past its original length, such a model turns all keys in another way than before."""
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "dynamic":
        config = transformers.LlamaConfig(
            **families.C | {"max_position_embeddings": 16}, rope_parameters=rope
        )
    else:
        rope |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 16}
        config = transformers.Phi3Config(
            **families.C | {"max_position_embeddings": 64},
            rope_parameters=rope,
            original_max_position_embeddings=16,
        )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    fresh_model = copy.deepcopy(model)  # a rotary embedding remembers the longest sequence so far
    cache = ArenaCache(config, 1, 64)
    ids = ids_of(1, 40)
    for n_tokens in (8, 10, 20, 24, 10):
        prompt = {"input_ids": ids[:, :n_tokens]}
        wanted = generate(copy.deepcopy(fresh_model), prompt, n_new=3)
        assert_same(generate(Through(model, cache), prompt, n_new=3), wanted)


# ---------------------------------------------------------------------------------------------------- what cannot be kept


@pytest.mark.parametrize(
    "option", ["output_hidden_states", "output_attentions", "position_ids", "token_type_ids"]
)
def test_what_asks_for_the_whole_prompt_starts_over(option):
    model = families.model("gpt2", "eager")
    ids = ids_of()
    cache = ArenaCache(model.config, 1, 40)
    generate_from(model, cache, ids, max_new_tokens=3)
    given = {
        "position_ids": torch.arange(9)[None] + 5,
        "token_type_ids": torch.arange(9)[None] + 30,
    }.get(option, True)
    outputs, wanted = (
        generate(through, {"input_ids": ids, option: given}, n_new=3)
        for through in (Through(model, cache), model)
    )
    assert_same(outputs, wanted)
    field = {"output_hidden_states": "hidden_states", "output_attentions": "attentions"}.get(option)
    if field:
        found, expected = (getattr(one, field)[0][-1] for one in (outputs, wanted))
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, atol=families.TOLERANCE, rtol=0)
    assert_same(
        generate(Through(model, cache), {"input_ids": ids}, n_new=3),
        generate(model, {"input_ids": ids}, n_new=3),
    )


def fresh(name="llama", seed=0):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(families.config(name)).eval()


@pytest.mark.parametrize("change", ["in place", "loaded", "replaced"])
def test_new_weights_start_over(change):
    model, cache, ids = fresh(), ArenaCache(families.config("llama"), 1, 40), ids_of()
    generate_from(model, cache, ids, max_new_tokens=3)
    layer = model.model.layers[0].self_attn
    with torch.no_grad():
        if change == "in place":
            layer.v_proj.weight.mul_(2)
        elif change == "loaded":
            model.load_state_dict(fresh(seed=1).state_dict())
        else:
            layer.v_proj.weight = torch.nn.Parameter(layer.v_proj.weight * 2)
    assert_same(generate(Through(model, cache), {"input_ids": ids}), generate(model, {"input_ids": ids}))


def test_tokens_of_another_model_are_refused():
    one, other, ids = fresh(), fresh(seed=1), ids_of()
    cache = ArenaCache(one.config, 1, 40)
    generate_from(one, cache, ids, max_new_tokens=3)
    held = cache.transcript.ids
    with pytest.raises(
        ArgumentError, match=r"11 tokens of another model, a LlamaForCausalLM; cache\.reset\(\)"
    ):
        generate_from(other, cache, ids)
    assert torch.equal(cache.transcript.ids, held)
    with forwards(one) as counts:
        generate_from(one, cache, ids, max_new_tokens=3)
    assert counts[0] == 1
    cache.reset()
    assert_same(generate(Through(other, cache), {"input_ids": ids}), generate(other, {"input_ids": ids}))
    del other
    gc.collect()
    assert cache.transcript.model is None  # and kept alive by nothing
    assert_same(generate(Through(one, cache), {"input_ids": ids}), generate(one, {"input_ids": ids}))


# -------------------------------------------------------------------------------------------------------- what goes wrong


class Stops(StoppingCriteria):
    def __init__(self, n_tokens, error=RuntimeError):
        self.n_tokens, self.error = n_tokens, error

    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] >= self.n_tokens:
            raise self.error("stopped")
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class Breaks(BaseStreamer):
    def put(self, value):
        raise RuntimeError("stopped")

    def end(self):
        pass


@pytest.mark.parametrize("name", ["llama", "bamba"])
@pytest.mark.parametrize(
    "where", ["criterion", "interrupt", "streamer", "first layer", "last layer", "chunk of layers", "beam"]
)
def test_an_exception_leaves_a_cache_that_is_used_on(name, where):
    model = families.model(name)
    cache = ArenaCache(model.config, 2, 40)
    ids = ids_of()
    generate_from(model, cache, ids[:, :6], max_new_tokens=2)
    error = KeyboardInterrupt if where == "interrupt" else RuntimeError
    options = {"stopping_criteria": [Stops(12, error)]}
    if where == "streamer":
        options = {"streamer": Breaks()}
    elif where == "beam":
        options["num_beams"] = 2
    hook = None
    if "layer" in where:
        layers = [model.model.layers[index] for index in (0, -1)]
        calls = []

        def fail(*args):
            calls.append(args)
            if len(calls) == 3:
                raise RuntimeError("stopped")

        hook = layers[where == "last layer"].register_forward_pre_hook(fail)
        options = {}
        if "chunk" in where:
            cache.reset()
            options = {"prefill_chunk_size": 3}
    with pytest.raises(error, match="stopped"):
        generate_from(model, cache, ids, max_new_tokens=8, **options)
    if hook is not None:
        hook.remove()
    if name == "llama":
        assert_true(cache, model)
        assert len(cache.transcript) >= (3 if "chunk" in where else 6)
        assert len({layer.get_seq_length() for layer in cache.layers}) == 1
    assert_same(generate(Through(model, cache), {"input_ids": ids}), generate(model, {"input_ids": ids}))


def test_what_does_not_fit_is_said_before_anything_runs():
    model = families.model("llama")
    cache = ArenaCache(model.config, 2, 16)
    ids = generate_from(model, cache, ids_of(), max_new_tokens=4)
    held = cache.transcript.ids
    with forwards(model) as counts:
        with pytest.raises(
            CapacityError, match=r"17 tokens.*holds 16, 1 too few.*max_context_length"
        ) as caught:
            generate_from(model, cache, ids, max_new_tokens=5)
        assert (caught.value.requested, caught.value.capacity, caught.value.missing) == (17, 16, 1)
        assert (caught.value.used, caught.value.unit) == (12, "tokens")
        with pytest.raises(CapacityError, match="18 tokens"):
            generate_from(model, cache, ids, max_new_tokens=4, prompt_lookup_num_tokens=3)
        with pytest.raises(ShapeError, match=r"3 rows.*at most 2.*max_batch_size=3"):
            generate_from(model, cache, ids, max_new_tokens=2, num_beams=3)
    assert counts == []
    assert torch.equal(cache.transcript.ids, held)
    assert cache.get_seq_length() == 12
    generate_from(model, cache, ids, max_new_tokens=4)
    assert cache.get_seq_length() == 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"past_key_values": 1}, "a second cache"),
        ({"use_cache": False}, "use_cache=False leaves no place"),
        ({"cache_implementation": "static"}, "cache_implementation='static' leaves no place"),
        ({"custom_generate": "transformers-community/dola"}, "leaves no place"),
        ({"generation_config": transformers.GenerationConfig(use_cache=False)}, "use_cache=False in the generation config"),
        ({"penalty_alpha": 0.6, "top_k": 4, "trust_remote_code": True}, "code from the hub"),
        ({"input_ids": [[1]]}, "input_ids are given twice"),
        ({"attention_mask": [[1, 1]]}, r"attention_mask is \[1, 2\], the ids are \[1, 9\]"),
    ],
)  # fmt: skip
def test_arguments_that_leave_no_place_for_the_cache(options, message):
    model = families.model("llama")
    cache = ArenaCache(model.config, 1, 40)
    with forwards(model) as counts, pytest.raises(ArgumentError, match=message):
        generate_from(model, cache, ids_of(), max_new_tokens=2, **options)
    assert counts == []
    assert cache.get_seq_length() == 0
    assert generate_from(model, cache, ids_of(), max_new_tokens=2).shape == (1, 11)


@pytest.mark.parametrize(
    "ids", [[[1, 2], [3]], [[]], torch.ones(1, 3), torch.ones(1, 2, 3, dtype=torch.long), "text"]
)
def test_ids_that_are_none(ids):
    model = families.model("llama")
    with pytest.raises(ArgumentTypeError, match="input_ids must be"):
        generate_from(model, ArenaCache(model.config, 1, 40), ids)


def test_inputs_that_are_given_twice():
    model, cache, ids = families.model("llama"), ArenaCache(families.config("llama"), 1, 40), ids_of()
    whole = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 2}
    with pytest.raises(ArgumentError, match="attention_mask is given twice"):
        generate_from(model, cache, whole, attention_mask=torch.ones_like(ids))
    with pytest.raises(ArgumentError, match="max_new_tokens is given twice"):
        generate_from(model, cache, whole, max_new_tokens=3)


def test_models_and_caches_that_this_does_not_work_on():
    model, cache = families.model("llama"), ArenaCache(families.config("llama"), 1, 40)
    with pytest.raises(ArgumentTypeError, match="must be an ArenaCache; a DynamicCache has no truncate"):
        generate_from(model, DynamicCache(), ids_of())
    with pytest.raises(ArgumentTypeError, match=r"must be an ArenaCache, not None: ArenaCache\.for_model"):
        generate_from(model, None, ids_of())
    with pytest.raises(ArgumentError, match="a LlamaModel does not generate"):
        generate_from(model.model, cache, ids_of())

    class Special(type(model)):
        def generate(self, *args, **kwargs):
            raise AssertionError

    with pytest.raises(ArgumentError, match=r"Special has a generate\(\) of its own"):
        generate_from(Special(model.config), cache, ids_of())
    other = fresh()
    other.prepare_inputs_for_generation = lambda *args, **kwargs: None
    with pytest.raises(
        ArgumentError, match="prepare_inputs_for_generation of this LlamaForCausalLM is replaced"
    ):
        generate_from(other, cache, ids_of())


def test_one_cache_is_not_used_twice_at_once():
    model = families.model("llama")
    cache = ArenaCache(model.config, 1, 40)
    seen = []

    class Nested(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            def again():
                with pytest.raises(CacheInUseError, match="in use by another generate_from"):
                    generate_from(model, cache, ids_of(), max_new_tokens=2)
                seen.append(True)

            again()
            thread = threading.Thread(target=again)
            thread.start()
            thread.join()
            return torch.zeros(1, dtype=torch.bool)

    wanted = generate(model, {"input_ids": ids_of()}, n_new=2)
    found = generate(Through(model, cache), {"input_ids": ids_of(), "stopping_criteria": [Nested()]}, n_new=2)
    assert_same(found, wanted)
    assert len(seen) == 4
    assert_same(generate(Through(model, cache), {"input_ids": ids_of()}, n_new=2), wanted)


def test_what_is_streamed_is_what_is_returned():
    model = families.model("llama")
    cache = ArenaCache(model.config, 1, 40)

    class Collects(BaseStreamer):
        def __init__(self):
            self.tokens = []

        def put(self, value):
            self.tokens.extend(value.flatten().tolist())

        def end(self):
            self.tokens.append("end")

    for _ in range(2):
        streamer = Collects()
        found = generate_from(model, cache, ids_of(), max_new_tokens=4, streamer=streamer)
        assert streamer.tokens == [*found[0].tolist(), "end"]


def test_generation_under_inference_mode_and_without_in_turns():
    model = families.model("llama")
    cache = ArenaCache(model.config, 1, 40)
    ids = ids_of()
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            wanted = model.generate(ids, max_new_tokens=3)
            assert torch.equal(generate_from(model, cache, ids, max_new_tokens=3), wanted)
        ids = torch.cat([wanted.clone(), ids_of(1, 2, 4)], dim=1)


def test_a_model_that_drafts_for_itself():
    """It drafts with fewer layers and a cache of its own, and leaves ours alone."""
    model = families.model("llama")
    ids, options = ids_of(), {"assistant_early_exit": 1}
    cache = ArenaCache(model.config, 1, 40)
    generate_from(model, cache, ids[:, :7], max_new_tokens=2)
    with forwards(model) as counts:
        outputs = generate(Through(model, cache), {"input_ids": ids} | options)
    assert_same(outputs, generate(model, {"input_ids": ids} | options))
    assert counts[0] == 9  # the draft
    assert_true(cache, model)


def test_a_static_cache():
    from gpuarena_transformers import ArenaStaticCache

    model = families.model("llama")
    cache = ArenaStaticCache(model.config, 2, 40)
    ids = ids_of(2)
    for n_beams in (1, 1, 2):
        prompt = {"input_ids": ids[: 2 // n_beams], "num_beams": n_beams}
        outputs = generate(Through(model, cache), prompt, n_new=3)
        assert_same(outputs, generate(model, prompt, n_new=3))
        ids = torch.cat([outputs.sequences, ids[:1, :2].expand(outputs.sequences.shape[0], -1)], dim=1)
