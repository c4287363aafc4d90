"""What the commands share: consoles, tables, files, devices, extras."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gpuarena._files import check_replaceable, replacing
from gpuarena._texts import short_nbytes
from gpuarena._texts import shortened as printable
from gpuarena.errors import BackendError, DeviceMismatchError

__all__ = [
    "console_beside",
    "examples",
    "megabytes",
    "needs",
    "plain_table",
    "print_json",
    "print_line",
    "printable",
    "progress",
    "short_nbytes",
    "usable_device",
    "write_json",
]

#: Wider than any table, to find out how narrow it can get.
_ANY_WIDTH = 10_000
#: As narrow as a column gets whose words may be broken.
_FOLDED_WIDTH = 14


class _PlainTable(Table):
    """A table that is never cut off: where its columns do not fit side by side, its cells stand below each other."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._narrowest(console, options) <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        if self.title:
            yield _as_text(self.title)
        columns = [(_as_text(column.header), [*column.cells]) for column in self.columns]
        for number in range(self.row_count):
            cells = [(heading, _as_text(column[number])) for heading, column in columns]
            yield Padding(cells[0][1], (1, 0, 0, 0))
            told = [(heading, cell) for heading, cell in cells[1:] if cell]
            parts = [Text.assemble(heading, " " if heading else "", cell) for heading, cell in told]
            yield Padding(Text(", ").join(parts), (0, 0, 0, 2))
        if self.caption:
            yield Text("")
            yield _as_text(self.caption)
        yield Text("")

    def _narrowest(self, console: Console, options: ConsoleOptions) -> int:
        """Return the width below which something would be cut off, or folded beyond reading."""
        n_columns = len(self.columns)
        width = n_columns + 1 + sum(self.padding[1::2]) * (n_columns - 1)  # around them, and between
        for column in self.columns:
            sizes = [
                Measurement.get(console, options.update(width=_ANY_WIDTH), cell)
                for cell in (column.header, *column.cells)
            ]
            if column.no_wrap:
                width += max(size.maximum for size in sizes)
            else:
                least = max(size.minimum for size in sizes)
                width += min(least, _FOLDED_WIDTH) if column.overflow == "fold" else least
        return width


def _as_text(cell: Any) -> Text:
    """Return what a cell of a table shows; cells are texts here, with or without markup."""
    return cell if isinstance(cell, Text) else Text.from_markup(str(cell))


def plain_table(title: str | None = None, *, caption: str | None = None) -> Table:
    """Return an empty table as all commands print it; in a narrow window its cells are stacked, not cut off."""
    return _PlainTable(
        title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )


def examples(*commands: str) -> str:
    """Return what the help of a command ends with, as ``app.command(..., epilog=)`` wants it."""
    escaped = [command.replace("[", r"\[") for command in commands]  # a bracket would be markup
    return "\n\n".join(["Examples:" if len(commands) > 1 else "Example:", *escaped])


def print_line(console: Console, *parts: Any) -> None:
    """Print texts, or pairs of text and style, as one line: the window wraps it, and nothing in it is markup."""
    console.print(Text.assemble(*parts), soft_wrap=True, highlight=False)


def print_json(value: Any, *, indent: int | None = 2) -> None:
    """Print what ``--json`` asks for; numbers that JSON does not have become null."""
    typer.echo(_json(value, indent))


def _json(value: Any, indent: int | None = 2) -> str:
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def console_beside(*paths: Path | None) -> Console:
    """Return where a command prints that writes to `paths`: not to standard output if one of them is ``-``.

    Raises
    ------
    OSError
        One of the files could not be written, which is better known before hours of work than after.
    """
    for path in paths:
        if path is not None and str(path) != "-":
            check_replaceable(path)
    return Console(stderr="-" in map(str, paths))


def write_json(path: Path | None, value: Any, console: Console) -> None:
    """Write `value` to a file, whole or not at all, if a path is given; ``-`` is standard output."""
    if path is None:
        return
    if str(path) == "-":
        print_json(value)
        return
    with replacing(path) as file:
        file.write(_json(value) + "\n")
    console.print(f"written to {path}", highlight=False, markup=False, soft_wrap=True)


@contextlib.contextmanager
def progress(text: str) -> Iterator[None]:
    """Show `text` and a spinner on a terminal's standard error while the block runs; nothing elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(text):
        yield


@contextlib.contextmanager
def needs(extra: str, command: str) -> Iterator[None]:
    """Let an import that fails in the block name the extra that brings it.

    Raises
    ------
    BackendError
        In place of `ImportError`.
    """
    try:
        yield
    except ImportError as error:
        if (error.name or "").startswith("gpuarena"):
            raise  # a fault of this package
        raise BackendError(
            f"gpuarena {command} needs the {extra} extra: pip install 'gpuarena[cli,{extra}]' ({error})"
        ) from error


def megabytes(nbytes: float) -> str:
    """Return a byte count for a column of megabytes of 10**6 bytes."""
    return f"{nbytes / 1e6:.1f}"


def usable_device(device: str | None) -> str:
    """Return the device asked for, or the GPU if there is one; raise if torch cannot use it."""
    try:
        import torch
    except ImportError as error:
        raise BackendError(f"this needs torch: pip install 'gpuarena[torch]' ({error})") from error
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
