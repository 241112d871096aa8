"""A short run of the descriptor fuzzer; the long one is `tests/fuzz/run.sh SECONDS`."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent

pytestmark = pytest.mark.fuzz


def test_hostile_descriptors_are_refused_or_safe(tmp_path: Path) -> None:
    """Own driver, whatever the compiler: deterministic, and no more than a C++ compiler needed."""
    program = tmp_path / "fuzz_descriptor"
    subprocess.run([HERE / "build.sh", program, "g++"], check=True)
    done = subprocess.run(
        [program, "20", "1", HERE / "corpus" / "descriptor"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"UBSAN_OPTIONS": "print_stacktrace=1"},
    )
    assert done.returncode == 0, done.stderr
    found = re.match(
        r"(\d+) inputs, (\d+) accepted, (\d+) carried out, (\d+) compared", done.stdout
    )
    assert found, done.stdout
    inputs, accepted, carried, compared = map(int, found.groups())
    assert inputs > 2_000
    assert accepted > inputs // 20, "hardly anything is accepted: the mutations have gone stale"
    assert carried == accepted
    assert compared > carried // 2
