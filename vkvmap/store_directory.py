"""Chunks in a directory: every step to or from a file, each of which may be the last.

Store: look, digest, reserve, write, sync, rename. Load: open, read, verify. A process killed
between any two of them leaves a whole chunk or none, and at worst a temporary that the next count
removes.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Literal

import numpy as np
import numpy.typing as npt

from vkvmap.errors import FormatError
from vkvmap.format import Witness
from vkvmap.store_files import ChunkFiles, close_quietly
from vkvmap.store_listing import saying
from vkvmap.store_shelf import CHANGED, SUFFIX, Result, Shelf
from vkvmap.store_space import Space

Bytes = npt.NDArray[np.uint8]
Sync = Literal["none", "data", "full"]


class Directory:
    """The backend that keeps chunks as files below one root."""

    def __init__(self, space: Space, chunks: ChunkFiles, sync: Sync) -> None:
        self._space = space
        self._chunks = chunks
        self._files = chunks.files
        self._sync = sync

    # ---- store --------------------------------------------------------------------------------

    def put(
        self,
        shelf: Shelf,
        key: bytes,
        payload: Bytes,
        unchanged: Callable[[], bool],
        witnesses: Sequence[Witness] = (),
        beside: Sequence[Shelf] = (),
    ) -> Result:
        """Store the chunk in `payload`, unless it is there; see `Backend`."""
        epoch = self._space.epoch
        if os.access(shelf.path(key), os.F_OK):
            if key in shelf.stuck:
                return Result("failed", "a damaged file has its name and cannot be moved away")
            shelf.known[key] = epoch
            return Result("present")
        header = shelf.chunk.header(key, payload, witnesses)
        nbytes = shelf.file_bytes(len(witnesses))
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            made = self._space.reserve(
                nbytes,
                lambda path: self._chunks.open(path, flags, payload),
                lambda: [piece.path(key) for piece in beside],
            )
        except OSError as error:
            return _not_stored(error)
        if made is None:
            return Result("full", f"{nbytes} bytes do not fit the capacity")
        fd, temporary = made
        try:
            padded = shelf.chunk.padded_payload_bytes
            self._chunks.write(fd, header, payload, padded, sync=self._sync != "none")
            if not unchanged():
                self._abandon(temporary, nbytes)
                return CHANGED
            return self._publish(shelf, key, temporary, nbytes)
        except OSError as error:
            self._abandon(temporary, nbytes)
            return _not_stored(error)
        except BaseException:
            self._abandon(temporary, nbytes)
            raise
        finally:
            close_quietly(self._files, fd)

    def fits(self, pieces: Sequence[tuple[Shelf, int | None]], key: bytes) -> bool:
        """Whether the parts of one chunk have room together; see `Backend`."""
        capacity = self._space.capacity
        if capacity is None:
            return True
        there = missing = 0
        for piece, witnesses in pieces:
            try:
                there += os.stat(piece.path(key)).st_size
            except OSError:
                missing += 0 if witnesses is None else piece.file_bytes(witnesses)
        return not missing or there + missing <= capacity

    def _abandon(self, temporary: str, nbytes: int) -> None:
        """Remove the temporary, or leave it: without its writer the next count removes it."""
        with suppress(OSError):
            self._space.abandon(temporary, nbytes)

    def _publish(self, shelf: Shelf, key: bytes, temporary: str, nbytes: int) -> Result:
        target, epoch = shelf.path(key), self._space.epoch
        fresh = self._space.publish(temporary, target, nbytes)
        shelf.known[key] = epoch
        if not fresh:
            return Result("present")
        if self._sync == "full":
            self._files.sync_directory(os.path.dirname(target))
        return Result("stored", written=nbytes)

    # ---- load ---------------------------------------------------------------------------------

    def get(
        self, shelf: Shelf, key: bytes, payload: Bytes, layers: frozenset[str] | None = None
    ) -> Result:
        """Load the chunk `key`, or some layers of it; see `Backend`."""
        path = shelf.path(key)
        try:
            if layers is None:
                fd = self._chunks.open(path, os.O_RDONLY, payload)
            else:
                fd = self._files.open(path, os.O_RDONLY)
        except FileNotFoundError:
            shelf.known.pop(key, None)
            return Result("miss")
        except OSError as error:
            return Result("failed", str(error))
        try:
            if layers is None:
                header = self._chunks.read(fd, shelf.chunk, key, payload)
            else:
                header = self._chunks.read_layers(fd, shelf.chunk, key, payload, layers)
        except FormatError as error:
            # Under this name nothing but this chunk belongs, so what is foreign is damaged here.
            shelf.clear(payload, layers)
            shelf.known.pop(key, None)
            return Result("damaged", f"{error}{self._out_of_the_way(shelf, key, fd)}")
        except OSError as error:
            # The file may be good: only this reading of it was not.
            shelf.clear(payload, layers)
            return Result("failed", str(error))
        else:
            shelf.stuck.discard(key)
            with suppress(OSError):  # a file system mounted read-only keeps no order of use
                self._files.touch(fd)
            read = sum(stop - start for start, stop in shelf.chunk.ranges(layers))
            return Result("hit", read=read, witnesses=header.witnesses)
        finally:
            close_quietly(self._files, fd)

    def _out_of_the_way(self, shelf: Shelf, key: bytes, fd: int) -> str:
        """Move the damaged file away; what to add to the reason where that cannot be done.

        Then it is remembered, or lookups would promise it for ever.
        """
        try:
            self._space.quarantine(shelf.path(key), fd)
        except OSError as error:
            shelf.stuck.add(key)
            return f"; its file stays in place: {error.strerror or error}"
        shelf.stuck.discard(key)
        return ""

    # ---- look ---------------------------------------------------------------------------------

    def lookup(self, shelf: Shelf, keys: Sequence[bytes]) -> list[bool]:
        """Which keys are there; see `Backend`."""
        found = self._finder(shelf)
        return [found(key) for key in keys]

    def whole(self, pieces: Sequence[Shelf], key: bytes) -> bool:
        """Whether all these parts of the chunk are there."""
        return all(self._finder(piece)(key) for piece in pieces)

    def prefix(self, shelf: Shelf, keys: Sequence[bytes]) -> int:
        """How many keys, from the first, are there without a gap."""
        found = self._finder(shelf)
        for index, key in enumerate(keys):
            if not found(key):
                return index
        return len(keys)

    def _finder(self, shelf: Shelf) -> Callable[[bytes], bool]:
        epoch = self._space.epoch
        known, stuck, base, access = shelf.known, shelf.stuck, shelf.base, os.access
        if epoch != shelf.looked_at[0]:
            # A chunk has disappeared since: what was known to be there says nothing any more.
            known.clear()
            shelf.looked_at[0] = epoch

        def found(key: bytes) -> bool:
            if key in stuck:
                return False
            if known.get(key) == epoch:
                return True
            name = key.hex()
            if access(f"{base}/{name[:2]}/{name}{SUFFIX}", os.F_OK):
                known[key] = epoch  # from before the look: whatever goes after it ends this
                return True
            return False

        return found

    def delete(self, shelf: Shelf, keys: Sequence[bytes]) -> int:
        """Remove chunks; how many there were. StoreError where the file system refuses."""
        with saying("remove chunks"):
            return sum(self._space.remove(shelf.path(key)) for key in keys)

    # ---- the directory ------------------------------------------------------------------------

    def counters(self) -> dict[str, int]:
        """Chunks that this process evicted, and the bytes that the directory takes."""
        return {"evicted": self._space.evicted, "used_bytes": self._space.used}

    def close(self) -> None:
        """Let go of the directory."""
        self._space.close()


def _not_stored(error: OSError) -> Result:
    no_room = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return Result("full" if no_room else "failed", str(error))
