"""What is said of a region in the viewers of others."""

from __future__ import annotations

from gpuarena._texts import printable
from gpuarena.observe.timeline import RegionSpan

__all__ = ["contents", "has_shape", "place_of", "printable"]

#: Of a line number; thousands of digits are no number in Python.
_N_DIGITS = 18


def place_of(site: str) -> tuple[str, int]:
    """Return file and line of a call site; the line is 0 if there is none.

    >>> place_of("/home/u/train.py:17"), place_of("")
    (('/home/u/train.py', 17), ('', 0))
    """
    file, colon, line = site.rpartition(":")
    if colon and line.isascii() and line.isdigit() and len(line) <= _N_DIGITS:
        return printable(file), int(line)
    return printable(site), 0


def has_shape(region: RegionSpan) -> bool:
    """Return whether dtype and shape are known: a log says bytes of what was there when it began."""
    told_as_bytes = region.start < 0 and region.dtype == "uint8" and region.shape == (region.nbytes,)
    return bool(region.dtype) and not told_as_bytes


def contents(region: RegionSpan) -> str:
    """Return dtype and shape of a region, or its bytes if they are not known.

    >>> contents(RegionSpan("low", 0, 24, 0, (2, 3), "float32", None, "", 0, None))
    'float32[2, 3]'
    """
    if not has_shape(region):
        return f"{region.nbytes} bytes"
    return printable(f"{region.dtype}{list(region.shape)}")
