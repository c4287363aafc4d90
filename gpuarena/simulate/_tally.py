"""The figures of a simulation, added up as it goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpuarena.simulate._job import Job
from gpuarena.simulate.result import LengthClass, Moment, Sample

__all__ = ["CLASS_BOUNDS", "Samples", "Tally", "classes_of", "percentile"]

#: Least lengths of the classes, prompt and output together, in tokens.
CLASS_BOUNDS = (0, 1024, 2048, 4096)


@dataclass(slots=True)
class Tally:
    """Sums over steps and counts of events, named as in `Result`."""

    steps: int = 0
    sum_used: int = 0
    sum_reserved: int = 0
    sum_free: int = 0
    sum_running: int = 0
    max_running: int = 0
    sum_ext: float = 0.0
    done: int = 0
    first_fail_nofree: int = 0
    first_fail_frag: int = 0
    blocked_steps: int = 0
    blocked_frag_steps: int = 0
    preempt: int = 0
    copied: int = 0
    rejected: int = 0
    hit_tokens: int = 0
    n_failed_at_40: int = 0
    peak_taken: int = 0
    worst: Moment | None = None


class Samples:
    """At most `most` samples, evenly apart, of a run whose number of steps need not be known.

    >>> samples = Samples(3, n_steps=None)
    >>> for step in range(6):
    ...     if samples.next_step == step:
    ...         samples.add(Sample(step, 0, 0, 0, 0, 0, 0, 0))
    >>> [sample.step for sample in samples.taken]
    [0, 2, 4]
    """

    def __init__(self, most: int, n_steps: int | None) -> None:
        self._most = most
        self._stride = -(-n_steps // most) if n_steps and most else 1
        self.next_step: float = 0 if most else float("inf")
        self.taken: list[Sample] = []

    def add(self, sample: Sample) -> None:
        """Add the sample of step `next_step`; if that is one too many, forget every second one."""
        self.taken.append(sample)
        while len(self.taken) > self._most:
            del self.taken[1::2]
            self._stride *= 2
        # The next multiple of the stride: this sample may be one of those forgotten.
        self.next_step = sample.step // self._stride * self._stride + self._stride


def percentile(values: Sequence[int], percent: int) -> int:
    """Return the value at `percent` of the way through `values` in order, 0 if there are none.

    >>> percentile([5, 1, 9, 7], 50)
    7
    """
    ordered = sorted(values)
    return ordered[min(len(ordered) * percent // 100, len(ordered) - 1)] if ordered else 0


def classes_of(jobs: list[Job]) -> tuple[LengthClass, ...]:
    """Return how the requests of each class of lengths fared."""
    classes = []
    for least, limit in zip(CLASS_BOUNDS, (*CLASS_BOUNDS[1:], None), strict=True):
        mine = [job for job in jobs if least <= job.length and (limit is None or job.length < limit)]
        classes.append(
            LengthClass(
                least=least,
                limit=limit,
                n_requests=len(mine),
                n_rejected=sum(job.rejected for job in mine),
                n_failed=sum(job.failed for job in mine),
                n_done=sum(job.is_done for job in mine),
            )
        )
    return tuple(classes)
