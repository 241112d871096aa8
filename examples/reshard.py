"""Store under tp=4 with one layout, load under tp=2 with another, all in this process.

Every rank of a real deployment is a process of its own and attaches to the region instead of
making it (see `Region.handle`); the calls are the same. Run it: python examples/reshard.py
"""

from __future__ import annotations

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
from vkvmap.sections import sections_for

HEADS, SIZE, BLOCK, CHUNK = 8, 64, 16, 64
TABLE = LayerTable(
    [LayerSpec.attention(f"layers.{i}", num_kv_heads=HEADS, head_size=SIZE) for i in range(3)]
)
TOKENS = 2 * CHUNK


def truth(layer: int) -> np.ndarray:
    """What the model computed: ``(tokens, heads, K and V, head size)``."""
    rng = np.random.default_rng(layer)
    return rng.standard_normal((TOKENS, HEADS, 2, SIZE)).astype(np.float16)


def main() -> None:
    pages = np.arange(TOKENS // BLOCK)  # canonical pages, in token order
    region = None
    # Four ranks with K and V apart, [block][K|V][token][head]: each stores its two heads.
    for rank in range(4):
        heads = slice(2 * rank, 2 * rank + 2)
        blocks = np.random.default_rng(rank).permutation(20)[: len(pages)]
        caches = {}
        for layer, name in enumerate(TABLE):
            cache = np.zeros((20, 2, BLOCK, 2, SIZE), np.float16)
            mine = truth(layer)[:, heads].reshape(len(pages), BLOCK, 2, 2, SIZE)
            cache[blocks] = mine.transpose(0, 3, 1, 2, 4)
            caches[name] = CacheView.of(cache, "split_nhd", BLOCK)
        mappings = derive_canonical_mappings(
            TABLE, caches, RankGrid(tp=4), rank, family="universal", strict=True
        )
        region = region or Region.create(sections_for(mappings, CHUNK, num_chunks=2))
        with TransferPlan(mappings, caches, region, chunk_tokens=CHUNK) as plan:
            plan.store((blocks, pages)).check()
    assert region is not None
    # Two ranks with packed cells, [block][head][token][K, V]: each loads its four heads.
    for rank in range(2):
        heads = slice(4 * rank, 4 * rank + 4)
        blocks = np.random.default_rng(100 + rank).permutation(20)[: len(pages)]
        tensors = {name: np.zeros((20, 4, BLOCK, 2 * SIZE), np.float16) for name in TABLE}
        caches = {name: CacheView.of(t, "packed_hnd", BLOCK) for name, t in tensors.items()}
        mappings = derive_canonical_mappings(
            TABLE, caches, RankGrid(tp=2), rank, family="universal", strict=True
        )
        with TransferPlan(mappings, caches, region, chunk_tokens=CHUNK) as plan:
            result = plan.load((blocks, pages)).check()
        for layer, name in enumerate(TABLE):
            mine = truth(layer)[:, heads].reshape(len(pages), BLOCK, 4, 2 * SIZE)
            assert np.array_equal(tensors[name][blocks], mine.transpose(0, 2, 1, 3))
        print(f"rank {rank}: {result['bytes']:,} bytes in {result['fragments']:,} pieces are right")


if __name__ == "__main__":
    main()
