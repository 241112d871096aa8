"""One round trip in each release of the engine: two in the lane, all by releases.sh."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vllm.engine import Bench, transfer, whole_prefix

pytestmark = pytest.mark.vllm

RELEASES = os.environ.get("VKVMAP_VLLM_RELEASES", "0.27.1").split()


@pytest.mark.parametrize("release", RELEASES)
def test_a_round_trip_through_files(
    release: str, bench: Bench, models: Callable[[str], Path], tmp_path: Path
) -> None:
    model, config = models("llama"), transfer(tmp_path / "files")
    first = bench.run(model, release=release, transfer=config)
    last = bench.run(model, release=release, transfer=config)
    assert f"v{release}" in last.log
    assert first.cached() == [0, 0, 0] and last.cached() == whole_prefix(last, 32)
    assert last.tokens() == first.tokens()
