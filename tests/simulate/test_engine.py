"""`run` against a simulator of a bitmap, token by token, that shares no code with it; and what holds of any result."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from brute_force_kit import BruteForce
from hypothesis import example, given, note
from hypothesis import strategies as st

from gpuarena.simulate import Request, RequestTrace, Result, run

POLICIES = ("max", "exact", "buddy_max", "buddy_pow2", "buddy_exact", "grow", "paged", "linear")


def least_capacity(policy: str, users: int, longest: int, page_size: int, chunk: int) -> int:
    power = 1
    while power < longest:
        power *= 2
    whole = {"paged": page_size, "grow": chunk}.get(policy, 1)
    if policy == "linear":
        return users * longest
    return power if policy.startswith("buddy") else -(-longest // whole) * whole


@st.composite
def cases(draw: st.DrawFn, policies: tuple[str, ...] = POLICIES) -> tuple[list[Request], str, dict[str, Any]]:
    """Small requests that compete for little memory."""
    policy = draw(st.sampled_from(policies))
    longest = draw(st.integers(2, 24))
    page_size, chunk, users = draw(st.integers(1, 6)), draw(st.integers(1, 7)), draw(st.integers(1, 4))
    # All of them at once, so that no time is lost between them, or spread out.
    gap = draw(st.sampled_from([0, 60_000, 400_000]))
    lengths = st.tuples(st.integers(1, max(1, longest - 2)), st.integers(1, max(1, longest // 2)))
    requests, now = [], draw(st.integers(0, 10**7))
    for prompt, output in draw(st.lists(lengths, min_size=1, max_size=14)):
        requests.append(Request(now, prompt, output))
        now += draw(st.integers(0, gap))
    if all(request.prompt + request.output > longest for request in requests):
        requests.append(Request(now, 1, 1))
    # The smallest page or chunk that is needed, up to a few requests at a time.
    least = least_capacity(policy, users, longest, page_size, chunk)
    options: dict[str, Any] = {
        "capacity": draw(st.integers(least, 4 * least)),
        "max_length": longest,
        "rate": draw(st.sampled_from([1, 7, 20])),
        "page_size": page_size,
        "fit": draw(st.sampled_from(["first", "best"])),
        "chunk": chunk,
        "reject": draw(st.booleans()),
        "n_samples": draw(st.sampled_from([0, 1, 3, 10, 10**6])),
    }
    if draw(st.booleans()):
        options["drain"] = draw(st.booleans())
    if policy != "linear" and draw(st.integers(0, 3)) == 0:
        options["users"] = users
    return requests, f"linear({users})" if policy == "linear" else policy, options


def expect_equal(result: Result, wanted: dict[str, Any]) -> None:
    """Compare every field, and say all that differ."""
    found = asdict(result)
    ext, wanted_ext = found.pop("ext_mean"), wanted.pop("ext_mean")
    assert {name: found[name] for name in wanted} == wanted
    assert ext == pytest.approx(wanted_ext, abs=1e-6)
    arguments = {"policy", "capacity", "max_length", "rate", "fit", "page_size", "chunk", "users", "reject"}
    arguments |= {"share", "drain"}
    assert set(found) - set(wanted) - arguments == set(), "a field is not compared"


def brute_force(requests: list[Request], policy: str, options: dict[str, Any], **more: Any) -> dict[str, Any]:
    name, _, users = policy.partition("(")
    options = {"users": int(users[:-1])} | options if users else options
    return BruteForce(requests, name, **options, **more).serve()


def test_a_user_who_is_turned_away_asks_again_in_the_next_step() -> None:
    requests = [Request(0, 2, 6), Request(0, 2, 6), Request(0, 1, 1)]
    options = {"capacity": 10, "max_length": 10, "users": 2, "reject": True}
    result = run(requests, "exact", **options)
    assert (result.rejected, result.done, result.max_running, result.steps) == (1, 2, 2, 6)
    expect_equal(result, brute_force(requests, "exact", options))


def test_the_peak_of_growing_has_both_pieces_of_a_copy() -> None:
    requests, options = [Request(0, 4, 2)], {"capacity": 20, "max_length": 6, "chunk": 1}
    result = run(requests, "grow", drain=True, **options)
    assert result.peak_taken == 5 + 6
    expect_equal(result, brute_force(requests, "grow", options | {"drain": True}))


@given(cases())
def test_every_field_is_that_of_a_bitmap_served_token_by_token(case: Any) -> None:
    requests, policy, options = case
    expect_equal(run(requests, policy, **options), brute_force(requests, policy, options))


@given(cases(("paged", "grow")))
def test_preemptions_are_those_of_a_bitmap_served_token_by_token(case: Any) -> None:
    requests, policy, options = case
    together = [Request(0, request.prompt, request.output) for request in requests]
    expect_equal(run(together, policy, **options), brute_force(together, policy, options))


# A copy moves holes together, so that the head of the line fits although no slots were freed.
COPY_MAKES_ROOM = [Request(0, 2, 4), Request(50_000, 1, 5), Request(50_000, 7, 2)]
# Two holes of four slots, which are exactly 40 % of twenty, for a request of five.
FORTY_PERCENT_FREE = [
    Request(0, 1, 3),
    Request(0, 1, 5),
    Request(0, 1, 3),
    Request(0, 1, 5),
    Request(200_000, 4, 1),
]


@example((FORTY_PERCENT_FREE, "exact", {"capacity": 20, "max_length": 20}))
@example((COPY_MAKES_ROOM, "grow", {"capacity": 18, "max_length": 16, "chunk": 4}))
@given(cases(("exact", "buddy_pow2", "buddy_exact", "grow")))
def test_holes_are_those_of_a_bitmap_served_token_by_token(case: Any) -> None:
    requests, policy, options = case
    options |= {"drain": True, "reject": False}
    expect_equal(run(requests, policy, **options), brute_force(requests, policy, options))


@st.composite
def shared_cases(draw: st.DrawFn) -> tuple[RequestTrace, dict[str, Any]]:
    """Prompts that go on from one another, and begin the same."""
    page_size, per_block = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    block_size, longest = page_size * per_block, draw(st.integers(12, 30))
    requests, now, prompts = [], 0, [()]
    for index in range(draw(st.integers(1, 12))):
        before = draw(st.sampled_from(prompts))
        n_kept = draw(st.integers(0, len(before)))
        prefix = (*before[:n_kept], *range(100 * index, 100 * index + draw(st.integers(0, 4))))
        whole = len(prefix) * block_size
        prompt = max(1, whole - draw(st.integers(0, block_size - 1))) if prefix else draw(st.integers(1, 4))
        prompts.append(prefix)
        requests.append(Request(now, prompt, draw(st.integers(1, 8)), prefix))
        now += draw(st.sampled_from([0, 50_000, 200_000]))
    if all(request.prompt + request.output > longest for request in requests):
        requests.append(Request(now, 1, 1))
    least = -(-longest // page_size) * page_size
    options = {
        "capacity": draw(st.integers(least, 3 * least)),
        "max_length": longest,
        "page_size": page_size,
        "reject": draw(st.booleans()),
        "drain": draw(st.booleans()),
    }
    return RequestTrace(requests, block_size=block_size), options


@given(shared_cases())
def test_shared_pages_are_those_of_a_list_of_pages(case: Any) -> None:
    trace, options = case
    wanted = brute_force(list(trace), "paged", options, block_size=trace.block_size)
    expect_equal(run(trace, "paged", share=True, **options), wanted)


@given(cases())
def test_what_holds_of_every_result(case: Any) -> None:
    requests, policy, options = case
    result = run(requests, policy, **(options | {"n_samples": 10**6}))
    note(str(result))
    sums = (result.sum_used, result.sum_reserved, result.sum_internal, result.sum_free)
    assert sum(sums) == result.capacity * result.steps
    assert min(sums) >= 0
    assert result.requests + result.dropped == len(requests)
    assert result.requests == sum(one.n_requests for one in result.classes)
    assert result.rejected == sum(one.n_rejected for one in result.classes)
    assert result.done == sum(one.n_done for one in result.classes)
    failed = result.first_fail_nofree + result.first_fail_frag
    assert failed == sum(one.n_failed for one in result.classes)
    assert result.n_failed_at_40 <= result.first_fail_frag
    assert (result.worst is None) == (result.first_fail_frag == 0)
    assert result.blocked_frag_steps <= result.blocked_steps <= result.steps
    assert 0 <= result.ext_mean < 1
    assert result.done + result.unadmitted <= result.requests
    if not result.reject:
        assert result.rejected == 0
    for sample in result.samples:
        assert sample.used + sample.reserved + sample.internal + sample.free == result.capacity
        assert min(sample.used, sample.reserved, sample.internal, sample.largest_hole) >= 0
        assert sample.largest_hole <= sample.free
    assert (
        sum(sample.used for sample in result.samples) == result.sum_used or len(result.samples) < result.steps
    )
    if result.policy in ("max", "buddy_max", "buddy_pow2", "buddy_exact", "exact", "linear"):
        assert (result.preempt, result.copied) == (0, 0)
    if result.policy == "exact" or (result.policy == "paged" and result.page_size == 1):
        assert result.sum_internal == 0
    if result.policy in ("paged", "linear"):
        assert (result.first_fail_frag, result.ext_mean) == (0, 0)
    if result.worst is not None:
        moment = result.worst
        assert moment.need <= moment.free == sum(length for _, length in moment.holes)
        assert moment.largest_hole == max(length for _, length in moment.holes)
        assert moment.free + sum(length for _, length, _ in moment.allocations) == moment.capacity


@given(cases())
def test_where_all_fits_each_policy_serves_alike(case: Any) -> None:
    requests, policy, options = case
    sizes = options | {
        "capacity": 64 * len(requests) * 24,
        "reject": False,
    }  # grow needs two pieces for a copy
    result = run(requests, policy, **sizes)
    if result.policy == "linear":
        assert result.done == result.requests
        assert result.sum_running == sum(
            r.output for r in requests if r.prompt + r.output <= result.max_length
        )
        return
    paged = run(requests, "paged", **sizes)
    for name in ("steps", "sum_used", "done", "tokens", "wait_p99_s", "max_running", "unadmitted"):
        assert getattr(result, name) == getattr(paged, name)
    assert (result.unadmitted, result.preempt, result.blocked_steps) == (0, 0, 0)


@given(cases())
def test_drained_every_request_gets_all_its_tokens(case: Any) -> None:
    requests, policy, options = case
    result = run(requests, policy, **(options | {"drain": True, "reject": False}))
    assert result.done == result.requests
    assert result.tokens == sum(r.output for r in requests if r.prompt + r.output <= result.max_length)


@given(cases(("max", "linear")), st.integers(1, 5))
def test_more_places_of_equal_length_never_serve_less(case: Any, more: int) -> None:
    """It is not so of pieces of any length, where a request that is admitted earlier may lie in another's way."""
    requests, policy, options = case
    options |= {"reject": False, "capacity": 2 * options["capacity"]}
    if policy == "max":
        few, many = (
            run(
                requests,
                "max",
                **(options | {"capacity": options["capacity"] + extra * options["max_length"]}),
            )
            for extra in (0, more)
        )
        assert few.wait_p99_s >= many.wait_p99_s or few.unadmitted > many.unadmitted
        assert few.tokens <= many.tokens or few.steps > many.steps
    else:
        options["capacity"] *= 8
        few, many = (run(requests, f"linear({users})", **options) for users in (2, 2 + more))
        assert few.tokens == many.tokens
    assert few.done <= many.done
    assert few.steps >= many.steps


@example(["max"])
@given(st.lists(st.sampled_from(["max", "exact", "grow", "paged", "linear(2)"]), min_size=1, max_size=3))
def test_a_run_leaves_nothing_behind_for_the_next(policies: list[str]) -> None:
    trace = RequestTrace([(0, 20, 5), (100_000, 7, 9), (200_000, 30, 1), (300_000, 2, 2)])
    sizes: dict[str, Any] = {"capacity": 64, "max_length": 32, "chunk": 8, "page_size": 4}
    first = [run(trace, policy, **sizes) for policy in policies]
    assert [run(trace, policy, **sizes) for policy in policies] == first
