"""An engine's counters in the form that Prometheus scrapes.

The counters are the native engine's own (`vkvmap.transfer.Engine.metrics`); nothing is counted
here, so a scrape costs what one snapshot costs. Needs the ``metrics`` extra (prometheus_client).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vkvmap.transfer import Engine

#: Counter -> what it counts.
_COUNTERS = {
    "submitted": ("vkvmap_jobs_submitted", "Transfers submitted"),
    "finished": ("vkvmap_jobs_finished", "Transfers that have ended, in whatever way"),
    "failed": ("vkvmap_jobs_failed", "Transfers of which pages failed"),
    "cancelled": ("vkvmap_jobs_cancelled", "Transfers cancelled"),
    "bytes": ("vkvmap_bytes", "Bytes moved"),
    "pages": ("vkvmap_pages", "Pages of one layer moved"),
    "fragments": ("vkvmap_fragments", "Fragments moved"),
    "failed_pages": ("vkvmap_failed_pages", "Pages that could not be moved"),
}
_TIMES = {
    "queue": ("vkvmap_queue_seconds", "From submission to the first byte"),
    "copy": ("vkvmap_copy_seconds", "From the first byte to the last"),
}
_LABELS = ["direction", "mover"]


class EngineCollector:
    """Register it with a ``prometheus_client`` registry to expose an engine.

    Raises:
        ModuleNotFoundError: prometheus_client is not installed; install ``vkvmap[metrics]``.
    """

    def __init__(self, engine: Engine) -> None:
        from prometheus_client import core

        self._families = core
        self._engine = engine

    def collect(self) -> Iterator[Any]:
        core = self._families
        snapshot = self._engine.metrics()
        transfers = snapshot["transfers"]
        yield core.GaugeMetricFamily(
            "vkvmap_jobs_in_flight", "Transfers that have not ended", value=snapshot["in_flight"]
        )
        for key, (name, help_text) in _COUNTERS.items():
            family = core.CounterMetricFamily(name, help_text, labels=_LABELS)
            for labels, counted in transfers.items():
                family.add_metric(list(labels), counted[key])
            yield family
        for key, (name, help_text) in _TIMES.items():
            family = core.HistogramMetricFamily(name, help_text, labels=_LABELS)
            for labels, counted in transfers.items():
                times = counted[key]
                family.add_metric(list(labels), _buckets(times["counts"]), times["sum_s"])
            yield family


def exposition(engine: Engine) -> bytes:
    """The Prometheus text exposition of one engine."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(EngineCollector(engine))
    text: bytes = generate_latest(registry)
    return text


def _buckets(counts: list[int]) -> list[tuple[str, int]]:
    """Cumulative, by upper bound in seconds; the engine counts by power of two of microseconds."""
    cumulative = 0
    buckets = []
    for exponent, count in enumerate(counts):
        cumulative += count
        last = exponent + 1 == len(counts)
        buckets.append(("+Inf" if last else repr(2**exponent * 1e-6), cumulative))
    return buckets
