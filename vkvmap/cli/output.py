"""What commands print: one JSON object with ``--json``, else text for a person.

Results go to standard output, progress and complaints to standard error, so that either can be
piped. Colour follows the terminal and NO_COLOR.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

EXIT_NO = 1
EXIT_WRONG = 2
EXIT_CANNOT = 3

_MARKS = {True: ("yes", "green"), False: ("no", "red")}


def console() -> Console:
    """Standard output, as wide as the terminal or 140 columns."""
    made = Console(highlight=False, soft_wrap=False)
    return made if made.is_terminal else Console(highlight=False, width=max(140, made.width))


def complaints() -> Console:
    """Standard error, for progress and complaints."""
    return Console(stderr=True, highlight=False)


def emit_json(value: Mapping[str, Any]) -> None:
    """Print one JSON object."""
    click.echo(json.dumps(value, indent=2, sort_keys=False, allow_nan=False))


def fail(message: str, code: int, as_json: bool, **details: str) -> int:
    """Say what is wrong, in the form that was asked for; returns `code`."""
    if as_json:
        emit_json({"error": {"message": message, "exit_code": code, **details}})
    else:
        first, _, rest = message.partition("\n")
        out = complaints()
        out.print(Text("error: ", style="bold red") + Text(first), soft_wrap=True)
        if rest:
            out.print(Text(rest, style="dim"), soft_wrap=True)
    return code


def verdict(yes: bool, text: str = "") -> Text:
    """``yes`` or ``no`` in colour, then `text`."""
    word, style = _MARKS[yes]
    return Text(word, style=f"bold {style}") + Text(f": {text}" if text else "")


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    *,
    title: str | None = None,
    left: int = 1,
    caption: str | None = None,
) -> Table:
    """A plain table; all but the first `left` columns are aligned right."""
    made = Table(title=title, title_justify="left", title_style="bold", caption=caption, box=None)
    made.caption_justify = "left"
    made.pad_edge = False
    for index, column in enumerate(columns):
        justify: Any = "left" if index < left else "right"
        made.add_column(column, justify=justify, header_style="dim", no_wrap=True)
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else str(cell) for cell in row))
    return made


def size(count: float) -> str:
    """Bytes for a person: exact below 10 KiB, three digits above."""
    if count < 10 * 1024:
        return f"{count:,.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        count /= 1024
        if count < 1024 or unit == "TiB":
            return f"{count:,.3g} {unit}" if count < 1000 else f"{count:,.0f} {unit}"
    return f"{count:,.0f} B"


def seconds(value: float) -> str:
    """A duration for a person."""
    if value < 1e-3:
        return f"{value * 1e6:.3g} us"
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.3g} s"
