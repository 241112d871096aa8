"""Transfer plans: what a serving loop holds on to.

Made once per registered cache and then called thousands of times a second: a packed plan and the
engine that runs it. Close it before giving the cache's memory back.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vkvmap.derive import derive_canonical_mappings
from vkvmap.errors import PlanError, TransferError
from vkvmap.mapping import Mappings
from vkvmap.plan import PackedPlan
from vkvmap.transfer import Engine, Job, default_engine

if TYPE_CHECKING:
    from vkvmap import _C
    from vkvmap.region import Region

STORE, LOAD = 0, 1
MOVERS = ("host", "kernel", "copy_engine")


class TransferPlan:
    """The transfers of one rank's cache to and from one region.

    Args:
        mappings: from `derive_canonical_mappings`.
        caches: the caches that the mappings were derived for.
        region: host memory with the sections that `sections_for` names.
        chunk_tokens: tokens per chunk, one number or one per group; default: one page per chunk.
        mover: ``"auto"``, ``"kernel"``, ``"copy_engine"`` or ``"host"``.
        writers: writer policy, see `vkvmap.writers`.
        engine: the `vkvmap.transfer.Engine` that runs the transfers; default: the process's own.

    Raises:
        PlanError: mappings, caches and region do not fit, or no mover can carry them; nothing has
            moved.
        TransferError: a CUDA call failed.
    """

    def __init__(
        self,
        mappings: Mappings,
        caches: Mapping[str, Any],
        region: Region,
        *,
        chunk_tokens: int | Mapping[str, int] | None = None,
        mover: str = "auto",
        writers: str = "turns",
        engine: Engine | None = None,
    ) -> None:
        self._packed = PackedPlan(
            mappings, caches, region, chunk_tokens=chunk_tokens, writers=writers
        )
        self._source = mappings
        self._chunk_tokens = chunk_tokens
        self._writers = writers
        self._mover = mover
        try:
            self._movers = (self._choose(mover, STORE), self._choose(mover, LOAD))
            self.engine = engine if engine is not None else default_engine()
        except BaseException:
            self._packed.release()  # whoever keeps the exception must not hold the region by it
            raise
        self._packed.memory.settle = _settling(self.engine, self._packed.native)
        self._closed = False

    @property
    def packed(self) -> PackedPlan:
        """Descriptor, groups and pages per chunk."""
        return self._packed

    @property
    def groups(self) -> tuple[str, ...]:
        """Layer groups of this rank, in the order of their block lists."""
        return self._packed.groups

    @property
    def pages_per_chunk(self) -> Mapping[str, int]:
        """Group -> canonical pages per chunk."""
        return self._packed.pages_per_chunk

    @property
    def descriptor(self) -> NDArray[np.uint8]:
        """The packed descriptor."""
        return self._packed.descriptor

    # ---- transfers -----------------------------------------------------------------------------

    def store(
        self,
        pairs: Any,
        *,
        stream: Any = None,
        layers: range | None = None,
        mover: str | None = None,
    ) -> Job:
        """Copy cache blocks to canonical pages, asynchronously.

        Args:
            pairs: ``(block_ids, page_ids)`` for a plan of one group, or group -> such a pair.
                One-dimensional int64 arrays (numpy, CPU torch, lists); they may be reused at once.
                A page id is ``chunk_id * pages_per_chunk + page``. Every rank passes all pages; the
                election decides what each of them moves.
            stream: the CUDA stream whose pending writes the store must wait for.
            layers: layer ids to move, default all.
            mover: overrides the plan's choice for this call.

        Returns:
            A `Job`.

        Raises:
            PlanError: an id out of range, a page named twice, unequal lengths; nothing has moved.
            StalePlanError: the cache or the region is gone or has moved, or is no longer pinned as
                it was.
        """
        return self._submit(STORE, pairs, stream, layers, mover, False, None)

    def load(
        self,
        pairs: Any,
        *,
        stream: Any = None,
        layers: range | None = None,
        expedited: bool = False,
        progress: NDArray[np.uint32] | None = None,
        mover: str | None = None,
    ) -> Job:
        """Copy canonical pages to cache blocks, asynchronously; arguments as for `store`.

        Args:
            expedited: go ahead of ordinary loads that have not started.
            progress: one uint32 per layer of the layer table; an entry becomes 1 as soon as that
                layer has arrived, so that its attention can start.
        """
        return self._submit(LOAD, pairs, stream, layers, mover, expedited, progress)

    def _submit(
        self,
        direction: int,
        pairs: Any,
        stream: Any,
        layers: range | None,
        mover: str | None,
        expedited: bool,
        progress: NDArray[np.uint32] | None,
    ) -> Job:
        self._packed.check_alive()
        try:
            return self.engine.submit(
                self._packed.native,
                direction,
                self._packed.id_lists(pairs),
                stream=stream,
                layers=_layer_range(layers),
                expedited=expedited,
                progress=self._progress(progress),
                mover=self._movers[direction] if mover is None else self._choose(mover, direction),
                keep=self._packed.memory,
            )
        except ValueError as error:
            raise PlanError(str(error)) from None

    def _choose(self, mover: str, direction: int) -> str:
        """The mover by name; ``"auto"`` is decided by calibration where a GPU is involved."""
        on_host = self._packed.device == "cpu"
        if mover == "auto":
            if on_host:
                return "host"
            from vkvmap import cuda
            from vkvmap.calibrate import choose_mover

            chosen = choose_mover(self._packed.native, direction)
            if chosen == "host":
                raise PlanError(
                    f"the caches are on {self._packed.device}, which this build cannot reach: "
                    f"{cuda.why_not()}"
                )
            return chosen
        if mover not in MOVERS:
            raise PlanError(f"mover {mover!r}: choose auto or one of {', '.join(MOVERS)}")
        if (mover == "host") is not on_host:
            raise PlanError(
                f"mover {mover!r} cannot reach caches on {self._packed.device!r}; use "
                f"{'host' if on_host else 'kernel or copy_engine'}, or auto"
            )
        return mover

    def _progress(self, progress: NDArray[np.uint32] | None) -> Any:
        if progress is None:
            return None
        needed = f"one uint32 per layer of the layer table is needed ({len(self._source.layers)})"
        if not isinstance(progress, np.ndarray):
            raise PlanError(f"progress is {type(progress).__name__}, not a numpy array; {needed}")
        if progress.dtype != np.uint32 or progress.shape != (len(self._source.layers),):
            raise PlanError(
                f"progress has dtype {progress.dtype} and shape {progress.shape}; {needed}"
            )
        if not (progress.flags.c_contiguous and progress.flags.writeable):
            raise PlanError(f"progress must be contiguous and writable; {needed}")
        return progress

    # ---- lifetime ------------------------------------------------------------------------------

    def invalidate(self, reason: str) -> None:
        """Refuse all further transfers, e.g. while an engine sleeps; `rebuild` starts anew."""
        self._packed.invalidate(reason)

    def rebuild(self, caches: Mapping[str, Any], mappings: Mappings | None = None) -> TransferPlan:
        """A plan like this one for the cache's new addresses; closes this one.

        Args:
            caches: the same layers at their new addresses.
            mappings: mappings derived for `caches`; otherwise they are derived again, and strictly
                so if this plan's had no refusals.

        Raises:
            PlanError, RefusedError: there is no such plan; this one stays as it is.
        """
        old = self._source
        fresh = mappings or derive_canonical_mappings(
            old.layers, caches, old.grid, old.rank, family=old.family, strict=not old.refusals
        )
        plan = TransferPlan(
            fresh,
            caches,
            self._packed.region,
            chunk_tokens=self._chunk_tokens,
            mover=self._mover,
            writers=self._writers,
            engine=self.engine,
        )
        self.close()
        return plan

    def close(self) -> None:
        """Wait for this plan's transfers and let go of cache and region. Idempotent."""
        if not self._closed:
            self._packed.invalidate("it is closed")
            try:
                self.engine.drain(self._packed.native)
            except TransferError:  # a forked child cannot wait for its parent's threads
                self._closed = True
                self._packed.release()  # and need not
                raise
            self._closed = True
            self._packed.release()

    def __enter__(self) -> TransferPlan:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _settling(engine: Engine, plan: _C.Plan) -> Callable[[], object]:
    """Have `engine` let go of what ended jobs of `plan` kept, which it does when it is called."""
    alive = weakref.ref(engine)  # it has the jobs, which keep what asks for this

    def settle() -> None:
        here = alive()
        if here is not None:
            with contextlib.suppress(TransferError):  # in a forked child
                here.drain(plan, 0.0)

    return settle


def _layer_range(layers: range | None) -> tuple[int, int] | None:
    if layers is None:
        return None
    if not isinstance(layers, range) or layers.step != 1 or layers.start < 0:
        raise PlanError(f"layers={layers}: a range with step 1 of layer ids is needed")
    most = 0xFFFFFFFF  # an id has 32 bits; ids that no layer has are left out
    return min(layers.start, most), min(layers.stop, most)
