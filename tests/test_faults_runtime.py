"""Faults of moving bytes that software of this kind is known for, with their right values.

Numbers are the rows of the table in docs/testing.md, which also says where the rows that are not
here are tested. Address arithmetic beyond the machine's memory is tested on reserved ranges, where
a wrong address ends the process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from tests.guarded.memory import Reserved
from vkvmap import (
    CacheView,
    LayerSpec,
    LayerTable,
    RankGrid,
    Region,
    TransferPlan,
    derive_canonical_mappings,
)
from vkvmap.pack import struct
from vkvmap.region import Section
from vkvmap.transfer import Engine

POISON = 0xA5


def latent(row_bytes: int) -> LayerTable:
    return LayerTable([LayerSpec.mla("layer", row_bytes=row_bytes)])


def drawn(count: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(threads=2) as engine:
        yield engine
        engine.resume()


@contextmanager
def planned(
    table: LayerTable, caches: dict[str, CacheView], region: Region, **more: Any
) -> Iterator[TransferPlan]:
    mappings = derive_canonical_mappings(table, caches, RankGrid(), 0, strict=True)
    with TransferPlan(mappings, caches, region, **more) as plan:
        yield plan


# ---- strides and alignment -----------------------------------------------------------------------


def test_padding_between_pages_is_neither_read_nor_written(engine: Engine) -> None:
    """Fault 17: page 1,024 at stride 1,152; block 5 is bytes [5,760, 6,784)."""
    storage = np.full(8 * 1_152, POISON, dtype=np.uint8)
    storage[5_760:6_784] = page = drawn(1_024)
    cache = CacheView.of(storage.reshape(8, 1_152)[:, :1_024].reshape(8, 16, 64), "mla", 16)
    with Region.create([Section("0", 4, 1_024, 1_280)], backing="private") as region:
        region.view[:] = 0x11
        with planned(latent(64), {"layer": cache}, region, engine=engine) as plan:
            plan.store(([5], [2])).check()
            row = region.section("0").offset + 2 * 1_280
            assert np.array_equal(region.view[row : row + 1_024], page)
            assert np.all(region.view[row + 1_024 : row + 1_280] == 0x11)
            plan.load(([1], [2])).check()
    assert np.array_equal(storage[1_152 : 1_152 + 1_024], page)
    untouched = np.delete(storage, [*range(1_152, 2_176), *range(5_760, 6_784)])
    assert np.all(untouched == POISON)


def test_strides_of_the_two_sides_are_independent(engine: Engine) -> None:
    """Fault 20: host row 16,384, device stride 9,216: host row 2 and device block 3."""
    storage = np.zeros(5 * 9_216, dtype=np.uint8)
    storage[27_648 : 27_648 + 8_192] = page = drawn(8_192)
    cache = CacheView.of(storage.reshape(5, 9_216)[:, :8_192].reshape(5, 16, 512), "mla", 16)
    with Region.create([Section("0", 4, 8_192, 16_384)], backing="private") as region:
        with planned(latent(512), {"layer": cache}, region, engine=engine) as plan:
            plan.store(([3], [2])).check()
        start = region.section("0").offset
        assert np.array_equal(region.view[start + 32_768 : start + 32_768 + 8_192], page)
        assert np.count_nonzero(region.view[start : start + 32_768]) == 0


def test_rows_of_92_bytes_move_exactly_and_in_words_of_four(engine: Engine) -> None:
    """Fault 31: head_size 46, bf16, one head: row t at 92*t, which is 12 mod 16 for t=1."""
    table = LayerTable([LayerSpec.attention("layer", num_kv_heads=2, head_size=46)])
    storage = drawn(3 * 2 * 16 * 92).reshape(3, 2, 16, 1, 92)
    caches = {"layer": CacheView.of(storage.view(np.uint16), "split_nhd", 16)}
    mappings = derive_canonical_mappings(table, caches, RankGrid(tp=2), 1, strict=True)
    runs = mappings.by_layer["layer"].runs
    assert {(r.fragment_size, r.local_stride, r.canonical_stride) for r in runs} == {(92, 92, 184)}
    with Region.create([Section("0", 3, 2 * 16 * 184)], backing="private") as region:
        with TransferPlan(mappings, caches, region, engine=engine) as plan:
            head = struct("DescriptorHeader").itemsize
            header = plan.descriptor[:head].view(struct("DescriptorHeader"))[0]
            tiles = plan.descriptor[-int(header["num_tiles"]) * struct("Tile").itemsize :]
            widths = tiles.view(struct("Tile"))["width_log2"]
            assert widths.max() == 2
            plan.store(([1], [2])).check()
            row = region.row("0", 2).reshape(2, 16, 2, 92)
            assert np.array_equal(row[:, :, 1], storage[1, :, :, 0])
            assert not row[:, :, 0].any()
            plan.load(([0], [2])).check()
    assert np.array_equal(storage[0], storage[1])


@pytest.mark.parametrize("items", [656, 640, 576, 584, 132, 68, 63, 65, 1])
def test_items_of_any_length_are_exact(engine: Engine, items: int) -> None:
    """Fault 32: lengths that are no multiple of 64 make two accesses share a sector."""
    storage = drawn(4 * 64 * items).reshape(4, 64, items)
    caches = {"layer": CacheView.of(storage, "mla", 64)}
    grid = RankGrid(tp=2, dcp=2)
    mappings = derive_canonical_mappings(latent(items), caches, grid, 1, strict=True)
    with Region.create([Section("0", 2, 128 * items)], backing="private") as region:
        region.view[:] = POISON
        with TransferPlan(mappings, caches, region, writers="all", engine=engine) as plan:
            plan.store(([2], [1])).check()
        rows = region.row("0", 1).reshape(64, 2, items)
        assert np.array_equal(rows[:, 1], storage[2])
        assert np.all(rows[:, 0] == POISON)


# ---- 2^31, 2^32, 2^40 ----------------------------------------------------------------------------


def test_a_block_beyond_two_gibibytes_is_found(engine: Engine) -> None:
    """Fault 34: stride 1,039,680, block 2,066: byte 2,147,978,880 is beyond 2^31 - 1."""
    stride, block = 1_039_680, 2_066
    cache = Reserved(stride * (block + 1))
    page = cache.open(2_147_978_880, 4_096)
    page[:] = wanted = drawn(4_096)
    view = CacheView.of(cache.tensor(0, (block + 1, 16, 256), (stride, 256, 1)), "mla", 16)
    with Region.create([Section("0", 2, 4_096)], backing="private") as region:
        with planned(latent(256), {"layer": view}, region, engine=engine) as plan:
            plan.store(([block], [1])).check()
            assert np.array_equal(region.row("0", 1), wanted)
            page[:] = 0
            plan.load(([block], [1])).check()
    assert np.array_equal(page, wanted)


@pytest.mark.parametrize("chunk", [0, 1_000_000, 2_097_151])
def test_a_row_beyond_two_to_the_forty_is_found(engine: Engine, chunk: int) -> None:
    """Fault 35: row 2,097,152, chunk 1,000,000: the low 32 bits would be 1,207,959,552."""
    stride, rows = 2_097_152, 2_097_152
    host = Reserved(stride * rows)
    if chunk == 1_000_000:
        assert chunk * stride == 2_097_152_000_000
        host.open(1_207_959_552, 4_096)[:] = POISON
    row = host.open(chunk * stride, 4_096)
    storage = drawn(3 * 4_096).reshape(3, 16, 256)
    caches = {"layer": CacheView.of(storage, "mla", 16)}
    sections = [Section("0", rows, 4_096, stride)]
    with Region.from_buffer(host.address, host.nbytes, host, sections) as region:
        with planned(latent(256), caches, region, engine=engine) as plan:
            plan.store(([2], [chunk])).check()
            assert np.array_equal(row, storage[2].reshape(-1))
            plan.load(([0], [chunk])).check()
    assert np.array_equal(storage[0], storage[2])
    if chunk == 1_000_000:
        assert np.all(host.bytes(1_207_959_552, 4_096) == POISON)


@pytest.mark.parametrize("elem", [1, 2])
@pytest.mark.parametrize("block", [65_535, 65_536, 131_071, 131_072])
def test_no_block_wraps_to_an_address_that_is_mapped(engine: Engine, elem: int, block: int) -> None:
    """Fault 36: element 2^31 is the first of block 65,536; as bytes it is 2^31 or 2^32."""
    page_bytes = 16 * 2 * 8 * 128 * elem
    cache = Reserved(page_bytes * (block + 1))
    page = cache.open(block * page_bytes, page_bytes)
    wrong = {block * page_bytes % (1 << bits) for bits in (31, 32)} - {block * page_bytes}
    traps = [cache.open(at, page_bytes) for at in sorted(wrong)]
    for trap in traps:
        trap[:] = POISON
    page[:] = wanted = drawn(page_bytes)
    shape, strides = (block + 1, 2, 16, 8, 128 * elem), (
        page_bytes, page_bytes // 2, 8 * 128 * elem, 128 * elem, 1,
    )  # fmt: skip
    table = LayerTable([LayerSpec.attention("layer", num_kv_heads=8, head_size=128, elem=elem)])
    view = CacheView.of(cache.tensor(0, shape, strides), "split_nhd", 16)
    with Region.create([Section("0", 2, page_bytes)], backing="private") as region:
        with planned(table, {"layer": view}, region, engine=engine) as plan:
            plan.store(([block], [1])).check()
            assert np.array_equal(region.row("0", 1), wanted)
            page[:] = 0
            plan.load(([block], [1])).check()
    assert np.array_equal(page, wanted)
    assert all(np.all(trap == POISON) for trap in traps)


# ---- ordering ------------------------------------------------------------------------------------

BLOCKS, ROWS, PAGE = 6, 6, 1_024


@contextmanager
def small(engine: Engine) -> Iterator[tuple[TransferPlan, np.ndarray, Region]]:
    storage = drawn(BLOCKS * PAGE).reshape(BLOCKS, 16, 64)
    with Region.create([Section("0", ROWS, PAGE)], backing="private") as region:
        for row in range(ROWS):
            region.row("0", row)[:] = row + 1
        caches = {"layer": CacheView.of(storage, "mla", 16)}
        with planned(latent(64), caches, region, engine=engine) as plan:
            yield plan, storage, region


@pytest.mark.parametrize("expedited", [False, True])
def test_a_load_comes_after_the_zeroing_that_was_queued_before_it(
    engine: Engine, expedited: bool
) -> None:
    """Fault 47: zero(block 3) behind a delay, then load(block 3)."""
    with small(engine) as (plan, storage, region):
        region.row("0", 0)[:] = 0
        engine.stall()
        zeroing = plan.load(([3], [0]))
        loading = plan.load(([3], [4]), expedited=expedited)
        assert not zeroing.done() and not loading.done()
        engine.resume()
        loading.check(10)
        zeroing.check(10)
        assert np.all(storage[3] == 5)


def test_each_transfer_uses_the_ids_it_was_given(engine: Engine) -> None:
    """Fault 48: one index buffer rewritten while an earlier transfer still reads it."""
    blocks, pages = np.array([0]), np.array([1])
    with small(engine) as (plan, storage, _):
        engine.stall()
        first = plan.load((blocks, pages))
        blocks[0], pages[0] = 2, 3
        second = plan.load((blocks, pages))
        blocks[0], pages[0] = 5, 5
        engine.resume()
        first.check(10)
        second.check(10)
        assert np.all(storage[0] == 2) and np.all(storage[2] == 4)
        assert not np.all(storage[5] == 6)


@pytest.mark.parametrize("expedited", [False, True])
def test_what_is_stored_evicted_and_loaded_again_is_the_same(
    engine: Engine, expedited: bool
) -> None:
    """Fault 50: store(A), evict, load(A) into a new block on another lane."""
    with small(engine) as (plan, storage, _):
        content = storage[1].copy()
        engine.stall(["store"])
        stored = plan.store(([1], [2]))
        evicted = plan.load(([1], [5]))  # block 1 gets another prompt's tokens
        loaded = plan.load(([4], [2]), expedited=expedited)
        assert not loaded.wait(0.05)
        engine.resume()
        for job in (stored, evicted, loaded):
            job.check(10)
        assert np.array_equal(storage[4], content)
        assert np.all(storage[1] == 6)


def test_a_failed_page_is_named_and_the_others_arrive(engine: Engine) -> None:
    """What fails is one page of one layer; the job says which, and nothing else is lost."""
    with small(engine) as (plan, storage, _):
        engine.inject_fault(1, 0, 3, "the cable is loose")
        job = plan.load(([0, 1, 2], [1, 3, 2]))
        assert job.wait(10)
        result = job.result()
        assert [(layer, block, page) for layer, block, page, _ in result["failed"]] == [
            ("layer", 1, 3)
        ]
        assert "the cable is loose" in result["error"]
        assert np.all(storage[0] == 2) and np.all(storage[2] == 3)
        engine.clear_faults()


def test_an_answer_about_a_job_never_waits_for_it(engine: Engine) -> None:
    with small(engine) as (plan, _, _):
        engine.stall()
        job = plan.load(([0], [0]))
        assert job.done() is False
        assert job.wait(0) is False
        assert engine.finished("load") == []
        engine.resume()
        job.check(10)
        assert [done.id for done in engine.finished("load")] == [job.id]
