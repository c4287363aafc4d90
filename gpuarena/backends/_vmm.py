"""A range of addresses that is reserved once and backed with memory chunk by chunk, so that growing moves nothing.

`Reservation` does the book-keeping in plain integers; the calls to the system are behind `VmmDriver`.
"""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

from gpuarena._bump import align_up
from gpuarena._units import format_nbytes
from gpuarena.errors import ArenaClosedError, ArenaError, BackendError, CaptureError, OutOfMemoryError

#: Chunks double up to this. A larger chunk costs fewer calls, but `trim` gives back whole chunks only.
LARGEST_CHUNK = 64 << 20


class DriverError(Exception):
    """A call of a `VmmDriver` failed, and changed nothing.

    Attributes
    ----------
    out_of_memory : bool
        Whether there was no memory, or no address range, of that size.
    capturing : bool
        Whether the call was refused because of a graph that is being captured.
    """

    def __init__(
        self, call: str, reason: str, *, out_of_memory: bool = False, capturing: bool = False
    ) -> None:
        super().__init__(f"{call}: {reason}")
        self.out_of_memory = out_of_memory
        self.capturing = capturing


class VmmDriver(Protocol):
    """The calls of a system that can back addresses with memory; each raises `DriverError` and then did nothing.

    All byte counts and addresses are multiples of `granularity`.
    """

    def granularity(self) -> int:
        """Return the smallest chunk in bytes, a power of two."""

    def reserve(self, nbytes: int) -> int:
        """Set a range of addresses aside, without memory; return its first."""

    def create(self, nbytes: int) -> Any:
        """Return the handle of new memory, which lives until it is released and no longer mapped."""

    def map(self, address: int, nbytes: int, handle: Any) -> None:
        """Put all of the memory of `handle` at reserved addresses; it cannot be read yet."""

    def set_access(self, address: int, nbytes: int) -> None:
        """Let mapped memory be read and written."""

    def unmap(self, address: int, nbytes: int) -> None:
        """Take away what one `map` has put there, after all work queued on the device is done."""

    def release(self, handle: Any) -> None:
        """Give up a handle; memory that is mapped stays."""

    def free(self, address: int, nbytes: int) -> None:
        """Give back a range of addresses, which `reserve` must have returned for the same byte count."""

    def is_capturing(self) -> bool:
        """Return whether work is being captured into a graph, as far as the system can tell."""


class _Holdings:
    """What a reservation has of its driver, to be given back."""

    def __init__(self, driver: VmmDriver, address: int, nbytes: int) -> None:
        self.driver = driver
        self.range = (address, nbytes)  # exactly as reserved: the driver frees no other
        self.chunks: list[tuple[int, int]] = []  # (address, nbytes) of memory in use, ascending
        self.unwanted: list[tuple[int, int]] = []  # mapped by a call that failed
        self.handles: list[Any] = []  # created and not released yet

    def discard_unwanted(self) -> None:
        """Unmap and release what failed calls have left; go on after an error and raise it at the end."""
        errors = []
        for chunk in reversed(self.unwanted.copy()):
            try:
                self.driver.unmap(*chunk)
                self.unwanted.remove(chunk)
            except DriverError as error:
                errors.append(error)
        for handle in self.handles.copy():
            try:
                self.driver.release(handle)
                self.handles.remove(handle)
            except DriverError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def give_back(self) -> None:
        """Give everything back, or put off what cannot be given back now."""
        self.unwanted += self.chunks
        self.chunks = []
        try:
            if not self.driver.is_capturing():
                self.discard_unwanted()
                self.driver.free(*self.range)
                return
        except DriverError:
            pass
        _postponed.append(self)


#: Of closed reservations. Appending and popping are atomic, so that a garbage collection, which may close
#: a reservation in any thread and at any moment, needs no lock.
_postponed: deque[_Holdings] = deque()


def settle_postponed() -> int:
    """Try again to give back what closed reservations still hold; return how many still hold something.

    A reservation that is closed during the capture of a graph, or whose driver refuses, is kept for this. Every
    operation of any reservation that calls its driver begins with it.
    """
    for _ in range(len(_postponed)):
        try:
            holdings = _postponed.popleft()
        except IndexError:  # another thread was faster
            break
        holdings.give_back()
    return len(_postponed)


class Reservation:
    """`nbytes` of addresses that never move, backed with memory from the start as far as `commit` was called.

    It is not thread-safe: the arena's lock serialises the calls. Nothing closes it but `close`.

    Parameters
    ----------
    driver : VmmDriver
        What makes memory.
    nbytes : int
        Bytes to reserve, any positive number. More is reserved inside, up to whole granules and for the alignment.
    alignment : int
        The address will be a multiple of this power of two.

    Attributes
    ----------
    address, nbytes : int
        The first address, and the bytes as they were asked for.

    Raises
    ------
    OutOfMemoryError
        There is no free range of addresses of that size.
    BackendError
        The driver failed for another reason.
    """

    def __init__(self, driver: VmmDriver, nbytes: int, *, alignment: int = 1) -> None:
        self._driver = driver
        self.nbytes = nbytes
        self._committed = 0
        with self._errors_named("reserve", nbytes, "address space"):
            settle_postponed()
            self._granule = driver.granularity()
            self._reserved = align_up(nbytes, self._granule)  # from `address` on
            total = self._reserved + max(alignment - self._granule, 0)
            if total > sys.maxsize:
                raise DriverError("reserve", "an address has fewer bits", out_of_memory=True)
            start = driver.reserve(total)
        self.address = align_up(start, max(alignment, self._granule))
        self._holdings: _Holdings | None = _Holdings(driver, start, total)

    @property
    def committed(self) -> int:
        """Bytes from `address` on that are backed by memory, in whole granules: it may exceed `nbytes`."""
        return self._committed

    def commit(self, stop: int) -> None:
        """Back the bytes up to `stop` with memory; the contents of new memory are undefined.

        Memory comes in chunks that double from one granule to 64 MiB. Where such a chunk is refused, what is missing
        is tried alone. On any error the memory committed before stays as it was, and no more is held than before.

        Raises
        ------
        OutOfMemoryError
            There is no memory, or `stop` lies behind the end. Besides its own figures it has `committed` and
            `reserved`, in bytes, and `limit`: ``"memory"`` or ``"reservation"``.
        CaptureError
            Memory is missing while a graph is being captured.
        BackendError
            The driver failed for another reason.
        ArenaClosedError
            The reservation is closed.
        """
        if stop > self.nbytes:
            raise self._out_of_memory("back", stop, "reservation", "they end behind it")
        if stop <= self._committed:
            return
        holdings = self._open_holdings()
        n_before = len(holdings.chunks)
        with self._errors_named("back", stop, "memory"):
            self._begin(holdings, "back more memory")
            target = align_up(stop, self._granule)
            try:
                while self._committed < target:
                    self._add_chunk(holdings, target - self._committed)
            except BaseException:  # an interrupt too leaves all or nothing
                holdings.unwanted += holdings.chunks[n_before:]
                del holdings.chunks[n_before:]
                self._committed = sum(nbytes for _, nbytes in holdings.chunks)
                # What cannot be undone now stays noted, and every later call begins with it.
                with contextlib.suppress(DriverError):
                    holdings.discard_unwanted()
                raise

    def trim(self, stop: int) -> int:
        """Give the whole chunks above `stop` back, from the last on; return the bytes given back.

        Should the driver refuse after some were given back, then those count and no error is raised.

        Raises
        ------
        CaptureError
            A graph is being captured.
        BackendError
            The driver failed; nothing was given back.
        ArenaClosedError
            The reservation is closed.
        """
        holdings = self._open_holdings()
        before = self._committed
        with self._errors_named("give back memory above", stop, "memory"):
            self._begin(holdings, "give memory back")
            while holdings.chunks and holdings.chunks[-1][0] >= self.address + stop:
                address, nbytes = holdings.chunks[-1]
                try:
                    self._driver.unmap(address, nbytes)
                except DriverError:
                    if self._committed == before:
                        raise
                    break
                holdings.chunks.pop()
                self._committed -= nbytes
        return before - self._committed

    def close(self) -> None:
        """Give everything back, at once or, during the capture of a graph, at the next call outside of it.

        It never raises, and does nothing the second time. Nothing may use the memory any more.
        """
        holdings, self._holdings = self._holdings, None
        if holdings is not None:
            self._committed = 0
            settle_postponed()
            holdings.give_back()

    def _open_holdings(self) -> _Holdings:
        if self._holdings is None:
            raise ArenaClosedError("the reserved memory was given back")
        return self._holdings

    def _begin(self, holdings: _Holdings, intent: str) -> None:
        """Refuse to go on during a capture, and finish what earlier calls could not."""
        if self._driver.is_capturing():
            raise CaptureError(
                f"cannot {intent} while a graph is being captured: the driver's calls for it cannot be captured; "
                f"run the step once before the capture, so that its memory is there"
            )
        settle_postponed()
        holdings.discard_unwanted()

    def _add_chunk(self, holdings: _Holdings, missing: int) -> None:
        """Add a chunk of twice the last one's size; where it is refused, one of what is `missing`, if smaller."""
        nbytes = 2 * holdings.chunks[-1][1] if holdings.chunks else self._granule
        nbytes = min(nbytes, max(LARGEST_CHUNK, self._granule), self._reserved - self._committed)
        try:
            self._map_chunk(holdings, nbytes)
        except DriverError as error:
            if not error.out_of_memory or nbytes <= missing:
                raise
            holdings.discard_unwanted()
            self._map_chunk(holdings, missing)

    def _map_chunk(self, holdings: _Holdings, nbytes: int) -> None:
        """Map new memory behind the committed bytes; after an error the rest is among the unwanted."""
        address = self.address + self._committed
        handle = self._driver.create(nbytes)
        holdings.handles.append(handle)
        self._driver.map(address, nbytes, handle)
        holdings.unwanted.append((address, nbytes))
        self._driver.release(handle)  # the mapping alone keeps the memory, so unmapping gives it back
        holdings.handles.remove(handle)
        self._driver.set_access(address, nbytes)
        holdings.unwanted.pop()
        holdings.chunks.append((address, nbytes))
        self._committed += nbytes

    @contextlib.contextmanager
    def _errors_named(self, intent: str, nbytes: int, limit: str) -> Iterator[None]:
        """Turn the driver's errors into the package's own."""
        try:
            yield
        except DriverError as error:
            raised: ArenaError
            if error.capturing:
                raised = CaptureError(
                    f"cannot {intent} {format_nbytes(nbytes)} while a graph is being captured: {error}"
                )
            elif error.out_of_memory:
                raised = self._out_of_memory(intent, nbytes, limit, str(error))
            else:
                raised = BackendError(f"cannot {intent} {format_nbytes(nbytes)}: {error}", backend="virtual")
            raise raised from error

    def _out_of_memory(self, intent: str, nbytes: int, limit: str, reason: str) -> OutOfMemoryError:
        capacity = 0 if limit == "address space" else self.nbytes
        available = capacity if limit == "reservation" else self._committed
        return OutOfMemoryError(
            f"cannot {intent} {format_nbytes(nbytes)}, the limit is the {limit}: {reason}; "
            f"{format_nbytes(self._committed)} are committed of {format_nbytes(capacity)} reserved",
            requested=nbytes,
            aligned_offset=0,
            available=available,
            capacity=capacity,
            missing=nbytes - available,
            label=None,
            committed=self._committed,
            reserved=capacity,
            limit=limit,
        )
