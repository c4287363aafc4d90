"""How much of a device's memory is used, and whether it came back."""

from __future__ import annotations

from gpuarena.bench.device import Device
from gpuarena.bench.gpu._check import NotMeasuredError, Probe

__all__ = ["expect_given_back", "free_nbytes", "slack_nbytes", "used_nbytes"]

MIB = 1 << 20


def used_nbytes(device: Device) -> int:
    """Return the used bytes of the device, after dropping all that nobody refers to any more.

    Raises
    ------
    NotMeasuredError
        Nobody counts them.
    """
    device.give_back()
    memory = device.memory()
    if memory is None:
        raise NotMeasuredError(f"nobody counts the memory of {device.name}")
    return memory.used_nbytes


def free_nbytes(device: Device) -> int:
    """Return the bytes that nobody uses; errors as for `used_nbytes`."""
    used = used_nbytes(device)
    memory = device.memory()
    assert memory is not None, "used_nbytes has counted it"
    return memory.total_nbytes - used


def slack_nbytes(device: Device) -> int:
    """Return how many bytes may be used for other reasons in the meantime, between two calls of `used_nbytes`.

    A driver loads the code of a kernel when it is first run. A process has its heap.
    """
    return (32 if device.is_fake else 64) * MIB


def expect_given_back(probe: Probe, name: str, before_nbytes: int, what: str) -> None:
    """Note under `name` how many more bytes are used than before, and fail if it is more than the slack.

    Raises
    ------
    CheckFailedError
        Naming `what`, which should have given them back.
    """
    left = used_nbytes(probe.device) - before_nbytes
    probe.figure(name, left, "bytes")
    slack = slack_nbytes(probe.device)
    probe.expect(
        left <= slack,
        f"{left / MIB:.1f} MiB more than before are used after {what}; all should be given back, "
        f"{slack / MIB:.0f} MiB are allowed for other things",
    )
