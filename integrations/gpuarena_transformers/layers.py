"""One layer of an `ArenaCache`, as transformers sees it."""

from __future__ import annotations

import operator
import weakref
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import CacheLayerMixin

from gpuarena.errors import ArenaError, ArgumentError, ArgumentTypeError, ShapeError
from gpuarena.kv import KVLayer

if TYPE_CHECKING:
    from gpuarena_transformers.cache import ArenaCache

__all__ = ["ArenaLayer"]


class ArenaLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped
    """Keys and values in an arena, of which `update` returns the filled part as views.

    A sliding layer keeps the whole history and returns its end, so that it can be cropped like any other.
    The memory is taken at the first `update`, whose tensors say what it has to hold.
    """

    is_compileable = False  # a prefix view has another shape in each step
    is_croppable = True
    supports_early_init = True

    def __init__(self, cache: ArenaCache, index: int, sliding_window: int | None = None) -> None:
        # CacheLayerMixin.__init__ would only assign what is a property here.
        self._cache = weakref.ref(cache)  # no cycle keeps the memory of a cache that was dropped
        self._max_length = cache.max_context_length
        self._index = index
        self._kv: KVLayer | None = None
        self._has_states = cache.has_states
        self.sliding_window = sliding_window
        self.is_sliding = sliding_window is not None
        self.record_past = False  # nothing is ever evicted, so the past is always there

    def __repr__(self) -> str:
        window = f", window={self.sliding_window}" if self.is_sliding else ""
        return f"ArenaLayer({self.get_seq_length()} of {self.get_max_length()} tokens{window})"

    @property
    def keys(self) -> torch.Tensor | None:
        """Filled keys, ``[batch, kv_heads, tokens, key_dim]``, a view; None before the first update."""
        return None if self._kv is None else self._kv.keys

    @keys.setter
    def keys(self, value: None) -> None:
        _refuse(value)

    @property
    def values(self) -> torch.Tensor | None:
        """Filled values, ``[batch, kv_heads, tokens, value_dim]``, a view; None before the first update."""
        return None if self._kv is None else self._kv.values

    @values.setter
    def values(self, value: None) -> None:
        _refuse(value)

    @property
    def is_initialized(self) -> bool:
        """Whether the layer holds tokens: some models take an initialised cache for a running conversation."""
        return self._kv is not None and self._kv.length > 0

    @is_initialized.setter
    def is_initialized(self, value: bool) -> None:
        """Ignore: it follows from the tokens."""

    @property
    def device(self) -> torch.device:
        """Where the memory lies."""
        if self._kv is None:
            raise AttributeError("device")  # transformers asks with hasattr
        return torch.device(self._kv.arena.device)

    @property
    def batch_size(self) -> int:
        """Rows in use."""
        if self._kv is None or self._kv.rows is None:
            raise AttributeError("batch_size")  # transformers asks with hasattr
        return self._kv.rows

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take the memory for tensors like these, of which only the shape counts."""
        if self._kv is None:
            cache = self._cache()
            if cache is None:
                raise cache_is_gone()
            self._kv = cache.memory.take_layer(self._index, self.sliding_window, key_states, value_states)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append ``[batch, kv_heads, n, dim]`` and return views of all that a query may see.

        Raises
        ------
        CapacityError, ShapeError, DTypeError, DeviceMismatchError, AutogradError, StaleRegionError
            Before anything is written; see `gpuarena.kv.KVLayer.append`. Recurrent states of layers before this one
            were advanced by then: `ArenaCache.rollback` brings them back.
        CheckpointError
            Such a step failed, and nobody rolled back.

        Notes
        -----
        Compiled code is interrupted here and appends as eager code does; `ArenaStaticCache` is for whole graphs.
        """
        if torch.compiler.is_compiling():
            return self._update_outside(key_states, value_states)  # type: ignore[no-any-return]  # as below
        cache = self._cache() if self._has_states else None
        if cache is not None:
            cache.states.check_whole()
        try:
            if self._kv is None:
                self.lazy_initialization(key_states, value_states)
            assert self._kv is not None, "lazy_initialization sets it"
            return self._kv.append(key_states, value_states)
        except ArenaError:
            if cache is not None:
                cache.states.step_failed(self._index)
            raise

    def lacks(self, kind: str) -> bool:
        """Return whether memory of a kind is still to be taken."""
        return kind == "kv" and self._kv is None

    @torch.compiler.disable(  # type: ignore[untyped-decorator, no-untyped-call]  # torch does not annotate it
        reason="an ArenaCache appends outside of compiled code; ArenaStaticCache is made for whole graphs (fullgraph)"
    )
    def _update_outside(self, key_states: torch.Tensor, value_states: torch.Tensor) -> Any:
        return self.update(key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many tokens `update` will return for such a query, and the position of the first."""
        length, window = self.get_seq_length(), self.sliding_window
        low = 0 if window is None else max(length - window + 1, 0)
        return length - low + int(query_length), low

    def get_seq_length(self) -> int:
        """Return the tokens seen."""
        return 0 if self._kv is None else self._kv.length

    def get_max_length(self) -> int:
        """Return the capacity in tokens."""
        return self._max_length

    get_max_cache_shape = get_max_length  # its name before transformers 5.20

    def crop(self, tokens_to_remove: int) -> None:
        """Remove ``-tokens_to_remove`` tokens from this layer; `ArenaCache.crop` does it for all."""
        n_removed = removed(tokens_to_remove)
        if n_removed and self._kv is not None:
            self._kv.truncate(self._kv.length - n_removed)
            self._cut_transcript()

    def reset(self) -> None:
        """Forget this layer's tokens; `ArenaCache.reset` does it for all."""
        if self._kv is not None:
            self._kv.truncate(0)
            self._cut_transcript()

    def _cut_transcript(self) -> None:
        """Forget the ids of tokens that this layer does not hold any more."""
        cache = self._cache()
        if cache is not None:
            cache.transcript.cut(self.get_seq_length())

    def activate_past_recording(self) -> None:
        """Do nothing: the past is always there."""

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Refuse: rows change places in all layers at once."""
        raise whole_cache("reorder_cache")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refuse: rows change places in all layers at once."""
        raise whole_cache("batch_repeat_interleave")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Refuse: rows change places in all layers at once."""
        raise whole_cache("batch_select_indices")


def removed(tokens_to_remove: int) -> int:
    """Return how many tokens a `crop` argument removes: it is negative or 0, and a tensor in transformers 5.17."""
    try:
        count = operator.index(tokens_to_remove)
    except (TypeError, ValueError, RuntimeError):  # arrays of several numbers raise any of these
        raise ArgumentTypeError(f"crop takes an integer, not {type(tokens_to_remove).__name__}") from None
    if count > 0:
        raise ArgumentError(
            f"crop({count}): give minus the number of tokens to remove, or use cache.truncate({count})"
        )
    return -count


def _refuse(value: Any) -> None:
    if value is not None:
        raise AttributeError(
            "the keys and values of an ArenaLayer are views of its arena and cannot be replaced"
        )


def cache_is_gone() -> ArgumentError:
    """Return the error of a layer that needs its cache, which nobody kept."""
    return ArgumentError("the ArenaCache of this layer is gone; keep it as long as its layers are used")


def row_numbers(indices: Any, n_rows: int | None) -> Any:
    """Return the numbers of the rows to keep, of which a boolean mask of all `n_rows` is taken too."""
    if not isinstance(indices, torch.Tensor) or indices.dtype != torch.bool:
        return indices
    if n_rows is not None and tuple(indices.shape) != (n_rows,):
        raise ShapeError(f"a mask of {list(indices.shape)} rows, the cache holds {n_rows}")
    return indices.nonzero().flatten()


def whole_cache(method: str) -> ArgumentError:
    """Return the error of a method that all layers have to follow at once."""
    return ArgumentError(f"call {method} on the cache, not on one layer: all layers share their rows")
