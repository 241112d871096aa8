"""What a plan is made of must fit together; what it moves may lie in any order and share rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from vkvmap import (
    _C,
    CacheView,
    LayerSpec,
    LayerTable,
    RankGrid,
    Region,
    TransferPlan,
    derive_canonical_mappings,
)
from vkvmap.errors import PlanError, StalePlanError
from vkvmap.layout import state_layout
from vkvmap.mapping import Mappings
from vkvmap.region import Section
from vkvmap.sections import pages_per_chunk, private_section, sections_for

STATE = LayerSpec.mamba2(
    "state", num_heads=8, head_dim=2, state_size=3, n_groups=8, conv_kernel=4, conv_elem=1,
    temporal_elem=1,
)  # fmt: skip
TEMPORAL = 8 * 2 * 3
CONV = STATE.canonical_bytes(0) - TEMPORAL


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(0, 256, shape, dtype=np.uint8)


@pytest.mark.parametrize("conv_first", [True, False])
@pytest.mark.parametrize("tp", [1, 3])
def test_tensors_of_a_layer_may_lie_in_either_order(conv_first: bool, tp: int) -> None:
    """Certified (tp=1) or opaque (3 does not divide 8 heads): every byte there and back."""
    rows = drawn(4, CONV + TEMPORAL + 7)
    conv = rows[:, :CONV] if conv_first else rows[:, TEMPORAL : TEMPORAL + CONV]
    temporal = rows[:, CONV : CONV + TEMPORAL] if conv_first else rows[:, :TEMPORAL]
    layout = state_layout(STATE, channels_first=True)
    caches = {"state": CacheView.of([conv, temporal], layout)}
    mappings = derive_canonical_mappings(LayerTable([STATE]), caches, RankGrid(tp=tp), 0)
    assert mappings.by_layer["state"].certified is (tp == 1)
    with Region.create(sections_for(mappings, {}, 3), backing="private") as region:
        with TransferPlan(mappings, caches, region, chunk_tokens={}) as plan:
            before = rows.copy()
            plan.store(([1], [2])).check()
            assert np.array_equal(rows, before)
            if tp == 1:
                expected = np.concatenate([conv[1], temporal[1]])
                assert np.array_equal(region.row("state", 2), expected)
            plan.load(([3], [2])).check()
    assert np.array_equal(conv[3], before_part(before, conv, rows)[1])
    assert np.array_equal(temporal[3], before_part(before, temporal, rows)[1])
    assert np.array_equal(rows[:3], before[:3])
    assert np.array_equal(rows[3, -7:], before[3, -7:])


def before_part(before: np.ndarray, part: np.ndarray, rows: np.ndarray) -> np.ndarray:
    start = part.__array_interface__["data"][0] - rows.__array_interface__["data"][0]
    return before[:, start : start + part.shape[1]]


SLAB = LayerTable(
    [
        LayerSpec.opaque("high", page_bytes=40, group="g"),
        LayerSpec.mla("low", row_bytes=8, group="g"),
    ]
)


def slab() -> tuple[np.ndarray, dict[str, CacheView], Mappings]:
    """Rows of 80 bytes: `low` in the first 32, `high` from 40 on; carried as one row."""
    rows = drawn(5, 80)
    caches = {
        "high": CacheView.of(rows[:, 40:], "pages"),
        "low": CacheView.of(rows[:, :32].reshape(5, 4, 8), "mla", 4),
    }
    return rows, caches, derive_canonical_mappings(SLAB, caches, RankGrid(tp=2), 1)


def test_an_opaque_row_moves_once_and_whole() -> None:
    rows, caches, mappings = slab()
    assert set(mappings.carrier.values()) == {"high"}
    (section,) = [s for s in sections_for(mappings, 8, 3) if s.private]
    assert section.name == private_section("g")
    assert section.payload_bytes == 2 * 2 * 80  # pages per chunk x ranks x row
    sections = sections_for(mappings, 8, 3)
    with Region.create(sections, backing="private") as region:
        with TransferPlan(mappings, caches, region, chunk_tokens=8) as plan:
            before = rows.copy()
            plan.store(([2], [3])).check()
            row = region.row(section.name, 1).reshape(2, 2, 80)
            assert np.array_equal(row[1, 1], before[2])
            assert np.count_nonzero(row) == np.count_nonzero(before[2])
            assert not region.rows("g").any()
            plan.load(([4], [3])).check()
    assert np.array_equal(rows[4], before[2])
    assert np.array_equal(rows[:4], before[:4])


def test_mappings_for_another_place_are_refused() -> None:
    _, caches, mappings = slab()
    shifted = np.zeros((6, 80), dtype=np.uint8)
    other = {
        "high": CacheView.of(shifted[1:, 40:], "pages"),
        "low": CacheView.of(shifted[1:, :32].reshape(5, 4, 8), "mla", 4),
    }
    theirs = derive_canonical_mappings(SLAB, other, RankGrid(tp=2), 1)
    with Region.create(sections_for(mappings, 8, 3), backing="private") as region:
        lower, higher = sorted((mappings, theirs), key=lambda m: m.addressing["low"].base)
        at = {id(mappings): caches, id(theirs): other}
        with pytest.raises(PlanError, match="at another address"):
            TransferPlan(higher, at[id(lower)], region, chunk_tokens=8)
        with TransferPlan(mappings, caches, region, chunk_tokens=8):
            pass


def latent(blocks: int = 3, group: str = "0") -> tuple[LayerTable, dict[str, CacheView], Mappings]:
    table = LayerTable([LayerSpec.mla("layer", row_bytes=8, group=group)])
    caches = {"layer": CacheView.of(drawn(blocks, 4, 8), "mla", 4)}
    return table, caches, derive_canonical_mappings(table, caches, RankGrid(), 0, strict=True)


@pytest.mark.parametrize("step", [-32, 32])
def test_a_certified_layer_at_another_address_is_refused(step: int) -> None:
    _, caches, mappings = latent()
    addressing = mappings.addressing["layer"]
    moved = replace(
        mappings, addressing={"layer": replace(addressing, base=addressing.base + step)}
    )
    with Region.create([Section("0", 2, 32)], backing="private") as region:
        with pytest.raises(PlanError, match="at another address"):
            TransferPlan(moved, caches, region)


def test_mappings_and_caches_must_name_the_same_layers() -> None:
    _, caches, mappings = latent()
    with Region.create([Section("0", 2, 32)], backing="private") as region:
        with pytest.raises(PlanError, match="has a mapping but no cache"):
            TransferPlan(mappings, {}, region)
        with pytest.raises(PlanError, match="has a cache but no mapping"):
            TransferPlan(mappings, caches | {"other": caches["layer"]}, region)
        nothing = derive_canonical_mappings(
            mappings.layers, caches, RankGrid(tp=2, world_size=3), 0
        )
        with pytest.raises(PlanError, match=r"nothing to plan.*3 workers"):
            TransferPlan(nothing, caches, region)


def test_a_plan_serves_one_device() -> None:
    _, caches, mappings = latent()
    table = LayerTable([mappings.layers["layer"], mappings.layers["layer"].renamed("twin")])
    tensor = replace(caches["layer"].tensors[0], device="cuda:0")
    both = caches | {"twin": replace(caches["layer"], tensors=(tensor,))}
    assert both["twin"].device == "cuda:0"
    mappings = derive_canonical_mappings(table, both, RankGrid(), 0, strict=True)
    with Region.create([Section("0", 2, 64)], backing="private") as region:
        with pytest.raises(PlanError, match=r"\['cpu', 'cuda:0'\]; a plan serves one device"):
            TransferPlan(mappings, both, region)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layers": range(0, 2, 2)}, "step 1"),
        ({"progress": np.zeros(2, np.uint32)}, "one uint32 per layer"),
        ({"progress": np.zeros(1, np.int32)}, "dtype int32"),
        ({"mover": "pigeon"}, "pigeon"),
    ],
)
def test_arguments_of_a_load_are_checked(arguments: dict[str, Any], message: str) -> None:
    _, caches, mappings = latent()
    with Region.create([Section("0", 2, 32)], backing="private") as region:
        with TransferPlan(mappings, caches, region) as plan:
            with pytest.raises(PlanError, match=message):
                plan.load(([0], [0]), **arguments)


@pytest.mark.parametrize("spans", [(4, 8), (8, 4)])
def test_layers_of_one_group_share_their_pages(spans: tuple[int, int]) -> None:
    table = LayerTable([LayerSpec.mla(name, row_bytes=8) for name in ("a", "b")])
    caches = {
        name: CacheView.of(drawn(2, span, 8), "mla", span)
        for name, span in zip("ab", spans, strict=True)
    }
    mappings = derive_canonical_mappings(table, caches, RankGrid(), 0, strict=True)
    with pytest.raises(PlanError, match="a group of their own"):
        pages_per_chunk(mappings, 8)
    with pytest.raises(PlanError, match="whole number of pages"):
        pages_per_chunk(mappings, 12)


def test_state_and_pages_do_not_share_a_group() -> None:
    state = LayerSpec.recurrent(
        "s", segments=[("x", 8, 8)], conv_positions=1, temporal=[], conv_elem=1, group="0"
    )
    table = LayerTable([LayerSpec.mla("a", row_bytes=8), state])
    caches = {
        "a": CacheView.of(drawn(2, 4, 8), "mla", 4),
        "s": CacheView.of(drawn(2, 8), state_layout(state, channels_first=True)),
    }
    mappings = derive_canonical_mappings(table, caches, RankGrid(), 0, strict=True)
    with pytest.raises(PlanError, match="give state layers a group of their own"):
        pages_per_chunk(mappings, 8)


def test_a_group_has_the_chunk_and_the_rows_it_was_given() -> None:
    table = LayerTable([LayerSpec.mla(name, row_bytes=8, group=name) for name in ("a", "b")])
    caches = {name: CacheView.of(drawn(2, 4, 8), "mla", 4) for name in "ab"}
    mappings = derive_canonical_mappings(table, caches, RankGrid(), 0, strict=True)
    sections = sections_for(mappings, {"a": 8, "b": 16}, {"a": 3, "b": 5})
    assert [(s.name, s.num_rows, s.payload_bytes, s.private) for s in sections] == [
        ("a", 3, 64, False),
        ("b", 5, 128, False),
    ]
    assert pages_per_chunk(mappings, {"a": 8, "b": 16}) == {"a": 2, "b": 4}
    with Region.create(sections, backing="private") as region:
        with TransferPlan(mappings, caches, region, chunk_tokens={"a": 8, "b": 16}) as plan:
            assert (plan.groups, dict(plan.pages_per_chunk)) == (("a", "b"), {"a": 2, "b": 4})
            plan.store({"b": ([1], [19])}).check()
            assert np.array_equal(
                region.row("b", 4)[96:], np.asarray(caches["b"].tensors[0].owner)[1].reshape(-1)
            )
            assert not region.rows("a").any() and not region.rows("b")[:4].any()


@pytest.mark.parametrize("junk", [[5], (), {"0": [5]}, {"0": 5}, None, 3.5, ([0], [0], [0])])
def test_what_is_no_pair_of_lists_is_refused_in_words(junk: Any) -> None:
    _, caches, mappings = latent()
    with Region.create([Section("0", 2, 32)], backing="private") as region:
        with TransferPlan(mappings, caches, region) as plan:
            with pytest.raises(PlanError, match=r"pass \(block_ids, page_ids\)"):
                plan.store(junk)


@pytest.mark.parametrize("ids", [[[1, 2], [3]], "bfloat16"])
def test_ids_that_are_no_array_are_refused_with_their_group(ids: Any) -> None:
    if ids == "bfloat16":
        import torch

        ids = torch.zeros(1, dtype=torch.bfloat16)
    _, caches, mappings = latent()
    with Region.create([Section("0", 2, 32)], backing="private") as region:
        with TransferPlan(mappings, caches, region) as plan:
            with pytest.raises(PlanError, match=r"group '0': block ids .*one-dimensional integer"):
                plan.packed.id_lists((ids, [0]))


def test_a_range_of_layers_may_end_wherever_it_likes() -> None:
    _, caches, mappings = latent()
    with Region.create([Section("0", 2, 32)], backing="private") as region:
        with TransferPlan(mappings, caches, region) as plan:
            plan.store(([1], [0]), layers=range(0, 1 << 40)).check()
            assert np.array_equal(
                region.row("0", 0), np.asarray(caches["layer"].tensors[0].owner)[1].reshape(-1)
            )


def test_what_the_native_module_refuses_of_a_plan_is_a_plan_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("tile 3 lies outside")

    _, caches, mappings = latent()
    monkeypatch.setattr(_C, "Plan", refuse)
    with Region.create([Section("0", 2, 32)], backing="private") as region:
        with pytest.raises(PlanError, match="tile 3 lies outside"):
            TransferPlan(mappings, caches, region)


class Registered:
    """Stands for a registration with CUDA."""

    pinned, why_not = True, ""

    def release(self) -> None:
        self.pinned, self.why_not = False, "somebody released it"


def on_a_device() -> tuple[dict[str, CacheView], Mappings]:
    """A cache that says it is on a GPU; it is not, so nothing can be moved."""
    table, caches, _ = latent()
    tensor = replace(caches["layer"].tensors[0], device="cuda:0")
    caches = {"layer": replace(caches["layer"], tensors=(tensor,))}
    return caches, derive_canonical_mappings(table, caches, RankGrid(), 0, strict=True)


@pytest.mark.parametrize("pinned_first", [True, False])
def test_a_plan_goes_stale_with_the_registration_that_it_used(pinned_first: bool) -> None:
    caches, mappings = on_a_device()
    with Region.create([Section("0", 2, 32)], backing="private") as region:
        if pinned_first:
            region.registration = Registered()
        plan = TransferPlan(mappings, caches, region, mover="kernel")
        plan.packed.check_alive()
        if not pinned_first:
            region.registration = Registered()
            plan.packed.check_alive()
        region.registration.release()
        for _ in range(2):
            with pytest.raises(
                StalePlanError, match=r"somebody released it; pin the region again .*rebuild"
            ):
                plan.store(([0], [0]))
            region.registration = Registered()  # another one: addresses may differ
        with plan.rebuild(caches) as fresh:
            fresh.packed.check_alive()


def test_a_plan_over_pageable_memory_needs_no_registration() -> None:
    caches, mappings = on_a_device()
    with Region.create([Section("0", 2, 32)], backing="private") as region:
        with TransferPlan(mappings, caches, region, mover="copy_engine") as plan:
            for _ in range(2):
                plan.packed.check_alive()


def test_a_cache_in_host_memory_needs_no_registration() -> None:
    _, caches, mappings = latent()
    with Region.create([Section("0", 2, 32)], backing="private") as region:
        region.registration = Registered()
        with TransferPlan(mappings, caches, region) as plan:
            region.registration.release()
            plan.store(([0], [0])).check()


def test_a_region_that_was_closed_by_force_is_noticed() -> None:
    _, caches, mappings = latent()
    region = Region.create([Section("0", 2, 32)], backing="private")
    with TransferPlan(mappings, caches, region) as plan:
        region.close(force=True)
        with pytest.raises(StalePlanError, match="region of this plan is closed"):
            plan.store(([0], [0]))
