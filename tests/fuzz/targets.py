"""What the Python fuzzers throw bytes at.

Each target takes any bytes and returns whether they meant something; an exception of no class of
ours, a hang, memory that the input merely asks for, or a wrong answer is a finding. guided.py looks
for them by coverage; the corpus in corpus/TARGET is played in every test run; hypothesis mutates
the same originals in test_hostile_text.py and test_fuzz_ids.py.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.fuzz import test_fuzz_ids as ids_test
from tests.fuzz import test_hostile_text as text_test
from vkvmap.cli import main as command_line
from vkvmap.errors import FormatError, PlanError, RegionError, SpecError
from vkvmap.models import from_hf_config
from vkvmap.region import Region

CORPUS = Path(__file__).parent / "corpus"


def header(raw: bytes) -> bool:
    """The head of a stored chunk, as found and with a checksum that fits it."""
    meant = False
    for candidate in (raw, text_test.sealed(raw)):
        try:
            found = text_test.FORMAT.read_header(candidate, text_test.KEY)
        except FormatError:
            continue
        meant = True
        with contextlib.suppress(FormatError):
            text_test.FORMAT.verify(found, text_test.PAYLOAD)
            assert found.digests == text_test.FORMAT.digests(text_test.PAYLOAD)
    return meant


def identity(raw: bytes) -> bool:
    """The description that lies beside stored chunks."""
    text = raw.decode("utf-8", "surrogateescape")
    same = text_test.IDENTITY.difference(text) is None
    assert same == (text == text_test.IDENTITY.json)
    return same


def config(raw: bytes) -> bool:
    """A model's config.json."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        file.write(raw)
        file.flush()
        try:
            table = from_hf_config(Path(file.name))
        except SpecError as error:
            assert str(error)
            return False
    assert all(spec.canonical_bytes(1) > 0 for spec in table.values())
    return True


def command(raw: bytes) -> bool:
    """Command-line words, a zero byte between them; only commands that start nothing."""
    words = [word.decode("utf-8", "surrogateescape") for word in raw.split(b"\0")][:12]
    if words[:1] in (["bench"], ["roundtrip"], ["verify"], ["convert"], ["store"]):
        return False
    nowhere = io.StringIO()
    with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        status = command_line(words)
    assert status in (0, 1, 2), (status, words)
    return status == 0


_moved: list[ids_test.Moved] = []


def ids(raw: bytes) -> bool:
    """Load or store, then block ids and page ids: a byte each, or eight where it is 255."""
    if not _moved:
        _moved.append(ids_test.Moved())
    moved, numbers, at = _moved[0], [], 2
    while at < len(raw) and len(numbers) < 64:
        wide = raw[at] == 255
        part = raw[at + 1 : at + 9] if wide else raw[at : at + 1]
        numbers.append(int.from_bytes(part, "little", signed=wide))
        at += 9 if wide else 1
    load, count = (raw[0] % 2 == 1, raw[1]) if len(raw) > 1 else (False, 0)
    blocks, pages = numbers[:count], numbers[count:]
    moved.scramble()
    expected = [moved.blocks.copy(), moved.pages.copy()]
    right = ids_test.is_right(load, blocks, pages)
    if right:
        for block, page in zip(blocks, pages, strict=True):
            if load:
                expected[0][block] = moved.pages[page]
            else:
                expected[1][page] = moved.blocks[block]
    pair = (np.array(blocks, dtype=np.int64), np.array(pages, dtype=np.int64))
    try:
        (moved.plan.load if load else moved.plan.store)(pair).check(30)
    except PlanError:
        assert not right
    else:
        assert right
    assert np.array_equal(moved.blocks, expected[0])
    assert np.array_equal(moved.pages, expected[1])
    return right


def region(raw: bytes) -> bool:
    """Shared memory that somebody else made."""
    try:
        text_test.attach(raw)
        with contextlib.closing(_memory(raw)) as joined:
            return bool(joined.sections)
    except RegionError:
        return False


def _memory(raw: bytes) -> Region:
    fd = os.memfd_create("hostile")
    try:
        os.ftruncate(fd, text_test.REGION_BYTES)
        os.pwrite(fd, raw[: text_test.REGION_BYTES], 0)
        return Region.attach(fd)
    finally:
        os.close(fd)


TARGETS: dict[str, Callable[[bytes], bool]] = {
    "command": command,
    "config": config,
    "header": header,
    "identity": identity,
    "ids": ids,
    "region": region,
}


def originals() -> dict[str, list[bytes]]:
    """What is right, to start from: `python -m tests.fuzz.targets` writes it."""
    lines = [line.replace("CASES", "tests/cases").split() for line in text_test.LINES]
    lines = [words for words in lines if words[0] not in ("store", "conformance")]
    wide = (1 << 40).to_bytes(8, "little", signed=True)
    return {
        "command": ["\0".join(words).encode() for words in lines],
        "config": [json.dumps(config).encode() for _, config in sorted(text_test.CONFIGS.items())],
        "header": [text_test.HEADER],
        "identity": [text_test.IDENTITY.json.encode()],
        "ids": [b"\0\2\0\1\3\4", b"\1\3\0\1\2\5\4\3", b"\0\1\xff" + wide + b"\0", b"\1\2\3\3\0\1"],
        "region": [text_test.CONTROL],
    }


def write_corpus() -> None:
    for name, files in originals().items():
        (CORPUS / name).mkdir(parents=True, exist_ok=True)
        for number, raw in enumerate(files):
            (CORPUS / name / f"right-{number}").write_bytes(raw)


if __name__ == "__main__":
    write_corpus()
