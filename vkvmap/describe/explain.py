"""What a move between two configurations means, layer group by layer group.

Plain values only, for a table or for JSON. Everything is read from the same mappings that a
transfer would run, and from the same packer; only times are estimates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from vkvmap.configuration import Configuration
from vkvmap.derive import derive_group
from vkvmap.describe import estimate
from vkvmap.mapping import CanonicalPageMapping, Mappings
from vkvmap.pack import PlacedLayer, pack
from vkvmap.paged import views_of
from vkvmap.sections import pages_per_chunk
from vkvmap.sharing import FamilyChoice, Sharing, decide
from vkvmap.spec import LayerSpec, LayerTable


@dataclass(frozen=True)
class Kind:
    """Layers of one group that are alike on one side, and one of their pages.

    `fragment_bytes` is the shortest and the longest fragment; `refusal` is empty if certified.
    """

    group: str
    kind: str
    layers: int
    example: str
    certified: bool
    refusal: str
    layout: str
    span_tokens: int
    canonical_page_bytes: int
    local_page_bytes: int
    fragments: int
    fragment_bytes: tuple[int, int]
    runs: int
    num_writers: int
    writer_index: int
    parallelism_agnostic: bool
    mover: str


@dataclass(frozen=True)
class SideReport:
    """One side, seen from one of its ranks.

    Attributes:
        host_bytes_per_token: canonical bytes of one token, over all layers that keep tokens.
        rank_copy_bytes_per_token: what the ranks together would keep if each kept its own page.
        copies_per_block: fragments of one block over all layers: the descriptors of a batched copy.
        descriptor_bytes: the packed descriptor of this rank's whole cache.
        load, store: estimates for `tokens` tokens.
    """

    configuration: str
    ranks: int
    rank: int
    kinds: tuple[Kind, ...]
    certified: bool
    host_bytes_per_token: float
    state_bytes: int
    rank_copy_bytes_per_token: float
    copies_per_block: int
    descriptor_bytes: int
    load_bytes: int
    store_bytes: int
    load: tuple[estimate.Estimate, ...]
    store: tuple[estimate.Estimate, ...]


@dataclass(frozen=True)
class Report:
    """Both sides, and whether they understand each other."""

    family: str
    chunk_tokens: int
    obstacles: tuple[str, ...]
    native_obstacles: tuple[str, ...]
    tokens: int
    link: str
    sides: tuple[SideReport, ...] = field(default_factory=tuple)

    @property
    def possible(self) -> bool:
        """Whether every layer of both sides is certified and its pages may be shared."""
        return not self.obstacles and all(side.certified for side in self.sides)

    def as_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return {"possible": self.possible, **asdict(self)}


def explain(
    table: LayerTable,
    sides: Sequence[Configuration],
    *,
    family: FamilyChoice = "auto",
    rank: int = 0,
    tokens: int = 4096,
    link: str = "pcie5",
) -> Report:
    """Report on a move from ``sides[0]`` to ``sides[1]`` (or on one side alone).

    Args:
        rank: which rank of each side's group to look at; wrapped to the smaller group's size.
        tokens: length of the context that the estimates are for.
        link: a name of `estimate.LINKS`.
    """
    sharing = decide(table, sides, family)
    reports = tuple(
        _side(table, side, sharing, rank % side.grid.size, tokens, estimate.LINKS[link])
        for side in sides
    )
    return Report(
        sharing.family,
        sharing.chunk_tokens,
        sharing.obstacles,
        sharing.native_obstacles,
        tokens,
        link,
        reports,
    )


def _side(
    table: LayerTable,
    side: Configuration,
    sharing: Sharing,
    rank: int,
    tokens: int,
    link: estimate.Link,
) -> SideReport:
    views = views_of(table, table, side, 0)
    group = derive_group(table, views, side.grid, family=sharing.family)
    mine = group[rank]
    refusals = {refusal.layer: refusal for refusal in mine.refusals}
    alike: dict[tuple[Any, ...], list[str]] = {}
    for name, mapping in mine.by_layer.items():
        spec = table[name]
        key = (spec.group, spec.kind, views[name].layout.name, _shape(mapping))
        alike.setdefault(key, []).append(name)
    kinds = tuple(
        _kind(table[names[0]], names, mine.by_layer[names[0]], key[2], refusals.get(names[0]))
        for key, names in alike.items()
    )
    load_bytes, store_bytes, copies = _moved(table, mine, tokens)
    paged = [spec for spec in table.values() if spec.has_tokens]
    mean = load_bytes / copies if copies else 0.0
    return SideReport(
        configuration=str(side),
        ranks=side.ranks,
        rank=rank,
        kinds=kinds,
        certified=all(kind.certified for kind in kinds),
        host_bytes_per_token=float(sum(spec.canonical_bytes(1) for spec in paged)),
        state_bytes=sum(s.canonical_bytes(0) for s in table.values() if not s.has_tokens),
        rank_copy_bytes_per_token=_rank_copies(table, group),
        copies_per_block=sum(
            m.num_fragments for name, m in mine.by_layer.items() if table[name].has_tokens
        ),
        descriptor_bytes=_descriptor_bytes(mine, sharing.chunk_tokens),
        load_bytes=load_bytes,
        store_bytes=store_bytes,
        load=(
            estimate.kernel(link, load_bytes, mean, load=True),
            estimate.copy_engine(link, load_bytes, copies),
        ),
        store=(
            estimate.kernel(link, store_bytes, mean, load=False),
            estimate.copy_engine(link, store_bytes, copies * store_bytes / (load_bytes or 1)),
        ),
    )


def _shape(mapping: CanonicalPageMapping) -> tuple[Any, ...]:
    return (
        mapping.certified,
        mapping.canonical_page_size_bytes,
        mapping.local_page_size_bytes,
        mapping.num_fragments,
        mapping.num_writers,
    )


def _kind(
    spec: LayerSpec,
    names: Sequence[str],
    mapping: CanonicalPageMapping,
    layout: str,
    refusal: Any,
) -> Kind:
    lengths = [run.fragment_size for run in mapping.runs]
    return Kind(
        group=spec.group,
        kind=spec.kind,
        layers=len(names),
        example=names[0],
        certified=mapping.certified,
        refusal="" if refusal is None else f"{refusal.rule}: {refusal.seen}; {refusal.remedy}",
        layout=layout,
        span_tokens=mapping.span_tokens,
        canonical_page_bytes=mapping.canonical_page_size_bytes,
        local_page_bytes=mapping.local_page_size_bytes,
        fragments=mapping.num_fragments,
        fragment_bytes=(min(lengths), max(lengths)),
        runs=len(mapping.runs),
        num_writers=mapping.num_writers,
        writer_index=mapping.writer_index,
        parallelism_agnostic=mapping.parallelism_agnostic,
        mover=estimate.chosen(min(lengths)),
    )


def _moved(table: LayerTable, mappings: Mappings, tokens: int) -> tuple[int, int, int]:
    """Bytes that a load and a store of `tokens` tokens move here, and the copies of the load."""
    load = store = copies = 0
    for name, mapping in mappings.by_layer.items():
        pages = -(-tokens // mapping.span_tokens) if mapping.span_tokens else 1
        if not mapping.certified and table[name].has_tokens and not mapping.span_tokens:
            continue
        load += pages * mapping.local_page_size_bytes
        copies += pages * mapping.num_fragments
        stored = sum(r.fragment_size * r.num_fragments for r in mapping.effective_store_runs)
        store += -(-pages // mapping.num_writers) * stored
    return load, store, copies


def _rank_copies(table: LayerTable, group: Sequence[Mappings]) -> float:
    """Bytes per token over all ranks of a group, each keeping its own pages."""
    total = 0.0
    for mappings in group:
        for mapping in mappings.by_layer.values():
            if mapping.span_tokens:
                total += mapping.local_page_size_bytes / mapping.span_tokens
    return total


def _descriptor_bytes(mappings: Mappings, chunk_tokens: int) -> int:
    pages = pages_per_chunk(mappings, chunk_tokens)
    groups = {group: index for index, group in enumerate(pages)}
    placed = []
    layers: Mapping[str, LayerSpec] = mappings.layers
    for layer_id, name in enumerate(layers):
        mapping = mappings.by_layer.get(name)
        if mapping is None or mappings.carrier[name] != name:
            continue
        group = layers[name].group
        placed.append(
            PlacedLayer(
                layer_id=layer_id,
                group=groups[group],
                load_runs=mapping.runs,
                store_runs=mapping.effective_store_runs,
                num_writers=mapping.num_writers,
                writer_index=mapping.writer_index,
                addressing=mappings.addressing[name],
                host_base=0,
                host_row_stride=1 << 40,
                host_page_stride=mapping.canonical_page_size_bytes,
                pages_per_row=pages[group],
                num_rows=1,
            )
        )
    return int(pack(placed, len(groups)).nbytes)
