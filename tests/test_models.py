"""Real models become the layers, groups and bytes that their configuration says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.published import MODELS
from vkvmap.models import FAMILIES, KV_DTYPES, PRESETS, ModelError, from_hf_config, load_model
from vkvmap.spec import DTYPE_BYTES

# Worked out by hand from the published numbers: (layers that cache per token, bytes per token,
# bytes of state per sequence).
PUBLISHED = {
    "llama-3-8b": (32, 32 * 2 * 8 * 128 * 2, 0),
    "llama-3-70b": (80, 80 * 2 * 8 * 128 * 2, 0),
    "llama-3.1-405b": (126, 126 * 2 * 8 * 128 * 2, 0),
    "qwen3-32b": (64, 64 * 2 * 8 * 128 * 2, 0),
    "qwen3-235b-a22b": (94, 94 * 2 * 4 * 128 * 2, 0),
    "deepseek-v3": (61, 61 * 576 * 2, 0),
    "deepseek-v3-fp8": (61, 61 * 656, 0),
    "deepseek-v3.2": (122, 61 * (656 + 132), 0),
    "glm-5.3": (99, 78 * 576 * 2 + 21 * 132, 0),
    "gpt-oss-120b": (36, 36 * 2 * 8 * 64 * 2, 0),
    "gemma-3-27b": (62, 62 * 2 * 16 * 128 * 2, 0),
    "llama-4-scout": (48, 48 * 2 * 8 * 128 * 2, 0),
    "mimo-v2-flash": (48, 9 * 4 * 320 * 2 + 39 * 8 * 320 * 2, 0),
    "minimax-text-01": (10, 10 * 2 * 8 * 128 * 2, 70 * 64 * 128 * 128 * 2),
    "jamba-v0.1": (4, 4 * 2 * 8 * 128 * 2, 28 * (8192 * 3 + 8192 * 16) * 2),
    "qwen3-next-80b-a3b": (
        12,
        12 * 2 * 2 * 256 * 2,
        36 * ((2 * 16 * 128 + 32 * 128) * 3 + 32 * 128 * 128) * 2,
    ),
    "nemotron-h-56b": (
        10,
        10 * 2 * 8 * 128 * 2,
        54 * ((256 * 64 + 2 * 8 * 256) * 3 * 2 + 256 * 64 * 256 * 4),
    ),
    "zamba2-7b": (
        13,
        13 * 2 * 32 * 224 * 2,
        81 * ((7168 + 2 * 2 * 64) * 3 + 7168 * 64) * 2,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_published_layers_and_bytes(name: str) -> None:
    table = load_model(name)
    paged = [layer for layer in table.values() if layer.has_tokens]
    state = [layer for layer in table.values() if not layer.has_tokens]
    seen = (
        len(paged),
        sum(layer.canonical_bytes(1) for layer in paged),
        sum(layer.canonical_bytes(0) for layer in state),
    )
    assert seen == PUBLISHED[name], name


def test_every_preset_loads_and_says_where_its_values_come_from() -> None:
    assert len(PRESETS) >= 20
    for name, preset in PRESETS.items():
        table = load_model(name)
        assert len(table) > 0 and name == name.lower()
        assert "/" in preset.checkpoint and preset.source in {"config", "defaults", "quoted"}
        json.dumps(preset.config)  # a preset is what a config.json could hold


def test_windows_are_groups_of_their_own_and_stay_whole_under_dcp() -> None:
    table = load_model("gemma-3-27b")
    assert table.groups == ("window-1024", "full")
    full = [int(layer.name.split(".")[2]) for layer in table.in_group("full")]
    assert full == list(range(5, 62, 6))
    assert all(layer.dcp_sharded for layer in table.in_group("full"))
    for layer in table.in_group("window-1024"):
        assert layer.window == 1024 and not layer.dcp_sharded


def test_llama_4_chunks_three_of_four_layers() -> None:
    table = load_model("llama-4-maverick")
    assert table.groups == ("chunk-8192", "full")
    assert [layer.name for layer in table.in_group("full")][:2] == [
        "model.layers.3.self_attn.attn",
        "model.layers.7.self_attn.attn",
    ]


def test_an_indexer_that_is_shared_keeps_no_page_of_its_own() -> None:
    names = [name for name in load_model("glm-5.3") if "indexer" in name]
    assert [int(name.split(".")[2]) for name in names][:5] == [0, 1, 2, 6, 10]
    assert len(names) == 21


def test_head_counts_and_sizes_may_differ_between_layers() -> None:
    table = load_model("mimo-v2-flash")
    full, windowed = table["model.layers.0.self_attn.attn"], table["model.layers.1.self_attn.attn"]
    assert (full.num_kv_heads, windowed.num_kv_heads) == (4, 8)
    assert [f.axis(f"{f.name}_dim").extent for f in full.fields] == [192, 128]


def test_gpt_oss_alternates_beginning_with_a_window() -> None:
    groups = [layer.group for layer in load_model("gpt-oss-20b").values()]
    assert groups == ["window-128", "full"] * 12


@pytest.mark.parametrize(
    ("kv_dtype", "per_head"),
    [("bf16", 512), ("fp32", 1024), ("fp8", 256), ("fp8_per_token_head", 264), ("int8", 256)],
)
def test_the_kv_dtype_decides_the_bytes_of_a_cell(kv_dtype: str, per_head: int) -> None:
    layer = next(iter(load_model("llama-3-8b", kv_dtype=kv_dtype).values()))
    assert layer.canonical_bytes(1) == 8 * per_head


def test_a_preset_named_for_a_dtype_yields_to_an_explicit_one() -> None:
    rows = [
        next(iter(load_model("deepseek-v3-fp8", kv_dtype=kv).values())).canonical_bytes(1)
        for kv in ("auto", "fp8", "bfloat16")
    ]
    assert rows == [656, 576, 1152]


def test_every_kv_dtype_has_a_size() -> None:
    for name, kv in KV_DTYPES.items():
        assert kv.name == name and kv.elem == DTYPE_BYTES[kv.dtype]


def test_a_file_a_folder_and_a_dict_say_the_same(tmp_path: Path) -> None:
    config = dict(PRESETS["qwen3-8b"].config)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    assert load_model(file) == load_model(tmp_path) == from_hf_config(config)
    assert load_model("Qwen3-8B") == from_hf_config(config)


def test_a_multimodal_configuration_is_read_by_its_language_model() -> None:
    text = dict(PRESETS["gemma-3-27b"].config)
    outer = {"model_type": "gemma3", "text_config": text, "vision_config": {"num_hidden_layers": 9}}
    assert from_hf_config(outer) == load_model("gemma-3-27b")
    outer["text_config"] = {**text, "model_type": "gemma3_new_text"}
    assert from_hf_config(outer) == load_model("gemma-3-27b")


def test_names_follow_the_prefix_of_the_engine() -> None:
    table = load_model("llama-3-8b", prefix="language_model.model.layers")
    assert next(iter(table)) == "language_model.model.layers.0.self_attn.attn"


@pytest.mark.parametrize("name", MODELS)
def test_a_published_configuration_caches_what_was_worked_out_by_hand(name: str) -> None:
    table = from_hf_config(MODELS[name].config)
    seen = {}
    for group in table.groups:
        layers = table.in_group(group)
        tokens = 1 if layers[0].has_tokens else 0
        seen[group] = (len(layers), sum(layer.canonical_bytes(tokens) for layer in layers))
    assert seen == MODELS[name].expected


def test_state_is_cut_by_the_heads_that_the_publisher_means() -> None:
    layer = from_hf_config(MODELS["Zamba2-7B"].config)["model.layers.0.mixer"]
    temporal = next(field for field in layer.fields if field.name == "temporal")
    assert [axis.extent for axis in temporal.axes] == [112, 64, 64]


def test_what_a_configuration_leaves_out_is_what_its_class_has() -> None:
    bare = {"model_type": "qwen3", "num_hidden_layers": 1, "hidden_size": 1024}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8}
    (layer,) = from_hf_config({**bare, **heads}).values()
    assert layer.canonical_bytes(1) == 2 * 8 * 128 * 2  # not hidden size over heads, 64
    (layer,) = from_hf_config({**bare, **heads, "head_dim": None}).values()
    assert layer.canonical_bytes(1) == 2 * 8 * 64 * 2  # a null is a value
    with pytest.raises(ModelError, match="num_hidden_layers"):
        from_hf_config({"model_type": "qwen3", **heads})  # the top level says its layers itself


def test_an_interleaving_may_be_spelled_out() -> None:
    spelled = small("exaone4", sliding_window=64, sliding_window_pattern="LG")
    groups = [layer.group for layer in from_hf_config(spelled).values()]
    assert groups == ["window-64", "full"] * 2


@pytest.mark.parametrize("pattern", [None, ["linear_attention", "moe", "full_attention", "mlp"]])
def test_both_spellings_of_a_nemotron_say_the_same(pattern: list[str] | None) -> None:
    given = {"layers_block_type": pattern, "hybrid_override_pattern": "ME*-"}
    groups = [layer.group for layer in from_hf_config(small("nemotron_h", **given)).values()]
    assert groups == ["state", "full"]


SMALL: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 64},
    "cohere2": {"sliding_window": 64},
    "qwen2": {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 3},
    "minimax": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "granitemoehybrid": {
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "mamba_n_heads": 8,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
    },
    "bamba": {
        "attn_layer_indices": [2],
        "mamba_n_heads": 8,
        "mamba_d_head": "auto",
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
    },
    "falcon_h1": {"mamba_n_heads": 4, "mamba_d_ssm": 64, "mamba_d_state": 16, "mamba_d_conv": 4},
    "kimi_linear": {
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 16,
        "linear_attn_config": {"kda_layers": [1, 2, 3], "num_heads": 4, "head_dim": 8},
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "moe", "attention", "mlp"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 16,
        "conv_kernel": 4,
    },
}
GROUPS = {
    "gemma2": ["window-64", "full"] * 2,
    "cohere2": ["window-64"] * 3 + ["full"],
    "qwen2": ["full"] * 3 + ["window-64"],
    "minimax": ["state", "full"] * 2,
    "granitemoehybrid": ["state", "state", "full", "state"],
    "bamba": ["state", "state", "full", "state"],
    "falcon_h1": ["full", "state"] * 4,
    "kimi_linear": ["state"] * 3 + ["full"],
    "nemotron_h": ["state", "full"],
}


def small(family: str, **more: Any) -> dict[str, Any]:
    """Four layers, hidden size 64, 8 query and 2 KV heads of 8."""
    return {
        "model_type": family,
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        **SMALL.get(family, {}),
        **more,
    }


@pytest.mark.parametrize("family", GROUPS)
def test_each_hybrid_family_puts_its_layers_where_the_architecture_has_them(family: str) -> None:
    assert [layer.group for layer in from_hf_config(small(family)).values()] == GROUPS[family]


def test_every_named_family_is_read() -> None:
    named = """llama mistral mixtral qwen2 qwen3 qwen3_moe qwen3_next gemma2 gemma3 phi3 gpt_oss
    deepseek_v2 deepseek_v3 deepseek_v32 kimi_k2 glm4_moe minimax minimax_m2 jamba nemotron_h
    falcon_h1 zamba2 granitemoehybrid llama4 cohere cohere2""".split()
    assert set(named) <= set(FAMILIES)


def test_a_window_that_is_switched_off_is_no_window() -> None:
    table = from_hf_config(small("qwen2", use_sliding_window=False))
    assert table.groups == ("full",)


def test_state_is_kept_in_its_own_dtype() -> None:
    half = from_hf_config(small("falcon_h1", dtype="float16"))["model.4.mixer"]
    full = from_hf_config(small("falcon_h1", dtype="float16", mamba_ssm_cache_dtype="float32"))
    assert half.dtype == "float16/float16" and full["model.4.mixer"].dtype == "float16/float32"
    grown = full["model.4.mixer"].canonical_bytes(0) - half.canonical_bytes(0)
    assert grown == 64 * 16 * 2


BAD = [
    ({"model_type": "llama"}, {}, "num_hidden_layers"),
    (small("llama", num_key_value_heads=0), {}, "positive integer"),
    (small("llama", hidden_size=65, head_dim=None), {}, "head_dim"),
    (small("lama"), {}, "nearest: 'llama'"),
    (small("gemma2", layer_types=["sliding_atention"] * 4), {}, "did you mean 'sliding_attention'"),
    (small("gemma2", layer_types=["full_attention"]), {}, "one per layer"),
    (small("gpt_oss", layer_types=["sliding_attention"] * 4), {}, "'sliding_window'"),
    (small("llama4"), {}, "attention_chunk_size"),
    (small("bamba", mamba_n_groups=1.5), {}, "'mamba_n_groups' is 1.5; a positive integer"),
    (small("falcon_h1", mamba_d_ssm=0), {}, "'mamba_d_ssm' is 0; a positive integer"),
    (small("qwen3_next", full_attention_interval=0), {}, "'full_attention_interval' is 0"),
    ({"model_type": "llava", "text_config": {"model_type": ["x"]}}, {}, "is not known"),
    (small("deepseek_v3"), {}, "kv_lora_rank"),
    (small("jamba"), {}, "attn_layer_period"),
    (small("zamba2"), {}, "layers_block_type"),
    (small("mimo_v2_flash"), {}, "hybrid_layer_pattern"),
    (small("minimax", layer_types=None), {}, "attn_type_list"),
    (small("bamba", attn_layer_indices=None), {}, "attn_layer_indices"),
    (small("kimi_linear", linear_attn_config={"kda_layers": [1]}), {}, "num_heads"),
    (small("nemotron_h", layers_block_type=None), {}, "hybrid_override_pattern"),
    (small("nemotron_h", layers_block_type=["moe"] * 4), {}, "no layer"),
    (small("nemotron_h", layers_block_type=["mamab"] * 4), {}, "did you mean 'mamba'"),
    (small("zamba2", layers_block_type=["hybird"] * 4), {}, "hybird"),
    (small("bamba", mamba_n_heads=7), {}, "mamba_d_head"),
    (small("falcon_h1", mamba_ssm_cache_dtype="float12"), {}, "float12"),
    (small("llama"), {"kv_dtype": "bfloat61"}, "did you mean 'bfloat16'"),
    (small("llama"), {"kv_dtype": "fp8_ds_mla"}, "not MLA"),
    (
        small("deepseek_v3", kv_lora_rank=64, qk_rope_head_dim=16),
        {"kv_dtype": "int8_per_token_head"},
        "no heads",
    ),
]


@pytest.mark.parametrize(("config", "options", "says"), BAD)
def test_a_configuration_that_cannot_be_read_says_what_it_needs(
    config: dict[str, Any], options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ModelError) as caught:
        from_hf_config(config, **options)
    assert says in str(caught.value)


def test_an_unknown_architecture_names_its_fields_and_takes_them_as_overrides() -> None:
    strange = {"model_type": "strange_net", "depth": 3}
    with pytest.raises(ModelError) as caught:
        from_hf_config(strange)
    assert "num_key_value_heads" in caught.value.fields
    given = {"model_type": "llama", "num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 8}
    assert len(from_hf_config(strange, overrides=given)) == 3


def test_a_name_that_is_nothing_names_the_nearest_presets() -> None:
    with pytest.raises(ModelError, match="llama-3-8b"):
        load_model("lama-3-8b")


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{nonsense")
    with pytest.raises(ModelError, match="is not JSON"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="holds a list"):
        load_model(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelError, match="cannot read"):
        load_model(tmp_path)
