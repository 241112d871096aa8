"""The main job, with real processes: every byte arrives, and a wrong one would be noticed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vkvmap.cli import main
from vkvmap.configuration import Configuration
from vkvmap.models import from_hf_config, load_model
from vkvmap.region import Region
from vkvmap.roundtrip import Job, RankTask, RoundTripError, memory_needed, run
from vkvmap.roundtrip.rank import Cache, DeviceTwin
from vkvmap.roundtrip.truth import Holder, PageTruth, field_truth
from vkvmap.sharing import decide
from vkvmap.spec import LayerSpec, LayerTable

SMALL = {"model_type": "llama", "num_hidden_layers": 3, "num_key_value_heads": 4, "head_dim": 16}
LATENT = {"model_type": "deepseek_v32", "num_hidden_layers": 2, "kv_lora_rank": 128,
          "qk_rope_head_dim": 16, "index_head_dim": 128}  # fmt: skip
WINDOWS = {**SMALL, "model_type": "gpt_oss", "num_hidden_layers": 4, "sliding_window": 32}
STATE = {
    **SMALL, "model_type": "qwen3_next", "num_hidden_layers": 4, "linear_num_key_heads": 4,
    "linear_num_value_heads": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
UNEVEN = {
    **SMALL, "model_type": "mimo_v2", "v_head_dim": 8, "swa_num_key_value_heads": 8,
    "swa_head_dim": 24, "swa_v_head_dim": 8, "sliding_window": 16,
    "hybrid_layer_pattern": [0, 1, 1],
}  # fmt: skip


def _job(
    config: dict[str, Any],
    source: str,
    target: str,
    *,
    kv_dtype: str = "auto",
    pcp_mode: Any = "shards",
    family: Any = "auto",
    **more: Any,
) -> Job:
    table = from_hf_config(config, kv_dtype=kv_dtype)
    sides = [Configuration.parse(text, pcp_mode=pcp_mode) for text in (source, target)]
    sharing = decide(table, sides, family)
    assert not sharing.obstacles
    tokens = -(-128 // sharing.chunk_tokens) * sharing.chunk_tokens
    return Job(table, *sides, sharing.family, sharing.chunk_tokens, tokens, **more)


MOVES = [
    (SMALL, "tp=4", "tp=2", {}),
    (SMALL, "tp=2,layout=split_nhd", "tp=8,dcp=2,layout=split_hnd,block=8", {}),
    (SMALL, "tp=2,pcp=2,interleave=4", "tp=1,layout=cpu_hnd,block=32", {}),
    (SMALL, "tp=8,pcp=2", "tp=2", {"pcp_mode": "replicates"}),
    (SMALL, "tp=2,pp=1+2", "tp=1,pp=3,layout=packed_hnd", {"writers": "split"}),
    (SMALL, "tp=8", "tp=4", {"writers": "first", "kv_dtype": "fp8_per_token_head"}),
    (
        SMALL,
        "tp=2,layout=nhd_planar_scales",
        "tp=4,layout=packed_hnd_scaled",
        {"kv_dtype": "int8_per_token_head"},
    ),
    (SMALL, "tp=1,layout=hnd_planar_scales", "tp=2", {"kv_dtype": "fp8_per_token_head"}),
    (LATENT, "tp=4,dcp=2", "tp=1,block=64", {"kv_dtype": "fp8_ds_mla"}),
    (WINDOWS, "tp=2,pp=2", "tp=8,dcp=2,interleave=8", {}),
    (STATE, "tp=1", "tp=4", {}),
    (UNEVEN, "tp=2", "tp=4,layout=packed_hnd", {}),
]


@pytest.mark.parametrize(("config", "source", "target", "more"), MOVES)
def test_every_byte_arrives(
    config: dict[str, Any], source: str, target: str, more: dict[str, Any]
) -> None:
    job = _job(config, source, target, **more)
    outcome = run(job)
    assert outcome.good, [r.first_wrong or r.error for r in outcome.reports if not r.good]
    assert len(outcome.reports) == job.source.ranks + job.target.ranks
    for report in outcome.reports:
        assert report.checked > 0 and report.mover == "host"
    loaded = sum(r.nbytes for r in outcome.reports if r.side == "load")
    expected = sum(
        task.paged(name).page_bytes * job.pages(job.table[name].group, job.target)
        for task in _tasks(job)
        for name in task.layers
    )
    assert loaded == expected


def _tasks(job: Job) -> list[RankTask]:
    return [
        RankTask(job, True, stage, rank, -1)
        for stage in range(job.target.pp)
        for rank in range(job.target.grid.size)
    ]


def test_universal_chunks_are_the_same_bytes_whoever_stored_them() -> None:
    """And these are the formula of the universal page, token by token."""
    table = from_hf_config(SMALL)
    sources = ("tp=1,block=32", "tp=8,dcp=2,layout=split_hnd,block=8", "pcp=2,layout=cpu_hnd,pp=3")
    chunks: list[Any] = []
    for text in sources:
        job = Job(
            table, Configuration.parse(text), Configuration.parse("tp=1"), "universal", 32, 64
        )

        def keep(region: Region, job: Job = job) -> None:
            chunks.append(region.rows("full")[job.rows("full")])

        assert run(job, inspect=keep).good
    assert np.array_equal(chunks[0], chunks[1]) and np.array_equal(chunks[0], chunks[2])
    spec = next(iter(table.values()))
    for layer in range(3):
        for token in (0, 37, 63):
            for head in range(4):
                at = {"token": np.array([token]), "head": np.array([head])}
                k, v = (
                    field_truth(layer, half, field, {**at, field.axes[2].name: np.arange(16)})
                    for half, field in enumerate(spec.fields)
                )
                start = ((layer * 32 + token % 32) * 4 + head) * 64
                cell = chunks[0][token // 32, start : start + 64]
                assert np.array_equal(cell, np.concatenate([k.ravel(), v.ravel()]))


def test_stores_of_replicas_are_shared_out() -> None:
    outcome = run(_job(LATENT, "tp=4", "tp=1"))
    stored = [r.nbytes for r in outcome.reports if r.side == "store"]
    assert outcome.good and len(set(stored)) == 1
    assert sum(stored) == sum(r.nbytes for r in outcome.reports if r.side == "load")


def test_one_flipped_byte_is_found_and_located() -> None:
    outcome = run(_job(SMALL, "tp=2", "tp=1"), flip_a_byte=True)
    assert not outcome.good
    bad = [report for report in outcome.reports if not report.good]
    assert [report.wrong for report in bad] == [1]
    assert "model.layers.2" in bad[0].first_wrong and "expected" in bad[0].first_wrong


def test_a_layer_that_cannot_be_certified_is_refused_before_anything_starts() -> None:
    with pytest.raises(ValueError, match="heads-divide"):
        run(_job(SMALL, "tp=3", "tp=1"))


def test_a_rank_that_fails_is_named() -> None:
    with pytest.raises(RoundTripError, match=r"store: stage 0, rank 0: .*levitation"):
        run(_job(SMALL, "tp=1", "tp=1", mover="levitation"))


def test_a_rank_that_hangs_is_named() -> None:
    with pytest.raises(RoundTripError, match="have not said 'ready'"):
        run(_job(SMALL, "tp=1", "tp=1"), timeout=0.0)


def test_progress_ends_at_one() -> None:
    seen: list[tuple[str, float]] = []
    run(_job(SMALL, "tp=2", "tp=1"), progress=lambda side, share: seen.append((side, share)))
    assert {side for side, _ in seen} == {"store", "load"}
    assert seen[-1] == ("load", 1.0) and all(0 < share <= 1 for _, share in seen)


def test_block_tables_and_rows_are_scattered_and_use_each_place_once() -> None:
    task = RankTask(_job(SMALL, "tp=2", "tp=1"), False, 0, 1, -1)
    blocks, pages = task.block_table("full"), task.page_ids("full", 1)
    assert len(set(blocks)) == len(set(pages)) == len(blocks) == len(pages) == 8
    assert list(blocks) != sorted(blocks) and list(pages) != sorted(pages)
    other = RankTask(task.job, True, 0, 0, -1)
    assert np.array_equal(other.page_ids("full", 1), pages)


def test_memory_needed_grows_with_the_move() -> None:
    small, large = _job(SMALL, "tp=2", "tp=1"), _job(SMALL, "tp=8", "tp=1")
    assert memory_needed(small) < memory_needed(large)


# ---- the truth -----------------------------------------------------------------------------------


def test_the_truth_of_a_byte_depends_on_each_of_its_coordinates() -> None:
    this = LayerSpec.attention("a", num_kv_heads=4, head_size=8).fields[0]
    everything = {
        "token": np.arange(16), "head": np.arange(4), "k_dim": np.arange(8)
    }  # fmt: skip
    whole = field_truth(0, 0, this, everything)
    assert whole.shape == (16, 4, 16)
    for part in (whole[3:4, 1:2], whole[:, 2:], whole[5:9]):
        flat = part.reshape(-1, 16)
        assert len({row.tobytes() for row in flat}) == len(flat)
    for layer, number in ((1, 0), (0, 1)):
        other = field_truth(layer, number, this, everything)
        assert np.mean(other == whole) < 0.05
    # A part asked for alone is the same part of the whole, odd offsets included.
    some = {"token": np.array([11, 2]), "head": np.array([3]), "k_dim": np.array([1, 4, 6])}
    expected = whole.reshape(16, 4, 8, 2)[[11, 2]][:, [3]][:, :, [1, 4, 6]].reshape(2, 1, 6)
    assert np.array_equal(field_truth(0, 0, this, some), expected)


def test_ranks_hold_what_the_rules_say() -> None:
    def holder(rank: int, **more: Any) -> Holder:
        sizes = {"tp": 1, "dcp": 1, "pcp": 1, "interleave": 1, "pcp_mode": "shards", **more}
        return Holder(rank=rank, **sizes)

    assert holder(3, tp=8).part_of(4, 4).tolist() == [1]
    assert holder(1, tp=2).part_of(8, 8).tolist() == [4, 5, 6, 7]
    assert holder(5, tp=8).part_of(12, 0).tolist() == list(range(12))
    two = holder(1, tp=2, dcp=2, interleave=2)
    assert two.tokens_of(0, 4, sharded=True).tolist() == [2, 3, 6, 7]
    assert two.tokens_of(1, 4, sharded=True).tolist() == [10, 11, 14, 15]
    assert two.tokens_of(1, 4, sharded=False).tolist() == [4, 5, 6, 7]
    replica = holder(2, tp=2, dcp=2, pcp=2, pcp_mode="replicates")
    assert replica.tokens_of(0, 4, sharded=True).tolist() == [1, 3, 5, 7]


@pytest.mark.parametrize("layout", ["split_nhd", "packed_hnd", "cpu_hnd"])
def test_a_block_holds_k_and_v_where_its_layout_says(layout: str) -> None:
    spec = LayerSpec.attention("a", num_kv_heads=2, head_size=4)
    whole = Holder(1, 1, 1, 1, "shards", 0)
    block = PageTruth(spec, 0, whole, layout, 3).block(0)
    index = {"token": np.array([2]), "head": np.array([1]), "v_dim": np.arange(4)}
    value = field_truth(0, 1, spec.fields[1], index).ravel()
    index["k_dim"] = index.pop("v_dim")
    key = field_truth(0, 0, spec.fields[0], index).ravel()
    if layout == "split_nhd":
        assert np.array_equal(block[0, 2, 1], key) and np.array_equal(block[1, 2, 1], value)
    elif layout == "packed_hnd":
        assert np.array_equal(block[1, 2], np.concatenate([key, value]))
    else:
        head = block[1].ravel()
        assert np.array_equal(head[:24].reshape(4, 3, 2)[:, 2].ravel(), key)
        assert np.array_equal(head[24:].reshape(3, 8)[2], value)


# ---- the command ---------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path: Path) -> str:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(SMALL))
    return str(file)


def test_the_command_reports_every_rank(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["roundtrip", config, "--from", "tp=2", "--to", "tp=1", "--tokens", "40"]) == 0
    text = capsys.readouterr().out
    assert "48 tokens of 3 layers" in text and "yes: every byte is right" in text
    assert text.count("host") == 3


def test_every_option_of_roundtrip_has_an_effect(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = (
        "--from tp=2,pcp=2 --to tp=1 --layout split_hnd --block-size 8 --pcp-mode replicates "
        "--kv-dtype fp8 --set num_key_value_heads=2 --family universal --tokens 64 --layers 2 "
        "--mover host --device cpu --writers split --seed 5 --json"
    )
    assert main(["roundtrip", config, *line.split()]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["good"] and answer["family"] == "universal" and answer["layers"] == 2
    assert answer["from"] == "tp=2,pcp=2,layout=split_hnd,block=8"
    assert (answer["tokens"], answer["chunk_tokens"]) == (64, 8)
    loaded = [rank["nbytes"] for rank in answer["ranks"] if rank["side"] == "load"]
    assert loaded == [64 * 2 * 2 * 2 * 16]
    assert {rank["mover"] for rank in answer["ranks"]} == {"host"}


def test_a_wrong_byte_is_a_no(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["roundtrip", config, "--from", "tp=2", "--to", "tp=1", "--flip-a-byte"]
    assert main(line) == 1
    assert "1 wrong bytes, the first at layer" in capsys.readouterr().out
    assert main([*line, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["good"] is False


WRONG = [
    ("--from tp=3 --to tp=1", 1, "heads-divide"),
    ("--from tp=2 --to tp=1,block=32 --family native", 1, "--family universal"),
    ("--from tp=2 --to tp=1 --layers 4", 2, "nearest right value: 3"),
    ("--from pp=4 --to tp=1", 2, "pp=3"),
    ("--from tp=2 --to tp=1 --mover teleport", 2, "--mover"),
    ("--from tp=2 --to tp=1 --writers al", 2, "--writers"),
    ("--from tp=2 --to tp=1 --seed x", 2, "--seed"),
    ("--from tp=2 --to tp=1 --device tpu", 2, "--device"),
    ("--from tp=2 --to tp=1 --tokens many", 2, "--tokens"),
    ("--from tp=2 --to tp=1 --tokens 99999999k", 3, "would fit"),
    ("--to tp=1", 2, "--from"),
]


@pytest.mark.parametrize(("line", "code", "says"), WRONG)
def test_what_cannot_be_done_is_said_before_anything_starts(
    config: str, line: str, code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["roundtrip", config, *line.split()]) == code
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("mover", ["kernel", "copy_engine"])
def test_a_mover_that_needs_a_gpu_is_not_quietly_replaced(
    config: str, mover: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["roundtrip", config, "--from", "tp=2", "--to", "tp=1", "--mover", mover]
    assert main(line) == 3
    assert f"--mover {mover} cannot run here: " in capsys.readouterr().err


def test_a_device_that_is_not_there_is_said(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vkvmap import cuda

    monkeypatch.setattr(cuda, "is_available", lambda: False)
    monkeypatch.setattr(cuda, "why_not", lambda: "no driver")
    line = ["roundtrip", config, "--from", "tp=2", "--to", "tp=1", "--device", "cuda"]
    assert main(line) == 3
    assert "--device cuda: no driver" in capsys.readouterr().err


def test_a_device_twin_is_what_transfers_see() -> None:
    cache = Cache(RankTask(_job(SMALL, "tp=2", "tp=1"), True, 0, 0, -1))
    cache.twin = DeviceTwin(cache.memory, "cpu")
    assert cache.twin.address != cache.memory.ctypes.data
    first = next(iter(cache.views().values())).tensors[0]
    assert first.address == cache.twin.address and first.owner is cache.twin.tensor
    cache.twin.tensor[5] = 7
    assert cache.memory[5] != 7
    cache.twin.fetch()
    assert cache.memory[5] == 7


def test_presets_make_jobs_that_fit_a_small_machine() -> None:
    names = ["llama-3-70b", "qwen3-235b-a22b", "deepseek-v3", "gemma-3-27b", "nemotron-h-56b"]
    for name in names:
        table: LayerTable = load_model(name)
        one, two = Configuration.parse("tp=8"), Configuration.parse("tp=4")
        job = Job(table, one, two, "native", 16, 256)
        assert memory_needed(job) < 8 << 30, name
