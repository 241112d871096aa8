"""A deployment in miniature: `python -m tests.store.deployment TASK`, TASK being JSON.

As a coordinator it makes a region, starts one process per rank, and moves chunks between the region
and a store. Ranks fill their caches (store side) or check them (load side) by enumerating
coordinates. Every process of a deployment is new, so nothing but the store connects two of them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

import numpy as np

from tests import oracle
from tests.store.small import key_of
from vkvmap import RankGrid, TransferPlan, derive_canonical_mappings
from vkvmap.cache import CacheView
from vkvmap.configuration import Configuration
from vkvmap.identity import Identity
from vkvmap.ledger import Ledger, WriterShare
from vkvmap.paged import PagedLayer, paged_layer, views_of
from vkvmap.region import Region
from vkvmap.sections import sections_for
from vkvmap.spec import LayerSpec, LayerTable
from vkvmap.store import CanonicalStore

CHUNK_TOKENS = 64
NUM_CHUNKS = 5
POISON = 0xDB

LAYERS = LayerTable(
    [
        spec
        for index in range(4)
        for spec in (
            LayerSpec.attention(f"layers.{index}.attn", num_kv_heads=2, head_size=8, group="full"),
            LayerSpec.mla(f"layers.{index}.latent", row_bytes=29, group="latent"),
        )
    ]
)
IDENTITY = Identity("org/model", "abc", LAYERS, CHUNK_TOKENS)


@dataclass(frozen=True)
class Rank:
    """One rank of a deployment and the numpy memory that stands for its cache."""

    configuration: Configuration
    stage: int
    rank: int

    @property
    def layers(self) -> tuple[str, ...]:
        return self.configuration.stage_layers(LAYERS)[self.stage]

    @property
    def writer(self) -> int:
        return self.stage * self.configuration.grid.size + self.rank

    def paged(self, name: str) -> PagedLayer:
        return paged_layer(LAYERS[name], self.configuration, self.rank, num_blocks=self.blocks)

    @property
    def blocks(self) -> int:
        return NUM_CHUNKS * CHUNK_TOKENS // self.configuration.span + 3

    def block_of(self, page: int) -> int:
        """Pages lie scattered over the blocks, the last block first."""
        return self.blocks - 1 - page

    def pages(self) -> int:
        return NUM_CHUNKS * CHUNK_TOKENS // self.configuration.span

    def expected(self, name: str) -> np.ndarray:
        """The layer's whole tensor, uint8 ``(blocks, page)``, by asking every token and head."""
        grid, spec, paged = self.configuration.grid, LAYERS[name], self.paged(name)
        content = oracle.truth_of(
            spec, NUM_CHUNKS * CHUNK_TOKENS, oracle.drawn(1000 + LAYERS.index(name))
        )
        slots = oracle.tokens_of(grid, self.rank, self.configuration.block_size, True)
        heads = None
        if spec.num_kv_heads is not None:
            heads = oracle.parts_of(spec.num_kv_heads, grid.tp, self.rank % grid.tp)
        out = np.full((self.blocks, paged.page_bytes), POISON, np.uint8)
        for page in range(self.pages()):
            tokens = [page * self.configuration.span + slot for slot in slots]
            local = content.some(tokens, heads)
            out[self.block_of(page)] = oracle.page(paged.layout.name, local)
        return out


def run_rank(me: Rank, address: str, store: bool) -> None:
    """Move this rank's cache to or from the region; raises if a loaded byte is wrong."""
    memory = {
        name: me.expected(name) if store else np.full_like(me.expected(name), POISON)
        for name in me.layers
    }
    views: dict[str, CacheView] = {
        name: me.paged(name).view(array.ctypes.data) for name, array in memory.items()
    }
    mappings = derive_canonical_mappings(
        LAYERS, views, me.configuration.grid, me.rank, family="universal", strict=True
    )
    region = Region.attach(address)
    plan = TransferPlan(mappings, views, region, chunk_tokens=CHUNK_TOKENS)
    blocks = [me.block_of(page) for page in range(me.pages())]
    pairs = {group: (blocks, list(range(me.pages()))) for group in plan.groups}
    if not store:
        plan.load(pairs).check()
        for name, array in memory.items():
            if not np.array_equal(array, me.expected(name)):
                raise SystemExit(f"{me}: wrong bytes in {name}")
    else:
        shares = {}
        for group in plan.groups:
            mine = {n: mappings.by_layer[n] for n in me.layers if LAYERS[n].group == group}
            pages = plan.pages_per_chunk[group]
            ledger = Ledger(region, f"{group}/ledger")
            shares[group] = WriterShare(ledger, me.writer, mine, pages)
            for row in range(NUM_CHUNKS):
                if not shares[group].enter(row, ledger.generation(row)):
                    raise SystemExit(f"{me}: turned away from row {row}")
        plan.store(pairs).check()
        for group, share in shares.items():
            for row in range(NUM_CHUNKS):
                share.stored(row, range(plan.pages_per_chunk[group]))
    plan.close()
    region.close()


def coordinate(task: dict) -> None:
    """One deployment: its region, its ranks, its share of the store."""
    configuration = Configuration.parse(task["configuration"])
    store = task["action"] == "store"
    grid: RankGrid = configuration.grid
    first = derive_canonical_mappings(
        LAYERS, views_of(LAYERS, LAYERS, configuration, 0), grid, 0, family="universal", strict=True
    )
    sections = sections_for(first, CHUNK_TOKENS, NUM_CHUNKS)
    ledgers = [
        Ledger.section(NUM_CHUNKS, configuration.ranks, f"{group}/ledger")
        for group in LAYERS.groups
    ]
    region = Region.create([*sections, *ledgers])
    address = region.serve()
    keys = [key_of(number) for number in range(NUM_CHUNKS)]
    kept = {group: Ledger(region, f"{group}/ledger") for group in LAYERS.groups}
    with CanonicalStore(task["path"], IDENTITY, region=region, ledgers=kept) as chunks:
        for group in LAYERS.groups:
            if store:
                kept[group].begin(range(NUM_CHUNKS))
                early = chunks.put(keys, group, range(NUM_CHUNKS))
                early.wait()
                if set(early.outcomes) != {"incomplete"}:
                    raise SystemExit(f"published before anybody wrote: {early.outcomes}")
            else:
                job = chunks.get(keys, group, range(NUM_CHUNKS))
                job.wait()
                if not job.good.all():
                    raise SystemExit(f"{group}: {job.outcomes} {job.reasons}")
        ranks = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.store.deployment",
                    json.dumps({**task, "address": address, "stage": stage, "rank": rank}),
                ]
            )
            for stage in range(configuration.pp)
            for rank in range(grid.size)
        ]
        if any(rank.wait(120) for rank in ranks):
            raise SystemExit("a rank failed")
        if store:
            for group in LAYERS.groups:
                job = chunks.put(keys, group, range(NUM_CHUNKS))
                job.wait()
                if set(job.outcomes) != {"stored"}:
                    raise SystemExit(f"{group}: {job.outcomes} {job.reasons}")
    region.close()


def main() -> None:
    task = json.loads(sys.argv[1])
    if "rank" in task:
        me = Rank(Configuration.parse(task["configuration"]), task["stage"], task["rank"])
        run_rank(me, task["address"], task["action"] == "store")
    else:
        coordinate(task)


if __name__ == "__main__":
    main()
