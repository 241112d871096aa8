"""What every store of chunks offers, whatever keeps the bytes: rows in, rows out, own threads.

The contract of every operation on chunks: it never blocks on the medium (the store's threads do),
it is bounded in memory, and one chunk's failure is that chunk's alone. What keeps the bytes is a
`Backend`; it sees one chunk at a time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from vkvmap.errors import FormatError, StoreError
from vkvmap.format import ChunkFormat, Witness, iterate_formats
from vkvmap.identity import Identity
from vkvmap.keys import check_key
from vkvmap.ledger import Ledger
from vkvmap.region import Region
from vkvmap.store_job import Outcome, StoreJob
from vkvmap.store_queue import IoThreads, Task

Bytes = npt.NDArray[np.uint8]
Rows = Sequence[int] | Sequence[Bytes]
SUFFIX = ".chunk"
#: Region row -> the end-to-end digests of the chunk in it.
WitnessOf = Callable[[int], Sequence[Witness]]
_Direction = Literal["put", "get"]
_Store = TypeVar("_Store", bound="ChunkStore")


@dataclass(frozen=True)
class Shelf:
    """Where the chunks of one region section go.

    Attributes:
        chunk: their format.
        base: what the name of every one of them starts with.
        ledger: when rows of the section are complete, or None where nobody keeps one.
        known: keys that were there at the last look.
        looked_at: one number, the state of the backend that `known` belongs to.
        witness: row -> end-to-end digests to store with it, or None.
    """

    chunk: ChunkFormat
    base: str
    ledger: Ledger | None = None
    known: set[bytes] = field(default_factory=set)
    looked_at: list[int] = field(default_factory=lambda: [0])
    witness: WitnessOf | None = None

    def path(self, key: bytes) -> str:
        """The name of the chunk `key` (docs/format.md)."""
        name = key.hex()
        return f"{self.base}/{name[:2]}/{name}{SUFFIX}"

    def clear(self, payload: Bytes, layers: frozenset[str] | None) -> None:
        """Leave nothing of what a load that went wrong has put into its row."""
        for start, stop in self.chunk.ranges(layers):
            payload[start:stop] = 0


@dataclass(frozen=True)
class Result:
    """What became of one chunk, why, and the bytes that moved."""

    outcome: Outcome
    reason: str | None = None
    written: int = 0
    read: int = 0
    witnesses: tuple[Witness, ...] = ()


class Backend(Protocol):
    """What keeps the bytes. Called by several threads at once; raises nothing on bad chunks."""

    def put(
        self,
        shelf: Shelf,
        key: bytes,
        payload: Bytes,
        unchanged: Callable[[], bool],
        witnesses: Sequence[Witness],
    ) -> Result:
        """Store the chunk; do not let it appear unless `unchanged()` after its bytes were read."""

    def get(
        self, shelf: Shelf, key: bytes, payload: Bytes, layers: frozenset[str] | None
    ) -> Result:
        """Load the chunk into `payload` and verify it; zeros in `payload` if that fails.

        Of `layers` only, if given: their bytes are read, verified or zeroed, and no others.
        """

    def lookup(self, shelf: Shelf, keys: Sequence[bytes]) -> Sequence[bool]:
        """Which keys are there."""

    def prefix(self, shelf: Shelf, keys: Sequence[bytes]) -> int:
        """How many keys, from the first, are there without a gap."""

    def delete(self, shelf: Shelf, keys: Sequence[bytes]) -> int:
        """Remove chunks; how many there were."""

    def counters(self) -> dict[str, int]:
        """What it counts itself."""

    def close(self) -> None:
        """Let go of everything. Nothing is in flight any more."""


class ChunkStore:
    """Canonical chunks keyed by block hash and group. See `CanonicalStore` for the arguments."""

    def __init__(
        self,
        identity: Identity,
        backend: Backend,
        root: str,
        *,
        region: Region | None,
        formats: Mapping[str, ChunkFormat] | None,
        ledgers: Mapping[str, Ledger] | None,
        witnesses: Mapping[str, WitnessOf] | None,
        threads: int,
        queue_depth: int,
    ) -> None:
        self.identity = identity
        self._backend = backend
        self._region = region
        if formats is None:
            formats = {chunk.group: chunk for chunk in iterate_formats(identity)}
        self._shelves = {
            name: Shelf(
                chunk,
                f"{root}{chunk.identity.name}/{chunk.folder}",
                (ledgers or {}).get(name),
                witness=(witnesses or {}).get(name),
            )
            for name, chunk in formats.items()
        }
        if threads < 1:
            backend.close()
            raise StoreError(f"threads={threads}: a store needs at least one thread")
        self._threads = IoThreads(threads, queue_depth)
        self._closed = False
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

    def get(
        self,
        keys: Sequence[bytes],
        group: str,
        rows: Rows,
        *,
        layers: Collection[str] | None = None,
    ) -> StoreJob:
        """Load chunks into rows, asynchronously; arguments and errors as for `put`.

        A row holds its chunk if its outcome is ``"hit"``; otherwise nothing that may be used.

        Args:
            layers: names of the layers to load, for pipeline stages that need no others; the other
                layers' bytes of the rows are left alone. Default all.
        """
        job, tasks = self._prepare("get", keys, group, rows, layers)
        self._queue(self._threads.submit, tasks)
        return job

    def try_put(self, keys: Sequence[bytes], group: str, rows: Rows) -> StoreJob | None:
        """As `put`, but never waits: None, and nothing done, where the queue has no room now."""
        job, tasks = self._prepare("put", keys, group, rows)
        return job if self._queue(self._threads.try_submit, tasks) else None

    def try_get(
        self,
        keys: Sequence[bytes],
        group: str,
        rows: Rows,
        *,
        layers: Collection[str] | None = None,
    ) -> StoreJob | None:
        """As `get`, but never waits: None, and nothing done, where the queue has no room now."""
        job, tasks = self._prepare("get", keys, group, rows, layers)
        return job if self._queue(self._threads.try_submit, tasks) else None

    def lookup(self, keys: Sequence[bytes], group: str) -> npt.NDArray[np.bool_]:
        """Per key, whether a chunk is stored, without reading it; bool ``(len(keys),)``.

        It may be gone or prove damaged by the time it is read; `get` says.
        """
        return np.array(self._backend.lookup(self._shelf(group), keys), np.bool_)

    def prefix(self, keys: Sequence[bytes], group: str) -> int:
        """How many of `keys`, from the first, are stored without a gap."""
        return self._backend.prefix(self._shelf(group), keys)

    def delete(self, keys: Sequence[bytes], group: str) -> int:
        """Remove chunks; how many there were."""
        return self._backend.delete(self._shelf(group), keys)

    # ---- the store itself ---------------------------------------------------------------------

    def snapshot(self) -> dict[str, int]:
        """Counters of this object since it was opened, and what the backend counts."""
        self._check_open()
        with self._counting:
            counters = dict(self._counters)
        counters["outstanding"] = self._threads.outstanding
        return counters | self._backend.counters()

    def close(self, *, drain: bool = True) -> None:
        """Finish what is in flight (`drain`) or cancel what has not started, and let go."""
        self._closed = True
        self._threads.close(drain=drain)
        self._backend.close()
        if self._region is not None:
            self._region.release(self)

    def __enter__(self: _Store) -> _Store:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- submitting ---------------------------------------------------------------------------

    def _shelf(self, name: str) -> Shelf:
        self._check_open()
        try:
            return self._shelves[name]
        except KeyError:
            raise StoreError(
                f"no group {name!r} in this store; it has {list(self._shelves)}"
            ) from None

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("the store is closed")

    def _prepare(
        self,
        direction: _Direction,
        keys: Sequence[bytes],
        group: str,
        rows: Rows,
        layers: Collection[str] | None = None,
    ) -> tuple[StoreJob, list[Task]]:
        if os.getpid() != self._pid:
            raise StoreError("this store was opened before a fork; open it again in the child")
        if len(keys) != len(rows):
            raise StoreError(f"{len(keys)} keys for {len(rows)} rows; one row per key is needed")
        shelf = self._shelf(group)
        chosen = None if layers is None else _layers_of(shelf, layers)
        job = StoreJob(len(keys))
        tasks = []
        for index, key in enumerate(keys):
            payload, row = self._row(shelf, group, rows[index])
            check_key(key)
            if direction == "put":
                work = partial(self._put_complete, shelf, key, payload, row)
            else:
                work = partial(self._backend.get, shelf, key, payload, chosen)
            tasks.append(self._task(job, index, work))
        return job, tasks

    def _queue(self, submit: Callable[[Sequence[Task]], bool], tasks: Sequence[Task]) -> bool:
        try:
            return submit(tasks)
        except RuntimeError as error:
            raise StoreError(str(error)) from None

    def _task(self, job: StoreJob, index: int, work: Callable[[], Result]) -> Task:
        def task(run: bool) -> None:
            result = Result("cancelled")
            try:
                if run:
                    result = work()
            except BaseException as error:
                result = Result("failed", repr(error))
                raise
            finally:
                self._count(result)
                job.settle(index, result.outcome, result.reason, result.witnesses)

        return task

    def _put_complete(self, shelf: Shelf, key: bytes, payload: Bytes, row: int | None) -> Result:
        """Store the chunk if its row is complete, and stays the same while it is read."""
        ledger, extra = shelf.ledger, shelf.witness
        if row is None:
            return self._backend.put(shelf, key, payload, lambda: True, ())
        generation = 0 if ledger is None else ledger.generation(row)
        if ledger is not None and not ledger.complete([row])[0]:
            return Result("incomplete", f"writers {ledger.waiting_for(row)} have not reported")

        def unchanged() -> bool:
            return ledger is None or ledger.generation(row) == generation

        witnesses = extra(row) if extra is not None else ()
        return self._backend.put(shelf, key, payload, unchanged, witnesses)

    def _count(self, result: Result) -> None:
        with self._counting:
            self._counters[result.outcome] += 1
            self._counters["bytes_written"] += result.written
            self._counters["bytes_read"] += result.read

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


def _layers_of(shelf: Shelf, layers: Collection[str]) -> frozenset[str]:
    known = {page.layer for page in shelf.chunk.pages}
    unknown = sorted(set(layers) - known)
    if unknown:
        raise StoreError(
            f"group {shelf.chunk.group!r} has no layers {unknown[:3]}, but {len(known)} others"
        )
    return frozenset(layers)
