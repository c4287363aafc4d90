"""`generate_from` where nothing can be cut, or nothing moves: models with states, and static caches."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import families  # noqa: E402 - after the skips
from families import CACHE, assert_same, generate  # noqa: E402
from gpuarena_transformers import ArenaCache, ArenaStaticCache  # noqa: E402
from gpuarena_transformers._view import GOES_ON_FROM_STATES  # noqa: E402
from test_generate_from import Through, forwards, ids_of  # noqa: E402

GOES_ON = ["falcon-h1", "granite-hybrid", "lfm2", "lfm2-moe", "nemotron-h", "qwen3.5", "qwen3-next", "zamba2"]
N_NEW = 4


def turn(model, cache, ids, mask=None, **options):
    """Generate with and without the cache, compare logits, and return the sequences and the tokens of the first step."""
    arguments = {"input_ids": ids} | ({} if mask is None else {"attention_mask": mask}) | options
    with forwards(model) as counts:
        outputs = generate(Through(model, cache), arguments, n_new=N_NEW)
    n_run = counts[0]
    assert_same(outputs, generate(model, arguments, n_new=N_NEW))
    return outputs.sequences, n_run


def test_the_list_is_what_is_tried():
    assert {families.config(name).model_type for name in GOES_ON} == GOES_ON_FROM_STATES


@pytest.mark.parametrize("name", GOES_ON)
def test_a_chat_that_only_grows_goes_on_from_its_states(name):
    """Several tokens at once behind a state, also of more rows and behind padding."""
    model, cache = families.model(name), ArenaCache(families.config(name), 2, 48)
    ids, mask = ids_of(2), torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = 0
    for number, expected in enumerate([9, 6, 6]):
        sequences, n_run = turn(model, cache, ids, mask)
        assert n_run == expected  # the last token of the answer before, and 5 of the question
        ids = torch.cat([sequences, ids_of(2, 5, number)], dim=1)
        mask = torch.cat([mask, torch.ones(2, N_NEW + 5, dtype=torch.long)], dim=1)
    # The template rewrote the last turn: no state goes back.
    assert turn(model, cache, ids[:, :20], mask[:, :20])[1] == 20


@pytest.mark.parametrize("cache_class", [ArenaCache, ArenaStaticCache])
def test_a_state_that_is_no_prefix_starts_over(cache_class):
    model = families.model("qwen3-next")
    cache = cache_class(model.config, 2, 48)
    ids, _ = turn(model, cache, ids_of(2))
    longer = torch.cat([ids, ids_of(2, 5, 8)], dim=1)
    # other rows; other tokens; the same ones with padding behind what is held
    assert turn(model, cache, longer.flip(0))[1] == 18
    cache.reset()
    turn(model, cache, ids_of(2))
    assert turn(model, cache, longer[:1])[1] == 18
    cache.reset()
    turn(model, cache, ids_of(2))
    mask = torch.ones_like(longer)
    mask[0, 13:15] = 0
    with forwards(model) as counts:
        Through(model, cache).generate(input_ids=longer, attention_mask=mask, max_new_tokens=1)
    assert counts[0] == 18
    # tokens that nobody noted
    cache.reset()
    ids, _ = turn(model, cache, ids_of(1))
    with torch.no_grad():
        model(input_ids=ids_of(1, 2, 5), **{CACHE: cache})
    assert turn(model, cache, torch.cat([ids, ids_of(1, 5, 8)], dim=1))[1] == 18


def test_beams_leave_a_state_that_is_not_trusted():
    model = families.model("granite-hybrid")
    cache = ArenaCache(model.config, 3, 48)
    ids, _ = turn(model, cache, ids_of(1), num_beams=3)
    assert turn(model, cache, torch.cat([ids, ids_of(1, 5, 8)], dim=1))[1] == 18


def test_a_step_that_failed_leaves_a_state_that_is_not_trusted():
    model = families.model("qwen3-next")
    cache = ArenaCache(model.config, 1, 48)
    ids, _ = turn(model, cache, ids_of(1))
    handle = model.model.layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), torch.no_grad():
        model(input_ids=ids[:, -1:], **{CACHE: cache})
    handle.remove()
    assert turn(model, cache, torch.cat([ids, ids_of(1, 5, 8)], dim=1))[1] == 18


@pytest.mark.parametrize("name", ["bamba", "jamba", "zamba"])
def test_models_that_take_a_state_for_empty_start_over(name):
    model, cache = families.model(name), ArenaCache(families.config(name), 1, 48)
    ids, _ = turn(model, cache, ids_of(1))
    assert turn(model, cache, torch.cat([ids, ids_of(1, 5, 8)], dim=1))[1] == 18


# ---------------------------------------------------------------------------------------------------------- static caches


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_turns_on_a_static_cache_run_what_is_new(name):
    model, cache = families.model(name), ArenaStaticCache(families.config(name), 2, 48, bucket=16)
    ids, mask = ids_of(2), torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = 0
    for number, expected in enumerate([9, 6, 6]):
        sequences, n_run = turn(model, cache, ids, mask)
        assert n_run == expected
        ids = torch.cat([sequences, ids_of(2, 5, number)], dim=1)
        mask = torch.cat([mask, torch.ones(2, N_NEW + 5, dtype=torch.long)], dim=1)
    assert turn(model, cache, ids[:, :20], mask[:, :20])[1] == 1  # cut back
    assert turn(model, cache, ids[1:, :14], mask[1:, :14])[1] == 1  # one of the rows
    assert turn(model, cache, ids[1:, :12], mask[1:, :12], num_beams=2)[1] == 1  # and that one twice


def test_a_static_cache_forgets_ids_with_the_tokens():
    model, cache, ids = families.model("llama"), ArenaStaticCache(families.config("llama"), 3, 48), ids_of(2)
    held = cache.transcript
    Through(model, cache).generate(input_ids=ids, max_new_tokens=1)
    assert (len(held), held.ids.shape[0]) == (9, 2)
    mark = cache.checkpoint()
    with torch.no_grad():
        model(input_ids=ids[:, :2], **{CACHE: cache})
    cache.rollback(mark)
    assert len(held) == 9
    cache.truncate(7)
    assert torch.equal(held.ids, ids[:, :7])
    cache.batch_select_indices(torch.tensor([1]))
    assert torch.equal(held.ids, ids[1:, :7])
    cache.crop(-1)
    mark = cache.checkpoint()
    cache.batch_repeat_interleave(3)
    assert torch.equal(held.ids, ids[1:, :6].expand(3, -1))
    cache.rollback(mark)
    assert torch.equal(held.ids, ids[1:, :6])
    cache.reset()
    assert len(held) == 0
    Through(model, cache).generate(input_ids=ids, max_new_tokens=1)
    cache.reorder_cache(torch.tensor([1, 0]))
    assert len(held) == 0
    for take_back in (lambda layer: layer.crop(-4), lambda layer: layer.reset()):
        held.note(ids)
        for layer in cache.layers:
            take_back(layer)
        assert len(held) == cache.stats.n_tokens


def test_compiled_steps_are_counted_before_ids_are_noted():
    """The host has not looked at the length when `generate` returns."""
    torch._dynamo.reset()
    model, cache = families.model("llama"), ArenaStaticCache(families.config("llama"), 1, 48)
    ids = ids_of(1)
    step = torch.compile(model.forward, backend="eager")
    original = model.forward

    def forward(input_ids=None, **arguments):
        return (step if input_ids.shape[1] == 1 else original)(input_ids=input_ids, **arguments)

    model.forward = forward
    try:
        ids, _ = turn(model, cache, ids)
        assert len(cache.transcript) == 12
        assert turn(model, cache, torch.cat([ids, ids_of(1, 5, 8)], dim=1))[1] == 6
    finally:
        del model.forward
        torch._dynamo.reset()
