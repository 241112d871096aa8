"""``vkvmap identity``: the description that a deployment stores its pages under."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from vkvmap.cli.output import EXIT_NO, console, emit_json, fail
from vkvmap.cli.params import (
    CONFIG_HELP,
    JSON,
    LAYOUT_OPTIONS,
    MODEL,
    MODEL_OPTIONS,
    Spelled,
    configuration,
    identity_options,
    model_table,
    stored_identity,
)


@click.command()
@MODEL
@identity_options
@click.option(
    "--config",
    "config",
    type=Spelled(),
    default="tp=1",
    show_default=True,
    help=f"Matters to native pages only: {CONFIG_HELP}",
)
@LAYOUT_OPTIONS
@MODEL_OPTIONS
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write it to a file.")
@JSON
def command(
    model: str,
    revision: str,
    family: Any,
    adapter: str | None,
    salt: str,
    config: str,
    layout: str,
    block_size: int,
    pcp_mode: str,
    kv_dtype: str,
    settings: tuple[tuple[str, Any], ...],
    chunk_tokens: int | None,
    out: Path | None,
    as_json: bool,
) -> int:
    """Print the identity under which a deployment of MODEL stores its pages.

    Two deployments share pages exactly if their identities are equal; `vkvmap verify` says where
    two of them differ. The parallel configuration is no part of it for universal pages.
    """
    table = model_table(model, kv_dtype, settings)
    side = configuration("--config", config, layout, block_size, pcp_mode)
    try:
        identity = stored_identity(
            model,
            table,
            side,
            chunk_tokens=chunk_tokens,
            revision=revision,
            family=family,
            adapter=adapter,
            salt=salt,
        )
    except ValueError as error:
        return fail(str(error), EXIT_NO, as_json)
    if out is not None:
        out.write_text(identity.json + "\n", encoding="utf-8")
    if as_json:
        emit_json({"name": identity.name, "description": identity.json})
    elif out is not None:
        console().print(f"wrote {out}: identity {identity.name}")
    else:
        click.echo(identity.json)
    return 0
