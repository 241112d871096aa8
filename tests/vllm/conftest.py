"""Models are made once per session; memory that killed engines leave behind is swept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.vllm.engine import Bench, make_model


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Kind -> folder of the model."""
    root, made = tmp_path_factory.mktemp("models"), {}

    def model(kind: str) -> Path:
        if kind not in made:
            made[kind] = make_model(root / kind, kind)
        return made[kind]

    return model


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    before = set(_left_behind())
    folder = tmp_path / "engines"
    folder.mkdir()
    yield Bench(folder)
    # Killed engines leave names in shared memory, ours and the engine's own.
    for path in set(_left_behind()) - before:
        path.unlink(missing_ok=True)


def _left_behind() -> list[Path]:
    shared = Path("/dev/shm")
    return [*shared.glob("vllm_*"), *shared.glob("vkvmap_*")]
