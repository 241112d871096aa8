"""``vkvmap store``: look into, check and trim a store; safe while engines use it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.progress import Progress, SpinnerColumn, TextColumn

from vkvmap.cli.group import Group
from vkvmap.cli.output import (
    EXIT_NO,
    complaints,
    console,
    emit_json,
    size,
    table,
    verdict,
)
from vkvmap.cli.params import JSON, Positive
from vkvmap.store_upkeep import fsck, gc, ls, stats

PATH = click.argument("path", type=click.Path(exists=True, file_okay=False, path_type=Path))


@click.group(cls=Group)
def command() -> None:
    """Look into, check and trim the store at PATH; all of it may run while engines use it."""


@command.command("ls")
@PATH
@click.option("--identity", default="", metavar="HEX", help="Start of the identities to list.")
@click.option("--limit", type=Positive(), default=50, show_default=True, help="Chunks at most.")
@JSON
def list_chunks(path: Path, identity: str, limit: int, as_json: bool) -> int:
    """List chunks, the most recently used first."""
    entries = sorted(ls(str(path), identity=identity), key=lambda entry: -entry.used_at)
    shown = entries[:limit]
    if as_json:
        emit_json(
            {
                "chunks": len(entries),
                "listed": [
                    {
                        "identity": entry.identity,
                        "folder": entry.folder,
                        "key": entry.key,
                        "bytes": entry.nbytes,
                        "used_at_ns": entry.used_at,
                    }
                    for entry in shown
                ],
            }
        )
        return 0
    now = time.time_ns()
    rows = [
        (e.identity[:12], e.folder, e.key[:32], size(e.nbytes), _ago(now - e.used_at))
        for e in shown
    ]
    out = console()
    out.print(table(("identity", "group", "key", "size", "used"), rows, left=3))
    if len(entries) > len(shown):
        out.print(f"... and {len(entries) - len(shown):,} more (--limit)")
    return 0


@command.command("stats")
@PATH
@JSON
def show_stats(path: Path, as_json: bool) -> int:
    """Count chunks and bytes by identity and group."""
    found = stats(str(path))
    if as_json:
        emit_json(
            {
                "models": found.models,
                "groups": [
                    {"identity": identity, "folder": folder, **asdict(group)}
                    for (identity, folder), group in found.groups.items()
                ],
                "chunks": found.chunks,
                "bytes": found.nbytes,
                "used": found.used,
                "temporaries": found.temporaries,
                "quarantined": found.quarantined,
            }
        )
        return 0
    rows = [
        (identity[:12], found.models.get(identity, "?"), folder, f"{g.chunks:,}", size(g.nbytes))
        for (identity, folder), g in found.groups.items()
    ]
    out = console()
    out.print(table(("identity", "model", "group", "chunks", "size"), rows, left=3))
    out.print(
        f"{found.chunks:,} chunks, {size(found.nbytes)}; {found.temporaries} temporary files, "
        f"{found.quarantined} in quarantine"
    )
    return 0


@command.command("fsck", short_help="Check every byte of every chunk.")
@PATH
@click.option("--repair", is_flag=True, help="Quarantine what cannot be served, drop orphans.")
@JSON
def check(path: Path, repair: bool, as_json: bool) -> int:
    """Read every byte of every chunk and compare it with its digests: exit 0 if all are good."""
    with _counting(as_json) as progress:
        found = fsck(str(path), repair=repair, progress=progress)
    if as_json:
        emit_json({"clean": found.clean, **asdict(found)})
        return 0 if found.clean else EXIT_NO
    out = console()
    out.print(verdict(found.clean, f"{found.chunks:,} chunks, {size(found.nbytes)} are good"))
    for what, where in (
        ("damaged", found.damaged),
        ("misplaced", found.misplaced),
        ("unreadable", found.unreadable),
    ):
        for file, why in list(where.items())[:20]:
            out.print(f"  {what}: {file}: {why}", style="red", soft_wrap=True)
        if len(where) > 20:
            out.print(f"  ... and {len(where) - 20} more {what}")
    for file in found.unknown[:20]:
        out.print(f"  not part of a store: {file}", style="dim", soft_wrap=True)
    if found.orphans:
        out.print(f"  {found.orphans} orphaned temporary files")
    if found.repaired:
        out.print(f"  {found.repaired} files repaired")
    return 0 if found.clean else EXIT_NO


@command.command("gc", short_help="Remove what is orphaned, damaged or unused.")
@PATH
@click.option("--identity", metavar="HEX", help="Remove identities whose name starts like this.")
@click.option(
    "--unused-days", type=click.FloatRange(min=0), help="Remove chunks unused for so many days."
)
@click.option("--keep-quarantine", is_flag=True, help="Keep damaged files for inspection.")
@JSON
def collect(
    path: Path,
    identity: str | None,
    unused_days: float | None,
    keep_quarantine: bool,
    as_json: bool,
) -> int:
    """Remove orphaned temporaries, quarantined files, and chunks as asked for."""
    removed = gc(
        str(path), identity=identity, unused_days=unused_days, quarantine=not keep_quarantine
    )
    if as_json:
        emit_json(asdict(removed))
        return 0
    console().print(
        f"removed {removed.chunks:,} chunks ({size(removed.nbytes)}), {removed.temporaries} "
        f"temporary files, {removed.quarantined} from quarantine"
    )
    return 0


@contextmanager
def _counting(quiet: bool) -> Iterator[Any]:
    err = complaints()
    if quiet or not err.is_terminal:
        yield None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=err, transient=True) as shown:
        task = shown.add_task("reading")
        yield lambda chunks, nbytes: shown.update(
            task, description=f"{chunks:,} chunks, {size(nbytes)}"
        )


def _ago(nanoseconds: int) -> str:
    seconds = max(0, nanoseconds // 10**9)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length} {unit} ago"
    return f"{seconds} s ago"
