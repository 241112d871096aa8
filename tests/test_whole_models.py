"""Whole models in one call: uneven shards, pipeline stages, shared rows, hybrids with a summary."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import oracle
from tests.worlds import positions
from vkvmap import (
    CacheView,
    LayerSpec,
    LayerTable,
    RankGrid,
    Region,
    TransferPlan,
    derive_canonical_mappings,
    derive_group,
)
from vkvmap.conformance import byte_map
from vkvmap.layout import state_layout
from vkvmap.sections import sections_for

HEADS, HEAD, BLOCK = 8, 4, 4


def attention(name: str, group: str = "full") -> LayerSpec:
    return LayerSpec.attention(name, num_kv_heads=HEADS, head_size=HEAD, elem=1, group=group)


# ---- uneven head shards --------------------------------------------------------------------------


@given(
    st.lists(st.integers(1, HEADS - 1), max_size=3, unique=True).map(sorted),
    st.sampled_from(["packed_nhd", "packed_hnd", "split_nhd", "split_hnd"]),
    st.sampled_from(["native", "universal"]),
)
def test_heads_may_be_dealt_out_by_explicit_ranges(
    cuts: list[int], layout: str, family: str
) -> None:
    bounds = [0, *cuts, HEADS]
    ranges = list(pairwise(bounds))
    grid = RankGrid(tp=len(ranges), head_ranges={"a": ranges})
    truth = oracle.truth_of(attention("a"), BLOCK, oracle.counted())
    canonical = oracle.canonical(family, layout, truth)
    for rank, (first, stop) in enumerate(ranges):
        held = truth.some(list(range(BLOCK)), list(range(first, stop)))
        tensor = oracle.tensor(layout, oracle.tensor_shape(layout, 2, held))
        mappings = derive_canonical_mappings(
            LayerTable([attention("a")]),
            {"a": CacheView.of(tensor, layout, BLOCK)},
            grid,
            rank,
            family=family,
            strict=True,
        )
        mapping = mappings.by_layer["a"]
        assert np.array_equal(byte_map(mapping), positions(oracle.page(layout, held), canonical))


@pytest.mark.parametrize(
    "ranges",
    [
        [(0, 3), (2, 8)],  # two writers of head 2, of which neither holds the other's page
        [(0, 3), (4, 8)],  # nobody holds head 3
        [(0, 3), (3, 9)],  # beyond the last head
        [(3, 3), (0, 8)],  # nothing
    ],
)
def test_ranges_that_do_not_tile_are_refused(ranges: list[tuple[int, int]]) -> None:
    grid = RankGrid(tp=2, head_ranges={"a": ranges})
    tensor = np.zeros((2, BLOCK, 3, 2 * HEAD), dtype=np.uint8).transpose(0, 2, 1, 3)
    mappings = derive_canonical_mappings(
        LayerTable([attention("a")]), {"a": CacheView.of(tensor, "packed_nhd", BLOCK)}, grid, 0
    )
    assert not mappings.by_layer["a"].certified
    assert mappings.refusals[0].rule in ("tiling", "heads-divide")


# ---- pipeline stages -----------------------------------------------------------------------------


def stages(pp: list[int], names: list[str]) -> list[list[str]]:
    bounds = np.cumsum([0, *pp])
    return [names[a:b] for a, b in pairwise(bounds)]


@pytest.mark.parametrize("store", [[7], [3, 4], [1, 2, 1, 3]])
@pytest.mark.parametrize("load", [[7], [5, 2], [2, 2, 2, 1]])
def test_a_chunk_stored_by_one_set_of_stages_is_loaded_by_another(
    store: list[int], load: list[int]
) -> None:
    names = [f"layer{i}" for i in range(7)]
    table = LayerTable([attention(name) for name in names])
    content = {
        name: np.random.default_rng(i).integers(0, 256, (3, 2, BLOCK, HEADS, HEAD), dtype=np.uint8)
        for i, name in enumerate(names)
    }
    whole = derive_canonical_mappings(
        table,
        {name: CacheView.of(array, "split_nhd", BLOCK) for name, array in content.items()},
        RankGrid(),
        0,
    )
    with Region.create(sections_for(whole, BLOCK, 3), backing="private") as region:
        for stage in stages(store, names):
            with stage_plan(table, {n: content[n] for n in stage}, region) as plan:
                plan.store(([0, 1, 2], [2, 0, 1])).check()
        row = region.row("full", 2)
        assert np.array_equal(row, np.concatenate([content[n][0].reshape(-1) for n in names]))
        for stage in stages(load, names):
            loaded = {n: np.zeros_like(content[n]) for n in stage}
            with stage_plan(table, loaded, region) as plan:
                plan.load(([0, 1, 2], [2, 0, 1])).check()
            for name in stage:
                assert np.array_equal(loaded[name], content[name])


def stage_plan(table: LayerTable, arrays: dict[str, np.ndarray], region: Region) -> TransferPlan:
    caches = {name: CacheView.of(array, "split_nhd", BLOCK) for name, array in arrays.items()}
    mappings = derive_canonical_mappings(table, caches, RankGrid(), 0, strict=True)
    return TransferPlan(mappings, caches, region, chunk_tokens=BLOCK)


# ---- layers that share rows ----------------------------------------------------------------------


def slab(widths: dict[str, int], blocks: int = 3) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """One tensor whose rows hold a page of each layer, one after the other."""
    row = np.random.default_rng(1).integers(0, 256, (blocks, sum(widths.values())), dtype=np.uint8)
    views, start = {}, 0
    for name, width in widths.items():
        views[name] = row[:, start : start + width]
        start += width
    return row, views


def test_layers_in_the_rows_of_one_tensor_are_certified_each_at_its_offset() -> None:
    """Fault 18: 36,864 and 8,448 bytes per block at a stride of 45,312 for both."""
    table = LayerTable(
        [
            LayerSpec.mla("a", row_bytes=36864 // BLOCK),
            LayerSpec.mla("b", row_bytes=8448 // BLOCK),
        ]
    )
    rows, views = slab({"a": 36864, "b": 8448})
    caches = {name: CacheView.of(view, "mla", BLOCK, raw=True) for name, view in views.items()}
    mappings = derive_canonical_mappings(table, caches, RankGrid(), 0, strict=True)
    assert mappings.addressing["a"].block_stride == mappings.addressing["b"].block_stride == 45312
    assert mappings.addressing["b"].base - mappings.addressing["a"].base == 36864
    assert rows.size == 3 * 45312


def test_one_refusal_makes_the_whole_shared_row_the_opaque_unit_carried_once() -> None:
    """Fault 33: opaque over the whole slab, not per layer."""
    table = LayerTable(
        [LayerSpec.mla("a", row_bytes=16), LayerSpec.opaque("b", page_bytes=24, group="0")]
    )
    rows, views = slab({"a": 16 * BLOCK, "b": 24})
    caches = {
        "a": CacheView.of(views["a"], "mla", BLOCK, raw=True),
        "b": CacheView.of(views["b"], "pages"),
    }
    mappings = derive_canonical_mappings(table, caches, RankGrid(), 0)
    assert {refusal.layer: refusal.rule for refusal in mappings.refusals} == {
        "a": "shared-row",
        "b": "undescribed",
    }
    assert mappings.carrier == {"a": "a", "b": "a"}
    assert mappings.by_layer["a"].local_page_size_bytes == 16 * BLOCK + 24
    before = rows.copy()
    with Region.create(sections_for(mappings, BLOCK, 3), backing="private") as region:
        with TransferPlan(mappings, caches, region, chunk_tokens=BLOCK) as plan:
            plan.store(([0, 2], [1, 0])).check()
            assert np.array_equal(region.row("0/private", 1), before[0])
            rows[:] = 0
            plan.load(([1, 2], [1, 0])).check()
    assert np.array_equal(rows[1], before[0])
    assert np.array_equal(rows[2], before[2])
    assert not rows[0].any()


def test_layers_that_alias_one_tensor_are_each_certified() -> None:
    """Engines let layers of different groups share one tensor, block by block."""
    table = LayerTable([attention("a", "full"), attention("w", "window")])
    array = np.random.default_rng(2).integers(0, 256, (4, 2, BLOCK, HEADS, HEAD), dtype=np.uint8)
    caches = {name: CacheView.of(array, "split_nhd", BLOCK) for name in table}
    mappings = derive_canonical_mappings(table, caches, RankGrid(), 0, strict=True)
    before = array.copy()
    with Region.create(sections_for(mappings, BLOCK, 2), backing="private") as region:
        with TransferPlan(mappings, caches, region, chunk_tokens=BLOCK) as plan:
            plan.store({"full": ([0], [0]), "window": ([3], [1])}).check()
            array[:] = 0
            plan.load({"full": ([1], [0]), "window": ([2], [1])}).check()
    assert np.array_equal(array[1], before[0])
    assert np.array_equal(array[2], before[3])


# ---- hybrids -------------------------------------------------------------------------------------


def test_a_hybrid_model_comes_out_certified_where_it_can_be_with_a_summary_of_the_rest() -> None:
    state = LayerSpec.mamba2(
        "mamba", num_heads=8, head_dim=2, state_size=4, n_groups=1, conv_kernel=4, group="state"
    )
    table = LayerTable(
        [
            attention("full0"),
            attention("window0", "window"),
            state,
            LayerSpec.attention("odd", num_kv_heads=6, head_size=HEAD, elem=1, group="odd"),
            LayerSpec.opaque("mystery", page_bytes=40),
        ]
    )
    tp = 4
    held = {name: np.zeros((3, 2, 8, 2, HEAD), dtype=np.uint8) for name in ("full0", "window0")}
    # Convolution state (12 channels, 3 positions, 2 bytes) and temporal state share padded rows.
    _, parts = slab({"conv": 12 * 3 * 2, "temporal": 2 * 2 * 4 * 4, "padding": 8})
    caches = {
        "full0": CacheView.of(held["full0"], "split_nhd", 8),
        "window0": CacheView.of(held["window0"], "split_nhd", 8),
        "mamba": CacheView.of(
            (parts["conv"], parts["temporal"]), state_layout(state, channels_first=True)
        ),
        "odd": CacheView.of(np.zeros((3, 2, 8, 1, HEAD), dtype=np.uint8), "split_nhd", 8),
        "mystery": CacheView.of(np.zeros((3, 40), dtype=np.uint8), "pages"),
    }
    mappings = derive_group(table, caches, RankGrid(tp=tp))[1]
    certified = {name for name, mapping in mappings.by_layer.items() if mapping.certified}
    assert certified == {"full0", "window0", "mamba"}
    assert list(mappings.by_layer) == list(table)
    summary = mappings.summary()
    assert summary.splitlines()[0].startswith("3 of 5 layers certified")
    assert "heads-divide" in summary and "odd" in summary
    assert "undescribed" in summary and "mystery" in summary


def test_a_summary_names_a_reason_once_for_many_layers() -> None:
    names = [f"odd{i}" for i in range(40)]
    table = LayerTable(
        [LayerSpec.attention(n, num_kv_heads=6, head_size=HEAD, elem=1) for n in names]
    )
    view = CacheView.of(np.zeros((3, 2, 8, 1, HEAD), dtype=np.uint8), "split_nhd", 8)
    mappings = derive_canonical_mappings(table, dict.fromkeys(names, view), RankGrid(tp=4), 0)
    assert len(mappings.refusals) == 40
    assert len(mappings.summary().splitlines()) == 2
    assert "odd0 and 39 more" in mappings.summary()
