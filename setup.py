"""Build of the one extension module, ``vkvmap._C``, by CMake.

Everything about the package itself is in pyproject.toml. What a build can be told, it is told by
environment variables of the same names as the CMake options, since that is what ``pip install``
passes on:

    VKVMAP_CUDA=AUTO|ON|OFF        compile the CUDA mover: when a compiler is found, always, never
    VKVMAP_CUDA_ARCHITECTURES=...  as CMAKE_CUDA_ARCHITECTURES
    VKVMAP_SANITIZE=...            "address,undefined" or "thread"
    VKVMAP_LOCAL_VERSION=...       a label after the version, as in 0.1.0+cu13
    CMAKE_ARGS=...                 further arguments of the configure step
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.egg_info import egg_info

ROOT = Path(__file__).resolve().parent
OPTIONS = ("VKVMAP_CUDA", "VKVMAP_CUDA_ARCHITECTURES", "VKVMAP_SANITIZE")


class CMakeBuild(build_ext):
    """Configure and build with CMake; the module lands where setuptools expects it."""

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        # An editable build is repeated with every change, so its objects are kept.
        kept = ROOT / "build" / f"editable-{sys.implementation.cache_tag}"
        build_dir = kept if self.editable_mode else ROOT / self.build_temp / "cmake"
        build_dir.mkdir(parents=True, exist_ok=True)
        configure = [
            "cmake",
            "-S",
            str(ROOT),
            "-B",
            str(build_dir),
            f"-DCMAKE_BUILD_TYPE={'Debug' if self.debug else 'Release'}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DVKVMAP_MODULE_DIR={target.parent}",
        ]
        if shutil.which("ninja"):
            configure += ["-G", "Ninja"]
        configure += [f"-D{name}={os.environ[name]}" for name in OPTIONS if name in os.environ]
        configure += shlex.split(os.environ.get("CMAKE_ARGS", ""))
        # A build directory remembers its generator and its interpreter (under build isolation a
        # path that is gone afterwards), so what it remembers of another configuration is dropped.
        remembered = build_dir / "configured-with.txt"
        told = "\n".join(configure)
        if not remembered.is_file() or remembered.read_text() != told:
            (build_dir / "CMakeCache.txt").unlink(missing_ok=True)
            shutil.rmtree(build_dir / "CMakeFiles", ignore_errors=True)
        subprocess.run(configure, check=True)
        remembered.write_text(told)
        jobs = str(os.cpu_count() or 1)
        subprocess.run(
            ["cmake", "--build", str(build_dir), "--target", "_C", "--parallel", jobs], check=True
        )


class LabelledVersion(egg_info):
    """Adds the label; here and not as an option, since an sdist's setup.cfg would override that."""

    def finalize_options(self) -> None:
        label = os.environ.get("VKVMAP_LOCAL_VERSION", "")
        if label:
            self.tag_build = f"+{label}"
        super().finalize_options()


setup(
    ext_modules=[Extension("vkvmap._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "egg_info": LabelledVersion},
)
