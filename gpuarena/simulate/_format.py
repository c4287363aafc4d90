"""Figures of a simulation as text for people."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Sequence

from gpuarena._units import grouped
from gpuarena.simulate.result import Result

__all__ = [
    "MOST_LETTERS",
    "class_bounds",
    "class_label",
    "count",
    "filled",
    "grouped",
    "keep_together",
    "listed",
    "of_bytes",
    "of_slots",
    "percent",
    "seconds",
    "tokens",
]

#: Of a line of prose; more, and fewer, is hard to read.
MOST_LETTERS, _LEAST_LETTERS = 100, 20


def count(number: int, noun: str) -> str:
    """Return a number of things.

    >>> count(1, "page"), count(4096, "page")
    ('1 page', '4 096 pages')
    """
    return f"{grouped(number)} {noun}" if number == 1 else f"{grouped(number)} {noun}s"


def percent(part: float, whole: float = 1) -> str:
    """Return a share in percent, from 0 to 100; only nothing is 0 % and only all is 100 %.

    >>> percent(1, 3), percent(1, 100_000), percent(99_999, 100_000), percent(2, 2)
    ('33.3 %', 'under 0.1 %', 'over 99.9 %', '100 %')
    """
    share = part / whole if whole else 0.0
    if not share > 0:  # also what is no number
        return "0 %"
    if share >= 1:
        return "100 %"
    shown = f"{share * 100:.1f}"
    return {"0.0": "under 0.1 %", "100.0": "over 99.9 %"}.get(shown, f"{shown} %")


def seconds(time_s: float) -> str:
    """Return a time, in full seconds from 100 on.

    >>> seconds(0), seconds(4.55), seconds(1384.3)
    ('0 s', '4.55 s', '1 384 s')
    """
    if not math.isfinite(time_s) or time_s <= 0:
        return "0 s"
    return f"{grouped(round(time_s))} s" if time_s >= 100 else f"{time_s:.3g} s"


def tokens(number: int) -> str:
    """Return many tokens in millions.

    >>> tokens(1), tokens(999_999), tokens(12_840_000)
    ('1 token', '999 999 tokens', '12.84 million tokens')
    """
    return (
        f"{number / 1e6:,.2f} million tokens".replace(",", " ")
        if number >= 1_000_000
        else count(number, "token")
    )


def of_bytes(nbytes: int) -> str:
    """Return bytes in decimal units.

    >>> of_bytes(939_524_096), of_bytes(12)
    ('939.5 MB', '12 bytes')
    """
    for unit, scale in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= scale:
            digits = 1 if nbytes >= 100 * scale else 2
            return f"{nbytes / scale:.{digits}f} {unit}"
    return count(nbytes, "byte")


def of_slots(n_slots: int, bytes_per_token: int | None) -> str:
    """Return slots, with the decimal bytes that they take where a token's are known.

    >>> of_slots(32768, 28672), of_slots(1, None)
    ('32 768 slots (939.5 MB)', '1 slot')
    """
    text = count(n_slots, "slot")
    return text if bytes_per_token is None else f"{text} ({of_bytes(n_slots * bytes_per_token)})"


def listed(parts: Sequence[str]) -> str:
    """Return parts as an enumeration.

    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    if len(parts) < 2:
        return "".join(parts)
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def class_bounds(results: Iterable[Result]) -> list[tuple[int, int | None]]:
    """Return the least lengths and limits of the classes that have a request in any of the results, in order."""
    bounds = {(each.least, each.limit) for one in results for each in one.classes if each.n_requests}
    return sorted(bounds, key=lambda bound: (bound[0], bound[1] is None, bound[1] or 0))


def class_label(least: int, limit: int | None) -> str:
    """Return the lengths of a class for people.

    >>> class_label(1, 1024), class_label(1024, 2048), class_label(4096, None)
    ('< 1 024', '1 024 to 2 047', '>= 4 096')
    """
    if limit is None:
        return f">= {grouped(least)}"
    return f"< {grouped(limit)}" if least <= 1 else f"{grouped(least)} to {grouped(limit - 1)}"


def keep_together(text: str) -> str:
    r"""Return a text whose numbers and percentages are not broken at the end of a line.

    >>> keep_together("12 736 of 38.3 %").split(" ")
    ['12\xa0736', 'of', '38.3\xa0%']
    """
    return re.sub(r"(?<=\d) (?=\d{3}\b|%|s\b|[kMGT]?B\b)", "\u00a0", text)


def filled(text: str, width: int) -> str:
    """Return a paragraph in lines that read well, of at most `width` letters, and its figures not torn apart.

    >>> print(filled("A request needs 12 736 slots.", 20))
    A request needs
    12 736 slots.
    """
    width = max(_LEAST_LETTERS, min(width, MOST_LETTERS))
    whole = textwrap.fill(keep_together(text), width, break_long_words=False, break_on_hyphens=False)
    return whole.replace("\N{NO-BREAK SPACE}", " ")
