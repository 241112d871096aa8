"""A rank's paged cache as an engine would allocate it: tensor shapes for a layer in a layout.

For tools that talk about caches which no engine has made yet (explain, pictures, round trips). A
shape is worked out from head counts and block size alone; what it means is the layout's business,
and whether it is right is checked like any engine's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from vkvmap.cache import CacheView, TensorView
from vkvmap.configuration import Configuration
from vkvmap.grid import RankGrid
from vkvmap.layout import BLOCK, CELL, HALF, LAYOUTS, PAGE_DIMS, Layout
from vkvmap.spec import HEAD, TOKEN, Axis, Field, LayerSpec, LayerTable, Nest

#: Layouts of the kinds of layer that an attention layout does not apply to.
_OWN_LAYOUT = {"mla": "mla", "indexer": "planar", "recurrent": "state", "opaque": "pages"}


@dataclass(frozen=True)
class PagedLayer:
    """Shape and byte strides of one layer's uint8 tensor on one rank.

    `page_bytes` are the bytes of one block, without the padding that follows it.
    """

    name: str
    layout: Layout
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    page_bytes: int
    block_size: int

    @property
    def nbytes(self) -> int:
        """Bytes from the first block to the end of the last, padding included."""
        return self.shape[0] * self.strides[0]

    def view(self, address: int = 0, storage: tuple[int, int] | None = None) -> CacheView:
        """The cache view of this layer at `address` (0: nowhere, to reason about only)."""
        tensor = TensorView(address, self.shape, self.strides, 1, storage or (address, self.nbytes))
        return CacheView((tensor,), self.layout, self.block_size)


def layout_for(spec: LayerSpec, attention_layout: str) -> Layout:
    """The layout of a layer where attention layers are in `attention_layout`."""
    return LAYOUTS[_OWN_LAYOUT.get(spec.kind, attention_layout)]


def paged_layer(
    spec: LayerSpec,
    configuration: Configuration,
    rank: int,
    *,
    num_blocks: int = 1,
    padding: int = 0,
) -> PagedLayer:
    """The tensor of `spec` on `rank`: `num_blocks` pages with `padding` bytes behind each.

    Heads that do not deal out over the ranks are rounded up, as an engine would have to allocate
    them; the derivation then refuses the layer and says why.
    """
    layout = layout_for(spec, configuration.layout)
    block = configuration.block_size if spec.has_tokens else 0
    extents = _Extents(spec, configuration.grid, rank, block)
    dims = PAGE_DIMS if len(layout.parts) != 1 else layout.parts[0].dims
    sizes = [num_blocks if dim == BLOCK else extents.of_dim(dim, dims) for dim in dims]
    cells = [i for i, dim in enumerate(dims) if dim == CELL]
    for index, size in zip(cells, extents.cell(dims, layout), strict=True):
        sizes[index] = size
    page = prod(sizes[1:])
    strides = [0] * len(sizes)
    step = 1
    for index in reversed(_memory_order(dims, layout)):
        strides[index] = step
        step *= sizes[index]
    strides[0] = page + padding
    return PagedLayer(spec.name, layout, tuple(sizes), tuple(strides), page, block)


def views_of(
    table: LayerTable, names: Iterable[str], configuration: Configuration, rank: int
) -> dict[str, CacheView]:
    """Views at no address of the named layers, for derivations that move nothing."""
    return {name: paged_layer(table[name], configuration, rank).view() for name in names}


def _memory_order(dims: Sequence[str], layout: Layout) -> list[int]:
    """Dimensions outermost first, as the layout's order has them; cells innermost."""
    order: list[str] = []
    nest: Nest | str = layout.order
    while not isinstance(nest, str):
        order.extend(nest.axes)
        nest = nest.body[0]
    outer = [i for i, dim in enumerate(dims) if dim in (BLOCK, HALF)]
    loops = sorted(
        (i for i, dim in enumerate(dims) if dim in (TOKEN, HEAD)),
        key=lambda i: order.index(dims[i]) if dims[i] in order else len(order),
    )
    return [*outer, *loops, *(i for i, dim in enumerate(dims) if dim == CELL)]


class _Extents:
    def __init__(self, spec: LayerSpec, grid: RankGrid, rank: int, block_size: int) -> None:
        self.spec, self.grid, self.rank, self.block_size = spec, grid, rank, block_size

    def of_axis(self, axis: Axis) -> int:
        if axis.name == TOKEN:
            return self.block_size
        if not axis.units:
            return axis.extent
        held = self.grid.held_units(self.rank, axis.units, self.spec.name)
        units = held[1] - held[0] if held else -(-axis.units // self.grid.tp)
        return units * (axis.extent // axis.units)

    def of_dim(self, dim: str, dims: Sequence[str]) -> int:
        if dim == HALF:
            return 2
        for this in self.spec.fields:
            for axis in this.axes:
                if axis.name == dim:
                    return self.of_axis(axis)
        return 1

    def of_field(self, this: Field, without: Sequence[str]) -> int:
        return this.elem * prod(self.of_axis(a) for a in this.axes if a.name not in without)

    def cell(self, dims: Sequence[str], layout: Layout) -> list[int]:
        """Sizes of the cell dimensions: two of them keep tokens (and row) or (dim, token) apart."""
        per_field = {f.name: self.of_field(f, dims) for f in self.spec.fields}
        total = sum(per_field.values())
        if HALF in dims:
            halves = [sum(n for f, n in per_field.items() if f[0] == half) for half in "kv"]
            total = max(halves)
        if list(dims).count(CELL) == 1:
            return [total]
        tokens = self.block_size or 1
        return [tokens, total // tokens]
