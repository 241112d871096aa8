"""``vkvmap show``: pages as pictures, in the terminal or in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from vkvmap.cli.output import EXIT_CANNOT, EXIT_NO, console, emit_json, fail
from vkvmap.cli.params import JSON, Move, OneOf, Positive, move_options
from vkvmap.describe.picture import Panel, Picture, default_layer, draw
from vkvmap.describe.render import FORMATS, RenderError, write
from vkvmap.describe.terminal import lines
from vkvmap.errors import RefusedError
from vkvmap.nearest import nearest
from vkvmap.spec import LayerTable


@click.command()
@move_options(to_required=False)
@click.option("--layer", help="Layer by name or by a part of it; default: the first with heads.")
@click.option("--ranks", default="0,1", show_default=True, help="Local pages to show: 0,3 or all.")
@click.option(
    "--page",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Canonical page id whose writers are shown; replicas take turns by it.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help=f"Write a file instead, by its suffix: {', '.join('.' + f for f in FORMATS)}.",
)
@click.option(
    "--colour",
    type=OneOf(("auto", "always", "never")),
    default="auto",
    show_default=True,
    help="Colour in the terminal; without it cells are digits.",
)
@click.option("--width", type=Positive(), help="Columns to use; default: the terminal's.")
@JSON
def command(
    move: Move,
    layer: str | None,
    ranks: str,
    page: int,
    out: Path | None,
    colour: str,
    width: int | None,
    as_json: bool,
) -> int:
    """Draw one layer's pages: the canonical page by the rank that writes each byte, and pages of
    ranks by where their bytes go.

    \b
    vkvmap show llama-3-8b --from tp=4,layout=split_nhd --to tp=2
    vkvmap show deepseek-v3 --from tp=8,dcp=4 --out page.svg
    """
    move.check_stages()
    chosen = _layer(move.layers, layer)
    wanted = _ranks(ranks, move.most_ranks)
    if out is not None and out.suffix.lower().lstrip(".") not in FORMATS:
        raise click.BadParameter(
            f"{out.name!r} has no suffix of a picture; write for example {out.stem or 'page'}.svg",
            param_hint="'--out'",
        )
    name = Path(move.model).name
    try:
        picture = draw(
            name, move.layers, chosen, move.sides, family=move.family, ranks=wanted, page=page
        )
    except RefusedError as error:
        return fail(str(error), EXIT_NO, as_json)
    if out is not None:
        try:
            write(picture, out)
        except RenderError as error:
            return fail(str(error), EXIT_CANNOT, as_json)
    if as_json:
        emit_json(_as_json(picture, out))
    elif out is not None:
        console().print(f"wrote {out}")
    else:
        _to_terminal(picture, colour, width)
    return 0


def _layer(table: LayerTable, wanted: str | None) -> str:
    if wanted is None:
        return default_layer(table)
    if wanted in table:
        return wanted
    holding = [name for name in table if wanted in name]
    if holding:
        return holding[0]
    close = nearest(wanted, table) or next(iter(table))
    raise click.BadParameter(
        f"no layer has {wanted!r} in its name; nearest: {close!r}", param_hint="'--layer'"
    )


def _ranks(text: str, most: int) -> list[int]:
    if text.strip().lower() == "all":
        return list(range(most))
    found = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        if not part.isdigit() or int(part) >= most:
            # The default asks for two ranks, and one side with one rank is no mistake.
            if part == "1" and most == 1:
                continue
            raise click.BadParameter(
                f"{part!r} is not a rank of either side; ranks are 0 to {most - 1}, or write all",
                param_hint="'--ranks'",
            )
        found.append(int(part))
    return found


def _to_terminal(picture: Picture, colour: str, width: int | None) -> None:
    out = console()
    colours = out.is_terminal and not out.no_color if colour == "auto" else colour == "always"
    if colour == "always":
        from rich.console import Console

        out = Console(force_terminal=True, color_system="truecolor", highlight=False, width=width)
    for line in lines(picture, width or out.width, colours=colours):
        out.print(line, no_wrap=True, crop=False, soft_wrap=True)


def _as_json(picture: Picture, out: Path | None) -> dict[str, Any]:
    return {
        "title": picture.title,
        "note": picture.note,
        "file": None if out is None else str(out),
        "sides": [
            {
                "configuration": side.configuration,
                "ranks": side.ranks,
                "canonical": _panel(side.canonical),
                "local": [_panel(panel) for panel in side.local],
            }
            for side in picture.sides
        ],
    }


def _panel(panel: Panel) -> dict[str, Any]:
    return {
        "title": panel.title,
        "note": panel.note,
        "values": "rank" if panel.by_rank else "thousandths of the canonical page",
        "planes": [
            {
                "label": plane.label,
                "rows": plane.rows,
                "columns": plane.columns,
                "parts": list(plane.parts),
                "values": plane.values.tolist(),
            }
            for plane in panel.planes
        ],
    }
