"""``vkvmap roundtrip``: the main job, with a process per rank, checked byte by byte."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import click
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from vkvmap.cli.output import (
    EXIT_CANNOT,
    EXIT_NO,
    complaints,
    console,
    emit_json,
    fail,
    seconds,
    size,
    table,
    verdict,
)
from vkvmap.cli.params import JSON, Move, OneOf, Positive, move_options
from vkvmap.configuration import decoder_layers
from vkvmap.errors import RefusedError
from vkvmap.roundtrip import Job, Outcome, RankReport, memory_needed, run
from vkvmap.sharing import decide
from vkvmap.spec import LayerTable
from vkvmap.writers import POLICIES


@click.command()
@move_options()
@click.option(
    "--tokens",
    type=Positive(),
    default=256,
    show_default=True,
    help="Tokens to move, rounded up to whole chunks.",
)
@click.option(
    "--layers",
    type=Positive(),
    help="Only the first N decoder layers, to bound memory: a run needs about the KV cache of "
    "TOKENS twice, plus 60 MiB a rank, and refuses to begin where that is not there.",
)
@click.option(
    "--mover",
    type=OneOf(("auto", "host", "kernel", "copy_engine")),
    default="auto",
    show_default=True,
    help="What carries the bytes; one that cannot is an error, never replaced.",
)
@click.option(
    "--device",
    type=OneOf(("cpu", "cuda")),
    default="cpu",
    show_default=True,
    help="Where caches are: host memory, or the GPUs of this node in turn (needs torch with CUDA).",
)
@click.option(
    "--writers",
    type=OneOf([name for name in POLICIES if name != "all"]),
    default="turns",
    show_default=True,
    help="Which of the ranks with equal bytes stores them.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the block tables.")
@click.option(
    "--flip-a-byte",
    is_flag=True,
    help="Change one stored byte between store and load: shows that the check has teeth (exit 1).",
)
@JSON
def command(
    move: Move,
    tokens: int,
    layers: int | None,
    mover: str,
    device: str,
    writers: str,
    seed: int,
    flip_a_byte: bool,
    as_json: bool,
) -> int:
    """Store MODEL's KV cache under one configuration, load it under another, compare every byte.

    Starts one process per rank of each side, fills the source caches from a known truth with
    scattered blocks, stores through a shared region, loads on the target ranks, and compares all
    of their caches, padding and spare blocks included. MODEL is a preset (see `vkvmap models`) or
    the path of a config.json. Exit 0 only if every byte is right.

    \b
    vkvmap roundtrip llama-3-8b --from tp=4 --to tp=2
    vkvmap roundtrip deepseek-v3 --from tp=8 --to tp=4,dcp=2,block=32
    vkvmap roundtrip gpt-oss-120b --from tp=2,pp=2 --to tp=4,layout=split_hnd,block=64
    """
    chosen = _first_layers(move.layers, layers)
    move.check_stages(chosen)
    source, target = move.sides
    sharing = decide(chosen, move.sides, move.family)
    if sharing.obstacles:
        return fail(
            f"these configurations cannot share {sharing.family} pages: "
            f"{'; '.join(sharing.obstacles)}; use --family universal",
            EXIT_NO,
            as_json,
        )
    chunks = -(-tokens // sharing.chunk_tokens)
    job = Job(
        chosen,
        source,
        target,
        sharing.family,
        sharing.chunk_tokens,
        chunks * sharing.chunk_tokens,
        mover=mover,
        writers=writers,
        device=device,
        seed=seed,
    )
    missing = _missing(mover, device)
    if missing:
        return fail(missing, EXIT_CANNOT, as_json)
    try:
        with _bar(as_json) as progress:
            outcome = run(job, progress=progress, flip_a_byte=flip_a_byte)
    except RefusedError as error:
        return fail(str(error), EXIT_NO, as_json)
    if as_json:
        emit_json(_as_json(move.model, job, outcome))
    else:
        _print(move.model, job, outcome)
    return 0 if outcome.good else EXIT_NO


def _first_layers(layers: LayerTable, count: int | None) -> LayerTable:
    if count is None:
        return layers
    owners = decoder_layers(layers)
    if count > len(owners):
        raise click.BadParameter(
            f"{count} layers, the model has {len(owners)}; nearest right value: {len(owners)}",
            param_hint="'--layers'",
        )
    return LayerTable(layers[name] for group in owners[:count] for name in group)


def _missing(mover: str, device: str) -> str:
    """Why `mover` or `device` cannot be had here, or an empty string."""
    from vkvmap import _C, cuda

    if device == "cuda" and not cuda.is_available():
        return f"--device cuda: {cuda.why_not()}"
    if mover in ("auto", "host"):
        return ""
    why = cuda.why_not() if mover in _C.mover_names() else "this build does not have it"
    if not why and device == "cpu":
        why = "the caches are in host memory; add --device cuda"
    return f"--mover {mover} cannot run here: {why}" if why else ""


@contextmanager
def _bar(quiet: bool) -> Iterator[Any]:
    err = complaints()
    if quiet or not err.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, TimeElapsedColumn(), console=err, transient=True) as shown:
        tasks = {side: shown.add_task(side, total=1.0) for side in ("store", "load")}
        yield lambda side, share: shown.update(tasks[side], completed=share)


def _as_json(model: str, job: Job, outcome: Outcome) -> dict[str, Any]:
    return {
        "model": model,
        "good": outcome.good,
        "from": str(job.source),
        "to": str(job.target),
        "family": outcome.family,
        "chunk_tokens": outcome.chunk_tokens,
        "tokens": outcome.tokens,
        "layers": len(job.table),
        "region_bytes": outcome.region_bytes,
        "memory_needed": memory_needed(job),
        "seconds": dict(outcome.seconds),
        "ranks": [
            {**asdict(report), "gbps": report.gbps, "good": report.good}
            for report in outcome.reports
        ],
    }


def _print(model: str, job: Job, outcome: Outcome) -> None:
    out = console()
    out.print(f"[bold]{model}[/bold]  {job.source}  ->  {job.target}")
    out.print(
        f"{outcome.tokens} tokens of {len(job.table)} layers as {outcome.family} pages in chunks "
        f"of {outcome.chunk_tokens} tokens; region {size(outcome.region_bytes)}"
    )
    columns = (
        "side",
        "stage",
        "rank",
        "moved",
        "fragments",
        "mover",
        "GB/s",
        "time",
        "checked",
        "",
    )
    out.print(table(columns, [_row(report) for report in outcome.reports]))
    loaded = sum(report.nbytes for report in outcome.reports if report.side == "load")
    checked = sum(report.checked for report in outcome.reports)
    total = sum(outcome.seconds.values())
    bad = [report for report in outcome.reports if not report.good]
    if outcome.good:
        text = (
            f"every byte is right: {size(checked)} compared on {len(outcome.reports)} ranks, "
            f"{size(loaded)} of them loaded; {seconds(total)} in all"
        )
        out.print(verdict(True, text), soft_wrap=True)
        return
    out.print(verdict(False, f"{len(bad)} of {len(outcome.reports)} ranks are wrong"))
    for report in bad[:5]:
        what = report.error or f"{report.wrong:,} wrong bytes, the first at {report.first_wrong}"
        text = f"  {report.side} stage {report.stage} rank {report.rank}: {what}"
        out.print(text, style="red", soft_wrap=True)


def _row(report: RankReport) -> tuple[object, ...]:
    return (
        report.side,
        report.stage,
        report.rank,
        size(report.nbytes),
        f"{report.fragments:,}",
        report.mover,
        f"{report.gbps:.3g}",
        seconds(report.seconds),
        size(report.checked),
        verdict(report.good),
    )
