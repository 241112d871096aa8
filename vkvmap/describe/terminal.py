"""Pictures in a terminal: coloured cells, or characters where there is no colour.

Without colour a cell is a digit: the rank, or how far along the canonical page its bytes go (0 to
z), or the token they go to where there is room. A page with more rows than the screen and few
columns goes on beside itself, as in a newspaper. Where it has more cells than that leaves room for,
a cell stands for several: in colour it shows their mixture, without colour ``+`` where ranks
differ, so that a stripe cannot vanish unnoticed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest

from rich.style import Style
from rich.text import Text

from vkvmap.describe import colour
from vkvmap.describe.colour import RGB
from vkvmap.describe.picture import Panel, Picture, Plane, Side

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_GUTTER = 5
_BETWEEN = 3


def lines(picture: Picture, width: int, *, colours: bool = True, height: int = 32) -> list[Text]:
    """`picture` as lines of at most `width` columns; a page takes at most `height` of them."""
    out = [Text(picture.title, style="bold"), Text(picture.note, style="dim"), Text()]
    count = len(picture.sides)
    room = (width - _BETWEEN * (count - 1)) // count
    columns = [_side(side, room, height, colours) for side in picture.sides]
    for parts in zip_longest(*columns, fillvalue=Text()):
        line = Text()
        for index, part in enumerate(parts):
            part = part.copy()
            part.truncate(room, overflow="ellipsis")
            line.append_text(part)
            if index + 1 < count:
                line.append(" " * (room - part.cell_len + _BETWEEN))
        if not colours:  # a coloured cell is a space that must not go
            line.rstrip()
        out.append(line)
    return out


def _side(side: Side, room: int, height: int, colours: bool) -> list[Text]:
    out = [Text(side.configuration, style="bold"), Text()]
    out += _panel(side.canonical, side.ranks, room, height, colours)
    for panel in side.local:
        out += [Text(), *_panel(panel, side.ranks, room, height, colours)]
    return out


def _panel(panel: Panel, ranks: int, room: int, height: int, colours: bool) -> list[Text]:
    out = [Text(panel.title, style="bold underline"), Text(panel.note, style="dim")]
    planes = _beside(panel.planes, room, height)
    total = sum(plane.values.shape[1] for plane in planes)
    usable = room - (_GUTTER + 1) * len(planes)
    fold = max(1, -(-total // max(usable, 1)))
    wide = 4 if 4 * total <= usable and not panel.by_rank else 2 if 2 * total <= usable else 1
    if total <= 2:
        wide = min(16, usable // total)
    elif not panel.by_rank:
        longest = max(len(mark) for plane in planes for row in plane.marks for mark in row)
        if longest <= 7 and (longest + 1) * total <= usable:
            wide = longest + 1
    first, last = panel.planes[0].marks[0][0], panel.planes[-1].marks[-1][-1]
    if not panel.by_rank and wide <= len(last) and " " in last:  # cells cannot say it themselves
        out[0].append_text(Text(f" {first} to {last}", style="not bold not underline"))
    blocks = [_plane(plane, panel, ranks, fold, wide, height, colours) for plane in planes]
    for parts in zip_longest(*blocks, fillvalue=Text()):
        line = Text()
        for block, part in zip(blocks, parts, strict=True):
            edge = max(each.cell_len for each in block)
            line.append_text(part)
            line.append(" " * (edge - part.cell_len + 1))
        out.append(line)
    return out


def _beside(planes: Sequence[Plane], room: int, height: int) -> Sequence[Plane]:
    """`planes` cut into as many as it takes to be no taller than `height`, if these fit."""
    cut = []
    for plane in planes:
        rows = len(plane.row_numbers)
        per = -(-rows // -(-rows // height))
        for start in range(0, rows, per):
            chosen = slice(start, start + per)
            cut.append(
                replace(
                    plane,
                    row_numbers=plane.row_numbers[chosen],
                    values=plane.values[chosen],
                    marks=plane.marks[chosen],
                )
            )
    needed = sum(_GUTTER + 1 + plane.values.shape[1] for plane in cut)
    return cut if needed <= room else planes


def _plane(
    plane: Plane, panel: Panel, ranks: int, fold: int, wide: int, height: int, colours: bool
) -> list[Text]:
    rows, columns = plane.values.shape
    down = -(-rows // height)
    scale = f" (a cell is {down} x {fold})" if down * fold > 1 else ""
    head = f"{plane.label} {plane.columns + 's' if plane.columns else ''}".strip()
    axis = {"token": "tok"}.get(plane.rows, plane.rows[: _GUTTER - 1])
    out = [Text(f"{axis:>{_GUTTER - 1}} {head}{scale}", style="dim")]
    listed: list[list[int]] = plane.values.tolist()
    for row in range(0, rows, down):
        line = Text()
        line.append(f"{plane.row_numbers[row]:>{_GUTTER - 1}} ", style="dim")
        for column in range(0, columns, fold):
            cell = [v for r in listed[row : row + down] for v in r[column : column + fold]]
            alike = len(set(cell)) == 1
            marks = (plane.marks[row][column], plane.short(row, column)) if alike else ("", "")
            _cell(line, cell, marks, wide, panel.by_rank, ranks, colours)
        out.append(line)
    return out


def _cell(
    line: Text,
    cell: Sequence[int],
    marks: tuple[str, str],
    wide: int,
    by_rank: bool,
    ranks: int,
    colours: bool,
) -> None:
    mark, short = marks
    if not colours:
        glyph = "+"
        if not by_rank and short and len(short) < wide:
            glyph = mark if len(mark) < wide else short
        elif len(set(cell)) == 1 or not by_rank:
            glyph = _glyph(cell[0], by_rank)
        line.append(glyph.ljust(wide))
        return
    shades: list[RGB] = [
        colour.of_rank(value, ranks) if by_rank else colour.of_place(value) for value in set(cell)
    ]
    background = colour.blend(shades)
    text = mark if len(mark) <= wide - 1 else short
    text = text if len(text) < wide or (wide > 1 and len(text) == wide) else ""
    style = Style(color=colour.css(colour.ink(background)), bgcolor=colour.css(background))
    line.append(text.center(wide), style=style)


def _glyph(value: int, by_rank: bool) -> str:
    if value < 0:
        return "."
    return _DIGITS[value % len(_DIGITS)] if by_rank else _DIGITS[min(35, value * 36 // 1001)]
