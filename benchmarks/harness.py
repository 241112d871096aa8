"""What every benchmark shares: interleaved timing, medians with their spread, one JSON format.

These machines are shared and noisy, so contenders take turns within one process and figures are
quoted as ratios of medians, with the spread of the ratio from round to round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median


@dataclass(frozen=True)
class Result:
    """One figure; `ratio` is value against baseline, in the direction that the name says."""

    name: str
    value: float
    unit: str
    baseline: float | None = None
    ratio: float | None = None


@dataclass
class Samples:
    """Seconds of each round of one contender."""

    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return median(self.seconds)


def interleaved(
    contenders: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 9,
    warmup: int = 1,
    before: Callable[[], object] | None = None,
) -> dict[str, Samples]:
    """Time the contenders in turn, `rounds` times; `before` runs untimed before each."""
    samples = {name: Samples() for name in contenders}
    for turn in range(warmup + rounds):
        for name, run in contenders.items():
            if before is not None:
                before()
            start = time.perf_counter()
            run()
            elapsed = time.perf_counter() - start
            if turn >= warmup:
                samples[name].seconds.append(elapsed)
    return samples


def spread(above: Samples, below: Samples) -> tuple[float, float, float]:
    """Least, median and greatest ratio ``above / below`` over the rounds."""
    ratios = sorted(a / b for a, b in zip(above.seconds, below.seconds, strict=True))
    return ratios[0], median(ratios), ratios[-1]


def machine() -> str:
    """One line that says where the figures come from."""
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{model}, {cores} cores, Python {platform.python_version()}, {platform.system()}"


def parser(description: str) -> argparse.ArgumentParser:
    """An argument parser with the options that every benchmark has."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    made.add_argument("--rounds", type=int, default=9, help="timed rounds (default %(default)s)")
    return made


class Report:
    """Collects results, prints them as they come, writes them as JSON at the end."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.results: list[Result] = []
        print(f"machine: {machine()}")

    def add(self, result: Result, note: str = "") -> None:
        """Print one figure and keep it."""
        self.results.append(result)
        line = f"{result.name:<58} {result.value:>12.4g} {result.unit}"
        if result.ratio is not None:
            line += f"   {result.ratio:.3g}x"
        if note:
            line += f"   {note}"
        print(line, flush=True)

    def write(self) -> None:
        """Write ``[{"name", "value", "unit", "baseline", "ratio"}, ...]``."""
        if self._path is not None:
            rows = [asdict(result) for result in self.results]
            self._path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
