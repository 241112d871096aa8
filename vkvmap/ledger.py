"""When a chunk is readable: once every writer of every layer has said so, and not a moment before.

A ledger is a section of the region with one row per chunk row. A row is a *generation*, which its
allocator raises whenever the chunk row gets new content, and two words per writer: the generation
that it has entered and the one that it has finished. What must stay true:

 1. every word has one process that writes it, so no update can be lost and none needs a lock; the
    allocator of chunk rows is one process;
 2. a chunk is readable iff all its writers have finished its present generation. A writer that died
    never does; what it left is neither readable nor mistaken for a later chunk;
 3. nobody writes into a row that has been given away: a writer enters a generation before its first
    byte and looks again; the allocator raises the generation and looks for writers still inside.
    Whoever comes second sees the other one.

Words are 8 bytes and aligned, so they are stored whole; `_fence` orders them against the bytes that
they speak for.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vkvmap.errors import RegionError
from vkvmap.region import Region, Section

Words = npt.NDArray[np.uint64]


class Ledger:
    """The completion ledger of `region`: section `name`, made by `Ledger.section`."""

    def __init__(self, region: Region, name: str = "ledger") -> None:
        view = region.section(name)
        words = region.rows(name).view(np.uint64)
        self.num_rows = view.num_rows
        self.num_writers = (words.shape[1] - 1) // 2
        self._generation: Words = words[:, 0]
        self._entered: Words = words[:, 1 : 1 + self.num_writers]
        self._finished: Words = words[:, 1 + self.num_writers :]
        self._barrier = threading.Lock()

    @staticmethod
    def section(num_rows: int, num_writers: int, name: str = "ledger") -> Section:
        """The section to create a region with: `num_rows` chunk rows, `num_writers` processes.

        Writers are numbered by whoever starts them; ranks of all pipeline stages of the node count.
        """
        return Section(name, num_rows, 8 * (1 + 2 * num_writers))

    # ---- the allocator ------------------------------------------------------------------------

    def begin(self, rows: Iterable[int], *, dead: Collection[int] = ()) -> Words:
        """Give `rows` new content: nothing in them is readable until every writer has finished.

        Args:
            rows: chunk rows.
            dead: writers known to have exited, which cannot be inside any more.

        Returns:
            The new generation of each row, uint64 ``(len(rows),)``; writers are told with the work.

        Raises:
            RegionError: a living writer is still inside one of the rows. The rows stay unreadable;
                try again once it has finished, or name it in `dead`.
        """
        index = np.fromiter(rows, np.intp)
        self._generation[index] += np.uint64(1)
        self._fence()
        inside = self._entered[index] > self._finished[index]
        inside[:, list(dead)] = False
        if inside.any():
            row, writer = (int(place[0]) for place in np.nonzero(inside))
            raise RegionError(
                f"row {int(index[row])}: writer {writer} is still writing it; wait for that "
                "transfer, or name the writer in dead= if its process has exited"
            )
        return np.array(self._generation[index])

    # ---- writers ------------------------------------------------------------------------------

    def enter(self, rows: Iterable[int], generations: Words, writer: int) -> npt.NDArray[np.bool_]:
        """Announce that `writer` is about to store into `rows`, before the first byte.

        Returns:
            Per row, whether it may: False where the row has been given new content since.
        """
        index = np.fromiter(rows, np.intp)
        before = self._entered[index, writer]
        self._entered[index, writer] = np.maximum(before, generations)
        self._fence()
        allowed = np.asarray(self._generation[index] == generations)
        # Who is turned away stands where it stood: it may be inside a later generation.
        self._entered[index[~allowed], writer] = before[~allowed]
        return allowed

    def finish(self, rows: Iterable[int], generations: Words, writer: int) -> None:
        """Announce that `writer` has stored all that it was elected for in `rows`, in every layer.

        A report for a generation that has passed changes nothing that is readable.
        """
        index = np.fromiter(rows, np.intp)
        self._fence()
        self._finished[index, writer] = np.maximum(self._finished[index, writer], generations)

    # ---- readers ------------------------------------------------------------------------------

    def generation(self, row: int) -> int:
        """The present generation of `row`. A reader that copies looks before and after."""
        self._fence()
        return int(self._generation[row])

    def complete(self, rows: Iterable[int]) -> npt.NDArray[np.bool_]:
        """Per row, whether its present generation is readable; bool ``(len(rows),)``."""
        index = np.fromiter(rows, np.intp)
        generation = self._generation[index]
        done = (self._finished[index] == generation[:, None]).all(axis=1) & (generation != 0)
        self._fence()
        return np.asarray(done & (generation == self._generation[index]))

    def waiting_for(self, row: int) -> tuple[int, ...]:
        """The writers that have not finished the present generation of `row`."""
        behind = self._finished[row] != self._generation[row]
        return tuple(int(writer) for writer in np.flatnonzero(behind))

    def _fence(self) -> None:
        # Taking and dropping a lock is the one full barrier that Python offers.
        with self._barrier:
            pass


class Electing(Protocol):
    """The part of a `CanonicalPageMapping` that a share needs."""

    def is_writer(self, block_id: int) -> bool:
        """Whether this rank stores canonical page `block_id`."""


class WriterShare:
    """What one writer still owes to each chunk; finishes it in the ledger when nothing is left.

    Kept in the writer's own memory on purpose: it dies with it.
    """

    def __init__(
        self,
        ledger: Ledger,
        writer: int,
        mappings: Mapping[str, Electing],
        pages_per_chunk: int,
    ) -> None:
        """`mappings` are those of the layers that this writer holds, by name."""
        self._ledger = ledger
        self._writer = writer
        self._mappings = mappings
        self._pages = pages_per_chunk
        self._owed: dict[int, tuple[int, set[tuple[str, int]]]] = {}

    def enter(self, row: int, generation: int) -> bool:
        """Start on `row`; False if it has been given away. Owing nothing finishes it at once."""
        stamp = np.array([generation], np.uint64)
        if not self._ledger.enter([row], stamp, self._writer)[0]:
            return False
        first = row * self._pages
        owed = {
            (name, page)
            for name, mapping in self._mappings.items()
            for page in range(self._pages)
            if mapping.is_writer(first + page)
        }
        self._owed[row] = (generation, owed)
        self._settle(row)
        return True

    def stored(self, row: int, pages: Sequence[int], layers: Iterable[str] | None = None) -> bool:
        """Note that `pages` (0 to pages_per_chunk - 1) of `layers` (default all) are in the region.

        Returns whether this writer's share of the chunk is now whole.
        """
        _, owed = self._owed[row]
        names = self._mappings if layers is None else layers
        owed.difference_update((name, page) for name in names for page in pages)
        return self._settle(row)

    def _settle(self, row: int) -> bool:
        generation, owed = self._owed[row]
        if owed:
            return False
        del self._owed[row]
        self._ledger.finish([row], np.array([generation], np.uint64), self._writer)
        return True
