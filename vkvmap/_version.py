"""The version, in the one place that the build and the package both read."""

from __future__ import annotations

__version__ = "0.1.0"
