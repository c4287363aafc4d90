"""Every rule that the arena keeps is tested under its number, in a comment beside the test."""

from __future__ import annotations

import pathlib
import re

TESTS = pathlib.Path(__file__).parents[1]

#: Placement, failure, sizes, rollback, scopes, two ends with children and slices, statistics with threads and lifetime.
N_RULES = {"P": 10, "F": 6, "S": 10, "R": 15, "C": 8, "D": 8, "T": 10}
RULES = {f"{letter}{number}" for letter, n in N_RULES.items() for number in range(1, n + 1)}


def mentioned(text):
    """The rules in the comments of a file; ``P1-P10`` is all of them."""
    found = set()
    for comment in re.findall(r"#(.*)", text):
        found |= set(re.findall(r"\b[PFSRCDT]\d+\b", comment))
        for letter, first, last in re.findall(r"\b([PFSRCDT])(\d+)-\1(\d+)\b", comment):
            found |= {f"{letter}{number}" for number in range(int(first), int(last) + 1)}
    return found


def test_there_are_67_rules():
    assert len(RULES) == 67


def test_every_rule_is_tested_under_its_number():
    files = [path for path in TESTS.rglob("*.py") if path != pathlib.Path(__file__)]
    found = set().union(*(mentioned(path.read_text(encoding="utf-8")) for path in files))
    assert sorted(RULES - found) == []


def test_a_range_of_rules_is_all_of_them():
    assert mentioned("x = 1  # P1, D2-D4 and R9") == {"P1", "D2", "D3", "D4", "R9"}
