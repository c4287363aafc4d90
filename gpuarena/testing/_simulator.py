"""A device that runs nothing before it must, and finds races."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from gpuarena.backends import _handles
from gpuarena.errors import DeviceMismatchError
from gpuarena.testing._capture import Capture, FakeCaptureError, FakeGraph
from gpuarena.testing._queues import Clock, FakeEvent, FakeKernel, Queue, Race, join, merged


class FakeStream:
    """A stream of a `SimulatedDevice`: made by its method `stream`, or its `default_stream` or `per_thread_stream`.

    Two objects of one stream are not equal, and `SimulatedDevice.current_stream` returns a new one each time; only
    `FakeStreams.key` tells streams apart.
    """

    def __init__(self, device: SimulatedDevice, handle: int, name: str) -> None:
        self.device = device
        self.handle = handle
        self.name = name

    def __repr__(self) -> str:
        return f"<FakeStream {self.name!r} handle={self.handle}>"

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


class SimulatedDevice:
    """A device whose kernels run late, in an order that the test chooses.

    >>> device = SimulatedDevice()
    >>> side, bytes_ = device.stream("side"), bytearray(4)
    >>> device.launch(side, writes=[(0, 4)], run=lambda: bytes_.__setitem__(0, 7), name="fill")
    >>> device.launch(device.default_stream, reads=[(0, 2)], name="use")
    >>> device.races  # `use` has to wait for an event of `side`
    [<Race of 'fill' on 'side' and 'use' on 'default' over bytes 0x0 to 0x2>]
    >>> bytes_[0], device.n_pending
    (0, 2)
    >>> device.synchronize(side)
    >>> bytes_[0], device.n_pending
    (7, 1)

    Two kernels are ordered if they are on one stream, if an event between them says so, or if the host waited for
    the first before it launched the second. Whether two kernels race depends on the calls alone, not on when
    anything runs. The calls of all threads count as those of one host, in the order in which they came.

    Not simulated: the default stream waits for no other (as for streams made non-blocking), and an event marks one
    point for ever.

    Parameters
    ----------
    index : int
        The device's number.

    Attributes
    ----------
    default_stream, per_thread_stream : FakeStream
        The stream that is current until `use` says otherwise, and one that is another stream in every thread.
    races : list of Race
        Every pair of kernels that races, in the order in which the second was launched.
    """

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self.races: list[Race] = []
        self.default_stream = FakeStream(self, _handles.DEFAULT, "default")
        self.per_thread_stream = FakeStream(self, _handles.PER_THREAD, "per-thread")
        self._names = {_handles.DEFAULT: "default", _handles.PER_THREAD: "per-thread"}
        self._queues: list[Queue] = []
        self._by_handle: dict[int, Queue] = {_handles.DEFAULT: self.new_queue("default")}
        self._thread = threading.local()
        self.lock = threading.RLock()
        self._serials = itertools.count()
        self._host: Clock = {}  # the kernels that the host has waited for
        self._unordered: list[FakeKernel] = []  # the others, with which a later launch can race
        self._captures: list[Capture] = []

    # -- streams ------------------------------------------------------------------------------------------------

    def stream(self, name: str) -> FakeStream:
        """Return a new stream."""
        with self.lock:
            handle = 16 * len(self._by_handle)  # as addresses are, and none of the special handles
            self._by_handle[handle] = self.new_queue(name)
            self._names[handle] = name
            return FakeStream(self, handle, name)

    def stream_of(self, handle: int) -> FakeStream | None:
        """Return an object for the stream with this handle, None if there is none."""
        handle = _handles.DEFAULT if handle == _handles.LEGACY else handle
        return FakeStream(self, handle, self._names[handle]) if handle in self._names else None

    def current_stream(self) -> FakeStream:
        """Return a new object for the current stream of this thread."""
        handle = getattr(self._thread, "current", _handles.DEFAULT)
        return FakeStream(self, handle, self._names[handle])

    @contextlib.contextmanager
    def use(self, stream: FakeStream) -> Iterator[None]:
        """Make `stream` the current stream of this thread inside the block."""
        self.queue_of(stream)
        before = getattr(self._thread, "current", _handles.DEFAULT)
        self._thread.current = stream.handle
        try:
            yield
        finally:
            self._thread.current = before

    def queue_of(self, stream: FakeStream) -> Queue:
        """Return what `stream` means in this thread.

        Raises
        ------
        DeviceMismatchError
            It is a stream of another device.
        """
        if stream.device is not self:
            raise DeviceMismatchError(f"{stream!r} is a stream of another device", device=stream.device.index)
        if stream.handle != _handles.PER_THREAD:
            return self._by_handle[stream.handle]
        if not hasattr(self._thread, "queue"):
            with self.lock:
                self._thread.queue = self.new_queue(f"per-thread {threading.current_thread().name}")
        queue: Queue = self._thread.queue
        return queue

    def new_queue(self, name: str) -> Queue:
        """Return a queue that no stream means yet."""
        queue = Queue(len(self._queues), name)
        self._queues.append(queue)
        return queue

    # -- work ---------------------------------------------------------------------------------------------------

    def launch(
        self,
        stream: FakeStream,
        *,
        reads: Iterable[tuple[int, int]] = (),
        writes: Iterable[tuple[int, int]] = (),
        run: Callable[[], Any] | None = None,
        name: str = "kernel",
    ) -> None:
        """Queue a kernel on `stream`, or add it to the graph that is captured there.

        Parameters
        ----------
        reads, writes : iterable of (start, stop)
            Addresses in bytes; see `byte_ranges` for those of an array.
        run : callable, optional
            What the kernel does. It must not call the device.
        name : str
            For messages.

        Raises
        ------
        FakeCaptureError
            The capture that the stream belongs to is invalid.
        """
        with self.lock:
            queue = self.queue_of(stream)
            kernel = FakeKernel(name, queue.name, merged(reads), merged(writes), run)
            if queue.capture is not None:
                queue.capture.add_kernel(queue, kernel)
            else:
                self.enqueue(queue, kernel)

    def enqueue(self, queue: Queue, kernel: FakeKernel) -> None:
        """Queue a kernel, and note the kernels that it races with."""
        for other in self._unordered:
            if queue.clock.get(other.queue, 0) < other.index and (meeting := other.conflict(kernel)):
                self.races.append(Race(other, kernel, *meeting))
        queue.clock[queue.number] = kernel.index = queue.clock.get(queue.number, 0) + 1
        kernel.queue, kernel.serial = queue.number, next(self._serials)
        self._unordered.append(kernel)
        queue.pending.append(kernel)

    def record(self, stream: FakeStream) -> FakeEvent:
        """Return an event behind all work queued on `stream` so far."""
        with self.lock:
            queue = self.queue_of(stream)
            return queue.event() if queue.capture is None else queue.capture.add_event(queue)

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        """Let work queued on `stream` from now on wait for `event`; the host goes on.

        A stream that waits for an event of a capture joins the capture.

        Raises
        ------
        FakeCaptureError
            The event was recorded in a capture that is over, or not in the one that the stream belongs to.
        """
        with self.lock:
            queue = self.queue_of(stream)
            capture = queue.capture or event.capture
            if capture is None:
                queue.add_wait(event)
            else:
                capture.add_wait(queue, event)

    # -- time ---------------------------------------------------------------------------------------------------

    @property
    def n_pending(self) -> int:
        """Kernels that have not run."""
        return sum(isinstance(one, FakeKernel) for queue in self._queues for one in queue.pending)

    def run(
        self, schedule: Iterable[int] | Callable[[Sequence[FakeKernel]], FakeKernel | None] | None = None
    ) -> None:
        """Run pending kernels, as the device does by itself at any time; the host learns nothing from it.

        Parameters
        ----------
        schedule : sequence of int, or callable, optional
            Which of the kernels that could be next runs, those launched last coming first in the list. Each integer
            picks one, modulo their number, and when there are no integers left the others stay pending. A function
            is given the list and returns one of it, or None to stop. By default the first of the list runs, until
            nothing is left.
        """
        choices = None if schedule is None or callable(schedule) else iter(schedule)
        with self.lock:
            while ready := self._ready():
                kernel: FakeKernel | None = ready[0]
                if choices is not None:
                    choice = next(choices, None)
                    kernel = None if choice is None else ready[choice % len(ready)]
                elif callable(schedule):
                    kernel = schedule(ready)
                if kernel is None:
                    return
                self._queues[kernel.queue].step()

    def _ready(self) -> list[FakeKernel]:
        """Return the kernels that wait for nothing, the latest first."""
        settled = False
        while not settled:  # a wait that is over may be the last thing before another event
            settled = True
            for queue in self._queues:
                while queue.pending and isinstance(head := queue.pending[0], FakeEvent) and head.done:
                    queue.step()
                    settled = False
        heads = [queue.pending[0] for queue in self._queues if queue.pending]
        return sorted((one for one in heads if isinstance(one, FakeKernel)), key=lambda one: -one.serial)

    def synchronize(self, stream: FakeStream | None = None) -> None:
        """Let the host wait for the work queued on `stream`, or on the whole device; nothing else runs.

        Raises
        ------
        FakeCaptureError
            `stream` is being captured, or any stream is and the whole device was meant. The capture is invalid.
        """
        with self.lock:
            if stream is None and self._captures:
                message = "the host cannot wait for the device while a stream of it is captured"
                for capture in self._captures:
                    capture.reason = capture.reason or message
                raise FakeCaptureError(message)
            queues = self._queues if stream is None else [self.queue_of(stream)]
            for queue in queues:
                if queue.capture is not None:
                    queue.capture.refuse(f"the host cannot wait for {queue.name!r} while it is captured")
                self._run_up_to(queue.event())
                join(self._host, queue.clock)
            self._unordered = [one for one in self._unordered if self._host.get(one.queue, 0) < one.index]

    def _run_up_to(self, event: FakeEvent) -> None:
        """Run what comes before `event`, and no more."""
        stack = [event]  # no recursion: two streams may wait for each other thousands of times
        while stack:
            queue = stack[-1].queue
            if stack[-1].done:
                stack.pop()
            elif isinstance(head := queue.pending[0], FakeEvent) and not head.done:
                stack.append(head)
            else:
                queue.step()

    def host_read(self, run: Callable[[], Any], *, reads: Iterable[tuple[int, int]]) -> Any:
        """Return what `run` does in the order of the current stream, for which the host waits.

        Raises
        ------
        FakeCaptureError
            The current stream is being captured; the capture is invalid.
        """
        results: list[Any] = []
        stream = self.current_stream()
        with self.lock:
            if (capture := self.queue_of(stream).capture) is not None:
                capture.refuse("the host cannot read memory in the order of a stream that is captured")
            self.launch(stream, reads=reads, run=lambda: results.append(run()), name="host read")
            self.synchronize(stream)
        return results[0]

    # -- capture ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def capture(self, stream: FakeStream) -> Iterator[FakeGraph]:
        """Record into a graph what is launched on `stream` inside the block, where it is the current stream.

        Nothing of it is queued before `FakeGraph.replay`. A stream joins when it waits for an event recorded in the
        capture, and `stream` has to wait for its work before the block ends.

        Raises
        ------
        FakeCaptureError
            The stream is being captured already; at the end of the block, when something illegal was done in it or
            a stream that joined has work that `stream` does not wait for. The graph is invalid then, as it is when
            any exception leaves the block.
        """
        with self.lock:
            queue = self.queue_of(stream)
            if queue.capture is not None:
                queue.capture.refuse(f"{queue.name!r} is being captured already")
            capture = Capture(self, queue)
            self._captures.append(capture)
        try:
            with self.use(stream):
                yield capture.graph
        except BaseException as error:
            capture.reason = capture.reason or f"{type(error).__name__} in the capture"
            raise
        finally:
            with self.lock:
                self._captures.remove(capture)
                capture.close()
        if capture.reason is not None:
            raise FakeCaptureError(f"the capture is invalid: {capture.reason}")

    def is_capturing(self, stream: FakeStream) -> bool:
        """Return whether work on `stream` goes into a graph, valid or not."""
        return self.queue_of(stream).capture is not None
