"""What the GPU tests share: both memories with copies on the CPU, and work that takes long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from vkvmap import _C
from vkvmap.calibrate_probe import synthetic_plan

MOVERS = ("kernel", "copy_engine")
STORE, LOAD = 0, 1


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

    def check(self, what: str) -> None:
        self.sides.check(what)


def slow(torch: Any, stream: Any, cycles: int = 60_000_000) -> None:
    """Keep `stream` busy: tens of milliseconds on a GPU, or as long as `cycles` take."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(cycles)


def behind_slow_work(torch: Any, cycles: int) -> tuple[Any, Any]:
    """A stream that is busy for `cycles`, and the event at their end."""
    stream, over = torch.cuda.Stream(), torch.cuda.Event()
    slow(torch, stream, cycles)
    over.record(stream)
    return stream, over


def with_longer_work(look: Callable[[int], bool]) -> None:
    """Call `look` with more and more cycles, until it has looked before they were over."""
    for cycles in (4_000_000_000, 16_000_000_000, 64_000_000_000):  # two seconds and more
        if look(cycles):
            return
    pytest.fail("this machine is too slow to look at anything within half a minute")
