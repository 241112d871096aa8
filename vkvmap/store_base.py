"""What every store of chunks offers, whatever keeps the bytes: rows in, rows out, own threads.

The contract of every operation on chunks: it never blocks on the medium (the store's threads do),
it is bounded in memory, and one chunk's failure is that chunk's alone. What keeps the bytes is a
`Backend`; it sees one chunk at a time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Literal, TypeVar, get_args

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
from vkvmap.store_shelf import Backend, Bytes, Result, Shelf, WitnessOf

Rows = Sequence[int] | Sequence[Bytes]
_Direction = Literal["put", "get"]
_Store = TypeVar("_Store", bound="ChunkStore")


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
        parts: Sequence[Collection[str]] | None,
        threads: int,
        queue_depth: int,
    ) -> None:
        self.identity = identity
        self._backend = backend
        self._region = region
        try:
            if formats is None:
                formats = {chunk.group: chunk for chunk in iterate_formats(identity)}
            self._shelves = {
                name: Shelf(
                    chunk,
                    f"{root}{chunk.identity.name}/{chunk.folder}",
                    (ledgers or {}).get(name),
                    (witnesses or {}).get(name),
                )
                for name, chunk in formats.items()
            }
            if parts is not None:
                named = [tuple(part) for part in parts]  # every shelf reads them anew
                self._shelves = {
                    name: shelf.divided(root, identity, named)
                    for name, shelf in self._shelves.items()
                }
            if threads < 1:
                raise StoreError(f"threads={threads}: a store needs at least one thread")
            self._threads = IoThreads(threads, queue_depth)
        except BaseException:
            backend.close()
            raise
        self._closed = False
        self._pid = os.getpid()
        self._counters = dict.fromkeys((*get_args(Outcome), "bytes_written", "bytes_read"), 0)
        del self._counters["pending"]
        self._counting = threading.Lock()
        if region is not None:
            region.hold(self)

    # ---- chunks -------------------------------------------------------------------------------

    def put(
        self,
        keys: Sequence[bytes],
        group: str,
        rows: Rows,
        *,
        layers: Collection[str] | None = None,
    ) -> StoreJob:
        """Store chunks, asynchronously; waits while the queue is full.

        Args:
            keys: one per chunk, 1 to 64 bytes each.
            group: the region section, which is the layer group for canonical chunks.
            rows: row numbers in that section, or uint8 arrays ``(payload_bytes,)``. They must not
                change until the job is done.
            layers: names of the layers that the rows hold, where pipeline stages on other nodes
                have the others; the parts that these fill are stored. Names of other groups' layers
                make no difference. Default all.

        Raises:
            StoreError: unknown group, closed, used after a fork, or `layers` cut a part, are
                none of the group's, or unknown to the model.
            FormatError: a key or a row has a wrong length.
        """
        job, tasks = self._prepare("put", keys, group, rows, layers)
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

    def try_put(
        self,
        keys: Sequence[bytes],
        group: str,
        rows: Rows,
        *,
        layers: Collection[str] | None = None,
    ) -> StoreJob | None:
        """As `put`, but never waits: None, and nothing done, where the queue has no room now."""
        job, tasks = self._prepare("put", keys, group, rows, layers)
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
        there = np.ones(len(keys), np.bool_)
        for piece in self._shelf(group).pieces:
            there &= np.array(self._backend.lookup(piece, keys), np.bool_)
        return there

    def prefix(self, keys: Sequence[bytes], group: str) -> int:
        """How many of `keys`, from the first, are stored without a gap."""
        found = len(keys)
        for piece in self._shelf(group).pieces:
            found = self._backend.prefix(piece, keys[:found])
        return found

    def delete(self, keys: Sequence[bytes], group: str) -> int:
        """Remove chunks; how many there were, also of those that lacked a part."""
        pieces = self._shelf(group).pieces
        removed = [[self._backend.delete(piece, [key]) for piece in pieces] for key in keys]
        return sum(any(parts) for parts in removed)

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
        self._threads.close(drain=drain)  # until this is done, rows of the region are in use
        with ExitStack() as steps:
            if self._region is not None:
                steps.callback(self._region.release, self)
            steps.callback(self._backend.close)

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
        filled = shelf.pieces
        chosen = None if layers is None else shelf.chosen(layers)
        if chosen is not None and direction == "put":
            filled = shelf.filled_by(chosen)
        job = StoreJob(len(keys))
        tasks = []
        for index, key in enumerate(keys):
            payload, row = self._row(shelf, group, rows[index])
            check_key(key)
            if direction == "put":
                work = partial(
                    self._put_complete, shelf, filled, key, payload, row, _generation(shelf, row)
                )
            else:
                work = partial(self._get_pieces, shelf, key, payload, chosen)
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

    def _put_complete(
        self,
        shelf: Shelf,
        filled: Sequence[Shelf],
        key: bytes,
        payload: Bytes,
        row: int | None,
        generation: int,
    ) -> Result:
        """Store the chunk if its row is complete, and is what it was when it was put.

        `generation` is the row's from then: it may have got the content of another key since.
        """
        ledger, extra = shelf.ledger, shelf.witness
        if row is None:
            return self._put_pieces(shelf, filled, key, payload, lambda: True, ())

        def unchanged() -> bool:
            return ledger is None or ledger.generation(row) == generation

        if not unchanged():
            return Result("incomplete", "the row got new content while it waited to be written")
        if ledger is not None and not ledger.complete([row])[0]:
            return Result("incomplete", f"writers {ledger.waiting_for(row)} have not reported")
        witnesses = extra(row) if extra is not None else ()
        return self._put_pieces(shelf, filled, key, payload, unchanged, witnesses)

    def _put_pieces(
        self,
        shelf: Shelf,
        filled: Sequence[Shelf],
        key: bytes,
        payload: Bytes,
        unchanged: Callable[[], bool],
        witnesses: Sequence[Witness],
    ) -> Result:
        total, backend = Result("present"), self._backend
        if shelf.parts:
            counts = {piece.base: len(piece.own(witnesses)) for piece in filled}
            if not backend.fits([(piece, counts.get(piece.base)) for piece in shelf.parts], key):
                return Result("full", "its parts do not fit the capacity together")
        for piece in filled:
            mine = piece.own(witnesses)
            result = backend.put(piece, key, piece.of(payload), unchanged, mine, shelf.parts)
            total = total.and_then(result)
            if not total.good:
                return total  # what is stored already costs room, but nothing else
        if len(filled) > 1 and not backend.whole(filled, key):
            reason = "a part was removed to make room before the last one was stored"
            return replace(total, outcome="full", reason=reason)
        return total

    def _get_pieces(
        self, shelf: Shelf, key: bytes, payload: Bytes, layers: frozenset[str] | None
    ) -> Result:
        total, touched = Result("hit"), shelf.touched_by(layers)
        for index, (piece, wanted) in enumerate(touched):
            result = self._backend.get(piece, key, piece.of(payload), wanted)
            witnesses = piece.others(result.witnesses)
            total = total.and_then(replace(result, witnesses=witnesses))
            if not total.good:
                for loaded, part in touched[:index]:
                    loaded.clear(loaded.of(payload), part)
                break
        return total

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


def _generation(shelf: Shelf, row: int | None) -> int:
    """The present generation of a row; 0 where no ledger speaks for it."""
    if shelf.ledger is None or row is None:
        return 0
    if row >= shelf.ledger.num_rows:
        raise StoreError(
            f"group {shelf.chunk.group!r}: row {row}, and its ledger has {shelf.ledger.num_rows} "
            "rows; a ledger needs one for every row of its section"
        )
    return shelf.ledger.generation(row)
