"""The GPU suite runs anywhere as far as the CPU goes, and its figures have the agreed form."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vkvmap import cuda

ROOT = Path(__file__).parents[1]


def suite(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_suite", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_a_dry_run_verifies_and_writes_every_phase(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    done = suite("--dry-run", "--json", str(file))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    figures = json.loads(file.read_text())
    for figure in figures:
        assert set(figure) == {"name", "value", "unit", "baseline", "ratio"}
        assert figure["value"] > 0
    phases = {figure["name"].split("/")[0] for figure in figures}
    assert phases == {"ceiling", "fragments", "model", "launch", "small", "submit"}
    # What a CPU cannot measure is named, last.
    assert done.stdout.rstrip().splitlines()[-3:] == [
        "not measured:",
        "  co-running matrix product: needs a GPU",
        "  pools: need a GPU",
    ]


def test_an_unknown_phase_is_refused_by_name() -> None:
    done = suite("--dry-run", "--phases", "ceilings,warp-drive")
    assert done.returncode != 0
    assert "warp-drive" in done.stderr


@pytest.mark.skipif(cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_the_suite_says_so_and_measures_nothing(tmp_path: Path) -> None:
    if not cuda.status().built:
        pytest.skip("would build the extension first")
    done = suite("--json", str(tmp_path / "figures.json"))
    assert done.returncode != 0
    assert "no GPU to measure" in done.stderr and "--dry-run" in done.stderr
    assert not (tmp_path / "figures.json").exists()
