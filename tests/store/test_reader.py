"""What the page says about files is enough to read them: a reader made from it alone agrees."""

from __future__ import annotations

import ast
import random
from pathlib import Path

import numpy as np
import pytest

from tests import oracle
from tests.store import reader
from tests.store.deployment import MODELS, identity_of
from tests.store.small import key_of
from vkvmap.format import ChunkFormat
from vkvmap.identity import Identity
from vkvmap.spec import LayerSpec, LayerTable
from vkvmap.store import CanonicalStore
from vkvmap.store_upkeep import ls

GOLDEN = Path(__file__).parent / "golden"
KEY = key_of(5)
ATTENTION = LayerSpec.attention("a", num_kv_heads=2, head_size=3, head_size_v=5, scale_bytes=4)


def truths(identity: Identity, group: str, tokens: int) -> dict[str, oracle.Truth]:
    specs = identity.layers.in_group(group)
    return {s.name: oracle.truth_of(s, tokens, oracle.drawn(i)) for i, s in enumerate(specs)}


def stored(path: str, identity: Identity, group: str, payload: np.ndarray) -> bytes:
    """The file that a store makes of `payload`."""
    with CanonicalStore(path, identity) as store:
        job = store.put([KEY], group, [payload])
        assert job.wait(30) and job.outcomes == ["stored"]
    folder = ChunkFormat(identity, group).folder
    place = next(entry.path for entry in ls(path, identity=identity.name, folder=folder))
    name = KEY.hex()
    assert place == f"{path}/{identity.name}/{folder}/{name[:2]}/{name}.chunk"
    return Path(place).read_bytes()


def same(found: reader.Arrays, expected: dict[str, oracle.Truth]) -> None:
    assert list(found) == list(expected)
    for layer, truth in expected.items():
        for field, array in truth.fields.items():
            assert np.array_equal(found[layer][field], array), (layer, field)


def test_the_reader_shares_no_code_with_the_package():
    tree = ast.parse(Path(reader.__file__).read_text("utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {getattr(node, "module", None) or node.names[0].name for node in imports}
    assert names == {"__future__", "hashlib", "itertools", "json", "re", "numpy", "xxhash"}


@pytest.mark.parametrize(("model", "group"), [(m, g) for m in MODELS for g in MODELS[m].groups])
def test_universal_chunks_are_read_token_by_token(tmp_path, model, group):
    identity = identity_of(model)
    tokens = identity.chunks[group].tokens
    expected = truths(identity, group, tokens)
    if tokens:
        payload = np.concatenate([oracle.universal(truth) for truth in expected.values()])
    else:
        arrays = [a for truth in expected.values() for a in truth.fields.values()]
        payload = np.concatenate([array.reshape(-1) for array in arrays])
    raw = stored(str(tmp_path), identity, group, payload)
    same(reader.read(raw, identity.json, group, KEY), expected)


@pytest.mark.parametrize(
    "layout",
    [
        "split_nhd", "split_hnd", "packed_nhd", "packed_hnd", "packed_nhd_scaled",
        "packed_hnd_scaled", "nhd_planar_scales", "hnd_planar_scales",
    ],
)  # fmt: skip
def test_native_chunks_are_read_page_by_page(tmp_path, layout):
    identity = Identity(
        "org/model", "abc", LayerTable([ATTENTION]), 24, "native", layouts=layout, spans=8
    )
    expected = truths(identity, "0", 24)
    pages = [list(range(start, start + 8)) for start in range(0, 24, 8)]
    payload = np.concatenate([oracle.page(layout, expected["a"].some(p, None)) for p in pages])
    raw = stored(str(tmp_path), identity, "0", payload)
    same(reader.read(raw, identity.json, "0", KEY), expected)


def test_a_transposed_encoding_is_read_from_its_order(tmp_path):
    layer = LayerSpec.attention("a", num_kv_heads=2, head_size=3)
    identity = Identity(
        "org/model", "abc", LayerTable([layer]), 24, "native", layouts="cpu_hnd", spans=8
    )
    expected = truths(identity, "0", 24)
    heads = [expected["a"].some(list(range(s, s + 8)), None) for s in range(0, 24, 8)]
    payload = np.concatenate([oracle.page("cpu_hnd", page) for page in heads])
    raw = stored(str(tmp_path), identity, "0", payload)
    same(reader.read(raw, identity.json, "0", KEY), expected)


def test_layers_that_nobody_described_have_no_place_in_a_chunk(tmp_path):
    layers = LayerTable([LayerSpec.opaque("s", page_bytes=64, group="0"), ATTENTION])
    identity = Identity("org/model", "abc", layers, 8)
    expected = {"a": oracle.truth_of(ATTENTION, 8, oracle.drawn(1))}
    raw = stored(str(tmp_path), identity, "0", oracle.universal(expected["a"]))
    same(reader.read(raw, identity.json, "0", KEY), expected)


def test_the_golden_file_is_read():
    raw = (GOLDEN / "chunk_v1.bin").read_bytes()
    text = (GOLDEN / "identity_v1.json").read_text("utf-8")
    text = text.replace('"adapter":null', '"adapter":"lora"').replace(
        '"salt":""', '"salt":"tenant"'
    )
    found = reader.read(raw, text, "full", bytes(range(32)))
    content = np.frombuffer(raw, np.uint8)[int.from_bytes(raw[12:16], "little") :]
    assert found["a"]["k"].shape == (32, 2, 8, 2)
    assert np.array_equal(found["a"]["k"][3, 1].reshape(-1), content[(3 * 2 + 1) * 32 :][:16])
    second = content[found["a"]["k"].size * 2 :]
    assert np.array_equal(found["b"]["v_scale"][7, 0], second[8 * 40 - 4 :][:4])


def test_the_reader_refuses_what_the_store_refuses(tmp_path):
    """Bits, lengths, another identity, group or key: both sides call the same files good."""
    identity, chance = identity_of("latent"), random.Random(1)
    chunk = ChunkFormat(identity, "latent")
    payload = np.frombuffer(chance.randbytes(chunk.payload_bytes), np.uint8)
    raw = stored(str(tmp_path / "made"), identity, "latent", payload)
    right = reader.read(raw, identity.json, "latent", KEY)
    path = str(tmp_path / "store")
    row = np.zeros(chunk.payload_bytes, np.uint8)
    refused = 0
    with CanonicalStore(path, identity) as store:
        place = Path(store._shelves["latent"].path(KEY))
        place.parent.mkdir(parents=True)
        for _ in range(300):
            bad = bytearray(raw)
            bit = chance.randrange(8 * chance.choice([160, 400, len(bad)]))
            bad[bit // 8] ^= 1 << bit % 8
            if chance.random() < 0.2:
                del bad[chance.randrange(len(bad)) :]
            place.write_bytes(bad)
            job = store.get([KEY], "latent", [row])
            assert job.wait(30)
            try:
                found = reader.read(bytes(bad), identity.json, "latent", KEY)
            except ValueError:
                refused += 1
                assert job.outcomes == ["damaged"]
            else:
                assert job.outcomes == ["hit"]
                assert all(np.array_equal(found[n]["row"], right[n]["row"]) for n in right)
    assert 200 < refused < 300
    for other in ({"group": "full"}, {"key": key_of(6)}, {"text": identity_of("hybrid").json}):
        with pytest.raises(ValueError):
            reader.read(
                raw,
                other.get("text", identity.json),
                other.get("group", "latent"),
                other.get("key", KEY),
            )
