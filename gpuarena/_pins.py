"""Memory that a captured graph will use again at every replay."""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Any

from gpuarena._stack import Drop, Hook, Record, Stack, Take
from gpuarena.dtypes import as_dtype
from gpuarena.errors import ArgumentError, CheckpointError, PinnedError, refuse_copy

if TYPE_CHECKING:
    from gpuarena.arena import Arena

__all__ = ["Pin"]


class Pin:
    """Keeps the memory that was handed out while it was open; made by `Arena.pin`, or by a capture itself.

    Until `release`, nothing that was allocated while it was open is handed out again, whatever was rolled back
    meanwhile, and a rollback below it raises `PinnedError`. It also keeps the arena's buffer alive.

    Attributes
    ----------
    label : str or None
    nbytes : int
        Bytes that are kept beyond the regions that are still live.
    """

    def __init__(self, pins: Pins, label: str | None) -> None:
        self._pins: Pins | None = pins
        self.label = label
        self.state = "new"
        self.nbytes = 0
        self._peaks: dict[str, int] = {}  # how far the pointer of each end went; absent where it did not move
        self._n_live: dict[str, int] = {}  # where its own entry lies on each end
        self._buffer: Any = None

    def __enter__(self) -> Pin:
        """Start to keep memory; a pin can be entered once, and none inside another."""
        if self._pins is None:
            raise CheckpointError(f"{self!r} cannot be entered any more; make another with arena.pin()")
        self._pins.open(self)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        """Keep what was handed out; after an exception there is no graph, and nothing is kept."""
        if self._pins is not None:
            self._pins.close(self, failed=exc is not None)

    def release(self) -> None:
        """Let the memory go at the next rollback below it; the graph must not be replayed any more.

        May be called again.
        """
        if self._pins is not None:
            self._pins.release(self)

    def record_stream(self, stream: Any) -> None:
        """Declare that the graph is replayed on another stream than the arena's home stream.

        When the memory goes, the home stream waits for what is queued on `stream` by then.

        Raises
        ------
        CheckpointError
            The pin keeps nothing: its block has not ended, or it was released.
        ArgumentError, ArgumentTypeError, DeviceMismatchError, CaptureError
            As `Region.record_stream`.
        """
        if self._pins is None or self.state != "kept":
            raise CheckpointError(f"{self!r} keeps no memory now, which a stream could use")
        self._pins.record_stream(self, stream)

    def __repr__(self) -> str:
        return f"<pin{f' {self.label!r}' if self.label else ''}, {self.state}>"

    def __reduce__(self) -> Any:
        raise refuse_copy(self)


class Pins(Hook):
    """The pins of an arena."""

    def __init__(self, arena: Arena) -> None:
        self._arena = weakref.proxy(arena)
        self._lock = arena._lock  # a pin can be released when its arena is gone
        self._open: Pin | None = None
        self._by_capture = False  # whether the open pin was opened by a capture that was noticed
        self._kept: list[Pin] = []

    def make(self, label: str | None) -> Pin:
        """Return a pin that is not entered yet."""
        return Pin(self, label)

    def unreleased(self) -> tuple[Pin, ...]:
        """Return the pins that keep memory."""
        return tuple(self._kept)

    def marking(self) -> Any:
        """Return how far the pointers went."""
        return None if self._open is None else dict(self._open._peaks)

    def undone(self, mark: Any) -> None:
        """They went no further."""
        if self._open is not None and mark is not None:
            self._open._peaks = mark

    @property
    def keeps_memory(self) -> bool:
        """Whether a pin is open, or not released."""
        return self._open is not None or bool(self._kept)

    def closing(self) -> None:
        """Let all pins go; each still keeps the buffer, which its graph may use."""
        self._kept = []

    def watch(self, capturing: bool) -> None:
        """Open a pin when a capture has begun without one, and close it when that capture has ended."""
        if capturing and self._open is None:
            self._begin(Pin(self, "captured"))
            self._by_capture = True
        elif not capturing and self._by_capture and self._open is not None:
            self._end(self._open)

    def open(self, pin: Pin) -> None:
        """Enter a pin."""
        with self._arena._lock:
            if pin.state != "new":
                raise CheckpointError(f"{pin!r} was entered before; make another with arena.pin()")
            if self._arena._closed:
                raise self._arena._closed_error("pin")
            if self._by_capture and self._open is not None:  # the explicit one takes over
                self._end(self._open)
            if self._open is not None:
                raise CheckpointError(f"{self._open!r} is open; a pin cannot be opened inside another")
            self._begin(pin)

    def _begin(self, pin: Pin) -> None:
        pin.state = "open"
        # An array, because an arena that is closed makes its backend drop the memory.
        pin._buffer = self._arena._backend.root(0, (1,), as_dtype("uint8"))
        self._open = pin
        self._arena._attach(self, first=True)
        self._capture_changed()

    def _capture_changed(self) -> None:
        if self._arena._order is not None:
            self._arena._order.capture_changed()

    def close(self, pin: Pin, *, failed: bool) -> None:
        """Leave a pin."""
        with self._lock:
            if self._open is not pin:
                return
            try:
                failed = failed or self._arena._closed
            except ReferenceError:  # the arena is gone
                self._open = None
                self._forget(pin)
                return
            if failed:
                self._stop()
                self._forget(pin)
            else:
                self._end(pin)

    def _stop(self) -> None:
        self._open, self._by_capture = None, False
        self._arena._detach(self)
        self._capture_changed()

    def _end(self, pin: Pin) -> None:
        """Take what lies between the pointers and where they were at most, so that nobody gets it."""
        by_capture = self._by_capture
        self._stop()
        arena = self._arena
        for stack in self._stacks():
            if stack.side not in pin._peaks:
                continue  # nothing was handed out there
            peak = pin._peaks[stack.side]
            # What lies on the other end now stays as it is; what both ends had in turn is the low end's.
            peak = min(peak, arena._high.top) if stack.side == "low" else max(peak, arena._low.top)
            nbytes = abs(peak - stack.top)
            offset = min(peak, stack.top)
            pin._n_live[stack.side] = len(stack.serials)
            label = f"pin {pin.label}" if pin.label else "pin"
            take = Take(
                stack, len(stack.serials), offset, nbytes, peak, (nbytes,),
                as_dtype("uint8"), 1, label, filled=True, kind="pin",
            )  # fmt: skip
            arena._push(stack, Record(offset, nbytes, label, peak), None)
            for hook in arena._hooks:
                hook.after_take(take)
            pin.nbytes += nbytes
        pin.state = "kept"
        if pin._n_live or not by_capture:
            self._kept.append(pin)

    def record_stream(self, pin: Pin, stream: Any) -> None:
        """Declare a stream for the entries of a pin."""
        arena = self._arena
        with arena._lock:
            if arena._order is None:
                raise ArgumentError(f"record_stream: memory on {arena.device} has no streams")
            for side, slot in pin._n_live.items():
                arena._order.use((side, slot), stream)

    def release(self, pin: Pin) -> None:
        """Let a pin go."""
        with self._lock:
            if self._open is pin:
                raise CheckpointError(f"{pin!r} cannot be released before its block has ended")
            if pin in self._kept:
                self._kept.remove(pin)
            self._forget(pin)

    @staticmethod
    def _forget(pin: Pin) -> None:
        pin.state = "released"
        pin._pins = pin._buffer = None

    def _stacks(self) -> tuple[Stack, Stack]:
        return self._arena._low, self._arena._high

    # -- what happens -------------------------------------------------------------------------------------------

    def after_take(self, take: Take) -> None:
        """Note how far the pointer went."""
        self._note(take.stack, take.new_top)

    def extended(self, stack: Stack, slot: int, old: Record) -> None:
        """Note how far the pointer went."""
        self._note(stack, stack.top)

    def _note(self, stack: Stack, top: int) -> None:
        if self._open is not None:
            furthest = max if stack.side == "low" else min
            peaks = self._open._peaks
            peaks[stack.side] = furthest(peaks.get(stack.side, top), top)

    def restored(self, stack: Stack, n_live: int, known: Any) -> None:
        """Note how far the pointer went."""
        self._note(stack, stack.top)

    def refuse_drop(self, drop: Drop) -> None:
        """Refuse to go below a pin."""
        for pin in self._kept:
            if pin._n_live.get(drop.stack.side, -1) >= drop.n_live:
                raise PinnedError(
                    f"{drop.cause} would give back memory that {pin!r} keeps for a graph; call release() on it "
                    f"when the graph is gone (arena.pins lists them)",
                    pin=pin,
                )
