"""Pages: sequences that share one pool, fork without copying, and find what was computed before."""

from gpuarena.kv.paged.cache import (
    BlockTable,
    FlashInferTables,
    PagedKVCache,
    PagedStats,
    Sequence,
    SequenceCheckpoint,
    Step,
)

__all__ = [
    "BlockTable",
    "FlashInferTables",
    "PagedKVCache",
    "PagedStats",
    "Sequence",
    "SequenceCheckpoint",
    "Step",
]
