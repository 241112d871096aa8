"""What a rank holds: its part of every axis, as pieces that a mapping can be multiplied from.

The only place where parallelism meets bytes: a grid and a layer go in, and out come, per rank,
index ranges of sharded axes and the token interleave of its context shard (DESIGN 2.2, 2.3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

from vkvmap.boxes import Box, Level, folded
from vkvmap.errors import Refuse
from vkvmap.grid import ContextShard, RankGrid, unequal_shards
from vkvmap.spec import TOKEN, Axis, Field, LayerSpec

AxisPieces = list[tuple[int, int, tuple[Level, ...]]]


@dataclass(frozen=True)
class LocalTokens:
    """Byte steps of local token slots: within a kernel block, and from one to the next."""

    slots: int
    kernel_tokens: int
    step: int
    kernel_step: int

    def offset(self, slot: int) -> int:
        return slot // self.kernel_tokens * self.kernel_step + slot % self.kernel_tokens * self.step


def token_pieces(local: LocalTokens, canonical_step: int, shard: ContextShard) -> AxisPieces:
    """Local slot `s` holds token ``(s // I * C + c) * I + s % I`` (DESIGN 2.3), as pieces.

    Slots run in two rhythms, kernel blocks and interleave; pieces are as long as both allow and
    fold back into levels wherever one rhythm divides the other.
    """
    interleave = local.slots if shard.count == 1 else shard.interleave
    length = gcd(interleave, local.kernel_tokens)
    starts = []
    for slot in range(0, local.slots, length):
        token = (slot // interleave * shard.count + shard.index) * interleave + slot % interleave
        starts.append(
            Box(
                local.offset(slot),
                token * canonical_step,
                ((length, local.step, canonical_step),),
            )
        )
    return [(box.left, box.right, box.levels) for box in folded(starts)]


def range_pieces(first: int, count: int, local_step: int, canonical_step: int) -> AxisPieces:
    return [(0, first * canonical_step, ((count, local_step, canonical_step),))]


@dataclass(frozen=True)
class Holding:
    """What one rank holds of one layer: units per sharded field axis, and the context shard."""

    shard: ContextShard
    units: Mapping[tuple[str, str], tuple[int, int]]

    def range_of(self, this: Field, axis: Axis) -> tuple[int, int]:
        """First index and count of `axis` on this rank (token axis excluded)."""
        if not axis.units:
            return 0, axis.extent
        first, stop = self.units[this.name, axis.name]
        width = axis.extent // axis.units
        return first * width, (stop - first) * width

    def local_extent(self, this: Field, axis: Axis) -> int:
        return self.range_of(this, axis)[1]

    def identity(self, this: Field) -> tuple[Any, ...]:
        """Ranks with equal identities hold identical bytes of the field."""
        names = {axis.name for axis in this.axes}
        held = tuple(self.units.get((this.name, axis.name)) for axis in this.axes)
        return held, self.shard.index if TOKEN in names else 0


def deal(
    spec: LayerSpec, fields: Sequence[Field], grid: RankGrid, block_size: int
) -> list[Holding]:
    """Per rank, what it holds; raises `Refuse` where heads or shards do not deal out."""
    shards = [grid.context_shard(rank, dcp_sharded=spec.dcp_sharded) for rank in range(grid.size)]
    if not any(axis.name == TOKEN for this in fields for axis in this.axes):
        shards = [ContextShard(1, 0, 1)] * grid.size
    units: list[dict[tuple[str, str], tuple[int, int]]] = [{} for _ in range(grid.size)]
    for this in fields:
        for axis in this.axes:
            if not axis.units:
                continue
            for rank in range(grid.size):
                held = grid.held_units(rank, axis.units, spec.name)
                if held is None:
                    raise Refuse(
                        "heads-divide",
                        f"{axis.units} {axis.name}s of {this.name!r} do not deal out over "
                        f"tp={grid.tp}",
                        "choose a tp that divides the count or is a multiple of it, or pass "
                        "explicit head_ranges",
                    )
                units[rank][this.name, axis.name] = held
    _check_shards(spec, fields, units, shards, block_size)
    return [Holding(shard, held) for shard, held in zip(shards, units, strict=True)]


def _check_shards(
    spec: LayerSpec,
    fields: Sequence[Field],
    units: Sequence[Mapping[tuple[str, str], tuple[int, int]]],
    shards: Sequence[ContextShard],
    block_size: int,
) -> None:
    shard = shards[0]
    if shard.count == 1:
        return
    if block_size % shard.interleave:
        raise Refuse(
            "interleave",
            f"interleave {shard.interleave} does not divide the block of {block_size} tokens",
            "choose an interleave that divides the block size",
        )
    for this in fields:
        if TOKEN not in {axis.name for axis in this.axes}:
            continue
        sharded = [axis.name for axis in this.axes if axis.units]
        held = [rank[this.name, sharded[0]] if sharded else (0, 1) for rank in units]
        unequal = unequal_shards(held, shards)
        if unequal:
            unit, counts = unequal
            raise Refuse(
                "context-shards",
                f"the holders of head {unit} cover the {shard.count} context shards "
                f"{dict(counts)} times, equally often is needed",
                "choose dcp so that it divides the replication of KV heads, or keep the layer out "
                "of DCP (dcp_sharded=False)",
            )
