"""What needs a GPU, on the CPU stand-in of the CUDA runtime: its tests, a round trip, the suite.

Nothing of it is changed for this: the sources of the movers and bindings are compiled for the CPU,
and the torch that the tests import is a small one over the same runtime (tests/cuda_cpu/python).
Work on a stream runs late and in a seeded order, and slow kernels take their time. What only the
chip can show stays with `scripts/test.sh gpu`.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path

import pytest

from tests.cuda_stand_in import Checkout
from tests.cuda_toolchain import Workshop

pytestmark = pytest.mark.cuda


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    return Checkout(Workshop(tmp_path_factory))


def gpu_tests(checkout: Checkout, cache: Path, *arguments: str, **env: str) -> dict[str, set[str]]:
    """Outcomes of every test of tests/gpu: function -> those of its cases."""
    options = ("-q", "-rA", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short")
    done = checkout.python(
        *("-m", "pytest", *options, "tests/gpu", *arguments),
        cache=cache,
        VKVMAP_TEST_GPU="1",
        **env,
    )
    outcomes: dict[str, set[str]] = defaultdict(set)
    for outcome, name in re.findall(r"^([A-Z]+) tests/gpu/\S+\.py::(\w+)", done.stdout, re.M):
        outcomes[name].add(outcome)
    assert outcomes, done.stdout[-4000:] + done.stderr[-4000:]
    wrong = {name for name, seen in outcomes.items() if seen != {"PASSED"}}
    if wrong:
        print(done.stdout[-20_000:])
    return dict(outcomes)


def test_the_package_believes_that_it_has_a_gpu(checkout: Checkout, tmp_path: Path) -> None:
    done = checkout.python("-m", "vkvmap", "info", "--json", cache=tmp_path)
    told = json.loads(done.stdout)
    assert Path(told["build"]["native module"]).is_relative_to(checkout.root)
    assert told["cuda"]["available"] is True and "CPU stand-in" in done.stdout


@pytest.mark.parametrize("seed", range(3))
def test_the_tests_of_the_gpu_pass(checkout: Checkout, tmp_path: Path, seed: int) -> None:
    outcomes = gpu_tests(checkout, tmp_path, CUDA_CPU_SEED=str(seed))
    assert set().union(*outcomes.values()) == {"PASSED"}


def test_the_tests_of_the_gpu_notice_that_nobody_waits(checkout: Checkout, tmp_path: Path) -> None:
    kept = ("-k", "test_gpu_engine or test_gpu_worker")
    outcomes = gpu_tests(checkout, tmp_path, *kept, CUDA_CPU_LOSE_WAITS="1")
    failed = {name for name, seen in outcomes.items() if seen == {"FAILED"}}
    assert failed == {
        "test_a_load_comes_after_a_pending_zeroing",
        "test_a_store_carries_what_the_compute_stream_is_still_writing",
        "test_jobs_that_share_nothing_do_not_wait_and_nobody_is_held_up",
        "test_progress_words_appear_once_their_layer_is_in_place",
        "test_jobs_wait_for_what_the_engine_has_queued_before_them",
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


def test_the_gpu_suite_measures_every_phase(checkout: Checkout, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    done = checkout.python(
        "-m", "benchmarks.gpu_suite", "--scale", "256", "--json", str(file), cache=tmp_path
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    figures = json.loads(file.read_text())
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
    _, _, left_out = done.stdout.rpartition("not measured:\n")
    assert [line.split(":")[0].strip() for line in left_out.splitlines()] == [
        "batched triples",
        "triton triples",
    ]
