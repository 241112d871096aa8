"""``vkvmap conformance``: this implementation against a file of cases."""

from __future__ import annotations

from pathlib import Path

import click

from vkvmap.cli.output import EXIT_NO, console, emit_json
from vkvmap.cli.params import JSON, Positive
from vkvmap.conformance import check_cases, read_cases


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--show", type=Positive(), default=5, show_default=True, help="Differences to print at most."
)
@JSON
def command(file: Path, show: int, as_json: bool) -> int:
    """Check the cases of FILE (JSON lines): exit 0 only if every binding case holds."""
    verdicts = check_cases(read_cases(file))
    binding = [v for v in verdicts if v.binding]
    failed = [v for v in binding if v.differences]
    quirks = [v for v in verdicts if not v.binding]
    good = bool(binding) and not failed
    if as_json:
        emit_json(
            {
                "file": str(file),
                "passed": len(binding) - len(failed),
                "failed": len(failed),
                "not_binding": len(quirks),
                "differences": [
                    {"id": v.case_id, "differences": list(v.differences)} for v in failed[:show]
                ],
            }
        )
        return 0 if good else EXIT_NO
    out = console()
    for this in failed[:show]:
        out.print(f"case {this.case_id}: {'; '.join(this.differences)}")
    if len(failed) > show:
        out.print(f"... and {len(failed) - show} more")
    if not binding:
        out.print("no binding case in the file")
    note = f", {len(quirks)} not binding" if quirks else ""
    out.print(f"{len(binding) - len(failed)} passed, {len(failed)} failed{note}")
    return 0 if good else EXIT_NO
