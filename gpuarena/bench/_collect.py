"""The groups of a benchmark, one after the other: what fails on a GPU takes no other group with it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from gpuarena.bench._labels import reason
from gpuarena.bench.device import Device
from gpuarena.bench.harness import Group

__all__ = ["Maker", "collect", "not_measured", "on_device"]

#: The title of a group, and what measures it, called with the title.
Maker = tuple[str, Callable[[str], Group]]


def collect(
    device: Device, makers: Iterable[Maker], on_group: Callable[[Any], object] = lambda group: None
) -> dict[str, Any]:
    """Measure groups; return ``{"groups": [...]}``, and an ``"error"`` where some failed.

    On a GPU the place of one that failed is taken by a group without rows, whose ``"not_measured"`` says why, and
    memory is given back between groups. On a CPU nothing is lost by a second run, so the failure goes on.
    """
    groups: list[Group] = []
    failed: list[str] = []
    for title, make in makers:
        try:
            group = make(title)
        except Exception as error:  # whatever it is, the other groups are worth having
            if not device.is_gpu:
                raise
            group = not_measured(title, {"the whole group": reason(error)})
            failed.append(f"{title}: {reason(error)}")
        groups.append(group)
        on_group(group)
        if device.is_gpu:
            _give_back(device)
    found: dict[str, Any] = {"groups": groups}
    if failed:
        found["error"] = "; ".join(failed)
    return found


def not_measured(title: str, why: dict[str, str]) -> Group:
    """Return a group without rows; `why` tells by name what could not be measured."""
    return {"title": title, "reference": None, "rows": {}, "not_measured": why}


def _give_back(device: Device) -> None:
    """Collect what died with the last group, and return its memory."""
    if not device.is_fake:  # which has memory enough for what is not collected yet
        gc.collect()
    with contextlib.suppress(Exception):  # a device that has failed for good says so in the next group
        device.forget_peak()


@contextlib.contextmanager
def on_device(device: Device) -> Iterator[None]:
    """Let libraries that allocate on the current device find this one."""
    if not device.is_gpu or device.is_fake:
        yield
        return
    import torch

    with torch.cuda.device(device.torch_device):
        yield
