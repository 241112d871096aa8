"""A region holds rows of one length for everybody, is private to its user, and leaves nothing."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import pickle
import re
import signal
import socket
import stat
import subprocess
import sys
import time

import numpy as np
import pytest

from vkvmap import region_memory
from vkvmap.errors import RegionError
from vkvmap.region import Region, Section, node_slot
from vkvmap.region_backing import available_memory, check_capacity
from vkvmap.region_socket import DescriptorServer

SECTIONS = [Section("chunks", 5, 5000), Section("small", 3, 100), Section("own", 2, 64, 256, True)]


def run_child(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    prelude = "import sys\nfrom vkvmap.region import Region, Section\n"
    return subprocess.run(
        [sys.executable, "-c", prelude + script, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_every_row_is_a_place_of_its_own():
    with Region.create(SECTIONS) as region:
        taken = np.zeros(region.nbytes, bool)
        for section in SECTIONS:
            view = region.section(section.name)
            assert view.payload_bytes == section.payload_bytes
            for index in range(section.num_rows):
                start = view.address - region.address + index * view.row_stride
                assert not taken[start : start + section.payload_bytes].any()
                taken[start : start + section.payload_bytes] = True
                row = region.row(section.name, index)
                assert row.ctypes.data == view.address + index * view.row_stride
                assert row.shape == (section.payload_bytes,)


def test_large_rows_start_on_pages_and_small_ones_on_lines():
    with Region.create(SECTIONS) as region:
        assert region.section("chunks").row_stride == 8192
        assert region.section("chunks").address % 4096 == 0
        assert region.section("small").row_stride == 128
        assert region.section("own").row_stride == 256
        assert region.section("own").private and not region.section("small").private


def test_a_declared_stride_below_the_payload_is_refused():
    with pytest.raises(RegionError, match="row stride 10 is less than the payload of 20"):
        Section("x", 1, 20, 10)


def test_the_accounted_bytes_are_the_allocated_bytes():
    with Region.create(SECTIONS) as region:
        assert os.fstat(region.handle().fd).st_size == region.nbytes
        assert os.fstat(region.handle().fd).st_blocks * 512 == region.nbytes


def test_pages_stay_untouched_when_nobody_asks_to_populate():
    with Region.create([Section("x", 64, 1 << 20)], populate_threads=0) as region:
        assert os.fstat(region.handle().fd).st_blocks * 512 < 1 << 20


def test_a_row_that_does_not_exist_is_named():
    with Region.create(SECTIONS) as region:
        with pytest.raises(RegionError, match="row 5 of section 'chunks': rows are 0 to 4"):
            region.row("chunks", 5)
        with pytest.raises(RegionError, match="no section 'other'; it has"):
            region.section("other")


def test_sections_of_one_name_are_refused():
    with pytest.raises(RegionError, match="names must differ"):
        Region.create([Section("a", 1, 1), Section("a", 1, 1)])


def test_rows_are_the_same_bytes_as_each_row():
    with Region.create(SECTIONS) as region:
        region.rows("small")[:] = np.arange(300, dtype=np.uint8).reshape(3, 100)
        assert bytes(region.row("small", 2)) == bytes(np.arange(200, 300, dtype=np.uint8))


# ---- capacity ---------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_before_it_is_mapped():
    with pytest.raises(RegionError) as failure:
        Region.create([Section("x", 1 << 20, 1 << 30)])
    message = str(failure.value)
    assert f"{(1 << 50) + 4096:,} bytes" in message and "available" in message


def test_ranks_that_fit_alone_are_refused_when_they_do_not_fit_together():
    check_capacity(60 * 10**9, available=400 * 10**9)
    with pytest.raises(RegionError, match=re.escape("480,000,000,000 bytes")):
        check_capacity(60 * 10**9, copies=8, available=400 * 10**9)


def test_a_full_file_system_is_refused_before_it_is_mapped(tmp_path, monkeypatch):
    real = os.statvfs(tmp_path)

    class Full:
        f_bavail, f_frsize = 1, real.f_frsize

    monkeypatch.setattr(os, "statvfs", lambda path: Full)
    with pytest.raises(RegionError, match=f"{re.escape(str(tmp_path))} has 4,096 bytes"):
        Region.create(SECTIONS, backing="file", path=str(tmp_path / "region"))
    assert os.listdir(tmp_path) == []


def test_a_cgroup_limit_counts_as_available_memory(tmp_path):
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 99 kB\nMemAvailable: 1000000 kB\n")
    (proc / "self" / "cgroup").write_text("0::/pod/box\n")
    (groups / "pod" / "box").mkdir(parents=True)
    for level, limit in (("pod", "500000"), ("pod/box", "max")):
        (groups / level / "memory.max").write_text(limit)
        (groups / level / "memory.current").write_text("200000")
        (groups / level / "memory.stat").write_text("anon 5\ninactive_file 50000\n")
    assert available_memory(str(proc), str(groups)) == 350000


def test_a_group_that_spans_nodes_is_refused():
    assert [node_slot(rank, group_size=4, ranks_per_node=4) for rank in range(4)] == [0, 1, 2, 3]
    with pytest.raises(RegionError, match="8 ranks on nodes of 4"):
        node_slot(5, group_size=8, ranks_per_node=4)


# ---- sharing ----------------------------------------------------------------------------------

WRITE_AND_READ = """
region = Region.attach(SOURCE, timeout=10)
assert bytes(region.row("chunks", 4)[:5]) == b"hello", bytes(region.row("chunks", 4)[:5])
region.row("small", 1)[:5] = list(b"world")
region.close()
"""


@pytest.mark.parametrize("way", ["handle", "socket", "path"])
def test_another_process_sees_the_same_bytes(way, tmp_path):
    path = str(tmp_path / "region")
    kind = {"backing": "file", "path": path} if way == "path" else {}
    with Region.create(SECTIONS, **kind) as region:
        region.row("chunks", 4)[:5] = list(b"hello")
        if way == "handle":
            source = f"__import__('pickle').loads({pickle.dumps(region.handle())!r})"
        else:
            source = repr(region.serve() if way == "socket" else path)
        child = run_child(WRITE_AND_READ.replace("SOURCE", source))
        assert child.returncode == 0, child.stderr
        assert bytes(region.row("small", 1)[:5]) == b"world"


def test_a_fork_sees_the_same_bytes():
    with Region.create(SECTIONS) as region:
        pid = os.fork()
        if pid == 0:
            region.row("chunks", 0)[0] = 77
            os._exit(0)
        os.waitpid(pid, 0)
        assert region.row("chunks", 0)[0] == 77


def test_a_fork_that_lets_go_does_not_stop_its_parents_server():
    with Region.create(SECTIONS) as region:
        address = region.serve()
        pid = os.fork()
        if pid == 0:
            region.close(force=True)
            os._exit(0)
        os.waitpid(pid, 0)
        with Region.attach(address, timeout=5) as joined:
            assert joined.nbytes == region.nbytes


def test_a_closed_region_is_served_no_more():
    with Region.create(SECTIONS) as region:
        address = region.serve()
    with pytest.raises(RegionError, match="nobody serves"):
        Region.attach(address, timeout=0)


def test_a_socket_that_nobody_serves_is_an_error_in_time():
    began = time.monotonic()
    with pytest.raises(RegionError, match="nobody serves a region at @vkvmap-none"):
        Region.attach("@vkvmap-none", timeout=0.2)
    assert time.monotonic() - began < 5


def test_a_served_name_can_be_taken_once():
    with Region.create(SECTIONS) as one, Region.create(SECTIONS) as two:
        address = one.serve("vkvmap-test-name-" + str(os.getpid()))
        with pytest.raises(RegionError, match="cannot listen"):
            two.serve(address[1:])


def test_something_else_than_a_region_is_not_attached(tmp_path):
    with open(tmp_path / "plain", "wb+") as plain:
        plain.write(b"\0" * 8192)
        plain.flush()
        with pytest.raises(RegionError, match="not a region"):
            Region.attach(plain.fileno())
        server = DescriptorServer(plain.fileno())
        with pytest.raises(RegionError, match="not a region"):
            Region.attach(server.address)
        server.close()


def test_a_server_of_something_else_is_not_believed():
    with socket.socket(socket.AF_UNIX) as server:
        name = f"vkvmap-impostor-{os.getpid()}"
        server.bind("\0" + name)
        server.listen()
        pid = os.fork()
        if pid == 0:
            peer, _ = server.accept()
            peer.sendall(b"no descriptor")
            os._exit(0)
        with pytest.raises(RegionError, match="did not hand over a region"):
            Region.attach("@" + name, timeout=10)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("damage", range(200))
def test_a_damaged_control_page_never_leads_outside(damage):
    with Region.create(SECTIONS) as region:
        generator = np.random.default_rng(damage)
        place = int(generator.integers(0, 300))
        region.view[place] ^= int(generator.integers(1, 256))
        try:
            joined = Region.attach(region.handle())
        except RegionError:
            return
        for section in joined.sections:
            assert 0 <= section.offset and section.offset + section.nbytes <= region.nbytes
            assert section.payload_bytes <= section.row_stride
        joined.close()


def test_nobody_can_shrink_a_region_under_its_readers():
    with Region.create(SECTIONS) as region, pytest.raises(PermissionError):
        os.ftruncate(region.handle().fd, 0)


def test_a_private_region_cannot_be_shared():
    with Region.create(SECTIONS, backing="private") as region:
        with pytest.raises(RegionError, match="'private' region cannot be shared"):
            region.handle()
        with pytest.raises(RegionError, match="'private' region cannot be shared"):
            region.serve()


# ---- names ------------------------------------------------------------------------------------


def test_a_named_region_is_readable_by_its_owner_only(tmp_path):
    path = tmp_path / "region"
    with Region.create(SECTIONS, backing="file", path=str(path)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not path.exists()


def test_a_file_that_others_can_read_is_not_joined(tmp_path):
    path = tmp_path / "region"
    with Region.create(SECTIONS, backing="file", path=str(path)):
        path.chmod(0o644)
        with pytest.raises(RegionError, match="mode 644"):
            Region.attach(str(path))


def test_a_link_is_not_followed(tmp_path):
    path = tmp_path / "region"
    with Region.create(SECTIONS, backing="file", path=str(path)):
        (tmp_path / "link").symlink_to(path)
        with pytest.raises(RegionError, match="cannot join"):
            Region.attach(str(tmp_path / "link"), timeout=0)


def test_the_name_goes_when_all_have_joined(tmp_path):
    path = tmp_path / "region"
    with Region.create(SECTIONS, backing="file", path=str(path), joiners=2) as region:
        first = Region.attach(str(path))
        assert path.exists()
        second = Region.attach(str(path))
        assert not path.exists()
        region.row("chunks", 0)[0] = 9
        assert first.row("chunks", 0)[0] == second.row("chunks", 0)[0] == 9
        first.close()
        second.close()


def test_a_live_name_is_not_taken_over(tmp_path):
    path = str(tmp_path / "region")
    with Region.create(SECTIONS, backing="file", path=path) as region:
        region.row("chunks", 0)[0] = 5
        with pytest.raises(RegionError, match="exists and a live process holds it"):
            Region.create(SECTIONS, backing="file", path=path)
        assert not Region.sweep(path)
        with Region.attach(path) as joined:
            assert joined.row("chunks", 0)[0] == 5


def test_a_strangers_file_is_never_swept(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("precious")
    assert not Region.sweep(str(path))
    with pytest.raises(RegionError, match="exists"):
        Region.create(SECTIONS, backing="file", path=str(path))
    assert path.read_text() == "precious"


KILLED_CREATOR = """
import os, signal
region = Region.create([Section("x", 4, 4096)], backing="file", path=sys.argv[1], joiners=9)
region.row("x", 0)[0] = 1
print("ready", flush=True)
signal.pause()
"""


def killed_creator(path: str) -> None:
    script = "import sys\nfrom vkvmap.region import Region, Section\n" + KILLED_CREATOR
    with subprocess.Popen([sys.executable, "-c", script, path], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        child.send_signal(signal.SIGKILL)


def test_what_a_killed_creator_left_is_swept_at_the_next_start(tmp_path):
    path = tmp_path / "region"
    killed_creator(str(path))
    assert path.exists()
    with Region.create(SECTIONS, backing="file", path=str(path)) as region:
        assert not region.row("chunks", 0).any()
    assert not path.exists()


def test_a_late_process_never_deletes_its_successors_file(tmp_path):
    path = tmp_path / "region"
    early = Region.create(SECTIONS, backing="file", path=str(path))
    path.unlink()  # an administrator
    with Region.create(SECTIONS, backing="file", path=str(path)) as successor:
        inode = path.stat().st_ino
        early.close()
        assert path.stat().st_ino == inode
        with Region.attach(str(path)) as joined:
            assert joined.nbytes == successor.nbytes


def test_a_joiner_waits_for_the_name(tmp_path):
    path = str(tmp_path / "region")
    script = "region = Region.attach(sys.argv[1], timeout=20); print(region.nbytes)"
    prelude = "import sys\nfrom vkvmap.region import Region, Section\n"
    command = [sys.executable, "-c", prelude + script, path]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        time.sleep(0.3)
        with Region.create(SECTIONS, backing="file", path=path) as region:
            assert child.stdout is not None
            assert int(child.stdout.readline()) == region.nbytes


# ---- lifetime ---------------------------------------------------------------------------------


class Plan:
    """Stands for whatever holds addresses."""


def test_a_region_under_a_plan_refuses_to_close():
    region, plan = Region.create(SECTIONS), Plan()
    region.hold(plan)
    with pytest.raises(RegionError, match="1 plans or stores still use"):
        region.close()
    assert region.alive
    del plan
    region.close()
    assert not region.alive


def test_a_holder_lets_go_of_what_has_ended_before_the_region_refuses():
    region, ended = Region.create(SECTIONS), [Plan()]

    class Settling(Plan):
        def settle(self):
            ended.clear()

    settling = Settling()
    region.hold(ended[0])
    region.hold(settling)
    with pytest.raises(RegionError, match="1 plans or stores still use"):
        region.close()
    region.release(settling)
    region.close()
    assert not region.alive


def test_a_forced_close_is_seen_by_the_plan():
    region, plan = Region.create(SECTIONS), Plan()
    region.hold(plan)
    region.close(force=True)
    assert not region.alive
    with pytest.raises(RegionError, match="closed"):
        region.row("chunks", 0)


def test_a_view_outlives_the_region():
    region = Region.create(SECTIONS)
    row = region.row("chunks", 1)
    row[:] = 3
    region.close()
    del region
    assert int(row.sum()) == 3 * 5000


def test_an_engines_memory_is_wrapped_and_kept_alive():
    memory = np.zeros(4 * 256 + 512, np.uint8)
    memory[256:259] = [1, 2, 3]
    address = memory.ctypes.data
    sections = [Section("a", 4, 200), Section("b", 1, 500)]
    region = Region.from_buffer(address, memory.nbytes, memory, sections)
    del memory
    assert region.section("b").address == address + 1024
    assert bytes(region.row("a", 1)[:3]) == b"\1\2\3"
    with pytest.raises(RegionError, match="sections need"):
        Region.from_buffer(address, 100, None, sections)


def huge_bytes(address):
    """What the system says of the mapping that begins at `address`: bytes in huge pages."""
    found, here = 0, False
    with open("/proc/self/smaps") as maps:
        for line in maps:
            name, _, rest = line.partition(" ")
            if "-" in name and not name.endswith(":"):
                here = int(name.split("-")[0], 16) == address
            elif here and name in ("AnonHugePages:", "ShmemPmdMapped:", "FilePmdMapped:"):
                found += int(rest.split()[0]) * 1024
    return found


def grants_huge_pages(fd):
    """Whether this system gives `fd`, or anonymous memory for -1, a huge page that is asked for."""
    size, libc = 2 << 20, ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    room = libc.mmap(None, 2 * size, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    at = -(-room // size) * size
    kind = mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    assert libc.mmap(at, size, mmap.PROT_READ | mmap.PROT_WRITE, kind | 0x10, fd, 0) == at
    libc.madvise(at, size, 14)
    ctypes.c_char.from_address(at).value = b"x"
    libc.madvise(at, size, 25)
    found = huge_bytes(at)
    libc.munmap(room, 2 * size)
    return found > 0


@pytest.mark.parametrize("backing", ["memfd", "private", "file"])
def test_memory_comes_in_huge_pages_for_everyone_who_maps_it(backing):
    """Whole ones for what they fit into; the last, partial one is of small pages."""
    whole, rest = 3 * (2 << 20), 5 * 4096
    path = f"/dev/shm/vkvmap-test-{os.getpid()}" if backing == "file" else None
    probe = os.memfd_create("vkvmap-test") if backing != "private" else -1
    try:
        if probe >= 0:
            os.ftruncate(probe, 2 << 20)
        granted = grants_huge_pages(probe)
    finally:
        if probe >= 0:
            os.close(probe)
    sections = [Section("x", 1, whole + rest - 4096)]
    with Region.create(sections, backing=backing, path=path) as region:
        assert region.nbytes == whole + rest
        assert region.address % (2 << 20) == 0
        assert not region.rows("x").any()
        # All of them, unless the system runs out half way.
        assert huge_bytes(region.address) <= whole
        assert huge_bytes(region.address) or not granted
        if backing == "memfd":
            with Region.attach(region.handle()) as other:
                assert other.address % (2 << 20) == 0
                region.rows("x")[:] = 7
                assert (other.rows("x") == 7).all()
                assert huge_bytes(other.address) == huge_bytes(region.address)


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EINVAL, errno.EAGAIN, 0])
def test_small_pages_take_the_place_of_huge_ones_that_are_not_to_be_had(monkeypatch, code):
    """Whatever the system says: it may also say yes and do nothing."""
    whole, asked = 20 * (2 << 20), []
    advise = region_memory._madvise

    def scarce(address, nbytes, advice):
        if advice == 25:
            asked.append((address, nbytes))
            return code
        return advise(address, nbytes, advice)

    monkeypatch.setattr(region_memory, "_madvise", scarce)
    with Region.create([Section("x", 1, whole)], populate_threads=1) as region:
        assert os.fstat(region.handle().fd).st_blocks * 512 == region.nbytes
        at = region.address
        for address, nbytes in asked:  # every whole one, once, in order
            assert address == at
            at += nbytes
        assert at == region.address + whole
        assert not region.rows("x").any()


def test_memory_that_cannot_be_mapped_takes_no_room(monkeypatch):
    def room():
        with open("/proc/self/maps") as maps:
            spans = [
                line.split()[0].split("-") for line in maps if " ---p 00000000 00:00 0" in line
            ]
        return sum(int(end, 16) - int(start, 16) for start, end in spans)

    real, calls = region_memory._map, []

    def refuse(*arguments):
        calls.append(arguments)
        if len(calls) == fatal:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return real(*arguments)

    monkeypatch.setattr(region_memory, "_map", refuse)
    for fatal in (1, 2):
        calls.clear()
        before = room()
        with pytest.raises(RegionError, match="cannot map 8,392,704 bytes"):
            Region.create([Section("x", 4, 2 << 20)])
        assert len(calls) == fatal
        assert room() == before


def test_a_place_that_somebody_else_takes_first_is_looked_for_again(monkeypatch):
    real, taken = region_memory._map, []

    def faster(address, nbytes, access, kind, fd):
        if address is not None and len(taken) < limit:
            taken.append(address)
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        return real(address, nbytes, access, kind, fd)

    monkeypatch.setattr(region_memory, "_map", faster)
    for limit in (1, 3, 100):
        taken.clear()
        with Region.create([Section("x", 4, 2 << 20)]) as region:
            region.rows("x")[:] = 3
            assert limit == 100 or region.address % (2 << 20) == 0
        assert len(taken) == min(limit, 8)


def test_huge_pages_are_granted_or_refused_in_words():
    with pytest.raises(RegionError, match="huge_pages='2M': choose 'transparent'"):
        Region.create(SECTIONS, huge_pages="2M")
    try:
        region = Region.create([Section("x", 4, 1 << 20)], huge_pages="reserved")
    except RegionError as error:
        assert "huge pages" in str(error)
    else:
        assert region.nbytes % (2 << 20) == 0
        region.close()


def test_what_cannot_be_joined_or_made_is_a_region_error():
    with pytest.raises(RegionError, match="cannot join descriptor"):
        Region.attach(1 << 20)
    with pytest.raises(RegionError, match="No such file"):
        Region.create(SECTIONS, backing="file", path="/nowhere/at/all")
