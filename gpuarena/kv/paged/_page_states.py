"""The state of each page of a pool: free, used or cached. Pure integers; the callers check what they ask."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from gpuarena.kv.paged._prefixes import PrefixIndex

__all__ = ["PageStates"]


class PageStates:
    """Reference counts, the free pages, and the cached pages in the order in which they are to go.

    A page is *used* while its count is at least 1. At 0 it becomes *cached* if it is published, else *free*.

    Evicting the page that has been unused for longest never takes a page before those behind it. Whoever holds a
    published page holds the published pages before it as well, and releases them after it; so a page never becomes
    unused before the pages behind it do.
    """

    __slots__ = ("_cached", "_counts", "_free", "index", "n_evicted", "n_pages")

    def __init__(self, n_pages: int) -> None:
        self.n_pages = n_pages
        self.index = PrefixIndex()
        self.n_evicted = 0
        self._counts = [0] * n_pages
        self._free = list(range(n_pages - 1, -1, -1))  # a stack: page 0 goes first
        self._cached: OrderedDict[int, None] = (
            OrderedDict()
        )  # the longest unused first; a dict's front is slow

    @property
    def n_free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    @property
    def n_cached(self) -> int:
        """Published pages that no sequence holds."""
        return len(self._cached)

    @property
    def available(self) -> int:
        """Pages that `take` can give."""
        return len(self._free) + len(self._cached)

    def is_shared(self, page: int) -> bool:
        """Return whether more than one sequence holds `page`."""
        return self._counts[page] > 1

    def count(self, page: int) -> int:
        """Return how many sequences hold `page`."""
        return self._counts[page]

    def take(self) -> int:
        """Return a page with one reference: a free one, else the cached one that was unused for longest.

        >>> states = PageStates(2)
        >>> states.take(), states.take(), states.available
        (0, 1, 0)
        """
        if self._free:
            page = self._free.pop()
        else:
            assert self._cached, "the caller saw that there is a page"
            page, _ = self._cached.popitem(last=False)
            self.index.remove(page)
            self.n_evicted += 1
        self._counts[page] = 1
        return page

    def hold(self, page: int) -> None:
        """Add a reference to a page that is used or cached."""
        if self._counts[page] == 0:
            del self._cached[page]
        self._counts[page] += 1

    def release(self, page: int) -> None:
        """Drop a reference. Of several pages, the last of a sequence goes first."""
        self.release_all([page])

    def release_all(self, pages: list[int]) -> None:
        """Drop a reference of each page of a sequence, the last one first; `pages` is empty afterwards.

        >>> states = PageStates(2)
        >>> states.release_all([states.take(), states.take()])
        >>> states.take()  # the first page was released last
        0
        """
        counts, free, published = self._counts, self._free, self.index.of
        while pages:
            page = pages.pop()
            counts[page] = count = counts[page] - 1
            assert count >= 0, "a page is released once for each reference"
            if count == 0:
                if published(page) is None:
                    free.append(page)
                else:
                    self._cached[page] = None

    def forget(self) -> None:
        """Publish nothing any more; cached pages become free, used ones stay with their sequences."""
        self.index = PrefixIndex()
        self._free.extend(reversed(self._cached))  # the longest unused goes first
        self._cached.clear()

    def rebuild(self, held: Iterable[list[int]]) -> None:
        """Work everything out from the pages that sequences hold, after an interrupt that left a change half done.

        >>> states = PageStates(3)
        >>> lost = states.take(), states.take()
        >>> states.rebuild([[1]])
        >>> states.count(0), states.count(1), states.available
        (0, 1, 2)
        """
        self.index.mend()
        counts = [0] * self.n_pages
        for pages in held:
            for page in pages:
                counts[page] += 1
        unused: list[int] = []
        cached: list[tuple[int, int]] = []
        # As they were, then those that were lost.
        for page in dict.fromkeys((*self._free, *self._cached, *range(self.n_pages - 1, -1, -1))):
            node = self.index.of(page)
            if counts[page] == 0 and node is None:
                unused.append(page)
            elif counts[page] == 0 and node is not None:
                cached.append((-node.depth, page))
        # Which of those that were lost was used when is not known. No page goes before those behind it.
        cached.sort(key=lambda entry: entry[0])
        self._counts, self._free = counts, unused
        self._cached = OrderedDict.fromkeys(page for _, page in cached)
