"""vLLM's worker with its cache on a GPU: memory pinned, jobs behind the engine's own stream."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.gpu.sides import MOVERS, slow
from tests.vllm.test_worker import BLOCKS, base, engine, job, setting
from vkvmap.cache import TensorView
from vkvmap.integrations.vllm.options import Options


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[Any]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # of the choice between movers
    with engine(monkeypatch, base()) as found:
        yield found


class OnGpu:
    """The caches of `setting` on the GPU, and page-aligned memory for as many rows as blocks."""

    def __init__(self, torch: Any) -> None:
        self.tensors: list[Any] = []

        def place(array: np.ndarray) -> TensorView:
            moved = torch.from_numpy(array.view(np.uint8).reshape(-1)).cuda()
            self.tensors.append(moved)
            at = moved.data_ptr()
            return TensorView(
                at, array.shape, array.strides, array.itemsize, (at, array.nbytes), "cuda:0", moved
            )

        self.setup, memory = setting(place)
        torch.cuda.synchronize()
        self.memory = mmap.mmap(-1, memory.nbytes)

    def blocks(self) -> list[np.ndarray]:
        """The bytes of every block, layer by layer."""
        return [tensor.cpu().numpy().reshape(BLOCKS, -1) for tensor in self.tensors]


@pytest.mark.parametrize("mover", ["auto", *MOVERS])
def test_jobs_wait_for_what_the_engine_has_queued_before_them(
    gpu: Any, module: Any, mover: str
) -> None:
    world = OnGpu(gpu)
    released: list[str] = []
    worker = module.VkvmapWorker(
        world.setup,
        Options(mover=mover),
        memoryview(world.memory),
        BLOCKS,
        lambda: released.append("memory"),
    )
    assert worker._region.pinned, worker._region.registration.why_not
    stored, others, stream = [3, 1, 6], [0, 2, 4, 5, 7], gpu.cuda.Stream()
    cache, host = job(stored)
    with gpu.cuda.stream(stream):
        slow(gpu, stream)
        for tensor in world.tensors:  # what the model writes
            tensor.fill_(0x5C)
        assert worker.submit_store(1, cache, host)
    worker.wait([1])
    assert [(entry.job_id, entry.success) for entry in worker.get_finished()] == [(1, True)]
    with gpu.cuda.stream(stream):
        slow(gpu, stream)
        for tensor in world.tensors:  # blocks are cleared before they are given out again
            tensor.zero_()
        assert worker.submit_load(2, host, cache)
    worker.wait([2])
    assert [(entry.job_id, entry.success) for entry in worker.get_finished()] == [(2, True)]
    gpu.cuda.synchronize()
    for got in world.blocks():
        assert (got[stored] == 0x5C).all() and not got[others].any()
    worker.shutdown()
    assert released == ["memory"] and not worker._region.alive
