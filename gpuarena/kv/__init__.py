"""Key/value caches on an arena, for models written by hand and for the adapters.

>>> from gpuarena.kv import KVSpec
>>> KVSpec.uniform(layers=28, kv_heads=2, head_dim=128, dtype="bfloat16").bytes_per_token  # Qwen2.5-1.5B
28672
"""

from typing import TYPE_CHECKING, Any

from gpuarena.kv._layer import KVLayer
from gpuarena.kv.checkpoints import KVCheckpoint, KVScope, KVStep
from gpuarena.kv.full import FullLayer
from gpuarena.kv.group import KVStats, LayerGroup
from gpuarena.kv.linear import KVCache, SharedView
from gpuarena.kv.quantized import QuantizedLayer
from gpuarena.kv.ring import RingLayer
from gpuarena.kv.spec import KVSpec, LayerSpec, SharedLayer
from gpuarena.kv.window import WindowLayer

if TYPE_CHECKING:
    from gpuarena.kv.attention import attend
    from gpuarena.kv.contiguous import ContiguousKVCache
    from gpuarena.kv.lanes import LaneCache
    from gpuarena.kv.paged import PagedKVCache, Sequence

#: What is imported when it is first asked for; `attend` is torch's.
_LATER = {
    "ContiguousKVCache": "contiguous",
    "LaneCache": "lanes",
    "PagedKVCache": "paged",
    "Sequence": "paged",
    "attend": "attention",
}

__all__ = [
    "ContiguousKVCache",
    "FullLayer",
    "KVCache",
    "KVCheckpoint",
    "KVLayer",
    "KVScope",
    "KVSpec",
    "KVStats",
    "KVStep",
    "LaneCache",
    "LayerGroup",
    "LayerSpec",
    "PagedKVCache",
    "QuantizedLayer",
    "RingLayer",
    "Sequence",
    "SharedLayer",
    "SharedView",
    "WindowLayer",
    "attend",
]


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _LATER:
        raise AttributeError(f"module 'gpuarena.kv' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"gpuarena.kv.{_LATER[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
