"""Stores from the command line: identities, comparison, upkeep, conversion, and bug reports."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from vkvmap.cli import main
from vkvmap.describe.differences import differences, read_description
from vkvmap.describe.render import bars
from vkvmap.errors import FormatError
from vkvmap.identity import Identity
from vkvmap.models import from_hf_config
from vkvmap.store import CanonicalStore

SMALL = {"model_type": "llama", "num_hidden_layers": 2, "num_key_value_heads": 4, "head_dim": 8}


class Ran:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> dict[str, Any]:
        value = json.loads(self.out)
        assert isinstance(value, dict)
        return value


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(line: str) -> Ran:
        code = main(line.split())
        captured = capsys.readouterr()
        assert "Traceback" not in captured.out + captured.err
        return Ran(code, captured.out, captured.err)

    return run


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(SMALL))
    return file


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with five chunks of one identity."""
    identity = Identity("m", "r", from_hf_config(SMALL), 16)
    path = tmp_path / "store"
    rng = np.random.default_rng(1)
    rows = [rng.integers(0, 256, identity.chunks["full"].payload_bytes, np.uint8) for _ in range(5)]
    with CanonicalStore(path, identity) as opened:
        job = opened.put([bytes([i]) * 32 for i in range(5)], "full", rows)
        assert job.wait(30) and job.good.all()
    return path


def chunk_files(store: Path) -> list[Path]:
    return sorted(f for f in store.rglob("*") if f.is_file() and f.stat().st_size > 1000)


# ---- identity and verify -------------------------------------------------------------------------


def test_an_identity_knows_no_parallelism(cli: Any, config: Path) -> None:
    line = f"identity {config} --revision r --chunk-tokens 64 --json"
    one = cli(f"{line} --config tp=8,dcp=2 --layout split_hnd")
    two = cli(f"{line} --config tp=1 --block-size 64 --pcp-mode replicates")
    assert one.code == two.code == 0 and one.json == two.json


@pytest.mark.parametrize(
    ("more", "kind"),
    [
        ("--revision other", "revision"),
        ("--revision r --salt tenant", "salt"),
        ("--revision r --adapter lora-1", "adapter"),
        ("--revision r --kv-dtype fp8", "dtype"),
        ("--revision r --family native", "family"),
        ("--revision r --chunk-tokens 32", "tokens"),
        ("--revision r --set num_hidden_layers=3", "layers.2"),
    ],
)
def test_every_part_of_an_identity_is_told_apart(
    cli: Any, config: Path, tmp_path: Path, more: str, kind: str
) -> None:
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    assert cli(f"identity {config} --revision r --out {one}").code == 0
    assert cli(f"identity {config} {more} --out {two}").code == 0
    ran = cli(f"verify {one} {two}")
    assert ran.code == 1 and kind in ran.out and ran.out.startswith("no")
    answer = cli(f"verify {one} {two} --json").json
    assert not answer["same"] and answer["here"] != answer["there"]
    assert any(kind in each["where"] for each in answer["differences"])


def test_equal_descriptions_are_a_yes(cli: Any, config: Path, tmp_path: Path) -> None:
    one = tmp_path / "one.json"
    written = cli(f"identity {config} --revision r --out {one}")
    assert "wrote" in written.out
    assert cli(f"verify {one} {one}").out.startswith("yes")
    assert cli(f"verify {one} {one} --json").json["differences"] == []


def test_native_identities_keep_layout_and_span(cli: Any, config: Path) -> None:
    line = f"identity {config} --revision r --family native --chunk-tokens 64 --json"
    names = {
        cli(f"{line} {more}").json["name"]
        for more in ("", "--layout split_nhd", "--config tp=2,pcp=2", "--block-size 64")
    }
    assert len(names) == 4
    ran = cli(f"identity {config} --revision r --family native --chunk-tokens 24")
    assert ran.code == 1 and "whole spans" in ran.err


def test_a_preset_stores_under_its_checkpoint(cli: Any) -> None:
    described = json.loads(cli("identity qwen3-8b --revision r --json").json["description"])
    assert described["model"] == "Qwen/Qwen3-8B"
    assert '"model":"Qwen/Qwen3-8B"' in cli("identity qwen3-8b --revision r").out


def test_a_store_describes_itself(cli: Any, store: Path, tmp_path: Path) -> None:
    folder = next(store.glob("*/identity.json")).parent
    assert cli(f"verify {store} {folder}").code == 0
    other = store / ("0" * 64)
    other.mkdir()
    (other / "identity.json").write_text("{}")
    ran = cli(f"verify {store} {folder}")
    assert ran.code == 2 and "holds 2 identities" in ran.err


def test_what_is_no_description_is_refused(cli: Any, tmp_path: Path) -> None:
    for name, text, says in (("a", "{", "not JSON"), ("b", "{}", "vkvmap identity")):
        file = tmp_path / name
        file.write_text(text)
        ran = cli(f"verify {file} {file}")
        assert ran.code == 2 and says in ran.err
    with pytest.raises(FormatError, match="0 identities"):
        read_description(tmp_path)


def test_differences_of_alike_layers_are_told_once() -> None:
    table, other = from_hf_config(SMALL), from_hf_config(SMALL, kv_dtype="fp8")
    found = differences(Identity("m", "r", table, 16).json, Identity("m", "r", other, 16).json)
    where = [each.where for each in found]
    assert len(where) == 3 and all("and 1 more" in text for text in where)


# ---- store ---------------------------------------------------------------------------------------


def test_ls_lists_chunks(cli: Any, store: Path) -> None:
    answer = cli(f"store ls {store} --json").json
    assert answer["chunks"] == 5 and len(answer["listed"]) == 5
    assert {row["key"] for row in answer["listed"]} == {f"{i:02x}" * 32 for i in range(5)}
    assert "and 3 more" in cli(f"store ls {store} --limit 2").out
    assert cli(f"store ls {store} --identity zz --json").json["chunks"] == 0


def test_stats_counts_by_identity(cli: Any, store: Path) -> None:
    answer = cli(f"store stats {store} --json").json
    assert answer["chunks"] == 5 and list(answer["models"].values()) == ["m@r"]
    assert answer["groups"][0]["chunks"] == 5
    assert "m@r" in cli(f"store stats {store}").out


def test_fsck_finds_a_flipped_byte_and_repairs(cli: Any, store: Path) -> None:
    assert cli(f"store fsck {store}").code == 0
    file = chunk_files(store)[0]
    data = bytearray(file.read_bytes())
    data[-10 if len(data) % 4096 else 5000] ^= 1
    file.write_bytes(data)
    ran = cli(f"store fsck {store} --json")
    assert ran.code == 1 and len(ran.json["damaged"]) == 1 and ran.json["chunks"] == 4
    assert "damaged" in cli(f"store fsck {store}").out
    assert cli(f"store fsck {store} --repair").code == 1
    assert cli(f"store fsck {store}").code == 0
    assert cli(f"store stats {store} --json").json["quarantined"] == 1
    assert cli(f"store gc {store} --keep-quarantine --json").json["quarantined"] == 0
    assert cli(f"store gc {store} --json").json["quarantined"] == 1


def test_fsck_names_what_it_could_not_read(
    cli: Any, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = chunk_files(store)[0]
    opened = os.open

    def refuse(path: Any, *args: Any, **options: Any) -> int:
        if os.fspath(path).endswith(file.name):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return opened(path, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    ran = cli(f"store fsck {store}")
    assert ran.code == 1 and f"unreadable: {file}: {os.strerror(errno.EIO)}" in ran.out
    assert file.exists()


def test_gc_removes_what_it_is_told_to(cli: Any, store: Path) -> None:
    assert cli(f"store gc {store} --unused-days 1 --json").json["chunks"] == 0
    name = next(store.glob("*/identity.json")).parent.name
    ran = cli(f"store gc {store} --identity {name[:8]}")
    assert ran.code == 0 and "removed 5 chunks" in ran.out
    assert cli(f"store ls {store} --json").json["chunks"] == 0


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("store ls {tmp}", 1, "not a store"),
        ("store stats {tmp}", 1, "not a store"),
        ("store fsck {tmp}", 1, "not a store"),
        ("store gc {tmp}", 1, "not a store"),
        ("store gc {store} --identity ", 2, "--identity"),
        ("store gc {store} --unused-days -1", 2, "--unused-days"),
        ("store gc {store} --unused-days soon", 2, "--unused-days"),
        ("store ls {store} --limit 0", 2, "--limit"),
        ("store ls {tmp}/none", 2, "does not exist"),
        ("store fsk {store}", 2, "fsck"),
        ("store", 2, "Usage"),
        ("convert", 2, "to-store"),
        ("convert to-stor llama-3-8b", 2, "to-store"),
        ("verify {tmp}/none {tmp}/none", 2, "does not exist"),
        ("identity llama-3-8b", 2, "--revision"),
        ("identity llama-3-8b --revision r --family both", 2, "--family"),
        ("identity llama-3-8b --revision r --chunk-tokens 0", 2, "--chunk-tokens"),
        ("identity llama-3-8b --revision r --config tp=2,dcp=3", 2, "--config"),
        ("convert to-store llama-3-8b --revision r --pages a --store b", 2, "--config"),
        ("convert to-pages llama-3-8b --revision r --config tp=2 --store b", 2, "--pages"),
        ("convert to-pages llama-3-8b --revision r --config tp=2 --pages b", 2, "--store"),
        (
            "convert to-store llama-3-8b --revision r --config pp=40 --pages a --store b",
            2,
            "pp=32",
        ),
    ],
)  # fmt: skip
def test_wrong_input_is_answered(
    cli: Any, store: Path, tmp_path: Path, line: str, code: int, says: str
) -> None:
    ran = cli(line.format(tmp=tmp_path, store=store))
    assert ran.code == code and says in ran.err


# ---- convert -------------------------------------------------------------------------------------


def page_bytes(root: Path) -> dict[str, bytes]:
    return {str(f.relative_to(root)): f.read_bytes() for f in sorted(root.rglob("*.pages"))}


def test_pages_of_one_configuration_become_pages_of_another_and_come_back(
    cli: Any, config: Path, store: Path, tmp_path: Path
) -> None:
    common = f"--store {store} --chunk-tokens 16 --salt s --revision r --batch-mib 1"
    identity = Identity(str(config), "r", from_hf_config(SMALL), 16, salt="s")
    rng = np.random.default_rng(2)
    size = identity.chunks["full"].payload_bytes
    with CanonicalStore(store, identity) as opened:
        rows = [rng.integers(0, 256, size, np.uint8) for _ in range(3)]
        assert opened.put([bytes([i]) * 32 for i in range(3)], "full", rows).wait(30)
    one, two = tmp_path / "one", tmp_path / "two"
    out = f"convert to-pages {config} {common}"
    assert cli(f"{out} --pages {one} --config tp=2,layout=split_nhd --json").json["chunks"] == 3
    assert len(page_bytes(one)) == 6
    ran = cli(f"{out} --pages {two} --config tp=4,pp=2 --block-size 8 --layout packed_hnd")
    assert ran.code == 0 and "3 chunks" in ran.out and len(page_bytes(two)) == 24
    # Back into another store, and out again: the same page files.
    other = tmp_path / "other"
    back = common.replace(str(store), str(other))
    line = f"convert to-store {config} {back} --pages {two} --config tp=4,pp=2 --block-size 8"
    ran = cli(f"{line} --layout packed_hnd --json")
    assert ran.code == 0 and ran.json["whole"]
    again = tmp_path / "again"
    line = f"convert to-pages {config} {back} --pages {again} --config tp=2,layout=split_nhd"
    assert cli(line).code == 0
    assert page_bytes(again) == page_bytes(one)


def test_chunks_in_parts_are_filled_and_cut_as_whole_ones_are(
    cli: Any, config: Path, store: Path, tmp_path: Path
) -> None:
    common = f"{config} --revision r --chunk-tokens 16"
    identity = Identity(str(config), "r", from_hf_config(SMALL), 16)
    size = identity.chunks["full"].payload_bytes
    with CanonicalStore(store, identity) as opened:
        rows = [np.random.default_rng(n).integers(0, 256, size, np.uint8) for n in range(3)]
        assert opened.put([bytes([i]) * 32 for i in range(3)], "full", rows).wait(30)
    one, two, parted = tmp_path / "one", tmp_path / "two", tmp_path / "parted"
    assert cli(f"convert to-pages {common} --store {store} --pages {one} --config tp=2").code == 0
    line = f"convert to-store {common} --store {parted} --pages {one} --config tp=2"
    assert cli(f"{line} --parts pp=2").code == 0
    back = f"convert to-pages {common} --store {parted} --pages {two} --config tp=2"
    ran = cli(back)
    assert ran.code == 1 and "nothing to convert" in ran.out
    assert ran.out.count("a part of chunks that are stored in parts") == 2
    ran = cli(f"{back} --json")
    assert ran.code == 1 and len(ran.json["others"]) == 2 and not page_bytes(two)
    ran = cli(f"{back} --parts pp=2 --json")
    assert ran.code == 0 and ran.json["chunks"] == 3 and ran.json["others"] == {}
    assert page_bytes(two) == page_bytes(one)
    ran = cli(f"{back} --parts pp=3")
    assert ran.code == 2 and "--parts" in ran.err and "the model has 2 layers" in ran.err


def test_an_incomplete_chunk_is_skipped_and_said(cli: Any, config: Path, tmp_path: Path) -> None:
    pages, store = tmp_path / "pages", tmp_path / "fresh"
    line = f"convert to-store {config} --revision r --store {store} --pages {pages}"
    ran = cli(f"{line} --config tp=2")
    assert ran.code == 1 and "nothing to convert" in ran.out
    folder = pages / "0.0" / "0"
    folder.mkdir(parents=True)
    (folder / f"{'ab' * 32}.pages").write_bytes(b"short")
    ran = cli(f"{line} --config tp=2")
    assert ran.code == 1 and "1 skipped" in ran.out and "5 bytes" in ran.out
    assert cli(f"{line} --config tp=3").code == 1


# ---- info ----------------------------------------------------------------------------------------


def test_info_says_what_a_bug_report_needs(cli: Any) -> None:
    answer = cli("info --json").json
    assert set(answer) == {"versions", "build", "cuda", "calibration", "limits"}
    assert answer["versions"]["vkvmap"] and answer["versions"]["numpy"]
    assert "host" in answer["build"]["movers"]
    assert answer["cuda"]["available"] in (True, False)
    assert answer["cuda"]["available"] or answer["cuda"]["why not"]
    assert answer["limits"]["memory available"] > 0
    text = cli("info").out
    for word in ("versions", "instruction set", "why not", "shared memory free"):
        assert word in text


def test_info_measures_anew_on_request(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vkvmap import calibrate, cuda

    asked = []
    device = cuda.Device(0, "G", (9, 0), 132, 3, 80 << 30, "0000:01:00.0")
    monkeypatch.setattr(cuda, "devices", lambda: (device,))
    monkeypatch.setattr(
        calibrate,
        "calibration",
        lambda ordinal, fresh: asked.append(fresh) or calibrate.default_calibration("m"),
    )
    monkeypatch.setenv("VKVMAP_MOVER_LOAD", "kernel")
    answer = cli("info --calibrate --json").json
    assert asked == [True]
    assert answer["calibration"]["VKVMAP_MOVER_LOAD"] == "kernel"
    assert set(answer["calibration"]["device 0 load"].values()) <= set(calibrate.GPU_MOVERS)


# ---- bench ---------------------------------------------------------------------------------------


@pytest.fixture
def benchmarks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with one good and one failing benchmark."""
    import vkvmap

    folder = tmp_path / "checkout" / "benchmarks"
    folder.mkdir(parents=True)
    good = """
import json, sys
rounds = sys.argv[sys.argv.index("--rounds") + 1] if "--rounds" in sys.argv else 9
figure = {"name": "speed", "value": float(rounds), "unit": "s", "baseline": 1.0, "ratio": 2.5}
if __name__ == "__main__":
    open(sys.argv[sys.argv.index("--json") + 1], "w").write(json.dumps([figure]))
"""
    (folder / "derive.py").write_text(good)
    (folder / "wrong.py").write_text("if __name__ == '__main__': raise SystemExit('bytes differ')")
    (folder / "__init__.py").write_text("")
    (folder / "harness.py").write_text("")
    monkeypatch.setattr(vkvmap, "__file__", str(tmp_path / "checkout" / "vkvmap" / "x.py"))
    return folder


def test_bench_runs_what_there_is(cli: Any, benchmarks: Path, tmp_path: Path) -> None:
    plot = tmp_path / "bench.svg"
    ran = cli(f"bench --json --rounds 3 --plot {plot}")
    assert ran.code == 0
    assert ran.json["results"]["derive"][0]["value"] == 3.0
    assert "2.5x the time" in plot.read_text()
    assert "2.5x the time" in cli("bench derive").out
    assert cli("bench --list").out.split() == ["derive", "wrong"]
    assert cli("bench --list --json").json["usual"] == ["derive"]


def test_a_bar_is_blue_where_its_ratio_is_good_whatever_it_is_a_ratio_of() -> None:
    drawn = ElementTree.fromstring(
        bars("t", [("a", 0.5, "the time"), ("b", 2.0, "the time"), ("c", 2.0, "the speed")])
    )
    rounded = [r.get("fill") for r in drawn.iter() if r.tag.endswith("rect") and r.get("rx")]
    good, bad, also_good = rounded
    assert good == also_good != bad


def test_bench_fails_where_a_benchmark_does(cli: Any, benchmarks: Path) -> None:
    ran = cli("bench wrong derive")
    assert ran.code == 1 and "bytes differ" in ran.out and "2.5x" in ran.out
    assert cli("bench wrong --json").json["failed"].keys() == {"wrong"}


def test_wrong_input_to_bench_is_answered(cli: Any, benchmarks: Path) -> None:
    assert "'derive'" in cli("bench derve").err
    assert cli("bench derve").code == 2
    assert "bench.svg" in cli("bench --plot bench.png").err
    assert cli("bench --rounds 0").code == 2
    for file in benchmarks.glob("*.py"):
        file.unlink()
    ran = cli("bench")
    assert ran.code == 3 and "come with the source" in ran.err
