"""What no other test noticed: each of these fails for one small wrong version of the proof.

Found by `python -m tests.mutation`; sorted by module. Where a whole kind was missing it got a test
beside its like, this file has the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from vkvmap import (
    CacheView,
    CanonicalPageMapping,
    CopyRun,
    LayerSpec,
    LayerTable,
    RankGrid,
    Region,
    TransferPlan,
    certify,
    derive_canonical_mappings,
)
from vkvmap.boxes import Box, boxes_of, folded
from vkvmap.cache import MOST_BLOCK_TOKENS, layer_views
from vkvmap.chunk import ChunkLayout
from vkvmap.errors import LayoutError, PlanError, RefusedError, SpecError, TilingError
from vkvmap.layout import layout_named, place, state_layout
from vkvmap.mapping import runs_from_boxes
from vkvmap.pack import tiles_of
from vkvmap.recognise import PageAddressing
from vkvmap.sections import sections_for
from vkvmap.spec import Axis, Field, Nest
from vkvmap.writers import POLICIES

MLA = LayerSpec.mla("m", row_bytes=8)


# ---- grid ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tp", "dcp", "pcp", "interleave"])
@pytest.mark.parametrize("value", [0, -1, 2.0, "2", None, True, False])
def test_a_grid_counts_in_positive_integers(name: str, value: Any) -> None:
    with pytest.raises(SpecError, match=f"grid {name}=.*positive integer"):
        RankGrid(**{name: value})


def test_a_pcp_mode_is_one_of_two() -> None:
    with pytest.raises(SpecError, match="pcp_mode='both': choose 'shards' or 'replicates'"):
        RankGrid(pcp_mode="both")  # type: ignore[arg-type]


# ---- holding -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["native", "universal"])
@pytest.mark.parametrize("interleave", [3, 8])
def test_an_interleave_that_does_not_divide_the_block_is_what_is_named(
    interleave: int, family: Any
) -> None:
    caches = {"m": CacheView.of(np.zeros((2, 4, 8), np.uint8), "mla", 4)}
    grid = RankGrid(tp=2, dcp=2, interleave=interleave)
    mappings = derive_canonical_mappings(LayerTable([MLA]), caches, grid, 0, family=family)
    assert [refusal.rule for refusal in mappings.refusals] == ["interleave"]


# ---- chunk ---------------------------------------------------------------------------------------


def test_one_layer_with_tokens_is_enough_to_need_them() -> None:
    state = LayerSpec.opaque("s", page_bytes=8, group="0")
    assert not state.has_tokens
    with pytest.raises(SpecError, match="a positive count needed"):
        ChunkLayout.of(LayerTable([state, MLA]), 0)
    assert ChunkLayout.of(LayerTable([state]), 0)["0"].payload_bytes == 0


# ---- plan ----------------------------------------------------------------------------------------


class OnDevice:
    """Ids that lie on a GPU; a copy of them would be taken unasked."""

    device = "cuda:0"

    def data_ptr(self) -> int:
        return 0

    def numpy(self) -> np.ndarray:
        return np.zeros(1, dtype=np.int64)


def test_ids_on_a_device_are_refused() -> None:
    caches = {"m": CacheView.of(np.zeros((2, 4, 8), np.uint8), "mla", 4)}
    mappings = derive_canonical_mappings(LayerTable([MLA]), caches, RankGrid(), 0)
    with Region.create(sections_for(mappings, 4, 2), backing="private") as region:
        with TransferPlan(mappings, caches, region) as plan:
            for pair in ((OnDevice(), [0]), ([0], OnDevice())):
                with pytest.raises(PlanError, match="ids are on cuda:0; pass them on CPU"):
                    plan.store(pair)


# ---- mapping -------------------------------------------------------------------------------------


@pytest.mark.parametrize("many_first", [True, False])
def test_the_longest_level_of_a_box_stays_a_stride(many_first: bool) -> None:
    """However far apart its steps are: 2 runs of 64 fragments, never 64 runs of 2."""
    many = (64, 16, 32) if many_first else (64, 4096, 8192)
    few = (2, 1 << 20, 1 << 21) if many_first else (2, 64, 128)
    runs = runs_from_boxes([Box(0, 0, ((8, 1, 1), many, few))])
    assert [run.num_fragments for run in runs] == [64, 64]


# ---- pack ----------------------------------------------------------------------------------------


def test_a_tile_is_as_wide_as_its_own_place_allows() -> None:
    """Fragments that fill a tile, each 8 bytes further from a line than the one before."""
    tiles = tiles_of([Box(0, 0, ((4096, 1, 1), (4, 4104, 4104)))], 16)
    assert [1 << int(width) for width in tiles["width_log2"]] == [16, 8, 16, 8]


# ---- opaque --------------------------------------------------------------------------------------


def test_layers_of_several_tensors_share_no_row() -> None:
    """Two layers of two tensors each in the rows of one storage: each keeps all of its bytes."""
    state = [
        LayerSpec.mamba2(
            name, num_heads=8, head_dim=2, state_size=3, n_groups=8, conv_kernel=4, conv_elem=1,
            temporal_elem=1,
        )
        for name in "ab"
    ]  # fmt: skip
    temporal = 8 * 2 * 3
    conv = state[0].canonical_bytes(0) - temporal
    rows = np.random.default_rng(4).integers(0, 256, (3, 2 * (conv + temporal) + 5), np.uint8)
    layout, caches, at = state_layout(state[0], channels_first=True), {}, 0
    for name in "ab":
        parts = [rows[:, at : at + conv], rows[:, at + conv : at + conv + temporal]]
        caches[name] = CacheView.of(parts, layout)
        at += conv + temporal
    mappings = derive_canonical_mappings(LayerTable(state), caches, RankGrid(tp=3), 0)
    assert len(mappings.refusals) == 2
    with Region.create(sections_for(mappings, {}, 2), backing="private") as region:
        with TransferPlan(mappings, caches, region, chunk_tokens={}) as plan:
            before = rows.copy()
            plan.store(([1], [1])).check()
            rows[2] = 0
            plan.load(([2], [1])).check()
    assert np.array_equal(rows[2, :at], before[1, :at])
    assert not rows[2, at:].any()


@pytest.mark.parametrize(("width", "place"), [(8, 0), (24, 0), (24, 8), (16, 8)])
def test_opaque_layers_of_two_groups_in_one_row_are_carried_for_the_blocks_of_each(
    width: int, place: int
) -> None:
    """Side by side or on the same bytes, in dense rows or padded ones."""
    memory = np.random.default_rng(2).integers(1, 256, (6, width), np.uint8)
    layers = [LayerSpec.opaque(name, page_bytes=8, group=name) for name in "ab"]
    caches = {
        "a": CacheView.of(memory[:, :8], "pages", 0),
        "b": CacheView.of(memory[:, place : place + 8], "pages", 0),
    }
    before = memory.copy()
    mappings = derive_canonical_mappings(LayerTable(layers), caches, RankGrid(), 0)
    assert mappings.carrier == {"a": "a", "b": "b"}
    with Region.create(sections_for(mappings, {}, 2), backing="private") as region:
        with TransferPlan(mappings, caches, region, chunk_tokens={}) as plan:
            plan.store({"a": ([0], [0]), "b": ([3], [1])}).check()
            memory[[1, 4]] = 0
            plan.load({"a": ([1], [0]), "b": ([4], [1])}).check()
    assert np.array_equal(memory[1, :8], before[0, :8])
    assert np.array_equal(memory[4, place : place + 8], before[3, place : place + 8])
    assert np.array_equal(memory[[0, 2, 3, 5]], before[[0, 2, 3, 5]])


def test_an_unknown_layout_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(SpecError, match=r"unknown layout 'nhd'; known: .*split_nhd"):
        layout_named("nhd")


def test_a_dimension_of_one_element_may_have_any_stride() -> None:
    rows = np.lib.stride_tricks.as_strided(np.zeros(64, np.uint8), (4, 2, 1), (2, 1, 7))
    layer = LayerSpec.mla("m", row_bytes=1)
    derive_canonical_mappings(
        LayerTable([layer]), {"m": CacheView.of(rows, "mla", 2)}, RankGrid(), 0, strict=True
    )


# ---- boxes ---------------------------------------------------------------------------------------


def byte_pairs(boxes: Sequence[Box]) -> list[tuple[int, int]]:
    """Every (left, right) byte pair, out of the levels as they stand."""
    out = []
    for box in boxes:
        for index in np.ndindex(*(count for count, _, _ in box.levels)):
            out.append(
                (
                    box.left + sum(i * a for i, (_, a, _) in zip(index, box.levels, strict=True)),
                    box.right + sum(i * b for i, (_, _, b) in zip(index, box.levels, strict=True)),
                )
            )
    return sorted(out)


def test_pieces_that_run_against_each_other_are_not_joined() -> None:
    """Ascending on one side, descending on the other: each piece is one of its own."""
    for left, right in (([16, 8, 0], [0, 8, 16]), ([0, 8, 16], [16, 8, 0])):
        arrays = (np.array(left), np.array(right), np.full(3, 8))
        expected = sorted(
            (a + i, b + i) for a, b in zip(left, right, strict=True) for i in range(8)
        )
        assert byte_pairs(boxes_of(*arrays)) == expected


@pytest.mark.parametrize("strided", [((3, 16, 16),), ((2, 32, 16),), ()])
def test_neighbours_with_other_steps_are_not_joined(strided: tuple[Any, ...]) -> None:
    pair = [Box(0, 0, ((4, 1, 1), (2, 16, 16))), Box(4, 4, ((4, 1, 1), *strided))]
    assert byte_pairs(folded(pair)) == byte_pairs(pair)
    alike = [Box(0, 0, ((4, 1, 1), (2, 16, 16))), Box(4, 4, ((4, 1, 1), (2, 16, 16)))]
    assert folded(alike) == (Box(0, 0, ((8, 1, 1), (2, 16, 16))),)


# ---- derive --------------------------------------------------------------------------------------


def test_strictness_covers_the_worker_group() -> None:
    caches = {"m": CacheView.of(np.zeros((2, 4, 8), np.uint8), "mla", 4)}
    grid = RankGrid(tp=2, world_size=3)
    mappings = derive_canonical_mappings(LayerTable([MLA]), caches, grid, 0)
    assert [refusal.rule for refusal in mappings.refusals] == ["worker-group"]
    with pytest.raises(RefusedError, match="3 workers"):
        derive_canonical_mappings(LayerTable([MLA]), caches, grid, 0, strict=True)


# ---- certify -------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_load_that_takes_any_byte_twice_is_refused(at: int) -> None:
    """Of a rank that stores nothing, so that no partition of the canonical page shows it."""
    writer = CanonicalPageMapping(32, 32, (CopyRun(0, 0, 32, 1, 32, 32),), 1, 0, True)
    places = [0, 8, 16, 24]
    places[at + 1] = places[at] + 4
    runs = tuple(CopyRun(8 * i, place, 8, 1, 8, 8) for i, place in enumerate(places))
    reader = CanonicalPageMapping(32, 32, runs, 1, 0, True, store_runs=())
    with pytest.raises(TilingError, match=f"byte {places[at] + 4} is loaded twice"):
        certify([writer, reader])


# ---- recognise -----------------------------------------------------------------------------------


def test_tensors_of_one_layer_have_as_many_blocks_as_each_other() -> None:
    """The same bytes per block, but one tensor ends a block sooner."""
    state = LayerSpec.mamba2(
        "s", num_heads=8, head_dim=2, state_size=3, n_groups=8, conv_kernel=4, conv_elem=1,
        temporal_elem=1,
    )  # fmt: skip
    temporal = 8 * 2 * 3
    conv = state.canonical_bytes(0) - temporal
    rows = np.zeros((4, conv + temporal), np.uint8)
    layout = state_layout(state, channels_first=True)
    for short in (0, 1):
        tensors = [rows[: 4 - (short == 0), :conv], rows[: 4 - (short == 1), conv:]]
        caches = {"s": CacheView.of(tensors, layout)}
        with pytest.raises(RefusedError, match="one block id must reach all of them"):
            derive_canonical_mappings(LayerTable([state]), caches, RankGrid(), 0, strict=True)


# ---- ids -----------------------------------------------------------------------------------------


def test_an_id_beyond_63_bits_is_named_as_it_was_given() -> None:
    caches = {"m": CacheView.of(np.zeros((2, 4, 8), np.uint8), "mla", 4)}
    mappings = derive_canonical_mappings(LayerTable([MLA]), caches, RankGrid(), 0)
    with Region.create(sections_for(mappings, 4, 2), backing="private") as region:
        with TransferPlan(mappings, caches, region) as plan:
            large = np.array([1 << 63], dtype=np.uint64)
            with pytest.raises(PlanError, match=f"block id {1 << 63} does not fit 63 bits"):
                plan.store((large, [0]))
            plan.store((np.array([1], dtype=np.uint64), [0])).check(60)


# ---- state ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_temporal", [True, False])
def test_state_in_one_row_is_all_of_it(with_temporal: bool) -> None:
    """Convolution and temporal state side by side in one tensor; both are in the page."""
    state = LayerSpec.recurrent(
        "s", segments=[("x", 8, 4), ("b", 4, 4)], conv_positions=3,
        temporal=[("head", 4, 4), ("dim", 6, 0)] if with_temporal else [], conv_elem=1,
    )  # fmt: skip
    size = 12 * 3 + (4 * 6 * 4 if with_temporal else 0)
    assert state.canonical_bytes(0) == size
    rows = np.random.default_rng(5).integers(0, 256, (3, size), np.uint8)
    layout = state_layout(state, channels_first=True, separate_tensors=False)
    caches = {"s": CacheView.of(rows, layout)}
    mappings = derive_canonical_mappings(LayerTable([state]), caches, RankGrid(), 0, strict=True)
    assert mappings.by_layer["s"].span_tokens == 0
    assert mappings.by_layer["s"].local_page_size_bytes == size
    with Region.create(sections_for(mappings, {}, 2), backing="private") as region:
        with TransferPlan(mappings, caches, region, chunk_tokens={}) as plan:
            plan.store(([2], [1])).check(60)
            assert np.array_equal(region.row(state.group, 1), rows[2])


# ---- sharing of work -----------------------------------------------------------------------------


def test_alike_layers_share_one_mapping() -> None:
    """Wherever each lies: a hundred layers are derived, proven and packed as one."""
    table = LayerTable([LayerSpec.mla(name, row_bytes=8) for name in "abc"])
    caches = {name: CacheView.of(np.zeros((2, 4, 8), np.uint8), "mla", 4) for name in "abc"}
    mappings = derive_canonical_mappings(table, caches, RankGrid(tp=2), 0, strict=True)
    assert len({id(mapping) for mapping in mappings.by_layer.values()}) == 1


def test_an_undeclared_tensor_is_read_with_its_own_rank_s_heads() -> None:
    """Two of four heads on either rank, of which rank 1's begin at 2."""
    table = LayerTable([LayerSpec.attention("a", num_kv_heads=4, head_size=8, elem=1)])
    for rank in (0, 1):
        tensor = np.zeros((3, 5, 2, 16), np.uint8).transpose(0, 2, 1, 3)
        mappings = derive_canonical_mappings(
            table, {"a": tensor}, RankGrid(tp=2), rank, strict=True
        )
        assert mappings.by_layer["a"].local_page_size_bytes == tensor[0].size


def test_a_page_reaches_to_its_furthest_piece() -> None:
    pieces = (Box(0, 50, ((8, 1, 1),)), Box(8, 4, ((4, 1, 1), (2, 4, 10))))
    assert PageAddressing(0, 100, 1, 16, pieces).extent == 58
    assert PageAddressing(0, 100, 1, 16, pieces[::-1]).extent == 58


# ---- runs and slabs of nothing -------------------------------------------------------------------


@pytest.mark.parametrize(("size", "count"), [(0, 4), (4, 0), (-8, -2), (-1, 1), (1, -1), (0, 0)])
def test_a_run_of_nothing_beside_a_run_of_everything_is_refused(size: int, count: int) -> None:
    everything = CopyRun(0, 0, 16, 1, 16, 16)
    for runs in (
        (everything, CopyRun(16, 16, size, count, 1, 1)),
        (CopyRun(0, 0, size, count, 1, 1), everything),
    ):
        with pytest.raises(TilingError):
            certify([CanonicalPageMapping(16, 16, runs, 1, 0, True)])


@pytest.mark.parametrize("shape", [(3, 4, 16, 8), (3, 4, 2, 16, 2, 8), (3,)])
def test_a_cross_layer_tensor_has_five_dimensions(shape: tuple[int, ...]) -> None:
    with pytest.raises(SpecError, match="a cross-layer tensor has 5 dimensions"):
        layer_views(np.zeros(shape, np.uint8), "LBHNC", shape[0])


def test_more_turns_than_can_be_proved_are_refused() -> None:
    run = (CopyRun(0, 0, 16, 1, 16, 16),)
    taken = [
        CanonicalPageMapping(16, 16, run, writers, index, True)
        for writers in (251, 263)
        for index in range(writers)
    ]
    with pytest.raises(TilingError, match=f"writers take {251 * 263} different turns; at most"):
        certify(taken)


def test_the_last_byte_of_a_store_run_is_loaded_from_where_it_was_stored() -> None:
    """The last bytes of two runs change places on the way back."""
    stores = (CopyRun(0, 0, 8, 1, 8, 8), CopyRun(8, 8, 8, 1, 8, 8))
    loads = (
        CopyRun(0, 0, 7, 1, 7, 7),
        CopyRun(7, 15, 1, 1, 1, 1),
        CopyRun(8, 8, 7, 1, 7, 7),
        CopyRun(15, 7, 1, 1, 1, 1),
    )
    with pytest.raises(TilingError, match="elsewhere than the load runs take them from"):
        certify([CanonicalPageMapping(16, 16, loads, 1, 0, True, store_runs=stores)])


# ---- cache ---------------------------------------------------------------------------------------


def test_a_block_may_have_as_many_tokens_as_a_block_can() -> None:
    rows = np.zeros((1, MOST_BLOCK_TOKENS, 1), np.uint8)
    assert CacheView.of(rows, "mla", MOST_BLOCK_TOKENS).block_size == MOST_BLOCK_TOKENS
    with pytest.raises(SpecError, match="a block has at most"):
        CacheView.of(rows, "mla", MOST_BLOCK_TOKENS + 1)


def test_a_torch_tensor_of_wide_elements_is_read_in_bytes() -> None:
    import torch

    tensor = torch.zeros((3, 2, 5), dtype=torch.int32)[:, :, 1:4]
    view = CacheView.of(tensor, "mla", 2).tensors[0]
    assert view.strides == (40, 20, 4) and view.itemsize == 4
    assert view.address - view.storage[0] == 4 and view.storage[1] == 120


def test_a_cross_layer_tensor_has_the_layers_that_are_expected() -> None:
    with pytest.raises(SpecError, match="2 layers in the tensor, 3 expected"):
        layer_views(np.zeros((2, 1, 1, 1, 1), np.uint8), "LBHNC", 3)


def test_an_index_covers_all_bytes_of_its_elements() -> None:
    view = CacheView.of(np.zeros((6, 2, 5), np.uint32), "mla", 4, kernel_blocks=2)
    assert view.tensors[0].bytes_per_index == 40


def test_what_is_no_tensor_is_told_what_would_be() -> None:
    with pytest.raises(SpecError, match="list is neither a torch tensor nor a numpy array"):
        CacheView.of([[1, 2]], "mla", 1)


def test_a_view_does_not_print_its_tensor() -> None:
    assert "array" not in repr(CacheView.of(np.zeros((3, 2, 5), np.uint8), "mla", 2))


def test_layers_that_reach_over_the_end_of_their_row_are_refused() -> None:
    memory = np.zeros(6 * 24 + 8, np.uint8)
    tails = np.lib.stride_tricks.as_strided(memory[20:], (6, 8), (24, 1))
    layers = [LayerSpec.opaque(name, page_bytes=8) for name in "ab"]
    caches = {
        "a": CacheView.of(memory[: 6 * 24].reshape(6, 24)[:, :8], "pages", 0),
        "b": CacheView.of(tails, "pages", 0),
    }
    with pytest.raises(SpecError, match="pages of a shared row reach 28 bytes, a row has 24"):
        derive_canonical_mappings(LayerTable(layers), caches, RankGrid(), 0)


@pytest.mark.parametrize(("first", "second"), [(6, 5), (5, 6)])
def test_layers_of_one_row_have_as_many_rows(first: int, second: int) -> None:
    memory = np.zeros((6, 24), np.uint8)
    layers = [LayerSpec.opaque(name, page_bytes=8) for name in "ab"]
    caches = {
        "a": CacheView.of(memory[:first, :8], "pages", 0),
        "b": CacheView.of(memory[:second, 8:16], "pages", 0),
    }
    with pytest.raises(SpecError, match=f"'b' has {second} rows, .* 'a' .* has {first}"):
        derive_canonical_mappings(LayerTable(layers), caches, RankGrid(), 0)


def test_an_unknown_cross_layer_order_is_refused_with_the_orders_there_are() -> None:
    with pytest.raises(SpecError, match="order 'LBHCN': choose one of LBHNC, LBNHC"):
        layer_views(np.zeros((1, 1, 1, 1, 1), np.uint8), "LBHCN", 1)


def test_neighbouring_fragments_become_one() -> None:
    left = np.arange(100, 116, 4)
    assert boxes_of(left, left - 100, np.full(4, 4)) == (Box(100, 0, ((16, 1, 1),)),)


def test_boxes_of_unequal_fragments_that_touch_become_one() -> None:
    short, long = Box(100, 40, ((4, 1, 1),)), Box(104, 44, ((8, 1, 1),))
    assert folded([short, long]) == (Box(100, 40, ((12, 1, 1),)),)
    apart = Box(104, 45, ((8, 1, 1),))
    assert folded([short, apart]) == (short, apart)


@pytest.mark.parametrize("kernel_blocks", [2, 3])
def test_a_block_is_a_whole_number_of_kernel_blocks(kernel_blocks: int) -> None:
    rows = np.zeros((kernel_blocks, 2, 5), np.uint8)
    with pytest.raises(SpecError, match=f"block_size=7 tokens is not {kernel_blocks} equal"):
        CacheView.of(rows, "mla", 7, kernel_blocks=kernel_blocks)


def test_fields_below_one_loop_agree_on_its_extent() -> None:
    fields = {name: Field(name, (Axis("head", count),), 1) for name, count in (("k", 2), ("v", 4))}
    with pytest.raises(LayoutError, match=r"different extents of 'head' \(\[2, 4\]\)"):
        place(Nest(("head",), ("k", "v")), fields, lambda _, axis: axis.extent)


# ---- writers -------------------------------------------------------------------------------------


def test_slices_of_a_page_begin_on_host_lines() -> None:
    """Three replicas, ten lines and a piece of one: no two of them write in one line."""
    size = 10 * 128 + 7
    whole = (CopyRun(0, 0, size, 1, size, size),)
    places = []
    for index in range(3):
        sliced = POLICIES["split"](CanonicalPageMapping(size, size, whole, 3, index, True))
        places += [
            (run.canonical_offset, run.canonical_offset + run.fragment_size)
            for run in sliced.effective_store_runs
        ]
    assert [start % 128 for start, _ in places] == [0, 0, 0]
    assert [start for start, _ in places[1:]] == [stop for _, stop in places[:-1]]
    assert (places[0][0], places[-1][1]) == (0, size)


def test_a_state_layout_is_named_after_its_order() -> None:
    state = LayerSpec.recurrent("s", segments=[("x", 8, 4)], conv_positions=3, temporal=[])
    for channels_first, name in ((True, "state_channels_first"), (False, "state_channels_last")):
        assert state_layout(state, channels_first=channels_first).name == name
