"""Thousands of random jobs, stalls and cancellations on a few pages; nothing lost, nothing leaked.

`VKVMAP_SOAK_JOBS=100000` is the long version.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np

from tests.descriptors import heads, ids
from vkvmap import _C
from vkvmap.transfer import LANES, Engine, Job

JOBS = int(os.environ.get("VKVMAP_SOAK_JOBS", "4000"))


def resident_kib() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))


def test_random_jobs_stalls_and_cancellations() -> None:
    dice = random.Random(7)
    world = heads(blocks=24, rows=8, pages_per_row=3, fragment=48, layers=3)
    world.scramble(7)
    before = world.cache.copy(), world.region.copy()
    plan = world.plan()
    sent: list[tuple[int, list[tuple[int, int]], Job]] = []
    reported: dict[str, list[int]] = {lane: [] for lane in LANES}
    called: list[int] = []
    settled = 0
    with Engine(2) as engine:
        for number in range(JOBS):
            direction = dice.choice((_C.STORE, _C.LOAD))
            count = dice.randint(0, 8)
            blocks = dice.sample(range(world.blocks), count)
            pages = dice.sample(range(world.num_pages), count)
            job = engine.submit(
                plan,
                direction,
                [(0, ids(*blocks), ids(*pages))],
                expedited=direction == _C.LOAD and dice.random() < 0.2,
                callback=(lambda ended: called.append(ended.id)) if number % 50 == 0 else None,
                keep=bytearray(1 << 16),
            )
            sent.append((direction, list(zip(blocks, pages, strict=True)), job))
            roll = dice.random()
            if roll < 0.02:
                engine.stall(dice.sample(LANES, dice.randint(1, 3)))
            elif roll < 0.04:
                engine.resume()
            elif roll < 0.06:
                dice.choice(sent[-20:])[2].cancel()
            elif roll < 0.062:
                engine.cancel_pending()
            if number % 100 == 99:
                engine.resume()
                sent[-1][2].wait(60)
                for lane in LANES:
                    reported[lane] += [job.id for job in engine.finished(lane)]
            if number == JOBS // 2:
                settled = resident_kib()
        engine.resume()
        for _, _, job in sent:
            assert job.wait(60)
        grown = resident_kib() - settled
        for lane in LANES:
            reported[lane] += [job.id for job in engine.finished(lane)]
            assert reported[lane] == sorted(reported[lane])
    assert sum(map(len, reported.values())) == JOBS
    assert sorted(called) == [job.id for _, _, job in sent[::50]]
    # Each job kept 64 KiB: were they not let go, half of them would be here.
    assert grown < 16 * 1024 + JOBS // 10

    moved = world.cache.copy(), world.region.copy()
    world.cache[:], world.region[:] = before
    for direction, pairs, job in sent:
        if not job.result()["cancelled"]:
            world.move(direction, pairs)
    assert np.array_equal(world.cache, moved[0])
    assert np.array_equal(world.region, moved[1])
