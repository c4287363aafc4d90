"""What `TorchStreams` asks of ``torch.cuda``, with stand-ins for it; tests/gpu has the real thing."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest

torch = pytest.importorskip("torch")

from gpuarena.backends.torch_streams import TorchStreams  # noqa: E402
from gpuarena.errors import ArgumentTypeError, DeviceMismatchError  # noqa: E402


class Stream:
    """Stands in for ``torch.cuda.Stream``; two objects of one handle are equal."""

    def __init__(self, cuda_stream, device=1):
        self.cuda_stream = cuda_stream
        self.device_index = device
        self.device = torch.device("cuda", device)

    def __eq__(self, other):
        return self.cuda_stream == other.cuda_stream

    __hash__ = None

    def __cuda_stream__(self):
        return 0, self.cuda_stream


class External(Stream):
    def __init__(self, cuda_stream, device):
        assert cuda_stream, "ExternalStream(0) makes a new stream"
        super().__init__(cuda_stream, device)


class Cuda:
    """Stands in for a driver: notes what was called on which device."""

    def __init__(self, monkeypatch):
        self.calls = []
        self.on_device = 0
        self.stream = Stream(0)
        self.capturing = set()
        names = {
            "Stream": Stream,
            "ExternalStream": External,
            "Event": self.event,
            "device": self.device,
            "stream": self.use,
            "current_device": lambda: 1,
            "current_stream": self.current,
            "default_stream": lambda device: Stream(0, device),
            "is_current_stream_capturing": self.is_capturing,
            "synchronize": lambda device: self.calls.append(("synchronize device", device)),
        }
        for name, value in names.items():  # fails for names that torch does not have
            monkeypatch.setattr(torch.cuda, name, value)
        own = {
            "synchronize": lambda stream: self.note("synchronize", stream),
            "wait_event": lambda stream, event: self.note("wait", stream, event),
        }
        for name, value in own.items():
            monkeypatch.setattr(Stream, name, value, raising=False)

    def note(self, what, stream, *rest):
        self.calls.append((what, stream.cuda_stream, self.on_device, *rest))

    def event(self):
        return type("Event", (), {"record": lambda event, stream: self.note("record", stream, event)})()

    @contextlib.contextmanager
    def device(self, index):
        before, self.on_device = self.on_device, index
        yield
        self.on_device = before

    @contextlib.contextmanager
    def use(self, stream):
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def current(self, device):
        assert device == 1
        return Stream(self.stream.cuda_stream)

    def is_capturing(self):
        assert self.on_device == 1
        if self.capturing == {"implicit"}:
            error = torch.AcceleratorError("capture of a stream that the default stream waits for")
            error.error_code = 906  # cudaErrorStreamCaptureImplicit
            raise error
        if self.capturing == {"broken"}:
            raise torch.AcceleratorError("device-side assert")
        return self.stream.cuda_stream in self.capturing


@pytest.fixture
def cuda(monkeypatch):
    return Cuda(monkeypatch)


@pytest.fixture
def streams(cuda):
    return TorchStreams(torch.device("cuda", 1))


def test_a_device_without_an_index_is_the_current_one(cuda):
    assert TorchStreams(torch.device("cuda")).key(Stream(16)) == (1, 16)


def test_the_current_stream_is_that_of_the_device(cuda, streams):
    with cuda.use(Stream(16)):
        assert streams.key(streams.current()) == (1, 16)


def test_torchs_own_streams_are_taken_as_they_are(streams):
    stream = Stream(16)
    assert streams.parse(stream) is stream


def test_handles_become_external_streams(streams):
    parsed = streams.parse(4096)
    assert isinstance(parsed, External)
    assert (parsed.cuda_stream, parsed.device_index) == (4096, 1)


@pytest.mark.parametrize("handle", [0, 1])
def test_the_handles_of_the_default_stream_become_no_external_stream(streams, handle):
    parsed = streams.parse(handle)
    assert type(parsed) is Stream
    assert streams.key(parsed) == streams.key(streams.current())


def test_a_foreign_stream_lives_as_long_as_the_one_made_of_it(streams):
    class Foreign:
        device_id = 1

        def __cuda_stream__(self):
            return 0, 64

    foreign = Foreign()
    alive = weakref.ref(foreign)
    parsed = streams.parse(foreign)
    del foreign
    gc.collect()
    assert alive() is not None
    assert streams.key(parsed) == (1, 64)
    del parsed
    gc.collect()
    assert alive() is None


def test_streams_of_another_device_are_refused(streams):
    class Foreign:
        device_id = 0

        def __cuda_stream__(self):
            return 0, 64

    for stream in (Stream(16, device=0), Foreign(), torch.Stream("cpu")):
        with pytest.raises(DeviceMismatchError):
            streams.parse(stream)


@pytest.mark.parametrize("wrong", [None, "cuda:1", True, -5, 1.5, torch.device("cuda", 1)], ids=str)
def test_what_is_no_stream_is_refused(streams, wrong):
    with pytest.raises(ArgumentTypeError):
        streams.parse(wrong)


def test_only_the_per_thread_stream_is_bound_to_its_thread(streams):
    bound = streams.parse(2)
    assert streams.is_thread_bound(bound)
    assert len(streams.key(bound)) == 3
    assert not any(streams.is_thread_bound(stream) for stream in (Stream(0), Stream(16), streams.parse(1)))


def test_work_is_queued_and_waited_for_on_the_device(cuda, streams):
    event = streams.record(Stream(16))
    streams.wait(Stream(32), event)
    streams.synchronize(Stream(16))
    streams.synchronize_device()
    assert cuda.calls == [
        ("record", 16, 1, event),
        ("wait", 32, 1, event),
        ("synchronize", 16, 1),
        ("synchronize device", 1),
    ]
    assert streams.record(Stream(16)) is not event
    assert cuda.on_device == 0


def test_capture_is_asked_of_the_stream_and_not_of_the_current_one(cuda, streams):
    cuda.capturing = {16}
    assert streams.is_capturing(Stream(16))
    assert not streams.is_capturing(Stream(0))
    with cuda.use(Stream(16)):
        assert streams.is_capturing(Stream(16))
        assert not streams.is_capturing(Stream(32))
        assert cuda.stream.cuda_stream == 16


def test_a_stream_that_would_break_a_capture_counts_as_captured(cuda, streams):
    cuda.capturing = {"implicit"}
    assert streams.is_capturing(Stream(0))
    cuda.capturing = {"broken"}
    with pytest.raises(torch.AcceleratorError):
        streams.is_capturing(Stream(0))
