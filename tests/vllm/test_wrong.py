"""Things done wrong on purpose: a miss or a clear error at start-up, never wrong tokens."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vllm.engine import Bench, Life, make_model, stored_files, transfer, whole_prefix

pytestmark = pytest.mark.vllm

Models = Callable[[str], Path]

PROMPTS = [
    "The quick brown fox jumps over the lazy dog and then some more. " * 4 + "wrong",
    "ZYX " + "another prompt that shares nothing with the others at all, " * 4,
]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory, models: Models) -> tuple[Life, Path]:
    """A life that stored, and its files; copy them before damaging any."""
    root = tmp_path_factory.mktemp("stored")
    life = Bench(root).run(models("llama"), prompts=PROMPTS, transfer=transfer(root / "files"))
    assert stored_files(root / "files")
    return life, root / "files"


def test_another_checkpoint_under_the_same_name_misses(
    bench: Bench, models: Models, tmp_path: Path
) -> None:
    model = shutil.copytree(models("llama"), tmp_path / "model")
    config = transfer(tmp_path / "files")
    first = bench.run(model, prompts=PROMPTS, transfer=config)
    shutil.rmtree(model)
    make_model(model, "llama", seed=1)
    other = bench.run(model, prompts=PROMPTS, transfer=config)
    assert other.cached() == [0, 0]
    assert other.tokens() != first.tokens()


def test_another_dtype_misses(bench: Bench, models: Models, stored: tuple[Life, Path]) -> None:
    other = bench.run(
        models("llama"), dtype="bfloat16", prompts=PROMPTS, transfer=transfer(stored[1])
    )
    assert other.cached() == [0, 0]


def test_truncated_files_miss(
    bench: Bench, models: Models, stored: tuple[Life, Path], tmp_path: Path
) -> None:
    life, files = stored
    damaged = shutil.copytree(files, tmp_path / "files")
    for path in stored_files(damaged):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    again = bench.run(models("llama"), prompts=PROMPTS, transfer=transfer(damaged))
    assert again.cached() == [0, 0]
    assert again.tokens() == life.tokens()


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (transfer(cpu_bytes=1000), "less than one chunk of 131,072 bytes"),
        (transfer(cpu_bytes=1 << 50), "does not fit"),
    ],
    ids=["region-too-small", "shared-memory-full"],
)
def test_what_cannot_be_served_is_said_at_start_up(
    bench: Bench, models: Models, config: dict[str, object], sentence: str
) -> None:
    life = bench.run(models("llama"), transfer=config, fails=True)
    assert "EngineError" in life.log or "RegionError" in life.log
    assert sentence in life.log


def test_an_unknown_release_is_refused_in_a_sentence(bench: Bench, models: Models) -> None:
    life = bench.run(models("llama"), transfer=transfer(), patch="missing_interface", fails=True)
    assert "has no vllm.v1.kv_offload.tiering.spec.TieringOffloadingSpec" in life.log
    assert "vkvmap knows the offloading interface of vLLM" in life.log


def test_a_killed_rank_ends_the_engine_and_spoils_nothing(
    bench: Bench, models: Models, tmp_path: Path, stored: tuple[Life, Path]
) -> None:
    config = transfer(tmp_path / "files")
    life = bench.run(
        models("llama"),
        tp=2,
        prompts=PROMPTS,
        passes=2,
        kill_worker=True,
        transfer=config,
        fails=True,
    )
    assert "died unexpectedly" in life.log or "EngineDead" in life.log
    again = bench.run(models("llama"), prompts=PROMPTS, transfer=config)
    assert again.tokens() == stored[0].tokens()
    assert again.cached() == whole_prefix(again, 32)


def test_a_wrong_mapping_is_caught_before_a_token_comes_out(
    bench: Bench, models: Models, tmp_path: Path, stored: tuple[Life, Path]
) -> None:
    model, right = models("llama"), stored[0].tokens()
    config = transfer(tmp_path / "files", verify=True)
    wrong = bench.run(model, prompts=PROMPTS, patch="swapped_heads", transfer=config)
    assert wrong.tokens() == right  # nothing was loaded yet

    # The engine's connector cannot be told, so the engine stops, without having said anything.
    stopped = bench.run(model, prompts=PROMPTS, transfer=config, fails=True)
    assert "KV head 0" in stopped.log and "holds other bytes than were stored" in stopped.log

    # Ours can: the request is recomputed.
    told = transfer(tmp_path / "files", verify=True, connector=True)
    again = bench.run(model, prompts=PROMPTS, transfer=told)
    assert again.tokens() == right
    assert again.metric("vkvmap_failures{load}") > 0
    assert again.metric("vkvmap_digest_mismatches") > 0


def test_without_digests_a_wrong_mapping_would_show_in_the_tokens(
    bench: Bench, models: Models, tmp_path: Path, stored: tuple[Life, Path]
) -> None:
    """The test above is worth something only if the bytes matter."""
    model, config = models("llama"), transfer(tmp_path / "files")
    bench.run(model, prompts=PROMPTS, patch="swapped_heads", transfer=config)
    fooled = bench.run(model, prompts=PROMPTS, transfer=config)
    assert fooled.cached() == whole_prefix(fooled, 32)
    assert fooled.tokens() != stored[0].tokens()


def test_failed_stores_are_not_offered(
    bench: Bench, models: Models, stored: tuple[Life, Path]
) -> None:
    life = bench.run(
        models("llama"),
        prompts=PROMPTS,
        passes=2,
        patch="failing_store",
        transfer=transfer(connector=True),
    )
    assert life.cached(1) == [0, 0]
    assert life.tokens(0) == life.tokens(1) == stored[0].tokens()
    assert life.metric("vkvmap_failures{store}") > 0 < life.metric("vkvmap_retries")


def test_undescribed_state_is_kept_for_its_own_configuration(
    bench: Bench, models: Models, tmp_path: Path
) -> None:
    engine = {"max_num_batched_tokens": 160}
    model = models("hybrid")
    life = bench.run(
        model,
        prompts=PROMPTS,
        passes=2,
        engine=engine,
        patch="undescribed_state",
        transfer=transfer(),
    )
    assert "undescribed" in life.log and "kept for this parallel configuration alone" in life.log
    assert life.metric("vkvmap_shared_namespace") == 0 and life.metric("vkvmap_opaque_layers") == 3
    assert life.tokens(1) == life.tokens(0) and life.cached(1) == whole_prefix(life, 160, 1)
    refused = bench.run(
        model,
        engine=engine,
        patch="undescribed_state",
        transfer=transfer(strict=True),
        fails=True,
    )
    assert "strict" in refused.log and "vkvmap.models" in refused.log
