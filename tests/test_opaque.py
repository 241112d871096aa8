"""Opaque pages: every byte of a block once, wherever it lies; whole rows where rows are shared."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.test_memory import read_page
from vkvmap import CacheView, LayerSpec, LayerTable, RankGrid, derive_canonical_mappings
from vkvmap.conformance import byte_map
from vkvmap.layout import Layout, Part
from vkvmap.spec import Nest

BLOCKS = 2


@st.composite
def tensors(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """(storage, tensor): any order of up to four dimensions, any padding, blocks on axis 0."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    kernel_blocks = draw(st.sampled_from([1, 2]))
    shape = [BLOCKS * kernel_blocks, *sizes]
    padded = [n + draw(st.integers(0, 2)) for n in shape]
    order = draw(st.permutations(range(len(shape))))
    start = draw(st.integers(0, 3))
    storage = np.random.default_rng(3).integers(
        0, 256, start + int(np.prod(padded)), dtype=np.uint8
    )
    whole = storage[start:].reshape([padded[dim] for dim in order])
    return storage, whole.transpose(np.argsort(order))[tuple(slice(0, n) for n in shape)]


@given(tensors(), st.integers(0, 3))
def test_an_opaque_page_is_every_byte_of_its_block_once(
    given_tensor: tuple[np.ndarray, np.ndarray], rank: int
) -> None:
    storage, tensor = given_tensor
    dims = ("block", *["cell"] * (tensor.ndim - 1))
    layout = Layout("anything", (Part(dims, Nest((), ("*",))),))
    kernel_blocks = len(tensor) // BLOCKS
    view = CacheView.of(tensor, layout, kernel_blocks, kernel_blocks=kernel_blocks)
    page_bytes = tensor[0].size * kernel_blocks
    table = LayerTable([LayerSpec.opaque("layer", page_bytes=page_bytes)])
    mappings = derive_canonical_mappings(table, {"layer": view}, RankGrid(tp=4), rank)
    mapping, addressing = mappings.by_layer["layer"], mappings.addressing["layer"]
    assert np.array_equal(byte_map(mapping), np.arange(page_bytes) + rank * page_bytes)
    assert mapping.canonical_page_size_bytes == 4 * page_bytes
    origin = storage.__array_interface__["data"][0]
    places = np.arange(storage.size, dtype=np.int64)
    strides = np.array(tensor.strides)
    shift = tensor.__array_interface__["data"][0] - origin
    assert addressing.num_blocks == BLOCKS
    for block in range(BLOCKS):
        found = read_page(places, origin, addressing, block)
        rows = range(block * kernel_blocks, (block + 1) * kernel_blocks)
        expected = sorted(
            shift + int(np.dot((row, *index), strides))
            for row in rows
            for index in np.ndindex(tensor.shape[1:])
        )
        # Each kernel block's bytes follow each other as they lie in memory.
        per_row = found.reshape(kernel_blocks, -1)
        assert all(np.all(np.diff(row) > 0) for row in per_row)
        assert sorted(found.tolist()) == expected
        if found[-1] - found[0] == page_bytes - 1:
            assert addressing.is_contiguous


@given(st.integers(1, 64), st.integers(1, 64), st.integers(0, 9), st.sampled_from([1, 2]))
def test_a_shared_row_is_carried_from_its_first_byte_to_its_last(
    first: int, second: int, pad: int, kernel_blocks: int
) -> None:
    rows = BLOCKS * kernel_blocks
    storage = np.random.default_rng(4).integers(0, 256, (rows, first + second + pad), np.uint8)
    caches = {
        name: CacheView.of(part, "pages", kernel_blocks, kernel_blocks=kernel_blocks)
        for name, part in (("a", storage[:, :first]), ("b", storage[:, first : first + second]))
    }
    table = LayerTable(LayerSpec.opaque(n, page_bytes=s) for n, s in (("a", first), ("b", second)))
    mappings = derive_canonical_mappings(table, caches, RankGrid(), 0)
    assert dict(mappings.carrier) == {"a": "a", "b": "a"}
    assert mappings.addressing["a"].num_blocks == BLOCKS
    for block in range(BLOCKS):
        page = read_page(
            storage.reshape(-1),
            storage.__array_interface__["data"][0],
            mappings.addressing["a"],
            block,
        )
        wanted = storage[block * kernel_blocks : (block + 1) * kernel_blocks, : first + second]
        assert np.array_equal(page, wanted.reshape(-1))


@given(st.sampled_from([1, 2, 4, 8]), st.integers(1, 5), st.integers(0, 3))
def test_elements_of_any_size_are_carried_whole(item: int, count: int, pad: int) -> None:
    storage = np.zeros((BLOCKS, count + pad), dtype=f"u{item}")
    view = CacheView.of(storage[:, :count], "pages")
    table = LayerTable([LayerSpec.opaque("layer", page_bytes=count * item)])
    mappings = derive_canonical_mappings(table, {"layer": view}, RankGrid(), 0)
    addressing = mappings.addressing["layer"]
    assert (addressing.page_bytes, addressing.extent) == (count * item, count * item)
    assert addressing.block_stride == (count + pad) * item
    assert addressing.is_contiguous
