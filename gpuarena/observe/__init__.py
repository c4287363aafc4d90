"""Looking at an arena: profiles, event logs, metrics for monitoring."""

from gpuarena.observe.memory_map import LabelUse, MemoryMap
from gpuarena.observe.metrics import ArenaCollector
from gpuarena.observe.page import page_text, write_page
from gpuarena.observe.perfetto import write_perfetto
from gpuarena.observe.profile import Counter, Counters, Profile
from gpuarena.observe.server import AddressError, Server, serve
from gpuarena.observe.snapshot import dump_snapshot, load_snapshot
from gpuarena.observe.trace import Event, Trace, load_trace

__all__ = [
    "AddressError",
    "ArenaCollector",
    "Counter",
    "Counters",
    "Event",
    "LabelUse",
    "MemoryMap",
    "Profile",
    "Server",
    "Trace",
    "dump_snapshot",
    "load_snapshot",
    "load_trace",
    "page_text",
    "serve",
    "write_page",
    "write_perfetto",
]
