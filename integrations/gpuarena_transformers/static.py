"""The cache for `torch.compile` and CUDA graphs: every address and shape stays what it is."""

from __future__ import annotations

import copy
from typing import Any, Literal, cast

import torch
from transformers.cache_utils import (
    STATIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
    StaticCache,
    get_layer_types_and_kwargs,
)

from gpuarena import Arena
from gpuarena.errors import ArgumentError, ArgumentTypeError, CheckpointError, refuse_copy
from gpuarena.kv import KVCheckpoint, KVScope, KVSpec, KVStats, LayerGroup, LayerSpec
from gpuarena.kv.spec import positive
from gpuarena_transformers.budget import Plan
from gpuarena_transformers.layer_types import WITHOUT_ATTENTION
from gpuarena_transformers.layers import removed, row_numbers
from gpuarena_transformers.layout import measure_layout
from gpuarena_transformers.memory import CacheMemory
from gpuarena_transformers.sizing import (
    check_asked,
    check_model,
    decoder_config,
    devices_of,
    free_nbytes,
    model_max_length,
)
from gpuarena_transformers.static_layers import (
    STATIC_LAYERS,
    ArenaStaticIndexedLayer,
    ArenaStaticStateLayer,
    Slots,
    States,
    is_capturing,
)
from gpuarena_transformers.transcript import Transcript

__all__ = ["ArenaStaticCache"]


class ArenaStaticCache(StaticCache):  # type: ignore[misc]  # transformers is untyped
    """A cache in one arena whose addresses and shapes stay, for `torch.compile` and CUDA graphs.

    ``model.generate(**inputs, cache=ArenaStaticCache(model.config, 1, 4096, bucket=256))``; up to transformers 5.23
    the argument is called ``past_key_values``. On a GPU `generate` compiles the decoding step by itself.

    Parameters
    ----------
    config : PreTrainedConfig
        Of the model: it says which layers there are. Shapes and dtypes come from the first tensors.
    max_batch_size : int
        Most rows: sequences times beams, or times returned sequences. Fewer may be used, and others after `reset`.
    max_context_length : int, optional
        Capacity in tokens: prompt plus new tokens, plus ``prompt_lookup_num_tokens`` where that is used. By
        default what the config declares as the model's maximum.
    device, dtype : optional
        Only checked: tensors that disagree are refused. Keys may stay in float32, as GPT-J's do.
    arena : Arena, optional
        A torch arena to take the memory from; by default the cache makes its own at the first token.
    bucket : int, optional
        Let attention read the first ``bucket * 2**k`` slots, as few as hold the tokens, and not all of them. Code is
        compiled once for each k that occurs, ``log2(capacity / bucket) + 1`` times at most.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        An encoder-decoder config, layers that transformers has no static cache for, or no way to tell the capacity.

    Notes
    -----
    The capacity is checked on the host before a step begins: by `generate`, which asks for the mask outside of the
    compiled code, and in every step that is not compiled. Code that calls a compiled ``model.forward`` itself calls
    `check_room` before; code that replays a CUDA graph of its own calls `advance`.

    Layers with a window have a slot for every token as well, and the mask hides what is outside: they read as much as
    the others, and can be cropped like them. Recurrent states and the index keys of sparse attention lie outside of the
    arena.
    """

    # A class attribute, because up to transformers 5.17 the base class has a property without a setter.
    max_batch_size: int = 1

    def __init__(
        self,
        config: Any,
        max_batch_size: int = 1,
        max_context_length: int | None = None,
        device: Any = None,
        dtype: Any = None,
        *,
        arena: Arena | None = None,
        bucket: int | None = None,
    ) -> None:
        if not hasattr(config, "get_text_config"):
            raise ArgumentTypeError(f"config must be that of a model, not {type(config).__name__}")
        if getattr(config, "is_encoder_decoder", False):
            raise ArgumentError(
                f"{type(config).__name__} is an encoder-decoder, which ArenaStaticCache does not serve; use "
                f"ArenaEncoderDecoderCache"
            )
        if max_context_length is None:
            max_context_length = model_max_length(config)
            if max_context_length is None:
                raise ArgumentError(
                    "max_context_length: the config declares no maximum; give the capacity in tokens"
                )
        self.config = config
        self.max_batch_size = positive(max_batch_size, "max_batch_size")
        self.max_context_length = positive(max_context_length, "max_context_length")
        self.bucket = None if bucket is None else positive(bucket, "bucket")
        self.group = LayerGroup(
            batch=self.max_batch_size,
            max_tokens=self.max_context_length,
            capacity_hint=" (max_context_length)",
            batch_name="max_batch_size",
        )
        self.memory = CacheMemory(self.group, device=device, dtype=dtype, arena=arena)
        self.transcript = Transcript()
        """The token ids that the cache is known to hold."""
        self._promised = 0  # tokens that check_room has shown slots for
        self.n_slots = self.slots_for(0)
        """Slots that attention reads now."""
        Cache.__init__(self, layers=self._layers_of(decoder_config(config)))
        self.memory.layers = self.layers

    def _layers_of(self, config: Any) -> list[Any]:
        layer_types, kwargs = get_layer_types_and_kwargs(config)
        if isinstance(kwargs, dict):  # up to transformers 5.18 all layers shared theirs
            kwargs = [kwargs] * len(layer_types)
        layers: list[Any] = []
        for index, (layer_type, options) in enumerate(zip(layer_types, kwargs, strict=True)):
            kind = STATIC_LAYER_TYPE_MAPPING.get(layer_type)
            if kind in STATIC_LAYERS:
                layers.append(STATIC_LAYERS[kind](self, index, **options))
            elif kind is LinearAttentionLayer and layer_type not in WITHOUT_ATTENTION:
                layers.append(ArenaStaticStateLayer(self.max_batch_size, **options))
            elif kind is not None and not issubclass(kind, CacheLayerMixin):
                layers.append(kind(max_cache_len=self.max_context_length, **options))
            else:
                raise ArgumentError(
                    f"layer {index} is of type {layer_type!r}, for which there is no static cache; use ArenaCache"
                )
        return layers

    @classmethod
    def for_model(
        cls,
        model: Any,
        max_context_length: int | Literal["auto"] = "auto",
        memory_fraction: float = 0.9,
        *,
        max_batch_size: int = 1,
        bucket: int | None = None,
    ) -> ArenaStaticCache:
        """Return a cache with its memory taken, from one forward of a single token.

        Also the first step, with `max_batch_size` rows, may then be compiled.

        Parameters
        ----------
        model : PreTrainedModel
        max_context_length : int or "auto"
            Capacity in tokens; "auto" is the model's maximum, or what fits if that is less.
        memory_fraction : float
            Share of the free memory that "auto" may take of each device.
        max_batch_size, bucket : int
            As in the constructor.

        Raises
        ------
        OutOfMemoryError
            The memory cannot be reserved; it is taken here, not at the first token.
        """
        check_model(model, cls)
        check_asked(max_context_length, memory_fraction)
        rows, longest = positive(max_batch_size, "max_batch_size"), model_max_length(model.config)
        held = [
            index for index, own in enumerate(cls(model.config, rows, 1).layers) if isinstance(own, Slots)
        ]
        layout = measure_layout(model)
        plan = Plan(layout, held, rows, free_nbytes, devices_of(model))
        specs = {
            layer.index: (layer.spec, layer.device)
            for layer in layout.layers
            if layer.index in plan.held and layer.spec is not None
        }

        def make(n_tokens: int) -> ArenaStaticCache:
            cache = cls(model.config, rows, n_tokens, bucket=bucket)
            cache._take(specs)
            return cache

        if isinstance(max_context_length, str):
            plan.measure_prefill(model, make, longest=longest, prefill_tokens=None)
            return make(plan.most_tokens(memory_fraction, longest)[0])
        plan.check(positive(max_context_length, "max_context_length"))
        return make(max_context_length)

    def _take(self, specs: dict[int, tuple[LayerSpec, torch.device]]) -> None:
        """Take the memory of layers, by number, and show all rows."""
        by_device: dict[torch.device, list[LayerSpec]] = {}
        for spec, device in specs.values():
            by_device.setdefault(device, []).append(spec)
        self.memory.reserve({device: KVSpec(layers) for device, layers in by_device.items()})
        for index, (spec, device) in specs.items():
            if isinstance(self.layers[index], Slots):
                keys, values = (
                    torch.empty(
                        (self.max_batch_size, spec.kv_heads, 0, dim), dtype=dtype.torch, device=device
                    )
                    for dim, dtype in ((spec.key_dim, spec.dtype), (spec.value_dim, spec.value_dtype))
                )
                self.layers[index].lazy_initialization(keys, values)

    # -- memory -------------------------------------------------------------------------------------------------

    @property
    def arena(self) -> Arena | None:
        """The arena, or the first of them; None before the first token unless it was given or measured."""
        return self.arenas[0] if self.arenas else None

    @property
    def arenas(self) -> list[Arena]:
        """The arenas that hold the cache: one, unless the model spans devices or the estimate was too low."""
        return self.memory.arenas

    @property
    def stats(self) -> KVStats:
        """Tokens and bytes that are held and reserved."""
        self._settle()
        return self.group.stats

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return the capacity in tokens."""
        return self.max_context_length

    get_max_cache_shape = get_max_length  # its name before transformers 5.20

    @property
    def _slots(self) -> list[Any]:
        return [layer for layer in self.layers if isinstance(layer, Slots)]

    def _settle(self) -> None:
        """Count what compiled code wrote since the host last looked."""
        for layer in self._slots:
            layer.settle()

    def _apply(self) -> None:
        """Bring the device to what the host has decided."""
        for layer in self._slots:
            layer.apply()

    # -- room ---------------------------------------------------------------------------------------------------

    def slots_for(self, n_tokens: int) -> int:
        """Return how many slots attention reads when the cache holds `n_tokens` tokens.

        The least ``bucket * 2**k`` that holds them and all that `check_room` was asked for, or the capacity.
        """
        if self.bucket is None:
            return self.max_context_length
        n_buckets = -(-max(n_tokens, self._promised) // self.bucket)
        return min(self.bucket << max(n_buckets - 1, 0).bit_length(), self.max_context_length)

    def check_room(self, n_tokens: int = 1) -> None:
        """Make sure that `n_tokens` tokens more can be written, and show as many slots as they need.

        Call it before a compiled ``forward``, with the number of its tokens; or once for all the steps to come.
        Nothing waits for the GPU when there was one compiled step of one token since the last call.

        Raises
        ------
        CapacityError, StaleRegionError
            Unchanged on error.
        """
        n_tokens = positive(n_tokens, "n_tokens", least=0)
        for layer in self._slots:
            self._check_layer(layer, n_tokens)
        self._promised = self._length() + n_tokens
        self._show(self.slots_for(self._promised))

    def advance(self, n_tokens: int = 1) -> int:
        """Count `n_tokens` tokens that the replay of a captured CUDA graph is about to write; return where they begin.

        For ``torch.cuda.graph`` and graphs like it, whose replay the host does not see. A step that is captured shows
        all slots, whatever the bucket.

        Raises
        ------
        CapacityError, StaleRegionError
            Unchanged on error.
        """
        n_tokens = positive(n_tokens, "n_tokens", least=0)
        for layer in self._slots:
            self._check_layer(layer, n_tokens)
        start = self._length()
        for layer in self._slots:
            layer.count(n_tokens)
        return start

    def _length(self) -> int:
        return self.group.length

    def _check_layer(self, layer: Any, n_tokens: int) -> None:
        """Raise unless a layer has room for `n_tokens` more."""
        kv = layer._kv
        if kv is not None:
            layer.settle()
            kv.check_live()
            if kv.length + n_tokens > self.max_context_length:
                raise kv._capacity_error(n_tokens)

    def _prepare_step(self, layer: Any, n_tokens: int) -> int:
        """Get ready for a step of `n_tokens`, and return how many slots it will read; a layer calls this."""
        self._settle()
        self._check_layer(layer, n_tokens)
        if is_capturing(layer.cumulative_length.device):
            return self.max_context_length
        length = 0 if layer._kv is None else layer._kv.length
        n_slots = self.slots_for(length + n_tokens)
        self._show(n_slots)
        return n_slots

    def _show(self, n_slots: int) -> None:
        self.n_slots = n_slots
        for layer in self._slots:
            layer.show(n_slots)

    # -- lengths ------------------------------------------------------------------------------------------------

    def checkpoint(self) -> KVCheckpoint:
        """Return the present state, to which `rollback` brings the cache back.

        Raises
        ------
        CheckpointError
            A layer holds a state that cannot be rolled back, or a step failed half-way.
        """
        self._refuse_states()
        self._settle()
        return self.group.checkpoint()

    def _refuse_states(self) -> None:
        for index, layer in enumerate(self.layers):
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                raise CheckpointError(
                    f"layer {index} is a {type(layer).__name__}, whose state lies outside the arena and cannot be "
                    f"rolled back; copy.deepcopy(cache) keeps a copy of it"
                )

    def rollback(self, checkpoint: KVCheckpoint) -> None:
        """Forget every token since `checkpoint`; see `gpuarena.kv.LayerGroup.rollback`.

        Nothing that is kept is touched. What is forgotten is overwritten with 0, since no mask hides a NaN.
        """
        self._settle()
        self.group.rollback(checkpoint)
        self.transcript.keep_first(self.group.rows)
        self._after_cut()

    def scope(self) -> KVScope:
        """Return a context manager that forgets on exit what was appended inside.

        Prefill a prompt once, then ``with cache.scope(): model.generate(...)`` as often as needed.
        """
        self._refuse_states()
        return KVScope(cast(LayerGroup, self))  # of which it uses these two methods

    def truncate(self, n_tokens: int) -> None:
        """Keep the first `n_tokens` tokens of every layer.

        Raises
        ------
        ArgumentError
            Negative, or more than every layer holds. Unchanged on error.
        """
        self._settle()
        keep, length = positive(n_tokens, "n_tokens", least=0), self.group.length
        if keep > length:
            raise ArgumentError(f"truncate({keep}): the cache holds only {length} tokens")
        self.crop(keep - length)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove ``-tokens_to_remove`` tokens from every layer, or from none.

        Raises
        ------
        ArgumentError
            A positive number, or more than there are; or a layer holds a state that cannot go back. Unchanged on
            error.
        """
        n_removed = removed(tokens_to_remove)
        self._settle()
        length, lengths = self.group.length, self.group._common.lengths
        is_uneven = bool(lengths) and max(lengths) != min(lengths)  # after a step that failed
        if n_removed > length:
            raise ArgumentError(f"crop(-{n_removed}): the cache holds only {length} tokens")
        for layer in self.layers:
            if not (n_removed or is_uneven) or not isinstance(layer, LinearAttentionCacheLayerMixin):
                continue
            if not (layer.is_croppable and layer.record_past):
                raise ArgumentError(f"crop(-{n_removed}): a {type(layer).__name__} cannot go back")
        for layer in self.layers:
            if isinstance(layer, ArenaStaticStateLayer) and layer.record_past:
                layer.crop(-n_removed)
        # Also for 0: a step that failed left more in its first layers.
        self.group.truncate(length - n_removed)
        self._after_cut()

    def reset(self) -> None:
        """Forget everything; addresses stay, and the next step may have another number of rows."""
        self._settle()
        self.group.reset()
        self._after_cut()
        self.transcript.clear()
        for layer in self.layers:
            if isinstance(layer, States):
                layer.reset_states()

    def _after_cut(self) -> None:
        self.transcript.cut(self.group.length)
        self._apply()
        self._promised = 0
        self._show_rows()  # a rollback to before rows were repeated
        self._show(self.slots_for(self.group.length))

    # -- rows ---------------------------------------------------------------------------------------------------

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Put row ``beam_idx[i]`` in place of row i, within the memory that is reserved."""
        self._settle()
        self.group.reorder(beam_idx)
        self.transcript.cut(self.group.n_shared)  # what all rows share; to move the rest would wait for a GPU
        rows = torch.as_tensor(beam_idx)
        for layer in self.layers:
            if isinstance(layer, ArenaStaticIndexedLayer):
                layer.reorder_indexer(rows)
            elif isinstance(layer, LinearAttentionCacheLayerMixin):
                _reorder_states(layer, rows)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Put `repeats` copies of each row side by side.

        Raises
        ------
        ShapeError, ArgumentError
            More rows than the cache was made for, or layers that hold something else than keys and values.
        """
        self._refuse_others("batch_repeat_interleave")
        self._settle()
        self.group.repeat(repeats)
        self.transcript.repeat(int(repeats))
        self._show_rows()

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only the given rows; a boolean mask of the rows is taken too."""
        self._refuse_others("batch_select_indices")
        self._settle()
        indices = row_numbers(indices, self.group.rows)
        self.group.select(indices)
        self.transcript.select(torch.as_tensor(indices))
        self._show_rows()

    def _show_rows(self) -> None:
        if self.group.rows is not None:
            for layer in self._slots:
                if layer._kv is not None:
                    layer.bind(self.group.rows, self.n_slots)

    def _refuse_others(self, method: str) -> None:
        for index, layer in enumerate(self.layers):
            if isinstance(layer, ArenaStaticIndexedLayer | LinearAttentionCacheLayerMixin):
                raise ArgumentError(
                    f"{method}: layer {index} is a {type(layer).__name__}, which keeps more than keys and values"
                )

    # -- copies -------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> ArenaStaticCache:
        """Return a cache of the same capacity with a copy of the filled part, in an arena of its own."""
        self._settle()
        for layer in self._slots:
            if isinstance(layer, ArenaStaticIndexedLayer | LinearAttentionCacheLayerMixin):
                raise refuse_copy(self)
        other = type(self)(
            self.config,
            self.max_batch_size,
            self.max_context_length,
            self.memory.device,
            self.memory.dtype,
            bucket=self.bucket,
        )
        memo[id(self)] = other
        other._take(
            {layer._index: (layer._kv.spec, layer.device) for layer in self._slots if layer._kv is not None}
        )
        for index, layer in enumerate(self.layers):
            if not isinstance(layer, Slots):
                other.layers[index] = copy.deepcopy(layer, memo)
            elif layer._kv is not None and layer.is_initialized:
                other.update(layer._kv.keys, layer._kv.values, index)
        return other

    def __reduce__(self) -> Any:
        raise refuse_copy(self)

    def __repr__(self) -> str:
        return (
            f"ArenaStaticCache({self.group.length} of {self.max_context_length} tokens, {self.group.rows or 0} of "
            f"{self.max_batch_size} rows, {len(self.layers)} layers)"
        )


def _reorder_states(layer: Any, rows: torch.Tensor) -> None:
    """Put the states of row ``rows[i]`` in place of row i; transformers' own method would change their addresses."""
    for states in (layer.conv_states, layer.recurrent_states):
        for tensor in states.values() if isinstance(states, dict) else [states]:
            if tensor is not None:
                tensor.copy_(tensor.index_select(0, rows.to(tensor.device)))
