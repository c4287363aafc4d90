"""Layers that hold states of a fixed size, of recurrences and convolutions, instead of keys and values a token."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import LinearAttentionLayer

from gpuarena.errors import (
    ArenaError,
    ArgumentError,
    ArgumentTypeError,
    AutogradError,
    DeviceMismatchError,
    ShapeError,
)
from gpuarena.region import Region
from gpuarena_transformers.layers import ArenaLayer, cache_is_gone, removed, whole_cache

if TYPE_CHECKING:
    from gpuarena_transformers.cache import ArenaCache

__all__ = ["ArenaHybridLayer", "ArenaStateLayer"]

#: What a state is, and its number in the layer: ("conv", 0).
Key = tuple[str, int]


class ArenaStateLayer(LinearAttentionLayer):  # type: ignore[misc]  # transformers is untyped
    """Convolution and recurrent states in an arena, ``[rows, ...]``, written in place at addresses that stay.

    The memory is taken at the first update, for as many rows as the cache was made for; fewer use the first of
    them. Models write single tokens into `conv_states` and `recurrent_states` themselves.

    Between `activate_past_recording` and `crop` the columns of a convolution state that may still be needed are
    ordinary tensors, as in transformers' own layer; `crop` brings the state back into the arena.
    """

    is_compileable = False  # which rows are in use is decided in Python

    def __init__(self, cache: ArenaCache, index: int, number_of_states: int = 1) -> None:
        self._cache = weakref.ref(cache)  # no cycle keeps the memory of a cache that was dropped
        self._index = index
        self._regions: dict[Key, Region] = {}  # [max_batch_size, ...]
        self._views: dict[Key, torch.Tensor] = {}  # [rows, ...] of those regions that hold a state
        self._from_start: set[int] = set()  # recorded convolutions that begin with the first token
        self._records = False
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._views)} states of {self.batch_size_or_none or 0} rows)"

    # -- what transformers asks for ------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device | None:
        """Where the states lie; None before the first update."""
        region = next(iter(self._regions.values()), None)
        return None if region is None else torch.device(region.arena.device)

    @device.setter
    def device(self, value: Any) -> None:
        """Ignore: it follows from the memory."""

    @property
    def batch_size(self) -> int:
        """Rows in use."""
        n_rows = self.batch_size_or_none
        if n_rows is None:
            raise AttributeError("batch_size")  # transformers asks with hasattr
        return n_rows

    @property
    def batch_size_or_none(self) -> int | None:
        """Rows in use, None where no state is held."""
        view = next(iter(self._views.values()), None)
        return None if view is None else len(view)

    @property
    def record_past(self) -> bool:
        """Whether convolution states keep all columns until the next `crop`."""
        return self._records

    @record_past.setter
    def record_past(self, value: bool) -> None:
        self._records = bool(value)
        if not value:
            self._fold()

    def lazy_initialization(
        self,
        conv_states: torch.Tensor | None = None,
        recurrent_states: torch.Tensor | None = None,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
    ) -> None:
        """Take the memory for states like these, of which only the shape counts."""
        if conv_states is not None:
            width = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
            self._begin(("conv", state_idx), conv_states, (*conv_states.shape[1:-1], width))
        if recurrent_states is not None:
            self._begin(("recurrent", state_idx), recurrent_states, tuple(recurrent_states.shape[1:]))

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Take in ``[rows, channels, n]`` new columns; return them behind those that are held.

        Raises
        ------
        ArgumentTypeError, ShapeError, DeviceMismatchError, AutogradError, OutOfMemoryError, StaleRegionError
            Before anything is written.
        CheckpointError
            A step failed half-way, and nobody rolled back.
        """
        key = ("conv", state_idx)
        goes_on = self.has_previous_state[state_idx]
        view = self._ready(
            key, conv_states, None if goes_on else self._width(key, conv_states, conv_kernel_size)
        )
        width = view.shape[-1]
        if goes_on:
            full = torch.cat([self.conv_states[state_idx], conv_states], dim=-1)
        elif self._records:
            full = conv_states
            self._from_start.add(state_idx)
        else:
            missing = max(0, width - conv_states.shape[-1])
            full = torch.nn.functional.pad(conv_states, (missing, 0)) if missing else conv_states
        if self._records:
            self.conv_states[state_idx] = full.detach()
        else:
            view.copy_(full[..., full.shape[-1] - width :].detach())
            self.conv_states[state_idx] = view
        self.has_previous_state[state_idx] = True
        return full

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Put ``[rows, ...]`` in place of the state that is held; return the state in the arena.

        Raises
        ------
        As `update_conv_state`.
        """
        key = ("recurrent", state_idx)
        width = recurrent_states.shape[-1] if key not in self._views else None
        view = self._ready(key, recurrent_states, width)
        view.copy_(recurrent_states.detach())
        return view

    def crop(self, tokens_to_remove: int) -> None:
        """Remove ``-tokens_to_remove`` tokens that were recorded; `ArenaCache.crop` does it for all layers.

        Raises
        ------
        ArgumentError
            A recurrent state, or columns that were not recorded. Unchanged on error.
        """
        n_removed = removed(tokens_to_remove)
        reason = self.reason_against(n_removed)
        if reason:
            raise ArgumentError(f"crop(-{n_removed}): {reason}")
        self.cut(n_removed)

    def reset(self) -> None:
        """Forget the states; the memory stays."""
        self._views.clear()
        self._from_start.clear()
        for number in range(self.number_of_states):
            self.conv_states[number] = self.recurrent_states[number] = None
            self.is_conv_states_initialized[number] = self.is_recurrent_states_initialized[number] = False
            self.has_previous_state[number] = False

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Refuse: rows change places in all layers at once."""
        raise whole_cache("reorder_cache")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refuse: rows change places in all layers at once."""
        raise whole_cache("batch_repeat_interleave")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Refuse: rows change places in all layers at once."""
        raise whole_cache("batch_select_indices")

    # -- for the cache -------------------------------------------------------------------------------------------

    @property
    def index(self) -> int:
        """The layer's number in the cache."""
        return self._index

    @property
    def holds_states(self) -> bool:
        """Whether there is any state."""
        return bool(self._views)

    @property
    def has_recurrence(self) -> bool:
        """Whether a recurrent state is held, which no crop can bring back."""
        return any(what == "recurrent" for what, _ in self._views)

    @property
    def reserved_nbytes(self) -> int:
        """Bytes of the regions."""
        return sum(region.nbytes for region in self._regions.values())

    @property
    def used_nbytes(self) -> int:
        """Bytes of the rows in use."""
        return sum(view.numel() * view.element_size() for view in self._views.values())

    @property
    def regions(self) -> dict[Key, Region]:
        """What was taken of the arena, each ``[max_batch_size, ...]``."""
        return self._regions

    def lacks(self, kind: str) -> bool:
        """Return whether memory of a kind is still to be taken."""
        what, _, number = kind.partition(" ")
        return (
            what in ("conv", "recurrent")
            and int(number) < self.number_of_states
            and (what, int(number)) not in self._regions
        )

    def check_live(self) -> None:
        """Raise `StaleRegionError` if the arena was rolled back below the states."""
        for region in self._regions.values():
            region._check()

    def reason_against(self, n_removed: int) -> str:
        """Return why `n_removed` tokens cannot be taken out of the states; an empty text if they can."""
        if n_removed == 0 or not self._views:
            return ""
        where = f"layer {self._index}"
        if self.has_recurrence:
            return (
                f"{where} holds a recurrent state, which cannot be cut: take a checkpoint() where you want to "
                f"come back to, and rollback()"
            )
        for (_, number), view in self._views.items():
            n_columns = self.conv_states[number].shape[-1]
            n_past = n_columns if number in self._from_start else n_columns - view.shape[-1]
            if n_removed > n_past:
                return (
                    f"{where} holds a convolution state, of whose past {n_past} tokens are recorded: take a "
                    f"checkpoint() where you want to come back to, and rollback(), or activate_past_recording() first"
                )
        return ""

    def cut(self, n_removed: int) -> None:
        """Take `n_removed` tokens out of recorded states, and put the states back in the arena."""
        if n_removed:
            for what, number in self._views:
                if what == "conv":
                    past = self.conv_states[number]
                    self.conv_states[number] = past[..., : past.shape[-1] - n_removed]
        self._fold()

    def held(self) -> Iterator[tuple[Key, torch.Tensor]]:
        """Yield each state ``[rows, ...]``; only the columns of a convolution that the next step needs."""
        for key, view in self._views.items():
            what, number = key
            yield key, self._last_columns(number) if what == "conv" else view

    def load(self, states: dict[Key, torch.Tensor], has_previous: dict[int, bool]) -> None:
        """Make `states` those of the layer; it holds no others afterwards."""
        ArenaStateLayer.reset(self)  # and not the keys and values of a hybrid layer
        for key, state in states.items():
            self._begin(key, state, tuple(state.shape[1:])).copy_(state)
        self.has_previous_state.update(has_previous)

    def gather(self, ops: Any, rows: Any, count: int, scratch: Any) -> None:
        """Put `count` rows in place of those that are held; `rows` are checked."""
        for key, view in list(self._views.items()):
            recorded = self.conv_states[key[1]] if key[0] == "conv" else view
            ops.gather_rows(view, rows, scratch, ops.rows(self._regions[key].array, count))
            bound = self._bind(key, count)
            if recorded is not view:
                self.conv_states[key[1]] = recorded.index_select(0, rows)
            assert bound.shape[0] == count, "the view shows the new rows"

    # -- states and regions --------------------------------------------------------------------------------------

    def _width(self, key: Key, state: Any, asked: int | None) -> int:
        """Return the columns of a convolution state: those there is memory for, that are asked for, or that it has."""
        region = self._regions.get(key)
        if region is not None:
            return int(region.shape[-1])
        return asked or int(state.shape[-1])

    def _ready(self, key: Key, state: Any, width: int | None) -> torch.Tensor:
        """Return the view that `state` goes to; a state begins with `width` columns, or goes on with None."""
        cache = self._cache()
        try:
            self._check(key, state)
            if width is None:
                return self._views[key]
            return self._begin(key, state, (*state.shape[1:-1], width))
        except ArenaError:
            if cache is not None:  # a convolution comes first in its layer
                cache.states.step_failed(self._index, is_behind_own=key[0] != "conv")
            raise

    def _begin(self, key: Key, like: torch.Tensor, tail: tuple[int, ...]) -> torch.Tensor:
        """Return the view that a first state ``[rows, *tail]`` goes to."""
        cache = self._cache()
        if cache is None:
            raise cache_is_gone()
        cache.states.check_rows(self._index, like.shape)
        region = self._regions.get(key)
        if region is None:
            region = cache.memory.take_state(self._index, f"{key[0]} {key[1]}", tail, like.dtype, like.device)
            self._regions[key] = region
        elif region.shape[1:] != tail:
            raise ShapeError(
                f"layer {self._index}: a {key[0]} state of {[like.shape[0], *tail]}, the memory is for "
                f"[rows, {', '.join(map(str, region.shape[1:]))}]",
                shape=(like.shape[0], *tail),
            )
        region._check()
        cache.states.use_rows(like.shape[0])
        if key[0] == "conv":
            self.conv_kernel_size[key[1]] = tail[-1]
        return self._bind(key, like.shape[0])

    def _bind(self, key: Key, n_rows: int) -> torch.Tensor:
        """Show the first rows of a region as the state."""
        with torch.inference_mode(False):  # else it could be written in that mode only
            # Detached: what a model writes with gradients must not tie the whole arena into its graph.
            view: torch.Tensor = self._regions[key].array[:n_rows].detach()
        self._views[key] = view
        what, number = key
        if what == "conv":
            self.conv_states[number], self.is_conv_states_initialized[number] = view, True
        else:
            self.recurrent_states[number], self.is_recurrent_states_initialized[number] = view, True
        return view

    def _last_columns(self, number: int) -> torch.Tensor:
        """Return a convolution state as wide as its memory: the last columns, behind zeros where there are fewer."""
        state: torch.Tensor = self.conv_states[number]
        width = self._views["conv", number].shape[-1]
        if state.shape[-1] == width:
            return state
        if state.shape[-1] > width:
            return state[..., state.shape[-1] - width :]
        return torch.nn.functional.pad(state, (width - state.shape[-1], 0))

    def _fold(self) -> None:
        """Put recorded convolution states back in the arena, without the past."""
        for what, number in self._views:
            view = self._views[what, number]
            if what == "conv" and self.conv_states[number] is not view:
                view.copy_(self._last_columns(number))
                self.conv_states[number] = view
        self._from_start.clear()

    def _check(self, key: Key, state: Any) -> None:
        """Raise unless `state` can be taken in."""
        if not isinstance(state, torch.Tensor) or state.ndim < 2:
            raise ArgumentTypeError(f"layer {self._index}: a state must be a tensor [rows, ...]")
        if state.requires_grad and torch.is_grad_enabled():
            raise AutogradError(
                f"the {key[0]} state requires grad: a cache that is written in place cannot be differentiated "
                f"through; run the model under torch.no_grad() or torch.inference_mode()"
            )
        cache = self._cache()
        if cache is not None:
            cache.states.check_whole()
        view = self._views.get(key)
        if view is None:
            return
        self._regions[key]._check()
        fits = state.shape == view.shape
        if key[0] == "conv":  # any number of columns
            fits = state.shape[:-1] == view.shape[:-1]
        if not fits:
            if cache is not None:
                cache.states.check_rows(self._index, state.shape)
            raise ShapeError(
                f"layer {self._index}: a {key[0]} state of {list(state.shape)}, the cache holds {list(view.shape)}",
                shape=tuple(state.shape),
            )
        if state.device != view.device:
            raise DeviceMismatchError(
                f"layer {self._index}: the {key[0]} state is on {state.device}, the cache on {view.device}"
            )


class ArenaHybridLayer(ArenaStateLayer, ArenaLayer):  # type: ignore[misc]  # device and record_past of the first
    """Keys and values, and states, in one layer: an `ArenaLayer` that is an `ArenaStateLayer` as well."""

    def __init__(
        self, cache: ArenaCache, index: int, number_of_states: int = 1, sliding_window: int | None = None
    ) -> None:
        ArenaStateLayer.__init__(self, cache, index, number_of_states)
        ArenaLayer.__init__(self, cache, index, sliding_window)

    def __repr__(self) -> str:
        return ArenaLayer.__repr__(self).replace("ArenaLayer", "ArenaHybridLayer")

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Take the memory for keys and values, given by position, or for states, given by name."""
        (ArenaLayer if args else ArenaStateLayer).lazy_initialization(self, *args, **kwargs)

    def get_max_length(self) -> int:
        """Return the capacity in tokens."""
        return ArenaLayer.get_max_length(self)

    get_max_cache_shape = get_max_length

    def lacks(self, kind: str) -> bool:
        """Return whether memory of a kind is still to be taken."""
        return ArenaLayer.lacks(self, kind) or ArenaStateLayer.lacks(self, kind)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove ``-tokens_to_remove`` tokens from this layer; `ArenaCache.crop` does it for all."""
        ArenaStateLayer.crop(self, tokens_to_remove)
        ArenaLayer.crop(self, tokens_to_remove)

    def reset(self) -> None:
        """Forget this layer's tokens and states; `ArenaCache.reset` does it for all."""
        ArenaStateLayer.reset(self)
        ArenaLayer.reset(self)
