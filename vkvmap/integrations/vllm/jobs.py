"""The engine's jobs in our words: (cache block, canonical page) pairs by layer group.

A job concatenates the block ids of all groups, and the rows of all groups' chunks. A chunk holds
`blocks_per_chunk` blocks of one group, and a group's first block may lie within its first chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vkvmap.errors import TransferError

Ids = NDArray[np.int64]
#: Group -> (block ids, canonical page ids).
Pairs = dict[str, tuple[Ids, Ids]]


@dataclass(frozen=True, slots=True)
class JobIds:
    """Reads the engine's block lists: `groups` in their order, `per_chunk` blocks to a row."""

    groups: Sequence[str]
    per_chunk: int

    def pairs(self, cache: Any, host: Any) -> Pairs:
        """The pairs of one job.

        Args:
            cache: the engine's `block_ids`, `group_sizes` and `block_indices` (the position of
                each group's first block in its sequence).
            host: the engine's `block_ids`, which are rows.

        Raises:
            TransferError: the lists do not add up; nothing has moved.
        """
        blocks = np.asarray(cache.block_ids, np.int64)
        rows = np.asarray(host.block_ids, np.int64)
        sizes = cache.group_sizes
        if self.per_chunk == 1 and len(self.groups) == len(sizes) == 1:
            if sizes[0] == len(blocks) == len(rows):
                return {self.groups[0]: (blocks, rows)} if sizes[0] else {}
        elif len(sizes) != len(self.groups):
            raise TransferError(
                f"a job with {len(sizes)} groups of blocks; {list(self.groups)} were set up"
            )
        found: Pairs = {}
        block_at = row_at = 0
        for group, size, first in zip(self.groups, sizes, cache.block_indices, strict=True):
            if not size:
                continue
            skip = first % self.per_chunk
            chunks = -(-(size + skip) // self.per_chunk)
            mine = rows[row_at : row_at + chunks]
            pages = mine if self.per_chunk == 1 else self._pages(mine)[skip : skip + size]
            found[group] = (blocks[block_at : block_at + size], pages)
            block_at += size
            row_at += chunks
        if block_at != len(blocks) or row_at != len(rows):
            raise TransferError(
                f"a job of {len(blocks)} blocks in groups of {list(sizes)} and {len(rows)} chunks "
                f"of {self.per_chunk} blocks: {block_at} blocks, {row_at} chunks are accounted for"
            )
        return found

    def _pages(self, rows: Ids) -> Ids:
        pages = rows[:, None] * self.per_chunk + np.arange(self.per_chunk, dtype=np.int64)
        return pages.reshape(-1)


def job_blocks(pairs: Mapping[str, tuple[Ids, Ids]]) -> set[int]:
    """Cache blocks that a job was to fill."""
    return {int(block) for blocks, _ in pairs.values() for block in blocks}
