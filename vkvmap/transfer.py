"""Jobs: transfers that run on an engine's threads while the caller goes on.

`Engine` owns the threads and the three lanes (``"store"``, ``"load"``, ``"expedited"``); all its
work is native (csrc/engine.h has the contract), this file adds names, defaults and callbacks.

What must stay true:

1. `Engine.submit` never waits for a transfer; ids and arrays may be reused as soon as it returns;
2. jobs that touch one canonical page or one cache block run in the order of their submission when
   one of them writes it; all others overlap freely;
3. nothing runs on the caller's thread unasked: callbacks run on a thread of the engine's own;
4. an engine belongs to the process that made it. After ``fork`` it refuses to be used, and
   `default_engine` makes the child its own.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from vkvmap import _C
from vkvmap.errors import SpecError, TransferError
from vkvmap.native import stream_handle, translated, translating

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

logger = logging.getLogger(__name__)

LANES = ("store", "load", "expedited")
DIRECTIONS = ("store", "load")
MOST_THREADS = 1024


class Job:
    """One submitted transfer. Equal jobs are the same transfer."""

    __slots__ = ("_engine", "_native")

    def __init__(self, native: _C.Job, engine: Engine) -> None:
        self._native = native
        self._engine = engine

    @property
    def id(self) -> int:
        """Ascends with submission within an engine."""
        return self._native.id

    @property
    def tag(self) -> int:
        """What the submitter gave it."""
        return self._native.tag

    @property
    def lane(self) -> str:
        return self._native.lane

    @property
    def direction(self) -> str:
        return DIRECTIONS[self._native.direction]

    @property
    def mover(self) -> str:
        """What carries the bytes: ``"host"``, ``"kernel"`` or ``"copy_engine"``."""
        return self._native.mover

    def done(self) -> bool:
        """Whether it has ended, in whatever way. Never blocks."""
        return self._native.done()

    query = done

    @translating
    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to `timeout` seconds (None: without limit); True once the job has ended.

        Ended is not succeeded: `check` waits and raises where pages failed, `result` says which.

        Raises:
            TransferError: the job belongs to the parent process, which alone can wait for it.
        """
        return self._native.wait(timeout)

    @translating
    def result(self) -> dict[str, Any]:
        """What became of a job that is done.

        Returns:
            ``bytes``, ``fragments``, ``pages`` (layer pages moved), ``mover``, ``queue_s`` and
            ``copy_s`` (seconds), ``cancelled``, ``error`` (None, or a sentence), ``failed_pages``
            and ``failed``: the first of them as (layer, block, page, reason).

        Raises:
            TransferError: it is not done yet.
        """
        return self._native.result()

    def check(self, timeout: float | None = None) -> dict[str, Any]:
        """Wait for the job and return its `result`.

        Raises:
            TransferError: pages failed, the job was cancelled, or the time ran out.
        """
        if not self.wait(timeout):
            raise TransferError(f"{self!r} is not done after {timeout} s; wait longer")
        result = self._native.result()
        if result["error"] is not None:
            raise TransferError(f"{self!r}: {result['error']}")
        return result

    def cancel(self) -> bool:
        """Drop the job if it has not begun. False if it has; it then runs to its end.

        A cancelled job that waits for an earlier one is done only when that one is.
        """
        return self._native.cancel()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Job) and self._native is other._native

    def __hash__(self) -> int:
        return hash(self._native)

    def __repr__(self) -> str:
        return f"<{self.lane} job {self.id}>"


class Engine:
    """Runs transfers. Make one per process and keep it; `default_engine` is the usual one.

    Args:
        threads: copying threads of the host mover, started at the first transfer. Default:
            ``VKVMAP_THREADS``, or else half of the cores that this process may use, 1 to 4.

    Raises:
        SpecError: a number of threads that no engine can have.
    """

    def __init__(self, threads: int | None = None) -> None:
        self._native = _C.Engine(
            _default_threads() if threads is None else _threads(threads, "threads")
        )
        self._callbacks = _Callbacks(self._native)
        self._range = _nvtx_ranges()
        self.choose_mover: Callable[[_C.Plan, int], str] = _host
        """Names the mover of a transfer that leaves it to ``"auto"``."""

    @property
    def threads(self) -> int:
        return self._native.threads

    @property
    @translating
    def in_flight(self) -> int:
        """Jobs that have not ended."""
        return self._native.in_flight

    def submit(
        self,
        plan: _C.Plan,
        direction: int,
        groups: Sequence[tuple[int, NDArray[np.int64], NDArray[np.int64]]],
        *,
        stream: Any = None,
        layers: tuple[int, int] | None = None,
        expedited: bool = False,
        progress: NDArray[np.uint32] | int | None = None,
        progress_value: int = 1,
        mover: str = "auto",
        tag: int = 0,
        report: bool = True,
        keep: object = None,
        callback: Callable[[Job], object] | None = None,
    ) -> Job:
        """Queue one transfer.

        Args:
            plan: what to move; see `vkvmap.plan.TransferPlan`.
            direction: 0 store, 1 load.
            groups: per layer group (index, block ids, canonical page ids): contiguous
                one-dimensional int64 arrays of equal length, copied before this returns.
            stream: CUDA stream (handle, or object with ``cuda_stream``) whose queued work the
                transfer has to wait for.
            layers: layer ids [first, end) to move; None: all.
            expedited: a load that goes ahead of everything else.
            progress: uint32 array by layer id (or its address); a layer's word becomes
                `progress_value` once its last byte is in place.
            mover: ``"auto"``, ``"host"``, ``"kernel"`` or ``"copy_engine"``.
            tag: any number of the caller's.
            report: list the job in `finished`.
            keep: an object to hold on to until the last byte has moved.
            callback: called with the job when it has ended, on the engine's callback thread.

        Raises:
            PlanError: an id, length, group, mover or stream that cannot be; nothing has moved.
            TypeError: not an int64 array.
            TransferError: the engine has been shut down, or belongs to the parent process.
        """
        chosen = self.choose_mover(plan, direction) if mover == "auto" else mover
        arguments = (plan, direction, groups if isinstance(groups, list) else list(groups))
        options: dict[str, Any] = {
            "expedited": expedited,
            "layers": layers,
            "progress": progress,
            "progress_value": progress_value,
            "tag": tag,
            "mover": chosen,
            "stream": stream_handle(stream),
            "report": report,
            "notify": callback is not None,
            "keep": keep,
        }
        try:
            with self._range(DIRECTIONS[direction]):
                if callback is None:
                    return Job(self._native.submit(*arguments, **options), self)
                with self._callbacks.adding(callback) as add:
                    job = Job(self._native.submit(*arguments, **options), self)
                    add(job)
                return job
        except (ValueError, RuntimeError) as error:
            raise translated(error) from None

    @translating
    def finished(self, lane: str) -> list[Job]:
        """Jobs of a lane that have ended since the last call, in the order of their submission.

        A job is held back while an earlier one of its lane is unfinished. Never blocks.

        Raises:
            PlanError: there is no such lane.
        """
        return [Job(native, self) for native in self._native.finished(lane)]

    @translating
    def drain(self, plan: _C.Plan, timeout: float | None = None) -> bool:
        """Wait until no job of `plan` is queued or running; False if time ran out."""
        return self._native.drain(plan, timeout)

    @translating
    def cancel_pending(self) -> int:
        """Cancel every job that has not begun; returns how many."""
        return self._native.cancel_pending()

    @translating
    def shutdown(self, *, drain: bool = True, timeout: float | None = None) -> bool:
        """Refuse new transfers and end the queued ones: carried out, or else cancelled.

        Returns False if they had not ended within `timeout` seconds; call again to go on. Without
        `drain`, jobs that run stop at their next slice.
        """
        ended = self._native.shutdown(drain, timeout)
        if ended:
            self._callbacks.close()
        return ended

    @translating
    def stall(self, lanes: Iterable[str] = LANES) -> None:
        """Hold lanes back, for tests of what happens meanwhile."""
        self._native.stall(list(lanes))

    @translating
    def resume(self) -> None:
        """Let all lanes go on."""
        self._native.resume()

    @translating
    def inject_fault(self, direction: int, layer_id: int, page: int, why: str) -> None:
        """Make every transfer of one page fail, for tests of what the others do."""
        self._native.inject_fault(direction, layer_id, page, why)

    @translating
    def clear_faults(self) -> None:
        self._native.clear_faults()

    @translating
    def metrics(self) -> dict[str, Any]:
        """Counters so far.

        Returns:
            ``in_flight``, ``threads``, ``reports_dropped``, and ``transfers``: (direction, mover)
            -> ``submitted``, ``finished``, ``failed``, ``cancelled`` (jobs), ``bytes``,
            ``pages``, ``fragments``, ``failed_pages``, and ``queue`` and ``copy``: ``sum_s`` and
            ``counts``, where entry i counts times below 2**i microseconds, the last one the rest.
        """
        return {
            "in_flight": self._native.in_flight,
            "threads": self._native.threads,
            "reports_dropped": self._native.reports_dropped(),
            "transfers": self._native.counters(),
        }

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()


class _Callbacks:
    """The thread that calls back, started for the first job that asks for it."""

    _running: ClassVar[weakref.WeakSet[_Callbacks]] = weakref.WeakSet()

    def __init__(self, native: _C.Engine) -> None:
        self._native = native
        self._lock = threading.Lock()
        self._waiting: dict[int, tuple[Job, Callable[[Job], object]]] = {}
        self._early: set[int] = set()
        self._thread: threading.Thread | None = None
        self._closed = False

    @contextmanager
    def adding(self, callback: Callable[[Job], object]) -> Iterator[Callable[[Job], None]]:
        """Submit within; the thread does not look for ended jobs until the new one is listed."""

        def add(job: Job) -> None:
            self._waiting[job.id] = (job, callback)

        with self._lock:
            if self._thread is None:  # before anything is submitted: it may not be had
                thread = threading.Thread(target=self._run, name="vkvmap-callbacks", daemon=True)
                thread.start()
                self._thread = thread
                self._running.add(self)
            yield add

    def close(self) -> None:
        """Call back for everything that has ended, then end the thread."""
        self._closed = True
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while True:
            closed = self._closed
            for native in self._native.wait_notified(0.0 if closed else 0.2):
                self._early.add(native.id)
            with self._lock:
                ready = [self._waiting.pop(id) for id in sorted(self._early & set(self._waiting))]
            for job, callback in ready:
                self._early.discard(job.id)
                try:
                    callback(job)
                except BaseException:  # one callback's exit must not be the end of the others
                    logger.exception("the callback of %r raised", job)
            if closed and not ready:
                return


@atexit.register
def _end_callbacks() -> None:
    # A thread that comes out of native code while the interpreter ends takes the process with it.
    for callbacks in list(_Callbacks._running):
        if not callbacks._native.shutdown(True, 10.0):
            callbacks._native.shutdown(False, None)
        callbacks.close()


_default: Engine | None = None
_default_pid = 0
_default_lock = threading.Lock()


def default_engine() -> Engine:
    """The engine of this process, made at the first call; a forked child gets its own."""
    global _default, _default_pid
    if _default is not None and _default_pid == os.getpid():
        return _default
    with _default_lock:
        if _default is None or _default_pid != os.getpid():
            _default, _default_pid = Engine(), os.getpid()
        return _default


def _forget_lock() -> None:
    # The child's copy may be held by a thread that the child does not have.
    global _default_lock
    _default_lock = threading.Lock()
    _Callbacks._running.clear()


os.register_at_fork(after_in_child=_forget_lock)


def _default_threads() -> int:
    told = os.environ.get("VKVMAP_THREADS")
    if told is not None:
        return _threads(int(told) if told.isdecimal() else told, "VKVMAP_THREADS")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(4, (cores or 1) // 2))


def _threads(number: Any, what: str) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= MOST_THREADS:
        raise SpecError(
            f"{what}={number!r:.40} is no number of copying threads; give 1 to {MOST_THREADS}"
        )
    return number


def _host(plan: _C.Plan, direction: int) -> str:
    return "host"


def _nvtx_ranges() -> Callable[[str], AbstractContextManager[Any]]:
    """Ranges named ``vkvmap.store`` and ``vkvmap.load`` where the nvtx package is installed."""
    if importlib.util.find_spec("nvtx") is None:
        nothing = nullcontext()
        return lambda direction: nothing
    nvtx: Any = importlib.import_module("nvtx")

    return lambda direction: nvtx.annotate(f"vkvmap.{direction}", domain="vkvmap")
