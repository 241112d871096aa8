"""The host mover against memcpy, and against what numpy and torch make of the same mapping.

One rank of eight stores its pages into canonical rows eight times their size and loads them back:
fragments of one head, eight heads apart; at 64 bytes also with padded rows; and, at 256 bytes, one
rank that has all heads and keeps K and V apart, into rows of the universal family, where they lie
together. Blocks are permuted, as an engine leaves them. Working sets are far beyond the last-level
cache, every byte is compared before anything is timed, and contenders take turns in one process.

``memcpy`` copies as many bytes with as many threads, contiguously, between the same two memories.
numpy and torch are given the same block lists, each in every way it offers; the fastest counts.

Not measured: several sockets (NUMA), and other processes that use the memory at the same time.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import Report, Result, Samples, interleaved, parser, spread
from vkvmap import (
    _C,
    CacheView,
    LayerSpec,
    LayerTable,
    RankGrid,
    Region,
    TransferPlan,
    derive_canonical_mappings,
)
from vkvmap.region_backing import available_memory
from vkvmap.region_memory import HUGE_PAGE
from vkvmap.sections import sections_for
from vkvmap.transfer import Engine

TP, RANK, BLOCK_SIZE = 8, 3, 16
MIB = 1 << 20
#: Fragment bytes -> least ratio to memcpy, per direction.
GOALS = {
    "store": {64: 0.75, 128: 1.0, 256: 1.0, 512: 1.0, 1024: 1.0, 4096: 1.0},
    "load": {64: 0.5, 128: 0.5, 256: 0.6, 512: 0.6, 1024: 0.6, 4096: 0.9},
}
LIBRARY_GOALS = {"store": 2.5, "load": 1.5}
ROW_PADDING = 256
GROWTH_MIB = (64, 256, 1024, 2048, 4096, 8192)


@dataclass
class World:
    """One rank's caches, the region, and the plan between them."""

    caches: list[np.ndarray]  # (blocks, 2, BLOCK_SIZE, heads, fragment) uint8
    tp: int
    region: Region
    plan: TransferPlan
    blocks: np.ndarray
    pages: np.ndarray

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self.caches)

    def canonical(self, layer: int) -> np.ndarray:
        """The rank's part of one layer's canonical pages, with the axes of its cache."""
        cache = self.caches[layer]
        fragment = cache.shape[-1]
        rows = self.region.view[self._offset : self._offset + self._row_stride * len(self.pages)]
        page = 2 * BLOCK_SIZE * TP * fragment
        of_layer = rows.reshape(len(self.pages), -1)[:, layer * page : (layer + 1) * page]
        if self.tp == 1:  # universal: [token][head][K, V]
            return of_layer.reshape(-1, BLOCK_SIZE, TP, 2, fragment).transpose(0, 3, 1, 2, 4)
        return of_layer.reshape(-1, 2, BLOCK_SIZE, TP, fragment)[:, :, :, RANK : RANK + 1]

    @property
    def _offset(self) -> int:
        return int(self.region.section("0").address - self.region.address)

    @property
    def _row_stride(self) -> int:
        return int(self.region.section("0").row_stride)

    def store(self) -> None:
        self.plan.store((self.blocks, self.pages)).check()

    def load(self) -> None:
        self.plan.load((self.blocks, self.pages)).check()

    def verify(self) -> None:
        """Store and load, and compare every byte with a plain strided assignment."""
        generator = np.random.default_rng(1)
        for cache in self.caches:
            cache[:] = generator.integers(0, 256, cache.shape, dtype=np.uint8)
        self.region.view[self._offset :] = 0xA5
        self.store()
        moved = 0
        for layer, cache in enumerate(self.caches):
            canonical = self.canonical(layer)
            for block, page in zip(self.blocks.tolist(), self.pages.tolist(), strict=True):
                assert np.array_equal(canonical[page], cache[block])
                moved += int(np.count_nonzero(cache[block] != 0xA5))
        # What is not the rank's has kept its poison.
        assert np.count_nonzero(self.region.view[self._offset :] != 0xA5) == moved
        kept = [cache.copy() for cache in self.caches]
        for cache in self.caches:
            cache[:] = 0
        self.load()
        for cache, before in zip(self.caches, kept, strict=True):
            assert np.array_equal(cache, before)


def cache_memory(layers: int, nbytes: int, small: bool) -> list[np.ndarray]:
    """Room for each layer's cache, in one mapping: huge pages or small ones, whatever its size.

    numpy asks for huge pages from 4 MiB on, which would make them depend on the number of layers.
    """
    each = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, layers * each + HUGE_PAGE)
    with suppress(OSError):  # a system without huge pages does not know the word
        memory.madvise(mmap.MADV_NOHUGEPAGE if small else mmap.MADV_HUGEPAGE)
    room = np.frombuffer(memory, np.uint8)
    start = -room.ctypes.data % HUGE_PAGE
    return [room[start + layer * each :][:nbytes] for layer in range(layers)]


@contextmanager
def world(
    fragment: int,
    nbytes: int,
    layers: int,
    engine: Engine,
    small: bool = False,
    tp: int = TP,
    padding: int = 0,
) -> Iterator[World]:
    heads = TP // tp
    page = 2 * BLOCK_SIZE * heads * fragment
    count = max(1, nbytes // (page * layers))
    shape = (count, 2, BLOCK_SIZE, heads, fragment)
    caches = [room.reshape(shape) for room in cache_memory(layers, count * page, small)]
    names = [f"model.layers.{index}" for index in range(layers)]
    spec = LayerSpec.attention(names[0], num_kv_heads=TP, head_size=fragment, dtype="uint8")
    table = LayerTable([spec.renamed(name) for name in names])
    views = {
        name: CacheView.of(cache, "split_nhd", BLOCK_SIZE)
        for name, cache in zip(names, caches, strict=True)
    }
    mappings = derive_canonical_mappings(
        table,
        views,
        RankGrid(tp=tp),
        RANK if tp > 1 else 0,
        family="universal" if tp == 1 else "native",
        strict=True,
    )
    sections = sections_for(mappings, BLOCK_SIZE, count, row_padding=padding)
    with Region.create(sections, huge_pages=None if small else "transparent") as region:
        with TransferPlan(mappings, views, region, engine=engine) as plan:
            blocks = np.random.default_rng(0).permutation(count).astype(np.int64)
            yield World(caches, tp, region, plan, blocks, np.arange(count, dtype=np.int64))


def memcpy(pool: ThreadPoolExecutor, threads: int, world: World, store: bool) -> None:
    """The same bytes in one piece per layer and thread; the GIL is released meanwhile."""
    base = world.region.address + world._offset
    jobs = []
    for cache in world.caches:
        here, there = cache.ctypes.data, base
        base += cache.nbytes
        piece = cache.nbytes // threads
        for thread in range(threads):
            size = piece if thread + 1 < threads else cache.nbytes - piece * thread
            src, dst = (here, there) if store else (there, here)
            jobs.append(
                pool.submit(ctypes.memmove, dst + piece * thread, src + piece * thread, size)
            )
    for job in jobs:
        job.result()


def libraries(world: World, threads: int, store: bool) -> dict[str, Callable[[], object]]:
    """The same block lists with numpy on one thread and torch on as many as the mover has.

    Each the fastest of what it offers: one indexed assignment per layer, or one strided copy per
    page. "in order" gives the lists up and copies a layer as one strided assignment; no engine has
    its blocks in order, so it only says how far the library's copying itself goes.
    """
    import torch

    torch.set_num_threads(threads)
    sides = [
        (cache[:, :, :, 0], world.canonical(layer)[:, :, :, 0])
        for layer, cache in enumerate(world.caches)
    ]
    blocks, pages = world.blocks, world.pages
    paired = list(zip(blocks.tolist(), pages.tolist(), strict=True))

    def numpy_indexed() -> None:
        for near, far in sides:
            if store:
                far[pages] = near[blocks]
            else:
                near[blocks] = far[pages]

    def numpy_pages() -> None:
        for near, far in sides:
            for block, page in paired:
                if store:
                    far[page] = near[block]
                else:
                    near[block] = far[page]

    def numpy_in_order() -> None:
        for near, far in sides:
            np.copyto(far if store else near, near if store else far)

    tensors = [
        (torch.from_numpy(near).view(torch.int64), torch.from_numpy(far).view(torch.int64))
        for near, far in sides
    ]
    torch_blocks, torch_pages = torch.from_numpy(blocks), torch.from_numpy(pages)

    def torch_indexed() -> None:
        for near, far in tensors:
            if store:
                far.index_copy_(0, torch_pages, near.index_select(0, torch_blocks))
            else:
                near.index_copy_(0, torch_blocks, far.index_select(0, torch_pages))

    def torch_put() -> None:
        for near, far in tensors:
            if store:
                far[torch_pages] = near[torch_blocks]
            else:
                near[torch_blocks] = far[torch_pages]

    def torch_pages_one_by_one() -> None:
        for near, far in tensors:
            for block, page in paired:
                if store:
                    far[page].copy_(near[block])
                else:
                    near[block].copy_(far[page])

    def torch_in_order() -> None:
        for near, far in tensors:
            (far if store else near).copy_(near if store else far)

    return {
        "numpy, indexed": numpy_indexed,
        "numpy, page by page": numpy_pages,
        "torch, indexed": torch_indexed,
        "torch, index_put": torch_put,
        "torch, page by page": torch_pages_one_by_one,
        "numpy, in order": numpy_in_order,
        "torch, in order": torch_in_order,
    }


@dataclass(frozen=True)
class Case:
    """Fragments of so many bytes, by one of `tp` ranks, into rows with so much padding."""

    fragment: int
    tp: int = TP
    padding: int = 0

    def __str__(self) -> str:
        family = "" if self.tp == TP else ", universal"
        return f"{self.fragment} B{family}" + (", padded rows" if self.padding else "")


def cases(fragments: list[int], padding: int) -> list[Case]:
    every = [Case(fragment, padding=padding) for fragment in fragments]
    if 64 in fragments and not padding:
        every.append(Case(64, padding=ROW_PADDING))
    if 256 in fragments:
        every.append(Case(256, tp=1, padding=padding))
    return every


def against_memcpy(report: Report, options: Any, threads: int) -> bool:
    met = True
    engine = Engine(threads)
    with ThreadPoolExecutor(threads) as pool:
        for case in cases(options.fragments, options.row_padding):
            with world(
                case.fragment,
                options.mib * MIB,
                options.layers,
                engine,
                options.small_pages,
                case.tp,
                case.padding,
            ) as here:
                here.verify()
                for direction in ("store", "load"):
                    store = direction == "store"
                    contenders: dict[str, Callable[[], object]] = {
                        "memcpy": lambda store=store: memcpy(pool, threads, here, store),
                        "mover": here.store if store else here.load,
                    }
                    if (case.fragment, case.tp) == (256, TP):
                        contenders |= libraries(here, threads, store)
                    taken = interleaved(contenders, rounds=options.rounds)
                    met &= tell(report, here, direction, case, threads, taken)
    engine.shutdown()
    return met


def tell(
    report: Report,
    here: World,
    direction: str,
    case: Case,
    threads: int,
    taken: dict[str, Samples],
) -> bool:
    least, middle, greatest = spread(taken["memcpy"], taken["mover"])
    goal = GOALS[direction].get(case.fragment, 0.0)
    speed = here.nbytes / taken["mover"].median / 1e9
    base = here.nbytes / taken["memcpy"].median / 1e9
    verdict = "" if middle >= goal else f"  SHORT of {goal:g}"
    report.add(
        Result(f"{direction}, {case}, {threads} thread(s)", speed, "GB/s", base, middle),
        f"of memcpy's {base:.1f} GB/s ({least:.2f}-{greatest:.2f}){verdict}",
    )
    met = middle >= goal
    for in_order in (False, True):
        rest = {
            name: samples
            for name, samples in taken.items()
            if name not in ("memcpy", "mover") and name.endswith("in order") is in_order
        }
        if not rest:
            continue
        best = min(rest, key=lambda name: rest[name].median)
        least, middle, greatest = spread(rest[best], taken["mover"])
        base = here.nbytes / rest[best].median / 1e9
        enough = in_order or middle >= LIBRARY_GOALS[direction]
        met &= enough
        name = f"{direction}, {case}, {threads} thread(s), against {best}"
        report.add(
            Result(name, speed, "GB/s", base, middle),
            f"of its {base:.1f} GB/s ({least:.2f}-{greatest:.2f})" + ("" if enough else "  SHORT"),
        )
    return met


def growth(report: Report, options: Any) -> bool:
    """Nanoseconds per KiB as bytes and layers grow; the first of each series is the baseline.

    One rank has all heads and stores them token by token (universal), so that both sides are as
    large as what is moved, in fragments of one head.
    """
    available = available_memory()
    engine = Engine(1)
    met = True
    # Both sides, and a little.
    sizes = [size for size in options.sizes if size * MIB * 2.1 < available]
    series = {
        "bytes": [(size, 1) for size in sizes],
        "layers": [(256, layers) for layers in (1, 8, 40, 80)],
    }
    for what, points in series.items():
        for direction in ("store", "load"):
            first = None
            for size, layers in points:
                with world(256, size * MIB, layers, engine, options.small_pages, tp=1) as here:
                    for cache in here.caches:
                        cache.fill(7)  # untouched memory is one page of zeros, read from a cache
                    here.store()
                    if size == 64:
                        here.verify()
                    run = here.store if direction == "store" else here.load
                    run()
                    rounds = max(3, min(options.rounds * 2, 16384 // size))
                    cost = interleaved({"mover": run}, rounds=rounds)["mover"].median
                    per_kib = cost / here.nbytes * 1024 * 1e9
                first = per_kib if first is None else first
                ratio = per_kib / first
                met &= ratio <= 1.15
                report.add(
                    Result(
                        f"{direction} by {what}: {size} MiB, {layers} layer(s)",
                        per_kib,
                        "ns/KiB",
                        first,
                        ratio,
                    ),
                    "" if ratio <= 1.15 else "  NOT FLAT (1.15)",
                )
    left_out = [size for size in options.sizes if size not in sizes]
    if left_out:
        print(f"not measured, memory does not allow: {left_out} MiB")
    engine.shutdown()
    return met


def warm(report: Report, options: Any) -> None:
    """Where streaming starts to pay: one small transfer again and again, both ways to write."""
    usual = _C.host_streaming_bytes()
    engine = Engine(1)
    try:
        for kib in (256, 1024, 2048, 4096, 8192, 16384, 32768):
            with world(256, kib * 1024, 1, engine) as here:
                for direction in ("store", "load"):
                    run = here.store if direction == "store" else here.load

                    def streamed(run: Callable[[], object] = run) -> None:
                        _C.set_host_streaming_bytes(0)
                        run()

                    def cached(run: Callable[[], object] = run) -> None:
                        _C.set_host_streaming_bytes(1 << 62)
                        run()

                    for name, contender in (("streamed", streamed), ("cached", cached)):
                        taken = interleaved({name: contender}, rounds=50)[name].median
                        report.add(
                            Result(
                                f"warm {direction} of {kib} KiB, {name}",
                                here.nbytes / taken / 1e9,
                                "GB/s",
                            )
                        )
    finally:
        _C.set_host_streaming_bytes(usual)
        engine.shutdown()
    print(f"in use: streaming from {usual // 1024} KiB on")


def main() -> int:
    options_parser = parser(__doc__.splitlines()[0] if __doc__ else "")
    options_parser.add_argument("--mib", type=int, default=256, help="cache size (%(default)s)")
    options_parser.add_argument("--layers", type=int, default=16, help="(%(default)s)")
    options_parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    options_parser.add_argument(
        "--fragments", type=int, nargs="+", default=[64, 128, 256, 512, 1024, 4096]
    )
    options_parser.add_argument(
        "--small-pages",
        action="store_true",
        help="caches in pages of 4 KiB, the region in the system's",
    )
    options_parser.add_argument(
        "--row-padding", type=int, default=0, metavar="BYTES", help="of all rows (%(default)s)"
    )
    options_parser.add_argument("--growth", action="store_true", help="cost per byte as it grows")
    options_parser.add_argument(
        "--sizes", type=int, nargs="+", default=GROWTH_MIB, metavar="MIB", help="for --growth"
    )
    options_parser.add_argument("--warm", action="store_true", help="data that caches hold")
    options = options_parser.parse_args()
    report = Report(options.json)
    print(f"instruction set: {_C.instruction_set()}; ratios are medians (least-greatest)")
    met = True
    if options.warm:
        warm(report, options)
    elif options.growth:
        met = growth(report, options)
    else:
        for threads in options.threads:
            met &= against_memcpy(report, options, threads)
    report.write()
    print("every figure is reached" if met else "some figures are NOT reached")
    return 0


if __name__ == "__main__":
    sys.exit(main())
