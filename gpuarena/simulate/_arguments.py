"""What `run` is asked for, checked before anything is simulated."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from gpuarena.errors import ArgumentError, ArgumentTypeError
from gpuarena.kv.spec import positive
from gpuarena.simulate._job import Job
from gpuarena.simulate.policies import POLICIES, Settings
from gpuarena.simulate.trace import RequestTrace

__all__ = ["Linear", "as_jobs", "as_policy", "as_settings", "as_trace", "bounded", "linear"]

_MOST = 2**63 - 1  # slots and steps; their products are far from the largest float


@dataclass(frozen=True, slots=True)
class Linear:
    """The policy of an arena: each of `users` has a region of the maximal length, and asks when it was answered.

    >>> str(Linear(users=4))
    'linear(4)'

    Raises
    ------
    ArgumentError, ArgumentTypeError
        `users` is no positive integer.
    """

    users: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "users", positive(self.users, "users"))

    def __str__(self) -> str:
        return f"linear({self.users})"


def linear(users: int) -> Linear:
    """Return the policy of an arena with one region for each of `users`; the text ``"linear(4)"`` means the same.

    >>> linear(users=4)
    Linear(users=4)

    Raises
    ------
    ArgumentError, ArgumentTypeError
        `users` is no positive integer.
    """
    return Linear(users)


def as_policy(policy: Any) -> tuple[str, int | None]:
    """Return the name of a policy and its users.

    >>> as_policy("paged"), as_policy("linear(2)")
    (('paged', None), ('linear', 2))
    """
    if isinstance(policy, Linear):
        return "linear", policy.users
    if not isinstance(policy, str):
        raise ArgumentTypeError(f"policy must be a text or linear(users), not {type(policy).__name__}")
    if policy in POLICIES and policy != "linear":
        return policy, None
    users = re.fullmatch(r"linear\((?:users=)?(-?[0-9]{1,18})\)", policy)  # int() refuses thousands of digits
    if users is not None:
        return "linear", Linear(int(users[1])).users
    if policy == "linear":
        raise ArgumentError("the policy linear needs a number of users; write 'linear(4)' or linear(users=4)")
    known = ", ".join(name for name in POLICIES if name != "linear")
    shown = policy if len(policy) <= 60 else f"{policy[:57]}..."
    raise ArgumentError(f"there is no policy {shown!r}; there are {known} and linear(N), for N users")


def bounded(value: Any, what: str) -> int:
    """Return a positive integer of at most 63 bits, so that all shares and times are floats."""
    number = positive(value, what)
    if number > _MOST:
        raise ArgumentError(f"{what} must be at most 2**63 - 1, not an integer of {number.bit_length()} bits")
    return number


def as_trace(trace: Any) -> RequestTrace:
    """Return requests by arrival, each one checked."""
    if isinstance(trace, RequestTrace):
        return trace
    try:
        requests = list(trace)
    except TypeError:
        raise ArgumentTypeError(f"a trace is an iterable of Requests, not {type(trace).__name__}") from None
    has_prefixes = any(isinstance(one, tuple | list) and any(one[3:]) for one in requests)
    return RequestTrace.from_requests(requests, block_size=512 if has_prefixes else None)


def as_settings(
    name: str,
    users: int | None,
    *,
    capacity: Any,
    max_length: Any,
    page_size: Any,
    fit: Any,
    chunk: Any,
    block_size: int | None,
) -> Settings:
    """Return what memory is made with, of sizes with which every request of up to `max_length` tokens fits."""
    if not isinstance(fit, str):
        raise ArgumentTypeError(f"fit must be 'first' or 'best', not a {type(fit).__name__}")
    if fit not in ("first", "best"):
        raise ArgumentError(f"fit must be 'first' or 'best', not {fit!r}")
    settings = Settings(
        capacity=bounded(capacity, "capacity"),
        max_length=bounded(max_length, "max_length"),
        page_size=bounded(page_size, "page_size"),
        fit=fit,  # type: ignore[arg-type]  # one of the two
        chunk=bounded(chunk, "chunk"),
        block_size=block_size,
        users=users,
    )
    least, why = _least_capacity(name, settings)
    if settings.capacity < least:
        raise ArgumentError(
            f"a capacity of {settings.capacity} token slots is {least - settings.capacity} too few for {why}; "
            f"give {least} or more, or a smaller max_length",
            policy=name,
            capacity=settings.capacity,
            least_capacity=least,
            missing=least - settings.capacity,
        )
    return settings


def _least_capacity(name: str, settings: Settings) -> tuple[int, str]:
    longest = settings.max_length
    one = f"one request of max_length={longest} under the policy {name!r}"
    if name.startswith("buddy"):
        least = 1 << (longest - 1).bit_length()
        return least, f"{one}, which takes a block of {least}"
    if name in ("grow", "paged"):
        unit, what = (settings.chunk, "chunks") if name == "grow" else (settings.page_size, "pages")
        count = -(-longest // unit)
        return count * unit, f"{one}, which takes {count} {what} of {unit}"
    if settings.users is not None:
        return (
            settings.users * longest,
            f"{settings.users} regions of max_length={longest}, one for each user",
        )
    return longest, one


def as_jobs(trace: RequestTrace, *, rate: int, max_length: int) -> list[Job]:
    """Return the requests of at most `max_length` tokens, with the steps at which they arrive."""
    if not trace:
        raise ArgumentError("the trace is empty: there is nothing to simulate")
    first = trace[0].arrival_us
    bounded(trace[-1].arrival_us - first + 1, "the time between first and last request, in microseconds,")
    jobs = [
        Job(request, (request.arrival_us - first) * rate // 1_000_000)
        for request in trace
        if request.prompt + request.output <= max_length
    ]
    if not jobs:
        least = min(request.prompt + request.output for request in trace)
        raise ArgumentError(
            f"all {len(trace)} requests are longer than max_length={max_length} tokens; the shortest has {least}",
            max_length=max_length,
            shortest=least,
        )
    return jobs
