"""Captures of a simulated device: a program of several streams, recorded once and queued again and again."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from gpuarena.testing._queues import Clock, FakeEvent, FakeKernel, Queue, join

if TYPE_CHECKING:
    from gpuarena.testing._simulator import FakeStream, SimulatedDevice


class FakeCaptureError(RuntimeError):
    """Something that is illegal while a stream is captured, or with a graph whose capture failed."""

    __module__ = "gpuarena.testing"  # where it is exported, for tracebacks


class _Step(NamedTuple):
    action: str  # "launch", "record" or "wait"
    queue: Queue
    operand: FakeKernel | FakeEvent


class Capture:
    """A capture that goes on, from its first stream and the streams that joined it.

    It has clocks of its own: what was queued on the streams before is no part of it.
    """

    def __init__(self, device: SimulatedDevice, origin: Queue) -> None:
        self.graph = FakeGraph(device, origin, self)
        self.reason: str | None = None
        """Why the graph is invalid, or None."""
        self.is_over = False
        self._origin = origin
        self._clocks: dict[Queue, Clock] = {origin: {}}
        origin.capture = self

    def refuse(self, message: str) -> NoReturn:
        """Raise `FakeCaptureError`; the capture is invalid from now on."""
        self.reason = self.reason or message
        raise FakeCaptureError(message)

    def _refuse_if_invalid(self) -> None:
        if self.reason is not None:
            raise FakeCaptureError(f"the capture is invalid: {self.reason}")

    def add_kernel(self, queue: Queue, kernel: FakeKernel) -> None:
        """Record a launch."""
        self._refuse_if_invalid()
        clock = self._clocks[queue]
        clock[queue.number] = clock.get(queue.number, 0) + 1
        self.graph.steps.append(_Step("launch", queue, kernel))

    def add_event(self, queue: Queue) -> FakeEvent:
        """Record an event, which means nothing outside the capture."""
        self._refuse_if_invalid()
        event = FakeEvent(queue, 0, dict(self._clocks[queue]), self)
        self.graph.steps.append(_Step("record", queue, event))
        return event

    def add_wait(self, queue: Queue, event: FakeEvent) -> None:
        """Record a wait, by which a stream outside the capture joins it."""
        if self.is_over:
            raise FakeCaptureError(
                f"{queue.name!r} cannot wait for an event that was recorded in a capture, which is over"
            )
        if event.capture is None:
            self.refuse(
                f"{queue.name!r} is captured and cannot wait for an event recorded outside the capture"
            )
        if event.capture is not self:
            event.capture.reason = event.capture.reason or "a stream of another capture waited for its event"
            self.refuse(f"{queue.name!r} cannot wait for an event of another capture")
        self._refuse_if_invalid()
        queue.capture = self
        join(self._clocks.setdefault(queue, {}), event.clock)
        self.graph.steps.append(_Step("wait", queue, event))

    def close(self) -> None:
        """End the capture; it is invalid if the first stream does not wait for all work of the others."""
        self.is_over = True
        known = self._clocks[self._origin]
        for queue, clock in self._clocks.items():
            queue.capture = None
            if clock.get(queue.number, 0) > known.get(queue.number, 0):
                self.reason = self.reason or (
                    f"{queue.name!r} joined it and has work that {self._origin.name!r} does not wait for"
                )


class FakeGraph:
    """What was captured; made by `SimulatedDevice.capture`."""

    def __init__(self, device: SimulatedDevice, origin: Queue, capture: Capture) -> None:
        self.steps: list[_Step] = []
        self._device = device
        self._origin = origin
        self._capture = capture
        self._branches: dict[Queue, Queue] = {}  # queues of its own, in place of those of streams that joined
        self._last: FakeEvent | None = None

    @property
    def is_valid(self) -> bool:
        """Whether the capture is over and nothing was wrong with it."""
        return self._capture.is_over and self._capture.reason is None

    @property
    def n_kernels(self) -> int:
        """Kernels that a replay queues."""
        return sum(step.action == "launch" for step in self.steps)

    def replay(self, stream: FakeStream) -> None:
        """Queue the recorded kernels behind the work of `stream`, and behind the replay before.

        Kernels of streams that joined run beside those of the first one, as far as the events allow.

        Raises
        ------
        FakeCaptureError
            The graph is invalid or not complete yet, or `stream` is being captured (CUDA allows that; it is not
            simulated).
        """
        with self._device.lock:
            if not self.is_valid:
                raise FakeCaptureError(f"there is no graph: {self._capture.reason or 'its capture goes on'}")
            target = self._device.queue_of(stream)
            if target.capture is not None:
                target.capture.refuse("the replay of a graph inside a capture is not simulated")
            if self._last is not None:
                target.add_wait(self._last)
            events: dict[FakeEvent, FakeEvent] = {}
            for action, captured, operand in self.steps:
                queue = target if captured is self._origin else self._branch(captured)
                if isinstance(operand, FakeKernel):
                    self._device.enqueue(queue, dataclasses.replace(operand, stream=queue.name))
                elif action == "record":
                    events[operand] = queue.event()
                else:
                    queue.add_wait(events[operand])
            self._last = target.event()

    def _branch(self, captured: Queue) -> Queue:
        if captured not in self._branches:
            self._branches[captured] = self._device.new_queue(f"{captured.name} in a graph")
        return self._branches[captured]
