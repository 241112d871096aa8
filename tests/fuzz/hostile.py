"""Hostile input as hypothesis strategies, and a watch on what it costs to be refused."""

from __future__ import annotations

import copy
import signal
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis import strategies as st

LITERALS = [
    None, True, False, 0, -0, 1, 2, 3, 7, -1, 1 << 31, -(1 << 31), (1 << 32) + 1, 1 << 63, 1 << 64,
    1 << 200, 0.5, -1.5, 1e300, float("inf"), float("nan"), "", "x", "0", "-1", "../../x", "\0",
    "\ud800", "x" * 5000, [], [[]], [None], {}, {"": None}, [0] * 300, {"0": {"0": {"0": []}}},
]  # fmt: skip


def paths(value: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every node of a JSON value, the root included."""
    yield here
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from paths(inner, (*here, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from paths(inner, (*here, index))


@st.composite
def mutated_json(draw: st.DrawFn, value: Any, most: int = 3) -> Any:
    """`value` with up to `most` nodes replaced, removed, repeated or nested."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, most))):
        ways = [path for path in paths(value) if path]
        if not ways:
            return draw(st.sampled_from(LITERALS))
        *way, last = draw(st.sampled_from(ways))
        parent = value
        for step in way:
            parent = parent[step]
        kind = draw(st.sampled_from(["replace", "replace", "replace", "remove", "repeat", "nest"]))
        if kind == "replace":
            parent[last] = copy.deepcopy(draw(st.sampled_from(LITERALS)))
        elif kind == "remove":
            del parent[last]
        elif kind == "nest":
            parent[last] = {"": [parent[last]]}
        elif isinstance(parent, list):
            parent.extend(copy.deepcopy(parent[last]) for _ in range(draw(st.integers(1, 40))))
        else:
            parent[draw(st.sampled_from(sorted(map(str, parent))))] = parent[last]
    return value


@st.composite
def mutated_bytes(draw: st.DrawFn, raw: bytes, most: int = 6) -> bytes:
    """`raw` with bits flipped, numbers replaced, stretches cut, repeated or swapped."""
    out = bytearray(raw)
    for _ in range(draw(st.integers(1, most))):
        if not out:
            return bytes(draw(st.binary(max_size=64)))
        at = draw(st.integers(0, len(out) - 1))
        kind = draw(st.sampled_from(["flip", "number", "cut", "repeat", "swap", "fill"]))
        size = draw(st.sampled_from([1, 2, 4, 8, 64, 512]))
        if kind == "flip":
            out[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "number":
            width = draw(st.sampled_from([2, 4, 8]))
            number = draw(st.sampled_from([0, 1, 0x7FFF, 0xFFFF, 1 << 31, (1 << 32) - 1, 1 << 63]))
            out[at : at + width] = (number % (1 << 8 * width)).to_bytes(width, "little")
        elif kind == "cut":
            del out[at : at + size]
        elif kind == "repeat":
            out[at:at] = out[at : at + size] * draw(st.integers(1, 4))
        elif kind == "swap":
            other = draw(st.integers(0, len(out) - 1))
            out[at], out[other] = out[other], out[at]
        else:
            out[at : at + size] = bytes([draw(st.integers(0, 255))]) * size
    return bytes(out)


class TooMuch(Exception):
    """Refusing took longer, or more memory, than any honest input would."""


@contextmanager
def bounded(seconds: int = 5, mebibytes: int = 64) -> Iterator[None]:
    """Fail instead of hanging, or of allocating what the input asks for."""

    def expired(*_: object) -> None:
        raise TooMuch(f"no answer within {seconds} s")

    before = signal.signal(signal.SIGALRM, expired)
    signal.alarm(seconds)
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    if peak > mebibytes << 20:
        raise TooMuch(f"{peak >> 20} MiB to answer")
