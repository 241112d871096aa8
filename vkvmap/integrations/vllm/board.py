"""The board: what a worker tells the scheduler, in shared memory.

The scheduler's half of a spec knows neither tensors nor head counts, so it cannot work out rows or
names by itself; workers are set up first, and each posts a card with what it decided. The board
also carries what happens later: counters, and which jobs failed.

One board per worker, with one process writing every word. Its name goes as soon as the scheduler
has joined, so nothing is left behind however the processes die.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from vkvmap.errors import RegionError
from vkvmap.integrations.vllm.options import EngineError
from vkvmap.region import Region, Section

_CARD_BYTES = 1 << 18
_FAILED_SLOTS = 256

#: Counters, in the order of their words.
COUNTERS = (
    "store_bytes",
    "load_bytes",
    "store_pages",
    "load_pages",
    "store_failures",
    "load_failures",
    "retries",
    "digest_mismatches",
)


def _path(engine_id: str, rank: int) -> str:
    return f"/dev/shm/vkvmap_{engine_id}_{rank}.board"


class WorkerBoard:
    """A worker's side. Closing it is safe at any time, and again."""

    def __init__(self, engine_id: str, rank: int, card: Mapping[str, Any]) -> None:
        text = json.dumps(card).encode()
        if len(text) > _CARD_BYTES - 8:
            raise EngineError(f"a start-up card of {len(text)} bytes; {_CARD_BYTES - 8} fit")
        path = _path(engine_id, rank)
        Region.sweep(path)
        self._region = Region.create(
            [
                Section("card", 1, _CARD_BYTES),
                Section("counters", 1, 8 * len(COUNTERS)),
                Section("failed", 1, 8 * (1 + _FAILED_SLOTS)),
            ],
            backing="file",
            path=path,
            joiners=1,
        )
        row = self._region.row("card", 0)
        row[8 : 8 + len(text)] = np.frombuffer(text, np.uint8)
        self._counters = self._region.row("counters", 0).view(np.int64)
        self._failed = self._region.row("failed", 0).view(np.int64)
        row[:8].view(np.int64)[0] = len(text)  # last: a length says that the card is whole

    def add(self, counter: str, amount: int) -> None:
        """Count."""
        self._counters[COUNTERS.index(counter)] += amount

    def failed(self, job_id: int) -> None:
        """Post a job that failed, before the job itself is reported as ended."""
        count = int(self._failed[0])
        self._failed[1 + count % _FAILED_SLOTS] = job_id
        self._failed[0] = count + 1

    def close(self) -> None:
        self._region.close(force=True)


class SchedulerBoard:
    """The scheduler's side: all workers' boards.

    Args:
        engine_id: the engine's own name for itself.
        world_size: number of workers.
        timeout: seconds to wait for them.

    Raises:
        EngineError: a worker has not posted its card, or workers disagree.
    """

    def __init__(self, engine_id: str, world_size: int, timeout: float = 60.0) -> None:
        deadline = time.monotonic() + timeout
        self._regions: list[Region] = []
        self._seen = [0] * world_size
        with ExitStack() as undo:
            undo.callback(self.close)
            cards = [
                self._join(engine_id, rank, world_size, deadline) for rank in range(world_size)
            ]
            _check_agreement(cards)
            undo.pop_all()
        self.card: Mapping[str, Any] = cards[0]

    def totals(self) -> dict[str, int]:
        """Counters, summed over workers."""
        words = sum(region.row("counters", 0).view(np.int64) for region in self._regions)
        return dict(zip(COUNTERS, np.atleast_1d(words).tolist(), strict=True))

    def new_failures(self) -> Sequence[int]:
        """Job ids posted as failed since the last call."""
        jobs: list[int] = []
        for index, region in enumerate(self._regions):
            words = region.row("failed", 0).view(np.int64)
            count = int(words[0])
            first = max(self._seen[index], count - _FAILED_SLOTS)
            jobs.extend(int(words[1 + i % _FAILED_SLOTS]) for i in range(first, count))
            self._seen[index] = count
        return jobs

    def close(self) -> None:
        """Leave all boards, also where one of them cannot be left."""
        with ExitStack() as steps:
            for region in self._regions:
                steps.callback(region.close, force=True)

    def _join(self, engine_id: str, rank: int, world_size: int, deadline: float) -> dict[str, Any]:
        left = max(0.0, deadline - time.monotonic())
        try:
            region = Region.attach(_path(engine_id, rank), timeout=left)
        except RegionError as error:
            raise EngineError(
                f"worker {rank} of {world_size} has not said what it set up: {error}. Look for an "
                "earlier error in its log"
            ) from error
        self._regions.append(region)
        return _read_card(region, rank, deadline)


def _check_agreement(cards: Sequence[Mapping[str, Any]]) -> None:
    for rank, card in enumerate(cards):
        for key in sorted(cards[0].keys() - {"rank"}):
            if card.get(key) != cards[0][key]:
                raise EngineError(
                    f"workers disagree: {key} is {cards[0][key]!r} on worker 0 and "
                    f"{card.get(key)!r} on worker {rank}; start all of them with the same "
                    "model, options and vkvmap"
                )


def _read_card(region: Region, rank: int, deadline: float) -> dict[str, Any]:
    row = region.row("card", 0)
    while True:
        length = int(row[:8].view(np.int64)[0])
        if length:
            card: dict[str, Any] = json.loads(row[8 : 8 + length].tobytes())
            return card
        if time.monotonic() > deadline:
            raise EngineError(f"worker {rank} has begun its start-up card and not finished it")
        time.sleep(0.001)
