"""The one harness of all benchmarks: variants are compared, then timed interleaved, and reported as ratios.

A group is a few ways to do one thing. Before it is timed each variant is run once, and what it gives is compared
with what is wanted; then all take turns, so that noise and caches hit them alike. A group is a dict that JSON can hold:

    {"title": str, "reference": name of a row or None, "rows": {name: row}, ...}

and a row has ``median_s``, ``quartiles_s`` and ``ratio`` (to the reference, by rounds), or only figures of other
kinds whose names end with their unit (`FIGURES`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from gpuarena.errors import ArenaError

__all__ = [
    "Group",
    "Timing",
    "Variant",
    "WrongDataError",
    "check",
    "group",
    "interleave",
    "measure",
    "ratio",
    "rows",
]

Group = dict[str, Any]


class WrongDataError(ArenaError, RuntimeError):
    """A variant gave something else than it should, so its time means nothing."""


@dataclass(frozen=True)
class Timing:
    """Seconds of one variant, one sample a round."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median in seconds."""
        return statistics.median(self.samples)

    @property
    def spread(self) -> tuple[float, float]:
        """Lower and upper quartile in seconds."""
        if len(self.samples) < 3:  # of two, quartiles would lie beyond both
            return min(self.samples), max(self.samples)
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")  # within the samples
        return low, high


@dataclass(frozen=True)
class Variant:
    """One way to do what a group measures."""

    body: Callable[[], Any]
    """What is timed."""
    n: int = 1
    """Its time is divided by this: how many tokens or calls it is made of."""
    ready: Callable[[], object] = lambda: None
    """Called before each sample, and not timed: all that goes back to where `body` begins."""
    seconds: Callable[[Any], float] | None = None
    """Takes the seconds from what `body` returned, where it measures them itself, in another process say."""
    wanted: Callable[[], Any] | None = None
    """Returns the tensors that `body` has to give; None where there is nothing to compare."""
    given: Callable[[Any], Any] = lambda value: value
    """Takes the tensors to compare from what `body` returned."""
    tolerance: float = 0.0
    """Largest difference, as a part of the largest number wanted; 0 wants equal bits."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """What else is known of it, for its row."""


def check(name: str, variant: Variant) -> None:
    """Run a variant once and compare what it gives; this also warms it up.

    Raises
    ------
    WrongDataError
        Another number of tensors, another shape or other numbers than are wanted.
    """
    variant.ready()
    value = variant.body()
    if variant.wanted is None:
        return
    import torch
    from torch.utils._pytree import tree_leaves

    given, wanted = tree_leaves(variant.given(value)), tree_leaves(variant.wanted())
    if len(given) != len(wanted):
        raise WrongDataError(f"{name!r} gave {len(given)} tensors, {len(wanted)} are wanted")
    for number, (one, other) in enumerate(zip(given, wanted, strict=True)):
        if one.shape != other.shape:
            raise WrongDataError(
                f"{name!r} gave {list(one.shape)} as tensor {number}, {list(other.shape)} is wanted"
            )
        if variant.tolerance == 0:
            is_right = torch.equal(one, other)
        else:
            difference = (one.float() - other.float()).abs().max()
            is_right = bool(difference <= variant.tolerance * other.float().abs().max())
        if not is_right:
            raise WrongDataError(f"{name!r} gave wrong numbers in tensor {number}; it is not timed")


def measure(
    variants: Mapping[str, Variant],
    *,
    rounds: int,
    warmup: int = 1,
    synchronize: Callable[[], object] = lambda: None,
) -> dict[str, Timing]:
    """Time every variant once a round, in an order that rotates; seconds of one of its `n`.

    `synchronize` waits for the device before and after each body.
    """
    names = list(variants)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for number in range(warmup + rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            variant = variants[name]
            variant.ready()
            synchronize()
            start = perf_counter()
            value = variant.body()
            if variant.seconds is None:
                del value  # so that freeing it is timed as well
                synchronize()
                taken = perf_counter() - start
            else:
                taken = variant.seconds(value)
            if number >= warmup:
                samples[name].append(taken / variant.n)
    return {name: Timing(tuple(values)) for name, values in samples.items()}


def group(
    title: str,
    variants: Mapping[str, Variant],
    reference: str,
    *,
    rounds: int,
    warmup: int = 1,
    synchronize: Callable[[], object] = lambda: None,
    **facts: Any,
) -> Group:
    """Check all variants, time them, and return the figures; `facts` are more entries of the group.

    Raises
    ------
    WrongDataError
        As `check`; nothing was timed.
    """
    for name, variant in variants.items():
        check(name, variant)
    timings = measure(variants, rounds=rounds, warmup=warmup, synchronize=synchronize)
    found = rows(timings, reference, {name: variant.figures for name, variant in variants.items()})
    return {"title": title, **facts, "reference": reference, "rows": found}


def rows(
    timings: Mapping[str, Timing], reference: str, figures: Mapping[str, Mapping[str, Any]] | None = None
) -> dict[str, dict[str, Any]]:
    """Return the rows of timed variants, with what else is known of them."""
    return {
        name: {
            "median_s": timing.median,
            "quartiles_s": list(timing.spread),
            "ratio": ratio(timing, timings[reference]),
            **(figures or {}).get(name, {}),
        }
        for name, timing in timings.items()
    }


def interleave(
    bodies: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warmup: int = 2,
    synchronize: Callable[[], object] = lambda: None,
) -> dict[str, Timing]:
    """Time plain functions as `measure` does."""
    variants = {name: Variant(body) for name, body in bodies.items()}
    return measure(variants, rounds=rounds, warmup=warmup, synchronize=synchronize)


def ratio(one: Timing, other: Timing) -> float:
    """Return the median over rounds of `one` divided by `other`: machine noise cancels within a round."""
    return statistics.median(a / b for a, b in zip(one.samples, other.samples, strict=True))
