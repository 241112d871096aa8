"""What cannot be asked of an engine, a plan or an identity is an error of this package.

And still the builtin that it was before, so that neither kind of caller has to change.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.descriptors import World, heads, ids
from vkvmap import (
    CacheView,
    LayerSpec,
    LayerTable,
    RankGrid,
    Region,
    TransferPlan,
    derive_canonical_mappings,
)
from vkvmap.chunk import ChunkLayout
from vkvmap.errors import FormatError, PlanError, SpecError, TransferError
from vkvmap.identity import Identity
from vkvmap.sections import sections_for
from vkvmap.transfer import Engine, Job

TABLE = LayerTable([LayerSpec.mla("layer", row_bytes=64)])


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(1) as made:
        yield made


def store(engine: Engine, world: World, **options: Any) -> Job:
    """A transfer that keeps its memory, whoever else lets go of it."""
    return engine.submit(world.plan(), 0, [(0, ids(0), ids(0))], keep=world, **options)


# ---- engines -------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [0, -1, 1025, 1 << 64, True, 1.0, "2"])
def test_a_number_of_threads_that_cannot_be_is_a_spec_error(threads: Any) -> None:
    with pytest.raises(SpecError, match=r"threads=.* is no number of copying threads; give 1"):
        Engine(threads)


@pytest.mark.parametrize("told", ["0", "-1", "two", "", "1.5", "\u00b2", "1025", "9" * 30])
def test_a_bad_vkvmap_threads_is_a_spec_error(told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VKVMAP_THREADS", told)
    with pytest.raises(SpecError, match=r"VKVMAP_THREADS=.* is no number of copying threads"):
        Engine()


def test_vkvmap_threads_is_what_an_engine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VKVMAP_THREADS", "3")
    with Engine() as engine:
        assert engine.threads == 3


def test_a_result_that_is_not_there_yet_is_a_transfer_error(engine: Engine) -> None:
    engine.stall()
    job = store(engine, heads())
    with pytest.raises(TransferError, match="not done; wait for it"):
        job.result()
    engine.resume()
    assert job.wait(60)
    assert job.result()["error"] is None


@pytest.mark.parametrize("lane", ["x", "", "STORE"])
def test_a_lane_that_is_none_is_a_plan_error(engine: Engine, lane: str) -> None:
    with pytest.raises(PlanError, match=f"lane '{lane}' must be 'store', 'load' or 'expedited'"):
        engine.finished(lane)
    with pytest.raises(PlanError, match=f"lane '{lane}' must be"):
        engine.stall(["store", lane])
    store(engine, heads()).check(60)  # and nothing is stalled


class WithHandle:
    def __init__(self, handle: Any) -> None:
        self.cuda_stream = handle


@pytest.mark.parametrize(
    "stream", [-1, 1 << 64, "x", 1.5, True, (), WithHandle(-1), WithHandle("0")]
)
def test_a_stream_that_is_none_is_a_plan_error(engine: Engine, stream: Any) -> None:
    world = heads()
    before = world.region.copy()
    with pytest.raises(PlanError, match=r"is no CUDA stream; pass a stream with cuda_stream"):
        store(engine, world, stream=stream)
    assert np.array_equal(world.region, before)


def test_an_engine_that_was_shut_down_takes_nothing_more() -> None:
    engine, world = Engine(1), heads()
    store(engine, world).check(60)
    assert engine.shutdown()
    before = world.region.copy()
    world.cache[:] += 1
    with pytest.raises(TransferError, match="shut down; make a new one"):
        store(engine, world)
    assert np.array_equal(world.region, before)


def test_a_forked_child_gets_errors_of_ours_whatever_it_asks() -> None:
    """Every call on the parent's engine and job says whose they are, or needs no threads."""
    code = """
import os, sys
from tests.descriptors import heads, ids
from vkvmap.errors import TransferError
from vkvmap.transfer import Engine
engine, world = Engine(1), heads()
plan = world.plan()
engine.submit(plan, 0, [(0, ids(0), ids(0))]).check(60)
engine.stall()
job = engine.submit(plan, 0, [(0, ids(0), ids(0))])
if os.fork():
    _, status = os.wait()
    engine.resume()
    job.check(60)
    os._exit(os.waitstatus_to_exitcode(status))
calls = [
    lambda: engine.submit(plan, 0, [(0, ids(0), ids(0))]),
    lambda: engine.finished("store"),
    lambda: engine.drain(plan),
    engine.cancel_pending,
    lambda: engine.shutdown(drain=False),
    engine.stall,
    engine.resume,
    lambda: engine.inject_fault(0, 0, 0, "x"),
    engine.clear_faults,
    engine.metrics,
    lambda: engine.in_flight,
    job.wait,
    job.check,
]
strange = []
for number, call in enumerate(calls):
    try:
        call()
        strange.append(number)
    except TransferError as error:
        if "parent process" not in str(error):
            strange.append((number, str(error)))
print(strange, file=sys.stderr) if strange else None
os._exit(len(strange))
"""
    done = subprocess.run(
        # Python 3.12 and later warn of any fork beside threads; that is what is tested here.
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code],
        cwd=Path(__file__).parents[1],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


# ---- chunk tokens --------------------------------------------------------------------------------

#: What is no number of tokens, and no mapping to such numbers.
ODD = [1.0, 16.5, "16", b"16", True, [16], (16,), {"0": "16"}, {"0": 16.0}, {"0": None}, object()]


def test_odd_chunk_tokens_are_a_plan_error() -> None:
    storage = np.zeros((4, 16, 64), np.uint8)
    caches = {"layer": CacheView.of(storage, "mla", 16)}
    mappings = derive_canonical_mappings(TABLE, caches, RankGrid(), 0)
    with Region.create(sections_for(mappings, 16, 2), backing="private") as region:
        for tokens in ODD:
            with pytest.raises(PlanError, match=r"chunk_tokens=.* is \w+; give a whole number"):
                TransferPlan(mappings, caches, region, chunk_tokens=tokens)
            with pytest.raises(PlanError, match="chunk_tokens="):
                sections_for(mappings, tokens, 2)
            with pytest.raises(PlanError, match="num_chunks="):
                sections_for(mappings, 16, tokens)
        for wrong in (0, -16, 17, {}, {"other": 16}):
            with pytest.raises(PlanError, match="whole number of pages"):
                TransferPlan(mappings, caches, region, chunk_tokens=wrong)


def test_numbers_of_other_types_are_numbers() -> None:
    storage = np.arange(4 * 16 * 64, dtype=np.uint8).reshape(4, 16, 64)
    caches = {"layer": CacheView.of(storage, "mla", 16)}
    mappings = derive_canonical_mappings(TABLE, caches, RankGrid(), 0)
    for tokens in (np.int64(32), np.uint8(32), {"0": np.int32(32)}):
        sections = sections_for(mappings, tokens, np.int64(2))  # type: ignore[arg-type]
        assert sections == sections_for(mappings, 32, 2)
        with Region.create(sections, backing="private") as region:
            with TransferPlan(mappings, caches, region, chunk_tokens=tokens) as plan:  # type: ignore[arg-type]
                plan.store(([1], [3])).check(60)
                assert np.array_equal(region.row("0", 1)[1024:], storage[1].reshape(-1))
        assert Identity("m", "r", TABLE, tokens) == Identity("m", "r", TABLE, tokens)  # type: ignore[arg-type]
        assert Identity("m", "r", TABLE, tokens).name == Identity("m", "r", TABLE, 32).name  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [0, -1, {}, {"other": 16}, *ODD])
def test_an_identity_without_whole_chunks_is_a_format_error(tokens: Any) -> None:
    with pytest.raises(FormatError, match="chunk_tokens="):
        Identity("model", "revision", TABLE, tokens)
    with pytest.raises(SpecError, match="chunk_tokens="):
        ChunkLayout.of(TABLE, tokens)


@pytest.mark.parametrize("spans", [0, -16, *ODD])
def test_an_identity_with_odd_spans_is_a_format_error(spans: Any) -> None:
    with pytest.raises(FormatError, match=r"spans=|not whole spans"):
        Identity("model", "revision", TABLE, 16, family="native", layouts="mla", spans=spans)


@pytest.mark.parametrize("what", ["model", "revision", "adapter", "salt", "quantisation"])
@pytest.mark.parametrize(
    ("told", "why"),
    [(3, "is int"), (1.5, "is float"), (b"x", "is bytes"), (True, "is bool"), ("\ud800", "half")],
)
def test_what_names_an_identity_is_text_that_utf8_can_spell(what: str, told: Any, why: str) -> None:
    named = {"model": "org/model", "revision": "abc", what: told}
    with pytest.raises(FormatError, match=rf"identity.*{what}.*{why}"):
        Identity(layers=TABLE, chunk_tokens=16, **named)
