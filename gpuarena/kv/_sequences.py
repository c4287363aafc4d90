"""One sequence of a paged cache: its pages, its length, and what has to be copied before it is written."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpuarena.errors import ArgumentError, CapacityError, NotCopyableError, SequenceError
from gpuarena.kv._prefixes import as_token_ids, split
from gpuarena.kv.spec import positive

if TYPE_CHECKING:
    from gpuarena.kv._pages import PagePool

__all__ = ["Append", "PageCopy", "Publication", "Sequence"]


@dataclass(frozen=True, slots=True)
class PageCopy:
    """The first `n_tokens` slots of page `source` have to be copied to page `target`."""

    source: int
    target: int
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Append:
    """What `Sequence.append` did: the new tokens are `start` up to `stop`."""

    start: int
    stop: int
    new_pages: tuple[int, ...]
    """Pages put behind those of the sequence. What they held before is void."""
    copy: PageCopy | None
    """To be made before the new tokens are written: the last page was exchanged for one of the sequence's own."""


@dataclass(frozen=True, slots=True)
class Publication:
    """What `Sequence.publish` did."""

    n_tokens: int
    """The first tokens of the sequence that lie in published pages, which `PagePool.match` finds."""
    exchanged: tuple[tuple[int, int], ...]
    """``(index, page)`` where the sequence now shows an equal page that was published before."""


class Sequence:
    """The pages of one sequence, in the order of its tokens. Made by `PagePool.sequence`, `match` and `fork`.

    It holds its pages until `free`, also when nobody refers to it any more.
    """

    __slots__ = ("_is_live", "_length", "_pages", "pool", "salt")

    def __init__(self, pool: PagePool, salt: Hashable, pages: list[int], length: int) -> None:
        self.pool = pool
        self.salt = salt
        self._pages = pages
        self._length = length
        self._is_live = True
        pool._sequences.add(self)

    def __repr__(self) -> str:
        return f"Sequence(length={self._length}, pages={self._pages})" if self._is_live else "Sequence(freed)"

    def __reduce__(self) -> Any:
        raise NotCopyableError("a Sequence cannot be pickled or copied: fork() shares its pages")

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
        """
        self._check()
        n_tokens = positive(n_tokens, "n_tokens", least=0)
        pool, states = self.pool, self.pool._states
        needed = pool.needed(n_tokens, self)
        if needed > states.available:
            raise self._capacity_error(n_tokens, needed)
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
        n_kept = -(-keep // self.pool.page_size)
        while len(self._pages) > n_kept:
            self.pool._states.release(self._pages.pop())
        self._length = keep

    def fork(self) -> Sequence:
        """Return a sequence of the same tokens that shares all pages; it takes none.

        Raises
        ------
        SequenceError
            The sequence is freed.
        """
        self._check()
        for page in self._pages:
            self.pool._states.hold(page)
        return Sequence(self.pool, self.salt, list(self._pages), self._length)

    def free(self) -> None:
        """Give all pages back; the sequence cannot be used any more.

        Raises
        ------
        SequenceError
            It was freed before.
        """
        self.truncate(0)
        self._is_live = False
        self.pool._sequences.remove(self)

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
        pool, states, index = self.pool, self.pool._states, self.pool._states.index
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

    def _capacity_error(self, n_tokens: int, needed: int) -> CapacityError:
        pool, states = self.pool, self.pool._states
        used = pool.n_pages - states.available
        missing = needed - states.available
        return CapacityError(
            f"append({n_tokens}) needs {needed} pages of {pool.page_size} tokens; of {pool.n_pages} pages {used} are "
            f"used, {states.n_free} free and {states.n_cached} cached: {missing} too few. Nothing was changed: free "
            f"or truncate sequences, or make a pool of more pages",
            used=used,
            requested=needed,
            capacity=pool.n_pages,
            available=states.available,
            missing=missing,
            aligned_offset=used,
            label=None,
            unit="pages",
        )
