"""The cache that `generate` takes in place of a `DynamicCache`, without growing, copying or masking unused slots."""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, Literal

import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    LinearAttentionCacheLayerMixin,
    get_layer_types_and_kwargs,
)

from gpuarena import Arena
from gpuarena.errors import (
    ArgumentError,
    ArgumentTypeError,
    CheckpointError,
    refuse_copy,
)
from gpuarena.kv import KVCheckpoint, KVScope, LayerGroup
from gpuarena.kv.spec import positive
from gpuarena_transformers.budget import Plan, Sizing, given_nbytes, least_of_ranks
from gpuarena_transformers.checkpoints import CacheCheckpoint
from gpuarena_transformers.copying import copy_contents
from gpuarena_transformers.files import load_cache, save_cache
from gpuarena_transformers.indexed import ArenaIndexedLayer
from gpuarena_transformers.layer_types import has_states, holds_tokens, is_foreign, make_layer
from gpuarena_transformers.layers import ArenaLayer, removed, row_numbers
from gpuarena_transformers.layout import measure_layout
from gpuarena_transformers.memory import CacheMemory
from gpuarena_transformers.offload import HostGroup, Offload, resident_layers
from gpuarena_transformers.overflow import CacheStats, Overflow
from gpuarena_transformers.prefix import Branches, Prefix, prefill_prefix
from gpuarena_transformers.sizing import (
    check_asked,
    check_model,
    decoder_config,
    devices_of,
    free_nbytes,
    model_max_length,
)
from gpuarena_transformers.state_group import StateGroup
from gpuarena_transformers.states import ArenaStateLayer
from gpuarena_transformers.transcript import Transcript

__all__ = ["ArenaCache", "StaticLinearKVCache"]

#: Types of models that keep states in their own modules.
_STATES_ELSEWHERE = ("recurrent_gemma",)
#: Tokens that a cache of states alone is made for: it holds nothing of them.
_NO_LIMIT = 2**62


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
    on_full : str
        ``"raise"``, or ``"fallback"``: go on with ordinary tensors that grow, after one `CacheOverflowWarning`, and
        come back to the arena when enough tokens are dropped.
    offload : str, optional
        ``"cpu"``: hold keys and values in host memory, pinned where the model runs on CUDA, and bring those of a layer
        to its device for its attention. Every step moves all that its queries see, so it is for contexts that the
        device has no room for. The device holds two buffers of the size of the largest layer, and states.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        An encoder-decoder config, no way to tell the capacity, or `offload` without a config, with an arena, or
        with ``on_full="fallback"``.

    Notes
    -----
    `generate` tells a cache no length, so a cache that is too small is found out in the step that does not
    fit: it raises `gpuarena.CapacityError` before anything is written, and can be rolled back and used again.

    Convolution and recurrent states and the keys of sparse-attention indexers lie in the arena, too. A
    checkpoint copies the states, since they cannot be cut as keys and values can, and `rollback` brings them back.
    A step that fails or is interrupted leaves more in its first layers than in the others, as with every cache of
    transformers: roll back, truncate, or reset, before you go on.
    Layers that a model registers with a class of its own (DeepSeek-V4, MiniMax-M3) stay what they are and lie
    outside the arena; a cache with such layers makes no checkpoints.

    With `offload`, ``cache.layers[i].keys`` are views of host memory, and what `update` returns is good until the next
    layer is updated. Layers whose keys later layers read (Gemma 4) stay on the device. The prefetch on CUDA has not
    been run on a GPU yet.
    """

    # A `DynamicCache`, because models and `EncoderDecoderCache` test for that where they mean a cache that grows
    # and can be cropped; nothing of it is used.

    #: What an error calls the argument that is the capacity.
    _capacity_name = "max_context_length"

    # A class attribute, because up to transformers 5.17 the base class has a property without a setter.
    max_batch_size: int = 1

    #: Where the bytes of a cache from `for_model` go; None for others.
    sizing: Sizing | None = None
    has_states: bool = False
    """Whether layers hold states, which a checkpoint copies."""
    holds_tokens: bool = True
    """Whether any layer holds something for each token; otherwise (Mamba) the cache never fills up."""

    def __init__(
        self,
        config: Any = None,
        max_batch_size: int = 1,
        max_context_length: int | None = None,
        device: Any = None,
        dtype: Any = None,
        *,
        arena: Arena | None = None,
        on_full: Literal["raise", "fallback"] = "raise",
        offload: Literal["cpu"] | None = None,
    ) -> None:
        _refuse_encoder_decoder(config)
        overflow = Overflow.chosen(on_full)
        Offload.check(offload, config=config, on_full=on_full, arena=arena)
        resident = resident_layers(config) if offload else frozenset()
        if max_context_length is None:
            max_context_length = None if config is None else model_max_length(config)
            if max_context_length is None and config is not None and not holds_tokens(_layer_types(config)):
                max_context_length = _NO_LIMIT
            if max_context_length is None:
                raise ArgumentError(
                    "max_context_length: the config declares no maximum; give the capacity in tokens"
                )
        self.config = config
        self.max_batch_size = positive(max_batch_size, "max_batch_size")
        self.max_context_length = positive(max_context_length, "max_context_length")
        self.group = (HostGroup if offload else LayerGroup)(
            batch=self.max_batch_size,
            max_tokens=self.max_context_length,
            capacity_hint=f" ({self._capacity_name})",
            batch_name="max_batch_size",
        )
        self.on_full = on_full
        self.offload_to = offload  # the base class has a method of the other name
        self.memory = CacheMemory(
            self.group,
            device=device,
            dtype=dtype,
            arena=arena,
            overflow=overflow,
            offload=Offload(self.group, resident) if offload else None,
        )
        self.states = StateGroup(self.group)
        self.transcript = Transcript()
        """The token ids that the cache is known to hold."""
        self._open_prefixes: list[Prefix] = []
        # The model keeps states in its modules: up to some version the config says nothing of them.
        self._is_elsewhere = config is not None and decoder_config(config).model_type in _STATES_ELSEWHERE
        if config is None:
            Cache.__init__(self, layer_class_to_replicate=_LayerMaker(self))
        else:
            Cache.__init__(self, layers=self._layers_of(decoder_config(config)))
            self.memory.layers = self.layers

    def _layers_of(self, config: Any) -> list[Any]:
        layer_types, kwargs = get_layer_types_and_kwargs(config)
        if isinstance(kwargs, dict):  # up to transformers 5.18 all layers shared theirs
            kwargs = [kwargs] * len(layer_types)
        self.has_states = has_states(layer_types)
        self.holds_tokens = self.states.holds_tokens = holds_tokens(layer_types)
        layers = [
            make_layer(self, index, layer_type, options)
            for index, (layer_type, options) in enumerate(zip(layer_types, kwargs, strict=True))
        ]
        self.states.layers = [layer for layer in layers if isinstance(layer, ArenaStateLayer)]
        return layers

    @classmethod
    def for_model(
        cls,
        model: Any,
        max_context_length: int | Literal["auto"] = "auto",
        memory_fraction: float = 0.9,
        *,
        max_batch_size: int = 1,
        on_full: Literal["raise", "fallback"] = "raise",
        offload: Literal["cpu"] | None = None,
        measure_prefill: bool | None = None,
        max_prompt_length: int | None = None,
    ) -> ArenaCache:
        """Return a cache with exact shapes, dtypes and devices, from one forward of a single token.

        `sizing` says afterwards where the bytes go.

        Parameters
        ----------
        model : PreTrainedModel
        max_context_length : int or "auto"
            Capacity in tokens; "auto" is the model's maximum, or what fits beside a prompt if that is less.
        memory_fraction : float
            Share of the free memory that "auto" may take of each device.
        max_batch_size, on_full, offload
            As in the constructor.
        measure_prefill : bool, optional
            Whether to find out what a prompt needs besides the cache, by four forwards of short ones: 32 to 128
            tokens on a CPU, 128 to 512 elsewhere. By default for "auto" only.
        max_prompt_length : int, optional
            The longest prompt that is read at once, for that; by default one that fills the cache.

        Raises
        ------
        OutOfMemoryError
            More than is free; the memory is taken here, not at the first token.
        ArgumentError
            "auto" where not even one token fits, or where a device does not tell what is free.
        """
        check_model(model, cls)
        _refuse_encoder_decoder(model.config)
        is_auto = isinstance(max_context_length, str)
        check_asked(max_context_length, memory_fraction)
        rows, longest = positive(max_batch_size, "max_batch_size"), model_max_length(model.config)
        prompt = None if max_prompt_length is None else positive(max_prompt_length, "max_prompt_length")
        layout = measure_layout(model)
        sample = cls(model.config, rows, 1, on_full=on_full, offload=offload)
        held = [layer for layer, own in enumerate(sample.layers) if not is_foreign(own)]
        resident = None if sample.memory.offload is None else sample.memory.offload.resident
        plan = Plan(layout, held, rows, free_nbytes, devices_of(model), resident=resident)
        if not plan.specs and not plan.states and not plan.offloaded:
            raise ArgumentError(
                f"{type(model).__name__} caches nothing that an arena could hold; use the cache that it makes itself"
            )

        def make(n_tokens: int) -> ArenaCache:
            cache = cls(model.config, rows, n_tokens, on_full=on_full, offload=offload)
            cache.memory.reserve(plan.specs, plan.states, plan.offloaded)
            return cache

        if is_auto if measure_prefill is None else measure_prefill:
            # Before the first prompt: without room for the cache alone it would fill the memory, or fail in the model.
            if isinstance(max_context_length, str):
                most: int | None = plan.most_tokens(memory_fraction, longest)[0]
            else:
                plan.check(positive(max_context_length, "max_context_length"))
                most = longest
            plan.measure_prefill(model, make, longest=most, prefill_tokens=prompt)
        if isinstance(max_context_length, str):
            n_tokens, limit = plan.most_tokens(memory_fraction, longest)
            n_tokens = least_of_ranks(model, n_tokens)
        else:
            n_tokens, limit = positive(max_context_length, "max_context_length"), "as asked"
            plan.check(n_tokens)
        cache = make(n_tokens)
        cache.sizing = plan.sizing(n_tokens, limit)
        return cache

    @classmethod
    def arena_nbytes(
        cls,
        config: Any,
        max_batch_size: int = 1,
        max_context_length: int | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> int:
        """Return the bytes that such a cache takes of an arena at most, so that several can share one.

        >>> from transformers import Qwen2Config
        >>> config = Qwen2Config(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        ...                      num_attention_heads=4, num_key_value_heads=2)
        >>> nbytes = ArenaCache.arena_nbytes(config, 1, 100, dtype=torch.float32)
        >>> arena = Arena(3 * nbytes, backend="torch", device="cpu")
        >>> chats = [ArenaCache(config, 1, 100, arena=arena) for _ in range(3)]

        The model is built without memory and asked for one token, as `size_of_config` does: the sum is that of the
        model, whatever its layers are. Layers of a class of the model's own lie outside the arena and do not count.

        Parameters
        ----------
        config, max_batch_size, max_context_length
            As in the constructor.
        dtype : torch.dtype, optional
            That the model runs in; by default what the config says, or else torch's default.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            As in the constructor; or the model does not run without its data.
        """
        from gpuarena_transformers.from_config import size_of_config  # imports all that transformers has

        if config is None:
            raise ArgumentTypeError("arena_nbytes: config must be that of a model, not None")
        cache = cls(config, max_batch_size, max_context_length)  # takes no memory
        layout = size_of_config(
            config, dtype or getattr(config, "dtype", None) or torch.get_default_dtype()
        ).layout
        held = [number for number, own in enumerate(cache.layers) if not is_foreign(own)]
        held_layers = [layer for layer in layout.layers if layer.index in held]
        return given_nbytes(held_layers, cache.max_batch_size, cache.max_context_length)

    # -- memory -------------------------------------------------------------------------------------------------

    @property
    def arena(self) -> Arena | None:
        """The arena, or the first of them; None before the first token unless it was given or measured."""
        return self.arenas[0] if self.arenas else None

    @property
    def arenas(self) -> list[Arena]:
        """The arenas that hold the cache.

        One, unless the model spans devices, the estimate was too low, or layers hold states or indexers: those are
        of sizes that only a measured model tells beforehand. With `offload` those in host memory come first.
        """
        offload = self.memory.offload
        return self.memory.arenas if offload is None else [*offload.all_arenas, *self.memory.arenas]

    @property
    def stats(self) -> CacheStats:
        """Tokens and bytes that are held and reserved, in the arena and beyond it."""
        stats, offload = CacheStats.of(self.group), self.memory.offload
        return dataclasses.replace(
            stats,
            host_nbytes=0 if offload is None else sum(arena.capacity for arena in offload.arenas),
            staging_nbytes=0 if offload is None else sum(s.arena.capacity for s in offload.stagings.values()),
            reserved_nbytes=stats.reserved_nbytes + self.states.reserved_nbytes,
            used_nbytes=stats.used_nbytes + self.states.used_nbytes,
        )

    # -- lengths ------------------------------------------------------------------------------------------------

    def checkpoint(self) -> CacheCheckpoint:
        """Return the present state, to which `rollback` brings the cache back.

        Keys and values are not copied, states are: `nbytes` of the checkpoint says how much. The time is constant in
        tokens.

        Raises
        ------
        CheckpointError
            A layer holds something outside the arena, or a step failed half-way.
        """
        self._check_restorable()
        return CacheCheckpoint(self.group.checkpoint(), self.states.copy())

    def rollback(self, checkpoint: KVCheckpoint) -> None:
        """Forget everything since `checkpoint`, which stays usable; see `gpuarena.kv.LayerGroup.rollback`.

        States become what they were, bit by bit, also after a step that failed. Where only states are held, every
        checkpoint since the last `reset` can be gone back to, also when rows changed places.

        Raises
        ------
        CheckpointError
            It belongs to another cache, or the tokens it stood for are gone. Unchanged on error.
        """
        has_copy = isinstance(checkpoint, CacheCheckpoint)
        if self.has_states and isinstance(checkpoint, KVCheckpoint) and not has_copy:
            raise ArgumentTypeError("rollback takes a checkpoint of the cache, not one of its group")
        self.states.check_live()
        self.group.rollback(checkpoint)
        if isinstance(checkpoint, CacheCheckpoint):
            self.states.restore(checkpoint.states)
        self.transcript.cut(self.group.length)
        self.transcript.keep_first(self.group.rows)

    def scope(self) -> KVScope:
        """Return a context manager that forgets on exit what came inside; states are copied on entry.

        Prefill a prompt once, then ``with cache.scope(): model.generate(...)`` as often as needed. Inside, a single
        row may be repeated for beams.
        """
        self._check_restorable()
        # Of the cache and not of its group, which knows nothing of states and transcript.
        return KVScope(self)

    def _check_restorable(self) -> None:
        """Raise `CheckpointError` if something could not be brought back."""
        for index, layer in enumerate(self.layers):
            if is_foreign(layer):
                raise CheckpointError(
                    f"layer {index} is a {type(layer).__name__}, whose state lies outside the arena and cannot be "
                    f"rolled back; copy.deepcopy(cache) keeps a copy of it"
                )
        self.states.check_complete()
        if self._is_elsewhere and not self.group.is_empty:
            raise CheckpointError(
                f"{type(self.config).__name__}: the model keeps recurrent states in its own modules, where no cache can "
                f"bring them back; reset() and read the prompt again"
            )

    def truncate(self, n_tokens: int) -> None:
        """Keep the first `n_tokens` tokens of every layer.

        Raises
        ------
        ArgumentError
            Negative, or more than every layer holds; or fewer than now, where recurrent states are held: those
            cannot be cut, `rollback` to a `checkpoint` brings them back. Unchanged on error.
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
            A positive number, or more than there are; or recurrent states, as in `truncate`. Unchanged on error.
        """
        n_removed = removed(tokens_to_remove)
        self._check_one_count()
        length = self.group.length if self.holds_tokens else None  # which nobody counts for states
        if length is not None and n_removed > length:
            raise ArgumentError(f"crop(-{n_removed}): the cache holds only {length} tokens")
        n_left = None if length is None else length - n_removed
        self.states.check_cut(n_removed, n_left)
        if n_removed and n_left and self._is_elsewhere:
            raise ArgumentError(
                f"crop(-{n_removed}): {type(self.config).__name__} keeps recurrent states in its own modules, where no "
                f"cache can cut them; reset() and read the prompt again"
            )
        for layer in self.layers:
            if is_foreign(layer):
                layer.crop(-n_removed)
        if n_left is not None:
            # Also for 0: a step that failed left more in its first layers.
            self.group.truncate(n_left)
        self.states.cut(n_removed, n_left)
        self.transcript.cut(max(0, len(self.transcript) - n_removed) if n_left is None else n_left)

    def _check_one_count(self) -> None:
        """Raise unless all layers count the same tokens; a step that failed left more in the first of them."""
        held = self.group.layers
        for before, layer in pairwise(held):
            if layer.length > before.length:
                raise ArgumentError(
                    f"layer {layer.index} holds {layer.length} tokens and layer {before.index} {before.length}: one of "
                    f"them holds what the others do not count, such as a picture, and they cannot be cut by one number; "
                    f"reset() empties them"
                )

    def reset(self) -> None:
        """Forget everything; the memory stays reserved for the next conversation."""
        self.group.reset()
        self.states.reset()
        self.transcript.clear()
        for index, layer in enumerate(self.layers):
            if is_foreign(layer):
                # Anew, since in transformers 5.17 some go on with old states after their reset().
                self.layers[index] = self._new_layer(index)

    def _new_layer(self, index: int) -> Any:
        """Return an empty layer of the type that the config gives a number."""
        layer_types, kwargs = get_layer_types_and_kwargs(decoder_config(self.config))
        options = kwargs if isinstance(kwargs, dict) else kwargs[index]
        return make_layer(self, index, layer_types[index], options)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return the capacity in tokens; -1 where only states are held, which is never full."""
        return self.max_context_length if self.holds_tokens else -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.20

    # -- rows ---------------------------------------------------------------------------------------------------

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Put row ``beam_idx[i]`` in place of row i, within the memory that is reserved."""
        held = self._rows_to_move()
        self.group.reorder(beam_idx)
        self.transcript.cut(self.group.n_shared)  # what all rows share; to move the rest would wait for a GPU
        self._moved(beam_idx, held, "reorder_cache", beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Put `repeats` copies of each row side by side."""
        held = self._rows_to_move()
        self.group.repeat(repeats)
        self.transcript.repeat(int(repeats))
        rows = [row for row in range(held or 0) for _ in range(int(repeats))]
        self._moved(rows, held, "batch_repeat_interleave", repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only the given rows; a boolean mask of the rows is taken too."""
        held = self._rows_to_move()
        indices = row_numbers(indices, held)
        self.group.select(indices)
        self.transcript.select(torch.as_tensor(indices))
        self._moved(indices, held, "batch_select_indices", indices)

    def _rows_to_move(self) -> int | None:
        self.states.reserve_scratch()
        return self.group.rows

    def _moved(self, rows: Any, held: int | None, method: str, argument: Any) -> None:
        """Do with the other layers what was done with keys and values, of which `held` rows are now `rows`."""
        self.states.gather(rows, held, self.group.rows or 0)
        for layer in self.layers:
            if isinstance(layer, ArenaIndexedLayer):
                layer.move_rows(rows)
            elif is_foreign(layer):
                getattr(layer, method)(argument)

    @property
    def is_linear(self) -> list[bool]:
        """Whether each layer holds states alone; up to transformers 5.22 it would count ours with keys as well."""
        return [
            isinstance(layer, LinearAttentionCacheLayerMixin) and not isinstance(layer, CacheLayerMixin)
            for layer in self.layers
        ]

    # -- prompts that are shared --------------------------------------------------------------------------------

    def prefix(
        self, model: Any, ids_or_text: Any, tokenizer: Any = None, *, chunk_size: int | None = None
    ) -> Prefix:
        """Prefill tokens behind those that are held, and return the prefix, from which answers start without a copy.

        ::

            system = cache.prefix(model, "You answer in one sentence.", tokenizer)
            with system:
                answer = model.generate(**system.inputs(question, tokenizer), cache=cache)

        Parameters
        ----------
        model : PreTrainedModel
        ids_or_text
            A text, several, token ids ``[n]`` or ``[rows, n]``, or what a tokenizer returns.
        tokenizer : optional
            For texts. It adds special tokens only where the cache is empty.
        chunk_size : int, optional
            Tokens a forward; all at once by default.

        Raises
        ------
        CapacityError
            Before the first forward, unless ``on_full="fallback"``.
        ArgumentError
            No tokens; a text without a tokenizer; the ids of tokens that are held are not known, or those at the end
            are a conversation of `generate_from`.
        ArgumentTypeError, ShapeError, CheckpointError
            Unchanged on error, also of the model.
        """
        return prefill_prefix(self, model, ids_or_text, tokenizer, chunk_size=chunk_size)

    def branches(self, n: int) -> Branches:
        """Return a context manager in which the row that is held is `n` rows, for continuations side by side.

        Raises
        ------
        ShapeError
            More than `max_batch_size`; on entry, if not one row is held.
        """
        return Branches(self, n)

    # -- files --------------------------------------------------------------------------------------------------

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        metadata: Mapping[str, str] | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> None:
        """Write what is held to a file of the safetensors format, which `load` reads: keys, values and transcript.

        Only filled tokens and rows in use are written. A file that is there already is replaced when the new one is
        complete. Checkpoints are not saved.

        Parameters
        ----------
        path : str or path
        metadata : mapping of str to str, optional
            Texts to keep in the file; `gpuarena.kv.state.read_state` gives them back.
        progress : callable, optional
            Called with ``(done_nbytes, total_nbytes)``.

        Raises
        ------
        ArgumentError, CheckpointError
            Nothing is held; a layer holds a state that cannot be saved, or a step failed half-way.
        ArgumentTypeError, DTypeError, StaleRegionError, CaptureError, OSError
            Whatever is raised, a file that was there is as before, and no other is left behind.
        """
        save_cache(self, path, metadata, progress)

    def load(
        self, path: str | os.PathLike[str], *, progress: Callable[[int, int], object] | None = None
    ) -> None:
        """Hold what `save` wrote instead of what is held; checkpoints and prefixes die.

        A cache that never held a token takes its memory, on its `device`, that of its arena, or torch's default one.

        Raises
        ------
        StateError
            It is no such file, it is damaged, or of another model; `field`, `found` and `wanted` tell.
        CapacityError, ShapeError
            More tokens than there is room for, unless ``on_full="fallback"``; more rows than `max_batch_size`.
        DTypeError, OutOfMemoryError, BackendError, CaptureError, StaleRegionError, OSError, ArgumentTypeError
            Unchanged on error, unless reading the bytes itself fails: then the cache is empty.
        """
        load_cache(self, path, progress)

    # -- copies -------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> ArenaCache:
        """Return a cache of the same capacity with a copy of the filled part, in an arena of its own."""
        other = type(self)(
            self.config,
            self.max_batch_size,
            self.max_context_length,
            self.memory.device,
            self.memory.dtype,
            on_full=self.on_full,
            offload=self.offload_to,
        )
        if self.memory.overflow is not None and other.memory.overflow is not None:
            other.memory.overflow.is_announced = self.memory.overflow.is_announced
        memo[id(self)] = other
        copy_contents(self, other, memo)
        return other

    def __reduce__(self) -> Any:
        raise refuse_copy(self)

    def __repr__(self) -> str:
        tokens = f"{self.group.length} of {self.max_context_length} tokens, " if self.holds_tokens else ""
        rows = f"{self.group.rows or 0} of {self.max_batch_size} rows"
        return f"ArenaCache({tokens}{rows}, {len(self.layers)} layers)"


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
            f"{type(config).__name__} is an encoder-decoder: its self- and cross-attention need a cache each. Use "
            f"ArenaEncoderDecoderCache, or, for the self-attention alone, "
            f"EncoderDecoderCache(ArenaCache(None, max_batch_size, max_context_length), DynamicCache())"
        )


def _layer_types(config: Any) -> list[str]:
    return list(get_layer_types_and_kwargs(decoder_config(config))[0])


#: The name that this cache had first.
StaticLinearKVCache = ArenaCache
