"""vLLM: KV cache offloaded under one parallel configuration, reused under any other.

Selected in ``--kv-transfer-config`` by names alone, so vLLM is neither patched nor imported here::

    {"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
     "kv_connector_extra_config": {
        "spec_name": "VkvmapOffloadingSpec", "spec_module_path": "vkvmap.integrations.vllm",
        "cpu_bytes_to_use": 8589934592}}

The scheduler side is the engine's own: manager, eviction, secondary tiers. The worker side is ours:
mappings from the engine's layers and tensors, plan, transfers. What must stay true:

 1. the name that pages are shared under says everything that gives their bytes meaning, and
    nothing about parallelism unless the bytes depend on it;
 2. the worker decides rows and name, from what it certified; the scheduler takes them over, so
    the two can never disagree;
 3. what cannot be served is said in a sentence while the engine starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vkvmap.integrations.vllm.connector import VkvmapConnector
    from vkvmap.integrations.vllm.offloading_spec import VkvmapOffloadingSpec

__all__ = ["VkvmapConnector", "VkvmapOffloadingSpec"]


def __getattr__(name: str) -> Any:
    # The classes derive from the engine's, so their modules need the engine.
    if name == "VkvmapOffloadingSpec":
        from vkvmap.integrations.vllm.offloading_spec import VkvmapOffloadingSpec

        return VkvmapOffloadingSpec
    if name == "VkvmapConnector":
        from vkvmap.integrations.vllm.connector import VkvmapConnector

        return VkvmapConnector
    raise AttributeError(f"module 'vkvmap.integrations.vllm' has no attribute {name!r}")
