"""Count what a piece of code writes and holds, by looking at each operation of torch."""

from __future__ import annotations

from typing import Any

import torch

from gpuarena.bench.harness import WrongDataError
from gpuarena.bench.memory import AllocationMeter

__all__ = ["TrafficMeter"]

_aten = torch.ops.aten
#: Operations that return a view, whatever they are given: the many that need no closer look. (`to` is none of them.)
_VIEWS = {
    _aten.narrow.default,
    _aten.slice.Tensor,
    _aten.select.int,
    _aten.view.default,
    _aten.view.dtype,
    _aten.permute.default,
    _aten.detach.default,
}
#: Operations that write in place, and the argument that tells how much.
_INTO = {_aten.copy_.default: 0, _aten.index_copy_.default: 3}
#: Operations that write a new tensor.
_NEW = {_aten.cat.default, _aten.clone.default, _aten.index_select.default}
#: Operations that make a tensor without writing keys or values to it. Zeros are memory, but no tokens.
_EMPTY = {
    _aten.empty.memory_format,
    _aten.new_empty.default,
    _aten.zeros.default,
    _aten.set_.source_Storage_storage_offset,  # how an arena looks at its buffer
}


class TrafficMeter(AllocationMeter):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Counts the elements of one dtype that are written while the mode is on, beside what `AllocationMeter` counts.

    Parameters
    ----------
    dtype : torch.dtype
        That of keys and values. Positions and lengths are of others, and not counted.

    Attributes
    ----------
    written : int
        Elements.

    Raises
    ------
    WrongDataError
        An operation that it knows nothing about, so that the count would be too low.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        self.written = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and count."""
        kwargs = kwargs or {}
        if func in _VIEWS:
            return func(*args, **kwargs)
        at = _INTO.get(func)
        if at is not None:
            if args[0].dtype == self._dtype:
                self.written += args[at].numel()
            return func(*args, **kwargs)  # which returns what it was given
        n_before = self.n_allocations
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if isinstance(result, torch.Tensor) and result.dtype == self._dtype and func not in _EMPTY:
            if func in _NEW:
                self.written += result.numel()
            elif self.n_allocations > n_before or func._schema.is_mutable:
                raise WrongDataError(f"{func} may write keys or values, and nobody has said how many")
        return result
