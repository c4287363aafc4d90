"""Memory of any PyTorch device seen as tensors."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from gpuarena import backends
from gpuarena._bump import align_up, contiguous_strides
from gpuarena._index import Layout, check_broadcast
from gpuarena.backends._torch_storage import guard
from gpuarena.backends.base import Backend
from gpuarena.backends.host import out_of_memory
from gpuarena.dtypes import DType, as_dtype
from gpuarena.errors import (
    AlignmentError,
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


_as_strided = torch.as_strided
_is_inference_mode = torch.is_inference_mode_enabled

#: Of the start of a storage, in bytes: the largest item size.
_STORAGE_ALIGNMENT = 16
_UINT8 = as_dtype("uint8")
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TorchBackend(Backend):
    """A torch storage; its address is a multiple of the alignment asked for.

    Every root tensor has a version counter of its own: views made by ``as_strided`` alone share one, and then
    writing one region would break another's backward. ``invalidate`` bumps it, so that a backward through memory
    that was reused raises instead of giving wrong gradients.
    """

    name = "torch"
    negative_strides = False

    def __init__(self, buffer: torch.Tensor, *, owned: bool = False) -> None:
        # buffer: [nbytes] uint8, contiguous; owned: nobody else has a tensor of its storage
        storage = buffer.untyped_storage()
        self._storage: Any = guard(storage) if owned else storage
        self._device = buffer.device
        self.device = str(buffer.device)
        self.address: int = buffer.data_ptr()
        self.nbytes: int = buffer.numel()
        self._start = int(buffer.storage_offset())  # bytes from the storage's start to `address`
        self._host: np.ndarray[Any, Any] | None = None  # the memory, if a storage cannot start where it does
        self._bytes: Any = None  # the storage seen by NumPy, once it is needed
        self._tracked = False  # whether there are roots with storages of their own
        self._bases: dict[str, torch.Tensor] = {}
        self._viewers: dict[str, Any] = {}
        # Nothing is pinned before CUDA is in use, and asking would start it.
        cuda: Any = torch.cuda
        pinned = cuda.is_initialized() and self._device.type == "cpu" and buffer.is_pinned()
        self.survives_fork = self._device.type == "cpu" and not pinned
        if self._device.type == "cuda":
            from gpuarena.backends.torch_streams import TorchStreams

            self.streams = TorchStreams(self._device)

    @classmethod
    def allocate(cls, nbytes: int, *, device: Any = None, alignment: int = 256) -> TorchBackend:
        """Allocate uninitialised memory on `device`, torch's default device if None; ``"pinned"`` is on the host.

        The allocation is longer by the alignment, because torch's CPU memory is aligned to 64 bytes only.
        """
        try:
            pinned = device == "pinned"
            where = torch.device("cpu") if pinned else _device(device)
        except (RuntimeError, TypeError) as error:
            raise ArgumentError(f"device {device!r}: {error}", device=device) from error
        if where.type == "meta":
            raise DeviceMismatchError("the meta device has no memory", device="meta")
        name = "pinned" if pinned else str(where)
        # A whole number of the largest elements: torch.compile's inductor needs that of a storage.
        total = align_up(nbytes + alignment - 1, _STORAGE_ALIGNMENT)
        try:
            with _normal_mode():
                if where.type == "cpu" and not pinned:
                    # NumPy's memory, because torch could move its own: `resize_` grows a storage.
                    raw = torch.from_numpy(np.empty(total, np.uint8))
                else:
                    raw = torch.empty(total, dtype=torch.uint8, device=where, pin_memory=pinned)
        except (torch.OutOfMemoryError, MemoryError, ValueError) as error:  # ValueError: NumPy's size limit
            raise out_of_memory(nbytes, name, error) from error
        except (RuntimeError, AssertionError) as error:
            # some allocators have no exception type of their own; a missing device raises these two as well
            if "allocate" in str(error) or "Storage size" in str(error):
                raise out_of_memory(nbytes, name, error) from error
            raise DeviceMismatchError(f"torch cannot use device {name!r}: {error}", device=name) from error
        start = align_up(raw.data_ptr(), alignment) - raw.data_ptr()
        made = cls(raw[start : start + nbytes], owned=True)
        if pinned:  # which may have started CUDA just now, and torch.cuda does not know of that
            made.survives_fork = False
        return made

    @classmethod
    def adopt(cls, buffer: torch.Tensor, *, owned: bool = False) -> TorchBackend:
        """Take a contiguous tensor of any dtype, whose storage it keeps alive.

        `owned` says that nobody else has the storage, which then refuses to be copied as a whole.
        """
        if buffer.requires_grad:
            raise AutogradError("the tensor requires grad; adopt tensor.detach(), whose memory is the same")
        if buffer.layout is not torch.strided or buffer.device.type == "meta":
            raise DeviceMismatchError(f"a {buffer.layout} tensor on {buffer.device} is not one run of bytes")
        nbytes = buffer.numel() * buffer.element_size()
        if buffer.is_conj() or buffer.is_neg():
            raise ArgumentError(
                "the tensor is a lazy conjugate or negation; adopt tensor.resolve_conj().resolve_neg()"
            )
        backends.refuse_unless_usable(contiguous=buffer.is_contiguous(), writeable=True, nbytes=nbytes)
        as_bytes = _as_bytes(buffer)
        if as_bytes.untyped_storage().data_ptr() % _STORAGE_ALIGNMENT and as_bytes.device.type == "cpu":
            # A storage that starts at an odd address (torch.frombuffer) allows no typed views; NumPy's
            # wrapper over the same bytes starts where we say.
            return cls.adopt_numpy(as_bytes.numpy())
        return cls(as_bytes, owned=owned)

    @classmethod
    def adopt_numpy(cls, buffer: np.ndarray[Any, Any]) -> TorchBackend:
        """Take host bytes at any address, and keep their owner alive.

        torch views a storage at multiples of the item size only, so the storage starts at the first address
        that is a multiple of 16; what begins below it gets storages of its own.
        """
        skipped = -buffer.ctypes.data % _STORAGE_ALIGNMENT
        with _normal_mode():
            backend = cls(torch.from_numpy(buffer[skipped:]), owned=True)
        if skipped:
            backend.address = buffer.ctypes.data
            backend.nbytes = buffer.nbytes
            backend._start = -skipped
            backend._host = buffer
        return backend

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

    @staticmethod
    def _element(position: int, dtype: DType) -> int:
        """Return the storage offset, in elements, of a byte of a storage."""
        element, rest = divmod(position, dtype.itemsize)
        if rest:
            raise AlignmentError(
                f"byte {position} of a torch storage cannot hold {dtype}: torch views a storage at multiples of "
                f"{dtype.itemsize} bytes only",
                position=position,
            )
        return element

    def _root_below_storage(self, offset: int, shape: tuple[int, ...], dtype: DType) -> torch.Tensor:
        """Return a tensor on the first bytes of memory that starts at an odd address, on a storage of its own."""
        assert self._host is not None, "only such memory begins below its storage"
        n_elements = math.prod(shape)
        with _normal_mode():
            storage = torch.from_numpy(
                self._host[offset : offset + n_elements * dtype.itemsize]
            ).untyped_storage()
            guard(storage)
            tensor = torch.empty(0, dtype=dtype.torch)
            tensor.set_(storage, 0, (n_elements,), (1,))
            return tensor.reshape(shape)

    def root(self, offset: int, shape: tuple[int, ...], dtype: DType) -> torch.Tensor:
        """Return a contiguous tensor with a version counter of its own."""
        base = self._bases.get(dtype.name)
        if base is None:
            base = self._base(dtype)
        itemsize, position = dtype.itemsize, self._start + offset
        element = position // itemsize
        # torch counts elements; two dimensions are the commonest, and written out
        strides = (shape[1], 1) if len(shape) == 2 and shape[1] else contiguous_strides(shape, 1)
        if element < 0 or element * itemsize != position or 0 in shape:
            if 0 in shape:
                element = 0
            elif position < 0:
                return self._root_below_storage(offset, shape, dtype)
            else:
                element = self._element(position, dtype)
        if _is_inference_mode():
            return self.again(_as_strided(base, shape, strides, element))
        return _as_strided(base, shape, strides, element).data

    def again(self, prototype: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the bytes of a prototype, with a version counter of its own."""
        if _is_inference_mode():
            with torch.inference_mode(False):
                return prototype.data
        return prototype.data

    def tracked_root(self, offset: int, shape: tuple[int, ...], dtype: DType) -> tuple[torch.Tensor, Any]:
        """Return a tensor and what lives while it or any view of it does.

        On the host that is an array of the region's own bytes, which a storage of the region's own refers to: then
        every alias counts, and nothing can be resized beyond the region. On a device it is the tensor itself, to
        which views that autograd knows of refer.
        """
        n_elements = math.prod(shape)
        if self._device.type != "cpu" or n_elements == 0:
            tensor = self.root(offset, shape, dtype)
            return tensor, tensor
        with _normal_mode():
            if self._bytes is None:
                # On memory that begins below its storage the backend has them already.
                self._bytes = torch.empty(0, dtype=torch.uint8).set_(self._storage).numpy()
            start = self._start + offset if self._host is None else offset
            whole: Any = self._bytes if self._host is None else self._host
            part = memoryview(whole)[start : start + n_elements * dtype.itemsize]
            owner = np.frombuffer(part, np.uint8)
            self._tracked = True
            storage = guard(torch.from_numpy(owner).untyped_storage())
            tensor = torch.empty(0, dtype=dtype.torch)
            return tensor.set_(storage, 0, shape, contiguous_strides(shape, 1)), owner

    def view(self, root: torch.Tensor, layout: Layout, dtype: DType) -> torch.Tensor:
        """Return a view that shares the root's version counter, so that writes are seen by its backward."""
        offset, shape, strides = layout
        if 0 in shape:
            element, strides = 0, tuple(max(stride, 0) for stride in strides)
        elif any(stride < 0 for stride in strides):
            raise StrideError(
                "torch has no views with negative strides; use torch.flip(region.array, dims) for a copy"
            )
        elif self._host is None and not self._tracked:
            element = self._element(self._start + offset, dtype)
        else:
            element = self._element(self.address + offset - root.untyped_storage().data_ptr(), dtype)
        with _normal_mode():
            typed = root if root.dtype == dtype.torch else _recast(root, dtype)
            return typed.as_strided(shape, [stride // dtype.itemsize for stride in strides], element)

    def write(self, array: torch.Tensor, value: Any) -> None:
        """Assign tensors with torch's casts and all else with NumPy's; no part of it enters an autograd graph."""
        if type(value) is int and value == 0:
            with torch.no_grad():
                try:
                    array.zero_()
                except NotImplementedError:  # a type without kernels
                    _as_integers(array).zero_()
            return
        if isinstance(value, (bool, int, float, complex)) and array.device.type != "cpu":
            numpy = as_dtype(array.dtype).numpy
            if numpy is not None and numpy.kind in "biufc":
                # By a kernel alone: a copy from the host would wait for it, which a capture cannot.
                with torch.no_grad():
                    array.fill_(np.asarray(value, numpy).item())
                return
        source = self._as_tensor(value, array)
        check_broadcast(source.shape, tuple(array.shape))
        if source.ndim > array.ndim:  # leading ones, which NumPy's assignment drops
            source = source.reshape(source.shape[source.ndim - array.ndim :])
        with torch.no_grad():
            source = source.detach()
            if _may_overlap(source, array):  # torch would read what it has just written
                source = _as_integers(source).clone().view(source.dtype)
            try:
                array.copy_(source)
            except (RuntimeError, NotImplementedError) as error:
                if source.dtype != array.dtype:
                    raise DTypeError(
                        f"torch cannot write {source.dtype} into {array.dtype}: {error}"
                    ) from error
                # types without kernels (uint4, bits8) still have bytes
                _as_integers(array).copy_(_as_integers(source))

    @staticmethod
    def _as_tensor(value: Any, like: torch.Tensor) -> torch.Tensor:
        if isinstance(value, torch.Tensor):
            return value
        if hasattr(value, "__dlpack__") and not isinstance(value, (np.ndarray, np.generic)):
            shared: torch.Tensor = torch.utils.dlpack.from_dlpack(value)
            return shared
        dtype = as_dtype(like.dtype)
        if dtype.numpy is not None or hasattr(value, "dtype"):
            # Python numbers become the region's type by NumPy's rules: torch would round 0.1 to float32 first.
            values = np.asarray(value, dtype=None if hasattr(value, "dtype") else dtype.numpy)
            # A copy in native byte order: torch refuses read-only memory and negative strides.
            values = np.array(values, dtype=values.dtype.newbyteorder("="), order="C")
            flat = torch.from_numpy(values.reshape(-1).view(np.uint8))
            return flat.view(as_dtype(values.dtype).torch).reshape(values.shape)
        try:
            return torch.as_tensor(value, device="cpu").to(like.dtype)
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
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

    def _byte_range(self, start: int, stop: int) -> torch.Tensor:
        return self.root(start, (stop - start,), _UINT8)

    def fill_bytes(self, start: int, stop: int, byte: int) -> None:
        """Set the bytes from `start` to `stop`, in the order of the current stream."""
        with torch.no_grad():
            self._byte_range(start, stop).fill_(byte)

    def find_other(self, start: int, stop: int, byte: int) -> int | None:
        """Return the offset of the first byte that is not `byte`."""
        with torch.no_grad():
            differs = self._byte_range(start, stop) != byte
            if not bool(differs.any()):
                return None
            # argmax is the first of them; nonzero would take eight bytes for each.
            return start + int(differs.view(torch.uint8).argmax())

    def read_bytes(self, start: int, stop: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return a copy of the bytes on the host, in pinned memory if they come from a CUDA device."""
        with torch.no_grad(), _normal_mode():
            source = self._byte_range(start, stop)
            copy = torch.empty(source.shape, dtype=torch.uint8, pin_memory=source.is_cuda, device="cpu")
            copy.copy_(source)
            values: np.ndarray[Any, np.dtype[np.uint8]] = copy.numpy()
            return values

    def write_bytes(self, start: int, values: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        """Copy host bytes in from `start` on; the host waits."""
        with torch.no_grad(), _normal_mode():
            self._byte_range(start, start + values.nbytes).copy_(torch.from_numpy(values))

    def release(self) -> None:
        """Drop the storage; tensors made of it keep it alive."""
        self._viewers.clear()
        self._bases.clear()
        self._storage = self._bytes = None


def _device(device: Any) -> torch.device:
    return torch.get_default_device() if device is None else torch.device(device)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor, flat, sharing memory and version counter."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same elements as integers of the same size, for which there are kernels."""
    integers = _INTEGERS.get(tensor.element_size())
    return tensor if integers is None else tensor.view(integers)


def _may_overlap(source: torch.Tensor, target: torch.Tensor) -> bool:
    """Return whether the two share a storage and the bytes between their ends meet."""
    if source.untyped_storage().data_ptr() != target.untyped_storage().data_ptr():
        return False
    ranges = []
    for tensor in (source, target):
        if tensor.numel() == 0:
            return False
        last = sum((dim - 1) * stride for dim, stride in zip(tensor.shape, tensor.stride(), strict=True))
        ranges.append((tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()))
    (source_start, source_stop), (target_start, target_stop) = ranges
    return source_start < target_stop and target_start < source_stop


def _recast(root: torch.Tensor, dtype: DType) -> torch.Tensor:
    """Return a view of a root as `dtype`, of no elements: only its dtype, storage and version counter matter."""
    flat = root.as_strided((0,), (1,), 0)  # at 0, which is a multiple of every item size
    if flat.element_size() != dtype.itemsize:
        flat = flat.view(torch.uint8)
    return flat.view(dtype.torch)


def to_host(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the contents of a tensor as an array, of ml_dtypes' types too; a copy where they lie on a device."""
    dtype = as_dtype(tensor.dtype).require_numpy()
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if dtype.isbuiltin != 1:  # torch gives NumPy its own types only
        tensor = _as_integers(tensor)
    array: np.ndarray[Any, Any] = tensor.cpu().numpy()
    return array.view(dtype)
