"""The command ``gpuarena top``: the arenas of a running process, live."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gpuarena.cli._output import needs, plain_table, print_json, print_line, printable, short_nbytes

__all__ = ["top"]

#: Widths of a bar, and of everything else in a row but the longest names.
_BAR_WIDTHS = (8, 30)
_OTHER_WIDTH = 92
#: From here on there are two blanks between columns.
_ROOMY_WIDTH = 100
#: Labels shown of an arena, the largest ones, if the window is high enough.
_MOST_LABELS = 8
#: Shares of the capacity from which on a bar is yellow or red.
_YELLOW, _RED = 0.75, 0.9


def top(
    url: Annotated[
        str, typer.Argument(help="What Server.url says; or HOST:PORT, or a PORT of this machine.")
    ],
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds from one reading to the next.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Read once, print, and end.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON; without --once, one line for each reading.")
    ] = False,
) -> None:
    """Show the arenas of a running process, live, until it ends or Ctrl-C.

    The process serves its figures with `gpuarena.observe.serve(arena)`, whose `.url` is what this command reads.
    """
    from gpuarena.cli._scrape import NoAnswerError, Reader, full_url

    with needs("metrics", "top"):
        import prometheus_client.parser  # noqa: F401
    try:
        address = full_url(url)
    except ValueError as error:
        raise typer.BadParameter(f"{printable(url)!r}: {error}", param_hint="URL") from None
    reader = Reader(address, timeout_s=max(2.0, interval))
    console = Console()
    arenas = reader.read()
    if once:
        if as_json:
            print_json(_figures(address, arenas))
        else:
            console.print(_screen(address, arenas, console))
        return

    def readings() -> Iterator[tuple[list[dict[str, Any]], str]]:
        """Yield the last figures, and why there are no newer ones yet."""
        found = arenas
        yield found, ""
        while True:
            time.sleep(interval)
            late = ""
            try:
                found = reader.read()
            except NoAnswerError as error:
                if not error.waiting:
                    raise
                late = str(error)
            yield found, late

    seen_at = _now()
    errors = Console(stderr=True)
    try:
        if as_json or not console.is_terminal:
            for found, late in readings():
                if late:
                    print_line(errors, (late, "yellow"))
                elif as_json:
                    print_json(_figures(address, found), indent=None)
                else:
                    console.print(_screen(address, found, console))
                seen_at = seen_at if late else _now()
        else:
            with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
                for found, late in readings():
                    live.update(_screen(address, found, console, late), refresh=True)
                    seen_at = seen_at if late else _now()
    except KeyboardInterrupt:
        return  # how one leaves
    except NoAnswerError as error:  # the process has ended; that it was seen is a success
        print_line(
            errors, (f"ended: {printable(str(error), 400)}; the last figures are of {seen_at}", "yellow")
        )


def _now() -> str:
    return time.strftime("%H:%M:%S")


def _figures(url: str, arenas: list[dict[str, Any]]) -> dict[str, Any]:
    return {"url": url, "time": time.time(), "arenas": arenas}


# -- the screen -------------------------------------------------------------------------------------------------


def _screen(url: str, arenas: list[dict[str, Any]], console: Console, late: str = "") -> Group:
    heading = Text.assemble((url, "bold"), f"  {_now()}")
    if late:
        heading.append(f"  {late}", style="yellow")
    if not arenas:
        return Group(
            heading, Text("no arenas: they are closed, or something else is served there", style="dim")
        )
    return Group(heading, _arenas_table(arenas, console))


def _arenas_table(arenas: list[dict[str, Any]], console: Console) -> Table:
    table = plain_table()
    if console.width < _ROOMY_WIDTH:
        table.padding = 0
    table.add_column("arena", overflow="fold")
    table.add_column("used", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for title in ("peak", "capacity", "pad", "regions", "allocs/s", "failed"):
        table.add_column(title, justify="right", no_wrap=True)
    width = max(_BAR_WIDTHS[0], min(_BAR_WIDTHS[1], console.width - _OTHER_WIDTH))
    blocks = "█▒·" if console.encoding.startswith("utf") else "#+."
    n_labels = min(_MOST_LABELS, max(0, (console.height - 5) // len(arenas) - 2))
    if not console.is_terminal:
        n_labels = _MOST_LABELS
    for one in arenas:
        capacity = one.get("capacity") or 0
        taken = one.get("used", 0) + one.get("padding", 0)
        name = Text.assemble((printable(one["arena"]), "bold"), (f" {printable(one['device'])}", "dim"))
        failed = one.get("n_failed", 0)
        table.add_row(
            name,
            _nbytes(one, "used"),
            _bar(taken, one.get("peak", 0), capacity, width, blocks),
            _nbytes(one, "peak"),
            _nbytes(one, "capacity"),
            f"{one.get('fragmentation', 0):.0%}",
            _count(one.get("n_regions", 0)),
            _rate(one.get("allocs_per_s")),
            Text(_count(failed), style="red" if failed else ""),
        )
        labels = sorted(one["by_label"].items(), key=lambda item: -item[1])
        for label, nbytes in labels[:n_labels]:
            shown = Text(f"  {printable(label)}" if label else "  (no label)", style="dim")
            table.add_row(
                shown, Text(short_nbytes(nbytes), style="dim"), _bar(nbytes, 0, capacity, width, blocks)
            )
        if len(labels) > n_labels:
            rest = labels[n_labels:]
            more = Text(f"  {len(rest)} labels more" if n_labels else f"  {len(rest)} labels", style="dim")
            table.add_row(more, Text(short_nbytes(sum(nbytes for _, nbytes in rest)), style="dim"))
    return table


def _bar(taken: float, peak: float, capacity: float, width: int, blocks: str) -> Text:
    """Return how full it is and how full it was; not a single block is shown of nothing, nor all of nearly all."""
    if not capacity:
        return Text("")
    share = taken / capacity
    full, most = (_blocks(nbytes / capacity, width) for nbytes in (taken, max(taken, peak)))
    style = "red" if share >= _RED else "yellow" if share >= _YELLOW else "green"
    return Text.assemble(
        (blocks[0] * full, style), (blocks[1] * (most - full), "dim"), (blocks[2] * (width - most), "dim")
    )


def _blocks(share: float, width: int) -> int:
    if not 0 < share < 1:  # also what is no number
        return width if share >= 1 else 0
    return min(max(round(share * width), 1), width - 1)


def _nbytes(one: dict[str, Any], field: str) -> str:
    return short_nbytes(one[field]) if field in one else "?"


def _rate(per_s: float | None) -> str:
    return "" if per_s is None else _count(per_s)


def _count(number: float) -> str:
    """Return a number of at most six characters.

    >>> [_count(number) for number in (0, 0.25, 12, 99_999, 1_234_567)]
    ['0', '0.2', '12', '99999', '1.2M']
    """
    if not math.isfinite(number):
        return "?"
    if number == int(number) and number < 100_000:
        return str(int(number))
    if number < 100:
        return f"{number:.1f}"
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale * 9.95 or (unit == "M" and number >= scale):
            return f"{number / scale:.1f}{unit}"
    return f"{number:.0f}"
