"""May pages stored under one configuration be loaded under another, and in what form?

The rules of DESIGN 2.5 and nothing else: *native* pages are shared where layout, encoding and span
agree; *universal* pages wherever the chunk has as many tokens. Whether each side's layers can be
certified at all is the derivation's word, not this module's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import lcm
from typing import Literal

from vkvmap.configuration import Configuration
from vkvmap.mapping import Family
from vkvmap.paged import layout_for
from vkvmap.spec import LayerSpec, LayerTable

FamilyChoice = Literal["auto", "native", "universal"]


@dataclass(frozen=True)
class Sharing:
    """How two configurations share pages.

    Attributes:
        family: the byte order they share, asked for or chosen.
        chunk_tokens: tokens of a chunk that is whole pages on both sides.
        obstacles: why they may not share; empty if they may.
        native_obstacles: what keeps them from sharing native pages.
    """

    family: Family
    chunk_tokens: int
    obstacles: tuple[str, ...]
    native_obstacles: tuple[str, ...]


def span_tokens(spec: LayerSpec, configuration: Configuration) -> int:
    """Tokens of one canonical page of `spec`; 0 for layers that keep no tokens."""
    if not spec.has_tokens:
        return 0
    shard = configuration.grid.context_shard(0, dcp_sharded=spec.dcp_sharded)
    return configuration.block_size * shard.count


def decide(
    table: LayerTable, sides: Iterable[Configuration], family: FamilyChoice = "auto"
) -> Sharing:
    """The family and chunk that the configurations can share; ``"auto"`` prefers native."""
    configurations = list(sides)
    spans = {
        span_tokens(spec, side)
        for spec in table.values()
        for side in configurations
        if spec.has_tokens
    }
    obstacles = tuple(dict.fromkeys(_native_obstacles(table, configurations)))
    chosen: Family = "universal" if obstacles else "native"
    if family != "auto":
        chosen = family
    return Sharing(
        chosen,
        lcm(*spans) if spans else 1,
        obstacles if chosen == "native" else (),
        obstacles,
    )


def _native_obstacles(table: LayerTable, sides: list[Configuration]) -> Iterable[str]:
    first = sides[0]
    for spec in table.values():
        for side in sides[1:]:
            layouts = [layout_for(spec, s.layout) for s in (first, side)]
            if layouts[0].name != layouts[1].name:
                yield (
                    f"native pages keep their layout, and {layouts[0].name} is not "
                    f"{layouts[1].name}"
                )
            spans = [span_tokens(spec, s) for s in (first, side)]
            if spans[0] != spans[1]:
                yield (
                    f"native pages of group {spec.group!r} span {spans[0]} tokens on one side, "
                    f"{spans[1]} on the other"
                )
