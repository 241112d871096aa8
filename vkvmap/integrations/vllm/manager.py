"""The engine's manager, with what only the workers know: failures and counters.

Everything is passed on; a key whose transfer failed is not offered again, so that a damaged chunk
is recomputed and not loaded in a loop.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from vkvmap.integrations.vllm import versions
from vkvmap.integrations.vllm.board import SchedulerBoard
from vkvmap.integrations.vllm.metrics import Emitter


class Manager:
    """Wraps the engine's manager `inner`."""

    def __init__(self, inner: Any, board: SchedulerBoard) -> None:
        self._inner = inner
        self._board = board
        self._emitter = Emitter(board.card)
        self._damaged: set[Any] = set()
        self._lost: set[Any] = set()
        self._miss = versions.miss()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def failed_jobs(self) -> Iterable[int]:
        """Jobs that workers have posted as failed since the last call."""
        return self._board.new_failures()

    def mark_failed(self, keys: Collection[Any], *, stored: bool) -> None:
        """Note that a store of `keys` failed, or that a load showed them to be damaged."""
        (self._lost if stored else self._damaged).update(keys)

    def lookup(self, key: Any, *args: Any, **kwargs: Any) -> Any:
        """A miss for damaged keys, else the engine's answer."""
        if key in self._damaged:
            return self._miss
        return self._inner.lookup(key, *args, **kwargs)

    def complete_store(self, keys: Collection[Any], *args: Any, **kwargs: Any) -> Any:
        """Take over stored chunks; the rows of those that failed are given back."""
        lost = self._lost.intersection(keys)
        kept = [key for key in keys if key not in lost]
        if lost:
            self._lost -= lost
            self._inner.complete_store(list(lost), *args, **(kwargs | {"success": False}))
        if kept or not lost:
            self._damaged.difference_update(kept)
            self._inner.complete_store(kept, *args, **kwargs)

    def reset_cache(self) -> Any:
        """Forget everything, damage included."""
        self._damaged.clear()
        self._lost.clear()
        return self._inner.reset_cache()

    def get_stats(self) -> Any:
        """The engine's statistics and ours."""
        ours = self._emitter.stats(self._board.totals())
        theirs = self._inner.get_stats()
        if ours is None or theirs is None:
            return theirs if ours is None else ours
        theirs.aggregate(ours)
        return theirs

    def shutdown(self) -> Any:
        """End the tiers, then leave the boards."""
        try:
            return self._inner.shutdown()
        finally:
            self._board.close()
