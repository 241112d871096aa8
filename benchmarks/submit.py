"""What a transfer costs the thread that submits it, everything but the copying.

80 layers, 8 KiB pages of 256-byte fragments. The engine is stalled while it is timed, so that
copying threads do not compete for the cores; each round submits once and cancels afterwards,
untimed. The baseline expands one (source, destination, size) triple per fragment with numpy,
vectorised as far as it goes, which is what an engine does that hands fragments to a batched copy.

Not measured: the wake-up of a sleeping copying thread (one futex call, about 5 us), which a stalled
engine leaves out. It is printed apart, with the engine running.
"""

from __future__ import annotations

import gc
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import Report, Result, Samples, parser, spread
from vkvmap import (
    CacheView,
    LayerSpec,
    LayerTable,
    RankGrid,
    Region,
    TransferPlan,
    derive_canonical_mappings,
)
from vkvmap.sections import sections_for
from vkvmap.transfer import Engine

LAYERS, TP, BLOCK_SIZE = 80, 8, 16
FRAGMENTS = {256: 32, 64: 128, 4096: 2}  # fragment bytes -> fragments of an 8 KiB page
GOAL_FIXED_US, GOAL_PAIR_NS = 20.0, 20.0


def triples(
    caches: list[np.ndarray], bases: list[int], blocks: np.ndarray, pages: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(source, destination, size) of every fragment, int64; all layers, no Python per block."""
    fragment = caches[0].shape[-1]
    per_page = caches[0][0].size // fragment
    inside = np.arange(per_page, dtype=np.int64)
    page_bytes = per_page * fragment
    near = (blocks[:, None] * page_bytes + inside * fragment).ravel()
    far = (pages[:, None] * page_bytes * TP * LAYERS + inside * fragment * TP).ravel()
    src = np.concatenate([cache.ctypes.data + near for cache in caches])
    dst = np.concatenate([base + far for base in bases])
    return src, dst, np.full(len(src), fragment, np.int64)


def timed(run: object, rounds: int, after: object) -> Samples:
    samples = Samples()
    gc.disable()
    for _ in range(rounds + 3):
        start = time.perf_counter()
        run()  # type: ignore[operator]
        samples.seconds.append(time.perf_counter() - start)
        after()  # type: ignore[operator]
    gc.enable()
    samples.seconds = samples.seconds[3:]
    return samples


def main() -> int:
    made = parser(__doc__.splitlines()[0] if __doc__ else "")
    made.set_defaults(rounds=200)
    options = made.parse_args()
    report = Report(options.json)
    engine = Engine(1)
    met = True
    for fragment, per_page in FRAGMENTS.items():
        tokens = per_page // 2
        counts = (64, 256, 512, 1024) if fragment == 256 else (512,)
        most = max(counts)
        shape = (most, 2, tokens, 1, fragment)
        caches = [np.zeros(shape, np.uint8) for _ in range(LAYERS)]
        names = [f"model.layers.{index}" for index in range(LAYERS)]
        spec = LayerSpec.attention(names[0], num_kv_heads=TP, head_size=fragment, dtype="uint8")
        table = LayerTable([spec.renamed(name) for name in names])
        views = {
            n: CacheView.of(c, "split_nhd", tokens) for n, c in zip(names, caches, strict=True)
        }
        mappings = derive_canonical_mappings(table, views, RankGrid(tp=TP), 0, strict=True)
        sections = sections_for(mappings, tokens, most)
        with Region.create(sections, populate_threads=0) as region:
            with TransferPlan(mappings, views, region, engine=engine) as plan:
                base = region.section("0").address
                bases = [base + i * 8192 * TP for i in range(LAYERS)]
                rng = np.random.default_rng(0)
                for count in counts:
                    blocks = rng.permutation(most)[:count].astype(np.int64)
                    pages = np.arange(count, dtype=np.int64)
                    engine.stall()
                    store = timed(
                        lambda b=blocks, p=pages: plan.store((b, p)),
                        options.rounds,
                        lambda: (engine.cancel_pending(), engine.finished("store")),
                    )
                    engine.resume()
                    goal = GOAL_FIXED_US + GOAL_PAIR_NS * count / 1000
                    cost = store.median * 1e6
                    ok = cost <= goal
                    met &= ok
                    label = f"submit {count} pairs, {fragment} B fragments"
                    report.add(
                        Result(label, cost, "us", goal, cost / goal),
                        f"of the allowed {goal:.0f} us" + ("" if ok else "  OVER"),
                    )
                    if fragment != 256:
                        continue
                    expand = timed(
                        partial(triples, caches, bases, blocks, pages),
                        max(9, options.rounds // 20),
                        lambda: None,
                    )
                    shared = min(len(store.seconds), len(expand.seconds))
                    few = Samples(store.seconds[:shared])
                    least, middle, greatest = spread(Samples(expand.seconds[:shared]), few)
                    source, target, size = triples(caches, bases, blocks, pages)
                    triple_bytes = source.nbytes + target.nbytes + size.nbytes
                    met &= middle >= 100 or count < 256
                    report.add(
                        Result(
                            f"  numpy triples, {count} pairs",
                            expand.median * 1e6,
                            "us",
                            cost,
                            middle,
                        ),
                        f"slower ({least:.0f}-{greatest:.0f})",
                    )
                    fewer = triple_bytes / (16 * count)
                    met &= fewer >= 1000
                    report.add(
                        Result(
                            f"  descriptor bytes, {count} pairs",
                            16 * count,
                            "B",
                            triple_bytes,
                            fewer,
                        ),
                        f"fewer than {triple_bytes / 1e6:.1f} MB",
                    )
                if fragment == 256:
                    blocks = np.arange(1, dtype=np.int64)
                    running = []
                    for _ in range(200):
                        time.sleep(0.0005)
                        start = time.perf_counter()
                        job = plan.store((blocks, blocks))
                        running.append(time.perf_counter() - start)
                        job.wait()
                    engine.finished("store")
                    report.add(
                        Result("submit 1 pair to a sleeping engine", median(running) * 1e6, "us")
                    )
    engine.shutdown()
    report.write()
    print("every figure is reached" if met else "some figures are NOT reached")
    return 0


if __name__ == "__main__":
    sys.exit(main())
