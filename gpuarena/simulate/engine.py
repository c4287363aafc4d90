"""Serve the requests of a trace under one policy, and say what became of them and of the slots."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from heapq import heapreplace
from typing import Literal

from gpuarena.errors import ArgumentError
from gpuarena.kv.spec import positive
from gpuarena.simulate._arguments import Linear, as_jobs, as_policy, as_settings, as_trace, bounded
from gpuarena.simulate._job import Job
from gpuarena.simulate._simulation import Simulation
from gpuarena.simulate._tally import Samples, classes_of, percentile
from gpuarena.simulate.policies import POLICIES
from gpuarena.simulate.result import Result
from gpuarena.simulate.trace import Request

__all__ = ["run"]


def run(
    trace: Iterable[Request],
    policy: str | Linear,
    *,
    capacity: int,
    max_length: int,
    rate: int = 20,
    page_size: int = 16,
    fit: Literal["first", "best"] = "first",
    chunk: int = 256,
    reject: bool = False,
    share: bool = False,
    drain: bool | None = None,
    users: int | None = None,
    n_samples: int = 0,
    progress: Callable[[int, int], object] | None = None,
) -> Result:
    """Return what serving the requests of a trace does to the slots of a KV cache.

    >>> from gpuarena.simulate import Request
    >>> trace = [Request(0, prompt=100, output=40), Request(50_000, prompt=30, output=20)]
    >>> result = run(trace, "paged", capacity=160, max_length=160)
    >>> result.steps, result.sum_used, result.sum_internal, result.sum_free
    (2, 234, 22, 64)

    Time goes in steps, of which there are `rate` a second; in a step each running request makes one token. Each step,
    in this order: requests that are complete leave; requests that have arrived join a line; from its head to the first
    that does not fit they are admitted, and their tokens computed at once; each running request makes a token, in the
    order of admission, and if there is no slot for one, the request that was admitted last is preempted: it goes to
    the head of the line, and its tokens are computed anew when it is admitted again. The last step is that in which the
    last request arrives, unless `drain` says otherwise.

    Parameters
    ----------
    trace : iterable of Request
        A `RequestTrace`, or requests in any order. Times count from the first of them. Those of more than `max_length`
        tokens are left out.
    policy : str or Linear
        What a request takes of the slots:

        - ``max``, ``exact``: one piece of `max_length`, or of as many tokens as it will have, which nobody knows;
        - ``buddy_max``, ``buddy_pow2``, ``buddy_exact``: a block of a power of two for `max_length`, for the prompt and
          the next power of two of the output, or for exactly its tokens;
        - ``grow``: a piece of whole chunks for the tokens that it has, copied to a longer one when it is full;
        - ``paged``: pages for the tokens that it has, wherever they are;
        - ``linear(users=4)``, or ``"linear(4)"``: an arena with a region of `max_length` for each user. There is no line
          and nobody waits: arrival times are not looked at, and each user sends the next request of the trace when
          the last one is answered, until all are. An idle region counts as internal fragmentation, and what is
          left of the capacity as free.
    capacity : int
        Slots, each for one token.
    max_length : int
        Tokens of a request, prompt and output.
    rate : int
        Steps a second.
    page_size : int
        Tokens a page; other policies are told how many pages would do, in `Result.worst`.
    fit : {"first", "best"}
        The hole that a piece goes to, of the policies ``max``, ``exact`` and ``grow``.
    chunk : int
        Slots by which ``grow`` grows.
    reject : bool
        Turn a request away that does not fit, so that none waits: a loss system.
    share : bool
        Let requests of ``paged`` use the pages of equal prefixes, by the hashes of the trace. Only full pages of prompts
        are shared, and at least one token of a prompt is computed. `page_size` must divide the trace's block size.
        Pages that nobody holds are free, but keep what they hold until they are needed, the longest unused first.
    drain : bool, optional
        Go on until all requests are done. By default, if they all arrive at the same time, as they do
        where a trace has no times.
    users : int, optional
        Requests come from so many users, as under ``linear``: arrival times are not looked at, and each user sends the
        next request of the trace when the last one is answered or turned away, until all are. This is how other
        policies compare with ``linear``.
    n_samples : int
        Keep so many samples at most, evenly apart.
    progress : callable, optional
        Called now and then with the steps done and the steps that there are; the latter is estimated where
        requests are drained. What it raises ends the simulation.

    Raises
    ------
    ArgumentError
        A policy that there is not; a size that is not positive, or over 2**63 - 1; a capacity that is too small for one request of
        `max_length` (`least_capacity` is the one that is needed); no requests, or only longer ones; prompts or outputs
        of 0; `share` with another policy than ``paged``, or with pages that do not divide a block; `fit`; other
        `users` than those of ``linear``.
    ArgumentTypeError
        Something of the wrong type.

    Notes
    -----
    The three buddy policies are those of the Orca paper (Yu et al., OSDI 2022) as the vLLM paper names them (Kwon et
    al., SOSP 2023).
    """
    name, its_users = as_policy(policy)
    users = its_users if users is None else positive(users, "users")
    if its_users not in (None, users):
        raise ArgumentError(
            f"users={users}, but the policy linear({its_users}) has {its_users}; leave users out"
        )
    requests = as_trace(trace)
    rate = bounded(rate, "rate")
    n_samples = positive(n_samples, "n_samples", least=0)
    settings = as_settings(
        name,
        its_users,
        capacity=capacity,
        max_length=max_length,
        page_size=page_size,
        fit=fit,
        chunk=chunk,
        block_size=_block_size(name, requests.block_size, page_size) if share else None,
    )
    jobs = as_jobs(requests, rate=rate, max_length=settings.max_length)
    last_step: int | None = jobs[-1].arrival
    if users is not None or drain or (drain is None and last_step == 0 and len(jobs) > 1):
        last_step = None  # goes on until all are done
    n_steps = None if last_step is None else last_step + 1
    if its_users is not None:  # who never wait for memory
        n_steps = _closed_loop_steps(jobs, its_users)
    simulation = Simulation(
        jobs,
        POLICIES[name](replace(settings, most_pages=_pages_of(jobs, settings.page_size))),
        last_step=last_step,
        users=users,
        reject=bool(reject),
        rate=rate,
        page_size=settings.page_size,
        samples=Samples(n_samples, n_steps),
    )
    if progress is None:
        while simulation.advance():
            pass
    else:
        _advance_and_tell(simulation, n_steps, progress)
    tally = simulation.tally
    waits = [job.waited for job in jobs if job.waited is not None]
    slots = settings.capacity * tally.steps
    return Result(
        policy=name,
        capacity=settings.capacity,
        max_length=settings.max_length,
        rate=rate,
        fit=settings.fit,
        page_size=settings.page_size,
        chunk=settings.chunk,
        users=users,
        reject=bool(reject),
        requests=len(jobs),
        dropped=len(requests) - len(jobs),
        steps=tally.steps,
        sum_used=tally.sum_used,
        sum_reserved=tally.sum_reserved,
        sum_internal=slots - tally.sum_used - tally.sum_reserved - tally.sum_free,
        sum_free=tally.sum_free,
        sum_running=tally.sum_running,
        max_running=tally.max_running,
        done=tally.done,
        unadmitted=len(jobs) - len(waits),
        tokens=tally.sum_running,
        first_fail_nofree=tally.first_fail_nofree,
        first_fail_frag=tally.first_fail_frag,
        blocked_steps=tally.blocked_steps,
        blocked_frag_steps=tally.blocked_frag_steps,
        preempt=tally.preempt,
        copied=tally.copied,
        rejected=tally.rejected,
        wait_p50_s=percentile(waits, 50) / rate,
        wait_p99_s=percentile(waits, 99) / rate,
        ext_mean=round(tally.sum_ext / tally.steps, 6),
        hit_tokens=tally.hit_tokens,
        classes=classes_of(jobs),
        worst=tally.worst,
        n_failed_at_40=tally.n_failed_at_40,
        samples=tuple(simulation.samples.taken),
        share=bool(share),
        drain=last_step is None,
        peak_taken=tally.peak_taken,
    )


def _block_size(name: str, block_size: int | None, page_size: int) -> int | None:
    """Return the tokens for each hash, None if there are no hashes; raise if pages cannot be shared by them."""
    if name != "paged":
        raise ArgumentError(
            f"share=True is for the policy 'paged', not {name!r}: others have no pages to share"
        )
    page_size = positive(page_size, "page_size")
    if block_size is not None and block_size % page_size:
        raise ArgumentError(
            f"share=True: pages of {page_size} tokens do not divide the blocks of {block_size} tokens whose hashes the "
            f"trace has; use a page_size that does, such as {block_size}",
            page_size=page_size,
            block_size=block_size,
        )
    return block_size


def _pages_of(jobs: list[Job], page_size: int) -> int:
    """Return the pages that all requests take in the end if none shares any."""
    return sum(-(-job.length // page_size) for job in jobs)


def _closed_loop_steps(jobs: list[Job], users: int) -> int:
    """Return the steps until `users` have sent all requests and have all answers."""
    ends = [0] * min(users, len(jobs))  # by user who sends any; a heap
    for job in jobs:
        heapreplace(ends, ends[0] + job.output)
    return max(ends)


def _advance_and_tell(
    simulation: Simulation, n_steps: int | None, progress: Callable[[int, int], object]
) -> None:
    """Run, and tell about a hundred times how far it is."""
    n_told = 0
    n_jobs = len(simulation.jobs)
    while simulation.advance():
        tally = simulation.tally
        # Of a run that drains, the end is not known: as if the other requests took as long as those done.
        total = n_steps or max(tally.steps, tally.steps * n_jobs // max(1, tally.done + tally.rejected))
        share = 100 * tally.steps // total
        if share > n_told:
            n_told = share
            progress(tally.steps, total)
    if n_told < 100:
        progress(simulation.tally.steps, simulation.tally.steps)
