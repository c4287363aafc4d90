"""CUDA graphs: allocation inside of what is captured, what a replay touches, and memory that would have to grow."""

from __future__ import annotations

from typing import Any

import torch

from gpuarena import Arena
from gpuarena.bench.device import Device
from gpuarena.bench.gpu._check import Check, NotMeasuredError, Probe
from gpuarena.bench.harness import Variant, group
from gpuarena.errors import BackendError, CaptureError, DeviceMismatchError, PinnedError

__all__ = ["checks"]

_MIB = 1 << 20
#: Scopes in a step, with two temporaries and three kernels each.
_N_SCOPES = 16


def checks() -> list[Check]:
    """Return the checks of this module."""
    return [
        Check("allocation inside a CUDA graph", _allocation, 10),
        Check("growth during a capture is refused", _growth, 5),
    ]


class _Step:
    """Work whose temporaries come from an arena, a scope each; it notes where they lay.

    ``y = sum over k of (2 x + k)``, in numbers that float32 holds exactly.
    """

    def __init__(self, device: Device, n: int) -> None:
        self.x = torch.zeros(n, device=device.torch_device)
        self.y = torch.zeros_like(self.x)
        self.addresses: set[int] = set()
        self.arena = Arena(max(_MIB, 64 * n), backend="torch", device=device.name)

    def __call__(self) -> None:
        n = len(self.x)
        self.y.zero_()
        for k in range(_N_SCOPES):
            with self.arena.scope():
                doubled, shifted = self.arena.empty(n, "float32"), self.arena.empty(n, "float32")
                torch.mul(self.x, 2, out=doubled)
                torch.add(doubled, k, out=shifted)
                self.y.add_(shifted)
                self.addresses |= {doubled.data_ptr(), shifted.data_ptr()}

    def wanted(self, value: int) -> torch.Tensor:
        """Return what `y` has to be where all of `x` is `value`."""
        return torch.full_like(self.y, 2 * _N_SCOPES * value + sum(range(_N_SCOPES)))


def _allocation(probe: Probe) -> None:
    device = probe.device
    n = 1 << 10 if probe.quick else 1 << 16
    step = _Step(device, n)
    arena = step.arena
    start = arena.checkpoint()
    with arena.pin("graph") as pin:
        replay = device.capture(step)
    device.synchronize()
    captured = set(step.addresses)
    probe.figure("kept by the graph", pin.nbytes, "bytes")
    probe.figure("scopes in the graph", _N_SCOPES)
    mine = [arena.full(n, 7, "float32") for _ in range(4)]
    overlapping = [one.data_ptr() for one in mine if one.data_ptr() in captured]
    probe.expect(
        not overlapping,
        f"{len(overlapping)} of {len(mine)} new arrays lie in memory that the captured graph uses",
    )
    for value in range(1, 6):
        step.x.fill_(value)
        step.y.fill_(-1)
        replay()
        device.synchronize()
        probe.expect(
            torch.equal(step.y, step.wanted(value)),
            f"a replay with x = {value} gave {float(step.y[0])}, {float(step.wanted(value)[0])} is right",
        )
        spoilt = sum(int((one != 7).sum()) for one in mine)
        probe.expect(
            spoilt == 0, f"a replay overwrote {spoilt} elements of arrays that were made after the capture"
        )
    _time_replay(probe, step, replay)
    _pinned(probe, step, start, pin, captured)
    if not device.is_fake:  # the host has no captures that an arena could notice
        _noticed(probe, step)


def _time_replay(probe: Probe, step: _Step, replay: Any) -> None:
    step.x.fill_(3)

    def variant(body: Any) -> Variant:
        return Variant(
            body, ready=lambda: step.y.fill_(-1), wanted=lambda: [step.wanted(3)], given=lambda _: [step.y]
        )

    timed = group(
        f"a step of {_N_SCOPES} scopes, {2 * _N_SCOPES} allocations and {3 * _N_SCOPES + 1} kernels",
        {"eager": variant(step), "graph, replayed": variant(replay)},
        "eager",
        rounds=3 if probe.quick else 31,
        warmup=3,
        synchronize=probe.device.synchronize,
    )
    probe.groups.append(timed)


def _pinned(probe: Probe, step: _Step, start: Any, pin: Any, captured: set[int]) -> None:
    """Check that the memory stays until the pin is released, and comes back then."""
    arena = step.arena
    try:
        arena.rollback(start)
    except PinnedError:
        pass
    else:
        probe.expect(False, "memory that a graph uses was given back by a rollback; PinnedError is promised")
    pin.release()
    arena.rollback(start)
    again = arena.empty(len(step.x), "float32").data_ptr()
    probe.expect(
        again in captured, f"after Pin.release the next array lies at {again:#x}, where the graph had nothing"
    )
    arena.rollback(start)


def _noticed(probe: Probe, step: _Step) -> None:
    """Check that a capture without a pin makes one."""
    arena = step.arena
    replay = probe.device.capture(step)
    pins = arena.pins
    probe.expect(len(pins) == 1, f"a capture that allocated left {len(pins)} pins, 1 is promised")
    mine = arena.full(len(step.x), 7, "float32")
    replay()
    probe.device.synchronize()
    spoilt = int((mine != 7).sum())
    probe.expect(
        spoilt == 0, f"without a pin of its own, a replay overwrote {spoilt} elements of somebody else"
    )
    pins[0].release()


# -- growth -------------------------------------------------------------------------------------------------------------


def _growth(probe: Probe) -> None:
    device = probe.device
    try:
        arena = Arena(64 << 30, backend="virtual:torch", device=device.name)
    except (BackendError, DeviceMismatchError) as error:
        raise NotMeasuredError(f"there is no memory that grows: {error}") from error
    if device.is_fake:
        _tell_of_captures(arena, device)
    x = arena.zeros(1024, "float32")
    outcomes: list[str | None] = []

    def step() -> None:
        with arena.scope():
            try:
                arena.empty(arena.stats.committed + _MIB, "uint8")
            except CaptureError as error:
                outcomes.append(str(error))
            else:
                outcomes.append(None)
        x.add_(1)

    replay = device.capture(step)
    device.synchronize()
    *before, last = outcomes
    probe.figure("growths before the capture", len(before))
    probe.figure("committed", arena.stats.committed, "bytes")
    probe.expect(
        not any(before), f"growth was refused outside of a capture: {next(filter(None, before), '')}"
    )
    if last is None:
        probe.expect(False, "an arena grew while a graph was captured; CaptureError is promised")
    else:
        probe.figure("what is said", last)
        probe.expect("before the capture" in last, f"the refusal does not say what to do: {last}")
    x.zero_()
    for _ in range(3):
        replay()
    device.synchronize()
    probe.expect(
        bool((x == 3).all()),
        f"after a refused growth 3 replays gave {float(x[0])}, not 3: the capture is not whole",
    )
    for pin in arena.pins:
        pin.release()
    arena.empty(arena.stats.committed + _MIB, "uint8").zero_()
    device.synchronize()  # what the refusal left behind would show here


def _tell_of_captures(arena: Arena, device: Any) -> None:
    """Let the host's memory know when a dry run is at what a GPU would capture."""
    backend: Any = arena._backend
    backend._reservation._driver.is_capturing = lambda: device.is_capturing
