"""What serving requests of given lengths does to the memory of a KV cache: contiguous pieces, buddies, pages, an arena."""

from gpuarena.simulate.result import LengthClass, Moment, Result, Sample

__all__ = ["LengthClass", "Moment", "Result", "Sample"]
