"""gpuarena for Hugging Face transformers: a cache for `generate`, and an attention that suits it.

Importing this registers ``attn_implementation="gpuarena"``.
"""

from gpuarena_transformers import attention
from gpuarena_transformers.cache import ArenaCache, StaticLinearKVCache
from gpuarena_transformers.layers import ArenaLayer
from gpuarena_transformers.sizing import cache_argument

attention.register()

__all__ = ["ArenaCache", "ArenaLayer", "StaticLinearKVCache", "cache_argument"]
