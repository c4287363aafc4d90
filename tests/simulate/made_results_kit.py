"""Results made by hand and at random, without running anything."""

from __future__ import annotations

import dataclasses
import random

from hypothesis import strategies as st

from gpuarena.simulate import LengthClass, Moment, Result, Sample

POLICIES = ("max", "exact", "buddy_max", "buddy_pow2", "buddy_exact", "grow", "paged", "linear")

#: 1000 slots with 400 of them free in two holes, and a request of 300.
FORTY = Moment(
    step=50,
    time_s=2.5,
    need=300,
    free=400,
    largest_hole=200,
    capacity=1000,
    n_waiting=2,
    holes=((200, 200), (600, 200)),
    allocations=((0, 200, 150), (400, 200, 200), (800, 200, 200)),
    pages_needed=54,
    n_pages=62,
)


def made(policy="exact", **changes):
    """Return a calm result of 1000 slots, 100 steps and 50 requests, half of the slots used, with `changes`."""
    fields = {
        "policy": policy,
        "capacity": 1000,
        "max_length": 500,
        "rate": 20,
        "fit": "first",
        "page_size": 16,
        "chunk": 256,
        "users": 2 if policy == "linear" else None,
        "reject": False,
        "requests": 50,
        "dropped": 0,
        "steps": 100,
        "sum_used": 50_000,
        "sum_reserved": 0,
        "sum_internal": 0,
        "sum_free": 50_000,
        "sum_running": 300,
        "max_running": 5,
        "done": 50,
        "unadmitted": 0,
        "tokens": 300,
        "first_fail_nofree": 0,
        "first_fail_frag": 0,
        "blocked_steps": 0,
        "blocked_frag_steps": 0,
        "preempt": 0,
        "copied": 0,
        "rejected": 0,
        "wait_p50_s": 0.0,
        "wait_p99_s": 0.0,
        "ext_mean": 0.0,
        "hit_tokens": 0,
        "classes": (),
        "worst": None,
        "n_failed_at_40": 0,
        "samples": (),
        "peak_taken": 0,
    }
    assert not changes.keys() - fields.keys()
    result = Result(**{**fields, **changes})
    slots = result.sum_used + result.sum_reserved + result.sum_internal + result.sum_free
    assert slots == result.capacity * result.steps
    return result


def struck(policy="exact", **changes):
    """Return a result with failures by fragmentation, the worst of them `FORTY`."""
    return made(
        policy,
        **{
            "done": 40,
            "first_fail_frag": 7,
            "first_fail_nofree": 2,
            "blocked_steps": 30,
            "blocked_frag_steps": 20,
            "worst": FORTY,
            "n_failed_at_40": 3,
            "ext_mean": 0.5,
            "wait_p50_s": 1.5,
            "wait_p99_s": 4.0,
            "classes": (
                LengthClass(1, 100, 30, 0, 1, 29),
                LengthClass(100, 400, 10, 0, 2, 7),
                LengthClass(400, None, 10, 0, 6, 4),
            ),
            "samples": tuple(
                Sample(step, 300 + step, 100, 50, 550 - step, 200, 4, step % 3) for step in range(0, 100, 10)
            ),
            **changes,
        },
    )


#: Hypothesis draws a seed only: to draw each of a hundred figures takes longer than to test them.
_SEEDS = st.integers(0, 2**32)


def moments(policy="exact"):
    """Return a strategy for moments with a request that fails by fragmentation; None where no layout was found."""
    return _SEEDS.map(lambda seed: _moment(random.Random(seed), policy))


def results(policy):
    """Return a strategy for results whose figures are possible one by one."""
    return _SEEDS.map(lambda seed: _result(random.Random(seed), policy))


def _moment(rng, policy):
    buddy = policy.startswith("buddy")
    capacity = 1 << rng.randint(3, 12) if buddy else rng.randint(2, 4000)
    holes, allocations, at = [], [], 0
    while at < capacity:
        length = rng.randint(1, max(1, capacity // rng.choice([1, 4, 40])))
        if buddy:  # a power of two at a multiple of itself
            length = 1 << rng.randint(0, 9)
            while at % length:
                length //= 2
        length = min(length, capacity - at)
        # Neighbours that are both free would be one hole.
        if rng.random() < 0.5 and not (holes and sum(holes[-1]) == at):
            holes.append((at, length))
        else:
            allocations.append((at, length, rng.randint(0, length)))
        at += length
    free, largest = sum(n for _, n in holes), max((n for _, n in holes), default=0)
    if free <= largest:
        return None
    return Moment(
        step=rng.randint(0, 10**6),
        time_s=rng.choice([0.0, rng.random(), 1e6 * rng.random()]),
        need=rng.randint(largest + 1, free),
        free=free,
        largest_hole=largest,
        capacity=capacity,
        n_waiting=rng.randint(1, 99),
        holes=tuple(holes),
        allocations=tuple(allocations),
        pages_needed=rng.randint(1, 300),
        n_pages=max(1, capacity // 16),
    )


def _result(rng, policy):
    worst = _moment(rng, policy) if policy not in ("paged", "linear") and rng.random() < 0.6 else None
    capacity = worst.capacity if worst else rng.choice([1, 16, 100_000])
    steps, requests = rng.choice([0, 1, 1000]), rng.choice([0, 1, 50, 10_000])

    def cuts(most):
        a, b, c = sorted(rng.choice([0, most, rng.randint(0, most)]) for _ in range(3))
        return a, b - a, c - b, most - c

    def some(most=requests):
        return rng.choice([0, 0, most, rng.randint(0, most)])

    used, reserved, internal, free = cuts(capacity * steps)
    classes, least = [], 1
    for limit in (10, 100, None):
        n = rng.choice([0, 1, 50])
        classes.append(LengthClass(least, limit, n, some(n), some(n), some(n)))
        least = limit or 0
    return dataclasses.replace(
        made(policy),
        capacity=capacity,
        users=rng.randint(1, 9) if policy == "linear" else None,
        chunk=rng.choice([1, 16, 256]),
        reject=rng.random() < 0.3,
        requests=requests,
        dropped=rng.choice([0, 1, 9]),
        steps=steps,
        sum_used=used,
        sum_reserved=reserved,
        sum_internal=internal,
        sum_free=free,
        done=some(),
        unadmitted=some(),
        tokens=some(10**9),
        first_fail_nofree=some(),
        first_fail_frag=max(1, some()) if worst else 0,
        blocked_steps=some(steps),
        preempt=some(99),
        copied=some(10**12) if policy == "grow" else 0,
        rejected=some(),
        wait_p50_s=rng.choice([0.0, rng.random(), 1e5]),
        wait_p99_s=rng.choice([0.0, rng.random(), 1e5]),
        ext_mean=rng.random(),
        hit_tokens=some(10**7),
        classes=tuple(classes),
        worst=worst,
        n_failed_at_40=some(9) if worst else 0,
        samples=tuple(
            Sample(step, *cuts(capacity), rng.randint(0, capacity), 1, 0)
            for step in range(rng.choice([0, 1, 8]))
        ),
    )
