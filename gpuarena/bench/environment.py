"""What a result needs beside its figures to be read later: date, machine, versions, commit."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

__all__ = ["environment"]

#: Distributions whose versions are noted where they are installed.
_DISTRIBUTIONS = (
    "gpuarena",
    "torch",
    "transformers",
    "numpy",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "rmm-cu12",
    "rmm-cu13",
    "cuda-bindings",
)


def environment(device: str = "cpu") -> dict[str, Any]:
    """Return date, versions, machine and commit, as far as they can be found out."""
    versions = {}
    for name in _DISTRIBUTIONS:
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
            # Private, so left out where it is not there.
            driver = getattr(torch._C, "_cuda_getDriverVersion", None)
            if driver is not None:
                found["cuda_of_driver"] = driver()
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
