"""gpuarena for Hugging Face transformers: a cache for `generate`, and an attention that suits it.

Importing this registers ``attn_implementation="gpuarena"``.
"""

from gpuarena_transformers import attention
from gpuarena_transformers.cache import ArenaCache, StaticLinearKVCache
from gpuarena_transformers.capacity import Capacity, capacity_for
from gpuarena_transformers.encoder_decoder import ArenaEncoderDecoderCache
from gpuarena_transformers.generation import CacheInUseError, generate_from
from gpuarena_transformers.layers import ArenaLayer
from gpuarena_transformers.overflow import CacheOverflowWarning, CacheStats
from gpuarena_transformers.prefix import Branches, Prefix
from gpuarena_transformers.sizing import cache_argument
from gpuarena_transformers.static import ArenaStaticCache
from gpuarena_transformers.switch import ArenaSwitch, disable, enable

attention.register()

__all__ = [
    "ArenaCache",
    "ArenaEncoderDecoderCache",
    "ArenaLayer",
    "ArenaStaticCache",
    "ArenaSwitch",
    "Branches",
    "CacheInUseError",
    "CacheOverflowWarning",
    "CacheStats",
    "Capacity",
    "Prefix",
    "StaticLinearKVCache",
    "cache_argument",
    "capacity_for",
    "disable",
    "enable",
    "generate_from",
]
