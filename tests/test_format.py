"""What is stored is pinned byte by byte, and whatever is not exactly that is never believed.

Headers are taken apart here with offsets from docs/format.md, not with the code under test.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from vkvmap.errors import FormatError
from vkvmap.format import ChunkFormat, DamagedError, ForeignError, Witness
from vkvmap.identity import Identity, canonical_json
from vkvmap.keys import check_key, chunk_keys, span_tokens, whole_chunks
from vkvmap.spec import LayerSpec, LayerTable

GOLDEN = Path(__file__).parent / "store" / "golden"
LAYERS = LayerTable(
    [
        LayerSpec.attention("a", num_kv_heads=2, head_size=8, group="full"),
        LayerSpec.mla("m", row_bytes=20, group="latent"),
        LayerSpec.attention("b", num_kv_heads=1, head_size=8, scale_bytes=4, group="full"),
        LayerSpec.mamba2(
            "s", num_heads=2, head_dim=4, state_size=4, n_groups=1, conv_kernel=4, group="state"
        ),
    ]
)


def identity(**changes) -> Identity:
    settings = {"model": "org/model", "revision": "abc", "layers": LAYERS, "chunk_tokens": 32}
    return Identity(**{**settings, **changes})


def payload_of(chunk: ChunkFormat, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, chunk.payload_bytes, np.uint8)


# ---- bytes ------------------------------------------------------------------------------------


def golden_file() -> bytes:
    chunk = ChunkFormat(identity(adapter="lora", salt="tenant"), "full")
    payload = (np.arange(chunk.payload_bytes) * 7 % 251).astype(np.uint8)
    header = chunk.header(bytes(range(32)), payload, [Witness(1, 0, bytes(range(16)))])
    return header + payload.tobytes() + bytes(chunk.padded_payload_bytes - chunk.payload_bytes)


def test_a_chunk_is_the_golden_bytes():
    """If this fails, readers of existing files break: raise the format version."""
    assert golden_file() == (GOLDEN / "chunk_v1.bin").read_bytes()


def test_a_description_is_the_golden_text():
    assert identity().json == (GOLDEN / "identity_v1.json").read_text("utf-8")
    assert identity().digest == hashlib.sha256(identity().json.encode()).digest()


def test_a_stranger_can_read_a_chunk_from_the_specification():
    raw = (GOLDEN / "chunk_v1.bin").read_bytes()

    def number(offset: int, size: int) -> int:
        return int.from_bytes(raw[offset : offset + size], "little")

    assert raw[:8] == b"VKVCHUNK" and number(8, 4) == 1
    header_bytes, payload_bytes = number(12, 4), number(16, 8)
    assert len(raw) == header_bytes + -(-payload_bytes // 4096) * 4096
    assert not any(raw[header_bytes + payload_bytes :])
    assert raw[24:56] == identity(adapter="lora", salt="tenant").digest
    assert number(56, 4) == 0 and raw[64 : 64 + number(60, 2)] == bytes(range(32))
    assert number(62, 2) == 1
    layers, pages, witnesses = number(128, 4), number(132, 4), number(136, 4)
    assert (layers, pages, witnesses) == (2, 2, 1)
    blanked = raw[:144] + bytes(16) + raw[160:header_bytes]
    assert raw[144:160] == xxhash.xxh3_128(blanked).digest()
    cursor = 0
    for layer, size in enumerate((32 * 2 * 16 * 2, 32 * (16 * 2 + 8))):
        at = 160 + 24 * layer
        assert (number(at, 8), number(at + 8, 8), number(at + 16, 4)) == (cursor, size, 1)
        page = raw[header_bytes + cursor : header_bytes + cursor + size]
        at = 160 + 24 * layers + 16 * layer
        assert raw[at : at + 16] == xxhash.xxh3_128(page).digest()
        cursor += size
    assert cursor == payload_bytes
    at = 160 + 24 * layers + 16 * pages
    assert (number(at, 4), number(at + 4, 4), raw[at + 8 : at + 24]) == (1, 0, bytes(range(16)))
    assert not any(raw[at + 24 : header_bytes])


def test_what_was_written_is_read():
    for group in ("full", "latent", "state"):
        chunk = ChunkFormat(identity(), group)
        payload = payload_of(chunk)
        header = chunk.read_header(chunk.header(b"key", payload), b"key")
        chunk.verify(header, payload)


def test_layers_lie_in_model_order_without_gaps():
    chunk = ChunkFormat(identity(), "full")
    cursor = 0
    for page in chunk.pages:
        assert page.offset == cursor
        cursor += page.nbytes
    assert cursor == chunk.payload_bytes and [page.layer for page in chunk.pages] == ["a", "b"]


def test_native_chunks_have_a_digest_per_span_and_state_has_one():
    native = identity(family="native", layouts="packed_nhd", spans={"full": 8, "latent": 16})
    assert len(ChunkFormat(native, "full").pages) == 2 * 4
    assert len(ChunkFormat(native, "state").pages) == 1


def test_a_stage_may_verify_its_own_layers_only():
    chunk = ChunkFormat(identity(), "full")
    payload = payload_of(chunk)
    header = chunk.read_header(chunk.header(b"key", payload), b"key")
    payload[chunk.pages[0].nbytes - 1] ^= 1
    chunk.verify(header, payload, frozenset(["b"]))
    with pytest.raises(DamagedError, match="layer 'a': page 0"):
        chunk.verify(header, payload)


@given(bit=st.integers(0, 8 * 4096 - 1))
def test_every_flipped_header_bit_is_noticed(bit):
    raw = bytearray((GOLDEN / "chunk_v1.bin").read_bytes())
    raw[bit // 8] ^= 1 << bit % 8
    chunk = ChunkFormat(identity(adapter="lora", salt="tenant"), "full")
    with pytest.raises((DamagedError, ForeignError)):
        chunk.read_header(bytes(raw), bytes(range(32)))


def test_every_flipped_payload_bit_is_noticed():
    chunk = ChunkFormat(identity(), "latent")
    payload = payload_of(chunk)
    header = chunk.read_header(chunk.header(b"key", payload), b"key")
    for bit in range(8 * chunk.payload_bytes):
        payload[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedError):
            chunk.verify(header, payload)
        payload[bit // 8] ^= 1 << bit % 8


@given(length=st.integers(0, 4095))
def test_a_truncated_header_is_damaged(length):
    chunk = ChunkFormat(identity(), "full")
    whole = chunk.header(b"key", payload_of(chunk))
    with pytest.raises(DamagedError):
        chunk.read_header(whole[:length], b"key")


@given(raw=st.binary(max_size=400))
def test_arbitrary_bytes_are_damaged_and_cost_nothing(raw):
    chunk = ChunkFormat(identity(), "full")
    for data in (raw, b"VKVCHUNK" + raw, b"VKVCHUNK\1\0\0\0" + raw):
        with pytest.raises((DamagedError, ForeignError)):
            chunk.read_header(data.ljust(4096, b"\xff"), b"key")


def reseal(raw: bytes) -> bytes:
    blanked = raw[:144] + bytes(16) + raw[160:]
    return raw[:144] + xxhash.xxh3_128(blanked).digest() + raw[160:]


@pytest.mark.parametrize(
    ("offset", "value"),
    [
        (16, b"\1"),
        (62, b"\4"),
        (62, b"\1"),
        (60, b"\0\0"),
        (140, b"\1"),
        (160, b"\1"),
        (176, b"\2"),
    ],
)
def test_a_broken_rule_under_a_good_checksum_is_damage(offset, value):
    chunk = ChunkFormat(identity(), "full")
    raw = chunk.header(b"key", payload_of(chunk))
    assert chunk.read_header(reseal(raw), b"key")
    broken = reseal(raw[:offset] + value + raw[offset + len(value) :])
    with pytest.raises((DamagedError, ForeignError)):
        chunk.read_header(broken, b"key")


def test_what_is_somebody_elses_is_foreign_and_says_why():
    chunk = ChunkFormat(identity(), "full")
    payload = payload_of(chunk)
    raw = chunk.header(b"key", payload)
    with pytest.raises(ForeignError, match="with key 6b6579, not of group 0 with key 6f74686572"):
        chunk.read_header(raw, b"other")
    with pytest.raises(ForeignError, match="identity"):
        ChunkFormat(identity(salt="x"), "full").read_header(raw, b"key")
    with pytest.raises(ForeignError, match="format version 2; this reader knows 1"):
        chunk.read_header(raw[:8] + b"\2" + raw[9:], b"key")


def test_opaque_rows_are_never_taken_for_canonical_ones():
    configured = identity().opaque({"tp": 2, "dcp": 1, "block_size": 16})
    opaque = ChunkFormat.opaque(configured, "latent", [("m", 2 * 320, 1)])
    canonical = ChunkFormat(configured, "latent")
    assert opaque.payload_bytes == canonical.payload_bytes and opaque.folder != canonical.folder
    raw = opaque.header(b"key", payload_of(opaque))
    assert opaque.read_header(raw, b"key")
    with pytest.raises(ForeignError):
        canonical.read_header(raw, b"key")
    with pytest.raises(FormatError, match="configuration that wrote"):
        ChunkFormat.opaque(identity(), "latent", [("m", 640, 1)])


def test_a_payload_of_another_length_is_refused():
    chunk = ChunkFormat(identity(), "full")
    with pytest.raises(FormatError, match="a chunk has 3328 bytes, not 3327"):
        chunk.header(b"key", payload_of(chunk)[:-1])


# ---- identity ---------------------------------------------------------------------------------


def relabelled(**changes) -> LayerTable:
    layers = list(LAYERS.values())
    layers[0] = LayerSpec.attention(
        "a", **{"num_kv_heads": 2, "head_size": 8, "group": "full", **changes}
    )
    return LayerTable(layers)


ANOTHER = {
    "another revision": {"revision": "abd"},
    "another model": {"model": "org/model2"},
    "an adapter": {"adapter": "X"},
    "a salt": {"salt": "X"},
    "another quantisation": {"quantisation": "fp8 per token and head"},
    "another chunk length": {"chunk_tokens": 64},
    "another head size": {"layers": relabelled(head_size=16)},
    "another head count": {"layers": relabelled(num_kv_heads=4)},
    "another dtype of one size": {"layers": relabelled(dtype="float16")},
    "fp8": {"layers": relabelled(dtype="float8_e4m3fn")},
    "the other fp8": {"layers": relabelled(dtype="float8_e4m3fnuz")},
    "inline scales": {"layers": relabelled(scale_bytes=4)},
    "other layer names": {"layers": LayerTable([LAYERS["a"].renamed("z"), *LAYERS.values()])},
    "another order of layers": {"layers": LayerTable(reversed(list(LAYERS.values())))},
    "native pages": {"family": "native", "layouts": "packed_nhd", "spans": 16},
    "native pages of another span": {"family": "native", "layouts": "packed_nhd", "spans": 32},
    "native pages of another layout": {"family": "native", "layouts": "packed_hnd", "spans": 16},
    "opaque rows": {"placement": {"tp": 2, "rank_order": "block, layer"}},
    "opaque rows of another order": {"placement": {"tp": 2, "rank_order": "layer, block"}},
}


def test_whatever_changes_the_meaning_of_bytes_changes_the_name():
    names = {what: identity(**changes).name for what, changes in ANOTHER.items()}
    names["the same"] = identity().name
    assert len(set(names.values())) == len(names)


def test_a_mismatch_has_a_reason():
    for what, changes in ANOTHER.items():
        reason = identity().difference(identity(**changes).json)
        assert reason and ("is" in reason), what
    assert identity().difference(identity(revision="old").json) == (
        'revision is "old" there and "abc" here'
    )
    assert identity().difference(identity().json) is None
    assert identity().difference("{") == "its description is not JSON"
    assert "canonical" in str(identity().difference(" " + identity().json))


def test_how_layers_are_dealt_over_ranks_does_not_change_the_name():
    assert identity(layers=relabelled(dcp_sharded=False)).name == identity().name
    uneven = [
        LayerSpec.mamba1(
            "s", intermediate_size=8, state_size=4, conv_kernel=4, units=units, group="state"
        )
        for units in (2, 8)
    ]
    one, two = (identity(layers=LayerTable([spec])) for spec in uneven)
    assert one.name == two.name


def test_native_spans_are_compared_over_all_context_shards():
    def native(block_size: int, shards: int) -> str:
        span = span_tokens(block_size, shards)
        settings = {"family": "native", "layouts": "packed_nhd", "chunk_tokens": 64}
        return identity(**settings, spans=span).name

    assert native(8, 2) != native(16, 4)
    assert native(16, 2) == native(16, 2) == native(32, 1)


def test_a_chunk_is_a_whole_number_of_spans():
    with pytest.raises(FormatError, match="32 tokens are not whole spans of 24"):
        identity(family="native", layouts="packed_nhd", spans=24)


def test_family_layout_and_span_go_together():
    with pytest.raises(FormatError, match="native page means nothing without its layout"):
        identity(family="native", spans=16)
    with pytest.raises(FormatError, match="a universal one has none"):
        identity(spans=16)
    with pytest.raises(FormatError, match="layer 'm' has no layout"):
        identity(family="native", spans=16, layouts={"a": "packed_nhd"})


def test_a_model_without_a_revision_is_refused():
    with pytest.raises(FormatError, match="name both"):
        identity(revision="")


def test_canonical_json_has_one_spelling():
    assert canonical_json({"b": 1, "a": ["é", None, True]}) == '{"a":["é",null,true],"b":1}'
    for value in ({"x": 1.5}, {"é": 1}, [b"x"], {1: 2}):
        with pytest.raises(FormatError):
            canonical_json(value)
    assert canonical_json(json.loads(identity().json)) == identity().json


# ---- keys -------------------------------------------------------------------------------------


def test_keys_count_whole_chunks_of_all_context_shards():
    assert whole_chunks(601, span_tokens(16, 2)) == 18
    assert len(chunk_keys(range(601), span_tokens(16, 2))) == 18
    assert len(chunk_keys(range(32), span_tokens(16, 2))) == 1
    assert span_tokens(16, 2) == 32


def test_a_key_depends_on_every_token_up_to_its_end_and_on_none_after():
    tokens = list(range(100, 164))
    keys = chunk_keys(tokens, 16)
    assert len(set(keys)) == 4
    for changed in range(64):
        other = chunk_keys([*tokens[:changed], 7, *tokens[changed + 1 :]], 16)
        first = changed // 16
        assert other[:first] == keys[:first]
        assert not set(other[first:]) & set(keys)


def test_keys_continue_from_a_parent():
    tokens = np.arange(64)
    keys = chunk_keys(tokens, 16)
    assert chunk_keys(tokens[32:], 16, parent=keys[1]) == keys[2:]


def test_the_same_tokens_in_other_chunks_have_other_keys():
    assert not set(chunk_keys(range(64), 16)) & set(chunk_keys(range(64), 32))


def test_keys_that_cannot_be_names_are_refused():
    assert check_key(b"k" * 64)
    for key in (b"", b"k" * 65):
        with pytest.raises(FormatError, match="hash it"):
            check_key(key)


@pytest.mark.parametrize("at", [64 + 32, 127, 160 + 24 * 2 + 16 * 2, 4095])
def test_what_the_format_leaves_empty_is_empty(at):
    """A later version could mean something by it."""
    chunk = ChunkFormat(identity(), "full")
    raw = bytearray(chunk.header(bytes(range(32)), payload_of(chunk)))
    chunk.read_header(bytes(raw), bytes(range(32)))
    raw[at] = 1
    raw[144:160] = bytes(16)
    raw[144:160] = xxhash.xxh3_128(bytes(raw)).digest()
    with pytest.raises(DamagedError, match="under a good checksum"):
        chunk.read_header(bytes(raw), bytes(range(32)))
