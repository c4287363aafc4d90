"""What the commands share: consoles, tables, files, devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from gpuarena._files import replacing
from gpuarena.errors import DeviceMismatchError

__all__ = ["plain_table", "print_json", "usable_device", "write_json"]


def plain_table(title: str | None = None, *, caption: str | None = None) -> Table:
    """Return an empty table as all commands print it."""
    return Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)


def print_json(value: Any) -> None:
    """Print what ``--json`` asks for."""
    typer.echo(json.dumps(value, indent=2))


def write_json(path: Path | None, value: Any, console: Console) -> None:
    """Write `value` to a file, whole or not at all, if a path is given."""
    if path is not None:
        with replacing(path) as file:
            file.write(json.dumps(value, indent=2) + "\n")
        console.print(f"written to {path}", highlight=False, soft_wrap=True)


def usable_device(device: str | None) -> str:
    """Return the device asked for, or the GPU if there is one; raise if torch cannot use it."""
    import torch

    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # torch has no type of its own for this
        first_line = str(error).splitlines()[0]
        raise DeviceMismatchError(
            f"torch cannot use device {device!r}: {first_line}", device=device
        ) from error
    return device
