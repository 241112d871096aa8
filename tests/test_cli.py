"""The command line answers, refuses and explains itself; it never shows a traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vkvmap.cli import COMMANDS, main
from vkvmap.configuration import Configuration, ConfigurationError
from vkvmap.models import load_model

GOLDEN = Path(__file__).parent / "cases" / "golden.jsonl"


class Ran:
    """What one invocation said."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> dict[str, Any]:
        value = json.loads(self.out)
        assert isinstance(value, dict)
        return value


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(line: str, *more: str) -> Ran:
        code = main([*line.split(), *more])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.out + captured.err
        return Ran(code, captured.out, captured.err)

    return run


# ---- the overview --------------------------------------------------------------------------------


def test_the_module_runs_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "vkvmap", "--version"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and done.stdout.startswith("vkvmap")


def test_help_lists_every_command_and_the_exit_codes(cli: Any) -> None:
    ran = cli("--help")
    assert ran.code == 0
    for name in COMMANDS:
        assert name in ran.out
    assert "Exit codes" in ran.out


def test_no_command_prints_the_help(cli: Any) -> None:
    ran = cli("")
    assert ran.code == 2 and "roundtrip" in ran.err


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_explains_itself(cli: Any, name: str) -> None:
    ran = cli(f"{name} --help")
    assert ran.code == 0 and "Usage: vkvmap" in ran.out


def test_a_mistyped_command_is_answered_with_the_nearest(cli: Any) -> None:
    ran = cli("maping")
    assert ran.code == 2 and "'mapping'" in ran.err


def test_the_command_line_starts_without_torch() -> None:
    check = "import sys, vkvmap.cli as c; c.main(['mapping']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, check=False)
    assert done.returncode == 0


def test_errors_are_json_where_json_was_asked_for(cli: Any) -> None:
    ran = cli("mapping --tp zero --json")
    assert ran.code == 2
    assert ran.json["error"]["option"] == "--tp" and ran.json["error"]["exit_code"] == 2


def test_an_internal_error_is_a_sentence(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("wires crossed")

    monkeypatch.setattr("vkvmap.cli.mapping.derive_canonical_mappings", broken)
    ran = cli("mapping")
    assert ran.code == 3 and "wires crossed" in ran.err and "vkvmap info" in ran.err
    with pytest.raises(RuntimeError):
        main(["--debug", "mapping"])


# ---- mapping -------------------------------------------------------------------------------------


def test_mapping_prints_one_mapping(cli: Any) -> None:
    line = (
        "mapping --tp 8 --kv-heads 4 --block-size 128 --head-size 128 --dtype bf16 "
        "--layout split_nhd --rank 3"
    )
    answer = cli(f"{line} --json").json
    assert answer["certified"] and answer["reason"] is None
    assert answer["local_page_size_bytes"] == 65536
    assert answer["canonical_page_size_bytes"] == 262144
    assert (answer["num_writers"], answer["writer_index"]) == (2, 1)
    assert sum(run["num_fragments"] * run["fragment_size"] for run in answer["runs"]) == 65536
    assert "256 KiB" in cli(line).out


@pytest.mark.parametrize(
    ("more", "canonical"),
    [
        ("--dcp 2 --tp 2 --interleave 4 --kv-heads 1", 2 * 16 * 512),
        ("--pcp 2", 2 * 16 * 8 * 512),
        ("--pcp 2 --pcp-mode replicates", 16 * 8 * 512),
        ("--tp 2 --dcp 2 --kv-heads 1 --dcp-whole", 16 * 512),
        ("--head-size 192 --head-size-v 128", 16 * 8 * 640),
        ("--dtype fp8_per_token_head", 16 * 8 * 264),
        ("--layout mla --mla-row 656", 16 * 656),
        ("--family universal --layout split_hnd", 16 * 8 * 512),
        ("--block-size 1k", 1024 * 8 * 512),
    ],
)
def test_every_option_of_mapping_reaches_the_mapping(cli: Any, more: str, canonical: int) -> None:
    ran = cli(f"mapping {more} --json")
    assert ran.code == 0 and ran.json["canonical_page_size_bytes"] == canonical


def test_an_opaque_mapping_says_why_and_is_a_no(cli: Any) -> None:
    ran = cli("mapping --tp 3")
    assert ran.code == 1 and "heads-divide" in ran.out
    assert cli("mapping --tp 3 --json").json["certified"] is False


# ---- conformance ---------------------------------------------------------------------------------

CASE = {
    "id": 7, "kind": "full", "tp": 2, "dcp": 1, "pcp": 1, "interleave": 1, "total_kv_heads": 2,
    "block_size": 2, "head_size": 4, "elem": 1, "layout": "split_nhd", "rank": 1, "spec_heads": 1,
    "certified": True, "local_page_size": 16, "canonical_page_size": 32,
}  # fmt: skip


def _write(path: Path, *cases: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(case) + "\n" for case in cases))
    return path


def test_the_shared_cases_hold(cli: Any) -> None:
    ran = cli("conformance", str(GOLDEN))
    assert ran.code == 0 and "74 passed, 0 failed" in ran.out


def test_a_wrong_case_is_shown_with_both_values(cli: Any, tmp_path: Path) -> None:
    wrong = {**CASE, "canonical_page_size": 33}
    file = str(_write(tmp_path / "cases.jsonl", CASE, wrong, wrong))
    ran = cli("conformance --show 1", file)
    assert ran.code == 1
    assert "canonical_page_size: expected 33, found 32" in ran.out and "and 1 more" in ran.out
    answer = cli("conformance --json", file).json
    assert (answer["passed"], answer["failed"]) == (1, 2)


def test_quirks_do_not_bind_and_an_empty_file_is_no_proof(cli: Any, tmp_path: Path) -> None:
    quirk = {**CASE, "canonical_page_size": 33, "quirk": "strides"}
    assert cli("conformance", str(_write(tmp_path / "a.jsonl", CASE, quirk))).code == 0
    assert cli("conformance", str(_write(tmp_path / "b.jsonl", quirk))).code == 1
    assert cli("conformance", str(_write(tmp_path / "c.jsonl"))).code == 1


def test_a_file_that_is_not_cases_names_the_line(cli: Any, tmp_path: Path) -> None:
    file = tmp_path / "cases.jsonl"
    file.write_text(json.dumps(CASE) + "\n{\n")
    ran = cli("conformance", str(file))
    assert ran.code == 1 and "line 2" in ran.err
    assert cli("conformance", str(tmp_path / "none.jsonl")).code == 2


# ---- models --------------------------------------------------------------------------------------


def test_models_lists_presets_and_architectures(cli: Any) -> None:
    assert "llama-3-8b" in cli("models").out
    answer = cli("models --json").json
    assert {"name", "checkpoint", "source", "bytes_per_token"} <= set(answer["presets"][0])
    assert "qwen3_next" in answer["architectures"]


# ---- explain -------------------------------------------------------------------------------------


def test_explain_says_yes_and_what_it_costs(cli: Any) -> None:
    line = "explain llama-3-70b --layout split_nhd --from tp=8 --to tp=16,dcp=2"
    answer = cli(f"{line} --json").json
    assert answer["possible"] and answer["family"] == "universal" and answer["chunk_tokens"] == 32
    source, target = answer["sides"]
    # 8 KV heads over 8 ranks: a page is 16 tokens of one head, K and V apart.
    assert source["kinds"][0]["fragments"] == 32
    assert source["kinds"][0]["fragment_bytes"] == [256, 256]
    assert source["copies_per_block"] == 80 * 32
    assert source["host_bytes_per_token"] == 80 * 8 * 512
    assert target["rank_copy_bytes_per_token"] == 80 * 8 * 512
    assert 0 < source["descriptor_bytes"] < 64 * 1024
    text = cli(line).out
    assert "can be moved  yes" in text and "copy engine" in text


def test_explain_counts_what_replicas_would_waste(cli: Any) -> None:
    answer = cli("explain deepseek-v3 --from tp=8 --to tp=1 --json").json
    per_token = [side["rank_copy_bytes_per_token"] for side in answer["sides"]]
    assert per_token == [8 * 61 * 1152, 61 * 1152]
    assert answer["sides"][0]["kinds"][0]["num_writers"] == 8


def test_explain_says_why_not(cli: Any) -> None:
    ran = cli("explain llama-3-8b --from tp=3 --to tp=2")
    assert ran.code == 1 and "heads-divide" in ran.out
    ran = cli("explain llama-3-8b --family native --from tp=2,block=32 --to tp=2 --json")
    assert ran.code == 1 and "span 32 tokens" in ran.json["obstacles"][0]
    line = "explain llama-3-8b --family native --from tp=2 --to tp=2,layout=split_hnd --json"
    assert "not split_hnd" in cli(line).json["obstacles"][0]


def test_native_is_chosen_only_where_both_sides_can_share_it(cli: Any) -> None:
    def family(*sides: str) -> object:
        ran = cli(f"explain llama-3-8b --from {sides[0]} --to {sides[1]} --json")
        return ran.json["family"]

    assert family("tp=4", "tp=2") == "native"
    assert family("tp=16,dcp=2,block=16", "tp=2,block=32") == "native"
    assert family("tp=4,block=16", "tp=2,block=32") == "universal"
    assert family("tp=4", "tp=2,layout=packed_hnd") == "universal"


@pytest.mark.parametrize(
    ("more", "path", "value"),
    [
        ("--block-size 64", ("chunk_tokens",), 64),
        ("--kv-dtype fp8", ("sides", 0, "host_bytes_per_token"), 32 * 8 * 256),
        ("--set num_hidden_layers=4", ("sides", 0, "host_bytes_per_token"), 4 * 8 * 512),
        ("--rank 3", ("sides", 0, "rank"), 3),
        ("--tokens 32", ("sides", 0, "load_bytes"), 32 * 32 * 2 * 512),
        ("--link pcie4", ("link",), "pcie4"),
        ("--family universal", ("family",), "universal"),
        ("--layout cpu_hnd", ("sides", 0, "kinds", 0, "layout"), "cpu_hnd"),
        ("--pcp-mode replicates", ("possible",), True),
    ],
)
def test_every_option_of_explain_reaches_the_report(
    cli: Any, more: str, path: tuple[Any, ...], value: object
) -> None:
    found: Any = cli(f"explain llama-3-8b --from tp=4 --to tp=2 {more} --json").json
    for step in path:
        found = found[step]
    assert found == value


def test_a_model_may_be_named_as_its_publisher_names_it(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "explain meta-llama/Llama-3.1-8B --from tp=2 --to tp=1 --json"
    assert cli(line).json["sides"] == cli(line.replace("meta-llama/", "")).json["sides"]
    monkeypatch.chdir(tmp_path)  # where a folder of that name exists, it is meant
    (tmp_path / "meta-llama/Llama-3.1-8B").mkdir(parents=True)
    ran = cli(line)
    assert ran.code == 2 and "cannot read" in ran.out


def test_explain_reads_a_config_json(cli: Any, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps({"model_type": "odd", "num_hidden_layers": 2, "num_key_value_heads": 4})
    )
    ran = cli("explain --from tp=1 --to tp=2", str(file))
    assert ran.code == 2 and "--set model_type=VALUE" in ran.err
    ran = cli("explain --from tp=1 --to tp=2 --set model_type=llama", str(file))
    assert ran.code == 2 and "--set head_dim=VALUE" in ran.err
    line = "explain --from tp=1 --to tp=2 --set model_type=llama --set head_dim=64"
    assert cli(line, str(file)).code == 0


# ---- wrong input ---------------------------------------------------------------------------------

WRONG = [
    ("mapping --tp 0", "--tp", "nearest right value: 1"),
    ("mapping --tp eight", "--tp", "whole number"),
    ("mapping --dtype bf61", "--dtype", "'bf16'"),
    ("mapping --layout split_hdn", "--layout", "'split_hnd'"),
    ("mapping --layout mla", "--layout", "--mla-row 1152"),
    ("mapping --mla-row 656", "--layout", "--layout mla"),
    ("mapping --rank 1", "--rank", "ranks are 0 to 0"),
    ("mapping --rank -1", "--rank", "ranks are 0 to 0"),
    ("mapping --family natve", "--family", "'native'"),
    ("mapping --pcp-mode replicate", "--pcp-mode", "'replicates'"),
    ("mapping --kv-head 8", "--kv-head", "--kv-heads"),
    ("conformance", "FILE", "Missing"),
    ("explain llama-3-8b --to tp=2", "--from", "Missing"),
    ("explain llama-3-8 --from tp=1 --to tp=2", "MODEL", "llama-3-8b"),
    ("explain llama-3-8b --from tp=4,dpc=2 --to tp=2", "--from", "nearest right value: dcp"),
    ("explain llama-3-8b --from tp8 --to tp=2", "--from", "nearest right value: tp=8"),
    ("explain llama-3-8b --from tp=4", "--to", "Target"),
    ("explain llama-3-8b --from tp=4 --to tp=two", "--to", "tp=1"),
    ("explain llama-3-8b --from tp=4 --to tp=-2", "--to", "positive"),
    ("explain llama-3-8b --from tp=4 --to tp=", "--to", "needs a value"),
    ("explain llama-3-8b --from tp=4,tp=2 --to tp=1", "--from", "twice"),
    ("explain llama-3-8b --from tp=4,dcp=3 --to tp=1", "--from", "must divide tp=4"),
    ("explain llama-3-8b --from tp=4096 --to tp=1", "--from", "ranks"),
    ("explain llama-3-8b --from pp=33 --to tp=1", "--from", "pp=32"),
    ("explain llama-3-8b --from pp=10+12 --to tp=1", "--from", "pp=10+22"),
    ("explain llama-3-8b --from tp=1,layout=packd_hnd --to tp=1", "--from", "packed_hnd"),
    ("explain llama-3-8b --from tp=2,dcp=2,interleave=3 --to tp=1", "--from", "interleave=1"),
    ("explain llama-3-8b --from tp=1 --to tp=1 --rank 1", "--rank", "ranks are 0 to 0"),
    ("explain llama-3-8b --from tp=1 --to tp=1 --link pcie6", "--link", "pcie"),
    ("explain llama-3-8b --from tp=1 --to tp=1 --tokens 0", "--tokens", "at least 1"),
    ("explain llama-3-8b --from tp=1 --to tp=1 --set head_dim", "--set", "KEY=VALUE"),
    ("explain llama-3-8b --from tp=1 --to tp=1 --kv-dtype fp7", "--kv-dtype", "'fp8'"),
    ("explain llama-3-8b --from tp=1 --to tp=1 --kv-dtype fp8_ds_mla", "--kv-dtype", "not MLA"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "option", "says"), WRONG)
def test_wrong_input_names_the_option_and_the_right_value(
    cli: Any, line: str, option: str, says: str
) -> None:
    ran = cli(line)
    assert ran.code == 2, ran.out
    assert option in ran.err and says in ran.err


# ---- configurations ------------------------------------------------------------------------------


def test_a_configuration_reads_back_from_its_own_spelling() -> None:
    for text in ("tp=8,dcp=2", "pp=3+5,layout=split_hnd,block=64", "tp=4,pcp=2,interleave=16"):
        made = Configuration.parse(text)
        assert Configuration.parse(str(made)) == made


def test_stages_are_whole_decoder_layers_however_many_caches_these_have() -> None:
    table = load_model("deepseek-v3.2")
    stages = Configuration.parse("pp=1+60").stage_layers(table)
    assert stages[0] == (
        "model.layers.0.self_attn.attn",
        "model.layers.0.self_attn.indexer.k_cache",
    )
    assert sum(len(stage) for stage in stages) == len(table)
    even = Configuration.parse("pp=4").stage_layers(load_model("gpt-oss-20b"))
    assert [len(stage) for stage in even] == [6, 6, 6, 6]


def test_a_bad_configuration_carries_its_parts() -> None:
    with pytest.raises(ConfigurationError) as caught:
        Configuration.parse("tp=8,blok=16")
    error = caught.value
    assert (error.key, error.value, error.nearest) == ("blok", "16", "block")
