"""Who holds what: the rank grid of one pipeline stage.

Pure arithmetic on ranks (DESIGN 2.1 to 2.4). A stage is exactly `tp x pcp` workers with
``rank = pcp_rank * tp + tp_rank``; decode context parallelism reuses tensor-parallel ranks and adds
none. Heads and context shards are answered separately, and whether they combine legally is decided
by the definition, not by a divisibility shortcut: among the ranks that hold a head, every context
shard must occur, equally often.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from vkvmap.errors import SpecError

#: Far above any worker group; everything per rank is bounded by it.
MOST_RANKS = 1 << 16

PcpMode = Literal["shards", "replicates"]


@dataclass(frozen=True)
class ContextShard:
    """One rank's part of the tokens: shard `index` of `count`, cut every `interleave` tokens."""

    count: int
    index: int
    interleave: int


@dataclass(frozen=True)
class RankGrid:
    """The parallel configuration of one worker group.

    Args:
        tp: tensor-parallel size.
        dcp: decode context parallel size, laid over the TP ranks.
        pcp: prefill context parallel size; multiplies the number of ranks.
        interleave: consecutive tokens that stay on one context shard (DESIGN 2.3).
        pcp_mode: whether PCP ranks hold shards (``"shards"``) or replicas (``"replicates"``).
        world_size: workers that really exist; anything but ``tp * pcp`` is refused as a group.
        head_ranges: layer name -> per tp_rank ``(first, stop)`` heads, where heads are not
            dealt out evenly.
    """

    tp: int = 1
    dcp: int = 1
    pcp: int = 1
    interleave: int = 1
    pcp_mode: PcpMode = "shards"
    world_size: int | None = None
    head_ranges: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("tp", "dcp", "pcp", "interleave"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise SpecError(f"grid {name}={value!r}: must be a positive integer")
        if max(self.size, self.dcp) > MOST_RANKS:
            raise SpecError(
                f"grid of tp={self.tp} x pcp={self.pcp} with dcp={self.dcp}: a worker group has at "
                f"most {MOST_RANKS} ranks; pipeline stages are groups of their own"
            )
        if self.pcp_mode not in ("shards", "replicates"):
            raise SpecError(f"grid pcp_mode={self.pcp_mode!r}: choose 'shards' or 'replicates'")
        for layer, ranges in self.head_ranges.items():
            if len(ranges) != self.tp:
                raise SpecError(
                    f"layer {layer!r}: head_ranges lists {len(ranges)} ranges, one per tp_rank "
                    f"is needed ({self.tp})"
                )

    @property
    def size(self) -> int:
        """Ranks of the worker group."""
        return self.tp * self.pcp

    @property
    def is_whole(self) -> bool:
        """Whether the worker group is exactly the TP x PCP grid."""
        return self.world_size is None or self.world_size == self.size

    def tp_rank(self, rank: int) -> int:
        """Position of `rank` on the tensor-parallel axis."""
        return rank % self.tp

    def pcp_rank(self, rank: int) -> int:
        """Position of `rank` on the prefill-context-parallel axis."""
        return rank // self.tp

    def context_shard(self, rank: int, *, dcp_sharded: bool = True) -> ContextShard:
        """The tokens that `rank` holds; ``dcp_sharded=False`` counts as ``dcp=1`` (DESIGN 2.3)."""
        dcp = self.dcp if dcp_sharded else 1
        tp_rank, pcp_rank = self.tp_rank(rank), self.pcp_rank(rank)
        if self.pcp_mode == "shards":
            return ContextShard(dcp * self.pcp, pcp_rank * dcp + tp_rank % dcp, self.interleave)
        return ContextShard(dcp, (tp_rank * self.pcp + pcp_rank) % dcp, self.interleave)

    def held_units(self, rank: int, units: int, layer: str | None = None) -> tuple[int, int] | None:
        """``(first, stop)`` of the `units` indivisible shards (KV heads, groups) that `rank` holds.

        None where they do not deal out: neither count divides the other (DESIGN 2.2).
        """
        tp_rank = self.tp_rank(rank)
        if layer is not None and layer in self.head_ranges:
            first, stop = self.head_ranges[layer][tp_rank]
            return (first, stop) if 0 <= first < stop <= units else None
        if units >= self.tp:
            if units % self.tp:
                return None
            share = units // self.tp
            return tp_rank * share, (tp_rank + 1) * share
        if self.tp % units:
            return None
        unit = tp_rank // (self.tp // units)
        return unit, unit + 1


def unequal_shards(
    held: Sequence[tuple[int, int]], shards: Sequence[ContextShard]
) -> tuple[int, Counter[int]] | None:
    """First unit whose holders do not cover every context shard equally often, with its counts.

    Args:
        held: per rank, the ``(first, stop)`` units it holds.
        shards: per rank, the context shard it holds.
    """
    holders: dict[tuple[int, int], Counter[int]] = {}
    for units, shard in zip(held, shards, strict=True):
        holders.setdefault(units, Counter())[shard.index] += 1
    count = shards[0].count
    for (first, _), seen in holders.items():
        if len(seen) != count or len(set(seen.values())) != 1:
            return first, Counter({index: seen[index] for index in range(count)})
    return None
