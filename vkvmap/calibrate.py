"""Which mover a GPU transfer takes when nobody says: measured once per device and driver.

The kernel is indifferent to how long contiguous runs are and occupies a few multiprocessors; the
copy engines occupy none and pay for every run. Where one overtakes the other depends on the
machine, so it is measured: both movers, both directions, one run length per size class. That takes
under a second and is kept in the user's cache directory.

What must stay true: a choice never names a mover that cannot reach the plan's memory, and a cache
file that cannot be read or does not fit this machine is as good as none. `VKVMAP_MOVER_STORE` and
`VKVMAP_MOVER_LOAD` override a direction; an explicit mover of a call overrides everything.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from vkvmap import _C, cuda
from vkvmap._version import __version__
from vkvmap.calibrate_probe import GpuProbe
from vkvmap.errors import PlanError
from vkvmap.foreign import read_json
from vkvmap.native import translated

logger = logging.getLogger(__name__)

DIRECTIONS = ("store", "load")
GPU_MOVERS = ("kernel", "copy_engine")

#: Upper bounds, in bytes, of the contiguous runs of a size class; the last class has none.
SIZE_CLASSES = (512, 4 << 10, 28 << 10, 128 << 10)

#: What is measured for each class: a run length typical of it, in bytes.
PROBED_RUNS = (256, 2 << 10, 16 << 10, 64 << 10, 256 << 10)

#: Without a measurement: published figures have the copy engines level with the kernel at 28 KiB.
DEFAULT = ("kernel", "kernel", "kernel", "copy_engine", "copy_engine")

#: A mover must be this much faster before it takes the place of the one that uses no multiprocessor
#: (long runs) or pays nothing per run (short ones).
MARGIN = 1.05

_BUDGET_SECONDS = 1.0


class NoMoverError(PlanError):
    """No mover of this build can reach both sides of a plan."""


@dataclass(frozen=True)
class Calibration:
    """Movers by direction and size class, and what they were chosen by.

    Attributes:
        movers: direction -> mover per size class.
        gbps: ``"store/kernel"`` and so on -> GB/s per size class; empty if not measured.
        source: ``"measured"``, ``"cached"`` or ``"default"``.
        machine: what it holds for.
        seconds: what measuring took.
    """

    movers: dict[str, tuple[str, ...]]
    gbps: dict[str, tuple[float, ...]]
    source: str
    machine: str
    seconds: float = 0.0


def size_class(run_bytes: int) -> int:
    """Index of the size class of runs of `run_bytes`."""
    return next((i for i, top in enumerate(SIZE_CLASSES) if run_bytes <= top), len(SIZE_CLASSES))


def default_calibration(machine: str = "") -> Calibration:
    return Calibration(dict.fromkeys(DIRECTIONS, DEFAULT), {}, "default", machine)


def machine_key(device: cuda.Device, status: cuda.Status) -> str:
    """What a calibration depends on, as text."""
    return "/".join(
        (
            device.name,
            device.pci_bus_id,
            f"driver {status.driver_version}",
            f"runtime {status.runtime_version}",
            f"vkvmap {__version__}",
        )
    )


def cache_file(machine: str) -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    digest = hashlib.sha256(machine.encode()).hexdigest()[:16]
    return Path(root) / "vkvmap" / f"calibration-{digest}.json"


def read_cached(machine: str) -> Calibration | None:
    """The calibration kept for `machine`, or None; a file that does not fit is ignored."""
    try:
        kept = read_json(cache_file(machine).read_text(encoding="utf-8"))
        movers = {d: tuple(kept["movers"][d]) for d in DIRECTIONS}
        gbps = {str(k): tuple(float(x) for x in v) for k, v in kept["gbps"].items()}
        fits = kept["machine"] == machine and all(
            len(m) == len(SIZE_CLASSES) + 1 and set(m) <= set(GPU_MOVERS) for m in movers.values()
        )
        return (
            Calibration(movers, gbps, "cached", machine, float(kept["seconds"])) if fits else None
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def write_cached(calibration: Calibration) -> None:
    """Keep it for the next process; a cache that cannot be written is only slower."""
    path = cache_file(calibration.machine)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, prefix=path.name, delete=False, encoding="utf-8"
        ) as file:
            json.dump(asdict(calibration), file, indent=1)
        os.replace(file.name, path)
    except OSError as error:
        logger.info("the calibration is not kept: %s", error)


Measure = Callable[[str, str, int], float]


def calibrate(machine: str, measure: Measure, *, budget_s: float = _BUDGET_SECONDS) -> Calibration:
    """Measure both movers in both directions for every size class.

    Args:
        machine: what the result holds for.
        measure: (direction, mover, run bytes) -> GB/s.
        budget_s: seconds after which the classes that are left keep their defaults.
    """
    start = time.monotonic()
    movers: dict[str, tuple[str, ...]] = {}
    gbps: dict[str, list[float]] = {f"{d}/{m}": [] for d in DIRECTIONS for m in GPU_MOVERS}
    for direction in DIRECTIONS:
        chosen = list(DEFAULT)
        for index, run in enumerate(PROBED_RUNS):
            if time.monotonic() - start > budget_s:
                break
            speed = {mover: measure(direction, mover, run) for mover in GPU_MOVERS}
            for mover, value in speed.items():
                gbps[f"{direction}/{mover}"].append(round(value, 2))
            usual = DEFAULT[index]
            other = next(m for m in GPU_MOVERS if m != usual)
            chosen[index] = other if speed[other] > MARGIN * speed[usual] else usual
        movers[direction] = tuple(chosen)
    return Calibration(
        movers,
        {key: tuple(values) for key, values in gbps.items()},
        "measured",
        machine,
        round(time.monotonic() - start, 3),
    )


_current: dict[int, Calibration] = {}


def calibration(device: int = 0, *, fresh: bool = False) -> Calibration:
    """The calibration of a GPU: from this process, from the cache, or measured now.

    Args:
        device: ordinal.
        fresh: measure, whatever is kept.
    """
    if device in _current and not fresh:
        return _current[device]
    status = cuda.status()
    if not 0 <= device < len(status.devices):
        return default_calibration()
    machine = machine_key(status.devices[device], status)
    found = None if fresh else read_cached(machine)
    if found is None:
        try:
            with cuda.beside_captures():
                found = calibrate(machine, GpuProbe(device))
            write_cached(found)
        except Exception as error:  # whatever goes wrong: transfers must work without it
            # Not kept: it may have been for want of memory, and the next plan asks again.
            logger.warning("calibration failed, using defaults for now: %s", error)
            return default_calibration(machine)
    _current[device] = found
    return found


def set_choice(device: int, direction: str, index: int, mover: str) -> None:
    """Let `mover` carry size class `index` of `direction` on `device`, in this process.

    Raises PlanError for a mover, direction or class that there is not.
    """
    if mover not in GPU_MOVERS:
        raise PlanError(f"mover {mover!r}: choose one of a GPU's movers, {', '.join(GPU_MOVERS)}")
    cuda.direction_index(direction)
    if not 0 <= index <= len(SIZE_CLASSES):
        raise PlanError(f"size class {index}: choose one of 0 to {len(SIZE_CLASSES)}")
    now = calibration(device)
    row = list(now.movers[direction])
    row[index] = mover
    _current[device] = replace(now, movers={**now.movers, direction: tuple(row)})


# ---- the choice ----------------------------------------------------------------------------------


_chosen: weakref.WeakKeyDictionary[Any, dict[int, str]] = weakref.WeakKeyDictionary()


def choose_mover(plan: _C.Plan, direction: int) -> str:
    """The mover of a plan's transfers in one direction: what `Engine.choose_mover` should be.

    Raises PlanError where the cache is on a GPU and nothing (NoMoverError), or not what the
    environment names, can carry it; TransferError where a CUDA call failed.
    """
    known = _chosen.setdefault(plan, {})
    if direction not in known:
        known[direction] = _choose(plan, direction)
    return known[direction]


def _choose(plan: _C.Plan, direction: int) -> str:
    if not cuda.is_available():
        return "host"
    try:
        device = _C.cuda.cache_device(plan)
    except (ValueError, RuntimeError) as error:
        raise translated(error) from None
    if device < 0:
        return "host"
    name = DIRECTIONS[direction]
    variable = f"VKVMAP_MOVER_{name.upper()}"
    told = os.environ.get(variable)
    if told is not None and told not in GPU_MOVERS:
        raise PlanError(
            f"{variable}={told!r}: caches on a GPU are moved by one of {', '.join(GPU_MOVERS)}; "
            "set it to one of them, or unset it"
        )
    run = _C.cuda.mean_run_bytes(plan, direction)
    wanted = told or calibration(device).movers[name][size_class(run)]
    for mover in (wanted, *(m for m in GPU_MOVERS if m != wanted)):
        try:
            _C.cuda.prepare(mover, plan)
        except (ValueError, RuntimeError) as error:
            if told is not None:
                raise translated(
                    error,
                    before=f"{variable}={told!r}: that mover cannot carry this plan: ",
                    after="; or unset it, and a mover that can is taken",
                ) from None
            logger.warning("%s: the %s mover cannot carry this plan: %s", name, mover, error)
            reason = str(error)
            continue
        if mover != wanted:
            logger.warning("%s: the %s mover takes its place", name, mover)
        return mover
    raise NoMoverError(f"{name}: no mover can carry this plan: {reason}")
