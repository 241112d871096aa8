"""Where a region's pages are first touched, on machines of several memory nodes."""

import os
import threading

import pytest

from vkvmap import region_memory
from vkvmap.errors import RegionError
from vkvmap.region import Region, Section

STRIPE = region_memory.STRIPE


def system_with(tmp_path, cpulists):
    for node, cpulist in cpulists.items():
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cpulist + "\n")
    (tmp_path / "online").write_text("0-9\n")
    return str(tmp_path)


@pytest.mark.parametrize(
    ("cpulists", "usable", "expected"),
    [
        ({0: "0-3", 1: "4-7"}, {0, 1, 2, 3, 4, 5, 6, 7}, [{0, 1, 2, 3}, {4, 5, 6, 7}]),
        ({0: "0-1,4-5", 10: "2-3", 2: "6"}, {1, 2, 4, 6}, [{1, 4}, {6}, {2}]),
        ({0: "0-3", 1: "4-7"}, {5}, [{5}]),
        ({0: "0-3", 1: ""}, {0, 3}, [{0, 3}]),
        ({}, {0, 1}, [{0, 1}]),
    ],
)
def test_nodes_are_the_processors_that_may_be_used(
    tmp_path, monkeypatch, cpulists, usable, expected
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: usable)
    assert region_memory.cpus_by_node(system_with(tmp_path, cpulists)) == expected


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("nodes", [[{0}], [{0}, {1}], [{0}, {1}, {2}, {3}, {4}]])
@pytest.mark.parametrize("nbytes", [4096, STRIPE, 7 * STRIPE + 4096])
def test_every_byte_is_touched_once_and_stripes_take_turns(threads, nodes, nbytes):
    base = 1 << 40
    owner = {}
    for cpus, stripes in region_memory._parts(base, nbytes, nodes, threads):
        for address, size in stripes:
            assert address not in owner
            owner[address] = (size, cpus)
    at, turn = base, 0
    while at < base + nbytes:
        size, cpus = owner.pop(at)
        assert cpus == nodes[turn % len(nodes)]
        at, turn = at + size, turn + 1
    assert at == base + nbytes and not owner


@pytest.mark.parametrize("huge_pages", [None, "transparent"])
def test_stripes_are_touched_from_their_own_node(monkeypatch, huge_pages):
    """Two nodes are made of two processors; the threads say where they ran."""
    usable = sorted(os.sched_getaffinity(0))
    nodes = [{usable[0]}, {usable[-1]}]
    seen = []
    touch = region_memory._populate_slice

    def watched(address, nbytes):
        seen.append((address, frozenset(os.sched_getaffinity(0))))
        return touch(address, nbytes)

    monkeypatch.setattr(region_memory, "cpus_by_node", lambda: nodes)
    monkeypatch.setattr(region_memory, "_populate_slice", watched)
    sections = [Section("x", 4, STRIPE)]
    with Region.create(sections, populate_threads=2, huge_pages=huge_pages) as region:
        assert os.fstat(region.handle().fd).st_blocks * 512 == region.nbytes
        for address, cpus in seen:
            assert cpus == nodes[(address - region.address) // STRIPE % 2]
    touched = (
        0 if huge_pages is None else 4 * STRIPE // region_memory.HUGE_PAGE
    )  # one small page of each
    assert len(seen) == touched + 5
    assert os.sched_getaffinity(0) == set(usable)


def test_threads_that_cannot_be_had_are_a_region_error_and_leave_nothing(monkeypatch):
    before = set(os.listdir("/proc/self/fd"))

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RegionError, match=r"no threads to populate .*populate_threads=0"):
        Region.create([Section("x", 4, STRIPE)])
    assert set(os.listdir("/proc/self/fd")) == before
    Region.create([Section("x", 4, 4096)], populate_threads=0).close()
