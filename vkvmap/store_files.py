"""Reading and writing chunk files: large aligned pieces, straight from and into rows.

`FileSystem` is the narrow waist: every system call that the store makes on chunk files goes through
one, so that tests can kill, fail or lose power between any two of them.

Direct I/O is used where the file system takes it and the device can reach the row: the region is
the cache, a second copy in the page cache would only take memory from it. Header and the payload's
last partial page go through a page-aligned scratch buffer that each thread keeps.

Where rows lie decides how fast that is: a disk that is given scattered small pages has little on
its way at a time, and is faster with rows in huge pages, as those of regions are (docs/store.md).
There is no buffer in huge pages for rows in small ones: the others would pay for the copy.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from vkvmap.format import ALIGNMENT, ChunkFormat, DamagedError, Header, header_length

Bytes = npt.NDArray[np.uint8]

#: Most bytes of end-to-end digests that a file's size alone is believed for.
_LIKELY_DIGESTS = 1 << 20


class FileSystem:
    """The system calls of the store. Subclass it to inject faults."""

    def open(self, path: str, flags: int) -> int:
        """Open `path`; new files are for their owner only."""
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def close(self, fd: int) -> None:
        """Close `fd`."""
        os.close(fd)

    def writev(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        """Write at `offset`; how many bytes were written."""
        return os.pwritev(fd, buffers, offset)

    def readv(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        """Read at `offset`; how many bytes were read, 0 at the end."""
        return os.preadv(fd, buffers, offset)

    def size(self, fd: int) -> int:
        """Bytes of the file."""
        return os.fstat(fd).st_size

    def give_up_direct(self, fd: int) -> bool:
        """Go on through the page cache; False if that is what `fd` does already."""
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        if not flags & os.O_DIRECT:
            return False
        fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        return True

    def sync(self, fd: int) -> None:
        """Return once the file's bytes are on the medium."""
        os.fdatasync(fd)

    def sync_directory(self, path: str) -> None:
        """Return once the names in directory `path` are on the medium."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, source: str, target: str) -> None:
        """Give the file at `source` the name `target`, replacing what had it."""
        os.rename(source, target)

    def unlink(self, path: str) -> None:
        """Remove a name."""
        os.unlink(path)

    def touch(self, fd: int) -> None:
        """Mark the file as used now."""
        os.utime(fd)


class ChunkFiles:
    """Writes and reads one chunk at a time; used by several threads at once."""

    def __init__(self, files: FileSystem, *, direct: int) -> None:
        """`direct`: what addresses of rows are multiples of for direct I/O; 0: use none."""
        self.files = files
        self.direct = direct
        self._scratch = threading.local()

    # ---- writing ------------------------------------------------------------------------------

    def write(
        self, fd: int, header: bytes, payload: Bytes, padded_bytes: int, *, sync: bool
    ) -> None:
        """Write a whole chunk to the new file `fd`.

        Args:
            fd: opened for writing with `open`.
            header: whole header.
            payload: uint8 ``(payload_bytes,)``.
            padded_bytes: payload bytes with the zeros after them.
            sync: return only once it is on the medium.

        Raises:
            OSError: of whatever failed; the file is of no use then.
        """
        main = _in_place(payload)
        tail = padded_bytes - main
        scratch = self._buffer(len(header) + tail)
        scratch[: len(header)] = header
        if tail:
            rest = payload.nbytes - main
            scratch[len(header) : len(header) + rest] = payload[main:].data
            scratch[len(header) + rest : len(header) + tail] = bytes(tail - rest)
        pieces = [scratch[: len(header)], payload.data[:main], scratch[len(header) :][:tail]]
        done = self._all(self.files.writev, fd, pieces, 0)
        if done < len(header) + padded_bytes:
            raise OSError(errno.EIO, f"a write at byte {done} came back with nothing written")
        if sync:
            self.files.sync(fd)

    def open(self, path: str, flags: int, payload: Bytes) -> int:
        """Open `path` for whole chunks, directly where this row can be moved that way."""
        reachable = self.direct and payload.ctypes.data % self.direct == 0
        return self.files.open(path, flags | (os.O_DIRECT if reachable else 0))

    # ---- reading ------------------------------------------------------------------------------

    def read(self, fd: int, chunk: ChunkFormat, key: bytes, payload: Bytes) -> Header:
        """Read a whole chunk into the row `payload` and verify it.

        Raises:
            DamagedError, ForeignError: what was read is not to be used.
            OSError: it could not be read; that says nothing about the file.
        """
        length = self._likely_header_bytes(fd, chunk)
        got, scratch = self._read_whole(fd, length, chunk, payload)
        if got < chunk.header_bytes:
            raise DamagedError(f"{got} of {chunk.header_bytes} header bytes")
        stated = header_length(scratch)
        if stated != length:  # the file is longer or shorter than it should be
            length = stated
            got, scratch = self._read_whole(fd, length, chunk, payload)
        if got < length:  # what else is in the buffer is another file's
            raise DamagedError(f"{got} of {length} header bytes")
        header = chunk.read_header(scratch[:length], key)
        if got < length + payload.nbytes:
            raise DamagedError(f"{got - length} of {payload.nbytes} payload bytes")
        main = _in_place(payload)
        payload[main:] = np.frombuffer(scratch, np.uint8)[length:][: payload.nbytes - main]
        chunk.verify(header, payload)
        return header

    def _likely_header_bytes(self, fd: int, chunk: ChunkFormat) -> int:
        """What the file's size leaves for the header, which may carry end-to-end digests."""
        rest = self.files.size(fd) - chunk.padded_payload_bytes
        likely = 0 <= rest - chunk.header_bytes <= _LIKELY_DIGESTS and rest % ALIGNMENT == 0
        return rest if likely else chunk.header_bytes

    def _read_whole(
        self, fd: int, header_bytes: int, chunk: ChunkFormat, payload: Bytes
    ) -> tuple[int, memoryview]:
        """Read header and payload; how many bytes came, and the scratch buffer with the header.

        Whole pages of the payload go to their place, what is left of it behind the header.
        """
        main = _in_place(payload)
        tail = chunk.padded_payload_bytes - main
        scratch = self._buffer(header_bytes + tail)
        pieces = [scratch[:header_bytes], payload.data[:main], scratch[header_bytes:][:tail]]
        return self._all(self.files.readv, fd, pieces, 0), scratch

    def read_layers(
        self, fd: int, chunk: ChunkFormat, key: bytes, payload: Bytes, layers: frozenset[str]
    ) -> Header:
        """Read and verify the bytes of `layers` only; the rest of the row is left alone.

        Layers start where they start, so this goes through the page cache: open the file without
        direct I/O. Errors as for `read`.
        """
        start = bytearray(chunk.header_bytes)
        got = self._all(self.files.readv, fd, [start], 0)
        length = header_length(bytes(start[:got]))
        if length > chunk.header_bytes:
            start.extend(bytes(length - chunk.header_bytes))
            rest = memoryview(start)[chunk.header_bytes :]
            got += self._all(self.files.readv, fd, [rest], chunk.header_bytes)
        header = chunk.read_header(bytes(start[:got]), key)
        for first, stop in chunk.ranges(layers):
            done = self._all(self.files.readv, fd, [payload.data[first:stop]], length + first)
            if done < stop - first:
                raise DamagedError(f"{first + done} of {payload.nbytes} payload bytes")
        chunk.verify(header, payload, layers)
        return header

    def _all(self, call: Any, fd: int, pieces: Sequence[Any], offset: int) -> int:
        """Repeat `call` until all pieces are done or nothing more comes; the bytes done.

        What cannot be done directly, such as the rest after a step that ended within a block, goes
        through the page cache.
        """
        left = [memoryview(piece) for piece in pieces if len(piece)]
        done = 0
        while left:
            try:
                step = call(fd, left, offset + done)
            except OSError as error:
                if error.errno == errno.EINVAL and self.files.give_up_direct(fd):
                    continue
                raise
            if step <= 0:
                break
            done += step
            while left and step >= len(left[0]):
                step -= len(left.pop(0))
            if left and step:
                left[0] = left[0][step:]
        return done

    def _buffer(self, nbytes: int) -> memoryview:
        """Page-aligned scratch of this thread, at least `nbytes` long."""
        held: mmap.mmap | None = getattr(self._scratch, "memory", None)
        if held is None or len(held) < nbytes:
            held = mmap.mmap(-1, -(-nbytes // ALIGNMENT) * ALIGNMENT)
            self._scratch.memory = held
        return memoryview(held)


def _in_place(payload: Bytes) -> int:
    """Bytes of the payload that are moved straight from or into the row: its whole pages."""
    return payload.nbytes // ALIGNMENT * ALIGNMENT


def direct_alignment(path: str) -> int:
    """What addresses of memory must be multiples of for direct I/O on this file; 0: none works.

    Found by reading its first 4096 bytes: devices ask for anything up to a page, and not every
    system says what.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        memory = memoryview(mmap.mmap(-1, 2 * ALIGNMENT))
        for bits in range(ALIGNMENT.bit_length()):
            with suppress(OSError):
                if os.preadv(fd, [memory[1 << bits :][:ALIGNMENT]], 0) == ALIGNMENT:
                    return 1 << bits
        return 0
    finally:
        os.close(fd)


def close_quietly(files: FileSystem, fd: int) -> None:
    """Close after everything that matters was read or synced; what close says then is no news."""
    with suppress(OSError):
        files.close(fd)
