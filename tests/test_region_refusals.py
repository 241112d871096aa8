"""What the system refuses while a region is made or joined is a RegionError and leaks nothing."""

from __future__ import annotations

import errno
import os
import socket
import threading
from array import array

import pytest

from tests.refusing import open_files, refuse_everything_once, refusing
from vkvmap.errors import RegionError
from vkvmap.region import Region, Section
from vkvmap.region_socket import receive_descriptor

SECTIONS = [Section("rows", 3, 5000)]


def test_a_refused_call_while_a_region_is_made_leaks_nothing():
    def make() -> None:
        Region.create(SECTIONS, populate_threads=0).close()

    assert refuse_everything_once(make, RegionError) >= 5


def test_a_refused_call_while_a_named_region_is_made_leaks_nothing(tmp_path):
    path = str(tmp_path / "region")

    def make() -> None:
        try:
            Region.create(SECTIONS, backing="file", path=path, populate_threads=0).close()
        finally:
            if os.path.lexists(path):  # close() was refused the lock under which names go
                os.unlink(path)

    assert refuse_everything_once(make, RegionError) >= 10


def test_a_refused_call_while_a_region_is_joined_leaks_nothing(tmp_path):
    path = str(tmp_path / "region")
    with (
        Region.create(SECTIONS, populate_threads=0) as region,
        Region.create(SECTIONS, backing="file", path=path, populate_threads=0),
    ):
        address = region.serve()
        for source in (region.handle(), region._fd, path, address):
            calls = refuse_everything_once(lambda s=source: Region.attach(s).close(), RegionError)
            assert calls >= 3


def test_a_refused_call_while_a_region_is_served_leaks_nothing():
    def make() -> None:
        region = Region.create(SECTIONS, populate_threads=0)
        try:
            region.serve()
        finally:
            region.close()

    assert refuse_everything_once(make, RegionError) >= 8


def test_without_another_thread_a_region_is_not_served_and_stays_usable(monkeypatch):
    def refuse(self) -> None:
        raise RuntimeError("can't start new thread")

    with Region.create(SECTIONS, populate_threads=0) as region:
        before = open_files()
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RegionError, match="can't start new thread"):
                region.serve()
        assert open_files() == before
        Region.attach(region.serve()).close()


def test_a_region_that_cannot_take_its_name_away_still_lets_go_of_everything(tmp_path):
    path = str(tmp_path / "region")
    before = open_files()
    region = Region.create(SECTIONS, backing="file", path=path, populate_threads=0)
    with refusing(0, errno.ENOLCK), pytest.raises(RegionError, match="No locks"):
        region.close()
    assert not region.alive and open_files() == before
    region.close()
    assert Region.sweep(path)


@pytest.mark.parametrize("path", ["/dev/shm/a\0b", "/dev/shm/\ud800", "\0"])
def test_a_path_that_cannot_be_is_a_region_error(path):
    before = open_files()
    with pytest.raises(RegionError, match="cannot make a region: "):
        Region.create(SECTIONS, backing="file", path=path, populate_threads=0)
    with pytest.raises(RegionError, match="cannot join a region: "):
        Region.attach(path, timeout=0.0)
    assert not Region.sweep(path) and open_files() == before


def test_an_address_that_cannot_be_is_a_region_error():
    with Region.create(SECTIONS, populate_threads=0) as region:
        before = open_files()
        for name in ("\ud800", "x" * 300):
            with pytest.raises(RegionError, match=r"cannot listen at '@"):
                region.serve(name)
            with pytest.raises(RegionError, match=r"cannot join the region at '@"):
                Region.attach(f"@{name}", timeout=0.0)
        assert open_files() == before


def test_of_two_descriptors_that_a_server_sends_none_stays_open():
    server = socket.socket(socket.AF_UNIX)
    server.bind("\0vkvmap-two")
    server.listen(1)
    before = open_files()

    def answer() -> None:
        peer, _ = server.accept()
        fds = array("i", [0, 0])
        peer.sendmsg([b"vkvmap region 1\n"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        peer.close()

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    os.close(receive_descriptor("@vkvmap-two", 5.0))
    thread.join()
    assert open_files() == before
    server.close()
