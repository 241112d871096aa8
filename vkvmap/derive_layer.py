"""One layer on every rank of a group: the multiplication of layouts and holdings.

A field has a placement in the local page and one in the canonical page; each of its axes says
which part of the global extent a rank holds; the product of the axes is a few strided boxes, which
coalesce into `CopyRun`s. What a layer *is* (attention, latent rows, recurrent state) appears
nowhere here. What comes out is not yet proven; `derive.py` has `certify.py` do that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vkvmap.boxes import Box, nested
from vkvmap.cache import CacheView
from vkvmap.errors import Refuse
from vkvmap.grid import RankGrid
from vkvmap.holding import AxisPieces, Holding, LocalTokens, deal, range_pieces, token_pieces
from vkvmap.layout import KERNEL_BLOCK, Placement, place
from vkvmap.mapping import CanonicalPageMapping, CopyRun, Family, runs_from_boxes
from vkvmap.recognise import Recognised, layout_fields
from vkvmap.spec import TOKEN, Axis, Field, LayerSpec, Nest


class LayerDerivation:
    """The mappings of one layer on all ranks of a group, and how this rank's cache is addressed.

    Args:
        spec: the layer.
        view: the cache of `rank`; the layout is the group's.
        grid, rank, family: as for `derive_canonical_mappings`.

    Raises `Refuse` or LayoutError where the layer cannot be mapped.
    """

    def __init__(
        self, spec: LayerSpec, view: CacheView, grid: RankGrid, rank: int, family: Family
    ) -> None:
        _check_described(spec, view)
        self._view = view
        self._fields = layout_fields(spec, view)
        _check_encoding(spec, view, grid, family)
        fields = tuple(self._fields.values())
        self._holdings = deal(spec, fields, grid, view.block_size)
        shards = self._holdings[rank].shard.count
        self._span = view.block_size * shards if spec.has_tokens else 0
        self._agnostic = family == "universal" or shards == 1
        self.recognised = Recognised(spec, view, self._holdings[rank].local_extent)
        described = family == "universal" or spec.kind == "recurrent"
        order = spec.canonical if described else view.layout.order.bound_to(fields)
        self._canonical, self._canonical_bytes = place(order, self._fields, self._global_extent)
        self._pages: dict[Any, tuple[dict[str, Placement], int]] = {}
        self._boxes: dict[Any, dict[str, tuple[Box, ...]]] = {}
        self._runs: dict[Any, tuple[CopyRun, ...]] = {}

    def per_rank(self) -> tuple[CanonicalPageMapping, ...]:
        """The mapping of every rank, by rank. Ranks that hold the same share their runs."""
        fields = self._fields.values()
        identities = [tuple(held.identity(this) for this in fields) for held in self._holdings]
        turns = _replica_sets(identities)
        replicas = [_replica_sets(column) for column in zip(*identities, strict=True)]
        names = tuple(self._fields)
        mappings = []
        for rank, (holding, turn) in enumerate(zip(self._holdings, turns, strict=True)):
            # Replicas of the whole page take turns. A field that more ranks hold than the page
            # (a replicated segment beside sharded ones) is stored by the first page that has it.
            stored = tuple(
                name for name, sets in zip(names, replicas, strict=True) if sets[rank][0] in turn
            )
            mappings.append(
                CanonicalPageMapping(
                    canonical_page_size_bytes=self._canonical_bytes,
                    local_page_size_bytes=self._page_of(holding)[1],
                    runs=self._runs_of(holding, names),
                    num_writers=len(turn),
                    writer_index=turn.index(rank),
                    parallelism_agnostic=self._agnostic,
                    store_runs=None if stored == names else self._runs_of(holding, stored),
                    span_tokens=self._span,
                )
            )
        return tuple(mappings)

    def _global_extent(self, this: Field, axis: Axis) -> int:
        return self._span if axis.name == TOKEN else axis.extent

    def _page_of(self, holding: Holding) -> tuple[dict[str, Placement], int]:
        """Page placement under a rank's own extents."""

        def extent(this: Field, axis: Axis) -> int:
            if axis.name in (TOKEN, KERNEL_BLOCK):
                return self.recognised.extent(this, axis)
            return holding.local_extent(this, axis)

        key = tuple(
            holding.local_extent(this, axis)
            for this in self._fields.values()
            for axis in this.axes
            if axis.units
        )
        if key not in self._pages:
            self._pages[key] = place(Nest((), self.recognised.orders), self._fields, extent)
        return self._pages[key]

    def _runs_of(self, holding: Holding, names: tuple[str, ...]) -> tuple[CopyRun, ...]:
        held = (holding.shard.index, tuple(sorted(holding.units.items())))
        if held not in self._boxes:
            page, _ = self._page_of(holding)
            self._boxes[held] = {
                name: self._field_boxes(this, page[name], holding)
                for name, this in self._fields.items()
            }
        if (held, names) not in self._runs:
            boxes = [box for name in names for box in self._boxes[held][name]]
            self._runs[held, names] = runs_from_boxes(boxes)
        return self._runs[held, names]

    def _field_boxes(self, this: Field, local: Placement, holding: Holding) -> tuple[Box, ...]:
        canonical = self._canonical[this.name]
        axes: list[AxisPieces] = [[(0, 0, ((this.elem, 1, 1),))]]
        for axis in this.axes:
            step, canonical_step = local.strides[axis.name], canonical.strides[axis.name]
            if axis.name == TOKEN:
                slots = LocalTokens(
                    self._view.block_size,
                    self.recognised.kernel_tokens,
                    step,
                    local.strides.get(KERNEL_BLOCK, 0),
                )
                axes.append(token_pieces(slots, canonical_step, holding.shard))
            else:
                first, count = holding.range_of(this, axis)
                axes.append(range_pieces(first, count, step, canonical_step))
        return nested(local.offset, canonical.offset, axes)


def _check_described(spec: LayerSpec, view: CacheView) -> None:
    if not spec.described:
        raise Refuse(
            "undescribed",
            "the layer's bytes are not described",
            "describe them as fields (LayerSpec.recurrent, .attention, ...)",
        )
    if spec.has_tokens and view.block_size < 1:
        raise Refuse(
            "layout", "block_size is 0 for a layer with tokens", "pass the block size in tokens"
        )


def _check_encoding(spec: LayerSpec, view: CacheView, grid: RankGrid, family: Family) -> None:
    """What is not described per token cannot be cut, or put into another order, by token."""
    if view.kernel_blocks > 1 and (view.layout.per_head or not spec.has_tokens):
        raise Refuse(
            "kernel-blocks",
            f"{view.kernel_blocks} kernel blocks per block, but layout {view.layout.name!r} does "
            "not describe single tokens",
            "describe the bytes per token, or make manager and kernel blocks equal",
        )
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


def _replica_sets(identities: Sequence[Any]) -> list[tuple[int, ...]]:
    """Per rank, the sorted ranks that share its identity."""
    sets: dict[Any, list[int]] = {}
    for rank, identity in enumerate(identities):
        sets.setdefault(identity, []).append(rank)
    return [tuple(sets[identity]) for identity in identities]
