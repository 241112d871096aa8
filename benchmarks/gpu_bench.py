"""What the phases of the GPU suite share: memory, timing, verification, and a build if need be.

A dry run puts numpy memory and the host mover in the place of the GPU's, so that everything but the
device itself is exercised anywhere. Divided sizes show that the suite works, not how fast it is.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
DIRECTIONS = ("store", "load")


def is_built() -> bool:
    """Whether the checkout carries a build that has CUDA and is as new as its sources."""
    sys.path.insert(0, str(ROOT))
    try:
        from vkvmap import _C
    except ImportError:
        return False
    sources = [*ROOT.glob("csrc/*"), *ROOT.glob("CMakeLists.txt")]
    newest = max((source.stat().st_mtime for source in sources), default=0.0)
    return bool(_C.cuda.BUILT) and Path(_C.__file__).stat().st_mtime >= newest


def build() -> None:
    """Build the extension in place, for the GPU of this machine; downloads nothing."""
    seen = subprocess.run(
        ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split()
    architecture = seen[0].replace(".", "") if seen else "90"
    environment = {
        **os.environ,
        "VKVMAP_CUDA": "ON",
        "VKVMAP_CUDA_ARCHITECTURES": f"{architecture}-real",
    }
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)


def ensure_built() -> None:
    """Build if need be, and begin anew with the build."""
    if not is_built():
        build()
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.gpu_suite", *sys.argv[1:]])


class Bench:
    """Where it runs: memory, timing, results, and the time that is left.

    Args:
        dry: use numpy memory and the host mover.
        report: where figures go.
        seconds: budget; phases that would not fit are left out and named.
        scale: what sizes are divided by; with any but 1, models have few layers and rounds are few.
    """

    def __init__(self, dry: bool, report: Any, seconds: float, scale: int) -> None:
        import numpy as np

        self.np, self.dry, self.report, self.scale = np, dry, report, scale
        self.small = scale > 1
        self.rounds = 2 if self.small else 5
        self.deadline = time.monotonic() + seconds
        self.left_out: list[str] = []
        self.ceiling: dict[str, float] = {}
        if dry:
            from vkvmap.transfer import Engine

            self.engine = Engine(threads=1)
            return
        import torch

        from vkvmap.transfer import Engine

        self.torch = torch
        self.engine = Engine()
        self.stream: Any = torch.cuda.Stream()

    def time_left(self, needed: float, what: str) -> bool:
        if time.monotonic() + needed < self.deadline:
            return True
        self.left_out.append(f"{what}: out of time")
        return False

    def memory(self, nbytes: int, *, host: bool) -> Any:
        """uint8 memory: pinned host memory, or on the GPU; numpy in a dry run."""
        if self.dry:
            backing = self.np.zeros(nbytes + 4096, self.np.uint8)
            start = -backing.ctypes.data % 4096
            return backing[start : start + nbytes]
        torch = self.torch
        if host:
            return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
        return torch.zeros(nbytes, dtype=torch.uint8, device="cuda")

    def address(self, memory: Any) -> int:
        return memory.ctypes.data if self.dry else memory.data_ptr()

    def fill(self, memory: Any, seed: int) -> None:
        if self.dry:
            memory[:] = self.np.random.default_rng(seed).integers(
                0, 256, len(memory), self.np.uint8
            )
            return
        torch = self.torch
        torch.manual_seed(seed)
        if memory.device.type == "cuda":
            memory.random_(0, 256)
        else:
            memory.copy_(torch.randint(0, 256, memory.shape, dtype=torch.uint8, device="cuda"))
        torch.cuda.synchronize()

    def numpy(self, memory: Any) -> Any:
        return memory if self.dry else memory.cpu().numpy()

    @property
    def movers(self) -> tuple[str, ...]:
        return ("host",) if self.dry else ("kernel", "copy_engine")

    def move(self, mover: str, plan: Any, direction: str, groups: Sequence[Any]) -> None:
        """One transfer, enqueued or (dry) run."""
        from vkvmap import cuda

        if self.dry:
            job = self.engine.submit(plan, DIRECTIONS.index(direction), list(groups), mover=mover)
            job.check()
            return
        cuda.enqueue(mover, plan, DIRECTIONS.index(direction), groups, self.stream)

    def sync(self) -> None:
        if not self.dry:
            self.stream.synchronize()

    def seconds(self, run: Callable[[], object]) -> float:
        """One run, from the first byte to the last; what the host pays beforehand included."""
        self.sync()
        start = time.perf_counter()
        run()
        self.sync()
        return time.perf_counter() - start

    def race(self, contenders: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
        """Seconds per round, contenders in turn; the first round warms up."""
        taken: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range(self.rounds + 1):
            for name, run in contenders.items():
                elapsed = self.seconds(run)
                if turn:
                    taken[name].append(elapsed)
        return taken

    def gbps(
        self, name: str, nbytes: int, seconds: list[float], baseline: float | None = None
    ) -> float:
        """Report a rate, as a ratio to `baseline` GB/s if there is one."""
        from benchmarks.harness import Result

        value = nbytes / median(seconds) / 1e9
        spread = f"({nbytes / max(seconds) / 1e9:.1f}..{nbytes / min(seconds) / 1e9:.1f})"
        ratio = value / baseline if baseline else None
        self.report.add(Result(name, value, "GB/s", baseline, ratio), spread)
        return value

    def check(self, what: str, got: Any, want: Any) -> None:
        if not self.np.array_equal(got, want):
            wrong = int((got != want).sum())
            raise SystemExit(f"{what}: {wrong} of {want.size} bytes are wrong; nothing was timed")


def strided_plan(
    bench: Bench, cache: Any, host: Any, run: int, nbytes: int, spread: int = 2
) -> Any:
    from vkvmap.calibrate_probe import synthetic_plan

    page = max(run, 64 << 10) if nbytes >= 64 << 10 else max(run, nbytes)
    return synthetic_plan(
        bench.address(cache),
        nbytes // page * page,
        bench.address(host),
        nbytes // page * page * spread,
        page_bytes=page,
        run_bytes=run,
        spread=spread,
    )


def all_pages(bench: Bench, plan: Any) -> list[Any]:
    ids = bench.np.arange(plan.num_blocks(0), dtype=bench.np.int64)
    return [(0, ids, ids)]


if __name__ == "__main__":
    if not is_built():
        build()
