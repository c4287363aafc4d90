"""What lies where in an arena, as text."""

from __future__ import annotations

import shutil
import string
import unicodedata
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gpuarena._stack import SIDES
from gpuarena._texts import printable, short_nbytes
from gpuarena.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text

    from gpuarena._stack import Record
    from gpuarena.arena import Arena

__all__ = ["LabelUse", "MemoryMap", "memory_map"]

#: Labels with a letter of their own, those with the most bytes; the others share one sign.
_LETTERS = string.ascii_uppercase[:20]
_OTHERS, _PADDING, _FREE, _RESERVED = "*", "-", ".", "~"
_N_LINES = 4  # of the bar
_MAX_CELLS = 128  # in a line of it
_MIN_WIDTH = 40
#: Colours that are told apart on dark and on light windows.
_COLORS = ("cyan", "magenta", "green", "yellow", "blue", "red")
_NO_LABEL = "(no label)"

#: A line of the legend without its label, which has at least so many columns.
_COLUMNS = "  A    1000 KiB  100.0 %  1000000  low+high"
_MIN_LABEL = 10

#: A line as pieces of text, each with the sign whose colour it has; the empty one is plain.
_Line = list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class LabelUse:
    """What the live regions of one label take."""

    label: str | None
    nbytes: int
    n_regions: int
    ends: tuple[str, ...]
    """``"low"``, ``"high"`` or both."""


@dataclass(frozen=True, slots=True, repr=False)
class MemoryMap:
    """An arena at one moment: what `Arena.memory_map` returns. ``print`` it, or hand it to Rich.

    A letter stands for a label. A cell of the bar shows the label with the most bytes in it, and padding or free
    memory only where there is no region at all, so that a small region is seen as well. Bytes are exact in the
    attributes and rounded in the text.
    """

    name: str | None
    device: str
    capacity: int
    low: int
    """The low end's pointer: the first byte that is free."""
    high: int
    """The high end's pointer: the first byte that is taken again."""
    peak: int
    """The most that both ends took at a time: the high-water mark."""
    committed: int
    """Bytes that are backed by memory."""
    n_regions: int
    closed: bool
    labels: tuple[LabelUse, ...]
    """The most bytes first."""
    spans: tuple[tuple[int, int, str | None], ...]
    """``(offset, nbytes, label)`` of the live regions, the low end's first, in the order they were made."""
    width: int | None = field(default=None, compare=False)
    """Columns; None is those of the terminal."""

    @property
    def used(self) -> int:
        """Bytes of the live regions."""
        return sum(use.nbytes for use in self.labels)

    @property
    def padding(self) -> int:
        """Bytes that alignment skipped, and guard zones."""
        return self.low + self.capacity - self.high - self.used

    @property
    def free(self) -> int:
        """Bytes between the two ends."""
        return self.high - self.low

    def __str__(self) -> str:
        return self._text(self.width or shutil.get_terminal_size().columns)

    __repr__ = __str__

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.text import Text

        for line in self._lines(min(self.width or options.max_width, options.max_width)):
            # Pieces, not markup: a label with brackets stays as it is.
            yield Text.assemble(*((text, self._style(sign)) for text, sign in line), no_wrap=True)

    def _style(self, sign: str) -> str:
        if sign in _LETTERS and sign:
            return f"black on {_COLORS[_LETTERS.index(sign) % len(_COLORS)]}"
        return {_OTHERS: "black on white", "title": "bold"}.get(sign, "dim" if sign else "")

    def _text(self, width: int) -> str:
        lines = ("".join(text for text, _ in line) for line in self._lines(width))
        return "\n".join(line.rstrip() for line in lines)

    def _lines(self, width: int) -> Iterator[_Line]:
        width = max(width, _MIN_WIDTH)
        device = _shown(self.device, 12)
        name = f" {_shown(self.name, width - len(f'arena  on {device}, 1000 KiB'))}" if self.name else ""
        if self.closed:
            yield [(f"arena{name} on {device} is closed", "title")]
            return
        yield [(f"arena{name} on {device}, {short_nbytes(self.capacity)}", "title")]
        taken = self.capacity - self.free
        regions = "1 region" if self.n_regions == 1 else f"{self.n_regions} regions"
        yield from _folded(
            [
                f"{short_nbytes(taken)} taken ({_percent(taken, self.capacity)})",
                f"{short_nbytes(self.free)} free",
                regions,
                f"high-water mark {short_nbytes(self.peak)}",
                *([] if self.committed == self.capacity else [f"{short_nbytes(self.committed)} committed"]),
            ],
            width,
        )
        yield []
        yield from self._bar(width)
        yield []
        yield from self._legend(width)

    # -- the bar ------------------------------------------------------------------------------------------------

    def _bar(self, width: int) -> Iterator[_Line]:
        edge = 9  # where a line of it begins
        n_columns = min(_MAX_CELLS, 1 << (width - edge).bit_length() - 1)  # so that cells are round
        n_cells = min(_N_LINES * n_columns, self.capacity)
        bounds = [number * self.capacity // n_cells for number in range(n_cells + 1)]
        signs = self._signs(bounds)
        for first in range(0, n_cells, n_columns):
            line: _Line = [(f"{short_nbytes(bounds[first]):>{edge - 1}} ", "")]
            for sign in signs[first : first + n_columns]:
                if line[-1][1] == sign:
                    line[-1] = (line[-1][0] + sign, sign)
                else:
                    line.append((sign, sign))
            yield line
        yield from _folded(
            [
                f"a cell is {short_nbytes(self.capacity / n_cells)}",
                f"low end at {short_nbytes(self.low)}",
                f"high end at {short_nbytes(self.high)}",
            ],
            width,
            indent=edge,
        )

    def _signs(self, bounds: list[int]) -> list[str]:
        """Return what each cell shows."""
        letters = self._letters()
        sums: list[dict[str, int]] = [{} for _ in bounds[1:]]  # bytes of each sign in each cell
        for offset, nbytes, label in self.spans:
            sign = letters[label]
            stop, at = offset + nbytes, bisect_right(bounds, offset) - 1
            while offset < stop:
                until = min(stop, bounds[at + 1])
                sums[at][sign] = sums[at].get(sign, 0) + until - offset
                offset, at = until, at + 1
        return [
            max(cell, key=cell.__getitem__) if cell else self._empty(start, stop)
            for cell, start, stop in zip(sums, bounds, bounds[1:], strict=False)
        ]

    def _empty(self, start: int, stop: int) -> str:
        """Return the sign of a cell without regions."""
        n_free = max(0, min(stop, self.high) - max(start, self.low))
        if 2 * n_free <= stop - start:
            return _PADDING
        return _FREE if start < self.committed else _RESERVED

    def _letters(self) -> dict[str | None, str]:
        return {
            use.label: _LETTERS[rank] if rank < len(_LETTERS) else _OTHERS
            for rank, use in enumerate(self.labels)
        }

    # -- the legend ---------------------------------------------------------------------------------------------

    def _legend(self, width: int) -> Iterator[_Line]:
        rows = [_row(letter, use) for letter, use in zip(_LETTERS, self.labels, strict=False)]
        others = self.labels[len(_LETTERS) :]
        if others:
            ends = tuple(end for end in SIDES if any(end in use.ends for use in others))
            n_regions = sum(use.n_regions for use in others)
            label = f"{len(others)} more label{'s' if len(others) > 1 else ''}"
            rows.append(_row(_OTHERS, LabelUse(label, sum(use.nbytes for use in others), n_regions, ends)))
        n_reserved = max(0, self.high - max(self.low, self.committed))
        rows.append((_PADDING, "padding", self.padding, ""))
        rows.append((_FREE, "free", self.free - n_reserved, ""))
        if self.committed != self.capacity:
            rows.append((_RESERVED, "free, no memory behind it yet", n_reserved, ""))
        others_width = len(_COLUMNS)
        n_label = max(len("label"), *(_n_columns(_shown(text, width)) for _, text, *_ in rows))
        n_label = max(min(n_label, width - others_width), _MIN_LABEL)
        wide = width >= n_label + others_width
        yield [(f"     {'label':{n_label}}     bytes    share{'  regions  end' if wide else ''}", "")]
        for sign, text, nbytes, regions in rows:
            shown = _shown(text, n_label)
            shown += " " * (n_label - _n_columns(shown))
            line = f"  {shown}  {short_nbytes(nbytes):>8}  {_percent(nbytes, self.capacity):>7}"
            yield [("  ", ""), (sign, sign), (line + (regions if wide else ""), "")]


def _row(sign: str, use: LabelUse) -> tuple[str, str, int, str]:
    label = _NO_LABEL if use.label is None else use.label
    return sign, label, use.nbytes, f"  {use.n_regions:>7}  {'+'.join(use.ends)}"


def memory_map(arena: Arena, width: Any = None) -> MemoryMap:
    """Return what lies where in an arena; see `Arena.memory_map`."""
    if width is not None:
        if isinstance(width, bool) or not isinstance(width, int):
            raise ArgumentTypeError(f"width is a number of columns, not {type(width).__name__}")
        if width < _MIN_WIDTH:
            raise ArgumentError(f"width={width}: a memory map needs at least {_MIN_WIDTH} columns")
    with arena._lock:
        arena._note_peaks()
        low, high = arena._low, arena._high
        records = {"low": low.records.copy(), "high": high.records.copy()}
        tops = low.top, high.top
        peak, closed = arena._peak, arena._closed
        committed = 0 if closed else arena._backend.committed
    return MemoryMap(
        name=arena.name,
        device=arena.device,
        capacity=arena.capacity,
        low=tops[0],
        high=tops[1],
        peak=peak,
        committed=committed,
        n_regions=sum(map(len, records.values())),
        closed=closed,
        labels=_uses(records),
        spans=tuple(record[:3] for end in records.values() for record in end),
        width=width,
    )


def _uses(records: dict[str, list[Record]]) -> tuple[LabelUse, ...]:
    found: dict[str | None, tuple[int, int, tuple[str, ...]]] = {}
    for end, of_end in records.items():
        for record in of_end:
            nbytes, n_regions, ends = found.get(record.label, (0, 0, ()))
            ends = ends if end in ends else (*ends, end)
            found[record.label] = nbytes + record.nbytes, n_regions + 1, ends
    uses = [LabelUse(label, *values) for label, values in found.items()]
    return tuple(sorted(uses, key=lambda use: -use.nbytes))


# -- texts ------------------------------------------------------------------------------------------------------


def _shown(text: str | None, limit: int) -> str:
    """Return a text with what a terminal would act on made visible, and its middle left out if it is long."""
    if not text:
        return "''" if text == "" else _NO_LABEL
    n_tail = limit // 3
    if len(text) > 2 * limit:  # no need to look at all of it
        text = text[:limit] + text[-limit:]
    plain = printable(text)
    if _n_columns(plain) <= limit:
        return plain
    head, tail = plain, plain[-n_tail:]
    while _n_columns(tail) > n_tail:
        tail = tail[1:]
    head = head[: limit - n_tail]
    while _n_columns(head) + 3 + _n_columns(tail) > limit:
        head = head[:-1]
    return f"{head}...{tail}"


def _n_columns(text: str) -> int:
    """Return how many columns of a terminal a printable text takes."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(letter) else 2 if unicodedata.east_asian_width(letter) in "WF" else 1
        for letter in text
    )


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %"


def _folded(parts: list[str], width: int, indent: int = 0) -> Iterator[_Line]:
    """Yield parts with commas between them, in as many lines as they need."""
    line = parts[0]
    for part in parts[1:]:
        if indent + len(line) + len(part) + 3 > width:
            yield [(f"{' ' * indent}{line},", "")]
            line = part
        else:
            line = f"{line}, {part}"
    yield [(f"{' ' * indent}{line}", "")]
