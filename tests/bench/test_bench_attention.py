"""The benchmark of attention, on a few small shapes: that it runs, checks itself, and says what gpuarena takes."""

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from typer.testing import CliRunner  # noqa: E402

from gpuarena.bench import attention  # noqa: E402 - after the skips
from gpuarena.bench._kv_setup import Setup  # noqa: E402
from gpuarena.bench.device import Device, FakeGpu  # noqa: E402
from gpuarena.cli import app  # noqa: E402
from gpuarena.errors import ArgumentError  # noqa: E402


def test_every_shape_is_timed_both_ways_and_written(tmp_path):
    path = tmp_path / "figures.json"
    done = CliRunner().invoke(
        app,
        [
            "bench",
            "attention",
            "--quick",
            "--device",
            "cpu",
            "--dtype",
            "float32",
            "--rounds",
            "1",
            "--json",
            str(path),
        ],
    )
    assert done.exit_code == 0, done.output
    result = json.loads(path.read_text())
    assert result["benchmark"] == "attention"
    assert result["fold_max_queries"] > 0
    titles = {one["title"]: list(one["rows"]) for one in result["groups"]}
    assert len(titles) == len(result["groups"]) == 2 * 3 * 2 + 2
    assert titles["3 queries, 48 tokens, batch 2, mask"][1:] == ["gpuarena, folded", "enable_gqa"]
    assert titles["40 queries, 48 tokens, batch 1, no mask"][1:] == ["gpuarena, enable_gqa", "folded"]
    assert titles["soft cap: 1 query, 48 tokens, batch 1, mask"][1:] == ["gpuarena"]
    for one in result["groups"]:
        assert one["rows"][one["reference"]]["ratio"] == 1.0
        assert all(row["median_s"] > 0 for row in one["rows"].values())
    rows = next(
        one["rows"] for one in result["groups"] if one["title"] == "40 queries, 48 tokens, batch 2, mask"
    )
    # Keys and values for each of 6 query heads of a key/value head, of which gpuarena makes none.
    repeated = 2 * 6 * 2 * 2 * 48 * 128 * 4
    assert rows["sdpa_attention_forward"]["peak_nbytes"] >= repeated
    assert rows["gpuarena, enable_gqa"]["peak_nbytes"] < repeated


def test_outputs_that_differ_are_not_timed(monkeypatch):
    from gpuarena_transformers import attention as adapter

    right = adapter.scaled_dot_product
    monkeypatch.setattr(adapter, "scaled_dot_product", lambda *args, **kwargs: right(*args, **kwargs) + 0.5)
    with pytest.raises(attention.WrongDataError, match="gpuarena, folded"):
        attention.run(dtype="float32", quick=True, rounds=1)
    # On a GPU, where time is short, what is right is measured all the same.
    result = attention.run(device=FakeGpu(), dtype="float32", quick=True, rounds=1)
    assert "3 queries" in result["error"]
    for one in result["groups"]:  # what those two need is not computed there
        assert bool(one["rows"]) == one["title"].startswith(("soft cap", "sinks")), one["title"]


def test_no_call_gets_the_inputs_of_the_last_one():
    setup = Setup(Device(), "float32", layers=1, rounds=2, quick=False)
    inputs = attention._inputs(setup, 1, 4096, 1)  # of 8 MiB
    assert len({one.keys.data_ptr() for one in inputs} | {one.q.data_ptr() for one in inputs}) == 16
    seen = []
    body = {"it": lambda one: (seen.append(id(one)), one.q)[1]}
    group = attention._group("calls", body, "it", setup, inputs, 4096)
    assert group["rows"]["it"]["ratio"] == 1.0
    timed = seen[-2 * 3 :]  # a round to warm up and two more, of two calls
    assert timed == [id(inputs[number % 8]) for number in range(2, 8)]


@pytest.mark.parametrize(
    "bad",
    [{"dtype": "int8"}, {"rounds": 0}, {"batches": []}, {"queries": [0]}, {"lengths": [8], "queries": [9]}],
    ids=str,
)
def test_bad_arguments_are_refused(bad):
    with pytest.raises(ArgumentError):
        attention.run(**bad)


def test_lists_that_are_no_numbers_are_refused():
    done = CliRunner().invoke(app, ["bench", "attention", "--queries", "many"])
    assert done.exit_code == 2
    assert "no list of integers" in done.output
