"""Interleaved timing, and what a result needs beside its figures to be read later."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["Timing", "environment", "interleave", "ratio"]


@dataclass(frozen=True)
class Timing:
    """Seconds of one variant, one sample a round."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median in seconds."""
        return statistics.median(self.samples)

    @property
    def spread(self) -> tuple[float, float]:
        """Lower and upper quartile in seconds."""
        if len(self.samples) < 2:
            return self.samples[0], self.samples[0]
        low, _, high = statistics.quantiles(self.samples, n=4)
        return low, high

    def as_dict(self) -> dict[str, Any]:
        """Return the figures in seconds, for JSON."""
        return {"median_s": self.median, "quartiles_s": list(self.spread), **asdict(self)}


def interleave(
    variants: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warmup: int = 2,
    synchronize: Callable[[], object] = lambda: None,
) -> dict[str, Timing]:
    """Time every variant once a round, in an order that rotates, so that noise and caches hit all alike.

    `synchronize` waits for the device before and after each call.
    """
    names = list(variants)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for number in range(warmup + rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            synchronize()
            start = time.perf_counter()
            variants[name]()
            synchronize()
            if number >= warmup:
                samples[name].append(time.perf_counter() - start)
    return {name: Timing(tuple(values)) for name, values in samples.items()}


def ratio(one: Timing, other: Timing) -> float:
    """Return the median over rounds of `one` divided by `other`: machine noise cancels within a round."""
    return statistics.median(a / b for a, b in zip(one.samples, other.samples, strict=True))


def environment(device: str = "cpu") -> dict[str, Any]:
    """Return date, versions, machine and commit, as far as they can be found out."""
    versions = {}
    for name in ("gpuarena", "torch", "transformers", "numpy", "cupy-cuda12x", "cupy-cuda13x"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cpu_count": os.cpu_count(),
        "versions": versions,
        "commit": _commit(),
        "device": device,
    }
    if "torch" in versions:
        import torch

        found["torch_threads"] = torch.get_num_threads()
        if device.startswith("cuda"):
            found["gpu"] = torch.cuda.get_device_name(device)
            found["cuda"] = torch.version.cuda
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def _commit() -> str | None:
    here = Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=here,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
