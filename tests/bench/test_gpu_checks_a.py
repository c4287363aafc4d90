"""The checks of sharing, graphs, streams and caches on a fake GPU: all of them pass, and each finds its fault."""

import contextlib
import gc
import json
import weakref
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("hypothesis")  # the simulated device comes with the testing package

import gpuarena_transformers  # noqa: E402

from gpuarena import Region, _index  # noqa: E402
from gpuarena._pins import Pins  # noqa: E402
from gpuarena._streams import StreamOrder  # noqa: E402
from gpuarena.backends._vmm import Reservation  # noqa: E402
from gpuarena.backends.torch import TorchBackend  # noqa: E402
from gpuarena.bench.device import FakeGpu, Memory  # noqa: E402
from gpuarena.bench.gpu import caches, graphs, sharing, streams, suite  # noqa: E402
from gpuarena.bench.gpu._check import Check, run_check  # noqa: E402
from gpuarena.kv._ops import TorchOps  # noqa: E402

CHECKS = {check.title: check for module in (sharing, graphs, streams, caches) for check in module.checks()}


@pytest.fixture(scope="module", autouse=True)
def _quick_collection():
    """Leave out what the imports made: a check collects garbage, and so would look at it all each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def run(start):
    """Run the check whose title starts so."""
    (check,) = (check for title, check in CHECKS.items() if title.startswith(start))
    return run_check(check, FakeGpu(), quick=True)


@pytest.mark.parametrize("title", CHECKS)
def test_it_passes_with_figures(title):
    result = run(title)
    assert result["passed"], result["why"]
    assert result["figures"]
    json.dumps(result)


def test_the_suite_has_them_all():
    assert set(CHECKS) <= {check.title for check in suite.checks()}


# -- faults ---------------------------------------------------------------------------------------------------------


def copies(method):
    """Return a method of `Region` that hands out a copy."""
    return lambda self: method(self).copy() if hasattr(method(self), "copy") else method(self).clone()


def wrapped_at(n):
    """Return `_index.index` with offsets as a counter of few bits has them."""
    index = _index.index
    return lambda layout, key: index(layout, key)._replace(offset=index(layout, key).offset % n)


def truncated(self, array, value):
    """Write as `TorchBackend.write` would if it lost the last bit."""
    array.copy_(value)
    array.view(torch.uint8).bitwise_and_(0xFE)


def twice_as_large(cls):
    return lambda config, rows, n_tokens: cls(config, rows, 2 * n_tokens)


def written_by_way_of_a_copy(write):
    return lambda self, keys_to, values_to, start, keys, values: write(
        self, keys_to, values_to, start, keys.clone(), values
    )


def waiting(wait):
    """Return `StreamOrder._wait_for` for which the host waits."""

    def wait_for(self, uses):
        self._streams.synchronize_device()
        wait(self, uses)

    return wait_for


def kept_by_nobody(self, pin):
    self._stop()
    self._forget(pin)


def replayed_by_nothing(capture):
    return lambda self, body: (capture(self, body), lambda: None)[1]


def swapped(view):
    """Return `Region.view` with the two types of 8 bits taken for each other."""
    other = {"float8_e4m3fn": "float8_e5m2", "float8_e5m2": "float8_e4m3fn"}
    return lambda self, dtype: view(self, other.get(dtype, dtype))


FAULTS = {
    "as_numpy copies": ("one address", Region, "as_numpy", copies, "as_numpy of a region of a torch arena"),
    "as_torch copies": ("one address", Region, "as_torch", copies, "as_torch of a region of a torch arena"),
    "offsets wrap": ("views beyond", _index, "index", lambda _: wrapped_at(2048), "element 1024"),
    "far bytes are copies": ("views beyond", Region, "as_numpy", copies, "numpy wrote 4.0 to element 1023"),
    "a bit is lost": ("bfloat16", TorchBackend, "write", lambda _: truncated, "bfloat16: a copy into"),
    "pins keep nothing": ("allocation", Pins, "_end", lambda _: kept_by_nobody, "captured graph uses"),
    "pins refuse nothing": ("allocation", Pins, "refuse_drop", lambda _: lambda *_: None, "was given back"),
    "no replay": ("allocation", FakeGpu, "capture", replayed_by_nothing, "a replay with x = 1 gave -1.0"),
    "a broken capture": ("growth", FakeGpu, "capture", replayed_by_nothing, "3 replays gave 0.0, not 3"),
    "types are mixed up": ("bfloat16", Region, "view", swapped, "float8_e4m3fn: bytes mean other numbers"),
    "growth is captured": ("growth", Reservation, "_begin", lambda _: lambda *_: None, "grew while"),
    "nothing is declared": (
        "rollback under",
        Region,
        "record_stream",
        lambda _: lambda *_: None,
        "next owner's",
    ),
    "no event again": ("rollback under", StreamOrder, "_advance", lambda _: lambda *_: None, "next owner's"),
    "the host waits": ("rollback under", StreamOrder, "_wait_for", waiting, "held the host up"),
    "one copy more": (
        "launches",
        TorchOps,
        "write",
        written_by_way_of_a_copy,
        "KVCache.append takes 3 launches",
    ),
    "too large": ("memory at", gpuarena_transformers, "ArenaCache", twice_as_large, "ArenaCache held"),
    "nothing goes": (
        "a prompt",
        gpuarena_transformers.ArenaCache,
        "rollback",
        lambda _: lambda *_: None,
        "logits after checkpoint and rollback",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(fault, monkeypatch):
    start, owner, name, change, message = FAULTS[fault]
    monkeypatch.setattr(owner, name, change(getattr(owner, name)))
    result = run(start)
    assert result["passed"] is False
    assert message in result["why"]


def test_memory_is_free_again_after_a_failure():
    class Forgetful(FakeGpu):
        n_forgotten = 0

        def forget_peak(self):
            self.n_forgotten += 1

    held, device = [], Forgetful()

    def fail(probe):
        cycle = [torch.zeros(4)]
        cycle.append(cycle)
        held.append(weakref.ref(cycle[0]))
        raise KeyError

    assert run_check(Check("fails", fail), device, quick=True)["passed"] is False
    assert held[0]() is None
    assert device.n_forgotten == 1


# -- what only a GPU runs -------------------------------------------------------------------------------------------


class Counted(FakeGpu):
    """Counts as a GPU does, always the same."""

    is_fake = False

    def memory(self):
        return Memory(
            1000, reserved_nbytes=5000, peak_nbytes=1000 + 16384, used_nbytes=0, total_nbytes=1 << 40
        )


def test_memory_is_what_came_on_top():
    (check,) = (check for title, check in CHECKS.items() if title.startswith("memory at"))
    result = run_check(check, Counted(), quick=True)
    assert result["passed"], result["why"]
    assert result["figures"]["peak of ArenaCache"]["value"] == 16384
    assert result["figures"]["reserved by torch, DynamicCache"]["value"] == 0


def test_a_capture_that_no_arena_notices_is_found():
    (check,) = (check for title, check in CHECKS.items() if title.startswith("allocation"))
    result = run_check(check, Counted(), quick=True)
    assert "left 0 pins, 1 is promised" in result["why"]


def test_streams_of_torch_are_asked_for_what_they_have(monkeypatch):
    """Without a GPU only the calls can be looked at: they are torch's own, with the stream current where it matters."""
    log = []

    class Stream:
        def __init__(self, device=None):
            assert device == torch.device("cpu")

        def synchronize(self):
            log.append("synchronize")

    class Event:
        def record(self, stream):
            log.append(("record", stream))

        def query(self):
            return False

    @contextlib.contextmanager
    def current(stream):
        log.append(("current", stream))
        yield

    lanes = streams._TorchLanes(FakeGpu())
    for name in ("Stream", "Event", "stream", "_sleep"):
        assert callable(getattr(torch.cuda, name))
    monkeypatch.setattr(
        lanes, "_cuda", SimpleNamespace(Stream=Stream, Event=Event, stream=current, _sleep=log.append)
    )
    side, array, other = lanes.stream(), lanes.array(4), lanes.array(4)
    lanes.delay(side)
    lanes.fill(array, 3, side)
    lanes.copy(array, other, side)
    assert not lanes.is_done(lanes.mark(side))
    lanes.wait_for(side)
    lanes.wait_for()
    assert log == [
        *(("current", side), streams._CYCLES, ("current", side), ("current", side)),
        *(("record", side), "synchronize"),
    ]
    assert (lanes.n_others(other, 3), lanes.n_others(other, 0)) == (0, 4)


# -- what cannot be told --------------------------------------------------------------------------------------------


def test_without_cupy_the_ways_of_torch_are_still_counted(monkeypatch):
    monkeypatch.setattr(sharing, "second_library", lambda device: (None, "CuPy is not there"))
    for start, passed in (("one address", None), ("views beyond", True), ("bfloat16", True)):
        assert run(start)["passed"] is passed
    result = run("one address")
    assert "CuPy is not there" in result["why"]
    assert result["figures"]["same address and bytes"]["value"] == 4


def test_a_view_that_does_not_fit_is_not_measured(monkeypatch):
    full = Memory(0, 0, 0, used_nbytes=1000, total_nbytes=1000)
    monkeypatch.setattr(FakeGpu, "memory", lambda self: full)
    result = run("views beyond")
    assert result["passed"] is None
    assert ", 0 are free" in result["why"]


def test_a_control_without_a_race_says_so(monkeypatch):
    monkeypatch.setattr(streams, "_undeclared", lambda *_: 0)
    result = run("rollback under")
    assert result["passed"] is None
    assert "not conclusive" in result["why"]
    assert result["figures"]["wrong elements, stream declared"]["value"] == 0
