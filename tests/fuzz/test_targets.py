"""The corpus of every fuzz target, played; coverage-guided runs are `tests/fuzz/run.sh SECONDS`."""

from __future__ import annotations

import pytest

from tests.fuzz.hostile import bounded
from tests.fuzz.targets import CORPUS, TARGETS, originals

pytestmark = pytest.mark.fuzz


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_the_corpus_is_answered(name: str) -> None:
    files = sorted((CORPUS / name).iterdir())
    with bounded(seconds=60, mebibytes=512):
        meant = [TARGETS[name](path.read_bytes()) for path in files]
    assert any(meant), "nothing in the corpus means anything: it has gone stale"
    assert len(files) >= len(originals()[name])


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_what_is_cut_off_is_answered(name: str) -> None:
    """Every original, cut at some places and followed by what does not belong there."""
    for raw in originals()[name][:3]:
        for cut in {0, 1, 2, len(raw) // 3, len(raw) // 2, len(raw) - 1}:
            with bounded(seconds=20, mebibytes=512):
                TARGETS[name](raw[:cut])
                TARGETS[name](raw[:cut] + b"\xff" * 9 + raw[cut:])
