"""Where releases of the engine differ: one function per difference, each by looking, never by
comparing version numbers.

Known to work with 0.27.1 to 0.33.0. A release whose interface has moved on is refused at start-up
with what was looked for; nothing here is reached in the hot path.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from vkvmap.integrations.vllm.options import EngineError

KNOWN = "0.27.1 to 0.33.0"
_TIERING = "vllm.v1.kv_offload.tiering.spec"
_BASE = "vllm.v1.kv_offload.base"
_REGION = "vllm.v1.kv_offload.cpu.shared_offload_region"
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector"
_SCHEDULER = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler"
_STATS = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics"


def release() -> str:
    """The engine's version, for messages only."""
    return str(getattr(importlib.import_module("vllm"), "__version__", "unknown"))


def find(module: str, name: str) -> Any:
    """`name` of the engine's `module`.

    Raises:
        EngineError: the engine has no such thing (any more).
    """
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise unsupported(f"{module}.{name} ({error})") from error


def _with(found: Any, names: Sequence[str]) -> Any:
    """The engine's class `found`, if it has all of `names`; EngineError otherwise."""
    for name in names:
        if not hasattr(found, name):
            raise unsupported(f"{found.__name__}.{name}")
    return found


def unsupported(missing: str) -> EngineError:
    """The refusal of a release that lacks `missing`."""
    return EngineError(
        f"vLLM {release()} has no {missing}. vkvmap knows the offloading interface of vLLM "
        f"{KNOWN}; use one of those, or a vkvmap that knows this one"
    )


# ---- classes to derive from ---------------------------------------------------------------------


def tiering_spec_class() -> Any:
    """The spec with the engine's manager and secondary tiers."""
    found = find(_TIERING, "TieringOffloadingSpec")
    for name in ("get_manager", "get_worker", "build_metric_definitions"):
        if not callable(getattr(found, name, None)):
            raise unsupported(f"TieringOffloadingSpec.{name}")
    if list(inspect.signature(found.__init__).parameters)[1:] != ["config"]:
        raise unsupported("TieringOffloadingSpec(config)")
    return found


def worker_class() -> Any:
    """The interface of a worker: transfers by job id."""
    found = find(_BASE, "OffloadingWorker")
    wanted = {"submit_store", "submit_load", "get_finished", "wait", "shutdown"}
    abstract = set(getattr(found, "__abstractmethods__", ()))
    if abstract - wanted:
        raise unsupported(
            f"OffloadingWorker without {', '.join(sorted(abstract - wanted))}, which it asks for"
        )
    missing = sorted(name for name in wanted if not hasattr(found, name))
    if missing:
        raise unsupported(f"OffloadingWorker.{missing[0]}")
    return found


def connector_class() -> Any:
    """The connector whose worker and scheduler sides drive an offloading spec."""
    return _with(
        find(_CONNECTOR, "OffloadingConnector"),
        ("register_kv_caches", "get_finished", "update_connector_output"),
    )


def scheduler_jobs(side: Any) -> Any:
    """Job id -> status with ``keys`` and ``is_store``, of the connector's scheduler side."""
    jobs = getattr(side, "_jobs", None)
    status = find(_SCHEDULER, "TransferJobStatus")
    if jobs is None or not {"keys", "is_store"} <= {field.name for field in fields(status)}:
        raise unsupported("scheduler jobs with keys and is_store")
    return jobs


# ---- configuration ------------------------------------------------------------------------------


def config_with(config: Any, **changes: Any) -> Any:
    """`config` with those of `changes` that this release's configuration has."""
    known = {field.name for field in fields(config)}
    return replace(config, **{name: value for name, value in changes.items() if name in known})


def group_ids(config: Any) -> tuple[int, ...]:
    """The engine's number of each offloaded group (before 0.30 all groups were, in order)."""
    return tuple(
        int(getattr(group, "group_id", index)) for index, group in enumerate(config.groups)
    )


def current_config() -> Any:
    """The engine configuration that the worker is being set up under."""
    found = find("vllm.config", "get_current_vllm_config_or_none")()
    if found is None:
        raise unsupported(
            "current configuration while caches are registered; select VkvmapConnector, which is "
            "given one (docs/vllm.md)"
        )
    return found


def keys_are_random(vllm_config: Any) -> bool:
    """Whether each process begins its block hashes at a number of its own.

    Before 0.29 all did, unless told a seed; since then those whose hash is not cryptographic.
    """
    if os.environ.get("PYTHONHASHSEED") is not None:
        return False
    utils = importlib.import_module("vllm.v1.core.kv_cache_utils")
    algorithm = str(getattr(vllm_config.cache_config, "prefix_caching_hash_algo", ""))
    return not hasattr(utils, "DEFAULT_NONE_HASH_SEED") or algorithm.startswith("xxhash")


def interleave(parallel_config: Any) -> int:
    """Consecutive tokens on one context shard; an older name wins where both are set."""
    for name in ("dcp_kv_cache_interleave_size", "cp_kv_cache_interleave_size"):
        value = getattr(parallel_config, name, None)
        if isinstance(value, int) and value > 1:
            return value
    return 1


def single_node(parallel_config: Any) -> bool:
    """Whether all workers of the engine share this machine's memory."""
    return int(getattr(parallel_config, "nnodes_within_dp", 1) or 1) == 1


def cache_layout_name(vllm_config: Any) -> str:
    """The engine's name for the order of its cache axes, such as ``"LBHNC"`` or ``"HND"``."""
    named = getattr(vllm_config.cache_config, "kv_cache_layout", None)
    if named:
        return str(getattr(named, "name", named))
    try:
        module = importlib.import_module("vllm.v1.attention.backends.utils")
        return str(module.get_kv_cache_layout())
    except (ImportError, AttributeError, ValueError):
        return ""


# ---- layers -------------------------------------------------------------------------------------


def modules(vllm_config: Any) -> dict[str, Any]:
    """The engine's cache-holding modules by layer name, in model order."""
    context = getattr(vllm_config.compilation_config, "static_forward_context", None)
    if context is None:
        raise unsupported("compilation_config.static_forward_context")
    return dict(context)


def layer_spec(module: Any, vllm_config: Any) -> Any | None:
    """The engine's description of one layer's cache; None if the module gives none."""
    describe = getattr(module, "get_kv_cache_spec", None)
    return None if describe is None else describe(vllm_config)


def bound_tensors(module: Any) -> tuple[Any, ...]:
    """The tensors bound to a module: one, or several states, or (long ago) one per engine."""
    cache = getattr(module, "kv_cache", None)
    if cache is None:
        return ()
    if hasattr(cache, "data_ptr"):
        return (cache,)
    flat: list[Any] = []
    for item in cache:
        flat.extend(item if isinstance(item, (list, tuple)) else (item,))
    return tuple(tensor for tensor in flat if tensor.numel())


def cpu_isa(module: Any) -> str | None:
    """The instruction set that the CPU backend fills a layer's pages for (on `impl` until 0.28)."""
    for holder in (module, getattr(module, "impl", None)):
        isa = getattr(holder, "isa", None)
        if isa is not None:
            return str(isa)
    return None


# ---- host memory --------------------------------------------------------------------------------


def set_rows(spec: Any, row_bytes: int, num_rows: int, prefault_bytes: int) -> None:
    """Make the engine's spec hand out `num_rows` rows of `row_bytes` (chunks were once blocks)."""
    name = next((n for n in ("num_chunks", "num_blocks") if hasattr(spec, n)), None)
    for wanted in ("kv_bytes_per_chunk", "cpu_page_size_per_worker"):
        if not hasattr(spec, wanted):
            raise unsupported(f"TieringOffloadingSpec.{wanted}")
    if name is None:
        raise unsupported("TieringOffloadingSpec.num_chunks")
    setattr(spec, name, num_rows)
    spec.kv_bytes_per_chunk = row_bytes
    spec.cpu_page_size_per_worker = prefault_bytes


def host_region(engine_id: str, rank: int, row_bytes: int, num_rows: int, prefault: int) -> Any:
    """The engine's host memory, which its scheduler and its tiers open by name."""
    region_class = find(_REGION, "SharedOffloadRegion")
    parameters = inspect.signature(region_class.__init__).parameters
    sizes = (
        {"num_chunks": num_rows, "kv_bytes_per_chunk": row_bytes}
        if "num_chunks" in parameters
        else {"num_blocks": num_rows, "kv_bytes_per_block": row_bytes}
    )
    needed = {"engine_id", "rank", "cpu_page_size", *sizes}
    if not needed <= set(parameters) or not hasattr(region_class, "create_kv_memoryview"):
        raise unsupported(f"SharedOffloadRegion({', '.join(sorted(needed))})")
    return region_class(engine_id=engine_id, rank=rank, cpu_page_size=prefault, **sizes)


# ---- results ------------------------------------------------------------------------------------


def result_class() -> Any:
    """How the engine is told that a transfer has ended: job, success, bytes, seconds."""
    found = find(_BASE, "TransferResult")
    wanted = ["job_id", "success", "transfer_size", "transfer_time"]
    if list(inspect.signature(found).parameters)[:4] != wanted:
        raise unsupported(f"TransferResult({', '.join(wanted)})")
    return found


def check_jobs() -> None:
    """Refuse a release whose jobs do not say what `JobIds` reads."""
    wanted = {"block_ids", "group_sizes", "block_indices"}
    if not wanted <= set(inspect.signature(find(_BASE, "GPULoadStoreSpec")).parameters):
        raise unsupported(f"GPULoadStoreSpec({', '.join(sorted(wanted))})")


def stats_class() -> Any:
    """A set of the engine's metrics; made empty."""
    return _with(
        find(_STATS, "OffloadingConnectorStats"), ("increase_counter", "set_gauge", "aggregate")
    )


def metric(kind: str, documentation: str, labels: Sequence[str] = ()) -> Any:
    """A metric definition of the engine: `kind` is ``"Counter"`` or ``"Gauge"``."""
    definition = find(_BASE, f"Offloading{kind}Metadata")
    known = inspect.signature(definition).parameters
    given: dict[str, Any] = {"documentation": documentation}
    if labels and "labelnames" in known:
        given["labelnames"] = tuple(labels)
    return definition(**given)


def class_names(value: Any) -> frozenset[str]:
    """Names of the classes of `value`, base classes included."""
    return frozenset(cls.__name__ for cls in type(value).__mro__)


def miss() -> Any:
    """What a manager's lookup answers for a key that it does not have."""
    return find(_BASE, "LookupResult").MISS


def platform() -> str:
    """``"cpu"``, ``"cuda"``, ``"rocm"``, ``"xpu"``: where the engine keeps its cache."""
    current = find("vllm.platforms", "current_platform")
    return str(current.device_type if not current.is_cpu() else "cpu")


def row_views(config: Any, kv_caches: Any, modules: Any) -> dict[str, Any]:
    """Layer name -> the engine's int8 ``(blocks, page bytes)`` view of its cache.

    Where layers interleave within blocks the engine gives one view of whole blocks and no word on
    layers; the number of blocks is right all the same.
    """
    views = {}
    for group, refs in zip(config.groups, kv_caches.group_data_refs, strict=True):
        names = tuple(group.layer_names)
        if len(refs) == len(names):
            chosen = [refs[index].tensor_idx for index in range(len(names))]
        elif len(refs) == 1:
            chosen = [refs[0].tensor_idx] * len(names)
        else:
            raise unsupported(
                f"one cache reference per layer: group of {len(names)} layers with {len(refs)}"
            )
        for name, index in zip(names, chosen, strict=True):
            views[name] = kv_caches.tensors[index].tensor
    return views


def engine_mappings(config: Any, kv_caches: Any) -> dict[str, Any]:
    """Layer name -> the engine's own mapping, for layers that it has one for."""
    found = {}
    for group, refs in zip(config.groups, kv_caches.group_data_refs, strict=True):
        if len(refs) == len(group.layer_names):
            for name, ref in zip(group.layer_names, refs, strict=True):
                mapping = getattr(ref, "mapping", None)
                if mapping is not None:
                    found[name] = mapping
    return found
