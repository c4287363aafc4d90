"""One simulation: what happens to requests and slots, step by step.

A step makes one token for each running request. Nothing is done for it, though: a request ends, and fills what it
holds, at steps that are known when it is admitted, so these lie in a heap of events; and what a step adds to the sums
follows from a few running totals. Steps in which nothing happens are passed at once.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush

from gpuarena.simulate._job import Job
from gpuarena.simulate._tally import Samples, Tally
from gpuarena.simulate.policies import Memory
from gpuarena.simulate.result import Moment, Sample

__all__ = ["Simulation"]

#: Kinds of events, in the order in which they happen in a step; requests are admitted in between.
_RETIRE, _GROW = 0, 1


class Simulation:
    """Requests, the memory that they share, and the figures.

    Parameters
    ----------
    jobs : list of Job
        By arrival.
    memory : Memory
    last_step : int or None
        The step after which nothing is measured any more; None goes on until all requests are done.
    users : int or None
        If given, requests do not arrive by the clock: one comes for each user, the next one when it is done.
    reject : bool
        Whether a request that does not fit is turned away, instead of waiting.
    rate, page_size : int
        Steps a second, and tokens, for the description of moments.
    samples : Samples
    """

    def __init__(
        self,
        jobs: list[Job],
        memory: Memory,
        *,
        last_step: int | None,
        users: int | None,
        reject: bool,
        rate: int,
        page_size: int,
        samples: Samples,
    ) -> None:
        self.jobs = jobs
        self.memory = memory
        self.tally = Tally()
        self.samples = samples
        self.step = 0
        self._last_step = last_step
        self._users = users
        self._reject = reject
        self._rate = rate
        self._page_size = page_size
        self._queue: deque[Job] = deque()
        self._running: dict[int, Job] = {}  # by number of admission, and so in that order
        # A heap of step, kind, and number of the admission that it was made for.
        self._events: list[tuple[int, int, int, Job]] = []
        self._n_arrived = 0
        self._n_admissions = 0
        self._n_tokens = 0  # of running requests, in memory
        self._n_left = 0  # of running requests, to be made
        self._is_blocked = self._is_fragmented = False  # whether the first in line found no room, and why
        self._may_fit = True  # whether slots were freed or moved since it did not

    def advance(self) -> bool:
        """Go to the next step in which anything happens; return whether there is one."""
        self._retire()
        self._arrive()
        if self._is_over():
            return False
        self._admit()
        self._grow()
        n_steps = self._next_step() - self.step
        self._measure(n_steps)
        self.step += n_steps
        return True

    def _is_over(self) -> bool:
        if self._last_step is not None:
            return self.step > self._last_step
        return not self._running and not self._queue and self._n_arrived == len(self.jobs)

    def _next_step(self) -> int:
        """Return the next step in which anything happens."""
        if self._queue and self._may_fit:
            return self.step + 1
        if self._has_idle_user:  # who was turned away
            return self.step + 1
        steps = [] if self._last_step is None else [self._last_step + 1]
        if self._events:
            steps.append(self._events[0][0])
        if self._users is None and self._n_arrived < len(self.jobs):
            steps.append(self.jobs[self._n_arrived].arrival)
        return min(steps)

    @property
    def _has_idle_user(self) -> bool:
        """Whether a user waits for no answer and has more to send."""
        if self._users is None or self._n_arrived == len(self.jobs):
            return False
        return len(self._running) + len(self._queue) < self._users

    def _retire(self) -> None:
        """Let requests go that have all their tokens, in the order in which they were admitted."""
        events = self._events
        while events and events[0][:2] == (self.step, _RETIRE):
            _, _, admission, job = heappop(events)
            if job.order == admission:  # else it was preempted since
                self._leave(job)
                job.is_done = True
                self.tally.done += 1

    def _arrive(self) -> None:
        """Let requests join the line."""
        jobs, queue = self.jobs, self._queue
        while self._n_arrived < len(jobs):
            job = jobs[self._n_arrived]
            if self._users is not None:
                if not self._has_idle_user:
                    break
                job.arrival = self.step
            elif job.arrival > self.step:
                break
            queue.append(job)
            self._n_arrived += 1

    def _admit(self) -> None:
        """Let requests run, from the head of the line to the first that does not fit."""
        queue = self._queue
        if self._is_blocked and not self._may_fit:
            return
        self._is_blocked = False
        while queue:
            job = queue[0]
            if self.memory.place(job):
                queue.popleft()
                self._start(job)
                continue
            self._fail(job)
            # One that has made a token is not turned away any more: it waits for its pages at the head of the line.
            if not self._reject or job.generated:
                self._is_blocked, self._may_fit = True, False
                self._is_fragmented = self.memory.free >= self.memory.need(job)
                break
            queue.popleft()
            job.rejected = True
            self.tally.rejected += 1

    def _start(self, job: Job) -> None:
        job.since, job.order = self.step, self._n_admissions
        self._n_admissions += 1
        self._running[job.order] = job
        self._n_tokens += job.n_tokens
        self._n_left += job.n_left
        if job.waited is None:
            job.waited = self.step - job.arrival
            self.tally.hit_tokens += self.memory.n_hit
        heappush(self._events, (self.step + job.n_left, _RETIRE, job.order, job))
        self._expect_growth(job)

    def _expect_growth(self, job: Job) -> None:
        """Note the step in which `job` has filled what it holds, if it has more tokens to come."""
        if job.held < job.length:
            heappush(self._events, (job.since + job.held - job.n_tokens, _GROW, job.order, job))

    def _leave(self, job: Job) -> None:
        """Take a running request out, with the tokens that it has by now."""
        job.generated += self.step - job.since
        self._n_tokens -= job.n_tokens
        self._n_left -= job.n_left
        self.memory.release(job)
        del self._running[job.order]
        job.order = -1
        self._may_fit = True

    def _fail(self, job: Job) -> None:
        """Count a request that does not fit, the first time."""
        if job.failed or job.waited is not None:
            return
        job.failed = True
        tally, free = self.tally, self.memory.free
        if free < self.memory.need(job):
            tally.first_fail_nofree += 1
            return
        tally.first_fail_frag += 1
        tally.n_failed_at_40 += 5 * free >= 2 * self.memory.capacity
        if tally.worst is None or free > tally.worst.free:
            tally.worst = self._moment(job)

    def _grow(self) -> None:
        """Give more slots to the requests whose next token has none, in the order in which they were admitted.

        If there are none, the request that was admitted last is preempted, which may be the one that asks.
        """
        events, memory, tally = self._events, self.memory, self.tally
        while events and events[0][0] == self.step:
            _, _, admission, job = heappop(events)
            while job.order == admission:
                held = job.held
                if memory.grow(job):
                    if memory.copies:
                        tally.peak_taken = max(tally.peak_taken, memory.capacity - memory.free + held)
                        tally.copied += job.tokens_at(self.step)
                        self._may_fit = True
                    self._expect_growth(job)
                    break
                last = self._running[next(reversed(self._running))]
                self._leave(last)
                self._queue.appendleft(last)
                tally.preempt += 1

    def _measure(self, n_steps: int) -> None:
        """Make a token for each running request, and add up, in this step and the following ones that are alike."""
        tally, memory = self.tally, self.memory
        n_running, free, hole = len(self._running), memory.free, memory.largest_hole
        used = self._n_tokens + n_running - memory.n_shared
        reserved = 0 if memory.grows else self._n_left - n_running
        taken = memory.capacity - free
        tally.peak_taken = max(tally.peak_taken, taken)
        while self.samples.next_step < self.step + n_steps:
            at = int(self.samples.next_step)
            more = n_running * (at - self.step)
            now, later = used + more, 0 if memory.grows else reserved - more
            self.samples.add(
                Sample(at, now, later, taken - now - later, free, hole, n_running, len(self._queue))
            )
        # Each step has n_running more tokens than the one before.
        more = n_running * (n_steps * (n_steps - 1) // 2)
        tally.steps += n_steps
        tally.sum_used += n_steps * used + more
        tally.sum_reserved += 0 if memory.grows else n_steps * reserved - more
        tally.sum_free += n_steps * free
        tally.sum_running += n_steps * n_running
        tally.max_running = max(tally.max_running, n_running)
        if free:
            tally.sum_ext += n_steps * (1 - hole / free)
        if self._is_blocked:
            tally.blocked_steps += n_steps
            tally.blocked_frag_steps += n_steps * self._is_fragmented
        self._n_tokens += n_steps * n_running
        self._n_left -= n_steps * n_running

    def _moment(self, job: Job) -> Moment:
        """Describe the slots at the start of this step, where `job` does not fit."""
        memory, pages_needed, allocations = self.memory, -(-(job.n_tokens + 1) // self._page_size), []
        for other in self._running.values():
            n_tokens = other.tokens_at(self.step)
            pages_needed += -(-n_tokens // self._page_size)
            allocations.append((*memory.piece(other), n_tokens))
        return Moment(
            step=self.step,
            time_s=self.step / self._rate,
            need=memory.need(job),
            free=memory.free,
            largest_hole=memory.largest_hole,
            capacity=memory.capacity,
            n_waiting=len(self._queue),
            holes=tuple(memory.holes()),
            allocations=tuple(sorted(allocations)),
            pages_needed=pages_needed,
            n_pages=memory.capacity // self._page_size,
        )
