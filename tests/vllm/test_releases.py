"""Store, restart and load in each release of the engine: two in the lane, all by releases.sh."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vllm.engine import Bench, transfer, whole_prefix

pytestmark = pytest.mark.vllm

RELEASES = os.environ.get("VKVMAP_VLLM_RELEASES", "0.27.1").split()

FIRST = ["The quick brown fox jumps over the lazy dog and then some more. " * 4 + "first"]
SECOND = ["ZYX " + "another prompt that shares nothing with the first one at all, " * 4]


@pytest.mark.parametrize("release", RELEASES)
def test_what_one_tp_stored_another_loads_after_a_restart(
    release: str, bench: Bench, models: Callable[[str], Path], tmp_path: Path
) -> None:
    """Each life is a process of its own; tp=1 to tp=2, then tp=2 to tp=1."""
    model, config = models("llama"), transfer(tmp_path / "files")
    first = bench.run(model, release=release, prompts=FIRST, transfer=config)
    assert f"v{release}" in first.log
    assert first.cached() == [0]
    both = bench.run(model, release=release, tp=2, prompts=FIRST + SECOND, transfer=config)
    assert both.cached() == [whole_prefix(both, 32)[0], 0]
    assert both.tokens()[:1] == first.tokens()
    last = bench.run(model, release=release, prompts=FIRST + SECOND, transfer=config)
    assert last.cached() == whole_prefix(last, 32)
    assert last.tokens() == both.tokens()
    # The pages outlive a change of release, too.
    newer = bench.run(model, prompts=FIRST + SECOND, transfer=config)
    assert newer.cached() == whole_prefix(newer, 32) and newer.tokens() == both.tokens()
