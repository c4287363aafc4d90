"""The pages of a paged cache and who holds them. It touches no memory.

Tokens lie in pages of `page_size` slots; a sequence is a list of pages and a length. Every method says what has to be
copied, and the caller copies and writes: in the order of the calls, the copy of an `Append` before its tokens.

Not guarded by a lock: a pool and its sequences belong to one thread at a time.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

from gpuarena.errors import ArgumentError, ArgumentTypeError, CapacityError, NotCopyableError, SequenceError
from gpuarena.kv.paged._page_lists import Append, PageList
from gpuarena.kv.paged._page_states import PageStates
from gpuarena.kv.paged._prefixes import as_token_ids, split
from gpuarena.kv.spec import positive

__all__ = ["PagePool", "PageStats"]

#: Tables of kernels are int32.
MAX_PAGES = 2**31 - 1


@dataclass(frozen=True, slots=True)
class PageStats:
    """A snapshot of a pool; ``pages_free + pages_cached + pages_used == n_pages`` at every moment."""

    n_pages: int
    page_size: int
    pages_free: int
    pages_cached: int
    """Published pages that no sequence holds; they are free for whoever needs one, the longest unused first."""
    pages_used: int
    """Pages that sequences hold, a shared one counted once; 0 when all sequences are freed."""
    n_sequences: int
    """Sequences that were made and not freed."""
    tokens_stored: int
    """Slots of used pages that hold a token of a sequence, a shared one counted once."""
    tokens_wasted: int
    """The other slots of used pages."""
    pages_hit: int
    """Pages that `match` found, since the pool was made."""
    pages_evicted: int
    """Cached pages that were given to others."""
    pages_copied: int
    """Pages that an append had copied."""


class PagePool:
    """Pages 0 to ``n_pages - 1`` of `page_size` slots, and the sequences that hold them.

    >>> pool = PagePool(n_pages=8, page_size=4)
    >>> a = pool.sequence()
    >>> a.append(6).new_pages, a.slots(3, 6)
    ((0, 1), [3, 4, 5])
    >>> b = a.fork()
    >>> b.append(1)  # page 1 is shared: its two tokens are copied first
    Append(start=6, stop=7, new_pages=(), copy=PageCopy(source=1, target=2, n_tokens=2))
    >>> a.pages, b.pages, pool.available
    ((0, 1), (0, 2), 5)

    Parameters
    ----------
    n_pages : int
        At most 2**31 - 1, since the tables of kernels are int32; slots may need 64 bits.
    page_size : int
        Tokens a page.

    Raises
    ------
    ArgumentTypeError, ArgumentError
        Not an integer, below 1, or too many pages.
    """

    def __init__(self, n_pages: int, page_size: int = 16) -> None:
        self.n_pages = positive(n_pages, "n_pages")
        self.page_size = positive(page_size, "page_size")
        if self.n_pages > MAX_PAGES:
            raise ArgumentError(
                f"{n_pages} pages do not fit the int32 tables of kernels; at most {MAX_PAGES}"
            )
        self._states = PageStates(self.n_pages)
        self._sequences: dict[PageList, None] = {}  # those that live, the eldest first
        self._n_hit = 0
        self._n_copied = 0
        self.version = 0  # counts the changes of which page holds which token of which sequence

    def __reduce__(self) -> Any:
        raise NotCopyableError(
            "a PagePool cannot be pickled or copied: its pages stand for memory that stays"
        )

    @property
    def available(self) -> int:
        """Pages that can be had: free and cached ones."""
        return self._states.available

    def sequence(self, *, salt: Hashable = None) -> PageList:
        """Return a new, empty sequence; `salt` as in `match`."""
        return PageList(self, _hashable(salt), [], 0)

    def match(self, token_ids: Iterable[int], *, salt: Hashable = None) -> PageList:
        """Return a new sequence that begins with the published pages of the longest prefix of `token_ids`.

        At least one token is left to compute, since its output is wanted: 8 tokens match one page of 4.

        >>> pool = PagePool(n_pages=8, page_size=4)
        >>> first = pool.sequence()
        >>> _ = first.append(8)  # and write the tokens
        >>> first.publish([1, 2, 3, 4, 5, 6, 7, 8]).n_tokens
        8
        >>> second = pool.match([1, 2, 3, 4, 5, 6, 7, 8])
        >>> second.pages, second.length
        ((0,), 4)

        Parameters
        ----------
        token_ids : ints
            The whole prompt.
        salt : hashable, optional
            What else the keys and values depend on, such as the name of the model or adapter. Sequences find pages
            only of an equal salt.

        Raises
        ------
        ArgumentTypeError
            Token ids that are no integers, or a salt that cannot be hashed.
        """
        tokens = as_token_ids(token_ids)
        contents = split(tokens, self.page_size, (len(tokens) - 1) // self.page_size)
        chain = self._states.index.walk(_hashable(salt), contents)
        pages = [node.page for node in chain]
        try:
            for page in pages:
                self._states.hold(page)
            self._n_hit += len(pages)
            return PageList(self, salt, pages, len(pages) * self.page_size)
        except BaseException:
            self.rebuild()
            raise

    def needed(self, n_tokens: int, sequence: PageList | None = None) -> int:
        """Return how many pages must be available for ``sequence.append(n_tokens)``, or for a new sequence.

        >>> pool = PagePool(n_pages=8, page_size=4)
        >>> pool.needed(0), pool.needed(1), pool.needed(4), pool.needed(5)
        (0, 1, 1, 2)

        Raises
        ------
        ArgumentTypeError, ArgumentError
            `n_tokens` is not an integer, or negative.
        SequenceError
            `sequence` is freed or of another pool.
        """
        n_tokens = positive(n_tokens, "n_tokens", least=0)
        if sequence is None:
            return -(-n_tokens // self.page_size)
        self.check_mine(sequence)
        n_new = -(-(sequence.length + n_tokens) // self.page_size) - len(sequence._pages)
        # A last page that is published but not shared is copied only if there is a page to spare.
        page = sequence._page_to_keep(n_tokens)
        return n_new + (page is not None and self._states.is_shared(page))

    def would_fit(self, n_tokens: int, sequence: PageList | None = None) -> bool:
        """Return whether ``sequence.append(n_tokens)`` has the pages it needs, or that of a new sequence.

        If not, preempt: free sequences until it does. Raises what `needed` raises.
        """
        return self.needed(n_tokens, sequence) <= self.available

    def append_all(self, rows: list[tuple[PageList, int]]) -> list[Append]:
        """Make room for tokens behind each of several sequences, in all of them or in none, in the order given.

        The copies are to be made in that order too, all of them before the first token is written.

        >>> pool = PagePool(n_pages=3, page_size=4)
        >>> a = pool.sequence()
        >>> _ = a.append(2)
        >>> b = a.fork()
        >>> [done.copy is not None for done in pool.append_all([(a, 1), (b, 1)])]  # b is alone with the page by then
        [True, False]

        Parameters
        ----------
        rows : list of (PageList, n_tokens)
            Each sequence once.

        Raises
        ------
        CapacityError
            Too few pages for all. Nothing was changed.
        SequenceError
            A sequence is freed or of another pool.
        """
        needed = 0
        writers: dict[int, int] = {}  # shared page -> sequences of these rows that are about to write into it
        for sequence, n_tokens in rows:
            self.check_mine(sequence)
            needed += -(-(sequence.length + n_tokens) // self.page_size) - len(sequence._pages)
            page = sequence._page_to_keep(n_tokens)
            if page is not None and self._states.is_shared(page):
                writers[page] = writers.get(page, 0) + 1
        # Whoever writes last into a page that nobody else holds by then has it to itself.
        needed += sum(min(n, self._states.count(page) - 1) for page, n in writers.items())
        if needed > self._states.available:
            total = sum(n_tokens for _, n_tokens in rows)
            raise self.capacity_error(f"{total} more tokens of {len(rows)} sequences", needed)
        # What `append` copies only if a page is to spare frees another page, so none of these can fail.
        return [sequence.append(n_tokens) for sequence, n_tokens in rows]

    def live(self) -> list[PageList]:
        """Return the sequences that were made and not freed."""
        return list(self._sequences)

    def forget_prefixes(self) -> None:
        """Let `match` find none of the pages published so far; cached pages become free."""
        try:
            self._states.forget()
        except BaseException:
            self.rebuild()
            raise

    def restore(self, before: Iterable[tuple[PageList, tuple[int, ...], int]]) -> None:
        """Let sequences hold the pages and the number of tokens that they had, after calls that were interrupted.

        What those pages held must be there still.
        """
        for sequence, pages, length in before:
            sequence._pages, sequence._length = list(pages), length
        self.rebuild()

    def rebuild(self) -> None:
        """Work out which pages are free from those that sequences hold; takes time in the number of pages.

        An interrupt (Ctrl-C) may come between any two lines. Whatever it leaves half done, the lists of pages are
        the truth: each of them changes in one statement.
        """
        self.version += 1
        self._states.rebuild(sequence._pages for sequence in self._sequences)

    def n_filled(self, sequence: PageList) -> int:
        """Return how many slots of the last page of `sequence` hold a token, of whichever sequence.

        >>> pool = PagePool(n_pages=8, page_size=4)
        >>> a = pool.sequence()
        >>> _ = a.append(7)
        >>> b = a.fork()
        >>> b.truncate(5)
        >>> pool.n_filled(b)
        3
        """
        place, page = len(sequence._pages) - 1, sequence._pages[-1]
        if self._states.index.of(page) is not None:
            return self.page_size
        # Those that share a page share what lies before it, so it has the same place in each.
        ends = [
            other.length - place * self.page_size
            for other in (self._sequences if self._states.is_shared(page) else (sequence,))
            if other._pages[place : place + 1] == [page]
        ]
        return min(self.page_size, max(ends))

    def capacity_error(self, what: str, needed: int) -> CapacityError:
        """Return the error for `what`, which needs `needed` pages, more than are available."""
        states = self._states
        used = self.n_pages - states.available
        missing = needed - states.available
        return CapacityError(
            f"{what} needs {needed} pages of {self.page_size} tokens; of {self.n_pages} pages {used} are "
            f"used, {states.n_free} free and {states.n_cached} cached: {missing} too few. Nothing was changed: free "
            f"or truncate sequences, or make a pool of more pages",
            used=used,
            requested=needed,
            capacity=self.n_pages,
            available=states.available,
            missing=missing,
            aligned_offset=used,
            label=None,
            unit="pages",
        )

    @property
    def stats(self) -> PageStats:
        """A snapshot; takes time in the number of sequences."""
        states, tails = self._states, dict[int, list[int]]()  # page -> tokens of those that fill it partly
        for sequence in self._sequences:
            n_tail = sequence.length % self.page_size
            if n_tail and sequence._pages:  # one that is put aside has none
                tails.setdefault(sequence._pages[-1], []).append(n_tail)
        # Whoever holds a page and is not among those fills it.
        wasted = sum(
            self.page_size - max(filled)
            for page, filled in tails.items()
            if len(filled) == states.count(page)
        )
        n_used = self.n_pages - states.available
        return PageStats(
            n_pages=self.n_pages,
            page_size=self.page_size,
            pages_free=states.n_free,
            pages_cached=states.n_cached,
            pages_used=n_used,
            n_sequences=len(self._sequences),
            tokens_stored=n_used * self.page_size - wasted,
            tokens_wasted=wasted,
            pages_hit=self._n_hit,
            pages_evicted=states.n_evicted,
            pages_copied=self._n_copied,
        )

    def check_mine(self, sequence: PageList) -> None:
        """Raise unless `sequence` is a live one of this pool.

        Raises
        ------
        ArgumentTypeError, SequenceError
        """
        if not isinstance(sequence, PageList):
            raise ArgumentTypeError(f"a Sequence is wanted, not {type(sequence).__name__}")
        sequence._check()
        if sequence.pool is not self:
            raise SequenceError("this sequence is of another pool, where its page numbers mean other pages")


def _hashable(salt: Hashable) -> Hashable:
    try:
        hash(salt)
    except TypeError as error:
        raise ArgumentTypeError(f"the salt must be hashable: {error}") from None
    return salt
