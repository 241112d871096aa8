"""What the GPU tests share: both memories with copies on the CPU, and work that takes long."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vkvmap import _C
from vkvmap.calibrate_probe import synthetic_plan
from vkvmap.transfer import Engine, Job

MOVERS = ("kernel", "copy_engine")
STORE, LOAD = 0, 1

#: Cycles of work behind which a transfer of the right order is seen to wait: 30 ms of a chip at
#: 2 GHz, unless told otherwise. And of work within which a test can look around: two seconds.
SHORT = int(os.environ.get("VKVMAP_TEST_SHORT_CYCLES", "60_000_000"))
LONG = 4_000_000_000


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


class Sides:
    """A cache on the GPU, pinned canonical memory, and copies on the CPU that say what is right."""

    def __init__(self, torch: Any, cache_bytes: int, host_bytes: int, seed: int = 0) -> None:
        self._torch = torch
        rng = np.random.default_rng(seed)
        self.cache_copy = rng.integers(0, 256, cache_bytes, np.uint8)
        self.host_copy = rng.integers(0, 256, host_bytes, np.uint8)
        self.cache = torch.from_numpy(self.cache_copy.copy()).cuda()
        self.host = torch.from_numpy(self.host_copy.copy()).pin_memory()
        torch.cuda.synchronize()

    def check(self, what: str) -> None:
        """Compare every byte, once all streams are through: what comes too late must show too."""
        self._torch.cuda.synchronize()
        np.testing.assert_array_equal(self.cache.cpu().numpy(), self.cache_copy, err_msg=what)
        np.testing.assert_array_equal(self.host.numpy(), self.host_copy, err_msg=what)


class Pages:
    """`count` blocks of `page_bytes` in fragments of `run_bytes`, and as many canonical pages."""

    def __init__(self, torch: Any, count: int, page_bytes: int, run_bytes: int) -> None:
        self.count, self.page_bytes = count, page_bytes
        nbytes = count * page_bytes
        self.sides = Sides(torch, nbytes, nbytes)
        self.plan: _C.Plan = synthetic_plan(
            self.sides.cache.data_ptr(),
            nbytes,
            self.sides.host.data_ptr(),
            nbytes,
            page_bytes=page_bytes,
            run_bytes=run_bytes,
            spread=1,
        )

    @property
    def blocks(self) -> np.ndarray:
        """The right bytes of every block; what is written here is expected."""
        return self.sides.cache_copy.reshape(self.count, self.page_bytes)

    @property
    def pages(self) -> np.ndarray:
        return self.sides.host_copy.reshape(self.count, self.page_bytes)

    @property
    def every(self) -> np.ndarray:
        """All block ids, and all page ids."""
        return np.arange(self.count, dtype=np.int64)

    def warm(self, engine: Engine, direction: int, mover: str) -> Job:
        """Move page 0 once, so that later transfers of the kind have nothing to prepare or load."""
        job = engine.submit(self.plan, direction, [(0, ids(0), ids(0))], mover=mover)
        job.check(60)
        if direction == STORE:
            self.pages[0] = self.blocks[0]
        else:
            self.blocks[0] = self.pages[0]
        return job

    def check(self, what: str) -> None:
        self.sides.check(what)


def small(torch: Any) -> Pages:
    return Pages(torch, count=16, page_bytes=1 << 16, run_bytes=1024)


def slow(torch: Any, stream: Any, cycles: int = SHORT) -> Any:
    """Keep `stream` busy for as long as `cycles` take; returns the event at their end."""
    over = torch.cuda.Event()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(cycles)
    over.record(stream)
    return over


def behind_slow_work(torch: Any, cycles: int) -> tuple[Any, Any]:
    """A stream that is busy for `cycles`, and the event at their end."""
    stream = torch.cuda.Stream()
    return stream, slow(torch, stream, cycles)


def with_longer_work(look: Callable[[int], bool], cycles: int = LONG) -> None:
    """Call `look` with more and more cycles, until it has looked before they were over.

    A test of order begins with `SHORT` work, has made a transfer of the same kind before it, and
    looks right after it has submitted: then there was something to wait for.
    """
    while cycles <= 16 * LONG:
        if look(cycles):
            return
        cycles *= 4
    pytest.fail(
        "nothing was seen before half a minute of work was over: something waits for it that must "
        "not, or this machine is far too slow"
    )


@contextmanager
def steps_of_another_thread() -> Iterator[Callable[[], int]]:
    """How many steps a thread has made that makes one a millisecond, if it may run."""
    made, ended = 0, threading.Event()

    def step() -> None:
        nonlocal made
        while not ended.is_set():
            made += 1
            time.sleep(0.001)

    thread = threading.Thread(target=step, daemon=True)
    thread.start()
    try:
        yield lambda: made
    finally:
        ended.set()
        thread.join()


def in_a_process_of_its_own(look: Callable[..., None], *arguments: object) -> None:
    """Call ``look(torch, *arguments)``, a function of a test module, where nothing ran before."""
    call = f"from {look.__module__} import {look.__name__} as look; look(torch, *{arguments!r})"
    done = subprocess.run(
        [sys.executable, "-c", f"import torch; {call}"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
