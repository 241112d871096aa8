"""The movers on a real GPU: every byte, ids behind slow work, graphs, unreachable memory.

Run with ``VKVMAP_TEST_GPU=1 python -m pytest tests/gpu``.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from benchmarks.model_shapes import SHAPES, PlacedShape, Shape
from tests.gpu.sides import LOAD, MOVERS, STORE, Pages, Sides, ids, in_a_process_of_its_own, slow
from vkvmap import _C, Region, calibrate, cuda
from vkvmap.calibrate_probe import synthetic_plan
from vkvmap.region import Section
from vkvmap.transfer import Engine


@pytest.mark.parametrize("mover", MOVERS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_real_models_move_as_the_host_mover_moves_them(
    gpu: Any, engine: Engine, shape: Shape, mover: str
) -> None:
    placed = PlacedShape(shape, 6, 6)
    sides = Sides(gpu, placed.cache_bytes, placed.region_bytes)
    plan = placed.plan(sides.cache.data_ptr(), sides.host.data_ptr())
    truth = placed.plan(sides.cache_copy.ctypes.data, sides.host_copy.ctypes.data)
    rng = np.random.default_rng(1)
    for direction in (0, 1):
        blocks, pages = rng.permutation(6)[:5], rng.permutation(6)[:5]
        groups = [(g, blocks, pages) for g in range(len(placed.groups))]
        engine.submit(truth, direction, groups, mover="host").check(60)
        engine.submit(plan, direction, groups, mover=mover).check(60)
        sides.check(f"{shape.name} {mover} {direction}")


@pytest.mark.parametrize("seed", range(12))
def test_all_widths_directions_and_launches_are_right(gpu: Any, seed: int) -> None:
    rng = random.Random(seed)
    run = rng.choice([1, 2, 6, 12, 24, 92, 128, 256, 528, 656, 4096, 5000, 65536])
    page = run * rng.randint(1, 40)
    blocks = rng.randint(1, 50)
    spread = rng.randint(1, 3)
    sides = Sides(gpu, page * blocks, page * blocks * spread, seed)
    make = lambda cache, host: synthetic_plan(  # noqa: E731
        cache,
        page * blocks,
        host,
        spread * page * blocks,
        page_bytes=page,
        run_bytes=run,
        spread=spread,
    )
    plan = make(sides.cache.data_ptr(), sides.host.data_ptr())
    truth = make(sides.cache_copy.ctypes.data, sides.host_copy.ctypes.data)
    stream = gpu.cuda.Stream()
    with_engine = Engine(threads=1)
    usual = [cuda.tuning(d) for d in cuda.DIRECTIONS]
    for direction, name in enumerate(cuda.DIRECTIONS):
        unroll = rng.choice([8, 4])
        cuda.set_tuning(
            name,
            cuda.KernelTuning(
                rng.randint(1, 9),
                rng.choice([32, 256, 512]),
                unroll,
                unroll == 4 or bool(seed % 2),
                rng.choice([0, 10_000, 64 << 20]),
            ),
        )
        every = np.random.default_rng(seed).permutation(blocks)
        groups = [(0, every, every[::-1].copy())]
        with_engine.submit(truth, direction, groups, mover="host").check(60)
        for mover in MOVERS:
            cuda.enqueue(mover, plan, direction, groups, stream)
            stream.synchronize()
            sides.check(f"{mover} {name} run {run}")
    for name, tuning in zip(cuda.DIRECTIONS, usual, strict=True):
        cuda.set_tuning(name, tuning)
    with_engine.shutdown()


def test_ids_of_transfers_behind_slow_work_are_their_own(gpu: Any) -> None:
    world = Pages(gpu, count=40_000, page_bytes=64, run_bytes=64)
    stream = gpu.cuda.Stream()
    slow(gpu, stream)
    rng = np.random.default_rng(0)
    for count in (5000, 3, 20_000, 2500, 1990, 5000, 5000, 5000, 5000):
        blocks, pages = (rng.permutation(world.count)[:count] for _ in range(2))
        cuda.enqueue("kernel", world.plan, STORE, [(0, blocks, pages)], stream)
        world.pages[pages] = world.blocks[blocks]
        blocks[:] = 0
    stream.synchronize()
    world.check("ring")


def test_a_graph_replays_with_other_ids_and_fewer(gpu: Any) -> None:
    world = Pages(gpu, count=64, page_bytes=8192, run_bytes=256)
    transfer = cuda.GraphTransfer(world.plan, STORE, {0: world.count})
    graph, stream = gpu.cuda.CUDAGraph(), gpu.cuda.Stream()
    with gpu.cuda.graph(graph, stream=stream):
        transfer.launch(gpu.cuda.current_stream())
        with pytest.raises(ValueError, match="captured"):
            one = [(0, ids(0), ids(0))]
            cuda.enqueue("kernel", world.plan, STORE, one, gpu.cuda.current_stream())
    rng = np.random.default_rng(0)
    for count in (64, 5, 0, 33):
        blocks, pages = (rng.permutation(world.count)[:count] for _ in range(2))
        transfer.set_ids([(0, blocks, pages)])
        graph.replay()
        gpu.cuda.synchronize()
        world.pages[pages] = world.blocks[blocks]
        world.check(f"{count} pairs")


def capture_before_any_launch(torch: Any, direction: int) -> None:
    world = Pages(torch, count=16, page_bytes=8192, run_bytes=256)
    transfer = cuda.GraphTransfer(world.plan, direction, {0: world.count})
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        transfer.launch(torch.cuda.current_stream())
    transfer.set_ids([(0, world.every, world.every)])
    graph.replay()
    if direction == STORE:
        world.pages[:] = world.blocks
    else:
        world.blocks[:] = world.pages
    world.check("replayed")


@pytest.mark.parametrize("direction", [STORE, LOAD])
def test_a_graph_may_have_the_first_launch_of_its_process(gpu: Any, direction: int) -> None:
    in_a_process_of_its_own(capture_before_any_launch, direction)


@contextmanager
def a_capture_of_another_thread(torch: Any) -> Iterator[None]:
    """Within, another thread captures a graph in global mode; the graph has to be good then."""
    marks = torch.zeros(4096, dtype=torch.uint8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    captures, over = threading.Event(), threading.Event()
    ended: list[bool] = []

    def capture() -> None:
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            marks.fill_(0x11)
            captures.set()
            ended.append(over.wait(60))

    thread = threading.Thread(target=capture)
    torch.cuda.synchronize()
    thread.start()
    assert captures.wait(60)
    try:
        yield
    finally:
        over.set()
        thread.join()
    graph.replay()
    torch.cuda.synchronize()
    assert ended == [True] and (marks.cpu().numpy() == 0x11).all()


def enqueue_while_another_thread_captures(torch: Any, mover: str) -> None:
    world = Pages(torch, count=5000, page_bytes=64, run_bytes=64)
    stream = torch.cuda.Stream()
    groups = [(0, world.every, world.every[::-1].copy())]  # more pairs than a launch carries
    with a_capture_of_another_thread(torch):
        cuda.enqueue(mover, world.plan, STORE, groups, stream)
    world.pages[::-1] = world.blocks
    world.check(mover)


def change_the_launch_while_another_thread_captures(torch: Any) -> None:
    world = Pages(torch, count=16, page_bytes=4096, run_bytes=64)
    stream = torch.cuda.Stream()
    cuda.enqueue("kernel", world.plan, STORE, [(0, ids(0), ids(0))], stream)
    stream.synchronize()
    cuda.set_tuning("store", cuda.KernelTuning(unroll=4))
    with a_capture_of_another_thread(torch):
        cuda.enqueue("kernel", world.plan, STORE, [(0, ids(1), ids(2))], stream)
    world.pages[0], world.pages[2] = world.blocks[0], world.blocks[1]
    world.check("other kernel")


def calibrate_while_another_thread_captures(torch: Any) -> None:
    with a_capture_of_another_thread(torch):
        assert calibrate.calibration(0, fresh=True).source == "measured"


@pytest.mark.parametrize("mover", MOVERS)
def test_transfers_and_the_captures_of_other_threads_leave_each_other_alone(
    gpu: Any, mover: str
) -> None:
    in_a_process_of_its_own(enqueue_while_another_thread_captures, mover)


@pytest.mark.parametrize(
    "look",
    [change_the_launch_while_another_thread_captures, calibrate_while_another_thread_captures],
)
def test_nothing_else_spoils_the_captures_of_other_threads(gpu: Any, look: Any) -> None:
    in_a_process_of_its_own(look)


def two_groups(torch: Any, layers: int) -> tuple[Sides, Any, Any]:
    """Memory, plan and the plan of the CPU copies for the first layers of a model of two groups."""
    shape = next(shape for shape in SHAPES if shape.model == "gemma-3-27b")
    placed = PlacedShape(shape, 4, 4, layers=layers)
    assert len(placed.groups) == 2
    sides = Sides(torch, placed.cache_bytes, placed.region_bytes)
    plan = placed.plan(sides.cache.data_ptr(), sides.host.data_ptr())
    return sides, plan, placed.plan(sides.cache_copy.ctypes.data, sides.host_copy.ctypes.data)


@pytest.mark.parametrize("mover", MOVERS)
@pytest.mark.parametrize("layers", [1, 8])  # one: the other group's layers are on another stage
def test_on_a_stream_groups_move_as_an_engine_moves_them(
    gpu: Any, engine: Engine, mover: str, layers: int
) -> None:
    sides, plan, truth = two_groups(gpu, layers)
    stream = gpu.cuda.Stream()
    for direction in (0, 1):
        groups = [(0, ids(0, 2), ids(3, 1)), (1, ids(1, 3), ids(2, 0))]
        engine.submit(truth, direction, groups, mover="host").check(60)
        cuda.enqueue(mover, plan, direction, groups, stream)
        sides.check(f"{mover} {direction}")


@pytest.mark.parametrize("mover", MOVERS)
def test_on_a_stream_wrong_ids_are_refused_and_nothing_moves(gpu: Any, mover: str) -> None:
    sides, plan, _ = two_groups(gpu, 8)
    stream = gpu.cuda.Stream()
    good = (0, ids(0), ids(0))
    for groups, sentence in (
        ([good, (1, ids(4), ids(0))], r"group 1 .*block 4 is not in \[0, 4\)"),
        ([good, (1, ids(0), ids(-1))], r"group 1 .*page -1 is not in \[0, 4\)"),
        ([good, (1, ids(0, 1), ids(2, 2))], "page 2 is a destination twice"),
        ([good, (0, ids(1), ids(1))], "group 0 is listed twice"),
        ([good, (2, ids(0), ids(0))], "group 2 does not exist"),
        (
            [(0, ids(0, 1), ids(0)), good],
            "group 0: there are 2 block ids and 1 page ids; they come in pairs",
        ),
    ):
        with pytest.raises(ValueError, match=sentence):
            cuda.enqueue(mover, plan, 0, groups, stream)
    sides.check(mover)


def test_a_graph_keeps_its_ids_when_others_are_refused(gpu: Any, engine: Engine) -> None:
    sides, plan, truth = two_groups(gpu, 8)
    transfer = cuda.GraphTransfer(plan, 0, {0: 2, 1: 1})
    graph, stream = gpu.cuda.CUDAGraph(), gpu.cuda.Stream()
    with gpu.cuda.graph(graph, stream=stream):
        transfer.launch(gpu.cuda.current_stream())
    kept = [(0, ids(0, 1), ids(2, 3)), (1, ids(3), ids(1))]
    transfer.set_ids(kept)
    for groups, sentence in (
        ([(0, ids(2, 3), ids(0, 1)), (1, ids(0, 1), ids(2, 3))], "made for 1; make it with"),
        ([(0, ids(2, 3), ids(0, 1)), (1, ids(0), ids(9))], "page 9 is not in"),
        ([(0, ids(2), ids(0)), (0, ids(3), ids(1))], "group 0 is listed twice"),
        ([(1, ids(2), ids(0, 1))], "group 1: there are 1 block ids and 2 page ids"),
    ):
        with pytest.raises(ValueError, match=sentence):
            transfer.set_ids(groups)
    graph.replay()
    engine.submit(truth, 0, kept, mover="host").check(60)
    sides.check("what was kept")


def test_a_graph_moves_groups_that_it_was_made_for_and_no_more_pairs_than_there_are(
    gpu: Any,
) -> None:
    sides, plan, _ = two_groups(gpu, 8)
    with pytest.raises(ValueError, match="made for 0; make it with"):
        cuda.GraphTransfer(plan, STORE, {0: 2}).set_ids([(1, ids(0), ids(0))])
    with pytest.raises(ValueError, match="group 2 does not exist"):
        cuda.GraphTransfer(plan, STORE, {2: 2})
    # Destinations are distinct, so more than there are cannot be asked for.
    many = cuda.GraphTransfer(plan, LOAD, {0: 1 << 60, 1: 4})
    every = np.arange(4, dtype=np.int64)
    many.set_ids([(0, every, every), (1, every, every)])
    sides.check("nothing was launched")


@pytest.mark.parametrize("first", [2, 0])
def test_a_graph_is_made_for_groups_that_are_named_once(gpu: Any, first: int) -> None:
    sides, plan, _ = two_groups(gpu, 8)
    with pytest.raises(ValueError, match="group 0 is listed twice"):
        _C.cuda.GraphTransfer(plan, STORE, [(0, first), (0, 2)])
    sides.check("nothing was launched")


@pytest.mark.parametrize("mover", MOVERS)
def test_ids_may_lie_in_any_int64_buffer(gpu: Any, engine: Engine, mover: str) -> None:
    world = Pages(gpu, count=16, page_bytes=8192, run_bytes=256)
    blocks, pages = (ctypes.c_int64 * 3)(4, 0, 9), (ctypes.c_int64 * 3)(15, 2, 1)
    engine.submit(world.plan, STORE, [(0, blocks, pages)], mover=mover).check(60)
    for block, page in zip(blocks, pages, strict=True):
        world.pages[page] = world.blocks[block]
    world.check("an engine's")
    cuda.enqueue(mover, world.plan, LOAD, [(0, pages, blocks)], gpu.cuda.Stream())
    for block, page in zip(pages, blocks, strict=True):
        world.blocks[block] = world.pages[page]
    world.check("on a stream")
    with pytest.raises(TypeError, match="int64"):
        cuda.enqueue(mover, world.plan, LOAD, [(0, (ctypes.c_int32 * 1)(), ids(0))], 0)


def test_there_is_no_transfer_without_a_plan(gpu: Any) -> None:
    none: Any = None
    for mover in MOVERS:
        with pytest.raises(TypeError):
            cuda.enqueue(mover, none, STORE, [(0, ids(0), ids(0))], gpu.cuda.Stream())
    with pytest.raises(TypeError):
        cuda.GraphTransfer(none, STORE, {0: 1})


@pytest.mark.parametrize("mover", MOVERS)
def test_a_region_is_pinned_in_pieces_and_moved(gpu: Any, engine: Engine, mover: str) -> None:
    rows, row = 24, 1 << 20
    with Region.create([Section("s", num_rows=rows, payload_bytes=row, private=False)]) as region:
        with_pieces = cuda.pin(region, max_piece_bytes=4 << 20)
        assert with_pieces.pinned and len(with_pieces.pieces) > 4, with_pieces.why_not
        sides = Sides(gpu, rows * row, rows * row)
        plan = synthetic_plan(
            sides.cache.data_ptr(),
            rows * row,
            region.section("s").address,
            rows * row,
            page_bytes=row,
            run_bytes=4096,
            spread=1,
        )
        every = np.arange(rows, dtype=np.int64)  # neighbours, which copy engines take together
        stream = gpu.cuda.Stream()

        def on_a_stream(direction: int) -> None:
            cuda.enqueue(mover, plan, direction, [(0, every, every)], stream)
            stream.synchronize()

        def by_an_engine(direction: int) -> None:
            engine.submit(plan, direction, [(0, every, every)], mover=mover).check(60)

        pages, blocks = region.rows("s"), sides.cache_copy.reshape(rows, row)
        for move in (on_a_stream, by_an_engine):
            pages[:] = 0
            move(STORE)
            np.testing.assert_array_equal(pages, blocks, err_msg=f"{mover} {move.__name__}")
            pages[:] = blocks[:] = blocks[::-1] ^ 0xFF
            move(LOAD)
            sides.check(f"{mover} {move.__name__}")
        with_pieces.release()


def test_pageable_memory_is_left_to_the_copy_engines(gpu: Any) -> None:
    cache = gpu.randint(0, 256, (1 << 20,), dtype=gpu.uint8, device="cuda")
    host = np.zeros(1 << 20, np.uint8)
    plan = synthetic_plan(
        cache.data_ptr(),
        1 << 20,
        host.ctypes.data,
        1 << 20,
        page_bytes=1 << 16,
        run_bytes=1 << 12,
        spread=1,
    )
    with pytest.raises(ValueError, match="not registered"):
        _C.cuda.prepare("kernel", plan)
    assert calibrate.choose_mover(plan, 0) == "copy_engine"
    every = np.arange(16, dtype=np.int64)
    stream = gpu.cuda.Stream()
    gpu.cuda.synchronize()
    cuda.enqueue("copy_engine", plan, STORE, [(0, every, every)], stream)
    stream.synchronize()
    np.testing.assert_array_equal(host, cache.cpu().numpy())


def test_calibration_takes_under_a_second_and_is_kept(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "_current", {})
    first = calibrate.calibration(0)
    assert first.source == "measured" and first.seconds < 1.5
    assert set(first.gbps) == {f"{d}/{m}" for d in cuda.DIRECTIONS for m in MOVERS}
    monkeypatch.setattr(calibrate, "_current", {})
    assert calibrate.calibration(0).source == "cached"
