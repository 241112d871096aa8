"""Getting pages from the kernel: anonymous or named backing, mapping, and faulting pages in.

Pages are populated in slices by several threads, because the kernel zeroes them on the thread that
asks, and by `madvise`, because it reports a lack of memory where a touch would raise SIGBUS.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np

from vkvmap.errors import RegionError
from vkvmap.region_backing import create_named
from vkvmap.region_sections import PAGE, round_up

Backing = Literal["memfd", "private", "file"]
HugePages = Literal["transparent", "reserved"]

HUGE_PAGE = 2 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14


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
    fd = os.memfd_create("vkvmap", flags)
    os.fchmod(fd, 0o600)
    os.ftruncate(fd, nbytes)
    return fd


def map_shared(fd: int, nbytes: int) -> mmap.mmap:
    kind = mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        return mmap.mmap(fd, nbytes, flags=kind)
    except OSError as error:
        raise RegionError(
            f"cannot map {nbytes:,} bytes: {error.strerror}; free memory, or reserve huge pages if "
            "those were asked for"
        ) from error


def populate(address: int, nbytes: int, threads: int | None, huge_pages: HugePages | None) -> None:
    """Fault every page in, a slice per thread; a lack of memory is an error here, not SIGBUS."""
    if huge_pages == "transparent":
        _madvise(address, nbytes, mmap.MADV_HUGEPAGE)
    count = min(8, os.cpu_count() or 1) if threads is None else threads
    if count < 1:
        return
    step = round_up(-(-nbytes // count), HUGE_PAGE)
    slices = [(address + start, min(step, nbytes - start)) for start in range(0, nbytes, step)]
    with ThreadPoolExecutor(count, thread_name_prefix="vkvmap-populate") as pool:
        failures = [code for code in pool.map(lambda part: _populate_slice(*part), slices) if code]
    if failures:
        raise RegionError(
            f"populating {nbytes:,} bytes failed: {os.strerror(failures[0])}; the memory "
            "that was free before is not there any more"
        )


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


def _madvise(address: int, nbytes: int, advice: int) -> int:
    """0, or the error number. Through ctypes because `mmap.madvise` holds the interpreter lock."""
    return 0 if _libc.madvise(address, nbytes, advice) == 0 else ctypes.get_errno()
