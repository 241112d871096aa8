"""Hypothesis strategies for layers, grids and layouts, over the whole product."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from tests import oracle
from vkvmap import CacheView, LayerSpec, RankGrid

ATTENTION = ("split_nhd", "split_hnd", "packed_nhd", "packed_hnd", "cpu_hnd")
SCALED = (
    *ATTENTION[:4],
    "packed_nhd_scaled",
    "packed_hnd_scaled",
    "nhd_planar_scales",
    "hnd_planar_scales",
)


@dataclass(frozen=True)
class World:
    """One layer under one configuration."""

    spec: LayerSpec
    layout: str
    grid: RankGrid
    block_size: int
    kernel_blocks: int
    family: str

    @property
    def heads(self) -> int | None:
        return self.spec.num_kv_heads

    @property
    def legal(self) -> bool:
        return oracle.legal(self.grid, self.heads, self.block_size, self.spec.dcp_sharded)

    @property
    def shards(self) -> int:
        return oracle.shard_of(self.grid, 0, self.spec.dcp_sharded)[0]

    def held_heads(self, rank: int) -> list[int] | None:
        if self.heads is None:
            return None
        return oracle.parts_of(self.heads, self.grid.tp, rank % self.grid.tp)

    def truth(self, content: object) -> oracle.Truth:
        return oracle.truth_of(self.spec, self.block_size * self.shards, content)

    def held(self, truth: oracle.Truth, rank: int) -> oracle.Truth:
        tokens = oracle.tokens_of(self.grid, rank, self.block_size, self.spec.dcp_sharded)
        return truth.some(tokens, self.held_heads(rank))

    def view(self, blocks: int = 2, spare_heads: int = 0) -> CacheView:
        """An empty cache of this rank's shape (all ranks' are alike)."""
        heads = self.heads
        count = None if heads is None else max(1, heads // self.grid.tp) + spare_heads
        part = oracle.truth_of(self.spec, self.block_size // self.kernel_blocks, oracle.counted())
        if count is not None:
            some = [0] * count
            part = part.some(list(range(self.block_size // self.kernel_blocks)), some)
        shape = oracle.tensor_shape(self.layout, blocks * self.kernel_blocks, part)
        return CacheView.of(
            oracle.tensor(self.layout, shape),
            self.layout,
            self.block_size,
            kernel_blocks=self.kernel_blocks,
        )


@st.composite
def grids(draw: st.DrawFn) -> RankGrid:
    return RankGrid(
        tp=draw(st.sampled_from([1, 2, 3, 4, 6, 8])),
        dcp=draw(st.sampled_from([1, 1, 2, 4])),
        pcp=draw(st.sampled_from([1, 1, 2])),
        interleave=draw(st.sampled_from([1, 2, 3, 4, 8])),
        pcp_mode=draw(st.sampled_from(["shards", "replicates"])),
    )


@st.composite
def specs(draw: st.DrawFn) -> tuple[LayerSpec, tuple[str, ...]]:
    """A layer and the layouts that may hold it."""
    kind = draw(st.sampled_from(["attention", "scaled", "mla", "indexer", "cells"]))
    heads = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    size = draw(st.sampled_from([1, 3, 4, 5, 16]))
    elem = draw(st.sampled_from([1, 2, 4]))
    sharded = draw(st.sampled_from([True, True, False]))
    if kind == "mla":
        return LayerSpec.mla("layer", row_bytes=size * elem, dcp_sharded=sharded), ("mla",)
    if kind == "indexer":
        spec = LayerSpec.indexer("layer", value_bytes=size, scale_bytes=elem, dcp_sharded=sharded)
        return spec, ("planar", "mla")
    if kind == "cells":
        spec = LayerSpec.cells(
            "layer", num_kv_heads=heads, cell_bytes=size, dtype="nvfp4", dcp_sharded=sharded
        )
        return spec, ("packed_nhd", "packed_hnd")
    value_size = draw(st.sampled_from([size, size, 2]))
    spec = LayerSpec.attention(
        "layer",
        num_kv_heads=heads,
        head_size=size,
        head_size_v=value_size,
        elem=elem,
        scale_bytes=draw(st.sampled_from([1, 2, 4])) if kind == "scaled" else 0,
        dcp_sharded=sharded,
    )
    layouts = SCALED if kind == "scaled" else ATTENTION
    if value_size != size:
        layouts = tuple(name for name in layouts if not name.startswith("split"))
    return spec, layouts


@st.composite
def worlds(draw: st.DrawFn, *, legal: bool | None = None) -> World:
    spec, layouts = draw(specs())
    # "mla" as a layout of an indexer keeps its rows whole; the oracle spells that out as rows.
    layout = draw(
        st.sampled_from([name for name in layouts if spec.kind != "indexer" or name != "mla"])
    )
    world = World(
        spec,
        layout,
        draw(grids()),
        draw(st.sampled_from([1, 2, 4, 6, 8, 16])),
        1,
        draw(st.sampled_from(["native", "universal"])),
    )
    divisors = [k for k in (1, 1, 2, 3, 4) if world.block_size % k == 0]
    world = World(
        spec, layout, world.grid, world.block_size, draw(st.sampled_from(divisors)), world.family
    )
    if legal:
        from hypothesis import assume

        assume(world.legal)
    return world


def positions(content: np.ndarray, canonical: np.ndarray) -> np.ndarray:
    """Where each counted byte of `content` lies in `canonical`."""
    where = np.full(int(canonical.max()) + 1, -1, dtype=np.int64)
    where[canonical] = np.arange(canonical.size)
    return where[content]
