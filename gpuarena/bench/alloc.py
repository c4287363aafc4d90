"""What an allocation, a rollback and a frame cost, next to what people use instead.

Every figure is per operation, and each group is timed interleaved in one process, so its ratios mean something on
a noisy machine. Requests with new shapes and requests that repeat themselves are different groups: caches of all
kinds, ours included, make the second look good. On a GPU the pools of torch, CuPy and RMM are timed beside ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from gpuarena.bench._alloc_arrays import array_groups, numpy_groups
from gpuarena.bench._alloc_core import core_groups
from gpuarena.bench._collect import Maker, collect, on_device
from gpuarena.bench.device import Device, device_of
from gpuarena.bench.environment import environment
from gpuarena.bench.harness import WrongDataError

__all__ = ["WrongDataError", "run"]


def run(
    *,
    device: str | Device = "cpu",
    rounds: int = 21,
    quick: bool = False,
    on_group: Callable[[Any], object] = lambda group: None,
) -> dict[str, Any]:
    """Time all groups; return the figures with the machine and the versions, for JSON.

    Parameters
    ----------
    device : str or Device
        ``"cpu"``, ``"cuda"``, ``"cuda:1"`` or ``"fake-gpu"``. NumPy's groups run on the CPU only, the pools of other
        libraries on a GPU only; one that is missing there is named in the ``"not_measured"`` of its groups.
    rounds : int
        Samples of each variant.
    quick : bool
        Few samples and few regions, to see that it runs.
    on_group : callable, optional
        Called with each group when it is done.

    Raises
    ------
    WrongDataError
        A variant gave memory that it should not; on a GPU the result holds an ``"error"`` instead.
    BackendError
        There is no such device.
    """
    where = device_of(device)
    rounds = min(rounds, 3) if quick else rounds
    with on_device(where):
        found = collect(where, _makers(where, rounds, quick), on_group)
    return {
        "benchmark": "alloc",
        "environment": environment(where.name),
        "fake": where.is_fake,
        "rounds": rounds,
        **found,
    }


def _makers(device: Device, rounds: int, quick: bool) -> Iterator[Maker]:
    yield from array_groups(device, rounds)
    if not device.is_gpu:
        yield from numpy_groups(rounds)
    yield from core_groups(device, rounds, quick)
