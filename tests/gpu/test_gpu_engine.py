"""Jobs whose work waits on the GPU: the engine's promises with a slow kernel before the transfer.

The same promises are kept on the CPU by tests/test_engine.py, with lanes that are held back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from benchmarks.model_shapes import SHAPES, PlacedShape
from tests.gpu.sides import (
    LOAD,
    MOVERS,
    STORE,
    Pages,
    Sides,
    behind_slow_work,
    slow,
    with_longer_work,
)
from vkvmap.transfer import Engine, Job


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine(threads=2)
    yield made
    assert made.shutdown(timeout=60)


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def small(torch: Any) -> Pages:
    return Pages(torch, count=16, page_bytes=1 << 16, run_bytes=1024)


@pytest.mark.parametrize("mover", MOVERS)
@pytest.mark.parametrize("default_stream", [True, False])
def test_a_load_comes_after_a_pending_zeroing(
    gpu: Any, engine: Engine, mover: str, default_stream: bool
) -> None:
    world = small(gpu)
    stream = gpu.cuda.default_stream() if default_stream else gpu.cuda.Stream()
    slow(gpu, stream)
    with gpu.cuda.stream(stream):
        world.sides.cache.zero_()
    every = np.arange(world.count, dtype=np.int64)
    engine.submit(world.plan, LOAD, [(0, every, every)], mover=mover, stream=stream).check(60)
    world.blocks[:] = world.pages
    world.check(mover)


@pytest.mark.parametrize("mover", MOVERS)
@pytest.mark.parametrize("default_stream", [True, False])
def test_a_store_carries_what_the_compute_stream_is_still_writing(
    gpu: Any, engine: Engine, mover: str, default_stream: bool
) -> None:
    world = small(gpu)
    stream = gpu.cuda.default_stream() if default_stream else gpu.cuda.Stream()
    slow(gpu, stream)
    with gpu.cuda.stream(stream):
        world.sides.cache.fill_(0x5C)
    every = np.arange(world.count, dtype=np.int64)
    engine.submit(world.plan, STORE, [(0, every, every)], mover=mover, stream=stream).check(60)
    world.blocks[:] = world.pages[:] = 0x5C
    world.check(mover)


@pytest.mark.parametrize("mover", MOVERS)
def test_ids_of_a_job_behind_slow_work_may_be_reused_at_once(
    gpu: Any, engine: Engine, mover: str
) -> None:
    world = small(gpu)
    stream = gpu.cuda.Stream()
    slow(gpu, stream)
    blocks, pages = ids(0, 1), ids(5, 4)
    jobs = []
    for pair in ((0, 5), (1, 4), (9, 12)):
        blocks[:], pages[:] = (pair[0], pair[0] + 2), (pair[1], pair[1] + 2)
        jobs.append(
            engine.submit(world.plan, STORE, [(0, blocks, pages)], mover=mover, stream=stream)
        )
        for offset in (0, 2):
            world.pages[pair[1] + offset] = world.blocks[pair[0] + offset]
    blocks[:], pages[:] = 15, 15
    for job in jobs:
        job.check(60)
    world.check(mover)


@pytest.mark.parametrize("storer", MOVERS)
@pytest.mark.parametrize("loader", MOVERS)
def test_a_load_of_a_page_comes_after_the_store_of_it(
    gpu: Any, engine: Engine, storer: str, loader: str
) -> None:
    world = small(gpu)
    stream, idle = gpu.cuda.Stream(), gpu.cuda.Stream()
    slow(gpu, stream)
    engine.submit(world.plan, STORE, [(0, ids(0), ids(4))], mover=storer, stream=stream)
    bound = engine.submit(world.plan, LOAD, [(0, ids(1), ids(4))], mover=loader, stream=idle)
    bound.check(60)
    world.pages[4] = world.blocks[1] = world.blocks[0]
    world.check(f"{storer}, then {loader}")


@pytest.mark.parametrize("storer", MOVERS)
@pytest.mark.parametrize("loader", MOVERS)
def test_a_load_into_a_block_comes_after_the_store_that_reads_it(
    gpu: Any, engine: Engine, storer: str, loader: str
) -> None:
    world = small(gpu)
    stream, idle = gpu.cuda.Stream(), gpu.cuda.Stream()
    slow(gpu, stream)
    store = engine.submit(world.plan, STORE, [(0, ids(3), ids(0))], mover=storer, stream=stream)
    engine.submit(world.plan, LOAD, [(0, ids(3), ids(1))], mover=loader, stream=idle).check(60)
    store.check(60)
    world.pages[0] = world.blocks[3]
    world.blocks[3] = world.pages[1]
    world.check(f"{storer}, then {loader}")


@pytest.mark.parametrize("mover", MOVERS)
def test_jobs_that_share_nothing_do_not_wait_and_nobody_is_held_up(gpu: Any, mover: str) -> None:
    def look(cycles: int) -> bool:
        world, engine = small(gpu), Engine(threads=2)
        warm = engine.submit(world.plan, STORE, [(0, ids(0), ids(4))], mover=mover)
        warm.check(60)
        called: list[tuple[Job, int]] = []
        stream, over = behind_slow_work(gpu, cycles)
        held = engine.submit(
            world.plan,
            STORE,
            [(0, ids(0), ids(4))],
            mover=mover,
            stream=stream,
            callback=lambda job: called.append((job, threading.get_ident())),
        )
        free = engine.submit(
            world.plan, LOAD, [(0, ids(2), ids(7))], mover=mover, stream=gpu.cuda.Stream()
        )
        free.check(60)
        early = held.query(), held.wait(0), called.copy()
        stores, loads = engine.finished("store"), engine.finished("load")
        in_time = not over.query()
        if in_time:
            assert early == (False, False, [])
            assert (stores, loads) == ([warm], [free])
        report = held.check(60)
        assert (report["mover"], report["bytes"], report["pages"]) == (mover, world.page_bytes, 1)
        assert engine.shutdown(timeout=60)  # all callbacks are made
        assert [job for job, _ in called] == [held]
        assert called[0][1] != threading.get_ident()
        world.pages[4] = world.blocks[0]
        world.blocks[2] = world.pages[7]
        world.check(mover)
        return in_time

    with_longer_work(look)


@pytest.mark.parametrize("mover", MOVERS)
def test_progress_words_appear_once_their_layer_is_in_place(
    gpu: Any, engine: Engine, mover: str
) -> None:
    def look(cycles: int) -> bool:
        placed = PlacedShape(SHAPES[0], 2, 2, layers=4)
        sides = Sides(gpu, placed.cache_bytes, placed.region_bytes)
        plan = placed.plan(sides.cache.data_ptr(), sides.host.data_ptr())
        truth = placed.plan(sides.cache_copy.ctypes.data, sides.host_copy.ctypes.data)
        words, looks = np.zeros(4, np.uint32), 0
        groups = [(0, ids(0, 1), ids(1, 0))]
        stream, over = behind_slow_work(gpu, cycles)
        job = engine.submit(
            plan, LOAD, groups, mover=mover, stream=stream, progress=words, progress_value=7
        )
        while True:
            early = words.tolist()
            if over.query():
                break
            assert early == [0, 0, 0, 0]
            looks += 1
            time.sleep(0.01)
        job.check(60)
        assert words.tolist() == [7, 7, 7, 7]
        engine.submit(truth, LOAD, groups, mover="host").check(60)
        sides.check(mover)
        return looks > 0

    with_longer_work(look)


@pytest.mark.parametrize("drain", [True, False])
@pytest.mark.parametrize("mover", MOVERS)
def test_shutdown_ends_jobs_behind_slow_work(gpu: Any, mover: str, drain: bool) -> None:
    world = small(gpu)
    engine, stream = Engine(threads=1), gpu.cuda.Stream()
    slow(gpu, stream)
    jobs = [
        engine.submit(world.plan, STORE, [(0, ids(n), ids(n + 8))], mover=mover, stream=stream)
        for n in range(8)
    ]
    assert engine.shutdown(drain=drain, timeout=60)
    assert all(job.done() for job in jobs)
    for n, job in enumerate(jobs):
        moved = job.result()["error"] is None
        assert moved or not drain
        if moved:
            world.pages[n + 8] = world.blocks[n]
    world.check(mover)
