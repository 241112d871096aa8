"""Recurrent state is re-sharded across tp by segments and heads, in either axis order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests import oracle
from vkvmap import CacheView, LayerSpec, LayerTable, RankGrid, derive_group
from vkvmap.conformance import byte_map
from vkvmap.layout import state_layout
from vkvmap.mapping import Mappings

TPS = (1, 2, 4, 8)


@st.composite
def states(draw: st.DrawFn) -> LayerSpec:
    kind = draw(st.sampled_from(["mamba1", "mamba2", "gated_delta", "kimi", "conv_only"]))
    heads = draw(st.sampled_from([8, 16]))
    kernel = draw(st.sampled_from([2, 4]))
    elems = {
        "conv_elem": draw(st.sampled_from([1, 2])),
        "temporal_elem": draw(st.sampled_from([2, 4])),
    }
    if kind == "mamba1":
        return LayerSpec.mamba1(
            "s", intermediate_size=2 * heads, state_size=3, conv_kernel=kernel, **elems
        )
    if kind == "mamba2":
        groups = draw(st.sampled_from([1, 2, 8]))
        return LayerSpec.mamba2(
            "s", num_heads=heads, head_dim=2, state_size=3, n_groups=groups, conv_kernel=kernel,
            **elems,
        )  # fmt: skip
    if kind == "gated_delta":
        keys = draw(st.sampled_from([4, 8]))
        return LayerSpec.gated_delta_net(
            "s", num_k_heads=keys, num_v_heads=heads, head_k_dim=3, head_v_dim=2,
            conv_kernel=kernel, **elems,
        )  # fmt: skip
    if kind == "kimi":
        return LayerSpec.kimi_delta_attention(
            "s", num_heads=heads, head_dim=3, conv_kernel=kernel, **elems
        )
    return LayerSpec.recurrent(
        "s", segments=[("x", heads, heads), ("gate", 3, 0)], conv_positions=kernel, temporal=[]
    )


def rank_state(
    spec: LayerSpec, truth: dict[str, np.ndarray], tp: int, rank: int
) -> dict[str, np.ndarray]:
    """What a rank holds: of every field, the channels or heads of its parts of the first axis."""
    held = {}
    for this in spec.fields:
        axis = this.axes[0]
        array = truth[this.name]
        if axis.units:
            parts = np.split(array, axis.units)
            array = np.concatenate([parts[u] for u in oracle.parts_of(axis.units, tp, rank)])
        held[this.name] = array
    return held


def tensors(spec: LayerSpec, held: dict[str, np.ndarray], channels_first: bool) -> list[np.ndarray]:
    """Convolution and temporal state as an engine keeps them, one row of bytes each."""
    convs = [a for name, a in held.items() if name.startswith("conv_")]
    joined = np.concatenate(convs)  # (channel, position, element byte)
    if not channels_first:
        joined = np.swapaxes(joined, 0, 1)
    rest = [a for name, a in held.items() if not name.startswith("conv_")]
    return [part.reshape(-1) for part in (joined, *rest)]


def group_of(spec: LayerSpec, tp: int, channels_first: bool) -> tuple[Mappings, ...]:
    truth = oracle.truth_of(spec, 0, oracle.counted()).fields
    rows = tensors(spec, rank_state(spec, truth, tp, 0), channels_first)
    # Rows of both states share one padded page per block, as engines lay them out.
    page = sum(row.size for row in rows) + 5
    storage = np.zeros((3, page), dtype=np.uint8)
    cut = rows[0].size
    views = (
        [storage[:, :cut], storage[:, cut : cut + rows[1].size]][: len(rows)]
        if len(rows) > 1
        else [storage[:, :cut]]
    )
    layout = state_layout(spec, channels_first=channels_first)
    return derive_group(
        LayerTable([spec]), {"s": CacheView.of(views, layout)}, RankGrid(tp=tp), strict=True
    )


@given(states(), st.sampled_from(TPS), st.sampled_from(TPS), st.booleans(), st.booleans())
def test_state_stored_under_one_tp_is_loaded_under_another(
    spec: LayerSpec, store_tp: int, load_tp: int, store_first: bool, load_first: bool
) -> None:
    for this in spec.fields:
        units = this.axes[0].units
        for tp in (store_tp, load_tp):
            assume(not units or units % tp == 0 or tp % units == 0)
    truth = oracle.truth_of(spec, 0, oracle.drawn(store_tp)).fields
    wanted = np.concatenate([truth[this.name].reshape(-1) for this in spec.fields])
    stored = np.zeros(wanted.size, dtype=np.uint8)
    times = np.zeros(wanted.size, dtype=np.int64)
    for rank, mappings in enumerate(group_of(spec, store_tp, store_first)):
        mapping = mappings.by_layer["s"]
        assert mapping.canonical_page_size_bytes == wanted.size
        local = np.concatenate(tensors(spec, rank_state(spec, truth, store_tp, rank), store_first))
        if mapping.is_writer(0):
            for run in mapping.effective_store_runs:
                for i in range(run.num_fragments):
                    a = run.local_offset + i * run.local_stride
                    b = run.canonical_offset + i * run.canonical_stride
                    stored[b : b + run.fragment_size] = local[a : a + run.fragment_size]
                    times[b : b + run.fragment_size] += 1
    assert np.all(times == 1)
    assert np.array_equal(stored, wanted)
    for rank, mappings in enumerate(group_of(spec, load_tp, load_first)):
        loaded = stored[byte_map(mappings.by_layer["s"])]
        held = rank_state(spec, truth, load_tp, rank)
        assert np.array_equal(loaded, np.concatenate(tensors(spec, held, load_first)))


def test_convolution_state_is_sharded_per_segment() -> None:
    """Fault 44: rows x=8 | B=4 | C=4 at tp=2; rank 0 holds 0-3, 8-9, 12-13, not a flat half."""
    spec = LayerSpec.recurrent(
        "s",
        segments=[("x", 8, 8), ("b", 4, 4), ("c", 4, 4)],
        conv_positions=1,
        temporal=[],
        conv_elem=1,
    )
    group = group_of(spec, 2, True)
    assert byte_map(group[0].by_layer["s"]).tolist() == [0, 1, 2, 3, 8, 9, 12, 13]


def test_groups_fewer_than_ranks_are_replicated_and_written_once() -> None:
    spec = LayerSpec.mamba2("s", num_heads=8, head_dim=2, state_size=3, n_groups=2, conv_kernel=4)
    group = group_of(spec, 4, True)
    stored = [
        sum(r.fragment_size * r.num_fragments for r in m.by_layer["s"].effective_store_runs)
        for m in group
    ]
    assert sum(stored) == group[0].by_layer["s"].canonical_page_size_bytes
    assert stored[0] == stored[2] > stored[1] == stored[3]


def test_undescribed_state_is_opaque_with_one_writer_per_rank() -> None:
    """Fault 6: a 4,096-byte state page at tp=8 is not subject to KV-head replication."""
    table = LayerTable([LayerSpec.opaque("s", page_bytes=4096)])
    caches = {"s": CacheView.of(np.zeros((2, 4096), dtype=np.uint8), "pages")}
    group = derive_group(table, caches, RankGrid(tp=8))
    for rank, mappings in enumerate(group):
        mapping = mappings.by_layer["s"]
        assert (mapping.canonical_page_size_bytes, mapping.num_writers) == (32768, 1)
        assert mapping.runs[0].canonical_offset == rank * 4096
        assert mappings.refusals[0].rule == "undescribed"


@pytest.mark.parametrize("tp", [3, 5])
def test_segments_that_do_not_deal_out_are_refused_with_their_name(tp: int) -> None:
    spec = LayerSpec.mamba2("s", num_heads=8, head_dim=2, state_size=3, n_groups=8, conv_kernel=4)
    caches = {
        "s": CacheView.of(
            [np.zeros((2, 9)), np.zeros((2, 9))], state_layout(spec, channels_first=True)
        )
    }
    mappings = derive_group(LayerTable([spec]), caches, RankGrid(tp=tp))[0]
    assert mappings.refusals[0].rule == "heads-divide"
    assert "conv_x" in mappings.refusals[0].seen
