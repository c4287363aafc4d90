"""The order in which streams use memory again, on a simulated device that finds every race."""  # T10

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuarena import Arena, Debug, errors
from gpuarena.testing.streams import FakeCaptureError, StreamedFakeDevice, byte_ranges


@pytest.fixture
def device():
    return StreamedFakeDevice()


def touch(device, stream, region, name):
    """Queue a kernel that reads and writes a region."""
    ranges = byte_ranges(region.array)
    device.launch(stream, reads=ranges, writes=ranges, name=name)


def test_work_on_the_home_stream_alone_needs_no_event(device):
    arena = Arena(1024, backend=device)
    for step in range(3):
        with arena.scope():
            touch(device, arena.stream, arena.alloc(64, "uint8"), f"step {step}")
    assert not device.races
    assert arena._order._event is None


def test_an_undeclared_stream_races_which_the_simulation_sees(device):
    arena = Arena(1024, backend=device)
    side = device.stream("side")
    with arena.scope():
        touch(device, side, arena.alloc(64, "uint8"), "undeclared")
    touch(device, arena.stream, arena.alloc(64, "uint8"), "reuse")
    assert [{race.first.name, race.second.name} for race in device.races] == [{"undeclared", "reuse"}]


def test_rollback_lets_the_home_stream_wait_for_a_declared_stream_and_the_host_go_on(device):
    arena = Arena(1024, backend=device)
    side = device.stream("side")
    with arena.scope():
        region = arena.alloc(64, "uint8")
        region.record_stream(side)
        touch(device, side, region, "side")
    assert device.n_pending == 1, "the host waited"
    touch(device, arena.stream, arena.alloc(64, "uint8"), "reuse")
    assert not device.races


def test_a_declared_stream_waits_for_the_former_user_on_the_home_stream(device):
    arena = Arena(1024, backend=device)
    side = device.stream("side")
    with arena.scope():
        touch(device, arena.stream, arena.alloc(64, "uint8"), "home")
    region = arena.alloc(64, "uint8")
    region.record_stream(side)
    touch(device, side, region, "side")
    assert not device.races


def test_a_third_stream_waits_for_the_second_by_way_of_the_home_stream(device):
    arena = Arena(1024, backend=device)
    second, third = device.stream("second"), device.stream("third")
    with arena.scope():
        region = arena.alloc(64, "uint8")
        region.record_stream(second)
        touch(device, second, region, "second")
    region = arena.alloc(64, "uint8")
    region.record_stream(third)
    touch(device, third, region, "third")
    assert not device.races


def test_without_a_fresh_event_the_third_stream_would_overtake_the_second(device, monkeypatch):
    arena = Arena(1024, backend=device)
    second, third = device.stream("second"), device.stream("third")
    first = arena.alloc(64, "uint8")
    first.record_stream(third)  # the arena's event is there before the second stream appears
    old = arena._order._event
    with arena.scope():
        region = arena.alloc(64, "uint8")
        region.record_stream(second)
        touch(device, second, region, "second")
    arena._order._event = old  # what it would be if the rollback forgot to record it anew
    region = arena.alloc(64, "uint8")
    region.record_stream(third)
    touch(device, third, region, "third")
    assert [{race.first.name, race.second.name} for race in device.races] == [{"second", "third"}]


def test_initial_contents_are_seen_by_a_declared_stream(device):
    arena = Arena(1024, backend=device)
    side = device.stream("side")
    other = arena.alloc(8, "uint8")
    other.record_stream(side)
    region = arena.alloc(64, "uint8", fill=7)
    region.record_stream(side)
    touch(device, side, region, "side")
    assert not device.races
    device.run()
    assert region.array.tolist() == [7] * 64


def test_contents_written_on_another_current_stream_wait_and_are_waited_for(device):
    arena = Arena(1024, backend=device)
    side = device.stream("side")
    with arena.scope():
        touch(device, arena.stream, arena.alloc(64, "uint8"), "home")
    with device.use(side), arena.scope():
        arena.alloc(64, "uint8", fill=7)
    touch(device, arena.stream, arena.alloc(64, "uint8"), "reuse")
    assert not device.races


def test_debug_poison_is_ordered_against_all_streams(device):
    arena = Arena(4096, backend=device, debug=True)
    side = device.stream("side")
    for _ in range(3):
        with arena.scope():
            region = arena.alloc(64, "uint8")
            region.record_stream(side)
            ranges = byte_ranges(region.array)
            device.launch(side, reads=ranges, writes=ranges, name="side")
    arena.check()
    arena.close()
    assert not device.races


def test_two_ends_wait_for_their_own_regions_only(device):
    arena = Arena(1024, backend=device)
    side = device.stream("side")
    high = arena.checkpoint("high")
    with arena.scope():
        low = arena.alloc(64, "uint8")
        low.record_stream(side)
        touch(device, side, low, "low")
        arena.alloc(64, "uint8", side="high")
        arena.rollback(high)
        assert arena._order.uses_of("low", 0)
    assert not arena._order.uses_of("low", 0)
    touch(device, arena.stream, arena.alloc(64, "uint8"), "reuse")
    assert not device.races


def test_a_child_that_dies_with_its_region_makes_the_parent_wait(device):
    arena = Arena(1024, backend=device)
    side = device.stream("side")
    with arena.scope():
        region = arena.child(256).child(128).alloc(64, "uint8")
        region.record_stream(side)
        touch(device, side, region, "side")
    touch(device, arena.stream, arena.alloc(64, "uint8"), "reuse")
    assert not device.races


def test_a_spill_waits_for_the_streams_that_write(device):
    arena = Arena(1024, backend=device)
    side = device.stream("side")
    start = arena.checkpoint()
    region = arena.alloc(64, "uint8")
    region.record_stream(side)
    array = region.array
    device.launch(side, writes=byte_ranges(array), run=lambda: array.fill(9), name="side")
    spilled = arena.spill(start)
    touch(device, arena.stream, arena.alloc(64, "uint8"), "between")
    arena.rollback(start)
    spilled.restore()
    device.synchronize()
    assert region.array.tolist() == [9] * 64
    touch(device, side, region, "side again")
    arena.rollback(start)
    touch(device, arena.stream, arena.alloc(64, "uint8"), "reuse")
    assert not device.races


def test_the_home_stream_can_be_chosen(device):
    home = device.stream("home")
    arena = Arena(1024, backend=device, stream=home)
    assert arena.stream is home
    with arena.scope():
        touch(device, home, arena.alloc(64, "uint8"), "home")
    touch(device, home, arena.alloc(64, "uint8"), "reuse")
    assert not device.races


def test_a_closed_buffer_is_given_back_behind_everybody_who_used_it(device):
    home, side = device.stream("home"), device.stream("side")
    birth = device.current_stream()
    arena = Arena(1024, backend=device, stream=home)
    region = arena.alloc(64, "uint8")
    region.record_stream(side)
    ranges = byte_ranges(region.array)
    touch(device, side, region, "side")
    arena.close()
    device.launch(birth, writes=ranges, name="the next owner")
    assert not device.races


@pytest.mark.parametrize("stream", [None, "side", 1.5, object()])
def test_what_is_no_stream_is_refused(device, stream):
    region = Arena(1024, backend=device).alloc(64, "uint8")
    with pytest.raises(errors.ArgumentTypeError):
        region.record_stream(stream)


def test_a_stream_of_another_device_is_refused(device):
    region = Arena(1024, backend=device).alloc(64, "uint8")
    with pytest.raises(errors.DeviceMismatchError):
        region.record_stream(StreamedFakeDevice(index=1).stream("other"))


def test_memory_without_streams_has_none_to_declare():
    arena = Arena(1024)
    assert arena.stream is None
    with pytest.raises(errors.ArgumentError, match="no streams"):
        arena.alloc(4, "uint8").record_stream(1)
    with pytest.raises(errors.ArgumentError, match="no streams"):
        Arena(1024, stream=1)


def test_a_stale_region_cannot_be_declared(device):
    arena = Arena(1024, backend=device)
    with arena.scope():
        region = arena.alloc(4, "uint8")
    with pytest.raises(errors.StaleRegionError):
        region.record_stream(device.stream("side"))


# -- threads ------------------------------------------------------------------------------------------------------


def in_thread(body):
    failures = []

    def run():
        try:
            body()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


def test_per_thread_default_streams_are_told_apart(device):
    arena = Arena(1024, backend=device)
    with arena.scope():
        region = arena.alloc(64, "uint8")

        def use():
            own = device.stream_of(2)  # cudaStreamPerThread
            region.record_stream(own)
            touch(device, own, region, "other thread")

        in_thread(use)
    # The rollback ran in this thread, in which the handle 2 is another stream.
    touch(device, arena.stream, arena.alloc(64, "uint8"), "reuse")
    assert not device.races


def test_a_home_stream_of_a_thread_is_waited_for_from_another(device):
    arena = Arena(1024, backend=device, stream=2)
    side = device.stream("side")
    region = arena.alloc(64, "uint8")
    touch(device, device.stream_of(2), region, "home")
    start = arena.checkpoint()

    def use():
        arena.reset()
        other = arena.alloc(64, "uint8")
        other.record_stream(side)
        touch(device, side, other, "side")
        arena.reset()

    in_thread(use)
    with pytest.raises(errors.CheckpointError):
        arena.rollback(start)
    touch(device, device.stream_of(2), arena.alloc(64, "uint8"), "reuse")
    assert not device.races


# -- captures -----------------------------------------------------------------------------------------------------


def test_memory_handed_out_in_a_capture_stays_reserved_until_it_is_released(device):
    arena = Arena(1024, backend=device)
    capturing = device.stream("capturing")
    with device.use(capturing), device.capture(capturing) as graph, arena.scope():
        inside = arena.alloc(100, "uint8")
        touch(device, capturing, inside, "graph")
    after = arena.alloc(100, "uint8")
    assert after.offset >= inside.offset + inside.nbytes
    [pin] = arena.pins
    graph.replay(arena.stream)
    touch(device, arena.stream, after, "after")
    graph.replay(arena.stream)
    assert not device.races
    with pytest.raises(errors.PinnedError, match="release"):
        arena.reset()
    pin.release()
    arena.reset()
    assert arena.pins == ()
    assert arena.alloc(100, "uint8").offset == inside.offset


def test_a_graph_replayed_on_another_stream_is_waited_for_when_its_memory_goes(device):
    arena = Arena(1024, backend=device)
    capturing, replaying = device.stream("capturing"), device.stream("replaying")
    start = arena.checkpoint()
    with device.use(capturing), device.capture(capturing) as graph, arena.pin() as pin:
        touch(device, capturing, arena.alloc(100, "uint8"), "graph")
    pin.record_stream(replaying)
    graph.replay(replaying)
    pin.release()
    arena.rollback(start)
    touch(device, arena.stream, arena.alloc(100, "uint8"), "reuse")
    assert not device.races


@pytest.mark.parametrize("way", ["scope", "checkpoint"])
def test_what_a_capture_keeps_lies_below_a_position_taken_after_it(device, way):
    arena = Arena(4096, backend=device)
    with device.capture(device.stream("capturing")), arena.scope():
        kept = arena.alloc(64, "uint8")
    if way == "scope":
        with arena.scope():
            later = arena.alloc(64, "uint8")
    else:
        start = arena.checkpoint()
        later = arena.alloc(64, "uint8")
        arena.rollback(start)
    assert later.offset >= kept.offset + 64
    assert len(arena.pins) == 1


def test_one_pin_is_enough_for_a_capture_with_many_allocations(device):
    arena = Arena(4096, backend=device)
    with device.capture(arena.stream):
        for _ in range(3):
            with arena.scope():
                arena.empty(10, "uint8")
                arena.empty(10, "uint8")
    assert len(arena.pins) == 1
    with device.capture(arena.stream):
        arena.empty(10, "uint8")
    assert len(arena.pins) == 2


def test_a_hundred_captures_that_are_released_leave_nothing(device):
    arena = Arena(1024, backend=device)
    tops = set()
    for _ in range(100):
        start = arena.checkpoint()
        with device.capture(arena.stream), arena.pin() as pin, arena.scope():
            arena.empty(100, "uint8")
        pin.release()
        arena.rollback(start)
        tops.add(arena.stats.top)
    assert tops == {0}
    assert arena.stats.n_regions == 0


def test_a_capture_that_fails_keeps_nothing(device):
    arena = Arena(1024, backend=device)
    with pytest.raises(ZeroDivisionError), device.capture(arena.stream), arena.pin():
        arena.empty(100 // len(arena.pins), "uint8")
    assert arena.pins == ()
    arena.reset()
    assert arena.stats.top == 0


def test_a_rollback_in_a_capture_cannot_wait_for_a_stream_outside(device):
    arena = Arena(1024, backend=device)
    side = device.stream("side")
    start = arena.checkpoint()
    region = arena.alloc(64, "uint8")
    region.record_stream(side)
    with device.capture(arena.stream):
        before = arena.stats
        with pytest.raises(errors.CaptureError, match="outside"):
            arena.rollback(start)
        assert arena.stats == before
        assert region.is_live
    arena.rollback(start)


def test_a_stream_outside_cannot_be_declared_in_a_capture(device):
    arena = Arena(1024, backend=device)
    with device.capture(arena.stream):
        region = arena.alloc(64, "uint8")
        with pytest.raises(errors.CaptureError):
            region.record_stream(device.stream("side"))


def test_streams_of_one_capture_are_ordered_inside_it(device):
    arena = Arena(1024, backend=device)
    main, side = device.stream("main"), device.stream("side")
    with device.use(main), device.capture(main) as graph:
        device.wait(side, device.record(main))  # joins the capture
        with arena.scope():
            region = arena.alloc(64, "uint8")
            region.record_stream(side)
            touch(device, side, region, "side")
        touch(device, main, arena.alloc(64, "uint8"), "reuse")
    graph.replay(main)
    assert not device.races


def test_spilling_and_restoring_are_refused_in_a_capture(device):
    arena = Arena(1024, backend=device)
    start = arena.checkpoint()
    region = arena.alloc(64, "uint8")
    with device.capture(arena.stream):
        with pytest.raises(errors.CaptureError):
            arena.spill(start)
        assert region.is_live
    spilled = arena.spill(start)
    with device.capture(arena.stream), pytest.raises(errors.CaptureError):
        spilled.restore()


def test_debug_mode_never_makes_the_host_wait_in_a_capture(device):
    arena = Arena(4096, backend=device, debug=Debug(on_live_arrays="ignore"))  # the graph refers to them
    with device.capture(arena.stream), arena.scope():
        arena.alloc(64, "uint8")
        arena.alloc(64, "uint8", fill=1)


def test_closing_in_a_capture_does_no_harm(device):
    arena = Arena(1024, backend=device)
    side = device.stream("side")
    arena.alloc(64, "uint8").record_stream(side)
    with device.capture(arena.stream) as graph:
        arena.alloc(64, "uint8")
        arena.close()
    assert graph.is_valid


# -- any program --------------------------------------------------------------------------------------------------

CALLS = st.lists(
    st.tuples(
        st.sampled_from(["alloc", "fill", "use", "open", "close", "high", "drop high", "child"]),
        st.integers(0, 3),
        st.integers(1, 60),
    ),
    max_size=40,
)


@given(calls=CALLS, debug=st.booleans())
def test_no_program_that_declares_its_streams_races(calls, debug):
    device = StreamedFakeDevice()
    settings = Debug(on_live_arrays="ignore") if debug else None  # queued kernels refer to arrays
    arena = Arena(4096, backend=device, debug=settings, alignment=16)
    streams = [arena.stream, *(device.stream(f"s{i}") for i in range(3))]
    scopes, regions, high = [], [], arena.checkpoint("high")
    last = {}  # region: the stream that used it last, for whom the program waits as any program must
    for name, which, nbytes in calls:
        stream = streams[which]
        try:
            if name in ("alloc", "high"):
                regions.append(arena.alloc(nbytes, "uint8", side="high" if name == "high" else "low"))
            elif name == "fill":
                with device.use(stream):
                    regions.append(arena.alloc(nbytes, "uint8", fill=which))
                last[regions[-1]] = stream
            elif name == "child":
                regions.append(arena.child(nbytes + 64).alloc(nbytes, "uint8"))
            elif name == "use":
                live = [region for region in regions if region.is_live]
                if live:
                    region = live[nbytes % len(live)]
                    region.record_stream(stream)
                    device.wait(stream, device.record(last.get(region, arena.stream)))
                    touch(device, stream, region, f"use on {which}")
                    last[region] = stream
            elif name == "open":
                scopes.append(arena.scope().__enter__())
            elif name == "close" and scopes:
                scopes.pop().__exit__(None, None, None)
            elif name == "drop high":
                arena.rollback(high)
        except errors.OutOfMemoryError:
            continue
    assert not device.races
    arena.close()
    device.run()


def test_the_simulation_refuses_what_cuda_refuses(device):
    arena = Arena(1024, backend=device)
    with pytest.raises(FakeCaptureError), device.capture(arena.stream):
        device.synchronize()
