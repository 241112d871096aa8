"""``vkvmap bench``: the benchmarks of a source checkout, on this machine.

Each runs as a process of its own, verifies bytes before it times them, and quotes ratios of
contenders that took turns; see benchmarks/ and docs/performance.md.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

import vkvmap
from vkvmap.cli.output import (
    EXIT_CANNOT,
    EXIT_NO,
    complaints,
    console,
    emit_json,
    fail,
    table,
)
from vkvmap.cli.params import JSON, Positive
from vkvmap.describe.render import bars
from vkvmap.nearest import nearest

#: What runs anywhere, in a few minutes; the others are named, or need a GPU.
USUAL = ("derive", "submit", "host_mover", "store")


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--rounds", type=Positive(), help="Timed rounds; default: each benchmark's own.")
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw the ratios into an SVG file.",
)
@click.option("--list", "list_only", is_flag=True, help="Name the benchmarks and run none.")
@JSON
def command(
    names: tuple[str, ...], rounds: int | None, plot: Path | None, list_only: bool, as_json: bool
) -> int:
    """Run benchmarks (all that need no GPU, if none is named) and print figures and ratios.

    They come with the source: run this from a checkout, not from an installed wheel.
    """
    folder = Path(vkvmap.__file__).parents[1] / "benchmarks"
    known = _known(folder)
    if not known:
        return fail(
            f"there are no benchmarks at {folder}: they come with the source; clone the "
            "repository and install from it (scripts/setup.sh)",
            EXIT_CANNOT,
            as_json,
        )
    for name in names:
        if name not in known:
            close = nearest(name, known)
            hint = f"; did you mean {close!r}?" if close else ""
            raise click.BadParameter(
                f"{name!r} is not one of {', '.join(known)}{hint}", param_hint="'NAME'"
            )
    if plot is not None and plot.suffix.lower() != ".svg":
        raise click.BadParameter(
            f"{plot.name!r} is not an SVG; write for example {plot.stem or 'bench'}.svg",
            param_hint="'--plot'",
        )
    if list_only:
        if as_json:
            emit_json({"benchmarks": known, "usual": [n for n in USUAL if n in known]})
        else:
            console().print(" ".join(known))
        return 0
    chosen = names or tuple(name for name in USUAL if name in known)
    results: dict[str, list[dict[str, Any]]] = {}
    failed: dict[str, str] = {}
    for name in chosen:
        complaints().print(f"{name} ...", style="dim")
        figures, error = _run(folder, name, rounds)
        results[name] = figures
        if error:
            failed[name] = error
    if plot is not None:
        ratios = [
            (f"{name}: {each['name']}", float(each["ratio"]), _sense(each["unit"]))
            for name, figures in results.items()
            for each in figures
            if each.get("ratio") is not None
        ]
        plot.write_text(bars("ratios against their baselines", ratios), encoding="utf-8")
    if as_json:
        emit_json({"results": results, "failed": failed})
    else:
        _print(results, failed)
    return EXIT_NO if failed else 0


def _sense(unit: str) -> str:
    """What a ratio is a ratio of: less time is better, and more speed."""
    if unit.endswith("/s"):
        return "the speed"
    return "the time" if unit in ("ns", "us", "ms", "s") else "as much"


def _known(folder: Path) -> list[str]:
    """Benchmarks there are: modules that can be run by themselves."""
    return sorted(
        file.stem
        for file in folder.glob("*.py")
        if "__main__" in file.read_text(encoding="utf-8") and file.stem != "harness"
    )


def _run(folder: Path, name: str, rounds: int | None) -> tuple[list[dict[str, Any]], str]:
    """Figures of one benchmark, and what went wrong, if anything."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "figures.json"
        line = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(out)]
        if rounds is not None:
            line += ["--rounds", str(rounds)]
        done = subprocess.run(line, cwd=folder.parent, capture_output=True, text=True, check=False)
        figures: list[dict[str, Any]] = []
        if out.is_file():
            figures = json.loads(out.read_text(encoding="utf-8"))
    if done.returncode == 0:
        return figures, ""
    last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
    return figures, f"exit code {done.returncode}: {last[0] if last else 'no output'}"


def _print(results: dict[str, list[dict[str, Any]]], failed: dict[str, str]) -> None:
    out = console()
    rows: list[Sequence[object]] = []
    for name, figures in results.items():
        for each in figures:
            ratio, baseline = each.get("ratio"), each.get("baseline")
            rows.append(
                (
                    name,
                    each["name"],
                    f"{each['value']:.4g} {each['unit']}",
                    "-" if baseline is None else f"{baseline:.4g}",
                    "-" if ratio is None else f"{ratio:.3g}x {_sense(each['unit'])}",
                )
            )
    out.print(table(("benchmark", "figure", "value", "baseline", "ratio"), rows, left=2))
    for name, why in failed.items():
        out.print(f"{name} failed: {why}", style="red", soft_wrap=True)
