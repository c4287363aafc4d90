"""A view of a model whose `generate` works on a given cache, and goes on where the cache stops."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.cache_utils import LinearAttentionCacheLayerMixin
from transformers.generation.utils import GenerationMixin

from gpuarena.errors import ArgumentError
from gpuarena_transformers.capacity import check_fits, n_drafted_beyond
from gpuarena_transformers.layer_types import is_foreign
from gpuarena_transformers.prefix import check_open
from gpuarena_transformers.sizing import cache_argument, decoder_config

__all__ = ["Call", "reason_against"]

_CACHE = cache_argument()

#: What `generate` hands its decoding loops besides what the model reads.
_OF_THE_LOOP = frozenset(
    {
        "assistant_model", "assistant_tokenizer", "generation_config", "inputs_tensor", "logits_processor",
        "stopping_criteria", "streamer", "synced_gpus", "tokenizer",
    }
)  # fmt: skip
#: What the model reads without another meaning being given to the ids.
_HARMLESS = frozenset({_CACHE, "attention_mask", "logits_to_keep", "position_ids", "use_cache"})

#: Models that go on from a state with several tokens at once, by their type, on transformers 5.17 to 5.24: read and tried
#: one by one, by `test_a_chat_that_only_grows_goes_on_from_its_states`. Others take a state that is there for empty and
#: say nothing: Bamba, Jamba, Zamba, Mamba, FalconMamba, Mamba 2 on 5.17; or keep theirs in the model: RecurrentGemma.
GOES_ON_FROM_STATES = frozenset(
    {
        "falcon_h1", "granitemoehybrid", "lfm2", "lfm2_moe", "nemotron_h", "qwen3_5_text", "qwen3_next", "zamba2",
    }
)  # fmt: skip


class Call:
    """One call of `generate` on a cache.

    `generate` is run on a view of the model: an object that shares everything with it but the methods below. So
    the model itself is not changed, not even for the time of the call, and other threads see nothing of it.

    Parameters
    ----------
    model : PreTrainedModel
    cache_for : callable
        Returns the cache for that many rows, or None, where the call is to go without.
    allows_foreign : bool
        Let code that is loaded from the hub generate with the model itself, instead of raising.
    assistant_cache : ArenaCache, optional
        What the draft model of assisted decoding works on; it starts over in each call.
    """

    def __init__(
        self,
        model: Any,
        cache_for: Callable[[int], Any],
        *,
        has_positions: bool,
        allows_foreign: bool = False,
        assistant_cache: Any = None,
    ) -> None:
        self.model = model
        self.assistant_cache = assistant_cache
        self.cache: Any = None
        """The cache that the call works on; None before that is known, and if it goes without."""
        self.allows_foreign = allows_foreign
        self._cache_for = cache_for
        self._has_positions = has_positions
        self._max_cached = 0  # tokens that the cache needs, drafts aside
        self._prompt: torch.Tensor | None = None  # [rows, n], while the decoding loop runs
        self._ids: torch.Tensor | None = None  # [rows, n...]: the first of them are what the cache holds
        self._mask: torch.Tensor | None = None
        self._is_first = False  # the next forward is the first of the loop
        self._is_watched = False  # the tokens of the cache are the ids
        self._is_disturbed = False  # somebody else changed the cache while the loop ran

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Return what ``model.generate(*args, **kwargs)`` would."""
        view_class: Any = _view_class(self.model.__class__)
        view = view_class.__new__(view_class)
        # Not attributes of the module: `_call` is a slot, and the dictionary is the model's own.
        object.__setattr__(view, "__dict__", self.model.__dict__)
        object.__setattr__(view, "_call", self)
        return view_class.generate(view, *args, **kwargs)

    def take_cache(
        self, generation_config: Any, model_kwargs: dict[str, Any], n_rows: int, n_cached: int
    ) -> None:
        """Put the cache among what the model gets."""
        self.cache = self._cache_for(n_rows) if self._may_cache(generation_config) else None
        if self.cache is not None:
            self._max_cached = n_cached
            model_kwargs[_CACHE] = self.cache

    def _may_cache(self, generation_config: Any) -> bool:
        for name, wanted in (("use_cache", True), ("cache_implementation", None)):
            found = getattr(generation_config, name, wanted)
            if found != wanted and not self.allows_foreign:
                raise ArgumentError(
                    f"{name}={found!r} in the generation config leaves no place for the cache"
                )
            if found != wanted:
                return False
        return True

    @contextmanager
    def decoding(
        self, view: Any, ids: torch.Tensor, kwargs: dict[str, Any], *, has_beams: bool = False
    ) -> Iterator[None]:
        """Prepare the cache for the loop that decodes ``ids [rows, n]``, and note afterwards what it holds."""
        cache, config = self.cache, kwargs["generation_config"]
        if cache is None:
            yield
            return
        drafting = {
            name: kwargs.get(name) for name in ("assistant_model", "tokenizer", "assistant_tokenizer")
        }
        beyond = n_drafted_beyond(config, config.max_length, ids.shape[1], self.model.config, **drafting)
        n_tokens = self._max_cached + beyond
        check_fits(cache, n_tokens, ids.shape[0])
        if self.assistant_cache is not None:
            check_fits(self.assistant_cache, self._max_cached, ids.shape[0])
        transcript = getattr(cache, "transcript", None)
        is_known = (
            transcript is not None and self._says_all(ids, kwargs) and n_tokens <= _rope_limit(self.model)
        )
        mask = kwargs.get("attention_mask")
        if not (is_known and self._keep_common_prefix(ids, mask)):
            n_same = cache.transcript.match(ids, mask)[0] if is_known else None
            check_open(cache, 0, n_same, ids.shape[1])
            cache.reset()
        if transcript is not None:
            transcript.bind(self.model)
        n_held = _n_held(cache)
        self._is_watched = (
            is_known
            and getattr(cache, "holds_tokens", True)
            and not any(is_foreign(layer) for layer in cache.layers)
        )
        self._prompt = self._ids = ids
        is_over = False
        try:
            if n_held and config.prefill_chunk_size is not None:
                self._prefill_body(view, ids, kwargs, n_held)
            self._is_first = n_held > 0
            yield
            is_over = True
        finally:
            # Beams change places, so that only what all of a prompt have in common is certain.
            known = ids if has_beams else self._ids
            self._prompt = self._ids = None
            self._is_first = False
            if not is_over:
                self._even_out()
            if self._is_disturbed:
                cache.reset()
            if transcript is not None:
                transcript.bind(self.model)  # again, since some models change buffers in their first forward
            if is_known:
                _note(cache, known, mask)
                marks = _marks_of_states(cache)
                if marks is not None:
                    _marks[cache] = marks

    def _says_all(self, ids: torch.Tensor, kwargs: dict[str, Any]) -> bool:
        """Return whether keys and values follow from ids and mask alone, and no other output of the prompt is wanted."""
        if self._has_positions or self.model.config.is_encoder_decoder or ids.shape[1] == 0:
            return False
        mask = kwargs.get("attention_mask")
        if mask is not None and not bool(((mask == 0) | (mask == 1)).all()):
            return False  # positions are sums of it
        others = kwargs.keys() - _OF_THE_LOOP - _HARMLESS
        return all(kwargs[name] is None or kwargs[name] is False for name in others)

    def _keep_common_prefix(self, ids: torch.Tensor, mask: torch.Tensor | None) -> bool:
        """Cut the cache to what it has in common with ``ids``, in rows like those; return whether anything is left."""
        cache = self.cache
        if not cache.transcript.is_of(self.model):
            return False
        n_held, (n_common, rows) = _n_held(cache), cache.transcript.match(ids, mask)
        n_common = min(n_common, n_held, ids.shape[1] - 1)  # the last one is run for its logits
        if n_common < 1:
            return False
        n_held_rows = cache.transcript.ids.shape[0]
        if (
            self._has_states()
            and not (
                self.model.config.model_type in GOES_ON_FROM_STATES
                and n_common == n_held
                and _marks.get(cache, ()) == _marks_of_states(cache)
                and rows == list(range(n_held_rows))
                # A state would take padding for a token.
                and (mask is None or bool((mask[:, n_common:] != 0).all()))
            )
        ):
            return False
        if rows != list(range(n_held_rows)) and not hasattr(cache, "batch_select_indices"):
            return False
        selects = rows != list(range(n_held_rows)) and not (n_held_rows == 1 and len(rows) > 1)
        n_kept = min(n_common, cache.group.n_shared) if selects and hasattr(cache, "group") else n_common
        check_open(cache, n_kept, n_common, ids.shape[1])
        try:
            cache.truncate(n_common)
        except ArgumentError:  # a step failed half-way, and states cannot be cut to where it began
            return False
        if n_held_rows == 1 and len(rows) > 1:
            cache.batch_repeat_interleave(len(rows))
        elif rows != list(range(n_held_rows)):
            cache.batch_select_indices(torch.tensor(rows))
        return True

    def _prefill_body(self, view: Any, ids: torch.Tensor, kwargs: dict[str, Any], n_held: int) -> None:
        """Run all but the last chunk of what is new, since transformers 5.17 takes chunks from the first token on."""
        config = kwargs["generation_config"]  # the call's own
        chunk_size, config.prefill_chunk_size = config.prefill_chunk_size, None
        given = {name: kwargs[name] for name in _HARMLESS & kwargs.keys()}
        for start in range(n_held, ids.shape[1] - chunk_size, chunk_size):
            end = start + chunk_size
            for name in ("attention_mask", "position_ids"):
                if kwargs.get(name) is not None:
                    given[name] = kwargs[name][..., :end]
            inputs = view.prepare_inputs_for_generation(
                ids[:, :end], next_sequence_length=chunk_size, is_first_iteration=True, **given
            )
            self.model(**inputs, return_dict=True)

    def before_forward(self, ids: torch.Tensor, n_new: int | None) -> int | None:
        """Note the ids that the next forward is about, and return how many of them are new to the cache."""
        if self._prompt is None:
            return n_new
        if ids.shape[1] >= self._prompt.shape[1]:  # and no chunk of it
            self._ids = ids
        if self._is_first:  # assisted decoding would run the whole prompt again, and append it
            self._is_first = False
            return ids.shape[1] - _n_held(self.cache)
        if self._is_watched and n_new is not None and _n_held(self.cache) + n_new != ids.shape[1]:
            self._is_disturbed = True
        return n_new

    def _has_states(self) -> bool:
        """Return whether a layer holds a state, which cannot be cut; some models keep theirs outside of the cache."""
        layers = getattr(self.cache, "layers", ())
        return getattr(self.model, "_is_stateful", False) or any(
            isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers
        )

    def start_over(self) -> None:
        """Forget what was kept of the cache."""
        if self.cache is not None:
            self.cache.reset()
            self._is_first = False

    def _even_out(self) -> None:
        """Bring the cache to a state that can be gone on with, after a step that failed half-way."""
        if self._has_states() or not hasattr(self.cache, "transcript"):
            self.cache.reset()
        else:
            self.cache.truncate(_n_held(self.cache))  # the first layers may have got more than the others


#: What `super()` of the hooks is: the class of the model comes behind them.
_Object: Any = object


class _Hooks(_Object):  # type: ignore[misc]  # any model
    """What the view of a model does in its own way."""

    __slots__ = ()
    _call: Call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call.model(*args, **kwargs)

    def get_compiled_call(self, *args: Any, **kwargs: Any) -> Any:
        return self._call.model.get_compiled_call(*args, **kwargs)

    def load_custom_generate(self, *args: Any, **kwargs: Any) -> Any:
        call = self._call
        if not call.allows_foreign:
            raise ArgumentError(
                "this way of generating is code from the hub, which treats caches in its own way; call "
                f"cache.reset() and model.generate(..., {_CACHE}=cache)"
            )
        foreign = call.model.load_custom_generate(*args, **kwargs)
        return lambda **arguments: foreign(**arguments | {"model": call.model})

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: Any, generation_mode: Any, batch_size: int, n_cached: int
    ) -> Any:
        n_rows = batch_size * max(
            generation_config.num_beams or 1, generation_config.num_return_sequences or 1
        )
        self._call.take_cache(generation_config, model_kwargs, n_rows, n_cached)
        return super()._prepare_cache_for_generation(
            generation_config, model_kwargs, generation_mode, batch_size, n_cached
        )

    def _get_candidate_generator(self, *args: Any, **kwargs: Any) -> Any:
        # Of the model and not of the view, which would draft with our cache where a model drafts for itself.
        generator = self._call.model._get_candidate_generator(*args, **kwargs)
        if generator.requires_model_outputs:  # hidden states of the whole prompt
            self._call.start_over()
        if self._call.assistant_cache is not None:
            if not hasattr(generator, "assistant_kwargs"):
                raise ArgumentError(
                    "this draft model is given no cache by transformers: leave assistant_cache= out"
                )
            self._call.assistant_cache.reset()
            generator.assistant_kwargs[_CACHE] = self._call.assistant_cache
        return generator

    def prepare_inputs_for_generation(
        self, input_ids: torch.Tensor, next_sequence_length: int | None = None, **kwargs: Any
    ) -> Any:
        n_new = self._call.before_forward(input_ids, next_sequence_length)
        return super().prepare_inputs_for_generation(input_ids, next_sequence_length=n_new, **kwargs)

    # `generate` looks at the parameters of these.

    @functools.wraps(GenerationMixin._sample)
    def _sample(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with self._call.decoding(self, input_ids, kwargs):
            return super()._sample(input_ids, *args, **kwargs)

    @functools.wraps(GenerationMixin._beam_search)
    def _beam_search(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with self._call.decoding(self, input_ids, kwargs, has_beams=True):
            return super()._beam_search(input_ids, *args, **kwargs)

    @functools.wraps(GenerationMixin._assisted_decoding)
    def _assisted_decoding(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with self._call.decoding(self, input_ids, kwargs):
            return super()._assisted_decoding(input_ids, *args, **kwargs)


_REPLACED = frozenset(name for name in vars(_Hooks) if not name.startswith("__"))


@functools.cache
def _view_class(model_class: type) -> Any:
    """Return the class of views of such models; its name is the same, since transformers looks at names."""

    # `generate` looks at the parameters of the model's own.
    @functools.wraps(model_class.prepare_inputs_for_generation)  # type: ignore[attr-defined]
    def prepare_inputs_for_generation(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _Hooks.prepare_inputs_for_generation(self, *args, **kwargs)

    namespace = {
        "prepare_inputs_for_generation": prepare_inputs_for_generation,
        "__slots__": ("_call",),
        "__module__": model_class.__module__,
        "__qualname__": model_class.__qualname__,
        "__doc__": model_class.__doc__,
    }
    return type(model_class.__name__, (_Hooks, model_class), namespace)


def reason_against(model: Any) -> str:
    """Return why `generate` of this model cannot be given a cache in this way; an empty text if it can."""
    kind = type(model)
    if not isinstance(model, GenerationMixin):
        return f"a {kind.__name__} does not generate"
    if kind.generate is not GenerationMixin.generate:
        return f"{kind.__name__} has a generate() of its own; give it the cache as {_CACHE}="
    if not kind._supports_default_dynamic_cache():
        return f"{kind.__name__} makes caches of its own"
    parameters = inspect.signature(kind.forward).parameters
    if "cache_params" in parameters and _CACHE not in parameters:  # states alone, up to transformers 5.23
        return f"{kind.__name__} caches no keys and values"
    patched = sorted(_REPLACED & model.__dict__.keys())
    if patched:
        return f"{', '.join(patched)} of this {kind.__name__} is replaced on the object itself"
    return ""


def _n_held(cache: Any) -> int:
    """Return the tokens that every layer holds; `get_seq_length` is about the first of them."""
    group, settle = getattr(cache, "group", None), getattr(cache, "_settle", None)
    if settle is not None:
        settle()  # compiled steps, which a static cache has not counted yet
    return int(cache.get_seq_length() if group is None else group.length)


#: Cache -> the marks of its states when its ids were noted. A step that fails later moves some states and no length.
_marks: weakref.WeakKeyDictionary[Any, list[tuple[int, int]]] = weakref.WeakKeyDictionary()


def _marks_of_states(cache: Any) -> list[tuple[int, int]] | None:
    """Return what changes with every write to a state, without reading one; None if there is no telling."""
    marks = []
    for layer in getattr(cache, "layers", ()):
        for states in (getattr(layer, "conv_states", None), getattr(layer, "recurrent_states", None)):
            for state in states.values() if isinstance(states, dict) else [states]:
                if state is None:
                    continue
                if state.is_inference():  # it has no version
                    return None
                marks.append((state.data_ptr(), state._version))
    return marks


def _note(cache: Any, ids: torch.Tensor | None, mask: torch.Tensor | None) -> None:
    """Note that the cache holds the first of ``ids``, as many as it has; `mask` is that of the prompt."""
    assert ids is not None, "a loop begins with its prompt"
    n_tokens = min(_n_held(cache), ids.shape[1])
    visible = torch.ones_like(ids[:, :n_tokens], dtype=torch.bool)
    if mask is not None:
        n_masked = min(n_tokens, mask.shape[1])
        visible[:, :n_masked] = mask[:, :n_masked] != 0
    n_noted = cache.transcript.n_noted
    cache.transcript.note(ids[:, :n_tokens], visible)
    cache.transcript.n_noted = min(n_noted, n_tokens)  # what the conversation added is no prefix


def _rope_limit(model: Any) -> float:
    """Return the context length in tokens beyond which a model turns its keys in another way, if it does."""
    config = decoder_config(model.config)
    parameters = getattr(config, "rope_parameters", None) or {}
    limits = [float("inf")]
    for entry in (parameters, *parameters.values()):  # one for each type of layer, in some models
        if isinstance(entry, dict) and entry.get("rope_type") in ("dynamic", "longrope"):
            declared = entry.get("original_max_position_embeddings")
            declared = declared or getattr(config, "original_max_position_embeddings", None)
            limits.append(declared or config.max_position_embeddings)
    return min(limits)
