"""What a row of the engine's host memory holds: one chunk of one layer group.

The engine hands out rows of one length for all groups, and its tiers move whole rows. A row begins
with the group's canonical pages, laid out by the model-wide layer table; opaque pages follow, then
digests if they are asked for. Nothing in the length depends on parallelism unless a layer is
opaque: rows that TP=1 has stored are the rows that TP=8 loads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vkvmap.chunk import ChunkLayout
from vkvmap.integrations.vllm.options import EngineError
from vkvmap.mapping import Mappings
from vkvmap.region import Region, SectionView
from vkvmap.sections import pages_per_chunk, private_rows, private_section

ROW_ALIGNMENT = 4096
DIGEST_BYTES = 8


@dataclass(frozen=True)
class RowLayout:
    """How a row is divided, by group.

    Attributes:
        row_bytes: length of every row, a multiple of 4096.
        payload: bytes of canonical pages.
        private: bytes of opaque pages behind them.
        digests: layer -> byte offset in the row of its digests, ``[head][token]`` of 8 bytes.
        pages: canonical pages per row.
        tokens: tokens per row, 0 for state.
    """

    row_bytes: int
    payload: Mapping[str, int]
    private: Mapping[str, int]
    digests: Mapping[str, int]
    pages: Mapping[str, int]
    tokens: Mapping[str, int]

    @classmethod
    def of(cls, mappings: Mappings, tokens: Mapping[str, int], *, verify: bool) -> RowLayout:
        """The rows for `mappings` and chunks of `tokens` tokens per group."""
        pages = pages_per_chunk(mappings, tokens)
        chunks = ChunkLayout.of(mappings.layers, tokens)
        hidden = private_rows(mappings, pages)
        payload = {group: chunks[group].payload_bytes for group in mappings.layers.groups}
        private = {group: hidden[group][1] if group in hidden else 0 for group in payload}
        ends = {group: payload[group] + private[group] for group in payload}
        digests: dict[str, int] = {}
        if verify:
            for name, spec in mappings.layers.items():
                if not spec.has_tokens:
                    continue
                start = -(-ends[spec.group] // DIGEST_BYTES) * DIGEST_BYTES
                digests[name] = start
                cells = (spec.num_kv_heads or 1) * tokens[spec.group]
                ends[spec.group] = start + cells * DIGEST_BYTES
        longest = max(ends.values())
        row_bytes = -(-longest // ROW_ALIGNMENT) * ROW_ALIGNMENT
        return cls(row_bytes, payload, private, digests, pages, dict(tokens))

    def num_rows(self, budget: int) -> int:
        """Rows that fit in `budget` bytes.

        Raises:
            EngineError: not one.
        """
        rows = budget // self.row_bytes
        if rows < 1:
            raise EngineError(
                f"cpu_bytes_to_use={budget:,} is less than one chunk of {self.row_bytes:,} bytes; "
                "raise it, or lower blocks_per_chunk"
            )
        return rows

    def region(self, memory: memoryview, num_rows: int) -> Region:
        """The engine's memory as a region; a group's sections overlay the others' rows."""
        views = []
        for group, payload in self.payload.items():
            if payload:
                views.append(self._view(group, num_rows, payload, False, 0))
            if self.private[group]:
                views.append(
                    self._view(private_section(group), num_rows, self.private[group], True, payload)
                )
        return Region(memory, views, backing="buffer")

    def _view(self, name: str, rows: int, nbytes: int, private: bool, offset: int) -> SectionView:
        return SectionView(name, 0, rows, self.row_bytes, nbytes, private, offset)
