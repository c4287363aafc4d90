"""The pages of one sequence, its length, and what has to be copied before it is written. It touches no memory."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpuarena.errors import ArgumentError, NotCopyableError, SequenceError
from gpuarena.kv.paged._prefixes import Prefix, Tokens, as_token_ids, split
from gpuarena.kv.spec import positive

if TYPE_CHECKING:
    from gpuarena.kv.paged._pages import PagePool

__all__ = ["Append", "PageCopy", "PageList", "Publication"]


@dataclass(frozen=True, slots=True)
class PageCopy:
    """The first `n_tokens` slots of page `source` have to be copied to page `target`."""

    source: int
    target: int
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Append:
    """What `PageList.append` did: the new tokens are `start` up to `stop`."""

    start: int
    stop: int
    new_pages: tuple[int, ...]
    """Pages put behind those of the sequence. What they held before is void."""
    copy: PageCopy | None
    """To be made before the new tokens are written: the last page was exchanged for one of the sequence's own."""


@dataclass(frozen=True, slots=True)
class Publication:
    """What `PageList.publish` did."""

    n_tokens: int
    """The first tokens of the sequence that lie in published pages, which `PagePool.match` finds."""
    exchanged: tuple[tuple[int, int], ...]
    """``(index, page)`` where the sequence now shows an equal page that was published before."""


class PageList:
    """The pages of one sequence, in the order of its tokens. Made by `PagePool.sequence`, `match` and `fork`.

    It holds its pages until `free`, also when nobody refers to it any more. `gpuarena.kv.paged.Sequence` is the handle
    that goes with keys and values.
    """

    __slots__ = ("_is_live", "_length", "_pages", "pool", "salt")

    def __init__(self, pool: PagePool, salt: Hashable, pages: list[int], length: int) -> None:
        self.pool = pool
        self.salt = salt
        self._pages = pages
        self._length = length
        self._is_live = True
        pool._sequences[self] = None

    def __repr__(self) -> str:
        return f"PageList(length={self._length}, pages={self._pages})" if self._is_live else "PageList(freed)"

    def __reduce__(self) -> Any:
        raise NotCopyableError("a PageList cannot be pickled or copied: fork() shares its pages")

    @property
    def is_live(self) -> bool:
        """Whether it was not freed."""
        return self._is_live

    @property
    def length(self) -> int:
        """Tokens it holds; 0 once freed."""
        return self._length

    @property
    def pages(self) -> tuple[int, ...]:
        """Its pages, ``ceil(length / page_size)`` of them; none once freed."""
        return tuple(self._pages)

    @property
    def n_pages(self) -> int:
        """How many pages it has."""
        return len(self._pages)

    def append(self, n_tokens: int) -> Append:
        """Make room for `n_tokens` more tokens, all or none; 0 changes nothing.

        A last page that is partly filled is written in place if it is this sequence's alone. If it is shared, or
        published (then `truncate` led into it), what it holds for others stays: its first tokens are to be copied to
        a page of this sequence's own. Only if a page that is published but not shared finds no page to be copied
        to, it stops being published and is written in place.

        Raises
        ------
        ArgumentTypeError, ArgumentError
            `n_tokens` is not an integer, or negative.
        SequenceError
            The sequence is freed.
        CapacityError
            Too few pages are free or cached. Nothing was changed; `used`, `requested`, `available`, `missing` and
            `capacity` count pages.

        Notes
        -----
        Who calls this takes a change back that was interrupted: `PagePool.restore`.
        """
        self._check()
        n_tokens = positive(n_tokens, "n_tokens", least=0)
        pool, states = self.pool, self.pool._states
        needed = pool.needed(n_tokens, self)
        if needed > states.available:
            raise pool.capacity_error(f"append({n_tokens})", needed)
        if n_tokens:
            pool.version += 1
        start, stop = self._length, self._length + n_tokens
        n_new = -(-stop // pool.page_size) - len(self._pages)
        kept = self._page_to_keep(n_tokens)
        copy = None
        if kept is not None and n_new < states.available:
            copy = PageCopy(kept, states.take(), start % pool.page_size)
            self._pages[-1] = copy.target
            pool._n_copied += 1
        new_pages = tuple(states.take() for _ in range(n_new))
        if copy is not None:
            states.release(copy.source)
        elif kept is not None:
            states.index.remove(kept)  # the pages behind it were cached, and have just been taken
        self._pages.extend(new_pages)
        self._length = stop
        return Append(start, stop, new_pages, copy)

    def truncate(self, n_tokens: int) -> None:
        """Keep the first `n_tokens` tokens, 0 to `length`, and give back the pages behind them.

        Raises
        ------
        ArgumentTypeError, ArgumentError
            `n_tokens` is not an integer, negative, or more than there are. Nothing was changed.
        SequenceError
            The sequence is freed.
        """
        self._check()
        keep = positive(n_tokens, "n_tokens", least=0)
        if keep > self._length:
            raise ArgumentError(f"truncate({keep}): the sequence holds only {self._length} tokens")
        if keep < self._length:
            self.pool.version += 1
        n_kept = -(-keep // self.pool.page_size)
        self._give_back(self._pages[:n_kept], keep)

    def fork(self) -> PageList:
        """Return a sequence of the same tokens that shares all pages; it takes none.

        Raises
        ------
        SequenceError
            The sequence is freed.
        """
        self._check()
        try:
            for page in self._pages:
                self.pool._states.hold(page)
            return PageList(self.pool, self.salt, list(self._pages), self._length)
        except BaseException:
            self.pool.rebuild()
            raise

    def free(self) -> None:
        """Give all pages back; the sequence cannot be used any more.

        Raises
        ------
        SequenceError
            It was freed before.
        """
        self._check()
        self.pool.version += 1
        try:
            gone = self._end()
            self.pool._states.release_all(gone)
        except BaseException:
            self._end()
            self.pool.rebuild()
            raise

    def _end(self) -> list[int]:
        self.pool._sequences.pop(self, None)
        gone, self._pages, self._length, self._is_live = self._pages, [], 0, False
        return gone

    @property
    def is_aside(self) -> bool:
        """Whether it holds tokens for which it has no pages, since `put_aside`."""
        return self._length > 0 and not self._pages

    @property
    def published(self) -> list[Prefix | None]:
        """What each page was published as, None for one that is not."""
        return [self.pool._states.index.of(page) for page in self._pages]

    def put_aside(self) -> None:
        """Give all pages back and stay alive with `length` tokens, which `take_back` finds pages for.

        The caller keeps what the pages hold, and what they were `published` as.
        """
        self._check()
        self.pool.version += 1
        self._give_back([], self._length)

    def _give_back(self, kept: list[int], length: int) -> None:
        """Keep the first pages and release the others, the last one first."""
        gone = self._pages[len(kept) :]
        try:
            self._pages, self._length = kept, length
            self.pool._states.release_all(gone)
        except BaseException:
            self.pool.rebuild()
            raise

    def take_back(self, published: list[Prefix | None]) -> list[int]:
        """Take as many pages as `put_aside` gave back, and return the indices of those that have to be filled.

        A page that is still published, as it was then, holds what it held. Who calls this takes a change back that
        was interrupted, as of `append`.

        Raises
        ------
        CapacityError
            Too few pages. Nothing was changed.
        SequenceError
            The sequence is freed.
        """
        self._check()
        pool, states = self.pool, self.pool._states
        kept = [node for node in published if node is not None and states.index.of(node.page) is node]
        assert kept == published[: len(kept)], "a published page leaves the index after the pages behind it"
        n_cached = sum(states.count(node.page) == 0 for node in kept)
        n_new = len(published) - len(kept)
        if n_new + n_cached > states.available:
            raise pool.capacity_error("swap_in()", n_new + n_cached)
        pool.version += 1
        for node in kept:  # before any page is taken, which might be one of these
            states.hold(node.page)
        self._pages = [node.page for node in kept] + [states.take() for _ in range(n_new)]
        return list(range(len(kept), len(published)))

    def publish(self, token_ids: Iterable[int]) -> Publication:
        """Let `PagePool.match` find the full pages of `token_ids`, whose keys and values *have been written*.

        `token_ids` are the tokens of this sequence from its first one on. Give only those that will stay: a sequence
        may hold drafts behind them. What is published already is compared, so the cost grows with their number:
        publish when a prompt has been read and when an answer is complete, rather than at each token.

        Where an equal page was published in the meantime, by a sequence with the same prompt, this sequence shows
        that one from now on and gives back its own: make tables that kernels read anew. If forks share the page that
        would be given back, publishing ends there.

        Raises
        ------
        ArgumentTypeError
            Token ids that are no integers.
        ArgumentError
            More tokens than the sequence holds, or others than a page of it was published with. Nothing was changed.
        SequenceError
            The sequence is freed.
        """
        self._check()
        pool, index = self.pool, self.pool._states.index
        tokens = as_token_ids(token_ids)
        if len(tokens) > self._length:
            raise ArgumentError(
                f"publish: {len(tokens)} token ids, the sequence holds {self._length}; only what was written "
                f"can be published"
            )
        contents = split(tokens, pool.page_size, len(tokens) // pool.page_size)
        chain = index.walk(self.salt, contents)
        for number in range(len(contents)):
            published = index.of(self._pages[number])
            if published is not None and published not in chain[number : number + 1]:
                raise ArgumentError(
                    f"publish: page {self._pages[number]}, the {number}th of the sequence, was published with "
                    f"other token ids; give those of the sequence from its first token on"
                )
        try:
            return self._publish(contents, chain)
        except BaseException:
            pool.rebuild()
            raise

    def _publish(self, contents: list[Tokens], chain: list[Prefix]) -> Publication:
        """Publish pages of these contents, of which those of `chain` are published already."""
        pool, states, index = self.pool, self.pool._states, self.pool._states.index
        exchanged: list[tuple[int, int]] = []
        for number, content in enumerate(contents):
            mine = self._pages[number]
            if number == len(chain):
                chain.append(index.add(self.salt, chain[-1] if chain else None, mine, content))
            elif mine != chain[number].page:
                if states.is_shared(mine):
                    return Publication(number * pool.page_size, tuple(exchanged))
                # It was this sequence's alone, so those behind it are too: whoever held one of them would hold it.
                self._pages[number] = chain[number].page
                states.hold(chain[number].page)
                states.release(mine)
                pool.version += 1
                exchanged.append((number, chain[number].page))
        return Publication(len(contents) * pool.page_size, tuple(exchanged))

    def slots(self, start: int, stop: int) -> list[int]:
        """Return the slots of tokens `start` up to `stop`: ``page * page_size + offset``, which may need 64 bits.

        Raises
        ------
        ArgumentTypeError, ArgumentError
            Not integers, or not ``0 <= start <= stop <= length``.
        SequenceError
            The sequence is freed.
        """
        self._check()
        start, stop = positive(start, "start", least=0), positive(stop, "stop", least=0)
        if not start <= stop <= self._length:
            raise ArgumentError(f"slots({start}, {stop}): the sequence holds {self._length} tokens")
        size, pages = self.pool.page_size, self._pages
        return [pages[position // size] * size + position % size for position in range(start, stop)]

    def _page_to_keep(self, n_tokens: int) -> int | None:
        """Return the last page if appending would write into it while others hold it or `match` finds it."""
        if n_tokens == 0 or self._length % self.pool.page_size == 0:
            return None
        page, states = self._pages[-1], self.pool._states
        return page if states.is_shared(page) or states.index.of(page) is not None else None

    def _check(self) -> None:
        if not self._is_live:
            raise SequenceError("this sequence was freed, its pages may be another's; make a new one")
