"""What a pickle would do, before it is done: only plain values, and nothing of a size that the file has not."""

from __future__ import annotations

import re

__all__ = ["refusal"]

_N_SHOWN = 60

#: Operations of which the next one can be found at once: without an argument, and with one of fixed size.
_FIXED = re.compile(
    rb"(?:[(012Nadelst)u\]}\x85-\x89\x8f-\x91\x94]|[Khq\x80].|M..|[Jj].{4}|[G\x95].{8}"
    rb"|\x8a(?:\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8}|\x09.{9}))*+",
    re.DOTALL,
)
#: Bytes of the length that stands before the argument.
_LENGTHS = {
    **dict.fromkeys(b"UC\x8c\x8a", 1),
    **dict.fromkeys(b"TBX\x8b", 4),
    **dict.fromkeys(b"\x8d\x8e\x96", 8),
}
_LINES = b"FILSVg"
_PUT, _LONG_BINPUT = ord("p"), ord("r")
#: The end, and operations at which the unpickler asks for a name, and gets none.
_LAST = b".ci\x93"


def refusal(data: bytes) -> str | None:
    r"""Return why a pickle is not to be loaded; None if it makes plain values, or what is wrong is found by loading it.

    >>> import pickle
    >>> refusal(pickle.dumps({"segments": [1, "two", (3.0, None)]}))
    >>> refusal(b"]r\xff\xff\xff\x7f.")
    'it numbers a value 2147483647, and has 7 bytes'

    A number that a value is given, to refer to it later, makes the unpickler reserve as many places: a file of nine
    bytes could take all memory. Each value takes a byte at least, so no number is above the size of the file.
    """
    at, end = 0, len(data)
    while True:
        at = _after_fixed(data, at)
        if at >= end or data[at] in _LAST:
            return None
        operation = data[at]
        at += 1
        if operation in _LENGTHS:
            n_bytes = _LENGTHS[operation]
            at += n_bytes + int.from_bytes(data[at : at + n_bytes], "little")
        elif operation == _LONG_BINPUT:
            number = int.from_bytes(data[at : at + 4], "little")
            if number > end:
                return f"it numbers a value {number}, and has {end} bytes"
            at += 4
        elif operation == _PUT or operation in _LINES:
            stop = data.find(b"\n", at)
            if stop < 0:
                return None  # cut off
            if operation == _PUT and not (
                stop - at < 20 and data[at:stop].isdigit() and int(data[at:stop]) <= end
            ):
                return f"it numbers a value {data[at : min(stop, at + _N_SHOWN)]!r}, and has {end} bytes"
            at = stop + 1
        elif at + 9 > end and _after_fixed(data[at - 1 :] + bytes(9), 0):
            return None  # cut off within an argument
        else:
            return f"it has an operation {bytes([operation])!r}, and a snapshot needs plain values only"


def _after_fixed(data: bytes, at: int) -> int:
    found = _FIXED.match(data, at)
    return at if found is None else found.end()
