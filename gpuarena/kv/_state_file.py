"""Files of named arrays in the safetensors format, written and read as streams.

The layout: the length of the header, 8 bytes little-endian; the header, JSON; the bytes of the arrays, without gaps.
The format is described in https://github.com/huggingface/safetensors. Nothing of a file is ever executed.

Beside what safetensors asks for, ``__metadata__`` holds a CRC-32 of all of the file: of the header without it, its
keys sorted, and of the bytes of the arrays. It finds damage, not forgery.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from gpuarena.dtypes import DType, as_dtype
from gpuarena.errors import ArgumentError, ArgumentTypeError, DTypeError

__all__ = ["Entry", "Progress", "Reader", "as_path", "entry", "write_file"]

#: What safetensors calls the types; it has no others, or packs them below a byte, as an arena does not.
CODES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
}
_ITEMSIZES = {code: as_dtype(name).itemsize for name, code in CODES.items()}
#: Bytes. The limit of safetensors itself.
MAX_HEADER_NBYTES = 100_000_000
_LENGTH_NBYTES = 8
_NO_CRC = "00000000"
#: Bytes that are read at once to look at the checksum.
_CHUNK_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """An array of a file."""

    name: str
    code: str
    """Of `CODES`."""
    shape: tuple[int, ...]
    nbytes: int


def entry(name: str, dtype: DType, shape: tuple[int, ...]) -> Entry:
    """Return the entry for an array, or raise `DTypeError` if safetensors does not know the type."""
    if dtype.name not in CODES:
        raise DTypeError(
            f"{name}: safetensors has no dtype {dtype.name}; a file can hold {', '.join(CODES)}",
            dtype=dtype.name,
        )
    return Entry(name, CODES[dtype.name], shape, math.prod(shape) * dtype.itemsize)


def as_path(path: Any) -> str:
    """Return a path as text, or raise `ArgumentTypeError`."""
    try:
        return os.fsdecode(path)
    except TypeError:
        raise ArgumentTypeError(f"path must be a text or a path, not {type(path).__name__}") from None


class Progress:
    """Calls ``callback(done_nbytes, total_nbytes)``, at the end with both alike, also where there are no bytes."""

    def __init__(self, callback: Callable[[int, int], object] | None) -> None:
        if callback is not None and not callable(callback):
            raise ArgumentTypeError(f"progress must be a function, not {type(callback).__name__}")
        self._callback = callback
        self.done_nbytes = 0
        self.total_nbytes = 0

    def add(self, nbytes: int) -> None:
        """Note that `nbytes` more are done; the last of them only `finish` reports."""
        self.done_nbytes += nbytes
        if self._callback is not None and self.done_nbytes < self.total_nbytes:
            self._callback(self.done_nbytes, self.total_nbytes)

    def finish(self) -> None:
        """Report that everything is done."""
        if self._callback is not None:
            self._callback(self.total_nbytes, self.total_nbytes)


# ----------------------------------------------------------------------------------------------------------- writing


def write_file(
    path: str,
    entries: Iterable[Entry],
    metadata: Mapping[str, str],
    contents: Callable[[Entry], Iterator[Any]],
    progress: Progress,
) -> None:
    """Write a file, and put it in place of an old one when it is complete.

    Parameters
    ----------
    contents
        Gives the bytes of an entry in pieces, each a memoryview that is used up at once.
    """
    # The widest types first, so that every array is aligned to its items.
    ordered = sorted(entries, key=lambda found: _ITEMSIZES[found.code], reverse=True)
    header, crc = _header(ordered, metadata)
    progress.total_nbytes = sum(found.nbytes for found in ordered)
    temporary = os.path.join(os.path.dirname(path) or ".", f".gpuarena-{os.urandom(8).hex()}.tmp")
    with open(temporary, "xb") as file:
        try:
            file.write(len(header).to_bytes(_LENGTH_NBYTES, "little"))
            file.write(header)
            for found in ordered:
                for piece in contents(found):
                    crc = zlib.crc32(piece, crc)
                    file.write(piece)
                    progress.add(len(piece))
            file.seek(_LENGTH_NBYTES + header.index(_crc_text(_NO_CRC)))
            file.write(_crc_text(f"{crc:08x}"))
            progress.finish()
            file.flush()
            os.fsync(file.fileno())  # or a crash of the system could leave the new name with no contents
            file.close()  # before the exchange, as some systems want it
            os.replace(temporary, path)
        except BaseException:
            file.close()
            os.unlink(temporary)
            raise


def _crc_text(digits: str) -> bytes:
    # Only the first key of all can look like this: quotes inside of texts are escaped.
    return f'"crc32":"{digits}"'.encode()


def _header(entries: Iterable[Entry], metadata: Mapping[str, str]) -> tuple[bytes, int]:
    """Return the header with no checksum yet, and the checksum of it."""
    table: dict[str, Any] = {"__metadata__": {"crc32": _NO_CRC, **metadata}}
    begin = 0
    for found in entries:
        stop = begin + found.nbytes
        table[found.name] = {"dtype": found.code, "shape": found.shape, "data_offsets": (begin, stop)}
        begin = stop
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_NBYTES:
        raise ArgumentError(
            f"the header would take {len(text)} bytes, safetensors allows {MAX_HEADER_NBYTES}: give less metadata, or "
            f"save in several files"
        )
    return text, _crc_of(table)


def _crc_of(table: Mapping[str, Any]) -> int:
    without = {**table, "__metadata__": {k: v for k, v in table["__metadata__"].items() if k != "crc32"}}
    return zlib.crc32(json.dumps(without, sort_keys=True).encode())


# ----------------------------------------------------------------------------------------------------------- reading


class Reader:
    """A file whose header was read and is consistent with the size of the file; a context manager.

    Attributes
    ----------
    metadata : dict of str to str
        Without the checksum.
    entries : tuple of Entry
        In the order of their bytes, which lie without gaps to the end of the file.
    nbytes : int
        Of all of them.

    Raises
    ------
    ArgumentError
        It is no such file, or a damaged one.
    OSError
        It is not there, or cannot be read.
    """

    def __init__(self, path: str, progress: Progress) -> None:
        self.path = path
        self._progress = progress
        if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would make open() wait
            raise self.error("it is no file")
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - __exit__ closes it
        try:
            size = os.fstat(self._file.fileno()).st_size
            table = self._read_header(size)
            self.metadata = self._metadata_of(table)
            self._wanted_crc = self.metadata.pop("crc32", "")
            if not re.fullmatch("[0-9a-f]{8}", self._wanted_crc):
                raise self.error("its metadata has no crc32; it was not written by this library")
            self._header_crc = _crc_of(table)
            self.nbytes = size - self._start
            self.entries = self._entries_of(table)
        except BaseException:
            self._file.close()
            raise
        self.rewind()

    def error(self, message: str, **figures: Any) -> ArgumentError:
        """Return the error that says what is wrong with the file."""
        return ArgumentError(f"{self.path}: {message}", path=self.path, **figures)

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._file.close()

    def _read_header(self, size: int) -> dict[str, Any]:
        if size < _LENGTH_NBYTES:
            raise self.error(f"{size} bytes are no safetensors file: the length of its header takes 8")
        length = bytearray(_LENGTH_NBYTES)
        self._fill(memoryview(length))
        n = int.from_bytes(length, "little")
        if n > MAX_HEADER_NBYTES:
            raise self.error(f"its header is said to have {n} bytes, safetensors allows {MAX_HEADER_NBYTES}")
        self._start = _LENGTH_NBYTES + n
        if self._start > size:
            raise self.error(f"its header is said to have {n} bytes, behind its length there are {size - 8}")
        text = bytearray(n)
        self._fill(memoryview(text))
        try:
            table = json.loads(text.decode(), object_pairs_hook=_without_duplicates)
        except (ValueError, RecursionError) as error:
            raise self.error(f"its header is no JSON: {error}") from error
        if not isinstance(table, dict):
            raise self.error("its header is no JSON object")
        return table

    def _metadata_of(self, table: dict[str, Any]) -> dict[str, str]:
        metadata = table.get("__metadata__")
        if not isinstance(metadata, dict):
            raise self.error("it has no metadata; it was not written by this library")
        if not all(isinstance(text, str) for text in metadata.values()):
            raise self.error("its metadata are not all texts")
        return dict(metadata)

    def _entries_of(self, table: dict[str, Any]) -> tuple[Entry, ...]:
        found = []
        for name, info in table.items():
            if name == "__metadata__":
                continue
            if not isinstance(info, dict) or set(info) != {"dtype", "shape", "data_offsets"}:
                raise self.error(f"tensor {name!r} is not described by dtype, shape and data_offsets")
            code, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
            if (
                not isinstance(code, str)
                or not _are_sizes(shape)
                or not _are_sizes(offsets)
                or len(offsets) != 2
            ):
                raise self.error(
                    f"tensor {name!r} has dtype {code!r}, shape {shape!r} and data_offsets {offsets!r}, which are "
                    f"not a text, sizes and two offsets"
                )
            found.append((*offsets, Entry(name, code, tuple(shape), offsets[1] - offsets[0])))
        found.sort(key=lambda each: each[:2])
        top = 0
        for begin, stop, one in found:
            if begin != top or stop < begin:
                raise self.error(
                    f"tensor {one.name!r} takes bytes {begin} to {stop}, the one before it ends at {top}: they may "
                    f"neither overlap nor leave a gap"
                )
            top = stop
        if top != self.nbytes:
            raise self.error(f"its tensors take {top} bytes, behind the header there are {self.nbytes}")
        return tuple(one for *_, one in found)

    # -- bytes --------------------------------------------------------------------------------------------------

    def rewind(self) -> None:
        """Go to the first byte of the first entry."""
        self._file.seek(self._start)
        self._crc = self._header_crc

    def read(self, target: memoryview) -> None:
        """Fill `target` with the next bytes."""
        self._fill(target)
        self._crc = zlib.crc32(target, self._crc)
        self._progress.add(len(target))

    def check_crc(self) -> None:
        """Raise `ArgumentError` if what was read since `rewind`, which is all, is not what was written."""
        if f"{self._crc:08x}" != self._wanted_crc:
            raise self.error(
                f"it is damaged: its checksum is {self._crc:08x}, it was written with {self._wanted_crc}",
                found=f"{self._crc:08x}",
                wanted=self._wanted_crc,
            )

    def verify(self) -> None:
        """Read everything, look at the checksum, and go back to the first byte."""
        self.rewind()
        buffer = memoryview(bytearray(min(_CHUNK_NBYTES, self.nbytes)))
        left = self.nbytes
        while left:
            n = min(len(buffer), left)
            self.read(buffer[:n])
            left -= n
        self.check_crc()
        self.rewind()

    def _fill(self, target: memoryview) -> None:
        done = 0
        while done < len(target):
            n = self._file.readinto(target[done:])
            if not n:
                raise self.error("it ended while it was read; somebody else writes to it")
            done += n


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key comes twice")
    return found


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)
