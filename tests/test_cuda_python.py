"""The GPU side of the package on a machine that has none, and the choice between movers."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from vkvmap import _C, Region, calibrate, cuda
from vkvmap.calibrate_probe import synthetic_plan
from vkvmap.region import Section

no_gpu = pytest.mark.skipif(cuda.is_available(), reason="this machine has a GPU")


def a_region(rows: int = 7, stride: int = 3 * 4096) -> Region:
    sections = [
        Section("shared", num_rows=rows, payload_bytes=stride, private=False),
        Section("private", num_rows=3, payload_bytes=4096, private=True),
    ]
    return Region.create(sections)


def test_asking_never_raises_and_says_why_not() -> None:
    status = cuda.status()
    assert cuda.is_available() == (not status.error) == (not cuda.why_not())
    assert status.devices or status.error
    assert len(cuda.devices()) == len(status.devices)


@no_gpu
def test_what_needs_a_gpu_names_the_reason() -> None:
    for call in (
        lambda: cuda.tuning("store"),
        lambda: cuda.set_tuning("load", cuda.KernelTuning()),
        lambda: cuda.enqueue("kernel", None, 0, [], 0),
        lambda: cuda.GraphTransfer(None, 0, {}),
    ):
        with pytest.raises(cuda.CudaUnavailableError) as error:
            call()
        assert cuda.why_not() in str(error.value)


@no_gpu
def test_a_region_that_cannot_be_pinned_stays_pageable_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with a_region() as region:
        votes = []
        pinning = cuda.pin(region, agree=lambda ok: votes.append(ok) or ok)
        assert (pinning.pinned, region.pinned, votes) == (False, False, [False])
        assert pinning.why_not and pinning.why_not in caplog.text
        pinning.release()


class FakeNative:
    """The native module of a machine whose GPU registers whatever it is given."""

    BUILT = True
    made: ClassVar[list[FakeNative]] = []

    def __init__(self) -> None:
        self.released = 0

    def status(self) -> dict[str, Any]:
        return {"runtime_version": 13000, "driver_version": 13000, "devices": [], "error": ""}

    def Registration(self, ranges: list[Any], limit: int) -> FakeNative:
        one = FakeNative()
        one.pieces, one.why_not = ranges, ""
        FakeNative.made.append(one)
        return one

    def release(self) -> None:
        self.released += 1


@pytest.fixture
def registering_gpu(monkeypatch: pytest.MonkeyPatch) -> type[FakeNative]:
    FakeNative.made.clear()
    monkeypatch.setattr(cuda._C, "cuda", FakeNative())
    return FakeNative


def test_registration_covers_the_region_in_ranges_that_meet_on_pages(
    registering_gpu: type[FakeNative],
) -> None:
    with a_region() as region:
        pinning = cuda.pin(region)
        assert pinning.pinned and region.pinned
        covered = np.zeros(region.nbytes, np.uint8)
        for address, nbytes, _ in pinning.pieces:
            assert address == region.address or address % 4096 == 0
            covered[address - region.address : address - region.address + nbytes] += 1
        assert (covered == 1).all()
        strides = {address: stride for address, _, stride in pinning.pieces}
        assert strides[region.section("shared").address] == region.section("shared").row_stride


def test_a_region_keeps_its_registration_until_it_is_closed(
    registering_gpu: type[FakeNative],
) -> None:
    region = a_region()
    cuda.pin(region)
    gc.collect()
    assert region.pinned
    assert [native.released for native in FakeNative.made] == [0]
    region.close()
    assert not region.pinned
    assert [native.released for native in FakeNative.made] == [1]


def test_a_released_registration_leaves_the_region_pageable(
    registering_gpu: type[FakeNative],
) -> None:
    with a_region() as region:
        cuda.pin(region).release()
        assert not region.pinned


def test_if_one_rank_cannot_pin_every_rank_rolls_back_once(
    registering_gpu: type[FakeNative],
) -> None:
    regions = [a_region() for _ in range(3)]
    votes = [True, False, True]
    outcome = [cuda.pin(region, agree=lambda ok: ok and all(votes)) for region in regions]
    assert [p.pinned for p in outcome] == [False] * 3
    assert [r.pinned for r in regions] == [False] * 3
    assert [native.released for native in FakeNative.made] == [1] * 3
    assert all("another rank" in p.why_not for p in outcome)
    for pinning in outcome:
        pinning.release()
    assert [native.released for native in FakeNative.made] == [1] * 3
    for region in regions:
        region.close()


# ---- calibration -------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibrate, "_current", {})
    return tmp_path


@pytest.mark.parametrize(
    ("run", "index"),
    [(1, 0), (512, 0), (513, 1), (4096, 1), (28672, 2), (28673, 3), (131072, 3), (10**9, 4)],
)
def test_size_classes_partition_run_lengths(run: int, index: int) -> None:
    assert calibrate.size_class(run) == index


def test_every_size_class_is_probed_with_a_run_of_its_own() -> None:
    assert [calibrate.size_class(r) for r in calibrate.PROBED_RUNS] == list(range(5))


def test_the_faster_mover_is_chosen_and_a_draw_keeps_the_usual_one() -> None:
    def measure(direction: str, mover: str, run: int) -> float:
        if direction == "load":
            return 50.0
        return 40.0 if (mover == "copy_engine") == (run >= 16 << 10) else 30.0

    found = calibrate.calibrate("m", measure)
    assert found.movers["load"] == calibrate.DEFAULT
    assert found.movers["store"] == ("kernel", "kernel", *["copy_engine"] * 3)
    assert found.gbps["store/kernel"] == (40.0, 40.0, 30.0, 30.0, 30.0)


def test_a_calibration_that_takes_too_long_keeps_defaults_for_the_rest() -> None:
    found = calibrate.calibrate("m", lambda *_: pytest.fail("measured"), budget_s=-1)
    assert found.movers == {"store": calibrate.DEFAULT, "load": calibrate.DEFAULT}


def test_a_calibration_is_kept_for_its_machine_alone() -> None:
    found = calibrate.calibrate("this machine", lambda d, m, r: 1.0)
    calibrate.write_cached(found)
    again = calibrate.read_cached("this machine")
    assert again is not None and again.source == "cached"
    assert (again.movers, again.gbps) == (found.movers, found.gbps)
    assert calibrate.read_cached("another machine") is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda kept: "{",
        lambda kept: "[]",
        lambda kept: json.dumps({**kept, "machine": "other"}),
        lambda kept: json.dumps({**kept, "movers": {"store": ["kernel"] * 5}}),
        lambda kept: json.dumps({**kept, "movers": {d: ["rm -rf"] * 5 for d in kept["movers"]}}),
        lambda kept: json.dumps({**kept, "movers": {d: ["kernel"] * 4 for d in kept["movers"]}}),
    ],
)
def test_a_cache_file_that_does_not_fit_is_as_good_as_none(damage: Any) -> None:
    calibrate.write_cached(calibrate.calibrate("m", lambda d, m, r: 1.0))
    file = calibrate.cache_file("m")
    file.write_text(damage(json.loads(file.read_text())))
    assert calibrate.read_cached("m") is None


def test_a_cache_below_a_file_is_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    calibrate.write_cached(calibrate.calibrate("m", lambda d, m, r: 1.0))
    assert calibrate.read_cached("m") is None


@no_gpu
def test_without_a_gpu_the_host_mover_is_chosen() -> None:
    memory = np.zeros(1 << 16, np.uint8)
    at = memory.ctypes.data
    plan = synthetic_plan(at, 1 << 14, at + (1 << 14), 3 << 14, page_bytes=4096, run_bytes=256)
    assert [calibrate.choose_mover(plan, d) for d in (0, 1)] == ["host", "host"]


class ChoosingNative:
    """A machine whose GPU holds the plan's cache, with movers that may refuse."""

    def __init__(self, run: int, refuses: tuple[str, ...] = (), device: int = 0) -> None:
        self.run, self.refuses, self.device = run, refuses, device

    def cache_device(self, plan: object) -> int:
        return self.device

    def mean_run_bytes(self, plan: object, direction: int) -> int:
        return self.run

    def prepare(self, mover: str, plan: object) -> None:
        if mover in self.refuses:
            raise ValueError(f"{mover} cannot reach it")


class APlan:
    pass


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(*args: Any, **kwargs: Any) -> None:
        native = ChoosingNative(*args, **kwargs)
        monkeypatch.setattr(cuda, "is_available", lambda: True)
        monkeypatch.setattr(calibrate._C, "cuda", native)
        monkeypatch.setattr(calibrate, "_current", {0: calibrate.default_calibration()})

    return install


def test_the_choice_follows_run_length(a_gpu: Any) -> None:
    for run, mover in ((16, "kernel"), (20_000, "kernel"), (28_673, "copy_engine")):
        a_gpu(run)
        assert calibrate.choose_mover(APlan(), 0) == mover


def test_a_mover_that_cannot_carry_a_plan_is_replaced_and_that_is_said(
    a_gpu: Any, caplog: pytest.LogCaptureFixture
) -> None:
    a_gpu(256, refuses=("kernel",))
    assert calibrate.choose_mover(APlan(), 1) == "copy_engine"
    assert "kernel cannot reach it" in caplog.text and "takes its place" in caplog.text


def test_a_cache_on_the_gpu_is_never_given_to_the_host_mover(a_gpu: Any) -> None:
    a_gpu(256, refuses=calibrate.GPU_MOVERS)
    with pytest.raises(calibrate.NoMoverError, match="cannot reach it"):
        calibrate.choose_mover(APlan(), 0)


def test_a_cache_in_host_memory_is_moved_by_the_host_even_where_there_is_a_gpu(a_gpu: Any) -> None:
    a_gpu(256, device=-1)
    assert calibrate.choose_mover(APlan(), 0) == "host"


def test_the_environment_overrides_a_direction_and_does_not_fall_back(
    a_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VKVMAP_MOVER_STORE", "copy_engine")
    a_gpu(256)
    plan = APlan()
    assert [calibrate.choose_mover(plan, d) for d in (0, 1)] == ["copy_engine", "kernel"]
    a_gpu(256, refuses=("copy_engine",))
    with pytest.raises(ValueError, match="cannot reach it"):
        calibrate.choose_mover(APlan(), 0)
    monkeypatch.setenv("VKVMAP_MOVER_STORE", "host")
    with pytest.raises(ValueError, match="VKVMAP_MOVER_STORE='host'"):
        calibrate.choose_mover(APlan(), 0)


def test_a_choice_can_be_set_for_one_size_class(a_gpu: Any) -> None:
    a_gpu(256)
    calibrate.set_choice(0, "store", 0, "copy_engine")
    assert calibrate.choose_mover(APlan(), 0) == "copy_engine"
    assert calibrate.choose_mover(APlan(), 1) == "kernel"
    with pytest.raises(ValueError, match="kernel, copy_engine"):
        calibrate.set_choice(0, "store", 0, "host")


def test_mean_run_length_counts_what_is_contiguous_on_both_sides() -> None:
    if not _C.cuda.BUILT:
        pytest.skip("built without CUDA")
    memory = np.zeros(1 << 20, np.uint8)
    at = memory.ctypes.data
    for run in (16, 256, 4096, 16384):
        plan = synthetic_plan(
            at, 1 << 18, at + (1 << 18), 3 << 18, page_bytes=1 << 16, run_bytes=run
        )
        assert _C.cuda.mean_run_bytes(plan, 0) == run
    whole = synthetic_plan(
        at, 1 << 18, at + (1 << 18), 1 << 18, page_bytes=1 << 16, run_bytes=64, spread=1
    )
    assert _C.cuda.mean_run_bytes(whole, 1) == 1 << 16


def test_importing_the_gpu_side_needs_no_torch() -> None:
    code = "import sys, vkvmap.cuda, vkvmap.calibrate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
