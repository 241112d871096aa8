"""Everything there is to know about the GPU movers on one machine, in one command.

    python -m benchmarks.gpu_suite --json results.json     # under five minutes, needs a GPU
    python -m benchmarks.gpu_suite --scale 256             # tiny sizes: does it work here?
    python -m benchmarks.gpu_suite --dry-run               # the same code on the CPU, tiny sizes

Bytes are verified before anything is timed. Contenders take turns within a process; figures are
medians with their spread, ratios are against the contender or ceiling that the name says. A machine
that carries no build gets one from the checkout. What could not be measured is listed at the end.
"""

from __future__ import annotations

# Closures here run within the iteration that makes them.
# ruff: noqa: B023
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

from benchmarks.gpu_bench import DIRECTIONS, Bench, all_pages, ensure_built, strided_plan

GIB = 1 << 30
FRAGMENTS = tuple(64 << n for n in range(11))


# ---- phases --------------------------------------------------------------------------------------


def ceilings(bench: Bench) -> None:
    """Contiguous copies by the copy engines, and by the kernel."""
    nbytes = (256 << 20) // bench.scale
    cache, host = bench.memory(nbytes, host=False), bench.memory(nbytes, host=True)
    bench.fill(cache, 1)
    plan = strided_plan(bench, cache, host, 64 << 10, nbytes, spread=1)
    groups = all_pages(bench, plan)
    bench.move(bench.movers[0], plan, "store", groups)
    bench.sync()
    bench.check("ceilings", bench.numpy(host), bench.numpy(cache))
    for direction in DIRECTIONS:
        contenders: dict[str, Callable[[], object]] = {
            f"{m} contiguous": lambda m=m: bench.move(m, plan, direction, groups)
            for m in bench.movers
        }
        if not bench.dry:
            target, source = (host, cache) if direction == "store" else (cache, host)

            def copy(target: Any = target, source: Any = source) -> None:
                with bench.torch.cuda.stream(bench.stream):
                    target.copy_(source, non_blocking=True)

            contenders["one copy"] = copy
        else:
            contenders["one copy"] = lambda: bench.np.copyto(host, cache)
        taken = bench.race(contenders)
        bench.ceiling[direction] = bench.gbps(
            f"ceiling/{direction}/one copy", nbytes, taken.pop("one copy")
        )
        for name, seconds in taken.items():
            bench.gbps(f"ceiling/{direction}/{name}", nbytes, seconds, bench.ceiling[direction])


def fragment_sweep(bench: Bench) -> None:
    """Fragment lengths against every way of moving them."""
    from benchmarks.gpu_contenders import BatchedCopies, Runs, StagedCopies, TritonTriples

    most = (64 << 20) // bench.scale
    cache, host = bench.memory(most, host=False), bench.memory(2 * most, host=True)
    others: dict[str, Any] = {}
    if not bench.dry:
        makers: tuple[tuple[str, Callable[[], Any]], ...] = (
            ("batched triples", BatchedCopies),
            ("triton triples", TritonTriples),
            ("staged", lambda: StagedCopies(most)),
        )
        for name, make in makers:
            try:
                others[name] = make()
            except (ImportError, OSError, AttributeError) as error:
                bench.left_out.append(f"{name}: {error}")
    for run in FRAGMENTS:
        if not bench.time_left(8, f"fragments of {run} B"):
            return
        # Paths that pay per fragment get fewer, so that they do not eat the budget.
        plan = strided_plan(bench, cache, host, run, most)
        groups = all_pages(bench, plan)
        few = min(most, run * 16384)
        small = strided_plan(bench, cache, host, run, few)
        few = small.num_blocks(0) * max(run, min(few, 64 << 10))
        runs = Runs(cache, host, run, few // run) if not bench.dry else None
        for direction in DIRECTIONS:
            if bench.dry and direction == "load" and run > 4096:
                continue
            expected_runs = verify_sweep(bench, cache, host, run, plan, groups, direction)
            contenders: dict[str, Callable[[], object]] = {}
            sizes: dict[str, int] = {}
            for mover in bench.movers:
                light = mover == "copy_engine" and run < 4096
                carried = small if light else plan
                contenders[mover] = lambda m=mover, p=carried: bench.move(
                    m, p, direction, all_pages(bench, p)
                )
                sizes[mover] = few if light else expected_runs
            for name, contender in others.items():
                verify_contender(bench, name, contender, runs, direction)
                contenders[name] = lambda c=contender: c(runs, direction, bench.stream)
                sizes[name] = runs.nbytes
            taken = bench.race(contenders)
            first = bench.movers[0]
            value = bench.gbps(
                f"fragments/{direction}/{run}/{first}",
                sizes[first],
                taken[first],
                bench.ceiling.get(direction),
            )
            for name in list(contenders)[1:]:
                bench.gbps(f"fragments/{direction}/{run}/{name}", sizes[name], taken[name], value)


def verify_sweep(
    bench: Bench, cache: Any, host: Any, run: int, plan: Any, groups: Any, direction: str
) -> int:
    """Every mover puts every run where it belongs and touches nothing else; returns the bytes."""
    np = bench.np
    nbytes = plan.num_blocks(0) * (
        max(run, 64 << 10) if len(cache) >= 64 << 10 else max(run, len(cache))
    )
    for mover in bench.movers:
        bench.fill(cache, 2)
        bench.fill(host, 3)
        dense = bench.numpy(cache)[:nbytes].reshape(-1, run)
        apart = bench.numpy(host)[: 2 * nbytes].reshape(-1, 2 * run)
        want = apart.copy() if direction == "store" else dense.copy()
        if direction == "store":
            want[:, :run] = dense
        else:
            want[:] = apart[:, :run]
        if mover == "copy_engine" and run < 1024:
            few = np.arange(min(4, plan.num_blocks(0)), dtype=np.int64)
            part = len(want) * len(few) // plan.num_blocks(0)
            before = (apart if direction == "store" else dense).copy()
            want[part:] = before[part:]
            bench.move(mover, plan, direction, [(0, few, few)])
        else:
            bench.move(mover, plan, direction, groups)
        bench.sync()
        got = (
            bench.numpy(host)[: 2 * nbytes] if direction == "store" else bench.numpy(cache)[:nbytes]
        )
        bench.check(f"fragments/{direction}/{run}/{mover}", got.reshape(want.shape), want)
    return nbytes


def verify_contender(bench: Bench, name: str, contender: Any, runs: Any, direction: str) -> None:
    bench.fill(runs.cache, 4)
    bench.fill(runs.host, 5)
    n = runs.nbytes
    dense = bench.numpy(runs.cache)[:n].reshape(-1, runs.run)
    apart = bench.numpy(runs.host)[: n * runs.spread].reshape(-1, runs.spread * runs.run).copy()
    want = dense if direction == "store" else apart[:, : runs.run].copy()
    contender(runs, direction, bench.stream)
    bench.sync()
    if direction == "store":
        got = bench.numpy(runs.host)[: n * runs.spread].reshape(-1, runs.spread * runs.run)
        got = got[:, : runs.run]
    else:
        got = bench.numpy(runs.cache)[:n].reshape(-1, runs.run)
    bench.check(f"{name}/{direction}/{runs.run}", got, want)


def launch_sweep(bench: Bench) -> None:
    """CTAs, loads in flight and cache hints, at short and at long fragments."""
    from vkvmap import cuda

    nbytes = (64 << 20) // bench.scale
    cache, host = bench.memory(nbytes, host=False), bench.memory(2 * nbytes, host=True)
    variants = [(8, True, 256), (8, False, 256), (4, True, 256), (8, True, 128), (8, True, 512)]
    for run in (256, 4096):
        plan = strided_plan(bench, cache, host, run, nbytes)
        groups = all_pages(bench, plan)
        for direction in DIRECTIONS:
            if bench.dry:
                bench.gbps(
                    f"launch/{direction}/{run}/host",
                    nbytes,
                    bench.race({"host": lambda: bench.move("host", plan, direction, groups)})[
                        "host"
                    ],
                )
                continue
            usual = cuda.tuning(direction)
            for ctas in (1, 2, 4, 8, 16, 32):
                for unroll, stream_hints, threads in variants if ctas == 8 else variants[:3]:
                    if not bench.time_left(1, f"launch sweep, {ctas} CTAs, {run} B, {direction}"):
                        cuda.set_tuning(direction, usual)
                        return
                    tuning = cuda.KernelTuning(ctas, threads, unroll, stream_hints)
                    cuda.set_tuning(direction, tuning)
                    taken = bench.race({"k": lambda: bench.move("kernel", plan, direction, groups)})
                    hint = "stream" if stream_hints else "plain"
                    bench.gbps(
                        f"launch/{direction}/{run}/{ctas} ctas {threads} threads u{unroll} {hint}",
                        nbytes,
                        taken["k"],
                        bench.ceiling.get(direction),
                    )
            cuda.set_tuning(direction, usual)


def pools(bench: Bench) -> None:
    """Host pools beyond what address translation caches reach; pages at random places of them."""
    if bench.dry:
        bench.left_out.append("pools: need a GPU")
        return
    import mmap

    from vkvmap import _C

    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    page, cache_bytes = 64 << 10, (256 << 20) // bench.scale
    cache = bench.memory(cache_bytes, host=False)
    for gib in (1, 8, 48):
        nbytes = gib * GIB // bench.scale
        if nbytes * 1.25 > free:
            bench.left_out.append(f"pool of {gib} GiB: {free / GIB:.0f} GiB of memory are free")
            continue
        if not bench.time_left(6 + 1.2 * gib, f"pool of {gib} GiB"):
            continue
        pool = mmap.mmap(-1, nbytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pool.madvise(mmap.MADV_HUGEPAGE)
        view = bench.np.frombuffer(pool, bench.np.uint8)
        touch = bench.np.arange(0, nbytes, 4096)
        view[touch] = 1
        registration = _C.cuda.Registration([(view.ctypes.data, nbytes, 2 * page)])
        if not registration.pinned:
            bench.left_out.append(f"pool of {gib} GiB: {registration.why_not}")
            continue
        rows = nbytes // (2 * page)
        for run in (256, 4096):
            plan = _pool_plan(cache, cache_bytes, view, rows, page, run)
            rng = bench.np.random.default_rng(run)
            blocks = bench.np.arange(cache_bytes // page, dtype=bench.np.int64)
            places = rng.choice(rows, len(blocks), replace=False).astype(bench.np.int64)
            for direction in DIRECTIONS:
                taken = bench.race(
                    {"k": lambda: bench.move("kernel", plan, direction, [(0, blocks, places)])}
                )
                bench.gbps(
                    f"pool/{gib} GiB/{direction}/{run}",
                    cache_bytes,
                    taken["k"],
                    bench.ceiling.get(direction),
                )
        registration.release()
        del view


def _pool_plan(cache: Any, nbytes: int, view: Any, rows: int, page: int, run: int) -> Any:
    """A plan whose region has many more rows than the cache has blocks."""
    from vkvmap import _C
    from vkvmap.boxes import Box
    from vkvmap.mapping import CopyRun
    from vkvmap.pack import PlacedLayer, pack
    from vkvmap.recognise import PageAddressing

    runs = (CopyRun(0, 0, run, page // run, run, 2 * run),)
    at = cache.data_ptr()
    addressing = PageAddressing(at, page, nbytes // page, page, (Box(0, 0, ((page, 1, 1),)),))
    layer = PlacedLayer(
        0, 0, runs, runs, 1, 0, addressing, view.ctypes.data, 2 * page, 2 * page, 1, rows
    )
    ranges = [(at, nbytes)], [(view.ctypes.data, rows * 2 * page)]
    return _C.Plan(pack([layer], 1), *ranges, ["pool"])


def model_shapes(bench: Bench) -> None:
    """Real models, all layers: what a serving engine would see."""
    from benchmarks.model_shapes import SHAPES, PlacedShape
    from vkvmap.transfer import Engine

    for shape in SHAPES:
        if not bench.time_left(12, f"model {shape.name}"):
            return
        blocks = 4 if bench.small else 64
        layers = 4 if bench.small else None
        placed = PlacedShape(shape, blocks, blocks, layers=layers)
        cache, host = (
            bench.memory(placed.cache_bytes, host=False),
            bench.memory(placed.region_bytes, host=True),
        )
        plan = placed.plan(bench.address(cache), bench.address(host))
        ids = bench.np.arange(blocks, dtype=bench.np.int64)
        groups = [(g, ids, ids[::-1].copy()) for g in range(len(placed.groups))]
        # The host mover on copies of the same bytes says what is right.
        bench.fill(cache, 6)
        bench.fill(host, 7)
        dry_cache, dry_host = (bench.numpy(m).copy() for m in (cache, host))
        reference = placed.plan(dry_cache.ctypes.data, dry_host.ctypes.data)
        engine = Engine(threads=2)
        for direction in DIRECTIONS:
            job = engine.submit(reference, DIRECTIONS.index(direction), groups, mover="host")
            job.wait()
            bench.move(bench.movers[0], plan, direction, groups)
            bench.sync()
            for got, want in ((cache, dry_cache), (host, dry_host)):
                bench.check(f"model/{shape.name}/{direction}", bench.numpy(got), want)
        engine.shutdown()
        for direction in DIRECTIONS:
            moved = _bytes_of(bench, plan, direction, groups)
            taken = bench.race(
                {m: lambda m=m: bench.move(m, plan, direction, groups) for m in bench.movers}
            )
            for mover, seconds in taken.items():
                bench.gbps(
                    f"model/{shape.name}/{direction}/{mover}",
                    moved,
                    seconds,
                    bench.ceiling.get(direction),
                )


def _bytes_of(bench: Bench, plan: Any, direction: str, groups: Any) -> int:
    """Bytes of a transfer, the writer election applied: as the engine counts them."""
    mover = bench.movers[0]
    job = bench.engine.submit(plan, DIRECTIONS.index(direction), groups, mover=mover)
    return int(job.check()["bytes"])


def corunning(bench: Bench) -> None:
    """How much a matrix product slows down while transfers run beside it."""
    if bench.dry:
        bench.left_out.append("co-running matrix product: needs a GPU")
        return
    from benchmarks.harness import Result
    from vkvmap import cuda

    torch = bench.torch
    nbytes, side = (256 << 20) // bench.scale, 256 if bench.small else 8192
    cache, host = bench.memory(nbytes, host=False), bench.memory(2 * nbytes, host=True)
    plan = strided_plan(bench, cache, host, 512, nbytes)
    groups = all_pages(bench, plan)
    a, b = (torch.randn(side, side, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    compute = torch.cuda.Stream()

    def product() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(compute):
            begin.record()
            for _ in range(4):
                torch.mm(a, b)
            end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    for direction in DIRECTIONS:
        usual = cuda.tuning(direction)
        for mover, ctas in (("kernel", 4), ("kernel", 8), ("kernel", 16), ("copy_engine", 0)):
            if not bench.time_left(3, f"co-running, {mover}, {ctas} CTAs"):
                return
            if ctas:
                cuda.set_tuning(direction, cuda.KernelTuning(ctas=ctas))
            alone, beside = [], []
            for turn in range(bench.rounds + 1):
                quiet = product()
                pages = groups if mover == "kernel" else [(0, *(i[:64] for i in groups[0][1:]))]
                for _ in range(4):
                    bench.move(mover, plan, direction, pages)
                busy = product()
                bench.sync()
                if turn:
                    alone.append(quiet)
                    beside.append(busy)
            cuda.set_tuning(direction, usual)
            name = f"co-running/{direction}/{mover}" + (f" {ctas} ctas" if ctas else "")
            ratio = median(beside) / median(alone)
            bench.report.add(Result(name, median(beside), "ms", median(alone), ratio))


def small_transfers(bench: Bench) -> None:
    """Latency of 1 to 64 blocks of an 80-layer model, through the engine."""
    from benchmarks.harness import Result
    from benchmarks.model_shapes import SHAPES, PlacedShape

    shape = next(s for s in SHAPES if s.name == "Llama-3-70B tp8")
    blocks = 64
    placed = PlacedShape(shape, blocks, blocks, layers=4 if bench.small else None)
    cache, host = (
        bench.memory(placed.cache_bytes, host=False),
        bench.memory(placed.region_bytes, host=True),
    )
    plan = placed.plan(bench.address(cache), bench.address(host))
    for count in (1, 4, 16, 64):
        if not bench.time_left(2, f"transfers of {count} blocks"):
            return
        ids = bench.np.arange(count, dtype=bench.np.int64)
        for direction in DIRECTIONS:
            for mover in bench.movers:
                taken = []
                for turn in range(4 * bench.rounds):
                    start = time.perf_counter()
                    bench.engine.submit(
                        plan, DIRECTIONS.index(direction), [(0, ids, ids)], mover=mover
                    ).wait()
                    if turn:
                        taken.append(time.perf_counter() - start)
                name = f"small/{direction}/{count} blocks/{mover}"
                bench.report.add(Result(name, median(taken) * 1e6, "us"))


def submit_cost(bench: Bench) -> None:
    """What a serving loop pays on its own thread per transfer."""
    from benchmarks.harness import Result
    from benchmarks.model_shapes import SHAPES, PlacedShape

    shape = next(s for s in SHAPES if s.name == "Llama-3-70B tp8")
    blocks = 64 if bench.small else 1024
    placed = PlacedShape(shape, blocks, blocks, layers=4 if bench.small else None)
    cache, host = (
        bench.memory(placed.cache_bytes, host=False),
        bench.memory(placed.region_bytes, host=True),
    )
    plan = placed.plan(bench.address(cache), bench.address(host))
    for count in (16, 64, 256, 1024):
        if count > blocks or not bench.time_left(3, f"submit of {count} blocks"):
            continue
        ids = bench.np.arange(count, dtype=bench.np.int64)
        for mover in bench.movers:
            taken = []
            for turn in range(3 * bench.rounds):
                start = time.perf_counter()
                job = bench.engine.submit(plan, 1, [(0, ids, ids)], mover=mover)
                elapsed = time.perf_counter() - start
                job.wait()
                if turn:
                    taken.append(elapsed)
            budget = 20 + 0.02 * count
            value = median(taken) * 1e6
            name = f"submit/{count} blocks/{mover}"
            bench.report.add(Result(name, value, "us", budget, value / budget))


PHASES: dict[str, Callable[[Bench], None]] = {
    "ceilings": ceilings,
    "fragments": fragment_sweep,
    "models": model_shapes,
    "launch": launch_sweep,
    "corunning": corunning,
    "small": small_transfers,
    "submit": submit_cost,
    "pools": pools,
}


@contextmanager
def said(bench: Bench, name: str) -> Iterator[None]:
    start = time.monotonic()
    print(f"-- {name}", flush=True)
    yield
    print(f"-- {name}: {time.monotonic() - start:.1f} s", flush=True)


def summary(bench: Bench) -> str:
    """A short table: the figures that decide, last, so that a tail of the output has them."""
    rows = {r.name: r for r in bench.report.results}
    lines = [f"{'fragment':>8} {'store GB/s':>11} {'of copy':>8} {'load GB/s':>10} {'of copy':>8}"]
    first = bench.movers[0]
    for run in FRAGMENTS:
        cells = [rows.get(f"fragments/{d}/{run}/{first}") for d in DIRECTIONS]
        if any(cells):
            lines.append(
                f"{run:8d}"
                + "".join(
                    f" {c.value:10.1f} {c.ratio or 0:8.0%}" if c else f" {'-':>10} {'-':>8}"
                    for c in cells
                )
            )
    lines += ["not measured:", *(f"  {what}" for what in bench.left_out or ["nothing"])]
    return "\n".join(lines)


def main() -> None:
    if "--dry-run" not in sys.argv:
        ensure_built()
    harness = importlib.import_module("benchmarks.harness")
    options = harness.parser(__doc__ or "")
    options.add_argument("--dry-run", action="store_true", help="run on the CPU, tiny sizes")
    options.add_argument("--phases", default=",".join(PHASES), help="comma-separated; default all")
    options.add_argument(
        "--scale", type=int, help="divide sizes, to see whether it works (1; 256 in a dry run)"
    )
    options.add_argument("--seconds", type=float, default=270, help="budget (default %(default)s)")
    given = options.parse_args()
    from vkvmap import cuda

    if not given.dry_run and not cuda.is_available():
        raise SystemExit(f"no GPU to measure: {cuda.why_not()}. Try --dry-run")
    report = harness.Report(given.json)
    if not given.dry_run:
        print("devices:", *(f"{d.name} at {d.pci_bus_id}" for d in cuda.devices()))
    scale = given.scale or (256 if given.dry_run else 1)
    if scale > 1:
        print(f"sizes are divided by {scale}: figures say that it works, not how fast it is")
    bench = Bench(given.dry_run, report, given.seconds, scale)
    wanted = given.phases.split(",")
    unknown = [name for name in wanted if name not in PHASES]
    if unknown:
        raise SystemExit(f"unknown phases {unknown}; there are {', '.join(PHASES)}")
    for name in wanted:
        if bench.time_left(5, name):
            with said(bench, name):
                PHASES[name](bench)
            report.write()
    bench.engine.shutdown()
    print(summary(bench))


if __name__ == "__main__":
    main()
