"""The simulated device against an oracle that visits every state which host and device can reach."""

from __future__ import annotations

import itertools
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_programs import Oracle, Run, programs

from gpuarena.errors import ArgumentTypeError, DeviceMismatchError
from gpuarena.testing.streams import FakeStreams, SimulatedDevice

# -- order and races -------------------------------------------------------------------------------------------------


@settings(max_examples=4 * settings.default.max_examples)  # each is quick
@given(program=programs())
def test_exactly_the_pairs_that_can_run_in_both_orders_race(program):
    run = Run().all(program)
    assert run.races() == Oracle(program).races()
    assert len(run.device.races) == len(run.races())


@given(program=programs(), choices=st.lists(st.integers(0, 5), max_size=8))
def test_every_schedule_is_legal(program, choices):
    run = Run().all([*program, ("run", choices)])
    run.device.run()
    assert sorted(run.executed) == list(range(len(run.executed))), "every kernel runs once"
    assert run.device.n_pending == 0
    position = {kernel: i for i, kernel in enumerate(run.executed)}
    assert all(position[a] < position[b] for a, b in Oracle(program).must_precede())


@given(program=programs(max_ops=7, words=("launch", "launch", "record", "wait")))
def test_every_legal_order_of_two_kernels_can_be_scheduled(program):
    n_kernels = sum(op[0] == "launch" for op in program)
    seen, todo = set(), [()]
    while todo:
        choices = todo.pop()
        run = Run().all([*program, ("run", choices)])
        if len(choices) == n_kernels:
            seen.update(itertools.combinations(run.executed, 2))
        else:
            widths = []
            run.device.run(lambda ready, widths=widths: widths.append(len(ready)))
            todo += [(*choices, i) for i in range(widths[0])]
    assert seen == Oracle(program).before


@given(program=programs(), first=st.lists(st.integers(0, 5)), second=st.lists(st.integers(0, 5)))
def test_without_a_race_every_schedule_gives_the_same_memory(program, first, second):
    runs = [Run().all([*program, ("run", choices)]) for choices in (first, second)]
    for run in runs:
        run.device.run()
    if not runs[0].device.races:
        assert runs[0].memory == runs[1].memory


@given(program=programs(words=("launch", "launch", "record", "wait", "sync")))
def test_a_synchronisation_runs_what_it_must_and_no_more(program):
    program = [*program, ("sync", 0)]
    needed = set()
    run = Run()
    for position, op in enumerate(program):
        run.step(op)
        if op[0] == "sync":
            queued = program[: position + 1]
            # A kernel put behind the synchronisation tells what had to be done before it.
            probe = [*queued, ("launch", 99, 99, set(), set())]
            needed |= {a for a, b in Oracle(probe).must_precede() if b == 99}
        assert set(run.executed) == needed


def test_the_latest_launch_runs_first_by_default():
    run = Run().all([("launch", s, k, set(), set()) for k, s in enumerate([0, 1, 0, 2])])
    run.device.run()
    assert run.executed == [3, 1, 0, 2]


def test_a_sequence_runs_that_many_kernels_and_a_function_until_it_returns_none():
    run = Run().all([("launch", k, k, set(), set()) for k in range(4)])
    run.device.run([0, -1])  # of 3 2 1 0, then of 2 1 0
    assert run.executed == [3, 0]
    run.device.run(lambda ready: ready[-1] if len(ready) == 2 else None)
    assert run.executed == [3, 0, 1]
    assert run.device.n_pending == 1


def test_the_host_learns_nothing_from_kernels_that_have_run():
    run = Run().all([("launch", 0, 0, set(), {0}), ("run", [0]), ("launch", 1, 1, {0}, set())])
    assert run.executed == [0]
    assert run.races() == {(0, 1)}


def test_an_event_covers_what_was_queued_before_it_only():
    run = Run().all(
        [
            ("launch", 0, 0, set(), {0}),
            ("record", 0, 0),
            ("launch", 0, 1, set(), {0}),
            ("wait", 1, 0),
            ("launch", 1, 2, {0}, set()),
            ("sync", 1),
        ]
    )
    assert run.races() == {(1, 2)}
    assert run.executed == [0, 2]


def test_a_race_says_where():
    run = Run().all([("launch", 0, 0, {1, 2, 3}, {0}), ("launch", 1, 1, set(), {2, 3})])
    (race,) = run.device.races
    assert (race.start, race.stop) == (2, 4)
    assert repr(race) == "<Race of '0' on '0' and '1' on '1' over bytes 0x2 to 0x4>"


def test_ranges_that_only_touch_do_not_race():
    device = SimulatedDevice()
    a, b = device.stream("a"), device.stream("b")
    device.launch(a, writes=[(0, 4), (8, 12), (5, 5)])
    device.launch(b, writes=[(4, 8), (12, 16)])
    assert device.races == []
    device.launch(b, reads=[(16, 20), (11, 12)])
    assert [(race.start, race.stop) for race in device.races] == [(11, 12)]


def test_streams_may_wait_for_each_other_thousands_of_times():
    run = Run()
    for i in range(3000):
        run.all([("launch", i % 2, i, {0}, {0}), ("record", i % 2, i), ("wait", (i + 1) % 2, i)])
        if i % 100 == 99:
            run.device.run([0])
    run.all([("sync", 1)])
    assert run.executed == list(range(3000))
    assert run.device.races == []


# -- streams, threads ------------------------------------------------------------------------------------------------


def in_thread(function, *args):
    """Return what the function returns in a thread of its own."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function(*args)))
    thread.start()
    thread.join()
    return results[0]


def test_the_current_stream_is_set_by_a_context_for_each_thread():
    device = SimulatedDevice()
    streams = FakeStreams(device)
    side = device.stream("side")
    default = streams.key(device.default_stream)
    assert streams.key(streams.current()) == default
    with device.use(side):
        with device.use(device.per_thread_stream):
            assert streams.is_thread_bound(streams.current())
        assert streams.key(streams.current()) == streams.key(side) != default
        assert in_thread(lambda: streams.key(streams.current())) == default
    with pytest.raises(KeyError), device.use(side):
        raise KeyError
    assert streams.key(streams.current()) == default


def test_streams_are_told_apart_by_their_keys_alone():
    device = SimulatedDevice()
    streams = FakeStreams(device)
    side = device.stream("side")
    with device.use(side):
        assert streams.current() is not streams.current()
        assert streams.current() != side
        assert streams.key(streams.current()) == streams.key(side)
    assert streams.key(device.stream("side")) != streams.key(side)
    assert not streams.is_thread_bound(side)


def test_the_per_thread_stream_is_another_one_in_every_thread():
    device = SimulatedDevice()
    streams = FakeStreams(device)
    stream = device.per_thread_stream
    # Threads that follow each other often get the same number from the system.
    keys = [streams.key(stream)] + [in_thread(streams.key, stream) for _ in range(5)]
    assert len(set(keys)) == 6
    assert keys[0] == streams.key(stream)
    assert streams.is_thread_bound(stream)
    device.launch(stream, writes=[(0, 1)], name="here")
    in_thread(lambda: device.launch(stream, writes=[(0, 1)], name="there"))
    device.launch(stream, reads=[(0, 1)], name="here again")
    assert [(race.first.name, race.second.name) for race in device.races] == [
        ("here", "there"),
        ("there", "here again"),
    ]
    device.synchronize(stream)
    assert device.n_pending == 1
    device.synchronize()
    assert device.n_pending == 0


def test_parse_knows_streams_handles_and_the_protocol():
    device = SimulatedDevice()
    streams = FakeStreams(device)
    side = device.stream("side")

    class Exchanged:
        def __cuda_stream__(self):
            return 0, side.handle

    key = streams.key(side)
    assert streams.parse(side) is side
    assert [streams.key(streams.parse(stream)) for stream in (side.handle, Exchanged())] == [key, key]
    for handle in (0, 1):
        assert streams.key(streams.parse(handle)) == streams.key(device.default_stream)
    assert streams.is_thread_bound(streams.parse(2))
    for wrong in (None, "side", 1.5, 12345, True, -1, object()):
        with pytest.raises(ArgumentTypeError):
            streams.parse(wrong)


def test_a_stream_of_another_device_is_refused():
    device, other = SimulatedDevice(), SimulatedDevice(1)
    stream = other.stream("side")
    assert FakeStreams(device).key(device.default_stream) != FakeStreams(other).key(other.default_stream)
    with pytest.raises(DeviceMismatchError):
        FakeStreams(device).parse(stream)
    for call in (device.launch, device.record, device.synchronize, device.is_capturing):
        with pytest.raises(DeviceMismatchError):
            call(stream)


def test_the_protocol_goes_through_to_the_device():
    device = SimulatedDevice()
    streams = FakeStreams(device)
    a, b = device.stream("a"), device.stream("b")
    device.launch(a, writes=[(0, 1)])
    streams.wait(b, streams.record(a))
    device.launch(b, writes=[(0, 1)])
    device.launch(a, reads=[(8, 9)])
    assert device.races == []
    streams.synchronize(b)
    assert device.n_pending == 1
    streams.synchronize_device()
    assert device.n_pending == 0
    with device.capture(a):
        assert streams.is_capturing(a)
        assert not streams.is_capturing(b)
    assert not streams.is_capturing(a)
