"""All checks of the GPU, in order, each with a result whatever happens to the others."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from gpuarena.bench.device import Device, device_of
from gpuarena.bench.environment import environment
from gpuarena.bench.gpu._check import Check, run_check

__all__ = ["checks", "run"]


def checks() -> list[Check]:
    """Return all checks, the cheap ones first."""
    return []


def run(
    *,
    device: str | Device = "cuda",
    quick: bool = False,
    budget_s: float | None = None,
    on_check: Callable[[dict[str, Any]], object] = lambda check: None,
) -> dict[str, Any]:
    """Run all checks; return what they found with the machine and the versions, for JSON.

    Parameters
    ----------
    device : str or Device
        ``"cuda"``, ``"cuda:1"``, or ``"fake-gpu"`` for a dry run on the CPU.
    quick : bool
        Small sizes, to see that it runs; a dry run is always quick.
    budget_s : float, optional
        Seconds for all checks; one that does not fit any more is noted as not measured.
    on_check : callable, optional
        Called with each result.

    Raises
    ------
    BackendError
        There is no such device.
    """
    where = device_of(device)
    quick = quick or where.is_fake
    began = time.monotonic()
    found = []
    for check in checks():
        left = float("inf") if budget_s is None else budget_s - (time.monotonic() - began)
        if check.seconds > left:
            result: dict[str, Any] = {
                "title": check.title,
                "passed": None,
                "why": f"takes about {check.seconds:.0f} s, {max(left, 0):.0f} s of the budget were left",
                "seconds": 0.0,
                "figures": {},
                "groups": [],
            }
        else:
            result = run_check(check, where, quick=quick)
        found.append(result)
        on_check(result)
    return {
        "benchmark": "gpu",
        "environment": environment(where.name),
        "fake": where.is_fake,
        "checks": found,
    }
