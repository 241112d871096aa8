"""Getting pages from the kernel: anonymous or named backing, mapping, and faulting pages in.

Pages are populated by several threads, because the kernel zeroes them on the thread that asks, and
by `madvise`, because it reports a lack of memory where a touch would raise SIGBUS. A page lies on
the memory node of the thread that touched it first. Ranks of all sockets use a region, so its
stripes take turns among the nodes, each touched from its own: whoever copies, all links carry.

Huge pages pay twice. A mover that scatters 256 bytes into every second small page waits for address
translations (docs/performance.md), and a disk that is given one small page after the other has
little on its way at a time. Linux gives shared memory none by itself on most systems, but collapses
touched pages into huge ones for who asks, and maps them where addresses are aligned like the file.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vkvmap.errors import RegionError
from vkvmap.region_backing import create_named
from vkvmap.region_sections import PAGE, round_up

Backing = Literal["memfd", "private", "file"]
HugePages = Literal["transparent", "reserved"]

HUGE_PAGE = 2 << 20
STRIPE = 16 * HUGE_PAGE
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_MADV_COLLAPSE = 25  # Linux 6.1
_MAP_FIXED_NOREPLACE = 0x100000  # Linux 4.17; an older one takes the address as a wish


def open_backing(
    backing: Backing, path: str | None, nbytes: int, huge_pages: HugePages | None
) -> int:
    if backing == "private":
        return -1
    if backing == "file" and path is not None:
        return create_named(path, nbytes)
    if backing != "memfd":
        raise RegionError(f"backing {backing!r}: choose 'memfd', 'private' or 'file'")
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    if huge_pages == "reserved":
        flags |= os.MFD_HUGETLB | os.MFD_HUGE_2MB
    fd = -1
    try:
        fd = os.memfd_create("vkvmap", flags)
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, nbytes)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        raise RegionError(
            f"cannot make shared memory of {nbytes:,} bytes: {error.strerror}; free memory or "
            "descriptors, or do without reserved huge pages"
        ) from error
    return fd


def map_memory(fd: int, nbytes: int) -> Any:
    """Map `fd`, or anonymous memory for -1, from the start of a huge page on.

    `mmap.mmap` takes no address, so this asks the system itself. Like that one, the array (a ctypes
    one of `nbytes` bytes) lets go of the memory when the last view of it is gone.

    Raises:
        RegionError: the system maps no more.
    """
    kind = mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    access = mmap.PROT_READ | mmap.PROT_WRITE
    room = nbytes + HUGE_PAGE
    try:
        for _ in range(8):
            # Found by taking it, and let go of before it is used: there is nothing to undo.
            start = _map(None, room, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
            _libc.munmap(start, room)
            wanted = round_up(start, HUGE_PAGE)
            with suppress(FileExistsError):  # another thread was faster
                address = _map(wanted, nbytes, access, kind | _MAP_FIXED_NOREPLACE, fd)
                break
        else:
            address = _map(None, nbytes, access, kind, fd)
    except OSError as error:
        raise RegionError(
            f"cannot map {nbytes:,} bytes: {error.strerror}; free memory, or reserve huge pages if "
            "those were asked for"
        ) from error
    memory = (ctypes.c_ubyte * nbytes).from_address(address)
    # Not at exit: threads of a mover may still be copying then, and the system takes it all back.
    weakref.finalize(memory, _libc.munmap, address, nbytes).atexit = False
    return memory


def _map(address: int | None, nbytes: int, access: int, kind: int, fd: int) -> int:
    """Where the system put it."""
    found = _libc.mmap(address, nbytes, access, kind, fd, 0)
    if found == ctypes.c_void_p(-1).value:
        raise OSError(code := ctypes.get_errno(), os.strerror(code))
    return int(found)


def populate(address: int, nbytes: int, threads: int | None, huge_pages: HugePages | None) -> None:
    """Fault every page in, striped over memory nodes; a lack of memory is an error, not SIGBUS."""
    if huge_pages == "transparent":
        # Not for the last, partial one: a file would get a whole one.
        _madvise(address, _whole(nbytes), mmap.MADV_HUGEPAGE)
    count = min(8, os.cpu_count() or 1) if threads is None else threads
    if count < 1:
        return
    fault_in = _populate_huge if huge_pages == "transparent" else _populate_slice
    parts = _parts(address, nbytes, cpus_by_node(), count)
    try:
        with ThreadPoolExecutor(count, thread_name_prefix="vkvmap-populate") as pool:
            codes = list(pool.map(lambda part: _populate_part(part[0], part[1], fault_in), parts))
    except RuntimeError as error:  # what Python makes of the system's refusal
        raise RegionError(
            f"no threads to populate {nbytes:,} bytes with: {error}; end some, or pass "
            "populate_threads=0 to leave pages to first use"
        ) from error
    failures = [code for code in codes if code]
    if failures:
        raise RegionError(
            f"populating {nbytes:,} bytes failed: {os.strerror(failures[0])}; the memory "
            "that was free before is not there any more"
        )


def cpus_by_node(root: str = "/sys/devices/system/node") -> list[set[int]]:
    """For each memory node that has processors which this process may use: those processors."""
    usable = os.sched_getaffinity(0)
    nodes = []
    for entry in sorted(Path(root).glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        listed: set[int] = set()
        for span in (entry / "cpulist").read_text().strip().split(","):
            first, _, last = span.partition("-")
            if first:
                listed.update(range(int(first), int(last or first) + 1))
        if listed & usable:
            nodes.append(listed & usable)
    return nodes or [usable]


def _parts(
    address: int, nbytes: int, nodes: list[set[int]], threads: int
) -> list[tuple[set[int], list[tuple[int, int]]]]:
    """Stripes by the thread that is to touch them: (its processors, [(address, bytes)])."""
    stripes = [(address + start, min(STRIPE, nbytes - start)) for start in range(0, nbytes, STRIPE)]
    per_node = -(-threads // len(nodes))
    return [
        (cpus, mine)
        for part in range(per_node)
        for node, cpus in enumerate(nodes)
        if (mine := stripes[node :: len(nodes)][part::per_node])
    ]


def _populate_part(
    cpus: set[int], stripes: list[tuple[int, int]], fault_in: Callable[[int, int], int]
) -> int:
    with suppress(OSError):  # processors taken away meanwhile: pages land where they land
        os.sched_setaffinity(0, cpus)  # of this thread alone, which ends with the pool
    for address, nbytes in stripes:
        if code := fault_in(address, nbytes):
            return code
    return 0


def _populate_huge(address: int, nbytes: int) -> int:
    """Touch a page of each huge one, have them collapsed, and populate what that left out.

    The system collapses what it has huge pages for. One that does not know the call, or whose huge
    pages are larger than ours, does nothing, and all pages are small.
    """
    whole = _whole(nbytes)
    for at in range(address, address + whole, HUGE_PAGE):
        if code := _populate_slice(at, PAGE):
            return code
    _madvise(address, whole, _MADV_COLLAPSE)
    return _populate_slice(address, nbytes)


def _whole(nbytes: int) -> int:
    return nbytes // HUGE_PAGE * HUGE_PAGE


def _populate_slice(address: int, nbytes: int) -> int:
    code = _madvise(address, nbytes, _MADV_POPULATE_WRITE)
    if code == errno.EINVAL:  # a kernel before 5.14, which is touched page by page instead
        memory: Any = (ctypes.c_ubyte * nbytes).from_address(address)
        pages = np.frombuffer(memory, np.uint8)[::PAGE]
        np.bitwise_or(pages, 0, out=pages)
        return 0
    return code


_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.mmap.restype = ctypes.c_void_p


def _madvise(address: int, nbytes: int, advice: int) -> int:
    """0, or the error number. Through ctypes because `mmap.madvise` holds the interpreter lock."""
    return 0 if _libc.madvise(address, nbytes, advice) == 0 else ctypes.get_errno()
