"""`generate` on a cache that holds the conversation so far."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers.cache_utils import EncoderDecoderCache

from gpuarena.errors import ArenaError, ArgumentError, ArgumentTypeError
from gpuarena_transformers._view import Call, reason_against

__all__ = ["CacheInUseError", "generate_from"]

#: Arguments of `generate` that leave no place for a cache, and the values that do.
_LEAVES_NO_PLACE: dict[str, tuple[Any, ...]] = {
    "cache": (None,),
    "past_key_values": (None,),
    "cache_params": (None,),
    "cache_implementation": (None,),
    "custom_generate": (None,),
    "use_cache": (None, True),
}


class CacheInUseError(ArenaError, RuntimeError):
    """A cache is given to a second `generate` while the first one is running."""


def generate_from(
    model: Any,
    cache: Any,
    inputs: Any = None,
    *,
    attention_mask: Any = None,
    assistant_cache: Any = None,
    **generate_kwargs: Any,
) -> Any:
    """Return what ``model.generate(inputs, ...)`` returns, running only what `cache` does not hold yet.

    Give the whole conversation each time, as the chat template has it. The cache is cut to the tokens that it has
    in common with that, as when a template rewrites the last turn, and goes on from there.

    >>> ids = torch.tensor([[5, 6, 7]])                             # doctest: +SKIP
    >>> cache = ArenaCache.for_model(model, 4096)                   # doctest: +SKIP
    >>> ids = generate_from(model, cache, ids, max_new_tokens=20)   # doctest: +SKIP
    >>> ids = torch.cat([ids, question], dim=1)                     # doctest: +SKIP
    >>> ids = generate_from(model, cache, ids, max_new_tokens=20)   # doctest: +SKIP

    Parameters
    ----------
    model : PreTrainedModel
    cache : ArenaCache
        Or another with ``reset``, ``truncate``, ``get_max_length``, ``max_batch_size`` and a ``transcript``; without
        a transcript it starts over each time. What somebody else appended to it is not known, and cut off; to have
        it used, ``cache.transcript.note(ids)`` says what it is.
    inputs : tensor, list of int, list of lists, or mapping, optional
        Ids ``[n]`` or ``[batch, n]``, or what a tokenizer returns: further entries become arguments of `generate`.
    attention_mask : tensor or list, optional
        ``[batch, n]``, 0 for padding, which belongs on the left.
    assistant_cache : ArenaCache, optional
        What the `assistant_model` works on, instead of a cache that it makes for each call; it may lie in the same
        arena as `cache`. It starts over in each call. The draft model shares the model's tokenizer.
    **generate_kwargs
        Further arguments of `generate`: ``max_new_tokens``, ``streamer``, ``assistant_model``, ...

    Returns
    -------
    tensor or ModelOutput
        With the prompt, as from `generate`. The cache of a `ModelOutput` is `cache`.

    Raises
    ------
    CapacityError, ShapeError
        Prompt and new tokens, or rows, may not fit, with the capacity that is needed; before the first forward.
    ArgumentError, ArgumentTypeError
        An argument that leaves no place for the cache; a cache that holds the tokens of another model; a model
        with a `generate` of its own. Unchanged on error.
    CheckpointError
        The conversation does not go on from a prefix whose ``with`` block is open. Unchanged on error.
    CacheInUseError
        Another `generate_from` is running on this cache.

    Notes
    -----
    An exception that stops `generate`, also one of a streamer or a stopping criterion, leaves a cache that can be
    used on, and holds what was run.

    The cache starts over, and the whole prompt is run, where nothing can be kept: after a change of the weights,
    of adapters, of hooks or of training mode; with ``inputs_embeds``, pictures, sound or ``position_ids``; where
    attentions or hidden states are asked for; with draft models that read hidden states; past the length where a
    model rescales its rotary embedding; in an encoder-decoder; in a model with recurrent or convolution states,
    unless it goes on from those rightly and the conversation has only grown. One prefix that is held serves many
    rows, and of several beams or returned sequences the one that goes on is found.

    Not guaranteed: that logits are equal to the last bit, as a prompt in two parts rounds otherwise than in one. Nor
    that a change is seen that leaves no trace, such as a write through ``weight.data``; ``cache.reset()`` then.
    """
    reason = reason_against(model)
    if reason:
        raise ArgumentError(reason)
    _check_cache(model, cache)
    arguments = _arguments(model, inputs, attention_mask, generate_kwargs)
    if assistant_cache is not None:
        _check_assistant(cache, assistant_cache, arguments)
    with _taken(cache), contextlib.nullcontext() if assistant_cache is None else _taken(assistant_cache):
        owner = getattr(getattr(cache, "transcript", None), "model", None)
        if owner is not None and owner is not model and int(cache.get_seq_length()):
            raise ArgumentError(
                f"the cache holds {int(cache.get_seq_length())} tokens of another model, a {type(owner).__name__}; "
                f"cache.reset() before it is used with this one"
            )
        has_positions = arguments.get("position_ids") is not None
        call = Call(model, lambda n_rows: cache, has_positions=has_positions, assistant_cache=assistant_cache)
        return call.run(**arguments)


def _check_assistant(cache: Any, assistant_cache: Any, arguments: Mapping[str, Any]) -> None:
    assistant = arguments.get("assistant_model")
    if assistant is None:
        raise ArgumentError("assistant_cache= is for the assistant_model=, and none is given")
    if assistant_cache is cache:
        raise ArgumentError("assistant_cache is the cache of the model: give each model one of its own")
    if arguments.get("assistant_tokenizer") is not None:
        raise ArgumentError("assistant_cache= is for a draft model with the model's own tokenizer")
    _check_cache(assistant, assistant_cache)


def leaves_no_place(arguments: Mapping[str, Any]) -> str:
    """Return which argument of `generate` leaves no place for a cache; an empty text if none does."""
    return next((name for name, free in _LEAVES_NO_PLACE.items() if arguments.get(name) not in free), "")


def _check_cache(model: Any, cache: Any) -> None:
    if cache is None:
        raise ArgumentTypeError(
            "cache must be an ArenaCache, not None: ArenaCache.for_model(model, 4096) makes one; without any, call "
            "model.generate"
        )
    needed = ("reset", "truncate", "get_max_length", "get_seq_length", "max_batch_size")
    missing = [name for name in needed if not hasattr(cache, name)]
    if missing:
        raise ArgumentTypeError(f"cache must be an ArenaCache; a {type(cache).__name__} has no {missing[0]}")
    if model.config.is_encoder_decoder != isinstance(cache, EncoderDecoderCache):
        kind = "an encoder-decoder" if model.config.is_encoder_decoder else "no encoder-decoder"
        raise ArgumentError(f"{type(model).__name__} is {kind}, and the cache is a {type(cache).__name__}")


def _arguments(model: Any, inputs: Any, attention_mask: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `generate`."""
    name = leaves_no_place(given)
    if name in ("cache", "past_key_values", "cache_params"):
        raise ArgumentError(f"{name}= is a second cache; the one to use is the argument after the model")
    if name:
        raise ArgumentError(f"{name}={given[name]!r} leaves no place for the cache")
    arguments = dict(given)
    if isinstance(inputs, Mapping):
        twice = sorted(inputs.keys() & arguments.keys())
        if twice:
            raise ArgumentError(f"{twice[0]} is given twice: in the inputs, and as an argument")
        arguments |= inputs
    elif inputs is not None:
        if "input_ids" in arguments:
            raise ArgumentError("input_ids are given twice")
        arguments["input_ids"] = inputs
    if attention_mask is not None:
        if isinstance(inputs, Mapping) and inputs.get("attention_mask") is not None:
            raise ArgumentError("attention_mask is given twice: in the inputs, and as an argument")
        arguments["attention_mask"] = attention_mask
    for name in ("input_ids", "attention_mask"):
        if arguments.get(name) is not None:
            arguments[name] = _as_rows(arguments[name], name, model.device)
    if model.config.is_encoder_decoder or not isinstance(arguments.get("input_ids"), torch.Tensor):
        return arguments
    ids, mask = arguments["input_ids"], arguments.get("attention_mask")
    if mask is not None and mask.shape != ids.shape:
        raise ArgumentError(
            f"attention_mask is {list(mask.shape)}, the ids are {list(ids.shape)}: give both for the whole conversation"
        )
    return arguments


def _as_rows(given: Any, name: str, device: torch.device) -> torch.Tensor:
    """Return ``[batch, n]``."""
    try:
        rows = given if isinstance(given, torch.Tensor) else torch.as_tensor(given, device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentTypeError(
            f"{name} must be a tensor, or lists of integers of one length (pad them on the left); a text goes through "
            f'tokenizer(text, return_tensors="pt"), messages through tokenizer.apply_chat_template: {error}'
        ) from error
    if rows.ndim == 1:
        rows = rows[None]
    if rows.ndim != 2 or rows.shape[1] == 0 or rows.is_floating_point():
        raise ArgumentTypeError(
            f"{name} must be integers [batch, n] with n of 1 or more, not {list(rows.shape)}"
        )
    return rows


#: Caches that a call is running on. Weak, so that this keeps none alive.
_in_use: weakref.WeakSet[Any] = weakref.WeakSet()
_lock = threading.Lock()


@contextmanager
def _taken(cache: Any) -> Iterator[None]:
    with _lock:
        if cache in _in_use:
            raise CacheInUseError(
                f"{cache!r} is in use by another generate_from; give each conversation a cache of its own"
            )
        _in_use.add(cache)
    try:
        yield
    finally:
        with _lock:
            _in_use.discard(cache)
