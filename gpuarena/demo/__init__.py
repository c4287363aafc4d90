"""The demo: a small language model answers through the arena."""
