"""The worker: the engine's jobs as transfers of a plan.

A job names blocks by group and chunks by row; a transfer names (block, canonical page) pairs. All
else is the transfer engine's: election of writers, ordering, threads or streams. What must stay
true:

 1. every job is reported exactly once, also by ranks that were elected for none of it;
 2. a load is reported as done only after its last byte, and its digests if asked for, are right;
 3. a job that failed is repeated, then reported as failed; if nobody can be told, this worker
    stops the engine, because the only alternative is wrong tokens.
"""

from __future__ import annotations

import atexit
import importlib
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from vkvmap.errors import TransferError
from vkvmap.integrations.vllm import versions
from vkvmap.integrations.vllm.board import WorkerBoard
from vkvmap.integrations.vllm.digests import Digests
from vkvmap.integrations.vllm.jobs import JobIds, Pairs
from vkvmap.integrations.vllm.options import EngineError, Options
from vkvmap.integrations.vllm.setup import Setup
from vkvmap.integrations.vllm.startup import logger
from vkvmap.region import Region, Section
from vkvmap.transfer import Engine, Job
from vkvmap.transfer_plan import TransferPlan

_Worker: Any = versions.worker_class()
_Result: Any = versions.result_class()
versions.check_jobs()


@dataclass(slots=True)
class _Pending:
    """A job of the engine under way."""

    job: Job
    pairs: Pairs
    is_load: bool
    started: float
    attempts: int = 0
    #: Set once it has ended: bytes moved, and why it failed (None if it did not).
    outcome: tuple[int, str | None] | None = None


class VkvmapWorker(_Worker):  # type: ignore[misc]  # the engine has no types here
    """Transfers between one rank's cache and the engine's host memory.

    Attributes:
        board: where counters and failures are posted.
        reports_failures: True where our connector tells the engine of failed jobs.
    """

    def __init__(
        self,
        setup: Setup,
        options: Options,
        memory: memoryview,
        num_rows: int,
        release: Any,
    ) -> None:
        self.board: WorkerBoard | None = None
        self.reports_failures = False
        self._release = release
        self._ids = JobIds(setup.groups, setup.blocks_per_chunk)
        self._retries = options.retries
        self._region = setup.rows.region(memory, num_rows)
        self._engine = Engine()
        device = next(iter(setup.caches.values())).device
        with ExitStack() as undo:
            undo.callback(self._region.close, force=True)
            undo.callback(self._engine.shutdown)
            self._stream = _prepare(device, self._engine, self._region)
            self._plan = TransferPlan(
                setup.mappings,
                setup.caches,
                self._region,
                chunk_tokens=dict(setup.rows.tokens),
                mover=options.mover,
                writers=options.writers,
                engine=self._engine,
            )
            undo.callback(self._plan.close)
            self._digests = Digests(setup, self._region.view, num_rows) if options.verify else None
            undo.pop_all()
        self._closed = False
        self._pending: dict[int, _Pending] = {}
        self._failed: dict[int, Pairs] = {}
        self.mover = options.mover if device != "cpu" else "host"
        # Older releases do not shut workers down when the engine ends in their own process.
        atexit.register(self.shutdown)

    @property
    def threads(self) -> int:
        """Copying threads of the host mover."""
        return self._engine.threads

    # ---- the engine's interface -----------------------------------------------------------------

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any, **_: Any) -> bool:
        """Start copying cache blocks to chunks; later releases may pass more by name."""
        pairs = self._ids.pairs(src_spec, dst_spec)
        if self._digests is not None:
            self._digests.write(pairs)
        job = self._plan.store(pairs, stream=self._stream())
        self._pending[job_id] = _Pending(job, pairs, False, time.perf_counter())
        return True

    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False, **_: Any
    ) -> bool:
        """Start copying chunks to cache blocks."""
        pairs = self._ids.pairs(dst_spec, src_spec)
        job = self._plan.load(pairs, stream=self._stream(), expedited=expedited)
        self._pending[job_id] = _Pending(job, pairs, True, time.perf_counter())
        return True

    def get_finished(self) -> list[Any]:
        """Results of the jobs that have ended since the last call. Never blocks."""
        results = []
        for job_id in [id for id, pending in self._pending.items() if pending.job.done()]:
            pending = self._pending[job_id]
            if not self._settled(job_id, pending):
                continue
            del self._pending[job_id]
            nbytes, _why = pending.outcome or (0, None)
            seconds = time.perf_counter() - pending.started
            results.append(_Result(job_id, True, nbytes, seconds))
        return results

    def wait(self, job_ids: Iterable[int]) -> None:
        """Return once those of `job_ids` that are under way have ended."""
        for job_id in job_ids:
            pending = self._pending.get(job_id)
            while pending is not None:
                pending.job.wait()
                if self._settled(job_id, pending):
                    break

    def shutdown(self) -> None:
        """End all transfers and let go of cache and host memory. Idempotent.

        Every step is taken whichever other fails; what failed last is raised.
        """
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.shutdown)
        with ExitStack() as steps:  # the last one comes first
            steps.callback(self._release)
            if self.board is not None:
                steps.callback(self.board.close)
            steps.callback(self._region.close, force=True)
            steps.callback(setattr, self, "_digests", None)
            steps.callback(self._engine.shutdown)
            steps.callback(self._plan.close)

    # ---- failures -------------------------------------------------------------------------------

    def take_failed_loads(self) -> dict[int, Pairs]:
        """Loads that failed since the last call: job id -> what they were to load."""
        failed, self._failed = self._failed, {}
        return failed

    def _settled(self, job_id: int, pending: _Pending) -> bool:
        """Whether a job that is done needs no more work; starts a repetition if it failed."""
        if pending.outcome is not None:
            return True
        result = pending.job.result()
        why = result["error"]
        if why is None and pending.is_load and self._digests is not None:
            why = self._digests.check(pending.pairs)
            if why is not None:
                self._count("digest_mismatches", 1)
        direction = "load" if pending.is_load else "store"
        if why is None:
            self._count(f"{direction}_bytes", result["bytes"])
            self._count(f"{direction}_pages", result["pages"])
            pending.outcome = (result["bytes"], None)
            return True
        if pending.attempts < self._retries:
            pending.attempts += 1
            self._count("retries", 1)
            logger.warning("vkvmap: %s job %s is repeated: %s", direction, job_id, why)
            move = self._plan.load if pending.is_load else self._plan.store
            pending.job = move(pending.pairs, stream=self._stream())
            return False
        self._count(f"{direction}_failures", 1)
        if not self.reports_failures:
            raise TransferError(
                f"{direction} job {job_id} failed: {why}. The engine's own connector cannot be "
                "told of it, so this worker stops before wrong tokens are produced; select "
                "VkvmapConnector to have such requests recomputed (docs/vllm.md)"
            )
        logger.error("vkvmap: %s job %s failed: %s", direction, job_id, why)
        if self.board is not None:
            self.board.failed(job_id)
        if pending.is_load:
            self._failed[job_id] = pending.pairs
        pending.outcome = (0, why)
        return True

    def _count(self, name: str, amount: int) -> None:
        if self.board is not None:
            self.board.add(name, amount)


def make_worker(setup: Setup, options: Options, region: Any, num_rows: int) -> VkvmapWorker:
    """The worker over the engine's host memory `region`.

    Raises:
        EngineError: memory and rows do not fit.
    """
    memory = region.create_kv_memoryview()
    if memory.nbytes != num_rows * setup.rows.row_bytes:
        raise EngineError(
            f"the engine's host memory has {memory.nbytes:,} bytes, "
            f"{num_rows * setup.rows.row_bytes:,} are needed"
        )
    return VkvmapWorker(setup, options, memory.cast("B"), num_rows, region.cleanup)


def _prepare(device: str, engine: Engine, region: Region) -> Any:
    """Pin `region` where the cache is on a GPU; how to find the stream to wait for."""
    if not device.startswith("cuda"):
        return lambda: None
    from vkvmap import calibrate, cuda

    torch = importlib.import_module("torch")
    # Sections of a row overlay each other, so the memory is registered as what it is: rows.
    stride = region.sections[0].row_stride
    rows = [Section("rows", region.nbytes // stride, stride, stride)]
    whole = Region.from_buffer(region.address, region.nbytes, region.view, rows)
    region.registration = cuda.pin(whole, agree=_all_agree)
    whole.registration = None  # it belongs to the region now, which outlives this view of it
    engine.choose_mover = calibrate.choose_mover
    return lambda: torch.cuda.current_stream()


def _all_agree(mine: bool) -> bool:
    """Whether all workers of this engine say yes."""
    torch = importlib.import_module("torch")
    if not torch.distributed.is_initialized():
        return mine
    from vkvmap.integrations.vllm.versions import find

    group = find("vllm.distributed.parallel_state", "get_world_group")()
    vote = torch.tensor([int(mine)])
    torch.distributed.all_reduce(vote, op=torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return bool(vote.item())
