"""Store paged KV cache under one parallel configuration, load it under any other.

The main names, in the order in which a program meets them:

* `LayerSpec`, `LayerTable`: what the model caches, without any parallelism;
* `RankGrid`, `CacheView`: this worker group, and this rank's tensors with their declared layout;
* `derive_canonical_mappings`: how each page maps into its canonical page, proven, or why not;
* `Region`: host memory for canonical chunks, shared by the ranks of a node;
* `TransferPlan`: packs all of it once, then moves bytes with `store` and `load`.

Importing the package loads neither torch nor the native module; both come with what needs them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vkvmap._version import __version__

# Bound at once: loading the module of the same name later would bind the name to the module.
from vkvmap.certify import certify

if TYPE_CHECKING:
    from vkvmap.cache import CacheView, TensorView
    from vkvmap.derive import derive_canonical_mappings, derive_group
    from vkvmap.errors import Refusal, VkvmapError
    from vkvmap.grid import RankGrid
    from vkvmap.layout import Layout
    from vkvmap.mapping import CanonicalPageMapping, CopyRun, Mappings
    from vkvmap.recognise import detect_layout
    from vkvmap.region import Region
    from vkvmap.spec import LayerSpec, LayerTable
    from vkvmap.transfer_plan import TransferPlan

_HOME = {
    "CacheView": "cache",
    "CanonicalPageMapping": "mapping",
    "CopyRun": "mapping",
    "LayerSpec": "spec",
    "LayerTable": "spec",
    "Layout": "layout",
    "Mappings": "mapping",
    "RankGrid": "grid",
    "Refusal": "errors",
    "Region": "region",
    "TensorView": "cache",
    "TransferPlan": "transfer_plan",
    "VkvmapError": "errors",
    "derive_canonical_mappings": "derive",
    "derive_group": "derive",
    "detect_layout": "recognise",
}

__all__ = [
    "CacheView",
    "CanonicalPageMapping",
    "CopyRun",
    "LayerSpec",
    "LayerTable",
    "Layout",
    "Mappings",
    "RankGrid",
    "Refusal",
    "Region",
    "TensorView",
    "TransferPlan",
    "VkvmapError",
    "__version__",
    "certify",
    "derive_canonical_mappings",
    "derive_group",
    "detect_layout",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'vkvmap' has no attribute {name!r}")
    return getattr(import_module(f"vkvmap.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
