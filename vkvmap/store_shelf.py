"""Where the chunks of a region section go, whole or in parts, and what a backend is asked to do.

A row is as long as the whole model's chunk, whoever fills it. Where the pipeline stages of one
model run on several nodes, no node has all of a row, so it is stored in *parts*: runs of layers,
each an ordinary chunk of an identity whose layer table is those layers (docs/store.md). A chunk is
there when all its parts are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vkvmap.errors import StoreError
from vkvmap.format import ChunkFormat, Witness
from vkvmap.identity import Identity
from vkvmap.ledger import Ledger
from vkvmap.store_job import GOOD, Outcome

Bytes = npt.NDArray[np.uint8]
SUFFIX = ".chunk"
#: Region row -> the end-to-end digests of the chunk in it.
WitnessOf = Callable[[int], Sequence[Witness]]


@dataclass(frozen=True)
class Shelf:
    """Where the chunks of one region section go.

    Attributes:
        chunk: their format; with parts, the format of a whole row.
        base: what the name of every one of them starts with.
        ledger: when rows of the section are complete, or None where nobody keeps one.
        witness: row -> end-to-end digests to store with it, or None.
        start: first byte of the row that goes here; not 0 for most parts.
        first, count: position in the group of the first layer that goes here, and how many do; of
            parts only.
        parts: the shelves that rows are divided over; none: rows go here whole.
        known: key -> the state of the backend before it was seen to be there; it may have gone if
            that is not the present state any more.
        stuck: keys whose damaged file could not be moved away.
        looked_at: one number, the state of the backend at the last look.
    """

    chunk: ChunkFormat
    base: str
    ledger: Ledger | None = None
    witness: WitnessOf | None = None
    start: int = 0
    first: int = 0
    count: int = 0
    parts: tuple[Shelf, ...] = ()
    known: dict[bytes, int] = field(default_factory=dict)
    stuck: set[bytes] = field(default_factory=set)
    looked_at: list[int] = field(default_factory=lambda: [0])

    @property
    def pieces(self) -> tuple[Shelf, ...]:
        """The shelves that hold the files: the parts, or this one."""
        return self.parts or (self,)

    @property
    def layers(self) -> frozenset[str]:
        """Names of the layers that go here."""
        return frozenset(page.layer for page in self.chunk.pages)

    def path(self, key: bytes) -> str:
        """The name of the chunk `key` (docs/format.md)."""
        name = key.hex()
        return f"{self.base}/{name[:2]}/{name}{SUFFIX}"

    def file_bytes(self, witnesses: int) -> int:
        """How long a chunk file is that carries so many end-to-end digests."""
        return self.chunk.header_bytes_with(witnesses) + self.chunk.padded_payload_bytes

    def of(self, row: Bytes) -> Bytes:
        """The bytes of `row` that go here."""
        return row[self.start : self.start + self.chunk.payload_bytes]

    def clear(self, payload: Bytes, layers: frozenset[str] | None) -> None:
        """Leave nothing of what a load that went wrong has put into its row."""
        for start, stop in self.chunk.ranges(layers):
            payload[start:stop] = 0

    def own(self, witnesses: Sequence[Witness]) -> tuple[Witness, ...]:
        """The end-to-end digests of a row that belong here, with layers counted from here."""
        if not self.count:
            return tuple(witnesses)
        return tuple(
            replace(witness, layer=witness.layer - self.first)
            for witness in witnesses
            if self.first <= witness.layer < self.first + self.count
        )

    def others(self, witnesses: Sequence[Witness]) -> tuple[Witness, ...]:
        """End-to-end digests that were stored here, with layers counted from the row's first."""
        return tuple(replace(witness, layer=witness.layer + self.first) for witness in witnesses)

    # ---- parts --------------------------------------------------------------------------------

    def chosen(self, layers: Collection[str]) -> frozenset[str]:
        """Those of `layers` that go here: a pipeline stage names all of its own, of every group.

        StoreError where the model lacks one.
        """
        model = self.chunk.identity.layers
        unknown = sorted(name for name in set(layers) - self.layers if name not in model)
        if unknown:
            raise StoreError(
                f"the model has no layers {unknown[:3]}, but {len(model)} others; name layers as "
                "its table does"
            )
        return self.layers.intersection(layers)

    def filled_by(self, layers: Collection[str]) -> tuple[Shelf, ...]:
        """The pieces that rows which hold only `layers` fill. StoreError if a piece is cut."""
        held = self.chosen(layers)
        touched = tuple(piece for piece in self.pieces if piece.layers & held)
        for piece in touched:
            missing = sorted(piece.layers - held)
            if missing:
                raise StoreError(
                    f"group {self.chunk.group!r}: rows without layer {missing[0]!r} do not fill "
                    "the part that it is stored in; open the store with parts= that no pipeline "
                    "stage splits"
                )
        if not touched:
            raise StoreError(f"group {self.chunk.group!r}: rows of no layers of it store nothing")
        return touched

    def touched_by(
        self, layers: frozenset[str] | None
    ) -> list[tuple[Shelf, frozenset[str] | None]]:
        """The pieces that have to be read for `layers`, each with what is wanted of it."""
        if layers is None or not self.parts:
            return [(piece, layers) for piece in self.pieces]
        wanted = [(piece, piece.layers & layers) for piece in self.parts]
        read: list[tuple[Shelf, frozenset[str] | None]] = [
            (piece, None if mine == piece.layers else mine) for piece, mine in wanted if mine
        ]
        # Of no layers: whether the chunk is there and its headers are good.
        return read or [(piece, frozenset()) for piece in self.parts]

    def divided(self, root: str, identity: Identity, parts: Sequence[Collection[str]]) -> Shelf:
        """This shelf, if its chunks are canonical chunks of `identity`, with rows in `parts`.

        Raises:
            StoreError: they do not divide the model's layers into runs.
        """
        if self.chunk.identity.name != identity.name:
            return self
        owner = owners(identity, parts)
        pieces: list[Shelf] = []
        start = first = 0
        members = [spec.name for spec in identity.layers.in_group(self.chunk.group)]
        runs = [owner[name] for name in members]
        for part in dict.fromkeys(runs):
            names = [name for name in members if owner[name] == part]
            if members[first : first + len(names)] != names:
                raise StoreError(
                    f"parts: layers {names[0]!r} and {names[-1]!r} of group "
                    f"{self.chunk.group!r} are in one part, what lies between them is not; a part "
                    "is a run of layers"
                )
            mine = identity.part(parts[part])
            if mine.chunks[self.chunk.group].payload_bytes:  # undescribed layers have none
                chunk = ChunkFormat(mine, self.chunk.group)
                base = f"{root}{mine.name}/{chunk.folder}"
                pieces.append(Shelf(chunk, base, start=start, first=first, count=len(names)))
                start += chunk.payload_bytes
            first += len(names)
        return replace(self, parts=tuple(pieces))


def owners(identity: Identity, parts: Sequence[Collection[str]]) -> dict[str, int]:
    """Layer -> the part that it is in. StoreError unless every layer is in exactly one."""
    owner: dict[str, int] = {}
    for index, part in enumerate(parts):
        for name in part:
            if name not in identity.layers:
                raise StoreError(f"parts: the model has no layer {name!r}")
            if name in owner:
                raise StoreError(f"parts: layer {name!r} is in part {owner[name]} and in {index}")
            owner[name] = index
    missing = [name for name in identity.layers if name not in owner]
    if missing:
        raise StoreError(f"parts: layer {missing[0]!r} is in none; they must cover the model")
    return owner


@dataclass(frozen=True)
class Result:
    """What became of one chunk, why, and the bytes that moved."""

    outcome: Outcome
    reason: str | None = None
    written: int = 0
    read: int = 0
    witnesses: tuple[Witness, ...] = ()

    @property
    def good(self) -> bool:
        """Whether the chunk is where it was wanted."""
        return self.outcome in GOOD

    def and_then(self, later: Result) -> Result:
        """The result of both, where this one is good: what is not good decides, then what moved."""
        decides = later if not later.good or later.outcome == "stored" else self
        return Result(
            decides.outcome,
            decides.reason,
            self.written + later.written,
            self.read + later.read,
            self.witnesses + later.witnesses,
        )


#: Of a put that a backend drops because its row is not what it was.
CHANGED = Result("incomplete", "the row got new content while it was written")


class Backend(Protocol):
    """What keeps the bytes. Called by several threads at once; raises nothing on bad chunks."""

    def put(
        self,
        shelf: Shelf,
        key: bytes,
        payload: Bytes,
        unchanged: Callable[[], bool],
        witnesses: Sequence[Witness],
        beside: Sequence[Shelf] = (),
    ) -> Result:
        """Store the chunk; do not let it appear unless `unchanged()` after its bytes were read.

        What it may remove to make room is never the same key's on the shelves `beside`.

        Where bytes are read twice, for digests and for the copy: after the digests were taken, then
        a copy of anything else is damaged; and again after the copy, to take it back.
        """

    def fits(self, pieces: Sequence[tuple[Shelf, int | None]], key: bytes) -> bool:
        """Whether the parts of the chunk that are missing have room beside those that are there.

        Each with the count of its end-to-end digests; None: one that is not going to be stored.
        """

    def whole(self, pieces: Sequence[Shelf], key: bytes) -> bool:
        """Whether all these parts of the chunk are there."""

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
