"""The command ``gpuarena info``: what there is to work with, and what really works."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpuarena.cli._output import plain_table, print_json, print_line, printable, progress, short_nbytes

__all__ = ["info"]


def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Show versions, devices and memory, and try each backend: what works here, and why the rest does not.

    Of each backend a tiny arena is made, written and read back. Nothing is downloaded and no file is written.
    """
    from gpuarena.cli._survey import survey

    found = survey(progress)
    if as_json:
        print_json(found)
        return
    console = Console()
    print_line(
        console, (f"gpuarena {found['gpuarena']}", "bold"), f", Python {found['python']}, {found['platform']}"
    )
    print_line(console, (found["executable"], "dim"))
    console.print(_libraries_table(found))
    console.print(_devices_table(found))
    console.print(_backends_table(found))
    if found["extras"]:
        console.print(_extras_table(found))
    for text in found["warnings"]:
        print_line(console, ("warning: ", "yellow"), printable(text, 400))


def _libraries_table(found: dict[str, Any]) -> Table:
    table = plain_table()
    table.add_column("library", no_wrap=True)
    table.add_column("version", overflow="fold")
    for name, state in found["libraries"].items():
        cell = Text(state["version"] or "")
        cuda = found["cuda"].get(name, {})
        parts = [f"CUDA {cuda['runtime']}" if cuda.get("runtime") else ""]
        parts += [f"driver for CUDA {cuda['driver']}" if cuda.get("driver") else ""]
        cell.append("".join(f", {part}" for part in parts if part))
        if state["problem"]:
            cell.append(" " if cell.plain else "")
            cell.append(printable(state["problem"], 400), style="red" if state["installed"] else "dim")
        table.add_row(name, cell)
    return table


def _devices_table(found: dict[str, Any]) -> Table:
    table = plain_table()
    for title in ("device", "seen by"):
        table.add_column(title, no_wrap=True)
    for title in ("free", "total"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    host = found["host_memory"]
    limit = (
        f"this process may use {short_nbytes(host['limit_nbytes'])}"
        if host["limit_nbytes"] is not None
        else ""
    )
    table.add_row("host", "", _nbytes(host["available_nbytes"]), _nbytes(host["total_nbytes"]), limit)
    for one in found["devices"]:
        about = Text(printable(one["name"] or ""))
        if one["problem"]:
            about.append(printable(one["problem"], 400), style="red")
        table.add_row(
            one["device"], one["library"], _nbytes(one["free_nbytes"]), _nbytes(one["total_nbytes"]), about
        )
    return table


def _nbytes(nbytes: int | None) -> str:
    return "?" if nbytes is None else short_nbytes(nbytes)


def _backends_table(found: dict[str, Any]) -> Table:
    table = plain_table()
    for title in ("backend", "device"):
        table.add_column(title, no_wrap=True)
    table.add_column("", overflow="fold")
    for one in found["backends"]:
        if one["works"]:
            outcome = Text("works", style="green")
        else:
            outcome = Text(printable(one["problem"], 400), style="yellow")
            if one["install"]:
                outcome.append(f": {one['install']}", style="bold")
        table.add_row(one["backend"], one["device"] or "", outcome)
    return table


def _extras_table(found: dict[str, Any]) -> Table:
    table = plain_table()
    table.add_column("extra", no_wrap=True)
    table.add_column("", overflow="fold")
    for name, state in found["extras"].items():
        if state["installed"]:
            outcome = Text("installed", style="green")
        else:
            outcome = Text(f"lacks {', '.join(state['missing'])}: ", style="dim")
            outcome.append(f"pip install 'gpuarena[{name}]'")
        table.add_row(name, outcome)
    return table
