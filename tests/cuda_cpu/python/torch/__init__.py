"""As much of torch as the GPU tests and the GPU suite call, over the runtime that the module has.

For a build of the native module on the CPU stand-in of the CUDA runtime: a tensor of the device is
memory of the stand-in, and everything done to it is work on a stream, which the stand-in runs late
and in a seeded order. Only uint8, only what is contiguous on the device; anything else raises.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from torch import cuda
from torch import distributed as distributed
from torch._runtime import (
    DEVICE_TO_DEVICE,
    DEVICE_TO_HOST,
    HOST_TO_DEVICE,
    DeviceMemory,
    HostMemory,
    call,
)

uint8, bfloat16 = np.uint8, "bfloat16"


class device:
    """``"cpu"`` or ``"cuda"``; the stand-in's GPU is number 0."""

    def __init__(self, name: Any, index: int | None = None) -> None:
        kind, _, number = str(name).partition(":")
        self.type = kind
        self.index = int(number or index or 0) if kind == "cuda" else None

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"


class _Storage:
    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def data_ptr(self) -> int:
        return int(self._array.ctypes.data)

    def nbytes(self) -> int:
        return int(self._array.nbytes)


class Tensor:
    """uint8 memory: `array` is a view of it, to be touched at once on the host alone."""

    def __init__(self, array: np.ndarray, owner: Any = None) -> None:
        self._array, self._owner = array, owner
        self.is_cuda = isinstance(owner, DeviceMemory)
        self.device = device("cuda" if self.is_cuda else "cpu")

    # -- what it is
    @property
    def shape(self) -> tuple[int, ...]:
        return self._array.shape

    @property
    def nbytes(self) -> int:
        return int(self._array.nbytes)

    def __len__(self) -> int:
        return len(self._array)

    def data_ptr(self) -> int:
        return int(self._array.ctypes.data)

    def element_size(self) -> int:
        return 1

    def stride(self) -> tuple[int, ...]:
        return self._array.strides

    def untyped_storage(self) -> _Storage:
        return _Storage(self._array if self._owner is None else self._owner.array)

    def __getitem__(self, index: Any) -> Tensor:
        return Tensor(self._array[index], self._owner)

    def view(self, *shape: int) -> Tensor:
        return Tensor(self._array.reshape(shape), self._owner)

    # -- elsewhere
    def to(self, where: Any, copy: bool = False) -> Tensor:
        if not copy or device(where).type != "cuda":
            raise NotImplementedError("only copies to the device")
        return self.cuda()

    def cuda(self) -> Tensor:
        made = _on_device(self._array.shape)
        made.copy_(self)
        return made

    def cpu(self) -> Tensor:
        made = Tensor(np.empty(self._array.shape, np.uint8))
        made.copy_(self)
        return made

    def pin_memory(self) -> Tensor:
        made = _pinned(self._array.shape)
        made._array[...] = self._array
        return made

    def numpy(self) -> np.ndarray:
        if self.is_cuda:
            raise TypeError("memory of a device is no numpy array; use cpu()")
        return self._array

    # -- work
    def copy_(self, source: Tensor, non_blocking: bool = False) -> Tensor:
        if not (self.is_cuda or source.is_cuda):
            np.copyto(self._array, source._array)
            return self
        for side in (self, source):
            if side.nbytes != self.nbytes or not side._array.flags.c_contiguous:
                raise NotImplementedError("only contiguous copies of equal length")
        stream = cuda.current_stream()
        kind = HOST_TO_DEVICE if self.is_cuda else DEVICE_TO_HOST
        if self.is_cuda and source.is_cuda:
            kind = DEVICE_TO_DEVICE
        ends = self.data_ptr(), source.data_ptr()
        call("cudaMemcpyAsync", *ends, self.nbytes, kind, stream.cuda_stream)
        if not non_blocking:
            stream.synchronize()
        return self

    def fill_(self, value: int) -> Tensor:
        if self.is_cuda:
            stream = cuda.current_stream().cuda_stream
            call("cudaMemsetAsync", self.data_ptr(), value, self.nbytes, stream)
        else:
            self._array[...] = value
        return self

    def zero_(self) -> Tensor:
        return self.fill_(0)

    def random_(self, low: int, high: int) -> Tensor:
        return self.copy_(Tensor(_rng.integers(low, high, self.shape, np.uint8)))


def from_numpy(array: np.ndarray) -> Tensor:
    return Tensor(array)


def zeros(
    shape: int | tuple[int, ...], *, dtype: Any, device: Any = "cpu", pin_memory: bool = False
) -> Tensor:
    return empty(shape, dtype=dtype, device=device, pin_memory=pin_memory).zero_()


def empty(
    shape: int | tuple[int, ...], *, dtype: Any, device: Any = "cpu", pin_memory: bool = False
) -> Tensor:
    _only_bytes(dtype)
    shape = (shape,) if isinstance(shape, int) else shape
    if str(device).startswith("cuda"):
        return _on_device(shape)
    return _pinned(shape) if pin_memory else Tensor(np.empty(shape, np.uint8))


def randint(
    low: int, high: int, shape: tuple[int, ...], *, dtype: Any, device: Any = "cpu"
) -> Tensor:
    return empty(shape, dtype=dtype, device=device).random_(low, high)


def randn(*shape: int, dtype: Any, device: Any) -> Tensor:
    """Something for `mm` to multiply."""
    return _on_device((2 * int(np.prod(shape)),))


def mm(a: Tensor, b: Tensor) -> None:
    """As work on the stream, which takes a millisecond, a product has no result here."""
    cuda._sleep(2_000_000)


def manual_seed(seed: int) -> None:
    global _rng
    _rng = np.random.default_rng(seed)


_rng = np.random.default_rng(0)


def _only_bytes(dtype: Any) -> None:
    if dtype is not uint8:
        raise NotImplementedError(f"only uint8, not {dtype}")


def _on_device(shape: tuple[int, ...]) -> Tensor:
    memory = DeviceMemory(int(np.prod(shape)), cuda.current_stream())
    return Tensor(memory.array.reshape(shape), memory)


def _pinned(shape: tuple[int, ...]) -> Tensor:
    memory = HostMemory(int(np.prod(shape)))
    return Tensor(memory.array.reshape(shape), memory)
