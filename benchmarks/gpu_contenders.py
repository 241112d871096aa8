"""The ways to move fragments that the kernel is compared with, on a GPU and pinned host memory.

Each takes the same job: runs of equal length, dense in the cache, apart on the host.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np


class Runs:
    """`count` runs of `run` bytes: contiguous in `cache`, `spread` runs apart in `host`."""

    def __init__(self, cache: Any, host: Any, run: int, count: int, spread: int = 2) -> None:
        self.cache, self.host, self.run, self.count, self.spread = cache, host, run, count, spread

    @property
    def nbytes(self) -> int:
        return self.run * self.count

    def addresses(self) -> tuple[np.ndarray, np.ndarray]:
        """(cache, host) address of every run: what an engine expands per transfer."""
        index = np.arange(self.count, dtype=np.uint64)
        local = np.uint64(self.cache.data_ptr()) + index * np.uint64(self.run)
        host = np.uint64(self.host.data_ptr()) + index * np.uint64(self.spread * self.run)
        return local, host


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", ctypes.c_uint),
    )


class BatchedCopies:
    """The driver's batched copy, fed with one (source, target, size) triple per run.

    The triples are expanded with numpy on every call, as engines do. Raises OSError or
    AttributeError where the driver does not have the call.
    """

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        self._call = library.cuMemcpyBatchAsync
        self._call.restype = ctypes.c_int

    def __call__(self, runs: Runs, direction: str, stream: Any) -> None:
        local, host = runs.addresses()
        sources, targets = (local, host) if direction == "store" else (host, local)
        sizes = np.full(runs.count, runs.run, np.uint64)
        attributes = _Attributes(source_order=1)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        pointer = ctypes.c_void_p
        error = self._call(
            pointer(targets.ctypes.data),
            pointer(sources.ctypes.data),
            pointer(sizes.ctypes.data),
            ctypes.c_size_t(runs.count),
            ctypes.byref(attributes),
            ctypes.byref(first),
            ctypes.c_size_t(1),
            ctypes.byref(failed),
            pointer(stream.cuda_stream),
        )
        if error:
            raise RuntimeError(f"cuMemcpyBatchAsync: driver error {error}")


class TritonTriples:
    """One warp per triple; the triples are expanded with numpy and uploaded on every call."""

    def __init__(self) -> None:
        import torch

        from benchmarks.gpu_triton import copy_triples

        self._torch, self._copy = torch, copy_triples

    def __call__(self, runs: Runs, direction: str, stream: Any) -> None:
        torch = self._torch
        local, host = runs.addresses()
        sources, targets = (local, host) if direction == "store" else (host, local)
        with torch.cuda.stream(stream):
            on_gpu = [
                torch.from_numpy(a.view(np.int64)).pin_memory().cuda(non_blocking=True)
                for a in (sources, targets)
            ]
            sizes = torch.full((runs.count,), runs.run, dtype=torch.int32, device="cuda")
            self._copy(*on_gpu, sizes)
            for tensor in on_gpu:
                tensor.record_stream(stream)


class StagedCopies:
    """One contiguous copy between the cache and a staging buffer; the host scatters or gathers."""

    def __init__(self, nbytes: int) -> None:
        import torch

        self._torch = torch
        self._staging = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def __call__(self, runs: Runs, direction: str, stream: Any) -> None:
        n = runs.nbytes
        dense = self._staging[:n].view(runs.count, runs.run)
        apart = runs.host[: n * runs.spread].view(runs.count, runs.spread * runs.run)[:, : runs.run]
        with self._torch.cuda.stream(stream):
            if direction == "store":
                self._staging[:n].copy_(runs.cache[:n], non_blocking=True)
                stream.synchronize()
                apart.copy_(dense)
            else:
                dense.copy_(apart)
                runs.cache[:n].copy_(self._staging[:n], non_blocking=True)
