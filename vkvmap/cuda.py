"""The GPU side: whether it is there, page-locking, how the kernel is launched, graphs.

Everything here is safe to ask on any machine: without CUDA in the build, without a driver or
without a device, `is_available` is False and `why_not` says why. Only what needs a device raises.

What must stay true: asking never raises and never makes a CUDA context; registration is all or
nothing, within a process and, given a way to agree, among the ranks that share a region; memory is
not unmapped while it is registered.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vkvmap import _C
from vkvmap.errors import PlanError, VkvmapError
from vkvmap.native import stream_handle, translating

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from vkvmap.region import Region

logger = logging.getLogger(__name__)

DIRECTIONS = ("store", "load")

#: Longest piece that is registered in one call; drivers have had trouble with longer ones.
MAX_PIECE_BYTES = 1 << 30

#: cudaStreamCaptureModeRelaxed
_RELAXED = 2


class CudaUnavailableError(VkvmapError, RuntimeError):
    """Something that needs a GPU was asked for where there is none; the message says why."""


@dataclass(frozen=True)
class Device:
    """One GPU as the driver describes it."""

    ordinal: int
    name: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    copy_engines: int
    memory_bytes: int
    pci_bus_id: str


@dataclass(frozen=True)
class Status:
    """What CUDA says here. `error` is empty if there is a device to use."""

    built: bool
    runtime_version: int
    driver_version: int
    devices: tuple[Device, ...]
    error: str


def status() -> Status:
    """Ask build, driver and devices. Never raises."""
    if not _C.cuda.BUILT:
        return Status(
            False, 0, 0, (), "this build has no CUDA: it was made without a CUDA compiler"
        )
    seen = _C.cuda.status()
    devices = tuple(Device(**device) for device in seen["devices"])
    error = seen["error"]
    if error and seen["driver_version"] == 0:
        error += ". No NVIDIA driver is loaded"
    elif error and seen["driver_version"] < seen["runtime_version"]:
        error += (
            f". The driver supports CUDA {_version(seen['driver_version'])}, this build needs "
            f"{_version(seen['runtime_version'])}: update the driver or build with an older toolkit"
        )
    return Status(True, seen["runtime_version"], seen["driver_version"], devices, error)


def is_available() -> bool:
    """Whether the kernel and copy-engine movers can run here."""
    return not status().error


def why_not() -> str:
    """Why `is_available` is False, in a sentence; empty if it is True."""
    return status().error


def devices() -> tuple[Device, ...]:
    return status().devices


@contextmanager
def beside_captures() -> Iterator[None]:
    """Calls of this thread within neither spoil graph captures of other threads nor are refused.

    For work that has nothing to do with them; synchronising a whole device stays forbidden.
    """
    before = _C.cuda.exchange_capture_mode(_RELAXED)
    try:
        yield
    finally:
        _C.cuda.exchange_capture_mode(before)


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


#: The native module that last had a usable GPU, which a process keeps. Asking again describes every
#: device: several times what it takes to queue a transfer.
_usable: Any = None


def _require(what: str) -> None:
    global _usable
    if _usable is _C.cuda:
        return
    reason = why_not()
    if reason:
        raise CudaUnavailableError(f"{what} needs a GPU: {reason}")
    _usable = _C.cuda


def _forget_usable() -> None:
    # CUDA does not survive a fork, so the child has to ask for itself.
    global _usable
    _usable = None


os.register_at_fork(after_in_child=_forget_usable)


# ---- page-locking --------------------------------------------------------------------------------


class Pinning:
    """A region's registration with CUDA; `pinned` is False and `why_not` set if it did not work.

    It ends with `release`, or with this object. Until then it keeps the memory mapped, whoever else
    has let go of it, and plans keep it for as long as a transfer of theirs may run.
    """

    def __init__(self, native: Any, why_not: str, memory: Any = None) -> None:
        self._native = native
        self._memory = memory
        self.why_not = why_not

    @property
    def pinned(self) -> bool:
        return not self.why_not

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """(address, bytes) of what is registered."""
        return list(self._native.pieces) if self._native is not None else []

    def release(self) -> None:
        """Unregister, once. No transfer of the memory may be running.

        Plans that were made over the registration refuse from now on; `TransferPlan.rebuild` makes
        others once the region is pinned again.
        """
        self.why_not = self.why_not or "the registration was released"
        native, self._native = self._native, None
        if native is not None:
            native.release()
        self._memory = None  # only now: it must not be unmapped before

    def __del__(self) -> None:
        # At interpreter exit half of the object may be gone.
        try:
            self.release()
        except Exception:
            pass


def pin(
    region: Region,
    *,
    max_piece_bytes: int = MAX_PIECE_BYTES,
    agree: Callable[[bool], bool] | None = None,
) -> Pinning:
    """Page-lock a region's sections, or leave it pageable and say why.

    Without it the kernel mover cannot run and the copy engines go through a staging buffer of the
    driver's, on the calling thread. A region that is pinned stays as it is. Pin before plans are
    made: one that chose its mover over a pageable region stays with that until it is rebuilt.

    Args:
        region: what to register; it keeps the registration, and `region.pinned` is the outcome.
        max_piece_bytes: longest registration; pieces end on rows.
        agree: called once with whether this rank succeeded; returns whether all ranks did (an
            all-reduce with `min`). If not, this rank's registration is rolled back, also one that
            the region had before: ranks that share a region must not differ in speed by an order
            of magnitude. No transfer of the region may be running then.

    Returns:
        The registration. It is released when the region is closed, or before that by `release`;
        when the region was closed by force or dropped, with the last transfer over it.
    """
    pinning: Pinning = (
        region.registration if region.pinned else _registered(region, max_piece_bytes)
    )
    if agree is not None and not agree(pinning.pinned):
        pinning.why_not = (
            pinning.why_not or "another rank could not pin the region, so no rank does"
        )
        pinning.release()
    if not pinning.pinned:
        logger.warning("the region stays pageable: %s", pinning.why_not)
    region.registration = pinning
    return pinning


def _registered(region: Region, max_piece_bytes: int) -> Pinning:
    """What CUDA refuses is an outcome, not an exception: other ranks wait for this one's vote."""
    reason = why_not() or ("" if region.alive else "the region is closed")
    if reason:
        return Pinning(None, reason)
    try:
        native = _C.cuda.Registration(_ranges(region), max_piece_bytes)
    except RuntimeError as error:
        return Pinning(None, str(error))
    if native.why_not:
        return Pinning(None, native.why_not)
    return Pinning(native, "", region.view)


def _ranges(region: Region) -> list[tuple[int, int, int]]:
    """(address, bytes, row stride) that cover the region and never meet inside an OS page."""
    page = 4096
    ranges: list[tuple[int, int, int]] = []
    cursor = region.address

    def cover(stop: int, row_stride: int) -> None:
        nonlocal cursor
        if stop <= cursor:
            return
        if ranges and cursor % page:  # begins in a page that the range before it has
            address, _, _ = ranges.pop()
            ranges.append((address, stop - address, 0))
        else:
            ranges.append((cursor, stop - cursor, row_stride))
        cursor = stop

    for view in sorted(region.sections, key=lambda section: section.address):
        cover(view.address, 0)
        cover(view.address + view.num_rows * view.row_stride, view.row_stride)
    cover(region.address + region.nbytes, 0)
    return ranges


# ---- the kernel's launch -------------------------------------------------------------------------


@dataclass(frozen=True)
class KernelTuning:
    """How one direction's kernel is launched.

    Attributes:
        ctas: thread blocks; each keeps one multiprocessor busy, the rest of the chip stays free.
        threads: per block, a multiple of 32 up to 512.
        unroll: 16-byte loads in flight per thread: 8, or 4 with stream hints.
        stream_hints: read without allocating in L1, write evict-first.
        slice_bytes: bytes per launch; 0 puts a whole transfer into one.
    """

    ctas: int = 8
    threads: int = 256
    unroll: int = 8
    stream_hints: bool = True
    slice_bytes: int = 64 << 20


@translating
def tuning(direction: str) -> KernelTuning:
    """How ``"store"`` or ``"load"`` is launched at present."""
    _require("tuning")
    return KernelTuning(**_C.cuda.tuning(direction_index(direction)))


@translating
def set_tuning(direction: str, tuning: KernelTuning) -> None:
    """Launch `direction` like this from now on, in this process.

    Raises PlanError for a variant that is not compiled or cannot be launched.
    """
    _require("set_tuning")
    _C.cuda.set_tuning(
        direction_index(direction),
        ctas=tuning.ctas,
        threads=tuning.threads,
        unroll=tuning.unroll,
        stream_hints=tuning.stream_hints,
        slice_bytes=tuning.slice_bytes,
    )


def direction_index(direction: str) -> int:
    """0 for ``"store"``, 1 for ``"load"``. Raises PlanError for anything else."""
    if direction not in DIRECTIONS:
        raise PlanError(f"direction {direction!r:.40}: choose one of {', '.join(DIRECTIONS)}")
    return DIRECTIONS.index(direction)


# ---- on a caller's stream, and in graphs ---------------------------------------------------------


Ids = Iterable[tuple[int, "NDArray[np.int64]", "NDArray[np.int64]"]]


@translating
def enqueue(mover: str, plan: _C.Plan, direction: int, groups: Ids, stream: Any) -> None:
    """Put a transfer on a stream; the stream's order is all the ordering there is.

    Returns without waiting for the transfer, but where host memory is pageable the copy engines may
    stage it on the calling thread. Ids may be reused at once. Nothing else is kept: plan, cache and
    region must live, and the region stay pinned, until the stream is past the transfer, and no
    engine knows of it.

    Args:
        mover: ``"kernel"`` or ``"copy_engine"``.
        plan: a native plan, see `vkvmap.plan`.
        direction: 0 store, 1 load.
        groups: (group index, block ids, canonical page ids), as for an engine.
        stream: CUDA stream, as a handle or an object with ``cuda_stream``, None for the default
            one; not one under capture.

    Raises:
        PlanError: ids, mover or stream that cannot be; memory the mover cannot reach.
        TypeError: not an int64 array.
        TransferError: a CUDA call failed; what of the transfer was queued before has ended.
        CudaUnavailableError: there is no GPU.
    """
    _require("enqueue")
    _C.cuda.enqueue(mover, plan, direction, list(groups), stream_handle(stream))


class GraphTransfer:
    """A transfer inside a CUDA graph: fixed layers, ids that may change between replays.

    Make it before the capture, `launch` it inside, `set_ids` before a replay while none is running.
    Keep it until the graph is gone: its pairs lie in pinned memory of its own, which every replay
    reads, and it has the plan, whose copy on the device they read too. Cache and region must live,
    and the region stay pinned, for as long.

    Args:
        plan: a native plan.
        direction: 0 store, 1 load.
        capacities: group index -> most pairs that a replay will move.

    Raises:
        PlanError: a group that is not there; memory the kernel cannot reach.
        TransferError: a CUDA call failed.
        CudaUnavailableError: there is no GPU.
    """

    @translating
    def __init__(self, plan: _C.Plan, direction: int, capacities: Mapping[int, int]) -> None:
        _require("a graph transfer")
        self._native = _C.cuda.GraphTransfer(plan, direction, list(capacities.items()))

    @translating
    def set_ids(self, groups: Ids) -> None:
        """(group index, block ids, page ids) of the next replays; groups not named move nothing.

        Raises PlanError for ids out of range, destinations named twice, or more than the capacity.
        """
        self._native.set_ids(list(groups))

    @translating
    def launch(self, stream: Any) -> None:
        """Into the capture of `stream`, or at once if it is not being captured."""
        self._native.launch(stream_handle(stream))
