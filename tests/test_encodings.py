"""Cells that are not what their shape says: spans of whole heads, and K transposed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import oracle
from vkvmap import CacheView, LayerSpec, LayerTable, RankGrid, derive_group
from vkvmap.conformance import byte_map
from vkvmap.mapping import CanonicalPageMapping


def spans(
    heads: int, tp: int, bs: int = 4, kernel_blocks: int = 1, dcp: int = 1, family: str = "native"
) -> tuple[list[CanonicalPageMapping], list[str]]:
    """Every rank's mapping of `heads` spans, and the rules that were broken."""
    spec = LayerSpec.attention("layer", num_kv_heads=heads, head_size=3, elem=1)
    shape = (3 * kernel_blocks, max(1, heads // tp), bs // kernel_blocks, 6)
    view = CacheView.of(np.zeros(shape, np.uint8), "head_spans", bs, kernel_blocks=kernel_blocks)
    group = derive_group(
        LayerTable([spec]), {"layer": view}, RankGrid(tp=tp, dcp=dcp), family=family
    )
    return [m.by_layer["layer"] for m in group], [r.rule for r in group[0].refusals]


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 4, 6]))
def test_whole_heads_are_dealt_out_without_looking_inside(heads: int, tp: int, bs: int) -> None:
    mappings, refused = spans(heads, tp, bs)
    assert refused == []
    span = bs * 6
    for rank, mapping in enumerate(mappings):
        held = oracle.parts_of(heads, tp, rank)
        assert mapping.certified and mapping.parallelism_agnostic
        assert mapping.canonical_page_size_bytes == heads * span
        expected = np.concatenate([np.arange(head * span, (head + 1) * span) for head in held])
        assert np.array_equal(byte_map(mapping), expected)
        assert mapping.num_writers == max(1, tp // heads)


@pytest.mark.parametrize(
    ("more", "rule"),
    [
        ({"family": "universal"}, "encoding"),
        ({"dcp": 2}, "encoding"),
        ({"dcp": 4}, "encoding"),
        ({"kernel_blocks": 2}, "kernel-blocks"),
    ],
)
def test_spans_are_not_cut_by_token_because_nobody_said_where_tokens_are(
    more: dict[str, object], rule: str
) -> None:
    mappings, refused = spans(1, 4, **more)  # type: ignore[arg-type]
    assert refused == [rule]
    assert not any(mapping.certified for mapping in mappings)


def test_one_context_shard_is_none() -> None:
    """A layer that keeps out of context parallelism has its spans whole."""
    spec = LayerSpec.attention("layer", num_kv_heads=1, head_size=3, elem=1, dcp_sharded=False)
    view = CacheView.of(np.zeros((3, 1, 4, 6), np.uint8), "head_spans", 4)
    group = derive_group(LayerTable([spec]), {"layer": view}, RankGrid(tp=4, dcp=4), strict=True)
    assert [m.by_layer["layer"].num_writers for m in group] == [4] * 4


def test_spans_need_heads() -> None:
    spec = LayerSpec.mla("layer", row_bytes=6)
    view = CacheView.of(np.zeros((3, 1, 4, 6), np.uint8), "head_spans", 4)
    mappings = derive_group(LayerTable([spec]), {"layer": view}, RankGrid())[0]
    assert "needs KV heads" in mappings.refusals[0].seen


def test_transposed_keys_are_read_by_their_description() -> None:
    """Head by head K as [head_size][token], then V as [token][head_size]; two tokens of three."""
    spec = LayerSpec.attention("layer", num_kv_heads=2, head_size=3, elem=1)
    view = CacheView.of(np.zeros((3, 1, 2, 6), np.uint8), "cpu_hnd", 2)
    table, caches, grid = LayerTable([spec]), {"layer": view}, RankGrid(tp=2)
    native = derive_group(table, caches, grid, strict=True)[1].by_layer["layer"]
    assert byte_map(native).tolist() == list(range(12, 24))
    universal = derive_group(table, caches, grid, family="universal", strict=True)[1]
    # Token t, head 1: K at 12*t + 6 + dim, V at 12*t + 9 + dim.
    keys = [6, 18, 7, 19, 8, 20]
    values = [9, 10, 11, 21, 22, 23]
    assert byte_map(universal.by_layer["layer"]).tolist() == keys + values
