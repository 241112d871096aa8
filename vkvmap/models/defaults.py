"""What a `config.json` leaves out: the defaults of the class that the publisher saved it from.

transformers writes a nested configuration (the language model of a multimodal one) without the
fields that equal its class's defaults, and reads an absent ``head_dim`` or ``num_key_value_heads``
anywhere as the class has it. Gemma-3-12B is why this page exists: its file names no head size,
hidden size over heads says 240, and the model has 256.

What must stay true: these are transformers' values, which a test compares with the classes; a null
in the file is a value, not a gap; and what a file at the top level must say (layers, hidden size,
query heads) is asked for, not filled in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Filled in wherever they are absent; the others only in nested configurations.
EVERYWHERE = ("num_key_value_heads", "head_dim")


def _shape(
    layers: int,
    hidden: int,
    query: int,
    kv: int | None = None,
    head: int | None = None,
    **more: Any,
) -> dict[str, Any]:
    shape = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": query,
        "num_key_value_heads": kv,
        "head_dim": head,
        **more,
    }
    return {name: value for name, value in shape.items() if value is not None}


_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
_DELTA = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_OFF = {"sliding_window": 4096, "use_sliding_window": False}
_QWEN2_VL = _shape(80, 8192, 64, 8, **_OFF)

#: ``model_type`` -> cache-deciding fields that its class has a default for.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": _shape(32, 4096, 32),
    "llama4_text": _shape(48, 5120, 40, 8, 128, attention_chunk_size=8192),
    "mistral": _shape(32, 4096, 32, 8, sliding_window=4096),
    "ministral": _shape(32, 4096, 32, 8, sliding_window=4096),
    "ministral3": _shape(34, 4096, 32, 8, 128),
    "mixtral": _shape(32, 4096, 32, 8),
    "qwen2": _shape(32, 4096, 32, 32, **_OFF),
    "qwen2_moe": _shape(24, 2048, 16, 16, **_OFF),
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen2_5_omni_text": _shape(28, 3584, 28, 4, sliding_window=32768, use_sliding_window=False),
    "qwen3": _shape(32, 4096, 32, 32, 128, **_OFF),
    "qwen3_moe": _shape(24, 2048, 32, 4, **_OFF),
    "qwen3_vl_text": _shape(32, 4096, 32, 32, 128),
    "qwen3_vl_moe_text": _shape(24, 2048, 16, 16),
    "qwen3_omni_moe_text": _shape(28, 2048, 28, 4),
    "qwen3_next": _shape(48, 2048, 16, 2, 256, **_DELTA),
    "qwen3_5_text": _shape(32, 4096, 16, 4, 256, **_DELTA),
    "qwen3_5_moe_text": _shape(40, 2048, 16, 2, 256, **_DELTA),
    "gemma": _shape(28, 3072, 16, 16, 256),
    "gemma2": _shape(26, 2304, 8, 4, 256, sliding_window=4096),
    "gemma3_text": _shape(26, 2304, 8, 4, 256, sliding_window=4096),
    "phi3": _shape(32, 3072, 32),
    "phimoe": _shape(32, 4096, 32, 8),
    "gpt_oss": _shape(36, 2880, 64, 8, 64, sliding_window=128),
    "cohere": _shape(40, 8192, 64),
    "cohere2": _shape(40, 8192, 64, sliding_window=4096),
    "glm": _shape(40, 4096, 32, 2, 128),
    "glm4": _shape(40, 4096, 32, 2, 128),
    "glm4_moe": _shape(46, 4096, 96, 8),
    "glm4v_text": _shape(40, 4096, 32, 2),
    "glm4v_moe_text": _shape(46, 4096, 96, 8),
    "granite": _shape(32, 4096, 32),
    "granitemoe": _shape(32, 4096, 32),
    "olmo2": _shape(32, 4096, 32),
    "olmo3": _shape(32, 4096, 32, sliding_window=4096),
    "starcoder2": _shape(30, 3072, 24, 2),
    "seed_oss": _shape(64, 4096, 80, 8, 128),
    "exaone4": _shape(32, 4096, 32, 32, sliding_window=4096),
    "smollm3": _shape(36, 2048, 16, 4, use_sliding_window=False),
    "ernie4_5": _shape(18, 1024, 16, 2, 128),
    "ernie4_5_moe": _shape(28, 2560, 20, 4),
    "minimax_m2": _shape(62, 3072, 48, 8, 128),
    "minimax": _shape(32, 4096, 32, 8),
    "jamba": _shape(32, 4096, 32, 8),
    "bamba": _shape(32, 4096, 32, 8),
    "falcon_h1": _shape(32, 4096, 32, 8),
    "deepseek_v2": _shape(32, 4096, 32, **_LATENT),
    "deepseek_v3": _shape(61, 7168, 128, 128, **_LATENT),
    "glm4_moe_lite": _shape(47, 2048, 20, 20, **_LATENT),
}

#: Wrappers whose language model is of another class when its own type is not said.
_TEXT_OF = {
    "gemma3": "gemma3_text",
    "llama4": "llama4_text",
    "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}


def filled(values: Mapping[str, Any], *, nested: bool) -> dict[str, Any]:
    """`values` with what its class would have filled in."""
    family = str(values.get("model_type"))
    known = DEFAULTS.get(_TEXT_OF.get(family, family), {})
    gaps = {
        name: value
        for name, value in known.items()
        if name not in values and (nested or name in EVERYWHERE)
    }
    return {**values, **gaps}
