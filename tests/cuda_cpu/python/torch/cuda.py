"""Streams, events and graphs as torch has them, on the runtime of the native module."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import cycle
from typing import Any

from torch._runtime import call, happened, made_by

_NON_BLOCKING, _NO_TIMING = 1, 2
_here = threading.local()


class Stream:
    """One of 32 streams that the default stream does not wait for; they take turns, as torch's do.

    None is ever destroyed, so that work goes on when nothing refers to its stream any more.
    """

    def __init__(self, device: Any = None, *, _handle: int | None = None) -> None:
        if _handle is None:
            with _lock:
                _handle = next(_turns)
        self.cuda_stream: int = _handle

    def synchronize(self) -> None:
        call("cudaStreamSynchronize", self.cuda_stream)


def _taking_turns() -> Iterator[int]:
    made = []
    for _ in range(32):
        made.append(made_by("cudaStreamCreateWithFlags", _NON_BLOCKING))
        yield made[-1]
    yield from cycle(made)


_turns, _lock = _taking_turns(), threading.Lock()
_default = Stream(_handle=0)


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self._event = made_by("cudaEventCreateWithFlags", 0 if enable_timing else _NO_TIMING)

    def record(self, stream: Stream | None = None) -> None:
        call("cudaEventRecord", self._event, (stream or current_stream()).cuda_stream)

    def synchronize(self) -> None:
        call("cudaEventSynchronize", self._event)

    def query(self) -> bool:
        return happened("cudaEventQuery", self._event)

    def elapsed_time(self, end: Event) -> float:
        milliseconds = ctypes.c_float()
        call("cudaEventElapsedTime", ctypes.byref(milliseconds), self._event, end._event)
        return milliseconds.value

    def __del__(self) -> None:
        if hasattr(self, "_event"):
            call("cudaEventDestroy", self._event)


def default_stream() -> Stream:
    return _default


def current_stream() -> Stream:
    return getattr(_here, "stream", _default)


@contextmanager
def stream(chosen: Stream) -> Iterator[None]:
    before = current_stream()
    _here.stream = chosen
    try:
        yield
    finally:
        _here.stream = before


@contextmanager
def device(chosen: Any) -> Iterator[None]:
    """The stand-in's only device is always the current one."""
    yield


def synchronize(device: Any = None) -> None:
    call("cudaDeviceSynchronize")


def _sleep(cycles: int) -> None:
    """Work that takes as long as so many cycles of a chip at 2 GHz."""
    call("cuda_cpu_sleep", current_stream().cuda_stream, cycles / 2e9)


class CUDAGraph:
    def __init__(self) -> None:
        self._graph = self._executable = 0

    def _captured(self, graph: int) -> None:
        self._graph = graph
        self._executable = made_by("cudaGraphInstantiate", graph, 0)

    def replay(self) -> None:
        call("cudaGraphLaunch", self._executable, current_stream().cuda_stream)

    def __del__(self) -> None:
        if self._executable:
            call("cudaGraphExecDestroy", self._executable)
        if self._graph:
            call("cudaGraphDestroy", self._graph)


@contextmanager
def graph(into: CUDAGraph, stream: Stream) -> Iterator[None]:
    synchronize()
    call("cudaStreamBeginCapture", stream.cuda_stream, 0)
    made = ctypes.c_void_p()
    end = stream.cuda_stream, ctypes.byref(made)
    try:
        with _on(stream):
            yield
    except BaseException:
        with suppress(RuntimeError):  # what was raised says more than a capture that it spoiled
            call("cudaStreamEndCapture", *end)
        if made.value:
            call("cudaGraphDestroy", made.value)
        raise
    call("cudaStreamEndCapture", *end)
    into._captured(int(made.value or 0))


_on = stream
