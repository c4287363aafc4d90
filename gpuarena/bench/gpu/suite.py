"""All checks of the GPU, in order, each with a result whatever happens to the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any

from gpuarena.bench._labels import not_run
from gpuarena.bench.device import Device, device_of
from gpuarena.bench.environment import environment
from gpuarena.bench.gpu._check import Check, run_check

__all__ = ["checks", "run"]


def checks() -> list[Check]:
    """Return all checks, the cheap ones first."""
    from gpuarena.bench.gpu import (
        caches,
        exhaustion,
        fragmentation,
        graphs,
        growth,
        sanitizer,
        sharing,
        streams,
        threads,
    )

    first = [*sharing.checks(), *graphs.checks(), *streams.checks(), *caches.checks(), *threads.checks()]
    memory = [*exhaustion.checks(), *growth.checks(), *fragmentation.checks()]
    return [*first, *memory, *sanitizer.checks()]


def run(
    *,
    device: str | Device = "cuda",
    quick: bool = False,
    budget_s: float | None = None,
    skipped: Collection[str] = (),
    on_start: Callable[[str], object] = lambda title: None,
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
    skipped : collection of str
        Titles of checks that are left out.
    on_start : callable, optional
        Called with the title of each check before it.
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
    lost = ""
    for check in (check for check in checks() if check.title not in skipped):
        left = float("inf") if budget_s is None else budget_s - (time.monotonic() - began)
        if lost:
            result = not_run(check.title, None, lost) | {"lost": True}
        elif check.seconds > left:
            why = f"takes about {check.seconds:.0f} s, {max(left, 0):.0f} s of the budget were left"
            result = not_run(check.title, None, why)
        else:
            on_start(check.title)
            result = run_check(check, where, quick=quick)
            if result["passed"] is False:
                lost = _why_lost(check, where)
        found.append(result)
        on_check(result)
    return {
        "benchmark": "gpu",
        "environment": environment(where.name),
        "fake": where.is_fake,
        "checks": found,
    }


def _why_lost(check: Check, where: Device) -> str:
    """Say why a device cannot be used any more, if so: after some errors every later call fails with them."""
    try:
        where.synchronize()
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        return f"the device does not answer any more after {check.title!r}: {first_line}"
    return ""
