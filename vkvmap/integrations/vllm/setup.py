"""From the engine's configuration and tensors to mappings, rows and the name they go by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vkvmap.cache import CacheView
from vkvmap.derive import derive_canonical_mappings
from vkvmap.errors import Refusal, RefusedError, VkvmapError
from vkvmap.grid import RankGrid
from vkvmap.identity import Identity
from vkvmap.integrations.vllm import versions
from vkvmap.integrations.vllm.crosscheck import differences
from vkvmap.integrations.vllm.layers import (
    Described,
    GroupFacts,
    LayerFacts,
    ModelFacts,
    describe,
    published_table,
    whole_table,
)
from vkvmap.integrations.vllm.naming import checkpoint, identity
from vkvmap.integrations.vllm.options import EngineError, Options
from vkvmap.integrations.vllm.rows import RowLayout
from vkvmap.mapping import Mappings


@dataclass(frozen=True)
class Setup:
    """What one worker works with.

    Attributes:
        mappings, caches, rows, identity: as their classes say.
        groups: names of the groups in the order of the engine's block lists.
        blocks_per_chunk: blocks of a group in one row.
        shared: whether rows mean the same to other parallel configurations.
        reasons: why layers are opaque.
        disagreements: where the engine's own mapping of a layer is another one.
        rank: this worker's among all workers of the engine.
        random_keys: whether the engine's keys mean nothing to any other process.
    """

    mappings: Mappings
    caches: Mapping[str, CacheView]
    rows: RowLayout
    identity: Identity
    groups: tuple[str, ...]
    blocks_per_chunk: int
    shared: bool
    reasons: tuple[Refusal, ...]
    disagreements: tuple[str, ...]
    rank: int
    random_keys: bool = False

    @property
    def certified(self) -> int:
        """Layers whose mapping is proven."""
        return sum(mapping.certified for mapping in self.mappings.by_layer.values())

    @property
    def bytes_per_token(self) -> int:
        """Canonical bytes of one token over all layers that keep something per token."""
        layers = self.mappings.layers.values()
        return sum(spec.canonical_bytes(1) for spec in layers if spec.has_tokens)


def read_engine(config: Any, kv_caches: Any, options: Options, connector: Any) -> Setup:
    """Describe, derive, prove, lay out.

    Raises:
        EngineError: the engine's configuration cannot be served, or in strict mode a layer cannot
            be certified.
    """
    vllm_config = versions.current_config() if connector is None else connector.vkvmap_config
    parallel = config.parallel
    if not versions.single_node(vllm_config.parallel_config):
        raise EngineError(
            "the workers of this engine are on several machines; canonical pages need the shards "
            "of every rank in one machine's memory, so keep tensor and pipeline ranks on one node"
        )
    model = _model_facts(config, vllm_config)
    groups = _groups(config)
    layers = _layers(config, kv_caches, vllm_config)
    described = _described(model, groups, layers, parallel.pp_size)
    grid = RankGrid(
        tp=parallel.tp_size,
        dcp=parallel.dcp_size,
        pcp=parallel.pcp_size,
        interleave=versions.interleave(vllm_config.parallel_config),
        pcp_mode="replicates",
        world_size=parallel.world_size // parallel.pp_size,
    )
    try:
        mappings = derive_canonical_mappings(
            described.table,
            described.caches,
            grid,
            parallel.rank % grid.size,
            family=options.family,
        )
    except VkvmapError as error:
        raise EngineError(str(error)) from error
    reasons = _reasons(mappings, described)
    if options.strict and reasons:
        raise EngineError(f"strict: {RefusedError(reasons[0])}") from None
    _check_groups(mappings, config, reasons)
    tokens = {
        group.name: group.span_tokens * config.cache.blocks_per_chunk
        if any(spec.has_tokens for spec in described.table.in_group(group.name))
        else 0
        for group in groups
    }
    named = identity(
        mappings,
        described.caches,
        options,
        model=config.model.name,
        revision=options.revision or _revision(config.model.name, model, vllm_config),
        quantisation=_quantisation(vllm_config, model),
        tokens=tokens,
        placement=_placement(config, grid, described.caches),
    )
    return Setup(
        mappings,
        described.caches,
        RowLayout.of(mappings, tokens, verify=options.verify),
        named,
        tuple(group.name for group in groups),
        config.cache.blocks_per_chunk,
        named.placement is None,
        reasons,
        _disagreements(mappings, config, kv_caches, options),
        parallel.rank,
        versions.keys_are_random(vllm_config),
    )


def _model_facts(config: Any, vllm_config: Any) -> ModelFacts:
    model_config = vllm_config.model_config
    return ModelFacts(
        hf_config=model_config.hf_config.to_dict(),
        total_kv_heads=int(model_config.get_total_num_kv_heads()),
        cache_dtype=config.model.dtype,
        platform=versions.platform(),
        axes=versions.cache_layout_name(vllm_config),
        tp=config.parallel.tp_size,
        dcp=config.parallel.dcp_size,
    )


def _groups(config: Any) -> tuple[GroupFacts, ...]:
    return tuple(
        GroupFacts(str(number), tuple(group.layer_names), int(group.tokens_per_block))
        for number, group in zip(versions.group_ids(config), config.groups, strict=True)
    )


def _layers(config: Any, kv_caches: Any, vllm_config: Any) -> dict[str, LayerFacts]:
    """This rank's offloaded layers, in model order."""
    modules = versions.modules(vllm_config)
    refs = versions.row_views(config, kv_caches, modules)
    order = {name: index for index, name in enumerate(modules)}
    missing = [name for name in refs if name not in order]
    if missing:
        raise EngineError(f"layer {missing[0]!r} is offloaded but no module of the model holds it")
    facts = {}
    for name in sorted(refs, key=order.__getitem__):
        module = modules[name]
        facts[name] = LayerFacts(
            name,
            versions.layer_spec(module, vllm_config),
            versions.bound_tensors(module),
            refs[name],
            type(module).__name__,
            versions.cpu_isa(module),
        )
    return facts


def _described(
    model: ModelFacts,
    groups: tuple[GroupFacts, ...],
    layers: Mapping[str, LayerFacts],
    stages: int,
) -> Described:
    described = describe(model, groups, layers)
    if stages == 1:
        return described
    table = whole_table(described.table, published_table(model, layers), stages)
    return Described(table, described.caches, described.reasons)


def _reasons(mappings: Mappings, described: Described) -> tuple[Refusal, ...]:
    """Refusals, each with the reason that came first."""
    return tuple(described.reasons.get(refusal.layer, refusal) for refusal in mappings.refusals)


def _check_groups(mappings: Mappings, config: Any, reasons: tuple[Refusal, ...]) -> None:
    if not mappings.by_layer:
        raise EngineError(str(reasons[0]) if reasons else "the engine offloads no layer")
    per_chunk = config.cache.blocks_per_chunk
    for name in mappings.by_layer:
        group = mappings.layers[name].group
        tokenwise = any(spec.has_tokens for spec in mappings.layers.in_group(group))
        if per_chunk != 1 and not tokenwise:
            raise EngineError(
                f"layer {name!r} keeps one state per block, and a chunk of {per_chunk} blocks "
                "would need several; set blocks_per_chunk to 1"
            )


def _revision(name: str, model: ModelFacts, vllm_config: Any) -> str:
    hf_config = vllm_config.model_config.hf_config
    commit = getattr(hf_config, "_commit_hash", None) or getattr(
        vllm_config.model_config, "revision", None
    )
    return checkpoint(name, model.hf_config, commit)


def _quantisation(vllm_config: Any, model: ModelFacts) -> str:
    weights = getattr(vllm_config.model_config, "quantization", None) or "none"
    compute = str(vllm_config.model_config.dtype).split(".")[-1]
    return f"weights {weights}, cache {model.cache_dtype}, compute {compute}"


def _placement(config: Any, grid: RankGrid, caches: Mapping[str, CacheView]) -> dict[str, Any]:
    return {
        "tp": grid.tp,
        "dcp": grid.dcp,
        "pcp": grid.pcp,
        "interleave": grid.interleave,
        "pp": config.parallel.pp_size,
        "pages": {
            name: [[list(t.shape[1:]), list(t.strides), t.itemsize] for t in view.tensors]
            for name, view in caches.items()
        },
    }


def _disagreements(
    mappings: Mappings, config: Any, kv_caches: Any, options: Options
) -> tuple[str, ...]:
    # With prefill context parallelism the engine's mapping does not describe what it runs.
    if options.family != "native" or config.parallel.pcp_size > 1:
        return ()
    return differences(mappings, versions.engine_mappings(config, kv_caches))
