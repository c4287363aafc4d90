"""One layer of an `ArenaStaticCache`: buffers of fixed address and shape, which compiled code writes."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import (
    LinearAttentionAndStaticFullAttentionLayer,
    LinearAttentionAndStaticSlidingWindowAttentionLayer,
    LinearAttentionLayer,
    StaticIndexedLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from gpuarena.errors import ArgumentError, ShapeError
from gpuarena.kv.full import FullLayer
from gpuarena_transformers.layers import removed, whole_cache

if TYPE_CHECKING:
    from gpuarena_transformers.static import ArenaStaticCache

__all__ = [
    "STATIC_LAYERS",
    "ArenaStaticHybridLayer",
    "ArenaStaticHybridSlidingLayer",
    "ArenaStaticIndexedLayer",
    "ArenaStaticLayer",
    "ArenaStaticSlidingLayer",
    "ArenaStaticStateLayer",
    "Slots",
    "States",
]

#: Of `_n_written`: compiled code wrote tokens, and how many is read from the device.
_SOME = 0


class Slots:
    """What the layers of a static cache have in common, before a class of transformers.

    The length is kept twice: `cumulative_length` on the device is what compiled code reads and moves, and the host
    has a number of its own, to check the capacity without waiting for the device. Compiled code cannot move that one:
    it would be compiled anew for each length. It leaves a note instead, which the host reads when it comes by.

    Attributes
    ----------
    keys, values : ``[rows, kv_heads, max_cache_len, dim]``, or None before the memory is taken
        All slots of the rows in use. Those behind the tokens are 0.
    shown_keys, shown_values
        The first of them, which `update` returns.
    cumulative_length : int64 scalar
    """

    is_croppable = True
    max_cache_len: int
    batch_size: int
    keys: torch.Tensor | None
    values: torch.Tensor | None
    cumulative_length: torch.Tensor
    device: Any
    is_initialized: bool

    def __init__(self, cache: ArenaStaticCache, index: int, **options: Any) -> None:
        with torch.inference_mode(False):  # else the length could not be moved outside of it
            super().__init__(max_cache_len=cache.max_context_length, **options)  # type: ignore[call-arg]  # a mixin
        self.max_cache_len = cache.max_context_length  # a window is no reason to hold less
        self._cache = weakref.ref(cache)  # no cycle keeps the memory of a cache that was dropped
        self._index = index
        self._kv: FullLayer | None = None
        self._views: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._n_written: int | None = None  # by compiled code, since the host last looked
        self._seen_version = 0  # of cumulative_length, when the host last looked
        self._n_shown = (0, 0)  # rows and slots
        self.shown_keys: torch.Tensor | None = None
        self.shown_values: torch.Tensor | None = None

    def __repr__(self) -> str:
        length = 0 if self._kv is None else self._kv.length
        return f"{type(self).__name__}({length} of {self.max_cache_len} tokens)"

    # -- memory -------------------------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take the memory for tensors like these, and show as many rows as they have."""
        if self._kv is None:
            cache = self._owner()
            # No window: the layer shows all slots, and the mask hides what is outside of it.
            kv = cache.memory.take_layer(self._index, None, key_states, value_states)
            assert isinstance(kv, FullLayer), "a layer without slack and storage is one"
            kv.buffers()  # what lay in the memory is no number that a mask could hide
            self.device = torch.device(kv.arena.device)
            with torch.inference_mode(False):
                self.cumulative_length = torch.zeros((), dtype=torch.int64, device=self.device)
            torch._dynamo.mark_static_address(self.cumulative_length)
            self._seen_version = self.cumulative_length._version
            self._kv = kv
        if self._kv.length == 0:
            self._kv._check(key_states, value_states)
            self.bind(key_states.shape[0], self._owner().n_slots)

    def lacks(self, kind: str) -> bool:
        """Return whether memory of that kind is still to be taken."""
        return kind == "kv" and self._kv is None

    def bind(self, n_rows: int, n_slots: int) -> None:
        """Show `n_rows` rows and `n_slots` slots."""
        if self.keys is None or self.batch_size != n_rows:
            self.keys, self.values = self._view(n_rows, self.max_cache_len)
            self.batch_size, self.num_heads = self.keys.shape[:2]
            self.k_head_dim, self.v_head_dim = self.keys.shape[3], self.values.shape[3]
        self.show(n_slots)

    def show(self, n_slots: int) -> None:
        """Let `update` return the first `n_slots` slots."""
        if self.keys is not None and self._n_shown != (self.batch_size, n_slots):
            self._n_shown = self.batch_size, n_slots
            self.shown_keys, self.shown_values = self._view(*self._n_shown)

    def _view(self, n_rows: int, n_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of the buffers, the same objects each time, so that compiled code knows them again."""
        found = self._views.get((n_rows, n_slots))
        if found is None:
            assert self._kv is not None, "the memory is taken"
            with torch.inference_mode(False):
                # .data: a tensor of its own to autograd, that shares nothing but the bytes.
                first, second = (plane[:n_rows, :, :n_slots].data for _, plane in self._kv.planes())
            for tensor in (first, second):
                torch._dynamo.mark_static_address(tensor)
                torch._dynamo.mark_static(tensor)  # or the second bucket is compiled for any length
            found = self._views[n_rows, n_slots] = first, second
        return found

    def _owner(self) -> ArenaStaticCache:
        cache = self._cache()
        if cache is None:
            raise ArgumentError(
                "the ArenaStaticCache of this layer is gone; keep it as long as its layers are used"
            )
        return cache

    # -- tokens -------------------------------------------------------------------------------------------------

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append ``[rows, kv_heads, n, dim]`` and return the slots shown, of which a mask hides what is not filled.

        Raises
        ------
        CapacityError, ShapeError, DTypeError, DeviceMismatchError, AutogradError, StaleRegionError
            Before anything is written. In compiled code only what can be told from shapes and dtypes is checked.
        """
        if torch.compiler.is_compiling():
            return self._update_compiled(key_states, value_states)
        if self._kv is None:
            self.lazy_initialization(key_states, value_states)
        kv = self._kv
        assert kv is not None, "lazy_initialization sets it"
        self.settle()
        n_rows, n_new = kv._accept(key_states, value_states)
        stop = kv.length + n_new
        if stop > self.max_cache_len:
            raise kv._capacity_error(n_new)
        kv.check_live()
        cache = self._owner()
        cache.n_slots = cache.slots_for(stop)
        self.bind(n_rows, cache.n_slots)
        assert self.keys is not None, "bind sets them"
        assert self.values is not None, "bind sets them"
        with torch.no_grad():
            if is_capturing(self.device):
                # Nothing runs, so nothing is counted; and a replay goes by the length on the device.
                self._write_at_length(self.keys, self.values, key_states, value_states)
                self._seen_version = self.cumulative_length._version
                return self.keys, self.values
            kv._ops.write(self.keys, self.values, kv.length, key_states, value_states)
            self.cumulative_length.fill_(stop)
        self._seen_version = self.cumulative_length._version
        kv._advance(n_rows, stop)
        self.is_initialized = True
        assert self.shown_keys is not None, "bind sets them"
        assert self.shown_values is not None, "bind sets them"
        return self.shown_keys, self.shown_values

    def _update_compiled(
        self, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # No number that changes from step to step is read here: each of its values would be another graph.
        if self.shown_keys is None or not self._fits(key_states, value_states):
            self._prepare(key_states, value_states)
        shown_keys, shown_values = self.shown_keys, self.shown_values
        assert shown_keys is not None, "_prepare sets them"
        assert shown_values is not None, "_prepare sets them"
        with torch.no_grad():
            self._write_at_length(shown_keys, shown_values, key_states, value_states)
        # Stored but never read here, so that it is no guard.
        self._n_written = 1 if key_states.shape[2] == 1 else _SOME
        if not self.is_initialized:
            self.is_initialized = True
        return shown_keys, shown_values

    def _write_at_length(
        self, keys: torch.Tensor, values: torch.Tensor, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> None:
        n_new = key_states.shape[2]
        positions = torch.arange(n_new, device=keys.device) + self.cumulative_length
        keys.index_copy_(2, positions, key_states.detach())
        values.index_copy_(2, positions, value_states.detach())
        self.cumulative_length.add_(n_new)

    def _fits(self, key_states: torch.Tensor, value_states: torch.Tensor) -> bool:
        """Return whether compiled code may write these to the slots shown."""
        keys, values = self.shown_keys, self.shown_values
        assert keys is not None, "the caller looked"
        assert values is not None, "the caller looked"
        return (
            key_states.shape[:2] == keys.shape[:2]
            and value_states.shape[:2] == values.shape[:2]
            and key_states.shape[3] == keys.shape[3]
            and value_states.shape[3] == values.shape[3]
            and key_states.shape[2] == value_states.shape[2]
            and key_states.dtype == keys.dtype
            and value_states.dtype == values.dtype
            and key_states.device == keys.device
            and not ((key_states.requires_grad or value_states.requires_grad) and torch.is_grad_enabled())
        )

    @torch.compiler.disable(  # type: ignore[untyped-decorator, no-untyped-call]  # torch does not annotate it
        reason="an ArenaStaticCache takes memory and rows outside of compiled code"
    )
    def _prepare(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take memory or rows for these, or raise what is wrong with them."""
        self.lazy_initialization(key_states, value_states)
        assert self._kv is not None, "lazy_initialization sets it"
        self._kv._check(key_states, value_states)

    def count(self, n_tokens: int) -> None:
        """Count tokens that are written behind the back of the host."""
        if self._kv is not None:
            self._kv._advance(self.batch_size, self._kv.length + n_tokens)
            self.is_initialized = self._kv.length > 0

    def settle(self) -> None:
        """Count what compiled code wrote since the host last looked."""
        kv, version, n_written = self._kv, self.cumulative_length._version, self._n_written
        n_changes = version - self._seen_version
        if kv is None or (n_changes == 0 and n_written is None):
            return
        # One change and a note of one token is the step of a decoding loop; everything else waits for the device.
        length = kv.length + 1 if n_changes == n_written == 1 else self._read_length()
        self._n_written, self._seen_version = None, version
        if length < kv.length:
            kv.truncate(length)
            self._owner().transcript.cut(length)
        else:
            kv._advance(self.batch_size, min(length, self.max_cache_len))
        self.is_initialized = kv.length > 0

    def _read_length(self) -> int:
        return int(self.cumulative_length)  # a GPU is waited for

    def apply(self) -> None:
        """Bring the device to the length that the host has set, and put 0 in the slots behind it."""
        kv = self._kv
        if kv is None:
            return
        kv.clear_up_to(self.max_cache_len)
        self.cumulative_length.fill_(kv.length)
        self._n_written, self._seen_version = None, self.cumulative_length._version
        self.is_initialized = kv.length > 0

    # -- what transformers asks ---------------------------------------------------------------------------------

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many slots `update` will return for such a query, and 0.

        Outside of compiled code this is also where the next step is prepared: room for the query is checked, and the
        slots are shown that it needs.

        Raises
        ------
        CapacityError, StaleRegionError
            Unchanged on error.
        """
        if torch.compiler.is_compiling():
            shown = self.shown_keys
            return (self.max_cache_len if shown is None else shown.shape[2]), 0
        return self._owner()._prepare_step(self, int(query_length)), 0

    def get_seq_length(self) -> Any:
        """Return the tokens seen: 0, or a copy of the length on the device, which later updates leave alone."""
        return self.cumulative_length.clone() if self.is_initialized else 0

    def get_max_length(self) -> int:
        """Return the capacity in tokens."""
        return self.max_cache_len

    get_max_cache_shape = get_max_length  # its name before transformers 5.20

    def crop(self, tokens_to_remove: int) -> None:
        """Remove ``-tokens_to_remove`` tokens from this layer; `ArenaStaticCache.crop` does it for all."""
        n_removed = removed(tokens_to_remove)
        if self._kv is not None:
            self.settle()
            self._kv.truncate(self._kv.length - n_removed)
            self._owner().transcript.cut(self._kv.length)
            self.apply()

    def reset(self) -> None:
        """Forget this layer's tokens; `ArenaStaticCache.reset` does it for all."""
        if self._kv is not None:
            self.settle()
            self._kv.truncate(0)
            self._owner().transcript.clear()
            self.apply()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Refuse: rows change places in all layers at once."""
        raise whole_cache("reorder_cache")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refuse: rows change places in all layers at once."""
        raise whole_cache("batch_repeat_interleave")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Refuse: rows change places in all layers at once."""
        raise whole_cache("batch_select_indices")

    def offload(self) -> None:
        """Refuse: the memory stays where it is."""
        raise ArgumentError("an ArenaStaticCache stays on its device, so that addresses do not change")

    prefetch = offload


class ArenaStaticLayer(Slots, StaticLayer):  # type: ignore[misc]  # transformers is untyped
    """Full attention."""


class ArenaStaticSlidingLayer(Slots, StaticSlidingWindowLayer):  # type: ignore[misc]
    """Sliding or chunked attention, with a slot for every token: nothing is moved, and everything can be cropped.

    The mask hides what is outside of the window.
    """

    is_croppable = True

    def __init__(self, cache: ArenaStaticCache, index: int, sliding_window: int) -> None:
        super().__init__(cache, index, sliding_window=sliding_window)
        self.sliding_window = sliding_window


class ArenaStaticIndexedLayer(Slots, StaticIndexedLayer):  # type: ignore[misc]
    """Sparse attention: keys and values in the arena, the index keys beside it as transformers makes them."""

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Append index keys, ``[rows, n, dim]``, and return those of the slots shown."""
        held = self.indexer_keys
        if held is not None and len(held) != len(indexer_key_states) and not torch.compiler.is_compiling():
            self.is_indexer_initialized = False  # the rows have changed since reset()
        keys = super().update_indexer(indexer_key_states)
        found: torch.Tensor = keys if self.shown_keys is None else keys[:, : self.shown_keys.shape[2]]
        return found

    def apply(self) -> None:
        """Bring the device to the length that the host has set, also that of the index keys."""
        super().apply()
        if self.is_indexer_initialized:
            length = 0 if self._kv is None else self._kv.length
            self.indexer_keys[:, length:].zero_()
            self.indexer_cumulative_length.fill_(length)

    def reorder_indexer(self, rows: torch.Tensor) -> None:
        """Put row ``rows[i]`` of the index keys in place of row i."""
        if self.is_indexer_initialized:
            self.indexer_keys.copy_(self.indexer_keys.index_select(0, rows.to(self.indexer_keys.device)))


class States(LinearAttentionLayer):  # type: ignore[misc]  # transformers is untyped
    """Convolution and recurrent states, at addresses that stay, with memory for as many rows as the cache has.

    The memory is torch's, taken at the first update and kept by `reset`; fewer rows use the first of it.
    """

    device: Any
    _max_rows: int

    def _begin(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._buffers: dict[tuple[str, int], torch.Tensor] = {}  # [max_rows, ...]
        self._state_views: dict[tuple[str, int, int], torch.Tensor] = {}  # [rows, ...]

    def _take_state(
        self,
        conv_states: torch.Tensor | None = None,
        recurrent_states: torch.Tensor | None = None,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
    ) -> None:
        """Take the memory for states like these, or what there is of it, and show as many rows as they have."""
        if conv_states is not None:
            width = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
            self.conv_kernel_size[state_idx] = width
            self.conv_states[state_idx] = self._state(
                "conv", state_idx, conv_states, (*conv_states.shape[1:-1], width)
            )
            self.is_conv_states_initialized[state_idx] = True
        if recurrent_states is not None:
            self.recurrent_states[state_idx] = self._state(
                "recurrent", state_idx, recurrent_states, tuple(recurrent_states.shape[1:])
            )
            self.is_recurrent_states_initialized[state_idx] = True

    @torch.compiler.disable(  # type: ignore[untyped-decorator, no-untyped-call]  # torch does not annotate it
        reason="an ArenaStaticCache takes memory and rows outside of compiled code"
    )
    def _state(self, what: str, number: int, like: torch.Tensor, tail: tuple[int, ...]) -> torch.Tensor:
        """Return zeros ``[rows, *tail]`` for a first state, the same object each time for so many rows."""
        n_rows = like.shape[0]
        if n_rows > self._max_rows:
            raise ShapeError(
                f"a {what} state of {n_rows} rows given, the cache was made for at most {self._max_rows}; make it with "
                f"a larger max_batch_size",
                shape=tuple(like.shape),
            )
        if self.device is None:
            self.dtype, self.device = like.dtype, like.device
        with torch.inference_mode(False), torch.no_grad():  # else it could be written in that mode only
            buffer = self._buffers.get((what, number))
            if buffer is None:
                buffer = torch.zeros((self._max_rows, *tail), dtype=like.dtype, device=like.device)
                self._buffers[what, number] = buffer
            view = self._state_views.get((what, number, n_rows))
            if view is None:
                view = self._state_views[what, number, n_rows] = buffer[:n_rows].data
                torch._dynamo.mark_static_address(view)
            view.zero_()
        return view

    def reset_states(self) -> None:
        """Forget the states; the next may have another number of rows."""
        for number in range(self.number_of_states):
            self.is_conv_states_initialized[number] = self.is_recurrent_states_initialized[number] = False
            self.has_previous_state[number] = False


class ArenaStaticStateLayer(States):
    """States alone."""

    def __init__(self, max_rows: int, number_of_states: int = 1, **options: Any) -> None:
        super().__init__(number_of_states=number_of_states)
        self._begin(max_rows)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Take memory for a state."""
        self._take_state(*args, **kwargs)

    def reset(self) -> None:
        """Forget the states; the memory stays."""
        self.reset_states()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove ``-tokens_to_remove`` tokens that were recorded, and bring the states back to their addresses."""
        super().crop(tokens_to_remove)
        for number, state in self.conv_states.items():
            view = None if state is None else self._state_views.get(("conv", number, len(state)))
            if view is not None and view is not state:
                missing = view.shape[-1] - state.shape[-1]
                view.copy_(torch.nn.functional.pad(state, (missing, 0)))
                self.conv_states[number] = view


class _WithState(Slots, States):
    """A layer that has a recurrent state beside its keys and values."""

    is_croppable = False  # no state is what it was some tokens ago

    def __init__(self, cache: ArenaStaticCache, index: int, **options: Any) -> None:
        super().__init__(cache, index, **options)
        self._begin(cache.max_batch_size)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Take memory: for keys and values, given by position, or for a state, given by name."""
        if args:
            super().lazy_initialization(*args)
        else:
            self._take_state(**kwargs)


class ArenaStaticHybridLayer(_WithState, LinearAttentionAndStaticFullAttentionLayer):  # type: ignore[misc]
    """Full attention in the arena, and a recurrent state beside it."""


class ArenaStaticHybridSlidingLayer(
    _WithState,
    LinearAttentionAndStaticSlidingWindowAttentionLayer,  # type: ignore[misc]
):
    """Sliding attention in the arena, and a recurrent state beside it."""


#: The class of transformers that a layer type stands for -> the one that keeps its tokens in the arena.
STATIC_LAYERS: dict[type[Any], type[Any]] = {
    StaticLayer: ArenaStaticLayer,
    StaticSlidingWindowLayer: ArenaStaticSlidingLayer,
    StaticIndexedLayer: ArenaStaticIndexedLayer,
    LinearAttentionAndStaticFullAttentionLayer: ArenaStaticHybridLayer,
    LinearAttentionAndStaticSlidingWindowAttentionLayer: ArenaStaticHybridSlidingLayer,
}


def is_capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
