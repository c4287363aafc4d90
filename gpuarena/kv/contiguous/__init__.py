"""One contiguous piece of token slots per request, with its fragmentation explained.

>>> from gpuarena.kv.contiguous import Buddy
>>> slots = Buddy(16)
>>> slots.allocate(5), slots.allocate(5), slots.free_slots
(0, 8, 0)
"""

from gpuarena.kv.contiguous._buddy import Buddy
from gpuarena.kv.contiguous._diagnosis import Compaction, Diagnosis, diagnose
from gpuarena.kv.contiguous._free_list import FreeList
from gpuarena.kv.contiguous._slots import Occupancy
from gpuarena.kv.contiguous.cache import ContiguousKVCache, ContiguousStats
from gpuarena.kv.contiguous.request import Request

__all__ = [
    "Buddy",
    "Compaction",
    "ContiguousKVCache",
    "ContiguousStats",
    "Diagnosis",
    "FreeList",
    "Occupancy",
    "Request",
    "diagnose",
]
