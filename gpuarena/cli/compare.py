"""``gpuarena bench compare``: what moved between two runs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gpuarena.bench.compare import Comparison, compare, load
from gpuarena.cli._output import plain_table, print_json, print_line

__all__ = ["bench_compare"]


def bench_compare(
    before: Annotated[Path, typer.Argument(help="A file that bench ... --json wrote, or the GPU kit.")],
    after: Annotated[Path, typer.Argument(help="The same of another run.")],
    everything: Annotated[bool, typer.Option("--all", help="Show what did not move, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
) -> None:
    """Say what moved between two runs: ratios that changed by more than the quartiles of both explain."""
    found = compare(load(before), load(after))
    if as_json:
        moves = [
            {**asdict(move), "change": move.change, "is_beyond_noise": move.is_beyond_noise}
            for move in found.moves
        ]
        print_json({**asdict(found), "moves": moves})
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
            table.add_row(": ".join(move.name), *cells)
        console.print(table)
    n_moved = sum(move.is_beyond_noise for move in found.moves)
    print_line(console, f"{n_moved} of {len(found.moves)} ratios moved by more than the noise of both runs")
    for names, which in ((found.only_before, "first"), (found.only_after, "second")):
        if names:
            print_line(console, f"only in the {which} file: {len(names)}, such as {': '.join(names[0])}")


def _text(value: object) -> str:
    return "not said" if value is None else str(value)
