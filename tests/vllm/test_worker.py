"""The worker without the engine: stand-ins for the few names of the engine that it derives from."""

from __future__ import annotations

import gc
import importlib
import logging
import sys
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vkvmap import CacheView, LayerSpec, LayerTable, RankGrid, derive_canonical_mappings
from vkvmap.integrations.vllm.board import SchedulerBoard, WorkerBoard
from vkvmap.integrations.vllm.options import EngineError, Options
from vkvmap.integrations.vllm.rows import RowLayout
from vkvmap.integrations.vllm.setup import Setup

BLOCKS, BLOCK, HEADS, SIZE = 8, 4, 2, 16
NAMES = ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn")


class OffloadingWorker:
    """The engine's interface of a worker."""

    submit_store = submit_load = get_finished = wait = shutdown = None


class GPULoadStoreSpec:
    def __init__(self, block_ids: Any, group_sizes: Any, block_indices: Any) -> None: ...


@dataclass
class TransferResult:
    job_id: int
    success: bool
    transfer_size: int | None = None
    transfer_time: float | None = None


def base(**other: Any) -> dict[str, Any]:
    """What the worker takes from the engine; `other` for what differs in a later release."""
    return {
        "OffloadingWorker": OffloadingWorker,
        "GPULoadStoreSpec": GPULoadStoreSpec,
        "TransferResult": TransferResult,
    } | other


@contextmanager
def engine(monkeypatch: pytest.MonkeyPatch, contents: dict[str, Any]) -> Iterator[Any]:
    """The worker's module, over an engine that is not there."""
    contents = {
        "vllm": {},
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.v1.kv_offload.base": contents,
    }
    for name, content in contents.items():
        stand_in = ModuleType(name)
        vars(stand_in).update(content)
        monkeypatch.setitem(sys.modules, name, stand_in)
    ours = [f"vkvmap.integrations.vllm.{name}" for name in ("startup", "worker")]
    for name in ours:
        monkeypatch.delitem(sys.modules, name, raising=False)
    try:
        yield importlib.import_module(ours[-1])
    finally:
        for name in ours:
            sys.modules.pop(name, None)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with engine(monkeypatch, base()) as found:
        yield found


def setting(place: Callable[[np.ndarray], Any] = lambda array: array) -> tuple[Setup, memoryview]:
    """Two layers of one rank, and memory for as many rows as there are blocks.

    `place` puts a layer's array where the cache is to be: returns what a `CacheView` takes.
    """
    table = LayerTable(
        LayerSpec.attention(name, num_kv_heads=HEADS, head_size=SIZE) for name in NAMES
    )
    rng = np.random.default_rng(0)
    caches = {
        name: CacheView.of(
            place(rng.integers(0, 1 << 16, (BLOCKS, HEADS, BLOCK, 2 * SIZE)).astype(np.uint16)),
            "packed_hnd",
            BLOCK,
        )
        for name in NAMES
    }
    mappings = derive_canonical_mappings(table, caches, RankGrid(), 0, strict=True)
    rows = RowLayout.of(mappings, {"0": BLOCK}, verify=False)
    named: Any = None
    setup = Setup(mappings, caches, rows, named, ("0",), 1, True, (), (), 0)
    return setup, memoryview(np.zeros(BLOCKS * rows.row_bytes, np.uint8))


def job(ids: list[int]) -> tuple[Any, Any]:
    """Blocks `ids` and the rows of the same numbers, as the engine names them."""
    array = np.array(ids, np.int32)
    cache = SimpleNamespace(block_ids=array, group_sizes=[len(ids)], block_indices=[0])
    return cache, SimpleNamespace(block_ids=array)


def ended(worker: Any, jobs: list[int]) -> list[Any]:
    worker.wait(jobs)
    return list(worker.get_finished())


def test_jobs_are_reported_once_with_their_bytes(module: Any) -> None:
    setup, memory = setting()
    worker = module.VkvmapWorker(setup, Options(), memory, BLOCKS, lambda: None)
    truth = {name: view.tensors[0].owner.copy() for name, view in setup.caches.items()}
    cache, host = job([3, 1, 6])
    assert worker.submit_store(1, cache, host)
    assert worker.submit_store(2, *job([]))
    for name in NAMES:
        assert np.array_equal(setup.caches[name].tensors[0].owner, truth[name])
    done = {entry.job_id: entry for entry in ended(worker, [1, 2])}
    assert (
        done[1].transfer_size == 3 * len(NAMES) * HEADS * BLOCK * 2 * SIZE * 2
        and done[2].transfer_size == 0
    )
    for name in NAMES:
        setup.caches[name].tensors[0].owner[:] = 0
    # A later release may say more by name.
    assert worker.submit_load(3, host, cache, expedited=True, something_new=1)
    assert [entry.job_id for entry in ended(worker, [3])] == [3]
    for name in NAMES:
        owner = setup.caches[name].tensors[0].owner
        assert np.array_equal(owner[[3, 1, 6]], truth[name][[3, 1, 6]])
        assert not owner[[0, 2, 4, 5, 7]].any()
    assert ended(worker, [1, 2, 3]) == []
    worker.shutdown()


class Renamed:
    def __init__(self, ids: Any, sizes: Any) -> None: ...


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ({"GPULoadStoreSpec": Renamed}, r"no GPULoadStoreSpec\(block_ids, block_indices"),
        ({"TransferResult": Renamed}, r"no TransferResult\(job_id, success"),
        ({"OffloadingWorker": Renamed}, "no OffloadingWorker.get_finished"),
    ],
)
def test_interfaces_that_transfers_need_are_looked_for_before_the_first(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(EngineError, match=sentence), engine(monkeypatch, base(**other)):
        pass


STEPS: dict[str, Callable[[Any], tuple[Any, str]]] = {
    "plan": lambda worker: (worker._plan, "close"),
    "engine": lambda worker: (worker._engine, "shutdown"),
    "region": lambda worker: (worker._region, "close"),
    "board": lambda worker: (worker.board, "close"),
}


@pytest.mark.parametrize("broken", [(), *((name,) for name in STEPS), ("plan", "engine", "board")])
def test_shutdown_releases_everything_whatever_fails_on_the_way(
    module: Any, monkeypatch: pytest.MonkeyPatch, broken: tuple[str, ...]
) -> None:
    setup, memory = setting()
    released: list[str] = []
    worker = module.VkvmapWorker(
        setup, Options(), memory, BLOCKS, lambda: released.append("memory")
    )
    worker.board = WorkerBoard(uuid.uuid4().hex, 0, {})
    for name, find in STEPS.items():
        owner, method = find(worker)
        real = getattr(owner, method)

        def step(*args: Any, name: str = name, real: Any = real, **keywords: Any) -> Any:
            released.append(name)
            real(*args, **keywords)
            if name in broken:
                raise OSError(f"{name} fails")

        monkeypatch.setattr(owner, method, step)
    if broken:
        with pytest.raises(OSError, match=f"{broken[-1]} fails"):
            worker.shutdown()
    else:
        worker.shutdown()
    assert released == ["plan", "engine", "region", "board", "memory"]
    assert not worker._region.alive
    worker.shutdown()
    assert len(released) == 5


def test_nothing_holds_a_worker_or_its_cache_after_shutdown(module: Any) -> None:
    setup, memory = setting()
    worker = module.VkvmapWorker(setup, Options(), memory, BLOCKS, lambda: None)
    worker.submit_store(1, *job([3, 1, 6]))
    ended(worker, [1])
    worker.shutdown()
    left = [weakref.ref(worker)]
    left += [weakref.ref(view.tensors[0].owner) for view in setup.caches.values()]
    del worker, setup
    gc.collect()
    assert [ref() for ref in left] == [None] * 3


def test_a_worker_that_cannot_be_made_leaves_no_threads_and_no_region(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup, memory = setting()
    ended: list[str] = []
    regions: list[Any] = []

    class Engine(module.Engine):  # type: ignore[misc, name-defined]
        def shutdown(self, **keywords: Any) -> bool:
            ended.append("engine")
            return bool(super().shutdown(**keywords))

    def refused(mappings: Any, caches: Any, region: Any, **_: Any) -> Any:
        regions.append(region)
        raise EngineError("no plan")

    monkeypatch.setattr(module, "Engine", Engine)
    monkeypatch.setattr(module, "TransferPlan", refused)
    with pytest.raises(EngineError, match="no plan"):
        module.VkvmapWorker(setup, Options(), memory, BLOCKS, lambda: None)
    assert ended == ["engine"] and not regions[0].alive


def test_a_board_that_is_refused_is_left_again() -> None:
    engine = uuid.uuid4().hex
    workers = [WorkerBoard(engine, rank, {"name": rank}) for rank in range(2)]
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(EngineError, match="workers disagree"):
        SchedulerBoard(engine, 2, timeout=5)
    assert len(list(Path("/proc/self/fd").iterdir())) <= open_before
    for worker in workers:
        worker.close()
