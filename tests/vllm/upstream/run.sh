#!/usr/bin/env bash
# run.sh VENV SOURCE: vLLM's own tests of canonical offloading, pointed at ours.
# VENV is one that tests/vllm/install.sh made; SOURCE is the unpacked source of the same release,
# which has the tests (its wheels do not).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
venv=$(realpath "${1:?usage: run.sh VENV SOURCE}")
source=$(realpath "${2:?usage: run.sh VENV SOURCE}")
"$venv/bin/python" -m pip install --quiet pytest pytest-asyncio tblib
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# The tests alone, so that the source does not hide the installed package; and the one model
# configuration that they look up.
cp -r "$source/tests" "$work/tests"
mkdir -p "$work/facebook/opt-125m"
cat >"$work/facebook/opt-125m/config.json" <<'JSON'
{"architectures": ["OPTForCausalLM"], "model_type": "opt", "hidden_size": 768,
 "num_attention_heads": 12, "num_hidden_layers": 12, "ffn_dim": 3072, "vocab_size": 50272,
 "max_position_embeddings": 2048, "word_embed_proj_dim": 768, "do_layer_norm_before": true,
 "torch_dtype": "float16", "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1}
JSON
cd "$work"
HF_HUB_OFFLINE=1 PYTHONPATH="$here" "$venv/bin/python" -m pytest -q -p upstream_plugin \
  -p no:cacheprovider \
  tests/v1/kv_connector/unit/offloading_connector/test_canonical_mapping.py \
  tests/v1/kv_offload/tiering/test_tiering_offloading.py "${@:3}"
