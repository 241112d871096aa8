"""The fallback: pages that nobody could certify, carried whole to a place of their own.

The opaque unit is the layer's manager block, or, where several layers interleave in the rows of one
tensor, that tensor's row: part of a row cannot be restored without deciding what the rest of it
means (DESIGN 2.7).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vkvmap.boxes import Box, Level, folded
from vkvmap.cache import CacheView, TensorView
from vkvmap.errors import SpecError
from vkvmap.grid import RankGrid
from vkvmap.mapping import CanonicalPageMapping, CopyRun
from vkvmap.recognise import PageAddressing


def slabs(views: Mapping[str, CacheView]) -> dict[str, tuple[str, ...]]:
    """Layer -> the layers whose pages interleave in the same rows of one tensor, in order."""
    slabs: dict[str, tuple[str, ...]] = {name: (name,) for name in views}
    rows: dict[tuple[Any, ...], list[str]] = {}
    for name, view in views.items():
        if len(view.tensors) != 1:
            continue
        tensor = view.tensors[0]
        if tensor.strides[0] <= tensor.bytes_per_index:
            continue
        rows.setdefault((tensor.storage, tensor.strides[0]), []).append(name)
    for (_, stride), names in rows.items():
        names.sort(key=lambda name: views[name].tensors[0].address)
        for members in _within(names, stride, views):
            order = tuple(name for name in views if name in members)
            slabs.update(dict.fromkeys(members, order))
    return slabs


def _within(
    names: Sequence[str], stride: int, views: Mapping[str, CacheView]
) -> Iterator[list[str]]:
    """Cut `names`, sorted by address, where a layer is a whole row away from the first before."""
    members: list[str] = []
    for name in names:
        address = views[name].tensors[0].address
        if members and address - views[members[0]].tensors[0].address >= stride:
            yield members
            members = []
        members.append(name)
    yield members


def opaque_addressing(slab: Sequence[str], views: Mapping[str, CacheView]) -> PageAddressing:
    """Whole manager blocks of one layer, or whole rows of a shared tensor, bytes as they lie."""
    if len(slab) == 1:
        return _opaque_pages(slab[0], views[slab[0]])
    tensors = [views[name].tensors[0] for name in slab]
    blocks = views[slab[0]].kernel_blocks
    for name in slab[1:]:
        if views[name].kernel_blocks != blocks:
            raise SpecError(
                f"layer {name!r}: {views[name].kernel_blocks} kernel blocks per block, layer "
                f"{slab[0]!r} in the same rows has {blocks}; a block id must mean one row to both"
            )
        rows, first = views[name].tensors[0].shape[0], tensors[0].shape[0]
        if rows != first:
            raise SpecError(
                f"layer {name!r} has {rows} rows, layer {slab[0]!r} in the same rows has {first}; "
                "give both the rows that both have"
            )
    low = min(tensor.address for tensor in tensors)
    high = max(tensor.address + _reach(slab[0], tensor) for tensor in tensors)
    stride = tensors[0].strides[0]
    extent = high - low
    if extent > stride:
        raise SpecError(
            f"layer {slab[0]!r}: pages of a shared row reach {extent} bytes, a row has {stride}"
        )
    boxes = folded([Box(0, 0, ((extent, 1, 1), (blocks, extent, stride)))])
    return PageAddressing(
        low, stride * blocks, tensors[0].shape[0] // blocks, extent * blocks, boxes
    )


def _opaque_pages(name: str, view: CacheView) -> PageAddressing:
    base = view.base
    steps = {(tensor.strides[0], tensor.shape[0]) for tensor in view.tensors}
    if len(steps) > 1:
        raise SpecError(
            f"layer {name!r}: its tensors have (bytes per block, blocks) of {sorted(steps)}; one "
            "block id must reach all of them alike, so give each tensor a layer of its own"
        )
    boxes: list[Box] = []
    page = 0
    for tensor in view.tensors:
        dims = list(zip(tensor.shape[1:], tensor.strides[1:], strict=True))
        _reach(name, tensor)
        levels: list[Level] = [(tensor.itemsize, 1, 1)]
        step = tensor.itemsize
        # In memory order, so that a page that is one piece of memory is one fragment.
        for size, stride in sorted(dims, key=lambda dim: dim[1]):
            levels.append((size, step, stride))
            step *= size
        levels.append((view.kernel_blocks, step, tensor.strides[0]))
        boxes.append(Box(page, tensor.address - base, tuple(levels)))
        page += step * view.kernel_blocks
    first = view.tensors[0]
    return PageAddressing(
        base,
        first.strides[0] * view.kernel_blocks,
        first.shape[0] // view.kernel_blocks,
        page,
        folded(boxes),
    )


def _reach(name: str, tensor: TensorView) -> int:
    """One past the last byte of block 0's page; SpecError where the tensor overlaps itself."""
    reach = end = tensor.itemsize
    dims = sorted(zip(tensor.strides, tensor.shape, range(len(tensor.shape)), strict=True))
    for stride, size, dim in dims:
        if size > 1:
            if stride < end:
                raise SpecError(
                    f"layer {name!r}: strides {tensor.strides} of shape {tensor.shape} make the "
                    "tensor overlap itself; a cache must give every element an address of its own"
                )
            end += stride * (size - 1)
            reach += stride * (size - 1) if dim else 0
    return reach


def opaque_mapping(
    page_bytes: int, grid: RankGrid, rank: int, span_tokens: int
) -> CanonicalPageMapping:
    """The whole page at a rank-private place (DESIGN 2.7)."""
    return CanonicalPageMapping(
        canonical_page_size_bytes=grid.size * page_bytes,
        local_page_size_bytes=page_bytes,
        runs=(CopyRun(0, rank * page_bytes, page_bytes, 1, page_bytes, page_bytes),),
        num_writers=1,
        writer_index=0,
        parallelism_agnostic=False,
        certified=False,
        span_tokens=span_tokens,
    )
