"""What a check of the GPU is: a function that counts, compares, and either returns or raises."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gpuarena.bench.device import Device
from gpuarena.bench.harness import Group
from gpuarena.errors import ArenaError

__all__ = ["Check", "CheckFailedError", "NotMeasuredError", "Probe", "run_check"]


#: Characters of a traceback that are kept, the last ones.
_TRACE_LIMIT = 4000


class CheckFailedError(ArenaError, AssertionError):
    """What a check found is not what is promised."""


class NotMeasuredError(ArenaError, RuntimeError):
    """A check cannot be done here: a library or a tool is missing, or the device has too little memory."""


@dataclass
class Probe:
    """What a check writes its findings into, as it goes, so that those before a failure are kept.

    Attributes
    ----------
    device : Device
        Where to run.
    quick : bool
        Small sizes, to see that it runs.
    figures : dict
        Name -> ``{"value": number or str, "unit": str}``.
    groups : list of dict
        Timed groups of `gpuarena.bench.harness.group`.
    """

    device: Device
    quick: bool = False
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)

    def figure(self, name: str, value: float | str, unit: str = "") -> None:
        """Note a figure; `unit` in words: ``"bytes"``, ``"us"``, ``"launches a layer"``."""
        self.figures[name] = {"value": value, "unit": unit}

    def expect(self, is_right: bool, message: str) -> None:
        """Raise unless `is_right`.

        Raises
        ------
        CheckFailedError
            With `message`, which says what was found and what was promised.
        """
        if not is_right:
            raise CheckFailedError(message)


@dataclass(frozen=True)
class Check:
    """A named check."""

    title: str
    body: Callable[[Probe], None]
    seconds: float = 10.0
    """About how long it takes on a GPU, so that a suite with a budget can leave it out."""


def run_check(check: Check, device: Device, *, quick: bool) -> dict[str, Any]:
    """Run a check and return what it found, for JSON.

    ``{"title", "passed": True, False or None, "why": str, "seconds", "figures", "groups"}``; None is not measured.
    ``"traceback"`` is there where the check raised something else than its own errors.
    Nothing that a check raises goes on: one that fails must not take the others with it.
    """
    probe = Probe(device, quick)
    began = time.monotonic()
    passed: bool | None = True
    why = trace = ""
    try:
        check.body(probe)
        device.synchronize()  # a kernel that failed says so here
    except NotMeasuredError as error:
        passed, why = None, str(error)
    except CheckFailedError as error:
        passed, why = False, str(error)
    except Exception as error:  # whatever it is, the other checks are worth having
        passed, why = False, f"{type(error).__name__}: {error}"
        trace = traceback.format_exc()[-_TRACE_LIMIT:]
    # After the error is gone, and with it the frames that held tensors: the next check finds the memory free.
    with contextlib.suppress(Exception):  # a device that has failed for good says so in the next check
        device.give_back()
    return {
        "title": check.title,
        "passed": passed,
        "why": why,
        "seconds": round(time.monotonic() - began, 2),
        "figures": probe.figures,
        "groups": probe.groups,
        **({"traceback": trace} if trace else {}),
    }
