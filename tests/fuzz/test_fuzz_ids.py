"""Transfer ids of any kind: refused before a byte moves, or exactly what they ask for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vkvmap import CacheView, LayerSpec, LayerTable, RankGrid, Region, TransferPlan
from vkvmap.derive import derive_canonical_mappings
from vkvmap.errors import PlanError
from vkvmap.region import Section
from vkvmap.transfer import Engine

pytestmark = pytest.mark.fuzz

BLOCKS, ROWS, PAGES = 7, 3, 2  # pages per row
BYTES = 64


class Moved:
    """A plan, its memory, and the same memory as plain lists for the oracle."""

    def __init__(self) -> None:
        self.storage = np.zeros((BLOCKS, 4, BYTES // 4), dtype=np.uint8)
        table = LayerTable([LayerSpec.mla("layer", row_bytes=BYTES // 4)])
        caches = {"layer": CacheView.of(self.storage, "mla", 4)}
        mappings = derive_canonical_mappings(table, caches, RankGrid(), 0, strict=True)
        self.region = Region.create([Section("0", ROWS, PAGES * BYTES)], backing="private")
        self.plan = TransferPlan(
            mappings, caches, self.region, chunk_tokens=4 * PAGES, engine=Engine(threads=1)
        )
        self.blocks = self.storage.reshape(BLOCKS, BYTES)
        self.pages = self.region.rows("0").reshape(ROWS * PAGES, BYTES)

    def scramble(self) -> None:
        """Every block and page another number."""
        self.blocks[:] = np.arange(BLOCKS)[:, None]
        self.pages[:] = 100 + np.arange(ROWS * PAGES)[:, None]


@pytest.fixture(scope="module")
def moved() -> Iterator[Moved]:
    yield Moved()


NUMBERS = st.one_of(
    st.integers(-2, 9),
    st.sampled_from(
        [-(1 << 63), (1 << 63) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 32) + 1, 1 << 40, -1]
    ),
)
GOOD = st.lists(st.integers(0, 5), max_size=6, unique=True)
IDS = st.one_of(GOOD, GOOD, st.lists(NUMBERS, max_size=8))


def is_right(load: bool, blocks: list[int], pages: list[int]) -> bool:
    """The rule: in range, of one length, and no destination twice."""
    targets = blocks if load else pages
    return (
        len(blocks) == len(pages)
        and all(0 <= block < BLOCKS for block in blocks)
        and all(0 <= page < ROWS * PAGES for page in pages)
        and len(set(targets)) == len(targets)
    )


@given(st.booleans(), IDS, IDS, st.sampled_from(["list", "int64", "strided", "int32", "uint64"]))
def test_ids_are_refused_or_do_exactly_what_they_say(
    moved: Moved, load: bool, blocks: list[int], pages: list[int], form: str
) -> None:
    moved.scramble()
    before = moved.blocks.copy(), moved.pages.copy()
    call = moved.plan.load if load else moved.plan.store
    given_ids: list[Any] = []
    for ids in (blocks, pages):
        if form == "strided":
            given_ids.append(np.repeat(np.array(ids, dtype=np.int64), 2)[::2])
        elif form in ("int32", "uint64") and all(0 <= n < 1 << 31 for n in ids):
            given_ids.append(np.array(ids, dtype=form))
        elif form == "list":
            given_ids.append(ids)
        else:
            given_ids.append(np.array(ids, dtype=np.int64))
    expected = before[0].copy(), before[1].copy()
    try:
        call(tuple(given_ids)).check(30)
    except PlanError as error:
        assert not is_right(load, blocks, pages)
        assert str(error)
    else:
        assert is_right(load, blocks, pages)
        for block, page in zip(blocks, pages, strict=True):
            if load:
                expected[0][block] = before[1][page]
            else:
                expected[1][page] = before[0][block]
    assert np.array_equal(moved.blocks, expected[0])
    assert np.array_equal(moved.pages, expected[1])


@given(
    st.one_of(
        st.none(), st.text(max_size=3), st.binary(max_size=3), st.floats(), st.integers(),
        st.lists(st.one_of(st.none(), st.floats(), st.text(max_size=2), st.booleans()), max_size=3),
        st.lists(st.integers(-(1 << 80), 1 << 80), max_size=2), st.tuples(st.integers()),
        st.dictionaries(st.text(max_size=2), st.lists(st.integers(), max_size=2), max_size=2),
    )
)  # fmt: skip
def test_what_are_no_ids_are_refused_in_words(moved: Moved, junk: Any) -> None:
    moved.scramble()
    before = moved.blocks.copy(), moved.pages.copy()
    for pairs in (
        junk,
        (junk, junk),
        ([0], junk),
        {"0": junk},
        {"0": (junk, [0])},
        {junk.__class__: 1},
    ):
        try:
            moved.plan.store(pairs).check(30)
        except (PlanError, TypeError) as error:
            assert str(error)
        else:
            continue
    assert np.array_equal(moved.blocks, before[0])
    # Only pages can have changed, and only to what a block holds.
    changed = moved.pages[np.any(moved.pages != before[1], axis=1)]
    assert np.all(changed < BLOCKS)
