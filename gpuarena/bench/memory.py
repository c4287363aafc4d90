"""Count the bytes that torch allocates inside a piece of code, on any device."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["AllocationMeter", "meter_updates"]


class AllocationMeter(TorchDispatchMode):
    """Counts every new storage that an operation returns while the mode is on.

    Attributes
    ----------
    allocated_nbytes, n_allocations : int
        Bytes and number of new storages.
    peak_nbytes : int
        Most of those bytes alive at once, above `held_nbytes`.
    held_nbytes : int
        Bytes counted as alive beforehand.

    Notes
    -----
    What a kernel allocates and frees inside itself is not seen.
    """

    def __init__(self, held: Any = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.allocated_nbytes = 0
        self.n_allocations = 0
        self._seen: set[int] = set()
        self._live = 0
        self.held_nbytes = 0
        for tensor in held:
            self._track(tensor)
        self.held_nbytes = self._live
        self.peak_nbytes = self._live

    def _track(self, tensor: torch.Tensor) -> bool:
        """Note a tensor's storage; return whether it is new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen or storage.nbytes() == 0:
            return False
        self._seen.add(key)
        nbytes = storage.nbytes()
        self._live += nbytes
        weakref.finalize(storage, self._free, key, nbytes)
        return True

    def _free(self, key: int, nbytes: int) -> None:
        self._seen.discard(key)
        self._live -= nbytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and look at the storages that come in and go out."""
        inputs = {
            leaf.untyped_storage()._cdata
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if (
                isinstance(leaf, torch.Tensor)
                and leaf.untyped_storage()._cdata not in inputs
                and self._track(leaf)
            ):
                self.allocated_nbytes += leaf.untyped_storage().nbytes()
                self.n_allocations += 1
        self.peak_nbytes = max(self.peak_nbytes, self._live)
        return result


@contextlib.contextmanager
def meter_updates(cache: Any) -> Iterator[AllocationMeter]:
    """Count what `cache.update` and `cache.reorder_cache` allocate, and nothing else of the model.

    >>> # with meter_updates(cache) as meter: model(...); meter.allocated_nbytes
    """
    held = [
        tensor
        for layer in cache.layers
        for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None))
        if tensor is not None
    ]
    meter = AllocationMeter(held)
    del held
    names = ("update", "reorder_cache")

    def wrap(method: Any) -> Any:
        def metered(*args: Any, **kwargs: Any) -> Any:
            with meter:
                return method(*args, **kwargs)

        return metered

    for name in names:
        setattr(cache, name, wrap(getattr(cache, name)))
    try:
        yield meter
    finally:
        for name in names:
            delattr(cache, name)
