"""One stored chunk as bytes: a header, then the payload (docs/format.md is the specification).

Pure bytes in, bytes out: no files, no processes. What must stay true:

 1. a header is believed only after its own checksum, and payload bytes only after the digest of the
    canonical page that they belong to;
 2. digests are over canonical bytes alone, so they do not depend on who wrote them;
 3. what is *foreign* (another version, identity or key) is told from what is *damaged*: the first
    is somebody's good data, the second is nobody's.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from vkvmap.errors import FormatError
from vkvmap.identity import FORMAT_VERSION, Identity
from vkvmap.keys import check_key

Bytes = npt.NDArray[np.uint8]

MAGIC = b"VKVCHUNK"
ALIGNMENT = 4096
DIGEST_BYTES = 16
#: No header is longer: a reader never allocates what a stranger's file asks for.
MOST_HEADER_BYTES = 16 << 20

# magic, version, header bytes, payload bytes, identity, group, key bytes, flags, key,
# layers, pages, witnesses, reserved, checksum
_FIXED = struct.Struct("<8sIIQ32sIHH64sIIII16s")
_LAYER = struct.Struct("<QQII")  # offset, bytes, pages, reserved
_WITNESS = struct.Struct("<II16s")  # layer, head, digest
_WITNESSED, _OPAQUE = 1, 2  # flags
_CHECKSUM_AT = _FIXED.size - DIGEST_BYTES


class ForeignError(FormatError):
    """A good chunk, but not the one asked for: other version, identity, group or key."""


class DamagedError(FormatError):
    """Bytes that fit no rule of the format or not their checksum."""


@dataclass(frozen=True)
class Page:
    """One canonical page within a chunk: `nbytes` bytes at `offset`, page `index` of `layer`."""

    layer: str
    index: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Witness:
    """An end-to-end digest: of KV head `head` of the layer at position `layer` of the group."""

    layer: int
    head: int
    digest: bytes


@dataclass(frozen=True)
class Header:
    """What a valid header says: page digests in page order, and end-to-end digests if any."""

    key: bytes
    digests: tuple[bytes, ...]
    witnesses: tuple[Witness, ...] = ()


class ChunkFormat:
    """How chunks of one group of one identity are written; computed once, used for every chunk.

    Attributes:
        identity, group: whose chunks.
        payload_bytes: bytes of the chunk.
        header_bytes: bytes before the payload, without end-to-end digests; a multiple of 4096.
        pages: the canonical pages in file order.
    """

    def __init__(self, identity: Identity, group: str) -> None:
        """The format of canonical chunks. For opaque data use `opaque`."""
        _check_group(identity, group)
        chunk = identity.chunks[group]
        span = identity.span(group)
        pieces = [
            (name, chunk.sizes[name], chunk.tokens // span if spec.has_tokens else 1)
            for name, spec in identity.layers.items()
            if name in chunk.offsets
        ]
        self._set(identity, group, pieces)

    @classmethod
    def opaque(
        cls, identity: Identity, group: str, pieces: Iterable[tuple[str, int, int]]
    ) -> ChunkFormat:
        """The format of one rank's opaque rows: ``(layer, bytes of one page, pages)`` in order.

        Raises:
            FormatError: `identity` does not say which configuration wrote them.
        """
        _check_group(identity, group)
        if identity.placement is None:
            raise FormatError(
                f"group {group!r}: opaque rows mean nothing without the configuration that wrote "
                "them; use identity.opaque(placement)"
            )
        made = cls.__new__(cls)
        made._set(
            identity, group, [(name, size * count, count) for name, size, count in pieces], _OPAQUE
        )
        return made

    def _set(
        self,
        identity: Identity,
        group: str,
        pieces: Iterable[tuple[str, int, int]],
        flags: int = 0,
    ) -> None:
        offset, layers = 0, b""
        pages: list[Page] = []
        for name, size, count in pieces:
            step = size // count
            pages.extend(Page(name, i, offset + i * step, step) for i in range(count))
            layers += _LAYER.pack(offset, size, count, 0)
            offset += size
        if not pages:
            raise FormatError(
                f"group {group!r} has no described layer, hence no canonical chunk; its rows are "
                "stored with ChunkFormat.opaque"
            )
        self.identity = identity
        self.group = group
        self.payload_bytes = offset
        self.pages = tuple(pages)
        self._layers = layers
        self._group_index = identity.layers.groups.index(group)
        self._digest = identity.digest
        self._flags = flags
        self.header_bytes = self.header_bytes_with(0)

    def header_bytes_with(self, witnesses: int) -> int:
        """Header length of a chunk that carries that many end-to-end digests."""
        used = _FIXED.size + len(self._layers) + len(self.pages) * DIGEST_BYTES
        return _round_up(used + witnesses * _WITNESS.size)

    @property
    def folder(self) -> str:
        """Name of the group's folder below the identity: its number, and ``p`` for opaque rows."""
        return f"{self._group_index}{'p' if self._flags & _OPAQUE else ''}"

    @property
    def padded_payload_bytes(self) -> int:
        """Payload and the zeros after it."""
        return _round_up(self.payload_bytes)

    def ranges(self, layers: frozenset[str] | None) -> list[tuple[int, int]]:
        """The payload bytes of `layers` (None: of all), as ascending ``(start, stop)``."""
        if layers is None:
            return [(0, self.payload_bytes)]
        found: list[tuple[int, int]] = []
        for page in self.pages:
            if page.layer in layers:
                if found and found[-1][1] == page.offset:
                    found[-1] = (found[-1][0], page.offset + page.nbytes)
                else:
                    found.append((page.offset, page.offset + page.nbytes))
        return found

    # ---- writing ------------------------------------------------------------------------------

    def digests(self, payload: Bytes) -> tuple[bytes, ...]:
        """The digest of every canonical page of `payload`, in page order."""
        data = payload.data
        return tuple(
            xxhash.xxh3_128_digest(data[page.offset : page.offset + page.nbytes])
            for page in self.pages
        )

    def header(self, key: bytes, payload: Bytes, witnesses: Iterable[Witness] = ()) -> bytes:
        """The header of the chunk `payload`, uint8 ``(payload_bytes,)``, stored under `key`."""
        if payload.nbytes != self.payload_bytes:
            raise FormatError(
                f"group {self.group!r}: a chunk has {self.payload_bytes} bytes, not "
                f"{payload.nbytes}"
            )
        extra = list(witnesses)
        length = self.header_bytes_with(len(extra))
        parts = [
            self._fixed(check_key(key), length, len(extra), bytes(DIGEST_BYTES)),
            self._layers,
            *self.digests(payload),
            *(_WITNESS.pack(witness.layer, witness.head, witness.digest) for witness in extra),
        ]
        whole = bytearray(b"".join(parts).ljust(length, b"\0"))
        whole[_CHECKSUM_AT : _FIXED.size] = xxhash.xxh3_128_digest(bytes(whole))
        return bytes(whole)

    def _fixed(self, key: bytes, length: int, witnesses: int, checksum: bytes) -> bytes:
        return _FIXED.pack(
            MAGIC,
            FORMAT_VERSION,
            length,
            self.payload_bytes,
            self._digest,
            self._group_index,
            len(key),
            self._flags | (_WITNESSED if witnesses else 0),
            key,
            len(self._layers) // _LAYER.size,
            len(self.pages),
            witnesses,
            0,
            checksum,
        )

    # ---- reading ------------------------------------------------------------------------------

    def read_header(self, raw: bytes | memoryview, key: bytes) -> Header:
        """The header at the start of `raw`, if it is whole and belongs to this identity and `key`.

        Raises:
            DamagedError: no header of any version that could be trusted.
            ForeignError: a good header of something else; the message says what.
        """
        whole = check_header(raw)
        fields = _FIXED.unpack_from(whole)
        length, payload, identity, group, key_bytes, flags, stored = fields[2:9]
        witnesses, stored_key = fields[11], stored[:key_bytes]
        if identity != self._digest:
            raise ForeignError(f"chunk of identity {identity.hex()}, not {self._digest.hex()}")
        if (group, flags & _OPAQUE) != (self._group_index, self._flags) or (stored_key != key):
            raise ForeignError(
                f"chunk of group {group} with key {stored_key.hex()}, not of group "
                f"{self._group_index} with key {key.hex()}"
            )
        tables = _FIXED.size + len(self._layers)
        if payload != self.payload_bytes or whole[_FIXED.size : tables] != self._layers:
            raise DamagedError("the layer table is not the one that the identity implies")
        if length != self.header_bytes_with(witnesses):
            raise DamagedError(f"a header of {length} bytes does not fit its tables")
        at_witnesses = tables + len(self.pages) * DIGEST_BYTES
        digests = tuple(
            whole[at : at + DIGEST_BYTES] for at in range(tables, at_witnesses, DIGEST_BYTES)
        )
        found = tuple(
            Witness(*_WITNESS.unpack_from(whole, at_witnesses + index * _WITNESS.size))
            for index in range(witnesses)
        )
        return Header(key, digests, found)

    def verify(self, header: Header, payload: Bytes, layers: frozenset[str] | None = None) -> None:
        """Compare every canonical page of `payload` (of `layers` only, if given) with its digest.

        Raises:
            DamagedError: names the first page that differs.
        """
        if payload.nbytes != self.payload_bytes:
            raise DamagedError(f"{payload.nbytes} of {self.payload_bytes} payload bytes")
        data = payload.data
        for page, digest in zip(self.pages, header.digests, strict=True):
            if layers is not None and page.layer not in layers:
                continue
            if xxhash.xxh3_128_digest(data[page.offset : page.offset + page.nbytes]) != digest:
                raise DamagedError(
                    f"layer {page.layer!r}: page {page.index} of chunk {header.key.hex()} does not "
                    "match its digest"
                )


def _check_group(identity: Identity, group: str) -> None:
    groups = identity.layers.groups
    if group not in groups:
        raise FormatError(f"group {group!r}: the layer table has {list(groups)}")


def check_header(raw: bytes | memoryview) -> bytes:
    """The header at the start of `raw`, trusted as bytes but not yet as anybody's.

    Raises:
        DamagedError: not a header, or its checksum is wrong.
        ForeignError: a header of another format version.
    """
    if len(raw) < _FIXED.size or bytes(raw[:8]) != MAGIC:
        raise DamagedError("that is not a stored chunk")
    fields = _FIXED.unpack_from(raw)
    version, length, key_bytes, flags = fields[1], fields[2], fields[6], fields[7]
    layers, pages, witnesses, reserved = fields[9:13]
    if version != FORMAT_VERSION:
        # Nothing else is known about another version, its checksum included.
        raise ForeignError(f"format version {version}; this reader knows {FORMAT_VERSION}")
    tables = layers * _LAYER.size + pages * DIGEST_BYTES + witnesses * _WITNESS.size
    if length > MOST_HEADER_BYTES or length != _round_up(_FIXED.size + tables):
        raise DamagedError(f"a header of {length} bytes does not fit its tables")
    if len(raw) < length:
        raise DamagedError(f"{len(raw)} of {length} header bytes")
    whole = bytearray(raw[:length])
    whole[_CHECKSUM_AT : _FIXED.size] = bytes(DIGEST_BYTES)
    if xxhash.xxh3_128_digest(bytes(whole)) != fields[13]:
        raise DamagedError("the header does not match its checksum")
    unused = fields[8][key_bytes:] + raw[_FIXED.size + tables : length]
    told = _WITNESSED if witnesses else 0
    if flags & ~_OPAQUE != told or reserved or not 1 <= key_bytes <= 64 or any(unused):
        raise DamagedError("the header breaks a rule of the format under a good checksum")
    return bytes(raw[:length])


@dataclass(frozen=True)
class Described:
    """What any valid header says, without the identity at hand: for checks and listings."""

    identity: bytes
    group: int
    opaque: bool
    key: bytes
    header_bytes: int
    payload_bytes: int
    pages: tuple[tuple[int, int, bytes], ...]

    @property
    def folder(self) -> str:
        """Name of the group's folder below the identity."""
        return f"{self.group}{'p' if self.opaque else ''}"


def describe_header(raw: bytes | memoryview) -> Described:
    """Everything in the header at the start of `raw`; pages as ``(offset, bytes, digest)``.

    Raises:
        DamagedError, ForeignError: as `check_header`; also if the tables contradict themselves.
    """
    whole = check_header(raw)
    fields = _FIXED.unpack_from(whole)
    length, payload, identity, group, key_bytes, flags, key, num_layers, num_pages = fields[2:11]
    at_digest = _FIXED.size + num_layers * _LAYER.size
    cursor = 0
    pages: list[tuple[int, int, bytes]] = []
    for layer in range(num_layers):
        offset, size, count, reserved = _LAYER.unpack_from(whole, _FIXED.size + layer * _LAYER.size)
        if offset != cursor or not count or size % count or reserved:
            raise DamagedError(f"layer {layer} of the chunk has an impossible place")
        for index in range(min(count, num_pages - len(pages))):
            digest = whole[at_digest : at_digest + DIGEST_BYTES]
            pages.append((offset + index * (size // count), size // count, digest))
            at_digest += DIGEST_BYTES
        cursor += size
    if cursor != payload or len(pages) != num_pages:
        raise DamagedError("the layers of the chunk do not add up to its payload")
    opaque = bool(flags & _OPAQUE)
    return Described(identity, group, opaque, key[:key_bytes], length, payload, tuple(pages))


def header_length(raw: bytes | memoryview) -> int:
    """Length that the header starting at `raw` claims, bounded; for readers that stream.

    Raises:
        DamagedError: not a header, or absurdly long.
    """
    if len(raw) < _FIXED.size or bytes(raw[:8]) != MAGIC:
        raise DamagedError("that is not a stored chunk")
    length = int(_FIXED.unpack_from(raw)[2])
    if not ALIGNMENT <= length <= MOST_HEADER_BYTES or length % ALIGNMENT:
        raise DamagedError(f"a header of {length} bytes")
    return length


def iterate_formats(identity: Identity) -> Iterator[ChunkFormat]:
    """The formats of every group of `identity` that has described layers."""
    for group in identity.layers.groups:
        if identity.chunks[group].payload_bytes:
            yield ChunkFormat(identity, group)


def _round_up(value: int) -> int:
    return -(-value // ALIGNMENT) * ALIGNMENT
