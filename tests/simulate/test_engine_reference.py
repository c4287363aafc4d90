"""`run` on public traces, against figures computed by others: integers, so all of them exactly.

Under HYPOTHESIS_PROFILE=ci every other one of the cases with a whole trace is run, and all of the small ones: a run of CI
has 20 minutes. Other profiles run all of them.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gpuarena.simulate import Result, load_trace, run

DATA = Path(os.environ.get("GPUARENA_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))
CONV = "azure/AzureLLMInferenceTrace_conv.csv"
CODE = "azure/AzureLLMInferenceTrace_code.csv"
CHAT = "sharegpt/sharegpt_8k_filtered_stats_llama2_tokenizer.csv"
MOONCAKE = "mooncake/conversation_trace.jsonl"
NAMES = {"azure_conv": CONV, "azure_code": CODE}

pytestmark = pytest.mark.skipif(not (DATA / "traces").is_dir(), reason="the public traces are not here")

load = functools.cache(lambda name: load_trace(DATA / "traces" / name))


def result_of(name: str, policy: str, capacity: int, n: int | None = None, **options: Any) -> Result:
    """The result of the first `n` requests of a trace; kept, since some take a second and several tests look at them."""
    defaults = {"max_length": 8192, "rate": 20, "page_size": 16, "fit": "first"}
    return _result_of(name, policy, capacity, n, **dict(sorted((defaults | options).items())))


@functools.cache
def _result_of(name: str, policy: str, capacity: int, n: int | None, **options: Any) -> Result:
    return run(load(name)[:n], policy, capacity=capacity, **options)


IS_CI = os.environ.get("HYPOTHESIS_PROFILE") == "ci"


def thinned(cases: Sequence[Any]) -> Sequence[Any]:
    """Return every other one under the profile of CI, and all under others."""
    return cases[::2] if IS_CI else cases


def references() -> list[Any]:
    path = DATA / "sim" / "reference.json"
    if not path.is_file():
        return []
    cases = json.loads(path.read_text())
    small = [one for one in cases if one["first_n"]]
    cases = [*small, *thinned([one for one in cases if not one["first_n"]])]
    keys = ("trace", "first_n", "C", "policy", "fit", "block")
    return [
        pytest.param(
            one,
            id="-".join(str(one[key]) for key in keys if one.get(key)),
            # One long run of pages is enough for every day.
            marks=[pytest.mark.slow] if (one["trace"], one["policy"]) == ("azure_code", "paged") else [],
        )
        for one in cases
    ]


@pytest.mark.parametrize("case", references())
def test_reference_figures(case: dict[str, Any]) -> None:
    options = {"max_length": case["Lmax"], "rate": case["rate"]}
    options |= {name: case[key] for name, key in (("fit", "fit"), ("page_size", "block")) if key in case}
    found = result_of(NAMES[case["trace"]], case["policy"], case["C"], case["first_n"], **options).to_dict()
    arguments = {"trace", "first_n", "C", "Lmax", "rate", "policy", "fit", "block"}
    wanted = {name: value for name, value in case.items() if name not in arguments}
    assert len(wanted) == 21
    assert {name: found[name] for name in wanted} == wanted
    sums = sum(found[f"sum_{kind}"] for kind in ("used", "reserved", "internal", "free"))
    assert sums == case["C"] * case["steps"]


# policy, options: done, first failures without and with enough slots free, preempted, copied, waits
NEAR_SATURATION = [
    ("max", {}, 3225, 3128, 0, 0, 0, 1421.65, 2801.85),
    ("exact", {}, 19096, 9, 4569, 0, 0, 117.7, 205.3),
    ("exact", {"fit": "best"}, 19347, 40, 4034, 0, 0, 84.2, 168.3),
    ("paged", {"page_size": 256}, 19347, 2068, 0, 685, 0, 0.0, 8.1),
]


@pytest.mark.parametrize(
    ("policy", "options", "done", "nofree", "frag", "preempt", "copied", "p50", "p99"),
    thinned(NEAR_SATURATION),
)
def test_policies_near_saturation(
    policy: str,
    options: Any,
    done: int,
    nofree: int,
    frag: int,
    preempt: int,
    copied: int,
    p50: float,
    p99: float,
) -> None:
    one = result_of(CONV, policy, 98_304, **options)
    assert (one.done, one.first_fail_nofree, one.first_fail_frag) == (done, nofree, frag)
    assert (one.preempt, one.copied) == (preempt, copied)
    assert (one.wait_p50_s, one.wait_p99_s) == (p50, p99)


# trace, capacity, policy, options: failures by fragmentation, of them with 40 % free, share, need, largest hole
WORST = [
    (CONV, 65_536, "exact", {"fit": "first"}, 3376, 9, 47.0, 4137, 4106),
    (CONV, 65_536, "exact", {"fit": "best"}, 3332, 2, 42.0, 4026, 2817),
    (CONV, 65_536, "buddy_pow2", {}, 715, 20, 54.7, 4290, 4096),
    (CONV, 65_536, "buddy_exact", {}, 960, 43, 53.1, 4124, 4096),
    (CODE, 32_768, "exact", {"fit": "first"}, 1309, None, 56.1, 7476, 6226),
    (CODE, 32_768, "exact", {"fit": "best"}, 1044, None, 69.4, 5957, 5363),
]


@pytest.mark.parametrize(
    ("trace", "capacity", "policy", "options", "frag", "at_40", "free", "need", "hole"), thinned(WORST)
)
def test_the_worst_failure_by_fragmentation(
    trace: str,
    capacity: int,
    policy: str,
    options: Any,
    frag: int,
    at_40: int | None,
    free: float,
    need: int,
    hole: int,
) -> None:
    one = result_of(trace, policy, capacity, **options)
    assert one.worst is not None
    assert one.first_fail_frag == frag
    assert at_40 in (one.n_failed_at_40, None)
    assert round(100 * one.worst.free_share, 1) == free
    assert (one.worst.need, one.worst.largest_hole) == (need, hole)
    assert one.worst.free == sum(length for _, length in one.worst.holes)
    held = sum(length for _, length, _ in one.worst.allocations)
    assert one.worst.free + held == capacity
    assert one.worst.pages_needed < one.worst.n_pages, "pages would have done"


# policy, options: turned away at 65 536, 98 304 and 131 072 slots; None where that takes long and says no more
LOSSES = [
    ("max", {}, (16_659, 15_330, 14_002)),
    ("exact", {"fit": "first"}, (4_519, None, 140)),
    ("exact", {"fit": "best"}, (4_299, None, None)),
    pytest.param("paged", {}, (2_850, 213, 1), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("policy", "options", "wanted"), thinned(LOSSES))
def test_requests_turned_away(policy: str, options: Any, wanted: tuple[int | None, ...]) -> None:
    for capacity, rejected in zip((65_536, 98_304, 131_072), wanted, strict=True):
        if rejected is not None:
            assert result_of(CONV, policy, capacity, reject=True, **options).rejected == rejected


@pytest.mark.parametrize(
    ("policy", "options", "shares"),
    thinned(
        [
            ("exact", {"fit": "first"}, [0.3, 28.8, 59.3, 83.4]),
            pytest.param("paged", {}, [5.2, 17.1, 25.6, 41.7], marks=pytest.mark.slow),
        ]
    ),
)
def test_long_requests_are_turned_away_first(policy: str, options: Any, shares: list[float]) -> None:
    one = result_of(CONV, policy, 65_536, reject=True, **options)
    assert [round(100 * c.n_rejected / c.n_requests, 1) for c in one.classes] == shares


@pytest.mark.parametrize(
    ("trace", "longest", "percent"),
    [
        (CONV, 8192, 15.4),
        (CONV, 4096, 29.4),
        (CODE, 8192, 25.8),
        (CHAT, 8192, 33.2),
        (CHAT, 4096, 38.6),
        (MOONCAKE, 131_072, 11.3),
    ],
)
def test_regions_of_a_few_users(trace: str, longest: int, percent: float) -> None:
    for users in (1, 2):
        one = result_of(trace, f"linear({users})", users * longest, 4000, max_length=longest)
        assert round(100 * one.effective, 1) == pytest.approx(percent, abs=0.11)
        assert (
            one.sum_free
            == one.first_fail_nofree
            == one.first_fail_frag
            == one.wait_p99_s
            == one.ext_mean
            == 0
        )
        assert one.done == one.requests


def test_tokens_of_a_few_users() -> None:
    for users, mean in ((1, 1265), (2, 2531), (4, 5061)):
        one = result_of(CONV, f"linear({users})", users * 8192, 4000)
        # Of requests that run: in the end some users have no more to ask.
        assert round(users * one.sum_used / one.sum_running) == mean


@pytest.mark.skipif(IS_CI, reason="every other whole trace in CI; other profiles run all")
def test_the_most_tokens_that_four_users_hold() -> None:
    sampled = result_of(CONV, "linear(4)", 4 * 8192, 4000, n_samples=10**6)
    assert len(sampled.samples) == sampled.steps
    assert max(sample.used for sample in sampled.samples) == 13_173


# policy, options: steps to serve 2 000 requests that are there from the start
MAKESPANS = [
    ("max", {}, 116_196),
    ("exact", {"fit": "first"}, 53_383),
    ("exact", {"fit": "best"}, 52_842),
    ("grow", {}, 48_526),
    ("buddy_exact", {}, 66_890),
    ("buddy_pow2", {}, 71_280),
    pytest.param("paged", {}, 39_883, marks=pytest.mark.slow),
    ("paged", {"page_size": 256}, 41_586),
]


@pytest.mark.parametrize(("policy", "options", "steps"), thinned(MAKESPANS))
def test_requests_without_times_are_served_to_the_end(policy: str, options: Any, steps: int) -> None:
    one = result_of(CHAT, policy, 65_536, 2000, **options)
    assert (one.steps, one.done) == (steps, 2000)


def shared_and_not(capacity: int) -> tuple[Result, Result, int]:
    """The results of pages of a block of Mooncake's hashes, and how many full blocks the prompts have."""
    shared, alone = (
        result_of(MOONCAKE, "paged", capacity, max_length=131_072, page_size=512, share=share)
        for share in (True, False)
    )
    assert alone.hit_tokens == 0
    return shared, alone, sum(request.prompt // 512 for request in load(MOONCAKE))


def test_pages_of_equal_prefixes() -> None:
    shared, alone, n_full = shared_and_not(2**22)
    assert shared.first_fail_nofree == alone.first_fail_nofree == 0
    # What is shared between requests that run at the same time are 59.8 pages of 1 517.
    saved = alone.sum_used - shared.sum_used
    assert round(saved / 512 / alone.steps, 1) == 59.8
    assert round(100 * saved / (alone.sum_used + alone.sum_internal), 2) == 3.94
    # What later requests find is more, and less of it was evicted the more memory there is.
    assert round(100 * shared.hit_tokens / 512 / n_full, 1) == 19.6


@pytest.mark.skipif(IS_CI, reason="every other whole trace in CI; other profiles run all")
@pytest.mark.slow
def test_pages_of_equal_prefixes_in_less_memory() -> None:
    shared, alone, n_full = shared_and_not(2**20)
    assert (shared.preempt, alone.preempt) == (18, 30)
    assert round(100 * shared.hit_tokens / 512 / n_full, 1) == 5.4
