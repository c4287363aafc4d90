"""Requests that fragment a caching allocator: replayed by torch's own, by a model of its rules, and by an arena.

The scenarios are those of E. Yang, "When does fragmentation occur in the CUDA caching allocator?" (PyTorch developers'
log, 2026-06-01). ``python -m gpuarena.bench.fragmentation cuda`` replays them with torch's tensors and prints what was
reserved; run it in a process that has done nothing else, since an allocator that is warm answers from what it has.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gpuarena.arena import Arena
from gpuarena.measuring import measure

__all__ = [
    "SCENARIOS",
    "ModelledAllocator",
    "Scenario",
    "needed_by_arena",
    "replay_in_arena",
    "replay_in_torch",
]

MIB = 1 << 20


@dataclass(frozen=True)
class Scenario:
    """Requests in order.

    Attributes
    ----------
    title : str
    events : tuple of (str, int or None)
        A name and the bytes that are asked for it, or None where they are given back.
    long_lived : frozenset of str
        What stays while others around it go. An arena that is told so keeps it on its high end; one that is not
        keeps everything below it that was given back.
    """

    title: str
    events: tuple[tuple[str, int | None], ...]
    long_lived: frozenset[str] = frozenset()

    @property
    def live_nbytes(self) -> int:
        """The most bytes that are wanted at a time: no allocator can do with less."""
        live: dict[str, int] = {}
        most = 0
        for name, nbytes in self.events:
            if nbytes is None:
                del live[name]
            else:
                live[name] = nbytes
                most = max(most, sum(live.values()))
        return most


def _take(kind: str, n: int, mib: float) -> tuple[tuple[str, int | None], ...]:
    return tuple((f"{kind}{number}", int(mib * MIB)) for number in range(n))


def _give(kind: str, *numbers: int) -> tuple[tuple[str, int | None], ...]:
    return tuple((f"{kind}{number}", None) for number in numbers)


SCENARIOS = (
    Scenario(
        "8 x 16 MiB, then 4 x 32 MiB",
        (*_take("small", 8, 16), *_give("small", *range(8)), *_take("large", 4, 32)),
    ),
    Scenario(
        "4 x 32 MiB, then 8 x 16 MiB",
        (*_take("large", 4, 32), *_give("large", *range(4)), *_take("small", 8, 16)),
    ),
    Scenario(
        "4 x 16 MiB, two of which stay, then 32 MiB",
        (
            *_take("block", 4, 16),
            *_give("block", 0, 2),
            *_take("big", 1, 32),
            *_give("big", 0),
            *_give("block", 1, 3),
            *_take("again", 1, 32),
        ),
        long_lived=frozenset({"block1", "block3"}),
    ),
    Scenario("2 MiB, then 0.5 MiB", (*_take("one", 1, 2), *_give("one", 0), *_take("less", 1, 0.5))),
)


def replay_in_torch(scenario: Scenario, device: Any) -> int:
    """Return the bytes that torch's allocator has reserved in the end, more than before.

    Parameters
    ----------
    device : gpuarena.bench.device.Device
        One that counts its memory.
    """
    import torch

    device.forget_peak()
    before = device.memory().reserved_nbytes
    live: dict[str, torch.Tensor] = {}
    for name, nbytes in scenario.events:
        if nbytes is None:
            del live[name]
        else:
            live[name] = torch.empty(nbytes, dtype=torch.uint8, device=device.torch_device)
    reserved: int = device.memory().reserved_nbytes - before
    return reserved


def replay_in_arena(scenario: Scenario, arena: Arena, *, told: bool) -> None:
    """Make the requests of an arena.

    It has no way to give back a region in the middle: memory comes back by a rollback, when all that was allocated
    later on the same end is given back too. `told` puts what is long-lived on the other end.

    Raises
    ------
    OutOfMemoryError
        They do not fit.
    """
    ends: dict[str, list[tuple[str, Any]]] = {"low": [], "high": []}  # names and the checkpoints below them
    given_back = set()
    for name, nbytes in scenario.events:
        if nbytes is not None:
            side = "high" if told and name in scenario.long_lived else "low"
            ends[side].append((name, arena.checkpoint(side)))
            arena.alloc(nbytes, "uint8", label=name, side=side)
            continue
        given_back.add(name)
        for end in ends.values():
            below = None
            while end and end[-1][0] in given_back:
                below = end.pop()[1]
            if below is not None:
                arena.rollback(below)


def needed_by_arena(scenario: Scenario, *, told: bool) -> int:
    """Return the capacity in bytes that `replay_in_arena` needs.

    >>> needed_by_arena(SCENARIOS[0], told=True) // 2**20  # MiB
    128
    """
    with measure(limit=sum(nbytes or 0 for _, nbytes in scenario.events) + MIB) as m:
        replay_in_arena(scenario, m.arena, told=told)
    return m.capacity


class ModelledAllocator:
    """What torch's caching allocator reserves by the rules that it documents; nothing is allocated.

    Sizes are rounded up to 512 bytes. Up to 1 MiB they come from segments of 2 MiB, above that from others: of
    20 MiB, or from 10 MiB on as large as the request, rounded up to 2 MiB. The smallest free block that is large
    enough is taken, and what is left over is split off: always from small ones, otherwise if it is more than 1 MiB.
    A block that is freed merges with free neighbours of its segment. A segment never goes. With `expandable` there
    is one segment of a kind, which grows by pages of 2 or of 20 MiB at its end, and everything left over is split off.

    The constants are those of c10/core/AllocatorConfig.h, torch 2.11 to 2.15; sizes are not what
    ``max_split_size_mb`` and the like make of them.

    >>> allocator = ModelledAllocator()
    >>> allocator.replay(SCENARIOS[0]) // 2**20  # MiB
    256
    """

    def __init__(self, *, expandable: bool = False) -> None:
        self.expandable = expandable
        # is small -> segments -> [bytes, name or None if free] of the blocks, by address
        self._segments: dict[bool, list[list[list[Any]]]] = {True: [], False: []}

    @property
    def reserved_nbytes(self) -> int:
        """Bytes of all segments."""
        kinds = self._segments.values()
        return sum(block[0] for segments in kinds for segment in segments for block in segment)

    def replay(self, scenario: Scenario) -> int:
        """Make the requests; return the bytes that are reserved then."""
        for name, nbytes in scenario.events:
            if nbytes is None:
                self.give(name)
            else:
                self.take(name, nbytes)
        return self.reserved_nbytes

    def take(self, name: str, nbytes: int) -> None:
        """Allocate `nbytes` under a name."""
        nbytes = _round_up(nbytes, 512)
        is_small = nbytes <= MIB
        fitting = [spot for spot in self._free(is_small) if spot[0] >= nbytes]
        if not fitting:
            self._grow(is_small, nbytes)
            fitting = [spot for spot in self._free(is_small) if spot[0] >= nbytes]
        _, _, segment, number = min(fitting, key=lambda spot: spot[:2])
        left = segment[number][0] - nbytes
        is_split = left > 0 if is_small or self.expandable else left > MIB
        segment[number : number + 1] = [[nbytes, name], [left, None]] if is_split else [[nbytes + left, name]]

    def give(self, name: str) -> None:
        """Free what was allocated under a name."""
        for segments in self._segments.values():
            for segment in segments:
                for block in segment:
                    if block[1] == name:
                        block[1] = None
                segment[:] = _merged(segment)

    def _free(self, is_small: bool) -> Iterator[tuple[int, int, list[list[Any]], int]]:
        """Yield size, order, segment and number of the free blocks."""
        order = 0
        for segment in self._segments[is_small]:
            for number, (nbytes, name) in enumerate(segment):
                order += 1
                if name is None:
                    yield nbytes, order, segment, number

    def _grow(self, is_small: bool, nbytes: int) -> None:
        segments = self._segments[is_small]
        if not self.expandable:
            large = 20 * MIB if nbytes < 10 * MIB else _round_up(nbytes, 2 * MIB)
            segments.append([[2 * MIB if is_small else large, None]])
            return
        if not segments:
            segments.append([])
        segment = segments[0]
        at_end = segment[-1][0] if segment and segment[-1][1] is None else 0
        segment.append([_round_up(nbytes - at_end, (2 if is_small else 20) * MIB), None])
        segment[:] = _merged(segment)


def _round_up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


def _merged(segment: list[list[Any]]) -> list[list[Any]]:
    merged: list[list[Any]] = []
    for nbytes, name in segment:
        if merged and name is None and merged[-1][1] is None:
            merged[-1][0] += nbytes
        else:
            merged.append([nbytes, name])
    return merged


def main(device_name: str) -> None:
    """Print what torch's allocator reserves for each scenario, as JSON, and whether its segments are expandable."""
    from gpuarena.bench.device import device_of

    device = device_of(device_name)
    reserved = {scenario.title: replay_in_torch(scenario, device) for scenario in SCENARIOS}
    print(json.dumps({"reserved_nbytes": reserved, "expandable": device.has_expandable_segments()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
