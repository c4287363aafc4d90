"""The screen of ``gpuarena explain``: the slots at the worst failure, what would have helped, what pages do."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from gpuarena.cli._output import plain_table, print_line, printable
from gpuarena.kv.contiguous import Diagnosis
from gpuarena.simulate import Moment, RequestTrace, Result
from gpuarena.simulate._format import MOST_LETTERS, count, filled, grouped, listed, of_slots, percent, seconds

__all__ = ["print_calm", "print_comparison", "print_heading", "print_moment"]

#: What a policy gives each request.
_POLICIES = {
    "exact": "one piece, as long as it will ever need",
    "grow": "one piece for the tokens there are, copied to a longer one when it is full",
    "max": "one piece of {}",
    "buddy_exact": "a block of a power of two for what it will ever need",
    "buddy_pow2": "a block of a power of two for prompt and rounded output",
    "buddy_max": "a block of a power of two for {}",
}
_MAP_ROWS = 4

#: Taken (two, for neighbours), free, the largest hole, the request.
_BLOCKS = "\u2588\u2593\u00b7\u2550\u2592"
_ASCII = "#%.=@"
_STYLES = ("blue", "cyan", "dim", "bold green", "red")


def print_heading(
    console: Console, requests: RequestTrace, result: Result, bytes_per_token: int | None
) -> None:
    """Print what was simulated."""
    left_out = f", {grouped(result.dropped)} longer ones left out" if result.dropped else ""
    if not requests.duration_s and len(requests) > 1:
        left_out += ", all at time 0"
    _print_prose(
        console,
        f"{printable(requests.name, 40)}: {count(result.requests, 'request')} of at most "
        f"{count(result.max_length, 'token')}{left_out}; {of_slots(result.capacity, bytes_per_token)}, one a token. "
        f"{result.policy} gives each request {_POLICIES[result.policy].format(count(result.max_length, 'slot'))}.",
    )


def print_moment(console: Console, result: Result, found: Diagnosis) -> None:
    """Print the map of the slots at the worst failure, the holes and the diagnosis."""
    moment = result.worst
    assert moment is not None, "there is a failure to show"
    _print_prose(
        console,
        f"{result.policy}: a request is refused after {seconds(moment.time_s)} with "
        f"{percent(moment.free, moment.capacity)} of the slots free",
        style="bold",
    )
    glyphs = _glyphs(console)
    label = len(grouped(moment.capacity)) + 1
    width = max(10, min(console.width, MOST_LETTERS) - label - 1)
    per_cell = moment.capacity / (width * _MAP_ROWS)
    drawn = _cells(moment, width * _MAP_ROWS)
    for row in range(_MAP_ROWS):
        start = f"{grouped(round(row * width * per_cell)):>{label - 1}} "
        here = drawn[row * width : (row + 1) * width]
        print_line(console, (start, "dim"), *((glyphs[kind], _STYLES[kind]) for kind in here))
    each = grouped(round(per_cell)) if per_cell >= 100 else f"{per_cell:.3g}"
    shown = f"{glyphs[0]}{glyphs[1]} taken   {glyphs[2]} free   one character: {each} slots"
    print_line(console, " " * label, (shown, "dim"))
    for kind, what, slots, cells in (
        (3, "largest hole", moment.largest_hole, int(moment.largest_hole / per_cell)),
        (4, "the request", moment.need, -int(-moment.need // per_cell)),
    ):
        # A request longer than a row is cut: the numbers say more than a bar over several lines.
        room = width - len(what) - len(grouped(slots)) - 2
        bar = glyphs[kind] * min(cells, room) + (">" if cells > room else "")
        print_line(console, " " * label, (bar, _STYLES[kind]), f" {what} {grouped(slots)}")
    holes = sorted(moment.holes, key=lambda hole: (-hole[1], hole[0]))
    longest = ", ".join(f"{grouped(length)} at {grouped(start)}" for start, length in holes[:3])
    more = f", and {grouped(len(holes) - 3)} smaller" if len(holes) > 3 else ""
    console.print()
    _print_prose(console, f"Holes: {longest}{more}.")
    console.print()
    _print_prose(console, found.text)


def print_calm(console: Console, result: Result, smaller: dict[str, Any]) -> None:
    """Print that nothing failed by fragmentation, and with how much less memory it would."""
    text = f"No request failed by fragmentation under {result.policy}: "
    if result.first_fail_nofree:
        text += (
            f"{count(result.first_fail_nofree, 'request')} did not fit at first because too few slots were free; where "
            f"enough were, they lay in one piece."
        )
    else:
        text += "each found its slots in one piece when its turn came."
    text += f" At most {count(smaller['peak'], 'slot')} were taken at the steps that were sampled."
    tried = smaller["tried"]
    if smaller["first_fail_frag"]:
        text += (
            f" With --capacity {tried[-1]} {count(smaller['first_fail_frag'], 'request')} would fail so, at worst with "
            f"{percent(smaller['free_share'])} of the slots free."
        )
    elif tried:
        text += f" None would with {listed([grouped(one) for one in tried])} slots either."
    console.print()
    _print_prose(console, text)


def _cells(moment: Moment, n_cells: int) -> list[int]:
    """Return what most of each cell of the map is: taken 0 or 1, free 2, the largest hole 3."""
    largest = max(moment.holes, key=lambda hole: hole[1], default=None)
    pieces = [(start, length, 3 if (start, length) == largest else 2) for start, length in moment.holes]
    pieces += [(start, length, index % 2) for index, (start, length, _) in enumerate(moment.allocations)]
    shares: list[dict[int, float]] = [{} for _ in range(n_cells)]
    per_cell = moment.capacity / n_cells
    for start, length, kind in pieces:
        cell = int(start / per_cell)
        while cell < n_cells and cell * per_cell < start + length:
            inside = min(start + length, (cell + 1) * per_cell) - max(start, cell * per_cell)
            shares[cell][kind] = shares[cell].get(kind, 0.0) + inside
            cell += 1
    return [max(share.items(), key=lambda item: (item[1], -item[0]), default=(2, 0.0))[0] for share in shares]


def _glyphs(console: Console) -> str:
    try:
        _BLOCKS.encode(console.encoding)
    except (UnicodeEncodeError, LookupError):
        return _ASCII
    return _BLOCKS


def print_comparison(console: Console, contiguous: Result, paged: Result) -> None:
    """Print what pages do with the same requests."""
    table = plain_table()
    table.add_column("", no_wrap=True)
    for head in ("done", "no room", "in pieces", "never in", "wait p50", "p99", "used"):
        table.add_column(head, justify="right", no_wrap=True)
    for one in (contiguous, paged):
        whole = one.capacity * one.steps
        table.add_row(
            one.policy if one is contiguous else f"pages of {grouped(one.page_size)}",
            grouped(one.done),
            grouped(one.first_fail_nofree),
            grouped(one.first_fail_frag),
            grouped(one.unadmitted),
            seconds(one.wait_p50_s),
            seconds(one.wait_p99_s),
            percent(one.sum_used, whole),
        )
    with console.capture() as shown:
        console.print(table)
    # Without the empty lines around it, so that all of it fits one screen.
    lines = [line.rstrip() for line in shown.get().splitlines()]
    print_line(console, Text.from_ansi("\n".join(["", *filter(None, lines)])))
    _print_prose(console, " ".join((_about_columns(contiguous), *_about_pages(contiguous, paged))))


def _about_columns(contiguous: Result) -> str:
    at_40 = contiguous.n_failed_at_40
    return (
        "No room: at its first attempt too few slots were free for a request; in pieces: enough, but not in one piece"
        + (f", {count(at_40, 'time')} with 40 % or more free." if at_40 else ".")
    )


def _about_pages(contiguous: Result, paged: Result) -> list[str]:
    sentences = []
    if paged.done > contiguous.done:
        more = f", {paged.done / contiguous.done:.2f} times as many" if contiguous.done else ""
        sentences.append(
            f"Pages finish {count(paged.done - contiguous.done, 'request')} more{more}: a request takes pages wherever "
            f"they are free."
        )
    else:
        sentences.append("Pages finish no more of these requests.")
    if paged.preempt:
        sentences.append(
            f"Running requests give up their pages to others {count(paged.preempt, 'time')}, and wait again."
        )
    return sentences


def _print_prose(console: Console, text: str, style: str = "") -> None:
    print_line(console, (filled(text, console.width), style))
