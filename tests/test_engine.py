"""The engine through its module: bytes, refusals, order, failure, lifetime.

The native tests (tests/native) go further into ordering and hostile input, under sanitizers; here
the same promises are kept to Python.
"""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.descriptors import Box, World, heads, ids, random_world
from vkvmap import _C
from vkvmap.errors import PlanError, TransferError
from vkvmap.transfer import Engine, Job, default_engine

STORE, LOAD = _C.STORE, _C.LOAD


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(2) as made:
        yield made


def submit(engine: Engine, world: World, direction: int, blocks, pages, **kwargs) -> Job:  # type: ignore[no-untyped-def]
    plan = kwargs.pop("plan", None) or world.plan()
    return engine.submit(plan, direction, [(0, ids(*blocks), ids(*pages))], **kwargs)


# Bytes --------------------------------------------------------------------------------------------

_SHARED = Engine(2)


@given(st.integers(0, 10**6), st.booleans(), st.sampled_from(_C.instruction_sets()))
def test_transfers_move_exactly_the_bytes_of_the_descriptor(
    seed: int, stream: bool, instructions: str
) -> None:
    usual_set, usual_bytes = _C.instruction_set(), _C.host_streaming_bytes()
    _C.set_instruction_set(instructions)
    _C.set_host_streaming_bytes(0 if stream else 1 << 60)
    try:
        dice = random.Random(seed)
        world = random_world(seed)
        world.scramble(seed)
        plan = world.plan()
        for direction in dice.choices((STORE, LOAD), k=3):
            count = dice.randint(0, min(world.blocks, world.num_pages))
            blocks = dice.sample(range(world.blocks), count)
            pages = dice.sample(range(world.num_pages), count)
            first = dice.randint(0, world.layers)
            layers = (
                range(first, dice.randint(first, world.layers)) if dice.random() < 0.3 else None
            )
            before = world.cache.copy(), world.region.copy()
            world.move(direction, list(zip(blocks, pages, strict=True)), layers)
            expected = world.cache.copy(), world.region.copy()
            world.cache[:], world.region[:] = before
            job = _SHARED.submit(
                plan,
                direction,
                [(0, ids(*blocks), ids(*pages))],
                layers=None if layers is None else (layers.start, layers.stop),
            )
            result = job.check(60)
            assert np.array_equal(world.cache, expected[0])
            assert np.array_equal(world.region, expected[1])
            wanted = range(world.layers) if layers is None else layers
            moved = [
                page
                for page in pages
                if direction == LOAD or page % world.num_writers == world.writer_index
            ]
            assert result["pages"] == len(moved) * len(wanted)
            page_bytes = sum(len(box.bytes()) for box in world.boxes)
            assert result["bytes"] == result["pages"] * page_bytes
        _SHARED.finished("store")
        _SHARED.finished("load")
    finally:
        _C.set_instruction_set(usual_set)
        _C.set_host_streaming_bytes(usual_bytes)


def test_offsets_beyond_four_gigabytes_are_carried(engine: Engine) -> None:
    import mmap

    blocks, stride = 4200, 1_039_680  # block 2,066 lies beyond 2**31, the last beyond 2**32
    sparse = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    with mmap.mmap(-1, blocks * stride, sparse) as memory:
        cache = np.frombuffer(memory, np.uint8)
        world = heads(layers=1, blocks=2, rows=1)
        descriptor = world.descriptor()
        entry = 32 + 88
        fields = _C.DESCRIPTOR_LAYOUT["LayerEntry"]
        words = {"local_base": cache.ctypes.data, "local_stride": stride}
        for name, value in words.items():
            at = entry + fields[name][0]
            descriptor[at : at + 8] = np.frombuffer(np.uint64(value).tobytes(), np.uint8)
        at = 32 + _C.DESCRIPTOR_LAYOUT["LayerClass"]["num_blocks"][0]
        descriptor[at : at + 8] = np.frombuffer(np.uint64(blocks).tobytes(), np.uint8)
        plan = _C.Plan(
            descriptor,
            [(cache.ctypes.data, cache.nbytes)],
            [(world.region.ctypes.data, world.region.nbytes)],
            world.names,
        )
        for block in (2066, blocks - 1):
            last = block * stride
            cache[last : last + 64] = np.arange(64) + block % 100
            engine.submit(plan, STORE, [(0, ids(block), ids(1))]).check(60)
            at = world.canonical_at(0, 1)
            stored = world.region[at : at + 128].reshape(4, 2, 16)[:, 1].ravel()
            assert np.array_equal(stored, np.arange(64) + block % 100)
        del plan
        del cache


# Refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("direction", "blocks", "pages", "words"),
    [
        (
            STORE,
            [0, 6],
            [0, 1],
            r"group 0 .*model\.layers\.0.* index 1: block 6 is not in \[0, 6\)",
        ),
        (STORE, [-1], [0], r"block -1 is not in \[0, 6\)"),
        (LOAD, [0, 1], [0, 6], r"index 1: page 6 is not in \[0, 6\)"),
        (LOAD, [0], [-(2**63)], r"page -9223372036854775808 is not in"),
        (STORE, [0, 1], [3, 3], r"index 1: page 3 is a destination twice"),
        (LOAD, [2, 4, 2], [0, 1, 2], r"index 2: block 2 is a destination twice"),
    ],
)
def test_a_bad_id_is_named_and_nothing_moves(
    engine: Engine, direction: int, blocks: list[int], pages: list[int], words: str
) -> None:
    world = heads()
    world.scramble(1)
    before = world.cache.copy(), world.region.copy()
    plan = world.plan()
    for _ in range(2):
        with pytest.raises(PlanError, match=words):
            submit(engine, world, direction, blocks, pages, plan=plan)
    assert engine.in_flight == 0
    assert np.array_equal(world.cache, before[0])
    assert np.array_equal(world.region, before[1])
    submit(engine, world, direction, [0, 1], [0, 1], plan=plan).check(60)


def test_caches_elsewhere_are_not_touched_by_the_host_mover(engine: Engine) -> None:
    world = heads()
    world.scramble(1)
    before = world.cache.copy(), world.region.copy()
    plan = world.plan(device="cuda:0")
    for direction in (STORE, LOAD):
        with pytest.raises(PlanError, match="on cuda:0, which the host mover cannot reach"):
            submit(engine, world, direction, [0], [0], plan=plan)
    assert engine.in_flight == 0
    assert np.array_equal(world.cache, before[0])
    assert np.array_equal(world.region, before[1])


def test_lists_that_do_not_fit_are_refused(engine: Engine) -> None:
    plan = heads().plan()
    with pytest.raises(PlanError, match="2 block ids and 1 page ids"):
        engine.submit(plan, STORE, [(0, ids(0, 1), ids(0))])
    with pytest.raises(PlanError, match="group 1 does not exist"):
        engine.submit(plan, STORE, [(1, ids(0), ids(0))])
    with pytest.raises(PlanError, match="listed twice"):
        engine.submit(plan, STORE, [(0, ids(0), ids(0)), (0, ids(1), ids(1))])
    with pytest.raises(PlanError, match="store cannot be expedited"):
        engine.submit(plan, STORE, [(0, ids(0), ids(0))], expedited=True)
    with pytest.raises(PlanError, match="mover 'teleport'"):
        engine.submit(plan, STORE, [(0, ids(0), ids(0))], mover="teleport")


@pytest.mark.parametrize(
    "wrong",
    [
        np.zeros(2, np.int32),
        np.zeros(2, np.float64),
        np.zeros((2, 1), np.int64),
        np.zeros(4, np.int64)[::2],
        np.zeros(2, ">i8"),
        [0, 1],
        None,
    ],
)
def test_what_is_not_an_int64_array_is_a_type_error(engine: Engine, wrong: object) -> None:
    with pytest.raises(TypeError, match="int64 array"):
        engine.submit(heads().plan(), STORE, [(0, wrong, ids(0, 1))])  # type: ignore[list-item]


def test_ids_may_come_from_any_int64_buffer(engine: Engine) -> None:
    import array

    world = heads()
    engine.submit(
        world.plan(),
        LOAD,
        [(0, array.array("q", [1, 2]), memoryview(ids(0, 1)))],  # type: ignore[list-item]
    ).check(60)


def test_hostile_bytes_are_refused() -> None:
    world = heads()
    sound = world.descriptor()
    dice = random.Random(5)
    refused = 0
    for _ in range(4000):
        bad = sound.copy()
        at = dice.randrange(len(bad) // 4) * 4
        bad[at : at + 4] = dice.choice([0, 0xFF, dice.randrange(256)])
        try:
            world.plan(bad)
        except ValueError as error:
            assert len(str(error)) > 30
            refused += 1
    assert refused > 2000
    for size in range(len(sound)):
        with pytest.raises(ValueError, match="descriptor"):
            world.plan(sound[:size].copy())
    with pytest.raises(ValueError, match="descriptor"):
        world.plan(b"")
    with pytest.raises(ValueError, match="declared cache tensor"):
        _C.Plan(sound, [(world.cache.ctypes.data, 100)], [(0, 2**64 - 1)], world.names)
    with pytest.raises(ValueError, match="64-bit address space"):
        _C.Plan(sound, [(2**64 - 10, 100)], [], world.names)


def test_a_page_byte_may_be_written_once_only() -> None:
    box = Box(16, (4, 1), 0, (16, 0), 0, (16, 0))
    twice = Box(16, (1, 1), 64, (0, 0), 48, (0, 0))
    with pytest.raises(ValueError, match="byte 48 of the canonical page is written twice"):
        World([box, twice]).plan()


# Order --------------------------------------------------------------------------------------------


def test_a_load_of_a_page_waits_for_the_store_of_it(engine: Engine) -> None:
    world = heads()
    world.scramble(2)
    plan = world.plan()
    engine.stall(["store"])
    store = submit(engine, world, STORE, [0], [4], plan=plan)
    bound = submit(engine, world, LOAD, [1], [4], plan=plan)
    free = submit(engine, world, LOAD, [2], [5], plan=plan, expedited=True)
    assert free.wait(60)
    assert not bound.wait(0.05)
    assert not store.done()
    engine.resume()
    bound.check(60)
    for layer in range(world.layers):
        near = [world.page_at(layer, block) for block in (0, 1)]
        assert np.array_equal(*(world.cache[at : at + world.page] for at in near))


def test_a_load_into_a_block_waits_for_the_store_that_reads_it(engine: Engine) -> None:
    world = heads()
    plan = world.plan()
    engine.stall(["store"])
    submit(engine, world, STORE, [3], [0], plan=plan)
    load = submit(engine, world, LOAD, [3], [1], plan=plan)
    assert not load.wait(0.05)
    engine.resume()
    assert load.wait(60)


def test_two_plans_over_one_region_know_the_same_pages(engine: Engine) -> None:
    world = heads()
    other = heads()
    other.region, other.region_at = world.region, world.region_at
    engine.stall(["store"])
    submit(engine, world, STORE, [0], [4])
    bound = submit(engine, other, LOAD, [0], [4])
    free = submit(engine, other, LOAD, [1], [3])
    assert free.wait(60)
    assert not bound.wait(0.05)
    engine.resume()
    assert bound.wait(60)


def test_ids_may_be_reused_as_soon_as_submit_returns(engine: Engine) -> None:
    world = heads()
    world.scramble(3)
    plan = world.plan()
    world.move(STORE, [(0, 5)])
    world.move(STORE, [(1, 4)])
    expected = world.region.copy()
    blocks, pages = ids(0), ids(5)
    engine.stall()
    jobs = [engine.submit(plan, STORE, [(0, blocks, pages)])]
    blocks[:], pages[:] = 1, 4
    jobs.append(engine.submit(plan, STORE, [(0, blocks, pages)]))
    blocks[:], pages[:] = 2, 3
    engine.resume()
    for job in jobs:
        job.check(60)
    assert np.array_equal(world.region, expected)


def test_finished_reports_each_lane_in_order_of_submission_and_once(engine: Engine) -> None:
    world = heads()
    plan = world.plan()
    engine.stall(["load"])
    loads = [submit(engine, world, LOAD, [0], [page], plan=plan, tag=page) for page in range(3)]
    stores = [submit(engine, world, STORE, [5], [page], plan=plan) for page in (3, 4)]
    hidden = submit(engine, world, STORE, [4], [5], plan=plan, report=False)
    for job in [*stores, hidden]:
        job.check(60)
    assert engine.finished("store") == stores
    assert engine.finished("load") == []
    engine.resume()
    for job in loads:
        job.check(60)
    reported = engine.finished("load")
    assert reported == loads
    assert [job.tag for job in reported] == [0, 1, 2]
    assert engine.finished("load") == engine.finished("store") == engine.finished("expedited") == []


def test_queries_do_not_block(engine: Engine) -> None:
    world = heads()
    engine.stall()
    job = submit(engine, world, STORE, [0], [0])
    start = time.perf_counter()
    assert not job.query()
    assert not job.wait(0)
    assert engine.finished("store") == []
    with pytest.raises(RuntimeError, match="not done"):
        job.result()
    with pytest.raises(TransferError, match="not done after"):
        job.check(0.01)
    assert time.perf_counter() - start < 5
    engine.resume()
    job.check(60)


# Failure, cancellation, endings ------------------------------------------------------------------


def test_a_failed_page_is_named_and_the_rest_arrives(engine: Engine) -> None:
    world = heads()
    world.scramble(4)
    before = world.region.copy()
    world.move(STORE, [(0, 0), (1, 1), (2, 2)])
    expected = world.region.copy()
    at = world.canonical_at(1, 1)
    expected[at : at + world.canonical] = before[at : at + world.canonical]
    world.region[:] = before
    plan = world.plan()
    engine.inject_fault(STORE, 1, 1, "no such luck")
    job = submit(engine, world, STORE, [0, 1, 2], [0, 1, 2], plan=plan)
    with pytest.raises(TransferError, match=r"layers\.1, block 1, canonical page 1: no such"):
        job.check(60)
    result = job.result()
    assert result["failed"] == [("model.layers.1", 1, 1, "no such luck")]
    assert result["failed_pages"] == 1
    assert result["pages"] == 5
    assert np.array_equal(world.region, expected)
    engine.clear_faults()
    submit(engine, world, STORE, [0, 1, 2], [0, 1, 2], plan=plan).check(60)


def test_cancelled_jobs_move_nothing_and_say_so(engine: Engine) -> None:
    world = heads()
    world.scramble(5)
    before = world.region.copy()
    engine.stall()
    jobs = [submit(engine, world, STORE, [0], [page]) for page in range(4)]
    assert jobs[0].cancel()
    assert not jobs[0].cancel()
    assert engine.cancel_pending() == 3
    for job in jobs:
        with pytest.raises(TransferError, match="cancelled before it began"):
            job.check(60)
    assert np.array_equal(world.region, before)
    assert engine.finished("store") == jobs
    engine.resume()


@pytest.mark.parametrize("drain", [True, False])
def test_shutdown_ends_every_job(drain: bool) -> None:
    world = heads()
    plan = world.plan()
    engine = Engine(1)
    engine.stall()
    jobs = [submit(engine, world, STORE, [page % 6], [page % 6], plan=plan) for page in range(50)]
    assert engine.shutdown(drain=drain, timeout=60)
    assert all(job.done() for job in jobs)
    assert all(job.result()["cancelled"] is not drain for job in jobs)
    with pytest.raises(RuntimeError, match="shut down"):
        submit(engine, world, STORE, [0], [0], plan=plan)


def test_drain_waits_for_one_plan_only(engine: Engine) -> None:
    world, other = heads(), heads()
    plan, other_plan = world.plan(), other.plan()
    engine.stall(["load"])
    submit(engine, other, LOAD, [0], [0], plan=other_plan)
    submit(engine, world, STORE, [0], [0], plan=plan)
    assert engine.drain(plan, 60)
    assert not engine.drain(other_plan, 0.05)
    engine.resume()
    assert engine.drain(other_plan, 60)


def test_an_engine_may_be_dropped_with_jobs_in_flight() -> None:
    world = heads(blocks=64, rows=32, fragment=1024)
    plan = world.plan()
    engine = Engine(2)
    jobs = [submit(engine, world, STORE, range(64), range(64), plan=plan) for _ in range(20)]
    del engine
    gc.collect()
    assert all(job.wait(60) for job in jobs)


def test_what_a_job_keeps_lives_until_its_last_byte(engine: Engine) -> None:
    class Owner:
        pass

    owner = Owner()
    alive = weakref.ref(owner)
    world = heads()
    engine.stall()
    job = submit(engine, world, STORE, [0], [0], keep=owner)
    del owner
    gc.collect()
    assert alive() is not None
    engine.resume()
    job.check(60)
    engine.finished("store")
    gc.collect()
    assert alive() is None


def test_progress_words_appear_layer_by_layer(engine: Engine) -> None:
    world = heads(layers=3)
    plan = world.plan()
    words = np.zeros(3, np.uint32)
    engine.inject_fault(LOAD, 1, 2, "stuck")
    submit(engine, world, LOAD, [0], [2], plan=plan, progress=words, progress_value=7).wait(60)
    assert words.tolist() == [7, 0, 7]
    engine.clear_faults()
    words[:] = 0
    submit(engine, world, LOAD, [0], [2], plan=plan, progress=words.ctypes.data).check(60)
    assert words.tolist() == [1, 1, 1]
    with pytest.raises(PlanError, match="progress has 2 words"):
        submit(engine, world, LOAD, [0], [2], plan=plan, progress=words[:2])
    with pytest.raises(TypeError, match="uint32"):
        submit(engine, world, LOAD, [0], [2], plan=plan, progress=np.zeros(3, np.int64))


# Callbacks, metrics, processes --------------------------------------------------------------------


def test_a_callback_thread_that_cannot_be_had_is_told_before_anything_is_submitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = heads()
    plan = world.plan()
    called: list[Job] = []

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with Engine(1) as engine:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            with pytest.raises(TransferError, match="can't start new thread"):
                submit(engine, world, STORE, [0], [0], plan=plan, callback=called.append)
        assert engine.metrics()["transfers"] == {}
        job = submit(engine, world, STORE, [0], [1], plan=plan, callback=called.append)
        job.check()
    assert called == [job]


def test_callbacks_run_on_a_thread_of_the_engine() -> None:
    world = heads()
    plan = world.plan()
    called: list[tuple[int, int]] = []

    def note(job: Job) -> None:
        called.append((job.tag, threading.get_ident()))
        if job.tag == 1:
            raise RuntimeError("callbacks may fail")
        if job.tag == 2:
            raise SystemExit("and may try to leave")

    with Engine(1) as engine:
        for tag in range(4):
            submit(engine, world, STORE, [0], [tag], plan=plan, tag=tag, callback=note)
    assert sorted(tag for tag, _ in called) == [0, 1, 2, 3]
    assert threading.get_ident() not in {thread for _, thread in called}


def test_counters_count(engine: Engine) -> None:
    world = heads()
    plan = world.plan()
    for page in range(3):
        submit(engine, world, STORE, [0], [page], plan=plan).check(60)
    submit(engine, world, LOAD, [0, 1], [0, 1], plan=plan).check(60)
    transfers = engine.metrics()["transfers"]
    store, load = transfers["store", "host"], transfers["load", "host"]
    page = sum(len(box.bytes()) for box in world.boxes)
    assert (store["submitted"], store["finished"], store["pages"]) == (3, 3, 6)
    assert (store["bytes"], load["bytes"]) == (6 * page, 4 * page)
    assert store["fragments"] == 6 * 4
    assert sum(store["queue"]["counts"]) == sum(store["copy"]["counts"]) == 3
    assert len(store["copy"]["counts"]) == _C.HISTOGRAM_BUCKETS
    assert store["copy"]["sum_s"] > 0


def test_counters_are_exposed_to_prometheus(engine: Engine) -> None:
    from vkvmap.metrics import exposition

    world = heads()
    submit(engine, world, STORE, [0], [0]).check(60)
    text = exposition(engine).decode()
    assert 'vkvmap_jobs_finished_total{direction="store",mover="host"} 1.0' in text
    assert 'vkvmap_copy_seconds_bucket{direction="store",le="+Inf",mover="host"} 1.0' in text
    assert 'vkvmap_copy_seconds_count{direction="store",mover="host"} 1.0' in text


def test_threads_of_the_caller_go_on_while_one_waits(engine: Engine) -> None:
    world = heads()
    engine.stall()
    job = submit(engine, world, STORE, [0], [0])
    waiter = threading.Thread(target=job.wait, daemon=True)
    waiter.start()
    assert sum(range(1000)) == 499500
    engine.resume()
    waiter.join(60)
    assert not waiter.is_alive()


def run_python(source: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, "-c", textwrap.dedent(source)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=os.path.dirname(os.path.dirname(__file__)),
    )


def test_a_forked_child_gets_an_engine_of_its_own() -> None:
    done = run_python(
        """
        import os
        from tests.descriptors import heads, ids
        from vkvmap.transfer import default_engine
        world = heads(); plan = world.plan()
        parent = default_engine()
        parent.submit(plan, 0, [(0, ids(0), ids(0))]).check(60)
        parent.stall()
        pending = parent.submit(plan, 0, [(0, ids(1), ids(1))])
        child = os.fork()
        if child == 0:
            try:
                parent.submit(plan, 0, [(0, ids(0), ids(0))])
            except RuntimeError as error:
                assert "parent process" in str(error)
            else:
                os._exit(3)
            assert default_engine() is not parent
            default_engine().submit(plan, 0, [(0, ids(2), ids(2))]).check(60)
            del parent, pending
            raise SystemExit(0)
        _, status = os.waitpid(child, 0)
        parent.resume()
        pending.check(60)
        print("child", os.waitstatus_to_exitcode(status))
        """,
        # Python 3.12 and later warn of any fork beside threads; that is what is tested here.
        "-W",
        "ignore::DeprecationWarning",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "child 0\n", "")


def test_plans_may_end_on_a_thread_of_the_engine_beside_other_interpreters() -> None:
    """From the first sub-interpreter on, CPython no longer says which thread has the lock."""
    done = run_python(
        """
        import importlib, sys
        name = "_interpreters" if sys.version_info >= (3, 13) else "_xxsubinterpreters"
        importlib.import_module(name).create()
        import numpy as np
        from vkvmap.calibrate_probe import synthetic_plan
        from vkvmap.transfer import Engine
        engine, near, far = Engine(1), np.zeros(1 << 20, np.uint8), np.zeros(1 << 21, np.uint8)
        memory = near.ctypes.data, near.nbytes, far.ctypes.data, far.nbytes
        ids = np.arange(256, dtype=np.int64)
        for _ in range(1000):
            plan = synthetic_plan(*memory, page_bytes=4096, run_bytes=256)
            engine.submit(plan, 0, [(0, ids, ids)], report=False)
            del plan
        engine.shutdown()
        print("ok")
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")


@pytest.mark.parametrize("stalled", [False, True])
def test_the_interpreter_may_end_with_jobs_in_flight(stalled: bool) -> None:
    done = run_python(
        f"""
        from tests.descriptors import heads, ids
        from vkvmap.transfer import Engine
        import numpy as np
        world = heads(blocks=64, rows=32, fragment=1024, tokens=4); plan = world.plan()
        engine = Engine(2)
        if {stalled}:
            engine.stall()
        everything = np.arange(64)
        for _ in range(200):
            engine.submit(plan, 0, [(0, everything, everything)], callback=print)
        """
    )
    assert done.returncode == 0, done.stderr


def test_the_default_engine_is_one_per_process() -> None:
    assert default_engine() is default_engine()
