"""Engine specs and tensors in our words, without the engine: stand-ins for its classes suffice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from vkvmap import RankGrid, derive_canonical_mappings
from vkvmap.integrations.vllm.layers import (
    GroupFacts,
    LayerFacts,
    ModelFacts,
    describe,
    published_table,
    whole_table,
)
from vkvmap.integrations.vllm.naming import identity
from vkvmap.integrations.vllm.options import EngineError, Options
from vkvmap.integrations.vllm.rows import RowLayout
from vkvmap.spec import LayerSpec

BLOCKS = 6


@dataclass
class AttentionSpec:
    """As much of the engine's class of this name as is read."""

    num_kv_heads: int = 2
    head_size: int = 8
    head_size_v: int = 8
    block_size: int = 4


class SlidingWindowSpec(AttentionSpec):
    sliding_window = 96


class MLAAttentionSpec(AttentionSpec):
    pass


class MambaSpec:
    pass


class Quantised(AttentionSpec):
    class kv_quant_mode:  # an enumeration member in the engine
        name = "INT8_PER_TOKEN_HEAD"


def described(
    spec: Any,
    tensors: Any,
    *,
    tp: int = 1,
    dcp: int = 1,
    total: int = 2,
    platform: str = "cuda",
    axes: str = "LBHNC",
    isa: str | None = None,
    config: dict[str, Any] | None = None,
    name: str = "model.layers.0.self_attn.attn",
    kind: str = "Attention",
    blocks: int = BLOCKS,
    span: int = 4,
):
    held = tensors if isinstance(tensors, tuple) else (tensors,)
    page = sum(t[0].nbytes for t in held) * (held[0].shape[0] // blocks)
    facts = LayerFacts(name, spec, held, np.zeros((blocks, page), np.uint8), kind, isa)
    model = ModelFacts(config or {}, total, "bfloat16", platform, axes, tp, dcp)
    found = describe(model, [GroupFacts("0", (name,), span * dcp)], {name: facts})
    return found.table[name], found.caches[name], found.reasons.get(name)


def certified(spec: LayerSpec, view: Any, grid: RankGrid) -> bool:
    mappings = derive_canonical_mappings(
        described_table(spec), {spec.name: view}, grid, grid.size - 1
    )
    return not mappings.refusals


def described_table(spec: LayerSpec):
    from vkvmap import LayerTable

    return LayerTable([spec])


HND = (BLOCKS, 2, 4, 16)


@pytest.mark.parametrize(
    ("tensor", "axes", "layout"),
    [
        (np.zeros(HND, np.uint16), "LBHNC", "packed_hnd"),
        (np.zeros((BLOCKS, 4, 2, 16), np.uint16).transpose(0, 2, 1, 3), "LBNHC", "packed_nhd"),
        (np.zeros((BLOCKS, 2, 4, 2, 8), np.uint16), "", "split_nhd"),
        (np.zeros((2, BLOCKS, 4, 2, 8), np.uint16), "", "split_nhd"),
        (np.zeros((BLOCKS, 2, 2, 4, 8), np.uint16).transpose(0, 1, 3, 2, 4), "", "split_hnd"),
        # Two layers interleaved within blocks: this one's pages lie 2 * 256 bytes apart.
        (np.zeros((BLOCKS, 2, 2, 4, 16), np.uint16)[:, 1], "BLHNC", "packed_hnd"),
    ],
    ids=["hnd", "nhd", "split", "halves-first", "split-hnd", "interleaved"],
)
def test_attention_layouts_are_told_by_strides(tensor: Any, axes: str, layout: str) -> None:
    spec, view, reason = described(AttentionSpec(), tensor, tp=2, total=4, axes=axes)
    assert reason is None and view.layout.name == layout
    assert spec.num_kv_heads == 4 and spec.canonical_bytes(1) == 4 * 16 * 2
    assert certified(spec, view, RankGrid(tp=2))


@pytest.mark.parametrize(("axes", "layout"), [("LBNHC", "packed_nhd"), ("LBHNC", "packed_hnd")])
def test_where_strides_say_nothing_the_engines_name_of_the_order_decides(
    axes: str, layout: str
) -> None:
    one_head = np.zeros((BLOCKS, 1, 4, 16), np.uint16)
    spec, view, _ = described(AttentionSpec(1), one_head, tp=4, total=2, axes=axes)
    assert view.layout.name == layout and spec.num_kv_heads == 2


@pytest.mark.parametrize(
    ("local", "tp", "total", "heads"),
    [(2, 1, 8, 2), (2, 4, 8, 8), (1, 8, 8, 8), (1, 8, 2, 2), (1, 4, 1, 1)],
)
def test_head_counts_of_the_model(local: int, tp: int, total: int, heads: int) -> None:
    tensor = np.zeros((BLOCKS, local, 4, 16), np.uint16)
    spec, _, reason = described(AttentionSpec(local), tensor, tp=tp, total=total)
    assert reason is None and spec.num_kv_heads == heads


def test_a_head_count_that_nobody_states_makes_the_layer_opaque() -> None:
    tensor = np.zeros((BLOCKS, 2, 4, 16), np.uint16)
    spec, _, reason = described(AttentionSpec(2), tensor, tp=2, total=16)
    assert spec.kind == "opaque" and reason is not None and reason.rule == "heads"
    config = {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "hidden_size": 64,
        "torch_dtype": "bfloat16",
    }
    spec, _, reason = described(AttentionSpec(2), tensor, tp=2, total=16, config=config)
    assert reason is None and spec.num_kv_heads == 4


def test_cpu_pages_are_described_by_their_instruction_set() -> None:
    tensor = np.zeros(HND, np.uint16)
    _, view, _ = described(AttentionSpec(), tensor, platform="cpu", isa="vec")
    assert view.layout.name == "cpu_hnd" and view.layout.encoding == "k_transposed"
    spec, tiles, _ = described(AttentionSpec(), tensor, platform="cpu", isa="amx")
    assert tiles.layout.per_head and tiles.layout.encoding == "cpu_amx"
    assert certified(spec, tiles, RankGrid())
    _, _, reason = described(AttentionSpec(), tensor, platform="cpu")
    assert reason is not None and reason.rule == "encoding"


def test_manager_blocks_of_several_kernel_blocks() -> None:
    tensor = np.zeros((BLOCKS * 3, 2, 4, 16), np.uint16)
    spec, view, reason = described(AttentionSpec(block_size=12), tensor, span=12)
    assert reason is None and view.kernel_blocks == 3 and view.block_size == 12
    assert certified(spec, view, RankGrid())


def test_quantised_cells_move_as_they_are_and_are_not_split() -> None:
    with_scales = np.zeros((BLOCKS, 2, 4, 16 + 8), np.uint8)
    spec, view, reason = described(Quantised(), with_scales)
    assert reason is None and spec.kind == "cells" and certified(spec, view, RankGrid())
    _, _, reason = described(Quantised(), np.zeros((BLOCKS, 2, 4, 2, 8), np.uint8))
    assert reason is not None  # scales elsewhere


def test_layers_of_one_group_may_have_pages_of_different_sizes() -> None:
    """The engine's groups of one type: same tokens, each layer its own head size."""
    sizes = {"model.layers.0.self_attn.attn": 8, "model.layers.1.self_attn.attn": 24}
    for tp in (1, 2):
        facts = {
            name: LayerFacts(
                name,
                AttentionSpec(2 // tp, size, size),
                (np.zeros((BLOCKS, 2 // tp, 4, 2 * size), np.uint16),),
                np.zeros((BLOCKS, 2 // tp * 4 * 2 * size * 2), np.uint8),
                "Attention",
            )
            for name, size in sizes.items()
        }
        model = ModelFacts({}, 2, "bfloat16", "cuda", "LBHNC", tp, 1)
        found = describe(model, [GroupFacts("0", tuple(sizes), 4)], facts)
        mappings = derive_canonical_mappings(
            found.table, found.caches, RankGrid(tp=tp), tp - 1, strict=True
        )
        rows = RowLayout.of(mappings, {"0": 4}, verify=False)
        assert rows.payload == {"0": 4 * 2 * 2 * 2 * (8 + 24)}


@pytest.mark.parametrize("shape", [(BLOCKS, 4, 576), (BLOCKS, 1, 4, 576)])
def test_latent_rows(shape: tuple[int, ...]) -> None:
    spec, view, reason = described(MLAAttentionSpec(), np.zeros(shape, np.uint16), tp=8)
    assert reason is None and spec.kind == "mla" and spec.canonical_bytes(1) == 1152
    assert certified(spec, view, RankGrid(tp=8))


def test_index_keys_are_planar() -> None:
    rows = np.zeros((BLOCKS, 4, 132), np.uint8)
    spec, view, reason = described(MLAAttentionSpec(), rows, kind="DeepseekV32IndexerCache")
    assert reason is None and spec.kind == "indexer" and view.layout.name == "planar"
    assert [field.axes[-1].extent for field in spec.fields] == [128, 4]
    assert certified(spec, view, RankGrid())


def test_windows_stay_whole_under_context_parallelism() -> None:
    spec, view, reason = described(
        SlidingWindowSpec(1), np.zeros((BLOCKS, 1, 4, 16), np.uint16), tp=2, total=1
    )
    assert reason is None and spec.window == 96 and not spec.dcp_sharded
    assert certified(spec, view, RankGrid(tp=2, dcp=2))


GRANITE = {
    "model_type": "granitemoehybrid",
    "num_hidden_layers": 2,
    "layer_types": ["mamba", "attention"],
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_size": 256,
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "mamba_n_groups": 2,
    "mamba_d_state": 64,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize("channels_first", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
def test_recurrent_state_is_described_by_the_published_configuration(
    tp: int, channels_first: bool
) -> None:
    channels = (8 * 64 + 2 * 2 * 64) // tp
    conv_bytes, state_bytes = channels * 3 * 2, 8 // tp * 64 * 64 * 4
    page = np.zeros((BLOCKS, conv_bytes + state_bytes + 96), np.uint8)  # padded
    shape = (BLOCKS, channels, 3) if channels_first else (BLOCKS, 3, channels)
    conv = np.lib.stride_tricks.as_strided(
        page.view(np.uint16), shape, (page.strides[0], shape[2] * 2, 2)
    )
    state = np.lib.stride_tricks.as_strided(
        page[:, conv_bytes:].view(np.float32),
        (BLOCKS, 8 // tp, 64, 64),
        (page.strides[0], 64 * 64 * 4, 64 * 4, 4),
    )
    spec, view, reason = described(
        MambaSpec(),
        (conv, state),
        tp=tp,
        config=GRANITE,
        name="model.layers.0.mixer",
        kind="MambaMixer2",
    )
    assert spec.kind == "recurrent", reason
    assert certified(spec, view, RankGrid(tp=tp))


def test_state_that_nobody_describes_is_opaque() -> None:
    state = np.zeros((BLOCKS, 8, 4), np.float32)
    spec, _, reason = described(MambaSpec(), (state,), kind="Novel")
    assert spec.kind == "opaque" and reason is not None and "Novel" in str(reason)


# ---- rows and names ------------------------------------------------------------------------------


def setting(tp: int, *, isa: str = "vec", options: Options | None = None, block: int = 4):
    """Rows and name of a one-layer model under tp, on the CPU."""
    heads = 2
    local = max(1, heads // tp)
    tensor = np.zeros((BLOCKS, local, block, 16), np.uint16)
    spec, view, _ = described(
        AttentionSpec(local, block_size=block),
        tensor,
        tp=tp,
        total=heads,
        platform="cpu",
        isa=isa,
        span=block,
    )
    chosen = options or Options()
    mappings = derive_canonical_mappings(
        described_table(spec), {spec.name: view}, RankGrid(tp=tp), 0, family=chosen.family
    )
    rows = RowLayout.of(mappings, {"0": 8}, verify=chosen.verify)
    named = identity(
        mappings,
        {spec.name: view},
        chosen,
        model="m",
        revision=chosen.revision or "r",
        quantisation="none",
        tokens={"0": 8},
        placement={"tp": tp},
    )
    return rows, named


def test_rows_and_names_do_not_depend_on_tensor_parallelism() -> None:
    rows, named = setting(1)
    for tp in (2, 4, 8):
        other_rows, other = setting(tp)
        assert other_rows == rows and other.name == named.name


def test_a_name_says_what_the_bytes_mean() -> None:
    names = {
        setting(1)[1].name,
        setting(1, isa="amx")[1].name,
        setting(1, block=8)[1].name,
        setting(1, options=Options(salt="tenant"))[1].name,
        setting(1, options=Options(revision="other"))[1].name,
        setting(1, options=Options(verify=True))[1].name,
        setting(1, options=Options(family="universal"))[1].name,
    }
    assert len(names) == 7


def test_universal_names_do_not_depend_on_the_block_size() -> None:
    options = Options(family="universal")
    assert setting(1, options=options)[1].name == setting(2, options=options, block=8)[1].name


def test_opaque_layers_tie_the_name_to_the_configuration() -> None:
    tensor = np.zeros((BLOCKS, 2, 4, 16), np.uint16)
    names = set()
    for tp in (1, 2):
        spec, view, _ = described(AttentionSpec(), tensor, tp=tp, total=2 * tp, platform="cpu")
        assert spec.kind == "opaque"
        mappings = derive_canonical_mappings(
            described_table(spec), {spec.name: view}, RankGrid(tp=tp), 0
        )
        names.add(
            identity(
                mappings,
                {spec.name: view},
                Options(),
                model="m",
                revision="r",
                quantisation="",
                tokens={"0": 0},
                placement={"tp": tp},
            ).name
        )
    assert len(names) == 2


def test_a_budget_below_one_row_is_refused() -> None:
    rows, _ = setting(1)
    assert rows.num_rows(10 * rows.row_bytes) == 10
    with pytest.raises(EngineError, match="less than one chunk"):
        rows.num_rows(rows.row_bytes - 1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"familly": "native"}, "did you mean 'family'"),
        ({"family": "nativ"}, "'native', 'universal'"),
        ({"strict": "yes"}, "True, False"),
        ({"strict": 1}, "True, False"),
        ({"retries": -1}, "count"),
        ({"salt": None}, "string"),
        ("on", "must be an object"),
    ],
)
def test_options_are_refused_by_name(given: Any, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        Options.read({"vkvmap": given})


# ---- pipeline stages -----------------------------------------------------------------------------


def stage(first: int, stop: int, stages: int):
    """Rows of the model's first layer group, as the stage with layers [first, stop) sees them."""
    config = {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_size": 64,
        "torch_dtype": "float16",
    }
    names = [f"model.layers.{i}.self_attn.attn" for i in range(first, stop)]
    tensors = {name: np.zeros((BLOCKS, 2, 4, 16), np.uint16) for name in names}
    facts = {
        name: LayerFacts(name, AttentionSpec(), (t,), np.zeros((BLOCKS, 1), np.uint8), "Attention")
        for name, t in tensors.items()
    }
    model = ModelFacts(config, 2, "bfloat16", "cuda", "LBHNC", 1, 1)
    found = describe(model, [GroupFacts("0", tuple(names), 4)], facts)
    table = whole_table(found.table, published_table(model, facts), stages)
    mappings = derive_canonical_mappings(table, found.caches, RankGrid(), 0)
    rows = RowLayout.of(mappings, {"0": 8}, verify=False)
    named = identity(
        mappings, found.caches, Options(), model="m", revision="r", quantisation="",
        tokens={"0": 8}, placement={},
    )  # fmt: skip
    return rows, named.name, list(mappings.by_layer)


def test_a_pipeline_stage_sees_the_rows_of_the_whole_model() -> None:
    rows, name, _ = stage(0, 4, 1)
    for first, stop in ((0, 2), (2, 4)):
        other_rows, other_name, held = stage(first, stop, 2)
        assert other_rows == rows and other_name == name and len(held) == 2


def test_stages_of_a_model_that_nobody_can_read_are_refused() -> None:
    spec, _, _ = described(AttentionSpec(), np.zeros(HND, np.uint16))
    with pytest.raises(EngineError, match="2 pipeline stages"):
        whole_table(described_table(spec), None, 2)
