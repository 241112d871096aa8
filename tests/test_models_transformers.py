"""Configurations are read as transformers' own classes read them. The package never needs these."""

from __future__ import annotations

import json
from typing import Any

import pytest
import transformers
from transformers import CONFIG_MAPPING

from tests.published import MODELS
from vkvmap.models import FAMILIES, PRESETS, from_hf_config, load_model
from vkvmap.models.defaults import DEFAULTS
from vkvmap.spec import LayerTable

# What transformers has no class for; their publishers ship one.
OWN_CLASS = {"kimi_k2", "minimax_text_01"}
# transformers' class for it does not read the fields of the published file.
OWN_FIELDS = {"Zamba2-7B"}


def saved(config: Any) -> dict[str, Any]:
    """What transformers would write into a config.json, every default spelled out."""
    content: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
    return content


@pytest.mark.parametrize("family", DEFAULTS)
def test_defaults_are_those_of_the_class(family: str) -> None:
    fields = CONFIG_MAPPING[family].__dataclass_fields__
    names = {
        "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads",
        "head_dim", "sliding_window", "use_sliding_window", "attention_chunk_size",
        "kv_lora_rank", "qk_rope_head_dim", "linear_num_key_heads", "linear_num_value_heads",
        "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim",
    }  # fmt: skip
    found = {name: fields[name].default for name in names & set(fields)}
    kept = {name: value for name, value in found.items() if value is not None}
    assert dict(DEFAULTS[family]) == kept


def _has_class(name: str) -> bool:
    return name not in OWN_FIELDS and MODELS[name].config["model_type"] not in OWN_CLASS


@pytest.mark.parametrize("name", [n for n in MODELS if _has_class(n)])
def test_a_published_file_reads_alike_before_and_after_its_class(name: str) -> None:
    config = MODELS[name].config
    kind = config["model_type"]
    given = {key: value for key, value in config.items() if key != "model_type"}
    assert _shapes(from_hf_config(saved(CONFIG_MAPPING[kind](**given)))) == _shapes(
        from_hf_config(config)
    )


def _shapes(table: LayerTable) -> list[Any]:
    return [(layer.name, layer.group, layer.fields, layer.window) for layer in table.values()]


# Their layer lists are of other words; the published files above hold these families.
OTHER_WORDS = set(
    "bamba jamba mimo_v2_flash zamba2 granitemoehybrid deepseek_v32 glm_moe_dsa "
    "nemotron_h falcon_h1".split()
)
LISTED = [
    family
    for family in FAMILIES
    if family in CONFIG_MAPPING and family not in OTHER_WORDS
    if getattr(CONFIG_MAPPING[family](), "layer_types", None) is not None
]


def test_most_families_list_their_layers() -> None:
    assert len(LISTED) >= 15


@pytest.mark.parametrize("family", LISTED)
def test_layers_are_of_the_kinds_that_the_class_lists(family: str) -> None:
    config = CONFIG_MAPPING[family]()
    types = config.layer_types
    table = from_hf_config(saved(config))
    decoders = [int(name.split(".")[2]) for name in table if "indexer" not in name]
    assert decoders == list(range(len(types)))
    for kind, layer in zip(types, table.values(), strict=True):
        assert layer.has_tokens == (kind != "linear_attention"), layer.name
        assert (layer.window is not None) == (kind in ("sliding_attention", "chunked_attention"))


def test_presets_taken_from_defaults_are_the_defaults() -> None:
    classes = {
        "mistral-7b": "MistralConfig",
        "command-r": "CohereConfig",
        "qwen3-next-80b-a3b": "Qwen3NextConfig",
        "jamba-v0.1": "JambaConfig",
    }
    assert set(classes) == {n for n, preset in PRESETS.items() if preset.source == "defaults"}
    for preset, name in classes.items():
        published = saved(getattr(transformers, name)())
        overrides = {"dtype": "bfloat16", "torch_dtype": None}
        if preset == "qwen3-next-80b-a3b":
            overrides["mamba_ssm_dtype"] = None
        assert from_hf_config(published, overrides=overrides) == load_model(preset), preset
