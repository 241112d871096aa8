"""Every option of every command: one right value that changes what happens, one wrong value.

The table below is compared with the tree of commands, so an option cannot be added, or dropped,
without its row. A right value is shown to reach the answer: what is printed, written or handed to
the work differs from what happens without it.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

from vkvmap.cli import COMMANDS, app, main
from vkvmap.convert import Converted
from vkvmap.identity import Identity
from vkvmap.models import from_hf_config
from vkvmap.roundtrip import Outcome
from vkvmap.store import CanonicalStore

MODEL = {"model_type": "llama", "num_hidden_layers": 2, "num_key_value_heads": 4, "head_dim": 8}
GOLDEN = Path(__file__).parent / "cases" / "golden.jsonl"


@dataclass(frozen=True)
class Row:
    """How one option is exercised.

    Attributes:
        right: what is added to the command's line.
        wrong: what is added to it instead; must be refused with exit code 2, naming the option.
        says: what the refusal must contain beside the option's name.
        beside: what both runs of the right value get, for options that matter only then.
        code: exit code with the right value.
        same: the answer is the same: the option says the default, or a file is what it is for.
    """

    right: str
    wrong: str
    says: str
    beside: str = ""
    code: int = 0
    same: bool = False


JSON = {"--json": Row("--json", "--json=1", "does not take a value")}
KV = {
    "--kv-dtype": Row("--kv-dtype fp8", "--kv-dtype fp88", "did you mean 'fp8'"),
    "--set": Row("--set num_key_value_heads=8", "--set heads", "KEY=VALUE"),
}
LAYOUT = {
    "--layout": Row("--layout split_hnd", "--layout split", "did you mean 'split_"),
    "--block-size": Row("--block-size 32", "--block-size 0", "nearest right value: 1"),
}
MOVE = {
    "--from": Row("--from tp=1", "--from tp=0", "nearest right value: tp=1"),
    "--to": Row("--to tp=4", "--to dtp=4", "nearest right value: tp"),
    **LAYOUT,
    "--pcp-mode": Row(
        "--pcp-mode replicates",
        "--pcp-mode shard",
        "did you mean 'shards'",
        "--from tp=2,pcp=2 --to tp=2,pcp=2",
    ),
    **KV,
    "--family": Row("--family universal", "--family naive", "did you mean 'native'"),
}
IDENTITY = {
    "--revision": Row("--revision other", "--revision", "requires an argument"),
    "--family": Row("--family native", "--family nativ", "did you mean 'native'"),
    "--adapter": Row("--adapter lora-1", "--adapter", "requires an argument"),
    "--salt": Row("--salt tenant", "--salt", "requires an argument"),
    "--chunk-tokens": Row("--chunk-tokens 64", "--chunk-tokens many", "whole number"),
}
NATIVE = "--family native"
CONVERT = {
    **IDENTITY,
    "--config": Row("--config tp=4", "--config tp=2,blok=1", "nearest right value: block"),
    "--pages": Row("--pages {tmp}/elsewhere", "--pages {config}", "is a file"),
    "--store": Row("--store {tmp}/other", "--store {config}", "is a file"),
    "--parts": Row("--parts pp=2", "--parts tp=2,pp=2", "give pp alone"),
    **LAYOUT,
    "--pcp-mode": Row(
        "--pcp-mode replicates", "--pcp-mode none", "not one of", "--config tp=2,pcp=2"
    ),
    **KV,
    "--batch-mib": Row("--batch-mib 1", "--batch-mib 0", "nearest right value: 1"),
    **JSON,
}

#: Command -> its line without options under test, and its options.
TABLE: dict[str, tuple[str, dict[str, Row]]] = {
    "": (
        "mapping",
        {
            "--debug": Row("--debug", "--debug=1", "does not take a value", same=True),
            "--version": Row("--version", "--version=1", "does not take a value"),
        },
    ),
    "roundtrip": (
        "roundtrip {config} --from tp=2 --to tp=2",
        {
            **MOVE,
            "--tokens": Row("--tokens 1k", "--tokens 1.5", "whole number"),
            "--layers": Row("--layers 1", "--layers 3", "nearest right value: 2"),
            "--mover": Row("--mover host", "--mover hots", "did you mean 'host'"),
            "--device": Row("--device cpu", "--device gpu", "not one of cpu, cuda", same=True),
            "--writers": Row("--writers split", "--writers turn", "did you mean 'turns'"),
            "--seed": Row("--seed 7", "--seed x", "not a valid integer"),
            "--flip-a-byte": Row("--flip-a-byte", "--flip-a-byte=1", "does not take a value"),
            **JSON,
        },
    ),
    "explain": (
        "explain {config} --from tp=2 --to tp=2",
        {
            **MOVE,
            "--rank": Row("--rank 1", "--rank 2", "ranks are 0 to 1"),
            "--tokens": Row("--tokens 8k", "--tokens 0", "nearest right value: 1"),
            "--link": Row("--link c2c", "--link pcie3", "did you mean 'pcie"),
            **JSON,
        },
    ),
    "show": (
        "show {config} --from tp=2 --to tp=2 --colour never --width 120",
        {
            **MOVE,
            "--layer": Row("--layer layers.1", "--layer layers.7", "nearest: 'model.layers"),
            "--ranks": Row("--ranks all", "--ranks 2", "ranks are 0 to 1", "--ranks 0"),
            "--page": Row("--page 1", "--page -1", "range", "--from tp=8"),
            "--out": Row("--out {tmp}/page.svg", "--out {tmp}/page.jpg", "page.svg"),
            "--colour": Row("--colour always", "--colour alway", "did you mean 'always'"),
            "--width": Row("--width 60", "--width wide", "whole number"),
            **JSON,
        },
    ),
    "mapping": (
        "mapping",
        {
            "--tp": Row("--tp 2", "--tp 0", "nearest right value: 1"),
            "--dcp": Row("--dcp 2", "--dcp two", "whole number", "--tp 16"),
            "--pcp": Row("--pcp 2", "--pcp -1", "nearest right value: 1"),
            "--interleave": Row("--interleave 4", "--interleave 0", "at least 1", "--pcp 2"),
            "--pcp-mode": Row("--pcp-mode replicates", "--pcp-mode x", "not one of", "--pcp 2"),
            "--rank": Row("--rank 1", "--rank 2", "ranks are 0 to 1", "--tp 2"),
            "--kv-heads": Row("--kv-heads 4", "--kv-heads 0", "at least 1"),
            "--head-size": Row("--head-size 64", "--head-size 0", "at least 1"),
            "--head-size-v": Row("--head-size-v 64", "--head-size-v x", "whole number"),
            "--dtype": Row("--dtype fp8", "--dtype bf61", "did you mean 'bf16'"),
            "--mla-row": Row("--mla-row 656", "--mla-row 0", "at least 1", "--layout mla", code=0),
            "--block-size": Row("--block-size 32", "--block-size 0", "at least 1"),
            "--layout": Row("--layout split_nhd", "--layout nhd", "not one of", "--tp 2"),
            "--family": Row("--family universal", "--family all", "not one of"),
            "--dcp-whole": Row(
                "--dcp-whole", "--dcp-whole=1", "does not take a value", "--tp 16 --dcp 2"
            ),
            **JSON,
        },
    ),
    "conformance": (
        "conformance {wrong_cases}",
        {"--show": Row("--show 1", "--show 0", "at least 1", code=1), **JSON},
    ),
    "models": ("models", JSON),
    "identity": (
        "identity {config} --revision r",
        {
            **IDENTITY,
            "--config": Row("--config tp=1,pcp=2", "--config tp=1,pc=2", "nearest", NATIVE),
            "--layout": Row("--layout split_hnd", "--layout hnd", "not one of", NATIVE),
            "--block-size": Row("--block-size 32", "--block-size 0", "at least 1"),
            "--pcp-mode": Row(
                "--pcp-mode replicates",
                "--pcp-mode x",
                "not one of",
                f"{NATIVE} --config tp=1,pcp=2 --chunk-tokens 64",
            ),
            **KV,
            "--out": Row("--out {tmp}/identity.json", "--out {tmp}", "is a directory"),
            **JSON,
        },
    ),
    "verify": ("verify {identity} {identity}", JSON),
    "store ls": (
        "store ls {store}",
        {
            "--identity": Row("--identity zz", "--identity", "requires an argument"),
            "--limit": Row("--limit 1", "--limit 0", "at least 1"),
            **JSON,
        },
    ),
    "store stats": ("store stats {store}", JSON),
    "store fsck": (
        "store fsck {damaged}",
        {"--repair": Row("--repair", "--repair=1", "does not take a value", code=1), **JSON},
    ),
    "store gc": (
        "store gc {store}",
        {
            "--identity": Row("--identity {name}", "--identity", "requires an argument"),
            "--unused-days": Row("--unused-days 0", "--unused-days soon", "not a valid float"),
            "--keep-quarantine": Row(
                "--keep-quarantine", "--keep-quarantine=1", "does not take a value"
            ),
            **JSON,
        },
    ),
    "convert to-store": (
        "convert to-store {config} --revision r --config tp=2 --pages {tmp}/p --store {tmp}/s",
        CONVERT,
    ),
    "convert to-pages": (
        "convert to-pages {config} --revision r --config tp=2 --pages {tmp}/p --store {tmp}/s",
        CONVERT,
    ),
    "bench": (
        "bench derive",
        {
            "--rounds": Row("--rounds 2", "--rounds 0", "at least 1"),
            "--plot": Row("--plot {tmp}/b.svg", "--plot {tmp}/b.gif", "b.svg", same=True),
            "--list": Row("--list", "--list=1", "does not take a value"),
            **JSON,
        },
    ),
    "info": (
        "info",
        {"--calibrate": Row("--calibrate", "--calibrate=1", "does not take a value"), **JSON},
    ),
}

_NEEDED = "--revision r --config tp=1 --pages p --store s"

#: Arguments: command -> a line that leaves them out or gives a wrong one, and what it says.
ARGUMENTS = {
    "roundtrip": ("roundtrip lama-3-8b --from tp=1 --to tp=1", "llama-3-8b"),
    "explain": ("explain {tmp}/none.json --from tp=1 --to tp=1", "MODEL"),
    "show": ("show {store} --from tp=1", "config.json"),
    "conformance": ("conformance {tmp}/none", "FILE"),
    "identity": ("identity nothing --revision r", "MODEL"),
    "verify": ("verify {identity}", "THERE"),
    "store ls": ("store ls", "PATH"),
    "store stats": ("store stats {tmp}/none", "PATH"),
    "store fsck": ("store fsck {config}", "PATH"),
    "store gc": ("store gc", "PATH"),
    "convert to-store": (f"convert to-store x {_NEEDED}", "MODEL"),
    "convert to-pages": (f"convert to-pages x {_NEEDED}", "MODEL"),
    "bench": ("bench derives", "did you mean 'derive'"),
}  # fmt: skip


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every command of the tree, the root included, by its words."""

    def walk(this: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
        yield path, this
        if isinstance(this, click.Group):
            context = click.Context(this)
            for name in this.list_commands(context):
                found = this.get_command(context, name)
                assert found is not None
                yield from walk(found, f"{path} {name}".strip())

    return walk(app, "")


def test_every_option_of_every_command_has_its_row() -> None:
    options = {
        path: {p.opts[0] for p in command.params if isinstance(p, click.Option)}
        for path, command in commands()
    }
    written = {path: set(rows) for path, (_, rows) in TABLE.items()}
    assert {path: names for path, names in options.items() if names} == written


def test_every_argument_has_its_row() -> None:
    with_arguments = {
        path
        for path, command in commands()
        if any(isinstance(p, click.Argument) for p in command.params)
    }
    assert with_arguments == set(ARGUMENTS)


def test_every_command_can_print_json() -> None:
    assert {p for p, (_, rows) in TABLE.items() if "--json" in rows} == set(TABLE) - {""}
    assert {path.partition(" ")[0] for path in TABLE} - {""} == set(COMMANDS)


# ---- what the lines need -------------------------------------------------------------------------


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    """A configuration file, a store, a damaged one, an identity and a file of failing cases."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(MODEL))
    made = {"tmp": str(tmp_path), "config": str(config)}
    identity = Identity("m", "r", from_hf_config(MODEL), 16)
    size = identity.chunks["full"].payload_bytes
    for name in ("store", "damaged"):
        with CanonicalStore(tmp_path / name, identity) as opened:
            rows = [np.full(size, n, np.uint8) for n in range(3)]
            job = opened.put([bytes([n]) * 32 for n in range(3)], "full", rows)
            assert job.wait(30) and job.good.all()
        made[name] = str(tmp_path / name)
        big = [f for f in (tmp_path / name).rglob("*") if f.is_file() and f.stat().st_size > size]
        # In one store a chunk is broken, in the other it has been found and put aside.
        big[0].write_bytes(b"\0" * 100 + big[0].read_bytes()[100:])
        if name == "store":
            assert main(["store", "fsck", str(tmp_path / name), "--repair"]) == 1
    (tmp_path / "identity").write_text(identity.json)
    made["identity"], made["name"] = str(tmp_path / "identity"), identity.name
    first = json.loads(GOLDEN.read_text().splitlines()[0])
    wrong = [{**first, "id": n, "canonical_page_size": 1} for n in range(8)]
    (tmp_path / "wrong.jsonl").write_text("".join(json.dumps(case) + "\n" for case in wrong))
    made["wrong_cases"] = str(tmp_path / "wrong.jsonl")
    return made


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What commands hand to work that takes long, or needs a GPU, in place of doing it."""
    seen: list[str] = []

    def round_trip(job: Any, *, progress: Any, flip_a_byte: bool) -> Outcome:
        seen.append(f"{vars(job) | {'table': list(job.table.values())}} {flip_a_byte}")
        report = type("Report", (), {"side": "load", "good": True})()
        monkeypatch.setattr("vkvmap.cli.roundtrip._print", lambda *_: click.echo("done"))
        monkeypatch.setattr("vkvmap.cli.roundtrip._as_json", lambda *_: {"done": True})
        return Outcome(job.family, job.chunk_tokens, job.tokens, 0, (report,))

    def convert(files: Any, store: Any, *, batch_bytes: int, progress: Any) -> Converted:
        seen.append(
            f"{files.identity.json} {files.configuration} {files.root} {store.path} {batch_bytes} "
            f"{sorted(os.listdir(store.path))}"  # the formats that the store knows
        )
        return Converted(chunks=1)

    def benchmark(folder: Path, name: str, rounds: int | None) -> tuple[list[Any], str]:
        seen.append(f"{name} {rounds}")
        return [{"name": "x", "value": 1.0, "unit": "s", "baseline": 1.0, "ratio": 1.0}], ""

    monkeypatch.setattr("vkvmap.cli.roundtrip.run", round_trip)
    monkeypatch.setattr("vkvmap.cli.convert.to_canonical", convert)
    monkeypatch.setattr(
        "vkvmap.cli.convert.from_canonical",
        lambda store, files, **how: convert(files, store, **how),
    )
    monkeypatch.setattr("vkvmap.cli.bench._run", benchmark)
    monkeypatch.setattr(
        "vkvmap.cli.info._calibration", lambda fresh: {"measured": "anew" if fresh else "before"}
    )
    return seen


class Answer:
    def __init__(self, code: int, out: str, err: str, seen: list[str]) -> None:
        self.code, self.out, self.err, self.seen = code, out, err, seen


@pytest.fixture
def ask(places: dict[str, str], handed: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
    def run(line: str) -> Answer:
        handed.clear()
        capsys.readouterr()
        code = main(shlex.split(line.format(**places)))
        captured = capsys.readouterr()
        assert "Traceback" not in captured.out + captured.err
        return Answer(code, captured.out, captured.err, list(handed))

    return run


CASES = [(path, option) for path, (_, rows) in TABLE.items() for option in rows]


def line_of(path: str, row: Row, added: str) -> str:
    base, _ = TABLE[path]
    words = (added, base, row.beside) if path == "" else (base, row.beside, added)
    return " ".join(words)


@pytest.mark.parametrize(("path", "option"), CASES)
def test_a_right_value_reaches_the_answer(
    ask: Any, places: dict[str, str], path: str, option: str
) -> None:
    row = TABLE[path][1][option]
    without = ask(line_of(path, row, ""))
    given = ask(line_of(path, row, row.right))
    expected = without.code if option == "--json" else row.code
    assert given.code == expected, given.err
    assert ((given.out, given.seen) == (without.out, without.seen)) == row.same
    if option == "--json":
        assert isinstance(json.loads(given.out), dict)
    if option in ("--out", "--plot"):
        assert Path(row.right.split()[1].format(**places)).stat().st_size > 0


@pytest.mark.parametrize(("path", "option"), CASES)
def test_a_wrong_value_is_refused_by_name(ask: Any, path: str, option: str) -> None:
    row = TABLE[path][1][option]
    answer = ask(line_of(path, row, row.wrong))
    assert answer.code == 2 and not answer.seen, answer.out
    assert option in answer.err and row.says in answer.err, answer.err


@pytest.mark.parametrize("path", ARGUMENTS)
def test_a_wrong_argument_is_refused_by_name(ask: Any, path: str) -> None:
    line, says = ARGUMENTS[path]
    answer = ask(line)
    assert answer.code == 2 and says in answer.err, answer.err
