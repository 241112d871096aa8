"""Shapes that coincide and sizes that are off by one: exact for what was declared, or refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from tests import oracle
from tests.test_memory import read_page
from tests.worlds import ATTENTION, World, worlds
from vkvmap import (
    CacheView,
    LayerSpec,
    LayerTable,
    RankGrid,
    derive_canonical_mappings,
    detect_layout,
)
from vkvmap.errors import LayoutError, SpecError

BLOCKS = 3
PLAIN = ATTENTION[:4]


def counted_tensor(world: World) -> np.ndarray:
    """This rank's cache with every byte drawn at random."""
    shape = world.view(BLOCKS).tensors[0].shape
    tensor = oracle.tensor(world.layout, shape)
    tensor[...] = np.random.default_rng(5).integers(0, 256, shape, dtype=np.uint8)
    return tensor


@given(worlds(legal=True))
def test_detection_names_the_right_layout_or_none(world: World) -> None:
    assume(world.kernel_blocks == 1)
    local = world.held_heads(0)
    try:
        found = detect_layout(
            counted_tensor(world),
            world.spec,
            block_size=world.block_size,
            local_heads=None if local is None else len(local),
        )
    except LayoutError:
        return
    assert found.name == world.layout


def as_declared(layout: str, block: np.ndarray, key_bytes: int) -> oracle.Truth:
    """What a block's tensor means under a layout: K and V by (token, head, byte)."""
    if layout.startswith("split"):
        return oracle.Truth({"k": block[0], "v": block[1]})
    cells = np.swapaxes(block, 0, 1)
    return oracle.Truth({"k": cells[..., :key_bytes], "v": cells[..., key_bytes:]})


@st.composite
def plain_worlds(draw: st.DrawFn) -> World:
    """K and V only, on one rank, in the layouts whose shapes can be taken for each other."""
    heads, tokens, size = (draw(st.sampled_from([1, 2, 3, 4])) for _ in range(3))
    spec = LayerSpec.attention("layer", num_kv_heads=heads, head_size=size, elem=1)
    return World(spec, draw(st.sampled_from(PLAIN)), RankGrid(), tokens, 1, "native")


@given(plain_worlds(), st.sampled_from(PLAIN), st.data())
def test_another_declaration_is_read_as_declared_or_refused(
    world: World, declared: str, data: st.DataObject
) -> None:
    """Heads and tokens of equal number fit each other's place; the declaration decides."""
    tensor = counted_tensor(world)
    if data.draw(st.booleans()):  # tokens where heads are expected
        swap = (2, 3) if tensor.ndim == 5 else (1, 2)
        tensor = np.swapaxes(tensor, *swap)
    block_size = data.draw(st.sampled_from(sorted(set(tensor.shape[1:-1]))))
    view = CacheView.of(tensor, declared, block_size)
    mappings = derive_canonical_mappings(LayerTable([world.spec]), {"layer": view}, world.grid, 0)
    if not mappings.by_layer["layer"].certified:
        assert mappings.refusals
        return
    storage = tensor
    while storage.base is not None:
        storage = storage.base
    origin = storage.__array_interface__["data"][0]
    key = world.spec.fields[0]
    for block in range(BLOCKS):
        truth = as_declared(declared, tensor[block], key.axis("k_dim").extent * key.elem)
        page = read_page(storage.reshape(-1), origin, mappings.addressing["layer"], block)
        assert np.array_equal(page, oracle.page(declared, truth))


@given(worlds(legal=True), st.data())
def test_a_size_that_is_off_by_one_is_refused(world: World, data: st.DataObject) -> None:
    good = world.view(BLOCKS).tensors[0]
    dim = data.draw(st.integers(1, len(good.shape) - 1))
    change = data.draw(st.sampled_from([-1, 1]))
    shape = tuple(n + change * (i == dim) for i, n in enumerate(good.shape))
    assume(min(shape) > 0)
    tensor = oracle.tensor(world.layout, shape)
    view = CacheView.of(tensor, world.layout, world.block_size, kernel_blocks=world.kernel_blocks)
    mappings = derive_canonical_mappings(
        LayerTable([world.spec]), {"layer": view}, world.grid, 0, family=world.family
    )
    assert not mappings.by_layer["layer"].certified
    assert mappings.refusals[0].rule == "layout"


@given(worlds(legal=True), st.sampled_from([-1, 1]))
def test_a_block_size_that_is_off_by_one_is_refused(world: World, change: int) -> None:
    assume(world.block_size + change > 0)
    wrong = replace(world, block_size=world.block_size + change, kernel_blocks=1)
    shape = world.view(BLOCKS).tensors[0].shape
    view = CacheView.of(oracle.tensor(world.layout, shape), world.layout, wrong.block_size)
    try:
        mappings = derive_canonical_mappings(
            LayerTable([world.spec]), {"layer": view}, world.grid, 0, family=world.family
        )
    except SpecError:
        return
    assume(world.kernel_blocks == 1)
    assert not mappings.by_layer["layer"].certified
