"""From layouts to mappings: one engine for every kind of layer.

A field has a placement in the local page and one in the canonical page; each of its axes says
which part of the global extent a rank holds; the product of the axes is a few strided boxes, which
coalesce into `CopyRun`s. What a layer *is* (attention, latent rows, recurrent state) appears
nowhere here.

Contract: a layer comes out certified, or opaque with a `Refusal`. Nothing disappears, nothing is
guessed, nothing is downgraded without a reason (DESIGN 2.7). Layers that are alike are derived and
proven once per call; nothing is remembered between calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vkvmap.boxes import Box, nested
from vkvmap.cache import CacheView, check_storage
from vkvmap.certify import certify
from vkvmap.errors import LayoutError, Refusal, Refuse, RefusedError, SpecError, TilingError
from vkvmap.grid import RankGrid
from vkvmap.holding import AxisPieces, Holding, LocalTokens, deal, range_pieces, token_pieces
from vkvmap.layout import KERNEL_BLOCK, Placement, place
from vkvmap.mapping import CanonicalPageMapping, CopyRun, Family, Mappings, runs_from_boxes
from vkvmap.opaque import opaque_addressing, opaque_mapping, slabs
from vkvmap.recognise import PageAddressing, Recognised, detect_layout, layout_fields
from vkvmap.spec import TOKEN, Axis, Field, LayerSpec, LayerTable, Nest

# ---- one layer -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _GroupMappings:
    """One layer for all ranks of a group, certified."""

    per_rank: tuple[CanonicalPageMapping, ...]
    holdings: tuple[Holding, ...]


def _derive_layer(
    spec: LayerSpec, view: CacheView, grid: RankGrid, rank: int, family: Family
) -> tuple[_GroupMappings, Recognised]:
    """Mappings of one layer on every rank, proven; raises `Refuse`, LayoutError or TilingError."""
    if not spec.described:
        raise Refuse(
            "undescribed",
            "the layer's bytes are not described",
            "describe them as fields (LayerSpec.recurrent, .attention, ...)",
        )
    if spec.has_tokens and view.block_size < 1:
        raise Refuse(
            "layout-shape", "block_size is 0 for a layer with tokens", "pass the block size"
        )
    fields = layout_fields(spec, view)
    _check_per_head(spec, view, grid, family)
    holdings = deal(spec, tuple(fields.values()), grid, view.block_size)
    canonical_nest = _canonical_nest(spec, view, tuple(fields.values()), family)
    span = view.block_size * holdings[rank].shard.count if spec.has_tokens else 0
    recognised = Recognised(spec, view, holdings[rank].local_extent)

    def canonical_extent(this: Field, axis: Axis) -> int:
        return span if axis.name == TOKEN else axis.extent

    canonical, canonical_bytes = place(canonical_nest, fields, canonical_extent)
    agnostic = family == "universal" or holdings[rank].shard.count == 1
    replicas = {
        name: _replica_sets([holding.identity(this) for holding in holdings])
        for name, this in fields.items()
    }
    turns = _replica_sets(
        [tuple(holding.identity(this) for this in fields.values()) for holding in holdings]
    )
    boxes_of: dict[_Held, dict[str, tuple[Box, ...]]] = {}
    runs_of: dict[tuple[_Held, tuple[str, ...]], tuple[CopyRun, ...]] = {}
    pages: dict[tuple[int, ...], tuple[dict[str, Placement], int]] = {}
    per_rank = []
    for this_rank, holding in enumerate(holdings):
        key: _Held = (holding.shard.index, tuple(sorted(holding.units.items())))
        shape = tuple(
            holding.local_extent(f, a) for f in fields.values() for a in f.axes if a.units
        )
        if shape not in pages:
            pages[shape] = _local_page(recognised, holding)
        page, page_bytes = pages[shape]
        if key not in boxes_of:
            boxes_of[key] = {
                name: _field_boxes(this, page[name], canonical[name], holding, recognised)
                for name, this in fields.items()
            }
        turn = turns[this_rank]
        stored = tuple(name for name in fields if replicas[name][this_rank][0] in turn)
        names = tuple(fields)
        for wanted in {names, stored}:
            if (key, wanted) not in runs_of:
                runs_of[key, wanted] = runs_from_boxes(
                    [box for name in wanted for box in boxes_of[key][name]]
                )
        per_rank.append(
            CanonicalPageMapping(
                canonical_page_size_bytes=canonical_bytes,
                local_page_size_bytes=page_bytes,
                runs=runs_of[key, names],
                num_writers=len(turn),
                writer_index=turn.index(this_rank),
                parallelism_agnostic=agnostic,
                store_runs=None if stored == names else runs_of[key, stored],
                span_tokens=span,
            )
        )
    return _GroupMappings(tuple(per_rank), tuple(holdings)), recognised


_Held = tuple[int, tuple[tuple[tuple[str, str], tuple[int, int]], ...]]


def _check_per_head(spec: LayerSpec, view: CacheView, grid: RankGrid, family: Family) -> None:
    if not view.layout.per_head:
        return
    shards = grid.context_shard(0, dcp_sharded=spec.dcp_sharded).count
    if family == "universal" or shards > 1:
        raise Refuse(
            "encoding",
            f"layout {view.layout.name!r} describes whole heads only "
            f"({family} family, {shards} context shards)",
            "describe the bytes within a head as fields with their own axis order",
        )


def _canonical_nest(
    spec: LayerSpec, view: CacheView, fields: Sequence[Field], family: Family
) -> Nest:
    if family == "universal" or spec.kind == "recurrent":
        return spec.canonical
    if family != "native":
        raise SpecError(f"family {family!r}: choose 'native' or 'universal'")
    return view.layout.order.bound_to(fields)


def _local_page(recognised: Recognised, holding: Holding) -> tuple[dict[str, Placement], int]:
    """Page placement under another rank's extents: the layout is the group's."""

    def extent(this: Field, axis: Axis) -> int:
        if axis.name in (TOKEN, KERNEL_BLOCK):
            return recognised.extent(this, axis)
        return holding.local_extent(this, axis)

    return place(Nest((), recognised.orders), recognised.fields, extent)


def _field_boxes(
    this: Field, local: Placement, canonical: Placement, holding: Holding, recognised: Recognised
) -> tuple[Box, ...]:
    axes: list[AxisPieces] = [[(0, 0, ((this.elem, 1, 1),))]]
    view = recognised.view
    for axis in this.axes:
        local_step, canonical_step = local.strides[axis.name], canonical.strides[axis.name]
        if axis.name == TOKEN:
            tokens = LocalTokens(
                view.block_size,
                recognised.kernel_tokens,
                local_step,
                local.strides.get(KERNEL_BLOCK, 0),
            )
            axes.append(token_pieces(tokens, canonical_step, holding.shard))
        else:
            first, count = holding.range_of(this, axis)
            axes.append(range_pieces(first, count, local_step, canonical_step))
    if KERNEL_BLOCK in local.strides and TOKEN not in {axis.name for axis in this.axes}:
        # A span without tokens repeats whole, once per kernel block, in both pages.
        step = local.strides[KERNEL_BLOCK]
        axes.append([(0, 0, ((view.kernel_blocks, step, canonical.strides[KERNEL_BLOCK]),))])
    return nested(local.offset, canonical.offset, axes)


def _replica_sets(identities: Sequence[Any]) -> list[tuple[int, ...]]:
    """Per rank, the sorted ranks that share its identity."""
    sets: dict[Any, list[int]] = {}
    for rank, identity in enumerate(identities):
        sets.setdefault(identity, []).append(rank)
    return [tuple(sets[identity]) for identity in identities]


# ---- whole models --------------------------------------------------------------------------------


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
    known: dict[Any, Any] = {}
    views: dict[str, CacheView] = {}
    proven: dict[str, tuple[_GroupMappings, PageAddressing]] = {}
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
            group, recognised = result
            proven[name] = (group, _rebased(recognised, view))
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
    base = view.tensors[0].address
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
        group, recognised = _derive_layer(spec, view, grid, rank, family)
        certify(group.per_rank)
    except Refuse as refuse:
        return refuse
    except LayoutError as error:
        return Refuse("layout", str(error), "declare the layout that the tensor really has")
    except TilingError as error:
        return Refuse("tiling", str(error), "check head_ranges and the layer's description")
    return group, recognised


def _check_bounds(view: CacheView) -> None:
    try:
        check_storage(view)
    except LayoutError as error:
        raise SpecError(str(error)) from None


def _rebased(recognised: Recognised, view: CacheView) -> PageAddressing:
    return replace(recognised.addressing(), base=view.tensors[0].address)


def _assemble(
    layers: LayerTable,
    views: Mapping[str, CacheView],
    grid: RankGrid,
    rank: int,
    family: Family,
    proven: Mapping[str, tuple[_GroupMappings, PageAddressing]],
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
            group, addressing[name] = proven[name]
            by_layer[name], carrier[name] = group.per_rank[rank], name
            continue
        if name not in refusals:
            refusals[name] = Refusal(
                name,
                "shared-row",
                f"it shares the rows of one tensor with {broken[0]!r}, which is opaque",
                f"make {broken[0]!r} certifiable; until then the whole row is the opaque unit",
            )
        carrier[name] = slab[0]
        addressing[name] = opaque_addressing(slab, views)
        shards = grid.context_shard(rank, dcp_sharded=layers[name].dcp_sharded).count
        by_layer[name] = opaque_mapping(
            addressing[name].page_bytes, grid, rank, views[name].block_size * shards
        )
    ordered = tuple(refusals[name] for name in layers if name in refusals)
    return Mappings(layers, family, grid, rank, by_layer, addressing, ordered, carrier)
