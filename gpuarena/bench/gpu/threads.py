"""Two threads of the host that allocate at the same time: from one arena, and from two with streams of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from gpuarena.arena import Arena
from gpuarena.bench.gpu._check import Check, Probe
from gpuarena.bench.harness import Variant, group

__all__ = ["checks"]

#: Elements of a region, int32: one region an alignment.
_N_ELEMENTS = 64
#: A thread that waits longer for the other one gives up, in seconds.
_PATIENCE_S = 30.0


def checks() -> list[Check]:
    """Return the checks of this module."""
    return [Check("two threads that allocate", _threads, 10)]


def _threads(probe: Probe) -> None:
    device = probe.device
    n_checked, n_timed = (100, 300) if probe.quick else (2_000, 20_000)
    capacity = 2 * 256 * n_timed
    shared = Arena(capacity, backend="torch", device=device.name, name="shared")
    streams = [device.new_stream() for _ in range(2)]
    own: list[Arena] = []
    for stream in streams:
        with stream:  # where an arena is made its home stream is the current one
            own.append(Arena(capacity, backend="torch", device=device.name, name=f"own {len(own)}"))

    kept = _together([partial(_keep, shared, number, n_checked) for number in (1, 2)])
    device.synchronize()
    n_wrong = sum(int((torch.stack(arrays) != number).sum()) for number, arrays in enumerate(kept, 1))
    probe.figure("wrong numbers, one arena", n_wrong, f"of {2 * n_checked * _N_ELEMENTS}")
    probe.expect(n_wrong == 0, f"{n_wrong} numbers that two threads wrote to regions of one arena are wrong")
    n_regions = shared.stats.n_regions
    probe.expect(
        n_regions == 2 * n_checked,
        f"two threads allocated {n_checked} regions each, the arena has {n_regions}",
    )
    del kept

    n_wrong = sum(
        _together(
            [
                partial(_reuse, arena, stream, device.torch_device, n_checked)
                for arena, stream in zip(own, streams, strict=True)
            ]
        )
    )
    probe.figure("wrong numbers, two arenas", n_wrong, f"of {2 * n_checked * _N_ELEMENTS}")
    probe.expect(
        n_wrong == 0, f"{n_wrong} numbers are wrong in scopes of two arenas, each with a thread and a stream"
    )
    _time_allocations(probe, shared, own, n_timed)


def _keep(arena: Arena, number: int, n: int) -> list[torch.Tensor]:
    """Fill `n` new regions with a number, and return them."""
    arrays = []
    for _ in range(n):
        array = arena.empty((_N_ELEMENTS,), "int32")
        array.fill_(number)
        arrays.append(array)
    return arrays


def _reuse(arena: Arena, stream: AbstractContextManager[Any], where: torch.device, n: int) -> int:
    """Fill the same memory `n` times on a stream, a scope each, and return how many numbers were wrong."""
    with stream:
        wrong = torch.zeros((), dtype=torch.int64, device=where)
        for number in range(n):
            with arena.scope():
                array = arena.empty((_N_ELEMENTS,), "int32")
                array.fill_(number)
                wrong += (array != number).sum()
        return int(wrong)


def _allocate(arena: Arena, n: int) -> None:
    for _ in range(n):
        arena.empty((_N_ELEMENTS,), "int32")


def _together(bodies: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run each body in a thread of its own, all at the same time; return what they return, or raise what one raises."""
    barrier = threading.Barrier(len(bodies))

    def run(body: Callable[[], Any]) -> Any:
        barrier.wait(_PATIENCE_S)
        return body()

    with ThreadPoolExecutor(len(bodies)) as pool:
        return [future.result() for future in [pool.submit(run, body) for body in bodies]]


def _time_allocations(probe: Probe, shared: Arena, own: Sequence[Arena], n: int) -> None:
    def reset() -> None:
        for arena in (shared, *own):
            arena.reset()

    variants = {
        "one thread": [partial(_allocate, shared, 2 * n)],
        "two threads, one arena": [partial(_allocate, shared, n)] * 2,
        "two threads, two arenas": [partial(_allocate, arena, n) for arena in own],
    }
    found = group(
        "an allocation of 256 bytes, by threads",
        {name: Variant(partial(_together, bodies), 2 * n, ready=reset) for name, bodies in variants.items()},
        "one thread",
        rounds=3 if probe.quick else 9,
        synchronize=probe.device.synchronize,
    )
    probe.groups.append(found)
    for name, row in found["rows"].items():
        probe.figure(f"allocations, {name}", 1 / row["median_s"], "a second")
