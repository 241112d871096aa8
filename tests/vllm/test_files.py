"""Files of a live engine become chunks of a store, and chunks become files that a live engine hits.

Once with the engine's own canonical layout, where nothing of ours is in the engine (stock_spec.py),
and once with our pages. A page is the same bytes in both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.vllm.engine import Bench, Life, stored_files, transfer, whole_prefix
from vkvmap.identity import Identity
from vkvmap.integrations.vllm_files import VllmFiles, export_files, import_files
from vkvmap.spec import LayerSpec, LayerTable
from vkvmap.store import CanonicalStore

pytestmark = pytest.mark.vllm

Models = Callable[[str], Path]

PROMPTS = [
    "The quick brown fox jumps over the lazy dog and then some more. " * 4 + "files",
    "ZYX " + "another prompt that shares nothing with the others at all, " * 4 + "x",
]
BLOCK = 32
LAYERS = LayerTable(
    LayerSpec.attention(
        f"model.layers.{i}.self_attn.attn", num_kv_heads=4, head_size=32, dtype="float32"
    )
    for i in range(4)
)
PAYLOAD = 4 * BLOCK * 4 * 2 * 32 * 4


def stock(files: Path) -> dict[str, Any]:
    config = transfer(files)
    config["kv_connector_extra_config"].update(
        spec_name="StockSpec", spec_module_path="stock_spec", canonical_layout=True
    )
    return config


def namespace(root: Path) -> VllmFiles:
    (said,) = root.glob("**/config.json")
    return VllmFiles.open(said.parent)


def store_of(folder: Path, model: Path) -> CanonicalStore:
    identity = Identity(
        str(model), "1", LAYERS, BLOCK, family="native", layouts="cpu_hnd", spans=BLOCK
    )
    return CanonicalStore(folder, identity, sync="none")


def through_a_store(root: Path, again: Path, folder: Path, model: Path) -> None:
    """Import all files below `root`, compare bytes, and export them below `again`."""
    files = namespace(root)
    paths = {path.stem: path for path in stored_files(root)}
    with store_of(folder, model) as store:
        moved = import_files(files, store)
        assert moved.chunks == len(paths) > 0 and not moved.skipped
        keys = [bytes.fromhex(name) for name in paths]
        rows = [np.zeros(PAYLOAD, np.uint8) for _ in keys]
        store.get(keys, "0", rows).wait()
        for row, path in zip(rows, paths.values(), strict=True):
            assert row.any() and row.tobytes() == path.read_bytes()[:PAYLOAD]
        out = replace(files, root=again / files.root.relative_to(root))
        assert export_files(store, out).chunks == len(paths)


def test_pages_of_live_engines_go_through_a_store_and_are_hit_again(
    bench: Bench, models: Models, tmp_path: Path
) -> None:
    model = models("llama")
    lives: dict[str, Life] = {}
    for name, config in (("stock", stock), ("ours", transfer)):
        first = bench.run(model, prompts=PROMPTS, transfer=config(tmp_path / name))
        assert first.cached() == [0, 0]
        again = tmp_path / f"{name}-again"
        through_a_store(tmp_path / name, again, tmp_path / f"{name}-store", model)
        lives[name] = bench.run(model, tp=2, prompts=PROMPTS, transfer=config(again))
        assert lives[name].cached() == whole_prefix(lives[name], BLOCK)
        assert lives[name].tokens() == first.tokens()
    assert lives["stock"].tokens() == lives["ours"].tokens()
    pages = [
        {path.name: path.read_bytes()[:PAYLOAD] for path in stored_files(tmp_path / name)}
        for name in lives
    ]
    assert pages[0] == pages[1]
