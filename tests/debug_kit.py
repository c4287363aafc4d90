"""What the tests of debug mode share."""

from __future__ import annotations

import ctypes
import sys

from gpuarena import Debug

#: Kept arrays are what most of these tests write through, so nothing is to be said about them.
QUIET = Debug(on_live_arrays="ignore")


def poke(arena, offset, value=1):
    """Write one byte behind the library's back, as a kernel with a wrong index does."""
    assert 0 <= offset < arena.capacity
    ctypes.memset(arena.address + offset, value, 1)


def here(above=0):
    """File and line of the caller, or of a line above it, as messages have them."""
    frame = sys._getframe(1)
    return f"{frame.f_code.co_filename}:{frame.f_lineno - above}"
