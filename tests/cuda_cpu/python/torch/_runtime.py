"""The CUDA runtime inside the native module, called by name; the stand-in's, in these builds."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np

from vkvmap import _C

_NOT_READY = 600
HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE = 1, 2, 3

_library = ctypes.CDLL(_C.__file__)
_pointer, _size, _int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_out = ctypes.POINTER(ctypes.c_void_p)
_PARAMETERS: dict[str, tuple[type, ...]] = {
    "cudaMalloc": (_out, _size),
    "cudaFree": (_pointer,),
    "cudaHostAlloc": (_out, _size, ctypes.c_uint),
    "cudaFreeHost": (_pointer,),
    "cudaMemcpyAsync": (_pointer, _pointer, _size, _int, _pointer),
    "cudaMemsetAsync": (_pointer, _int, _size, _pointer),
    "cuda_cpu_sleep": (_pointer, ctypes.c_double),
    "cudaDeviceSynchronize": (),
    "cudaStreamCreateWithFlags": (_out, ctypes.c_uint),
    "cudaStreamSynchronize": (_pointer,),
    "cudaEventCreateWithFlags": (_out, ctypes.c_uint),
    "cudaEventRecord": (_pointer, _pointer),
    "cudaEventSynchronize": (_pointer,),
    "cudaEventQuery": (_pointer,),
    "cudaEventElapsedTime": (ctypes.POINTER(ctypes.c_float), _pointer, _pointer),
    "cudaEventDestroy": (_pointer,),
    "cudaStreamBeginCapture": (_pointer, _int),
    "cudaStreamEndCapture": (_pointer, _out),
    "cudaThreadExchangeStreamCaptureMode": (ctypes.POINTER(_int),),
    "cudaGraphInstantiate": (_out, _pointer, ctypes.c_ulonglong),
    "cudaGraphLaunch": (_pointer, _pointer),
    "cudaGraphDestroy": (_pointer,),
    "cudaGraphExecDestroy": (_pointer,),
}
for _name, _types in _PARAMETERS.items():
    getattr(_library, _name).argtypes = _types


def call(name: str, *arguments: object) -> None:
    """Call a function of the runtime; RuntimeError with its number if it fails."""
    error = getattr(_library, name)(*arguments)
    if error:
        raise RuntimeError(f"{name}: CUDA error {error}")


def happened(name: str, *arguments: object) -> bool:
    """Whether `name` says that it has happened, or else that it is not ready."""
    error = getattr(_library, name)(*arguments)
    if error not in (0, _NOT_READY):
        raise RuntimeError(f"{name}: CUDA error {error}")
    return not error


def made_by(name: str, *arguments: object) -> int:
    """The handle or address that `name` writes through its first parameter."""
    made = ctypes.c_void_p()
    call(name, ctypes.byref(made), *arguments)
    return int(made.value or 0)


@contextmanager
def _relaxed() -> Iterator[None]:
    """Disturb no capture: torch keeps freed memory, and calls nothing when a tensor goes."""
    mode = _int(2)
    call("cudaThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        yield
    finally:
        call("cudaThreadExchangeStreamCaptureMode", ctypes.byref(mode))


class _Memory:
    """Bytes that the runtime allocated, and frees once nothing refers to them."""

    allocate: ClassVar[tuple[str, tuple[int, ...]]]
    free: ClassVar[str]

    def __init__(self, nbytes: int) -> None:
        name, flags = self.allocate
        self._nbytes = nbytes
        self._address = made_by(name, max(nbytes, 1), *flags)
        self.array = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(self._address))

    def __del__(self) -> None:
        if hasattr(self, "_address"):
            with _relaxed():
                self._let_go()

    def _let_go(self) -> None:
        call(self.free, self._address)


class DeviceMemory(_Memory):
    """Allocated for work on `stream`.

    Once nothing refers to it, torch gives it to whoever allocates next for that stream, and their
    work follows at once. So other bytes come into it: work that still reads it, or writes it, on
    another stream goes wrong here too, although freeing waits for all work.
    """

    allocate, free = ("cudaMalloc", ()), "cudaFree"

    def __init__(self, nbytes: int, stream: Any) -> None:
        self._stream = stream
        super().__init__(nbytes)

    def _let_go(self) -> None:
        stream = self._stream.cuda_stream
        call("cudaMemsetAsync", self._address, 0xDB, self._nbytes, stream)
        super()._let_go()


class HostMemory(_Memory):
    """Pinned."""

    allocate, free = ("cudaHostAlloc", (0,)), "cudaFreeHost"
