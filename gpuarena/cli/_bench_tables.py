"""How figures and checks look in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from gpuarena.bench._labels import OUTCOMES, failures, parts
from gpuarena.bench.report import Sheet, figure_text, group_sheet
from gpuarena.cli._output import plain_table, print_line

__all__ = ["print_check", "print_failures", "print_group", "print_summary", "table"]

_STYLES = {True: "green", False: "red", None: "yellow"}


def table(sheet: Sheet) -> Table:
    """Return a table of texts as all commands show tables; nothing in it is markup."""
    found = plain_table(escape(sheet.title), caption=escape("\n".join(sheet.notes)) or None)
    found.add_column(escape(sheet.headings[0]), overflow="fold")
    for heading in sheet.headings[1:]:
        if sheet.are_numbers:
            found.add_column(escape(heading), justify="right", no_wrap=True)
        else:
            found.add_column(escape(heading), overflow="fold")
    for row in sheet.rows:
        found.add_row(*map(Text, row))
    return found


def print_group(console: Console, group: Mapping[str, Any]) -> None:
    """Print a group as a table."""
    console.print(table(group_sheet(group)))


def print_check(console: Console, check: Mapping[str, Any]) -> None:
    """Print the outcome of a check, then its figures, then the groups that it timed."""
    passed, why = check["passed"], check.get("why")
    print_line(console, (OUTCOMES[passed], _STYLES[passed]), f": {check['title']}", f": {why}" if why else "")
    for name, figure in check.get("figures", {}).items():
        print_line(console, f"    {name}: {figure_text(figure)}")
    for group in check.get("groups", []):
        print_group(console, group)


def print_summary(console: Console, results: Mapping[str, Any]) -> None:
    """Print what was not measured, how the checks ended, and what failed."""
    for part in parts(results):
        if part.get("not_measured"):
            print_line(console, f"not measured: {part.get('benchmark')}: {part['not_measured']}")
    checks = [check for part in parts(results) for check in part.get("checks", [])]
    if checks:
        counts = {OUTCOMES[one]: sum(check["passed"] is one for check in checks) for one in OUTCOMES}
        print_line(console, f"checks: {', '.join(f'{n} {name}' for name, n in counts.items() if n)}")
    if results.get("fake"):
        print_line(console, "a dry run on the CPU: the figures mean nothing")
    print_failures(console, failures(results))


def print_failures(console: Console, sentences: Iterable[str]) -> None:
    """Print what failed, a line each."""
    for sentence in sentences:
        print_line(console, ("failed: ", "red"), sentence)
