"""Everything that looks at an arena says the same of it."""

from __future__ import annotations

import dataclasses
import json
import re

import log_kit
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuarena import Arena, Debug
from gpuarena.observe import (
    ArenaCollector,
    dump_snapshot,
    load_snapshot,
    load_trace,
    page_text,
    write_page,
    write_perfetto,
)
from gpuarena.observe.snapshot import from_log, write_snapshot
from gpuarena.observe.timeline import timeline


def figures_of(arena):
    """Return what is live, with what it takes, as the arena's own statistics and records say it."""
    stats = arena.stats
    regions = sorted(
        (stack.side, *record[:3]) for stack in (arena._low, arena._high) for record in stack.records
    )
    assert (stats.used, stats.n_regions) == (sum(region[2] for region in regions), len(regions))
    return regions, stats


def of_spans(regions):
    return sorted((r.side, r.offset, r.nbytes, r.label) for r in regions if r.stop is None)


def with_bytes(regions):
    return [region for region in regions if region[2]]


def check_page(text, regions, stats, peak):
    (one,) = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])["maps"]
    labels = [None if place < 0 else one["strings"][place] for place in one["label"]]
    rows = zip(one["high"], one["offset"], one["nbytes"], labels, one["life"], one["padding"], strict=True)
    live = [row for row in rows if row[4] < 0]
    shown = [("high" if high else "low", offset, nbytes, label) for high, offset, nbytes, label, *_ in live]
    assert sorted(shown) == regions
    assert sum(row[5] for row in live) == stats.padding
    assert (one["peaks"][-1][1] if one["peaks"] else 0) == peak


def check_perfetto(path, stats, peak):
    counters = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "C"]
    used = [event["args"] for event in counters if event["name"] == "bytes"]
    taken = [sum(event["args"].values()) for event in counters if event["name"] == "bytes taken by"]
    assert used[-1] == {"used": stats.used, "padding": stats.padding}
    assert taken == [sum(values.values()) for values in used]
    assert max(taken) == peak


def check_snapshot(path, regions, peak, known):
    (line,) = load_snapshot(path)
    assert of_spans(line.regions) == with_bytes(regions)
    if known:  # alignment before a region without bytes is of no region there
        assert (line.peaks[-1][1] if line.peaks else 0) == peak


def check_metrics(arena, stats):
    by_name = {}
    for family in ArenaCollector(arena).collect():
        for sample in family.samples:
            by_name[sample.name] = by_name.get(sample.name, 0) + sample.value
    assert by_name["gpuarena_used_bytes"] == by_name.get("gpuarena_label_bytes", 0) == stats.used
    assert by_name["gpuarena_peak_bytes"] == stats.peak
    assert by_name["gpuarena_regions"] == stats.n_regions
    assert by_name["gpuarena_failed_allocations_total"] == stats.n_failed


def without_times(events):
    return [dataclasses.replace(event, time_ns=0) for event in events]


@given(
    log_kit.programs(max_size=5),
    log_kit.programs(max_size=20),
    st.sampled_from([False, Debug(guard=8, on_live_arrays="ignore")]),
)
def test_everything_says_the_same_of_an_arena(tmp_path_factory, before, during, debug):
    pytest.importorskip("prometheus_client")
    folder = tmp_path_factory.mktemp("agreement")
    arena = Arena(log_kit.CAPACITY, alignment=64, name="tested", debug=debug)
    runner = log_kit.Runner(arena)
    runner.run(before)
    begun_at = arena.stats.top + arena.capacity - arena.stats.high
    peak = [
        begun_at
    ]  # since the recording began: between two rollbacks it only rises, and each call makes one at most

    def note():
        peak.append(arena.stats.top + arena.capacity - arena.stats.high)

    before_peak = arena.stats.peak
    with arena.record() as trace, arena.record(folder / "a.jsonl"), arena.record(folder / "a.csv"):
        runner.run(during, note)
    regions, stats = figures_of(arena)

    logs = [load_trace(folder / f"a{suffix}") for suffix in (".jsonl", ".csv")]
    trace.save(folder / "saved.jsonl")
    assert load_trace(folder / "saved.jsonl") == trace.events
    assert without_times(logs[0]) == without_times(logs[1]) == without_times(trace.events)

    # Nothing had to be caught up with: that is for interrupts.
    assert all(event.cause for event in trace.events if event.kind == "rollback")

    made = timeline(logs[0])
    assert of_spans(made.regions) == regions
    assert sum(region.padding for region in made.regions if region.stop is None) == stats.padding
    shown_peak = made.peaks[-1][1] if made.peaks else 0
    assert max(peak) <= shown_peak <= stats.peak
    assert max(shown_peak, before_peak) == stats.peak

    check_page(page_text(made), regions, stats, shown_peak)
    write_page(made, folder / "map.html")
    assert (folder / "map.html").read_text() == page_text(made)
    write_perfetto(made, folder / "trace.json")
    check_perfetto(folder / "trace.json", stats, shown_peak)
    write_snapshot(from_log(logs[1]), folder / "log.pickle")
    dump_snapshot(arena, folder / "arena.pickle", trace)
    all_bytes = all(region.nbytes for region in made.regions)
    for name in ("log.pickle", "arena.pickle"):
        check_snapshot(folder / name, regions, shown_peak, all_bytes)
    check_metrics(arena, stats)
    seen = arena.memory_map()
    assert (seen.used, seen.padding, seen.peak, seen.n_regions) == (
        stats.used, stats.padding, stats.peak, stats.n_regions
    )  # fmt: skip

    again = Arena(log_kit.CAPACITY, alignment=64, debug=debug)
    trace.replay(again)
    assert figures_of(again)[0] == regions
    assert again.stats.peak == shown_peak
