"""Timing the GPU movers on synthetic pages, for calibration and benchmarks.

What must stay true: what is timed is the mover itself on memory of its own, with plans that were
validated like any other; the runs of a page lie apart on the host, so nothing merges them.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from vkvmap import _C, cuda
from vkvmap.boxes import Box
from vkvmap.mapping import CopyRun
from vkvmap.pack import PlacedLayer, pack
from vkvmap.recognise import PageAddressing


class GpuProbe:
    """Times movers on synthetic pages in which runs of a given length lie apart.

    The rank holds every second run of its canonical pages, as under a two-way split: contiguous in
    the cache, strided on the host.

    Args:
        device: ordinal of the GPU.
        nbytes: bytes per timed transfer; short runs move less, since copy engines take long there.
    """

    PAGE_BYTES = 512 << 10

    def __init__(self, device: int, nbytes: int = 16 << 20) -> None:
        import torch

        self._torch = torch
        self._device = torch.device("cuda", device)
        with torch.cuda.device(self._device):
            self._stream: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(self._stream):
                self._cache = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
            self._host = torch.zeros(2 * nbytes, dtype=torch.uint8, pin_memory=True)
            # Not the device: that is refused while anybody captures a graph.
            self._stream.synchronize()
        self._plans: dict[int, _C.Plan] = {}

    def _plan(self, run: int) -> _C.Plan:
        if run not in self._plans:
            self._plans[run] = synthetic_plan(
                self._cache.data_ptr(),
                self._cache.nbytes,
                self._host.data_ptr(),
                self._host.nbytes,
                page_bytes=self.PAGE_BYTES,
                run_bytes=run,
            )
        return self._plans[run]

    def __call__(self, direction: str, mover: str, run: int) -> float:
        torch = self._torch
        plan = self._plan(run)
        pages = self._cache.nbytes // self.PAGE_BYTES
        if mover == "copy_engine" and run < 2 << 10:
            pages = max(1, pages // 8)
        ids = np.arange(pages, dtype=np.int64)
        groups = [(0, ids, ids)]
        side = cuda.DIRECTIONS.index(direction)
        best = 0.0
        with torch.cuda.device(self._device):
            for _ in range(3):  # the first warms up
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                wall = time.perf_counter()
                begin.record(self._stream)
                cuda.enqueue(mover, plan, side, groups, self._stream)
                end.record(self._stream)
                end.synchronize()
                seconds = max(begin.elapsed_time(end) / 1e3, 1e-9)
                if mover == "copy_engine":  # what the host pays per run counts as well
                    seconds = max(seconds, time.perf_counter() - wall)
                best = max(best, pages * self.PAGE_BYTES / seconds / 1e9)
        return best


def synthetic_plan(
    local: int,
    local_bytes: int,
    host: int,
    host_bytes: int,
    *,
    page_bytes: int,
    run_bytes: int,
    spread: int = 2,
) -> _C.Plan:
    """A plan of one layer whose pages hold every `spread`-th run of their canonical pages.

    Args:
        local, local_bytes: cache memory.
        host, host_bytes: canonical memory, at least `spread` times as long.
        page_bytes: of a cache page, a multiple of `run_bytes` or shorter.
        run_bytes: what is contiguous on both sides.
    """
    run = min(run_bytes, page_bytes)
    count = page_bytes // run
    page = run * count
    pages = local_bytes // page
    runs = (CopyRun(0, 0, run, count, run, spread * run),)
    layer = PlacedLayer(
        layer_id=0,
        group=0,
        load_runs=runs,
        store_runs=runs,
        num_writers=1,
        writer_index=0,
        addressing=PageAddressing(local, page, pages, page, (Box(0, 0, ((page, 1, 1),)),)),
        host_base=host,
        host_row_stride=spread * page,
        host_page_stride=spread * page,
        pages_per_row=1,
        num_rows=pages,
    )
    return _C.Plan(pack([layer], 1), [(local, local_bytes)], [(host, host_bytes)], ["synthetic"])
