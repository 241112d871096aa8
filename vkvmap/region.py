"""The host memory that holds canonical chunks, shared by the ranks of a node.

One region is one mapping: a page of control data that makes it self-describing, then sections. A
section is a table of equal rows; a row holds one chunk. What must stay true:

 1. nothing about parallelism decides a row's payload length: it is what the section was declared
    with, and padding up to the row stride lies outside it;
 2. opaque layers live in private sections, never in a row that another configuration may read;
 3. anonymous regions leave nothing behind however their processes die; named ones lose their name
    as soon as everyone has joined;
 4. memory is never unmapped or unregistered under a view, a plan or a transfer: a region with live
    holders refuses to close, and views keep the mapping itself alive.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import secrets
import struct
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from vkvmap.errors import RegionError, VkvmapError
from vkvmap.region_backing import (
    MAGIC,
    check_capacity,
    member_count_lock,
    open_named,
    publish_named,
    sweep,
    unlink_if_same,
)
from vkvmap.region_memory import (
    HUGE_PAGE,
    Backing,
    HugePages,
    map_memory,
    open_backing,
    populate,
)
from vkvmap.region_sections import (
    CONTROL,
    JOINED_AT,
    MOST_CONTROL,
    VERSION,
    Section,
    SectionView,
    check_names,
    lay_out,
    located,
    read_table,
    round_up,
    view_at,
)
from vkvmap.region_socket import DescriptorServer, receive_descriptor

__all__ = ["Region", "RegionHandle", "Section", "SectionView", "node_slot"]

Bytes = npt.NDArray[np.uint8]


@contextlib.contextmanager
def _saying(what: str) -> Iterator[None]:
    """Say as a RegionError what the system refuses."""
    try:
        yield
    except VkvmapError:
        raise
    except OSError as error:
        raise RegionError(f"cannot {what}: {error.strerror or error}") from error
    except ValueError as error:  # a path with a NUL, or of half characters
        raise RegionError(f"cannot {what}: {error}") from error


@dataclass(frozen=True)
class RegionHandle:
    """How a process of this node and user finds a region; small and picklable.

    Good for as long as the process `pid` keeps the region open.
    """

    pid: int
    fd: int
    token: bytes


class Region:
    """Host memory in sections of rows. Make one with `create`, `attach` or `from_buffer`.

    Attributes:
        address: address of the first byte, the same for this object's life.
        nbytes: bytes of the whole mapping, which is what was allocated.
        sections: the sections in order.
        backing: ``"memfd"``, ``"private"``, ``"file"`` or ``"buffer"``.
        registration: the memory's registration with a device, kept by whoever made it
            (`vkvmap.cuda.pin`); it ends with the region at the latest, or with the last transfer
            over it where the region is dropped or closed by force.
    """

    def __init__(
        self, memory: Any, sections: Sequence[SectionView], *, backing: str, fd: int = -1
    ) -> None:
        self._bytes: Bytes | None = np.frombuffer(memory, np.uint8)
        self._fd = -1
        self._server: DescriptorServer | None = None
        self._holders: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._token = b""
        self._path: str | None = None  # the name to take away at close; its creator's only
        self._pid = os.getpid()
        self.address = int(self._bytes.ctypes.data)
        self.nbytes = int(self._bytes.nbytes)
        self._sections = {view.name: view for view in located(sections, self.address)}
        self.backing = backing
        self.registration: Any = None
        self._fd = fd  # last: until here it is the caller's to close

    # ---- making one ---------------------------------------------------------------------------

    @classmethod
    @_saying("make a region")
    def create(
        cls,
        sections: Iterable[Section],
        *,
        backing: Backing = "memfd",
        path: str | None = None,
        joiners: int = 0,
        populate_threads: int | None = None,
        huge_pages: HugePages | None = "transparent",
        copies: int = 1,
    ) -> Region:
        """Allocate a region.

        Args:
            sections: what it holds, in this order.
            backing: ``"memfd"`` (anonymous, shareable, the default), ``"private"`` (anonymous, this
                process only) or ``"file"`` (a name at `path`, for engines that insist on one).
            path: name of the file, for ``"file"``; give it on tmpfs.
            joiners: processes that will attach by `path`; the name goes when all have. 0: the name
                stays until this object is closed.
            populate_threads: threads that fault the pages in, so that first use is quick and a lack
                of memory shows here; 0 leaves pages to first use, None means one per core up to 8.
                On a machine of several memory nodes the pages are striped over them.
            huge_pages: ``"transparent"`` populates with as many as the system has, whatever its
                settings give by themselves, and with small ones for the rest; without populating
                it only asks. ``"reserved"`` takes them from the pool that the administrator set
                aside, and fails where there are not enough. None leaves it to the system.
            copies: processes of this node that ask for as much each; they must fit together.

        Raises:
            RegionError: no room (before anything is mapped), name taken, bad sections.
        """
        if huge_pages not in (None, *get_args(HugePages)):
            raise RegionError(
                f"huge_pages={huge_pages!r}: choose 'transparent', 'reserved' or None"
            )
        wanted = list(sections)
        views, table, nbytes = lay_out(wanted)
        if huge_pages == "reserved":
            nbytes = round_up(nbytes, HUGE_PAGE)
        if (backing == "file") != (path is not None):
            raise RegionError(f"backing {backing!r} with path={path!r}: a path goes with 'file'")
        if huge_pages == "reserved" and backing != "memfd":
            raise RegionError(f"reserved huge pages need backing 'memfd', not {backing!r}")
        directory = (os.path.dirname(path) or ".") if path else None
        if huge_pages != "reserved":  # those come from their own pool, which mapping checks
            check_capacity(nbytes, copies=copies, directory=directory)
        token = secrets.token_bytes(16)
        fd = open_backing(backing, path, nbytes, huge_pages)
        region = None
        try:
            memory = map_memory(fd, nbytes)
            header = CONTROL.pack(MAGIC, VERSION, len(table), nbytes, token, joiners, 0)
            region = cls(memory, views, backing=backing, fd=fd)
            populate(region.address, region.nbytes, populate_threads, huge_pages)
            memory[: len(header) + len(table)] = header + table
            if backing == "memfd":
                seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
            if path is not None:
                publish_named(fd, path)
        except BaseException:
            if region is not None:
                region.close(force=True)
            elif fd >= 0:
                os.close(fd)
            raise
        region._token, region._path = token, path
        return region

    @classmethod
    @_saying("join a region")
    def attach(cls, source: RegionHandle | int | str, *, timeout: float = 30.0) -> Region:
        """Join a region that another process of this user created.

        Args:
            source: what the creator handed over: a `RegionHandle`, an inherited descriptor, the
                address that `serve` returned (``"@..."``), or the path of a named region.
            timeout: seconds to wait for the creator to serve or to name it.

        Raises:
            RegionError: not there in time, not a region, or not this user's.
        """
        if isinstance(source, int):
            try:
                return cls._join(os.dup(source), None, "memfd")
            except OSError as error:
                if isinstance(error, RegionError):
                    raise
                raise RegionError(f"cannot join descriptor {source}: {error.strerror}") from error
        if isinstance(source, str):
            if source.startswith("@"):
                return cls._join(receive_descriptor(source, timeout), None, "memfd")
            return cls._join(_wait_for_name(source, timeout), source, "file")
        try:
            fd = os.open(f"/proc/{source.pid}/fd/{source.fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise RegionError(
                f"cannot join the region of process {source.pid}: {error.strerror}; it must still "
                "run, as this user, in this PID namespace (or use serve() and its address)"
            ) from error
        return cls._join(fd, None, "memfd", source.token)

    @classmethod
    def _join(cls, fd: int, path: str | None, backing: str, token: bytes | None = None) -> Region:
        try:
            size = os.fstat(fd).st_size
            views, found = read_table(os.pread(fd, min(size, MOST_CONTROL), 0), size)
            if token is not None and found != token:
                raise RegionError("that descriptor leads to another region; join again")
            memory = map_memory(fd, size)
            region = cls(memory, views, backing=backing)
            if path is not None:
                _count_joined(fd, memory, path)
        except BaseException:
            os.close(fd)
            raise
        region._fd, region._token = fd, found
        return region

    @classmethod
    def from_buffer(
        cls, address: int, nbytes: int, owner: Any, sections: Iterable[Section]
    ) -> Region:
        """Wrap memory that an engine owns; sections are laid from its first byte, without control.

        `owner` is kept alive for as long as the region or any view of it is.

        Raises:
            RegionError: the sections need more than `nbytes`.
        """
        offset, views = 0, []
        for section in sections:
            views.append(view_at(section, offset))
            offset += section.nbytes
        check_names(views)
        if offset > nbytes:
            raise RegionError(f"sections need {offset:,} bytes, the buffer has {nbytes:,}")
        memory = (ctypes.c_ubyte * nbytes).from_address(address)
        memory._vkvmap_owner = owner  # type: ignore[attr-defined]
        return cls(memory, views, backing="buffer")

    @staticmethod
    def sweep(path: str) -> bool:
        """Remove a named region that no living process holds; whether there was one."""
        return sweep(path)

    # ---- looking ------------------------------------------------------------------------------

    @property
    def sections(self) -> tuple[SectionView, ...]:
        """All sections, in order."""
        return tuple(self._sections.values())

    def section(self, name: str) -> SectionView:
        """The section called `name`.

        Raises:
            RegionError: there is none.
        """
        try:
            return self._sections[name]
        except KeyError:
            raise RegionError(
                f"the region has no section {name!r}; it has {list(self._sections)}"
            ) from None

    def row(self, name: str, index: int) -> Bytes:
        """Payload of row `index` of section `name`: uint8 ``(payload_bytes,)``, not a copy."""
        view = self.section(name)
        if not 0 <= index < view.num_rows:
            raise RegionError(f"row {index} of section {name!r}: rows are 0 to {view.num_rows - 1}")
        start = view.offset + index * view.row_stride
        return self.view[start : start + view.payload_bytes]

    def rows(self, name: str) -> Bytes:
        """All payloads of section `name`: uint8 ``(num_rows, payload_bytes)``, not a copy."""
        view = self.section(name)
        whole = self.view[view.offset : view.offset + view.nbytes]
        return whole.reshape(view.num_rows, view.row_stride)[:, : view.payload_bytes]

    @property
    def view(self) -> Bytes:
        """Every byte of the region, uint8 ``(nbytes,)``."""
        if self._bytes is None:
            raise RegionError("the region is closed")
        return self._bytes

    # ---- sharing and lifetime -----------------------------------------------------------------

    def handle(self) -> RegionHandle:
        """What another process of this node attaches to while this one keeps the region open."""
        if self._fd < 0:
            raise RegionError(f"a {self.backing!r} region cannot be shared; create it as 'memfd'")
        return RegionHandle(os.getpid(), self._fd, self._token)

    def serve(self, name: str | None = None) -> str:
        """Hand the region to every process of this user that asks; the address to attach to.

        Unlike a handle it works across PID namespaces and before the others have started. Serving
        ends with `close`.
        """
        if self._fd < 0:
            raise RegionError(f"a {self.backing!r} region cannot be shared; create it as 'memfd'")
        with self._lock:
            if self._server is None:
                self._server = DescriptorServer(self._fd, name)
            return self._server.address

    @property
    def alive(self) -> bool:
        """Whether the region is open; a plan asks before it touches an address."""
        return self._bytes is not None

    @property
    def pinned(self) -> bool:
        """Whether the memory is registered with a device."""
        return self.registration is not None and bool(self.registration.pinned)

    def hold(self, holder: Any) -> None:
        """Make `close` refuse while `holder` (a plan's memory, a store) lives, or until `release`.

        A holder may have ``settle()``, which lets go of what has ended; `close` calls it first.
        """
        self._holders.add(holder)

    def release(self, holder: Any) -> None:
        """Undo `hold`."""
        self._holders.discard(holder)

    def _settle(self) -> None:
        for holder in tuple(self._holders):
            settle = getattr(holder, "settle", None)
            if settle is not None:
                settle()

    @_saying("close a region in order")
    def close(self, *, force: bool = False) -> None:
        """Let go of the memory. It is unmapped once the last view of it is gone.

        Args:
            force: close although plans hold the region; they see `alive` turn False and refuse.
                Transfers that are under way keep mapping and registration until they have ended.

        Raises:
            RegionError: something holds the region, and it stays open; or the system refused a
                step of closing it, and everything else is done.
        """
        if self._bytes is None:
            return
        if len(self._holders) and not force:
            self._settle()
            if len(self._holders):
                raise RegionError(
                    f"{len(self._holders)} plans or stores still use this region; close them first "
                    "(transfers of plans that are gone: wait for them)"
                )
        registration, self.registration = self.registration, None
        if registration is not None and not len(self._holders):
            registration.release()  # before the memory goes, and with no transfer on it
        self._bytes = None
        fd, self._fd = self._fd, -1
        # Done from the last to the first, and all of it whichever fails.
        with contextlib.ExitStack() as steps:
            if fd >= 0:
                steps.callback(os.close, fd)
            # A name goes with its creator, not with a fork of it.
            if self._path is not None and self._pid == os.getpid():
                steps.callback(_take_name_away, fd, self._path)
            if self._server is not None:
                steps.callback(self._server.close)

    def __enter__(self) -> Region:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        # At interpreter exit this module's names may be gone, and so may half of the object.
        try:
            self.close(force=True)
        except Exception:
            pass

    def __repr__(self) -> str:
        state = "" if self.alive else " closed"
        names = ", ".join(f"{view.name}[{view.num_rows}]" for view in self.sections)
        return f"<Region{state} {self.backing} {self.nbytes:,} bytes: {names}>"


def node_slot(rank: int, *, group_size: int, ranks_per_node: int) -> int:
    """The slot of `rank` in its node's region: ``rank % ranks_per_node``.

    Raises:
        RegionError: the group spans nodes. A region is one node's memory, and a canonical page
            needs the shards of every rank, so such a group has to share through a store.
    """
    if group_size > ranks_per_node:
        raise RegionError(
            f"{group_size} ranks on nodes of {ranks_per_node}: a canonical page needs every rank's "
            "shard and a region reaches one node only; keep a worker group on one node"
        )
    return rank % ranks_per_node


def _take_name_away(fd: int, path: str) -> None:
    with member_count_lock(fd):
        unlink_if_same(fd, path)


# ---- joining ----------------------------------------------------------------------------------


def _wait_for_name(path: str, timeout: float) -> int:
    deadline = time.monotonic() + timeout
    while True:
        try:
            return open_named(path)
        except FileNotFoundError as error:
            if time.monotonic() >= deadline:
                raise RegionError(
                    f"no region at {path} after {timeout:g} s; start the process that creates it "
                    "first, or wait longer"
                ) from error
        except RegionError:
            raise
        except OSError as error:
            raise RegionError(f"cannot join the region at {path}: {error}") from error
        time.sleep(0.02)


def _count_joined(fd: int, memory: Any, path: str) -> None:
    """Add this process to the count of those who joined; the last one takes the name away."""
    with member_count_lock(fd):
        expected, joined = struct.unpack_from("<II", memory, JOINED_AT - 4)
        struct.pack_into("<I", memory, JOINED_AT, joined + 1)
        if expected and joined + 1 >= expected:
            unlink_if_same(fd, path)
