"""What a round trip is made of: the job, and each rank's part of it.

Plain values that are pickled to the rank processes; no memory, no processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vkvmap.configuration import Configuration
from vkvmap.mapping import Family
from vkvmap.paged import PagedLayer, paged_layer
from vkvmap.sharing import span_tokens
from vkvmap.spec import LayerTable

Ids = npt.NDArray[np.int64]

#: Blocks of a cache beyond those in use; they must be left alone.
SPARE_BLOCKS = 3

#: States stored per sequence, where a group keeps state instead of tokens: enough to tell one row
#: from another without moving hundreds of megabytes per model.
STATES = 2


@dataclass(frozen=True)
class Job:
    """A model, two configurations, and how much to move.

    Attributes:
        tokens: tokens moved, a multiple of `chunk_tokens`.
        device: where caches are, ``"cpu"`` or ``"cuda"``.
        padding: bytes behind every page of the caches, which must stay untouched.
        seed: of block tables and of the order of chunks in the region.
    """

    table: LayerTable
    source: Configuration
    target: Configuration
    family: Family
    chunk_tokens: int
    tokens: int
    mover: str = "auto"
    writers: str = "turns"
    device: str = "cpu"
    padding: int = 64
    seed: int = 0

    @property
    def num_chunks(self) -> int:
        """Chunks of a group that keeps tokens."""
        return self.tokens // self.chunk_tokens

    def chunks_of(self, group: str) -> int:
        """Chunks of `group`."""
        if self.keeps_tokens(group):
            return self.num_chunks
        return min(STATES, self.num_chunks)

    def keeps_tokens(self, group: str) -> bool:
        """Whether the group's layers keep tokens rather than state."""
        return any(spec.has_tokens for spec in self.table.in_group(group))

    @property
    def chunk_counts(self) -> dict[str, int]:
        """Chunks of every group."""
        return {group: self.chunks_of(group) for group in self.table.groups}

    def rows(self, group: str) -> Ids:
        """The region row of each chunk of `group`, in token order: shuffled, as stores fill up."""
        return _shuffled(self.chunks_of(group), self.seed, "rows", group)

    def pages(self, group: str, side: Configuration) -> int:
        """Canonical pages of `group` under `side`."""
        spans = {span_tokens(spec, side) for spec in self.table.in_group(group)}
        return self.tokens // max(spans) if max(spans) else self.chunks_of(group)


@dataclass(frozen=True)
class RankTask:
    """One rank's part: which side it is on, its stage and rank, and where the region is.

    Attributes:
        loading: False stores what the rank has, True loads and compares.
        region_fd: inherited descriptor of the region.
    """

    job: Job
    loading: bool
    stage: int
    rank: int
    region_fd: int
    threads: int = 1

    @property
    def side(self) -> Configuration:
        """The configuration that this rank runs under."""
        return self.job.target if self.loading else self.job.source

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers that this rank's pipeline stage owns."""
        return self.side.stage_layers(self.job.table)[self.stage]

    def paged(self, name: str) -> PagedLayer:
        """The tensor of a layer on this rank."""
        spec = self.job.table[name]
        blocks = self.job.pages(spec.group, self.side) + SPARE_BLOCKS
        return paged_layer(spec, self.side, self.rank, num_blocks=blocks, padding=self.job.padding)

    def block_table(self, group: str) -> Ids:
        """Cache block of every canonical page, in token order: scattered, as engines leave them."""
        pages = self.job.pages(group, self.side)
        where = f"{self.loading}/{self.stage}/{self.rank}"
        return _shuffled(pages + SPARE_BLOCKS, self.job.seed, where, group)[:pages]

    def page_ids(self, group: str, pages_per_chunk: int) -> Ids:
        """The canonical page id of every page, in token order."""
        rows = self.job.rows(group)
        page = np.arange(self.job.pages(group, self.side), dtype=np.int64)
        if not self.job.keeps_tokens(group):
            return rows[page]
        return rows[page // pages_per_chunk] * pages_per_chunk + page % pages_per_chunk

    @property
    def cache_bytes(self) -> int:
        """Bytes of this rank's cache."""
        return sum(self.paged(name).nbytes for name in self.layers)


@dataclass(frozen=True)
class RankReport:
    """What one rank did.

    Attributes:
        side: ``"store"`` or ``"load"``.
        nbytes, fragments: what its transfer moved; a store counts what the election left to it.
        seconds: from submission to completion.
        checked: bytes compared: every byte of its cache, padding and spare blocks included.
        wrong: bytes that differ from the truth, or were touched and should not have been.
        first_wrong: the first of them, in words.
        error: why the rank could not finish, empty if it did.
    """

    side: str
    stage: int
    rank: int
    nbytes: int = 0
    fragments: int = 0
    mover: str = ""
    seconds: float = 0.0
    checked: int = 0
    wrong: int = 0
    first_wrong: str = ""
    error: str = ""

    @property
    def gbps(self) -> float:
        """GB/s of the transfer."""
        return self.nbytes / self.seconds / 1e9 if self.seconds else 0.0

    @property
    def good(self) -> bool:
        """Whether it finished with every byte right."""
        return not self.error and not self.wrong


@dataclass(frozen=True)
class Outcome:
    """The whole round trip."""

    family: str
    chunk_tokens: int
    tokens: int
    region_bytes: int
    reports: tuple[RankReport, ...]
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        """Whether every byte of every rank is right."""
        loads = [report for report in self.reports if report.side == "load"]
        return bool(loads) and all(report.good for report in self.reports)


def _shuffled(count: int, seed: int, *what: str) -> Ids:
    digest = [seed, *(byte for text in what for byte in text.encode())]
    return np.random.default_rng(digest).permutation(count).astype(np.int64)
