"""The order in which streams use memory that is handed out again."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Hashable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from gpuarena._stack import Drop, Hook, Stack
from gpuarena.backends._handles import thread_number
from gpuarena.errors import CaptureError

if TYPE_CHECKING:
    from gpuarena.arena import Arena
    from gpuarena.backends import Streams

#: A stream, and the thread it belongs to if it means another stream in another one.
_Use = tuple[Any, int | None]


class StreamOrder(Hook):
    """Makes the home stream wait for the streams that used a region, when the region goes.

    Memory is reused in the order of the home stream. A stream that uses a region is declared; it then waits for
    the arena's event, which lies behind the last rollback on the home stream, so that a third stream cannot get
    ahead of the second by way of the first. While a graph is captured the capturing stream stands in for the home
    stream, since the graph may not wait for anything outside of it.
    """

    def __init__(self, arena: Arena, streams: Streams, home: Any) -> None:
        self._arena = weakref.proxy(arena)
        self._streams = streams
        self.home = streams.current() if home is None else streams.parse(home)
        self._home_key = streams.key(self.home)
        # A per-thread default stream is another one in every thread, and only its own thread can name it.
        self._home_thread = thread_number() if streams.is_thread_bound(self.home) else None
        # The library takes the buffer back in the order of the stream that it was made on.
        self._birth = streams.current()
        # Behind the last rollback, and the last contents written, on the home stream; None until a second stream
        # appears, so that work on one stream costs nothing here.
        self._event: Any = None
        self._captured_event: Any = None  # the same inside of a capture
        self._uses: dict[tuple[str, int], dict[Hashable, _Use]] = {}
        self._going: dict[str, dict[Hashable, _Use]] = {}  # uses of the regions of the drop under way, by end

    def is_capturing(self) -> bool:
        """Return whether the current stream is being captured."""
        return self._streams.current_is_capturing()

    def on_home(self) -> AbstractContextManager[Any]:
        """Return a context manager for the arena's own writes: poison and guard zones.

        They follow the waits of the last rollback, and what is handed out afterwards follows them. Inside a
        capture they go where the capture goes.
        """
        return contextlib.nullcontext() if self.is_capturing() else self._streams.using(self.home)

    def use(self, key: tuple[str, int], stream: Any) -> None:
        """Declare that work on `stream` uses the region in a slot of an end; the caller holds the lock."""
        self._declare(key, self._streams.parse(stream))

    def _declare(self, key: tuple[str, int], stream: Any) -> None:
        streams = self._streams
        identity = streams.key(stream)
        capturing = streams.is_capturing(stream)
        if capturing != self.is_capturing():
            raise CaptureError(
                "record_stream: one of this stream and the current stream is being captured into a graph and the "
                "other is not; a graph cannot be ordered against work outside of it"
            )
        if identity == self._home_key and not capturing:
            return
        if capturing:
            current = streams.current()
            if identity != streams.key(current):
                if self._captured_event is None:
                    self._captured_event = streams.record(current)
                streams.wait(stream, self._captured_event)
        elif self._home_is_elsewhere():
            streams.synchronize_device()
        else:
            if self._event is None:
                self._event = streams.record(self.home)
            streams.wait(stream, self._event)
        self.attend()
        thread = thread_number() if streams.is_thread_bound(stream) else None
        self._uses.setdefault(key, {})[identity] = stream, thread

    def attend(self) -> None:
        """Take part in the arena's rollbacks from now on; before a second stream appears there is nothing to do."""
        if self not in self._arena._drop_hooks:
            self._arena._drop_hooks.append(self)

    def before_write(self, side: str, slot: int) -> None:
        """Declare the current stream, on which initial contents are about to be written."""
        current = self._streams.current()
        if self._streams.key(current) != self._home_key:
            self._declare((side, slot), current)

    def wrote(self) -> None:
        """Put the event behind initial contents written on the home stream."""
        if self._event is not None and not self.is_capturing():
            self._advance()

    def _advance(self) -> None:
        """Put the event behind what the home stream has been given by now."""
        if self._home_is_elsewhere():
            self._streams.synchronize_device()  # whatever the event stood for is done
        else:
            self._event = self._streams.record(self.home)

    def _home_is_elsewhere(self) -> bool:
        return self._home_thread is not None and self._home_thread != thread_number()

    def uses_of(self, side: str, n_live: int) -> dict[Hashable, _Use]:
        """Return the streams that used the slots from `n_live` on."""
        found: dict[Hashable, _Use] = {}
        for (end, slot), uses in self._uses.items():
            if end == side and slot >= n_live:
                found.update(uses)
        return found

    def synchronize(self, side: str, n_live: int) -> None:
        """Let the host wait for the home stream and for all that used the slots from `n_live` on."""
        me = thread_number()
        for stream, thread in self.uses_of(side, n_live).values():
            if thread is not None and thread != me:
                self._streams.synchronize_device()
            else:
                self._streams.synchronize(stream)
        self._streams.synchronize(self.home)
        self._streams.synchronize(self._streams.current())

    # -- what happens -------------------------------------------------------------------------------------------

    def refuse_drop(self, drop: Drop) -> None:
        """Refuse a wait that a capture cannot contain."""
        uses = self._going[drop.stack.side] = self._drop_uses(drop)
        if not uses:
            return
        capturing = self.is_capturing()
        for stream, _ in uses.values():
            if self._streams.is_capturing(stream) != capturing:
                raise CaptureError(
                    f"{drop.cause} would make a graph that is being captured wait for a stream outside of it, or "
                    f"the other way round; roll back before or after the capture"
                )

    def _drop_uses(self, drop: Drop) -> dict[Hashable, _Use]:
        uses = self.uses_of(drop.stack.side, drop.n_live)
        dependents = self._arena._dependents
        if dependents is not None:
            uses.update(dependents.uses(drop))
        return uses

    def after_drop(self, drop: Drop) -> None:
        """Let the home stream wait, and put the arena's event behind that."""
        uses = self._going.pop(drop.stack.side, {})
        if uses or self._event is not None or self._captured_event is not None:
            self._wait_for(uses)
        for key in [key for key in self._uses if key[0] == drop.stack.side and key[1] >= drop.n_live]:
            del self._uses[key]

    def _wait_for(self, uses: dict[Hashable, _Use]) -> None:
        streams = self._streams
        capturing = self.is_capturing()
        waiting = streams.current() if capturing else self.home
        own = streams.key(waiting)
        me = thread_number()
        others = {identity: use for identity, use in uses.items() if identity != own}
        if any(thread is not None and thread != me for _, thread in others.values()) or (
            others and not capturing and self._home_is_elsewhere()
        ):
            streams.synchronize_device()  # another thread's default stream cannot be named here
        else:
            for stream, _ in others.values():
                streams.wait(waiting, streams.record(stream))
        if not capturing:
            if self._event is not None:
                self._advance()
        elif others or self._captured_event is not None:
            self._captured_event = streams.record(waiting)

    def closing(self) -> None:
        """Let the buffer's own stream wait for all who used it, because its library will hand it out again."""
        if not self.is_capturing():  # a capture can contain no such wait, and its pins keep the buffer anyway
            for side in ("low", "high"):
                self._wait_for(self.uses_of(side, 0))
            if self._streams.key(self._birth) != self._home_key and not self._home_is_elsewhere():
                self._streams.wait(self._birth, self._streams.record(self.home))

    def spilling(self, stack: Stack, n_live: int) -> Any:
        """Return the uses of the regions that go to the host."""
        return {key: uses for key, uses in self._uses.items() if key[0] == stack.side and key[1] >= n_live}

    def restored(self, stack: Stack, n_live: int, known: Any) -> None:
        """Declare them again; the host has waited, so nothing is behind now."""
        self._uses.update(known or {})

    def capture_changed(self) -> None:
        """Forget the event of a capture, which no other capture may wait for."""
        self._captured_event = None
