"""Derivation against the oracle: exact wherever who-holds-what is defined, refused elsewhere."""

from __future__ import annotations

from math import lcm

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import oracle
from tests.worlds import World, positions, worlds
from vkvmap import LayerTable, RankGrid, certify, derive_canonical_mappings, derive_group
from vkvmap.conformance import byte_map
from vkvmap.errors import RefusedError, SpecError


@given(worlds())
def test_a_layer_is_exact_or_refused(world: World) -> None:
    caches = {"layer": world.view()}
    group = derive_group(LayerTable([world.spec]), caches, world.grid, family=world.family)
    truth = world.truth(oracle.counted())
    if not world.legal:
        assert all(not mappings.by_layer["layer"].certified for mappings in group)
        assert all(mappings.refusals for mappings in group)
        return
    canonical = oracle.canonical(world.family, world.layout, truth)
    for rank, mappings in enumerate(group):
        assert not mappings.refusals
        mapping = mappings.by_layer["layer"]
        local = oracle.local_pages(world.layout, world.held(truth, rank), world.kernel_blocks)
        assert mapping.canonical_page_size_bytes == canonical.size
        assert mapping.local_page_size_bytes == local.size
        assert np.array_equal(byte_map(mapping), positions(local, canonical))
        assert mapping.parallelism_agnostic == (world.family == "universal" or world.shards == 1)


@given(worlds(legal=True))
def test_every_choice_of_writers_writes_every_byte_once(world: World) -> None:
    group = derive_group(
        LayerTable([world.spec]), {"layer": world.view()}, world.grid, family=world.family
    )
    per_rank = [mappings.by_layer["layer"] for mappings in group]
    for page in range(lcm(*(m.num_writers for m in per_rank))):
        written = np.zeros(per_rank[0].canonical_page_size_bytes, dtype=np.int64)
        for mapping in per_rank:
            if mapping.is_writer(page):
                np.add.at(written, byte_map(mapping), 1)
        assert np.all(written == 1)


@given(worlds(legal=True))
def test_replicas_take_turns_in_rank_order(world: World) -> None:
    group = derive_group(
        LayerTable([world.spec]), {"layer": world.view()}, world.grid, family=world.family
    )
    truth = world.truth(oracle.counted())
    pages = [
        oracle.local_pages(world.layout, world.held(truth, rank), 1).tobytes()
        for rank in range(world.grid.size)
    ]
    for rank, mappings in enumerate(group):
        replicas = [r for r, content in enumerate(pages) if content == pages[rank]]
        mapping = mappings.by_layer["layer"]
        assert (mapping.num_writers, mapping.writer_index) == (
            len(replicas),
            replicas.index(rank),
        )


@given(worlds(legal=True), worlds(legal=True), st.data())
def test_what_one_configuration_stores_another_loads(
    writer: World, reader: World, data: st.DataObject
) -> None:
    """Universal family: any layout, configuration and block size, through one chunk."""
    if writer.spec.kind == "indexer":
        layout = "planar"
    else:
        layout = data.draw(st.sampled_from([writer.layout, "packed_hnd"]))
        if writer.spec.kind == "mla":
            layout = "mla"
    reader = World(writer.spec, layout, reader.grid, reader.block_size, 1, "universal")
    writer = World(
        writer.spec,
        writer.layout,
        writer.grid,
        writer.block_size,
        writer.kernel_blocks,
        "universal",
    )
    if not reader.legal:
        return
    spans = [world.block_size * world.shards for world in (writer, reader)]
    tokens = lcm(*spans)
    truth = oracle.truth_of(writer.spec, tokens, oracle.drawn(tokens))
    chunk = np.zeros(writer.spec.canonical_bytes(tokens), dtype=np.uint8)
    for page, rank, mapping in _pages(writer, tokens):
        if mapping.is_writer(page):
            size = mapping.canonical_page_size_bytes
            local = oracle.local_pages(
                writer.layout, _slice(writer, truth, page, rank), writer.kernel_blocks
            )
            chunk[page * size : (page + 1) * size][byte_map(mapping)] = local
    assert np.array_equal(chunk, oracle.universal(truth))
    for page, rank, mapping in _pages(reader, tokens):
        size = mapping.canonical_page_size_bytes
        loaded = chunk[page * size : (page + 1) * size][byte_map(mapping)]
        wanted = oracle.local_pages(reader.layout, _slice(reader, truth, page, rank), 1)
        assert np.array_equal(loaded, wanted)


def _pages(world: World, tokens: int):  # type: ignore[no-untyped-def]
    group = derive_group(
        LayerTable([world.spec]), {"layer": world.view()}, world.grid, family=world.family
    )
    for rank, mappings in enumerate(group):
        for page in range(tokens // (world.block_size * world.shards)):
            yield page, rank, mappings.by_layer["layer"]


def _slice(world: World, truth: oracle.Truth, page: int, rank: int) -> oracle.Truth:
    span = world.block_size * world.shards
    part = {n: a[page * span : (page + 1) * span] for n, a in truth.fields.items()}
    return world.held(oracle.Truth(part), rank)


@given(worlds(legal=True), st.sampled_from([1, 2]))
def test_a_tensor_with_other_heads_than_the_rank_holds_is_refused(world: World, spare: int) -> None:
    if world.heads is None:
        return
    mappings = derive_canonical_mappings(
        LayerTable([world.spec]), {"layer": world.view(spare_heads=spare)}, world.grid, 0
    )
    assert not mappings.by_layer["layer"].certified
    assert mappings.refusals[0].rule in ("layout", "encoding")


@given(worlds())
def test_derivation_is_deterministic_and_rank_by_rank_equal_to_the_group(world: World) -> None:
    table, caches = LayerTable([world.spec]), {"layer": world.view()}
    group = derive_group(table, caches, world.grid, family=world.family)
    for rank in (0, world.grid.size - 1):
        alone = derive_canonical_mappings(table, caches, world.grid, rank, family=world.family)
        assert alone.by_layer == group[rank].by_layer
        assert alone.refusals == group[rank].refusals


@given(worlds(legal=True))
def test_certified_groups_pass_the_public_proof(world: World) -> None:
    group = derive_group(
        LayerTable([world.spec]), {"layer": world.view()}, world.grid, family=world.family
    )
    certify([mappings.by_layer["layer"] for mappings in group])


def test_strict_mode_raises_the_first_refusal() -> None:
    world = World(_attention(6), "split_nhd", RankGrid(tp=4), 16, 1, "native")
    with pytest.raises(RefusedError, match="heads-divide") as caught:
        derive_canonical_mappings(
            LayerTable([world.spec]), {"layer": world.view()}, world.grid, 0, strict=True
        )
    assert caught.value.refusal.layer == "layer"
    assert "head_ranges" in caught.value.refusal.remedy


def test_a_group_that_is_not_the_grid_gets_no_mapping_and_a_reason() -> None:
    world = World(_attention(8), "split_nhd", RankGrid(tp=2, world_size=4), 16, 1, "native")
    mappings = derive_canonical_mappings(
        LayerTable([world.spec]), {"layer": world.view()}, world.grid, 0
    )
    assert mappings.by_layer == {}
    assert [refusal.rule for refusal in mappings.refusals] == ["worker-group"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 2}, "rank 2 is not in a group"),
        ({"rank": -1}, "rank -1"),
        ({"family": "v1"}, "choose 'native' or 'universal'"),
        ({"caches": {"other": None}}, "layer table lacks"),
    ],
)
def test_contradictions_are_errors(arguments: dict[str, object], message: str) -> None:
    world = World(_attention(8), "split_nhd", RankGrid(tp=2), 16, 1, "native")
    given_arguments = {"rank": 0, "caches": {"layer": world.view()}} | arguments
    caches, rank = given_arguments.pop("caches"), given_arguments.pop("rank")
    with pytest.raises(SpecError, match=message):
        derive_canonical_mappings(
            LayerTable([world.spec]), caches, world.grid, rank, **given_arguments
        )


def _attention(heads: int):  # type: ignore[no-untyped-def]
    from vkvmap import LayerSpec

    return LayerSpec.attention("layer", num_kv_heads=heads, head_size=8)
