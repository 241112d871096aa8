"""A system that refuses the n-th thing it is asked for, and what a process has open."""

from __future__ import annotations

import errno
import fcntl
import gc
import mmap
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

from vkvmap import region_memory

#: What can be refused: descriptors, mappings, room, locks, names, threads.
CALLS = (
    (os, "open"), (os, "dup"), (os, "fstat"), (os, "stat"), (os, "memfd_create"),
    (os, "ftruncate"), (os, "fchmod"), (os, "posix_fallocate"), (os, "statvfs"), (os, "link"),
    (os, "rename"), (os, "mkdir"), (os, "scandir"), (os, "pread"), (fcntl, "flock"),
    (fcntl, "fcntl"), (mmap, "mmap"), (region_memory, "_map"), (socket, "socket"),
)  # fmt: skip


def open_files() -> set[str]:
    """The process's descriptors and shared mappings, by what they lead to."""
    gc.collect()
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
        except FileNotFoundError:  # the one that listed them
            continue
    with open("/proc/self/maps") as maps:
        found |= {line.split()[-1] for line in maps if "vkvmap" in line and "_C." not in line}
    return found


@contextmanager
def refusing(fatal: int, code: int = errno.EMFILE) -> Iterator[list[str]]:
    """Refuse call number `fatal` (from 0) of this thread's `CALLS`; yields what was asked for."""
    asked: list[str] = []
    thread = threading.get_ident()

    def around(name: str, real: Callable) -> Callable:
        def call(*arguments, **keywords):
            if threading.get_ident() == thread:
                asked.append(name)
                if len(asked) == fatal + 1:
                    if name == "start":  # what Python makes of a thread that cannot be had
                        raise RuntimeError("can't start new thread")
                    raise OSError(code, os.strerror(code))
            return real(*arguments, **keywords)

        return call

    with mock.patch.multiple(threading.Thread, start=around("start", threading.Thread.start)):
        patches = [
            mock.patch.object(module, name, around(name, getattr(module, name)))
            for module, name in CALLS
        ]
        for patch in patches:
            patch.start()
        try:
            yield asked
        finally:
            for patch in reversed(patches):
                patch.stop()


def refuse_everything_once(make: Callable[[], None], expected: type[Exception]) -> int:
    """Call `make` with its first call refused, its second, ... until it gets through.

    It must succeed or raise `expected`, and leave nothing open. How many calls it makes.
    """
    before = open_files()
    for fatal in range(1000):
        with refusing(fatal) as asked:
            try:
                make()
            except expected:
                pass
        after = open_files()
        assert after == before, f"refused {asked[fatal]} ({fatal}): {after ^ before}"
        if len(asked) <= fatal:
            return fatal
    raise AssertionError("it never gets through")
