"""What an arena is made of, and what all its parts need."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections import deque
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

from gpuarena import _bump, _fork, _messages, backends
from gpuarena._stack import Cause, Hook, Record, Stack, Watcher
from gpuarena.checkpoint import Scope
from gpuarena.errors import AlignmentError, ArenaError, ArgumentError, ArgumentTypeError, OutOfMemoryError

if TYPE_CHECKING:
    from gpuarena._checks import Checks
    from gpuarena._dependents import Dependents
    from gpuarena._pins import Pins
    from gpuarena._streams import StreamOrder
    from gpuarena._tracking import Tracker
    from gpuarena.arena import Arena
    from gpuarena.debug import Debug
    from gpuarena.dtypes import DType
    from gpuarena.region import Region

#: What the file names of this package begin with.
PACKAGE = os.path.dirname(__file__) + os.sep

#: Rollbacks remembered for the messages about stale regions.
N_REMEMBERED = 256


#: Pointer; shape, dtype, alignment and label as given; the record that was made, the dtype, and an array for
#: `Backend.again`, which is made when the request has come twice.
Request = tuple[int, tuple[int, ...], Any, Any, "str | None", Record, "DType", Any]


#: In place of a cause, for memory that is taken for gone when its arena is closed.
_AT_ONCE = object()


class State:
    """The fields of an arena; `Arena` is this, with positions, allocation and the rest on top.

    The lock is held by every method that reads or writes more than one field.
    """

    name: str | None
    capacity: int
    address: int
    alignment: int
    device: str
    _strict: bool
    _shift: int

    def _setup(
        self,
        backend: backends.Backend,
        alignment: int,
        name: str | None,
        debug: Debug | None,
        stream: Any = None,
        parent: Region | None = None,
    ) -> None:
        self._backend = backend
        # A child shares the lock, because its parent's rollback ends it. It does not hold the parent itself.
        self._lock: Any = threading.RLock() if parent is None else parent._arena._lock
        self._is_child = parent is not None
        # Arrays of a closed child whose region still lives.
        self._orphans: list[tuple[backends.Backend, Any]] = []
        self._shift = 0 if parent is None else parent._arena._shift + parent.offset  # in the outermost arena
        self._token = object()
        self._closed = False
        self._forked = False
        self._cause_of_death: Cause | None = None
        self.name = name
        self.capacity = backend.nbytes
        self.address = backend.address
        self.alignment = alignment
        self.device = backend.device
        self._low = Stack("low", 0)
        self._high = Stack("high", backend.nbytes)
        self._foreign: dict[tuple[str, int], dict[str, Any]] = {}  # root arrays of other libraries
        self._requests: dict[int, Request] = {}  # the last request in each slot, and what was granted
        # dtype as given: itself, bytes, alignment of regions
        self._dtypes: dict[Any, tuple[DType, int, int]] = {}
        self._next_serial = 0
        self._epoch = 0
        self._scopes: list[Scope] = []
        self._causes: deque[Cause] = deque(maxlen=N_REMEMBERED)
        self._forgotten_limit = 0  # serial_limit of the last cause that is no longer remembered
        self._peak = 0
        self._peak_used = 0
        self._peak_regions = 0
        self._n_failed = 0
        self._guard = 0  # bytes kept free after each region
        self._strict = False
        # Keeps native arrays by weak reference, where it matters who holds them.
        self._tracker: Tracker | None = None
        self._order: StreamOrder | None = None
        self._pins: Pins | None = None
        self._dependents: Dependents | None = None
        self._checks: Checks | None = None
        # While there are hooks that do more than watch, every call takes the long way.
        self._hooks: list[Hook] = []
        self._watchers: list[Watcher] = []  # the hooks, if all of them only watch
        self._drop_hooks: list[Hook] = []  # those that care for rollbacks only, asked first
        self._is_capturing: Any = None
        self._debug_settings = debug
        if backend.streams is not None:
            from gpuarena._streams import StreamOrder

            self._order = StreamOrder(self._whole(), backend.streams, stream)
            self._is_capturing = self._order.is_capturing
        elif stream is not None:
            raise ArgumentError(f"stream: the memory of {backend.name} on {backend.device} has no streams")
        parent_tracks = parent is not None and parent._arena._tracker is not None
        if backend.growable or debug is not None or parent_tracks:
            from gpuarena._growth import Growth, Separation
            from gpuarena._tracking import Ledger, Tracker

            above = None if parent is None else parent._arena._tracker
            ledger = Ledger() if above is None else above.ledger
            self._tracker = Tracker(
                self._whole(), ledger, "ignore" if debug is None else debug.on_live_arrays
            )
            self._hooks.append(self._tracker)
            if backend.growable:
                self._hooks.append(Growth(self._whole()))
        if debug is not None:
            from gpuarena._checks import Checks
            from gpuarena.backends.separate import SeparateBackend

            if isinstance(backend, SeparateBackend):
                self._hooks.append(Separation(self._whole(), backend))
            self._strict = debug.strict
            self._guard = 0 if debug.separate else debug.guard
            self._checks = Checks(self._whole(), debug)
            self._hooks.append(self._checks)
        _fork.register(self._whole())

    def _attach(self, hook: Hook, *, first: bool = False) -> None:
        """Let a hook see what happens from now on; the caller holds the lock."""
        self._watchers = []  # the long way is right for all hooks, should this be interrupted
        self._hooks.insert(0 if first else len(self._hooks), hook)
        self._find_watchers()

    def _detach(self, hook: Hook) -> None:
        """Undo `_attach`; closing the arena has done so before. The caller holds the lock."""
        if hook in self._hooks:
            self._watchers = []
            self._hooks.remove(hook)
            self._find_watchers()

    def _find_watchers(self) -> None:
        watchers = [hook for hook in self._hooks if isinstance(hook, Watcher)]
        self._watchers = watchers if len(watchers) == len(self._hooks) else []

    def _commit(self, stop: int) -> None:
        """Back the bytes up to `stop` with memory, where the backend grows."""
        if self._backend.growable and stop > self._backend.committed:
            self._backend.commit(stop)

    def _note_peaks(self) -> None:
        """Take the high-water marks, which only ever move between two rollbacks in one direction."""
        low, high = self._low, self._high
        if (taken := low.top + self.capacity - high.top) > self._peak:
            self._peak = taken
        if (used := low.used + high.used) > self._peak_used:
            self._peak_used = used
        if (n_regions := len(low.serials) + len(high.serials)) > self._peak_regions:
            self._peak_regions = n_regions

    def _whole(self) -> Arena:
        """Return this object as what it always is: an `Arena`."""
        return cast("Arena", self)

    def _watch(self) -> None:
        """Note whether a graph is being captured now; the caller holds the lock."""
        capturing = self._captures()
        if self._is_capturing is not None and (capturing or self._pins is not None):
            self._pinned().watch(capturing)

    def _captures(self) -> bool:
        """Return whether a graph is being captured on the current stream; False where there are none."""
        return self._is_capturing is not None and bool(self._is_capturing())

    def _pinned(self) -> Pins:
        if self._pins is None:
            from gpuarena._pins import Pins

            self._pins = Pins(self._whole())
            self._drop_hooks.insert(0, self._pins)  # asked first, because it refuses
        return self._pins

    def _close(self, cause: Cause | None) -> list[Warning]:
        """Close, and return what to warn of; the caller holds the lock."""
        if self._closed:
            self._bury(cause)
            return []
        self._cause_of_death = cause
        hooks = (*self._drop_hooks, *self._hooks)
        warned = [warning for hook in hooks for warning in hook.closing() or ()]
        self._note_peaks()
        self._closed = True
        self._scopes = []
        for stack in (self._low, self._high):
            self._orphans += [(self._backend, array) for array in stack.arrays if array is not None]
            for slot in range(len(stack.serials)):
                if self._tracker is not None:
                    self._orphans += [
                        (self._backend.viewer(library), array)
                        for library, array in self._tracker.roots_of(stack, slot)
                    ]
                for library, array in self._foreign.get((stack.side, slot), {}).items():
                    self._orphans.append((self._backend.viewer(library), array))
            stack.truncate(0)
            stack.freed += stack.used
            stack.top, stack.used = stack.start, 0
        self._foreign.clear()
        if not self._is_child:
            self._orphans = []  # the memory is theirs now
        elif self._tracker is not None:
            self._bury(cause or _AT_ONCE)  # held here, they would count as somebody's
        else:
            self._bury(cause)
        self._requests.clear()
        self._dtypes.clear()
        self._hooks, self._watchers, self._drop_hooks = [], [], []
        self._is_capturing = None
        if not self._forked and not self._orphans:
            self._backend.release()
        return warned

    def _bury(self, cause: Any) -> None:
        """Tell autograd that the memory of a closed child's arrays goes to somebody else, once it does."""
        if cause is not None and self._orphans:
            for backend, array in self._orphans:
                backend.invalidate([array])
            self._orphans = []
            self._backend.release()

    def _root_array(self, region: Region, library: str) -> Any:
        """Return the root array of a live root region in `library`, made on first use; the caller holds the lock."""
        stack, slot = region._stack, region._slot
        if library == self._backend.name:
            array = stack.arrays[slot]
            if array is None:
                array = stack.arrays[slot] = self._backend.root(region.offset, region.shape, region.dtype)
            return array
        arrays = self._foreign.get((stack.side, slot), {})
        if library not in arrays:
            arrays[library] = self._backend.viewer(library).root(region.offset, region.shape, region.dtype)
            self._foreign[stack.side, slot] = arrays
        return arrays[library]

    def _invalidate_foreign(self, stack: Stack, slot: int) -> None:
        """Tell other libraries that the contents of `slot` are no longer what they were; the caller holds the lock."""
        if self._tracker is not None:
            for library, array in self._tracker.roots_of(stack, slot):
                if library != self._backend.name:
                    self._backend.viewer(library).invalidate([array])
        for library, array in self._foreign.get((stack.side, slot), {}).items():
            self._backend.viewer(library).invalidate([array])

    def _closed_error(self, action: str) -> ArenaError:
        return _messages.closed(self._whole(), action)

    def _out_of_memory(
        self, stack: Stack, nbytes: int, offset: int, label: str | None, align: int = 1
    ) -> OutOfMemoryError:
        self._n_failed += 1
        for hook in self._hooks:
            hook.failed(stack, nbytes, align, label)
        return _messages.out_of_memory(self._whole(), stack, nbytes, offset, label, align)


def parse_alignment(align: Any) -> int:
    """Return an alignment as an integer of bytes; raise `ArgumentTypeError` or `AlignmentError` if it is none."""
    if isinstance(align, bool) or not hasattr(align, "__index__"):
        raise ArgumentTypeError(f"an alignment is an integer of bytes, not {type(align).__name__}")
    value = align.__index__()
    if not isinstance(value, int) or not _bump.is_alignment(value):
        raise AlignmentError(f"alignment {value} is no power of two", align=value)
    return value


def parse_debug(debug: Any) -> Debug | None:
    """Return the settings for an argument ``debug=``; the module is only needed where there are some."""
    if debug is None or debug is False:
        return None
    from gpuarena.debug import Debug

    return Debug.parse(debug)


def warn(warning: Warning) -> None:
    """Give a warning for the innermost line outside of this package."""
    warnings.warn(warning, stacklevel=caller()[1])


def caller() -> tuple[FrameType, int]:
    """Return the innermost frame outside of this package, and its ``stacklevel`` for who called this."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame, level = frame.f_back, level + 1
    return frame, level


def check_text(value: Any, what: str) -> None:
    """Raise `ArgumentTypeError` unless an argument is a text or None."""
    if value is not None and not isinstance(value, str):
        raise ArgumentTypeError(f"{what} must be a text or None, not {type(value).__name__}")
