"""Looking after a store directory without being one of its users: list, count, check, clean.

None of it needs a model or an identity, and all of it may run while engines use the store.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import xxhash

from vkvmap.errors import FormatError, StoreError
from vkvmap.foreign import read_json
from vkvmap.format import ALIGNMENT, MOST_HEADER_BYTES, describe_header, header_length
from vkvmap.store_files import FileSystem
from vkvmap.store_listing import QUARANTINE, TEMPORARY, Entry, iterate, listed, plain_files, saying
from vkvmap.store_space import Space

#: Called with (good chunks so far, their bytes) after each file.
Progress = Callable[[int, int], None]
_PIECE = 8 << 20


@dataclass
class GroupStats:
    """Chunks of one group of one identity."""

    chunks: int = 0
    nbytes: int = 0


@dataclass
class StoreStats:
    """What a store directory holds.

    Attributes:
        models: identity -> "model@revision", or why its description cannot be read.
        groups: (identity, folder) -> chunks and bytes.
        temporaries, quarantined: files of either kind.
        used: what the shared counter says; at least what the files take.
    """

    models: dict[str, str] = field(default_factory=dict)
    groups: dict[tuple[str, str], GroupStats] = field(default_factory=dict)
    chunks: int = 0
    nbytes: int = 0
    temporaries: int = 0
    quarantined: int = 0
    used: int = 0


@dataclass
class Check:
    """What `fsck` found.

    Attributes:
        chunks, nbytes: what can be served.
        damaged: path -> what is wrong with it.
        misplaced: path -> where its header says it belongs.
        unreadable: path -> why it cannot be read; that says nothing about the file, which stays.
        unknown: files that are no part of a store.
        orphans: temporaries whose writer is gone.
        repaired: files moved to quarantine or removed.
    """

    chunks: int = 0
    nbytes: int = 0
    damaged: dict[str, str] = field(default_factory=dict)
    misplaced: dict[str, str] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    orphans: int = 0
    repaired: int = 0

    @property
    def clean(self) -> bool:
        """Whether every chunk can be served."""
        return not (self.damaged or self.misplaced or self.unreadable)


@dataclass
class Collected:
    """What `gc` removed."""

    temporaries: int = 0
    quarantined: int = 0
    chunks: int = 0
    nbytes: int = 0


def ls(path: str, *, identity: str = "", folder: str | None = None) -> Iterator[Entry]:
    """Chunks of identities whose name starts with `identity` (of `folder` only, if given).

    Raises:
        StoreError: no store, or a folder in it cannot be read.
    """
    _require_store(path)
    for entry in listed(path):
        if entry.identity.startswith(identity) and folder in (None, entry.folder):
            yield entry


def stats(path: str) -> StoreStats:
    """Count what is there.

    Raises:
        StoreError: no store, or a folder in it cannot be read.
    """
    _require_store(path)
    found = StoreStats()
    with _opened(path) as space:
        for name in os.listdir(path):
            if len(name) == 64:
                found.models[name] = _model(path, name)
        for entry in iterate(path):
            group = found.groups.setdefault((entry.identity, entry.folder), GroupStats())
            group.chunks += 1
            group.nbytes += entry.nbytes
            found.chunks += 1
            found.nbytes += entry.nbytes
        found.temporaries = len(plain_files(f"{path}/{TEMPORARY}"))
        found.quarantined = len(plain_files(f"{path}/{QUARANTINE}"))
        found.used = space.used
    return found


def fsck(path: str, *, repair: bool = False, progress: Progress | None = None) -> Check:
    """Read every byte of every chunk and compare it with its digests.

    Args:
        path: the store directory.
        repair: quarantine what cannot be served, remove orphaned temporaries.
        progress: called after each file.
    """
    _require_store(path)
    found = Check()
    with _opened(path) as space:
        for entry in iterate(path):
            try:
                _check_entry(entry, found, space if repair else None)
            except FileNotFoundError:  # evicted meanwhile
                continue
            except OSError as error:
                found.unreadable[entry.path] = error.strerror or str(error)
            if progress is not None:
                progress(found.chunks, found.nbytes)
        found.unknown = list(_unknown(path))
        found.orphans = space.orphans()
        if repair:
            found.repaired += space.collect()
    return found


def _check_entry(entry: Entry, found: Check, repairing: Space | None) -> None:
    fd = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        try:
            belongs = check_file(fd)
        except FormatError as error:
            found.damaged[entry.path] = str(error)
        else:
            if belongs == (entry.identity, entry.folder, entry.key):
                found.chunks += 1
                found.nbytes += entry.nbytes
                return
            found.misplaced[entry.path] = "/".join(belongs)
        if repairing is not None:
            with suppress(OSError):  # it stays, listed and not counted as repaired
                found.repaired += repairing.quarantine(entry.path, fd)
    finally:
        os.close(fd)


def gc(
    path: str,
    *,
    identity: str | None = None,
    unused_days: float | None = None,
    quarantine: bool = True,
) -> Collected:
    """Remove what nobody needs: orphaned temporaries, quarantine, and chunks as asked for.

    Args:
        path: the store directory.
        identity: remove every chunk of the identities whose name starts like this.
        unused_days: remove chunks that nobody has read or written for so long.
        quarantine: remove damaged files that were kept for inspection.
    """
    _require_store(path)
    if identity == "":
        raise StoreError("identity '' would remove every chunk; name the identity, or its start")
    removed = Collected()
    with _opened(path) as space:
        removed.temporaries = space.collect()
        if quarantine:
            removed.quarantined = space.empty_quarantine()
        limit = None if unused_days is None else time.time_ns() - int(unused_days * 86400e9)
        for entry in iterate(path):
            unwanted = identity is not None and entry.identity.startswith(identity)
            if (unwanted or (limit is not None and entry.used_at < limit)) and space.remove(
                entry.path
            ):
                removed.chunks += 1
                removed.nbytes += entry.nbytes
        with space.locked():
            _remove_empty_folders(path)
    return removed


@contextmanager
def _opened(path: str) -> Iterator[Space]:
    """The store's space, to look at and to clean; what the system refuses is a StoreError."""
    space = Space(path, FileSystem(), sweep=False)
    try:
        with saying(f"look after the store at {path}"):
            yield space
    finally:
        space.close()


def check_file(fd: int) -> tuple[str, str, str]:
    """Verify the chunk file `fd`; the identity, folder and key that its header names.

    Raises:
        FormatError: what is wrong with it.
    """
    start = os.pread(fd, ALIGNMENT, 0)
    header = describe_header(os.pread(fd, min(header_length(start), MOST_HEADER_BYTES), 0))
    for offset, nbytes, digest in header.pages:
        hashed = xxhash.xxh3_128()
        done = 0
        while done < nbytes:
            at = header.header_bytes + offset + done
            piece = os.pread(fd, min(_PIECE, nbytes - done), at)
            if not piece:
                raise FormatError(f"it ends at byte {at}, within the payload")
            hashed.update(piece)
            done += len(piece)
        if hashed.digest() != digest:
            raise FormatError(f"payload bytes {offset} to {offset + nbytes} fail their digest")
    return header.identity.hex(), header.folder, header.key.hex()


def _require_store(path: str) -> None:
    if not os.path.isfile(f"{path}/state"):
        raise StoreError(f"{path} is not a store directory; a store that was opened once has one")


def _model(path: str, identity: str) -> str:
    try:
        with open(f"{path}/{identity}/identity.json", encoding="utf-8") as text:
            description = text.read()
        if hashlib.sha256(description.encode()).hexdigest() != identity:
            return "its description does not match its name"
        said = read_json(description)
        return f"{said['model']}@{said['revision']}"
    except (OSError, ValueError, KeyError) as error:
        return f"its description cannot be read: {error}"


def _unknown(path: str) -> Iterator[str]:
    known = {entry.path for entry in iterate(path)}
    for folder, _, names in os.walk(path):
        relative = os.path.relpath(folder, path)
        if relative.split(os.sep)[0] in (TEMPORARY, QUARANTINE):
            continue
        for name in names:
            place = os.path.join(folder, name)
            own = relative == "." and name in ("lock", "state")
            described = name == "identity.json" and os.sep not in relative
            if not own and not described and place not in known and os.path.exists(place):
                yield place


def _remove_empty_folders(path: str) -> None:
    for folder, _, _ in os.walk(path, topdown=False):
        depth = os.path.relpath(folder, path).count(os.sep)
        if depth >= 1:
            with suppress(OSError):  # not empty
                os.rmdir(folder)
