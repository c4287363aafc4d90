"""What caches of transformers were reported for, tried on the arena's; docs/public-reports-transformers.md has the list.

The oracle is the model without a cache. Most caches lie in memory that is NaN wherever nothing was written.
"""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import weakref

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import gpuarena_transformers as gt  # noqa: E402 - after the skips
from gpuarena_transformers import ArenaCache, cache_argument, generate_from  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM  # noqa: E402
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402
from transformers.masking_utils import sdpa_mask  # noqa: E402

from gpuarena import Arena, CapacityError, CheckpointError, ShapeError  # noqa: E402
from gpuarena.errors import ArenaError, ArgumentError, AutogradError, DeviceMismatchError, DTypeError  # noqa: E402

CACHE = cache_argument()
TOLERANCE = 1e-3  # rounding of these logits is below 1e-5
N_TOKENS = 64
WINDOW = 6

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.1,
}
LAYER_TYPES = ["sliding_attention", "full_attention"]
CONFIGS = {
    "llama": ("LlamaConfig", SIZES),
    "mistral": ("MistralConfig", SIZES | {"sliding_window": WINDOW}),
    "gemma3": (
        "Gemma3TextConfig",
        SIZES | {"head_dim": 16, "sliding_window": WINDOW, "layer_types": LAYER_TYPES},
    ),
    "recurrent": (
        "Qwen3NextConfig",
        SIZES
        | {
            "head_dim": 16,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
}
WITH_WINDOWS = ["mistral", "gemma3"]


@functools.cache
def model_of(name="llama", attention=None):
    torch.manual_seed(5)
    class_name, options = CONFIGS[name]
    config = getattr(transformers, class_name)(**options)
    return AutoModelForCausalLM.from_config(
        config, **({"attn_implementation": attention} if attention else {})
    ).eval()


def prompt(n=9, rows=1, seed=3):
    """Return ids [rows, n]."""
    return torch.randint(3, 128, (rows, n), generator=torch.Generator().manual_seed(seed))


def dirty(model, rows=1, n_tokens=N_TOKENS, **options):
    """Return a cache in memory that is NaN."""
    arena = Arena.from_buffer(torch.full((1 << 21,), 0xFF, dtype=torch.uint8))
    return ArenaCache(model.config, rows, n_tokens, arena=arena, **options)


def forward(model, ids, cache, **options):
    with torch.no_grad():
        return model(input_ids=ids, **{CACHE: cache}, **options).logits


def logits_of(model, ids, **options):
    """Return the logits of every token, without a cache."""
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False, **options).logits


def generate(model, ids, cache=None, n_new=6, **options):
    options = {"do_sample": False, "attention_mask": torch.ones_like(ids)} | options
    if cache is not None:
        options[CACHE] = cache
    torch.manual_seed(1)
    return model.generate(
        ids,
        max_new_tokens=n_new,
        min_new_tokens=n_new,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )


def same(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE)


def same_answer(found, wanted):
    same(torch.stack(found.logits), torch.stack(wanted.logits))
    assert torch.equal(found.sequences, wanted.sequences)


class NewMemory(TorchDispatchMode):
    """Counts the bytes of tensors that do not share the memory of an argument."""

    def __init__(self):
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {
            arg.untyped_storage().data_ptr()
            for arg in (*args, *(kwargs or {}).values())
            if isinstance(arg, torch.Tensor)
        }
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in given:
            self.nbytes += result.nbytes
        return result


def states(n, rows=1, dtype=torch.float32):
    return torch.randn(rows, 2, n, 16).to(dtype)


# ---------------------------------------------------------------------------------------------------- memory, and its size


def test_huggingface_transformers_25930_a_token_is_written_once_where_it_stays():
    model = model_of()
    cache = dirty(model)
    forward(model, prompt(), cache)
    places = [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in cache.layers]
    reserved = cache.stats.reserved_nbytes
    for _ in range(20):
        for index in range(2):
            new = states(1)
            with NewMemory() as memory:
                cache.update(new, new, index)
            assert memory.nbytes == 0
    assert [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in cache.layers] == places
    assert cache.stats.reserved_nbytes == reserved == N_TOKENS * cache.stats.bytes_per_token


def test_huggingface_transformers_33270_all_answers_of_a_model_lie_in_one_arena():
    """Without an argument at any call."""
    model = model_of()
    prompts = [prompt(9), prompt(20, seed=4), prompt(4, seed=8)]
    expected = [generate(model, ids) for ids in prompts]
    with gt.enable(model, max_context_length=N_TOKENS) as switch:
        arena = switch.cache.arena
        for ids, wanted in zip(prompts, expected, strict=True):
            same_answer(generate(model, ids), wanted)
            assert switch.cache.arenas == [arena]
            assert switch.cache.get_seq_length() == ids.shape[1] + 6 - 1


def test_huggingface_transformers_31717_a_conversation_is_forgotten_and_its_memory_given_back():
    model = model_of()
    first, second = prompt(), prompt(12, seed=8)
    cache = dirty(model)
    generate(model, first, cache)
    assert cache.stats.n_tokens == 9 + 6 - 1
    cache.reset()
    assert cache.stats.n_tokens == cache.stats.used_nbytes == 0
    same_answer(generate(model, second, cache), generate(model, second))


def test_huggingface_transformers_47731_nothing_stays_with_the_model():
    model = model_of()
    before = set(vars(model)), set(vars(model.config)), vars(model.generation_config).copy()
    cache = ArenaCache(model.config, 1, N_TOKENS)
    outputs = generate(model, prompt(), cache)
    memory = weakref.ref(cache.layers[0].keys.untyped_storage())
    watched = [weakref.ref(cache), weakref.ref(cache.arena)]
    del cache, outputs
    gc.collect()
    assert [watch() for watch in watched] == [None, None]
    assert memory() is None
    after = set(vars(model)), set(vars(model.config)), vars(model.generation_config)
    assert after == before


def test_huggingface_transformers_46424_the_size_is_what_was_asked_at_every_length():
    model = model_of()
    cache = ArenaCache(model.config, 1, N_TOKENS)
    places = set()
    for n in (5, 30, 12, 50):
        ids = prompt(n)
        cache.reset()
        same_answer(generate(model, ids, cache), generate(model, ids))
        places.add((cache.layers[0].keys.data_ptr(), cache.arena.capacity, len(cache.arenas)))
    assert len(places) == 1
    assert cache.get_max_length() == N_TOKENS


def test_kvcache_ai_ktransformers_336_a_length_that_does_not_fit_is_known_before_the_first_forward():
    model = model_of()
    cache = dirty(model, n_tokens=12)
    with pytest.raises(CapacityError) as caught:
        generate_from(model, cache, prompt(9), max_new_tokens=10)
    assert caught.value.missing == 9 + 10 - 1 - 12
    assert cache.get_seq_length() == 0
    generate_from(model, cache, prompt(9), max_new_tokens=4)


def test_huggingface_transformers_30704_a_cache_that_is_full_goes_on_if_that_was_asked():
    """Not by moving to the host, but with ordinary tensors, announced once."""
    model = model_of()
    cache = ArenaCache(model.config, 1, 10, on_full="fallback")
    with pytest.warns(UserWarning, match="full") as caught:
        outputs = generate(model, prompt(), cache)
    assert len(caught) == 1
    same_answer(outputs, generate(model, prompt()))
    assert cache.stats.overflow_nbytes > 0


# ----------------------------------------------------------------------------------------------- what an attention gets


class Seen:
    """An attention that notes what it is given."""

    def __init__(self, monkeypatch):
        self.calls = []
        monkeypatch.setitem(AttentionInterface._global_mapping, "watched", self)
        monkeypatch.setitem(AttentionMaskInterface._global_mapping, "watched", sdpa_mask)

    def __call__(self, module, query, key, value, attention_mask, **options):
        self.calls.append((query, key, value, attention_mask))
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


def watched_model(monkeypatch, name):
    seen = Seen(monkeypatch)
    class_name, options = CONFIGS[name]
    torch.manual_seed(5)
    config = getattr(transformers, class_name)(**options)
    return AutoModelForCausalLM.from_config(config, attn_implementation="watched").eval(), seen


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_huggingface_transformers_30862_attention_reads_the_used_part_alone(name, monkeypatch):
    model, seen = watched_model(monkeypatch, name)
    generate(model, prompt(9), ArenaCache(model.config, 1, 4096), n_new=4)
    lengths = [key.shape[2] for _, key, _, _ in seen.calls]
    window = WINDOW if name == "mistral" else 4096
    assert lengths == [9, 9, *(min(n, window) for n in (10, 11, 12) for _ in range(2))]


@pytest.mark.parametrize("n_prompt", [1, 2, 5, 8, 9, 16, 17, 31])
@pytest.mark.parametrize("name", ["llama", *WITH_WINDOWS])
def test_huggingface_transformers_30400_what_was_never_written_is_never_seen(name, n_prompt):
    model = model_of(name)
    ids = prompt(n_prompt)
    outputs = generate(model, ids, dirty(model), n_new=9)
    expected = logits_of(model, outputs.sequences[:, :-1])[0, n_prompt - 1 :]
    same(torch.cat(outputs.logits), expected)


def test_huggingface_transformers_32040_a_kernel_that_takes_no_mask_needs_none(monkeypatch):
    """Flash attention takes no mask, and tensors whose last dimension has stride 1."""
    model, seen = watched_model(monkeypatch, "llama")
    generate(model, prompt(9, rows=2), dirty(model, rows=2), n_new=4)
    for query, key, value, mask in seen.calls:
        assert mask is None
        assert key.shape[2] >= query.shape[2]
        assert key.stride(-1) == value.stride(-1) == 1
        assert not key.isnan().any()
        assert not value.isnan().any()


def test_huggingface_transformers_47447_what_is_returned_has_the_announced_length():
    """Each update of assisted decoding on windows, at every length around them, cuts included."""
    returned, cuts = [], []

    class Watched(ArenaCache):
        def update(self, key_states, value_states, layer_idx, *args, **kwargs):
            wanted = self.get_mask_sizes(key_states.shape[2], layer_idx)[0]
            keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
            returned.append((keys.shape[2], values.shape[2]) == (wanted, wanted))
            return keys, values

        def crop(self, tokens_to_remove):
            cuts.append(int(tokens_to_remove))
            super().crop(tokens_to_remove)

    for name in WITH_WINDOWS:
        model = model_of(name)
        for n in (3, 5, 6, 7, 12):
            ids = prompt(3).repeat(1, 5)[:, :n]
            cache = Watched(model.config, 1, N_TOKENS)
            same_answer(generate(model, ids, cache, prompt_lookup_num_tokens=3), generate(model, ids))
    assert all(returned)
    assert any(cuts)


# ------------------------------------------------------------------------------------------------------- going back


def test_huggingface_transformers_32946_assisted_decoding_takes_a_cache_of_fixed_size():
    model = model_of()
    draft = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    draft.generation_config.num_assistant_tokens = 3
    outputs = generate(model, prompt(), dirty(model), n_new=10, assistant_model=draft)
    same_answer(outputs, generate(model, prompt(), n_new=10))


@pytest.mark.parametrize("name", ["llama", *WITH_WINDOWS])
def test_huggingface_transformers_30312_going_back_copies_nothing(name):
    model = model_of(name)
    cache = dirty(model)
    forward(model, prompt(20), cache)
    places = [layer.keys.data_ptr() for layer in cache.layers]
    with NewMemory() as memory:
        cache.crop(-7)
    assert memory.nbytes == 0
    assert cache.get_seq_length() == 13
    assert [layer.keys.data_ptr() for layer in cache.layers] == places
    more = prompt(4, seed=9)
    same(forward(model, more, cache), logits_of(model, torch.cat([prompt(20)[:, :13], more], dim=1))[:, 13:])


def test_huggingface_transformers_47433_a_cut_is_exact_or_refused():
    model = model_of()
    for amount, left in ((0, 9), (-4, 5), (-9, 0), (-10, None), (3, None)):
        cache = dirty(model)
        forward(model, prompt(), cache)
        if left is None:
            with pytest.raises(ArgumentError):
                cache.crop(amount)
            left = 9
        else:
            cache.crop(amount)
        assert cache.get_seq_length() == left
        more = prompt(3, seed=9)
        whole = torch.cat([prompt()[:, :left], more], dim=1)
        same(forward(model, more, cache), logits_of(model, whole)[:, left:])


def test_huggingface_transformers_49036_recurrent_states_go_back_or_the_refusal_is_loud():
    model = model_of("recurrent")
    prefix, ends = prompt(9), [prompt(4, seed=9), prompt(3, seed=10)]
    cache = ArenaCache(model.config, 1, N_TOKENS)
    forward(model, prefix, cache)
    start = cache.checkpoint()
    for end in ends * 2:
        expected = logits_of(model, torch.cat([prefix, end], dim=1))[:, 9:]
        same(forward(model, end, cache), expected)
        with pytest.raises(ArgumentError, match="recurrent state"):
            cache.crop(-1)
        assert cache.get_seq_length() == 9 + end.shape[1]
        cache.rollback(start)


@pytest.mark.parametrize("name", WITH_WINDOWS)
def test_ml_explore_mlx_lm_1437_a_prefix_is_kept_behind_its_window(name):
    """The prefix and each answer are longer than the window."""
    model = model_of(name)
    prefix = prompt(15)
    cache = dirty(model)
    forward(model, prefix, cache)
    for seed in (9, 10, 9):
        ids = torch.cat([prefix, prompt(3, seed=seed)], dim=1)
        same_answer(generate(model, ids, cache, n_new=8), generate(model, ids, n_new=8))
        cache.truncate(15)


@pytest.mark.parametrize("name", WITH_WINDOWS)
def test_huggingface_transformers_39593_past_the_window_nothing_is_out_of_bounds(name):
    model = model_of(name)
    cache = dirty(model, n_tokens=30)
    ids = prompt(11)
    outputs = generate(model, ids, cache, n_new=20)  # 30 tokens, five windows
    same(torch.cat(outputs.logits), logits_of(model, outputs.sequences[:, :-1])[0, 10:])
    with pytest.raises(CapacityError):
        forward(model, prompt(1), cache)
    assert cache.get_seq_length() == 30


# --------------------------------------------------------------------------------------------------- devices and dtypes


def test_huggingface_transformers_32624_each_layer_is_where_its_tensors_are():
    model = model_of()
    cache = ArenaCache(model.config, 1, N_TOKENS)
    forward(model, prompt(), cache)
    for layer in cache.layers:
        assert layer.device == layer.keys.device == torch.device("cpu")
    with pytest.raises(DeviceMismatchError, match=r"meta.*cpu|cpu.*meta"):
        cache.update(states(1).to("meta"), states(1).to("meta"), 0)
    assert cache.get_seq_length() == 9
    elsewhere = ArenaCache(model.config, 1, N_TOKENS, device="cuda")
    with pytest.raises(DeviceMismatchError, match="made for cuda"):
        forward(model, prompt(), elsewhere)
    assert elsewhere.arenas == []


def test_huggingface_transformers_34799_keys_may_stay_in_float32_and_values_not():
    cache = ArenaCache(None, 1, 8, dtype=torch.bfloat16)
    keys, values = cache.update(states(3), states(3, dtype=torch.bfloat16), 0)
    assert (keys.dtype, values.dtype) == (torch.float32, torch.bfloat16)
    other = ArenaCache(None, 1, 8, dtype=torch.bfloat16)
    with pytest.raises(DTypeError, match=r"values are torch.float32.*bfloat16"):
        other.update(states(3), states(3), 0)


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16], ids=str)
def test_huggingface_transformers_33741_a_dtype_may_be_a_name(dtype):
    cache = ArenaCache(None, 1, 8, dtype=dtype)
    cache.update(states(3, dtype=torch.bfloat16), states(3, dtype=torch.bfloat16), 0)
    with pytest.raises(DTypeError):
        ArenaCache(None, 1, 8, dtype=dtype).update(states(3).half(), states(3).half(), 0)


def test_huggingface_transformers_30019_a_cache_never_changes_its_dtype():
    cache = ArenaCache(None, 1, 8)
    first = states(3, dtype=torch.bfloat16)
    cache.update(first, first, 0)
    with pytest.raises(DTypeError, match=r"bfloat16"):
        cache.update(states(1), states(1), 0)
    assert torch.equal(cache.layers[0].keys, first)
    assert not hasattr(cache, "float")  # by which accelerate converts what a model returns
    assert not hasattr(cache, "to")


# ------------------------------------------------------------------------------------------------------- several turns


@pytest.mark.parametrize("form", ["all ids", "new ids and the whole mask", "generate_from"])
def test_huggingface_transformers_32019_a_second_turn_is_as_if_all_were_asked_at_once(form):
    model = model_of("gemma3")
    first, question = prompt(9), prompt(5, seed=9)
    cache = dirty(model)
    if form == "generate_from":
        ids = generate_from(model, cache, first, max_new_tokens=6, min_new_tokens=6)
    else:
        ids = generate(model, first, cache).sequences
    whole = torch.cat([ids, question], dim=1)
    expected = generate(model, whole)
    if form == "all ids":
        same_answer(generate(model, whole, cache), expected)
    elif form == "generate_from":
        found = generate_from(
            model,
            cache,
            whole,
            max_new_tokens=6,
            min_new_tokens=6,
            output_logits=True,
            return_dict_in_generate=True,
        )
        same_answer(found, expected)
    else:
        new = whole[:, cache.get_seq_length() :]
        found = generate(model, new, cache, attention_mask=torch.ones_like(whole))
        same(torch.stack(found.logits), torch.stack(expected.logits))
    assert cache.get_seq_length() == whole.shape[1] + 6 - 1


def test_huggingface_transformers_47597_a_mask_of_another_length_is_refused():
    model = model_of()
    cache = dirty(model)
    ids = generate_from(model, cache, prompt(9), max_new_tokens=4)
    held = cache.get_seq_length()
    with pytest.raises(ArenaError, match="mask"):
        generate_from(model, cache, ids, attention_mask=torch.ones(1, 9, dtype=torch.long), max_new_tokens=4)
    assert cache.get_seq_length() == held


def test_huggingface_transformers_34232_another_number_of_rows_says_how_many():
    model = model_of()
    cache = dirty(model, rows=4)
    forward(model, prompt(), cache)
    for n_beams in (2, 4):
        with pytest.raises(ShapeError, match=rf"{n_beams} rows given, the cache holds 1"):
            generate(model, prompt(12), cache, num_beams=n_beams)
    assert cache.get_seq_length() == 9
    cache.batch_repeat_interleave(4)
    ids = torch.cat([prompt(), prompt(3, seed=9)], dim=1)
    same_answer(generate(model, ids, cache, num_beams=4), generate(model, ids, num_beams=4))


def test_huggingface_transformers_27449_a_prompt_is_read_once_for_all_its_beams():
    model = model_of("gemma3")
    ids = torch.cat([prompt(20), prompt(2, seed=9)], dim=1)
    expected = generate(model, ids, num_beams=3)
    cache = dirty(model, rows=3)
    forward(model, prompt(20), cache)
    before = [layer.keys[:, :, :20].clone() for layer in cache.layers]
    for _ in range(2):
        with cache.scope():
            cache.batch_repeat_interleave(3)
            assert cache.group.n_shared == 20  # which reordering beams leaves alone
            same_answer(generate(model, ids, cache, num_beams=3), expected)
        assert cache.batch_size == 1
        assert all(map(torch.equal, before, (layer.keys for layer in cache.layers)))


@pytest.mark.parametrize("name", ["llama", "gemma3", "recurrent"])
def test_huggingface_transformers_46612_beams_are_reordered_in_every_layer(name):
    model = model_of(name)
    orders = []

    class Watched(ArenaCache):
        def reorder_cache(self, beam_idx):
            orders.append(beam_idx.tolist())
            super().reorder_cache(beam_idx)

    outputs = generate(model, prompt(rows=2), Watched(model.config, 8, N_TOKENS), n_new=8, num_beams=4)
    assert any(order != list(range(8)) for order in orders)
    same_answer(outputs, generate(model, prompt(rows=2), n_new=8, num_beams=4, use_cache=name == "recurrent"))


def test_huggingface_transformers_35168_layers_of_different_lengths_are_found_out():
    cache = ArenaCache(None, 1, 16)
    for layer in range(2):
        cache.update(states(5), states(5), layer)
    cache.update(states(2), states(2), 0)
    with pytest.raises(CheckpointError, match=r"layer 0 holds 7 tokens, another 5"):
        cache.checkpoint()
    cache.crop(0)
    assert [layer.get_seq_length() for layer in cache.layers] == [5, 5]
    cache.checkpoint()


# ------------------------------------------------------------------------------------------------- copies, files, autograd


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_huggingface_transformers_32159_a_copy_is_apart_and_goes_on(mode):
    model = model_of("gemma3")
    prefix, ends = prompt(9), [prompt(4, seed=9), prompt(3, seed=10)]
    cache = dirty(model)
    with mode():
        model(input_ids=prefix, **{CACHE: cache})
    for end in ends:
        other = copy.deepcopy(cache)
        same(forward(model, end, other), logits_of(model, torch.cat([prefix, end], dim=1))[:, 9:])
        assert cache.get_seq_length() == 9
    assert not isinstance(cache, torch.nn.Module)


def test_huggingface_transformers_43010_writing_stays_out_of_autograd():
    model = model_of()
    cache = dirty(model)
    with pytest.raises(AutogradError, match=r"no_grad"):
        model(input_ids=prompt(), **{CACHE: cache})
    assert cache.get_seq_length() == 0
    forward(model, prompt(), cache)
    for layer in cache.layers:
        assert layer.keys.grad_fn is None
        assert not layer.keys.requires_grad

    frozen = copy.deepcopy(model).requires_grad_(False)
    other = dirty(frozen)

    def loss(embeddings):  # a gradient of what does not go through the cache
        with torch.no_grad():
            frozen(inputs_embeds=embeddings.detach(), **{CACHE: other})
        return (embeddings * other.layers[0].keys.mean()).sum()

    embeddings = frozen.get_input_embeddings()(prompt()).requires_grad_()
    loss(embeddings).backward()
    assert embeddings.grad.isfinite().all()


def test_microsoft_vibevoice_440_a_cache_is_saved_without_pickle(tmp_path):
    model = model_of("gemma3")
    cache = dirty(model)
    ids = generate_from(model, cache, prompt(), max_new_tokens=6, min_new_tokens=6)
    with pytest.raises(ArenaError):
        pickle.dumps(cache)
    cache.save(tmp_path / "prompt.safetensors")
    other = ArenaCache(model.config, 1, N_TOKENS)
    other.load(tmp_path / "prompt.safetensors")
    same_answer(generate(model, ids, other), generate(model, ids))


def test_nvidia_kvpress_104_every_member_that_this_transformers_has_is_there():
    """A layer of a later transformers with one more method fails here, and not in the middle of an answer."""
    from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    def public(kind):
        return {name for name in dir(kind) if not name.startswith("_")}

    assert public(Cache) | public(DynamicCache) <= public(ArenaCache)
    layer = dirty(model_of()).layers[0]
    assert public(DynamicLayer) | public(DynamicSlidingWindowLayer) <= public(layer)
    own = {"update", "get_mask_sizes", "get_seq_length", "get_max_length", "crop", "reset", "reorder_cache"}
    own |= {"batch_repeat_interleave", "batch_select_indices", "lazy_initialization"}
    for name in own:  # none of them is inherited, since what they do to tensors would be wrong here
        assert getattr(layer, name).__module__.startswith("gpuarena_transformers")


# ------------------------------------------------------------------------------------------------------- compiled code


def compiled_answers(prompts, n_new=6):
    """Answer prompts one after the other: prefilled as usual, decoded by one compiled forward on a static cache."""
    from gpuarena_transformers.static import ArenaStaticCache
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    model = model_of()
    cache = ArenaStaticCache(model.config, 1, N_TOKENS)
    counter = CompileCounter()
    step = torch.compile(model.forward, backend=counter, fullgraph=True)
    places = set()
    for ids in prompts:
        cache.reset()
        logits, answer = [forward(model, ids, cache)[:, -1]], ids
        for _ in range(n_new - 1):
            token = logits[-1].argmax(-1, keepdim=True)
            answer = torch.cat([answer, token], dim=1)
            cache.check_room()
            with torch.no_grad():
                logits.append(step(input_ids=token, **{CACHE: cache}).logits[:, -1])
            places.add(tuple(layer.keys.data_ptr() for layer in cache.layers))
        same(torch.cat(logits), logits_of(model, answer)[0, ids.shape[1] - 1 :])
    torch._dynamo.reset()
    return counter.frame_count, places


def test_huggingface_transformers_30351_a_compiled_step_answers_each_prompt_for_itself():
    """And is compiled once: no length is a constant of it, and nothing it reads moves."""
    n_compiled, places = compiled_answers([prompt(9), prompt(14, seed=4), prompt(3, seed=8)])
    assert n_compiled == 1
    assert len(places) == 1
