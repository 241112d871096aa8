"""``vkvmap convert``: per-rank page files to canonical chunks, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.progress import Progress

from vkvmap.cli.group import Group
from vkvmap.cli.output import EXIT_NO, complaints, console, emit_json, fail, size, verdict
from vkvmap.cli.params import (
    CONFIG_HELP,
    JSON,
    LAYOUT_OPTIONS,
    MODEL,
    MODEL_OPTIONS,
    Positive,
    Spelled,
    check_stages,
    configuration,
    identity_options,
    model_table,
    options,
    stored_identity,
)
from vkvmap.convert import Converted, PageFiles, from_canonical, to_canonical
from vkvmap.errors import FormatError, RefusedError, StoreError
from vkvmap.spec import LayerTable
from vkvmap.store import CanonicalStore

_OPTIONS = options(
    MODEL,
    click.option(
        "--config", type=Spelled(), required=True, help=f"Who has the page files: {CONFIG_HELP}"
    ),
    click.option(
        "--pages",
        type=click.Path(file_okay=False, path_type=Path),
        required=True,
        help="Folder of page files: STAGE.RANK/GROUP/KEY.pages.",
    ),
    click.option(
        "--store",
        type=click.Path(file_okay=False, path_type=Path),
        required=True,
        help="Folder of the store.",
    ),
    click.option(
        "--parts",
        type=Spelled(),
        help="The store keeps chunks in parts, one for each of these stages: pp=4 or pp=10+12+10.",
    ),
    identity_options,
    LAYOUT_OPTIONS,
    MODEL_OPTIONS,
    click.option(
        "--batch-mib",
        type=Positive(),
        default=256,
        show_default=True,
        help="MiB of chunks in memory at a time.",
    ),
    JSON,
)


@click.group(cls=Group)
def command() -> None:
    """Join page files that ranks wrote for themselves into a store, or cut a store into them."""


@command.command("to-store", short_help="Join page files of all ranks into a store.")
@_OPTIONS
def to_store(**given: Any) -> int:
    """Join the page files of all ranks into canonical chunks; incomplete chunks are skipped."""
    return _convert(given, lambda files, store, **how: to_canonical(files, store, **how))


@command.command("to-pages", short_help="Cut a store into page files of ranks.")
@_OPTIONS
def to_pages(**given: Any) -> int:
    """Cut every canonical chunk into page files for the ranks of a configuration."""
    return _convert(given, lambda files, store, **how: from_canonical(store, files, **how))


def _convert(given: dict[str, Any], run: Callable[..., Converted]) -> int:
    as_json = bool(given["as_json"])
    model = str(given["model"])
    table = model_table(model, given["kv_dtype"], given["settings"])
    side = configuration(
        "--config", given["config"], given["layout"], given["block_size"], given["pcp_mode"]
    )
    check_stages("--config", side, table)
    parts = _parts(given, table)
    try:
        identity = stored_identity(
            model,
            table,
            side,
            chunk_tokens=given["chunk_tokens"],
            revision=given["revision"],
            family=given["family"],
            adapter=given["adapter"],
            salt=given["salt"],
        )
        files = PageFiles(given["pages"], identity, side)
        with (
            CanonicalStore(given["store"], identity, parts=parts) as store,
            _bar(as_json) as progress,
        ):
            done = run(files, store, batch_bytes=given["batch_mib"] << 20, progress=progress)
            others = {} if done.chunks or done.skipped else store.neighbours()
    except (RefusedError, StoreError, FormatError) as error:
        return fail(str(error), EXIT_NO, as_json)
    whole = not done.skipped and done.chunks > 0
    if as_json:
        emit_json({"identity": identity.name, "whole": whole, **asdict(done), "others": others})
        return 0 if whole else EXIT_NO
    out = console()
    text = f"{done.chunks:,} chunks, {size(done.nbytes)} converted, {len(done.skipped):,} skipped"
    if not done.chunks and not done.skipped:
        text = "there is nothing to convert"
    out.print(verdict(whole, text))
    for chunk, why in list(done.skipped.items())[:20]:
        out.print(f"  {chunk}: {why}", style="red")
    for name, why in others.items():
        out.print(f"  the store has chunks of {name[:12]}: {why}")
    return 0 if whole else EXIT_NO


def _parts(given: dict[str, Any], table: LayerTable) -> tuple[tuple[str, ...], ...] | None:
    """Layers of each part that a store keeps chunks in; None: they are whole."""
    text = given["parts"]
    if text is None:
        return None
    stages = configuration("--parts", text, given["layout"], given["block_size"], given["pcp_mode"])
    if stages.grid.size != 1:
        raise click.BadParameter(
            f"{text} divides tokens or heads too; parts are runs of layers: give pp alone",
            param_hint="'--parts'",
        )
    check_stages("--parts", stages, table)
    return stages.stage_layers(table)


@contextmanager
def _bar(quiet: bool) -> Iterator[Any]:
    err = complaints()
    if quiet or not err.is_terminal:
        yield None
        return
    with Progress(console=err, transient=True) as shown:
        task = shown.add_task("chunks", total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)
