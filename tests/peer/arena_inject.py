"""A pytest plugin: `generate` makes an `ArenaCache` wherever it would make a `DynamicCache` by itself.

With it, transformers' own generation tests run on the arena, without a change to them::

    PYTHONPATH=tests/peer python -m pytest -p arena_inject <checkout>/tests/models/llama -k generate

A cache that a test passes itself stays as it is, and so does one that a test asks for by name ("static",
"quantized", "offloaded"), as do the models that have a cache class of their own.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from typing import Any

from gpuarena_transformers import ArenaCache, ArenaEncoderDecoderCache
from gpuarena_transformers.states import ArenaHybridLayer, ArenaStateLayer
from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import LinearAttentionAndFullAttentionLayer, LinearAttentionLayer
from transformers.generation.utils import GenerationMixin

#: Tokens beyond what `generate` asks for: prompt lookup goes past the maximum, and some tests go on with the cache.
SLACK_TOKENS = 128
#: Positions that the encoders of the tests' small models give at most.
SOURCE_TOKENS = 1024
#: Arguments under which a model may take its cache.
ARGUMENTS = ("cache", "past_key_values", "cache_params")
#: Layers of upstream that ours take the place of.
STANDS_FOR = {
    ArenaStateLayer: LinearAttentionLayer,
    ArenaHybridLayer: LinearAttentionAndFullAttentionLayer,
}
#: How many caches were made, by the kind of model.
made: Counter[str] = Counter()


def arena_cache_like(cache: Any, model: Any, n_rows: int, n_tokens: int) -> Any:
    """Return what takes the place of `cache` on an arena, or `cache` itself where nothing does."""
    if type(cache) is EncoderDecoderCache and type(cache.self_attention_cache) is DynamicCache:
        made["encoder-decoder"] += 1
        return ArenaEncoderDecoderCache(model.config, n_rows, n_tokens, SOURCE_TOKENS)
    if type(cache) is DynamicCache and not getattr(cache, "offloading", False):
        made["decoder"] += 1
        return ArenaCache(model.config.get_text_config(decoder=True), n_rows, n_tokens)
    return cache


def inject() -> None:
    """Patch transformers; the plugin does so when it is loaded."""
    prepare = GenerationMixin._prepare_cache_for_generation

    @functools.wraps(prepare)
    def prepare_arena(
        self: Any,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> Any:
        given = {name: model_kwargs.get(name) for name in ARGUMENTS}
        result = prepare(self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)
        n_rows = batch_size * max(
            generation_config.num_beams or 1, generation_config.num_return_sequences or 1
        )
        for name in ARGUMENTS:
            cache = model_kwargs.get(name)
            if cache is not None and given[name] is None:
                model_kwargs[name] = arena_cache_like(cache, self, n_rows, max_cache_length + SLACK_TOKENS)
                if generation_config.is_assistant:
                    model_kwargs[name].activate_past_recording()
        return result

    GenerationMixin._prepare_cache_for_generation = prepare_arena


def pytest_configure() -> None:
    """Patch when pytest has its configuration, before it imports a test."""
    inject()


def pytest_collection_finish() -> None:
    """Let upstream's checks of a cache know the layers that take the place of its own.

    They tell layers with states from others by ``type(layer) is LinearAttentionLayer``, which no subclass passes.
    """
    checks = sys.modules.get("tests.generation.test_utils")
    if checks is not None:
        checks.__dict__["type"] = lambda value: STANDS_FOR.get(type(value), type(value))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how many caches were made: a run in which there were none would prove nothing."""
    terminalreporter.write_line(f"arena caches made: {dict(made)}")
