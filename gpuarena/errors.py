"""Everything gpuarena raises on purpose.

::

    ArenaError
    ├── ArgumentError          (ValueError)    a value that can never be right: capacity 0, a label that is no text
    ├── ArgumentTypeError      (TypeError)     a value of the wrong type
    ├── AlignmentError         (ValueError)    not a power of two, or too small for the dtype
    ├── ShapeError             (ValueError)    negative or overflowing dimensions, shapes that do not match
    ├── DTypeError             (TypeError)     a dtype that is unknown, or that this backend lacks
    ├── StrideError            (ValueError)    a view that the library of the backend cannot express
    ├── OutOfMemoryError       (MemoryError)   the request does not fit
    │   └── CapacityError                      a cache that is full
    ├── StaleRegionError       (RuntimeError)  the region was rolled back, or its arena is closed
    ├── CheckpointError        (RuntimeError)  a checkpoint that is dead, spent or foreign; scopes out of order
    │   └── PinnedError                        a rollback below memory that a captured graph uses
    ├── SequenceError          (RuntimeError)  a sequence that is freed, of another pool, or empty where it may not be
    ├── LayerOrderError        (RuntimeError)  a layer of a cache was written out of turn
    ├── CaptureError           (RuntimeError)  a call that a graph being captured could not repeat
    ├── LiveArraysError        (RuntimeError)  native arrays are still referenced where memory is to go
    ├── CorruptionError        (RuntimeError)  bytes were written outside of a region, or after it was given back
    ├── ForkedError            (RuntimeError)  a device arena was used in a forked child
    ├── ArenaClosedError       (RuntimeError)  any call after close()
    ├── DeviceMismatchError    (ValueError)    memory of another device, or bytes that a library cannot reach
    ├── BackendError           (RuntimeError)  an unknown backend, or one whose library is not installed
    ├── AutogradError          (RuntimeError)  a write that would tie the arena into an autograd graph
    ├── ReadOnlyError          (ValueError)    memory that may not be written was offered to an arena
    ├── StateError             (ValueError)    a file of a cache is damaged, of another kind, or does not fit the cache
    └── NotCopyableError       (TypeError)     pickle or copy of an arena, a region or a checkpoint

A call that raises one of these has changed nothing. The figures of a message are attributes of the exception.
"""

from __future__ import annotations

import pickle
from typing import Any

__all__ = [
    "AlignmentError",
    "ArenaClosedError",
    "ArenaError",
    "ArgumentError",
    "ArgumentTypeError",
    "AutogradError",
    "BackendError",
    "CapacityError",
    "CaptureError",
    "CheckpointError",
    "CorruptionError",
    "CorruptionWarning",
    "DTypeError",
    "DeviceMismatchError",
    "ForkedError",
    "LayerOrderError",
    "LiveArraysError",
    "LiveArraysWarning",
    "NotCopyableError",
    "OutOfMemoryError",
    "PinnedError",
    "ReadOnlyError",
    "SequenceError",
    "ShapeError",
    "StaleRegionError",
    "StateError",
    "StrideError",
]


class ArenaError(Exception):
    """Base of all errors of this package; keyword arguments become attributes.

    Errors can be pickled, as a worker process does with them: attributes that are handles then become texts.
    """

    def __init__(self, message: str, **figures: Any) -> None:
        super().__init__(message)
        self.__dict__.update(figures)

    def __reduce__(self) -> Any:
        figures = {name: _portable(value) for name, value in self.__dict__.items()}
        return _restore, (type(self), str(self), figures)


def _restore(kind: type[ArenaError], message: str, figures: dict[str, Any]) -> ArenaError:
    return kind(message, **figures)


def _portable(value: Any) -> Any:
    try:
        pickle.dumps(value)
    except Exception:  # whatever a handle raises
        return repr(value)
    return value


class ArgumentError(ArenaError, ValueError):
    """A value that can never be right."""


class ArgumentTypeError(ArenaError, TypeError):
    """A value of the wrong type."""


class AlignmentError(ArenaError, ValueError):
    """An alignment that is not a power of two, or too small for the dtype."""


class ShapeError(ArenaError, ValueError):
    """A shape with negative or overflowing dimensions, or shapes that do not match."""


class DTypeError(ArenaError, TypeError):
    """A dtype that is unknown, or that this backend does not have."""


class StrideError(ArenaError, ValueError):
    """A view whose strides the library of the backend cannot express."""


class OutOfMemoryError(ArenaError, MemoryError):
    """The request does not fit.

    Attributes
    ----------
    requested, aligned_offset, available, capacity, missing : int
        Bytes: what was asked, where it would have started, what is left below the capacity, and by how
        much the request exceeds it with its alignment.
    label : str or None
        The label of the request.
    """

    requested: int
    aligned_offset: int
    available: int
    capacity: int
    missing: int
    label: str | None


class CapacityError(OutOfMemoryError):
    """A cache is full; the figures count what `unit` says, "tokens" or "pages"; `used` are taken."""

    used: int
    free: int
    largest_hole: int
    cause: str
    unit: str = "tokens"


class StaleRegionError(ArenaError, RuntimeError):
    """A region was used after its memory was rolled back or its arena closed."""


class CheckpointError(ArenaError, RuntimeError):
    """A checkpoint is dead, spent or foreign, or scopes were closed out of order."""


class SequenceError(ArenaError, RuntimeError):
    """A sequence of a paged cache is freed, of another pool, or empty where tokens are needed."""


class LayerOrderError(ArenaError, RuntimeError):
    """A layer of a cache was written out of turn: twice in a step, or before a layer that a step left out.

    Attributes
    ----------
    layer : int
        The layer that was to be written.
    """

    layer: int


class CaptureError(ArenaError, RuntimeError):
    """A call that cannot be captured into a graph was made while one is being captured."""


class PinnedError(CheckpointError):
    """A rollback would give back memory that a captured graph uses."""


class LiveArraysError(ArenaError, RuntimeError):
    """Native arrays are still referenced where memory is to be given back; `labels` names their regions."""


class CorruptionError(ArenaError, RuntimeError):
    """Bytes were written outside of a region, or after it was given back; `offsets` lists the first of each run."""

    offsets: list[int]


class ForkedError(ArenaError, RuntimeError):
    """An arena of device memory was used in a forked child, which cannot reach the device."""


class LiveArraysWarning(RuntimeWarning):
    """Native arrays are still referenced where memory was given back; they will show what is put there next."""


class CorruptionWarning(RuntimeWarning):
    """What would be a `CorruptionError`, found when an arena was closed, which never raises."""


class ArenaClosedError(ArenaError, RuntimeError):
    """A closed arena was used."""


class DeviceMismatchError(ArenaError, ValueError):
    """Memory of another device was given, or a library cannot reach these bytes."""


class BackendError(ArenaError, RuntimeError):
    """A backend is unknown, or its library is not installed."""


class AutogradError(ArenaError, RuntimeError):
    """A write would have tied the arena's memory into an autograd graph."""


class ReadOnlyError(ArenaError, ValueError):
    """Memory that may not be written was offered to an arena."""


class StateError(ArenaError, ValueError):
    """A file of a cache is damaged, of another kind or version, or does not fit the cache it is for.

    Attributes
    ----------
    path : str
        The file.
    field : str
        What is wrong: an entry of the metadata, a tensor, or a field of the spec. It is missing where the file could
        not be opened, `found` and `wanted` where it is the only fault.
    found, wanted : object
        What the file has there, and what was expected.
    """

    path: str
    field: str
    found: Any
    wanted: Any


class NotCopyableError(ArenaError, TypeError):
    """An arena, a region or a checkpoint cannot be pickled or copied."""


def refuse_copy(obj: object) -> NotCopyableError:
    """Return the error for pickling or copying `obj`, a handle to memory that stays where it is."""
    kind = type(obj).__name__
    return NotCopyableError(
        f"a {kind} cannot be pickled or copied: it is a handle to memory that stays where it is; "
        f"copy the contents instead, for example numpy.array(region.as_numpy()) or region.array.clone()"
    )
