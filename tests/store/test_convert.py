"""Page files of one configuration become those of any other, by way of canonical chunks."""

from __future__ import annotations

import errno
import itertools
import os
from pathlib import Path

import pytest

from tests import oracle
from tests.store.deployment import MODELS, NUM_CHUNKS, Rank, identity_of
from tests.store.small import key_of
from vkvmap.configuration import Configuration
from vkvmap.convert import PageFiles, from_canonical, to_canonical
from vkvmap.errors import RefusedError, StoreError
from vkvmap.identity import Identity
from vkvmap.region_backing import available_memory
from vkvmap.spec import LayerSpec, LayerTable
from vkvmap.store import CanonicalStore

LAYERS = LayerTable(
    [
        spec
        for index in range(3)
        for spec in (
            LayerSpec.attention(f"layers.{index}.attn", num_kv_heads=2, head_size=8, group="full"),
            LayerSpec.mla(f"layers.{index}.latent", row_bytes=29, group="latent"),
        )
    ]
)
TOKENS = 64
IDENTITY = Identity("org/model", "abc", LAYERS, TOKENS)
KEYS = [key_of(number) for number in range(7)]
LAYOUT = {"full": "", "latent": "mla"}


def expected_file(files: PageFiles, stage: int, rank: int, group: str, chunk: int) -> bytes:
    """A rank's page file, by asking every token and head for its bytes."""
    side, pieces = files.configuration, []
    for name in side.stage_layers(LAYERS)[stage]:
        spec = LAYERS[name]
        if spec.group != group:
            continue
        seed = 100 * chunk + LAYERS.index(name)
        content = oracle.truth_of(spec, TOKENS, oracle.drawn(seed))
        slots = oracle.tokens_of(side.grid, rank, side.block_size, True)
        heads = None
        if spec.num_kv_heads is not None:
            heads = oracle.parts_of(spec.num_kv_heads, side.tp, rank % side.tp)
        for page in range(TOKENS // side.span):
            tokens = [page * side.span + slot for slot in slots]
            layout = LAYOUT[group] or side.layout
            pieces.append(oracle.page(layout, content.some(tokens, heads)).tobytes())
    return b"".join(pieces)


def page_files(root: Path, configuration: str) -> PageFiles:
    return PageFiles(root, IDENTITY, Configuration.parse(configuration))


def ranks(files: PageFiles) -> list[tuple[int, int]]:
    side = files.configuration
    return [(stage, rank) for stage in range(side.pp) for rank in range(side.grid.size)]


def write_all(files: PageFiles) -> None:
    for stage, rank in ranks(files):
        for group in LAYERS.groups:
            for chunk, key in enumerate(KEYS):
                path = files.path(stage, rank, group, key)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(expected_file(files, stage, rank, group, chunk))


SIDES = [
    "tp=4,dcp=2,layout=split_nhd,block=16",
    "tp=1,pp=3,layout=packed_hnd,block=64",
    "tp=2,layout=split_hnd,block=32",
]


@pytest.mark.parametrize("source", SIDES)
@pytest.mark.parametrize("target", SIDES)
def test_files_of_one_configuration_become_files_of_another(tmp_path, source, target):
    before, after = page_files(tmp_path / "a", source), page_files(tmp_path / "b", target)
    write_all(before)
    told: list[tuple[int, int]] = []
    with CanonicalStore(tmp_path / "store", IDENTITY, sync="none") as store:
        done = to_canonical(
            before, store, batch_bytes=20_000, progress=lambda *now: told.append(now)
        )
        assert done.chunks == 14 and not done.skipped
        assert told[-1] == (14, 14) and len(told) > 4
        assert from_canonical(store, after, batch_bytes=20_000).chunks == 14
    for stage, rank in ranks(after):
        for group in LAYERS.groups:
            assert after.keys(group) == sorted(KEYS)
            for chunk, key in enumerate(KEYS):
                found = after.path(stage, rank, group, key).read_bytes()
                assert found == expected_file(after, stage, rank, group, chunk)


def test_a_chunk_with_a_missing_or_short_file_is_skipped_and_said_so(tmp_path):
    files = page_files(tmp_path / "a", SIDES[0])
    write_all(files)
    files.path(0, 3, "full", KEYS[1]).unlink()
    short = files.path(0, 2, "latent", KEYS[2])
    short.write_bytes(short.read_bytes()[:-1])
    with CanonicalStore(tmp_path / "store", IDENTITY, sync="none") as store:
        done = to_canonical(files, store)
        assert done.chunks == 12
        assert "No such file" in done.skipped[f"full {KEYS[1].hex()}"]
        assert "this configuration writes" in done.skipped[f"latent {KEYS[2].hex()}"]
        assert store.lookup(KEYS, "full").tolist() == [n != 1 for n in range(7)]


def test_chosen_keys_alone_are_exported(tmp_path):
    files = page_files(tmp_path / "a", SIDES[2])
    write_all(files)
    with CanonicalStore(tmp_path / "store", IDENTITY, sync="none") as store:
        to_canonical(files, store)
        out = page_files(tmp_path / "b", SIDES[1])
        assert from_canonical(store, out, keys=KEYS[2:4]).chunks == 4
        assert out.keys("full") == sorted(KEYS[2:4])


def test_files_of_another_identity_are_refused(tmp_path):
    files = page_files(tmp_path / "a", SIDES[2])
    other = Identity("org/model", "abd", LAYERS, TOKENS)
    with (
        CanonicalStore(tmp_path / "store", other) as store,
        pytest.raises(StoreError, match='revision is "abc" there and "abd" here'),
    ):
        to_canonical(files, store)


def test_a_configuration_that_cannot_be_certified_is_refused(tmp_path):
    files = page_files(tmp_path / "a", "tp=3,block=16")
    folder = files.path(0, 0, "full", KEYS[0])
    folder.parent.mkdir(parents=True)
    folder.write_bytes(b"")
    with CanonicalStore(tmp_path / "store", IDENTITY) as store, pytest.raises(RefusedError):
        to_canonical(files, store)


def test_a_file_that_no_key_names_is_left_alone(tmp_path):
    files = page_files(tmp_path / "pages", "tp=1,block=16")
    stray = files.path(0, 0, "full", b"x").with_name("notes.pages")
    stray.parent.mkdir(parents=True)
    stray.write_text("not pages")
    for name in ("AB", "ab cd", "ab" * 65):  # no key is spelled like this
        stray.with_name(f"{name}.pages").write_text("not pages")
    with CanonicalStore(tmp_path / "store", IDENTITY) as store:
        assert files.keys("full") == []
        assert to_canonical(files, store).chunks == 0
    assert stray.read_text() == "not pages"


def test_a_group_that_nobody_described_is_refused_by_its_layer(tmp_path):
    layers = LayerTable(
        [
            LayerSpec.attention("layers.0.attn", num_kv_heads=2, head_size=8, group="full"),
            LayerSpec.opaque("layers.1.state", page_bytes=64, group="state"),
        ]
    )
    identity = Identity("org/model", "abc", layers, TOKENS)
    files = PageFiles(tmp_path / "a", identity, Configuration.parse("tp=1,block=16"))
    file = files.path(0, 0, "state", KEYS[0])
    file.parent.mkdir(parents=True)
    file.write_bytes(bytes(64))
    with CanonicalStore(tmp_path / "store", identity) as store:
        with pytest.raises(RefusedError, match=r"layers\.1\.state"):
            to_canonical(files, store)
        assert from_canonical(store, files).chunks == 0


def test_a_page_file_that_cannot_be_written_is_an_error_and_leaves_nothing(tmp_path, monkeypatch):
    """A full disk: what was written stays, whole; what was being written goes."""
    files = page_files(tmp_path / "a", SIDES[2])
    write_all(files)
    out, left = page_files(tmp_path / "b", SIDES[0]), [5]
    real = os.replace

    def replace(source, target) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(source, target)

    with CanonicalStore(tmp_path / "store", IDENTITY, sync="none") as store:
        to_canonical(files, store)
        monkeypatch.setattr(os, "replace", replace)
        with pytest.raises(StoreError, match=r"cannot write .*\.pages: No space left"):
            from_canonical(store, out)
    written = [path for path in out.root.rglob("*") if path.is_file()]
    assert len(written) == 5 and all(path.suffix == ".pages" for path in written)


def test_two_conversions_into_the_same_files_at_once_both_leave_whole_files(tmp_path, monkeypatch):
    """The second begins and ends while the first is about to give its first file its name."""
    files = page_files(tmp_path / "a", SIDES[2])
    write_all(files)
    out, others = page_files(tmp_path / "b", SIDES[0]), []
    real = os.replace

    def replace(source, target) -> None:
        if not others:
            others.append("begun")
            others.append(from_canonical(store, out).chunks)
        real(source, target)

    with CanonicalStore(tmp_path / "store", IDENTITY, sync="none") as store:
        to_canonical(files, store)
        monkeypatch.setattr(os, "replace", replace)
        assert from_canonical(store, out).chunks == 14 and others == ["begun", 14]
    found = sorted(path for path in out.root.rglob("*") if path.is_file())
    assert found == sorted(
        out.path(*rank, group, key)
        for rank in ranks(out)
        for group in LAYERS.groups
        for key in KEYS
    )
    for stage, rank in ranks(out):
        assert out.path(stage, rank, "full", KEYS[0]).read_bytes() == expected_file(
            out, stage, rank, "full", 0
        )


def test_no_more_memory_is_taken_than_the_chunks_need(tmp_path):
    files = page_files(tmp_path / "a", SIDES[2])
    write_all(files)
    before = available_memory()
    with CanonicalStore(tmp_path / "store", IDENTITY, sync="none") as store:
        # A batch of as much memory as there is: seven small chunks need next to none of it.
        assert to_canonical(files, store, batch_bytes=2 * before).chunks == 14


def test_chunks_in_parts_are_exported_once_all_parts_are_there(tmp_path):
    files = page_files(tmp_path / "a", SIDES[1])
    write_all(files)
    parts = files.configuration.stage_layers(LAYERS)
    out = page_files(tmp_path / "b", SIDES[0])
    with CanonicalStore(tmp_path / "store", IDENTITY, sync="none", parts=parts) as store:
        assert to_canonical(files, store).chunks == 14
        os.unlink(store._shelves["full"].parts[1].path(KEYS[3]))
        assert from_canonical(store, out).chunks == 13
    assert out.keys("full") == sorted(KEYS[:3] + KEYS[4:]) and out.keys("latent") == sorted(KEYS)
    for stage, rank in ranks(out):
        found = out.path(stage, rank, "full", KEYS[4]).read_bytes()
        assert found == expected_file(out, stage, rank, "full", 4)


@pytest.mark.parametrize("target", ["tp=2,layout=packed_hnd,block=64", "tp=1,pp=2,block=32"])
def test_windows_and_state_are_converted_beside_attention(tmp_path, target):
    table, chunks = MODELS["hybrid"], range(NUM_CHUNKS)
    identity = identity_of("hybrid")

    def of(me: Rank, group: str, chunk: int) -> bytes:
        each = me.pages(group) // NUM_CHUNKS
        names = [name for name in me.layers if table[name].group == group]
        pages = range(chunk * each, (chunk + 1) * each)
        return b"".join(me.page(name, page).tobytes() for name in names for page in pages)

    sides = [
        PageFiles(tmp_path / str(index), identity, Configuration.parse(spelled))
        for index, spelled in enumerate(["tp=4,dcp=2,layout=split_nhd,block=16", target])
    ]
    held = [
        [Rank("hybrid", f.configuration, stage, rank) for stage, rank in ranks(f)] for f in sides
    ]
    for me in held[0]:
        for group, chunk in itertools.product(table.groups, chunks):
            path = sides[0].path(me.stage, me.rank, group, key_of(chunk))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(of(me, group, chunk))
    with CanonicalStore(tmp_path / "store", identity, sync="none") as store:
        assert to_canonical(sides[0], store, batch_bytes=3000).chunks == 3 * NUM_CHUNKS
        assert from_canonical(store, sides[1], batch_bytes=3000).chunks == 3 * NUM_CHUNKS
    for me in held[1]:
        for group, chunk in itertools.product(table.groups, chunks):
            path = sides[1].path(me.stage, me.rank, group, key_of(chunk))
            assert path.read_bytes() == of(me, group, chunk)
