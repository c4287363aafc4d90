"""What a file says of the cache it was written from, in its metadata."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import gpuarena
from gpuarena.dtypes import DType, known_names
from gpuarena.errors import ArgumentError, ArgumentTypeError
from gpuarena.kv.spec import BufferSpec, KVSpec, LayerSpec, SharedLayer, positive
from gpuarena.kv.state._reader import StateReader
from gpuarena.kv.state._writer import Tensor

FORMAT = "gpuarena.kv"
FORMAT_VERSION = "1"
ROWS, SEQUENCES = "rows", "sequences"
#: What the names of a user's metadata begin with.
USER = "user."
_MOST_POSITION = 2**62  # of a `LaneCache`

Runs = tuple[range, ...]


@dataclass(frozen=True, kw_only=True)
class SavedState:
    """What a file holds; `read_state` returns it."""

    kind: str
    """``"rows"``: of a `KVCache`, all of whose rows hold the same tokens. ``"sequences"``: of lanes or pages."""
    spec: KVSpec
    batch: int
    """Of the cache that was saved: its rows or lanes; of pages, the sequences that were saved, at least 1."""
    max_tokens: int
    """Of the cache that was saved; of pages, the tokens of the longest sequence, at least 1."""
    rows: int | None = None
    """Rows in use; None where nothing was appended since a reset, and of sequences."""
    held: tuple[Runs, ...]
    """Of rows, for each layer that owns keys and values the runs of tokens that are in the file; of sequences, for each
    the runs of positions of its tokens."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """What was given to `save`."""
    library_version: str = gpuarena.__version__

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each layer that owns keys and values, forgotten ones included; or of each sequence."""
        if self.kind == ROWS:
            return tuple(runs[-1].stop for runs in self.held)
        return tuple(map(n_tokens, self.held))

    @property
    def length(self) -> int:
        """Tokens that every layer, or every sequence, had."""
        return min(self.lengths, default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values in the file."""
        return sum(tensor.nbytes for tensor, _ in self.places())

    def places(self) -> Iterator[tuple[Tensor, tuple[int, int, int]]]:
        """Yield each tensor of the file, and its sequence (0 of rows), its layer, and its plane of that."""
        is_rows = self.kind == ROWS
        for sequence in range(1 if is_rows else len(self.held)):
            for at, (number, layer) in enumerate(self.spec.owned):
                prefix = f"layers.{number}" if is_rows else f"sequences.{sequence}.layers.{number}"
                rows = [self.rows or 0] if is_rows else []
                shape = (*rows, layer.kv_heads, n_tokens(self.held[at if is_rows else sequence]))
                for plane, (name, buffer) in enumerate(plane_names(layer)):
                    tensor = Tensor(f"{prefix}.{name}", buffer.dtype, (*shape, buffer.dim))
                    yield tensor, (sequence, number, plane)

    def texts(self) -> dict[str, str]:
        """Return the metadata of the file."""
        values = {
            "spec": _fields(self.spec),
            "batch": self.batch,
            "max_tokens": self.max_tokens,
            "rows": self.rows,
            "held": [[(run.start, run.stop) for run in runs] for runs in self.held],
        }
        return {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "library_version": self.library_version,
            "kind": self.kind,
            **{name: json.dumps(value) for name, value in values.items()},
            **{USER + name: text for name, text in self.metadata.items()},
        }

    def check_fits(self, error: Any, batch: int, max_tokens: int) -> None:
        """Raise ``error(message, ...)`` unless a cache for `batch` rows or lanes of `max_tokens` has room for it."""
        n_rows = (self.rows or 0) if self.kind == ROWS else len(self.held)
        for what, found, wanted in (
            (self.kind, n_rows, batch),
            ("tokens", max(self.lengths, default=0), max_tokens),
        ):
            if found > wanted:
                raise error(
                    f"{found} {what} are held, the cache is for {wanted}, {found - wanted} too few; make it for at "
                    f"least {found}",
                    field=what,
                    found=found,
                    wanted=wanted,
                )


def n_tokens(runs: Runs) -> int:
    """Return the tokens of all runs; `len` of a range ends at 2**63."""
    return sum(run.stop - run.start for run in runs)


def _fields(spec: KVSpec) -> list[dict[str, Any]]:
    """Return the fields of each layer as JSON has them."""
    pairs = [[(field.name, getattr(layer, field.name)) for field in fields(layer)] for layer in spec.layers]
    return [
        {name: value.name if isinstance(value, DType) else value for name, value in pair} for pair in pairs
    ]


def plane_names(layer: LayerSpec) -> list[tuple[str, BufferSpec]]:
    """Return a name for each plane of a layer: a region of pairs has two, keys and values.

    >>> [name for name, _ in plane_names(LayerSpec(kv_heads=2, key_dim=8, value_dim=8, dtype="float32"))]
    ['keys', 'values']
    """
    names: list[tuple[str, BufferSpec]] = []
    for buffer in layer.buffers:
        parts = [buffer.name]
        if buffer.n_planes == 2:
            is_pair = buffer.name == "pairs"
            parts = ["keys", "values"] if is_pair else [f"key_{buffer.name}", f"value_{buffer.name}"]
        names.extend((part, buffer) for part in parts)
    return names


def user_metadata(metadata: Any) -> dict[str, str]:
    """Return what a user wants to have in a file, or raise unless it is texts."""
    if not isinstance(metadata, Mapping | None):
        raise ArgumentTypeError(f"metadata must be a mapping of texts, not {type(metadata).__name__}")
    for text in (text for pair in (metadata or {}).items() for text in pair):
        if not isinstance(text, str):
            raise ArgumentTypeError(f"metadata must be texts, not {type(text).__name__} ({text!r})")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ArgumentError(f"metadata {text!r}: {error}") from error
    return dict(metadata or {})


# -- reading ----------------------------------------------------------------------------------------------------------


def read_saved(reader: StateReader, *kinds: str, spec: Any = None) -> SavedState:
    """Return what a file holds, checked against the tensors that it has and the spec that is wanted."""
    reader.text("format", FORMAT)
    reader.text("format_version", FORMAT_VERSION)
    kind = reader.text("kind", *(kinds or (ROWS, SEQUENCES)))
    found = reader.value("spec", lambda layers: _spec(kind, layers))
    saved = SavedState(
        kind=kind,
        spec=found,
        batch=reader.value("batch", lambda n: positive(n, "batch")),
        max_tokens=reader.value("max_tokens", lambda n: positive(n, "max_tokens")),
        rows=reader.value("rows", lambda n: n if n is None else positive(n, "rows")),
        held=reader.value("held", lambda held: _held(kind, found, held)),
        metadata={n.removeprefix(USER): text for n, text in reader.metadata.items() if n.startswith(USER)},
        library_version=reader.text("library_version"),
    )
    if kind == ROWS and saved.rows is None and any(saved.lengths):
        raise reader.error("rows is null in its metadata, although there are tokens", field="rows")
    if spec is not None:
        _check_spec(reader, saved.spec, spec)
    reader.check_tensors(tensor for tensor, _ in saved.places())
    return saved


def _spec(kind: str, layers: Any) -> KVSpec:
    """Return the spec that JSON stands for, if a cache can be made and saved of it."""
    for layer in layers:
        for name in ("dtype", "value_dtype"):
            if layer.get(name) not in (None, *known_names()):  # NumPy would know more, and structures
                raise ValueError(f"{name} is one of {', '.join(known_names())}")
    spec = KVSpec(SharedLayer(**layer) if "source" in layer else LayerSpec(**layer) for layer in layers)
    for _, layer in spec.owned:
        for name, buffer in plane_names(layer):
            Tensor(name, buffer.dtype, ()).code  # noqa: B018 - looks whether there is one
        if kind == SEQUENCES and (layer.slack is not None or layer.storage is not None):
            raise ValueError("sequences have neither slack nor storage")
    return spec


def _held(kind: str, spec: KVSpec, found: Any) -> tuple[Runs, ...]:
    """Return the runs that JSON stands for, if a cache can hold them."""
    held = tuple(tuple(range(start, stop) for start, stop in runs) for runs in found)
    for runs in held:
        last = 0
        for run in runs:
            if not last <= run.start <= run.stop <= _MOST_POSITION:
                raise ValueError(f"runs ascend, each from a start to a stop, up to {_MOST_POSITION}")
            last = run.stop
    if kind == ROWS:
        for (number, layer), runs in zip(spec.owned, held, strict=True):
            if not _can_hold(layer, runs):
                raise ValueError(f"layer {number} ({layer}) cannot hold such tokens")
    return held


def _can_hold(layer: LayerSpec, runs: Runs) -> bool:
    """Return whether a layer of a `KVCache` can come to hold these runs of tokens."""
    if not runs:
        return False
    length = runs[-1].stop
    n_slots = layer.n_slots(length)
    if len(runs) == 1:
        return runs[0].start == 0 and length <= n_slots
    if len(runs) != 2 or layer.slack is None or layer.window is None:
        return False
    sinks, first = layer.sinks, runs[1].start
    begins_right = (runs[0].start, runs[0].stop) == (0, sinks) and first > sinks
    return begins_right and layer.window - 1 <= length - first <= n_slots - sinks


def _check_spec(reader: StateReader, found: KVSpec, wanted: Any) -> None:
    """Raise unless a file's spec is the one that is wanted, naming the first field that differs."""
    if not isinstance(wanted, KVSpec):
        raise ArgumentTypeError(f"spec must be a KVSpec, not {type(wanted).__name__}")
    number = None
    have: dict[str, Any] = {"layers": len(found.layers)}
    want: dict[str, Any] = {"layers": len(wanted.layers)}
    if have == want:
        pairs = enumerate(zip(_fields(found), _fields(wanted), strict=True))
        number, (have, want) = next((pair for pair in pairs if pair[1][0] != pair[1][1]), (None, ({}, {})))
    for name in (name for name in {**have, **want} if have.get(name) != want.get(name)):
        raise reader.error(
            f"{'' if number is None else f'layer {number}: '}{name} is {have.get(name)} in the file, {want.get(name)} "
            f"in the cache that it is wanted for; nothing was changed",
            layer=number,
            field=name,
            found=have.get(name),
            wanted=want.get(name),
        )
