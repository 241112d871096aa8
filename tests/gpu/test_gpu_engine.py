"""Jobs whose work waits on the GPU: the engine's promises with a slow kernel before the transfer.

The same promises are kept on the CPU by tests/test_engine.py, with lanes that are held back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from benchmarks.model_shapes import SHAPES, PlacedShape
from tests.gpu.sides import (
    LOAD,
    MOVERS,
    SHORT,
    STORE,
    Pages,
    Sides,
    behind_slow_work,
    ids,
    slow,
    small,
    steps_of_another_thread,
    with_longer_work,
)
from vkvmap import cuda
from vkvmap.transfer import Engine, Job


@pytest.mark.parametrize("mover", MOVERS)
@pytest.mark.parametrize("default_stream", [True, False])
def test_a_load_comes_after_a_pending_zeroing(
    gpu: Any, engine: Engine, mover: str, default_stream: bool
) -> None:
    def look(cycles: int) -> bool:
        world = small(gpu)
        world.warm(engine, LOAD, mover)
        stream = gpu.cuda.default_stream() if default_stream else gpu.cuda.Stream()
        over = slow(gpu, stream, cycles)
        with gpu.cuda.stream(stream):
            world.sides.cache.zero_()
        groups = [(0, world.every, world.every)]
        job = engine.submit(world.plan, LOAD, groups, mover=mover, stream=stream)
        in_time = not over.query()
        job.check(60)
        world.blocks[:] = world.pages
        world.check(mover)
        return in_time

    with_longer_work(look, SHORT)


@pytest.mark.parametrize("mover", MOVERS)
@pytest.mark.parametrize("default_stream", [True, False])
def test_a_store_carries_what_the_compute_stream_is_still_writing(
    gpu: Any, engine: Engine, mover: str, default_stream: bool
) -> None:
    def look(cycles: int) -> bool:
        world = small(gpu)
        world.warm(engine, STORE, mover)
        stream = gpu.cuda.default_stream() if default_stream else gpu.cuda.Stream()
        over = slow(gpu, stream, cycles)
        with gpu.cuda.stream(stream):
            world.sides.cache.fill_(0x5C)
        groups = [(0, world.every, world.every)]
        job = engine.submit(world.plan, STORE, groups, mover=mover, stream=stream)
        in_time = not over.query()
        job.check(60)
        world.blocks[:] = world.pages[:] = 0x5C
        world.check(mover)
        return in_time

    with_longer_work(look, SHORT)


@pytest.mark.parametrize("mover", MOVERS)
def test_ids_of_a_job_behind_slow_work_may_be_reused_at_once(
    gpu: Any, engine: Engine, mover: str
) -> None:
    def look(cycles: int) -> bool:
        world = small(gpu)
        world.warm(engine, STORE, mover)
        stream, over = behind_slow_work(gpu, cycles)
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
        in_time = not over.query()
        for job in jobs:
            job.check(60)
        world.check(mover)
        return in_time

    with_longer_work(look, SHORT)


@pytest.mark.parametrize("storer", MOVERS)
@pytest.mark.parametrize("loader", MOVERS)
@pytest.mark.parametrize(
    ("stored", "loaded"),
    [((0, 4), (1, 4)), ((3, 0), (3, 1))],
    ids=["of the page that it writes", "into the block that it reads"],
)
def test_a_load_comes_after_the_store_that_it_meets(
    gpu: Any,
    engine: Engine,
    storer: str,
    loader: str,
    stored: tuple[int, int],
    loaded: tuple[int, int],
) -> None:
    """`stored` and `loaded`: block and page of each."""

    def look(cycles: int) -> bool:
        world, idle = small(gpu), gpu.cuda.Stream()
        world.warm(engine, STORE, storer)
        world.warm(engine, LOAD, loader)
        stream, over = behind_slow_work(gpu, cycles)
        there, back = ([(0, ids(block), ids(page))] for block, page in (stored, loaded))
        store = engine.submit(world.plan, STORE, there, mover=storer, stream=stream)
        load = engine.submit(world.plan, LOAD, back, mover=loader, stream=idle)
        in_time = not over.query()
        load.check(60)
        store.check(60)
        world.pages[stored[1]] = world.blocks[stored[0]]
        world.blocks[loaded[0]] = world.pages[loaded[1]]
        world.check(f"{storer}, then {loader}")
        return in_time

    with_longer_work(look, SHORT)


@pytest.mark.parametrize("mover", MOVERS)
def test_jobs_that_share_nothing_do_not_wait_and_nobody_is_held_up(gpu: Any, mover: str) -> None:
    def look(cycles: int) -> bool:
        world, engine = small(gpu), Engine(threads=2)
        stored, loaded = world.warm(engine, STORE, mover), world.warm(engine, LOAD, mover)
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
        stores, loads = engine.finished("store"), engine.finished("load")
        in_time = not over.query()
        if in_time:
            assert (stores, loads) == ([stored], [loaded, free])
        while True:
            early = held.query(), held.wait(0), called.copy()
            if over.query():
                break
            assert early == (False, False, [])
            time.sleep(0.01)
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
    def look(cycles: int) -> bool:
        world, engine = small(gpu), Engine(threads=1)
        world.warm(engine, STORE, mover)
        stream, over = behind_slow_work(gpu, cycles)
        jobs = [
            engine.submit(world.plan, STORE, [(0, ids(n), ids(n + 8))], mover=mover, stream=stream)
            for n in range(8)
        ]
        in_time = not over.query()
        assert engine.shutdown(drain=drain, timeout=60)
        assert all(job.done() for job in jobs)
        for n, job in enumerate(jobs):
            moved = job.result()["error"] is None
            assert moved or not drain
            if moved:
                world.pages[n + 8] = world.blocks[n]
        world.check(mover)
        return in_time

    with_longer_work(look, SHORT)


@pytest.mark.parametrize("mover", MOVERS)
@pytest.mark.parametrize("direction", [STORE, LOAD])
def test_a_fresh_plan_is_submitted_without_waiting_for_the_work_of_another(
    gpu: Any, engine: Engine, mover: str, direction: int
) -> None:
    def look(cycles: int) -> bool:
        world, fresh = small(gpu), small(gpu)
        world.warm(engine, STORE, mover)
        world.warm(engine, LOAD, mover)
        stream, over = behind_slow_work(gpu, cycles)
        held = engine.submit(world.plan, LOAD, [(0, ids(2), ids(7))], mover=mover, stream=stream)
        time.sleep(0.05)  # by now the lane's own stream waits for the slow work
        job = engine.submit(fresh.plan, direction, [(0, ids(1), ids(3))], mover=mover)
        early = held.done()
        in_time = not over.query()
        assert not (in_time and early)
        held.check(60)
        job.check(60)
        world.blocks[2] = world.pages[7]
        if direction == STORE:
            fresh.pages[3] = fresh.blocks[1]
        else:
            fresh.blocks[1] = fresh.pages[3]
        world.check(mover)
        fresh.check(mover)
        return in_time

    with_longer_work(look)


def an_engine(world: Pages, busy: Callable[[], Any]) -> list[Any]:
    engine = Engine(threads=1)
    groups = [(0, ids(0), ids(1))]
    engine.submit(world.plan, STORE, groups, mover="kernel", stream=busy(), keep=world.sides)
    return [engine]


def a_job(world: Pages, busy: Callable[[], Any]) -> list[Any]:
    """With the last reference to its plan and to its engine."""
    engine, plan = Engine(threads=1), vars(world).pop("plan")
    groups = [(0, ids(0), ids(1))]
    return [engine.submit(plan, STORE, groups, mover="kernel", stream=busy(), keep=world.sides)]


def a_plan(world: Pages, busy: Callable[[], Any]) -> list[Any]:
    busy()
    return [vars(world).pop("plan")]


def a_graph_transfer(world: Pages, busy: Callable[[], Any]) -> list[Any]:
    made = cuda.GraphTransfer(world.plan, STORE, {0: 1})
    busy()
    return [made]


@pytest.mark.parametrize("last", [an_engine, a_job, a_plan, a_graph_transfer])
def test_what_waits_for_the_gpu_when_it_is_dropped_holds_up_no_other_thread(
    gpu: Any, engine: Engine, last: Callable[[Pages, Callable[[], Any]], list[Any]]
) -> None:
    def look(cycles: int) -> bool:
        world, ends = small(gpu), []

        def busy() -> Any:
            stream, over = behind_slow_work(gpu, cycles)
            ends.append(over)
            return stream

        world.warm(engine, STORE, "kernel")
        engine.finished("store")  # a job that nobody has asked for keeps its plan
        references = last(world, busy)
        with steps_of_another_thread() as steps:
            in_time, before = not ends[0].query(), steps()
            references.clear()
            waited, made = ends[0].query(), steps() - before
        # A drop that waits for nothing is as good. One that waits does so for seconds.
        return in_time and (made > 10 or not waited)

    with_longer_work(look)
