"""docs/public-reports.md and the tests that it names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "docs" / "public-reports.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" |")]
    for line in TABLE.splitlines()
    if re.match(r"\| \d+ \|", line)
]


def names_of(*paths: Path) -> list[str]:
    return [
        node.name
        for path in paths
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]


ON_THE_CPU = names_of(*Path(__file__).parent.glob("test_*.py"))
ON_A_GPU = names_of(ROOT / "tests" / "gpu" / "test_public_reports_gpu.py")
REPORTED = [name for name in ON_THE_CPU if name not in names_of(Path(__file__))]


def prefix(thread: str) -> str:
    return "test_" + re.sub(r"\W+", "_", thread.lower()) + "_"


def test_every_row_is_complete():
    assert [int(row[0]) for row in ROWS] == list(range(1, 52))
    for row in ROWS:
        _, threads, symptom, does, tests = row
        assert all(re.fullmatch(r"[\w-]+/[\w-]+#\d+", thread) for thread in threads.split(", "))
        assert symptom
        assert bool(tests) != does.startswith("does not apply: ")


def test_the_table_names_the_tests_that_there_are():
    named = set(re.findall(r"`(test_\w+)`", TABLE))
    assert named == {*REPORTED, *ON_A_GPU}
    assert len(named) == len(REPORTED) + len(ON_A_GPU), "two tests have one name"
    assert set(re.findall(r"`(test_\w+)` \(\*gpu\*\)", TABLE)) == set(ON_A_GPU)


def test_every_test_is_named_after_a_thread_of_its_row():
    threads = {thread for row in ROWS for thread in row[1].split(", ")}
    for row in ROWS:
        tests = re.findall(r"`(test_\w+)`", row[4])
        own = [
            name for name in tests if any(name.startswith(prefix(thread)) for thread in row[1].split(", "))
        ]
        others = [name for name in tests if name not in own]
        assert all(any(name.startswith(prefix(thread)) for thread in threads) for name in others)
        assert not tests or own or len(tests) == 1
