"""Canonical chunks in Mooncake Store: one pool of memory and SSD for all nodes of a cluster.

Chosen as the remote store because it is what LLM engines already run for this job, because it takes
bytes from and into registered memory at several addresses at once (header and region row, nothing
is copied together first), and because a put is atomic there: an object is complete or absent. What
it stores is the file of docs/format.md, byte for byte; verification on load is ours as well.

Needs ``pip install vkvmap[remote]`` and the system library libibverbs (even for TCP).
"""

from __future__ import annotations

import ctypes
import mmap
import socket
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from vkvmap.errors import FormatError, StoreError
from vkvmap.format import ALIGNMENT, MOST_HEADER_BYTES, ChunkFormat, Witness
from vkvmap.identity import Identity
from vkvmap.ledger import Ledger
from vkvmap.region import Region
from vkvmap.store_base import ChunkStore
from vkvmap.store_shelf import CHANGED, Result, Shelf, WitnessOf

__all__ = ["MooncakeStore", "connect"]

Bytes = npt.NDArray[np.uint8]

#: Mooncake's own codes; everything else that is negative is a failure.
_NOT_FOUND = -704
_NO_ROOM = -200


def connect(
    *,
    master: str,
    metadata: str,
    hostname: str = "127.0.0.1",
    segment_bytes: int = 1 << 30,
    buffer_bytes: int = 64 << 20,
    protocol: str = "tcp",
    devices: str = "",
) -> Any:
    """A Mooncake client of this process.

    Args:
        master: ``host:port`` of mooncake_master.
        metadata: metadata server, such as ``http://host:port/metadata``, or ``P2PHANDSHAKE``.
        hostname: under which other nodes reach this process.
        segment_bytes: memory that this process adds to the pool; 0 for a pure consumer.
        buffer_bytes: the client's own staging memory.
        protocol, devices: ``"tcp"``, or ``"rdma"`` and its devices.

    Raises:
        StoreError: the package or its system library is missing, or there is no master.
    """
    try:
        client = import_module("mooncake.store").MooncakeDistributedStore()
    except ImportError as error:
        raise StoreError(
            f"Mooncake cannot be imported ({error}); pip install vkvmap[remote], and libibverbs1 "
            "from the system's packages"
        ) from error
    _check_reachable(master)
    code = client.setup(hostname, metadata, segment_bytes, buffer_bytes, protocol, devices, master)
    if code:
        raise StoreError(f"no Mooncake master at {master} (code {code}); start mooncake_master")
    return client


def _check_reachable(master: str) -> None:
    """Fail at once where nobody listens; Mooncake itself tries for about two minutes."""
    host, _, port = master.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=10.0).close()
    except (OSError, ValueError) as error:
        raise StoreError(
            f"no Mooncake master at {master} ({error}); start mooncake_master"
        ) from error


class MooncakeStore(ChunkStore):
    """`CanonicalStore`'s interface over a Mooncake cluster.

    Args:
        client: from `connect`; closed by whoever made it, after this store.
        identity, region, formats, ledgers, witnesses, parts, threads, queue_depth: as for
            `CanonicalStore`. Rows of `region` are moved without a copy; arrays go through a staging
            buffer.

    Raises:
        StoreError: Mooncake refuses to register the region.
    """

    def __init__(
        self,
        client: Any,
        identity: Identity,
        *,
        region: Region | None = None,
        formats: Mapping[str, ChunkFormat] | None = None,
        ledgers: Mapping[str, Ledger] | None = None,
        witnesses: Mapping[str, WitnessOf] | None = None,
        parts: Sequence[Collection[str]] | None = None,
        threads: int = 4,
        queue_depth: int = 64,
    ) -> None:
        super().__init__(
            identity,
            _Cluster(client, region),
            "vkvmap/",
            region=region,
            formats=formats,
            ledgers=ledgers,
            witnesses=witnesses,
            parts=parts,
            threads=threads,
            queue_depth=queue_depth,
        )


class _Staging:
    """Registered, page-aligned memory of one thread."""

    def __init__(self, client: Any, nbytes: int) -> None:
        self.nbytes = nbytes
        self.memory = mmap.mmap(-1, nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self._client = client
        _registered(client, self.address, nbytes)

    def array(self, start: int, nbytes: int) -> Bytes:
        return np.frombuffer(self.memory, np.uint8, nbytes, start)

    def close(self) -> None:
        self._client.unregister_buffer(self.address)


class _Cluster:
    """The backend: one chunk to or from one object."""

    def __init__(self, client: Any, region: Region | None) -> None:
        self._client = client
        self._region = region
        self._local = threading.local()
        self._staging: list[_Staging] = []
        self._lock = threading.Lock()
        if region is not None:
            _registered(client, region.address, region.nbytes)

    def put(
        self,
        shelf: Shelf,
        key: bytes,
        payload: Bytes,
        unchanged: Callable[[], bool],
        witnesses: Sequence[Witness] = (),
        beside: Sequence[Shelf] = (),
    ) -> Result:
        """Store the chunk in `payload`, unless it is there."""
        name = shelf.path(key)
        if self._client.is_exist(name) == 1:
            return Result("present")
        header = shelf.chunk.header(key, payload, witnesses)
        if not unchanged():
            return CHANGED
        # From here on the digests bind the content: what the row gets now would fail them.
        buffers = self._buffers(shelf.chunk, len(header), payload)
        buffers.staging.array(0, len(header))[:] = np.frombuffer(header, np.uint8)
        if buffers.staged is not None:
            buffers.staged[:] = payload
        code = self._client.batch_put_from_multi_buffers(
            [name], [buffers.addresses], [buffers.sizes]
        )[0]
        if code == _NO_ROOM:
            return Result("full", "the cluster has no room")
        if code:
            return Result("failed", f"Mooncake code {code}")
        if not unchanged():
            self._client.remove(name, True)
            return CHANGED
        return Result("stored", written=sum(buffers.sizes))

    def fits(self, pieces: Sequence[tuple[Shelf, int | None]], key: bytes) -> bool:
        """Yes: the cluster alone knows, and says so when it is asked to store."""
        return True

    def whole(self, pieces: Sequence[Shelf], key: bytes) -> bool:
        """Whether all these parts of the chunk are there, in one request."""
        names = [piece.path(key) for piece in pieces]
        return all(code == 1 for code in self._client.batch_is_exist(names))

    def get(
        self, shelf: Shelf, key: bytes, payload: Bytes, layers: frozenset[str] | None = None
    ) -> Result:
        """Load the chunk, or some layers of it; zeros there if it is damaged."""
        name, chunk = shelf.path(key), shelf.chunk
        size = self._client.get_size(name)
        if size == _NOT_FOUND:
            return Result("miss")
        if size < 0:
            return Result("failed", f"Mooncake code {size}")
        length = size - chunk.padded_payload_bytes
        try:
            if not chunk.header_bytes <= length <= MOST_HEADER_BYTES:
                raise FormatError(f"an object of {size} bytes is not a chunk of this format")
            buffers = self._buffers(chunk, length, payload, always=layers is not None)
            code = self._client.batch_get_into_multi_buffers(
                [name], [buffers.addresses], [buffers.sizes]
            )[0]
            if code == _NOT_FOUND:
                return Result("miss")
            if code != size:
                shelf.clear(payload, layers)
                return Result("failed", f"Mooncake code {code}")
            header = chunk.read_header(buffers.staging.array(0, length).tobytes(), key)
            if buffers.staged is not None:
                for start, stop in chunk.ranges(layers):
                    payload[start:stop] = buffers.staged[start:stop]
            chunk.verify(header, payload, layers)
        except FormatError as error:
            # Nothing else belongs under this name, and nobody could ever use it.
            shelf.clear(payload, layers)
            self._client.remove(name, True)
            return Result("damaged", str(error))
        return Result("hit", read=payload.nbytes, witnesses=header.witnesses)

    def lookup(self, shelf: Shelf, keys: Sequence[bytes]) -> list[bool]:
        """Which keys are there, in one request."""
        if not keys:
            return []
        return [code == 1 for code in self._client.batch_is_exist([shelf.path(k) for k in keys])]

    def prefix(self, shelf: Shelf, keys: Sequence[bytes]) -> int:
        """How many keys, from the first, are there without a gap; one request."""
        there = self.lookup(shelf, keys)
        return there.index(False) if False in there else len(there)

    def delete(self, shelf: Shelf, keys: Sequence[bytes]) -> int:
        """Remove chunks; how many there were."""
        return sum(self._client.remove(shelf.path(key), True) == 0 for key in keys)

    def counters(self) -> dict[str, int]:
        """Bytes of staging memory."""
        return {"staging_bytes": sum(staging.nbytes for staging in self._staging)}

    def close(self) -> None:
        """Take registrations back, each whichever other fails; the client stays open."""
        with ExitStack() as steps:
            if self._region is not None:
                steps.callback(self._client.unregister_buffer, self._region.address)
            for staging in self._staging:
                steps.callback(staging.close)

    def _buffers(
        self, chunk: ChunkFormat, header_bytes: int, payload: Bytes, *, always: bool = False
    ) -> _Buffers:
        """Where the bytes of one object lie: header, payload and padding in turn.

        The payload is staged where its row is not registered, or `always`.
        """
        padding = chunk.padded_payload_bytes - payload.nbytes
        needed = header_bytes + chunk.padded_payload_bytes + padding
        staging: _Staging | None = getattr(self._local, "staging", None)
        if staging is None or staging.nbytes < needed:
            staging = _Staging(self._client, -(-needed // ALIGNMENT) * ALIGNMENT)
            self._local.staging = staging
            with self._lock:
                self._staging.append(staging)
        address, staged = int(payload.ctypes.data), None
        region = self._region
        if (
            always
            or region is None
            or not (
                region.address <= address
                and address + payload.nbytes <= region.address + region.nbytes
            )
        ):
            staged = staging.array(header_bytes, payload.nbytes)
            address = staging.address + header_bytes
        addresses, sizes = [staging.address, address], [header_bytes, payload.nbytes]
        if padding:
            zeros = header_bytes + chunk.padded_payload_bytes
            staging.array(zeros, padding)[:] = 0
            addresses.append(staging.address + zeros)
            sizes.append(padding)
        return _Buffers(staging, staged, addresses, sizes)


class _Buffers:
    """`staged`: the payload's copy where the row itself is not registered."""

    def __init__(
        self, staging: _Staging, staged: Bytes | None, addresses: list[int], sizes: list[int]
    ) -> None:
        self.staging, self.staged, self.addresses, self.sizes = staging, staged, addresses, sizes


def _registered(client: Any, address: int, nbytes: int) -> None:
    code = client.register_buffer(address, nbytes)
    if code:
        raise StoreError(f"Mooncake refuses to register {nbytes:,} bytes (code {code})")
