"""Files in the safetensors format, written as streams: the functions of safetensors want all of the data at once.

The layout: the length of the header, 8 bytes little-endian; the header, JSON; the bytes of the tensors, without gaps.
It is described in https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gpuarena._files import replacing
from gpuarena.dtypes import DType
from gpuarena.errors import ArgumentError, ArgumentTypeError, DTypeError
from gpuarena.kv.state._pieces import Mover, Parts

#: What safetensors calls the types; it has no others, or packs them below a byte, as an arena does not.
CODES = {
    "bool": "BOOL",
    **{f"{sign}int{bits}": f"{sign or 'i'}{bits}".upper() for bits in (8, 16, 32, 64) for sign in ("", "u")},
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    "bfloat16": "BF16",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}
#: Bytes. The limit of safetensors itself.
MAX_HEADER_NBYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a file."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def code(self) -> str:
        """What safetensors calls the dtype; `DTypeError` if it has none such."""
        if self.dtype.name not in CODES:
            raise DTypeError(
                f"{self.name}: safetensors has no dtype {self.dtype}; a file can hold {', '.join(CODES)}",
                dtype=self.dtype.name,
            )
        return CODES[self.dtype.name]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


def as_path(path: Any) -> str:
    """Return a path as text, or raise `ArgumentTypeError`."""
    try:
        return os.fsdecode(path)
    except TypeError:
        raise ArgumentTypeError(f"path must be a text or a path, not {type(path).__name__}") from None


class Progress:
    """Calls ``callback(done_nbytes, total_nbytes)`` whenever more is done, and at least once."""

    def __init__(self, callback: Callable[[int, int], object] | None) -> None:
        if callback is not None and not callable(callback):
            raise ArgumentTypeError(f"progress must be a function, not {type(callback).__name__}")
        self._callback = callback
        self._done_nbytes = self._total_nbytes = 0

    def start(self, total_nbytes: int) -> None:
        """Note what there is to do; if it is nothing, it is done."""
        self._total_nbytes = total_nbytes
        if total_nbytes == 0:
            self.add(0)

    def add(self, nbytes: int) -> None:
        """Note that `nbytes` more are done."""
        self._done_nbytes += nbytes
        if self._callback is not None:
            self._callback(self._done_nbytes, self._total_nbytes)


def write_file(
    path: str,
    tensors: Iterable[Tensor],
    metadata: Mapping[str, str],
    parts: Parts,
    mover: Mover,
    progress: Progress,
) -> None:
    """Write a file, and put it in place of an old one when it is complete; whatever is raised, the old one stays."""
    # The widest types first, so that every tensor is aligned to its items.
    ordered = sorted(tensors, key=lambda tensor: tensor.dtype.itemsize, reverse=True)
    header = _header(ordered, metadata)
    with replacing(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        progress.start(sum(tensor.nbytes for tensor in ordered))
        for tensor in ordered:
            for _, array, key in parts(tensor.name):
                piece = mover.take(array, key)
                file.write(piece.data)
                progress.add(piece.nbytes)
                del piece  # before the next one takes as much


def _header(tensors: Iterable[Tensor], metadata: Mapping[str, str]) -> bytes:
    table: dict[str, Any] = {"__metadata__": metadata}
    begin = 0
    for tensor in tensors:
        stop = begin + tensor.nbytes
        table[tensor.name] = {"dtype": tensor.code, "shape": tensor.shape, "data_offsets": (begin, stop)}
        begin = stop
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_NBYTES:
        raise ArgumentError(
            f"the header would take {len(text)} bytes, safetensors allows {MAX_HEADER_NBYTES}: give less metadata, or "
            f"save in several files"
        )
    return text
