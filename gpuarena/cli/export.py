"""The command ``gpuarena export``: an event log for the viewers of others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpuarena.cli._output import console_beside, print_line, printable, progress
from gpuarena.errors import ArgumentError

__all__ = ["export"]


def export(
    log: Annotated[Path, typer.Argument(help="Event log, .jsonl or .csv, as arena.record(path) writes it.")],
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="File to write: .pickle for PyTorch's viewer, .json for Perfetto."
        ),
    ],
) -> None:
    """Turn an event log into a file for PyTorch's memory viewer or for Perfetto."""
    from gpuarena.observe import load_trace, write_perfetto
    from gpuarena.observe.snapshot import from_log, write_snapshot
    from gpuarena.observe.timeline import timeline

    if output.suffix not in (".pickle", ".json"):
        raise ArgumentError(
            f"the output ends in .pickle (PyTorch's memory viewer) or .json (Perfetto), not {output.name!r}"
        )
    console = console_beside(output)
    with progress(f"reading {log}"):
        events = load_trace(log)
    with progress(f"writing {output}"):
        if output.suffix == ".pickle":
            write_snapshot(from_log(events), output)
        else:
            write_perfetto(timeline(events), output)
    shown = printable(str(output), 400)
    print_line(console, f"written to {shown}: {len(events)} events")
    if output.suffix == ".pickle":
        print_line(
            console, "open https://pytorch.org/memory_viz and drop the file on it; nothing is uploaded"
        )
        print_line(console, f"or, without a browser: python -m torch.cuda._memory_viz stats {shown}")
    else:
        print_line(
            console, "open https://ui.perfetto.dev and drop the file on it, or chrome://tracing in Chrome;"
        )
        print_line(console, "nothing is uploaded")
