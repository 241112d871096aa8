"""Writer policies: who stores what, exactly once, and never from elsewhere than loads go."""

from __future__ import annotations

from dataclasses import replace
from math import lcm

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worlds import World, worlds
from vkvmap import LayerTable, certify, derive_group
from vkvmap.errors import SpecError, TilingError
from vkvmap.mapping import CanonicalPageMapping
from vkvmap.writers import SLICE_ALIGNMENT, with_writers


def per_rank(world: World, policy: str) -> list[CanonicalPageMapping]:
    group = derive_group(
        LayerTable([world.spec]), {"layer": world.view()}, world.grid, family=world.family
    )
    return [with_writers(mappings, policy).by_layer["layer"] for mappings in group]


def bytes_stored(mapping: CanonicalPageMapping) -> int:
    return sum(run.fragment_size * run.num_fragments for run in mapping.effective_store_runs)


@given(worlds(legal=True), st.sampled_from(["turns", "first", "split"]))
def test_every_policy_writes_each_byte_once(world: World, policy: str) -> None:
    mappings = per_rank(world, policy)
    certify(mappings)
    for page in range(lcm(*(m.num_writers for m in mappings))):
        times = np.zeros(mappings[0].canonical_page_size_bytes, dtype=np.int64)
        for mapping in mappings:
            if mapping.is_writer(page):
                for run in mapping.effective_store_runs:
                    for i in range(run.num_fragments):
                        start = run.canonical_offset + i * run.canonical_stride
                        times[start : start + run.fragment_size] += 1
        assert np.all(times == 1)


@given(worlds(legal=True))
def test_split_shares_every_page_among_its_replicas(world: World) -> None:
    shared = per_rank(world, "split")
    for mapping, before in zip(shared, per_rank(world, "turns"), strict=True):
        fair = before.local_page_size_bytes / before.num_writers
        assert abs(bytes_stored(mapping) - fair) <= SLICE_ALIGNMENT
        assert mapping.runs == before.runs


@given(worlds(legal=True))
def test_the_debugging_policy_is_exempt_and_would_be_caught(world: World) -> None:
    mappings = per_rank(world, "all")
    assert all(bytes_stored(m) == m.local_page_size_bytes for m in mappings)
    if any(m.num_writers > 1 for m in per_rank(world, "turns")):
        with pytest.raises(TilingError):
            certify(mappings)


@given(worlds(legal=True))
def test_stores_that_disagree_with_loads_are_caught(world: World) -> None:
    mappings = per_rank(world, "turns")
    first = mappings[0].runs[0]
    moved = replace(first, local_offset=first.local_offset + 1)
    mappings[0] = replace(mappings[0], store_runs=(moved, *mappings[0].runs[1:]))
    with pytest.raises(TilingError):
        certify(mappings)


def test_an_unknown_policy_names_the_choices() -> None:
    from vkvmap import CacheView, LayerSpec, RankGrid

    table = LayerTable([LayerSpec.mla("layer", row_bytes=8)])
    caches = {"layer": CacheView.of(np.zeros((2, 4, 8), dtype=np.uint8), "mla", 4)}
    mappings = derive_group(table, caches, RankGrid())[0]
    with pytest.raises(SpecError, match="turns, first, split, all"):
        with_writers(mappings, "last")
