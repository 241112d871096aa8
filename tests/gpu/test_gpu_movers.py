"""The movers on a real GPU: every byte, order behind slow work, graphs, unreachable memory.

Run with ``VKVMAP_TEST_GPU=1 python -m pytest tests/gpu``; takes about a minute.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from benchmarks.model_shapes import SHAPES, PlacedShape, Shape
from vkvmap import _C, Region, calibrate, cuda
from vkvmap.calibrate_probe import synthetic_plan
from vkvmap.region import Section
from vkvmap.transfer import Engine

MOVERS = ("kernel", "copy_engine")


@pytest.fixture
def engine() -> Any:
    made = Engine(threads=2)
    yield made
    assert made.shutdown(timeout=60)


class Sides:
    """A cache on the GPU, pinned canonical memory, and copies on the CPU for the host mover."""

    def __init__(self, torch: Any, cache_bytes: int, host_bytes: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.cache_copy = rng.integers(0, 256, cache_bytes, np.uint8)
        self.host_copy = rng.integers(0, 256, host_bytes, np.uint8)
        self.cache = torch.from_numpy(self.cache_copy.copy()).cuda()
        self.host = torch.from_numpy(self.host_copy.copy()).pin_memory()
        torch.cuda.synchronize()

    def check(self, what: str) -> None:
        np.testing.assert_array_equal(self.cache.cpu().numpy(), self.cache_copy, err_msg=what)
        np.testing.assert_array_equal(self.host.numpy(), self.host_copy, err_msg=what)


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


def slow(torch: Any, stream: Any) -> None:
    """Work that keeps `stream` busy for tens of milliseconds."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(60_000_000)


@pytest.mark.parametrize("mover", MOVERS)
@pytest.mark.parametrize("default_stream", [True, False])
def test_a_load_comes_after_a_pending_zeroing(
    gpu: Any, engine: Engine, mover: str, default_stream: bool
) -> None:
    sides = Sides(gpu, 1 << 20, 1 << 20)
    plan = synthetic_plan(
        sides.cache.data_ptr(),
        1 << 20,
        sides.host.data_ptr(),
        1 << 20,
        page_bytes=1 << 16,
        run_bytes=1024,
        spread=1,
    )
    stream = gpu.cuda.default_stream() if default_stream else gpu.cuda.Stream()
    slow(gpu, stream)
    with gpu.cuda.stream(stream):
        sides.cache.zero_()
    ids = np.arange(16, dtype=np.int64)
    engine.submit(plan, 1, [(0, ids, ids)], mover=mover, stream=stream).check(60)
    sides.cache_copy[:] = sides.host_copy
    sides.check(mover)


@pytest.mark.parametrize("mover", MOVERS)
def test_a_store_carries_what_the_compute_stream_is_still_writing(
    gpu: Any, engine: Engine, mover: str
) -> None:
    sides = Sides(gpu, 1 << 20, 1 << 20)
    plan = synthetic_plan(
        sides.cache.data_ptr(),
        1 << 20,
        sides.host.data_ptr(),
        1 << 20,
        page_bytes=1 << 16,
        run_bytes=1024,
        spread=1,
    )
    stream = gpu.cuda.Stream()
    slow(gpu, stream)
    with gpu.cuda.stream(stream):
        sides.cache.fill_(0x5C)
    ids = np.arange(16, dtype=np.int64)
    engine.submit(plan, 0, [(0, ids, ids)], mover=mover, stream=stream).check(60)
    sides.cache_copy[:] = sides.host_copy[:] = 0x5C
    sides.check(mover)


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
