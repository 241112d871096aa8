"""What is built on the CPU stand-in of the CUDA runtime: scenario programs, and a whole package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.cuda_toolchain import CSRC, ROOT, Workshop, include_directory, run

STAND_IN = ROOT / "tests" / "cuda_cpu"
SANITIZE = "-fsanitize=address,undefined"
FLAGS = {
    "plain": ["-O1", "-g"],
    "sanitized": ["-O1", "-g", SANITIZE, "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"],
}


def _compile(kind: str, sources: Iterable[Path], into: Path, *options: str | Path) -> None:
    includes = ["-I", CSRC, "-I", STAND_IN, "-isystem", include_directory()]

    def one(source: Path) -> None:
        run(
            *("g++", "-x", "c++", "-std=c++17", "-fPIC", *FLAGS[kind], "-Wall", "-Wextra"),
            *("-Werror", "-Wno-unknown-pragmas", *includes, *options, "-DVKVMAP_WITH_CUDA=1"),
            *("-c", source, "-o", into / f"{source.name}.o"),
        )

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, sources))


def _objects(kind: str, workshop: Workshop) -> list[Path]:
    """The native sources, bindings apart, and the runtime that they are given."""

    def build(draft: Path) -> None:
        draft.mkdir()
        native = [s for s in CSRC.glob("*.cpp") if "bindings" not in s.name]
        _compile(kind, [*CSRC.glob("*.cu"), *native, STAND_IN / "cudart_cpu.cpp"], draft)

    return sorted(workshop.once(f"cuda-cpu-objects-{kind}", build).glob("*.o"))


def scenarios(kind: str, workshop: Workshop) -> Path:
    """The scenario program, built with the flags of `kind`."""
    objects = _objects(kind, workshop)

    def build(draft: Path) -> None:
        draft.mkdir()
        _compile(kind, [STAND_IN / "test_movers.cpp"], draft)
        options = [flag for flag in FLAGS[kind] if "sanitize" in flag]
        linked = draft / "test_movers"
        run("g++", *options, *objects, draft / "test_movers.cpp.o", "-lpthread", "-o", linked)

    return workshop.once(f"cuda-cpu-{kind}", build) / "test_movers"


class Checkout:
    """A copy of the project whose module has the stand-in, and a torch that calls it too."""

    def __init__(self, workshop: Workshop) -> None:
        objects = _objects("plain", workshop)
        self.root = workshop.once("cuda-cpu-checkout", lambda draft: self._build(draft, objects))

    @staticmethod
    def _build(draft: Path, objects: list[Path]) -> None:
        import pybind11

        built = shutil.ignore_patterns("*.so", "__pycache__")
        for name in ("vkvmap", "benchmarks", "scripts", "tests"):
            shutil.copytree(ROOT / name, draft / name, ignore=built)
        shutil.copy(ROOT / "pyproject.toml", draft)
        own = draft / "bindings"
        own.mkdir()
        headers = [sysconfig.get_path("include"), pybind11.get_include()]
        options = [part for header in headers for part in ("-isystem", header)]
        _compile("plain", CSRC.glob("*bindings.cpp"), own, *options, "-DVKVMAP_CUDA_BINDINGS=1")
        module = draft / "vkvmap" / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
        run("g++", "-shared", *objects, *own.glob("*.o"), "-lpthread", "-o", module)

    def run(
        self, *command: str, cache: Path, timeout: float = 600, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the copy; `cache` is the user's cache directory there."""
        outer = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        path = os.pathsep.join(map(str, (self.root, self.root / "tests" / "cuda_cpu" / "python")))
        return subprocess.run(
            command,
            cwd=self.root,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
            env={**outer, "PYTHONPATH": path, "XDG_CACHE_HOME": str(cache), **env},
        )

    def python(self, *arguments: str, cache: Path, **env: str) -> subprocess.CompletedProcess[str]:
        """Run Python in the copy."""
        return self.run(sys.executable, *arguments, cache=cache, **env)
