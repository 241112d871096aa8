"""vLLM's worker with its cache on a GPU: memory pinned, jobs behind the engine's own stream."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.gpu.sides import MOVERS, SHORT, slow, with_longer_work
from tests.vllm.test_worker import BLOCKS, base, engine, job, setting
from vkvmap.cache import TensorView
from vkvmap.integrations.vllm.options import Options


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
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
    def look(cycles: int) -> bool:
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

        def ended(number: int) -> None:
            worker.wait([number])
            seen = [(entry.job_id, entry.success) for entry in worker.get_finished()]
            assert seen == [(number, True)]

        cache, host = job([0])  # one of each kind, so that those behind work have all they need
        assert worker.submit_store(1, cache, host)
        ended(1)
        assert worker.submit_load(2, host, cache)
        ended(2)
        stored, others, stream = [3, 1, 6], [0, 2, 4, 5, 7], gpu.cuda.Stream()
        cache, host = job(stored)
        with gpu.cuda.stream(stream):
            over = slow(gpu, stream, cycles)
            for tensor in world.tensors:  # what the model writes
                tensor.fill_(0x5C)
            assert worker.submit_store(3, cache, host)
        in_time = not over.query()
        ended(3)
        with gpu.cuda.stream(stream):
            over = slow(gpu, stream, cycles)
            for tensor in world.tensors:  # blocks are cleared before they are given out again
                tensor.zero_()
            assert worker.submit_load(4, host, cache)
        in_time = in_time and not over.query()
        ended(4)
        gpu.cuda.synchronize()
        for got in world.blocks():
            assert (got[stored] == 0x5C).all() and not got[others].any()
        worker.shutdown()
        assert released == ["memory"] and not worker._region.alive
        return in_time

    with_longer_work(look, SHORT)
