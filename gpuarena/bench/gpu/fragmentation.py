"""What torch's caching allocator reserves for requests that fragment it, and what an arena needs for the same ones."""

from __future__ import annotations

import json
import sys
from typing import Any

from gpuarena.arena import Arena
from gpuarena.bench.fragmentation import (
    SCENARIOS,
    ModelledAllocator,
    Scenario,
    needed_by_arena,
    replay_in_arena,
)
from gpuarena.bench.gpu._check import Check, NotMeasuredError, Probe
from gpuarena.bench.gpu._child import run_child
from gpuarena.errors import OutOfMemoryError

__all__ = ["checks"]

MIB = 1 << 20
#: For each of two processes; most of it goes into loading torch and making a context.
LIMIT_S = 50.0


def checks() -> list[Check]:
    """Return the checks of this module."""
    return [Check("memory reserved for requests that fragment an allocator", _fragmentation, 30)]


def _fragmentation(probe: Probe) -> None:
    needed: dict[str, int] = {}
    rows: dict[str, dict[str, float]] = {}
    for scenario in SCENARIOS:
        needed[scenario.title] = nbytes = needed_by_arena(scenario, told=True)
        _exactly_enough(probe, scenario, nbytes)
        rows[scenario.title] = {
            "wanted_MiB": scenario.live_nbytes / MIB,
            "arena_MiB": nbytes / MIB,
            # What an arena cannot do is shown, too: it gives nothing back in the middle of an end.
            "arena,_one_end_MiB": needed_by_arena(scenario, told=False) / MIB,
        }
    n_exact = sum(needed[scenario.title] == scenario.live_nbytes for scenario in SCENARIOS)
    probe.figure("arena: no byte more than is wanted at a time", n_exact, f"of {len(SCENARIOS)} scenarios")
    probe.groups.append(
        {"title": "memory taken for the same requests, the most at a time", "reference": None, "rows": rows}
    )
    missing = []
    for name, short, expandable in (
        ("caching allocator", "torch", False),
        ("expandable segments", "expandable", True),
    ):
        reserved = {one.title: ModelledAllocator(expandable=expandable).replay(one) for one in SCENARIOS}
        if not probe.device.is_fake:
            try:
                found = _reserved_by_torch(probe, expandable)
            except NotMeasuredError as error:
                missing.append(f"{name}: {error}")
                continue
            n_wrong = sum(found[title] != nbytes for title, nbytes in reserved.items())
            probe.figure(f"{name}: not as modelled", n_wrong, f"of {len(SCENARIOS)} scenarios")
            reserved = found
        column = f"{short}_modelled_MiB" if probe.device.is_fake else f"{short}_MiB"
        for title, nbytes in reserved.items():
            rows[title][column] = nbytes / MIB
            probe.expect(
                needed[title] <= nbytes,
                f"{title}: an arena needs {needed[title]} bytes, which is more than the {nbytes} of the {name}",
            )
    if missing:
        raise NotMeasuredError("; ".join(missing))


def _exactly_enough(probe: Probe, scenario: Scenario, nbytes: int) -> None:
    """Run the scenario in an arena of the device that has room for it, and in one that is a byte too small."""
    with Arena(nbytes, backend="torch", device=probe.device.name) as arena:
        replay_in_arena(scenario, arena, told=True)
        probe.expect(
            arena.stats.peak == nbytes,
            f"{scenario.title}: {arena.stats.peak} bytes were taken of an arena of {nbytes} that was said to be "
            f"exactly enough",
        )
    with Arena(nbytes - 1, backend="torch", device=probe.device.name) as arena:
        try:
            replay_in_arena(scenario, arena, told=True)
        except OutOfMemoryError:
            return
    probe.expect(
        False, f"{scenario.title}: it fits in {nbytes - 1} bytes, and {nbytes} were said to be needed"
    )


def _reserved_by_torch(probe: Probe, expandable: bool) -> dict[str, int]:
    """Return the bytes that torch's allocator reserves for each scenario, in a new process."""
    settings: dict[str, str | None] = {
        # The old name: all versions of torch read it first for CUDA.
        "PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{expandable}",
        "PYTORCH_ALLOC_CONF": None,
        "PYTORCH_NO_CUDA_MEMORY_CACHING": None,
    }
    command = [sys.executable, "-m", "gpuarena.bench.fragmentation", probe.device.name]
    status, out, err = run_child(command, limit_s=LIMIT_S, environment=settings)
    lines = out.splitlines()
    if status or not lines:
        said = err.strip().splitlines()[-1:]
        raise NotMeasuredError(f"the process that replays the requests ended with {status}: {' '.join(said)}")
    found: dict[str, Any] = json.loads(lines[-1])
    if found["expandable"] is not expandable:
        raise NotMeasuredError(
            f"expandable_segments:{expandable} was asked for, and torch's segments are otherwise"
        )
    reserved: dict[str, int] = found["reserved_nbytes"]
    return reserved
