"""Assisted decoding with both models' caches in one arena."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import families  # noqa: E402 - after the skips
from gpuarena_transformers import ArenaCache, CacheInUseError, generate_from  # noqa: E402

from gpuarena import Arena  # noqa: E402
from gpuarena.errors import ArgumentError, CapacityError  # noqa: E402

NAMES = ("llama", "qwen2", "mistral")


def ids_of(n_tokens=9, seed=3):
    return torch.randint(3, 128, (1, n_tokens), generator=torch.Generator().manual_seed(seed))


def pair(name, arena, capacity=64):
    return [
        ArenaCache(model.config, 1, capacity, arena=arena)
        for model in (families.model(name), families.draft(name))
    ]


def answer(name, ids, **more):
    options = {
        "max_new_tokens": 12,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    model, draft = families.model(name), families.draft(name)
    if "cache" in more:
        cache = more.pop("cache")
        return generate_from(model, cache, ids, assistant_model=draft, **options, **more)
    return model.generate(ids, assistant_model=draft, **options, **more)


@pytest.mark.parametrize("name", NAMES)
def test_two_caches_in_one_arena_answer_as_two_dynamic_caches(name):
    arena = Arena("4MiB", backend="torch", device="cpu")
    cache, draft_cache = pair(name, arena)
    ids, used = ids_of(), set()
    for turn in range(3):  # the same again, and longer each time
        expected = answer(name, ids)
        found = answer(name, ids, cache=cache, assistant_cache=draft_cache)
        assert torch.equal(found.sequences, expected.sequences)
        for ours, theirs in zip(found.logits, expected.logits, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=0)
        for one in (cache, draft_cache):
            assert int(one.get_seq_length()) > ids.shape[1] - 2
            for layer in one.layers:
                assert arena.address <= layer.keys.data_ptr() < arena.address + arena.capacity
        used.add(arena.stats.used)
        ids = torch.cat([found.sequences, ids_of(3, seed=turn)], dim=1)
    assert len(used) == 1  # the first turn takes the regions, the others nothing


def test_the_draft_model_reads_the_prompt_once_and_then_only_what_is_new():
    cache, draft_cache = pair("llama", Arena("4MiB", backend="torch", device="cpu"))
    counts = []
    handle = families.draft("llama").register_forward_pre_hook(
        lambda module, args, kwargs: counts.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        answer("llama", ids_of(20), cache=cache, assistant_cache=draft_cache)
    finally:
        handle.remove()
    assert counts[0] == 20
    assert len(counts) > 3
    assert max(counts[1:]) <= 6


def test_what_leaves_no_sense():
    cache, draft_cache = pair("llama", Arena("4MiB", backend="torch", device="cpu"))
    model, draft = families.model("llama"), families.draft("llama")
    with pytest.raises(ArgumentError, match="assistant_model="):
        generate_from(model, cache, ids_of(), assistant_cache=draft_cache, max_new_tokens=2)
    with pytest.raises(ArgumentError, match="cache of the model"):
        answer("llama", ids_of(), cache=cache, assistant_cache=cache)
    with pytest.raises(ArgumentError, match="own tokenizer"):
        generate_from(
            model,
            cache,
            ids_of(),
            assistant_cache=draft_cache,
            assistant_model=draft,
            assistant_tokenizer=object(),
        )
    assert int(cache.get_seq_length()) == 0


def test_a_draft_cache_that_is_too_small_is_refused_before_the_first_forward():
    arena = Arena("4MiB", backend="torch", device="cpu")
    cache, _ = pair("llama", arena)
    small = ArenaCache(families.draft("llama").config, 1, 10, arena=arena)
    with pytest.raises(CapacityError):
        answer("llama", ids_of(), cache=cache, assistant_cache=small)
    assert int(cache.get_seq_length()) == int(small.get_seq_length()) == 0


def test_a_draft_cache_serves_one_call_at_a_time():
    cache, draft_cache = pair("llama", Arena("4MiB", backend="torch", device="cpu"))
    seen = []

    def look(module, args, kwargs):
        if not seen:
            seen.append(True)
            with pytest.raises(CacheInUseError):
                generate_from(families.draft("llama"), draft_cache, ids_of(), max_new_tokens=2)

    handle = families.model("llama").register_forward_pre_hook(look, with_kwargs=True)
    try:
        answer("llama", ids_of(), cache=cache, assistant_cache=draft_cache)
    finally:
        handle.remove()
    assert seen
