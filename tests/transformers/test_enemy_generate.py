"""Misuse and rare events between two calls: what is answered is that of a model without a cache, or a typed error."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import families  # noqa: E402 - after the skips
from families import CACHE, assert_same, generate  # noqa: E402
from gpuarena_transformers import (  # noqa: E402
    ArenaCache,
    ArenaStaticCache,
    capacity_for,
    disable,
    enable,
    generate_from,
)
from transformers import AutoModelForCausalLM  # noqa: E402
from transformers.generation.streamers import BaseStreamer  # noqa: E402

from gpuarena.errors import ArgumentError, ArgumentTypeError, NotCopyableError  # noqa: E402

N_NEW = 3


class Through:
    """A model that generates on one cache, for the `generate` of `families`."""

    def __init__(self, model, cache):
        self.model, self.cache = model, cache

    def generate(self, **arguments):
        return generate_from(self.model, self.cache, **arguments)


class Adapted(torch.nn.Module):
    """A linear layer with a frozen adapter that is switched by attributes, as those of PEFT are."""

    def __init__(self, base):
        super().__init__()
        self.base, self.added = base, torch.nn.Linear(base.in_features, base.out_features, bias=False)
        self.requires_grad_(False)
        self._disable_adapters = False
        self.scaling = {"default": 1.0}

    def forward(self, x):
        return self.base(x) + (0.0 if self._disable_adapters else self.scaling["default"]) * self.added(x)


class Calls(BaseStreamer):
    """Call something at the given token."""

    def __init__(self, at, what):
        self.at, self.what = at, what

    def put(self, value):
        self.at -= 1
        if self.at == 0:
            self.what()

    def end(self):
        pass


def fresh(seed=0):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(families.config("llama")).eval()


def ids_of(n_rows=1, n_tokens=9, seed=3):
    return torch.randint(3, 128, (n_rows, n_tokens), generator=torch.Generator().manual_seed(seed))


def run(model, cache, ids):
    with torch.no_grad():
        return model(input_ids=ids, **{CACHE: cache}).logits


def assert_as_without(model, cache, arguments):
    assert_same(
        generate(Through(model, cache), arguments, n_new=N_NEW), generate(model, arguments, n_new=N_NEW)
    )


# ------------------------------------------------------------------------------------------- the model changes in between


def replaced_twice(model, layer):
    # Python gives the second the id of the first, and versions begin with 0.
    for _ in range(2):
        layer.weight = torch.nn.Parameter(torch.randn_like(layer.weight))
        gc.collect()


def data_replaced(model, layer):
    layer.weight.data = torch.randn_like(layer.weight)


def buffer_written_to(model, layer):
    model.model.rotary_emb.inv_freq.mul_(0.5)


def training(model, layer):
    model.model.layers[0].self_attn.attention_dropout = 0.5
    model.train()


def hooked(model, layer):
    layer.register_forward_hook(lambda module, args, output: output + 1)


CHANGES = [replaced_twice, data_replaced, buffer_written_to, training, hooked]


@pytest.mark.parametrize("change", CHANGES, ids=[change.__name__ for change in CHANGES])
def test_a_changed_model_starts_over(change):
    model, ids = fresh(), ids_of()
    layer = model.model.layers[0].self_attn.k_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach().clone())  # of version 0, as loaded ones are
    cache = ArenaCache(model.config, 1, 32)
    generate_from(model, cache, ids, max_new_tokens=N_NEW, do_sample=False)
    assert cache.transcript.is_of(model)
    change(model, layer)
    assert not cache.transcript.is_of(model)
    assert_as_without(model, cache, {"input_ids": ids})


@pytest.mark.parametrize("name", ["_disable_adapters", "scaling"])
def test_an_adapter_that_is_switched_starts_over(name):
    model, ids = fresh(), ids_of()
    adapted = Adapted(model.model.layers[0].self_attn.k_proj)
    model.model.layers[0].self_attn.k_proj = adapted
    cache = ArenaCache(model.config, 1, 32)
    generate_from(model, cache, ids, max_new_tokens=N_NEW, do_sample=False)
    if name == "scaling":
        adapted.scaling["default"] = 3.0
    else:
        adapted._disable_adapters = True
    assert_as_without(model, cache, {"input_ids": ids})


def test_an_enabled_model_that_is_converted_gets_another_arena():
    model, plain, ids = fresh(), fresh(), ids_of()
    switch = enable(model, max_context_length=32)
    generate(model, {"input_ids": ids}, n_new=N_NEW)
    for dtype in (torch.float64, torch.float32):
        model.to(dtype)
        plain.to(dtype)
        assert_same(
            generate(model, {"input_ids": ids}, n_new=N_NEW), generate(plain, {"input_ids": ids}, n_new=N_NEW)
        )
        assert switch.cache.layers[0].keys.dtype == dtype
    held = switch.cache
    generate(model, {"input_ids": ids}, n_new=N_NEW)
    assert switch.cache is held
    disable(model)


def test_an_enabled_model_in_an_autocast():
    model, plain, ids = fresh(), fresh(), ids_of()
    with enable(model, max_context_length=32, attention=False) as switch:
        generate(model, {"input_ids": ids}, n_new=N_NEW)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = generate(model, {"input_ids": ids}, n_new=N_NEW)
            expected = generate(plain, {"input_ids": ids}, n_new=N_NEW)
        assert (outputs.logits[0] - expected.logits[0]).abs().max() < 1e-2  # of bfloat16
        assert switch.cache.layers[0].values.dtype == torch.bfloat16
        assert_same(
            generate(model, {"input_ids": ids}, n_new=N_NEW), generate(plain, {"input_ids": ids}, n_new=N_NEW)
        )


# ------------------------------------------------------------------------------------------- the cache changes in between


@pytest.mark.parametrize("value", [2, -1])
def test_a_mask_of_other_numbers_gives_other_positions(value):
    model, ids = fresh(), ids_of()
    cache = ArenaCache(model.config, 1, 32)
    ones = torch.ones_like(ids)
    for mask in (ones, value * ones, ones):
        assert_as_without(model, cache, {"input_ids": ids, "attention_mask": mask})


@pytest.mark.parametrize("method", ["crop", "reset"])
def test_layers_that_are_cut_one_by_one(method):
    model, ids = fresh(), ids_of()
    cache = ArenaCache(model.config, 1, 32)
    generate_from(model, cache, ids, max_new_tokens=N_NEW, do_sample=False)
    for layer in cache.layers:
        layer.crop(-7) if method == "crop" else layer.reset()
    run(model, cache, ids_of(1, 10, 9))
    assert_as_without(model, cache, {"input_ids": ids})


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("what", ["forward", "reset", "crop"])
def test_a_streamer_that_disturbs_the_cache_leaves_nothing_false_behind(what, at):
    model, ids = fresh(), ids_of()
    cache = ArenaCache(model.config, 1, 32)

    def disturb():
        if what == "forward":
            run(model, cache, ids_of(1, 2, 7))
        elif what == "reset":
            cache.reset()
        elif cache.get_seq_length():
            cache.crop(-1)

    answer = generate_from(
        model, cache, ids, max_new_tokens=5, min_new_tokens=5, do_sample=False, streamer=Calls(at, disturb)
    )
    assert_as_without(model, cache, {"input_ids": torch.cat([answer, ids_of(1, 3, 8)], 1)})


@pytest.mark.parametrize("name", ["falcon-h1", "mamba", "deepseek-v4", "gemma3"])
def test_a_cache_that_nobody_disturbs_is_not_emptied(name, monkeypatch):
    model = families.model(name)
    cache = ArenaCache(model.config, 1, 32)
    resets = []
    monkeypatch.setattr(ArenaCache, "reset", lambda self: resets.append(1))
    generate_from(model, cache, ids_of(), max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert len(resets) == 1  # at the beginning


@pytest.mark.parametrize("empty", ["reset", "truncate"])
def test_a_cache_that_was_emptied_is_nobodys(empty):
    first, second, ids = fresh(), fresh(5), ids_of()
    cache = ArenaCache(first.config, 1, 32)
    generate_from(first, cache, ids, max_new_tokens=N_NEW)
    cache.reset() if empty == "reset" else cache.truncate(0)
    run(second, cache, ids)
    assert_as_without(second, cache, {"input_ids": ids})
    with pytest.raises(ArgumentError, match="of another model"):
        generate_from(first, cache, ids, max_new_tokens=N_NEW)


@pytest.mark.parametrize(
    "ids",
    [[5, 6], torch.tensor([5, 6]), torch.ones(1, 3), None, torch.zeros(0, 3, dtype=torch.long)],
    ids=str,
)
def test_ids_that_cannot_be_noted(ids):
    cache = ArenaCache(families.config("llama"), 1, 32)
    cache.transcript.note(torch.tensor([[5, 6, 7]]))
    with pytest.raises(ArgumentTypeError, match="ids must be"):
        cache.transcript.note(ids)
    with pytest.raises(ArgumentTypeError, match="mask must be"):
        cache.transcript.note(torch.tensor([[5, 6]]), torch.ones(1, 3))
    assert len(cache.transcript) == 3


@pytest.mark.parametrize("wrong", ["a", 1.5, -0.5, None, torch.tensor([-1, -1])], ids=str)
@pytest.mark.parametrize("kind", [ArenaCache, ArenaStaticCache])
def test_crops_that_are_no_number_of_tokens(kind, wrong):
    model = families.model("llama")
    cache = kind(model.config, 1, 32)
    run(model, cache, ids_of())
    with pytest.raises(ArgumentTypeError, match="crop takes an integer"):
        cache.crop(wrong)
    assert int(cache.get_seq_length()) == 9


# -------------------------------------------------------------------------------------------------------- the rest


@pytest.mark.parametrize("bucket", [None, 4])
def test_a_static_cache_that_was_rolled_back_to_fewer_rows_shows_those(bucket):
    model, ids = families.model("llama"), ids_of()
    cache = ArenaStaticCache(model.config, 3, 32, bucket=bucket)
    run(model, cache, ids)
    with cache.scope():
        cache.batch_repeat_interleave(3)
        run(model, cache, ids_of(3, 1))
    for layer in cache.layers:
        assert layer.keys.shape[0] == layer.values.shape[0] == layer.batch_size == 1
        assert layer.shown_keys.shape[0] == layer.shown_values.shape[0] == 1
    compiled = torch.compile(model.forward, backend="eager")
    torch._dynamo.reset()
    cache.check_room(1)
    with torch.no_grad():
        found = compiled(input_ids=ids[:, :1], position_ids=torch.tensor([[9]]), **{CACHE: cache}).logits
        wanted = model(input_ids=torch.cat([ids, ids[:, :1]], 1)).logits[:, -1:]
    assert (found - wanted).abs().max() < families.TOLERANCE
    assert cache.stats.n_rows == 1


def test_a_static_cache_of_no_config():
    with pytest.raises(ArgumentTypeError, match="config must be"):
        ArenaStaticCache(None, 1, 32)


@pytest.mark.parametrize("name", ["num_beams", "num_return_sequences", "prompt_lookup_num_tokens"])
@pytest.mark.parametrize("value", [0, -2, "3", True, 2.5], ids=str)
def test_a_capacity_for_what_is_no_number(name, value):
    with pytest.raises((ArgumentError, ArgumentTypeError), match=name):
        capacity_for(None, 9, **{name: value})


def test_a_switch_is_not_copied_and_nothing_can_be_disabled():
    model = fresh()
    with enable(model, max_context_length=32) as switch:
        for make in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(NotCopyableError):
                make(switch)
        assert "generate" not in vars(type(copy.deepcopy(model)))
    disable(None)
    disable(model)
