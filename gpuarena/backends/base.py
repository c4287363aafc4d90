"""What the core asks of a backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from gpuarena._index import Layout
from gpuarena.dtypes import DType


@runtime_checkable
class Backend(Protocol):
    """One buffer, and the array library that looks into it.

    Offsets are bytes from `address`; the core has checked that they lie inside, that `dtype` is supported and
    that addresses are multiples of its alignment. Nothing here knows of regions or checkpoints.
    """

    name: str
    """Name of the array library: ``"host"`` (NumPy), ``"torch"``, ``"cupy"``."""
    device: str
    """Where the memory lies, in the library's own words: ``"cpu"``, ``"cuda:0"``."""
    address: int
    """Address of the first byte; it never changes."""
    nbytes: int
    """Bytes that may be used from `address` on."""
    negative_strides: bool
    """Whether the library can express a view that runs backwards."""

    def check_dtype(self, dtype: DType) -> None:
        """Raise `DTypeError` when the library has no arrays of `dtype`."""

    def root(self, offset: int, shape: tuple[int, ...], dtype: DType) -> Any:
        """Return a fresh contiguous array on the bytes from `offset` on."""

    def view(self, root: Any, layout: Layout, dtype: DType) -> Any:
        """Return a view of a region's `root` array: other strides, other dtype, offset from `address`."""

    def write(self, array: Any, value: Any) -> None:
        """Assign `value` to all of `array`, broadcasting; raise before writing when it cannot be done."""

    def invalidate(self, arrays: Sequence[Any]) -> None:
        """Note that the memory of these root arrays goes to somebody else."""

    def viewer(self, library: str) -> Backend:
        """Return another library's backend over the same bytes; `DeviceMismatchError` where it cannot reach them."""

    def release(self) -> None:
        """Drop this object's hold on the buffer; arrays made of it keep it alive."""


class BackendFactory(Protocol):
    """Anything that makes a backend, such as a class's ``allocate``."""

    def __call__(self, nbytes: int, *, device: Any, alignment: int) -> Backend:
        """Allocate `nbytes` on `device`, the address a multiple of `alignment`."""
