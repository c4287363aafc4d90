"""Traces that are drawn at random, to try things without a file."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import numpy as np

from gpuarena.errors import ArgumentError, ArgumentTypeError
from gpuarena.simulate.trace import Request, RequestTrace

__all__ = ["synthetic"]

_Z99 = NormalDist().inv_cdf(0.99)
#: A lognormal distribution has no 99th percentile further than this from its mean.
_MOST_P99 = math.exp(_Z99 * _Z99 / 2)


def synthetic(
    n: int = 2000,
    *,
    rate: float = 5.53,
    cv: float = 1.0,
    prompt_mean: float = 1154.7,
    prompt_p99: float = 4142.0,
    prompt_max: int = 14050,
    output_mean: float = 211.1,
    output_p99: float = 601.0,
    output_max: int = 1000,
    seed: int = 0,
) -> RequestTrace:
    """Return `n` requests with random arrivals and lengths.

    >>> synthetic(1000)
    RequestTrace('synthetic', 1000 requests, 175.2 s)
    >>> synthetic(1000)[:100] == synthetic(100)
    True

    Times between arrivals are exponential, and lengths lognormal, rounded and clipped. Without arguments the figures
    are those of the conversation trace that Azure published in 2023 (19 366 requests in 3 502 s); the shape is not:
    its medians are 1 020 and 129 tokens, those of the lognormal ones about 943 and 186.

    The same arguments give the same trace wherever `numpy.random.PCG64` and the C library's ``exp`` agree.

    Parameters
    ----------
    n : int
        Requests. Fewer are the first of more.
    rate : float
        Arrivals a second, in the mean.
    cv : float
        Coefficient of variation of the times between arrivals: 1 for a Poisson process, more for bursts (a gamma
        distribution), 0 for a steady beat.
    prompt_mean, prompt_p99, output_mean, output_p99 : float
        Tokens, before clipping. The percentile must lie between the mean and 14.9 times the mean.
    prompt_max, output_max : int
        Tokens; longer ones are cut to this. The shortest are 1.
    seed : int
        Not negative.

    Raises
    ------
    ArgumentTypeError
        An argument is no number.
    ArgumentError
        It is out of range.
    """
    for name, count, least in (
        ("n", n, 1),
        ("prompt_max", prompt_max, 1),
        ("output_max", output_max, 1),
        ("seed", seed, 0),
    ):
        if not isinstance(count, int) or isinstance(count, bool):
            raise ArgumentTypeError(f"{name} must be an integer, not {type(count).__name__}")
        if count < least:
            raise ArgumentError(f"{name} must be at least {least}, not {count}")
    _check_number("rate", rate, "arrivals a second", above_zero=True)
    _check_number("cv", cv, "", above_zero=False)
    if cv > 100:
        raise ArgumentError(f"cv must be at most 100, not {cv}")
    # Streams of their own, so that the first requests do not depend on how many follow.
    gaps, prompts, outputs = (
        np.random.Generator(np.random.PCG64(child)) for child in np.random.SeedSequence(seed).spawn(3)
    )
    arrivals = _arrivals_us(gaps, n, rate, cv)
    prompt = _lengths(prompts, n, "prompt", prompt_mean, prompt_p99, prompt_max)
    output = _lengths(outputs, n, "output", output_mean, output_p99, output_max)
    return RequestTrace(map(Request, arrivals, prompt, output), name="synthetic")


def _check_number(name: str, value: Any, unit: str, *, above_zero: bool) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ArgumentTypeError(f"{name} must be a number, not {type(value).__name__}")
    if not math.isfinite(value) or value < 0 or (above_zero and value == 0):
        least = "more than" if above_zero else "at least"
        raise ArgumentError(f"{name} must be {least} 0{' ' + unit if unit else ''}, not {value}")


def _arrivals_us(generator: np.random.Generator, n: int, rate: float, cv: float) -> list[int]:
    if cv < 1e-6:  # whose square may be no float
        gaps = np.ones(n)
    else:
        shape = 1 / cv**2
        gaps = generator.standard_gamma(shape, n) / shape
    times = np.cumsum(gaps)
    duration_s = float(times[-1]) / rate
    if duration_s >= 1e9:
        raise ArgumentError(f"at a rate of {rate} a second {n} requests take {duration_s:.3g} s, over 10**9")
    return ((times - times[0]) / rate * 1e6).astype(np.int64).tolist()  # type: ignore[no-any-return]


def _lengths(
    generator: np.random.Generator, n: int, what: str, mean: float, p99: float, longest: int
) -> list[int]:
    _check_number(f"{what}_mean", mean, "tokens", above_zero=True)
    _check_number(f"{what}_p99", p99, "tokens", above_zero=True)
    if mean > 1e12:
        raise ArgumentError(f"{what}_mean must be at most 10**12 tokens, not {mean}")
    if not mean <= p99 <= mean * _MOST_P99:
        raise ArgumentError(
            f"{what}_p99 of {p99} tokens does not go with a mean of {mean}: in a lognormal distribution it lies "
            f"between the mean and {_MOST_P99:.1f} times the mean, {mean * _MOST_P99:.0f}"
        )
    # mean = exp(mu + sigma^2 / 2) and p99 = exp(mu + z sigma), solved for the smaller sigma
    sigma = _Z99 - math.sqrt(max(0.0, _Z99**2 - 2 * math.log(p99 / mean)))
    mu = math.log(mean) - sigma**2 / 2
    drawn = np.exp(mu + sigma * generator.standard_normal(n))
    return np.clip(np.rint(drawn), 1, longest).astype(np.int64).tolist()  # type: ignore[no-any-return]
