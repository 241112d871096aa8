"""Our mappings against the engine's own, layer by layer, at start-up.

Since 0.27 the engine derives mappings of its own. They are not used, but two independent
derivations that agree are worth more than one, and where they differ somebody should know.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from vkvmap.mapping import CanonicalPageMapping, Mappings

#: Fragments per page above which a comparison is not worth start-up time.
_MOST_FRAGMENTS = 1 << 18


def differences(mappings: Mappings, theirs: Mapping[str, Any]) -> tuple[str, ...]:
    """A sentence per layer whose certified mapping is not the engine's.

    Layers that the engine has no certified mapping for are left out, and so are those that only
    the engine splits into rows of its own (opaque here).
    """
    found = []
    seen: dict[tuple[int, int], str | None] = {}
    for name, ours in mappings.by_layer.items():
        other = theirs.get(name)
        if other is None or not ours.certified or not other.parallelism_agnostic:
            continue
        key = (id(ours), id(other))
        if key not in seen:
            seen[key] = _difference(ours, other)
        if seen[key] is not None:
            found.append(f"layer {name!r}: {seen[key]}")
    return tuple(found)


def _difference(ours: CanonicalPageMapping, theirs: Any) -> str | None:
    for field in (
        "local_page_size_bytes",
        "canonical_page_size_bytes",
        "num_writers",
        "writer_index",
    ):
        mine, other = getattr(ours, field), getattr(theirs, field)
        if mine != other:
            return f"{field} is {other} there and {mine} here"
    if max(_count(ours.runs), _count(theirs.runs)) > _MOST_FRAGMENTS:
        return None
    if _pieces(ours.runs) != _pieces(theirs.runs):
        return "the runs lead to other bytes"
    return None


def _count(runs: Iterable[Any]) -> int:
    return sum(run.num_fragments for run in runs)


def _pieces(runs: Iterable[Any]) -> list[tuple[int, int, int]]:
    """Fragments (local, canonical, size) in order, joined where they continue each other."""
    fragments = sorted(
        (
            run.local_offset + i * run.local_stride,
            run.canonical_offset + i * run.canonical_stride,
            run.fragment_size,
        )
        for run in runs
        for i in range(run.num_fragments)
    )
    joined: list[tuple[int, int, int]] = []
    for local, canonical, size in fragments:
        if joined:
            before_local, before_canonical, length = joined[-1]
            if before_local + length == local and before_canonical + length == canonical:
                joined[-1] = (before_local, before_canonical, length + size)
                continue
        joined.append((local, canonical, size))
    return joined
