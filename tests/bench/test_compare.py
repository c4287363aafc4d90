"""``gpuarena bench compare``: what moved between two files of results."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuarena.bench.compare import compare, figures, load
from gpuarena.errors import ArgumentError

testing = pytest.importorskip("typer.testing")

from gpuarena.cli import app  # noqa: E402 - after the skip

COMMITTED = sorted((Path(__file__).parents[2] / "docs" / "benchmarks").glob("*.json"))


def run_of(medians, spread=0.02, name="kv"):
    """Return the results of a run, as the benchmarks write them."""
    base = next(iter(medians.values()))
    rows = {
        row: {
            "median_s": median,
            "quartiles_s": [median * (1 - spread), median * (1 + spread)],
            "ratio": median / base,
        }
        for row, median in medians.items()
    }
    group = {"title": "append", "reference": next(iter(medians)), "rows": rows}
    return {"benchmark": name, "environment": {"commit": "a", "versions": {"torch": "2"}}, "groups": [group]}


@given(
    st.lists(st.floats(1e-6, 1.0), min_size=2, max_size=6),
    st.floats(0.25, 4.0),
    st.floats(0.0, 0.4),
)
def test_a_slower_machine_moves_nothing_and_a_slower_row_itself_alone(times, factor, spread):
    before = {f"row {number}": time for number, time in enumerate(times)}
    slower = {name: 3 * time for name, time in before.items()}
    assert not any(move.is_beyond_noise for move in compare(run_of(before), run_of(slower, spread)).moves)
    changed = before | {"row 1": factor * before["row 1"]}
    for move in compare(run_of(before, spread), run_of(changed, spread)).moves:
        own = factor if move.name[-1] == "row 1" else 1.0
        assert move.change == pytest.approx(own)
        margin = 1 + 4 * spread  # half the distance of the quartiles, of two times, in two runs
        if max(own, 1 / own) > margin * 1.001:
            assert move.is_beyond_noise
        elif max(own, 1 / own) < margin * 0.999:
            assert not move.is_beyond_noise


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_the_committed_files_are_read(path):
    found = figures(load(path))
    text = path.read_text()
    assert len(found) >= 4
    assert all(json.dumps(name[-1]) in text for name in found)
    assert not any(move.is_beyond_noise for move in compare(load(path), load(path)).moves)


def test_a_file_of_the_gpu_kit_is_its_benchmarks_together():
    kit = {"benchmarks": [run_of({"a": 1.0, "b": 2.0}), run_of({"a": 1.0, "b": 3.0}, name="alloc")]}
    assert {name: found.ratio for name, found in figures(kit).items()} == {
        ("kv", "append", "b"): 2.0,
        ("alloc", "append", "b"): 3.0,
    }


def checked(passed, value, dtype="bfloat16"):
    """Return what a kit writes: a check with a figure, and one benchmark in two dtypes."""
    check = {
        "title": "replay",
        "passed": passed,
        "why": "",
        "figures": {"kept": {"value": value, "unit": "bytes"}},
    }
    decodes = [run_of({"a": 1.0, "b": ratio}, name="decode") for ratio in (2.0, 3.0)]
    for decode, name in zip(decodes, ("bfloat16", "float32"), strict=True):
        decode["geometry"] = {"dtype": name}
    tests = {"cases": [{"name": "t::a", "outcome": "passed" if passed else "failed", "figures": {"n": "3"}}]}
    broken = {"benchmark": "kv", **({} if passed else {"error": "ValueError: x"})}
    return {"benchmarks": [{"benchmark": "gpu", "checks": [check]}, *decodes, broken], "tests": tests}


def test_checks_whose_outcome_changed_and_their_figures(tmp_path):
    found = compare(checked(True, 100), checked(False, 250))
    assert [(one.name, one.before, one.after) for one in found.outcomes] == [
        (("gpu", "replay", "outcome"), "passed", "FAILED"),
        (("kv", "", "outcome"), "done", "broken"),
        (("tests", "t::a", "outcome"), "passed", "failed"),
    ]
    assert [(one.name, one.change) for one in found.readings] == [(("gpu", "replay", "kept, bytes"), 2.5)]
    # One benchmark in two dtypes is two of them.
    assert sorted(move.before.ratio for move in found.moves) == [2.0, 3.0]
    assert not any(move.is_beyond_noise for move in found.moves)
    paths = [
        write(tmp_path / f"{n}.json", checked(*one)) for n, one in enumerate([(True, 100), (False, 250)])
    ]
    shown = testing.CliRunner().invoke(app, ["bench", "compare", *paths])
    assert shown.exit_code == 0, shown.output
    for part in ("gpu: replay: passed, then FAILED", "kv: done, then broken", "kept, bytes", "2.50"):
        assert part in shown.stdout
    same = testing.CliRunner().invoke(app, ["bench", "compare", paths[0], paths[0]])
    assert "replay" not in same.stdout


def write(path, value):
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return str(path)


def test_what_is_printed(tmp_path):
    one = write(tmp_path / "one.json", run_of({"ours": 1.0, "theirs": 2.0, "gone": 2.0}))
    two = run_of({"ours": 1.0, "theirs": 3.0, "new [red]": 1.0})
    two["environment"]["commit"] = "b"
    two = write(tmp_path / "two.json", two)
    done = testing.CliRunner().invoke(app, ["bench", "compare", one, two])
    assert done.exit_code == 0
    for part in (
        "commit: a, then b",
        "kv: append: theirs",
        "2.00",
        "3.00",
        "1.50",
        "8%",
        "1 of 1 ratios moved",
    ):
        assert part in done.stdout
    assert "only in the first file: 1, such as kv: append: gone" in done.stdout
    assert "new [red]" in done.stdout
    as_json = json.loads(testing.CliRunner().invoke(app, ["bench", "compare", one, two, "--json"]).stdout)
    assert as_json["moves"][0]["change"] == 1.5
    assert as_json["circumstances"] == {"commit": ["a", "b"]}
    same = testing.CliRunner().invoke(app, ["bench", "compare", one, one])
    assert "0 of 2 ratios moved" in same.stdout
    assert "theirs" not in same.stdout
    assert "theirs" in testing.CliRunner().invoke(app, ["bench", "compare", one, one, "--all"]).stdout


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no JSON"),
        ("[]", "names no benchmark"),
        ({"benchmark": "kv", "groups": [{"reference": "a"}]}, "incomplete"),
    ],
)
def test_files_that_are_none(tmp_path, content, message):
    path = write(tmp_path / "file.json", content)
    with pytest.raises(ArgumentError, match=message):
        figures(load(path))
