"""Memory that is mapped twice in a row, so that a run of bytes that wraps around is still one ascending run."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from gpuarena._bump import align_up
from gpuarena._units import format_nbytes
from gpuarena.backends._vmm import DriverError, VmmDriver, _Holdings, settle_postponed
from gpuarena.errors import BackendError, CaptureError, OutOfMemoryError


class Mirror:
    """`period` bytes of memory at `address` and again at ``address + period``: ``2 * period`` addresses.

    What is written to a byte is read `period` bytes further on. It is not thread-safe, and nothing closes it but
    `close`.

    Parameters
    ----------
    driver : VmmDriver
        What makes memory; it must be able to map a handle more than once, as `SharedHostVmm` and `CudaVmm` are.
    nbytes : int
        The bytes of one period at least, any positive number: the period is the next multiple of the granularity.

    Attributes
    ----------
    address, period, nbytes : int
        The first address, the bytes of memory, and of addresses.

    Raises
    ------
    OutOfMemoryError
        There is no memory, or no range of addresses, of that size. Nothing is held.
    CaptureError
        A graph is being captured. Nothing is held.
    BackendError
        The driver failed for another reason. Nothing is held.
    """

    def __init__(self, driver: VmmDriver, nbytes: int) -> None:
        with _errors_named(nbytes):
            if driver.is_capturing():
                raise CaptureError(
                    "cannot map memory twice while a graph is being captured: the driver's calls for it cannot be "
                    "captured; make what needs it before the capture"
                )
            settle_postponed()
            self.period = align_up(nbytes, driver.granularity())
            self.nbytes = 2 * self.period
            if self.nbytes > sys.maxsize:
                raise DriverError("reserve", "an address has fewer bits", out_of_memory=True)
            self.address = driver.reserve(self.nbytes)
            holdings = _Holdings(driver, self.address, self.nbytes)
            try:
                self._map(holdings)
            except BaseException:  # an interrupt too leaves nothing
                holdings.give_back()
                raise
        self._holdings: _Holdings | None = holdings

    def _map(self, holdings: _Holdings) -> None:
        """Map one handle at both places; what is there after an error is among the unwanted."""
        driver, period = holdings.driver, self.period
        handle = driver.create(period)
        holdings.handles.append(handle)
        for address in (self.address, self.address + period):
            driver.map(address, period, handle)
            holdings.unwanted.append((address, period))
        driver.release(handle)  # the mappings alone keep the memory, so unmapping both gives it back
        holdings.handles.remove(handle)
        for chunk in holdings.unwanted:
            driver.set_access(*chunk)
        holdings.chunks, holdings.unwanted = holdings.unwanted, []

    def close(self) -> None:
        """Give everything back, at once or, during the capture of a graph, at the next call outside of it.

        It never raises, and does nothing the second time. Nothing may use the memory any more.
        """
        holdings, self._holdings = self._holdings, None
        if holdings is not None:
            settle_postponed()
            holdings.give_back()


@contextlib.contextmanager
def _errors_named(nbytes: int) -> Iterator[None]:
    """Turn the driver's errors into the package's own."""
    try:
        yield
    except DriverError as error:
        intent = f"cannot map {format_nbytes(nbytes)} twice"
        if error.capturing:
            raise CaptureError(f"{intent} while a graph is being captured: {error}") from error
        if error.out_of_memory:
            raise OutOfMemoryError(
                f"{intent}: {error}",
                requested=nbytes,
                aligned_offset=0,
                available=0,
                capacity=0,
                missing=nbytes,
                label=None,
            ) from error
        raise BackendError(f"{intent}: {error}", backend="mirrored") from error
