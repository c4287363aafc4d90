"""The programs of docs/examples run, and say what the same model says without a cache."""

from __future__ import annotations

import itertools
import runpy
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

EXAMPLES = Path(__file__).resolve().parents[1] / "docs" / "examples"
PROGRAMS = sorted(path.name for path in EXAMPLES.glob("*.py"))


@pytest.fixture(autouse=True)
def examples_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield
    for path in EXAMPLES.glob("*.py"):
        sys.modules.pop(path.stem, None)


def model(**shape):
    import gpt

    return gpt.GPT(gpt.Config(**shape)).eval()


def cache_for(model, batch=1, max_tokens=64):
    from gpuarena import Arena
    from gpuarena.kv import KVCache

    spec = model.config.kv_spec()
    return KVCache(
        Arena(spec.arena_nbytes(batch, max_tokens), backend="torch"), spec, batch=batch, max_tokens=max_tokens
    )


def logits_of(model, tokens):
    """The logits of all positions, by plain attention over repeated heads, with nothing of the library in it."""
    group = model.config.heads // model.config.kv_heads

    def plain(layer, q, keys, values):
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        n = q.shape[2]
        scores = q @ keys.transpose(2, 3) / model.config.head_dim**0.5
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
        return scores.softmax(-1) @ values

    with torch.inference_mode():
        return model(torch.as_tensor(tokens).reshape(-1, len(tokens[0])), 0, plain)


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_program_runs(program, capsys):
    runpy.run_path(str(EXAMPLES / program), run_name="__main__")
    assert capsys.readouterr().out


def test_they_are_short():
    assert PROGRAMS == ["gpt.py", "gpt_paged.py", "speculative.py", "tree_search.py"]
    for program in PROGRAMS:
        assert len((EXAMPLES / program).read_text().splitlines()) < 150


@pytest.mark.parametrize("chunks", [[20], [7, 1, 1, 11], [1] * 20])
def test_the_logits_with_the_cache_are_those_without(chunks):
    import gpt

    one, tokens = model(), torch.randint(256, (2, 20), generator=torch.Generator().manual_seed(1))
    cache, got, start = cache_for(one, batch=2), [], 0
    with torch.inference_mode():
        for n in chunks:
            got.append(gpt.with_cache(one, cache, tokens[:, start : start + n]))
            start += n
        expected = logits_of(one, tokens.tolist())
        assert torch.allclose(torch.cat(got, 1), expected, atol=1e-4, rtol=1e-4)
        assert torch.allclose(gpt.without_cache(one, tokens), expected, atol=1e-4, rtol=1e-4)


def test_an_error_in_the_middle_of_the_model_leaves_the_cache_as_it_was():
    import gpt

    one = model()
    cache = cache_for(one)
    with torch.inference_mode():
        gpt.with_cache(one, cache, torch.arange(5)[None])
        one.blocks[2].qkv.forward = lambda x: 1 / 0
        with pytest.raises(ZeroDivisionError):
            gpt.with_cache(one, cache, torch.arange(3)[None])
    assert [layer.length for layer in cache.layers] == [5] * 4


def test_sampling_in_parallel_is_sampling_from_the_model():
    """The answers are those that the same random numbers choose from logits that no cache has touched."""
    import gpt_paged

    from gpuarena import Arena
    from gpuarena.kv import PagedKVCache

    one = model()
    cache = PagedKVCache(Arena("4MiB", backend="torch"), one.config.kv_spec(), num_pages=40, page_size=4)
    prompt = torch.arange(18)
    answers = gpt_paged.sample(one, cache, prompt, n_answers=3, n_tokens=9, seed=5)
    generator = torch.Generator().manual_seed(5)
    rows = prompt.expand(3, -1)
    for _ in range(9):
        chances = logits_of(one, rows.tolist())[:, -1].softmax(-1)
        rows = torch.cat([rows, torch.multinomial(chances, 1, generator=generator)], 1)
    assert answers.tolist() == rows[:, 18:].tolist()
    assert len({tuple(answer) for answer in answers.tolist()}) == 3
    assert cache.stats.pages_used == 0


def test_the_tree_search_finds_the_best_of_all_branches():
    import gpt
    import tree_search

    one = model(vocab=12)
    cache = cache_for(one)
    prompt = [3, 1, 4, 1, 5]
    with torch.inference_mode():
        gpt.with_cache(one, cache, torch.tensor([prompt[:-1]]))
    score, tokens = tree_search.best_continuation(one, cache, prompt[-1], depth=3, branches=12)
    assert cache.length == 4
    rows = [[*prompt, *tail] for tail in itertools.product(range(12), repeat=3)]
    chances = logits_of(one, rows).log_softmax(-1)
    sums = [sum(float(chances[i, 4 + j, row[5 + j]]) for j in range(3)) for i, row in enumerate(rows)]
    best = max(range(len(rows)), key=sums.__getitem__)
    assert tokens == rows[best][5:]
    assert score == pytest.approx(sums[best], abs=1e-4)


@pytest.mark.parametrize("n_draft", [1, 3, 6])
@pytest.mark.parametrize("draft_layers", [1, 4])
def test_speculative_decoding_says_what_the_large_model_says(n_draft, draft_layers):
    import gpt
    import speculative

    target = speculative.reader(gpt.Config(), seed=0)
    draft = speculative.reader(gpt.Config(layers=draft_layers), seed=0)
    if draft_layers == 4:
        draft.model.load_state_dict(target.model.state_dict())
    prompt = [7, 8, 9]
    answer, n_steps = speculative.generate(target, draft, prompt, 20, n_draft=n_draft)
    tokens = list(prompt)
    for _ in range(20):
        tokens.append(int(logits_of(target.model, [tokens])[0, -1].argmax()))
    assert answer == tokens[3:]
    least = -(-20 // (n_draft + 1))
    assert n_steps == least if draft_layers == 4 else least <= n_steps <= 20
