"""Memory that faults where nobody may touch it, and address ranges far larger than the machine.

A `Reserved` range has addresses and no memory: touching it ends the process. Pieces of it can be
opened. Guarded memory is a piece with closed pages on both sides; arithmetic beyond 2^31, 2^32 and
2^40 is tested on ranges of terabytes of which a few pages are open.
"""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

from vkvmap import TensorView

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

_NONE, _READ_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
PAGE = mmap.PAGESIZE


class Reserved:
    """`nbytes` of addresses without memory, until they are opened; given back when it goes."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = -(-nbytes // PAGE) * PAGE
        address = _libc.mmap(None, self.nbytes, _NONE, _FLAGS, -1, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            raise MemoryError(f"{nbytes} bytes of addresses cannot be reserved")
        self.address = int(address)

    def open(self, offset: int, nbytes: int) -> np.ndarray:
        """Whole pages around ``[offset, offset + nbytes)`` become memory; those bytes."""
        first = offset // PAGE * PAGE
        last = -(-(offset + nbytes) // PAGE) * PAGE
        if _libc.mprotect(self.address + first, last - first, _READ_WRITE) != 0:
            raise MemoryError(f"bytes [{first}, {last}) cannot be opened")
        return self.bytes(offset, nbytes)

    def bytes(self, offset: int, nbytes: int) -> np.ndarray:
        """uint8 view of bytes that must be open; keeps the range alive."""
        memory = (ctypes.c_ubyte * nbytes).from_address(self.address + offset)
        memory._reserved = self  # type: ignore[attr-defined]
        return np.frombuffer(memory, np.uint8)

    def tensor(self, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> TensorView:
        """A view of single bytes within the range, open or not; strides in bytes."""
        at = self.address + offset
        return TensorView(at, shape, strides, 1, (self.address, self.nbytes), "cpu", self)

    def __del__(self) -> None:
        if hasattr(self, "address"):
            _libc.munmap(self.address, self.nbytes)


def guarded(nbytes: int, *, against_end: bool) -> tuple[Reserved, int, np.ndarray]:
    """(range, offset, bytes): `nbytes` of memory that end, or begin, at a page that faults."""
    inner = -(-nbytes // PAGE) * PAGE
    reserved = Reserved(inner + 2 * PAGE)
    reserved.open(PAGE, inner)
    offset = PAGE + (inner - nbytes if against_end else 0)
    return reserved, offset, reserved.bytes(offset, nbytes)
