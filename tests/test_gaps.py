"""What no other test noticed: each of these fails for one small wrong version of the proof.

Found by `python -m tests.mutation`; sorted by module. Where a whole kind was missing it got a test
beside its like, this file has the rest.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from vkvmap import (
    CacheView,
    LayerSpec,
    LayerTable,
    RankGrid,
    Region,
    TransferPlan,
    derive_canonical_mappings,
)
from vkvmap.chunk import ChunkLayout
from vkvmap.errors import PlanError, SpecError
from vkvmap.sections import sections_for

MLA = LayerSpec.mla("m", row_bytes=8)


# ---- grid ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tp", "dcp", "pcp", "interleave"])
@pytest.mark.parametrize("value", [0, -1, 2.0, "2", None, True, False])
def test_a_grid_counts_in_positive_integers(name: str, value: Any) -> None:
    with pytest.raises(SpecError, match=f"grid {name}=.*positive integer"):
        RankGrid(**{name: value})


# ---- holding -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["native", "universal"])
@pytest.mark.parametrize("interleave", [3, 8])
def test_an_interleave_that_does_not_divide_the_block_is_what_is_named(
    interleave: int, family: Any
) -> None:
    caches = {"m": CacheView.of(np.zeros((2, 4, 8), np.uint8), "mla", 4)}
    grid = RankGrid(tp=2, dcp=2, interleave=interleave)
    mappings = derive_canonical_mappings(LayerTable([MLA]), caches, grid, 0, family=family)
    assert [refusal.rule for refusal in mappings.refusals] == ["interleave"]


# ---- chunk ---------------------------------------------------------------------------------------


def test_one_layer_with_tokens_is_enough_to_need_them() -> None:
    state = LayerSpec.opaque("s", page_bytes=8, group="0")
    assert not state.has_tokens
    with pytest.raises(SpecError, match="a positive count needed"):
        ChunkLayout.of(LayerTable([state, MLA]), 0)
    assert ChunkLayout.of(LayerTable([state]), 0)["0"].payload_bytes == 0


# ---- plan ----------------------------------------------------------------------------------------


class OnDevice:
    """Ids that lie on a GPU; a copy of them would be taken unasked."""

    device = "cuda:0"

    def data_ptr(self) -> int:
        return 0

    def numpy(self) -> np.ndarray:
        return np.zeros(1, dtype=np.int64)


def test_ids_on_a_device_are_refused() -> None:
    caches = {"m": CacheView.of(np.zeros((2, 4, 8), np.uint8), "mla", 4)}
    mappings = derive_canonical_mappings(LayerTable([MLA]), caches, RankGrid(), 0)
    with Region.create(sections_for(mappings, 4, 2), backing="private") as region:
        with TransferPlan(mappings, caches, region) as plan:
            for pair in ((OnDevice(), [0]), ([0], OnDevice())):
                with pytest.raises(PlanError, match="ids are on cuda:0; pass them on CPU"):
                    plan.store(pair)
