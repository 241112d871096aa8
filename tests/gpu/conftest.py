"""Tests that need a GPU: asked for with VKVMAP_TEST_GPU=1, they fail where there is none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vkvmap import cuda
from vkvmap.transfer import Engine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu" in str(item.path):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def gpu() -> Iterator[Any]:
    """torch, with a GPU behind it."""
    reason = cuda.why_not()
    if reason:
        if os.environ.get("VKVMAP_TEST_GPU") == "1":
            pytest.fail(f"the GPU lane was asked for (VKVMAP_TEST_GPU=1), but: {reason}")
        pytest.skip(f"needs a GPU: {reason}")
    import torch

    yield torch
    torch.cuda.synchronize()


@pytest.fixture(autouse=True)
def own_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of the choice between movers, which is measured anew."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def engine(gpu: Any) -> Iterator[Engine]:
    made = Engine(threads=2)
    yield made
    made.resume()
    assert made.shutdown(timeout=60)
