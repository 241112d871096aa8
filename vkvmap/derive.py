"""Whole models: which layers can share pages across configurations, proven, and which cannot.

Contract: a layer comes out certified, or opaque with a `Refusal`. Nothing disappears, nothing is
guessed, nothing is downgraded without a reason (DESIGN 2.7). Layers that are alike are derived and
proven once per call; nothing is remembered between calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vkvmap.cache import CacheView, check_storage
from vkvmap.certify import certify
from vkvmap.derive_layer import LayerDerivation
from vkvmap.errors import LayoutError, Refusal, Refuse, RefusedError, SpecError, TilingError
from vkvmap.grid import RankGrid
from vkvmap.mapping import CanonicalPageMapping, Family, Mappings
from vkvmap.opaque import opaque_addressing, opaque_mapping, slabs
from vkvmap.recognise import PageAddressing, detect_layout
from vkvmap.spec import LayerSpec, LayerTable

#: The mapping of every rank, and how this rank's page bytes become addresses.
_Proven = tuple[tuple[CanonicalPageMapping, ...], PageAddressing]


def derive_canonical_mappings(
    layers: LayerTable,
    caches: Mapping[str, Any],
    grid: RankGrid,
    rank: int,
    *,
    family: Family = "native",
    strict: bool = False,
) -> Mappings:
    """Derive and prove how each of this rank's cache pages maps into its canonical page.

    Args:
        layers: the whole model's layers; a pipeline stage passes the same table.
        caches: layer name -> `CacheView`, or a tensor whose layout is unmistakable. A stage names
            its own layers only.
        grid: the worker group's parallel configuration.
        rank: this worker's rank within the group.
        family: canonical byte order, ``"native"`` or ``"universal"`` (DESIGN 2.5).
        strict: raise the first refusal instead of falling back to opaque pages.

    Returns:
        `Mappings`; layers that cannot be certified are opaque and have an entry in `refusals`. A
        worker group that is not exactly the TP x PCP grid gets no mapping at all, and one refusal
        per layer.

    Raises:
        RefusedError: in strict mode, for the first layer that cannot be certified.
        SpecError: `caches` names a layer that the table does not have, or `rank` is not in the
            grid, or a tensor overlaps itself.
    """
    return _derive(layers, caches, grid, [rank], family, strict)[0]


def derive_group(
    layers: LayerTable,
    caches: Mapping[str, Any],
    grid: RankGrid,
    *,
    family: Family = "native",
    strict: bool = False,
) -> tuple[Mappings, ...]:
    """Mappings of every rank of a group whose ranks all have caches like `caches`.

    As `derive_canonical_mappings`, for tools that look at a whole group at once.
    """
    return _derive(layers, caches, grid, range(grid.size), family, strict)


def _derive(
    layers: LayerTable,
    caches: Mapping[str, Any],
    grid: RankGrid,
    ranks: Sequence[int],
    family: Family,
    strict: bool,
) -> tuple[Mappings, ...]:
    if family not in ("native", "universal"):
        raise SpecError(f"family {family!r}: choose 'native' or 'universal'")
    unknown = [name for name in caches if name not in layers]
    if unknown:
        raise SpecError(f"caches name layers that the layer table lacks: {unknown[:3]}")
    if not grid.is_whole:
        return tuple(_refuse_group(layers, caches, grid, rank, family, strict) for rank in ranks)
    for rank in ranks:
        if not 0 <= rank < grid.size:
            raise SpecError(f"rank {rank} is not in a group of tp={grid.tp} x pcp={grid.pcp}")
    known: dict[Any, _Proven | Refuse] = {}
    views: dict[str, CacheView] = {}
    proven: dict[str, _Proven] = {}
    refusals: dict[str, Refusal] = {}
    home = ranks[0]
    for name, spec in layers.items():
        if name not in caches:
            continue
        try:
            view = views[name] = _declared(spec, caches[name], grid, home)
            _check_bounds(view)
            key = _likeness(spec, view, grid)
            if key not in known:
                known[key] = _attempt(spec, view, grid, home, family)
            result = known[key]
            if isinstance(result, Refuse):
                raise result
            per_rank, addressing = result
            proven[name] = (per_rank, replace(addressing, base=view.base))
        except Refuse as refuse:
            refusals[name] = refuse.of(name)
            if strict:
                raise RefusedError(refusals[name]) from None
    return tuple(_assemble(layers, views, grid, rank, family, proven, refusals) for rank in ranks)


def _refuse_group(
    layers: LayerTable,
    caches: Mapping[str, Any],
    grid: RankGrid,
    rank: int,
    family: Family,
    strict: bool,
) -> Mappings:
    refusals = tuple(
        Refusal(
            name,
            "worker-group",
            f"the group has {grid.world_size} workers, tp={grid.tp} x pcp={grid.pcp} is "
            f"{grid.size}",
            "derive per pipeline stage, with exactly the TP x PCP workers of that stage",
        )
        for name in caches
    )
    if strict and refusals:
        raise RefusedError(refusals[0])
    return Mappings(layers, family, grid, rank, {}, {}, refusals)


def _declared(spec: LayerSpec, cache: Any, grid: RankGrid, rank: int) -> CacheView:
    if isinstance(cache, CacheView):
        return cache
    heads = spec.num_kv_heads
    held = grid.held_units(rank, heads, spec.name) if heads else None
    shape = tuple(int(size) for size in cache.shape)
    fitting: dict[str, CacheView] = {}
    for block_size in sorted(set(shape[1:-1])):
        try:
            layout = detect_layout(
                cache,
                spec,
                block_size=block_size,
                local_heads=held[1] - held[0] if held else None,
            )
        except LayoutError:
            continue
        fitting[layout.name] = CacheView.of(cache, layout, block_size)
    if len(fitting) != 1:
        raise LayoutError(
            f"layer {spec.name!r}: shape {shape} allows {sorted(fitting) or 'no known layout'}; "
            "declare it with CacheView.of(tensor, layout=..., block_size=...)"
        )
    return next(iter(fitting.values()))


def _likeness(spec: LayerSpec, view: CacheView, grid: RankGrid) -> tuple[Any, ...]:
    """All that a derivation depends on but names and addresses; equal keys derive once."""
    base = view.base
    parts = tuple(t.address - base for t in view.tensors)
    ranges = grid.head_ranges.get(spec.name)
    heads = tuple(tuple(pair) for pair in ranges) if ranges is not None else None
    return (
        spec.fields,
        spec.canonical,
        spec.kind,
        spec.dcp_sharded,
        view.geometry,
        parts,
        heads,
    )


def _attempt(spec: LayerSpec, view: CacheView, grid: RankGrid, rank: int, family: Family) -> Any:
    """Derive and prove, or the refusal as a value."""
    try:
        derivation = LayerDerivation(spec, view, grid, rank, family)
        per_rank = derivation.per_rank()
        certify(per_rank)
    except Refuse as refuse:
        return refuse
    except LayoutError as error:
        return Refuse("layout", str(error), "declare the layout that the tensor really has")
    except TilingError as error:
        return Refuse("tiling", str(error), "check head_ranges and the layer's description")
    return per_rank, derivation.recognised.addressing()


def _check_bounds(view: CacheView) -> None:
    try:
        check_storage(view)
    except LayoutError as error:
        raise SpecError(str(error)) from None


def _assemble(
    layers: LayerTable,
    views: Mapping[str, CacheView],
    grid: RankGrid,
    rank: int,
    family: Family,
    proven: Mapping[str, _Proven],
    refused: Mapping[str, Refusal],
) -> Mappings:
    by_layer: dict[str, CanonicalPageMapping] = {}
    addressing: dict[str, PageAddressing] = {}
    carrier: dict[str, str] = {}
    refusals = dict(refused)
    slab_of = slabs(views)
    for name in layers:
        if name not in views:
            continue
        slab = slab_of[name]
        broken = [other for other in slab if other in refused]
        if not broken:
            per_rank, addressing[name] = proven[name]
            by_layer[name], carrier[name] = per_rank[rank], name
            continue
        if name not in refusals:
            refusals[name] = Refusal(
                name,
                "shared-row",
                f"it shares the rows of one tensor with {broken[0]!r}, which is opaque",
                f"make {broken[0]!r} certifiable; until then the whole row is the opaque unit",
            )
        # The row is carried once for each group whose blocks lie in it.
        group = layers[name].group
        carrier[name] = next(other for other in slab if layers[other].group == group)
        addressing[name] = opaque_addressing(slab, views)
        shards = grid.context_shard(rank, dcp_sharded=layers[name].dcp_sharded).count
        by_layer[name] = opaque_mapping(
            addressing[name].page_bytes, grid, rank, views[name].block_size * shards
        )
    ordered = tuple(refusals[name] for name in layers if name in refusals)
    return Mappings(layers, family, grid, rank, by_layer, addressing, ordered, carrier)
