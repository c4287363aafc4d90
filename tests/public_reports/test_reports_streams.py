"""What allocators were reported for around streams and graphs, on a simulated device that finds races."""

from __future__ import annotations

import threading

import pytest

from gpuarena import Arena
from gpuarena.errors import CaptureError, DeviceMismatchError, PinnedError
from gpuarena.testing.streams import StreamedFakeDevice, byte_ranges


@pytest.fixture
def device():
    return StreamedFakeDevice()


@pytest.fixture
def arena(device):
    return Arena(4096, backend=device)


def use(device, stream, region, name="use", value=None):
    """Launch a kernel that writes `value` to a region, or reads it."""
    array = region.array
    if value is None:
        device.launch(stream, reads=byte_ranges(array), name=name)
    else:
        device.launch(stream, writes=byte_ranges(array), run=lambda: array.fill(value), name=name)


# pytorch/pytorch#188655: a communication stream still reads memory that is handed out again, and gets wrong data
def test_pytorch_pytorch_188655_the_next_owner_waits_for_a_declared_stream(device, arena):
    side = device.stream("nccl")
    for step in range(3):
        with arena.scope():
            region = arena.alloc(100, "uint8", fill=step)
            region.record_stream(side)
            use(device, side, region, "all_reduce", value=100 + step)
    result = arena.alloc(100, "uint8", fill=7)
    assert device.races == []
    device.synchronize()
    assert set(result.array.tolist()) == {7}


# meta-pytorch/torchrec#4231: the same with a copy stream that nobody has told the allocator of
def test_meta_pytorch_torchrec_4231_the_simulated_device_finds_a_stream_that_was_not_declared(device, arena):
    side = device.stream("copy")
    with arena.scope():
        region = arena.alloc(100, "uint8")
        use(device, side, region, "copy")
    arena.alloc(100, "uint8", fill=7)
    (race,) = device.races
    assert {race.first.stream, race.second.stream} == {"copy", "default"}


# pytorch/pytorch#149802: a pool of one device is used on another, and an internal assertion fails
def test_pytorch_pytorch_149802_a_stream_of_another_device_is_refused(device, arena):
    other = StreamedFakeDevice(index=1)
    region = arena.alloc(4, "uint8")
    with pytest.raises(DeviceMismatchError, match="another device"):
        region.record_stream(other.stream("side"))
    with pytest.raises(DeviceMismatchError):
        Arena(4096, backend=device, stream=other.default_stream)
    with arena.scope():
        arena.alloc(4, "uint8", fill=1)
    assert device.races == []


# rapidsai/rmm#2489: after waiting for a second stream the event is not recorded again, and a third gets ahead
def test_rapidsai_rmm_2489_a_third_stream_waits_for_the_second(device, arena):
    b, c = device.stream("b"), device.stream("c")
    with arena.scope():
        first = arena.alloc(100, "uint8")
        first.record_stream(b)
        use(device, b, first, "b writes", value=1)
    second = arena.alloc(100, "uint8")
    assert second.address == first.address
    second.record_stream(c)
    use(device, c, second, "c writes", value=2)
    assert device.races == []
    device.run(lambda ready: next((one for one in ready if one.stream == "c"), ready[0]))
    assert set(second.array.tolist()) == {2}


# NVIDIA/cccl#878: the per-thread default stream has one handle and is another stream in every thread
def test_nvidia_cccl_878_the_per_thread_stream_counts_once_for_every_thread(device, arena):
    def work(region, value):
        region.record_stream(2)  # cudaStreamPerThread
        use(device, device.per_thread_stream, region, f"thread {value}", value=value)

    with arena.scope():
        regions = [arena.alloc(100, "uint8") for _ in range(3)]
        for value in (0, 1):
            thread = threading.Thread(target=work, args=(regions[value], value))
            thread.start()
            thread.join()
        work(regions[2], 2)
    arena.alloc(1000, "uint8", fill=7)
    assert device.races == []


# pytorch/pytorch#190308: the private pool of a capture that failed is never freed
@pytest.mark.parametrize("explicit", [False, True])
def test_pytorch_pytorch_190308_a_capture_that_failed_keeps_nothing(device, arena, explicit):
    start = arena.checkpoint()

    def capture():
        with device.capture(device.stream("main")):
            if explicit:
                with arena.pin("graph"):
                    arena.alloc(1000, "uint8", fill=1)
                    raise KeyError
            arena.alloc(1000, "uint8", fill=1)
            raise KeyError

    for _ in range(20):
        with pytest.raises(KeyError):
            capture()
        for pin in arena.pins:  # a capture that only was noticed cannot be known to have failed
            assert not explicit
            pin.release()
        arena.rollback(start)
    assert arena.pins == ()
    assert arena.stats.top == 0
    assert arena.alloc(4096, "uint8").offset == 0


# NVIDIA/warp#1429: memory that graphs have used is never freed, some MiB more with each capture
def test_nvidia_warp_1429_a_hundred_captures_need_the_memory_of_one(device, arena):
    nbytes = device.nbytes
    stream = device.stream("main")
    for number in range(100):
        with arena.scope():
            with arena.pin("graph") as pin, device.capture(stream) as graph:
                region = arena.alloc(1000, "uint8", fill=number)
            graph.replay(stream)
            device.synchronize()
            assert set(region.array.tolist()) == {number}
            pin.release()
    assert (device.nbytes, device.n_allocated) == (nbytes, 1)
    assert arena.stats.peak == 1000
    assert arena.pins == ()
    assert device.races == []


# tracel-ai/cubecl#1612: after a capture its temporaries are handed out, and a replay overwrites the new owner's data
def test_tracel_ai_cubecl_1612_what_a_graph_uses_is_handed_to_nobody(device, arena):
    start, stream = arena.checkpoint(), device.default_stream
    with device.capture(stream) as graph, arena.scope():
        temporary = arena.alloc(1000, "uint8", fill=1)
    mine = arena.alloc(1000, "uint8", fill=7)
    assert mine.address >= temporary.address + 1000
    graph.replay(stream)
    device.synchronize()
    assert set(mine.array.tolist()) == {7}
    (pin,) = arena.pins
    with pytest.raises(PinnedError):
        arena.rollback(start)
    pin.release()
    arena.rollback(start)
    assert arena.alloc(1000, "uint8").address == temporary.address


# the same, the other way round: a rollback inside may not wait for work outside of the graph
def test_tracel_ai_cubecl_1612_a_capture_does_not_wait_for_work_outside_of_it(device, arena):
    checkpoint = arena.checkpoint()
    region = arena.alloc(100, "uint8")
    side = device.stream("side")
    region.record_stream(side)
    use(device, side, region, value=1)
    with device.capture(device.stream("main")) as graph:
        before = arena.stats
        with pytest.raises(CaptureError):
            arena.rollback(checkpoint)
        with pytest.raises(CaptureError):
            region.record_stream(side)
        assert region.is_live
        assert arena.stats.top == before.top
    assert graph.is_valid
    for pin in arena.pins:
        pin.release()
    arena.rollback(checkpoint)
    arena.alloc(100, "uint8", fill=3)
    assert device.races == []
