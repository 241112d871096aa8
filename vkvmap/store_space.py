"""The directory that many processes share: names, the capacity bound, eviction.

What must stay true, with any process killed between any two system calls:

 1. everything that changes the set of chunk files happens under one file lock, which dies with its
    holder; reading needs no lock, because files appear and disappear whole;
 2. `used` never falls below what the files really take: it is raised before a file grows and
    lowered after one is gone. A crash can only leave it too high, and the count that precedes any
    eviction corrects it;
 3. a temporary is locked by its writer for as long as that lives; one that can be locked is an
    orphan;
 4. `epoch` is raised before a chunk disappears, so that a crash cannot hide it, and again after, so
    that who looked in between looks again.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import stat
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from vkvmap.errors import StoreError
from vkvmap.store_base import SUFFIX
from vkvmap.store_files import FileSystem

TEMPORARY = "tmp"
QUARANTINE = "quarantine"
_STATE = struct.Struct("<8sQQ16s")  # magic, used, epoch, boot
_MAGIC = b"VKVSTOR\x01"
_USED_AT, _EPOCH_AT = 8, 16


@dataclass(frozen=True)
class Entry:
    """A stored chunk as the file system sees it; `used_at` in nanoseconds since the epoch."""

    path: str
    identity: str
    folder: str
    key: str
    nbytes: int
    used_at: int


#: Puts the chunks that should go first in front.
EvictionPolicy = Callable[[Sequence[Entry]], Iterable[Entry]]


def least_recently_used(entries: Sequence[Entry]) -> list[Entry]:
    """The default policy: what nobody has read for longest goes first."""
    return sorted(entries, key=lambda entry: entry.used_at)


class Space:
    """One store directory, as one process has it open."""

    def __init__(
        self,
        root: str,
        files: FileSystem,
        *,
        capacity: int | None = None,
        policy: EvictionPolicy = least_recently_used,
        quarantine_files: int = 16,
        sweep: bool = True,
    ) -> None:
        """Open or create the store at `root`.

        Args:
            root: directory; made with mode 700 if it is not there.
            files: system calls.
            capacity: most bytes that all chunks and temporaries may take, None for no bound.
            policy: which chunks to evict first.
            quarantine_files: damaged files that are kept for inspection.
            sweep: remove what dead writers left; False for those who only look.

        Raises:
            StoreError: not a directory, not ours to write, or anybody may write into it.
        """
        self.root = root
        self.files = files
        self.capacity = capacity
        self.policy = policy
        self.quarantine_files = quarantine_files
        self.evicted = 0
        self._names = itertools.count()
        self._threads = threading.Lock()
        self._pid = os.getpid()
        _make_root(root)
        try:
            self._lock_fd = os.open(f"{root}/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(f"cannot open a store at {root}: {error.strerror}") from error
        with self.locked():
            self._state = _open_state(f"{root}/state")
            magic, _, _, boot = _STATE.unpack_from(self._state)
            if magic != _MAGIC or boot != _boot():
                # After a power loss the counter may be older than the files it counts.
                epoch = _STATE.unpack_from(self._state)[2] if magic == _MAGIC else 0
                _STATE.pack_into(self._state, 0, _MAGIC, self._count()[1], epoch + 1, _boot())
            elif sweep:
                self._add_used(-self._sweep())

    def close(self) -> None:
        """Let go of the directory."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1
            self._state.close()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude every other process and thread that changes the directory."""
        if os.getpid() != self._pid:
            raise StoreError(
                "this store was opened before a fork; open it again in the child, or parent and "
                "child would hold each other's locks"
            )
        with self._threads:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._lock_fd, fcntl.LOCK_UN)

    # ---- counters -----------------------------------------------------------------------------

    @property
    def used(self) -> int:
        """Bytes that chunks, temporaries and quarantine take, never too low."""
        return int(struct.unpack_from("<Q", self._state, _USED_AT)[0])

    @property
    def epoch(self) -> int:
        """Changes before any chunk disappears."""
        return int(struct.unpack_from("<Q", self._state, _EPOCH_AT)[0])

    def _add_used(self, nbytes: int) -> None:
        struct.pack_into("<Q", self._state, _USED_AT, max(0, self.used + nbytes))

    def _next_epoch(self) -> None:
        struct.pack_into("<Q", self._state, _EPOCH_AT, self.epoch + 1)

    # ---- writing ------------------------------------------------------------------------------

    def reserve(self, nbytes: int, make: Callable[[str], int]) -> tuple[int, str] | None:
        """Room for a chunk of `nbytes`, and a locked temporary to write it to.

        `make` creates the file at the path that it is given and returns its descriptor.

        Returns:
            ``(descriptor, path)``, or None where the capacity cannot hold it even after eviction.

        Raises:
            OSError: the temporary cannot be made.
        """
        with self.locked():
            if self.capacity is not None and self.used + nbytes > self.capacity:
                self._evict(nbytes)
                if self.used + nbytes > self.capacity:
                    return None
            path = f"{self.root}/{TEMPORARY}/{self._pid}-{next(self._names)}-{nbytes}.tmp"
            make_folder(os.path.dirname(path))
            self._add_used(nbytes)
            try:
                fd = make(path)
            except BaseException:
                self._add_used(-nbytes)
                raise
            fcntl.flock(fd, fcntl.LOCK_EX)
        return fd, path

    def publish(self, path: str, target: str, nbytes: int) -> bool:
        """Make the finished temporary the chunk `target`; False if there was one already."""
        with self.locked():
            if os.path.exists(target):
                self._discard(path, nbytes)
                return False
            try:
                self.files.rename(path, target)
            except FileNotFoundError:
                make_folder(os.path.dirname(target))
                self.files.rename(path, target)
        return True

    def abandon(self, path: str, nbytes: int) -> None:
        """Remove a temporary that will not be published."""
        with self.locked():
            self._discard(path, nbytes)

    def _discard(self, path: str, nbytes: int) -> None:
        with suppress(FileNotFoundError):
            self.files.unlink(path)
            self._add_used(-nbytes)

    def write_small(self, target: str, text: str) -> None:
        """Make `target` a small text file, whole or not at all."""
        with self.locked():
            make_folder(f"{self.root}/{TEMPORARY}")
            path = f"{self.root}/{TEMPORARY}/{self._pid}-{next(self._names)}-0.tmp"
            with open(path, "w", encoding="utf-8") as small:
                small.write(text)
            self.files.rename(path, target)

    # ---- removing -----------------------------------------------------------------------------

    def remove(self, path: str) -> bool:
        """Remove one chunk; whether it was still there."""
        with self.locked():
            try:
                nbytes = os.stat(path).st_size
            except FileNotFoundError:
                return False
            self._next_epoch()
            removed = self._remove(path, nbytes)
            self._next_epoch()
            return removed

    def _remove(self, path: str, nbytes: int) -> bool:
        try:
            self.files.unlink(path)
        except FileNotFoundError:
            return False
        self._add_used(-nbytes)
        return True

    def quarantine(self, path: str, fd: int) -> bool:
        """Move the damaged file that `fd` has open out of the way; whether it was still in it.

        By now another process may have put a good chunk there; that one stays.
        """
        with self.locked():
            try:
                named, held = os.stat(path), os.fstat(fd)
            except FileNotFoundError:
                return False
            if (named.st_dev, named.st_ino) != (held.st_dev, held.st_ino):
                return False
            self._next_epoch()
            folder = f"{self.root}/{QUARANTINE}"
            make_folder(folder)
            parts = os.path.relpath(path, self.root).split(os.sep)
            name = f"{parts[0][:16]}-{parts[1]}-{parts[-1]}.{self._pid}-{next(self._names)}"
            self.files.rename(path, f"{folder}/{name}")
            self._next_epoch()
            kept = sorted(os.scandir(folder), key=lambda item: item.stat().st_mtime_ns)
            for item in kept[: max(0, len(kept) - self.quarantine_files)]:
                self._remove(item.path, item.stat().st_size)
        return True

    def _evict(self, nbytes: int) -> None:
        """Make room for `nbytes`, and a twentieth more so that the next scan is not soon."""
        capacity = self.capacity or 0
        entries, used = self._count()
        struct.pack_into("<Q", self._state, _USED_AT, used)
        if used + nbytes <= capacity or nbytes > capacity:
            return
        self._next_epoch()
        goal = capacity - nbytes - min(capacity // 20, capacity - nbytes)
        for item in plain_files(f"{self.root}/{QUARANTINE}"):
            if self.used > goal:
                self._remove(item.path, item.stat().st_size)
        for entry in self.policy(entries):
            if self.used <= goal:
                break
            self.evicted += self._remove(entry.path, entry.nbytes)
        self._next_epoch()

    def _count(self) -> tuple[list[Entry], int]:
        """All chunks, and the bytes that they, living temporaries and quarantine take.

        Orphaned temporaries are removed on the way.
        """
        self._sweep()
        entries = list(iterate(self.root))
        total = sum(entry.nbytes for entry in entries)
        total += sum(item.stat().st_size for item in plain_files(f"{self.root}/{QUARANTINE}"))
        living = plain_files(f"{self.root}/{TEMPORARY}")
        return entries, total + sum(_promised(item.name) for item in living)

    def _sweep(self) -> int:
        """Remove orphaned temporaries; the bytes that their writers had reserved."""
        reserved = 0
        for item in plain_files(f"{self.root}/{TEMPORARY}"):
            if _is_orphan(item.path):
                self.files.unlink(item.path)
                reserved += _promised(item.name)
        return reserved

    def collect(self) -> int:
        """Remove orphaned temporaries and correct `used`; how many there were."""
        with self.locked():
            before = len(plain_files(f"{self.root}/{TEMPORARY}"))
            _, used = self._count()
            struct.pack_into("<Q", self._state, _USED_AT, used)
            return before - len(plain_files(f"{self.root}/{TEMPORARY}"))

    def orphans(self) -> int:
        """How many temporaries have lost their writer."""
        with self.locked():
            return sum(_is_orphan(item.path) for item in plain_files(f"{self.root}/{TEMPORARY}"))

    def empty_quarantine(self) -> int:
        """Remove every damaged file that was kept; how many."""
        with self.locked():
            items = plain_files(f"{self.root}/{QUARANTINE}")
            return sum(self._remove(item.path, item.stat().st_size) for item in items)


def iterate(root: str) -> Iterator[Entry]:
    """Every chunk file below `root`, in no particular order, but those that vanish meanwhile."""
    for identity in _folders(root):
        if len(identity.name) != 64:
            continue
        for group in _folders(identity.path):
            for bucket in _folders(group.path):
                for item in plain_files(bucket.path):
                    if not item.name.endswith(SUFFIX):
                        continue
                    with suppress(FileNotFoundError):
                        status = item.stat(follow_symlinks=False)
                        yield Entry(
                            item.path,
                            identity.name,
                            group.name,
                            item.name.removesuffix(SUFFIX),
                            status.st_size,
                            status.st_mtime_ns,
                        )


def make_folder(path: str) -> None:
    """Make the folder `path` and those above it, all for their owner only."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        return
    except FileNotFoundError:
        make_folder(os.path.dirname(path))
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)


def _folders(path: str) -> list[os.DirEntry[str]]:
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(path) as items:
        return [item for item in items if item.is_dir(follow_symlinks=False)]
    return []


def plain_files(path: str) -> list[os.DirEntry[str]]:
    """The regular files in folder `path`; none if there is no such folder."""
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(path) as items:
        return [item for item in items if item.is_file(follow_symlinks=False)]
    return []


def _promised(name: str) -> int:
    """How long the temporary `name` will be; it may have just begun."""
    size = name.removesuffix(".tmp").rsplit("-", 1)[-1]
    return int(size) if size.isdecimal() else 0


def _is_orphan(path: str) -> bool:
    """Whether no living process holds the temporary. Call it under the directory's lock."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def _make_root(root: str) -> None:
    try:
        make_folder(root)
        status = os.stat(root)
    except OSError as error:
        raise StoreError(f"cannot open a store at {root}: {error.strerror}") from error
    if status.st_mode & stat.S_IWOTH:
        raise StoreError(
            f"{root} can be written by everybody; chmod it, chunks there prove nothing"
        )


def _open_state(path: str) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(fd).st_size < 4096:
            os.posix_fallocate(fd, 0, 4096)
        return mmap.mmap(fd, 4096)
    finally:
        os.close(fd)


def _boot() -> bytes:
    with open("/proc/sys/kernel/random/boot_id") as boot:
        return bytes.fromhex(boot.read().strip().replace("-", ""))
