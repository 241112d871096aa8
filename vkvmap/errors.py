"""What can go wrong, as values and as exceptions.

A `Refusal` is an ordinary value: it says why one layer cannot be certified and what would change
that. Exceptions are for input that no fallback can serve. Every message names the layer, the
value, the rule and the remedy, because the reader of it is an operator at engine start-up.
"""

from __future__ import annotations

from dataclasses import dataclass


class VkvmapError(Exception):
    """Base of every error that this package raises on purpose."""


@dataclass(frozen=True)
class Refusal:
    """Why a layer is carried opaquely: `layer`, the `rule` it breaks, what was `seen`, a `remedy`.

    `rule` is a stable identifier such as ``"heads-divide"``; the other fields are sentences.
    """

    layer: str
    rule: str
    seen: str
    remedy: str

    def __str__(self) -> str:
        return f"layer {self.layer!r} refused by rule {self.rule!r}: {self.seen}; {self.remedy}"


class Refuse(VkvmapError):
    """Carries a refusal up to where the layer's name is known; never reaches a caller."""

    def __init__(self, rule: str, seen: str, remedy: str) -> None:
        super().__init__(seen)
        self.rule, self.seen, self.remedy = rule, seen, remedy

    def of(self, layer: str) -> Refusal:
        """The refusal, for `layer`."""
        return Refusal(layer, self.rule, self.seen, self.remedy)


class RefusedError(VkvmapError, ValueError):
    """Strict mode met a layer that cannot be certified; `refusal` says which and why."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


class SpecError(VkvmapError, ValueError):
    """A description (layer, grid, layout, cache view) contradicts itself."""


class LayoutError(VkvmapError, ValueError):
    """Shape and strides do not allow exactly one layout, or not the declared one."""


class TilingError(VkvmapError, ValueError):
    """Mappings do not tile: a byte is missed, covered twice, or out of bounds."""


class PlanError(VkvmapError, ValueError):
    """Mappings, caches and region do not fit together, or a transfer names what is not there."""


class StalePlanError(PlanError):
    """The cache, the region or its registration that a plan was made for is gone or has moved."""


class TransferError(VkvmapError, RuntimeError):
    """A transfer failed, is not done, or cannot begin: its engine is shut down or the parent's.

    Where bytes were moving the message names the pages concerned.
    """


class RegionError(VkvmapError, OSError):
    """Host memory for canonical chunks cannot be had, joined or trusted."""


class FormatError(VkvmapError, ValueError):
    """Stored bytes are not what their header, identity or checksum says."""


class StoreError(VkvmapError, RuntimeError):
    """The store cannot serve: path, capacity, permission."""
