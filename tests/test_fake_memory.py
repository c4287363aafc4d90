"""The memory of a fake device with streams: written late, read by waiting."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gpuarena import as_dtype
from gpuarena.errors import OutOfMemoryError, ShapeError
from gpuarena.testing import FakeDevice
from gpuarena.testing.strategies import indices
from gpuarena.testing.streams import FakeCaptureError, StreamedFakeDevice, byte_ranges


@pytest.fixture
def device():
    return StreamedFakeDevice()


@pytest.fixture
def backend(device):
    backend = device(64, alignment=64)
    memory(backend)[:] = 0
    return backend


def memory(backend, dtype="uint8"):
    """All bytes as they are, not as they will be."""
    dtype = as_dtype(dtype)
    return backend.root(0, (backend.nbytes // dtype.itemsize,), dtype)


def test_it_is_a_fake_device_too():
    device = StreamedFakeDevice(10_000, skew=64, index=3)
    backend = device(100, device="any", alignment=32)
    assert isinstance(device, FakeDevice)
    assert backend.address % 4096 == 64
    assert (backend.device, backend.name, backend.survives_fork) == ("fake:3", "host", False)
    assert (device.n_allocated, device.n_freed) == (1, 0)
    with pytest.raises(OutOfMemoryError):
        device(10_000)
    backend.release()
    assert (device.n_released, device.n_freed) == (1, 1)


def test_writes_are_late_and_in_the_order_of_the_current_stream(device, backend):
    x = memory(backend)
    side = device.stream("side")
    with device.use(side):
        backend.write(x[:4], [1, 2, 3, 4])
        backend.fill_bytes(2, 6, 9)
    backend.write_bytes(60, np.uint8([5, 6]))
    assert not x.any()
    assert device.n_pending == 3
    device.synchronize(side)
    assert x.tolist() == [1, 2, 9, 9, 9, 9] + [0] * 58
    device.synchronize()
    assert x[60:].tolist() == [5, 6, 0, 0]
    assert device.races == []


def test_host_values_are_taken_when_the_write_is_queued(device, backend):
    x, values = memory(backend), np.uint8([1, 2])
    backend.write(x[:2], values)
    backend.write_bytes(2, values)
    values[:] = 7
    device.synchronize()
    assert x[:4].tolist() == [1, 2, 1, 2]


def test_device_values_are_read_when_the_write_runs(device, backend):
    x = memory(backend)
    backend.fill_bytes(0, 2, 5)
    backend.write(x[8:10], x[:2])
    with device.use(device.stream("side")):
        backend.fill_bytes(0, 1, 6)
    assert [(race.first.name, race.second.name) for race in device.races] == [
        ("fill_bytes", "fill_bytes"),
        ("write", "fill_bytes"),
    ]
    device.synchronize(device.default_stream)
    assert x[8:10].tolist() == [5, 5]


def test_what_cannot_be_written_raises_and_queues_nothing(device, backend):
    x = memory(backend)
    with pytest.raises(ShapeError):
        backend.write(x[:4], [1, 2, 3])
    with pytest.raises(ValueError, match="invalid literal"):
        backend.write(x[:2], np.array(["1", "no"]))
    with pytest.raises(OverflowError):
        backend.write(x[:1], [300])
    assert device.n_pending == 0
    backend.write(x[:4].reshape(2, 2), np.array([[[1], [2]]]))  # broadcasts, as NumPy assigns
    device.synchronize()
    assert x[:4].tolist() == [1, 1, 2, 2]


def test_reading_on_the_host_waits_for_the_current_stream_only(device, backend):
    side = device.stream("side")
    with device.use(side):
        backend.fill_bytes(0, 4, 3)
    backend.fill_bytes(4, 8, 4)
    assert backend.find_other(4, 8, 4) is None
    assert backend.read_bytes(0, 8).tolist() == [0] * 4 + [4] * 4
    assert [race.second.name for race in device.races] == ["host read"]
    with device.use(side):
        assert backend.find_other(0, 8, 3) == 4
    copy = backend.read_bytes(0, 4)
    backend.fill_bytes(0, 4, 8)
    device.synchronize()
    assert copy.tolist() == [3] * 4
    assert len(device.races) == 1, "the host has waited for side"


def test_strided_writes_race_by_the_bytes_they_touch(device, backend):
    x = memory(backend, "uint16").reshape(4, 8)
    with device.use(device.stream("side")):
        backend.write(x[:, ::2], 1)
    backend.write(x[:, 1::2], 2)
    assert device.races == []
    backend.write(x[3], 3)
    assert len(device.races) == 1
    device.run()
    device.synchronize()
    assert x[0].tolist() == [1, 2] * 4


def test_a_queued_write_outlives_the_backend(device, backend):
    x = memory(backend)
    backend.fill_bytes(0, 4, 3)
    backend.release()
    device.synchronize()
    assert x[:5].tolist() == [3, 3, 3, 3, 0]


def test_reading_in_a_capture_is_refused(device, backend):
    with pytest.raises(FakeCaptureError, match="cannot read memory"), device.capture(device.stream("side")):
        backend.read_bytes(0, 2)
    assert device.n_pending == 0


def test_a_replay_writes_to_the_captured_addresses(device, backend):
    x = memory(backend)
    with device.capture(device.stream("side")) as graph:
        backend.write(x[:2], [1, 2])
    for _ in range(2):
        x[:] = 0
        graph.replay(device.default_stream)
        device.synchronize()
        assert x[:3].tolist() == [1, 2, 0]


def test_arenas_of_one_device_share_its_streams(device):
    one, two = device(64), device(64)
    one.fill_bytes(0, 64, 1)
    with device.use(device.stream("side")):
        two.fill_bytes(0, 64, 1)
    assert device.races == []
    assert device.holds(memory(one))
    assert not device.holds(np.zeros(3))
    assert not StreamedFakeDevice().holds(memory(one))


@given(data=st.data(), shape=hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
def test_byte_ranges_are_the_bytes_of_the_elements(data, shape):
    array = np.zeros(shape, data.draw(st.sampled_from(["uint8", "int16", "complex64"])))
    array = np.asarray(array[data.draw(indices(shape))])
    array = array.transpose(data.draw(st.permutations(range(array.ndim))))
    if data.draw(st.booleans()):
        array = np.broadcast_to(array, (2, *array.shape))
    expected = set()
    for index in np.ndindex(array.shape):
        start = array.ctypes.data + sum(i * stride for i, stride in zip(index, array.strides, strict=True))
        expected.update(range(start, start + array.itemsize))
    ranges = byte_ranges(array)
    assert {byte for start, stop in ranges for byte in range(start, stop)} == expected
    if array.flags.c_contiguous and array.size:
        assert len(ranges) == 1
