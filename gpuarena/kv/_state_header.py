"""What the metadata of a file say of a cache: its spec, and which tokens it holds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

import gpuarena
from gpuarena.dtypes import DType, as_dtype, known_names
from gpuarena.errors import ArenaError, ArgumentError, ArgumentTypeError, DTypeError, ShapeError
from gpuarena.kv._state_file import Entry, Reader, entry
from gpuarena.kv.spec import BufferSpec, KVSpec, LayerSpec, SharedLayer

__all__ = [
    "Header",
    "SavedState",
    "check_entries",
    "check_spec",
    "plane_entries",
    "plane_names",
    "user_metadata",
]

FORMAT = "gpuarena.kv"
FORMAT_VERSION = "1"
_USER = "user."
_DTYPE_FIELDS = ("dtype", "value_dtype")
_SHAPE_FIELDS = ("kv_heads", "key_dim", "value_dim")
_MOST = 2**63 - 1


@dataclass(frozen=True)
class SavedState:
    """What a file of `KVCache.save` holds; `read_state` returns it."""

    spec: KVSpec
    batch: int
    """Of the cache that was saved."""
    max_tokens: int
    """Of the cache that was saved."""
    rows: int | None
    """Rows in use; None where nothing was appended since a reset."""
    held: tuple[tuple[range, ...], ...]
    """For each layer that owns keys and values, the runs of tokens that are in the file."""
    metadata: Mapping[str, str]
    """What was given to `save`."""
    library_version: str
    nbytes: int
    """Bytes of keys and values in the file."""

    @property
    def length(self) -> int:
        """Tokens that every layer had."""
        return min(self.lengths)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each layer that owns keys and values."""
        return tuple(runs[-1].stop for runs in self.held)


def user_metadata(metadata: Any) -> dict[str, str]:
    """Return what a user wants to have in a file, as entries of its metadata."""
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping):
        raise ArgumentTypeError(f"metadata must be a mapping of texts, not {type(metadata).__name__}")
    for pair in metadata.items():
        for text in pair:
            if not isinstance(text, str):
                raise ArgumentTypeError(f"metadata must be texts, not {type(text).__name__} ({text!r})")
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise ArgumentError(f"metadata {text!r}: {error}") from error
    return {_USER + name: text for name, text in metadata.items()}


# -- planes -----------------------------------------------------------------------------------------------------------


def plane_names(buffers: Iterable[BufferSpec]) -> list[tuple[str, BufferSpec]]:
    """Return a name for each plane: a region of pairs has two, keys and values.

    >>> own = LayerSpec(kv_heads=2, key_dim=8, value_dim=8, dtype="float32")
    >>> [name for name, _ in plane_names(own.buffers)]
    ['keys', 'values']
    """
    names = []
    for buffer in buffers:
        if buffer.n_planes == 1:
            names.append((buffer.name, buffer))
        else:
            parts = (
                ("keys", "values")
                if buffer.name == "pairs"
                else (f"key_{buffer.name}", f"value_{buffer.name}")
            )
            names.extend((part, buffer) for part in parts)
    return names


def plane_entries(prefix: str, layer: LayerSpec, shape: tuple[int, ...]) -> list[Entry]:
    """Return an entry for each plane of a layer, ``[*shape, dim]``."""
    return [
        entry(f"{prefix}.{name}", buffer.dtype, (*shape, buffer.dim))
        for name, buffer in plane_names(layer.buffers)
    ]


def check_entries(reader: Reader, wanted: Iterable[Entry]) -> None:
    """Raise unless the file has these arrays and no others."""
    missing = {each.name: each for each in wanted}
    for found in reader.entries:
        want = missing.pop(found.name, None)
        if want is None:
            raise reader.error(f"its metadata tell of no tensor {found.name!r}", field=found.name)
        if found.code != want.code:
            raise DTypeError(
                f"{reader.path}: tensor {found.name!r} has dtype {found.code}, its metadata tell of {want.code}",
                path=reader.path,
                field=found.name,
                found=found.code,
                wanted=want.code,
            )
        if found.shape != want.shape:
            raise ShapeError(
                f"{reader.path}: tensor {found.name!r} is {list(found.shape)}, its metadata tell of {list(want.shape)}",
                path=reader.path,
                field=found.name,
                found=found.shape,
                wanted=want.shape,
            )
        if found.nbytes != want.nbytes:
            raise reader.error(
                f"tensor {found.name!r} takes {found.nbytes} bytes, its shape {want.nbytes}",
                field=found.name,
                found=found.nbytes,
                wanted=want.nbytes,
            )
    if missing:
        raise reader.error(f"it lacks {len(missing)} tensors, the first is {next(iter(missing))!r}")


# -- the spec ---------------------------------------------------------------------------------------------------------


def spec_text(spec: KVSpec) -> str:
    """Return a spec as JSON."""
    return json.dumps([_layer_fields(layer) for layer in spec.layers])


def _layer_fields(layer: LayerSpec | SharedLayer) -> dict[str, Any]:
    values = {field.name: getattr(layer, field.name) for field in fields(layer)}
    return {name: value.name if isinstance(value, DType) else value for name, value in values.items()}


def check_spec(path: str, found: KVSpec, wanted: KVSpec) -> None:
    """Raise unless a file's spec is the one that is wanted, naming the first field that differs."""
    n_found, n_wanted = len(found.layers), len(wanted.layers)
    if n_found != n_wanted:
        raise _mismatch(ArgumentError, path, None, "layers", n_found, n_wanted)
    for number, (one, other) in enumerate(zip(found.layers, wanted.layers, strict=True)):
        if type(one) is not type(other):
            raise _mismatch(ArgumentError, path, number, "kind", _kind(one), _kind(other))
        for field in fields(one):
            have, want = getattr(one, field.name), getattr(other, field.name)
            if have != want:
                kind: type[ArenaError] = ArgumentError
                if field.name in _DTYPE_FIELDS:
                    kind = DTypeError
                elif field.name in _SHAPE_FIELDS:
                    kind = ShapeError
                raise _mismatch(kind, path, number, field.name, have, want)


def _kind(layer: LayerSpec | SharedLayer) -> str:
    return f"shared with layer {layer.source}" if isinstance(layer, SharedLayer) else "a layer of its own"


def _mismatch(
    kind: type[ArenaError], path: str, layer: int | None, field: str, found: Any, wanted: Any
) -> ArenaError:
    where = "" if layer is None else f"layer {layer}: "
    return kind(
        f"{path}: {where}{field} is {found} in the file, {wanted} in the cache that it is wanted for; nothing was "
        f"changed. KVCache.load(path, arena) makes a cache like the one that was saved",
        path=path,
        layer=layer,
        field=field,
        found=found,
        wanted=wanted,
    )


# -- reading ----------------------------------------------------------------------------------------------------------


class Header:
    """Reads the metadata of a file, and raises `ArgumentError` for what cannot be."""

    def __init__(self, reader: Reader, *kinds: str) -> None:
        self._reader = reader
        self._metadata = reader.metadata
        for name, *wanted in (("format", FORMAT), ("format_version", FORMAT_VERSION), ("kind", *kinds)):
            if self.text(name) not in wanted:
                raise self.error(name, self.text(name), " or ".join(map(repr, wanted)))
        self.kind = self.text("kind")
        self.library_version = self.text("library_version")
        self.user = {
            name.removeprefix(_USER): text for name, text in self._metadata.items() if name.startswith(_USER)
        }

    def error(self, field: str, found: Any, wanted: str) -> ArgumentError:
        """Return the error for a field of the metadata."""
        shown = repr(found)
        shown = shown if len(shown) <= 200 else f"{shown[:200]}..."
        return self._reader.error(
            f"{field} is {shown} in its metadata, wanted is {wanted}", field=field, found=found, wanted=wanted
        )

    def text(self, field: str) -> str:
        """Return a text."""
        try:
            return self._metadata[field]
        except KeyError:
            raise self._reader.error(f"its metadata lack {field!r}", field=field) from None

    def number(self, field: str, *, least: int = 1) -> int:
        """Return a whole number."""
        text = self.text(field)
        if not re.fullmatch("[0-9]{1,19}", text) or not least <= int(text) <= _MOST:
            raise self.error(field, text, f"a number from {least} to {_MOST}")
        return int(text)

    def json(self, field: str) -> Any:
        """Return what a text of JSON stands for."""
        text = self.text(field)
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise self.error(field, text, "JSON") from None

    def numbers(self, field: str, found: Any) -> list[int]:
        """Return a list of whole numbers that is part of a field."""
        if not isinstance(found, list) or not all(type(n) is int and 0 <= n <= _MOST for n in found):
            raise self.error(field, found, f"a list of numbers from 0 to {_MOST}")
        return found

    def spec(self) -> KVSpec:
        """Return the spec of the cache."""
        layers = self.json("spec")
        if not isinstance(layers, list):
            raise self.error("spec", layers, "a list of layers")
        spec: KVSpec = self._made("spec", layers, lambda: KVSpec(self._layer(layer) for layer in layers))
        return spec

    def _layer(self, found: Any) -> LayerSpec | SharedLayer:
        kind = SharedLayer if isinstance(found, dict) and "source" in found else LayerSpec
        known = {field.name: field for field in fields(kind)}
        if not isinstance(found, dict) or not set(found) <= set(known):
            raise self.error("spec", found, f"a layer of {', '.join(known)}")
        lacking = [
            name for name, field in known.items() if name not in found and field.default is MISSING
        ]  # later versions may add fields that have defaults
        if lacking:
            raise self.error("spec", found, f"a layer with {', '.join(lacking)}")
        for value in found.values():
            if type(value) not in (int, str, type(None)) or (type(value) is int and value > _MOST):
                raise self.error("spec", found, f"a layer of texts, and numbers up to {_MOST}")
        values = dict(found)
        for name in _DTYPE_FIELDS:
            if name in values:
                if values[name] not in known_names():
                    raise self.error("spec", values[name], f"a dtype, one of {', '.join(known_names())}")
                values[name] = as_dtype(values[name])
        layer: LayerSpec | SharedLayer = self._made("spec", found, lambda: kind(**values))
        if isinstance(layer, LayerSpec):
            self._made("spec", found, lambda: layer.buffers)  # it is only now that a storage has to be known
        return layer

    def _made(self, field: str, found: Any, make: Any) -> Any:
        """Return what `make` does, or raise the error for a field that it cannot be made of."""
        try:
            return make()
        except (ArgumentError, ArgumentTypeError, DTypeError) as error:
            if getattr(error, "path", None) is not None:
                raise
            raise self.error(field, found, f"what a spec can be: {error}") from error

    def runs(self, layer: LayerSpec, number: int, found: Any) -> tuple[range, ...]:
        """Return the runs of tokens that a layer holds, which a cache with such a layer can come to hold."""
        pairs = [self.numbers("held", pair) for pair in found] if isinstance(found, list) else []
        if not pairs or any(len(pair) != 2 or pair[0] > pair[1] for pair in pairs):
            raise self.error("held", found, f"the runs of tokens of layer {number}, each a start and a stop")
        runs = tuple(range(*pair) for pair in pairs)
        length = runs[-1].stop
        if layer.slack is None or layer.window is None:
            possible = runs == (range(length),)
        else:
            most = layer.n_slots(length)
            if len(runs) == 1:
                possible = runs[0].start == 0 and length <= most
            else:
                first = runs[1].start
                possible = (
                    len(runs) == 2
                    and (runs[0].start, runs[0].stop) == (0, layer.sinks)
                    and first > layer.sinks
                    and layer.window - 1 <= length - first <= most - layer.sinks
                )
        if not possible:
            raise self.error("held", found, f"runs that layer {number} ({layer}) can hold")
        return runs


def common_metadata(kind: str, spec: KVSpec) -> dict[str, str]:
    """Return what the metadata of every kind of file begin with."""
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "library_version": gpuarena.__version__,
        "kind": kind,
        "spec": spec_text(spec),
    }
