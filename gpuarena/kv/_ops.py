"""The few array operations of a cache, in torch and in NumPy or CuPy.

Buffers are ``[rows, kv_heads, tokens, dim]``. Every function writes in place or returns a view; none allocates
array memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from gpuarena.dtypes import DType
from gpuarena.errors import ArgumentError, ArgumentTypeError, AutogradError, DeviceMismatchError, ShapeError

#: index_copy_ writes one token faster than narrow + copy_ (0.85 of the time, one token, CPU), and a long
#: prompt much slower, since it copies row by row.
_INDEX_COPY_MAX_TOKENS = 4


class Ops(Protocol):
    """What a cache needs of an array library."""

    def reach(self, n_slots: int) -> None:
        """Get ready to write to slots up to `n_slots`."""

    def dtype(self, dtype: DType) -> Any:
        """Return the library's own dtype object."""

    def agree(self, keys: Any, values: Any, dtypes: tuple[Any, Any]) -> bool:
        """Return whether `check` and a comparison of dtypes would find nothing wrong; cheap."""

    def check(self, array: Any, what: str) -> None:
        """Raise unless `array` is one of the library on the right device, and safe to write from."""

    def write(self, k_buffer: Any, v_buffer: Any, start: int, keys: Any, values: Any) -> None:
        """Write ``[rows, kv_heads, n, dim]`` to the tokens from `start` on."""

    def write_at(self, k_buffer: Any, v_buffer: Any, positions: Any, keys: Any, values: Any) -> None:
        """Write ``[rows, kv_heads, n, dim]`` to the tokens at `positions`, ``[n]``."""

    def check_positions(self, positions: Any, n_new: int, n_slots: int) -> None:
        """Raise unless these are `n_new` integers on the right device, below `n_slots` where the host can tell."""

    def write_pair(self, buffer: Any, start: int, pair: Any) -> None:
        """Write ``[2, rows, kv_heads, n, dim]`` to the tokens from `start` on of a buffer of pairs."""

    def tokens(self, buffer: Any, start: int, stop: int) -> Any:
        """Return the view of tokens `start` to `stop`, of the last dimension but one."""

    def viewer(self, buffer: Any) -> Callable[[int, int], Any]:
        """Return a quick `tokens` of one buffer; it keeps the buffer alive."""

    def is_compiling(self) -> bool:
        """Return whether this call is being traced by a compiler."""

    def planes(self, buffer: Any, n_planes: int) -> tuple[Any, ...]:
        """Return the `n_planes` views along the first dimension, or the buffer itself if it is one."""

    def part(self, records: Any, offset: int, shape: tuple[int, ...], dtype: DType) -> Any:
        """Return ``[batch, kv_heads, tokens, dim]`` of ``[tokens, bytes]``: `shape` without the tokens at byte `offset`."""

    def mask(self, shown: list[range], start: int, stop: int, window: int | None, sinks: int) -> Any:
        """Return which of the tokens `shown` the queries of tokens `start` to `stop` may see, ``[queries, tokens]``."""

    def mask_at(self, positions: Any, n_slots: int, window: int | None, sinks: int) -> Any:
        """Return which of the first `n_slots` slots queries at `positions` may see, ``[queries, n_slots]``."""

    def tokens_in(self, scratch: Any, buffer: Any, n_rows: int) -> int:
        """Return how many tokens of `n_rows` rows of `buffer` the flat `scratch` holds, at least 1."""

    def clear(self, buffer: Any, start: int, stop: int, first_row: int) -> None:
        """Put 0 in the tokens `start` to `stop` of the rows from `first_row` on."""

    def move(self, buffer: Any, source: int, target: int, n_tokens: int) -> None:
        """Copy `n_tokens` tokens from slot `source` on to the slots from `target` on, which are lower; they may overlap."""

    def apart(self, array: Any, buffer: Any) -> Any:
        """Return `array`, or a copy of it if it may lie in the memory of `buffer`."""

    def rows(self, buffer: Any, n_rows: int) -> Any:
        """Return the view of the first rows."""

    def row_index(self, rows: Any, n_rows: int) -> tuple[Any, int]:
        """Return row numbers as the library's index array, checked against `n_rows`, and how many there are.

        The array is the same one each time.
        """

    def gather_rows(self, source: Any, rows: Any, scratch: Any, target: Any) -> None:
        """Write ``source[rows]`` to `target`, which may overlap it, by way of the flat `scratch`."""


class TorchOps:
    """PyTorch."""

    def __init__(self, arena: Any, batch: int) -> None:
        import torch

        self._torch = torch
        self._device = torch.device(arena.device)
        self._tensor = torch.Tensor
        # One index for all layers of a step; a view of this is made when the position changes.
        with torch.inference_mode(False):
            self._positions = torch.arange(0, device=self._device)
            self._rows = torch.empty(0, dtype=torch.int64, device=self._device)
        self._batch = batch
        self._strided = torch.strided
        self._is_compiling: Callable[[], bool] = torch.compiler.is_compiling
        self._arena_range = arena.address, arena.address + arena.capacity
        self._index: Any = None
        self._index_key = (-1, -1)

    def reach(self, n_slots: int) -> None:
        if self._batch > len(self._rows):
            with self._torch.inference_mode(False):
                self._rows = self._torch.empty(self._batch, dtype=self._torch.int64, device=self._device)
        if n_slots > len(self._positions):
            with self._torch.inference_mode(False):
                self._positions = self._torch.arange(n_slots, device=self._device)
            self._index_key = (-1, -1)

    def dtype(self, dtype: DType) -> Any:
        return dtype.torch

    def agree(self, keys: Any, values: Any, dtypes: tuple[Any, Any]) -> bool:
        return (
            keys.dtype is dtypes[0]
            and values.dtype is dtypes[1]
            and keys.device == self._device
            and values.device == self._device
            and keys.layout is self._strided
            and values.layout is self._strided
            and not ((keys.requires_grad or values.requires_grad) and self._torch.is_grad_enabled())
        )

    def check(self, array: Any, what: str) -> None:
        if not isinstance(array, self._tensor):
            raise ArgumentTypeError(
                f"{what} must be a torch.Tensor, not {type(array).__name__}{_other_library(array, 'torch')}"
            )
        if array.layout is not self._strided or array.is_nested:
            raise ArgumentTypeError(
                f"{what} are {_layout_of(array)}; to_dense() gives a tensor that can be stored"
            )
        if array.device != self._device:
            raise DeviceMismatchError(
                f"{what} are on {array.device}, the cache is on {self._device}; move one of them"
            )
        if array.requires_grad and self._torch.is_grad_enabled():
            raise AutogradError(
                f"{what} require grad: a cache that is written in place cannot be differentiated through; "
                f"run the model under torch.no_grad() or torch.inference_mode(), or append {what}.detach()"
            )

    def write(self, k_buffer: Any, v_buffer: Any, start: int, keys: Any, values: Any) -> None:
        n_tokens = keys.shape[2]
        if keys.requires_grad or values.requires_grad:  # grad mode is off, the check saw to that
            keys, values = keys.detach(), values.detach()
        keys, values = self._apart_from(k_buffer, v_buffer, keys, values)
        if 0 < n_tokens <= _INDEX_COPY_MAX_TOKENS:
            index = self._index_of(start, n_tokens)
            try:
                k_buffer.index_copy_(2, index, keys)
                v_buffer.index_copy_(2, index, values)
                return
            except NotImplementedError:
                pass  # of float8, and of the wide unsigned integers
        k_buffer.narrow(2, start, n_tokens).copy_(keys)
        v_buffer.narrow(2, start, n_tokens).copy_(values)

    def write_at(self, k_buffer: Any, v_buffer: Any, positions: Any, keys: Any, values: Any) -> None:
        keys, values = self._apart_from(k_buffer, v_buffer, keys, values)
        k_buffer.index_copy_(2, positions, keys)
        v_buffer.index_copy_(2, positions, values)

    def is_compiling(self) -> bool:
        return bool(self._is_compiling())

    def check_positions(self, positions: Any, n_new: int, n_slots: int) -> None:
        torch = self._torch
        if not isinstance(positions, self._tensor) or positions.dtype is not torch.int64:
            what = getattr(positions, "dtype", type(positions).__name__)
            raise ArgumentTypeError(f"positions must be a torch.Tensor of int64, not {what}")
        if positions.device != self._device:
            raise DeviceMismatchError(f"positions are on {positions.device}, the cache is on {self._device}")
        if positions.shape != (n_new,):
            raise _positions_error(tuple(positions.shape), n_new)
        # Compiled code and a GPU do not wait for the numbers; there index_copy_ itself refuses bad ones.
        if self._device.type == "cpu" and not torch.compiler.is_compiling():
            _check_range(positions.tolist(), n_slots)

    def write_pair(self, buffer: Any, start: int, pair: Any) -> None:
        if pair.requires_grad:  # grad mode is off, the check saw to that
            pair = pair.detach()
        if self._may_overlap(pair, pair):
            pair = self.apart(pair, buffer)
        n_tokens = pair.shape[3]
        if 0 < n_tokens <= _INDEX_COPY_MAX_TOKENS:
            try:
                buffer.index_copy_(3, self._index_of(start, n_tokens), pair)
                return
            except NotImplementedError:
                pass  # as in write
        buffer.narrow(3, start, n_tokens).copy_(pair)

    def _index_of(self, start: int, n_tokens: int) -> Any:
        if self._index_key != (start, n_tokens):
            self._index = self._positions.narrow(0, start, n_tokens)
            self._index_key = (start, n_tokens)
        return self._index

    def tokens(self, buffer: Any, start: int, stop: int) -> Any:
        return buffer.narrow(-2, start, stop - start)

    def viewer(self, buffer: Any) -> Callable[[int, int], Any]:
        rows, heads, _, dim = buffer.shape
        strides, begin, view = buffer.stride(), buffer.storage_offset(), buffer.as_strided
        step = strides[2]

        # One dispatch, where narrow takes two: a third of the time of an append.
        def tokens(start: int, stop: int) -> Any:
            return view((rows, heads, stop - start, dim), strides, begin + start * step)

        return tokens

    def planes(self, buffer: Any, n_planes: int) -> tuple[Any, ...]:
        planes: tuple[Any, ...] = buffer.unbind(0) if n_planes > 1 else (buffer,)
        return planes

    def part(self, records: Any, offset: int, shape: tuple[int, ...], dtype: DType) -> Any:
        nbytes = math.prod(shape) * dtype.itemsize
        with self._torch.inference_mode(
            False
        ):  # else it would be a tensor that can be written in that mode only
            numbers = records.narrow(1, offset, nbytes).view(dtype.torch)
            return numbers.view(len(records), *shape).permute(1, 2, 0, 3)

    def mask(self, shown: list[range], start: int, stop: int, window: int | None, sinks: int) -> Any:
        torch = self._torch
        arange = torch.arange
        keys = torch.cat([arange(run.start, run.stop, device=self._device) for run in shown or [range(0)]])
        return _may_see(arange(start, stop, device=self._device)[:, None], keys[None], window, sinks)

    def mask_at(self, positions: Any, n_slots: int, window: int | None, sinks: int) -> Any:
        slots = self._torch.arange(n_slots, device=self._device)
        return _may_see(positions[:, None], slots[None], window, sinks)

    def tokens_in(self, scratch: Any, buffer: Any, n_rows: int) -> int:
        return _tokens_in(scratch.numel(), buffer.element_size(), buffer.shape, n_rows)

    def clear(self, buffer: Any, start: int, stop: int, first_row: int) -> None:
        if stop > start and first_row < len(buffer):
            buffer.narrow(2, start, stop - start).narrow(0, first_row, len(buffer) - first_row).zero_()

    def move(self, buffer: Any, source: int, target: int, n_tokens: int) -> None:
        # copy_ of overlapping memory is undefined, so no more at once than the distance.
        for first in range(0, n_tokens, source - target):
            n = min(source - target, n_tokens - first)
            buffer.narrow(2, target + first, n).copy_(buffer.narrow(2, source + first, n))

    def _may_overlap(self, keys: Any, values: Any) -> bool:
        """Return whether one lies in the arena, and so perhaps in what is written; never in compiled code."""
        if self._is_compiling():
            return False
        low, high = self._arena_range
        return bool(low <= keys.data_ptr() < high or low <= values.data_ptr() < high)

    def _apart_from(self, k_buffer: Any, v_buffer: Any, keys: Any, values: Any) -> tuple[Any, Any]:
        """Return keys and values, or copies of those that lie in a buffer, such as what append() returned."""
        if self._may_overlap(keys, values):
            keys = self.apart(self.apart(keys, k_buffer), v_buffer)
            values = self.apart(self.apart(values, k_buffer), v_buffer)
        return keys, values

    def apart(self, array: Any, buffer: Any) -> Any:
        first, low = array.data_ptr(), buffer.data_ptr()
        overlaps = first < low + _span(buffer) and low < first + _span(array)
        return array.clone() if overlaps else array

    def rows(self, buffer: Any, n_rows: int) -> Any:
        return buffer.narrow(0, 0, n_rows)

    def row_index(self, rows: Any, n_rows: int) -> tuple[Any, int]:
        torch = self._torch
        on_host = not isinstance(rows, self._tensor)
        if on_host:
            try:
                if isinstance(rows, np.ndarray):
                    rows = np.ascontiguousarray(rows)  # torch knows no steps backwards
                dtype = torch.int64 if hasattr(rows, "__len__") and len(rows) == 0 else None
                rows = torch.as_tensor(rows, dtype=dtype, device="cpu")
            except (TypeError, ValueError, RuntimeError) as error:
                raise ArgumentTypeError(f"rows must be row numbers: {error}") from error
        if rows.ndim != 1 or rows.is_floating_point() or rows.is_complex() or rows.dtype == torch.bool:
            raise ArgumentTypeError(
                f"rows must be a 1-D list of integers, not {rows.dtype}{list(rows.shape)}"
            )
        if rows.device.type != "cpu" and rows.device != self._device:
            raise DeviceMismatchError(f"rows are on {rows.device}, the cache is on {self._device}")
        # Looking at numbers on a GPU would wait for it; there index_select itself refuses bad ones.
        # A list, because min() allocates its result, and does not know every unsigned type.
        if rows.device.type == "cpu" and not all(0 <= row < n_rows for row in rows.tolist()):
            raise ShapeError(f"rows {rows.tolist()}: the cache holds rows 0 to {n_rows - 1}")
        if len(rows) > len(self._rows):
            return rows, len(rows)  # the caller refuses so many
        return self._rows.narrow(0, 0, len(rows)).copy_(rows), len(rows)

    def gather_rows(self, source: Any, rows: Any, scratch: Any, target: Any) -> None:
        nbytes = target.numel() * target.element_size()
        staged = scratch.narrow(0, 0, nbytes).view(target.dtype).view(target.shape)
        self._torch.index_select(source, 0, rows, out=staged)
        target.copy_(staged)


class NumpyOps:
    """NumPy and CuPy, whose functions have the same names."""

    def __init__(self, arena: Any) -> None:
        self._is_host = arena.backend == "host"
        self._library: Any = np
        if not self._is_host:
            import cupy

            self._library = cupy
        self._array = self._library.ndarray
        self._device = arena.device

    def reach(self, n_slots: int) -> None:
        return None

    def dtype(self, dtype: DType) -> Any:
        return dtype.require_numpy()

    def agree(self, keys: Any, values: Any, dtypes: tuple[Any, Any]) -> bool:
        return False  # check() costs no more here

    def check(self, array: Any, what: str) -> None:
        if not isinstance(array, self._array):
            wanted = f"{self._array.__module__}.{self._array.__name__}"
            backend = "host" if self._is_host else "cupy"
            raise ArgumentTypeError(
                f"{what} must be a {wanted}, not {type(array).__name__}{_other_library(array, backend)}"
            )
        if not self._is_host and f"cuda:{array.device.id}" != self._device:
            raise DeviceMismatchError(f"{what} are on cuda:{array.device.id}, the cache is on {self._device}")

    def write(self, k_buffer: Any, v_buffer: Any, start: int, keys: Any, values: Any) -> None:
        # NumPy itself sees an overlap of one array with its target, but values may lie where keys go.
        values = self.apart(values, k_buffer)
        if not self._is_host:  # CuPy copies runs by memcpy, where they may not overlap
            keys, values = self.apart(keys, k_buffer), self.apart(values, v_buffer)
        stop = start + keys.shape[2]
        k_buffer[:, :, start:stop] = keys
        v_buffer[:, :, start:stop] = values

    def write_at(self, k_buffer: Any, v_buffer: Any, positions: Any, keys: Any, values: Any) -> None:
        keys, values = self.apart(keys, v_buffer), self.apart(values, k_buffer)
        k_buffer[:, :, positions] = keys
        v_buffer[:, :, positions] = values

    def is_compiling(self) -> bool:
        return False

    def check_positions(self, positions: Any, n_new: int, n_slots: int) -> None:
        if not isinstance(positions, self._array) or positions.dtype.kind not in "iu":
            what = getattr(positions, "dtype", type(positions).__name__)
            raise ArgumentTypeError(f"positions must be an array of integers, not {what}")
        if positions.shape != (n_new,):
            raise _positions_error(positions.shape, n_new)
        if self._is_host:
            _check_range(positions.tolist(), n_slots)

    def write_pair(self, buffer: Any, start: int, pair: Any) -> None:
        buffer[:, :, :, start : start + pair.shape[3]] = pair

    def tokens(self, buffer: Any, start: int, stop: int) -> Any:
        return buffer[..., start:stop, :]

    def viewer(self, buffer: Any) -> Callable[[int, int], Any]:
        return lambda start, stop: buffer[:, :, start:stop]

    def planes(self, buffer: Any, n_planes: int) -> tuple[Any, ...]:
        return (buffer[0], buffer[1]) if n_planes > 1 else (buffer,)

    def part(self, records: Any, offset: int, shape: tuple[int, ...], dtype: DType) -> Any:
        nbytes = math.prod(shape) * dtype.itemsize
        numbers = records[:, offset : offset + nbytes].view(dtype.require_numpy())
        return numbers.reshape(len(records), *shape).transpose(1, 2, 0, 3)

    def mask(self, shown: list[range], start: int, stop: int, window: int | None, sinks: int) -> Any:
        library = self._library
        keys = library.concatenate([library.arange(run.start, run.stop) for run in shown or [range(0)]])
        return _may_see(library.arange(start, stop)[:, None], keys[None], window, sinks)

    def mask_at(self, positions: Any, n_slots: int, window: int | None, sinks: int) -> Any:
        return _may_see(positions[:, None], self._library.arange(n_slots)[None], window, sinks)

    def tokens_in(self, scratch: Any, buffer: Any, n_rows: int) -> int:
        return _tokens_in(scratch.nbytes, buffer.itemsize, buffer.shape, n_rows)

    def clear(self, buffer: Any, start: int, stop: int, first_row: int) -> None:
        buffer[first_row:, :, start:stop] = 0

    def move(self, buffer: Any, source: int, target: int, n_tokens: int) -> None:
        for first in range(
            0, n_tokens, source - target
        ):  # NumPy would allocate a copy of all, CuPy does not care
            n = min(source - target, n_tokens - first)
            buffer[:, :, target + first : target + first + n] = buffer[
                :, :, source + first : source + first + n
            ]

    def apart(self, array: Any, buffer: Any) -> Any:
        return array.copy() if self._library.may_share_memory(array, buffer) else array

    def rows(self, buffer: Any, n_rows: int) -> Any:
        return buffer[:n_rows]

    def row_index(self, rows: Any, n_rows: int) -> tuple[Any, int]:
        try:
            index = np.asarray(rows.get() if isinstance(rows, self._array) and not self._is_host else rows)
        except (ValueError, TypeError, RuntimeError) as error:  # lists of different lengths
            raise ArgumentTypeError(f"rows must be row numbers: {error}") from error
        if index.ndim != 1 or (index.size and index.dtype.kind not in "iu"):
            raise ArgumentTypeError(
                f"rows must be a 1-D list of integers, not {index.dtype}{list(index.shape)}"
            )
        if index.size and (index.min() < 0 or index.max() >= n_rows):
            raise ShapeError(f"rows {index.tolist()}: the cache holds rows 0 to {n_rows - 1}")
        return index.astype(np.int64), len(index)

    def gather_rows(self, source: Any, rows: Any, scratch: Any, target: Any) -> None:
        staged = scratch[: target.nbytes].view(target.dtype).reshape(target.shape)
        for position, row in enumerate(rows):
            staged[position] = source[int(row)]
        target[...] = staged


def _layout_of(tensor: Any) -> str:
    return "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")


def _may_see(queries: Any, keys: Any, window: int | None, sinks: int) -> Any:
    """Return a bool array of which keys each query may see, both given by their positions."""
    seen = keys <= queries
    if window is not None:
        seen = seen & ((keys > queries - window) | (keys < sinks))
    return seen


def _span(tensor: Any) -> int:
    """Return the bytes from the first element of a tensor to the end of its last."""
    if not tensor.numel():
        return 0
    steps = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(1 + steps) * int(tensor.element_size())


def _positions_error(shape: tuple[int, ...], n_new: int) -> ShapeError:
    return ShapeError(f"positions are {list(shape)}, for {n_new} tokens they must be [{n_new}]", shape=shape)


def _check_range(positions: list[int], n_slots: int) -> None:
    wrong = [position for position in positions if not 0 <= position < n_slots]
    if wrong:
        raise ArgumentError(f"positions {wrong}: there are slots 0 to {n_slots - 1}; advance() makes room")


def _tokens_in(nbytes: int, itemsize: int, shape: Any, n_rows: int) -> int:
    _, kv_heads, _, dim = map(int, shape)
    return max(1, nbytes // max(1, n_rows * kv_heads * dim * itemsize))


def ops_for(arena: Any, batch: int) -> Ops:
    """Return the operations for an arena's backend."""
    return TorchOps(arena, batch) if arena.backend == "torch" else NumpyOps(arena)


def _other_library(array: Any, backend: str) -> str:
    """Return what to do about an array of another library than that of the arena; an empty text for other things."""
    libraries = {"torch": "torch", "numpy": "host", "cupy": "cupy"}
    found = next((libraries[k.__module__] for k in type(array).__mro__ if k.__module__ in libraries), None)
    if found is None:
        return ""
    return f": the arena is of backend={backend!r}; make it with backend={found!r}, or convert the array"
