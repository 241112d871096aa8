"""What needs a GPU, on the CPU stand-in of the CUDA runtime: its tests, a round trip, the suite.

Nothing of it is changed for this: the sources of the movers and bindings are compiled for the CPU,
and the torch that the tests import is a small one over the same runtime (tests/cuda_cpu/python).
Work on a stream runs late and in a seeded order, and slow kernels take their time. What only the
chip can show stays with `scripts/test.sh gpu`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.cuda_stand_in import Checkout
from tests.cuda_toolchain import Workshop

pytestmark = pytest.mark.cuda

#: Events are not waited for, and slow work takes half a second: what does not wait is early then,
#: on a busy machine, too.
WITHOUT_WAITS = {"CUDA_CPU_LOSE_WAITS": "1", "VKVMAP_TEST_SHORT_CYCLES": "1_000_000_000"}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    return Checkout(Workshop(tmp_path_factory))


OPTIONS = ("-p", "no:cacheprovider", "-p", "no:xdist", "-rA", "--tb=short")


def outcomes(said: str) -> dict[str, set[str]]:
    """Of every test of tests/gpu that pytest has collected: function -> outcomes of its cases.

    A line of a skip names a file and no test, so that the case has no outcome: that fails here.
    """
    cases: dict[str, set[str]] = defaultdict(set)
    for outcome, case in re.findall(r"^([A-Z]+) (tests/gpu/\S+\.py::.+?)(?: - .*)?$", said, re.M):
        cases[case].add(outcome)
    collected = re.search(r"^collected (\d+) items?(.*)$", said, re.M)
    assert collected, said[-4000:]
    count, rest = collected.groups()
    selected = re.search(r"(\d+) selected", rest)
    assert len(cases) == int(selected[1] if selected else count) > 0, said[-4000:]
    assert "skipped" not in rest, said[:4000]
    seen: dict[str, set[str]] = defaultdict(set)
    for case, told in cases.items():
        seen[re.split(r"::|\[", case)[1]] |= told
    return dict(seen)


def gpu_tests(
    checkout: Checkout, cache: Path, *which: str, **env: str
) -> tuple[dict[str, set[str]], str]:
    """Outcomes of the GPU tests under an environment, and all that was said."""
    command = ("-m", "pytest", *OPTIONS, "tests/gpu", *which)
    done = checkout.python(*command, cache=cache, VKVMAP_TEST_GPU="1", **env)
    said = done.stdout + done.stderr
    seen = outcomes(said)
    assert (done.returncode == 0) is (set().union(*seen.values()) == {"PASSED"}), said[-20_000:]
    return seen, said


@pytest.mark.parametrize(
    "skips",
    ["def test_skips(): pytest.skip('why')", "pytest.skip('why', allow_module_level=True)"],
    ids=["test", "file"],
)
def test_a_test_that_is_skipped_is_missed(tmp_path: Path, skips: str) -> None:
    folder = tmp_path / "tests" / "gpu"
    folder.mkdir(parents=True)
    (folder / "test_runs.py").write_text("def test_runs(): pass\n")
    (folder / "test_skips.py").write_text(f"import pytest\n{skips}\n")
    command = (sys.executable, "-m", "pytest", *OPTIONS, "-c", "/dev/null", "--rootdir", ".")
    done = subprocess.run(
        [*command, "tests/gpu"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "PASSED tests/gpu/test_runs.py::test_runs" in done.stdout
    with pytest.raises(AssertionError):
        outcomes(done.stdout)


def test_the_package_believes_that_it_has_a_gpu(checkout: Checkout, tmp_path: Path) -> None:
    done = checkout.python("-m", "vkvmap", "info", "--json", cache=tmp_path)
    told = json.loads(done.stdout)
    assert Path(told["build"]["native module"]).is_relative_to(checkout.root)
    assert told["cuda"]["available"] is True and "CPU stand-in" in done.stdout


RAISES_IN_A_CAPTURE = """
import torch
stream = torch.cuda.Stream()
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
        raise KeyError
except KeyError:
    memory = torch.zeros(64, dtype=torch.uint8, device="cuda")  # refused while one is captured
assert not memory.cpu().numpy().any()
"""

LETS_GO_OF_MEMORY_IN_USE = """
import torch
source, target = (torch.zeros(64, dtype=torch.uint8, device="cuda") for _ in range(2))
torch.cuda.synchronize()
with torch.cuda.stream(torch.cuda.Stream()):
    torch.cuda._sleep(100_000_000)
    target.copy_(source, non_blocking=True)
del source
torch.cuda.synchronize()
assert target.cpu().numpy().all()
"""


@pytest.mark.parametrize(
    "script", [RAISES_IN_A_CAPTURE, LETS_GO_OF_MEMORY_IN_USE], ids=["capture", "memory"]
)
def test_the_small_torch_does_as_torch_does(
    checkout: Checkout, tmp_path: Path, script: str
) -> None:
    done = checkout.python("-c", script, cache=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_tests_of_the_gpu_pass(checkout: Checkout, tmp_path: Path) -> None:
    seen, said = gpu_tests(checkout, tmp_path, CUDA_CPU_SEED="1")
    assert set().union(*seen.values()) == {"PASSED"}, said[-20_000:]


def test_the_tests_of_the_gpu_pass_where_it_sees_registered_memory_at_other_addresses(
    checkout: Checkout, tmp_path: Path
) -> None:
    seen, said = gpu_tests(checkout, tmp_path, CUDA_CPU_SEED="2", CUDA_CPU_ALIASES="1")
    wrong = [name for name, told in seen.items() if told != {"PASSED"}]
    # Pieces are moved apart by that, and the kernel, which has one base for all, says so.
    assert wrong == ["test_a_region_is_pinned_in_pieces_and_moved"], said[-20_000:]
    assert "1 failed" in said and "at another distance than the bytes before it" in said


def test_the_tests_of_the_gpu_notice_that_nobody_waits(checkout: Checkout, tmp_path: Path) -> None:
    kept = ("-k", "(test_gpu_engine or test_gpu_plan or test_gpu_worker) and not fresh_plan")
    seen, said = gpu_tests(checkout, tmp_path, *kept, **WITHOUT_WAITS)
    wrong = {name: told for name, told in seen.items() if told != {"PASSED"}}
    # What is lost is a stream's wait for another. Jobs that meet wait for each other in the engine.
    noticed = (
        "test_a_load_comes_after_a_pending_zeroing",
        "test_a_store_carries_what_the_compute_stream_is_still_writing",
        "test_jobs_that_share_nothing_do_not_wait_and_nobody_is_held_up",
        "test_progress_words_appear_once_their_layer_is_in_place",
        "test_jobs_wait_for_what_the_engine_has_queued_before_them",
        "test_what_two_ranks_store_one_loads_layer_by_layer_and_after_sleep",
    )
    assert wrong == {name: {"FAILED"} for name in noticed}, said[-20_000:]


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
    env = {"PYTHON": sys.executable, "PYTEST_ADDOPTS": "-k zeroing", **WITHOUT_WAITS}
    command = ("scripts/gpu.sh", str(tmp_path), "--scale", "256", "--phases", "ceilings")
    done = checkout.run(*command, cache=tmp_path, **env)
    assert done.returncode == 1 and "4 failed" in done.stdout, done.stdout + done.stderr
