"""The cache that `generate` takes in place of a `DynamicCache`, without growing, copying or masking unused slots."""

from __future__ import annotations

import copy
import weakref
from typing import Any, Literal

import torch
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    DynamicCache,
    get_layer_types_and_kwargs,
)

from gpuarena import Arena
from gpuarena.errors import (
    ArgumentError,
    CheckpointError,
    ShapeError,
    refuse_copy,
)
from gpuarena.kv import KVCheckpoint, KVScope, KVSpec, KVStats, LayerGroup, LayerSpec
from gpuarena.kv.spec import positive
from gpuarena_transformers.layers import ArenaLayer, removed
from gpuarena_transformers.memory import CacheMemory
from gpuarena_transformers.sizing import (
    decoder_config,
    free_nbytes,
    measure_layers,
    model_max_length,
)
from gpuarena_transformers.transcript import Transcript

__all__ = ["ArenaCache", "StaticLinearKVCache"]


class ArenaCache(DynamicCache):  # type: ignore[misc]  # transformers is untyped
    """A fixed-capacity cache in one arena: ``model.generate(**inputs, cache=ArenaCache(model.config, 1, 4096))``.

    Up to transformers 5.23 the argument is called ``past_key_values``.

    Parameters
    ----------
    config : PreTrainedConfig, optional
        Of the model: it says which layers have a window, and how many there are. Shapes and dtypes come from
        the first tensors.
    max_batch_size : int
        Most rows: sequences times beams, or times returned sequences.
    max_context_length : int, optional
        Capacity in tokens: prompt plus new tokens, plus ``prompt_lookup_num_tokens`` where that is used. By
        default what the config declares as the model's maximum.
    device, dtype : optional
        Only checked: tensors that disagree are refused. Keys may stay in float32, as GPT-J's do.
    arena : Arena, optional
        A torch arena to take the memory from; by default the cache makes its own at the first token.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        An encoder-decoder config, or no way to tell the capacity.

    Notes
    -----
    `generate` tells a cache no length, so a cache that is too small is found out in the step that does not
    fit: it raises `gpuarena.CapacityError` before anything is written, and can be rolled back and used again.

    Layers that hold something else than keys and values a token (recurrent states, sparse-attention
    indices) are transformers' own and lie outside the arena; a cache with such layers makes no checkpoints.
    """

    # A `DynamicCache`, because models and `EncoderDecoderCache` test for that where they mean a cache that grows
    # and can be cropped; nothing of it is used.

    # A class attribute, because up to transformers 5.17 the base class has a property without a setter.
    max_batch_size: int = 1

    def __init__(
        self,
        config: Any = None,
        max_batch_size: int = 1,
        max_context_length: int | None = None,
        device: Any = None,
        dtype: Any = None,
        *,
        arena: Arena | None = None,
    ) -> None:
        _refuse_encoder_decoder(config)
        if max_context_length is None:
            max_context_length = None if config is None else model_max_length(config)
            if max_context_length is None:
                raise ArgumentError(
                    "max_context_length: the config declares no maximum; give the capacity in tokens"
                )
        self.config = config
        self.max_batch_size = positive(max_batch_size, "max_batch_size")
        self.max_context_length = positive(max_context_length, "max_context_length")
        self.group = LayerGroup(
            batch=self.max_batch_size,
            max_tokens=self.max_context_length,
            capacity_hint=" (max_context_length)",
        )
        self.memory = CacheMemory(self.group, device=device, dtype=dtype, arena=arena)
        self.transcript = Transcript()
        """The token ids that the cache is known to hold."""
        if config is None:
            Cache.__init__(self, layer_class_to_replicate=_LayerMaker(self))
        else:
            Cache.__init__(self, layers=self._layers_of(decoder_config(config)))
            self.memory.layers = self.layers

    def _layers_of(self, config: Any) -> list[Any]:
        layer_types, kwargs = get_layer_types_and_kwargs(config)
        if isinstance(kwargs, dict):  # up to transformers 5.18 all layers shared theirs
            kwargs = [kwargs] * len(layer_types)
        layers: list[Any] = []
        for index, (layer_type, options) in enumerate(zip(layer_types, kwargs, strict=True)):
            if layer_type == "full_attention":
                layers.append(ArenaLayer(self, index))
            elif layer_type in ("sliding_attention", "chunked_attention"):
                layers.append(ArenaLayer(self, index, options["sliding_window"]))
            elif layer_type in DYNAMIC_LAYER_TYPE_MAPPING:
                layers.append(DYNAMIC_LAYER_TYPE_MAPPING[layer_type](**options))
            else:
                raise ArgumentError(
                    f"layer {index} is of type {layer_type!r}, which this transformers does not cache"
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
    ) -> ArenaCache:
        """Return a cache with exact shapes, dtypes and devices, from one forward of a single token.

        Parameters
        ----------
        model : PreTrainedModel
        max_context_length : int or "auto"
            Capacity in tokens; "auto" is the model's maximum, or what fits if that is less.
        memory_fraction : float
            Share of the free memory that "auto" may take of each device.
        max_batch_size : int
            As in the constructor.

        Raises
        ------
        OutOfMemoryError
            The memory cannot be reserved; it is taken here, not at the first token.
        """
        _refuse_encoder_decoder(model.config)
        measured = measure_layers(model)
        by_device: dict[torch.device, list[LayerSpec]] = {}
        for spec, device in measured.values():
            by_device.setdefault(device, []).append(spec)
        specs = {device: KVSpec(layers) for device, layers in by_device.items()}
        if isinstance(max_context_length, str):
            if max_context_length != "auto":
                raise ArgumentError(
                    f'max_context_length is a number of tokens or "auto", not {max_context_length!r}'
                )
            if not 0 < memory_fraction <= 1:
                raise ArgumentError(f"memory_fraction must be above 0 and at most 1, not {memory_fraction}")
            lengths = [
                kv.max_tokens(max(1, int(free_nbytes(device) * memory_fraction)), max_batch_size)
                for device, kv in specs.items()
            ]
            longest = model_max_length(model.config)
            n_tokens = min(lengths if longest is None else [*lengths, longest])
            if n_tokens < 1:
                raise ArgumentError("there is no memory free for even one token; give max_context_length")
        else:
            n_tokens = max_context_length
        cache = cls(model.config, max_batch_size, n_tokens)
        cache.memory.reserve(specs)
        return cache

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
        return self.group.stats

    # -- lengths ------------------------------------------------------------------------------------------------

    def checkpoint(self) -> KVCheckpoint:
        """Return the present state, to which `rollback` brings the cache back in constant time.

        Raises
        ------
        CheckpointError
            A layer holds a state that cannot be rolled back, or a step failed half-way.
        """
        for index, layer in enumerate(self.layers):
            if _is_foreign(layer):
                raise CheckpointError(
                    f"layer {index} is a {type(layer).__name__}, whose state lies outside the arena and cannot be "
                    f"rolled back; copy.deepcopy(cache) keeps a copy of it"
                )
        return self.group.checkpoint()

    def rollback(self, checkpoint: KVCheckpoint) -> None:
        """Forget every token since `checkpoint`; see `gpuarena.kv.LayerGroup.rollback`."""
        self.group.rollback(checkpoint)
        self.transcript.cut(self.group.length)

    def scope(self) -> KVScope:
        """Return a context manager that forgets on exit what was appended inside.

        Prefill a prompt once, then ``with cache.scope(): model.generate(...)`` as often as needed.
        """
        self.checkpoint()  # raises for layers that cannot be rolled back
        return self.group.scope()

    def truncate(self, n_tokens: int) -> None:
        """Keep the first `n_tokens` tokens of every layer.

        Raises
        ------
        ArgumentError
            Negative, or more than every layer holds. Unchanged on error.
        """
        keep, length = positive(n_tokens, "n_tokens", least=0), self.group.length
        if keep > length:
            raise ArgumentError(f"truncate({keep}): the cache holds only {length} tokens")
        self.crop(keep - length)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove ``-tokens_to_remove`` tokens from every layer, or from none.

        Raises
        ------
        ArgumentError
            A positive number, or more than there are. Unchanged on error.
        """
        n_removed = removed(tokens_to_remove)
        length = self.group.length
        if n_removed > length:
            raise ArgumentError(f"crop(-{n_removed}): the cache holds only {length} tokens")
        for layer in self.layers:
            if not isinstance(layer, ArenaLayer):
                layer.crop(-n_removed)
        # Also for 0: a step that failed left more in its first layers.
        self.group.truncate(length - n_removed)
        self.transcript.cut(length - n_removed)

    def reset(self) -> None:
        """Forget everything; the memory stays reserved for the next conversation."""
        self.group.reset()
        self.transcript.clear()
        for layer in self.layers:
            if not isinstance(layer, ArenaLayer):
                layer.reset()

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return the capacity in tokens."""
        return self.max_context_length

    get_max_cache_shape = get_max_length  # its name before transformers 5.20

    # -- rows ---------------------------------------------------------------------------------------------------

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Put row ``beam_idx[i]`` in place of row i, within the memory that is reserved."""
        self.group.reorder(beam_idx)
        self.transcript.cut(self.group.n_shared)  # what all rows share; to move the rest would wait for a GPU
        self._foreign("reorder_cache", beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Put `repeats` copies of each row side by side."""
        self.group.repeat(repeats)
        self.transcript.repeat(int(repeats))
        self._foreign("batch_repeat_interleave", repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only the given rows; a boolean mask of the rows is taken too."""
        if isinstance(indices, torch.Tensor) and indices.dtype == torch.bool:
            n_rows = self.group.rows
            if n_rows is not None and tuple(indices.shape) != (n_rows,):
                raise ShapeError(f"a mask of {list(indices.shape)} rows, the cache holds {n_rows}")
            indices = indices.nonzero().flatten()
        self.group.select(indices)
        self.transcript.select(torch.as_tensor(indices))
        self._foreign("batch_select_indices", indices)

    def _foreign(self, method: str, argument: Any) -> None:
        for layer in self.layers:
            if _is_foreign(layer):
                getattr(layer, method)(argument)

    # -- copies -------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> ArenaCache:
        """Return a cache of the same capacity with a copy of the filled part, in an arena of its own."""
        other = type(self)(
            self.config, self.max_batch_size, self.max_context_length, self.memory.device, self.memory.dtype
        )
        memo[id(self)] = other
        by_device: dict[torch.device, list[LayerSpec]] = {}
        for held in self.group.layers:
            by_device.setdefault(torch.device(held.arena.device), []).append(held.spec)
        other.memory.reserve({device: KVSpec(specs) for device, specs in by_device.items()})
        with torch.no_grad():
            for index, layer in enumerate(self.layers):
                if not isinstance(layer, ArenaLayer):
                    other.layers[index] = copy.deepcopy(layer, memo)
                elif layer.is_initialized:
                    other.update(layer.keys, layer.values, index)
        return other

    def __reduce__(self) -> Any:
        raise refuse_copy(self)

    def __repr__(self) -> str:
        return (
            f"ArenaCache({self.group.length} of {self.max_context_length} tokens, {self.group.rows or 0} of "
            f"{self.max_batch_size} rows, {len(self.layers)} layers)"
        )


class _LayerMaker:
    """What adds the layers of a cache without a config, and keeps no cycle with it."""

    def __init__(self, cache: ArenaCache) -> None:
        self._cache = weakref.ref(cache)

    def __call__(self) -> ArenaLayer:
        cache = self._cache()
        assert cache is not None, "only the cache itself calls this"
        return ArenaLayer(cache, len(cache.layers))


def _refuse_encoder_decoder(config: Any) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise ArgumentError(
            f"{type(config).__name__} is an encoder-decoder: its self- and cross-attention need a cache each, "
            f"EncoderDecoderCache(ArenaCache(None, max_batch_size, max_context_length), DynamicCache())"
        )


def _is_foreign(layer: Any) -> bool:
    """Return whether a layer keeps a state outside the arena; those that read another layer's cache keep none."""
    return not isinstance(layer, ArenaLayer) and type(layer).__name__ != "DummyLayer"


#: The name that this cache had first.
StaticLinearKVCache = ArenaCache
