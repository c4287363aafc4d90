"""Three streams: one gives memory back, one still reads it, one writes to it again.

The control does the same to memory that nobody declared anything about. Where it shows no wrong data, the slow kernel
was not slow enough, or the streams did not run at the same time, and that the arena's reader saw its own data means
nothing.
"""

from __future__ import annotations

import statistics
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import torch

from gpuarena import Arena
from gpuarena.bench.device import Device
from gpuarena.bench.gpu._check import Check, CheckFailedError, NotMeasuredError, Probe

__all__ = ["Lanes", "checks", "lanes_of"]

#: Cycles that the slow kernel spins: some 50 ms at 2 GHz, while what the host does takes less than one.
_CYCLES = 100_000_000
_OURS, _THEIRS = 1, 2


def checks() -> list[Check]:
    """Return the checks of this module."""
    return [Check("rollback under a late reader, three streams", _late_reader, 10)]


class Lanes(Protocol):
    """What the check needs of a device: streams, and work on them that may be late. Nothing waits but `wait_for`."""

    def arena(self, nbytes: int, home: Any) -> Arena:
        """Return an arena with a home stream."""

    def stream(self) -> Any:
        """Return a new stream."""

    def array(self, n: int) -> Any:
        """Return an array of `n` int32 that no arena knows of."""

    def delay(self, stream: Any) -> None:
        """Queue a slow kernel."""

    def fill(self, array: Any, value: int, stream: Any) -> None:
        """Queue an assignment to all elements."""

    def copy(self, source: Any, target: Any, stream: Any) -> None:
        """Queue a copy."""

    def mark(self, stream: Any) -> Any:
        """Return an event behind what is queued."""

    def is_done(self, event: Any) -> bool:
        """Return whether an event was reached."""

    def wait_for(self, stream: Any = None) -> None:
        """Let the host wait for a stream, or for all of them."""

    def n_others(self, array: Any, value: int) -> int:
        """Return how many elements are not `value`."""


class _TorchLanes:
    """Streams of torch on a CUDA device; see `Lanes`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._cuda: Any = torch.cuda  # much of it has no annotations

    def arena(self, nbytes: int, home: Any) -> Arena:
        return Arena(nbytes, backend="torch", device=self._device.name, stream=home)

    def stream(self) -> Any:
        return self._cuda.Stream(self._device.torch_device)

    def array(self, n: int) -> Any:
        made = torch.zeros(n, dtype=torch.int32, device=self._device.torch_device)
        self._device.synchronize()
        return made

    def delay(self, stream: Any) -> None:
        with self._cuda.stream(stream):
            self._cuda._sleep(_CYCLES)

    def fill(self, array: Any, value: int, stream: Any) -> None:
        with self._cuda.stream(stream):
            array.fill_(value)

    def copy(self, source: Any, target: Any, stream: Any) -> None:
        with self._cuda.stream(stream):
            target.copy_(source)

    def mark(self, stream: Any) -> Any:
        event = self._cuda.Event()
        event.record(stream)
        return event

    def is_done(self, event: Any) -> bool:
        return bool(event.query())

    def wait_for(self, stream: Any = None) -> None:
        if stream is None:
            self._device.synchronize()
        else:
            stream.synchronize()

    def n_others(self, array: Any, value: int) -> int:
        return int((array != value).sum())


class _SimulatedLanes:
    """Streams of a simulated device, which runs what was launched last as early as the order allows; see `Lanes`."""

    def __init__(self) -> None:
        from gpuarena.testing.streams import StreamedFakeDevice, byte_ranges

        self._device = StreamedFakeDevice()
        self._ranges = byte_ranges

    def arena(self, nbytes: int, home: Any) -> Arena:
        return Arena(nbytes, backend=self._device, stream=home)

    def stream(self) -> Any:
        return self._device.stream("one of three")

    def array(self, n: int) -> Any:
        return np.zeros(n, np.int32)

    def delay(self, stream: Any) -> None:
        """Queue nothing: all work is late here."""

    def fill(self, array: Any, value: int, stream: Any) -> None:
        self._device.launch(stream, writes=self._ranges(array), run=lambda: array.fill(value), name="fill")

    def copy(self, source: Any, target: Any, stream: Any) -> None:
        self._device.launch(
            stream,
            reads=self._ranges(source),
            writes=self._ranges(target),
            run=lambda: np.copyto(target, source),
            name="copy",
        )

    def mark(self, stream: Any) -> Any:
        return self._device.record(stream)

    def is_done(self, event: Any) -> bool:
        return bool(event.done)

    def wait_for(self, stream: Any = None) -> None:
        if stream is None:
            self._device.run()
        self._device.synchronize(stream)

    def n_others(self, array: Any, value: int) -> int:
        return int((array != value).sum())


def lanes_of(device: Device) -> Lanes:
    """Return the streams of a device, or of a simulated one on a dry run."""
    return _SimulatedLanes() if device.is_fake else _TorchLanes(device)


def _late_reader(probe: Probe) -> None:
    n = 1 << (10 if probe.quick else 20)
    lanes = lanes_of(probe.device)
    home, reader, writer = streams = [lanes.stream() for _ in range(3)]
    arena = lanes.arena(4 * n + 4096, home)
    seen, raw = lanes.array(n), lanes.array(n)
    delay_s = _warm_up(lanes, streams, raw, seen)
    probe.figure("read late", n, "elements")
    probe.figure("slow kernel", delay_s * 1e6, "us")
    held_s = []
    for _ in range(1 if probe.quick else 5):
        found = _declared(lanes, arena, (home, reader, writer), n, seen)
        n_wrong, n_lost, is_late, seconds = found
        held_s.append(seconds)
        probe.figure("wrong elements, stream declared", n_wrong, "elements")
        probe.figure("host held up by rollback", statistics.median(held_s) * 1e6, "us")
        probe.expect(
            n_wrong == 0,
            f"{n_wrong} of {n} elements that a declared stream read late are the next owner's, who was to wait",
        )
        probe.expect(n_lost == 0, f"{n_lost} of {n} elements of the next owner were overwritten")
        if not is_late:
            _explain_early(seconds, delay_s)
    n_raced = _undeclared(lanes, (home, reader, writer), raw, seen)
    probe.figure("wrong elements, nothing declared", n_raced, "elements")
    if not n_raced:
        raise NotMeasuredError(
            "the control showed no race: not conclusive. The streams did not run at the same time, or the slow kernel "
            "was not slow enough"
        )


def _warm_up(lanes: Lanes, streams: list[Any], raw: Any, seen: Any) -> float:
    """Run every kernel on every stream, since to load one may wait for the device; return seconds of the slow one."""
    for stream in streams:
        lanes.delay(stream)
        lanes.fill(raw, 0, stream)
        lanes.copy(raw, seen, stream)
        lanes.wait_for()
    began = perf_counter()
    lanes.delay(streams[0])
    lanes.wait_for()
    return perf_counter() - began


def _declared(
    lanes: Lanes, arena: Arena, streams: tuple[Any, Any, Any], n: int, seen: Any
) -> tuple[int, int, bool, float]:
    """Return wrong elements, lost ones of the next owner, whether the reader was late, and seconds of the rollback."""
    home, reader, writer = streams
    start = arena.checkpoint()
    first = arena.alloc(n, "int32")
    lanes.fill(first.array, _OURS, home)
    lanes.fill(seen, 0, home)
    lanes.wait_for(home)
    first.record_stream(reader)
    lanes.delay(reader)
    lanes.copy(first.array, seen, reader)
    read = lanes.mark(reader)
    began = perf_counter()
    arena.rollback(start)
    seconds = perf_counter() - began
    second = arena.alloc(n, "int32")
    if second.address != first.address:
        raise CheckFailedError(
            f"after a rollback the next region is at {second.address:#x}, not at {first.address:#x}"
        )
    second.record_stream(writer)
    lanes.fill(second.array, _THEIRS, writer)
    is_late = not lanes.is_done(read)
    lanes.wait_for()
    found = lanes.n_others(seen, _OURS), lanes.n_others(second.array, _THEIRS)
    arena.rollback(start)
    return *found, is_late, seconds


def _explain_early(seconds: float, delay_s: float) -> None:
    """Raise: the reader was done before the writer was queued."""
    if seconds > delay_s / 2:
        raise CheckFailedError(
            f"rollback held the host up for {seconds * 1e6:.0f} us, until the late reader was done"
        )
    raise NotMeasuredError("the slow kernel ended before the next owner's work was queued: not conclusive")


def _undeclared(lanes: Lanes, streams: tuple[Any, Any, Any], raw: Any, seen: Any) -> int:
    """Do the same without any order between reader and writer; return the wrong elements."""
    home, reader, writer = streams
    lanes.fill(raw, _OURS, home)
    lanes.fill(seen, 0, home)
    lanes.wait_for(home)
    lanes.delay(reader)
    lanes.copy(raw, seen, reader)
    lanes.fill(raw, _THEIRS, writer)
    lanes.wait_for()
    return lanes.n_others(seen, _OURS)
