"""End-to-end digests agree under any configuration and differ when a mapping lies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from tests import oracle
from tests.store.small import key_of
from vkvmap import LayerSpec, LayerTable, Region, TransferPlan, derive_canonical_mappings
from vkvmap.cache import CacheView
from vkvmap.configuration import Configuration
from vkvmap.format import Witness
from vkvmap.identity import Identity
from vkvmap.mapping import Mappings
from vkvmap.paged import paged_layer
from vkvmap.sections import sections_for
from vkvmap.store import CanonicalStore
from vkvmap.store_witness import (
    RankWitness,
    WitnessBoard,
    differing,
    entries_of,
    witnesses_of,
)

TOKENS, CHUNKS = 32, 2
LAYERS = LayerTable(
    [
        LayerSpec.attention("layers.0", num_kv_heads=2, head_size=6, group="g"),
        LayerSpec.attention("layers.1", num_kv_heads=2, head_size=6, group="g"),
        LayerSpec.mla("layers.2", row_bytes=21, group="g"),
    ]
)
IDENTITY = Identity("org/model", "abc", LAYERS, TOKENS)
ENTRIES = entries_of(LAYERS, "g")


@dataclass
class Side:
    """All ranks of one configuration in this process, filled from the truth or poisoned."""

    configuration: Configuration
    filled: bool

    def __post_init__(self) -> None:
        side = self.configuration
        self.memory: list[dict[str, np.ndarray]] = []
        self.views: list[dict[str, CacheView]] = []
        self.mappings: list[Mappings] = []
        for rank in range(side.grid.size):
            memory, views = {}, {}
            for name, spec in LAYERS.items():
                layer = paged_layer(spec, side, rank, num_blocks=self.pages * CHUNKS)
                array = np.full((layer.shape[0], layer.page_bytes), 0xDB, np.uint8)
                if self.filled:
                    self.fill(array, spec, layer.layout.name, rank)
                memory[name], views[name] = array, layer.view(array.ctypes.data)
            self.memory.append(memory)
            self.views.append(views)
            self.mappings.append(
                derive_canonical_mappings(
                    LAYERS, views, side.grid, rank, family="universal", strict=True
                )
            )

    @property
    def pages(self) -> int:
        return TOKENS // self.configuration.span

    def fill(self, array: np.ndarray, spec: LayerSpec, layout: str, rank: int) -> None:
        side = self.configuration
        slots = oracle.tokens_of(side.grid, rank, side.block_size, True)
        heads = oracle.parts_of(2, side.tp, rank % side.tp) if spec.num_kv_heads else None
        for block in range(self.pages * CHUNKS):
            tokens = [block * side.span + slot for slot in slots]
            array[block] = oracle.page(layout, truth(spec).some(tokens, heads))

    def witness(self, rank: int) -> RankWitness:
        return RankWitness(self.mappings[rank], self.views[rank], "g", TOKENS)

    def blocks(self, row: int) -> range:
        return range(row * self.pages, (row + 1) * self.pages)

    def move(self, region: Region, *, store: bool, mappings: list[Mappings] | None = None) -> None:
        pages = np.arange(self.pages * CHUNKS)
        for rank, views in enumerate(self.views):
            mapped = (mappings or self.mappings)[rank]
            plan = TransferPlan(mapped, views, region, chunk_tokens=TOKENS)
            (plan.store if store else plan.load)((pages, pages)).check()
            plan.close()

    def found(self, row: int, replica: int) -> list[Witness]:
        """What one complete set of replicas has in its caches."""
        sums = sum(
            self.witness(rank).loaded(self.blocks(row), replica)
            for rank in range(self.configuration.grid.size)
        )
        return witnesses_of(ENTRIES, sums)


def truth(spec: LayerSpec) -> oracle.Truth:
    return oracle.truth_of(spec, TOKENS * CHUNKS, oracle.drawn(LAYERS.index(spec.name)))


def expected(row: int) -> list[Witness]:
    """The definition in docs/format.md, in whole numbers, one word at a time."""
    witnesses = []
    for layer, head in ENTRIES:
        spec = list(LAYERS.values())[layer]
        lanes = [0, 0]
        for token in range(TOKENS):
            heads = [head] if spec.num_kv_heads else None
            cell = oracle.universal(truth(spec).some([row * TOKENS + token], heads)).tobytes()
            words = -(-len(cell) // 8)
            cell = cell.ljust(8 * words, b"\0")
            for word in range(words):
                value = int.from_bytes(cell[8 * word : 8 * word + 8], "little")
                for lane in range(2):
                    x = ((token * words + word) * 2 + lane + 1) * 0x9E3779B97F4A7C15 % 2**64
                    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
                    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
                    lanes[lane] += value * (x ^ x >> 31 | 1)
        digest = b"".join((lane % 2**64).to_bytes(8, "little") for lane in lanes)
        witnesses.append(Witness(layer, head, digest))
    return witnesses


CONFIGURATIONS = [
    "tp=1,layout=packed_nhd,block=16",
    "tp=4,dcp=2,layout=split_nhd,block=8",
    "tp=2,layout=split_hnd,block=32",
    "tp=4,layout=packed_hnd,block=4",
    "tp=4,dcp=2,interleave=2,layout=split_hnd,block=8",
]


def stored_through(path, source: Side) -> list[tuple[Witness, ...]]:
    """Store `source` with its witnesses; what comes back with the chunks."""
    size = source.configuration.grid.size
    sections = sections_for(source.mappings[0], TOKENS, CHUNKS)
    board_section = WitnessBoard.section("g/witness", CHUNKS, size, ENTRIES)
    with Region.create([*sections, board_section]) as region:
        source.move(region, store=True)
        board = WitnessBoard(region, "g/witness", ENTRIES)
        for row in range(CHUNKS):
            for rank in range(size):
                board.leave(row, rank, source.witness(rank).stored(row, source.blocks(row)))
        keys = [key_of(row) for row in range(CHUNKS)]
        with CanonicalStore(
            path, IDENTITY, region=region, witnesses={"g": board.witnesses}
        ) as store:
            assert store.put(keys, "g", range(CHUNKS)).wait(30)
            job = store.get(keys, "g", range(CHUNKS))
            assert job.wait(30) and job.good.all()
            return [job.witnesses[row] for row in range(CHUNKS)]


@pytest.mark.parametrize("source", CONFIGURATIONS)
def test_witnesses_are_what_the_specification_says_whoever_stores(tmp_path, source):
    kept = stored_through(tmp_path, Side(Configuration.parse(source), True))
    for row in range(CHUNKS):
        assert list(kept[row]) == expected(row)


@pytest.mark.parametrize("target", CONFIGURATIONS)
def test_every_replica_that_loaded_right_agrees_with_the_witness(tmp_path, target):
    source = Side(Configuration.parse(CONFIGURATIONS[1]), True)
    kept = stored_through(tmp_path, source)
    loaded = Side(Configuration.parse(target), False)
    with Region.create(sections_for(source.mappings[0], TOKENS, CHUNKS)) as region:
        source.move(region, store=True)
        loaded.move(region, store=False)
        witness = loaded.witness(0)
        assert witness.covered == {0, 1, 2}
        for row in range(CHUNKS):
            for replica in range(witness.replicas):
                found = loaded.found(row, replica)
                assert differing(kept[row], found, witness.covered) == []
            # Spoil one byte of one rank's cache: exactly its layer and head differ.
            spoilt = loaded.memory[-1]["layers.1"]
            spoilt[loaded.blocks(row)[0], 0] ^= 1
            wrong = {
                entry
                for replica in range(witness.replicas)
                for entry in differing(kept[row], loaded.found(row, replica), witness.covered)
            }
            assert wrong and wrong <= {(1, 0), (1, 1)} and len(wrong) == 1
            spoilt[loaded.blocks(row)[0], 0] ^= 1


@pytest.mark.parametrize("lying", ["store", "load"])
def test_a_mapping_that_swaps_heads_passes_every_page_digest_but_not_the_witness(tmp_path, lying):
    source = Side(Configuration.parse("tp=2,layout=packed_nhd,block=16"), True)
    loaded = Side(Configuration.parse("tp=2,layout=split_nhd,block=8"), False)
    kept = stored_through(tmp_path, source)
    with Region.create(sections_for(source.mappings[0], TOKENS, CHUNKS)) as region:
        liar = source if lying == "store" else loaded
        # Each rank moves its bytes as if it were the other one.
        swapped = [
            Mappings(**{**vars(mine), "by_layer": other.by_layer})
            for mine, other in zip(liar.mappings, liar.mappings[::-1], strict=True)
        ]
        source.move(region, store=True, mappings=swapped if lying == "store" else None)
        loaded.move(region, store=False, mappings=swapped if lying == "load" else None)
        found = loaded.found(0, 0)
        assert differing(kept[0], found, loaded.witness(0).covered) == [
            (0, 0),
            (0, 1),
            (1, 0),
            (1, 1),
        ]


def test_a_layer_that_one_side_could_not_witness_is_not_held_against_the_other():
    zeros, real = Witness(0, 0, bytes(16)), Witness(0, 0, b"x" * 16)
    assert differing([zeros], [real], frozenset([0])) == []
    assert differing([real], [zeros], frozenset()) == []
    assert differing([real], [zeros], frozenset([0])) == [(0, 0)]
