"""Both caches of an encoder-decoder in one arena: what its decoder generates, and what it reads of the source."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from transformers import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from gpuarena import Arena
from gpuarena.errors import ArgumentError, ArgumentTypeError, CheckpointError, refuse_copy
from gpuarena.kv import KVCheckpoint, KVScope, KVSpec, KVStats, LayerSpec
from gpuarena.kv.spec import positive
from gpuarena_transformers.cache import ArenaCache
from gpuarena_transformers.layers import ArenaLayer
from gpuarena_transformers.sizing import (
    cache_argument,
    check_asked,
    check_model,
    decoder_config,
    evaluating,
    free_nbytes,
    model_max_length,
)

__all__ = ["ArenaEncoderDecoderCache", "CrossAttentionCache", "EncoderDecoderCheckpoint"]

#: Layers and devices of one cache: by device, what its layers hold.
Specs = dict[torch.device, list[LayerSpec]]


@dataclass(frozen=True, slots=True)
class EncoderDecoderCheckpoint:
    """A state of both caches, made by `ArenaEncoderDecoderCache.checkpoint`."""

    self_attention: KVCheckpoint
    cross_attention: KVCheckpoint

    @property
    def n_tokens(self) -> int:
        """Tokens that the decoder had."""
        return self.self_attention.n_tokens

    def __reduce__(self) -> Any:
        raise refuse_copy(self)


class CrossAttentionCache(ArenaCache):
    """Keys and values of the source, which all tokens of it see: no layer has a window, whatever the config says."""

    _capacity_name = "max_source_length"

    def __init__(self, config: Any, *args: Any, offloading: bool = False, **kwargs: Any) -> None:
        # T5Gemma's `generate` makes another of the same type, with this argument; see `cross_attention_cache` below.
        super().__init__(config, *args, **kwargs)

    def _layers_of(self, config: Any) -> list[Any]:
        return [ArenaLayer(self, index) for index in range(config.num_hidden_layers)]


class ArenaEncoderDecoderCache(EncoderDecoderCache):  # type: ignore[misc]  # transformers is untyped
    """The cache of an encoder-decoder, of a fixed capacity: T5, BART, Whisper and the like.

    ::

        cache = ArenaEncoderDecoderCache(model.config, 1, max_context_length=128, max_source_length=512)
        model.generate(**inputs, cache=cache)
        cache.reset()  # before another source
        model.generate(**others, cache=cache)

    Up to transformers 5.23 the argument is called ``past_key_values``.

    Parameters
    ----------
    config : PreTrainedConfig
        Of the model.
    max_batch_size : int
        Most rows: sources times beams, or times returned sequences.
    max_context_length : int, optional
        Most tokens of the decoder: the start token and what is generated. By default what the config declares.
    max_source_length : int, optional
        Most positions that the encoder gives: tokens of the source, or half of the frames for Whisper. By default
        what the config declares.
    device, dtype : optional
        Only checked, as in `ArenaCache`.
    arena : Arena, optional
        A torch arena to take the memory from.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        The model has no encoder to look at, or a length is neither given nor declared.

    Notes
    -----
    The decoder reads the source once, at its first token, and later steps reuse those keys and values without
    looking at the source again. A cache that holds another source therefore gives wrong answers and no error:
    `reset` it, or roll back to a checkpoint of before, whenever the source changes.
    """

    self_attention_cache: ArenaCache
    """What the decoder has generated."""

    def __init__(
        self,
        config: Any,
        max_batch_size: int = 1,
        max_context_length: int | None = None,
        max_source_length: int | None = None,
        device: Any = None,
        dtype: Any = None,
        *,
        arena: Arena | None = None,
    ) -> None:
        if not any(getattr(config, name, False) for name in _HAS_ENCODER):
            raise ArgumentError(f"{type(config).__name__} is no config of an encoder-decoder; use ArenaCache")
        if max_context_length is None:
            max_context_length = _declared(decoder_config(config), _TARGET_NAMES)
        if max_source_length is None:
            max_source_length = _declared(_encoder_config(config), _SOURCE_NAMES)
        for name, length in (
            ("max_context_length", max_context_length),
            ("max_source_length", max_source_length),
        ):
            if length is None:
                raise ArgumentError(f"{name}: the config declares no maximum; give the capacity in tokens")
            positive(length, name)
        decoder = _decoder_alone(config)
        own = ArenaCache(decoder, max_batch_size, max_context_length, device, dtype, arena=arena)
        cross = CrossAttentionCache(decoder, max_batch_size, max_source_length, device, dtype, arena=arena)
        own.memory.beside, cross.memory.beside = cross.memory, own.memory
        cross.memory.arenas = own.memory.arenas
        super().__init__(own, cross)
        self.config = config

    @classmethod
    def for_model(
        cls,
        model: Any,
        max_context_length: int | Literal["auto"] = "auto",
        memory_fraction: float = 0.9,
        *,
        max_source_length: int | None = None,
        max_batch_size: int = 1,
    ) -> ArenaEncoderDecoderCache:
        """Return a cache with exact shapes, dtypes and devices, from one step of the decoder.

        The step sees a source of a single position, all zeros, in place of what the encoder would give.

        Parameters
        ----------
        model : PreTrainedModel
        max_context_length : int or "auto"
            Capacity in tokens; "auto" is the decoder's maximum, or what fits beside the source if that is less.
        memory_fraction : float
            Share of the free memory that "auto" may take of each device.
        max_source_length, max_batch_size : int
            As in the constructor.

        Raises
        ------
        ArgumentError
            As in the constructor; or the decoder does not take the place of an encoder's output.
        OutOfMemoryError
            The memory cannot be reserved; it is taken here, not at the first token.
        """
        check_model(model, cls)
        check_asked(max_context_length, memory_fraction)
        # Checks the rest, and finds the length of the source; it takes no memory.
        n_tokens = 1 if isinstance(max_context_length, str) else max_context_length
        sample = cls(model.config, max_batch_size, n_tokens, max_source_length)
        n_source = sample.max_source_length
        own, cross = _measure(model)
        if isinstance(max_context_length, str):
            lengths = []
            for device, specs in own.items():
                free = int(free_nbytes(device) * memory_fraction)
                if device in cross:
                    free -= KVSpec(cross[device]).arena_nbytes(max_batch_size, n_source)
                lengths.append(KVSpec(specs).max_tokens(free, max_batch_size) if free > 0 else 0)
            longest = _declared(decoder_config(model.config), _TARGET_NAMES)
            n_tokens = min(lengths if longest is None else [*lengths, longest])
            if n_tokens < 1:
                raise ArgumentError(
                    f"there is no memory free for even one token beside a source of {n_source}; give lengths"
                )
        cache = cls(model.config, max_batch_size, n_tokens, n_source)
        cache._reserve(own, cross)
        return cache

    def _reserve(self, own: Specs, cross: Specs) -> None:
        """Take the memory for layers that are known, in one arena for each device."""
        both = ((self.self_attention_cache, own), (self.cross_attention_cache, cross))
        for device in dict.fromkeys([*own, *cross]):
            here = [(cache.group, KVSpec(specs[device])) for cache, specs in both if device in specs]
            arena = self.self_attention_cache.memory._new_arena(
                sum(spec.arena_nbytes(group.batch, group.max_tokens) for group, spec in here), device
            )
            for group, spec in here:
                group.reserve_scratch(arena, spec.scratch_nbytes(group.batch, group.max_tokens))

    # -- the two caches -----------------------------------------------------------------------------------------

    @property
    def cross_attention_cache(self) -> CrossAttentionCache:
        """What the decoder has read of the source."""
        return self._cross_attention_cache

    @cross_attention_cache.setter
    def cross_attention_cache(self, cache: CrossAttentionCache) -> None:
        if not isinstance(cache, CrossAttentionCache):
            raise ArgumentTypeError(
                f"the cross-attention cache of an ArenaEncoderDecoderCache is part of it, and cannot be replaced by a "
                f"{type(cache).__name__}"
            )
        # T5Gemma's `generate` puts an empty one in place of one whose layers may have windows. Ours have none, and
        # the empty one would have its memory elsewhere.
        if "_cross_attention_cache" not in vars(self):
            self._cross_attention_cache = cache

    @property
    def max_batch_size(self) -> int:
        """Most rows."""
        return self.self_attention_cache.max_batch_size

    @property
    def max_context_length(self) -> int:
        """Most tokens of the decoder."""
        return self.self_attention_cache.max_context_length

    @property
    def max_source_length(self) -> int:
        """Most positions of the source."""
        return self.cross_attention_cache.max_context_length

    @property
    def arena(self) -> Arena | None:
        """The arena, or the first of them; None before the first token unless it was given or measured."""
        return self.self_attention_cache.arena

    @property
    def arenas(self) -> list[Arena]:
        """The arenas that hold both caches: one, unless the model spans devices or the estimate was too low."""
        return self.self_attention_cache.arenas

    @property
    def stats(self) -> KVStats:
        """Tokens of the decoder, and the bytes of both caches; each cache has its own ``stats`` too."""
        own, cross = self.self_attention_cache.stats, self.cross_attention_cache.stats
        names = ("reserved_nbytes", "used_nbytes", "scratch_nbytes")
        return replace(own, **{name: getattr(own, name) + getattr(cross, name) for name in names})

    # -- lengths ------------------------------------------------------------------------------------------------

    def checkpoint(self) -> EncoderDecoderCheckpoint:
        """Return the present state, to which `rollback` brings both caches back in constant time.

        Taken after the first token, it keeps the source: the same source can be answered again. Taken before, a
        rollback to it forgets the source too.

        Raises
        ------
        CheckpointError
            A step failed half-way.
        """
        return EncoderDecoderCheckpoint(
            self.self_attention_cache.checkpoint(), self.cross_attention_cache.checkpoint()
        )

    def rollback(self, checkpoint: EncoderDecoderCheckpoint) -> None:
        """Forget every token since `checkpoint`, and the source if it was read since.

        Raises
        ------
        ArgumentTypeError, CheckpointError
            As `gpuarena.kv.LayerGroup.rollback`. Unchanged on error.
        """
        if not isinstance(checkpoint, EncoderDecoderCheckpoint):
            raise ArgumentTypeError(
                f"rollback takes an EncoderDecoderCheckpoint, not {type(checkpoint).__name__}"
            )
        source = checkpoint.cross_attention
        group = self.cross_attention_cache.group
        # As the rollback below would, but before the tokens are gone.
        if source._group is group and not group.is_live(source):
            raise CheckpointError(
                f"the checkpoint at {checkpoint.n_tokens} tokens is dead: the source of {source.n_tokens} positions "
                f"that the cache then held is gone, by a reset or because its rows changed places"
            )
        self.self_attention_cache.rollback(checkpoint.self_attention)
        self.cross_attention_cache.rollback(source)
        for index in self.is_updated:
            self.is_updated[index] = self.cross_attention_cache.get_seq_length(index) > 0

    def scope(self) -> KVScope:
        """Return a context manager that rolls both caches back on exit, also when an exception passes."""
        return KVScope(self)  # which has what a scope asks of a group

    def truncate(self, n_tokens: int) -> None:
        """Keep the first `n_tokens` tokens of the decoder, and the source.

        Raises
        ------
        ArgumentError
            Negative, or more than every layer holds. Unchanged on error.
        """
        self.self_attention_cache.truncate(n_tokens)

    # -- copies -------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> ArenaEncoderDecoderCache:
        """Return a cache of the same capacity with a copy of the filled parts, in an arena of its own."""
        pair = self.self_attention_cache, self.cross_attention_cache
        memory = pair[0].memory
        other = type(self)(
            self.config,
            self.max_batch_size,
            self.max_context_length,
            self.max_source_length,
            memory.device,
            memory.dtype,
        )
        memo[id(self)] = other
        by_device: tuple[Specs, Specs] = {}, {}
        for cache, specs in zip(pair, by_device, strict=True):
            for held in cache.group.layers:
                specs.setdefault(torch.device(held.arena.device), []).append(held.spec)
        other._reserve(*by_device)
        with torch.no_grad():
            for cache, copied in zip(
                pair, (other.self_attention_cache, other.cross_attention_cache), strict=True
            ):
                for index, layer in enumerate(cache.layers):
                    if layer.is_initialized:
                        copied.update(layer.keys, layer.values, index)
        other.is_updated = dict(self.is_updated)
        return other

    def __reduce__(self) -> Any:
        raise refuse_copy(self)

    def __repr__(self) -> str:
        own, cross = self.self_attention_cache, self.cross_attention_cache
        return (
            f"ArenaEncoderDecoderCache({own.group.length} of {own.max_context_length} tokens, a source of "
            f"{cross.group.length} of {cross.max_context_length}, {own.group.rows or 0} of {own.max_batch_size} rows, "
            f"{len(own.layers)} layers)"
        )


#: What the configs of decoders that look at an encoder set.
_HAS_ENCODER = ("is_encoder_decoder", "add_cross_attention", "is_decoder")
#: What configs call the longest target and the longest source, where they do not share a name.
_TARGET_NAMES = ("max_target_positions", "max_decoder_position_embeddings")
_SOURCE_NAMES = ("max_source_positions", "max_encoder_position_embeddings")


def _declared(config: Any, names: tuple[str, ...]) -> int | None:
    for name in names:
        length = getattr(config, name, None)
        if isinstance(length, int) and length > 0:
            return length
    return model_max_length(config)


def _encoder_config(config: Any) -> Any:
    encoder = getattr(config, "encoder", None)  # a config of its own, as in T5Gemma
    return encoder if hasattr(encoder, "get_text_config") else config


def _decoder_alone(config: Any) -> Any:
    """Return a copy of the decoder's config that passes for that of a decoder alone."""
    decoder = copy.deepcopy(decoder_config(config))
    n_layers = getattr(decoder, "num_decoder_layers", None)
    if n_layers:  # as T5 calls them, whose num_hidden_layers are those of the encoder
        decoder.num_hidden_layers = n_layers
    decoder.is_encoder_decoder = False
    return decoder


def _measure(model: Any) -> tuple[Specs, Specs]:
    """Return what the self- and the cross-attention layers of a model hold."""
    encoder = model.get_encoder()
    width = encoder.config.get_text_config().hidden_size
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    with evaluating(model), torch.no_grad():
        source = torch.zeros((1, 1, width), dtype=model.dtype, device=model.device)
        model(
            encoder_outputs=BaseModelOutput(last_hidden_state=source),
            decoder_input_ids=torch.zeros((1, 1), dtype=torch.long, device=model.device),
            use_cache=True,
            **{cache_argument(): cache},
        )
    measured: tuple[Specs, Specs] = {}, {}
    for part, specs in zip((cache.self_attention_cache, cache.cross_attention_cache), measured, strict=True):
        for layer in part.layers:
            keys, values = layer.keys, layer.values
            specs.setdefault(keys.device, []).append(
                LayerSpec(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, value_dtype=values.dtype)
            )
    if not all(measured):
        raise ArgumentError(f"{type(model).__name__} does not cache what its decoder reads of the encoder")
    return measured
