"""The decode benchmark, on a very small model: that it runs, checks itself, and says what it found."""

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from gpuarena.bench import _models, decode  # noqa: E402
from gpuarena.errors import ArgumentError  # noqa: E402


def test_every_variant_is_timed_at_every_length():
    seen = []
    result = decode.run(
        device="cpu", dtype="float32", lengths=[5, 9], layers=2, rounds=2, quick=True, on_group=seen.append
    )
    json.dumps(result)
    assert result["groups"] == seen
    assert [one["n_tokens"] for one in seen] == [5, 9]
    for one in seen:
        assert set(one["rows"]) == set(decode.VARIANTS)
        assert all(row["median_s"] > 0 for row in one["rows"].values())
        assert one["rows"][decode.OURS]["ratio"] == 1.0
        assert max(row["logits_difference"] for row in one["rows"].values()) < 1e-3


def test_each_variant_runs_the_attention_in_its_name():
    models = _models.random_models(torch.device("cpu"), torch.float32, 2, _models.TINY).by_attention
    for attention, model in models.items():
        layers = model.model.layers
        assert {layer.self_attn.config._attn_implementation for layer in layers} == {attention}
    one, other = (model.state_dict() for model in models.values())
    assert {name: tensor.data_ptr() for name, tensor in one.items()} == {
        name: tensor.data_ptr() for name, tensor in other.items()
    }


def test_caches_that_disagree_are_not_timed(monkeypatch):
    from gpuarena_transformers import ArenaCache

    update = ArenaCache.update

    def wrong(self, keys, values, *args, **kwargs):
        return update(self, keys, values + 0.5, *args, **kwargs)

    monkeypatch.setattr(ArenaCache, "update", wrong)
    with pytest.raises(decode.WrongDataError, match="ArenaCache"):
        decode.run(device="cpu", dtype="float32", lengths=[5], layers=2, rounds=1, quick=True)


@pytest.mark.parametrize(
    "bad", [{"dtype": "int8"}, {"rounds": 0}, {"layers": 0}, {"lengths": []}, {"lengths": [0]}], ids=str
)
def test_bad_arguments_are_refused_before_a_model_is_built(bad):
    with pytest.raises(ArgumentError):
        decode.run(**{"device": "cpu", "quick": True, **bad})
