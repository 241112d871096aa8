"""Work for the store's own threads: bounded, so that a slow disk slows its callers, not the memory.

Contract: a submitted task runs exactly once or is cancelled at shutdown, and either way reports; no
callback ever runs on the submitter's thread; `try_submit` never blocks, it says that it is busy.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

Task = Callable[[bool], None]

_log = logging.getLogger("vkvmap.store")


class IoThreads:
    """A fixed number of threads that run tasks in order of submission.

    A task is called with True, or with False if it is cancelled.
    """

    def __init__(self, threads: int, depth: int) -> None:
        """At most `depth` tasks wait or run at a time; threads start with the first task."""
        self._count = threads
        self._depth = max(depth, threads)
        self._tasks: deque[Task] = deque()
        self._outstanding = 0
        self._closed = False
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []

    @property
    def outstanding(self) -> int:
        """Tasks that wait or run."""
        return self._outstanding

    def submit(self, tasks: Sequence[Task]) -> bool:
        """Hand over `tasks`, waiting while the queue is full; True. RuntimeError after `close`."""
        for task in tasks:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._outstanding < self._depth)
                self._add([task])
        return True

    def try_submit(self, tasks: Sequence[Task]) -> bool:
        """Hand over all of `tasks`, or none and return False where they do not fit now.

        More tasks than the queue is deep are taken when it is empty.
        """
        with self._changed:
            if self._outstanding and self._outstanding + len(tasks) > self._depth:
                return False
            self._add(tasks)
            return True

    def _add(self, tasks: Sequence[Task]) -> None:
        if self._closed:
            raise RuntimeError("the store is closed")
        while len(self._threads) < self._count:
            name = f"vkvmap-store-{len(self._threads)}"
            thread = threading.Thread(target=self._run, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the process has all the threads it may have
                if not self._threads:
                    raise
                break  # fewer will do; the next task tries again
            self._threads.append(thread)
        self._tasks.extend(tasks)
        self._outstanding += len(tasks)
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._tasks or self._closed)
                if not self._tasks:
                    return
                task = self._tasks.popleft()
            self._call(task, True)

    def _call(self, task: Task, run: bool) -> None:
        try:
            task(run)
        except Exception:
            _log.exception("a store task failed outside its own error handling")
        finally:
            with self._changed:
                self._outstanding -= 1
                self._changed.notify_all()

    def close(self, *, drain: bool = True) -> None:
        """Stop: run what waits (`drain`) or cancel it; returns when all threads have ended."""
        with self._changed:
            self._closed = True
            cancelled = [] if drain else list(self._tasks)
            if not drain:
                self._tasks.clear()
            self._changed.notify_all()
        for task in cancelled:
            self._call(task, False)
        for thread in self._threads:
            thread.join()
