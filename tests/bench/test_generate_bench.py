"""The benchmark of `generate`, on a very small model: that it runs, checks itself, and draws what it found."""

import copy
import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import transformers  # noqa: E402 - after the skips

from gpuarena.bench import _answers, _caches, _models, decode, generate  # noqa: E402
from gpuarena.bench.device import Device, FakeGpu  # noqa: E402
from gpuarena.errors import ArgumentError  # noqa: E402


@pytest.fixture(scope="module")
def result():
    return generate.run(device="cpu", dtype="float32", quick=True, rounds=1)


def test_each_group_times_each_variant(result):
    json.dumps(result)
    kinds = [(group["kind"], group["batch"], group["n_tokens"]) for group in result["groups"]]
    held = [(batch, length) for batch in (1, 2) for length in (32, 64)]
    assert kinds == [
        *(("step", *one) for one in held),
        ("generate", 1, 32),
        ("generate", 2, 32),
        ("reuse", 1, 32),
        ("reuse", 1, 64),
    ]
    for group in result["groups"]:
        assert group["rows"][group["reference"]]["ratio"] == 1.0
        assert all(row["median_s"] > 0 for row in group["rows"].values())
        if group["kind"] == "step":
            assert set(group["rows"]) == set(_caches.VARIANTS)
            assert all(row["floor_ratio"] > 0 for row in group["rows"].values())
        if group["kind"] == "generate":
            assert set(group["rows"]) == set(_caches.VARIANTS) - {"ideal + gpuarena"}
        assert not group.get("not_measured")


def test_the_arena_allocates_nothing_in_a_step_and_holds_least(result):
    for group in (group for group in result["groups"] if group["kind"] == "step"):
        rows = group["rows"]
        assert rows["ArenaCache + gpuarena"]["allocated_nbytes"] == 0
        assert rows["DynamicCache + sdpa"]["allocated_nbytes"] > 0
        if group["batch"] == 1:  # more rows reserve a scratch for beams, which shows in so small a cache
            assert rows["ArenaCache + gpuarena"]["peak_nbytes"] < rows["DynamicCache + sdpa"]["peak_nbytes"]


def test_caches_that_disagree_are_not_timed(monkeypatch):
    from gpuarena_transformers import ArenaCache

    update = ArenaCache.update
    monkeypatch.setattr(
        ArenaCache, "update", lambda self, k, v, *args, **kwargs: update(self, k, v + 0.5, *args, **kwargs)
    )
    with pytest.raises(generate.WrongDataError, match="ArenaCache"):
        generate.run(device="cpu", dtype="float32", quick=True)


@pytest.fixture(scope="module")
def models():
    return _models.random_models(Device(), torch.float32, 2, _models.TINY)


def test_the_ideal_cache_does_the_step_that_it_took(models):
    found = decode.measure_step(models, 9, largest=9, rounds=1, batch=2)
    assert found["rows"]["ideal + gpuarena"]["logits_difference"] < 1e-4


def test_every_answer_is_to_another_prompt_and_nothing_else_is_compiled(models, monkeypatch):
    asked = []
    generate_ = transformers.Qwen2ForCausalLM.generate

    def spy(self, ids, **options):
        asked.append((ids.clone(), options))
        return generate_(self, ids, **options)

    monkeypatch.setattr(transformers.Qwen2ForCausalLM, "generate", spy)
    group = _answers.measure_answers(models, 8, 2, 3, rounds=2)
    n = len(group["rows"])
    assert len(asked) == 3 * n
    rounds = [asked[:n], asked[n : 2 * n], asked[2 * n :]]
    for one in rounds:
        assert all(torch.equal(ids, one[0][0]) for ids, _ in one)
    assert not torch.equal(rounds[0][0][0], rounds[1][0][0])
    assert not torch.equal(rounds[1][0][0], rounds[2][0][0])
    assert all(options["disable_compile"] for _, options in asked)


def test_an_answer_that_goes_wrong_behind_its_first_token_is_not_timed(models, monkeypatch):
    update = transformers.DynamicCache.update
    monkeypatch.setattr(
        transformers.StaticCache,
        "update",
        lambda self, k, v, *args, **kwargs: update(self, k, v + (k.shape[2] == 1), *args, **kwargs),
    )
    group = _answers.measure_answers(models, 8, 1, 3, rounds=1)
    assert set(group["not_measured"]) == {"StaticCache (exact) + sdpa", "StaticCache (largest) + sdpa"}
    assert all(why.startswith("WrongDataError") for why in group["not_measured"].values())


def test_generate_compiles_by_itself_or_is_not_timed(models, monkeypatch):
    where = FakeGpu()
    here = _models.Models("fake", models.by_attention, where, torch.float32)
    name, other = list(_answers.COMPILED_ANSWERS)[::-1]
    ways = {name: _answers.COMPILED_ANSWERS[name], other: _caches.Way("dynamic", "sdpa", run_by="compiler")}
    monkeypatch.setattr(_answers, "COMPILED_ANSWERS", ways)
    group = _answers.measure_answers(here, 8, 1, 3, rounds=2, compiled=True)
    assert group["graphs"] == {name: {"n_graphs": 1, "n_cudagraph_skips": 0}}
    assert group["not_measured"] == {other: "RuntimeError: generate compiled nothing"}
    assert "_compiled_call" not in vars(here.by_attention["sdpa"])


@pytest.mark.parametrize(
    "bad", [{"dtype": "int8"}, {"rounds": 0}, {"lengths": []}, {"batches": [0]}, {"lengths": [0]}], ids=str
)
def test_bad_arguments_are_refused_before_a_model_is_built(bad):
    with pytest.raises(ArgumentError):
        generate.run(**{"device": "cpu", **bad})


def test_lengths_that_the_model_cannot_hold(models, monkeypatch):
    monkeypatch.setattr(_models, "load", lambda *args, **options: models)
    with pytest.raises(ArgumentError, match="holds at most"):
        generate.run(device="cpu", layers=1, lengths=[140_000])


def test_the_picture(result, tmp_path):
    result = copy.deepcopy(result)
    pytest.importorskip("matplotlib")
    from gpuarena.bench.plot import plot_steps

    for group in result["groups"]:  # a variant that failed at one of the lengths
        if group["n_tokens"] == 64:
            group["rows"].pop("StaticCache (exact) + sdpa", None)
    plot_steps(result, tmp_path / "steps.png")
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ArgumentError, match="no step"):
        plot_steps(result | {"groups": []}, tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
