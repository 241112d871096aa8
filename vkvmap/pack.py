"""Packing: from mappings and addresses to the descriptor that the movers execute.

The format is the native module's (csrc/descriptor.h); sizes and field offsets are read from it, so
that the two cannot drift. What must stay true:

 1. every run byte lands in exactly one tile, and a tile moves at most `TILE_BYTES` bytes;
 2. a tile's vector width divides everything that an access address is made of;
 3. layers share a tile table exactly if their page geometry and alignment class agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vkvmap.boxes import Box, Level, composed, folded
from vkvmap.errors import PlanError
from vkvmap.mapping import CopyRun
from vkvmap.recognise import PageAddressing


@dataclass(frozen=True)
class PlacedLayer:
    """One layer of a plan, ready to pack; bytes and absolute addresses.

    Attributes:
        layer_id: position in the model's layer table.
        group: index of the block list that it consumes.
        load_runs, store_runs: local page to canonical page.
        num_writers, writer_index: the store election.
        addressing: page bytes to cache addresses.
        host_base, host_row_stride, host_page_stride: where canonical page `p` of row `r` lies.
        pages_per_row, num_rows: bounds of page ids.
    """

    layer_id: int
    group: int
    load_runs: tuple[CopyRun, ...]
    store_runs: tuple[CopyRun, ...]
    num_writers: int
    writer_index: int
    addressing: PageAddressing
    host_base: int
    host_row_stride: int
    host_page_stride: int
    pages_per_row: int
    num_rows: int

    @property
    def alignment(self) -> int:
        """Largest power of two, at most the widest vector, that divides every page address."""
        from vkvmap import _C

        return _alignment(
            _C.MAX_VECTOR_BYTES
            | self.addressing.base
            | self.addressing.block_stride
            | self.host_base
            | self.host_row_stride
            | self.host_page_stride
        )


def _alignment(value: int) -> int:
    return value & -value


@cache
def struct(name: str) -> np.dtype[Any]:
    """The numpy dtype of one of the native module's descriptor structs."""
    from vkvmap import _C

    layout = dict(_C.DESCRIPTOR_LAYOUT[name])
    itemsize = layout.pop("size")
    scalar = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8"}
    # Sub-arrays are what is wider than their element: the two steps and counts of a tile.
    pairs = {"local_stride": "<u8", "host_stride": "<u8", "count": "<u2"} if name == "Tile" else {}
    formats: list[Any] = [
        (pairs[field], (2,)) if field in pairs else scalar[size]
        for field, (_, size) in layout.items()
    ]
    return np.dtype(
        {
            "names": list(layout),
            "formats": formats,
            "offsets": [offset for offset, _ in layout.values()],
            "itemsize": itemsize,
        }
    )


def pack(layers: Sequence[PlacedLayer], num_groups: int) -> NDArray[np.uint8]:
    """The packed descriptor of `layers`: one uint8 array, format version of the native module.

    Raises PlanError where a page is too irregular for the format's 32-bit counts.
    """
    from vkvmap import _C

    tables = _TileTables()
    classes: dict[tuple[int, ...], list[PlacedLayer]] = {}
    for layer in layers:
        store = tables.add(layer.store_runs, layer)
        load = tables.add(layer.load_runs, layer)
        alike = (
            layer.group,
            layer.num_writers,
            layer.writer_index,
            layer.pages_per_row,
            *store,
            *load,
            layer.addressing.num_blocks,
            layer.num_rows,
        )
        classes.setdefault(alike, []).append(layer)
    tiles = tables.packed()
    class_rows = np.zeros(len(classes), struct("LayerClass"))
    layer_rows = np.zeros(len(layers), struct("LayerEntry"))
    cursor = 0
    for row, (key, members) in zip(class_rows, classes.items(), strict=True):
        _fill_class(row, key, cursor, len(members), tiles)
        for entry, layer in zip(layer_rows[cursor : cursor + len(members)], members, strict=True):
            entry["local_base"] = layer.addressing.base
            entry["local_stride"] = layer.addressing.block_stride
            entry["host_base"] = layer.host_base
            entry["host_row_stride"] = layer.host_row_stride
            entry["host_page_stride"] = layer.host_page_stride
            entry["layer_id"] = layer.layer_id
        cursor += len(members)
    header = np.zeros(1, struct("DescriptorHeader"))
    header["magic"], header["version"] = _C.DESCRIPTOR_MAGIC, _C.DESCRIPTOR_VERSION
    header["num_classes"], header["num_layers"] = len(class_rows), len(layer_rows)
    header["num_tiles"], header["num_groups"] = len(tiles), num_groups
    parts = [header, class_rows, layer_rows, tiles]
    header["total_bytes"] = sum(part.nbytes for part in parts)
    return np.concatenate([part.view(np.uint8).ravel() for part in parts])


def _fill_class(
    row: Any, key: tuple[int, ...], first: int, count: int, tiles: NDArray[Any]
) -> None:
    group, writers, index, pages, store, num_store, load, num_load, blocks, rows = key
    row["first_layer"], row["num_layers"], row["group"] = first, count, group
    row["num_writers"], row["writer_index"], row["pages_per_row"] = writers, index, pages
    row["store_first_tile"], row["store_num_tiles"] = store, num_store
    row["load_first_tile"], row["load_num_tiles"] = load, num_load
    for side, start, length in (("store", store, num_store), ("load", load, num_load)):
        part = tiles[start : start + length]
        row[f"{side}_page_bytes"] = part["bytes"].sum(dtype=np.uint64)
        row[f"{side}_page_fragments"] = part["count"].astype(np.uint64).prod(axis=1).sum()
    row["num_blocks"], row["num_rows"] = blocks, rows


class _TileTables:
    """Tile tables by geometry and alignment class; equal ones are packed once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[int, int]] = {}
        self._tables: list[NDArray[Any]] = []
        self._kept: list[tuple[CopyRun, ...]] = []
        self._length = 0

    def add(self, runs: tuple[CopyRun, ...], layer: PlacedLayer) -> tuple[int, int]:
        """First tile and number of tiles for `runs` under this layer's addressing."""
        alignment = layer.alignment
        addressing = layer.addressing
        # Alike layers come with one and the same tuple of runs; comparing it by value would cost
        # more than packing it twice.
        key = (id(runs), None if addressing.is_contiguous else addressing.boxes, alignment)
        if key not in self._known:
            self._kept.append(runs)
            table = tiles_of(boxes_in_memory(runs, addressing), alignment)
            self._known[key] = (self._length if len(table) else 0, len(table))
            self._tables.append(table)
            self._length += len(table)
        return self._known[key]

    def packed(self) -> NDArray[Any]:
        if not self._tables:
            return np.zeros(0, struct("Tile"))
        if self._length >= 1 << 32:
            raise PlanError(f"{self._length} tiles do not fit the descriptor's 32-bit count")
        return np.concatenate(self._tables)


def boxes_in_memory(runs: Iterable[CopyRun], addressing: PageAddressing) -> tuple[Box, ...]:
    """Runs as boxes from memory offsets within a block (left) to canonical offsets (right)."""
    boxes = [
        Box(
            run.local_offset,
            run.canonical_offset,
            (
                (run.fragment_size, 1, 1),
                (run.num_fragments, run.local_stride, run.canonical_stride),
            ),
        )
        for run in runs
    ]
    if addressing.is_contiguous:
        return folded(sorted(boxes, key=lambda box: box.right))
    return composed(boxes, addressing.boxes)


def tiles_of(boxes: Iterable[Box], alignment: int) -> NDArray[Any]:
    """Tiles of `boxes` for pages whose addresses are multiples of `alignment`, in host order."""
    parts = [part for box in boxes for part in _tiles_of_box(box, alignment)]
    if not parts:
        return np.zeros(0, struct("Tile"))
    tiles = np.concatenate(parts)
    return tiles[np.argsort(tiles["host_offset"], kind="stable")]


def _tiles_of_box(box: Box, alignment: int) -> Iterable[NDArray[Any]]:
    from vkvmap import _C

    most = _C.TILE_BYTES
    fragment, strided = box.fragment, list(box.strided)
    if fragment > most:
        # Cut where host lines of the page begin, so that no two tiles share one.
        first = most - box.right % _C.HOST_LINE_BYTES
        starts = [0, *range(first, fragment, most)]
        for start, stop in zip(starts, [*starts[1:], fragment], strict=True):
            yield _tile_rows(box, (start, start), stop - start, (), strided, alignment)
        return
    inner: list[Level] = []
    budget = most // fragment
    while strided and len(inner) < 2 and budget > 1:
        count, left, right = strided.pop(0)
        share = -(-count // -(-count // budget))  # equal parts, each within the budget
        whole, rest = divmod(count, share)
        if rest:
            at = (whole * share * left, whole * share * right)
            yield _tile_rows(box, at, fragment, (*inner, (rest, left, right)), strided, alignment)
        inner.append((share, left, right))
        budget //= share
        if share < count:
            strided.insert(0, (whole, share * left, share * right))
            break
    yield _tile_rows(box, (0, 0), fragment, inner, strided, alignment)


def _tile_rows(
    box: Box,
    shift: tuple[int, int],
    fragment: int,
    inner: Sequence[Level],
    outer: Sequence[Level],
    alignment: int,
) -> NDArray[Any]:
    """One tile per step of the `outer` levels; `inner` (at most two) stay within the tile."""
    from vkvmap import _C

    left = np.array([box.left + shift[0]], dtype=np.uint64)
    right = np.array([box.right + shift[1]], dtype=np.uint64)
    for count, left_step, right_step in outer:
        steps = np.arange(count, dtype=np.uint64)[:, None]
        left = (steps * np.uint64(left_step) + left).ravel()
        right = (steps * np.uint64(right_step) + right).ravel()
    rows = np.zeros(left.size, struct("Tile"))
    common = alignment | fragment
    counts = [1, 1]
    for depth, (count, left_step, right_step) in enumerate(inner):
        rows["local_stride"][:, depth] = left_step
        rows["host_stride"][:, depth] = right_step
        counts[depth] = count
        common |= left_step | right_step
    rows["local_offset"], rows["host_offset"] = left, right
    rows["fragment_bytes"] = fragment
    rows["count"] = counts
    rows["bytes"] = fragment * counts[0] * counts[1]
    width = left | right | np.uint64(common)
    width &= ~width + np.uint64(1)
    rows["width_log2"] = np.log2(width.astype(np.float64)).astype(np.uint16)
    units = fragment // width.astype(np.int64)
    one = 1 << _C.FASTDIV_SHIFT
    rows["units_div"] = (one + units - 1) // units
    rows["count_div"] = (one + counts[0] - 1) // counts[0]
    return rows


def describe(descriptor: NDArray[np.uint8]) -> Mapping[str, int]:
    """Sizes of a packed descriptor: classes, layers, tiles, bytes."""
    header = descriptor[: struct("DescriptorHeader").itemsize].view(struct("DescriptorHeader"))[0]
    return {
        "classes": int(header["num_classes"]),
        "layers": int(header["num_layers"]),
        "tiles": int(header["num_tiles"]),
        "bytes": int(header["total_bytes"]),
    }
