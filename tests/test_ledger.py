"""A chunk is readable when every writer of every layer has said so, and never otherwise."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass

import numpy as np
import pytest

from vkvmap.errors import RegionError
from vkvmap.ledger import Ledger, WriterShare
from vkvmap.region import Region, Section


@dataclass(frozen=True)
class Turn:
    """A mapping's election alone."""

    num_writers: int
    writer_index: int

    def is_writer(self, block_id: int) -> bool:
        return block_id % self.num_writers == self.writer_index


@pytest.fixture
def region():
    with Region.create([Section("chunks", 8, 64), Ledger.section(8, 4)]) as region:
        yield region


def test_nothing_is_readable_at_first(region):
    ledger = Ledger(region)
    assert ledger.num_writers == 4
    assert not ledger.complete(range(8)).any()


def test_three_of_four_ranks_are_not_enough(region):
    ledger = Ledger(region)
    generation = ledger.begin([3])
    for writer in (0, 1, 3):
        assert ledger.enter([3], generation, writer).all()
        ledger.finish([3], generation, writer)
    assert not ledger.complete([3])[0]
    assert ledger.waiting_for(3) == (2,)
    ledger.finish([3], generation, 2)
    assert ledger.complete(range(8)).tolist() == [row == 3 for row in range(8)]


def test_a_report_for_an_older_content_counts_for_nothing(region):
    ledger = Ledger(region)
    old = ledger.begin([1])
    for writer in range(4):
        ledger.finish([1], old, writer)
    new = ledger.begin([1])
    assert not ledger.complete([1])[0]
    for writer in range(3):
        ledger.finish([1], new, writer)
    ledger.finish([1], old, 3)
    assert not ledger.complete([1])[0]


def test_a_row_with_a_writer_inside_is_not_given_away(region):
    ledger = Ledger(region)
    generation = ledger.begin([2])
    ledger.enter([2], generation, 1)
    with pytest.raises(RegionError, match="row 2: writer 1 is still writing it"):
        ledger.begin([2])
    assert not ledger.complete([2])[0]
    ledger.finish([2], generation, 1)
    ledger.begin([2])


def test_a_dead_writer_does_not_hold_a_row_for_ever(region):
    ledger = Ledger(region)
    ledger.enter([2], ledger.begin([2]), 1)
    generation = ledger.begin([2], dead=[1])
    for writer in (0, 2, 3):
        ledger.finish([2], generation, writer)
    assert not ledger.complete([2])[0]


def test_a_late_writer_is_turned_away_and_holds_nothing(region):
    ledger = Ledger(region)
    old = ledger.begin([5])
    new = ledger.begin([5])
    assert not ledger.enter([5], old, 0)[0]
    ledger.begin([5])  # nobody is inside
    assert ledger.generation(5) == int(new[0]) + 1


def test_a_late_announcement_takes_nothing_back(region):
    ledger = Ledger(region)
    old = ledger.begin([5])
    new = ledger.begin([5])
    assert ledger.enter([5], new, 0).all()
    assert not ledger.enter([5], old, 0).any()
    with pytest.raises(RegionError, match="writer 0 is still writing"):
        ledger.begin([5])
    newest = ledger.begin([5], dead=[0])
    for writer in range(4):
        assert ledger.enter([5], newest, writer).all()
        ledger.finish([5], newest, writer)
    assert not ledger.enter([5], new, 0).any()
    assert ledger.complete([5])[0]


def test_a_share_is_whole_when_every_elected_page_of_every_layer_is(region):
    ledger = Ledger(region)
    row, pages = 5, 3  # canonical pages 15, 16, 17
    generation = int(ledger.begin([row])[0])
    shares = [
        WriterShare(ledger, writer, {"a": Turn(2, writer % 2), "b": Turn(4, writer)}, pages)
        for writer in range(4)
    ]
    owed = {
        0: {("a", 1), ("b", 1)},  # 16
        1: {("a", 0), ("a", 2), ("b", 2)},  # 15, 17
        2: {("a", 1)},
        3: {("a", 0), ("a", 2), ("b", 0)},
    }
    for writer, share in enumerate(shares):
        assert share.enter(row, generation)
        for left, (layer, page) in reversed(list(enumerate(sorted(owed[writer])))):
            assert not ledger.complete([row])[0]
            assert share.stored(row, [page], [layer]) == (left == 0)
    assert ledger.complete([row])[0]


def test_who_owes_nothing_is_not_waited_for(region):
    ledger = Ledger(region)
    generation = int(ledger.begin([0])[0])
    for writer in range(4):
        WriterShare(ledger, writer, {"a": Turn(4, writer)}, 1).enter(0, generation)
    assert ledger.waiting_for(0) == (0,)


def test_processes_see_each_others_reports_and_a_killed_one_leaves_its_chunks_incomplete(region):
    ledger = Ledger(region)
    generations = ledger.begin(range(8))
    children = []
    for writer in range(4):
        pid = os.fork()
        if pid == 0:
            mine = Ledger(Region.attach(region.handle()))
            for row in range(8):
                if writer == 2 and row == 5:
                    mine.enter([row], generations[row : row + 1], writer)
                    os.kill(os.getpid(), signal.SIGKILL)
                mine.enter([row], generations[row : row + 1], writer)
                mine.finish([row], generations[row : row + 1], writer)
            os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)
    assert ledger.complete(range(8)).tolist() == [row < 5 for row in range(8)]
    assert ledger.waiting_for(5) == (2,)
    with pytest.raises(RegionError, match="row 5: writer 2"):
        ledger.begin([4, 5])


def test_a_complete_chunk_is_always_a_whole_one(region):
    """Four processes rewrite a row; whenever it is readable, its bytes agree."""
    ledger = Ledger(region)
    stop = region.row("chunks", 7)
    work = region.row("chunks", 0).view(np.uint64)
    orders = region.row("chunks", 1).view(np.uint64)
    children = []
    for writer in range(4):
        pid = os.fork()
        if pid == 0:
            last = 0
            while not stop[0]:
                generation = int(orders[0])
                if generation == last:
                    os.sched_yield()
                    continue
                last = generation
                stamp = np.array([generation], np.uint64)
                if ledger.enter([0], stamp, writer)[0]:
                    work[writer * 2 : writer * 2 + 2] = generation
                    ledger.finish([0], stamp, writer)
            os._exit(0)
        children.append(pid)
    seen = 0
    begun = time.monotonic()
    orders[0] = ledger.begin([0])[0]
    # A second; longer where the machine has no time for all of them at once.
    while (spent := time.monotonic() - begun) < 1.0 or (seen <= 10 and spent < 60.0):
        if ledger.complete([0])[0]:
            assert (work == orders[0]).all()
            seen += 1
            orders[0] = ledger.begin([0])[0]
    stop[0] = 1
    for pid in children:
        os.waitpid(pid, 0)
    assert seen > 10
