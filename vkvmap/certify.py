"""Proof that mappings tile exactly.

Given the mappings of every rank of a group, two statements are proved by sorting intervals
(DESIGN 2.7): each rank's runs partition its local page, and for every choice of writers the
writers' runs partition the canonical page exactly once. Sizes are checked with Python's integers
before anything is expanded, so hostile runs cannot make the sweep larger than a page. Nothing here
is an assertion: it holds under ``python -O``.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

import numpy as np
from numpy.typing import NDArray

from vkvmap.errors import TilingError
from vkvmap.mapping import CanonicalPageMapping, CopyRun

Intervals = tuple[NDArray[np.int64], NDArray[np.int64]]

#: Bounds on what is proved by expansion, far above any real page; beyond them the answer is no.
_MAX_PAGE_BYTES = 1 << 48
_MAX_FRAGMENTS = 1 << 26
_MAX_TURNS = 1 << 16


def certify(per_rank: Sequence[CanonicalPageMapping]) -> None:
    """Prove that the mappings of a worker group tile, or say where they do not.

    Args:
        per_rank: the mapping of every rank of the group, by rank.

    Raises:
        TilingError: a rank's runs do not partition its local page, or some choice of writers does
            not write every canonical byte exactly once, or the ranks disagree on the page.
    """
    if not per_rank:
        raise TilingError("no mappings: a group has at least one rank")
    size = per_rank[0].canonical_page_size_bytes
    proven: set[tuple[int, int]] = set()
    for rank, mapping in enumerate(per_rank):
        if mapping.canonical_page_size_bytes != size:
            raise TilingError(
                f"rank {rank}: canonical page of {mapping.canonical_page_size_bytes} bytes, "
                f"rank 0 has {size}"
            )
        if not 0 <= mapping.writer_index < mapping.num_writers:
            raise TilingError(
                f"rank {rank}: writer_index {mapping.writer_index} is not below num_writers "
                f"{mapping.num_writers}"
            )
        key = (id(mapping.runs), mapping.local_page_size_bytes)
        if key not in proven:
            _check_local(rank, mapping)
            proven.add(key)
        _check_stores_are_loads(rank, mapping)
    turns = lcm(*(mapping.num_writers for mapping in per_rank))
    if turns > _MAX_TURNS:
        raise TilingError(f"writers take {turns} different turns; at most {_MAX_TURNS} are proved")
    for turn in range(turns):
        writers = [mapping for mapping in per_rank if mapping.is_writer(turn)]
        _check_canonical(writers, size, turn)


def _check_local(rank: int, mapping: CanonicalPageMapping) -> None:
    what = f"rank {rank}: local page"
    _check_volume(mapping.runs, mapping.local_page_size_bytes, what)
    _check_partition(
        [
            _expand(run, run.local_offset, run.local_stride, mapping.local_page_size_bytes, what)
            for run in mapping.runs
        ],
        mapping.local_page_size_bytes,
        what,
    )
    size = mapping.canonical_page_size_bytes
    what = f"rank {rank}: canonical page"
    _check_apart(
        [
            _expand(run, run.canonical_offset, run.canonical_stride, size, what)
            for run in mapping.runs
        ],
        what,
    )


def _check_stores_are_loads(rank: int, mapping: CanonicalPageMapping) -> None:
    """What a rank stores must come from where it would load it, or the bytes would move."""
    if mapping.store_runs is None or mapping.store_runs is mapping.runs:
        return
    what = f"rank {rank}: store runs"
    _check_count(mapping.store_runs, what)
    loads = [_pairs(run, mapping, what) for run in mapping.runs]
    stores = [_pairs(run, mapping, what) for run in mapping.store_runs]
    if not stores:
        return
    local, shift, length = (np.concatenate(part) for part in zip(*loads, strict=True))
    order = np.argsort(local, kind="stable")
    local, shift, length = local[order], shift[order], length[order]
    for start, delta, size in stores:
        remaining_start, remaining = start.copy(), size.copy()
        while remaining.size:
            at = np.searchsorted(local, remaining_start, side="right") - 1
            room = local[at] + length[at] - remaining_start
            if np.any(at < 0) or np.any(shift[at] != delta) or np.any(room <= 0):
                raise TilingError(f"{what} put bytes elsewhere than the load runs take them from")
            step = np.minimum(room, remaining)
            remaining_start, remaining = remaining_start + step, remaining - step
            keep = remaining > 0
            remaining_start, remaining, delta = remaining_start[keep], remaining[keep], delta[keep]


def _pairs(run: CopyRun, mapping: CanonicalPageMapping, what: str) -> tuple[NDArray[np.int64], ...]:
    """Local starts, canonical minus local, lengths: one entry per fragment."""
    local, canonical = mapping.local_page_size_bytes, mapping.canonical_page_size_bytes
    _check_bounds(run, run.local_offset, run.local_stride, local, what)
    _check_bounds(run, run.canonical_offset, run.canonical_stride, canonical, what)
    steps = np.arange(run.num_fragments, dtype=np.int64)
    starts = run.local_offset + steps * run.local_stride
    shift = run.canonical_offset + steps * run.canonical_stride - starts
    return starts, shift, np.full(run.num_fragments, run.fragment_size, dtype=np.int64)


def _check_canonical(writers: Sequence[CanonicalPageMapping], size: int, turn: int) -> None:
    what = f"canonical page, writers of page {turn}"
    runs = [run for mapping in writers for run in mapping.effective_store_runs]
    _check_volume(runs, size, what)
    _check_partition(
        [_expand(run, run.canonical_offset, run.canonical_stride, size, what) for run in runs],
        size,
        what,
    )


def _check_volume(runs: Sequence[CopyRun], size: int, what: str) -> None:
    """Exact byte count before anything is expanded: what passes cannot exceed the page."""
    total = sum(run.fragment_size * run.num_fragments for run in runs)
    if total != size:
        raise TilingError(f"{what}: {total} bytes are covered, the page has {size}")
    _check_count(runs, what)


def _check_count(runs: Sequence[CopyRun], what: str) -> None:
    if sum(run.num_fragments for run in runs) > _MAX_FRAGMENTS:
        raise TilingError(f"{what}: more than {_MAX_FRAGMENTS} fragments; too many to prove")


def _check_bounds(run: CopyRun, offset: int, stride: int, size: int, what: str) -> None:
    if run.fragment_size < 1 or run.num_fragments < 1:
        raise TilingError(f"{what}: {run} moves nothing")
    last = offset + (run.num_fragments - 1) * stride
    low, high = min(offset, last), max(offset, last) + run.fragment_size
    if low < 0 or high > size or size > _MAX_PAGE_BYTES:
        raise TilingError(f"{what}: {run} covers [{low}, {high}) of a page of {size} bytes")
    if run.num_fragments * run.fragment_size > size:
        raise TilingError(f"{what}: {run} moves more bytes than the page has ({size})")


def _expand(run: CopyRun, offset: int, stride: int, size: int, what: str) -> Intervals:
    _check_bounds(run, offset, stride, size, what)
    if stride == run.fragment_size:  # back to back: one interval says the same
        return (
            np.array([offset], dtype=np.int64),
            np.array([run.fragment_size * run.num_fragments], dtype=np.int64),
        )
    starts = offset + np.arange(run.num_fragments, dtype=np.int64) * stride
    return starts, np.full(run.num_fragments, run.fragment_size, dtype=np.int64)


def _check_apart(intervals: Sequence[Intervals], what: str) -> None:
    """No byte twice: a page that is loaded from one place twice is nobody's page."""
    if not intervals:
        return
    starts = np.concatenate([start for start, _ in intervals])
    lengths = np.concatenate([length for _, length in intervals])
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], (starts + lengths)[order]
    wrong = np.flatnonzero(starts[1:] < ends[:-1])
    if wrong.size:
        raise TilingError(f"{what}: byte {int(starts[wrong[0] + 1])} is loaded twice")


def _check_partition(intervals: Sequence[Intervals], size: int, what: str) -> None:
    if not intervals:
        return
    starts = np.concatenate([start for start, _ in intervals])
    lengths = np.concatenate([length for _, length in intervals])
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], (starts + lengths)[order]
    expected = np.concatenate(([0], ends[:-1]))
    wrong = np.flatnonzero(starts != expected)
    if wrong.size:
        at = int(wrong[0])
        kind = "covered twice" if starts[at] < expected[at] else "covered by nobody"
        raise TilingError(f"{what}: byte {min(int(starts[at]), int(expected[at]))} is {kind}")
