"""Whatever happens to a store, it serves right bytes or none, opens clean and leaks nothing.

Short versions; `python -m tests.store.faults` has the long ones.
"""

from __future__ import annotations

import random

import pytest

from tests.store.faults import after_power_loss, crowd, damage, kill, power

pytestmark = pytest.mark.store


def test_a_writer_killed_at_any_point_leaves_whole_chunks_or_none():
    totals = kill(500)
    assert totals["kills"] == 500 and totals["hit"] > 5000


def test_a_power_loss_at_any_moment_loses_chunks_but_never_spoils_one():
    totals = power(150)
    assert totals["losses"] == 150
    assert totals["none damaged"] > 0, "the shim must be able to spoil what was not synced"
    assert totals["data hit"] > 100 and totals["full hit"] > 100


def test_harm_anywhere_in_a_file_is_noticed_or_makes_no_difference():
    totals = damage(10_000)
    assert sum(totals.values()) == 10_000
    assert totals["bit damaged"] > 1000 and totals["cut damaged"] > 500


def test_eight_processes_on_the_same_keys_agree():
    totals = crowd(5.0)
    assert totals["hit"] > 100 and totals["stored"] > 50 and not totals["damaged"]


@pytest.mark.parametrize("seed", range(5))
def test_the_shim_drops_what_was_not_synced_and_keeps_what_was(seed):
    chance = random.Random(seed)
    data = bytes([1]) * 8192
    log = [("name", "t", 1), ("write", 1, 0, data), ("sync", 1), ("rename", "t", "x")]
    for _ in range(50):
        assert after_power_loss(log, 4, chance).get("x") in (None, data)
    lost = {after_power_loss(log, 2, chance).get("t") for _ in range(50)}
    assert len(lost - {None, data}) > 10
