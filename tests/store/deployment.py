"""A deployment in miniature: `python -m tests.store.deployment TASK`, TASK being JSON.

As a coordinator it makes a region, starts one process per rank, and moves chunks between the region
and a store. Ranks fill their caches (store side) or check them (load side) by enumerating
coordinates. Every process of a deployment is new, so nothing but the store connects two of them.

A coordinator stands for one node. Usually it has every pipeline stage; with ``stage`` in its task
it has that one only, its region never holds the others' layers, and chunks are stored in parts.
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


def _attention(index: int, group: str, **how) -> LayerSpec:
    name = f"layers.{index}.attn"
    return LayerSpec.attention(name, num_kv_heads=2, head_size=8, group=group, **how)


def _state(index: int) -> LayerSpec:
    return LayerSpec.mamba2(
        f"layers.{index}.state", num_heads=8, head_dim=2, state_size=3, n_groups=2, conv_kernel=4,
        group="state",
    )  # fmt: skip


#: "latent": attention beside latent rows. "hybrid": full attention, sliding windows that context
#: parallelism leaves whole, and recurrent state, which has no tokens.
MODELS = {
    "latent": LayerTable(
        [
            spec
            for index in range(4)
            for spec in (
                _attention(index, "full"),
                LayerSpec.mla(f"layers.{index}.latent", row_bytes=29, group="latent"),
            )
        ]
    ),
    "hybrid": LayerTable(
        [
            spec
            for index in range(0, 6, 3)
            for spec in (
                _attention(index, "full"),
                _attention(index + 1, "sliding", window=32, dcp_sharded=False),
                _state(index + 2),
            )
        ]
    ),
}


def identity_of(model: str) -> Identity:
    return Identity("org/model", "abc", MODELS[model], CHUNK_TOKENS)


def parts_of(model: str, stages: str | None) -> tuple[tuple[str, ...], ...] | None:
    """The parts that rows are stored in, as the stages of a configuration."""
    return None if stages is None else Configuration.parse(stages).stage_layers(MODELS[model])


@dataclass(frozen=True)
class Rank:
    """One rank of a deployment and the numpy memory that stands for its cache."""

    model: str
    configuration: Configuration
    stage: int
    rank: int

    @property
    def table(self) -> LayerTable:
        return MODELS[self.model]

    @property
    def layers(self) -> tuple[str, ...]:
        return self.configuration.stage_layers(self.table)[self.stage]

    def paged(self, name: str) -> PagedLayer:
        blocks = self.pages(self.table[name].group) + 3
        return paged_layer(self.table[name], self.configuration, self.rank, num_blocks=blocks)

    def slots(self, group: str) -> list[int]:
        """Canonical tokens of a page of this rank; none of a group that keeps state."""
        spec = self.table.in_group(group)[0]
        side = self.configuration
        if not spec.has_tokens:
            return []
        return oracle.tokens_of(side.grid, self.rank, side.block_size, spec.dcp_sharded)

    def span(self, group: str) -> int:
        spec = self.table.in_group(group)[0]
        count, _ = oracle.shard_of(self.configuration.grid, self.rank, spec.dcp_sharded)
        return self.configuration.block_size * count

    def pages(self, group: str) -> int:
        """Pages of all chunks; a chunk of state is one page."""
        if not self.table.in_group(group)[0].has_tokens:
            return NUM_CHUNKS
        return NUM_CHUNKS * CHUNK_TOKENS // self.span(group)

    def block_of(self, group: str, page: int) -> int:
        """Pages lie scattered over the blocks, the last block first."""
        return self.pages(group) + 2 - page

    def page(self, name: str, page: int) -> np.ndarray:
        """One page of the layer, by asking every token and head for its bytes."""
        spec, grid = self.table[name], self.configuration.grid
        seed = 1000 + self.table.index(name)
        if not spec.has_tokens:
            return self._state(spec, oracle.truth_of(spec, 0, oracle.drawn(seed + 100 * page)))
        content = oracle.truth_of(spec, NUM_CHUNKS * CHUNK_TOKENS, oracle.drawn(seed))
        heads = None
        if spec.num_kv_heads is not None:
            heads = oracle.parts_of(spec.num_kv_heads, grid.tp, self.rank % grid.tp)
        tokens = [page * self.span(spec.group) + slot for slot in self.slots(spec.group)]
        return oracle.page(self.paged(name).layout.name, content.some(tokens, heads))

    def _state(self, spec: LayerSpec, truth: oracle.Truth) -> np.ndarray:
        """Of every field, the channels or heads of this rank's parts of its first axis."""
        grid, pieces = self.configuration.grid, []
        for this in spec.fields:
            array, units = truth.fields[this.name], this.axes[0].units
            if units:
                mine = oracle.parts_of(units, grid.tp, self.rank % grid.tp)
                array = np.concatenate([np.split(array, units)[unit] for unit in mine])
            pieces.append(array.reshape(-1))
        return np.concatenate(pieces)

    def expected(self, name: str) -> np.ndarray:
        """The layer's whole tensor, uint8 ``(blocks, page)``; unused blocks are poison."""
        group, paged = self.table[name].group, self.paged(name)
        out = np.full((self.pages(group) + 3, paged.page_bytes), POISON, np.uint8)
        for page in range(self.pages(group)):
            out[self.block_of(group, page)] = self.page(name, page)
        return out


def run_rank(me: Rank, writer: int, address: str, store: bool) -> None:
    """Move this rank's cache to or from the region; raises if a loaded byte is wrong."""
    expected = {name: me.expected(name) for name in me.layers}
    memory = {
        name: array if store else np.full_like(array, POISON) for name, array in expected.items()
    }
    views: dict[str, CacheView] = {
        name: me.paged(name).view(array.ctypes.data) for name, array in memory.items()
    }
    mappings = derive_canonical_mappings(
        me.table, views, me.configuration.grid, me.rank, family="universal", strict=True
    )
    region = Region.attach(address)
    plan = TransferPlan(mappings, views, region, chunk_tokens=CHUNK_TOKENS)
    pairs = {
        group: (
            [me.block_of(group, page) for page in range(me.pages(group))],
            list(range(me.pages(group))),
        )
        for group in plan.groups
    }
    if not store:
        plan.load(pairs).check()
        for name, array in memory.items():
            if not np.array_equal(array, expected[name]):
                raise SystemExit(f"{me}: wrong bytes in {name}")
    else:
        shares = {}
        for group in plan.groups:
            mine = {n: mappings.by_layer[n] for n in me.layers if me.table[n].group == group}
            pages = plan.pages_per_chunk[group]
            ledger = Ledger(region, f"{group}/ledger")
            shares[group] = WriterShare(ledger, writer, mine, pages)
            for row in range(NUM_CHUNKS):
                if not shares[group].enter(row, ledger.generation(row)):
                    raise SystemExit(f"{me}: turned away from row {row}")
        plan.store(pairs).check()
        for group, share in shares.items():
            for row in range(NUM_CHUNKS):
                share.stored(row, range(plan.pages_per_chunk[group]))
        # A stage without layers of a group owes it nothing.
        for group in set(me.table.groups) - set(plan.groups):
            ledger = Ledger(region, f"{group}/ledger")
            rows = range(NUM_CHUNKS)
            ledger.finish(rows, np.array([ledger.generation(row) for row in rows]), writer)
    plan.close()
    region.close()


def coordinate(task: dict) -> None:
    """One node of a deployment: its region, its ranks, its share of the store."""
    configuration = Configuration.parse(task["configuration"])
    model, store = task["model"], task["action"] == "store"
    table, identity = MODELS[model], identity_of(model)
    grid: RankGrid = configuration.grid
    first = derive_canonical_mappings(
        table, views_of(table, table, configuration, 0), grid, 0, family="universal", strict=True
    )
    stages = range(configuration.pp) if task["stage"] is None else [task["stage"]]
    ranks = [(stage, rank) for stage in stages for rank in range(grid.size)]
    held = [name for stage in stages for name in configuration.stage_layers(table)[stage]]
    groups = [group for group in table.groups if any(table[n].group == group for n in held)]
    layers: dict[str, list[str] | None] = dict.fromkeys(groups)
    if task["stage"] is not None:
        layers = {g: [name for name in held if table[name].group == g] for g in groups}
    region = Region.create(
        [
            *sections_for(first, CHUNK_TOKENS, NUM_CHUNKS),
            *(Ledger.section(NUM_CHUNKS, len(ranks), f"{group}/ledger") for group in table.groups),
        ]
    )
    address = region.serve()
    keys = [key_of(number) for number in range(NUM_CHUNKS)]
    rows = range(NUM_CHUNKS)
    kept = {group: Ledger(region, f"{group}/ledger") for group in table.groups}
    with CanonicalStore(
        task["path"], identity, region=region, ledgers=kept, parts=parts_of(model, task["parts"])
    ) as chunks:
        for group in table.groups if store else groups:
            if store:
                kept[group].begin(rows)
            else:
                job = chunks.get(keys, group, rows, layers=layers[group])
                job.wait()
                if not job.good.all():
                    raise SystemExit(f"{group}: {job.outcomes} {job.reasons}")
        for group in groups if store else ():
            early = chunks.put(keys, group, rows, layers=layers[group])
            early.wait()
            if set(early.outcomes) != {"incomplete"}:
                raise SystemExit(f"published before anybody wrote: {early.outcomes}")
        started = []
        for writer, (stage, rank) in enumerate(ranks):
            told = {**task, "address": address, "stage": stage, "rank": rank, "writer": writer}
            command = [sys.executable, "-m", "tests.store.deployment", json.dumps(told)]
            started.append(subprocess.Popen(command))
        codes = [process.wait(120) for process in started]
        if any(codes):
            raise SystemExit("a rank failed")
        for group in groups if store else ():
            job = chunks.put(keys, group, rows, layers=layers[group])
            job.wait()
            if set(job.outcomes) != {"stored"}:
                raise SystemExit(f"{group}: {job.outcomes} {job.reasons}")
    region.close()


def deploy(
    path: str,
    action: str,
    configuration: str,
    *,
    model: str = "latent",
    stage: int | None = None,
    parts: str | None = None,
) -> None:
    """Run a deployment, or the node of it that has pipeline stage `stage`, in new processes.

    `action` is ``"store"`` or ``"load"``; `parts` spells the stages that rows are stored by.
    """
    task = {
        "path": path,
        "action": action,
        "configuration": configuration,
        "model": model,
        "stage": stage,
        "parts": parts,
    }
    command = [sys.executable, "-m", "tests.store.deployment", json.dumps(task)]
    subprocess.run(command, check=True, timeout=300)


def main() -> None:
    task = json.loads(sys.argv[1])
    if "rank" in task:
        configuration = Configuration.parse(task["configuration"])
        me = Rank(task["model"], configuration, task["stage"], task["rank"])
        run_rank(me, task["writer"], task["address"], task["action"] == "store")
    else:
        coordinate(task)


if __name__ == "__main__":
    main()
