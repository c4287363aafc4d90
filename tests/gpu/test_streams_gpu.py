"""Streams, events and captures of torch and CuPy as the arena uses them, on a GPU.

With GPUARENA_FAKE_GPU=1 the simulated device stands in for both, to check the tests themselves.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from typing import Any

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.gpu

from shared_core.case import FAKE_GPU  # noqa: E402

from gpuarena import as_dtype  # noqa: E402
from gpuarena.backends.torch_streams import TorchStreams  # noqa: E402
from gpuarena.errors import ArgumentTypeError, DeviceMismatchError  # noqa: E402
from gpuarena.testing.streams import FakeStreams, StreamedFakeDevice  # noqa: E402

if not (FAKE_GPU or torch.cuda.is_available()):
    pytest.skip("torch finds no CUDA device", allow_module_level=True)

#: Clock cycles that a kernel spins: about a quarter of a second, long enough for the host to get ahead.
SPIN = 500_000_000


class Torch:
    """What the tests need of torch."""

    def __init__(self):
        self.streams: Any = TorchStreams(torch.device("cuda", torch.cuda.current_device()))
        self.default = torch.cuda.default_stream()

    def stream(self):
        return torch.cuda.Stream()

    def use(self, stream):
        return torch.cuda.stream(stream)

    def handle(self, stream):
        return stream.cuda_stream

    def zeros(self):
        array = torch.zeros(1 << 20, dtype=torch.int32, device="cuda")
        torch.cuda.synchronize()
        return array

    def fill(self, array, value, stream, *, late=False):
        with torch.cuda.stream(stream):
            if late:
                torch.cuda._sleep(SPIN)
            array.fill_(value)

    def copy(self, array, out, stream):
        with torch.cuda.stream(stream):
            out.copy_(array)

    def values(self, array):
        return set(array.unique().tolist())

    def done(self, event):
        return event.query()

    @contextlib.contextmanager
    def capture(self, stream):
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
            yield


class Cupy:
    """What the tests need of CuPy."""

    def __init__(self):
        import cupy

        from gpuarena.backends.cupy_streams import CupyStreams

        self.cupy = cupy
        self.streams: Any = CupyStreams(cupy.cuda.runtime.getDevice())
        self.default = cupy.cuda.Stream.null
        self.spin = cupy.RawKernel(
            'extern "C" __global__ void spin(long long n) {'
            "long long start = clock64(); while (clock64() - start < n) {} }",
            "spin",
        )

    def stream(self):
        return self.cupy.cuda.Stream(non_blocking=True)

    def use(self, stream):
        return stream

    def handle(self, stream):
        return stream.ptr

    def zeros(self):
        array = self.cupy.zeros(1 << 20, "int32")
        self.cupy.cuda.Device().synchronize()
        return array

    def fill(self, array, value, stream, *, late=False):
        with stream:
            if late:
                self.spin((1,), (1,), (self.cupy.int64(SPIN),))
            array.fill(value)

    def copy(self, array, out, stream):
        with stream:
            out[...] = array

    def values(self, array):
        return set(self.cupy.unique(array).tolist())

    def done(self, event):
        return event.done

    @contextlib.contextmanager
    def capture(self, stream):
        with stream:
            stream.begin_capture()
            try:
                yield
            finally:
                stream.end_capture()


class Fake:
    """What the tests need, of a device that is not there."""

    def __init__(self):
        self.device = StreamedFakeDevice()
        self.backend = self.device(4096)
        self.streams: Any = FakeStreams(self.device)
        self.default = self.device.default_stream
        self.n_arrays = 0

    def stream(self):
        return self.device.stream("side")

    def use(self, stream):
        return self.device.use(stream)

    def handle(self, stream):
        return stream.handle

    def zeros(self):
        array = self.backend.root(16 * self.n_arrays, (4,), as_dtype("int32"))
        self.n_arrays += 1
        array[...] = 0
        return array

    def fill(self, array, value, stream, *, late=False):
        with self.device.use(stream):
            self.backend.write(array, value)

    def copy(self, array, out, stream):
        self.fill(out, array, stream)

    def values(self, array):
        self.device.synchronize(self.default)
        return set(array.tolist())

    def done(self, event):
        return event.done

    def capture(self, stream):
        return self.device.capture(stream)


@dataclass
class Foreign:
    """A stream of neither library."""

    handle: int

    def __cuda_stream__(self):
        return 0, self.handle


@pytest.fixture(scope="module", params=["fake"] if FAKE_GPU else ["torch", "cupy"])
def library(request):
    if FAKE_GPU:
        return warmed_up(Fake())
    if request.param == "torch":
        return warmed_up(Torch())
    cupy_on_a_gpu()
    return warmed_up(Cupy())


def cupy_on_a_gpu():
    """Return CuPy, or skip."""
    cupy = pytest.importorskip("cupy")
    if FAKE_GPU or not cupy.is_available():
        pytest.skip("CuPy finds no CUDA device")
    return cupy


def warmed_up(library):
    """Run every kernel once: to compile or load one takes longer than `SPIN`, and may wait for the device."""
    x, y = library.zeros(), library.zeros()
    library.fill(x, 1, library.default, late=True)
    library.copy(x, y, library.default)
    assert library.values(y) == {1}
    return library


@pytest.fixture
def streams(library):
    return library.streams


def in_thread(function, *args):
    results = []
    thread = threading.Thread(target=lambda: results.append(function(*args)))
    thread.start()
    thread.join()
    return results[0]


def test_the_current_stream_is_that_of_the_library(library, streams):
    side = library.stream()
    assert streams.key(streams.current()) == streams.key(library.default)
    with library.use(side):
        assert streams.key(streams.current()) == streams.key(side) != streams.key(library.default)
        assert in_thread(lambda: streams.key(streams.current())) == streams.key(library.default)


def test_streams_are_parsed_from_handles_and_by_the_protocol(library, streams):
    side = library.stream()
    assert streams.parse(side) is side
    for stream in (library.handle(side), Foreign(library.handle(side))):
        parsed = streams.parse(stream)
        assert streams.key(parsed) == streams.key(side)
        streams.synchronize(parsed)
    for handle in (0, 1):
        assert streams.key(streams.parse(handle)) == streams.key(library.default)
    for wrong in (None, "side", True, 1.5):
        with pytest.raises(ArgumentTypeError):
            streams.parse(wrong)


def test_streams_are_taken_from_the_other_library():
    cupy_on_a_gpu()
    ours, theirs = Torch(), Cupy()
    for one, other in ((ours, theirs), (theirs, ours)):
        stream = other.stream()
        parsed = one.streams.parse(stream)
        assert one.handle(parsed) == other.handle(stream)
        del stream, parsed  # the stream is destroyed at most once
    x = ours.zeros()
    side = theirs.stream()
    parsed = ours.streams.parse(side)
    ours.fill(x, 3, parsed, late=True)
    ours.streams.wait(ours.default, ours.streams.record(parsed))
    assert ours.values(x) == {3}


def test_a_generic_stream_is_taken_as_one_of_cuda(library, streams):
    if not isinstance(library, Torch):
        pytest.skip("only torch has them")
    side = torch.cuda.Stream()
    generic = torch.Stream(
        stream_id=side.stream_id, device_index=side.device_index, device_type=side.device_type
    )
    assert streams.key(streams.parse(generic)) == streams.key(side)


def test_a_stream_of_another_device_is_refused(library, streams):
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one device")
    with torch.cuda.device(1):
        stream = torch.cuda.Stream()
    with pytest.raises(DeviceMismatchError):
        streams.parse(stream)


def test_a_stream_waits_for_an_event_and_the_host_does_not(library, streams):
    x, y = library.zeros(), library.zeros()
    side = library.stream()
    library.fill(x, 1, side, late=True)
    event = streams.record(side)
    streams.wait(library.default, event)
    assert not library.done(event), "the host waited"
    library.copy(x, y, library.default)
    assert library.values(y) == {1}


def test_an_event_covers_what_was_queued_before_it_only(library, streams):
    x = library.zeros()
    side, other = library.stream(), library.stream()
    library.fill(x, 1, side)
    event = streams.record(side)
    library.fill(x, 2, side, late=True)
    late = streams.record(side)
    streams.wait(other, event)
    streams.synchronize(other)
    assert library.done(event)
    assert not library.done(late)
    streams.synchronize(side)
    assert library.done(late)


def test_the_host_waits_for_the_device(library, streams):
    x = library.zeros()
    events = []
    for value in (1, 2):
        side = library.stream()
        library.fill(x, value, side, late=True)
        events.append(streams.record(side))
    streams.synchronize_device()
    assert all(library.done(event) for event in events)


def test_the_per_thread_stream_is_another_in_every_thread(library, streams):
    bound = streams.parse(2)
    assert streams.is_thread_bound(bound)
    assert not streams.is_thread_bound(library.stream())
    assert not streams.is_thread_bound(library.default)
    keys = [streams.key(bound)] + [in_thread(streams.key, bound) for _ in range(3)]
    assert len(set(keys)) == 4
    x = library.zeros()
    library.fill(x, 1, bound, late=True)
    here = streams.record(bound)

    def record_and_wait():
        event = streams.record(bound)
        streams.synchronize(bound)
        return event

    assert library.done(in_thread(record_and_wait))
    assert not library.done(here), "the other thread has waited for its own stream"
    streams.synchronize(bound)
    assert library.done(here)


def test_a_capture_is_seen_on_its_stream_and_no_other(library, streams):
    x = library.zeros()
    side, other = library.stream(), library.stream()
    with library.capture(side):
        library.fill(x, 7, side)
        assert streams.is_capturing(side)
        assert not streams.is_capturing(other)
    assert not streams.is_capturing(side)
    assert library.values(x) == {0}


def test_a_stream_joins_a_capture_by_waiting(library, streams):
    x = library.zeros()
    side, other = library.stream(), library.stream()
    with library.capture(side):
        streams.wait(other, streams.record(side))
        assert streams.is_capturing(other)
        library.fill(x, 7, other)
        streams.wait(side, streams.record(other))
    assert not streams.is_capturing(other)


def test_the_default_stream_counts_as_captured_where_it_would_break_the_capture():
    cupy = cupy_on_a_gpu()
    from gpuarena.backends.cupy_streams import CupyStreams

    torch_streams, torch_default = TorchStreams(torch.device("cuda", 0)), torch.cuda.default_stream(0)
    cupy_streams, cupy_default = CupyStreams(0), cupy.cuda.Stream.null
    with cupy.cuda.Device(0):
        blocking = cupy.cuda.Stream()  # one that the default stream waits for
        blocking.begin_capture()
        try:
            assert torch_streams.is_capturing(torch_default)
            assert cupy_streams.is_capturing(cupy_default)
            assert cupy_streams.is_capturing(blocking)
        finally:
            blocking.end_capture()
    assert not torch_streams.is_capturing(torch_default)
    assert not cupy_streams.is_capturing(cupy_default)
    torch.zeros(4, device="cuda").sum().item()  # no error was left behind
    cupy.zeros(4).sum().item()
