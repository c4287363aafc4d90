"""``gpuarena bench compare``: what moved between two runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpuarena.bench.compare import Change, Comparison, compare, load
from gpuarena.bench.report import figure_text
from gpuarena.cli._output import plain_table, print_json, print_line

__all__ = ["bench_compare"]


def bench_compare(
    before: Annotated[Path, typer.Argument(help="A file that bench ... --json wrote, or the GPU kit.")],
    after: Annotated[Path, typer.Argument(help="The same of another run.")],
    everything: Annotated[bool, typer.Option("--all", help="Show what did not move, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
) -> None:
    """Say what moved between two runs: ratios, by more than the quartiles of both explain; and checks."""
    found = compare(load(before), load(after))
    if as_json:
        moves = [
            {**asdict(move), "change": move.change, "is_beyond_noise": move.is_beyond_noise}
            for move in found.moves
        ]
        readings = [{**asdict(one), "change": one.change} for one in found.readings]
        print_json({**asdict(found), "moves": moves, "readings": readings})
        return
    _show(found, everything, Console())


def _show(found: Comparison, everything: bool, console: Console) -> None:
    for name, (old, new) in found.circumstances.items():
        print_line(console, f"{name}: {_text(old)}, then {_text(new)}")
    shown = [move for move in found.moves if everything or move.is_beyond_noise]
    if shown:
        table = plain_table("ratios to the reference of each group; below 1 in change: it gained")
        table.add_column("", overflow="fold")
        for heading in ("before", "after", "change", "noise"):
            table.add_column(heading, justify="right", no_wrap=True)
        for move in shown:
            noise = move.before.noise + move.after.noise
            cells = (
                f"{move.before.ratio:.2f}",
                f"{move.after.ratio:.2f}",
                f"{move.change:.2f}",
                f"{noise:.0%}",
            )
            table.add_row(Text(_name(move.name)), *cells)
        console.print(table)
    for one in found.outcomes:
        print_line(console, f"{_name(one.name[:-1])}: {one.before}, then {one.after}")
    if found.readings:
        console.print(_readings(found.readings))
    n_moved = sum(move.is_beyond_noise for move in found.moves)
    print_line(console, f"{n_moved} of {len(found.moves)} ratios moved by more than the noise of both runs")
    for names, which in ((found.only_before, "first"), (found.only_after, "second")):
        if names:
            print_line(console, f"only in the {which} file: {len(names)}, such as {_name(names[0])}")


def _readings(changes: Sequence[Change]) -> Table:
    table = plain_table("figures of checks, whose noise is not known")
    table.add_column("", overflow="fold")
    for heading in ("before", "after", "change"):
        table.add_column(heading, justify="right")
    for one in changes:
        cells = [figure_text({"value": value}) for value in (one.before, one.after)]
        change = "" if one.change is None else f"{one.change:.2f}"
        table.add_row(*map(Text, (_name(one.name), *cells, change)))
    return table


def _name(parts: Sequence[str]) -> str:
    return ": ".join(part for part in parts if part)


def _text(value: object) -> str:
    return "not said" if value is None else str(value)
