"""Which architecture is read how: ``model_type`` of a `config.json` -> its reader.

A reader looks only at fields that decide the shape of the cache and asks for the ones it misses by
name: nothing is guessed from a model's reputation. Layers come out in model order, with the names
that vLLM gives them, and in one group per kind of block list: full attention, each window, state.

What must stay true: the published model decides heads and sizes, `KvDtype` decides bytes, and
neither knows about ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from vkvmap.models.attention import (
    read_dense,
    read_every_fourth,
    read_gemma2,
    read_gemma3,
    read_gpt_oss,
    read_llama4,
    read_mimo_v2,
    read_mla,
)
from vkvmap.models.config import Config
from vkvmap.models.state import (
    read_falcon_h1,
    read_gated_delta_net,
    read_granite_hybrid,
    read_jamba,
    read_kimi_linear,
    read_lightning,
    read_nemotron_h,
    read_zamba2,
)
from vkvmap.spec import LayerSpec

Read = Callable[[Config], Iterator[LayerSpec]]

_DENSE = """llama mistral mistral3 ministral mixtral qwen2 qwen2_moe qwen2_vl qwen2_5_vl qwen3
qwen3_moe qwen2_vl_text qwen2_5_vl_text qwen2_5_omni_text qwen3_vl qwen3_vl_text qwen3_vl_moe
qwen3_vl_moe_text qwen3_omni_moe_text ministral3 phi phi3 phi4 phimoe glm glm4 glm4_moe glm4v
glm4v_text glm4v_moe glm4v_moe_text minimax_m2 cohere granite granitemoe granitemoeshared olmo
olmo2 olmoe starcoder2 gemma seed_oss smollm3 ernie4_5 ernie4_5_moe nemotron stablelm arcee apertus
dots1 cwm""".split()

#: ``model_type`` of a config.json -> its reader.
FAMILIES: Mapping[str, Read] = {
    **dict.fromkeys(_DENSE, read_dense),
    **dict.fromkeys(("gemma2",), read_gemma2),
    **dict.fromkeys(("gemma3", "gemma3_text"), read_gemma3),
    **dict.fromkeys(("cohere2", "olmo3", "exaone4"), read_every_fourth),
    **dict.fromkeys(("gpt_oss",), read_gpt_oss),
    **dict.fromkeys(("llama4", "llama4_text"), read_llama4),
    **dict.fromkeys(("mimo_v2_flash", "mimo_v2"), read_mimo_v2),
    **dict.fromkeys(
        (
            "deepseek_v2",
            "deepseek_v3",
            "deepseek_v32",
            "kimi_k2",
            "kimi_k25",
            "glm_moe_dsa",
            "glm4_moe_lite",
        ),
        read_mla,
    ),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text"),
        read_gated_delta_net,
    ),
    **dict.fromkeys(("kimi_linear", "kimi_k3"), read_kimi_linear),
    **dict.fromkeys(("minimax", "minimax_text_01", "minimax_m1"), read_lightning),
    **dict.fromkeys(("jamba",), read_jamba),
    **dict.fromkeys(("nemotron_h",), read_nemotron_h),
    **dict.fromkeys(("bamba", "granitemoehybrid"), read_granite_hybrid),
    **dict.fromkeys(("falcon_h1",), read_falcon_h1),
    **dict.fromkeys(("zamba2",), read_zamba2),
}
