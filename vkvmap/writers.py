"""Writer policies: which of the ranks that hold identical bytes stores them.

A derivation lets replicas take turns by page id (DESIGN 2.4). The other policies are
transformations of its result, each computable by a rank from its own mapping alone, because
replicas have equal mappings. Loads are never affected: every rank loads its whole page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from vkvmap.errors import SpecError
from vkvmap.mapping import CanonicalPageMapping, CopyRun, Mappings

#: Slices of the `split` policy start on host lines, so that two writers never share one.
SLICE_ALIGNMENT = 128


def turns(mapping: CanonicalPageMapping) -> CanonicalPageMapping:
    """Replicas take turns: page `b` is stored by replica ``b % num_writers``."""
    return mapping


def first(mapping: CanonicalPageMapping) -> CanonicalPageMapping:
    """The first replica of each set stores every page."""
    kept = mapping.effective_store_runs if mapping.writer_index == 0 else ()
    return replace(mapping, num_writers=1, writer_index=0, store_runs=kept)


def split(mapping: CanonicalPageMapping) -> CanonicalPageMapping:
    """Each replica stores its slice of every page, so that one page uses every replica's link."""
    runs = mapping.effective_store_runs
    total = sum(run.fragment_size * run.num_fragments for run in runs)
    parts, lines = mapping.num_writers, -(-total // SLICE_ALIGNMENT)
    low = min(total, mapping.writer_index * lines // parts * SLICE_ALIGNMENT)
    high = min(total, (mapping.writer_index + 1) * lines // parts * SLICE_ALIGNMENT)
    return replace(
        mapping, num_writers=1, writer_index=0, store_runs=tuple(_slice(runs, low, high))
    )


def everyone(mapping: CanonicalPageMapping) -> CanonicalPageMapping:
    """Every replica stores every page: for debugging, exempt from exactly-once."""
    return replace(mapping, num_writers=1, writer_index=0)


#: Policies by the name that callers choose them by.
POLICIES: Mapping[str, Callable[[CanonicalPageMapping], CanonicalPageMapping]] = {
    "turns": turns,
    "first": first,
    "split": split,
    "all": everyone,
}


def with_writers(mappings: Mappings, policy: str) -> Mappings:
    """`mappings` with every layer's writers chosen by `policy`; SpecError names the choices."""
    if policy not in POLICIES:
        raise SpecError(f"writer policy {policy!r}: choose one of {', '.join(POLICIES)}")
    # Alike layers share one mapping object, and plans rely on that to share what they pack.
    chosen = {id(m): POLICIES[policy](m) for m in mappings.by_layer.values()}
    return replace(mappings, by_layer={n: chosen[id(m)] for n, m in mappings.by_layer.items()})


def _slice(runs: Sequence[CopyRun], low: int, high: int) -> Iterator[CopyRun]:
    """The part of `runs` between stored bytes `low` and `high`, counted run after run."""
    position = 0
    for run in runs:
        size = run.fragment_size * run.num_fragments
        start, stop = max(low - position, 0), min(high - position, size)
        position += size
        if start < stop:
            yield from _slice_run(run, start, stop)


def _slice_run(run: CopyRun, start: int, stop: int) -> Iterator[CopyRun]:
    size = run.fragment_size
    head = -start % size
    if head and start + head > stop:
        head = stop - start
    if head:
        yield _piece(run, start // size, start % size, head, 1)
        start += head
    whole = (stop - start) // size
    if whole:
        yield _piece(run, start // size, 0, size, whole)
        start += whole * size
    if start < stop:
        yield _piece(run, start // size, 0, stop - start, 1)


def _piece(run: CopyRun, index: int, within: int, size: int, count: int) -> CopyRun:
    return replace(
        run,
        local_offset=run.local_offset + index * run.local_stride + within,
        canonical_offset=run.canonical_offset + index * run.canonical_stride + within,
        fragment_size=size,
        num_fragments=count,
    )
