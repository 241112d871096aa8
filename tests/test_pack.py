"""Packed tiles against the plainest reading of runs and addressing: byte by byte."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.test_memory import read_page
from tests.worlds import World, worlds
from vkvmap import _C, CopyRun, LayerTable, derive_canonical_mappings
from vkvmap.boxes import Box
from vkvmap.pack import PlacedLayer, describe, pack, struct, tiles_of
from vkvmap.recognise import PageAddressing

HOST = 1 << 20  # where canonical pages would be


def placed(world: World, **more: Any) -> PlacedLayer:
    """Rank 0's layer, in rows of two canonical pages."""
    mappings = derive_canonical_mappings(
        LayerTable([world.spec]),
        {"layer": world.view(3)},
        world.grid,
        0,
        family=world.family,
        strict=True,
    )
    mapping, addressing = mappings.by_layer["layer"], mappings.addressing["layer"]
    size = mapping.canonical_page_size_bytes
    layer = PlacedLayer(
        layer_id=0,
        group=0,
        load_runs=mapping.runs,
        store_runs=mapping.effective_store_runs,
        num_writers=mapping.num_writers,
        writer_index=mapping.writer_index,
        addressing=replace(addressing, base=0),
        host_base=HOST,
        host_row_stride=2 * size,
        host_page_stride=size,
        pages_per_row=2,
        num_rows=4,
    )
    return replace(layer, **more)


def table(descriptor: np.ndarray, kind: str) -> np.ndarray:
    """One of the descriptor's tables, by the format's order of them."""
    sizes = {name: struct(name).itemsize for name in ("DescriptorHeader", "LayerClass")}
    header = descriptor[: sizes["DescriptorHeader"]].view(struct("DescriptorHeader"))[0]
    start = sizes["DescriptorHeader"]
    for name, count in (("LayerClass", "num_classes"), ("LayerEntry", "num_layers"),
                        ("Tile", "num_tiles")):  # fmt: skip
        stop = start + int(header[count]) * struct(name).itemsize
        if name == kind:
            return descriptor[start:stop].view(struct(name))
        start = stop
    raise KeyError(kind)


def carried(tiles: np.ndarray) -> list[tuple[int, int]]:
    """(cache offset, canonical offset) of every byte that the tiles move."""
    pairs = []
    for tile in tiles:
        (in_cache, across_cache), (in_host, across_host) = tile["local_stride"], tile["host_stride"]
        for j in range(int(tile["count"][1])):
            for i in range(int(tile["count"][0])):
                local = int(tile["local_offset"]) + i * int(in_cache) + j * int(across_cache)
                host = int(tile["host_offset"]) + i * int(in_host) + j * int(across_host)
                pairs += [(local + b, host + b) for b in range(int(tile["fragment_bytes"]))]
    return pairs


def wanted(runs: tuple[CopyRun, ...], addressing: PageAddressing) -> list[tuple[int, int]]:
    memory = np.arange(addressing.extent, dtype=np.int64)
    where = read_page(memory, 0, replace(addressing, base=0), 0)
    pairs = []
    for run in runs:
        for i in range(run.num_fragments):
            for byte in range(run.fragment_size):
                local = run.local_offset + i * run.local_stride + byte
                pairs.append(
                    (int(where[local]), run.canonical_offset + i * run.canonical_stride + byte)
                )
    return sorted(pairs)


def check_tiles(tiles: np.ndarray, alignment: int) -> None:
    """What the format promises of every tile."""
    for tile in tiles:
        counts, fragment = tile["count"].tolist(), int(tile["fragment_bytes"])
        assert tile["bytes"] == fragment * counts[0] * counts[1] <= _C.TILE_BYTES
        width = 1 << int(tile["width_log2"])
        steps = [int(tile["local_offset"]), int(tile["host_offset"]), fragment, alignment]
        for axis in (0, 1):
            if counts[axis] > 1:
                steps += [int(tile["local_stride"][axis]), int(tile["host_stride"][axis])]
        assert all(step % width == 0 for step in steps)
        assert width == _C.MAX_VECTOR_BYTES or any(step % (2 * width) for step in steps)
        units, one = fragment // width, 1 << _C.FASTDIV_SHIFT
        assert tile["units_div"] == -(-one // units)
        assert tile["count_div"] == -(-one // counts[0])
    hosts = tiles["host_offset"]
    assert np.all(hosts[1:] >= hosts[:-1])


@given(worlds(legal=True))
def test_tiles_move_exactly_the_bytes_of_the_runs(world: World) -> None:
    layer = placed(world)
    descriptor = pack([layer], 1)
    (row,) = table(descriptor, "LayerClass")
    tiles = table(descriptor, "Tile")
    for side, runs in (("store", layer.store_runs), ("load", layer.load_runs)):
        first, count = int(row[f"{side}_first_tile"]), int(row[f"{side}_num_tiles"])
        part = tiles[first : first + count]
        assert sorted(carried(part)) == wanted(runs, layer.addressing)
        check_tiles(part, layer.alignment)
        assert row[f"{side}_page_bytes"] == sum(r.fragment_size * r.num_fragments for r in runs)
        fragments = sum(int(n) * int(m) for n, m in part["count"])
        assert row[f"{side}_page_fragments"] == fragments
    assert (row["num_blocks"], row["num_rows"], row["pages_per_row"]) == (3, 4, 2)
    assert (row["num_writers"], row["writer_index"]) == (layer.num_writers, layer.writer_index)


LEVELS = [
    ((1, 1, 1),),
    ((100, 1, 1),),
    ((4_096, 1, 1),),
    ((4_097, 1, 1),),
    ((20_000, 1, 1),),
    ((10_000, 1, 1), (3, 11_000, 12_032)),
    ((64, 1, 1), (1_000, 64, 128)),
    ((16, 1, 1), (7, 16, 32), (1_000, 200, 300)),
    ((6, 1, 1), (5, 10, 6), (4, 50, 40), (3, 300, 200)),
    ((1, 2, 3), (5_000, 4, 5)),
    ((3_000, 1, 1), (5, 3_000, 6_000)),
    ((92, 1, 1), (45, 92, 184), (2, 5_000, 9_000)),
]


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("start", [(0, 0), (5, 64), (128, 100)])
@pytest.mark.parametrize("alignment", [1, 4, 16])
def test_a_box_of_any_shape_is_cut_into_tiles_that_cover_it(
    levels: tuple[tuple[int, int, int], ...], start: tuple[int, int], alignment: int
) -> None:
    box = Box(*start, levels)
    tiles = tiles_of([box], alignment)
    expected = [start]
    for count, left, right in levels:
        expected = [(a + i * left, b + i * right) for i in range(count) for a, b in expected]
    assert sorted(carried(tiles)) == sorted(expected)
    check_tiles(tiles, alignment)
    fragment = box.fragment
    if fragment > _C.TILE_BYTES:
        # Cut where host lines begin: only a fragment's own ends lie elsewhere.
        ends = {int(t["host_offset"]) + int(t["fragment_bytes"]) for t in tiles}
        inside = [end for end in ends if end % _C.HOST_LINE_BYTES]
        assert len(inside) <= box.size // fragment
    else:
        # Tiles are filled: none could take a neighbour and stay within its size.
        assert len(tiles) <= 3 * -(-box.size // _C.TILE_BYTES) + box.size // fragment // 16 + 2


@pytest.mark.parametrize(
    ("name", "value", "alignment"),
    [
        ("host_base", HOST + 8, 8),
        ("host_row_stride", 4_096 + 4, 4),
        ("host_page_stride", 2_048 + 2, 2),
        ("base", 1 << 13, 16),
        ("base", (1 << 13) + 1, 1),
        ("block_stride", 4_096 + 8, 8),
        ("host_base", HOST, 16),
    ],
)
def test_alignment_is_that_of_everything_an_address_is_made_of(
    name: str, value: int, alignment: int
) -> None:
    addressing = PageAddressing(1 << 13, 4_096, 3, 2_048, (Box(0, 0, ((2_048, 1, 1),)),))
    run = CopyRun(0, 0, 2_048, 1, 2_048, 2_048)
    layer = PlacedLayer(0, 0, (run,), (run,), 1, 0, addressing, HOST, 4_096, 2_048, 2, 4)
    if name in ("base", "block_stride"):
        layer = replace(layer, addressing=replace(addressing, **{name: value}))
    else:
        layer = replace(layer, **{name: value})
    assert layer.alignment == alignment


def attention_layer(layer_id: int, **more: Any) -> PlacedLayer:
    addressing = PageAddressing(1 << 13, 4_096, 3, 2_048, (Box(0, 0, ((2_048, 1, 1),)),))
    layer = PlacedLayer(layer_id, 0, RUNS, RUNS, 2, 1, addressing, HOST, 4_096, 2_048, 2, 4)
    return replace(layer, **more)


RUNS = (CopyRun(0, 0, 64, 16, 128, 128), CopyRun(64, 1_024, 64, 16, 128, 64))


def test_alike_layers_share_their_tiles_and_a_class() -> None:
    descriptor = pack([attention_layer(i, host_base=HOST + i * 4_096) for i in range(40)], 1)
    sizes = describe(descriptor)
    assert (sizes["classes"], sizes["layers"]) == (1, 40)
    assert sizes["bytes"] == descriptor.nbytes
    assert sizes["tiles"] == len(tiles_of_runs())
    entries = table(descriptor, "LayerEntry")
    assert entries["layer_id"].tolist() == list(range(40))
    assert entries["host_base"].tolist() == [HOST + i * 4_096 for i in range(40)]
    assert set(entries["local_base"]) == {1 << 13}
    assert set(entries["local_stride"]) == set(entries["host_row_stride"]) == {4_096}
    assert set(entries["host_page_stride"]) == {2_048}
    assert not entries["reserved"].any()


def tiles_of_runs() -> np.ndarray:
    return table(pack([attention_layer(0)], 1), "Tile")


@pytest.mark.parametrize(
    "other",
    [
        {"group": 1}, {"num_writers": 3}, {"writer_index": 0}, {"pages_per_row": 1},
        {"num_rows": 5}, {"host_base": HOST + 4}, {"load_runs": RUNS[:1]}, {"store_runs": RUNS[:1]},
    ],
)  # fmt: skip
def test_layers_that_differ_in_anything_but_place_have_classes_of_their_own(
    other: dict[str, Any],
) -> None:
    descriptor = pack([attention_layer(0), attention_layer(1, **other), attention_layer(2)], 2)
    rows = table(descriptor, "LayerClass")
    assert rows["num_layers"].tolist() == [2, 1]
    assert rows["first_layer"].tolist() == [0, 2]
    assert table(descriptor, "LayerEntry")["layer_id"].tolist() == [0, 2, 1]
    header = descriptor[: struct("DescriptorHeader").itemsize].view(struct("DescriptorHeader"))[0]
    assert (header["magic"], header["version"]) == (_C.DESCRIPTOR_MAGIC, _C.DESCRIPTOR_VERSION)
    assert (header["num_classes"], header["num_layers"], header["num_groups"]) == (2, 3, 2)
    assert header["total_bytes"] == descriptor.nbytes


def test_a_rank_that_never_stores_packs_no_store_tiles() -> None:
    (row,) = table(pack([attention_layer(0, store_runs=())], 1), "LayerClass")
    assert (row["store_num_tiles"], row["store_page_bytes"], row["store_page_fragments"]) == (
        0,
    ) * 3
    assert row["load_num_tiles"] > 0


@given(st.integers(1, 64), st.integers(1, 6), st.integers(0, 3), st.integers(0, 3))
def test_the_width_is_the_widest_that_divides_everything(
    fragment: int, count: int, left: int, right: int
) -> None:
    box = Box(left, right, ((fragment, 1, 1), (count, fragment + left, fragment + right)))
    check_tiles(tiles_of([box], 16), 16)
