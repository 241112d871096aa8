"""Mutation testing of the proof: `python -m tests.mutation [MODULE ...] [--every N] [--jobs N]`.

Makes every small wrong version of the modules that prove and pack, and runs each module's own fast
tests against it. A mutant that no test notices is a gap in the tests, unless explained.txt says why
it is no wrong version at all. Exits with 1 if an unexplained one survived.

Tests run in forked children of one process that has the heavy imports behind it, first with few
examples and, for what survives, with the ordinary number.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import hypothesis
import numpy
import pytest

from tests.mutation.mutants import Mutant, mutants

ROOT = Path(__file__).parents[2]
EXPLAINED = Path(__file__).with_name("explained.txt")
TIME_LIMIT = 120  # seconds; a mutant that hangs is noticed too

_ALGEBRA = [
    "test_gaps",
    "test_faults_mapping",
    "test_contradictions",
    "test_encodings",
    "test_derive",
    "test_recurrent",
]
_MOVING = ["test_gaps", "test_pack", "test_plan", "test_faults_runtime", "test_transfer"]
#: Fast tests per module, cheapest first.
TESTS: dict[str, list[str]] = {
    "boxes": ["test_gaps", "test_boxes", *_ALGEBRA[1:]],
    "cache": [*_ALGEBRA, "test_plan", "test_memory", "test_coincidence"],
    "certify": [
        "test_gaps",
        "test_contradictions",
        "test_certify",
        "test_writers",
        "test_faults_mapping",
    ],
    "chunk": ["test_edges", "test_faults_mapping", "test_contradictions", "test_format", *_MOVING],
    "derive": [*_ALGEBRA, "test_opaque", "test_memory", "test_coincidence"],
    "derive_layer": [*_ALGEBRA, "test_memory", "test_coincidence"],
    "grid": _ALGEBRA,
    "holding": [*_ALGEBRA, "test_coincidence"],
    "layout": [*_ALGEBRA, "test_memory", "test_coincidence"],
    "mapping": [*_ALGEBRA, "test_writers"],
    "opaque": ["test_opaque", *_ALGEBRA, *_MOVING[1:]],
    "pack": _MOVING,
    "plan": [*_MOVING, "test_faults_mapping"],
    "recognise": [
        "test_gaps",
        "test_faults_mapping",
        "test_contradictions",
        "test_encodings",
        "test_plan",
        "test_memory",
        "test_coincidence",
    ],
    "sections": ["test_edges", "test_faults_mapping", *_MOVING],
    "writers": ["test_gaps", "test_writers", *_MOVING[1:]],
}


def child(folder: Path, tests: Sequence[str], profile: str) -> None:
    """Run the tests in `folder` and leave this process with pytest's status."""
    os.setsid()
    os.chdir(folder)
    os.environ["VKVMAP_HYPOTHESIS"] = profile
    sys.dont_write_bytecode = True
    sys.path[:] = [str(folder), *(p for p in sys.path if p not in ("", str(ROOT)))]
    for name in [n for n in sys.modules if n.split(".")[0] in ("tests", "vkvmap")]:
        del sys.modules[name]
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
        files = [f"tests/{name}.py" for name in tests if (folder / f"tests/{name}.py").exists()]
        status = 3
        with contextlib.suppress(BaseException):
            status = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *files]))
        os._exit(min(status, 3))


def survives(folder: Path, tests: Sequence[str], profile: str) -> bool:
    pid = os.fork()
    if pid == 0:
        child(folder, tests, profile)
    deadline = time.monotonic() + TIME_LIMIT
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.02)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


def explained() -> set[tuple[str, str, str]]:
    """(module, before, after) of the mutants that explained.txt speaks about."""
    found, lines = set(), EXPLAINED.read_text().splitlines()
    for at, line in enumerate(lines):
        if line.startswith("    - "):
            headings = [text for text in lines[:at] if text and not text.startswith(" ")]
            module = headings[-1].rstrip(":")
            found.add((module, line[6:], lines[at + 1][6:]))
    return found


def work(jobs: Sequence[tuple[str, Mutant]], folder: Path, out: int) -> None:
    """Try `jobs` one after the other in a copy of the project; report survivors by index."""
    for kind in ("vkvmap", "tests"):
        shutil.copytree(
            ROOT / kind, folder / kind, ignore=shutil.ignore_patterns("__pycache__", "corpus")
        )
    for index, (module, mutant) in jobs:  # type: ignore[misc]
        path = folder / "vkvmap" / f"{module}.py"
        right = path.read_text()
        path.write_text(mutant.source)
        alive = all(survives(folder, TESTS[module], profile) for profile in ("fast", "mutant"))
        path.write_text(right)
        os.write(out, f"{index} {int(alive)}\n".encode())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", default=list(TESTS))
    parser.add_argument("--every", type=int, default=1, help="try a random 1/N of the mutants")
    parser.add_argument("--skip", type=int, default=0, help="go on after so many")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(f"numpy {numpy.__version__}, hypothesis {hypothesis.__version__}", flush=True)
    all_jobs: list[tuple[str, Mutant]] = []
    for module in arguments.modules:
        source = (ROOT / "vkvmap" / f"{module}.py").read_text()
        all_jobs.extend((module, mutant) for mutant in mutants(source))
    chosen = list(enumerate(all_jobs))
    random.Random(arguments.seed).shuffle(chosen)
    chosen = chosen[: -(-len(chosen) // arguments.every)][arguments.skip :]
    known, start = explained(), time.monotonic()
    survivors, tried, excused = [], 0, 0
    with tempfile.TemporaryDirectory() as scratch:
        reading, writing = os.pipe()
        pids = []
        for worker in range(arguments.jobs):
            pid = os.fork()
            if pid == 0:
                folder = Path(scratch) / str(worker)
                try:
                    work(chosen[worker :: arguments.jobs], folder, writing)  # type: ignore[arg-type]
                finally:
                    os._exit(0)
            pids.append(pid)
        os.close(writing)
        with os.fdopen(reading) as results:
            for line in results:
                index, alive = map(int, line.split())
                module, mutant = all_jobs[index]
                tried += 1
                if tried % 100 == 0:
                    print(f"{tried} of {len(chosen)} tried", flush=True)
                if not alive:
                    continue
                if (module, mutant.before, mutant.after) in known:
                    excused += 1
                    continue
                survivors.append((module, mutant))
                print(f"{module}.py:{mutant.line}\n    - {mutant.before}\n    + {mutant.after}")
                sys.stdout.flush()
        for pid in pids:
            os.waitpid(pid, 0)
    print(
        f"{tried} mutants of {len(all_jobs)} tried in {time.monotonic() - start:.0f} s: "
        f"{tried - excused - len(survivors)} noticed, {excused} explained, "
        f"{len(survivors)} unexplained"
    )
    return 1 if survivors or tried < len(chosen) else 0


if __name__ == "__main__":
    sys.exit(main())
