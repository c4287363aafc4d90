"""Texts as a terminal or the viewer of somebody else can show them."""

from __future__ import annotations

import math

__all__ = ["printable", "short_nbytes", "shortened"]

_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def printable(text: str) -> str:
    r"""Return `text` with its control characters, and halves of surrogate pairs, written as escapes.

    A label may hold anything. A terminal acts on some of it; a viewer that takes the text apart at line ends, or
    wants valid UTF-8, may fail over it.

    >>> printable("keys\n\ud800")
    'keys\\n\\ud800'
    """
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text
    )


def shortened(text: str, limit: int = 80) -> str:
    r"""Return `text` as `printable` does, with its middle left out if it is longer than `limit` letters.

    >>> shortened("layer\x1b[2J"), shortened("0123456789", limit=7)
    ('layer\\x1b[2J', '012...9')
    """
    if len(text) > 2 * limit:  # no need to look at all of it
        text = text[:limit] + text[-limit:]
    plain = printable(text)
    if len(plain) <= limit:
        return plain
    tail = (limit - 3) // 3
    return f"{plain[: limit - 3 - tail]}...{plain[len(plain) - tail :]}"


def short_nbytes(nbytes: float) -> str:
    """Return a byte count of at most eight characters.

    >>> short_nbytes(1000), short_nbytes(939_524_096), short_nbytes(0.5), short_nbytes(float("nan"))
    ('1000 B', '896 MiB', '0.5 B', '?')
    """
    if not math.isfinite(nbytes):
        return "?"
    if nbytes < 1024:
        return f"{nbytes:.3g} B" if nbytes != int(nbytes) and nbytes < 100 else f"{nbytes:.0f} B"
    power = 1
    while nbytes >= 999.5 * 1024**power and power < len(_UNITS):
        power += 1
    amount, unit = nbytes / 1024**power, _UNITS[power - 1]
    if amount < 1:  # as 999.5 KiB are not shown as 1000
        return f"{amount:.2f} {unit}"
    return f"{amount:.3g} {unit}" if amount < 100 else f"{amount:.0f} {unit}"
