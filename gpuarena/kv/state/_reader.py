"""Files of states, read by safetensors, which sees to it that every tensor lies inside of the file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from gpuarena.errors import BackendError, StateError
from gpuarena.kv.state._pieces import Index, Mover, Parts
from gpuarena.kv.state._writer import Progress, Tensor, as_path

#: Digits of the largest numbers that a file may hold: more are no sizes, and slow to read.
_MOST_DIGITS = 19


class StateReader:
    """A file that was opened for an arena of `library`; a context manager.

    It raises `StateError` for what is no such file or damaged, `BackendError` where safetensors is not installed, and
    `OSError` for what cannot be read.
    """

    def __init__(self, path: Any, library: str = "host") -> None:
        self.path = as_path(path)
        self._is_torch = library == "torch"
        self._offsets: dict[str, int] = {}
        try:
            import safetensors
        except ImportError as error:
            raise BackendError(
                "reading a state needs safetensors: pip install 'gpuarena[state]'", backend="safetensors"
            ) from error
        self._error: Any = safetensors.SafetensorError
        if os.path.exists(self.path) and not os.path.isfile(self.path):  # a pipe would make it wait
            raise self.error("it is no file")
        opened: Any = safetensors.safe_open
        with self._typed("it is no safetensors file, or damaged"):
            self._file = opened(self.path, framework="pt" if self._is_torch else "numpy")
        self.metadata: dict[str, str] = self._file.metadata() or {}

    def __enter__(self) -> StateReader:
        return self

    def __exit__(self, *of_error: object) -> None:
        self._file.__exit__(*of_error)

    @contextmanager
    def _typed(self, what: str) -> Iterator[None]:
        """Raise `StateError` for what safetensors finds."""
        try:
            yield
        except self._error as error:
            raise self.error(f"{what}: {error}") from error

    def error(self, message: str, **figures: Any) -> StateError:
        """Return the error that says what is wrong with the file."""
        return StateError(f"{self.path}: {message}", path=self.path, **figures)

    # -- metadata -----------------------------------------------------------------------------------------------

    def text(self, field: str, *wanted: str) -> str:
        """Return a text of the metadata, one of `wanted` if any are given."""
        text = self.metadata.get(field)
        if text is None:
            raise self.error(f"its metadata lack {field!r}; this library did not write it", field=field)
        if wanted and text not in wanted:
            names = " or ".join(map(repr, wanted))
            raise self.error(
                f"{field} is {_shown(text)}, wanted is {names}", field=field, found=text, wanted=names
            )
        return text

    def value(self, field: str, make: Callable[[Any], Any]) -> Any:
        """Return what `make` makes of the JSON of a field; the errors that it raises become `StateError`."""
        text = self.text(field)
        try:
            return make(json.loads(text, parse_int=_size))
        # What constructors raise for values, and Python for what is unknown, missing, or of another type.
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise self.error(
                f"{field} is {_shown(text)} in its metadata, which cannot be: {error}",
                field=field,
                found=text,
            ) from error

    # -- tensors ------------------------------------------------------------------------------------------------

    def check_tensors(self, wanted: Iterable[Tensor]) -> None:
        """Raise unless the file has these tensors and no others."""
        missing = {tensor.name: tensor for tensor in wanted}
        self.tensors = []
        for name in self._file.offset_keys():
            if name not in missing:
                raise self.error(f"its metadata tell of no tensor {name!r}", field=name)
            tensor, found = missing.pop(name), self._file.get_slice(name)
            for have, want in ((found.get_dtype(), tensor.code), (tuple(found.get_shape()), tensor.shape)):
                if have != want:
                    raise self.error(
                        f"tensor {name!r} is {have}, its metadata tell of {want}",
                        field=name,
                        found=have,
                        wanted=want,
                    )
            self.tensors.append(tensor)
        if missing:
            raise self.error(f"it lacks {len(missing)} tensors, the first is {next(iter(missing))!r}")
        offset = os.path.getsize(self.path)  # they lie without gaps up to the end, as safetensors found
        for tensor in reversed(self.tensors):
            offset -= tensor.nbytes
            self._offsets[tensor.name] = offset

    def fill(self, parts: Parts, mover: Mover, progress: Progress) -> None:
        """Write all tensors to `parts`."""
        progress.start(sum(tensor.nbytes for tensor in self.tensors))
        for tensor in self.tensors:
            for index, array, key in parts(tensor.name):
                piece = self._read(tensor, index)
                mover.put(array, key, piece)
                progress.add(piece.nbytes)
                del piece  # before the next one takes as much

    def _read(self, tensor: Tensor, index: Index) -> Any:
        """Return a piece of a tensor as bytes, ``[..., dim * itemsize]``."""
        if tensor.code.startswith("F8") and not self._is_torch:
            # safetensors asks NumPy for the type, which has none of that name. Its items are bytes.
            offset = self._offsets[tensor.name]
            return np.memmap(self.path, np.uint8, mode="c", offset=offset, shape=tensor.shape)[index]
        with self._typed(f"{tensor.name} cannot be read"):
            piece = self._file.get_slice(tensor.name)[index]
        if self._is_torch:
            import torch

            return piece.contiguous().view(torch.uint8)
        return piece.view(np.uint8)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 200 else f"{text[:200]}...")


def _size(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError("no size is so large")
    return int(digits)
