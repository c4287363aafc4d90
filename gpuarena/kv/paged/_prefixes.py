"""Which published page holds which tokens behind which other tokens.

A tree: a node is one full page, its parent the page before. The parent stands for everything before it, so looking up
the tokens of one page below it compares the whole prefix, by content: Python's dict uses the hash of the tokens to find
them, and their equality to decide. Two prompts whose hashes collide stay two.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable

from gpuarena.errors import ArgumentTypeError

__all__ = ["Prefix", "PrefixIndex", "Tokens", "as_token_ids", "split"]

Tokens = tuple[int, ...]


class Prefix:
    """One published page: `tokens` are its own, those before it are its parent's."""

    __slots__ = ("children", "depth", "page", "parent", "salt", "tokens")

    def __init__(self, salt: Hashable, parent: Prefix | None, page: int, tokens: Tokens) -> None:
        self.salt = salt
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1  # pages before it
        self.page = page
        self.tokens = tokens
        self.children: dict[Tokens, Prefix] = {}


class PrefixIndex:
    """The published pages, by content and by number.

    >>> index = PrefixIndex()
    >>> first = index.add("model", None, 7, (1, 2))
    >>> second = index.add("model", first, 3, (3, 4))
    >>> [node.page for node in index.walk("model", [(1, 2), (3, 4), (5, 6)])]
    [7, 3]
    >>> index.walk("another model", [(1, 2)]), index.walk("model", [(3, 4)])
    ([], [])
    """

    __slots__ = ("_by_page", "_roots")

    def __init__(self) -> None:
        self._roots: dict[Hashable, dict[Tokens, Prefix]] = {}  # salt -> first pages; no empty dict stays
        self._by_page: dict[int, Prefix] = {}

    def of(self, page: int) -> Prefix | None:
        """Return what `page` was published as, None if it is not published."""
        return self._by_page.get(page)

    def walk(self, salt: Hashable, pages_of_tokens: Iterable[Tokens]) -> list[Prefix]:
        """Return the longest chain from a first page on whose tokens are those given."""
        children = self._roots.get(salt, {})
        chain = []
        for tokens in pages_of_tokens:
            node = children.get(tokens)
            if node is None:
                break
            chain.append(node)
            children = node.children
        return chain

    def add(self, salt: Hashable, parent: Prefix | None, page: int, tokens: Tokens) -> Prefix:
        """Publish `page` behind `parent`, or as a first page; its tokens are not there yet."""
        siblings = self._roots.setdefault(salt, {}) if parent is None else parent.children
        assert tokens not in siblings, "two pages of the same prefix are never both published"
        assert page not in self._by_page, "a page is published once"
        node = siblings[tokens] = self._by_page[page] = Prefix(salt, parent, page, tokens)
        return node

    def remove(self, page: int) -> None:
        """Forget `page`, which is a leaf."""
        node = self._by_page.pop(page)
        assert not node.children, "a page leaves the index after the pages behind it"
        if node.parent is not None:
            del node.parent.children[node.tokens]
            return
        del self._roots[node.salt][node.tokens]
        if not self._roots[node.salt]:
            del self._roots[node.salt]

    def mend(self) -> None:
        """Drop what an interrupted `remove` has left in the tree."""
        for salt, first in list(self._roots.items()):
            levels = [first]
            while levels:
                siblings = levels.pop()
                for tokens, node in list(siblings.items()):
                    if self.of(node.page) is node:
                        levels.append(node.children)
                    else:
                        del siblings[tokens]
            if not first:
                del self._roots[salt]


def as_token_ids(token_ids: Iterable[int]) -> Tokens:
    """Return ids as ints, or raise `ArgumentTypeError`."""
    try:
        return tuple(map(operator.index, token_ids))
    except TypeError as error:
        raise ArgumentTypeError(f"token ids must be integers: {error}") from None


def split(tokens: Tokens, page_size: int, n_pages: int) -> list[Tokens]:
    """Return the tokens of each of the first `n_pages` pages.

    >>> split((1, 2, 3, 4, 5), 2, 2)
    [(1, 2), (3, 4)]
    """
    return [tokens[number * page_size : (number + 1) * page_size] for number in range(n_pages)]
