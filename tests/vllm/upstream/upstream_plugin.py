"""vLLM's own tests of canonical offloading, pointed at ours: ``pytest -p upstream_plugin``.

Replaces, before the tests import them, the engine's derivation by ours (through the same reader of
engine specs that the integration uses) and its tiering manager by our wrapper of it.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import canonical_mapping
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs
from vllm.v1.kv_offload.tiering import manager as tiering

from vkvmap import RankGrid, certify, derive_canonical_mappings
from vkvmap.integrations.vllm.layers import GroupFacts, LayerFacts, ModelFacts, describe
from vkvmap.integrations.vllm.manager import Manager
from vkvmap.opaque import opaque_mapping


def _model(tp: int, dcp: int, total: int) -> ModelFacts:
    return ModelFacts({}, total, "int8", "cuda", "LBHNC", tp, dcp)


def _facts(name: str, spec: Any, cache: Any, blocks: int) -> LayerFacts:
    if cache is None:  # their latent layers come without a tensor
        row = getattr(spec, "head_size", 64)
        cache = torch.zeros(blocks, spec.block_size, row, dtype=torch.int8)
    # The engine's view of a page is as long as its spec says.
    page = getattr(spec, "unpadded_page_size_bytes", prod(cache.shape[1:]) * cache.element_size())
    rows = torch.zeros(cache.shape[0], page, dtype=torch.int8)
    return LayerFacts(name, spec, (cache,), rows)


def derive(
    layers: dict[str, Any],
    caches: dict[str, Any],
    blocks: int,
    grid: RankGrid,
    total: int,
    rank: int,
) -> Any:
    """Our mappings for engine specs by layer name."""
    facts = {name: _facts(name, spec, caches.get(name), blocks) for name, spec in layers.items()}
    groups = [
        GroupFacts(name, (name,), spec.block_size * grid.dcp) for name, spec in layers.items()
    ]
    described = describe(_model(grid.tp, grid.dcp, total), groups, facts)
    return derive_canonical_mappings(described.table, described.caches, grid, rank)


def layer_mapping(spec: Any, cache: Any, blocks: int, ctx: Any) -> Any:
    grid = RankGrid(ctx.tp_size, ctx.dcp_size, ctx.pcp_size, ctx.interleave)
    found = derive({"layer": spec}, {"layer": cache}, blocks, grid, ctx.total_kv_heads, ctx.rank)
    mapping = found.by_layer["layer"]
    return mapping if mapping.certified else None


def opaque(page: int, ranks: int, rank: int) -> Any:
    return opaque_mapping(page, RankGrid(tp=ranks), rank, 0)


def derive_all(vllm_config: Any, cache_config: Any, caches: dict[str, Any]) -> Any:
    parallel = vllm_config.parallel_config
    layers: dict[str, Any] = {}
    for group in cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        for name in group.layer_names:
            uniform = isinstance(spec, UniformTypeKVCacheSpecs)
            layers[name] = spec.kv_cache_specs[name] if uniform else spec
    grid = RankGrid(
        parallel.tensor_parallel_size,
        parallel.decode_context_parallel_size,
        parallel.prefill_context_parallel_size,
        parallel.cp_kv_cache_interleave_size,
        world_size=parallel.world_size,
    )
    total = vllm_config.model_config.get_total_num_kv_heads()
    return derive(layers, caches, cache_config.num_blocks, grid, total, parallel.rank).by_layer


class Board:
    """No worker has anything to say."""

    card = dict.fromkeys(
        ("certified", "opaque", "bytes_per_token", "num_rows", "row_bytes", "shared"), 0
    )

    def totals(self) -> dict[str, int]:
        return {}

    def new_failures(self) -> tuple[int, ...]:
        return ()

    def close(self) -> None: ...


class Wrapped(Manager):
    """Our manager where the tests make the engine's; attributes they set go to the inner one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(_inner(*args, **kwargs), Board())
        self.stats_of_ours = self._emitter.stats({})

    def __setattr__(self, name: str, value: Any) -> None:
        inner = self.__dict__.get("_inner")
        if inner is not None and hasattr(inner, name):
            setattr(inner, name, value)
        else:
            object.__setattr__(self, name, value)


_inner = tiering.TieringOffloadingManager

canonical_mapping._layer_mapping = layer_mapping
canonical_mapping._opaque_fallback_mapping = opaque
canonical_mapping._verify_tiling = lambda name, per_rank: certify(per_rank)
canonical_mapping.derive_canonical_mappings = derive_all
tiering.TieringOffloadingManager = Wrapped
