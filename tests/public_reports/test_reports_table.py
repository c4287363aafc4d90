"""The tables of public reports in docs/, and the tests that they name."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]


def names_of(*paths: Path) -> list[str]:
    return [
        node.name
        for path in paths
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]


class Table(NamedTuple):
    """One table, and the tests that belong to it."""

    text: str
    n_rows: int
    on_the_cpu: list[str]
    on_a_gpu: list[str]

    @property
    def rows(self) -> list[list[str]]:
        return [
            [cell.strip() for cell in line.strip("|").split(" |")]
            for line in self.text.splitlines()
            if re.match(r"\| \d+ \|", line)
        ]


def read(name: str, n_rows: int, paths: set[Path], *on_a_gpu: Path) -> Table:
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    return Table(text, n_rows, names_of(*sorted(paths)), names_of(*on_a_gpu))


OF_CACHES = set(Path(__file__).parent.glob("test_reports_kv_*.py"))
OF_TRANSFORMERS = set(Path(__file__).parent.glob("test_reports_transformers*.py"))
OTHERS = set(Path(__file__).parent.glob("test_*.py")) - OF_CACHES - OF_TRANSFORMERS - {Path(__file__)}
TABLES = {
    "public-reports.md": read(
        "public-reports.md", 51, OTHERS, ROOT / "tests" / "gpu" / "test_public_reports_gpu.py"
    ),
    "public-reports-kv.md": read("public-reports-kv.md", 56, OF_CACHES),
    "public-reports-transformers.md": read("public-reports-transformers.md", 35, OF_TRANSFORMERS),
}


@pytest.fixture(params=TABLES)
def table(request: pytest.FixtureRequest) -> Table:
    return TABLES[request.param]


def prefix(thread: str) -> str:
    return "test_" + re.sub(r"\W+", "_", thread.lower()) + "_"


def test_every_row_is_complete(table):
    assert [int(row[0]) for row in table.rows] == list(range(1, table.n_rows + 1))
    for row in table.rows:
        _, threads, symptom, does, tests = row
        assert all(re.fullmatch(r"[\w-]+/[\w.-]+#\d+", thread) for thread in threads.split(", "))
        assert symptom
        assert bool(tests) != does.startswith("does not apply: ")


def test_the_table_names_the_tests_that_there_are(table):
    named = set(re.findall(r"`(test_\w+)`", table.text))
    assert named == {*table.on_the_cpu, *table.on_a_gpu}
    assert len(named) == len(table.on_the_cpu) + len(table.on_a_gpu), "two tests have one name"
    assert set(re.findall(r"`(test_\w+)` \(\*gpu\*\)", table.text)) == set(table.on_a_gpu)


def test_every_test_is_named_after_a_thread_of_its_row(table):
    threads = {thread for row in table.rows for thread in row[1].split(", ")}
    for row in table.rows:
        tests = re.findall(r"`(test_\w+)`", row[4])
        own = [
            name for name in tests if any(name.startswith(prefix(thread)) for thread in row[1].split(", "))
        ]
        others = [name for name in tests if name not in own]
        assert all(any(name.startswith(prefix(thread)) for thread in threads) for name in others)
        assert not tests or own or len(tests) == 1


def test_no_thread_is_listed_twice(table):
    threads = [thread for row in table.rows for thread in row[1].split(", ")]
    assert len(threads) == len(set(threads))
