"""Keep a prefix beyond the process: chunks on disk, found again by the tokens they hold.

A deployment with tp=1 stores a prompt's cache; another with tp=2 finds the longest stored prefix of
a longer prompt and loads it. Run it: python examples/prefix_store.py [FOLDER]
"""

from __future__ import annotations

import sys
import tempfile

import numpy as np

from vkvmap import (
    CacheView,
    LayerSpec,
    LayerTable,
    RankGrid,
    Region,
    TransferPlan,
    derive_canonical_mappings,
)
from vkvmap.identity import Identity
from vkvmap.keys import chunk_keys
from vkvmap.sections import sections_for
from vkvmap.store import CanonicalStore

TABLE = LayerTable(
    [LayerSpec.attention(f"layers.{i}", num_kv_heads=2, head_size=32) for i in range(2)]
)
CHUNK, BLOCK, GROUP = 64, 16, "0"
IDENTITY = Identity("example/tiny", "revision-1", TABLE, CHUNK)


def cache_of(rank: int, tp: int, values: np.ndarray | None) -> dict[str, np.ndarray]:
    """Packed NHD tensors ``(blocks, heads, tokens, K and V)`` of one rank; zeros without values."""
    heads = 2 // tp
    shape = (16, heads, BLOCK, 64)
    if values is None:
        return {name: np.zeros(shape, np.float16) for name in TABLE}
    return {
        name: np.ascontiguousarray(values[layer][:, rank * heads : (rank + 1) * heads])
        for layer, name in enumerate(TABLE)
    }


def plan_for(
    tensors: dict[str, np.ndarray], tp: int, rank: int, region: Region | None
) -> tuple[TransferPlan, Region]:
    views = {name: CacheView.of(tensor, "packed_hnd", BLOCK) for name, tensor in tensors.items()}
    mappings = derive_canonical_mappings(
        TABLE, views, RankGrid(tp=tp), rank, family="universal", strict=True
    )
    region = region or Region.create(sections_for(mappings, CHUNK, num_chunks=4))
    return TransferPlan(mappings, views, region, chunk_tokens=CHUNK), region


def main(folder: str) -> None:
    prompt = np.arange(200)  # token ids; three whole chunks of 64
    keys = chunk_keys(prompt, CHUNK)
    computed = np.random.default_rng(0).standard_normal((2, 16, 2, BLOCK, 64)).astype(np.float16)
    pages = np.arange(len(keys) * CHUNK // BLOCK)

    plan, region = plan_for(cache_of(0, 1, computed), 1, 0, None)
    plan.store((pages, pages)).check()  # blocks 0, 1, ... hold the prompt here
    with CanonicalStore(folder, IDENTITY, region=region) as store:
        job = store.put(keys, GROUP, list(range(len(keys))))
        job.wait()
        print(f"stored {int(job.good.sum())} chunks")
    plan.close()
    region.close()

    longer = np.concatenate([prompt[:150], np.arange(1000, 1100)])  # agrees for two chunks
    found = chunk_keys(longer, CHUNK)
    tensors = [cache_of(rank, 2, None) for rank in range(2)]
    first, region = plan_for(tensors[0], 2, 0, None)
    second, _ = plan_for(tensors[1], 2, 1, region)
    with CanonicalStore(folder, IDENTITY, region=region) as store:
        hits = store.prefix(found, GROUP)
        store.get(found[:hits], GROUP, list(range(hits))).wait()
    pages = np.arange(hits * CHUNK // BLOCK)
    for rank, plan in enumerate((first, second)):
        plan.load((pages, pages)).check()
        for layer, name in enumerate(TABLE):
            expected = computed[layer][: len(pages), rank : rank + 1]
            assert np.array_equal(tensors[rank][name][: len(pages)], expected)
        plan.close()
    print(f"{hits * CHUNK} of {len(longer)} tokens need no prefill")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(scratch)
