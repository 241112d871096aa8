"""Recognition: a declared layout is verified against shape and strides, never guessed.

Axes of extent 1 carry no stride information, so there the declaration decides (DESIGN 2.6). What
agrees yields two placements of the same fields: in the page (dense, logical) and in memory (as the
strides say); what disagrees is a LayoutError that says where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

from vkvmap.boxes import Box, Level, folded, nested
from vkvmap.cache import CacheView, TensorView
from vkvmap.errors import LayoutError
from vkvmap.layout import (
    BLOCK,
    CELL,
    HALF,
    KERNEL_BLOCK,
    LAYOUTS,
    PAGE_DIMS,
    Layout,
    Placement,
    place,
)
from vkvmap.spec import HEAD, TOKEN, Axis, Field, LayerSpec, Nest


@dataclass(frozen=True)
class PageAddressing:
    """How page bytes become addresses, for one layer on one rank.

    Page byte `p` of block `b` lies at ``base + b * block_stride + address_of(p)``, where `boxes`
    pair page offsets (left) with memory offsets (right). `extent` is one past the largest memory
    offset of a page.
    """

    base: int
    block_stride: int
    num_blocks: int
    page_bytes: int
    boxes: tuple[Box, ...]

    @property
    def is_contiguous(self) -> bool:
        """Whether a page is one piece of memory in page order."""
        first = self.boxes[0]
        whole = first.fragment == self.page_bytes
        return len(self.boxes) == 1 and whole and first.left == first.right == 0

    @property
    def extent(self) -> int:
        """One past the largest memory offset within a block's page."""
        return max(
            box.right + sum((count - 1) * step for count, _, step in box.levels) + 1
            for box in self.boxes
        )


class Recognised:
    """A cache view that agrees with its declared layout: the placements that follow from it.

    Args:
        spec: the layer; `fields` below are its fields as the layout sees them.
        view: the declared cache.
        local_extent: extent of an axis of a field on this rank, without the token axis.

    Raises LayoutError (message without the layer's name) where shape or strides disagree.
    """

    def __init__(
        self, spec: LayerSpec, view: CacheView, local_extent: Callable[[Field, Axis], int]
    ) -> None:
        self.view = view
        self.fields = layout_fields(spec, view)
        self._outer = local_extent
        self.kernel_tokens = view.block_size // view.kernel_blocks if view.block_size else 0
        self.orders = tuple(self._wrapped(part.order) for part in view.layout.parts)
        placed = [leaf for order in self.orders for leaf in order.leaves()]
        missing = sorted(set(self.fields) - set(placed))
        unknown = sorted(set(placed) - set(self.fields))
        if missing or unknown or len(placed) != len(set(placed)):
            raise LayoutError(
                f"layout {view.layout.name!r} places fields {placed}, the layer has "
                f"{sorted(self.fields)}; declare a layout that places each of them once"
            )
        self.page, self.page_bytes = self._page_placement()
        self.memory, self.block_stride, self.num_blocks = self._memory_placement()

    def extent(self, this: Field, axis: Axis) -> int:
        """Local extent of `axis`, tokens counted per kernel block."""
        if axis.name == TOKEN:
            return self.kernel_tokens
        if axis.name == KERNEL_BLOCK:
            return self.view.kernel_blocks
        return self._outer(this, axis)

    def _wrapped(self, order: Nest) -> Nest:
        bound = order.bound_to(tuple(self.fields.values()))
        if self.view.kernel_blocks == 1:
            return bound
        return Nest((KERNEL_BLOCK,), (bound,))

    def _page_placement(self) -> tuple[dict[str, Placement], int]:
        return place(Nest((), self.orders), self.fields, self.extent)

    def _memory_placement(self) -> tuple[dict[str, Placement], int, int]:
        base = self.view.base
        memory: dict[str, Placement] = {}
        strides, counts = set(), set()
        for part, order, tensor in zip(
            self.view.layout.parts, self.orders, self.view.tensors, strict=True
        ):
            dims = PAGE_DIMS if self.view.raw else part.dims
            reader = _TensorReader(tensor, dims, order, self)
            memory.update(reader.placements(tensor.address - base))
            strides.add(reader.block_stride * self.view.kernel_blocks)
            counts.add(reader.num_blocks // self.view.kernel_blocks)
            if reader.num_blocks % self.view.kernel_blocks:
                raise LayoutError(
                    f"{reader.num_blocks} kernel blocks are not a whole number of manager blocks "
                    f"of {self.view.kernel_blocks}"
                )
        if len(strides) > 1 or len(counts) > 1:
            raise LayoutError(
                f"the layer's tensors advance by {sorted(strides)} bytes per block over "
                f"{sorted(counts)} blocks; one block id must reach all of them alike"
            )
        return memory, strides.pop(), counts.pop()

    def addressing(self) -> PageAddressing:
        """Page bytes to memory, as boxes (left: page, right: memory)."""
        boxes: list[Box] = []
        for name, this in self.fields.items():
            page, memory = self.page[name], self.memory[name]
            axes: list[list[tuple[int, int, tuple[Level, ...]]]] = [[(0, 0, ((this.elem, 1, 1),))]]
            names = [axis.name for axis in this.axes]
            if KERNEL_BLOCK in page.strides:
                names.append(KERNEL_BLOCK)
            for axis_name in names:
                axis = Axis(KERNEL_BLOCK, 0) if axis_name == KERNEL_BLOCK else this.axis(axis_name)
                level = (
                    self.extent(this, axis),
                    page.strides[axis_name],
                    memory.strides[axis_name],
                )
                axes.append([(0, 0, (level,))])
            boxes.extend(nested(page.offset, memory.offset, axes))
        boxes.sort(key=lambda box: box.left)
        return PageAddressing(
            self.view.base,
            self.block_stride,
            self.num_blocks,
            self.page_bytes,
            folded(boxes),
        )


def layout_fields(spec: LayerSpec, view: CacheView) -> dict[str, Field]:
    """The layer's fields as the layout sees them, by name.

    A per-head layout sees one undescribed span per head instead of the fields within.
    """
    fields = {f.name: f for f in spec.fields}
    if not view.layout.per_head:
        return fields
    heads = spec.num_kv_heads
    if heads is None:
        raise LayoutError(f"layout {view.layout.name!r} needs KV heads, the layer has none")
    tokens = view.block_size // view.kernel_blocks
    span = spec.canonical_bytes(tokens) // heads
    axes = (Axis(HEAD, heads, heads), Axis("span_byte", span))
    return {"head_span": Field("head_span", axes, 1)}


class _TensorReader:
    """Reads one tensor against one part: which stride belongs to which axis, and are they sane."""

    def __init__(
        self, tensor: TensorView, dims: Sequence[str], order: Nest, page: Recognised
    ) -> None:
        self.tensor, self.dims, self.page = tensor, tuple(dims), page
        self.order = order
        if len(tensor.shape) != len(self.dims):
            flexible = self._with_flexible_cells()
            if flexible is None:
                raise LayoutError(
                    f"a tensor of shape {tensor.shape} has {len(tensor.shape)} dimensions, layout "
                    f"{page.view.layout.name!r} has {len(self.dims)}: {', '.join(self.dims)}"
                )
            self.dims = flexible
        self.block_stride = self._stride_of(BLOCK)
        self.num_blocks = tensor.shape[self.dims.index(BLOCK)]
        self._check_shape()
        self._check_cell()
        self._check_order()
        self._check_overlap()

    def _with_flexible_cells(self) -> tuple[str, ...] | None:
        # Cells only have to be dense, so any number of dimensions of them will do.
        head = tuple(dim for dim in self.dims if dim != CELL)
        if self.dims[: len(head)] != head or len(self.tensor.shape) <= len(head):
            return None
        return head + (CELL,) * (len(self.tensor.shape) - len(head))

    def _stride_of(self, dim: str) -> int:
        return self.tensor.strides[self.dims.index(dim)]

    def _named(self) -> Iterator[tuple[str, int, int]]:
        for dim, size, stride in zip(
            self.dims, self.tensor.shape, self.tensor.strides, strict=True
        ):
            if dim != CELL:
                yield dim, size, stride

    def _body(self) -> Nest:
        # The part's order below the loop over kernel blocks.
        inner = self.order.body[0]
        if self.order.axes == (KERNEL_BLOCK,) and isinstance(inner, Nest):
            return inner
        return self.order

    def _leaves(self) -> list[Field]:
        return [self.page.fields[leaf] for leaf in self.order.leaves()]

    def _check_shape(self) -> None:
        for dim, size, _ in self._named():
            if dim == BLOCK:
                expected = size
            elif dim == HALF:
                expected = len(self._body().body)
            else:
                expected = self._axis_extent(dim)
            if size != expected:
                raise LayoutError(
                    f"shape {self.tensor.shape}: dimension {dim!r} is {size}, "
                    f"{expected} expected (block_size {self.page.view.block_size}, "
                    f"{self.page.view.kernel_blocks} kernel blocks per block)"
                )

    def _axis_extent(self, dim: str) -> int:
        extents = set()
        for this in self._leaves():
            if dim not in {axis.name for axis in this.axes}:
                raise LayoutError(
                    f"layout {self.page.view.layout.name!r} has a {dim!r} dimension, "
                    f"field {this.name!r} has no such axis"
                )
            extents.add(self.page.extent(this, this.axis(dim)))
        if len(extents) != 1:
            raise LayoutError(f"fields of one tensor disagree on {dim!r}: {sorted(extents)}")
        return extents.pop()

    def _cell_extent(self, this: Field, axis: Axis) -> int:
        return 1 if axis.name in self.dims else self.page.extent(this, axis)

    def _cells(self) -> tuple[dict[str, Placement], int]:
        """Placement within one cell: axes that have a dimension of their own count once."""
        order = self._body()
        if HALF not in self.dims:
            return place(order, self.page.fields, self._cell_extent)
        placements: dict[str, Placement] = {}
        sizes = set()
        for item in order.body:
            half = item if isinstance(item, Nest) else Nest((), (item,))
            placed, size = place(half, self.page.fields, self._cell_extent)
            placements.update(placed)
            sizes.add(size)
        if len(sizes) != 1:
            raise LayoutError(
                f"halves of {sorted(sizes)} bytes cannot share one tensor dimension; declare a "
                "packed layout or separate parts"
            )
        return placements, sizes.pop()

    def _check_cell(self) -> None:
        sizes = [
            (size, stride)
            for dim, size, stride in zip(
                self.dims, self.tensor.shape, self.tensor.strides, strict=True
            )
            if dim == CELL
        ]
        _, cell_bytes = self._cells()
        have = prod(size for size, _ in sizes) * self.tensor.itemsize
        if have != cell_bytes:
            raise LayoutError(
                f"shape {self.tensor.shape}, {self.tensor.itemsize} bytes per element: a cell has "
                f"{have} bytes, the layer's fields need {cell_bytes}"
            )
        step = self.tensor.itemsize
        for size, stride in reversed(sizes):
            if size > 1 and stride != step:
                raise LayoutError(
                    f"strides {self.tensor.strides}: a cell must be contiguous, found a step of "
                    f"{stride} bytes where {step} was expected"
                )
            step *= size

    def _check_order(self) -> None:
        """Dimensions with more than one element must descend in the declared order."""
        wanted = [dim for dim in self._loop_order() if dim in self.dims]
        held = {dim: (size, stride) for dim, size, stride in self._named()}
        telling = [dim for dim in wanted if held[dim][0] > 1]
        for outer, inner in pairwise(telling):
            if held[outer][1] < held[inner][1]:
                raise LayoutError(
                    f"strides {self.tensor.strides} step {held[outer][1]} bytes per {outer!r} and "
                    f"{held[inner][1]} per {inner!r}; layout {self.page.view.layout.name!r} has "
                    f"{outer!r} outside {inner!r}"
                )

    def _loop_order(self) -> list[str]:
        order = [HALF]
        nest: Nest | str = self._body()
        while isinstance(nest, Nest):
            order.extend(nest.axes)
            nest = nest.body[0]
        return order

    def _check_overlap(self) -> None:
        _, reach = self._cells()
        telling = [(stride, size, dim) for dim, size, stride in self._named() if size > 1]
        for stride, size, dim in sorted(telling):
            if stride < reach:
                raise LayoutError(
                    f"strides {self.tensor.strides}: a step of {stride} bytes per {dim!r} overlaps "
                    f"the {reach} bytes it steps over"
                )
            reach = stride * (size - 1) + reach

    def placements(self, shift: int) -> dict[str, Placement]:
        """Memory placement of this part's fields, `shift` bytes from the layer's base address."""
        placed, _ = self._cells()
        halves = list(self._body().body) if HALF in self.dims else []
        for index, item in enumerate(halves):
            leaves = item.leaves() if isinstance(item, Nest) else iter((item,))
            for leaf in leaves:
                placed[leaf].offset += index * self._stride_of(HALF)
        for this in placed.values():
            this.offset += shift
            for dim, _, stride in self._named():
                if dim in this.strides:
                    this.strides[dim] = stride
            if self.page.view.kernel_blocks > 1:
                this.strides[KERNEL_BLOCK] = self.block_stride
        return placed


def _loops(nest: Nest) -> set[str]:
    """Axes that `nest` loops over, at any depth."""
    inner = [_loops(item) for item in nest.body if isinstance(item, Nest)]
    return set(nest.axes).union(*inner)


def detect_layout(
    tensor: Any, spec: LayerSpec, *, block_size: int, local_heads: int | None = None
) -> Layout:
    """The unique known layout that shape and strides of `tensor` allow.

    Args:
        tensor: torch tensor, numpy array or TensorView.
        spec: what the layer caches.
        block_size: tokens per block.
        local_heads: KV heads that the tensor holds; all of the layer's if not given.

    Raises LayoutError where none fits, or where several do: then it must be declared.
    """
    view = tensor if isinstance(tensor, TensorView) else TensorView.of(tensor)

    def extent(this: Field, axis: Axis) -> int:
        return local_heads if axis.name == HEAD and local_heads else axis.extent

    fitting, reasons = [], []
    for layout in LAYOUTS.values():
        if len(layout.parts) != 1 or layout.per_head or layout.name in ("state", "pages"):
            continue
        if spec.num_kv_heads and HEAD not in _loops(layout.order):
            # It does not say where heads are, so any dense cell would fit it: a guess.
            continue
        try:
            Recognised(spec, CacheView((view,), layout, block_size), extent)
        except LayoutError as error:
            reasons.append(f"{layout.name}: {error}")
        else:
            fitting.append(layout)
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        names = ", ".join(layout.name for layout in fitting)
        raise LayoutError(
            f"layer {spec.name!r}: shape {view.shape} and strides {view.strides} allow {names}; "
            "declare the one it is"
        )
    raise LayoutError(
        f"layer {spec.name!r}: no known layout fits shape {view.shape}, strides {view.strides}; "
        + "; ".join(reasons)
    )
