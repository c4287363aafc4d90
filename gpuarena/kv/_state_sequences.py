"""Files of sequences of different lengths, of lanes and of paged caches.

A tensor ``sequences.K.layers.N.keys`` is ``[kv_heads, length, dim]``, the tokens of a sequence in their order, whatever
held them. The metadata are those that `gpuarena.kv.state` describes, but for

==================  ===========================================================================================
``kind``            ``"sequences"``
``max_tokens``      capacity of a lane, or the most tokens of a sequence
``positions``       JSON, for each sequence the runs of positions of its tokens, each a start and a stop
==================  ===========================================================================================
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gpuarena.kv._state_bytes import Carrier, nbytes_of
from gpuarena.kv._state_file import Entry, Progress, Reader, write_file
from gpuarena.kv._state_header import Header, check_entries, common_metadata, plane_entries, plane_names
from gpuarena.kv.spec import KVSpec, LayerSpec

__all__ = ["KIND", "Plane", "SavedSequences", "read_sequences", "saved_sequences", "write_sequences"]

KIND = "sequences"
_MOST_POSITION = 2**62

#: Yields the bytes of a plane in pieces; a piece may be written to until the next one is asked for.
Plane = Callable[[int, int, int], Iterator[Any]]  # (sequence, layer, plane)


@dataclass(frozen=True)
class SavedSequences:
    """What a file of lanes or of sequences holds; `read_state` returns it."""

    spec: KVSpec
    max_tokens: int
    """Capacity of a lane that was saved, or the most tokens of a sequence."""
    positions: tuple[tuple[range, ...], ...]
    """For each sequence, the runs of positions of its tokens."""
    metadata: Mapping[str, str]
    """What was given when it was saved."""
    library_version: str
    nbytes: int
    """Bytes of keys and values in the file."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence."""
        return tuple(sum(run.stop - run.start for run in runs) for runs in self.positions)


def sequence_entries(spec: KVSpec, lengths: Iterable[int]) -> dict[str, tuple[Entry, tuple[int, int, int]]]:
    """Return each array of the file, and its sequence, layer and plane."""
    found = {}
    for sequence, length in enumerate(lengths):
        for number, layer in spec.owned:
            entries = plane_entries(f"sequences.{sequence}.layers.{number}", layer, (layer.kv_heads, length))
            for plane, entry in enumerate(entries):
                found[entry.name] = (entry, (sequence, number, plane))
    return found


def write_sequences(
    path: str,
    spec: KVSpec,
    positions: list[list[tuple[int, int]]],
    max_tokens: int,
    plane: Plane,
    carrier: Carrier,
    texts: dict[str, str],
    report: Progress,
) -> None:
    entries = sequence_entries(spec, (sum(stop - start for start, stop in runs) for runs in positions))

    def contents(entry: Entry) -> Iterator[memoryview]:
        return map(carrier.take, plane(*entries[entry.name][1])) if entry.nbytes else iter(())

    described = {
        **common_metadata(KIND, spec),
        "max_tokens": str(max_tokens),
        "positions": json.dumps(positions),
        **texts,
    }
    write_file(path, [entry for entry, _ in entries.values()], described, contents, report)


def saved_sequences(reader: Reader, header: Header) -> SavedSequences:
    """Return what a file holds, checked against the arrays that it has."""
    spec = header.spec()
    for number, layer in spec.owned:
        _check_layer(header, number, layer)
    found = header.json("positions")
    if not isinstance(found, list):
        raise header.error("positions", found, "a list of the runs of each sequence")
    saved = SavedSequences(
        spec=spec,
        max_tokens=header.number("max_tokens"),
        positions=tuple(_runs(header, runs) for runs in found),
        metadata=header.user,
        library_version=header.library_version,
        nbytes=reader.nbytes,
    )
    check_entries(reader, (entry for entry, _ in sequence_entries(spec, saved.lengths).values()))
    return saved


def _check_layer(header: Header, number: int, layer: LayerSpec) -> None:
    if layer.slack is not None or len(plane_names(layer.buffers)) != 2:
        raise header.error("spec", str(layer), f"layer {number} with neither slack nor storage")


def _runs(header: Header, found: Any) -> tuple[range, ...]:
    """Return runs of ascending positions."""
    if not isinstance(found, list):
        raise header.error("positions", found, "a list of runs")
    last = 0
    runs = []
    for run in found:
        numbers = header.numbers("positions", run)
        if len(numbers) != 2 or not last <= numbers[0] < numbers[1] <= _MOST_POSITION:
            raise header.error("positions", found, f"ascending runs of positions up to {_MOST_POSITION}")
        last = numbers[1]
        runs.append(range(*numbers))
    return tuple(runs)


def read_sequences(reader: Reader, saved: SavedSequences, plane: Plane, carrier: Carrier) -> None:
    entries = sequence_entries(saved.spec, saved.lengths)
    for entry in reader.entries:
        if entry.nbytes:
            for piece in plane(*entries[entry.name][1]):
                reader.read(carrier.room(nbytes_of(piece)))
                carrier.put(piece)
    reader.check_crc()
