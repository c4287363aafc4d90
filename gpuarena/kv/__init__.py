"""Key/value caches on an arena, for models written by hand and for the adapters.

>>> from gpuarena.kv import KVSpec
>>> KVSpec.uniform(layers=28, kv_heads=2, head_dim=128, dtype="bfloat16").bytes_per_token  # Qwen2.5-1.5B
28672
"""

from gpuarena.kv.linear import KVCache, KVCheckpoint, KVLayer, KVScope, KVStats, LayerGroup
from gpuarena.kv.spec import KVSpec, LayerSpec

__all__ = ["KVCache", "KVCheckpoint", "KVLayer", "KVScope", "KVSpec", "KVStats", "LayerGroup", "LayerSpec"]
