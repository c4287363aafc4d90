"""How large a cache a call of `generate` needs."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

from transformers import GenerationConfig

from gpuarena.errors import ArgumentError, ArgumentTypeError, CapacityError, ShapeError
from gpuarena.kv.spec import positive
from gpuarena_transformers.sizing import decoder_config

__all__ = ["Capacity", "capacity_for", "check_fits", "n_drafted_beyond"]

_COUNTS = ("num_beams", "num_return_sequences", "prompt_lookup_num_tokens")


class Capacity(NamedTuple):
    """What a cache has to hold; the names are those of `ArenaCache`'s arguments."""

    max_context_length: int
    """Tokens a row: prompt and new ones, but the last, which is never fed back, and what drafting puts on top."""
    max_batch_size: int
    """Rows: sequences times beams, or times returned sequences."""


def capacity_for(
    generation_config: Any = None, input_length: int = 1, *, batch_size: int = 1, **overrides: Any
) -> Capacity:
    """Return the capacity that a call of `generate` needs in the worst case, which is when no row ends early.

    >>> capacity_for(None, 100, max_new_tokens=50, num_beams=4, batch_size=2)
    Capacity(max_context_length=149, max_batch_size=8)
    >>> capacity_for(None, 100, max_new_tokens=50, prompt_lookup_num_tokens=10)
    Capacity(max_context_length=158, max_batch_size=1)

    Parameters
    ----------
    generation_config : GenerationConfig or PreTrainedModel, optional
        A model stands for its ``generation_config``, and tells its number of layers that predict several tokens.
    input_length : int
        Tokens of the prompt, padding included; of ``inputs_embeds`` where those are given; 1 for an
        encoder-decoder, whose prompt does not go through the cache of its decoder.
    batch_size : int
        Prompts in the call.
    **overrides
        Arguments of `generate`: ``max_new_tokens``, ``max_length``, ``num_beams``, ``num_return_sequences``,
        ``prompt_lookup_num_tokens``, ``assistant_model``, ``tokenizer``, ``assistant_tokenizer``, ...; others are
        ignored.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        ``max_length`` leaves no room for a new token; ``use_mtp`` without a model; or a number that is no integer of
        1 or more.

    Notes
    -----
    With neither ``max_new_tokens`` nor ``max_length``, `generate` makes 20 tokens. Where both are given, the first
    counts. A draft model never proposes more than still fits; prompt lookup does, and so do layers that predict
    several tokens and draft models with a tokenizer of their own.
    """
    n_input = positive(input_length, "input_length")
    config, model_config = _config_of(generation_config)
    drafting = {
        name: overrides.pop(name, None) for name in ("assistant_model", "tokenizer", "assistant_tokenizer")
    }
    for name in ("max_new_tokens", "max_length", *_COUNTS):  # before transformers says less of it
        if overrides.get(name) is not None:
            positive(overrides[name], name)
    config.update(**overrides)
    for name in _COUNTS:
        if getattr(config, name, None) is not None:
            positive(getattr(config, name), name)
    max_length = _max_length(config, n_input, model_config)
    if max_length <= n_input:
        raise ArgumentError(
            f"max_length is {max_length} tokens, and the input has {n_input}: nothing can be generated; "
            f"set max_new_tokens"
        )
    beyond = n_drafted_beyond(config, max_length, n_input, model_config, **drafting)
    rows = positive(batch_size, "batch_size") * max(config.num_beams or 1, config.num_return_sequences or 1)
    return Capacity(max_length - 1 + beyond, rows)


def _config_of(given: Any) -> tuple[GenerationConfig, Any]:
    """Return a copy of the generation config, and the config of the model if there is one."""
    if given is None:
        return GenerationConfig(), None
    if isinstance(given, GenerationConfig):
        return copy.deepcopy(given), None
    config = getattr(given, "generation_config", None)
    if not isinstance(config, GenerationConfig):
        raise ArgumentTypeError(
            f"generation_config must be a GenerationConfig or a model that has one, not {type(given).__name__}"
        )
    return copy.deepcopy(config), given.config


def _max_length(config: GenerationConfig, n_input: int, model_config: Any) -> int:
    """Return prompt plus new tokens, as `generate` settles it."""
    if config.max_new_tokens is not None:
        return n_input + positive(config.max_new_tokens, "max_new_tokens")
    if config.max_length is not None:
        return positive(config.max_length, "max_length")
    default: int = GenerationConfig._get_default_generation_params()["max_length"]  # 20, for new tokens alone
    longest = None if model_config is None else getattr(model_config, "max_position_embeddings", None)
    return n_input + default if longest is None else min(n_input + default, longest)


def n_drafted_beyond(
    config: GenerationConfig,
    max_length: int,
    n_input: int,
    model_config: Any = None,
    *,
    assistant_model: Any = None,
    tokenizer: Any = None,
    assistant_tokenizer: Any = None,
) -> int:
    """Return by how many tokens drafting may fill a cache beyond ``max_length - 1``."""
    if (config.num_beams or 1) > 1 or max_length - n_input < 2:  # beams draft nothing, nor does a last token
        return 0
    if getattr(config, "assistant_early_exit", None) is not None:
        return 0
    if config.prompt_lookup_num_tokens is not None:
        # The last draft is made behind max_length - 2 tokens, of which it can repeat all but the first.
        return int(max(min(config.prompt_lookup_num_tokens, max_length - 3) - 1, 0))
    if getattr(config, "use_mtp", None):
        n_layers = (
            None if model_config is None else getattr(decoder_config(model_config), "num_mtp_layers", None)
        )
        if n_layers is None:
            raise ArgumentError(
                "use_mtp: give a model whose config has num_mtp_layers in place of the generation config"
            )
        return int(n_layers)
    if assistant_model is not None and tokenizer is not None and assistant_tokenizer is not None:
        return 1  # text that is encoded again is cut to max_length tokens
    return 0


def check_fits(cache: Any, n_tokens: int, n_rows: int) -> None:
    """Raise unless a cache can take a call that needs `n_tokens` tokens and `n_rows` rows.

    Raises
    ------
    CapacityError, ShapeError
        Too many tokens, or rows.
    """
    if n_rows > cache.max_batch_size:
        raise ShapeError(
            f"the call needs {n_rows} rows (sequences times beams or returned sequences), the cache was made for at "
            f"most {cache.max_batch_size}; make it with max_batch_size={n_rows}"
        )
    if getattr(cache, "layers", None) and all(cache.is_linear):
        return  # nothing but states, which no token adds to
    capacity = int(cache.get_max_length())
    if n_tokens <= capacity or getattr(cache, "on_full", "raise") != "raise":
        return
    missing = n_tokens - capacity
    raise CapacityError(
        f"the call may need {n_tokens} tokens (prompt, new tokens and drafts), the cache holds {capacity}, {missing} "
        f"too few. Nothing was run: shorten the prompt, lower max_new_tokens, or make the cache for {n_tokens} tokens "
        f"(max_context_length=, of the cache or of enable)",
        used=int(cache.get_seq_length()),
        requested=n_tokens,
        capacity=capacity,
        available=capacity,
        missing=missing,
        aligned_offset=0,
        label=None,
    )
