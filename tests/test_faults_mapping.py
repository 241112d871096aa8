"""Faults that software of this kind is known for, each as a small input with its right value.

The values are literal: they were computed by enumerating coordinates, not by this implementation.
A test is named after what is right, and says in its first line which fault it keeps away (numbers
are the rows of the table in docs/testing.md).
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest

from vkvmap import (
    CacheView,
    LayerSpec,
    LayerTable,
    RankGrid,
    TensorView,
    derive_canonical_mappings,
    derive_group,
    detect_layout,
)
from vkvmap.cache import layer_views
from vkvmap.chunk import ChunkLayout
from vkvmap.configuration import Configuration
from vkvmap.conformance import byte_map
from vkvmap.errors import LayoutError
from vkvmap.identity import Identity
from vkvmap.keys import chunk_keys, whole_chunks
from vkvmap.layout import LAYOUTS, Layout, Part, state_layout
from vkvmap.mapping import CanonicalPageMapping, Mappings
from vkvmap.sections import pages_per_chunk, sections_for
from vkvmap.sharing import decide
from vkvmap.spec import Nest

FAR = 1 << 40  # a storage that bounds nothing


def view(
    layout: str | Layout,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None = None,
    *,
    elem: int = 1,
    block_size: int = 0,
    address: int = 0,
    kernel_blocks: int = 1,
    order: tuple[int, ...] | None = None,
) -> CacheView:
    """A cache of `shape`, strides in elements; dense in storage `order` if none are given."""
    if strides is None:
        strides = tuple(
            prod(shape[inner] for inner in (order or range(len(shape)))[position + 1 :])
            for position in np.argsort(order or range(len(shape)))
        )
    in_bytes = tuple(stride * elem for stride in strides)
    tensor = TensorView(address, shape, in_bytes, elem, (0, FAR))
    return CacheView.of(tensor, layout, block_size, kernel_blocks=kernel_blocks)


def split(
    layout: str, *, heads: int, bs: int, hs: int, elem: int = 2, blocks: int = 3, **more: Any
) -> CacheView:
    """A dense split cache (blocks, 2, tokens, heads, head_size)."""
    order = (0, 1, 3, 2, 4) if layout == "split_hnd" else (0, 1, 2, 3, 4)
    shape = (blocks, 2, bs, heads, hs)
    return view(layout, shape, elem=elem, block_size=bs, order=order, **more)


def one(
    spec: LayerSpec, cache: CacheView, grid: RankGrid, rank: int = 0, **more: Any
) -> CanonicalPageMapping:
    """The certified mapping of a single layer."""
    table = LayerTable([spec])
    mappings = derive_canonical_mappings(table, {spec.name: cache}, grid, rank, strict=True, **more)
    return mappings.by_layer[spec.name]


def attention(heads: int, hs: int = 128, **more: Any) -> LayerSpec:
    return LayerSpec.attention("layer", num_kv_heads=heads, head_size=hs, **more)


def address_in_page(mappings: Mappings, name: str, page_byte: int, block: int) -> int:
    """Address of a page byte of a block, by looking every piece of the page up."""
    addressing = mappings.addressing[name]
    for box in addressing.boxes:
        for index in np.ndindex(*(count for count, _, _ in reversed(box.levels))):
            steps = list(zip(reversed(index), box.levels, strict=True))
            if box.left + sum(i * left for i, (_, left, _) in steps) == page_byte:
                memory = box.right + sum(i * right for i, (_, _, right) in steps)
                return addressing.base + block * addressing.block_stride + memory
    raise AssertionError(f"page byte {page_byte} has no address")


# ---- heads ---------------------------------------------------------------------------------------


def test_replicated_heads_are_slices_that_four_ranks_must_bring_together() -> None:
    """Fault 1: only rank 0's slice was moved and the page called complete."""
    group = derive_group(
        LayerTable([attention(4)]),
        {"layer": split("split_nhd", heads=1, bs=128, hs=128)},
        RankGrid(tp=8),
        strict=True,
    )
    mappings = [m.by_layer["layer"] for m in group]
    assert {m.local_page_size_bytes for m in mappings} == {65_536}
    assert {m.canonical_page_size_bytes for m in mappings} == {262_144}
    assert [r for r in range(8) if mappings[r].is_writer(0)] == [0, 2, 4, 6]
    assert [r for r in range(8) if mappings[r].is_writer(1)] == [1, 3, 5, 7]
    assert 262_144 - np.unique(byte_map(mappings[0])).size == 196_608


def test_global_heads_come_from_the_layer_and_not_from_local_heads_times_tp() -> None:
    """Fault 2: two KV heads at tp=4 counted as four."""
    mapping = one(attention(2), split("split_nhd", heads=1, bs=16, hs=128), RankGrid(tp=4), rank=3)
    assert mapping.canonical_page_size_bytes == 16_384
    assert byte_map(mapping)[0] == 256
    assert (mapping.num_writers, mapping.writer_index) == (2, 1)


def test_a_page_stops_shrinking_at_one_head_per_rank() -> None:
    """Fault 3: tp=8 to tp=16 refused because lengths were thought proportional to 1/tp."""
    found = [
        one(attention(8), split("split_nhd", heads=1, bs=16, hs=128), RankGrid(tp=tp))
        for tp in (8, 16)
    ]
    assert [m.local_page_size_bytes for m in found] == [8_192, 8_192]
    assert [m.canonical_page_size_bytes for m in found] == [65_536, 65_536]
    assert [m.num_writers for m in found] == [1, 2]


def test_layers_of_one_model_have_head_counts_of_their_own() -> None:
    """Fault 4: target (16 heads) and draft (8) both show one local head at tp=16."""
    table = LayerTable(
        [attention(heads, 4, elem=1).renamed(name) for name, heads in (("a", 16), ("b", 8))]
    )
    cache = split("split_nhd", heads=1, bs=2, hs=4, elem=1)
    found = derive_canonical_mappings(
        table, {"a": cache, "b": cache}, RankGrid(tp=16), 5, strict=True
    ).by_layer
    assert (byte_map(found["a"])[0], found["a"].num_writers) == (20, 1)
    assert byte_map(found["b"])[0] == 8
    assert (found["b"].num_writers, found["b"].writer_index) == (2, 1)


@pytest.mark.parametrize(("tp", "heads"), [(2, 1), (4, 1)])
def test_a_replicated_models_page_is_as_long_under_every_tp(tp: int, heads: int) -> None:
    """Fault 5: rows of world_size x local page, 16,384 bytes at tp=2 and 32,768 at tp=4."""
    spec = attention(2)
    table, cache = LayerTable([spec]), split("split_nhd", heads=heads, bs=16, hs=128)
    mappings = derive_canonical_mappings(table, {"layer": cache}, RankGrid(tp=tp), 0, strict=True)
    assert mappings.by_layer["layer"].canonical_page_size_bytes == 16_384
    assert [s.payload_bytes for s in sections_for(mappings, 16, 4)] == [16_384]


def test_recurrent_state_that_nobody_described_is_opaque_and_not_replicated_with_kv_heads() -> None:
    """Fault 6: four distinct shards of state collapsed to one by the KV replication factor."""
    table = LayerTable([attention(2), LayerSpec.opaque("state", page_bytes=4_096)])
    caches = {
        "layer": split("split_nhd", heads=1, bs=16, hs=128),
        "state": view("pages", (3, 4_096)),
    }
    for rank, mappings in enumerate(derive_group(table, caches, RankGrid(tp=8))):
        state = mappings.by_layer["state"]
        assert state.canonical_page_size_bytes == 32_768
        assert (state.num_writers, state.certified) == (1, False)
        assert state.runs[0].canonical_offset == rank * 4_096
        if rank == 5:
            assert byte_map(state)[0] == 20_480
        assert mappings.by_layer["layer"].num_writers == 4


def test_a_latent_row_is_kept_once_and_its_ranks_take_turns() -> None:
    """Fault 7: one copy of the MLA latent per rank, 335,872 bytes instead of 41,984."""
    cache = view("mla", (3, 64, 656), block_size=64)
    mapping = one(LayerSpec.mla("layer", row_bytes=656), cache, RankGrid(tp=8), rank=5)
    assert mapping.canonical_page_size_bytes == 41_984
    assert mapping.num_writers == 8
    assert [page for page in range(24) if mapping.is_writer(page)] == [5, 13, 21]


def test_grouped_query_heads_are_shards_and_no_replicas() -> None:
    """Fault 8: a rule that is right for MLA, reused for GQA."""
    cache = split("split_nhd", heads=4, bs=4, hs=2, elem=1)
    mapping = one(attention(8, 2, elem=1), cache, RankGrid(tp=2), rank=1)
    assert byte_map(mapping)[0] == 8
    assert mapping.num_writers == 1
    heads = {byte % 16 // 2 for byte in byte_map(mapping)}
    assert heads == {4, 5, 6, 7}


# ---- layouts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layout", "place"), [("split_nhd", 12), ("split_hnd", 18)])
def test_token_and_head_order_is_the_caches(layout: str, place: int) -> None:
    """Fault 9: HND assumed while the cache is NHD. K of token 1, head 2."""
    cache = split(layout, heads=4, bs=4, hs=2, elem=1)
    table = LayerTable([attention(4, 2, elem=1)])
    mappings = derive_canonical_mappings(table, {"layer": cache}, RankGrid(), 0, strict=True)
    address = sum(i * s for i, s in zip((1, 0, 1, 2, 0), cache.tensors[0].strides, strict=True))
    assert address_in_page(mappings, "layer", place, block=1) == address
    assert byte_map(mappings.by_layer["layer"])[place] == place


@pytest.mark.parametrize(("layout", "place"), [("split_nhd", 12), ("split_hnd", 18)])
def test_a_shard_puts_the_same_element_in_the_same_canonical_place(layout: str, place: int) -> None:
    """Fault 9, from rank 1 of 2: its local head 0 is head 2."""
    cache = split(layout, heads=2, bs=4, hs=2, elem=1)
    grid, table = RankGrid(tp=2), LayerTable([attention(4, 2, elem=1)])
    mappings = derive_canonical_mappings(table, {"layer": cache}, grid, 1, strict=True)
    local = int(np.flatnonzero(byte_map(mappings.by_layer["layer"]) == place)[0])
    address = sum(i * s for i, s in zip((1, 0, 1, 0, 0), cache.tensors[0].strides, strict=True))
    assert address_in_page(mappings, "layer", local, block=1) == address


def test_packed_cells_are_head_by_head_as_declared() -> None:
    """Fault 10: (blocks, 16, 2, 256) read as [.., K|V, ..] instead of [.., head, K|V]."""
    cache = view("packed_nhd", (3, 2, 16, 256), (8192, 256, 512, 1), elem=2, block_size=16)
    mappings = derive_canonical_mappings(
        LayerTable([attention(2)]), {"layer": cache}, RankGrid(), 0, strict=True
    )
    strides = cache.tensors[0].strides
    for place, (head, element) in {
        0: (0, 0), 255: (0, 127), 256: (0, 128), 511: (0, 255), 512: (1, 0), 767: (1, 127),
    }.items():  # fmt: skip
        address = head * strides[1] + element * strides[3] + place % 2
        assert address_in_page(mappings, "layer", place, block=0) == address
        assert byte_map(mappings.by_layer["layer"])[place] == place


def test_packed_cells_in_storage_order_are_refused_and_not_read_as_halves() -> None:
    """Fault 10: undeclared, (blocks, 16, 2, 256) could be (.., K|V, ..) or (.., head, K|V)."""
    storage = np.zeros((3, 16, 2, 256), dtype=np.uint16)
    with pytest.raises(LayoutError, match="declare it"):
        derive_canonical_mappings(LayerTable([attention(2)]), {"layer": storage}, RankGrid(), 0)
    view = storage.transpose(0, 2, 1, 3)
    assert detect_layout(view, attention(2), block_size=16).name == "packed_nhd"


@pytest.mark.parametrize(
    ("strides", "k_of_block_1", "v_of_block_0"),
    [((2048, 1024, 64, 32, 1), 2_048, 1_024), ((1024, 2048, 64, 32, 1), 1_024, 2_048)],
)
def test_halves_lie_where_the_strides_put_them(
    strides: tuple[int, ...], k_of_block_1: int, v_of_block_0: int
) -> None:
    """Fault 11: [blocks, 2, ..] and [2, blocks, ..] need the same storage."""
    cache = view("split_nhd", (2, 2, 16, 2, 32), strides, block_size=16)
    mappings = derive_canonical_mappings(
        LayerTable([attention(2, 32, elem=1)]), {"layer": cache}, RankGrid(), 0, strict=True
    )
    assert address_in_page(mappings, "layer", 0, block=1) == k_of_block_1
    assert address_in_page(mappings, "layer", 1024, block=0) == v_of_block_0


def test_a_shape_that_could_be_anything_is_checked_against_what_was_declared() -> None:
    """Fault 12: the block axis guessed from (16, 2, 16, 4, 128), 16 blocks of 16 tokens."""
    block_first = view("split_nhd", (16, 2, 16, 4, 128), elem=2, block_size=16)
    dense = derive_canonical_mappings(
        LayerTable([attention(4)]), {"layer": block_first}, RankGrid(), 0, strict=True
    )
    assert dense.addressing["layer"].block_stride == 2 * 16 * 4 * 128 * 2
    token_first = view(
        "split_nhd", (16, 2, 16, 4, 128), (512, 131_072, 8_192, 128, 1), elem=2, block_size=16
    )
    moved = derive_canonical_mappings(
        LayerTable([attention(4)]), {"layer": token_first}, RankGrid(), 0, strict=True
    )
    assert moved.addressing["layer"].block_stride == 1024
    assert moved.by_layer == dense.by_layer
    hnd = view("split_hnd", (16, 2, 16, 4, 128), elem=2, block_size=16)
    refused = derive_canonical_mappings(LayerTable([attention(4)]), {"layer": hnd}, RankGrid(), 0)
    assert [refusal.rule for refusal in refused.refusals] == ["layout"]


def test_layer_and_block_order_of_the_cache_never_reaches_the_canonical_page() -> None:
    """Fault 13: [block][layer] and [layer][block] slabs have equal sizes; only addresses differ."""
    table = LayerTable([attention(2, 16, elem=2).renamed(f"l{i}") for i in range(2)])
    found = {}
    for order in ("LBNHC", "BLNHC"):
        sizes = {"L": 2, "B": 3, "H": 2, "N": 8, "C": 32}
        whole = np.zeros([sizes[axis] for axis in order], dtype=np.uint16)
        caches = {
            f"l{i}": CacheView.of(each, "packed_nhd", 8)
            for i, each in enumerate(layer_views(whole, order, num_layers=2))
        }
        found[order] = derive_canonical_mappings(table, caches, RankGrid(), 0, strict=True)
    steps = {order: m.addressing["l0"].block_stride for order, m in found.items()}
    apart = {o: m.addressing["l1"].base - m.addressing["l0"].base for o, m in found.items()}
    assert steps == {"LBNHC": 1_024, "BLNHC": 2_048}
    assert apart == {"LBNHC": 3_072, "BLNHC": 1_024}
    assert found["LBNHC"].by_layer == found["BLNHC"].by_layer


def test_native_formats_that_order_bytes_differently_have_different_names() -> None:
    """Fault 13: what does reach stored bytes is in the name, even where all sizes match."""
    names = {
        Identity("m", "r", LayerTable([attention(2)]), 16, "native", layouts=layout, spans=16).name
        for layout in ("split_nhd", "split_hnd", "packed_nhd", "packed_hnd", "cpu_hnd")
    }
    assert len(names) == 5


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("family", ["native", "universal"])
def test_a_row_holds_layer_after_layer_under_any_tp(tp: int, family: Any) -> None:
    """Fault 14: rank-major rows gave tp=2's layer 1 for tp=1's layer 0 at byte 512."""
    spec = LayerSpec.attention("l0", num_kv_heads=2, head_size=16, elem=1)
    table = LayerTable([spec, spec.renamed("l1")])
    cache = split("split_hnd", heads=2 // tp, bs=16, hs=16, elem=1)
    chunk = ChunkLayout.of(table, 16)["0"]
    assert chunk.offsets == {"l0": 0, "l1": 1_024}
    assert chunk.payload_bytes == 2_048
    group = derive_group(
        table, {"l0": cache, "l1": cache}, RankGrid(tp=tp), family=family, strict=True
    )
    for name in ("l0", "l1"):
        covered = np.sort(np.concatenate([byte_map(m.by_layer[name]) for m in group]))
        assert np.array_equal(covered, np.arange(1_024))


def test_halves_with_different_inner_orders_are_exact_if_described_and_refused_if_not() -> None:
    """Fault 15: V was vectorised while K was not, and both were read alike."""
    spec = LayerSpec.attention("layer", num_kv_heads=2, head_size=4, elem=1)
    shape = (3, 2, 8, 8)
    plain = view("packed_nhd", shape, (128, 8, 16, 1), block_size=8)
    transposed = view("packed_nhd", shape, (128, 8, 1, 16), block_size=8)
    for cache, certified in ((plain, True), (transposed, False)):
        mappings = derive_canonical_mappings(LayerTable([spec]), {"layer": cache}, RankGrid(), 0)
        assert mappings.by_layer["layer"].certified is certified
    mixed = Layout(
        "k_rows_v_columns",
        (
            Part(
                ("block", "cell"),
                Nest(
                    (), (Nest(("token", "head"), ("k",)), Nest(("head", "v_dim", "token"), ("v",)))
                ),
            ),
        ),
        encoding="v_transposed",
    )
    mapping = one(spec, view(mixed, (3, 128), block_size=8), RankGrid(), family="universal")
    # Token 1, head 1: K at (1*2+1)*4, V of dim 2 at 64 + (1*4+2)*8 + 1; cell (1*2+1)*8.
    assert byte_map(mapping)[12] == 24
    assert byte_map(mapping)[64 + 6 * 8 + 1] == 24 + 4 + 2


@pytest.mark.parametrize(("layout", "place"), [("split_hnd", 16), ("split_nhd", 8)])
def test_a_page_of_one_token_and_one_head_is_what_it_was_declared(layout: str, place: int) -> None:
    """Fault 16: extents of 1 pass both stride tests, and NHD happened to be tried first."""
    cache = view(layout, (3, 2, 1, 1, 4), elem=2, block_size=1)
    mapping = one(attention(2, 4), cache, RankGrid(tp=4, dcp=2), rank=2)
    assert byte_map(mapping)[0] == place


# ---- strides, padding, shared rows ---------------------------------------------------------------


def test_a_padded_page_is_found_by_its_stride_and_its_padding_is_nobodys() -> None:
    """Fault 17: the block stride of another view used for a page of 1,024 bytes every 1,152."""
    cache = view("mla", (8, 16, 64), (1_152, 64, 1), block_size=16)
    mappings = derive_canonical_mappings(
        LayerTable([LayerSpec.mla("layer", row_bytes=64)]), {"layer": cache}, RankGrid(), 0
    )
    addressing = mappings.addressing["layer"]
    assert addressing.block_stride == 1_152
    assert addressing.base + 5 * addressing.block_stride == 5_760
    assert addressing.base + 5 * addressing.block_stride + addressing.extent == 6_784
    assert addressing.page_bytes == 1_024


def test_layers_of_two_page_sizes_share_one_block_stride() -> None:
    """Fault 18: one page size assumed per group; A has 36,864 bytes per block, B 8,448 after it."""
    table = LayerTable(
        [LayerSpec.mla("a", row_bytes=576), LayerSpec.indexer("b", value_bytes=128, scale_bytes=4)]
    )
    storage = np.zeros(16 * 45_312, dtype=np.uint8)
    assert storage.nbytes == 724_992
    rows = storage.reshape(16, 45_312)
    caches = {
        "a": CacheView.of(rows[:, :36_864].reshape(16, 64, 576), "mla", 64),
        "b": CacheView.of(rows[:, 36_864:].reshape(16, 64, 132), "planar", 64),
    }
    assert caches["a"].tensors[0].storage[1] == 724_992
    mappings = derive_canonical_mappings(table, caches, RankGrid(), 0, strict=True)
    origin = storage.__array_interface__["data"][0]
    for block in range(16):
        assert address_in_page(mappings, "a", 0, block) - origin == block * 45_312
        assert address_in_page(mappings, "b", 0, block) - origin == block * 45_312 + 36_864


def test_page_stride_and_page_length_are_two_numbers() -> None:
    """Fault 19: fused pages of all layers; this layer's 512 bytes lie at +1,024 of every 4,096."""
    cache = view("mla", (4, 8, 64), (4_096, 64, 1), block_size=8, address=1_024)
    mappings = derive_canonical_mappings(
        LayerTable([LayerSpec.mla("layer", row_bytes=64)]), {"layer": cache}, RankGrid(), 0
    )
    assert address_in_page(mappings, "layer", 0, block=3) == 13_312
    assert address_in_page(mappings, "layer", 511, block=3) == 13_823
    assert mappings.by_layer["layer"].local_page_size_bytes == 512


def test_a_cache_of_kernel_blocks_needs_the_ratio_declared() -> None:
    """Faults 21 and 23: 1,818 blocks of 128 tokens over a first dimension of 3,636."""
    shape = (3_636, 64, 576)
    table = LayerTable([LayerSpec.mla("layer", row_bytes=576)])
    told = view("mla", shape, block_size=128, kernel_blocks=2)
    mappings = derive_canonical_mappings(table, {"layer": told}, RankGrid(), 0, strict=True)
    assert mappings.addressing["layer"].num_blocks == 1_818
    assert mappings.addressing["layer"].block_stride == 2 * 64 * 576
    assert mappings.by_layer["layer"].canonical_page_size_bytes == 128 * 576
    untold = view("mla", shape, block_size=128)
    refused = derive_canonical_mappings(table, {"layer": untold}, RankGrid(), 0)
    assert not refused.by_layer["layer"].certified
    assert refused.refusals[0].rule == "layout"
    assert "'token' is 64, 128 expected" in refused.refusals[0].seen


def test_a_first_dimension_that_is_no_whole_number_of_manager_blocks_is_refused() -> None:
    """Fault 21: a map for 1,818 blocks is not one for 3,635 kernel blocks."""
    cache = view("mla", (3_635, 64, 576), block_size=128, kernel_blocks=2)
    mappings = derive_canonical_mappings(
        LayerTable([LayerSpec.mla("layer", row_bytes=576)]), {"layer": cache}, RankGrid(), 0
    )
    assert "not a whole number of manager blocks" in mappings.refusals[0].seen


def test_the_kernel_block_is_read_from_the_token_axis_of_the_declared_layout() -> None:
    """Fault 22: an axis index fixed for NHD read 8 heads as 8 tokens."""
    shape = (4, 8, 16, 256)
    table = LayerTable([attention(8)])
    right = view("packed_hnd", shape, elem=2, block_size=16)
    mappings = derive_canonical_mappings(table, {"layer": right}, RankGrid(), 0, strict=True)
    assert mappings.by_layer["layer"].span_tokens == 16
    wrong = view("packed_hnd", shape, elem=2, block_size=8)
    assert derive_canonical_mappings(table, {"layer": wrong}, RankGrid(), 0).refusals
    with pytest.raises(LayoutError, match="packed_hnd, cpu_hnd; declare"):
        detect_layout(np.zeros(shape, dtype=np.uint16), attention(8), block_size=16)


def test_blocks_are_counted_by_the_stride_and_not_by_one_layers_page() -> None:
    """Fault 24: 362,496 bytes hold 8 blocks; one layer's page would give 9 or 42."""
    table = LayerTable(
        [LayerSpec.mla("a", row_bytes=576), LayerSpec.indexer("b", value_bytes=128, scale_bytes=4)]
    )
    rows = np.zeros(362_496, dtype=np.uint8).reshape(-1, 45_312)
    caches = {
        "a": CacheView.of(rows[:, :36_864].reshape(-1, 64, 576), "mla", 64),
        "b": CacheView.of(rows[:, 36_864:].reshape(-1, 64, 132), "planar", 64),
    }
    mappings = derive_canonical_mappings(table, caches, RankGrid(), 0, strict=True)
    assert [mappings.addressing[name].num_blocks for name in "ab"] == [8, 8]


def test_a_packed_row_has_its_own_length() -> None:
    """Fault 25: the nominal 576-byte row used for a packed one of 656 bytes."""
    cache = view("mla", (3, 64, 656), block_size=64)
    table = LayerTable([LayerSpec.mla("layer", row_bytes=656)])
    mappings = derive_canonical_mappings(table, {"layer": cache}, RankGrid(), 0, strict=True)
    assert address_in_page(mappings, "layer", 1_968, block=0) == 3 * 656 == 1_968
    nominal = LayerTable([LayerSpec.mla("layer", row_bytes=576)])
    refused = derive_canonical_mappings(nominal, {"layer": cache}, RankGrid(), 0)
    assert "a cell has 656 bytes, the layer's fields need 576" in refused.refusals[0].seen


def test_every_cache_is_a_layer_by_its_name_indexers_included() -> None:
    """Fault 26: 78 latent caches and 21 indexer caches are 99 mappings, not 78."""
    latent = LayerSpec.mla("latent", row_bytes=576)
    index = LayerSpec.indexer("index", value_bytes=128, scale_bytes=4)
    table = LayerTable(
        [latent.renamed(f"layers.{i}.attn") for i in range(78)]
        + [index.renamed(f"layers.{i}.indexer") for i in range(21)]
    )
    caches = {
        name: view("planar", (2, 64, 132), block_size=64)
        if spec.kind == "indexer"
        else view("mla", (2, 64, 576), block_size=64)
        for name, spec in table.items()
    }
    mappings = derive_canonical_mappings(table, caches, RankGrid(tp=8), 3, strict=True)
    assert len(mappings.by_layer) == 99
    assert set(mappings.by_layer) == set(table)
    per_token = sum(m.local_page_size_bytes for m in mappings.by_layer.values()) // 64
    assert per_token == 47_700


def test_scales_in_the_cell_travel_with_it() -> None:
    """Fault 27: the transfer width left out the inline scales: 8,192 of 8,448 bytes moved."""
    spec = attention(2, dtype="float8_e4m3fn", scale_bytes=4)
    cache = view("packed_nhd_scaled", (3, 2, 16, 264), order=(0, 2, 1, 3), block_size=16)
    mapping = one(spec, cache, RankGrid())
    assert mapping.local_page_size_bytes == 8_448
    assert np.array_equal(byte_map(mapping), np.arange(8_448))


@pytest.mark.parametrize("layout", ["packed_nhd", "packed_nhd_scaled"])
def test_cells_with_scales_are_certified_and_cut_between_cells(layout: str) -> None:
    """Fault 28: a cell of 264 bytes never certified, because 2 * head_size was expected."""
    spec = attention(8, dtype="float8_e4m3fn", scale_bytes=4)
    cache = view(layout, (3, 2, 16, 264), order=(0, 2, 1, 3), block_size=16)
    mapping = one(spec, cache, RankGrid(tp=4), rank=1)
    assert mapping.canonical_page_size_bytes == 33_792
    for token in range(16):
        local = byte_map(mapping)[token * 528 : (token + 1) * 528]
        first = token * 2_112 + 528
        assert np.array_equal(local, np.arange(first, first + 528))


def test_the_width_of_a_row_is_part_of_its_name() -> None:
    """Fault 29: index rows of 68 and of 132 bytes under one layer name."""
    names = set()
    for value, row in ((64, 68), (128, 132)):
        table = LayerTable([LayerSpec.indexer("index", value_bytes=value, scale_bytes=4)])
        assert table["index"].canonical_bytes(1) == row
        names.add(Identity("m", "r", table, 64).name)
    assert len(names) == 2


def test_planar_index_pages_keep_values_and_scales_apart_under_context_parallelism() -> None:
    """Fault 30: a planar page read as rows sends value byte 128 to 260."""
    cache = view("planar", (3, 64, 132), block_size=64)
    spec = LayerSpec.indexer("layer", value_bytes=128, scale_bytes=4)
    mapping = one(spec, cache, RankGrid(tp=2, dcp=2), rank=1)
    assert byte_map(mapping)[128] == 384
    assert byte_map(mapping)[8_196] == 16_396


def test_a_layer_in_a_slab_keeps_its_offset_and_stride() -> None:
    """Fault 33: a mapping derived for a packed slab was thrown away."""
    rows = np.zeros((4, 3_000), dtype=np.uint8)
    cache = CacheView.of(rows[:, 700:1_724].reshape(4, 16, 64), "mla", 16)
    table = LayerTable([LayerSpec.mla("layer", row_bytes=64)])
    mappings = derive_canonical_mappings(table, {"layer": cache}, RankGrid(), 0, strict=True)
    addressing = mappings.addressing["layer"]
    assert addressing.base - rows.__array_interface__["data"][0] == 700
    assert (addressing.block_stride, addressing.extent) == (3_000, 1_024)


def test_a_slab_with_one_undescribed_layer_is_opaque_as_a_whole_because_rows_are_one_unit() -> None:
    """Fault 33: opaque over the whole row, moved once, and not layer by layer."""
    rows = np.zeros((4, 3_000), dtype=np.uint8)
    caches = {
        "known": CacheView.of(rows[:, :1_024].reshape(4, 16, 64), "mla", 16),
        "unknown": CacheView.of(rows[:, 1_024:3_000], "pages"),
    }
    table = LayerTable(
        [
            LayerSpec.mla("known", row_bytes=64, group="g"),
            LayerSpec.opaque("unknown", page_bytes=1_976, group="g"),
        ]
    )
    mappings = derive_canonical_mappings(table, caches, RankGrid(tp=2), 1)
    assert [refusal.rule for refusal in mappings.refusals] == ["shared-row", "undescribed"]
    for name in caches:
        assert not mappings.by_layer[name].certified
        assert mappings.carrier[name] == "known"
        assert mappings.by_layer[name].local_page_size_bytes == 3_000
        assert mappings.by_layer[name].canonical_page_size_bytes == 6_000
        assert mappings.by_layer[name].runs[0].canonical_offset == 3_000


# ---- context parallelism -------------------------------------------------------------------------


def span(bs: int, **grid: Any) -> int:
    grid = {"tp": 4} | grid
    return one(
        LayerSpec.mla("layer", row_bytes=8),
        view("mla", (3, bs, 8), block_size=bs),
        RankGrid(**grid),
    ).span_tokens


def test_tokens_are_counted_in_spans_over_all_context_shards() -> None:
    """Fault 37: 601 tokens are 18 blocks under dcp=2, not 37."""
    assert whole_chunks(601, span(16, dcp=2)) == 18


def test_thirty_two_tokens_are_one_key_and_one_page() -> None:
    """Fault 38: the hash unit was the local page of 16 tokens."""
    assert len(chunk_keys(range(32), span(16, dcp=2))) == 1
    cache = view("mla", (3, 16, 8), block_size=16)
    mapping = one(LayerSpec.mla("layer", row_bytes=8), cache, RankGrid(tp=2, dcp=2))
    assert mapping.canonical_page_size_bytes == 32 * 8


def test_the_block_that_others_see_is_the_span() -> None:
    """Fault 39: the physical block size announced under dcp=2."""
    assert span(16, dcp=2) == 32


@pytest.mark.parametrize(
    ("one_side", "other", "native"),
    [((8, 2), (16, 4), False), ((16, 2), (16, 2), True), ((8, 4), (16, 2), True)],
)
def test_peers_compare_spans_in_one_unit(
    one_side: tuple[int, int], other: tuple[int, int], native: bool
) -> None:
    """Fault 40: bs=8, dcp=2 against bs=16, dcp=4: one side was multiplied, the other not."""
    table = LayerTable([LayerSpec.mla("layer", row_bytes=8)])
    sides = [Configuration(tp=4, dcp=dcp, block_size=bs) for bs, dcp in (one_side, other)]
    sharing = decide(table, sides, "native")
    assert (not sharing.obstacles) is native
    if not native:
        assert "span 16 tokens on one side, 64 on the other" in sharing.obstacles[0]
        assert decide(table, sides).family == "universal"


A = {"tp": 1, "pcp": 2, "dcp": 1, "rank": 1}
B = {"tp": 2, "pcp": 2, "dcp": 2, "rank": 2}
C = {"tp": 2, "pcp": 2, "dcp": 4, "rank": 1}


@pytest.mark.parametrize(
    ("mode", "where", "size", "places", "writers"),
    [
        ("replicates", A, 4, [0, 1, 2, 3], 2),
        ("replicates", B, 8, [1, 3, 5, 7], 2),
        ("replicates", C, 16, [2, 6, 10, 14], 1),
        ("shards", A, 8, [1, 3, 5, 7], 1),
        ("shards", B, 16, [2, 6, 10, 14], 1),
    ],
)
def test_who_owns_a_token_is_the_grids_named_choice(
    mode: Any, where: dict[str, int], size: int, places: list[int], writers: int
) -> None:
    """Fault 41: two code paths disagreed on whether PCP ranks hold shards or replicas."""
    grid = RankGrid(tp=where["tp"], pcp=where["pcp"], dcp=where["dcp"], pcp_mode=mode)
    cache = view("mla", (3, 4, 1), block_size=4)
    mapping = one(LayerSpec.mla("layer", row_bytes=1), cache, grid, rank=where["rank"])
    assert mapping.canonical_page_size_bytes == size
    assert byte_map(mapping).tolist() == places
    assert mapping.num_writers == writers


def test_more_context_shards_than_replicas_are_opaque_because_some_would_hold_nothing() -> None:
    """Fault 41 (c) with PCP as shards: dcp=4 over tp=2 leaves shards that nobody holds."""
    cache = view("mla", (3, 4, 1), block_size=4)
    table, grid = LayerTable([LayerSpec.mla("layer", row_bytes=1)]), RankGrid(tp=2, pcp=2, dcp=4)
    mappings = derive_canonical_mappings(table, {"layer": cache}, grid, 1)
    assert [refusal.rule for refusal in mappings.refusals] == ["context-shards"]
    assert not mappings.by_layer["layer"].certified
    assert mappings.by_layer["layer"].span_tokens == 4 * 8


def test_pcp_replicas_do_not_stretch_the_block() -> None:
    """Fault 42: pcp=2, dcp=2 spans 32 tokens where PCP ranks hold replicas, not 64."""
    assert span(16, pcp=2, dcp=2, pcp_mode="replicates") == 32
    assert span(16, pcp=2, dcp=2, pcp_mode="shards") == 64


def test_groups_have_block_sizes_of_their_own() -> None:
    """Fault 43: a group of 4-token blocks under a 64-token hash was rejected."""
    blocks = {"big": 3_584, "small": 4, "middle": 64}
    table = LayerTable([LayerSpec.mla(name, row_bytes=8, group=name) for name in blocks])
    caches = {n: view("mla", (2, bs, 8), block_size=bs) for n, bs in blocks.items()}
    mappings = derive_canonical_mappings(table, caches, RankGrid(), 0, strict=True)
    tokens = {"big": 3_584, "small": 64, "middle": 64}
    assert pages_per_chunk(mappings, tokens) == {"big": 1, "small": 16, "middle": 1}


# ---- state, stages, element sizes ----------------------------------------------------------------


def conv_spec() -> LayerSpec:
    return LayerSpec.recurrent(
        "state",
        segments=[("x", 8, 8), ("b", 4, 4), ("c", 4, 4)],
        conv_positions=1,
        temporal=[],
        conv_elem=1,
    )


@pytest.mark.parametrize(
    ("rank", "rows"), [(0, [0, 1, 2, 3, 8, 9, 12, 13]), (1, [4, 5, 6, 7, 10, 11, 14, 15])]
)
def test_convolution_state_is_cut_segment_by_segment(rank: int, rows: list[int]) -> None:
    """Fault 44: [x|B|C] cut in flat halves 0-7 and 8-15."""
    spec = conv_spec()
    cache = view(state_layout(spec, channels_first=True), (3, 8))
    assert byte_map(one(spec, cache, RankGrid(tp=2), rank=rank)).tolist() == rows


@pytest.mark.parametrize("grid", [{"dcp": 2}, {"pcp": 2}, {"pcp": 2, "dcp": 2}])
@pytest.mark.parametrize("mode", ["shards", "replicates"])
def test_state_knows_no_context_shards(grid: dict[str, int], mode: Any) -> None:
    """It has no tokens, so context parallelism only ever makes more replicas of it."""
    spec = conv_spec()
    cache = view(state_layout(spec, channels_first=True), (3, 8))
    for rank in range(2 * grid.get("pcp", 1)):
        mapping = one(spec, cache, RankGrid(tp=2, pcp_mode=mode, **grid), rank=rank)
        rows = [0, 1, 2, 3, 8, 9, 12, 13] if rank % 2 == 0 else [4, 5, 6, 7, 10, 11, 14, 15]
        assert byte_map(mapping).tolist() == rows
        assert (mapping.num_writers, mapping.writer_index) == (grid.get("pcp", 1), rank // 2)
        assert mapping.parallelism_agnostic


def test_convolution_state_without_segments_is_opaque_because_flat_halves_would_be_wrong() -> None:
    """Fault 44: the same bytes, not described."""
    table = LayerTable([LayerSpec.opaque("state", page_bytes=8)])
    for rank in range(2):
        mappings = derive_canonical_mappings(
            table, {"state": view("pages", (3, 8))}, RankGrid(tp=2), rank
        )
        assert not mappings.by_layer["state"].certified
        assert byte_map(mappings.by_layer["state"])[0] == rank * 8


def test_an_uneven_pipeline_stage_finds_its_layers_by_name() -> None:
    """Fault 45: 44 layers as 21 + 23; stage 1 began at layer 23 instead of 21."""
    table = LayerTable([attention(2, 4, elem=1).renamed(f"layer.{i}") for i in range(44)])
    cache = split("split_nhd", heads=2, bs=4, hs=4, elem=1)
    stage = {f"layer.{i}": cache for i in range(21, 44)}
    mappings = derive_canonical_mappings(table, stage, RankGrid(), 0, strict=True)
    first = next(iter(mappings.by_layer))
    assert (first, table.index(first)) == ("layer.21", 21)
    assert ChunkLayout.of(table, 4)["0"].offsets[first] == 21 * 64
    assert len(mappings.by_layer) == 23


def test_every_layer_has_an_element_size_of_its_own() -> None:
    """Fault 46: the element type of pool 0 (fp16 state) used for fp8 attention."""
    state = LayerSpec.recurrent(
        "state", segments=[("x", 8, 8)], conv_positions=2, temporal=[], conv_elem=2
    )
    table = LayerTable([state, attention(2, 16, dtype="float8_e4m3fn")])
    assert [{f.elem for f in spec.fields} for spec in table.values()] == [{2}, {1}]
    caches = {
        "state": view(state_layout(state, channels_first=True), (3, 16), elem=2),
        "layer": split("split_nhd", heads=2, bs=4, hs=16, elem=1),
    }
    mappings = derive_canonical_mappings(table, caches, RankGrid(), 0, strict=True)
    assert [m.local_page_size_bytes for m in mappings.by_layer.values()] == [32, 256]


def test_a_group_spread_over_nodes_is_refused_because_a_page_needs_all_its_shards() -> None:
    """Fault 55: 4 of 8 ranks on this node; what they hold is half a page."""
    mappings = derive_canonical_mappings(
        LayerTable([attention(8)]),
        {"layer": split("split_nhd", heads=1, bs=16, hs=128)},
        RankGrid(tp=8, world_size=4),
        0,
    )
    assert mappings.by_layer == {}
    assert mappings.refusals[0].rule == "worker-group"
    assert "4 workers" in mappings.refusals[0].seen


@pytest.mark.parametrize("family", ["native", "universal"])
def test_a_host_row_is_as_long_under_tp_1_as_under_tp_2(family: Any) -> None:
    """Fault 56: rows of 196,608 and 389,120 bytes for one payload, so no token was reused."""
    table = LayerTable([attention(8).renamed(f"l{i}") for i in range(3)])
    rows = set()
    for tp in (1, 2):
        cache = split("split_nhd", heads=8 // tp, bs=16, hs=128)
        mappings = derive_canonical_mappings(
            table, dict.fromkeys(table, cache), RankGrid(tp=tp), 0, family=family, strict=True
        )
        assert {m.canonical_page_size_bytes for m in mappings.by_layer.values()} == {65_536}
        rows |= {s.payload_bytes for s in sections_for(mappings, 16, 4)}
    assert rows == {3 * 65_536}


def test_what_is_copied_are_fragments_shorter_than_the_page() -> None:
    """Fault 61: the path was chosen by the page's 32,768 bytes; the copies are 16,384 each."""
    cache = split("split_hnd", heads=4, bs=16, hs=128)
    mapping = one(attention(8), cache, RankGrid(tp=2), rank=1)
    assert mapping.local_page_size_bytes == 32_768
    pieces = [
        (r.local_offset + i * r.local_stride, r.canonical_offset + i * r.canonical_stride)
        for r in mapping.runs
        for i in range(r.num_fragments)
    ]
    assert pieces == [(0, 16_384), (16_384, 49_152)]
    assert {r.fragment_size for r in mapping.runs} == {16_384}


def test_every_known_layout_is_one_of_those_declared_here() -> None:
    """A layout that is added needs its byte order in the table above the tests."""
    assert set(LAYOUTS) == {
        "split_nhd", "split_hnd", "packed_nhd", "packed_hnd", "packed_nhd_scaled",
        "packed_hnd_scaled", "nhd_planar_scales", "hnd_planar_scales", "mla", "planar", "cpu_hnd",
        "head_spans", "state", "pages",
    }  # fmt: skip
