"""vLLM's own page files of canonical layout become chunks, and chunks become its files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.store.small import content_of, key_of
from vkvmap.errors import FormatError, StoreError
from vkvmap.identity import Identity
from vkvmap.integrations.vllm_files import VllmFiles, export_files, import_files
from vkvmap.spec import LayerSpec, LayerTable
from vkvmap.store import CanonicalStore
from vkvmap.store_exchange import write_whole

LAYERS = LayerTable(
    LayerSpec.attention(f"l.{index}", num_kv_heads=2, head_size=8) for index in range(2)
)
IDENTITY = Identity("org/model", "abc", LAYERS, 64, family="native", layouts="packed_nhd", spans=16)
PAYLOAD = 2 * 64 * 2 * 32
KEYS = [key_of(number) for number in range(40)]


def namespace(root: Path) -> VllmFiles:
    return VllmFiles(
        root=root,
        model_name="org/model",
        dtype="torch.bfloat16",
        tokens_per_hash=16,
        tokens_per_block=16,
        blocks_per_file=4,
        layer_names=("l.0", "l.1"),
        canonical_format="v1-nhd",
        row_bytes=PAYLOAD + 4096,
    )


def test_names_are_those_of_the_engines_own_mapper():
    """The right sides are what vLLM 0.32's FileMapper says for these settings."""
    files = namespace(Path("/kv"))
    assert str(files.base / "config.json") == "/kv/org_model_d8f67d3dbd60/config.json"
    assert str(files.path(bytes(range(32)))) == (
        "/kv/org_model_d8f67d3dbd60_r0/000/10_g0/"
        "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f.bin"
    )


def written_by_the_engine(root: Path) -> VllmFiles:
    files = namespace(root)
    files.base.mkdir(parents=True)
    (files.base / "config.json").write_text(json.dumps(files.config, indent=2, sort_keys=True))
    for key in KEYS:
        files.path(key).parent.mkdir(parents=True, exist_ok=True)
        padding = np.full(4096, 0xEE, np.uint8)
        files.path(key).write_bytes(np.concatenate([content_of(key, PAYLOAD), padding]).tobytes())
    return files


def test_a_namespace_is_read_from_its_own_description(tmp_path):
    files = written_by_the_engine(tmp_path)
    assert VllmFiles.open(files.base) == files


def test_engine_files_become_chunks_and_chunks_become_engine_files(tmp_path):
    files = VllmFiles.open(written_by_the_engine(tmp_path / "a").base)
    told: list[tuple[int, int]] = []
    with CanonicalStore(tmp_path / "store", IDENTITY, sync="none") as store:
        moved = import_files(files, store, progress=lambda *now: told.append(now))
        assert moved.chunks == 40 and not moved.skipped and told[-1] == (40, 40)
        rows = [np.zeros(PAYLOAD, np.uint8) for _ in KEYS]
        job = store.get(KEYS, "0", rows)
        assert job.wait(30) and job.good.all()
        for key, row in zip(KEYS, rows, strict=True):
            assert np.array_equal(row, content_of(key, PAYLOAD))
        out = replace(files, root=tmp_path / "b")
        moved = export_files(store, out, keys=[*KEYS[:20], key_of(99)])
        assert moved.chunks == 20
        assert moved.skipped == {key_of(99).hex(): "it is not in the store"}
    assert VllmFiles.open(out.base) == out
    for key in KEYS[:20]:
        raw = out.path(key).read_bytes()
        assert raw == content_of(key, PAYLOAD).tobytes() + bytes(4096)
    assert not out.path(KEYS[20]).exists()


def test_all_chunks_of_a_store_in_parts_are_exported_once_all_parts_are_there(tmp_path):
    files = written_by_the_engine(tmp_path / "a")
    out = replace(files, root=tmp_path / "b")
    parts = [["l.0"], ["l.1"]]
    with CanonicalStore(tmp_path / "store", IDENTITY, sync="none", parts=parts) as store:
        assert import_files(files, store).chunks == 40
        os.unlink(store._shelves["0"].parts[1].path(KEYS[3]))
        assert export_files(store, out).chunks == 39
    assert list(out.files()) == sorted(out.path(key) for key in KEYS if key != KEYS[3])
    for path in out.files():
        key = bytes.fromhex(path.stem)
        assert path.read_bytes() == content_of(key, PAYLOAD).tobytes() + bytes(4096)


def test_a_short_engine_file_is_skipped(tmp_path):
    files = written_by_the_engine(tmp_path / "a")
    short = files.path(KEYS[3])
    short.write_bytes(short.read_bytes()[:-1])
    with CanonicalStore(tmp_path / "store", IDENTITY, sync="none") as store:
        moved = import_files(files, store)
        assert moved.chunks == 39 and list(moved.skipped) == [KEYS[3].hex()]
    with pytest.raises(FormatError, match="one length is expected"):
        VllmFiles.open(files.base)


def test_a_file_that_goes_while_it_is_read_is_skipped(tmp_path, monkeypatch):
    files = written_by_the_engine(tmp_path / "a")
    listed = list(files.files())
    gone = files.path(KEYS[3])
    gone.unlink()
    monkeypatch.setattr(VllmFiles, "files", lambda self: iter(listed))
    with CanonicalStore(tmp_path / "store", IDENTITY, sync="none") as store:
        moved = import_files(files, store)
    assert moved.chunks == 39 and "No such file" in moved.skipped[KEYS[3].hex()]


@pytest.mark.parametrize("name", ["stranger", "ab" * 65, KEYS[0].hex().upper()])
def test_a_strangers_file_is_skipped_and_the_others_are_imported(tmp_path, name):
    files = written_by_the_engine(tmp_path / "a")
    files.path(KEYS[0]).with_name(f"{name}.bin").write_bytes(bytes(files.row_bytes))
    with CanonicalStore(tmp_path / "store", IDENTITY, sync="none") as store:
        moved = import_files(files, store)
        assert store.keys("0") == sorted(KEYS)
    assert moved.chunks == 40 and list(moved.skipped) == [name]
    assert "no key" in moved.skipped[name]


def test_a_namespace_is_read_although_a_file_goes_while_it_is_listed(tmp_path, monkeypatch):
    files = written_by_the_engine(tmp_path)
    listed = list(files.files())
    files.path(KEYS[3]).unlink()
    monkeypatch.setattr(VllmFiles, "files", lambda self: iter(listed))
    assert VllmFiles.open(files.base) == files


def test_files_that_cannot_be_listed_or_looked_at_are_a_store_error(tmp_path, monkeypatch):
    files = written_by_the_engine(tmp_path / "a")

    def refuse(self, *args, **options):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", refuse)
        with pytest.raises(StoreError, match="Input/output error"):
            VllmFiles.open(files.base)
    with CanonicalStore(tmp_path / "store", IDENTITY, sync="none") as store:
        monkeypatch.setattr(Path, "glob", refuse)
        with pytest.raises(StoreError, match="Input/output error"):
            import_files(files, store)


def test_an_export_that_cannot_be_written_leaves_whole_files_alone(tmp_path, monkeypatch):
    files = written_by_the_engine(tmp_path / "a")
    out = replace(files, root=tmp_path / "b")
    replaced = os.replace

    def full_after_five(source, target):
        if len(list(out.files())) == 5:
            raise OSError(28, "No space left on device")
        replaced(source, target)

    with CanonicalStore(tmp_path / "store", IDENTITY, sync="none") as store:
        import_files(files, store)
        monkeypatch.setattr(os, "replace", full_after_five)
        with pytest.raises(StoreError, match="No space left on device; make room"):
            export_files(store, out)
    left = [path for path in Path(f"{out.base}_r0").rglob("*") if path.is_file()]
    assert [path.stat().st_size for path in left] == [PAYLOAD + 4096] * 5


def test_two_exports_of_the_same_files_at_once_both_leave_whole_files(tmp_path, monkeypatch):
    """The second begins and ends while the first is about to give its first file its name."""
    files = written_by_the_engine(tmp_path / "a")
    out = replace(files, root=tmp_path / "b")
    replaced, others = os.replace, []

    def replace_after_another(source, target):
        if not others and str(target).endswith(".bin"):
            others.append("begun")
            others.append(export_files(store, out).chunks)
        replaced(source, target)

    with CanonicalStore(tmp_path / "store", IDENTITY, sync="none") as store:
        import_files(files, store)
        monkeypatch.setattr(os, "replace", replace_after_another)
        assert export_files(store, out).chunks == 40 and others == ["begun", 40]
    left = [path for path in Path(f"{out.base}_r0").rglob("*") if path.is_file()]
    assert sorted(left) == sorted(out.path(key) for key in KEYS)
    assert {path.stat().st_size for path in left} == {PAYLOAD + 4096}


def test_a_file_that_another_writes_meanwhile_is_whole_at_every_moment(tmp_path):
    path = tmp_path / "deep" / "file"

    def slowly(fails: bool) -> Iterator[bytes]:
        yield b"a" * 100_000
        write_whole(path, [b"b" * 50_000, memoryview(b"b" * 50_000)])
        assert path.read_bytes() == b"b" * 100_000
        yield b"a" * 100_000
        assert path.read_bytes() == b"b" * 100_000
        if fails:
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_whole(path, slowly(True))
    assert path.read_bytes() == b"b" * 100_000
    write_whole(path, slowly(False))
    assert path.read_bytes() == b"a" * 200_000
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"tokens_per_block": 32, "blocks_per_file": 2}, "span of the identity: 16"),
        ({"blocks_per_file": 2}, "chunk tokens of the identity: 64"),
        ({"layer_names": ("l.1", "l.0")}, "layers of the identity"),
        ({"row_bytes": PAYLOAD - 1}, f"a chunk has {PAYLOAD} bytes"),
    ],
)
def test_files_that_hold_something_else_are_refused(tmp_path, change, why):
    with (
        CanonicalStore(tmp_path / "store", IDENTITY) as store,
        pytest.raises(FormatError, match=why),
    ):
        import_files(replace(namespace(tmp_path), **change), store)


@pytest.mark.parametrize(
    "change",
    [
        {"canonical_format": "v2-nhd"},
        {"canonical_format": None},
        {"kv_cache_groups": []},
        {"model_name": "other"},
        {"tokens_per_hash": "many"},
    ],
)
def test_a_namespace_of_another_kind_is_refused(tmp_path, change):
    files = written_by_the_engine(tmp_path)
    (files.base / "config.json").write_text(json.dumps({**files.config, **change}))
    with pytest.raises(FormatError):
        VllmFiles.open(files.base)


def test_our_pages_in_the_engines_files_are_read_unless_they_are_private(tmp_path):
    """Their namespace has our name in its dtype and no format id."""
    said = {**namespace(tmp_path).config, "dtype": "float32+vkvmap-0123abcd"}
    del said["canonical_format"]
    files = replace(
        namespace(tmp_path), dtype=said["dtype"], canonical_format="", row_bytes=0
    )  # no file yet, so no length
    files.base.mkdir(parents=True)
    (files.base / "config.json").write_text(json.dumps(said))
    assert VllmFiles.open(files.base) == files
    (files.base / "config.json").write_text(json.dumps({**said, "parallel_agnostic": False}))
    with pytest.raises(FormatError, match="of one configuration"):
        VllmFiles.open(files.base)


def test_a_folder_without_a_description_is_refused(tmp_path):
    with pytest.raises(FormatError, match="not a namespace"):
        VllmFiles.open(tmp_path)
    (tmp_path / "config.json").write_bytes(b"[" * 100_000)
    with pytest.raises(FormatError, match="not a namespace"):
        VllmFiles.open(tmp_path)
