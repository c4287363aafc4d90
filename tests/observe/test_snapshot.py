"""Snapshots for PyTorch's memory viewer: by the viewer's own rules, by its Python half, and read back."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import pathlib
import pickle
import pickletools
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuarena import Arena, Debug, OutOfMemoryError
from gpuarena.errors import ArenaClosedError, ArgumentError, ArgumentTypeError
from gpuarena.observe import Event, dump_snapshot, load_snapshot
from gpuarena.observe.snapshot import from_log, snapshot, write_snapshot
from gpuarena.testing import Driver, FakeDevice, programs
from gpuarena.testing.strategies import debug_settings

#: What the unpickler of MemoryViz.js knows.
KNOWN_TO_THE_VIEWER = {
    "APPENDS", "BINGET", "BININT", "BININT1", "BININT2", "EMPTY_DICT", "EMPTY_LIST", "FRAME", "LONG1",
    "LONG_BINGET", "MARK", "MEMOIZE", "PROTO", "SETITEMS", "SHORT_BINUNICODE", "STOP", "TUPLE2", "APPEND", "NEWFALSE",
    "BINPUT", "BINUNICODE", "EMPTY_TUPLE", "NEWTRUE", "NONE", "BINFLOAT", "TUPLE", "TUPLE1", "TUPLE3", "LONG_BINPUT",
    "LIST", "DICT", "SETITEM",
}  # fmt: skip


# -- the rules of the viewer, by themselves -----------------------------------------------------------------------


def check_plain(value):
    if type(value) in (dict, list, tuple):
        if type(value) is dict:
            assert all(type(key) is str for key in value)
        for one in value.values() if type(value) is dict else value:
            check_plain(one)
    else:
        assert value is None or type(value) in (str, int, float, bool), value
        assert type(value) is not int or -(2**53) < value < 2**53, "JavaScript has no such number"


def check_pickle(data):
    """What the viewer's unpickler needs."""
    operations = list(pickletools.genops(data))
    assert operations[0][1] == 4, "of protocols 2 to 4, the last"
    assert {opcode.name for opcode, _, _ in operations} <= KNOWN_TO_THE_VIEWER


def check_frames(frames):
    assert isinstance(frames, list)
    for frame in frames:
        assert set(frame) == {"filename", "line", "name"}
        assert type(frame["line"]) is int
        assert frame["filename"].isprintable()
        assert all(letter.isprintable() or letter == "\u2060" for letter in frame["name"])


def check_rules(found):
    """Check everything that MemoryViz.js takes for granted, and go through the history in both directions."""
    check_plain(found)
    check_pickle(pickle.dumps(found, protocol=4))
    blocks = {}
    for segment in found["segments"]:
        assert 0 <= segment["device"] < len(found["device_traces"])
        check_frames(segment["frames"])
        at = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == at
            assert block["size"] > 0
            assert block["state"] in ("active_allocated", "inactive")
            assert block["requested_size"] == block["size"]
            check_frames(block["frames"])
            if block["state"] == "active_allocated":
                blocks[segment["device"], at] = block["size"]
            at += block["size"]
        assert at == segment["address"] + segment["total_size"], "the blocks do not tile the segment"
        active = sum(size for (_, start), size in blocks.items() if segment["address"] <= start < at)
        assert segment["allocated_size"] == segment["active_size"] == segment["requested_size"] == active
    for device, events in enumerate(found["device_traces"]):
        if not events:
            continue
        of_device = [segment for segment in found["segments"] if segment["device"] == device]
        final = {address: size for (index, address), size in blocks.items() if index == device}
        memory = {(segment["address"], segment["total_size"]) for segment in of_device}
        check_history(events, final, memory)
    return found


def check_history(events, final, segments):
    times = [event["time_us"] for event in events]
    assert times == sorted(times)
    assert events[-1]["action"] == "snapshot"
    categories = [event["category"] for event in events if "category" in event]
    assert not categories or "unknown" in categories, "without it the viewer fails"
    assert len(set(categories)) <= 20
    mapped, live, requested = set(), {}, None
    for event in events:
        action, start, size = event["action"], event.get("addr"), event["size"]
        check_frames(event["frames"])
        if requested is not None:
            assert (action, start, size) == ("free_completed", *requested), (
                "both halves of a free come together"
            )
        requested = None
        if action in ("segment_alloc", "segment_map"):
            assert size > 0
            assert not any(start < stop and begin < start + size for begin, stop in joined(mapped))
            mapped.add((start, start + size))
        elif action in ("segment_free", "segment_unmap"):
            assert any(begin <= start and start + size <= stop for begin, stop in joined(mapped))
            mapped = {
                piece
                for begin, stop in joined(mapped)
                for piece in ((begin, min(stop, start)), (max(begin, start + size), stop))
                if piece[0] < piece[1]
            }
        elif action == "alloc":
            assert size > 0
            assert not any(start < other + n and other < start + size for other, n in live.items())
            assert any(begin <= start and start + size <= stop for begin, stop in joined(mapped)), (
                "no segment there"
            )
            live[start] = size
        elif action == "free_requested":
            assert live[start] == size
            requested = start, size
        elif action == "free_completed":
            assert live.pop(start) == size
        elif action == "oom":
            assert event["device_free"] >= 0
        else:
            assert action == "snapshot"
    recorded = joined(mapped)
    for address, size in final.items():  # of an arena without a recording, the blocks alone are told
        if any(begin <= address < stop for begin, stop in recorded):
            assert live.pop(address) == size
    assert not live, "the history ends with regions that the segments do not have"
    ends = {(address, address + size) for address, size in segments if size}
    assert all(any(begin <= start and stop <= end for start, end in joined(ends)) for begin, stop in recorded)


def joined(ranges):
    made = []
    for start, stop in sorted(ranges):
        if made and made[-1][1] == start:
            made[-1] = (made[-1][0], stop)
        else:
            made.append((start, stop))
    return made


def live_of(arena):
    return sorted(
        (stack.side, record.offset, record.nbytes, record.label)
        for stack in (arena._low, arena._high)
        for record in stack.records
        if record.nbytes
    )


def live_in(line):
    return sorted((r.side, r.offset, r.nbytes, r.label) for r in line.regions if r.stop is None)


def loaded(found, folder):
    write_snapshot(found, folder / "found.pickle")
    return load_snapshot(folder / "found.pickle")


# -- random programs ------------------------------------------------------------------------------------------------


@given(
    programs(parts=True),
    programs(parts=True),
    programs(max_steps=6, parts=True),
    debug_settings(),
    st.integers(0, 8),
)
def test_random_programs(tmp_path_factory, before, during, after, debug, skew):
    arena = Arena(1500, backend=FakeDevice(skew=skew * 32), alignment=16, name="tested", debug=debug or False)
    driver = Driver(arena)
    with contextlib.suppress(Warning):
        for call in before:
            driver.step(call)
        with arena.record() as trace:
            for call in during:
                driver.step(call)
            running = check_rules(snapshot(arena, trace))
        of_log = check_rules(from_log(trace.events))
        for call in after:
            driver.step(call)
    folder = tmp_path_factory.mktemp("dumps")
    recorded, plain = check_rules(snapshot(arena, trace)), check_rules(snapshot(arena))
    stats = arena.stats
    for found in (recorded, plain):
        (segment,) = found["segments"]
        assert segment["allocated_size"] == stats.used
        assert (segment["address"], segment["total_size"]) == (arena.address, arena.capacity)
        inactive = {"padding": 0, "free": 0}
        for block in segment["blocks"]:
            if block["state"] == "inactive":
                inactive[block["user_metadata"]["kind"]] += block["size"]
        assert inactive == {"padding": stats.padding, "free": stats.available}
        (line,) = loaded(found, folder)
        assert live_in(line) == live_of(arena)
        assert (line.name, line.device, line.capacity) == ("tested", arena.device, arena.capacity)
    assert happened(running) == happened(of_log)
    (line,) = loaded(recorded, folder)
    assert len(line.regions) == sum(event["action"] == "alloc" for event in recorded["device_traces"][0])
    assert len(line.failures) == sum(event.kind == "fail" for event in trace.events)
    for child in driver.children:
        if not child.arena.closed:
            (segment,) = check_rules(snapshot(child.arena))["segments"]
            assert segment["address"] == child.arena.address
            assert segment["allocated_size"] == child.arena.stats.used


def happened(found):
    return [
        (event["action"], event.get("addr"), event["size"], event["time_us"])
        for event in found["device_traces"][0]
    ]


@given(programs(), st.integers(1, 4))
def test_a_log_alone_is_enough(tmp_path_factory, during, n_closed):
    arena = Arena(1500, alignment=16, name="logged")
    driver = Driver(arena)
    with arena.record() as trace:
        for call in during:
            driver.step(call)
        live, peak = live_of(arena), arena.stats.peak
        if n_closed == 1:
            arena.close()
    found = check_rules(from_log(trace.events))
    (line,) = loaded(found, tmp_path_factory.mktemp("dumps"))
    assert live_in(line) == ([] if n_closed == 1 else live)
    assert (line.name, line.capacity) == ("logged", 1500)
    assert len(found["segments"]) == (0 if n_closed == 1 else 1)
    if all(region.nbytes for region in line.regions) and not any(
        e.kind == "alloc" and not e.nbytes for e in trace.events
    ):
        assert max((nbytes for _, nbytes in line.peaks), default=0) == peak


# -- what the viewer's Python half makes of arenas -----------------------------------------------------------------


def an_empty_arena():
    return Arena(4096), None


def a_full_arena():
    arena = Arena(4096)
    arena.alloc(4096, "uint8", label="all of it")
    return arena, None


def both_ends_with_padding():
    arena = Arena("64MiB", name="scratch", alignment=4096)
    with arena.record() as trace:
        for number in range(5):
            arena.alloc(1000 * number + 1, "float32", label=f"low {number}")
            arena.alloc(300 * number + 1, "int8", side="high", label="high")
        with arena.scope("step"), contextlib.suppress(OutOfMemoryError):
            arena.alloc(2**20, "float32", label="big")
            arena.alloc(2**31, "uint8", label="too much")
    return arena, trace


def guard_zones():
    arena = Arena(8192, debug=Debug(guard=64))
    with arena.record() as trace:
        for _ in range(3):
            arena.alloc((4, 5), "float32", label="x")
    return arena, trace


def a_child_inside():
    arena = Arena(8192)
    arena.alloc(100, "uint8")
    child = arena.child(1000, name="child")
    child.alloc(10, "uint8")
    return arena, None


def no_bytes():
    arena = Arena(8192)
    with arena.record() as trace:
        arena.alloc((0, 3), "float32", label="nothing")
        arena.alloc(7, "uint8")
        arena.alloc((5, 0), "float32", side="high")
    return arena, trace


def pinned_memory():
    arena = Arena(8192)
    with arena.record() as trace:
        with arena.pin("graph"), arena.scope():
            arena.alloc(1000, "uint8")
        arena.alloc(7, "uint8")
    return arena, trace


def growing():
    arena = Arena("64MiB", backend="virtual", name="growing")
    with arena.record() as trace:
        for number in (1, 3, 2):
            with arena.scope():
                arena.alloc((number, 2**20), "int8", label=f"{number} MiB")
        arena.alloc(5, "float64")
    return arena, trace


def extended_and_spilled():
    arena = Arena(8192)
    with arena.record() as trace:
        arena.alloc((2, 8), "uint8", label="grows").extend(20)
        checkpoint = arena.checkpoint()
        arena.alloc(100, "uint8", label="goes")
        arena.spill(checkpoint).restore()
    return arena, trace


def a_buffer_a_region():
    arena = Arena(8192, debug=Debug(separate=True))
    with arena.record() as trace:
        arena.alloc(1000, "uint8")
        with arena.scope():
            arena.alloc(7, "float32", label="x")
    return arena, trace


def memory_of_torch():
    pytest.importorskip("torch")
    arena = Arena(8192, backend="torch")
    arena.empty((3, 4), "bfloat16", label="tensor")
    return arena, None


def somebody_elses_memory():
    arena = Arena.from_buffer(bytearray(5000), alignment=64)
    arena.alloc(10, "uint8")
    return arena, None


ARENAS = [
    an_empty_arena, a_full_arena, both_ends_with_padding, guard_zones, a_child_inside, no_bytes, pinned_memory, growing,
    extended_and_spilled, a_buffer_a_region, memory_of_torch, somebody_elses_memory,
]  # fmt: skip


def viewer_file():
    """Return the viewer of the torch that is installed, which this does not import."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        pytest.skip("the viewer is a part of torch")
    return pathlib.Path(torch.origin).parent / "cuda" / "_memory_viz.py"


@pytest.fixture(scope="module")
def viewer():
    spec = importlib.util.spec_from_file_location("viewer_of_torch", viewer_file())
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def as_they_are(lines):
    return lines


def sums_of(flames):
    """Return the bytes of a flame graph by state and, of what is inactive, by its innermost frame."""
    sums = {}
    for line in flames.splitlines():
        frames, _, nbytes = line.rpartition(" ")
        active = ";active_allocated;" in frames
        key = "active_allocated" if active else frames.rpartition(":")[-1]
        sums[key] = sums.get(key, 0) + int(nbytes)
    return sums


@pytest.mark.parametrize("make", ARENAS, ids=lambda make: make.__name__)
def test_the_viewer_shows_the_figures_of_the_arena(make, viewer):
    arena, trace = make()
    stats = arena.stats
    found = check_rules(snapshot(arena, trace))
    total = stats.committed if arena.grows else stats.capacity
    shown = viewer.segsum(found)  # which adds the blocks up itself, and fails if they do not tile
    assert f"total_reserved: {viewer.Bytes(total)}\n" in shown
    assert f"total_allocated: {viewer.Bytes(stats.used)}\n" in shown
    sums = sums_of(viewer.memory(found, as_they_are))
    assert sums.get("active_allocated", 0) == stats.used
    assert sums.get("padding", 0) == stats.padding
    assert sums.get("free", 0) == total - stats.used - stats.padding
    told = viewer.trace(found)
    if trace is None:
        assert told == ""
    else:
        made = sum(
            event.nbytes > 0 for event in trace.events if event.kind in ("alloc", "extend", "pin", "restore")
        )
        kept = len(live_of(arena))
        assert told.count("\ndel ") == made - kept
        assert told.count("raise OutOfMemoryError") == sum(event.kind == "fail" for event in trace.events)
    assert "data:" not in viewer.trace_plot(found)
    after = snapshot(arena, trace)
    assert viewer.compare(found["segments"], after["segments"], as_they_are) == ""


def test_the_viewer_compares_two_snapshots(viewer, capsys):
    arena = Arena(4096)
    before, other = snapshot(arena), snapshot(Arena(4096))
    told = viewer.compare(before["segments"], other["segments"], as_they_are)
    assert "only_before" in told
    assert "only_after" in told
    assert str(arena.address) in capsys.readouterr().out


def test_the_viewers_commands_open_the_file(tmp_path):
    arena, trace = both_ends_with_padding()
    arena.dump_snapshot(tmp_path / "arena.pickle", trace=trace)
    flames = tmp_path / ".cache" / "flamegraph.pl"  # which the viewer would download
    flames.parent.mkdir()
    flames.write_text("#!/bin/sh\nexec cat\n")
    flames.chmod(0o755)

    def run(*arguments):
        done = subprocess.run(
            [sys.executable, str(viewer_file()), *arguments],
            capture_output=True, text=True, cwd=tmp_path, timeout=120, env={**os.environ, "HOME": str(tmp_path)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    used = arena.stats.used
    assert f"total_allocated: {used / 1024:.1f}KiB\n" in run("stats", "arena.pickle")
    assert "raise OutOfMemoryError # 2.0GiB requested" in run("trace", "arena.pickle")
    for command in ("segment_plot", "trace_plot"):
        run(command, "arena.pickle", "-o", f"{command}.html")
        assert "snapshot.pickle" in (tmp_path / f"{command}.html").read_text()
    for command in ("memory", "segments"):
        run(command, "arena.pickle", "-o", f"{command}.txt")
        assert sums_of((tmp_path / f"{command}.txt").read_text())["active_allocated"] == used


def test_the_command_that_the_documentation_names(tmp_path):
    pytest.importorskip("torch")
    arena = Arena("1MiB")
    arena.alloc(300_000, "uint8")
    arena.dump_snapshot(tmp_path / "arena.pickle")
    done = subprocess.run(
        [sys.executable, "-m", "torch.cuda._memory_viz", "stats", str(tmp_path / "arena.pickle")],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert "total_allocated: 293.0KiB\n" in done.stdout, done.stderr


# -- what is told of a region ---------------------------------------------------------------------------------------


def events_of(found, action, device=0):
    return [event for event in found["device_traces"][device] if event["action"] == action]


def test_a_region_is_told_with_its_label_shape_and_call_site():
    arena = Arena(4096, name="scratch")
    with arena.record() as trace:
        line = sys._getframe().f_lineno + 1
        arena.alloc((2, 3), "bfloat16", label="mask")
    found = snapshot(arena, trace)
    (block, _) = found["segments"][0]["blocks"]
    (event,) = events_of(found, "alloc")
    for told in (block, event):
        assert told["frames"][0] == {"filename": __file__, "line": line, "name": "bfloat16[2, 3]"}
        assert told["frames"][1]["name"] == "mask"
        assert told["user_metadata"] == {
            "label": "mask", "dtype": "bfloat16", "shape": [2, 3], "offset": 0, "side": "low", "padding": 0,
            "site": f"{__file__}:{line}",
        }  # fmt: skip


def test_without_a_recording_shapes_are_told_where_the_arena_knows_them():
    arena = Arena(4096)
    arena.empty((2, 3), "float32", label="array")
    arena.alloc((2, 3), "float32", label="first of its dtype")
    arena.alloc((3, 4), "float32", label="repeated")
    arena.alloc((5,), "int16", label="high", side="high").array  # made here
    told = {
        block["user_metadata"]["label"]: (
            block["user_metadata"].get("dtype"),
            block["user_metadata"].get("shape"),
        )
        for block in snapshot(arena)["segments"][0]["blocks"]
        if block["state"] == "active_allocated"
    }
    assert told["array"] == ("float32", [2, 3])
    assert told["repeated"] == ("float32", [3, 4])
    assert told["high"] == ("int16", [5])


def test_shapes_of_torch_arrays_are_told():
    arena, _ = memory_of_torch()
    about = snapshot(arena)["segments"][0]["blocks"][0]["user_metadata"]
    assert (about["dtype"], about["shape"], about["label"]) == ("bfloat16", [3, 4], "tensor")


def test_in_debug_mode_call_sites_are_known_without_a_recording():
    arena = Arena(4096, debug=True)
    line = sys._getframe().f_lineno + 1
    arena.alloc(10, "uint8")
    block = next(b for b in snapshot(arena)["segments"][0]["blocks"] if b["state"] == "active_allocated")
    assert (block["frames"][0]["filename"], block["frames"][0]["line"]) == (__file__, line)


def test_a_free_tells_what_freed_it():
    arena = Arena(4096)
    with arena.record() as trace:
        checkpoint = arena.checkpoint()
        arena.alloc(10, "uint8", label="x")
        line = sys._getframe().f_lineno + 1
        arena.rollback(checkpoint)
        arena.alloc((2, 5), "uint8").extend(4)
        arena.close()
    freed = events_of(from_log(trace.events), "free_completed")
    assert freed[0]["frames"][0] == {"filename": __file__, "line": line, "name": "rollback()"}
    assert freed[0]["frames"][2]["name"] == "x"
    assert [event["frames"][0]["name"] for event in freed[1:]] == ["extend()", "close()"]


def test_labels_become_colours_and_few_of_them():
    arena = Arena("1MiB", alignment=1)
    with arena.record() as trace:
        for number in range(100):
            arena.alloc(number + 1, "uint8", label=f"label {number}")
        arena.alloc(1, "uint8")
    events = events_of(check_rules(snapshot(arena, trace)), "alloc")
    assert events[99]["category"] == "label 99"
    assert events[0]["category"] == events[100]["category"] == "unknown"


def test_without_labels_the_viewer_colours_each_region():
    arena = Arena(4096)
    with arena.record() as trace:
        arena.alloc(1, "uint8")
    assert not any("category" in event for event in snapshot(arena, trace)["device_traces"][0])


@pytest.mark.parametrize(
    "label", ["kv_start", "PyObject_", "\ud800", "a;b c\n", "", "日本語", "x" * 10_000], ids=range(7)
)
def test_hostile_labels(label, viewer, tmp_path):
    arena = Arena(4096, name=label)
    with arena.record() as trace, arena.scope(label):
        arena.alloc(3, "uint8", label=label)
        with contextlib.suppress(OutOfMemoryError):
            arena.alloc(5000, "uint8", label=label)
        found = check_rules(snapshot(arena, trace))
        block = found["segments"][0]["blocks"][0]
        (line,) = loaded(found, tmp_path)
    assert line.regions[0].label == label
    assert line.failures[0].label == label
    assert line.name == (label or None)
    viewer.memory(found, as_they_are)
    if label == "kv_start":  # functions of the interpreter that have this in their names are left out
        assert len(viewer._frames_fmt(block["frames"])) == 2


# -- histories ------------------------------------------------------------------------------------------------------


def test_regions_made_before_the_recording_begin_it():
    arena = Arena(4096)
    arena.alloc(100, "uint8", label="old")
    checkpoint = arena.checkpoint()
    arena.alloc(50, "uint8", label="goes")
    with arena.record() as trace:
        arena.rollback(checkpoint)
        arena.alloc(7, "uint8", label="new")
    found = check_rules(snapshot(arena, trace))
    actions = [(event["action"], event["size"]) for event in found["device_traces"][0]]
    assert actions == [
        ("segment_alloc", 4096), ("alloc", 100), ("alloc", 50), ("free_requested", 50), ("free_completed", 50),
        ("alloc", 7), ("snapshot", 0),
    ]  # fmt: skip


def test_shapes_of_regions_made_before_are_told_where_the_arena_knows_them():
    arena = Arena(4096, debug=True)
    line = sys._getframe().f_lineno + 1
    array = arena.alloc((2, 3), "float32", label="known", side="high").array
    unknown = arena.alloc((2, 3), "float32", label="not known")
    with arena.record() as trace:
        arena.alloc(7, "uint8", label="new")
    found = snapshot(arena, trace)
    told = {event["user_metadata"]["label"]: event for event in events_of(found, "alloc")}
    assert told["not known"]["frames"][0]["name"] == f"{unknown.nbytes} bytes"
    assert "dtype" not in told["not known"]["user_metadata"]
    assert told["new"]["frames"][0]["name"] == "uint8[7]"
    assert told["known"]["frames"][0]["line"] == line
    blocks = {b["user_metadata"].get("label"): b["user_metadata"] for b in found["segments"][0]["blocks"]}
    assert {label: blocks[label] for label in told} == {label: told[label]["user_metadata"] for label in told}
    assert array.shape == (2, 3)


def test_what_changed_after_the_recording_is_told_too():
    arena = Arena(4096)
    checkpoint = arena.checkpoint()
    with arena.record() as trace:
        arena.alloc(100, "uint8", label="recorded")
    arena.rollback(checkpoint)
    arena.alloc(50, "uint8", label="later")
    found = check_rules(snapshot(arena, trace))
    (freed,) = events_of(found, "free_completed")
    assert freed["frames"][0]["name"] == "not recorded"
    assert [event["user_metadata"]["label"] for event in events_of(found, "alloc")] == ["recorded", "later"]


def test_a_recording_to_a_file_is_read_from_it(tmp_path):
    arena = Arena(4096)
    with arena.record(tmp_path / "log.jsonl") as trace:
        arena.alloc(100, "uint8", label="x")
        found = check_rules(snapshot(arena, trace))
    assert len(events_of(found, "alloc")) == 1
    assert snapshot(arena, trace) == found


def test_a_log_of_an_older_version_says_less():
    events = [
        Event("start", "low", 1, 100),
        Event("start", "high", 0, 1000),
        Event("alloc", "low", 2, 192, 128, 64, (64,), "uint8", 64, "x"),
    ]
    found = check_rules(from_log(events))
    (segment,) = found["segments"]
    told = [(block["size"], block["user_metadata"].get("kind")) for block in segment["blocks"]]
    assert told == [(128, "unknown"), (64, None), (808, "free")]
    assert segment["address"] % 4096 == 0
    assert segment["address"] > 0


def test_failures_say_what_was_free():
    arena = Arena(1000, alignment=1)
    with arena.record() as trace:
        arena.alloc(300, "uint8")
        arena.alloc(100, "uint8", side="high")
        with contextlib.suppress(OutOfMemoryError):
            arena.alloc(700, "uint8", label="x", side="high")
    (event,) = events_of(snapshot(arena, trace), "oom")
    assert (event["size"], event["device_free"], event["user_metadata"]["label"]) == (700, 600, "x")


def test_memory_that_grows_is_mapped_piece_by_piece(tmp_path):
    arena, trace = growing()
    found = check_rules(snapshot(arena, trace))
    (segment,) = found["segments"]
    assert segment["is_expandable"] is True
    assert segment["total_size"] == arena.stats.committed < arena.capacity
    mapped = events_of(found, "segment_map")
    assert [event["size"] for event in mapped[:2]] == [2**20, 2 * 2**20]
    assert sum(event["size"] for event in mapped) == segment["total_size"]
    assert events_of(found, "segment_alloc") == []
    (line,) = loaded(found, tmp_path)
    assert line.capacity == arena.capacity


def test_memory_that_was_given_back_is_unmapped():
    arena = Arena("64MiB", backend="virtual")
    with arena.record() as trace:
        with arena.scope():
            arena.alloc(2**24, "uint8")
        arena.alloc(10, "uint8")
        assert arena.trim() > 0
    found = check_rules(snapshot(arena, trace))
    (unmapped,) = events_of(found, "segment_unmap")
    assert unmapped["addr"] == arena.address + arena.stats.committed


def test_nothing_is_committed():
    found = check_rules(snapshot(Arena("64MiB", backend="virtual")))
    assert found["segments"][0]["blocks"] == []


# -- several arenas, devices --------------------------------------------------------------------------------------


def on(device, nbytes=4096, **more):
    arena = Arena(nbytes, **more)
    arena.device = device
    return arena


def test_several_arenas_go_into_one_file(tmp_path):
    one, two, three = on("cuda:0", name="one"), on("cuda:2", name="two"), on("cuda:0", 1000, name="three")
    with one.record() as first, three.record() as third:
        for arena in (one, three, one):
            arena.alloc(10, "uint8", label=arena.name)
    two.alloc(20, "uint8")
    dump_snapshot([one, two, three], tmp_path / "all.pickle", [third, first])
    found = check_rules(pickle.loads((tmp_path / "all.pickle").read_bytes()))
    assert sorted(segment["device"] for segment in found["segments"]) == [0, 0, 2]
    assert [len(events) > 0 for events in found["device_traces"]] == [True, False, False]
    lines = {line.name: line for line in load_snapshot(tmp_path / "all.pickle")}
    assert {name: line.device for name, line in lines.items()} == {
        "one": "cuda:0",
        "two": "cuda:2",
        "three": "cuda:0",
    }
    for arena in (one, two, three):
        assert live_in(lines[arena.name]) == live_of(arena)
    assert len(lines["one"].regions) == 2


@pytest.mark.parametrize(
    ("device", "index"),
    [
        ("cpu", 0),
        ("cuda", 0),
        ("cuda:3", 3),
        ("cpu:1", 0),
        ("mps:0", 0),
        ("cuda:-1", 0),
        ("cuda:99999999", 0),
    ],
)
def test_the_number_of_a_device(device, index):
    found = check_rules(snapshot(on(device)))
    assert found["segments"][0]["device"] == index
    assert len(found["device_traces"]) == index + 1


def test_a_child_by_itself():
    arena = Arena(4096)
    arena.alloc(100, "uint8")
    child = arena.child(1000, name="child")
    with child.record() as trace:
        child.alloc(10, "uint8", label="inside")
    (segment,) = check_rules(snapshot(child, trace))["segments"]
    assert (segment["address"], segment["total_size"]) == (child.address, 1000)
    with pytest.raises(ArgumentError, match="child and its parent go into files of their own"):
        dump_snapshot([child, arena], "never.pickle")
    with pytest.raises(ArgumentError, match="share memory"):
        dump_snapshot([arena, arena], "never.pickle")


# -- what is refused --------------------------------------------------------------------------------------------


def test_what_cannot_be_dumped(tmp_path):
    arena, other = Arena(4096), Arena(4096)
    path = tmp_path / "never.pickle"
    with pytest.raises(ArgumentTypeError, match="not str"):
        dump_snapshot("arena", path)
    with pytest.raises(ArgumentTypeError, match=r"arena\.record"):
        arena.dump_snapshot(path, trace=[3])
    with pytest.raises(ArgumentError, match="one arena at least"):
        dump_snapshot([], path)
    with other.record() as trace:
        pass
    with pytest.raises(ArgumentError, match="which is not in the snapshot"):
        arena.dump_snapshot(path, trace=trace)
    with other.record() as again:
        pass
    with pytest.raises(ArgumentError, match="two traces"):
        dump_snapshot(other, path, [trace, again])
    with pytest.raises(ArgumentError, match="recorded nothing yet"):
        arena.dump_snapshot(path, trace=arena.record())
    other.close()
    with pytest.raises(ArenaClosedError, match="dump_snapshot"):
        other.dump_snapshot(path, trace=trace)
    with pytest.raises(ArgumentError, match="begins with the start"):
        from_log([])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError):
        arena.dump_snapshot(tmp_path / "no" / "folder.pickle")


def test_a_dump_changes_nothing_in_the_arena():
    arena, trace = both_ends_with_padding()
    before = arena.stats, len(trace.events), list(arena._hooks)
    snapshot(arena, trace)
    snapshot(arena)
    assert (arena.stats, len(trace.events), list(arena._hooks)) == before


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "arena.pickle"
    path.write_bytes(b"old")

    def fails(value, file, protocol):
        file.write(b"half of it")
        raise OSError(28, "full")

    monkeypatch.setattr(pickle, "dump", fails)
    with pytest.raises(OSError, match="full"):
        Arena(4096).dump_snapshot(path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


# -- files of others: see test_snapshot_reader.py ----------------------------------------------------------------


def test_what_is_written_is_what_python_reads(tmp_path):
    arena, trace = both_ends_with_padding()
    arena.dump_snapshot(tmp_path / "arena.pickle", trace=trace)
    data = (tmp_path / "arena.pickle").read_bytes()
    check_pickle(data)
    assert pickle.load(io.BytesIO(data)) == snapshot(arena, trace)
