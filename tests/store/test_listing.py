"""What cannot be listed is said as an error of the store; names are keys in one spelling only."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.store.small import content_of, key_of, payload_bytes, small_identity
from vkvmap.errors import StoreError
from vkvmap.keys import key_named, keys_named
from vkvmap.store import CanonicalStore
from vkvmap.store_listing import Entry
from vkvmap.store_upkeep import ls, stats

IDENTITY = small_identity()
NBYTES = payload_bytes(IDENTITY, "full")
KEYS = [key_of(number) for number in range(5)]


def filled(path: Path) -> CanonicalStore:
    store = CanonicalStore(path, IDENTITY, sync="none")
    rows: list[np.ndarray] = [content_of(key, NBYTES) for key in KEYS]
    assert store.put(KEYS, "full", rows).wait(30)
    return store


@pytest.mark.parametrize(
    "ask",
    [
        lambda store: store.keys("full"),
        lambda store: list(ls(store.path)),
        lambda store: stats(store.path),
    ],
    ids=["keys", "ls", "stats"],
)
@pytest.mark.parametrize("depth", [1, 2])
def test_a_folder_that_cannot_be_read_is_a_store_error(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ask: Callable[[CanonicalStore], Any],
    depth: int,
) -> None:
    """The superuser may read every folder, so it is the call that refuses."""
    with filled(tmp_path) as store:
        closed = Path(store._shelves["full"].path(KEYS[0])).parents[2 - depth]
        real = os.scandir

        def scandir(path: str) -> Any:
            if Path(path) == closed:
                raise PermissionError(13, "Permission denied", path)
            return real(path)

        assert ask(store)
        monkeypatch.setattr(os, "scandir", scandir)
        with pytest.raises(StoreError, match="Permission denied"):
            ask(store)


@pytest.mark.parametrize("removes", [0, 1])
def test_a_policy_that_raises_is_named_in_the_reason_and_looks_are_taken_anew(
    tmp_path: Path, removes: int
) -> None:
    def gives_up(entries: Sequence[Entry]) -> Iterator[Entry]:
        yield from sorted(entries, key=lambda entry: entry.key)[:removes]
        raise KeyError("no order")

    with filled(tmp_path) as store:
        size = store.snapshot()["used_bytes"] // len(KEYS)
    with CanonicalStore(tmp_path, IDENTITY, capacity=5 * size, policy=gives_up) as store:
        before = store._space.epoch
        job = store.put([key_of(9)], "full", [content_of(key_of(9), NBYTES)])
        assert job.wait(30) and job.outcomes == ["failed"]
        assert "the eviction policy raised KeyError('no order')" in job.reasons[0]
        assert store._space.epoch == before + 2  # one before any file goes, one after
        assert store.lookup(sorted(KEYS), "full").tolist() == [n >= removes for n in range(5)]


@pytest.mark.parametrize("path", ["a\0b", "a/\0", "\0"])
def test_a_path_that_cannot_be_is_a_store_error(tmp_path: Path, path: str) -> None:
    with pytest.raises(StoreError, match="null"):
        CanonicalStore(f"{tmp_path}/{path}", IDENTITY)
    assert list(tmp_path.rglob("*.chunk")) == []


@pytest.mark.parametrize(
    "name", ["", "a", "AB", "aB", "ab cd", " ab", "notes", "ab" * 65, "\u0661\u0661", "0x11"]
)
def test_a_name_in_another_spelling_is_no_key(name: str) -> None:
    assert key_named(name) is None


def test_keys_are_named_in_lower_case_hex_and_come_in_order() -> None:
    assert keys_named(["ff", "AB", "notes", "00" * 64, "ab"]) == [bytes(64), b"\xab", b"\xff"]


def test_a_strangers_file_in_a_bucket_is_nobodys_key(tmp_path: Path) -> None:
    """Another spelling of a key is another name: nothing that a load would open."""
    with filled(tmp_path) as store:
        there = Path(store._shelves["full"].path(KEYS[0]))
        buckets = there.parents[1]
        for place in (
            there.with_name(f"{there.stem.upper()}.chunk"),
            there.with_name("notes.chunk"),
            buckets / "zz" / f"{key_of(9).hex()}.chunk",
            buckets / key_of(8).hex()[:1] / f"{key_of(8).hex()}.chunk",
            buckets / KEYS[1].hex()[2:4] / there.name,
        ):
            place.parent.mkdir(exist_ok=True)
            place.write_bytes(b"")
        assert store.keys("full") == sorted(KEYS)
