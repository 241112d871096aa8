"""Tiny random models with a byte-level tokenizer: ``python tiny_models.py FOLDER KIND [SEED]``.

Weights are scaled up on purpose: with the usual initialisation greedy output hardly depends on the
context, and a wrong cache would go unnoticed.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

COMMON: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 512,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "dtype": "float32",
}


def llama(kv_heads: int, **more: Any) -> Any:
    config = transformers.LlamaConfig(
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=kv_heads,
        head_dim=32,
        **(COMMON | more),
    )
    return transformers.LlamaForCausalLM(config)


def sliding_window() -> Any:
    """Two layers with a window, one without, twice over."""
    config = transformers.Gemma3TextConfig(
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        sliding_window=96,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        query_pre_attn_scalar=32,
        **COMMON,
    )
    return transformers.Gemma3ForCausalLM(config)


def latent() -> Any:
    """Multi-head latent attention: one row per token, whole on every rank."""
    config = transformers.DeepseekV2Config(
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        n_routed_experts=2,
        first_k_dense_replace=3,
        moe_intermediate_size=128,
        n_shared_experts=1,
        num_experts_per_tok=1,
        **COMMON,
    )
    return transformers.DeepseekV2ForCausalLM(config)


def state_hybrid() -> Any:
    """Mamba-2 state in three layers of four, attention in the other."""
    config = transformers.GraniteMoeHybridConfig(
        num_hidden_layers=4,
        layer_types=["mamba", "attention", "mamba", "mamba"],
        num_attention_heads=8,
        num_key_value_heads=4,
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=512,
        position_embedding_type="rope",
        attention_multiplier=0.18,
        mamba_n_heads=8,
        mamba_d_head=64,
        mamba_n_groups=2,
        mamba_d_state=64,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_chunk_size=32,
        **COMMON,
    )
    return transformers.GraniteMoeHybridForCausalLM(config)


KINDS = {
    "llama": lambda: llama(4),
    "llama-bf16": lambda: llama(4, dtype="bfloat16"),
    "one-head": lambda: llama(1),
    "two-heads": lambda: llama(2),
    "window": sliding_window,
    "latent": latent,
    "hybrid": state_hybrid,
}


def make(folder: str, kind: str, seed: int = 0) -> None:
    """Write model and tokenizer of `kind` to `folder`."""
    torch.manual_seed(seed)
    model = KINDS[kind]()
    embedding = 0.06 if kind == "window" else 1.0  # Gemma multiplies by sqrt(hidden_size)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                spread = embedding if "embed" in name else 1.6 / weight.shape[1] ** 0.5
                weight.normal_(0, spread)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def tokenizer() -> Any:
    """A token per byte, and three special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    tokens = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokens.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokens, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


if __name__ == "__main__":
    make(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 0)
