"""The proof under attack: `python -m tests.attack [TRIES] [SEED]` (100,000 tries, a random seed).

Takes right answers of random layers, layouts, grids and writer policies, spoils one thing in each
try, and asks `certify`. What no longer tiles must be refused, what happens to tile still must not.
The judge counts bytes, one by one. Prints what was tried; exits with 1 at the first wrong word of
`certify`, and prints the mappings.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from math import lcm

import numpy as np

from tests.worlds import ATTENTION, SCALED, World
from vkvmap import (
    CanonicalPageMapping,
    CopyRun,
    LayerSpec,
    LayerTable,
    RankGrid,
    certify,
    derive_group,
)
from vkvmap.errors import TilingError
from vkvmap.writers import POLICIES

KINDS = ("shift", "swap", "overlap", "hole", "duplicate", "stride", "turn", "size")
DELTAS = (-1000, -129, -64, -16, -8, -4, -2, -1, 1, 2, 4, 8, 16, 64, 129, 1000, 1 << 40, -(1 << 62))
MOST_BYTES = 4096  # of a canonical page
TRIES_PER_GROUP = 50

Group = list[CanonicalPageMapping]


def groups(dice: random.Random) -> Iterator[Group]:
    """Right answers: certified mappings of all ranks of a group."""
    pick = dice.choice
    while True:
        heads, size, elem = pick([1, 2, 3, 4, 6, 8]), pick([1, 3, 4, 5, 16]), pick([1, 2, 4])
        kind = pick(["attention", "scaled", "mla", "indexer"])
        if kind == "mla":
            spec, layouts = LayerSpec.mla("layer", row_bytes=size * elem), ("mla",)
        elif kind == "indexer":
            spec = LayerSpec.indexer("layer", value_bytes=size, scale_bytes=elem)
            layouts = ("planar",)
        else:
            scale = elem if kind == "scaled" else 0
            spec = LayerSpec.attention(
                "layer", num_kv_heads=heads, head_size=size, elem=elem, scale_bytes=scale
            )
            layouts = SCALED if scale else ATTENTION
        grid = RankGrid(
            tp=pick([1, 2, 3, 4, 6, 8]), dcp=pick([1, 1, 2, 4]), pcp=pick([1, 1, 2]),
            interleave=pick([1, 2, 4]), pcp_mode=pick(["shards", "replicates"]),
        )  # fmt: skip
        world = World(
            spec, pick(layouts), grid, pick([1, 2, 4, 8, 16]), 1, pick(["native", "universal"])
        )
        if not world.legal:
            continue
        made = derive_group(LayerTable([spec]), {"layer": world.view()}, grid, family=world.family)
        group = [mappings.by_layer["layer"] for mappings in made]
        if not group[0].certified or group[0].canonical_page_size_bytes > MOST_BYTES:
            continue
        policy = POLICIES[pick(["turns", "first", "split"])]
        yield [policy(mapping) for mapping in group]


def spoiled(dice: random.Random, group: Group, kind: str) -> Group:
    """`group` with one thing done to one rank."""
    rank = dice.randrange(len(group))
    mapping = group[rank]
    which = "store_runs" if mapping.store_runs and dice.random() < 0.4 else "runs"
    if kind == "turn":
        spoilt = replace(
            mapping,
            num_writers=mapping.num_writers + dice.choice([-1, 0, 0, 1, 2]),
            writer_index=mapping.writer_index + dice.choice([-1, 0, 1]),
        )
    elif kind == "size":
        name = dice.choice(["canonical_page_size_bytes", "local_page_size_bytes"])
        spoilt = replace(mapping, **{name: getattr(mapping, name) + dice.choice(DELTAS)})
    else:
        runs = _spoiled_runs(dice, list(getattr(mapping, which)), kind)
        spoilt = replace(mapping, **{which: tuple(runs)})
    return [*group[:rank], spoilt, *group[rank + 1 :]]


def _spoiled_runs(dice: random.Random, runs: list[CopyRun], kind: str) -> list[CopyRun]:
    at = dice.randrange(len(runs))
    run, other = runs[at], dice.choice(runs)
    if kind == "shift":
        name = dice.choice(["local_offset", "canonical_offset"])
        runs[at] = replace(run, **{name: getattr(run, name) + dice.choice(DELTAS)})
    elif kind == "swap":
        name = dice.choice(["local_offset", "canonical_offset"])
        runs[runs.index(other)] = replace(other, **{name: getattr(run, name)})
        runs[at] = replace(run, **{name: getattr(other, name)})
    elif kind == "overlap":
        name = dice.choice(["fragment_size", "num_fragments"])
        runs[at] = replace(run, **{name: getattr(run, name) + dice.choice([1, 2, 8])})
    elif kind == "hole":
        name = dice.choice(["fragment_size", "num_fragments", ""])
        if name:
            runs[at] = replace(run, **{name: getattr(run, name) - dice.choice([1, 2, 8])})
        else:
            del runs[at]
    elif kind == "duplicate":
        runs.insert(dice.randrange(len(runs) + 1), run)
    else:
        name = dice.choice(["local_stride", "canonical_stride"])
        runs[at] = replace(run, **{name: getattr(run, name) + dice.choice(DELTAS)})
    return runs


def moved(runs: tuple[CopyRun, ...], most: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Every (local, canonical) byte pair; None if they are more than `most`, or a run is none."""
    if any(min(run.fragment_size, run.num_fragments) < 1 for run in runs):
        return None
    if sum(run.fragment_size * run.num_fragments for run in runs) > most:
        return None
    local: list[int] = []
    canonical: list[int] = []
    for run in runs:
        for fragment in range(run.num_fragments):
            for places, start, stride in (
                (local, run.local_offset, run.local_stride),
                (canonical, run.canonical_offset, run.canonical_stride),
            ):
                first = start + fragment * stride
                places.extend(range(first, first + run.fragment_size))
    if any(not -(1 << 63) <= place < 1 << 63 for place in (*local, *canonical)):
        return None
    return np.array(local, dtype=np.int64), np.array(canonical, dtype=np.int64)


def times(places: np.ndarray, size: int) -> np.ndarray | None:
    """How often each byte of [0, size) is named; None if another one is."""
    if places.size and (places.min() < 0 or places.max() >= size):
        return None
    return np.bincount(places, minlength=size)


def tiles(group: Group) -> bool:
    """What `certify` is to prove: loads of every rank, and the stores of every turn."""
    size = group[0].canonical_page_size_bytes
    stored = []
    for mapping in group:
        if mapping.canonical_page_size_bytes != size or not 0 < size <= 1 << 20:
            return False
        if not 0 <= mapping.writer_index < mapping.num_writers:
            return False
        if not 0 < mapping.local_page_size_bytes <= 1 << 20:
            return False
        loads = moved(mapping.runs, mapping.local_page_size_bytes)
        stores = moved(mapping.effective_store_runs, size)
        if loads is None or stores is None:
            return False
        here, there = times(loads[0], mapping.local_page_size_bytes), times(loads[1], size)
        if here is None or there is None or np.any(here != 1) or np.any(there > 1):
            return False
        target = np.full(mapping.local_page_size_bytes, -1)
        target[loads[0]] = loads[1]
        if times(stores[0], mapping.local_page_size_bytes) is None:
            return False
        if not np.array_equal(target[stores[0]], stores[1]):
            return False
        stored.append(stores[1])
    for page in range(lcm(*(mapping.num_writers for mapping in group))):
        written = np.concatenate(
            [bytes_ for m, bytes_ in zip(group, stored, strict=True) if m.is_writer(page)]
            or [np.zeros(0, np.int64)]
        )
        count = times(written, size)
        if count is None or np.any(count != 1):
            return False
    return True


def attack(tries: int, seed: int) -> Counter[tuple[str, bool]]:
    """(kind, refused) -> tries. AssertionError where `certify` was wrong."""
    dice = random.Random(seed)
    answers = groups(dice)
    counted: Counter[tuple[str, bool]] = Counter()
    group: Group = []
    for number in range(tries):
        if number % TRIES_PER_GROUP == 0:
            group = next(answers)
            assert tiles(group), f"a right answer that is none: {group}"
            certify(group)
        kind = KINDS[number % len(KINDS)]
        spoilt = spoiled(dice, group, kind)
        try:
            certify(spoilt)
            refused = False
        except TilingError:
            refused = True
        assert refused is not tiles(spoilt), f"{kind}, refused={refused}: {spoilt}"
        counted[kind, refused] += 1
    return counted


def main(tries: int, seed: int) -> int:
    start = time.monotonic()
    try:
        counted = attack(tries, seed)
    except AssertionError as error:
        print(error)
        return 1
    refused = sum(n for (_, no), n in counted.items() if no)
    print(
        f"seed {seed}: {tries} tries in {time.monotonic() - start:.0f} s: {refused} no longer "
        f"tiled and were refused, {tries - refused} still tiled and were accepted, 0 wrong"
    )
    for kind in KINDS:
        print(f"  {kind}: {counted[kind, True]} refused, {counted[kind, False]} accepted")
    return 0


if __name__ == "__main__":
    told = [int(word) for word in sys.argv[1:]]
    sys.exit(
        main(told[0] if told else 100_000, told[1] if len(told) > 1 else random.randrange(1 << 32))
    )
