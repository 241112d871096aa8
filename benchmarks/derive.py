"""What deriving and proving the mappings of a whole group costs, at engine start-up.

Contenders: all layers in one call (alike layers are derived once), and the same layers one call
each, which is what a derivation pays that does not notice that they are alike. Before anything is
timed, the byte map of every rank is compared with an enumeration of coordinates.

Prediction: one derivation of a layer for 8 ranks costs about 1 ms whatever the block size, because
pages are boxes, not bytes; sharing makes 80 layers cost little more than one.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import Report, Result, interleaved, parser, spread
from tests import oracle
from vkvmap import LayerSpec, LayerTable, RankGrid, derive_group
from vkvmap.conformance import byte_map, view_of
from vkvmap.mapping import Mappings


@dataclass(frozen=True)
class Case:
    """A whole group of ranks and its layers; `limit_ms` is the figure to stay below."""

    name: str
    spec: LayerSpec
    layers: int
    grid: RankGrid
    layout: str
    block_size: int
    limit_ms: float


def attention(heads: int) -> LayerSpec:
    return LayerSpec.attention("layer", num_kv_heads=heads, head_size=128)


TP8, TP8_PCP2, TP64 = RankGrid(tp=8), RankGrid(tp=8, pcp=2), RankGrid(tp=64, dcp=64)
MLA = LayerSpec.mla("layer", row_bytes=1152)

CASES = [
    Case("80 layers, tp=8, split NHD, block 16", attention(8), 80, TP8, "split_nhd", 16, 50),
    Case("80 layers, tp=8, split NHD, block 256", attention(8), 80, TP8, "split_nhd", 256, 100),
    Case("61 MLA layers, tp=64, dcp=64, block 64", MLA, 61, TP64, "mla", 64, 100),
    Case("94 layers, tp=8, pcp=2, block 256", attention(4), 94, TP8_PCP2, "split_nhd", 256, 200),
]


def derive(case: Case, names: list[str]) -> tuple[Mappings, ...]:
    heads = case.spec.num_kv_heads
    cell = 1152 if heads is None else 256
    held = 1 if heads is None else max(1, heads // case.grid.tp)
    table = LayerTable([case.spec.renamed(name) for name in names])
    view = view_of(case.layout, block_size=case.block_size, heads=held, cell=cell)
    return derive_group(table, dict.fromkeys(names, view), case.grid, strict=True)


def verify(case: Case) -> None:
    """Every rank's byte map, against coordinates."""
    span = case.block_size * oracle.shard_of(case.grid, 0, True)[0]
    truth = oracle.truth_of(case.spec, span, oracle.counted())
    canonical = oracle.page(case.layout, truth)
    where = np.empty(canonical.size, dtype=np.int64)
    where[canonical] = np.arange(canonical.size)
    heads = case.spec.num_kv_heads
    for rank, mappings in enumerate(derive(case, ["layer"])):
        tokens = oracle.tokens_of(case.grid, rank, case.block_size, True)
        parts = None if heads is None else oracle.parts_of(heads, case.grid.tp, rank % case.grid.tp)
        local = oracle.page(case.layout, truth.some(tokens, parts))
        if not np.array_equal(byte_map(mappings.by_layer["layer"]), where[local]):
            raise SystemExit(f"{case.name}: rank {rank} maps wrong bytes")


def main() -> None:
    arguments = parser(__doc__ or "").parse_args()
    report = Report(arguments.json)
    for case in CASES:
        verify(case)
        names = [f"layer{i}" for i in range(case.layers)]

        def together(case: Case = case, names: list[str] = names) -> object:
            return derive(case, names)

        def apart(case: Case = case, names: list[str] = names) -> object:
            return [derive(case, [name]) for name in names]

        samples = interleaved({"together": together, "apart": apart}, rounds=arguments.rounds)
        low, ratio, high = spread(samples["together"], samples["apart"])
        value, baseline = (samples[name].median * 1e3 for name in ("together", "apart"))
        note = f"of one call per layer ({low:.3g}..{high:.3g}); below {case.limit_ms:g} ms wanted"
        report.add(Result(f"derive+certify: {case.name}", value, "ms", baseline, ratio), note)
    report.write()


if __name__ == "__main__":
    main()
