"""The main job, end to end and checked: store under one configuration, load under another.

One real process per rank. Source ranks fill their paged caches from a truth that knows nothing of
mappings, scatter the blocks, and store through a shared region; then target ranks load, and every
byte of every cache is compared, the padding behind pages and the blocks that nobody named included.
"""

from __future__ import annotations

import json
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from vkvmap.derive import derive_canonical_mappings
from vkvmap.errors import RegionError, VkvmapError
from vkvmap.mapping import Mappings
from vkvmap.paged import views_of
from vkvmap.region import Region
from vkvmap.region_backing import available_memory
from vkvmap.roundtrip.task import Job, Outcome, RankReport, RankTask
from vkvmap.roundtrip.truth import POISON
from vkvmap.sections import sections_for

__all__ = ["Job", "Outcome", "RankReport", "RankTask", "RoundTripError", "memory_needed", "run"]

#: What a rank process costs before it holds any cache: interpreter, numpy, native module.
_PROCESS_BYTES = 60 << 20

Progress = Callable[[str, float], None]


class RoundTripError(VkvmapError):
    """A rank process ended without an answer."""


def memory_needed(job: Job) -> int:
    """Bytes that the round trip needs at its peak: the region, and the larger side's ranks."""
    sides = []
    for loading in (False, True):
        tasks = _tasks(job, loading, -1)
        # The largest layer exists a second time while it is filled or compared.
        largest = max(task.paged(name).nbytes for task in tasks for name in task.layers)
        sides.append(sum(task.cache_bytes + 2 * largest + _PROCESS_BYTES for task in tasks))
    rows = sum(
        job.chunks_of(group)
        * sum(spec.canonical_bytes(job.chunk_tokens) for spec in job.table.in_group(group))
        for group in job.table.groups
    )
    return rows + max(sides)


def group_mappings(job: Job) -> list[Mappings]:
    """Rank 0's mappings of each side; raises RefusedError where a layer cannot be certified."""
    return [
        derive_canonical_mappings(
            job.table,
            views_of(job.table, job.table, side, 0),
            side.grid,
            0,
            family=job.family,
            strict=True,
        )
        for side in (job.source, job.target)
    ]


def run(
    job: Job,
    *,
    progress: Progress | None = None,
    flip_a_byte: bool = False,
    inspect: Callable[[Region], object] | None = None,
    timeout: float = 600,
) -> Outcome:
    """Run `job`.

    Args:
        progress: told ``(what, share done)`` as ranks advance.
        flip_a_byte: change one stored byte between store and load; the outcome must then be bad.
        inspect: called with the region between store and load.
        timeout: seconds that a step of a side may take.

    Raises:
        RefusedError: a layer of either side cannot be certified.
        RegionError: not enough memory.
        RoundTripError: a rank process died or hung.
    """
    needed, room = memory_needed(job), available_memory()
    if needed > room:
        fits = job.tokens * room // needed // 2 // job.chunk_tokens * job.chunk_tokens
        raise RegionError(
            f"the round trip needs {needed >> 20:,} MiB, {room >> 20:,} MiB are available; move "
            f"fewer tokens (--tokens {fits} would fit)" + ("" if fits else " or layers (--layers)")
        )
    mappings = group_mappings(job)
    region = Region.create(sections_for(mappings[0], job.chunk_tokens, job.chunk_counts))
    try:
        for section in region.sections:
            region.rows(section.name)[:] = POISON
        fd = os.dup(_descriptor(region))
        try:
            reports, times = [], {}
            for loading in (False, True):
                if loading and inspect is not None:
                    inspect(region)
                if loading and flip_a_byte:
                    section = region.sections[0]
                    region.row(section.name, section.num_rows - 1)[-1] ^= 0x40
                began = time.perf_counter()
                side = "load" if loading else "store"
                reports += _Side(_tasks(job, loading, fd), side, progress, timeout).run()
                times[side] = time.perf_counter() - began
                if not all(report.good for report in reports):
                    break
        finally:
            os.close(fd)
        return Outcome(
            job.family, job.chunk_tokens, job.tokens, region.nbytes, tuple(reports), times
        )
    finally:
        region.close(force=True)


def _descriptor(region: Region) -> int:
    return region.handle().fd


def _tasks(job: Job, loading: bool, fd: int) -> list[RankTask]:
    side = job.target if loading else job.source
    threads = max(1, (os.cpu_count() or 1) // side.ranks)
    return [
        RankTask(job, loading, stage, rank, fd, threads)
        for stage in range(side.pp)
        for rank in range(side.grid.size)
    ]


class _Side:
    """The rank processes of one side, driven in step: all ready, all go, all done."""

    def __init__(
        self, tasks: Sequence[RankTask], name: str, progress: Progress | None, timeout: float
    ) -> None:
        self.tasks, self.name, self.progress, self.timeout = tasks, name, progress, timeout
        self.events: queue.Queue[tuple[int, dict[str, Any] | None]] = queue.Queue()
        self.shares = [0.0] * len(tasks)

    def run(self) -> list[RankReport]:
        processes = [self._start(index, task) for index, task in enumerate(self.tasks)]
        try:
            self._collect(processes, "ready")
            for process in processes:
                self._send(process, b"go\n")
            found = self._collect(processes, "report")
            return [RankReport(**found[index]) for index in range(len(processes))]
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
                for stream in (process.stdin, process.stdout):
                    if stream is not None:
                        stream.close()

    def _start(self, index: int, task: RankTask) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, "-m", "vkvmap.roundtrip.rank"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[task.region_fd],
            env=environment,
        )
        self._send(process, pickle.dumps(task))
        threading.Thread(target=self._read, args=(index, process), daemon=True).start()
        return process

    def _send(self, process: subprocess.Popen[bytes], data: bytes) -> None:
        if process.stdin is not None:
            try:
                process.stdin.write(data)
                process.stdin.flush()
            except BrokenPipeError:
                pass  # it ended early; its report or its exit code says why

    def _read(self, index: int, process: subprocess.Popen[bytes]) -> None:
        if process.stdout is not None:
            for line in process.stdout:
                try:
                    self.events.put((index, json.loads(line)))
                except ValueError:
                    continue  # something else that wrote to the rank's standard output
        self.events.put((index, None))

    def _collect(
        self, processes: Sequence[subprocess.Popen[bytes]], wanted: str
    ) -> dict[int, dict[str, Any]]:
        """Wait until every rank has said `wanted` (or has given its report early)."""
        found: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + self.timeout
        while len(found) < len(processes):
            try:
                index, event = self.events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise RoundTripError(
                    f"{self.name}: {len(processes) - len(found)} ranks have not said {wanted!r} "
                    f"in {self.timeout:.0f} s"
                ) from None
            if event is None:
                if index not in found:
                    raise RoundTripError(
                        f"{self.name}: the process of stage {self.tasks[index].stage}, rank "
                        f"{self.tasks[index].rank} ended with exit code "
                        f"{processes[index].wait()} before it said {wanted!r}"
                    )
                continue
            kind = event.pop("event")
            if kind == "progress":
                self.shares[index] = event["done"] / event["of"]
                if self.progress is not None:
                    self.progress(self.name, sum(self.shares) / len(self.shares))
            elif kind == wanted:
                found[index] = event
            elif kind == "report":
                raise RoundTripError(
                    f"{self.name}: stage {event['stage']}, rank {event['rank']}: {event['error']}"
                )
        return found
