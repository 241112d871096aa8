"""The movers on a real GPU: every byte, ids behind slow work, graphs, unreachable memory.

Run with ``VKVMAP_TEST_GPU=1 python -m pytest tests/gpu``; takes about a minute.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from benchmarks.model_shapes import SHAPES, PlacedShape, Shape
from tests.gpu.sides import MOVERS, Sides, slow
from vkvmap import _C, Region, calibrate, cuda
from vkvmap.calibrate_probe import synthetic_plan
from vkvmap.region import Section
from vkvmap.transfer import Engine


@pytest.fixture
def engine() -> Any:
    made = Engine(threads=2)
    yield made
    assert made.shutdown(timeout=60)


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
        ids = np.random.default_rng(seed).permutation(blocks)
        groups = [(0, ids, ids[::-1].copy())]
        with_engine.submit(truth, direction, groups, mover="host").check(60)
        for mover in MOVERS:
            cuda.enqueue(mover, plan, direction, groups, stream)
            stream.synchronize()
            sides.check(f"{mover} {name} run {run}")
    for name, tuning in zip(cuda.DIRECTIONS, usual, strict=True):
        cuda.set_tuning(name, tuning)
    with_engine.shutdown()


def test_ids_of_transfers_behind_slow_work_are_their_own(gpu: Any) -> None:
    page, blocks = 64, 40_000
    sides = Sides(gpu, page * blocks, page * blocks)
    plan = synthetic_plan(
        sides.cache.data_ptr(),
        page * blocks,
        sides.host.data_ptr(),
        page * blocks,
        page_bytes=page,
        run_bytes=page,
        spread=1,
    )
    stream = gpu.cuda.Stream()
    slow(gpu, stream)
    rng = np.random.default_rng(0)
    for count in (5000, 3, 20_000, 2500, 1990, 5000, 5000, 5000, 5000):
        ids, pages = rng.permutation(blocks)[:count], rng.permutation(blocks)[:count]
        cuda.enqueue("kernel", plan, 0, [(0, ids, pages)], stream)
        view = sides.host_copy.reshape(blocks, page)
        view[pages] = sides.cache_copy.reshape(blocks, page)[ids]
        ids[:] = 0
    stream.synchronize()
    sides.check("ring")


def test_a_graph_replays_with_other_ids_and_fewer(gpu: Any) -> None:
    page, blocks = 8192, 64
    sides = Sides(gpu, page * blocks, page * blocks)
    plan = synthetic_plan(
        sides.cache.data_ptr(),
        page * blocks,
        sides.host.data_ptr(),
        page * blocks,
        page_bytes=page,
        run_bytes=256,
        spread=1,
    )
    transfer = cuda.GraphTransfer(plan, 0, {0: blocks})
    graph, stream = gpu.cuda.CUDAGraph(), gpu.cuda.Stream()
    with gpu.cuda.graph(graph, stream=stream):
        transfer.launch(gpu.cuda.current_stream())
        with pytest.raises(ValueError, match="captured"):
            ids = np.arange(1, dtype=np.int64)
            cuda.enqueue("kernel", plan, 0, [(0, ids, ids)], gpu.cuda.current_stream())
    rng = np.random.default_rng(0)
    for count in (64, 5, 0, 33):
        ids, pages = rng.permutation(blocks)[:count], rng.permutation(blocks)[:count]
        transfer.set_ids([(0, ids, pages)])
        graph.replay()
        gpu.cuda.synchronize()
        sides.host_copy.reshape(blocks, page)[pages] = sides.cache_copy.reshape(blocks, page)[ids]
        sides.check(f"{count} pairs")


def two_groups(torch: Any, layers: int) -> tuple[Sides, Any, Any]:
    """Memory, plan and the plan of the CPU copies for the first layers of a model of two groups."""
    shape = next(shape for shape in SHAPES if shape.model == "gemma-3-27b")
    placed = PlacedShape(shape, 4, 4, layers=layers)
    assert len(placed.groups) == 2
    sides = Sides(torch, placed.cache_bytes, placed.region_bytes)
    plan = placed.plan(sides.cache.data_ptr(), sides.host.data_ptr())
    return sides, plan, placed.plan(sides.cache_copy.ctypes.data, sides.host_copy.ctypes.data)


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


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
    ):
        with pytest.raises(ValueError, match=sentence):
            transfer.set_ids(groups)
    graph.replay()
    engine.submit(truth, 0, kept, mover="host").check(60)
    sides.check("what was kept")


def test_a_graph_is_made_for_groups_that_are_named_once(gpu: Any) -> None:
    sides, plan, _ = two_groups(gpu, 8)
    with pytest.raises(ValueError, match="made for 0; make it with"):
        cuda.GraphTransfer(plan, 0, {0: 2}).set_ids([(1, ids(0), ids(0))])
    with pytest.raises(ValueError, match="group 2 does not exist"):
        cuda.GraphTransfer(plan, 0, {2: 2})
    # Destinations are distinct, so more than there are cannot be asked for.
    many = cuda.GraphTransfer(plan, 1, {0: 1 << 60, 1: 4})
    every = np.arange(4, dtype=np.int64)
    many.set_ids([(0, every, every), (1, every, every)])
    sides.check("nothing was launched")


def test_a_region_is_pinned_in_pieces_and_moved(gpu: Any) -> None:
    rows, row = 24, 1 << 20
    with Region.create([Section("s", num_rows=rows, payload_bytes=row, private=False)]) as region:
        with_pieces = cuda.pin(region, max_piece_bytes=4 << 20)
        assert with_pieces.pinned and len(with_pieces.pieces) > 4, with_pieces.why_not
        cache = gpu.randint(0, 256, (rows * row,), dtype=gpu.uint8, device="cuda")
        section = region.section("s")
        plan = synthetic_plan(
            cache.data_ptr(),
            rows * row,
            section.address,
            rows * row,
            page_bytes=row,
            run_bytes=4096,
            spread=1,
        )
        ids = np.arange(rows, dtype=np.int64)
        stream = gpu.cuda.Stream()
        gpu.cuda.synchronize()
        for mover in MOVERS:
            cuda.enqueue(mover, plan, 0, [(0, ids, ids)], stream)
            stream.synchronize()
            got = np.ctypeslib.as_array(
                (np.ctypeslib.ctypes.c_uint8 * (rows * row)).from_address(section.address)
            )
            np.testing.assert_array_equal(got, cache.cpu().numpy(), err_msg=mover)
        del plan
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
    ids = np.arange(16, dtype=np.int64)
    stream = gpu.cuda.Stream()
    gpu.cuda.synchronize()
    cuda.enqueue("copy_engine", plan, 0, [(0, ids, ids)], stream)
    stream.synchronize()
    np.testing.assert_array_equal(host, cache.cpu().numpy())


def test_calibration_takes_under_a_second_and_is_kept(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibrate, "_current", {})
    first = calibrate.calibration(0)
    assert first.source == "measured" and first.seconds < 1.5
    assert set(first.gbps) == {f"{d}/{m}" for d in cuda.DIRECTIONS for m in MOVERS}
    monkeypatch.setattr(calibrate, "_current", {})
    assert calibrate.calibration(0).source == "cached"
