"""Which rank holds which byte: pages as grids, read left to right and top to bottom in byte order.

A page's byte order is a nest of loops; the outermost loop becomes rows, the next one columns, and
what lies innermost becomes neighbouring cells. So a fragment is what stays together in a row, and a
layout looks like what it is. Values come from a mapping's runs, asked at the first byte of each
cell; drawing is somebody else's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from vkvmap.configuration import Configuration
from vkvmap.derive import derive_group
from vkvmap.layout import place
from vkvmap.mapping import CanonicalPageMapping, CopyRun, Family, Mappings
from vkvmap.paged import views_of
from vkvmap.sharing import FamilyChoice, decide
from vkvmap.spec import HEAD, TOKEN, Axis, Field, LayerSpec, LayerTable, Nest

Offsets = npt.NDArray[np.int64]

#: Rows of a plane at most; longer ones are sampled evenly. Tokens are shown one by one as far as
#: that goes; thousands of channels of state say no more than a few dozen.
_MOST_TOKENS, _MOST_ROWS = 512, 48

#: Value of a cell that belongs to nobody.
NOBODY = -1


@dataclass(frozen=True)
class Plane:
    """A grid of cells in byte order.

    Attributes:
        label: what the plane holds, empty if there is only one.
        rows, columns: what a row and a column stand for, for example ``"token"``.
        parts: names of the neighbouring cells that one column index has.
        row_numbers: index of each row along its axis (rows may be sampled).
        values: int64 ``(rows, columns)``: a rank, or a place in the canonical page in thousandths
            of its cells.
        marks: text for each cell where there is room, same shape; see `short`.
    """

    label: str
    rows: str
    columns: str
    parts: tuple[str, ...]
    row_numbers: tuple[int, ...]
    values: Offsets
    marks: tuple[tuple[str, ...], ...]

    @cached_property
    def _told(self) -> int:
        """The word of a mark that says most: the first, or the last where that never changes."""
        return -1 if len({mark.partition(" ")[0] for row in self.marks for mark in row}) == 1 else 0

    def short(self, row: int, column: int) -> str:
        """The mark of a cell in one word, for where there is no room for all of it."""
        mark = self.marks[row][column]
        return mark.split(" ")[self._told] if mark else ""


@dataclass(frozen=True)
class Panel:
    """One page: its planes, what it is, and whether values are ranks or places.

    `part` is the canonical page once more, with the rank in the cells that this page fills.
    """

    title: str
    note: str
    planes: tuple[Plane, ...]
    by_rank: bool
    part: tuple[Plane, ...] = ()


@dataclass(frozen=True)
class Side:
    """One configuration: its canonical page by writer, and some ranks' pages by destination."""

    configuration: str
    ranks: int
    canonical: Panel
    local: tuple[Panel, ...]


@dataclass(frozen=True)
class Picture:
    """The pages of one layer under one or two configurations."""

    title: str
    note: str
    sides: tuple[Side, ...]


def draw(
    model: str,
    table: LayerTable,
    layer: str,
    sides: Sequence[Configuration],
    *,
    family: FamilyChoice = "auto",
    ranks: Sequence[int] = (0, 1),
    page: int = 0,
) -> Picture:
    """The pages of `layer` under each of `sides`.

    Args:
        ranks: whose local pages to show; those that a side does not have are left out.
        page: the canonical page id whose writers are shown; replicas take turns by it.

    Raises:
        RefusedError: the layer cannot be certified under one of the sides.
    """
    spec = table[layer]
    alone = LayerTable([spec])
    sharing = decide(alone, sides, family)
    drawn = tuple(_side(spec, alone, side, sharing.family, ranks, page) for side in sides)
    return Picture(
        f"{model}: {layer}",
        f"{spec.kind}, {sharing.family} pages; writers of page {page}. Bytes run left to right, "
        "then top to bottom.",
        drawn,
    )


def _side(
    spec: LayerSpec,
    alone: LayerTable,
    side: Configuration,
    family: Family,
    ranks: Sequence[int],
    page: int,
) -> Side:
    view = views_of(alone, alone, side, 0)
    group = derive_group(alone, view, side.grid, family=family, strict=True)
    layout = view[spec.name].layout
    own = layout.order.bound_to(spec.fields)
    whole = spec.canonical if family == "universal" or spec.kind == "recurrent" else own
    first = group[0].by_layer[spec.name]
    canonical = _planes(whole, spec, _extent(first.span_tokens, None))
    writers = _writers(group, spec.name, page)
    writing = sorted({rank for rank, _ in writers})
    panel = Panel(
        "canonical page",
        f"{first.canonical_page_size_bytes:,} bytes"
        + (f", {first.span_tokens} tokens" if first.span_tokens else "")
        + f"; written by rank {_some(writing)}",
        tuple(_by_writer(plane, writers) for plane in canonical),
        True,
    )
    every = _planes(whole, spec, _extent(first.span_tokens, None), sampled=False)
    local = []
    for rank in ranks:
        if rank >= side.grid.size:
            continue
        mapping = group[rank].by_layer[spec.name]
        extent = _extent(side.block_size, side.grid.held_units, rank, spec.name)
        turn = f"writes every page b with b % {mapping.num_writers} == {mapping.writer_index}"
        local.append(
            Panel(
                f"page on rank {rank}",
                f"{mapping.local_page_size_bytes:,} bytes in {_pieces(mapping.num_fragments)}; "
                + ("the only writer of its bytes" if mapping.num_writers == 1 else turn),
                tuple(
                    _by_place(plane, mapping, canonical, every)
                    for plane in _planes(own, spec, extent)
                ),
                False,
                tuple(_part(plane, rank, mapping) for plane in canonical),
            )
        )
    return Side(str(side), side.grid.size, panel, tuple(local))


def _pieces(count: int) -> str:
    return "one piece" if count == 1 else f"{count:,} pieces"


def _some(ranks: Sequence[int]) -> str:
    if len(ranks) > 8:
        return f"{ranks[0]}, {ranks[1]}, ... {ranks[-1]}"
    return ", ".join(map(str, ranks))


def _writers(
    group: Sequence[Mappings], layer: str, page: int
) -> list[tuple[int, CanonicalPageMapping]]:
    return [
        (rank, mappings.by_layer[layer])
        for rank, mappings in enumerate(group)
        if mappings.by_layer[layer].is_writer(page)
    ]


# ---- cells ---------------------------------------------------------------------------------------

Extent = Callable[[Field, Axis], int]


@dataclass(frozen=True)
class _Cells:
    """Cells of a plane: byte offsets ``(rows, columns)`` in the page, and how to name them."""

    label: str
    rows: str
    columns: str
    parts: tuple[str, ...]
    offsets: Offsets
    row_numbers: Offsets


def _extent(
    tokens: int, held: Callable[..., tuple[int, int] | None] | None, *who: object
) -> Extent:
    """Extents of a whole page, or with `held` of the page of a rank."""

    def of(this: Field, axis: Axis) -> int:
        if axis.name == TOKEN:
            return tokens
        if held is None or not axis.units:
            return axis.extent
        rank, layer = who
        part = held(rank, axis.units, layer)
        return axis.extent // axis.units * (part[1] - part[0]) if part else axis.extent

    return of


def _planes(order: Nest, spec: LayerSpec, extent: Extent, *, sampled: bool = True) -> list[_Cells]:
    fields = {this.name: this for this in spec.fields}
    placed, _ = place(order, fields, extent)
    branches: list[Nest | str] = list(order.body) if not order.axes else [order]
    planes = []
    for branch in branches:
        nest = branch if isinstance(branch, Nest) else Nest((), (branch,))
        leaves = list(nest.leaves())
        axes = list(nest.axes) or [axis.name for axis in fields[leaves[0]].axes[:1]]
        first = fields[leaves[0]]
        sizes = [extent(first, first.axis(name)) for name in axes[:2]]
        starts = np.array([placed[leaf].offset for leaf in leaves], np.int64)
        most = _MOST_TOKENS if axes[0] in (TOKEN, HEAD) else _MOST_ROWS
        numbers = _sampled(sizes[0], most if sampled else sizes[0])
        rows = numbers * placed[leaves[0]].strides[axes[0]]
        columns = starts
        if len(axes) > 1:
            steps = np.arange(sizes[1], dtype=np.int64) * placed[leaves[0]].strides[axes[1]]
            columns = (steps[:, None] + starts[None, :]).ravel()
        label = ", ".join(leaves) if len(branches) > 1 else ""
        planes.append(
            _Cells(
                label.upper() if len(label) == 1 else label,
                axes[0],
                axes[1] if len(axes) > 1 else "",
                tuple(leaves),
                rows[:, None] + columns[None, :],
                numbers,
            )
        )
    return planes


def _sampled(count: int, most: int) -> Offsets:
    step = -(-count // most)
    return np.arange(0, count, step, dtype=np.int64)


def _locate(offsets: Offsets, runs: Iterable[CopyRun], *, canonical: bool) -> Offsets:
    """The other side's byte for each offset, -1 where no run covers it."""
    found = np.full(offsets.shape, NOBODY, np.int64)
    for run in runs:
        here, there = run.local_offset, run.canonical_offset
        step, other = run.local_stride, run.canonical_stride
        if canonical:
            here, there, step, other = there, here, other, step
        if run.num_fragments == 1:
            step = other = run.fragment_size
        index, within = np.divmod(offsets - here, step)
        inside = (index >= 0) & (index < run.num_fragments) & (within < run.fragment_size)
        found = np.where(inside, there + index * other + within, found)
    return found


def _by_writer(cells: _Cells, writers: Sequence[tuple[int, CanonicalPageMapping]]) -> Plane:
    values = np.full(cells.offsets.shape, NOBODY, np.int64)
    for rank, mapping in writers:
        covered = _locate(cells.offsets, mapping.effective_store_runs, canonical=True) >= 0
        values[covered] = rank
    listed: Any = values.tolist()
    marks = tuple(tuple("" if v < 0 else str(v) for v in row) for row in listed)
    return _plane(cells, values, marks)


def _by_place(
    cells: _Cells,
    mapping: CanonicalPageMapping,
    canonical: Sequence[_Cells],
    every: Sequence[_Cells],
) -> Plane:
    """Cells by where they go: which of `canonical`'s cells, in thousandths; named as in `every`."""
    first = _locate(cells.offsets, mapping.runs, canonical=False)
    last = _locate(_ends(cells, mapping), mapping.runs, canonical=False)
    starts, ends, count = *_found(first, last, canonical), sum(c.offsets.size for c in canonical)
    names = [name for plane in every for name in _names(plane)]
    from_cell, to_cell = (found.tolist() for found in _found(first, last, every, ordered=False))
    marks = tuple(
        tuple(_from_to(names[a], names[b]) for a, b in zip(*pair, strict=True))
        for pair in zip(from_cell, to_cell, strict=True)
    )
    return _plane(cells, (starts + ends) * 500 // max(count - 1, 1), marks)


def _found(
    first: Offsets, last: Offsets, cells: Sequence[_Cells], *, ordered: bool = True
) -> tuple[Offsets, Offsets]:
    """Cells that hold the bytes `first` and `last`: places in byte order, or indices."""
    order: Offsets = np.concatenate([plane.offsets.ravel() for plane in cells])
    ascending = np.argsort(order, kind="stable")
    places = [np.searchsorted(order[ascending], each, side="right") - 1 for each in (first, last)]
    start, stop = places if ordered else [ascending[each] for each in places]
    return start, stop


def _part(cells: _Cells, rank: int, mapping: CanonicalPageMapping) -> Plane:
    """The canonical page with `rank` where its page goes."""
    covered = _locate(cells.offsets, mapping.runs, canonical=True) >= 0
    return _plane(cells, np.where(covered, np.int64(rank), np.int64(NOBODY)), ())


def _ends(cells: _Cells, mapping: CanonicalPageMapping) -> Offsets:
    """The last byte of each cell; its first where rows are sampled and the next is not known."""
    if len(cells.row_numbers) > 1 and cells.row_numbers[1] > 1:
        return cells.offsets
    flat = np.sort(cells.offsets.ravel())
    row = int(cells.offsets[-1, 0] - cells.offsets[-2, 0]) if len(cells.offsets) > 1 else 0
    stop = int(cells.offsets[-1, 0]) + row if row else mapping.local_page_size_bytes
    following: Offsets = np.append(flat, stop)[np.searchsorted(flat, cells.offsets, "right")]
    return following - 1


def _from_to(first: str, last: str) -> str:
    """``"t0 h1"``, or ``"t0..t15 h1"`` where a cell's bytes go to a range of rows."""
    start, _, rest = first.partition(" ")
    stop = last.partition(" ")[0]
    return first if start == stop else f"{start}..{stop} {rest}"


def _plane(cells: _Cells, values: Offsets, marks: tuple[tuple[str, ...], ...]) -> Plane:
    return Plane(
        cells.label,
        cells.rows,
        cells.columns,
        cells.parts,
        tuple(int(number) for number in cells.row_numbers),
        values,
        marks,
    )


def _names(cells: _Cells) -> list[str]:
    """What each cell is, row by row: ``"t3 h5"``; the first word alone says enough."""
    columns = cells.offsets.shape[1]
    parts = len(cells.parts)
    return [
        f"{cells.rows[0]}{number}" + (f" {cells.columns[0]}{c // parts}" if cells.columns else "")
        for number in cells.row_numbers.tolist()
        for c in range(columns)
    ]


def default_layer(table: LayerTable) -> str:
    """The layer to show where none was named: the first with heads, or else the first."""
    for name, spec in table.items():
        if any(axis.name == HEAD for this in spec.fields for axis in this.axes) and spec.has_tokens:
            return name
    return next(iter(table))
