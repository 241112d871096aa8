"""Who may go before whom: plans, regions, registrations and what the GPU still does with them.

The same promises are kept on the CPU by tests/test_transfer.py, with stand-ins for a registration.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.gpu.sides import LOAD, LONG, MOVERS, STORE, ids, slow, small
from tests.gpu.test_gpu_plan import EVERY, PAGES, TABLE, TOKENS, Rank
from vkvmap import Region, TransferPlan, cuda
from vkvmap.errors import PlanError, RegionError, StalePlanError
from vkvmap.sections import sections_for
from vkvmap.transfer import Engine, Job


class Stored:
    """A pinned region that holds what the caches held, which are empty now; a plan over both."""

    def __init__(self, torch: Any, engine: Engine, mover: str) -> None:
        rng = np.random.default_rng(5)
        shape = (PAGES, 2, TOKENS, 4, 16)
        self.truth = {name: rng.integers(1, 256, shape, np.uint8) for name in TABLE}
        self.rank = Rank(torch, 1, 0, self.truth)
        mappings = self.rank.mappings()
        self.region = Region.create(sections_for(mappings, TOKENS, PAGES))
        assert cuda.pin(self.region).pinned, self.region.registration.why_not
        self.plan = TransferPlan(
            mappings, self.rank.views(), self.region, mover=mover, engine=engine
        )
        self.plan.store((self.rank.blocks, EVERY)).check(60)
        for tensor in self.rank.tensors.values():
            tensor.zero_()
        torch.cuda.synchronize()

    def check(self) -> None:
        for name, pages in self.truth.items():
            assert np.array_equal(self.rank.pages(name), pages)


def held_back(engine: Engine, world: Stored, stream: Any) -> Job:
    """A load that has not begun: its lane stands still."""
    engine.stall(["load"])
    return world.plan.load((world.rank.blocks, EVERY), stream=stream)


def under_way(engine: Engine, world: Stored, stream: Any) -> Job:
    """A load whose work the GPU has, behind a slow kernel."""
    slow(world.rank.torch, stream, LONG)
    return world.plan.load((world.rank.blocks, EVERY), stream=stream)


Begun = Callable[[Engine, Stored, Any], Job]


@pytest.mark.parametrize("begun", [held_back, under_way])
@pytest.mark.parametrize("mover", MOVERS)
def test_a_region_stays_for_a_transfer_whose_plan_is_dropped(
    gpu: Any, engine: Engine, mover: str, begun: Begun
) -> None:
    world = Stored(gpu, engine, mover)
    stream = gpu.cuda.Stream()
    job = begun(engine, world, stream)
    del world.plan
    gc.collect()
    assert not job.done()
    with pytest.raises(RegionError, match="1 plans or stores"):
        world.region.close()
    assert world.region.pinned
    engine.resume()
    job.check(60)
    world.check()
    world.region.close()
    assert not world.region.pinned


@pytest.mark.parametrize("begun", [held_back, under_way])
@pytest.mark.parametrize("mover", MOVERS)
@pytest.mark.parametrize("force", [True, False])
def test_memory_stays_registered_for_a_transfer_whose_region_is_gone(
    gpu: Any, engine: Engine, mover: str, begun: Begun, force: bool
) -> None:
    world = Stored(gpu, engine, mover)
    pinning = world.region.registration
    assert pinning.pieces
    stream = gpu.cuda.Stream()
    job = begun(engine, world, stream)
    del world.plan
    assert not job.done()
    if force:
        world.region.close(force=True)
    del world.region
    gc.collect()
    assert pinning.pinned and pinning.pieces
    del pinning
    engine.resume()
    job.check(60)
    world.check()


def test_a_region_that_is_pinned_again_keeps_its_registration(gpu: Any, engine: Engine) -> None:
    world = Stored(gpu, engine, "kernel")
    first, votes = world.region.registration, []
    assert cuda.pin(world.region, agree=lambda ok: votes.append(ok) or ok) is first
    gc.collect()
    assert votes == [True] and world.region.pinned
    world.plan.load((world.rank.blocks, EVERY)).check(60)
    world.check()
    world.plan.close()
    world.region.close()


@pytest.mark.parametrize("mover", ["auto", *MOVERS])
def test_a_plan_refuses_once_its_registration_is_gone_and_can_be_rebuilt(
    gpu: Any, engine: Engine, mover: str
) -> None:
    world = Stored(gpu, engine, mover)
    world.region.registration.release()
    for _ in range(2):  # the second time the region is pinned, but not as it was
        with pytest.raises(
            StalePlanError, match="the registration was released; pin the region again"
        ):
            world.plan.load((world.rank.blocks, EVERY))
        assert cuda.pin(world.region).pinned
    with world.plan.rebuild(world.rank.views()) as plan:
        plan.load((world.rank.blocks, EVERY)).check(60)
    world.check()
    world.region.close()


@pytest.mark.parametrize("mover", MOVERS)
def test_a_region_may_be_pinned_after_its_plan_is_made(
    gpu: Any, engine: Engine, mover: str
) -> None:
    rank = Rank(
        gpu, 1, 0, {name: np.full((PAGES, 2, TOKENS, 4, 16), 7, np.uint8) for name in TABLE}
    )
    mappings = rank.mappings()
    with Region.create(sections_for(mappings, TOKENS, PAGES)) as region:
        plan = TransferPlan(mappings, rank.views(), region, mover=mover, engine=engine)
        if mover == "kernel":
            with pytest.raises(PlanError, match=r"not registered with CUDA\. Pin the region"):
                plan.store((rank.blocks, EVERY))
        else:
            plan.store((rank.blocks, EVERY)).check(60)
        for section in region.sections:
            region.rows(section.name)[:] = 0
        pinning = cuda.pin(region)
        assert pinning.pinned, pinning.why_not
        plan.store((rank.blocks, EVERY)).check(60)
        gpu.cuda.synchronize()
        assert all((region.rows(section.name) == 7).all() for section in region.sections)
        pinning.release()
        with pytest.raises(StalePlanError, match="the registration was released"):
            plan.store((rank.blocks, EVERY))
        plan.close()


@pytest.mark.parametrize("direction", ["STORE", "LOAD"])
@pytest.mark.parametrize("told", ["kernel", "host"])
def test_a_mover_that_the_environment_names_and_that_cannot_is_a_plan_error(
    gpu: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch, told: str, direction: str
) -> None:
    rank = Rank(gpu, 1, 0, None)
    mappings = rank.mappings()
    with Region.create(sections_for(mappings, TOKENS, PAGES)) as region:
        monkeypatch.setenv(f"VKVMAP_MOVER_{direction}", told)
        with pytest.raises(PlanError, match=f"VKVMAP_MOVER_{direction}='{told}'.*unset it"):
            TransferPlan(mappings, rank.views(), region, engine=engine)


@pytest.mark.parametrize("mover", MOVERS)
def test_nothing_is_asked_of_the_devices_when_a_transfer_is_put_on_a_stream(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, mover: str
) -> None:
    world, stream = small(gpu), gpu.cuda.Stream()
    cuda.enqueue(mover, world.plan, STORE, [(0, ids(0), ids(1))], stream)
    monkeypatch.setattr(cuda, "status", lambda: pytest.fail("asked"))
    cuda.enqueue(mover, world.plan, STORE, [(0, ids(2), ids(3))], stream)
    world.pages[1], world.pages[3] = world.blocks[0], world.blocks[2]
    world.check(mover)


def test_a_stream_that_is_none_is_the_default_one(gpu: Any) -> None:
    world = small(gpu)
    transfer = cuda.GraphTransfer(world.plan, LOAD, {0: 1})
    transfer.set_ids([(0, ids(5), ids(6))])
    transfer.launch(None)
    cuda.enqueue("kernel", world.plan, STORE, [(0, ids(0), ids(1))], None)
    world.blocks[5], world.pages[1] = world.pages[6], world.blocks[0]
    world.check("the default stream")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("host", STORE, (0,), None), "runs on no stream"),
        (("kernel", 2, (0,), None), "direction must be"),
        (("kernel", STORE, (16,), None), "block 16 is not in"),
        (("kernel", STORE, (0, 1), None), "pairs"),
        (("kernel", STORE, (0,), True), "no CUDA stream"),
        (("copy_engine", LOAD, (0,), 1.5), "no CUDA stream"),
    ],
)
def test_what_cannot_be_put_on_a_stream_is_a_plan_error(
    gpu: Any, arguments: tuple[str, int, tuple[int, ...], Any], message: str
) -> None:
    world = small(gpu)
    mover, direction, blocks, stream = arguments
    with pytest.raises(PlanError, match=message):
        cuda.enqueue(mover, world.plan, direction, [(0, ids(*blocks), ids(0))], stream)
    world.check(message)
