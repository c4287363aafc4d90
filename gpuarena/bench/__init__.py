"""Measurements that users run too: ratios of things timed side by side in one process."""
