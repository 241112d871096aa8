"""What a caller holds while chunks are on their way: an outcome per chunk, never an exception.

A chunk that cannot be stored or loaded is that chunk's outcome, with a reason; the others go on.
"""

from __future__ import annotations

import threading
from typing import Literal

import numpy as np
import numpy.typing as npt

from vkvmap.format import Witness

#: What became of one chunk. Good: ``stored``, ``present`` (was there already), ``hit``. A miss with
#: its reason: ``miss``, ``damaged`` (quarantined), ``failed`` (an I/O error; the file stays).
#: Not stored: ``full``, ``incomplete`` (the ledger says so), ``failed``, ``cancelled``.
Outcome = Literal[
    "pending",
    "stored",
    "present",
    "hit",
    "miss",
    "damaged",
    "failed",
    "full",
    "incomplete",
    "cancelled",
]
GOOD = frozenset({"stored", "present", "hit"})


class StoreJob:
    """Chunks on their way to or from the store.

    Attributes:
        outcomes: per key, in the order of the keys; ``"pending"`` until it is known.
        witnesses: index of a key -> end-to-end digests that were stored with its chunk, if any.
        reasons: index of a key -> why it is neither good nor a plain miss.
    """

    def __init__(self, count: int) -> None:
        self.outcomes: list[Outcome] = ["pending"] * count
        self.reasons: dict[int, str] = {}
        self.witnesses: dict[int, tuple[Witness, ...]] = {}
        self._left = count
        self._done = threading.Event()
        self._lock = threading.Lock()
        if not count:
            self._done.set()

    def done(self) -> bool:
        """Whether every chunk has its outcome; never blocks."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is done; whether it is, after at most `timeout` seconds."""
        return self._done.wait(timeout)

    @property
    def good(self) -> npt.NDArray[np.bool_]:
        """Per key, whether its chunk is where it was wanted; bool ``(len(keys),)``."""
        return np.array([outcome in GOOD for outcome in self.outcomes], np.bool_)

    def settle(
        self,
        index: int,
        outcome: Outcome,
        reason: str | None = None,
        witnesses: tuple[Witness, ...] = (),
    ) -> None:
        """Note the outcome of one chunk; the store's own threads call this."""
        with self._lock:
            self.outcomes[index] = outcome
            if reason is not None:
                self.reasons[index] = reason
            if witnesses:
                self.witnesses[index] = witnesses
            self._left -= 1
            if not self._left:
                self._done.set()
