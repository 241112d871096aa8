"""Host lines and device sectors of the kernel's accesses, counted by its own index code.

The counts are compared with an enumeration of coordinates; the shares that real models reach are
asserted, because a link that carries half-used sectors is half a link.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from benchmarks.coalescing import Row, model_rows, sweep_rows, table
from vkvmap import _C
from vkvmap.calibrate_probe import synthetic_plan
from vkvmap.pack import struct


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return [*sweep_rows(), *model_rows()]


def test_real_models_waste_at_most_a_twentieth_of_the_sectors(rows: list[Row]) -> None:
    wasteful = [
        (r.name, r.direction, r.useful_host_sectors, r.useful_device_sectors)
        for r in rows
        if r.fragment >= 128 and min(r.useful_host_sectors, r.useful_device_sectors) < 0.95
    ]
    assert wasteful == []
    assert sum(r.fragment >= 128 for r in rows) >= 20


def test_the_defaults_keep_enough_in_flight_for_the_link(rows: list[Row]) -> None:
    slow = {r.name: r.predicted_gbps for r in rows if r.predicted_gbps < 0.9 * 55}
    assert slow == {}


def test_line_aligned_fragments_touch_no_line_twice(rows: list[Row]) -> None:
    for r in rows:
        if r.fragment % 128 == 0:
            assert r.host_lines * 128 == r.bytes, r.name


def test_the_table_has_a_line_for_every_row(rows: list[Row]) -> None:
    assert len(table(rows).splitlines()) == len(rows) + 1


@pytest.mark.parametrize("seed", range(20))
def test_counts_agree_with_an_enumeration_of_every_lane(seed: int) -> None:
    rng = random.Random(seed)
    local, host = (1 << 40) + 16 * rng.randrange(64), (1 << 41) + 16 * rng.randrange(64)
    run = rng.choice([16, 48, 64, 80, 96, 128, 656, 4096, 5008])
    page = run * rng.randint(1, 9)
    plan = synthetic_plan(
        local, page, host, 3 * page, page_bytes=page, run_bytes=run, spread=rng.randint(1, 3)
    )
    counted = _C.cuda.count_accesses(plan, 0)[0]

    sectors = {"host": 0, "device": 0}
    lines = {"host": 0, "device": 0}
    requests = moved = 0
    for tile in tiles_of_plan(plan):
        lanes = []
        width = 1 << int(tile["width_log2"])
        for j in range(int(tile["count"][1])):
            for i in range(int(tile["count"][0])):
                for byte in range(0, int(tile["fragment_bytes"]), width):
                    lanes.append(
                        tuple(
                            int(tile[f"{side}_offset"])
                            + i * int(tile[f"{side}_stride"][0])
                            + j * int(tile[f"{side}_stride"][1])
                            + byte
                            for side in ("local", "host")
                        )
                    )
        for at in range(0, len(lanes), 32):
            requests += 1
            moved += width * len(lanes[at : at + 32])
            for name, side, base in (("device", 0, local), ("host", 1, host)):
                touched = {
                    base + lane[side] + byte
                    for lane in lanes[at : at + 32]
                    for byte in range(width)
                }
                sectors[name] += len({b // 32 for b in touched})
                lines[name] += len({b // 128 for b in touched})
    assert counted["requests"] == requests and counted["bytes"] == moved
    assert (counted["host_sectors"], counted["device_sectors"]) == tuple(sectors.values())
    assert (counted["host_lines"], counted["device_lines"]) == tuple(lines.values())


def tiles_of_plan(plan: _C.Plan) -> np.ndarray:
    return np.frombuffer(PACKED[plan], np.uint8)[-plan.num_tiles * 80 :].view(struct("Tile"))


PACKED: dict[object, bytes] = {}


@pytest.fixture(autouse=True)
def remember_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans do not give their descriptor back, so it is kept as it goes in."""
    made = _C.Plan

    def keep(descriptor: np.ndarray, *rest: object) -> _C.Plan:
        plan = made(descriptor, *rest)
        PACKED[plan] = bytes(descriptor)
        return plan

    monkeypatch.setattr("vkvmap.calibrate_probe._C", _Recording(keep))


class _Recording:
    def __init__(self, plan: object) -> None:
        self.Plan = plan

    def __getattr__(self, name: str) -> object:
        return getattr(_C, name)
