"""Canonical chunks that outlive the process: a directory that any number of processes share.

Right bytes, or a miss with a reason. A chunk file appears whole and is never changed; nothing is
handed out before its digests are checked; whatever cannot be believed is moved out of the way.
The contract of every operation on chunks: it never blocks on the disk (its own threads do), it is
bounded in memory, and one chunk's failure is that chunk's alone.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from vkvmap.errors import FormatError, StoreError
from vkvmap.format import ChunkFormat, iterate_formats
from vkvmap.identity import Identity
from vkvmap.keys import check_key
from vkvmap.ledger import Ledger
from vkvmap.region import Region
from vkvmap.store_chunk import ChunkIo, Result, Shelf, Sync
from vkvmap.store_files import ChunkFiles, FileSystem, direct_io_works
from vkvmap.store_job import Outcome, StoreJob
from vkvmap.store_queue import IoThreads, Task
from vkvmap.store_space import SUFFIX, EvictionPolicy, Space, least_recently_used, make_folder

__all__ = ["CanonicalStore", "StoreJob"]

Bytes = npt.NDArray[np.uint8]
Rows = Sequence[int] | Sequence[Bytes]
_Direction = Literal["put", "get"]


class CanonicalStore:
    """A directory of canonical chunks, keyed by block hash and group.

    Args:
        path: the directory; it is created, for this user alone, if it does not exist. Several
            identities share it, and one capacity.
        identity: what the bytes mean. Chunks of any other identity are misses.
        region: whose rows `put` and `get` name by number; without one they take arrays.
        formats: region section -> format; default: one section per group of `identity`, named like
            it. Opaque rows need `ChunkFormat.opaque`.
        ledgers: region section -> completion ledger; `put` then refuses rows that are not complete
            and drops what changed while it was written.
        capacity: most bytes that the directory may take, all identities together; None: no bound.
        policy: which chunks go first when it is full; default: those unread for longest.
        sync: ``"data"`` (default): bytes are on the medium before a chunk appears. ``"full"``: its
            name as well before `put` reports it. ``"none"``: after a power loss chunks may be
            damaged, which readers notice.
        direct: direct I/O where the file system allows it.
        threads: I/O threads of this process.
        queue_depth: chunks that wait or are in progress at most; then `put` and `get` wait.
        quarantine_files: damaged files kept for inspection.
        files: system calls, for tests.

    Raises:
        StoreError: the directory cannot be used.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        identity: Identity,
        *,
        region: Region | None = None,
        formats: Mapping[str, ChunkFormat] | None = None,
        ledgers: Mapping[str, Ledger] | None = None,
        capacity: int | None = None,
        policy: EvictionPolicy = least_recently_used,
        sync: Sync = "data",
        direct: bool = True,
        threads: int = 4,
        queue_depth: int = 64,
        quarantine_files: int = 16,
        files: FileSystem | None = None,
    ) -> None:
        self.path = os.path.abspath(path)
        self.identity = identity
        self._files = files or FileSystem()
        self._space = Space(
            self.path,
            self._files,
            capacity=capacity,
            policy=policy,
            quarantine_files=quarantine_files,
        )
        works = direct and direct_io_works(f"{self.path}/state")
        self._io = ChunkIo(self._space, ChunkFiles(self._files, direct=works), sync)
        self._region = region
        if formats is None:
            formats = {chunk.group: chunk for chunk in iterate_formats(identity)}
        self._shelves: dict[str, Shelf] = {}
        for name, chunk in formats.items():
            self._describe(chunk.identity)
            base = f"{self.path}/{chunk.identity.name}/{chunk.folder}"
            self._shelves[name] = Shelf(chunk, base, (ledgers or {}).get(name))
        self._threads = IoThreads(threads, queue_depth)
        self._epoch = self._space.epoch
        self._pid = os.getpid()
        self._counters = dict.fromkeys((*get_args(Outcome), "bytes_written", "bytes_read"), 0)
        del self._counters["pending"]
        self._counting = threading.Lock()
        if region is not None:
            region.hold(self)

    # ---- chunks -------------------------------------------------------------------------------

    def put(self, keys: Sequence[bytes], group: str, rows: Rows) -> StoreJob:
        """Store chunks, asynchronously; waits while the queue is full.

        Args:
            keys: one per chunk, 1 to 64 bytes each.
            group: the region section, which is the layer group for canonical chunks.
            rows: row numbers in that section, or uint8 arrays ``(payload_bytes,)``. They must not
                change until the job is done.

        Raises:
            StoreError: unknown group, closed, or used after a fork.
            FormatError: a key or a row has a wrong length.
        """
        job, tasks = self._prepare("put", keys, group, rows)
        self._queue(self._threads.submit, tasks)
        return job

    def get(self, keys: Sequence[bytes], group: str, rows: Rows) -> StoreJob:
        """Load chunks into rows, asynchronously; arguments and errors as for `put`.

        A row holds its chunk if its outcome is ``"hit"``; otherwise nothing that may be used.
        """
        job, tasks = self._prepare("get", keys, group, rows)
        self._queue(self._threads.submit, tasks)
        return job

    def try_put(self, keys: Sequence[bytes], group: str, rows: Rows) -> StoreJob | None:
        """As `put`, but never waits: None, and nothing done, where the queue has no room now."""
        job, tasks = self._prepare("put", keys, group, rows)
        return job if self._queue(self._threads.try_submit, tasks) else None

    def try_get(self, keys: Sequence[bytes], group: str, rows: Rows) -> StoreJob | None:
        """As `get`, but never waits: None, and nothing done, where the queue has no room now."""
        job, tasks = self._prepare("get", keys, group, rows)
        return job if self._queue(self._threads.try_submit, tasks) else None

    def lookup(self, keys: Sequence[bytes], group: str) -> npt.NDArray[np.bool_]:
        """Per key, whether a chunk is stored, without reading it; bool ``(len(keys),)``.

        It may be gone or prove damaged by the time it is read; `get` says.
        """
        found = self._finder(group)
        return np.fromiter((found(key) for key in keys), np.bool_, len(keys))

    def prefix(self, keys: Sequence[bytes], group: str) -> int:
        """How many of `keys`, from the first, are stored without a gap."""
        found = self._finder(group)
        for index, key in enumerate(keys):
            if not found(key):
                return index
        return len(keys)

    def delete(self, keys: Sequence[bytes], group: str) -> int:
        """Remove chunks; how many there were."""
        shelf = self._shelf(group)
        return sum(self._space.remove(shelf.path(key)) for key in keys)

    def _finder(self, group: str) -> Callable[[bytes], bool]:
        shelf = self._shelf(group)
        epoch = self._space.epoch
        if epoch != self._epoch:
            # A chunk has disappeared since: what is known to be there may not be.
            for each in self._shelves.values():
                each.known.clear()
            self._epoch = epoch
        known, base, access = shelf.known, shelf.base, os.access

        def found(key: bytes) -> bool:
            if key in known:
                return True
            name = key.hex()
            if access(f"{base}/{name[:2]}/{name}{SUFFIX}", os.F_OK):
                known.add(key)
                return True
            return False

        return found

    # ---- the store itself ---------------------------------------------------------------------

    def snapshot(self) -> dict[str, int]:
        """Counters of this object since it was opened, and the bytes that the directory takes."""
        with self._counting:
            counters = dict(self._counters)
        counters["evicted"] = self._space.evicted
        counters["used_bytes"] = self._space.used
        counters["outstanding"] = self._threads.outstanding
        return counters

    def neighbours(self) -> dict[str, str]:
        """Other identities in this directory -> how they differ: why their chunks are misses."""
        reasons = {}
        for name in sorted(os.listdir(self.path)):
            if len(name) == 64 and name != self.identity.name:
                try:
                    with open(f"{self.path}/{name}/identity.json", encoding="utf-8") as text:
                        reason = self.identity.difference(text.read())
                except (OSError, ValueError) as error:
                    reason = f"its description cannot be read: {error}"
                reasons[name] = reason or "its description is ours but its name is not"
        return reasons

    def close(self, *, drain: bool = True) -> None:
        """Finish what is in flight (`drain`) or cancel what has not started, and let go."""
        self._threads.close(drain=drain)
        self._space.close()
        if self._region is not None:
            self._region.release(self)

    def __enter__(self) -> CanonicalStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- submitting ---------------------------------------------------------------------------

    def _prepare(
        self, direction: _Direction, keys: Sequence[bytes], group: str, rows: Rows
    ) -> tuple[StoreJob, list[Task]]:
        if os.getpid() != self._pid:
            raise StoreError("this store was opened before a fork; open it again in the child")
        if len(keys) != len(rows):
            raise StoreError(f"{len(keys)} keys for {len(rows)} rows; one row per key is needed")
        shelf = self._shelf(group)
        job = StoreJob(len(keys))
        tasks = []
        for index, key in enumerate(keys):
            payload, row = self._row(shelf, group, rows[index])
            tasks.append(self._task(direction, job, index, shelf, check_key(key), payload, row))
        return job, tasks

    def _queue(self, submit: Callable[[Sequence[Task]], bool], tasks: Sequence[Task]) -> bool:
        try:
            return submit(tasks)
        except RuntimeError as error:
            raise StoreError(str(error)) from None

    def _task(
        self,
        direction: _Direction,
        job: StoreJob,
        index: int,
        shelf: Shelf,
        key: bytes,
        payload: Bytes,
        row: int | None,
    ) -> Task:
        def task(run: bool) -> None:
            result = Result("cancelled")
            try:
                if run and direction == "put":
                    result = self._io.put(shelf, key, payload, row)
                elif run:
                    result = self._io.get(shelf, key, payload)
            except BaseException as error:
                result = Result("failed", repr(error))
                raise
            finally:
                self._count(result)
                job.settle(index, result.outcome, result.reason)

        return task

    def _count(self, result: Result) -> None:
        with self._counting:
            self._counters[result.outcome] += 1
            self._counters["bytes_written"] += result.written
            self._counters["bytes_read"] += result.read

    # ---- setting up ---------------------------------------------------------------------------

    def _shelf(self, name: str) -> Shelf:
        try:
            return self._shelves[name]
        except KeyError:
            raise StoreError(
                f"no group {name!r} in this store; it has {list(self._shelves)}"
            ) from None

    def _row(self, shelf: Shelf, group: str, row: int | Bytes) -> tuple[Bytes, int | None]:
        """The bytes of a row, and its number where it is one of the region's."""
        number: int | None = None
        if isinstance(row, np.ndarray):
            payload = row
        elif self._region is not None:
            number = int(row)
            payload = self._region.row(group, number)
        else:
            raise StoreError(f"row {row!r} without a region; pass arrays, or open with region=")
        if payload.nbytes != shelf.chunk.payload_bytes or payload.dtype != np.uint8:
            raise FormatError(
                f"group {group!r}: row of {payload.nbytes} bytes ({payload.dtype}); its chunks "
                f"have {shelf.chunk.payload_bytes} bytes (uint8)"
            )
        if not payload.flags.c_contiguous:
            raise FormatError(f"group {group!r}: rows must be contiguous")
        return payload, number

    def _describe(self, identity: Identity) -> None:
        """Put the description beside the chunks, for people; the name alone decides."""
        folder = f"{self.path}/{identity.name}"
        path = f"{folder}/identity.json"
        make_folder(folder)
        with suppress(OSError, ValueError), open(path, encoding="utf-8") as text:
            if text.read() == identity.json:
                return
        self._space.write_small(path, identity.json)
