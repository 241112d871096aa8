"""Published shapes of real models, as the fields of their `config.json` that decide a cache.

Every entry names the checkpoint that its values were published with, and where they were compared:

* ``config``: field by field with the checkpoint's `config.json`;
* ``defaults``: with the default values of transformers' configuration class for that checkpoint;
* ``quoted``: with the values that several public sources quote from its `config.json`.

Fields that do not touch the cache are left out. Values that could not be compared are not here:
read the model's own `config.json` instead, which is always the better source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_LETTERS = {"f": "full_attention", "s": "sliding_attention", "l": "linear_attention"}


@dataclass(frozen=True)
class Preset:
    """A model's cache-deciding `config` fields; `checkpoint` and `source` say whose they are."""

    checkpoint: str
    source: str
    config: Mapping[str, Any]
    kv_dtype: str = "auto"


def _dense(
    model_type: str, layers: int, query: int, kv: int, head_dim: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "num_attention_heads": query,
        "num_key_value_heads": kv,
        "head_dim": head_dim,
        "dtype": "bfloat16",
        **more,
    }


def _types(letters: str) -> list[str]:
    return [_LETTERS[letter] for letter in letters]


def _latent(model_type: str, layers: int, query: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "num_attention_heads": query,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "dtype": "bfloat16",
        **more,
    }


def _qwen_linear(model_type: str, layers: int, query: int, kv: int, values: int) -> dict[str, Any]:
    return _dense(
        model_type,
        layers,
        query,
        kv,
        256,
        full_attention_interval=4,
        linear_num_key_heads=16,
        linear_num_value_heads=values,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
    )


def _nemotron(
    pattern: str, query: int, kv: int, heads: int, state: int, **more: Any
) -> dict[str, Any]:
    return _dense(
        "nemotron_h",
        len(pattern),
        query,
        kv,
        128,
        hybrid_override_pattern=pattern,
        mamba_num_heads=heads,
        mamba_head_dim=64,
        n_groups=8,
        ssm_state_size=state,
        conv_kernel=4,
        **more,
    )


_SCOUT = _dense("llama4", 48, 40, 8, 128, attention_chunk_size=8192)
_NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
_SUPER = "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
_ZAMBA_HYBRID = (6, 11, *range(17, 78, 6))
_H56 = "M-M-M-M*-" + "M-M-M-M-M*-" * 9 + "M-M-M-M-M-"
_MIMO = [0, 1, 1, 1, 1] + [0, 1, 1, 1, 1, 1] * 7 + [0]
_GLM53_INDEXERS = ["full"] * 3 + ["shared", "shared", "shared", "full"] * 18 + ["shared"] * 3

PRESETS: Mapping[str, Preset] = {
    "llama-3-8b": Preset("meta-llama/Meta-Llama-3-8B", "quoted", _dense("llama", 32, 32, 8, 128)),
    "llama-3-70b": Preset("meta-llama/Meta-Llama-3-70B", "quoted", _dense("llama", 80, 64, 8, 128)),
    "llama-3.1-8b": Preset("meta-llama/Llama-3.1-8B", "config", _dense("llama", 32, 32, 8, 128)),
    "llama-3.1-70b": Preset("meta-llama/Llama-3.1-70B", "config", _dense("llama", 80, 64, 8, 128)),
    "llama-3.1-405b": Preset(
        "meta-llama/Llama-3.1-405B", "config", _dense("llama", 126, 128, 8, 128)
    ),
    "llama-4-scout": Preset("meta-llama/Llama-4-Scout-17B-16E-Instruct", "config", _SCOUT),
    "llama-4-maverick": Preset("meta-llama/Llama-4-Maverick-17B-128E-Instruct", "config", _SCOUT),
    "mistral-7b": Preset(
        "mistralai/Mistral-7B-v0.1",
        "defaults",
        _dense("mistral", 32, 32, 8, 128, sliding_window=4096),
    ),
    "mixtral-8x7b": Preset(
        "mistralai/Mixtral-8x7B-v0.1", "config", _dense("mixtral", 32, 32, 8, 128)
    ),
    "mixtral-8x22b": Preset(
        "mistralai/Mixtral-8x22B-v0.1", "config", _dense("mixtral", 56, 48, 8, 128)
    ),
    "qwen2.5-72b": Preset(
        "Qwen/Qwen2.5-72B-Instruct",
        "quoted",
        _dense("qwen2", 80, 64, 8, 128, sliding_window=131072, use_sliding_window=False),
    ),
    "qwen3-0.6b": Preset("Qwen/Qwen3-0.6B", "config", _dense("qwen3", 28, 16, 8, 128)),
    "qwen3-8b": Preset("Qwen/Qwen3-8B", "config", _dense("qwen3", 36, 32, 8, 128)),
    "qwen3-32b": Preset("Qwen/Qwen3-32B", "config", _dense("qwen3", 64, 64, 8, 128)),
    "qwen3-30b-a3b": Preset("Qwen/Qwen3-30B-A3B", "config", _dense("qwen3_moe", 48, 32, 4, 128)),
    "qwen3-235b-a22b": Preset(
        "Qwen/Qwen3-235B-A22B", "config", _dense("qwen3_moe", 94, 64, 4, 128)
    ),
    "qwen3-coder-480b": Preset(
        "Qwen/Qwen3-Coder-480B-A35B-Instruct", "config", _dense("qwen3_moe", 62, 96, 8, 128)
    ),
    "qwen3-next-80b-a3b": Preset(
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        "defaults",
        _qwen_linear("qwen3_next", 48, 16, 2, 32),
    ),
    "qwen3.5-27b": Preset(
        "Qwen/Qwen3.5-27B",
        "config",
        {**_qwen_linear("qwen3_5", 64, 24, 4, 48), "mamba_ssm_dtype": "float32"},
    ),
    "qwen3.5-397b-a17b": Preset(
        "Qwen/Qwen3.5-397B-A17B",
        "config",
        {**_qwen_linear("qwen3_5_moe", 60, 32, 2, 64), "mamba_ssm_dtype": "float32"},
    ),
    "gemma-3-27b": Preset(
        "google/gemma-3-27b-it",
        "quoted",
        _dense("gemma3_text", 62, 32, 16, 128, sliding_window=1024),
    ),
    "command-r": Preset(
        "CohereForAI/c4ai-command-r-v01", "defaults", _dense("cohere", 40, 64, 64, 128)
    ),
    "gpt-oss-20b": Preset(
        "openai/gpt-oss-20b",
        "config",
        _dense("gpt_oss", 24, 64, 8, 64, sliding_window=128, layer_types=_types("sf" * 12)),
    ),
    "gpt-oss-120b": Preset(
        "openai/gpt-oss-120b",
        "config",
        _dense("gpt_oss", 36, 64, 8, 64, sliding_window=128, layer_types=_types("sf" * 18)),
    ),
    "deepseek-v3": Preset("deepseek-ai/DeepSeek-V3", "config", _latent("deepseek_v3", 61, 128)),
    "deepseek-v3-fp8": Preset(
        "deepseek-ai/DeepSeek-V3", "config", _latent("deepseek_v3", 61, 128), "fp8_ds_mla"
    ),
    "deepseek-v3.2": Preset(
        "deepseek-ai/DeepSeek-V3.2",
        "config",
        _latent("deepseek_v32", 61, 128, index_head_dim=128),
        "fp8_ds_mla",
    ),
    "kimi-k2": Preset("moonshotai/Kimi-K2-Instruct", "config", _latent("kimi_k2", 61, 64)),
    "glm-4.5": Preset("zai-org/GLM-4.5", "quoted", _dense("glm4_moe", 92, 96, 8, 128)),
    "glm-4.5-air": Preset("zai-org/GLM-4.5-Air", "quoted", _dense("glm4_moe", 46, 96, 8, 128)),
    "glm-5": Preset("zai-org/GLM-5", "config", _latent("glm_moe_dsa", 78, 64, index_head_dim=128)),
    "glm-5.3": Preset(
        "zai-org/GLM-5.3",
        "config",
        _latent("glm_moe_dsa", 78, 64, index_head_dim=128, indexer_types=_GLM53_INDEXERS),
    ),
    "minimax-text-01": Preset(
        "MiniMaxAI/MiniMax-Text-01",
        "quoted",
        _dense("minimax_text_01", 80, 64, 8, 128, attn_type_list=([0] * 7 + [1]) * 10),
    ),
    "minimax-m2.5": Preset(
        "MiniMaxAI/MiniMax-M2.5", "config", _dense("minimax_m2", 62, 48, 8, 128)
    ),
    "mimo-v2-flash": Preset(
        "XiaomiMiMo/MiMo-V2-Flash",
        "config",
        _dense(
            "mimo_v2_flash",
            48,
            64,
            4,
            192,
            v_head_dim=128,
            swa_num_key_value_heads=8,
            swa_head_dim=192,
            swa_v_head_dim=128,
            sliding_window=128,
            hybrid_layer_pattern=_MIMO,
        ),
    ),
    "jamba-v0.1": Preset(
        "ai21labs/Jamba-v0.1",
        "defaults",
        _dense(
            "jamba",
            32,
            32,
            8,
            128,
            hidden_size=4096,
            attn_layer_period=8,
            attn_layer_offset=4,
            mamba_d_state=16,
            mamba_d_conv=4,
            mamba_expand=2,
        ),
    ),
    "zamba2-7b": Preset(
        "Zyphra/Zamba2-7B",
        "quoted",
        {
            "model_type": "zamba2",
            "num_hidden_layers": 81,
            "num_attention_heads": 32,
            "hidden_size": 3584,
            "attention_head_dim": 224,
            "mamba_headdim": 64,
            "mamba_ngroups": 2,
            "mamba_d_state": 64,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "layers_block_type": ["hybrid" if i in _ZAMBA_HYBRID else "mamba" for i in range(81)],
            "dtype": "bfloat16",
        },
    ),
    "nemotron-h-56b": Preset(
        "nvidia/Nemotron-H-56B-Base-8K", "config", _nemotron(_H56, 64, 8, 256, 256)
    ),
    "nemotron-3-nano-30b-a3b": Preset(
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        "config",
        _nemotron(_NANO, 32, 2, 64, 128, mamba_ssm_cache_dtype="float32"),
    ),
    "nemotron-3-super-120b-a12b": Preset(
        "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8",
        "config",
        _nemotron(_SUPER, 32, 2, 128, 128, mamba_ssm_cache_dtype="float32"),
    ),
}
