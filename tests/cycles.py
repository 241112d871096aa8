"""Everything made and let go, again and again: `python -m tests.cycles [COUNT]` (a million).

One cycle derives mappings, packs and validates a plan over a cache and a region, moves a page there
and back, and lets all of it go; every 64th has an engine and a region of its own. Resident memory,
open descriptors and threads must not grow after the first tenth. Prints what it measured; exits
with 1 if something grew.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np

from vkvmap import (
    CacheView,
    LayerSpec,
    LayerTable,
    RankGrid,
    Region,
    TransferPlan,
    derive_canonical_mappings,
)
from vkvmap.region import Section
from vkvmap.transfer import Engine

#: Allocators keep some; a leak of 16 bytes per cycle would exceed this in a long run.
SPARE_BYTES = 8 << 20


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


class Cycle:
    """What every cycle shares: a table, a cache, and an engine and region for most of them."""

    def __init__(self) -> None:
        self.table = LayerTable([LayerSpec.mla("layer", row_bytes=64)])
        self.storage = np.arange(4 * 4 * 64, dtype=np.uint8).reshape(4, 4, 64)
        self.caches = {"layer": CacheView.of(self.storage, "mla", 4)}
        self.sections = [Section("0", 4, 256)]
        self.engine = Engine(threads=1)
        self.region = Region.create(self.sections, backing="private", populate_threads=0)

    def run(self, index: int) -> None:
        if index % 64:
            self._move(self.region, self.engine)
            return
        with Engine(threads=1) as engine:
            with Region.create(self.sections, populate_threads=0) as region:
                self._move(region, engine)

    def _move(self, region: Region, engine: Engine) -> None:
        mappings = derive_canonical_mappings(self.table, self.caches, RankGrid(), 0)
        with TransferPlan(mappings, self.caches, region, engine=engine) as plan:
            plan.store(([1], [2])).check(60)
            plan.load(([0], [2])).check(60)


def main(count: int) -> int:
    cycle, start = Cycle(), time.monotonic()
    warm = max(count // 10, 1)
    for index in range(warm):
        cycle.run(index)
    memory, files, running = resident(), open_files(), threads()
    for index in range(warm, count):
        cycle.run(index)
    grown = resident() - memory
    print(
        f"{count} cycles in {time.monotonic() - start:.0f} s: memory grew by {grown / 2**20:.1f} "
        f"MiB, descriptors by {open_files() - files}, threads by {threads() - running}"
    )
    return int(grown > SPARE_BYTES or open_files() > files or threads() > running)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000))
