"""What debug mode looks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpuarena.errors import ArgumentError, ArgumentTypeError

__all__ = ["Debug"]

_ON_LIVE_ARRAYS = ("ignore", "warn", "raise")


@dataclass(frozen=True, slots=True, kw_only=True)
class Debug:
    """Settings of debug mode; ``debug=True`` stands for ``Debug()``.

    Without debug mode nothing of this costs anything. With it every allocation and rollback touches the bytes
    it hands out or gives back, and on a device the host waits for them.

    >>> from gpuarena import Arena
    >>> arena = Arena(1024, debug=Debug(guard=16, on_live_arrays="ignore"))
    >>> x = arena.alloc(4, "uint8").array
    >>> x
    array([255, 255, 255, 255], dtype=uint8)

    Raises
    ------
    ArgumentTypeError, ArgumentError
        A value of the wrong type, or out of range.
    """

    poison: bool = True
    """Fill memory with `POISON` when it is handed out without contents and when it is given back, and check, when
    it is handed out again, that nobody wrote there in between."""
    guard: int = 64
    """Bytes kept free behind each region, which must keep their pattern; so must the gaps that alignment makes. They
    count as padding, so an arena needs that much more room. Below the lowest region of the high end there is no
    zone: what is written there is found only if that memory was used and given back before."""
    call_sites: bool = True
    """Remember where each region was allocated, for the messages."""
    on_live_arrays: str = "warn"
    """What a rollback does when native arrays of the dropped regions are still referenced: ``"ignore"`` it,
    ``"warn"`` (`LiveArraysWarning`), or ``"raise"`` (`LiveArraysError`, before anything changes; at the end of a
    scope after it). A region's handle may be kept; only arrays count. A variable that still holds an array when the
    scope ends is reported, also one that nobody uses again: Python ends a variable with its function, not with the
    block. So let a function do the work of the block, or ``del`` the name on the last line."""
    strict: bool = False
    """Refuse allocations while no scope is open."""
    separate: bool = False
    """Give every region a buffer of its own, exactly as long as the region, so that memory checkers
    (compute-sanitizer, AddressSanitizer) see every overrun. Addresses then say nothing about offsets, and there
    are neither guards nor poison."""

    def __post_init__(self) -> None:
        for name in ("poison", "call_sites", "strict", "separate"):
            if not isinstance(getattr(self, name), bool):
                raise ArgumentTypeError(f"debug: {name} must be True or False, not {getattr(self, name)!r}")
        if isinstance(self.guard, bool) or not isinstance(self.guard, int):
            raise ArgumentTypeError(f"debug: guard is a number of bytes, not {self.guard!r}")
        if self.guard < 0:
            raise ArgumentError(f"debug: guard={self.guard} is negative")
        if self.on_live_arrays not in _ON_LIVE_ARRAYS:
            raise ArgumentError(f"debug: on_live_arrays must be one of {_ON_LIVE_ARRAYS}")

    @classmethod
    def parse(cls, value: Any) -> Debug | None:
        """Return the settings for an argument ``debug=``: None, a bool, or settings."""
        if value is None or value is False:
            return None
        if value is True:
            return cls()
        if isinstance(value, cls):
            return value
        raise ArgumentTypeError(f"debug must be True, False or Debug(...), not {type(value).__name__}")


#: NaN in the floating-point types of 16 bits and more and in most of 8 bits; -1 in signed integers.
POISON = 0xFF
#: What the bytes between regions hold.
GUARD = 0xFD
