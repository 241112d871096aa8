"""Handing a region's file descriptor to the other ranks of the node over a local socket.

The socket has an abstract name: it is no file, so nothing is left behind however the processes die.
An abstract name has no permissions either, so both ends check who is on the other side: only
processes of the same user get, or accept, a descriptor.
"""

from __future__ import annotations

import array
import os
import secrets
import socket
import struct
import threading
import time
from contextlib import ExitStack, suppress

from vkvmap.errors import RegionError

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_GREETING = b"vkvmap region 1\n"


class DescriptorServer:
    """Serves one descriptor to every process of this user that asks, on a thread of its own."""

    def __init__(self, fd: int, name: str | None = None) -> None:
        """Duplicate `fd` and listen at `name` (a random one by default).

        Raises `RegionError` if the name is taken, or cannot be one.
        """
        self.address = "@" + (name or f"vkvmap-{os.getpid()}-{secrets.token_hex(8)}")
        self._pid = os.getpid()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="vkvmap-region", daemon=True)
        with ExitStack() as undo:
            try:
                self._fd = os.dup(fd)
                undo.callback(os.close, self._fd)
                kind = socket.SOCK_STREAM | socket.SOCK_CLOEXEC
                self._socket = undo.enter_context(socket.socket(socket.AF_UNIX, kind))
                self._socket.bind("\0" + self.address[1:])
                self._socket.listen(64)
                self._thread.start()
            # RuntimeError: no more threads; ValueError: text that no name can be.
            except (OSError, RuntimeError, ValueError) as error:
                why = error.strerror if isinstance(error, OSError) and error.strerror else error
                raise RegionError(f"cannot listen at {self.address!a}: {why}") from error
            undo.pop_all()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                if self._closing.wait(0.05):
                    return
                continue  # out of descriptors for a moment, or the peer has gone
            # A peer that leaves early or never reads is its own loss, not the server's.
            with peer, suppress(OSError):
                peer.settimeout(5.0)
                if _peer_uid(peer) == os.geteuid():
                    descriptors = array.array("i", [self._fd])
                    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)]
                    peer.sendmsg([_GREETING], ancillary)

    def close(self) -> None:
        """Stop serving; those who have joined keep what they have.

        A fork of the server has only its copies of the descriptors to close: shutting the socket
        down would stop its parent's server.
        """
        self._closing.set()
        if os.getpid() == self._pid:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._thread.join(timeout=10.0)
        self._socket.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def receive_descriptor(address: str, timeout: float) -> int:
    """Ask the server at `address` for its descriptor, waiting up to `timeout` seconds for it."""
    deadline = time.monotonic() + timeout
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as client:
            client.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                client.connect("\0" + address[1:])
                return _take(client, address)
            except (ConnectionRefusedError, FileNotFoundError) as error:
                if time.monotonic() >= deadline:
                    raise RegionError(
                        f"nobody serves a region at {address} after {timeout:g} s; start the "
                        "process that creates it first, or wait longer"
                    ) from error
            except RegionError:
                raise
            except (OSError, ValueError) as error:  # ValueError: text that no name can be
                raise RegionError(f"cannot join the region at {address!a}: {error}") from error
        time.sleep(0.02)


def _take(client: socket.socket, address: str) -> int:
    server = _peer_uid(client)
    if server != os.geteuid():
        raise RegionError(
            f"{address} is served by uid {server}, not by uid {os.geteuid()}; another user has "
            "taken that name"
        )
    size = array.array("i").itemsize
    greeting, ancillary, _, _ = client.recvmsg(len(_GREETING), socket.CMSG_SPACE(size))
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS and len(data) >= size:
            fds = array.array("i", data[: len(data) // size * size])
            # The kernel rounds the room for one up to room for two.
            wanted = 1 if greeting == _GREETING else 0
            for fd in fds[wanted:]:
                os.close(fd)
            if wanted:
                os.set_inheritable(fds[0], False)
                return fds[0]
    raise RegionError(f"{address} did not hand over a region; is it a vkvmap process?")


def _peer_uid(connection: socket.socket) -> int:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])
