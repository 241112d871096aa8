"""Processes that fork, exit, are killed, optimised, seeded: bytes stay right, nobody hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tests import cycles
from vkvmap import (
    CacheView,
    LayerSpec,
    LayerTable,
    RankGrid,
    Region,
    TransferPlan,
    derive_canonical_mappings,
)
from vkvmap.region import Section

ROOT = Path(__file__).parents[1]

SETUP = """
import os, sys, time, signal
import numpy as np
from vkvmap import (CacheView, LayerSpec, LayerTable, RankGrid, Region, TransferPlan,
                    derive_canonical_mappings)
from vkvmap.region import Section
from vkvmap.transfer import Engine, default_engine

def made(blocks=64, rows=64, row_bytes=4096):
    table = LayerTable([LayerSpec.mla("layer", row_bytes=row_bytes)])
    storage = np.random.default_rng(1).integers(0, 256, (blocks, 16, row_bytes), dtype=np.uint8)
    caches = {"layer": CacheView.of(storage, "mla", 16)}
    region = Region.create([Section("0", rows, 16 * row_bytes)])
    mappings = derive_canonical_mappings(table, caches, RankGrid(), 0)
    return storage, region, TransferPlan(mappings, caches, region)

storage, region, plan = made()
ids = np.arange(64)
"""


def python(
    code: str, *options: str, timeout: float = 60, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, "-c", SETUP + textwrap.dedent(code)],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def test_a_forked_child_moves_with_an_engine_of_its_own() -> None:
    """After the parent has used its threads, which the child does not have."""
    code = """
        plan.store((ids, ids)).check(30)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                plan.load(([0], [1]))  # the parent's engine
            except RuntimeError:
                status = 2
            storage, region, plan = made()
            plan.store((ids, ids)).check(30)
            if np.array_equal(region.row("0", 5), storage[5].reshape(-1)):
                status += 40
            os._exit(status)
        child = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        plan.load(([3], [4])).check(30)
        sys.exit(0 if child == 42 and np.array_equal(storage[3], storage[4]) else child)
    """
    # Python 3.12 and later warn of any fork beside threads; that is what is tested here.
    done = python(code, "-W", "ignore::DeprecationWarning")
    assert (done.returncode, done.stderr) == (0, "")


def test_an_interpreter_leaves_with_jobs_in_flight() -> None:
    done = python("""
        for _ in range(200):
            plan.store((ids, ids))
        print("leaving")
    """)
    assert (done.returncode, done.stdout, done.stderr) == (0, "leaving\n", "")


def test_an_interpreter_leaves_with_jobs_that_never_began() -> None:
    done = python("""
        default_engine().stall()
        for _ in range(20):
            plan.load((ids, ids))
        print("leaving")
    """)
    assert (done.returncode, done.stdout, done.stderr) == (0, "leaving\n", "")


def test_a_region_may_outlive_the_names_of_its_module() -> None:
    """Interpreters clear modules in an order of their own, and some clear them before objects."""
    done = python("""
        import vkvmap.region
        for name in list(vars(vkvmap.region)):
            if not name.startswith("__") and name != "Region":
                setattr(vkvmap.region, name, None)
    """)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_callback_may_outlive_the_main_thread() -> None:
    done = python("""
        plan.engine.submit(plan.packed.native, 0, [(0, ids, ids)],
                           callback=lambda job: time.sleep(0.01))
    """)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("handled", [False, True])
def test_sigterm_during_a_transfer_ends_the_process_at_once(handled: bool) -> None:
    code = f"""
        if {handled}:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
        print("ready", flush=True)
        while True:
            plan.store((ids, ids))
            plan.load((ids, ids)).wait()
    """
    child = subprocess.Popen(
        [sys.executable, "-c", SETUP + textwrap.dedent(code)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        time.sleep(0.2)
        child.send_signal(signal.SIGTERM)
        assert child.wait(30) == (7 if handled else -signal.SIGTERM)
    finally:
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()


def test_nothing_is_checked_by_assertions() -> None:
    """Under -O: ids, mappings and stale plans are refused as ever."""
    done = python(
        """
        from vkvmap import CanonicalPageMapping, CopyRun, certify
        from vkvmap.errors import PlanError, StalePlanError, TilingError
        refused = []
        def mapping(size, writers):
            return CanonicalPageMapping(8, 8, (CopyRun(0, 0, size, 1, 8, 8),), writers, 0, True)
        for attempt, error in (
            (lambda: plan.store(([64], [0])), PlanError),
            (lambda: plan.store(([0], [-1])), PlanError),
            (lambda: plan.load(([1, 1], [0, 1])), PlanError),
            (lambda: certify([mapping(4, 1)]), TilingError),
            (lambda: certify([mapping(8, 2)]), TilingError),
            (lambda: (plan.close(), plan.store(([0], [0]))), StalePlanError),
        ):
            try:
                attempt()
            except error:
                refused.append(True)
        sys.exit(0 if len(refused) == 6 and not __debug__ else 1)
        """,
        "-O",
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_nothing_depends_on_the_hash_seed() -> None:
    code = """
        import hashlib
        from vkvmap.identity import Identity
        from vkvmap.layout import state_layout
        spec = LayerSpec.mamba2("s", num_heads=8, head_dim=2, state_size=3, n_groups=2,
                                conv_kernel=4)
        table = LayerTable([
            LayerSpec.attention("a", num_kv_heads=8, head_size=16, scale_bytes=4, group="full"),
            LayerSpec.attention("w", num_kv_heads=4, head_size=16, group="window", window=8),
            LayerSpec.mla("m", row_bytes=66, group="latent"), spec])
        state = [np.zeros((2, 24), np.uint16), np.zeros((2, 4 * 6), np.uint8)]
        caches = {"a": CacheView.of(np.zeros((2, 4, 4, 72), np.uint8), "packed_hnd", 4),
                  "w": CacheView.of(np.zeros((2, 2, 8, 2, 32), np.uint8), "split_nhd", 8),
                  "m": CacheView.of(np.zeros((2, 4, 66), np.uint8), "mla", 4)}
        mappings = derive_canonical_mappings(table, caches, RankGrid(tp=2, dcp=2), 1,
                                             family="universal")
        text = repr((dict(mappings.by_layer), mappings.refusals, mappings.summary(),
                     Identity("m", "r", table, 32).name))
        print(hashlib.sha256(text.encode()).hexdigest())
    """
    said = {
        (done.returncode, done.stdout)
        for seed in ("0", "1", "31337")
        for done in [python(code, PYTHONHASHSEED=seed)]
    }
    assert len(said) == 1
    assert next(iter(said))[0] == 0


def test_two_plans_in_two_threads_do_not_meet() -> None:
    failures: list[str] = []
    table = LayerTable([LayerSpec.mla("layer", row_bytes=64)])

    def move(value: int) -> None:
        storage = np.full((4, 4, 64), value, dtype=np.uint8)
        caches = {"layer": CacheView.of(storage, "mla", 4)}
        mappings = derive_canonical_mappings(table, caches, RankGrid(), 0)
        with Region.create([Section("0", 4, 256)], backing="private") as region:
            with TransferPlan(mappings, caches, region) as plan:
                for turn in range(200):
                    storage[turn % 4] = (value + turn) % 256
                    plan.store(([turn % 4], [turn % 3])).check(30)
                    plan.load(([(turn + 1) % 4], [turn % 3])).check(30)
                    if not np.all(storage[(turn + 1) % 4] == (value + turn) % 256):
                        failures.append(f"plan {value}, turn {turn}")

    threads = [threading.Thread(target=move, args=(n,), daemon=True) for n in (10, 100, 200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []


def test_what_is_made_and_let_go_leaves_nothing() -> None:
    """The long run is `python -m tests.cycles`."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.cycles", "3000"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert cycles.SPARE_BYTES < 3000 * 4096
