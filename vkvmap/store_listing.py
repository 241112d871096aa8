"""What lies in a store directory: names and sizes as the file system has them, nothing opened.

Files appear and vanish while this looks: what has gone by the time it is asked about is left out.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from vkvmap.errors import StoreError
from vkvmap.keys import key_named
from vkvmap.store_shelf import SUFFIX

TEMPORARY = "tmp"
QUARANTINE = "quarantine"


@dataclass(frozen=True)
class Entry:
    """A stored chunk as the file system sees it; `used_at` in nanoseconds since the epoch."""

    path: str
    identity: str
    folder: str
    key: str
    nbytes: int
    used_at: int


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


def listed(root: str) -> Iterator[Entry]:
    """As `iterate`; StoreError where a folder cannot be read."""
    with saying(f"list what lies in {root}"):
        yield from iterate(root)


def keys_below(base: str) -> set[bytes]:
    """Keys of the chunk files in the buckets of `base`, each in its place.

    A name that is no key, or is one in another spelling or bucket, is nothing that loads find.

    Raises:
        StoreError: a folder cannot be read.
    """
    with saying(f"list what lies in {base}"):
        return {
            key
            for bucket in _folders(base)
            for item in plain_files(bucket.path)
            if item.name.endswith(SUFFIX)
            and (name := item.name.removesuffix(SUFFIX))[:2] == bucket.name
            and (key := key_named(name)) is not None
        }


@contextmanager
def saying(what: str) -> Iterator[None]:
    """Say as a StoreError, "cannot `what`", what the system refuses."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"cannot {what}: {error}") from error


def make_folder(path: str) -> None:
    """Make the folder `path` and those above it, all for their owner only.

    Raises:
        OSError: it cannot be made, or no folder can have this name.
    """
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        return
    except ValueError as error:  # a NUL, or half a character
        raise OSError(errno.EINVAL, f"no path: {error}") from error
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
