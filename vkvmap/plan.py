"""Plans: everything about a transfer that does not change, packed and validated once.

A packed plan knows the tensors and the region it was made for, and says when either is gone or has
moved. What it touches (`PackedPlan.memory`) it shares with every transfer of it, and the region is
held for as long as one of them has that: memory is neither freed nor unregistered under a transfer,
the plan gone or not. What runs it is the transfer engine's business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vkvmap.cache import CacheView, TensorView
from vkvmap.chunk import ChunkLayout
from vkvmap.errors import PlanError, StalePlanError
from vkvmap.mapping import CanonicalPageMapping, Mappings
from vkvmap.pack import PlacedLayer, pack
from vkvmap.sections import pages_per_chunk, private_rows, private_section
from vkvmap.writers import with_writers

if TYPE_CHECKING:
    from vkvmap import _C
    from vkvmap.region import Region


@dataclass(frozen=True)
class _Watched:
    """A tensor that a plan was made for, and where it was then."""

    layer: str
    owner: Any
    address: int

    def moved(self) -> bool:
        return hasattr(self.owner, "data_ptr") and self.owner.data_ptr() != self.address


def _nothing() -> None:
    pass


@dataclass(eq=False)
class PlanMemory:
    """What the transfers of a plan touch, to be kept by each of them until its last byte.

    Attributes:
        watched: tensors of the cache.
        view: the region's mapping.
        registration: the region's with CUDA, if it has one; see `Region.registration`.
        settle: called by the region before it refuses to close: lets go of what has ended.
    """

    watched: tuple[_Watched, ...] = ()
    view: Any = None
    registration: Any = None
    settle: Callable[[], object] = _nothing


class PackedPlan:
    """The descriptor of one rank's cache and region, validated by the native module.

    Args:
        mappings: from `derive_canonical_mappings`.
        caches: the caches that the mappings were derived for.
        region: host memory with the sections that `sections_for` names.
        chunk_tokens: tokens per chunk, one number or one per group; None: one page per chunk.
        writers: writer policy, see `vkvmap.writers`.

    Attributes:
        descriptor: the packed descriptor, uint8.
        groups: layer groups of this rank, in the order of their block lists.
        pages_per_chunk: group -> canonical pages per chunk; a page id is
            ``chunk_id * pages_per_chunk + page``.
        device: where the caches are.
        native: the validated plan of the native module.
        memory: what a transfer has to keep alive until its last byte, the plan gone or not. The
            region is held while it lives.

    Raises:
        PlanError: mappings, caches and region do not fit.
    """

    def __init__(
        self,
        mappings: Mappings,
        caches: Mapping[str, Any],
        region: Region,
        *,
        chunk_tokens: int | Mapping[str, int] | None = None,
        writers: str = "turns",
    ) -> None:
        from vkvmap import _C

        _check_caches(mappings, caches)
        self.region = region
        self.mappings = with_writers(mappings, writers)
        tokens = _one_page_each(mappings) if chunk_tokens is None else chunk_tokens
        self.pages_per_chunk = pages_per_chunk(mappings, tokens)
        self.groups = tuple(g for g in mappings.layers.groups if g in self.pages_per_chunk)
        self._group_index = {group: index for index, group in enumerate(self.groups)}
        self.device = _one_device(caches)
        self.descriptor: NDArray[np.uint8] = pack(self._placed(tokens), len(self.groups))
        self.memory = PlanMemory(
            _watched(mappings, caches), region.view, region.registration if region.pinned else None
        )
        self._stale: str | None = None
        try:
            self.native: _C.Plan = _C.Plan(
                self.descriptor,
                _storages(mappings, caches),
                [(region.address, region.nbytes)],
                list(mappings.layers),
                self.device,
            )
        except ValueError as error:
            raise PlanError(str(error)) from None
        region.hold(self.memory)

    def id_lists(self, pairs: Any) -> list[tuple[int, Any, Any]]:
        """``(group index, block ids, page ids)`` from what `TransferPlan.store` accepts."""
        if not isinstance(pairs, Mapping):
            if len(self.groups) != 1:
                raise PlanError(
                    f"this plan has groups {list(self.groups)}; pass a mapping from group to "
                    "(block_ids, page_ids)"
                )
            pairs = {self.groups[0]: pairs}
        lists = []
        for group, pair in pairs.items():
            if group not in self._group_index:
                raise PlanError(f"unknown group {group!r}; this plan has {list(self.groups)}")
            try:
                blocks, pages = pair
            except (TypeError, ValueError):
                raise PlanError(
                    f"group {group!r}: {pair!r:.60} is no pair; pass (block_ids, page_ids)"
                ) from None
            index = self._group_index[group]
            lists.append((index, _ids(blocks, group, "block"), _ids(pages, group, "page")))
        return lists

    def invalidate(self, reason: str) -> None:
        """Make `check_alive` refuse from now on, for `reason`."""
        self._stale = reason

    def release(self) -> None:
        """Let go of cache and region; only once no transfer of this plan is in flight."""
        self._stale = "it is closed"
        self.region.release(self.memory)
        self.memory = PlanMemory()

    def check_alive(self) -> None:
        """Raise StalePlanError if cache, region or its registration is gone or has moved."""
        if self._stale is not None:
            raise StalePlanError(f"the plan refuses to run: {self._stale}; make a new one")
        if not self.region.alive:
            raise StalePlanError("the region of this plan is closed; make a new plan")
        for watched in self.memory.watched:
            if watched.moved():
                raise StalePlanError(
                    f"layer {watched.layer!r}: its cache moved or was freed since the plan was "
                    "made; call plan.rebuild(caches)"
                )
        if self.device != "cpu":
            self._check_registration()

    def _check_registration(self) -> None:
        """The addresses that a device was given are good for one registration only."""
        memory = self.memory
        if memory.registration is None:
            # Movers that could not use the memory before ask for it anew; from here on they may.
            memory.registration = self.region.registration if self.region.pinned else None
        elif not memory.registration.pinned:
            raise StalePlanError(
                "the registration with CUDA that this plan was made over is gone: "
                f"{memory.registration.why_not}; pin the region again (vkvmap.cuda.pin) and call "
                "plan.rebuild(caches)"
            )

    def _placed(self, chunk_tokens: int | Mapping[str, int]) -> list[PlacedLayer]:
        mappings = self.mappings
        chunks = ChunkLayout.of(mappings.layers, chunk_tokens)
        private = private_rows(mappings, self.pages_per_chunk)
        placed = []
        for layer_id, name in enumerate(mappings.layers):
            if name not in mappings.by_layer or mappings.carrier[name] != name:
                continue
            group = mappings.layers[name].group
            mapping = mappings.by_layer[name]
            if mapping.certified:
                section = self._section(group, chunks[group].payload_bytes)
                offset = chunks[group].offsets[name]
            else:
                offsets, payload = private[group]
                section, offset = self._section(private_section(group), payload), offsets[name]
            placed.append(self._place(layer_id, name, mapping, section, offset))
        return placed

    def _section(self, name: str, payload_bytes: int) -> Any:
        section = self.region.section(name)
        if section.payload_bytes != payload_bytes:
            raise PlanError(
                f"section {name!r} of the region has rows of {section.payload_bytes} bytes, chunks "
                f"of this model need {payload_bytes}; make the region from sections_for(...)"
            )
        return section

    def _place(
        self, layer_id: int, name: str, mapping: CanonicalPageMapping, section: Any, offset: int
    ) -> PlacedLayer:
        group = self.mappings.layers[name].group
        return PlacedLayer(
            layer_id=layer_id,
            group=self._group_index[group],
            load_runs=mapping.runs,
            store_runs=mapping.effective_store_runs,
            num_writers=mapping.num_writers,
            writer_index=mapping.writer_index,
            addressing=self.mappings.addressing[name],
            host_base=section.address + offset,
            host_row_stride=section.row_stride,
            host_page_stride=mapping.canonical_page_size_bytes,
            pages_per_row=self.pages_per_chunk[group],
            num_rows=section.num_rows,
        )


def _one_page_each(mappings: Mappings) -> dict[str, int]:
    spans: dict[str, int] = {}
    for name, mapping in mappings.by_layer.items():
        group = mappings.layers[name].group
        spans[group] = max(spans.get(group, 0), mapping.span_tokens)
    return spans


def _check_caches(mappings: Mappings, caches: Mapping[str, Any]) -> None:
    if not mappings.by_layer:
        why = f": {mappings.refusals[0]}" if mappings.refusals else ""
        raise PlanError(f"there is nothing to plan, the mappings are empty{why}")
    for name in mappings.by_layer:
        if name not in caches:
            raise PlanError(f"layer {name!r} has a mapping but no cache; pass the same caches")
    for name, cache in caches.items():
        known = mappings.addressing.get(name)
        if known is None:
            raise PlanError(f"layer {name!r} has a cache but no mapping; derive with these caches")
        address = min(tensor.address for tensor in _tensors(cache))
        # An opaque row begins at its lowest layer, which may be another one.
        shared = not mappings.by_layer[name].certified
        if known.base > address if shared else known.base != address:
            raise PlanError(
                f"layer {name!r}: the mappings were derived for a cache at another address; derive "
                "again for this one"
            )


def _tensors(cache: Any) -> Sequence[TensorView]:
    return cache.tensors if isinstance(cache, CacheView) else (TensorView.of(cache),)


def _one_device(caches: Mapping[str, Any]) -> str:
    devices = {tensor.device for cache in caches.values() for tensor in _tensors(cache)}
    if len(devices) != 1:
        raise PlanError(f"the caches are on {sorted(devices)}; a plan serves one device")
    return devices.pop()


def _storages(mappings: Mappings, caches: Mapping[str, Any]) -> list[tuple[int, int]]:
    return sorted(
        {tensor.storage for name in mappings.by_layer for tensor in _tensors(caches[name])}
    )


def _watched(mappings: Mappings, caches: Mapping[str, Any]) -> tuple[_Watched, ...]:
    """One tensor of each allocation: engines keep all layers in one, and it goes as a whole."""
    by_storage: dict[tuple[int, int], _Watched] = {}
    for name in mappings.by_layer:
        for tensor in _tensors(caches[name]):
            watched = _Watched(name, tensor.owner, tensor.address)
            by_storage.setdefault(tensor.storage, watched)
    return tuple(by_storage.values())


def _ids(values: Any, group: str, what: str) -> NDArray[np.int64]:
    if hasattr(values, "data_ptr"):
        if str(values.device) != "cpu":
            raise PlanError(f"group {group!r}: {what} ids are on {values.device}; pass them on CPU")
    try:
        array = np.asarray(values.numpy() if hasattr(values, "data_ptr") else values)
    except (ValueError, TypeError) as error:
        raise PlanError(
            f"group {group!r}: {what} ids are no array ({error}); a one-dimensional integer array "
            "is needed"
        ) from None
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise PlanError(
            f"group {group!r}: {what} ids have shape {array.shape} and dtype {array.dtype}; a "
            "one-dimensional integer array is needed"
        )
    if array.dtype == np.uint64 and array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise PlanError(f"group {group!r}: {what} id {int(array.max())} does not fit 63 bits")
    return np.ascontiguousarray(array, dtype=np.int64)
