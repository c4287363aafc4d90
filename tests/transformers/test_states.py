"""Layers that hold states or indexer keys, in models: by logits against `DynamicCache`, and after going back."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import weakref

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import families  # noqa: E402 - after the skips
from families import CACHE, MODES, TOLERANCE, assert_same  # noqa: E402
from gpuarena_transformers import ArenaCache, ArenaLayer  # noqa: E402
from gpuarena_transformers.indexed import ArenaIndexedLayer  # noqa: E402
from gpuarena_transformers.states import ArenaHybridLayer, ArenaStateLayer  # noqa: E402
from transformers import DynamicCache  # noqa: E402
from transformers.cache_utils import (  # noqa: E402
    DYNAMIC_LAYER_TYPE_MAPPING,
    CacheLayerMixin,
    LinearAttentionCacheLayerMixin,
)

from gpuarena import Arena, CapacityError, CheckpointError, OutOfMemoryError, ShapeError  # noqa: E402
from gpuarena.errors import ArgumentError  # noqa: E402

#: What each has beside keys and values, or instead of them.
NAMES = [
    "bamba", "jamba", "qwen3-next", "qwen3.5", "lfm2", "zamba", "zamba2", "falcon-h1", "nemotron-h", "granite-hybrid",
    "recurrent-gemma", "mamba", "mamba2", "falcon-mamba", "deepseek-v3.2", "glm-moe-dsa",
]  # fmt: skip
STATES_ALONE = ["mamba", "mamba2", "falcon-mamba"]
#: Keeps its states in its own modules.
ELSEWHERE = ["recurrent-gemma"]
N_NEW = 4


def argument(model):
    """Return the name of the cache argument, which models of states alone called cache_params once."""
    return "cache_params" if "cache_params" in inspect.signature(model.forward).parameters else CACHE


def generate(model, arguments, cache=None, *, n_new=N_NEW):
    if cache is not None:
        arguments = arguments | {argument(model): cache}
    return families.generate(model, arguments, n_new=n_new)


def forward(model, ids, cache):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=True, **{argument(model): cache}).logits


def step_by_step(model, ids, cache):
    """Return the logits of tokens that are fed one at a time."""
    return torch.cat([forward(model, piece, cache) for piece in ids.split(1, dim=1)], dim=1)


def prompt_and_ends():
    """Return a prompt, and two ways to go on."""
    ids = families.prompt()["input_ids"]
    return ids[:1, :5], [ids[:1, 5:], ids[1:, 5:8]]


@functools.cache
def expected(name, number):
    """Return the logits of transformers' own cache, which reads the prompt and then goes on."""
    model = families.model(name)
    prompt, ends = prompt_and_ends()
    cache = DynamicCache(config=model.config)
    return forward(model, prompt, cache), step_by_step(model, ends[number], cache)


def states_of(cache):
    return [state for layer in cache.states.layers for _, state in layer.held()]


def are_close(found, wanted):
    torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=0)


# --------------------------------------------------------------------------------------------------- what they compute


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_a_dynamic_cache(name):
    """Beams of prompts with left padding: rows are repeated, and change places in each step."""
    model = families.model(name)
    arguments = MODES["left padding, beam"].arguments(name)
    cache = ArenaCache(model.config, 6, 16)
    outputs = generate(model, arguments, cache)
    assert_same(outputs, generate(model, arguments))
    assert all(layer.device == torch.device("cpu") for layer in cache.states.layers if layer.holds_states)
    for layer in cache.states.layers:
        for (what, number), region in layer.regions.items():
            tensor = (layer.conv_states if what == "conv" else layer.recurrent_states)[number]
            assert tensor.data_ptr() == region.address  # still where it was put first
            assert tensor.shape == (6, *region.shape[1:])


@pytest.mark.parametrize("name", NAMES)
def test_back_to_a_checkpoint_and_on_another_way(name):
    model = families.model(name)
    prompt, ends = prompt_and_ends()
    # Before all else, since one of the models keeps its states in itself.
    expected(name, 0)
    expected(name, 1)
    cache = ArenaCache(model.config, 2, 32)
    empty = cache.checkpoint()
    are_close(forward(model, prompt, cache), expected(name, 0)[0])
    if name in ELSEWHERE and not cache.has_states:  # up to some version its config said nothing of them
        pytest.skip("the config does not tell which layers are recurrent")
    if name in ELSEWHERE:
        with pytest.raises(CheckpointError, match=r"layer 0 holds no state.*RecurrentGemma"):
            cache.checkpoint()
        with pytest.raises(ArgumentError, match="layer 0 holds no state"):
            cache.crop(-1)
    else:
        checkpoint = cache.checkpoint()
        assert checkpoint.nbytes == sum(state.numel() * 4 for state in states_of(cache))
        assert (checkpoint.nbytes > 0) == bool(cache.states.layers)
        assert checkpoint.n_tokens == (0 if name in STATES_ALONE else 5)
        answers = []
        for number in (0, 1, 0):
            answers.append(step_by_step(model, ends[number], cache))
            are_close(answers[-1], expected(name, number)[1])
            cache.rollback(checkpoint)
        assert torch.equal(answers[0], answers[2])  # bit by bit
    cache.rollback(empty)
    assert not states_of(cache)
    if name not in STATES_ALONE:
        assert cache.get_seq_length() == 0
    are_close(forward(model, prompt, cache), expected(name, 1)[0])
    are_close(step_by_step(model, ends[1], cache), expected(name, 1)[1])


@pytest.mark.parametrize("name", ["bamba", "zamba2", "mamba", "deepseek-v3.2"])
def test_a_scope_around_beams(name):
    model = families.model(name)
    prompt, ends = prompt_and_ends()
    whole = {"input_ids": torch.cat([prompt, ends[0][:, :1]], dim=1)}
    whole["attention_mask"] = torch.ones_like(whole["input_ids"])
    if name in STATES_ALONE:  # which nobody slices, as they tell no length
        whole = {"input_ids": ends[0][:, :1], "attention_mask": torch.ones(1, 1, dtype=torch.long)}
    cache = ArenaCache(model.config, 3, 16)
    forward(model, prompt, cache)

    def answer(cache):
        cache.batch_repeat_interleave(3)
        return generate(model, whole | {"num_beams": 3}, cache)

    copies = copy.deepcopy(cache)
    wanted = answer(copies)
    for _ in range(2):
        with cache.scope() as checkpoint:
            assert_same(answer(cache), wanted)
            assert cache.batch_size == 3
        assert cache.batch_size == checkpoint.n_rows == 1
    are_close(step_by_step(model, ends[1], cache), expected(name, 1)[1])


@pytest.mark.parametrize("name", ["qwen3-next", "falcon-mamba"])
def test_drafted_tokens_that_are_rejected(name):
    """huggingface/transformers#49036: a crop does not bring recurrent states back; a checkpoint does."""
    model = families.model(name)
    prompt, ends = prompt_and_ends()
    cache = ArenaCache(model.config, 1, 32)
    forward(model, prompt, cache)
    accepted, drafts = ends[0][:, :1], ends[1]
    before = cache.checkpoint()
    step_by_step(model, torch.cat([accepted, drafts], dim=1), cache)
    for refused in (lambda: cache.crop(-3), lambda: cache.layers[0].crop(-3)):
        with pytest.raises(ArgumentError, match=r"recurrent state, which cannot be cut.*checkpoint\(\)"):
            refused()
    cache.rollback(before)
    are_close(step_by_step(model, ends[0], cache), expected(name, 0)[1])


# ------------------------------------------------------------------------------------------------ steps that fail half-way


@pytest.mark.parametrize("name", ["bamba", "jamba", "falcon-h1"])
def test_a_cache_that_is_full_says_that_states_are_ahead(name):
    """Going on with them gave other logits and no word of it."""
    model = families.model(name)
    prompt, ends = prompt_and_ends()
    cache = ArenaCache(model.config, 1, 6)
    with pytest.raises(
        CapacityError, match="0 of 6 tokens used"
    ):  # before it there was nothing, and after it as well
        forward(model, torch.cat([prompt, ends[0]], dim=1), cache)
    assert (cache.get_seq_length(), cache.batch_size, states_of(cache)) == (0, -1, [])
    forward(model, prompt, cache)
    checkpoint = cache.checkpoint()
    forward(model, ends[1][:, :1], cache)
    with pytest.raises(CapacityError, match="6 of 6 tokens used"):
        forward(model, ends[1][:, 1:2], cache)
    for refused in (cache.checkpoint, cache.scope, lambda: step_by_step(model, ends[0], cache)):
        with pytest.raises(CheckpointError, match=r"a step failed after some recurrent states.*rollback\(\)"):
            refused()
    with pytest.raises(ArgumentError, match="a step failed half-way"):
        cache.crop(0)
    cache.rollback(checkpoint)
    are_close(forward(model, ends[0][:, :1], cache), expected(name, 0)[1][:, :1])
    cache.reset()
    are_close(forward(model, prompt, cache), expected(name, 0)[0])


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_model_that_fails_in_the_middle_of_a_step(monkeypatch, layer):
    name = "bamba"
    model = families.model(name)
    prompt, ends = prompt_and_ends()
    cache = ArenaCache(model.config, 1, 32)
    forward(model, prompt, cache)
    checkpoint = cache.checkpoint()

    def fail(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[layer].feed_forward, "forward", fail)
        with pytest.raises(KeyboardInterrupt):
            step_by_step(model, ends[1], cache)
    cache.rollback(checkpoint)
    are_close(step_by_step(model, ends[0], cache), expected(name, 0)[1])
    # In the first step of all, some layers hold a state afterwards and others do not.
    cache.reset()
    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[layer].feed_forward, "forward", fail)
        with pytest.raises(KeyboardInterrupt):
            forward(model, prompt, cache)
    if layer < 2:
        with pytest.raises(CheckpointError, match="layer 2 holds no state, while others"):
            cache.checkpoint()
    cache.truncate(0)
    are_close(forward(model, prompt, cache), expected(name, 0)[0])


# --------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("name", ["bamba", "deepseek-v3.2", "mamba"])
def test_for_model_takes_one_arena(name):
    model = families.model(name)
    cache = ArenaCache.for_model(model, 16, max_batch_size=2)
    (arena,) = cache.arenas
    ids = families.prompt()["input_ids"]
    forward(model, ids, cache)
    assert cache.arenas == [arena]
    assert 0 <= arena.capacity - arena.stats.top < 256
    stats = cache.stats
    assert stats.reserved_nbytes == sum(
        region.nbytes for part in (*cache.group.layers, *cache.states.layers) for region in regions_of(part)
    )
    assert stats.used_nbytes == stats.bytes_per_token * 2 * stats.n_tokens + sum(
        state.numel() * 4 for state in states_of(cache)
    )


def regions_of(part):
    return part.regions.values() if isinstance(part.regions, dict) else part.regions


@pytest.mark.parametrize("name", NAMES)
def test_an_arena_for_each_kind_has_room_for_all_layers(name, recwarn):
    """No config tells the sizes of states, and the first layer of a kind those of all."""
    model = families.model(name)
    cache = ArenaCache(model.config, 2, 16)
    forward(model, families.prompt()["input_ids"], cache)
    kinds = {"kv", "indexer"} if cache.layers and isinstance(cache.layers[0], ArenaIndexedLayer) else {"kv"}
    kinds = set() if name in STATES_ALONE else kinds
    kinds |= {what for layer in cache.states.layers for what, _ in layer.regions}
    assert len(cache.arenas) == len(kinds)
    assert not [warning for warning in recwarn if "arena" in str(warning.message)]


@pytest.mark.parametrize("name", ["bamba", "falcon-h1", "deepseek-v3.2"])
def test_a_given_arena(name):
    model = families.model(name)
    prompt, _ = prompt_and_ends()
    measured = ArenaCache.for_model(model, 16, max_batch_size=2).arena
    arena = Arena(measured.capacity, backend="torch")
    cache = ArenaCache(model.config, 2, 16, arena=arena)
    are_close(forward(model, prompt, cache), expected(name, 0)[0])
    assert cache.arenas == [arena]
    # All sizes that can be short, down to less than the first state.
    for missing in (1, measured.capacity // 2, measured.capacity - 2048):
        arena = Arena(measured.capacity - missing, backend="torch")
        cache = ArenaCache(model.config, 2, 16, arena=arena)
        with pytest.raises(OutOfMemoryError, match="the arena given has"):
            forward(model, prompt, cache)
        assert cache.arenas == [arena]
        if (
            name == "deepseek-v3.2"
        ):  # its first layer has its keys by the time that it shows those of the indexer
            cache.truncate(0)
        assert (cache.get_seq_length(), states_of(cache)) == (0, [])


def test_a_batch_of_another_size_after_a_reset():
    model = families.model("bamba")
    ids = families.prompt()["input_ids"]
    cache = ArenaCache(model.config, 3, 16)
    wanted = forward(model, ids, DynamicCache(config=model.config))
    are_close(forward(model, ids, cache), wanted)
    addresses = [layer.conv_states[0].data_ptr() for layer in cache.states.layers]
    with pytest.raises(ShapeError, match=r"layer 0: 1 rows given, the cache holds 2; reset\(\) starts anew"):
        forward(model, ids[:1], cache)
    for rows in ([1], [1, 0, 1], [0]):
        cache.reset()
        assert [layer.conv_states[0] for layer in cache.states.layers] == [None, None]
        are_close(forward(model, ids[rows], cache), wanted[rows])
        assert cache.batch_size == len(rows)
        assert [layer.conv_states[0].data_ptr() for layer in cache.states.layers] == addresses
    cache.reset()
    with pytest.raises(ShapeError, match="layer 0: 4 rows given, the cache was made for at most 3"):
        forward(model, ids.repeat(2, 1), cache)
    assert cache.batch_size == -1


def test_beams_move_their_states_without_memory():
    model = families.model("bamba")
    cache = ArenaCache(model.config, 4, 16)
    forward(model, families.prompt()["input_ids"].repeat(2, 1), cache)
    rows = torch.tensor([3, 1, 1, 0])
    wanted = [state[rows] for state in states_of(cache)]
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        cache.reorder_cache(rows)
    assert sum(max(event.self_cpu_memory_usage, 0) for event in profiler.events()) == 0
    for state, rearranged in zip(states_of(cache), wanted, strict=True):
        assert torch.equal(state, rearranged)


def test_copies_of_states_go_with_their_checkpoint_and_a_cache_with_its_last_name():
    model = families.model("falcon-h1")
    cache = ArenaCache(model.config, 1, 16)
    forward(model, prompt_and_ends()[0], cache)
    checkpoint = cache.checkpoint()
    states, _ = checkpoint.states.layers[0]
    (tensor, *_) = map(weakref.ref, states.values())
    kept = weakref.ref(cache)
    gc.collect()
    gc.disable()
    try:
        del checkpoint, states
        assert tensor() is None
        del cache
        assert kept() is None
    finally:
        gc.enable()


# ------------------------------------------------------------------------------------- the contract of a cache of states


def test_what_kind_of_objects_the_layers_are():
    cache = ArenaCache(families.config("falcon-h1"), 1, 16)
    (layer, _) = cache.layers
    assert type(layer) is ArenaHybridLayer
    assert isinstance(layer, CacheLayerMixin)
    assert isinstance(layer, LinearAttentionCacheLayerMixin)
    assert isinstance(layer, (ArenaLayer, ArenaStateLayer))
    assert (cache.is_linear, cache.get_max_length(), layer.get_max_length()) == ([False] * 2, 16, 16)
    assert repr(layer) == "ArenaHybridLayer(0 of 16 tokens)"
    cache = ArenaCache(families.config("bamba"), 1, 16)
    assert [type(layer) for layer in cache.layers] == [ArenaStateLayer, ArenaLayer, ArenaStateLayer]
    assert cache.is_linear == [True, False, True]
    assert (cache.batch_size, cache.is_compileable, cache.is_croppable) == (-1, False, False)
    assert repr(cache.layers[0]) == "ArenaStateLayer(0 states of 0 rows)"
    assert {cls.__module__.split(".")[0] for cls in DYNAMIC_LAYER_TYPE_MAPPING.values()} == {"transformers"}


def test_a_cache_of_states_alone_counts_no_tokens():
    config = families.config("mamba")
    cache, dynamic = ArenaCache(config, 2), DynamicCache(config=config)
    for own in (cache, dynamic):
        for refused in (own.get_seq_length, lambda own=own: own.get_mask_sizes(1, 0)):
            with pytest.raises(ValueError, match="Attention layers"):
                refused()
        assert own.get_max_length() == -1
        assert all(own.is_linear)
        assert not own.is_initialized
    assert repr(cache) == "ArenaCache(0 of 2 rows, 2 layers)"
    assert cache.checkpoint().n_tokens == 0
    model = families.model("mamba")
    ids = families.prompt()["input_ids"]
    forward(model, ids, cache)
    checkpoint = cache.checkpoint()
    assert (checkpoint.n_tokens, checkpoint.n_rows, cache.batch_size) == (0, 2, 2)
    cache.crop(0)
    with pytest.raises(ArgumentError, match="recurrent state, which cannot be cut"):
        cache.crop(-1)
    with pytest.raises(ArgumentError, match="the cache holds only 0 tokens"):
        cache.truncate(1)
    wanted = forward(model, ids[:, :1], copy.deepcopy(cache))
    cache.batch_select_indices(torch.tensor([1]))  # it has a copy of all rows, and so a way back
    forward(model, ids[:1, :1], cache)
    cache.rollback(checkpoint)
    assert torch.equal(forward(model, ids[:, :1], cache), wanted)
    cache.reset()
    with pytest.raises(CheckpointError, match="is dead"):
        cache.rollback(checkpoint)


# ------------------------------------------------------------------------------------ convolutions alone, that can be cut


@pytest.mark.parametrize("mode", ["draft model", "prompt lookup"])
def test_assisted_decoding_cuts_convolutions_back(mode):
    name = "lfm2"
    model = families.model(name)
    removed = []

    class Watched(ArenaCache):
        def crop(self, tokens_to_remove):
            removed.append(-int(tokens_to_remove))
            super().crop(tokens_to_remove)

    cache = Watched(model.config, 1, families.N_TOKENS)
    arguments = MODES[mode].arguments(name)
    assert_same(families.generate(model, arguments, cache), families.reference(name, mode))
    assert any(removed)
    layer = cache.layers[0]
    assert layer.conv_states[0].data_ptr() == layer.regions["conv", 0].address
    assert layer.conv_states[0].shape == (1, 64, 3)
    cache.reset()
    greedy = MODES["greedy"].arguments(name)
    greedy = {key: value[:1] if isinstance(value, torch.Tensor) else value for key, value in greedy.items()}
    assert_same(generate(model, greedy, cache), generate(model, greedy))


def test_cutting_a_convolution_needs_the_past():
    name = "lfm2"
    model = families.model(name)
    prompt, ends = prompt_and_ends()
    cache = ArenaCache(model.config, 1, 32)
    forward(model, prompt, cache)
    with pytest.raises(
        ArgumentError, match=r"past 0 tokens are recorded.*checkpoint\(\).*activate_past_recording"
    ):
        cache.crop(-1)
    cache.crop(0)
    cache.activate_past_recording()
    checkpoint = cache.checkpoint()
    forward(model, ends[1], cache)
    with pytest.raises(ArgumentError, match="of whose past 3 tokens are recorded"):
        cache.crop(-4)
    assert cache.get_seq_length() == 8
    cache.crop(-2)
    assert cache.get_seq_length() == 6
    with pytest.raises(ArgumentError, match="past 0 tokens are recorded"):
        cache.crop(-1)
    are_close(step_by_step(model, ends[1][:, 1:], cache), expected(name, 1)[1][:, 1:])
    cache.rollback(checkpoint)
    are_close(forward(model, ends[0], cache), expected(name, 0)[1])
    cache.rollback(checkpoint)
    for layer in cache.layers:
        layer.record_past = False  # as `generate` does when it is done
    are_close(step_by_step(model, ends[0], cache), expected(name, 0)[1])
    # A recording that begins with the first token can be cut to any length.
    cache.reset()
    cache.activate_past_recording()
    forward(model, torch.cat([prompt, ends[1]], dim=1), cache)
    cache.crop(-7)
    are_close(forward(model, torch.cat([prompt[:, 1:], ends[0]], dim=1), cache)[:, 4:], expected(name, 0)[1])
