"""Stored under one tensor-parallel size, restarted, loaded under another: full hits, same tokens.

Each engine is a process of its own, and all that connects them is the engine's own file tier.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vllm.engine import Bench, Life, stored_files, transfer, whole_prefix

pytestmark = pytest.mark.vllm

Models = Callable[[str], Path]

FIRST = [
    "The quick brown fox jumps over the lazy dog and then some more. " * 4 + "first",
    "ZYX " + "another prompt that shares nothing with the others at all, " * 4 + "x",
]
SECOND = [
    "Second half of the test: " + "numbers one two three four five six seven. " * 6,
    "0123456789" * 25,
]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory, models: Models) -> tuple[Life, Path]:
    """A life that stored `FIRST` from one rank, and its files."""
    root = tmp_path_factory.mktemp("stored")
    config = transfer(root / "files")
    return Bench(root).run(models("llama"), prompts=FIRST, transfer=config), root / "files"


def check_hit(life: Life, reference: list[list[int]], chunk_tokens: int) -> None:
    assert life.cached() == whole_prefix(life, chunk_tokens)
    assert life.tokens() == reference
    assert min(life.cached()) > 0


def test_tp1_and_tp2_load_each_others_pages(bench: Bench, models: Models, tmp_path: Path) -> None:
    model, files = models("llama"), tmp_path / "files"
    plain = bench.run(model, prompts=FIRST + SECOND)
    first = bench.run(model, prompts=FIRST, transfer=transfer(files))
    assert first.cached() == [0, 0]
    assert first.tokens() == plain.tokens()[:2]

    # tp=2 finds what tp=1 stored, and stores prompts of its own ...
    both = bench.run(model, tp=2, prompts=FIRST + SECOND, transfer=transfer(files))
    assert both.cached()[:2] == whole_prefix(both, 32)[:2] and both.cached()[2:] == [0, 0]
    assert both.tokens() == plain.tokens()

    # ... which tp=1 then finds.
    last = bench.run(model, prompts=SECOND, transfer=transfer(files))
    check_hit(last, plain.tokens()[2:], 32)
    assert last.metric("vkvmap_bytes{load}") == sum(last.cached()) * 4096
    assert last.metric("vkvmap_shared_namespace") == 1
    assert last.metric("vkvmap_certified_layers") == 4
    assert "4 of 4 layers certified (native family), 4,096 bytes per token, name " in last.log
    assert "host region 67,108,864 bytes: 512 chunks of 131,072 bytes; mover host" in last.log


def test_replicated_heads_in_chunks_of_two_blocks(
    bench: Bench, models: Models, tmp_path: Path
) -> None:
    model, files = models("one-head"), tmp_path / "files"
    config = transfer(files, blocks_per_chunk=2, verify=True)
    first = bench.run(model, prompts=FIRST, transfer=config)
    both = bench.run(model, tp=2, prompts=FIRST + SECOND, transfer=config)
    assert both.cached()[:2] == whole_prefix(both, 64)[:2]
    assert both.tokens()[:2] == first.tokens()
    # A row holds one copy of the head and not one per rank, or tp=1 could not read it.
    last = bench.run(model, prompts=SECOND, transfer=config)
    check_hit(last, both.tokens()[2:], 64)
    assert last.metric("vkvmap_digest_mismatches") == both.metric("vkvmap_digest_mismatches") == 0


def test_sliding_window_groups(bench: Bench, models: Models, tmp_path: Path) -> None:
    model, files = models("window"), tmp_path / "files"
    config = transfer(files, blocks_per_chunk=2)
    first = bench.run(model, tp=2, prompts=FIRST, transfer=config)
    last = bench.run(model, prompts=FIRST, transfer=config)
    check_hit(last, first.tokens(), 64)


def test_recurrent_state_beside_attention(bench: Bench, models: Models, tmp_path: Path) -> None:
    model, files = models("hybrid"), tmp_path / "files"
    # Chunks of one state block: a longer prefill step takes a path that this platform lacks.
    engine = {"max_num_batched_tokens": 160}
    first = bench.run(model, prompts=FIRST, engine=engine, transfer=transfer(files, strict=True))
    assert "4 of 4 layers certified" in first.log
    last = bench.run(
        model, tp=2, prompts=FIRST, engine=engine, transfer=transfer(files, strict=True)
    )
    check_hit(last, first.tokens(), 160)


def test_latent_rows_arrive_as_they_were_stored(
    bench: Bench, models: Models, tmp_path: Path
) -> None:
    """Bytes, not tokens: this platform's latent attention does not repeat itself."""
    model, files = models("latent"), tmp_path / "files"
    config = transfer(files, verify=True)
    bench.run(model, prompts=FIRST, transfer=config)
    before = {path.name: path.read_bytes() for path in stored_files(files)}
    last = bench.run(model, tp=2, prompts=FIRST, transfer=config)
    assert last.cached() == whole_prefix(last, 16)  # the latent backend's block
    assert last.metric("vkvmap_digest_mismatches") == 0 < last.metric("vkvmap_bytes{load}")
    assert {path.name: path.read_bytes() for path in stored_files(files)} == before


def test_two_heads_on_four_ranks_token_by_token(
    bench: Bench, models: Models, tmp_path: Path
) -> None:
    """Each head on two ranks; pages in the order that no configuration keeps them in."""
    model = models("two-heads")
    config = transfer(tmp_path / "files", family="universal", verify=True)
    first = bench.run(model, tp=4, prompts=FIRST, transfer=config, timeout=600)
    assert first.cached() == [0, 0] and "universal family" in first.log
    last = bench.run(model, prompts=FIRST, transfer=config)
    check_hit(last, first.tokens(), 32)
    assert last.metric("vkvmap_digest_mismatches") == 0


def test_layers_side_by_side_within_blocks(bench: Bench, models: Models, tmp_path: Path) -> None:
    """The engine packs all layers into each block; its pages are those of the other layouts."""
    model, config = models("llama"), transfer(tmp_path / "files", strict=True)
    packed = {"patch": "interleaved_layers", "prompts": FIRST, "transfer": config}
    first = bench.run(model, **packed)
    assert "Using BLHNC KV cache layout" in first.log and first.cached() == [0, 0]
    both = bench.run(model, tp=2, prompts=FIRST + SECOND, transfer=config)
    assert "Using LBHNC KV cache layout" in both.log
    assert both.cached()[:2] == whole_prefix(both, 32)[:2]
    assert both.tokens()[:2] == first.tokens()
    last = bench.run(model, **packed | {"prompts": SECOND})
    check_hit(last, both.tokens()[2:], 32)


def test_memory_for_fewer_chunks_than_a_prompt_has(
    bench: Bench, models: Models, stored: tuple[Life, Path]
) -> None:
    """The engine evicts and its file tier takes over; what does not fit is computed."""
    life, files = stored
    small = transfer(files, cpu_bytes=6 * 131072)
    again = bench.run(models("llama"), prompts=FIRST, passes=3, transfer=small)
    for index in range(3):
        assert again.tokens(index) == life.tokens()
    assert again.metric("vkvmap_region_bytes") == 6 * 131072


def test_an_engine_that_slept_finds_its_pages_in_files(
    bench: Bench, models: Models, stored: tuple[Life, Path], tmp_path: Path
) -> None:
    """Sleep makes the engine forget what it has in memory, offloaded chunks included."""
    life, _ = stored
    config = transfer(tmp_path / "files")
    slept = bench.run(models("llama"), prompts=FIRST, passes=2, sleep=1, transfer=config)
    assert slept.cached(0) == [0, 0] and slept.cached(1) == whole_prefix(slept, 32, 1)
    assert slept.tokens(0) == slept.tokens(1) == life.tokens()


def test_pipeline_stages_arrive_at_the_name_of_the_unstaged_engine(
    bench: Bench, models: Models, stored: tuple[Life, Path]
) -> None:
    """The set-up alone: the engine itself stops at the first step of staged ranks on the CPU."""
    name = re.search(r"name ([0-9a-f]{12}) ", stored[0].log)
    assert name is not None
    process = bench.start(
        models("llama"),
        prompts=FIRST,
        transfer=transfer(strict=True),
        engine={"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"},
    )
    output, _ = process.communicate(timeout=300)
    assert "2 of 2 layers certified" in output and f"name {name[1]} (shared" in output
    assert "host region 67,108,864 bytes: 512 chunks of 131,072 bytes" in output
