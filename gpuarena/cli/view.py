"""The command ``gpuarena view``: an event log or a snapshot as a memory map that a browser shows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpuarena.cli._output import console_beside, print_json, print_line, printable, short_nbytes
from gpuarena.errors import ArgumentError

if TYPE_CHECKING:
    from gpuarena.observe.timeline import Timeline

__all__ = ["view"]

_LOGS = (".jsonl", ".csv")
_SNAPSHOTS = (".pickle", ".pkl")


def view(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="LOG_OR_SNAPSHOT",
            help="A .jsonl or .csv log of arena.record(), or a .pickle of arena.dump_snapshot() or of PyTorch.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Default: beside it, with the suffix .html; - is standard output."
        ),
    ] = None,
    title: Annotated[str | None, typer.Option(help="Default: the name of the file.")] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Open the map in the browser.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Write a memory map of a log or snapshot: one HTML file, which needs no network."""
    if source.suffix not in _LOGS + _SNAPSHOTS:
        raise ArgumentError(
            f"cannot tell what {source.name!r} is: a log ends in {' or '.join(_LOGS)}, a snapshot in "
            f"{' or '.join(_SNAPSHOTS)}"
        )
    output = source.with_suffix(".html") if output is None else output
    to_stdout = str(output) == "-"
    if to_stdout and (as_json or open_it):
        raise ArgumentError(
            f"with -o - the map goes to standard output; {'--json' if as_json else '--open'} needs it in a file"
        )
    if not to_stdout and output.exists() and source.exists() and os.path.samefile(source, output):
        raise ArgumentError(f"{output} is what is to be viewed; name another file with -o")
    console = console_beside(output)
    timelines = _read(source)
    from gpuarena.observe import page_text, write_page

    title = source.name if title is None else title
    if to_stdout:
        typer.echo(page_text(timelines, title=title), nl=False)
    else:
        write_page(timelines, output, title=title)
    if as_json:
        print_json(
            {"source": str(source), "output": str(output), "arenas": [_summary(one) for one in timelines]}
        )
    else:
        for one in timelines:
            print_line(console, _sentence(one))
        if not to_stdout:
            print_line(console, f"written to {printable(str(output), 400)}")
    if open_it:
        import webbrowser

        if not webbrowser.open(output.resolve().as_uri()):
            print_line(console, "no browser was found; open the file in one")


def _read(source: Path) -> Sequence[Timeline]:
    """Return the timelines of a file, by its suffix."""
    if source.suffix in _LOGS:
        from gpuarena.observe import load_trace
        from gpuarena.observe.timeline import timeline

        return [timeline(load_trace(source))]
    from gpuarena.observe.snapshot import load_snapshot
    from gpuarena.observe.timeline import Timeline

    loaded = load_snapshot(source)
    return [loaded] if isinstance(loaded, Timeline) else loaded


def _summary(one: Timeline) -> dict[str, Any]:
    return {
        "name": one.name,
        "device": one.device,
        "capacity": one.capacity,
        "n_events": one.n_events,
        "n_regions": len(one.regions),
        "n_scopes": len(one.scopes),
        "n_rollbacks": len(one.rollbacks),
        "n_failures": len(one.failures),
        "peak_nbytes": one.peaks[-1][1] if one.peaks else 0,
    }


def _sentence(one: Timeline) -> str:
    """Return the summary as a line."""
    found = _summary(one)
    name = "" if one.name is None else f"{printable(one.name)}: "
    regions, failures = found["n_regions"], found["n_failures"]
    return (
        f"{name}{regions} region{'' if regions == 1 else 's'}, "
        f"peak {short_nbytes(found['peak_nbytes'])} of {short_nbytes(one.capacity)}, "
        f"{failures} failure{'' if failures == 1 else 's'}"
    )
