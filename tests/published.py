"""Cache-deciding fields of real `config.json` files, and what their models cache, worked by hand.

Fields are named, nested and left out as in the published files. `expected` is, by group: layers,
and bytes a token for `full`, windows and chunks, or bytes a sequence for `state` (of a bfloat16
cache). None of it comes from this package.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Published:
    config: dict[str, Any]
    expected: dict[str, tuple[int, int]]


def _dense(
    kind: str, layers: int, hidden: int, query: int, kv: int | None, **more: Any
) -> dict[str, Any]:
    config = {
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": query,
        "torch_dtype": "bfloat16",
        **more,
    }
    return config if kv is None else {**config, "num_key_value_heads": kv}


def _mamba2(heads: int, dim: int, groups: int, state: int, temporal: int = 2) -> int:
    """Bytes of one layer: three positions of x, B and C (2 bytes each), and the temporal state."""
    return 2 * 3 * (heads * dim + 2 * groups * state) + heads * dim * state * temporal


_HYBRID_AT = (6, 11, 17, 23, 29, 35, 41, 47, 53, 59, 65, 71, 77)

MODELS: dict[str, Published] = {
    "Llama-3.1-8B": Published(
        _dense("llama", 32, 4096, 32, 8), {"full": (32, 32 * 2 * 8 * 128 * 2)}
    ),
    "Mistral-7B-v0.1": Published(
        _dense("mistral", 32, 4096, 32, 8, sliding_window=4096),
        {"window-4096": (32, 32 * 2 * 8 * 128 * 2)},
    ),
    "Mistral-7B-v0.3": Published(
        _dense("mistral", 32, 4096, 32, 8, sliding_window=None, head_dim=128),
        {"full": (32, 32 * 2 * 8 * 128 * 2)},
    ),
    "Mixtral-8x7B": Published(
        _dense("mixtral", 32, 4096, 32, 8, sliding_window=None),
        {"full": (32, 32 * 2 * 8 * 128 * 2)},
    ),
    "Qwen2.5-7B": Published(
        _dense(
            "qwen2",
            28,
            3584,
            28,
            4,
            sliding_window=131072,
            use_sliding_window=False,
            max_window_layers=28,
        ),
        {"full": (28, 28 * 2 * 4 * 128 * 2)},
    ),
    "Qwen3-32B": Published(
        _dense(
            "qwen3", 64, 5120, 64, 8, head_dim=128, sliding_window=None, use_sliding_window=False
        ),
        {"full": (64, 64 * 2 * 8 * 128 * 2)},
    ),
    "Qwen3-30B-A3B": Published(
        _dense("qwen3_moe", 48, 2048, 32, 4, head_dim=128, use_sliding_window=False),
        {"full": (48, 48 * 2 * 4 * 128 * 2)},
    ),
    "Qwen3-Next-80B-A3B": Published(
        _dense(
            "qwen3_next",
            48,
            2048,
            16,
            2,
            head_dim=256,
            full_attention_interval=4,
            linear_num_key_heads=16,
            linear_num_value_heads=32,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            linear_conv_kernel_dim=4,
        ),
        {
            "full": (12, 12 * 2 * 2 * 256 * 2),
            "state": (36, 36 * 2 * (3 * (2 * 2048 + 4096) + 32 * 128 * 128)),
        },
    ),
    "gemma-2-9b": Published(
        _dense("gemma2", 42, 3584, 16, 8, head_dim=256, sliding_window=4096),
        {
            "window-4096": (21, 21 * 2 * 8 * 256 * 2),
            "full": (21, 21 * 2 * 8 * 256 * 2),
        },
    ),
    # The file of the 4B model names no heads at all, that of the 12B model no head size.
    "gemma-3-4b-it": Published(
        {
            "model_type": "gemma3",
            "torch_dtype": "bfloat16",
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "model_type": "gemma3_text",
                "num_hidden_layers": 34,
                "sliding_window": 1024,
            },
            "vision_config": {"hidden_size": 1152, "num_attention_heads": 16},
        },
        {
            "window-1024": (29, 29 * 2 * 4 * 256 * 2),
            "full": (5, 5 * 2 * 4 * 256 * 2),
        },
    ),
    "gemma-3-12b-it": Published(
        {
            "model_type": "gemma3",
            "torch_dtype": "bfloat16",
            "text_config": {
                "hidden_size": 3840,
                "model_type": "gemma3_text",
                "num_attention_heads": 16,
                "num_hidden_layers": 48,
                "num_key_value_heads": 8,
                "sliding_window": 1024,
            },
        },
        {
            "window-1024": (40, 40 * 2 * 8 * 256 * 2),
            "full": (8, 8 * 2 * 8 * 256 * 2),
        },
    ),
    "Phi-3-mini-4k": Published(
        _dense("phi3", 32, 3072, 32, 32, sliding_window=2047),
        {"window-2047": (32, 32 * 2 * 32 * 96 * 2)},
    ),
    "phi-4": Published(
        _dense("phi3", 40, 5120, 40, 10, sliding_window=None),
        {"full": (40, 40 * 2 * 10 * 128 * 2)},
    ),
    "gpt-oss-20b": Published(
        _dense(
            "gpt_oss",
            24,
            2880,
            64,
            8,
            head_dim=64,
            sliding_window=128,
            layer_types=["sliding_attention", "full_attention"] * 12,
        ),
        {
            "window-128": (12, 12 * 2 * 8 * 64 * 2),
            "full": (12, 12 * 2 * 8 * 64 * 2),
        },
    ),
    "DeepSeek-V2": Published(
        _dense("deepseek_v2", 60, 5120, 128, 128, kv_lora_rank=512, qk_rope_head_dim=64),
        {"full": (60, 60 * 576 * 2)},
    ),
    "DeepSeek-V3": Published(
        _dense("deepseek_v3", 61, 7168, 128, 128, kv_lora_rank=512, qk_rope_head_dim=64),
        {"full": (61, 61 * 576 * 2)},
    ),
    "DeepSeek-V3.2": Published(
        _dense(
            "deepseek_v32",
            61,
            7168,
            128,
            128,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            index_head_dim=128,
            index_n_heads=64,
        ),
        {"full": (122, 61 * (576 * 2 + 128 + 4))},
    ),
    "Kimi-K2": Published(
        _dense("kimi_k2", 61, 7168, 64, 64, kv_lora_rank=512, qk_rope_head_dim=64),
        {"full": (61, 61 * 576 * 2)},
    ),
    "GLM-4.6": Published(
        _dense("glm4_moe", 92, 5120, 96, 8, head_dim=128, num_nextn_predict_layers=1),
        {"full": (92, 92 * 2 * 8 * 128 * 2)},
    ),
    "MiniMax-Text-01": Published(
        _dense(
            "minimax_text_01", 80, 6144, 64, 8, head_dim=128, attn_type_list=([0] * 7 + [1]) * 10
        ),
        {"full": (10, 10 * 2 * 8 * 128 * 2), "state": (70, 70 * 64 * 128 * 128 * 2)},
    ),
    "Jamba-v0.1": Published(
        _dense(
            "jamba",
            32,
            4096,
            32,
            8,
            attn_layer_period=8,
            attn_layer_offset=4,
            mamba_d_state=16,
            mamba_d_conv=4,
            mamba_expand=2,
        ),
        {"full": (4, 4 * 2 * 8 * 128 * 2), "state": (28, 28 * 2 * (3 * 8192 + 8192 * 16))},
    ),
    "Nemotron-H-8B": Published(
        _dense(
            "nemotron_h",
            52,
            4096,
            32,
            8,
            head_dim=128,
            hybrid_override_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
            mamba_num_heads=128,
            mamba_head_dim=64,
            n_groups=8,
            ssm_state_size=128,
            conv_kernel=4,
        ),
        {"full": (4, 4 * 2 * 8 * 128 * 2), "state": (24, 24 * _mamba2(128, 64, 8, 128, 4))},
    ),
    "Falcon-H1-7B": Published(
        _dense(
            "falcon_h1",
            44,
            3072,
            12,
            2,
            head_dim=128,
            mamba_d_ssm=3072,
            mamba_n_heads=24,
            mamba_d_head=128,
            mamba_n_groups=1,
            mamba_d_state=256,
            mamba_d_conv=4,
            mamba_expand=2,
        ),
        {"full": (44, 44 * 2 * 2 * 128 * 2), "state": (44, 44 * _mamba2(24, 128, 1, 256))},
    ),
    # As its publisher wrote it, before the architecture was in transformers: no state heads.
    "Zamba2-7B": Published(
        _dense(
            "zamba2",
            81,
            3584,
            32,
            32,
            conv_dimension=4,
            expansion_factor=2,
            mamba_headdim=64,
            mamba_ngroups=2,
            state_size=64,
            layers_block_type=["hybrid" if i in _HYBRID_AT else "mamba" for i in range(81)],
        ),
        {"full": (13, 13 * 2 * 32 * 224 * 2), "state": (81, 81 * _mamba2(112, 64, 2, 64))},
    ),
    "granite-4.0-h-tiny": Published(
        _dense(
            "granitemoehybrid",
            40,
            1536,
            12,
            4,
            layer_types=["attention" if i % 10 == 5 else "mamba" for i in range(40)],
            mamba_n_heads=48,
            mamba_d_head=64,
            mamba_n_groups=1,
            mamba_d_state=128,
            mamba_d_conv=4,
            mamba_expand=2,
        ),
        {"full": (4, 4 * 2 * 4 * 128 * 2), "state": (36, 36 * _mamba2(48, 64, 1, 128))},
    ),
    "Bamba-9B": Published(
        _dense(
            "bamba",
            32,
            4096,
            32,
            8,
            attn_layer_indices=[9, 18, 27],
            mamba_n_heads=128,
            mamba_d_head=64,
            mamba_n_groups=1,
            mamba_d_state=128,
            mamba_d_conv=4,
            mamba_expand=2,
        ),
        {"full": (3, 3 * 2 * 8 * 128 * 2), "state": (29, 29 * _mamba2(128, 64, 1, 128))},
    ),
    "Llama-4-Scout": Published(
        {
            "model_type": "llama4",
            "torch_dtype": "bfloat16",
            "text_config": _dense(
                "llama4_text",
                48,
                5120,
                40,
                8,
                head_dim=128,
                attention_chunk_size=8192,
                no_rope_layers=[],
            ),
            "vision_config": {"hidden_size": 1408, "num_hidden_layers": 34},
        },
        {"chunk-8192": (36, 36 * 2 * 8 * 128 * 2), "full": (12, 12 * 2 * 8 * 128 * 2)},
    ),
    "c4ai-command-r-v01": Published(
        _dense("cohere", 40, 8192, 64, 64), {"full": (40, 40 * 2 * 64 * 128 * 2)}
    ),
    "c4ai-command-r7b": Published(
        _dense(
            "cohere2", 32, 4096, 32, 8, head_dim=128, sliding_window=4096, sliding_window_pattern=4
        ),
        {"window-4096": (24, 24 * 2 * 8 * 128 * 2), "full": (8, 8 * 2 * 8 * 128 * 2)},
    ),
    # Its file leaves the query heads to the class.
    "pixtral-12b": Published(
        {
            "model_type": "llava",
            "text_config": {
                "head_dim": 128,
                "hidden_size": 5120,
                "model_type": "mistral",
                "num_hidden_layers": 40,
                "num_key_value_heads": 8,
                "sliding_window": None,
            },
        },
        {"full": (40, 40 * 2 * 8 * 128 * 2)},
    ),
    # Its file leaves everything to the class.
    "llava-1.5-7b": Published(
        {
            "model_type": "llava",
            "text_config": {"model_type": "llama", "torch_dtype": "float16", "vocab_size": 32064},
        },
        {"full": (32, 32 * 2 * 32 * 128 * 2)},
    ),
}
