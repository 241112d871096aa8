"""A picture laid out on paper: rectangles and words with positions, for SVG, PNG and HTML alike.

Sides stand beside each other; under each heading the canonical page by writer, then pages of ranks
by where their bytes go, each with a small canonical page beside it that shows the part it fills.
Cells shrink with their number; neighbours of one colour become one rectangle, so that a large page
stays a small file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from vkvmap.describe import colour
from vkvmap.describe.colour import RGB
from vkvmap.describe.picture import Panel, Picture, Plane, Side

INK: RGB = (28, 30, 36)
SOFT: RGB = (104, 110, 122)
LINE: RGB = (206, 210, 218)
PAPER: RGB = (255, 255, 255)

Paint = Callable[[int], RGB]

_MARGIN = 28
_GAP = 44
_WIDTH = 560  # of one side
_CELL = 30.0  # largest width of a cell
_ROW = (2.0, 12.0, 22.0)  # height of a row: at least, wished for, at most
_PANEL_HEIGHT = 520.0  # a page is not drawn taller than this unless its rows would vanish
_GUTTER = 34.0  # for row numbers
_BETWEEN = 14.0  # planes
_PART = (104.0, 120.0)  # width and greatest height of the part that a page fills


@dataclass(frozen=True)
class Rect:
    """A filled rectangle; `radius` rounds it, `stroke` outlines it."""

    x: float
    y: float
    w: float
    h: float
    fill: RGB
    stroke: RGB | None = None
    radius: float = 0.0


@dataclass(frozen=True)
class Words:
    """Text with its baseline's start, centre or end at (x, y)."""

    x: float
    y: float
    text: str
    size: float
    fill: RGB = INK
    anchor: str = "start"
    bold: bool = False


@dataclass
class Scene:
    """Everything to draw, in order; `width` and `height` in pixels."""

    width: float = 0.0
    height: float = 0.0
    title: str = ""
    items: list[Rect | Words] = field(default_factory=list)

    def add(self, item: Rect | Words) -> None:
        """Put `item` on top."""
        self.items.append(item)


def lay_out(picture: Picture) -> Scene:
    """The scene of `picture`."""
    scene = Scene(title=picture.title)
    top = _MARGIN + 20.0
    scene.add(Words(_MARGIN, top, picture.title, 19, bold=True))
    top += 22
    scene.add(Words(_MARGIN, top, picture.note, 12.5, SOFT))
    top += 30
    bottom = top
    for index, side in enumerate(picture.sides):
        left = _MARGIN + index * (_WIDTH + _GAP)
        arrow = ("from  ", "to  ")[index] if len(picture.sides) == 2 else ""
        bottom = max(bottom, _side(scene, side, arrow, left, top))
    if len(picture.sides) == 2:
        middle = _MARGIN + _WIDTH + _GAP / 2
        scene.items.insert(0, Rect(middle - 0.5, top, 1, bottom - top, LINE))
    scene.width = 2 * _MARGIN + len(picture.sides) * (_WIDTH + _GAP) - _GAP
    scene.height = bottom + _MARGIN
    scene.items.insert(0, Rect(0, 0, scene.width, scene.height, PAPER))
    return scene


def _side(scene: Scene, side: Side, arrow: str, left: float, top: float) -> float:
    scene.add(Words(left, top + 12, f"{arrow}{side.configuration}", 15, bold=True))
    top = _ranks_legend(scene, side, left, top + 30)
    top = _panel(scene, side.canonical, side.ranks, left, top)
    if side.local:
        top = _ramp_legend(scene, left, top + 6)
    for panel in side.local:
        top = _panel(scene, panel, side.ranks, left, top)
    return top


def _ranks_legend(scene: Scene, side: Side, left: float, top: float) -> float:
    used = sorted(
        {v for plane in side.canonical.planes for row in plane.values.tolist() for v in row}
    )
    x, y = left, top
    for rank in used:
        if rank < 0:
            continue
        if x > left + _WIDTH - 62:
            x, y = left, y + 18
        scene.add(Rect(x, y, 12, 12, colour.of_rank(rank, side.ranks), radius=2))
        scene.add(Words(x + 17, y + 10.5, f"rank {rank}", 11.5, SOFT))
        x += 62
    return y + 30


def _ramp_legend(scene: Scene, left: float, top: float) -> float:
    scene.add(Words(left, top + 10, "first byte of the canonical page", 11.5, SOFT))
    start, steps = left + 180, 60
    for step in range(steps):
        shade = colour.of_place(1000 * step // (steps - 1))
        scene.add(Rect(start + 3 * step, top, 3.4, 12, shade))
    scene.add(Words(start + 3 * steps + 8, top + 10, "last", 11.5, SOFT))
    return top + 32


def _panel(scene: Scene, panel: Panel, ranks: int, left: float, top: float) -> float:
    scene.add(Words(left, top + 11, panel.title, 13.5, bold=True))
    scene.add(Words(left + 8.0 * len(panel.title) + 8, top + 11, panel.note, 11.5, SOFT))
    top += 22
    first = top
    widest = _WIDTH - (_PART[0] + 2 * _BETWEEN if panel.part else 0)
    room = widest - _GUTTER * len(panel.planes) - _BETWEEN * (len(panel.planes) - 1)
    columns = sum(plane.values.shape[1] for plane in panel.planes)
    rows = max(plane.values.shape[0] for plane in panel.planes)
    # Planes that are wider than tall stand below each other where beside they would be thin.
    stacked = len(panel.planes) > 1 and room / columns < 24 and columns > rows * len(panel.planes)
    if stacked:
        room = widest - _GUTTER
        columns = max(plane.values.shape[1] for plane in panel.planes)
    width = min(_CELL, room / columns)
    low, wished, high = _ROW
    share = _PANEL_HEIGHT / rows
    height = min(high, max(low, min(max(width, wished), share)))
    if columns <= 8:
        width = min(room / columns, 64.0)  # few cells: wide, so that they are seen and named
    if columns <= 2:
        width = min(room / columns, 200.0)
    bottom, x = top, left
    for plane in panel.planes:
        bottom = max(bottom, _plane(scene, panel, plane, ranks, x + _GUTTER, top, width, height))
        if stacked:
            top, bottom = bottom + 8, bottom + 8
        else:
            x += _GUTTER + width * plane.values.shape[1] + _BETWEEN
    if panel.part:
        bottom = max(bottom, _part(scene, panel, ranks, left + _WIDTH - _PART[0], first))
    return float(bottom + 26)


def _part(scene: Scene, panel: Panel, ranks: int, left: float, top: float) -> float:
    """A small canonical page with the cells that the panel's page fills in the rank's colour."""
    scene.add(Words(left, top + 10, "the part it fills", 9, SOFT))
    top += 16
    wide = (_PART[0] - 3 * (len(panel.part) - 1)) / len(panel.part)
    most = max(plane.values.shape[0] for plane in panel.part)
    tall = min(_PART[1], 7.5 * most)
    for plane in panel.part:
        rows, columns = plane.values.shape
        w, h = wide / columns, tall / most
        scene.add(Rect(left, top, wide, rows * h, colour.of_rank(-1, ranks)))
        for row, column, down, across in _merged(plane, lambda v: colour.of_rank(v, ranks)):
            if (rank := int(plane.values[row, column])) >= 0:
                shade = colour.of_rank(rank, ranks)
                scene.add(Rect(left + column * w, top + row * h, across * w, down * h, shade))
        left += wide + 3
    return float(top + tall)


def _plane(
    scene: Scene,
    panel: Panel,
    plane: Plane,
    ranks: int,
    left: float,
    top: float,
    width: float,
    height: float,
) -> float:
    rows, columns = plane.values.shape
    head = " ".join(filter(None, (plane.label, _columns_named(plane))))
    scene.add(Words(left, top + 10, head, 10.5, SOFT))
    top += 16
    _row_numbers(scene, plane, left, top, height)
    paint = _painter(panel, ranks)
    for row, column, tall, wide in _merged(plane, paint):
        shade = paint(int(plane.values[row, column]))
        scene.add(
            Rect(left + column * width, top + row * height, wide * width, tall * height, shade)
        )
    _grid(scene, plane, left, top, width, height)
    if height >= 11 and width >= 15:
        for row in range(rows):
            for column in range(columns):
                shade = paint(int(plane.values[row, column]))
                mark = plane.marks[row][column]
                if len(mark) * 5.5 > width:
                    mark = plane.short(row, column)
                text = min(10.0, height - 3, width / max(len(mark), 1) * 1.5)
                scene.add(
                    Words(
                        left + (column + 0.5) * width,
                        top + (row + 0.5) * height + text * 0.36,
                        mark,
                        text,
                        colour.ink(shade),
                        "middle",
                    )
                )
    scene.add(Rect(left, top, columns * width, rows * height, PAPER, stroke=SOFT))
    return float(top + rows * height)


def _columns_named(plane: Plane) -> str:
    parts = ", ".join(plane.parts)
    if plane.columns:
        return f"{plane.columns}s ->" if len(plane.parts) == 1 else f"{plane.columns}s ({parts}) ->"
    return "" if plane.label else f"({parts})"


_SHORT = {"channel": "chan."}


def _row_numbers(scene: Scene, plane: Plane, left: float, top: float, height: float) -> None:
    rows = plane.values.shape[0]
    every = 1
    while every * height < 11:
        every *= 2
    scene.add(Words(left - 5, top - 6, _SHORT.get(plane.rows, plane.rows), 9, SOFT, "end"))
    for row in range(0, rows, every):
        middle = top + row * height + (height / 2 + 3.2 if height >= 11 else 8.5)
        scene.add(Words(left - 5, middle, str(plane.row_numbers[row]), 9, SOFT, "end"))


def _grid(scene: Scene, plane: Plane, left: float, top: float, width: float, height: float) -> None:
    """Thin light lines between cells where these are large enough to bear them."""
    rows, columns = plane.values.shape
    if min(width, height) >= 9:
        for column in range(1, columns):
            edge = 1.4 if column % max(len(plane.parts), 1) == 0 else 0.6
            x = left + column * width
            scene.add(Rect(x - edge / 2, top, edge, rows * height, PAPER))
        for row in range(1, rows):
            scene.add(Rect(left, top + row * height - 0.4, columns * width, 0.8, PAPER))


def _painter(panel: Panel, ranks: int) -> Paint:
    if panel.by_rank:
        return lambda value: colour.of_rank(value, ranks)
    return colour.of_place


def _merged(plane: Plane, paint: Paint) -> Iterator[tuple[int, int, int, int]]:
    """Rectangles ``(row, column, rows, columns)`` of one colour: runs in a row, then equal rows."""
    open_rows: dict[tuple[int, int, RGB], int] = {}
    rows = plane.values.shape[0]
    for row in range(rows + 1):
        spans: set[tuple[int, int, RGB]] = set()
        if row < rows:
            spans = set(_spans([paint(int(value)) for value in plane.values[row]]))
        for key in [key for key in open_rows if key not in spans]:
            start, stop, _ = key
            yield open_rows[key], start, row - open_rows.pop(key), stop - start
        for key in spans:
            open_rows.setdefault(key, row)


def _spans(colours: Sequence[RGB]) -> Iterator[tuple[int, int, RGB]]:
    start = 0
    for stop in range(1, len(colours) + 1):
        if stop == len(colours) or colours[stop] != colours[start]:
            yield start, stop, colours[start]
            start = stop
