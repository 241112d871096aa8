"""What needs a GPU, on the CPU stand-in of the CUDA runtime: its tests, a round trip, the suite.

Nothing of it is changed for this: the sources of the movers and bindings are compiled for the CPU,
and the torch that the tests import is a small one over the same runtime (tests/cuda_cpu/python).
Work on a stream runs late and in a seeded order, and slow kernels take their time. What only the
chip can show stays with `scripts/test.sh gpu`.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.cuda_stand_in import Checkout
from tests.cuda_toolchain import Workshop

pytestmark = pytest.mark.cuda


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    return Checkout(Workshop(tmp_path_factory))


OPTIONS = ("-p", "no:cacheprovider", "-p", "no:xdist", "-rA", "--tb=short")


def outcomes(said: str) -> dict[str, set[str]]:
    """Of every test of tests/gpu: function -> outcomes of its cases."""
    seen: dict[str, set[str]] = defaultdict(set)
    for outcome, name in re.findall(r"^([A-Z]+) tests/gpu/\S+\.py::(\w+)", said, re.M):
        seen[name].add(outcome)
    assert seen, said[-4000:]
    return dict(seen)


def test_the_package_believes_that_it_has_a_gpu(checkout: Checkout, tmp_path: Path) -> None:
    done = checkout.python("-m", "vkvmap", "info", "--json", cache=tmp_path)
    told = json.loads(done.stdout)
    assert Path(told["build"]["native module"]).is_relative_to(checkout.root)
    assert told["cuda"]["available"] is True and "CPU stand-in" in done.stdout


@pytest.mark.parametrize("seed", [1, 2])
def test_the_tests_of_the_gpu_pass(checkout: Checkout, tmp_path: Path, seed: int) -> None:
    env = {"VKVMAP_TEST_GPU": "1", "CUDA_CPU_SEED": str(seed)}
    done = checkout.python("-m", "pytest", *OPTIONS, "tests/gpu", cache=tmp_path, **env)
    assert set().union(*outcomes(done.stdout).values()) == {"PASSED"}, done.stdout[-20_000:]
    assert done.returncode == 0


def test_the_tests_of_the_gpu_notice_that_nobody_waits(checkout: Checkout, tmp_path: Path) -> None:
    kept = ("tests/gpu", "-k", "test_gpu_engine or test_gpu_plan or test_gpu_worker")
    env = {"VKVMAP_TEST_GPU": "1", "CUDA_CPU_LOSE_WAITS": "1"}
    done = checkout.python("-m", "pytest", *OPTIONS, *kept, cache=tmp_path, **env)
    failed = {name for name, seen in outcomes(done.stdout).items() if seen == {"FAILED"}}
    assert failed == {
        "test_a_load_comes_after_a_pending_zeroing",
        "test_a_store_carries_what_the_compute_stream_is_still_writing",
        "test_jobs_that_share_nothing_do_not_wait_and_nobody_is_held_up",
        "test_progress_words_appear_once_their_layer_is_in_place",
        "test_jobs_wait_for_what_the_engine_has_queued_before_them",
        "test_what_two_ranks_store_one_loads_layer_by_layer_and_after_sleep",
    }


@pytest.mark.parametrize("mover", ["kernel", "copy_engine"])
def test_a_round_trip_with_caches_on_the_gpu(
    checkout: Checkout, tmp_path: Path, mover: str
) -> None:
    trip = ("-m", "vkvmap", "roundtrip", "llama-3-8b", "--from", "tp=2", "--to", "tp=4")
    place = ("--device", "cuda", "--mover", mover, "--layers", "4", "--json")
    done = checkout.python(*trip, *place, cache=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert {rank["mover"] for rank in told["ranks"]} == {mover}
    spoiled = checkout.python(*trip, *place, "--flip-a-byte", cache=tmp_path)
    assert spoiled.returncode == 1, spoiled.stdout + spoiled.stderr


def test_one_command_says_all_that_a_gpu_can_say(checkout: Checkout, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = checkout.run(
        *("scripts/gpu.sh", str(out), "--scale", "256"), cache=tmp_path, PYTHON=sys.executable
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    assert set().union(*outcomes((out / "tests.txt").read_text()).values()) == {"PASSED"}
    figures = json.loads((out / "figures.json").read_text())
    assert {figure["name"].split("/")[0] for figure in figures} == {
        "ceiling",
        "fragments",
        "model",
        "launch",
        "co-running",
        "small",
        "submit",
        "pool",
    }
    assert all(figure["value"] > 0 for figure in figures)
    # Two contenders need a driver and a compiler of their own; nothing else may be missing.
    _, _, left_out = (out / "suite.txt").read_text().rpartition("not measured:\n")
    assert [line.split(":")[0].strip() for line in left_out.splitlines()] == [
        "batched triples",
        "triton triples",
    ]


def test_one_command_fails_where_a_test_fails(checkout: Checkout, tmp_path: Path) -> None:
    env = {"PYTHON": sys.executable, "CUDA_CPU_LOSE_WAITS": "1", "PYTEST_ADDOPTS": "-k zeroing"}
    command = ("scripts/gpu.sh", str(tmp_path), "--scale", "256", "--phases", "ceilings")
    done = checkout.run(*command, cache=tmp_path, **env)
    assert done.returncode == 1 and "4 failed" in done.stdout, done.stdout + done.stderr
