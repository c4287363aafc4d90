"""Memory of any PyTorch device seen as tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from gpuarena import backends
from gpuarena._bump import align_up
from gpuarena._index import Layout, check_broadcast
from gpuarena.backends.host import out_of_memory
from gpuarena.dtypes import DType, as_dtype
from gpuarena.errors import (
    AlignmentError,
    ArenaError,
    ArgumentError,
    AutogradError,
    DeviceMismatchError,
    DTypeError,
    StrideError,
)


@contextlib.contextmanager
def _normal_mode() -> Iterator[None]:
    """Leave inference mode: a tensor born inside it could never be written outside (entering costs 1 us)."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            yield
    else:
        yield


class TorchBackend:
    """A torch storage; its address is a multiple of the alignment asked for.

    Every root tensor has a version counter of its own: views made by ``as_strided`` alone share one, and then
    writing one region would break another's backward. ``invalidate`` bumps it, so that a backward through memory
    that was reused raises instead of giving wrong gradients.
    """

    name = "torch"
    negative_strides = False

    def __init__(self, buffer: torch.Tensor) -> None:
        # buffer: [nbytes] uint8, contiguous
        self._storage: Any = buffer.untyped_storage()
        self._device = buffer.device
        self.device = str(buffer.device)
        self.address: int = buffer.data_ptr()
        self.nbytes: int = buffer.numel()
        self._start = buffer.storage_offset()  # bytes from the storage's start to `address`
        self._bases: dict[str, torch.Tensor] = {}
        self._viewers: dict[str, Any] = {}

    @classmethod
    def allocate(cls, nbytes: int, *, device: Any = None, alignment: int = 256) -> TorchBackend:
        """Allocate uninitialised memory on `device`, torch's default device if None.

        The allocation is longer by the alignment, because torch's CPU memory is aligned to 64 bytes only.
        """
        try:
            where = torch.get_default_device() if device is None else torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ArgumentError(f"device {device!r}: {error}", device=device) from error
        if where.type == "meta":
            raise DeviceMismatchError("the meta device has no memory", device="meta")
        try:
            with _normal_mode():
                raw = torch.empty(nbytes + alignment - 1, dtype=torch.uint8, device=where)
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise out_of_memory(nbytes, str(where), error) from error
        except (RuntimeError, AssertionError) as error:
            # the CPU allocator has no exception type of its own; a missing device raises these two as well
            if "allocate" in str(error) or "Storage size" in str(error):
                raise out_of_memory(nbytes, str(where), error) from error
            raise DeviceMismatchError(
                f"torch cannot use device {str(where)!r}: {error}", device=str(where)
            ) from error
        start = align_up(raw.data_ptr(), alignment) - raw.data_ptr()
        return cls(raw[start : start + nbytes])

    @classmethod
    def adopt(cls, buffer: torch.Tensor) -> TorchBackend:
        """Take a contiguous tensor of any dtype, whose storage it keeps alive."""
        if buffer.requires_grad:
            raise AutogradError("the tensor requires grad; adopt tensor.detach(), whose memory is the same")
        if buffer.layout is not torch.strided or buffer.device.type == "meta":
            raise DeviceMismatchError(f"a {buffer.layout} tensor on {buffer.device} is not one run of bytes")
        nbytes = buffer.numel() * buffer.element_size()
        backends.refuse_unless_usable(contiguous=buffer.is_contiguous(), writeable=True, nbytes=nbytes)
        as_bytes = _as_bytes(buffer)
        if as_bytes.untyped_storage().data_ptr() % 16 and as_bytes.device.type == "cpu":
            # A storage that starts at an odd address (torch.frombuffer) allows no typed views; NumPy's
            # wrapper over the same bytes starts where we say.
            return cls.adopt_numpy(as_bytes.numpy())
        return cls(as_bytes)

    @classmethod
    def adopt_numpy(cls, buffer: np.ndarray[Any, Any]) -> TorchBackend:
        """Take host bytes, from the first address on that is a multiple of 16, and keep their owner alive."""
        with _normal_mode():
            return cls(torch.from_numpy(buffer))

    def check_dtype(self, dtype: DType) -> None:
        """Raise `DTypeError` when torch has no `dtype`."""
        if dtype.name not in self._bases:
            self._base(dtype)

    def _base(self, dtype: DType) -> torch.Tensor:
        """Return the tensor of `dtype` over the whole storage, from which all views of that dtype come."""
        base = self._bases.get(dtype.name)
        if base is None:
            with _normal_mode():
                base = torch.empty(0, dtype=dtype.torch, device=self._device)
                base.set_(self._storage, 0, (self._storage.nbytes() // dtype.itemsize,), (1,))
            self._bases[dtype.name] = base
        return base

    def _element(self, offset: int, dtype: DType) -> int:
        """Return the storage offset, in elements, of a byte offset."""
        element, rest = divmod(self._start + offset, dtype.itemsize)
        if rest:
            raise AlignmentError(
                f"byte {offset} of this buffer cannot hold {dtype}: torch views a storage at multiples of "
                f"{dtype.itemsize} bytes only, and this one starts {self._start} bytes before the arena",
                offset=offset,
            )
        return element

    def root(self, offset: int, shape: tuple[int, ...], dtype: DType) -> torch.Tensor:
        """Return a contiguous tensor with a version counter of its own."""
        strides = []
        stride = 1
        for dim in reversed(shape):
            strides.append(stride)
            stride *= dim or 1
        strides.reverse()
        base = self._bases.get(dtype.name)
        if base is None:
            base = self._base(dtype)
        element = self._element(offset, dtype) if stride and 0 not in shape else 0
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return torch.as_strided(base, shape, strides, element).data
        return torch.as_strided(base, shape, strides, element).data

    def view(self, root: torch.Tensor, layout: Layout, dtype: DType) -> torch.Tensor:
        """Return a view that shares the root's version counter, so that writes are seen by its backward."""
        offset, shape, strides = layout
        if 0 in shape:
            offset, strides = -self._start, tuple(max(stride, 0) for stride in strides)
        elif any(stride < 0 for stride in strides):
            raise StrideError(
                "torch has no views with negative strides; use torch.flip(region.array, dims) for a copy"
            )
        element = self._element(offset, dtype)
        with _normal_mode():
            typed = root if root.dtype == dtype.torch else _recast(root, dtype)
            return typed.as_strided(shape, [stride // dtype.itemsize for stride in strides], element)

    def write(self, array: torch.Tensor, value: Any) -> None:
        """Assign with torch's rules for casts; the arena takes no part in an autograd graph."""
        source = self._as_tensor(value, array)
        check_broadcast(source.shape, tuple(array.shape))
        if source.ndim > array.ndim:  # leading ones, which NumPy's assignment drops
            source = source.reshape(source.shape[source.ndim - array.ndim :])
        with torch.no_grad():
            try:
                array.copy_(source.detach())
            except (RuntimeError, NotImplementedError) as error:
                if source.dtype != array.dtype:
                    raise DTypeError(
                        f"torch cannot write {source.dtype} into {array.dtype}: {error}"
                    ) from error
                # types without kernels (uint4, bits8) still have bytes
                _as_bytes(array).copy_(_as_bytes(source.expand(array.shape).contiguous()))

    @staticmethod
    def _as_tensor(value: Any, like: torch.Tensor) -> torch.Tensor:
        if isinstance(value, torch.Tensor):
            return value
        if isinstance(value, np.ndarray):
            dtype = as_dtype(value.dtype)
            flat = np.array(value, order="C")  # a copy: torch refuses read-only and negatively strided memory
            return torch.from_numpy(flat.view(np.uint8).reshape(-1)).view(dtype.torch).reshape(value.shape)
        try:
            if isinstance(value, (int, float, complex)):
                return torch.as_tensor(value).to(like.dtype)
            return torch.as_tensor(value)
        except ArenaError:
            raise
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            if isinstance(value, (int, float)) and value == 0:
                return torch.zeros(like.element_size(), dtype=torch.uint8).view(like.dtype).reshape(())
            raise DTypeError(f"torch cannot make {like.dtype} of {type(value).__name__}: {error}") from error

    def invalidate(self, arrays: Sequence[torch.Tensor]) -> None:
        """Bump the version of every root, so that autograd refuses what it saved of them."""
        torch.autograd.graph.increment_version(arrays)

    def viewer(self, library: str) -> Any:
        """Return a backend of ``"host"`` (CPU memory) or ``"cupy"`` (CUDA memory) over the same bytes."""
        if library == "torch":
            return self
        if library not in self._viewers:
            as_bytes = self.root(0, (self.nbytes,), as_dtype("uint8"))
            if library == "host" and self._device.type == "cpu":
                self._viewers[library] = backends.load("host")(as_bytes.numpy())
            elif library == "cupy" and self._device.type == "cuda":
                self._viewers[library] = backends.load("cupy").adopt_pointer(
                    self.address, self.nbytes, as_bytes, self._device.index or 0
                )
            else:
                raise DeviceMismatchError(
                    f"{'NumPy' if library == 'host' else library} cannot reach memory on {self.device}; copy the contents"
                )
        return self._viewers[library]

    def release(self) -> None:
        """Drop the storage; tensors made of it keep it alive."""
        self._viewers.clear()
        self._bases.clear()
        self._storage = None


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor, flat, sharing memory and version counter."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def _recast(root: torch.Tensor, dtype: DType) -> torch.Tensor:
    """Return a flat view of a contiguous root as `dtype`; only its dtype and version counter matter."""
    flat = root.reshape(-1)
    if flat.element_size() != dtype.itemsize:
        flat = flat.view(torch.uint8)
        flat = flat[: flat.numel() // dtype.itemsize * dtype.itemsize]
    return flat.view(dtype.torch)
