"""The paged cache: sequences of any length that share one pool of pages in an arena.

Tokens lie in pages of `page_size` slots. A `Sequence` is a list of pages and a length, so sequences grow without moving,
fork without copying, and find the pages of a prompt that was computed before.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from gpuarena._bump import align_up
from gpuarena.errors import ArgumentError, SequenceError, refuse_copy
from gpuarena.kv._whole import taken_whole
from gpuarena.kv.paged._core import SCRATCH_ALIGNMENT, Core, scratch_nbytes
from gpuarena.kv.paged._read import attend
from gpuarena.kv.paged._sequence import Sequence, SequenceCheckpoint
from gpuarena.kv.paged._stats import PagedStats, snapshot
from gpuarena.kv.paged._step import Step
from gpuarena.kv.paged._storage import check_layout
from gpuarena.kv.paged._tables import (
    BlockTable,
    FlashInferTables,
    block_table,
    flashinfer_tables,
    slot_mapping,
)
from gpuarena.kv.spec import KVSpec, as_arena, as_spec, positive

if TYPE_CHECKING:
    from gpuarena.arena import Arena

__all__ = [
    "BlockTable",
    "FlashInferTables",
    "PagedKVCache",
    "PagedStats",
    "Sequence",
    "SequenceCheckpoint",
    "Step",
]


class PagedKVCache:
    """Pages for the keys and values of many sequences: all memory is taken here, none later.

    >>> import torch
    >>> from gpuarena import Arena
    >>> spec = KVSpec.uniform(layers=2, kv_heads=2, head_dim=8, dtype="float32")
    >>> cache = PagedKVCache(Arena("1MiB", backend="torch", device="cpu"), spec, num_pages=16, page_size=4)
    >>> a, b = cache.sequence(), cache.sequence()
    >>> new, q = torch.ones(2, 2, 5, 8), torch.ones(2, 6, 5, 8)  # [sequences, heads, tokens, head_dim]
    >>> with cache.step([a, b], n_tokens=5) as step:
    ...     for layer in range(2):
    ...         step.write(layer, new, new)
    ...         out = step.attend(layer, q)
    >>> out.shape, a.length, a.pages, b.pages
    (torch.Size([2, 6, 5, 8]), 5, (0, 1), (2, 3))

    Parameters
    ----------
    arena : Arena
        A torch arena takes and gives tensors, a host or cupy arena arrays of its own library; `attend` is torch's.
    spec : KVSpec
        Windows hide tokens in `attend`, the whole history is stored.
    num_pages : int
        At most 2**31 - 1, since the tables of kernels are int32.
    page_size : int
        Tokens a page. flash-attn 2 wants a multiple of 256.
    layout : {"per-head", "HND", "NHD"}
        ``[kv_heads, pages, page_size, dim]``, which gathers fastest; ``[pages, kv_heads, page_size, dim]`` or
        ``[pages, page_size, kv_heads, dim]`` for kernels that read them.
    gather_tokens : int, optional
        How many tokens `attend` can gather at once, of which the longest sequence must not be longer (a multiple of
        `page_size`). None is all of the pages; 0 takes no scratch, and leaves `attend` to kernels.

    Raises
    ------
    OutOfMemoryError
        The arena has less than `arena_nbytes` left; nothing was taken of it.
    ArgumentError, ArgumentTypeError
        A number or layout that can never be right, or a layer with `slack` or `storage`.

    Notes
    -----
    Rolling the arena back to before this call makes the cache stale; later calls raise `StaleRegionError`.
    A cache belongs to one thread at a time. An interrupt (Ctrl-C) inside of a call leaves the pages as they were before
    it or as they are behind it; one in the very moment in which `sequence`, `match` or `Sequence.fork` returns may lose
    the sequence, whose pages `keep` and `reset` free.
    """

    def __init__(
        self,
        arena: Arena,
        spec: KVSpec,
        *,
        num_pages: int,
        page_size: int = 16,
        layout: str = "per-head",
        gather_tokens: int | None = None,
    ) -> None:
        arena, spec = as_arena(arena), as_spec(spec)
        num_pages, page_size = positive(num_pages, "num_pages"), positive(page_size, "page_size")
        gather_tokens = _gather_tokens(num_pages, page_size, gather_tokens, arena.backend == "torch")
        check_layout(layout)
        _check_spec(spec)
        sizes = {"num_pages": num_pages, "page_size": page_size, "gather_tokens": gather_tokens}

        def nbytes() -> int:
            return self.arena_nbytes(spec, alignment=arena.alignment, **sizes)

        with taken_whole(arena, "PagedKVCache", nbytes):
            self._core = Core(arena, spec, layout=layout, **sizes)
        self.arena = arena
        self.spec = spec
        self.layout = layout
        self.page_size = page_size
        self.num_pages = num_pages
        self.gather_tokens = gather_tokens

    def __repr__(self) -> str:
        pool = self._core.pool
        return (
            f"<PagedKVCache of {self.num_pages} pages of {self.page_size} tokens, {pool.available} available>"
        )

    def __reduce__(self) -> Any:
        raise refuse_copy(self)

    @staticmethod
    def arena_nbytes(
        spec: KVSpec,
        *,
        num_pages: int,
        page_size: int = 16,
        gather_tokens: int | None = None,
        alignment: int = 256,
    ) -> int:
        """Return the bytes that such a cache takes of a torch arena of that alignment, at most.

        >>> spec = KVSpec.uniform(layers=28, kv_heads=2, head_dim=128, dtype="bfloat16")
        >>> PagedKVCache.arena_nbytes(spec, num_pages=512, gather_tokens=0)  # 8 192 tokens of 28 672 bytes
        234881024
        """
        spec = as_spec(spec)
        n_tokens = positive(num_pages, "num_pages") * positive(page_size, "page_size")
        scratch = scratch_nbytes(spec, _gather_tokens(num_pages, page_size, gather_tokens, True))
        align = max(alignment, SCRATCH_ALIGNMENT, *(layer.alignment for _, layer in spec.owned))
        sizes = [nbytes for _, layer in spec.owned for nbytes in layer.region_nbytes(1, n_tokens)]
        return sum(align_up(nbytes, align) for nbytes in [*sizes, scratch])

    # -- sequences ----------------------------------------------------------------------------------------------

    @property
    def available(self) -> int:
        """Pages that can be had: free and cached ones."""
        return self._core.pool.available

    def sequence(self, *, salt: Hashable = None) -> Sequence:
        """Return a new, empty sequence; `salt` as in `match`."""
        return Sequence(self._core, self._core.pool.sequence(salt=salt))

    def match(self, token_ids: Iterable[int], *, salt: Hashable = None) -> Sequence:
        """Return a new sequence that begins with the published pages of the longest prefix of `token_ids`.

        At least one token is left to compute, since its output is wanted: of a prompt of 8 tokens that is published
        in two pages of 4, the first is found.

        Parameters
        ----------
        token_ids : ints
            The whole prompt; ``token_ids[sequence.length:]`` are to be computed.
        salt : hashable, optional
            What else the keys and values depend on, such as the name of the model or adapter. Sequences find pages
            only of an equal salt.

        Raises
        ------
        ArgumentTypeError
            Token ids that are no integers, or a salt that cannot be hashed.
        """
        return Sequence(self._core, self._core.pool.match(token_ids, salt=salt))

    def would_fit(self, n_tokens: int, sequence: Sequence | None = None) -> bool:
        """Return whether `n_tokens` more tokens of `sequence`, or of a new one, find the pages they need.

        Raises
        ------
        ArgumentTypeError, ArgumentError
            `n_tokens` is not an integer, or negative.
        SequenceError
            `sequence` is freed, swapped out or of another cache.
        """
        if sequence is None:
            return self._core.pool.would_fit(n_tokens)
        self._core.check_sequence(sequence)
        return self._core.pool.would_fit(n_tokens, sequence._pages)

    def keep(self, sequence: Sequence) -> None:
        """Free all sequences but this one, those that are swapped out too.

        Raises
        ------
        SequenceError
            It is freed or of another cache, or a step is open. Unchanged on error.
        """
        self._core.check_mine(sequence)
        self._free_all_but(sequence._pages)

    def reset(self) -> None:
        """Free all sequences and forget what was published: all pages are free.

        Raises
        ------
        SequenceError
            A step is open. Unchanged on error.
        """
        self._free_all_but(None)
        self.reset_prefix_cache()

    def reset_prefix_cache(self) -> None:
        """Let `match` find nothing of what was published so far, as after the weights of a model changed.

        Cached pages become free; sequences keep theirs.
        """
        self._core.pool.forget_prefixes()

    def _free_all_but(self, kept: Any) -> None:
        if self._core.open_steps:
            raise SequenceError("a step is open; leave its with block first")
        for pages in self._core.pool.live():
            if pages is not kept:
                pages.free()

    @property
    def stats(self) -> PagedStats:
        """A snapshot; takes time in the number of sequences."""
        return snapshot(self._core)

    # -- writing and reading ------------------------------------------------------------------------------------

    def step(self, sequences: Iterable[Sequence], n_tokens: int | Iterable[int]) -> Step:
        """Return a context in which each of `sequences` gets `n_tokens` new tokens in every layer, or none does.

        On entry it takes pages for all of them, and copies what they share and are about to write. Then `Step.write`
        takes each layer once.

        Parameters
        ----------
        sequences : list of Sequence
            Each once.
        n_tokens : int, or a list of one for each
            At least 1.

        Raises
        ------
        CapacityError
            On entry: too few pages for all; figures in pages. Unchanged on error.
        SequenceError
            A sequence is freed, swapped out, of another cache, given twice, or part of an open step.
        LayerOrderError
            On entry: an append of a sequence is under way. On exit: a layer was not written.
        ArgumentTypeError, ArgumentError, ShapeError
            No number of tokens, fewer than 1, or not one for each sequence.
        StaleRegionError
            The arena was rolled back to before the cache was made.
        """
        return Step(self._core, self._core.check_sequences(sequences), n_tokens)

    def keys(self, layer: int) -> Any:
        """Return the pages of the keys of a layer in the layout of the cache; of its owner if it shares them."""
        self._core.check_live()
        return self._core.layers[self.spec.owner(layer)].keys

    def values(self, layer: int) -> Any:
        """Return the pages of the values, as `keys`; the two are what FlashInfer takes as a tuple."""
        self._core.check_live()
        return self._core.layers[self.spec.owner(layer)].values

    def attend(self, layer: int, q: Any, sequences: Iterable[Sequence], scale: float | None = None) -> Any:
        """Attend from the last `n` tokens of each sequence to all of its tokens, causally.

        Pages are gathered into the scratch of the cache, for as many sequences at once as it holds, and read there
        by scaled dot product attention, each byte once for all query heads that share it. Runs on any device.

        Parameters
        ----------
        layer : int
            Its window and sinks are honoured.
        q : ``[sequences, q_heads, n, key_dim]``
        sequences : list of Sequence
            Of any lengths of at least `n`.
        scale : float, optional
            None is ``key_dim ** -0.5``.

        Returns
        -------
        ``[sequences, q_heads, n, value_dim]``

        Raises
        ------
        CapacityError
            A sequence is longer than the scratch; figures in tokens.
        LayerOrderError
            A step or an append under way has not written this layer yet.
        ArgumentTypeError, ArgumentError, DeviceMismatchError, AutogradError, ShapeError, DTypeError
        SequenceError, StaleRegionError
        """
        return attend(self._core, layer, q, self._core.check_sequences(sequences), scale)

    def flex_attend(
        self,
        layer: int,
        q: Any,
        sequences: Iterable[Sequence],
        scale: float | None = None,
        *,
        kernel: Any = None,
    ) -> Any:
        """Attend as `attend` does, by torch's FlexAttention over the pages where they lie; nothing is gathered.

        Values in the slots behind the last token of each sequence are set to 0.

        Parameters
        ----------
        kernel : optional
            What to call in place of ``torch.nn.attention.flex_attention.flex_attention``, such as
            ``torch.compile(flex_attention)``, which reads only the pages of `sequences`. Uncompiled it computes all
            scores over all pages, of a copy of all values, for one sequence after the other; one that is given as
            `kernel` gets no copy, and shows NaN where any page holds one.

        Raises
        ------
        ArgumentError
            The layout is HND, in which the slots of a head are no single stride apart; otherwise as `attend`.
        """
        from gpuarena.kv.paged._flex import flex_attend

        return flex_attend(self._core, layer, q, self._core.check_sequences(sequences), scale, kernel)

    # -- files --------------------------------------------------------------------------------------------------

    def save(
        self,
        path: str | os.PathLike[str],
        sequences: Iterable[Sequence],
        *,
        metadata: Mapping[str, str] | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> None:
        """Write sequences to a file, token by token, which caches of any page size and layout read.

        Page numbers, what is published, and salts are not saved; pages that sequences share are written for each.
        The other parameters and errors are those of `KVCache.save`; also

        Raises
        ------
        SequenceError, LayerOrderError
            A sequence is freed, swapped out, of another cache, or part of a step or an append under way.
        """
        from gpuarena.kv.state._sequences import save_sequences

        save_sequences(self, path, sequences, metadata, progress)

    def load(
        self,
        path: str | os.PathLike[str],
        *,
        salt: Hashable = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> list[Sequence]:
        """Return new sequences that hold those of a file of pages or lanes, all or none.

        >>> import os, tempfile
        >>> import numpy as np
        >>> from gpuarena import Arena
        >>> spec = KVSpec.uniform(layers=1, kv_heads=2, head_dim=8, dtype="float32")
        >>> cache = PagedKVCache(Arena("1MiB"), spec, num_pages=16, page_size=4)
        >>> prompt = cache.sequence()
        >>> prompt.append(0, *2 * [np.ones((1, 2, 5, 8), np.float32)])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "prompt.safetensors")
        ...     cache.save(path, [prompt])
        ...     [again] = cache.load(path)
        >>> again.length, again.pages
        (5, (2, 3))

        Parameters
        ----------
        path : str or path
        salt : hashable, optional
            As in `sequence`.
        progress : callable, optional
            As in `save`.

        Raises
        ------
        StateError
            It is no such file, is damaged or of another spec; or positions of a lane have gaps. There is no checksum.
        CapacityError
            Too few pages are free or cached; figures in pages.
        ArgumentTypeError, StaleRegionError, CaptureError, BackendError, OSError
            Whatever is raised, the cache holds what it held before.
        """
        from gpuarena.kv.state._sequences import load_sequences

        return load_sequences(self, path, salt, progress)

    # -- tables of kernels --------------------------------------------------------------------------------------

    def flashinfer_tables(
        self, sequences: Iterable[Sequence], *, out: FlashInferTables | None = None
    ) -> FlashInferTables:
        """Return the tables of FlashInfer, a row for each sequence; within a step the new tokens are included.

        Parameters
        ----------
        out : FlashInferTables, optional
            Tables to write to and return, whose addresses stay. They may be longer than needed; the rest is filled with 0.

        Raises
        ------
        SequenceError
            A sequence is empty, which these tables cannot express; or freed, swapped out or of another cache.
        ShapeError, DTypeError, DeviceMismatchError
            `out` does not fit.
        """
        return flashinfer_tables(self._core, sequences, out)

    def block_table(
        self, sequences: Iterable[Sequence], *, width: int | None = None, out: BlockTable | None = None
    ) -> BlockTable:
        """Return the dense table of flash-attn and the lengths that go with it, a row for each sequence.

        Parameters
        ----------
        width : int, optional
            Pages a row, padded with page 0; None for as many as the longest sequence has.
        out : BlockTable, optional
            Tables to write to and return, whose addresses stay. They may be larger than needed; the rest is filled with 0.

        Raises
        ------
        ShapeError
            A sequence has more pages than `width`, or `out` is too small.
        SequenceError, DTypeError, DeviceMismatchError
            As `flashinfer_tables`, but an empty sequence has length 0.
        """
        return block_table(self._core, sequences, width, out)

    def slot_mapping(self, of: Step | Iterable[tuple[Sequence, int, int]], *, out: Any = None) -> Any:
        """Return the slots of tokens, ``page * page_size + offset``, one after another, int64.

        Parameters
        ----------
        of : Step, or list of (sequence, start, stop)
            The new tokens of an open step, or tokens `start` up to `stop` of sequences.

        Raises
        ------
        SequenceError, ArgumentError, ArgumentTypeError
            A sequence is freed, swapped out or of another cache; the step is not open; or there are no such tokens.
        """
        return slot_mapping(self._core, of, out)


def _check_spec(spec: KVSpec) -> None:
    for number, layer in spec.owned:
        for field, instead in (
            ("slack", "pages hold the whole history, and the window hides tokens in attend"),
            ("storage", "pages hold what is written"),
        ):
            if getattr(layer, field) is not None:
                raise ArgumentError(
                    f"layer {number} has {field}={getattr(layer, field)!r}, which a paged cache cannot do: {instead}; "
                    f"leave {field} out"
                )


def _gather_tokens(num_pages: int, page_size: int, gather_tokens: Any, is_torch: bool) -> int:
    if gather_tokens is None:
        return num_pages * page_size if is_torch else 0
    n_tokens = positive(gather_tokens, "gather_tokens", least=0)
    if n_tokens % page_size:
        raise ArgumentError(f"gather_tokens is {n_tokens}, which is no multiple of the page size {page_size}")
    if n_tokens and not is_torch:
        raise ArgumentError("gather_tokens: attend is torch's; leave it out for an arena of another library")
    return n_tokens
