"""Prompts that are prefilled once and continued many times, one after the other or side by side."""

from __future__ import annotations

import inspect
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from gpuarena.errors import (
    ArgumentError,
    CapacityError,
    CheckpointError,
    ShapeError,
    refuse_copy,
)
from gpuarena.kv import KVCheckpoint
from gpuarena.kv.spec import positive
from gpuarena_transformers.sizing import cache_argument
from gpuarena_transformers.tokens import as_tokens, expanded, joined

if TYPE_CHECKING:
    from gpuarena_transformers.cache import ArenaCache

__all__ = ["Branches", "Prefix", "check_open", "prefill_prefix"]


class Prefix:
    """The first tokens of a cache, to which it goes back in constant time; `ArenaCache.prefix` makes one.

    ::

        system = cache.prefix(model, "You answer in one sentence.", tokenizer)
        for question in questions:
            with system:
                answer = model.generate(**system.inputs(question, tokenizer), cache=cache)

    Nothing is copied: the keys and values of the prefix stay where they are, and what follows them is overwritten. So
    a prefix becomes stale when the cache is cut below its end, also by entering a shorter one, or when its rows change
    places; it then raises when it is used.
    """

    def __init__(
        self,
        cache: ArenaCache,
        ids: torch.Tensor,
        mask: torch.Tensor,
        device: Any,
        checkpoint: KVCheckpoint,
        *,
        n_before: int = 0,
    ) -> None:
        self.cache = cache
        self.ids = ids
        """``[rows, n_tokens]`` int64, on the CPU: all tokens from the first one on."""
        self.mask = mask
        """``[rows, n_tokens]`` bool: False where padding was given."""
        self.device = device
        self.n_before = n_before
        """Tokens that the cache held before; they belong to the prefix."""
        self._checkpoint = checkpoint
        self._is_open = False

    def __len__(self) -> int:
        return self.ids.shape[1]

    def __repr__(self) -> str:
        behind = f" behind {self.n_before}, of" if self.n_before else " of"
        rows = f"{self.ids.shape[0]} rows{'' if self.is_live else ', stale'}"
        return f"Prefix({len(self) - self.n_before} tokens{behind} {rows})"

    def __reduce__(self) -> Any:
        raise refuse_copy(self)

    @property
    def is_live(self) -> bool:
        """Whether the cache still holds its tokens."""
        return self.cache.group.is_live(self._checkpoint)

    def restore(self) -> None:
        """Drop everything behind the prefix.

        Raises
        ------
        CheckpointError
            The prefix is stale. Unchanged on error.
        """
        try:
            self.cache.rollback(self._checkpoint)
        except CheckpointError as error:
            raise CheckpointError(
                f"the prefix of {len(self)} tokens is stale: {error}. Prefill it again, with prefix()"
            ) from error
        if len(self.cache.transcript) < len(self):  # moving rows makes a cache forget what it knew
            self.cache.transcript.note(self.ids, self.mask)

    def __enter__(self) -> Prefix:
        if self._is_open:
            raise CheckpointError(
                "this prefix was entered already: entering it again would drop what follows it"
            )
        self.restore()
        self._is_open = True
        self.cache._open_prefixes.append(self)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._is_open:
            self.cache._open_prefixes.remove(self)
        self._is_open = False
        try:
            self.restore()
        except CheckpointError:
            if exc is None:  # an exception that is on its way says more than ours would
                raise

    def scope(self) -> Prefix:
        """Return what ``with`` takes: it drops what follows the prefix on entry and on exit, as ``with prefix:``."""
        return self

    def prefix(
        self, model: Any, ids_or_text: Any, tokenizer: Any = None, *, chunk_size: int | None = None
    ) -> Prefix:
        """Drop everything behind this prefix, append more tokens, and return the longer prefix.

        Otherwise as `ArenaCache.prefix`. This one stays usable; using it makes the longer one stale.
        """
        ids, mask = as_tokens(ids_or_text, tokenizer, is_first=False)  # raises before anything is dropped
        self.restore()
        tokens = {"input_ids": ids, "attention_mask": mask}
        return prefill_prefix(self.cache, model, tokens, chunk_size=chunk_size)

    def branches(self, n: int) -> Branches:
        """Return `n` continuations of this prefix side by side; see `ArenaCache.branches`."""
        return Branches(self.cache, n, prefix=self)

    def inputs(self, ids_or_text: Any, tokenizer: Any = None) -> dict[str, torch.Tensor]:
        """Return the prefix and what follows it as `generate` wants it: ``input_ids`` and ``attention_mask``.

        Parameters
        ----------
        ids_or_text
            A text, token ids ``[n]`` or ``[rows, n]``, or what a tokenizer returns.
        tokenizer : optional
            For texts; it adds no special tokens, since this is no beginning.

        Returns
        -------
        dict
            ``[rows, len(self) + n]`` each, on the device of the model. Assisted decoding wants the new ids alone:
            give it ``input_ids[:, len(prefix):]`` with the whole mask.
        """
        ids, mask = as_tokens(ids_or_text, tokenizer, is_first=False)
        return joined(self.ids, self.mask, *expanded(ids, mask, self.ids.shape[0]), self.device)


class Branches:
    """Continuations of one row side by side, as rows of one batch; `ArenaCache.branches` makes it.

    ::

        with system.branches(3) as branches:
            answers = model.generate(**branches.inputs(three_questions, tokenizer), cache=cache)

    On entry the row is repeated within the memory that is reserved; moving rows about, as beam search does, skips what
    they share. On exit there is one row again, without anything that came behind; `keep` lets one branch live on.
    """

    def __init__(self, cache: ArenaCache, n: int, *, prefix: Prefix | None = None) -> None:
        n = positive(n, "n")
        if n > cache.max_batch_size:
            raise ShapeError(
                f"branches({n}): the cache was made for {cache.max_batch_size} rows; make it with max_batch_size of at "
                f"least {n}"
            )
        self.cache = cache
        self.n = n
        self._prefix = prefix
        self._start: KVCheckpoint | None = None
        self._is_open = False

    def __len__(self) -> int:
        return self.n

    def __reduce__(self) -> Any:
        raise refuse_copy(self)

    def __enter__(self) -> Branches:
        if self._start is not None:
            raise CheckpointError("these branches were entered before; make others with branches()")
        cache = self.cache
        if self._prefix is not None:
            self._prefix.restore()
        if cache.group.rows != 1 or not (cache.group.length or cache.states):
            raise ShapeError(
                f"branches: one row with tokens is repeated, the cache holds {cache.group.length} tokens of "
                f"{cache.group.rows or 0} rows"
            )
        start = cache.checkpoint()
        cache.batch_repeat_interleave(self.n)
        self._start, self._is_open = start, True
        if self._prefix is not None:
            cache._open_prefixes.append(self._prefix)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if not self._is_open or self._start is None:
            return
        self._close()
        try:
            self.cache.rollback(self._start)
        except CheckpointError:
            if exc is None:  # an exception that is on its way says more than ours would
                raise

    def keep(self, branch: int) -> None:
        """Let the cache go on with one branch, as a single row with all that it holds; the others are dropped.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            There is no such branch. Unchanged on error.
        CheckpointError
            The branches are closed.
        """
        if not self._is_open:
            raise CheckpointError("keep: these branches are not open; call it inside of `with`, once")
        number, n_rows = positive(branch, "branch", least=0), self.cache.group.rows or 0
        if number >= n_rows:
            raise ArgumentError(f"keep({number}): there are branches 0 to {n_rows - 1}")
        self.cache.batch_select_indices(torch.tensor([number]))
        self._close()

    def _close(self) -> None:
        self._is_open = False
        if self._prefix is not None:
            self.cache._open_prefixes.remove(self._prefix)

    def inputs(self, ids_or_texts: Any, tokenizer: Any = None) -> dict[str, torch.Tensor]:
        """Return the whole prompts of all branches as `generate` wants them, a row each.

        Shorter continuations are padded on the left, behind what the branches share.

        Parameters
        ----------
        ids_or_texts : sequence
            One for each branch: texts, or token ids ``[n_i]``; or one for all of them.
        tokenizer : optional
            For texts; it adds no special tokens, since this is no beginning.

        Raises
        ------
        ArgumentError
            Continuations of different lengths, and a layer that counts padding: a window, or a recurrent state.
        """
        ids, mask = as_tokens(ids_or_texts, tokenizer, is_first=False)
        ids, mask = expanded(ids, mask, self.n)
        if not mask.all() and _counts_padding(self.cache):
            raise ArgumentError(
                "branches: continuations of different lengths need padding behind the prefix, which windows and "
                "recurrent states of this model would count as tokens; give continuations of one length, or one at a "
                "time"
            )
        return joined(*expanded(*_known(self.cache), self.n), ids, mask, self._device)

    @property
    def _device(self) -> Any:
        return self._prefix.device if self._prefix is not None else self.cache.arenas[0].device


def prefill_prefix(
    cache: ArenaCache, model: Any, ids_or_text: Any, tokenizer: Any = None, *, chunk_size: int | None = None
) -> Prefix:
    """Append tokens to a cache, all or none, and return the prefix that it then holds; see `ArenaCache.prefix`."""
    held_ids, held_mask = _known(cache)
    n_held = held_ids.shape[1]
    if n_held and not cache.transcript.is_of(model):
        raise ArgumentError(
            f"prefix: the cache holds {n_held} tokens of another model, or of other weights; reset() first"
        )
    n_noted = cache.transcript.n_noted
    if n_held > n_noted:
        raise ArgumentError(
            f"prefix: the cache holds {n_held} tokens, {n_held - n_noted} of them a conversation, and a prefix is put "
            f"behind what is held: reset() first; in the `with` of another prefix, call prefix() of that one. To have "
            f"the conversation in the prefix, cache.transcript.note(cache.transcript.ids, cache.transcript.mask) before"
        )
    ids, mask = as_tokens(ids_or_text, tokenizer, is_first=n_held == 0)
    if n_held:
        ids, mask = expanded(ids, mask, held_ids.shape[0])
    n_new = ids.shape[1]
    if n_new == 0:
        raise ArgumentError("prefix: there are no tokens to prefill")
    step = n_new if chunk_size is None else positive(chunk_size, "chunk_size")
    if cache.on_full == "raise" and n_held + n_new > cache.max_context_length and cache.holds_tokens:
        raise _does_not_fit(cache, n_held, n_new)
    whole_ids, whole_mask = ids, mask
    if n_held:
        whole_ids, whole_mask = torch.cat([held_ids, ids], dim=1), torch.cat([held_mask, mask], dim=1)
    start = cache.checkpoint()
    try:
        first, stop = n_held, n_held + n_new
        while first < stop:
            if first and cache.states.has_recurrence:
                step = 1  # with several tokens Mamba and Jamba begin their recurrence anew, on any cache
            _forward(cache, model, whole_ids, whole_mask, first, min(first + step, stop))
            first += step
    except BaseException:
        cache.rollback(start)
        cache.transcript.note(held_ids, held_mask)
        raise
    cache.transcript.note(whole_ids, whole_mask)
    cache.transcript.bind(model)
    return Prefix(cache, whole_ids, whole_mask, model.device, cache.checkpoint(), n_before=n_held)


def check_open(cache: Any, n_kept: int, n_same: int | None, n_tokens: int) -> None:
    """Raise `CheckpointError` if a prefix whose ``with`` is open were lost by keeping `n_kept` tokens.

    Parameters
    ----------
    cache
        An `ArenaCache`, or another, which has no prefixes.
    n_kept : int
        Tokens of the cache that a conversation goes on from.
    n_same : int or None
        Tokens that it has in common with what is held; None if nobody can tell.
    n_tokens : int
        Its tokens.
    """
    for prefix in getattr(cache, "_open_prefixes", ()):
        n_prefix = len(prefix)
        if n_kept >= n_prefix or not prefix.is_live:
            continue
        loss = f"which would drop the prefix of {n_prefix} tokens whose `with` block is open"
        if n_same is None or n_same >= n_prefix < n_tokens:
            raise CheckpointError(
                f"generate_from starts over here, or keeps other rows (its Notes say when), {loss}; call generate with "
                f"prefix.inputs(...) and the cache, or leave the block first"
            )
        raise CheckpointError(
            f"the conversation of {n_tokens} tokens goes on from {min(n_same, n_tokens - 1)} of those that the cache "
            f"holds, {loss}; let it begin with prefix.ids and have at least one token more, or leave the block first"
        )


def _forward(
    cache: ArenaCache, model: Any, ids: torch.Tensor, mask: torch.Tensor, first: int, stop: int
) -> None:
    """Run the model on tokens `first` to `stop` of ``ids [rows, n]``, whose logits nobody wants."""
    known, device = inspect.signature(model.forward).parameters, model.device
    options: dict[str, Any] = {cache_argument(model): cache, "use_cache": True}
    if "logits_to_keep" in known:
        options["logits_to_keep"] = 1
    if not mask[:, :stop].all():
        options["attention_mask"] = mask[:, :stop].long().to(device)
    if "position_ids" in known:  # as `generate` does; Bamba would count from 0 again
        positions = (mask[:, :stop].long().cumsum(1) - 1).clamp(min=0)
        options["position_ids"] = positions[:, first:].to(device)
    with torch.no_grad():
        model(input_ids=ids[:, first:stop].to(device), **options)


def _counts_padding(cache: ArenaCache) -> bool:
    """Return whether padding among the tokens changes what the model sees: in a window, or in a recurrent state."""
    return any(cache.is_sliding) or any(hasattr(layer, "conv_states") for layer in cache.layers)


def _known(cache: ArenaCache) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask ``[rows, n]`` of all tokens that are held, or raise unless all are known."""
    held, n_tokens = cache.transcript, cache.group.length
    if not cache.holds_tokens:  # states do not tell how many tokens went into them
        n_tokens = len(held) if cache.states.is_empty else max(len(held), 1)
    if len(held) < n_tokens:
        tokens = f"{n_tokens} tokens" if cache.holds_tokens else "states of tokens"
        raise ArgumentError(
            f"the cache holds {tokens}, of which the ids of {len(held)} are known: start from an empty cache, or from a "
            f"prefix"
        )
    return held.ids[:, :n_tokens], held.mask[:, :n_tokens]


def _does_not_fit(cache: ArenaCache, n_held: int, n_new: int) -> CapacityError:
    capacity = cache.max_context_length
    missing = n_held + n_new - capacity
    return CapacityError(
        f"prefix: {n_held} of {capacity} tokens used, {n_new} more asked, {missing} too many; make the cache with "
        f"max_context_length of at least {n_held + n_new}, and more for what is to follow",
        used=n_held,
        requested=n_new,
        capacity=capacity,
        available=capacity - n_held,
        missing=missing,
        aligned_offset=n_held,
        label="prefix",
    )
