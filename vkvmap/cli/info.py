"""``vkvmap info``: what a bug report needs, asked without touching anything."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys
from importlib import metadata
from typing import Any

import click

from vkvmap._version import __version__
from vkvmap.cli.output import console, emit_json, size
from vkvmap.cli.params import JSON
from vkvmap.region_backing import available_memory


@click.command()
@click.option("--calibrate", is_flag=True, help="Measure the movers anew (needs a GPU).")
@JSON
def command(calibrate: bool, as_json: bool) -> int:
    """Print versions, build, CUDA, devices, calibration, pinning limits and shared memory."""
    found = collect(fresh=calibrate)
    if as_json:
        emit_json(found)
        return 0
    out = console()
    for section, values in found.items():
        out.print(section, style="bold")
        wide = max(map(len, values))
        for name, value in values.items():
            out.print(f"  {name:{wide}}  {_shown(value)}", soft_wrap=True)
    return 0


def collect(*, fresh: bool = False) -> dict[str, dict[str, Any]]:
    """Everything `info` knows, as plain JSON values by section."""
    return {
        "versions": _versions(),
        "build": _build(),
        "cuda": _cuda(),
        "calibration": _calibration(fresh),
        "limits": _limits(),
    }


def _versions() -> dict[str, Any]:
    found: dict[str, Any] = {
        "vkvmap": _installed("vkvmap") or __version__,  # with the label of its wheel: +cpu, +cu13
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    for package in ("numpy", "torch", "vllm", "click", "rich", "xxhash"):
        found[package] = _installed(package)
    return found


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _build() -> dict[str, Any]:
    try:
        from vkvmap import _C
    except ImportError as error:
        return {"native module": f"cannot be loaded: {error}"}
    return {
        "native module": _C.__file__,
        "descriptor version": _C.DESCRIPTOR_VERSION,
        "movers": list(_C.mover_names()),
        "instruction set": _C.instruction_set(),
        "instruction sets": list(_C.instruction_sets()),
    }


def _cuda() -> dict[str, Any]:
    try:
        from vkvmap import cuda
    except ImportError as error:
        return {"available": False, "why not": str(error)}
    status = cuda.status()
    found: dict[str, Any] = {
        "available": not status.error,
        "why not": status.error or None,
        "built in": status.built,
        "runtime": _cuda_version(status.runtime_version),
        "driver": _cuda_version(status.driver_version),
    }
    for device in status.devices:
        major, minor = device.compute_capability
        found[f"device {device.ordinal}"] = (
            f"{device.name}, sm_{major}{minor}, {device.multiprocessors} multiprocessors, "
            f"{device.copy_engines} copy engines, {size(device.memory_bytes)}, {device.pci_bus_id}"
        )
    return found


def _calibration(fresh: bool) -> dict[str, Any]:
    from vkvmap import cuda
    from vkvmap.calibrate import SIZE_CLASSES, calibration

    found: dict[str, Any] = {}
    for direction in ("STORE", "LOAD"):
        told = os.environ.get(f"VKVMAP_MOVER_{direction}")
        if told:
            found[f"VKVMAP_MOVER_{direction}"] = told
    for device in cuda.devices():
        made = calibration(device.ordinal, fresh=fresh)
        found[f"device {device.ordinal}"] = made.source
        classes = [*(f"to {size(top)}" for top in SIZE_CLASSES), "longer"]
        for direction, movers in made.movers.items():
            found[f"device {device.ordinal} {direction}"] = dict(zip(classes, movers, strict=True))
    if not found:
        found["mover"] = "host, the only one without a GPU"
    return found


def _limits() -> dict[str, Any]:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found: dict[str, Any] = {
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "memory available": available_memory(),
        "memory that may be locked": None if soft == resource.RLIM_INFINITY else soft,
    }
    if os.path.isdir("/dev/shm"):
        found["shared memory free"] = shutil.disk_usage("/dev/shm").free
    found["reserved huge pages free"] = _meminfo("HugePages_Free")
    return found


def _meminfo(name: str) -> int | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                key, _, value = line.partition(":")
                if key == name:
                    return int(value.split()[0])
    except OSError:
        pass
    return None


def _cuda_version(number: int) -> str | None:
    return f"{number // 1000}.{number % 1000 // 10}" if number else None


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return size(value) if value >= 1 << 20 else str(value)
    if isinstance(value, dict):
        return ", ".join(f"{name}: {each}" for name, each in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
