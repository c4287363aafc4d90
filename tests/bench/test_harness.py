"""The harness: order, samples and ratios; never a time."""

import json

import pytest

from gpuarena.bench.environment import environment
from gpuarena.bench.harness import Timing, interleave, ratio


def test_every_variant_runs_once_a_round_and_the_order_rotates():
    calls = []
    variants = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    times = interleave(variants, rounds=3, warmup=1)
    rounds = [calls[i : i + 3] for i in range(0, len(calls), 3)]
    assert [sorted(one) for one in rounds] == [["a", "b", "c"]] * 4
    assert [one[0] for one in rounds] == ["a", "b", "c", "a"]
    assert all(len(time.samples) == 3 for time in times.values())


def test_the_device_is_waited_for_before_and_after_each_call():
    log = []
    interleave({"a": lambda: log.append("a")}, rounds=1, warmup=0, synchronize=lambda: log.append("sync"))
    assert log == ["sync", "a", "sync"]


def test_a_ratio_is_the_median_of_the_rounds_ratios():
    # one round is ten times slower for both: the ratio does not move
    assert ratio(Timing((2.0, 20.0, 2.2)), Timing((1.0, 10.0, 1.1))) == pytest.approx(2.0)


def test_median_and_quartiles():
    timing = Timing((4.0, 1.0, 3.0, 2.0))
    assert timing.median == 2.5
    assert timing.spread[0] < 2.5 < timing.spread[1]
    assert Timing((1.0,)).spread == (1.0, 1.0)


def test_the_environment_says_what_a_reader_needs_and_is_json():
    found = environment()
    json.dumps(found)
    assert {"date", "python", "platform", "versions", "cpu_count", "commit", "device"} <= set(found)
    assert "numpy" in found["versions"]
