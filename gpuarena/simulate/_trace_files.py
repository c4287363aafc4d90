"""The formats that traces are published in, from bytes to rows of integers."""

from __future__ import annotations

import contextlib
import gzip
import io
import itertools
import json
import os
import re
import stat
import zlib
from collections.abc import Callable, Generator, Iterator
from datetime import datetime
from typing import Any, NoReturn

from gpuarena.errors import ArgumentError, ArgumentTypeError

__all__ = ["RequestTraceError", "read_trace"]

#: ``(arrival_us, prompt, output, prefix)``
Row = tuple[int, int, int, tuple[int, ...]]

_KNOWN = (
    "known are CSV with the columns TIMESTAMP,ContextTokens,GeneratedTokens (Azure), JSON lines with timestamp, "
    "input_length, output_length, hash_ids (Mooncake), and CSV with the columns num_prefill_tokens,num_decode_tokens "
    "or prompt,output, with times also arrival_s,prompt,output (seconds); each also as gzip"
)
_MOONCAKE_BLOCK = 512  # tokens, as its publication says; the files do not
_MOST_DIGITS = 15  # in microseconds and tokens; sums stay within 64 bits
_GZIP = b"\x1f\x8b"
_LONGEST_LINE = 16 << 20  # bytes; a file of zeros, or a small gzip file of many, does not fill the memory


class RequestTraceError(ArgumentError):
    """A file of requests cannot be read, or is none.

    Attributes
    ----------
    path : str
        The file.
    line : int or None
        The line at fault, from 1; None where it is not a line's.
    """

    path: str
    line: int | None


def read_trace(path: str | os.PathLike[str]) -> tuple[list[Row], str, int | None]:
    """Return the rows of a file, its name and the tokens of a block that a hash is for."""
    if not isinstance(path, str | os.PathLike):
        raise ArgumentTypeError(f"the path of a trace must be a text or a path, not {type(path).__name__}")
    where = os.fspath(path)
    if not isinstance(where, str):
        raise ArgumentTypeError("the path of a trace must be a text, not bytes")
    file = _File(where)
    with contextlib.closing(file.lines()) as lines:
        first, header = next(lines, (0, ""))
        if not first:
            raise RequestTraceError(f"{where} is empty; {_KNOWN}", path=where, line=None)
        if header.lstrip().startswith("{"):
            rows, block_size = _json_rows(file, first, header, lines)
        else:
            rows, block_size = _csv_rows(file, first, header, lines), None
    return rows, os.path.basename(where), block_size


class _File:
    """The lines of a file, one at a time, and errors that name it."""

    def __init__(self, path: str) -> None:
        self.path = path

    def fail(self, line: int | None, what: str, cause: BaseException | None = None) -> NoReturn:
        place = self.path if line is None else f"{self.path}, line {line}"
        raise RequestTraceError(f"{place}: {what}", path=self.path, line=line) from cause

    def lines(self) -> Generator[tuple[int, str]]:
        """Yield number and text of the lines that hold something."""
        for number, data in enumerate(self._byte_lines(), start=1):
            try:
                line = data.decode()
            except UnicodeDecodeError as error:
                self.fail(number, f"byte 0x{data[error.start]:02x} is not UTF-8 text; {_KNOWN}")
            if number == 1:
                line = line.removeprefix("\ufeff")
            if line and not line.isspace():
                yield number, line

    def _byte_lines(self) -> Iterator[bytes]:
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(self._opened())
            stream: io.BufferedReader | gzip.GzipFile = file
            for number in itertools.count(1):
                try:
                    if number == 1 and file.peek(2)[:2] == _GZIP:
                        stream = stack.enter_context(gzip.GzipFile(fileobj=file))
                    line = stream.readline(_LONGEST_LINE + 1)
                except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                    self.fail(number, f"the gzip data is damaged or cut off here ({error})", error)
                except OSError as error:
                    self._fail_to_read(error)
                if not line:
                    return
                if len(line) > _LONGEST_LINE:
                    self.fail(number, f"the line is longer than {_LONGEST_LINE >> 20} MiB; {_KNOWN}")
                yield line.removesuffix(b"\n")

    def _opened(self) -> io.BufferedReader:
        try:
            self._check_kind(os.stat(self.path).st_mode)  # before: opening a device may do something
            file = open(self.path, "rb")  # noqa: SIM115 - for the caller to close
        except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
            if isinstance(error, RequestTraceError):
                raise
            self._fail_to_read(error)
        try:
            self._check_kind(os.fstat(file.fileno()).st_mode)  # after: another file may have taken its place
        except BaseException:
            file.close()
            raise
        return file

    def _check_kind(self, mode: int) -> None:
        if stat.S_ISDIR(mode):
            self.fail(None, "is a folder, not a file of requests")
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):  # a device might never end
            self.fail(None, "is a device, not a file of requests")

    def _fail_to_read(self, error: Exception) -> NoReturn:
        reason = getattr(error, "strerror", None) or str(error)
        self.fail(None, f"cannot be read: {reason[:1].lower() + reason[1:]}", error)


def _csv_rows(file: _File, first: int, header: str, lines: Iterator[tuple[int, str]]) -> list[Row]:
    names = [name.strip().lower() for name in header.split(",")]
    known = [one for one in _CSV_FORMATS if all(name in names for name in one[0])]
    if not known:
        file.fail(first, f"the first line is {_shown(header)}, which is no known format; {_KNOWN}")
    columns, reader = known[0]
    for name in columns:
        if names.count(name) > 1:
            file.fail(first, f"the column {name} is there {names.count(name)} times")
    rows = reader(file, names, _fields(file, len(names), lines))
    if not rows:
        file.fail(first, "there is no request after the names of the columns")
    return rows


def _fields(file: _File, n_columns: int, lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, list[str]]]:
    for number, line in lines:
        fields = line.split(",")
        if len(fields) != n_columns:
            file.fail(number, f"{n_columns} fields are wanted, found {len(fields)}: {_shown(line)}")
        yield number, fields


def _azure_rows(file: _File, names: list[str], lines: Iterator[tuple[int, list[str]]]) -> list[Row]:
    at_time, at_prompt, at_output = map(names.index, _AZURE)
    rows: list[Row] = []
    first = before = None
    for number, fields in lines:
        text = fields[at_time].strip()
        try:
            time = datetime.fromisoformat(text)  # cuts off what is after the microsecond
        except ValueError:
            file.fail(number, f"TIMESTAMP {_shown(text)} is no date and time")
        if first is None or before is None:
            first = before = time
        if (time.tzinfo is None) != (first.tzinfo is None):
            file.fail(
                number, f"TIMESTAMP {_shown(text)} and that of the first row differ in having a time zone"
            )
        if time < before:
            file.fail(number, f"times go back: {_shown(text)} after {str(before)!r}")
        before = time
        passed = time - first
        arrival_us = (passed.days * 86_400 + passed.seconds) * 1_000_000 + passed.microseconds
        prompt = _length(file, number, "ContextTokens", fields[at_prompt])
        rows.append((arrival_us, prompt, _length(file, number, "GeneratedTokens", fields[at_output]), ()))
    return rows


def _timed_rows(file: _File, names: list[str], lines: Iterator[tuple[int, list[str]]]) -> list[Row]:
    at_time, at_prompt, at_output = map(names.index, _TIMED)
    rows: list[Row] = []
    start_us = before_us = None
    for number, fields in lines:
        text = fields[at_time].strip()
        found = re.fullmatch(r"([0-9]{1,9})(?:\.([0-9]{0,15}))?", text)
        if found is None:
            file.fail(number, f"arrival_s is {_shown(text)}, no number of seconds from 0 to 999999999.9")
        # What is after the microsecond is cut off, as of dates.
        time_us = int(found[1]) * 1_000_000 + int((found[2] or "")[:6].ljust(6, "0"))
        if start_us is None or before_us is None:
            start_us = before_us = time_us
        if time_us < before_us:
            file.fail(number, f"times go back: {_shown(text)} s after {before_us / 1e6} s")
        before_us = time_us
        prompt = _length(file, number, "prompt", fields[at_prompt])
        rows.append((time_us - start_us, prompt, _length(file, number, "output", fields[at_output]), ()))
    return rows


def _length_rows(prompt_name: str, output_name: str) -> Callable[..., list[Row]]:
    def rows_of(file: _File, names: list[str], lines: Iterator[tuple[int, list[str]]]) -> list[Row]:
        at_prompt, at_output = names.index(prompt_name), names.index(output_name)
        at_total = names.index("num_total_tokens") if "num_total_tokens" in names else None
        rows: list[Row] = []
        for number, fields in lines:
            prompt = _length(file, number, prompt_name, fields[at_prompt])
            output = _length(file, number, output_name, fields[at_output])
            if at_total is not None:
                total = _length(file, number, "num_total_tokens", fields[at_total])
                if total != prompt + output:
                    file.fail(
                        number, f"num_total_tokens is {total}, but {prompt} + {output} is {prompt + output}"
                    )
            rows.append((0, prompt, output, ()))
        return rows

    return rows_of


_AZURE = ("timestamp", "contexttokens", "generatedtokens")
_TIMED = ("arrival_s", "prompt", "output")
_CSV_FORMATS: tuple[tuple[tuple[str, ...], Callable[..., list[Row]]], ...] = (
    (_AZURE, _azure_rows),
    (_TIMED, _timed_rows),
    *(
        (names, _length_rows(*names))
        for names in (("num_prefill_tokens", "num_decode_tokens"), ("prompt", "output"))
    ),
)


def _length(file: _File, number: int, name: str, text: str) -> int:
    text = text.strip()
    if not text:
        file.fail(number, f"{name} is missing")
    # int() also reads "1_000", "+5" and digits of other scripts; and refuses more than 4300 digits.
    if not (text.isascii() and text.isdigit()) or len(text) > _MOST_DIGITS:
        file.fail(number, f"{name} is {_shown(text)}, no integer from 1 to 10**{_MOST_DIGITS} - 1")
    length = int(text)
    if length < 1:
        file.fail(number, f"{name} is {length}; at least 1 token is wanted")
    return length


def _json_rows(
    file: _File, first: int, header: str, lines: Iterator[tuple[int, str]]
) -> tuple[list[Row], int | None]:
    start = _json_object(file, first, header)
    if not {"timestamp", "input_length", "output_length"} & start.keys():
        file.fail(first, f"the keys are {', '.join(map(_shown, start)) or 'none'}; {_KNOWN}")
    has_hashes = "hash_ids" in start
    start_ms = before_ms = _json_integer(file, first, start, "timestamp", 0)
    rows = [_json_row(file, first, start, start_ms, has_hashes)]
    for number, line in lines:
        value = _json_object(file, number, line)
        time_ms = _json_integer(file, number, value, "timestamp", 0)
        if time_ms < before_ms:
            file.fail(number, f"times go back: {time_ms} ms after {before_ms} ms")
        before_ms = time_ms
        rows.append(_json_row(file, number, value, start_ms, has_hashes))
    return rows, _MOONCAKE_BLOCK if has_hashes else None


def _json_object(file: _File, number: int, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:  # ValueError also for integers of thousands of digits
        file.fail(number, f"no JSON object: {getattr(error, 'msg', error)}: {_shown(line)}", error)
    if not isinstance(value, dict):
        file.fail(number, f"a JSON object is wanted, found {_shown(line)}")
    return value


def _json_row(file: _File, number: int, value: dict[str, Any], start_ms: int, has_hashes: bool) -> Row:
    arrival_us = (value["timestamp"] - start_ms) * 1000
    prompt = _json_integer(file, number, value, "input_length", 1)
    output = _json_integer(file, number, value, "output_length", 1)
    if has_hashes != ("hash_ids" in value):
        file.fail(number, f"hash_ids {'is missing' if has_hashes else 'is here'}, unlike in the first line")
    hashes = value.get("hash_ids", [])
    if not isinstance(hashes, list) or not all(type(one) is int for one in hashes):
        file.fail(number, f"hash_ids is {_shown(hashes)}, no list of integers")
    blocks = -(-prompt // _MOONCAKE_BLOCK)
    if len(hashes) > blocks:
        file.fail(
            number,
            f"hash_ids has {len(hashes)} entries, but input_length {prompt} is {blocks} blocks of "
            f"{_MOONCAKE_BLOCK} tokens",
        )
    return arrival_us, prompt, output, tuple(hashes)


def _json_integer(file: _File, number: int, value: dict[str, Any], key: str, least: int) -> int:
    if key not in value:
        file.fail(number, f"{key} is missing")
    found = value[key]
    if type(found) is not int or found >= 10**_MOST_DIGITS:
        file.fail(number, f"{key} is {_shown(found)}, no integer from {least} to 10**{_MOST_DIGITS} - 1")
    if found < least:
        file.fail(number, f"{key} is {found}; at least {least} is wanted")
    return found


def _shown(value: Any) -> str:
    """Return what was found, short, in quotes and on one line."""
    text = value.strip() if isinstance(value, str) else str(value)
    return repr(text if len(text) <= 60 else text[:57] + "...")
