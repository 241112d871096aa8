"""Files, JSON and arguments of strangers: an answer, or an error of our own; never more than that.

Never another exception, a hang, or memory that the input merely asks for. Real ones are mutated,
since random text is refused by its first byte.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz.hostile import bounded, mutated_bytes, mutated_json
from vkvmap import LayerSpec, LayerTable
from vkvmap.cli import main
from vkvmap.conformance import check_case, read_cases
from vkvmap.errors import FormatError, RegionError, SpecError, VkvmapError
from vkvmap.format import ChunkFormat, DamagedError, check_header, describe_header
from vkvmap.identity import Identity, canonical_json
from vkvmap.models import PRESETS, from_hf_config
from vkvmap.region import Region, Section

pytestmark = pytest.mark.fuzz

#: Findings are not shrunk: where a hang is the finding, each try would cost its time limit.
unshrunk = settings(phases=[Phase.explicit, Phase.generate])

HERE = Path(__file__).parent
GOLDEN = HERE.parent / "store" / "golden"
CASES = [
    json.loads(line) for line in (HERE.parent / "cases" / "golden.jsonl").read_text().splitlines()
]

TABLE = LayerTable(
    [
        LayerSpec.attention("a", num_kv_heads=2, head_size=8),
        LayerSpec.mla("b", row_bytes=96, group="latent"),
    ]
)
IDENTITY = Identity("model", "revision", TABLE, 32)
KEY = bytes(range(32))
PAYLOAD = np.random.default_rng(1).integers(0, 256, 2 * 2 * 8 * 2 * 32, dtype=np.uint8)
FORMAT = ChunkFormat(IDENTITY, "0")
HEADER = FORMAT.header(KEY, PAYLOAD)


# ---- stored chunks -------------------------------------------------------------------------------


def sealed(raw: bytes) -> bytes:
    """The header with a checksum that fits it, as a careful attacker would write it."""
    whole = bytearray(raw)
    at = HEADER.index(xxhash.xxh3_128_digest(_without_checksum(HEADER)))
    length = int.from_bytes(whole[12:16], "little")
    if len(whole) >= at + 16 and length <= len(whole):
        whole[at : at + 16] = bytes(16)
        whole[at : at + 16] = xxhash.xxh3_128_digest(bytes(whole[:length]))
    return bytes(whole)


def _without_checksum(raw: bytes) -> bytes:
    for at in range(0, 256, 4):
        candidate = raw[:at] + bytes(16) + raw[at + 16 :]
        if xxhash.xxh3_128_digest(candidate) == raw[at : at + 16]:
            return candidate
    raise AssertionError("the golden header has no checksum")


@unshrunk
@given(mutated_bytes(HEADER), st.booleans())
def test_a_mutated_header_is_refused_or_says_the_same(raw: bytes, seal: bool) -> None:
    raw = sealed(raw) if seal else raw
    with bounded():
        for read in (check_header, describe_header, lambda r: FORMAT.read_header(r, KEY)):
            try:
                found = read(raw)
            except FormatError:
                continue
            if read is describe_header:
                assert sum(size for _, size, _ in found.pages) == found.payload_bytes
            elif read is not check_header:
                # Believed: then what it says about pages is checked against the bytes.
                try:
                    FORMAT.verify(found, PAYLOAD)
                except DamagedError:
                    continue
                assert found.digests == FORMAT.digests(PAYLOAD)


@unshrunk
@given(mutated_json(json.loads(IDENTITY.json)), st.booleans())
def test_a_mutated_description_differs_and_says_where(value: Any, spaced: bool) -> None:
    text = json.dumps(value) if spaced else json.dumps(value, sort_keys=True, separators=(",", ":"))
    with bounded():
        difference = IDENTITY.difference(text)
        assert (difference is None) == (text == IDENTITY.json)
        try:
            canonical_json(value)
        except FormatError:
            pass


@unshrunk
@given(mutated_bytes(IDENTITY.json.encode()))
def test_a_damaged_description_is_a_difference(raw: bytes) -> None:
    text = raw.decode("utf-8", "surrogateescape")
    with bounded():
        assert (IDENTITY.difference(text) is None) == (text == IDENTITY.json)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "9" * 100_000])
def test_a_description_that_nests_without_end_is_a_difference(text: str) -> None:
    with bounded():
        assert IDENTITY.difference(text) is not None


# ---- shared memory -------------------------------------------------------------------------------


def control_page() -> bytes:
    with Region.create([Section("0", 3, 4096), Section("1", 2, 100)]) as region:
        return bytes(region.view[:8192])


CONTROL = control_page()
REGION_BYTES = 4096 + 3 * 4096 + 4096


def attach(raw: bytes) -> None:
    """Join memory that begins with `raw`; if that works, every row must lie inside it."""
    fd = os.memfd_create("hostile")
    try:
        os.ftruncate(fd, REGION_BYTES)
        os.pwrite(fd, raw[:REGION_BYTES], 0)
        try:
            region = Region.attach(fd)
        except RegionError:
            return
        with region:
            for section in region.sections:
                assert section.offset >= 0
                assert section.offset + section.nbytes <= region.nbytes
                region.row(section.name, 0)
                region.row(section.name, section.num_rows - 1)
    finally:
        os.close(fd)


@unshrunk
@given(mutated_bytes(CONTROL))
def test_a_mutated_control_page_never_leads_outside(raw: bytes) -> None:
    with bounded():
        attach(raw)


@unshrunk
@given(mutated_json([["0", 3, 4096, 4096, False, 4096], ["1", 2, 128, 100, True, 16384]]))
def test_a_mutated_section_table_never_leads_outside(table: Any) -> None:
    text = json.dumps(table).encode()
    raw = bytearray(CONTROL)
    raw[12:16] = len(text).to_bytes(4, "little")
    raw[48 : 48 + len(text)] = text
    with bounded():
        attach(bytes(raw))


@pytest.mark.parametrize(
    "text",
    [b"[" * 4000, b'{"a":' * 800, b'[["0", 1e400, 1, 1, 0, 0]]', b'[["0", NaN, 1, 1, 0, 0]]', b"9"],
)
def test_a_section_table_that_is_no_table_is_refused(text: bytes) -> None:
    raw = bytearray(CONTROL)
    raw[12:16] = len(text).to_bytes(4, "little")
    raw[48 : 48 + len(text)] = text
    with bounded():
        attach(bytes(raw))


# ---- model configurations ------------------------------------------------------------------------

CONFIGS = {name: dict(preset.config) for name, preset in PRESETS.items()}


@unshrunk
@given(st.data())
def test_a_mutated_model_configuration_is_read_or_refused(data: st.DataObject) -> None:
    config = data.draw(mutated_json(CONFIGS[data.draw(st.sampled_from(sorted(CONFIGS)))]))
    with bounded():
        try:
            table = from_hf_config(config) if isinstance(config, dict) else None
        except SpecError as error:
            assert str(error)
        else:
            assert table is None or all(spec.canonical_bytes(1) > 0 for spec in table.values())


@unshrunk
@given(st.data())
def test_a_damaged_configuration_file_is_read_or_refused(data: st.DataObject) -> None:
    raw = json.dumps(CONFIGS[data.draw(st.sampled_from(sorted(CONFIGS)))]).encode()
    raw = data.draw(mutated_bytes(raw))
    with tempfile.TemporaryDirectory() as folder, bounded():
        path = Path(folder) / "config.json"
        path.write_bytes(raw)
        try:
            from_hf_config(path)
        except SpecError as error:
            assert str(error)


# ---- conformance cases ---------------------------------------------------------------------------


@unshrunk
@given(st.data())
def test_a_mutated_case_is_checked_or_refused(data: st.DataObject) -> None:
    case = data.draw(mutated_json(data.draw(st.sampled_from(CASES))))
    with tempfile.TemporaryDirectory() as folder, bounded(mebibytes=256):
        path = Path(folder) / "cases.jsonl"
        path.write_text(json.dumps(case) + "\n")
        try:
            verdicts = [check_case(read) for read in read_cases(path)]
        except VkvmapError:
            return
        assert len(verdicts) == 1


# ---- the command line ----------------------------------------------------------------------------

LINES = [
    "mapping --tp 4 --dcp 2 --kv-heads 2 --rank 3",
    "explain --model llama-3.1-8b --from tp=8 --to tp=2",
    "models --json",
    "conformance CASES",
    "show --model gpt-oss-120b --from tp=8 --to tp=4 --json",
    "store ls NOWHERE",
    "identity --model llama-3.1-8b --revision x",
]
WORDS = [
    "--tp", "--dcp", "--pcp", "--json", "--model", "--from", "--to", "--rank", "--help", "-x", "--",
    "0", "-1", "1", "3", "99999999999999999999", "1e9", "nan", "", " ", "tp=0", "tp=8,dcp=3",
    "tp=4,tp=5", "block=0", "layout=?", "pp=1+2+", "pp=9999", "interleave=-1", "=", ",,,", "\0",
    "\udc80", "/dev/null", "..", "llama", "x" * 3000, "pcp=2,pcp_mode=both", "[bold]x", "{}", "[/]",
]  # fmt: skip


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    words = draw(st.sampled_from(LINES)).replace("CASES", str(HERE.parent / "cases")).split()
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(words)))
        kind = draw(st.sampled_from(["insert", "replace", "remove"]))
        if kind == "insert":
            words.insert(at, draw(st.sampled_from(WORDS)))
        elif at < len(words):
            words[at : at + 1] = [] if kind == "remove" else [draw(st.sampled_from(WORDS))]
    return words


@unshrunk
@given(command_lines())
def test_any_command_line_gets_an_answer(words: list[str]) -> None:
    """0 yes, 1 no, 2 wrong use: 3 would be an internal error, an exception a traceback."""
    with bounded(seconds=20, mebibytes=512):
        assert main(words) in (0, 1, 2)
