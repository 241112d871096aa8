"""Where a region's bytes come from: how much there is, and files that nobody else can touch.

Operating-system facts that force the shape of this file:
 * a tmpfs that is full answers a *write to mapped memory* with SIGBUS, so room is asked for and
   allocated before anything is mapped;
 * a name outlives SIGKILL, a lock does not. Every member of a named region holds a shared `flock`
   for as long as it lives; whoever gets the exclusive one knows that nobody does;
 * a name is only ever removed while the exclusive or the member lock on *its* inode is held and the
   name still leads to that inode, so a late process cannot delete a successor's file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vkvmap.errors import RegionError


def available_memory(proc: str = "/proc", cgroups: str = "/sys/fs/cgroup") -> int:
    """Bytes of memory that a new region could take: the least of the machine's and every cgroup's.

    Memory that a cgroup holds as inactive file cache counts as available, as the kernel gives it up
    before it refuses.
    """
    limits = []
    with open(f"{proc}/meminfo") as meminfo:
        fields = dict(line.split(":", 1) for line in meminfo)
    limits.append(int(fields["MemAvailable"].split()[0]) * 1024)
    with suppress(OSError, StopIteration, ValueError):
        with open(f"{proc}/self/cgroup") as membership:
            inner = next(line[3:].strip() for line in membership if line.startswith("0::"))
        group = Path(cgroups + inner)
        for level in (group, *group.parents):
            limits.extend(_cgroup_room(level))
            if level == Path(cgroups):
                break
    return min(limits)


def _cgroup_room(level: Path) -> list[int]:
    try:
        limit = int((level / "memory.max").read_text())
        used = int((level / "memory.current").read_text())
        counters = dict(line.split() for line in (level / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such controller here, or "max": no limit at this level
        return []
    return [max(0, limit - used + int(counters.get("inactive_file", 0)))]


def check_capacity(
    nbytes: int, *, copies: int = 1, directory: str | None = None, available: int | None = None
) -> None:
    """Raise `RegionError` unless `copies` regions of `nbytes` fit together.

    Args:
        nbytes: bytes of one region.
        copies: how many processes of this node are about to ask for as much. A shared region is
            asked for once; where every rank takes memory of its own, each alone would pass.
        directory: where a named file would be; its file system must have the room as well.
        available: bytes of memory to count on, instead of what the kernel reports.
    """
    asked = nbytes * copies
    each = f" ({copies} x {_size(nbytes)})" if copies > 1 else ""
    memory = available_memory() if available is None else available
    if asked > memory:
        raise RegionError(
            f"region of {_size(asked)}{each} does not fit: {_size(memory)} of memory is available; "
            "ask for fewer rows or free memory"
        )
    if directory is not None:
        try:
            status = os.statvfs(directory)
        except OSError as error:
            raise RegionError(f"cannot create a region file in {directory}: {error}") from error
        room = status.f_bavail * status.f_frsize
        if asked > room:
            raise RegionError(
                f"region of {_size(asked)}{each} does not fit: {directory} has {_size(room)} free; "
                "enlarge that file system, name another directory, or use anonymous memory"
            )


def _size(nbytes: int) -> str:
    return f"{nbytes:,} bytes ({nbytes / 2**30:.2f} GiB)"


# ---- named files ------------------------------------------------------------------------------


def create_named(path: str, nbytes: int) -> int:
    """A file of `nbytes` at `path` that did not exist before, owned by nobody else; its descriptor.

    The file gets its name last, by an exclusive link, so whoever finds the name finds all bytes
    allocated. A stale file of dead processes is removed first; a live one is an error.
    """
    directory = os.path.dirname(path) or "."
    sweep(path)
    try:
        fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT):
            raise RegionError(f"cannot create a region file in {directory}: {error}") from error
        raise RegionError(
            f"{directory} cannot hold a region file ({error.strerror}); name a directory on tmpfs, "
            "such as /dev/shm"
        ) from error
    try:
        os.fchmod(fd, 0o600)
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as error:
            raise RegionError(
                f"cannot allocate {_size(nbytes)} in {directory}: {error.strerror}; ask for fewer "
                "rows or free space"
            ) from error
        fcntl.flock(fd, fcntl.LOCK_SH)
    except BaseException:
        os.close(fd)
        raise
    return fd


def publish_named(fd: int, path: str) -> None:
    """Give the finished file its name; `RegionError` if the name is taken by a live region."""
    try:
        # The unused directory makes Python call linkat, which alone can follow the link in /proc.
        os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)
    except FileExistsError as error:
        raise RegionError(
            f"{path} exists and a live process holds it; use another name or stop that process"
        ) from error


def open_named(path: str) -> int:
    """Open a region file for joining; refuses what another user could have planted or can read.

    Raises `FileNotFoundError` while there is no such name.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise RegionError(f"{path} is not a regular file; remove it")
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise RegionError(
                f"{path} belongs to uid {status.st_uid} with mode {stat.S_IMODE(status.st_mode):o};"
                f" a region must belong to uid {os.geteuid()} with mode 600"
            )
        fcntl.flock(fd, fcntl.LOCK_SH)
        if os.fstat(fd).st_nlink == 0:  # removed while we waited for the lock
            raise FileNotFoundError(errno.ENOENT, "no such region file", path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def unlink_if_same(fd: int, path: str) -> bool:
    """Remove `path` if it still leads to the file behind `fd`; whether it did.

    Call it holding either the exclusive `flock` or, as a member, `member_count_lock`: then nobody
    else removes this name between the look and the deed, and a successor cannot have taken it.
    """
    try:
        named, held = os.stat(path, follow_symlinks=False), os.fstat(fd)
    except FileNotFoundError:
        return False
    if (named.st_dev, named.st_ino) != (held.st_dev, held.st_ino):
        return False
    with suppress(FileNotFoundError):
        os.unlink(path)
        return True
    return False


def sweep(path: str) -> bool:
    """Remove `path` if it is a region file of this user that no living process holds."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except (OSError, ValueError):  # gone, a symlink, not ours, or no path: nothing to sweep
        return False
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            return False
        if os.pread(fd, len(MAGIC), 0) != MAGIC:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return unlink_if_same(fd, path)
    finally:
        os.close(fd)


#: First bytes of every region, and what tells a stale region file from a stranger's file.
MAGIC = b"VKVREGN\x01"


@contextmanager
def member_count_lock(fd: int) -> Iterator[None]:
    """Exclude other members while the count of joined members is read and written.

    An open-file-description lock: unlike POSIX record locks it excludes threads of one process too
    and is not dropped when some other descriptor of the file is closed.
    """
    whole_first_byte = (os.SEEK_SET, 0, 1, 0)
    fcntl.fcntl(fd, fcntl.F_OFD_SETLKW, struct.pack("hhqqi4x", fcntl.F_WRLCK, *whole_first_byte))
    try:
        yield
    finally:
        unlock = struct.pack("hhqqi4x", fcntl.F_UNLCK, *whole_first_byte)
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, unlock)
