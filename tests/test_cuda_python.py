"""The GPU side of the package on a machine that has none, and the choice between movers."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from vkvmap import _C, Region, calibrate, cuda
from vkvmap.calibrate_probe import synthetic_plan
from vkvmap.errors import PlanError, TransferError
from vkvmap.native import stream_handle
from vkvmap.region import Section
from vkvmap.transfer import Engine

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


class CountingNative:
    """A native module that counts how often it is asked for devices, and has none at first."""

    BUILT = True

    def __init__(self, *errors: str) -> None:
        self.errors, self.asked = list(errors), 0

    def status(self) -> dict[str, Any]:
        self.asked += 1
        error = self.errors.pop(0) if self.errors else ""
        return {"runtime_version": 1, "driver_version": 1, "devices": [], "error": error}

    def enqueue(self, *arguments: Any) -> None:
        pass


def test_a_gpu_is_looked_for_until_there_is_one_and_then_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    native = CountingNative("not yet", "still not")
    monkeypatch.setattr(cuda._C, "cuda", native)
    for why in ("not yet", "still not"):
        with pytest.raises(cuda.CudaUnavailableError, match=why):
            cuda.enqueue("kernel", None, 0, [], 0)
    for _ in range(5):
        cuda.enqueue("kernel", None, 0, [], 0)
    assert native.asked == 3
    other = CountingNative("gone")
    monkeypatch.setattr(cuda._C, "cuda", other)
    with pytest.raises(cuda.CudaUnavailableError, match="gone"):
        cuda.enqueue("kernel", None, 0, [], 0)


def test_a_forked_child_looks_for_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    native = CountingNative()
    monkeypatch.setattr(cuda._C, "cuda", native)
    cuda.enqueue("kernel", None, 0, [], 0)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            cuda.enqueue("kernel", None, 0, [], 0)
            status = native.asked
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2


class RefusingNative(CountingNative):
    """A native module with a GPU, which refuses whatever it is asked to do."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error: Exception | None = None
        self.later = error

    def refuse(self, *_: Any, **__: Any) -> Any:
        raise self.later

    enqueue = tuning = set_tuning = set_ids = launch = refuse

    def GraphTransfer(self, *_: Any) -> RefusingNative:
        if self.error is not None:
            raise self.error
        self.error = self.later
        return self


@pytest.mark.parametrize(
    ("refused", "raised"), [(ValueError("no"), PlanError), (RuntimeError("no"), TransferError)]
)
def test_what_the_native_module_refuses_is_an_error_of_the_package(
    monkeypatch: pytest.MonkeyPatch, refused: Exception, raised: type[Exception]
) -> None:
    monkeypatch.setattr(cuda._C, "cuda", RefusingNative(refused))
    transfer = cuda.GraphTransfer(None, 0, {})
    for call in (
        lambda: cuda.enqueue("kernel", None, 0, [], 0),
        lambda: cuda.GraphTransfer(None, 0, {}),
        lambda: transfer.set_ids([]),
        lambda: transfer.launch(0),
        lambda: cuda.tuning("store"),
        lambda: cuda.set_tuning("load", cuda.KernelTuning()),
    ):
        with pytest.raises(raised, match=r"^no$"):
            call()


def test_a_direction_that_there_is_not_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda._C, "cuda", RefusingNative(AssertionError("asked")))
    for call in (
        lambda: cuda.tuning("sideways"),
        lambda: cuda.set_tuning("sideways", cuda.KernelTuning()),
    ):
        with pytest.raises(PlanError, match="'sideways': choose one of store, load"):
            call()


class Stream:
    def __init__(self, handle: Any) -> None:
        self.cuda_stream = handle

    def __repr__(self) -> str:
        return f"Stream({self.cuda_stream!r})"


STREAMS = [(None, 0), (7, 7), (Stream(9), 9), ((1 << 64) - 1, (1 << 64) - 1)]
NO_STREAMS = [True, 1.5, "x", -1, 1 << 64, Stream(None), Stream(True), Stream("7")]


def test_a_stream_is_a_handle_an_object_that_has_one_or_the_default_one() -> None:
    assert [stream_handle(stream) for stream, _ in STREAMS] == [n for _, n in STREAMS]


@pytest.mark.parametrize("stream", NO_STREAMS, ids=repr)
def test_what_is_no_stream_is_refused_alike_by_engine_graph_and_enqueue(
    monkeypatch: pytest.MonkeyPatch, stream: Any
) -> None:
    memory = np.zeros(1 << 12, np.uint8)
    at = memory.ctypes.data
    plan = synthetic_plan(at, 1 << 10, at + (1 << 10), 1 << 11, page_bytes=512, run_bytes=256)
    said = set()
    with Engine(threads=1) as engine, pytest.raises(PlanError) as error:
        engine.submit(plan, 0, [], stream=stream)
    said.add(str(error.value))
    monkeypatch.setattr(cuda._C, "cuda", RefusingNative(AssertionError("asked")))
    transfer = cuda.GraphTransfer(None, 0, {})
    for call in (
        lambda: cuda.enqueue("kernel", None, 0, [], stream),
        lambda: transfer.launch(stream),
    ):
        with pytest.raises(PlanError) as error:
            call()
        said.add(str(error.value))
    assert len(said) == 1 and "no CUDA stream; pass" in said.pop()


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


def test_a_calibration_that_failed_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    device = cuda.Device(0, "a GPU", (9, 0), 8, 2, 1 << 30, "0000:00:00.0")
    status = cuda.Status(True, 13000, 13000, (device,), "")
    monkeypatch.setattr(cuda, "status", lambda: status)
    monkeypatch.setattr(cuda, "beside_captures", contextlib.nullcontext)
    monkeypatch.setattr(calibrate, "_current", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def out_of_memory(device: int) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(calibrate, "GpuProbe", out_of_memory)
    assert calibrate.calibration(0).source == "default" and "out of memory" in caplog.text
    monkeypatch.setattr(calibrate, "GpuProbe", lambda device: lambda *what: 1.0)
    assert calibrate.calibration(0).source == "measured"
    assert calibrate.calibration(0).source == "measured"


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


def test_a_region_that_is_pinned_stays_as_it_is(registering_gpu: type[FakeNative]) -> None:
    with a_region() as region:
        first = cuda.pin(region)
        votes: list[bool] = []
        again = cuda.pin(region, agree=lambda ok: votes.append(ok) or True)
        assert again is first is region.registration and region.pinned
        assert votes == [True]
        assert [native.released for native in FakeNative.made] == [0]
        lost = cuda.pin(region, agree=lambda ok: False)
        assert lost is first and not region.pinned and "another rank" in lost.why_not
        assert [native.released for native in FakeNative.made] == [1]
        assert cuda.pin(region) is not first and region.pinned
        assert [native.released for native in FakeNative.made] == [1, 0]


def test_a_rank_whose_registration_fails_still_votes(
    registering_gpu: type[FakeNative], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no context")

    monkeypatch.setattr(cuda._C.cuda, "Registration", fail, raising=False)
    closed = a_region()
    closed.close()
    with a_region() as region:
        for one, why in ((region, "no context"), (closed, "the region is closed")):
            votes: list[bool] = []
            pinning = cuda.pin(one, agree=lambda ok, votes=votes: votes.append(ok) or ok)
            assert (pinning.pinned, pinning.why_not, votes) == (False, why, [False])


def test_memory_stays_mapped_for_as_long_as_it_is_registered(
    registering_gpu: type[FakeNative],
) -> None:
    region, holder = a_region(), APlan()
    pinning, mapped = cuda.pin(region), weakref.ref(region.view)
    region.hold(holder)
    region.close(force=True)  # a transfer may be running, so nothing is released
    del region
    gc.collect()
    assert pinning.pinned and mapped() is not None
    pinning.release()
    assert mapped() is None
    assert [native.released for native in FakeNative.made] == [1]


def test_a_registration_that_is_dropped_is_released_once(
    registering_gpu: type[FakeNative],
) -> None:
    with a_region() as region:
        cuda.pin(region)
        region.registration = None
        gc.collect()
        assert [native.released for native in FakeNative.made] == [1]


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


class Raising:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def __call__(self, *_: Any) -> Any:
        raise self.error


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
    assert issubclass(calibrate.NoMoverError, PlanError)


def test_caches_that_no_one_device_has_are_a_plan_error(
    a_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_gpu(256)
    for error, raised in ((ValueError("2 devices"), PlanError), (RuntimeError("2"), TransferError)):
        monkeypatch.setattr(calibrate._C.cuda, "cache_device", Raising(error), raising=False)
        with pytest.raises(raised, match=str(error)):
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
    with pytest.raises(
        PlanError, match=r"VKVMAP_MOVER_STORE='copy_engine': .*cannot reach it; or unset it"
    ):
        calibrate.choose_mover(APlan(), 0)
    monkeypatch.setattr(calibrate._C.cuda, "prepare", Raising(RuntimeError("no memory")))
    with pytest.raises(TransferError, match=r"VKVMAP_MOVER_STORE='copy_engine': .*no memory"):
        calibrate.choose_mover(APlan(), 0)
    monkeypatch.setenv("VKVMAP_MOVER_STORE", "host")
    with pytest.raises(PlanError, match=r"VKVMAP_MOVER_STORE='host': .*unset it"):
        calibrate.choose_mover(APlan(), 0)


def test_a_choice_can_be_set_for_one_size_class(a_gpu: Any) -> None:
    a_gpu(256)
    calibrate.set_choice(0, "store", 0, "copy_engine")
    assert calibrate.choose_mover(APlan(), 0) == "copy_engine"
    assert calibrate.choose_mover(APlan(), 1) == "kernel"
    for wrong, message in (
        (("store", 0, "host"), "'host': choose one of a GPU's movers, kernel, copy_engine"),
        (("sideways", 0, "kernel"), "'sideways': choose one of store, load"),
        (("store", 5, "kernel"), "size class 5: choose one of 0 to 4"),
        (("store", -1, "kernel"), "size class -1: choose one of 0 to 4"),
    ):
        with pytest.raises(PlanError, match=message):
            calibrate.set_choice(0, *wrong)


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
