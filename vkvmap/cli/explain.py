"""``vkvmap explain``: what a move costs and why."""

from __future__ import annotations

import click

from vkvmap.cli.output import EXIT_NO, console, emit_json, seconds, size, table, verdict
from vkvmap.cli.params import JSON, Move, OneOf, Positive, move_options
from vkvmap.describe.estimate import LINKS, Estimate
from vkvmap.describe.explain import Kind, Report, SideReport, explain


@click.command()
@move_options()
@click.option("--rank", type=int, default=0, show_default=True, help="Rank to look at.")
@click.option(
    "--tokens", type=Positive(), default=4096, show_default=True, help="Context to estimate for."
)
@click.option(
    "--link",
    type=OneOf(LINKS),
    default="pcie5",
    show_default=True,
    help="Host link that times are estimated for.",
)
@JSON
def command(move: Move, rank: int, tokens: int, link: str, as_json: bool) -> int:
    """Say what moving MODEL's KV cache costs and why, layer group by layer group.

    MODEL is a preset (see `vkvmap models`) or the path of a config.json. Exit 0 if every layer of
    both sides is certified and pages can be shared, else 1.

    \b
    vkvmap explain llama-3-70b --from tp=8 --to tp=16,dcp=2
    """
    if not 0 <= rank < move.most_ranks:
        raise click.BadParameter(
            f"rank {rank} is on neither side; ranks are 0 to {move.most_ranks - 1}",
            param_hint="'--rank'",
        )
    move.check_stages()
    report = explain(
        move.layers, move.sides, family=move.family, rank=rank, tokens=tokens, link=link
    )
    if as_json:
        emit_json({"model": move.model, **report.as_json()})
    else:
        _print(move.model, report)
    return 0 if report.possible else EXIT_NO


def _print(model: str, report: Report) -> None:
    out = console()
    reasons = list(report.obstacles)
    for side in report.sides:
        reasons += [
            f"{side.configuration}: {k.example}: {k.refusal}" for k in side.kinds if k.refusal
        ]
    out.print(f"[bold]{model}[/bold]  {report.sides[0].configuration}  ->  ", end="")
    out.print(report.sides[1].configuration)
    out.print("can be moved ", verdict(report.possible))
    for reason in reasons:
        out.print(f"  because {reason}", style="red", soft_wrap=True)
    out.print(f"{report.family} pages in chunks of {report.chunk_tokens} tokens")
    if report.family == "universal":
        for why in report.native_obstacles:
            out.print(f"  not native: {why}", style="dim", soft_wrap=True)
    for side in report.sides:
        out.print()
        _print_side(side, report)
    out.print()
    note = LINKS[report.link].note
    out.print(
        f"Times are estimates for {note}; measure with: vkvmap bench",
        style="dim",
        soft_wrap=True,
    )


def _print_side(side: SideReport, report: Report) -> None:
    out = console()
    columns = (
        "group", "kind", "layers", "proven", "page", "canonical", "tokens", "pieces", "bytes each",
        "writers", "mover",
    )  # fmt: skip
    out.print(
        table(
            columns,
            [_row(kind) for kind in side.kinds],
            title=f"{side.configuration}   rank {side.rank} of {side.ranks}",
            left=2,
        )
    )
    waste = side.rank_copy_bytes_per_token / (side.host_bytes_per_token or 1)
    state = f", state {size(side.state_bytes)} a sequence" if side.state_bytes else ""
    out.print(
        f"host {size(side.host_bytes_per_token)} a token{state}; kept per rank it would be "
        f"{size(side.rank_copy_bytes_per_token)} ({waste:.3g}x)"
    )
    out.print(
        f"{side.copies_per_block:,} copies a block over all layers; packed descriptor "
        f"{size(side.descriptor_bytes)} once, 16 B a block and transfer"
    )
    rows = [
        (what, size(moved), *(_estimate(e) for e in estimates))
        for what, moved, estimates in (
            ("load", side.load_bytes, side.load),
            ("store", side.store_bytes, side.store),
        )
    ]
    head = (f"{report.tokens:,} tokens", "this rank", "kernel", "copy engine")
    out.print(table(head, rows))


def _row(kind: Kind) -> tuple[object, ...]:
    low, high = kind.fragment_bytes
    return (
        kind.group,
        kind.kind,
        kind.layers,
        verdict(kind.certified),
        size(kind.local_page_bytes),
        size(kind.canonical_page_bytes),
        kind.span_tokens or "-",
        f"{kind.fragments:,}",
        size(low) if low == high else f"{size(low)}..{size(high)}",
        kind.num_writers,
        kind.mover,
    )


def _estimate(this: Estimate) -> str:
    low, high = this.seconds
    fast, slow = this.gbps
    return f"{seconds(low)} to {seconds(high)} at {slow:.3g} to {fast:.3g} GB/s"
