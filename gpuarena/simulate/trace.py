"""Requests that arrive, as servers log them: when, how long a prompt, how long an answer."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, overload

from gpuarena.errors import ArgumentError, ArgumentTypeError
from gpuarena.simulate._trace_files import RequestTraceError, read_trace

__all__ = ["Request", "RequestTrace", "RequestTraceError", "load_trace"]


class Request(NamedTuple):
    """One request of a trace."""

    arrival_us: int
    """Microseconds since the first request of the trace."""
    prompt: int
    """Tokens, at least 1."""
    output: int
    """Tokens of the answer, at least 1."""
    prefix: tuple[int, ...] = ()
    """A hash for each block of the prompt, of it and all before it; the last block may be partial."""


class RequestTrace(Sequence[Request]):
    """Requests in the order in which they arrive; it cannot be changed.

    >>> trace = RequestTrace([(0, 374, 44), (4_314_478, 396, 109)], name="two")
    >>> trace[1].prompt
    396
    >>> trace[:1]
    RequestTrace('two', 1 request, 0.0 s)
    >>> [(request.prompt, request.output) for request in trace]
    [(374, 44), (396, 109)]

    A slice is a trace of the same name, and its times stay as they are. Traces are equal when their requests and block
    sizes are; the name does not count.

    Parameters
    ----------
    requests : iterable of Request, or of tuples like it
        By arrival.
    name : str
        Of the whole, for people.
    block_size : int, optional
        Tokens of the prompt for each hash of `Request.prefix`; needed if there are any.

    Raises
    ------
    ArgumentTypeError
        A request is no tuple of integers.
    ArgumentError
        A time is negative or before the one in front of it, a length is less than 1, or there are more hashes than
        blocks. `index` is the request, from 0.
    """

    __slots__ = ("_block_size", "_name", "_requests")

    def __init__(
        self, requests: Iterable[Any], *, name: str = "requests", block_size: int | None = None
    ) -> None:
        if not isinstance(name, str):
            raise ArgumentTypeError(f"the name of a trace must be a text, not {type(name).__name__}")
        if block_size is not None:
            if not _is_integer(block_size):
                raise ArgumentTypeError(f"block_size must be an integer, not {type(block_size).__name__}")
            if block_size < 1:
                raise ArgumentError(f"block_size must be at least 1 token, not {block_size}")
        made = tuple(_request(index, value) for index, value in enumerate(requests))
        _check(made, block_size)
        self._set(made, name, block_size)

    @classmethod
    def from_requests(
        cls, requests: Iterable[Any], *, name: str = "requests", block_size: int | None = None
    ) -> RequestTrace:
        """Return the trace of these requests, sorted by arrival; those that arrive together keep their order.

        >>> RequestTrace.from_requests([(5, 7, 1), (0, 3, 1)])[0].prompt
        3
        """
        made = [_request(index, value) for index, value in enumerate(requests)]
        return cls(sorted(made, key=lambda request: request.arrival_us), name=name, block_size=block_size)

    def _set(self, requests: tuple[Request, ...], name: str, block_size: int | None) -> None:
        self._requests = requests
        self._name = name
        self._block_size = block_size

    @classmethod
    def _of(cls, requests: tuple[Request, ...], name: str, block_size: int | None) -> RequestTrace:
        """Return a trace of requests that are checked already."""
        trace = cls.__new__(cls)
        trace._set(requests, name, block_size)
        return trace

    @property
    def name(self) -> str:
        """What people call it; the file's name where it was loaded."""
        return self._name

    @property
    def block_size(self) -> int | None:
        """Tokens of the prompt for each hash of `Request.prefix`, or None where there are no hashes."""
        return self._block_size

    @property
    def duration_s(self) -> float:
        """Seconds from time 0 to the last arrival."""
        return self._requests[-1].arrival_us / 1e6 if self._requests else 0.0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @overload
    def __getitem__(self, index: int) -> Request: ...
    @overload
    def __getitem__(self, index: slice) -> RequestTrace: ...
    def __getitem__(self, index: int | slice) -> Request | RequestTrace:
        if not isinstance(index, slice):
            return self._requests[index]
        if index.step is not None and index.step < 0:
            raise ArgumentError(f"a trace cannot be read backwards (step {index.step}): times would go back")
        return self._of(self._requests[index], self._name, self._block_size)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RequestTrace):
            return NotImplemented
        return self._requests == other._requests and self._block_size == other._block_size

    def __hash__(self) -> int:
        return hash((self._requests, self._block_size))

    def __reduce__(self) -> Any:
        return _rebuild, (self._requests, self._name, self._block_size)

    def __repr__(self) -> str:
        count = f"{len(self)} request{'' if len(self) == 1 else 's'}"
        blocks = f", blocks of {self._block_size} tokens" if self._block_size else ""
        return f"RequestTrace({self._name!r}, {count}, {self.duration_s:.1f} s{blocks})"


def load_trace(path: str | os.PathLike[str]) -> RequestTrace:
    r"""Read the trace in a file.

    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "lengths.csv"
    >>> _ = path.write_text("prompt,output\n374,44\n396,109\n")
    >>> load_trace(path)
    RequestTrace('lengths.csv', 2 requests, 0.0 s)

    The format is recognised by the first line, not by the name. These are known, each also as gzip:

    - CSV with the columns ``TIMESTAMP,ContextTokens,GeneratedTokens``, as in the Azure LLM inference traces: a date and
      time, of which digits after the microsecond are cut off.
    - A JSON object a line with ``timestamp`` (milliseconds), ``input_length``, ``output_length`` and, in all lines or
      none, ``hash_ids`` of blocks of 512 tokens, as in the Mooncake traces.
    - CSV with the columns ``num_prefill_tokens,num_decode_tokens`` or ``prompt,output``: lengths only, which all
      arrive at time 0.
    - CSV with the columns ``arrival_s,prompt,output``: seconds, of which digits after the microsecond are cut off.

    Other columns and keys are ignored, and so are empty lines. Times are from the first request. A CSV file whose
    very last digits are missing reads as one with a smaller last number; any other cut is found.

    Raises
    ------
    RequestTraceError
        There is no such file or it cannot be read, its format is not known, or a line of it is wrong; `path` and
        `line` say where.
    """
    rows, name, block_size = read_trace(path)
    return RequestTrace._of(tuple(map(Request._make, rows)), name, block_size)


def _rebuild(requests: tuple[Request, ...], name: str, block_size: int | None) -> RequestTrace:
    return RequestTrace._of(requests, name, block_size)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _request(index: int, value: Any) -> Request:
    if type(value) is not Request:
        if not isinstance(value, tuple | list) or len(value) not in (3, 4):
            raise ArgumentTypeError(
                f"request {index} is {value!r:.80}; write (arrival_us, prompt, output) or "
                f"(arrival_us, prompt, output, prefix)",
                index=index,
            )
        value = Request(*value)
    for field in ("arrival_us", "prompt", "output"):
        number = getattr(value, field)
        if not _is_integer(number):
            raise ArgumentTypeError(
                f"{field} of request {index} must be an integer, not {type(number).__name__}", index=index
            )
    prefix = value.prefix
    if not isinstance(prefix, tuple | list) or not all(map(_is_integer, prefix)):
        raise ArgumentTypeError(f"prefix of request {index} must be a tuple of integers", index=index)
    request: Request = value
    return request if type(prefix) is tuple else request._replace(prefix=tuple(prefix))


def _check(requests: tuple[Request, ...], block_size: int | None) -> None:
    before = 0
    for index, (arrival_us, prompt, output, prefix) in enumerate(requests):
        if arrival_us < 0:
            raise ArgumentError(f"request {index} arrives at {arrival_us} us, before time 0", index=index)
        if arrival_us < before:
            raise ArgumentError(
                f"request {index} arrives at {arrival_us} us, before request {index - 1} at {before} us; "
                f"RequestTrace.from_requests sorts them",
                index=index,
            )
        if prompt < 1 or output < 1:
            raise ArgumentError(
                f"request {index} has a prompt of {prompt} and an output of {output} tokens; each must be at least 1",
                index=index,
            )
        if prefix:
            if block_size is None:
                raise ArgumentError(
                    f"request {index} has hashes of its prefix, but no block_size says for how many tokens each",
                    index=index,
                )
            if len(prefix) > -(-prompt // block_size):
                raise ArgumentError(
                    f"request {index} has {len(prefix)} hashes for a prompt of {prompt} tokens, "
                    f"which is {-(-prompt // block_size)} blocks of {block_size}",
                    index=index,
                )
        before = arrival_us
