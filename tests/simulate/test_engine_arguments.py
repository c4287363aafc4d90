"""What `run` refuses and with which figures, and its smaller options."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest

import gpuarena.simulate._simulation as simulation_module
from gpuarena.errors import ArgumentError, ArgumentTypeError
from gpuarena.simulate import Linear, Request, RequestTrace, linear, run

TRACE = RequestTrace([(0, 20, 10), (1_000_000, 30, 20), (2_000_000, 5, 40)])
SIZES: dict[str, Any] = {"capacity": 256, "max_length": 60}


def test_an_unknown_policy_is_told_those_that_there_are() -> None:
    with pytest.raises(
        ArgumentError,
        match=r"no policy 'best'.*max, exact, buddy_max, buddy_pow2, buddy_exact, grow, paged and linear\(N\)",
    ):
        run(TRACE, "best", **SIZES)
    with pytest.raises(ArgumentError, match=r"write 'linear\(4\)'"):
        run(TRACE, "linear", **SIZES)
    with pytest.raises(ArgumentError, match="users must be at least 1, not 0"):
        run(TRACE, "linear(0)", **SIZES)
    with pytest.raises(ArgumentError, match="no policy 'linear"):
        run(TRACE, "linear(two)", **SIZES)
    with pytest.raises(ArgumentTypeError, match=r"a text or linear\(users\), not int"):
        run(TRACE, 4, **SIZES)  # type: ignore[arg-type]


def test_users_of_any_policy() -> None:
    served = run(TRACE, "max", users=2, **SIZES)
    assert (served.users, served.drain) == (2, True)
    assert run(TRACE, "linear(2)", users=2, **SIZES) == run(TRACE, "linear(2)", **SIZES)
    with pytest.raises(ArgumentError, match=r"users=3, but the policy linear\(2\) has 2"):
        run(TRACE, "linear(2)", users=3, **SIZES)
    with pytest.raises(ArgumentError, match="users must be at least 1"):
        run(TRACE, "max", users=0, **SIZES)


def test_linear_is_a_value() -> None:
    assert linear(users=3) == Linear(3) != Linear(4)
    assert str(linear(3)) == "linear(3)"
    assert (
        run(TRACE, linear(3), **SIZES)
        == run(TRACE, "linear(3)", **SIZES)
        == run(TRACE, "linear(users=3)", **SIZES)
    )
    for wrong in (0, -1):
        with pytest.raises(ArgumentError, match="users must be at least 1"):
            linear(wrong)
    with pytest.raises(ArgumentTypeError, match="users must be an integer"):
        linear(True)


@pytest.mark.parametrize("name", ["capacity", "max_length", "rate", "page_size", "chunk"])
def test_sizes_are_positive_integers(name: str) -> None:
    for wrong in (0, -5):
        with pytest.raises(ArgumentError, match=f"{name} must be at least 1, not {wrong}"):
            run(TRACE, "paged", **(SIZES | {name: wrong}))
    for wrong in (2.0, "16", None, True):
        with pytest.raises(ArgumentTypeError, match=f"{name} must be an integer"):
            run(TRACE, "paged", **(SIZES | {name: wrong}))
        if name == "page_size":
            with pytest.raises(ArgumentTypeError, match="page_size must be an integer"):
                run(TRACE, "paged", share=True, **(SIZES | {name: wrong}))


def test_other_arguments_that_are_wrong() -> None:
    with pytest.raises(ArgumentError, match="n_samples must be at least 0, not -1"):
        run(TRACE, "paged", n_samples=-1, **SIZES)
    with pytest.raises(ArgumentError, match="fit must be 'first' or 'best', not 'worst'"):
        run(TRACE, "exact", fit="worst", **SIZES)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="fit must be 'first' or 'best', not a list"):
        run(TRACE, "exact", fit=["first"], **SIZES)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("policy", "options", "least", "why"),
    [
        ("max", {}, 60, "one request of max_length=60"),
        ("exact", {}, 60, "one request of max_length=60"),
        ("buddy_max", {}, 64, "a block of 64"),
        ("buddy_pow2", {}, 64, "a block of 64"),
        ("buddy_exact", {}, 64, "a block of 64"),
        ("grow", {"chunk": 50}, 100, "2 chunks of 50"),
        ("paged", {"page_size": 16}, 64, "4 pages of 16"),
        ("linear(3)", {}, 180, "3 regions of max_length=60"),
    ],
)
def test_a_capacity_is_too_small_by_one(policy: str, options: dict[str, Any], least: int, why: str) -> None:
    trace = [Request(0, 40, 20), Request(0, 59, 1), Request(0, 1, 59), Request(0, 33, 27)]
    with pytest.raises(
        ArgumentError, match=rf"{least - 1} token slots is 1 too few for .*{why}.*give {least} or more"
    ) as raised:
        run(trace, policy, capacity=least - 1, max_length=60, **options)
    assert (raised.value.least_capacity, raised.value.missing) == (least, 1)
    # With one slot more, the longest requests are all served, one after the other.
    result = run(trace, policy, capacity=least, max_length=60, drain=True, **options)
    assert result.done == 4


def test_there_must_be_requests() -> None:
    for empty in ([], RequestTrace([])):
        with pytest.raises(ArgumentError, match="the trace is empty"):
            run(empty, "paged", **SIZES)
    with pytest.raises(
        ArgumentError, match="all 3 requests are longer than max_length=29 tokens; the shortest has 30"
    ):
        run(TRACE, "paged", capacity=256, max_length=29)
    for prompt, output in ((0, 5), (5, 0), (-3, 5)):
        with pytest.raises(ArgumentError, match=f"prompt of {prompt} and an output of {output}"):
            run([Request(0, 1, 1), Request(0, prompt, output)], "paged", **SIZES)
    with pytest.raises(ArgumentTypeError, match="an iterable of Requests, not int"):
        run(5, "paged", **SIZES)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="request 0 is"):
        run([5], "paged", **SIZES)  # type: ignore[list-item]
    with pytest.raises(ArgumentTypeError, match="must be an integer"):
        run([Request(0, 1.5, 1)], "paged", **SIZES)  # type: ignore[arg-type]


def test_any_iterable_in_any_order_is_a_trace() -> None:
    wanted = run(TRACE, "paged", **SIZES)
    assert run(iter(TRACE), "paged", **SIZES) == wanted
    assert run(reversed(list(TRACE)), "paged", **SIZES) == wanted
    assert run([tuple(request) for request in TRACE], "paged", **SIZES) == wanted  # type: ignore[misc]
    later = [request._replace(arrival_us=request.arrival_us + 10**9) for request in TRACE]
    assert run(later, "paged", **SIZES) == wanted, "time counts from the first request"


def test_requests_that_are_too_long_are_left_out() -> None:
    result = run(TRACE, "paged", capacity=256, max_length=45)
    assert (result.requests, result.dropped) == (2, 1)
    assert result.steps == 41  # the second of them arrives after two seconds


@pytest.mark.parametrize("policy", ["max", "exact", "buddy_exact", "grow", "linear(2)"])
def test_only_pages_are_shared(policy: str) -> None:
    with pytest.raises(ArgumentError, match="share=True is for the policy 'paged'"):
        run(TRACE, policy, share=True, **SIZES)


def test_pages_divide_the_blocks_whose_hashes_there_are() -> None:
    trace = RequestTrace([(0, 20, 10, (1, 2))], block_size=12)
    for page_size in (1, 2, 3, 4, 6, 12):
        assert run(trace, "paged", share=True, page_size=page_size, **SIZES).hit_tokens == 0
    for page_size in (5, 8, 24):
        with pytest.raises(
            ArgumentError, match=f"pages of {page_size} tokens do not divide the blocks of 12 tokens"
        ):
            run(trace, "paged", share=True, page_size=page_size, **SIZES)
        run(trace, "paged", page_size=page_size, **SIZES)
    nothing, alone = (run(TRACE, "paged", share=share, **SIZES) for share in (True, False))
    assert nothing == dataclasses.replace(alone, share=True), "there are no hashes"


def test_a_prefix_is_found_after_its_request_is_gone() -> None:
    trace = RequestTrace(
        [(0, 20, 2, (1, 2)), (10**6, 20, 2, (1, 2)), (2 * 10**6, 8, 2, (1,)), (3 * 10**6, 24, 2, (1, 9, 3))],
        block_size=8,
    )
    result = run(trace, "paged", share=True, page_size=4, capacity=64, max_length=40)
    # Of 20 tokens, 16 lie in two full blocks; the hash of a partial third is missing. Of 8, one page is computed. The
    # prompt of the last begins with the same block.
    assert result.hit_tokens == 16 + 4 + 8
    assert run(trace, "paged", page_size=4, capacity=64, max_length=40).hit_tokens == 0
    # Pages that nobody holds are free, and given to whoever needs them.
    between = RequestTrace([*trace[:1], (500_000, 38, 2, tuple(range(10, 15))), *trace[1:2]], block_size=8)
    assert run(between, "paged", share=True, page_size=4, capacity=40, max_length=40).hit_tokens == 0
    assert run(between, "paged", share=True, page_size=4, capacity=64, max_length=40).hit_tokens == 16


def test_forty_percent_are_free_and_yet_it_fails() -> None:
    # Pieces of 4, 6, 4 and 6 slots, of which the first and third are gone when five slots are asked for.
    trace = [Request(0, 1, 3), Request(0, 1, 5), Request(0, 1, 3), Request(0, 1, 5), Request(200_000, 4, 1)]
    result = run(trace, "exact", capacity=20, max_length=20, page_size=2)
    assert (result.first_fail_frag, result.n_failed_at_40) == (1, 1)
    moment = result.worst
    assert moment is not None
    assert (moment.step, moment.time_s, moment.need, moment.free_share) == (4, 0.2, 5, 0.4)
    assert moment.holes == ((0, 4), (10, 4))
    assert moment.allocations == ((4, 6, 5), (14, 6, 5))
    assert (moment.pages_needed, moment.n_pages, moment.n_waiting) == (3 + 3 + 3, 10, 1)
    assert run(trace, "paged", capacity=20, max_length=20, page_size=2).first_fail_nofree == 0


def test_a_loss_system_keeps_what_has_begun() -> None:
    first, small = Request(0, 3, 4), Request(150_000, 1, 1)
    sizes: dict[str, Any] = {"capacity": 12, "max_length": 12, "page_size": 4, "reject": True, "drain": True}
    # The second takes the two pages that are left just when the first needs one, and is preempted before its first token.
    late = run([first, Request(50_000, 5, 2), small], "paged", **sizes)
    assert (late.preempt, late.rejected, late.unadmitted, late.done) == (1, 1, 0, 2)
    assert late.blocked_steps == 0
    # If it has made one it waits for its pages, and so does what comes behind it.
    early = run([first, Request(0, 5, 2), small], "paged", **sizes)
    assert (early.preempt, early.rejected, early.done) == (1, 0, 3)
    assert (early.blocked_steps, early.wait_p99_s) == (2, 1 / 20)


def test_requests_at_the_same_time_are_drained_unless_told_otherwise() -> None:
    together = [Request(7, 10, 5)] * 3
    assert run(together, "max", capacity=20, max_length=20).steps == 15
    assert run(together, "max", capacity=20, max_length=20, drain=False).steps == 1
    assert run(TRACE, "max", **SIZES).steps == 41
    assert run(TRACE, "max", drain=True, **SIZES).steps == 80


def test_days_without_requests_take_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    measure = simulation_module.Simulation._measure
    monkeypatch.setattr(
        simulation_module.Simulation, "_measure", lambda self, n: (calls.append(n), measure(self, n))[1]
    )
    year = 365 * 86_400
    result = run([Request(0, 10, 5), Request(year * 10**6, 10, 5)], "paged", capacity=32, max_length=20)
    assert result.steps == 20 * year + 1
    assert len(calls) <= 4
    assert result.sum_used == 11 + 12 + 13 + 14 + 15 + 11


def _append_pair(pairs: list[tuple[int, int]], done: int, total: int) -> None:
    pairs.append((done, total))


@pytest.mark.parametrize("policy", ["paged", "linear(2)"])
def test_progress_goes_up_to_the_end(policy: str) -> None:
    for drain in (False, True):
        told: list[tuple[int, int]] = []
        note = functools.partial(_append_pair, told)
        result = run(TRACE, policy, drain=drain, progress=note, **SIZES)
        assert told[-1] == (result.steps, result.steps)
        assert 2 <= len(told) <= 101
        assert told == sorted(told)
        assert all(0 < done <= total for done, total in told)
        if not drain or policy != "paged":
            assert {total for _, total in told} == {result.steps}
        assert result == run(TRACE, policy, drain=drain, **SIZES)


def test_what_progress_raises_ends_the_run() -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(TRACE, "paged", progress=stop, **SIZES)


def test_samples_are_evenly_apart() -> None:
    for n in (1, 2, 7, 41, 1000):
        steps = [sample.step for sample in run(TRACE, "paged", n_samples=n, **SIZES).samples]
        assert min(n, 41) // 2 < len(steps) <= n
        assert steps == list(range(0, 41, steps[1] if len(steps) > 1 else 41))
    assert run(TRACE, "paged", **SIZES).samples == ()


def test_a_result_says_what_was_asked() -> None:
    options: dict[str, Any] = {"rate": 10, "page_size": 8, "fit": "best", "chunk": 32, "reject": True}
    result = run(TRACE, "linear(2)", **options, **SIZES)
    for name, value in (options | SIZES | {"policy": "linear", "users": 2}).items():
        assert getattr(result, name) == value
    other = run(TRACE, "paged", share=True, drain=True, **SIZES)
    assert (other.users, other.share, other.drain) == (None, True, True)
    assert (result.share, result.drain) == (False, True), "users send all their requests"
