"""Metrics, declared and emitted the engine's way, so that they come out of its own endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vkvmap.integrations.vllm import versions

_PREFIX = "vllm:vkvmap_"

_GAUGES = {
    "certified_layers": "Layers whose pages are proven to be shareable",
    "opaque_layers": "Layers whose pages only this configuration can read",
    "bytes_per_token": "Canonical bytes of one token over all layers",
    "region_bytes": "Host memory for chunks",
    "shared_namespace": "1 if pages are shared with other parallel configurations, else 0",
}
_COUNTERS = {
    "bytes": "Bytes moved, over all workers",
    "pages": "Pages of one layer moved, over all workers",
    "failures": "Transfers that failed on a worker",
}
_PLAIN_COUNTERS = {
    "retries": "Transfers that were repeated after a failure",
    "digest_mismatches": "Pages that were loaded and not the ones that were stored",
}
_DIRECTIONS = ("store", "load")


def definitions() -> dict[str, Any]:
    """Every metric that `Emitter` can emit."""
    found = {f"{_PREFIX}{name}": versions.metric("Gauge", text) for name, text in _GAUGES.items()}
    for name, text in _COUNTERS.items():
        found[f"{_PREFIX}{name}"] = versions.metric("Counter", text, ("direction",))
    for name, text in _PLAIN_COUNTERS.items():
        found[f"{_PREFIX}{name}"] = versions.metric("Counter", text)
    return found


class Emitter:
    """Turns the workers' totals into the engine's statistics."""

    def __init__(self, card: Mapping[str, Any]) -> None:
        self._card = card
        self._stats = versions.stats_class()
        self._told: dict[str, int] | None = None

    def stats(self, totals: Mapping[str, int]) -> Any | None:
        """What has changed since the last call; None if nothing has."""
        before = self._told or {}
        changed = {name: value - before.get(name, 0) for name, value in totals.items()}
        changed = {name: value for name, value in changed.items() if value}
        if not changed and self._told is not None:
            return None
        stats = self._stats()
        self._gauges(stats)
        for direction in _DIRECTIONS:
            for name in _COUNTERS:
                amount = changed.get(f"{direction}_{name}")
                if amount:
                    stats.increase_counter(f"{_PREFIX}{name}", amount, (direction,))
        for name in _PLAIN_COUNTERS:
            if name in changed:
                stats.increase_counter(f"{_PREFIX}{name}", changed[name])
        self._told = dict(totals)
        return stats

    def _gauges(self, stats: Any) -> None:
        card = self._card
        values = {
            "certified_layers": card["certified"],
            "opaque_layers": card["opaque"],
            "bytes_per_token": card["bytes_per_token"],
            "region_bytes": card["num_rows"] * card["row_bytes"],
            "shared_namespace": int(card["shared"]),
        }
        for name, value in values.items():
            stats.set_gauge(f"{_PREFIX}{name}", value)
