"""Arena figures for Prometheus and OpenMetrics."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from gpuarena.errors import ArgumentError, ArgumentTypeError, BackendError

if TYPE_CHECKING:
    from gpuarena.arena import Arena

__all__ = ["COUNTERS", "GAUGES", "LABEL_BYTES", "ArenaCollector"]

#: Field of `Stats` -> (name of the metric, what it is).
GAUGES = {
    "capacity": ("capacity_bytes", "Bytes of the buffer."),
    "used": ("used_bytes", "Bytes of the live regions, as requested."),
    "padding": ("padding_bytes", "Bytes that alignment skipped, and guard zones."),
    "available": ("available_bytes", "Bytes between the two ends."),
    "committed": ("committed_bytes", "Bytes that are backed by memory."),
    "peak": ("peak_bytes", "The most that was taken at a time."),
    "n_regions": ("regions", "Live regions."),
    "fragmentation": ("fragmentation_ratio", "The share of what was taken that is padding."),
}
COUNTERS = {
    "n_allocs_total": ("allocations", "Successful allocations."),
    "n_failed": ("failed_allocations", "Allocations refused for lack of memory."),
    "bytes_requested_total": ("requested_bytes", "Bytes of all successful allocations."),
    "bytes_freed_total": ("freed_bytes", "Bytes of all regions dropped."),
}
#: The metric of the bytes by label.
LABEL_BYTES = "gpuarena_label_bytes"


class ArenaCollector:
    """A collector for ``prometheus_client``: register it, and every scrape reads the arenas' figures.

    >>> from prometheus_client import CollectorRegistry, generate_latest
    >>> from gpuarena import Arena
    >>> arena = Arena(1024, name="scratch")
    >>> registry = CollectorRegistry()
    >>> registry.register(ArenaCollector(arena))
    >>> b'gpuarena_capacity_bytes{arena="scratch",device="cpu"} 1024.0' in generate_latest(registry)
    True

    The arenas are referred to weakly; one that is gone or closed is left out. Nothing is counted for this: a
    scrape takes each arena's lock for the time of one `Arena.stats`.

    Parameters
    ----------
    *arenas : Arena
        Each with a name of its own, which becomes the label ``arena``.

    Raises
    ------
    ArgumentTypeError, ArgumentError
        Something is no arena, has no name, or two have the same name.
    BackendError
        prometheus_client is not installed (extra ``metrics``).
    """

    def __init__(self, *arenas: Arena) -> None:
        from gpuarena.arena import Arena

        try:
            from prometheus_client import core
        except ImportError as error:
            raise BackendError(
                "metrics need prometheus_client: pip install 'gpuarena[metrics]'", backend="prometheus_client"
            ) from error
        self._core: Any = core
        for arena in arenas:
            if not isinstance(arena, Arena):
                raise ArgumentTypeError(f"metrics are of arenas, not {type(arena).__name__}")
            if arena.name is None:
                raise ArgumentError(
                    f"{arena!r} has no name, by which its figures are told apart: make it with Arena(..., name=...)"
                )
        names = [_encodable(arena.name or "") for arena in arenas]
        if len(set(names)) < len(names):
            raise ArgumentError(f"two arenas have the same name: {', '.join(map(repr, names))}")
        self._arenas = [weakref.ref(arena) for arena in arenas]

    def collect(self) -> Iterator[Any]:
        """Yield the metric families, as ``prometheus_client`` asks for them."""
        found = [arena for ref in self._arenas if (arena := ref()) is not None and not arena.closed]
        stats = [([_encodable(arena.name or ""), arena.device], arena.stats) for arena in found]
        for fields, kind in (
            (GAUGES, self._core.GaugeMetricFamily),
            (COUNTERS, self._core.CounterMetricFamily),
        ):
            for field, (name, text) in fields.items():
                family = kind(f"gpuarena_{name}", text, labels=["arena", "device"])
                for labels, figures in stats:
                    family.add_metric(labels, getattr(figures, field))
                yield family
        by_label = self._core.GaugeMetricFamily(
            LABEL_BYTES, "Bytes of the live regions by label.", labels=["arena", "device", "label"]
        )
        for arena in found:
            sums: dict[str, int] = {}  # two samples of the same labels make a scrape fail as a whole
            for label, nbytes in arena.by_label().items():
                text = _encodable(label or "")
                sums[text] = sums.get(text, 0) + nbytes
            for text, nbytes in sums.items():
                by_label.add_metric([_encodable(arena.name or ""), arena.device, text], nbytes)
        yield by_label


def _encodable(text: str) -> str:
    """Return a text that UTF-8 can encode: one that it cannot would make every scrape fail."""
    return text.encode("utf-8", "backslashreplace").decode()
