"""Reading snapshots that others wrote: PyTorch's, damaged ones, and those that are meant to do harm."""

from __future__ import annotations

import copy
import os
import pathlib
import pickle
import random
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuarena import Arena
from gpuarena.errors import ArgumentError, ArgumentTypeError
from gpuarena.observe import load_snapshot
from gpuarena.observe.snapshot import from_log
from gpuarena.observe.timeline import Failure, Timeline

BASE = 0x7F0000000000


def frames(line):
    return [
        {"filename": "??", "line": 0, "name": "unwind::unwind()"},
        {"filename": "/home/u/train.py", "line": line, "name": "step"},
        {"filename": "/home/u/main.py", "line": 3, "name": "main"},
    ]


def block(nbytes, requested=None, state="active_allocated", **more):
    requested = nbytes if requested is None else requested
    return {"size": nbytes, "requested_size": requested, "state": state, "frames": [], **more}


def segment(address, *blocks, device=0, **more):
    at, placed = address, []
    for one in blocks:
        placed.append({"address": at, **one})
        at += one["size"]
    return {
        "device": device, "address": address, "total_size": at - address, "allocated_size": 0, "active_size": 0,
        "requested_size": 0, "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": False,
        "frames": [], "blocks": placed, **more,
    }  # fmt: skip


def event(action, address, nbytes, time_us, line=0):
    return {
        "action": action, "addr": address, "size": nbytes, "stream": 0, "time_us": time_us, "frames": frames(line),
        "compile_context": "N/A", "user_metadata": "",
    }  # fmt: skip


def of_torch():
    """What ``torch.cuda.memory._snapshot`` returns, with more keys than are needed, as it does."""
    return {
        "segments": [
            segment(BASE + (64 << 20), block(2048, 2000), block(2048, 2048, "active_pending_free"), device=0),
            segment(BASE, block(512, 100), block(512, 0, "inactive"), block(1024, 1000, frames=frames(7))),
        ],
        "device_traces": [
            [
                event("free_requested", BASE + 512, 300, 1_700_000_000_000_000),
                event("free_completed", BASE + 512, 300, 1_700_000_000_000_001),
                event("segment_alloc", BASE + (64 << 20), 4096, 1_700_000_000_000_005),
                event("alloc", BASE + (64 << 20), 2000, 1_700_000_000_000_005, 11),
                event("alloc", BASE + (64 << 20) + 2048, 2048, 1_700_000_000_000_006, 12),
                event("alloc", BASE + (32 << 20), 4096, 1_700_000_000_000_006, 13),
                event("free_requested", BASE + (32 << 20), 4096, 1_700_000_000_000_007),
                event("free_completed", BASE + (32 << 20), 4096, 1_700_000_000_000_008),
                event("segment_free", BASE + (32 << 20), 8192, 1_700_000_000_000_008),
                {"action": "oom", "size": 2**40, "device_free": 5, "stream": 0, "time_us": 1_700_000_000_000_009, "frames": frames(14)},
                event("free_requested", BASE + (64 << 20) + 2048, 2048, 1_700_000_000_000_010),
                event("snapshot", 0, 0, 1_700_000_000_000_011),
            ]
        ],
        "host_segments": [], "host_traces": [], "external_annotations": [],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1, "roundup_power2_divisions": {}},
    }  # fmt: skip


@pytest.fixture
def write(tmp_path):
    def written(value, *, protocol=4):
        path = tmp_path / "found.pickle"
        path.write_bytes(value if isinstance(value, bytes) else pickle.dumps(value, protocol))
        return path

    return written


# -- PyTorch's own ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", range(6))
def test_the_segments_of_a_device_are_one_timeline_end_to_end(write, protocol):
    (line,) = load_snapshot(write(of_torch(), protocol=protocol))
    assert (line.name, line.device, line.address) == (None, "cuda:0", BASE)
    # 2048 bytes of the first segment, 4096 of one that is gone, 4096 of the last
    assert line.capacity == 2048 + 4096 + 4096
    told = {(r.offset, r.nbytes, r.start, r.stop, r.site.rpartition("/")[-1]) for r in line.regions}
    assert told == {
        (0, 100, -1, None, ""),
        (1024, 1000, -1, None, "train.py:7"),
        (512, 300, -1, 1, "train.py:0"),  # of the free, as nothing else is known
        (2048 + 4096, 2000, 3, None, "train.py:11"),
        (2048 + 4096 + 2048, 2048, 4, None, "train.py:12"),
        (2048, 4096, 5, 7, "train.py:13"),
    }
    assert line.failures == (Failure(9, "low", 2**40, None, "/home/u/train.py:14"),)
    assert line.times_ns[:4] == (0, 1000, 5000, 5000)
    assert line.n_events == 12
    assert line.peaks == ((-1, 1400), (3, 3100), (4, 5148), (5, 9244))


def test_devices_are_apart(write):
    data = of_torch()
    data["segments"].append(segment(BASE, block(512), device=2))
    data["device_traces"] += [[], [], [event("alloc", BASE + 4096, 77, 5)]]
    lines = load_snapshot(write(data))
    assert [line.device for line in lines] == ["cuda:0", "cuda:2", "cuda:3"]
    assert [len(line.regions) for line in lines[1:]] == [1, 1]
    assert lines[2].capacity == 77


def test_expandable_segments_are_joined(write):
    data = {
        "segments": [segment(BASE, block(2048), is_expandable=True)],
        "device_traces": [
            [
                event("segment_map", BASE, 1024, 1),
                event("segment_map", BASE + 1024, 1024, 2),
                event("alloc", BASE, 2048, 3),
                event("segment_map", BASE + 2048, 1024, 4),
                event("alloc", BASE + 2048, 10, 4),
                event("free_requested", BASE + 2048, 10, 4),
                event("free_completed", BASE + 2048, 10, 4),
                event("segment_unmap", BASE + 2048, 1024, 5),
            ]
        ],
    }
    (line,) = load_snapshot(write(data))
    assert line.capacity == 3072
    assert [(r.offset, r.start, r.stop) for r in line.regions] == [(0, 2, None), (2048, 4, 6)]


def test_events_that_a_full_ring_has_lost(write):
    data = {
        "segments": [segment(BASE, block(1024))],
        "device_traces": [
            [
                event("free_completed", BASE + 100, 50, 1),  # of which the request is lost
                event("alloc", BASE, 512, 2),
                event("alloc", BASE, 1024, 3),  # the free between them is lost
            ]
        ],
    }
    (line,) = load_snapshot(write(data))
    assert [(r.offset, r.nbytes, r.start, r.stop) for r in line.regions] == [
        (100, 50, -1, 0), (0, 512, 1, 2), (0, 1024, 2, None),
    ]  # fmt: skip


def test_old_formats(write):
    old = segment(BASE, block(512), block(512, 0, "inactive"))
    for one in old["blocks"]:
        del one["address"], one["requested_size"], one["frames"]
    for data in ([old], {"segments": [old]}, {"segments": [old], "device_traces": []}):
        (line,) = load_snapshot(write(data))
        assert [(r.offset, r.nbytes) for r in line.regions] == [(0, 512)]
        assert line.times_ns == ()


def test_metadata_and_categories_are_labels(write):
    data = {
        "segments": [
            segment(BASE, block(512, user_metadata="my label"), block(512, user_metadata={"epoch": 1}))
        ],
        "device_traces": [[event("alloc", BASE + 4096, 10, 1) | {"category": "gradient"}]],
    }
    (line,) = load_snapshot(write(data))
    assert [region.label for region in line.regions] == ["my label", None, "gradient"]


def test_times_that_go_back_do_not(write):
    data = {
        "segments": [],
        "device_traces": [[event("alloc", BASE + n, 1, t) for n, t in enumerate((5, 3, 9))]],
    }
    (line,) = load_snapshot(write(data))
    assert line.times_ns == (0, 0, 4000)


def test_nothing_in_it(write):
    assert load_snapshot(write({"segments": [], "device_traces": [[]]})) == ()


def complaint(path):
    """Return what is said of a file, None if it is a snapshot; anything but the one error is a failure."""
    try:
        lines = load_snapshot(path)
    except ArgumentError as error:
        return str(error)
    for line in lines:
        assert isinstance(line, Timeline)
        assert all(0 <= r.offset <= r.offset + r.nbytes <= line.capacity for r in line.regions)
        assert all(r.padding >= 0 for r in line.regions)
    return None


# -- harmful, damaged and foreign files -------------------------------------------------------------------------


class Harm:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return pathlib.Path.touch, (self.path,)


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_that_would_run_something_runs_nothing(write, tmp_path, protocol):
    target = tmp_path / "harmed"
    data = of_torch()
    data["allocator_settings"]["harm"] = Harm(target)
    path = write(data, protocol=protocol)
    pickle.loads(path.read_bytes())
    assert target.exists(), "it does harm"
    target.unlink()
    with pytest.raises(ArgumentError, match=r"found\.pickle is no snapshot: it asks for ") as caught:
        load_snapshot(path)
    assert caught.value.path == str(path)
    assert not target.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"cos\nsystem\n(S'touch harmed'\ntR.",
        b"(S'touch harmed'\nios\nsystem\n.",
        b"(cos\nsystem\nS'touch harmed'\no.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x0ctouch harmed\x85R.",
        b"cbuiltins\neval\n(S'1/0'\ntR.",
        b"\x80\x02cbuiltins\nobject\n)\x81.",
        b"\x80\x02\x82\x01.",  # of the registry of extensions
        b"Pwho\n.",  # a persistent id
    ],
    ids=["reduce", "inst", "obj", "stack_global", "eval", "newobj", "extension", "persistent"],
)
def test_every_operation_that_imports_is_refused(write, tmp_path, monkeypatch, data):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "system", lambda command: pytest.fail(command))
    with pytest.raises(ArgumentError, match="is no snapshot"):
        load_snapshot(write(data))


def test_numbers_of_numpy_are_not_plain(write):
    with pytest.raises(ArgumentError, match="it asks for numpy"):
        load_snapshot(write({"segments": [], "n": np.int64(3)}))


def test_a_file_that_is_cut_off(write):
    whole = pickle.dumps(of_torch(), 4)
    for length in [*range(40), *range(40, len(whole), 97), len(whole) - 1]:
        with pytest.raises(ArgumentError, match="is no snapshot"):
            load_snapshot(write(whole[:length]))


@given(st.integers(0, 2**32), st.integers(1, 4), st.booleans())
def test_a_damaged_file_is_an_error_or_a_snapshot(tmp_path_factory, seed, n_damaged, ours):
    rng = random.Random(seed)
    data = bytearray(pickle.dumps(OURS if ours else of_torch(), 4))
    for _ in range(n_damaged):
        data[rng.randrange(len(data))] = rng.randrange(256)
    path = tmp_path_factory.getbasetemp() / "damaged.pickle"
    path.write_bytes(data)
    said = complaint(path)
    assert said is None or ("is no snapshot: " in said and len(said) < 1000)


def _ours():
    arena = Arena(4096, name="scratch")
    with arena.record() as trace:
        arena.alloc((2, 3), "float32", label="x")
        with arena.scope():
            arena.alloc(5, "uint8", side="high")
    return from_log(trace.events)


OURS = _ours()


@given(st.data())
def test_any_value_in_any_place_is_an_error_or_a_snapshot(tmp_path_factory, data):
    found = copy.deepcopy(OURS if data.draw(st.booleans()) else of_torch())
    places = []

    def collect(value):
        for key in value if isinstance(value, dict) else range(len(value)):
            places.append((value, key))
            if isinstance(value[key], (dict, list)):
                collect(value[key])

    collect(found)
    values = [None, True, -1, 0, 1, 2**40, 2**63, 2**70, -(2**70), 2**20000, 0.5, float("nan"), "x", b"x", [], {}, (), [[]], {1: 2}, {"offset": 1, "side": "low"}]  # fmt: skip
    for _ in range(data.draw(st.integers(1, 2))):
        where, key = data.draw(st.sampled_from(places))
        if isinstance(where, dict) or key < len(where):
            where[key] = data.draw(st.sampled_from(values))
    path = tmp_path_factory.getbasetemp() / "odd.pickle"
    path.write_bytes(pickle.dumps(found, 4))
    assert len(complaint(path) or "") < 1000


def changed(where, key, value):
    def change(data):
        found = data
        for step in where:
            found = found[step]
        found[key] = value
        return data

    return change


FIRST = ("segments", 0)
BLOCK = ("segments", 0, "blocks", 0)
EVENT = ("device_traces", 0, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: 3, "it has no segments"),
        (lambda data: "text", "it has no segments"),
        (lambda data: None, "it has no segments"),
        (lambda data: {"device_traces": []}, "it has no segments"),
        (lambda data: [[]], "segment 0 is no dict but list"),
        (changed((), "segments", {}), "segments is no list but dict"),
        (changed((), "device_traces", 1), "device_traces is no list but int"),
        (changed(("device_traces",), 0, {1: 2}), r"device_traces\[0\] is no list but dict"),
        (changed(FIRST, "total_size", 4095), "segment 0 has 4095 bytes, and its blocks 4096"),
        (changed(FIRST, "total_size", -1), "segment 0: total_size is -1"),
        (changed(FIRST, "total_size", 2**70), "segment 0: total_size is a number of 71 bits"),
        (changed(FIRST, "total_size", 1.0), "segment 0: total_size is no number but float"),
        (changed(FIRST, "total_size", True), "segment 0: total_size is no number but bool"),
        (changed(FIRST, "address", None), "segment 0: address is no number but NoneType"),
        (changed(FIRST, "address", BASE + 1024), "segment 0, block 0 is at"),
        (changed(FIRST, "device", 2**20), "segment 0: device is 1048576"),
        (changed(FIRST, "blocks", 5), "segment 0, blocks is no list but int"),
        (changed(FIRST, "blocks", []), "segment 0 has 4096 bytes, and its blocks 0"),
        (changed(BLOCK, "size", 2047), "segment 0, block 1 is at"),
        (changed(BLOCK, "size", -5), "segment 0, block 0: size is -5"),
        (changed(BLOCK, "requested_size", 2049), "block 0 was asked for 2049 bytes and has 2048"),
        (changed(("device_traces", 0), 3, "alloc"), "event 3 of device 0 is no dict but str"),
        (changed(EVENT, "size", -1), "event 3 of device 0: size is -1"),
        (changed(EVENT, "addr", 2**64), "event 3 of device 0: addr is a number of 65 bits"),
        (changed(EVENT, "time_us", "now"), "event 3 of device 0: time_us is no number but str"),
    ],
)
def test_contents_that_cannot_be(write, change, message):
    with pytest.raises(ArgumentError, match=message):
        load_snapshot(write(change(of_torch())))


def test_segments_that_overlap(write):
    for address in (BASE, BASE + 100, BASE + 1023):
        data = {"segments": [segment(BASE, block(1024)), segment(address, block(10))]}
        with pytest.raises(ArgumentError, match="of device 0 overlap"):
            load_snapshot(write(data))
    assert load_snapshot(write({"segments": [segment(BASE, block(1024)), segment(BASE + 1024, block(10))]}))


def test_a_small_file_that_would_be_huge_is_small_work(write):
    nested = []
    for _ in range(200):
        nested = [nested, nested]  # 2**200 lists, written once each
    shared = [block(1) for _ in range(3000)]
    harmful = [
        changed(FIRST, "total_size", nested)(of_torch()),
        changed(("device_traces", 0, 3), "frames", nested)(of_torch()),
        changed(("device_traces", 0, 3), "frames", [{"filename": "x.py", "line": nested}])(of_torch()),
        changed(("device_traces", 0, 3), "user_metadata", {"label": nested, "offset": 1, "side": "low"})(
            of_torch()
        ),
        {
            "segments": [
                segment(BASE + 4096 * n) | {"total_size": 3000, "blocks": shared} for n in range(3000)
            ]
        },
    ]
    start = time.process_time()
    for data in harmful:
        assert len(complaint(write(data)) or "") < 1000
    assert time.process_time() - start < 5, "seconds; milliseconds where it is right"


def test_what_is_no_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_snapshot(tmp_path / "missing.pickle")
    with pytest.raises(IsADirectoryError):
        load_snapshot(tmp_path)
    with pytest.raises(ArgumentTypeError, match="a path is a text or a Path"):
        load_snapshot(None)
