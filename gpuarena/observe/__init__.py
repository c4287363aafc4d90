"""Looking at an arena: profiles, event logs, metrics for monitoring."""

from gpuarena.observe.profile import Counter, Counters, Profile
from gpuarena.observe.trace import Event, Trace, load_trace

__all__ = ["Counter", "Counters", "Event", "Profile", "Trace", "load_trace"]
