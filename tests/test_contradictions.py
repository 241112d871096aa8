"""Caches and mappings that contradict themselves are errors, never a quiet wrong address."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from vkvmap import (
    CacheView,
    CanonicalPageMapping,
    CopyRun,
    LayerSpec,
    LayerTable,
    RankGrid,
    TensorView,
    certify,
    derive_canonical_mappings,
)
from vkvmap.chunk import ChunkLayout
from vkvmap.errors import SpecError, TilingError
from vkvmap.foreign import read_json
from vkvmap.layout import Layout, Part, layout_named, state_layout
from vkvmap.mapping import Mappings
from vkvmap.spec import Nest

STATE = LayerTable([LayerSpec.opaque("state", page_bytes=64)])


def opaque(shape: tuple[int, ...], strides: tuple[int, ...]) -> Mappings:
    tensor = TensorView(1000, shape, strides, 1, (0, 1 << 40))
    return derive_canonical_mappings(STATE, {"state": CacheView.of(tensor, "pages")}, RankGrid(), 0)


@pytest.mark.parametrize("stride", [0, 1, 63, -64])
def test_blocks_that_overlap_are_not_even_opaque(stride: int) -> None:
    with pytest.raises(SpecError, match="overlap itself"):
        opaque((3, 64), (stride, 1))


def test_the_stride_of_a_single_block_means_nothing() -> None:
    assert opaque((1, 64), (0, 1)).by_layer["state"].local_page_size_bytes == 64


@pytest.mark.parametrize(
    ("shape", "strides"), [((), ()), ((0, 64), (64, 1)), ((-3, 64), (64, 1)), ((3, 64), (64,))]
)
def test_a_tensor_without_blocks_is_no_cache(
    shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    with pytest.raises(SpecError, match="holds no blocks"):
        TensorView(0, shape, strides, 1, (0, 1 << 40))


def slab(rows: np.ndarray, names: str, cut: int, kernel_blocks: int = 1) -> dict[str, CacheView]:
    """A latent layer and an undescribed one in the same rows."""
    known = rows[:, :cut].reshape(len(rows), 16, -1)
    return {
        f"known{names}": CacheView.of(
            known, "mla", 16 * kernel_blocks, kernel_blocks=kernel_blocks
        ),
        f"unknown{names}": CacheView.of(rows[:, cut:], "pages"),
    }


def slab_table(*names: str) -> LayerTable:
    layers = []
    for name in names:
        layers.append(LayerSpec.mla(f"known{name}", row_bytes=64, group="g"))
        layers.append(LayerSpec.opaque(f"unknown{name}", page_bytes=1_976, group="g"))
    return LayerTable(layers)


def test_two_slabs_of_one_storage_are_two_opaque_units() -> None:
    storage = np.zeros(2 * 4 * 3_000, dtype=np.uint8)
    halves = storage.reshape(2, 4, 3_000)
    caches = slab(halves[0], "1", 1_024) | slab(halves[1], "2", 1_024)
    mappings = derive_canonical_mappings(slab_table("1", "2"), caches, RankGrid(), 0)
    assert {m.local_page_size_bytes for m in mappings.by_layer.values()} == {3_000}
    assert list(mappings.carrier.values()) == ["known1", "known1", "known2", "known2"]


def test_layers_of_one_row_that_count_blocks_differently_are_an_error() -> None:
    caches = slab(np.zeros((8, 3_000), dtype=np.uint8), "", 1_024, kernel_blocks=2)
    with pytest.raises(SpecError, match="one row to both"):
        derive_canonical_mappings(slab_table(""), caches, RankGrid(), 0)


def test_tensors_that_one_block_id_cannot_reach_alike_are_an_error() -> None:
    """Two allocations with block strides of their own: carried opaquely, one would be misread."""
    spec = LayerSpec.recurrent(
        "state",
        segments=[("x", 8, 8)],
        conv_positions=2,
        temporal=[("head", 8, 8)],
        conv_elem=1,
        temporal_elem=1,
    )
    tensors = [np.zeros((3, 16), dtype=np.uint8), np.zeros((3, 8), dtype=np.uint8)]
    cache = CacheView.of(tensors, state_layout(spec, channels_first=True))
    with pytest.raises(SpecError, match="a layer of its own"):
        derive_canonical_mappings(LayerTable([spec]), {"state": cache}, RankGrid(), 0)


def test_store_runs_are_counted_before_they_are_expanded() -> None:
    """A proof of eight terabytes of arrays is refused, not attempted."""
    mapping = CanonicalPageMapping(
        canonical_page_size_bytes=1 << 47,
        local_page_size_bytes=1 << 47,
        runs=(CopyRun(0, 0, 1 << 47, 1, 1, 1),),
        num_writers=1,
        writer_index=0,
        parallelism_agnostic=True,
        store_runs=(CopyRun(0, 0, 1, 1 << 40, 2, 2),),
    )
    with pytest.raises(TilingError, match="too many to prove"):
        certify([mapping])


@pytest.mark.parametrize("layout", ["packed_hnd", "packed_nhd"])
def test_strides_of_extents_of_one_mean_nothing(layout: str) -> None:
    """Any number may stand there; engines leave whatever a view happened to have."""
    spec = LayerSpec.attention("x", num_kv_heads=1, head_size=4, elem=1)
    shape = (3, 1, 2, 8)
    for head_stride in (0, 1, 8, 1 << 30):
        tensor = TensorView(0, shape, (16, head_stride, 8, 1), 1, (0, 1 << 40))
        mappings = derive_canonical_mappings(
            LayerTable([spec]), {"x": CacheView.of(tensor, layout, 2)}, RankGrid(), 0, strict=True
        )
        assert mappings.addressing["x"].is_contiguous


@pytest.mark.parametrize("sizes", [{"tp": 1 << 64}, {"dcp": 1 << 40}, {"tp": 512, "pcp": 512}])
def test_a_grid_that_no_machine_has_is_refused_before_anything_is_counted(
    sizes: dict[str, int],
) -> None:
    with pytest.raises(SpecError, match="at most 65536 ranks"):
        RankGrid(**sizes)


def test_a_block_that_no_engine_has_is_refused_before_its_tokens_are_counted() -> None:
    tensor = TensorView(0, (3, 1 << 30, 1), (1 << 30, 1, 1), 1, (0, 1 << 40))
    with pytest.raises(SpecError, match="at most 1048576 tokens"):
        CacheView.of(tensor, "mla", 1 << 30)


def test_what_is_no_json_is_one_kind_of_error() -> None:
    assert read_json('{"a": [1, 2.5, null]}') == {"a": [1, 2.5, None]}
    for text in ("[" * 100_000, "NaN", "[Infinity]", "1e999", "{", "9" * 5_000, b"\xff"):
        with pytest.raises(ValueError):
            read_json(text)


@pytest.mark.parametrize("stride", [0, 2, 3])
@pytest.mark.parametrize("size", [2, 3])
def test_cells_with_gaps_are_refused(size: int, stride: int) -> None:
    spec = LayerSpec.mla("x", row_bytes=size)
    tensor = TensorView(0, (3, 2, size), (64, 16, stride), 1, (0, 1 << 40))
    try:
        mappings = derive_canonical_mappings(
            LayerTable([spec]), {"x": CacheView.of(tensor, "mla", 2)}, RankGrid(), 0
        )
    except SpecError:
        assert stride == 0
        return
    assert "a cell must be contiguous" in mappings.refusals[0].seen


@pytest.mark.parametrize(
    ("shape", "strides", "fits"),
    [
        ((3, 2, 4, 8), (64, 32, 8, 1), True),
        ((3, 2, 4, 8), (64, 33, 8, 1), False),  # block 1 begins within block 0's last token
        ((3, 2, 4, 8), (65, 33, 8, 1), True),
        ((3, 2, 4, 8), (63, 32, 8, 1), False),
        ((3, 2, 4, 8), (64, 31, 8, 1), False),
        ((3, 2, 4, 8), (64, 32, 7, 1), False),
        ((3, 2, 4, 8), (128, 64, 8, 1), True),
        ((3, 2, 4, 8), (32, 96, 8, 1), True),  # heads outside blocks
        ((3, 2, 4, 8), (32, 95, 8, 1), False),
    ],
)
def test_steps_must_reach_over_what_they_step_over(
    shape: tuple[int, ...], strides: tuple[int, ...], fits: bool
) -> None:
    """To the byte: one less and two elements share an address, so it is no cache at all."""
    spec = LayerSpec.attention("x", num_kv_heads=2, head_size=4, elem=1)
    tensor = TensorView(0, shape, strides, 1, (0, 1 << 40))
    caches = {"x": CacheView.of(tensor, "packed_hnd", 4)}
    if fits:
        derive_canonical_mappings(LayerTable([spec]), caches, RankGrid(), 0, strict=True)
    else:
        with pytest.raises(SpecError, match="overlap itself"):
            derive_canonical_mappings(LayerTable([spec]), caches, RankGrid(), 0)


@pytest.mark.parametrize("shape", [(3, 16), (3, 16, 2, 2, 2)])
def test_a_tensor_with_other_dimensions_is_refused_unless_they_are_all_of_one_cell(
    shape: tuple[int, ...],
) -> None:
    spec = LayerSpec.mla("x", row_bytes=8)
    view = CacheView.of(np.zeros(shape, dtype=np.uint8), "mla", 16)
    mappings = derive_canonical_mappings(LayerTable([spec]), {"x": view}, RankGrid(), 0)
    if len(shape) > 3:
        assert mappings.by_layer["x"].certified
    else:
        assert "2 dimensions, layout 'mla' has 3" in mappings.refusals[0].seen


def test_block_sizes_that_are_no_blocks_are_errors() -> None:
    tensor = np.zeros((6, 8, 8), dtype=np.uint8)
    for block_size, kernel_blocks in ((16, 3), (-1, 1), (16, 0)):
        with pytest.raises(SpecError):
            CacheView.of(tensor, "mla", block_size, kernel_blocks=kernel_blocks)
    with pytest.raises(SpecError, match="2 were given"):
        CacheView.of([tensor, tensor], "mla", 8)


def test_ranks_that_disagree_on_the_page_are_caught() -> None:
    def whole(size: int) -> CanonicalPageMapping:
        return CanonicalPageMapping(size, 8, (CopyRun(0, 0, 8, 1, 8, 8),), 1, 0, True)

    certify([whole(8)])
    with pytest.raises(TilingError, match="rank 1: canonical page of 16 bytes, rank 0 has 8"):
        certify([whole(8), whole(16)])


def test_a_group_with_tokens_needs_a_chunk() -> None:
    table = LayerTable([LayerSpec.mla("x", row_bytes=8)])
    for tokens in (0, -16, {"other": 16}):
        with pytest.raises(SpecError, match="positive count"):
            ChunkLayout.of(table, tokens)


def test_a_summary_counts_and_groups_alike_reasons() -> None:
    table = LayerTable(
        [LayerSpec.mla("x", row_bytes=8)]
        + [LayerSpec.opaque(f"s{i}", page_bytes=8) for i in range(3)]
        + [LayerSpec.opaque("t", page_bytes=16)]
    )
    caches = {
        name: CacheView.of(np.zeros((2, spec.canonical_bytes(0)), np.uint8), "pages")
        for name, spec in table.items()
        if name != "x"
    } | {"x": CacheView.of(np.zeros((2, 4, 9), np.uint8), "mla", 4)}
    lines = derive_canonical_mappings(table, caches, RankGrid(), 0).summary().split("\n")
    assert lines[0] == "0 of 5 layers certified (native family), 5 opaque"
    assert lines[1].startswith("x: layout: ")
    assert lines[2].startswith("s0 and 3 more: undescribed: ")
    assert len(lines) == 3


@pytest.mark.parametrize(
    "stride", [9, -8, 1 << 31, 1 << 62, 1 << 63, (1 << 64) + 8, -(1 << 64) + 8]
)
@pytest.mark.parametrize("side", ["local", "canonical"])
def test_strides_that_would_wrap_to_the_right_place_are_refused(side: str, stride: int) -> None:
    """Checked as whole numbers, before anything has 64 bits."""
    strides = (stride, 8) if side == "local" else (8, stride)
    mapping = CanonicalPageMapping(16, 16, (CopyRun(0, 0, 8, 2, *strides),), 1, 0, True)
    with pytest.raises(TilingError):
        certify([mapping])
    runs = (CopyRun(0, 0, 8, 2, 8, 8),)
    stored = CanonicalPageMapping(
        16, 16, runs, 1, 0, True, store_runs=(CopyRun(0, 0, 8, 2, *strides),)
    )
    with pytest.raises(TilingError):
        certify([stored])


def test_explicit_ranges_are_given_for_every_rank() -> None:
    for ranges in ([(0, 1)], [(0, 1)] * 3):
        with pytest.raises(SpecError, match="one per tp_rank is needed"):
            RankGrid(tp=2, head_ranges={"x": ranges})


@pytest.mark.parametrize(
    "ranges",
    [[(0, 2), (2, 4)], [(0, 2), (2, 2)], [(-1, 2), (2, 3)], [(0, 1), (2, 3)], [(0, 3)] * 2],
)
def test_explicit_ranges_that_are_no_partition_are_refused(ranges: list[tuple[int, int]]) -> None:
    """Beyond the heads, empty, with a gap; all heads on both ranks are replicas, and fine."""
    spec = LayerSpec.attention("x", num_kv_heads=3, head_size=4, elem=1)
    held = max(1, ranges[0][1] - max(0, ranges[0][0]))
    view = CacheView.of(np.zeros((2, 2, 4, held, 4), np.uint8), "split_nhd", 4)
    grid = RankGrid(tp=2, head_ranges={"x": ranges})
    mappings = derive_canonical_mappings(LayerTable([spec]), {"x": view}, grid, 0)
    assert mappings.by_layer["x"].certified is (ranges == [(0, 3)] * 2)
    impossible = any(not 0 <= first < stop <= 3 for first, stop in ranges)
    rules = [refusal.rule for refusal in mappings.refusals]
    if rules:
        assert rules == ["heads-divide" if impossible else "tiling"]


def test_the_order_of_a_layout_of_one_part_is_its_parts() -> None:
    """It is spelled out in the names that stored pages lie under."""
    assert str(layout_named("packed_nhd").order) == "[token][head](*)"
    one = layout_named("mla").parts[0]
    assert str(Layout("two", (one, one)).order) == "([token](*), [token](*))"


def two_ranks(
    loads: list[tuple[int, int, int]], stores: list[tuple[int, int, int]] | None
) -> list[CanonicalPageMapping]:
    """Rank 0 stores all 16 bytes; rank 1 loads and stores as given: (local, canonical, size)."""

    def runs(pieces: list[tuple[int, int, int]]) -> tuple[CopyRun, ...]:
        return tuple(CopyRun(a, b, n, 1, n, n) for a, b, n in pieces)

    whole = CanonicalPageMapping(16, 16, runs([(0, 0, 16)]), 1, 0, True)
    other = CanonicalPageMapping(
        16, sum(n for _, _, n in loads), runs(loads), 1, 0, True,
        store_runs=None if stores is None else runs(stores),
    )  # fmt: skip
    return [whole, other]


@pytest.mark.parametrize(
    "loads",
    [
        [(0, 9, 8)],  # beyond the end
        [(0, -1, 8)],  # before the start
        [(0, 0, 8), (8, 0, 8)],  # one place twice
        [(0, 0, 8), (8, 7, 8)],  # one byte twice
    ],
)
def test_loads_of_a_rank_that_stores_nothing_are_checked_too(
    loads: list[tuple[int, int, int]],
) -> None:
    certify(two_ranks([(0, 8, 8), (8, 0, 8)], []))
    with pytest.raises(TilingError, match="rank 1: canonical page"):
        certify(two_ranks(loads, []))


@pytest.mark.parametrize(
    ("loads", "stores", "right"),
    [
        ([(0, 0, 8), (8, 8, 8)], [(0, 0, 16)], True),
        ([(0, 0, 4), (4, 4, 4), (8, 8, 8)], [(2, 2, 9)], True),
        ([(0, 8, 8), (8, 0, 8)], [(0, 8, 8)], True),
        ([(0, 0, 4), (4, 8, 4), (8, 4, 4), (12, 12, 4)], [(0, 0, 8)], False),
        ([(0, 0, 4), (4, 8, 4), (8, 4, 4), (12, 12, 4)], [(2, 2, 4)], False),
        ([(0, 0, 4), (4, 4, 4), (8, 12, 4), (12, 8, 4)], [(0, 0, 12)], False),
        ([(0, 4, 8)], [(0, 4, 9)], False),
    ],
)
def test_a_store_that_spans_several_loads_follows_each_of_them(
    loads: list[tuple[int, int, int]], stores: list[tuple[int, int, int]], right: bool
) -> None:
    mappings = two_ranks(loads, stores)
    # Rank 0 leaves to rank 1 what that stores.
    at, size = stores[0][1], stores[0][2]
    kept = [CopyRun(a, a, n, 1, n, n) for a, n in ((0, at), (at + size, 16 - at - size)) if n > 0]
    mappings[0] = replace(mappings[0], store_runs=tuple(kept))
    if right:
        certify(mappings)
    else:
        with pytest.raises(TilingError, match="rank 1: store runs"):
            certify(mappings)


@pytest.mark.parametrize("kind", ["mla", "packed_hnd", "split_nhd", "planar"])
def test_one_layer_is_never_taken_for_another_that_differs_in_a_size(kind: str) -> None:
    """Alike layers are derived once; strides can agree where shapes do not."""
    spec, shape = {
        "mla": (LayerSpec.mla("good", row_bytes=8), (3, 4, 8)),
        "packed_hnd": (
            LayerSpec.attention("good", num_kv_heads=2, head_size=3, elem=1), (3, 2, 4, 6),
        ),
        "split_nhd": (
            LayerSpec.attention("good", num_kv_heads=3, head_size=3, elem=1), (3, 2, 4, 3, 3),
        ),
        "planar": (LayerSpec.indexer("good", value_bytes=6, scale_bytes=2), (3, 4, 8)),
    }[kind]  # fmt: skip
    table = LayerTable([spec, spec.renamed("other")])
    strides = np.zeros(shape, np.uint8).strides
    good = CacheView.of(TensorView(0, shape, strides, 1, (0, 4096)), kind, 4)
    for dim in range(1, len(shape)):
        smaller = tuple(n - (at == dim) for at, n in enumerate(shape))
        other = CacheView.of(TensorView(2048, smaller, strides, 1, (0, 4096)), kind, 4)
        mappings = derive_canonical_mappings(table, {"good": good, "other": other}, RankGrid(), 0)
        assert mappings.by_layer["good"].certified
        assert not mappings.by_layer["other"].certified
    fewer = CacheView.of(TensorView(2048, (2, *shape[1:]), strides, 1, (0, 4096)), kind, 4)
    mappings = derive_canonical_mappings(table, {"good": good, "other": fewer}, RankGrid(), 0)
    assert [mappings.addressing[name].num_blocks for name in table] == [3, 2]


def test_halves_of_different_sizes_do_not_share_a_dimension() -> None:
    spec = LayerSpec.attention("x", num_kv_heads=2, head_size=4, head_size_v=3, elem=1)
    for size in (3, 4):
        view = CacheView.of(np.zeros((2, 2, 4, 2, size), np.uint8), "split_nhd", 4)
        mappings = derive_canonical_mappings(LayerTable([spec]), {"x": view}, RankGrid(), 0)
        assert "halves of [3, 4] bytes" in mappings.refusals[0].seen


def test_memory_that_is_no_array_of_its_own_is_found() -> None:
    memory = bytearray(3 * 4 * 8 + 16)
    whole = np.frombuffer(memory, np.uint8)
    tensor = TensorView.of(whole[16:].reshape(3, 4, 8))
    start = whole.__array_interface__["data"][0]
    assert (tensor.address, tensor.storage) == (start + 16, (start, len(memory)))


def test_a_group_of_the_largest_size_is_a_group() -> None:
    assert RankGrid(tp=1 << 16).size == 65_536
    with pytest.raises(SpecError):
        RankGrid(tp=(1 << 16) + 1)


@pytest.mark.parametrize(("size", "count"), [(0, 1), (0, 5), (1, 0), (8, 0), (-8, 1), (1, -4)])
def test_a_run_that_moves_nothing_hides_behind_no_other(size: int, count: int) -> None:
    """Also where the bytes add up all the same."""
    empty = CopyRun(0, 0, size, count, 8, 8)
    surplus = -size * count
    runs = (CopyRun(0, 0, 16 + surplus, 1, 16, 16), empty)
    with pytest.raises(TilingError):
        certify([CanonicalPageMapping(16 + surplus, 16, runs, 1, 0, True)])
    certify([CanonicalPageMapping(16, 16, (CopyRun(0, 0, 16, 1, 16, 16),), 1, 0, True)])
    with pytest.raises(TilingError):
        certify([CanonicalPageMapping(16, 16, (CopyRun(0, 0, 16, 1, 16, 16), empty), 1, 0, True)])


def test_a_dimension_that_no_field_has_is_refused() -> None:
    odd = Layout("odd", (Part(("block", "head", "token", "cell"), Nest(("token",), ("*",))),))
    spec = LayerSpec.mla("x", row_bytes=8)
    view = CacheView.of(np.zeros((2, 1, 4, 8), np.uint8), odd, 4)
    mappings = derive_canonical_mappings(LayerTable([spec]), {"x": view}, RankGrid(), 0)
    assert "has a 'head' dimension, field 'row' has no such axis" in mappings.refusals[0].seen


def test_the_extent_of_a_page_reaches_to_its_last_piece() -> None:
    """Heads outside blocks: a page of two pieces, 3 blocks of 32 bytes apart."""
    spec = LayerSpec.attention("x", num_kv_heads=2, head_size=4, elem=1)
    tensor = TensorView(0, (3, 2, 4, 8), (32, 96, 8, 1), 1, (0, 192))
    caches = {"x": CacheView.of(tensor, "packed_hnd", 4)}
    mappings = derive_canonical_mappings(LayerTable([spec]), caches, RankGrid(), 0, strict=True)
    assert mappings.addressing["x"].extent == 96 + 32
    mixed = Layout("two", (Part(("block", "cell"), Nest((), ("value", "scale"))),))
    index = LayerSpec.indexer("x", value_bytes=6, scale_bytes=2)
    row = TensorView(0, (3, 32), (40, 1), 1, (0, 192))
    caches = {"x": CacheView.of(row, mixed, 4)}
    mappings = derive_canonical_mappings(LayerTable([index]), caches, RankGrid(), 0, strict=True)
    assert mappings.addressing["x"].extent == 32


def test_a_layer_with_tokens_needs_a_block_size() -> None:
    view = CacheView.of(np.zeros((2, 4, 8), np.uint8), "mla")
    table = LayerTable([LayerSpec.mla("x", row_bytes=8)])
    refusal = derive_canonical_mappings(table, {"x": view}, RankGrid(), 0).refusals[0]
    assert (refusal.rule, refusal.seen) == ("layout", "block_size is 0 for a layer with tokens")
