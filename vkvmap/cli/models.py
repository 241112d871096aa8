"""``vkvmap models``: the presets, with their shapes and where these come from."""

from __future__ import annotations

import click

from vkvmap.cli.output import console, emit_json, size, table
from vkvmap.cli.params import JSON
from vkvmap.models import FAMILIES, PRESETS, load_model


@click.command()
@JSON
def command(as_json: bool) -> int:
    """List the model presets: layers, KV bytes per token, state per sequence, groups, source."""
    rows = []
    for name, preset in PRESETS.items():
        layers = load_model(name)
        paged = [layer for layer in layers.values() if layer.has_tokens]
        state = [layer for layer in layers.values() if not layer.has_tokens]
        rows.append(
            {
                "name": name,
                "checkpoint": preset.checkpoint,
                "source": preset.source,
                "layers": len(layers),
                "bytes_per_token": sum(layer.canonical_bytes(1) for layer in paged),
                "state_bytes": sum(layer.canonical_bytes(0) for layer in state),
                "groups": list(layers.groups),
            }
        )
    if as_json:
        emit_json({"presets": rows, "architectures": sorted(FAMILIES)})
        return 0
    out = console()
    wide = out.width >= 120
    columns = ["preset", "groups", "source", "layers", "KV a token", "state"]
    cells = [
        [
            str(row["name"]),
            " ".join(load_model(str(row["name"])).groups),
            str(row["source"]),
            str(row["layers"]),
            size(float(str(row["bytes_per_token"]))),
            size(float(str(row["state_bytes"]))) if row["state_bytes"] else "-",
        ]
        for row in rows
    ]
    if wide:
        columns.insert(3, "checkpoint")
        for cell, row in zip(cells, rows, strict=True):
            cell.insert(3, str(row["checkpoint"]))
    out.print(table(columns, cells, left=4 if wide else 3))
    out.print(f"Or the path of a config.json, of: {', '.join(sorted(FAMILIES))}.", style="dim")
    return 0
