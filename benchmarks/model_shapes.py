"""One rank of a real model under a parallel configuration, as a packed plan over given memory.

Shared by the coalescing model, which needs addresses but no memory, and by the GPU suite.
"""

from __future__ import annotations

from dataclasses import dataclass

from vkvmap import _C
from vkvmap.chunk import ChunkLayout
from vkvmap.configuration import Configuration
from vkvmap.derive import derive_canonical_mappings
from vkvmap.models import load_model
from vkvmap.pack import PlacedLayer, pack
from vkvmap.paged import paged_layer
from vkvmap.sections import pages_per_chunk

LINE = 4096


@dataclass(frozen=True)
class Shape:
    """`model` under `configuration` (as on the command line); `rank` is the one looked at."""

    name: str
    model: str
    configuration: str
    family: str = "universal"
    rank: int = 1


SHAPES = (
    Shape("Llama-3-8B tp8", "llama-3-8b", "tp=8"),
    Shape("Llama-3-70B tp8", "llama-3-70b", "tp=8"),
    Shape("Llama-3-70B tp8 hnd, native", "llama-3-70b", "tp=8,layout=split_hnd", "native"),
    Shape("Qwen3-32B tp4", "qwen3-32b", "tp=4"),
    Shape("DeepSeek-V3 tp8", "deepseek-v3", "tp=8,block=64"),
    Shape("DeepSeek-V3 656 B, tp8 cp4", "deepseek-v3-fp8", "tp=8,dcp=4,block=64"),
    Shape("gpt-oss-120b tp8", "gpt-oss-120b", "tp=8"),
    Shape("Gemma-3-27B tp8", "gemma-3-27b", "tp=8"),
)


class PlacedShape:
    """A shape with one page per chunk: how much memory it needs, and its plan once it has some.

    Attributes:
        row_bytes: group -> bytes of a chunk's row.
        cache_bytes: of all layers, for `num_blocks` blocks.
        region_bytes: of all groups' rows, for `num_rows` rows.
    """

    def __init__(
        self, shape: Shape, num_blocks: int, num_rows: int, *, layers: int | None = None
    ) -> None:
        self.shape, self.num_blocks, self.num_rows = shape, num_blocks, num_rows
        self.configuration = Configuration.parse(shape.configuration)
        self.table = load_model(shape.model)
        paged = {
            name: paged_layer(
                self.table[name], self.configuration, shape.rank, num_blocks=num_blocks
            )
            for name in self.table
        }
        self._offsets: dict[str, int] = {}
        self.cache_bytes = 0
        for name, layer in paged.items():
            self._offsets[name] = self.cache_bytes
            self.cache_bytes += -(-layer.nbytes // LINE) * LINE
        self._paged = paged
        self._only = layers
        mappings = self._derive(0)
        spans = {m.span_tokens for m in mappings.by_layer.values()}
        if mappings.refusals or len(spans) != 1:
            raise ValueError(f"{shape.name}: {mappings.refusals or spans}")
        self._tokens = spans.pop()
        chunks = ChunkLayout.of(mappings.layers, self._tokens)
        self.groups = [g for g in mappings.layers.groups if mappings.layers.in_group(g)]
        self.row_bytes = {g: -(-chunks[g].payload_bytes // LINE) * LINE for g in self.groups}
        self.region_bytes = num_rows * sum(self.row_bytes.values())

    def _derive(self, address: int):
        caches = {
            name: layer.view(address + self._offsets[name]) for name, layer in self._paged.items()
        }
        return derive_canonical_mappings(
            self.table,
            caches,
            self.configuration.grid,
            self.shape.rank,
            family=self.shape.family,
            strict=True,
        )

    def layers(self, cache: int, region: int) -> list[PlacedLayer]:
        """The layers over memory at `cache` and `region`."""
        mappings = self._derive(cache)
        chunks = ChunkLayout.of(mappings.layers, self._tokens)
        pages = pages_per_chunk(mappings, self._tokens)
        bases, at = {}, region
        for group in self.groups:
            bases[group] = at
            at += self.num_rows * self.row_bytes[group]
        placed = []
        for layer_id, name in enumerate(mappings.layers):
            group = mappings.layers[name].group
            mapping = mappings.by_layer[name]
            placed.append(
                PlacedLayer(
                    layer_id=layer_id,
                    group=self.groups.index(group),
                    load_runs=mapping.runs,
                    store_runs=mapping.effective_store_runs,
                    num_writers=mapping.num_writers,
                    writer_index=mapping.writer_index,
                    addressing=mappings.addressing[name],
                    host_base=bases[group] + chunks[group].offsets[name],
                    host_row_stride=self.row_bytes[group],
                    host_page_stride=mapping.canonical_page_size_bytes,
                    pages_per_row=pages[group],
                    num_rows=self.num_rows,
                )
            )
        return placed[: self._only]

    def fragment_bytes(self) -> int:
        """Longest run of the first layer that is contiguous on both sides."""
        return max(
            run.fragment_size for run in self._derive(0).by_layer[next(iter(self.table))].runs
        )

    def plan(self, cache: int, region: int) -> _C.Plan:
        """The validated plan over memory at `cache` and `region`."""
        return _C.Plan(
            pack(self.layers(cache, region), len(self.groups)),
            [(cache, self.cache_bytes)],
            [(region, self.region_bytes)],
            list(self.table),
        )
