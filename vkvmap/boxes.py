"""Strided boxes: the one shape that every mapping is made of.

A box pairs bytes of one address space with bytes of another: two start offsets and a list of levels
``(count, step on the left, step on the right)``, innermost first, over single bytes. Every layout,
shard and interleave becomes boxes; coalescing boxes is what turns an axis-by-axis description into
a few long copies. Pure integers: no ranks, no tokens, no tensors.

Invariant of what leaves this module: levels have count > 1, are sorted by ascending right step (the
host's, so that a walk over a box is a walk over the host's bytes), and no two neighbours could be
one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

#: ``(count, left step, right step)``, steps in bytes.
Level = tuple[int, int, int]


@dataclass(frozen=True)
class Box:
    """`left` and `right` start offsets (bytes) and the levels between them, innermost first."""

    left: int
    right: int
    levels: tuple[Level, ...]

    @property
    def size(self) -> int:
        """Bytes that the box moves."""
        size = 1
        for count, _, _ in self.levels:
            size *= count
        return size

    @property
    def fragment(self) -> int:
        """Bytes that are contiguous on both sides."""
        if self.levels and self.levels[0][1:] == (1, 1):
            return self.levels[0][0]
        return 1

    @property
    def strided(self) -> tuple[Level, ...]:
        """The levels above the fragment."""
        return self.levels[1:] if self.fragment > 1 else self.levels

    def flipped(self) -> Box:
        """The same pairs with left and right exchanged."""
        levels = tuple((count, right, left) for count, left, right in self.levels)
        return coalesced(Box(self.right, self.left, levels))


def coalesced(box: Box) -> Box:
    """The same byte pairs with the fewest levels, sorted by ascending right step."""
    levels: list[Level] = []
    for count, left, right in sorted(box.levels, key=lambda level: (level[2], level[1])):
        if count == 1:
            continue
        if levels:
            inner, inner_left, inner_right = levels[-1]
            if left == inner * inner_left and right == inner * inner_right:
                levels[-1] = (inner * count, inner_left, inner_right)
                continue
        levels.append((count, left, right))
    return Box(box.left, box.right, tuple(levels))


def folded(boxes: Iterable[Box]) -> tuple[Box, ...]:
    """The same byte pairs in fewer boxes.

    Neighbours whose fragments touch on both sides become one, and arithmetic progressions of equal
    boxes become a level. Greedy over the given order, repeated until nothing changes; boxes that
    come from one nest of loops fold back into it.
    """
    current = [coalesced(box) for box in boxes]
    while True:
        merged = _fold_once(_join_once(current))
        if len(merged) == len(current):
            return tuple(merged)
        current = merged


def _join_once(boxes: Sequence[Box]) -> list[Box]:
    joined: list[Box] = []
    for box in boxes:
        if joined:
            last = joined[-1]
            gap = (box.left - last.left, box.right - last.right)
            if gap == (last.fragment, last.fragment) and box.strided == last.strided:
                longer = (last.fragment + box.fragment, 1, 1)
                joined[-1] = coalesced(Box(last.left, last.right, (longer, *last.strided)))
                continue
        joined.append(box)
    return joined


def _fold_once(boxes: Sequence[Box]) -> list[Box]:
    merged: list[Box] = []
    start = 0
    while start < len(boxes):
        first = boxes[start]
        stop = start + 1
        if stop < len(boxes) and boxes[stop].levels == first.levels:
            step = (boxes[stop].left - first.left, boxes[stop].right - first.right)
            while (
                stop < len(boxes)
                and boxes[stop].levels == first.levels
                and boxes[stop].left - boxes[stop - 1].left == step[0]
                and boxes[stop].right - boxes[stop - 1].right == step[1]
            ):
                stop += 1
            if step[0] <= 0 or step[1] <= 0:
                stop = start + 1
        if stop - start > 1:
            level = (stop - start, step[0], step[1])
            merged.append(coalesced(Box(first.left, first.right, (*first.levels, level))))
        else:
            merged.append(first)
        start = stop
    return merged


def nested(
    left: int, right: int, axes: Sequence[Sequence[tuple[int, int, tuple[Level, ...]]]]
) -> tuple[Box, ...]:
    """The product of axes, each a list of pieces ``(left start, right start, levels)``."""
    boxes = []
    for pieces in product(*axes):
        levels: tuple[Level, ...] = ()
        start_left, start_right = left, right
        for piece_left, piece_right, piece_levels in pieces:
            start_left += piece_left
            start_right += piece_right
            levels += piece_levels
        boxes.append(Box(start_left, start_right, levels))
    return folded(boxes)


def fragments_of(boxes: Iterable[Box]) -> tuple[Ints, Ints, Ints]:
    """``(left, right, length)`` of every fragment, as int64 arrays, in box order."""
    lefts, rights, lengths = [], [], []
    for box in boxes:
        left = np.array([box.left], dtype=np.int64)
        right = np.array([box.right], dtype=np.int64)
        for count, left_step, right_step in box.strided:
            steps = np.arange(count, dtype=np.int64)[:, None]
            left = (steps * left_step + left).ravel()
            right = (steps * right_step + right).ravel()
        lefts.append(left)
        rights.append(right)
        lengths.append(np.full(left.size, box.fragment, dtype=np.int64))
    if not lefts:
        empty = np.empty(0, dtype=np.int64)
        return empty, empty, empty
    return np.concatenate(lefts), np.concatenate(rights), np.concatenate(lengths)


def boxes_of(left: Ints, right: Ints, length: Ints) -> tuple[Box, ...]:
    """Boxes that pair exactly the given fragments, joined and folded where they allow it."""
    order = np.argsort(right, kind="stable")
    left, right, length = left[order], right[order], length[order]
    if left.size:
        joined = (left[1:] == left[:-1] + length[:-1]) & (right[1:] == right[:-1] + length[:-1])
        starts = np.concatenate(([0], np.flatnonzero(~joined) + 1))
        length = np.add.reduceat(length, starts)
        left, right = left[starts], right[starts]
    return folded(
        Box(a, b, ((size, 1, 1),))
        for a, b, size in zip(left.tolist(), right.tolist(), length.tolist(), strict=True)
    )


def composed(inner: Iterable[Box], outer: Iterable[Box]) -> tuple[Box, ...]:
    """Pair the right side of `outer` with the right side of `inner`, through their common left.

    `inner` pairs page bytes with canonical bytes, `outer` pairs the same page's bytes with memory;
    the result pairs memory (left) with canonical bytes (right). Both must cover the bytes that they
    name once; bytes that only `outer` covers are left out.
    """
    page, canonical, size = _by_left(fragments_of(inner))
    piece, memory, extent = _by_left(fragments_of(outer))
    if not page.size:
        return ()
    cuts = np.unique(np.concatenate((page, page + size, piece, piece + extent)))
    starts: Ints = cuts[:-1]
    lengths: Ints = np.diff(cuts)
    at = np.searchsorted(page, starts, side="right") - 1
    used = (at >= 0) & (starts < (page + size)[at])
    starts, lengths, at = starts[used], lengths[used], at[used]
    under = np.searchsorted(piece, starts, side="right") - 1
    left: Ints = memory[under] + starts - piece[under]
    right: Ints = canonical[at] + starts - page[at]
    return boxes_of(left, right, lengths)


def _by_left(fragments: tuple[Ints, Ints, Ints]) -> tuple[Ints, Ints, Ints]:
    left, right, length = fragments
    order = np.argsort(left, kind="stable")
    return left[order], right[order], length[order]
