"""The array operations of a paged cache, in torch and in NumPy or CuPy."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np

from gpuarena.errors import ArgumentTypeError, DeviceMismatchError, DTypeError, ShapeError

__all__ = ["PageOps", "page_ops_for"]


class PageOps(Protocol):
    """What a paged cache needs of an array library. All arrays are of that library, indices are int64."""

    def normal_mode(self) -> AbstractContextManager[Any]:
        """Return a context for making views that are kept: one made in torch's inference mode cannot be written outside."""

    def index(self, numbers: np.ndarray[Any, Any]) -> Any:
        """Return integers of the host as an index on the device."""

    def check_out(self, numbers: np.ndarray[Any, Any], out: Any, what: str) -> None:
        """Raise unless `out` is None or takes `numbers` in its first elements."""

    def table(self, numbers: np.ndarray[Any, Any], out: Any) -> Any:
        """Return integers of the host on the device, in the first elements of `out` if that is given; the rest is 0."""

    def permute(self, array: Any, axes: tuple[int, ...]) -> Any:
        """Return the view with its dimensions in another order."""

    def movable(self, array: Any) -> Any:
        """Return the view of a dtype that can be moved about: of bytes for those of 8 bits that cannot."""

    def is_contiguous(self, array: Any) -> bool:
        """Return whether the elements are one run in C order."""

    def may_be_in_arena(self, array: Any) -> bool:
        """Return whether an array may lie in the memory of the arena; cheap."""

    def scatter(self, rows: Any, index: Any, source: Any) -> None:
        """Write ``source[i]`` to ``rows[index[i]]``; both are ``[n, dim]`` and do not overlap."""

    def copy(self, target: Any, source: Any) -> None:
        """Write `source` to `target`, which has its shape and does not overlap it."""

    def take(self, pages: Any, index: Any) -> Any:
        """Return a new array, ``pages[:, :, index]``."""

    def host_bytes(self, nbytes: int) -> Any:
        """Return a new array of bytes on the host."""

    def bytes_of(self, region: Any) -> Any:
        """Return a region on the host as an array that `to_host` writes."""

    def host_view(self, host: Any, start: int, like: Any, shape: tuple[int, ...]) -> Any:
        """Return bytes of the host from `start` on, in the dtype of `like`."""

    def to_host(self, host: Any, array: Any) -> None:
        """Write an array of the device to one of the host, and wait for it."""

    def from_host(self, array: Any, host: Any) -> None:
        """Write an array of the host to one of the device."""


class TorchPageOps:
    """PyTorch."""

    def __init__(self, arena: Any) -> None:
        import torch

        self._torch = torch
        self._device = torch.device(arena.device)
        self._low, self._high = arena.address, arena.address + arena.capacity

    def normal_mode(self) -> AbstractContextManager[Any]:
        return self._torch.inference_mode(False)

    def index(self, numbers: np.ndarray[Any, Any]) -> Any:
        return self._torch.from_numpy(np.ascontiguousarray(numbers, np.int64)).to(self._device)

    def check_out(self, numbers: np.ndarray[Any, Any], out: Any, what: str) -> None:
        if out is None:
            return
        if not isinstance(out, self._torch.Tensor) or out.device != self._device:
            raise DeviceMismatchError(f"{what}: out must be a tensor on {self._device}")
        wanted = self._torch.from_numpy(numbers).dtype
        if out.layout is not self._torch.strided:
            raise ArgumentTypeError(f"{what}: out is {out.layout}; the table is written to a dense tensor")
        if out.dtype != wanted:
            raise DTypeError(f"{what}: out is {out.dtype}, the table is {wanted}", dtype=out.dtype)
        _check_room(numbers.shape, tuple(out.shape), what)

    def table(self, numbers: np.ndarray[Any, Any], out: Any) -> Any:
        made = self._torch.from_numpy(numbers)
        if out is None:
            return made.to(self._device)
        out.zero_()
        out[_corner(numbers.shape)].copy_(made)
        return out

    def permute(self, array: Any, axes: tuple[int, ...]) -> Any:
        return array.permute(axes)

    def movable(self, array: Any) -> Any:
        # index_copy_ knows neither float8 nor the wide unsigned integers; bits are bits.
        torch, dtype = self._torch, array.dtype
        if dtype.is_floating_point and dtype.itemsize == 1:
            return array.view(torch.uint8)
        twins = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
        return array.view(twins[dtype]) if dtype in twins else array

    def is_contiguous(self, array: Any) -> bool:
        contiguous: bool = array.is_contiguous()
        return contiguous

    def may_be_in_arena(self, array: Any) -> bool:
        return bool(self._low <= array.data_ptr() < self._high)

    def scatter(self, rows: Any, index: Any, source: Any) -> None:
        rows.index_copy_(0, index, self.movable(source.detach() if source.requires_grad else source))

    def copy(self, target: Any, source: Any) -> None:
        target.copy_(source)

    def take(self, pages: Any, index: Any) -> Any:
        return pages.index_select(2, index)

    def host_bytes(self, nbytes: int) -> Any:
        with self._torch.inference_mode(False):
            return self._torch.empty(nbytes, dtype=self._torch.uint8, device="cpu")

    def bytes_of(self, region: Any) -> Any:
        return region.as_torch()

    def host_view(self, host: Any, start: int, like: Any, shape: tuple[int, ...]) -> Any:
        nbytes = int(np.prod(shape)) * like.element_size()
        return host.narrow(0, start, nbytes).view(like.dtype).view(shape)

    def to_host(self, host: Any, array: Any) -> None:
        host.copy_(array)

    def from_host(self, array: Any, host: Any) -> None:
        array.copy_(host)


class ArrayPageOps:
    """NumPy and CuPy, whose functions have the same names."""

    def __init__(self, backend: str) -> None:
        self._is_host = backend == "host"
        if self._is_host:
            self._library: Any = np
        else:
            import cupy

            self._library = cupy

    def normal_mode(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def index(self, numbers: np.ndarray[Any, Any]) -> Any:
        return self._library.asarray(np.ascontiguousarray(numbers, np.int64))

    def check_out(self, numbers: np.ndarray[Any, Any], out: Any, what: str) -> None:
        if out is None:
            return
        if not isinstance(out, self._library.ndarray):
            raise DeviceMismatchError(f"{what}: out must be an array of {self._library.__name__}")
        if out.dtype != numbers.dtype:
            raise DTypeError(f"{what}: out is {out.dtype}, the table is {numbers.dtype}", dtype=out.dtype)
        _check_room(numbers.shape, tuple(out.shape), what)

    def table(self, numbers: np.ndarray[Any, Any], out: Any) -> Any:
        if out is None:
            return self._library.asarray(numbers)
        out[...] = 0
        out[_corner(numbers.shape)] = self._library.asarray(numbers)
        return out

    def permute(self, array: Any, axes: tuple[int, ...]) -> Any:
        return array.transpose(axes)

    def movable(self, array: Any) -> Any:
        return array

    def is_contiguous(self, array: Any) -> bool:
        return bool(array.flags.c_contiguous)

    def may_be_in_arena(self, array: Any) -> bool:
        return True

    def scatter(self, rows: Any, index: Any, source: Any) -> None:
        rows[index] = source

    def copy(self, target: Any, source: Any) -> None:
        target[...] = source

    def take(self, pages: Any, index: Any) -> Any:
        return pages[:, :, index]

    def host_bytes(self, nbytes: int) -> Any:
        return np.empty(nbytes, np.uint8)

    def bytes_of(self, region: Any) -> Any:
        return region.as_numpy()

    def host_view(self, host: Any, start: int, like: Any, shape: tuple[int, ...]) -> Any:
        nbytes = int(np.prod(shape)) * like.dtype.itemsize
        return host[start : start + nbytes].view(like.dtype).reshape(shape)

    def to_host(self, host: Any, array: Any) -> None:
        host[...] = array if self._is_host else array.get()

    def from_host(self, array: Any, host: Any) -> None:
        array[...] = self._library.asarray(host)


def page_ops_for(arena: Any) -> PageOps:
    """Return the operations for an arena's backend."""
    return TorchPageOps(arena) if arena.backend == "torch" else ArrayPageOps(arena.backend)


def _check_room(shape: tuple[int, ...], room: tuple[int, ...], what: str) -> None:
    if len(room) != len(shape) or any(have < need for have, need in zip(room, shape, strict=True)):
        raise ShapeError(
            f"{what}: out is {list(room)}, the table takes {list(shape)}; make it for the largest batch and the "
            f"longest sequence",
            shape=room,
        )


def _corner(shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(n) for n in shape)
