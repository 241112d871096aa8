"""``vkvmap verify``: will two engines understand each other's pages?"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from vkvmap.cli.output import EXIT_NO, EXIT_WRONG, console, emit_json, fail, table, verdict
from vkvmap.cli.params import JSON
from vkvmap.describe.differences import differences, digest, read_description
from vkvmap.errors import FormatError

_PATH = click.Path(exists=True, path_type=Path)


@click.command()
@click.argument("here", type=_PATH)
@click.argument("there", type=_PATH)
@JSON
def command(here: Path, there: Path, as_json: bool) -> int:
    """Compare two descriptions of stored pages and list every difference.

    HERE and THERE are files written by `vkvmap identity`, folders of an identity in a store, or
    stores with one identity. Exit 0 if pages of one are pages of the other, else 1.
    """
    try:
        ours, theirs = read_description(here), read_description(there)
    except FormatError as error:
        return fail(str(error), EXIT_WRONG, as_json)
    found = differences(ours, theirs)
    same = ours == theirs
    if as_json:
        emit_json(
            {
                "same": same,
                "here": digest(ours),
                "there": digest(theirs),
                "differences": [asdict(each) for each in found],
            }
        )
        return 0 if same else EXIT_NO
    out = console()
    if same:
        out.print(verdict(True, f"both store under {digest(ours)[:16]}"))
        return 0
    out.print(verdict(False, "neither will find, or read, the other's pages"))
    if not found:
        out.print("the values agree, but one text is not in canonical form")
    columns = ("where", "here", "there", "why it matters")
    out.print(table(columns, [(d.where, d.here, d.there, d.why) for d in found], left=4))
    return EXIT_NO
