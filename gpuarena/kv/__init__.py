"""Key/value caches on an arena, for models written by hand and for the adapters.

>>> from gpuarena.kv import KVSpec
>>> KVSpec.uniform(layers=28, kv_heads=2, head_dim=128, dtype="bfloat16").bytes_per_token  # Qwen2.5-1.5B
28672
"""

from gpuarena.kv._layer import KVLayer
from gpuarena.kv.checkpoints import KVCheckpoint, KVScope, KVStep
from gpuarena.kv.full import FullLayer
from gpuarena.kv.group import KVStats, LayerGroup
from gpuarena.kv.linear import KVCache, SharedView
from gpuarena.kv.spec import KVSpec, LayerSpec, SharedLayer
from gpuarena.kv.window import WindowLayer

__all__ = [
    "FullLayer",
    "KVCache",
    "KVCheckpoint",
    "KVLayer",
    "KVScope",
    "KVSpec",
    "KVStats",
    "KVStep",
    "LayerGroup",
    "LayerSpec",
    "SharedLayer",
    "SharedView",
    "WindowLayer",
]
