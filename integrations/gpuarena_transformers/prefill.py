"""How much memory a model's forward over a prompt needs besides its weights and its cache."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpuarena import Arena
from gpuarena_transformers.sizing import cache_argument, evaluating, input_device

__all__ = ["PrefillCost", "measure_prefill"]

#: Bytes a token squared below which a quadratic term is rounding of an allocator: one boolean mask takes 1.
_LEAST_QUADRATIC = 0.5


@dataclass(frozen=True)
class PrefillCost:
    """Bytes that a forward over n tokens takes at its peak, as the largest of many polynomials of n.

    >>> cost = PrefillCost((0, 100), (2000, 50), (0, 1), 128)  # 2000 n, or 100 + 50 n + n**2
    >>> cost.nbytes(1000), cost.nbytes(10_000)
    (2000000, 100500100)
    """

    constant: tuple[float, ...]
    linear: tuple[float, ...]
    quadratic: tuple[float, ...]
    n_tokens: int
    """The longest prompt that was tried."""
    is_aligned: bool = True
    """Whether the operations were the same for each length, so that each has a polynomial of its own. Otherwise
    there is one, of the peaks, which does not see what only dominates behind `n_tokens`."""

    def nbytes(self, n_tokens: int) -> int:
        """Return the bytes for a prompt of `n_tokens`."""
        curve = np.array(self.constant) + np.array(self.linear) * n_tokens
        return int(np.ceil((curve + np.array(self.quadratic) * float(n_tokens) ** 2).max()))


def measure_prefill(
    model: Any,
    make_cache: Callable[[int], Any],
    *,
    rows: int,
    longest: int | None,
    devices: Iterable[torch.device],
    windows: Iterable[int] = (),
) -> dict[torch.device, PrefillCost]:
    """Return what prompts take on each device, from three short ones that the model really reads.

    Bytes are followed operation by operation, and each operation's are continued as a polynomial of the length: what
    grows with its square is not hidden behind what is larger in a short prompt. On a CUDA device they are what the
    allocator says, kernels' own workspace included; elsewhere what the tensors take.

    Parameters
    ----------
    model : PreTrainedModel
        In the mode in which it is to be used. Logits are asked for the last token only, as `generate` does.
    make_cache : callable
        Returns a cache that holds so many tokens and takes its memory at once.
    rows : int
        Sequences at a time.
    longest : int, optional
        The model's maximum, which the prompts stay within.
    devices : iterable of torch.device
    windows : iterable of int
        Those of the layers, in tokens. Where a prompt can be longer than one, or there are several rows, the first row
        is padded, so that no mask is left out: a forward of any length then does the same operations.

    Notes
    -----
    Peak figures of ``torch.cuda`` are reset.
    """
    devices = tuple(devices)
    unit = 32 if all(device.type == "cpu" for device in devices) else 128
    if longest is not None:
        unit = max(1, min(unit, longest // 4))
    lengths = [unit, 2 * unit, 4 * unit]
    is_padded = rows > 1 or any(longest is None or window < longest for window in windows)
    # The first forward also makes what is made once: workspaces of libraries, and tables that a model keeps.
    runs = [_follow(model, make_cache(n), rows, n, devices, is_padded) for n in (unit, *lengths)]
    once = {device: max(runs[0][device].max() - runs[1][device].max(), 0) for device in devices}
    return {
        device: _fit([run[device] for run in runs[1:]], lengths, float(once[device])) for device in devices
    }


def _fit(curves: list[np.ndarray[Any, Any]], lengths: list[int], once: float) -> PrefillCost:
    is_aligned = len({len(curve) for curve in curves}) == 1
    if not is_aligned:
        curves = [np.array([curve.max()]) for curve in curves]
    small, middle, large = curves
    n = lengths[0]  # the others are 2 n and 4 n
    quadratic = (large - 3 * middle + 2 * small) / (6 * n * n)
    quadratic = np.where(quadratic < _LEAST_QUADRATIC, 0.0, quadratic)
    rest = [curve - quadratic * length**2 for curve, length in zip(curves, lengths, strict=True)]
    linear = np.maximum((rest[2] - rest[0]) / (3 * n), 0.0)
    constant = (
        np.max([part - linear * length for part, length in zip(rest, lengths, strict=True)], axis=0) + once
    )
    # Most operations are below others at every length.
    rows = np.unique(np.round(np.stack([constant, linear, quadratic], axis=1), 6), axis=0)
    kept = [row for row in rows if not np.any(np.all(rows >= row, axis=1) & np.any(rows > row, axis=1))]
    columns = [tuple(float(value) for value in column) for column in np.stack(kept, axis=1)]
    return PrefillCost(columns[0], columns[1], columns[2], lengths[-1], is_aligned)


def _follow(
    model: Any, cache: Any, rows: int, n_tokens: int, devices: tuple[torch.device, ...], is_padded: bool
) -> dict[torch.device, np.ndarray[Any, Any]]:
    """Return the bytes on each device after each operation of a forward, on top of those before."""
    # One token everywhere: experts get all of it or nothing, at each length alike.
    ids = torch.ones((rows, n_tokens), dtype=torch.long, device=input_device(model))
    options: dict[str, Any] = {"input_ids": ids, "use_cache": True, cache_argument(model): cache}
    if is_padded:
        options["attention_mask"] = torch.ones_like(ids)
        options["attention_mask"][0, 0] = 0
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = 1
    with evaluating(model), torch.no_grad(), _Follower(devices, cache.arenas) as follower:
        output = model(**options)
        del output
    return {device: np.array(curve or [0], dtype=float) for device, curve in follower.curves.items()}


class _Follower(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """Notes the bytes in use on each device after each operation."""

    def __init__(self, devices: tuple[torch.device, ...], arenas: Iterable[Arena]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._arenas = [range(arena.address, arena.address + arena.capacity) for arena in arenas]
        self.curves: dict[torch.device, list[int]] = {device: [] for device in devices}
        self._allocators = {device: _allocator(device) for device in devices}
        self._before = {
            device: allocator.memory_allocated(device)
            for device, allocator in self._allocators.items()
            if allocator is not None
        }
        self._live = dict.fromkeys(devices, 0)
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for device in self._before:
            self._allocators[device].reset_peak_memory_stats(device)
        for tensor in _tensors((args, kwargs)):
            self._note(tensor, is_new=False)
        output = func(*args, **(kwargs or {}))
        for tensor in _tensors(output):
            self._note(tensor, is_new=True)
        for device, curve in self.curves.items():
            if device in self._before:
                peak = self._allocators[device].max_memory_allocated(device)
                curve.append(peak - self._before[device])
            else:
                curve.append(self._live[device])
        return output

    def _note(self, tensor: torch.Tensor, *, is_new: bool) -> None:
        """Count the storage of a tensor unless it is known; what an operation is given was there before."""
        if tensor.device not in self._live or tensor.device in self._before:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        try:
            start, stop = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        except RuntimeError:  # a tensor that wraps others, which are seen themselves
            return
        # The storage of an arena may start below its address, and be looked at as several storages.
        is_arena = any(start < arena.stop and arena.start < stop for arena in self._arenas)
        nbytes, device = stop - start if is_new and not is_arena else 0, tensor.device
        self._live[device] += nbytes

        def forget(_: Any) -> None:
            del self._known[key]
            self._live[device] -= nbytes

        self._known[key] = weakref.ref(storage, forget)


def _tensors(tree: Any) -> list[torch.Tensor]:
    leaves = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    # Of a DTensor the part of this rank; of one that is still on its way, where it arrives.
    return [getattr(leaf, "_local_tensor", getattr(leaf, "elem", leaf)) for leaf in leaves]


def _allocator(device: torch.device) -> Any:
    """Return the module of torch that counts the bytes of a device's allocator, or None."""
    module = getattr(torch, device.type, None)
    return module if device.type != "cpu" and hasattr(module, "reset_peak_memory_stats") else None
