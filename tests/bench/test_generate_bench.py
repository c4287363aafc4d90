"""The benchmark of `generate`, on a very small model: that it runs, checks itself, and draws what it found."""

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from gpuarena.bench import _caches, _models, decode, generate  # noqa: E402
from gpuarena.errors import ArgumentError  # noqa: E402


@pytest.fixture(scope="module")
def result():
    return generate.run(device="cpu", dtype="float32", quick=True)


def test_each_group_times_each_variant(result):
    json.dumps(result)
    kinds = [(group["kind"], group["batch"], group["n_tokens"]) for group in result["groups"]]
    held = [(batch, length) for batch in (1, 2) for length in (32, 64)]
    assert kinds == [
        *(("step", *one) for one in held),
        *(("generate", *one) for one in held),
        ("reuse", 1, 32),
        ("reuse", 1, 64),
    ]
    for group in result["groups"]:
        assert group["rows"][group["reference"]]["ratio"] == 1.0
        assert all(row["median_s"] > 0 for row in group["rows"].values())
        if group["kind"] == "step":
            assert set(group["rows"]) == set(_caches.VARIANTS)


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


def test_the_ideal_cache_does_the_step_that_it_took():
    models = _models.random_models(torch.device("cpu"), torch.float32, 2, _models.TINY)
    found = decode.measure_step(models, 9, largest=9, rounds=1, batch=2)
    assert found["rows"]["ideal + gpuarena"]["logits_difference"] < 1e-4


@pytest.mark.parametrize(
    "bad", [{"dtype": "int8"}, {"rounds": 0}, {"lengths": []}, {"batches": [0]}, {"lengths": [0]}], ids=str
)
def test_bad_arguments_are_refused_before_a_model_is_built(bad):
    with pytest.raises(ArgumentError):
        generate.run(**{"device": "cpu", **bad})


def test_lengths_that_the_model_cannot_hold():
    with pytest.raises(ArgumentError, match="holds at most"):
        generate.run(device="cpu", layers=1, lengths=[40_000])


def test_the_picture(result, tmp_path):
    pytest.importorskip("matplotlib")
    from gpuarena.bench.plot import plot_steps

    plot_steps(result, tmp_path / "steps.png")
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ArgumentError, match="no step"):
        plot_steps(result | {"groups": []}, tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
