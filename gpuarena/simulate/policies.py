"""How memory is given to requests: what one takes when it is admitted, what it holds, and when it asks for more.

The book-keeping is that of the caches: `FreeList` and `Buddy` of `gpuarena.kv.contiguous`, the pages of
`gpuarena.kv.paged`, the regions of an arena.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from gpuarena.errors import ArgumentError
from gpuarena.kv.contiguous import Buddy, FreeList
from gpuarena.kv.contiguous._slots import Slots
from gpuarena.kv.paged._pages import PagePool
from gpuarena.simulate._job import Job
from gpuarena.simulate.prefixes import page_keys

__all__ = ["POLICIES", "Growing", "Memory", "Paged", "Pieces", "Regions", "Settings"]

#: Of a pool, which knows each of its pages: these take about 3 GB.
_MOST_PAGES = 1 << 26


@dataclass(frozen=True, slots=True)
class Settings:
    """What memory is made with; sizes in slots, each for one token."""

    capacity: int
    max_length: int
    page_size: int
    fit: Literal["first", "best"]
    chunk: int
    block_size: int | None
    """Tokens for each hash of a request's prefix, where pages are shared."""
    users: int | None
    """Of the policy ``linear``."""
    most_pages: int | None = None
    """Pages that all requests together fill; more are never held, and need not be counted one by one."""


class Memory(ABC):
    """The slots of a cache under one policy, and which request holds which."""

    grows = False
    """Whether a request may need more than it was given at first; else it is given all that it needs to its end."""
    copies = False
    """Whether growing copies what the request holds."""
    n_hit = 0
    """Prompt tokens that `place` found in memory the last time."""

    def __init__(self, settings: Settings) -> None:
        self.capacity = settings.capacity

    @property
    @abstractmethod
    def free(self) -> int:
        """Slots that nobody holds."""

    @property
    @abstractmethod
    def largest_hole(self) -> int:
        """The most slots that one request can get now."""

    @abstractmethod
    def need(self, job: Job) -> int:
        """Return the slots that `job` asks for when it is admitted, before they are rounded to a block."""

    @abstractmethod
    def place(self, job: Job) -> bool:
        """Give `job` what it needs, and set its `place` and `held`; return whether it fits, unchanged if not."""

    @abstractmethod
    def release(self, job: Job) -> None:
        """Take back all that `job` holds."""

    def grow(self, job: Job) -> bool:
        """Give `job` more slots and set its `place` and `held`; return whether they fit, unchanged if not."""
        raise AssertionError("only what grows is asked to")

    @property
    def n_shared(self) -> int:
        """Slots that requests hold beyond the first that holds them."""
        return 0

    def piece(self, job: Job) -> tuple[int, int]:
        """Return ``(start, length)`` of the one piece that `job` holds."""
        raise AssertionError("only pieces fail by fragmentation, and are asked for")

    def holes(self) -> list[tuple[int, int]]:
        """Return ``(start, length)`` of each piece of free slots, by start."""
        raise AssertionError("only pieces fail by fragmentation, and are asked for")


class Pieces(Memory):
    """One contiguous piece a request, as long as it will ever need.

    Parameters
    ----------
    settings : Settings
    slots : Slots
        Who gives the pieces.
    need : callable
        From a request and the maximal length to the slots that it asks for.
    """

    def __init__(self, settings: Settings, slots: Slots, need: Callable[[Job, int], int]) -> None:
        super().__init__(settings)
        self.slots = slots
        self._need = need
        self._max_length = settings.max_length

    @property
    def free(self) -> int:
        """Slots of no piece."""
        return self.slots.free_slots

    @property
    def largest_hole(self) -> int:
        """The longest request that fits."""
        return self.slots.largest_hole

    def need(self, job: Job) -> int:
        """Return the slots that the policy asks for."""
        return self._need(job, self._max_length)

    def place(self, job: Job) -> bool:
        """Take the piece at once."""
        return self._take(job, self.need(job))

    def release(self, job: Job) -> None:
        """Free the piece."""
        self.slots.free(job.place)

    def piece(self, job: Job) -> tuple[int, int]:
        """Return where the piece of `job` lies."""
        return job.place, job.held

    def holes(self) -> list[tuple[int, int]]:
        """Return the holes between pieces."""
        return self.slots.holes()

    def _take(self, job: Job, n: int) -> bool:
        # Asked first, since a refusal is a long message that nobody reads here.
        if self.slots.length_for(n) > self.slots.largest_hole:
            return False
        job.place = self.slots.allocate(n)
        job.held = self.slots.reserved(job.place)
        return True


class Growing(Pieces):
    """One contiguous piece of whole chunks a request; one chunk more is a new piece, to which all is copied."""

    grows = copies = True

    def __init__(self, settings: Settings) -> None:
        self._chunk = chunk = settings.chunk
        slots = FreeList(settings.capacity, fit=settings.fit)
        super().__init__(settings, slots, lambda job, _: -(-(job.n_tokens + 1) // chunk) * chunk)

    def grow(self, job: Job) -> bool:
        """Take the longer piece, then free the shorter: both are needed for the copy."""
        before = job.place
        if not self._take(job, job.held + self._chunk):
            return False
        self.slots.free(before)
        return True


class Paged(Memory):
    """Pages wherever they are; one more when the last is full.

    What is left of the capacity behind the last page that is ever held is free and stays so.
    """

    grows = True

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._page_size = settings.page_size
        self._block_size = settings.block_size
        n_pages = settings.capacity // settings.page_size
        if settings.most_pages is not None:
            n_pages = min(n_pages, settings.most_pages)
        if n_pages > _MOST_PAGES:
            raise ArgumentError(
                f"{n_pages} pages of {settings.page_size} tokens are more than are simulated, {_MOST_PAGES}; give a "
                f"larger page_size or fewer requests",
                n_pages=n_pages,
            )
        self._rest = settings.capacity - n_pages * settings.page_size
        # A slot of this pool is a page: which tokens lie in it is the simulation's to know.
        self._pool = PagePool(n_pages, 1)
        self._n_held = 0

    @property
    def free(self) -> int:
        """Slots of pages that no request holds; those that are kept for later requests are free for others, too."""
        return self._pool.available * self._page_size + self._rest

    @property
    def largest_hole(self) -> int:
        """All free slots: pages need not lie together."""
        return self.free

    @property
    def n_shared(self) -> int:
        """Slots of pages, once for each request that holds them beyond the first."""
        return (self._n_held + self._pool.available - self._pool.n_pages) * self._page_size

    def need(self, job: Job) -> int:
        """Return the slots of the pages for all tokens and the next one."""
        return self._n_pages(job) * self._page_size

    def place(self, job: Job) -> bool:
        """Take the pages, of which earlier requests with the same prefix may have left some."""
        n_pages, pool = self._n_pages(job), self._pool
        keys = (
            page_keys(job.prefix, job.prompt, self._page_size, self._block_size) if self._block_size else []
        )
        if keys:
            # `match` leaves the last one to compute. Behind full pages of the prompt there may be more tokens.
            more = [-1] if job.n_tokens > len(keys) * self._page_size else []
            pages = pool.match(keys + more)
        else:
            pages = pool.sequence()
        self.n_hit = pages.n_pages * self._page_size
        if n_pages - pages.n_pages > pool.available:
            pages.free()
            return False
        pages.append(n_pages - pages.n_pages)
        if keys:
            pages.publish(keys)  # the prompt is computed at once
        job.place, job.held = pages, n_pages * self._page_size
        self._n_held += n_pages
        return True

    def release(self, job: Job) -> None:
        """Give the pages back; what was the beginning of a prompt can be found until others need the page."""
        self._n_held -= job.place.n_pages
        job.place.free()

    def grow(self, job: Job) -> bool:
        """Take one page."""
        if not self._pool.available:
            return False
        job.place.append(1)
        job.held += self._page_size
        self._n_held += 1
        return True

    def _n_pages(self, job: Job) -> int:
        return -(-(job.n_tokens + 1) // self._page_size)


class Regions(Memory):
    """An arena with one region for each user, of the maximal length, that stays."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        assert settings.users is not None, "the policy has users"
        self._length, self._users = settings.max_length, settings.users
        self._n_met = 0  # users who asked before; their regions lie first
        self._idle: list[int] = []

    @property
    def free(self) -> int:
        """Slots above the regions: an idle region is its user's."""
        return self.capacity - self._users * self._length

    @property
    def largest_hole(self) -> int:
        """All free slots, which lie together."""
        return self.free

    def need(self, job: Job) -> int:
        """Return the length of a region."""
        return self._length

    def place(self, job: Job) -> bool:
        """Take the region of a user who waits for no answer."""
        if not self._idle:
            assert self._n_met < self._users, "no more requests run than there are users"
            self._idle.append(self._n_met * self._length)
            self._n_met += 1
        job.place, job.held = self._idle.pop(), self._length
        return True

    def release(self, job: Job) -> None:
        """Let the user ask again."""
        self._idle.append(job.place)


def _longest(job: Job, max_length: int) -> int:
    return max_length


def _exact(job: Job, max_length: int) -> int:
    return job.prompt + job.output


def _pow2(job: Job, max_length: int) -> int:
    return min(max_length, job.prompt + (1 << (job.output - 1).bit_length()))


def _pieces(need: Callable[[Job, int], int]) -> Callable[[Settings], Memory]:
    return lambda settings: Pieces(settings, FreeList(settings.capacity, fit=settings.fit), need)


def _blocks(need: Callable[[Job, int], int]) -> Callable[[Settings], Memory]:
    return lambda settings: Pieces(settings, Buddy(settings.capacity), need)


#: What makes the memory of each policy.
POLICIES: dict[str, Callable[[Settings], Memory]] = {
    "max": _pieces(_longest),
    "exact": _pieces(_exact),
    "buddy_max": _blocks(_longest),
    "buddy_pow2": _blocks(_pow2),
    "buddy_exact": _blocks(_exact),
    "grow": Growing,
    "paged": Paged,
    "linear": Regions,
}
