"""One chunk to or from its file: the whole sequence of steps, each of which may be the last.

Store: look, digest, reserve, write, sync, rename. Load: open, read, verify. A process killed
between any two of them leaves a whole chunk or none, and at worst a temporary that the next count
removes.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from vkvmap.errors import FormatError
from vkvmap.format import ChunkFormat
from vkvmap.ledger import Ledger
from vkvmap.store_files import ChunkFiles, close_quietly
from vkvmap.store_job import Outcome
from vkvmap.store_space import SUFFIX, Space

Bytes = npt.NDArray[np.uint8]
Sync = Literal["none", "data", "full"]


@dataclass(frozen=True)
class Shelf:
    """Where the chunks of one region section go.

    Attributes:
        chunk: their format.
        base: the folder above the buckets.
        ledger: when rows of the section are complete, or None where nobody keeps one.
        known: keys that were there at the last look.
    """

    chunk: ChunkFormat
    base: str
    ledger: Ledger | None = None
    known: set[bytes] = field(default_factory=set)

    def path(self, key: bytes) -> str:
        """The file of the chunk `key`."""
        name = key.hex()
        return f"{self.base}/{name[:2]}/{name}{SUFFIX}"


@dataclass(frozen=True)
class Result:
    """What became of one chunk, why, and the bytes that moved."""

    outcome: Outcome
    reason: str | None = None
    written: int = 0
    read: int = 0


class ChunkIo:
    """Stores and loads single chunks; several threads use one."""

    def __init__(self, space: Space, chunks: ChunkFiles, sync: Sync) -> None:
        self._space = space
        self._chunks = chunks
        self._files = chunks.files
        self._sync = sync

    # ---- store --------------------------------------------------------------------------------

    def put(self, shelf: Shelf, key: bytes, payload: Bytes, row: int | None) -> Result:
        """Store the chunk in `payload`, which is region row `row` where the shelf has a ledger."""
        if os.access(shelf.path(key), os.F_OK):
            shelf.known.add(key)
            return Result("present")
        ledger = shelf.ledger if row is not None else None
        generation = 0
        if ledger is not None and row is not None:
            generation = ledger.generation(row)
            if not ledger.complete([row])[0]:
                return Result("incomplete", f"writers {ledger.waiting_for(row)} have not reported")
        header = shelf.chunk.header(key, payload)
        nbytes = len(header) + shelf.chunk.padded_payload_bytes
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            made = self._space.reserve(nbytes, lambda path: self._chunks.open(path, flags, payload))
        except OSError as error:
            return _not_stored(error)
        if made is None:
            return Result("full", f"{nbytes} bytes do not fit the capacity")
        fd, temporary = made
        try:
            padded = shelf.chunk.padded_payload_bytes
            self._chunks.write(fd, header, payload, padded, sync=self._sync != "none")
            if ledger is not None and row is not None and ledger.generation(row) != generation:
                self._space.abandon(temporary, nbytes)
                return Result("incomplete", f"row {row} got new content while it was written")
            return self._publish(shelf, key, temporary, nbytes)
        except OSError as error:
            self._space.abandon(temporary, nbytes)
            return _not_stored(error)
        finally:
            close_quietly(self._files, fd)

    def _publish(self, shelf: Shelf, key: bytes, temporary: str, nbytes: int) -> Result:
        target = shelf.path(key)
        fresh = self._space.publish(temporary, target, nbytes)
        shelf.known.add(key)
        if not fresh:
            return Result("present")
        if self._sync == "full":
            self._files.sync_directory(os.path.dirname(target))
        return Result("stored", written=nbytes)

    # ---- load ---------------------------------------------------------------------------------

    def get(self, shelf: Shelf, key: bytes, payload: Bytes) -> Result:
        """Load the chunk `key` into `payload`, which is all zeros afterwards if it is damaged."""
        path = shelf.path(key)
        try:
            fd = self._chunks.open(path, os.O_RDONLY, payload)
        except FileNotFoundError:
            shelf.known.discard(key)
            return Result("miss")
        except OSError as error:
            return Result("failed", str(error))
        try:
            self._chunks.read(fd, shelf.chunk, key, payload)
        except FormatError as error:
            # Under this name nothing but this chunk belongs, so what is foreign is damaged here.
            payload[:] = 0
            shelf.known.discard(key)
            self._space.quarantine(path, fd)
            return Result("damaged", str(error))
        except OSError as error:
            # The file may be good: only this reading of it was not.
            payload[:] = 0
            return Result("failed", str(error))
        else:
            with suppress(OSError):  # a file system mounted read-only keeps no order of use
                self._files.touch(fd)
            return Result("hit", read=payload.nbytes)
        finally:
            close_quietly(self._files, fd)


def _not_stored(error: OSError) -> Result:
    no_room = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return Result("full" if no_room else "failed", str(error))
