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
import secrets
import stat
import struct
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from vkvmap.errors import StoreError
from vkvmap.store_files import FileSystem
from vkvmap.store_listing import (
    QUARANTINE,
    TEMPORARY,
    Entry,
    iterate,
    make_folder,
    plain_files,
)

_STATE = struct.Struct("<8sQQ16s")  # magic, used, epoch, boot
_MAGIC = b"VKVSTOR\x01"
_USED_AT, _EPOCH_AT = 8, 16


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
        # Not the process id: containers that share a directory have the same ones, and so have two
        # stores of one process.
        self._own = secrets.token_hex(8)
        self._names = itertools.count()
        self._threads = threading.Lock()
        self._pid = os.getpid()
        self._lock_fd = -1
        self._state: mmap.mmap | None = None
        _make_root(root)
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            self._lock_fd = os.open(f"{root}/lock", flags, 0o600)
            with self.locked():
                self._state = _open_state(f"{root}/state")
                self._begin(sweep)
        except OSError as error:
            self.close()
            raise StoreError(f"cannot open a store at {root}: {_why(error)}") from error
        except BaseException:
            self.close()
            raise

    def _begin(self, sweep: bool) -> None:
        """Believe the counters that are there, or count anew."""
        magic, _, epoch, boot = _STATE.unpack_from(self._words)
        if magic != _MAGIC or boot != _boot():
            # After a power loss the counter may be older than the files it counts.
            epoch = epoch if magic == _MAGIC else 0
            _STATE.pack_into(self._words, 0, _MAGIC, self._count()[1], epoch + 1, _boot())
        elif sweep:
            self._add_used(-self._sweep())

    @property
    def _words(self) -> mmap.mmap:
        if self._state is None:
            raise StoreError("the store is closed")
        return self._state

    def close(self) -> None:
        """Let go of the directory; closing again does nothing."""
        fd, self._lock_fd = self._lock_fd, -1
        state, self._state = self._state, None
        if state is not None:
            state.close()
        if fd >= 0:
            os.close(fd)

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
        return int(struct.unpack_from("<Q", self._words, _USED_AT)[0])

    @property
    def epoch(self) -> int:
        """Changes before any chunk disappears."""
        return int(struct.unpack_from("<Q", self._words, _EPOCH_AT)[0])

    def _add_used(self, nbytes: int) -> None:
        struct.pack_into("<Q", self._words, _USED_AT, max(0, self.used + nbytes))

    def _next_epoch(self) -> None:
        struct.pack_into("<Q", self._words, _EPOCH_AT, self.epoch + 1)

    # ---- writing ------------------------------------------------------------------------------

    def reserve(
        self,
        nbytes: int,
        make: Callable[[str], int],
        keep: Callable[[], Collection[str]] = tuple,
    ) -> tuple[int, str] | None:
        """Room for a chunk of `nbytes`, and a locked temporary to write it to.

        Args:
            nbytes: how long it will be.
            make: creates the file at the path that it is given and returns its descriptor.
            keep: paths of chunks that must not go for it; asked only where some must go.

        Returns:
            ``(descriptor, path)``, or None where the capacity cannot hold it even after eviction.

        Raises:
            OSError: the temporary cannot be made.
        """
        with self.locked():
            if self.capacity is not None and self.used + nbytes > self.capacity:
                self._evict(nbytes, frozenset(keep()))
                if self.used + nbytes > self.capacity:
                    return None
            path = f"{self.root}/{TEMPORARY}/{self._new_name()}-{nbytes}.tmp"
            make_folder(os.path.dirname(path))
            self._add_used(nbytes)
            fd = -1
            try:
                fd = make(path)
                fcntl.flock(fd, fcntl.LOCK_EX)
            except BaseException:
                self._add_used(-nbytes)
                if fd >= 0:
                    os.close(fd)
                    self.files.unlink(path)
                raise
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

    def _new_name(self) -> str:
        """A name that no other file of the directory has, whoever made it."""
        return f"{self._own}-{next(self._names)}"

    def abandon(self, path: str, nbytes: int) -> None:
        """Remove a temporary that will not be published."""
        with self.locked():
            self._discard(path, nbytes)

    def _discard(self, path: str, nbytes: int) -> None:
        with suppress(FileNotFoundError):
            self.files.unlink(path)
            self._add_used(-nbytes)

    def write_small(self, target: str, text: str) -> None:
        """Make `target` a small text file, whole or not at all, and the folder that it is in.

        Raises:
            OSError: it cannot be written; nothing is left of it.
        """
        with self.locked():
            make_folder(f"{self.root}/{TEMPORARY}")
            make_folder(os.path.dirname(target))
            path = f"{self.root}/{TEMPORARY}/{self._new_name()}-0.tmp"
            try:
                with open(path, "w", encoding="utf-8") as small:
                    small.write(text)
                self.files.rename(path, target)
            except BaseException:
                with suppress(OSError):
                    self.files.unlink(path)
                raise

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

        By now another process may have put a good chunk there; that one stays. Where a damaged
        file cannot be kept, it is removed.

        Raises:
            OSError: it can be neither moved nor removed.
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
            parts = os.path.relpath(path, self.root).split(os.sep)
            name = f"{parts[0][:16]}-{parts[1]}-{parts[-1]}.{self._new_name()}"
            try:
                make_folder(folder)
                self.files.rename(path, f"{folder}/{name}")
            except OSError:  # the disk is full, or somebody's file is called "quarantine"
                self._remove(path, held.st_size)
            self._next_epoch()
            with suppress(OSError):  # one file too many until the next one comes
                kept = sorted(plain_files(folder), key=lambda item: item.stat().st_mtime_ns)
                for item in kept[: max(0, len(kept) - self.quarantine_files)]:
                    self._remove(item.path, item.stat().st_size)
        return True

    def _evict(self, nbytes: int, keep: Collection[str]) -> None:
        """Make room for `nbytes`, and a twentieth more so that the next scan is not soon.

        Nothing goes where that would not do, because of what is in `keep`.
        """
        capacity = self.capacity or 0
        entries, used = self._count()
        struct.pack_into("<Q", self._words, _USED_AT, used)
        kept = sum(entry.nbytes for entry in entries if entry.path in keep)
        if used + nbytes <= capacity or kept + nbytes > capacity:
            return
        self._next_epoch()
        goal = capacity - nbytes - min(capacity // 20, capacity - nbytes)
        # What cannot be removed is passed over: the next one may do.
        for item in plain_files(f"{self.root}/{QUARANTINE}"):
            if self.used > goal:
                with suppress(OSError):
                    self._remove(item.path, item.stat().st_size)
        try:
            for entry in self._in_order([entry for entry in entries if entry.path not in keep]):
                if self.used <= goal:
                    break
                with suppress(OSError):
                    self.evicted += self._remove(entry.path, entry.nbytes)
        finally:  # some may be gone although the policy gave up
            self._next_epoch()

    def _in_order(self, entries: Sequence[Entry]) -> Iterator[Entry]:
        """The entries as the policy orders them, and its name to what it raises."""
        try:
            yield from self.policy(entries)
        except Exception as error:
            raise StoreError(
                f"the eviction policy raised {error!r}; mend it, or leave policy= out"
            ) from error

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
                with suppress(OSError):  # it stays, and goes on being counted
                    self.files.unlink(item.path)
                    reserved += _promised(item.name)
        return reserved

    def collect(self) -> int:
        """Remove orphaned temporaries and correct `used`; how many there were."""
        with self.locked():
            before = len(plain_files(f"{self.root}/{TEMPORARY}"))
            _, used = self._count()
            struct.pack_into("<Q", self._words, _USED_AT, used)
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


def _promised(name: str) -> int:
    """How long the temporary `name` will be; it may have just begun."""
    size = name.removesuffix(".tmp").rsplit("-", 1)[-1]
    return int(size) if size.isdecimal() else 0


def _is_orphan(path: str) -> bool:
    """Whether no living process holds the temporary. Call it under the directory's lock.

    One that cannot be asked counts as held.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _make_root(root: str) -> None:
    try:
        make_folder(root)
        status = os.stat(root)
    except OSError as error:
        raise StoreError(f"cannot open a store at {root}: {_why(error)}") from error
    if status.st_mode & stat.S_IWOTH:
        raise StoreError(
            f"{root} can be written by everybody; chmod it, chunks there prove nothing"
        )


def _why(error: OSError) -> str:
    return error.strerror or str(error)


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
