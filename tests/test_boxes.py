"""Boxes against the plainest reading of them: a set of byte pairs, listed one by one."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from vkvmap.boxes import (
    Box,
    boxes_of,
    coalesced,
    composed,
    folded,
    fragments_of,
    nested,
)

STEPS = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24])
LEVELS = st.lists(st.tuples(st.sampled_from([1, 1, 2, 3, 4]), STEPS, STEPS), max_size=4)
BOXES = st.builds(
    lambda left, right, levels: Box(left, right, tuple(levels)),
    st.integers(0, 40),
    st.integers(0, 40),
    LEVELS,
)


def pairs(*boxes: Box) -> list[tuple[int, int]]:
    """Every (left, right) byte pair, by walking the levels like an odometer."""
    out = []
    for box in boxes:
        for index in product(*(range(count) for count, _, _ in box.levels)):
            steps = list(zip(index, box.levels, strict=True))
            left = box.left + sum(i * step for i, (_, step, _) in steps)
            right = box.right + sum(i * step for i, (_, _, step) in steps)
            out.append((left, right))
    return sorted(out)


def in_fragments(boxes: tuple[Box, ...] | list[Box]) -> list[tuple[int, int]]:
    """Every byte pair, out of the fragment arrays."""
    arrays = (array.tolist() for array in fragments_of(boxes))
    return sorted(
        (left + i, right + i)
        for left, right, size in zip(*arrays, strict=True)
        for i in range(size)
    )


def is_canonical(box: Box) -> bool:
    rights = [step for _, _, step in box.levels]
    mergeable = any(
        outer[1] == inner[0] * inner[1] and outer[2] == inner[0] * inner[2]
        for inner, outer in zip(box.levels, box.levels[1:], strict=False)
    )
    return all(n > 1 for n, _, _ in box.levels) and rights == sorted(rights) and not mergeable


@given(BOXES)
def test_coalescing_keeps_the_pairs_and_leaves_nothing_to_join(box: Box) -> None:
    result = coalesced(box)
    assert pairs(result) == pairs(box)
    assert is_canonical(result)


@given(BOXES)
def test_size_fragment_and_strided_levels_say_what_the_pairs_say(box: Box) -> None:
    assert box.size == len(pairs(box))
    result = coalesced(box)
    assert result.fragment * int(np.prod([n for n, _, _ in result.strided])) == result.size
    assert pairs(box) == sorted((b, a) for a, b in pairs(box.flipped()))


@given(st.lists(BOXES, max_size=8))
def test_folding_keeps_the_pairs_and_never_steps_backwards(boxes: list[Box]) -> None:
    result = folded(boxes)
    assert pairs(*result) == pairs(*boxes)
    assert len(result) <= len(boxes)
    assert all(left > 0 and right > 0 for box in result for _, left, right in box.levels)
    assert all(is_canonical(box) for box in result)


def test_steps_of_nothing_and_steps_back_are_no_levels() -> None:
    piece = ((2, 1, 1),)
    for left, right in ((4, 0), (0, 4), (4, -4), (-4, 4), (0, 0)):
        boxes = [Box(10, 10, piece), Box(10 + left, 10 + right, piece)]
        assert folded(boxes) == tuple(boxes)
    assert folded([Box(0, 0, piece), Box(4, 6, piece)]) == (Box(0, 0, (*piece, (2, 4, 6))),)


@given(BOXES, st.integers(1, 6), st.tuples(STEPS, STEPS), st.booleans())
def test_an_arithmetic_progression_folds_into_one_box(
    box: Box, count: int, step: tuple[int, int], backwards: bool
) -> None:
    series = [
        Box(box.left + i * step[0], box.right + i * step[1], box.levels) for i in range(count)
    ]
    every = pairs(*series)
    assume(len(set(every)) == len(every))
    assert len(folded(series)) == 1
    if backwards and count > 1:
        assert pairs(*folded(series[::-1])) == pairs(*series)


@given(st.lists(BOXES, max_size=6))
def test_fragments_are_the_same_pairs(boxes: list[Box]) -> None:
    assert in_fragments(boxes) == pairs(*boxes)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5), st.integers(0, 3)), max_size=12))
def test_boxes_of_fragments_are_the_same_pairs(pieces: list[tuple[int, int, int]]) -> None:
    """Fragments in order with gaps on either side; those that touch on both must join."""
    left = right = 0
    rows, joined = [], 0
    for gap_left, size, gap_right in pieces:
        joined += bool(not rows or gap_left or gap_right)
        left, right = left + gap_left, right + gap_right
        rows.append((left, right, size))
        left, right = left + size, right + size
    arrays = np.array(rows, dtype=np.int64).reshape(-1, 3)
    shuffled = arrays[np.random.default_rng(len(rows)).permutation(len(rows))]
    result = boxes_of(shuffled[:, 0], shuffled[:, 1], shuffled[:, 2])
    assert pairs(*result) == sorted((a + i, b + i) for a, b, n in rows for i in range(n))
    assert fragments_of(result)[0].size <= max(joined, 0)


PIECES = st.builds(
    lambda left, right, level: Box(left, right, (level,)),
    st.integers(0, 40),
    st.integers(0, 40),
    st.tuples(st.sampled_from([1, 2, 3]), STEPS, STEPS),
)


@given(st.lists(st.lists(PIECES, min_size=1, max_size=3), max_size=3), st.integers(0, 9))
def test_nesting_is_the_product_of_the_axes(axes: list[list[Box]], start: int) -> None:
    described = [[(box.left, box.right, box.levels) for box in axis] for axis in axes]
    expected = [(start, 2 * start)]
    for axis in axes:
        expected = [(a + c, b + d) for a, b in expected for c, d in pairs(*axis)]
    assert pairs(*nested(start, 2 * start, described)) == sorted(expected)


@st.composite
def permutations_in_pieces(draw: st.DrawFn, size: int) -> list[Box]:
    """A partition of [0, size) on the left, each piece at a place of its own on the right."""
    cuts = sorted(draw(st.sets(st.integers(1, size - 1), max_size=6))) if size > 1 else []
    spans = list(zip([0, *cuts], [*cuts, size], strict=True))
    order = draw(st.permutations(spans))
    boxes, right = [], draw(st.integers(0, 5))
    for start, stop in order:
        boxes.append(Box(start, right, ((stop - start, 1, 1),)))
        right += stop - start + draw(st.integers(0, 2))
    return boxes


@given(st.data(), st.integers(1, 40))
def test_composing_goes_through_the_common_page(data: st.DataObject, size: int) -> None:
    inner = data.draw(permutations_in_pieces(size))
    outer = data.draw(permutations_in_pieces(size))
    kept = data.draw(st.integers(1, len(inner)))  # a store may move a part of the page only
    canonical = dict(pairs(*inner[:kept]))
    memory = dict(pairs(*outer))
    expected = sorted((memory[byte], place) for byte, place in canonical.items())
    assert pairs(*composed(inner[:kept], outer)) == expected
