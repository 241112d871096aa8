"""What the system refuses is an outcome with a reason or a StoreError, and leaks nothing."""

from __future__ import annotations

import errno
import logging
import os
import threading

import numpy as np
import pytest

from tests.refusing import open_files, refuse_everything_once
from tests.store.small import aligned, content_of, key_of, payload_bytes, small_identity
from vkvmap.errors import StoreError
from vkvmap.store import CanonicalStore
from vkvmap.store_files import FileSystem
from vkvmap.store_space import Space
from vkvmap.store_upkeep import fsck, gc, ls, stats

IDENTITY = small_identity()
FULL = payload_bytes(IDENTITY, "full")
FILE = 4096 + -(-FULL // 4096) * 4096
KEYS = [key_of(number) for number in range(4)]


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "store")


@pytest.fixture(autouse=True)
def no_exception_leaves_a_worker(caplog):
    """The store's threads log what escapes their own error handling."""
    yield
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


class Refusing(FileSystem):
    """Answers the named calls with an error, once `armed`."""

    def __init__(self, **errors: int) -> None:
        self.errors, self.armed = errors, False

    def ask(self, call: str) -> None:
        if self.armed and call in self.errors:
            raise OSError(self.errors[call], os.strerror(self.errors[call]))

    def rename(self, source, target):
        self.ask("rename")
        super().rename(source, target)

    def unlink(self, path):
        self.ask("unlink")
        super().unlink(path)

    def writev(self, fd, buffers, offset):
        self.ask("writev")
        return super().writev(fd, buffers, offset)


def put_all(store: CanonicalStore) -> list[str]:
    job = store.put(KEYS, "full", [content_of(key, FULL) for key in KEYS])
    assert job.wait(30)
    return job.outcomes


def spoil(path: str, number: int) -> str:
    place = next(entry.path for entry in ls(path) if entry.key == KEYS[number].hex())
    os.truncate(place, 5000)
    return place


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC, errno.EIO])
def test_a_damaged_file_that_cannot_be_moved_away_is_a_miss_that_says_so(path, code):
    files = Refusing(rename=code, unlink=code)
    with CanonicalStore(path, IDENTITY, files=files) as store:
        put_all(store)
        place = spoil(path, 1)
        files.armed = True
        row = aligned(FULL, 0x5A)
        job = store.get(KEYS[:2], "full", [aligned(FULL), row])
        assert job.wait(30) and job.outcomes == ["hit", "damaged"]
        assert f"its file stays in place: {os.strerror(code)}" in job.reasons[1]
        assert not row.any() and os.path.exists(place)
        assert store.snapshot()["damaged"] == 1 and store.snapshot()["failed"] == 0
        # Nobody is promised it again, nor told that it is stored.
        assert store.lookup(KEYS, "full").tolist() == [True, False, True, True]
        assert store.prefix(KEYS, "full") == 1
        job = store.put(KEYS[1:2], "full", [content_of(KEYS[1], FULL)])
        assert job.wait(30) and job.outcomes == ["failed"] and "damaged file" in job.reasons[0]
        files.armed = False
        job = store.get(KEYS[1:2], "full", [row])
        assert job.wait(30) and job.outcomes == ["damaged"] and not os.path.exists(place)
        assert put_all(store) == ["present", "stored", "present", "present"]
        assert store.lookup(KEYS, "full").all()


def test_a_damaged_file_that_cannot_be_kept_is_removed(path):
    """As where the disk is full, or where somebody's file is called "quarantine"."""
    with CanonicalStore(path, IDENTITY) as store:
        put_all(store)
        place = spoil(path, 0)
        open(f"{path}/quarantine", "w").close()
        job = store.get(KEYS[:1], "full", [aligned(FULL)])
        assert job.wait(30) and job.outcomes == ["damaged"] and not os.path.exists(place)
        assert put_all(store) == ["stored", "present", "present", "present"]


@pytest.mark.parametrize("write", [errno.EIO, errno.ENOSPC])
def test_a_temporary_that_cannot_be_removed_goes_with_the_next_count(path, write):
    files = Refusing(writev=write, unlink=errno.EROFS)
    with CanonicalStore(path, IDENTITY, files=files) as store:
        files.armed = True
        outcome = "full" if write == errno.ENOSPC else "failed"
        assert put_all(store) == [outcome] * 4
        assert stats(path).temporaries == 4
        files.armed = False
        assert put_all(store) == ["stored"] * 4
    with CanonicalStore(path, IDENTITY) as store:
        assert stats(path).temporaries == 0 and store.snapshot()["used_bytes"] == 4 * FILE


def test_what_cannot_be_evicted_makes_the_store_full(path):
    files = Refusing(unlink=errno.EPERM)
    with CanonicalStore(path, IDENTITY, files=files, capacity=4 * FILE) as store:
        put_all(store)
        files.armed = True
        job = store.put([key_of(9)], "full", [content_of(key_of(9), FULL)])
        assert job.wait(30) and job.outcomes == ["full"]
        with pytest.raises(StoreError, match="cannot remove chunks"):
            store.delete(KEYS, "full")


def test_an_error_of_another_kind_while_writing_leaves_no_temporary(path, caplog):
    class Breaking(FileSystem):
        def sync(self, fd: int) -> None:
            raise MemoryError

    with CanonicalStore(path, IDENTITY, files=Breaking()) as store:
        assert put_all(store) == ["failed"] * 4
        assert stats(path).temporaries == 0 and store.snapshot()["used_bytes"] == 0
    assert len(caplog.records) == 4  # that one is worth a trace
    caplog.clear()


def test_a_refused_call_while_a_store_is_opened_leaks_nothing(path):
    calls = refuse_everything_once(lambda: CanonicalStore(path, IDENTITY).close(), StoreError)
    assert calls >= 10
    with CanonicalStore(path, IDENTITY) as store:
        assert put_all(store) == ["stored"] * 4
    # And of one that is there, with things to sweep.
    space = Space(path, FileSystem())
    made = space.reserve(5000, lambda name: os.open(name, os.O_CREAT | os.O_WRONLY))
    assert made is not None
    os.close(made[0])
    space.close()
    assert refuse_everything_once(lambda: CanonicalStore(path, IDENTITY).close(), StoreError) >= 5
    with CanonicalStore(path, IDENTITY) as store:
        assert store.lookup(KEYS, "full").all()


def test_a_store_that_is_asked_for_nonsense_closes_what_it_had_opened(path):
    before = open_files()
    for nonsense in ({"threads": 0}, {"parts": [["a"]]}, {"parts": [["a", "x"], ["b", "m"]]}):
        with pytest.raises(StoreError):
            CanonicalStore(path, IDENTITY, **nonsense)
        assert open_files() == before


def test_a_description_that_cannot_be_written_leaves_nothing(path, monkeypatch):
    class Full(FileSystem):
        def rename(self, source: str, target: str) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = open_files()
    with pytest.raises(StoreError, match=r"cannot write to the store .*No space left"):
        CanonicalStore(path, IDENTITY, files=Full())
    assert os.listdir(f"{path}/tmp") == [] and open_files() == before


def test_fewer_threads_than_asked_for_will_do(path, monkeypatch):
    real, started = threading.Thread.start, []

    def start(self) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(self)
        real(self)

    store = CanonicalStore(path, IDENTITY, threads=4)
    monkeypatch.setattr(threading.Thread, "start", start)
    assert put_all(store) == ["stored"] * 4 and len(started) == 2
    store.close()


def test_without_any_thread_a_store_says_so(path, monkeypatch):
    def refuse(self) -> None:
        raise RuntimeError("can't start new thread")

    with CanonicalStore(path, IDENTITY) as store:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            with pytest.raises(StoreError, match="can't start new thread"):
                put_all(store)
        assert put_all(store) == ["stored"] * 4


def test_fsck_goes_on_past_what_it_cannot_read(path, monkeypatch):
    with CanonicalStore(path, IDENTITY) as store:
        put_all(store)
    bad = spoil(path, 2)
    place = next(entry.path for entry in ls(path) if entry.key == KEYS[0].hex())
    before, real = open_files(), os.pread

    def pread(fd: int, *where):
        if os.readlink(f"/proc/self/fd/{fd}") == place:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, *where)

    monkeypatch.setattr(os, "pread", pread)
    found = fsck(path, repair=True)
    assert found.unreadable == {place: os.strerror(errno.EIO)} and set(found.damaged) == {bad}
    assert found.chunks == 2 and found.repaired == 1 and not found.clean
    assert os.path.exists(place) and open_files() == before


def test_fsck_that_cannot_repair_lists_and_goes_on(path, monkeypatch):
    with CanonicalStore(path, IDENTITY) as store:
        put_all(store)
    bad = {spoil(path, 0), spoil(path, 1)}

    def refuse(*arguments) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    before = open_files()
    monkeypatch.setattr(FileSystem, "rename", refuse)
    monkeypatch.setattr(FileSystem, "unlink", refuse)
    found = fsck(path, repair=True)
    assert set(found.damaged) == bad and found.repaired == 0 and found.chunks == 2
    with pytest.raises(StoreError, match=r"cannot look after the store .*Read-only"):
        gc(path, unused_days=0)
    assert open_files() == before


def test_rows_keep_what_was_in_them_when_nothing_was_read(path):
    with CanonicalStore(path, IDENTITY) as store:
        row = aligned(FULL, 0x5A)
        assert store.get(KEYS[:1], "full", [row]).wait(30)
        assert np.all(row == 0x5A)
