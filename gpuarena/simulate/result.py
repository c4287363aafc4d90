"""What a simulation found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["LengthClass", "Moment", "Result", "Sample"]


@dataclass(frozen=True, slots=True)
class Moment:
    """The slots when a request did not fit although as many were free. All figures are slots, each for one token."""

    step: int
    time_s: float
    """Seconds since the first request arrived."""
    need: int
    """What the request takes, before it is rounded."""
    free: int
    largest_hole: int
    capacity: int
    n_waiting: int
    """Requests that wait, this one included."""
    holes: tuple[tuple[int, int], ...]
    """``(start, length)``, by start."""
    allocations: tuple[tuple[int, int, int], ...]
    """``(start, length, tokens held)``, by start."""
    pages_needed: int
    """Pages that the tokens of the live requests and of this one would take."""
    n_pages: int

    @property
    def free_share(self) -> float:
        """Free slots over all, from 0 to 1."""
        return self.free / self.capacity


@dataclass(frozen=True, slots=True)
class LengthClass:
    """How requests of ``least <= prompt + output < limit`` tokens fared."""

    least: int
    limit: int | None
    n_requests: int
    n_rejected: int
    """Only in a loss system (``reject=True``)."""
    n_failed: int
    """Whose first attempt failed."""
    n_done: int


@dataclass(frozen=True, slots=True)
class Sample:
    """The slots after one step; the first four add up to the capacity."""

    step: int
    used: int
    reserved: int
    internal: int
    free: int
    largest_hole: int
    n_running: int
    n_waiting: int


@dataclass(frozen=True, slots=True)
class Result:
    """What `run` found. Sums are over all steps, in token slots; a step is ``1 / rate`` seconds."""

    policy: str
    capacity: int
    """Slots, each for one token."""
    max_length: int
    rate: int
    """Steps, and so tokens of each running request, a second."""
    fit: str
    page_size: int
    chunk: int
    users: int | None
    """Of the policy ``linear``, or those who sent the requests one after the other."""
    reject: bool
    requests: int
    dropped: int
    """Requests longer than `max_length`, which are left out."""
    steps: int
    sum_used: int
    """Slots that hold a token, a shared one once."""
    sum_reserved: int
    """Slots that will hold one later."""
    sum_internal: int
    """Slots of allocations that never will: internal fragmentation."""
    sum_free: int
    sum_running: int
    max_running: int
    done: int
    unadmitted: int
    """Requests that were never admitted; one that was, and waits again after a preemption, is not among them."""
    tokens: int
    """Tokens that were made; a preempted request keeps those that it has, although they are computed anew."""
    first_fail_nofree: int
    """Requests whose first attempt to be admitted failed with too few slots free for what was asked."""
    first_fail_frag: int
    """Requests whose first attempt failed although enough slots were free; what they ask for is not rounded to a block,
    so this counts requests, too, that fail for the block of a buddy."""
    blocked_steps: int
    """Steps in which the first request in line did not fit, so that it and those behind it waited."""
    blocked_frag_steps: int
    """Those of them in which enough slots were free for it."""
    preempt: int
    copied: int
    """Tokens copied to grow (``grow``)."""
    rejected: int
    """Requests turned away (``reject=True``), those included that were preempted before their first token."""
    wait_p50_s: float
    """Seconds from arrival to first admission, of those that were admitted: the middle one."""
    wait_p99_s: float
    """The one after 99 of 100."""
    ext_mean: float
    """Mean over the steps of ``1 - largest hole / free``, 0 where nothing is free: external fragmentation, to six
    digits."""
    hit_tokens: int
    """Prompt tokens found in pages of earlier requests (``share=True``), at the first admission of each request."""
    classes: tuple[LengthClass, ...]
    worst: Moment | None
    """The first attempt that failed by fragmentation with the largest share of the slots free, the earliest of equals."""
    n_failed_at_40: int
    """First attempts that failed by fragmentation with at least 40 % of the slots free."""
    samples: tuple[Sample, ...]
    """At steps evenly apart."""
    share: bool = False
    """Whether pages were shared by equal prefixes."""
    drain: bool = False
    """Whether it went on until all requests were done, instead of ending with the arrival of the last."""
    peak_taken: int = 0
    """The most slots taken at a time; where growing copies, both pieces are taken until the copy is done."""

    @property
    def utilisation(self) -> float:
        """Share of all slots that holds a token, over the steps."""
        return self.sum_used / (self.capacity * self.steps) if self.steps else 0.0

    @property
    def effective(self) -> float:
        """Share of the slots taken that holds a token."""
        taken = self.sum_used + self.sum_reserved + self.sum_internal
        return self.sum_used / taken if taken else 0.0

    @property
    def mean_running(self) -> float:
        """Requests that run at a time."""
        return self.sum_running / self.steps if self.steps else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, and the properties, as plain values."""
        ratios = {name: getattr(self, name) for name in ("utilisation", "effective", "mean_running")}
        return {**asdict(self), **ratios}
