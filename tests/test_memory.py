"""Page bytes to addresses: whatever strides a tensor has, a block's page is read right."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import oracle
from tests.worlds import World, worlds
from vkvmap import CacheView, LayerSpec, LayerTable, RankGrid, derive_canonical_mappings
from vkvmap.boxes import fragments_of
from vkvmap.cache import CROSS_LAYER_ORDERS, TensorView, layer_views
from vkvmap.errors import LayoutError, SpecError
from vkvmap.recognise import PageAddressing, detect_layout

BLOCKS = 3


def read_page(
    memory: np.ndarray, origin: int, addressing: PageAddressing, block: int
) -> np.ndarray:
    """A block's page, byte by byte, out of the flat memory that starts at address `origin`."""
    page = np.full(addressing.page_bytes, -1, dtype=np.int64)
    base = addressing.base + block * addressing.block_stride - origin
    for left, right, size in zip(*fragments_of(addressing.boxes), strict=True):
        assert np.all(page[left : left + size] == -1)
        page[left : left + size] = memory[base + right : base + right + size]
    assert np.all(page >= 0)
    return page


def filled(world: World, tensor: np.ndarray, seed: int) -> list[np.ndarray]:
    """Fill every block of rank 0's tensor the way an engine does; return the pages it means."""
    pages = []
    per_block = world.block_size // world.kernel_blocks
    for block in range(BLOCKS):
        held = world.held(world.truth(oracle.drawn(seed + block)), 0)
        pages.append(oracle.local_pages(world.layout, held, world.kernel_blocks))
        for kernel_block in range(world.kernel_blocks):
            tokens = slice(kernel_block * per_block, (kernel_block + 1) * per_block)
            part = oracle.Truth({name: array[tokens] for name, array in held.fields.items()})
            oracle.write_block(
                tensor, world.layout, block * world.kernel_blocks + kernel_block, part
            )
    return pages


@given(worlds(legal=True), st.data())
def test_padding_offsets_and_axis_orders_do_not_change_the_page(
    world: World, data: st.DataObject
) -> None:
    shape = world.view(BLOCKS).tensors[0].shape
    named = len(shape) - (2 if world.layout in ("planar", "cpu_hnd") else 1)
    stored = oracle.STORED.get(world.layout, tuple(range(len(shape))))
    # Any position of the block axis among the others, which keep the declared order.
    where = data.draw(st.integers(0, named - 1))
    order = [dim for dim in stored if dim != 0]
    order.insert(where, 0)
    padding = [data.draw(st.integers(0, 3)) if dim < named else 0 for dim in range(len(shape))]
    offset = data.draw(st.integers(0, 5))
    storage = np.zeros(
        offset + int(np.prod([shape[d] + padding[d] for d in order])), dtype=np.uint8
    )
    padded = storage[offset:].reshape([shape[d] + padding[d] for d in order])
    tensor = padded.transpose(np.argsort(order))[tuple(slice(0, n) for n in shape)]
    pages = filled(world, tensor, data.draw(st.integers(0, 1000)))
    view = CacheView.of(tensor, world.layout, world.block_size, kernel_blocks=world.kernel_blocks)
    mappings = derive_canonical_mappings(
        LayerTable([world.spec]), {"layer": view}, world.grid, 0, family=world.family
    )
    assert mappings.refusals == ()
    addressing = mappings.addressing["layer"]
    assert addressing.num_blocks == BLOCKS
    origin = storage.__array_interface__["data"][0]
    for block, page in enumerate(pages):
        assert np.array_equal(read_page(storage, origin, addressing, block), page)


@pytest.mark.parametrize("order", CROSS_LAYER_ORDERS)
def test_all_cross_layer_orders_are_read_right(order: str) -> None:
    sizes = {"L": 3, "B": BLOCKS, "H": 2, "N": 4, "C": 10}
    whole = np.random.default_rng(7).integers(0, 256, [sizes[c] for c in order], dtype=np.uint8)
    layout = "packed_nhd" if order.endswith("NHC") else "packed_hnd"
    spec = LayerSpec.attention("x", num_kv_heads=2, head_size=5, elem=1)
    table = LayerTable([spec.renamed(f"l{i}") for i in range(3)])
    caches = {
        f"l{i}": CacheView.of(view, layout, 4)
        for i, view in enumerate(layer_views(whole, order, num_layers=3))
    }
    mappings = derive_canonical_mappings(table, caches, RankGrid(), 0, strict=True)
    origin = whole.__array_interface__["data"][0]
    by_name = whole.transpose(
        [order.index(c) for c in "LBNHC" if layout == "packed_nhd"]
        or [order.index(c) for c in "LBHNC"]
    )
    for layer in range(3):
        for block in range(BLOCKS):
            page = read_page(whole.reshape(-1), origin, mappings.addressing[f"l{layer}"], block)
            assert np.array_equal(page, by_name[layer, block].reshape(-1))
    if order in ("LHBNC", "BHLNC"):
        assert not mappings.addressing["l0"].is_contiguous


@given(worlds(legal=True), st.data())
def test_perturbed_strides_are_exact_or_refused(world: World, data: st.DataObject) -> None:
    """A wrong stride may only ever cost certification, never rightness."""
    good = world.view(BLOCKS).tensors[0]
    index = data.draw(st.integers(0, len(good.strides) - 1))
    change = data.draw(st.sampled_from([-8, -1, 1, 8, -good.strides[index]]))
    strides = tuple(s + change * (i == index) for i, s in enumerate(good.strides))
    bad = TensorView(1 << 20, good.shape, strides, 1, (0, 1 << 40))
    view = CacheView.of(bad, world.layout, world.block_size, kernel_blocks=world.kernel_blocks)
    try:
        mappings = derive_canonical_mappings(
            LayerTable([world.spec]), {"layer": view}, world.grid, 0, family=world.family
        )
    except SpecError:
        return  # the tensor overlaps itself: not even opaque
    if mappings.by_layer["layer"].certified:
        _check_addresses(world, mappings.addressing["layer"], bad)


def _check_addresses(world: World, addressing: PageAddressing, tensor: TensorView) -> None:
    """Every page byte lies where indexing the tensor by coordinates puts it, none twice."""
    coordinates = np.indices(tensor.shape[1:])
    places = sum(c * s for c, s in zip(coordinates, tensor.strides[1:], strict=True))
    assert addressing.block_stride == tensor.strides[0] * world.kernel_blocks
    expected = np.concatenate(
        [places.reshape(-1) + k * tensor.strides[0] for k in range(world.kernel_blocks)]
    )
    _, right, size = fragments_of(addressing.boxes)
    seen = np.concatenate([np.arange(r, r + n) for r, n in zip(right, size, strict=True)])
    assert np.array_equal(np.sort(seen), np.sort(expected))


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_token_and_head_strides_must_follow_the_declaration(order: tuple[int, ...]) -> None:
    spec = LayerSpec.attention("x", num_kv_heads=2, head_size=4, elem=1)
    shape = (BLOCKS, 2, 3, 8)  # block, head, token, cell
    stored = (*order, 3)
    tensor = oracle.tensor("packed_hnd", shape, stored)
    outside = list(stored).index(1) < list(stored).index(2)
    for layout, right in (("packed_hnd", outside), ("packed_nhd", not outside)):
        mappings = derive_canonical_mappings(
            LayerTable([spec]), {"x": CacheView.of(tensor, layout, 3)}, RankGrid(), 0
        )
        assert mappings.by_layer["x"].certified is right


def test_extents_of_one_leave_the_decision_to_the_declaration() -> None:
    spec = LayerSpec.attention("x", num_kv_heads=1, head_size=4, elem=2)
    tensor = oracle.tensor("packed_hnd", (BLOCKS, 1, 1, 16))
    for layout in ("packed_hnd", "packed_nhd"):
        mappings = derive_canonical_mappings(
            LayerTable([spec]), {"x": CacheView.of(tensor, layout, 1)}, RankGrid(), 0
        )
        assert mappings.by_layer["x"].certified
    with pytest.raises(LayoutError, match=r"allow .*packed_hnd"):
        detect_layout(tensor, spec, block_size=1)


def test_two_heads_and_two_halves_coincide_and_must_be_declared() -> None:
    """Fault 10: (blocks, 16, 2, 256) as [.., K|V, ..] or as [.., head, K|V]."""
    spec = LayerSpec.attention("x", num_kv_heads=2, head_size=128)
    storage = np.zeros((BLOCKS, 16, 2, 512), dtype=np.uint8)
    packed = storage.transpose(0, 2, 1, 3)
    mappings = derive_canonical_mappings(
        LayerTable([spec]), {"x": CacheView.of(packed, "packed_nhd", 16)}, RankGrid(), 0
    )
    run = mappings.by_layer["x"].runs
    assert [(r.local_offset, r.canonical_offset, r.fragment_size) for r in run] == [(0, 0, 16384)]


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((3, 2, 4, 8), (64, 0, 8, 1)), ((3, 2, 4, 8), (64, 32, 4, 1)), ((3, 2, 4, 8), (64, 32, 8, 0))],
)
def test_a_tensor_that_overlaps_itself_is_an_error(
    shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    spec = LayerSpec.attention("x", num_kv_heads=2, head_size=4, elem=1)
    view = CacheView.of(TensorView(0, shape, strides, 1, (0, 4096)), "packed_hnd", 4)
    with pytest.raises(SpecError, match="overlap"):
        derive_canonical_mappings(LayerTable([spec]), {"x": view}, RankGrid(), 0)


def test_a_view_beyond_its_storage_is_an_error() -> None:
    spec = LayerSpec.mla("x", row_bytes=8)
    view = CacheView.of(TensorView(100, (4, 2, 8), (16, 8, 1), 1, (100, 63)), "mla", 2)
    with pytest.raises(SpecError, match="storage of 63 bytes"):
        derive_canonical_mappings(LayerTable([spec]), {"x": view}, RankGrid(), 0)


def test_a_bare_tensor_is_recognised_where_it_is_unmistakable() -> None:
    spec = LayerSpec.mla("x", row_bytes=24)
    mappings = derive_canonical_mappings(
        LayerTable([spec]), {"x": np.zeros((5, 16, 24), dtype=np.uint8)}, RankGrid(tp=2), 1
    )
    assert mappings.by_layer["x"].num_writers == 2
    ambiguous = LayerSpec.attention("x", num_kv_heads=16, head_size=4, elem=1)
    with pytest.raises(LayoutError, match="declare it"):
        derive_canonical_mappings(
            LayerTable([ambiguous]),
            {"x": np.zeros((5, 16, 16, 8), dtype=np.uint8)[:, :, :1]},
            RankGrid(),
            0,
        )
