"""Results as Markdown and as tables of a terminal: everything that was found is there, and nothing is markup."""

import contextlib
import copy
import io
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from gpuarena.bench._json import as_json
from gpuarena.bench.compare import compare, load
from gpuarena.bench.report import checks_sheet, group_sheet, markdown
from gpuarena.cli._bench_tables import table
from gpuarena.errors import ArgumentError

COMMITTED = sorted((Path(__file__).parents[2] / "docs" / "benchmarks").glob("*.json"))

ROW = {"median_s": 2e-3, "quartiles_s": [1.5e-3, 3e-3], "ratio": 1.0}
KIT = {
    "fake": True,
    "environment": {
        "date": "2026-01-02T03:04",
        "gpu": "H200",
        "versions": {"torch": "2.11"},
        "commit": "abc",
    },
    "benchmarks": [
        {
            "benchmark": "gpu",
            "checks": [
                {
                    "title": "replay",
                    "passed": True,
                    "why": "",
                    "figures": {"kept": {"value": 123456, "unit": "bytes"}},
                    "groups": [{"title": "steps", "reference": "eager", "rows": {"eager": ROW}}],
                },
                {"title": "late reader", "passed": False, "why": "3 wrong elements", "figures": {}},
                {"title": "sanitizer", "passed": None, "why": "no tool", "figures": {}},
            ],
        },
        {"benchmark": "decode", "dtype": "float32", "error": "OutOfMemoryError: 3 GiB"},
        {"benchmark": "kv", "not_measured": "it takes about 30 s"},
        {
            "benchmark": "alloc",
            "rounds": 7,
            "groups": [
                {
                    "title": "copies",
                    "reference": "ours",
                    "floor_s": 5e-7,
                    "not_measured": {"theirs": "no driver"},
                    "rows": {
                        "ours": {**ROW, "launches": 3, "floor_ratio": 1.25, "peak_nbytes": 5_000_000},
                        "no time": {"wait_s": 4e-6, "copied_nbytes": 7_000_000},
                    },
                }
            ],
        },
    ],
    "tests": {
        "counts": {"passed": 5, "failed": 1},
        "cases": [
            {"name": "t::a", "outcome": "passed", "figures": {"bandwidth": "4 TB/s"}},
            {"name": "t::b", "outcome": "failed", "message": "assert 1 == 2"},
        ],
        "exit_status": 1,
    },
}


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_each_figure_of_the_committed_files_is_in_the_document(path):
    results = load(path)
    text = markdown(results).replace("\\", "")
    for value in (results["environment"]["commit"], results["environment"]["date"]):
        assert value in text
    for group in results["groups"]:
        assert f"**{group['title']}**" in text
        for name, row in group["rows"].items():
            line = next(line for line in text.splitlines() if line.startswith(f"| {name} |"))
            assert line.count("|") >= 3
            if "ratio" in row:
                assert f"| {row['ratio']:.2f} |" in text


def test_a_file_of_the_kit_says_what_failed_and_what_was_not_measured():
    text = markdown(KIT)
    for part in (
        "# Results of all benchmarks\n",
        "- date: 2026-01-02T03:04\n",
        "- machine: H200\n",
        "- versions: torch 2.11\n",
        "- commit: abc\n",
        "dry run on the CPU: the figures mean nothing",
        "**3 failed:**",
        "- late reader: 3 wrong elements\n",
        "- decode, float32: OutOfMemoryError: 3 GiB\n",
        "- t::b: assert 1 == 2\n",
        "| replay | passed | kept: 123 456 bytes |",
        "| late reader | FAILED: 3 wrong elements | |",
        "| sanitizer | not measured: no tool | |",
        "**replay: steps**",
        "## kv\n\nnot measured: it takes about 30 s\n",
        "## alloc\n\nmedians of 7 rounds\n",
        "| | median, ms | quartiles | ratio | x floor | launches | peak, MB | wait, us | copied, MB |",
        "| ours | 2.00 | 1.50 - 3.00 | 1.00 | 1.25 | 3 | 5.0 | | |",
        "| no time | | | | | | | 4 | 7.0 |",
        "- Floor: 5.000e-04 ms for the bytes of weights and live keys and values, at the bandwidth of a copy.",
        "- not measured: theirs: no driver",
        "| passed | 5 |",
        "| t::b | failed | assert 1 == 2 |",
        "| t::a | bandwidth: 4 TB/s |",
    ):
        assert part in text, part
    real = markdown({**KIT, "fake": False})
    assert "dry run" not in real
    good = copy.deepcopy(KIT)
    good["benchmarks"] = good["benchmarks"][2:]
    del good["tests"]
    assert "failed" not in markdown(good)


def test_the_level_of_the_headings():
    levels = {
        len(line) - len(line.lstrip("#")) for line in markdown(KIT, level=3).splitlines() if line[:1] == "#"
    }
    assert levels == {3, 4}
    single = KIT["benchmarks"][3]
    headings = [line for line in markdown(single, level=2, title="ours").splitlines() if line[:1] == "#"]
    assert headings == ["## ours"]
    for level in (0, 6):
        with pytest.raises(ArgumentError, match="1 to 5"):
            markdown(KIT, level=level)


@given(st.lists(st.text(min_size=1), min_size=1, max_size=3, unique=True), st.text())
def test_no_name_breaks_a_table_or_becomes_markup(names, title):
    rows = dict.fromkeys(names, ROW)
    sheet = group_sheet({"title": title, "reference": names[0], "rows": rows})
    lines = sheet.markdown()
    assert len(lines) == len(names) + 2
    for line in lines:
        assert len(line.splitlines()) == 1
        assert len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) == 5
        assert not re.search(r"(?<!\\)(?:\\\\)*[<>`*]", line)
    console = Console(width=200, file=io.StringIO())
    with console.capture() as captured:
        console.print(table(sheet))
    assert captured.get().count("1.50 - 3.00") == len(names)


def test_a_terminal_shows_the_cells_of_the_document():
    sheet = checks_sheet(KIT["benchmarks"][0]["checks"])
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table(sheet))
    shown = " ".join(console.export_text().split())
    for row in sheet.rows:
        for cell in row:
            assert cell in shown


@pytest.mark.parametrize(
    "group",
    [{}, {"title": "a"}, {"title": "a", "rows": {"b": {"median_s": 1.0}}}, {"title": "a", "rows": 3}],
    ids=lambda group: json.dumps(group),
)
def test_groups_that_lack_something_are_refused(group):
    with pytest.raises(ArgumentError, match="incomplete"):
        group_sheet(group)


@pytest.mark.parametrize(
    "more",
    [
        {"benchmarks": 3},
        {"benchmarks": [3, None]},
        {"checks": [{"title": "a", "passed": 3}]},
        {"checks": 3, "label": {"a": 1}},
        {"environment": [1]},
        {"environment": {"versions": 3}},
        {"geometry": [1]},
        {"groups": [None]},
        {"tests": [1]},
        {"tests": {"cases": [3]}},
    ],
    ids=str,
)
def test_results_of_another_form_are_refused_in_one_line(more):
    broken, good = {"benchmark": "kv", **more}, {"benchmark": "kv", "groups": []}
    with pytest.raises(ArgumentError, match="incomplete"):
        markdown(broken)
    with contextlib.suppress(ArgumentError):  # which does not look at everything
        compare(good, broken)


def test_a_figure_that_is_no_number_is_null_and_not_measured(tmp_path):
    nan, inf = float("nan"), float("inf")
    bad = {"median_s": nan, "quartiles_s": [nan, inf], "ratio": nan, "peak_nbytes": inf}
    good = {"median_s": 1e-6, "quartiles_s": [1e-6, 1e-6], "ratio": 1.0, "peak_nbytes": 1_000_000}
    group = {"title": "copies", "reference": "ours", "rows": {"ours": good, "theirs": bad}}
    check = {"title": "c", "passed": True, "figures": {"n": {"value": nan, "unit": "bytes"}}}
    text = as_json({"benchmark": "kv", "groups": [group], "checks": [check]})
    assert "NaN" not in text
    assert "Infinity" not in text
    for written in (text, json.dumps({"benchmark": "kv", "groups": [group], "checks": [check]})):
        path = tmp_path / "results.json"
        path.write_text(written)
        found = markdown(load(path))
        assert "| theirs | not measured | | | not measured |" in found
        assert "n: not measured" in found
        assert compare(load(path), load(path)).moves == ()
