"""Serve a trace on a bitmap of slots, one slot and one token at a time: slow, and nothing but lists.

What it shares with `gpuarena` are the names of fields. Holes are found by looking at all slots, and buddy blocks by
trying all places where one may lie.
"""

from __future__ import annotations

from typing import Any

GROWS = ("grow", "paged")


class Serving:
    def __init__(self, request: Any, index: int, arrival: int) -> None:
        self.index, self.arrival = index, arrival
        self.prompt, self.output, self.prefix = request.prompt, request.output, request.prefix
        self.made = 0
        self.start = self.asked = 0
        self.pages: list[int] = []
        self.admitted: int | None = None
        self.failed = self.rejected = self.done = False

    @property
    def live(self) -> int:
        return self.prompt + self.made


class BruteForce:
    """Run with `serve`; `figures` are the fields of a result."""

    def __init__(self, trace: Any, policy: str, **options: Any) -> None:
        self.policy = policy
        self.capacity: int = options["capacity"]
        self.longest: int = options["max_length"]
        self.rate: int = options.get("rate", 20)
        self.page_size: int = options.get("page_size", 16)
        self.fit: str = options.get("fit", "first")
        self.chunk: int = options.get("chunk", 256)
        self.reject: bool = options.get("reject", False)
        self.users: int | None = options.get("users")
        self.n_samples: int = options.get("n_samples", 0)
        self.block_size: int | None = options.get("block_size")  # pages are shared if given
        first = trace[0].arrival_us
        self.all = [
            Serving(request, index, (request.arrival_us - first) * self.rate // 1_000_000)
            for index, request in enumerate(trace)
            if request.prompt + request.output <= self.longest
        ]
        self.dropped = len(trace) - len(self.all)
        last = self.all[-1].arrival
        self.drain = self.users is not None or options.get("drain", last == 0 and len(self.all) > 1)
        self.last = last
        self.bitmap: list[int | None] = [None] * self.capacity  # who has the slot
        self.pages: list[list[int]] = [[] for _ in range(self.capacity // self.page_size)]  # who has the page
        self.published: dict[tuple[int, ...], int] = {}  # what the pages up to this one hold -> the page
        self.unused: list[int] = []  # published pages that nobody has, the longest unused first
        self.line: list[Serving] = []
        self.running: list[Serving] = []
        self.steps: list[dict[str, Any]] = []
        self.n = dict.fromkeys(
            [
                "first_fail_nofree",
                "first_fail_frag",
                "preempt",
                "copied",
                "rejected",
                "hit_tokens",
                "n_failed_at_40",
            ],
            0,
        )
        self.worst: dict[str, Any] | None = None
        self.most_taken = 0

    # Slots

    def runs(self) -> list[tuple[int, int]]:
        """Holes as (start, length)."""
        found: list[tuple[int, int]] = []
        for slot, owner in enumerate(self.bitmap):
            if owner is None:
                if found and sum(found[-1]) == slot:
                    found[-1] = (found[-1][0], found[-1][1] + 1)
                else:
                    found.append((slot, 1))
        return found

    def blocks(self) -> list[tuple[int, int]]:
        """Free blocks of a power of two that lie in no longer free one."""
        found: list[tuple[int, int]] = []
        size = 1 << self.capacity.bit_length()
        while size:
            for start in range(0, self.capacity - size + 1, size):
                if any(self.bitmap[slot] is not None for slot in range(start, start + size)):
                    continue
                if not any(a <= start < a + length for a, length in found):
                    found.append((start, size))
            size //= 2
        return sorted(found)

    def holes(self) -> list[tuple[int, int]]:
        return self.blocks() if self.policy.startswith("buddy") else self.runs()

    def free(self) -> int:
        if self.policy == "linear":
            assert self.users is not None
            return self.capacity - self.users * self.longest
        if self.policy == "paged":
            free = sum(not holders for holders in self.pages)
            return free * self.page_size + self.capacity - len(self.pages) * self.page_size
        return self.bitmap.count(None)

    def largest(self) -> int:
        if self.policy in ("paged", "linear"):
            return self.free()
        return max((length for _, length in self.holes()), default=0)

    def need(self, one: Serving) -> int:
        kind = self.policy.removeprefix("buddy_")
        if kind == "max":
            return self.longest
        if kind == "exact":
            return one.prompt + one.output
        if kind == "pow2":
            power = 1
            while power < one.output:
                power *= 2
            return min(self.longest, one.prompt + power)
        unit = self.chunk if kind == "grow" else self.page_size
        need = unit
        while need < one.live + 1:
            need += unit
        return need

    def find(self, n: int) -> tuple[int, int] | None:
        """Where a request of n goes, and what it takes there."""
        if self.policy.startswith("buddy"):
            taken = 1
            while taken < n:
                taken *= 2
            order = lambda hole: (hole[1], hole[0])  # noqa: E731
        else:
            taken = n
            order = lambda hole: (hole[1] if self.fit == "best" else 0, hole[0])  # noqa: E731
        fitting = sorted((hole for hole in self.holes() if hole[1] >= taken), key=order)
        return (fitting[0][0], taken) if fitting else None

    def mark(self, start: int, n: int, owner: int | None) -> None:
        for slot in range(start, start + n):
            assert (self.bitmap[slot] is None) != (owner is None)
            self.bitmap[slot] = owner

    # Pages

    def take_page(self, one: Serving) -> bool:
        for page, holders in enumerate(self.pages):
            if not holders and page not in self.published.values():
                break
        else:
            if not self.unused:
                return False
            page = self.unused.pop(0)
            self.published = {key: other for key, other in self.published.items() if other != page}
        self.pages[page].append(one.index)
        one.pages.append(page)
        return True

    def drop_page(self, one: Serving, page: int) -> None:
        self.pages[page].remove(one.index)
        if not self.pages[page] and page in self.published.values():
            self.unused.append(page)

    def hold_page(self, one: Serving, page: int) -> None:
        self.pages[page].append(one.index)
        if page in self.unused:
            self.unused.remove(page)

    def contents(self, one: Serving) -> list[tuple[int, ...]]:
        """For each full page of the prompt, what it and those before it hold."""
        keys: list[tuple[int, ...]] = []
        if self.block_size is None:
            return keys
        for page in range(one.prompt // self.page_size):
            block, inside = divmod(page * self.page_size, self.block_size)
            if block == len(one.prefix):
                break
            keys.append((*(keys[-1] if keys else ()), one.prefix[block], inside))
        return keys

    def place_pages(self, one: Serving) -> bool:
        keys = self.contents(one)
        for number, key in enumerate(keys):
            if key not in self.published or (number + 1) * self.page_size >= one.live:
                break
            self.hold_page(one, self.published[key])
            one.pages.append(self.published[key])
        n_hit = len(one.pages)
        wanted = self.need(one) // self.page_size
        if wanted - n_hit > sum(not holders for holders in self.pages):
            self.drop_pages(one)
            return False
        while len(one.pages) < wanted:
            assert self.take_page(one)
        for number, key in enumerate(keys):
            mine, other = one.pages[number], self.published.setdefault(key, one.pages[number])
            if mine != other:
                self.hold_page(one, other)
                self.drop_page(one, mine)
                one.pages[number] = other
        if one.admitted is None:
            self.n["hit_tokens"] += n_hit * self.page_size
        return True

    def drop_pages(self, one: Serving) -> None:
        for page in reversed(one.pages):
            self.drop_page(one, page)
        one.pages = []

    # Requests

    def place(self, one: Serving) -> bool:
        if self.policy == "linear":
            return True
        if self.policy == "paged":
            return self.place_pages(one)
        found = self.find(self.need(one))
        if found is None:
            return False
        one.start, one.asked = found
        self.mark(*found, one.index)
        return True

    def release(self, one: Serving) -> None:
        self.running.remove(one)
        if self.policy == "paged":
            self.drop_pages(one)
        elif self.policy != "linear":
            self.mark(one.start, one.asked, None)

    def grow(self, one: Serving) -> bool:
        if self.policy == "paged":
            return self.take_page(one)
        found = self.find(one.asked + self.chunk)
        if found is None:
            return False
        self.mark(*found, one.index)
        self.most_taken = max(self.most_taken, len([owner for owner in self.bitmap if owner is not None]))
        self.mark(one.start, one.asked, None)
        one.start, one.asked = found
        self.n["copied"] += one.live
        return True

    def fail(self, one: Serving, step: int) -> None:
        if one.failed or one.admitted is not None:
            return
        one.failed = True
        if self.free() < self.need(one):
            self.n["first_fail_nofree"] += 1
            return
        self.n["first_fail_frag"] += 1
        if self.free() >= 0.4 * self.capacity:
            self.n["n_failed_at_40"] += 1
        if self.worst is None or self.free() > self.worst["free"]:
            needs = [other.live for other in self.running] + [one.live + 1]
            self.worst = {
                "step": step,
                "time_s": step / self.rate,
                "need": self.need(one),
                "free": self.free(),
                "largest_hole": self.largest(),
                "capacity": self.capacity,
                "n_waiting": len(self.line),
                "holes": tuple(self.holes()),
                "allocations": tuple(
                    sorted((other.start, other.asked, other.live) for other in self.running)
                ),
                "pages_needed": sum((n + self.page_size - 1) // self.page_size for n in needs),
                "n_pages": self.capacity // self.page_size,
            }

    def admit(self, step: int) -> tuple[bool, bool]:
        """Whether the line is blocked, and by fragmentation."""
        while self.line:
            one = self.line[0]
            if self.place(one):
                self.line.pop(0)
                self.running.append(one)
                if one.admitted is None:
                    one.admitted = step
                continue
            self.fail(one, step)
            if self.reject and one.made == 0:
                self.line.pop(0)
                one.rejected = True
                self.n["rejected"] += 1
                continue
            return True, self.free() >= self.need(one)
        return False, False

    def decode(self) -> None:
        position = 0
        while position < len(self.running):
            one = self.running[position]
            held = len(one.pages) * self.page_size if self.policy == "paged" else one.asked
            if self.policy in GROWS and one.live + 1 > held and not self.grow(one):
                last = self.running[-1]
                self.release(last)
                self.line.insert(0, last)
                self.n["preempt"] += 1
                continue  # the same one again, unless it was the last
            one.made += 1
            position += 1

    def used(self) -> int:
        if self.policy != "paged":
            return sum(one.live for one in self.running)
        filled: dict[int, int] = {}
        for one in self.running:
            for number, page in enumerate(one.pages):
                n = min(self.page_size, max(0, one.live - number * self.page_size))
                filled[page] = max(filled.get(page, 0), n)
        return sum(filled.values())

    def serve(self) -> dict[str, Any]:
        """Return the fields of a result, without the arguments."""
        step, arrived = 0, 0
        while True:
            for one in [one for one in self.running if one.made == one.output]:
                self.release(one)
                one.done = True
            while arrived < len(self.all):
                one = self.all[arrived]
                if self.users is None and one.arrival > step:
                    break
                if self.users is not None:
                    if len(self.running) + len(self.line) >= self.users:
                        break
                    one.arrival = step
                self.line.append(one)
                arrived += 1
            if step > self.last and not self.drain:
                break
            if self.drain and arrived == len(self.all) and not self.running and not self.line:
                break
            blocked, by_fragmentation = self.admit(step)
            self.decode()
            used, free, largest = self.used(), self.free(), self.largest()
            reserved = 0 if self.policy in GROWS else sum(one.output - one.made for one in self.running)
            self.steps.append(
                {
                    "step": step,
                    "used": used,
                    "reserved": reserved,
                    "internal": self.capacity - free - used - reserved,
                    "free": free,
                    "largest_hole": largest,
                    "n_running": len(self.running),
                    "n_waiting": len(self.line),
                    "ext": 1 - largest / free if free else 0.0,
                    "blocked": blocked,
                    "by_fragmentation": by_fragmentation,
                }
            )
            step += 1
        return self.figures()

    def figures(self) -> dict[str, Any]:
        waits = sorted(one.admitted - one.arrival for one in self.all if one.admitted is not None)
        total = {name: sum(one[name] for one in self.steps) for name in self.steps[0]}
        return {
            "requests": len(self.all),
            "dropped": self.dropped,
            "steps": len(self.steps),
            "sum_used": total["used"],
            "sum_reserved": total["reserved"],
            "sum_internal": total["internal"],
            "sum_free": total["free"],
            "sum_running": total["n_running"],
            "max_running": max(one["n_running"] for one in self.steps),
            "done": sum(one.done for one in self.all),
            "unadmitted": sum(one.admitted is None for one in self.all),
            "tokens": sum(one.made for one in self.all),
            "blocked_steps": total["blocked"],
            "blocked_frag_steps": total["by_fragmentation"],
            "wait_p50_s": waits[len(waits) // 2] / self.rate if waits else 0.0,
            "wait_p99_s": waits[99 * len(waits) // 100] / self.rate if waits else 0.0,
            "ext_mean": total["ext"] / len(self.steps),
            "worst": self.worst,
            "peak_taken": max(self.most_taken, *(self.capacity - one["free"] for one in self.steps)),
            "classes": self.classes(),
            "samples": self.samples(),
            **self.n,
        }

    def classes(self) -> tuple[dict[str, Any], ...]:
        found = []
        for least, limit in ((0, 1024), (1024, 2048), (2048, 4096), (4096, None)):
            mine = [one for one in self.all if least <= one.prompt + one.output < (limit or 10**9)]
            found.append(
                {
                    "least": least,
                    "limit": limit,
                    "n_requests": len(mine),
                    "n_rejected": len([one for one in mine if one.rejected]),
                    "n_failed": len([one for one in mine if one.failed]),
                    "n_done": len([one for one in mine if one.done]),
                }
            )
        return tuple(found)

    def samples(self) -> tuple[dict[str, Any], ...]:
        """At most so many, at multiples of the smallest stride; a power of two where the end is not known before."""
        if not self.n_samples:
            return ()
        stride = 1
        while len(self.steps[::stride]) > self.n_samples:
            stride = 2 * stride if self.drain and self.policy != "linear" else stride + 1
        names = ("step", "used", "reserved", "internal", "free", "largest_hole", "n_running", "n_waiting")
        return tuple({name: one[name] for name in names} for one in self.steps[::stride])
