"""Lanes: a linear cache whose rows have lengths of their own."""

from gpuarena.kv.lanes.cache import LaneCache, LaneCheckpoint, LaneScope, LaneStats, LaneStep

__all__ = ["LaneCache", "LaneCheckpoint", "LaneScope", "LaneStats", "LaneStep"]
