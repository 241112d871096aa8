"""Rows written by the ranks of one configuration and read by those of another, byte by byte.

What the CPU platform cannot run in the real engine (decode context parallelism, token-major pages)
is shown here: engine specs and tensors in, rows in the engine's memory between, every element of
every reader's cache compared with the truth it stands for. Digests are written and checked on the
way, by code that knows no mapping.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.vllm.test_description import AttentionSpec
from vkvmap import RankGrid, TransferPlan, derive_canonical_mappings
from vkvmap.integrations.vllm.digests import Digests
from vkvmap.integrations.vllm.layers import GroupFacts, LayerFacts, ModelFacts, describe
from vkvmap.integrations.vllm.naming import identity
from vkvmap.integrations.vllm.options import Options
from vkvmap.integrations.vllm.rows import RowLayout
from vkvmap.integrations.vllm.setup import Setup

LAYERS = ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn")
HEADS, DIM, CHUNK, ROWS = 2, 8, 24, 3


@dataclass(frozen=True)
class Engine:
    """A parallel configuration of the engine, and how it keeps its pages."""

    tp: int = 1
    dcp: int = 1
    interleave: int = 1
    block: int = 12
    layout: str = "nhd"

    @property
    def grid(self) -> RankGrid:
        return RankGrid(
            self.tp, self.dcp, interleave=self.interleave, pcp_mode="replicates",
            world_size=self.tp,
        )  # fmt: skip

    @property
    def span(self) -> int:
        return self.block * self.dcp

    @property
    def blocks(self) -> int:
        return ROWS * CHUNK // self.span + 1

    def heads(self, rank: int) -> list[int]:
        if HEADS >= self.tp:
            share = HEADS // self.tp
            return list(range(rank * share, (rank + 1) * share))
        return [rank * HEADS // self.tp]

    def token(self, rank: int, slot: int) -> int:
        """Token of the span that a slot of this rank's block holds."""
        shard, step = rank % self.dcp, self.interleave
        return slot if self.dcp == 1 else (slot // step * self.dcp + shard) * step + slot % step

    def tensor(self, rank: int) -> np.ndarray:
        heads = len(self.heads(rank))
        if self.layout == "nhd":
            return np.zeros((self.blocks, self.block, heads, 2 * DIM), np.float32).transpose(
                0, 2, 1, 3
            )
        return np.zeros((self.blocks, heads, self.block, 2 * DIM), np.float32)

    def put(self, tensor: np.ndarray, rank: int, block: int, page: int, layer: int) -> None:
        """Fill a block with the truth of a page."""
        for h, head in enumerate(self.heads(rank)):
            for slot in range(self.block):
                cell = truth(layer, page * self.span + self.token(rank, slot), head)
                if self.layout != "cpu":
                    tensor[block, h, slot] = cell
                    continue
                flat = tensor[block, h].reshape(-1)
                flat[: self.block * DIM].reshape(DIM, self.block)[:, slot] = cell[:DIM]
                flat[self.block * DIM :].reshape(self.block, DIM)[slot] = cell[DIM:]


def truth(layer: int, token: int, head: int) -> np.ndarray:
    """K and V of one cell: numbers that occur once."""
    return ((layer * 1000 + token) * HEADS + head) * 2 * DIM + np.arange(2 * DIM, dtype=np.float32)


class Rank:
    """One rank with its caches, set up as the integration sets itself up."""

    def __init__(self, engine: Engine, rank: int, family: str, memory: np.ndarray) -> None:
        self.engine, self.rank = engine, rank
        self.tensors = [engine.tensor(rank) for _ in LAYERS]
        spec = AttentionSpec(len(engine.heads(rank)), DIM, DIM, engine.block)
        cpu = engine.layout == "cpu"
        layers = {
            name: LayerFacts(
                name, spec, (tensor,), np.zeros((engine.blocks, 1), np.uint8), "Attention",
                "vec" if cpu else None,
            )
            for name, tensor in zip(LAYERS, self.tensors, strict=True)
        }  # fmt: skip
        model = ModelFacts(
            {}, HEADS, "float32", "cpu" if cpu else "cuda", "LBNHC", engine.tp, engine.dcp
        )
        described = describe(model, [GroupFacts("0", LAYERS, engine.span)], layers)
        mappings = derive_canonical_mappings(
            described.table, described.caches, engine.grid, rank, family=family, strict=True
        )
        options = Options(family=family, verify=True)  # type: ignore[arg-type]
        self.rows = RowLayout.of(mappings, {"0": CHUNK}, verify=True)
        self.name = identity(
            mappings, described.caches, options, model="m", revision="r", quantisation="",
            tokens={"0": CHUNK}, placement={},
        ).name  # fmt: skip
        self.pages = self.rows.pages["0"]
        setup: Any = Setup(
            mappings, described.caches, self.rows, None, ("0",), self.pages, True, (), (), rank
        )  # type: ignore[arg-type]
        region = self.rows.region(memoryview(memory), ROWS)
        self.plan = TransferPlan(mappings, described.caches, region, chunk_tokens={"0": CHUNK})
        self.digests = Digests(setup, region.view, ROWS)

    def pairs(self) -> dict[str, Any]:
        """Every page, on blocks in an order of this rank's own."""
        count = ROWS * self.pages
        order = np.random.default_rng(self.rank).permutation(self.engine.blocks)[:count]
        return {"0": (order, np.arange(count))}

    def fill(self) -> None:
        for block, page in zip(*self.pairs()["0"], strict=True):
            for layer, tensor in enumerate(self.tensors):
                self.engine.put(tensor, self.rank, int(block), int(page), layer)


UNIVERSAL = [
    Engine(),
    Engine(tp=2, layout="hnd"),
    Engine(tp=4, dcp=2),
    Engine(tp=4, dcp=2, interleave=3, layout="hnd", block=6),
    Engine(tp=2, layout="cpu", block=8),
    Engine(block=24, layout="cpu"),
]
NATIVE = [Engine(layout="cpu"), Engine(tp=2, layout="cpu"), Engine(tp=4, layout="cpu")]


@pytest.mark.parametrize(
    ("family", "writer", "reader"),
    [("universal", a, b) for a in UNIVERSAL for b in UNIVERSAL]
    + [("native", a, b) for a in NATIVE for b in NATIVE],
    ids=str,
)
def test_what_one_configuration_stores_another_loads(
    family: str, writer: Engine, reader: Engine
) -> None:
    first = Rank(writer, 0, family, np.zeros(1 << 20, np.uint8)[: _size(writer, family)])
    memory = np.zeros(ROWS * first.rows.row_bytes, np.uint8)
    names = set()
    for index in range(writer.tp):
        rank = Rank(writer, index, family, memory)
        rank.fill()
        rank.digests.write(rank.pairs())
        rank.plan.store(rank.pairs()).check()
        names.add(rank.name)
    for index in range(reader.tp):
        rank = Rank(reader, index, family, memory)
        rank.plan.load(rank.pairs()).check()
        wanted = Rank(reader, index, family, memory.copy())
        wanted.fill()
        for mine, theirs in zip(rank.tensors, wanted.tensors, strict=True):
            assert np.array_equal(mine, theirs)
        assert rank.digests.check(rank.pairs()) is None
        names.add(rank.name)
    assert len(names) == 1


def _size(engine: Engine, family: str) -> int:
    # Payload and digests of a row, which the oracle knows: elements of 4 bytes, digests of 8.
    payload = len(LAYERS) * CHUNK * HEADS * (2 * DIM * 4 + 8)
    return ROWS * -(-payload // 4096) * 4096


def test_a_changed_byte_is_found_and_named() -> None:
    engine = Engine(tp=2, layout="cpu")
    memory = np.zeros(_size(engine, "native"), np.uint8)
    for index in range(2):
        rank = Rank(engine, index, "native", memory)
        rank.fill()
        rank.digests.write(rank.pairs())
        rank.plan.store(rank.pairs()).check()
    memory[5] ^= 1  # in row 0, layer 0, head 0
    reports = []
    for index in range(2):
        rank = Rank(engine, index, "native", memory)
        rank.plan.load(rank.pairs()).check()
        reports.append(rank.digests.check(rank.pairs()))
    assert reports[1] is None
    assert reports[0] is not None and "KV head 0" in reports[0] and LAYERS[0] in reports[0]
