"""Canonical chunks that outlive the process: a directory that any number of processes share.

Right bytes, or a miss with a reason. A chunk file appears whole and is never changed; nothing is
handed out before its digests are checked; whatever cannot be believed is moved out of the way.
The contract of every operation on chunks: it never blocks on the disk (its own threads do), it is
bounded in memory, and one chunk's failure is that chunk's alone.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

from vkvmap.errors import StoreError
from vkvmap.format import ChunkFormat
from vkvmap.identity import Identity
from vkvmap.ledger import Ledger
from vkvmap.region import Region
from vkvmap.store_base import ChunkStore
from vkvmap.store_directory import Directory, Sync
from vkvmap.store_files import ChunkFiles, FileSystem, direct_alignment
from vkvmap.store_job import StoreJob
from vkvmap.store_listing import keys_below, saying
from vkvmap.store_shelf import WitnessOf
from vkvmap.store_space import EvictionPolicy, Space, least_recently_used

__all__ = ["CanonicalStore", "StoreJob"]


class CanonicalStore(ChunkStore):
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
        witnesses: region section -> what gives the end-to-end digests of a row, such as
            `WitnessBoard.witnesses`; they are stored with the chunk and come back with `get`.
        parts: layer names, every layer in one part; default: chunks are stored whole. For models
            whose pipeline stages run on several nodes: no stage that stores may split a part. All
            who share chunks must name the same parts.
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
        witnesses: Mapping[str, WitnessOf] | None = None,
        parts: Sequence[Collection[str]] | None = None,
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
        system = files or FileSystem()
        self._space = Space(
            self.path,
            system,
            capacity=capacity,
            policy=policy,
            quarantine_files=quarantine_files,
        )
        alignment = direct_alignment(f"{self.path}/state") if direct else 0
        backend = Directory(self._space, ChunkFiles(system, direct=alignment), sync)
        super().__init__(
            identity,
            backend,
            f"{self.path}/",
            region=region,
            formats=formats,
            ledgers=ledgers,
            witnesses=witnesses,
            parts=parts,
            threads=threads,
            queue_depth=queue_depth,
        )
        pieces = [piece for shelf in self._shelves.values() for piece in shelf.pieces]
        self._identities = {piece.chunk.identity.name: piece.chunk.identity for piece in pieces}
        try:
            for stored in self._identities.values():
                self._describe(stored)
        except OSError as error:
            self.close()
            raise StoreError(f"cannot write to the store at {self.path}: {error}") from error

    def keys(self, group: str) -> list[bytes]:
        """The keys of all chunks that are there, in order; of chunks in parts, of whole ones.

        Raises:
            StoreError: unknown group, closed, or a folder cannot be read.
        """
        pieces = self._shelf(group).pieces
        return sorted(set.intersection(*(keys_below(piece.base) for piece in pieces)))

    def neighbours(self) -> dict[str, str]:
        """Other identities in this directory -> how they differ: why their chunks are misses."""
        reasons = {}
        with saying(f"read {self.path}"):
            names = sorted(os.listdir(self.path))
        for name in names:
            if len(name) != 64 or name in self._identities:
                continue
            if name == self.identity.name:  # the chunks of this store are in parts
                reasons[name] = "the same model's chunks, stored whole"
            else:
                try:
                    with open(f"{self.path}/{name}/identity.json", encoding="utf-8") as text:
                        reason = self.identity.difference(text.read())
                except (OSError, ValueError) as error:
                    reason = f"its description cannot be read: {error}"
                reasons[name] = reason or "its description is ours but its name is not"
        return reasons

    def _describe(self, identity: Identity) -> None:
        """Put the description beside the chunks, for people; the name alone decides."""
        path = f"{self.path}/{identity.name}/identity.json"
        with suppress(OSError, ValueError), open(path, encoding="utf-8") as text:
            if text.read() == identity.json:
                return
        self._space.write_small(path, identity.json)
