"""Caches in files, on other arenas, and twice on the same one.

A file is of the safetensors format: ``safetensors.safe_open(path, framework="pt")`` reads it, and nothing of it is ever
executed. It holds a tensor ``[rows, kv_heads, n_held, dim]`` for the keys of each layer that owns some, and one for
the values, of the filled tokens only; and in the metadata, as texts:

==================================  ================================================================================
``format``, ``format_version``      ``"gpuarena.kv"`` and ``"1"``
``library_version``                 of the library that wrote it
``kind``                            ``"rows"``: all rows of a layer hold the same tokens
``spec``                            JSON, every field of every layer
``rows``, ``batch``, ``max_tokens`` of the cache; ``rows`` is ``"null"`` where nothing was appended since a reset
``held``                            JSON, for each layer that owns keys the runs of tokens, each a start and a stop
``user.*``                          what was given to `KVCache.save`
``crc32``                           of all of the above and of the bytes; it finds damage, not forgery
==================================  ================================================================================

Checkpoints of a cache do not travel: they name lengths of the cache that made them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from gpuarena.arena import Arena
from gpuarena.errors import (
    ArgumentTypeError,
    CapacityError,
    ShapeError,
)
from gpuarena.kv._layer import KVLayer
from gpuarena.kv._state_bytes import Carrier, carrier_for, copy_bytes, nbytes_of, pieces
from gpuarena.kv._state_checks import check_memory, refuse_capture
from gpuarena.kv._state_file import Entry, Progress, Reader, as_path, write_file
from gpuarena.kv._state_header import (
    Header,
    SavedState,
    check_entries,
    check_spec,
    common_metadata,
    plane_entries,
    plane_names,
    user_metadata,
)
from gpuarena.kv._state_sequences import KIND, SavedSequences, saved_sequences
from gpuarena.kv.spec import KVSpec, positive

if TYPE_CHECKING:
    from gpuarena.kv.linear import KVCache

__all__ = [
    "SavedSequences",
    "SavedState",
    "copy_cache",
    "load_cache",
    "read_state",
    "restore_cache",
    "save_cache",
]

_KIND = "rows"
Callback = Callable[[int, int], object]


def save_cache(cache: KVCache, path: Any, *, metadata: Any = None, progress: Callback | None = None) -> None:
    """Write a cache to a file; see `KVCache.save`."""
    name, report, texts = as_path(path), Progress(progress), user_metadata(metadata)
    _check_ready(cache, "save")
    entries, carrier, planes = (
        _entries(cache.spec, cache.rows, _held(cache)),
        carrier_for(cache.arena),
        _planes(cache),
    )

    def contents(found: Entry) -> Iterator[memoryview]:
        if not found.nbytes:
            return iter(())
        return map(carrier.take, pieces(carrier.bytes_of(planes[found.name])))

    described = {
        **common_metadata(_KIND, cache.spec),
        "rows": json.dumps(cache.rows),
        "batch": str(cache.batch),
        "max_tokens": str(cache.max_tokens),
        "held": json.dumps([[(run.start, run.stop) for run in runs] for runs in _held(cache)]),
        **texts,
    }
    write_file(name, entries, described, contents, report)


def read_state(path: Any) -> SavedState | SavedSequences:
    """Return what a saved file says that it holds: spec, size, tokens, and the metadata of the user.

    The keys and values are not looked at, nor is the checksum.

    Raises
    ------
    ArgumentError, ArgumentTypeError, DTypeError, ShapeError
        It is no such file, or it does not hold what it says. OSError: it cannot be read.
    """
    with Reader(as_path(path), Progress(None)) as reader:
        header = Header(reader, _KIND, KIND)
        return _saved(reader, header) if header.kind == _KIND else saved_sequences(reader, header)


def load_cache(
    kind: type[KVCache],
    path: Any,
    arena: Arena,
    *,
    spec: KVSpec | None = None,
    batch: int | None = None,
    max_tokens: int | None = None,
    progress: Callback | None = None,
) -> KVCache:
    """Return a cache on `arena` that holds what a file does; see `KVCache.load`."""
    report = Progress(progress)
    if not isinstance(arena, Arena):
        raise ArgumentTypeError(f"arena must be an Arena, not {type(arena).__name__}")
    if spec is not None and not isinstance(spec, KVSpec):
        raise ArgumentTypeError(f"spec must be a KVSpec, not {type(spec).__name__}")
    refuse_capture(arena, "load")
    with Reader(as_path(path), report) as reader:
        saved = _saved(reader, Header(reader, _KIND))
        if spec is not None:
            check_spec(reader.path, saved.spec, spec)
        n_rows = saved.batch if batch is None else positive(batch, "batch")
        n_tokens = saved.max_tokens if max_tokens is None else positive(max_tokens, "max_tokens")
        _check_room(reader.path, saved.rows, saved.lengths, n_rows, n_tokens)
        start = arena.checkpoint()
        try:
            cache = _make(kind, arena, saved.spec, n_rows, n_tokens)
            report.total_nbytes = reader.nbytes
            _take_over(cache, saved.rows, saved.held)
            _read_into(cache, reader)
            report.finish()
        except BaseException:
            arena.rollback(start)
            raise
    return cache


def restore_cache(cache: KVCache, path: Any, *, progress: Callback | None = None) -> None:
    """Let a cache hold what a file does; see `KVCache.restore`."""
    report = Progress(progress)
    _check_ready(cache, "restore")
    with Reader(as_path(path), report) as reader:
        saved = _saved(reader, Header(reader, _KIND))
        check_spec(reader.path, saved.spec, cache.spec)
        _check_room(reader.path, saved.rows, saved.lengths, cache.batch, cache.max_tokens)
        report.total_nbytes = 2 * reader.nbytes  # once to look at the checksum, before anything is written
        reader.verify()
        _make_room(cache, saved.held)
        cache.reset()
        try:
            _take_over(cache, saved.rows, saved.held)
            _read_into(cache, reader)
            report.finish()
        except BaseException:
            cache.reset()
            raise


def copy_cache(
    cache: KVCache,
    arena: Arena,
    *,
    batch: int | None = None,
    max_tokens: int | None = None,
    layout: str = "auto",
) -> KVCache:
    """Return a cache on `arena` that holds what `cache` does; see `KVCache.copy_to`."""
    if not isinstance(arena, Arena):
        raise ArgumentTypeError(f"copy_to takes an Arena, not {type(arena).__name__}")
    n_rows = cache.batch if batch is None else positive(batch, "batch")
    n_tokens = cache.max_tokens if max_tokens is None else positive(max_tokens, "max_tokens")
    _check_ready(cache, "copy_to")
    refuse_capture(arena, "copy_to")
    held = _held(cache)
    _check_room("copy_to", cache.rows, cache._common.lengths, n_rows, n_tokens)
    start = arena.checkpoint()
    try:
        copy = _make(type(cache), arena, cache.spec, n_rows, n_tokens, layout=layout)
        _take_over(copy, cache.rows, held)
        source, target = carrier_for(cache.arena), carrier_for(arena)
        places = _planes(copy)
        for name, plane in _planes(cache).items():
            copy_bytes(plane, source, places[name], target)
    except BaseException:
        arena.rollback(start)
        raise
    copy._common.n_shared = cache._common.n_shared
    return copy


# ---------------------------------------------------------------------------------------------------------------- parts


def _check_ready(cache: KVCache, action: str) -> None:
    """Raise if the memory of a cache is gone, or cannot be looked at now."""
    for layer in cache._owned:
        layer.check_live()
    refuse_capture(cache.arena, action)


def _layers(cache: KVCache) -> list[KVLayer]:
    """Return the layers that own keys and values in the order of the spec."""
    return sorted(cache._owned, key=lambda layer: layer.index)


def _held(cache: KVCache) -> tuple[tuple[range, ...], ...]:
    return tuple(tuple(layer.positions) for layer in _layers(cache))


def _entries(spec: KVSpec, rows: int | None, held: tuple[tuple[range, ...], ...]) -> list[Entry]:
    """Return the arrays that hold the tokens `held` of each layer."""
    entries = []
    for (number, layer), runs in zip(spec.owned, held, strict=True):
        shape = (rows or 0, layer.kv_heads, sum(run.stop - run.start for run in runs))
        entries.extend(plane_entries(f"layers.{number}", layer, shape))
    return entries


def _planes(cache: KVCache) -> dict[str, Any]:
    """Return the filled part of each plane by the name of its entry; none where no row is in use."""
    planes = {}
    if cache.rows is not None:
        for layer in cache._owned:
            names = plane_names(layer.spec.buffers)
            for (name, _), (_, plane) in zip(names, layer.filled(), strict=True):
                planes[f"layers.{layer.index}.{name}"] = plane
    return planes


def _saved(reader: Reader, header: Header) -> SavedState:
    """Return what a file holds, checked against the arrays that it has."""
    spec = header.spec()
    rows = None if header.text("rows") == "null" else header.number("rows")
    runs, owned = header.json("held"), list(spec.owned)
    if not isinstance(runs, list) or len(runs) != len(owned):
        raise header.error("held", runs, f"the runs of {len(owned)} layers")
    held = tuple(
        header.runs(layer, number, found) for (number, layer), found in zip(owned, runs, strict=True)
    )
    saved = SavedState(
        spec=spec,
        batch=header.number("batch"),
        max_tokens=header.number("max_tokens"),
        rows=rows,
        held=held,
        metadata=header.user,
        library_version=header.library_version,
        nbytes=reader.nbytes,
    )
    if rows is None and any(saved.lengths):
        raise header.error("rows", "null", "a number, since there are tokens")
    check_entries(reader, _entries(spec, rows, held))
    return saved


def _check_room(what: str, rows: int | None, lengths: Any, batch: int, max_tokens: int) -> None:
    """Raise unless a cache for `batch` rows of `max_tokens` has room for these."""
    if rows is not None and rows > batch:
        raise ShapeError(
            f"{what}: {rows} rows are held, the cache is for at most {batch}; make it with a larger batch",
            field="rows",
            found=rows,
            wanted=batch,
        )
    length = max(lengths, default=0)
    if length > max_tokens:
        raise CapacityError(
            f"{what}: {length} tokens are held, the cache is for {max_tokens}, {length - max_tokens} too many; make it "
            f"for at least {length} tokens",
            used=0,
            requested=length,
            capacity=max_tokens,
            available=max_tokens,
            missing=length - max_tokens,
            aligned_offset=0,
            label=None,
            field="max_tokens",
        )


def _make(
    kind: type[KVCache], arena: Arena, spec: KVSpec, batch: int, max_tokens: int, layout: str = "auto"
) -> KVCache:
    """Return an empty cache."""
    check_memory(arena, spec.nbytes(batch, max_tokens), f"{batch} rows of {max_tokens} tokens")
    return kind(arena, spec, batch=batch, max_tokens=max_tokens, layout=layout)


def _make_room(cache: KVCache, held: tuple[tuple[range, ...], ...]) -> None:
    for layer, runs in zip(_layers(cache), held, strict=True):
        layer.make_room(runs[-1].stop)


def _take_over(cache: KVCache, rows: int | None, held: tuple[tuple[range, ...], ...]) -> None:
    """Let an empty cache hold tokens, whose keys and values are written next."""
    _make_room(cache, held)
    common = cache._common
    common.rows = rows
    for layer, runs in zip(_layers(cache), held, strict=True):
        layer._hold(runs)
    common.high_water = max(common.high_water, *common.lengths)


def _read_into(cache: KVCache, reader: Reader) -> None:
    """Fill what `_take_over` made room for."""
    carrier: Carrier = carrier_for(cache.arena)
    planes = _planes(cache)
    for found in reader.entries:
        if found.nbytes:
            for piece in pieces(carrier.bytes_of(planes[found.name])):
                reader.read(carrier.room(nbytes_of(piece)))
                carrier.put(piece)
    reader.check_crc()
