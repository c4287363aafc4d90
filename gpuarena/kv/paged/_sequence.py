"""The handle of one sequence of a paged cache."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from gpuarena.errors import (
    ArgumentError,
    ArgumentTypeError,
    CheckpointError,
    LayerOrderError,
    NotCopyableError,
    SequenceError,
    ShapeError,
    refuse_copy,
)
from gpuarena.kv.paged._core import Core, TokenSlots
from gpuarena.kv.paged._growth import Growth
from gpuarena.kv.paged._page_lists import PageList
from gpuarena.kv.paged._storage import LayerPages
from gpuarena.kv.paged._swap import Swapped, swap_in, swap_out
from gpuarena.kv.spec import positive

__all__ = ["Sequence", "SequenceCheckpoint"]


class SequenceCheckpoint:
    """A length of a sequence, made by `Sequence.checkpoint`: `n_tokens` tokens."""

    __slots__ = ("_sequence", "_serial", "n_tokens")

    def __init__(self, sequence: Sequence, n_tokens: int, serial: int) -> None:
        self._sequence = sequence
        self._serial = serial
        self.n_tokens = n_tokens

    def __repr__(self) -> str:
        return f"SequenceCheckpoint(n_tokens={self.n_tokens})"

    def __reduce__(self) -> Any:
        raise refuse_copy(self)


class _Append:
    """An `append` that has written some layers and not yet all."""

    __slots__ = ("n_done", "n_tokens", "slots", "start")

    def __init__(self, start: int, n_tokens: int, slots: TokenSlots) -> None:
        self.start = start
        self.n_tokens = n_tokens
        self.slots = slots
        self.n_done = 1  # layers


class Sequence:
    """Tokens of one sequence: made by `PagedKVCache.sequence`, `match` and `fork`.

    It holds its pages until `free`, also when nobody refers to it any more.

    >>> import numpy as np
    >>> from gpuarena import Arena
    >>> from gpuarena.kv import KVSpec
    >>> from gpuarena.kv.paged import PagedKVCache
    >>> spec = KVSpec.uniform(layers=1, kv_heads=2, head_dim=4, dtype="float32")
    >>> cache = PagedKVCache(Arena("1MiB"), spec, num_pages=8, page_size=4)
    >>> a = cache.sequence()
    >>> new = np.ones((1, 2, 6, 4), np.float32)  # [1, kv_heads, n, head_dim]
    >>> a.append(0, new, new)
    >>> b = a.fork()
    >>> b.append(0, new[:, :, :1], new[:, :, :1])  # into a copy of the page that both shared
    >>> a.pages, b.pages
    ((0, 1), (0, 2))
    """

    __slots__ = ("__weakref__", "_append", "_core", "_marks", "_pages", "_serial", "_step", "_swapped")

    def __init__(self, core: Core, pages: PageList) -> None:
        self._core = core
        self._pages = pages
        self._step: Any = None  # the open Step it takes part in
        self._append: _Append | None = None
        self._swapped: Swapped | None = None  # counts while it has no pages
        self._marks: list[tuple[int, int]] = []  # (n_tokens, serial), ascending: the checkpoints that live
        self._serial = 0

    def __repr__(self) -> str:
        if not self.is_live:
            return "<sequence, freed>"
        where = "swapped out" if self.is_swapped_out else f"pages {list(self.pages)}"
        return f"<sequence of {self.length} tokens, {where}>"

    def __reduce__(self) -> Any:
        raise NotCopyableError("a Sequence cannot be pickled or copied: fork() shares its pages")

    # -- what it holds ------------------------------------------------------------------------------------------

    @property
    def is_live(self) -> bool:
        """Whether it was not freed."""
        return self._pages.is_live

    @property
    def is_swapped_out(self) -> bool:
        """Whether its keys and values are on the host."""
        return self.is_live and self._swapped is not None and not self._pages.n_pages

    @property
    def length(self) -> int:
        """Tokens it holds, those of a step or an append under way included; 0 once freed."""
        return self._pages.length

    @property
    def pages(self) -> tuple[int, ...]:
        """Its pages, ``ceil(length / page_size)`` of them; none when it is freed or swapped out."""
        return self._pages.pages

    def read(self, layer: int) -> tuple[Any, Any]:
        """Return copies of all keys and values of a layer.

        Returns
        -------
        keys : ``[kv_heads, length, key_dim]``
        values : ``[kv_heads, length, value_dim]``

        Raises
        ------
        LayerOrderError
            The layer has not been written yet by a step or an append under way.
        SequenceError, StaleRegionError, ArgumentError
        """
        self._check()
        core = self._core
        core.check_live()
        owner = core.spec.owner(layer)
        core.check_readable(self, owner)
        pages = core.ops.index(np.array(self.pages, np.int64))
        return core.layers[owner].read(pages, self.length)

    # -- growing and cutting ------------------------------------------------------------------------------------

    def append(self, layer: int, keys: Any, values: Any) -> None:
        """Write new tokens of one layer behind those that it holds; the layers come in order.

        The first layer takes the pages, the last one completes the tokens. Between them the sequence can be read in
        the layers that were written, continued, truncated to what it held before, or freed.

        Parameters
        ----------
        layer : int
            The next layer that owns keys and values.
        keys : ``[1, kv_heads, n, key_dim]`` or ``[n, kv_heads, key_dim]``
        values : as `keys`, with `value_dim`

        Raises
        ------
        LayerOrderError
            Another layer is next.
        CapacityError
            Too few pages are free or cached; figures in pages.
        SequenceError
            It is freed, swapped out, or part of an open step.
        ArgumentTypeError, ArgumentError, DeviceMismatchError, AutogradError, ShapeError, DTypeError, StaleRegionError
            Checked before the first byte is written; unchanged on error.
        """
        self._check()
        self._check_no_step("append")
        core, under_way = self._core, self._append
        core.check_live()
        pages = core.owned_layer(layer, "append")
        wanted = core.owned[0 if under_way is None else under_way.n_done]
        who = f"layer {layer}"
        if pages.number != wanted:
            raise LayerOrderError(
                f"append: {who} given, layer {wanted} is next; the layers come in order", layer=pages.number
            )
        core.check_kv(who, pages.spec, keys, values)
        shape = tuple(keys.shape)
        if len(shape) == 4 and shape[0] != 1:
            raise ShapeError(
                f"{who}: keys are {list(shape)}, append takes one row; see PagedKVCache.step", shape=shape
            )
        n_tokens = shape[2] if len(shape) == 4 else shape[0]
        if n_tokens == 0:
            raise ArgumentError(f"{who}: keys are {list(shape)}, which are no tokens")
        if under_way is None:
            self._begin(pages, n_tokens, keys, values)
            return
        if n_tokens != under_way.n_tokens:
            raise ShapeError(
                f"{who}: {n_tokens} tokens given, layer {core.owned[0]} got {under_way.n_tokens}", shape=shape
            )
        core.write(pages, under_way.slots, keys, values)
        if under_way.n_done + 1 < len(core.owned):
            under_way.n_done += 1
        else:
            self._append = None

    def _begin(self, pages: LayerPages, n_tokens: int, keys: Any, values: Any) -> None:
        """Take pages for new tokens and write the first layer."""
        core, start = self._core, self.length
        growth = Growth(core, [(self._pages, n_tokens)])
        try:
            growth.make()
            slots = TokenSlots(core, [(self._pages, start, start + n_tokens)])
            core.write(pages, slots, keys, values)
            if len(core.owned) > 1:
                self._append = _Append(start, n_tokens, slots)
        except BaseException:
            growth.undo()
            self._append = None
            raise

    def truncate(self, n_tokens: int) -> None:
        """Keep the first `n_tokens` tokens, 0 to `length`, and give back the pages behind them.

        Raises
        ------
        ArgumentTypeError, ArgumentError
            `n_tokens` is not an integer, negative, or more than there are. Unchanged on error.
        LayerOrderError
            It would keep tokens that an append under way has not written in every layer. Unchanged on error.
        SequenceError
            It is freed, swapped out, or part of an open step.
        """
        self._check()
        self._check_no_step("truncate")
        keep = positive(n_tokens, "n_tokens", least=0)
        if self._append is not None and self._append.start < keep <= self.length:
            self._check_complete("truncate")
        self._pages.truncate(keep)
        self._settle()

    def fork(self, n: int | None = None) -> Any:
        """Return a sequence of the same tokens, or a list of `n`; O(pages), no page is taken or copied.

        Whoever writes first into a page that several hold gets a copy of it.

        Raises
        ------
        SequenceError
            It is freed, swapped out, or part of an open step.
        LayerOrderError
            An append is under way.
        """
        self._check()
        self._check_idle("fork")
        n_forks = 1 if n is None else positive(n, "n", least=0)
        forks = [Sequence(self._core, self._pages.fork()) for _ in range(n_forks)]
        return forks[0] if n is None else forks

    def free(self) -> None:
        """Give all pages back; it cannot be used any more.

        Raises
        ------
        SequenceError
            It was freed before, or is part of an open step.
        """
        self._pages._check()
        self._check_no_step("free")
        self._pages.free()
        self._append = self._swapped = None
        self._marks.clear()

    def publish(self, token_ids: Iterable[int]) -> int:
        """Let `PagedKVCache.match` find the full pages of `token_ids`, and return how many tokens those hold.

        `token_ids` are the tokens of this sequence from its first one on. Give only those that will stay. What is
        published already is compared, so the cost grows with their number: publish when a prompt has been read and
        when an answer is complete, rather than at each token.

        Where an equal page was published in the meantime, this sequence shows that one from now on and gives back
        its own: make tables that kernels read anew. If forks share the page that would be given back, publishing
        ends there.

        Raises
        ------
        ArgumentTypeError
            Token ids that are no integers.
        ArgumentError
            More tokens than it holds, or others than a page of it was published with. Unchanged on error.
        SequenceError
            It is freed, swapped out, or part of an open step.
        LayerOrderError
            An append is under way: only what is written can be published.
        """
        self._check()
        self._check_idle("publish")
        return self._pages.publish(token_ids).n_tokens

    # -- checkpoints --------------------------------------------------------------------------------------------

    def checkpoint(self) -> SequenceCheckpoint:
        """Return the present length, to which `rollback` brings it back.

        Raises
        ------
        SequenceError, LayerOrderError
            As `fork`.
        """
        self._check()
        self._check_idle("checkpoint")
        if not self._marks or self._marks[-1][0] != self.length:
            self._serial += 1
            self._marks.append((self.length, self._serial))
        return SequenceCheckpoint(self, *self._marks[-1])

    def rollback(self, checkpoint: SequenceCheckpoint) -> None:
        """Forget every token appended since `checkpoint`, which stays usable.

        Raises
        ------
        ArgumentTypeError
            It is no `SequenceCheckpoint`.
        CheckpointError
            It belongs to another sequence, or this one was truncated below it, so that the tokens it stood for are
            gone. Unchanged on error.
        SequenceError
            As `truncate`.
        """
        if not isinstance(checkpoint, SequenceCheckpoint):
            raise ArgumentTypeError(f"rollback takes a SequenceCheckpoint, not {type(checkpoint).__name__}")
        if checkpoint._sequence is not self:
            raise CheckpointError("the checkpoint belongs to another sequence")
        self._check()
        if (checkpoint.n_tokens, checkpoint._serial) not in self._marks:
            raise CheckpointError(
                f"the checkpoint at {checkpoint.n_tokens} tokens is dead: the sequence was truncated below it, and "
                f"those tokens are gone"
            )
        self.truncate(checkpoint.n_tokens)

    # -- host memory --------------------------------------------------------------------------------------------

    def swap_out(self, arena: Any = None) -> int:
        """Move the keys and values to the host and give the pages back; return the bytes that the host holds.

        Pages that others share stay theirs; a copy goes to the host all the same.

        Parameters
        ----------
        arena : Arena, optional
            One on the host, which gives the memory: roll it back after `swap_in`. None takes ordinary memory.

        Raises
        ------
        OutOfMemoryError
            The host has too little. Unchanged on error.
        ArgumentTypeError, DeviceMismatchError
            `arena` is none, or not on the host.
        SequenceError, LayerOrderError
            As `fork`.
        """
        self._check()
        self._check_idle("swap_out")
        self._core.check_live()
        swapped = swap_out(self._core, self._pages, arena)
        self._swapped = swapped
        self._pages.put_aside()
        return swapped.nbytes

    def swap_in(self) -> None:
        """Move the keys and values back, possibly to other pages. Pages that are still published are shared again.

        Raises
        ------
        CapacityError
            Too few pages are free or cached; figures in pages. Unchanged on error.
        SequenceError
            It is freed, or not swapped out.
        StaleRegionError
            The arena that holds the copy was rolled back. Unchanged on error.
        """
        self._pages._check()
        if self._swapped is None or not self.is_swapped_out:
            raise SequenceError("swap_in: the sequence is not swapped out")
        self._core.check_live()
        swap_in(self._core, self._pages, self._swapped)
        self._swapped = None

    # -- checks -------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        self._pages._check()
        if self._swapped is None and self._append is None and not self._marks:
            return
        if self.is_swapped_out:
            raise SequenceError("this sequence is swapped out; swap_in() brings it back")
        self._settle()

    def _settle(self) -> None:
        """Forget what went with tokens that are gone, or with pages that came back; also after an interrupt."""
        if self._pages.n_pages:
            self._swapped = None
        if self._append is not None and self.length != self._append.start + self._append.n_tokens:
            self._append = None
        while self._marks and self._marks[-1][0] > self.length:
            self._marks.pop()

    def _check_no_step(self, action: str) -> None:
        if self._step is not None:
            raise SequenceError(f"{action}: a step is open on this sequence; leave its with block first")

    def _check_complete(self, action: str) -> None:
        if self._append is not None:
            wanted = self._core.owned[self._append.n_done]
            raise LayerOrderError(
                f"{action}: an append is under way, layer {wanted} is next; append it and those behind it, or "
                f"truncate({self._append.start}) to give the new tokens up",
                layer=wanted,
            )

    def _check_idle(self, action: str) -> None:
        self._check_no_step(action)
        self._check_complete(action)

    def _unwritten(self) -> Any:
        """Return the layers whose new tokens are not written yet."""
        if self._step is not None:
            return self._step._unwritten()
        return () if self._append is None else self._core.owned[self._append.n_done :]
