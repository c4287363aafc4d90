"""The arena: one buffer, one bump pointer, exact rollback."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from gpuarena import _messages, backends
from gpuarena._allocation import Allocation
from gpuarena._state import check_text, parse_alignment, parse_debug, warn
from gpuarena._units import parse_nbytes
from gpuarena.checkpoint import Checkpoint
from gpuarena.errors import ArgumentError, refuse_copy
from gpuarena.stats import Stats

if TYPE_CHECKING:
    from gpuarena._pins import Pin
    from gpuarena.debug import Debug
    from gpuarena.frames import Frame
    from gpuarena.observe.memory_map import MemoryMap
    from gpuarena.observe.profile import Profile
    from gpuarena.observe.trace import Trace
    from gpuarena.scratch import Scratch
    from gpuarena.spill import Spill

__all__ = ["Arena"]


class Arena(Allocation):
    """One buffer with a bump pointer.

    >>> arena = Arena("1MiB")
    >>> x = arena.alloc((2, 3), "float32")
    >>> x.offset, x.nbytes, arena.stats.used
    (0, 24, 24)
    >>> with arena.scope():
    ...     y = arena.alloc(5, "int8")
    ...     y.offset
    256
    >>> arena.stats.used  # y is gone
    24

    Parameters
    ----------
    capacity : int or str
        Bytes, or a text such as ``"2GiB"``. It never changes, and the buffer never moves, so addresses are a
        function of the calls made.
    backend : {"host", "torch", "cupy", "virtual", "virtual:torch", "virtual:cupy"} or a `BackendFactory`
        The library whose arrays the regions are. A ``virtual`` backend reserves addresses only, and commits
        memory as the pointer advances.
    device : optional
        In the library's own words; None is its default device. ``"pinned"`` is page-locked host memory
        (torch and cupy).
    alignment : int
        Default alignment of addresses in bytes, a power of two. A region's own dtype can ask for more.
    name : str, optional
        For messages.
    debug : bool or Debug
        True finds misuse as described in `Debug`, at the price of speed and of some bytes between regions.
    stream : optional
        The home stream, on which memory is reused; by default the library's current stream. Only where the
        device has streams.

    Raises
    ------
    ArgumentError, ArgumentTypeError, AlignmentError
        The capacity, the alignment or the stream can never be right.
    OutOfMemoryError
        The library cannot reserve the buffer.
    BackendError, DeviceMismatchError
        The library or the device is not there.

    Notes
    -----
    Every call is serialised by a lock, and scopes belong to the arena, not to the thread that opened them.
    Rolled-back memory is reused in the order of the home stream: work queued on another stream must be
    declared with `Region.record_stream`.
    """

    def __init__(
        self,
        capacity: int | str,
        *,
        backend: str | backends.BackendFactory = "host",
        device: Any = None,
        alignment: int = 256,
        name: str | None = None,
        debug: bool | Debug = False,
        stream: Any = None,
    ) -> None:
        nbytes = parse_nbytes(capacity)
        align = parse_alignment(alignment)
        check_text(name, "name")
        settings = parse_debug(debug)
        if settings is not None and settings.separate:
            from gpuarena.backends.separate import SeparateBackend

            made: backends.Backend = SeparateBackend(backend, nbytes, device, align)
        else:
            made = backends.create(backend, nbytes, device, align)
        self._setup(made, align, name, settings, stream)

    @classmethod
    def from_buffer(
        cls,
        buffer: Any,
        *,
        alignment: int = 256,
        name: str | None = None,
        debug: bool | Debug = False,
        stream: Any = None,
    ) -> Arena:
        """Return an arena over memory that somebody else owns, all of it, and keep the owner alive.

        >>> Arena.from_buffer(bytearray(1024)).capacity
        1024

        Parameters
        ----------
        buffer
            A contiguous, writeable torch tensor, CuPy or NumPy array, DLPack object, or buffer object
            (``bytearray``, ``mmap``, shared memory). Nothing is aligned for you: the first region starts at the
            first address that its alignment allows.

        Raises
        ------
        ArgumentTypeError, ShapeError, ReadOnlyError, AutogradError, DeviceMismatchError
            It is no memory, not one run of bytes, not writeable, part of an autograd graph, or out of reach.
        """
        align = parse_alignment(alignment)
        check_text(name, "name")
        settings = parse_debug(debug)
        if settings is not None and settings.separate:
            raise ArgumentError("debug: memory of somebody else cannot be taken apart (separate=True)")
        arena = cls.__new__(cls)
        arena._setup(backends.adopt(buffer), align, name, settings, stream)
        return arena

    # -- parts of an arena --------------------------------------------------------------------------------------

    def child(
        self,
        capacity: int | str,
        *,
        alignment: int | None = None,
        name: str | None = None,
        side: str = "low",
    ) -> Arena:
        """Return an arena inside one region of this one; it dies with the region.

        >>> arena = Arena(4096)
        >>> with arena.scope():
        ...     child = arena.child(1024)
        ...     child.alloc(3, "float32").nbytes
        12
        >>> child.closed
        True

        The region has the child's name as its label. Closing the child stales its handles; the region goes
        at the parent's next rollback below it.

        Raises
        ------
        OutOfMemoryError
            There is no room; otherwise as `Arena` and `alloc`. Unchanged on error.
        """
        from gpuarena._dependents import make_child

        align = self.alignment if alignment is None else parse_alignment(alignment)
        check_text(name, "name")
        return make_child(self, parse_nbytes(capacity), align, name, side)

    def frame(
        self, buffers: Mapping[str, tuple[Any, Any]] | None = None, /, *, side: str = "low", **more: Any
    ) -> Frame:
        """Return native arrays placed once, as attributes: what a loop reuses at every step.

        >>> frame = Arena("1MiB").frame(q=((4, 8), "float32"), mask=(8, "bool"))
        >>> frame.q.shape
        (4, 8)

        Parameters
        ----------
        buffers : mapping of name to (shape, dtype), optional
        **more : (shape, dtype)
            The same as keywords; they are placed in the order given, all of them or none.

        Raises
        ------
        ArgumentError
            No buffers, a name twice, or one that is no identifier. Unchanged on error.
        OutOfMemoryError
            They do not all fit. Unchanged on error but for `Stats.n_failed`.
        """
        from gpuarena.frames import make_frame

        return make_frame(self, {**(buffers or {})}, more, side)

    def scratch(self, *, conflicts: Iterable[Any] = (), label: str | None = None) -> Scratch:
        """Return a context manager for temporaries, on an end that none of `conflicts` uses.

        A function that is given the arena for its result, and needs temporaries, names it as a conflict: the
        temporaries then come from the other end, and go at the end of the block without the result.

        >>> def squares(out, n):
        ...     with out.scratch(conflicts=[out]) as tmp:
        ...         numbers = tmp.full(n, 3, "float32")
        ...         return out.from_array(numbers * numbers)
        >>> squares(Arena(4096), 2).array
        array([9., 9.], dtype=float32)

        Parameters
        ----------
        conflicts : iterable of Arena or Scratch
            This arena stands for its low end. Other arenas conflict with nothing here.

        Raises
        ------
        ArgumentError
            Both ends are in conflict.
        """
        from gpuarena.scratch import make_scratch

        return make_scratch(self, conflicts, label)

    def spill(self, checkpoint: Checkpoint) -> Spill:
        """Copy everything above `checkpoint` out to host memory and drop it; `Spill.restore` brings it back.

        >>> arena = Arena(1024)
        >>> start = arena.checkpoint()
        >>> x = arena.alloc(4, "uint8", fill=7)
        >>> spilled = arena.spill(start)
        >>> x.is_live
        False
        >>> spilled.restore()
        >>> x.array
        array([7, 7, 7, 7], dtype=uint8)

        In between the space can be used for something else. The host waits for the device.

        Raises
        ------
        CheckpointError
            As `rollback`; or there is nothing above it, or a child, a frame or a pin, which cannot be brought
            back exactly. Unchanged on error.
        CaptureError
            A graph is being captured. Unchanged on error.
        """
        from gpuarena.spill import make_spill

        with self._lock:
            self._validate(checkpoint, "spill")
            return make_spill(self, checkpoint, sys._getframe(1))

    # -- graphs -------------------------------------------------------------------------------------------------

    def pin(self, label: str | None = None) -> Pin:
        """Return a context manager: memory handed out inside stays reserved until `Pin.release`.

        Meant for the capture of a graph, which will use the same addresses at every replay, whatever the scopes
        inside have given back. Without it a capture that is noticed pins by itself; see `pins`.

        >>> arena = Arena(4096)
        >>> with arena.pin() as pin, arena.scope():
        ...     x = arena.empty(100, "uint8")
        >>> arena.stats.available  # the scope is over, the bytes are not given to anybody
        3996
        >>> pin.release()
        >>> arena.reset()
        """
        check_text(label, "label")
        with self._lock:
            if self._closed:
                raise self._closed_error("pin")
            return self._pinned().make(label)

    @property
    def pins(self) -> tuple[Pin, ...]:
        """The pins that are not released, oldest first."""
        with self._lock:
            self._watch()
            return () if self._pins is None else self._pins.unreleased()

    @property
    def stream(self) -> Any:
        """The home stream, on which memory is reused; None where the device has no streams."""
        return None if self._order is None else self._order.home

    # -- growth -------------------------------------------------------------------------------------------------

    def trim(self) -> int:
        """Give back memory above the pointer, where the backend grows; return the bytes given back.

        Other backends have nothing to give back: their buffer is one piece.

        Raises
        ------
        LiveArraysError
            Native arrays of dropped regions are still referenced there: reading them would end the process.
            Unchanged on error.
        CaptureError
            A graph is being captured. Unchanged on error.
        """
        with self._lock:
            if self._closed:
                raise self._closed_error("trim")
            if not self._backend.growable:
                return 0
            self._watch()
            assert self._tracker is not None, "a growable arena tracks its arrays"
            self._tracker.check_above(self._low.top)
            return self._backend.trim(self._low.top)

    # -- what it holds ------------------------------------------------------------------------------------------

    def check(self) -> None:
        """In debug mode, look for bytes written outside of regions; otherwise do nothing.

        Raises
        ------
        CorruptionError
            There are some; each is reported once.
        """
        with self._lock:
            if self._closed:
                raise self._closed_error("check")
            for hook in self._hooks:
                report = hook.check()
                if report is not None:
                    raise report

    @property
    def stats(self) -> Stats:
        """An immutable snapshot of the figures."""
        with self._lock:
            self._note_peaks()
            low, high = self._low, self._high
            used = low.used + high.used
            n_regions = len(low.serials) + len(high.serials)
            n_allocs = self._next_serial
            taken = low.top + self.capacity - high.top
            return Stats(
                capacity=self.capacity,
                top=low.top,
                high=high.top,
                used=used,
                padding=taken - used,
                available=high.top - low.top,
                n_regions=n_regions,
                committed=self._backend.committed if not self._closed else 0,
                peak=self._peak,
                peak_used=self._peak_used,
                peak_regions=self._peak_regions,
                n_allocs_total=n_allocs,
                n_freed_total=n_allocs - n_regions,
                n_failed=self._n_failed,
                bytes_requested_total=used + low.freed + high.freed,
                bytes_freed_total=low.freed + high.freed,
            )

    def by_label(self) -> dict[str | None, int]:
        """Return the bytes of the live regions by label, in order of first use; they add up to `Stats.used`."""
        sums: dict[str | None, int] = {}
        with self._lock:
            for stack in (self._low, self._high):
                for record in stack.records:
                    sums[record.label] = sums.get(record.label, 0) + record.nbytes
        return sums

    def memory_map(self, width: int | None = None) -> MemoryMap:
        """Return what lies where, to be printed: a bar of the addresses, and the bytes of each label.

        >>> arena = Arena(4096, name="scratch")
        >>> x = arena.alloc(1000, "uint8", label="x")
        >>> y = arena.alloc(700, "uint8", label="y", side="high")
        >>> print(arena.memory_map(width=80))
        arena scratch on cpu, 4 KiB
        1.73 KiB taken (43.2 %), 2.27 KiB free, 2 regions, high-water mark 1.73 KiB
        <BLANKLINE>
             0 B AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA.
           1 KiB ................................................................
           2 KiB ................................................................
           3 KiB ................BBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBB----
                 a cell is 16 B, low end at 1000 B, high end at 3.25 KiB
        <BLANKLINE>
             label          bytes    share  regions  end
          A  x             1000 B   24.4 %        1  low
          B  y              700 B   17.1 %        1  high
          -  padding         68 B    1.7 %
          .  free        2.27 KiB   56.8 %

        Parameters
        ----------
        width : int, optional
            Columns of the text, at least 40; by default those of the terminal.

        Raises
        ------
        ArgumentTypeError, ArgumentError
            The width is no number, or too small.
        """
        from gpuarena.observe.memory_map import memory_map

        return memory_map(self, width)

    def profile(self, name: str | None = None) -> Profile:
        """Return a context manager that counts what is allocated and freed inside, by label too.

        >>> arena = Arena(4096)
        >>> with arena.profile("step") as profile, arena.scope():
        ...     _ = arena.alloc(100, "uint8", label="mask")
        >>> profile.nbytes.peak, profile.nbytes.current, profile.by_label["mask"].nbytes.allocated
        (100, 0, 100)

        Profiles nest, and an inner one counts for the outer too.
        """
        from gpuarena.observe.profile import Profile

        check_text(name, "name")
        return Profile(self, name)

    def record(self, path: Any = None, *, sites: bool = True) -> Trace:
        """Return a context manager that logs every event, to a ``.jsonl`` or ``.csv`` file if a path is given.

        >>> arena = Arena(4096)
        >>> with arena.record() as trace:
        ...     _ = arena.alloc(100, "uint8")
        >>> trace.events[-1].kind, trace.events[-1].nbytes
        ('alloc', 100)

        Parameters
        ----------
        path : str or path, optional
            Without it the events are kept in memory, in `Trace.events`.
        sites : bool
            Whether each event says which line of the program it came from.
        """
        from gpuarena.observe.trace import Trace

        return Trace(self, path, sites)

    def dump_snapshot(self, path: Any, *, trace: Trace | None = None) -> None:
        """Write the arena as it is now into a file that https://pytorch.org/memory_viz opens.

        >>> import pathlib, tempfile
        >>> arena = Arena(4096)
        >>> with arena.record() as trace:
        ...     _ = arena.alloc(100, "uint8", label="mask")
        ...     arena.dump_snapshot(pathlib.Path(tempfile.mkdtemp()) / "arena.pickle", trace=trace)

        Parameters
        ----------
        path : str or path
            Usually ends in ``.pickle``. The file is written whole or not at all.
        trace : Trace, optional
            What `record` returned: the history to show beside the regions that are live.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            The trace is none, or of another arena.
        ArenaClosedError, OSError
            The arena is closed; the file cannot be written.

        Notes
        -----
        See `gpuarena.observe.dump_snapshot` for several arenas in one file.
        """
        from gpuarena.observe.snapshot import dump_snapshot

        dump_snapshot(self, path, trace)

    @property
    def backend(self) -> str:
        """Name of the backend's library."""
        return self._backend.name

    @property
    def grows(self) -> bool:
        """Whether memory is committed as the pointer advances, as with ``backend="virtual"``."""
        return self._backend.growable

    @property
    def closed(self) -> bool:
        """Whether `close` was called, or the region that a child lies in is gone."""
        return self._closed

    def close(self) -> None:
        """Make every handle stale and let go of the buffer; never raises, and may be called again.

        The memory is given back when the last native array that shares it is gone. Guard zones that are found
        damaged are reported as a warning, because nothing is raised here.
        """
        with self._lock:
            warned = self._close(None)
        for warning in warned:  # last, because a warning may be turned into an error
            warn(warning)

    def __enter__(self) -> Arena:
        if self._closed:
            raise self._closed_error("with")
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return _messages.describe(self)

    def __reduce__(self) -> Any:
        raise refuse_copy(self)
