"""Thousands of random jobs, stalls and cancellations on a few pages; nothing lost, nothing leaked.

`VKVMAP_SOAK_JOBS=100000` is the long version.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np

from tests.descriptors import World, heads, ids
from vkvmap import _C
from vkvmap.transfer import LANES, Engine, Job

JOBS = int(os.environ.get("VKVMAP_SOAK_JOBS", "4000"))
#: Sanitizers keep what is freed; their runs allow for more.
SPARE_KIB = int(os.environ.get("VKVMAP_SPARE_MIB", "8")) * 1024


def resident_kib() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))


class Expected:
    """The same memory, moved by the oracle one transfer after the other."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._bytes = world.cache.copy(), world.region.copy()

    def replay(self, sent: list[tuple[int, list[tuple[int, int]], Job]]) -> None:
        """Carry out what was not cancelled, and hold the real memory against it."""
        world = self._world
        moved = world.cache.copy(), world.region.copy()
        world.cache[:], world.region[:] = self._bytes
        for direction, pairs, job in sent:
            if not job.result()["cancelled"]:
                world.move(direction, pairs)
        self._bytes = world.cache.copy(), world.region.copy()
        assert np.array_equal(moved[0], world.cache)
        assert np.array_equal(moved[1], world.region)


def test_random_jobs_stalls_and_cancellations() -> None:
    dice = random.Random(7)
    world = heads(blocks=24, rows=8, pages_per_row=3, fragment=48, layers=3)
    world.scramble(7)
    plan = world.plan()
    expected = Expected(world)
    reported = dict.fromkeys(LANES, 0)
    called: list[int] = []
    asked = settled = 0
    with Engine(2) as engine:
        for round_number in range(JOBS // 100):
            sent: list[tuple[int, list[tuple[int, int]], Job]] = []
            for number in range(100):
                direction = dice.choice((_C.STORE, _C.LOAD))
                count = dice.randint(0, 8)
                blocks = dice.sample(range(world.blocks), count)
                pages = dice.sample(range(world.num_pages), count)
                job = engine.submit(
                    plan,
                    direction,
                    [(0, ids(*blocks), ids(*pages))],
                    expedited=direction == _C.LOAD and dice.random() < 0.2,
                    callback=(lambda ended: called.append(ended.id)) if number == 50 else None,
                    keep=bytearray(1 << 16),
                )
                asked += number == 50
                sent.append((direction, list(zip(blocks, pages, strict=True)), job))
                roll = dice.random()
                if roll < 0.02:
                    engine.stall(dice.sample(LANES, dice.randint(1, 3)))
                elif roll < 0.04:
                    engine.resume()
                elif roll < 0.06:
                    dice.choice(sent)[2].cancel()
                elif roll < 0.062:
                    engine.cancel_pending()
            engine.resume()
            ended: list[Job] = []
            for _, _, job in sent:
                assert job.wait(60)
            for lane in LANES:
                jobs = engine.finished(lane)
                assert [job.id for job in jobs] == sorted(job.id for job in jobs)
                assert {job.lane for job in jobs} <= {lane}
                reported[lane] += len(jobs)
                ended += jobs
            assert {job.id for job in ended} == {job.id for _, _, job in sent}
            expected.replay(sent)
            if round_number == JOBS // 1000:
                settled = resident_kib()
        grown = resident_kib() - settled
    assert sum(reported.values()) == JOBS // 100 * 100
    assert len(called) == len(set(called)) == asked
    # Every job kept 64 KiB.
    assert grown < SPARE_KIB < (JOBS - JOBS // 10) * 64
