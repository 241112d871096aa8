"""Block lists, boards, cross-checks and interfaces, without the engine."""

from __future__ import annotations

import sys
import uuid
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vkvmap.errors import TransferError
from vkvmap.integrations.vllm import versions
from vkvmap.integrations.vllm.board import SchedulerBoard, WorkerBoard
from vkvmap.integrations.vllm.crosscheck import differences
from vkvmap.integrations.vllm.jobs import JobIds
from vkvmap.integrations.vllm.manager import Manager
from vkvmap.integrations.vllm.options import EngineError
from vkvmap.mapping import CanonicalPageMapping, CopyRun


@given(st.integers(1, 4), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=3))
def test_pairs_are_what_walking_the_blocks_finds(
    per_chunk: int, groups: list[tuple[int, int]]
) -> None:
    """Each group: `size` blocks from position `first` of its sequence on, chunks in order."""
    blocks: list[int] = []
    rows: list[int] = []
    expected: dict[str, list[tuple[int, int]]] = {}
    for number, (size, first) in enumerate(groups):
        row_of: dict[int, int] = {}
        for position in range(first, first + size):
            chunk = position // per_chunk
            if chunk not in row_of:
                row_of[chunk] = 100 + len(rows)
                rows.append(row_of[chunk])
            page = row_of[chunk] * per_chunk + position % per_chunk
            expected.setdefault(str(number), []).append((len(blocks), page))
            blocks.append(len(blocks))
    cache = SimpleNamespace(
        block_ids=np.array(blocks, np.int32),
        group_sizes=[size for size, _ in groups],
        block_indices=[first for _, first in groups],
    )
    ids = JobIds([str(i) for i in range(len(groups))], per_chunk)
    found = ids.pairs(cache, SimpleNamespace(block_ids=np.array(rows, np.int32)))
    assert {g: list(zip(*map(list, pair), strict=True)) for g, pair in found.items()} == expected


def test_lists_that_do_not_add_up_are_refused() -> None:
    ids = JobIds(["0"], 2)
    cache = SimpleNamespace(block_ids=[1, 2, 3], group_sizes=[3], block_indices=[0])
    with pytest.raises(TransferError, match="accounted for"):
        ids.pairs(cache, SimpleNamespace(block_ids=[5]))
    with pytest.raises(TransferError, match="accounted for"):
        ids.pairs(cache, SimpleNamespace(block_ids=[5, 6, 7]))
    with pytest.raises(TransferError, match="2 groups"):
        ids.pairs(replace_groups(cache), SimpleNamespace(block_ids=[5, 6]))


def replace_groups(cache: Any) -> Any:
    return SimpleNamespace(block_ids=cache.block_ids, group_sizes=[3, 0], block_indices=[0, 0])


# ---- boards --------------------------------------------------------------------------------------


def cards(name: str = "n") -> dict[str, Any]:
    return {"name": name, "row_bytes": 4096}


def test_the_scheduler_learns_what_workers_decided_and_what_failed() -> None:
    engine = uuid.uuid4().hex
    workers = [WorkerBoard(engine, rank, cards()) for rank in range(2)]
    board = SchedulerBoard(engine, 2, timeout=5)
    assert board.card["row_bytes"] == 4096
    workers[0].add("load_bytes", 10)
    workers[1].add("load_bytes", 5)
    workers[1].failed(77)
    assert board.totals()["load_bytes"] == 15
    assert list(board.new_failures()) == [77] and list(board.new_failures()) == []
    for job in range(300):
        workers[0].failed(job)
    assert list(board.new_failures())[-1] == 299
    board.close()
    for worker in workers:
        worker.close()


def test_workers_that_disagree_are_refused() -> None:
    engine = uuid.uuid4().hex
    workers = [WorkerBoard(engine, 0, cards("a")), WorkerBoard(engine, 1, cards("b"))]
    with pytest.raises(EngineError, match="name is 'a' on worker 0 and 'b' on worker 1"):
        SchedulerBoard(engine, 2, timeout=5)
    for worker in workers:
        worker.close()


def test_a_worker_that_never_came_is_named() -> None:
    engine = uuid.uuid4().hex
    worker = WorkerBoard(engine, 0, cards())
    with pytest.raises(EngineError, match="worker 1 of 2 has not said"):
        SchedulerBoard(engine, 2, timeout=0.1)
    worker.close()


# ---- manager -------------------------------------------------------------------------------------


class Inner:
    """The engine's manager, as far as ours touches it."""

    def __init__(self) -> None:
        self.completed: list[tuple[list[str], bool]] = []

    def lookup(self, key: str, context: object) -> str:
        return "hit"

    def complete_store(self, keys: Any, context: object, success: bool = True) -> None:
        self.completed.append((sorted(keys), success))

    def untouched(self) -> str:
        return "passed on"


def test_failed_chunks_are_given_back_and_damaged_ones_not_offered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(versions, "miss", lambda: "miss")
    monkeypatch.setattr(versions, "stats_class", lambda: None)
    card = dict.fromkeys(
        ("certified", "opaque", "bytes_per_token", "num_rows", "row_bytes", "shared"), 0
    )
    inner = Inner()
    manager = Manager(inner, SimpleNamespace(card=card))  # type: ignore[arg-type]
    assert manager.untouched() == "passed on"
    manager.mark_failed({"b"}, stored=True)
    manager.complete_store(["a", "b"], None)
    assert sorted(inner.completed) == [(["a"], True), (["b"], False)]
    manager.complete_store(["b"], None)
    assert inner.completed[-1] == (["b"], True)
    manager.mark_failed({"a"}, stored=False)
    assert manager.lookup("a", None) == "miss" and manager.lookup("b", None) == "hit"
    manager.complete_store(["a"], None)
    assert manager.lookup("a", None) == "hit"


# ---- cross-check and interface -------------------------------------------------------------------


def test_the_engines_mapping_may_be_cut_differently_but_not_lead_elsewhere() -> None:
    whole = CanonicalPageMapping(64, 32, (CopyRun(0, 32, 32, 1, 32, 32),), 1, 0, True)
    pieces = replace(whole, runs=(CopyRun(0, 32, 8, 4, 8, 8),))
    shifted = replace(whole, runs=(CopyRun(0, 0, 32, 1, 32, 32),))
    ours: Any = SimpleNamespace(by_layer={"l": whole})
    assert differences(ours, {"l": pieces}) == () == differences(ours, {})
    assert "other bytes" in differences(ours, {"l": shifted})[0]
    assert "num_writers" in differences(ours, {"l": replace(whole, num_writers=2)})[0]


@pytest.mark.parametrize(
    ("seed", "old", "algorithm", "random"),
    [
        (None, True, "sha256", True),
        (None, False, "sha256", False),
        (None, False, "xxhash_cbor", True),
        ("7", True, "sha256", False),
        ("7", False, "xxhash", False),
    ],
)
def test_keys_that_no_other_process_can_find_are_known(
    monkeypatch: pytest.MonkeyPatch, seed: str | None, old: bool, algorithm: str, random: bool
) -> None:
    utils = ModuleType("vllm.v1.core.kv_cache_utils")
    if not old:
        utils.DEFAULT_NONE_HASH_SEED = "fixed"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, utils.__name__, utils)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    config = SimpleNamespace(cache_config=SimpleNamespace(prefix_caching_hash_algo=algorithm))
    assert versions.keys_are_random(config) is random


def test_an_interface_that_is_gone_is_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = ModuleType("vllm")
    engine.__version__ = "9.9"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", engine)
    with pytest.raises(EngineError, match=r"vLLM 9\.9 has no vllm\.v1.*vkvmap knows"):
        versions.tiering_spec_class()
    spec = ModuleType(versions._TIERING)

    class TieringOffloadingSpec:
        def __init__(self, settings: object) -> None: ...
        def get_manager(self) -> None: ...
        def get_worker(self) -> None: ...
        def build_metric_definitions(self) -> None: ...

    spec.TieringOffloadingSpec = TieringOffloadingSpec  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, versions._TIERING, spec)
    with pytest.raises(EngineError, match=r"TieringOffloadingSpec\(config\)"):
        versions.tiering_spec_class()
