"""A plan over torch tensors on a GPU and a pinned region, as a caller of the package makes it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.gpu.sides import MOVERS, SHORT, behind_slow_work, slow, with_longer_work
from vkvmap import (
    CacheView,
    LayerSpec,
    LayerTable,
    RankGrid,
    Region,
    TransferPlan,
    cuda,
    derive_canonical_mappings,
)
from vkvmap.errors import PlanError, StalePlanError
from vkvmap.sections import sections_for
from vkvmap.transfer import Engine

PAGES, TOKENS, HEADS, SIZE = 6, 4, 4, 16
LAYER = LayerSpec.attention("layers.0", num_kv_heads=HEADS, head_size=SIZE, dtype="uint8")
TABLE = LayerTable([LAYER, LAYER.renamed("layers.1")])
EVERY = np.arange(PAGES, dtype=np.int64)


class Rank:
    """One rank's caches on the GPU: the pages of the truth in shuffled blocks, or zeros."""

    def __init__(self, torch: Any, tp: int, rank: int, truth: dict[str, np.ndarray] | None) -> None:
        self.torch, self.grid, self.rank = torch, RankGrid(tp=tp), rank
        self.blocks = np.random.default_rng(rank).permutation(PAGES).astype(np.int64)
        self.heads = slice(rank * HEADS // tp, (rank + 1) * HEADS // tp)
        shape = (PAGES, 2, TOKENS, HEADS // tp, SIZE)
        self.tensors = {}
        for name in TABLE:
            array = np.zeros(shape, np.uint8)
            if truth is not None:
                array[self.blocks] = truth[name][:, :, :, self.heads]
            self.tensors[name] = torch.from_numpy(array).cuda()
        torch.cuda.synchronize()

    def views(self) -> dict[str, CacheView]:
        return {n: CacheView.of(tensor, "split_nhd", TOKENS) for n, tensor in self.tensors.items()}

    def mappings(self) -> Any:
        return derive_canonical_mappings(TABLE, self.views(), self.grid, self.rank, strict=True)

    def pages(self, name: str) -> np.ndarray:
        """What is in the rank's blocks, in the order of the pages."""
        self.torch.cuda.synchronize()
        return self.tensors[name].cpu().numpy()[self.blocks]


@pytest.mark.parametrize("mover", ["auto", *MOVERS])
def test_what_two_ranks_store_one_loads_layer_by_layer_and_after_sleep(
    gpu: Any, engine: Engine, mover: str
) -> None:
    rng = np.random.default_rng(7)
    shape = (PAGES, 2, TOKENS, HEADS, SIZE)
    truth = {name: rng.integers(1, 256, shape, np.uint8) for name in TABLE}
    first, second, whole = Rank(gpu, 2, 0, truth), Rank(gpu, 2, 1, truth), Rank(gpu, 1, 0, None)
    options = {"mover": mover, "engine": engine}
    with Region.create(sections_for(first.mappings(), TOKENS, PAGES)) as region:
        assert cuda.pin(region).pinned, region.registration.why_not
        stream = gpu.cuda.Stream()
        for rank in (first, second):
            with TransferPlan(rank.mappings(), rank.views(), region, **options) as plan:
                plan.store((rank.blocks, EVERY), stream=stream).check(60)
        plan = TransferPlan(whole.mappings(), whole.views(), region, **options)

        def look(cycles: int) -> bool:
            plan.load((whole.blocks, EVERY), stream=stream).check(60)  # prepares what there is to
            over = slow(gpu, stream, cycles)
            with gpu.cuda.stream(stream):
                for tensor in whole.tensors.values():
                    tensor.zero_()
            job = plan.load((whole.blocks, EVERY), stream=stream, layers=range(1, 2))
            in_time = not over.query()
            job.check(60)
            assert not whole.pages("layers.0").any()
            assert np.array_equal(whole.pages("layers.1"), truth["layers.1"])
            return in_time

        with_longer_work(look, SHORT)
        plan.load((whole.blocks, EVERY), stream=stream).check(60)
        assert np.array_equal(whole.pages("layers.0"), truth["layers.0"])
        plan.invalidate("the engine sleeps")
        with pytest.raises(StalePlanError, match="the engine sleeps"):
            plan.load((whole.blocks, EVERY))
        woken = Rank(gpu, 1, 0, None)
        with plan.rebuild(woken.views()) as plan:
            plan.load((woken.blocks, EVERY), stream=stream).check(60)
        for name in TABLE:
            assert np.array_equal(woken.pages(name), truth[name])


@pytest.mark.parametrize("mover", MOVERS)
def test_a_job_keeps_what_it_was_given_until_its_last_byte(
    gpu: Any, engine: Engine, mover: str
) -> None:
    def look(cycles: int) -> bool:
        rank = Rank(gpu, 1, 0, None)
        sizes = [tensor.nbytes for tensor in rank.tensors.values()]
        with Region.create(sections_for(rank.mappings(), TOKENS, PAGES)) as region:
            assert cuda.pin(region).pinned, region.registration.why_not
            plan = TransferPlan(rank.mappings(), rank.views(), region, mover=mover, engine=engine)
            plan.store((rank.blocks, EVERY)).check(60)
            for tensor in rank.tensors.values():
                tensor.fill_(0x5C)
            gpu.cuda.synchronize()
            stream, over = behind_slow_work(gpu, cycles)
            job = plan.store((rank.blocks, EVERY), stream=stream)
            del plan, rank, tensor
            # Whoever allocates as much now, on the stream of the tensors, gets memory let go of.
            others = [gpu.zeros(size, dtype=gpu.uint8, device="cuda") for size in sizes]
            in_time = not over.query()
            job.check(60)
            for section in region.sections:
                assert (region.rows(section.name) == 0x5C).all()
            assert not any(other.cpu().numpy().any() for other in others)
        return in_time

    with_longer_work(look, SHORT)


def test_a_mover_that_cannot_reach_the_cache_is_refused(gpu: Any, engine: Engine) -> None:
    rank = Rank(gpu, 1, 0, None)
    mappings = rank.mappings()
    with Region.create(sections_for(mappings, TOKENS, PAGES)) as region:
        with pytest.raises(PlanError, match="cannot reach caches on 'cuda:0'"):
            TransferPlan(mappings, rank.views(), region, mover="host", engine=engine)
        with TransferPlan(mappings, rank.views(), region, mover="kernel", engine=engine) as plan:
            with pytest.raises(PlanError, match="on cuda:0, which the host mover cannot reach"):
                engine.submit(plan.packed.native, 0, [(0, EVERY, EVERY)])
            with pytest.raises(PlanError, match=r"not registered with CUDA\. Pin the region"):
                plan.store((rank.blocks, EVERY))
