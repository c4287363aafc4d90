"""What `CupyStreams` does without a driver: CuPy's own objects where they need none, stand-ins where they do."""

from __future__ import annotations

import gc
import warnings
import weakref

import pytest

cupy = pytest.importorskip("cupy")

from gpuarena.backends.cupy_streams import CupyStreams  # noqa: E402
from gpuarena.errors import ArgumentTypeError, DeviceMismatchError  # noqa: E402


class Foreign:
    """A stream of another library."""

    def __init__(self, handle, **attributes):
        self._handle = handle
        self.__dict__.update(attributes)

    def __cuda_stream__(self):
        return 0, self._handle


class Recorder:
    """Stands in for a `cupy.cuda.Stream` and the driver: notes what was called on which device."""

    def __init__(self, monkeypatch):
        self.calls = []
        self.on_device = 0
        self.capturing = False
        recorder = self

        class Device:
            def __init__(self, device_id):
                self.id = device_id

            def __enter__(self):
                self.before, recorder.on_device = recorder.on_device, self.id

            def __exit__(self, *error):
                recorder.on_device = self.before

            def synchronize(self):
                recorder.calls.append(("synchronize device", self.id))

        monkeypatch.setattr(cupy.cuda, "Device", Device)
        monkeypatch.setattr(cupy.cuda, "Event", lambda **options: options)

    def note(self, *call):
        self.calls.append((*call, self.on_device))

    def record(self, event):
        self.note("record", event["disable_timing"])
        return event

    def wait_event(self, event):
        self.note("wait", event)

    def synchronize(self):
        self.note("synchronize")

    def is_capturing(self):
        self.note("is_capturing")
        if isinstance(self.capturing, Exception):
            raise self.capturing
        return self.capturing


@pytest.fixture
def streams():
    return CupyStreams(1)


@pytest.fixture
def recorder(monkeypatch):
    return Recorder(monkeypatch)


def test_the_current_stream_is_that_of_the_device(streams, monkeypatch):
    monkeypatch.setattr(cupy.cuda, "get_current_stream", {1: "its stream"}.__getitem__)
    assert streams.current() == "its stream"


def test_cupys_own_streams_are_taken_as_they_are(streams):
    for stream in (cupy.cuda.Stream.null, cupy.cuda.Stream.ptds, cupy.cuda.Stream.from_external(Foreign(64))):
        assert streams.parse(stream) is stream


def test_handles_and_foreign_streams_become_cupys(streams):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of ExternalStream, from CuPy 14 on
        external = cupy.cuda.ExternalStream(64, 1)
    for stream in (64, Foreign(64), Foreign(64, device_index=1), external):
        parsed = streams.parse(stream)
        assert isinstance(parsed, cupy.cuda.Stream)
        assert parsed.ptr == 64
        assert streams.key(parsed) == (1, 64)


def test_a_foreign_stream_lives_as_long_as_the_one_made_of_it(streams):
    foreign = Foreign(64)
    alive = weakref.ref(foreign)
    parsed = streams.parse(foreign)
    del foreign
    gc.collect()
    assert alive() is not None
    del parsed  # and CuPy does not destroy it, which would fail here without a driver
    gc.collect()
    assert alive() is None


def test_streams_of_another_device_are_refused(streams):
    own = cupy.cuda.Stream.from_external(Foreign(64))
    own.device_id = 0
    for stream in (own, Foreign(64, device_id=0), Foreign(64, device_index=0)):
        with pytest.raises(DeviceMismatchError, match="device 0"):
            streams.parse(stream)


@pytest.mark.parametrize("wrong", [None, "null", True, -5, 1.5], ids=str)
def test_what_is_no_stream_is_refused(streams, wrong):
    with pytest.raises(ArgumentTypeError):
        streams.parse(wrong)


def test_the_default_stream_has_one_key_whatever_it_is_called(streams):
    keys = {streams.key(streams.parse(stream)) for stream in (0, 1, cupy.cuda.Stream.null, Foreign(1))}
    assert keys == {(1, 0)}


def test_only_the_per_thread_stream_is_bound_to_its_thread(streams):
    assert streams.is_thread_bound(cupy.cuda.Stream.ptds)
    assert streams.is_thread_bound(streams.parse(2))
    assert streams.key(streams.parse(2)) == streams.key(cupy.cuda.Stream.ptds)
    assert len(streams.key(cupy.cuda.Stream.ptds)) == 3
    assert not any(streams.is_thread_bound(stream) for stream in (cupy.cuda.Stream.null, streams.parse(64)))


def test_work_is_queued_and_waited_for_on_the_device(recorder, streams):
    event = streams.record(recorder)
    streams.wait(recorder, event)
    streams.synchronize(recorder)
    streams.synchronize_device()
    assert recorder.calls == [
        ("record", True, 1),
        ("wait", event, 1),
        ("synchronize", 1),
        ("synchronize device", 1),
    ]
    assert streams.record(recorder) is not event
    assert recorder.on_device == 0


def test_a_stream_is_captured_while_its_capture_is_invalid_or_would_become_so(recorder, streams):
    implicit = cupy.cuda.runtime.CUDARuntimeError(906)
    assert "StreamCaptureImplicit" in str(implicit)
    invalid = RuntimeError("the stream was capturing, but an error has invalidated the capture sequence")
    for recorder.capturing, expected in ((False, False), (True, True), (implicit, True), (invalid, True)):
        assert streams.is_capturing(recorder) is expected
    assert set(recorder.calls) == {("is_capturing", 1)}
    recorder.capturing = cupy.cuda.runtime.CUDARuntimeError(400)
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="InvalidResourceHandle"):
        streams.is_capturing(recorder)
    assert recorder.on_device == 0
