"""Descriptors made by hand, and an oracle that moves one byte at a time from their definition.

Nothing here shares code with the packer: the native engine is held against what the format says.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vkvmap import _C

POISON = 0xA5


def struct(name: str) -> np.dtype[Any]:
    """The dtype of a native struct; fields wider than 8 bytes, and counts, are pairs."""
    layout = dict(_C.DESCRIPTOR_LAYOUT[name])
    size = layout.pop("size")
    formats = []
    for field_name, (_, width) in layout.items():
        pair = name == "Tile" and field_name in ("local_stride", "host_stride", "count")
        formats.append(f"2u{width // 2}" if pair else f"u{width}")
    offsets = [offset for offset, _ in layout.values()]
    return np.dtype(
        {"names": list(layout), "formats": formats, "offsets": offsets, "itemsize": size}
    )


def multiplier(divisor: int) -> int:
    return -(-(1 << _C.FASTDIV_SHIFT) // divisor)


@dataclass(frozen=True)
class Box:
    """A tile as numbers."""

    fragment: int
    count: tuple[int, int]
    local: int
    local_stride: tuple[int, int]
    host: int
    host_stride: tuple[int, int]
    width_log2: int = 0

    def row(self) -> np.ndarray:
        tile = np.zeros(1, struct("Tile"))
        tile["fragment_bytes"] = self.fragment
        tile["bytes"] = self.fragment * self.count[0] * self.count[1]
        tile["count"] = self.count
        tile["local_offset"], tile["host_offset"] = self.local, self.host
        tile["local_stride"], tile["host_stride"] = self.local_stride, self.host_stride
        tile["width_log2"] = self.width_log2
        tile["units_div"] = multiplier(self.fragment >> self.width_log2)
        tile["count_div"] = multiplier(self.count[0])
        return tile

    def bytes(self) -> list[tuple[int, int]]:
        """(page byte, canonical byte) of everything the box moves."""
        return [
            (
                self.local + i * self.local_stride[0] + j * self.local_stride[1] + b,
                self.host + i * self.host_stride[0] + j * self.host_stride[1] + b,
            )
            for j in range(self.count[1])
            for i in range(self.count[0])
            for b in range(self.fragment)
        ]


@dataclass
class World:
    """One group of alike layers between a cache and a region, both poisoned."""

    boxes: list[Box]
    layers: int = 2
    blocks: int = 6
    rows: int = 3
    pages_per_row: int = 2
    num_writers: int = 1
    writer_index: int = 0
    gap: int = 32
    names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page = max(p for box in self.boxes for p, _ in box.bytes()) + 1
        self.canonical = max(c for box in self.boxes for _, c in box.bytes()) + 1
        self.page += -self.page % 16
        self.canonical += -self.canonical % 16
        self.stride = self.page + self.gap
        self.row_stride = self.canonical * self.pages_per_row * self.layers + self.gap
        self.cache = np.full(self.layers * self.blocks * self.stride + 64, POISON, np.uint8)
        self.region = np.full(self.rows * self.row_stride + 64, POISON, np.uint8)
        self.names = [f"model.layers.{layer}" for layer in range(self.layers)]
        self.cache_at = -self.cache.ctypes.data % 16
        self.region_at = -self.region.ctypes.data % 16

    @property
    def num_pages(self) -> int:
        return self.rows * self.pages_per_row

    def page_at(self, layer: int, block: int) -> int:
        """Offset in `cache`."""
        return self.cache_at + (layer * self.blocks + block) * self.stride

    def canonical_at(self, layer: int, page: int) -> int:
        """Offset in `region`."""
        row, inside = divmod(page, self.pages_per_row)
        return (
            self.region_at
            + row * self.row_stride
            + (layer * self.pages_per_row + inside) * self.canonical
        )

    def descriptor(self) -> np.ndarray:
        tiles = np.concatenate([box.row() for box in self.boxes])
        fragments = sum(box.count[0] * box.count[1] for box in self.boxes)
        moved = int(tiles["bytes"].sum())
        classes = np.zeros(1, struct("LayerClass"))
        for name, value in {
            "num_layers": self.layers,
            "num_writers": self.num_writers,
            "writer_index": self.writer_index,
            "pages_per_row": self.pages_per_row,
            "store_num_tiles": len(tiles),
            "load_num_tiles": len(tiles),
            "store_page_bytes": moved,
            "load_page_bytes": moved,
            "store_page_fragments": fragments,
            "load_page_fragments": fragments,
            "num_blocks": self.blocks,
            "num_rows": self.rows,
        }.items():
            classes[name] = value
        layers = np.zeros(self.layers, struct("LayerEntry"))
        for layer, entry in enumerate(layers):
            entry["local_base"] = self.cache.ctypes.data + self.page_at(layer, 0)
            entry["local_stride"] = self.stride
            entry["host_base"] = self.region.ctypes.data + self.canonical_at(layer, 0)
            entry["host_row_stride"] = self.row_stride
            entry["host_page_stride"] = self.canonical
            entry["layer_id"] = layer
        header = np.zeros(1, struct("DescriptorHeader"))
        header["magic"], header["version"] = _C.DESCRIPTOR_MAGIC, _C.DESCRIPTOR_VERSION
        header["num_classes"], header["num_layers"] = 1, self.layers
        header["num_tiles"], header["num_groups"] = len(tiles), 1
        parts = [header, classes, layers, tiles]
        header["total_bytes"] = sum(part.nbytes for part in parts)
        return np.concatenate([part.view(np.uint8) for part in parts])

    def plan(self, descriptor: Any = None, device: str = "cpu") -> _C.Plan:
        return _C.Plan(
            self.descriptor() if descriptor is None else descriptor,
            [(self.cache.ctypes.data, self.cache.nbytes)],
            [(self.region.ctypes.data, self.region.nbytes)],
            self.names,
            device,
        )

    def scramble(self, seed: int) -> None:
        generator = np.random.default_rng(seed)
        self.cache[:] = generator.integers(0, 256, self.cache.size, dtype=np.uint8)
        self.region[:] = generator.integers(0, 256, self.region.size, dtype=np.uint8)

    def move(
        self, direction: int, pairs: list[tuple[int, int]], layers: range | None = None
    ) -> None:
        """What a transfer should do, byte by byte."""
        everything = np.array([place for box in self.boxes for place in box.bytes()])
        for layer in layers if layers is not None else range(self.layers):
            for block, page in pairs:
                near = self.page_at(layer, block) + everything[:, 0]
                far = self.canonical_at(layer, page) + everything[:, 1]
                if direction == _C.LOAD:
                    self.cache[near] = self.region[far]
                elif page % self.num_writers == self.writer_index:
                    self.region[far] = self.cache[near]


def heads(
    rank: int = 1, ranks: int = 2, fragment: int = 16, tokens: int = 4, **kwargs: Any
) -> World:
    """One head of several: the plainest strided page."""
    box = Box(
        fragment,
        (tokens, 1),
        0,
        (fragment, 0),
        rank * fragment,
        (ranks * fragment, 0),
        width_log2=4 if fragment % 16 == 0 else 0,
    )
    return World([box], **kwargs)


def random_world(seed: int) -> World:
    """Boxes one after the other on both sides, with gaps, in any order."""
    dice = random.Random(seed)
    width_log2 = dice.randrange(5)
    width = 1 << width_log2
    boxes, local, host = [], 0, 0
    for _ in range(dice.randint(1, 4)):
        fragment = width * dice.choice([1, 2, 3, 5, 8, 16, 33])
        inner, outer = dice.randint(1, 6), dice.randint(1, 3)
        fragment = min(fragment, _C.TILE_BYTES // (inner * outer) // width * width)
        local += width * dice.randrange(3)
        host += width * dice.randrange(3)
        local0 = fragment + width * dice.randrange(2)
        host0 = fragment * dice.randint(1, 4) + width * dice.randrange(2)
        box = Box(
            fragment,
            (inner, outer),
            local,
            (local0, inner * local0 + width * dice.randrange(2)),
            host,
            (host0, inner * host0 + width * dice.randrange(2)),
            width_log2,
        )
        boxes.append(box)
        local = max(p for p, _ in box.bytes()) + 1
        host = max(c for _, c in box.bytes()) + 1
    dice.shuffle(boxes)
    writers = dice.randint(1, 3)
    return World(
        boxes,
        layers=dice.randint(1, 3),
        blocks=dice.randint(4, 9),
        rows=dice.randint(2, 4),
        pages_per_row=dice.randint(1, 3),
        num_writers=writers,
        writer_index=dice.randrange(writers),
        gap=16 * dice.randrange(4),
    )


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int64)
