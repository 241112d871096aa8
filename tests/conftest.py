"""Hypothesis profiles: `ci` for the ordinary run, `long` for the named longer command."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

_COMMON = {
    "deadline": None,  # shared machines stall; speed is measured in benchmarks/
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.filter_too_much],
    "print_blob": True,
}
settings.register_profile("ci", max_examples=300, derandomize=True, **_COMMON)
settings.register_profile(
    "long", max_examples=int(os.environ.get("VKVMAP_CASES", "25000")), **_COMMON
)
settings.register_profile("mutant", max_examples=100, derandomize=True, **_COMMON)
settings.register_profile("fast", max_examples=30, derandomize=True, **_COMMON)
settings.load_profile(os.environ.get("VKVMAP_HYPOTHESIS", "ci"))
