"""Plans executed for real: derive, pack, move, and compare every byte with the oracle.

Writers' and readers' caches are strided views into poisoned memory, so a stray byte shows; what
lies between pages, between rows and beyond them must come out as it went in.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import lcm

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracle
from tests.worlds import World, worlds
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
from vkvmap.errors import PlanError, RefusedError, RegionError, StalePlanError
from vkvmap.region import Section
from vkvmap.sections import sections_for
from vkvmap.transfer import Engine, Job

POISON = 0xA5
ROWS = 3


@dataclass
class Cache:
    """One rank's cache of one layer: a padded, offset, permuted view into poisoned storage."""

    storage: np.ndarray
    tensor: np.ndarray

    @classmethod
    def for_world(cls, world: World, blocks: int, pad: int, offset: int) -> Cache:
        shape = world.view(blocks).tensors[0].shape
        order = oracle.STORED.get(world.layout, tuple(range(len(shape))))
        named = 1 if world.layout in ("planar", "cpu_hnd") else len(shape) - 1
        padded = [shape[d] + (pad if d < named else 0) for d in order]
        storage = np.full(offset + int(np.prod(padded)) + 7, POISON, dtype=np.uint8)
        body = storage[offset : offset + int(np.prod(padded))].reshape(padded)
        tensor = body.transpose(np.argsort(order))[tuple(slice(0, n) for n in shape)]
        return cls(storage, tensor)


def kernel_blocks_of(world: World, held: oracle.Truth) -> Iterator[oracle.Truth]:
    size = world.block_size // world.kernel_blocks
    for start in range(0, world.block_size, size):
        yield oracle.Truth({n: a[start : start + size] for n, a in held.fields.items()})


def fill(world: World, cache: Cache, block: int, held: oracle.Truth) -> None:
    for index, part in enumerate(kernel_blocks_of(world, held)):
        oracle.write_block(cache.tensor, world.layout, block * world.kernel_blocks + index, part)


def held_part(world: World, truth: oracle.Truth, page: int, rank: int) -> oracle.Truth:
    span = world.block_size * world.shards
    part = {n: a[page * span : (page + 1) * span] for n, a in truth.fields.items()}
    return world.held(oracle.Truth(part), rank)


def plan_for(
    world: World, cache: Cache, rank: int, region: Region, tokens: int, writers: str = "turns"
) -> TransferPlan:
    caches = {
        "layer": CacheView.of(
            cache.tensor, world.layout, world.block_size, kernel_blocks=world.kernel_blocks
        )
    }
    mappings = derive_canonical_mappings(
        LayerTable([world.spec]), caches, world.grid, rank, family=world.family, strict=True
    )
    return TransferPlan(mappings, caches, region, chunk_tokens=tokens, writers=writers)


@settings(max_examples=120)
@given(worlds(legal=True), worlds(legal=True), st.data())
def test_store_under_one_configuration_and_load_under_another(
    writer: World, reader: World, data: st.DataObject
) -> None:
    layouts = {"indexer": ["planar"], "mla": ["mla"]}.get(
        writer.spec.kind, [writer.layout, "packed_hnd", "packed_nhd"]
    )
    writer = replace(writer, family="universal")
    reader = replace(
        reader,
        spec=writer.spec,
        layout=data.draw(st.sampled_from(layouts)),
        family="universal",
        kernel_blocks=1,
    )
    if not reader.legal:
        return
    tokens = lcm(writer.block_size * writer.shards, reader.block_size * reader.shards)
    truths = [oracle.truth_of(writer.spec, tokens, oracle.drawn(seed)) for seed in range(ROWS)]
    payload = writer.spec.canonical_bytes(tokens)
    pad, offset = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 16))
    policy = data.draw(st.sampled_from(["turns", "first", "split"]))
    padding = data.draw(st.sampled_from([None, 0, 1, 64, 256]))
    sections = [Section("0", ROWS, payload, None if padding is None else payload + padding)]
    with Region.create(sections, backing="private") as region:
        region.view[:] = POISON
        for rank in range(writer.grid.size):
            _store(writer, rank, region, tokens, truths, pad, offset, policy)
        for row, truth in enumerate(truths):
            assert np.array_equal(region.row("0", row), oracle.universal(truth))
        start, end = region.section("0").offset, region.section("0").offset + sections[0].nbytes
        between = region.view[start:end].reshape(ROWS, -1)[:, payload:]
        assert (between == POISON).all()
        for rank in range(reader.grid.size):
            _load(reader, rank, region, tokens, truths, pad, offset)


def _pairs(world: World, tokens: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Every page of every row, in random order, on randomly chosen blocks."""
    pages = ROWS * tokens // (world.block_size * world.shards)
    rng = np.random.default_rng(seed)
    return rng.permutation(pages + 2)[:pages], rng.permutation(pages)


def _store(  # type: ignore[no-untyped-def]
    world: World, rank: int, region: Region, tokens: int, truths, pad: int, offset: int, policy: str
) -> None:
    blocks, pages = _pairs(world, tokens, rank)
    per_row = len(pages) // ROWS
    cache = Cache.for_world(world, len(pages) + 2, pad, offset)
    for block, page in zip(blocks, pages, strict=True):
        held = held_part(world, truths[page // per_row], page % per_row, rank)
        fill(world, cache, int(block), held)
    before = cache.storage.copy()
    with plan_for(world, cache, rank, region, tokens, policy) as plan:
        plan.store((blocks, pages)).check()
    assert np.array_equal(cache.storage, before)


def _load(
    world: World, rank: int, region: Region, tokens: int, truths, pad: int, offset: int
) -> None:  # type: ignore[no-untyped-def]
    blocks, pages = _pairs(world, tokens, rank + 100)
    per_row = len(pages) // ROWS
    cache = Cache.for_world(world, len(pages) + 2, pad, offset)
    wanted = Cache.for_world(world, len(pages) + 2, pad, offset)
    for block, page in zip(blocks, pages, strict=True):
        held = held_part(world, truths[page // per_row], page % per_row, rank)
        fill(world, wanted, int(block), held)
    before = np.array(region.view)
    with plan_for(world, cache, rank, region, tokens) as plan:
        plan.load((blocks, pages)).check()
    assert np.array_equal(cache.storage, wanted.storage)
    assert np.array_equal(region.view, before)


# ---- hybrid models: groups, private rows, padding ------------------------------------------------


def hybrid() -> tuple[LayerTable, dict[str, CacheView], dict[str, np.ndarray]]:
    """Two full layers, a sliding-window layer in its own group, and undescribed state."""
    table = LayerTable(
        [
            LayerSpec.attention("a", num_kv_heads=4, head_size=8, elem=1, group="full"),
            LayerSpec.attention("w", num_kv_heads=4, head_size=8, elem=1, group="window", window=8),
            LayerSpec.attention("b", num_kv_heads=4, head_size=8, elem=1, group="full"),
            LayerSpec.opaque("s", page_bytes=48, group="state"),
        ]
    )
    rng = np.random.default_rng(3)
    arrays = {
        "a": rng.integers(0, 256, (6, 2, 4, 4, 8), dtype=np.uint8),
        "w": rng.integers(0, 256, (6, 2, 8, 4, 8), dtype=np.uint8),
        "b": rng.integers(0, 256, (6, 2, 4, 4, 8), dtype=np.uint8),
        "s": rng.integers(0, 256, (6, 48), dtype=np.uint8),
    }
    caches = {
        "a": CacheView.of(arrays["a"], "split_nhd", 4),
        "w": CacheView.of(arrays["w"], "split_nhd", 8),
        "b": CacheView.of(arrays["b"], "split_nhd", 4),
        "s": CacheView.of(arrays["s"], "pages"),
    }
    return table, caches, arrays


TOKENS = {"full": 8, "window": 8, "state": 0}


def test_groups_move_with_their_own_blocks_and_opaque_state_in_private_rows() -> None:
    table, caches, arrays = hybrid()
    mappings = derive_canonical_mappings(table, caches, RankGrid(), 0)
    assert [refusal.layer for refusal in mappings.refusals] == ["s"]
    with Region.create(sections_for(mappings, TOKENS, 4), backing="private") as region:
        region.view[:] = POISON
        with TransferPlan(mappings, caches, region, chunk_tokens=TOKENS) as plan:
            # Chunk 1 of `full` is pages 2 and 3; only its second page is stored (partial chunk).
            job = plan.store({"full": ([5, 0], [3, 4]), "window": ([1], [2]), "state": ([2], [0])})
            job.check()
            full = region.row("full", 1)
            page = arrays["a"][0].size
            assert np.all(full[:page] == POISON)
            assert np.array_equal(full[page : 2 * page], arrays["a"][5].reshape(-1))
            assert np.array_equal(full[3 * page :], arrays["b"][5].reshape(-1))
            assert np.array_equal(region.row("window", 2), arrays["w"][1].reshape(-1))
            assert np.array_equal(region.row("state/private", 0), arrays["s"][2])
            saved = {name: array.copy() for name, array in arrays.items()}
            for array in arrays.values():
                array[:] = 0
            plan.load({"full": ([1], [3]), "state": ([4], [0])}).check()
    assert np.array_equal(arrays["a"][1], saved["a"][5])
    assert np.array_equal(arrays["b"][1], saved["b"][5])
    assert np.array_equal(arrays["s"][4], saved["s"][2])
    assert not arrays["w"].any() and not arrays["a"][[0, 2, 3, 4, 5]].any()


def test_canonical_rows_are_padded_on_demand_and_private_ones_are_not() -> None:
    table, caches, arrays = hybrid()
    mappings = derive_canonical_mappings(table, caches, RankGrid(), 0)

    def strides(**options) -> dict[str, int]:  # type: ignore[no-untyped-def]
        return {s.name: s.stride for s in sections_for(mappings, TOKENS, 4, **options)}

    assert strides() == {"full": 1024, "window": 512, "state/private": 128}
    padded = {"full": 1280, "window": 768, "state/private": 128}
    assert strides(row_padding=256) == padded
    assert strides(row_padding={"window": np.int64(128)}) == strides() | {"window": 640}
    sections = sections_for(mappings, TOKENS, 4, row_padding=256)
    with Region.create(sections, backing="private") as region:
        region.view[:] = POISON
        with TransferPlan(mappings, caches, region, chunk_tokens=TOKENS) as plan:
            plan.store({"full": ([5, 0, 1], [2, 3, 4])}).check()
        page = arrays["a"][0].size
        rows = region.rows("full")
        assert np.array_equal(rows[1][:page], arrays["a"][5].reshape(-1))
        assert np.array_equal(rows[1][-page:], arrays["b"][0].reshape(-1))
        assert np.array_equal(rows[2][2 * page : 3 * page], arrays["b"][1].reshape(-1))
        start = region.section("full").offset
        every = region.view[start : start + 4 * 1280].reshape(4, 1280)
        assert (every[:, 1024:] == POISON).all() and (every[[0, 3]] == POISON).all()


BAD_PADDINGS = [(bad, r"group 'full'.*row_padding") for bad in (-128, 64, 4.0, "256", None, True)]
BAD_PADDINGS += [
    ({"window": 100}, r"group 'window': row_padding=100.*multiple of 128"),
    ({"state": -1}, r"group 'state': row_padding=-1"),
    (
        {"ful": 256},
        r"row_padding names \['ful'\]; the model's groups are \['full', 'state', 'window'\]",
    ),
]


@pytest.mark.parametrize(("padding", "message"), BAD_PADDINGS)
def test_rows_are_not_padded_by_what_would_let_two_share_a_line(
    padding: object, message: str
) -> None:
    table, caches, _ = hybrid()
    mappings = derive_canonical_mappings(table, caches, RankGrid(), 0)
    with pytest.raises(PlanError, match=message):
        sections_for(mappings, TOKENS, 4, row_padding=padding)  # type: ignore[arg-type]


def test_a_range_of_layers_can_be_loaded_alone_with_progress() -> None:
    table, caches, arrays = hybrid()
    mappings = derive_canonical_mappings(table, caches, RankGrid(), 0)
    with Region.create(sections_for(mappings, TOKENS, 4), backing="private") as region:
        with TransferPlan(mappings, caches, region, chunk_tokens=TOKENS) as plan:
            plan.store({"full": ([0, 1], [0, 1])}).check()
            before = arrays["a"].copy()
            arrays["b"][:] = 0
            arrays["a"][:] = 0
            progress = np.zeros(len(table), dtype=np.uint32)
            plan.load({"full": ([0, 1], [0, 1])}, layers=range(0, 1), progress=progress).check()
            assert np.array_equal(arrays["a"][:2], before[:2])
            assert not arrays["b"].any()
            assert progress.tolist() == [1, 0, 0, 0]


BAD_PAIRS = [
    ({"full": ([6], [0])}, r"block.*6"),
    ({"full": ([-1], [0])}, r"block.*-1"),
    ({"full": ([0], [8])}, r"page.*8"),
    ({"full": ([0], [1 << 40])}, r"page"),
    ({"full": ([0, 1], [0])}, r"2 .*1|length"),
    ({"full": ([0, 1], [5, 5])}, r"page.*5"),
    ({"nowhere": ([0], [0])}, r"unknown group 'nowhere'"),
    ({"full": ([0.5], [0])}, r"integer"),
    ({"full": ([[0]], [[0]])}, r"one-dimensional"),
    (([0], [0]), r"pass a mapping"),
]


@pytest.mark.parametrize(("pairs", "message"), BAD_PAIRS)
def test_bad_ids_are_refused_and_nothing_moves(pairs: object, message: str) -> None:
    table, caches, _ = hybrid()
    mappings = derive_canonical_mappings(table, caches, RankGrid(), 0)
    with Region.create(sections_for(mappings, TOKENS, 4), backing="private") as region:
        region.view[:] = POISON
        with TransferPlan(mappings, caches, region, chunk_tokens=TOKENS) as plan:
            good = {"window": ([0], [0])}
            both = good | pairs if isinstance(pairs, dict) else pairs
            with pytest.raises(PlanError, match=message):
                plan.store(both)
            plan.store({"state": ([], [])}).check()
        for name in ("full", "window", "state/private"):
            for row in range(4):
                assert np.all(region.row(name, row) == POISON)


def test_loads_refuse_one_block_named_twice() -> None:
    table, caches, _ = hybrid()
    mappings = derive_canonical_mappings(table, caches, RankGrid(), 0)
    with Region.create(sections_for(mappings, TOKENS, 4), backing="private") as region:
        with TransferPlan(mappings, caches, region, chunk_tokens=TOKENS) as plan:
            with pytest.raises(PlanError, match=r"block.*3"):
                plan.load({"full": ([3, 3], [0, 1])})
            plan.store({"full": ([3, 3], [0, 1])}).check()  # one block to two pages is fine


def test_a_region_of_another_shape_is_refused() -> None:
    table, caches, _ = hybrid()
    mappings = derive_canonical_mappings(table, caches, RankGrid(), 0)
    with Region.create(sections_for(mappings, TOKENS, 4), backing="private") as region:
        with pytest.raises(PlanError, match="sections_for"):
            TransferPlan(mappings, caches, region, chunk_tokens=TOKENS | {"full": 16})
        with pytest.raises(PlanError, match="whole number of pages"):
            TransferPlan(mappings, caches, region, chunk_tokens=TOKENS | {"full": 6})


def test_a_plan_refuses_once_its_cache_or_region_is_gone() -> None:
    table, caches, arrays = hybrid()
    mappings = derive_canonical_mappings(table, caches, RankGrid(), 0)
    region = Region.create(sections_for(mappings, TOKENS, 4), backing="private")
    plan = TransferPlan(mappings, caches, region, chunk_tokens=TOKENS)
    with pytest.raises(RegionError):
        region.close()  # a plan is alive
    plan.invalidate("the engine sleeps")
    with pytest.raises(StalePlanError, match="the engine sleeps"):
        plan.store({"full": ([0], [0])})
    moved = {
        name: CacheView.of(arrays[name].copy(), view.layout, view.block_size)
        for name, view in caches.items()
    }
    fresh = plan.rebuild(moved)
    fresh.store({"full": ([0], [0])}).check()
    assert np.array_equal(region.row("full", 0)[: arrays["a"][0].size], arrays["a"][0].reshape(-1))
    with pytest.raises(StalePlanError, match="closed"):
        plan.load({"full": ([0], [0])})
    fresh.close()
    region.close()


def stalled_load(engine: Engine) -> tuple[Job, weakref.ref[Region], weakref.ref[np.ndarray]]:
    """A load that has not begun, of which the caller has kept the job alone."""
    table, caches, arrays = hybrid()
    mappings = derive_canonical_mappings(table, caches, RankGrid(), 0)
    region = Region.create(sections_for(mappings, TOKENS, 4), backing="private")
    plan = TransferPlan(mappings, caches, region, chunk_tokens=TOKENS, engine=engine)
    engine.stall()
    job = plan.load({"full": ([0], [0])})
    return job, weakref.ref(region), weakref.ref(arrays["a"])


def test_a_transfer_keeps_cache_and_memory_although_its_plan_is_dropped() -> None:
    with Engine(threads=1) as engine:
        job, region, tensor = stalled_load(engine)
        gc.collect()
        assert region() is None  # nobody closes it now, so the job has the memory itself
        assert tensor() is not None
        engine.resume()
        assert job.check(30)["pages"] > 0
        assert engine.in_flight == 0
        gc.collect()
        assert tensor() is None


class Registration:
    """Stands for CUDA's: says whether the memory was still mapped when it was let go."""

    def __init__(self, region: Region) -> None:
        self.mapped = weakref.ref(region.view)
        self.released: list[bool] = []
        region.registration = cuda.Pinning(self, "", region.view)

    def release(self) -> None:
        self.released.append(self.mapped() is not None)


class Stalled:
    """A load over registered memory that has not begun, its plan, region and registration."""

    def __init__(self, engine: Engine) -> None:
        table, caches, _ = hybrid()
        mappings = derive_canonical_mappings(table, caches, RankGrid(), 0)
        self.region = Region.create(sections_for(mappings, TOKENS, 4), backing="private")
        self.registration = Registration(self.region)
        self.plan = TransferPlan(mappings, caches, self.region, chunk_tokens=TOKENS, engine=engine)
        engine.stall()
        self.job = self.plan.load({"full": ([0], [0])})


def test_a_region_refuses_to_close_under_a_transfer_whose_plan_is_dropped() -> None:
    with Engine(threads=1) as engine:
        world = Stalled(engine)
        del world.plan
        gc.collect()
        with pytest.raises(RegionError, match=r"1 plans or stores .*plans that are gone: wait"):
            world.region.close()
        assert world.region.alive and world.registration.released == []
        engine.resume()
        deadline = time.monotonic() + 30
        while not world.job.done():  # which asks no engine to let go of anything
            assert time.monotonic() < deadline
        world.region.close()
        assert world.registration.released == [True]


def test_a_region_does_not_wait_for_an_engine_that_is_gone() -> None:
    table, caches, _ = hybrid()
    mappings = derive_canonical_mappings(table, caches, RankGrid(), 0)
    region = Region.create(sections_for(mappings, TOKENS, 4), backing="private")
    engine = Engine(threads=1)
    plan = TransferPlan(mappings, caches, region, chunk_tokens=TOKENS, engine=engine)
    memory, gone = plan.packed.memory, weakref.ref(engine)  # somebody else's transfer has it
    engine.shutdown()
    del plan, engine
    gc.collect()
    assert gone() is None
    with pytest.raises(RegionError, match="1 plans or stores"):
        region.close()
    del memory
    region.close()


@pytest.mark.parametrize("dropped", ["the plan and the region", "the plan, region closed by force"])
def test_memory_stays_registered_and_mapped_until_the_last_transfer(dropped: str) -> None:
    with Engine(threads=1) as engine:
        world = Stalled(engine)
        del world.plan
        if dropped == "the plan and the region":
            del world.region
        else:
            world.region.close(force=True)
            assert not world.region.pinned
        gc.collect()
        assert world.registration.released == []
        assert world.registration.mapped() is not None
        engine.resume()
        world.job.check(30)
        assert engine.in_flight == 0
        gc.collect()
        assert world.registration.released == [True]
        assert world.registration.mapped() is None


def test_a_registration_ends_before_the_mapping_where_a_plan_outlives_its_region() -> None:
    with Engine(threads=1) as engine:
        world = Stalled(engine)
        engine.resume()
        world.region.close(force=True)
        world.plan.close()
        assert world.registration.released == [True]
        assert world.registration.mapped() is None


def test_a_close_that_is_interrupted_lets_go_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with Engine(threads=1) as engine:
        world = Stalled(engine)
        with monkeypatch.context() as patched:
            patched.setattr(engine, "drain", interrupted)
            with pytest.raises(KeyboardInterrupt):
                world.plan.close()
        with pytest.raises(StalePlanError):
            world.plan.load({"full": ([0], [0])})
        with pytest.raises(RegionError, match="1 plans or stores"):
            world.region.close()
        engine.resume()
        world.plan.close()
        assert world.job.done()
        world.region.close()
        assert world.registration.released == [True]


def test_a_plan_that_could_not_be_made_does_not_hold_its_region() -> None:
    table, caches, _ = hybrid()
    mappings = derive_canonical_mappings(table, caches, RankGrid(), 0)
    region = Region.create(sections_for(mappings, TOKENS, 4), backing="private")
    with pytest.raises(PlanError) as kept:  # and with it whatever its frames have
        TransferPlan(mappings, caches, region, chunk_tokens=TOKENS, mover="fastest")
    region.close()
    assert "fastest" in str(kept.value)


def test_a_forced_close_takes_no_memory_from_under_a_transfer() -> None:
    table, caches, _ = hybrid()
    mappings = derive_canonical_mappings(table, caches, RankGrid(), 0)
    region = Region.create(sections_for(mappings, TOKENS, 4), backing="private")
    mapped = weakref.ref(region.view)
    with Engine(threads=1) as engine:
        plan = TransferPlan(mappings, caches, region, chunk_tokens=TOKENS, engine=engine)
        engine.stall()
        job = plan.load({"full": ([0], [0])})
        region.close(force=True)
        engine.resume()
        assert job.check(30)["pages"] > 0
        with pytest.raises(StalePlanError, match="the region of this plan is closed"):
            plan.load({"full": ([0], [0])})
        assert mapped() is not None
        plan.close()
        assert mapped() is None


def test_a_plan_of_another_cache_is_refused() -> None:
    table, caches, arrays = hybrid()
    mappings = derive_canonical_mappings(table, caches, RankGrid(), 0)
    other = dict(caches, a=CacheView.of(arrays["a"].copy(), "split_nhd", 4))
    with Region.create(sections_for(mappings, TOKENS, 4), backing="private") as region:
        with pytest.raises(PlanError, match="another address"):
            TransferPlan(mappings, other, region, chunk_tokens=TOKENS)


def test_a_torch_cache_that_is_freed_under_the_plan_is_noticed() -> None:
    import torch

    tensor = torch.zeros((4, 2, 4, 1, 8), dtype=torch.uint8)
    table = LayerTable([LayerSpec.attention("a", num_kv_heads=1, head_size=8, elem=1)])
    caches = {"a": CacheView.of(tensor, "split_nhd", 4)}
    mappings = derive_canonical_mappings(table, caches, RankGrid(), 0)
    with Region.create(sections_for(mappings, 4, 2), backing="private") as region:
        with TransferPlan(mappings, caches, region) as plan:
            plan.store((torch.tensor([0]), torch.tensor([1]))).check()
            tensor.untyped_storage().resize_(0)
            with pytest.raises(StalePlanError, match="rebuild"):
                plan.store(([0], [0]))


def test_a_mover_that_cannot_reach_the_cache_is_an_error_not_a_downgrade() -> None:
    table, caches, _ = hybrid()
    mappings = derive_canonical_mappings(table, caches, RankGrid(), 0)
    with Region.create(sections_for(mappings, TOKENS, 4), backing="private") as region:
        for mover in ("kernel", "copy_engine"):
            with pytest.raises(PlanError, match="cannot reach caches on 'cpu'"):
                TransferPlan(mappings, caches, region, chunk_tokens=TOKENS, mover=mover)
        with TransferPlan(mappings, caches, region, chunk_tokens=TOKENS) as plan:
            with pytest.raises(PlanError, match="kernel"):
                plan.store({"full": ([0], [0])}, mover="kernel")
            with pytest.raises(PlanError, match="teleport"):
                plan.store({"full": ([0], [0])}, mover="teleport")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"layers": (0, 1)}, "a range with step 1"),
        ({"layers": range(-1, 1)}, "a range with step 1"),
        ({"progress": [0, 0]}, "not a numpy array"),
        ({"progress": "every second word"}, "contiguous and writable"),
        ({"mover": "fastest"}, "choose auto or one of"),
    ],
)
def test_what_a_load_cannot_take_is_a_plan_error(wrong: dict[str, object], message: str) -> None:
    table, caches, _ = hybrid()
    mappings = derive_canonical_mappings(table, caches, RankGrid(), 0)
    if wrong.get("progress") == "every second word":
        wrong = {"progress": np.zeros(2 * len(table), np.uint32)[::2]}
    with Region.create(sections_for(mappings, TOKENS, 4), backing="private") as region:
        with TransferPlan(mappings, caches, region, chunk_tokens=TOKENS) as plan:
            with pytest.raises(PlanError, match=message):
                plan.load({"full": ([0], [0])}, **wrong)


def test_an_unknown_mover_is_refused_before_the_first_transfer() -> None:
    table, caches, _ = hybrid()
    mappings = derive_canonical_mappings(table, caches, RankGrid(), 0)
    with Region.create(sections_for(mappings, TOKENS, 4), backing="private") as region:
        with pytest.raises(PlanError, match="'fastest'"):
            TransferPlan(mappings, caches, region, chunk_tokens=TOKENS, mover="fastest")


def test_a_rebuild_that_cannot_be_leaves_the_plan_as_it_is() -> None:
    spec = LayerSpec.attention("a", num_kv_heads=4, head_size=8, elem=1)
    array = np.zeros((6, 2, 4, 4, 8), dtype=np.uint8)
    caches = {"a": CacheView.of(array, "split_nhd", 4)}
    mappings = derive_canonical_mappings(LayerTable([spec]), caches, RankGrid(), 0)
    with Region.create(sections_for(mappings, 4, 4), backing="private") as region:
        with TransferPlan(mappings, caches, region) as plan:
            fewer_heads = np.zeros((6, 2, 4, 3, 8), dtype=np.uint8)
            with pytest.raises(RefusedError, match="3, 4 expected"):
                plan.rebuild({"a": CacheView.of(fewer_heads, "split_nhd", 4)})
            other_blocks = np.zeros((6, 2, 8, 4, 8), dtype=np.uint8)
            with pytest.raises(PlanError):
                plan.rebuild({"a": CacheView.of(other_blocks, "split_nhd", 8)})
            plan.store(([0], [0])).check()
