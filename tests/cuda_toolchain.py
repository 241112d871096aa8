"""The CUDA compiler and its tools, for tests that compile the kernel but have no GPU.

What is built is built once per test session, whichever worker needs it first. Without the tools the
tests skip, except where they were asked for (`VKVMAP_TEST_CUDA=1`): there they fail.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CSRC = ROOT / "csrc"
ARCHITECTURES = (80, 90, 100, 120)


def missing(what: str) -> None:
    """Fail if the CUDA lane was asked for, else skip."""
    if os.environ.get("VKVMAP_TEST_CUDA") == "1":
        pytest.fail(f"the CUDA lane was asked for (VKVMAP_TEST_CUDA=1), but there is no {what}")
    pytest.skip(f"no {what}")


def nvcc() -> str:
    found = shutil.which(os.environ.get("CUDACXX", "nvcc")) or shutil.which(
        "nvcc", path="/usr/local/cuda/bin"
    )
    if found is None:
        missing("CUDA compiler (nvcc)")
    return str(found)


def binary_tool(name: str) -> str:
    """nvdisasm or cuobjdump: from PyPI (nvidia-cuda-<name>) or the toolkit."""
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations if spec else ():
        for candidate in Path(root).glob(f"*/bin/{name}"):
            return str(candidate)
    found = shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")
    if found is None:
        missing(f"{name}: pip install nvidia-cuda-{name}")
    return str(found)


def include_directory() -> str:
    """Where cuda_runtime.h is: asked of the compiler, which may be a wrapper."""
    said = subprocess.run(
        [nvcc(), "--dryrun", "-c", "x.cu"], capture_output=True, text=True, check=False
    ).stderr
    for line in said.splitlines():
        name, _, value = line.removeprefix("#$ ").partition("=")
        if name == "_HERE_":
            for candidate in (
                Path(value).parent / "include",
                Path(value).parent.parent / "include",
            ):
                if (candidate / "cuda_runtime.h").exists():
                    return str(candidate)
    missing("cuda_runtime.h")
    raise AssertionError


def run(*command: str | Path, timeout: float = 600, env: dict[str, str] | None = None) -> str:
    """Standard output and error of a command that must succeed."""
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, **(env or {})},
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, f"{' '.join(map(str, command))}: {done.returncode}\n{said[-4000:]}"
    return said


class Workshop:
    """Builds things once per session, also when several pytest workers want them."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        base = factory.getbasetemp()
        self._root = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base

    def once(self, name: str, build: Callable[[Path], None]) -> Path:
        """The path `name`, made by `build` into a path of another name first."""
        target = self._root / name
        with open(self._root / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                draft = self._root / f"{name}.draft"
                shutil.rmtree(draft, ignore_errors=True)
                build(draft)
                draft.rename(target)
        return target
