"""New tokens of some sequences: the pages they need, all or none, whatever interrupts it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpuarena.kv.paged._core import Core
    from gpuarena.kv.paged._page_lists import PageCopy, PageList

__all__ = ["Growth"]


class Growth:
    """Room for `n_tokens` more tokens of each sequence: `make` it, and `undo` it at any moment, however far it got."""

    __slots__ = ("_before", "_copies", "_core", "_rows", "_version")

    def __init__(self, core: Core, rows: list[tuple[PageList, int]]) -> None:
        self._core = core
        self._rows = rows
        self._before = [(pages, pages.pages, pages.length) for pages, _ in rows]
        self._version = core.pool.version
        self._copies: list[PageCopy] | None = None  # those to be made, once all pages are taken

    @property
    def starts(self) -> tuple[int, ...]:
        """The first new token of each sequence."""
        return tuple(length for _, _, length in self._before)

    def make(self) -> None:
        """Take the pages, and copy what is shared and about to be written.

        Raises
        ------
        CapacityError, SequenceError
            As `PagePool.append_all`.
        """
        if len(self._rows) == 1:  # append_all would work out what is needed twice
            pages, n_tokens = self._rows[0]
            appends = [pages.append(n_tokens)]
        else:
            appends = self._core.pool.append_all(self._rows)
        self._copies = [append.copy for append in appends if append.copy is not None]
        self._core.copy_pages(self._copies)

    def undo(self) -> None:
        """Give the pages back; the sequences hold what they held."""
        if self._core.pool.version == self._version:
            return
        if self._copies is None:
            self._core.pool.restore(self._before)
            return
        # A copy may have gone to a page that another copy was made from, so there is no way back to those.
        self._core.copy_pages(self._copies)
        for pages, _, length in self._before:
            pages.truncate(length)
