"""Captures and replays of the simulated device."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stream_programs import N_BYTES, Oracle, Run, programs

from gpuarena.testing.streams import FakeCaptureError, SimulatedDevice


@given(
    inner=programs(n_streams=3, max_ops=7, words=("launch", "launch", "record", "wait")), twice=st.booleans()
)
def test_a_replay_orders_kernels_as_the_same_calls_would(inner, twice):
    fork, ends = 1000, [1001, 1002]
    body = [
        ("record", 0, fork),
        ("wait", 1, fork),
        ("wait", 2, fork),
        *inner,
        ("record", 1, ends[0]),
        ("record", 2, ends[1]),
        ("wait", 0, ends[0]),
        ("wait", 0, ends[1]),
    ]
    captured = Run()
    with captured.device.capture(captured.stream(0)) as graph:
        captured.all(body)
    assert captured.device.n_pending == 0
    assert graph.n_kernels == sum(op[0] == "launch" for op in inner)
    everything = set(range(N_BYTES))
    around = [("launch", 0, 500, set(), everything), ("launch", 3, 501, set(), everything)]
    captured.all(around)
    for _ in range(1 + twice):
        graph.replay(captured.stream(0))
    captured.all([("launch", 0, 502, set(), everything)])
    expected = Oracle([*around, *body, ("launch", 0, 502, set(), everything)]).races()
    assert captured.races() == expected
    captured.device.run()
    assert len(captured.executed) == 3 + (1 + twice) * graph.n_kernels


def test_a_replay_waits_for_the_replay_before_on_another_stream():
    run = Run()
    with run.device.capture(run.stream(0)) as graph:
        run.launch(run.stream(0), 0, set(), {0})
    graph.replay(run.stream(1))
    graph.replay(run.stream(2))
    assert run.device.races == []
    graph.replay(run.device.default_stream)
    run.launch(run.stream(1), 1, {0}, set())
    assert [race.first.stream for race in run.device.races] == ["2", "default"]
    assert run.executed == []


def test_a_capture_takes_nothing_from_before_and_makes_its_stream_current():
    run = Run()
    run.launch(run.stream(0), 0, set(), {0})
    with run.device.capture(run.stream(0)) as graph:
        run.launch(run.device.current_stream(), 1, set(), {0})
        assert not graph.is_valid
        with pytest.raises(FakeCaptureError, match="goes on"):
            graph.replay(run.stream(1))
        run.device.synchronize(run.stream(1))  # which is not captured
    assert graph.is_valid
    assert graph.n_kernels == 1
    graph.replay(run.stream(1))
    assert run.races() == {(0, 1)}, "the graph does not know what was queued on the captured stream"


def misuse(run):
    """Yield (name, call) of what is illegal while stream 0 is captured and stream 1 has joined."""
    device, a, b = run.device, run.stream(0), run.stream(1)
    outside = device.record(run.stream(2))
    other = device.capture(run.stream(3))
    yield "captured already", lambda: device.capture(a).__enter__()
    yield "the host cannot wait for '0'", lambda: device.synchronize(a)
    yield "the host cannot wait for '1'", lambda: device.synchronize(b)
    yield "the host cannot wait for the device", device.synchronize
    yield "cannot read memory", lambda: device.host_read(lambda: None, reads=[])
    yield "outside the capture", lambda: device.wait(a, outside)
    yield "outside the capture", lambda: device.wait(b, outside)
    yield "of another capture", lambda: (other.__enter__(), device.wait(a, device.record(run.stream(3))))
    yield "not simulated", lambda: run.empty_graph.replay(a)


@pytest.mark.parametrize("which", range(9))
@pytest.mark.parametrize("swallow", [False, True])
def test_what_is_illegal_in_a_capture_makes_it_invalid(which, swallow):
    run = Run()
    device = run.device
    with device.capture(run.stream(4)) as run.empty_graph:
        pass

    def block():
        with device.capture(run.stream(0)) as graph:
            graphs.append(graph)
            device.wait(run.stream(1), device.record(run.stream(0)))
            match, call = list(misuse(run))[which]
            if not swallow:
                reason.append(match)
                call()
            with pytest.raises(FakeCaptureError, match=match):
                call()
            assert device.is_capturing(run.stream(0)), "an invalid capture lasts until its end"
            for after in (device.launch, device.record):
                with pytest.raises(FakeCaptureError, match="invalid"):
                    after(run.stream(0))
            reason.append("capture is invalid: .*")

    graphs, reason = [], []
    with pytest.raises(FakeCaptureError) as caught:
        block()
    assert caught.match(reason[0])
    assert not any(device.is_capturing(run.stream(i)) for i in (0, 1))
    assert not graphs[0].is_valid
    with pytest.raises(FakeCaptureError, match="no graph"):
        graphs[0].replay(run.stream(0))
    device.launch(run.stream(0))
    assert device.n_pending == 1, "nothing of the capture was queued"


def test_a_stream_that_joined_must_be_waited_for():
    device = SimulatedDevice()
    a, b = device.stream("a"), device.stream("b")

    def capture(*, work, joined):
        with device.capture(a) as graph:
            device.launch(a)
            device.wait(b, device.record(a))
            if work:
                device.launch(b)
            if joined:
                device.wait(a, device.record(b))
        return graph

    assert capture(work=True, joined=True).is_valid
    assert capture(work=False, joined=False).is_valid
    with pytest.raises(FakeCaptureError, match="'b' joined it and has work that 'a' does not wait for"):
        capture(work=True, joined=False)
    assert not device.is_capturing(b)


def test_an_exception_in_the_block_invalidates_the_graph_and_passes():
    device = SimulatedDevice()
    with pytest.raises(KeyError), device.capture(device.default_stream) as graph:
        raise KeyError
    assert not device.is_capturing(device.default_stream)
    with pytest.raises(FakeCaptureError, match="KeyError"):
        graph.replay(device.default_stream)
    device.synchronize()


def test_an_event_of_a_capture_means_nothing_after_it():
    device = SimulatedDevice()
    with device.capture(device.default_stream):
        event = device.record(device.default_stream)
    with pytest.raises(FakeCaptureError, match="which is over"):
        device.wait(device.stream("side"), event)


def test_the_error_is_named_where_it_is_exported():
    import gpuarena.testing

    assert gpuarena.testing.FakeCaptureError is FakeCaptureError
    assert f"{FakeCaptureError.__module__}.{FakeCaptureError.__name__}" == "gpuarena.testing.FakeCaptureError"
