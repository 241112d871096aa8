"""Mappings: how a rank's page relates to the canonical page, as strided runs.

Values only. Who derives them is `derive.py`, who proves them is `certify.py`; anybody may also
write one by hand and have it proven.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from vkvmap.boxes import Box, folded
from vkvmap.errors import Refusal
from vkvmap.grid import RankGrid
from vkvmap.recognise import PageAddressing
from vkvmap.spec import LayerTable

Family = Literal["native", "universal"]


@dataclass(frozen=True)
class CopyRun:
    """A strided set of equal fragments between a local and a canonical page; all in bytes."""

    local_offset: int
    canonical_offset: int
    fragment_size: int
    num_fragments: int
    local_stride: int
    canonical_stride: int


@dataclass(frozen=True)
class CanonicalPageMapping:
    """How one rank's page of one layer maps into the canonical page.

    Attributes:
        canonical_page_size_bytes, local_page_size_bytes: page sizes, padding not counted.
        runs: every local byte, with its canonical place; what a load moves.
        num_writers, writer_index: page `b` is stored iff ``b % num_writers == writer_index``.
        parallelism_agnostic: the canonical page is the same under any configuration that may
            share it (DESIGN 2.5).
        store_runs: what a store moves where that is less than `runs` (replicated parts that
            another rank writes, writer policies); None means all of `runs`.
        certified: False for the opaque fallback.
        span_tokens: tokens of the canonical page; 0 for layers without tokens.
    """

    canonical_page_size_bytes: int
    local_page_size_bytes: int
    runs: tuple[CopyRun, ...]
    num_writers: int
    writer_index: int
    parallelism_agnostic: bool
    store_runs: tuple[CopyRun, ...] | None = None
    certified: bool = True
    span_tokens: int = 0

    def is_writer(self, block_id: int) -> bool:
        """Whether this rank stores canonical page `block_id` (the host-side page id)."""
        return block_id % self.num_writers == self.writer_index

    @property
    def effective_store_runs(self) -> tuple[CopyRun, ...]:
        """The runs that a store by this rank moves."""
        return self.runs if self.store_runs is None else self.store_runs

    @property
    def num_fragments(self) -> int:
        """Fragments that a load of one page moves."""
        return sum(run.num_fragments for run in self.runs)


@dataclass(frozen=True)
class Mappings:
    """One rank's mappings for all its layers, and why some of them are opaque.

    Attributes:
        layers: the model's layer table that they were derived from.
        family, grid, rank: for which canonical order and which worker.
        by_layer: layer name -> mapping, in model order; every cache layer has one.
        addressing: layer name -> how its page bytes become addresses.
        refusals: why layers are opaque, in model order; empty if all are certified.
        carrier: layer name -> the layer that moves its bytes; itself, except where an opaque row
            of a shared tensor is moved once for all layers in it.
    """

    layers: LayerTable
    family: Family
    grid: RankGrid
    rank: int
    by_layer: Mapping[str, CanonicalPageMapping]
    addressing: Mapping[str, PageAddressing] = field(default_factory=dict)
    refusals: tuple[Refusal, ...] = ()
    carrier: Mapping[str, str] = field(default_factory=dict)

    def summary(self) -> str:
        """Counts of certified and opaque layers, then each distinct reason, as lines of text."""
        certified = sum(mapping.certified for mapping in self.by_layer.values())
        lines = [
            f"{certified} of {len(self.by_layer)} layers certified ({self.family} family), "
            f"{len(self.by_layer) - certified} opaque"
        ]
        alike: dict[tuple[str, str, str], list[str]] = {}
        for refusal in self.refusals:
            key = (refusal.rule, refusal.seen, refusal.remedy)
            alike.setdefault(key, []).append(refusal.layer)
        for (rule, seen, remedy), names in alike.items():
            which = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
            lines.append(f"{which}: {rule}: {seen}; {remedy}")
        return "\n".join(lines)


def runs_from_boxes(boxes: Sequence[Box]) -> tuple[CopyRun, ...]:
    """Cut boxes to two levels: the longest level above the fragment stays a stride."""
    runs = []
    for box in folded(boxes):
        strided = sorted(box.strided, key=lambda level: -level[0])
        if not strided:
            runs.append(CopyRun(box.left, box.right, box.fragment, 1, box.fragment, box.fragment))
            continue
        count, left_step, right_step = strided[0]
        offsets = [(box.left, box.right)]
        for outer, left, right in sorted(strided[1:], key=lambda level: level[2]):
            offsets = [(a + i * left, b + i * right) for i in range(outer) for a, b in offsets]
        runs.extend(
            CopyRun(left, right, box.fragment, count, left_step, right_step)
            for left, right in offsets
        )
    return tuple(runs)
