"""The proof is attacked: whatever is done to a right answer, it is no longer accepted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.attack import KINDS, attack
from tests.worlds import World, worlds
from vkvmap import CanonicalPageMapping, CopyRun, LayerTable, certify, derive_group
from vkvmap.conformance import byte_map
from vkvmap.errors import TilingError

DELTAS = st.sampled_from([-129, -128, -16, -3, -1, 1, 2, 7, 64, 1000, 1 << 40, -(1 << 62)])
FIELDS = st.sampled_from(
    [
        "local_offset",
        "canonical_offset",
        "fragment_size",
        "num_fragments",
        "local_stride",
        "canonical_stride",
    ]
)


def moved(mapping: CanonicalPageMapping) -> list[tuple[int, int]] | None:
    """All (local, canonical) byte pairs in order, or None if a run leaves its page."""
    pairs = []
    for run in mapping.runs:
        if min(run.fragment_size, run.num_fragments) < 1 or run.num_fragments > 1 << 16:
            return None
        for i in range(run.num_fragments):
            for byte in range(min(run.fragment_size, 1 << 16)):
                pairs.append(
                    (
                        run.local_offset + i * run.local_stride + byte,
                        run.canonical_offset + i * run.canonical_stride + byte,
                    )
                )
    return sorted(pairs)


def is_partition(mappings: list[CanonicalPageMapping]) -> bool:
    """The statement that certify proves, by counting bytes one by one."""
    for mapping in mappings:
        pairs = moved(mapping)
        if pairs is None or [a for a, _ in pairs] != list(range(mapping.local_page_size_bytes)):
            return False
    size = mappings[0].canonical_page_size_bytes
    for page in range(max(m.num_writers for m in mappings)):
        written = sorted(b for m in mappings if m.is_writer(page) for _, b in (moved(m) or []))
        if written != list(range(size)):
            return False
    return True


@given(worlds(legal=True), st.data())
def test_a_corrupted_run_is_caught_unless_it_still_tiles(world: World, data: st.DataObject) -> None:
    group = derive_group(
        LayerTable([world.spec]), {"layer": world.view()}, world.grid, family=world.family
    )
    mappings = [mappings.by_layer["layer"] for mappings in group]
    assume(mappings[0].canonical_page_size_bytes <= 4096)
    rank = data.draw(st.integers(0, len(mappings) - 1))
    runs = list(mappings[rank].runs)
    index = data.draw(st.integers(0, len(runs) - 1))
    attack = data.draw(st.sampled_from(["shift", "drop", "duplicate", "swap"]))
    if attack == "shift":
        name = data.draw(FIELDS)
        runs[index] = replace(runs[index], **{name: getattr(runs[index], name) + data.draw(DELTAS)})
    elif attack == "drop":
        del runs[index]
    elif attack == "duplicate":
        runs.append(runs[index])
    else:
        other = data.draw(st.integers(0, len(runs) - 1))
        a, b = runs[index], runs[other]
        runs[index] = replace(a, canonical_offset=b.canonical_offset)
        runs[other] = replace(b, canonical_offset=a.canonical_offset)
    mappings[rank] = replace(mappings[rank], runs=tuple(runs))
    try:
        certify(mappings)
    except TilingError:
        assert not is_partition(mappings)
    else:
        assert is_partition(mappings)


@given(worlds(legal=True), st.sampled_from([(1, 0), (2, 2), (3, 0), (0, 0), (2, -1)]))
def test_a_wrong_turn_is_caught(world: World, turn: tuple[int, int]) -> None:
    group = derive_group(
        LayerTable([world.spec]), {"layer": world.view()}, world.grid, family=world.family
    )
    mappings = [mappings.by_layer["layer"] for mappings in group]
    writers, index = turn
    if (mappings[0].num_writers, mappings[0].writer_index) == turn:
        return
    mappings[0] = replace(mappings[0], num_writers=writers, writer_index=index)
    with pytest.raises(TilingError):
        certify(mappings)


@pytest.mark.parametrize(
    "run",
    [
        CopyRun(0, 0, 1 << 62, 4, 1, 1),
        CopyRun(0, 0, 1, 1 << 62, 1 << 62, 1 << 62),
        CopyRun(0, 0, 1, 1 << 40, 0, 0),
        CopyRun(-1, 0, 2, 1, 1, 1),
        CopyRun(0, 0, 0, 1, 1, 1),
        CopyRun(0, 0, 16, 0, 1, 1),
        CopyRun(0, 0, 8, 2, 4, 8),
        CopyRun(8, 8, 8, 2, -4, -8),
    ],
)
def test_hostile_runs_are_refused_without_expanding_them(run: CopyRun) -> None:
    mapping = CanonicalPageMapping(16, 16, (run,), 1, 0, True)
    with pytest.raises(TilingError):
        certify([mapping])


def test_a_page_too_large_to_prove_is_refused() -> None:
    run = CopyRun(0, 0, 1, 1 << 40, 2, 2)
    mapping = CanonicalPageMapping(1 << 40, 1 << 40, (run,), 1, 0, True)
    with pytest.raises(TilingError, match="too many to prove"):
        certify([mapping])


def test_no_mappings_prove_nothing() -> None:
    with pytest.raises(TilingError, match="at least one rank"):
        certify([])


def test_a_permuted_but_complete_mapping_is_accepted() -> None:
    runs = (CopyRun(8, 0, 8, 1, 8, 8), CopyRun(0, 8, 8, 1, 8, 8))
    mapping = CanonicalPageMapping(16, 16, runs, 1, 0, True)
    certify([mapping])
    assert np.array_equal(np.sort(byte_map(mapping)), np.arange(16))


def test_the_attack_finds_nothing_and_spoils_in_every_way() -> None:
    """The long one is `python -m tests.attack`: 100,000 tries."""
    counted = attack(4000, 7)
    assert sum(counted.values()) == 4000
    for kind in KINDS:
        assert counted[kind, True] > 50, kind
    assert sum(n for (_, refused), n in counted.items() if not refused) > 100


def test_the_attack_notices_a_proof_that_looks_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that refuses everything."""

    def refuse(group: object) -> None:
        raise TilingError("no")

    for proof in (lambda group: None, refuse):
        monkeypatch.setattr("tests.attack.certify", proof)
        with pytest.raises((AssertionError, TilingError)):
            attack(200, 7)
