"""Byte counts, from text and to text."""

from __future__ import annotations

import operator
import re
from typing import Any

from gpuarena.errors import ArgumentError, ArgumentTypeError

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[f"{_letter}b"] = 1000**_power
    _UNITS[f"{_letter}ib"] = 1024**_power

_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_nbytes(value: Any, *, what: str = "capacity") -> int:
    """Return a byte count from an integer or a text such as ``"2GiB"``, ``"512 MB"`` or ``"1.5GiB"``.

    Units are read without regard to case: kB, MB, GB, TB are powers of 1000 and KiB, MiB, GiB, TiB of 1024.

    Raises
    ------
    ArgumentTypeError
        `value` is neither an integer nor a text; True and 1.0 are refused too.
    ArgumentError
        The count is not positive, the text is no size, or it is not a whole number of bytes.

    >>> parse_nbytes("2GiB")
    2147483648
    """
    if isinstance(value, str):
        match = _PATTERN.fullmatch(value)
        unit = _UNITS.get(match[2].lower()) if match else None
        if match is None or unit is None:
            raise ArgumentError(
                f'{what} {value!r} is not a size; write an integer of bytes or a text such as "2GiB"'
            )
        from fractions import Fraction  # not at the top: a tenth of the time that `import gpuarena` takes

        exact = Fraction(match[1]) * unit
        if exact.denominator != 1:
            raise ArgumentError(f"{what} {value!r} is {float(exact)} bytes, not a whole number")
        nbytes = int(exact)
    elif isinstance(value, bool):
        raise ArgumentTypeError(f"{what} must be an integer of bytes or a text, not a bool")
    else:
        try:
            nbytes = operator.index(value)
        except TypeError:
            raise ArgumentTypeError(
                f"{what} must be an integer of bytes or a text such as '2GiB', not {type(value).__name__}"
            ) from None
    if nbytes <= 0:
        raise ArgumentError(f"{what} must be at least 1 byte, not {value!r}")
    return nbytes


def grouped(number: int) -> str:
    """Return an integer with its thousands apart.

    >>> grouped(12736)
    '12 736'
    """
    return f"{number:,}".replace(",", " ")


def format_nbytes(nbytes: int) -> str:
    """Return a byte count for people: exact bytes, and binary units when it has them.

    >>> format_nbytes(939524096)
    '939 524 096 bytes (896.00 MiB)'
    """
    exact = f"{grouped(nbytes)} bytes"
    for unit, scale in (("TiB", 1024**4), ("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if abs(nbytes) >= scale:
            return f"{exact} ({nbytes / scale:.2f} {unit})"
    return exact
